/* tokens.c - tokenizers: cuts, merges, special tokens, decoding, both kinds of file, broken files.
     cc -std=c99 -O1 -DMOE_NO_SIMD -I. tests/unit/tokens.c -o tokens -lm && ./tokens */
#define MOE_IMPLEMENTATION
#include "../all.h"
#include "../test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vocab.h"

static moe_error error;

static moe_status load(moe_tokenizer *t, const char *name, const moe_buffer *b) {
    const moe_import_source source = moe_import_memory(name, b->data, b->size);
    error.message[0] = '\0';
    return moe_import_read_tokenizer(t, &source, 1, NULL, &error);
}

/* ---- tokenizer.json ---- */

static void put_text(moe_buffer *b, const char *text) { vocab_put(b, text, strlen(text)); }

static void put_quoted(moe_buffer *b, const char *text) {
    put_text(b, "\"");
    for (; *text != '\0'; text++) {
        if (*text == '"' || *text == '\\') put_text(b, "\\");
        vocab_put(b, text, 1);
    }
    put_text(b, "\"");
}

#define NO_NORMALIZER "\"normalizer\":null"
#define BYTE_LEVEL "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}"
#define TEMPLATE                                                                                              \
    "\"post_processor\":{\"type\":\"Sequence\",\"processors\":[{\"type\":\"ByteLevel\"},{\"type\":"             \
    "\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<|bos|>\",\"type_id\":0}},{\"Sequence\":"   \
    "{\"id\":\"A\"}},{\"SpecialToken\":{\"id\":\"<|im_end|>\"}}]}]}"
#define PREPEND                                                                                               \
    "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\",\"prepend\":\"\342\226\201\"}," \
    "{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"\342\226\201\"}]}"
#define META "\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"\342\226\201\",\"prepend_scheme\":\"always\"}"

static const char *const byte_parts[] = {NO_NORMALIZER, BYTE_LEVEL, TEMPLATE};
static const char *const piece_parts[] = {PREPEND, "\"pre_tokenizer\":null", "\"post_processor\":null"};
static const char *const meta_parts[] = {NO_NORMALIZER, META, "\"post_processor\":null"};

/* parts: normalizer, pre_tokenizer, post_processor; pairs: merges as lists. */
static void vocab_json(const vocab *v, const char *const *parts, int pairs, moe_buffer *b) {
    char text[128];
    int i, n = 0;
    put_text(b, "{\"version\":\"1.0\",\"added_tokens\":[");
    for (i = 0; i < v->n_tokens; i++) {
        if (v->tokens[i].kind < 2 || v->tokens[i].kind > 4) continue;
        sprintf(text, "%s{\"id\":%d,\"content\":", n++ > 0 ? "," : "", i);
        put_text(b, text);
        put_quoted(b, v->tokens[i].text);
        sprintf(text, ",\"lstrip\":%s,\"special\":%s}", "false", v->tokens[i].kind == 4 ? "false" : "true");
        put_text(b, text);
    }
    put_text(b, "],");
    for (i = 0; i < 3; i++) {
        put_text(b, parts[i]);
        put_text(b, ",");
    }
    put_text(b, "\"model\":{\"type\":");
    if (v->kind == VOCAB_UNIGRAM) put_text(b, "\"Unigram\",\"unk_id\":0,\"byte_fallback\":true,\"vocab\":[");
    else if (v->kind == VOCAB_BYTES) put_text(b, "\"BPE\",\"unk_token\":null,\"vocab\":{");
    else put_text(b, "\"BPE\",\"unk_token\":\"<unk>\",\"byte_fallback\":true,\"vocab\":{");
    for (i = 0; i < v->n_tokens; i++) {
        if (i > 0) put_text(b, ",");
        if (v->kind == VOCAB_UNIGRAM) put_text(b, "[");
        put_quoted(b, v->tokens[i].text);
        if (v->kind == VOCAB_UNIGRAM) sprintf(text, ",%g]", (double)v->tokens[i].score);
        else sprintf(text, ":%d", i);
        put_text(b, text);
    }
    put_text(b, v->kind == VOCAB_UNIGRAM ? "]" : "},\"merges\":[");
    for (i = 0; i < v->n_merges; i++) {
        const char *space = strchr(v->merges[i], ' ');
        if (i > 0) put_text(b, ",");
        if (pairs) {
            sprintf(text, "%.*s", (int)(space - v->merges[i]), v->merges[i]);
            put_text(b, "[");
            put_quoted(b, text);
            put_text(b, ",");
            put_quoted(b, space + 1);
            put_text(b, "]");
        } else put_quoted(b, v->merges[i]);
    }
    put_text(b, v->kind == VOCAB_UNIGRAM ? "}}" : "]}}");
}

/* ---- a second opinion: the merges by the book, without a heap ---- */

typedef struct slow_part {
    char text[80];
    int alive;
} slow_part;

static int32_t slow_find(const vocab *v, const char *text) {
    int i;
    for (i = v->n_tokens - 1; i >= 0 && strcmp(v->tokens[i].text, text) != 0;) i--;
    return i;
}

/* How early two texts merge; less is earlier; 1e9: never. */
static double slow_rank(const vocab *v, const char *left, const char *right) {
    char both[200];
    int i;
    if (v->kind == VOCAB_SCORES) {
        sprintf(both, "%s%s", left, right);
        i = slow_find(v, both);
        return i >= 0 ? -(double)v->tokens[i].score : 1e9;
    }
    sprintf(both, "%s %s", left, right);
    for (i = 0; i < v->n_merges && strcmp(v->merges[i], both) != 0;) i++;
    return i < v->n_merges ? i : 1e9;
}

static size_t slow_merge(vocab *v, slow_part *parts, size_t n, int32_t *ids) {
    size_t count = 0, i, k;
    for (;;) {
        double best = 1e9;
        size_t at = 0, with = 0;
        for (i = 0; i < n; i = k) {
            for (k = i + 1; k < n && !parts[k].alive;) k++;
            if (k < n && slow_rank(v, parts[i].text, parts[k].text) < best) {
                best = slow_rank(v, parts[i].text, parts[k].text);
                at = i;
                with = k;
            }
        }
        if (best >= 1e9) break;
        strcat(parts[at].text, parts[with].text);
        parts[with].alive = 0;
    }
    for (i = 0; i < n; i++) {
        const unsigned char *p = (const unsigned char *)parts[i].text;
        int32_t id;
        if (!parts[i].alive) continue;
        id = slow_find(v, parts[i].text);
        if (id >= 0) ids[count++] = id;
        else
            for (; *p != '\0'; p++) {
                char byte[8];
                sprintf(byte, "<0x%02X>", (unsigned)*p);
                ids[count++] = slow_find(v, byte);
            }
    }
    return count;
}

/* One word of text, in pieces of the vocabulary's alphabet. */
static size_t slow_encode(vocab *v, const char *text, int32_t *ids) {
    static slow_part parts[64];
    size_t n = 0, k;
    memset(parts, 0, sizeof parts);
    while (*text != '\0') {
        parts[n].alive = 1;
        if (v->kind == VOCAB_BYTES) strcpy(parts[n].text, vocab_stand_in(v, (unsigned char)*text++));
        else
            for (k = 0; k == 0 || ((unsigned char)*text & 0xC0) == 0x80; k++) parts[n].text[k] = *text++;
        n++;
    }
    return slow_merge(v, parts, n, ids);
}

static void same_as_slow(const moe_tokenizer *t, vocab *v, const char *text, const char *escaped) {
    int32_t ids[256], wanted[256];
    size_t n = 0, i, m = slow_encode(v, escaped, wanted);
    CHECK_STATUS(moe_tokenizer_encode(t, text, strlen(text), 0, ids, 256, &n), MOE_OK);
    for (i = 0; i < n && i < m && ids[i] == wanted[i];) i++;
    CHECKF(n == m && i == n, "\"%s\": %d of %d tokens, not %d", text, (int)i, (int)n, (int)m);
}

/* Words of random letters through a tokenizer and the slow merges. */
static void try_words(const moe_tokenizer *t, vocab *v) {
    static const char *const letters[2] = {"heloworldaa12", "aabbcdz"};
    moe_rng rng = {7};
    int tries, i;
    for (tries = 0; tries < 400; tries++) {
        const char *from = letters[v->kind != VOCAB_BYTES];
        char text[40], escaped[64];
        const int n = (int)(moe_rng_next(&rng) % 24);
        for (i = 0; i < n; i++) text[i] = from[moe_rng_next(&rng) % strlen(from)];
        text[n] = '\0';
        if (v->kind == VOCAB_BYTES && strpbrk(text, "12") != NULL) memset(text, '1', (size_t)n);
        sprintf(escaped, "%s%s", v->kind == VOCAB_BYTES || n == 0 ? "" : "\342\226\201", text);
        same_as_slow(t, v, text, escaped);
    }
}

static void test_merges(void) {
    vocab v;
    moe_tokenizer t;
    int kind, pairs;
    for (kind = VOCAB_BYTES; kind <= VOCAB_RANKS; kind++)
        for (pairs = -1; pairs < 2; pairs++) {
            moe_buffer b;
            memset(&b, 0, sizeof b);
            if (kind == VOCAB_BYTES) vocab_bytes(&v);
            else vocab_pieces(&v, kind);
            if ((kind == VOCAB_SCORES && pairs >= 0) || (kind == VOCAB_RANKS && pairs < 0)) continue;
            if (pairs < 0) vocab_gguf(&v, &b);
            else vocab_json(&v, kind == VOCAB_BYTES ? byte_parts : piece_parts, pairs, &b);
            if (!CHECKF(load(&t, pairs < 0 ? "a.gguf" : "tokenizer.json", &b) == MOE_OK, "%s", error.message)) return;
            CHECK(t.n_tokens == v.n_tokens);
            try_words(&t, &v);
            moe_tokenizer_free(&t);
            moe_buffer_free(&b);
        }
}

/* ---- the highest sum of scores, by trying all cuts ---- */

static double slow_best(const vocab *v, const char *text, int32_t *ids, size_t *n) {
    double best = -1e9;
    size_t size, length = strlen(text);
    *n = 0;
    if (length == 0) return 0;
    for (size = 1; size <= length; size++) {
        char start[64];
        int32_t rest[64], id;
        size_t more;
        double sum;
        sprintf(start, "%.*s", (int)size, text);
        id = slow_find(v, start);
        if (id < 0) continue;
        sum = (double)v->tokens[id].score + slow_best(v, text + size, rest, &more);
        if (sum <= best) continue;
        best = sum;
        ids[0] = id;
        memcpy(ids + 1, rest, more * sizeof *ids);
        *n = more + 1;
    }
    return best;
}

/* Whether the text of one character that no piece has is encoded by the token of its first byte. */
static int falls_back(const vocab *v, const moe_buffer *b) {
    moe_tokenizer t;
    int32_t ids[8];
    size_t n = 0, i;
    int found = 0;
    if (!CHECKF(load(&t, "tokenizer.json", b) == MOE_OK, "%s", error.message)) return -1;
    CHECK_STATUS(moe_tokenizer_encode(&t, "\303\251", 2, 0, ids, 8, &n), MOE_OK);
    for (i = 0; i < n; i++) found |= ids[i] == vocab_find(v, "<0xC3>");
    moe_tokenizer_free(&t);
    return found;
}

static void test_byte_fallback(void) {
    static const char on[] = "\"byte_fallback\":true";
    vocab v;
    moe_buffer b;
    size_t i = 0;
    memset(&b, 0, sizeof b);
    vocab_pieces(&v, VOCAB_UNIGRAM);
    vocab_json(&v, meta_parts, 0, &b);
    CHECK(falls_back(&v, &b) == 1);
    while (i + sizeof on < b.size && memcmp(b.data + i, on, sizeof on - 1) != 0) i++;
    memcpy(b.data + i + sizeof on - 5, "null", 4);
    CHECK(falls_back(&v, &b) == 0);
    moe_buffer_free(&b);
}

static void test_unigram(void) {
    vocab v;
    moe_tokenizer t;
    moe_buffer b;
    moe_rng rng = {3};
    int32_t ids[64], wanted[64];
    size_t n, m, i;
    int tries;
    memset(&b, 0, sizeof b);
    vocab_pieces(&v, VOCAB_UNIGRAM);
    vocab_json(&v, meta_parts, 0, &b);
    if (!CHECKF(load(&t, "tokenizer.json", &b) == MOE_OK, "%s", error.message)) return;
    CHECK(t.kind == MOE_TOKENIZER_UNIGRAM && t.unknown == 0);
    for (tries = 0; tries < 60; tries++) {
        char text[16], escaped[24];
        const int length = 1 + (int)(moe_rng_next(&rng) % 9);
        for (i = 0; i < (size_t)length; i++) text[i] = "abca"[moe_rng_next(&rng) % 4];
        text[length] = '\0';
        sprintf(escaped, "\342\226\201%s", text);
        (void)slow_best(&v, escaped, wanted, &m);
        CHECK_STATUS(moe_tokenizer_encode(&t, text, (size_t)length, 0, ids, 64, &n), MOE_OK);
        for (i = 0; i < n && i < m && ids[i] == wanted[i];) i++;
        CHECKF(n == m && i == n, "%s", text);
    }
    CHECK_STATUS(moe_tokenizer_encode(&t, "a zy", 4, 0, ids, 64, &n), MOE_OK);
    CHECK(n == 4 && ids[2] == 3 + 'z' && ids[3] == 3 + 'y'); /* unknown: bytes */
    CHECK_STATUS(moe_tokenizer_encode(&t, "<s>", 3, 0, ids, 64, &n), MOE_OK);
    CHECK(n == 4 && ids[1] == 3 + '<' && ids[2] == 3 + 's' && ids[3] == 3 + '>'); /* a text, not the token */
    moe_tokenizer_free(&t);
    moe_buffer_free(&b);
}

/* ---- cuts ---- */

static void cut(const unsigned char *passes, const char *p, const char *end, char *out) {
    const char *gap = p;
    if (p == end) return;
    if (*passes == MOEI_PASS_NONE) {
        sprintf(out + strlen(out), "%s%.*s", out[0] != '\0' ? "|" : "", (int)(end - p), p);
        return;
    }
    while (p < end) {
        int taken;
        const size_t n = moei_passes[*passes].match(&moei_passes[*passes], p, end, &taken);
        if (taken) {
            cut(passes + 1, gap, p, out);
            cut(passes + 1, p, p + n, out);
            gap = p + n;
        }
        p += n;
    }
    cut(passes + 1, gap, end, out);
}

static void test_cuts(void) {
    static const char *const rows[][3] = {
        {"gpt-2", "I'll go'S  x12 \n", "I|'ll| go|'|S| | x|12| \n"},
        {"olmo", "a  b", "a| | b"},
        {"refact", "a 123!", "a| |1|2|3|!"},
        {"qwen2", "I'LL 12 \n\n x\n", "I|'LL| |1|2| \n\n| x|\n"},
        {"qwen2", "it'\xC5\xBF ok", "it|'\xC5\xBF| ok"},
        {"llama-bpe", "12345 ?!\r\nz\xC3\xA4", "123|45| ?!\r\n|z\xC3\xA4"},
        {"gpt-4o", "HTMLParser's x/y //\nQ", "HTMLParser's| x|/y| //\n|Q"},
        {"gpt-4o", "AB\302\252C \xCC\x81 x", "AB\xC2\xAA|C| \xCC\x81| x"},
        {"tekken", "iPhone's 12", "i|Phone|'s| |1|2"},
        {"kimi-k2", "\346\227\245\346\234\254Abc \xE3\x81\x82's 1234/",
         "\346\227\245\346\234\254|Abc| \xE3\x81\x82's| |123|4|/"},
        {"deepseek-v3", "x1234 .abc ~~\n\xE6\x97\xA5z", "x|123|4| .|abc| ~~\n|\xE6\x97\xA5|z"},
        {"deepseek-llm", "ab\xC3\xA9 12\n,. \xE6\x97\xA5  ", "ab|\xC3\xA9| |12|\n|,.| |\xE6\x97\xA5|  "},
        {"deepseek-llm", "\343\200\200\343\203\274", "\343\200\200|\343\203\274"}, /* the space is a mark, too */
        {"deepseek-coder", "ab 12\n ,. \xE6\x97\xA5", "ab| |1|2|\n| ,.| |\xE6\x97\xA5"},
        {"falcon", "a+b 12345 x", "a|+|b| |123|45| x"},
        {"default", "a`b, 1234", "a|`|b|,| |123|4"}};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        char out[200] = "";
        moe_tokenizer t;
        memset(&t, 0, sizeof t);
        CHECK(moei_vocab_cut(&t, rows[i][0]));
        cut(t.passes, rows[i][1], rows[i][1] + strlen(rows[i][1]), out);
        CHECKF(strcmp(out, rows[i][2]) == 0, "%s: \"%s\"", rows[i][0], out);
    }
}

/* ---- special tokens, bounds, decoding ---- */

static int encodes(const moe_tokenizer *t, const char *text, int flags, const char *wanted) {
    int32_t ids[64];
    size_t n = 0, i;
    char got[400] = "";
    const moe_status status = moe_tokenizer_encode(t, text, strlen(text), flags, ids, 64, &n);
    for (i = 0; i < n && i < 64; i++) {
        const moei_symbol *s = (const moei_symbol *)(const void *)t->symbols.data + ids[i];
        sprintf(got + strlen(got), "%s%.*s", i > 0 ? "|" : "", (int)s->size, (const char *)t->texts.data + s->at);
    }
    return CHECKF(status == MOE_OK && strcmp(got, wanted) == 0, "\"%s\": \"%s\", not \"%s\"", text, got, wanted);
}

/* The longest lists of ids are within the documented bound: without a token for U+2581, a space and
   the one before it are three bytes each, and each special token begins a stretch. */
static void test_most_tokens(void) {
    static const char text[] = " | | | | | | | |";
    const size_t size = sizeof text - 1;
    vocab v;
    moe_tokenizer t;
    moe_buffer b;
    size_t n;
    int32_t ids[4 * sizeof text + 5];
    memset(&b, 0, sizeof b);
    vocab_pieces(&v, VOCAB_SCORES);
    v.tokens[vocab_find(&v, "\342\226\201")].text = "|";
    v.tokens[vocab_find(&v, "|")].kind = 4;
    vocab_gguf(&v, &b);
    if (!CHECKF(load(&t, "a.gguf", &b) == MOE_OK, "%s", error.message)) return;
    CHECK_STATUS(moe_tokenizer_encode(&t, text, size, MOE_TOKENIZER_BOUNDS, ids, 4 * size + 5, &n), MOE_OK);
    CHECK(n == 1 + 7 * size / 2);
    moe_tokenizer_free(&t);
    moe_buffer_free(&b);
}

static void test_special(void) {
    vocab v;
    moe_tokenizer t, none;
    moe_buffer b;
    size_t n;
    int32_t ids[4];
    memset(&b, 0, sizeof b);
    vocab_bytes(&v);
    v.merges[v.n_merges++] = "  a"; /* the first text may begin with a space */
    vocab_gguf(&v, &b);
    if (!CHECKF(load(&t, NULL, &b) == MOE_OK, "%s", error.message)) return;
    CHECK(t.bos == vocab_find(&v, "<|bos|>") && t.eot == vocab_find(&v, "<|im_end|>") && t.unknown == -1);
    CHECK(strcmp(t.architecture, "qwen3moe") == 0 && strcmp(t.chat_template, "{{ '<|im_start|>' }}") == 0);
    CHECK(moe_tokenizer_find(&t, "<|bos|>") == t.bos && moe_tokenizer_find(&t, "none") == -1);
    memset(&none, 0, sizeof none);
    CHECK(moe_tokenizer_find(&none, "a") == -1 && moe_tokenizer_find(&none, "") == -1);
    CHECK(moe_tokenizer_find(NULL, "a") == -1 && moe_tokenizer_find(&t, NULL) == -1);
    CHECK(moe_tokenizer_find(&t, "") == -1);
    CHECK(moe_tokenizer_is_end(&t, t.eos) && moe_tokenizer_is_end(&t, t.eot) && !moe_tokenizer_is_end(&t, 70));
    CHECK(!moe_tokenizer_is_end(&t, -1) && !moe_tokenizer_is_end(&t, t.n_tokens) && !moe_tokenizer_is_end(NULL, 0));
    encodes(&t, "he<|im_end|>~~12", MOE_TOKENIZER_SPECIAL, "he|<|im_end|>|~~|12");
    encodes(&t, "<|im_end|>xhe", MOE_TOKENIZER_SPECIAL, "<|im_end|>x|he"); /* the longest */
    encodes(&t, "~~<|bos|>", 0, "~~|<|||b|o|s|||>");
    encodes(&t, "he", MOE_TOKENIZER_BOUNDS, "<|bos|>|he");
    encodes(&t, "", MOE_TOKENIZER_BOUNDS, "<|bos|>");
    CHECK_STATUS(moe_tokenizer_encode(&t, "he~~", 3, 0, ids, 4, &n), MOE_OK);
    CHECK(n == 2 && ids[1] == '~'); /* the text ends within a special token */
    CHECK_STATUS(moe_tokenizer_encode(&t, "abcdef", 6, 0, ids, 4, &n), MOE_ERR_SPACE);
    CHECK(n == 6);
    CHECK_STATUS(moe_tokenizer_encode(&t, "abcdef", 6, 0, NULL, 0, &n), MOE_ERR_SPACE);
    CHECK_STATUS(moe_tokenizer_encode(&t, NULL, 0, 0, NULL, 0, &n), MOE_OK);
    CHECK_STATUS(moe_tokenizer_encode(&t, NULL, 1, 0, NULL, 0, &n), MOE_ERR_ARGUMENT);
    CHECK_STATUS(moe_tokenizer_encode(NULL, "", 0, 0, NULL, 0, &n), MOE_ERR_ARGUMENT);
    CHECK_STATUS(moe_tokenizer_encode(&t, "", 0, 0, NULL, 0, NULL), MOE_ERR_ARGUMENT);
    CHECK_STATUS(moe_tokenizer_encode(&t, "a", 1, 0, NULL, 1, &n), MOE_ERR_ARGUMENT);
    CHECK_STATUS(moe_tokenizer_encode(&t, "a", (size_t)1 << 30, 0, NULL, 0, &n), MOE_ERR_OVERFLOW);
    moe_tokenizer_free(&t);
    moe_tokenizer_free(&t);
    moe_tokenizer_free(NULL);
    moe_buffer_free(&b);
    test_most_tokens();
}

static void test_special_pieces(void) {
    vocab v;
    moe_tokenizer t;
    moe_buffer b;
    moe_decoder d;
    char text[8];
    int turn;
    memset(&b, 0, sizeof b);
    vocab_pieces(&v, VOCAB_SCORES);
    vocab_gguf(&v, &b);
    if (!CHECKF(load(&t, "a.gguf", &b) == MOE_OK, "%s", error.message)) return;
    encodes(&t, "ab c[INST] a", 0, "\342\226\201ab|\342\226\201|c|[INST]|\342\226\201|\342\226\201a");
    encodes(&t, "a<unk>", MOE_TOKENIZER_SPECIAL, "\342\226\201a|<unk>");
    memset(&d, 0, sizeof d);
    d.tokenizer = &t;
    CHECK(moe_tokenizer_decode(&d, 0, text, 8) == 0);
    /* the space that encoding puts before a text goes, behind tokens that print nothing, too; -1
       ends the text */
    for (turn = 0; turn < 2; turn++) {
        CHECK(moe_tokenizer_decode(&d, 1, text, 8) == 0);
        CHECK(moe_tokenizer_decode(&d, vocab_find(&v, "\342\226\201a"), text, 8) == 1);
        CHECK(moe_tokenizer_decode(&d, vocab_find(&v, "\342\226\201a"), text, 8) == 2);
        CHECK(moe_tokenizer_decode(&d, -1, text, 8) == 0);
    }
    d.flags = MOE_TOKENIZER_SPECIAL;
    CHECK(moe_tokenizer_decode(&d, 0, text, 8) == 5);
    encodes(&t, "z\xC3\xA4\xFF", 0, "\342\226\201|<0x7A>|\xC3\xA4|<0xFF>");
    moe_tokenizer_free(&t);
    moe_buffer_free(&b);
}

/* A tokenizer.json with the first text of a row in the place of its %s reads the second as the
   tokens in the third. */
static void json_encodes(const char *format, const char *const row[3], int n_tokens) {
    char whole[1200];
    moe_tokenizer t;
    moe_import_source source;
    sprintf(whole, format, row[0]);
    source = moe_import_memory("tokenizer.json", whole, strlen(whole));
    if (!CHECKF(moe_import_read_tokenizer(&t, &source, 1, NULL, &error) == MOE_OK, "%s", error.message)) return;
    CHECK(t.n_tokens == n_tokens && t.kind == MOE_TOKENIZER_RANKS);
    encodes(&t, row[1], MOE_TOKENIZER_SPECIAL, row[2]);
    moe_tokenizer_free(&t);
}

/* Unigram without bytes: unknown characters side by side are one unknown token, each with 10 less
   than the lowest score, which here is that of a token that is listed among the added ones, too. */
static void test_unigram_unknown(void) {
    static const char text[] =
        "{\"added_tokens\":[{\"id\":5,\"content\":\"q\",\"special\":true}],\"model\":{\"type\":\"Unigram\","
        "\"unk_id\":0,\"vocab\":[[\"?\",0],[\"ab\",-9],[\"cd\",-9],[\"ef\",-9],[\"bcdef\",-1],[\"q\",-20],"
        "[\"x\",-3]]}}";
    const moe_import_source source = moe_import_memory("tokenizer.json", text, sizeof text - 1);
    moe_tokenizer t;
    if (!CHECKF(moe_import_read_tokenizer(&t, &source, 1, NULL, &error) == MOE_OK, "%s", error.message)) return;
    encodes(&t, "xyzwx", 0, "x|?|x");
    encodes(&t, "abcdef", 0, "ab|cd|ef");
    moe_tokenizer_free(&t);
}

/* Special tokens of tokenizer.json that take white space with them; a space before each stretch. */
static void test_stripping(void) {
    static const char text[] =
        "{\"added_tokens\":[{\"id\":7,\"content\":\"<l>\",\"lstrip\":true,\"special\":true},{\"id\":8,\"content\":"
        "\"<r>\",\"rstrip\":true,\"special\":false}],\"pre_tokenizer\":{\"type\":\"Metaspace\",%s},\"model\":{\"type\":"
        "\"BPE\",\"ignore_merges\":true,\"unk_token\":\"?\",\"vocab\":{\"a\":0,\"b\":1,\"\342\226\201\":2,"
        "\"\342\226\201a\":3,\"?\":4,\"\342\226\201b\":5},\"merges\":[]}}";
    static const char *const rows[][3] = {
        {"\"prepend_scheme\":\"always\"", "a b <l>a<r> b",
         "\342\226\201a|\342\226\201b|<l>|\342\226\201a|<r>|\342\226\201b"},
        {"\"prepend_scheme\":\"always\"", "  <l>\342\226\201a<r> ", "<l>|\342\226\201a|<r>"},
        {"\"prepend_scheme\":\"always\"", "ab", "\342\226\201|a|b"}, /* the longest token is no word */
        {"\"prepend_scheme\":\"first\"", "a<r>b", "\342\226\201a|<r>|b"},
        {"\"prepend_scheme\":\"first\"", " a<r> b", "\342\226\201a|<r>|b"},
        {"\"prepend_scheme\":\"first\"", "\342\226\201a b", "\342\226\201a|\342\226\201b"},
        {"\"prepend_scheme\":\"first\"", "<l>a", "<l>|a"},
        {"\"prepend_scheme\":\"never\"", "a\xE3\x80\x80\xC2\x85 <l>\xC2\xA0<r>\xE2\x80\xA8\r\xC2\xA0 b<l>",
         "a|<l>|?|<r>|b|<l>"},
        {"\"prepend_scheme\":\"never\"", "a b", "a|\342\226\201b"},
        {"\"add_prefix_space\":true", " a", "\342\226\201a"},
        {"\"add_prefix_space\":false,\"split\":false", "a", "a"},
        {"\"add_prefix_space\":false,\"split\":false", "a b", "a|\342\226\201|b"},
        {"\"prepend_scheme\":\"never\"", "azz", "a|?|?"}};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) json_encodes(text, rows[i], 9);
}

/* fuse_unk: unknown characters side by side in a word are one unknown token. */
static void test_fused(void) {
    static const char text[] =
        "{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"prepend_scheme\":\"never\"},\"model\":{\"type\":\"BPE\","
        "\"byte_fallback\":true,\"fuse_unk\":%s,\"unk_token\":\"?\",\"vocab\":{\"a\":0,\"\342\226\201\":1,\"?\":2,"
        "\"<0x7A>\":3,\"<0xC3>\":4},\"merges\":[]}}";
    static const char *const rows[][3] = {{"false", "a\303\251a", "a|?|a"}, /* of its bytes only one has a token */
                                          {"true", "axyzxa", "a|?|<0x7A>|?|a"},
                                          {"false", "axyzxa", "a|?|?|<0x7A>|?|a"},
                                          {"true", "xaxxa", "?|a|?|a"},
                                          {"true", "xy\xFFxa xx x", "?|a|\342\226\201|?|\342\226\201|?"}};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) json_encodes(text, rows[i], 5);
}

/* Whether a place is not inside a character. */
static int is_boundary(const char *text, const char *end, size_t at) {
    const char *p = text;
    uint32_t code;
    while (p < end && (size_t)(p - text) < at) (void)moei_next_utf8(&p, end, &code);
    return (size_t)(p - text) == at;
}

/* Any bytes come back, in whole characters. */
static void test_decoding(void) {
    static const char alphabet[] = "hel ow\xC3\xA4\xE2\x82\xAC\xF0\x9F\x99\x82\xFF\x80\xED\xA0\xE0\x80\xF4\x90 ";
    vocab v;
    moe_rng rng = {5};
    int kind, tries;
    for (kind = VOCAB_BYTES; kind <= VOCAB_SCORES; kind++) {
        moe_tokenizer t;
        moe_buffer b;
        memset(&b, 0, sizeof b);
        if (kind == VOCAB_BYTES) vocab_bytes(&v);
        else vocab_pieces(&v, kind);
        vocab_gguf(&v, &b);
        if (!CHECKF(load(&t, "a.gguf", &b) == MOE_OK, "%s", error.message)) return;
        for (tries = 0; tries < 500; tries++) {
            char text[24], back[512];
            int32_t ids[96];
            size_t n, i, size = 0;
            const size_t length = moe_rng_next(&rng) % sizeof text;
            moe_decoder d;
            memset(&d, 0, sizeof d);
            d.tokenizer = &t;
            for (i = 0; i < length; i++) text[i] = alphabet[moe_rng_next(&rng) % (sizeof alphabet - 1)];
            CHECK_STATUS(moe_tokenizer_encode(&t, text, length, 0, ids, 96, &n), MOE_OK);
            for (i = 0; i <= n; i++) {
                size += moe_tokenizer_decode(&d, i < n ? ids[i] : -1, back + size, sizeof back - size);
                CHECK(is_boundary(text, text + length, size));
            }
            CHECKF(size == length && memcmp(back, text, length) == 0, "%d of %d bytes", (int)size, (int)length);
        }
        moe_tokenizer_free(&t);
        moe_buffer_free(&b);
    }
}

static void test_decoder(void) {
    vocab v;
    moe_tokenizer t;
    moe_buffer b;
    moe_decoder d;
    char text[64];
    memset(&b, 0, sizeof b);
    memset(&d, 0, sizeof d);
    vocab_bytes(&v);
    vocab_add(&v, "\342\226\201", 0, 1); /* no stand-in: as it is */
    vocab_add(&v, "unused", 0, 5);
    vocab_gguf(&v, &b);
    if (!CHECKF(load(&t, "a.gguf", &b) == MOE_OK, "%s", error.message)) return;
    CHECK(moe_tokenizer_decode(NULL, 0, text, 64) == 0 && moe_tokenizer_decode(&d, 0, text, 64) == 0);
    CHECK(moe_tokenizer_room(NULL) == 0 && moe_tokenizer_room(&t) > 10);
    d.tokenizer = &t;
    CHECK(moe_tokenizer_decode(&d, t.n_tokens, text, 64) == 0 && moe_tokenizer_decode(&d, t.bos, text, 64) == 0);
    CHECK(moe_tokenizer_decode(&d, vocab_find(&v, "unused"), text, 64) == 0);
    CHECK(moe_tokenizer_decode(&d, vocab_find(&v, "\342\226\201"), text, 64) == 3);
    CHECK(moe_tokenizer_decode(&d, vocab_find(&v, "hello"), text, 2) == 5); /* too little room */
    CHECK(moe_tokenizer_decode(&d, 0xE2, text, 64) == 0 && d.n_held == 1);
    CHECK(moe_tokenizer_decode(&d, 0x82, text, 64) == 0 && d.n_held == 2);
    CHECK(moe_tokenizer_decode(&d, -1, text, 1) == 2 && d.n_held == 2);
    CHECK(moe_tokenizer_decode(&d, vocab_find(&v, "he"), text, 64) == 4 && memcmp(text, "\xE2\x82he", 4) == 0);
    d.flags = MOE_TOKENIZER_SPECIAL;
    CHECK(moe_tokenizer_decode(&d, t.bos, text, 64) == 7 && memcmp(text, "<|bos|>", 7) == 0);
    CHECK(moe_tokenizer_decode(&d, t.bos, text, 6) == 7);
    d.flags = 0;
    CHECK(moe_tokenizer_decode(&d, t.bos, NULL, 0) == 0 && moe_tokenizer_decode(&d, -1, NULL, 0) == 0);
    /* bytes that begin no character, or none with the next one, are not waited for */
    CHECK(moe_tokenizer_decode(&d, 0xC1, text, 64) == 1 && moe_tokenizer_decode(&d, 0xF5, text, 64) == 1);
    CHECK(moe_tokenizer_decode(&d, 0xED, text, 64) == 0 && moe_tokenizer_decode(&d, 0xA0, text, 64) == 2);
    CHECK(moe_tokenizer_decode(&d, vocab_find(&v, "unused"), NULL, 0) == 0);
    moe_tokenizer_free(&t);
    moe_buffer_free(&b);
}

/* Bytes that are not written as <0xNN>, and the mark of a space in a token of the user. */
static void test_decoder_pieces(void) {
    vocab v;
    moe_tokenizer t;
    moe_buffer b;
    moe_decoder d;
    char text[64];
    memset(&b, 0, sizeof b);
    memset(&d, 0, sizeof d);
    vocab_pieces(&v, VOCAB_SCORES);
    vocab_add(&v, "<0x4g>", 0, 6);
    vocab_add(&v, "<0x4>", 0, 6);
    vocab_add(&v, "\342\226\201u", 0, 4);
    vocab_add(&v, "u\342\226\201", 0, 1);
    vocab_gguf(&v, &b);
    if (!CHECKF(load(&t, "a.gguf", &b) == MOE_OK, "%s", error.message)) return;
    d.tokenizer = &t;
    d.begun = 1;
    CHECK(moe_tokenizer_decode(&d, t.n_tokens - 4, text, 64) == 6 && memcmp(text, "<0x4g>", 6) == 0);
    CHECK(moe_tokenizer_decode(&d, t.n_tokens - 3, text, 64) == 5 && memcmp(text, "<0x4>", 5) == 0);
    CHECK(moe_tokenizer_decode(&d, t.n_tokens - 2, text, 64) == 4 && memcmp(text, "\342\226\201u", 4) == 0);
    CHECK(moe_tokenizer_decode(&d, t.n_tokens - 1, text, 64) == 2 && memcmp(text, "u ", 2) == 0);
    /* the room for what is written, not for how the file writes it */
    CHECK(moe_tokenizer_decode(&d, t.n_tokens - 1, text, 1) == 2);
    CHECK(moe_tokenizer_decode(&d, t.n_tokens - 1, text, 2) == 2 && memcmp(text, "u ", 2) == 0);
    CHECK(moe_tokenizer_decode(&d, vocab_find(&v, "<0x41>"), text, 1) == 1 && text[0] == 'A');
    moe_tokenizer_free(&t);
    moe_buffer_free(&b);
}

/* Long words do not take the square of their length, and come back. */
static void test_long(void) {
    enum { LONG = 200000 };
    vocab v;
    moe_tokenizer t;
    moe_buffer b;
    char *text = (char *)grab(LONG, 1);
    int32_t *ids = (int32_t *)grab(LONG + 8, sizeof *ids);
    size_t n, i;
    int k;
    memset(&b, 0, sizeof b);
    vocab_bytes(&v);
    vocab_gguf(&v, &b);
    if (!CHECKF(load(&t, "a.gguf", &b) == MOE_OK, "%s", error.message)) return;
    for (k = 0; k < 4; k++) {
        char back[16];
        moe_decoder d;
        size_t same = 0;
        memset(&d, 0, sizeof d);
        d.tokenizer = &t;
        for (i = 0; i < LONG; i++) text[i] = "a  h"[k];
        if (k == 2) text[LONG - 1] = 'x';
        CHECK_STATUS(moe_tokenizer_encode(&t, text, LONG, 0, ids, LONG + 8, &n), MOE_OK);
        if (k == 0) CHECK(n == LONG / 8 && ids[0] == vocab_find(&v, "aaaaaaaa"));
        for (i = 0; i < n; i++) {
            const size_t size = moe_tokenizer_decode(&d, ids[i], back, sizeof back);
            if (size > LONG - same || memcmp(back, text + same, size) != 0) break;
            same += size;
        }
        CHECKF(same == LONG, "%d bytes", (int)same);
    }
    moe_tokenizer_free(&t);
    moe_buffer_free(&b);
    free(text);
    free(ids);
}

/* ---- broken files ---- */

/* Loads; a tokenizer that this gives must still work. */
static int survives(const char *name, const unsigned char *bytes, size_t size) {
    const moe_import_source source = moe_import_memory(name, bytes, size);
    moe_tokenizer t;
    int32_t ids[256];
    char text[4096];
    size_t n = 0, i;
    moe_decoder d;
    memset(&t, 0, sizeof t);
    error.message[0] = '\0';
    if (moe_import_read_tokenizer(&t, &source, 1, NULL, &error) != MOE_OK) return error.message[0] != '\0';
    memset(&d, 0, sizeof d);
    d.tokenizer = &t;
    (void)moe_tokenizer_encode(&t, "hello w\xC3\xA4 \xFF abcaaaa 12", 21, MOE_TOKENIZER_SPECIAL | MOE_TOKENIZER_BOUNDS,
                               ids, 256, &n);
    for (i = 0; i < n && i < 256; i++) {
        if (ids[i] < 0 || ids[i] >= t.n_tokens) return 0;
        (void)moe_tokenizer_decode(&d, ids[i], text, sizeof text);
    }
    moe_tokenizer_free(&t);
    return 1;
}

/* Each mark of the first and last bytes, which are no vocabulary, becomes another one. */
static void test_marks(const char *name, unsigned char *bytes, size_t size) {
    static const char marks[] = "{}[]:,\"0123456789tfn", others[] = "{[0\"x}]";
    const size_t ends = 900;
    size_t at, k;
    for (at = 0; at < size; at++) {
        if (at == ends && size > 2 * ends) at = size - ends;
        if (name[0] == 't' && memchr(marks, bytes[at], sizeof marks - 1) == NULL) continue;
        for (k = at % 2; k < sizeof others - 1; k += 2) {
            const unsigned char kept = bytes[at];
            bytes[at] = name[0] == 't' ? (unsigned char)others[k] : (unsigned char)(k < 4 ? k + 4 : kept ^ 1u << k);
            CHECKF(survives(name, bytes, size), "%s: byte %lu is %d", name, (unsigned long)at, bytes[at]);
            bytes[at] = kept;
        }
    }
}

static void test_mutants(void) {
    vocab v;
    moe_rng rng = {11};
    int kind, tries;
    for (kind = 0; kind < 6; kind++) {
        static const char *const names[] = {"a.gguf", "a.gguf", "tokenizer.json", "tokenizer.json"};
        const char *name = names[kind < 2 ? kind : 2];
        moe_buffer b;
        unsigned char *copy;
        size_t i;
        memset(&b, 0, sizeof b);
        if (kind == 0 || kind == 2 || kind == 3) vocab_bytes(&v);
        else vocab_pieces(&v, kind == 1 ? VOCAB_SCORES : kind == 4 ? VOCAB_RANKS : VOCAB_UNIGRAM);
        if (kind < 2) vocab_gguf(&v, &b);
        else vocab_json(&v, kind < 4 ? byte_parts : kind == 4 ? piece_parts : meta_parts, kind == 3, &b);
        copy = (unsigned char *)grab(b.size, 1);
        memcpy(copy, b.data, b.size);
        test_marks(name, copy, b.size);
        for (i = 0; i < b.size; i += 1 + b.size / 97) CHECKF(survives(name, b.data, i), "cut at %d", (int)i);
        for (tries = 0; tries < 250; tries++) {
            int k;
            memcpy(copy, b.data, b.size);
            for (k = 0; k <= tries % 3; k++) {
                const size_t at = moe_rng_next(&rng) % b.size;
                copy[at] = (unsigned char)(tries % 2 == 0 ? moe_rng_next(&rng) : copy[moe_rng_next(&rng) % b.size]);
            }
            CHECKF(survives(name, copy, b.size), "kind %d, try %d", kind, tries);
        }
        free(copy);
        moe_buffer_free(&b);
    }
}

static void refuse(moe_status wanted, const char *name, const void *bytes, size_t size, const char *part) {
    const moe_import_source source = moe_import_memory(name, bytes, size);
    moe_tokenizer t;
    error.message[0] = '\0';
    CHECK_STATUS(moe_import_read_tokenizer(&t, &source, 1, NULL, &error), wanted, part);
    CHECKF(strstr(error.message, part) != NULL, "\"%s\", not \"%s\"", error.message, part);
}

static void test_refused_json(void) {
    static const struct {
        const char *text, *part;
        moe_status status;
    } rows[] = {
        {"{}", "no vocabulary", MOE_ERR_NOT_FOUND},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{}}}", "no vocabulary", MOE_ERR_NOT_FOUND},
        {"{\"model\":{\"type\":\"WordPiece\",\"vocab\":{}}}", "WordPiece", MOE_ERR_UNSUPPORTED},
        {"{\"model\":{\"type\":\"BPE\",\"continuing_subword_prefix\":\"##\"}}", "##", MOE_ERR_UNSUPPORTED},
        {"{\"model\":{\"type\":\"BPE\",\"end_of_word_suffix\":\"</w>\"}}", "</w>", MOE_ERR_UNSUPPORTED},
        {"{\"normalizer\":{\"type\":\"Precompiled\"},\"model\":{}}", "Precompiled", MOE_ERR_UNSUPPORTED},
        {"{\"pre_tokenizer\":{\"type\":\"Whitespace\"},\"model\":{}}", "Whitespace", MOE_ERR_UNSUPPORTED},
        {"{\"pre_tokenizer\":{\"type\":\"ByteLevel\"},\"model\":{}}", "add_prefix_space", MOE_ERR_UNSUPPORTED},
        {"{\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":\"Removed\",\"pattern\":{\"Regex\":\"x\"}},\"model\":{}}",
         "Removed", MOE_ERR_UNSUPPORTED},
        {"{\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":\"Isolated\",\"pattern\":{\"Regex\":\"q+\"}},"
         "\"model\":{}}",
         "q+", MOE_ERR_UNSUPPORTED},
        {"{\"model\":{\"vocab\":{\"a\":4294967295}}}", "too large", MOE_ERR_UNSUPPORTED},
        {"{\"model\":{\"vocab\":{\"a\":99999}}}", "too large", MOE_ERR_FORMAT},
        {"{\"model\":{\"vocab\":{\"a\":-1}}}", "integer", MOE_ERR_FORMAT},
        {"{\"model\":{\"vocab\":{\"a\":0}}}", "the model has no merges", MOE_ERR_FORMAT},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"ab\"]}}", "not a pair of strings", MOE_ERR_FORMAT},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[[\"a\"]]}}", "not a pair of strings", MOE_ERR_FORMAT},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[7]}}", "not a pair of strings", MOE_ERR_FORMAT},
        {"{\"added_tokens\":[{\"id\":1}],\"model\":{\"vocab\":{\"a\":0}}}", "id and content", MOE_ERR_FORMAT},
        {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[[\"a\",true]]}}", "score", MOE_ERR_FORMAT},
        {"{\"model\":[]}", "no vocabulary", MOE_ERR_NOT_FOUND},
        {"{\"model\":{\"vocab\":7}}", "{ is expected", MOE_ERR_FORMAT},
        {"{\"normalizer\":{\"type\":\"Prepend\",\"prepend\":\"x\"},\"model\":{}}", "\"Prepend\"",
         MOE_ERR_UNSUPPORTED},
        {"{\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\"x\"},\"content\":\"\342\226\201\"},"
         "\"model\":{}}", "\"Replace\"", MOE_ERR_UNSUPPORTED},
        {"{\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"Regex\":\" \"},\"content\":\"\342\226\201\"},"
         "\"model\":{}}", "\"Replace\"", MOE_ERR_UNSUPPORTED},
        {"{\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"_\"},\"model\":{}}",
         "\"Replace\"", MOE_ERR_UNSUPPORTED},
        {"{\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"}},\"model\":{}}", "\"Replace\"",
         MOE_ERR_UNSUPPORTED},
        {"{\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":\"MergedWithNext\",\"invert\":true},\"model\":{}}",
         "MergedWithNext", MOE_ERR_UNSUPPORTED},
        {"{\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":\"Isolated\"},\"model\":{}}", "expression \"\"",
         MOE_ERR_UNSUPPORTED},
        {"{\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":\"Isolated\",\"pattern\":\"\\\\p{N}\"},\"model\":{}}",
         "expression \"\"", MOE_ERR_UNSUPPORTED},
        {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[7]}}", "[ is expected", MOE_ERR_FORMAT},
        {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[[7,1]]}}", "\" is expected", MOE_ERR_FORMAT},
        {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[[\"a\"]]}}", ", is expected", MOE_ERR_FORMAT},
        {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[[\"a\",1,2]]}}", "] is expected", MOE_ERR_FORMAT},
        {"{\"added_tokens\":[7],\"model\":{\"vocab\":{\"a\":0}}}", "id and content", MOE_ERR_FORMAT},
        {"{\"added_tokens\":[{\"content\":\"x\"}],\"model\":{\"vocab\":{\"a\":0}}}", "id and content",
         MOE_ERR_FORMAT},
        {"{\"added_tokens\":[{\"id\":\"1\",\"content\":\"x\"}],\"model\":{\"vocab\":{\"a\":0}}}", "integer",
         MOE_ERR_FORMAT},
        {"{\"added_tokens\":[{\"id\":1,\"content\":2}],\"model\":{\"vocab\":{\"a\":0}}}", "\" is expected",
         MOE_ERR_FORMAT},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[[7,\"a\"]]}}", "not a pair of strings", MOE_ERR_FORMAT},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[[\"a\",7]]}}", "not a pair of strings", MOE_ERR_FORMAT},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[[\"a\",\"a\",\"a\"]]}}", "not a pair of strings", MOE_ERR_FORMAT},
        {"{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"_\"},\"model\":{}}", "\"_\"",
         MOE_ERR_UNSUPPORTED},
        {"{\"added_tokens\":[{\"id\":1,\"content\":\"x\",\"single_word\":true}],\"model\":{\"vocab\":{\"a\":0}}}",
         "single_word", MOE_ERR_UNSUPPORTED},
        {"{\"model\":{\"vocab\":{\"a\":0,\"b\":1},\"merges\":[]},\"post_processor\":{\"type\":"
         "\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"a\"}},{\"SpecialToken\":{\"id\":\"b\"}},"
         "{\"Sequence\":{}}]}}", "\"b\"", MOE_ERR_UNSUPPORTED},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[]},\"post_processor\":{\"type\":\"RobertaProcessing\","
         "\"sep\":[\"a\",0],\"cls\":[\"a\",0]}}", "RobertaProcessing", MOE_ERR_UNSUPPORTED},
        {"[]", "object", MOE_ERR_FORMAT}};
    char longest[700];
    size_t i;
    for (i = 0; i < sizeof rows / sizeof *rows; i++)
        refuse(rows[i].status, "tokenizer.json", rows[i].text, strlen(rows[i].text), rows[i].part);
    sprintf(longest, "{\"model\":{\"type\":\"Unigram\",\"vocab\":[[\"%0300d\",-1]]}}", 0);
    refuse(MOE_ERR_UNSUPPORTED, "tokenizer.json", longest, strlen(longest), "256 bytes");
    strcpy(longest, "{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[");
    for (i = 0; i < 9; i++) strcat(longest, i > 0 ? ",{\"type\":\"Digits\"}" : "{\"type\":\"Digits\"}");
    strcat(longest, "]},\"model\":{}}");
    refuse(MOE_ERR_UNSUPPORTED, "tokenizer.json", longest, strlen(longest), "8 steps");
}

/* Replaces the first occurrence of a text in a GGUF file by one of the same length. */
static void refuse_changed(const moe_buffer *b, const char *from, const char *to, size_t n, moe_status status,
                           const char *part) {
    unsigned char *copy = (unsigned char *)grab(b->size, 1);
    size_t i = 0;
    memcpy(copy, b->data, b->size);
    while (i + n < b->size && memcmp(copy + i, from, n) != 0) i++;
    CHECKF(i + n < b->size, "%s", part);
    memcpy(copy + i, to, n);
    refuse(status, "a.gguf", copy, b->size, part);
    free(copy);
}

static void test_refused_gguf(void) {
    vocab v;
    moe_buffer b;
    memset(&b, 0, sizeof b);
    vocab_bytes(&v);
    vocab_gguf(&v, &b);
    refuse_changed(&b, "GGUF\3", "GGUF\7", 5, MOE_ERR_UNSUPPORTED, "versions 2 and 3");
    refuse_changed(&b, "gpt2", "bert", 4, MOE_ERR_UNSUPPORTED, "bert");
    refuse_changed(&b, "gpt-2", "gpt-7", 5, MOE_ERR_UNSUPPORTED, "gpt-7");
    refuse_changed(&b, "ggml.model", "ggml.xxxxx", 10, MOE_ERR_NOT_FOUND, "no vocabulary");
    refuse_changed(&b, "ggml.tokens", "ggml.xxxxxx", 11, MOE_ERR_NOT_FOUND, "no vocabulary");
    refuse_changed(&b, "token_type\t\0\0\0\5", "token_type\t\0\0\0\4", 15, MOE_ERR_FORMAT, "elements of type");
    refuse_changed(&b, "ggml.tokens\t\0\0\0\x08\0\0\0", "ggml.tokens\x04\0\0\0\x08\0\0\0", 19, MOE_ERR_FORMAT, "byte");
    refuse_changed(&b, "ggml.bos_token_id\x04", "ggml.bos_token_id\x06", 18, MOE_ERR_FORMAT, "has type 6");
    refuse_changed(&b, "ggml.merges", "ggml.xxxxxx", 11, MOE_ERR_FORMAT, "tokenizer.ggml.merges is missing");
    refuse_changed(&b, "he ll", "he_ll", 5, MOE_ERR_FORMAT, "not a pair of strings");
    refuse_changed(&b, "\5\0\0\0\0\0\0\0he ll", "\5\0\0\0\1\0\0\0he ll", 13, MOE_ERR_FORMAT, "beyond the end");
    v.fewer = 1;
    b.size = 0;
    vocab_gguf(&v, &b);
    refuse(MOE_ERR_FORMAT, "a.gguf", b.data, b.size, "elements for");
    refuse(MOE_ERR_FORMAT, "a.gguf", "GGUF\3\0\0\0", 8, "ends");
    refuse(MOE_ERR_FORMAT, "a.gguf", "GG", 2, "object");
    moe_buffer_free(&b);
    vocab_pieces(&v, VOCAB_SCORES);
    v.tokens[5].score = (float)HUGE_VAL - (float)HUGE_VAL;
    vocab_gguf(&v, &b);
    refuse(MOE_ERR_FORMAT, "a.gguf", b.data, b.size, "score of token 5");
    v.tokens[5].score = 0;
    b.size = 0;
    vocab_gguf(&v, &b);
    refuse_changed(&b, "ggml.scores", "ggml.xxxxxx", 11, MOE_ERR_FORMAT, "scores is missing");
    moe_buffer_free(&b);
}

/* What the files beside tokenizer.json say. */
static void test_beside(void) {
    static const char config[] = "{\"model_type\":\"mixtral\",\"bos_token_id\":1,\"eos_token_id\":[2,7]}";
    static const char settings[] =
        "{\"bos_token\":{\"content\":\"<s>\"},\"add_bos_token\":true,\"unk_token\":\"<unk>\",\"eos_token\":null,"
        "\"chat_template\":[{\"name\":\"tool\",\"template\":\"no\"},{\"name\":\"default\",\"template\":\"[INST]\"}]}";
    static const char plain[] = "{\"chat_template\":\"x\\ny\",\"add_eos_token\":true,\"eos_token\":\"</s>\"}";
    vocab v;
    moe_buffer b;
    moe_tokenizer t;
    moe_import_source sources[3];
    memset(&b, 0, sizeof b);
    vocab_pieces(&v, VOCAB_RANKS);
    vocab_json(&v, piece_parts, 0, &b);
    sources[0] = moe_import_memory("tokenizer.json", b.data, b.size);
    sources[1] = moe_import_memory("tokenizer_config.json", settings, sizeof settings - 1);
    sources[2] = moe_import_memory("config.json", config, sizeof config - 1);
    if (!CHECKF(moe_import_read_tokenizer(&t, sources, 3, NULL, &error) == MOE_OK, "%s", error.message)) return;
    CHECK(t.bos == 1 && t.eos == 2 && t.add_bos && !t.add_eos && t.unknown == 0);
    CHECK(strcmp(t.architecture, "mixtral") == 0 && t.chat_template != NULL && strcmp(t.chat_template, "[INST]") == 0);
    encodes(&t, "ab", MOE_TOKENIZER_BOUNDS, "<s>|\342\226\201ab");
    moe_tokenizer_free(&t);
    sources[1] = moe_import_memory("tokenizer_config.json", plain, sizeof plain - 1);
    if (!CHECKF(moe_import_read_tokenizer(&t, sources, 2, NULL, &error) == MOE_OK, "%s", error.message)) return;
    CHECK(t.bos == -1 && t.add_eos && t.chat_template != NULL && strcmp(t.chat_template, "x\ny") == 0);
    moe_tokenizer_free(&t);
    b.size = 0; /* whose post_processor names both ends */
    vocab_bytes(&v);
    vocab_json(&v, byte_parts, 0, &b);
    sources[0] = moe_import_memory("tokenizer.json", b.data, b.size);
    sources[1] = moe_import_memory("tokenizer_config.json", "{\"bos_token\":\"<none>\"}", 22);
    if (!CHECKF(moe_import_read_tokenizer(&t, sources, 2, NULL, &error) == MOE_OK, "%s", error.message)) return;
    CHECK(t.bos == vocab_find(&v, "<|bos|>") && t.add_bos && t.eos == vocab_find(&v, "<|im_end|>"));
    moe_tokenizer_free(&t);
    sources[1] = moe_import_memory("tokenizer_config.json", "{", 1);
    CHECK_STATUS(moe_import_read_tokenizer(&t, sources, 2, NULL, &error), MOE_ERR_FORMAT);
    sources[1] = moe_import_memory("config.json", "{", 1);
    CHECK_STATUS(moe_import_read_tokenizer(&t, sources, 2, NULL, &error), MOE_ERR_FORMAT);
    CHECK_STATUS(moe_import_read_tokenizer(&t, NULL, 2, NULL, &error), MOE_ERR_ARGUMENT);
    CHECK_STATUS(moe_import_read_tokenizer(NULL, sources, 2, NULL, &error), MOE_ERR_ARGUMENT);
    CHECK_STATUS(moe_import_read_tokenizer(&t, sources, 0, NULL, &error), MOE_ERR_ARGUMENT);
    moe_buffer_free(&b);
}

/* What of them is no token, not a text or not there. */
static void test_beside_odd(void) {
    static const struct {
        const char *settings, *config;
        int bos, eos, add_bos, add_eos;
        const char *chat, *architecture;
    } rows[] = {
        {"{\"bos_token\":7,\"eos_token\":{\"x\":1},\"add_bos_token\":true,\"add_eos_token\":true}", "{}", -1, -1, 0, 0,
         NULL, ""},
        {"{\"bos_token\":\"<none>\",\"eos_token\":{\"content\":7},\"chat_template\":[]}",
         "{\"bos_token_id\":1,\"model_type\":7}", 1, -1, 0, 0, NULL, ""},
        {"{\"bos_token\":{\"content\":\"<s>\"}}", "{}", 1, -1, 0, 0, NULL, ""},
        {"{\"chat_template\":7}", "{\"bos_token_id\":\"1\",\"eos_token_id\":999999}", -1, -1, 0, 0, NULL, ""},
        {"{\"chat_template\":[7,{\"name\":\"default\",\"template\":\"x\"}]}", "{\"eos_token_id\":[]}", -1, -1, 0, 0,
         NULL, ""},
        {"{\"chat_template\":[{\"template\":\"x\"},{\"name\":\"other\",\"template\":\"y\"}]}",
         "{\"eos_token_id\":2}", -1, 2, 0, 0, NULL, ""},
        {"{\"chat_template\":[{\"name\":\"default\"},{\"name\":\"default\",\"template\":\"y\"}],\"bos_token\":\"<s>\","
         "\"add_bos_token\":null,\"eos_token\":\"</s>\",\"add_eos_token\":true}",
         "{\"bos_token_id\":2,\"eos_token_id\":1,\"model_type\":\"mixtral\"}", 1, 2, 0, 1, "y", "mixtral"}};
    vocab v;
    moe_buffer b;
    size_t i;
    memset(&b, 0, sizeof b);
    vocab_pieces(&v, VOCAB_RANKS);
    vocab_json(&v, piece_parts, 0, &b);
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        moe_tokenizer t;
        moe_import_source sources[3];
        const char *chat = rows[i].chat;
        sources[0] = moe_import_memory("tokenizer.json", b.data, b.size);
        sources[1] = moe_import_memory("tokenizer_config.json", rows[i].settings, strlen(rows[i].settings));
        sources[2] = moe_import_memory("config.json", rows[i].config, strlen(rows[i].config));
        if (!CHECKF(moe_import_read_tokenizer(&t, sources, 3, NULL, &error) == MOE_OK, "%s", error.message)) continue;
        CHECKF(t.bos == rows[i].bos && t.eos == rows[i].eos && t.add_bos == rows[i].add_bos &&
                   t.add_eos == rows[i].add_eos, "%s: %d %d %d %d", rows[i].settings, (int)t.bos, (int)t.eos, t.add_bos,
               t.add_eos);
        CHECK((chat == NULL) == (t.chat_template == NULL), rows[i].settings);
        if (chat != NULL && t.chat_template != NULL) CHECK(strcmp(t.chat_template, chat) == 0, t.chat_template);
        CHECK(strcmp(t.architecture, rows[i].architecture) == 0, t.architecture);
        moe_tokenizer_free(&t);
    }
    moe_buffer_free(&b);
}

/* Tokens around a text: parts of the template that are none, and tokens that the vocabulary
   lacks. */
static void test_template(void) {
    static const struct {
        const char *single;
        int bos, eos;
    } rows[] = {{"[{\"SpecialToken\":{\"id\":\"<s>\"}},{\"Sequence\":{}},{\"SpecialToken\":{\"id\":\"</s>\"}}]", 1, 2},
                {"[{\"SpecialToken\":{\"id\":\"<none>\"}},{\"Sequence\":{}},{\"SpecialToken\":{\"id\":\"<s>\"}}]", -1,
                 1},
                {"[\"A\",{\"SpecialToken\":{\"id\":\"</s>\"}}]", -1, 2},
                {"[{\"SpecialToken\":7},{\"SpecialToken\":{\"id\":\"</s>\"}}]", -1, 2},
                {"[{\"SpecialToken\":{\"id\":7}},{\"SpecialToken\":{\"id\":\"</s>\"}}]", -1, 2},
                {"7", -1, -1}};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        char json[600];
        moe_import_source source;
        moe_tokenizer t;
        sprintf(json, "{\"model\":{\"vocab\":{\"a\":0,\"<s>\":1,\"</s>\":2},\"merges\":[]},\"post_processor\":"
                      "{\"type\":\"TemplateProcessing\",\"single\":%s}}", rows[i].single);
        source = moe_import_memory("tokenizer.json", json, strlen(json));
        if (!CHECKF(moe_import_read_tokenizer(&t, &source, 1, NULL, &error) == MOE_OK, "%s", error.message)) continue;
        CHECKF(t.bos == rows[i].bos && t.eos == rows[i].eos && t.add_bos == (t.bos >= 0) && t.add_eos == (t.eos >= 0),
               "%s: %d %d", rows[i].single, (int)t.bos, (int)t.eos);
        moe_tokenizer_free(&t);
    }
}

/* Each published expression is recognised, and cuts as the value of tokenizer.ggml.pre does. */
static void test_expressions(void) {
    static const struct {
        const char *pre, *expressions[6];
    } rows[] = {
        {"qwen2",
         {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
          "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}},
        {"llama-bpe",
         {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
          "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}},
        {"deepseek-v3",
         {"\\p{N}{1,3}", "[\xE4\xB8\x80-\xE9\xBE\xA5\xE3\x81\x80-\xE3\x82\x9F\xE3\x82\xA0-\xE3\x83\xBF]+",
          "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| "
          "?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"}},
        {"deepseek-coder",
         {"[\r\n]", "\\s?\\p{L}+", "\\s?\\p{P}+",
          "[\xE4\xB8\x80-\xE9\xBE\xA5\xE0\xA0\x80-\xE4\xB8\x80\xEA\xB0\x80-\xED\x9F\xBF]+", "\\p{N}"}},
        {"gpt-2", {"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"}}};
    size_t i, k;
    CHECK(moei_pattern_find("") == MOEI_PASS_NONE && moei_pattern_find("[\\p{Han}]+|x") == MOEI_PASS_KIMI);
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        moe_tokenizer t;
        memset(&t, 0, sizeof t);
        CHECK(moei_vocab_cut(&t, rows[i].pre));
        for (k = 0; k < 6 && rows[i].expressions[k] != NULL; k++)
            CHECKF(moei_pattern_find(rows[i].expressions[k]) == t.passes[k], "%s %d", rows[i].pre, (int)k);
        CHECK(k == (size_t)t.n_passes);
    }
}

/* ---- memory, paths and what few files have ---- */

/* Every allocation fails once, while loading and while encoding. */
static void test_memory(void) {
    vocab v;
    int kind;
    for (kind = 0; kind < 5; kind++) {
        moe_buffer b;
        moe_import_source sources[2];
        moe_tokenizer t;
        test_heap heap;
        int32_t ids[64];
        size_t n;
        long k;
        moe_status status = MOE_ERR_MEMORY;
        memset(&b, 0, sizeof b);
        if (kind % 3 == 0) vocab_bytes(&v);
        else vocab_pieces(&v, kind == 1 ? VOCAB_SCORES : kind == 2 ? VOCAB_RANKS : VOCAB_UNIGRAM);
        if (kind < 2) vocab_gguf(&v, &b);
        else vocab_json(&v, kind == 3 ? byte_parts : kind == 2 ? piece_parts : meta_parts, 0, &b);
        sources[0] = moe_import_memory("a", b.data, b.size);
        sources[1] = moe_import_memory("tokenizer_config.json", "{\"chat_template\":\"abc\"}", 23);
        for (k = 1; status == MOE_ERR_MEMORY && k < 500; k++) {
            const moe_allocator a = test_allocator(&heap, k);
            heap.fail_on = 1;
            error.message[0] = '\0';
            status = moe_import_read_tokenizer(&t, sources, 2, &a, &error);
            CHECK(status == MOE_OK || (status == MOE_ERR_MEMORY && error.message[0] != '\0' && heap.blocks == 0));
        }
        if (!CHECKF(status == MOE_OK, "%d: %s", kind, error.message)) return;
        status = MOE_ERR_MEMORY;
        for (k = 1; status == MOE_ERR_MEMORY && k < 100; k++) {
            heap.calls = 0;
            heap.fail_at = k;
            status = moe_tokenizer_encode(&t, "hello abc aaaa <|im_end|>", 25, MOE_TOKENIZER_SPECIAL, ids, 64, &n);
        }
        CHECK_STATUS(status, MOE_OK);
        moe_tokenizer_free(&t);
        CHECK(heap.blocks == 0 && heap.bytes == 0 && !heap.wrong_size);
        moe_buffer_free(&b);
    }
}

/* A source of which one read fails. */
typedef struct brittle {
    const moe_buffer *bytes;
    long left; /* reads until then */
} brittle;

static moe_status read_brittle(void *ctx, uint64_t at, void *to, size_t size) {
    brittle *b = (brittle *)ctx;
    if (b->left-- == 0) return MOE_ERR_IO;
    memcpy(to, b->bytes->data + at, size);
    return MOE_OK;
}

static void test_reads(void) {
    vocab v;
    moe_tokenizer t;
    moe_buffer b;
    int kind;
    memset(&b, 0, sizeof b);
    for (kind = 0; kind < 3; kind++) {
        moe_status status = MOE_ERR_IO;
        long k;
        b.size = 0;
        if (kind != 1) vocab_bytes(&v);
        else vocab_pieces(&v, VOCAB_SCORES);
        if (kind < 2) vocab_gguf(&v, &b);
        else vocab_json(&v, byte_parts, 0, &b);
        for (k = 0; status == MOE_ERR_IO && k < 500; k++) {
            brittle at = {&b, k};
            moe_import_source source = moe_import_memory("a", b.data, b.size);
            source.ctx = &at;
            source.read_at = read_brittle;
            status = moe_import_read_tokenizer(&t, &source, 1, NULL, &error);
        }
        CHECK_STATUS(status, MOE_OK);
        CHECK(k > 1);
        moe_tokenizer_free(&t);
    }
    moe_buffer_free(&b);
}

/* Texts that only merges have, more of them than tokens; a merge whose result is no token. */
static void test_growing(void) {
    static char merges[400][12];
    vocab v;
    moe_tokenizer t;
    moe_buffer b;
    int i;
    memset(&b, 0, sizeof b);
    memset(&v, 0, sizeof v);
    v.kind = VOCAB_BYTES;
    v.pre = "llama-bpe";
    vocab_add(&v, "a", 0, 1);
    vocab_add(&v, "b", 0, 1);
    vocab_add(&v, "aba", 0, 1);
    vocab_add(&v, "a", 0, 1); /* of equal texts the last one counts */
    for (i = 0; i < 30; i++) {
        sprintf(merges[i], "x%d y%d", i, i);
        v.merges[v.n_merges++] = merges[i];
    }
    v.merges[v.n_merges++] = "a b";
    vocab_gguf(&v, &b);
    if (!CHECKF(load(&t, "a.gguf", &b) == MOE_OK, "%s", error.message)) return;
    CHECK(t.n_symbols > 60 && t.add_bos == 0); /* there is no bos */
    encodes(&t, "aab", 0, "a|a|b"); /* ab is no token: its bytes */
    encodes(&t, "aba", 0, "aba"); /* a whole word that is a token */
    encodes(&t, "aaaaaaaaaaaa", 0, "a|a|a|a|a|a|a|a|a|a|a|a"); /* longer than any token */
    encodes(&t, "azb", 0, "a|b"); /* z is unknown, and there is no token for that */
    CHECK(moe_tokenizer_find(&t, "a") == 3);
    moe_tokenizer_free(&t);
    moe_buffer_free(&b);
}

/* A GGUF file of these tokens with few keys: what llama.cpp takes for those that are missing. */
static void few_keys(moe_buffer *b, const char *model, int n, unsigned type, int keys) {
    int i;
    b->size = 0;
    vocab_put(b, "GGUF", 4);
    vocab_number(b, 2, 4);
    vocab_number(b, 0, 8);
    vocab_number(b, (unsigned)keys, 8);
    vocab_text_key(b, "tokenizer.ggml.model", model);
    vocab_array(b, "tokenizer.ggml.tokens", type, n);
    for (i = 0; i < n && type == 8; i++) vocab_string(b, i == 0 ? "a" : i == 1 ? "b" : " c");
    for (i = 0; i < n && type != 8; i++) vocab_number(b, 7, 4);
    vocab_array(b, "tokenizer.ggml.scores", 6, n);
    for (i = 0; i < n; i++) vocab_number(b, 0, 4);
    vocab_key(b, "tokenizer.ggml.add_space_prefix", 7);
    vocab_number(b, 0, 1);
    vocab_key(b, "tokenizer.ggml.add_eos_token", 7);
    vocab_number(b, 1, 1);
    vocab_text_key(b, "tokenizer.ggml.pre", "llama-bpe");
    vocab_array(b, "tokenizer.ggml.merges", 8, 0);
}

/* How long the third token is at the beginning of a text. */
static size_t begins_with(const moe_tokenizer *t) {
    moe_decoder d;
    char text[8];
    memset(&d, 0, sizeof d);
    d.tokenizer = t;
    return moe_tokenizer_decode(&d, 2, text, sizeof text);
}

/* A file that does not say whether texts begin with bos: those whose words may be tokens as a whole
   do, as those of Llama 3. */
static void test_default_bos(void) {
    static const char *const pres[] = {"gpt-2", "llama-bpe"};
    static const char key[] = "add_bos_token";
    int i;
    for (i = 0; i < 2; i++) {
        vocab v;
        moe_tokenizer t;
        moe_buffer b;
        size_t at = 0;
        memset(&b, 0, sizeof b);
        vocab_bytes(&v);
        v.pre = pres[i];
        vocab_gguf(&v, &b);
        while (memcmp(b.data + at, key, sizeof key - 1) != 0) at++;
        b.data[at] = 'x';
        if (CHECKF(load(&t, "a.gguf", &b) == MOE_OK, "%s", error.message)) CHECK(t.bos >= 0 && t.add_bos == i);
        moe_tokenizer_free(&t);
        moe_buffer_free(&b);
    }
}

static void test_few_keys(void) {
    moe_tokenizer t;
    moe_buffer b;
    int n;
    memset(&b, 0, sizeof b);
    for (n = 1; n < 4; n++) {
        few_keys(&b, "llama", n, 8, 3);
        if (!CHECKF(load(&t, "a.gguf", &b) == MOE_OK, "%s", error.message)) continue;
        CHECK(t.unknown == 0 && t.bos == (n > 1 ? 1 : -1) && t.eos == (n > 2 ? 2 : -1) && t.add_bos == (n > 1));
        CHECKF(t.padding == -1 && t.eot == t.eos && !t.add_eos && t.architecture[0] == '\0' && t.chat_template == NULL,
               "%d %d %d %s", (int)t.padding, (int)t.eot, t.add_eos, t.architecture);
        CHECK(n < 3 || begins_with(&t) == 1); /* without the space that encoding puts there */
        moe_tokenizer_free(&t);
        few_keys(&b, "llama", n, 8, 5);
        if (!CHECKF(load(&t, "a.gguf", &b) == MOE_OK, "%s", error.message)) continue;
        CHECK(t.add_eos == (n > 2));
        encodes(&t, "a", 0, "a"); /* no space before it, of which there is no token */
        CHECK(n < 3 || begins_with(&t) == 2);
        moe_tokenizer_free(&t);
    }
    few_keys(&b, "gpt2", 2, 8, 6);
    refuse(MOE_ERR_FORMAT, "a.gguf", b.data, b.size, "tokenizer.ggml.merges is missing");
    few_keys(&b, "gpt2", 2, 8, 7);
    if (CHECKF(load(&t, "a.gguf", &b) == MOE_OK, "%s", error.message)) {
        CHECK(t.bos == -1 && t.eos == -1 && t.unknown == -1 && !t.add_bos && !t.add_eos);
        moe_tokenizer_free(&t);
    }
    few_keys(&b, "no_vocab", 2, 8, 6);
    refuse(MOE_ERR_NOT_FOUND, "a.gguf", b.data, b.size, "has no vocabulary");
    few_keys(&b, "none", 2, 8, 6);
    refuse(MOE_ERR_NOT_FOUND, "a.gguf", b.data, b.size, "has no vocabulary");
    few_keys(&b, "llama", 2, 5, 6);
    refuse(MOE_ERR_FORMAT, "a.gguf", b.data, b.size, "tokens has elements of type 5, must be 8");
    few_keys(&b, "llama", 0, 8, 6);
    refuse(MOE_ERR_NOT_FOUND, "a.gguf", b.data, b.size, "has no vocabulary");
    moe_buffer_free(&b);
}

/* A source that gives other bytes from one read on. */
static moe_status read_changing(void *ctx, uint64_t at, void *to, size_t size) {
    brittle *b = (brittle *)ctx;
    if (b->left-- > 0) memcpy(to, b->bytes->data + at, size);
    else memset(to, 0xfe, size);
    return MOE_OK;
}

/* A file that another program writes meanwhile: what was checked before is checked again. */
static void test_changing(void) {
    vocab v;
    moe_buffer b;
    long k;
    int beyond, long_list, refused;
    moe_tokenizer t, untouched;
    moe_status status = MOE_ERR_FORMAT;
    memset(&b, 0, sizeof b);
    vocab_bytes(&v);
    vocab_gguf(&v, &b);
    beyond = long_list = refused = 0;
    memset(&untouched, 0x5a, sizeof untouched);
    for (k = 0; k < 4000; k++) {
        brittle at = {&b, k};
        moe_import_source source = moe_import_memory("a.gguf", b.data, b.size);
        source.ctx = &at;
        source.read_at = read_changing;
        error.message[0] = '\0';
        memcpy(&t, &untouched, sizeof t);
        status = moe_import_read_tokenizer(&t, &source, 1, NULL, &error);
        if (status == MOE_OK) moe_tokenizer_free(&t);
        else if (!CHECKF(error.message[0] != '\0' && memcmp(&t, &untouched, sizeof t) == 0, "%ld", k)) break;
        if (status == MOE_OK && at.left >= 0) break; /* no read was another one */
        refused += status != MOE_OK;
        beyond += strstr(error.message, "beyond the end") != NULL;
        long_list += strstr(error.message, "elements") != NULL;
    }
    CHECKF(status == MOE_OK && beyond > 0 && long_list > 0 && refused > 5, "%ld reads, %d %d", k, beyond, long_list);
    moe_buffer_free(&b);
}

/* A source with another byte at one place, from one read of it on. */
typedef struct edit {
    const moe_buffer *bytes;
    uint64_t at;
    int left;
} edit;

static moe_status read_edited(void *ctx, uint64_t at, void *to, size_t size) {
    edit *e = (edit *)ctx;
    memcpy(to, e->bytes->data + at, size);
    if (e->at >= at && e->at - at < size && e->left-- <= 0) ((unsigned char *)to)[e->at - at] ^= 1;
    return MOE_OK;
}

/* A string of a list grows beyond the end: before the file is looked through, or only before its
   strings are read. */
static void test_longer_string(void) {
    vocab v;
    moe_buffer b;
    int reads;
    moe_tokenizer t;
    moe_status status = MOE_ERR_FORMAT;
    uint64_t at = 0;
    memset(&b, 0, sizeof b);
    vocab_bytes(&v);
    vocab_gguf(&v, &b);
    while (at + 13 < b.size && memcmp(b.data + at, "\5\0\0\0\0\0\0\0he ll", 13) != 0) at++;
    for (reads = 0; status != MOE_OK && reads < 9; reads++) {
        edit e = {&b, at + 5, reads}; /* 2^40 bytes more */
        moe_import_source source = moe_import_memory("a.gguf", b.data, b.size);
        source.ctx = &e;
        source.read_at = read_edited;
        error.message[0] = '\0';
        status = moe_import_read_tokenizer(&t, &source, 1, NULL, &error);
        if (status == MOE_OK) moe_tokenizer_free(&t);
        else
            CHECKF(status == MOE_ERR_FORMAT && strstr(error.message, "string goes beyond the end") != NULL,
                   "read %d: %s", reads, error.message);
    }
    CHECKF(status == MOE_OK && reads > 2, "%d reads", reads);
    moe_buffer_free(&b);
}

/* ---- texts and pairs that collide ---- */

/* The slots that a search visits before it gives up. */
typedef struct chain {
    size_t slots[MOEI_VOCAB_PROBES];
    int n, left;
} chain;

static void chain_begin(chain *c, moei_probe p) {
    c->n = c->left = (int)MOEI_VOCAB_PROBES;
    for (p.left = 0; p.left < c->n; p.left++, p.at = (p.at + p.step) & p.mask) c->slots[p.left] = p.at;
}

/* Takes the slot that another search begins with; 0: it is not in the chain, or taken. */
static int chain_takes(chain *c, moei_probe p) {
    int i;
    for (i = 0; i < c->left && c->slots[i] != p.at;) i++;
    if (i == c->left) return 0;
    c->slots[i] = c->slots[--c->left];
    return 1;
}

/* A tokenizer with empty tables of so many slots, to ask where a search begins. */
static void empty_tables(moe_tokenizer *t, uint32_t *slots, size_t n) {
    memset(t, 0, sizeof *t);
    memset(slots, 0, n * sizeof *slots);
    t->lookup.data = t->pairs.data = (unsigned char *)slots;
    t->lookup.size = t->pairs.size = n * sizeof *slots;
}

/* A vocabulary of texts that take all slots of "x" in a table of so many. */
static void crowded_texts(moe_buffer *b, size_t slots) {
    static uint32_t room[2048];
    moe_tokenizer t;
    chain c;
    long i;
    char text[32];
    b->size = 0;
    empty_tables(&t, room, slots);
    chain_begin(&c, moei_symbol_probe(&t, (const unsigned char *)"x", 1));
    put_text(b, "{\"model\":{\"unk_token\":\"f\",\"vocab\":{");
    for (i = 0; c.left > 0 && i < 1000000; i++) {
        const int n = sprintf(text, "%ldf", i);
        if (!chain_takes(&c, moei_symbol_probe(&t, (const unsigned char *)text, (size_t)n))) continue;
        sprintf(text, "%s\"%ldf\":%d", c.left + 1 < c.n ? "," : "", i, c.n - c.left - 1);
        put_text(b, text);
    }
    CHECK(c.left == 0);
}

static void test_crowded_texts(void) {
    moe_tokenizer t;
    moe_buffer b;
    int32_t ids[4];
    size_t n;
    memset(&b, 0, sizeof b);
    crowded_texts(&b, 2048);
    put_text(&b, ",\"x\":256}}}");
    refuse(MOE_ERR_UNSUPPORTED, "tokenizer.json", b.data, b.size, "texts of the vocabulary collide");
    crowded_texts(&b, 1024);
    put_text(&b, "},\"merges\":[\"x 1\"]}}");
    refuse(MOE_ERR_UNSUPPORTED, "tokenizer.json", b.data, b.size, "texts of the vocabulary collide");
    crowded_texts(&b, 1024);
    put_text(&b, "},\"merges\":[\"1 x\"]}}");
    refuse(MOE_ERR_UNSUPPORTED, "tokenizer.json", b.data, b.size, "texts of the vocabulary collide");
    crowded_texts(&b, 1024);
    put_text(&b, "},\"merges\":[]}}");
    if (CHECKF(load(&t, "tokenizer.json", &b) == MOE_OK, "%s", error.message)) {
        CHECK(t.n_tokens == 256 && moe_tokenizer_find(&t, "x") == -1);
        CHECK_STATUS(moe_tokenizer_encode(&t, "x", 1, 0, ids, 4, &n), MOE_OK);
        CHECK(n == 0 && t.unknown == -1);
        moe_tokenizer_free(&t);
    }
    moe_buffer_free(&b);
}

/* Tokens of one character each, and merges that take all slots of the pair 7, 9 in a table of so
   many; others[0..1]: one of these pairs. */
static void crowded_pairs(moe_buffer *b, size_t slots, uint32_t others[2]) {
    static uint32_t room[1024];
    moe_tokenizer t;
    chain c;
    uint32_t i;
    char text[32];
    b->size = 0;
    empty_tables(&t, room, slots);
    put_text(b, "{\"model\":{\"vocab\":{");
    for (i = 0; i < 300; i++) {
        sprintf(text, "%s\"%c%c\":%u", i > 0 ? "," : "", (int)(0xC4 + i / 64), (int)(0x80 + i % 64), (unsigned)i);
        put_text(b, text);
    }
    put_text(b, "},\"merges\":[");
    chain_begin(&c, moei_pair_probe(&t, 7, 9));
    for (i = 10; c.left > 0 && i < 300 * 300; i++) {
        const uint32_t left = i / 300, right = i % 300;
        if ((left == 7 && right == 9) || !chain_takes(&c, moei_pair_probe(&t, left, right))) continue;
        sprintf(text, "%s\"%c%c %c%c\"", c.left + 1 < c.n ? "," : "", (int)(0xC4 + left / 64), (int)(0x80 + left % 64),
                (int)(0xC4 + right / 64), (int)(0x80 + right % 64));
        put_text(b, text);
        others[0] = left;
        others[1] = right;
    }
    CHECK(c.left == 0);
}

static void test_crowded_pairs(void) {
    moe_tokenizer t;
    moe_buffer b;
    uint32_t others[2];
    int32_t ids[4];
    char text[8];
    size_t n;
    memset(&b, 0, sizeof b);
    crowded_pairs(&b, 1024, others);
    put_text(&b, ",\"\xC4\x87 \xC4\x89\"]}}");
    refuse(MOE_ERR_UNSUPPORTED, "tokenizer.json", b.data, b.size, "texts of the vocabulary collide");
    crowded_pairs(&b, 512, others);
    put_text(&b, "]}}");
    if (CHECKF(load(&t, "tokenizer.json", &b) == MOE_OK, "%s", error.message)) {
        CHECK_STATUS(moe_tokenizer_encode(&t, "\xC4\x87\xC4\x89", 4, 0, ids, 4, &n), MOE_OK);
        CHECK(n == 2 && ids[0] == 7 && ids[1] == 9); /* no merge */
        sprintf(text, "%c%c%c%c", (int)(0xC4 + others[0] / 64), (int)(0x80 + others[0] % 64),
                (int)(0xC4 + others[1] / 64), (int)(0x80 + others[1] % 64));
        CHECK_STATUS(moe_tokenizer_encode(&t, text, 4, 0, ids, 4, &n), MOE_OK);
        CHECK(n == 0); /* merged to a text that is no token */
        moe_tokenizer_free(&t);
    }
    moe_buffer_free(&b);
}

static void test_places(void) {
    static char path[5000];
    vocab v;
    moe_tokenizer t;
    moe_buffer b;
    FILE *f;
    memset(&b, 0, sizeof b);
    vocab_pieces(&v, VOCAB_SCORES);
    vocab_gguf(&v, &b);
    CHECK((f = fopen("tokens-test.gguf", "wb")) != NULL);
    if (f == NULL) return;
    CHECK(fwrite(b.data, 1, b.size, f) == b.size && fclose(f) == 0);
    CHECK_STATUS(moe_import_tokenizer(&t, "tokens-test.gguf", NULL, &error), MOE_OK);
    moe_tokenizer_free(&t);
    remove("tokens-test.gguf");
    CHECK_STATUS(moe_import_tokenizer(&t, "tokens-test.gguf", NULL, &error), MOE_ERR_IO);
    b.size = 0;
    vocab_pieces(&v, VOCAB_RANKS);
    vocab_json(&v, piece_parts, 0, &b);
    CHECK((f = fopen("tokenizer.json", "wb")) != NULL);
    if (f == NULL) return;
    CHECK(fwrite(b.data, 1, b.size, f) == b.size && fclose(f) == 0);
    CHECK_STATUS(moe_import_tokenizer(&t, "tokenizer.json", NULL, &error), MOE_OK);
    moe_tokenizer_free(&t);
    CHECK_STATUS(moe_import_tokenizer(&t, ".", NULL, &error), MOE_OK);
    moe_tokenizer_free(&t);
    CHECK_STATUS(moe_import_tokenizer(&t, "./", NULL, &error), MOE_OK);
    moe_tokenizer_free(&t);
    remove("tokenizer.json");
    memset(path, 'a', sizeof path - 1);
    CHECK_STATUS(moe_import_tokenizer(&t, path, NULL, &error), MOE_ERR_ARGUMENT);
    strcpy(path + 300, ".gguf");
    CHECK_STATUS(moe_import_tokenizer(&t, path, NULL, &error), MOE_ERR_ARGUMENT);
    CHECK_STATUS(moe_import_tokenizer(&t, NULL, NULL, &error), MOE_ERR_ARGUMENT);
    CHECK_STATUS(moe_import_tokenizer(NULL, path, NULL, &error), MOE_ERR_ARGUMENT);
    moe_buffer_free(&b);
}

/* Files of tokenizer.json that are whole, but unusual: what it says, what is asked, what comes. */
static void test_unusual(void) {
    static const struct {
        const char *json, *text, *wanted;
    } rows[] = {
        {"{\"normalizer\":{\"type\":\"NFC\"},\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":["
         "{\"type\":\"Split\",\"behavior\":\"Removed\",\"invert\":true,\"pattern\":{\"Regex\":\"\\\\p{N}\"}},{\"type\":"
         "\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}]},"
         "\"model\":{\"vocab\":{\"1\":0,\"a\":1,\"11\":2},\"merges\":[\"1 1\"]}}", "11a", "1|1|a"},
        {"{\"pre_tokenizer\":{\"type\":\"Digits\"},\"model\":{\"type\":\"BPE\",\"vocab\":{\"1\":0,\"a\":1,\"11\":2,"
         "\"a1\":5},\"merges\":[[\"a\",\"1\"],[\"1\",\"1\"]]}}", "a11", "a|11"},
        {"{\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"\342\226\201\"},"
         "\"model\":{\"vocab\":{\"a\":0,\"\342\226\201\":1},\"merges\":[]},\"post_processor\":{\"type\":\"Sequence\","
         "\"processors\":[]}}", "a a", "a|\342\226\201|a"},
        {"{\"pre_tokenizer\":{\"type\":\"Sequence\"},\"model\":{\"type\":\"Unigram\",\"unk_id\":0,\"vocab\":[[\"?\",0],"
         "[\"ab\",-2],[\"a\",-1.5],[\"b\",-1.5]]}}", "abzzb", "ab|?|b"},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]}}", "aza", "a|a"},
        {"{\"pre_tokenizer\":{\"type\":\"Digits\",\"individual_digits\":true},\"model\":{\"continuing_subword_prefix\":"
         "\"\",\"end_of_word_suffix\":\"\",\"vocab\":{\"1\":0,\"11\":1},\"merges\":[\"1 1\"]}}", "11", "1|1"},
        {"{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false},\"model\":{"
         "\"unk_token\":\"?\",\"vocab\":{\"a\":0,\"?\":1},\"merges\":[\"a z\"]}}", "az", "a|?"},
        {"{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false},\"model\":{"
         "\"vocab\":{\"a\":0,\"?\":1},\"merges\":[\"a z\"]}}", "az", "a"},
        {"{\"model\":{\"type\":\"Unigram\",\"unk_id\":2,\"vocab\":[[\"a\",-1],[\"b\",-2]]}}", "azb", "a|b"},
        {"{\"model\":{\"type\":\"Unigram\",\"unk_id\":\"0\",\"vocab\":[[\"a\",-1],[\"b\",-2]]}}", "azb", "a|b"},
        {"{\"model\":{\"type\":\"Unigram\",\"unk_id\":1,\"vocab\":[[\"a\",-1],[\"b\",-2]]}}", "az", "a|b"},
        {"{\"model\":{\"type\":\"Unigram\",\"unk_id\":0,\"vocab\":[[\"?\",0],[\"a\",3],[\"az\",-5]]}}", "az", "az"}};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        const moe_import_source source = moe_import_memory("tokenizer.json", rows[i].json, strlen(rows[i].json));
        moe_tokenizer t;
        if (!CHECKF(moe_import_read_tokenizer(&t, &source, 1, NULL, &error) == MOE_OK, "%s", error.message)) continue;
        CHECK(t.wants_nfc == (i == 0));
        encodes(&t, rows[i].text, 0, rows[i].wanted);
        moe_tokenizer_free(&t);
    }
}

/* Ends that only their text tells. */
static void test_ends(void) {
    vocab v;
    moe_tokenizer t;
    moe_buffer b;
    memset(&b, 0, sizeof b);
    vocab_bytes(&v);
    vocab_add(&v, "<|endoftext|>", 0, 3);
    vocab_add(&v, "<|eom_id|>", 0, 1); /* not a control token */
    vocab_gguf(&v, &b);
    if (!CHECKF(load(&t, "a.gguf", &b) == MOE_OK, "%s", error.message)) return;
    CHECK(moe_tokenizer_is_end(&t, moe_tokenizer_find(&t, "<|endoftext|>")));
    CHECK(!moe_tokenizer_is_end(&t, moe_tokenizer_find(&t, "<|eom_id|>")));
    CHECK(!moe_tokenizer_is_end(&t, moe_tokenizer_find(&t, "~~")));
    moe_tokenizer_free(&t);
    moe_buffer_free(&b);
}

/* The end of a turn is a special token, and another one than the end of a text where there are two;
   added tokens are found, though they are longer than all others. */
static void test_end_of_turn(void) {
    static const char model[] = ",\"model\":{\"vocab\":{\"a\":0,\"<EOT>\":1},\"merges\":[]}}";
    static const struct {
        const char *added, *eos;
        int end, turn;
    } rows[] = {{"", "a", 0, 0},
                {"{\"id\":2,\"content\":\"<|im_end|>\",\"special\":true}", "<|im_end|>", 2, 2},
                {"{\"id\":2,\"content\":\"<|im_end|>\",\"special\":true},{\"id\":3,\"content\":\"<|eot_id|>\","
                 "\"special\":true}", "<|im_end|>", 2, 3}};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        moe_tokenizer t;
        moe_import_source sources[2];
        char text[300], settings[60];
        sprintf(text, "{\"added_tokens\":[%s]%s", rows[i].added, model);
        sprintf(settings, "{\"eos_token\":\"%s\"}", rows[i].eos);
        sources[0] = moe_import_memory("tokenizer.json", text, strlen(text));
        sources[1] = moe_import_memory("tokenizer_config.json", settings, strlen(settings));
        if (!CHECKF(moe_import_read_tokenizer(&t, sources, 2, NULL, &error) == MOE_OK, "%s", error.message)) continue;
        CHECKF(t.eos == rows[i].end && t.eot == rows[i].turn, "%d %d", (int)t.eos, (int)t.eot);
        moe_tokenizer_free(&t);
    }
}

/* ---- chat ---- */

#define DEEP(word) "<\357\275\234" word "\357\275\234>"
static void test_chat(void) {
    static const char *const rows[][3] = { /* template, architecture, a conversation */
        {"{{'<|im_start|>' + role}}", "",
         "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
         "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n"},
        {"[INST] ", "", "[INST] S\n\nU [/INST]A</s>[INST] V [/INST]"},
        {NULL, "olmoe", "<|system|>\nS\n<|user|>\nU\n<|assistant|>\nA<|endoftext|>\n<|user|>\nV\n<|assistant|>\n"},
        {"[gMASK]<sop> <|user|>", "",
         "[gMASK]<sop><|system|>\nS<|user|>\nU<|assistant|>\nA<|user|>\nV<|assistant|>\n"},
        {"<|user|><|assistant|><|end|>", "olmoe",
         "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\nA<|end|>\n<|user|>\nV<|end|>\n<|assistant|>\n"},
        {NULL, "deepseek_v3",
         "S" DEEP("User") "U" DEEP("Assistant") "A" MOEI_SENTENCE_END DEEP("User") "V" DEEP("Assistant")},
        {NULL, "bailingmoe2",
         "<role>SYSTEM</role>S<|role_end|><role>HUMAN</role>U<|role_end|><role>ASSISTANT</role>A<|role_end|><role>HUMAN"
         "</role>V<|role_end|><role>ASSISTANT</role>"}};
    static const int roles[] = {MOE_CHAT_SYSTEM, MOE_CHAT_USER, MOE_CHAT_ASSISTANT, MOE_CHAT_USER, MOE_CHAT_ASSISTANT};
    static const char *const texts[] = {"S", "U", "A", "V", NULL};
    moe_tokenizer t;
    moe_buffer b;
    size_t i, k;
    memset(&t, 0, sizeof t);
    memset(&b, 0, sizeof b);
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        const moe_chat *c;
        t.chat_template = rows[i][0];
        strcpy(t.architecture, rows[i][1]);
        c = moe_chat_find(&t);
        if (!CHECKF(c != NULL, "%d", (int)i)) continue;
        for (k = 0; k < 5; k++)
            CHECK_STATUS(moe_chat_put(c, roles[k], k > 0 ? roles[k - 1] : -1, texts[k], &b), MOE_OK);
        CHECKF(b.size == strlen(rows[i][2]) && memcmp(b.data, rows[i][2], b.size) == 0, "%s: \"%.*s\"", c->name,
               (int)b.size, (const char *)b.data);
        b.size = 0;
        CHECK_STATUS(moe_chat_put(c, MOE_CHAT_USER, -1, NULL, &b), MOE_ERR_ARGUMENT);
        CHECK_STATUS(moe_chat_put(c, MOE_CHAT_ROLES, -1, "x", &b), MOE_ERR_ARGUMENT);
        CHECK_STATUS(moe_chat_put(c, -1, -1, "x", &b), MOE_ERR_ARGUMENT);
        CHECK_STATUS(moe_chat_put(c, MOE_CHAT_USER, -1, "x", NULL), MOE_ERR_ARGUMENT);
        b.size = 3; /* a message that does not fit leaves what was there */
        b.most = 3 + strlen(c->begin) + strlen(c->before[MOE_CHAT_USER]) + 1;
        CHECK_STATUS(moe_chat_put(c, MOE_CHAT_USER, -1, "xy", &b), MOE_ERR_SPACE);
        CHECKF(b.size == 3, "%s: %d bytes", c->name, (int)b.size);
        b.size = b.most = 0;
    }
    t.chat_template = "{{ unknown }}";
    CHECK(moe_chat_find(&t) == NULL && moe_chat_find(NULL) == NULL);
    CHECK_STATUS(moe_chat_put(NULL, MOE_CHAT_USER, -1, "x", &b), MOE_ERR_ARGUMENT);
    t.chat_template = NULL;
    t.architecture[0] = '\0';
    CHECK(moe_chat_find(&t) == NULL);
    for (i = 0; i < MOEI_CHATS; i++) { /* each is found by its own marks, and by its architectures */
        char marks[100];
        const moe_chat *c = moei_chats + i;
        sprintf(marks, "x%s y%s", c->marks[0], c->marks[1] != NULL ? c->marks[1] : "");
        t.chat_template = marks;
        CHECKF(moe_chat_find(&t) == c, "%s", c->name);
        t.chat_template = NULL;
        sprintf(t.architecture, "%.*s", (int)strcspn(c->architectures, " "), c->architectures);
        CHECKF(moe_chat_find(&t) == c, "%s", c->name);
    }
    moe_buffer_free(&b);
}

/* The classes of all code points: their number of runs, and a hash of where each begins and what it
   is, which Python's unicodedata 14 gives as well (tests/quality/unicode.py has its classes). Then
   the code points of each set that an expression lists. */
static void test_classes(void) {
    static const uint32_t sets[][3] = {
        {MOEI_RUNES_HAN, 94215, 0xc681f607},
        {MOEI_RUNES_KANA, 21094, 0x06533cfe},
        {MOEI_RUNES_EAST, 50086, 0xa9570c3e},
        {MOEI_RUNES_CASED, 2729, 0xbc3e19f9},
        {MOEI_RUNES_MARKS, 179, 0x061bee70},
        {MOEI_RUNES_LINE, 2, 0x808f4b70},
        {MOEI_RUNES_FALCON, 9, 0x092e27eb},
        {MOEI_RUNES_DEFAULT, 8, 0xcddeaf71},
        {MOEI_RUNES_DIGIT, 10, 0xf9808ff2}};
    uint32_t hash = 2166136261u, code;
    uint32_t last = 0, runs = 0;
    size_t i;
    for (code = 0; code < 0x110000; code++) {
        const uint32_t kind = moei_rune_kind(code);
        if (kind == last) continue;
        hash = ((hash ^ code) * 16777619u ^ kind) * 16777619u;
        last = kind;
        runs++;
    }
    CHECKF(runs == 3419 && hash == 0x80f6f733u, "%lu runs, %#lx", (unsigned long)runs, (unsigned long)hash);
    for (i = 0; i < sizeof sets / sizeof *sets; i++) {
        uint32_t members = 0;
        for (code = 0, hash = 2166136261u; code < 0x32000; code++)
            if (moei_rune_is_in(code, (int)sets[i][0])) {
                hash = (hash ^ code) * 16777619u;
                members++;
            }
        CHECKF(members == sets[i][1] && hash == sets[i][2], "set %lu: %lu members, %#lx", (unsigned long)i,
               (unsigned long)members, (unsigned long)hash);
    }
}

int main(void) {
    CASE(test_chat());
    CASE(test_classes());
    CASE(test_memory());
    CASE(test_reads());
    CASE(test_growing());
    CASE(test_places());
    CASE(test_unusual());
    CASE(test_ends());
    CASE(test_end_of_turn());
    CASE(test_merges());
    CASE(test_unigram());
    CASE(test_unigram_unknown());
    CASE(test_byte_fallback());
    CASE(test_cuts());
    CASE(test_special());
    CASE(test_special_pieces());
    CASE(test_stripping());
    CASE(test_fused());
    CASE(test_decoding());
    CASE(test_decoder());
    CASE(test_decoder_pieces());
    CASE(test_long());
    CASE(test_mutants());
    CASE(test_refused_json());
    CASE(test_refused_gguf());
    CASE(test_beside());
    CASE(test_beside_odd());
    CASE(test_template());
    CASE(test_default_bos());
    CASE(test_few_keys());
    CASE(test_changing());
    CASE(test_longer_string());
    CASE(test_crowded_texts());
    CASE(test_crowded_pairs());
    CASE(test_expressions());
    return test_end();
}
