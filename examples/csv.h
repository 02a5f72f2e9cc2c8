/* Tables as text (CSV), for the examples that read a user's own data. Include it after moe.h.

   A line has cells separated by commas, semicolons, tabs or, if the first line has none of these,
   blanks. A cell may be quoted, with quotes inside doubled; it ends on its line. Blanks around
   cells, empty lines, a byte order mark and carriage returns are ignored. All lines have the same
   number of cells. Errors are reported with the line's number. */
#ifndef CSV_H
#define CSV_H

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CSV_WHY_SIZE = 400, CSV_SHOWN_SIZE = 44 };

typedef struct csv_table {
    moe_buffer text;      /* owned: the file, cut into cells */
    char **cells;         /* owned: [rows,columns] */
    size_t *lines;        /* owned: [rows] the line of each row, from 1 */
    size_t rows, columns; /* columns: those of the first line */
    size_t room;          /* private: rows that are allocated */
    char separator;
    char why[CSV_WHY_SIZE]; /* the error, if reading failed */
} csv_table;

static inline void csv_free(csv_table *t) {
    moe_buffer_free(&t->text);
    free(t->cells);
    free(t->lines);
    t->cells = NULL;
    t->lines = NULL;
    t->rows = t->columns = t->room = 0;
}

/* A cell for a message: truncated, not within a character, and without control characters. */
static inline const char *csv_shown(const char *cell, char out[CSV_SHOWN_SIZE]) {
    size_t n = 0;
    for (; cell[n] != '\0' && n < CSV_SHOWN_SIZE - 4; n++) {
        const unsigned char byte = (unsigned char)cell[n];
        const int second = n > 0 && (unsigned char)cell[n - 1] == 0xc2 && byte < 0xa0; /* of U+0080 to U+009F */
        if (second) out[n - 1] = '?';
        out[n] = byte < 0x20 || byte == 0x7f || second ? '?' : cell[n];
    }
    while (n > 0 && ((unsigned char)cell[n] & 0xc0) == 0x80) n--;
    strcpy(out + n, cell[n] != '\0' ? "..." : "");
    return out;
}

enum { CSV_NUMBER, CSV_MISSING, CSV_TEXT, CSV_INFINITE };

/* The kind of a cell; *value receives a number. */
static inline int csv_number(const char *cell, double *value) {
    static const char *const missing[] = {"", "?", "na", "n/a", "nan", "null", "none", "-"};
    char *end, small[8];
    size_t i, n;
    for (n = 0; cell[n] != '\0' && n < sizeof small - 1; n++) small[n] = (char)tolower((unsigned char)cell[n]);
    for (small[n] = '\0', i = 0; i < sizeof missing / sizeof *missing; i++)
        if (cell[n] == '\0' && strcmp(small, missing[i]) == 0) return CSV_MISSING;
    *value = strtod(cell, &end);
    if (end == cell || *end != '\0') return CSV_TEXT;
    return *value - *value == 0 ? CSV_NUMBER : *value == *value ? CSV_INFINITE : CSV_MISSING;
}

/* The separator that is most frequent outside quotes in the first line: a comma, semicolon or tab,
   else a blank. */
static inline char csv_separator(const char *line) {
    static const char usual[] = ",;\t";
    size_t count[3] = {0, 0, 0}, best = 0, i;
    int quoted = 0;
    for (char before = ','; *line != '\0' && *line != '\n'; before = *line++) {
        const char *found = quoted ? NULL : strchr(usual, *line);
        /* within a cell, as in 15", a quote is a character */
        if (*line == '"' && (quoted || strchr(",;\t \"", before) != NULL)) quoted = !quoted;
        if (found != NULL) count[found - usual]++;
    }
    for (i = 1; i < 3; i++)
        if (count[i] > count[best]) best = i;
    return (char)(count[best] > 0 ? usual[best] : ' ');
}

static inline int csv_is_blank(char c) { return c == ' ' || c == '\r' || c == '\t'; }

/* Takes one cell from *p, terminates it, and leaves *p at the separator after it, which the
   terminator may have replaced: *after holds it. Returns NULL if a quote is not closed on its
   line. */
static inline char *csv_cell(char **p, char separator, char *after) {
    char *from, *to, *s = *p;
    while (csv_is_blank(*s) && *s != separator) s++;
    from = to = s;
    if (*s == '"') {
        for (s++; *s != '\0' && *s != '\n' && (*s != '"' || s[1] == '"'); s++) {
            *to++ = *s;
            s += *s == '"';
        }
        if (*s != '"') return NULL;
        for (s++; *s != '\0' && *s != '\n' && *s != separator; s++)
            if (!csv_is_blank(*s)) *to++ = *s; /* "a"b is ab */
    } else {
        while (*s != '\0' && *s != '\n' && *s != separator) s++;
        for (to = s; to > from && csv_is_blank(to[-1]);) to--;
    }
    *after = *s;
    *p = s;
    *to = '\0';
    return from;
}

/* Makes room for one more row. */
static inline int csv_grow(csv_table *t) {
    size_t room = t->room > 0 ? 2 * t->room : 64;
    char **cells;
    size_t *lines;
    if (t->rows < t->room) return 0;
    if (room > SIZE_MAX / sizeof *cells / t->columns) return 1;
    if ((cells = (char **)realloc(t->cells, room * t->columns * sizeof *cells)) == NULL) return 1;
    t->cells = cells;
    if ((lines = (size_t *)realloc(t->lines, room * sizeof *lines)) == NULL) return 1;
    t->lines = lines;
    t->room = room;
    return 0;
}

/* The number of cells of a line, where csv_cell ends them. */
static inline size_t csv_count(const char *line, char separator) {
    const char *s = line;
    size_t n = 0;
    for (;; s++) {
        while (csv_is_blank(*s) && (*s != separator || separator == ' ')) s++;
        if (separator == ' ' && (*s == '\0' || *s == '\n')) return n;
        n++;
        if (*s == '"')
            for (s++; *s != '\0' && *s != '\n' && (*s != '"' || s[1] == '"'); s++) s += *s == '"';
        while (*s != '\0' && *s != '\n' && *s != separator) s++;
        if (*s != separator) return n;
    }
}

/* Splits one line into the next row and advances *p. Returns 0, or 1 after writing t->why. */
static inline int csv_line(csv_table *t, char **p, size_t line) {
    char after, *s = *p, **row;
    size_t n = 0;
    if (t->columns == 0) t->columns = csv_count(s, t->separator);
    if (csv_grow(t)) {
        strcpy(t->why, "out of memory");
        return 1;
    }
    for (row = t->cells + t->rows * t->columns;; s++) {
        char *cell;
        if (t->separator == ' ')
            while (csv_is_blank(*s)) s++;
        if (t->separator == ' ' && (*s == '\0' || *s == '\n')) {
            after = *s;
            break;
        }
        if ((cell = csv_cell(&s, t->separator, &after)) == NULL) {
            sprintf(t->why,
                    "line %lu: a quote is not closed; a cell must end on its line, and a quote inside a quoted cell is "
                    "doubled",
                    (unsigned long)line);
            return 1;
        }
        if (n < t->columns) row[n] = cell;
        n++;
        if (after != t->separator) break;
    }
    *p = s + (after == '\n');
    if (n != t->columns) {
        sprintf(t->why,
                "line %lu has %lu cells, the first line has %lu: every line must have the same columns; add the "
                "missing cells, delete the line, or put cells that contain a separator into quotes",
                (unsigned long)line, (unsigned long)n, (unsigned long)t->columns);
        return 1;
    }
    t->lines[t->rows++] = line;
    return 0;
}

/* Bytes of the UTF-8 character at s; 0 if it is invalid. */
static inline size_t csv_character(const unsigned char *s) {
    unsigned least = s[0] == 0xe0 ? 0xa0 : s[0] == 0xf0 ? 0x90 : 0x80;
    unsigned most = s[0] == 0xed ? 0x9f : s[0] == 0xf4 ? 0x8f : 0xbf;
    size_t n = s[0] < 0x80 ? 1 : s[0] < 0xc2 ? 0 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : s[0] < 0xf5 ? 4 : 0, i;
    if (n > 1 && (s[1] < least || s[1] > most)) return 0;
    for (i = 2; i < n; i++)
        if (s[i] < 0x80 || s[i] > 0xbf) return 0;
    return n;
}

/* The first line that is not UTF-8; 0: all are. */
static inline size_t csv_broken_line(const char *text) {
    const unsigned char *s = (const unsigned char *)text;
    size_t line = 1, n;
    for (; *s != '\0'; s += n) {
        line += *s == '\n';
        if ((n = csv_character(s)) == 0) return line;
    }
    return 0;
}

/* Splits t->text, which is terminated, into at most most_rows rows. Returns 0, or 1 after writing
   t->why. */
static inline int csv_cut(csv_table *t, size_t most_rows) {
    char *p = (char *)t->text.data;
    size_t line, length = strlen(p);
    if (length + 1 < t->text.size) {
        sprintf(t->why, "byte %lu is zero, so this is not text; save the table as CSV, in UTF-8",
                (unsigned long)length + 1);
        return 1;
    }
    if ((line = csv_broken_line(p)) > 0) {
        sprintf(t->why, "line %lu has a character that is not UTF-8: save the table as CSV in UTF-8",
                (unsigned long)line);
        return 1;
    }
    if (strncmp(p, "\xef\xbb\xbf", 3) == 0) p += 3;
    for (line = 1; *p != '\0' && t->rows < most_rows; line++) {
        size_t blank = strspn(p, " \t\r");
        if (p[blank] == '\n' || p[blank] == '\0') {
            p += blank + (p[blank] == '\n');
            continue;
        }
        if (t->rows == 0) t->separator = csv_separator(p);
        if (csv_line(t, &p, line)) return 1;
    }
    if (t->rows == 0) strcpy(t->why, "it is empty");
    return t->rows == 0;
}

/* Reads a file into *t, which is {0}; call csv_free afterwards in any case. Returns 0, or 1 after
   writing t->why. */
static inline int csv_read(const char *path, size_t most_rows, csv_table *t) {
    moe_stream stream = moe_buffer_stream(&t->text);
    moe_error error = {0};
    if (moe_file_read(path, &t->text, &error) != MOE_OK) {
        sprintf(t->why, "%.*s", CSV_WHY_SIZE - 1, error.message);
        return 1;
    }
    if (stream.write(stream.ctx, "", 1) != MOE_OK) {
        strcpy(t->why, "out of memory");
        return 1;
    }
    return csv_cut(t, most_rows);
}

#endif /* CSV_H */
