/* libFuzzer target for the safetensors reader: opens, walks, finds, reads metadata and values.
   clang -std=c99 -g -O1 -I. -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all tests/fuzz_file.c -o fuzz_file -lm
   ./fuzz_file -max_total_time=120 -max_len=4096
   The mutator below writes plausible headers, so that most inputs get past the first checks. */

#define MOE_IMPLEMENTATION
#include "moe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

static void want(int good) {
    if (!good) abort();
}

/* ---- the target -------------------------------------------------------------------------------------------------------- */

static void use_tensor(const moe_file *file, const moe_file_tensor *t) {
    moe_real values[8];
    int64_t integers[8];
    char name[64];
    moe_file_tensor found;
    size_t n = t->count < 8 ? t->count : 8;
    want(t->data >= file->bytes && t->bytes <= (size_t)(file->bytes + file->size - t->data));
    want(moe_file_values(t, 0, n, values) == MOE_OK && moe_file_values(t, t->count - n, n, values) == MOE_OK);
    want(moe_file_values(t, t->count, 1, values) == MOE_ERR_SHAPE);
    (void)moe_file_integers(t, t->count - n, n, integers);
    if (t->name_length < sizeof name && memchr(t->name, '\\', t->name_length) == NULL) {
        memcpy(name, t->name, t->name_length);
        name[t->name_length] = '\0';
        want(moe_file_find(file, name, &found) == MOE_OK && found.name == t->name && found.data == t->data);
    }
}

static void use_metadata(const moe_file *file, const char *key) {
    char *value;
    size_t length, again;
    moe_status status = moe_file_metadata(file, key, NULL, 0, &length);
    if (status == MOE_ERR_NOT_FOUND) return;
    want(status == MOE_ERR_SPACE);
    value = (char *)malloc(length + 1);
    want(value != NULL && moe_file_metadata(file, key, value, length, &again) == MOE_ERR_SPACE && again == length);
    want(moe_file_metadata(file, key, value, length + 1, &again) == MOE_OK && again == length && strlen(value) == length);
    free(value);
}

/* Every byte of the data belongs to one tensor, checked the slow way. */
static void check_tiling(moe_file *file) {
    size_t start = 8 + file->header_size, size = file->size - start, i;
    unsigned char *owned = (unsigned char *)calloc(size + 1, 1);
    moe_file_tensor t;
    want(owned != NULL);
    moe_file_rewind(file);
    while (moe_file_next(file, &t) == MOE_OK)
        for (i = 0; i < t.bytes; i++) want(owned[(size_t)(t.data - file->bytes) - start + i]++ == 0);
    for (i = 0; i < size; i++) want(owned[i] == 1);
    free(owned);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    moe_file file;
    moe_file_tensor t;
    moe_error error;
    size_t n = 0;
    moe_status status = moe_file_open(&file, data, size, &error);
    want(moe_file_open(&file, data, size, NULL) == status);
    if (status != MOE_OK) {
        want(status == error.code && error.message[0] != '\0' && memchr(error.message, '\0', sizeof error.message) != NULL);
        return 0;
    }
    while ((status = moe_file_next(&file, &t)) == MOE_OK) {
        use_tensor(&file, &t);
        n++;
    }
    want(status == MOE_ERR_NOT_FOUND && n == file.n_tensors);
    want(moe_file_find(&file, "no such \"tensor\"", &t) == MOE_ERR_NOT_FOUND);
    use_metadata(&file, "");
    use_metadata(&file, "a");
    use_metadata(&file, "format");
    check_tiling(&file);
    return 0;
}

/* ---- the mutator ------------------------------------------------------------------------------------------------------- */

typedef struct maker {
    uint8_t *out;
    size_t room, size;
    uint64_t random;
} maker;

static unsigned below(maker *m, unsigned n) {
    m->random = m->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (unsigned)(m->random >> 33) % n;
}

static void put(maker *m, const char *s) {
    size_t n = strlen(s);
    if (n > m->room - m->size) n = m->room - m->size;
    memcpy(m->out + m->size, s, n);
    m->size += n;
}

static void put_number(maker *m, unsigned long n) {
    char digits[32];
    sprintf(digits, "%lu", n);
    put(m, digits);
}

/* Mostly what belongs here, seldom something else. */
static void put_rarely_odd(maker *m, const char *usual) {
    static const char *const odd[] = {"", ",", "}", "{", "[", "]", "\"", ":", "null", "-1", "1.5", "18446744073709551616",
                                      "99999999999999999999", "\\", "\\u0061", "\"\\ud83d\\ude00\"", "\"\\ud83d\"",
                                      "\"a\"", "{\"a\":1}", "\n", "\x01", "0", "1e3", "00"};
    put(m, below(m, 64) == 0 ? odd[below(m, sizeof odd / sizeof odd[0])] : usual);
    if (below(m, 32) == 0) put(m, " ");
}

static void put_name(maker *m) {
    static const char *const names[] = {"\"a\"", "\"b\"", "\"c\"", "\"\\u0061\"", "\"\\/\"", "\"/\"", "\"\"",
                                        "\"layer.0.weight\"", "\"layer.1.weight\"",
                                        "\"\xc3\xa4\"", "\"\\u00e4\"", "\"\\ud83d\\ude00\"",
                                        "\"__metadata__\"", "\"format\"", "\"dtype\"", "\"}\""};
    char numbered[32];
    if (below(m, 2) == 0) {
        sprintf(numbered, "\"t%u\"", below(m, 1000));
        put_rarely_odd(m, numbered);
    } else
        put_rarely_odd(m, names[below(m, sizeof names / sizeof names[0])]);
}

/* One tensor at [*end, ...) of the data; now and then the numbers do not fit. Moves *end. */
static void put_tensor(maker *m, unsigned long *end) {
    unsigned type = below(m, MOE_DTYPE_COUNT), dims = below(m, 4), order = below(m, 6), i;
    unsigned long count = 1, begin = *end, shape[4];
    char quoted[16];
    for (i = 0; i < dims; i++) {
        shape[i] = below(m, 5);
        count *= shape[i];
    }
    *end += count * moei_dtype_sizes[type];
    put_rarely_odd(m, "{");
    for (i = 0; i < 3; i++) {
        unsigned part = (order + i * (order < 3 ? 1 : 2)) % 3, d;
        if (i > 0) put_rarely_odd(m, ",");
        if (part == 0) {
            sprintf(quoted, "\"%s\"", moei_dtype_names[type]);
            put_rarely_odd(m, "\"dtype\"");
            put_rarely_odd(m, ":");
            put_rarely_odd(m, quoted);
        } else if (part == 1) {
            put_rarely_odd(m, "\"shape\":[");
            for (d = 0; d < dims; d++) {
                if (d > 0) put_rarely_odd(m, ",");
                put_number(m, shape[d]);
            }
            put_rarely_odd(m, "]");
        } else {
            put_rarely_odd(m, "\"data_offsets\":[");
            put_number(m, begin + (below(m, 64) == 0 ? 1u : 0u));
            put_rarely_odd(m, ",");
            put_number(m, *end + (below(m, 64) == 0 ? 1u : 0u));
            put_rarely_odd(m, "]");
        }
    }
    put_rarely_odd(m, "}");
}

static void put_metadata(maker *m) {
    unsigned n = below(m, 4);
    put(m, "\"__metadata__\":{");
    for (; n > 0; n--) {
        put_name(m);
        put_rarely_odd(m, ":");
        put_name(m);
        if (n > 1) put_rarely_odd(m, ",");
    }
    put_rarely_odd(m, "}");
}

static void put_length(maker *m, size_t length) {
    int i;
    for (i = 0; i < 8; i++) m->out[i] = (uint8_t)((uint64_t)length >> 8 * i);
}

static void make_file(maker *m) {
    unsigned n = below(m, 6), i;
    unsigned long end = 0;
    size_t header;
    put(m, "        {");
    for (i = 0; i < n; i++) {
        if (i > 0) put_rarely_odd(m, ",");
        if (below(m, 8) == 0) put_metadata(m);
        else {
            put_name(m);
            put_rarely_odd(m, ":");
            put_tensor(m, &end);
        }
    }
    put_rarely_odd(m, "}");
    while (below(m, 3) == 0) put(m, " ");
    header = m->size;
    for (; end > 0 && m->size < m->room; end--) m->out[m->size++] = (uint8_t)below(m, 256);
    if (below(m, 32) == 0 && m->size < m->room) m->out[m->size++] = 0;
    put_length(m, header - 8);
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed) {
    maker m;
    size_t header;
    memset(&m, 0, sizeof m);
    m.out = data;
    m.room = max_size;
    m.random = seed;
    (void)below(&m, 2);
    if (max_size < 16 || below(&m, 8) == 0) return LLVMFuzzerMutate(data, size, max_size);
    if (size < 10 || below(&m, 2) == 0) {
        make_file(&m);
        return m.size;
    }
    header = data[0] | (size_t)data[1] << 8; /* change the header's text and set its length again */
    if (header < 2 || header > size - 8) return LLVMFuzzerMutate(data, size, max_size);
    {
        uint8_t *text = (uint8_t *)malloc(max_size);
        size_t rest = size - 8 - header, changed;
        want(text != NULL);
        memcpy(text, data + 8, header);
        changed = LLVMFuzzerMutate(text, header, max_size - 8 - rest);
        memmove(data + 8 + changed, data + 8 + header, rest);
        memcpy(data + 8, text, changed);
        free(text);
        put_length(&m, changed);
        return 8 + changed + rest;
    }
}
