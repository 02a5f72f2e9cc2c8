/* vocab.h - small vocabularies for tests: as GGUF and as tokenizer.json, in memory. Included after
   moe_import.h, in a program that has its implementation inside or linked. */
#ifndef VOCAB_H
#define VOCAB_H

#include <stdio.h>
#include <string.h>

enum { VOCAB_BYTES, VOCAB_SCORES, VOCAB_RANKS, VOCAB_UNIGRAM };

/* A token beyond those that every vocabulary has. */
typedef struct vocab_token {
    const char *text;
    float score;
    int kind; /* as GGUF numbers it */
} vocab_token;

typedef struct vocab {
    int kind;
    const char *pre;
    vocab_token tokens[400];
    int n_tokens;
    const char *merges[32]; /* "a b" */
    int n_merges;
    int fewer; /* types of the GGUF file than tokens */
    char room[400][8];
} vocab;

static inline void vocab_add(vocab *v, const char *text, float score, int kind) {
    v->tokens[v->n_tokens].text = text;
    v->tokens[v->n_tokens].score = score;
    v->tokens[v->n_tokens++].kind = kind;
}

/* The character that stands for a byte. */
static inline const char *vocab_stand_in(vocab *v, int byte) {
    int code = byte, b;
    char *to = v->room[byte];
    const int plain = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);
    for (b = 0; !plain && b < byte; b++) code += (b <= 0x20 || (b >= 0x7f && b <= 0xa0) || b == 0xad);
    if (!plain) code = 0x100 + code - byte;
    if (code < 0x80) sprintf(to, "%c", code);
    else sprintf(to, "%c%c", 0xc0 | code >> 6, 0x80 | (code & 63));
    return to;
}

/* Bytes, then these merges, then control tokens; the space is written U+0120. */
static inline void vocab_bytes(vocab *v) {
    static const char *const merges[] = {"h e",           "l l",      "he ll",        "hell o", "\xC4\xA0 w",
                                         "o r",           "\xC4\xA0w or", "\xC4\xA0wor l", "\xC3 \xA4", "a a",
                                         "aa aa",         "aaaa aaaa", "1 2",          "12 3",   "\xC4\xA0 \xC4\xA0",
                                         "\xC3\x83 \xC2\xA4"};
    static const char *const texts[] = {"he",   "ll",       "hell",         "hello",         "\xC4\xA0w",
                                        "or",   "\xC4\xA0wor", "\xC4\xA0worl", "\xC3\x83\xC2\xA4", "aa",
                                        "aaaa", "aaaaaaaa", "12",           "123",           "\xC4\xA0\xC4\xA0"};
    size_t i;
    int byte;
    memset(v, 0, sizeof *v);
    v->kind = VOCAB_BYTES;
    v->pre = "gpt-2";
    for (byte = 0; byte < 256; byte++) vocab_add(v, vocab_stand_in(v, byte), 0, 1);
    for (i = 0; i < sizeof texts / sizeof *texts; i++) vocab_add(v, texts[i], 0, 1);
    for (i = 0; i < sizeof merges / sizeof *merges; i++)
        if (i != 8) v->merges[v->n_merges++] = merges[i];
    vocab_add(v, "<|bos|>", 0, 3);
    vocab_add(v, "<|im_end|>", 0, 3);
    vocab_add(v, "<|im_end|>x", 0, 3);
    vocab_add(v, "~~", 0, 4);
}

/* SentencePiece: <unk>, <s>, </s>, bytes, characters and what they merge to. */
static inline void vocab_pieces(vocab *v, int kind) {
    static const vocab_token tokens[] = {{"\342\226\201", -40, 1},     {"a", -41, 1},   {"b", -42, 1},
                                         {"c", -43, 1},                {"ab", -3, 1},   {"bc", -2, 1},
                                         {"abc", -9, 1},               {"aa", -5, 1},   {"\342\226\201a", -6, 1},
                                         {"\342\226\201ab", -7.5f, 1}, {"aaaa", -8, 1}, {"\xC3\xA4", -44, 1},
                                         {"[INST]", 0, 4}};
    static const char *const merges[] = {"b c", "a b", "a a", "\342\226\201 a", "\342\226\201 ab", "aa aa", "a bc"};
    size_t i;
    int byte;
    memset(v, 0, sizeof *v);
    v->kind = kind;
    vocab_add(v, "<unk>", 0, 2);
    vocab_add(v, "<s>", 0, 3);
    vocab_add(v, "</s>", 0, 3);
    for (byte = 0; byte < 256; byte++) {
        sprintf(v->room[byte], "<0x%02X>", (unsigned)byte);
        vocab_add(v, v->room[byte], 0, 6);
    }
    for (i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        v->tokens[v->n_tokens++] = tokens[i];
    }
    for (i = 0; kind == VOCAB_RANKS && i < sizeof merges / sizeof *merges; i++) v->merges[v->n_merges++] = merges[i];
}

static inline void vocab_put(moe_buffer *b, const void *from, size_t size) {
    moe_stream s = moe_buffer_stream(b);
    (void)s.write(s.ctx, from, size);
}

static inline void vocab_number(moe_buffer *b, unsigned long long value, int bytes) {
    unsigned char p[8];
    int i;
    for (i = 0; i < bytes; i++) p[i] = (unsigned char)(value >> 8 * i & 0xff);
    vocab_put(b, p, (size_t)bytes);
}

static inline void vocab_string(moe_buffer *b, const char *text) {
    vocab_number(b, strlen(text), 8);
    vocab_put(b, text, strlen(text));
}

static inline void vocab_key(moe_buffer *b, const char *key, unsigned type) {
    vocab_string(b, key);
    vocab_number(b, type, 4);
}

static inline void vocab_text_key(moe_buffer *b, const char *key, const char *text) {
    vocab_key(b, key, 8);
    vocab_string(b, text);
}

static inline void vocab_array(moe_buffer *b, const char *key, unsigned type, int n) {
    vocab_key(b, key, 9);
    vocab_number(b, type, 4);
    vocab_number(b, (unsigned long long)n, 8);
}

static inline void vocab_id(moe_buffer *b, const char *key, int id) {
    vocab_key(b, key, 4);
    vocab_number(b, (unsigned long long)id, 4);
}

static inline int vocab_find(const vocab *v, const char *text) {
    int i;
    for (i = 0; i < v->n_tokens && strcmp(v->tokens[i].text, text) != 0;) i++;
    return i < v->n_tokens ? i : -1;
}

/* A GGUF file without tensors. */
static inline void vocab_gguf(const vocab *v, moe_buffer *b) {
    const int bytes = v->kind == VOCAB_BYTES;
    int i;
    vocab_put(b, "GGUF", 4);
    vocab_number(b, 3, 4);
    vocab_number(b, 0, 8);
    vocab_number(b, 11, 8);
    vocab_text_key(b, "general.architecture", bytes ? "qwen3moe" : "llama");
    vocab_text_key(b, "tokenizer.ggml.model", bytes ? "gpt2" : "llama");
    vocab_text_key(b, "tokenizer.ggml.pre", bytes ? v->pre : "default");
    vocab_array(b, "tokenizer.ggml.tokens", 8, v->n_tokens);
    for (i = 0; i < v->n_tokens; i++) vocab_string(b, v->tokens[i].text);
    vocab_array(b, "tokenizer.ggml.token_type", 5, v->n_tokens - v->fewer);
    for (i = 0; i < v->n_tokens - v->fewer; i++) vocab_number(b, (unsigned)v->tokens[i].kind, 4);
    if (bytes) {
        vocab_array(b, "tokenizer.ggml.merges", 8, v->n_merges);
        for (i = 0; i < v->n_merges; i++) vocab_string(b, v->merges[i]);
    } else {
        vocab_array(b, "tokenizer.ggml.scores", 6, v->n_tokens);
        for (i = 0; i < v->n_tokens; i++) {
            unsigned bits;
            memcpy(&bits, &v->tokens[i].score, sizeof bits);
            vocab_number(b, bits, 4);
        }
    }
    vocab_id(b, "tokenizer.ggml.bos_token_id", bytes ? vocab_find(v, "<|bos|>") : 1);
    vocab_id(b, "tokenizer.ggml.eos_token_id", bytes ? vocab_find(v, "<|bos|>") : 2);
    vocab_key(b, "tokenizer.ggml.add_bos_token", 7);
    vocab_number(b, 1, 1);
    vocab_text_key(b, "tokenizer.chat_template", "{{ '<|im_start|>' }}");
    vocab_id(b, "tokenizer.ggml.padding_token_id", 0);
}

#endif
