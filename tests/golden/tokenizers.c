/* tokenizers.c - runs files of expected token ids.
     cc -std=c99 -O1 -DMOE_NO_SIMD -I. tests/golden/tokenizers.c -o tokenizers -lm
     ./tokenizers FILE...
     (or: sh tests/run tokenizers FILE...)

     NAME.gguf, NAME.json              texts, and for each value of tokenizer.ggml.pre the ids of
                                       each text; the vocabulary is that of the .gguf file
     NAME.gguf, .gguf.inp, .gguf.out   llama.cpp's own: texts with "\n__ggml_vocab_test__\n"
                                       between them, a line of ids for each
     NAME.gguf alone                   loads, and the texts below survive

   A .json file without a .gguf file of its name goes with the last .gguf file before it. Every text
   is also decoded, as a stream: the bytes must be the text's, unless the vocabulary lacks some, and
   what comes out must be whole characters. Without arguments: tests/golden/tokens. The last line is
   "N passed, N failed". */
#define MOE_IMPLEMENTATION
#include "../all.h"
#include "../test.h"

static moe_buffer read_file(const char *path) {
    moe_buffer b;
    moe_error error;
    memset(&b, 0, sizeof b);
    if (moe_file_read(path, &b, &error) != MOE_OK) b.size = 0;
    return b;
}

/* path without the last n bytes, then end. */
static const char *renamed(const char *path, size_t n, const char *end) {
    static char out[2][1024];
    static int next;
    char *to = out[next++ % 2];
    sprintf(to, "%.*s%s", (int)(strlen(path) - n < 900 ? strlen(path) - n : 900), path, end);
    return to;
}

/* Decodes token by token; checks that what comes out is whole. */
static size_t decoded(const moe_tokenizer *t, const int32_t *ids, size_t n, char *out, size_t room) {
    moe_decoder d = {t, MOE_TOKENIZER_SPECIAL, 0, 0, {0}};
    size_t size = 0, i;
    for (i = 0; i <= n && size + moe_tokenizer_room(t) < room; i++) {
        const size_t some = moe_tokenizer_decode(&d, i < n ? ids[i] : -1, out + size, room - size);
        const char *p = out + size, *end = p + some;
        uint32_t code;
        while (i < n && p < end)
            if (!moei_next_utf8(&p, end, &code)) {
                const unsigned char lead = (unsigned char)p[-1];
                CHECKF(end - p >= 3 || lead < 0xC2 || lead > 0xF4 || p < end, "a character is cut at token %d", (int)i);
            }
        size += some;
    }
    return size;
}

static void show_ids(const char *what, const int32_t *ids, size_t n) {
    size_t i;
    printf("    %s", what);
    for (i = 0; i < n && i < 40; i++) printf(" %d", (int)ids[i]);
    printf("\n");
}

/* Encodes a text and compares the ids; wanted NULL: only the way back is checked. */
static void check_text(const moe_tokenizer *t, const char *text, size_t size, const int32_t *wanted, size_t n_wanted,
                       int flags) {
    const size_t room = 3 * size + 8, bytes = 16 * size + 2 * moe_tokenizer_room(t) + 64;
    int32_t *ids = (int32_t *)grab(room, sizeof *ids);
    char *back = (char *)grab(bytes, 1);
    size_t n = 0, i, unknown = 0;
    CHECK_STATUS(moe_tokenizer_encode(t, text, size, flags, ids, room, &n), MOE_OK);
    if (wanted != NULL) {
        for (i = 0; i < n && i < n_wanted && ids[i] == wanted[i];) i++;
        if (!CHECKF(n == n_wanted && i == n, "\"%.60s\": token %d of %d", text, (int)i, (int)n_wanted)) {
            show_ids("got   ", ids, n);
            show_ids("wanted", wanted, n_wanted);
        }
    }
    for (i = 0; i < n; i++) unknown += ids[i] == t->unknown;
    for (i = 0; i < size && t->kind == MOE_TOKENIZER_BYTES; i++) {
        const int32_t id = t->bytes[(unsigned char)text[i]];
        unknown += id < 0 || id >= t->n_tokens || moei_symbols(t)[id].kind != MOEI_TOKEN_NORMAL;
    }
    if (unknown == 0) {
        n = decoded(t, ids, n, back, bytes);
        CHECKF(n == size && memcmp(back, text, n) == 0, "\"%.60s\" came back as \"%.60s\"", text, back);
    }
    free(ids);
    free(back);
}

/* ---- NAME.json ---- */

static char *json_text(moei_json *j, size_t *size) {
    moei_span s;
    moei_chars chars;
    char *text;
    int c;
    if (moei_json_string(j, &s) != MOE_OK) return NULL;
    text = (char *)grab(moei_span_length(s) + 1, 1);
    for (*size = 0, chars = moei_chars_of(s); (c = moei_chars_next(&chars)) >= 0;) text[(*size)++] = (char)c;
    return text;
}

/* Checks the texts of one value of tokenizer.ggml.pre; at: offset of its list. */
static void run_cut(moe_tokenizer *t, const char *pre, const moe_buffer *json, size_t at, size_t texts) {
    moei_json j = moei_import_json_at(json, at, NULL), k = moei_import_json_at(json, texts, NULL);
    int first = 1;
    const int known = moei_vocab_cut(t, pre);
    CHECKF(known, "%s", pre);
    if (!known) return;
    for (; moei_vocab_item(&j, first) && moei_vocab_item(&k, first); first = 0) {
        size_t size = 0, n = 0;
        char *text = json_text(&k, &size);
        const size_t list = moei_import_json_member(json, j.at, "ids");
        moei_json i = moei_import_json_at(json, list, NULL);
        int32_t *wanted = (int32_t *)grab(3 * size + 8, sizeof *wanted);
        int begin = 1;
        CHECK(text != NULL && list > 0);
        for (; list > 0 && n < 3 * size + 8 && moei_vocab_item(&i, begin); begin = 0) {
            size_t id = 0;
            if (moei_json_size(&i, &id) != MOE_OK) break;
            wanted[n++] = (int32_t)id;
        }
        if (text != NULL) check_text(t, text, size, wanted, n, 0);
        free(text);
        free(wanted);
        if (moei_config_skip(&j) != MOE_OK) break;
    }
    CHECK(!first);
}

static void run_json(const char *vocabulary, const char *path) {
    moe_buffer json = read_file(path);
    const size_t pre = json.size > 0 ? moei_import_json_member(&json, 0, "pre") : 0;
    const size_t texts = json.size > 0 ? moei_import_json_member(&json, 0, "texts") : 0;
    moe_tokenizer t;
    moe_error error;
    moei_json j = moei_import_json_at(&json, pre, NULL);
    moei_span key;
    int more = 1, first = 1;
    error.message[0] = '\0';
    test_case(path);
    if (!CHECKF(pre > 0 && texts > 0, "%s: no file with texts and pre", path)) return;
    if (!CHECKF(moe_import_tokenizer(&t, vocabulary, NULL, &error) == MOE_OK, "%s", error.message)) return;
    (void)moei_json_take(&j, '{');
    for (; moei_json_key(&j, first, &key, &more) == MOE_OK && more; first = 0) {
        char name[64], shown[1100];
        moei_import_span(key, name, sizeof name);
        sprintf(shown, "%.900s: %s", path, name);
        test_case(shown);
        (void)moei_json_peek(&j);
        run_cut(&t, name, &json, j.at, texts);
        if (moei_config_skip(&j) != MOE_OK) break;
    }
    test_case("");
    moe_tokenizer_free(&t);
    moe_buffer_free(&json);
}

/* ---- llama.cpp's texts ---- */

static void run_lines(const moe_tokenizer *t, const char *p, size_t size, const char *q, const char *last) {
    static const char between[] = "\n__ggml_vocab_test__\n";
    const char *end = p + size;
    while (p < end) {
        const char *to = p;
        int32_t wanted[4096];
        size_t n = 0;
        while (to < end && (end - to < 21 || memcmp(to, between, 21) != 0)) to++;
        while (q < last && *q != '\n' && n < 4096) {
            char *next;
            const long id = strtol(q, &next, 10);
            if (next == q) break;
            wanted[n++] = (int32_t)id;
            for (q = next; q < last && *q == ' ';) q++;
        }
        q += q < last;
        check_text(t, p, (size_t)(to - p), wanted, n, 0);
        p = to + 21;
    }
}

static void run_vocabulary(const char *path) {
    static const char *const texts[] = {"Hello, world", " a  b\n\n", "na\xC3\xAFve \xF0\x9F\x99\x82",
                                        "\xFF\xC3(\xE2\x82"};
    moe_buffer in = read_file(renamed(path, 0, ".inp")), out = read_file(renamed(path, 0, ".out"));
    moe_tokenizer t;
    moe_error error;
    size_t i;
    error.message[0] = '\0';
    test_case(path);
    if (!CHECKF(moe_import_tokenizer(&t, path, NULL, &error) == MOE_OK, "%s", error.message)) return;
    if (in.size > 0 && out.size > 0) {
        const moe_status grown = moei_buffer_write(&out, "", 1); /* strtol needs an end */
        CHECK_STATUS(grown, MOE_OK);
        run_lines(&t, (const char *)in.data, in.size, (const char *)out.data, (const char *)out.data + out.size - 1);
    }
    for (i = 0; i < sizeof texts / sizeof *texts; i++) check_text(&t, texts[i], strlen(texts[i]), NULL, 0, 0);
    moe_tokenizer_free(&t);
    moe_buffer_free(&in);
    moe_buffer_free(&out);
}

static int is_file(const char *path) {
    FILE *f = fopen(path, "rb");
    if (f != NULL) fclose(f);
    return f != NULL;
}

int main(int count, char **words) {
    const char *vocabulary = NULL;
    int i;
    if (count == 1) run_json("tests/golden/tokens/split.gguf", "tests/golden/tokens/split.json");
    for (i = 1; i < count; i++) {
        const char *next = i + 1 < count ? words[i + 1] : "";
        if (moei_import_ends(words[i], ".json")) {
            const char *own = renamed(words[i], 5, ".gguf");
            run_json(is_file(own) || vocabulary == NULL ? own : vocabulary, words[i]);
        } else if (moei_import_ends(words[i], ".gguf")) {
            const char *json = renamed(words[i], 5, ".json");
            vocabulary = words[i];
            if (!is_file(json)) run_vocabulary(words[i]);
            else if (!moei_import_ends(next, ".json")) run_json(words[i], json);
        }
    }
    return test_end();
}
