/* Tests examples/extras/moe_report.h: SVG and HTML by a small parser of its own, text by its lines;
   escaping, odd numbers and sizes, contrast of the colors, the same bytes twice, streams that fail
   at each write, arguments, figures of metrics, histories.
       cc -std=c99 -O2 -I. tests/unit/report.c -o report -lm && ./report
   ./report page FILE writes a page of all kinds to look at (tests/port/browser.sh). Also meant to
   pass with -DMOE_REAL=double. */

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../all.h"
#include "../test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static double none(void) {
    volatile double zero = 0;
    return zero / zero;
}

/* ---- what is written ---- */

enum { SVG, HTML, TEXT, COLOR, FORMS };
static char *written; /* by the last call of write_as, ended by 0 */
static size_t written_size;
static int quiet; /* the parser says nothing */

static moe_status write_form(const moe_figure *f, int form, moe_stream *stream, moe_error *error) {
    if (form == SVG) return moe_report_svg(f, stream, error);
    if (form == HTML) return moe_report_html("Title", f, 1, stream, error);
    return moe_report_text(f, 0, form == COLOR, stream, error);
}

static moe_status write_as(const moe_figure *f, int form) {
    moe_buffer buffer;
    moe_stream stream;
    moe_error error;
    moe_status status;
    memset(&buffer, 0, sizeof buffer);
    stream = moe_buffer_stream(&buffer);
    status = write_form(f, form, &stream, &error);
    free(written);
    written = (char *)calloc(buffer.size + 1, 1);
    written_size = buffer.size;
    if (written == NULL) exit(2);
    if (buffer.size > 0) memcpy(written, buffer.data, buffer.size);
    moe_buffer_free(&buffer);
    return status;
}

static int holds(const char *text) { return strstr(written, text) != NULL; }

/* ---- a parser for what pages and pictures may be made of ---- */

enum { DEEPEST = 40 };
typedef struct parser {
    const char *at, *wrong;
    char open[DEEPEST][24];
    int depth, html;
    long elements, ids;
    char id[2000][12];
} parser;

static int is_name(int c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == ':';
}

/* Text up to end: no bare & or <, only characters that XML has, in UTF-8. */
static void parse_text(parser *p, char end) {
    static const char *const entities[] = {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"};
    while (*p->at != end && *p->at != '\0' && p->wrong == NULL) {
        const unsigned char *s = (const unsigned char *)p->at;
        int more = *s < 0x80                 ? 0
                   : *s >= 0xC2 && *s < 0xE0 ? 1
                   : *s >= 0xE0 && *s < 0xF0 ? 2
                   : *s >= 0xF0 && *s < 0xF5 ? 3
                                             : -1,
            i;
        if (*s == '&') {
            for (i = 0; i < 5 && strncmp(p->at, entities[i], strlen(entities[i])) != 0;) i++;
            if (i == 5) p->wrong = "a bare &";
        }
        if (*s == '<' || (*s < 0x20 && *s != '\n') || *s == 0x7F || more < 0)
            p->wrong = "a character that must not be there";
        if (more == 2 && s[0] == 0xEF && s[1] == 0xBF && s[2] >= 0xBE) p->wrong = "U+FFFE or U+FFFF";
        if (more == 1 && s[0] == 0xC2 && s[1] < 0xA0) p->wrong = "a control character";
        if (more == 2 && s[0] == 0xE2 && s[1] == 0x80 && s[2] >= 0xAA && s[2] <= 0xAE)
            p->wrong = "the direction of writing is turned";
        for (i = 1; i <= more && p->wrong == NULL; i++)
            if ((s[i] & 0xC0) != 0x80) p->wrong = "no UTF-8";
        p->at += more < 0 ? 1 : more + 1;
    }
}

static void parse_word(parser *p, char *word, size_t room) {
    size_t n = 0;
    while (is_name((unsigned char)*p->at) && n + 1 < room) word[n++] = *p->at++;
    word[n] = '\0';
    if (n == 0) p->wrong = "a name is missing";
}

/* Whether seven digits stand in a row. */
static int has_long_number(const char *from, const char *to) {
    int run = 0;
    for (; from < to && run < 7; from++) run = *from >= '0' && *from <= '9' ? run + 1 : 0;
    return run == 7;
}

/* name="value" ...; ids are kept and must be new. */
static void parse_attributes(parser *p) {
    char name[24], seen[24][24];
    const char *value;
    int n = 0, i;
    while (*p->at == ' ' && p->wrong == NULL) {
        while (*p->at == ' ') p->at++;
        if (*p->at == '/' || *p->at == '>') break;
        parse_word(p, name, sizeof name);
        for (i = 0; i < n; i++)
            if (strcmp(seen[i], name) == 0) p->wrong = "an attribute stands twice";
        if (n < 24) strcpy(seen[n++], name);
        if (p->wrong != NULL || p->at[0] != '=' || p->at[1] != '"') {
            p->wrong = "an attribute without a quoted value";
            break;
        }
        p->at += 2;
        if (strcmp(name, "id") == 0 && p->ids < 2000) {
            size_t length = strcspn(p->at, "\"");
            sprintf(p->id[p->ids], "%.*s", (int)(length < 11 ? length : 11), p->at);
            for (i = 0; i < p->ids; i++)
                if (strcmp(p->id[i], p->id[p->ids]) == 0) p->wrong = "an id stands twice";
            p->ids++;
        }
        if (strcmp(name, "src") == 0 || strcmp(name, "href") == 0 || strncmp(name, "on", 2) == 0)
            p->wrong = "something is fetched or run";
        value = p->at;
        parse_text(p, '"');
        if (strncmp(name, "aria", 4) != 0 && has_long_number(value, p->at)) p->wrong = "a coordinate far away";
        if (*p->at++ != '"') p->wrong = "a value does not end";
    }
}

/* What is wrong with an XML or HTML file as these here are; NULL: nothing. */
static const char *parse(int html) {
    static parser p;
    char name[24];
    memset(&p, 0, sizeof p);
    p.at = written;
    p.html = html;
    if (html && strncmp(p.at, "<!DOCTYPE html>\n", 16) == 0) p.at += 16;
    while (p.wrong == NULL && *p.at != '\0') {
        if (*p.at != '<') {
            parse_text(&p, '<');
            if (p.depth == 0 && p.at[-1] != '\n') p.wrong = "text outside";
        } else if (p.at[1] == '/') {
            p.at += 2;
            parse_word(&p, name, sizeof name);
            if (p.depth == 0 || strcmp(p.open[--p.depth], name) != 0 || *p.at++ != '>')
                p.wrong = "an end without its beginning";
        } else {
            int empty;
            p.at++;
            parse_word(&p, name, sizeof name);
            if (strcmp(name, "script") == 0 || strcmp(name, "link") == 0 || strcmp(name, "img") == 0 ||
                strcmp(name, "iframe") == 0)
                p.wrong = "foreign things";
            parse_attributes(&p);
            empty = *p.at == '/' || (html && (strcmp(name, "meta") == 0 || strcmp(name, "br") == 0));
            p.at += *p.at == '/';
            if (p.wrong == NULL && *p.at++ != '>') p.wrong = "a tag does not end";
            if (!empty && p.depth < DEEPEST) strcpy(p.open[p.depth++], name);
            if (p.depth == DEEPEST) p.wrong = "too deep";
            p.elements++;
        }
    }
    if (p.wrong != NULL && !quiet) printf("%s: %.60s\n", p.wrong, p.at > written + 20 ? p.at - 20 : written);
    if (p.wrong == NULL && p.depth > 0) p.wrong = "something is not closed";
    return p.wrong;
}

/* The longest line, in characters, of ASCII text without colors. */
static size_t longest_line(void) {
    size_t most = 0, length = 0, i;
    for (i = 0; i < written_size; i++) {
        length = written[i] == '\n' ? 0 : length + ((written[i] & 0xC0) != 0x80);
        if (length > most) most = length;
    }
    return most;
}

/* ---- figures ---- */

enum { MOST = 100000 };
static double numbers[MOST + 64], widths[8192], places[MOST];
static int32_t experts[MOST + 64];
static const char *names[MOST], *cells[4096];

static moe_figure figure(int kind, size_t rows, size_t columns) {
    moe_figure f;
    memset(&f, 0, sizeof f);
    f.kind = kind;
    f.rows = rows;
    f.columns = columns;
    if (kind != MOE_FIGURE_MAP) f.values = numbers;
    if (kind == MOE_FIGURE_TOKENS || kind == MOE_FIGURE_MAP) f.experts = experts;
    return f;
}

static void usual_numbers(void) {
    moe_rng rng = {7};
    size_t i;
    for (i = 0; i < MOST; i++) {
        numbers[i] = (double)moe_rng_uniform(&rng);
        experts[i] = (int32_t)moe_rng_below(&rng, 20);
        places[i] = (double)i;
        names[i] = "tok";
    }
    for (i = 0; i < 8192; i++) widths[i] = 0.1 * numbers[i];
    for (i = 0; i < 4096; i++) cells[i] = i % 3 == 0 ? NULL : i % 3 == 1 ? "words" : "1.5";
}

/* Everything that is written of a figure is well-formed, and the same twice. */
static void check_all_forms(const moe_figure *f) {
    int form;
    for (form = 0; form < FORMS; form++) {
        char *first;
        size_t size, i, controls = 0;
        if (!CHECK(write_as(f, form) == MOE_OK)) continue;
        first = written;
        size = written_size;
        written = NULL;
        CHECK(write_as(f, form) == MOE_OK && size == written_size && memcmp(first, written, size) == 0);
        free(first);
        CHECK(!holds("nan") && !holds("inf\"") && !holds("-inf"));
        if (form == SVG || form == HTML) {
            CHECK(parse(form == HTML) == NULL);
            CHECK(form == HTML ? strncmp(written, "<!DOCTYPE html>", 15) == 0 : strncmp(written, "<svg ", 5) == 0);
            CHECK(holds("<title") && (form == HTML || (holds("<desc") && holds("role=\"img\"") && holds("viewBox"))));
        } else {
            for (i = 0; i < size; i++)
                controls +=
                    (unsigned char)written[i] < 0x20 && written[i] != '\n' && (form == TEXT || written[i] != 0x1b);
            CHECK(controls == 0);
            for (i = 1; i < size; i++) controls += written[i] == '\n' && written[i - 1] == ' ';
            CHECK(controls == 0);
        }
    }
}

static void test_kinds(void) {
    static const size_t sizes[][2] = {{0, 0}, {0, 5},  {5, 0}, {1, 1},   {1, 2},
                                      {2, 1}, {8, 10}, {3, 4}, {17, 33}, {64, 100}};
    int kind;
    size_t i;
    for (kind = 0; kind < MOE_FIGURE_COUNT; kind++)
        for (i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            moe_figure f = figure(kind, sizes[i][0], sizes[i][1]);
            if (kind == MOE_FIGURE_BARS && f.columns > 4) f.columns = 4;
            check_all_forms(&f);
            f.title = "A title";
            f.caption = "A caption that is long enough to be wrapped somewhere, whatever the width may be, if it is "
                        "not too wide.";
            f.row_label = "row";
            f.column_label = "column";
            f.value_label = "unit";
            f.x = places;
            f.y = places;
            f.column_names = names;
            f.row_names = names;
            f.reference = 0.5;
            f.reference_name = "half";
            f.decimals = 2;
            f.n_experts = 20;
            if (kind == MOE_FIGURE_BARS || kind == MOE_FIGURE_TABLE) f.half_widths = widths;
            if (kind == MOE_FIGURE_TABLE && f.rows * f.columns <= 4096) f.cells = cells;
            check_all_forms(&f);
            if (f.rows * f.columns > 0 && write_as(&f, TEXT) == MOE_OK) CHECK(longest_line() <= 80);
        }
}

/* ---- bytes ---- */

/* The same figure gives the same bytes, on every machine and in every build: FNV-1a of all its
   forms. A change of a drawing changes its rows here on purpose; look at a page of all kinds
   (report page FILE) before the numbers that the failed check prints take their place. */
static const struct {
    const char *name;
    unsigned long hash;
} drawn[] = {
    {"heat", 0xf315cca9}, {"heat, all fields", 0xaf2bc514}, {"heat, thinned", 0x680ca1ef},
    {"bars", 0x2fbe2fea}, {"bars, all fields", 0xe68895d0}, {"bars, thinned", 0x2e21f8b9},
    {"lines", 0x14e075a2}, {"lines, all fields", 0xd3a803a5}, {"lines, thinned", 0x6269cf96},
    {"tokens", 0xf70ba201}, {"tokens, all fields", 0xea920b45}, {"tokens, thinned", 0x688e7279},
    {"table", 0xdc5d23e7}, {"table, all fields", 0xf926dc66}, {"table, thinned", 0x15664be2},
    {"map", 0x31c37384}, {"map, all fields", 0xda884708}, {"map, thinned", 0xae2cc263},
};
enum { DRAWN = sizeof drawn / sizeof *drawn, DRAWN_ROWS = 300, DRAWN_COLUMNS = 130 };

/* Numbers from least / 64 on without rounding, one in nine missing; experts in blocks, as a map has
   them. */
static void exact_numbers(double least) {
    size_t i;
    for (i = 0; i < DRAWN_ROWS * DRAWN_COLUMNS; i++) {
        numbers[i] = i % 9 == 4 ? none() : ((double)(i * 37 % 101) + least) / 64.0;
        experts[i] = (int32_t)(i / DRAWN_COLUMNS / 3 % 3 * 4 + i % DRAWN_COLUMNS / 4 % 5) - 1;
        places[i] = (double)i / 4.0 - 3;
    }
    for (i = 0; i < sizeof widths / sizeof *widths; i++) widths[i] = (double)(i % 5) / 32.0 - 1.0 / 32.0;
}

static void all_fields(moe_figure *f) {
    static const char *const words[] = {"The", " <quick>", "\n", " fox & hound", "caf\xc3\xa9", "internationalization"};
    static const char *labels[DRAWN_ROWS * DRAWN_COLUMNS];
    size_t i;
    for (i = 0; i < DRAWN_ROWS * DRAWN_COLUMNS; i++) labels[i] = words[i % 6];
    f->title = "A title";
    f->caption = "A caption that is wrapped somewhere, as it is longer than a line of the narrowest picture can be, "
                 "whatever its words are.";
    f->row_label = "row";
    f->column_label = "column";
    f->value_label = "tokens";
    f->row_names = labels;
    f->column_names = labels + 1;
    f->x = places;
    f->y = places + 1;
    f->n_experts = 14;
    f->decimals = 2;
    f->reference = 0.25;
    f->reference_name = "even";
    if (f->kind == MOE_FIGURE_BARS || f->kind == MOE_FIGURE_TABLE) f->half_widths = widths;
    if (f->kind == MOE_FIGURE_TABLE) f->cells = cells;
}

static void test_bytes(void) {
    static const size_t sizes[3][2] = {{5, 4}, {4, 3}, {DRAWN_ROWS, DRAWN_COLUMNS}};
    size_t i, k;
    for (i = 0; i < DRAWN; i++) {
        moe_figure f = figure((int)(i / 3), sizes[i % 3][0], sizes[i % 3][1]);
        uint32_t hash = 2166136261u;
        int form;
        test_case(drawn[i].name);
        exact_numbers(i % 3 == 0 ? 20 : -20); /* the first of a kind are positive */
        if (f.kind == MOE_FIGURE_MAP || f.kind == MOE_FIGURE_TOKENS) f.columns *= i % 3 == 2 ? 1 : 5;
        if (f.kind == MOE_FIGURE_BARS && f.columns > 4) f.columns = 4;
        if (i % 3 == 1) all_fields(&f);
        for (form = 0; form < FORMS; form++) {
            CHECK(write_as(&f, form) == MOE_OK);
            for (k = 0; k < written_size; k++) hash = (hash ^ (unsigned char)written[k]) * 16777619u;
        }
        CHECKF(hash == drawn[i].hash, "0x%08lx", (unsigned long)hash);
    }
}

static void test_large(void) {
    static const size_t sizes[MOE_FIGURE_COUNT][2] = {{300, 300}, {MOST, 1},  {1, MOST},
                                                      {1, MOST},  {5000, 20}, {300, 300}};
    int kind;
    for (kind = 0; kind < MOE_FIGURE_COUNT; kind++) {
        moe_figure f = figure(kind, sizes[kind][0], sizes[kind][1]);
        f.column_names = kind == MOE_FIGURE_TOKENS ? names : NULL;
        CHECK(write_as(&f, SVG) == MOE_OK && parse(0) == NULL && written_size < 3000000);
        CHECK(write_as(&f, HTML) == MOE_OK && parse(1) == NULL && written_size < 4000000);
        CHECK(write_as(&f, TEXT) == MOE_OK);
    }
}

/* Numbers of every size; what is no number leaves no trace but a dash. */
static void test_odd_numbers(void) {
    static const double odd[] = {
        0,    -0.0,          5e-324, -5e-324, 1e-300, 1.7976931348623157e308, -1.7976931348623157e308,
        1e15, 123456789.123, -1e-7,  1,       0.1};
    double kept[64];
    size_t i, j;
    int kind;
    memcpy(kept, numbers, sizeof kept);
    for (kind = 0; kind < MOE_FIGURE_COUNT; kind++) {
        moe_figure f = figure(kind, 3, 4);
        f.reference = HUGE_VAL;
        f.x = numbers;
        f.y = numbers;
        f.half_widths = kind == MOE_FIGURE_BARS || kind == MOE_FIGURE_TABLE ? numbers : NULL;
        for (i = 0; i < sizeof odd / sizeof *odd; i++) {
            for (j = 0; j < 12; j++) numbers[j] = odd[i]; /* all alike */
            check_all_forms(&f);
            for (j = 0; j < 12; j++) numbers[j] = j % 2 == 0 ? odd[i] : odd[(i + j) % 12];
            check_all_forms(&f);
        }
        for (i = 0; i < 12; i++) numbers[i] = i % 3 == 0 ? none() : i % 3 == 1 ? HUGE_VAL : -HUGE_VAL; /* none at all */
        check_all_forms(&f);
        numbers[5] = 2;
        check_all_forms(&f);
    }
    for (i = 0; i < 12; i++) numbers[i] = (double)i;
    numbers[7] = none();
    {
        moe_figure f = figure(MOE_FIGURE_HEAT, 3, 4);
        CHECK(write_as(&f, TEXT) == MOE_OK && holds("     1   4   5   6   -\n"));
    }
    memcpy(numbers, kept, sizeof kept);
}

/* Fixed decimals against printf, where both round the same way. */
static void test_numbers(void) {
    char wanted[80];
    moe_rng rng = {3};
    int i, wrong = 0;
    for (i = 0; i < 2000; i++) {
        double kept = numbers[0];
        moe_figure f = figure(MOE_FIGURE_TABLE, 1, 1);
        int decimals = (int)moe_rng_below(&rng, 7);
        numbers[0] = ((double)moe_rng_below(&rng, 2000001) - 1000000) * 0.001 + 1e-7; /* no ties */
        f.decimals = decimals > 0 ? decimals : -1;
        sprintf(wanted, "\n0  %.*f\n", decimals, numbers[0]);
        if (strcmp(wanted, "\n0  -0\n") == 0) strcpy(wanted, "\n0  0\n");
        if (write_as(&f, TEXT) != MOE_OK || (!holds(wanted) && strstr(wanted, " -0.0") == NULL)) {
            char *row = strstr(written, "\n0 "); /* the cell may be padded to its heading */
            double read = row != NULL ? strtod(row + 2, NULL) : none();
            if (!(fabs(read - numbers[0]) <= 0.5 * pow(10, -decimals) + 1e-9)) wrong++;
        }
        numbers[0] = kept;
    }
    CHECK(wrong == 0);
}

/* ---- texts of users ---- */

/* A table of one number, and of one with its interval (below 0: none). */
static void shows(double value, double half_width, int decimals, const char *wanted) {
    moe_figure f;
    memset(&f, 0, sizeof f);
    f.kind = MOE_FIGURE_TABLE;
    f.rows = f.columns = 1;
    f.values = &value;
    f.half_widths = &half_width;
    f.decimals = decimals;
    CHECK(write_as(&f, TEXT) == MOE_OK && written_size > strlen(wanted) + 1 && holds(wanted));
    CHECK(strncmp(written + written_size - 1 - strlen(wanted), wanted, strlen(wanted)) == 0);
}

/* As many digits as the numbers need. */
static void test_digits(void) {
    shows(123456789, -1, 0, "  123456789");
    shows(2123456789, -1, 0, "  2123456789");
    shows(2123456789012345, -1, 0, "  2123000000000000"); /* four digits */
    shows(0.00012341, -1, 0, "  0.0001234");
    shows(0.0012345, -1, 0, "  0.00123");
    shows(4e17, -1, 2, "  4e17");
    shows(-1e300, -1, 2, "  -1e300");
    shows(0.5, -1, 12, "  0.500000000");
    shows(0.5, -0.25, 0, "  0.500");
    shows(3, 0.5, 0, "  3.000 +- 0.500");
    shows(1, 250, 0, "  1.0 +- 250.0");
}

/* Bars reach to their part of a reference beyond them; one that is no number is not drawn. */
static void test_far_reference(void) {
    double v[2] = {10, 20};
    moe_figure f;
    memset(&f, 0, sizeof f);
    f.kind = MOE_FIGURE_BARS;
    f.rows = 2;
    f.columns = 1;
    f.values = v;
    f.reference = 40;
    CHECK(write_as(&f, TEXT) == MOE_OK && holds("|: reference, 40\n"));
    CHECK(!holds("######################################")); /* half of 68 columns, not all */
    f.reference = HUGE_VAL;
    CHECK(write_as(&f, TEXT) == MOE_OK && !holds("reference") && holds("######################################"));
}

/* Curves: the names of series and steps, round ticks, and numbers whose range is no double. */
static void test_ranges(void) {
    double v[6] = {0, 5, 2.5, 1, 2, 3}, x[3] = {-1, 0, 1};
    moe_figure f;
    memset(&f, 0, sizeof f);
    f.kind = MOE_FIGURE_LINES;
    f.rows = 2;
    f.columns = 3;
    f.values = v;
    f.x = x;
    f.row_label = "a label that leaves no room for the number of a series";
    CHECK(write_as(&f, TEXT) == MOE_OK && holds("* 0\n") && holds("+ 1\n"));
    CHECK(write_as(&f, HTML) == MOE_OK && holds("<th scope=\"row\">-1</th>") && holds("<th scope=\"row\">0</th>"));
    CHECK(write_as(&f, SVG) == MOE_OK && holds("\">3</text>") && holds("\">5</text>")); /* ticks at 0, 1, ... 5 */
    f.rows = 1;
    v[0] = -1.6e308;
    v[1] = 1.6e308;
    CHECK(write_as(&f, TEXT) == MOE_OK && holds("\n 1.6e308 |  ") && holds("\n-1.6e308 |**"));
    f.title = "a\xE2\x80\xA8" "b c\xE2\x81\xA6" "d";
    CHECK(write_as(&f, TEXT) == MOE_OK && strncmp(written, "a b c\xEF\xBF\xBD" "d\n", 10) == 0);
}

/* Of a long curve the lowest and the highest point of each bucket are drawn, in their order. */
static void test_buckets(void) {
    static double v[641];
    moe_figure f;
    const char *curve;
    memset(&f, 0, sizeof f);
    v[9] = -1;
    v[10] = 1;
    f.kind = MOE_FIGURE_LINES;
    f.rows = 1;
    f.columns = 641; /* buckets of three */
    f.values = v;
    CHECK(write_as(&f, SVG) == MOE_OK && holds("Lowest and highest of every 3 points."));
    curve = strstr(written, "class=\"l s0");
    CHECK(curve != NULL && strstr(curve, " 198L") != NULL && strstr(curve, " 8L") > strstr(curve, " 198L"));
}

/* Cells that stand for several rows have no numbers in them. */
static void test_thinned_heat(void) {
    static double v[2 * 129];
    moe_figure f;
    size_t i;
    memset(&f, 0, sizeof f);
    for (i = 0; i < 2 * 129; i++) v[i] = (double)(i % 7);
    f.kind = MOE_FIGURE_HEAT;
    f.rows = 128;
    f.columns = 2;
    f.values = v;
    CHECK(write_as(&f, SVG) == MOE_OK && holds("class=\"n i"));
    f.rows = 129;
    CHECK(write_as(&f, SVG) == MOE_OK && !holds("class=\"n i"));
}

static void test_texts(void) {
    static const char *const evil[] = {"<script>alert(1)</script>",
                                       "\"' onload=\"x",
                                       "a & b &lt;",
                                       "\x01\x02\x7f\x1b[31m",
                                       "\xff\xfe\xc0\xaf\xed\xa0\x80\xf8",
                                       "caf\xc3\xa9 \xe6\x97\xa5\xe6\x9c\xac",
                                       "\xe2\x80\xae turned \xe2\x81\xa6",
                                       "\xef\xbf\xbe\xef\xbf\xbf",
                                       "]]>-->",
                                       "\n\t\r lines",
                                       "",
                                       "\xc3",
                                       "e\xcc\x81",
                                       "\xf0\x9f\x98\x80",
                                       "\xc2\x85",
                                       "%s%n%d"};
    enum { EVIL = sizeof evil / sizeof *evil };
    const char *all[12];
    size_t i, j;
    int kind;
    for (kind = 0; kind < MOE_FIGURE_COUNT; kind++)
        for (i = 0; i < EVIL; i++) {
            moe_figure f = figure(kind, 3, 4);
            for (j = 0; j < 12; j++) all[j] = evil[(i + j) % EVIL];
            f.title = f.caption = f.row_label = f.column_label = f.value_label = f.reference_name = evil[i];
            f.row_names = all;
            f.column_names = all + 3;
            f.reference = 0.25;
            if (kind == MOE_FIGURE_TABLE) f.cells = all;
            check_all_forms(&f);
        }
    {
        moe_figure f = figure(MOE_FIGURE_HEAT, 1, 1);
        f.title = "a<b>&\"'\xff\x01";
        CHECK(write_as(&f, SVG) == MOE_OK && holds(">a&lt;b&gt;&amp;&quot;&#39;\xef\xbf\xbd\xef\xbf\xbd<"));
        CHECK(write_as(&f, TEXT) == MOE_OK && strncmp(written, "a<b>&\"'\xef\xbf\xbd\xef\xbf\xbd\n", 14) == 0);
        f.title = "a\nb";
        CHECK(write_as(&f, TEXT) == MOE_OK && strncmp(written, "a b\n", 4) == 0);
    }
}

/* The parser itself: what is wrong is found. */
static void test_parser(void) {
    static const char *const bad[] = {"<a>&</a>",
                                      "<a><b></a></b>",
                                      "<a",
                                      "<a b=c></a>",
                                      "<a b=\"1\" b=\"2\"/>",
                                      "<a>",
                                      "<a>\x01</a>",
                                      "<a>\xff</a>",
                                      "<script></script>",
                                      "<a id=\"x\"><b id=\"x\"/></a>",
                                      "<a src=\"x\"/>",
                                      "<a x=\"12345678\"/>",
                                      "<a>&copy;</a>"};
    size_t i;
    for (i = 0; i < sizeof bad / sizeof *bad; i++) {
        const char *wrong;
        free(written);
        written_size = strlen(bad[i]);
        written = (char *)calloc(written_size + 1, 1);
        if (written == NULL) exit(2);
        memcpy(written, bad[i], written_size);
        quiet = 1;
        wrong = parse(0);
        quiet = 0;
        CHECK(wrong != NULL);
    }
}

/* Long words and lines. */
static void test_wrapping(void) {
    static char word[1000], lines[163];
    moe_figure f = figure(MOE_FIGURE_HEAT, 2, 2);
    size_t i;
    memset(word, 'x', sizeof word - 1);
    for (i = 3; i < 500; i += 7) word[i] = ' ';
    f.title = f.caption = f.row_label = f.column_label = word;
    check_all_forms(&f);
    CHECK(write_as(&f, TEXT) == MOE_OK);
    for (i = 0; i < 100; i++) {
        char *line = strstr(written, "\n\n");
        if (line != NULL) *line = '\0';
    }
    written_size = strlen(written);
    CHECK(longest_line() <= 80);
    memset(word, 'y', 160); /* two lines, full */
    memcpy(lines, word, 80);
    memcpy(lines + 81, word, 80);
    lines[80] = lines[161] = '\n';
    word[160] = '\0';
    f.caption = word;
    CHECK(write_as(&f, TEXT) == MOE_OK);
    CHECK(strstr(written, lines) != NULL);
}

/* No line is longer than what was asked for, whatever the kind, the names and the labels. */
static void test_narrow(void) {
    static const int columns[] = {40, 41, 57, 80, 0};
    static const char *longest[32];
    static char word[300];
    size_t i, c, at;
    int kind;
    memset(word, 'x', sizeof word - 1);
    for (i = 11; i < sizeof word - 1; i += 17) word[i] = ' ';
    for (i = 0; i < 32; i++) longest[i] = word + i;
    for (kind = 0; kind < MOE_FIGURE_COUNT; kind++)
        for (c = 0; c < sizeof columns / sizeof *columns; c++) {
            moe_figure f = figure(kind, 6, kind == MOE_FIGURE_BARS ? 4 : 8);
            const size_t most = columns[c] > 0 ? (size_t)columns[c] : 80;
            moe_buffer text;
            moe_stream stream;
            size_t length = 0, found = 0;
            memset(&text, 0, sizeof text);
            stream = moe_buffer_stream(&text);
            f.title = f.caption = f.row_label = f.column_label = f.value_label = f.reference_name = word;
            f.row_names = f.column_names = longest;
            f.reference = 0.5;
            f.decimals = 9;
            if (kind == MOE_FIGURE_BARS || kind == MOE_FIGURE_TABLE) f.half_widths = widths;
            CHECK(moe_report_text(&f, columns[c], 0, &stream, NULL) == MOE_OK);
            for (at = 0; at < text.size; at++) {
                length = text.data[at] == '\n' ? 0 : length + 1;
                if (length > found) found = length;
            }
            CHECKF(found <= most, "kind %d: a line of %d characters, not %d", kind, (int)found, (int)most);
            moe_buffer_free(&text);
        }
}

static void check_no_numbers(double *v) {
    int i;
    moe_figure f = figure(MOE_FIGURE_HEAT, 1, 64);
    for (i = 0; i < 64; i++) v[i] = none();
    f.values = v;
    check_all_forms(&f);
}

/* Figures of chance: names that are not there or strange, experts from -2 to 100, numbers of all
   sizes, any widths. */
static void test_chance(void) {
    static const char *const words[] = {
        NULL,
        "",
        " ",
        "a",
        " leading",
        "x\n",
        "\t",
        "\r",
        "trailing ",
        "\xe6\x97\xa5",
        "e\xcc\x81",
        "\xe2\x80\x8b",
        "\xef\xb8\x8f",
        "\xea\xb0\x80",
        "\xef\xa4\x80",
        "\xef\xb8\xb0",
        "\xef\xbc\xa1",
        "\xf0\x9f\x98\x80",
        "\xf0\xa0\x80\x80",
        "\xe1\x84\x80",
        "\xd8\x9c",
        "\xe2\x80\x8e",
        "\xe2\x80\x8f",
        "\xe2\x80\xa8",
        "\xe2\x80\xa9",
        "\xc2\x90",
        "\xc2\xa0",
        " averyveryveryveryveryveryveryveryveryveryverylongwordthatfitsnowhereatall andmoreofitanditdoesnotend"};
    static const double odd[] = {1e-3, 0.05, 0.5, 5, 50, 500, 5e5, 1e9, 1e12, -2, -1e-300, 1.5, 1e308, 0};
    enum { WORDS = sizeof words / sizeof *words, ODD = sizeof odd / sizeof *odd };
    const char *all[64], *text[64];
    double v[64], w[64];
    int32_t e[64];
    moe_rng rng = {11};
    int i, j, columns;
    for (i = 0; i < 1200; i++) {
        moe_figure f =
            figure(i % MOE_FIGURE_COUNT, 1 + (size_t)moe_rng_below(&rng, 8), 1 + (size_t)moe_rng_below(&rng, 8));
        double scale = odd[moe_rng_below(&rng, ODD)];
        moe_buffer buffer;
        moe_stream stream;
        if (f.kind == MOE_FIGURE_BARS && f.columns > 4) f.columns = 4;
        for (j = 0; j < 64; j++) {
            all[j] = words[moe_rng_below(&rng, WORDS)];
            text[j] = words[moe_rng_below(&rng, WORDS)];
            e[j] = (int32_t)moe_rng_below(&rng, i % 2 ? 103 : 12) - 2;
            v[j] = moe_rng_below(&rng, 9) == 0 ? none()
                   : i % 4 == 0                ? odd[moe_rng_below(&rng, ODD)]
                                               : scale * (double)moe_rng_normal(&rng);
            if (i % 5 == 0) v[j] = floor(v[j]);
            w[j] = moe_rng_below(&rng, 3) == 0 ? -1 : fabs(scale) * (double)moe_rng_uniform(&rng);
        }
        f.values = v;
        f.experts = e;
        f.stride = moe_rng_below(&rng, 2) ? 8 : 0;
        f.decimals = (int)moe_rng_below(&rng, 12) - 1;
        if (moe_rng_below(&rng, 2)) f.row_names = all;
        if (moe_rng_below(&rng, 2)) f.column_names = all + 8;
        if (moe_rng_below(&rng, 2)) f.half_widths = w;
        if (moe_rng_below(&rng, 2)) f.cells = text;
        if (moe_rng_below(&rng, 3)) {
            f.title = all[20];
            f.caption = all[21];
            f.row_label = all[22];
            f.column_label = all[23];
            f.value_label = all[24];
            f.reference_name = all[25];
        }
        if (moe_rng_below(&rng, 2)) {
            f.x = v;
            f.y = w;
        }
        if (moe_rng_below(&rng, 2)) f.reference = v[1];
        if (moe_rng_below(&rng, 2)) f.n_experts = (int)moe_rng_below(&rng, 90);
        if (i % 7 == 0) f.values = f.kind == MOE_FIGURE_TABLE || f.experts == e ? v : NULL;
        check_all_forms(&f);
        memset(&buffer, 0, sizeof buffer);
        stream = moe_buffer_stream(&buffer);
        columns = 40 + (int)moe_rng_below(&rng, 361);
        CHECK(moe_report_text(&f, columns, i % 2, &stream, NULL) == MOE_OK && buffer.size > 0);
        moe_buffer_free(&buffer);
    }
    check_no_numbers(v);
}

/* ---- colors ---- */

/* The color of a class in the light or dark part of the style: the last that is set up to
   there. */
static double luminance(const char *class_name, const char *property, int dark) {
    char wanted[40];
    const char *style = strstr(written, "<style>");
    const char *night = style != NULL ? strstr(style, "@media(prefers-color-scheme:dark){") : NULL;
    const char *at;
    const char *color = NULL;
    unsigned long rgb;
    double sum = 0;
    int i;
    sprintf(wanted, ".moe %s{", class_name);
    if (night == NULL) return none();
    for (at = strstr(dark ? night : style, wanted); at != NULL && (dark || at < night); at = strstr(at + 1, wanted))
        if (strncmp(at + strlen(wanted), property, strlen(property)) == 0)
            color = at + strlen(wanted) + strlen(property);
    if (color == NULL) return none();
    rgb = strtoul(color, NULL, 16);
    if (strspn(color, "0123456789abcdef") == 3)
        rgb = (rgb & 0xf00) * 0x1100 + (rgb & 0xf0) * 0x110 + (rgb & 0xf) * 0x11;
    for (i = 0; i < 3; i++) {
        double c = (double)(rgb >> (16 - 8 * i) & 255) / 255, share[3];
        share[0] = 0.2126;
        share[1] = 0.7152;
        share[2] = 0.0722;
        sum += share[i] * (c <= 0.04045 ? c / 12.92 : pow((c + 0.055) / 1.055, 2.4));
    }
    return sum;
}

static double contrast(double a, double b) { return a > b ? (a + 0.05) / (b + 0.05) : (b + 0.05) / (a + 0.05); }

static void test_contrast(void) {
    moe_figure f = figure(MOE_FIGURE_HEAT, 2, 2);
    char name[16], ink[16];
    int dark, i;
    CHECK(write_as(&f, SVG) == MOE_OK);
    for (dark = 0; dark < 2; dark++) {
        double ground = luminance(".bg", "fill:#", dark);
        CHECK(contrast(ground, luminance("text,.moe .u", "fill:#", dark)) >= 7);
        CHECK(contrast(ground, luminance(".m", "fill:#", dark)) >= 4.5);
        CHECK(contrast(ground, luminance(".a", "stroke:#", dark)) >= 3);
        for (i = 0; i < 16; i++) {
            sprintf(name, ".c%d", i);
            CHECK(contrast(luminance(".e", "fill:#", dark), luminance(name, "fill:#", dark)) >= 4.5);
        }
        for (i = 0; i < 10; i++) {
            sprintf(name, ".h%d", i);
            sprintf(ink, ".i%d", i);
            CHECK(contrast(luminance(ink, "fill:#", dark), luminance(name, "fill:#", dark)) >= 4.5);
        }
        for (i = 0; i < 8; i++) {
            sprintf(name, ".s%d", i);
            sprintf(ink, ".f%d", i);
            CHECK(contrast(ground, luminance(name, "stroke:#", dark)) >= 3 &&
                  contrast(ground, luminance(ink, "fill:#", dark)) >= 3);
        }
    }
}

/* ---- what pictures say ---- */

static void test_messages(void) {
    static const char *const nameless[] = {"", "b", "c", "d"};
    static const double table[] = {3, 1, 4, 1, 5, 9}, curve[] = {9, 7, 3, 4};
    static const int32_t chosen[] = {2, 2, 0, -1};
    static const double heights[] = {5.0, 5.004}, large[] = {1.0e7, 1.05e7};
    static const char *const words[] = {"a", "b\n", " ", "d"}, *const rows[] = {"first", "second"};
    moe_figure f = figure(MOE_FIGURE_HEAT, 2, 3);
    f.values = table;
    CHECK(write_as(&f, SVG) == MOE_OK && holds("Largest: 9 at expert 1, column 2. Smallest: 1 at expert 0, column 1."));
    f = figure(MOE_FIGURE_BARS, 2, 1);
    f.values = table;
    f.row_names = rows;
    CHECK(write_as(&f, SVG) == MOE_OK && holds("Largest: 3 at first. Smallest: 1 at second."));
    f = figure(MOE_FIGURE_LINES, 1, 4);
    f.values = curve;
    f.row_names = rows;
    CHECK(write_as(&f, SVG) == MOE_OK && holds("first: from 9 to 4, least 3, most 9."));
    f = figure(MOE_FIGURE_TOKENS, 1, 4);
    f.experts = chosen;
    f.column_names = words;
    f.values = NULL;
    CHECK(write_as(&f, SVG) == MOE_OK && holds("layer 0: expert 0 33.3 %, expert 2 66.7 %, no other."));
    CHECK(write_as(&f, TEXT) == MOE_OK && holds("a b\n2 2\n\n") && holds("\xc2\xb7 d\n0 -\n"));
    CHECK(write_as(&f, COLOR) == MOE_OK && holds("\x1b[48;5;157;38;5;16ma\x1b[0m"));
    f.column_names = nameless;
    f.n_experts = 10; /* numbers of one digit */
    CHECK(write_as(&f, TEXT) == MOE_OK && holds("\xc2\xb7 b c d\n2 2 0 -\n"));
    f.n_experts = 11;
    CHECK(write_as(&f, TEXT) == MOE_OK && holds("\xc2\xb7  b  c  d\n"));
    f = figure(MOE_FIGURE_MAP, 2, 2);
    f.experts = chosen;
    f.y = heights; /* their difference decides on the digits */
    CHECK(write_as(&f, TEXT) == MOE_OK && holds("\n22\n"));
    CHECK(write_as(&f, SVG) == MOE_OK && holds(">5.000<") && holds(">5.004<"));
    f = figure(MOE_FIGURE_TABLE, 1, 2);
    f.values = table;
    CHECK(write_as(&f, TEXT) == MOE_OK && holds("\n0  3  1\n"));
    f = figure(MOE_FIGURE_LINES, 1, MOST);
    CHECK(write_as(&f, SVG) == MOE_OK && holds("Lowest and highest of every 313 points."));
    f = figure(MOE_FIGURE_HEAT, 300, 300);
    CHECK(write_as(&f, SVG) == MOE_OK && holds("Each is the mean of 3 x 3."));
    CHECK(write_as(&f, HTML) == MOE_OK && holds("One of 3 columns is shown."));
    f = figure(MOE_FIGURE_BARS, 300, 1); /* means of rows have no interval, single rows have */
    f.half_widths = f.values;
    CHECK(write_as(&f, SVG) == MOE_OK && holds("Each is the mean of 2 x 1.") && !holds("\xC2\xB1"));
    f.rows = 200;
    CHECK(write_as(&f, SVG) == MOE_OK && holds("\xC2\xB1"));
    f = figure(MOE_FIGURE_LINES, 1, 2); /* the axis reaches the reference */
    f.values = table;
    f.reference = 40;
    CHECK(write_as(&f, TEXT) == MOE_OK && holds("40 |"));
    f.values = large; /* it has a digit more than the ticks */
    f.reference = 1.025e7;
    CHECK(write_as(&f, TEXT) == MOE_OK && holds("reference: 10250000\n"));
    f = figure(MOE_FIGURE_TOKENS, 1, MOST);
    f.column_names = names;
    CHECK(write_as(&f, HTML) == MOE_OK && holds("The first 3000 of 100000 tokens.") &&
          holds("One of 100 rows is shown."));
    f.columns = 3001; /* a picture ends before the last, a text does not */
    names[3000] = "last";
    CHECK(write_as(&f, SVG) == MOE_OK && !holds(">last<") && write_as(&f, TEXT) == MOE_OK && holds("last\n"));
    names[3000] = "tok";
}

/* A bar that is twice as long as another stands for a number that is twice as large. */
static void test_lengths(void) {
    static const double table[] = {10, 20, 5};
    moe_figure f = figure(MOE_FIGURE_BARS, 3, 1);
    double width[3] = {0, 0, 0};
    const char *at;
    int n = 0;
    f.values = table;
    CHECK(write_as(&f, SVG) == MOE_OK);
    for (at = written; (at = strstr(at, "<rect ")) != NULL && n < 3; at++) {
        const char *end = strchr(at, '>'), *bar = strstr(at, "class=\"f0\"");
        if (bar != NULL && bar < end) width[n++] = strtod(strstr(at, "width=\"") + 7, NULL);
    }
    CHECK(n == 3 && fabs(width[1] - 2 * width[0]) < 0.3 && fabs(width[0] - 2 * width[2]) < 0.3);
    CHECK(write_as(&f, TEXT) == MOE_OK);
    at = strchr(written, '#');
    CHECK(at != NULL && strspn(at, "#") > 20);
}

/* Levels and places follow the numbers. */
static void test_places(void) {
    static const double table[] = {0, 5, 10};
    double x[3], y[3];
    const char *at;
    moe_figure f = figure(MOE_FIGURE_HEAT, 1, 3);
    f.values = table;
    CHECK(write_as(&f, SVG) == MOE_OK);
    at = strstr(written, "class=\"h0\"/><text");
    CHECK(at != NULL && (at = strstr(at, "class=\"h5\"/><text")) != NULL && strstr(at, "class=\"h9\"/><text") != NULL);
    f = figure(MOE_FIGURE_LINES, 1, 3);
    f.values = table;
    CHECK(write_as(&f, SVG) == MOE_OK && (at = strstr(written, "class=\"l s0 d0\" d=\"M")) != NULL);
    CHECK(sscanf(strchr(at, 'M'), "M%lf %lfh.1L%lf %lfL%lf %lf", &x[0], &y[0], &x[1], &y[1], &x[2], &y[2]) == 6);
    CHECK(fabs(y[0] - y[2] - 190) < 0.2 && fabs(y[0] - y[1] - 95) < 0.2 && x[2] > x[0] + 200 &&
          fabs(x[0] + x[2] - 2 * x[1]) < 0.3);
    CHECK(write_as(&f, TEXT) == MOE_OK && holds("10 |") && holds(" 0 |*"));
    f = figure(MOE_FIGURE_TOKENS, 1, 2);
    f.values = table;
    CHECK(write_as(&f, HTML) == MOE_OK && holds("<u style=\"width:0%\">") && holds("<u style=\"width:100%\">"));
}

/* ---- where things lie in a picture ---- */

/* A text or a rectangle; a text's x is where it is held: its beginning, end or middle. */
typedef struct thing {
    int is_text;
    double x, y, width, height;
    char class_name[24], text[64];
} thing;

static double attribute(const char *from, const char *to, const char *name) {
    const char *at = strstr(from, name);
    return at != NULL && at < to ? strtod(at + strlen(name), NULL) : 0;
}

/* The next thing from *at on; 0: there is none. Texts that are turned are passed by. */
static int next_thing(const char **at, thing *t) {
    const char *p = *at, *end, *quoted;
    for (; (p = strchr(p, '<')) != NULL; p++)
        if (strncmp(p, "<rect ", 6) == 0 || (strncmp(p, "<text ", 6) == 0 && strncmp(p, "<text transform", 15) != 0))
            break;
    if (p == NULL || (end = strchr(p, '>')) == NULL) return 0;
    memset(t, 0, sizeof *t);
    t->is_text = p[1] == 't';
    t->x = attribute(p, end, " x=\"");
    t->y = attribute(p, end, " y=\"");
    t->width = attribute(p, end, " width=\"");
    t->height = attribute(p, end, " height=\"");
    quoted = strstr(p, "class=\"");
    if (quoted != NULL && quoted < end)
        sprintf(t->class_name, "%.*s", (int)(strcspn(quoted + 7, "\"") < 23 ? strcspn(quoted + 7, "\"") : 23),
                quoted + 7);
    if (t->is_text) sprintf(t->text, "%.*s", (int)(strcspn(end + 1, "<") < 63 ? strcspn(end + 1, "<") : 63), end + 1);
    *at = end;
    return 1;
}

static int has_class(const thing *t, const char *word) {
    const char *p = t->class_name;
    for (; *p != '\0'; p += strspn(p, " ")) {
        if (strcspn(p, " ") == strlen(word) && strncmp(p, word, strlen(word)) == 0) return 1;
        p += strcspn(p, " ");
    }
    return 0;
}

/* Where a text begins, if a character is 7 pixels wide. */
static double begin_of(const thing *t) {
    double width = 7.0 * (double)strlen(t->text);
    return has_class(t, "r") ? t->x - width : has_class(t, "n") ? t->x - width / 2 : t->x;
}

/* Whether every text and rectangle lies inside the picture. */
static int lies_inside(void) {
    const char *at = written, *inside = strstr(written, "translate(0 ");
    double width = 0, height = 0;
    double down = inside != NULL ? strtod(inside + 12, NULL) : 0;
    thing t;
    int wrong = 0;
    if (sscanf(strstr(written, "viewBox="), "viewBox=\"-10 -6 %lf %lf", &width, &height) != 2 || (at = inside) == NULL)
        return 0;
    while (next_thing(&at, &t)) {
        int out = t.is_text
                      ? begin_of(&t) < -1 || t.y < 10 || t.y + down > height - 6 ||
                            (t.text[0] != '\0' && t.x > width - 20 + 0.5)
                      : t.x < -0.5 || t.y < -0.5 || t.x + t.width > width - 19.5 || t.y + t.height + down > height - 6;
        if (out && wrong++ == 0)
            printf("    %s \"%s\" class %s: %g %g %g %g in %g %g\n", t.is_text ? "text" : "rect", t.text, t.class_name,
                   t.x, t.y, t.width, t.height, width, height);
    }
    return wrong == 0;
}

static void test_inside(void) {
    static const double table[] = {0, 12345, 1000, 7, -25000, 3, 12, 900, 1, 2, 3, 4};
    static const char *const rows[] = {"a", "a longer name", "c"}, *const columns[] = {"x", "y", "zeta", "w"};
    static const int32_t chosen[] = {0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 11};
    int kind;
    for (kind = 0; kind < MOE_FIGURE_COUNT; kind++) {
        moe_figure f = figure(kind, 3, 4);
        f.values = f.values != NULL ? table : NULL;
        f.experts = f.experts != NULL ? chosen : NULL;
        CHECK(write_as(&f, SVG) == MOE_OK && lies_inside());
        f.row_names = rows;
        f.column_names = columns;
        f.reference = 5000;
        f.reference_name = "limit";
        f.row_label = "row";
        f.column_label = "column";
        f.value_label = "unit";
        CHECK(write_as(&f, SVG) == MOE_OK && lies_inside());
    }
}

/* A number stands in the middle of its cell; what names a line of the legend stands beside it. */
static void test_middles(void) {
    static const double table[] = {10, 20, 5, 7};
    moe_figure f = figure(MOE_FIGURE_HEAT, 2, 2);
    const char *at;
    thing t, cell;
    int cells_seen = 0, marks = 0;
    double line = 0;
    f.values = table;
    CHECK(write_as(&f, SVG) == MOE_OK);
    memset(&cell, 0, sizeof cell);
    for (at = written; next_thing(&at, &t); cell = t)
        if (t.is_text && strchr(t.class_name, 'i') != NULL && !cell.is_text) {
            CHECK(fabs(t.x - (cell.x + cell.width / 2)) < 1.5 && fabs(t.y - 4.5 - (cell.y + cell.height / 2)) < 2);
            cells_seen++;
        }
    CHECK(cells_seen == 4);
    f = figure(MOE_FIGURE_LINES, 2, 2);
    f.values = table;
    f.reference = 8;
    f.reference_name = "limit";
    CHECK(write_as(&f, SVG) == MOE_OK);
    for (at = written; (at = strstr(at, "<path d=\"M")) != NULL; at++)
        /* the last one is the legend's */
        if (strncmp(strchr(at + 9, '"'), "\" class=\"a d1\"", 14) == 0) sscanf(at + 10, "%*f %lf", &line);
    for (at = written; next_thing(&at, &t) && strncmp(t.text, "limit", 5) != 0;) {}
    CHECK(strncmp(t.text, "limit", 5) == 0 && fabs(t.y - 4.5 - line) < 2);
    /* Marks on the axis below are short and upright, the axis is level. */
    for (at = written; (at = strstr(at, "<path d=\"M")) != NULL; at++) {
        double x1, y1, x2, y2;
        if (strncmp(strchr(at + 9, '"'), "\" class=\"a\"", 11) != 0 ||
            !CHECK(sscanf(at + 10, "%lf %lfL%lf %lf", &x1, &y1, &x2, &y2) == 4))
            continue;
        CHECK(y1 == y2 ? x2 > x1 + 100 : x1 == x2 && fabs(y2 - y1 - 4) < 0.2);
        marks += y1 != y2;
    }
    CHECK(marks >= 2);
}

/* An expert's number stands in its region; shares are those of all cells, and of each row of
   tokens. */
static void test_regions(void) {
    static const int32_t halves[] = {0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 2, 1}, rows[] = {0, 0, 0, 1, 1, 1, 1, 0};
    moe_figure f = figure(MOE_FIGURE_MAP, 4, 4);
    const char *at, *other;
    thing t, region;
    int named = 0;
    f.experts = halves;
    CHECK(write_as(&f, SVG) == MOE_OK && holds("expert 0 37.5 %, expert 1 43.8 %, expert 2 18.8 %") &&
          holds(">37.5 %<") && holds(">43.8 %<") && holds(">18.8 %<"));
    for (at = strstr(written, "<g "); next_thing(&at, &t);) {
        if (!t.is_text || strcmp(t.class_name, "e n") != 0 || named == 3) continue;
        for (other = strstr(written, "<g "); next_thing(&other, &region);)
            if (!region.is_text && strncmp(region.class_name, "z c", 3) == 0 && region.class_name[3] == t.text[0] &&
                t.x > region.x && t.x < region.x + region.width && t.y - 4.5 >= region.y &&
                t.y - 4.5 <= region.y + region.height)
                break;
        CHECK(!region.is_text && strncmp(region.class_name, "z c", 3) == 0 && region.class_name[3] == t.text[0]);
        named++;
    }
    CHECK(named == 3);
    f = figure(MOE_FIGURE_TOKENS, 2, 4);
    f.experts = rows;
    CHECK(write_as(&f, SVG) == MOE_OK && holds("expert 0 75.0 %, expert 1 25.0 %") &&
          holds("expert 0 25.0 %, expert 1 75.0 %") && holds(">50.0 %<"));
}

/* ---- text: columns ---- */

/* Every row is there, and columns end, or begin, below their heads. */
static void test_columns(void) {
    static const double table[] = {1, 22, 333, 4444, 55555, -6};
    static const char *const rows[] = {"a", "longer name", "c"}, *const columns[] = {"first", "2"};
    moe_figure f = figure(MOE_FIGURE_TABLE, 3, 2);
    f.values = table;
    f.row_names = rows;
    f.column_names = columns;
    f.row_label = "row";
    CHECK(write_as(&f, TEXT) == MOE_OK);
    CHECK(holds("\nrow          first     2\n") && holds("\na                1    22\n") &&
          holds("\nlonger name    333  4444\n") && holds("\nc            55555    -6\n"));
    f = figure(MOE_FIGURE_HEAT, 3, 2);
    f.values = table;
    f.row_names = rows;
    f.column_names = columns;
    CHECK(write_as(&f, TEXT) == MOE_OK && holds("          a      1     22\n") &&
          holds("longer name    333   4444\n") && holds("          c  55555     -6\n"));
}

static int times(const char *text) {
    int n = 0;
    const char *at;
    for (at = written; (at = strstr(at, text)) != NULL; at++) n++;
    return n;
}

/* What is drawn once, and where. */
static void test_drawn(void) {
    static const double small[] = {0.001, 0.002, 0.0005, 0.0013};
    static const int32_t chosen[] = {0, 1, 2, 2, 2, 0};
    static const char *const columns[] = {"first", "other"};
    moe_figure f = figure(MOE_FIGURE_TABLE, 2, 2);
    const char *at;
    thing t, region;
    static const double close[] = {10000000, 10030000};
    char last[64];
    double x1 = 0, x2 = 0;
    double label = -1;
    int cell, covered = 0, marks = 0;
    f.values = small;
    f.column_names = columns;
    CHECK(write_as(&f, SVG) == MOE_OK && times(">first<") == 1 && times(">other<") == 1 && times(">0.00130<") == 1 &&
          !holds("reference"));
    f.kind = MOE_FIGURE_BARS;
    CHECK(write_as(&f, SVG) == MOE_OK && !holds("reference"));
    f.kind = MOE_FIGURE_LINES;
    f.column_names = NULL;
    f.column_label = "middle";
    CHECK(write_as(&f, SVG) == MOE_OK && !holds("reference"));
    for (at = written; (at = strstr(at, "<path d=\"M")) != NULL; at++)
        if (sscanf(at + 10, "%lf %*fL%lf", &x1, &x2) == 2 && strncmp(strchr(at + 9, '"'), "\" class=\"g\"", 11) == 0)
            break;
    for (at = written; next_thing(&at, &t);)
        if (strcmp(t.text, "middle") == 0) label = t.x;
    CHECK(x2 > x1 && fabs(label - (x1 + x2) / 2) < 0.2);
    /* Marks of large numbers that are close have as many digits as tell them apart. */
    f = figure(MOE_FIGURE_LINES, 1, 2);
    f.values = close;
    CHECK(write_as(&f, SVG) == MOE_OK);
    for (at = written, last[0] = '\0'; next_thing(&at, &t);)
        if (t.is_text && strcmp(t.class_name, "m r") == 0 && t.x < 100) {
            CHECK(strcmp(t.text, last) != 0);
            strcpy(last, t.text);
            marks++;
        }
    CHECK(marks >= 3);
    /* Every cell of a map lies in a region of its expert. */
    f = figure(MOE_FIGURE_MAP, 2, 3);
    f.experts = chosen;
    CHECK(write_as(&f, SVG) == MOE_OK);
    for (cell = 0; cell < 6; cell++) {
        const double x = 340.0 / 3 * (cell % 3 + 0.5), y = 2 + 340.0 / 3 * (cell / 3 + 0.5);
        for (at = strstr(written, "<g "); next_thing(&at, &region);)
            if (!region.is_text && strncmp(region.class_name, "z c", 3) == 0 && x > region.x &&
                x < region.x + region.width && y > region.y && y < region.y + region.height)
                covered += region.class_name[3] == '0' + chosen[cell];
    }
    CHECK(covered == 6);
}

/* A reference among bars is a line with its name, held where it has room. */
static void test_bar_reference(void) {
    static const double values[] = {1, 2, 8};
    static const double at[] = {1, 4, 7.9};
    static const char *const held[] = {"class=\"m\">limit", "class=\"m n\">limit", "class=\"m r\">limit"};
    moe_figure f = figure(MOE_FIGURE_BARS, 3, 1);
    size_t i;
    f.values = values;
    f.reference_name = "limit";
    for (i = 0; i < 3; i++) {
        f.reference = at[i];
        CHECK(write_as(&f, SVG) == MOE_OK && holds(held[i]));
    }
}

/* Experts beyond the legend count as others, in words and in the legend. */
static void test_others(void) {
    static const int32_t shown[2][4] = {{0, 64, 100, 300}, {0, 63, 0, 63}};
    static const int kinds[2] = {MOE_FIGURE_TOKENS, MOE_FIGURE_MAP};
    int i, k;
    for (i = 0; i < 2; i++)
        for (k = 0; k < 2; k++) {
            moe_figure f;
            memset(&f, 0, sizeof f);
            f.kind = kinds[k];
            f.rows = 1;
            f.columns = 4;
            f.experts = shown[i];
            f.n_experts = i == 1 ? 100 : 0;
            CHECK(write_as(&f, SVG) == MOE_OK);
            CHECK(holds(i == 0 ? "expert 0 25.0 %, others 75.0 %. " : "expert 63 50.0 %, no other. "));
            CHECKF(holds(">64+</text>") == (i == 0) && holds(">75.0 %</text>") == (i == 0), "%d %d", i, k);
            CHECK(write_as(&f, HTML) == MOE_OK);
            if (k == 0) CHECK(holds("<i>64+</i> 75.0 %<") == (i == 0));
            CHECK(holds("others 75.0 %") == (i == 0));
            f.n_experts = 2; /* fewer than occur: expert 1 is named, too */
            CHECK(write_as(&f, SVG) == MOE_OK && holds(i == 0 ? "others 75.0 %. " : "expert 63 50.0 %, no other. "));
            CHECKF(holds(">0.0 %</text>") && holds(">50.0 %</text>") == (i == 1), "%d %d", i, k);
            CHECK(write_as(&f, HTML) == MOE_OK);
            if (k == 0) CHECK(holds("</i> 0.0 %<") && holds("</i> 50.0 %<") == (i == 1));
        }
}

/* The mean of integers need not be one. */
static void test_even(void) {
    static const double values[4] = {100, 50, 25, 75};
    moe_figure f;
    memset(&f, 0, sizeof f);
    f.kind = MOE_FIGURE_BARS;
    f.rows = 4;
    f.columns = 1;
    f.values = values;
    f.reference = 62.5;
    f.reference_name = "even";
    CHECK(write_as(&f, SVG) == MOE_OK && holds(">even 62.50<") && holds(">100<"));
    CHECK(write_as(&f, TEXT) == MOE_OK && holds("|: even, 62.50\n") && holds(" 100  "));
    f.reference = 62;
    CHECK(write_as(&f, SVG) == MOE_OK && holds(">even 62<"));
    f.reference = 62.5;
    f.decimals = -1;
    CHECK(write_as(&f, SVG) == MOE_OK && holds(">even 63<"));
    f.decimals = 1;
    CHECK(write_as(&f, SVG) == MOE_OK && holds(">even 62.5<") && holds(">100.0<"));
}

/* What lies at an edge: a wide letter that no longer fits, a number that rounds to 0, the lower end
   of an interval, the scale of values far from 0, heads of merged columns. */
static void test_edges(void) {
    static const double far_away[] = {100, 101, 100, 101}, tiny[] = {-0.001, 1, 1, 1};
    static const double ones[] = {1, 1}, wide[] = {3, 1};
    static const char *const letters[] = {"aaaaaaaaaaaaaa\xE6\x97\xA5" "bbb", "c"}, *const heads[] = {"d", "e"};
    moe_figure f = figure(MOE_FIGURE_HEAT, 2, 2);
    const char *at;
    char *end;
    double most = 0, from = 0;
    thing t;
    f.values = far_away;
    f.row_names = letters;
    f.column_names = heads;
    CHECK(write_as(&f, TEXT) == MOE_OK && holds("aaaaaaaaaaaaaa~"));
    CHECK(write_as(&f, SVG) == MOE_OK && !holds(">0<"));
    f.kind = MOE_FIGURE_TABLE;
    f.values = tiny;
    f.decimals = 2;
    CHECK(write_as(&f, TEXT) == MOE_OK && holds("0.00") && !holds("-0.00"));
    f = figure(MOE_FIGURE_BARS, 2, 1);
    f.values = ones;
    f.half_widths = wide; /* from -2 to 4 */
    CHECK(write_as(&f, SVG) == MOE_OK);
    at = strstr(written, "<path d=\"M");
    CHECK(at != NULL && sscanf(at + 10, "%lf", &from) == 1);
    for (at = written; next_thing(&at, &t);)
        if (!t.is_text && t.class_name[0] == 'f') CHECK(t.x > from + 50); /* the bars begin at 0 */
    f = figure(MOE_FIGURE_HEAT, 1, 300);
    CHECK(write_as(&f, SVG) == MOE_OK);
    for (at = written; (at = strchr(at, '>')) != NULL;)
        if (strtod(++at, &end) > most && *end == '<' && strtod(at, NULL) < 300) most = strtod(at, NULL);
    CHECK(most > 200);
}

/* A picture alone has its title and caption in it, besides those for readers of screens. */
static void test_heads(void) {
    moe_figure f = figure(MOE_FIGURE_BARS, 3, 1);
    f.title = "Heading";
    f.caption = "Legend";
    CHECK(write_as(&f, SVG) == MOE_OK && times("Heading") == 2 && holds("class=\"b\">Heading</text>"));
    CHECK(holds("class=\"m\">Legend</text>"));
}

/* Bars of a group lie below each other. */
static void test_bars(void) {
    moe_figure f = figure(MOE_FIGURE_BARS, 3, 3);
    const char *at;
    double end = 0;
    int bars = 0;
    thing t;
    CHECK(write_as(&f, SVG) == MOE_OK);
    for (at = written; next_thing(&at, &t) && bars < 9;)
        if (!t.is_text && t.class_name[0] == 'f') {
            CHECK(t.y >= end && t.height >= 8);
            end = t.y + t.height;
            bars++;
        }
    CHECK(bars == 9);
}

/* Letters for experts above 9 are explained where there are any. */
static void test_letters(void) {
    static const int32_t nine[] = {0, 9}, ten[] = {0, 10};
    moe_figure f = figure(MOE_FIGURE_MAP, 1, 2);
    f.experts = nine;
    CHECK(write_as(&f, TEXT) == MOE_OK && !holds("a to z"));
    f.experts = ten;
    CHECK(write_as(&f, TEXT) == MOE_OK && holds("a to z"));
}

/* Text of many columns: names stand apart from signs, what several columns share is said. */
static void test_wide_text(void) {
    static const char *const rows[] = {"a", "bc"};
    static const double mixed[] = {0.125, 1000, 0.25, 2000};
    const double missing[] = {1, (double)NAN};
    static double ones[600];
    moe_figure f = figure(MOE_FIGURE_HEAT, 2, 300);
    size_t i;
    for (i = 300; i < 600; i++) ones[i] = 1;
    f.values = ones;
    f.row_names = rows;
    CHECK(write_as(&f, TEXT) == MOE_OK && holds("bc  @@@@"));
    CHECK(strcmp(strrchr(written, 'E'), "Each is the mean of 1 x 5.\n") == 0);
    f = figure(MOE_FIGURE_TABLE, 2, 2);
    f.values = mixed;
    CHECK(write_as(&f, TEXT) == MOE_OK && holds("0.125  1000\n") && holds("0.250  2000\n"));
    f = figure(MOE_FIGURE_BARS, 2, 1);
    f.values = missing;
    f.row_names = rows;
    CHECK(write_as(&f, TEXT) == MOE_OK && holds("a       1  ###") && holds("bc      -\n"));
}

/* How many rows and columns are drawn before several share a place. */
static void test_limits(void) {
    moe_figure f = figure(MOE_FIGURE_BARS, 256, 1);
    CHECK(write_as(&f, SVG) == MOE_OK && times(" class=\"f0\"") == 256);
    f.rows = 257;
    CHECK(write_as(&f, SVG) == MOE_OK && times(" class=\"f0\"") == 129);
    f = figure(MOE_FIGURE_HEAT, 128, 1);
    CHECK(write_as(&f, SVG) == MOE_OK && times(" class=\"h") == 128 + 10);
    f = figure(MOE_FIGURE_HEAT, 129, 128);
    CHECK(write_as(&f, SVG) == MOE_OK && times(" class=\"h") == 65 * 128 + 10);
    f = figure(MOE_FIGURE_HEAT, 1, 129);
    CHECK(write_as(&f, SVG) == MOE_OK && times(" class=\"h") == 65 + 10);
    f = figure(MOE_FIGURE_TABLE, 257, 65);
    CHECK(write_as(&f, HTML) == MOE_OK && times("<tr") == 257 + 1);
    f = figure(MOE_FIGURE_TABLE, 256, 64);
    CHECK(write_as(&f, HTML) == MOE_OK && times("<tr") == 257);
}

/* A token's column is as wide as the numbers of the experts below it. */
static void test_gloss(void) {
    static const int32_t chosen[] = {3, 11, 0, 4, 5, 6};
    static const char *const tokens[] = {"a", "b", "c"};
    moe_figure f = figure(MOE_FIGURE_TOKENS, 2, 3);
    f.experts = chosen;
    f.column_names = tokens;
    f.n_experts = 12;
    CHECK(write_as(&f, TEXT) == MOE_OK && holds("\na  b  c\n3  11 0\n4  5  6\n"));
}

/* Numbers below 0 have as many decimals as those above. */
static void test_signs(void) {
    static const double above[] = {12345.678, 12.5, 600.25}, below[] = {-12345.678, -12.5, -600.25};
    moe_figure f = figure(MOE_FIGURE_TABLE, 3, 1);
    char number[3][24];
    int i;
    f.values = above;
    CHECK(write_as(&f, TEXT) == MOE_OK);
    for (i = 0; i < 3; i++) {
        char row[8], *at;
        sprintf(row, "\n%d ", i);
        at = strstr(written, row);
        number[i][0] = '-';
        if (!CHECK(at != NULL && sscanf(at + 3, "%20s", number[i] + 1) == 1)) return;
    }
    CHECK(strncmp(number[0], "-12345.7", 6) == 0 || strncmp(number[0], "-12346", 6) == 0);
    f.values = below;
    CHECK(write_as(&f, TEXT) == MOE_OK && holds(number[0]) && holds(number[1]) && holds(number[2]));
}

/* A curve of two points is a line from one side to the other. */
static void test_curve(void) {
    static const double table[] = {0, 10};
    moe_figure f = figure(MOE_FIGURE_LINES, 1, 2);
    size_t i, marks = 0;
    f.values = table;
    CHECK(write_as(&f, TEXT) == MOE_OK);
    for (i = 0; i < written_size; i++) marks += written[i] == '*';
    CHECK(marks >= 60);
}

/* Colors begin and end in turn. */
static void test_shades(void) {
    static const int32_t chosen[] = {0, -1, 2, 1, 1, 0};
    size_t rows, i;
    int kind;
    for (kind = 0; kind < MOE_FIGURE_COUNT; kind++)
        for (rows = 1; rows < 3; rows++) {
            moe_figure f = figure(kind, rows, 3);
            int on = 0, wrong = 0;
            f.experts = f.experts != NULL ? chosen : NULL;
            CHECK(write_as(&f, COLOR) == MOE_OK);
            for (i = 0; i < written_size; i++)
                if (written[i] == 0x1b) {
                    const int ends = strncmp(written + i, "\x1b[0m", 4) == 0;
                    wrong += ends != on;
                    on = !ends;
                }
            CHECK(wrong == 0 && !on);
        }
}

static size_t utf8(unsigned long c, char *out) {
    if (c < 0x800) {
        out[0] = (char)(0xC0 | c >> 6);
        out[1] = (char)(0x80 | (c & 63));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (char)(0xE0 | c >> 12);
        out[1] = (char)(0x80 | (c >> 6 & 63));
        out[2] = (char)(0x80 | (c & 63));
        return 3;
    }
    out[0] = (char)(0xF0 | c >> 18);
    out[1] = (char)(0x80 | (c >> 12 & 63));
    out[2] = (char)(0x80 | (c >> 6 & 63));
    out[3] = (char)(0x80 | (c & 63));
    return 4;
}

/* Columns of a terminal that the first and last characters of blocks take (Unicode's
   East_Asian_Width; marks that combine: none). */
static void test_widths(void) {
    static const struct {
        unsigned long first, last;
        size_t columns;
    } blocks[] = {{0x300, 0x36F, 0},     {0x200B, 0x200D, 0},   {0xFE00, 0xFE0F, 0}, {0x1100, 0x115F, 2},
                  {0x2E80, 0x2E99, 2},   {0x3041, 0x3096, 2},   {0x4E00, 0x9FFF, 2}, {0xA000, 0xA48C, 2},
                  {0xAC00, 0xD7A3, 2},   {0xF900, 0xFAD9, 2},   {0xFE30, 0xFE6B, 2}, {0xFF01, 0xFF60, 2},
                  {0x1F300, 0x1F320, 2}, {0x20000, 0x3FFFD, 2}, {0xA1, 0x2FF, 1},    {0x370, 0x52F, 1},
                  {0x1160, 0x11FF, 1},   {0xFB00, 0xFB06, 1},   {0xFF61, 0xFFDC, 1}};
    size_t i, j;
    for (i = 0; i < sizeof blocks / sizeof *blocks; i++)
        for (j = 0; j < 2; j++) {
            char name[8] = {0}, wanted[32];
            const char *rows[2];
            moe_figure f = figure(MOE_FIGURE_TABLE, 2, 1);
            static const double ones[] = {1, 1};
            utf8(j == 0 ? blocks[i].first : blocks[i].last, name);
            rows[0] = "wide";
            rows[1] = name;
            f.row_names = rows;
            f.values = ones;
            sprintf(wanted, "\n%s%*s  1\n", name, (int)(4 - blocks[i].columns), "");
            CHECK(write_as(&f, TEXT) == MOE_OK);
            if (!CHECK(holds(wanted))) printf("    U+%04lX\n", j == 0 ? blocks[i].first : blocks[i].last);
        }
}

/* ---- streams and arguments ---- */

typedef struct trap {
    long left, calls;
} trap;

static moe_status write_trap(void *ctx, const void *from, size_t size) {
    trap *t = (trap *)ctx;
    (void)from;
    (void)size;
    t->calls++;
    return t->left-- > 0 ? MOE_OK : MOE_ERR_IO;
}

static void test_streams(void) {
    int kind, form;
    for (kind = 0; kind < MOE_FIGURE_COUNT; kind++)
        for (form = 0; form < FORMS; form++) {
            moe_figure f = figure(kind, 3, 4);
            trap t = {0, 0};
            long at, wrong = 0, calls;
            moe_stream stream;
            moe_error error;
            stream.ctx = &t;
            stream.read = NULL;
            stream.write = write_trap;
            t.left = 1000000;
            CHECK(write_form(&f, form, &stream, &error) == MOE_OK);
            for (calls = t.calls, at = 0; at < calls; at++) {
                t.left = at;
                t.calls = 0;
                error.message[0] = '\0';
                if (write_form(&f, form, &stream, &error) != MOE_ERR_IO || t.calls != at + 1 ||
                    strstr(error.message, "stream") == NULL)
                    wrong++;
            }
            CHECK(calls > 0 && wrong == 0);
        }
}

static void refused(const moe_figure *f, moe_status wanted, const char *says) {
    moe_buffer buffer;
    moe_stream stream;
    moe_error error;
    int form;
    memset(&buffer, 0, sizeof buffer);
    stream = moe_buffer_stream(&buffer);
    for (form = 0; form < FORMS; form++) {
        error.message[0] = '\0';
        CHECK(write_form(f, form, &stream, &error) == wanted && write_form(f, form, &stream, NULL) == wanted);
        if (!CHECK(strstr(error.message, says) != NULL)) printf("    %s\n", error.message);
        CHECK(buffer.size == 0);
    }
}

static void test_arguments(void) {
    moe_figure f = figure(MOE_FIGURE_HEAT, 2, 2), two[2];
    moe_buffer buffer;
    moe_stream stream, silent;
    moe_error error;
    memset(&buffer, 0, sizeof buffer);
    memset(&silent, 0, sizeof silent);
    stream = moe_buffer_stream(&buffer);
    CHECK(moe_report_svg(NULL, &stream, &error) == MOE_ERR_ARGUMENT &&
          moe_report_svg(&f, NULL, &error) == MOE_ERR_ARGUMENT);
    CHECK(moe_report_svg(&f, &silent, &error) == MOE_ERR_ARGUMENT &&
          moe_report_text(NULL, 80, 0, &stream, &error) == MOE_ERR_ARGUMENT);
    CHECK(moe_report_html(NULL, NULL, 1, &stream, &error) == MOE_ERR_ARGUMENT &&
          moe_report_html("x", &f, 1, &silent, NULL) == MOE_ERR_ARGUMENT);
    CHECK(moe_report_text(&f, 39, 0, &stream, &error) == MOE_ERR_ARGUMENT && strstr(error.message, "39") != NULL);
    CHECK(moe_report_text(&f, 401, 0, &stream, &error) == MOE_ERR_ARGUMENT &&
          moe_report_text(&f, -1, 0, &stream, &error) == MOE_ERR_ARGUMENT);
    CHECK(buffer.size == 0 && moe_report_text(&f, 40, 0, &stream, &error) == MOE_OK &&
          moe_report_text(&f, 400, 0, &stream, &error) == MOE_OK);
    buffer.size = 0;
    CHECK(moe_report_html(NULL, NULL, 0, &stream, NULL) == MOE_OK && buffer.size > 0);
    f.kind = MOE_FIGURE_COUNT;
    refused(&f, MOE_ERR_ARGUMENT, "kind = 6");
    f.kind = -1;
    refused(&f, MOE_ERR_ARGUMENT, "kind = -1");
    f = figure(MOE_FIGURE_HEAT, 2, 2);
    f.values = NULL;
    refused(&f, MOE_ERR_ARGUMENT, "values is NULL");
    f = figure(MOE_FIGURE_TABLE, 2, 2);
    f.values = NULL;
    refused(&f, MOE_ERR_ARGUMENT, "values is NULL");
    f = figure(MOE_FIGURE_MAP, 2, 2);
    f.experts = NULL;
    refused(&f, MOE_ERR_ARGUMENT, "experts is NULL");
    f = figure(MOE_FIGURE_HEAT, 2, 4);
    f.stride = 3;
    refused(&f, MOE_ERR_ARGUMENT, "stride = 3");
    f = figure(MOE_FIGURE_BARS, 2, 5);
    refused(&f, MOE_ERR_ARGUMENT, "columns = 5");
    f = figure(MOE_FIGURE_HEAT, (size_t)-1 / 4, 8);
    refused(&f, MOE_ERR_OVERFLOW, "rows");
    f = figure(MOE_FIGURE_HEAT, (size_t)-1 / 8, 4);
    refused(&f, MOE_ERR_OVERFLOW, "rows");
    two[0] = figure(MOE_FIGURE_HEAT, 2, 2);
    two[1] = f;
    buffer.size = 0;
    CHECK(moe_report_html("x", two, 2, &stream, &error) == MOE_ERR_OVERFLOW &&
          strncmp(error.message, "figure 1:", 9) == 0 && buffer.size == 0);
    f = figure(MOE_FIGURE_TABLE, 2, 2);
    f.values = NULL;
    f.cells = cells;
    CHECK(write_as(&f, SVG) == MOE_OK && holds("words"));
    moe_buffer_free(&buffer);
}

/* ---- figures of metrics, histories, files ---- */

static void test_metrics(void) {
    static const double classes[] = {1, 2, 3, 4, 5, 6}, load[] = {6, 15};
    moe_report report;
    moe_figure f;
    memset(&report, 0, sizeof report);
    CHECK(moe_figure_classes(NULL).rows == 0 && moe_figure_classes(&report).rows == 0 &&
          moe_figure_load(NULL).rows == 0 && moe_figure_load(&report).rows == 0);
    report.n_experts = 2;
    report.n_classes = 3;
    report.classes = classes;
    report.load = load;
    report.n_assignments = 21;
    f = moe_figure_classes(&report);
    CHECK(f.kind == MOE_FIGURE_HEAT && f.rows == 2 && f.columns == 3 && f.values == classes);
    CHECK(f.title != NULL && f.row_label != NULL && f.column_label != NULL && f.value_label != NULL);
    check_all_forms(&f);
    f = moe_figure_load(&report);
    CHECK(f.kind == MOE_FIGURE_BARS && f.rows == 2 && f.columns == 1 && f.values == load &&
          fabs(f.reference - 10.5) < 1e-12);
    check_all_forms(&f);
}

static void test_history(void) {
    static moe_history h;
    double v[MOE_HISTORY_SERIES];
    size_t i, n, s;
    moe_figure f;
    for (s = 0; s < MOE_HISTORY_SERIES; s++) v[s] = 0;
    CHECK(moe_history_add(NULL, 0, v, 1) == MOE_ERR_ARGUMENT && moe_history_add(&h, 0, NULL, 1) == MOE_ERR_ARGUMENT);
    CHECK(moe_history_add(&h, 0, v, MOE_HISTORY_SERIES + 1) == MOE_ERR_ARGUMENT && h.n == 0);
    for (n = 1; n <= 5000; n++) {
        size_t step = 1, wrong = 0;
        v[0] = (double)(3 * n);
        v[1] = -(double)n;
        if (moe_history_add(&h, (double)n, v, 2) != MOE_OK) wrong++;
        if (h.n == 0 || h.n > MOE_HISTORY_POINTS || h.at[0] > 1 || h.at[0] < 1 || h.at[h.n - 1] > (double)n ||
            h.at[h.n - 1] < (double)n)
            wrong++;
        if (n > MOE_HISTORY_POINTS && h.n < MOE_HISTORY_POINTS / 2) wrong++;
        for (i = 0; i < h.n && wrong == 0; i++) {
            if (fabs(h.values[0][i] - 3 * h.at[i]) > 0 || fabs(h.values[1][i] + h.at[i]) > 0 ||
                (h.values[2][i] >= -1e300 && h.values[2][i] <= 1e300))
                wrong++;
            if (i == 1) step = (size_t)(h.at[1] - h.at[0]);
            /* evenly, but for the newest */
            if (i > 0 && i + 1 < h.n && fabs(h.at[i] - h.at[i - 1] - (double)step) > 0) wrong++;
        }
        if (wrong > 0 || n % 500 == 0) CHECK(wrong == 0);
    }
    f = moe_figure_history(&h, 0, 2, NULL);
    CHECK(f.kind == MOE_FIGURE_LINES && f.rows == 2 && f.columns == h.n && f.stride == MOE_HISTORY_POINTS &&
          f.x == h.at);
    check_all_forms(&f);
    CHECK(moe_figure_history(NULL, 0, 1, NULL).rows == 0 &&
          moe_figure_history(&h, 0, MOE_HISTORY_SERIES + 1, NULL).rows == 0);
    CHECK(moe_figure_history(&h, MOE_HISTORY_SERIES + 1, 0, NULL).rows == 0 &&
          moe_figure_history(&h, MOE_HISTORY_SERIES, 1, NULL).rows == 0);
    h.n = MOE_HISTORY_POINTS + 1; /* damaged */
    CHECK(moe_history_add(&h, 0, v, 1) == MOE_ERR_ARGUMENT && moe_figure_history(&h, 0, 1, NULL).rows == 0);
    f = moe_figure_history(&h, 0, 0, NULL);
    check_all_forms(&f);
}

#ifndef MOE_NO_STDIO
static int file_begins(const char *path, const char *text) {
    moe_buffer buffer;
    int good;
    memset(&buffer, 0, sizeof buffer);
    good = moe_file_read(path, &buffer, NULL) == MOE_OK && buffer.size >= strlen(text) &&
           memcmp(buffer.data, text, strlen(text)) == 0;
    moe_buffer_free(&buffer);
    return remove(path) == 0 && good;
}

static void test_files(void) {
    moe_figure two[2];
    moe_error error;
    two[0] = figure(MOE_FIGURE_HEAT, 2, 2);
    two[1] = figure(MOE_FIGURE_BARS, 2, 1);
    two[0].title = "First";
    two[1].title = "Second";
    CHECK(moe_report_save("report-test.html", "All", two, 2, &error) == MOE_OK &&
          file_begins("report-test.html", "<!DOCTYPE html>"));
    CHECK(moe_report_save("report-test.htm", "All", two, 0, &error) == MOE_OK &&
          file_begins("report-test.htm", "<!DOCTYPE html>"));
    CHECK(moe_report_save("report-test.svg", NULL, two, 2, &error) == MOE_OK &&
          file_begins("report-test.svg", "<svg "));
    CHECK(moe_report_save("report-test", NULL, two, 2, &error) == MOE_OK && file_begins("report-test", "First\n"));
    CHECK(moe_report_save(NULL, NULL, two, 2, &error) == MOE_ERR_ARGUMENT &&
          moe_report_save("x.svg", NULL, two, 0, &error) == MOE_ERR_ARGUMENT);
    CHECK(moe_report_save("x.txt", NULL, NULL, 2, &error) == MOE_ERR_ARGUMENT);
    CHECK(moe_report_save("no/such/folder/x.html", NULL, two, 2, &error) == MOE_ERR_IO &&
          strstr(error.message, "no/such/folder/x.html") != NULL);
    two[1].kind = 99;
    CHECK(moe_report_save("report-test.html", NULL, two, 2, &error) == MOE_ERR_ARGUMENT &&
          remove("report-test.html") != 0);
    CHECK(moe_report_save("report-test.txt", NULL, two, 2, &error) == MOE_ERR_ARGUMENT &&
          strstr(error.message, "kind = 99") != NULL && remove("report-test.txt") != 0);
}

enum { SIDE = 90 };

/* What the figures of the page below show. */
static struct {
    double counts[80], curves[3 * 400], compared[9], half[9], at[SIDE];
    int32_t regions[SIDE * SIDE], chosen[2 * 72];
    const char *tokens[72];
} page;

/* ---- a page to look at ---- */

static void draw_page(moe_figure *f) {
    static const char *const losses[] = {"training", "routers'", "held out"};
    static const char * const routers[] = {"smoe", "similarity_smoe", "expert_choice"};
    static const char * const heads[] = {"loss", "perplexity", "note"};
    static const char * const notes[9] = {NULL, NULL, "baseline", NULL, NULL, "", NULL, NULL, "sees later tokens"};
    f[0] = figure(MOE_FIGURE_HEAT, 8, 10);
    f[0].values = page.counts;
    f[0].title = "Who reads which digit";
    f[0].caption = "Digits that went to each expert.";
    f[0].column_label = "digit";
    f[0].value_label = "digits";
    f[1] = figure(MOE_FIGURE_BARS, 8, 1);
    f[1].values = page.counts + 20;
    f[1].reference = 30;
    f[1].reference_name = "even";
    f[1].title = "Load";
    f[1].value_label = "digits";
    f[2] = figure(MOE_FIGURE_LINES, 3, 400);
    f[2].values = page.curves;
    f[2].row_names = losses;
    f[2].title = "Losses";
    f[2].value_label = "loss (nats)";
    f[2].reference = 2.3;
    f[2].reference_name = "by chance";
    f[3] = figure(MOE_FIGURE_TOKENS, 2, 72);
    f[3].experts = page.chosen;
    f[3].column_names = page.tokens;
    f[3].title = "A text by expert";
    f[3].n_experts = 20;
    f[4] = figure(MOE_FIGURE_TABLE, 3, 3);
    f[4].values = page.compared;
    f[4].half_widths = page.half;
    f[4].cells = notes;
    f[4].row_names = routers;
    f[4].column_names = heads;
    f[4].row_label = "router";
    f[4].title = "Comparison";
    f[5] = figure(MOE_FIGURE_MAP, SIDE, SIDE);
    f[5].experts = page.regions;
    f[5].x = page.at;
    f[5].y = page.at;
    f[5].title = "Regions of the plane";
    f[5].row_label = "x2";
    f[5].column_label = "x1";
    f[6] = figure(MOE_FIGURE_BARS, 3, 2);
    f[6].values = page.compared;
    f[6].half_widths = widths;
    f[6].row_names = routers;
    f[6].title = "Two series with intervals";
    f[7] = figure(MOE_FIGURE_HEAT, 64, 100);
    f[7].title = "64 experts, 100 classes";
    f[7].column_label = "class";
    f[8] = figure(MOE_FIGURE_LINES, 0, 0);
    f[8].title = "Nothing";
}

static int write_page(const char *path) {
    static const char *const words[] = {"The",  " quick",  " brown",  " fox", " jumps",      " over",
                                        " the", " lazy",   " dog",    ".",    "\n",          "It",
                                        " was", " <good>", " & fine", "\t",   "caf\xc3\xa9", "internationalisation"};
    moe_figure f[9];
    moe_error error;
    moe_rng rng = {5};
    int i, j;
    usual_numbers();
    for (i = 0; i < 80; i++) page.counts[i] = floor(120 * pow((double)moe_rng_uniform(&rng), 4));
    page.counts[13] = none();
    for (i = 0; i < 400; i++) {
        page.curves[i] = 2.2 * exp(-i / 80.0) + 0.1 + 0.02 * numbers[i];
        page.curves[400 + i] = 0.3 * exp(-i / 50.0) + 0.05;
        page.curves[800 + i] = i % 50 == 0 ? 1.5 * exp(-i / 90.0) + 0.2 : none();
    }
    for (i = 0; i < 72; i++) {
        page.tokens[i] = words[i % 18];
        page.chosen[i] = (int32_t)moe_rng_below(&rng, 20);
        page.chosen[72 + i] = (int32_t)moe_rng_below(&rng, 8);
    }
    for (i = 0; i < 9; i++) {
        page.compared[i] = 1 + numbers[i];
        page.half[i] = i % 3 == 0 ? 0.03 : -1;
    }
    for (i = 0; i < SIDE; i++) page.at[i] = 2 - 4.0 * i / (SIDE - 1);
    for (i = 0; i < SIDE; i++)
        for (j = 0; j < SIDE; j++)
            page.regions[i * SIDE + j] = page.at[i] * page.at[i] + page.at[j] * page.at[j] < 0.8 ? 0
                                    : page.at[i] > sin(3 * page.at[j])            ? (page.at[j] > 0 ? 1 : 2)
                                    : page.at[j] > 0.5                       ? 3
                                                                        : 17;
    draw_page(f);
    if (moe_report_save(path, "All kinds of figures & <signs>", f, 9, &error) == MOE_OK) return 0;
    printf("%s\n", error.message);
    return 1;
}
#endif

int main(int count, char **words) {
#ifndef MOE_NO_STDIO
    if (count == 3 && strcmp(words[1], "page") == 0) return write_page(words[2]);
#endif
    (void)count;
    (void)words;
    usual_numbers();
    test_bytes();
    usual_numbers();
    CASE(test_history());
    CASE(test_regions());
    CASE(test_curve());
    CASE(test_widths());
    CASE(test_kinds());
    CASE(test_large());
    CASE(test_odd_numbers());
    CASE(test_numbers());
    CASE(test_digits());
    CASE(test_far_reference());
    CASE(test_ranges());
    CASE(test_buckets());
    CASE(test_thinned_heat());
    CASE(test_parser());
    CASE(test_texts());
    CASE(test_wrapping());
    CASE(test_narrow());
    CASE(test_chance());
    CASE(test_contrast());
    CASE(test_messages());
    CASE(test_lengths());
    CASE(test_places());
    CASE(test_inside());
    CASE(test_middles());
    CASE(test_columns());
    CASE(test_drawn());
    CASE(test_bar_reference());
    CASE(test_others());
    CASE(test_even());
    CASE(test_edges());
    CASE(test_heads());
    CASE(test_bars());
    CASE(test_letters());
    CASE(test_wide_text());
    CASE(test_limits());
    CASE(test_gloss());
    CASE(test_signs());
    CASE(test_shades());
    CASE(test_streams());
    CASE(test_arguments());
    CASE(test_metrics());
#ifndef MOE_NO_STDIO
    CASE(test_files());
#endif
    free(written);
    return test_end();
}
