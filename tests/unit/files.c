/* Memory, streams and safetensors files: round trips, malformed and hostile files, failing memory
   and failing streams. cc -std=c99 -O1 -DMOE_NO_SIMD -I. tests/unit/files.c -o files -lm && ./files
   Writes small files named files-test.* into the current folder and removes them. */

#define MOE_IMPLEMENTATION
#include "moe.h"
#include "../test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static uint64_t random_state = 20240229;

static uint64_t random_next(void) { /* xorshift64* */
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * UINT64_C(2685821657736338717);
}

static size_t random_below(size_t n) { return n > 0 ? (size_t)(random_next() >> 11) % n : 0; }

/* ---- files made by hand; every file gets a block of its exact size, so that a sanitizer sees one
   byte too far ---- */

static unsigned char *block_of(size_t size) {
    unsigned char *p = (unsigned char *)malloc(size > 0 ? size : 1);
    if (p == NULL) exit(2);
    return p;
}

static void put_length(unsigned char *p, uint64_t length) {
    int i;
    for (i = 0; i < 8; i++) p[i] = (unsigned char)(length >> 8 * i);
}

/* The header text, and data bytes 0, 1, 2, ... behind it. */
static unsigned char *file_of(const char *header, size_t header_size, size_t data, size_t *size) {
    unsigned char *p;
    size_t i;
    *size = 8 + header_size + data;
    p = block_of(*size);
    put_length(p, header_size);
    memcpy(p + 8, header, header_size);
    for (i = 0; i < data; i++) p[8 + header_size + i] = (unsigned char)i;
    return p;
}

/* Uses all of an open file; returns 0 when the reader contradicts itself. */
static int use_all(moe_file *file) {
    moe_file_tensor t, again;
    moe_real values[16];
    int64_t integers[16];
    char name[300], text[64];
    size_t n = 0, length;
    moe_status status;
    int good = 1;
    while ((status = moe_file_next(file, &t)) == MOE_OK) {
        n++;
        if (t.data < file->bytes || t.bytes > (size_t)(file->bytes + file->size - t.data)) return 0;
        if (moe_file_values(&t, 0, t.count < 16 ? t.count : 16, values, NULL) != MOE_OK) good = 0;
        if (t.count > 0 && moe_file_values(&t, t.count - 1, 1, values, NULL) != MOE_OK) good = 0;
        if (moe_file_values(&t, t.count, 1, values, NULL) != MOE_ERR_SHAPE) good = 0;
        (void)moe_file_values(&t, 0, t.count < 16 ? t.count : 16, NULL, integers);
        if (t.name_length < sizeof name && memchr(t.name, '\\', t.name_length) == NULL) {
            memcpy(name, t.name, t.name_length);
            name[t.name_length] = '\0';
            if (moe_file_find(file, name, &again) != MOE_OK || again.data != t.data || again.bytes != t.bytes ||
                again.name != t.name)
                good = 0;
        }
    }
    if (status != MOE_ERR_NOT_FOUND || n != file->n_tensors) good = 0;
    if (moe_file_find(file, "no such tensor", &t) != MOE_ERR_NOT_FOUND) good = 0;
    status = moe_file_metadata(file, "format", text, sizeof text, &length);
    if (status == MOE_OK && strlen(text) != length) good = 0;
    if (status != MOE_OK && status != MOE_ERR_NOT_FOUND && status != MOE_ERR_SPACE) good = 0;
    file->at = 0;
    return good;
}

/* Opens; a failure must say why and leave the file as it was. Returns 0 when that does not hold. */
static int open_any(const unsigned char *bytes, size_t size, int *opened) {
    moe_file file, before;
    moe_error error;
    moe_status status;
    memset(&file, 0x5a, sizeof file);
    before = file;
    error.code = MOE_OK;
    error.message[0] = '\0';
    status = moe_file_open(&file, bytes, size, &error);
    *opened = status == MOE_OK;
    if (*opened) return error.code == MOE_OK && use_all(&file);
    return status < 0 && error.code == status && error.message[0] != '\0' &&
           strlen(error.message) < sizeof error.message && memcmp(&file, &before, sizeof file) == 0;
}

/* ---- malformed files ---- */

#define T(offsets) "{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" offsets "}"

typedef struct malformed {
    const char *header;
    size_t data;
    moe_status status;
    const char *word; /* in the message */
} malformed;

static const malformed malformed_files[] = {
    {"", 0, MOE_ERR_FORMAT, "begin with {"},
    {"    ", 0, MOE_ERR_FORMAT, "begin with {"},
    {" {}", 0, MOE_ERR_FORMAT, "begin with {"},
    {"[]", 0, MOE_ERR_FORMAT, "begin with {"},
    {"{", 0, MOE_ERR_FORMAT, "header ends"},
    {"{\"a", 0, MOE_ERR_FORMAT, "does not end"},
    {"{\"a\"", 0, MOE_ERR_FORMAT, "header ends"},
    {"{\"a\":", 0, MOE_ERR_FORMAT, "header ends"},
    {"{\"a\":{", 0, MOE_ERR_FORMAT, "header ends"},
    {"{,}", 0, MOE_ERR_FORMAT, "expected"},
    {"{}x", 0, MOE_ERR_FORMAT, "only spaces"},
    {"{}\n", 0, MOE_ERR_FORMAT, "only spaces"},
    {"{}{}", 0, MOE_ERR_FORMAT, "only spaces"},
    {"{} ", 1, MOE_ERR_FORMAT, "hole"},
    {"{\"a\":" T("[0,4]") ",}", 4, MOE_ERR_FORMAT, "expected"},
    {"{\"a\":" T("[0,4]") " \"b\":" T("[4,8]") "}", 8, MOE_ERR_FORMAT, ", is expected"},
    {"{\"a\" " T("[0,4]") "}", 4, MOE_ERR_FORMAT, ": is expected"},
    {"{a:" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "\" is expected"},
    {"{\"a\":" T("[0,4]") "}", 5, MOE_ERR_FORMAT, "hole"},
    {"{\"a\":" T("[0,4]") "}", 3, MOE_ERR_FORMAT, "[0, 4] go beyond the 3 bytes of data"},
    {"{\"a\":" T("[1,5]") "}", 5, MOE_ERR_FORMAT, "hole"},
    {"{\"a\":" T("[0,4]") ",\"b\":" T("[2,6]") "}", 6, MOE_ERR_FORMAT, "overlap"},
    {"{\"a\":" T("[0,4]") ",\"b\":" T("[2,6]") "}", 8, MOE_ERR_FORMAT, "overlap"},
    {"{\"a\":" T("[0,4]") ",\"b\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "overlap"},
    {"{\"a\":" T("[0,4]") ",\"b\":" T("[0,4]") "}", 8, MOE_ERR_FORMAT, "overlap"},
    {"{\"a\":" T("[0,4]") ",\"b\":" T("[8,12]") "}", 12, MOE_ERR_FORMAT, "tensor 'b', byte 60: "},
    {"{\"a\":" T("[0,4]") ",\"b\":" T("[4,8]") ",\"a\":" T("[8,12]") "}", 12, MOE_ERR_FORMAT,
     "'a': the name occurs twice"},
    {"{\"ab\":" T("[0,4]") ",\"\\u0061b\":" T("[4,8]") "}", 8, MOE_ERR_FORMAT, "twice"},
    {"{\"a/b\":" T("[0,4]") ",\"a\\/b\":" T("[4,8]") "}", 8, MOE_ERR_FORMAT, "twice"},
    {"{\"\\u00e4\":" T("[0,4]") ",\"\\u00E4\":" T("[4,8]") "}", 8, MOE_ERR_FORMAT, "twice"},
    {"{\"\xc3\xa4\":" T("[0,4]") ",\"\\u00e4\":" T("[4,8]") "}", 8, MOE_ERR_FORMAT, "twice"},
    {"{\"\":" T("[0,4]") ",\"\":" T("[4,8]") "}", 8, MOE_ERR_FORMAT, "twice"},
    {"{\"a\":" T("[4,0]") "}", 4, MOE_ERR_FORMAT, "before they begin"},
    {"{\"a\":" T("[0,3]") "}", 4, MOE_ERR_FORMAT, "another size"},
    {"{\"a\":" T("[0,5]") "}", 5, MOE_ERR_FORMAT, "shape needs 4"},
    {"{\"a\":" T("[0]") "}", 4, MOE_ERR_FORMAT, "two numbers"},
    {"{\"a\":" T("[]") "}", 4, MOE_ERR_FORMAT, "two numbers"},
    {"{\"a\":" T("[0,4,4]") "}", 4, MOE_ERR_UNSUPPORTED, "more than 2"},
    {"{\"a\":" T("4") "}", 4, MOE_ERR_FORMAT, "[ is expected"},
    {"{\"a\":" T("[0,4") "}", 4, MOE_ERR_FORMAT, "expected"},
    {"{\"a\":" T("[0 4]") "}", 4, MOE_ERR_FORMAT, ", is expected"},
    {"{\"a\":" T("[0,4,]") "}", 4, MOE_ERR_UNSUPPORTED, "more than 2"},
    {"{\"a\":" T("[-0,4]") "}", 4, MOE_ERR_FORMAT, "non-negative"},
    {"{\"a\":" T("[0,4.0]") "}", 4, MOE_ERR_FORMAT, "plain"},
    {"{\"a\":" T("[0,4e0]") "}", 4, MOE_ERR_FORMAT, "plain"},
    {"{\"a\":" T("[0,04]") "}", 4, MOE_ERR_FORMAT, "plain"},
    {"{\"a\":" T("[0,0x4]") "}", 4, MOE_ERR_FORMAT, "expected"},
    {"{\"a\":" T("[0,\"4\"]") "}", 4, MOE_ERR_FORMAT, "plain"},
    {"{\"a\":" T("[0,99999999999999999999999]") "}", 4, MOE_ERR_OVERFLOW, "size_t"},
    {"{\"a\":" T("[0,18446744073709551616]") "}", 4, MOE_ERR_OVERFLOW, "size_t"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[-4],\"data_offsets\":[0,4]}}", 4, MOE_ERR_FORMAT, "non-negative"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4.0],\"data_offsets\":[0,4]}}", 4, MOE_ERR_FORMAT, "plain"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1E1],\"data_offsets\":[0,10]}}", 10, MOE_ERR_FORMAT, "plain"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":4,\"data_offsets\":[0,4]}}", 4, MOE_ERR_FORMAT, "[ is expected"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":null,\"data_offsets\":[0,4]}}", 4, MOE_ERR_FORMAT, "[ is expected"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[[4]],\"data_offsets\":[0,4]}}", 4, MOE_ERR_FORMAT, "plain"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,4],\"data_offsets\":[0,4]}}", 4, MOE_ERR_UNSUPPORTED,
     "more than 8"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
     MOE_ERR_OVERFLOW, "size_t"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[18446744073709551615,2],\"data_offsets\":[0,4]}}", 4, MOE_ERR_OVERFLOW,
     "size_t"},
    {"{\"a\":{\"dtype\":\"F64\",\"shape\":[18446744073709551615],\"data_offsets\":[0,4]}}", 4, MOE_ERR_OVERFLOW,
     "size_t"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4, MOE_ERR_FORMAT, "needs 16"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,4]}}", 4, MOE_ERR_FORMAT, "needs 0"},
    {"{\"a\":{\"dtype\":\"U9\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4, MOE_ERR_UNSUPPORTED, "'U9'"},
    {"{\"a\":{\"dtype\":\"f32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, MOE_ERR_UNSUPPORTED, "'f32'"},
    {"{\"a\":{\"dtype\":\"\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4, MOE_ERR_UNSUPPORTED, "dtype ''"},
    {"{\"a\":{\"dtype\":8,\"shape\":[4],\"data_offsets\":[0,4]}}", 4, MOE_ERR_FORMAT, "\" is expected"},
    {"{\"a\":{\"dtype\":null,\"shape\":[4],\"data_offsets\":[0,4]}}", 4, MOE_ERR_FORMAT, "\" is expected"},
    {"{\"a\":{}}", 0, MOE_ERR_FORMAT, "dtype is missing"},
    {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,4]}}", 4, MOE_ERR_FORMAT, "shape is missing"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4]}}", 4, MOE_ERR_FORMAT, "data_offsets is missing"},
    {"{\"a\":{\"shape\":[4],\"data_offsets\":[0,4]}}", 4, MOE_ERR_FORMAT, "dtype is missing"},
    {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4, MOE_ERR_FORMAT,
     "dtype occurs twice"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"shape\":[4],\"data_offsets\":[0,4]}}", 4, MOE_ERR_FORMAT,
     "shape occurs twice"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4],\"d\\u0061ta_offsets\":[0,4]}}", 4, MOE_ERR_FORMAT,
     "data_offsets occurs"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4],\"stride\":[1]}}", 4, MOE_ERR_FORMAT,
     "unknown key 'stride'"},
    {"{\"a\":{\"dtype\":\"U8\" \"shape\":[4],\"data_offsets\":[0,4]}}", 4, MOE_ERR_FORMAT, ", is expected"},
    {"{\"a\":[\"U8\",[4],[0,4]]}", 4, MOE_ERR_FORMAT, "{ is expected"},
    {"{\"a\":\"U8\"}", 0, MOE_ERR_FORMAT, "{ is expected"},
    {"{\"a\":null}", 0, MOE_ERR_FORMAT, "{ is expected"},
    {"{\"a\n\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "control character 10"},
    {"{\"\x1f\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "control character 31"},
    {"{\"\\x61\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "escape"},
    {"{\"\\u12g4\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "escape"},
    {"{\"\x80\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "byte 10: a string is not UTF-8"},
    {"{\"a\xc3\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "byte 11: a string is not UTF-8"},
    {"{\"a\xff\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "byte 11: a string is not UTF-8"},
    {"{\"\xc0\x80\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "not UTF-8"},
    {"{\"\xc1\xbf\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "not UTF-8"},
    {"{\"\xe0\x9f\xbf\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "not UTF-8"},
    {"{\"\xed\xa0\x80\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "not UTF-8"},
    {"{\"\xf0\x8f\xbf\xbf\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "not UTF-8"},
    {"{\"\xf4\x90\x80\x80\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "not UTF-8"},
    {"{\"\xf8\x88\x80\x80\x80\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "not UTF-8"},
    {"{\"\xe2\x82", 0, MOE_ERR_FORMAT, "not UTF-8"}, /* the file ends inside the character */
    {"{\"__metadata__\":{\"\xff\":\"\"}}", 0, MOE_ERR_FORMAT, "not UTF-8"},
    {"{\"__metadata__\":{\"a\":\"\xe2\x82\"}}", 0, MOE_ERR_FORMAT, "not UTF-8"},
    {"{\"\\U0061\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "escape"},
    {"{\"\\u006\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "escape"},
    {"{\"\\u0000\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "escape"},
    {"{\"\\ud800\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "escape"},
    {"{\"\\udc00\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "escape"},
    {"{\"\\ud800\\u0041\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "escape"},
    {"{\"\\ud800\\ud800\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "escape"},
    {"{\"\\ud800x\":" T("[0,4]") "}", 4, MOE_ERR_FORMAT, "escape"},
    {"{\"a\\", 0, MOE_ERR_FORMAT, "escape"},
    {"{\"a\\u00", 0, MOE_ERR_FORMAT, "escape"},
    {"{\"a\\ud83d\\u", 0, MOE_ERR_FORMAT, "escape"},
    {"{\"__metadata__\":{\"a\":1}}", 0, MOE_ERR_FORMAT, "\" is expected"},
    {"{\"__metadata__\":{\"a\":{\"b\":\"c\"}}}", 0, MOE_ERR_FORMAT, "\" is expected"},
    {"{\"__metadata__\":{\"a\":[\"b\"]}}", 0, MOE_ERR_FORMAT, "\" is expected"},
    {"{\"__metadata__\":{\"a\":null}}", 0, MOE_ERR_FORMAT, "\" is expected"},
    {"{\"__metadata__\":{\"a\"}}", 0, MOE_ERR_FORMAT, ": is expected"},
    {"{\"__metadata__\":nul}", 0, MOE_ERR_FORMAT, "{ is expected"},
    {"{\"__metadata__\":nul", 0, MOE_ERR_FORMAT, "{ is expected"},
    {"{\"__metadata__\":nullx}", 0, MOE_ERR_FORMAT, ", is expected"},
    {"{\"__metadata__\":null,\"__metadata__\":null}", 0, MOE_ERR_FORMAT, "__metadata__ occurs twice"},
    {"{\"__metadata__\":null,\"__metadata__\":{}}", 0, MOE_ERR_FORMAT, "__metadata__ occurs twice"},
    {"{\"__metadata__\":null,\"a\":" T("[0,4]") ",\"\\u0061\":" T("[4,8]") "}", 8, MOE_ERR_FORMAT,
     "name occurs twice"},
    {"{\"__metadata__\":[]}", 0, MOE_ERR_FORMAT, "{ is expected"},
    {"{\"__metadata__\":\"a\"}", 0, MOE_ERR_FORMAT, "{ is expected"},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, MOE_ERR_FORMAT, "__metadata__ occurs twice"},
    {"{\"__metadata__\":{},\"__met\\u0061data__\":{}}", 0, MOE_ERR_FORMAT, "__metadata__ occurs twice"},
    {"{\"__metadata__\":{\"a\":\"\",\"\\u0061\":\"\"}}", 0, MOE_ERR_FORMAT,
     "metadata '\\u0061': the name occurs twice"},
    {"{\"__metadata__\":{\"a\":\"\"", 0, MOE_ERR_FORMAT, "header ends"},
};

static void test_malformed(void) {
    size_t i, size;
    for (i = 0; i < sizeof malformed_files / sizeof malformed_files[0]; i++) {
        const malformed *m = &malformed_files[i];
        unsigned char *bytes = file_of(m->header, strlen(m->header), m->data, &size);
        moe_file file;
        moe_error error;
        moe_status status;
        int opened;
        memset(&error, 0, sizeof error);
        status = moe_file_open(&file, bytes, size, &error);
        if (!CHECK(status == m->status && error.code == status && strstr(error.message, m->word) != NULL, m->header))
            printf("    status %d, \"%s\" instead of %d, \"%s\"\n", status, error.message, m->status, m->word);
        CHECK(open_any(bytes, size, &opened), m->header);
        CHECK(moe_file_open(&file, bytes, size, NULL) == status, m->header);
        free(bytes);
    }
}

/* The first eight bytes, and what is around the header. */
static void test_lengths(void) {
    static const uint64_t lengths[] = {
        0, 1, 3, 4, 6, 1000, 100000000, 100000001, UINT64_C(1) << 32, UINT64_C(1) << 63, UINT64_C(0xffffffffffffffff)};
    static const char *const words[] = {"begin with {",
                                        "header ends",
                                        "hole",
                                        "hole",
                                        "only 5 bytes",
                                        "only 5 bytes",
                                        "only 5 bytes",
                                        "100000001, allowed",
                                        "4294967296",
                                        "9223372036854775808",
                                        "18446744073709551615"};
    unsigned char *p = block_of(13);
    moe_file file;
    moe_error error;
    size_t i;
    memcpy(p + 8, "{}   ", 5);
    for (i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        put_length(p, lengths[i]);
        memset(&error, 0, sizeof error);
        if (!CHECK(moe_file_open(&file, p, 13, &error) == MOE_ERR_FORMAT && strstr(error.message, words[i]) != NULL))
            printf("    length %lu: %s\n", (unsigned long)i, error.message);
    }
    put_length(p, 5);
    CHECK(moe_file_open(&file, p, 13, NULL) == MOE_OK && file.n_tensors == 0 && use_all(&file));
    free(p);
    for (i = 0; i < 10; i++) {
        p = block_of(i);
        memset(p, 0, i);
        CHECK(moe_file_open(&file, p, i, &error) == MOE_ERR_FORMAT &&
              strstr(error.message, i < 8 ? "first 8 bytes" : "begin with {") != NULL);
        free(p);
    }
    CHECK(moe_file_open(NULL, "", 0, &error) == MOE_ERR_ARGUMENT);
    CHECK(moe_file_open(&file, NULL, 0, &error) == MOE_ERR_ARGUMENT);
    memset(&file, 0, sizeof file);
    {
        moe_file_tensor t;
        CHECK(moe_file_next(&file, &t) == MOE_ERR_NOT_FOUND && moe_file_find(&file, "", &t) == MOE_ERR_NOT_FOUND);
        CHECK(moe_file_metadata(&file, "", NULL, 0, NULL) == MOE_ERR_NOT_FOUND);
        CHECK(moe_file_next(NULL, &t) == MOE_ERR_ARGUMENT && moe_file_find(&file, NULL, &t) == MOE_ERR_ARGUMENT);
    }
}

/* A wrong file names the tensor, in characters that can be shown, and the byte. */
static void test_messages(void) {
    static const char header[] = "{\"layer.\\u00e4\x7f\":{\"dtype\":\"F7\"}}";
    static const char *const wrong[][2] = {
        {"[]", "byte 8: not a safetensors file: the header does not begin with {"},
        {"{\"a\":{\"dtyp\":\"F32\"}}", "tensor 'a', byte 15: unknown key 'dtyp'"},
        {"{\"a\":{\"shape\":[],\"shape\":[]}}", "tensor 'a', byte 26: the key shape occurs twice"},
        {"{\"a\":{\"data_offsets\":[0]}}", "tensor 'a', byte 15: data_offsets needs two numbers"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}}",
         "tensor 'a', byte 13: data_offsets [0, 3] go beyond the 0 bytes of data"},
        {"{\"a\":{\"shape\":[]}}", "tensor 'a', byte 25: dtype is missing"}};
    char name[600], text[700];
    moe_file file;
    moe_error error;
    size_t size, i;
    unsigned char *bytes = file_of(header, strlen(header), 0, &size);
    CHECK(moe_file_open(&file, bytes, size, &error) == MOE_ERR_UNSUPPORTED);
    CHECK(strcmp(error.message, "tensor 'layer.\\u00e4?', byte 35: unknown dtype 'F7'") == 0, error.message);
    for (i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        free(bytes);
        bytes = file_of(wrong[i][0], strlen(wrong[i][0]), 0, &size);
        CHECK(moe_file_open(&file, bytes, size, &error) == MOE_ERR_FORMAT);
        CHECK(strcmp(error.message, wrong[i][1]) == 0, error.message);
    }
    CHECK(moe_file_open(&file, bytes, 11, &error) == MOE_ERR_FORMAT);
    sprintf(text, "the header length is %lu, but only 3 bytes follow", (unsigned long)strlen(wrong[i - 1][0]));
    CHECK(strstr(error.message, text) != NULL, error.message);
    free(bytes);
    memset(name, 'n', sizeof name);
    name[sizeof name - 1] = '\0';
    sprintf(text, "{\"%s\":{\"%s", name, "x\":1}}");
    bytes = file_of(text, strlen(text), 0, &size);
    CHECK(moe_file_open(&file, bytes, size, &error) == MOE_ERR_FORMAT && strstr(error.message, "nnn...'") != NULL &&
          strstr(error.message, "'x'") != NULL);
    for (i = 0; error.message[i] != '\0'; i++)
        if (error.message[i] < 0x20) break;
    CHECK(error.message[i] == '\0');
    free(bytes);
}

/* ---- well-formed files ---- */

static moe_status open_text(const char *header, size_t data, unsigned char **bytes, moe_file *file) {
    size_t size;
    *bytes = file_of(header, strlen(header), data, &size);
    return moe_file_open(file, *bytes, size, NULL);
}

static void test_accepted(void) {
    static const char spaced[] =
        "{ \"a\"\t:\r\n{ \"data_offsets\" : [ 0 , 4 ] , \"shape\":[ 2,2 ],\"dtype\" : \"U8\" } }     ";
    static const char empties[] = "{\"e\":{\"dtype\":\"F32\",\"shape\":[0,3],\"data_offsets\":[4,4]},\"a\":" T(
        "[0,4]") ",\"z\":{\"dtype\":\"F64\",\"shape\":[2,0],\"data_offsets\":[0,0]},\"s\":{\"dtype\":\"I16\",\"shape\":"
                 "[],\"data_offsets\":[4,6]},\"q\":{\"dtype\":\"I16\",\"shape\":[0],\"data_offsets\":[6,6]}}";
    static const char eight_dims[] = "{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,4],\"data_offsets\":[0,4]},"
                                     "\"__metadata__\":{\"}\":\"{\\\"}\"},\"b\":" T("[4,8]") "}";
    static const char escaped[] = "{\"\\u0061\\/\\u00e4\\ud83d\\ude00\\\"\":" T("[0,4]") ","
                                  "\"a\\\\u0062\":" T("[4,8]") ",\"\":" T("[8,12]") "}";
    static const char *const nulls[] = {"{\"__metadata__\":null}",
                                        "{\"__metadata__\":null,\"a\":" T("[0,4]") ",\"b\":" T("[4,8]") "}",
                                        "{\"a\":" T("[0,4]") ",\"__metadata__\" : null ,\"b\":" T("[4,8]") "}",
                                        "{\"a\":" T("[0,4]") ",\"b\":" T("[4,8]") ",\"__metadata__\":null}"};
    /* the first and the last character of each length, and those around the surrogates */
    static const char borders[] = "{\"\x7f\xc2\x80\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xef\xbf\xbf"
                                  "\xf0\x90\x80\x80\xf4\x8f\xbf\xbf\":" T("[0,4]") "}";
    unsigned char *bytes;
    moe_file file;
    moe_file_tensor t;
    size_t i;
    CHECK(open_text("{\"b\":" T("[8,12]") ",\"c\":" T("[0,4]") ",\"a\":" T("[4,8]") "}", 12, &bytes, &file) == MOE_OK &&
          use_all(&file));
    CHECK(moe_file_next(&file, &t) == MOE_OK && t.name_length == 1 && t.name[0] == 'b' && t.data[0] == 8);
    CHECK(moe_file_find(&file, "c", &t) == MOE_OK && t.data[0] == 0);
    CHECK(moe_file_next(&file, &t) == MOE_OK && t.name[0] == 'c');
    CHECK(moe_file_next(&file, &t) == MOE_OK && t.name[0] == 'a' && t.data[0] == 4);
    CHECK(moe_file_next(&file, &t) == MOE_ERR_NOT_FOUND && moe_file_next(&file, &t) == MOE_ERR_NOT_FOUND);
    free(bytes);
    CHECK(open_text("{}", 0, &bytes, &file) == MOE_OK && use_all(&file));
    free(bytes);
    CHECK(open_text("{\"__metadata__\":{}}", 0, &bytes, &file) == MOE_OK && use_all(&file));
    CHECK(moe_file_metadata(&file, "x", NULL, 0, NULL) == MOE_ERR_NOT_FOUND);
    free(bytes);
    for (i = 0; i < sizeof nulls / sizeof nulls[0]; i++) { /* as if it was not there */
        CHECK(open_text(nulls[i], i > 0 ? 8 : 0, &bytes, &file) == MOE_OK && use_all(&file), nulls[i]);
        CHECK(file.n_tensors == (i > 0 ? 2 : 0) && moe_file_metadata(&file, "a", NULL, 0, NULL) == MOE_ERR_NOT_FOUND);
        if (i > 0) CHECK(moe_file_find(&file, "a", &t) == MOE_OK && moe_file_find(&file, "b", &t) == MOE_OK);
        free(bytes);
    }
    CHECK(open_text(borders, 4, &bytes, &file) == MOE_OK && use_all(&file));
    free(bytes);
    CHECK(open_text(spaced, 4, &bytes, &file) == MOE_OK && use_all(&file));
    CHECK(moe_file_find(&file, "a", &t) == MOE_OK && t.n_dims == 2 && t.shape[0] == 2 && t.shape[1] == 2 &&
          t.count == 4 && t.bytes == 4);
    free(bytes);
    CHECK(open_text(empties, 6, &bytes, &file) == MOE_OK && use_all(&file));
    CHECK(moe_file_find(&file, "e", &t) == MOE_OK && t.count == 0 && t.bytes == 0 && t.n_dims == 2);
    CHECK(moe_file_find(&file, "s", &t) == MOE_OK && t.count == 1 && t.n_dims == 0 && t.bytes == 2);
    free(bytes);
    CHECK(open_text(eight_dims, 8, &bytes, &file) == MOE_OK && use_all(&file) && file.n_tensors == 2);
    CHECK(moe_file_find(&file, "b", &t) == MOE_OK && moe_file_find(&file, "}", &t) == MOE_ERR_NOT_FOUND &&
          moe_file_find(&file, "__metadata__", &t) == MOE_ERR_NOT_FOUND);
    free(bytes);
    CHECK(open_text(escaped, 12, &bytes, &file) == MOE_OK && use_all(&file));
    CHECK(moe_file_find(&file, "a/\xc3\xa4\xf0\x9f\x98\x80\"", &t) == MOE_OK && t.data[0] == 0);
    CHECK(moe_file_find(&file, "a\\u0062", &t) == MOE_OK && t.data[0] == 4);
    CHECK(moe_file_find(&file, "", &t) == MOE_OK && t.data[0] == 8);
    CHECK(moe_file_find(&file, "ab", &t) == MOE_ERR_NOT_FOUND &&
          moe_file_find(&file, "a/\xc3\xa4", &t) == MOE_ERR_NOT_FOUND);
    free(bytes);
}

/* Empty tensors stand where another begins or ends, in whatever order the header has them: against
   the sorted list. */
static void test_empty_tensors(void) {
    enum { MOST_TENSORS = 1000 };
    static char text[MOST_TENSORS * 80];
    static size_t begins[MOST_TENSORS], lengths[MOST_TENSORS];
    int round, good = 0, bad = 0;
    for (round = 0; round < 300; round++) {
        const int large = round % 10 == 0;
        const size_t full = large ? 500 : 1 + random_below(4), n = full + (large ? 500 : 1 + random_below(4));
        size_t i, k, at, size = 0, length;
        unsigned char *bytes;
        moe_file file;
        int inside = 0;
        for (i = 0; i < full; i++) {
            begins[i] = size;
            size += lengths[i] = 1 + random_below(3);
        }
        for (; i < n; i++) { /* in large files rarely inside another */
            begins[i] = large && random_below(500) > 0 ? begins[random_below(full)] : random_below(size + 1);
            lengths[i] = 0;
            for (k = 0; k < full; k++) inside |= begins[i] > begins[k] && begins[i] < begins[k] + lengths[k];
        }
        for (length = 1, text[0] = '{', i = n; i > 0; i--) {
            k = random_below(i);
            at = begins[k];
            length += (size_t)sprintf(
                text + length, "%s\"%lu\":{\"dtype\":\"U8\",\"shape\":[%lu],\"data_offsets\":[%lu,%lu]}",
                i < n ? "," : "", (unsigned long)i, (unsigned long)lengths[k], (unsigned long)at,
                (unsigned long)(at + lengths[k]));
            begins[k] = begins[i - 1];
            lengths[k] = lengths[i - 1];
        }
        text[length] = '}';
        text[length + 1] = '\0';
        if (inside) {
            moe_error error;
            bytes = file_of(text, length + 1, size, &k);
            CHECK(moe_file_open(&file, bytes, k, &error) == MOE_ERR_FORMAT &&
                  strstr(error.message, "an empty tensor at offset") != NULL, error.message);
            bad++;
        } else {
            CHECK(open_text(text, size, &bytes, &file) == MOE_OK && (large || use_all(&file)), text);
            good++;
        }
        free(bytes);
    }
    CHECK(good > 50 && bad > 50);
}

static void test_metadata(void) {
    static const char header[] = "{\"__metadata__\":{\"a\":\"first\",\"text\":"
                                 "\"line\\nquote\\\" back\\\\ \\u00e9 \\u20AC \\uD83D\\uDE00 \\/ \\b\\f\\r\\t\","
                                 "\"empty\":\"\",\"k\\u0065y\":\"v\"},\"a\":" T("[0,4]") "}";
    static const char wanted[] = "line\nquote\" back\\ \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80 / \b\f\r\t";
    unsigned char *bytes;
    moe_file file;
    char value[64];
    size_t length = 99, n = strlen(wanted);
    CHECK(open_text(header, 4, &bytes, &file) == MOE_OK && use_all(&file));
    CHECK(moe_file_metadata(&file, "text", NULL, 0, &length) == MOE_ERR_SPACE && length == n);
    memset(value, '#', sizeof value);
    CHECK(moe_file_metadata(&file, "text", value, n, &length) == MOE_ERR_SPACE && value[0] == '#');
    CHECK(moe_file_metadata(&file, "text", value, n + 1, &length) == MOE_OK && length == n &&
          strcmp(value, wanted) == 0 && value[n + 1] == '#');
    CHECK(moe_file_metadata(&file, "empty", value, 1, &length) == MOE_OK && length == 0 && value[0] == '\0');
    CHECK(moe_file_metadata(&file, "key", value, sizeof value, NULL) == MOE_OK && strcmp(value, "v") == 0);
    CHECK(moe_file_metadata(&file, "a", value, sizeof value, NULL) == MOE_OK && strcmp(value, "first") == 0);
    length = 99;
    CHECK(moe_file_metadata(&file, "first", value, sizeof value, &length) == MOE_ERR_NOT_FOUND && length == 99);
    CHECK(moe_file_metadata(&file, NULL, value, sizeof value, NULL) == MOE_ERR_ARGUMENT);
    CHECK(moe_file_metadata(&file, "a", NULL, 5, NULL) == MOE_ERR_ARGUMENT);
    free(bytes);
}

/* ---- values ---- */

static moe_file_tensor tensor_of(int dtype, const void *data, size_t count, size_t size) {
    moe_file_tensor t;
    memset(&t, 0, sizeof t);
    t.name = "t";
    t.name_length = 1;
    t.dtype = dtype;
    t.n_dims = 1;
    t.shape[0] = t.count = count;
    t.data = (const unsigned char *)data;
    t.bytes = count * size;
    return t;
}

static int same(double a, double b) { return a <= b && a >= b; }

static void test_half(void) {
    unsigned char *bytes = block_of(2 * 65536);
    moe_file_tensor t = tensor_of(MOE_DTYPE_F16, bytes, 65536, 2);
    moe_real *x = (moe_real *)malloc(65536 * sizeof *x);
    unsigned i;
    int good = 1;
    if (x == NULL) exit(2);
    for (i = 0; i < 65536; i++) {
        bytes[2 * i] = (unsigned char)(i & 255u);
        bytes[2 * i + 1] = (unsigned char)(i >> 8);
    }
    CHECK(moe_file_values(&t, 0, 65536, x, NULL) == MOE_OK);
    for (i = 0; i < 65536; i++) {
        int e = (int)(i >> 10 & 31u);
        double wanted = e == 0 ? ldexp((double)(i & 1023u), -24) : ldexp((double)(1024u + (i & 1023u)), e - 25);
        if (e == 31) good = good && ((i & 1023u) != 0 ? x[i] != x[i] : x[i] > 1e30f || x[i] < -1e30f);
        else good = good && same((double)x[i], i >> 15 != 0 ? -wanted : wanted);
        if (e != 31 || (i & 1023u) == 0) good = good && (signbit(x[i]) != 0) == (i >> 15 != 0);
    }
    CHECK(good);
    CHECK(same((double)x[0x0001], ldexp(1.0, -24)) && same((double)x[0x3c00], 1.0) &&
          same((double)x[0xfbff], -65504.0));
    free(x);
    free(bytes);
}

/* A double is read as the nearest float: half a step beyond the largest float is infinite, as in
   IEEE 754, and one double less is the largest float. */
static void test_largest(void) {
    static const unsigned char f64[] = {0,    0,    0,    0xf0, 0xff, 0xff, 0xef, 0x47, 0xff, 0xff, 0xff,
                                        0xef, 0xff, 0xff, 0xef, 0x47, 0,    0,    0,    0xf0, 0xff, 0xff,
                                        0xef, 0xc7, 0xff, 0xff, 0xff, 0xef, 0xff, 0xff, 0xef, 0xc7};
    const double largest = 16777215.0 * ldexp(1.0, 104), half = 33554431.0 * ldexp(1.0, 103);
    const moe_file_tensor t = tensor_of(MOE_DTYPE_F64, f64, 4, 8);
    moe_real x[4];
    CHECK(moe_file_values(&t, 0, 4, x, NULL) == MOE_OK);
    if (sizeof(moe_real) == 8) {
        CHECK(same((double)x[0], half) && same((double)x[2], -half));
        return;
    }
    CHECK(x[0] > 0 && !moe_is_finite(x[0]) && same((double)x[1], largest));
    CHECK(x[2] < 0 && !moe_is_finite(x[2]) && same((double)x[3], -largest));
}

/* Unsigned integers up to the largest signed one. */
static void test_unsigned(void) {
    static const unsigned char u64[] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f, 0, 0, 0, 0, 0, 0, 0, 0x80};
    const moe_file_tensor t = tensor_of(MOE_DTYPE_U64, u64, 2, 8);
    int64_t n = 5;
    CHECK(moe_file_values(&t, 1, 1, NULL, &n) == MOE_ERR_FORMAT && n == 5);
    CHECK(moe_file_values(&t, 0, 1, NULL, &n) == MOE_OK && n == INT64_MAX);
}

static void test_values(void) {
    static const unsigned char f32[] = {0, 0, 0, 0, 0,    0,    0x80, 0x3f, 1,    0,
                                        0, 0, 0, 0, 0x80, 0xff, 0xff, 0xff, 0x7f, 0x7f};
    static const unsigned char f64[] = {0, 0, 0, 0, 0, 0, 0xf0, 0xbf, 0,    0,    0,    0,    0,    0,    0xf0, 0x7f,
                                        0, 0, 0, 0, 0, 0, 0xf0, 0xc7, 0xff, 0xff, 0xff, 0xef, 0xff, 0xff, 0xef, 0x47,
                                        0, 0, 0, 0, 0, 0, 0xf8, 0x7f, 0,    0,    0,    0,    0,    0,    0,    0x80};
    static const unsigned char bf16[] = {0x80, 0x3f, 0x40, 0xc0, 0x80, 0x7f, 1, 0};
    static const unsigned char i64[] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0,
                                        0,    0,    0,    0x80, 2,    1,    0,    0,    0, 0, 0, 0};
    static const unsigned char i32[] = {0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0x80, 0xff, 0xff, 0xff, 0x7f};
    static const unsigned char i16[] = {0xff, 0xff, 0, 0x80, 0xff, 0x7f};
    static const unsigned char i8[] = {0xff, 0x80, 0x7f, 0}, boolean[] = {0, 1, 2};
    moe_real x[8];
    int64_t n[4];
    moe_file_tensor t = tensor_of(MOE_DTYPE_F32, f32, 5, 4);
    CHECK(moe_file_values(&t, 0, 5, x, NULL) == MOE_OK && same((double)x[0], 0.0) && same((double)x[1], 1.0) &&
          same((double)x[2], ldexp(1.0, -149)));
    CHECK(x[3] < -3e38f && !moe_is_finite(x[3]) && same((double)x[4], 16777215.0 * ldexp(1.0, 104)));
    CHECK(moe_file_values(&t, 1, 1, x, NULL) == MOE_OK && same((double)x[0], 1.0) &&
          moe_file_values(&t, 0, 1, NULL, n) == MOE_ERR_FORMAT);
    t = tensor_of(MOE_DTYPE_F64, f64, 6, 8);
    CHECK(moe_file_values(&t, 0, 6, x, NULL) == MOE_OK && same((double)x[0], -1.0) && x[1] > 3e38f &&
          !moe_is_finite(x[1]) && x[4] != x[4]);
    CHECK(signbit(x[5]) && x[2] < -3e38f && (moe_is_finite(x[2]) != 0) == (sizeof(moe_real) == 8)); /* -2^128 */
    CHECK(moe_is_finite(x[3]) && x[3] > 3e38f); /* just below the middle between the largest float and 2^128 */
    t = tensor_of(MOE_DTYPE_BF16, bf16, 4, 2);
    CHECK(moe_file_values(&t, 0, 4, x, NULL) == MOE_OK && same((double)x[0], 1.0) && same((double)x[1], -3.0) &&
          !moe_is_finite(x[2]) && same((double)x[3], ldexp(1.0, -133)));
    t = tensor_of(MOE_DTYPE_I64, i64, 3, 8);
    CHECK(moe_file_values(&t, 0, 3, x, NULL) == MOE_OK && same((double)x[0], -1.0) &&
          same((double)x[1], -ldexp(1.0, 63)) && same((double)x[2], 258.0));
    CHECK(moe_file_values(&t, 0, 3, NULL, n) == MOE_OK && n[0] == -1 && n[1] == INT64_MIN && n[2] == 258);
    t = tensor_of(MOE_DTYPE_U64, i64, 3, 8);
    CHECK(moe_file_values(&t, 0, 3, x, NULL) == MOE_OK && same((double)x[0], ldexp(1.0, 64)) &&
          same((double)x[1], ldexp(1.0, 63)));
    n[0] = 5;
    CHECK(moe_file_values(&t, 0, 3, NULL, n) == MOE_ERR_FORMAT && n[0] == 5 &&
          moe_file_values(&t, 2, 1, NULL, n) == MOE_OK && n[0] == 258);
    t = tensor_of(MOE_DTYPE_I32, i32, 3, 4);
    CHECK(moe_file_values(&t, 0, 3, x, NULL) == MOE_OK && same((double)x[0], -1.0) &&
          same((double)x[1], -2147483648.0));
    CHECK(moe_file_values(&t, 0, 3, NULL, n) == MOE_OK && n[1] == INT64_C(-2147483648) && n[2] == 2147483647);
    t = tensor_of(MOE_DTYPE_U32, i32, 3, 4);
    CHECK(moe_file_values(&t, 0, 3, NULL, n) == MOE_OK && n[0] == INT64_C(4294967295) && n[1] == INT64_C(2147483648));
    t = tensor_of(MOE_DTYPE_I16, i16, 3, 2);
    CHECK(moe_file_values(&t, 0, 3, NULL, n) == MOE_OK && n[0] == -1 && n[1] == -32768 && n[2] == 32767);
    t = tensor_of(MOE_DTYPE_U16, i16, 3, 2);
    CHECK(moe_file_values(&t, 0, 3, NULL, n) == MOE_OK && n[0] == 65535 && n[1] == 32768 &&
          moe_file_values(&t, 0, 3, x, NULL) == MOE_OK && same((double)x[1], 32768.0));
    t = tensor_of(MOE_DTYPE_I8, i8, 4, 1);
    CHECK(moe_file_values(&t, 0, 4, NULL, n) == MOE_OK && n[0] == -1 && n[1] == -128 && n[2] == 127 && n[3] == 0);
    t = tensor_of(MOE_DTYPE_U8, i8, 4, 1);
    CHECK(moe_file_values(&t, 0, 4, NULL, n) == MOE_OK && n[0] == 255 && n[1] == 128 &&
          moe_file_values(&t, 0, 4, x, NULL) == MOE_OK && same((double)x[0], 255.0));
    t = tensor_of(MOE_DTYPE_BOOL, boolean, 3, 1);
    CHECK(moe_file_values(&t, 0, 3, x, NULL) == MOE_OK && same((double)x[0], 0.0) && same((double)x[2], 1.0));
    CHECK(moe_file_values(&t, 0, 3, NULL, n) == MOE_OK && n[1] == 1 && n[2] == 1);
    CHECK(moe_file_values(&t, 3, 0, NULL, NULL) == MOE_OK && moe_file_values(&t, 0, 0, NULL, NULL) == MOE_OK &&
          moe_file_values(&t, 3, 0, NULL, NULL) == MOE_OK);
    CHECK(moe_file_values(&t, 4, 0, x, NULL) == MOE_ERR_SHAPE && moe_file_values(&t, 0, 4, x, NULL) == MOE_ERR_SHAPE);
    CHECK(moe_file_values(&t, 1, (size_t)-1, x, NULL) == MOE_ERR_SHAPE &&
          moe_file_values(&t, (size_t)-1, 1, NULL, n) == MOE_ERR_SHAPE);
    CHECK(moe_file_values(&t, 0, 1, NULL, NULL) == MOE_ERR_ARGUMENT &&
          moe_file_values(NULL, 0, 1, x, NULL) == MOE_ERR_ARGUMENT);
    t.count = 4;
    CHECK(moe_file_values(&t, 0, 4, x, NULL) == MOE_ERR_ARGUMENT); /* fewer bytes than elements */
    t.dtype = MOE_DTYPE_COUNT;
    CHECK(moe_file_values(&t, 0, 1, x, NULL) == MOE_ERR_ARGUMENT &&
          moe_file_values(&t, 0, 1, NULL, n) == MOE_ERR_ARGUMENT);
}

/* ---- writing ---- */

enum { N_TENSORS = 5, N_METADATA = 3 };

static moe_real sample_values[700];
static const moe_metadata sample_metadata[N_METADATA] = {
    {"format", "moe"}, {"te\"xt\n", "\x01\x1f\\\"\xc3\xa4 \xf0\x9f\x98\x80\x7f"}, {"", ""}};

static void sample_tensor(moe_tensor *t, const char *name, int n_dims, size_t a, size_t b, size_t c, moe_real *data) {
    memset(t, 0, sizeof *t);
    strcpy(t->name, name);
    t->n_dims = n_dims;
    t->shape[0] = a;
    t->shape[1] = b;
    t->shape[2] = c;
    t->count = (n_dims > 0 ? a : 1) * (n_dims > 1 ? b : 1) * (n_dims > 2 ? c : 1);
    t->data = data;
}

static void sample(moe_tensor *t) {
    size_t i;
    for (i = 0; i < 700; i++) sample_values[i] = (moe_real)((double)i - 300.5) / 7;
    sample_values[0] = (moe_real)-0.0;
    sample_tensor(&t[0], "router.weight", 2, 20, 30, 0, sample_values);
    sample_tensor(&t[1], "n\xc3\xa4me \"quoted\"\\\t", 3, 2, 3, 5, sample_values + 600);
    sample_tensor(&t[2], "empty", 2, 0, 7, 0, NULL);
    sample_tensor(&t[3], "scalar", 0, 0, 0, 0, sample_values + 630);
    sample_tensor(&t[4], "", 1, 9, 0, 0, sample_values + 640);
}

static moe_status write_to(moe_buffer *b, const moe_tensor *t, size_t n, const moe_metadata *m, size_t n_m,
                           const moe_allocator *a, moe_error *error) {
    moe_stream s = moe_buffer_stream(b);
    return moe_file_write(&s, t, n, m, n_m, a, error);
}

static void test_round_trip(void) {
    moe_tensor t[N_TENSORS];
    moe_buffer one, two;
    moe_file file;
    moe_file_tensor got;
    moe_real values[700];
    moe_error error;
    char text[64];
    size_t i;
    int d, same_shape;
    memset(&one, 0, sizeof one);
    memset(&two, 0, sizeof two);
    sample(t);
    CHECK(write_to(&one, t, N_TENSORS, sample_metadata, N_METADATA, NULL, &error) == MOE_OK);
    CHECK(write_to(&two, t, N_TENSORS, sample_metadata, N_METADATA, NULL, &error) == MOE_OK);
    CHECK(one.size == two.size && memcmp(one.data, two.data, one.size) == 0);
    if (!CHECK(moe_file_open(&file, one.data, one.size, &error) == MOE_OK)) printf("    %s\n", error.message);
    CHECK((8 + file.header_size) % 8 == 0 && file.n_tensors == N_TENSORS && use_all(&file));
    for (i = 0; i < N_TENSORS; i++) {
        CHECK(moe_file_find(&file, t[i].name, &got) == MOE_OK && got.count == t[i].count && got.n_dims == t[i].n_dims,
              t[i].name);
        CHECK(got.dtype == (sizeof(moe_real) == 8 ? MOE_DTYPE_F64 : MOE_DTYPE_F32));
        for (d = 0, same_shape = 1; d < t[i].n_dims; d++) same_shape = same_shape && got.shape[d] == t[i].shape[d];
        CHECK(same_shape && moe_file_values(&got, 0, got.count, values, NULL) == MOE_OK);
        CHECK(got.count == 0 || memcmp(values, t[i].data, got.count * sizeof(moe_real)) == 0);
        CHECK(moe_file_next(&file, &got) == MOE_OK && got.count == t[i].count);
    }
    for (i = 0; i < N_METADATA; i++)
        CHECK(moe_file_metadata(&file, sample_metadata[i].key, text, sizeof text, NULL) == MOE_OK &&
              strcmp(text, sample_metadata[i].value) == 0);
    moe_buffer_free(&one);
    moe_buffer_free(&two);
    moe_buffer_free(&two);
    moe_buffer_free(NULL);
    CHECK(write_to(&one, NULL, 0, NULL, 0, NULL, NULL) == MOE_OK && one.size == 16 &&
          memcmp(one.data + 8, "{}      ", 8) == 0);
    moe_buffer_free(&one);
    CHECK(write_to(&one, NULL, 0, sample_metadata, 1, NULL, NULL) == MOE_OK &&
          moe_file_open(&file, one.data, one.size, NULL) == MOE_OK);
    CHECK(moe_file_metadata(&file, "format", text, sizeof text, NULL) == MOE_OK && strcmp(text, "moe") == 0);
    moe_buffer_free(&one);
    CHECK(write_to(&one, t, 1, NULL, 0, NULL, NULL) == MOE_OK &&
          moe_file_open(&file, one.data, one.size, NULL) == MOE_OK && file.n_tensors == 1);
    moe_buffer_free(&one);
}

static void refuse_write(const moe_tensor *t, size_t n, const moe_metadata *m, size_t n_m, moe_status wanted,
                         const char *word, int line) {
    moe_buffer b;
    moe_error error;
    moe_status status;
    memset(&b, 0, sizeof b);
    memset(&error, 0, sizeof error);
    status = write_to(&b, t, n, m, n_m, NULL, &error);
    if (!CHECK_AT(line,
                  status == wanted && error.code == wanted && strstr(error.message, word) != NULL && b.size == 0 &&
                      b.data == NULL,
                  "refused write"))
        printf("    status %d, %s\n", status, error.message);
    moe_buffer_free(&b);
}

static void test_refused_writes(void) {
    static const char *const bad_names[] = {
        "\x80", "a\xc3", "\xc0\xaf", "\xe0\x80\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80",
        "\xff"};
    moe_tensor t[N_TENSORS];
    moe_metadata m[2];
    moe_stream s;
    size_t i;
    m[0].key = m[1].key = "k";
    m[0].value = m[1].value = "v";
    sample(t);
    strcpy(t[4].name, "scalar");
    refuse_write(t, N_TENSORS, NULL, 0, MOE_ERR_ARGUMENT, "'scalar': the name occurs twice", __LINE__);
    sample(t);
    refuse_write(t, 1, m, 2, MOE_ERR_ARGUMENT, "metadata 'k': the name occurs twice", __LINE__);
    m[1].key = NULL;
    refuse_write(t, 1, m, 2, MOE_ERR_ARGUMENT, "metadata 1: key or value is NULL", __LINE__);
    m[1].key = "l";
    m[1].value = "\xff";
    refuse_write(t, 1, m, 2, MOE_ERR_ARGUMENT, "metadata 1: key or value is not UTF-8", __LINE__);
    for (i = 0; i < sizeof bad_names / sizeof bad_names[0]; i++) {
        strcpy(t[1].name, bad_names[i]);
        refuse_write(t, 2, NULL, 0, MOE_ERR_ARGUMENT, "tensor 1: the name is not UTF-8", __LINE__);
    }
    memset(t[1].name, 'n', MOE_NAME_SIZE);
    refuse_write(t, 2, NULL, 0, MOE_ERR_ARGUMENT, "not terminated", __LINE__);
    strcpy(t[1].name, "__metadata__");
    refuse_write(t, 2, NULL, 0, MOE_ERR_ARGUMENT, "reserved", __LINE__);
    sample(t);
    t[0].n_dims = -1;
    refuse_write(t, 1, NULL, 0, MOE_ERR_ARGUMENT, "n_dims = -1", __LINE__);
    t[0].n_dims = MOE_MAX_DIMS + 1;
    refuse_write(t, 1, NULL, 0, MOE_ERR_ARGUMENT, "n_dims", __LINE__);
    sample(t);
    t[0].count--;
    refuse_write(t, 1, NULL, 0, MOE_ERR_SHAPE, "count = 599", __LINE__);
    sample(t);
    t[0].shape[0] = (size_t)-1;
    refuse_write(t, 1, NULL, 0, MOE_ERR_OVERFLOW, "router.weight", __LINE__);
    t[0].shape[1] = 1;
    t[0].count = (size_t)-1;
    refuse_write(t, 1, NULL, 0, MOE_ERR_OVERFLOW, "router.weight", __LINE__);
    sample(t); /* each fits, both together do not */
    for (i = 0; i < 2; i++) {
        t[i].n_dims = 1;
        t[i].shape[0] = t[i].count = (size_t)-1 / sizeof(moe_real);
    }
    refuse_write(t, 2, NULL, 0, MOE_ERR_OVERFLOW, "too large", __LINE__);
    sample(t);
    t[0].data = NULL;
    refuse_write(t, 1, NULL, 0, MOE_ERR_ARGUMENT, "data is NULL", __LINE__);
    refuse_write(NULL, 1, NULL, 0, MOE_ERR_ARGUMENT, "NULL", __LINE__);
    refuse_write(NULL, 0, NULL, 1, MOE_ERR_ARGUMENT, "NULL", __LINE__);
    refuse_write(t, (size_t)MOE_FILE_MAX_TENSORS + 1, NULL, 0, MOE_ERR_ARGUMENT, "65537", __LINE__);
    memset(&s, 0, sizeof s);
    CHECK(moe_file_write(NULL, t, 1, NULL, 0, NULL, NULL) == MOE_ERR_ARGUMENT &&
          moe_file_write(&s, t, 1, NULL, 0, NULL, NULL) == MOE_ERR_ARGUMENT);
}

typedef struct broken {
    size_t writes, fail_at;
} broken;

static moe_status broken_write(void *ctx, const void *from, size_t size) {
    broken *b = (broken *)ctx;
    (void)from;
    (void)size;
    return ++b->writes == b->fail_at ? MOE_ERR_IO : MOE_OK;
}

static void test_failing(void) {
    moe_tensor t[N_TENSORS];
    test_heap c;
    moe_allocator a = test_allocator(&c, 0);
    moe_buffer b;
    moe_error error;
    moe_stream s;
    broken out;
    size_t n, calls;
    sample(t);
    memset(&b, 0, sizeof b);
    b.allocator = a;
    CHECK(write_to(&b, t, N_TENSORS, sample_metadata, N_METADATA, &a, NULL) == MOE_OK);
    calls = c.calls;
    moe_buffer_free(&b);
    CHECK(calls > 5 && c.blocks == 0 && !c.wrong_size);
    for (n = 1; n <= calls; n++) { /* the n-th and all later allocations fail */
        memset(&c, 0, sizeof c);
        c.fail_at = n;
        c.fail_on = 1;
        error.code = MOE_OK;
        CHECK(write_to(&b, t, N_TENSORS, sample_metadata, N_METADATA, &a, &error) == MOE_ERR_MEMORY &&
              error.code == MOE_ERR_MEMORY);
        moe_buffer_free(&b);
        CHECK(c.blocks == 0 && !c.wrong_size);
    }
    memset(&c, 0, sizeof c);
    memset(&out, 0, sizeof out);
    s.ctx = &out;
    s.read = NULL;
    s.write = broken_write;
    s.sync = NULL;
    CHECK(moe_file_write(&s, t, N_TENSORS, sample_metadata, N_METADATA, &a, NULL) == MOE_OK);
    calls = out.writes;
    CHECK(calls >= N_TENSORS);
    for (n = 1; n <= calls; n++) {
        out.writes = 0;
        out.fail_at = n;
        CHECK(moe_file_write(&s, t, N_TENSORS, sample_metadata, N_METADATA, &a, &error) == MOE_ERR_IO &&
              out.writes == n && error.code == MOE_ERR_IO);
    }
    CHECK(c.blocks == 0 && !c.wrong_size);
}

/* ---- memory ---- */

/* Blocks of any size are given back in reverse order, not in another. */
static void test_arena_reversed(void) {
    unsigned char memory[1024];
    moe_arena arena = {NULL, 0, 0};
    const moe_allocator a = moe_arena_allocator(&arena);
    size_t i, all;
    arena.base = memory;
    arena.size = sizeof memory;
    for (i = 1; i < 150; i += 7) {
        void *p, *q, *r;
        arena.used = 0;
        p = a.resize(a.ctx, NULL, 0, i);
        q = a.resize(a.ctx, NULL, 0, i + 30);
        r = a.resize(a.ctx, NULL, 0, 1);
        if (!CHECK(p != NULL && q != NULL && r != NULL)) return;
        all = arena.used;
        CHECK(a.resize(a.ctx, p, i, 0) == NULL && a.resize(a.ctx, q, i + 30, 0) == NULL && arena.used == all);
        CHECK(a.resize(a.ctx, r, 1, 0) == NULL && a.resize(a.ctx, q, i + 30, i + 200) == q);
        CHECK(a.resize(a.ctx, q, i + 200, 0) == NULL && a.resize(a.ctx, p, i, 0) == NULL && arena.used < 64);
    }
}

static void test_arena(void) {
    unsigned char memory[1024];
    moe_arena arena;
    moe_allocator a;
    unsigned char *p, *q, *r;
    moe_buffer b;
    moe_stream s;
    size_t start, i, n = 0;
    arena.base = memory;
    arena.size = sizeof memory;
    arena.used = 0;
    a = moe_arena_allocator(&arena);
    p = (unsigned char *)a.resize(a.ctx, NULL, 0, 100);
    q = (unsigned char *)a.resize(a.ctx, NULL, 0, 50);
    CHECK(p != NULL && q != NULL && (uintptr_t)p % 16 == 0 && (uintptr_t)q % 16 == 0 && q >= p + 100);
    if (p == NULL || q == NULL) return;
    memset(p, 1, 100);
    memset(q, 2, 50);
    start = arena.used;
    CHECK(a.resize(a.ctx, q, 50, 60) == q && arena.used == start + 10); /* the last block grows in place */
    CHECK(a.resize(a.ctx, q, 60, 20) == q && arena.used == start - 30);
    CHECK(a.resize(a.ctx, p, 100, 90) == p);                            /* another one shrinks where it is */
    r = (unsigned char *)a.resize(a.ctx, p, 90, 200);                   /* and moves to grow */
    CHECK(r != NULL && r != p && r[0] == 1 && r[89] == 1 && q[19] == 2);
    start = arena.used;
    CHECK(a.resize(a.ctx, r, 200, 2000) == NULL && arena.used == start && r[89] == 1);
    CHECK(a.resize(a.ctx, NULL, 0, 2000) == NULL && a.resize(a.ctx, NULL, 0, (size_t)-1) == NULL &&
          arena.used == start);
    CHECK(a.resize(a.ctx, q, 20, 0) == NULL && arena.used == start);    /* not the last: stays */
    CHECK(a.resize(a.ctx, r, 200, 0) == NULL && arena.used < start);    /* the last: given back */
    CHECK(a.resize(a.ctx, NULL, 0, 0) == NULL);
    arena.used = 0;
    memset(&b, 0, sizeof b);
    b.allocator = a;
    s = moe_buffer_stream(&b);
    for (i = 0; i < 100 && s.write(s.ctx, "0123456789abcdefg", 17) == MOE_OK; i++) n += 17;
    CHECK(n > 900 && n <= 1024 && b.size == n && memcmp(b.data + n - 17, "0123456789abcdefg", 17) == 0);
    CHECK(s.write(s.ctx, memory, 100) == MOE_ERR_MEMORY && b.size == n && s.write(s.ctx, NULL, 0) == MOE_OK);
    moe_buffer_free(&b);
    CHECK(arena.used < 16 && b.data == NULL && b.size == 0);
    arena.base = NULL;
    arena.size = 0;
    arena.used = 0;
    CHECK(a.resize(a.ctx, NULL, 0, 1) == NULL);
    {
        moe_tensor t[N_TENSORS];
        moe_error error;
        moe_buffer out;
        memset(&out, 0, sizeof out);
        sample(t);
        arena.base = memory;
        arena.size = 300;
        arena.used = 0;
        CHECK(write_to(&out, t, N_TENSORS, NULL, 0, &a, &error) == MOE_ERR_MEMORY && out.size == 0);
        arena.size = sizeof memory;
        arena.used = 0;
        CHECK(write_to(&out, t, N_TENSORS, NULL, 0, &a, &error) == MOE_OK);
        moe_buffer_free(&out);
    }
}

/* Lists of stb_ds on our allocator: reserved growth keeps what is there, failure too. */
static void test_lists(void) {
    test_heap c;
    moe_allocator a = test_allocator(&c, 0);
    const char **list = NULL;
    size_t i;
    int good = 1;
    for (i = 0; i < 1000; i++) {
        if (!moei_array_reserve(&a, &list, sizeof *list, i + 1)) break;
        list[moei_array_header(list)->length++] = (const char *)"x" + i % 2;
    }
    CHECK(i == 1000 && moei_array_length(list) == 1000 && c.calls < 20);
    for (i = 0; i < moei_array_length(list); i++) good = good && list[i][0] == (i % 2 == 0 ? 'x' : '\0');
    c.fail_at = 1;
    c.fail_on = 1;
    CHECK(good && !moei_array_reserve(&a, &list, sizeof *list, 100000) && moei_array_length(list) == 1000 &&
          list[998][0] == 'x');
    CHECK(!moei_array_reserve(&a, &list, sizeof *list, (size_t)-1 / 4));
    moei_array_free(&a, &list, sizeof *list);
    moei_array_free(&a, &list, sizeof *list);
    CHECK(list == NULL && c.blocks == 0 && !c.wrong_size && moei_array_length(list) == 0);
    c.fail_at = 0;
    {
        unsigned char *p = (unsigned char *)moei_alloc(&a, 3, 5), *none = (unsigned char *)moei_alloc(&a, 0, 8);
        CHECK(p != NULL && none != NULL && p[0] == 0 && p[14] == 0 && moei_alloc(&a, (size_t)-1, 2) == NULL);
        moei_free(&a, p, 15);
        moei_free(&a, none, 0);
        moei_free(&a, NULL, 0);
        CHECK(c.blocks == 0 && !c.wrong_size);
    }
}

/* ---- the file system ---- */

static const char *const path = "files-test.bin";
static const char *const path_beside = "files-test.bin.tmp0";
static const char *const path_next = "files-test.bin.tmp1";

static int exists(const char *name) {
    FILE *f = fopen(name, "rb");
    if (f == NULL) return 0;
    fclose(f);
    return 1;
}

static int holds(const char *name, const char *text) {
    moe_buffer b;
    int good;
    memset(&b, 0, sizeof b);
    good = moe_file_read(name, &b, NULL) == MOE_OK && b.size == strlen(text) &&
           (b.size == 0 || memcmp(b.data, text, b.size) == 0);
    moe_buffer_free(&b);
    return good;
}

static moe_status contents_good(void *ctx, moe_stream *stream) {
    return stream->write(stream->ctx, ctx, strlen((const char *)ctx));
}

static moe_status contents_bad(void *ctx, moe_stream *stream) {
    (void)contents_good(ctx, stream);
    return MOE_ERR_NONFINITE;
}

static moe_status contents_says_why(void *ctx, moe_stream *stream) {
    (void)stream;
    return moei_error((moe_error *)ctx, MOE_ERR_CONFIG, "the cause");
}

static moe_status contents_sample(void *ctx, moe_stream *stream) {
    return moe_file_write(stream, (const moe_tensor *)ctx, N_TENSORS, sample_metadata, N_METADATA, NULL, NULL);
}

/* Saves the same file while it is being written: that takes the next name. */
static moe_status contents_nested(void *ctx, moe_stream *stream) {
    moe_status status = contents_good(ctx, stream);
    CHECK(exists(path_beside) && !exists(path_next));
    CHECK(moe_file_replace(path, contents_good, (void *)"inner", NULL) == MOE_OK && holds(path, "inner"));
    CHECK(exists(path_beside) && !exists(path_next));
    return status;
}

/* Like a full disk: from here on the file takes nothing. What write returns is ignored, as a
   careless caller would. */
static moe_status contents_full(void *ctx, moe_stream *stream) {
    moei_stdio *out = (moei_stdio *)stream->ctx;
    fclose(out->file);
    out->file = fopen(path, "rb");
    if (out->file == NULL) exit(2);
    (void)contents_good(ctx, stream);
    return MOE_OK;
}

static void test_replace(void) {
    moe_error error;
    moe_tensor t[N_TENSORS];
    char longer[5000];
    FILE *f;
    remove(path);
    remove(path_beside);
    remove(path_next);
    CHECK(moe_file_replace(path, contents_bad, (void *)"half", &error) == MOE_ERR_NONFINITE && !exists(path) &&
          !exists(path_beside));
    CHECK(moe_file_replace(path, contents_good, (void *)"old", NULL) == MOE_OK && holds(path, "old") &&
          !exists(path_beside));
    memset(&error, 0, sizeof error);
    CHECK(moe_file_replace(path, contents_bad, (void *)"half", &error) == MOE_ERR_NONFINITE && holds(path, "old") &&
          !exists(path_beside));
    CHECK(error.code == MOE_ERR_NONFINITE && strstr(error.message, path) != NULL, error.message);
    CHECK(moe_file_replace(path, contents_says_why, &error, &error) == MOE_ERR_CONFIG &&
          strcmp(error.message, "the cause") == 0);
    CHECK(moe_file_replace(path, contents_bad, (void *)"half", NULL) == MOE_ERR_NONFINITE && holds(path, "old") &&
          !exists(path_beside));
    CHECK(moe_file_replace(path, contents_full, (void *)"more", &error) == MOE_ERR_IO && holds(path, "old") &&
          !exists(path_beside));
    CHECK(error.code == MOE_ERR_IO && strstr(error.message, "cannot write files-test.bin: ") != NULL, error.message);
    strcpy(error.message, "as before");
    CHECK(moe_file_replace(path, contents_good, (void *)"new text", &error) == MOE_OK && holds(path, "new text"));
    CHECK(strcmp(error.message, "as before") == 0);
    f = fopen(path_next, "wb"); /* what a killed process has left */
    if (CHECK(f != NULL)) fclose(f);
    CHECK(moe_file_replace(path, contents_good, (void *)"", NULL) == MOE_OK && holds(path, ""));
    CHECK(!exists(path_beside) && !exists(path_next));
    CHECK(moe_file_replace(path, contents_nested, (void *)"outer", NULL) == MOE_OK && holds(path, "outer"));
    CHECK(!exists(path_beside) && !exists(path_next));
    CHECK(moe_file_replace(".", contents_good, (void *)"x", &error) == MOE_ERR_IO && !exists("..tmp0"));
    CHECK(strstr(error.message, "cannot replace .") != NULL, error.message);
    CHECK(moe_file_replace("no-such-folder/file", contents_good, (void *)"x", &error) == MOE_ERR_IO);
    CHECK(strstr(error.message, "no-such-folder/file: ") != NULL && strlen(error.message) > 60, error.message);
    memset(longer, 'p', sizeof longer);
    longer[sizeof longer - 1] = '\0';
    CHECK(moe_file_replace(longer, contents_good, (void *)"x", &error) == MOE_ERR_ARGUMENT);
    longer[2000] = '\0';
    CHECK(moe_file_replace(longer, contents_good, (void *)"x", &error) == MOE_ERR_IO &&
          strstr(error.message, "...ppp") != NULL);
    CHECK(moe_file_replace(NULL, contents_good, NULL, &error) == MOE_ERR_ARGUMENT &&
          moe_file_replace(path, NULL, NULL, &error) == MOE_ERR_ARGUMENT);
    sample(t);
    CHECK(moe_file_replace(path, contents_sample, t, &error) == MOE_OK);
    {
        moe_buffer b;
        moe_file file;
        memset(&b, 0, sizeof b);
        CHECK(moe_file_read(path, &b, &error) == MOE_OK && moe_file_open(&file, b.data, b.size, &error) == MOE_OK &&
              use_all(&file));
        moe_buffer_free(&b);
    }
    remove(path);
}

static void test_read(void) {
    static const size_t sizes[] = {0, 1, 4095, 4096, 4097, 8192, 100000};
    moe_error error;
    moe_buffer b;
    test_heap c;
    size_t i, n;
    memset(&b, 0, sizeof b);
    CHECK(moe_file_read("no-such-file", &b, &error) == MOE_ERR_IO && strstr(error.message, "no-such-file: ") != NULL &&
          b.data == NULL);
    CHECK(moe_file_read(NULL, &b, &error) == MOE_ERR_ARGUMENT && moe_file_read(path, NULL, &error) == MOE_ERR_ARGUMENT);
#ifndef _WIN32
    CHECK(moe_file_read(".", &b, &error) == MOE_ERR_IO && b.data == NULL); /* a folder */
#endif
    for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        FILE *f = fopen(path, "wb");
        int good = f != NULL;
        if (!CHECK(good)) return;
        for (n = 0; n < sizes[i]; n++) fputc((int)(n * 7 % 251), f);
        fclose(f);
        b.allocator = test_allocator(&c, 0);
        CHECK(moe_file_read(path, &b, &error) == MOE_OK && b.size == sizes[i] && c.calls <= 2);
        for (n = 0; n < b.size; n++) good = good && b.data[n] == n * 7 % 251;
        CHECK(good && moe_file_read(path, &b, &error) == MOE_ERR_ARGUMENT && b.size == sizes[i]);
        moe_buffer_free(&b);
        for (n = 1; n <= 2; n++) {
            memset(&c, 0, sizeof c);
            c.fail_at = n;
            c.fail_on = 1;
            if (n == 1 || sizes[i] >= 4096)
                CHECK(moe_file_read(path, &b, &error) == MOE_ERR_MEMORY && error.code == MOE_ERR_MEMORY);
            CHECK(b.data == NULL && b.size == 0 && c.blocks == 0 && !c.wrong_size);
        }
    }
    remove(path);
}

/* ---- checksums of a network's, a layer's and a trainer's file ---- */

#define SUMS_KEY "\"moe.crc32\":\""

static uint32_t plain_crc(const unsigned char *p, size_t n) {
    uint32_t sum = UINT32_C(0xffffffff);
    int i;
    while (n-- > 0)
        for (sum ^= *p++, i = 0; i < 8; i++) sum = sum >> 1 ^ ((sum & 1) != 0 ? UINT32_C(0xedb88320) : 0);
    return ~sum;
}

typedef struct saved_models {
    moe_net net;
    moe_trainer trainer;
    moe_buffer files[3]; /* of the network, of its layer, of the trainer */
} saved_models;

static int models_begin(saved_models *m) {
    moe_layer_config layer;
    moe_train_config config;
    moe_stream s[3];
    int i;
    memset(m, 0, sizeof *m);
    memset(&layer, 0, sizeof layer);
    memset(&config, 0, sizeof config);
    layer.d_ff = 5;
    for (i = 0; i < 3; i++) s[i] = moe_buffer_stream(&m->files[i]);
    moe_net_init(&m->net, 3, MOE_KERNELS_AUTO, NULL);
    moe_net_linear(&m->net, 4);
    moe_net_mixture(&m->net, &layer);
    return CHECK(moe_net_build(&m->net, 1, 3, NULL) == MOE_OK) &&
           CHECK(moe_trainer_init(&m->trainer, &m->net, &config, NULL) == MOE_OK) &&
           CHECK(moe_net_write(&m->net, &s[0], NULL) == MOE_OK) &&
           CHECK(moe_layer_write(&m->net.modules[1].layer, &s[1], NULL) == MOE_OK) &&
           CHECK(moe_trainer_write(&m->trainer, &s[2], NULL) == MOE_OK);
}

/* Reads a file of that kind; a trainer is checked to stay as it is when that fails. */
static moe_status read_model(saved_models *m, int kind, const moe_buffer *file, moe_error *error) {
    moe_net net;
    moe_layer layer;
    moe_status status = MOE_ERR_ARGUMENT;
    if (kind == 0 && (status = moe_net_read(&net, file->data, file->size, 0, 0, NULL, error)) == MOE_OK)
        moe_net_free(&net);
    if (kind == 1 && (status = moe_layer_read(&layer, file->data, file->size, 0, 0, NULL, error)) == MOE_OK)
        moe_layer_free(&layer);
    if (kind == 2) {
        moe_buffer seen[2];
        int i;
        for (i = 0; i < 2; i++) {
            moe_stream s = moe_buffer_stream(&seen[i]);
            memset(&seen[i], 0, sizeof seen[i]);
            CHECK(moe_trainer_write(&m->trainer, &s, NULL) == MOE_OK);
            if (i == 0) status = moe_trainer_read(&m->trainer, file->data, file->size, error);
        }
        CHECK(memcmp(seen[0].data, seen[1].data, seen[0].size) == 0, "a failed read changes nothing");
        for (i = 0; i < 2; i++) moe_buffer_free(&seen[i]);
    }
    return status;
}

/* Where the checksums begin in a file. */
static unsigned char *sums_of(const moe_buffer *file) {
    size_t i;
    const size_t n = strlen(SUMS_KEY);
    for (i = 8; i + n < file->size; i++)
        if (memcmp(file->data + i, SUMS_KEY, n) == 0) return file->data + i + n;
    return NULL;
}

/* The format that the configuration of a file states; 0: none. */
static int format_of(const moe_buffer *b) {
    moe_file file;
    char text[4000];
    const char *start = "{\"format\":";
    if (moe_file_open(&file, b->data, b->size, NULL) != MOE_OK ||
        moe_file_metadata(&file, "moe", text, sizeof text, NULL) != MOE_OK || strncmp(text, start, 10) != 0)
        return 0;
    return atoi(text + 10);
}

/* A layer of format 1 whose selection ignores the bias that the file has a tensor of: it keeps that
   format, because format 2 refuses it. */
static void check_old_layer(void) {
    static const char text[] = "{\"format\":%d,\"layer\":{\"d_model\":3,\"d_ff\":5,\"select\":\"dense\","
                               "\"selection_bias\":1}}";
    moe_layer_config config;
    moe_layer layer;
    moe_tensor tensors[MOE_LAYER_PARAMETER_COUNT];
    moe_metadata metadata;
    moe_buffer b[3];
    moe_stream s;
    moe_error error;
    char value[200];
    size_t n = 0;
    int i;
    memset(&config, 0, sizeof config);
    memset(b, 0, sizeof b);
    config.router.d_model = 3;
    config.router.selection_bias = 1;
    config.router.gate = MOE_GATE_SIGMOID;
    config.d_ff = 5;
    if (!CHECK_STATUS(moe_layer_create(&layer, &config, 0, 3, NULL, &error), MOE_OK)) return;
    while (moe_layer_tensor(&layer, n, &tensors[n]) == MOE_OK) n++;
    metadata.key = "moe";
    metadata.value = value;
    for (i = 1; i <= 2; i++) {
        moe_buffer_free(&b[0]);
        s = moe_buffer_stream(&b[0]);
        sprintf(value, text, 3 - i);
        CHECK_STATUS(moe_file_write(&s, tensors, n, &metadata, 1, NULL, &error), MOE_OK);
        if (i == 1) CHECK_STATUS(moe_layer_read(&layer, b[0].data, b[0].size, 0, 0, NULL, &error), MOE_ERR_CONFIG);
    }
    moe_layer_free(&layer);
    for (i = 0; i < 2; i++) {
        if (!CHECK_STATUS(moe_layer_read(&layer, b[i].data, b[i].size, 0, 0, NULL, &error), MOE_OK)) return;
        s = moe_buffer_stream(&b[i + 1]);
        CHECK_STATUS(moe_layer_write(&layer, &s, &error), MOE_OK);
        CHECK(format_of(&b[i + 1]) == 1);
        moe_layer_free(&layer);
    }
    CHECK(b[1].size == b[2].size && memcmp(b[1].data, b[2].data, b[1].size) == 0);
    for (i = 0; i < 3; i++) moe_buffer_free(&b[i]);
}

/* Files state the format of this version, a checkpoint of the earlier one is read, too. */
static void test_formats(void) {
    static const char format[] = "format\\\":";
    saved_models m;
    moe_error error;
    size_t i;
    if (models_begin(&m)) {
        moe_buffer *b = &m.files[2];
        for (i = 0; i < 3; i++) CHECK(format_of(&m.files[i]) == 2);
        for (i = 8; i + sizeof format < b->size && memcmp(b->data + i, format, sizeof format - 1) != 0;) i++;
        b->data[i + sizeof format - 1] = '1';
        CHECK(format_of(b) == 1);
        CHECK_STATUS(moe_trainer_read(&m.trainer, b->data, b->size, &error), MOE_OK);
        b->data[i + sizeof format - 1] = '3';
        CHECK_STATUS(moe_trainer_read(&m.trainer, b->data, b->size, &error), MOE_ERR_CONFIG);
    }
    moe_trainer_free(&m.trainer);
    moe_net_free(&m.net);
    for (i = 0; i < 3; i++) moe_buffer_free(&m.files[i]);
    check_old_layer();
}

/* One file: its checksums are right, each changed byte is found and its tensor named. */
static void check_sums(saved_models *m, int kind) {
    moe_buffer *b = &m->files[kind];
    moe_file file;
    moe_file_tensor t;
    moe_error error;
    char name[80], text[16];
    unsigned char *sums = sums_of(b);
    size_t index = 0, i;
    if (!CHECK(sums != NULL && moe_file_open(&file, b->data, b->size, NULL) == MOE_OK && file.n_tensors >= 4)) return;
    CHECK_STATUS(read_model(m, kind, b, &error), MOE_OK);
    for (; moe_file_next(&file, &t) == MOE_OK; index++) {
        const size_t at = (size_t)(t.data - b->data);
        sprintf(name, "'%.*s'", (int)t.name_length, t.name);
        sprintf(text, "%08lx", (unsigned long)plain_crc(t.data, t.bytes));
        CHECK(memcmp(sums + 8 * index, text, 8) == 0, name);
        for (i = 0; i < t.bytes; i += i < 9 ? 1 : 7) {
            b->data[at + i] ^= (unsigned char)(1u << i % 8);
            CHECK_STATUS(read_model(m, kind, b, &error), MOE_ERR_FORMAT);
            CHECK(strstr(error.message, name) != NULL && strstr(error.message, "damaged") != NULL, error.message);
            sums[-4] = 'x'; /* another key: there are no checksums, and the bytes are taken as they are */
            if (kind < 2) CHECK_STATUS(read_model(m, kind, b, &error), MOE_OK);
            sums[-4] = '2';
            b->data[at + i] ^= (unsigned char)(1u << i % 8);
        }
        text[0] = (char)sums[8 * index + 3];
        sums[8 * index + 3] = 'g';
        CHECK_STATUS(read_model(m, kind, b, &error), MOE_ERR_FORMAT);
        CHECK(strstr(error.message, name) != NULL && strstr(error.message, "malformed") != NULL, error.message);
        sums[8 * index + 3] = (unsigned char)text[0];
    }
    CHECK(index == file.n_tensors && sums[8 * index] == '"');
    CHECK_STATUS(read_model(m, kind, b, &error), MOE_OK);
}

/* What another program makes of a network's file: the tensors in another order, or a checksum less;
   and a checkpoint as a network's file. */
static void check_copies(saved_models *m) {
    moe_buffer copy;
    moe_stream s = moe_buffer_stream(&copy);
    moe_metadata metadata[2];
    moe_tensor tensors[20];
    moe_file file;
    moe_error error;
    char config[2000], sums[500];
    size_t i, n = m->net.n_tensors;
    memset(&copy, 0, sizeof copy);
    CHECK(n <= 20 && moe_file_open(&file, m->files[0].data, m->files[0].size, NULL) == MOE_OK);
    CHECK(moe_file_metadata(&file, "moe", config, sizeof config, NULL) == MOE_OK);
    CHECK(moe_file_metadata(&file, "moe.crc32", sums, sizeof sums, NULL) == MOE_OK && strlen(sums) == 8 * n);
    for (i = 0; i < n; i++) tensors[i] = m->net.tensors[n - 1 - i];
    metadata[0].key = "moe";
    metadata[0].value = config;
    metadata[1].key = "moe.crc32";
    metadata[1].value = sums;
    CHECK_STATUS(moe_file_write(&s, tensors, n, metadata, 2, NULL, &error), MOE_OK);
    CHECK_STATUS(read_model(m, 0, &copy, &error), MOE_OK);
    moe_buffer_free(&copy);
    for (i = 1; i < 9; i += 7) {
        sums[8 * n - i] = '\0';
        CHECK_STATUS(moe_file_write(&s, tensors, n, metadata, 2, NULL, &error), MOE_OK);
        CHECK_STATUS(read_model(m, 0, &copy, &error), MOE_ERR_FORMAT);
        CHECK(strstr(error.message, "8 digits each") != NULL, error.message);
        moe_buffer_free(&copy);
    }
    CHECK_STATUS(read_model(m, 0, &m->files[2], &error), MOE_OK);
}

/* A file of three tensors, two keys and a configuration of four modules, of which one is a note. */
static moe_buffer limited_file(void) {
    moe_buffer b;
    moe_stream stream;
    moe_tensor t[N_TENSORS];
    moe_metadata metadata[2];
    moe_error error;
    memset(&b, 0, sizeof b);
    stream = moe_buffer_stream(&b);
    sample(t);
    metadata[0].key = "moe";
    metadata[0].value = "{\"net\":{\"modules\":[{\"module\":\"tied\"},{},{\"_note\":\"{\"}]}}";
    metadata[1].key = "by";
    metadata[1].value = "{{{{{{";
    CHECK_STATUS(moe_file_write(&stream, t, 3, metadata, 2, NULL, &error), MOE_OK, error.message);
    return b;
}

/* Each limit at what the file has, above it and below it. */
static void test_limits(void) {
    static const char *const says[] = {" bytes, the limit is ", "3 tensors, the limit is 2",
                                       "2 metadata entries, the limit is 1", "4 modules, the limit is 3"};
    moe_buffer b = limited_file(), empty;
    moe_file file;
    moe_limits limits;
    moe_error error;
    size_t *each[4], has[4], i;
    if (!CHECK_STATUS(moe_file_open(&file, b.data, b.size, &error), MOE_OK, error.message)) return;
    CHECK(file.n_tensors == 3 && file.n_metadata == 2);
    memset(&limits, 0, sizeof limits);
    CHECK(moe_file_limit(&file, &limits, NULL) == MOE_OK);
    CHECK(moe_file_limit(NULL, &limits, &error) == MOE_ERR_ARGUMENT && moe_file_limit(&file, NULL, &error) ==
          MOE_ERR_ARGUMENT);
    each[0] = &limits.size;
    each[1] = &limits.tensors;
    each[2] = &limits.metadata;
    each[3] = &limits.modules;
    has[0] = b.size;
    has[1] = 3;
    has[2] = 2;
    has[3] = 4;
    for (i = 0; i < 4; i++) {
        *each[i] = has[i];
        CHECK(moe_file_limit(&file, &limits, &error) == MOE_OK);
        *each[i] = has[i] - 1;
        CHECK(moe_file_limit(&file, &limits, &error) == MOE_ERR_SPACE && strstr(error.message, says[i]) != NULL,
              error.message);
        *each[i] = has[i] + 1;
        CHECK(moe_file_limit(&file, &limits, &error) == MOE_OK);
    }
    moe_buffer_free(&b);
    memset(&empty, 0, sizeof empty);
    b = empty;
    CHECK(moe_file_open(&file, "\x08\0\0\0\0\0\0\0{}      ", 16, &error) == MOE_OK && file.n_metadata == 0 &&
          moe_file_limit(&file, &limits, &error) == MOE_OK);
}

/* Files around the limit of a buffer, and writes beyond it. */
static void test_buffer_limit(void) {
    static const size_t sizes[] = {1, 100, 4096, 4097, 70000};
    moe_buffer b;
    moe_stream stream;
    moe_error error;
    size_t i, n;
    for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        FILE *f = fopen(path, "wb");
        if (!CHECK(f != NULL)) return;
        for (n = 0; n < sizes[i]; n++) fputc('x', f);
        fclose(f);
        memset(&b, 0, sizeof b);
        b.most = sizes[i];
        CHECK(moe_file_read(path, &b, &error) == MOE_OK && b.size == sizes[i]);
        stream = moe_buffer_stream(&b);
        CHECK(stream.write(stream.ctx, "", 0) == MOE_OK && stream.write(stream.ctx, "y", 1) == MOE_ERR_SPACE &&
              b.size == sizes[i]);
        b.most++;
        CHECK(stream.write(stream.ctx, "y", 1) == MOE_OK && b.size == sizes[i] + 1);
        moe_buffer_free(&b);
        b.most = sizes[i] - 1;
        if (b.most == 0) continue; /* no limit */
        CHECK(moe_file_read(path, &b, &error) == MOE_ERR_SPACE && b.data == NULL && b.size == 0 &&
              strstr(error.message, "files-test.bin is larger than ") != NULL, error.message);
    }
    remove(path);
}

static void test_checksums(void) {
    saved_models m;
    moei_crc crc;
    int kind;
    moei_crc_begin(&crc);
    moei_crc_add(&crc, (const unsigned char *)"123456789", 9);
    CHECK(~crc.sum == UINT32_C(0xcbf43926), "the check value that catalogs of checksums give");
    if (models_begin(&m)) {
        for (kind = 0; kind < 3; kind++) check_sums(&m, kind);
        check_copies(&m);
    }
    for (kind = 0; kind < 3; kind++) moe_buffer_free(&m.files[kind]);
    moe_trainer_free(&m.trainer);
    moe_net_free(&m.net);
}

/* ---- many openings ---- */

/* A small valid file with escapes, metadata, an empty tensor and offsets out of order. */
static unsigned char *small_file(size_t *size) {
    static const char header[] = "{\"b\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[4,12]},"
                                 "\"__metadata__\":{\"format\":\"x\\u00e9\\n\",\"k\":\"\"},"
                                 "\"\\u0061\":{\"shape\":[],\"dtype\":\"I32\",\"data_offsets\":[0,4]},"
                                 "\"e\":{\"data_offsets\":[4,4],\"dtype\":\"BF16\",\"shape\":[0]}} ";
    return file_of(header, strlen(header), 12, size);
}

static void test_every_change(void) {
    size_t size, cut, i;
    unsigned char *bytes = small_file(&size);
    int opened, good = 1, any = 0, value;
    CHECK(open_any(bytes, size, &opened) && opened);
    for (cut = 0; cut < size; cut++) {
        unsigned char *shorter = block_of(cut);
        memcpy(shorter, bytes, cut);
        good = good && open_any(shorter, cut, &opened) && !opened;
        free(shorter);
    }
    CHECK(good);
    for (i = 0; i < size - 12; i++) {
        unsigned char was = bytes[i];
        for (value = 0; value < 256; value++) {
            bytes[i] = (unsigned char)value;
            good = good && open_any(bytes, size, &opened);
            any += opened;
        }
        bytes[i] = was;
    }
    CHECK(good);
    CHECK(any > 1000); /* other names and texts are as good */
    free(bytes);
}

/* A tensor's values, as many as it says, lie inside the file. */
static int check_inside(const moe_file_tensor *t, const unsigned char *bytes, size_t size) {
    return CHECK(t->data >= bytes && t->data <= bytes + size && t->bytes <= size - (size_t)(t->data - bytes));
}

/* Bytes that change after the file was opened must not lead outside of it. */
static void test_changed_later(void) {
    size_t size, i, n, found = 0;
    unsigned char *bytes = small_file(&size), *original = block_of(size);
    moe_file file;
    moe_file_tensor t;
    char text[8];
    size_t length;
    memcpy(original, bytes, size);
    CHECK(moe_file_open(&file, bytes, size, NULL) == MOE_OK);
    for (i = 0; i < 20000; i++) {
        memcpy(bytes, original, size);
        for (n = 0; n < 1 + i % 5; n++)
            bytes[8 + random_below(size - 8)] =
                (unsigned char)(i % 3 == 0 ? "\"\\{}u"[random_below(5)] : (int)random_below(256));
        file.at = 0;
        for (n = 0; n < 10 && moe_file_next(&file, &t) == MOE_OK; n++)
            found += check_inside(&t, bytes, size);
        if (moe_file_find(&file, "e", &t) == MOE_OK) (void)check_inside(&t, bytes, size);
        if (moe_file_metadata(&file, "k", text, sizeof text, &length) == MOE_OK) CHECK(strlen(text) < sizeof text);
        (void)moe_file_metadata(&file, "format", text, sizeof text, &length);
    }
    for (i = 0; i < 1000; i++) { /* tensor b: every shape [0..9,1] and every end of its data below 100 */
        char *shape, *end;
        memcpy(bytes, original, size);
        shape = strstr((char *)bytes + 8, "[2,1]") + 1;
        end = strstr((char *)bytes + 8, "[4,12]") + 3;
        *shape = (char)('0' + i / 100);
        end[0] = (char)('0' + i / 10 % 10);
        end[1] = (char)('0' + i % 10);
        if (moe_file_find(&file, "b", &t) == MOE_OK) found += check_inside(&t, bytes, size);
        file.at = 0;
        if (moe_file_next(&file, &t) == MOE_OK) found += check_inside(&t, bytes, size);
    }
    CHECK(found > 1000);
    free(original);
    free(bytes);
}

static void test_random(void) {
    static const char *const pieces[] = {"\"",        "{",
                                         "}",         "[",
                                         "]",         ",",
                                         ":",         "0",
                                         "4",         "12",
                                         "-1",        "\\u0061",
                                         "\\",        "\"dtype\"",
                                         "\"shape\"", "\"data_offsets\"",
                                         "\"F32\"",   "\"__metadata__\"",
                                         " ",         "18446744073709551615",
                                         "[0,4]",     "{}",
                                         "\"a\""};
    size_t size, i, n, done;
    unsigned char *valid = small_file(&size), *bytes = block_of(size);
    int opened, good = 1, any = 0;
    for (done = 0; done < 1000000;) { /* one million random bytes in pieces, half of them with a plausible beginning */
        size_t length = random_below(300);
        unsigned char *chunk = block_of(length);
        for (i = 0; i < length; i++) chunk[i] = (unsigned char)random_next();
        if (length > 10 && random_below(2) == 0) {
            put_length(chunk, length - 8 - random_below(3));
            chunk[8] = '{';
            if (length > 12) {
                chunk[9] = '"';
                chunk[length - 1] = '}';
            }
        }
        good = good && open_any(chunk, length, &opened);
        free(chunk);
        done += length + 1;
    }
    CHECK(good);
    for (i = 0; i < 200000; i++) { /* a valid file with a few bytes or words changed */
        memcpy(bytes, valid, size);
        for (n = 1 + random_below(3); n > 0; n--) {
            const char *piece = pieces[random_below(sizeof pieces / sizeof pieces[0])];
            size_t at = 8 + random_below(size - 20), length = strlen(piece);
            size_t from = 8 + random_below(size - 20);
            if (random_below(2) == 0 && length <= size - 12 - at) memcpy(bytes + at, piece, length);
            else if (random_below(2) == 0) bytes[at] = (unsigned char)random_next();
            else memmove(bytes + at, valid + from, at > from ? size - 12 - at : size - 12 - from);
        }
        good = good && open_any(bytes, size, &opened);
        any += opened;
    }
    CHECK(good && any > 100);
    free(bytes);
    free(valid);
}

/* ---- hostile files: large, and refused or opened ---- */

typedef struct text_builder {
    char *text;
    size_t size, room;
} text_builder;

static void build(text_builder *b, const char *s) {
    size_t n = strlen(s);
    if (b->size + n > b->room) {
        b->room = 2 * (b->size + n) + 1000;
        b->text = (char *)realloc(b->text, b->room);
        if (b->text == NULL) exit(2);
    }
    memcpy(b->text + b->size, s, n);
    b->size += n;
}

static void build_byte_tensor(text_builder *b, const char *name, size_t at, int first) {
    char entry[160];
    sprintf(entry, "%s\"%s\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%lu,%lu]}", first ? "" : ",", name,
            (unsigned long)at, (unsigned long)at + 1);
    build(b, entry);
}

/* Opens the built header with so much data and frees it; wants a status and a word. What takes long
   is shown. */
static void open_built(text_builder *b, size_t data, moe_status wanted, const char *word, const char *what) {
    size_t size;
    unsigned char *bytes = file_of(b->text, b->size, data, &size);
    moe_file file;
    moe_error error;
    moe_status status;
    clock_t start = clock();
    double seconds;
    memset(&error, 0, sizeof error);
    status = moe_file_open(&file, bytes, size, &error);
    seconds = (double)(clock() - start) / (double)CLOCKS_PER_SEC;
    printf("%-28s %8lu bytes %6.3f s\n", what, (unsigned long)size, seconds);
    if (!CHECK(status == wanted && strstr(error.message, word) != NULL, what))
        printf("    status %d, %s\n", status, error.message);
    free(bytes);
    free(b->text);
    memset(b, 0, sizeof *b);
}

/* The hash of the reader, to draw names as an attacker would. */
static uint64_t name_hash(const char *name) {
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    while (*name != '\0') h = moei_file_hash_step(h, (unsigned char)*name++);
    return moei_mix_bits(h);
}

static void many_names(size_t many, text_builder *b, char *name) {
    size_t i, n;
    build(b, "}");
    open_built(b, many, MOE_OK, "", "65536 tensors");
    for (build(b, "{"), i = 0; i < many; i++) {
        sprintf(name, "%lu", (unsigned long)(i == many - 1 ? 7 : i));
        build_byte_tensor(b, name, many - 1 - i, i == 0);
    }
    build(b, "}");
    open_built(b, many, MOE_ERR_FORMAT, "'7': the name occurs twice", "the last is a duplicate");
    for (build(b, "{"), i = 0; i <= many; i++) {
        sprintf(name, "%lu", (unsigned long)i);
        build_byte_tensor(b, name, i, i == 0);
    }
    build(b, "}");
    open_built(b, many + 1, MOE_ERR_UNSUPPORTED, "more than 65536", "65537 tensors");
    for (build(b, "{"), i = n = 0; n < many; i++) { /* all names in the first part */
        sprintf(name, "%lx", (unsigned long)i);
        if (name_hash(name) >> 32 > UINT64_C(0xffffffff) / (many / MOEI_NAMES_PER_PASS + 1)) continue;
        build_byte_tensor(b, name, n, n == 0);
        n++;
    }
    build(b, "}");
    open_built(b, many, MOE_ERR_FORMAT, "same hash", "names of one part");
    for (build(b, "{"), i = n = 0; n < 512; i++) { /* all names with the same 16 bits in the table */
        sprintf(name, "%lx", (unsigned long)(i >> 12));
        {
            size_t length = strlen(name);
            uint64_t h = UINT64_C(0xcbf29ce484222325), full;
            size_t k;
            int c;
            for (k = 0; k < length; k++) h = moei_file_hash_step(h, (unsigned char)name[k]);
            for (c = 0; c < 4096; c++) { /* two more characters at a time */
                int x = '0' + c / 64, y = '0' + c % 64;
                full = moei_mix_bits(moei_file_hash_step(moei_file_hash_step(h, x), y));
                if ((full >> 16 & 0xffffu) != 0x1234 || x == '\\' || y == '\\' || n == 512) continue;
                name[length] = (char)x;
                name[length + 1] = (char)y;
                name[length + 2] = '\0';
                build_byte_tensor(b, name, n, n == 0);
                n++;
            }
            i += 4095;
        }
    }
    build(b, "}");
    open_built(b, n, MOE_ERR_FORMAT, "same hash", "names of one tag");
}

static void test_hostile(void) {
    const size_t many = MOE_FILE_MAX_TENSORS;
    text_builder b;
    char name[64];
    size_t i;
    memset(&b, 0, sizeof b);
    for (build(&b, "{"), i = 0; i < many; i++) {
        sprintf(name, "model.layers.%lu.mlp.experts.%lu.w", (unsigned long)(i / 1000), (unsigned long)(i % 1000));
        build_byte_tensor(&b, name, i, i == 0);
    }
    many_names(many, &b, name);
    for (build(&b, "{\"__metadata__\":{"), i = 0; i < many; i++) {
        sprintf(name, "%s\"key.%lu\":\"some value\"", i > 0 ? "," : "", (unsigned long)i);
        build(&b, name);
    }
    build(&b, "}}");
    open_built(&b, 0, MOE_OK, "", "65536 keys");
    for (build(&b, "{\"__metadata__\":{"), i = 0; i <= many; i++) {
        sprintf(name, "%s\"%lu\":\"\"", i > 0 ? "," : "", (unsigned long)i);
        build(&b, name);
    }
    build(&b, "}}");
    open_built(&b, 0, MOE_ERR_UNSUPPORTED, "too many keys", "65537 keys");
    for (build(&b, "{"), i = 0; i < 100000; i++) build(&b, "                                                  ");
    build(&b, "}");
    open_built(&b, 0, MOE_OK, "", "white space");
    for (build(&b, "{\"a\":{\"dtype\":\"U8\",\"shape\":"), i = 0; i < 100000; i++)
        build(&b, "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[");
    open_built(&b, 0, MOE_ERR_FORMAT, "plain", "deep arrays");
    for (build(&b, "{"), i = 0; i < 100000; i++)
        build(&b, "\"a\":{\"a\":{\"a\":{\"a\":{\"a\":{\"a\":{\"a\":{\"a\":{\"a\":{");
    open_built(&b, 0, MOE_ERR_FORMAT, "unknown key", "deep objects");
    for (build(&b, "{\""), i = 0; i < 100000; i++) build(&b, "\\u0061\\ud83d\\ude00nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn");
    build(&b, "\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}");
    open_built(&b, 0, MOE_OK, "", "one long name");
    for (build(&b, "{\"a\":{\"dtype\":\"U8\",\"shape\":["), i = 0; i < 100000; i++)
        build(&b, "99999999999999999999999999999999999999999999999999");
    open_built(&b, 0, MOE_ERR_OVERFLOW, "size_t", "one long number");
    for (build(&b, "{\"__metadata__\":{\"a\":\""), i = 0; i < 50000; i++)
        build(&b, "}}}}}}}}}}{{{{{{{{{{\\\"\\\"\\\"\\\"\\\"\\\"\\\"\\\"");
    build(&b, "\"}");
    for (i = 0; i < 10000; i++) {
        sprintf(name, "%lu", (unsigned long)i);
        build_byte_tensor(&b, name, i, 0);
    }
    build(&b, "}");
    open_built(&b, 10000, MOE_OK, "", "one long text");
}

/* Where the data has holes, the first tensor that does not begin at the end of the one before. */
static void test_first_hole(void) {
    static const char header[] = "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
                                 "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[8,12]},"
                                 "\"c\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[12,16]}}";
    moe_file file;
    moe_error error;
    size_t size;
    unsigned char *bytes = file_of(header, strlen(header), 16, &size);
    CHECK(moe_file_open(&file, bytes, size, &error) == MOE_ERR_FORMAT);
    CHECK(strstr(error.message, "tensor 'b'") != NULL && strstr(error.message, "12 of 16 bytes") != NULL,
          error.message);
    free(bytes);
}

/* Values of a tensor of flags: whatever is not 0 is 1. */
static void test_flags(void) {
    static const char header[] = "{\"a\":{\"dtype\":\"BOOL\",\"shape\":[4],\"data_offsets\":[0,4]}}";
    moe_file file;
    moe_file_tensor t;
    moe_real values[4];
    size_t size, i;
    unsigned char *bytes = file_of(header, strlen(header), 4, &size); /* 0, 1, 2, 3 */
    CHECK(moe_file_open(&file, bytes, size, NULL) == MOE_OK && moe_file_find(&file, "a", &t) == MOE_OK);
    CHECK(moe_file_values(&t, 0, 4, values, NULL) == MOE_OK);
    for (i = 0; i < 4; i++) CHECK_NEAR(values[i], i > 0, 0);
    free(bytes);
}

/* The longest path is one that leaves room for what stands behind a temporary file's name, and the
   message tells how long. */
static void test_long_paths(void) {
    char long_path[5000], *number;
    moe_error error;
    size_t most;
    memset(long_path, 'p', sizeof long_path);
    long_path[sizeof long_path - 1] = '\0';
    CHECK(moe_file_replace(long_path, contents_good, (void *)"x", &error) == MOE_ERR_ARGUMENT);
    number = strstr(error.message, "longer than ");
    if (!CHECK(number != NULL, error.message)) return;
    most = (size_t)strtoul(number + 12, NULL, 10);
    if (!CHECK(most > 1000 && most + 1 < sizeof long_path)) return;
    long_path[most + 1] = '\0';
    CHECK(moe_file_replace(long_path, contents_good, (void *)"x", &error) == MOE_ERR_ARGUMENT);
    CHECK(strstr(error.message, "longer than ") != NULL, error.message);
    long_path[most] = '\0';
    CHECK(moe_file_replace(long_path, contents_good, (void *)"x", &error) != MOE_OK); /* no system has such names */
    CHECK(strstr(error.message, "longer than ") == NULL, error.message);
}

int main(void) {
    CASE(test_first_hole());
    CASE(test_flags());
    CASE(test_long_paths());
    CASE(test_messages());
    CASE(test_malformed());
    CASE(test_lengths());
    CASE(test_accepted());
    CASE(test_empty_tensors());
    CASE(test_metadata());
    CASE(test_half());
    CASE(test_values());
    CASE(test_unsigned());
    CASE(test_largest());
    CASE(test_round_trip());
    CASE(test_refused_writes());
    CASE(test_failing());
    CASE(test_arena());
    CASE(test_arena_reversed());
    CASE(test_lists());
    CASE(test_replace());
    CASE(test_read());
    CASE(test_limits());
    CASE(test_buffer_limit());
    CASE(test_formats());
    CASE(test_checksums());
    CASE(test_every_change());
    CASE(test_changed_later());
    CASE(test_random());
    CASE(test_hostile());
    return test_end();
}
