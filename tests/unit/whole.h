/* A whole model of other programs as a GGUF file made in memory: one block of the architecture
   llama with a mixture of experts, all tensors F32 but those of the experts. Include it after
   vocab.h. */

#ifndef TESTS_WHOLE_H
#define TESTS_WHOLE_H

enum { WHOLE_D = 32, WHOLE_TOKENS = 12, WHOLE_EXPERTS = 3, WHOLE_FF = 32 };

/* One tensor: its name, sizes with the innermost first (0: none), and type (0 F32, 8 Q8_0). */
typedef struct whole_tensor {
    const char *name;
    int sizes[3], type;
} whole_tensor;

static inline unsigned long long whole_bytes(const whole_tensor *t) {
    unsigned long long n = 1;
    int i;
    for (i = 0; i < 3 && t->sizes[i] > 0; i++) n *= (unsigned long long)t->sizes[i];
    return t->type == 8 ? n / 32 * 34 : 4 * n;
}

/* first: the first number of the embedding; the others are small patterns. */
static inline void whole_gguf(moe_buffer *b, float first, float epsilon) {
    static const whole_tensor tensors[] = {{"token_embd.weight", {WHOLE_D, WHOLE_TOKENS, 0}, 0},
                                           {"output_norm.weight", {WHOLE_D, 0, 0}, 0},
                                           {"blk.0.attn_norm.weight", {WHOLE_D, 0, 0}, 0},
                                           {"blk.0.attn_q.weight", {WHOLE_D, WHOLE_D, 0}, 0},
                                           {"blk.0.attn_k.weight", {WHOLE_D, WHOLE_D / 2, 0}, 0},
                                           {"blk.0.attn_v.weight", {WHOLE_D, WHOLE_D / 2, 0}, 0},
                                           {"blk.0.attn_output.weight", {WHOLE_D, WHOLE_D, 0}, 0},
                                           {"blk.0.ffn_norm.weight", {WHOLE_D, 0, 0}, 0},
                                           {"blk.0.ffn_gate_inp.weight", {WHOLE_D, WHOLE_EXPERTS, 0}, 0},
                                           {"blk.0.ffn_gate_exps.weight", {WHOLE_D, WHOLE_FF, WHOLE_EXPERTS}, 8},
                                           {"blk.0.ffn_up_exps.weight", {WHOLE_D, WHOLE_FF, WHOLE_EXPERTS}, 8},
                                           {"blk.0.ffn_down_exps.weight", {WHOLE_FF, WHOLE_D, WHOLE_EXPERTS}, 8}};
    static const struct {
        const char *key;
        unsigned value;
    } keys[] = {{"llama.context_length", 64},      {"llama.embedding_length", WHOLE_D},
                {"llama.block_count", 1},          {"llama.feed_forward_length", WHOLE_FF},
                {"llama.attention.head_count", 4}, {"llama.attention.head_count_kv", 2},
                {"llama.expert_count", WHOLE_EXPERTS}, {"llama.expert_used_count", 2}};
    enum { N = sizeof tensors / sizeof *tensors, N_KEYS = sizeof keys / sizeof *keys };
    unsigned long long at = 0, i, size;
    unsigned bits;
    int t, k;
    vocab_put(b, "GGUF\3\0\0\0", 8);
    vocab_number(b, N, 8);
    vocab_number(b, N_KEYS + 2, 8);
    vocab_text_key(b, "general.architecture", "llama");
    vocab_key(b, "llama.attention.layer_norm_rms_epsilon", 6);
    memcpy(&bits, &epsilon, sizeof bits);
    vocab_number(b, bits, 4);
    for (k = 0; k < N_KEYS; k++) vocab_id(b, keys[k].key, (int)keys[k].value);
    for (t = 0; t < N; at += (whole_bytes(&tensors[t]) + 31) / 32 * 32, t++) {
        const int dims = tensors[t].sizes[1] == 0 ? 1 : tensors[t].sizes[2] == 0 ? 2 : 3;
        vocab_string(b, tensors[t].name);
        vocab_number(b, (unsigned)dims, 4);
        for (k = 0; k < dims; k++) vocab_number(b, (unsigned)tensors[t].sizes[k], 8);
        vocab_number(b, (unsigned)tensors[t].type, 4);
        vocab_number(b, at, 8);
    }
    while (b->size % 32 != 0) vocab_number(b, 0, 1);
    memcpy(&bits, &first, sizeof bits);
    for (t = 0; t < N; t++) {
        size = whole_bytes(&tensors[t]);
        for (i = 0; i < size && tensors[t].type == 0; i += 4) /* 1/2 to 1 */
            vocab_number(b, t == 0 && i == 0 ? bits : 0x3f000000u + (unsigned)(i * 123457u) % 0x00800000u, 4);
        for (i = 0; i < size && tensors[t].type == 8; i++) /* the scales 0.01 */
            vocab_number(b, i % 34 == 0 ? 0x1f : i % 34 == 1 ? 0x21 : i * 37 % 251, 1);
        while (b->size % 32 != 0) vocab_number(b, 0, 1);
    }
}

#endif
