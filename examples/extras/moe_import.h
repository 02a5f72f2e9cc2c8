/* moe_import.h - models of other programs and their MoE layers - an extra of moe, after moe.h

   Loads published mixture-of-experts language models (GGUF files, Hugging Face folders) as networks
   that read their weights in place. Imports single MoE layers and exports them under the same
   names. Converts llama.cpp's quantized rows to packed weights and back. MIT or public domain, as
   moe.h.

   Contents: search for
     >>recipe   >>program   >>options   >>manual   >>families   >>limits
     >>layer       moe_import_layer, moe_import_read, moe_import_source, moe_import_memory
     >>model       moe_import_model, moe_import_read_model, moe_import_free
     >>save        moe_import_save, moe_import_write
     >>tokenizer   moe_import_tokenizer, moe_tokenizer_encode, moe_tokenizer_decode
     >>chat        moe_chat_find, moe_chat_put
     >>blocks      moe_import_pack_blocks, moe_import_unpack_blocks
     >>code        the implementation, in the order of the data flow:
                   >>names >>sources >>gguf >>json >>walk >>prefix >>collect >>family >>shapes
                   >>settings >>values >>complete >>models >>model_names >>model_settings
                   >>model_blocks >>model_attention >>model_check >>model_memory >>model_build
                   >>files >>write >>panels

   >>recipe
     In the one source file that defines MOE_IMPLEMENTATION, and wherever you call these functions:
       #include "moe.h"
       #include "examples/extras/moe_import.h"
     Link as for moe.h (-lm).

   >>program: makes a small layer, writes it under Mixtral's tensor names, imports it and compares.
 * --- first program ---
 * #define MOE_IMPLEMENTATION
 * #include "moe.h"
 * #include "examples/extras/moe_import.h"
 * #include <stdio.h>
 * #include <string.h>
 *
 * int main(void) {
 *     static moe_buffer file; // zeros: empty, on the standard heap
 *     const char *prefix = "model.layers.0.block_sparse_moe";
 *     moe_stream stream = moe_buffer_stream(&file);
 *     moe_import_source source;
 *     moe_layer_config config;
 *     moe_layer layer, copy;
 *     moe_tensor a, b;
 *     moe_error error;
 *     size_t i;
 *     if (moe_layer_preset("mixtral", &config, &error)) return puts(error.message), 1;
 *     config.router.d_model = 16;
 *     config.d_ff = 32;
 *     if (moe_layer_create(&layer, &config, 0, 42, NULL, &error)) return puts(error.message), 1;
 *     if (moe_import_write(&layer, &stream, prefix, "mixtral", MOE_DTYPE_F64, &error))
 *         return puts(error.message), 1;
 *     source = moe_import_memory("model.safetensors", file.data, file.size);
 *     if (moe_import_read(&copy, &source, 1, "model.layers.0", NULL, NULL, &error))
 *         return puts(error.message), 1;
 *     for (i = 0; moe_layer_tensor(&layer, i, &a) == MOE_OK; i++)
 *         if (moe_layer_find(&copy, a.name, &b) ||
 *             memcmp(a.data, b.data, a.count * sizeof *a.data))
 *             return printf("%s differs\n", a.name), 1;
 *     printf("%d experts, %d per token, %d tensors: all equal\n", copy.config.router.n_experts,
 *            copy.config.router.top_k, (int)i);
 *     moe_layer_free(&copy);
 *     moe_layer_free(&layer);
 *     moe_buffer_free(&file);
 *     return 0;
 * }
 * --- end ---

   >>options
     None of its own. MOE_NO_STDIO leaves out the functions that take a path, MOE_NO_TRAIN
     moe_import_write and moe_import_save, MOE_NO_QUANT the functions for blocks, MOE_NO_FLOAT
     everything. In the double build each function carries the suffix _f64, as in moe.h.

   >>manual
     A model.  A path is usually enough; the result is a network like any other:
       moe_import_model(&model, "olmoe-q4_k.gguf", NULL, NULL, &error);
       moe_net_decode_size(&model.net, 4096, 512, &size, &bytes, &error);
       moe_net_cache_init(&cache, &model.net, 4096, malloc(size), size, &error);
       moe_net_decode(&model.net, &cache, &call, work, bytes, &pass);    token ids to logits
       moe_import_free(&model);
     The files are mapped and read in place. Only the cache, the workspace, and norms and biases
     that are not float32 take memory of their own; the operating system keeps the experts in use in
     memory. options.exact = 1 computes with float activations; by default, products with some
     quantized types quantize the activations too, as llama.cpp does, which is faster. options.top_k
     limits every token to fewer experts than the model was trained with.

     A layer.  A path and the prefix of the layer's tensor names are usually enough:
       moe_import_layer(&layer, "Mixtral-8x7B", "model.layers.3", NULL, NULL, &error);
     The path is a .safetensors file, an index (.index.json), a .gguf file (any part of a split one,
     NAME-00001-of-00003.gguf, with the others beside it), or a folder that holds model.safetensors
     or model.safetensors.index.json. Only headers and the tensors of that layer are read from large
     files. If there is no MoE layer at the prefix, the message lists those of the file.

     Family and settings.  The family comes from model_type in config.json (GGUF:
     general.architecture); without one, from the tensor names. Sizes come from the tensors. Router
     settings come from config.json (GGUF: metadata). Missing settings take the defaults of the
     family's own program (GGUF: of llama.cpp) if model_type names the family, else those of its
     preset or of the preset that you name. Of a setting that is a list, with one element per block,
     a layer takes the element of the last number in its prefix. The layer computes what that
     program computes, in float32 (float64 in the double build).

     Afterwards.  The layer is like any other: run it, quantize it, put its tensors into a network
     (moe_net_find). It has no gradients; to train it, save it with moe_layer_save and load it with
     moe_layer_load and trainable = 1.

     Without paths.  moe_import_read takes sources: functions that read bytes at an offset, or
     memory (moe_import_memory). The first source is the file; config.json and the files of an
     index are found among the others by name.

     Exporting.  moe_import_save writes the weights under a family's names. Other programs also need
     a config.json, which is not written.

     Text.  The vocabulary of a model comes from its GGUF file or from tokenizer.json in its folder:
       moe_import_tokenizer(&t, "olmoe-q4_k.gguf", NULL, &error);
       moe_tokenizer_encode(&t, text, size, MOE_TOKENIZER_BOUNDS, ids, room, &n);
       size = moe_tokenizer_decode(&decoder, id, piece, sizeof piece);   as tokens come
     Supported are byte-level BPE with the pre-tokenizers of every family above, SentencePiece BPE,
     and unigram (only from tokenizer.json). moe_chat_find returns the chat format of these
     families. examples/chat.c is a complete program.

   >>families: tensor names after the prefix. % is the expert index, E n_experts, d d_model, f d_ff.
     mixtral, phi35_moe, minimax_m2
       gate.weight, experts.%.w1.weight (gate), .w3 (up), .w2 (down)
       minimax_m2 also e_score_correction_bias
     qwen2_moe, qwen3_next, qwen3_moe, olmoe, deepseek_v2, deepseek_v3, glm4_moe, dots1
       gate.weight, experts.%.gate_proj.weight, .up_proj, .down_proj
       qwen2_moe, qwen3_next also shared_expert.*, shared_expert_gate.weight
       deepseek_v2, deepseek_v3, glm4_moe, dots1 also shared_experts.*
       deepseek_v3, glm4_moe, dots1 also gate.e_score_correction_bias
     all of these, as transformers 5 stores them
       experts.gate_up_proj [E,2f,d], experts.down_proj [E,d,f]
     llama4
       router.weight, experts.gate_up_proj [E,d,2f], experts.down_proj [E,f,d], shared_expert.*
     gpt_oss
       router.weight, router.bias, experts.gate_up_proj [E,d,2f] with alternating columns of gate
       and up, experts.down_proj [E,f,d], experts.gate_up_proj_bias, experts.down_proj_bias
       or in MXFP4 experts.gate_up_proj_blocks, experts.gate_up_proj_scales and so on
     granite_moe, granite_moe_shared
       router.layer.weight, input_linear.weight [E,2f,d], output_linear.weight [E,d,f]
       granite_moe_shared, in a whole model, also shared_mlp.input_linear, .output_linear
     ernie4_5_moe
       as qwen3_moe, also moe_statics.e_score_correction_bias [1,E], shared_experts.*
     hunyuan_moe
       gate.wg.weight, experts.%.gate_proj.weight, ..., shared_mlp.*
     lfm2_moe
       gate.weight, expert_bias, experts.%.w1.weight, ...
     deepseek, bailing_moe, bailing_moe_v2, dbrx, grok: GGUF only
     GGUF, any family
       ffn_gate_inp, ffn_gate_exps, ffn_up_exps, ffn_down_exps or ffn_gate_up_exps, in older files
       ffn_gate.%, ffn_up.%, ffn_down.%; ffn_gate_shexp, ffn_up_shexp, ffn_down_shexp,
       ffn_gate_inp_shexp; exp_probs_b; .bias of router and experts
     Each family has a preset of the same name, except that qwen3_next uses that of qwen2_moe,
     glm4_moe and dots1 use that of deepseek_v3, grok uses grok1, and those from granite_moe_shared
     to bailing_moe_v2 have none of their own. model_type and general.architecture hold these names
     or the programs' own (phimoe, granitemoe, deepseek2, ...).

     Models, by general.architecture (GGUF) / model_type (folder):
       llama (with experts) / mixtral, granitemoe / granitemoe and granitemoeshared, olmoe / olmoe,
       qwen2moe / qwen2_moe, qwen3moe / qwen3_moe, deepseek, deepseek2 / deepseek_v2 and deepseek_v3
       and kimi_k2, gpt-oss / gpt_oss, phimoe / phimoe, dots1 / dots1, glm4moe / glm4_moe,
       ernie4_5-moe / ernie4_5_moe, hunyuan-moe / hunyuan_v1_moe, bailingmoe, bailingmoe2,
       lfm2moe / lfm2_moe, minimax-m2 / minimax_m2, llama4 / llama4 and llama4_text, dbrx, grok

   >>limits
     - A layer has no attention, norms or embeddings. A model is for inference only: its network can
       be neither trained nor saved. Image parts and multi-token prediction are left out: their
       tensors are ignored.
     - Element types: F32, F16, BF16, F64; in GGUF also Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K,
       IQ4_NL, IQ4_XS and MXFP4; in safetensors FP8 (E4M3, with a scale for each block) and MXFP4.
       All are dequantized exactly (rounded once). Others (IQ1 to IQ3, GPTQ, AWQ) are refused.
     - GGUF versions 2 and 3, little-endian. config.json up to 1 MiB.
     - Experts are SwiGLU; those of grok and of the preset gemma4 are glu with gelu_tanh. Any other
       hidden_act is refused, as is an unknown tensor. grok's dense part beside the experts needs a
       whole model; moe_import_layer refuses it, since a layer does not scale the sum.
     - Losses, noise and learning rates of the original training are not read.
     - deepseek_v2 with norm_topk_prob ignores routed_scaling_factor, like its own program.
     - A GGUF file computes what llama.cpp computes, a folder what its authors' program computes.
       They differ: phimoe has RMS norms with a bias and a softmax over the chosen experts in GGUF,
       layer norms and sparsemixer in a folder; the range of YaRN is rounded in GGUF, and in a
       folder unless "truncate" is false (gpt_oss); groups are compared by their two best experts in
       GGUF; minimax-m2 and dots1 need expert_gating_func in GGUF. llama.cpp's lower bound of 6.1e-5
       on the sum of weights is not applied. transformers 5 omits the square of mscale from
       deepseek_v2's attention scale; it is applied here, as in DeepSeek's own program and in
       llama.cpp. grok's GELU is computed in float32.
     - In GGUF, attn_qkv is read for llama, granitemoe, bailingmoe2 and dbrx alone. Files of llama4
       with rope.scaling.type = none beside a factor are refused: llama.cpp scales by it all the
       same.
     - deepseek2 files with attention.temperature_scale (Mistral Large 3) are computed up to the
       position attention.temperature_length, from which queries would be scaled; longer contexts
       are refused.
     - Tested with small random models of every architecture against logits of llama.cpp (GGUF) and
       of transformers (folders), and with small layers of the families against outputs of
       tests/unit/published.py. Not tested with published weights.
     - Tokenizers: pre-tokenizer expressions are recognized by their text; others are refused by
       name, as are WordPiece, tokenizer.model and tiktoken files, normalizers other than
       SentencePiece's spaces, and post-processors that add more than one token at an end of the
       text; NFC is not applied (moe_tokenizer.wants_nfc). Character classes are
       those of Unicode 14. At most 4,194,304 tokens; tokenizer.json up to 128 MiB; unigram tokens
       up to 256 bytes.
     - Token ids agree with llama.cpp's on its own vocabularies and texts (gpt-2, refact, starcoder,
       deepseek-coder, deepseek-llm, falcon, mpt, llama-spm, phi-3). Where llama.cpp deviates from
       an expression (letters with marks in gpt-4o's, ~ in deepseek-v3's), the expression is
       followed.
*/
#ifndef MOE_H
#error "moe_import.h: include moe.h before it"
#endif

#ifndef MOE_IMPORT_H
#define MOE_IMPORT_H

#ifndef MOE_NO_FLOAT
#if MOE_REAL_IS_DOUBLE
#define moe_chat_find moe_chat_find_f64
#define moe_chat_put moe_chat_put_f64
#define moe_import_free moe_import_free_f64
#define moe_import_layer moe_import_layer_f64
#define moe_import_memory moe_import_memory_f64
#define moe_import_model moe_import_model_f64
#define moe_import_read_model moe_import_read_model_f64
#define moe_import_pack_blocks moe_import_pack_blocks_f64
#define moe_import_read moe_import_read_f64
#define moe_import_read_tokenizer moe_import_read_tokenizer_f64
#define moe_import_save moe_import_save_f64
#define moe_import_tokenizer moe_import_tokenizer_f64
#define moe_import_unpack_blocks moe_import_unpack_blocks_f64
#define moe_import_write moe_import_write_f64
#define moe_tokenizer_decode moe_tokenizer_decode_f64
#define moe_tokenizer_encode moe_tokenizer_encode_f64
#define moe_tokenizer_find moe_tokenizer_find_f64
#define moe_tokenizer_free moe_tokenizer_free_f64
#define moe_tokenizer_is_end moe_tokenizer_is_end_f64
#define moe_tokenizer_room moe_tokenizer_room_f64
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- >>layer: importing ---- */

#ifndef MOE_NO_STDIO
/* Creates a layer from a weight file of another program. Free it with moe_layer_free.
     path     a .safetensors or .gguf file, an index (.json), or a folder that holds
              model.safetensors.index.json or model.safetensors. config.json, if there is one, and
              the files of an index lie in the same folder
     prefix   what the layer's tensor names start with: "model.layers.3.mlp", in GGUF "blk.3". The
              last part may be any of mlp, block_sparse_moe and feed_forward, or left out. At most
              180 bytes
     preset   a name of moe_presets, settings of moe_layer_fields, or both ("deepseek_v3",
              "deepseek_v3 gate=softmax scale=1", "gate=softmax"); NULL, or without a name: the
              family is detected. They apply where the file says nothing; numbers in the file
              override those of a preset
     allocator   NULL: the standard heap
   The layer owns its tensors and has no gradients. On failure *layer is untouched.
     MOE_ERR_NOT_FOUND    no MoE layer at this prefix (the message lists those of the file), a
                          tensor that the family needs is missing, no such preset or setting
     MOE_ERR_UNSUPPORTED  an element type, a tensor that the family or the preset does not have, a
                          setting that would change the result; named in the message
     MOE_ERR_SHAPE        a tensor whose shape does not fit the others
     MOE_ERR_CONFIG       settings that contradict each other or the tensors; a file of another
                          family than the preset's, or whose gate or weights differ from the
                          preset's, or that has another value for a setting of `preset`
     MOE_ERR_FORMAT       a malformed file; a tensor that occurs twice, or shares bytes with another
     MOE_ERR_ARGUMENT     layer, path or prefix is NULL; prefix or path is too long
     MOE_ERR_IO, MOE_ERR_MEMORY, MOE_ERR_OVERFLOW
   While it runs it needs memory for the layer, the headers, an index and config.json as a whole,
   about 250 bytes per tensor of the layer, and 24 KiB of stack. Files are not trusted: the layer is
   never larger than its tensors in the file. Thread-safe. */
MOE_API moe_status moe_import_layer(moe_layer *layer, const char *path, const char *prefix, const char *preset,
                                    const moe_allocator *allocator, moe_error *error);
#endif

/* A file that can be read at any offset. */
typedef struct moe_import_source {
    const char *name; /* file name without folders, as an index and messages use it; NULL: none */
    uint64_t size;    /* bytes */
    void *ctx;        /* passed to read_at */
    /* Reads size bytes at offset `at`. It is never asked for bytes beyond the end. */
    moe_status (*read_at)(void *ctx, uint64_t at, void *to, size_t size);
} moe_import_source;

/* A source in memory. The bytes remain the caller's and must outlive it. bytes NULL: empty. */
MOE_API moe_import_source moe_import_memory(const char *name, const void *bytes, size_t size);

/* moe_import_layer without paths. sources[0], n_sources >= 1, is a safetensors file, an index or a
   GGUF file; config.json and the files of an index are found among the other sources by name.
   Errors as above, and what read_at returns. Thread-safe if the sources are not shared. */
MOE_API moe_status moe_import_read(moe_layer *layer, const moe_import_source *sources, size_t n_sources,
                                   const char *prefix, const char *preset, const moe_allocator *allocator,
                                   moe_error *error);

/* ---- >>model: importing a whole model ---- */

/* How a model is imported. {0} is a valid default; 0 means the value in brackets. */
typedef struct moe_import_options {
    /* 1: products of quantized weights read activations as floats: the outputs are those of the
       dequantized weights up to rounding [0: activations are quantized too where this is faster] */
    int exact;
    /* tokens of the longest sequence; some models choose their RoPE factors by it [the file's
       value] */
    int context;
    int top_k;      /* at most this many experts per token [the file's value] */
    int kernels;    /* MOE_KERNELS_ [auto] */
    int cache_type; /* MOE_TYPE_ of decoding's keys and values, as moe_net.cache_type [real] */
    /* limit on the bytes of all files together: larger models are refused before a tensor is read
       [0: any size that fits the address space] */
    uint64_t memory;
} moe_import_options;

/* A model of another program. It owns the network and what the network reads: mapped files, norms
   and biases. Calls on the network do not modify it, so threads may share it. */
typedef struct moe_imported {
    moe_net net;              /* token ids to logits; not trainable, not saved */
    const char *architecture; /* its name in GGUF's general.architecture; constant */
    int vocabulary, context;  /* context: options.context, or the file's value; 0: the file has none */
    int n_blocks;
    uint64_t file_bytes;      /* of all files */
    struct moei_owned *owned; /* private to moe_import.h */
} moe_imported;

#ifndef MOE_NO_STDIO
/* Loads a model's files as a network that computes what the authors' program computes (GGUF: what
   llama.cpp computes).
     path   a .gguf file (any part of a split one), a .safetensors file, an index (.json), or a
            folder with config.json and model.safetensors or model.safetensors.index.json
   The files stay mapped until moe_import_free and must not change. Weights are read in place, and
   of the experts only those that a token uses. Files that cannot be mapped are read into memory.
   options NULL: {0}. On failure *model is {0}.
     MOE_ERR_NOT_FOUND    no config.json, no file that an index or a split file needs, a missing
                          setting or tensor
     MOE_ERR_UNSUPPORTED  an architecture, element type or setting that is not supported, an extra
                          tensor; named in the message
     MOE_ERR_SHAPE        a tensor whose shape does not fit the settings
     MOE_ERR_CONFIG       settings that are out of range or contradict each other; options
     MOE_ERR_FORMAT       a malformed file; a tensor that occurs twice
     MOE_ERR_MEMORY       also: the files are larger than options.memory
     MOE_ERR_ARGUMENT, MOE_ERR_IO, MOE_ERR_OVERFLOW
   It allocates a few kilobytes per block, less than 100 bytes per matrix of an expert, and moe_real
   copies of the norms and of the biases outside experts that the file stores in another type (16
   bits, blocks); while it runs, also the headers of the files and about 300 bytes per tensor.
   Files are not trusted. Thread-safe. */
MOE_API moe_status moe_import_model(moe_imported *model, const char *path, const moe_import_options *options,
                                    const moe_allocator *allocator, moe_error *error);
#endif
/* The same from sources, as moe_import_read takes them. Those of moe_import_memory are read in
   place and must outlive the model; others are read into memory as a whole. */
MOE_API moe_status moe_import_read_model(moe_imported *model, const moe_import_source *sources, size_t n_sources,
                                         const moe_import_options *options, const moe_allocator *allocator,
                                         moe_error *error);
/* Frees the network, what it reads and the mappings, and makes *model {0}; {0} and NULL are
   harmless. */
MOE_API void moe_import_free(moe_imported *model);

/* ---- >>save: exporting under a family's names ---- */

#ifndef MOE_NO_TRAIN
#ifndef MOE_NO_STDIO
/* Writes a layer as one safetensors file with the tensor names, shapes and layout of a family, and
   the metadata {"format":"pt"}. Replaces the file only when everything is written
   (moe_file_replace).
     prefix   prepended to the names with a dot; UTF-8, at most 180 bytes
     family   one of >>families. Where a family has both forms, each expert gets its own tensors
     dtype    MOE_DTYPE_F64, _F32, _F16 or _BF16; rounds to nearest, ties to even. With 16 bits
              e_score_correction_bias stays F32, as in the families' own files
   Settings of the layer and parameters that only training uses are not written.
     MOE_ERR_CONFIG       the layer has a parameter that the family does not have, or the family
                          needs one that the layer does not have; d_out differs from d_model
     MOE_ERR_ARGUMENT     NULL; dtype; prefix; a tensor that is not set
     MOE_ERR_NOT_FOUND    no such family
     MOE_ERR_UNSUPPORTED  the layer has only the experts of one rank
     MOE_ERR_MEMORY, MOE_ERR_OVERFLOW, and those of moe_file_replace */
MOE_API moe_status moe_import_save(const moe_layer *layer, const char *path, const char *prefix, const char *family,
                                   int dtype, moe_error *error);
#endif
/* The same to a stream. Errors as above, and what the stream returns. */
MOE_API moe_status moe_import_write(const moe_layer *layer, moe_stream *stream, const char *prefix, const char *family,
                                    int dtype, moe_error *error);
#endif

/* ---- >>blocks: quantized rows of llama.cpp, to and from packed weights ---- */

#ifndef MOE_NO_QUANT
/* blocks: n rows of inner / 32 blocks, one after the other, the same bytes on every machine:
     Q8_0  <-> MOE_TYPE_Q8_BLOCK   2 bytes scale (binary16, low byte first), 32 signed bytes
     Q4_0  <-> MOE_TYPE_Q4         2 bytes scale, 16 bytes: byte t holds w + 8 of element t in its
                                   low bits and of element 16 + t in its high bits
   packed: panels as moe_pack makes them, stride panels apart. Both directions are lossless.
     MOE_ERR_ARGUMENT  another type; stride = 0
     MOE_ERR_SHAPE     inner is not a multiple of 32
     MOE_ERR_OVERFLOW  a size overflows
   Thread-safe. */
MOE_API moe_status moe_import_pack_blocks(int type, size_t n, size_t inner, const void *blocks, void *packed,
                                          size_t stride);
MOE_API moe_status moe_import_unpack_blocks(int type, size_t n, size_t inner, const void *packed, size_t stride,
                                            void *blocks);
#endif

/* ---- >>tokenizer: text to token ids and back ---- */

/* How text becomes tokens. */
enum {
    MOE_TOKENIZER_BYTES,   /* byte-level BPE (Sennrich and others, 2016; Radford and others, 2019): text
                              is split into words, then bytes are merged, the lowest rank first */
    MOE_TOKENIZER_SCORES,  /* SentencePiece BPE (Kudo and Richardson, 2018): characters are merged, the
                              result with the highest score first */
    MOE_TOKENIZER_RANKS,   /* the same with ranked pairs, as tokenizer.json writes it */
    MOE_TOKENIZER_UNIGRAM  /* SentencePiece unigram (Kudo, 2018): the split with the highest score */
};

/* Flags of encoding and decoding.
     SPECIAL  encode: control tokens in the text, such as <|im_end|>, become one id; without it they
              are text. decode: they yield their text; without it nothing. Tokens that a vocabulary
              adds as text (type 4 in GGUF, "special": false in tokenizer.json) always become one id
     BOUNDS   encode: adds bos and eos as the file wants them (add_bos, add_eos) */
enum { MOE_TOKENIZER_SPECIAL = 1, MOE_TOKENIZER_BOUNDS = 2 };

/* A vocabulary and its rules. Read-only after loading, so threads may share it; encoding allocates
   from its allocator, which then must be thread-safe. Ids are -1 where the file names none. */
typedef struct moe_tokenizer {
    int32_t n_tokens;           /* ids are 0 to n_tokens - 1 */
    int32_t bos, eos;           /* begin and end of a text */
    int32_t eot;                /* end of a turn in a chat, by its key or by its text (<|im_end|>, ...) */
    int32_t unknown, padding;
    int kind;                   /* MOE_TOKENIZER_BYTES, ... */
    int add_bos, add_eos;       /* 1: MOE_TOKENIZER_BOUNDS adds it */
    int wants_nfc;              /* 1: tokenizer.json asks for text in Unicode form NFC; it is not converted */
    const char *chat_template;  /* the file's Jinja template; NULL: none. Owned */
    char architecture[32];      /* general.architecture of GGUF, model_type of config.json; "": unknown */
    /* the rest is private */
    int space;                  /* of MOEI_SPACE_ */
    int strip;                  /* 1: decoding removes a space at the beginning */
    int whole;                  /* 1: a word that is a token is not merged from its bytes */
    int fuse;                   /* 1: neighboring unknown characters of a word are one unknown token */
    int n_passes;
    unsigned char passes[8];    /* of MOEI_PASS_ */
    uint32_t n_symbols;         /* tokens, then texts that occur in merges only */
    uint32_t longest;           /* bytes of the longest token */
    float lowest;               /* the lowest score of a token, or 0 */
    uint32_t n_special[257];    /* of tokens matched in the text first: how many begin with a lower byte */
    int32_t bytes[256];         /* symbol of a byte; -1: none */
    moe_allocator allocator;
    moe_buffer texts, symbols, lookup, merges, pairs, special, chat;
} moe_tokenizer;

#ifndef MOE_NO_STDIO
/* Loads the tokenizer of a model.
     path       a .gguf file (part 1 of a split one), a tokenizer.json, or a folder with
                tokenizer.json; tokenizer_config.json and config.json beside it are read if they
                exist
     allocator  NULL: the standard heap
   Free it with moe_tokenizer_free. On failure *t is untouched.
     MOE_ERR_NOT_FOUND    the file has no vocabulary
     MOE_ERR_UNSUPPORTED  a kind of tokenizer, pre-tokenizer, normalizer or post-processor; an added
                          token with single_word; more than 4,194,304 tokens or 8,388,608 merges;
                          named in the message
     MOE_ERR_FORMAT       a malformed file: a missing or short array, an id beyond the vocabulary,
                          a merge that is not a pair of strings, a score that is not a number
     MOE_ERR_ARGUMENT     t or path is NULL; path is too long
     MOE_ERR_IO, MOE_ERR_MEMORY, MOE_ERR_OVERFLOW
   It needs about 50 bytes per token and merge besides their texts, and while it loads
   tokenizer.json the whole file (at most 128 MiB). Thread-safe. */
MOE_API moe_status moe_import_tokenizer(moe_tokenizer *t, const char *path, const moe_allocator *allocator,
                                        moe_error *error);
#endif
/* The same without paths: sources[0], n_sources >= 1, is a GGUF file or tokenizer.json; the other
   files are found among the other sources by name. Errors as above, and what read_at returns. */
MOE_API moe_status moe_import_read_tokenizer(moe_tokenizer *t, const moe_import_source *sources, size_t n_sources,
                                             const moe_allocator *allocator, moe_error *error);
/* Frees what the tokenizer owns and clears it. NULL and {0} are allowed. */
MOE_API void moe_tokenizer_free(moe_tokenizer *t);

/* Writes the token ids of text[0..size-1] to ids[0..room-1] and their number to *n. A byte that is
   not part of valid UTF-8 is split as U+FFFD would be, and encoded as that byte.
     flags  MOE_TOKENIZER_ bits; 0: the text alone
   A text has at most 4 * size + 5 tokens, nearly always fewer than size.
     MOE_ERR_SPACE     more than room ids; *n is their number
     MOE_ERR_ARGUMENT  t or n is NULL, or text or ids is NULL and its size is not 0
     MOE_ERR_OVERFLOW  text of 1 GiB or more
     MOE_ERR_MEMORY    it needs about 64 bytes per byte of the longest word (SentencePiece: of the
                       text)
   Time grows as size * log(size) for every text. */
MOE_API moe_status moe_tokenizer_encode(const moe_tokenizer *t, const char *text, size_t size, int flags, int32_t *ids,
                                        size_t room, size_t *n);

/* Decodes ids one by one. Its output consists of whole UTF-8 characters: bytes of an incomplete
   character are held back. {&tokenizer, flags} and zeros begin a text. */
typedef struct moe_decoder {
    const moe_tokenizer *tokenizer;
    int flags;              /* 0 or MOE_TOKENIZER_SPECIAL */
    int begun;              /* 1: within a text, so that spaces at a token's beginning stay; set by decode */
    int n_held;             /* bytes held back, 0 to 3 */
    unsigned char held[4];
} moe_decoder;

/* Writes the text of an id to text[0..room-1]; returns the number of bytes, without a terminating
   zero. A negative id ends the text: held bytes are written as they are. All outputs together are
   the bytes that were encoded, valid UTF-8 or not, unless encode met an unknown character; of
   SentencePiece, as its own program does, U+2581 becomes a space, and spaces that the format adds
   or drops at the beginning of a text and beside special tokens stay so. An id that does not exist
   yields nothing. If the text, with what it holds back, has more than room bytes, which
   moe_tokenizer_room excludes, nothing is written, the state is unchanged, and the number of bytes
   is returned. */
MOE_API size_t moe_tokenizer_decode(moe_decoder *d, int32_t id, char *text, size_t room);
/* The most bytes that one call of moe_tokenizer_decode writes. */
MOE_API size_t moe_tokenizer_room(const moe_tokenizer *t);
/* The id of a token by its text as the file writes it ("<|im_start|>"); -1: none. */
MOE_API int32_t moe_tokenizer_find(const moe_tokenizer *t, const char *text);
/* 1 if generation ends at this id: eos, eot, and tokens whose text says so (<|endoftext|>, ...). */
MOE_API int moe_tokenizer_is_end(const moe_tokenizer *t, int32_t id);

/* ---- >>chat: chat formats ---- */

enum { MOE_CHAT_SYSTEM, MOE_CHAT_USER, MOE_CHAT_ASSISTANT, MOE_CHAT_ROLES };

/* The chat format of a family of models. */
typedef struct moe_chat {
    const char *name;
    const char *marks[2];       /* texts that a chat template of this format contains; NULL: any */
    const char *architectures;  /* those that use it, for files without a template */
    const char *begin;          /* stands before the first message */
    const char *before[MOE_CHAT_ROLES], *after[MOE_CHAT_ROLES]; /* stand around a message */
    const char *reply;          /* opens the model's turn */
    int joined;                 /* 1: a system message and the next user message share before[] and after[] */
} moe_chat;

/* The chat format of a tokenizer: by the marks in its chat_template, else by its architecture.
   NULL: unknown. The result is constant. */
MOE_API const moe_chat *moe_chat_find(const moe_tokenizer *t);
/* Appends a message to a conversation; encode it with MOE_TOKENIZER_SPECIAL, the first one also
   with MOE_TOKENIZER_BOUNDS. Control tokens within text are encoded as control tokens.
     role      MOE_CHAT_
     previous  role of the message before this one; -1: this is the first
     text      NULL, for MOE_CHAT_ASSISTANT: opens the model's turn instead
   MOE_ERR_ARGUMENT: NULL, a role; MOE_ERR_MEMORY; MOE_ERR_SPACE: more than to->most bytes. */
MOE_API moe_status moe_chat_put(const moe_chat *c, int role, int previous, const char *text, moe_buffer *to);

#ifdef __cplusplus
}
#endif
#endif /* MOE_NO_FLOAT */
#endif /* MOE_IMPORT_H */

#if defined(MOE_IMPLEMENTATION) && !defined(MOEI_IMPORT_IMPLEMENTED)
#define MOEI_IMPORT_IMPLEMENTED

#ifndef MOE_NO_FLOAT

#if !defined(MOE_NO_STDIO) && MOEI_POSIX
#include <sys/mman.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>code: the implementation, in the order of the data flow ==== */

/* ---- >>names of tensors, by family ---- */

/* Sets of tensor names. A family has one or more sets; some sets differ only in the layout of the
   elements. */
#define MOEI_SET_GATE (1L << 0) /* "gate.weight" is the router */
#define MOEI_SET_ROUTER (1L << 1) /* "router.weight" */
#define MOEI_SET_ROUTER_BIAS (1L << 2)
#define MOEI_SET_ROUTER_LAYER (1L << 3)
#define MOEI_SET_CORRECTION (1L << 4) /* "gate.e_score_correction_bias" */
#define MOEI_SET_TOP_CORRECTION (1L << 5) /* "e_score_correction_bias" */
#define MOEI_SET_W123 (1L << 6) /* one tensor per expert */
#define MOEI_SET_PROJ (1L << 7)
#define MOEI_SET_FUSED (1L << 8) /* all experts in one tensor, as transformers 5 stores them */
#define MOEI_SET_TRANSPOSED (1L << 9) /* fused, [in,out] */
#define MOEI_SET_INTERLEAVED (1L << 10) /* fused, [in,out], gate and up rows alternate */
#define MOEI_SET_LINEAR (1L << 11)
#define MOEI_SET_SHARED (1L << 12) /* "shared_expert" */
#define MOEI_SET_SHARED_GATE (1L << 13)
#define MOEI_SET_SHARED_EXPERTS (1L << 14) /* "shared_experts" */
#define MOEI_SET_STATICS (1L << 15) /* "moe_statics.e_score_correction_bias" */
#define MOEI_SET_EXPERT_BIAS (1L << 16) /* "expert_bias" is added for the selection */
#define MOEI_SET_WG (1L << 17) /* "gate.wg.weight" is the router */
#define MOEI_SET_SHARED_MLP (1L << 18) /* "shared_mlp" */
#define MOEI_SET_SHARED_LINEAR (1L << 19) /* "shared_mlp", gate and up in one tensor */
#define MOEI_SET_MXFP4 (1L << 20) /* separate blocks and scales, gate and up rows alternate */
#define MOEI_SET_G_EXPERTS (1L << 21) /* GGUF: router and experts */
#define MOEI_SET_G_ROUTER_BIAS (1L << 22)
#define MOEI_SET_G_BIASES (1L << 23)
#define MOEI_SET_G_CORRECTION (1L << 24)
#define MOEI_SET_G_SHARED (1L << 25)
#define MOEI_SET_G_SHARED_GATE (1L << 26)
#define MOEI_SET_G_BESIDE (1L << 27) /* a dense part, added to the experts */

/* Flags of a tensor name. */
enum { MOEI_TENSOR_ROUTER = 1, MOEI_TENSOR_TRANSPOSED = 2, MOEI_TENSOR_INTERLEAVED = 4 };

typedef struct moei_tensor_name {
    long set;
    const char *name;  /* % stands for an expert index: one tensor per expert */
    /* one letter per dimension: E experts, H d_model, I d_ff, J 2 d_ff, S width of the shared
       expert, P 2 S, 1 */
    const char *shape;
    int param, second; /* parameter indices; second is -1 unless gate and up are fused */
    int flags;
} moei_tensor_name;

static const moei_tensor_name moei_tensor_names[] = {
    {MOEI_SET_GATE, "gate.weight", "EH", MOE_ROUTER_WEIGHT, -1, MOEI_TENSOR_ROUTER},
    {MOEI_SET_ROUTER, "router.weight", "EH", MOE_ROUTER_WEIGHT, -1, MOEI_TENSOR_ROUTER},
    {MOEI_SET_ROUTER_LAYER, "router.layer.weight", "EH", MOE_ROUTER_WEIGHT, -1, MOEI_TENSOR_ROUTER},
    {MOEI_SET_WG, "gate.wg.weight", "EH", MOE_ROUTER_WEIGHT, -1, MOEI_TENSOR_ROUTER},
    {MOEI_SET_G_EXPERTS, "ffn_gate_inp.weight", "EH", MOE_ROUTER_WEIGHT, -1, MOEI_TENSOR_ROUTER},
    {MOEI_SET_ROUTER_BIAS, "router.bias", "E", MOE_ROUTER_BIAS, -1, 0},
    {MOEI_SET_CORRECTION, "gate.e_score_correction_bias", "E", MOE_ROUTER_SELECTION_BIAS, -1, 0},
    {MOEI_SET_TOP_CORRECTION, "e_score_correction_bias", "E", MOE_ROUTER_SELECTION_BIAS, -1, 0},
    {MOEI_SET_STATICS, "moe_statics.e_score_correction_bias", "1E", MOE_ROUTER_SELECTION_BIAS, -1, 0},
    {MOEI_SET_EXPERT_BIAS, "expert_bias", "E", MOE_ROUTER_SELECTION_BIAS, -1, 0},
    {MOEI_SET_W123, "experts.%.w1.weight", "IH", MOE_EXPERTS_GATE, -1, 0},
    {MOEI_SET_W123, "experts.%.w2.weight", "HI", MOE_EXPERTS_DOWN, -1, 0},
    {MOEI_SET_W123, "experts.%.w3.weight", "IH", MOE_EXPERTS_UP, -1, 0},
    {MOEI_SET_PROJ, "experts.%.gate_proj.weight", "IH", MOE_EXPERTS_GATE, -1, 0},
    {MOEI_SET_PROJ, "experts.%.up_proj.weight", "IH", MOE_EXPERTS_UP, -1, 0},
    {MOEI_SET_PROJ, "experts.%.down_proj.weight", "HI", MOE_EXPERTS_DOWN, -1, 0},
    {MOEI_SET_FUSED, "experts.gate_up_proj", "EJH", MOE_EXPERTS_GATE, MOE_EXPERTS_UP, 0},
    {MOEI_SET_FUSED, "experts.down_proj", "EHI", MOE_EXPERTS_DOWN, -1, 0},
    {MOEI_SET_TRANSPOSED, "experts.gate_up_proj", "EHJ", MOE_EXPERTS_GATE, MOE_EXPERTS_UP, MOEI_TENSOR_TRANSPOSED},
    {MOEI_SET_TRANSPOSED, "experts.down_proj", "EIH", MOE_EXPERTS_DOWN, -1, MOEI_TENSOR_TRANSPOSED},
    {MOEI_SET_INTERLEAVED, "experts.gate_up_proj", "EHJ", MOE_EXPERTS_GATE, MOE_EXPERTS_UP,
        MOEI_TENSOR_TRANSPOSED | MOEI_TENSOR_INTERLEAVED},
    {MOEI_SET_INTERLEAVED, "experts.gate_up_proj_bias", "EJ", MOE_EXPERTS_GATE_BIAS, MOE_EXPERTS_UP_BIAS,
        MOEI_TENSOR_TRANSPOSED | MOEI_TENSOR_INTERLEAVED},
    {MOEI_SET_INTERLEAVED, "experts.down_proj", "EIH", MOE_EXPERTS_DOWN, -1, MOEI_TENSOR_TRANSPOSED},
    {MOEI_SET_INTERLEAVED, "experts.down_proj_bias", "EH", MOE_EXPERTS_DOWN_BIAS, -1, 0},
    {MOEI_SET_MXFP4, "experts.gate_up_proj_blocks", "EJH", MOE_EXPERTS_GATE, MOE_EXPERTS_UP, MOEI_TENSOR_INTERLEAVED},
    {MOEI_SET_MXFP4, "experts.down_proj_blocks", "EHI", MOE_EXPERTS_DOWN, -1, 0},
    {MOEI_SET_LINEAR, "input_linear.weight", "EJH", MOE_EXPERTS_GATE, MOE_EXPERTS_UP, 0},
    {MOEI_SET_LINEAR, "output_linear.weight", "EHI", MOE_EXPERTS_DOWN, -1, 0},
    {MOEI_SET_SHARED, "shared_expert.gate_proj.weight", "SH", MOE_SHARED_GATE, -1, 0},
    {MOEI_SET_SHARED, "shared_expert.up_proj.weight", "SH", MOE_SHARED_UP, -1, 0},
    {MOEI_SET_SHARED, "shared_expert.down_proj.weight", "HS", MOE_SHARED_DOWN, -1, 0},
    {MOEI_SET_SHARED_GATE, "shared_expert_gate.weight", "1H", MOE_SHARED_SIGMOID, -1, 0},
    {MOEI_SET_SHARED_EXPERTS, "shared_experts.gate_proj.weight", "SH", MOE_SHARED_GATE, -1, 0},
    {MOEI_SET_SHARED_EXPERTS, "shared_experts.up_proj.weight", "SH", MOE_SHARED_UP, -1, 0},
    {MOEI_SET_SHARED_EXPERTS, "shared_experts.down_proj.weight", "HS", MOE_SHARED_DOWN, -1, 0},
    {MOEI_SET_SHARED_MLP, "shared_mlp.gate_proj.weight", "SH", MOE_SHARED_GATE, -1, 0},
    {MOEI_SET_SHARED_MLP, "shared_mlp.up_proj.weight", "SH", MOE_SHARED_UP, -1, 0},
    {MOEI_SET_SHARED_MLP, "shared_mlp.down_proj.weight", "HS", MOE_SHARED_DOWN, -1, 0},
    {MOEI_SET_SHARED_LINEAR, "shared_mlp.input_linear.weight", "PH", MOE_SHARED_GATE, MOE_SHARED_UP, 0},
    {MOEI_SET_SHARED_LINEAR, "shared_mlp.output_linear.weight", "HS", MOE_SHARED_DOWN, -1, 0},
    {MOEI_SET_G_ROUTER_BIAS, "ffn_gate_inp.bias", "E", MOE_ROUTER_BIAS, -1, 0},
    {MOEI_SET_G_CORRECTION, "exp_probs_b.bias", "E", MOE_ROUTER_SELECTION_BIAS, -1, 0},
    {MOEI_SET_G_EXPERTS, "ffn_gate_exps.weight", "EIH", MOE_EXPERTS_GATE, -1, 0},
    {MOEI_SET_G_EXPERTS, "ffn_up_exps.weight", "EIH", MOE_EXPERTS_UP, -1, 0},
    {MOEI_SET_G_EXPERTS, "ffn_down_exps.weight", "EHI", MOE_EXPERTS_DOWN, -1, 0},
    {MOEI_SET_G_EXPERTS, "ffn_gate_up_exps.weight", "EJH", MOE_EXPERTS_GATE, MOE_EXPERTS_UP, 0},
    {MOEI_SET_G_EXPERTS, "ffn_gate.%.weight", "IH", MOE_EXPERTS_GATE, -1, 0},
    {MOEI_SET_G_EXPERTS, "ffn_up.%.weight", "IH", MOE_EXPERTS_UP, -1, 0},
    {MOEI_SET_G_EXPERTS, "ffn_down.%.weight", "HI", MOE_EXPERTS_DOWN, -1, 0},
    {MOEI_SET_G_BIASES, "ffn_gate_exps.bias", "EI", MOE_EXPERTS_GATE_BIAS, -1, 0},
    {MOEI_SET_G_BIASES, "ffn_up_exps.bias", "EI", MOE_EXPERTS_UP_BIAS, -1, 0},
    {MOEI_SET_G_BIASES, "ffn_gate_up_exps.bias", "EJ", MOE_EXPERTS_GATE_BIAS, MOE_EXPERTS_UP_BIAS,
        MOEI_TENSOR_TRANSPOSED},
    {MOEI_SET_G_BIASES, "ffn_down_exps.bias", "EH", MOE_EXPERTS_DOWN_BIAS, -1, 0},
    {MOEI_SET_G_SHARED, "ffn_gate_shexp.weight", "SH", MOE_SHARED_GATE, -1, 0},
    {MOEI_SET_G_SHARED, "ffn_up_shexp.weight", "SH", MOE_SHARED_UP, -1, 0},
    {MOEI_SET_G_SHARED, "ffn_down_shexp.weight", "HS", MOE_SHARED_DOWN, -1, 0},
    {MOEI_SET_G_SHARED_GATE, "ffn_gate_inp_shexp.weight", "H", MOE_SHARED_SIGMOID, -1, 0},
    {MOEI_SET_G_BESIDE, "ffn_gate.weight", "SH", MOE_SHARED_GATE, -1, 0},
    {MOEI_SET_G_BESIDE, "ffn_up.weight", "SH", MOE_SHARED_UP, -1, 0},
    {MOEI_SET_G_BESIDE, "ffn_down.weight", "HS", MOE_SHARED_DOWN, -1, 0},
    {0, NULL, NULL, 0, 0, 0}};

typedef struct moei_family {
    const char *name, *preset;
    /* values of model_type and general.architecture, separated by spaces */
    const char *types, *archs;
    /* sets that may occur (0: the family has no safetensors files); that must occur; that must also
       occur where only the tensor names identify the family (-1: they cannot) */
    long sets, needs, telling;
    long gguf_sets, gguf_needs;
    /* settings that it reads besides moei_family_common_keys */
    const char *keys;
    /* its own program's defaults for missing settings, where they differ from the preset */
    const char *defaults;
    /* GGUF: llama.cpp's defaults; a key without which llama.cpp refuses the file (NULL: none) */
    const char *gguf_defaults, *gguf_key;
} moei_family;

#define MOEI_SETS_QWEN (MOEI_SET_GATE | MOEI_SET_PROJ | MOEI_SET_FUSED)
#define MOEI_SETS_DEEPSEEK (MOEI_SETS_QWEN | MOEI_SET_SHARED_EXPERTS)
#define MOEI_KEYS_DEEPSEEK \
    "norm_topk_prob routed_scaling_factor n_group topk_group n_shared_experts " \
    "expert_weights_norm expert_weights_scale expert_gating_func expert_group_count expert_group_used_count"
/* llama.cpp compares groups by their two largest p, whatever the family's own program does. */
#define MOEI_GGUF_DEEPSEEK "weight=raw select=top_k groups=1 groups_kept=1 group_score=top2_sum scale=1"

static const moei_family moei_families[] = {
    {"mixtral", "mixtral", "mixtral", "llama",
     MOEI_SET_GATE | MOEI_SET_W123 | MOEI_SET_FUSED,
     MOEI_SET_GATE, 0,
     MOEI_SET_G_EXPERTS, MOEI_SET_G_EXPERTS,
     "", "top_k=2", "", NULL},
    {"phi35_moe", "phi35_moe", "phimoe", "phimoe",
     MOEI_SET_GATE | MOEI_SET_W123 | MOEI_SET_FUSED,
     MOEI_SET_GATE, -1,
     MOEI_SET_G_EXPERTS, MOEI_SET_G_EXPERTS,
     "router_jitter_noise", "top_k=2", "weight=softmax sparsemixer_sample=0", NULL},
    {"minimax_m2", "minimax_m2", "minimax_m2", "minimax-m2",
     MOEI_SET_GATE | MOEI_SET_W123 | MOEI_SET_FUSED | MOEI_SET_TOP_CORRECTION,
     MOEI_SET_GATE | MOEI_SET_TOP_CORRECTION, 0,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_CORRECTION, MOEI_SET_G_EXPERTS | MOEI_SET_G_CORRECTION,
     "scoring_func expert_gating_func", "", "", "expert_gating_func"},
    {"qwen2_moe", "qwen2_moe", "qwen2_moe", "qwen2moe",
     MOEI_SETS_QWEN | MOEI_SET_SHARED | MOEI_SET_SHARED_GATE,
     MOEI_SET_GATE | MOEI_SET_SHARED | MOEI_SET_SHARED_GATE, 0,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED | MOEI_SET_G_SHARED_GATE,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED | MOEI_SET_G_SHARED_GATE,
     "norm_topk_prob", "top_k=4", "", NULL},
    {"qwen3_next", "qwen2_moe", "qwen3_next", "qwen3next",
     MOEI_SETS_QWEN | MOEI_SET_SHARED | MOEI_SET_SHARED_GATE,
     MOEI_SET_GATE | MOEI_SET_SHARED | MOEI_SET_SHARED_GATE, -1,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED | MOEI_SET_G_SHARED_GATE,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED | MOEI_SET_G_SHARED_GATE,
     "norm_topk_prob", "top_k=10 weight=sum", "weight=sum", NULL},
    {"qwen3_moe", "qwen3_moe", "qwen3_moe", "qwen3moe",
     MOEI_SETS_QWEN,
     MOEI_SET_GATE, 0,
     MOEI_SET_G_EXPERTS, MOEI_SET_G_EXPERTS,
     "norm_topk_prob", "weight=raw", "", NULL},
    {"olmoe", "olmoe", "olmoe", "olmoe",
     MOEI_SETS_QWEN,
     MOEI_SET_GATE, 0,
     MOEI_SET_G_EXPERTS, MOEI_SET_G_EXPERTS,
     "norm_topk_prob", "", "", NULL},
    {"deepseek_v2", "deepseek_v2", "deepseek_v2", "deepseek2",
     MOEI_SETS_DEEPSEEK,
     MOEI_SET_GATE, MOEI_SET_SHARED_EXPERTS,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED, MOEI_SET_G_EXPERTS,
     MOEI_KEYS_DEEPSEEK " topk_method scoring_func", "select=top_k groups=1 groups_kept=1 scale=1",
     "gate=softmax " MOEI_GGUF_DEEPSEEK, NULL},
    {"deepseek_v3", "deepseek_v3", "deepseek_v3 deepseek_v32 kimi_k2", "deepseek2",
     MOEI_SETS_DEEPSEEK | MOEI_SET_CORRECTION,
     MOEI_SET_GATE | MOEI_SET_CORRECTION, 0,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED | MOEI_SET_G_CORRECTION, MOEI_SET_G_EXPERTS | MOEI_SET_G_CORRECTION,
     MOEI_KEYS_DEEPSEEK " topk_method scoring_func", "", "gate=softmax " MOEI_GGUF_DEEPSEEK, NULL},
    {"glm4_moe", "deepseek_v3", "glm4_moe", "glm4moe",
     MOEI_SETS_DEEPSEEK | MOEI_SET_CORRECTION,
     MOEI_SET_GATE | MOEI_SET_CORRECTION, -1,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED | MOEI_SET_G_CORRECTION, MOEI_SET_G_EXPERTS | MOEI_SET_G_CORRECTION,
     MOEI_KEYS_DEEPSEEK, "groups=1 groups_kept=1 scale=1", "gate=sigmoid " MOEI_GGUF_DEEPSEEK, NULL},
    {"dots1", "deepseek_v3", "dots1", "dots1",
     MOEI_SETS_DEEPSEEK | MOEI_SET_CORRECTION,
     MOEI_SET_GATE | MOEI_SET_CORRECTION, -1,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED | MOEI_SET_G_CORRECTION, MOEI_SET_G_EXPERTS,
     MOEI_KEYS_DEEPSEEK, "groups=1 groups_kept=1 scale=1 weight=raw", MOEI_GGUF_DEEPSEEK, "expert_gating_func"},
    {"llama4", "llama4", "llama4 llama4_text", "llama4",
     MOEI_SET_ROUTER | MOEI_SET_TRANSPOSED | MOEI_SET_SHARED,
     MOEI_SET_ROUTER | MOEI_SET_SHARED, 0,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED, MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED,
     "", "", "", NULL},
    {"gpt_oss", "gpt_oss", "gpt_oss", "gpt-oss",
     MOEI_SET_ROUTER | MOEI_SET_ROUTER_BIAS | MOEI_SET_INTERLEAVED | MOEI_SET_MXFP4,
     MOEI_SET_ROUTER | MOEI_SET_ROUTER_BIAS | MOEI_SET_INTERLEAVED, 0,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_BIASES | MOEI_SET_G_ROUTER_BIAS,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_BIASES | MOEI_SET_G_ROUTER_BIAS,
     "swiglu_limit swiglu_alpha", "", "", NULL},
    {"granite_moe", "granite_moe", "granitemoe", "granitemoe granite-moe",
     MOEI_SET_ROUTER_LAYER | MOEI_SET_LINEAR,
     MOEI_SET_ROUTER_LAYER | MOEI_SET_LINEAR, 0,
     MOEI_SET_G_EXPERTS, MOEI_SET_G_EXPERTS,
     "", "top_k=2", "", NULL},
    {"granite_moe_shared", "granite_moe", "granitemoeshared", "granitemoe",
     MOEI_SET_ROUTER_LAYER | MOEI_SET_LINEAR | MOEI_SET_SHARED_LINEAR,
     MOEI_SET_ROUTER_LAYER | MOEI_SET_LINEAR, -1,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED, MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED,
     "", "top_k=2", "", NULL},
    {"deepseek", "deepseek_v2", "", "deepseek",
     MOEI_SETS_DEEPSEEK,
     MOEI_SET_GATE, -1,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED, MOEI_SET_G_EXPERTS,
     "expert_weights_scale", "", "gate=softmax " MOEI_GGUF_DEEPSEEK, NULL},
    {"ernie4_5_moe", "qwen3_moe", "ernie4_5_moe", "ernie4_5-moe",
     MOEI_SETS_DEEPSEEK | MOEI_SET_STATICS,
     MOEI_SET_GATE, -1,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED | MOEI_SET_G_CORRECTION, MOEI_SET_G_EXPERTS,
     "moe_num_experts moe_k moe_num_shared_experts", "top_k=6", "", NULL},
    {"hunyuan_moe", "qwen3_moe", "hunyuan_v1_moe", "hunyuan-moe",
     MOEI_SET_WG | MOEI_SET_PROJ | MOEI_SET_FUSED | MOEI_SET_SHARED_MLP,
     MOEI_SET_WG | MOEI_SET_SHARED_MLP, -1,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED, MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED,
     "moe_topk", "top_k=1", "", NULL},
    {"bailing_moe", "deepseek_v2", "", "bailingmoe",
     MOEI_SETS_DEEPSEEK,
     MOEI_SET_GATE, -1,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED, MOEI_SET_G_EXPERTS,
     "expert_weights_norm expert_weights_scale", "", "gate=softmax " MOEI_GGUF_DEEPSEEK, NULL},
    {"bailing_moe_v2", "deepseek_v3", "", "bailingmoe2",
     MOEI_SETS_DEEPSEEK | MOEI_SET_CORRECTION,
     MOEI_SET_GATE, -1,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED | MOEI_SET_G_CORRECTION, MOEI_SET_G_EXPERTS,
     MOEI_KEYS_DEEPSEEK, "", MOEI_GGUF_DEEPSEEK, "expert_gating_func"},
    {"lfm2_moe", "minimax_m2", "lfm2_moe", "lfm2moe",
     MOEI_SET_GATE | MOEI_SET_W123 | MOEI_SET_FUSED | MOEI_SET_EXPERT_BIAS,
     MOEI_SET_GATE, -1,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_CORRECTION, MOEI_SET_G_EXPERTS,
     "norm_topk_prob routed_scaling_factor expert_gating_func expert_weights_scale", "top_k=4", "",
     "expert_gating_func"},
    {"dbrx", "dbrx", "", "dbrx",
     0, 0, -1,
     MOEI_SET_G_EXPERTS, MOEI_SET_G_EXPERTS,
     "", "", "", NULL},
    {"grok", "grok1", "", "grok",
     0, 0, -1,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_BESIDE, MOEI_SET_G_EXPERTS,
     "", "", "weight=sum", NULL},
    {NULL, NULL, NULL, NULL, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL}};

/* Settings that every family reads, from config.json and from GGUF metadata. */
static const char moei_family_common_keys[] =
    "num_experts num_local_experts n_routed_experts hidden_size moe_intermediate_size num_experts_per_tok "
    "experts_per_token hidden_act expert_count expert_used_count";

/* A row with a value applies `settings` when the key has that value. A row without one (NULL)
   stores a number in the field named `settings`. GGUF keys follow "ARCH.". */
typedef struct moei_setting {
    const char *key, *value, *settings;
    int zero; /* 1: 0 is allowed and means that the key is absent */
} moei_setting;

static const moei_setting moei_settings[] = {
    {"num_experts", NULL, "n_experts", 0},
    {"num_local_experts", NULL, "n_experts", 0},
    {"n_routed_experts", NULL, "n_experts", 0},
    {"hidden_size", NULL, "d_model", 0},
    {"moe_intermediate_size", NULL, "d_ff", 0},
    {"experts_per_token", NULL, "top_k", 0},
    {"num_experts_per_tok", NULL, "top_k", 0}, /* gpt_oss has both, and its program reads this one */
    {"moe_num_experts", NULL, "n_experts", 0},
    {"moe_k", NULL, "top_k", 0},
    {"moe_topk", NULL, "top_k", 0},
    {"moe_num_shared_experts", NULL, "n_shared", 1},
    {"n_group", NULL, "groups", 1},
    {"topk_group", NULL, "groups_kept", 1},
    {"n_shared_experts", NULL, "n_shared", 1},
    {"routed_scaling_factor", NULL, "scale", 0},
    {"swiglu_limit", NULL, "swiglu_limit", 0},
    {"swiglu_alpha", NULL, "swiglu_alpha", 0},
    {"router_jitter_noise", NULL, "sparsemixer_eps", 0},
    {"norm_topk_prob", "true", "weight=sum", 0},
    {"norm_topk_prob", "false", "weight=raw", 0},
    {"scoring_func", "softmax", "gate=softmax", 0},
    {"scoring_func", "sigmoid", "gate=sigmoid", 0},
    {"scoring_func", "sqrtsoftplus", "gate=sqrt_softplus", 0},
    {"topk_method", "greedy", "select=top_k", 0},
    {"topk_method", "group_limited_greedy", "select=grouped_top_k group_score=max", 0},
    {"topk_method", "noaux_tc", "select=grouped_top_k group_score=top2_sum", 0},
    {"hidden_act", "silu", "", 0},
    {"hidden_act", "swish", "", 0},
    {"expert_count", NULL, "n_experts", 0},
    {"expert_used_count", NULL, "top_k", 0},
    {"expert_group_count", NULL, "groups", 1},
    {"expert_group_used_count", NULL, "groups_kept", 1},
    {"expert_weights_scale", NULL, "scale", 1},
    {"expert_weights_norm", "true", "weight=sum", 0},
    {"expert_weights_norm", "false", "weight=raw", 0},
    {"expert_gating_func", "0", "", 0},
    {"expert_gating_func", "1", "gate=softmax", 0},
    {"expert_gating_func", "2", "gate=sigmoid", 0},
    {"expert_gating_func", "3", "weight=softmax", 0},
    {"expert_gating_func", "4", "gate=sqrt_softplus", 0},
    {NULL, NULL, NULL, 0}};

/* ---- >>sources of bytes ---- */

static moe_status moei_import_memory_read(void *ctx, uint64_t at, void *to, size_t size) {
    memcpy(to, (const unsigned char *)ctx + (size_t)at, size);
    return MOE_OK;
}

moe_import_source moe_import_memory(const char *name, const void *bytes, size_t size) {
    moe_import_source s;
    s.name = name;
    s.size = bytes != NULL ? size : 0;
    memcpy(&s.ctx, &bytes, sizeof s.ctx); /* is only read */
    s.read_at = moei_import_memory_read;
    return s;
}

/* What follows "prefix." in text; NULL if text does not start with it. */
static const char *moei_import_suffix(const char *text, const char *prefix) {
    while (*prefix != '\0' && *text == *prefix) {
        text++;
        prefix++;
    }
    return *prefix == '\0' && *text == '.' ? text + 1 : NULL;
}

/* Opens files by name. open returns MOE_ERR_NOT_FOUND when there is no such file. */
typedef struct moei_import_folder {
    void *ctx;
    moe_status (*open)(void *ctx, const char *name, moe_import_source *source, moe_error *error);
    void (*close)(void *ctx, moe_import_source *source);
    const char *(*reason)(void *ctx); /* why the last read failed; NULL: use the status text */
    /* maps an open file and returns the function that unmaps it; NULL: files cannot be mapped */
    void *(*map)(void *ctx, const char *name, size_t size, void (**release)(void *memory, size_t size));
} moei_import_folder;

enum {
    MOEI_IMPORT_NAME = 256,
    MOEI_IMPORT_SUFFIX = 64,
    MOEI_IMPORT_VALUE = 64,
    MOEI_IMPORT_CHUNK = 1024,
    MOEI_IMPORT_PREFIX = 180
};
/* largest config.json in bytes */
#define MOEI_IMPORT_CONFIG ((size_t)(SIZE_MAX > 65535 ? 1048576 : 32768))

/* An open file. For safetensors, bytes holds the header. */
typedef struct moei_import_shard {
    struct moei_import_shard *next;
    struct moei_import_shard *part; /* the next part of a split GGUF file; NULL: none */
    uint64_t kv_at, infos_at, data_at; /* of GGUF: offsets of metadata, tensor descriptions, data */
    size_t n_kv, n_tensors;
    uint32_t split_no, split_count; /* index of this part and number of parts; 0: not split */
    uint32_t split_tensors;         /* number of tensors of all parts; 0: not stated */
    moe_import_source source;
    moe_buffer bytes;
    moe_file file;
    const unsigned char *mapped; /* models: its bytes in memory, which outlive the import; NULL: not yet mapped */
    char name[MOEI_IMPORT_NAME];
    char shown[44]; /* name, or the end of a long one, so that messages have room for the reason */
} moei_import_shard;

struct moei_zip;

/* An element type. A moe_external_type of this header is always the first member of one. */
typedef struct moei_block_type {
    moe_external_type external; /* bytes 0: not supported */
    int code;                   /* number in GGUF, or MOEI_TYPE_ */
    int dtype;                  /* of unblocked elements; MOE_DTYPE_COUNT: blocks, or not supported */
    /* unpacks a block into codes; NULL: no blocks */
    void (*codes)(const unsigned char *block, signed char *code, moe_real *scale, moe_real *minimum);
    void (*zip)(const struct moei_zip *f); /* the same for 16 rows with SIMD; NULL: not available */
} moei_block_type;

/* Location of the scales of a tensor that stores them separately: [..., rows, columns]. */
typedef struct moei_import_scales {
    const struct moei_import_shard *shard; /* NULL: no such scales */
    uint64_t at;
    size_t bytes;
    size_t width;          /* scales in a row */
    size_t rows, columns;  /* of the tensor that share one scale */
} moei_import_scales;

/* A tensor of the layer, as found in a file. */
typedef struct moei_import_tensor {
    /* its name after the prefix, truncated; no known name is this long */
    char suffix[MOEI_IMPORT_SUFFIX];
    const moei_import_shard *shard;
    uint64_t at;            /* offset of its data in the file */
    size_t count, bytes;
    const moei_block_type *type; /* in GGUF, and of FP8 and MXFP4; NULL: unknown */
    int dtype, n_dims;      /* dtype MOE_DTYPE_COUNT: blocks, or not supported */
    int code;               /* type number in GGUF */
    size_t shape[MOE_FILE_MAX_DIMS];
    const moei_tensor_name *row;
    size_t expert;
    int block;              /* models: its block; -1: outside the blocks */
    moei_import_scales scales;
} moei_import_tensor;

enum { MOEI_IMPORT_FILE = 0, MOEI_IMPORT_INDEX, MOEI_IMPORT_GGUF };
enum { MOEI_VALUE_NONE = 0, MOEI_VALUE_SCALAR, MOEI_VALUE_TEXT, MOEI_VALUE_OTHER };

/* One key of GGUF metadata, without the architecture in front. */
typedef struct moei_gguf_fact {
    char key[MOEI_IMPORT_SUFFIX]; /* truncated; no known key is this long */
    char text[MOEI_IMPORT_VALUE]; /* of a number, a boolean or a string */
    int kind;                     /* MOEI_VALUE_ */
    uint32_t type;
    uint64_t at;                  /* offset of the value in the first file */
} moei_gguf_fact;

typedef struct moei_gguf_facts {
    char arch[MOEI_IMPORT_VALUE];
    moe_buffer keys; /* array of moei_gguf_fact */
} moei_gguf_facts;

/* State of one import. error is never NULL. */
typedef struct moei_importer {
    const moei_import_folder *folder;
    moe_allocator allocator;
    moe_error *error;
    int kind;
    /* all open files, last opened first; the file that the call names */
    moei_import_shard *shards, *first;
    moe_buffer index, config;   /* JSON texts */
    size_t weight_map, text_config; /* offsets of these objects in the texts; 0: absent */
    moei_gguf_facts gguf;
    char prefix[MOEI_IMPORT_NAME];
    const char *part;           /* models: what was cut off in front of the names in found ("mlp."), or NULL */
    /* arrays of moei_import_tensor; listed: entries of the index (only suffix and shard are set) */
    moe_buffer found, listed;
    moe_buffer all, parts;      /* the same of all tensors of a model, and of those of one block */
    size_t block;               /* index into settings that are lists with one element per block */
    int by_block;               /* 1: block is set */
    int is_model;               /* 1: a whole model, not a layer */
    const moei_family *family;
    const moe_preset *preset;   /* of the caller, or NULL */
    const char *changes;        /* settings of the caller, after the preset's name, or NULL */
    int by_type;                /* 1: model_type or general.architecture chose the family */
    size_t sizes[4];            /* E, H, I, S; 0: not known yet */
    moe_layer_config settings;
} moei_importer;

static moe_status moei_import_read_at(const moei_importer *r, const moei_import_shard *shard, uint64_t at, void *to,
                                      size_t size) {
    moe_status status;
    if (at > shard->source.size || size > shard->source.size - at)
        return moei_error(r->error, MOE_ERR_FORMAT, "%s: the file ends before byte %z",
                      shard->shown, (size_t)at + size);
    status = size > 0 ? shard->source.read_at(shard->source.ctx, at, to, size) : MOE_OK;
    if (status == MOE_OK) return MOE_OK;
    return moei_error(r->error, status, "%s: cannot read at byte %z: %s", shard->shown, (size_t)at,
                      r->folder->reason != NULL ? r->folder->reason(r->folder->ctx) : moe_status_text(status));
}

static moe_status moei_import_read_start(moei_importer *r, const moei_import_shard *shard, size_t size,
                                         moe_buffer *buffer) {
    moe_status status;
    memset(buffer, 0, sizeof *buffer);
    buffer->allocator = r->allocator;
    status = moei_buffer_reserve(buffer, size + 1);
    if (status != MOE_OK)
        return moei_error(r->error, status, "%s: no memory for %z bytes of the file", shard->shown, size);
    buffer->size = size;
    return moei_import_read_at(r, shard, 0, buffer->data, size);
}

/* An empty text. moei_put appends to it, truncated to room, with a terminating zero. */
static moei_text moei_import_text(char *out, size_t room) {
    moei_text t;
    t.out = out;
    t.room = room;
    t.length = 0;
    out[0] = '\0';
    return t;
}

static void moei_import_copy(char *to, size_t room, const char *from) {
    moei_text t = moei_import_text(to, room);
    moei_put(&t, from, moei_strlen(from));
}

/* Copies a text; if it is longer than room, only its end, after dots. */
static void moei_import_show(const char *from, char *to, size_t room) {
    const size_t length = moei_strlen(from);
    const int cut = length >= room;
    moei_text t = moei_import_text(to, room);
    moei_put(&t, "...", cut ? 3 : 0);
    from += cut ? length - (room - 4) : 0;
    moei_put(&t, from, moei_strlen(from));
}

/* Opens a file of the folder. MOE_ERR_NOT_FOUND, without a message, when it does not exist. */
static moe_status moei_import_shard_open(moei_importer *r, const char *name, moei_import_shard **shard) {
    moei_import_shard *s = (moei_import_shard *)moei_alloc(&r->allocator, 1, sizeof *s);
    moe_status status;
    if (s == NULL) return moei_error(r->error, MOE_ERR_MEMORY, "no memory to open a file");
    status = r->folder->open(r->folder->ctx, name, &s->source, r->error);
    if (status == MOE_OK && s->source.read_at == NULL)
        status = moei_error(r->error, MOE_ERR_ARGUMENT, "a source's read_at is NULL");
    if (status != MOE_OK) {
        moei_free(&r->allocator, s, sizeof *s);
        return status;
    }
    moei_import_copy(s->name, sizeof s->name, name);
    moei_import_show(s->name, s->shown, sizeof s->shown);
    s->next = r->shards;
    r->shards = *shard = s;
    return MOE_OK;
}

static void moei_importer_close(moei_importer *r) {
    while (r->shards != NULL) {
        moei_import_shard *s = r->shards;
        r->shards = s->next;
        if (r->folder->close != NULL) r->folder->close(r->folder->ctx, &s->source);
        moe_buffer_free(&s->bytes);
        moei_free(&r->allocator, s, sizeof *s);
    }
    moe_buffer_free(&r->index);
    moe_buffer_free(&r->config);
    moe_buffer_free(&r->gguf.keys);
    moe_buffer_free(&r->all);
    moe_buffer_free(&r->parts);
    moe_buffer_free(&r->found);
    moe_buffer_free(&r->listed);
}

/* Puts the file name in front of an error message. */
static moe_status moei_import_error_in(const moei_importer *r, const char *name, moe_status status) {
    moe_error why = *r->error;
    if (status == MOE_OK) return status;
    return moei_error(r->error, status, "%s, %s", name, why.message);
}

/* Reads and checks the header of a safetensors file. */
static moe_status moei_import_shard_header(moei_importer *r, moei_import_shard *s) {
    unsigned char first[8];
    uint64_t length;
    moe_status status = moei_import_read_at(r, s, 0, first, sizeof first);
    if (status != MOE_OK) return status;
    length = moei_load(first, 8);
    if (s->source.size > (uint64_t)(size_t)-1 / 2)
        return moei_error(r->error, MOE_ERR_OVERFLOW, "%s: the file is too large for size_t", s->shown);
    if (length == 0 || length > MOEI_FILE_MAX_HEADER || length > s->source.size - 8) {
        const char *many = length > MOEI_FILE_MAX_HEADER ? "more than 100000000" : length == 0 ? "no" : "too many";
        return moei_error(r->error, MOE_ERR_FORMAT,
                          "%s: not a safetensors file: its header would have %s bytes, the file has %z", s->shown, many,
                          (size_t)s->source.size);
    }
    status = moei_import_read_start(r, s, 8 + (size_t)length, &s->bytes);
    if (status != MOE_OK) return status;
    return moei_import_error_in(r, s->shown,
                                moei_file_check(&s->file, s->bytes.data, (size_t)s->source.size, 1, r->error));
}

/* ---- >>gguf ---- */

enum { MOEI_GGUF_BOOL = 7, MOEI_GGUF_STRING = 8, MOEI_GGUF_ARRAY = 9, MOEI_GGUF_TYPES = 13, MOEI_GGUF_DEPTH = 4 };

/* Bytes of a value, by type; 0: strings and arrays. */
static const unsigned char moei_gguf_sizes[MOEI_GGUF_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

/* A buffered reader of a file. After an error it returns zeros. */
typedef struct moei_gguf {
    const moei_importer *r;
    const moei_import_shard *file;
    uint64_t at, base;
    uint64_t end; /* of the last tensor's data, relative to the start of the data */
    size_t have;
    moe_status status;
    unsigned char window[256];
} moei_gguf;

static void moei_gguf_begin(moei_gguf *g, const moei_importer *r, const moei_import_shard *file, uint64_t at) {
    memset(g, 0, sizeof *g);
    g->r = r;
    g->file = file;
    g->at = at;
}

static uint64_t moei_gguf_left(const moei_gguf *g) { return g->file->source.size - g->at; }

static void moei_gguf_refuse(moei_gguf *g, moe_status status, const char *what) {
    if (g->status == MOE_OK)
        g->status = moei_error(g->r->error, status, "%s: byte %z: %s", g->file->shown, (size_t)g->at, what);
}

static void moei_gguf_read(moei_gguf *g, void *to, size_t n) {
    unsigned char *p = (unsigned char *)to;
    while (n > 0 && g->status == MOE_OK) {
        size_t from = (size_t)(g->at - g->base), some;
        if (g->at < g->base || g->at - g->base >= g->have) {
            from = 0;
            g->base = g->at;
            g->have = moei_gguf_left(g) < sizeof g->window ? (size_t)moei_gguf_left(g) : sizeof g->window;
            if (g->have == 0) moei_gguf_refuse(g, MOE_ERR_FORMAT, "the file ends here, but more data is expected");
            else g->status = moei_import_read_at(g->r, g->file, g->base, g->window, g->have);
            if (g->status != MOE_OK) break;
        }
        some = g->have - from < n ? g->have - from : n;
        memcpy(p, g->window + from, some);
        p += some;
        n -= some;
        g->at += some;
    }
    if (n > 0) memset(p, 0, n);
}

static uint64_t moei_gguf_number(moei_gguf *g, int bytes) {
    unsigned char p[8];
    moei_gguf_read(g, p, (size_t)bytes);
    return moei_load(p, bytes);
}

static void moei_gguf_skip_bytes(moei_gguf *g, uint64_t count, size_t size) {
    if (g->status != MOE_OK) return;
    if (count > moei_gguf_left(g) / size)
        moei_gguf_refuse(g, MOE_ERR_FORMAT, "a length goes beyond the end of the file");
    else g->at += count * size;
}

/* Reads a string, truncated to room. */
static void moei_gguf_string(moei_gguf *g, char *to, size_t room) {
    uint64_t length = moei_gguf_number(g, 8), keep = length < room - 1 ? length : room - 1;
    size_t i;
    to[0] = '\0';
    if (g->status == MOE_OK && length > moei_gguf_left(g))
        moei_gguf_refuse(g, MOE_ERR_FORMAT, "a string goes beyond the end of the file");
    if (g->status != MOE_OK) return;
    moei_gguf_read(g, to, (size_t)keep);
    to[keep] = '\0';
    /* a zero byte would truncate the name, which could then look like a known one */
    for (i = 0; i < (size_t)keep; i++)
        if ((unsigned char)to[i] < 0x20) to[i] = '?';
    moei_gguf_skip_bytes(g, length - keep, 1);
}

/* Skips a value; arrays may nest. */
static void moei_gguf_skip_value(moei_gguf *g, uint32_t type) {
    uint64_t left[MOEI_GGUF_DEPTH], n;
    uint32_t types[MOEI_GGUF_DEPTH];
    int depth = 0;
    char none[1];
    memset(left, 0, sizeof left);
    memset(types, 0, sizeof types);
    for (;;) {
        if (type >= MOEI_GGUF_TYPES) moei_gguf_refuse(g, MOE_ERR_FORMAT, "unknown value type");
        else if (type == MOEI_GGUF_STRING) moei_gguf_string(g, none, 1);
        else if (type != MOEI_GGUF_ARRAY) moei_gguf_skip_bytes(g, 1, moei_gguf_sizes[type]);
        else {
            type = (uint32_t)moei_gguf_number(g, 4);
            n = moei_gguf_number(g, 8);
            if (type < MOEI_GGUF_TYPES && moei_gguf_sizes[type] > 0) moei_gguf_skip_bytes(g, n, moei_gguf_sizes[type]);
            else if (depth == MOEI_GGUF_DEPTH) moei_gguf_refuse(g, MOE_ERR_UNSUPPORTED, "arrays are nested too deeply");
            else {
                types[depth] = type;
                left[depth++] = n;
            }
        }
        while (depth > 0 && left[depth - 1] == 0) depth--;
        if (depth == 0 || g->status != MOE_OK) return;
        left[depth - 1]--;
        type = types[depth - 1];
    }
}

/* Reads a value as text and returns its kind (MOEI_VALUE_). */
static int moei_gguf_value(moei_gguf *g, uint32_t type, char text[MOEI_IMPORT_VALUE]) {
    unsigned char p[8];
    moei_text t = moei_import_text(text, MOEI_IMPORT_VALUE);
    if (type == MOEI_GGUF_STRING) {
        moei_gguf_string(g, text, MOEI_IMPORT_VALUE);
        return MOEI_VALUE_TEXT;
    }
    if (type >= MOEI_GGUF_TYPES || type == MOEI_GGUF_ARRAY) {
        moei_gguf_skip_value(g, type);
        return MOEI_VALUE_OTHER;
    }
    moei_gguf_read(g, p, moei_gguf_sizes[type]);
    if (type == MOEI_GGUF_BOOL) moei_put(&t, p[0] != 0 ? "true" : "false", p[0] != 0 ? 4 : 5);
    else if (type == 6) moei_put_real(&t, (moe_real)moei_binary32((uint32_t)moei_load(p, 4)));
    else if (type == 12) moei_put_real(&t, moei_real_of_bits(moei_load(p, 8)));
    /* odd: signed */
    else if (type % 2 == 1) moei_put_integer(&t, moei_load_signed(p, moei_gguf_sizes[type]));
    else moei_put_unsigned(&t, moei_load(p, moei_gguf_sizes[type]));
    return MOEI_VALUE_SCALAR;
}

/* Reads a value and keeps it under its key. */
static void moei_gguf_keep(moei_gguf *g, const char *key, uint32_t type, moe_buffer *keys) {
    moei_gguf_fact fact;
    memset(&fact, 0, sizeof fact);
    moei_import_copy(fact.key, sizeof fact.key, key);
    fact.type = type;
    fact.at = g->at;
    fact.kind = moei_gguf_value(g, type, fact.text);
    keys->allocator = g->r->allocator;
    if (g->status == MOE_OK && moei_buffer_write(keys, &fact, sizeof fact) != MOE_OK)
        moei_gguf_refuse(g, MOE_ERR_MEMORY, "no memory for the metadata");
}

/* Reads an integer of 2 or 4 bytes into *number if the key has this name. Any other type is
   refused: without these keys the data would be looked for elsewhere. */
static int moei_gguf_key_number(moei_gguf *g, const char *key, const char *name, uint32_t type, uint32_t *number) {
    if (moei_strcmp(key, name) != 0) return 0;
    if (type >= 2 && type <= 5) *number = (uint32_t)moei_gguf_number(g, type < 4 ? 2 : 4);
    else if (g->status == MOE_OK)
        g->status = moei_error(g->r->error, MOE_ERR_FORMAT, "%s: %s must be an integer of 16 or 32 bits",
                               g->file->shown, name);
    return 1;
}

/* Reads the metadata. The first pass finds general.architecture, general.alignment and what a split
   file says of its parts; the second pass (behind_arch = 1) keeps the keys that start with the
   architecture. */
static void moei_gguf_metadata(moei_gguf *g, moei_gguf_facts *facts, moei_import_shard *file, uint32_t *alignment,
                               int behind_arch) {
    char key[MOEI_IMPORT_NAME];
    const char *behind;
    size_t i;
    for (i = 0; i < file->n_kv && g->status == MOE_OK; i++) {
        uint32_t type;
        int kind = MOEI_VALUE_NONE;
        moei_gguf_string(g, key, sizeof key);
        type = (uint32_t)moei_gguf_number(g, 4);
        behind = behind_arch ? moei_import_suffix(key, facts->arch) : NULL;
        if (behind != NULL) {
            moei_gguf_keep(g, behind, type, &facts->keys);
            kind = MOEI_VALUE_OTHER;
        } else if (!behind_arch && moei_strcmp(key, "general.architecture") == 0 && type == MOEI_GGUF_STRING) {
            kind = moei_gguf_value(g, type, facts->arch);
        } else if (!behind_arch && (moei_gguf_key_number(g, key, "general.alignment", type, alignment) ||
                                    moei_gguf_key_number(g, key, "split.no", type, &file->split_no) ||
                                    moei_gguf_key_number(g, key, "split.count", type, &file->split_count) ||
                                    moei_gguf_key_number(g, key, "split.tensors.count", type, &file->split_tensors)))
            kind = MOEI_VALUE_SCALAR;
        if (kind == MOEI_VALUE_NONE) moei_gguf_skip_value(g, type);
    }
}

/* ---- >>types: blocks as codes ---- */

/* Each function writes the codes of one block, and for every 32 or 16 of them a scale and, for some
   types, a minimum. Products of scales and codes are exact in float, so value = scale * code -
   minimum is rounded at most once. */

static moe_real moei_block_scale(const unsigned char *p) { return moei_from_f16((uint16_t)moei_load(p, 2)); }

/* Code i of 32: the low nibbles of 16 bytes come first. */
static int moei_block_nibble(const unsigned char *q, int i) { return i < 16 ? q[i] & 15 : q[i - 16] >> 4; }

static void moei_block_q4_0(const unsigned char *p, signed char *code, moe_real *scale, moe_real *minimum) {
    int i;
    for (i = 0; i < 32; i++) code[i] = (signed char)(moei_block_nibble(p + 2, i) - 8);
    *scale = moei_block_scale(p);
    (void)minimum;
}

static void moei_block_q4_1(const unsigned char *p, signed char *code, moe_real *scale, moe_real *minimum) {
    int i;
    for (i = 0; i < 32; i++) code[i] = (signed char)moei_block_nibble(p + 4, i);
    *scale = moei_block_scale(p);
    *minimum = -moei_block_scale(p + 2);
}

/* Code i with its fifth bit, which is in the 4 bytes before the nibbles. */
static int moei_block_five(const unsigned char *p, int i) {
    return moei_block_nibble(p + 4, i) | (p[i / 8] >> i % 8 & 1) << 4;
}

static void moei_block_q5_0(const unsigned char *p, signed char *code, moe_real *scale, moe_real *minimum) {
    int i;
    for (i = 0; i < 32; i++) code[i] = (signed char)(moei_block_five(p + 2, i) - 16);
    *scale = moei_block_scale(p);
    (void)minimum;
}

static void moei_block_q5_1(const unsigned char *p, signed char *code, moe_real *scale, moe_real *minimum) {
    int i;
    for (i = 0; i < 32; i++) code[i] = (signed char)moei_block_five(p + 4, i);
    *scale = moei_block_scale(p);
    *minimum = -moei_block_scale(p + 2);
}

static void moei_block_q8_0(const unsigned char *p, signed char *code, moe_real *scale, moe_real *minimum) {
    memcpy(code, p + 2, 32);
    *scale = moei_block_scale(p);
    (void)minimum;
}

static const signed char moei_iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                1,    13,   25,  38,  53,  69,  89,  113};

static void moei_block_iq4_nl(const unsigned char *p, signed char *code, moe_real *scale, moe_real *minimum) {
    int i;
    for (i = 0; i < 32; i++) code[i] = moei_iq4_values[moei_block_nibble(p + 2, i)];
    *scale = moei_block_scale(p);
    (void)minimum;
}

/* Twice the E2M1 values; moei_e8m0_half returns half of the stored power of two. Neither overflows
   where their product does not. */
static const signed char moei_fp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static moe_real moei_e8m0_half(unsigned e) {
    return (moe_real)moei_binary32(e < 2 ? (uint32_t)0x200000 << e : (uint32_t)(e - 1) << 23);
}

static void moei_block_mxfp4(const unsigned char *p, signed char *code, moe_real *scale, moe_real *minimum) {
    int i;
    for (i = 0; i < 32; i++) code[i] = moei_fp4_values[moei_block_nibble(p + 1, i)];
    *scale = moei_e8m0_half(p[0]);
    (void)minimum;
}

/* MXFP4 of safetensors: a byte holds two neighbors, the first one low; scales are separate. */
static void moei_block_mxfp4_pairs(const unsigned char *p, signed char *code, moe_real *scale, moe_real *minimum) {
    int i;
    for (i = 0; i < 32; i++) code[i] = moei_fp4_values[i % 2 == 0 ? p[i / 2] & 15 : p[i / 2] >> 4];
    (void)scale;
    (void)minimum;
}

/* Blocks of 256: element e is element l of 32 in part j of 8, which is part k of 4 in half h. */

static void moei_block_q2_k(const unsigned char *p, signed char *code, moe_real *scale, moe_real *minimum) {
    const moe_real d = moei_block_scale(p + 80), m = moei_block_scale(p + 82);
    int e;
    for (e = 0; e < 256; e++) code[e] = (signed char)(p[16 + 32 * (e / 128) + e % 32] >> 2 * (e / 32 % 4) & 3);
    for (e = 0; e < 16; e++) {
        scale[e] = d * (moe_real)(p[e] & 15);
        minimum[e] = m * (moe_real)(p[e] >> 4);
    }
}

static void moei_block_q3_k(const unsigned char *p, signed char *code, moe_real *scale, moe_real *minimum) {
    const unsigned char *q = p + 32, *s = p + 96;
    const moe_real d = moei_block_scale(p + 108);
    int e;
    for (e = 0; e < 256; e++) {
        const int h = e / 128, k = e / 32 % 4;
        const int l = e % 32;
        code[e] = (signed char)((q[32 * h + l] >> 2 * k & 3) - (p[l] >> (4 * h + k) & 1 ? 0 : 4));
    }
    for (e = 0; e < 16; e++) {
        const int six = (e < 8 ? s[e] & 15 : s[e - 8] >> 4) | (s[8 + e % 4] >> 2 * (e / 4) & 3) << 4;
        scale[e] = d * (moe_real)(six - 32);
    }
    (void)minimum;
}

/* Scale (offset 0) or minimum (offset 4) of part j, 6 bits each in 12 bytes. */
static int moei_block_six(const unsigned char *s, int j, int offset) {
    if (j < 4) return s[j + offset] & 63;
    return (offset == 0 ? s[j + 4] & 15 : s[j + 4] >> 4) | (s[j - 4 + offset] >> 6) << 4;
}

/* Q4_K, and with high bits Q5_K. */
static void moei_block_k(const unsigned char *p, const unsigned char *high, const unsigned char *q, signed char *code,
                         moe_real *scale, moe_real *minimum) {
    const moe_real d = moei_block_scale(p), m = moei_block_scale(p + 2);
    int e;
    for (e = 0; e < 256; e++) {
        const int j = e / 32, l = e % 32;
        const int byte = q[32 * (j / 2) + l];
        code[e] = (signed char)((j % 2 == 0 ? byte & 15 : byte >> 4) | (high != NULL ? (high[l] >> j & 1) << 4 : 0));
    }
    for (e = 0; e < 8; e++) {
        scale[e] = d * (moe_real)moei_block_six(p + 4, e, 0);
        minimum[e] = m * (moe_real)moei_block_six(p + 4, e, 4);
    }
}

static void moei_block_q4_k(const unsigned char *p, signed char *code, moe_real *scale, moe_real *minimum) {
    moei_block_k(p, NULL, p + 16, code, scale, minimum);
}

static void moei_block_q5_k(const unsigned char *p, signed char *code, moe_real *scale, moe_real *minimum) {
    moei_block_k(p, p + 16, p + 48, code, scale, minimum);
}

static void moei_block_q6_k(const unsigned char *p, signed char *code, moe_real *scale, moe_real *minimum) {
    const moe_real d = moei_block_scale(p + 208);
    int e;
    for (e = 0; e < 256; e++) {
        const int h = e / 128, k = e / 32 % 4;
        const int l = e % 32, low = p[64 * h + 32 * (k & 1) + l];
        code[e] = (signed char)(((k > 1 ? low >> 4 : low & 15) | (p[128 + 32 * h + l] >> 2 * k & 3) << 4) - 32);
    }
    for (e = 0; e < 16; e++) scale[e] = d * (moe_real)moei_load_signed(p + 192 + e, 1);
    (void)minimum;
}

static void moei_block_iq4_xs(const unsigned char *p, signed char *code, moe_real *scale, moe_real *minimum) {
    const moe_real d = moei_block_scale(p);
    const unsigned high = (unsigned)moei_load(p + 2, 2);
    int e;
    for (e = 0; e < 256; e++) code[e] = moei_iq4_values[moei_block_nibble(p + 8 + 16 * (e / 32), e % 32)];
    for (e = 0; e < 8; e++) {
        const int six = (p[4 + e / 2] >> 4 * (e & 1) & 15) | (int)(high >> 2 * e & 3u) << 4;
        scale[e] = d * (moe_real)(six - 32);
    }
    (void)minimum;
}

/* ---- rows of blocks ---- */

/* The block of a matrix that begins with element p of a row. */
static const unsigned char *moei_external_block(const moe_external *w, size_t row, size_t p) {
    return w->data + row * w->row + p / (size_t)w->type->block * w->column;
}

/* The scale of an element, for types that store scales separately. */
static const unsigned char *moei_external_scale(const moe_external *w, size_t row, size_t p, size_t bytes) {
    return w->scales + row / (size_t)w->scale_rows * w->scale_row + p / (size_t)w->scale_columns * bytes;
}

static const moei_block_type *moei_block_type_of(const moe_external *w) {
    return (const moei_block_type *)(const void *)w->type;
}

/* The codes of the block with element p of a row. */
static void moei_external_codes(const moe_external *w, size_t row, size_t p, signed char *code, moe_real *scale,
                                moe_real *minimum) {
    moei_block_type_of(w)->codes(moei_external_block(w, row, p), code, scale, minimum);
    if (w->scales != NULL) *scale = moei_e8m0_half(*moei_external_scale(w, row, p, 1));
}

/* The moe_external_type.unpack of block types. */
static void moei_unpack_blocks(const moe_kernels *k, const moe_external *w, size_t row, size_t from, size_t count,
                               moe_real *values) {
    const size_t block = (size_t)w->type->block, group = (size_t)w->type->group;
    moe_real scale[16], minimum[16] = {0};
    signed char code[256];
    size_t p, i;
    (void)k;
    for (p = 0; p < count; p += block, values += block) {
        moei_external_codes(w, row, from + p, code, scale, minimum);
        for (i = 0; i < block; i++) values[i] = scale[i / group] * (moe_real)code[i] - minimum[i / group];
    }
}

/* ---- >>kernels: 16 rows of blocks as a panel, in vectors ----

   Sixteen bytes of each row are loaded and transposed: vector q then holds quad q (four bytes) of
   all rows, as the panel does, so that codes and scales are computed for all rows at once. Small
   functions hide the instruction set. */

#if !defined(MOE_NO_QUANT) && defined(MOEI_HAVE_AVX2)
#define MOEI_HAVE_ZIPS
#define MOEI_ZIP_TARGET MOEI_AVX2_F16C
#define MOEI_ZIP MOEI_AVX2_F16C MOEI_INLINE
enum { MOEI_ZIP_LANES = 8 };
typedef __m256i moei_lanes;
typedef __m256 moei_float_lanes;

/* Sixteen bytes of the row at p and of the fourth row after it. */
MOEI_ZIP moei_lanes moei_lanes_load(const unsigned char *p, size_t row) {
    const __m128i low = _mm_loadu_si128((const __m128i *)(const void *)p);
    const __m128i high = _mm_loadu_si128((const __m128i *)(const void *)(p + 4 * row));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

/* The first four bytes of each row; the first byte of each row. */
MOEI_ZIP moei_lanes moei_lanes_load_4(const unsigned char *p, size_t row) {
    const unsigned char *q = p + 4 * row;
    return _mm256_setr_epi32(moei_get_32(p), moei_get_32(p + row), moei_get_32(p + 2 * row), moei_get_32(p + 3 * row),
                             moei_get_32(q), moei_get_32(q + row), moei_get_32(q + 2 * row), moei_get_32(q + 3 * row));
}

MOEI_ZIP moei_lanes moei_lanes_load_1(const unsigned char *p, size_t row) {
    const unsigned char *q = p + 4 * row;
    return _mm256_setr_epi32(*p, p[row], p[2 * row], p[3 * row], *q, q[row], q[2 * row], q[3 * row]);
}

/* a0 b0 a1 b1 of each 16 bytes; a2 b2 a3 b3. */
MOEI_ZIP moei_lanes moei_lanes_zip_low(moei_lanes a, moei_lanes b) { return _mm256_unpacklo_epi32(a, b); }
MOEI_ZIP moei_lanes moei_lanes_zip_high(moei_lanes a, moei_lanes b) { return _mm256_unpackhi_epi32(a, b); }
/* a0 a1 b0 b1; a2 a3 b2 b3. */
MOEI_ZIP moei_lanes moei_lanes_join_low(moei_lanes a, moei_lanes b) { return _mm256_unpacklo_epi64(a, b); }
MOEI_ZIP moei_lanes moei_lanes_join_high(moei_lanes a, moei_lanes b) { return _mm256_unpackhi_epi64(a, b); }

/* The first and the second four of the bytes a0 b0 a1 b1 a2 b2 a3 b3 of each lane. */
MOEI_ZIP void moei_lanes_zip_bytes(moei_lanes a, moei_lanes b, moei_lanes out[2]) {
    const __m256 low = _mm256_castsi256_ps(_mm256_unpacklo_epi8(a, b));
    const __m256 high = _mm256_castsi256_ps(_mm256_unpackhi_epi8(a, b));
    out[0] = _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88));
    out[1] = _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xdd));
}

MOEI_ZIP void moei_lanes_store(unsigned char *to, moei_lanes v) { _mm256_storeu_si256((__m256i *)(void *)to, v); }
MOEI_ZIP moei_lanes moei_lanes_splat(int byte) { return _mm256_set1_epi8((char)byte); }
MOEI_ZIP moei_lanes moei_lanes_and(moei_lanes a, moei_lanes b) { return _mm256_and_si256(a, b); }
MOEI_ZIP moei_lanes moei_lanes_or(moei_lanes a, moei_lanes b) { return _mm256_or_si256(a, b); }
MOEI_ZIP moei_lanes moei_lanes_add(moei_lanes a, moei_lanes b) { return _mm256_add_epi8(a, b); }
MOEI_ZIP moei_lanes moei_lanes_right(moei_lanes v, int bits) { return _mm256_srli_epi32(v, bits); }
MOEI_ZIP moei_lanes moei_lanes_left(moei_lanes v, int bits) { return _mm256_slli_epi32(v, bits); }
/* The highest byte of each lane, as an integer. */
MOEI_ZIP moei_lanes moei_lanes_signed(moei_lanes v) { return _mm256_srai_epi32(v, 24); }
/* Each byte minus 1; 0 stays 0. */
MOEI_ZIP moei_lanes moei_lanes_less(moei_lanes v) { return _mm256_subs_epu8(v, _mm256_set1_epi8(1)); }

/* The numbers of a table for bytes below 16. */
MOEI_ZIP moei_lanes moei_lanes_find(const unsigned char *table, moei_lanes v) {
    const __m128i all = _mm_loadu_si128((const __m128i *)(const void *)table);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(all), v);
}

MOEI_ZIP moei_float_lanes moei_lanes_to_float(moei_lanes v) { return _mm256_cvtepi32_ps(v); }
MOEI_ZIP moei_float_lanes moei_lanes_as_float(moei_lanes v) { return _mm256_castsi256_ps(v); }
MOEI_ZIP moei_float_lanes moei_float_lanes_mul(moei_float_lanes a, moei_float_lanes b) { return _mm256_mul_ps(a, b); }
MOEI_ZIP void moei_float_lanes_store(float *to, moei_float_lanes v) { _mm256_storeu_ps(to, v); }

/* The binary16 in the low half of each lane. */
MOEI_ZIP moei_float_lanes moei_lanes_from_f16(moei_lanes v) {
    const __m256i low = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 8);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}

/* Into L1, as two panels are a short distance; prefetching into L2 makes 4-bit types 5 % slower. */
MOEI_ZIP void moei_zip_prefetch(uintptr_t at) { _mm_prefetch((const char *)at, _MM_HINT_T0); }
#endif

#ifdef MOEI_HAVE_ZIPS
/* 16 rows of blocks, and their panel. */
typedef struct moei_zip {
    const unsigned char *data, *scale; /* of the first row; scale: of types that store scales separately */
    size_t row, scale_row, column, blocks;
    uintptr_t ahead; /* address to prefetch; no pointer, because it may lie behind the end */
    unsigned char *codes;
    float *scales, *minima;
} moei_zip;

/* Block `block` of MOEI_ZIP_LANES rows, which are `row` bytes apart. */
typedef struct moei_zip_step {
    const unsigned char *data, *scale;
    size_t row, scale_row, block;
    uintptr_t ahead;
    unsigned char *codes;
    float *scales, *minima;
} moei_zip_step;

/* Four quads of each row. */
typedef struct moei_quads {
    moei_lanes q0, q1, q2, q3;
} moei_quads;

MOEI_ZIP moei_quads moei_zip_quads(moei_zip_step *s, size_t at) {
    const unsigned char *p = s->data + at;
    const moei_lanes a = moei_lanes_load(p, s->row), b = moei_lanes_load(p + s->row, s->row);
    const moei_lanes c = moei_lanes_load(p + 2 * s->row, s->row), d = moei_lanes_load(p + 3 * s->row, s->row);
    const moei_lanes ab = moei_lanes_zip_low(a, b), cd = moei_lanes_zip_low(c, d);
    const moei_lanes ab2 = moei_lanes_zip_high(a, b), cd2 = moei_lanes_zip_high(c, d);
    moei_quads q;
    q.q0 = moei_lanes_join_low(ab, cd);
    q.q1 = moei_lanes_join_high(ab, cd);
    q.q2 = moei_lanes_join_low(ab2, cd2);
    q.q3 = moei_lanes_join_high(ab2, cd2);
    moei_zip_prefetch(s->ahead);
    moei_zip_prefetch(s->ahead + 64);
    s->ahead += 16 * MOEI_ZIP_LANES;
    return q;
}

/* The first four bytes of each row. */
MOEI_ZIP moei_lanes moei_zip_load_4(moei_zip_step *s, size_t at) {
    moei_zip_prefetch(s->ahead);
    s->ahead += 2 * MOEI_ZIP_LANES;
    return moei_lanes_load_4(s->data + at, s->row);
}

MOEI_ZIP moei_lanes moei_zip_low(moei_lanes v) { return moei_lanes_and(v, moei_lanes_splat(15)); }
MOEI_ZIP moei_lanes moei_zip_high(moei_lanes v) { return moei_zip_low(moei_lanes_right(v, 4)); }

/* For each quad i, which is one of the block's first four lines. */
#define MOEI_EACH_QUAD(X) X(0) X(1) X(2) X(3)

/* 32 codes of four bits, the low nibbles first: code + offset. */
MOEI_ZIP void moei_zip_nibbles(moei_zip_step *s, size_t at, int offset) {
    const moei_lanes more = moei_lanes_splat(offset);
    const moei_quads q = moei_zip_quads(s, at);
#define MOEI_NIBBLE_QUAD(i) \
    moei_lanes_store(s->codes + i * MOEI_LINE, moei_lanes_add(moei_zip_low(q.q##i), more)); \
    moei_lanes_store(s->codes + (i + 4) * MOEI_LINE, moei_lanes_add(moei_zip_high(q.q##i), more));
    MOEI_EACH_QUAD(MOEI_NIBBLE_QUAD)
#undef MOEI_NIBBLE_QUAD
}

/* The same with a table of codes + 128. */
MOEI_ZIP void moei_zip_table(moei_zip_step *s, size_t at, const unsigned char *table) {
    const moei_quads q = moei_zip_quads(s, at);
#define MOEI_TABLE_QUAD(i) \
    moei_lanes_store(s->codes + i * MOEI_LINE, moei_lanes_find(table, moei_zip_low(q.q##i))); \
    moei_lanes_store(s->codes + (i + 4) * MOEI_LINE, moei_lanes_find(table, moei_zip_high(q.q##i)));
    MOEI_EACH_QUAD(MOEI_TABLE_QUAD)
#undef MOEI_TABLE_QUAD
}

/* Scales in binary16 at the beginning of the block. */
MOEI_ZIP void moei_zip_halves(moei_zip_step *s) {
    moei_float_lanes_store(s->scales, moei_lanes_from_f16(moei_zip_load_4(s, 0)));
}

/* Half of 2^(e - 127); subnormal results become 0. */
MOEI_ZIP void moei_zip_powers(moei_zip_step *s, const unsigned char *e, size_t row) {
    moei_float_lanes_store(s->scales,
                           moei_lanes_as_float(moei_lanes_left(moei_lanes_less(moei_lanes_load_1(e, row)), 23)));
}

MOEI_ZIP void moei_zip_step_q8_0(moei_zip_step *s) {
    const moei_quads a = moei_zip_quads(s, 2), b = moei_zip_quads(s, 18);
    const moei_lanes sign = moei_lanes_splat(128);
#define MOEI_Q8_QUAD(i) \
    moei_lanes_store(s->codes + i * MOEI_LINE, moei_lanes_add(a.q##i, sign)); \
    moei_lanes_store(s->codes + (i + 4) * MOEI_LINE, moei_lanes_add(b.q##i, sign));
    MOEI_EACH_QUAD(MOEI_Q8_QUAD)
#undef MOEI_Q8_QUAD
    moei_zip_halves(s);
}

static const unsigned char moei_zip_iq4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
static const unsigned char moei_zip_fp4[16] = {128, 129, 130, 131, 132, 134, 136, 140,
                                               128, 127, 126, 125, 124, 122, 120, 116};

MOEI_ZIP void moei_zip_step_q4_0(moei_zip_step *s) {
    moei_zip_nibbles(s, 2, 120);
    moei_zip_halves(s);
}

MOEI_ZIP void moei_zip_step_iq4_nl(moei_zip_step *s) {
    moei_zip_table(s, 2, moei_zip_iq4);
    moei_zip_halves(s);
}

MOEI_ZIP void moei_zip_step_mxfp4(moei_zip_step *s) {
    moei_zip_table(s, 1, moei_zip_fp4);
    moei_zip_powers(s, s->data, s->row);
}

MOEI_ZIP void moei_zip_step_mxfp4_pairs(moei_zip_step *s) {
    const moei_quads q = moei_zip_quads(s, 0);
    moei_lanes both[2];
#define MOEI_PAIRS_QUAD(i) \
    moei_lanes_zip_bytes(moei_lanes_find(moei_zip_fp4, moei_zip_low(q.q##i)), \
                         moei_lanes_find(moei_zip_fp4, moei_zip_high(q.q##i)), both); \
    moei_lanes_store(s->codes + 2 * i * MOEI_LINE, both[0]); \
    moei_lanes_store(s->codes + (2 * i + 1) * MOEI_LINE, both[1]);
    MOEI_EACH_QUAD(MOEI_PAIRS_QUAD)
#undef MOEI_PAIRS_QUAD
    moei_zip_powers(s, s->scale + s->block, s->scale_row);
}

/* The scales and minima of a block of Q4_K or Q5_K. */
MOEI_ZIP void moei_zip_six(moei_zip_step *s) {
    const moei_lanes six = moei_lanes_right(moei_lanes_splat(63), 24), top = moei_lanes_right(moei_lanes_splat(48), 24);
    const moei_lanes byte = moei_lanes_right(moei_lanes_splat(255), 24);
    const moei_quads q = moei_zip_quads(s, 0);
    const moei_float_lanes d = moei_lanes_from_f16(q.q0), m = moei_lanes_from_f16(moei_lanes_right(q.q0, 16));
    int j;
    for (j = 0; j < 4; j++) {
        const moei_lanes scale = moei_lanes_right(q.q1, 8 * j), minimum = moei_lanes_right(q.q2, 8 * j);
        const moei_lanes rest = moei_lanes_and(moei_lanes_right(q.q3, 8 * j), byte);
        const moei_lanes scale2 = moei_lanes_or(moei_zip_low(rest), moei_lanes_and(moei_lanes_right(scale, 2), top));
        const moei_lanes minimum2 =
            moei_lanes_or(moei_zip_high(rest), moei_lanes_and(moei_lanes_right(minimum, 2), top));
        float *to = s->scales + j * MOEI_PANEL, *to_minimum = s->minima + j * MOEI_PANEL;
        moei_float_lanes_store(to, moei_float_lanes_mul(d, moei_lanes_to_float(moei_lanes_and(scale, six))));
        moei_float_lanes_store(to + 4 * MOEI_PANEL, moei_float_lanes_mul(d, moei_lanes_to_float(scale2)));
        moei_float_lanes_store(to_minimum, moei_float_lanes_mul(m, moei_lanes_to_float(moei_lanes_and(minimum, six))));
        moei_float_lanes_store(to_minimum + 4 * MOEI_PANEL, moei_float_lanes_mul(m, moei_lanes_to_float(minimum2)));
    }
}

MOEI_ZIP void moei_zip_step_q4_k(moei_zip_step *s) {
    const moei_lanes sign = moei_lanes_splat(128);
    size_t j;
    for (j = 0; j < 8; j++) {
        unsigned char *to = s->codes + (j / 2 * 16 + j % 2 * 4) * MOEI_LINE;
        const moei_quads q = moei_zip_quads(s, 16 + 16 * j);
#define MOEI_K_QUAD(i) \
    moei_lanes_store(to + i * MOEI_LINE, moei_lanes_or(moei_zip_low(q.q##i), sign)); \
    moei_lanes_store(to + (i + 8) * MOEI_LINE, moei_lanes_or(moei_zip_high(q.q##i), sign));
        MOEI_EACH_QUAD(MOEI_K_QUAD)
#undef MOEI_K_QUAD
    }
    moei_zip_six(s);
}

MOEI_ZIP void moei_zip_step_q5_k(moei_zip_step *s) {
    const moei_lanes sign = moei_lanes_splat(128), fifth = moei_lanes_splat(16);
    size_t half;
    int j;
    for (half = 0; half < 2; half++) {
        const moei_quads h = moei_zip_quads(s, 16 + 16 * half);
        for (j = 0; j < 4; j++) { /* moves bits 2 j and 2 j + 1 of h to bit 4 */
            unsigned char *to = s->codes + ((size_t)j * 16 + half * 4) * MOEI_LINE;
            const moei_quads q = moei_zip_quads(s, 48 + 32 * (size_t)j + 16 * half);
#define MOEI_HIGH_BIT(h, j) moei_lanes_and((j) < 4 ? moei_lanes_left(h, 4 - (j)) : moei_lanes_right(h, (j) - 4), fifth)
#define MOEI_K_QUAD(i) \
    moei_lanes_store(to + i * MOEI_LINE, \
                     moei_lanes_or(moei_lanes_or(moei_zip_low(q.q##i), MOEI_HIGH_BIT(h.q##i, 2 * j)), sign)); \
    moei_lanes_store(to + (i + 8) * MOEI_LINE, \
                     moei_lanes_or(moei_lanes_or(moei_zip_high(q.q##i), MOEI_HIGH_BIT(h.q##i, 2 * j + 1)), sign));
            MOEI_EACH_QUAD(MOEI_K_QUAD)
#undef MOEI_K_QUAD
#undef MOEI_HIGH_BIT
        }
    }
    moei_zip_six(s);
}

MOEI_ZIP void moei_zip_step_q6_k(moei_zip_step *s) {
    const moei_lanes top = moei_lanes_splat(48), offset = moei_lanes_splat(96);
    const moei_float_lanes d = moei_lanes_from_f16(moei_lanes_right(moei_zip_load_4(s, 206), 16));
    const moei_quads scale = moei_zip_quads(s, 192);
    size_t part;
    int j;
    for (part = 0; part < 4; part++) { /* 16 of the 32 low bytes of one half */
        unsigned char *to = s->codes + (part / 2 * 32 + part % 2 * 4) * MOEI_LINE;
        const moei_quads a = moei_zip_quads(s, part / 2 * 64 + part % 2 * 16);
        const moei_quads b = moei_zip_quads(s, part / 2 * 64 + part % 2 * 16 + 32);
        const moei_quads h = moei_zip_quads(s, 128 + part * 16);
#define MOEI_SIX_BITS(i, line, low, high) \
    moei_lanes_store(to + (i + line) * MOEI_LINE, \
                     moei_lanes_add(moei_lanes_or(low, moei_lanes_and(high, top)), offset));
#define MOEI_SIX_QUAD(i) \
    MOEI_SIX_BITS(i, 0, moei_zip_low(a.q##i), moei_lanes_left(h.q##i, 4)) \
    MOEI_SIX_BITS(i, 8, moei_zip_low(b.q##i), moei_lanes_left(h.q##i, 2)) \
    MOEI_SIX_BITS(i, 16, moei_zip_high(a.q##i), h.q##i) \
    MOEI_SIX_BITS(i, 24, moei_zip_high(b.q##i), moei_lanes_right(h.q##i, 2))
        MOEI_EACH_QUAD(MOEI_SIX_QUAD)
#undef MOEI_SIX_BITS
#undef MOEI_SIX_QUAD
    }
#define MOEI_SCALE_QUAD(i) \
    for (j = 0; j < 4; j++) \
        moei_float_lanes_store( \
            s->scales + (4 * i + j) * MOEI_PANEL, \
            moei_float_lanes_mul(d, moei_lanes_to_float(moei_lanes_signed(moei_lanes_left(scale.q##i, 24 - 8 * j)))));
    MOEI_EACH_QUAD(MOEI_SCALE_QUAD)
#undef MOEI_SCALE_QUAD
}

/* All blocks of a panel; the lines of the next 16 rows are prefetched. */
#define MOEI_ZIP_FUNCTION(name, numbers, groups) \
    MOEI_ZIP_TARGET static void moei_zip_##name(const moei_zip *z) { \
        moei_zip_step s; \
        size_t part; \
        s.row = z->row; \
        s.ahead = z->ahead; \
        s.scale_row = z->scale_row; \
        for (s.block = 0; s.block < z->blocks; s.block++) { \
            const size_t at = s.block * z->column; \
            for (part = 0; part < MOEI_PANEL; part += MOEI_ZIP_LANES) { \
                s.data = z->data + part * z->row + at; \
                s.scale = z->scale + part * z->scale_row; \
                s.codes = z->codes + s.block * (numbers) * MOEI_PANEL + 4 * part; \
                s.scales = z->scales + s.block * (groups) * MOEI_PANEL + part; \
                s.minima = z->minima + s.block * (groups) * MOEI_PANEL + part; \
                moei_zip_step_##name(&s); \
            } \
        } \
    }

MOEI_ZIP_FUNCTION(q8_0, 32, 1)
MOEI_ZIP_FUNCTION(q4_0, 32, 1)
MOEI_ZIP_FUNCTION(iq4_nl, 32, 1)
MOEI_ZIP_FUNCTION(mxfp4, 32, 1)
MOEI_ZIP_FUNCTION(mxfp4_pairs, 32, 1)
MOEI_ZIP_FUNCTION(q4_k, 256, 8)
MOEI_ZIP_FUNCTION(q5_k, 256, 8)
MOEI_ZIP_FUNCTION(q6_k, 256, 16)
#endif

/* The moe_external_type.fill. */
static void moei_fill_blocks(const moe_kernels *k, const moe_external *w, size_t row, size_t rows, size_t from,
                             size_t count, unsigned char *codes, moe_real *scales, moe_real *minima) {
    const size_t block = (size_t)w->type->block, group = (size_t)w->type->group;
    moe_real scale[16], minimum[16];
    signed char code[256];
    size_t j, p, i;
#ifdef MOEI_HAVE_ZIPS
    if (rows == MOEI_PANEL && k->unpacked != moei_unpacked_c && moei_block_type_of(w)->zip != NULL) {
        moei_zip z;
        z.data = moei_external_block(w, row, from);
        z.scale = w->scales != NULL ? moei_external_scale(w, row, from, 1) : z.data;
        z.row = w->row;
        z.scale_row = w->scale_row;
        z.column = w->column;
        z.blocks = count / block;
        /* two panels are filled in turn, so the prefetched one is the next but one */
        z.ahead = (uintptr_t)z.data + 2 * MOEI_PANEL * w->row + (MOEI_PANEL - 1) * (from / block) * w->column;
        z.codes = codes;
        z.scales = scales;
        z.minima = minima;
        moei_block_type_of(w)->zip(&z);
        return;
    }
#endif
    (void)k;
    for (j = 0; j < MOEI_PANEL; j++)
        for (p = 0; p < count; p += block) {
            moei_external_codes(w, row + (j < rows ? j : rows - 1), from + p, code, scale, minimum);
            for (i = 0; i < block; i++)
                codes[(p + i) / 4 * MOEI_LINE + 4 * j + (p + i) % 4] = (unsigned char)(code[i] + 128);
            for (i = 0; i < block / group; i++) {
                scales[(p / group + i) * MOEI_PANEL + j] = scale[i];
                if (w->type->minima) minima[(p / group + i) * MOEI_PANEL + j] = minimum[i];
            }
        }
}

/* ---- >>direct: a row of activations times rows of blocks, without unpacking ----

   Each row of weights is read once from end to end, at the speed of memory; nothing is unpacked to
   memory. A vector holds four groups, in four lanes each, in the order that takes the fewest
   instructions; the activations are put into that order first. Four rows are summed together: one
   vector has the integer sums of four groups of four rows, another their factors. For 16 rows, each
   lane then adds the groups of its row in the order of panels, so results are the same bits. */

#if defined(MOEI_HAVE_ZIPS) && defined(MOEI_VNNI512) && !defined(MOE_NO_AVX512)
#define MOEI_DIRECT MOEI_VNNI512 MOEI_INLINE
enum { MOEI_DIRECT_GROUPS = 64, MOEI_DIRECT_AHEAD = 8192 };

/* Groups of a row of activations: codes of its two rows, initial sums of both as one number, scales
   of the second, the sums for minima. starts and scales repeat each value four times, in the order
   of lanes. */
typedef struct moei_direct {
    unsigned char codes[2][MOEI_DIRECT_GROUPS * MOEI_GROUP];
    int32_t starts[4 * MOEI_DIRECT_GROUPS];
    float scales[4 * MOEI_DIRECT_GROUPS], sums[2][MOEI_DIRECT_GROUPS];
} moei_direct;

/* Sums, their factors, and minima of groups of 16 rows: [groups / 4][4] vectors, each of four
   groups of four rows. */
typedef float moei_direct_factors[3][(int)MOEI_PANEL * MOEI_DIRECT_GROUPS];

/* Four rows of blocks, `row` bytes apart, from group `at` on; to: their vectors. */
typedef struct moei_direct_four {
    const moei_direct *f;
    const unsigned char *p;
    size_t row, at;
    float *to;
} moei_direct_four;

MOEI_DIRECT __m512i moei_direct_and(__m512i v, int byte) {
    return _mm512_and_si512(v, _mm512_set1_epi32(byte * 0x01010101));
}

MOEI_DIRECT __m512i moei_direct_right(__m512i v, unsigned bits) {
    return _mm512_maskz_srli_epi32(MOEI_ALL_LANES, v, bits);
}

MOEI_DIRECT __m512i moei_direct_shift(__m512i v, __m512i bits) {
    return _mm512_maskz_srlv_epi32(MOEI_ALL_LANES, v, bits);
}

MOEI_DIRECT __m512i moei_direct_left(__m512i v, unsigned bits) {
    return _mm512_maskz_slli_epi32(MOEI_ALL_LANES, v, bits);
}

MOEI_DIRECT __m512i moei_direct_rotate(__m512i v, __m512i bits) {
    return _mm512_maskz_rolv_epi32(MOEI_ALL_LANES, v, bits);
}

MOEI_DIRECT __m512i moei_direct_high(__m512i v) { return moei_direct_and(moei_direct_right(v, 4), 15); }
MOEI_DIRECT __m512i moei_direct_splat(__m128i v) { return _mm512_maskz_broadcast_i32x4(MOEI_ALL_LANES, v); }
MOEI_DIRECT __m512 moei_direct_float(__m512i v) { return _mm512_maskz_cvtepi32_ps(MOEI_ALL_LANES, v); }
MOEI_DIRECT __m512i moei_direct_lanes(int a, int b, int c, int d) {
    return _mm512_setr_epi32(a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d);
}

/* The sums of four groups: of 32 (a and b are the halves of each) if halves is 2, else of 16 (a).
   `at`: offset of their activations. */
MOEI_DIRECT __m512i moei_direct_dot(int halves, const moei_direct *f, size_t at, __m512i a, __m512i b) {
    const unsigned char *x = f->codes[0] + at, *y = f->codes[1] + at;
    moei_int32x16 sum = moei_dot_vnni512(moei_zero_vnni512(), a, MOEI_LOAD_512(x));
    if (halves > 1) sum = moei_dot_vnni512(sum, b, MOEI_LOAD_512(x + MOEI_LINE));
    sum = MOEI_AS(moei_int32x16, moei_direct_left(MOEI_AS(__m512i, sum), 8));
    sum = moei_dot_vnni512(sum, a, MOEI_LOAD_512(y));
    if (halves > 1) sum = moei_dot_vnni512(sum, b, MOEI_LOAD_512(y + MOEI_LINE));
    return MOEI_AS(__m512i, sum);
}

/* The sums of lanes i and i + 2 of each four, of a and b in turn. */
MOEI_DIRECT __m512 moei_direct_fold(__m512i a, __m512i b) {
    const __m512i low = _mm512_maskz_unpacklo_epi64((__mmask8)0xff, a, b);
    return _mm512_castsi512_ps(_mm512_add_epi32(low, _mm512_maskz_unpackhi_epi64((__mmask8)0xff, a, b)));
}

/* Number `quad` of four groups: s has the sums of each row. */
MOEI_DIRECT void moei_direct_quad(const moei_direct_four *r, size_t quad, const __m512i s[4], __m512 scale) {
    const size_t i = 4 * r->at + 16 * quad;
    const __m512 a = moei_direct_fold(s[0], s[1]), b = moei_direct_fold(s[2], s[3]);
    const __m512i sum = _mm512_add_epi32(_mm512_castps_si512(_mm512_maskz_shuffle_ps(MOEI_ALL_LANES, a, b, 0x88)),
                                         _mm512_castps_si512(_mm512_maskz_shuffle_ps(MOEI_ALL_LANES, a, b, 0xdd)));
    const __m512i start = MOEI_LOAD_512(r->f->starts + i);
    float *to = r->to + 4 * i;
    _mm512_storeu_ps(to, moei_direct_float(_mm512_add_epi32(sum, start)));
    to += (int)MOEI_PANEL * MOEI_DIRECT_GROUPS;
    _mm512_storeu_ps(to, _mm512_mul_ps(scale, _mm512_loadu_ps(r->f->scales + i)));
}

/* 16 bytes of each of two blocks. */
MOEI_DIRECT __m256i moei_direct_pair(size_t column, const unsigned char *p) {
    const __m128i low = _mm_loadu_si128((const __m128i *)(const void *)p);
    const __m128i high = _mm_loadu_si128((const __m128i *)(const void *)(p + column));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

MOEI_DIRECT __m512i moei_direct_join(__m256i low, __m256i high) {
    return _mm512_maskz_inserti64x4((__mmask8)0xff, _mm512_castsi256_si512(low), high, 1);
}

/* 16 bytes of each of four blocks. */
MOEI_DIRECT __m512i moei_direct_load(size_t column, const unsigned char *p) {
    return moei_direct_join(moei_direct_pair(column, p), moei_direct_pair(column, p + 2 * column));
}

/* The first bytes of four blocks (of 17, 18 or 34 bytes) of each row, in the low bits of lanes. */
MOEI_DIRECT __m512i moei_direct_heads(int column, const moei_direct_four *r) {
    const __m512i shift = moei_direct_lanes(0, column % 4 * 8, 2 * column % 4 * 8, 3 * column % 4 * 8);
    const __m512i from = moei_direct_lanes(0, column / 4, 2 * column / 4, 3 * column / 4);
    __m512i a, b;
    if (column < 20) { /* two rows at once */
        const __m512i both = _mm512_add_epi32(from, _mm512_set4_epi32(0, 0, 16, 0));
        a = _mm512_permutex2var_epi32(MOEI_LOAD_512(r->p), both, MOEI_LOAD_512(r->p + r->row));
        b = _mm512_permutex2var_epi32(MOEI_LOAD_512(r->p + 2 * r->row), both, MOEI_LOAD_512(r->p + 3 * r->row));
    } else {
#define MOEI_HEADS(i) \
    _mm512_permutex2var_epi32(MOEI_LOAD_512(r->p + (i) * r->row), from, MOEI_LOAD_512(r->p + (i) * r->row + MOEI_LINE))
        a = _mm512_maskz_unpacklo_epi32(MOEI_ALL_LANES, MOEI_HEADS(0), MOEI_HEADS(1));
        b = _mm512_maskz_unpacklo_epi32(MOEI_ALL_LANES, MOEI_HEADS(2), MOEI_HEADS(3));
#undef MOEI_HEADS
    }
    return moei_direct_shift(_mm512_maskz_unpacklo_epi64((__mmask8)0xff, a, b), shift);
}

/* 16 binary16 numbers in the low halves of the lanes. */
MOEI_DIRECT __m512 moei_direct_from_f16(__m512i v) {
    return _mm512_maskz_cvtph_ps(MOEI_ALL_LANES, _mm512_maskz_cvtepi32_epi16(MOEI_ALL_LANES, v));
}

MOEI_DIRECT void moei_direct_q4_0(const moei_direct_four *r) {
    __m512i s[4];
#define MOEI_ROW(i) { \
        const __m512i v = moei_direct_load(18, r->p + i * r->row + 2); \
        s[i] = moei_direct_dot(2, r->f, 32 * r->at, moei_direct_and(v, 15), moei_direct_high(v)); \
    }
    MOEI_EACH_QUAD(MOEI_ROW)
#undef MOEI_ROW
    moei_direct_quad(r, 0, s, moei_direct_from_f16(moei_direct_heads(18, r)));
}

MOEI_DIRECT void moei_direct_q8_0(const moei_direct_four *r) {
    const __m512i sign = _mm512_set1_epi32((int)0x80808080u); /* codes + 128 */
    __m512i s[4];
#define MOEI_ROW(i) { \
        const unsigned char *p = r->p + i * r->row + 2; \
        s[i] = moei_direct_dot(2, r->f, 32 * r->at, _mm512_xor_si512(moei_direct_load(34, p), sign), \
                               _mm512_xor_si512(moei_direct_load(34, p + 16), sign)); \
    }
    MOEI_EACH_QUAD(MOEI_ROW)
#undef MOEI_ROW
    moei_direct_quad(r, 0, s, moei_direct_from_f16(moei_direct_heads(34, r)));
}

MOEI_DIRECT __m512i moei_direct_fp4(__m256i a, __m256i b) {
    return moei_direct_join(moei_lanes_find(moei_zip_fp4, a), moei_lanes_find(moei_zip_fp4, b));
}

MOEI_DIRECT void moei_direct_mxfp4(const moei_direct_four *r) {
    const __m512i one = _mm512_set1_epi32(1), byte = _mm512_set1_epi32(255);
    const __m512i e = _mm512_maskz_max_epu32(MOEI_ALL_LANES, _mm512_and_si512(moei_direct_heads(17, r), byte), one);
    __m512i s[4];
#define MOEI_ROW(i) { \
        const unsigned char *p = r->p + i * r->row + 1; \
        const __m256i a = moei_direct_pair(17, p), b = moei_direct_pair(17, p + 34); \
        s[i] = moei_direct_dot(2, r->f, 32 * r->at, moei_direct_fp4(moei_zip_low(a), moei_zip_low(b)), \
                               moei_direct_fp4(moei_zip_high(a), moei_zip_high(b))); \
    }
    MOEI_EACH_QUAD(MOEI_ROW)
#undef MOEI_ROW
    moei_direct_quad(r, 0, s, _mm512_castsi512_ps(moei_direct_left(_mm512_sub_epi32(e, one), 23)));
}

/* Transposes 16 bytes of each row: q[i] has bytes 4 i to 4 i + 3 of the four rows. */
MOEI_DIRECT void moei_direct_transpose(const moei_direct_four *r, size_t at, __m128i q[4]) {
    const unsigned char *p = r->p + at;
    const __m256i a = moei_direct_pair(2 * r->row, p), b = moei_direct_pair(2 * r->row, p + r->row);
    const __m256i low = _mm256_unpacklo_epi32(a, b), high = _mm256_unpackhi_epi32(a, b); /* rows 0 1, rows 2 3 */
    const __m128i low2 = _mm256_extracti128_si256(low, 1), high2 = _mm256_extracti128_si256(high, 1);
    q[0] = _mm_unpacklo_epi64(_mm256_castsi256_si128(low), low2);
    q[1] = _mm_unpackhi_epi64(_mm256_castsi256_si128(low), low2);
    q[2] = _mm_unpacklo_epi64(_mm256_castsi256_si128(high), high2);
    q[3] = _mm_unpackhi_epi64(_mm256_castsi256_si128(high), high2);
}

/* Six-bit codes of each row's even groups (odd = 1: odd groups), from four bytes of the first four
   groups and four of the others. */
MOEI_DIRECT __m512 moei_direct_six(int odd, __m512i v) {
    const __m512i byte = _mm512_set1_epi32(255);
    return moei_direct_float(
        _mm512_and_si512(moei_direct_shift(v, moei_direct_lanes(8 * odd, 8 * odd + 16, 8 * odd, 8 * odd + 16)), byte));
}

/* A block of Q4_K or Q5_K. */
MOEI_DIRECT void moei_direct_large(size_t fifth, const moei_direct_four *r) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 0, 1, 2, 3, 16, 17, 18, 19, 16, 17, 18, 19);
    const __m512i second = _mm512_or_si512(first, _mm512_set1_epi32(4));
    float *minima = r->to + 16 * r->at + 2 * (size_t)MOEI_PANEL * MOEI_DIRECT_GROUPS;
    __m512i s[2][4], scales, least;
    __m512 heads, d, m;
    __m256i both, rest;
    __m128i q[4];
#define MOEI_HIGH_BIT(w, h, a, b, c, d) \
    w = _mm512_or_si512(w, moei_direct_and(moei_direct_rotate(h, moei_direct_lanes(a, b, c, d)), 16));
#define MOEI_ROW(i) { \
        const unsigned char *p = r->p + i * r->row + 16; \
        const __m512i a = MOEI_LOAD_512(p + 32 * fifth), b = MOEI_LOAD_512(p + 32 * fifth + 64); \
        const __m512i v0 = _mm512_maskz_shuffle_i32x4(MOEI_ALL_LANES, a, b, 0x88); \
        const __m512i v1 = _mm512_maskz_shuffle_i32x4(MOEI_ALL_LANES, a, b, 0xdd); \
        __m512i a0 = moei_direct_and(v0, 15), a1 = moei_direct_and(v1, 15); \
        __m512i b0 = moei_direct_high(v0), b1 = moei_direct_high(v1); \
        if (fifth) { \
            const __m512i h0 = moei_direct_splat(_mm_loadu_si128((const __m128i *)(const void *)p)); \
            const __m512i h1 = moei_direct_splat(_mm_loadu_si128((const __m128i *)(const void *)(p + 16))); \
            MOEI_HIGH_BIT(a0, h0, 4, 2, 0, 30) \
            MOEI_HIGH_BIT(a1, h1, 4, 2, 0, 30) \
            MOEI_HIGH_BIT(b0, h0, 3, 1, 31, 29) \
            MOEI_HIGH_BIT(b1, h1, 3, 1, 31, 29) \
        } \
        s[0][i] = moei_direct_dot(2, r->f, 32 * r->at, a0, a1); \
        s[1][i] = moei_direct_dot(2, r->f, 32 * r->at + 128, b0, b1); \
    }
    MOEI_EACH_QUAD(MOEI_ROW)
#undef MOEI_ROW
#undef MOEI_HIGH_BIT
    moei_direct_transpose(r, 0, q);
    heads = _mm512_castps256_ps512(_mm256_cvtph_ps(q[0]));
    both = _mm256_inserti128_si256(_mm256_castsi128_si256(q[1]), q[2], 1);
    rest = _mm256_inserti128_si256(_mm256_castsi128_si256(q[3]), _mm_srli_epi32(q[3], 4), 1);
    rest = _mm256_or_si256(moei_zip_low(rest), _mm256_and_si256(_mm256_srli_epi32(both, 2), moei_lanes_splat(48)));
    both = _mm256_and_si256(both, moei_lanes_splat(63));
    scales = _mm512_permutex2var_epi32(_mm512_castsi256_si512(both), first, _mm512_castsi256_si512(rest));
    least = _mm512_permutex2var_epi32(_mm512_castsi256_si512(both), second, _mm512_castsi256_si512(rest));
    d = _mm512_maskz_permutexvar_ps(MOEI_ALL_LANES, _mm512_set4_epi32(6, 4, 2, 0), heads);
    m = _mm512_maskz_permutexvar_ps(MOEI_ALL_LANES, _mm512_set4_epi32(7, 5, 3, 1), heads);
    moei_direct_quad(r, 0, s[0], _mm512_mul_ps(d, moei_direct_six(0, scales)));
    moei_direct_quad(r, 1, s[1], _mm512_mul_ps(d, moei_direct_six(1, scales)));
    _mm512_storeu_ps(minima, _mm512_mul_ps(m, moei_direct_six(0, least)));
    _mm512_storeu_ps(minima + 4 * MOEI_PANEL, _mm512_mul_ps(m, moei_direct_six(1, least)));
}

MOEI_DIRECT void moei_direct_q4_k(const moei_direct_four *r) { moei_direct_large(0, r); }
MOEI_DIRECT void moei_direct_q5_k(const moei_direct_four *r) { moei_direct_large(1, r); }

MOEI_DIRECT void moei_direct_q6_k(const moei_direct_four *r) {
    const __m512i bits = moei_direct_lanes(24, 16, 8, 0);
    const unsigned char *d = r->p + 208;
    const __m128i halves = _mm_setr_epi16((short)moei_get_16(d), (short)moei_get_16(d + r->row),
                                          (short)moei_get_16(d + 2 * r->row), (short)moei_get_16(d + 3 * r->row),
                                          0, 0, 0, 0);
    const __m512 scale = _mm512_castsi512_ps(moei_direct_splat(_mm_castps_si128(_mm_cvtph_ps(halves))));
    __m512i s[4], t[4];
    __m128i q[4];
    moei_direct_transpose(r, 192, q);
#define MOEI_ROW(half, i) { \
        const unsigned char *p = r->p + i * r->row + 64 * half; \
        const __m512i v = MOEI_LOAD_512(p); \
        const __m512i h = _mm512_maskz_broadcast_i64x4((__mmask8)0xff, MOEI_LOAD_256(p + 128 - 32 * half)); \
        const __m512i a = moei_direct_and(moei_direct_rotate(h, moei_direct_lanes(4, 4, 2, 2)), 48); \
        const __m512i b = moei_direct_and(moei_direct_rotate(h, moei_direct_lanes(0, 0, 30, 30)), 48); \
        const size_t at = 16 * r->at + 128 * half; \
        s[i] = moei_direct_dot(1, r->f, at, _mm512_or_si512(moei_direct_and(v, 15), a), a); \
        t[i] = moei_direct_dot(1, r->f, at + MOEI_LINE, _mm512_or_si512(moei_direct_high(v), b), b); \
    }
#define MOEI_SCALES(i) \
    _mm512_mul_ps(scale, moei_direct_float(_mm512_maskz_srai_epi32( \
        MOEI_ALL_LANES, _mm512_maskz_sllv_epi32(MOEI_ALL_LANES, moei_direct_splat(q[i]), bits), 24)))
    MOEI_ROW(0, 0) MOEI_ROW(0, 1) MOEI_ROW(0, 2) MOEI_ROW(0, 3)
    moei_direct_quad(r, 0, s, MOEI_SCALES(0));
    moei_direct_quad(r, 1, t, MOEI_SCALES(1));
    MOEI_ROW(1, 0) MOEI_ROW(1, 1) MOEI_ROW(1, 2) MOEI_ROW(1, 3)
    moei_direct_quad(r, 2, s, MOEI_SCALES(2));
    moei_direct_quad(r, 3, t, MOEI_SCALES(3));
#undef MOEI_ROW
#undef MOEI_SCALES
}

/* Into L2, since L1 has few lines in flight at once. */
MOEI_DIRECT void moei_direct_prefetch(uintptr_t at) { _mm_prefetch((const char *)at, _MM_HINT_T1); }

/* `groups` groups of four rows; a step computes `step` of them, of `bytes` bytes. */
#define MOEI_DIRECT_ROWS(name, step, bytes) \
    MOEI_VNNI512 static void moei_direct_rows_##name(const moei_direct_four *from, size_t groups) { \
        moei_direct_four r = *from; \
        unsigned char rest[4 * (bytes)]; \
        size_t i; \
        for (; r.at < groups; r.at += step, r.p += bytes) { \
            for (i = MOEI_DIRECT_AHEAD; i < MOEI_DIRECT_AHEAD + bytes; i += MOEI_LINE) { \
                moei_direct_prefetch((uintptr_t)r.p + i); \
                moei_direct_prefetch((uintptr_t)r.p + i + r.row); \
                moei_direct_prefetch((uintptr_t)r.p + i + 2 * r.row); \
                moei_direct_prefetch((uintptr_t)r.p + i + 3 * r.row); \
            } \
            if (groups - r.at < step) { /* results of the padding zeros are not read */ \
                memset(rest, 0, sizeof rest); \
                for (i = 0; i < 4; i++) \
                    memcpy(rest + i * bytes, r.p + i * r.row, (groups - r.at) * (bytes) / (step)); \
                r.p = rest; \
                r.row = bytes; \
            } \
            moei_direct_##name(&r); \
        } \
    }

MOEI_DIRECT_ROWS(q4_0, 4, 72)
MOEI_DIRECT_ROWS(q8_0, 4, 136)
MOEI_DIRECT_ROWS(mxfp4, 4, 68)
MOEI_DIRECT_ROWS(q4_k, 8, 144)
MOEI_DIRECT_ROWS(q5_k, 8, 176)
MOEI_DIRECT_ROWS(q6_k, 16, 210)

/* Eight groups of 16 rows, one vector each; large: the even groups are stored first. */
MOEI_DIRECT void moei_direct_eight(int large, const float *a, __m512 v[8]) {
#define MOEI_JOIN_ROWS(a, b, which) _mm512_maskz_shuffle_f32x4(MOEI_ALL_LANES, a, b, which)
#define MOEI_FOUR_GROUPS(a, first, step) { \
        const __m512 r0 = _mm512_loadu_ps(a), r1 = _mm512_loadu_ps((a) + 16); \
        const __m512 r2 = _mm512_loadu_ps((a) + 32), r3 = _mm512_loadu_ps((a) + 48); \
        const __m512 x = MOEI_JOIN_ROWS(r0, r1, 0x44), y = MOEI_JOIN_ROWS(r2, r3, 0x44); \
        const __m512 z = MOEI_JOIN_ROWS(r0, r1, 0xee), w = MOEI_JOIN_ROWS(r2, r3, 0xee); \
        v[first] = MOEI_JOIN_ROWS(x, y, 0x88); \
        v[(first) + (step)] = MOEI_JOIN_ROWS(x, y, 0xdd); \
        v[(first) + 2 * (step)] = MOEI_JOIN_ROWS(z, w, 0x88); \
        v[(first) + 3 * (step)] = MOEI_JOIN_ROWS(z, w, 0xdd); \
    }
    if (large) {
        MOEI_FOUR_GROUPS(a, 0, 2)
        MOEI_FOUR_GROUPS(a + 64, 1, 2)
    } else {
        MOEI_FOUR_GROUPS(a, 0, 1)
        MOEI_FOUR_GROUPS(a + 64, 4, 1)
    }
#undef MOEI_JOIN_ROWS
#undef MOEI_FOUR_GROUPS
}

#define MOEI_EACH_EIGHT(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define MOEI_ADD_GROUP(i) c0 = _mm512_fmadd_ps(v[i], w[i], c0);
#define MOEI_ADD_MINIMUM(i) \
    m0 = _mm512_fmadd_ps(v[i], _mm512_set1_ps(f->sums[0][g + i]), m0); \
    m1 = _mm512_fmadd_ps(v[i], _mm512_set1_ps(f->sums[1][g + i]), m1);

/* c[2][16]: sums in the order of moei_external_panels. */
MOEI_DIRECT void moei_direct_add(int large, const moei_direct *f, size_t groups, moei_direct_factors a, float *c) {
    const __m512 zero = _mm512_setzero_ps();
    __m512 c0 = _mm512_loadu_ps(c), c1 = _mm512_loadu_ps(c + MOEI_PANEL);
    __m512 m0 = zero, m1 = zero;
    __m512 v[8], w[8];
    size_t g, i;
    for (g = 0; g < groups; g += 8) {
        moei_direct_eight(large, a[0] + 16 * g, v);
        moei_direct_eight(large, a[1] + 16 * g, w);
        if (groups - g < 8) {
            float part[2][8 * MOEI_PANEL];
            for (i = 0; i < 8; i++) {
                _mm512_storeu_ps(part[0] + i * MOEI_PANEL, v[i]);
                _mm512_storeu_ps(part[1] + i * MOEI_PANEL, w[i]);
            }
            for (i = 0; i < groups - g; i++)
                c0 = _mm512_fmadd_ps(_mm512_loadu_ps(part[0] + i * MOEI_PANEL),
                                     _mm512_loadu_ps(part[1] + i * MOEI_PANEL), c0);
            break;
        }
        MOEI_EACH_EIGHT(MOEI_ADD_GROUP)
        if (large) {
            moei_direct_eight(large, a[2] + 16 * g, v);
            MOEI_EACH_EIGHT(MOEI_ADD_MINIMUM)
            if (g % 16 == 0 && g + 8 < groups) continue;
            c0 = _mm512_add_ps(c0, m0);
            c1 = _mm512_add_ps(c1, m1);
            m0 = m1 = zero;
        }
    }
    _mm512_storeu_ps(c, c0);
    _mm512_storeu_ps(c + MOEI_PANEL, c1);
}
#undef MOEI_EACH_EIGHT
#undef MOEI_ADD_GROUP
#undef MOEI_ADD_MINIMUM

MOEI_VNNI512 static void moei_direct_panel(int large, const moei_direct *f, size_t groups, moei_direct_factors a,
                                           float *c) {
    if (large) moei_direct_add(1, f, groups, a, c);
    else moei_direct_add(0, f, groups, a, c);
}

/* Prepares groups from .. from + groups - 1 of a row of activations; offset: of the codes of W. */
static void moei_direct_begin(moei_direct *f, const moe_external *w, int offset, size_t inner, size_t from,
                              size_t groups, const unsigned char *x) {
    const size_t group = (size_t)w->type->group;
    const int half = group == 16;
    moei_external_row r;
    size_t i, j;
    (void)moei_external_shape_row(inner, &r);
    if (groups % 8 > 0) memset(f, 0, sizeof *f);
    for (j = 0; j < groups; j++) {
        const size_t lane = w->type->minima ? j / 8 * 8 + j % 2 * 4 + j % 8 / 2 : j; /* counted over all vectors */
        const unsigned char *second = x + r.size;
        int32_t start[2];
        for (i = 0; i < 2; i++) {
            const unsigned char *row = x + i * r.size, *code = row + (from + j) * group;
            unsigned char *to = f->codes[i] + lane / 4 * 4 * group + lane % 4 * 16;
            memcpy(to, code, 16);
            if (!half) memcpy(to + MOEI_LINE, code + 16, 16);
            memcpy(&start[i], row + r.starts[half] + 4 * (from + j), 4);
            f->sums[i][j] = moei_get_real(row + r.sums[half] + 4 * (from + j));
        }
        for (i = 0; i < 4; i++) {
            f->starts[4 * lane + i] = (start[0] * 256 + start[1]) / 128 * offset;
            f->scales[4 * lane + i] = moei_get_real(second + r.scales[half] + 4 * (from + j));
        }
    }
}

/* Computes each part of a long row for several panels in turn, because moei_direct_begin takes a
   third of a panel's time. */
static size_t moei_direct_blocks(void (*rows)(const moei_direct_four *from, size_t groups), int offset,
                                 const moe_kernels *k, const moe_external *w, size_t row, size_t n, size_t inner,
                                 const unsigned char *x, float *c) {
    enum { PANELS = 8 };
    const size_t group = (size_t)w->type->group, all = inner / group;
    const size_t panels = n / MOEI_PANEL;
    moei_direct_factors factors;
    moei_direct_four four;
    moei_direct f;
    size_t i, j, p, count, from, groups;
    if (k->unpacked != moei_unpacked_vnni512 || k->panels != moei_panels_avx512) return 0; /* the bits would differ */
    if (w->column != (size_t)w->type->bytes) return 0;
    four.f = &f;
    four.row = w->row;
    four.at = 0;
    for (p = 0; p < panels; p += count, c += count * MOEI_PANEL) {
        float sums[PANELS][2 * MOEI_PANEL];
        count = moei_smaller(panels - p, PANELS);
        memset(sums, 0, sizeof sums);
        for (from = 0; from < all; from += groups) {
            groups = moei_smaller(all - from, MOEI_DIRECT_GROUPS);
            if (p == 0 || all > MOEI_DIRECT_GROUPS) moei_direct_begin(&f, w, offset, inner, from, groups, x);
            for (j = 0; j < count; j++) {
                for (i = 0; i < 4; i++) {
                    four.p = moei_external_block(w, row + (p + j) * MOEI_PANEL + 4 * i, from * group);
                    four.to = factors[0] + 16 * i;
                    rows(&four, groups);
                }
                moei_direct_panel(w->type->minima, &f, groups, factors, sums[j]);
            }
        }
        for (j = 0; j < count; j++)
            for (i = 0; i < MOEI_PANEL; i++) c[j * MOEI_PANEL + i] = sums[j][i] + sums[j][MOEI_PANEL + i];
    }
    return panels * MOEI_PANEL;
}

/* The moe_external_type.direct of a type; offset: of its codes. */
#define MOEI_DIRECT_FUNCTION(name, offset) \
    static size_t moei_direct_of_##name(const moe_kernels *k, const moe_external *w, size_t row, size_t n, \
                                        size_t inner, const unsigned char *x, float *c) { \
        return moei_direct_blocks(moei_direct_rows_##name, offset, k, w, row, n, inner, x, c); \
    }

MOEI_DIRECT_FUNCTION(q4_0, 8)
MOEI_DIRECT_FUNCTION(q8_0, 128)
MOEI_DIRECT_FUNCTION(q4_k, 0)
MOEI_DIRECT_FUNCTION(q5_k, 0)
MOEI_DIRECT_FUNCTION(q6_k, 32)
MOEI_DIRECT_FUNCTION(mxfp4, 128)
#define MOEI_DIRECT_OF(name) moei_direct_of_##name
#else
#define MOEI_DIRECT_OF(name) NULL
#endif

/* The moe_external_type.unpack of element types without blocks. */
static void moei_unpack_numbers(const moe_kernels *k, const moe_external *w, size_t row, size_t from, size_t count,
                                moe_real *values) {
    moe_file_tensor t;
    size_t p, run = w->column == (size_t)w->type->bytes ? count : 1;
    (void)k;
    memset(&t, 0, sizeof t);
    t.dtype = moei_block_type_of(w)->dtype;
    for (p = 0; p < count; p += run) {
        t.data = moei_external_block(w, row, from + p);
        t.count = run;
        t.bytes = run * (size_t)w->type->bytes;
        (void)moe_file_values(&t, 0, run, values + p, NULL);
    }
}

/* The value of an FP8 byte in format E4M3: no infinities, 0x7f and 0xff are NaN (Micikevicius et
   al. 2022, FP8 formats for deep learning). */
static moe_real moei_from_e4m3(unsigned byte) {
    const uint32_t sign = (uint32_t)(byte & 128u) << 24, size = byte & 127u;
    if (size == 127u) return (moe_real)moei_binary32(sign | 0x7fc00000u);
    if (size < 8u) return (sign ? MOEI_R(-0.001953125) : MOEI_R(0.001953125)) * (moe_real)size;
    return (moe_real)moei_binary32(sign | ((size << 20) + (120u << 23)));
}

/* FP8 with one float32 scale per scale_rows rows and scale_columns columns. */
static void moei_unpack_e4m3(const moe_kernels *k, const moe_external *w, size_t row, size_t from, size_t count,
                             moe_real *values) {
    size_t p;
    (void)k;
    for (p = 0; p < count; p++) {
        values[p] = moei_from_e4m3(*moei_external_block(w, row, from + p));
        if (w->scales == NULL) continue;
        values[p] *= (moe_real)moei_binary32((uint32_t)moei_load(moei_external_scale(w, row, from + p, 4), 4));
    }
}

/* Types that only safetensors has: codes that no GGUF file can contain. */
enum { MOEI_TYPE_E4M3 = -1, MOEI_TYPE_MXFP4 = -2 };

#ifdef MOEI_HAVE_ZIPS
#define MOEI_ZIP_OF(name) moei_zip_##name
#else
#define MOEI_ZIP_OF(name) NULL
#endif

/* Element types of GGUF and of safetensors. 0 bytes: not supported. */
#define MOEI_BLOCKS(name, code, numbers, bytes, group, minima, codes, zip, direct) \
    {{name, numbers, bytes, moei_unpack_blocks, group, minima, moei_fill_blocks, direct}, code, MOE_DTYPE_COUNT, \
     moei_block_##codes, zip}
#define MOEI_NO_BLOCKS(name, code) {{name, 1, 0, NULL, 0, 0, NULL, NULL}, code, MOE_DTYPE_COUNT, NULL, NULL}
static const moei_block_type moei_gguf_types[] = {
    {{"F32", 1, 4, moei_unpack_numbers, 0, 0, NULL, NULL}, 0, MOE_DTYPE_F32, NULL, NULL},
    {{"F16", 1, 2, moei_unpack_numbers, 0, 0, NULL, NULL}, 1, MOE_DTYPE_F16, NULL, NULL},
    MOEI_BLOCKS("Q4_0", 2, 32, 18, 32, 0, q4_0, MOEI_ZIP_OF(q4_0), MOEI_DIRECT_OF(q4_0)),
    MOEI_BLOCKS("Q4_1", 3, 32, 20, 32, 1, q4_1, NULL, NULL),
    MOEI_BLOCKS("Q5_0", 6, 32, 22, 32, 0, q5_0, NULL, NULL),
    MOEI_BLOCKS("Q5_1", 7, 32, 24, 32, 1, q5_1, NULL, NULL),
    MOEI_BLOCKS("Q8_0", 8, 32, 34, 32, 0, q8_0, MOEI_ZIP_OF(q8_0), MOEI_DIRECT_OF(q8_0)),
    MOEI_NO_BLOCKS("Q8_1", 9),
    MOEI_BLOCKS("Q2_K", 10, 256, 84, 16, 1, q2_k, NULL, NULL),
    MOEI_BLOCKS("Q3_K", 11, 256, 110, 16, 0, q3_k, NULL, NULL),
    MOEI_BLOCKS("Q4_K", 12, 256, 144, 32, 1, q4_k, MOEI_ZIP_OF(q4_k), MOEI_DIRECT_OF(q4_k)),
    MOEI_BLOCKS("Q5_K", 13, 256, 176, 32, 1, q5_k, MOEI_ZIP_OF(q5_k), MOEI_DIRECT_OF(q5_k)),
    MOEI_BLOCKS("Q6_K", 14, 256, 210, 16, 0, q6_k, MOEI_ZIP_OF(q6_k), MOEI_DIRECT_OF(q6_k)),
    MOEI_NO_BLOCKS("Q8_K", 15),
    MOEI_NO_BLOCKS("IQ2_XXS", 16),
    MOEI_NO_BLOCKS("IQ2_XS", 17),
    MOEI_NO_BLOCKS("IQ3_XXS", 18),
    MOEI_NO_BLOCKS("IQ1_S", 19),
    MOEI_BLOCKS("IQ4_NL", 20, 32, 18, 32, 0, iq4_nl, MOEI_ZIP_OF(iq4_nl), NULL),
    MOEI_NO_BLOCKS("IQ3_S", 21),
    MOEI_NO_BLOCKS("IQ2_S", 22),
    MOEI_BLOCKS("IQ4_XS", 23, 256, 136, 32, 0, iq4_xs, NULL, NULL),
    MOEI_NO_BLOCKS("I8", 24),
    MOEI_NO_BLOCKS("I16", 25),
    MOEI_NO_BLOCKS("I32", 26),
    MOEI_NO_BLOCKS("I64", 27),
    {{"F64", 1, 8, moei_unpack_numbers, 0, 0, NULL, NULL}, 28, MOE_DTYPE_F64, NULL, NULL},
    MOEI_NO_BLOCKS("IQ1_M", 29),
    {{"BF16", 1, 2, moei_unpack_numbers, 0, 0, NULL, NULL}, 30, MOE_DTYPE_BF16, NULL, NULL},
    MOEI_NO_BLOCKS("TQ1_0", 34),
    MOEI_NO_BLOCKS("TQ2_0", 35),
    MOEI_BLOCKS("MXFP4", 39, 32, 17, 32, 0, mxfp4, MOEI_ZIP_OF(mxfp4), MOEI_DIRECT_OF(mxfp4)),
    {{"F8_E4M3", 1, 1, moei_unpack_e4m3, 0, 0, NULL, NULL}, MOEI_TYPE_E4M3, MOE_DTYPE_COUNT, NULL, NULL},
    MOEI_BLOCKS("MXFP4", MOEI_TYPE_MXFP4, 32, 16, 32, 0, mxfp4_pairs, MOEI_ZIP_OF(mxfp4_pairs), NULL)};

enum { MOEI_GGUF_TYPE_COUNT = (int)(sizeof moei_gguf_types / sizeof moei_gguf_types[0]) };

/* The type of a code; NULL: none. */
static const moei_block_type *moei_gguf_type_find(int code) {
    size_t i;
    for (i = 0; i < MOEI_GGUF_TYPE_COUNT; i++)
        if (moei_gguf_types[i].code == code) return &moei_gguf_types[i];
    return NULL;
}

/* The type of a MOE_DTYPE_ that is in the table. */
static const moei_block_type *moei_type_of_dtype(int dtype) {
    size_t i = 0;
    while (moei_gguf_types[i].dtype != dtype) i++;
    return &moei_gguf_types[i];
}

/* Reads the next tensor description. bytes stays 0 for types that are not supported. The data must
   have the order of the descriptions, as in every GGUF file: with tensors that share bytes, a small
   file could make a large layer. */
static void moei_gguf_tensor(moei_gguf *g, char name[MOEI_IMPORT_NAME], moei_import_tensor *f) {
    const moei_block_type *type;
    uint64_t n, n_type, i, elements = 1, most = (size_t)-1 / 8;
    memset(f, 0, sizeof *f);
    moei_gguf_string(g, name, MOEI_IMPORT_NAME);
    n = moei_gguf_number(g, 4);
    if (n > 4) moei_gguf_refuse(g, MOE_ERR_FORMAT, "a tensor has more than 4 dimensions");
    if (g->status != MOE_OK) return;
    for (i = 0; i < n && g->status == MOE_OK; i++) {
        uint64_t ne = moei_gguf_number(g, 8);
        if (ne > 0 && elements > most / ne)
            moei_gguf_refuse(g, MOE_ERR_OVERFLOW, "a tensor has too many elements for size_t");
        else {
            elements *= ne;
            f->shape[n - 1 - i] = (size_t)ne;
        }
    }
    f->n_dims = (int)n;
    f->count = (size_t)elements;
    n_type = moei_gguf_number(g, 4);
    f->code = (int)(n_type < 0x7fffffffu ? n_type : 0x7fffffffu);
    f->at = moei_gguf_number(g, 8);
    f->dtype = MOE_DTYPE_COUNT;
    type = f->type = moei_gguf_type_find(f->code);
    if (type != NULL && g->status == MOE_OK) {
        f->dtype = type->dtype;
        f->bytes = f->count / (size_t)type->external.block * (size_t)type->external.bytes;
        if ((n > 0 ? f->shape[n - 1] : 1) % (size_t)type->external.block != 0)
            moei_gguf_refuse(g, MOE_ERR_FORMAT, "the rows of a tensor are not a multiple of its block size");
    }
    if (f->at > g->file->source.size)
        moei_gguf_refuse(g, MOE_ERR_FORMAT, "a tensor starts beyond the end of the file");
    if (f->at < g->end) moei_gguf_refuse(g, MOE_ERR_FORMAT, "a tensor overlaps the one before it");
    g->end = f->bytes < UINT64_MAX - f->at ? f->at + f->bytes : UINT64_MAX;
}

/* Adds or drops outer dimensions of 1 until there are n: llama.cpp's converter keeps those of
   [1,H], its quantizer drops them, and llama.cpp takes both. */
static void moei_gguf_fit(const moei_importer *r, moei_import_tensor *f, size_t n) {
    while (r->kind == MOEI_IMPORT_GGUF && (size_t)f->n_dims > n && f->shape[0] == 1) {
        f->n_dims--;
        memmove(f->shape, f->shape + 1, (size_t)f->n_dims * sizeof f->shape[0]);
    }
    while (r->kind == MOEI_IMPORT_GGUF && (size_t)f->n_dims < n) {
        memmove(f->shape + 1, f->shape, (size_t)f->n_dims * sizeof f->shape[0]);
        f->shape[0] = 1;
        f->n_dims++;
    }
}

/* Reads everything before the data: header, metadata, tensor descriptions. Only the metadata of the
   first file, or of the first part of a split one, is kept. */
static moe_status moei_gguf_open(moei_importer *r, moei_import_shard *file) {
    moei_gguf g;
    moei_gguf_facts other, *facts = file == r->first ? &r->gguf : &other;
    moei_import_tensor f;
    char name[MOEI_IMPORT_NAME];
    uint64_t version, n_tensors, n_kv;
    uint32_t alignment = 32;
    size_t i;
    if (file->source.size > (uint64_t)(size_t)-1 / 2)
        return moei_error(r->error, MOE_ERR_OVERFLOW, "%s: the file is too large for size_t", file->shown);
    moei_gguf_begin(&g, r, file, 4);
    version = moei_gguf_number(&g, 4);
    n_tensors = moei_gguf_number(&g, 8);
    n_kv = moei_gguf_number(&g, 8);
    if (g.status == MOE_OK && version != 2 && version != 3)
        return moei_error(r->error, MOE_ERR_UNSUPPORTED,
                          "%s: GGUF version %z is not supported; versions 2 and 3, little-endian, are", file->shown,
                          (size_t)version);
    if (n_tensors > MOE_FILE_MAX_TENSORS || n_kv > MOE_FILE_MAX_TENSORS)
        moei_gguf_refuse(&g, MOE_ERR_UNSUPPORTED, "too many tensors or metadata keys");
    file->n_tensors = (size_t)n_tensors;
    file->n_kv = (size_t)n_kv;
    file->kv_at = g.at;
    moei_gguf_metadata(&g, facts, file, &alignment, 0);
    file->infos_at = g.at;
    if (alignment == 0 || alignment > 65536 || (alignment & (alignment - 1)) != 0)
        moei_gguf_refuse(&g, MOE_ERR_FORMAT, "general.alignment must be 1 to 65536, a power of 2");
    for (i = 0; i < file->n_tensors && g.status == MOE_OK; i++) {
        moei_gguf_tensor(&g, name, &f);
        if (f.at % alignment != 0)
            moei_gguf_refuse(&g, MOE_ERR_FORMAT, "the offset of a tensor is not a multiple of general.alignment");
    }
    if (g.status != MOE_OK) return g.status;
    file->data_at = g.at + (alignment - g.at % alignment) % alignment;
    if (file != r->first) return MOE_OK;
    moei_gguf_begin(&g, r, file, file->kv_at);
    moei_gguf_metadata(&g, facts, file, &alignment, 1);
    return g.status;
}

/* "-00001-of-00003.gguf", the end of a part's name. */
static void moei_gguf_part_end(uint32_t no, uint32_t count, char end[21]) {
    unsigned place, k;
    memcpy(end, "-00000-of-00000.gguf", 21);
    for (k = 0; k < 2; k++, no = count)
        for (place = 5 + 9 * k; no > 0; place--, no /= 10) end[place] = (char)('0' + no % 10);
}

/* Opens a part of a split file, unless it is the one that is open already, and checks that it is
   that part. */
static moe_status moei_gguf_open_part(moei_importer *r, uint32_t no, moei_import_shard **part) {
    const size_t stem = moei_strlen(r->first->name) - 20;
    const uint32_t count = r->first->split_count;
    char name[MOEI_IMPORT_NAME];
    unsigned char begin[4];
    moe_status status = MOE_OK;
    memcpy(name, r->first->name, stem);
    moei_gguf_part_end(no + 1, count, name + stem);
    for (*part = r->shards; *part != NULL && moei_strcmp((*part)->name, name) != 0;) *part = (*part)->next;
    if (*part == NULL) status = moei_import_shard_open(r, name, part);
    if (status == MOE_ERR_NOT_FOUND)
        return moei_error(r->error, status,
                          "%s: part %d of %d of this split file is missing; it must lie beside the others",
                          r->first->shown, (int)no + 1, (int)count);
    if (status == MOE_OK) status = moei_import_read_at(r, *part, 0, begin, sizeof begin);
    if (status != MOE_OK) return status;
    if (moei_memcmp(begin, "GGUF", 4) != 0)
        return moei_error(r->error, MOE_ERR_FORMAT, "%s: not a GGUF file", (*part)->shown);
    status = moei_gguf_open(r, *part);
    if (status != MOE_OK || ((*part)->split_no == no && (*part)->split_count == count)) return status;
    return moei_error(r->error, MOE_ERR_FORMAT, "%s: split.no = %d and split.count = %d: must be %d and %d",
                      (*part)->shown, (int)(*part)->split_no, (int)(*part)->split_count, (int)no, (int)count);
}

/* Opens a GGUF file and, of a split one, the other parts. Only part 1 has the settings. */
static moe_status moei_gguf_open_parts(moei_importer *r) {
    char end[21];
    moei_import_shard *last = r->first;
    const size_t length = moei_strlen(last->name);
    size_t n_tensors;
    uint32_t no;
    moe_status status = moei_gguf_open(r, last);
    if (status != MOE_OK || last->split_count <= 1) return status;
    if (last->split_no > 0 && last->split_no < last->split_count && last->split_count <= 65535 && length >= 20) {
        moei_gguf_part_end(last->split_no + 1, last->split_count, end);
        if (moei_strcmp(last->name + length - 20, end) == 0) status = moei_gguf_open_part(r, 0, &last);
        if (status == MOE_OK && last != r->first) {
            r->first = last;
            r->gguf.keys.size = 0;
            status = moei_gguf_open(r, last);
        }
        if (status != MOE_OK) return status;
    }
    if (last->split_no > 0 || last->split_count > 65535)
        return moei_error(r->error, MOE_ERR_UNSUPPORTED,
                          "%s: part %z of %z of a split file; open part 1, which has the settings of the model",
                          last->shown, (size_t)last->split_no + 1, (size_t)last->split_count);
    moei_gguf_part_end(1, last->split_count, end);
    if (length < 20 || moei_strcmp(last->name + length - 20, end) != 0)
        return moei_error(r->error, MOE_ERR_UNSUPPORTED,
                          "%s: part 1 of %d of a split file; its name must end with %s, so that the others are found",
                          last->shown, (int)last->split_count, end);
    n_tensors = last->n_tensors;
    for (no = 1; no < r->first->split_count && status == MOE_OK; no++) {
        status = moei_gguf_open_part(r, no, &last->part);
        last = last->part;
        n_tensors += status == MOE_OK ? last->n_tensors : 0;
    }
    if (status != MOE_OK || r->first->split_tensors == 0 || r->first->split_tensors == n_tensors) return status;
    return moei_error(r->error, MOE_ERR_FORMAT, "%s: the parts have %z tensors, split.tensors.count says %z",
                      r->first->shown, n_tensors, (size_t)r->first->split_tensors);
}

/* ---- >>json: the index and config.json ---- */

/* Checks that a text is one object and nothing else. */
static moe_status moei_import_json_check(moei_json *j) {
    if (moei_json_peek(j) != '{') return moei_json_refuse(j, j->at, MOE_ERR_FORMAT, "not a JSON object");
    if (moei_config_skip(j) != MOE_OK) return j->error->code;
    if (moei_json_peek(j) >= 0) return moei_json_refuse(j, j->at, MOE_ERR_FORMAT, "unexpected text after the object");
    return MOE_OK;
}

static moei_json moei_import_json_at(const moe_buffer *text, size_t at, moe_error *error) {
    moei_json j;
    memset(&j, 0, sizeof j);
    j.bytes = text->data;
    j.at = at;
    j.end = text->size;
    j.of_python = 1;
    j.error = error;
    return j;
}

/* Reads a whole file as text and checks it. */
static moe_status moei_import_json_open(moei_importer *r, const moei_import_shard *shard, size_t most,
                                        moe_buffer *text) {
    moei_json j;
    moe_error why;
    moe_status status;
    if (shard->source.size > most)
        return moei_error(r->error, MOE_ERR_UNSUPPORTED, "%s: the file has %z bytes; at most %z are allowed",
                          shard->shown, (size_t)shard->source.size, most);
    status = moei_import_read_start(r, shard, (size_t)shard->source.size, text);
    if (status != MOE_OK) return status;
    why.message[0] = '\0';
    j = moei_import_json_at(text, 0, &why);
    status = moei_import_json_check(&j);
    return status == MOE_OK ? MOE_OK : moei_error(r->error, status, "%s, %s", shard->shown, why.message);
}

/* Offset of the value of a key in the object at offset `at` of a checked text; 0: absent. The last
   of several equal keys counts, as in Python. */
static size_t moei_import_json_member(const moe_buffer *text, size_t at, const char *key) {
    moei_json j = moei_import_json_at(text, at, NULL);
    moei_span name;
    size_t found = 0;
    int first, more;
    if (moei_json_take(&j, '{') != MOE_OK) return 0;
    for (first = 1; (void)moei_json_key(&j, first, &name, &more), more; first = 0) {
        (void)moei_json_peek(&j);
        if (moei_span_is(name, key)) found = j.at;
        (void)moei_config_skip(&j);
    }
    return found;
}

/* Unescapes a string, truncated to room. A checked string contains no zero. */
static void moei_import_span(moei_span s, char *to, size_t room) {
    moei_chars chars = moei_chars_of(s);
    size_t n = 0;
    int c;
    while (n + 1 < room && (c = moei_chars_next(&chars)) >= 0) to[n++] = (char)c;
    to[n] = '\0';
}

/* As moei_import_json_member, also for nested keys ("rope_scaling.factor"). */
static size_t moei_import_json_path(const moe_buffer *text, size_t at, const char *key) {
    char first[MOEI_IMPORT_VALUE];
    size_t n = 0;
    while (key[n] != '\0' && key[n] != '.' && n + 1 < sizeof first) n++;
    if (key[n] != '.') return moei_import_json_member(text, at, key);
    memcpy(first, key, n);
    first[n] = '\0';
    at = moei_import_json_member(text, at, first);
    return at > 0 && text->data[at] == '{' ? moei_import_json_member(text, at, key + n + 1) : 0;
}

/* Offset of a value in config.json, from text_config if it is there, else from the top level;
   0: absent. */
static size_t moei_import_config_at(const moei_importer *r, const char *key) {
    size_t at = r->text_config > 0 ? moei_import_json_path(&r->config, r->text_config, key) : 0;
    return at > 0 || r->config.size == 0 ? at : moei_import_json_path(&r->config, 0, key);
}

/* Element `index` of a list of config.json, as an offset; 0: there is none. */
static size_t moei_import_json_element(const moe_buffer *text, size_t at, size_t index) {
    moei_json j = moei_import_json_at(text, at, NULL);
    if (moei_json_take(&j, '[') != MOE_OK || moei_json_peek(&j) == ']') return 0;
    for (; index > 0; index--)
        if (moei_config_skip(&j) != MOE_OK || moei_json_take(&j, ',') != MOE_OK) return 0;
    (void)moei_json_peek(&j);
    return j.at;
}

/* Kind and text of a value in config.json; for a list, of the current block's element. null counts
   as absent. */
static int moei_import_config_value(const moei_importer *r, const char *key, char text[MOEI_IMPORT_VALUE]) {
    size_t at = moei_import_config_at(r, key);
    moei_json j;
    moei_span s;
    int c;
    text[0] = '\0';
    if (at == 0) return MOEI_VALUE_NONE;
    if (r->by_block && r->config.data[at] == '[') {
        at = moei_import_json_element(&r->config, at, r->block);
        if (at == 0) return MOEI_VALUE_OTHER;
    }
    j = moei_import_json_at(&r->config, at, NULL);
    c = moei_json_peek(&j);
    if (c == '{' || c == '[') return MOEI_VALUE_OTHER;
    if (moei_json_string(&j, &s) == MOE_OK) {
        moei_import_span(s, text, MOEI_IMPORT_VALUE);
        return MOEI_VALUE_TEXT;
    }
    s = moei_config_word(&j);
    if (moei_span_is(s, "null")) return MOEI_VALUE_NONE;
    moei_import_span(s, text, MOEI_IMPORT_VALUE);
    return moei_span_length(s) < MOEI_IMPORT_VALUE ? MOEI_VALUE_SCALAR : MOEI_VALUE_OTHER;
}

/* The metadata of a key after "ARCH."; the last one of equal keys. NULL: none. */
static const moei_gguf_fact *moei_gguf_fact_find(const moei_importer *r, const char *key) {
    const moei_gguf_fact *facts = (const moei_gguf_fact *)(const void *)r->gguf.keys.data;
    size_t n = r->gguf.keys.size / sizeof *facts;
    while (n > 0)
        if (moei_strcmp(facts[--n].key, key) == 0) return facts + n;
    return NULL;
}

/* Element `index` of a list of metadata as text; returns its kind. */
static int moei_gguf_element(const moei_importer *r, const moei_gguf_fact *fact, size_t index,
                             char text[MOEI_IMPORT_VALUE]) {
    moei_gguf g;
    uint32_t type;
    uint64_t n;
    int kind;
    moei_gguf_begin(&g, r, r->first, fact->at);
    type = (uint32_t)moei_gguf_number(&g, 4);
    n = moei_gguf_number(&g, 8);
    text[0] = '\0';
    if (g.status != MOE_OK || index >= n || type >= MOEI_GGUF_TYPES || moei_gguf_sizes[type] == 0)
        return MOEI_VALUE_OTHER;
    moei_gguf_skip_bytes(&g, (uint64_t)index, moei_gguf_sizes[type]);
    kind = moei_gguf_value(&g, type, text);
    return g.status == MOE_OK ? kind : (int)MOEI_VALUE_OTHER;
}

/* The same for GGUF metadata or config.json, whichever the file has. */
static int moei_import_value(const moei_importer *r, const char *key, char text[MOEI_IMPORT_VALUE]) {
    const moei_gguf_fact *fact;
    text[0] = '\0';
    if (r->kind != MOEI_IMPORT_GGUF)
        return r->config.size > 0 ? moei_import_config_value(r, key, text) : (int)MOEI_VALUE_NONE;
    fact = moei_gguf_fact_find(r, key);
    if (fact == NULL) return MOEI_VALUE_NONE;
    if (r->by_block && fact->type == MOEI_GGUF_ARRAY) return moei_gguf_element(r, fact, r->block, text);
    memcpy(text, fact->text, MOEI_IMPORT_VALUE);
    return fact->kind;
}

static moe_status moei_import_config_open(moei_importer *r) {
    char text[MOEI_IMPORT_VALUE];
    moei_import_shard *shard;
    size_t at;
    moe_status status = moei_import_shard_open(r, "config.json", &shard);
    if (status == MOE_ERR_NOT_FOUND) return MOE_OK;
    if (status == MOE_OK) status = moei_import_json_open(r, shard, MOEI_IMPORT_CONFIG, &r->config);
    if (status != MOE_OK) return moei_import_error_in(r, r->first->shown, status);
    at = moei_import_json_member(&r->config, 0, "text_config");
    if (at > 0 && r->config.data[at] == '{') r->text_config = at;
    if (moei_import_value(r, "quantization_config", text) == MOEI_VALUE_NONE) return MOE_OK;
    (void)moei_import_value(r, "quantization_config.quant_method", text);
    if (moei_strcmp(text, "mxfp4") == 0) return MOE_OK;
    if (moei_strcmp(text, "fp8") == 0 && (moei_import_value(r, "quantization_config.fmt", text) == MOEI_VALUE_NONE ||
                                          moei_is_word_of(text, "e4m3 float8_e4m3fn")))
        return MOE_OK;
    return moei_error(r->error, MOE_ERR_UNSUPPORTED,
                      "config.json: quantization_config: this quantization is not supported; save the model "
                      "dequantized (bf16) or as GGUF");
}

/* ---- >>walk over the tensors of a file ---- */

/* Iterates over the tensor names of a safetensors file, an index or a GGUF file with its parts. */
typedef struct moei_import_walk {
    moe_file file;
    moei_json json;
    int first;
    moei_gguf gguf;
    const moei_import_shard *part;
    size_t left; /* tensors of this part */
} moei_import_walk;

static void moei_import_walk_begin(moei_import_walk *w, const moei_importer *r, const moei_import_shard *shard) {
    memset(w, 0, sizeof *w);
    w->file = shard->file;
    w->file.at = MOEI_FILE_START;
    w->part = shard;
    w->left = shard->n_tensors;
    w->first = 1;
    if (r->kind == MOEI_IMPORT_GGUF) moei_gguf_begin(&w->gguf, r, shard, shard->infos_at);
    if (r->kind != MOEI_IMPORT_INDEX) return;
    w->json = moei_import_json_at(&r->index, r->weight_map, NULL);
    (void)moei_json_take(&w->json, '{');
}

/* Whether a header says F8_E4M3 of a tensor, a type that moe.h does not know. */
static int moei_import_is_e4m3(const moei_import_shard *shard, const moe_file_tensor *t) {
    const unsigned char *end = (const unsigned char *)t->name + t->name_length + 1; /* of the quoted name */
    moei_json j = moei_import_json_at(&shard->bytes, (size_t)(end - shard->bytes.data), NULL);
    moei_span s;
    (void)moei_json_take(&j, ':');
    (void)moei_json_peek(&j);
    j.at = moei_import_json_member(&shard->bytes, j.at, "dtype");
    return moei_json_string(&j, &s) == MOE_OK && moei_span_is(s, "F8_E4M3");
}

static moe_status moei_import_walk_file(moei_import_walk *w, const moei_import_shard *shard,
                                        char name[MOEI_IMPORT_NAME], moei_import_tensor *f) {
    moe_file_tensor t;
    size_t begin;
    int i;
    moe_status status = moei_file_next(&w->file, &t, &begin);
    if (status != MOE_OK) return status;
    moei_import_span(moei_span_of(t.name, t.name_length), name, MOEI_IMPORT_NAME);
    memset(f, 0, sizeof *f);
    f->at = (uint64_t)8 + w->file.header_size + begin;
    f->count = t.count;
    f->bytes = t.bytes;
    f->dtype = t.dtype;
    f->n_dims = t.n_dims;
    for (i = 0; i < t.n_dims; i++) f->shape[i] = t.shape[i];
    if (t.dtype == MOE_DTYPE_COUNT && moei_import_is_e4m3(shard, &t)) f->type = moei_gguf_type_find(MOEI_TYPE_E4M3);
    f->shard = shard;
    return MOE_OK;
}

/* Next tensor name of an index, with the name of its file. */
static moe_status moei_import_walk_index(moei_import_walk *w, char name[MOEI_IMPORT_NAME],
                                         char file[MOEI_IMPORT_NAME]) {
    moei_span key, value;
    int more;
    (void)moei_json_key(&w->json, w->first, &key, &more);
    if (!more) return MOE_ERR_NOT_FOUND;
    w->first = 0;
    moei_import_span(key, name, MOEI_IMPORT_NAME);
    file[0] = '\0';
    if (moei_json_string(&w->json, &value) != MOE_OK) return moei_config_skip(&w->json);
    moei_import_span(value, file, MOEI_IMPORT_NAME);
    return MOE_OK;
}

/* Next tensor. MOE_ERR_NOT_FOUND after the last one. */
static moe_status moei_import_walk_next(moei_import_walk *w, const moei_importer *r, char name[MOEI_IMPORT_NAME],
                                        moei_import_tensor *f, char file[MOEI_IMPORT_NAME]) {
    memset(f, 0, sizeof *f);
    file[0] = '\0';
    if (r->kind == MOEI_IMPORT_INDEX) return moei_import_walk_index(w, name, file);
    if (r->kind == MOEI_IMPORT_FILE) return moei_import_walk_file(w, r->first, name, f);
    while (w->left == 0) {
        if (w->part->part == NULL) return MOE_ERR_NOT_FOUND;
        moei_import_walk_begin(w, r, w->part->part);
    }
    w->left--;
    moei_gguf_tensor(&w->gguf, name, f);
    f->shard = w->part;
    f->at += w->part->data_at;
    return w->gguf.status;
}

/* Whether suffix matches a row. *expert receives the expert index, a decimal number without leading
   zeros. */
static int moei_tensor_name_matches(const moei_tensor_name *row, const char *suffix, size_t *expert) {
    const char *p = row->name;
    *expert = 0;
    for (; *p != '\0'; p++) {
        int digits = 0;
        if (*p != '%') {
            if (*suffix++ != *p) return 0;
            continue;
        }
        for (; *suffix >= '0' && *suffix <= '9' && digits < 6; digits++)
            *expert = *expert * 10 + (size_t)(*suffix++ - '0');
        if (digits == 0 || (digits > 1 && suffix[-digits] == '0')) return 0;
    }
    return *suffix == '\0';
}

/* The row that matches a name, among the given sets; NULL: none. */
static const moei_tensor_name *moei_tensor_name_find(long sets, const char *suffix, size_t *expert) {
    const moei_tensor_name *row;
    for (row = moei_tensor_names; row->name != NULL; row++)
        if ((row->set & sets) != 0 && moei_tensor_name_matches(row, suffix, expert)) return row;
    return NULL;
}

/* Appends the name of a row. */
static void moei_tensor_name_put(moei_text *t, const moei_tensor_name *row, size_t expert) {
    const char *p;
    for (p = row->name; *p != '\0'; p++) {
        if (*p == '%') moei_put_integer(t, (int64_t)expert);
        else moei_put(t, p, 1);
    }
}

/* The parameters that a row fills, as a bit mask. */
static uint64_t moei_tensor_name_params(const moei_tensor_name *row) {
    return (uint64_t)1 << row->param | (row->second >= 0 ? (uint64_t)1 << row->second : 0);
}

#define MOEI_SETS_GGUF (-MOEI_SET_G_EXPERTS) /* this set and all after it */

static long moei_sets_of_file(const moei_importer *r) {
    return r->kind == MOEI_IMPORT_GGUF ? MOEI_SETS_GGUF : ~MOEI_SETS_GGUF;
}

static int moei_import_is_router(const moei_importer *r, const char *suffix) {
    size_t expert;
    const moei_tensor_name *row = moei_tensor_name_find(moei_sets_of_file(r), suffix, &expert);
    return row != NULL && (row->flags & MOEI_TENSOR_ROUTER) != 0;
}

/* ---- >>prefix: where the layer is ---- */

/* Length of the part of a name before ".gate.weight" or another router name; 0: not a router. */
static size_t moei_import_router_prefix(const moei_importer *r, const char *name) {
    size_t i;
    for (i = 1; name[i - 1] != '\0'; i++)
        if (name[i] == '.' && moei_import_is_router(r, name + i + 1)) return i;
    return 0;
}

/* Variant i of the caller's prefix; 0: there is no such variant. */
static int moei_import_prefix_variant(const moei_importer *r, const char *given, int i, char out[MOEI_IMPORT_NAME]) {
    static const char *const blocks[] = {"mlp", "block_sparse_moe", "feed_forward"};
    size_t length = moei_strlen(given), last, k;
    moei_text t = moei_import_text(out, MOEI_IMPORT_NAME);
    while (length > 0 && given[length - 1] == '.') length--;
    if (length == 0 || (i > 0 && r->kind == MOEI_IMPORT_GGUF)) return 0;
    if (i > 3) { /* replaces the last part */
        for (last = length; last > 0 && given[last - 1] != '.';) last--;
        for (k = 0; k < 3 && !(moei_strlen(blocks[k]) == length - last &&
                               moei_memcmp(given + last, blocks[k], length - last) == 0);)
            k++;
        if (k == 3 || last == 0) return 0;
        length = last - 1;
    }
    moei_put(&t, given, length);
    if (i > 0) {
        moei_put(&t, ".", 1);
        moei_put(&t, blocks[(i - 1) % 3], moei_strlen(blocks[(i - 1) % 3]));
    }
    return 1;
}

/* Whether the file has a router under r->prefix. *dense: it has a dense layer there. */
static moe_status moei_import_prefix_try(moei_importer *r, int *is, int *dense) {
    static const char *const plain[] = {"gate_proj.weight", "w1.weight", "up_proj.weight", "ffn_up.weight"};
    char name[MOEI_IMPORT_NAME], file[MOEI_IMPORT_NAME];
    const char *suffix;
    moei_import_tensor f;
    moei_import_walk w;
    int i;
    moe_status status;
    moei_import_walk_begin(&w, r, r->first);
    while ((status = moei_import_walk_next(&w, r, name, &f, file)) == MOE_OK && !*is) {
        suffix = moei_import_suffix(name, r->prefix);
        if (suffix == NULL) continue;
        if (moei_import_is_router(r, suffix)) *is = 1;
        for (i = 0; i < 4; i++)
            if (moei_strcmp(suffix, plain[i]) == 0) *dense = 1;
    }
    return status == MOE_ERR_NOT_FOUND ? MOE_OK : status;
}

/* The error for a prefix without a router. It lists the MoE layers of the file. */
static moe_status moei_import_prefix_missing(moei_importer *r, const char *given, int dense) {
    char name[MOEI_IMPORT_NAME], file[MOEI_IMPORT_NAME], shown[52], first[52], last[52];
    moei_import_tensor f;
    moei_import_walk w;
    const char *between;
    size_t n = 0, length;
    moe_status status;
    first[0] = last[0] = '\0';
    moei_import_walk_begin(&w, r, r->first);
    while ((status = moei_import_walk_next(&w, r, name, &f, file)) == MOE_OK) {
        if ((length = moei_import_router_prefix(r, name)) == 0) continue;
        (void)moei_span_text(moei_span_of(name, length), n++ == 0 ? first : last);
    }
    if (status != MOE_ERR_NOT_FOUND) return status;
    (void)moei_span_text(moei_span_of(given, moei_strlen(given)), shown);
    if (dense)
        return moei_error(r->error, MOE_ERR_NOT_FOUND,
                          "'%s' is a dense layer (first_k_dense_replace, mlp_only_layers); MoE layers: %z%s%s%s%s",
                          shown, n, n > 0 ? ", " : "", first, n > 1 ? " to " : "", last);
    if (n == 0)
        return moei_error(r->error, MOE_ERR_NOT_FOUND, "no router at '%s': %s has no MoE layer",
                          shown, r->first->shown);
    between = n > 2 ? " ... " : n > 1 ? ", " : "";
    return moei_error(r->error, MOE_ERR_NOT_FOUND, "no router at '%s'; the MoE layers of the file (%z): %s%s%s", shown,
                      n, first,
                      between, last);
}

static moe_status moei_import_prefix_find(moei_importer *r, const char *given) {
    int i, is = 0, dense = 0;
    for (i = 0; i < 7; i++) {
        moe_status status;
        if (!moei_import_prefix_variant(r, given, i, r->prefix)) continue;
        status = moei_import_prefix_try(r, &is, &dense);
        if (status != MOE_OK || is) return status;
    }
    return moei_import_prefix_missing(r, given, dense);
}

/* Takes the block's index from the prefix: its last part that is a number. */
static void moei_import_prefix_block(moei_importer *r) {
    const char *p, *part = r->prefix;
    for (p = r->prefix;; p++) {
        size_t number = 0;
        if (*p != '.' && *p != '\0') continue;
        while (*part >= '0' && *part <= '9' && number < 100000) number = 10 * number + (size_t)(*part++ - '0');
        if (part == p && p > r->prefix && p[-1] != '.') {
            r->block = number;
            r->by_block = 1;
        }
        if (*p == '\0') return;
        part = p + 1;
    }
}

/* ---- >>collect the tensors of the layer ---- */

static size_t moei_import_tensor_count(const moe_buffer *list) { return list->size / sizeof(moei_import_tensor); }
static moei_import_tensor *moei_import_tensor_at(const moe_buffer *list, size_t i) {
    return (moei_import_tensor *)(void *)list->data + i;
}

/* Full tensor name for messages; a long prefix loses its beginning, so that the rest of a message
   has room. */
static const char *moei_import_full_name(const moei_importer *r, const char *suffix, char out[112]) {
    char prefix[36];
    size_t expert;
    moei_text t = moei_import_text(out, 112);
    moei_import_show(r->prefix, prefix, sizeof prefix);
    moei_put(&t, prefix, moei_strlen(prefix));
    moei_put(&t, ".", prefix[0] != '\0' ? 1 : 0);
    if (r->part != NULL && moei_tensor_name_find(moei_sets_of_file(r), suffix, &expert) != NULL)
        moei_put(&t, r->part, moei_strlen(r->part));
    moei_put(&t, suffix, moei_strlen(suffix));
    return out;
}

static int moei_import_starts(const char *text, const char *with) {
    while (*with != '\0' && *text == *with) {
        text++;
        with++;
    }
    return *with == '\0';
}

static int moei_import_ends(const char *text, const char *with) {
    size_t n = moei_strlen(text), m = moei_strlen(with);
    return n >= m && moei_strcmp(text + n - m, with) == 0;
}

/* In GGUF, attention and norms of a block share the prefix of the layer. */
static int moei_import_is_moe(const moei_importer *r, const char *suffix) {
    const char *p;
    if (r->kind != MOEI_IMPORT_GGUF) return 1;
    for (p = suffix; *p != '\0'; p++)
        if (moei_import_starts(p, "norm")) return 0;
    return moei_import_starts(suffix, "ffn_") || moei_import_starts(suffix, "exp_");
}

static moe_status moei_import_tensor_push(moei_importer *r, moe_buffer *list, const moei_import_tensor *f) {
    moe_status status;
    list->allocator = r->allocator;
    status = moei_buffer_write(list, f, sizeof *f);
    return status == MOE_OK ? MOE_OK : moei_error(r->error, status, "no memory for the list of tensors");
}

/* The same under another name. */
static moe_status moei_import_tensor_add(moei_importer *r, moe_buffer *list, moei_import_tensor *f,
                                         const char *suffix) {
    moei_import_copy(f->suffix, sizeof f->suffix, suffix);
    return moei_import_tensor_push(r, list, f);
}

/* Only plain file names: an index must not lead out of its folder. */
static int moei_import_is_plain(const char *name) {
    const char *p;
    if (name[0] == '\0' || name[0] == '.') return 0;
    for (p = name; *p != '\0'; p++)
        if (*p == '/' || *p == '\\' || *p == ':' || (unsigned char)*p < 0x20) return 0;
    return 1;
}

/* The file that an index names, opened if necessary. */
static moe_status moei_import_shard_find(moei_importer *r, const char *suffix, const char *file,
                                         moei_import_shard **shard) {
    char shown[52], of[52];
    moe_status status;
    for (*shard = r->shards; *shard != NULL; *shard = (*shard)->next)
        if (*shard != r->first && moei_strcmp((*shard)->name, file) == 0) return MOE_OK;
    (void)moei_span_text(moei_span_of(file, moei_strlen(file)), shown);
    (void)moei_span_text(moei_span_of(suffix, moei_strlen(suffix)), of);
    if (!moei_import_is_plain(file))
        return moei_error(r->error, MOE_ERR_FORMAT,
                          "%s: the file of '%s' is named '%s'; it must be a plain name in the same folder",
                          r->first->shown, of, shown);
    status = moei_import_shard_open(r, file, shard);
    if (status == MOE_ERR_NOT_FOUND)
        return moei_error(r->error, status, "%s: the file '%s', which holds '%s', is missing", r->first->shown, shown,
                          of);
    return status == MOE_OK ? moei_import_shard_header(r, *shard) : status;
}

/* How many rows (i = 0) or columns (i = 1) share a scale, by config.json; 1 if it has no value. */
static size_t moei_import_scale_block(const moei_importer *r, size_t i) {
    const size_t at = moei_import_config_at(r, "quantization_config.weight_block_size");
    const size_t element = at > 0 ? moei_import_json_element(&r->config, at, i) : 0;
    moei_json j = moei_import_json_at(&r->config, element, NULL);
    size_t value = 0;
    return element > 0 && moei_json_size(&j, &value) == MOE_OK && value > 0 && value <= MOE_MAX_WIDTH ? value : 1;
}

/* FP8: one scale for each block of rows and columns. */
static moe_status moei_import_join_fp8(const moei_importer *r, moei_import_tensor *f, const moei_import_tensor *of) {
    const size_t height = moei_import_scale_block(r, 0), width = moei_import_scale_block(r, 1);
    const int n = f->n_dims;
    char shown[112];
    int i, good = n >= 2 && of->n_dims == n && of->dtype == MOE_DTYPE_F32 && f->type != NULL && f->bytes == f->count;
    for (i = 0; i < n && good; i++) {
        const size_t block = i == n - 1 ? width : i == n - 2 ? height : 1;
        good = of->shape[i] == f->shape[i] / block + (f->shape[i] % block != 0);
    }
    if (!good)
        return moei_error(r->error, MOE_ERR_SHAPE, "tensor '%s': not F8_E4M3 with one F32 scale per block of "
                          "quantization_config.weight_block_size", moei_import_full_name(r, f->suffix, shown));
    f->scales.width = of->shape[n - 1];
    f->scales.rows = height;
    f->scales.columns = width;
    return MOE_OK;
}

/* MXFP4: [..., blocks, 16] bytes and [..., blocks] scales hold [..., 32 blocks] numbers. */
static moe_status moei_import_join_mxfp4(const moei_importer *r, moei_import_tensor *f, const moei_import_tensor *of) {
    const int n = of->n_dims;
    char shown[112];
    int i, good = n >= 2 && f->n_dims == n + 1 && f->dtype == MOE_DTYPE_U8 && of->dtype == MOE_DTYPE_U8 &&
                  f->shape[n] == 16;
    for (i = 0; i < n && good; i++) good = f->shape[i] == of->shape[i];
    if (!good)
        return moei_error(r->error, MOE_ERR_SHAPE, "tensor '%s': not U8 with 16 bytes for every byte of its scales",
                          moei_import_full_name(r, f->suffix, shown));
    f->type = moei_gguf_type_find(MOEI_TYPE_MXFP4);
    f->dtype = MOE_DTYPE_COUNT;
    f->n_dims = n;
    f->shape[n - 1] *= 32;
    f->count *= 2;
    f->scales.width = of->shape[n - 1];
    f->scales.rows = 1;
    f->scales.columns = 32;
    return MOE_OK;
}

/* What follows the first n bytes of `begin` in a name; NULL: it does not start with them. */
static const char *moei_import_behind(const char *name, const char *begin, size_t n) {
    size_t i;
    for (i = 0; i < n; i++)
        if (name[i] != begin[i]) return NULL;
    return name + n;
}

/* The tensor whose scales are in `of`; NULL: `of` has no scales, or their tensor is missing. */
static moei_import_tensor *moei_import_scaled(const moe_buffer *list, const moei_import_tensor *of, int *is_fp8) {
    const size_t length = moei_strlen(of->suffix);
    const int fp8 = moei_import_ends(of->suffix, "_scale_inv"), mxfp4 = moei_import_ends(of->suffix, "_scales");
    const size_t stem = length - (fp8 ? 10 : mxfp4 ? 7 : 0);
    size_t i;
    *is_fp8 = fp8;
    if (!fp8 && !mxfp4) return NULL;
    for (i = 0; i < moei_import_tensor_count(list); i++) {
        moei_import_tensor *f = moei_import_tensor_at(list, i);
        const char *behind = moei_import_behind(f->suffix, of->suffix, stem);
        if (behind != NULL && moei_strcmp(behind, fp8 ? "" : "_blocks") == 0) return f;
    }
    return NULL;
}

/* Attaches scales to their tensors and removes them from the list, which is of one block. */
static moe_status moei_import_join(const moei_importer *r, moe_buffer *list) {
    const size_t n = moei_import_tensor_count(list);
    size_t i, kept = 0;
    int is_fp8;
    if (r->kind == MOEI_IMPORT_GGUF) return MOE_OK;
    for (i = 0; i < n; i++) {
        const moei_import_tensor of = *moei_import_tensor_at(list, i);
        moei_import_tensor *f = moei_import_scaled(list, &of, &is_fp8);
        moe_status status;
        if (f == NULL || f->scales.shard != NULL) continue;
        status = is_fp8 ? moei_import_join_fp8(r, f, &of) : moei_import_join_mxfp4(r, f, &of);
        if (status != MOE_OK) return status;
        f->scales.shard = of.shard;
        f->scales.at = of.at;
        f->scales.bytes = of.bytes;
    }
    for (i = 0; i < n; i++) {
        const moei_import_tensor *of = moei_import_tensor_at(list, i);
        const moei_import_tensor *f = moei_import_scaled(list, of, &is_fp8);
        if (f != NULL && f->scales.shard == of->shard && f->scales.at == of->at) continue;
        if (kept != i) *moei_import_tensor_at(list, kept) = *of;
        kept++;
    }
    list->size = kept * sizeof(moei_import_tensor);
    return MOE_OK;
}

/* Collects the tensors under the prefix. */
static moe_status moei_import_collect(moei_importer *r) {
    char name[MOEI_IMPORT_NAME], file[MOEI_IMPORT_NAME];
    const char *suffix;
    moei_import_shard *shard;
    moei_import_tensor f;
    moei_import_walk w;
    moe_status status;
    moei_import_walk_begin(&w, r, r->first);
    while ((status = moei_import_walk_next(&w, r, name, &f, file)) == MOE_OK) {
        suffix = moei_import_suffix(name, r->prefix);
        if (suffix == NULL || !moei_import_is_moe(r, suffix)) continue;
        if (r->kind == MOEI_IMPORT_INDEX) {
            if ((status = moei_import_shard_find(r, suffix, file, &shard)) != MOE_OK) return status;
            f.shard = shard;
        }
        status = moei_import_tensor_add(r, r->kind == MOEI_IMPORT_INDEX ? &r->listed : &r->found, &f, suffix);
        if (status != MOE_OK) return status;
    }
    if (status != MOE_ERR_NOT_FOUND) return status;
    for (shard = r->shards; shard != NULL && r->kind == MOEI_IMPORT_INDEX; shard = shard->next) {
        if (shard->bytes.size == 0) continue; /* the index itself or config.json */
        moei_import_walk_begin(&w, r, shard);
        while ((status = moei_import_walk_file(&w, shard, name, &f)) == MOE_OK)
            if ((suffix = moei_import_suffix(name, r->prefix)) != NULL &&
                (status = moei_import_tensor_add(r, &r->found, &f, suffix)) != MOE_OK)
                return status;
        if (status != MOE_ERR_NOT_FOUND) return status;
    }
    return moei_import_join(r, &r->found);
}

/* ---- >>family of the layer ---- */

static int moei_family_reads(const moei_family *family, const char *key) {
    return moei_is_word_of(key, moei_family_common_keys) || moei_is_word_of(key, family->keys);
}

static int moei_is_per_expert(const moei_tensor_name *row) {
    return moei_memchr(row->name, '%', moei_strlen(row->name)) != NULL;
}

/* A layer does not scale the sum of experts and dense part, so only models have a dense part. */
static long moei_sets_of_family(const moei_importer *r, const moei_family *family) {
    if (r->kind != MOEI_IMPORT_GGUF) return family->sets;
    return r->is_model ? family->gguf_sets : family->gguf_sets & ~MOEI_SET_G_BESIDE;
}

/* Whether the tensors fit a family: it knows every name, and every set that it needs occurs. */
static int moei_family_fits(const moei_importer *r, const moei_family *family, int by_names) {
    long seen = 0, needs = r->kind == MOEI_IMPORT_GGUF ? family->gguf_needs : family->needs;
    size_t i, expert;
    if (by_names && family->telling < 0) return 0;
    if (by_names && r->kind != MOEI_IMPORT_GGUF) needs |= family->telling;
    for (i = 0; i < moei_import_tensor_count(&r->found); i++) {
        const moei_tensor_name *row =
            moei_tensor_name_find(moei_sets_of_family(r, family), moei_import_tensor_at(&r->found, i)->suffix, &expert);
        if (row == NULL) return 0;
        seen |= row->set;
    }
    return (needs & ~seen) == 0;
}

/* Advice for tensor names that indicate a quantized model. */
static const char *moei_family_advice(const char *suffix) {
    const char *p;
    for (p = suffix; *p != '\0'; p++)
        if (moei_import_starts(p, "_blocks") || moei_import_starts(p, "scale") || moei_import_starts(p, "_packed") ||
            moei_import_starts(p, "qweight") || moei_import_starts(p, "qzeros"))
            return ": this quantization is not supported; save the model dequantized (bf16) or as GGUF Q8_0";
    return "";
}

/* The error for names that do not fit a family, or (NULL) any family. */
static moe_status moei_family_refuse(const moei_importer *r, const moei_family *family) {
    const long sets = family != NULL ? moei_sets_of_family(r, family) : moei_sets_of_file(r);
    long missing = family == NULL ? 0 : r->kind == MOEI_IMPORT_GGUF ? family->gguf_needs : family->needs;
    const moei_tensor_name *row;
    char shown[112];
    size_t i, expert;
    for (i = 0; i < moei_import_tensor_count(&r->found); i++) {
        const char *suffix = moei_import_tensor_at(&r->found, i)->suffix;
        if ((row = moei_tensor_name_find(sets, suffix, &expert)) == NULL)
            return moei_error(r->error, MOE_ERR_UNSUPPORTED, "tensor '%s': %s has %s tensor of this name%s",
                              moei_import_full_name(r, suffix, shown),
                              family != NULL ? family->name : "no known family", family != NULL ? "no" : "a",
                              moei_family_advice(suffix));
        missing &= ~row->set;
    }
    for (row = moei_tensor_names; row->name != NULL; row++)
        if ((row->set & missing) != 0)
            return moei_error(r->error, MOE_ERR_NOT_FOUND, "tensor '%s': missing in the file; %s needs it",
                              moei_import_full_name(r, row->name, shown), family->name);
    return moei_error(r->error, MOE_ERR_UNSUPPORTED,
                      "'%s': no family has this combination of tensors; set preset",
                      r->prefix);
}

/* The families that the preset, model_type or general.architecture allows, as a bit mask.
   *by_names: only the tensor names identify the family. */
static moe_status moei_family_candidates(moei_importer *r, uint32_t *candidates, int *by_names) {
    const char *const key = r->kind == MOEI_IMPORT_GGUF ? "general.architecture" : "config.json: model_type";
    char type[MOEI_IMPORT_VALUE];
    const moei_family *family;
    uint32_t bit = 1, typed = 0;
    uint32_t named = 0, exact = 0;
    int kind = MOEI_VALUE_TEXT;
    type[0] = '\0';
    if (r->kind == MOEI_IMPORT_GGUF) memcpy(type, r->gguf.arch, sizeof type);
    else kind = moei_import_value(r, "model_type", type);
    for (family = moei_families; family->name != NULL; family++, bit <<= 1) {
        if (moei_sets_of_family(r, family) == 0) continue;
        if (moei_is_word_of(type, r->kind == MOEI_IMPORT_GGUF ? family->archs : family->types)) typed |= bit;
        if (r->preset != NULL && moei_strcmp(family->preset, r->preset->name) == 0) named |= bit;
        if (r->preset != NULL && moei_strcmp(family->name, r->preset->name) == 0) exact |= bit;
    }
    if (r->preset != NULL && typed != 0 && !(typed & named))
        return moei_error(r->error, MOE_ERR_CONFIG, "preset = %s contradicts %s = '%s'; without a preset the family "
                          "is detected", r->preset->name, key, type);
    if (r->preset == NULL && typed == 0 && kind != MOEI_VALUE_NONE)
        return moei_error(r->error, MOE_ERR_UNSUPPORTED,
                          "%s = '%s': unknown family; set preset to one that computes the same", key, type);
    r->by_type = r->preset == NULL && typed != 0;
    if (r->preset == NULL) named = typed;
    if (exact != 0) named = exact;
    *by_names = named == 0;
    *candidates = named != 0 ? named : bit - 1;
    return MOE_OK;
}

static moe_status moei_family_find(moei_importer *r) {
    const moei_family *family, *fitting = NULL, *candidate = NULL;
    const moei_family *second = NULL;
    uint32_t candidates = 0, bit = 1;
    int by_names = 0, n = 0;
    char text[MOEI_IMPORT_VALUE];
    /* norm_topk_prob in the settings distinguishes families with equal tensor names */
    const int normed = moei_import_value(r, "norm_topk_prob", text) != MOEI_VALUE_NONE;
    moe_status status = moei_family_candidates(r, &candidates, &by_names);
    if (status != MOE_OK) return status;
    for (family = moei_families; family->name != NULL; family++, bit <<= 1) {
        if (!(candidates & bit)) continue;
        if (candidate == NULL) candidate = family;
        if (!moei_family_fits(r, family, by_names) ||
            (by_names && normed && !moei_family_reads(family, "norm_topk_prob")))
            continue;
        if (n++ == 0) fitting = family;
        else second = family;
    }
    if (n > 1 && r->preset == NULL && !normed)
        return moei_error(r->error, MOE_ERR_UNSUPPORTED,
                          "'%s': the tensors fit %s and %s; set preset, or add the config.json of the model",
                          r->prefix, fitting->name, second->name);
    r->family = fitting != NULL ? fitting : candidate;
    if (fitting != NULL) return MOE_OK;
    return moei_family_refuse(r, by_names ? NULL : candidate);
}

/* ---- >>shapes ---- */

enum { MOEI_SIZE_E = 0, MOEI_SIZE_H, MOEI_SIZE_I, MOEI_SIZE_S };

/* The size that a letter of a shape stands for; 0: not known yet. */
static size_t moei_shape_size(const size_t sizes[4], char letter) {
    switch (letter) {
    case 'E': return sizes[MOEI_SIZE_E];
    case 'H': return sizes[MOEI_SIZE_H];
    case 'I': return sizes[MOEI_SIZE_I];
    case 'J': return 2 * sizes[MOEI_SIZE_I];
    case 'S': return sizes[MOEI_SIZE_S];
    case 'P': return 2 * sizes[MOEI_SIZE_S];
    default: return 1;
    }
}

static moe_status moei_import_shape_refuse(const moei_importer *r, const moei_import_tensor *f) {
    char shown[112], want[80], have[80];
    size_t sizes[MOE_FILE_MAX_DIMS];
    int i, n = (int)moei_strlen(f->row->shape);
    for (i = 0; i < n; i++) {
        const size_t most = f->row->shape[i] == 'E' ? (size_t)MOE_MAX_EXPERTS : (size_t)MOE_MAX_WIDTH;
        sizes[i] = moei_shape_size(r->sizes, f->row->shape[i]);
        if (sizes[i] == 0 && n == f->n_dims) sizes[i] = f->shape[i] > 0 ? f->shape[i] : 1; /* any size would do */
        if (sizes[i] > 2 * most) sizes[i] = most;
    }
    return moei_error(r->error, MOE_ERR_SHAPE, "tensor '%s': the shape must be %s, it is %s",
                      moei_import_full_name(r, f->suffix, shown), moei_shape_text(sizes, n, want),
                      moei_shape_text(f->shape, f->n_dims, have));
}

/* Takes sizes that are not known yet from the shape of a tensor and checks the others. */
static moe_status moei_import_shape_solve(moei_importer *r, const moei_import_tensor *f) {
    const char *shape = f->row->shape;
    int i, n = (int)moei_strlen(shape);
    for (i = 0; i < n && n == f->n_dims; i++) {
        const char letter = shape[i];
        const int which = letter == 'E'   ? MOEI_SIZE_E
                          : letter == 'H' ? MOEI_SIZE_H
                          : letter == 'S' ? MOEI_SIZE_S
                          : letter == 'P' ? MOEI_SIZE_S
                                          : MOEI_SIZE_I;
        size_t *size = &r->sizes[which];
        size_t most = shape[i] == 'E' ? (size_t)MOE_MAX_EXPERTS : (size_t)MOE_MAX_WIDTH;
        if (shape[i] != '1' && *size == 0) *size = letter == 'J' || letter == 'P' ? f->shape[i] / 2 : f->shape[i];
        if (f->shape[i] == 0 || f->shape[i] > 2 * most || f->shape[i] != moei_shape_size(r->sizes, shape[i])) break;
    }
    return n == f->n_dims && i == n ? MOE_OK : moei_import_shape_refuse(r, f);
}

/* Checks that the element type is supported and that the data lies in the file. */
static moe_status moei_import_tensor_check(const moei_importer *r, const moei_import_tensor *f) {
    char shown[112], number[24];
    moei_text t = moei_import_text(number, sizeof number);
    int known = f->dtype <= MOE_DTYPE_BF16 || (f->type != NULL && (f->type->codes != NULL || f->scales.shard != NULL));
    moei_put_integer(&t, f->code);
    if (!known && r->kind == MOEI_IMPORT_GGUF)
        return moei_error(r->error, MOE_ERR_UNSUPPORTED,
                          "tensor '%s': GGUF type %s is not supported; F32, F16, BF16, F64, Q4_0 to Q8_0, Q2_K to "
                          "Q6_K, IQ4_NL, IQ4_XS and MXFP4 are",
                          moei_import_full_name(r, f->suffix, shown),
                          f->type != NULL ? f->type->external.name : number);
    if (!known)
        return moei_error(r->error, MOE_ERR_UNSUPPORTED,
                          "tensor '%s': dtype %s is not supported; F32, F16, BF16 and F64 are",
                          moei_import_full_name(r, f->suffix, shown),
                          f->dtype < MOE_DTYPE_COUNT ? moei_dtypes[f->dtype].name : "(unknown)");
    if (f->at > f->shard->source.size || f->bytes > f->shard->source.size - f->at)
        return moei_error(r->error, MOE_ERR_FORMAT,
                          "tensor '%s': %z bytes at offset %z go beyond the end of the file",
                          moei_import_full_name(r, f->suffix, shown), f->bytes, (size_t)f->at);
    return MOE_OK;
}

/* Finds the row of every tensor and solves the sizes in the order of the rows, router first. */
static moe_status moei_import_match(moei_importer *r) {
    char shown[112];
    const moei_tensor_name *row;
    size_t i;
    for (i = 0; i < moei_import_tensor_count(&r->found); i++) {
        moei_import_tensor *f = moei_import_tensor_at(&r->found, i);
        moe_status status;
        f->row = moei_tensor_name_find(moei_sets_of_family(r, r->family), f->suffix, &f->expert);
        moei_gguf_fit(r, f, moei_strlen(f->row->shape));
        if ((status = moei_import_tensor_check(r, f)) != MOE_OK) return status;
    }
    for (row = moei_tensor_names; row->name != NULL; row++)
        for (i = 0; i < moei_import_tensor_count(&r->found); i++) {
            const moei_import_tensor *f = moei_import_tensor_at(&r->found, i);
            moe_status status;
            if (f->row != row) continue;
            if ((status = moei_import_shape_solve(r, f)) != MOE_OK) return status;
            if (f->expert >= r->sizes[MOEI_SIZE_E])
                return moei_error(r->error, MOE_ERR_SHAPE, "tensor '%s': the router has only %z experts",
                                  moei_import_full_name(r, f->suffix, shown), r->sizes[MOEI_SIZE_E]);
        }
    return MOE_OK;
}

/* ---- >>settings ---- */

/* Where the settings come from, for messages. */
static const char *moei_settings_source(const moei_importer *r) {
    return r->kind == MOEI_IMPORT_GGUF ? "metadata" : "config.json";
}

/* Applies a value if the row matches it. *done: a row has matched. */
static moe_status moei_setting_apply(moei_importer *r, const moei_setting *s, const char *text, int kind, int *done) {
    const moe_field *field;
    const char *wrong = "";
    moe_error why;
    moe_status status;
    why.message[0] = '\0';
    if (s->value != NULL && moei_strcmp(s->value, text) != 0) return MOE_OK;
    *done = 1;
    if (s->value != NULL) return moe_fields_apply(moei_layer_fields, &r->settings, s->settings, r->error);
    field = moe_field_find(moei_layer_fields, s->settings);
    status = kind == MOEI_VALUE_SCALAR ? moei_field_set_n(field, &r->settings, text, moei_strlen(text), &why)
                                       : MOE_ERR_CONFIG;
    if (status == MOE_OK && moei_field_is_zero(field, &r->settings)) wrong = s->zero ? "" : " other than 0";
    else if (s->zero && field->kind == MOE_FIELD_INT && text[0] == '-') wrong = " that is not negative";
    if (status == MOE_OK && wrong[0] == '\0') return MOE_OK;
    return moei_error(r->error, MOE_ERR_CONFIG, "%s: %s = %s: expected a number%s", moei_settings_source(r), s->key,
                      kind == MOEI_VALUE_OTHER ? "a list" : text, wrong);
}

/* Applies all settings of the file to r->settings. */
static moe_status moei_settings_read(moei_importer *r) {
    const moei_setting *s, *t;
    char text[MOEI_IMPORT_VALUE];
    for (s = moei_settings; s->key != NULL; s = t) {
        int done = 0, kind = MOEI_VALUE_NONE;
        if (moei_family_reads(r->family, s->key)) kind = moei_import_value(r, s->key, text);
        for (t = s; t->key != NULL && moei_strcmp(t->key, s->key) == 0; t++) {
            moe_status status = kind != MOEI_VALUE_NONE ? moei_setting_apply(r, t, text, kind, &done) : MOE_OK;
            if (status != MOE_OK) return status;
        }
        if (kind != MOEI_VALUE_NONE && !done)
            return moei_error(r->error, MOE_ERR_UNSUPPORTED, "%s: %s = %s is not supported for %s",
                              moei_settings_source(r), s->key, kind == MOEI_VALUE_OTHER ? "a list" : text,
                              r->family->name);
    }
    return MOE_OK;
}

/* Refuses a GGUF file without a key that llama.cpp has no default for; 0 counts as absent. */
static moe_status moei_settings_required(const moei_importer *r) {
    char text[MOEI_IMPORT_VALUE];
    const char *key = r->family->gguf_key;
    if (r->kind == MOEI_IMPORT_GGUF && r->is_model &&
        moei_import_value(r, "expert_used_count", text) == MOEI_VALUE_NONE)
        return moei_error(r->error, MOE_ERR_NOT_FOUND, "metadata: %s.expert_used_count is missing", r->gguf.arch);
    if (!r->by_type || r->kind != MOEI_IMPORT_GGUF || key == NULL) return MOE_OK;
    if (moei_import_value(r, key, text) != MOEI_VALUE_NONE && moei_strcmp(text, "0") != 0) return MOE_OK;
    return moei_error(r->error, MOE_ERR_NOT_FOUND, "metadata: %s.%s is missing; %s needs it, or set preset",
                      r->gguf.arch, key, r->family->name);
}

/* A size in the settings must agree with the tensors. */
static moe_status moei_setting_size(const moei_importer *r, const char *what, int *field, size_t size) {
    if (*field != 0 && (size_t)*field != size)
        return moei_error(r->error, MOE_ERR_CONFIG, "%s: %s = %d, but the tensors have %z", moei_settings_source(r),
                          what, *field, size);
    *field = (int)size;
    return MOE_OK;
}

/* Resolves settings that depend on each other. */
static void moei_settings_settle(moei_importer *r) {
    moe_router_config *c = &r->settings.router;
    if (c->select == MOE_SELECT_GROUPED_TOP_K && c->groups <= 1) c->select = MOE_SELECT_TOP_K;
    if (c->select != MOE_SELECT_GROUPED_TOP_K) c->groups = c->groups_kept = c->group_score = 0;
    if (r->kind != MOEI_IMPORT_GGUF && moei_strcmp(r->family->name, "deepseek_v2") == 0 &&
        c->weight == MOE_WEIGHT_SUM)
        c->scale = MOEI_R(1.0);
}

/* The tensors decide which parameters the layer has, and its widths. */
static moe_status moei_settings_sizes(moei_importer *r) {
    enum { N = 6 };
    static const int params[N] = {MOE_ROUTER_BIAS,     MOE_ROUTER_SELECTION_BIAS, MOE_SHARED_SIGMOID,
                                  MOE_EXPERTS_GATE_BIAS, MOE_EXPERTS_UP_BIAS,     MOE_EXPERTS_DOWN_BIAS};
    moe_layer_config *c = &r->settings;
    int *const flags[N] = {&c->router.router_bias, &c->router.selection_bias, &c->shared_sigmoid,
                           &c->expert_bias,        &c->expert_bias,           &c->expert_bias};
    size_t i, shared = r->sizes[MOEI_SIZE_S];
    int k;
    moe_status status = moei_setting_size(r, "number of experts", &c->router.n_experts, r->sizes[MOEI_SIZE_E]);
    if (status == MOE_OK) status = moei_setting_size(r, "hidden_size", &c->router.d_model, r->sizes[MOEI_SIZE_H]);
    if (status == MOE_OK && r->sizes[MOEI_SIZE_I] > 0)
        status = moei_setting_size(r, "moe_intermediate_size", &c->d_ff, r->sizes[MOEI_SIZE_I]);
    if (status != MOE_OK) return status;
    for (k = 0; k < N; k++) *flags[k] = 0;
    for (i = 0; i < moei_import_tensor_count(&r->found); i++)
        for (k = 0; k < N; k++)
            if (moei_tensor_name_params(moei_import_tensor_at(&r->found, i)->row) >> params[k] & 1u) *flags[k] = 1;
    if (shared > 0 && (c->n_shared <= 0 || shared % (size_t)c->n_shared != 0)) c->n_shared = 1;
    if (shared > 0) c->d_shared = (int)(shared / (size_t)c->n_shared);
    if (shared > 0 && c->expert == MOE_EXPERT_GLU) c->shared_act = c->act;
    return MOE_OK;
}

/* Refuses a file whose gate or weights differ from those of the caller's preset. */
static moe_status moei_preset_check(const moei_importer *r, const moe_layer_config *before) {
    static const char *const names[] = {"gate", "weight"};
    char said[52], found[52];
    size_t i;
    for (i = 0; i < sizeof names / sizeof names[0] && r->preset != NULL; i++) {
        const moe_field *field = moe_field_find(moei_layer_fields, names[i]);
        moe_field_text(field, before, said, sizeof said);
        moe_field_text(field, &r->settings, found, sizeof found);
        if (moei_strcmp(said, found) != 0)
            return moei_error(r->error, MOE_ERR_CONFIG,
                              "preset = %s has %s = %s, but %s says %s; \"%s %s=%s\" would agree",
                              r->preset->name, names[i], said, moei_settings_source(r), found, r->preset->name,
                              names[i], found);
    }
    return MOE_OK;
}

/* Refuses a file that changes a setting of the caller. */
static moe_status moei_changes_check(const moei_importer *r) {
    moe_layer_config wanted = r->settings;
    const moe_field *field;
    char said[52], found[52];
    moe_status status = moe_fields_apply(moei_layer_fields, &wanted, r->changes, r->error);
    for (field = moei_layer_fields; field->name != NULL && status == MOE_OK; field++) {
        moe_field_text(field, &wanted, said, sizeof said);
        moe_field_text(field, &r->settings, found, sizeof found);
        if (moei_strcmp(said, found) != 0)
            status = moei_error(r->error, MOE_ERR_CONFIG, "preset: %s = %s, but by the file's settings and tensors it "
                                "is %s", field->name, said, found);
    }
    return status;
}

static moe_status moei_settings_make(moei_importer *r) {
    moe_layer_config *c = &r->settings, before;
    moe_status status = moe_layer_preset(r->preset != NULL ? r->preset->name : r->family->preset, c, r->error);
    if (status != MOE_OK) return status;
    c->router.n_experts = c->n_shared = 0;
    c->router.bias_rate = c->router.loss_balance = c->router.loss_z = 0; /* only training uses them */
    if (r->by_type)
        status = moe_fields_apply(moei_layer_fields, c,
                                  r->kind == MOEI_IMPORT_GGUF ? r->family->gguf_defaults : r->family->defaults,
                                  r->error);
    if (status == MOE_OK) status = moe_fields_apply(moei_layer_fields, c, r->changes, r->error);
    if (status == MOE_OK) status = moei_settings_required(r);
    before = *c;
    if (status == MOE_OK) status = moei_settings_read(r);
    if (status == MOE_OK) status = moei_preset_check(r, &before);
    if (status != MOE_OK) return status;
    /* GGUF does not store the group score */
    if (r->kind == MOEI_IMPORT_GGUF && c->router.groups > 1) c->router.select = MOE_SELECT_GROUPED_TOP_K;
    moei_settings_settle(r);
    status = moei_settings_sizes(r);
    return status == MOE_OK ? moei_changes_check(r) : status;
}

/* ---- >>values ---- */

/* How a tensor of a file maps to the layer: [experts,outs,ins] or, transposed, [experts,ins,outs].
   outs covers gate and up where they are fused. */
typedef struct moei_tensor_view {
    moe_real *to[2];
    size_t experts, outs, ins, count;
    int fused, transposed, interleaved;
} moei_tensor_view;

/* The layer may be constant: a view of it is then only read. */
static moei_tensor_view moei_tensor_view_of(const moe_layer *layer, const moei_tensor_name *row, const size_t sizes[4],
                                            size_t expert) {
    const size_t n = moei_strlen(row->shape);
    moei_tensor_view p;
    size_t i;
    memset(&p, 0, sizeof p);
    p.count = 1;
    for (i = 0; i < n; i++) p.count *= moei_shape_size(sizes, row->shape[i]);
    p.fused = row->second >= 0;
    p.transposed = (row->flags & MOEI_TENSOR_TRANSPOSED) != 0;
    p.interleaved = (row->flags & MOEI_TENSOR_INTERLEAVED) != 0;
    p.experts = p.outs = 1;
    p.ins = p.count;
    if (p.fused || p.transposed) {
        p.experts = row->shape[0] == 'E' ? sizes[MOEI_SIZE_E] : 1;
        p.outs = moei_shape_size(sizes, row->shape[p.transposed ? n - 1 : n - 2]);
        p.ins = p.count / p.experts / p.outs;
    }
    memcpy(&p.to[0], &layer->tensors[row->param], sizeof p.to[0]);
    if (p.fused) memcpy(&p.to[1], &layer->tensors[row->second], sizeof p.to[1]);
    if (moei_is_per_expert(row)) p.to[0] += expert * p.count;
    return p;
}

/* The element of the layer that corresponds to one of the file. */
static moe_real *moei_tensor_view_at(const moei_tensor_view *p, size_t expert, size_t out, size_t in) {
    const size_t half = p->fused ? p->outs / 2 : p->outs;
    const int second = p->fused && (p->interleaved ? out % 2 != 0 : out >= half);
    const size_t row = !p->fused ? out : p->interleaved ? out / 2 : second ? out - half : out;
    return p->to[second] + (expert * half + row) * p->ins + in;
}

/* Copies elements first .. first + n - 1 of the file tensor to the layer (write = 0) or from it
   (write = 1). */
static void moei_tensor_view_copy(const moei_tensor_view *p, size_t first, size_t n, moe_real *values, int write) {
    const size_t line = p->transposed ? p->outs : p->ins, lines = p->transposed ? p->ins : p->outs;
    size_t k, run;
    for (; n > 0; first += run, n -= run, values += run) {
        const size_t expert = first / line / lines, a = first / line % lines;
        const size_t b = first % line;
        moe_real *at = p->transposed ? NULL : moei_tensor_view_at(p, expert, a, b);
        run = n < line - b ? n : line - b;
        if (at != NULL) memcpy(write ? values : at, write ? at : values, run * sizeof *at);
        for (k = 0; k < run && at == NULL; k++) {
            if (write) values[k] = *moei_tensor_view_at(p, expert, b + k, a);
            else *moei_tensor_view_at(p, expert, b + k, a) = values[k];
        }
    }
}

/* Dequantizes elements first .. first + n - 1 of a tensor with separate scales. */
static void moei_import_unscale(const moei_import_tensor *f, const unsigned char *scales, size_t first, size_t n,
                                const unsigned char *bytes, moe_real *values) {
    const size_t columns = f->shape[f->n_dims - 1], rows = f->shape[f->n_dims - 2];
    const size_t lines = rows / f->scales.rows + (rows % f->scales.rows != 0);
    const int is_fp8 = f->type->code == MOEI_TYPE_E4M3;
    size_t i;
    for (i = 0; i < n; i++) {
        const size_t row = (first + i) / columns, column = (first + i) % columns;
        const size_t line = row / rows * lines + row % rows / f->scales.rows;
        const size_t at = line * f->scales.width + column / f->scales.columns;
        const unsigned byte = is_fp8 ? bytes[i] : bytes[i / 2];
        const int code = moei_fp4_values[i % 2 == 0 ? byte & 15u : byte >> 4];
        values[i] = is_fp8 ? moei_from_e4m3(byte) * (moe_real)moei_binary32((uint32_t)moei_load(scales + 4 * at, 4))
                           : moei_e8m0_half(scales[at]) * (moe_real)code;
    }
}

/* Reads the scales of a tensor, which the caller frees, after an error too. NULL and MOE_OK: it has
   none. */
static moe_status moei_import_scales_read(moei_importer *r, const moei_import_tensor *f, unsigned char **scales) {
    *scales = NULL;
    if (f->scales.shard == NULL) return MOE_OK;
    *scales = (unsigned char *)moei_alloc(&r->allocator, f->scales.bytes, 1);
    if (*scales == NULL)
        return moei_error(r->error, MOE_ERR_MEMORY, "no memory for %z bytes of scales", f->scales.bytes);
    return moei_import_read_at(r, f->scales.shard, f->scales.at, *scales, f->scales.bytes);
}

static moe_status moei_import_tensor_read(moei_importer *r, const moei_import_tensor *f, moe_layer *layer) {
    unsigned char bytes[MOEI_IMPORT_CHUNK * 8];
    moe_real values[MOEI_IMPORT_CHUNK];
    const moei_tensor_view view = moei_tensor_view_of(layer, f->row, r->sizes, f->expert);
    const moei_block_type *blocks = f->dtype >= MOE_DTYPE_COUNT ? f->type : NULL;
    unsigned char *scales;
    moe_external matrix;
    moe_file_tensor t;
    uint64_t at = f->at;
    size_t done, n, size;
    moe_status status = moei_import_scales_read(r, f, &scales);
    memset(&t, 0, sizeof t);
    memset(&matrix, 0, sizeof matrix);
    matrix.data = bytes;
    if (blocks != NULL) {
        matrix.type = &blocks->external;
        matrix.column = (size_t)blocks->external.bytes;
    }
    for (done = 0; done < f->count && status == MOE_OK; done += n, at += size) {
        n = f->count - done < MOEI_IMPORT_CHUNK ? f->count - done : (size_t)MOEI_IMPORT_CHUNK;
        size = blocks != NULL ? n / (size_t)blocks->external.block * matrix.column : n * moei_dtypes[f->dtype].size;
        status = moei_import_read_at(r, f->shard, at, bytes, size);
        if (status != MOE_OK) break;
        t.dtype = f->dtype;
        t.count = n;
        t.data = bytes;
        t.bytes = size;
        if (scales != NULL) moei_import_unscale(f, scales, done, n, bytes, values);
        else if (blocks != NULL) blocks->external.unpack(moei_table(NULL), &matrix, 0, 0, n, values);
        else status = moe_file_values(&t, 0, n, values, NULL);
        if (status == MOE_OK) moei_tensor_view_copy(&view, done, n, values, 0);
    }
    if (scales != NULL) moei_free(&r->allocator, scales, f->scales.bytes);
    return status;
}

/* ---- >>complete: every tensor is used exactly once ---- */

static int moei_is_expert_param(int param) { return param >= MOE_EXPERTS_GATE && param < MOE_SHARED_GATE; }

/* Marks the parameters that a tensor fills. Returns 0 if one of them was filled before. Bit i of
   seen[e] stands for parameter i of expert e. */
static int moei_import_mark(uint64_t *seen, size_t experts, const moei_tensor_name *row, size_t expert) {
    const int all = moei_is_expert_param(row->param) && !moei_is_per_expert(row);
    const uint64_t bits = moei_tensor_name_params(row);
    size_t e;
    int fresh = 1;
    for (e = all ? 0 : expert; e < (all ? experts : expert + 1); e++) {
        if (seen[e] & bits) fresh = 0;
        seen[e] |= bits;
    }
    return fresh;
}

/* The parameters that a tensor fills and that the layer has in this size, as a bit mask. */
static uint64_t moei_import_places(const moei_importer *r, const moe_layer *layer, const moei_import_tensor *f) {
    const uint64_t params = moei_tensor_name_params(f->row) & layer->present;
    const size_t parts = moei_is_per_expert(f->row) ? r->sizes[MOEI_SIZE_E] : 1;
    uint64_t places = 0;
    int param;
    for (param = 0; param < MOE_LAYER_PARAMETER_COUNT; param++) {
        moe_parameter slot;
        if (!(params >> param & 1u)) continue;
        memset(&slot, 0, sizeof slot);
        (void)moe_layer_parameter(&layer->config, param, &slot);
        places |= (uint64_t)(slot.count / parts == (f->row->second >= 0 ? f->count / 2 : f->count)) << param;
    }
    return places;
}

/* The error for a parameter that no tensor fills. It names the missing tensor in the style of the
   layer's other tensors. */
static moe_status moei_import_missing(const moei_importer *r, const moe_layer *layer, int param, size_t expert) {
    char shown[112], suffix[MOEI_IMPORT_SUFFIX];
    const moei_tensor_name *row, *best = NULL;
    size_t i;
    int sure = 0;
    moe_parameter slot;
    moei_text t;
    for (row = moei_tensor_names; row->name != NULL; row++) {
        if (!(row->set & moei_sets_of_family(r, r->family)) || (row->param != param && row->second != param)) continue;
        if (best == NULL) best = row;
        for (i = 0; i < moei_import_tensor_count(&r->found) && !sure; i++) {
            /* prefer a name whose set occurs in the file */
            const moei_tensor_name *other = moei_import_tensor_at(&r->found, i)->row;
            sure = other->set == row->set && !(other->flags & MOEI_TENSOR_ROUTER) &&
                   moei_is_per_expert(other) == moei_is_per_expert(row);
            if (sure) best = row;
        }
    }
    if (best == NULL) {
        (void)moe_layer_parameter(&layer->config, param, &slot); /* the layer has it */
        return moei_error(r->error, MOE_ERR_CONFIG, "the settings need a parameter '%s', but %s has no tensor for it",
                          slot.name, r->family->name);
    }
    t = moei_import_text(suffix, sizeof suffix);
    moei_tensor_name_put(&t, best, expert);
    return moei_error(r->error, MOE_ERR_NOT_FOUND, "tensor '%s': missing in the file",
                      moei_import_full_name(r, suffix, shown));
}

static moe_status moei_import_complete(moei_importer *r, const moe_layer *layer, uint64_t *seen) {
    char shown[112];
    size_t i, e, expert, experts = r->sizes[MOEI_SIZE_E];
    int param, is_fp8;
    for (i = 0; i < moei_import_tensor_count(&r->found); i++) {
        const moei_import_tensor *f = moei_import_tensor_at(&r->found, i);
        if (!moei_import_mark(seen, experts, f->row, f->expert))
            return moei_error(r->error, MOE_ERR_FORMAT, "tensor '%s': duplicates another tensor",
                              moei_import_full_name(r, f->suffix, shown));
    }
    for (i = 0; i < moei_import_tensor_count(&r->listed); i++) {
        const moei_import_tensor *f = moei_import_tensor_at(&r->listed, i);
        const moei_tensor_name *row = moei_tensor_name_find(moei_sets_of_family(r, r->family), f->suffix, &expert);
        const moei_import_tensor *scaled = moei_import_scaled(&r->found, f, &is_fp8);
        if (scaled != NULL && scaled->scales.shard != NULL) continue;
        if (row == NULL || expert >= experts || !(seen[expert] >> row->param & 1u))
            return moei_error(r->error, MOE_ERR_NOT_FOUND,
                              "tensor '%s': the index lists it in '%s', which does not have it",
                              moei_import_full_name(r, f->suffix, shown),
                              f->shard->shown);
    }
    for (param = 0; param < MOE_LAYER_PARAMETER_COUNT; param++) {
        const size_t n = moei_is_expert_param(param) ? experts : 1;
        if (!(layer->present >> param & 1u) || moei_is_training_state(param)) continue;
        for (e = 0; e < n; e++)
            if (!(seen[e] >> param & 1u)) return moei_import_missing(r, layer, param, e);
    }
    for (i = 0; i < moei_import_tensor_count(&r->found); i++) {
        const moei_import_tensor *f = moei_import_tensor_at(&r->found, i);
        if (moei_import_places(r, layer, f) != moei_tensor_name_params(f->row))
            return moei_error(r->error, MOE_ERR_UNSUPPORTED,
                              "tensor '%s': a layer with these settings has no such tensor",
                              moei_import_full_name(r, f->suffix, shown));
    }
    return MOE_OK;
}

/* Creates the layer and reads its tensors, once settings and sizes are complete. */
static moe_status moei_import_fill(moei_importer *r, moe_layer *layer) {
    uint64_t *seen;
    size_t i;
    moe_status status = moe_layer_init(layer, &r->settings, r->error);
    if (status != MOE_OK) return moei_import_error_in(r, r->family->name, status);
    layer->allocator = r->allocator;
    seen = (uint64_t *)moei_alloc(&r->allocator, r->sizes[MOEI_SIZE_E], sizeof *seen);
    if (seen == NULL)
        return moei_error(r->error, MOE_ERR_MEMORY, "no memory for the list of %z experts", r->sizes[MOEI_SIZE_E]);
    status = moei_import_complete(r, layer, seen);
    moei_free(&r->allocator, seen, r->sizes[MOEI_SIZE_E] * sizeof *seen);
    if (status == MOE_OK) status = moei_layer_allocate(layer, 0, r->error);
    for (i = 0; i < moei_import_tensor_count(&r->found) && status == MOE_OK; i++)
        status = moei_import_tensor_read(r, moei_import_tensor_at(&r->found, i), layer);
    if (status != MOE_OK) moe_layer_free(layer);
    return status;
}

/* Opens the file, detects its format and reads what precedes the tensors. */
static moe_status moei_import_open(moei_importer *r, const char *name) {
    /* largest index in bytes */
    const size_t most = SIZE_MAX > 65535 ? (size_t)(MOEI_FILE_MAX_HEADER & SIZE_MAX) : (size_t)32768;
    unsigned char begin[9];
    uint64_t size;
    moe_status status = moei_import_shard_open(r, name, &r->first);
    if (status != MOE_OK) return status;
    size = r->first->source.size;
    memset(begin, 0, sizeof begin);
    status = moei_import_read_at(r, r->first, 0, begin, size < sizeof begin ? (size_t)size : sizeof begin);
    if (status != MOE_OK) return status;
    if (moei_memcmp(begin, "GGUF", 4) == 0) {
        r->kind = MOEI_IMPORT_GGUF;
        return moei_gguf_open_parts(r);
    }
    if (begin[8] == '{' && begin[7] == 0) {
        status = moei_import_shard_header(r, r->first);
        return status == MOE_OK ? moei_import_config_open(r) : status;
    }
    if (begin[0] != '{' && begin[0] != ' ' && begin[0] != '\n' && begin[0] != '\r' && begin[0] != '\t')
        return moei_error(r->error, MOE_ERR_FORMAT,
                          "%s: not a safetensors file, an index of safetensors files or a GGUF file", r->first->shown);
    r->kind = MOEI_IMPORT_INDEX;
    if ((status = moei_import_json_open(r, r->first, most, &r->index)) != MOE_OK) return status;
    r->weight_map = moei_import_json_member(&r->index, 0, "weight_map");
    if (r->weight_map == 0 || r->index.data[r->weight_map] != '{')
        return moei_error(r->error, MOE_ERR_FORMAT,
                          "%s: not an index of safetensors files: it has no object 'weight_map'", r->first->shown);
    return moei_import_config_open(r);
}

/* ---- >>models: architectures and their tensors ---- */

/* Traits of an architecture; bits. Those of a block leave out what this block lacks. */
#define MOEI_ARCH_NEIGHBOURS (UINT64_C(1) << 0)    /* rotary pairs are neighbors, not halves */
#define MOEI_ARCH_SEPARATE (UINT64_C(1) << 1)      /* matrices of queries, keys and values */
#define MOEI_ARCH_FUSED (UINT64_C(1) << 2)         /* one matrix of all three, or separate ones */
#define MOEI_ARCH_BIAS (UINT64_C(1) << 3)          /* biases of queries, keys and values */
#define MOEI_ARCH_MAY_BIAS (UINT64_C(1) << 4)
#define MOEI_ARCH_OUT_BIAS (UINT64_C(1) << 5)      /* of attention's output */
#define MOEI_ARCH_HEAD_NORM (UINT64_C(1) << 6)     /* norms of each head's query and key */
#define MOEI_ARCH_MAY_HEAD_NORM (UINT64_C(1) << 7)
#define MOEI_ARCH_WHOLE_NORM (UINT64_C(1) << 8)    /* norms of all queries and all keys of a token */
#define MOEI_ARCH_NORM_AFTER (UINT64_C(1) << 9)    /* these norms come after RoPE */
#define MOEI_ARCH_SINKS (UINT64_C(1) << 10)
#define MOEI_ARCH_LAYER_NORM (UINT64_C(1) << 11)   /* layer norms, not RMS norms */
#define MOEI_ARCH_NORM_BIAS (UINT64_C(1) << 12)
#define MOEI_ARCH_LATENT (UINT64_C(1) << 13)       /* multi-head latent attention */
#define MOEI_ARCH_CONVOLUTION (UINT64_C(1) << 14)  /* some blocks have one instead of attention */
#define MOEI_ARCH_POST_NORM (UINT64_C(1) << 15)    /* norms before both residual sums */
#define MOEI_ARCH_SECOND_POST (UINT64_C(1) << 16)  /* GGUF: the second norm is post_attention_norm */
#define MOEI_ARCH_SECOND_ATTN (UINT64_C(1) << 17)  /* GGUF: it is attn_output_norm */
#define MOEI_ARCH_SECOND_FFN (UINT64_C(1) << 18)   /* it is ffn_norm */
#define MOEI_ARCH_DENSE (UINT64_C(1) << 19)        /* some blocks are dense */
#define MOEI_ARCH_HEAD_BIAS (UINT64_C(1) << 20)    /* of the logits */
#define MOEI_ARCH_FACTORS (UINT64_C(1) << 21)      /* GGUF: rope_factors_long, _short */
#define MOEI_ARCH_FREQS (UINT64_C(1) << 22)        /* GGUF: rope_freqs */
#define MOEI_ARCH_LFM (UINT64_C(1) << 23)          /* names of lfm2 */
#define MOEI_ARCH_CHUNKS (UINT64_C(1) << 24)       /* llama4: chunked attention, layers without RoPE */
#define MOEI_ARCH_ROT_SCALE (UINT64_C(1) << 25)    /* scores are divided by sqrt(n_rot) */
#define MOEI_ARCH_GROK (UINT64_C(1) << 26)         /* multipliers and a cap of scores by default */
#define MOEI_ARCH_WINDOW (UINT64_C(1) << 27)       /* a sliding window in blocks 0, 2, ... */
#define MOEI_ARCH_WINDOWS (UINT64_C(1) << 32)      /* a sliding window in every block */
#define MOEI_ARCH_WINDOWS_ASKED (UINT64_C(1) << 35) /* only if use_sliding_window is true */
#define MOEI_ARCH_WINDOWS_LATE (UINT64_C(1) << 36)  /* only from block max_window_layers on */
#define MOEI_ARCH_MULTIPLIERS (UINT64_C(1) << 33)  /* of the embedding, residual sums, scores and logits */
#define MOEI_ARCH_CLAMP (UINT64_C(1) << 34)        /* of queries, keys and values */
/* set by a file's sizes */
#define MOEI_ARCH_LOW_QUERY (UINT64_C(1) << 28)    /* latent: low-rank queries */
#define MOEI_ARCH_FULL_QUERY (UINT64_C(1) << 29)   /* latent: full-rank queries */
#define MOEI_ARCH_HALVES_B (UINT64_C(1) << 30)     /* latent: attn_k_b and attn_v_b */
#define MOEI_ARCH_WHOLE_B (UINT64_C(1) << 31)      /* latent: attn_kv_b */

/* An architecture and the traits of its blocks. Its MoE layers are rows of moei_families. */
typedef struct moei_arch {
    const char *archs, *types;     /* general.architecture and model_type; "": there are none */
    uint64_t both, gguf, folder;   /* MOEI_ARCH_ of GGUF and folders, of GGUF, of folders */
    /* what its own program takes for keys that config.json lacks, where that is not 0 */
    const char *absent;
} moei_arch;

#define MOEI_ARCH_PLAIN (MOEI_ARCH_SEPARATE | MOEI_ARCH_SECOND_FFN)

static const moei_arch moei_archs[] = {
    {"llama", "mixtral", MOEI_ARCH_PLAIN,
     MOEI_ARCH_NEIGHBOURS | MOEI_ARCH_FREQS | MOEI_ARCH_FUSED | MOEI_ARCH_MAY_BIAS, MOEI_ARCH_WINDOWS,
     "rope_theta=1000000"},
    {"granitemoe", "granitemoe granitemoeshared", MOEI_ARCH_PLAIN | MOEI_ARCH_MULTIPLIERS,
     MOEI_ARCH_NEIGHBOURS | MOEI_ARCH_FREQS | MOEI_ARCH_FUSED | MOEI_ARCH_MAY_BIAS, MOEI_ARCH_MAY_BIAS,
     "attention_multiplier=1"},
    {"olmoe", "olmoe", MOEI_ARCH_PLAIN | MOEI_ARCH_WHOLE_NORM, 0, MOEI_ARCH_CLAMP | MOEI_ARCH_MAY_BIAS, ""},
    {"qwen2moe", "qwen2_moe", MOEI_ARCH_PLAIN | MOEI_ARCH_BIAS, 0,
     MOEI_ARCH_DENSE | MOEI_ARCH_WINDOWS | MOEI_ARCH_WINDOWS_ASKED | MOEI_ARCH_WINDOWS_LATE,
     "sliding_window=4096 max_window_layers=28"},
    {"qwen3moe", "qwen3_moe", MOEI_ARCH_PLAIN | MOEI_ARCH_HEAD_NORM, 0,
     MOEI_ARCH_DENSE | MOEI_ARCH_MAY_BIAS | MOEI_ARCH_WINDOWS | MOEI_ARCH_WINDOWS_ASKED, "sliding_window=4096"},
    {"deepseek", "", MOEI_ARCH_PLAIN | MOEI_ARCH_DENSE, MOEI_ARCH_NEIGHBOURS, 0, ""},
    {"deepseek2", "deepseek_v2 deepseek_v3 kimi_k2",
     MOEI_ARCH_LATENT | MOEI_ARCH_SECOND_FFN | MOEI_ARCH_DENSE | MOEI_ARCH_NEIGHBOURS, 0, 0, ""},
    {"gpt-oss", "gpt_oss",
     MOEI_ARCH_SEPARATE | MOEI_ARCH_BIAS | MOEI_ARCH_OUT_BIAS | MOEI_ARCH_SINKS | MOEI_ARCH_WINDOW,
     MOEI_ARCH_SECOND_POST, MOEI_ARCH_SECOND_FFN,
     "rope_theta=150000 sliding_window=128 rope_scaling.rope_type=yarn rope_scaling.factor=32 "
     "rope_scaling.original_max_position_embeddings=4096 rope_scaling.truncate=false"},
    {"phimoe", "phimoe",
     MOEI_ARCH_PLAIN | MOEI_ARCH_BIAS | MOEI_ARCH_OUT_BIAS | MOEI_ARCH_NORM_BIAS | MOEI_ARCH_HEAD_BIAS,
     MOEI_ARCH_FACTORS, MOEI_ARCH_LAYER_NORM | MOEI_ARCH_WINDOWS, "rope_theta=1000000 max_position_embeddings=131072"},
    {"dots1", "dots1", MOEI_ARCH_PLAIN | MOEI_ARCH_HEAD_NORM | MOEI_ARCH_DENSE, 0,
     MOEI_ARCH_MAY_BIAS | MOEI_ARCH_WINDOWS | MOEI_ARCH_WINDOWS_LATE, "sliding_window=4096 max_window_layers=62"},
    {"glm4moe", "glm4_moe",
     MOEI_ARCH_SEPARATE | MOEI_ARCH_MAY_BIAS | MOEI_ARCH_MAY_HEAD_NORM | MOEI_ARCH_DENSE, MOEI_ARCH_SECOND_POST,
     MOEI_ARCH_SECOND_FFN, "partial_rotary_factor=0.5"},
    {"ernie4_5-moe", "ernie4_5_moe", MOEI_ARCH_PLAIN | MOEI_ARCH_DENSE | MOEI_ARCH_NEIGHBOURS, 0, 0,
     "rope_theta=500000"},
    {"hunyuan-moe", "hunyuan_v1_moe", MOEI_ARCH_PLAIN | MOEI_ARCH_HEAD_NORM | MOEI_ARCH_NORM_AFTER, 0,
     MOEI_ARCH_MAY_BIAS, ""},
    {"bailingmoe", "", MOEI_ARCH_PLAIN | MOEI_ARCH_NEIGHBOURS | MOEI_ARCH_ROT_SCALE, 0, 0, ""},
    {"bailingmoe2", "", MOEI_ARCH_PLAIN | MOEI_ARCH_FUSED | MOEI_ARCH_HEAD_NORM | MOEI_ARCH_DENSE, 0, 0, ""},
    {"lfm2moe", "lfm2_moe",
     MOEI_ARCH_PLAIN | MOEI_ARCH_HEAD_NORM | MOEI_ARCH_DENSE | MOEI_ARCH_CONVOLUTION | MOEI_ARCH_LFM, 0, 0,
     "rope_theta=1000000"},
    {"minimax-m2", "minimax_m2", MOEI_ARCH_PLAIN | MOEI_ARCH_WHOLE_NORM, 0, 0, "rope_theta=5000000"},
    {"llama4", "llama4 llama4_text",
     MOEI_ARCH_PLAIN | MOEI_ARCH_DENSE | MOEI_ARCH_NEIGHBOURS | MOEI_ARCH_CHUNKS, MOEI_ARCH_FREQS, 0,
     "rope_theta=500000 attention_chunk_size=8192 attn_scale=0.1 floor_scale=8192"},
    {"dbrx", "",
     MOEI_ARCH_SEPARATE | MOEI_ARCH_FUSED | MOEI_ARCH_LAYER_NORM | MOEI_ARCH_SECOND_ATTN | MOEI_ARCH_CLAMP, 0, 0, ""},
    {"grok", "", MOEI_ARCH_PLAIN | MOEI_ARCH_POST_NORM | MOEI_ARCH_GROK, 0, 0, ""},
    {NULL, NULL, 0, 0, 0, NULL}};

/* Tensors of a model outside its MoE layers. */
enum {
    MOEI_PLACE_EMBEDDING, MOEI_PLACE_NORM, MOEI_PLACE_NORM_BIAS, MOEI_PLACE_HEAD, MOEI_PLACE_HEAD_BIAS,
    MOEI_PLACE_FREQS, MOEI_PLACE_LONG, MOEI_PLACE_SHORT,
    /* of every block */
    MOEI_PLACE_FIRST, MOEI_PLACE_FIRST_BIAS, MOEI_PLACE_SECOND, MOEI_PLACE_SECOND_BIAS, MOEI_PLACE_QUERY,
    MOEI_PLACE_KEY, MOEI_PLACE_VALUE, MOEI_PLACE_OUTPUT, MOEI_PLACE_FUSED, MOEI_PLACE_QUERY_BIAS, MOEI_PLACE_KEY_BIAS,
    MOEI_PLACE_VALUE_BIAS, MOEI_PLACE_OUTPUT_BIAS, MOEI_PLACE_QUERY_NORM, MOEI_PLACE_KEY_NORM,
    MOEI_PLACE_SINKS, MOEI_PLACE_QUERY_A, MOEI_PLACE_QUERY_A_NORM, MOEI_PLACE_QUERY_B, MOEI_PLACE_KV_A,
    MOEI_PLACE_KV_A_NORM, MOEI_PLACE_KV_B, MOEI_PLACE_KEY_B, MOEI_PLACE_VALUE_B, MOEI_PLACE_CONVOLUTION,
    MOEI_PLACE_CONVOLUTION_IN, MOEI_PLACE_CONVOLUTION_OUT, MOEI_PLACE_POST_FIRST, MOEI_PLACE_POST_SECOND,
    MOEI_PLACE_GATE, MOEI_PLACE_UP, MOEI_PLACE_DOWN, MOEI_PLACE_IGNORED, MOEI_PLACE_COUNT
};

/* The name of a tensor. Letters of a shape: V vocabulary, H d_model, h heads, D width of a key, Q
   all queries, K all keys, U all values, O all heads' outputs, T = Q + K + U, r half of n_rot, F
   width of a dense block, L kernel of the convolution, 3 = 3 H; latent: A rank of queries, C of
   keys and values, R = C + n_rot, n and v widths of a head's unrotated key and of its value, N =
   h (n + v), S = h (n + n_rot). */
typedef struct moei_place_name {
    int place;
    const char *gguf, *folder; /* after the block's prefix; NULL: no such name */
    const char *shape;
    uint64_t may, must;        /* 0 or traits that allow it; traits that require it */
} moei_place_name;

#define MOEI_ANY (~UINT64_C(0))

static const moei_place_name moei_place_names[] = {
    {MOEI_PLACE_EMBEDDING, "token_embd.weight", "model.embed_tokens.weight", "VH", 0, MOEI_ANY},
    {MOEI_PLACE_NORM, "token_embd_norm.weight", "model.embedding_norm.weight", "H", MOEI_ARCH_LFM, MOEI_ARCH_LFM},
    {MOEI_PLACE_NORM, "output_norm.weight", "model.norm.weight", "H", 0, ~MOEI_ARCH_LFM},
    {MOEI_PLACE_NORM_BIAS, "output_norm.bias", "model.norm.bias", "H", MOEI_ARCH_NORM_BIAS, MOEI_ARCH_NORM_BIAS},
    {MOEI_PLACE_HEAD, "output.weight", "lm_head.weight", "VH", 0, 0},
    {MOEI_PLACE_HEAD_BIAS, "output.bias", "lm_head.bias", "V", MOEI_ARCH_HEAD_BIAS, MOEI_ARCH_HEAD_BIAS},
    {MOEI_PLACE_FREQS, "rope_freqs.weight", NULL, "r", MOEI_ARCH_FREQS, 0},
    {MOEI_PLACE_LONG, "rope_factors_long.weight", NULL, "r", MOEI_ARCH_FACTORS, 0},
    {MOEI_PLACE_SHORT, "rope_factors_short.weight", NULL, "r", MOEI_ARCH_FACTORS, 0},
    {MOEI_PLACE_FIRST, NULL, "operator_norm.weight", "H", MOEI_ARCH_LFM, 0},
    {MOEI_PLACE_FIRST, "attn_norm.weight", "input_layernorm.weight", "H", 0, MOEI_ANY},
    {MOEI_PLACE_FIRST_BIAS, "attn_norm.bias", "input_layernorm.bias", "H", MOEI_ARCH_NORM_BIAS, MOEI_ARCH_NORM_BIAS},
    {MOEI_PLACE_SECOND, NULL, "ffn_norm.weight", "H", MOEI_ARCH_LFM, 0},
    {MOEI_PLACE_SECOND, "ffn_norm.weight", "post_attention_layernorm.weight", "H", MOEI_ARCH_SECOND_FFN,
     MOEI_ARCH_SECOND_FFN},
    {MOEI_PLACE_SECOND, "post_attention_norm.weight", NULL, "H", MOEI_ARCH_SECOND_POST, MOEI_ARCH_SECOND_POST},
    {MOEI_PLACE_SECOND, "attn_output_norm.weight", NULL, "H", MOEI_ARCH_SECOND_ATTN, MOEI_ARCH_SECOND_ATTN},
    {MOEI_PLACE_SECOND_BIAS, "ffn_norm.bias", "post_attention_layernorm.bias", "H", MOEI_ARCH_NORM_BIAS,
     MOEI_ARCH_NORM_BIAS},
    {MOEI_PLACE_QUERY, "attn_q.weight", "self_attn.q_proj.weight", "QH", MOEI_ARCH_SEPARATE, MOEI_ARCH_SEPARATE},
    {MOEI_PLACE_QUERY, "attn_q.weight", "self_attn.q_proj.weight", "SH", MOEI_ARCH_FULL_QUERY, MOEI_ARCH_FULL_QUERY},
    {MOEI_PLACE_KEY, "attn_k.weight", "self_attn.k_proj.weight", "KH", MOEI_ARCH_SEPARATE, MOEI_ARCH_SEPARATE},
    {MOEI_PLACE_VALUE, "attn_v.weight", "self_attn.v_proj.weight", "UH", MOEI_ARCH_SEPARATE, MOEI_ARCH_SEPARATE},
    {MOEI_PLACE_OUTPUT, NULL, "self_attn.out_proj.weight", "HO", MOEI_ARCH_LFM, 0},
    {MOEI_PLACE_OUTPUT, "attn_output.weight", "self_attn.o_proj.weight", "HO", 0,
     MOEI_ARCH_SEPARATE | MOEI_ARCH_LATENT | MOEI_ARCH_FUSED},
    {MOEI_PLACE_FUSED, "attn_qkv.weight", NULL, "TH", MOEI_ARCH_FUSED, 0},
    {MOEI_PLACE_QUERY_BIAS, "attn_q.bias", "self_attn.q_proj.bias", "Q", MOEI_ARCH_BIAS | MOEI_ARCH_MAY_BIAS,
     MOEI_ARCH_BIAS},
    {MOEI_PLACE_KEY_BIAS, "attn_k.bias", "self_attn.k_proj.bias", "K", MOEI_ARCH_BIAS | MOEI_ARCH_MAY_BIAS,
     MOEI_ARCH_BIAS},
    {MOEI_PLACE_VALUE_BIAS, "attn_v.bias", "self_attn.v_proj.bias", "U", MOEI_ARCH_BIAS | MOEI_ARCH_MAY_BIAS,
     MOEI_ARCH_BIAS},
    {MOEI_PLACE_OUTPUT_BIAS, "attn_output.bias", "self_attn.o_proj.bias", "H", MOEI_ARCH_OUT_BIAS | MOEI_ARCH_MAY_BIAS,
     MOEI_ARCH_OUT_BIAS},
    {MOEI_PLACE_QUERY_NORM, NULL, "self_attn.q_layernorm.weight", "D", MOEI_ARCH_LFM, 0},
    {MOEI_PLACE_QUERY_NORM, NULL, "self_attn.query_layernorm.weight", "D", MOEI_ARCH_NORM_AFTER, 0},
    {MOEI_PLACE_QUERY_NORM, "attn_q_norm.weight", "self_attn.q_norm.weight", "D",
     MOEI_ARCH_HEAD_NORM | MOEI_ARCH_MAY_HEAD_NORM, MOEI_ARCH_HEAD_NORM},
    {MOEI_PLACE_QUERY_NORM, "attn_q_norm.weight", "self_attn.q_norm.weight", "Q", MOEI_ARCH_WHOLE_NORM,
     MOEI_ARCH_WHOLE_NORM},
    {MOEI_PLACE_KEY_NORM, NULL, "self_attn.k_layernorm.weight", "D", MOEI_ARCH_LFM, 0},
    {MOEI_PLACE_KEY_NORM, NULL, "self_attn.key_layernorm.weight", "D", MOEI_ARCH_NORM_AFTER, 0},
    {MOEI_PLACE_KEY_NORM, "attn_k_norm.weight", "self_attn.k_norm.weight", "D",
     MOEI_ARCH_HEAD_NORM | MOEI_ARCH_MAY_HEAD_NORM, MOEI_ARCH_HEAD_NORM},
    {MOEI_PLACE_KEY_NORM, "attn_k_norm.weight", "self_attn.k_norm.weight", "K", MOEI_ARCH_WHOLE_NORM,
     MOEI_ARCH_WHOLE_NORM},
    {MOEI_PLACE_SINKS, "attn_sinks.weight", "self_attn.sinks", "h", MOEI_ARCH_SINKS, MOEI_ARCH_SINKS},
    {MOEI_PLACE_QUERY_A, "attn_q_a.weight", "self_attn.q_a_proj.weight", "AH", MOEI_ARCH_LOW_QUERY,
     MOEI_ARCH_LOW_QUERY},
    {MOEI_PLACE_QUERY_A_NORM, "attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight", "A", MOEI_ARCH_LOW_QUERY,
     MOEI_ARCH_LOW_QUERY},
    {MOEI_PLACE_QUERY_B, "attn_q_b.weight", "self_attn.q_b_proj.weight", "SA", MOEI_ARCH_LOW_QUERY,
     MOEI_ARCH_LOW_QUERY},
    {MOEI_PLACE_KV_A, "attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight", "RH", MOEI_ARCH_LATENT,
     MOEI_ARCH_LATENT},
    {MOEI_PLACE_KV_A_NORM, "attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight", "C", MOEI_ARCH_LATENT,
     MOEI_ARCH_LATENT},
    {MOEI_PLACE_KV_B, "attn_kv_b.weight", "self_attn.kv_b_proj.weight", "NC", MOEI_ARCH_WHOLE_B, MOEI_ARCH_WHOLE_B},
    {MOEI_PLACE_KEY_B, "attn_k_b.weight", NULL, "hCn", MOEI_ARCH_HALVES_B, MOEI_ARCH_HALVES_B},
    {MOEI_PLACE_VALUE_B, "attn_v_b.weight", NULL, "hvC", MOEI_ARCH_HALVES_B, MOEI_ARCH_HALVES_B},
    {MOEI_PLACE_CONVOLUTION, "shortconv.conv.weight", NULL, "HL", MOEI_ARCH_CONVOLUTION, MOEI_ARCH_CONVOLUTION},
    {MOEI_PLACE_CONVOLUTION, NULL, "conv.conv.weight", "H1L", MOEI_ARCH_CONVOLUTION, MOEI_ARCH_CONVOLUTION},
    {MOEI_PLACE_CONVOLUTION_IN, "shortconv.in_proj.weight", "conv.in_proj.weight", "3H", MOEI_ARCH_CONVOLUTION,
     MOEI_ARCH_CONVOLUTION},
    {MOEI_PLACE_CONVOLUTION_OUT, "shortconv.out_proj.weight", "conv.out_proj.weight", "HH", MOEI_ARCH_CONVOLUTION,
     MOEI_ARCH_CONVOLUTION},
    {MOEI_PLACE_POST_FIRST, "attn_output_norm.weight", NULL, "H", MOEI_ARCH_POST_NORM, MOEI_ARCH_POST_NORM},
    {MOEI_PLACE_POST_SECOND, "layer_output_norm.weight", NULL, "H", MOEI_ARCH_POST_NORM, 0},
    {MOEI_PLACE_POST_SECOND, "post_ffw_norm.weight", NULL, "H", MOEI_ARCH_POST_NORM, MOEI_ARCH_POST_NORM},
    {MOEI_PLACE_GATE, NULL, "feed_forward.w1.weight", "FH", MOEI_ARCH_DENSE, 0},
    {MOEI_PLACE_GATE, NULL, "feed_forward.gate_proj.weight", "FH", MOEI_ARCH_DENSE, 0},
    {MOEI_PLACE_GATE, "ffn_gate.weight", "mlp.gate_proj.weight", "FH", MOEI_ARCH_DENSE, MOEI_ARCH_DENSE},
    {MOEI_PLACE_UP, NULL, "feed_forward.w3.weight", "FH", MOEI_ARCH_DENSE, 0},
    {MOEI_PLACE_UP, NULL, "feed_forward.up_proj.weight", "FH", MOEI_ARCH_DENSE, 0},
    {MOEI_PLACE_UP, "ffn_up.weight", "mlp.up_proj.weight", "FH", MOEI_ARCH_DENSE, MOEI_ARCH_DENSE},
    {MOEI_PLACE_DOWN, NULL, "feed_forward.w2.weight", "HF", MOEI_ARCH_DENSE, 0},
    {MOEI_PLACE_DOWN, NULL, "feed_forward.down_proj.weight", "HF", MOEI_ARCH_DENSE, 0},
    {MOEI_PLACE_DOWN, "ffn_down.weight", "mlp.down_proj.weight", "HF", MOEI_ARCH_DENSE, MOEI_ARCH_DENSE},
    {MOEI_PLACE_IGNORED, NULL, "self_attn.rotary_emb.inv_freq", NULL, 0, 0},
    {MOEI_PLACE_COUNT, NULL, NULL, NULL, 0, 0}};

/* Sizes and settings of a model; those that differ between blocks are of the one read last. */
typedef struct moei_model {
    const moei_arch *arch;
    uint64_t traits;
    int blocks, d_model, context, heads, kv_heads, key, value, n_rot;
    int original, nextn, window, chunk, interval, kernel, experts, full_blocks;
    int query_rank, kv_rank, key_mla, value_mla, nope, tuning_floor;
    int vocabulary, d_dense; /* of the tensors */
    int is_long;             /* 1: the context is longer than in training */
    moe_real eps, base, base_window, rotated_part, factor, attention_factor, log_multiplier;
    moe_real beta_fast, beta_slow, mscale, mscale_all, low_freq, high_freq, long_mscale, short_mscale, alpha;
    moe_real embedding_scale, residual_scale, attention_scale, logit_scale, clamp, output_scale, score_cap, logit_cap;
    moe_real tuning;
    const moei_import_tensor *places[MOEI_PLACE_FIRST];
    const moei_import_tensor *factors; /* RoPE factors, one per rotary pair; NULL: none */
} moei_model;

/* A setting of a model: its keys in GGUF (after "ARCH.") and in config.json; the first that exists
   counts. */
typedef struct moei_model_key {
    const char *gguf, *folder;
    size_t offset;
    int is_real;
    double least, most;
} moei_model_key;

#define MOEI_MODEL_INT(gguf, folder, field, least, most) {gguf, folder, offsetof(moei_model, field), 0, least, most}
#define MOEI_MODEL_REAL(gguf, folder, field, least, most) {gguf, folder, offsetof(moei_model, field), 1, least, most}

static const moei_model_key moei_model_keys[] = {
    MOEI_MODEL_INT("block_count", "num_hidden_layers", blocks, 1, 1024),
    MOEI_MODEL_INT("embedding_length", "hidden_size", d_model, 1, MOE_MAX_WIDTH),
    MOEI_MODEL_INT("context_length", "max_position_embeddings", context, 1, 16777216),
    MOEI_MODEL_INT("attention.head_count", "num_attention_heads", heads, 0, 65536),
    MOEI_MODEL_INT("attention.head_count_kv", "num_key_value_heads", kv_heads, 0, 65536),
    MOEI_MODEL_INT("attention.key_length", "head_dim", key, 1, 65536),
    MOEI_MODEL_INT("attention.value_length", "v_head_dim", value, 1, 65536),
    MOEI_MODEL_INT("rope.dimension_count", "rotary_dim qk_rope_head_dim", n_rot, 1, 65536),
    MOEI_MODEL_REAL("", "partial_rotary_factor rope_parameters.partial_rotary_factor", rotated_part, 1e-6, 1),
    MOEI_MODEL_INT("expert_count", "", experts, 0, 1048576),
    MOEI_MODEL_INT("", "max_window_layers", full_blocks, 0, 1048576),
    MOEI_MODEL_INT("nextn_predict_layers", "num_nextn_predict_layers", nextn, 0, 1024),
    MOEI_MODEL_INT("attention.sliding_window", "sliding_window", window, 0, 16777216),
    MOEI_MODEL_INT("", "attention_chunk_size", chunk, 0, 16777216),
    MOEI_MODEL_INT("", "no_rope_layer_interval", interval, 1, 1048576),
    MOEI_MODEL_INT("shortconv.l_cache", "conv_L_cache", kernel, 1, 64),
    MOEI_MODEL_INT("attention.q_lora_rank", "q_lora_rank", query_rank, 0, MOE_MAX_WIDTH),
    MOEI_MODEL_INT("attention.kv_lora_rank", "kv_lora_rank", kv_rank, 1, MOE_MAX_WIDTH),
    MOEI_MODEL_INT("attention.key_length_mla", "", key_mla, 1, 65536),
    MOEI_MODEL_INT("attention.value_length_mla", "", value_mla, 1, 65536),
    MOEI_MODEL_INT("", "qk_nope_head_dim", nope, 1, 65536),
    MOEI_MODEL_REAL("attention.layer_norm_rms_epsilon attention.layer_norm_epsilon", "rms_norm_eps norm_eps", eps, 0,
                    1),
    MOEI_MODEL_REAL("rope.freq_base", "rope_theta rope_parameters.rope_theta", base, 1e-3, 1e30),
    MOEI_MODEL_REAL("rope.freq_base_swa", "", base_window, 1e-3, 1e30),
    MOEI_MODEL_REAL("rope.scaling.factor rope.scale_linear", "rope_scaling.factor rope_parameters.factor", factor, 0,
                    1e6),
    MOEI_MODEL_INT("rope.scaling.original_context_length",
                   "rope_scaling.original_max_position_embeddings rope_parameters.original_max_position_embeddings "
                   "original_max_position_embeddings",
                   original, 1, 16777216),
    MOEI_MODEL_REAL("rope.scaling.attn_factor", "rope_scaling.attention_factor rope_parameters.attention_factor",
                    attention_factor, 0, 1e6),
    MOEI_MODEL_REAL("rope.scaling.yarn_log_multiplier", "", log_multiplier, -1e6, 1e6),
    MOEI_MODEL_REAL("rope.scaling.yarn_beta_fast", "rope_scaling.beta_fast rope_parameters.beta_fast", beta_fast, 0,
                    1e6),
    MOEI_MODEL_REAL("rope.scaling.yarn_beta_slow", "rope_scaling.beta_slow rope_parameters.beta_slow", beta_slow, 0,
                    1e6),
    MOEI_MODEL_REAL("", "rope_scaling.mscale rope_parameters.mscale", mscale, -1e6, 1e6),
    MOEI_MODEL_REAL("", "rope_scaling.mscale_all_dim rope_parameters.mscale_all_dim", mscale_all, -1e6, 1e6),
    MOEI_MODEL_REAL("", "rope_scaling.low_freq_factor rope_parameters.low_freq_factor", low_freq, 0, 1e6),
    MOEI_MODEL_REAL("", "rope_scaling.high_freq_factor rope_parameters.high_freq_factor", high_freq, 0, 1e6),
    MOEI_MODEL_REAL("", "rope_scaling.alpha rope_parameters.alpha", alpha, 0, 1e9),
    MOEI_MODEL_REAL("", "rope_scaling.long_mscale rope_parameters.long_mscale", long_mscale, 0, 1e6),
    MOEI_MODEL_REAL("", "rope_scaling.short_mscale rope_parameters.short_mscale", short_mscale, 0, 1e6),
    MOEI_MODEL_REAL("embedding_scale", "embedding_multiplier", embedding_scale, -1e6, 1e6),
    MOEI_MODEL_REAL("residual_scale", "residual_multiplier", residual_scale, -1e6, 1e6),
    MOEI_MODEL_REAL("attention.scale", "attention_multiplier", attention_scale, -1e6, 1e6),
    MOEI_MODEL_REAL("logit_scale", "logits_scaling", logit_scale, -1e6, 1e6),
    MOEI_MODEL_REAL("attention.clamp_kqv", "clip_qkv", clamp, 0, 1e6),
    MOEI_MODEL_REAL("attention.output_scale", "", output_scale, -1e6, 1e6),
    MOEI_MODEL_REAL("attn_logit_softcapping", "", score_cap, 0, 1e6),
    MOEI_MODEL_REAL("final_logit_softcapping", "", logit_cap, 0, 1e6),
    MOEI_MODEL_REAL("attention.temperature_scale", "attn_scale", tuning, 0, 1e6),
    MOEI_MODEL_INT("attention.temperature_length", "floor_scale", tuning_floor, 1, 16777216),
    {NULL, NULL, 0, 0, 0.0, 0.0}};

/* One block of a model. */
typedef struct moei_model_block {
    uint64_t traits;
    int is_moe, is_convolution, rotates, qk_plain;
    int window, chunk, tuned;
    const moei_import_tensor *places[MOEI_PLACE_COUNT];
    moe_layer_config mixture;
} moei_model_block;

/* ---- >>model_names ---- */

/* A tensor's name after its block's prefix; *block receives the block's index, -1 for tensors
   outside the blocks. */
static const char *moei_model_rest(const moei_importer *r, const char *name, int *block) {
    const char *rest = name, *p;
    int digits = 0, number = 0;
    *block = -1;
    if (r->kind != MOEI_IMPORT_GGUF && moei_import_starts(rest, "language_model.")) rest += 15;
    p = rest;
    if (!moei_import_starts(p, r->kind == MOEI_IMPORT_GGUF ? "blk." : "model.layers.")) return rest;
    for (p += r->kind == MOEI_IMPORT_GGUF ? 4 : 13; *p >= '0' && *p <= '9' && digits < 5; p++, digits++)
        number = number * 10 + (*p - '0');
    if (digits == 0 || *p != '.' || (digits > 1 && p[-digits] == '0')) return rest;
    *block = number;
    return p + 1;
}

/* Adds a tensor of the model to the list of all. Those of images (llama4) and of multi-token
   prediction outside the blocks (ernie4_5_moe) are left out. */
static moe_status moei_model_add(moei_importer *r, const char *name, moei_import_tensor *f) {
    const char *rest = moei_model_rest(r, name, &f->block);
    if (r->kind != MOEI_IMPORT_GGUF &&
        (moei_import_starts(rest, "vision_model.") || moei_import_starts(rest, "multi_modal_projector.") ||
         moei_import_starts(rest, "model.mtp_")))
        return MOE_OK;
    return moei_import_tensor_add(r, &r->all, f, rest);
}

/* Lists all tensors of the model; of an index, opens its files. */
static moe_status moei_model_collect(moei_importer *r) {
    char name[MOEI_IMPORT_NAME], file[MOEI_IMPORT_NAME];
    moei_import_shard *shard;
    moei_import_tensor f;
    moei_import_walk w;
    moe_status status;
    moei_import_walk_begin(&w, r, r->first);
    while ((status = moei_import_walk_next(&w, r, name, &f, file)) == MOE_OK) {
        status = r->kind == MOEI_IMPORT_INDEX ? moei_import_shard_find(r, name, file, &shard)
                                              : moei_model_add(r, name, &f);
        if (status != MOE_OK) return status;
    }
    if (status != MOE_ERR_NOT_FOUND) return status;
    for (shard = r->shards; shard != NULL && r->kind == MOEI_IMPORT_INDEX; shard = shard->next) {
        if (shard->bytes.size == 0) continue; /* the index itself or config.json */
        moei_import_walk_begin(&w, r, shard);
        while ((status = moei_import_walk_file(&w, shard, name, &f)) == MOE_OK)
            if ((status = moei_model_add(r, name, &f)) != MOE_OK) return status;
        if (status != MOE_ERR_NOT_FOUND) return status;
    }
    return MOE_OK;
}

/* The full name of a tensor, for messages. */
static const char *moei_model_name(const moei_importer *r, int block, const char *rest, char out[112]) {
    moei_text t = moei_import_text(out, 112);
    if (block >= 0) {
        const char *prefix = r->kind == MOEI_IMPORT_GGUF ? "blk." : "model.layers.";
        moei_put(&t, prefix, moei_strlen(prefix));
        moei_put_integer(&t, block);
        moei_put(&t, ".", 1);
    }
    moei_put(&t, rest, moei_strlen(rest));
    return out;
}

static const char *moei_place_text(const moei_importer *r, const moei_place_name *row) {
    return r->kind == MOEI_IMPORT_GGUF ? row->gguf : row->folder;
}

/* Whether a row applies to this block, or (block -1) to tensors outside the blocks. */
static int moei_place_is_of(const moei_place_name *row, int block) {
    return (row->place < MOEI_PLACE_FIRST) == (block < 0);
}

/* The row of a tensor outside the MoE layers; NULL: none. */
static const moei_place_name *moei_place_find(const moei_importer *r, uint64_t traits, int block, const char *rest) {
    const moei_place_name *row;
    for (row = moei_place_names; row->place != MOEI_PLACE_COUNT; row++) {
        const char *name = moei_place_text(r, row);
        if (name != NULL && moei_place_is_of(row, block) && (row->may == 0 || (row->may & traits) != 0) &&
            moei_strcmp(name, rest) == 0)
            return row;
    }
    return NULL;
}

/* ---- >>model_settings ---- */

/* The value that the family's own program takes for a key that config.json lacks; returns its kind.
   Keys of rope_scaling have one only if there is no rope_scaling. */
static int moei_model_absent(const moei_importer *r, const moei_model *m, const char *key,
                             char text[MOEI_IMPORT_VALUE]) {
    const size_t n = moei_strlen(key);
    const char *word = r->kind != MOEI_IMPORT_GGUF ? m->arch->absent : "";
    const int scaling = moei_import_config_at(r, "rope_scaling") > 0 || moei_import_config_at(r, "rope_parameters") > 0;
    size_t i = 0;
    while (*word != '\0' && !(moei_import_behind(word, key, n) != NULL && word[n] == '=')) {
        while (*word != '\0' && *word != ' ') word++;
        word += *word == ' ';
    }
    if (*word == '\0' || (scaling && moei_memchr(key, '.', n) != NULL)) return MOEI_VALUE_NONE;
    for (word += n + 1; word[i] != '\0' && word[i] != ' '; i++) text[i] = word[i];
    text[i] = '\0';
    return MOEI_VALUE_SCALAR;
}

/* Finds the first of the keys of a setting that has a value; returns its kind. */
static int moei_model_key_find(const moei_importer *r, const moei_model *m, const char *keys, char key[80],
                               char text[MOEI_IMPORT_VALUE]) {
    const char *const first = keys;
    int kind = MOEI_VALUE_NONE, there = 0;
    size_t n = 0;
    while (*keys != '\0' && kind == MOEI_VALUE_NONE) {
        for (n = 0; keys[n] != '\0' && keys[n] != ' '; n++) key[n] = keys[n];
        key[n] = '\0';
        keys += n + (keys[n] == ' ');
        kind = moei_import_value(r, key, text);
        there = there || (r->kind != MOEI_IMPORT_GGUF && moei_import_config_at(r, key) > 0);
    }
    if (kind != MOEI_VALUE_NONE || there) return kind;
    for (n = 0; first[n] != '\0' && first[n] != ' '; n++) key[n] = first[n];
    key[n] = '\0';
    return n > 0 ? moei_model_absent(r, m, key, text) : (int)MOEI_VALUE_NONE;
}

/* Reads a setting from the first of its keys that the file has. */
static moe_status moei_model_key_read(moei_importer *r, const moei_model_key *row, moei_model *m) {
    const char *sources = moei_settings_source(r);
    char key[80], text[MOEI_IMPORT_VALUE];
    const int kind = moei_model_key_find(r, m, r->kind == MOEI_IMPORT_GGUF ? row->gguf : row->folder, key, text);
    double number;
    int whole;
    if (kind == MOEI_VALUE_NONE) return MOE_OK;
    if (kind != MOEI_VALUE_SCALAR || !moei_parse_number(text, moei_strlen(text), &number))
        return moei_error(r->error, MOE_ERR_CONFIG, "%s: %s = %s: expected a number", sources, key,
                          kind == MOEI_VALUE_OTHER ? "a list" : text);
    whole = row->is_real || (number >= -16777216.0 && number <= 16777216.0 && !(number < (double)(int)number) &&
                             !(number > (double)(int)number));
    if (!whole || !(number >= row->least && number <= row->most))
        return moei_error(r->error, MOE_ERR_CONFIG, "%s: %s = %s: must be %s%g to %g", sources, key, text,
                          row->is_real ? "" : "an integer, ", row->least, row->most);
    if (row->is_real) {
        const moe_real real = (moe_real)number;
        memcpy((unsigned char *)m + row->offset, &real, sizeof real);
    } else {
        const int integer = (int)number;
        memcpy((unsigned char *)m + row->offset, &integer, sizeof integer);
    }
    return MOE_OK;
}

static int moei_model_is_folder(const moei_importer *r) { return r->kind != MOEI_IMPORT_GGUF; }

/* The architecture by general.architecture or model_type. */
static moe_status moei_model_arch(moei_importer *r, moei_model *m) {
    char type[MOEI_IMPORT_VALUE];
    const moei_arch *arch;
    if (moei_model_is_folder(r) && r->config.size == 0)
        return moei_error(r->error, MOE_ERR_NOT_FOUND, "%s: there is no config.json beside it", r->first->shown);
    if (moei_model_is_folder(r)) (void)moei_import_value(r, "model_type", type);
    else memcpy(type, r->gguf.arch, sizeof type);
    for (arch = moei_archs; arch->archs != NULL; arch++)
        if (moei_is_word_of(type, moei_model_is_folder(r) ? arch->types : arch->archs)) {
            m->arch = arch;
            m->traits = arch->both | (moei_model_is_folder(r) ? arch->folder : arch->gguf);
            return MOE_OK;
        }
    return moei_error(r->error, MOE_ERR_UNSUPPORTED,
                      "%s = '%s': this kind of model is not supported; >>families of moe_import.h lists those that are",
                      moei_model_is_folder(r) ? "config.json: model_type" : "general.architecture", type);
}

/* Widths that follow from others. */
static void moei_model_widths(const moei_importer *r, moei_model *m) {
    const int each = m->heads > 0 ? m->d_model / m->heads : 0;
    const int folder = moei_model_is_folder(r);
    if (m->kv_heads < 0) m->kv_heads = m->heads;
    if (m->key == 0) m->key = each;
    if ((m->traits & MOEI_ARCH_LATENT) != 0) {
        if (!folder) m->nope = (m->key_mla > 0 ? m->key_mla : m->key) - m->n_rot;
        if (m->value_mla > 0) m->value = m->value_mla;
        m->key = m->nope + m->n_rot;
        m->kv_heads = m->heads;
        return;
    }
    if (m->value == 0) m->value = folder ? m->key : each;
    if (m->n_rot == 0) m->n_rot = folder && m->rotated_part > 0 ? (int)(m->rotated_part * (moe_real)m->key)
                                                                          : m->key;
}

/* Refuses a model without a size that has no default. */
static moe_status moei_model_required(const moei_importer *r, const moei_model *m) {
    const int folder = moei_model_is_folder(r), latent = (m->traits & MOEI_ARCH_LATENT) != 0;
    const char *lacks = NULL, *eps = "attention.layer_norm_rms_epsilon";
    if ((m->traits & MOEI_ARCH_LAYER_NORM) != 0) eps = "attention.layer_norm_epsilon";
    if (!(m->eps > 0)) lacks = folder ? "rms_norm_eps" : eps;
    if ((m->traits & MOEI_ARCH_CONVOLUTION) != 0 && m->kernel == 0)
        lacks = folder ? "conv_L_cache" : "shortconv.l_cache";
    if (latent && m->n_rot == 0) lacks = folder ? "qk_rope_head_dim" : "rope.dimension_count";
    if (latent && m->kv_rank == 0) lacks = folder ? "kv_lora_rank" : "attention.kv_lora_rank";
    if (m->heads < 0) lacks = folder ? "num_attention_heads" : "attention.head_count";
    if (m->d_model == 0) lacks = folder ? "hidden_size" : "embedding_length";
    if (m->blocks == 0) lacks = folder ? "num_hidden_layers" : "block_count";
    if (lacks == NULL) return MOE_OK;
    return moei_error(r->error, MOE_ERR_NOT_FOUND, "%s: %s is missing", moei_settings_source(r), lacks);
}

/* Refuses what llama.cpp reads in another way, or needs, where windows alternate. It scales all
   rotated blocks of llama4 by rope.scaling.factor, even if its type is none. */
static moe_status moei_model_windows(const moei_importer *r, const moei_model *m) {
    const char *period = (m->traits & MOEI_ARCH_WINDOW) != 0 ? "2" : "4";
    char text[MOEI_IMPORT_VALUE];
    int kind;
    if (moei_model_is_folder(r) || (m->traits & (MOEI_ARCH_WINDOW | MOEI_ARCH_CHUNKS)) == 0) return MOE_OK;
    if (m->window < 0 && (m->traits & MOEI_ARCH_WINDOW) != 0)
        return moei_error(r->error, MOE_ERR_NOT_FOUND, "metadata: attention.sliding_window is missing");
    if (m->window == 0) return MOE_OK;
    kind = moei_import_value(r, "attention.sliding_window_pattern", text);
    if (kind != MOEI_VALUE_NONE && (kind == MOEI_VALUE_OTHER || moei_strcmp(text, period) != 0))
        return moei_error(r->error, MOE_ERR_UNSUPPORTED, "metadata: attention.sliding_window_pattern must be %s",
                          period);
    kind = moei_import_value(r, "rope.scaling.type", text);
    if ((m->traits & MOEI_ARCH_CHUNKS) == 0 || kind != MOEI_VALUE_TEXT || moei_strcmp(text, "none") != 0)
        return MOE_OK;
    if (!(m->factor < MOEI_R(1.0)) && !(m->factor > MOEI_R(1.0))) return MOE_OK;
    return moei_error(r->error, MOE_ERR_UNSUPPORTED, "metadata: rope.scaling.type = none is not supported together "
                      "with rope.scaling.factor = %g", (double)m->factor);
}

/* Reads the settings that apply to block `block`; keeps what the tensors determined. Only numbers
   of heads may be lists: the other settings are also those of modules outside the blocks. */
static moe_status moei_model_read(moei_importer *r, moei_model *m, size_t block) {
    const moei_model before = *m;
    const moei_model_key *row;
    char type[MOEI_IMPORT_VALUE];
    moe_status status;
    memset(m, 0, sizeof *m);
    memcpy(m->places, before.places, sizeof m->places);
    m->factors = before.factors;
    m->vocabulary = before.vocabulary;
    m->is_long = before.is_long;
    m->heads = m->kv_heads = m->window = m->chunk = -1;
    r->block = block;
    r->by_block = 0;
    status = moei_model_arch(r, m);
    for (row = moei_model_keys; row->gguf != NULL && status == MOE_OK; row++) {
        r->by_block = row->offset == offsetof(moei_model, heads) || row->offset == offsetof(moei_model, kv_heads);
        status = moei_model_key_read(r, row, m);
    }
    r->by_block = 1;
    if (status != MOE_OK) return status;
    status = moei_model_required(r, m);
    if (status != MOE_OK) return status;
    if (m->nextn >= m->blocks && !moei_model_is_folder(r))
        return moei_error(r->error, MOE_ERR_CONFIG,
                          "metadata: nextn_predict_layers = %d: must be less than block_count = %d", m->nextn,
                          m->blocks);
    if (!moei_model_is_folder(r)) m->blocks -= m->nextn;
    moei_model_widths(r, m);
    moei_default_real(&m->base, MOEI_R(10000.0));
    if (!moei_model_is_folder(r)) moei_default_real(&m->factor, MOEI_R(1.0));
    if (m->original == 0) m->original = m->context;
    status = moei_model_windows(r, m);
    if (!moei_model_is_folder(r) && moei_import_value(r, "rope.scaling.type", type) == MOEI_VALUE_TEXT &&
        moei_strcmp(type, "none") == 0)
        m->factor = MOEI_R(1.0); /* nor do factors per pair scale with it */
    return status;
}

/* ---- >>model_blocks ---- */

/* The size that a letter of a shape in moei_place_names stands for. */
static size_t moei_place_size(const moei_model *m, char letter) {
    const size_t heads = (size_t)m->heads, kv = (size_t)m->kv_heads;
    const size_t key = (size_t)m->key, value = (size_t)m->value;
    switch (letter) {
    case 'V': return (size_t)m->vocabulary;
    case 'H': return (size_t)m->d_model;
    case '3': return 3 * (size_t)m->d_model;
    case 'h': return heads;
    case 'D': return key;
    case 'Q': return heads * key;
    case 'S': return heads * key;
    case 'K': return kv * key;
    case 'U': return kv * value;
    case 'O': return heads * value;
    case 'T': return heads * key + kv * key + kv * value;
    case 'r': return (size_t)m->n_rot / 2;
    case 'F': return (size_t)m->d_dense;
    case 'L': return (size_t)m->kernel;
    case 'A': return (size_t)m->query_rank;
    case 'C': return (size_t)m->kv_rank;
    case 'R': return (size_t)m->kv_rank + (size_t)m->n_rot;
    case 'n': return (size_t)m->nope;
    case 'v': return value;
    case 'N': return heads * ((size_t)m->nope + value);
    default: return 1;
    }
}

/* Checks the shape of a tensor outside the MoE layers; the vocabulary and the width of a dense
   block come from the first tensor that has them. */
static moe_status moei_place_check(const moei_importer *r, moei_model *m, const moei_place_name *row,
                                   const moei_import_tensor *f) {
    char shown[112], want[80], have[80];
    size_t sizes[MOE_FILE_MAX_DIMS];
    const int n = (int)moei_strlen(row->shape);
    int i, good = n == f->n_dims;
    for (i = 0; i < n; i++) {
        const size_t size = i < f->n_dims ? f->shape[i] : 0;
        int *known = row->shape[i] == 'V' ? &m->vocabulary : row->shape[i] == 'F' ? &m->d_dense : NULL;
        if (known != NULL && *known == 0 && size <= MOE_MAX_WIDTH) *known = (int)size;
        sizes[i] = moei_place_size(m, row->shape[i]);
        if (size == 0 || size != sizes[i]) good = 0;
    }
    if (good) return MOE_OK;
    return moei_error(r->error, MOE_ERR_SHAPE, "tensor '%s': the shape must be %s, it is %s",
                      moei_model_name(r, f->block, f->suffix, shown), moei_shape_text(sizes, n, want),
                      moei_shape_text(f->shape, f->n_dims, have));
}

/* Checks a tensor and stores it in places[]. */
static moe_status moei_place_take(const moei_importer *r, moei_model *m, const moei_place_name *row,
                                  moei_import_tensor *f, const moei_import_tensor **places) {
    char shown[112];
    moe_status status;
    if (row->place == MOEI_PLACE_IGNORED) return MOE_OK;
    if (places[row->place] != NULL)
        return moei_error(r->error, MOE_ERR_FORMAT, "tensor '%s': duplicates another tensor",
                          moei_model_name(r, f->block, f->suffix, shown));
    moei_gguf_fit(r, f, moei_strlen(row->shape));
    status = moei_place_check(r, m, row, f);
    if (status == MOE_OK) status = moei_import_tensor_check(r, f);
    if (status == MOE_OK) places[row->place] = f;
    return status;
}

/* Refuses a model or a block that lacks a tensor. */
static moe_status moei_places_complete(const moei_importer *r, uint64_t traits, int block,
                                       const moei_import_tensor *const *places) {
    const moei_place_name *row;
    char shown[112];
    for (row = moei_place_names; row->place != MOEI_PLACE_COUNT; row++)
        if (moei_place_text(r, row) != NULL && moei_place_is_of(row, block) && (row->must & traits) != 0 &&
            places[row->place] == NULL)
            return moei_error(r->error, MOE_ERR_NOT_FOUND, "tensor '%s': missing in the file",
                              moei_model_name(r, block, moei_place_text(r, row), shown));
    return MOE_OK;
}

/* The name of an MoE layer's tensor after the name of the block's part that holds the layer, which
   *part receives. Other names stay as they are. */
static const char *moei_model_suffix(const moei_importer *r, const char *rest, const char **part) {
    static const char *const parts[] = {"mlp.", "block_sparse_moe.", "feed_forward."};
    size_t expert;
    int i;
    for (i = 0; i < 3 && moei_model_is_folder(r); i++) {
        const char *behind = moei_import_behind(rest, parts[i], moei_strlen(parts[i]));
        if (behind == NULL || moei_tensor_name_find(moei_sets_of_file(r), behind, &expert) == NULL) continue;
        *part = parts[i];
        return behind;
    }
    return rest;
}

/* Derives from the tensors of a block whether it has experts, a convolution, a fused matrix of
   queries, keys and values, and which form of latent attention. */
static void moei_model_block_traits(const moei_importer *r, const moei_model *m, int block, moei_model_block *b) {
    size_t i, expert, n = moei_import_tensor_count(&r->all);
    const char *part;
    int halves = 0, fused = 0;
    memset(b, 0, sizeof *b);
    for (i = 0; i < n; i++) {
        const moei_import_tensor *f = moei_import_tensor_at(&r->all, i);
        const moei_tensor_name *row;
        if (f->block != block) continue;
        row = moei_tensor_name_find(moei_sets_of_file(r), moei_model_suffix(r, f->suffix, &part), &expert);
        if (row != NULL && ((row->flags & MOEI_TENSOR_ROUTER) != 0 || moei_is_expert_param(row->param))) b->is_moe = 1;
        if (moei_is_word_of(f->suffix, "shortconv.in_proj.weight conv.in_proj.weight")) b->is_convolution = 1;
        if (moei_strcmp(f->suffix, "attn_k_b.weight") == 0) halves = 1;
        if (moei_strcmp(f->suffix, "attn_qkv.weight") == 0) fused = 1;
    }
    b->traits = m->traits;
    if (b->is_moe) b->traits &= ~MOEI_ARCH_DENSE;
    if (b->is_convolution)
        b->traits &= ~(MOEI_ARCH_SEPARATE | MOEI_ARCH_HEAD_NORM);
    else b->traits &= ~MOEI_ARCH_CONVOLUTION;
    if (fused) b->traits &= ~(m->traits & MOEI_ARCH_FUSED ? MOEI_ARCH_SEPARATE : UINT64_C(0));
    else b->traits &= ~MOEI_ARCH_FUSED;
    if ((m->traits & MOEI_ARCH_LATENT) != 0) {
        b->traits |= m->query_rank > 0 ? MOEI_ARCH_LOW_QUERY : MOEI_ARCH_FULL_QUERY;
        b->traits |= halves ? MOEI_ARCH_HALVES_B : MOEI_ARCH_WHOLE_B;
    }
}

/* A boolean of config.json; `otherwise` where it is absent. */
static int moei_model_flag(const moei_importer *r, const char *key, int otherwise) {
    char text[MOEI_IMPORT_VALUE];
    double number = 1;
    if (moei_import_value(r, key, text) != MOEI_VALUE_SCALAR) return otherwise;
    if (moei_parse_number(text, moei_strlen(text), &number)) return number < 0 || number > 0;
    return moei_strcmp(text, "false") != 0;
}

/* Llama 4: a block has chunked attention with RoPE, or full attention without RoPE, whose queries
   grow with the position. */
static void moei_model_block_chunks(const moei_importer *r, const moei_model *m, int by_type, int is_chunked,
                                    moei_model_block *b) {
    const int folder = moei_model_is_folder(r);
    const int last = (r->block + 1) % (size_t)(m->interval > 0 ? m->interval : 4) == 0; /* of each four blocks */
    b->rotates = folder ? moei_model_flag(r, "no_rope_layers", !last) : !last || m->window == 0;
    b->tuned = !b->rotates && (!folder || (m->tuning > 0 && moei_model_flag(r, "attn_temperature_tuning", 1)));
    b->qk_plain = b->rotates && (folder ? moei_model_flag(r, "use_qk_norm", 1) : m->experts != 128);
    b->chunk = folder ? (m->chunk > 0 ? m->chunk : 0) : m->window == 0 ? 0 : 8192;
    if (by_type ? !is_chunked : !b->rotates) b->chunk = 0;
}

/* Window, chunk and RoPE of a block. */
static moe_status moei_model_block_span(const moei_importer *r, const moei_model *m, moei_model_block *b) {
    static const char *const known[] = {"full_attention", "conv", "sliding_attention", "chunked_attention"};
    char type[MOEI_IMPORT_VALUE];
    const int folder = moei_model_is_folder(r), even = r->block % 2 == 0;
    const int by_type = folder && moei_import_value(r, "layer_types", type) == MOEI_VALUE_TEXT;
    int kind = 0;
    while (by_type && kind < 4 && moei_strcmp(type, known[kind]) != 0) kind++;
    if (kind == 4)
        return moei_error(r->error, MOE_ERR_UNSUPPORTED, "config.json: layer_types: '%s' is not supported", type);
    b->rotates = 1;
    if ((m->traits & MOEI_ARCH_CHUNKS) != 0) {
        moei_model_block_chunks(r, m, by_type, kind == 3, b);
        return MOE_OK;
    }
    if (!by_type && (m->traits & MOEI_ARCH_WINDOW) != 0) kind = even ? 2 : 0;
    else if (!by_type && (m->traits & MOEI_ARCH_WINDOWS) != 0 &&
             (!(m->traits & MOEI_ARCH_WINDOWS_ASKED) || moei_model_flag(r, "use_sliding_window", 0)) &&
             (!(m->traits & MOEI_ARCH_WINDOWS_LATE) || r->block >= (size_t)m->full_blocks))
        kind = 2;
    if (kind == 2 && m->window > 0) b->window = m->window;
    return MOE_OK;
}

/* ---- >>model_attention ---- */

static moe_real moei_ln(moe_real x) { return (moe_real)MOEI_D(log)((double)x); }

static int moei_is_zero(moe_real x) { return !(x < 0) && !(x > 0); }

/* 1 + 0.1 s ln factor, as in YaRN's paper and DeepSeek's program. */
static moe_real moei_yarn_magnitude(moe_real factor, moe_real s) {
    return factor > MOEI_R(1.0) ? MOEI_R(1.0) + MOEI_R(0.1) * s * moei_ln(factor) : MOEI_R(1.0);
}

/* The RoPE scaling of config.json. */
static moe_status moei_folder_rotary(const moei_importer *r, const moei_model *m, moe_attention_config *c) {
    const moe_real all = moei_yarn_magnitude(m->factor, m->mscale_all);
    const double longer = m->original > 1 && m->context > m->original ? (double)m->context / (double)m->original : 1.0;
    static const char *const keys[] = {"rope_scaling.rope_type", "rope_scaling.type", "rope_parameters.rope_type"};
    char type[MOEI_IMPORT_VALUE];
    int i, kind = MOEI_VALUE_NONE;
    for (i = 0; i < 3 && kind == MOEI_VALUE_NONE; i++) kind = moei_import_value(r, keys[i], type);
    if (kind == MOEI_VALUE_NONE) kind = moei_model_absent(r, m, keys[0], type);
    if (kind == MOEI_VALUE_NONE || moei_strcmp(type, "default") == 0) return MOE_OK;
    if (moei_is_zero(m->factor) && moei_is_word_of(type, "linear llama3 yarn"))
        return moei_error(r->error, MOE_ERR_NOT_FOUND, "config.json: rope_scaling.factor is missing");
    c->rotary_factor = m->factor;
    if (moei_strcmp(type, "linear") == 0) c->rotary_scaling = MOE_ROTARY_LINEAR;
    else if (moei_strcmp(type, "dynamic") == 0) { /* without alpha, angles do not change up to context */
        if (m->alpha > 0 && m->key > 2)
            c->rotary_base *= (moe_real)MOEI_D(pow)((double)m->alpha, (double)m->key / ((double)m->key - 2.0));
    } else if (moei_strcmp(type, "llama3") == 0) {
        c->rotary_scaling = MOE_ROTARY_LLAMA3;
        c->rotary_length = m->original;
        c->low_factor = m->low_freq;
        c->high_factor = m->high_freq;
    } else if (moei_strcmp(type, "yarn") == 0) {
        c->rotary_scaling = MOE_ROTARY_YARN;
        c->rotary_length = m->original;
        c->beta_fast = m->beta_fast;
        c->beta_slow = m->beta_slow;
        c->no_truncation = moei_model_absent(r, m, "rope_scaling.truncate", type) != MOEI_VALUE_NONE ||
                           !(moei_model_flag(r, "rope_scaling.truncate", 1) &&
                             moei_model_flag(r, "rope_parameters.truncate", 1));
        c->rotary_magnitude = m->attention_factor;
        if (!moei_is_zero(m->mscale) && !moei_is_zero(m->mscale_all))
            moei_default_real(&c->rotary_magnitude, moei_yarn_magnitude(m->factor, m->mscale) / all);
        moei_default_real(&c->rotary_magnitude, moei_yarn_magnitude(m->factor, MOEI_R(1.0)));
        if (c->kv_lora > 0 && !moei_is_zero(m->mscale_all))
            c->scale *= all * all;
    } else if (moei_strcmp(type, "longrope") == 0 || moei_strcmp(type, "su") == 0) {
        c->rotary_scaling = MOE_ROTARY_FACTORS;
        c->rotary_factor = 0;
        c->rotary_magnitude = m->is_long ? m->long_mscale : m->short_mscale;
        moei_default_real(&c->rotary_magnitude, m->attention_factor);
        if (longer > 1.0)
            moei_default_real(&c->rotary_magnitude,
                              (moe_real)MOEI_D(sqrt)(1.0 + MOEI_D(log)(longer) / MOEI_D(log)((double)m->original)));
    } else
        return moei_error(r->error, MOE_ERR_UNSUPPORTED, "config.json: rope_scaling: type '%s' is not supported", type);
    return MOE_OK;
}

/* The RoPE scaling of llama.cpp. Angles with factors per pair are also scaled linearly. */
static moe_status moei_gguf_rotary(const moei_importer *r, const moei_model *m, moe_attention_config *c) {
    char type[MOEI_IMPORT_VALUE];
    const int kind = moei_import_value(r, "rope.scaling.type", type);
    const int yarn = kind == MOEI_VALUE_TEXT && moei_strcmp(type, "yarn") == 0;
    if (kind != MOEI_VALUE_NONE && !yarn && !moei_is_word_of(type, "none linear longrope"))
        return moei_error(r->error, MOE_ERR_UNSUPPORTED, "metadata: rope.scaling.type = %s is not supported",
                          kind == MOEI_VALUE_OTHER ? "a list" : type);
    c->rotary_magnitude = m->attention_factor;
    c->rotary_factor = m->factor; /* the caller resets it where angles are not scaled by it */
    if (m->factors != NULL) {
        if (yarn)
            return moei_error(r->error, MOE_ERR_UNSUPPORTED, "metadata: rope.scaling.type = yarn is not supported "
                              "together with rope_freqs or rope_factors tensors");
        c->rotary_scaling = MOE_ROTARY_FACTORS;
    } else if (yarn) {
        moei_default_real(&c->rotary_magnitude, MOEI_R(1.0));
        c->rotary_scaling = MOE_ROTARY_YARN;
        c->rotary_length = m->original;
        if ((m->traits & MOEI_ARCH_GROK) != 0) {
            c->beta_fast = m->beta_fast > 0 ? m->beta_fast : MOEI_R(8.0);
            c->beta_slow = m->beta_slow;
        }
        if (c->kv_lora == 0 || moei_is_zero(m->log_multiplier))
            c->rotary_magnitude *= moei_yarn_magnitude(m->factor, MOEI_R(1.0));
    } else if (m->factor < MOEI_R(1.0) || m->factor > MOEI_R(1.0))
        c->rotary_scaling = MOE_ROTARY_LINEAR;
    /* deepseek2: the magnitude also multiplies the scores, with linear scaling too */
    if (c->kv_lora > 0) {
        const moe_real more = moei_ln(m->factor);
        moe_real s = c->rotary_magnitude;
        moei_default_real(&s, MOEI_R(1.0));
        if (!yarn) s *= MOEI_R(1.0) + MOEI_R(0.1) * more;
        s *= MOEI_R(1.0) + m->log_multiplier * more;
        c->scale *= s * s;
    }
    return MOE_OK;
}

static moe_real moei_model_block_scale(const moei_model *m) {
    const moe_real width = (moe_real)((m->traits & MOEI_ARCH_ROT_SCALE) != 0 ? m->n_rot : m->key);
    moe_real scale = 0;
    if ((m->traits & MOEI_ARCH_MULTIPLIERS) != 0) scale = m->attention_scale;
    if ((m->traits & MOEI_ARCH_GROK) != 0) {
        scale = m->output_scale;
        moei_default_real(&scale, MOEI_R(0.08838834764831845));
    }
    return moei_is_zero(scale) ? MOEI_R(1.0) / (moe_real)MOEI_D(sqrt)((double)width) : scale;
}

/* The attention of a block whose places[] are filled. */
static moe_status moei_model_block_attention(const moei_importer *r, const moei_model *m, const moei_model_block *b,
                                       moe_attention_config *c) {
    moe_status status = MOE_OK;
    memset(c, 0, sizeof *c);
    c->heads = m->heads;
    c->d_head = m->key;
    c->d_value = m->value;
    c->eps = m->eps;
    c->scale = moei_model_block_scale(m);
    c->bias = b->places[MOEI_PLACE_QUERY_BIAS] != NULL;
    c->output_bias = b->places[MOEI_PLACE_OUTPUT_BIAS] != NULL;
    c->sinks = b->places[MOEI_PLACE_SINKS] != NULL;
    c->window = b->window;
    c->chunk = b->chunk;
    if ((m->traits & MOEI_ARCH_LATENT) != 0) {
        c->kv_lora = m->kv_rank;
        c->q_lora = m->query_rank;
    } else c->kv_heads = m->kv_heads;
    if (b->places[MOEI_PLACE_QUERY_NORM] != NULL)
        c->qk_norm = (m->traits & MOEI_ARCH_WHOLE_NORM) != 0 ? MOE_QK_NORM_WHOLE : MOE_QK_NORM_HEAD;
    if (b->qk_plain) c->qk_norm = MOE_QK_NORM_PLAIN;
    c->norm_after = c->qk_norm != MOE_QK_NORM_NONE && (b->qk_plain || (m->traits & MOEI_ARCH_NORM_AFTER) != 0);
    if ((m->traits & MOEI_ARCH_GROK) != 0) c->cap = m->score_cap > 0 ? m->score_cap : MOEI_R(30.0);
    if ((m->traits & MOEI_ARCH_CLAMP) != 0) c->clamp = m->clamp;
    if (b->tuned) {
        c->query_floor = moei_model_is_folder(r) ? m->tuning_floor : 8192;
        c->query_growth = moei_model_is_folder(r) ? m->tuning : MOEI_R(0.1);
    }
    if (!b->rotates || m->n_rot == 0) return MOE_OK; /* the part that rotates may round to 0 */
    c->rotary = 1;
    c->rotary_base = b->window > 0 && m->base_window > 0 ? m->base_window : m->base;
    c->rotary_dims = m->n_rot;
    c->rotary_neighbours = (m->traits & MOEI_ARCH_NEIGHBOURS) != 0 &&
                           (!moei_model_is_folder(r) || moei_model_flag(r, "rope_interleave", 1));
    status = moei_model_is_folder(r) ? moei_folder_rotary(r, m, c) : moei_gguf_rotary(r, m, c);
    if (c->rotary_scaling == MOE_ROTARY_PLAIN || c->rotary_scaling == MOE_ROTARY_FACTORS)
        c->rotary_factor = 0;
    return status;
}

/* ---- >>model_check: every tensor is known ---- */

/* The MoE layer of a block, from r->found. */
static moe_status moei_model_block_mixture(moei_importer *r, const moei_model *m, moei_model_block *b) {
    moe_layer layer;
    uint64_t *seen;
    moe_status status;
    memset(r->sizes, 0, sizeof r->sizes);
    r->sizes[MOEI_SIZE_H] = (size_t)m->d_model;
    status = r->family == NULL ? moei_family_find(r) : MOE_OK;
    if (status == MOE_OK && !moei_family_fits(r, r->family, 0)) status = moei_family_refuse(r, r->family);
    if (status == MOE_OK) status = moei_import_match(r);
    if (status == MOE_OK) status = moei_settings_make(r);
    if (status == MOE_OK) status = moe_layer_init(&layer, &r->settings, r->error);
    if (status != MOE_OK) return status;
    seen = (uint64_t *)moei_alloc(&r->allocator, r->sizes[MOEI_SIZE_E], sizeof *seen);
    if (seen == NULL)
        return moei_error(r->error, MOE_ERR_MEMORY, "no memory for the list of %z experts", r->sizes[MOEI_SIZE_E]);
    status = moei_import_complete(r, &layer, seen);
    moei_free(&r->allocator, seen, r->sizes[MOEI_SIZE_E] * sizeof *seen);
    b->mixture = layer.config;
    return status;
}

/* With one of the optional biases or norms of queries, keys and values, a block needs them all. */
static void moei_model_block_both(moei_model_block *b) {
    const moei_import_tensor *const *at = b->places;
    if (at[MOEI_PLACE_QUERY_BIAS] != NULL || at[MOEI_PLACE_KEY_BIAS] != NULL || at[MOEI_PLACE_VALUE_BIAS] != NULL)
        b->traits |= MOEI_ARCH_BIAS;
    if ((b->traits & MOEI_ARCH_MAY_HEAD_NORM) != 0 &&
        (at[MOEI_PLACE_QUERY_NORM] != NULL || at[MOEI_PLACE_KEY_NORM] != NULL))
        b->traits |= MOEI_ARCH_HEAD_NORM;
}

/* Refuses a fused matrix of queries, keys and values where the architecture has separate ones. */
static moe_status moei_model_unfused(const moei_importer *r, const moei_model *m, int block) {
    char shown[112];
    size_t i;
    for (i = 0; i < moei_import_tensor_count(&r->found); i++) {
        const char *suffix = moei_import_tensor_at(&r->found, i)->suffix;
        if (moei_strcmp(suffix, "attn_qkv.weight") == 0)
            return moei_error(r->error, MOE_ERR_UNSUPPORTED, "tensor '%s': not supported for %s; convert the model "
                              "without --fuse-qkv", moei_model_name(r, block, suffix, shown), m->arch->archs);
    }
    return MOE_OK;
}

/* Assigns all tensors of a block. Those of its MoE layer are then in r->found. */
static moe_status moei_model_block_read(moei_importer *r, moei_model *m, int block, moei_model_block *b) {
    const size_t n = moei_import_tensor_count(&r->all);
    moe_status status = moei_model_read(r, m, (size_t)block);
    moei_text prefix = moei_import_text(r->prefix, sizeof r->prefix);
    size_t i;
    const char *start = moei_model_is_folder(r) ? "model.layers." : "blk.";
    if (status != MOE_OK) return status;
    moei_put(&prefix, start, moei_strlen(start));
    moei_put_integer(&prefix, block);
    moei_model_block_traits(r, m, block, b);
    if (!b->is_convolution && (m->heads == 0 || m->kv_heads == 0 || m->heads % m->kv_heads != 0))
        return moei_error(r->error, MOE_ERR_CONFIG, "%s: block %d: heads = %d: must be a multiple of the key heads, %d",
                          moei_settings_source(r), block, m->heads, m->kv_heads);
    r->found.size = r->parts.size = 0;
    r->part = NULL;
    m->d_dense = 0;
    for (i = 0; i < n && status == MOE_OK; i++) {
        const moei_import_tensor *f = moei_import_tensor_at(&r->all, i);
        if (f->block == block) status = moei_import_tensor_push(r, &r->parts, f);
    }
    if (status == MOE_OK) status = moei_import_join(r, &r->parts);
    for (i = 0; i < moei_import_tensor_count(&r->parts) && status == MOE_OK; i++) {
        moei_import_tensor *f = moei_import_tensor_at(&r->parts, i), copy = *f;
        const moei_place_name *row = moei_place_find(r, b->traits, block, f->suffix);
        if (row != NULL) status = moei_place_take(r, m, row, f, b->places);
        else status = moei_import_tensor_add(r, &r->found, &copy, moei_model_suffix(r, f->suffix, &r->part));
    }
    moei_model_block_both(b);
    if (status == MOE_OK) status = moei_model_unfused(r, m, block);
    if (status == MOE_OK) status = moei_places_complete(r, b->traits, block, b->places);
    if (status == MOE_OK) status = moei_model_block_span(r, m, b);
    if (status != MOE_OK) return status;
    if (b->is_moe) return moei_model_block_mixture(r, m, b);
    if (r->found.size > 0) {
        char shown[112];
        return moei_error(r->error, MOE_ERR_UNSUPPORTED, "tensor '%s': %s has no such tensor",
                          moei_import_full_name(r, moei_import_tensor_at(&r->found, 0)->suffix, shown),
                          moei_model_is_folder(r) ? m->arch->types : m->arch->archs);
    }
    if ((b->traits & MOEI_ARCH_DENSE) != 0) return MOE_OK;
    return moei_error(r->error, MOE_ERR_NOT_FOUND, "block %d: its experts are missing in the file", block);
}

/* GGUF: other architectures than llama4 scale queries from position temperature_length on, which an
   attention module cannot do in the same way. */
static moe_status moei_model_tuning(const moei_importer *r, const moei_model *m, int longest) {
    const int from = m->tuning_floor > 0 ? m->tuning_floor : m->original;
    if (moei_model_is_folder(r) || (m->traits & MOEI_ARCH_CHUNKS) != 0 || moei_is_zero(m->tuning) ||
        (longest > 0 && longest <= from))
        return MOE_OK;
    return moei_error(r->error, MOE_ERR_UNSUPPORTED, "metadata: attention.temperature_scale = %g: sequences of more "
                      "than %d tokens are not supported; set options.context", (double)m->tuning, from);
}

/* Opens the file and assigns the tensors outside blocks. */
static moe_status moei_model_open(moei_importer *r, const char *name, int context, moei_model *m) {
    size_t i;
    int longest;
    char shown[112];
    moe_status status;
    memset(m, 0, sizeof *m);
    r->is_model = 1;
    status = moei_import_open(r, name);
    if (status == MOE_OK) status = moei_model_read(r, m, 0);
    if (status == MOE_OK) status = moei_model_collect(r);
    for (i = 0; i < moei_import_tensor_count(&r->all) && status == MOE_OK; i++) {
        moei_import_tensor *f = moei_import_tensor_at(&r->all, i);
        const moei_place_name *row = f->block < 0 ? moei_place_find(r, m->traits, -1, f->suffix) : NULL;
        if (row != NULL) status = moei_place_take(r, m, row, f, m->places);
        else if (f->block < 0 || (f->block >= m->blocks + m->nextn))
            status = moei_error(r->error, MOE_ERR_UNSUPPORTED, "tensor '%s': %s has no such tensor",
                                moei_model_name(r, f->block, f->suffix, shown),
                                moei_model_is_folder(r) ? m->arch->types : m->arch->archs);
    }
    if (status == MOE_OK) status = moei_places_complete(r, m->traits, -1, m->places);
    if (status != MOE_OK) return status;
    if (moei_model_is_folder(r) && moei_model_flag(r, "tie_word_embeddings", m->places[MOEI_PLACE_HEAD] == NULL))
        m->places[MOEI_PLACE_HEAD] = NULL;
    else if (moei_model_is_folder(r) && m->places[MOEI_PLACE_HEAD] == NULL)
        return moei_error(r->error, MOE_ERR_NOT_FOUND, "tensor 'lm_head.weight': missing in the file");
    longest = context > 0 ? context : m->context;
    m->is_long = m->original > 0 && longest > m->original;
    m->factors = m->places[MOEI_PLACE_FREQS];
    if (m->places[MOEI_PLACE_LONG] != NULL || m->places[MOEI_PLACE_SHORT] != NULL)
        m->factors = m->places[m->is_long ? MOEI_PLACE_LONG : MOEI_PLACE_SHORT];
    return moei_model_tuning(r, m, longest);
}

/* File names and values in a message are not trusted: bytes that are not UTF-8 or not printable
   become question marks. */
static void moei_import_clean(char *text) {
    const char *next = text;
    uint32_t code;
    for (; *text != '\0'; text += next - text) {
        const int good = moei_next_utf8(&next, NULL, &code);
        if (!good || code < 0x20u || code == 0x7fu) *text = '?';
    }
}

/* ---- >>model_memory: what a model owns ---- */

/* Memory or a mapping. release NULL: memory of the allocator. */
typedef struct moei_owned_part {
    struct moei_owned_part *next;
    void *memory;
    size_t size;
    void (*release)(void *memory, size_t size);
} moei_owned_part;

struct moei_owned {
    moe_allocator allocator;
    moei_owned_part *parts;
};

/* Takes ownership of memory or a mapping; releases it and returns 0 if there is no memory to record
   it. */
static int moei_owned_keep(struct moei_owned *o, void *memory, size_t size, void (*release)(void *, size_t)) {
    moei_owned_part *part = (moei_owned_part *)moei_alloc(&o->allocator, 1, sizeof *part);
    if (part == NULL && release != NULL) release(memory, size);
    if (part == NULL && release == NULL) moei_free(&o->allocator, memory, size);
    if (part == NULL) return 0;
    part->memory = memory;
    part->size = size;
    part->release = release;
    part->next = o->parts;
    o->parts = part;
    return 1;
}

/* Zeros; NULL: no memory. */
static void *moei_owned_take(struct moei_owned *o, size_t count, size_t size) {
    void *memory = moei_alloc(&o->allocator, count, size);
    return memory != NULL && moei_owned_keep(o, memory, count * size, NULL) ? memory : NULL;
}

void moe_import_free(moe_imported *model) {
    struct moei_owned *o = model != NULL ? model->owned : NULL;
    moe_allocator allocator;
    if (model == NULL) return;
    moe_net_free(&model->net);
    memset(model, 0, sizeof *model);
    if (o == NULL) return;
    while (o->parts != NULL) {
        moei_owned_part *part = o->parts;
        o->parts = part->next;
        if (part->release != NULL) part->release(part->memory, part->size);
        else moei_free(&o->allocator, part->memory, part->size);
        moei_free(&o->allocator, part, sizeof *part);
    }
    allocator = o->allocator;
    moei_free(&allocator, o, sizeof *o);
}

/* ---- >>model_build: the network of a model ---- */

/* State of one build, which walks the blocks twice: the first pass appends the modules, the second,
   after the network is built, gives them their tensors. */
typedef struct moei_build {
    moei_importer *r;
    const moe_import_options *options;
    moe_imported *out;
    moei_model m;
    moei_model_block block;
    int placing;
    size_t cursor; /* the module that gets its tensors next */
    moe_external *externals[MOE_LAYER_PARAMETER_COUNT]; /* of the layer that gets its tensors */
} moei_build;

static moe_status moei_build_no_memory(const moei_build *b, size_t count, size_t size) {
    return moei_error(b->r->error, MOE_ERR_MEMORY, "no memory for %z records of %z bytes", count, size);
}

static moe_status moei_build_take(moei_build *b, size_t count, size_t size, void **memory) {
    *memory = moei_owned_take(b->out->owned, count, size);
    return *memory != NULL ? MOE_OK : moei_build_no_memory(b, count, size);
}

/* The bytes of a file: mapped, or read as a whole. */
static moe_status moei_build_map(moei_build *b, moei_import_shard *shard) {
    moei_importer *r = b->r;
    struct moei_owned *o = b->out->owned;
    void (*release)(void *, size_t) = NULL;
    const size_t size = (size_t)shard->source.size;
    void *memory = NULL;
    moe_status status;
    if (shard->source.read_at == moei_import_memory_read) {
        shard->mapped = (const unsigned char *)shard->source.ctx;
        return MOE_OK;
    }
    if (r->folder->map != NULL) memory = r->folder->map(r->folder->ctx, shard->name, size, &release);
    if (memory == NULL) {
        memory = moei_alloc(&o->allocator, size, 1);
        if (memory == NULL)
            return moei_error(r->error, MOE_ERR_MEMORY, "%s: no memory for the %z bytes of the file", shard->shown,
                              size);
        status = moei_import_read_at(r, shard, 0, memory, size);
        if (status != MOE_OK) {
            moei_free(&o->allocator, memory, size);
            return status;
        }
        release = NULL;
    }
    if (!moei_owned_keep(o, memory, size, release)) return moei_build_no_memory(b, 1, sizeof(moei_owned_part));
    shard->mapped = (const unsigned char *)memory;
    return MOE_OK;
}

/* The address of a file's bytes in memory. */
static moe_status moei_build_bytes(moei_build *b, const moei_import_shard *of, uint64_t at,
                                   const unsigned char **bytes) {
    moei_import_shard *shard = b->r->shards;
    moe_status status = MOE_OK;
    while (shard != of) shard = shard->next;
    if (shard->mapped == NULL) status = moei_build_map(b, shard);
    *bytes = status == MOE_OK ? shard->mapped + (size_t)at : NULL;
    return status;
}

/* ---- matrices ---- */

/* A tensor as a matrix whose rows are its last dimension. */
static moe_status moei_build_matrix(moei_build *b, const moei_import_tensor *f, moe_external *w) {
    const moei_block_type *type = f->dtype < MOE_DTYPE_COUNT ? moei_type_of_dtype(f->dtype) : f->type;
    const size_t columns = f->shape[f->n_dims - 1];
    moe_status status = moei_build_bytes(b, f->shard, f->at, &w->data);
    w->type = &type->external;
    w->column = (size_t)type->external.bytes;
    w->row = columns / (size_t)type->external.block * w->column;
    w->exact = b->options->exact;
    if (status != MOE_OK || f->scales.shard == NULL) return status;
    w->scale_row = f->scales.width * (f->type->code == MOEI_TYPE_E4M3 ? 4 : 1);
    w->scale_rows = (int)f->scales.rows;
    w->scale_columns = (int)f->scales.columns;
    return moei_build_bytes(b, f->scales.shard, f->scales.at, &w->scales);
}

/* Narrows w to every step-th row from row `first` on. */
static moe_status moei_build_rows(const moei_build *b, const moei_import_tensor *f, size_t first, size_t step,
                                  moe_external *w) {
    char shown[112];
    w->data += first * w->row;
    w->row *= step;
    if (w->scales == NULL) return MOE_OK;
    if (first % (size_t)w->scale_rows != 0 || (step > 1 && w->scale_rows > 1))
        return moei_error(b->r->error, MOE_ERR_UNSUPPORTED, "tensor '%s': a block of scales spans two of its parts",
                          moei_import_full_name(b->r, f->suffix, shown));
    w->scales += first / (size_t)w->scale_rows * w->scale_row;
    w->scale_row *= step;
    return MOE_OK;
}

/* Whether a parameter is a matrix of experts, which is read in place. */
static int moei_build_is_matrix(int param) {
    return param == MOE_EXPERTS_GATE || param == MOE_EXPERTS_UP || param == MOE_EXPERTS_DOWN ||
           param == MOE_SHARED_GATE || param == MOE_SHARED_UP || param == MOE_SHARED_DOWN;
}

/* Whether a parameter is a bias of experts. */
static int moei_build_is_bias(int param) {
    return param == MOE_EXPERTS_GATE_BIAS || param == MOE_EXPERTS_UP_BIAS || param == MOE_EXPERTS_DOWN_BIAS;
}

/* The matrix or bias of one expert in a tensor of an MoE layer; second: that of up in a fused
   tensor. */
static moe_status moei_build_expert(moei_build *b, const moei_import_tensor *f, size_t expert, int second,
                                    moe_external *w) {
    const moei_tensor_name *row = f->row;
    const int fused = row->second >= 0, interleaved = fused && (row->flags & MOEI_TENSOR_INTERLEAVED) != 0;
    const int transposed = (row->flags & MOEI_TENSOR_TRANSPOSED) != 0;
    const size_t rows = f->shape[f->n_dims - 2], columns = f->shape[f->n_dims - 1];
    const size_t each = f->scales.rows > 0 ? f->scales.rows : 1, lines = rows / each + (rows % each != 0);
    const size_t parts = transposed || moei_build_is_bias(row->param) ? columns : rows;
    const size_t from = !second ? 0 : interleaved ? 1 : parts / 2;
    char shown[112];
    size_t line;
    moe_status status = moei_build_matrix(b, f, w);
    if (status != MOE_OK) return status;
    if (moei_build_is_bias(row->param)) { /* one row of outputs */
        w->data += expert * w->row + from * w->column;
        if (interleaved) w->column *= 2;
        return MOE_OK;
    }
    if (row->param == MOE_ROUTER_WEIGHT) w->exact = 1;
    w->data += expert * rows * w->row;
    if (w->scales != NULL) w->scales += expert * lines * w->scale_row;
    if (!transposed) return moei_build_rows(b, f, from, interleaved ? 2 : 1, w);
    if (w->type->block != 1 || w->scales != NULL)
        return moei_error(b->r->error, MOE_ERR_UNSUPPORTED, "tensor '%s': %s cannot be transposed",
                          moei_import_full_name(b->r, f->suffix, shown), w->type->name);
    w->data += from * w->column;
    line = w->row;
    w->row = interleaved ? 2 * w->column : w->column;
    w->column = line;
    return MOE_OK;
}

/* ---- numbers ---- */

/* Whether a tensor's bytes are moe_real numbers that this machine can read in place. */
static int moei_build_is_plain(const moei_import_tensor *f, const unsigned char *bytes) {
    const uint32_t one = 1;
    unsigned char low;
    memcpy(&low, &one, 1);
    return low == 1 && f->dtype == (MOE_REAL_IS_DOUBLE ? MOE_DTYPE_F64 : MOE_DTYPE_F32) &&
           (size_t)((uintptr_t)bytes % sizeof(moe_real)) == 0;
}

/* A tensor as moe_real numbers, in place or converted. */
static moe_status moei_build_reals(moei_build *b, const moei_import_tensor *f, moe_real **values) {
    const unsigned char *bytes;
    moe_external w;
    void *memory;
    size_t rows;
    moe_status status = moei_build_bytes(b, f->shard, f->at, &bytes);
    if (status != MOE_OK) return status;
    if (moei_build_is_plain(f, bytes)) {
        memcpy(values, &bytes, sizeof *values); /* is only read */
        return MOE_OK;
    }
    memset(&w, 0, sizeof w);
    status = moei_build_take(b, f->count, sizeof **values, &memory);
    if (status == MOE_OK) status = moei_build_matrix(b, f, &w);
    if (status != MOE_OK) return status;
    *values = (moe_real *)memory;
    for (rows = 0; rows < f->count / f->shape[f->n_dims - 1]; rows++)
        w.type->unpack(b->out->net.kernels, &w, rows, 0, f->shape[f->n_dims - 1],
                       *values + rows * f->shape[f->n_dims - 1]);
    return MOE_OK;
}

/* ---- modules ---- */

/* First pass: appends a module. Second pass: *module is the one that was appended. */
static moe_status moei_build_module(moei_build *b, const moe_module *wanted, moe_module **module) {
    moe_net *net = &b->out->net;
    moe_status status;
    *module = NULL;
    if (b->placing) {
        *module = &net->modules[b->cursor++];
        return MOE_OK;
    }
    status = moe_net_append(net, wanted);
    return status == MOE_OK ? MOE_OK : moei_error(b->r->error, status, "%s", net->error.message);
}

static moe_status moei_build_norm(moei_build *b, const moei_import_tensor *weight, const moei_import_tensor *bias) {
    moe_module wanted, *module;
    moe_status status;
    memset(&wanted, 0, sizeof wanted);
    wanted.kind = (b->m.traits & MOEI_ARCH_LAYER_NORM) != 0 ? MOE_MODULE_LAYER_NORM : MOE_MODULE_RMS_NORM;
    wanted.eps = b->m.eps;
    wanted.bias = bias != NULL && wanted.kind == MOE_MODULE_RMS_NORM;
    wanted.no_bias = bias == NULL && wanted.kind == MOE_MODULE_LAYER_NORM;
    status = moei_build_module(b, &wanted, &module);
    if (status == MOE_OK && module != NULL) status = moei_build_reals(b, weight, &module->tensors[MOE_MODULE_WEIGHT]);
    if (status == MOE_OK && module != NULL && bias != NULL)
        status = moei_build_reals(b, bias, &module->tensors[MOE_MODULE_BIAS]);
    return status;
}

/* Adds y = scale x, if scale is neither 0 nor 1, or there is a cap. */
static moe_status moei_build_scale(moei_build *b, moe_real scale, moe_real cap, int *span) {
    moe_module wanted, *module;
    if ((moei_is_zero(scale) || moei_is_zero(scale - MOEI_R(1.0))) && moei_is_zero(cap)) return MOE_OK;
    memset(&wanted, 0, sizeof wanted);
    wanted.kind = MOE_MODULE_SCALE;
    wanted.scale = scale;
    wanted.cap = cap;
    ++*span;
    return moei_build_module(b, &wanted, &module);
}

static moe_status moei_build_residual(moei_build *b, int span) {
    moe_module wanted, *module;
    memset(&wanted, 0, sizeof wanted);
    wanted.kind = MOE_MODULE_RESIDUAL;
    wanted.span = span;
    return moei_build_module(b, &wanted, &module);
}

/* A parameter of a module and the index of its tensor in places[]; matrices are read in place. */
typedef struct moei_build_slot {
    int slot, place, is_matrix;
} moei_build_slot;

/* Gives a module those of its tensors that the file has. */
static moe_status moei_build_slots(moei_build *b, moe_module *module, const moei_build_slot *slots, size_t n,
                                   const moei_import_tensor *const *places) {
    void *memory;
    moe_external *externals;
    size_t i;
    moe_status status = moei_build_take(b, MOE_MODULE_SLOTS, sizeof *externals, &memory);
    if (status != MOE_OK) return status;
    externals = (moe_external *)memory;
    module->external = externals;
    for (i = 0; i < n && status == MOE_OK; i++) {
        const moei_import_tensor *f = places[slots[i].place];
        if (f == NULL) continue;
        status = slots[i].is_matrix ? moei_build_matrix(b, f, &externals[slots[i].slot])
                                    : moei_build_reals(b, f, &module->tensors[slots[i].slot]);
    }
    return status;
}

#define MOEI_BUILD_SLOTS(b, module, slots, places) \
    moei_build_slots(b, module, slots, sizeof(slots) / sizeof((slots)[0]), places)

static moe_status moei_build_embedding(moei_build *b) {
    static const moei_build_slot slots[] = {{MOE_MODULE_WEIGHT, MOEI_PLACE_EMBEDDING, 1}};
    moe_module wanted, *module;
    moe_status status;
    memset(&wanted, 0, sizeof wanted);
    wanted.kind = MOE_MODULE_EMBEDDING;
    wanted.n_rows = b->m.vocabulary;
    wanted.d_out = b->m.d_model;
    status = moei_build_module(b, &wanted, &module);
    return status == MOE_OK && module != NULL ? MOEI_BUILD_SLOTS(b, module, slots, b->m.places) : status;
}

/* The logits: a matrix of their own, or the embedding's. */
static moe_status moei_build_head(moei_build *b) {
    static const moei_build_slot own[] = {{MOE_MODULE_WEIGHT, MOEI_PLACE_HEAD, 1},
                                          {MOE_MODULE_BIAS, MOEI_PLACE_HEAD_BIAS, 0}};
    static const moei_build_slot tied[] = {{MOE_MODULE_WEIGHT, MOEI_PLACE_EMBEDDING, 1},
                                           {MOE_MODULE_BIAS, MOEI_PLACE_HEAD_BIAS, 0}};
    const int is_tied = b->m.places[MOEI_PLACE_HEAD] == NULL;
    moe_module wanted, *module;
    moe_status status;
    memset(&wanted, 0, sizeof wanted);
    wanted.kind = is_tied ? MOE_MODULE_TIED : MOE_MODULE_LINEAR;
    wanted.d_out = b->m.vocabulary;
    wanted.no_bias = b->m.places[MOEI_PLACE_HEAD_BIAS] == NULL;
    status = moei_build_module(b, &wanted, &module);
    if (status != MOE_OK || module == NULL) return status;
    return is_tied ? MOEI_BUILD_SLOTS(b, module, tied, b->m.places) : MOEI_BUILD_SLOTS(b, module, own, b->m.places);
}

/* RoPE factors per pair, from a tensor or a list in config.json. */
static moe_status moei_build_factors(moei_build *b, moe_module *module) {
    const int is_long = b->m.is_long;
    const size_t n = (size_t)b->m.n_rot / 2, old = moei_import_config_at(b->r, is_long ? "rope_scaling.long_factor"
                                                                                       : "rope_scaling.short_factor");
    const size_t at = old > 0 ? old : moei_import_config_at(b->r, is_long ? "rope_parameters.long_factor"
                                                                          : "rope_parameters.short_factor");
    const moei_import_tensor *f = b->m.factors;
    void *memory;
    moe_real *values;
    size_t i;
    moe_status status = moei_build_take(b, n, sizeof *values, &memory);
    if (status != MOE_OK) return status;
    values = (moe_real *)memory;
    module->tensors[MOE_MODULE_ROTARY_FACTORS] = values;
    if (f != NULL) {
        moe_real *of = NULL;
        status = moei_place_check(b->r, &b->m, moei_place_find(b->r, b->m.traits, -1, f->suffix), f);
        if (status == MOE_OK) status = moei_build_reals(b, f, &of);
        for (i = 0; i < n && status == MOE_OK; i++) values[i] = of[i] * b->m.factor;
        return status;
    }
    for (i = 0; i < n; i++) {
        const size_t element = at > 0 ? moei_import_json_element(&b->r->config, at, i) : 0;
        moei_json j = moei_import_json_at(&b->r->config, element, NULL);
        const moei_span word = element > 0 ? moei_config_word(&j) : moei_span_of("", 0);
        if (!moei_parse_real((const char *)word.p, moei_span_length(word), &values[i]) || !(values[i] > 0))
            return moei_error(b->r->error, MOE_ERR_CONFIG,
                              "config.json: rope_scaling: long_factor and short_factor must have %z positive numbers",
                              n);
    }
    return MOE_OK;
}

/* Splits a fused tensor into queries, keys and values. */
static moe_status moei_build_fused(moei_build *b, moe_module *module) {
    const moei_import_tensor *f = b->block.places[MOEI_PLACE_FUSED];
    const size_t query = (size_t)b->m.heads * (size_t)b->m.key, key = (size_t)b->m.kv_heads * (size_t)b->m.key;
    const size_t first[3] = {0, query, query + key};
    moe_external *externals;
    moe_status status = MOE_OK;
    int i;
    memcpy(&externals, &module->external, sizeof externals); /* those of this build */
    for (i = 0; i < 3 && status == MOE_OK; i++) {
        moe_external *w = &externals[MOE_MODULE_QUERY + i];
        status = moei_build_matrix(b, f, w);
        if (status == MOE_OK) status = moei_build_rows(b, f, first[i], 1, w);
    }
    return status;
}

static moe_status moei_build_attention(moei_build *b) {
    static const moei_build_slot slots[] = {
        {MOE_MODULE_QUERY, MOEI_PLACE_QUERY, 1},
        {MOE_MODULE_QUERY, MOEI_PLACE_QUERY_B, 1},
        {MOE_MODULE_KEY, MOEI_PLACE_KEY, 1},
        {MOE_MODULE_KEY, MOEI_PLACE_KV_B, 1},
        {MOE_MODULE_KEY, MOEI_PLACE_KEY_B, 1},
        {MOE_MODULE_VALUE, MOEI_PLACE_VALUE, 1},
        {MOE_MODULE_VALUE, MOEI_PLACE_VALUE_B, 1},
        {MOE_MODULE_OUTPUT, MOEI_PLACE_OUTPUT, 1},
        {MOE_MODULE_QUERY_DOWN, MOEI_PLACE_QUERY_A, 1},
        {MOE_MODULE_LATENT, MOEI_PLACE_KV_A, 1},
        {MOE_MODULE_LATENT_NORM, MOEI_PLACE_KV_A_NORM, 0},
        {MOE_MODULE_QUERY_NORM, MOEI_PLACE_QUERY_A_NORM, 0},
        {MOE_MODULE_QUERY_NORM, MOEI_PLACE_QUERY_NORM, 0},
        {MOE_MODULE_KEY_NORM, MOEI_PLACE_KEY_NORM, 0},
        {MOE_MODULE_QUERY_BIAS, MOEI_PLACE_QUERY_BIAS, 0},
        {MOE_MODULE_KEY_BIAS, MOEI_PLACE_KEY_BIAS, 0},
        {MOE_MODULE_VALUE_BIAS, MOEI_PLACE_VALUE_BIAS, 0},
        {MOE_MODULE_OUTPUT_BIAS, MOEI_PLACE_OUTPUT_BIAS, 0},
        {MOE_MODULE_SINKS, MOEI_PLACE_SINKS, 0}};
    moe_module wanted, *module;
    moe_status status;
    memset(&wanted, 0, sizeof wanted);
    wanted.kind = MOE_MODULE_ATTENTION;
    status = moei_model_block_attention(b->r, &b->m, &b->block, &wanted.attention);
    if (status == MOE_OK) status = moei_build_module(b, &wanted, &module);
    if (status != MOE_OK || module == NULL) return status;
    status = MOEI_BUILD_SLOTS(b, module, slots, b->block.places);
    if (status == MOE_OK && b->block.places[MOEI_PLACE_FUSED] != NULL) status = moei_build_fused(b, module);
    if (status != MOE_OK || wanted.attention.rotary_scaling != MOE_ROTARY_FACTORS) return status;
    return moei_build_factors(b, module);
}

static moe_status moei_build_convolution(moei_build *b) {
    static const moei_build_slot slots[] = {{MOE_MODULE_IN, MOEI_PLACE_CONVOLUTION_IN, 1},
                                            {MOE_MODULE_TAPS, MOEI_PLACE_CONVOLUTION, 0},
                                            {MOE_MODULE_OUT, MOEI_PLACE_CONVOLUTION_OUT, 1}};
    moe_module wanted, *module;
    moe_status status;
    memset(&wanted, 0, sizeof wanted);
    wanted.kind = MOE_MODULE_CONVOLUTION;
    wanted.length = b->m.kernel;
    status = moei_build_module(b, &wanted, &module);
    return status == MOE_OK && module != NULL ? MOEI_BUILD_SLOTS(b, module, slots, b->block.places) : status;
}

/* The matrices of one parameter that a tensor has. */
static moe_status moei_build_matrices(moei_build *b, moe_layer *layer, const moei_import_tensor *f, int param,
                                      int second) {
    const size_t n = moei_is_expert_param(param) ? (size_t)layer->config.router.n_experts : 1;
    const int one = n > 1 && moei_is_per_expert(f->row);
    size_t e, end = one ? f->expert + 1 : n;
    void *memory;
    moe_status status = MOE_OK;
    if (b->externals[param] == NULL) {
        status = moei_build_take(b, n, sizeof *b->externals[param], &memory);
        if (status != MOE_OK) return status;
        layer->external[param] = b->externals[param] = (moe_external *)memory;
    }
    for (e = one ? f->expert : 0; e < end && status == MOE_OK; e++)
        status = moei_build_expert(b, f, one ? 0 : e, second, &b->externals[param][e]);
    return status;
}

/* Allocates zeros for the parameters that have no memory yet. */
static moe_status moei_build_zeros(moei_build *b, moe_layer *layer) {
    int param;
    moe_parameter slot;
    void *memory;
    moe_status status = MOE_OK;
    for (param = 0; param < MOE_LAYER_PARAMETER_COUNT && status == MOE_OK; param++) {
        if (!(layer->present >> param & 1u) || layer->external[param] != NULL || layer->tensors[param] != NULL ||
            moe_layer_parameter(&layer->config, param, &slot) != MOE_OK)
            continue;
        status = moei_build_take(b, slot.count > 0 ? slot.count : 1, sizeof(moe_real), &memory);
        layer->tensors[param] = (const moe_real *)memory;
    }
    return status;
}

/* Makes a parameter of an MoE layer use its tensor in place. *there: it can. */
static moe_status moei_build_there(moei_build *b, moe_layer *layer, const moei_import_tensor *f, int *there) {
    const moei_tensor_name *row = f->row;
    const int whole = row->second < 0 && !moei_is_per_expert(row) && !(row->flags & MOEI_TENSOR_TRANSPOSED);
    const unsigned char *bytes;
    moe_status status = moei_build_bytes(b, f->shard, f->at, &bytes);
    *there = 0;
    if (status != MOE_OK) return status;
    if (whole && !moei_build_is_matrix(row->param) && moei_build_is_plain(f, bytes)) {
        memcpy(&layer->tensors[row->param], &bytes, sizeof bytes);
        *there = 1;
        return MOE_OK;
    }
    *there = moei_build_is_matrix(row->param) || row->param == MOE_ROUTER_WEIGHT ||
             (moei_build_is_bias(row->param) && f->dtype < MOE_DTYPE_COUNT);
    if (!*there) return MOE_OK;
    status = moei_build_matrices(b, layer, f, row->param, 0);
    return status == MOE_OK && row->second >= 0 ? moei_build_matrices(b, layer, f, row->second, 1) : status;
}

/* Gives an MoE layer its tensors, which are in r->found. */
static moe_status moei_build_layer(moei_build *b, moe_layer *layer) {
    const size_t n = moei_import_tensor_count(&b->r->found);
    size_t i;
    int there, second;
    moe_status status = MOE_OK;
    memset(b->externals, 0, sizeof b->externals);
    for (second = 0; second < 2 && status == MOE_OK; second++) {
        for (i = 0; i < n && status == MOE_OK; i++) {
            const moei_import_tensor *f = moei_import_tensor_at(&b->r->found, i);
            status = moei_build_there(b, layer, f, &there);
            if (status == MOE_OK && second && !there) status = moei_import_tensor_read(b->r, f, layer);
        }
        if (status == MOE_OK && !second) status = moei_build_zeros(b, layer);
    }
    return status;
}

static moe_status moei_build_mixture(moei_build *b) {
    moe_module wanted, *module;
    moe_status status;
    memset(&wanted, 0, sizeof wanted);
    wanted.kind = MOE_MODULE_MIXTURE;
    wanted.layer.config = b->block.mixture;
    if (b->options->top_k > 0 && wanted.layer.config.router.top_k > b->options->top_k)
        wanted.layer.config.router.top_k = b->options->top_k;
    status = moei_build_module(b, &wanted, &module);
    return status == MOE_OK && module != NULL ? moei_build_layer(b, &module->layer) : status;
}

static moe_status moei_build_dense(moei_build *b) {
    static const int params[3] = {MOE_EXPERTS_GATE, MOE_EXPERTS_UP, MOE_EXPERTS_DOWN};
    moe_module wanted, *module;
    moe_external *externals;
    void *memory;
    int i;
    moe_status status;
    memset(&wanted, 0, sizeof wanted);
    wanted.kind = MOE_MODULE_FEED_FORWARD;
    wanted.layer.config.d_ff = b->m.d_dense;
    status = moei_build_module(b, &wanted, &module);
    if (status != MOE_OK || module == NULL) return status;
    status = moei_build_take(b, 3, sizeof *externals, &memory);
    externals = (moe_external *)memory;
    for (i = 0; i < 3 && status == MOE_OK; i++) {
        status = moei_build_matrix(b, b->block.places[MOEI_PLACE_GATE + i], externals + i);
        module->layer.external[params[i]] = externals + i;
    }
    return status;
}

/* ---- blocks ---- */

static moe_status moei_build_block(moei_build *b, int number) {
    const moei_import_tensor *const *at = b->block.places;
    moe_real by;
    int span = 2, beside;
    moe_status status = moei_model_block_read(b->r, &b->m, number, &b->block);
    if (status != MOE_OK) return status;
    beside = (b->m.traits & MOEI_ARCH_GROK) != 0 && b->block.mixture.d_shared > 0;
    by = (b->m.traits & MOEI_ARCH_MULTIPLIERS) != 0 ? b->m.residual_scale : 0;
    status = moei_build_norm(b, at[MOEI_PLACE_FIRST], at[MOEI_PLACE_FIRST_BIAS]);
    if (status == MOE_OK) status = b->block.is_convolution ? moei_build_convolution(b) : moei_build_attention(b);
    if (status == MOE_OK && at[MOEI_PLACE_POST_FIRST] != NULL) {
        span++;
        status = moei_build_norm(b, at[MOEI_PLACE_POST_FIRST], NULL);
    }
    if (status == MOE_OK) status = moei_build_scale(b, by, 0, &span);
    if (status == MOE_OK) status = moei_build_residual(b, span);
    if (status != MOE_OK) return status;
    span = 2;
    status = moei_build_norm(b, at[MOEI_PLACE_SECOND], at[MOEI_PLACE_SECOND_BIAS]);
    if (status == MOE_OK) status = b->block.is_moe ? moei_build_mixture(b) : moei_build_dense(b);
    if (status == MOE_OK && beside) status = moei_build_scale(b, MOEI_R(0.7071067811865476), 0, &span);
    if (status == MOE_OK && at[MOEI_PLACE_POST_SECOND] != NULL) {
        span++;
        status = moei_build_norm(b, at[MOEI_PLACE_POST_SECOND], NULL);
    }
    if (status == MOE_OK) status = moei_build_scale(b, by, 0, &span);
    return status == MOE_OK ? moei_build_residual(b, span) : status;
}

/* One pass over all modules. */
static moe_status moei_build_walk(moei_build *b) {
    const int grok = (b->m.traits & MOEI_ARCH_GROK) != 0, scaled = grok || (b->m.traits & MOEI_ARCH_MULTIPLIERS) != 0;
    moe_real in = scaled ? b->m.embedding_scale : 0, out = scaled ? b->m.logit_scale : 0;
    int block, span = 0;
    moe_status status;
    if (grok) {
        moei_default_real(&in, MOEI_R(78.38367176906169));
        moei_default_real(&out, MOEI_R(0.5773502691896257));
    } else if (!moei_is_zero(out)) out = MOEI_R(1.0) / out;
    b->cursor = 0;
    status = moei_build_embedding(b);
    if (status == MOE_OK) status = moei_build_scale(b, in, 0, &span);
    for (block = 0; block < b->m.blocks && status == MOE_OK; block++) status = moei_build_block(b, block);
    if (status == MOE_OK)
        status = moei_build_norm(b, b->m.places[MOEI_PLACE_NORM], b->m.places[MOEI_PLACE_NORM_BIAS]);
    if (status == MOE_OK) status = moei_build_head(b);
    return status == MOE_OK ? moei_build_scale(b, out, grok ? b->m.logit_cap : 0, &span) : status;
}

/* Checks the total size of the files against options.memory. */
static moe_status moei_build_sizes(moei_build *b) {
    const moei_import_shard *shard;
    uint64_t bytes = 0;
    for (shard = b->r->shards; shard != NULL; shard = shard->next) bytes += shard->source.size;
    b->out->file_bytes = bytes;
    if (b->options->memory == 0 || bytes <= b->options->memory) return MOE_OK;
    return moei_error(b->r->error, MOE_ERR_MEMORY, "%s: the model has %z bytes, and options.memory allows %z",
                      b->r->first->shown, (size_t)bytes, (size_t)b->options->memory);
}

/* Opens the files and builds the network; the caller closes the files. */
static moe_status moei_build_run(moei_build *b, const char *name) {
    moe_imported *out = b->out;
    moe_status status = moei_model_open(b->r, name, b->options->context, &b->m);
    if (status == MOE_OK) status = moei_build_sizes(b);
    if (status != MOE_OK) return status;
    out->owned = (struct moei_owned *)moei_alloc(&b->r->allocator, 1, sizeof *out->owned);
    if (out->owned == NULL) return moei_build_no_memory(b, 1, sizeof *out->owned);
    out->owned->allocator = b->r->allocator;
    status = moe_net_init(&out->net, 0, b->options->kernels, &b->r->allocator);
    if (status != MOE_OK) return moei_error(b->r->error, status, "%s", out->net.error.message);
    out->net.external = 1;
    out->net.cache_type = b->options->cache_type;
    out->architecture = b->m.arch->archs;
    out->vocabulary = b->m.vocabulary;
    out->context = b->options->context > 0 ? b->options->context : b->m.context;
    out->n_blocks = b->m.blocks;
    status = moei_build_walk(b);
    if (status == MOE_OK) status = moe_net_build(&out->net, 0, 0, b->r->error);
    b->placing = 1;
    return status == MOE_OK ? moei_build_walk(b) : status;
}

static moe_status moei_model_run(moe_imported *model, const moei_import_folder *folder, const char *name,
                                 const moe_import_options *options, const moe_allocator *allocator, moe_error *error) {
    static const moe_import_options none = {0, 0, 0, 0, 0, 0};
    moei_importer r;
    moei_build b;
    moe_error own;
    moe_status status;
    memset(&r, 0, sizeof r);
    memset(&b, 0, sizeof b);
    b.r = &r;
    b.options = options != NULL ? options : &none;
    b.out = model;
    if (b.options->context < 0 || b.options->top_k < 0)
        return moei_error(error, MOE_ERR_CONFIG, "options: context = %d and top_k = %d must not be negative",
                          b.options->context, b.options->top_k);
    if (b.options->cache_type != MOE_TYPE_REAL && b.options->cache_type != MOE_TYPE_F16 &&
        b.options->cache_type != MOE_TYPE_BF16 && b.options->cache_type != MOE_TYPE_Q8_BLOCK)
        return moei_error(error, MOE_ERR_CONFIG,
                          "options: cache_type = %d must be MOE_TYPE_REAL, F16, BF16 or Q8_BLOCK",
                          b.options->cache_type);
    if (!moei_can_allocate(allocator))
        return moei_error(error, MOE_ERR_ARGUMENT, "allocator is required with MOE_NO_MALLOC");
    own.message[0] = '\0';
    r.folder = folder;
    r.error = &own;
    if (allocator != NULL) r.allocator = *allocator;
    status = moei_build_run(&b, name);
    moei_importer_close(&r);
    if (status == MOE_OK) return MOE_OK;
    moei_import_clean(own.message);
    moe_import_free(model);
    return moei_error(error, status, "%s", own.message[0] != '\0' ? own.message : moe_status_text(status));
}

/* Parses the preset argument: "NAME field=value ...", "NAME" or "field=value ...". */
static moe_status moei_import_asked(moei_importer *r, const char *text, moe_error *error) {
    char name[52];
    size_t n = 0;
    if (text == NULL) return MOE_OK;
    while (text[n] != '\0' && text[n] != ' ' && text[n] != '=') n++;
    r->changes = text[n] == '=' ? text : text + n;
    if (text[n] == '=') return MOE_OK;
    if (n < sizeof name) {
        memcpy(name, text, n);
        name[n] = '\0';
        r->preset = moe_preset_find(name);
    }
    if (r->preset != NULL) return MOE_OK;
    return moei_error(error, MOE_ERR_NOT_FOUND, "preset = %s: unknown preset; moe_presets lists them",
                      moei_span_text(moei_span_of(text, n), name));
}

static moe_status moei_import_run(moe_layer *layer, const moei_import_folder *folder, const char *name,
                                  const char *prefix, const char *preset, const moe_allocator *allocator,
                                  moe_error *error) {
    moei_importer r;
    moe_layer made;
    moe_error own;
    moe_status status;
    memset(&r, 0, sizeof r);
    status = moei_import_asked(&r, preset, error);
    if (status != MOE_OK) return status;
    if (moei_strlen(prefix) > MOEI_IMPORT_PREFIX)
        return moei_error(error, MOE_ERR_ARGUMENT, "prefix: longer than %d bytes", (int)MOEI_IMPORT_PREFIX);
    if (!moei_can_allocate(allocator))
        return moei_error(error, MOE_ERR_ARGUMENT, "allocator is required with MOE_NO_MALLOC");
    memset(&made, 0, sizeof made);
    own.message[0] = '\0';
    r.folder = folder;
    r.error = &own;
    if (allocator != NULL) r.allocator = *allocator;
    status = moei_import_open(&r, name);
    if (status == MOE_OK) status = moei_import_prefix_find(&r, prefix);
    if (status == MOE_OK) moei_import_prefix_block(&r);
    if (status == MOE_OK) status = moei_import_collect(&r);
    if (status == MOE_OK) status = moei_family_find(&r);
    if (status == MOE_OK) status = moei_import_match(&r);
    if (status == MOE_OK) status = moei_settings_make(&r);
    if (status == MOE_OK) status = moei_import_fill(&r, &made);
    moei_importer_close(&r);
    moei_import_clean(own.message);
    if (status == MOE_OK) *layer = made;
    else (void)moei_error(error, status, "%s", own.message[0] != '\0' ? own.message : moe_status_text(status));
    return status;
}

/* Sources as a folder. The first one may have no name. */
typedef struct moei_import_sources {
    const moe_import_source *sources;
    size_t n;
} moei_import_sources;

static moe_status moei_import_sources_open(void *ctx, const char *name, moe_import_source *source, moe_error *error) {
    const moei_import_sources *s = (const moei_import_sources *)ctx;
    size_t i;
    (void)error;
    for (i = 0; i < s->n; i++) {
        const char *own = s->sources[i].name != NULL ? s->sources[i].name : i == 0 ? "the file" : "";
        if (moei_strcmp(own, name) != 0) continue;
        *source = s->sources[i];
        return MOE_OK;
    }
    return MOE_ERR_NOT_FOUND;
}

static moei_import_folder moei_import_sources_folder(moei_import_sources *s) {
    moei_import_folder folder;
    memset(&folder, 0, sizeof folder);
    folder.ctx = s;
    folder.open = moei_import_sources_open;
    return folder;
}

moe_status moe_import_read(moe_layer *layer, const moe_import_source *sources, size_t n_sources, const char *prefix,
                           const char *preset, const moe_allocator *allocator, moe_error *error) {
    moei_import_sources s;
    moei_import_folder folder = moei_import_sources_folder(&s);
    if (layer == NULL || sources == NULL || n_sources == 0 || prefix == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "layer, sources or prefix is NULL, or there are no sources");
    s.sources = sources;
    s.n = n_sources;
    return moei_import_run(layer, &folder, sources[0].name != NULL ? sources[0].name : "the file", prefix, preset,
                           allocator, error);
}

moe_status moe_import_read_model(moe_imported *model, const moe_import_source *sources, size_t n_sources,
                                 const moe_import_options *options, const moe_allocator *allocator, moe_error *error) {
    moei_import_sources s;
    moei_import_folder folder = moei_import_sources_folder(&s);
    if (model != NULL) memset(model, 0, sizeof *model);
    if (model == NULL || sources == NULL || n_sources == 0)
        return moei_error(error, MOE_ERR_ARGUMENT, "model or sources is NULL, or there are no sources");
    s.sources = sources;
    s.n = n_sources;
    return moei_model_run(model, &folder, sources[0].name != NULL ? sources[0].name : "the file", options, allocator,
                          error);
}

#ifndef MOE_NO_STDIO

#ifdef _MSC_VER
#pragma warning(push)
#pragma warning(disable : 4996)
#endif

/* ---- >>files ---- */

typedef struct moei_import_disk {
    const moe_allocator *allocator;
    char path[MOEI_PATH_SIZE]; /* the folder with its last slash, then the file opened last */
    size_t length;             /* length of the folder */
    int failed;                /* errno of the last read */
    int opened;                /* number of files opened; only the first must exist */
} moei_import_disk;

typedef struct moei_import_disk_file {
    moei_import_disk *disk;
    FILE *file;
    uint64_t at;
} moei_import_disk_file;

static moe_status moei_import_disk_read(void *ctx, uint64_t at, void *to, size_t size) {
    moei_import_disk_file *f = (moei_import_disk_file *)ctx;
    size_t done = 0, got = 1;
    int good;
    errno = 0;
    good = f->at == at || moei_disk_seek(f->file, at);
    for (; good && done < size && got > 0; done += got)
        got = fread((unsigned char *)to + done, 1, size - done, f->file);
    f->disk->failed = errno;
    f->at = good && done == size ? at + size : UINT64_MAX;
    if (good && done == size) return MOE_OK;
    return good && !ferror(f->file) ? MOE_ERR_FORMAT : MOE_ERR_IO;
}

#if MOEI_POSIX
static void moei_import_unmap(void *memory, size_t size) { (void)munmap(memory, size); }

static void *moei_import_map(const char *path, size_t size) {
    const int file = open(path, O_RDONLY);
    void *memory;
    if (file < 0) return NULL;
    memory = mmap(NULL, size, PROT_READ, MAP_PRIVATE, file, 0);
    (void)close(file);
    return memory != MAP_FAILED ? memory : NULL;
}
#elif defined(_WIN32)
/* As <windows.h> declares them. */
struct _SECURITY_ATTRIBUTES;
__declspec(dllimport) void *__stdcall CreateFileA(const char *path, unsigned long access, unsigned long share,
                                                  struct _SECURITY_ATTRIBUTES *security, unsigned long how,
                                                  unsigned long flags, void *like);
__declspec(dllimport) void *__stdcall CreateFileMappingA(void *file, struct _SECURITY_ATTRIBUTES *security,
                                                         unsigned long protect, unsigned long high, unsigned long low,
                                                         const char *name);
__declspec(dllimport) void *__stdcall MapViewOfFile(void *mapping, unsigned long access, unsigned long high,
                                                    unsigned long low, size_t size);
__declspec(dllimport) int __stdcall UnmapViewOfFile(const void *memory);
__declspec(dllimport) int __stdcall CloseHandle(void *handle);

static void moei_import_unmap(void *memory, size_t size) {
    (void)size;
    (void)UnmapViewOfFile(memory);
}

static void *moei_import_map(const char *path, size_t size) {
    const unsigned long read = 0x80000000ul, share = 1;
    const unsigned long existing = 3, read_only = 2;
    const unsigned long map_read = 4;
    void *const file = CreateFileA(path, read, share, NULL, existing, 0, NULL);
    void *mapping, *memory;
    if ((intptr_t)file == -1) return NULL;
    mapping = CreateFileMappingA(file, NULL, read_only, 0, 0, NULL);
    memory = mapping != NULL ? MapViewOfFile(mapping, map_read, 0, 0, size) : NULL;
    if (mapping != NULL) (void)CloseHandle(mapping);
    (void)CloseHandle(file);
    return memory;
}
#endif

/* Maps a file of the folder; NULL: it cannot be mapped. */
static void *moei_import_disk_map(void *ctx, const char *name, size_t size, void (**release)(void *, size_t)) {
    moei_import_disk *d = (moei_import_disk *)ctx;
    void *memory = NULL;
#if MOEI_POSIX || defined(_WIN32)
    moei_text t;
    t.out = d->path;
    t.room = sizeof d->path;
    t.length = d->length;
    moei_put(&t, name, moei_strlen(name));
    memory = size > 0 ? moei_import_map(d->path, size) : NULL;
    *release = memory != NULL ? moei_import_unmap : NULL;
#else
    (void)d;
    (void)name;
    (void)size;
    (void)release;
#endif
    return memory;
}

static const char *moei_import_disk_reason(void *ctx) {
    const moei_import_disk *d = (const moei_import_disk *)ctx;
    return d->failed != 0 ? strerror(d->failed) : "the file was truncated, or the cause is unknown";
}

/* Whether fopen failed because the file does not exist. */
static int moei_import_is_absence(int reason) { return reason == ENOENT || reason == ENOTDIR; }

static moe_status moei_import_disk_open(void *ctx, const char *name, moe_import_source *source, moe_error *error) {
    moei_import_disk *d = (moei_import_disk *)ctx;
    moei_import_disk_file *f = (moei_import_disk_file *)moei_alloc(d->allocator, 1, sizeof *f);
    moei_text t;
    int reason;
    if (f == NULL) return moei_error(error, MOE_ERR_MEMORY, "no memory to open a file");
    t.out = d->path;
    t.room = sizeof d->path;
    t.length = d->length;
    moei_put(&t, name, moei_strlen(name));
    f->file = moei_file_open(d->path, &reason);
    if (f->file == NULL) {
        moei_free(d->allocator, f, sizeof *f);
        if (moei_import_is_absence(reason) && d->opened > 0) return MOE_ERR_NOT_FOUND;
        return moei_file_failed(error, "cannot open", d->path, reason);
    }
    memset(source, 0, sizeof *source);
    errno = 0;
    if (!moei_disk_size(f->file, &source->size)) {
        reason = errno;
        (void)fclose(f->file);
        moei_free(d->allocator, f, sizeof *f);
        return moei_file_failed(error, "cannot read", d->path, reason);
    }
    f->disk = d;
    f->at = UINT64_MAX;
    d->opened++;
    source->ctx = f;
    source->read_at = moei_import_disk_read;
    return MOE_OK;
}

static void moei_import_disk_close(void *ctx, moe_import_source *source) {
    moei_import_disk *d = (moei_import_disk *)ctx;
    moei_import_disk_file *f = (moei_import_disk_file *)source->ctx;
    (void)fclose(f->file);
    moei_free(d->allocator, f, sizeof *f);
}

/* Interprets path as a folder. *name stays NULL if it contains no file of these names. */
static moe_status moei_import_disk_folder(moei_import_disk *d, const char *path, const char *const *names,
                                          const char **name, moe_error *error) {
    moei_text t;
    FILE *f;
    int i, reason;
    for (i = 0; names[i] != NULL && *name == NULL; i++) {
        t = moei_import_text(d->path, sizeof d->path);
        moei_put(&t, path, moei_strlen(path));
        if (t.length > 0 && t.out[t.length - 1] != '/') moei_put(&t, "/", 1);
        d->length = t.length;
        moei_put(&t, names[i], moei_strlen(names[i]));
        f = moei_file_open(d->path, &reason);
        if (f == NULL && !moei_import_is_absence(reason)) return moei_file_failed(error, "cannot open", path, reason);
        if (f == NULL) continue;
        (void)fclose(f);
        *name = names[i];
    }
    return MOE_OK;
}

static const char *moei_import_disk_split(moei_import_disk *d, const char *path) {
    size_t length = moei_strlen(path);
    while (length > 0 && path[length - 1] != '/' && path[length - 1] != '\\') length--;
    memcpy(d->path, path, length);
    d->path[length] = '\0';
    d->length = length;
    return path + length;
}

/* The files of a model that a folder is searched for. */
static const char *const moei_import_names[] = {"model.safetensors.index.json", "model.safetensors", NULL};

/* Splits a path into a folder and the name of a file in it; of a folder, the first of `names` that
   is there. */
static moe_status moei_import_disk_begin(moei_import_disk *disk, moei_import_folder *folder, const char *path,
                                         const moe_allocator *allocator, const char *const *names, const char **name,
                                         moe_error *error) {
    moe_status status = MOE_OK;
    *name = NULL;
    if (moei_strlen(path) + MOEI_IMPORT_NAME + 2 > MOEI_PATH_SIZE)
        return moei_error(error, MOE_ERR_ARGUMENT, "the path is longer than %d bytes",
                          (int)MOEI_PATH_SIZE - (int)MOEI_IMPORT_NAME - 2);
    if (!moei_can_allocate(allocator))
        return moei_error(error, MOE_ERR_ARGUMENT, "allocator is required with MOE_NO_MALLOC");
    memset(disk, 0, sizeof *disk);
    disk->allocator = allocator;
    folder->ctx = disk;
    folder->open = moei_import_disk_open;
    folder->close = moei_import_disk_close;
    folder->reason = moei_import_disk_reason;
    folder->map = moei_import_disk_map;
    if (!moei_import_ends(path, ".safetensors") && !moei_import_ends(path, ".gguf") && !moei_import_ends(path, ".json"))
        status = moei_import_disk_folder(disk, path, names, name, error);
    if (status != MOE_OK) return status;
    if (*name == NULL) *name = moei_import_disk_split(disk, path);
    if (moei_strlen(*name) >= MOEI_IMPORT_NAME)
        return moei_error(error, MOE_ERR_ARGUMENT, "the file name is longer than %d bytes", (int)MOEI_IMPORT_NAME - 1);
    return MOE_OK;
}

moe_status moe_import_layer(moe_layer *layer, const char *path, const char *prefix, const char *preset,
                            const moe_allocator *allocator, moe_error *error) {
    moei_import_disk disk;
    moei_import_folder folder;
    const char *name;
    moe_status status;
    if (layer == NULL || path == NULL || prefix == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "layer, path or prefix is NULL");
    status = moei_import_disk_begin(&disk, &folder, path, allocator, moei_import_names, &name, error);
    return status == MOE_OK ? moei_import_run(layer, &folder, name, prefix, preset, allocator, error) : status;
}

moe_status moe_import_model(moe_imported *model, const char *path, const moe_import_options *options,
                            const moe_allocator *allocator, moe_error *error) {
    moei_import_disk disk;
    moei_import_folder folder;
    const char *name;
    moe_status status;
    if (model != NULL) memset(model, 0, sizeof *model);
    if (model == NULL || path == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "model or path is NULL");
    status = moei_import_disk_begin(&disk, &folder, path, allocator, moei_import_names, &name, error);
    return status == MOE_OK ? moei_model_run(model, &folder, name, options, allocator, error) : status;
}

#ifdef _MSC_VER
#pragma warning(pop)
#endif
#endif /* MOE_NO_STDIO */

#ifndef MOE_NO_TRAIN

/* ---- >>write ---- */

static const moei_family *moei_family_find_name(const char *name) {
    const moei_family *family;
    for (family = moei_families; family->name != NULL; family++)
        if (name != NULL && moei_strcmp(family->name, name) == 0) return family;
    return NULL;
}

/* Whether a family is exported with this name. Where it has both forms, each expert gets its own
   tensors. */
static int moei_is_written(const moei_family *family, const moei_tensor_name *row) {
    return (row->set & family->sets & ~(MOEI_SET_FUSED | MOEI_SET_MXFP4)) != 0;
}

static moe_status moei_family_check(const moe_layer *layer, const moei_family *family, moe_error *error) {
    const moei_tensor_name *row;
    uint64_t have = 0;
    moe_parameter slot;
    int param;
    if (layer->config.transport != NULL)
        return moei_error(error, MOE_ERR_UNSUPPORTED,
                          "the file holds all experts, but the layer only those of one rank: save it "
                          "(moe_layer_save) and load it without a transport");
    if (layer->config.d_out != layer->config.router.d_model)
        return moei_error(error, MOE_ERR_CONFIG, "d_out = %d: must be d_model, %d",
                          layer->config.d_out, layer->config.router.d_model);
    for (row = moei_tensor_names; row->name != NULL; row++) {
        if (!moei_is_written(family, row)) continue;
        have |= moei_tensor_name_params(row);
        if ((row->set & family->needs) != 0 && !(layer->present >> row->param & 1u))
            return moei_error(error, MOE_ERR_CONFIG, "%s has a tensor '%s', but the layer has no such parameter",
                              family->name, row->name);
    }
    for (param = 0; param < MOE_LAYER_PARAMETER_COUNT; param++) {
        if (!(layer->present >> param & 1u) || moei_is_training_state(param) ||
            moe_layer_parameter(&layer->config, param, &slot) != MOE_OK)
            continue;
        if (!(have >> param & 1u))
            return moei_error(error, MOE_ERR_CONFIG, "the layer has a parameter '%s', but %s has no tensor for it",
                              slot.name, family->name);
        if (layer->tensors[param] == NULL)
            return moei_error(error, MOE_ERR_ARGUMENT, "tensor '%s' is not set", slot.name);
    }
    return MOE_OK;
}

typedef struct moei_import_writer {
    const moe_layer *layer;
    const moei_family *family;
    const char *prefix;
    int dtype;
    size_t sizes[4];
    moei_header header;
    size_t begin;
    moe_stream *stream;
} moei_import_writer;

/* The element type of a tensor. The selection bias decides between close scores, so families keep
   it in F32 where weights have 16 bits. */
static int moei_import_writer_dtype(const moei_import_writer *w, const moei_tensor_name *row) {
    return row->param == MOE_ROUTER_SELECTION_BIAS && w->dtype > MOE_DTYPE_F32 ? (int)MOE_DTYPE_F32 : w->dtype;
}

static moe_status moei_import_writer_entry(moei_import_writer *w, const moei_tensor_name *row, size_t expert,
                                           moe_error *error) {
    char name[MOEI_IMPORT_NAME];
    const int dtype = moei_import_writer_dtype(w, row);
    size_t shape[MOE_FILE_MAX_DIMS], bytes = moei_dtypes[dtype].size, end;
    moei_text t = moei_import_text(name, sizeof name);
    int i;
    moei_put(&t, w->prefix, moei_strlen(w->prefix));
    moei_put(&t, ".", 1);
    moei_tensor_name_put(&t, row, expert);
    for (i = 0; row->shape[i] != '\0'; i++) {
        shape[i] = moei_shape_size(w->sizes, row->shape[i]);
        if (!moei_mul(bytes, shape[i], &bytes))
            return moei_error(error, MOE_ERR_OVERFLOW, "tensor '%s': too large for size_t", row->name);
    }
    if (!moei_add(w->begin, bytes, &end))
        return moei_error(error, MOE_ERR_OVERFLOW, "the file is too large for size_t");
    moei_header_put(&w->header, ",", 1);
    moei_header_put_string(&w->header, name);
    moei_header_put_entry(&w->header, dtype, shape, i, w->begin, end);
    w->begin = end;
    return MOE_OK;
}

/* Rounds to float and returns the bits. */
static uint32_t moei_import_bits_f32(moe_real x) {
    float nearest;
    uint32_t bits;
#if MOE_REAL_IS_DOUBLE
    double size = x < 0.0 ? -x : x;
    /* halfway between FLT_MAX and the next power of two */
    if (size >= 3.4028235677973366e38) return (x < 0.0 ? 0xff800000u : 0x7f800000u);
    if (size > 3.4028234663852886e38) x = x < 0.0 ? -3.4028234663852886e38 : 3.4028234663852886e38;
#endif
    nearest = (float)x;
    memcpy(&bits, &nearest, sizeof bits);
    return bits;
}

static uint64_t moei_import_bits(int dtype, moe_real x) {
    uint64_t bits;
    double wide = (double)x;
    if (dtype == MOE_DTYPE_F32) return moei_import_bits_f32(x);
    if (dtype == MOE_DTYPE_F16) return moei_narrow(x, 5, 10);
    if (dtype == MOE_DTYPE_BF16) return moei_narrow(x, 8, 7);
    memcpy(&bits, &wide, sizeof bits);
    return bits;
}

static moe_status moei_import_writer_values(moei_import_writer *w, const moei_tensor_name *row, size_t expert,
                                            moe_error *error) {
    unsigned char bytes[MOEI_IMPORT_CHUNK * 8];
    moe_real values[MOEI_IMPORT_CHUNK];
    const moei_tensor_view view = moei_tensor_view_of(w->layer, row, w->sizes, expert);
    const int dtype = moei_import_writer_dtype(w, row);
    size_t size = moei_dtypes[dtype].size, done, n, i, b;
    moe_status status = MOE_OK;
    for (done = 0; done < view.count && status == MOE_OK; done += n) {
        n = view.count - done < MOEI_IMPORT_CHUNK ? view.count - done : (size_t)MOEI_IMPORT_CHUNK;
        moei_tensor_view_copy(&view, done, n, values, 1);
        for (i = 0; i < n; i++) {
            uint64_t bits = moei_import_bits(dtype, values[i]);
            for (b = 0; b < size; b++) bytes[i * size + b] = (unsigned char)(bits >> 8 * b & 0xffu);
        }
        status = w->stream->write(w->stream->ctx, bytes, n * size);
    }
    if (status != MOE_OK) (void)moei_error(error, status, "the stream failed: %s", moe_status_text(status));
    return status;
}

/* All tensors: header entries (values = 0) or values (values = 1). */
static moe_status moei_import_writer_tensors(moei_import_writer *w, int values, moe_error *error) {
    const moei_tensor_name *row;
    size_t expert;
    moe_status status = MOE_OK;
    for (row = moei_tensor_names; row->name != NULL; row++) {
        if (!moei_is_written(w->family, row) || !(w->layer->present >> row->param & 1u)) continue;
        for (expert = 0; expert < (moei_is_per_expert(row) ? w->sizes[MOEI_SIZE_E] : 1) && status == MOE_OK; expert++)
            status = values ? moei_import_writer_values(w, row, expert, error)
                            : moei_import_writer_entry(w, row, expert, error);
    }
    return status;
}

moe_status moe_import_write(const moe_layer *layer, moe_stream *stream, const char *prefix, const char *family,
                            int dtype, moe_error *error) {
    static const moe_metadata metadata = {"format", "pt"};
    moei_import_writer w;
    moe_status status;
    memset(&w, 0, sizeof w);
    if (layer == NULL || stream == NULL || stream->write == NULL || prefix == NULL || family == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "layer, stream, its write, prefix or family is NULL");
    w.layer = layer;
    w.stream = stream;
    w.prefix = prefix;
    w.dtype = dtype;
    w.family = moei_family_find_name(family);
    if (w.family == NULL)
        return moei_error(error, MOE_ERR_NOT_FOUND, "family = %s: unknown family", family);
    if (dtype < 0 || dtype > MOE_DTYPE_BF16)
        return moei_error(error, MOE_ERR_ARGUMENT, "dtype = %d: must be MOE_DTYPE_F64, _F32, _F16 or _BF16", dtype);
    if (moei_strlen(prefix) > MOEI_IMPORT_PREFIX || !moei_is_utf8(prefix))
        return moei_error(error, MOE_ERR_ARGUMENT, "prefix: longer than %d bytes, or not UTF-8",
                          (int)MOEI_IMPORT_PREFIX);
    status = moei_family_check(layer, w.family, error);
    if (status != MOE_OK) return status;
    if (!moei_can_allocate(&layer->allocator))
        return moei_error(error, MOE_ERR_ARGUMENT, "the layer has no allocator, which MOE_NO_MALLOC requires");
    w.sizes[MOEI_SIZE_E] = (size_t)layer->config.router.n_experts;
    w.sizes[MOEI_SIZE_H] = (size_t)layer->config.router.d_model;
    w.sizes[MOEI_SIZE_I] = (size_t)layer->config.d_ff;
    w.sizes[MOEI_SIZE_S] = (size_t)layer->config.n_shared * (size_t)layer->config.d_shared;
    w.header.allocator = &layer->allocator;
    moei_header_put(&w.header, "        {", 9);
    (void)moei_header_metadata(&w.header, &metadata, 1, error);
    status = moei_import_writer_tensors(&w, 0, error);
    if (status == MOE_OK) status = moei_header_end(&w.header, error);
    if (status == MOE_OK) {
        status = stream->write(stream->ctx, w.header.text, moei_header_length(&w.header));
        if (status != MOE_OK) (void)moei_error(error, status, "the stream failed: %s", moe_status_text(status));
        else status = moei_import_writer_tensors(&w, 1, error);
    }
    moei_array_free(&layer->allocator, &w.header.text, 1);
    return status;
}

#ifndef MOE_NO_STDIO

/* Context of moe_file_replace. */
typedef struct moei_import_saving {
    const moe_layer *layer;
    const char *prefix, *family;
    int dtype;
    moe_error *error;
} moei_import_saving;

static moe_status moei_import_save_to(void *ctx, moe_stream *stream) {
    const moei_import_saving *p = (const moei_import_saving *)ctx;
    return moe_import_write(p->layer, stream, p->prefix, p->family, p->dtype, p->error);
}

moe_status moe_import_save(const moe_layer *layer, const char *path, const char *prefix, const char *family, int dtype,
                           moe_error *error) {
    moei_import_saving p;
    p.layer = layer;
    p.prefix = prefix;
    p.family = family;
    p.dtype = dtype;
    p.error = error;
    return moe_file_replace(path, moei_import_save_to, &p, error);
}

#endif
#endif /* MOE_NO_TRAIN */

#ifndef MOE_NO_QUANT

/* ---- >>panels of packed weights ---- */

/* A matrix as blocks and as panels. A panel holds the bytes of a block in the same order, four to a
   line; int8 has its sign bit flipped. */
typedef struct moei_import_panels {
    size_t step;  /* bytes from a panel to the next */
    size_t bytes; /* of a block, without its scale */
    unsigned flip; /* xor of each byte */
} moei_import_panels;

static moe_status moei_import_panels_init(moei_import_panels *m, int type, size_t n, size_t inner, size_t stride) {
    moe_status status;
    if (type != MOE_TYPE_Q4 && type != MOE_TYPE_Q8_BLOCK) return MOE_ERR_ARGUMENT;
    status = moei_check_panels(type, n, inner, stride, &m->step);
    if (status != MOE_OK) return status;
    if (inner % MOEI_GROUP != 0) return MOE_ERR_SHAPE;
    m->bytes = type == MOE_TYPE_Q4 ? 16 : 32;
    m->flip = type == MOE_TYPE_Q4 ? 0 : 0x80;
    return MOE_OK;
}

/* Offset of byte t of block b of an output in its panel. */
static size_t moei_import_panel_at(const moei_import_panels *m, size_t b, size_t output, size_t t) {
    return (b * m->bytes + t) / 4 * MOEI_LINE + output * 4 + t % 4;
}

moe_status moe_import_pack_blocks(int type, size_t n, size_t inner, const void *blocks, void *packed, size_t stride) {
    const unsigned char *block = (const unsigned char *)blocks;
    unsigned char *panel = (unsigned char *)packed;
    moei_import_panels m;
    size_t j, b, t;
    const moe_status status = moei_import_panels_init(&m, type, n, inner, stride);
    if (status != MOE_OK) return status;
    for (j = 0; j < n; j++) {
        const size_t output = j % MOEI_PANEL;
        if (j > 0 && output == 0) panel += m.step;
        if (output == 0) moei_clear_panel(type, inner, m.step / stride, panel);
        for (b = 0; b < inner / MOEI_GROUP; b++, block += 2 + m.bytes) {
            moei_put_16(panel + moei_scale_at(type, inner, b, output), (uint16_t)(block[0] | block[1] << 8));
            for (t = 0; t < m.bytes; t++)
                panel[moei_import_panel_at(&m, b, output, t)] = (unsigned char)(block[2 + t] ^ m.flip);
        }
    }
    return MOE_OK;
}

moe_status moe_import_unpack_blocks(int type, size_t n, size_t inner, const void *packed, size_t stride, void *blocks) {
    const unsigned char *panel = (const unsigned char *)packed;
    unsigned char *block = (unsigned char *)blocks;
    moei_import_panels m;
    size_t j, b, t;
    const moe_status status = moei_import_panels_init(&m, type, n, inner, stride);
    if (status != MOE_OK) return status;
    for (j = 0; j < n; j++) {
        const size_t output = j % MOEI_PANEL;
        if (j > 0 && output == 0) panel += m.step;
        for (b = 0; b < inner / MOEI_GROUP; b++, block += 2 + m.bytes) {
            const uint16_t scale = moei_get_16(panel + moei_scale_at(type, inner, b, output));
            block[0] = (unsigned char)(scale & 0xff);
            block[1] = (unsigned char)(scale >> 8);
            for (t = 0; t < m.bytes; t++)
                block[2 + t] = (unsigned char)(panel[moei_import_panel_at(&m, b, output, t)] ^ m.flip);
        }
    }
    return MOE_OK;
}
#endif

/* ==== >>code_tokenizer ======================================================================== */

/* ---- classes of code points ---- */

/* A code point, or a byte that is not part of valid UTF-8, which counts as U+FFFD. */
typedef struct moei_rune {
    uint32_t code;
    unsigned kind; /* one bit, MOEI_RUNE_ */
    size_t size;   /* bytes; 0 at the end */
} moei_rune;

enum {
    MOEI_RUNE_OTHER = 1 << 0,
    MOEI_RUNE_UPPER = 1 << 1, /* Lu, Lt */
    MOEI_RUNE_LOWER = 1 << 2, /* Ll */
    MOEI_RUNE_CASELESS = 1 << 3, /* Lm, Lo */
    MOEI_RUNE_NUMBER = 1 << 4,
    MOEI_RUNE_MARK = 1 << 5,
    MOEI_RUNE_PUNCTUATION = 1 << 6,
    MOEI_RUNE_SYMBOL = 1 << 7,
    MOEI_RUNE_SPACE = 1 << 8,
    MOEI_RUNE_END = 1 << 11,
    MOEI_RUNE_LETTER = MOEI_RUNE_UPPER | MOEI_RUNE_LOWER | MOEI_RUNE_CASELESS,
    MOEI_RUNE_SIGN = MOEI_RUNE_OTHER | MOEI_RUNE_MARK | MOEI_RUNE_PUNCTUATION | MOEI_RUNE_SYMBOL
};

/* Where the class changes: code point << 4 | number of the class; 9: even code points are UPPER and
   odd ones LOWER, 10: the reverse. Unicode 14, made by tests/quality/unicode.py. */
static const uint32_t moei_rune_changes[] = {
    0x0, 0x98, 0xe0, 0x208, 0x216, 0x247, 0x256, 0x2b7, 0x2c6, 0x304, 0x3a6, 0x3c7, 0x3f6, 0x411, 0x5b6, 0x5e7, 0x5f6,
    0x607, 0x612, 0x7b6, 0x7c7, 0x7d6, 0x7e7, 0x7f0, 0x858, 0x860, 0xa08, 0xa16, 0xa27, 0xa76, 0xa87, 0xaa3, 0xab6,
    0xac7, 0xad0, 0xae7, 0xb24, 0xb47, 0xb52, 0xb66, 0xb87, 0xb94, 0xba3, 0xbb6, 0xbc4, 0xbf6, 0xc01, 0xd77, 0xd81,
    0xdf2, 0xf77, 0xf82, 0x1009, 0x1372, 0x139a, 0x1482, 0x14a9, 0x1781, 0x17aa, 0x17e2, 0x1811, 0x1839, 0x1861, 0x1882,
    0x1891, 0x18c2, 0x18e1, 0x1922, 0x1931, 0x1952, 0x1961, 0x1992, 0x19c1, 0x19e2, 0x19f1, 0x1a19, 0x1a61, 0x1a82,
    0x1a91, 0x1aa2, 0x1ac1, 0x1ad2, 0x1ae1, 0x1b02, 0x1b11, 0x1b4a, 0x1b71, 0x1b92, 0x1bb3, 0x1bc1, 0x1bd2, 0x1c03,
    0x1c41, 0x1c62, 0x1c71, 0x1c92, 0x1ca1, 0x1cca, 0x1dc2, 0x1de9, 0x1ef2, 0x1f11, 0x1f39, 0x1f61, 0x1f99, 0x2332,
    0x23a1, 0x23c2, 0x23d1, 0x23f2, 0x2411, 0x2422, 0x2431, 0x2479, 0x24f2, 0x2943, 0x2952, 0x2b03, 0x2c27, 0x2c63,
    0x2d27, 0x2e03, 0x2e57, 0x2ec3, 0x2ed7, 0x2ee3, 0x2ef7, 0x3005, 0x3709, 0x3743, 0x3757, 0x3761, 0x3772, 0x3780,
    0x37a3, 0x37b2, 0x37e6, 0x37f1, 0x3800, 0x3847, 0x3861, 0x3876, 0x3881, 0x38b0, 0x38c1, 0x38d0, 0x38e1, 0x3902,
    0x3911, 0x3a20, 0x3a31, 0x3ac2, 0x3cf1, 0x3d02, 0x3d21, 0x3d52, 0x3d89, 0x3ef2, 0x3f41, 0x3f52, 0x3f67, 0x3f71,
    0x3f82, 0x3f91, 0x3fb2, 0x3fd1, 0x4302, 0x4609, 0x4827, 0x4835, 0x48a9, 0x4c01, 0x4c2a, 0x4ce2, 0x4d09, 0x5300,
    0x5311, 0x5570, 0x5593, 0x55a6, 0x5602, 0x5896, 0x58b0, 0x58d7, 0x5900, 0x5915, 0x5be6, 0x5bf5, 0x5c06, 0x5c15,
    0x5c36, 0x5c45, 0x5c66, 0x5c75, 0x5c80, 0x5d03, 0x5eb0, 0x5ef3, 0x5f36, 0x5f50, 0x6067, 0x6096, 0x60b7, 0x60c6,
    0x60e7, 0x6105, 0x61b6, 0x61c0, 0x61d6, 0x6203, 0x64b5, 0x6604, 0x66a6, 0x66e3, 0x6705, 0x6713, 0x6d46, 0x6d53,
    0x6d65, 0x6dd0, 0x6de7, 0x6df5, 0x6e53, 0x6e75, 0x6e97, 0x6ea5, 0x6ee3, 0x6f04, 0x6fa3, 0x6fd7, 0x6ff3, 0x7006,
    0x70e0, 0x7103, 0x7115, 0x7123, 0x7305, 0x74b0, 0x74d3, 0x7a65, 0x7b13, 0x7b20, 0x7c04, 0x7ca3, 0x7eb5, 0x7f43,
    0x7f67, 0x7f76, 0x7fa3, 0x7fb0, 0x7fd5, 0x7fe7, 0x8003, 0x8165, 0x81a3, 0x81b5, 0x8243, 0x8255, 0x8283, 0x8295,
    0x82e0, 0x8306, 0x83f0, 0x8403, 0x8595, 0x85c0, 0x85e6, 0x85f0, 0x8603, 0x86b0, 0x8703, 0x8887, 0x8893, 0x88f0,
    0x8985, 0x8a03, 0x8ca5, 0x8e20, 0x8e35, 0x9043, 0x93a5, 0x93d3, 0x93e5, 0x9503, 0x9515, 0x9583, 0x9625, 0x9646,
    0x9664, 0x9706, 0x9713, 0x9815, 0x9840, 0x9853, 0x98d0, 0x98f3, 0x9910, 0x9933, 0x9a90, 0x9aa3, 0x9b10, 0x9b23,
    0x9b30, 0x9b63, 0x9ba0, 0x9bc5, 0x9bd3, 0x9be5, 0x9c50, 0x9c75, 0x9c90, 0x9cb5, 0x9ce3, 0x9cf0, 0x9d75, 0x9d80,
    0x9dc3, 0x9de0, 0x9df3, 0x9e25, 0x9e40, 0x9e64, 0x9f03, 0x9f27, 0x9f44, 0x9fa7, 0x9fc3, 0x9fd6, 0x9fe5, 0x9ff0,
    0xa015, 0xa040, 0xa053, 0xa0b0, 0xa0f3, 0xa110, 0xa133, 0xa290, 0xa2a3, 0xa310, 0xa323, 0xa340, 0xa353, 0xa370,
    0xa383, 0xa3a0, 0xa3c5, 0xa3d0, 0xa3e5, 0xa430, 0xa475, 0xa490, 0xa4b5, 0xa4e0, 0xa515, 0xa520, 0xa593, 0xa5d0,
    0xa5e3, 0xa5f0, 0xa664, 0xa705, 0xa723, 0xa755, 0xa766, 0xa770, 0xa815, 0xa840, 0xa853, 0xa8e0, 0xa8f3, 0xa920,
    0xa933, 0xaa90, 0xaaa3, 0xab10, 0xab23, 0xab40, 0xab53, 0xaba0, 0xabc5, 0xabd3, 0xabe5, 0xac60, 0xac75, 0xaca0,
    0xacb5, 0xace0, 0xad03, 0xad10, 0xae03, 0xae25, 0xae40, 0xae64, 0xaf06, 0xaf17, 0xaf20, 0xaf93, 0xafa5, 0xb000,
    0xb015, 0xb040, 0xb053, 0xb0d0, 0xb0f3, 0xb110, 0xb133, 0xb290, 0xb2a3, 0xb310, 0xb323, 0xb340, 0xb353, 0xb3a0,
    0xb3c5, 0xb3d3, 0xb3e5, 0xb450, 0xb475, 0xb490, 0xb4b5, 0xb4e0, 0xb555, 0xb580, 0xb5c3, 0xb5e0, 0xb5f3, 0xb625,
    0xb640, 0xb664, 0xb707, 0xb713, 0xb724, 0xb780, 0xb825, 0xb833, 0xb840, 0xb853, 0xb8b0, 0xb8e3, 0xb910, 0xb923,
    0xb960, 0xb993, 0xb9b0, 0xb9c3, 0xb9d0, 0xb9e3, 0xba00, 0xba33, 0xba50, 0xba83, 0xbab0, 0xbae3, 0xbba0, 0xbbe5,
    0xbc30, 0xbc65, 0xbc90, 0xbca5, 0xbce0, 0xbd03, 0xbd10, 0xbd75, 0xbd80, 0xbe64, 0xbf37, 0xbfb0, 0xc005, 0xc053,
    0xc0d0, 0xc0e3, 0xc110, 0xc123, 0xc290, 0xc2a3, 0xc3a0, 0xc3c5, 0xc3d3, 0xc3e5, 0xc450, 0xc465, 0xc490, 0xc4a5,
    0xc4e0, 0xc555, 0xc570, 0xc583, 0xc5b0, 0xc5d3, 0xc5e0, 0xc603, 0xc625, 0xc640, 0xc664, 0xc700, 0xc776, 0xc784,
    0xc7f7, 0xc803, 0xc815, 0xc846, 0xc853, 0xc8d0, 0xc8e3, 0xc910, 0xc923, 0xca90, 0xcaa3, 0xcb40, 0xcb53, 0xcba0,
    0xcbc5, 0xcbd3, 0xcbe5, 0xcc50, 0xcc65, 0xcc90, 0xcca5, 0xcce0, 0xcd55, 0xcd70, 0xcdd3, 0xcdf0, 0xce03, 0xce25,
    0xce40, 0xce64, 0xcf00, 0xcf13, 0xcf30, 0xd005, 0xd043, 0xd0d0, 0xd0e3, 0xd110, 0xd123, 0xd3b5, 0xd3d3, 0xd3e5,
    0xd450, 0xd465, 0xd490, 0xd4a5, 0xd4e3, 0xd4f7, 0xd500, 0xd543, 0xd575, 0xd584, 0xd5f3, 0xd625, 0xd640, 0xd664,
    0xd797, 0xd7a3, 0xd800, 0xd815, 0xd840, 0xd853, 0xd970, 0xd9a3, 0xdb20, 0xdb33, 0xdbc0, 0xdbd3, 0xdbe0, 0xdc03,
    0xdc70, 0xdca5, 0xdcb0, 0xdcf5, 0xdd50, 0xdd65, 0xdd70, 0xdd85, 0xde00, 0xde64, 0xdf00, 0xdf25, 0xdf46, 0xdf50,
    0xe013, 0xe315, 0xe323, 0xe345, 0xe3b0, 0xe3f7, 0xe403, 0xe475, 0xe4f6, 0xe504, 0xe5a6, 0xe5c0, 0xe813, 0xe830,
    0xe843, 0xe850, 0xe863, 0xe8b0, 0xe8c3, 0xea40, 0xea53, 0xea60, 0xea73, 0xeb15, 0xeb23, 0xeb45, 0xebd3, 0xebe0,
    0xec03, 0xec50, 0xec63, 0xec70, 0xec85, 0xece0, 0xed04, 0xeda0, 0xedc3, 0xee00, 0xf003, 0xf017, 0xf046, 0xf137,
    0xf146, 0xf157, 0xf185, 0xf1a7, 0xf204, 0xf347, 0xf355, 0xf367, 0xf375, 0xf387, 0xf395, 0xf3a6, 0xf3e5, 0xf403,
    0xf480, 0xf493, 0xf6d0, 0xf715, 0xf856, 0xf865, 0xf883, 0xf8d5, 0xf980, 0xf995, 0xfbd0, 0xfbe7, 0xfc65, 0xfc77,
    0xfcd0, 0xfce7, 0xfd06, 0xfd57, 0xfd96, 0xfdb0, 0x10003, 0x102b5, 0x103f3, 0x10404, 0x104a6, 0x10503, 0x10565,
    0x105a3, 0x105e5, 0x10613, 0x10625, 0x10653, 0x10675, 0x106e3, 0x10715, 0x10753, 0x10825, 0x108e3, 0x108f5, 0x10904,
    0x109a5, 0x109e7, 0x10a01, 0x10c60, 0x10c71, 0x10c80, 0x10cd1, 0x10ce0, 0x10d02, 0x10fb6, 0x10fc3, 0x10fd2, 0x11003,
    0x12490, 0x124a3, 0x124e0, 0x12503, 0x12570, 0x12583, 0x12590, 0x125a3, 0x125e0, 0x12603, 0x12890, 0x128a3, 0x128e0,
    0x12903, 0x12b10, 0x12b23, 0x12b60, 0x12b83, 0x12bf0, 0x12c03, 0x12c10, 0x12c23, 0x12c60, 0x12c83, 0x12d70, 0x12d83,
    0x13110, 0x13123, 0x13160, 0x13183, 0x135b0, 0x135d5, 0x13606, 0x13694, 0x137d0, 0x13803, 0x13907, 0x139a0, 0x13a01,
    0x13f60, 0x13f82, 0x13fe0, 0x14006, 0x14013, 0x166d7, 0x166e6, 0x166f3, 0x16808, 0x16813, 0x169b6, 0x169d0, 0x16a03,
    0x16eb6, 0x16ee4, 0x16f13, 0x16f90, 0x17003, 0x17125, 0x17160, 0x171f3, 0x17325, 0x17356, 0x17370, 0x17403, 0x17525,
    0x17540, 0x17603, 0x176d0, 0x176e3, 0x17710, 0x17725, 0x17740, 0x17803, 0x17b45, 0x17d46, 0x17d73, 0x17d86, 0x17db7,
    0x17dc3, 0x17dd5, 0x17de0, 0x17e04, 0x17ea0, 0x17f04, 0x17fa0, 0x18006, 0x180b5, 0x180e0, 0x180f5, 0x18104, 0x181a0,
    0x18203, 0x18790, 0x18803, 0x18855, 0x18873, 0x18a95, 0x18aa3, 0x18ab0, 0x18b03, 0x18f60, 0x19003, 0x191f0, 0x19205,
    0x192c0, 0x19305, 0x193c0, 0x19407, 0x19410, 0x19446, 0x19464, 0x19503, 0x196e0, 0x19703, 0x19750, 0x19803, 0x19ac0,
    0x19b03, 0x19ca0, 0x19d04, 0x19db0, 0x19de7, 0x1a003, 0x1a175, 0x1a1c0, 0x1a1e6, 0x1a203, 0x1a555, 0x1a5f0, 0x1a605,
    0x1a7d0, 0x1a7f5, 0x1a804, 0x1a8a0, 0x1a904, 0x1a9a0, 0x1aa06, 0x1aa73, 0x1aa86, 0x1aae0, 0x1ab05, 0x1acf0, 0x1b005,
    0x1b053, 0x1b345, 0x1b453, 0x1b4d0, 0x1b504, 0x1b5a6, 0x1b617, 0x1b6b5, 0x1b747, 0x1b7d6, 0x1b7f0, 0x1b805, 0x1b833,
    0x1ba15, 0x1bae3, 0x1bb04, 0x1bba3, 0x1be65, 0x1bf40, 0x1bfc6, 0x1c003, 0x1c245, 0x1c380, 0x1c3b6, 0x1c404, 0x1c4a0,
    0x1c4d3, 0x1c504, 0x1c5a3, 0x1c7e6, 0x1c802, 0x1c890, 0x1c901, 0x1cbb0, 0x1cbd1, 0x1cc06, 0x1cc80, 0x1cd05, 0x1cd36,
    0x1cd45, 0x1ce93, 0x1ced5, 0x1cee3, 0x1cf45, 0x1cf53, 0x1cf75, 0x1cfa3, 0x1cfb0, 0x1d002, 0x1d2c3, 0x1d6b2, 0x1d783,
    0x1d792, 0x1d9b3, 0x1dc05, 0x1e009, 0x1e952, 0x1e9e9, 0x1eff2, 0x1f081, 0x1f102, 0x1f160, 0x1f181, 0x1f1e0, 0x1f202,
    0x1f281, 0x1f302, 0x1f381, 0x1f402, 0x1f460, 0x1f481, 0x1f4e0, 0x1f502, 0x1f580, 0x1f591, 0x1f5a0, 0x1f5b1, 0x1f5c0,
    0x1f5d1, 0x1f5e0, 0x1f5f1, 0x1f602, 0x1f681, 0x1f702, 0x1f7e0, 0x1f802, 0x1f881, 0x1f902, 0x1f981, 0x1fa02, 0x1fa81,
    0x1fb02, 0x1fb50, 0x1fb62, 0x1fb81, 0x1fbd7, 0x1fbe2, 0x1fbf7, 0x1fc22, 0x1fc50, 0x1fc62, 0x1fc81, 0x1fcd7, 0x1fd02,
    0x1fd40, 0x1fd62, 0x1fd81, 0x1fdc0, 0x1fdd7, 0x1fe02, 0x1fe81, 0x1fed7, 0x1ff00, 0x1ff22, 0x1ff50, 0x1ff62, 0x1ff81,
    0x1ffd7, 0x1fff0, 0x20008, 0x200b0, 0x20106, 0x20288, 0x202a0, 0x202f8, 0x20306, 0x20447, 0x20456, 0x20527, 0x20536,
    0x205f8, 0x20600, 0x20704, 0x20713, 0x20720, 0x20744, 0x207a7, 0x207d6, 0x207f3, 0x20804, 0x208a7, 0x208d6, 0x208f0,
    0x20903, 0x209d0, 0x20a07, 0x20c10, 0x20d05, 0x20f10, 0x21007, 0x21021, 0x21037, 0x21071, 0x21087, 0x210a2, 0x210b1,
    0x210e2, 0x21101, 0x21132, 0x21147, 0x21151, 0x21167, 0x21191, 0x211e7, 0x21241, 0x21257, 0x21261, 0x21277, 0x21281,
    0x21297, 0x212a1, 0x212e7, 0x212f2, 0x21301, 0x21342, 0x21353, 0x21392, 0x213a7, 0x213c2, 0x213e1, 0x21407, 0x21451,
    0x21462, 0x214a7, 0x214e2, 0x214f7, 0x21504, 0x21831, 0x21842, 0x21854, 0x218a7, 0x218c0, 0x21907, 0x23086, 0x230c7,
    0x23296, 0x232b7, 0x24270, 0x24407, 0x244b0, 0x24604, 0x249c7, 0x24ea4, 0x25007, 0x27686, 0x27764, 0x27947, 0x27c56,
    0x27c77, 0x27e66, 0x27f07, 0x29836, 0x29997, 0x29d86, 0x29dc7, 0x29fc6, 0x29fe7, 0x2b740, 0x2b767, 0x2b960, 0x2b977,
    0x2c001, 0x2c302, 0x2c601, 0x2c612, 0x2c621, 0x2c652, 0x2c67a, 0x2c6d1, 0x2c712, 0x2c721, 0x2c732, 0x2c751, 0x2c762,
    0x2c7c3, 0x2c7e1, 0x2c819, 0x2ce32, 0x2ce57, 0x2ceba, 0x2cef5, 0x2cf21, 0x2cf32, 0x2cf40, 0x2cf96, 0x2cfd4, 0x2cfe6,
    0x2d002, 0x2d260, 0x2d272, 0x2d280, 0x2d2d2, 0x2d2e0, 0x2d303, 0x2d680, 0x2d6f3, 0x2d706, 0x2d710, 0x2d7f5, 0x2d803,
    0x2d970, 0x2da03, 0x2da70, 0x2da83, 0x2daf0, 0x2db03, 0x2db70, 0x2db83, 0x2dbf0, 0x2dc03, 0x2dc70, 0x2dc83, 0x2dcf0,
    0x2dd03, 0x2dd70, 0x2dd83, 0x2ddf0, 0x2de05, 0x2e006, 0x2e2f3, 0x2e306, 0x2e507, 0x2e526, 0x2e5e0, 0x2e807, 0x2e9a0,
    0x2e9b7, 0x2ef40, 0x2f007, 0x2fd60, 0x2ff07, 0x2ffc0, 0x30008, 0x30016, 0x30047, 0x30053, 0x30074, 0x30086, 0x30127,
    0x30146, 0x30207, 0x30214, 0x302a5, 0x30306, 0x30313, 0x30367, 0x30384, 0x303b3, 0x303d6, 0x303e7, 0x30400, 0x30413,
    0x30970, 0x30995, 0x309b7, 0x309d3, 0x30a06, 0x30a13, 0x30fb6, 0x30fc3, 0x31000, 0x31053, 0x31300, 0x31313, 0x318f0,
    0x31907, 0x31924, 0x31967, 0x31a03, 0x31c07, 0x31e40, 0x31f03, 0x32007, 0x321f0, 0x32204, 0x322a7, 0x32484, 0x32507,
    0x32514, 0x32607, 0x32804, 0x328a7, 0x32b14, 0x32c07, 0x34003, 0x4dc07, 0x4e003, 0xa48d0, 0xa4907, 0xa4c70, 0xa4d03,
    0xa4fe6, 0xa5003, 0xa60d6, 0xa6103, 0xa6204, 0xa62a3, 0xa62c0, 0xa6409, 0xa66e3, 0xa66f5, 0xa6736, 0xa6745, 0xa67e6,
    0xa67f3, 0xa6809, 0xa69c3, 0xa69e5, 0xa6a03, 0xa6e64, 0xa6f05, 0xa6f26, 0xa6f80, 0xa7007, 0xa7173, 0xa7207, 0xa7229,
    0xa72f2, 0xa7329, 0xa7703, 0xa7712, 0xa779a, 0xa77d1, 0xa77f9, 0xa7883, 0xa7897, 0xa78ba, 0xa78f3, 0xa7909, 0xa7932,
    0xa7969, 0xa7aa1, 0xa7af2, 0xa7b01, 0xa7b59, 0xa7c41, 0xa7c8a, 0xa7cb0, 0xa7d01, 0xa7d12, 0xa7d20, 0xa7d32, 0xa7d40,
    0xa7d59, 0xa7da0, 0xa7f23, 0xa7f51, 0xa7f62, 0xa7f73, 0xa7fa2, 0xa7fb3, 0xa8025, 0xa8033, 0xa8065, 0xa8073, 0xa80b5,
    0xa80c3, 0xa8235, 0xa8287, 0xa82c5, 0xa82d0, 0xa8304, 0xa8367, 0xa83a0, 0xa8403, 0xa8746, 0xa8780, 0xa8805, 0xa8823,
    0xa8b45, 0xa8c60, 0xa8ce6, 0xa8d04, 0xa8da0, 0xa8e05, 0xa8f23, 0xa8f86, 0xa8fb3, 0xa8fc6, 0xa8fd3, 0xa8ff5, 0xa9004,
    0xa90a3, 0xa9265, 0xa92e6, 0xa9303, 0xa9475, 0xa9540, 0xa95f6, 0xa9603, 0xa97d0, 0xa9805, 0xa9843, 0xa9b35, 0xa9c16,
    0xa9ce0, 0xa9cf3, 0xa9d04, 0xa9da0, 0xa9de6, 0xa9e03, 0xa9e55, 0xa9e63, 0xa9f04, 0xa9fa3, 0xa9ff0, 0xaa003, 0xaa295,
    0xaa370, 0xaa403, 0xaa435, 0xaa443, 0xaa4c5, 0xaa4e0, 0xaa504, 0xaa5a0, 0xaa5c6, 0xaa603, 0xaa777, 0xaa7a3, 0xaa7b5,
    0xaa7e3, 0xaab05, 0xaab13, 0xaab25, 0xaab53, 0xaab75, 0xaab93, 0xaabe5, 0xaac03, 0xaac15, 0xaac23, 0xaac30, 0xaadb3,
    0xaade6, 0xaae03, 0xaaeb5, 0xaaf06, 0xaaf23, 0xaaf55, 0xaaf70, 0xab013, 0xab070, 0xab093, 0xab0f0, 0xab113, 0xab170,
    0xab203, 0xab270, 0xab283, 0xab2f0, 0xab302, 0xab5b7, 0xab5c3, 0xab602, 0xab693, 0xab6a7, 0xab6c0, 0xab702, 0xabc03,
    0xabe35, 0xabeb6, 0xabec5, 0xabee0, 0xabf04, 0xabfa0, 0xac003, 0xd7a40, 0xd7b03, 0xd7c70, 0xd7cb3, 0xd7fc0, 0xf9003,
    0xfa6e0, 0xfa703, 0xfada0, 0xfb002, 0xfb070, 0xfb132, 0xfb180, 0xfb1d3, 0xfb1e5, 0xfb1f3, 0xfb297, 0xfb2a3, 0xfb370,
    0xfb383, 0xfb3d0, 0xfb3e3, 0xfb3f0, 0xfb403, 0xfb420, 0xfb433, 0xfb450, 0xfb463, 0xfbb27, 0xfbc30, 0xfbd33, 0xfd3e6,
    0xfd407, 0xfd503, 0xfd900, 0xfd923, 0xfdc80, 0xfdcf7, 0xfdd00, 0xfdf03, 0xfdfc7, 0xfe005, 0xfe106, 0xfe1a0, 0xfe205,
    0xfe306, 0xfe530, 0xfe546, 0xfe627, 0xfe636, 0xfe647, 0xfe670, 0xfe686, 0xfe697, 0xfe6a6, 0xfe6c0, 0xfe703, 0xfe750,
    0xfe763, 0xfefd0, 0xff016, 0xff047, 0xff056, 0xff0b7, 0xff0c6, 0xff104, 0xff1a6, 0xff1c7, 0xff1f6, 0xff211, 0xff3b6,
    0xff3e7, 0xff3f6, 0xff407, 0xff412, 0xff5b6, 0xff5c7, 0xff5d6, 0xff5e7, 0xff5f6, 0xff663, 0xffbf0, 0xffc23, 0xffc80,
    0xffca3, 0xffd00, 0xffd23, 0xffd80, 0xffda3, 0xffdd0, 0xffe07, 0xffe70, 0xffe87, 0xffef0, 0xfffc7, 0xfffe0,
    0x100003, 0x1000c0, 0x1000d3, 0x100270, 0x100283, 0x1003b0, 0x1003c3, 0x1003e0, 0x1003f3, 0x1004e0, 0x100503,
    0x1005e0, 0x100803, 0x100fb0, 0x101006, 0x101030, 0x101074, 0x101340, 0x101377, 0x101404, 0x101797, 0x1018a4,
    0x1018c7, 0x1018f0, 0x101907, 0x1019d0, 0x101a07, 0x101a10, 0x101d07, 0x101fd5, 0x101fe0, 0x102803, 0x1029d0,
    0x102a03, 0x102d10, 0x102e05, 0x102e14, 0x102fc0, 0x103003, 0x103204, 0x103240, 0x1032d3, 0x103414, 0x103423,
    0x1034a4, 0x1034b0, 0x103503, 0x103765, 0x1037b0, 0x103803, 0x1039e0, 0x1039f6, 0x103a03, 0x103c40, 0x103c83,
    0x103d06, 0x103d14, 0x103d60, 0x104001, 0x104282, 0x104503, 0x1049e0, 0x104a04, 0x104aa0, 0x104b01, 0x104d40,
    0x104d82, 0x104fc0, 0x105003, 0x105280, 0x105303, 0x105640, 0x1056f6, 0x105701, 0x1057b0, 0x1057c1, 0x1058b0,
    0x1058c1, 0x105930, 0x105941, 0x105960, 0x105972, 0x105a20, 0x105a32, 0x105b20, 0x105b32, 0x105ba0, 0x105bb2,
    0x105bd0, 0x106003, 0x107370, 0x107403, 0x107560, 0x107603, 0x107680, 0x107803, 0x107860, 0x107873, 0x107b10,
    0x107b23, 0x107bb0, 0x108003, 0x108060, 0x108083, 0x108090, 0x1080a3, 0x108360, 0x108373, 0x108390, 0x1083c3,
    0x1083d0, 0x1083f3, 0x108560, 0x108576, 0x108584, 0x108603, 0x108777, 0x108794, 0x108803, 0x1089f0, 0x108a74,
    0x108b00, 0x108e03, 0x108f30, 0x108f43, 0x108f60, 0x108fb4, 0x109003, 0x109164, 0x1091c0, 0x1091f6, 0x109203,
    0x1093a0, 0x1093f6, 0x109400, 0x109803, 0x109b80, 0x109bc4, 0x109be3, 0x109c04, 0x109d00, 0x109d24, 0x10a003,
    0x10a015, 0x10a040, 0x10a055, 0x10a070, 0x10a0c5, 0x10a103, 0x10a140, 0x10a153, 0x10a180, 0x10a193, 0x10a360,
    0x10a385, 0x10a3b0, 0x10a3f5, 0x10a404, 0x10a490, 0x10a506, 0x10a590, 0x10a603, 0x10a7d4, 0x10a7f6, 0x10a803,
    0x10a9d4, 0x10aa00, 0x10ac03, 0x10ac87, 0x10ac93, 0x10ae55, 0x10ae70, 0x10aeb4, 0x10af06, 0x10af70, 0x10b003,
    0x10b360, 0x10b396, 0x10b403, 0x10b560, 0x10b584, 0x10b603, 0x10b730, 0x10b784, 0x10b803, 0x10b920, 0x10b996,
    0x10b9d0, 0x10ba94, 0x10bb00, 0x10c003, 0x10c490, 0x10c801, 0x10cb30, 0x10cc02, 0x10cf30, 0x10cfa4, 0x10d003,
    0x10d245, 0x10d280, 0x10d304, 0x10d3a0, 0x10e604, 0x10e7f0, 0x10e803, 0x10eaa0, 0x10eab5, 0x10ead6, 0x10eae0,
    0x10eb03, 0x10eb20, 0x10f003, 0x10f1d4, 0x10f273, 0x10f280, 0x10f303, 0x10f465, 0x10f514, 0x10f556, 0x10f5a0,
    0x10f703, 0x10f825, 0x10f866, 0x10f8a0, 0x10fb03, 0x10fc54, 0x10fcc0, 0x10fe03, 0x10ff70, 0x110005, 0x110033,
    0x110385, 0x110476, 0x1104e0, 0x110524, 0x110705, 0x110713, 0x110735, 0x110753, 0x110760, 0x1107f5, 0x110833,
    0x110b05, 0x110bb6, 0x110bd0, 0x110be6, 0x110c25, 0x110c30, 0x110d03, 0x110e90, 0x110f04, 0x110fa0, 0x111005,
    0x111033, 0x111275, 0x111350, 0x111364, 0x111406, 0x111443, 0x111455, 0x111473, 0x111480, 0x111503, 0x111735,
    0x111746, 0x111763, 0x111770, 0x111805, 0x111833, 0x111b35, 0x111c13, 0x111c56, 0x111c95, 0x111cd6, 0x111ce5,
    0x111d04, 0x111da3, 0x111db6, 0x111dc3, 0x111dd6, 0x111e00, 0x111e14, 0x111f50, 0x112003, 0x112120, 0x112133,
    0x1122c5, 0x112386, 0x1123e5, 0x1123f0, 0x112803, 0x112870, 0x112883, 0x112890, 0x1128a3, 0x1128e0, 0x1128f3,
    0x1129e0, 0x1129f3, 0x112a96, 0x112aa0, 0x112b03, 0x112df5, 0x112eb0, 0x112f04, 0x112fa0, 0x113005, 0x113040,
    0x113053, 0x1130d0, 0x1130f3, 0x113110, 0x113133, 0x113290, 0x1132a3, 0x113310, 0x113323, 0x113340, 0x113353,
    0x1133a0, 0x1133b5, 0x1133d3, 0x1133e5, 0x113450, 0x113475, 0x113490, 0x1134b5, 0x1134e0, 0x113503, 0x113510,
    0x113575, 0x113580, 0x1135d3, 0x113625, 0x113640, 0x113665, 0x1136d0, 0x113705, 0x113750, 0x114003, 0x114355,
    0x114473, 0x1144b6, 0x114504, 0x1145a6, 0x1145c0, 0x1145d6, 0x1145e5, 0x1145f3, 0x114620, 0x114803, 0x114b05,
    0x114c43, 0x114c66, 0x114c73, 0x114c80, 0x114d04, 0x114da0, 0x115803, 0x115af5, 0x115b60, 0x115b85, 0x115c16,
    0x115d83, 0x115dc5, 0x115de0, 0x116003, 0x116305, 0x116416, 0x116443, 0x116450, 0x116504, 0x1165a0, 0x116606,
    0x1166d0, 0x116803, 0x116ab5, 0x116b83, 0x116b96, 0x116ba0, 0x116c04, 0x116ca0, 0x117003, 0x1171b0, 0x1171d5,
    0x1172c0, 0x117304, 0x1173c6, 0x1173f7, 0x117403, 0x117470, 0x118003, 0x1182c5, 0x1183b6, 0x1183c0, 0x118a01,
    0x118c02, 0x118e04, 0x118f30, 0x118ff3, 0x119070, 0x119093, 0x1190a0, 0x1190c3, 0x119140, 0x119153, 0x119170,
    0x119183, 0x119305, 0x119360, 0x119375, 0x119390, 0x1193b5, 0x1193f3, 0x119405, 0x119413, 0x119425, 0x119446,
    0x119470, 0x119504, 0x1195a0, 0x119a03, 0x119a80, 0x119aa3, 0x119d15, 0x119d80, 0x119da5, 0x119e13, 0x119e26,
    0x119e33, 0x119e45, 0x119e50, 0x11a003, 0x11a015, 0x11a0b3, 0x11a335, 0x11a3a3, 0x11a3b5, 0x11a3f6, 0x11a475,
    0x11a480, 0x11a503, 0x11a515, 0x11a5c3, 0x11a8a5, 0x11a9a6, 0x11a9d3, 0x11a9e6, 0x11aa30, 0x11ab03, 0x11af90,
    0x11c003, 0x11c090, 0x11c0a3, 0x11c2f5, 0x11c370, 0x11c385, 0x11c403, 0x11c416, 0x11c460, 0x11c504, 0x11c6d0,
    0x11c706, 0x11c723, 0x11c900, 0x11c925, 0x11ca80, 0x11ca95, 0x11cb70, 0x11d003, 0x11d070, 0x11d083, 0x11d0a0,
    0x11d0b3, 0x11d315, 0x11d370, 0x11d3a5, 0x11d3b0, 0x11d3c5, 0x11d3e0, 0x11d3f5, 0x11d463, 0x11d475, 0x11d480,
    0x11d504, 0x11d5a0, 0x11d603, 0x11d660, 0x11d673, 0x11d690, 0x11d6a3, 0x11d8a5, 0x11d8f0, 0x11d905, 0x11d920,
    0x11d935, 0x11d983, 0x11d990, 0x11da04, 0x11daa0, 0x11ee03, 0x11ef35, 0x11ef76, 0x11ef90, 0x11fb03, 0x11fb10,
    0x11fc04, 0x11fd57, 0x11ff20, 0x11fff6, 0x120003, 0x1239a0, 0x124004, 0x1246f0, 0x124706, 0x124750, 0x124803,
    0x125440, 0x12f903, 0x12ff16, 0x12ff30, 0x130003, 0x1342f0, 0x144003, 0x146470, 0x168003, 0x16a390, 0x16a403,
    0x16a5f0, 0x16a604, 0x16a6a0, 0x16a6e6, 0x16a703, 0x16abf0, 0x16ac04, 0x16aca0, 0x16ad03, 0x16aee0, 0x16af05,
    0x16af56, 0x16af60, 0x16b003, 0x16b305, 0x16b376, 0x16b3c7, 0x16b403, 0x16b446, 0x16b457, 0x16b460, 0x16b504,
    0x16b5a0, 0x16b5b4, 0x16b620, 0x16b633, 0x16b780, 0x16b7d3, 0x16b900, 0x16e401, 0x16e602, 0x16e804, 0x16e976,
    0x16e9b0, 0x16f003, 0x16f4b0, 0x16f4f5, 0x16f503, 0x16f515, 0x16f880, 0x16f8f5, 0x16f933, 0x16fa00, 0x16fe03,
    0x16fe26, 0x16fe33, 0x16fe45, 0x16fe50, 0x16ff05, 0x16ff20, 0x170003, 0x187f80, 0x188003, 0x18cd60, 0x18d003,
    0x18d090, 0x1aff03, 0x1aff40, 0x1aff53, 0x1affc0, 0x1affd3, 0x1afff0, 0x1b0003, 0x1b1230, 0x1b1503, 0x1b1530,
    0x1b1643, 0x1b1680, 0x1b1703, 0x1b2fc0, 0x1bc003, 0x1bc6b0, 0x1bc703, 0x1bc7d0, 0x1bc803, 0x1bc890, 0x1bc903,
    0x1bc9a0, 0x1bc9c7, 0x1bc9d5, 0x1bc9f6, 0x1bca00, 0x1cf005, 0x1cf2e0, 0x1cf305, 0x1cf470, 0x1cf507, 0x1cfc40,
    0x1d0007, 0x1d0f60, 0x1d1007, 0x1d1270, 0x1d1297, 0x1d1655, 0x1d16a7, 0x1d16d5, 0x1d1730, 0x1d17b5, 0x1d1837,
    0x1d1855, 0x1d18c7, 0x1d1aa5, 0x1d1ae7, 0x1d1eb0, 0x1d2007, 0x1d2425, 0x1d2457, 0x1d2460, 0x1d2e04, 0x1d2f40,
    0x1d3007, 0x1d3570, 0x1d3604, 0x1d3790, 0x1d4001, 0x1d41a2, 0x1d4341, 0x1d44e2, 0x1d4550, 0x1d4562, 0x1d4681,
    0x1d4822, 0x1d49c1, 0x1d49d0, 0x1d49e1, 0x1d4a00, 0x1d4a21, 0x1d4a30, 0x1d4a51, 0x1d4a70, 0x1d4a91, 0x1d4ad0,
    0x1d4ae1, 0x1d4b62, 0x1d4ba0, 0x1d4bb2, 0x1d4bc0, 0x1d4bd2, 0x1d4c40, 0x1d4c52, 0x1d4d01, 0x1d4ea2, 0x1d5041,
    0x1d5060, 0x1d5071, 0x1d50b0, 0x1d50d1, 0x1d5150, 0x1d5161, 0x1d51d0, 0x1d51e2, 0x1d5381, 0x1d53a0, 0x1d53b1,
    0x1d53f0, 0x1d5401, 0x1d5450, 0x1d5461, 0x1d5470, 0x1d54a1, 0x1d5510, 0x1d5522, 0x1d56c1, 0x1d5862, 0x1d5a01,
    0x1d5ba2, 0x1d5d41, 0x1d5ee2, 0x1d6081, 0x1d6222, 0x1d63c1, 0x1d6562, 0x1d6701, 0x1d68a2, 0x1d6a60, 0x1d6a81,
    0x1d6c17, 0x1d6c22, 0x1d6db7, 0x1d6dc2, 0x1d6e21, 0x1d6fb7, 0x1d6fc2, 0x1d7157, 0x1d7162, 0x1d71c1, 0x1d7357,
    0x1d7362, 0x1d74f7, 0x1d7502, 0x1d7561, 0x1d76f7, 0x1d7702, 0x1d7897, 0x1d78a2, 0x1d7901, 0x1d7a97, 0x1d7aa2,
    0x1d7c37, 0x1d7c42, 0x1d7ca1, 0x1d7cb2, 0x1d7cc0, 0x1d7ce4, 0x1d8007, 0x1da005, 0x1da377, 0x1da3b5, 0x1da6d7,
    0x1da755, 0x1da767, 0x1da845, 0x1da857, 0x1da876, 0x1da8c0, 0x1da9b5, 0x1daa00, 0x1daa15, 0x1dab00, 0x1df002,
    0x1df0a3, 0x1df0b2, 0x1df1f0, 0x1e0005, 0x1e0070, 0x1e0085, 0x1e0190, 0x1e01b5, 0x1e0220, 0x1e0235, 0x1e0250,
    0x1e0265, 0x1e02b0, 0x1e1003, 0x1e12d0, 0x1e1305, 0x1e1373, 0x1e13e0, 0x1e1404, 0x1e14a0, 0x1e14e3, 0x1e14f7,
    0x1e1500, 0x1e2903, 0x1e2ae5, 0x1e2af0, 0x1e2c03, 0x1e2ec5, 0x1e2f04, 0x1e2fa0, 0x1e2ff7, 0x1e3000, 0x1e7e03,
    0x1e7e70, 0x1e7e83, 0x1e7ec0, 0x1e7ed3, 0x1e7ef0, 0x1e7f03, 0x1e7ff0, 0x1e8003, 0x1e8c50, 0x1e8c74, 0x1e8d05,
    0x1e8d70, 0x1e9001, 0x1e9222, 0x1e9445, 0x1e94b3, 0x1e94c0, 0x1e9504, 0x1e95a0, 0x1e95e6, 0x1e9600, 0x1ec714,
    0x1ecac7, 0x1ecad4, 0x1ecb07, 0x1ecb14, 0x1ecb50, 0x1ed014, 0x1ed2e7, 0x1ed2f4, 0x1ed3e0, 0x1ee003, 0x1ee040,
    0x1ee053, 0x1ee200, 0x1ee213, 0x1ee230, 0x1ee243, 0x1ee250, 0x1ee273, 0x1ee280, 0x1ee293, 0x1ee330, 0x1ee343,
    0x1ee380, 0x1ee393, 0x1ee3a0, 0x1ee3b3, 0x1ee3c0, 0x1ee423, 0x1ee430, 0x1ee473, 0x1ee480, 0x1ee493, 0x1ee4a0,
    0x1ee4b3, 0x1ee4c0, 0x1ee4d3, 0x1ee500, 0x1ee513, 0x1ee530, 0x1ee543, 0x1ee550, 0x1ee573, 0x1ee580, 0x1ee593,
    0x1ee5a0, 0x1ee5b3, 0x1ee5c0, 0x1ee5d3, 0x1ee5e0, 0x1ee5f3, 0x1ee600, 0x1ee613, 0x1ee630, 0x1ee643, 0x1ee650,
    0x1ee673, 0x1ee6b0, 0x1ee6c3, 0x1ee730, 0x1ee743, 0x1ee780, 0x1ee793, 0x1ee7d0, 0x1ee7e3, 0x1ee7f0, 0x1ee803,
    0x1ee8a0, 0x1ee8b3, 0x1ee9c0, 0x1eea13, 0x1eea40, 0x1eea53, 0x1eeaa0, 0x1eeab3, 0x1eebc0, 0x1eef07, 0x1eef20,
    0x1f0007, 0x1f02c0, 0x1f0307, 0x1f0940, 0x1f0a07, 0x1f0af0, 0x1f0b17, 0x1f0c00, 0x1f0c17, 0x1f0d00, 0x1f0d17,
    0x1f0f60, 0x1f1004, 0x1f10d7, 0x1f1ae0, 0x1f1e67, 0x1f2030, 0x1f2107, 0x1f23c0, 0x1f2407, 0x1f2490, 0x1f2507,
    0x1f2520, 0x1f2607, 0x1f2660, 0x1f3007, 0x1f6d80, 0x1f6dd7, 0x1f6ed0, 0x1f6f07, 0x1f6fd0, 0x1f7007, 0x1f7740,
    0x1f7807, 0x1f7d90, 0x1f7e07, 0x1f7ec0, 0x1f7f07, 0x1f7f10, 0x1f8007, 0x1f80c0, 0x1f8107, 0x1f8480, 0x1f8507,
    0x1f85a0, 0x1f8607, 0x1f8880, 0x1f8907, 0x1f8ae0, 0x1f8b07, 0x1f8b20, 0x1f9007, 0x1fa540, 0x1fa607, 0x1fa6e0,
    0x1fa707, 0x1fa750, 0x1fa787, 0x1fa7d0, 0x1fa807, 0x1fa870, 0x1fa907, 0x1faad0, 0x1fab07, 0x1fabb0, 0x1fac07,
    0x1fac60, 0x1fad07, 0x1fada0, 0x1fae07, 0x1fae80, 0x1faf07, 0x1faf70, 0x1fb007, 0x1fb930, 0x1fb947, 0x1fbcb0,
    0x1fbf04, 0x1fbfa0, 0x200003, 0x2a6e00, 0x2a7003, 0x2b7390, 0x2b7403, 0x2b81e0, 0x2b8203, 0x2cea20, 0x2ceb03,
    0x2ebe10, 0x2f8003, 0x2fa1e0, 0x300003, 0x3134b0, 0xe01005, 0xe01f00,
};
enum { MOEI_RUNE_CHANGES = (int)(sizeof moei_rune_changes / sizeof *moei_rune_changes) };

static unsigned moei_rune_kind(uint32_t code) {
    int low = 0, high = MOEI_RUNE_CHANGES;
    unsigned number;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (moei_rune_changes[middle] >> 4 <= code) low = middle;
        else high = middle;
    }
    number = (unsigned)moei_rune_changes[low] & 15u;
    return number < 9 ? 1u << number : (code + number) % 2 != 0 ? (unsigned)MOEI_RUNE_UPPER : (unsigned)MOEI_RUNE_LOWER;
}

static moei_rune moei_rune_at(const char *p, const char *end) {
    const char *next = p;
    moei_rune r;
    r.code = 0;
    r.kind = MOEI_RUNE_END;
    r.size = 0;
    if (p >= end) return r;
    if (!moei_next_utf8(&next, end, &r.code)) {
        r.code = 0xFFFDu;
        next = p + 1;
    }
    r.size = (size_t)(next - p);
    r.kind = moei_rune_kind(r.code);
    return r;
}

/* Sets of code points that some expressions list. */
enum {
    MOEI_RUNES_NONE,
    MOEI_RUNES_HAN,     /* Script=Han, Unicode 14 */
    MOEI_RUNES_KANA,    /* deepseek-v3: ideographs and kana */
    MOEI_RUNES_EAST,    /* deepseek-llm and -coder: U+0800 to ideographs, Hangul */
    MOEI_RUNES_CASED,   /* deepseek-llm: letters that have case, from its tokenizer.json */
    MOEI_RUNES_MARKS,   /* deepseek-llm: punctuation, and ASCII from : to ~ */
    MOEI_RUNES_LINE,
    MOEI_RUNES_FALCON,
    MOEI_RUNES_DEFAULT,
    MOEI_RUNES_DIGIT
};

typedef struct moei_rune_range {
    int set;
    uint32_t first, last;
} moei_rune_range;

static const moei_rune_range moei_rune_ranges[] = {
    {MOEI_RUNES_HAN, 0x2e80, 0x2e99}, {MOEI_RUNES_HAN, 0x2e9b, 0x2ef3}, {MOEI_RUNES_HAN, 0x2f00, 0x2fd5},
    {MOEI_RUNES_HAN, 0x3005, 0x3005}, {MOEI_RUNES_HAN, 0x3007, 0x3007}, {MOEI_RUNES_HAN, 0x3021, 0x3029},
    {MOEI_RUNES_HAN, 0x3038, 0x303b}, {MOEI_RUNES_HAN, 0x3400, 0x4dbf}, {MOEI_RUNES_HAN, 0x4e00, 0x9fff},
    {MOEI_RUNES_HAN, 0xf900, 0xfa6d}, {MOEI_RUNES_HAN, 0xfa70, 0xfad9}, {MOEI_RUNES_HAN, 0x16fe2, 0x16fe3},
    {MOEI_RUNES_HAN, 0x16ff0, 0x16ff1}, {MOEI_RUNES_HAN, 0x20000, 0x2a6df}, {MOEI_RUNES_HAN, 0x2a700, 0x2b738},
    {MOEI_RUNES_HAN, 0x2b740, 0x2b81d}, {MOEI_RUNES_HAN, 0x2b820, 0x2cea1}, {MOEI_RUNES_HAN, 0x2ceb0, 0x2ebe0},
    {MOEI_RUNES_HAN, 0x2f800, 0x2fa1d}, {MOEI_RUNES_HAN, 0x30000, 0x3134a},
    {MOEI_RUNES_KANA, 0x3040, 0x30ff}, {MOEI_RUNES_KANA, 0x4e00, 0x9fa5},
    {MOEI_RUNES_EAST, 0x800, 0x9fa5}, {MOEI_RUNES_EAST, 0xac00, 0xd7ff},
    {MOEI_RUNES_CASED, 0x41, 0x5a}, {MOEI_RUNES_CASED, 0x61, 0x7a}, {MOEI_RUNES_CASED, 0xb5, 0xb5},
    {MOEI_RUNES_CASED, 0xc0, 0xd6}, {MOEI_RUNES_CASED, 0xd8, 0xf6}, {MOEI_RUNES_CASED, 0xf8, 0x1ba},
    {MOEI_RUNES_CASED, 0x1bc, 0x1bf}, {MOEI_RUNES_CASED, 0x1c4, 0x293}, {MOEI_RUNES_CASED, 0x295, 0x2af},
    {MOEI_RUNES_CASED, 0x370, 0x373}, {MOEI_RUNES_CASED, 0x376, 0x376}, {MOEI_RUNES_CASED, 0x377, 0x377},
    {MOEI_RUNES_CASED, 0x37b, 0x37d}, {MOEI_RUNES_CASED, 0x37f, 0x37f}, {MOEI_RUNES_CASED, 0x386, 0x386},
    {MOEI_RUNES_CASED, 0x388, 0x38a}, {MOEI_RUNES_CASED, 0x38c, 0x38c}, {MOEI_RUNES_CASED, 0x38e, 0x3a1},
    {MOEI_RUNES_CASED, 0x3a3, 0x3f5}, {MOEI_RUNES_CASED, 0x3f7, 0x481}, {MOEI_RUNES_CASED, 0x48a, 0x52f},
    {MOEI_RUNES_CASED, 0x531, 0x556}, {MOEI_RUNES_CASED, 0x10a0, 0x10c5}, {MOEI_RUNES_CASED, 0x13a0, 0x13f5},
    {MOEI_RUNES_CASED, 0x13f8, 0x13fd}, {MOEI_RUNES_CASED, 0x1c90, 0x1cba}, {MOEI_RUNES_CASED, 0x1cbd, 0x1cbf},
    {MOEI_RUNES_CASED, 0x1d00, 0x1d2b}, {MOEI_RUNES_CASED, 0x1d6b, 0x1d77}, {MOEI_RUNES_CASED, 0x1d79, 0x1d9a},
    {MOEI_RUNES_CASED, 0x1e00, 0x1f15}, {MOEI_RUNES_CASED, 0x1f18, 0x1f1d}, {MOEI_RUNES_CASED, 0x1f20, 0x1f45},
    {MOEI_RUNES_CASED, 0x1f48, 0x1f4d}, {MOEI_RUNES_CASED, 0x1f50, 0x1f57}, {MOEI_RUNES_CASED, 0x1f59, 0x1f59},
    {MOEI_RUNES_CASED, 0x1f5b, 0x1f5b}, {MOEI_RUNES_CASED, 0x1f5d, 0x1f5d}, {MOEI_RUNES_CASED, 0x1f5f, 0x1f7d},
    {MOEI_RUNES_CASED, 0x1f80, 0x1fb4}, {MOEI_RUNES_CASED, 0x1fb6, 0x1fbc}, {MOEI_RUNES_CASED, 0x1fbe, 0x1fbe},
    {MOEI_RUNES_CASED, 0x1fc2, 0x1fc4}, {MOEI_RUNES_CASED, 0x1fc6, 0x1fcc}, {MOEI_RUNES_CASED, 0x1fd0, 0x1fd3},
    {MOEI_RUNES_CASED, 0x1fd6, 0x1fdb}, {MOEI_RUNES_CASED, 0x1fe0, 0x1fec}, {MOEI_RUNES_CASED, 0x1ff2, 0x1ff4},
    {MOEI_RUNES_CASED, 0x1ff6, 0x1ffc}, {MOEI_RUNES_CASED, 0x2102, 0x2102}, {MOEI_RUNES_CASED, 0x2107, 0x2107},
    {MOEI_RUNES_CASED, 0x210a, 0x2113}, {MOEI_RUNES_CASED, 0x2115, 0x2115}, {MOEI_RUNES_CASED, 0x2119, 0x211d},
    {MOEI_RUNES_CASED, 0x2124, 0x2124}, {MOEI_RUNES_CASED, 0x2126, 0x2126}, {MOEI_RUNES_CASED, 0x2128, 0x2128},
    {MOEI_RUNES_CASED, 0x212a, 0x212d}, {MOEI_RUNES_CASED, 0x212f, 0x2134}, {MOEI_RUNES_CASED, 0x2139, 0x2139},
    {MOEI_RUNES_CASED, 0x213c, 0x213f}, {MOEI_RUNES_CASED, 0x2145, 0x2149}, {MOEI_RUNES_CASED, 0x214e, 0x214e},
    {MOEI_RUNES_CASED, 0x2183, 0x2183}, {MOEI_RUNES_CASED, 0x2184, 0x2184}, {MOEI_RUNES_CASED, 0x2c00, 0x2c7b},
    {MOEI_RUNES_CASED, 0x2c7e, 0x2ce4}, {MOEI_RUNES_CASED, 0x2ceb, 0x2cee}, {MOEI_RUNES_CASED, 0x2cf2, 0x2cf2},
    {MOEI_RUNES_CASED, 0x2cf3, 0x2cf3}, {MOEI_RUNES_CASED, 0xa640, 0xa66d}, {MOEI_RUNES_CASED, 0xa680, 0xa69b},
    {MOEI_RUNES_CASED, 0xa722, 0xa76f}, {MOEI_RUNES_CASED, 0xa771, 0xa787}, {MOEI_RUNES_CASED, 0xa78b, 0xa78e},
    {MOEI_RUNES_CASED, 0xab70, 0xabbf}, {MOEI_RUNES_CASED, 0xfb00, 0xfb06}, {MOEI_RUNES_CASED, 0xfb13, 0xfb17},
    {MOEI_RUNES_CASED, 0xff21, 0xff3a}, {MOEI_RUNES_CASED, 0xff41, 0xff5a}, {MOEI_RUNES_CASED, 0x10400, 0x1044f},
    {MOEI_RUNES_CASED, 0x104b0, 0x104d3}, {MOEI_RUNES_CASED, 0x104d8, 0x104fb}, {MOEI_RUNES_CASED, 0x10c80, 0x10cb2},
    {MOEI_RUNES_CASED, 0x10cc0, 0x10cf2}, {MOEI_RUNES_CASED, 0x118a0, 0x118df}, {MOEI_RUNES_CASED, 0x1e900, 0x1e943},
    {MOEI_RUNES_MARKS, 0x21, 0x2f}, {MOEI_RUNES_MARKS, 0x3a, 0x7e}, {MOEI_RUNES_MARKS, 0x2018, 0x201f},
    {MOEI_RUNES_MARKS, 0x3000, 0x3002}, {MOEI_RUNES_MARKS, 0xff01, 0xff0f}, {MOEI_RUNES_MARKS, 0xff1a, 0xff5e},
    {MOEI_RUNES_LINE, 0xa, 0xa}, {MOEI_RUNES_LINE, 0xd, 0xd},
    {MOEI_RUNES_FALCON, 0x24, 0x24}, {MOEI_RUNES_FALCON, 0x2b, 0x2b}, {MOEI_RUNES_FALCON, 0x3c, 0x3e},
    {MOEI_RUNES_FALCON, 0x5e, 0x5e}, {MOEI_RUNES_FALCON, 0x60, 0x60}, {MOEI_RUNES_FALCON, 0x7c, 0x7c},
    {MOEI_RUNES_FALCON, 0x7e, 0x7e},
    {MOEI_RUNES_DEFAULT, 0x24, 0x24}, {MOEI_RUNES_DEFAULT, 0x2b, 0x2b}, {MOEI_RUNES_DEFAULT, 0x3c, 0x3e},
    {MOEI_RUNES_DEFAULT, 0x5e, 0x5e}, {MOEI_RUNES_DEFAULT, 0x7c, 0x7c}, {MOEI_RUNES_DEFAULT, 0x7e, 0x7e},
    {MOEI_RUNES_DIGIT, 0x30, 0x39},
};
enum { MOEI_RUNE_RANGES = (int)(sizeof moei_rune_ranges / sizeof *moei_rune_ranges) };

static int moei_rune_is_in(uint32_t code, int set) {
    int low = 0, high = MOEI_RUNE_RANGES;
    if (set == MOEI_RUNES_NONE) return 0;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        const moei_rune_range *range = moei_rune_ranges + middle;
        if (range->set < set || (range->set == set && range->first <= code)) low = middle;
        else high = middle;
    }
    return moei_rune_ranges[low].set == set && code >= moei_rune_ranges[low].first &&
           code <= moei_rune_ranges[low].last;
}

/* ---- splitting text into words -----------------------------------------------------------------
   Each published expression is a function. It matches the text at p, which is not empty, and
   returns the bytes of its match or, with *taken = 0, the number of bytes that do not match. */

typedef struct moei_cut_pass {
    size_t (*match)(const struct moei_cut_pass *pass, const char *p, const char *end, int *taken);
    unsigned mask;   /* moei_pass_run: MOEI_RUNE_ classes of a run, which may also be in set */
    int set;         /* MOEI_RUNES_; moei_pass_cased: ideographs that do not count as letters */
    int least, most; /* length of a run; most digits of a number; 0: any */
    int option;      /* moei_pass_run: a space may precede it; moei_pass_cased: an ending may follow */
} moei_cut_pass;

/* The end of the runes in mask from p on, at most `most` of them (0: any number). */
static const char *moei_runes(const char *p, const char *end, unsigned mask, int most) {
    moei_rune r = moei_rune_at(p, end);
    int n = 0;
    for (; (r.kind & mask) != 0 && (most == 0 || n < most); n++) {
        p += r.size;
        r = moei_rune_at(p, end);
    }
    return p;
}

static int moei_rune_is_line(moei_rune r) { return r.code == '\n' || r.code == '\r'; }

/* White space at p: with `lines`, up to the last line break of the run if it has one; otherwise the
   run without its last character, which belongs to the next word. */
static const char *moei_runes_white(const char *p, const char *end, int lines) {
    const char *at = p, *last = p;
    const char *line = p; /* after the last line break */
    moei_rune r = moei_rune_at(p, end);
    for (; r.kind == MOEI_RUNE_SPACE; r = moei_rune_at(at, end)) {
        last = at;
        at += r.size;
        if (moei_rune_is_line(r)) line = at;
    }
    if (lines && line > p) return line;
    return at >= end || last == p ? at : last;
}

/* 's 't 're 've 'm 'll 'd at p; any_case: also 'S and U+017F for s, as Unicode folds case. */
static const char *moei_runes_ending(const char *p, const char *end, int any_case) {
    static const char endings[][3] = {"s", "t", "m", "d", "re", "ve", "ll"};
    size_t i, n, k;
    if (p >= end || *p != '\'') return p;
    p++;
    for (i = 0; i < sizeof endings / sizeof *endings; i++) {
        n = moei_strlen(endings[i]);
        for (k = 0; k < n && p + k < end; k++) {
            const int c = (unsigned char)p[k], letter = (unsigned char)endings[i][k];
            if (c != letter && !(any_case && c == letter - 32)) break;
        }
        if (k == n) return p + n;
    }
    return any_case && end - p >= 2 && moei_memcmp(p, "\xC5\xBF", 2) == 0 ? p + 2 : p - 1;
}

/* [space]? signs, then line breaks (and slashes) if `tail` allows; p itself if there are none. */
static const char *moei_runes_signs(const char *p, const char *end, unsigned mask, const char *tail) {
    const char *from = *p == ' ' ? p + 1 : p, *to = moei_runes(from, end, mask, 0);
    if (to == from) return p;
    while (to < end && *to != '\0' && moei_memchr(tail, *to, moei_strlen(tail)) != NULL) to++;
    return to;
}

/* gpt-2. */
static size_t moei_pass_gpt2(const moei_cut_pass *pass, const char *p, const char *end, int *taken) {
    const char *from = *p == ' ' ? p + 1 : p, *to = moei_runes_ending(p, end, 0);
    (void)pass;
    *taken = 1;
    if (to == p) to = moei_runes(from, end, MOEI_RUNE_LETTER, 0);
    if (to == from) to = moei_runes(from, end, MOEI_RUNE_NUMBER, 0);
    if (to == from) to = moei_runes(from, end, MOEI_RUNE_SIGN, 0);
    if (to == from) to = moei_runes_white(p, end, 0);
    return (size_t)(to - p);
}

/* qwen2, and llama-bpe with up to 3 digits. */
static size_t moei_pass_words(const moei_cut_pass *pass, const char *p, const char *end, int *taken) {
    const moei_rune r = moei_rune_at(p, end);
    const char *from = p, *to = moei_runes_ending(p, end, 1);
    *taken = 1;
    if (to > p) return (size_t)(to - p);
    if ((r.kind & (MOEI_RUNE_LETTER | MOEI_RUNE_NUMBER)) == 0 && !moei_rune_is_line(r)) from = p + r.size;
    to = moei_runes(from, end, MOEI_RUNE_LETTER, 0);
    if (to == from) to = moei_runes(from = p, end, MOEI_RUNE_NUMBER, pass->most);
    if (to == p) to = moei_runes_signs(p, end, MOEI_RUNE_SIGN, "\r\n");
    if (to == p) to = moei_runes_white(p, end, 1);
    return (size_t)(to - p);
}

/* The case of a letter or mark as bits UPPER and LOWER (both: without case); 0: another rune. */
static unsigned moei_rune_case(const moei_cut_pass *pass, moei_rune r) {
    if (moei_rune_is_in(r.code, pass->set)) return 0;
    return r.kind == MOEI_RUNE_UPPER || r.kind == MOEI_RUNE_LOWER ? r.kind
           : (r.kind & (MOEI_RUNE_CASELESS | MOEI_RUNE_MARK)) != 0 ? (unsigned)(MOEI_RUNE_UPPER | MOEI_RUNE_LOWER)
                                                                   : 0u;
}

/* Matches upper-case letters, then lower-case ones; letters without case and marks are both. lower:
   requires one of the lower-case part, for which the upper-case part backtracks; else requires an
   upper-case one. Returns p if there is no match. */
static const char *moei_runes_case(const moei_cut_pass *pass, const char *p, const char *end, int lower) {
    const char *at = p, *both = p, *upper;
    moei_rune r = moei_rune_at(at, end);
    unsigned kind = moei_rune_case(pass, r);
    for (; (kind & MOEI_RUNE_UPPER) != 0; kind = moei_rune_case(pass, r)) {
        at += r.size;
        if ((kind & MOEI_RUNE_LOWER) != 0) both = at;
        r = moei_rune_at(at, end);
    }
    upper = at;
    for (; (kind & MOEI_RUNE_LOWER) != 0; kind = moei_rune_case(pass, r)) {
        at += r.size;
        r = moei_rune_at(at, end);
    }
    if (lower) return at > upper ? at : both;
    return upper > p ? at : p;
}

/* gpt-4o, tekken, kimi-k2. */
static size_t moei_pass_cased(const moei_cut_pass *pass, const char *p, const char *end, int *taken) {
    const moei_rune r = moei_rune_at(p, end);
    const int open = (r.kind & (MOEI_RUNE_LETTER | MOEI_RUNE_NUMBER)) == 0 && !moei_rune_is_line(r);
    const char *to = p;
    int way;
    *taken = 1;
    for (; pass->set != MOEI_RUNES_NONE && moei_rune_is_in(moei_rune_at(to, end).code, pass->set);)
        to += moei_rune_at(to, end).size;
    if (to > p) return (size_t)(to - p);
    for (way = 0; way < 4 && to == p; way++) {
        const char *from = way % 2 == 0 && open ? p + r.size : p;
        to = moei_runes_case(pass, from, end, way < 2);
        if (to == from) to = p;
    }
    if (to > p && pass->option) to = moei_runes_ending(to, end, 1);
    if (to == p) to = moei_runes(p, end, MOEI_RUNE_NUMBER, pass->most);
    if (to == p) to = moei_runes_signs(p, end, MOEI_RUNE_SIGN, pass->set == MOEI_RUNES_NONE ? "\r\n/" : "\r\n");
    if (to == p) to = moei_runes_white(p, end, 1);
    return (size_t)(to - p);
}

/* The third pass of deepseek-v3. */
static size_t moei_pass_deepseek(const moei_cut_pass *pass, const char *p, const char *end, int *taken) {
    const unsigned word = MOEI_RUNE_LETTER | MOEI_RUNE_MARK, signs = MOEI_RUNE_PUNCTUATION | MOEI_RUNE_SYMBOL;
    const moei_rune r = moei_rune_at(p, end);
    const char *from = p, *to = p;
    (void)pass;
    *taken = 1;
    if (r.code < 0x80 && (r.kind & signs) != 0) {
        for (to = p + 1; to < end && ((*to >= 'a' && *to <= 'z') || (*to >= 'A' && *to <= 'Z'));) to++;
        to = to > p + 1 ? to : p;
    }
    if (to == p) {
        if ((r.kind & (MOEI_RUNE_LETTER | signs)) == 0 && !moei_rune_is_line(r)) from = p + r.size;
        to = moei_runes(from, end, word, 0);
        if (to == from) to = moei_runes(p, end, word, 0);
    }
    if (to == p) to = moei_runes_signs(p, end, signs, "\r\n");
    if (to == p) to = moei_runes_white(p, end, 1);
    *taken = to > p;
    return to > p ? (size_t)(to - p) : r.size;
}

/* A run of runes in mask or set; with option, including one white space before it. */
static size_t moei_pass_run(const moei_cut_pass *pass, const char *p, const char *end, int *taken) {
    const moei_rune first = moei_rune_at(p, end);
    int way, n = 0;
    *taken = 0;
    for (way = pass->option && first.kind == MOEI_RUNE_SPACE ? 0 : 1; way < 2 && n == 0; way++) {
        const char *at = way == 0 ? p + first.size : p;
        moei_rune r = moei_rune_at(at, end);
        for (; r.size > 0 && (pass->most == 0 || n < pass->most); n++) {
            if ((r.kind & pass->mask) == 0 && !moei_rune_is_in(r.code, pass->set)) break;
            at += r.size;
            r = moei_rune_at(at, end);
        }
        *taken = n > 0 && n >= pass->least;
        if (*taken) return (size_t)(at - p);
    }
    return first.size;
}

/* White space at the end of a piece. */
static size_t moei_pass_trail(const moei_cut_pass *pass, const char *p, const char *end, int *taken) {
    const char *to = moei_runes(p, end, MOEI_RUNE_SPACE, 0);
    (void)pass;
    *taken = to == end;
    return to > p ? (size_t)(to - p) : moei_rune_at(p, end).size;
}

/* A word with its U+2581 in front, as SentencePiece's tokenizer.json splits. */
static size_t moei_pass_meta(const moei_cut_pass *pass, const char *p, const char *end, int *taken) {
    const char *to = p + moei_rune_at(p, end).size;
    (void)pass;
    *taken = 1;
    while (to < end && moei_rune_at(to, end).code != 0x2581u) to += moei_rune_at(to, end).size;
    return (size_t)(to - p);
}

/* The passes: name, then the fields of moei_cut_pass. */
#define MOEI_PASSES(X)                                                                            \
    X(GPT2, moei_pass_gpt2, 0, 0, 0, 0, 0)                                                        \
    X(QWEN2, moei_pass_words, 0, 0, 0, 1, 0)                                                      \
    X(LLAMA3, moei_pass_words, 0, 0, 0, 3, 0)                                                     \
    X(GPT4O, moei_pass_cased, 0, 0, 0, 3, 1)                                                      \
    X(TEKKEN, moei_pass_cased, 0, 0, 0, 1, 0)                                                     \
    X(KIMI, moei_pass_cased, 0, MOEI_RUNES_HAN, 0, 3, 1)                                          \
    X(DEEPSEEK, moei_pass_deepseek, 0, 0, 0, 0, 0)                                                \
    X(DIGIT, moei_pass_run, MOEI_RUNE_NUMBER, 0, 0, 1, 0)                                         \
    X(DIGITS_3, moei_pass_run, MOEI_RUNE_NUMBER, 0, 0, 3, 0)                                      \
    X(DIGITS, moei_pass_run, MOEI_RUNE_NUMBER, 0, 0, 0, 0)                                        \
    X(THREE, moei_pass_run, 0, MOEI_RUNES_DIGIT, 3, 3, 0)                                         \
    X(KANA, moei_pass_run, 0, MOEI_RUNES_KANA, 0, 0, 0)                                           \
    X(EAST, moei_pass_run, 0, MOEI_RUNES_EAST, 0, 0, 0)                                           \
    X(LINE, moei_pass_run, 0, MOEI_RUNES_LINE, 0, 1, 0)                                           \
    X(CASED, moei_pass_run, 0, MOEI_RUNES_CASED, 0, 0, 1)                                         \
    X(MARKS, moei_pass_run, 0, MOEI_RUNES_MARKS, 0, 0, 1)                                         \
    X(TRAIL, moei_pass_trail, 0, 0, 0, 0, 0)                                                      \
    X(LETTERS, moei_pass_run, MOEI_RUNE_LETTER, 0, 0, 0, 1)                                       \
    X(POINTS, moei_pass_run, MOEI_RUNE_PUNCTUATION, 0, 0, 0, 1)                                   \
    X(FALCON, moei_pass_run, MOEI_RUNE_PUNCTUATION, MOEI_RUNES_FALCON, 0, 0, 0)                   \
    X(DEFAULT, moei_pass_run, MOEI_RUNE_PUNCTUATION, MOEI_RUNES_DEFAULT, 0, 0, 0)                 \
    X(META, moei_pass_meta, 0, 0, 0, 0, 0)

enum {
    MOEI_PASS_NONE,
#define X(name, match, mask, set, least, most, option) MOEI_PASS_##name,
    MOEI_PASSES(X)
#undef X
    MOEI_PASS_COUNT
};

static const moei_cut_pass moei_passes[] = {
    {NULL, 0, 0, 0, 0, 0},
#define X(name, match, mask, set, least, most, option) {match, mask, set, least, most, option},
    MOEI_PASSES(X)
#undef X
};

/* The values of tokenizer.ggml.pre. */
typedef struct moei_vocab_pre_row {
    const char *names; /* separated by spaces */
    int whole;         /* llama.cpp: words that are tokens are not merged; bos is added */
    unsigned char passes[6];
} moei_vocab_pre_row;

static const moei_vocab_pre_row moei_vocab_pres[] = {
    {"gpt-2 olmo mpt jais trillion phi-2 gigachat a.x-4.0 jina-es jina-de", 0, {MOEI_PASS_GPT2}},
    {"refact starcoder command-r smollm codeshell exaone minerva-7b granite-docling", 0,
     {MOEI_PASS_DIGIT, MOEI_PASS_GPT2}},
    {"qwen2 hunyuan grok-2 bailingmoe bailingmoe2 llada-moe stablelm2 deepseek-r1-qwen megrez", 0, {MOEI_PASS_QWEN2}},
    {"llama-bpe llama3 llama-v3 lfm2 falcon3 falcon-h1 pixtral midm-2.0", 1, {MOEI_PASS_LLAMA3}},
    {"dbrx glm4 chatglm-bpe smaug-bpe hunyuan-dense", 0, {MOEI_PASS_LLAMA3}},
    {"gpt-4o llama4 minimax-m2", 0, {MOEI_PASS_GPT4O}},
    {"tekken", 1, {MOEI_PASS_TEKKEN}},
    {"kimi-k2", 0, {MOEI_PASS_KIMI}},
    {"deepseek-v3", 0, {MOEI_PASS_DIGITS_3, MOEI_PASS_KANA, MOEI_PASS_DEEPSEEK}},
    {"deepseek-llm", 0,
     {MOEI_PASS_LINE, MOEI_PASS_CASED, MOEI_PASS_MARKS, MOEI_PASS_TRAIL, MOEI_PASS_EAST, MOEI_PASS_DIGITS}},
    {"deepseek-coder", 0,
     {MOEI_PASS_LINE, MOEI_PASS_LETTERS, MOEI_PASS_POINTS, MOEI_PASS_EAST, MOEI_PASS_DIGIT}},
    {"falcon", 0, {MOEI_PASS_FALCON, MOEI_PASS_GPT2, MOEI_PASS_THREE}},
    {"default", 0, {MOEI_PASS_DEFAULT, MOEI_PASS_GPT2, MOEI_PASS_DIGITS, MOEI_PASS_THREE}}};

/* ---- the vocabulary: texts, their ids, merges ---- */

enum {
    MOEI_SYMBOL_MOST = 1 << 22,          /* tokens of a file */
    MOEI_MERGE_MOST = 1 << 23,
    MOEI_VOCAB_PROBES = 256,             /* steps of a search in a table; a file that needs more is refused */
    MOEI_SPECIAL_LEFT = 16,              /* of moei_symbol.kind: removes white space before the token */
    MOEI_SPECIAL_RIGHT = 32              /* ... after it */
};
/* Values of moe_tokenizer.space: how spaces are encoded. */
enum {
    MOEI_SPACE_KEPT,
    MOEI_SPACE_META,   /* as U+2581 */
    MOEI_SPACE_EACH,   /* and one is put before each stretch of text between special tokens, */
    MOEI_SPACE_UNLESS, /* before each stretch that does not begin with one, */
    MOEI_SPACE_FIRST   /* before the first stretch only, unless it begins with one */
};
/* Types of tokens, as GGUF numbers them. */
enum {
    MOEI_TOKEN_NORMAL = 1,
    MOEI_TOKEN_UNKNOWN = 2,
    MOEI_TOKEN_CONTROL = 3,
    MOEI_TOKEN_USER = 4,
    MOEI_TOKEN_UNUSED = 5,
    MOEI_TOKEN_BYTE = 6
};
#define MOEI_NO_SYMBOL 0xffffffffu

/* A text with an id: a token, or a text that occurs in merges only. */
typedef struct moei_symbol {
    uint32_t at, size; /* in texts */
    float score;
    unsigned char kind;
} moei_symbol;

/* Symbols left and right become result; the index of a merge is its rank. */
typedef struct moei_merge {
    uint32_t left, right, result;
} moei_merge;

static moei_symbol *moei_symbols(const moe_tokenizer *t) { return (moei_symbol *)(void *)t->symbols.data; }

static const unsigned char *moei_symbol_text(const moe_tokenizer *t, uint32_t id) {
    return t->texts.data + moei_symbols(t)[id].at;
}

static uint64_t moei_vocab_hash(const unsigned char *p, size_t n) {
    uint64_t h = 14695981039346656037u; /* FNV-1a, then the mixing of MurmurHash3 */
    size_t i;
    for (i = 0; i < n; i++) h = (h ^ p[i]) * 1099511628211u;
    h = (h ^ h >> 33) * 0xff51afd7ed558ccdu;
    return h ^ h >> 33;
}

/* A position in a hash table; `step` is odd, so that probing visits all slots. */
typedef struct moei_probe {
    uint32_t *slots;
    size_t mask, at, step;
    int left;
} moei_probe;

static moei_probe moei_probe_begin(const moe_buffer *table, uint64_t hash) {
    moei_probe p;
    p.slots = (uint32_t *)(void *)table->data;
    p.mask = table->size / sizeof *p.slots - 1;
    p.at = (size_t)hash & p.mask;
    p.step = (size_t)(hash >> 32) | 1u;
    p.left = MOEI_VOCAB_PROBES;
    return p;
}

/* The value of the slot, which is stored plus one; MOEI_NO_SYMBOL: the slot is free. */
static uint32_t moei_probe_value(const moei_probe *p) { return p->slots[p->at] - 1u; }

static int moei_probe_next(moei_probe *p) {
    p->at = (p->at + p->step) & p->mask;
    return --p->left > 0;
}

/* The slot of a text: that of the symbol with this text, or a free one; left = 0: not found within
   the probes. */
static moei_probe moei_symbol_probe(const moe_tokenizer *t, const unsigned char *p, size_t n) {
    moei_probe probe = moei_probe_begin(&t->lookup, moei_vocab_hash(p, n));
    do {
        const uint32_t id = moei_probe_value(&probe);
        if (id == MOEI_NO_SYMBOL || (moei_symbols(t)[id].size == n && moei_memcmp(moei_symbol_text(t, id), p, n) == 0))
            break;
    } while (moei_probe_next(&probe));
    return probe;
}

static uint32_t moei_symbol_find(const moe_tokenizer *t, const unsigned char *p, size_t n) {
    moei_probe probe;
    if (n == 0 || n > t->longest) return MOEI_NO_SYMBOL;
    probe = moei_symbol_probe(t, p, n);
    return probe.left > 0 ? moei_probe_value(&probe) : MOEI_NO_SYMBOL;
}

static int32_t moei_token_find(const moe_tokenizer *t, const char *text) {
    const uint32_t id = moei_symbol_find(t, (const unsigned char *)text, moei_strlen(text));
    return id < (uint32_t)t->n_tokens ? (int32_t)id : -1;
}

static moei_probe moei_pair_probe(const moe_tokenizer *t, uint32_t left, uint32_t right) {
    const moei_merge *merges = (const moei_merge *)(const void *)t->merges.data;
    uint64_t h = ((uint64_t)left << 32 | right) * 0x9e3779b97f4a7c15u;
    moei_probe probe;
    h = (h ^ h >> 29) * 0xbf58476d1ce4e5b9u;
    probe = moei_probe_begin(&t->pairs, h ^ h >> 32);
    do {
        const uint32_t rank = moei_probe_value(&probe);
        if (rank == MOEI_NO_SYMBOL || (merges[rank].left == left && merges[rank].right == right)) break;
    } while (moei_probe_next(&probe));
    return probe;
}

/* ---- building the vocabulary ---- */

/* State of loading a tokenizer. r.error is never NULL. */
typedef struct moei_vocab {
    moe_tokenizer t;
    moei_importer r;       /* opens and reads files */
    const char *file;      /* shown in messages */
    int has_scores;
    int byte_fallback;     /* 1: unknown characters become <0xNN> */
} moei_vocab;

static moe_status moei_vocab_memory(moei_vocab *v) {
    return moei_error(v->r.error, MOE_ERR_MEMORY, "%s: no memory for the vocabulary", v->file);
}

/* Allocates a table of zeros for n entries, which fill at most half of it. */
static moe_status moei_vocab_table(moei_vocab *v, moe_buffer *table, size_t n) {
    size_t slots = 16, bytes;
    while (slots < 2 * n) slots *= 2;
    if (!moei_mul(slots, sizeof(uint32_t), &bytes)) return moei_vocab_memory(v);
    moe_buffer_free(table);
    if (moei_buffer_reserve(table, bytes) != MOE_OK) return moei_vocab_memory(v);
    memset(table->data, 0, bytes);
    table->size = bytes;
    return MOE_OK;
}

static moe_status moei_vocab_crowded(moei_vocab *v) {
    return moei_error(v->r.error, MOE_ERR_UNSUPPORTED, "%s: the texts of the vocabulary collide in a hash table",
                      v->file);
}

/* Adds a symbol whose text is the last `size` bytes of texts. */
static moe_status moei_symbol_add(moei_vocab *v, size_t size) {
    moei_symbol s;
    memset(&s, 0, sizeof s);
    if (v->t.texts.size > 0x7fffffffu)
        return moei_error(v->r.error, MOE_ERR_OVERFLOW, "%s: the texts of the tokens have 2 GiB or more", v->file);
    s.at = (uint32_t)(v->t.texts.size - size);
    s.size = (uint32_t)size;
    s.kind = MOEI_TOKEN_NORMAL;
    if (moei_buffer_write(&v->t.symbols, &s, sizeof s) != MOE_OK) return moei_vocab_memory(v);
    if (s.size > v->t.longest) v->t.longest = s.size;
    v->t.n_symbols++;
    return MOE_OK;
}

/* Builds the lookup table of the symbols so far, with room for as many again. Of equal texts the
   last token counts, as in llama.cpp. */
static moe_status moei_vocab_index(moei_vocab *v) {
    moe_tokenizer *t = &v->t;
    uint32_t id;
    moe_status status = moei_vocab_table(v, &t->lookup, 2 * (size_t)t->n_symbols);
    for (id = 0; id < t->n_symbols && status == MOE_OK; id++) {
        moei_probe probe;
        if (moei_symbols(t)[id].size == 0) continue;
        probe = moei_symbol_probe(t, moei_symbol_text(t, id), moei_symbols(t)[id].size);
        if (probe.left == 0) status = moei_vocab_crowded(v);
        else probe.slots[probe.at] = id + 1u;
    }
    return status;
}

/* The symbol of a text, which is added if it is new. */
static moe_status moei_symbol_intern(moei_vocab *v, const unsigned char *p, size_t n, uint32_t *id) {
    moe_tokenizer *t = &v->t;
    moei_probe probe = moei_symbol_probe(t, p, n);
    moe_status status = MOE_OK;
    if (probe.left == 0) return moei_vocab_crowded(v);
    *id = moei_probe_value(&probe);
    if (*id != MOEI_NO_SYMBOL) return MOE_OK;
    *id = t->n_symbols;
    if (moei_buffer_write(&t->texts, p, n) != MOE_OK) return moei_vocab_memory(v);
    status = moei_symbol_add(v, n);
    if (status != MOE_OK) return status;
    probe.slots[probe.at] = *id + 1u;
    if (4 * (size_t)t->n_symbols <= t->lookup.size / sizeof(uint32_t) * 3) return MOE_OK;
    return moei_vocab_index(v);
}

/* Adds the merge of two consecutive texts; the first of equal merges counts. */
static moe_status moei_merge_add(moei_vocab *v, const unsigned char *p, size_t left, size_t right) {
    moei_merge m;
    moe_status status;
    if (left == 0 || right == 0)
        return moei_error(v->r.error, MOE_ERR_FORMAT, "%s: merge %z is not a pair of strings", v->file,
                          v->t.merges.size / sizeof m);
    status = moei_symbol_intern(v, p, left, &m.left);
    if (status == MOE_OK) status = moei_symbol_intern(v, p + left, right, &m.right);
    if (status == MOE_OK) status = moei_symbol_intern(v, p, left + right, &m.result);
    if (status != MOE_OK) return status;
    return moei_buffer_write(&v->t.merges, &m, sizeof m) == MOE_OK ? MOE_OK : moei_vocab_memory(v);
}

/* Builds the lookup table of pairs, when all merges are known. */
static moe_status moei_vocab_pairs(moei_vocab *v) {
    moe_tokenizer *t = &v->t;
    const moei_merge *merges = (const moei_merge *)(const void *)t->merges.data;
    const size_t n = t->merges.size / sizeof *merges;
    size_t i;
    moe_status status = moei_vocab_table(v, &t->pairs, n);
    for (i = 0; i < n && status == MOE_OK; i++) {
        moei_probe probe = moei_pair_probe(t, merges[i].left, merges[i].right);
        if (probe.left == 0) status = moei_vocab_crowded(v);
        else if (moei_probe_value(&probe) == MOEI_NO_SYMBOL) probe.slots[probe.at] = (uint32_t)i + 1u;
    }
    return status;
}

/* Bytes that byte-level BPE writes as themselves; the others are written as U+0100 and up. */
static int moei_byte_is_plain(int byte) {
    return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xff && byte != 0xad);
}

/* The stand-in of a byte as UTF-8; returns its length, at most 2. */
static size_t moei_byte_stand_in(int byte, unsigned char out[2]) {
    int code = byte, b;
    if (!moei_byte_is_plain(byte))
        for (code = 0x100, b = 0; b < byte; b++) code += !moei_byte_is_plain(b);
    if (code < 0x80) {
        out[0] = (unsigned char)code;
        return 1;
    }
    out[0] = (unsigned char)(0xc0 | code >> 6);
    out[1] = (unsigned char)(0x80 | (code & 63));
    return 2;
}

/* The byte of a stand-in; -1: the character is not a stand-in. */
static int moei_byte_of(uint32_t code) {
    int byte = 0;
    uint32_t left = code - 0x100u;
    if (code < 0x100) return moei_byte_is_plain((int)code) ? (int)code : -1;
    for (; byte < 256; byte++)
        if (!moei_byte_is_plain(byte) && left-- == 0) return byte;
    return -1;
}

/* The symbols of the 256 bytes. */
static void moei_vocab_bytes(moei_vocab *v) {
    static const char digits[] = "0123456789ABCDEF";
    moe_tokenizer *t = &v->t;
    unsigned char text[7] = "<0x00>";
    int byte;
    for (byte = 0; byte < 256; byte++) {
        size_t n = 6;
        uint32_t id;
        if (t->kind == MOE_TOKENIZER_BYTES) n = moei_byte_stand_in(byte, text);
        else {
            text[3] = (unsigned char)digits[byte >> 4];
            text[4] = (unsigned char)digits[byte & 15];
        }
        id = v->byte_fallback || t->kind == MOE_TOKENIZER_BYTES ? moei_symbol_find(t, text, n) : MOEI_NO_SYMBOL;
        t->bytes[byte] = id == MOEI_NO_SYMBOL ? -1 : (int32_t)id;
        if (id != MOEI_NO_SYMBOL && t->kind != MOE_TOKENIZER_BYTES) moei_symbols(t)[id].kind = MOEI_TOKEN_BYTE;
    }
}

/* Whether special token a comes before b: by first byte, then the longer one. */
static int moei_special_before(const moe_tokenizer *t, uint32_t a, uint32_t b) {
    const moei_symbol *x = moei_symbols(t) + a, *y = moei_symbols(t) + b;
    const int p = *moei_symbol_text(t, a), q = *moei_symbol_text(t, b);
    return p != q ? p < q : x->size != y->size ? x->size > y->size : a < b;
}

/* Heap sort: sifts ids[at] down among the first n. */
static void moei_special_sift(const moe_tokenizer *t, uint32_t *ids, size_t at, size_t n) {
    for (;;) {
        size_t child = 2 * at + 1;
        const uint32_t moved = ids[at];
        if (child >= n) return;
        if (child + 1 < n && moei_special_before(t, ids[child], ids[child + 1])) child++;
        if (!moei_special_before(t, moved, ids[child])) return;
        ids[at] = ids[child];
        ids[child] = moved;
        at = child;
    }
}

/* Collects and sorts the tokens that are matched before text is split. */
static moe_status moei_vocab_special(moei_vocab *v) {
    moe_tokenizer *t = &v->t;
    uint32_t id, *ids;
    size_t n, i;
    for (id = 0; id < (uint32_t)t->n_tokens; id++) {
        const moei_symbol *s = moei_symbols(t) + id;
        const int kind = s->kind & 15;
        if (s->size == 0 || (kind != MOEI_TOKEN_CONTROL && kind != MOEI_TOKEN_USER && kind != MOEI_TOKEN_UNKNOWN))
            continue;
        if (moei_buffer_write(&t->special, &id, sizeof id) != MOE_OK) return moei_vocab_memory(v);
        t->n_special[1 + *moei_symbol_text(t, id)]++;
    }
    ids = (uint32_t *)(void *)t->special.data;
    n = t->special.size / sizeof id;
    for (i = n / 2; i > 0; i--) moei_special_sift(t, ids, i - 1, n);
    for (i = n; i > 1; i--) {
        id = ids[0];
        ids[0] = ids[i - 1];
        ids[i - 1] = id;
        moei_special_sift(t, ids, 0, i - 1);
    }
    for (i = 0; i < 256; i++) t->n_special[i + 1] += t->n_special[i];
    return MOE_OK;
}

/* Of DeepSeek; the bar is U+FF5C, the space U+2581. */
#define MOEI_SENTENCE_END "<\357\275\234end\342\226\201of\342\226\201sentence\357\275\234>"

/* Texts of tokens that end a turn or a text, whatever the file says. */
static const char *const moei_ends[] = {
    "<|im_end|>", "<|eot_id|>", "<|eot|>", "<|end|>", "<|return|>", "<|endofturn|>", "<|end_of_text|>", "<|role_end|>",
    "<end_of_turn>", "[e~[", "<|endoftext|>", MOEI_SENTENCE_END, "<|eom_id|>", "<EOT>", "<|eos|>", "</s>"};
enum { MOEI_ENDS = (int)(sizeof moei_ends / sizeof *moei_ends) };

/* Sets what depends on the whole vocabulary. */
static moe_status moei_vocab_finish(moei_vocab *v) {
    moe_tokenizer *t = &v->t;
    int i;
    moe_status status;
    moei_vocab_bytes(v);
    status = moei_vocab_special(v);
    for (i = 0; i < MOEI_ENDS && t->eot < 0; i++) {
        const int32_t id = moei_token_find(t, moei_ends[i]);
        if (id >= 0 && id != t->eos && (moei_symbols(t)[id].kind & 15) != MOEI_TOKEN_NORMAL) t->eot = id;
    }
    if (t->eot < 0) t->eot = t->eos;
    if (t->chat.size > 0) t->chat_template = (const char *)t->chat.data;
    return status;
}

/* ---- from GGUF ---- */

#define MOEI_VOCAB_KEYS(X)                                                                        \
    X(MODEL, "tokenizer.ggml.model")                                                              \
    X(PRE, "tokenizer.ggml.pre")                                                                  \
    X(TOKENS, "tokenizer.ggml.tokens")                                                            \
    X(SCORES, "tokenizer.ggml.scores")                                                            \
    X(TYPES, "tokenizer.ggml.token_type")                                                         \
    X(MERGES, "tokenizer.ggml.merges")                                                            \
    X(BOS, "tokenizer.ggml.bos_token_id")                                                         \
    X(EOS, "tokenizer.ggml.eos_token_id")                                                         \
    X(EOT, "tokenizer.ggml.eot_token_id")                                                         \
    X(UNKNOWN, "tokenizer.ggml.unknown_token_id")                                                 \
    X(PADDING, "tokenizer.ggml.padding_token_id")                                                 \
    X(ADD_BOS, "tokenizer.ggml.add_bos_token")                                                    \
    X(ADD_EOS, "tokenizer.ggml.add_eos_token")                                                    \
    X(ADD_SPACE, "tokenizer.ggml.add_space_prefix")                                               \
    X(CHAT, "tokenizer.chat_template")                                                            \
    X(ARCHITECTURE, "general.architecture")

enum {
#define X(name, key) MOEI_VOCAB_##name,
    MOEI_VOCAB_KEYS(X)
#undef X
    MOEI_VOCAB_COUNT
};

static const char *const moei_vocab_keys[] = {
#define X(name, key) key,
    MOEI_VOCAB_KEYS(X)
#undef X
};

/* Offset and type of a key's value; at 0: the file does not have it. */
typedef struct moei_vocab_value {
    uint64_t at;
    uint32_t type;
} moei_vocab_value;

typedef struct moei_vocab_gguf {
    moei_vocab *v;
    const moei_import_shard *file;
    moei_vocab_value values[MOEI_VOCAB_COUNT];
    moei_gguf g;
} moei_vocab_gguf;

static moe_status moei_vocab_keys_find(moei_vocab_gguf *f) {
    char key[MOEI_IMPORT_NAME];
    uint64_t version, n_kv;
    int k;
    moei_gguf_begin(&f->g, &f->v->r, f->file, 4);
    version = moei_gguf_number(&f->g, 4);
    (void)moei_gguf_number(&f->g, 8);
    n_kv = moei_gguf_number(&f->g, 8);
    if (f->g.status == MOE_OK && version != 2 && version != 3)
        moei_gguf_refuse(&f->g, MOE_ERR_UNSUPPORTED, "only GGUF versions 2 and 3, little-endian, are supported");
    for (; n_kv > 0 && f->g.status == MOE_OK; n_kv--) {
        uint32_t type;
        moei_gguf_string(&f->g, key, sizeof key);
        type = (uint32_t)moei_gguf_number(&f->g, 4);
        for (k = 0; k < MOEI_VOCAB_COUNT; k++)
            if (moei_strcmp(key, moei_vocab_keys[k]) == 0) {
                f->values[k].at = f->g.at;
                f->values[k].type = type;
            }
        moei_gguf_skip_value(&f->g, type);
    }
    return f->g.status;
}

/* Seeks to the value of a key; 0: there is none. A value of another type is an error. */
static int moei_vocab_seek(moei_vocab_gguf *f, int key, uint32_t type) {
    const moei_vocab_value *value = f->values + key;
    if (value->at == 0 || f->g.status != MOE_OK) return 0;
    f->g.at = value->at;
    if (value->type == type) return 1;
    f->g.status = moei_error(f->v->r.error, MOE_ERR_FORMAT, "%s: %s has type %d, must be %d", f->v->file,
                             moei_vocab_keys[key], (int)(value->type & 0xff), (int)type);
    return 0;
}

static int32_t moei_vocab_id(moei_vocab_gguf *f, int key, int32_t otherwise) {
    uint64_t id;
    if (f->values[key].at == 0) return otherwise;
    if (!moei_vocab_seek(f, key, f->values[key].type == 5 ? 5 : 4)) return -1;
    id = moei_gguf_number(&f->g, 4);
    return id < (uint64_t)f->v->t.n_tokens ? (int32_t)id : -1;
}

static int moei_vocab_flag(moei_vocab_gguf *f, int key, int otherwise) {
    return moei_vocab_seek(f, key, MOEI_GGUF_BOOL) ? moei_gguf_number(&f->g, 1) != 0 : otherwise;
}

/* Seeks to an array; returns its length, 0 if there is none. */
static size_t moei_vocab_array(moei_vocab_gguf *f, int key, uint32_t type, size_t most) {
    uint32_t own;
    uint64_t n;
    if (!moei_vocab_seek(f, key, MOEI_GGUF_ARRAY)) return 0;
    own = (uint32_t)moei_gguf_number(&f->g, 4);
    n = moei_gguf_number(&f->g, 8);
    if (f->g.status == MOE_OK && own != type)
        f->g.status = moei_error(f->v->r.error, MOE_ERR_FORMAT, "%s: %s has elements of type %d, must be %d",
                                 f->v->file, moei_vocab_keys[key], (int)(own & 0xff), (int)type);
    if (f->g.status == MOE_OK && n > most)
        f->g.status = moei_error(f->v->r.error, MOE_ERR_UNSUPPORTED, "%s: %s has more than %z elements", f->v->file,
                                 moei_vocab_keys[key], most);
    return f->g.status == MOE_OK ? (size_t)n : 0;
}

/* Appends a string of the file to a buffer; returns its length. */
static size_t moei_vocab_string(moei_vocab_gguf *f, moe_buffer *to) {
    const uint64_t n = moei_gguf_number(&f->g, 8);
    if (f->g.status == MOE_OK && n > moei_gguf_left(&f->g))
        moei_gguf_refuse(&f->g, MOE_ERR_FORMAT, "a string goes beyond the end of the file");
    if (f->g.status != MOE_OK || n == 0) return 0;
    if (moei_buffer_reserve(to, (size_t)n) != MOE_OK) {
        f->g.status = moei_vocab_memory(f->v);
        return 0;
    }
    moei_gguf_read(&f->g, to->data + to->size, (size_t)n);
    to->size += (size_t)n;
    return (size_t)n;
}

/* Refuses a wrong number of scores or types. */
static void moei_vocab_count(moei_vocab_gguf *f, int key, size_t n) {
    if (f->g.status == MOE_OK && n > 0 && n != (size_t)f->v->t.n_tokens)
        f->g.status = moei_error(f->v->r.error, MOE_ERR_FORMAT, "%s: %s has %z elements for %d tokens", f->v->file,
                                 moei_vocab_keys[key], n, (int)f->v->t.n_tokens);
}

static void moei_vocab_tokens(moei_vocab_gguf *f) {
    moei_vocab *v = f->v;
    size_t i, n = moei_vocab_array(f, MOEI_VOCAB_TOKENS, MOEI_GGUF_STRING, MOEI_SYMBOL_MOST);
    if (f->g.status == MOE_OK && n == 0)
        f->g.status = moei_error(v->r.error, MOE_ERR_NOT_FOUND, "%s: has no vocabulary", v->file);
    for (i = 0; i < n && f->g.status == MOE_OK; i++) {
        const size_t length = moei_vocab_string(f, &v->t.texts);
        if (f->g.status == MOE_OK) f->g.status = moei_symbol_add(v, length);
    }
    if (f->g.status != MOE_OK) return;
    v->t.n_tokens = (int32_t)n;
    n = moei_vocab_array(f, MOEI_VOCAB_SCORES, 6, MOEI_SYMBOL_MOST);
    moei_vocab_count(f, MOEI_VOCAB_SCORES, n);
    v->has_scores = n > 0;
    for (i = 0; i < n && f->g.status == MOE_OK; i++) {
        const float score = moei_binary32((uint32_t)moei_gguf_number(&f->g, 4));
        moei_symbols(&v->t)[i].score = score + 0.0f; /* -0 becomes 0 */
        if (f->g.status == MOE_OK && !(score == score))
            f->g.status = moei_error(v->r.error, MOE_ERR_FORMAT, "%s: the score of token %z is not a number", v->file,
                                     i);
    }
    n = moei_vocab_array(f, MOEI_VOCAB_TYPES, 5, MOEI_SYMBOL_MOST);
    moei_vocab_count(f, MOEI_VOCAB_TYPES, n);
    for (i = 0; i < n && f->g.status == MOE_OK; i++) {
        const uint64_t kind = moei_gguf_number(&f->g, 4);
        moei_symbols(&v->t)[i].kind = (unsigned char)(kind >= 1 && kind <= 6 ? (int)kind : (int)MOEI_TOKEN_NORMAL);
    }
    if (f->g.status == MOE_OK) f->g.status = moei_vocab_index(v);
}

/* Merges: strings of two texts with a space between. */
static void moei_vocab_merges(moei_vocab_gguf *f) {
    size_t i, n = moei_vocab_array(f, MOEI_VOCAB_MERGES, MOEI_GGUF_STRING, MOEI_MERGE_MOST);
    moe_buffer text;
    memset(&text, 0, sizeof text);
    text.allocator = f->v->r.allocator;
    for (i = 0; i < n && f->g.status == MOE_OK; i++) {
        size_t length, left = 1;
        text.size = 0;
        length = moei_vocab_string(f, &text);
        if (f->g.status != MOE_OK) break;
        while (left < length && text.data[left] != ' ') left++;
        if (left + 1 >= length) left = length = 0;
        else memmove(text.data + left, text.data + left + 1, length -= left + 1);
        f->g.status = moei_merge_add(f->v, text.data, left, length);
    }
    moe_buffer_free(&text);
    if (f->g.status == MOE_OK) f->g.status = moei_vocab_pairs(f->v);
}

/* Sets the passes by a value of tokenizer.ggml.pre; 0: it is unknown. */
static int moei_vocab_cut(moe_tokenizer *t, const char *pre) {
    const size_t n = sizeof moei_vocab_pres / sizeof *moei_vocab_pres;
    size_t i = 0;
    while (i < n && !moei_is_word_of(pre, moei_vocab_pres[i].names)) i++;
    if (i == n) return 0;
    t->whole = moei_vocab_pres[i].whole;
    for (t->n_passes = 0; t->n_passes < 6 && moei_vocab_pres[i].passes[t->n_passes] != MOEI_PASS_NONE; t->n_passes++)
        t->passes[t->n_passes] = moei_vocab_pres[i].passes[t->n_passes];
    return 1;
}

/* The kind of tokenizer and its pre-tokenizer. */
static void moei_vocab_kind(moei_vocab_gguf *f) {
    moe_tokenizer *t = &f->v->t;
    char model[MOEI_IMPORT_VALUE] = "", pre[MOEI_IMPORT_VALUE] = "default";
    if (moei_vocab_seek(f, MOEI_VOCAB_MODEL, MOEI_GGUF_STRING)) moei_gguf_string(&f->g, model, sizeof model);
    if (moei_vocab_seek(f, MOEI_VOCAB_PRE, MOEI_GGUF_STRING)) moei_gguf_string(&f->g, pre, sizeof pre);
    if (f->g.status != MOE_OK) return;
    if (model[0] == '\0' || moei_strcmp(model, "no_vocab") == 0 || moei_strcmp(model, "none") == 0) {
        f->g.status = moei_error(f->v->r.error, MOE_ERR_NOT_FOUND, "%s: has no vocabulary", f->v->file);
    } else if (moei_strcmp(model, "llama") == 0) {
        t->kind = MOE_TOKENIZER_SCORES;
        t->space = MOEI_SPACE_EACH;
        f->v->byte_fallback = 1;
    } else if (moei_strcmp(model, "gpt2") == 0) {
        if (!moei_vocab_cut(t, pre))
            f->g.status = moei_error(f->v->r.error, MOE_ERR_UNSUPPORTED,
                                     "%s: tokenizer.ggml.pre = %s: this pre-tokenizer is not supported",
                                     f->v->file, pre);
    } else {
        f->g.status = moei_error(f->v->r.error, MOE_ERR_UNSUPPORTED,
                                 "%s: tokenizer.ggml.model = %s: not supported; gpt2 and llama are", f->v->file, model);
    }
}

static moe_status moei_vocab_gguf_read(moei_vocab *v, const moei_import_shard *file) {
    moei_vocab_gguf f;
    moe_tokenizer *t = &v->t;
    int scores;
    memset(&f, 0, sizeof f);
    f.v = v;
    f.file = file;
    if (moei_vocab_keys_find(&f) == MOE_OK) moei_vocab_kind(&f);
    if (f.g.status == MOE_OK) moei_vocab_tokens(&f);
    if (f.g.status != MOE_OK) return f.g.status;
    scores = t->kind == MOE_TOKENIZER_SCORES;
    if (scores && !v->has_scores)
        return moei_error(v->r.error, MOE_ERR_FORMAT, "%s: tokenizer.ggml.scores is missing", v->file);
    if (!scores && f.values[MOEI_VOCAB_MERGES].at == 0)
        return moei_error(v->r.error, MOE_ERR_FORMAT, "%s: tokenizer.ggml.merges is missing", v->file);
    if (!scores) moei_vocab_merges(&f);
    t->bos = moei_vocab_id(&f, MOEI_VOCAB_BOS, scores && t->n_tokens > 1 ? 1 : -1);
    t->eos = moei_vocab_id(&f, MOEI_VOCAB_EOS, scores && t->n_tokens > 2 ? 2 : -1);
    t->unknown = moei_vocab_id(&f, MOEI_VOCAB_UNKNOWN, scores ? 0 : -1);
    t->padding = moei_vocab_id(&f, MOEI_VOCAB_PADDING, -1);
    t->eot = moei_vocab_id(&f, MOEI_VOCAB_EOT, -1);
    t->add_bos = moei_vocab_flag(&f, MOEI_VOCAB_ADD_BOS, scores || t->whole) && t->bos >= 0;
    t->add_eos = moei_vocab_flag(&f, MOEI_VOCAB_ADD_EOS, 0) && t->eos >= 0;
    if (scores && !moei_vocab_flag(&f, MOEI_VOCAB_ADD_SPACE, 1)) t->space = MOEI_SPACE_META;
    t->strip = t->space == MOEI_SPACE_EACH;
    if (moei_vocab_seek(&f, MOEI_VOCAB_ARCHITECTURE, MOEI_GGUF_STRING))
        moei_gguf_string(&f.g, t->architecture, sizeof t->architecture);
    if (moei_vocab_seek(&f, MOEI_VOCAB_CHAT, MOEI_GGUF_STRING) && moei_vocab_string(&f, &t->chat) > 0 &&
        moei_buffer_write(&t->chat, "", 1) != MOE_OK)
        f.g.status = moei_vocab_memory(v);
    return f.g.status;
}

/* ---- from tokenizer.json ---- */

#define MOEI_VOCAB_JSON ((size_t)1 << 27) /* largest tokenizer.json in bytes */
enum { MOEI_VOCAB_PATTERN = 640 };

/* Published expressions; one that ends in * is compared up to there. */
typedef struct moei_pattern {
    const char *text;
    int pass;
} moei_pattern;

#define MOEI_RE_ENDING "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define MOEI_RE_WHITE "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define MOEI_RE_OPEN "[^\\r\\n\\p{L}\\p{N}]?"
#define MOEI_RE_SIGNS "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]"
#define MOEI_RE_TIKTOKEN "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|"
#define MOEI_RE_TIKTOKEN_SIGNS "| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"
#define MOEI_RE_UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define MOEI_RE_LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"

static const moei_pattern moei_patterns[] = {
    {"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+", MOEI_PASS_GPT2},
    {"'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+", MOEI_PASS_GPT2},
    {MOEI_RE_ENDING "|" MOEI_RE_OPEN "\\p{L}+|\\p{N}" MOEI_RE_SIGNS "*|" MOEI_RE_WHITE, MOEI_PASS_QWEN2},
    {MOEI_RE_ENDING "|" MOEI_RE_OPEN "\\p{L}+|\\p{N}{1,3}" MOEI_RE_SIGNS "*|" MOEI_RE_WHITE, MOEI_PASS_LLAMA3},
    {MOEI_RE_TIKTOKEN "\\p{N}" MOEI_RE_TIKTOKEN_SIGNS, MOEI_PASS_QWEN2},
    {MOEI_RE_TIKTOKEN "\\p{N}{1,3}" MOEI_RE_TIKTOKEN_SIGNS, MOEI_PASS_LLAMA3},
    {MOEI_RE_OPEN MOEI_RE_UPPER "*" MOEI_RE_LOWER "+" MOEI_RE_ENDING "?|" MOEI_RE_OPEN MOEI_RE_UPPER "+" MOEI_RE_LOWER
     "*" MOEI_RE_ENDING "?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" MOEI_RE_WHITE, MOEI_PASS_GPT4O},
    {MOEI_RE_OPEN MOEI_RE_UPPER "*" MOEI_RE_LOWER "+|" MOEI_RE_OPEN MOEI_RE_UPPER "+" MOEI_RE_LOWER
     "*|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" MOEI_RE_WHITE, MOEI_PASS_TEKKEN},
    {"[\\p{Han}]+|*", MOEI_PASS_KIMI},
    {"[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^*", MOEI_PASS_DEEPSEEK},
    {"\\p{N}{1,3}", MOEI_PASS_DIGITS_3},
    {"\\p{N}+", MOEI_PASS_DIGITS},
    {"\\p{N}", MOEI_PASS_DIGIT},
    {"[0-9][0-9][0-9]", MOEI_PASS_THREE},
    {"[\xE4\xB8\x80-\xE9\xBE\xA5\xE3\x81\x80-\xE3\x82\x9F\xE3\x82\xA0-\xE3\x83\xBF]+", MOEI_PASS_KANA},
    {"[\xE4\xB8\x80-\xE9\xBE\xA5\xE0\xA0\x80-\xE4\xB8\x80\xEA\xB0\x80-\xED\x9F\xBF]+", MOEI_PASS_EAST},
    {"[\r\n]", MOEI_PASS_LINE},
    {"[\\r\\n]", MOEI_PASS_LINE},
    {"\\s?[A-Za-z\xC2\xB5*", MOEI_PASS_CASED},
    {"\\s?[!-/:-~*", MOEI_PASS_MARKS},
    {"\\s+$", MOEI_PASS_TRAIL},
    {"\\s?\\p{L}+", MOEI_PASS_LETTERS},
    {"\\s?\\p{P}+", MOEI_PASS_POINTS}};

static int moei_pattern_find(const char *text) {
    size_t i;
    for (i = 0; i < sizeof moei_patterns / sizeof *moei_patterns; i++) {
        const char *p = moei_patterns[i].text;
        const size_t n = moei_strlen(p);
        if (moei_strcmp(p, text) == 0) return moei_patterns[i].pass;
        if (p[n - 1] == '*' && p[n - 2] != ']' && moei_strlen(text) >= n && moei_memcmp(p, text, n - 1) == 0)
            return moei_patterns[i].pass;
    }
    return MOEI_PASS_NONE;
}

/* Whether a member of an object is true; `otherwise` if it is absent or null. */
static int moei_vocab_true(const moe_buffer *text, size_t at, const char *key, int otherwise) {
    at = moei_import_json_member(text, at, key);
    return at == 0 || text->data[at] == 'n' ? otherwise : text->data[at] == 't';
}

/* Copies a member that is a string, truncated; 0: there is none. */
static int moei_vocab_text(const moe_buffer *text, size_t at, const char *key, char *to, size_t room) {
    moei_json j;
    moei_span s;
    to[0] = '\0';
    at = moei_import_json_member(text, at, key);
    j = moei_import_json_at(text, at, NULL);
    if (at == 0 || moei_json_string(&j, &s) != MOE_OK) return 0;
    moei_import_span(s, to, room);
    return 1;
}

/* Moves to the next element of an array; 0: its end. The text was checked. */
static int moei_vocab_item(moei_json *j, int first) {
    if (moei_json_peek(j) != (first ? '[' : ',')) return 0;
    j->at++;
    return moei_json_peek(j) != ']';
}

/* Calls f for the element, or for each of the list under `key` if the element is a "Sequence". */
static moe_status moei_vocab_each(moei_vocab *v, size_t at, const char *key,
                                  moe_status (*f)(moei_vocab *v, size_t at, const char *type)) {
    const moe_buffer *text = &v->r.index;
    char type[MOEI_IMPORT_VALUE];
    moe_status status = MOE_OK;
    moei_json j;
    int first = 1;
    if (at == 0 || text->data[at] != '{') return MOE_OK;
    (void)moei_vocab_text(text, at, "type", type, sizeof type);
    if (moei_strcmp(type, "Sequence") != 0) return f(v, at, type);
    at = moei_import_json_member(text, at, key);
    if (at == 0) return MOE_OK;
    for (j = moei_import_json_at(text, at, NULL); status == MOE_OK && moei_vocab_item(&j, first); first = 0) {
        at = j.at;
        (void)moei_vocab_text(text, at, "type", type, sizeof type);
        status = f(v, at, type);
        (void)moei_config_skip(&j);
    }
    return status;
}

static moe_status moei_vocab_refuse(moei_vocab *v, const char *what, const char *value) {
    return moei_error(v->r.error, MOE_ERR_UNSUPPORTED, "%s: %s \"%s\" is not supported", v->file, what, value);
}

static moe_status moei_vocab_normalizer(moei_vocab *v, size_t at, const char *type) {
    moe_tokenizer *t = &v->t;
    char from[16], to[16];
    size_t pattern;
    if (moei_strcmp(type, "NFC") == 0) {
        t->wants_nfc = 1;
        return MOE_OK;
    }
    if (moei_strcmp(type, "Prepend") == 0 && moei_vocab_text(&v->r.index, at, "prepend", to, sizeof to) &&
        moei_strcmp(to, "\xE2\x96\x81") == 0) {
        t->space = MOEI_SPACE_EACH;
        return MOE_OK;
    }
    pattern = moei_import_json_member(&v->r.index, at, "pattern");
    if (moei_strcmp(type, "Replace") == 0 && pattern > 0 &&
        moei_vocab_text(&v->r.index, pattern, "String", from, sizeof from) && moei_strcmp(from, " ") == 0 &&
        moei_vocab_text(&v->r.index, at, "content", to, sizeof to) && moei_strcmp(to, "\xE2\x96\x81") == 0) {
        if (t->space == MOEI_SPACE_KEPT) t->space = MOEI_SPACE_META;
        return MOE_OK;
    }
    return moei_vocab_refuse(v, "normalizer", type);
}

static moe_status moei_vocab_pass(moei_vocab *v, int pass) {
    moe_tokenizer *t = &v->t;
    if (t->n_passes == (int)sizeof t->passes) return moei_vocab_refuse(v, "pre_tokenizer", "more than 8 steps");
    t->passes[t->n_passes++] = (unsigned char)pass;
    return MOE_OK;
}

static moe_status moei_vocab_meta(moei_vocab *v, size_t at) {
    const moe_buffer *text = &v->r.index;
    char scheme[MOEI_IMPORT_VALUE];
    int add = moei_vocab_true(text, at, "add_prefix_space", 1);
    if (moei_vocab_text(text, at, "replacement", scheme, sizeof scheme) && moei_strcmp(scheme, "\xE2\x96\x81") != 0)
        return moei_vocab_refuse(v, "pre_tokenizer Metaspace with replacement", scheme);
    v->t.space = MOEI_SPACE_UNLESS;
    if (moei_vocab_text(text, at, "prepend_scheme", scheme, sizeof scheme)) {
        add = moei_strcmp(scheme, "never") != 0;
        if (moei_strcmp(scheme, "first") == 0) v->t.space = MOEI_SPACE_FIRST;
    }
    if (!add) v->t.space = MOEI_SPACE_META;
    return moei_vocab_true(text, at, "split", 1) ? moei_vocab_pass(v, MOEI_PASS_META) : MOE_OK;
}

static moe_status moei_vocab_pre(moei_vocab *v, size_t at, const char *type) {
    const moe_buffer *text = &v->r.index;
    char pattern[MOEI_VOCAB_PATTERN], behavior[MOEI_IMPORT_VALUE];
    size_t inner;
    int pass;
    if (moei_strcmp(type, "ByteLevel") == 0) {
        v->t.kind = MOE_TOKENIZER_BYTES;
        if (moei_vocab_true(text, at, "add_prefix_space", 1))
            return moei_vocab_refuse(v, "pre_tokenizer ByteLevel with", "add_prefix_space");
        return moei_vocab_true(text, at, "use_regex", 1) ? moei_vocab_pass(v, MOEI_PASS_GPT2) : MOE_OK;
    }
    if (moei_strcmp(type, "Digits") == 0)
        return moei_vocab_pass(v, moei_vocab_true(text, at, "individual_digits", 0) ? (int)MOEI_PASS_DIGIT
                                                                                    : (int)MOEI_PASS_DIGITS);
    if (moei_strcmp(type, "Metaspace") == 0) return moei_vocab_meta(v, at);
    if (moei_strcmp(type, "Split") != 0) return moei_vocab_refuse(v, "pre_tokenizer", type);
    (void)moei_vocab_text(text, at, "behavior", behavior, sizeof behavior);
    if (moei_strcmp(behavior, "Isolated") != 0 &&
        (moei_strcmp(behavior, "Removed") != 0 || !moei_vocab_true(text, at, "invert", 0)))
        return moei_vocab_refuse(v, "pre_tokenizer Split with behavior", behavior);
    inner = moei_import_json_member(text, at, "pattern");
    pattern[0] = '\0';
    if (inner > 0 && text->data[inner] == '{') (void)moei_vocab_text(text, inner, "Regex", pattern, sizeof pattern);
    pass = moei_pattern_find(pattern);
    return pass != MOEI_PASS_NONE ? moei_vocab_pass(v, pass) : moei_vocab_refuse(v, "the expression", pattern);
}

/* The special tokens around a text. */
static moe_status moei_vocab_post(moei_vocab *v, size_t at, const char *type) {
    const moe_buffer *text = &v->r.index;
    moei_json j;
    int first = 1, behind = 0;
    if (moei_strcmp(type, "ByteLevel") == 0) return MOE_OK; /* concerns offsets alone */
    if (moei_strcmp(type, "TemplateProcessing") != 0) return moei_vocab_refuse(v, "post_processor", type);
    at = moei_import_json_member(text, at, "single");
    if (at == 0) return MOE_OK;
    for (j = moei_import_json_at(text, at, NULL); moei_vocab_item(&j, first); first = 0) {
        char name[MOEI_IMPORT_NAME];
        const size_t special = text->data[j.at] == '{' ? moei_import_json_member(text, j.at, "SpecialToken") : 0;
        if (special > 0 && text->data[special] == '{' && moei_vocab_text(text, special, "id", name, sizeof name)) {
            const int32_t id = moei_token_find(&v->t, name);
            int *const adds = behind ? &v->t.add_eos : &v->t.add_bos;
            if (id >= 0 && *adds) return moei_vocab_refuse(v, "post_processor: a further token", name);
            if (id >= 0) *(behind ? &v->t.eos : &v->t.bos) = id;
            if (id >= 0) *adds = 1;
        } else behind = 1;
        (void)moei_config_skip(&j);
    }
    return MOE_OK;
}

static moe_status moei_vocab_set(moei_vocab *v, size_t id, moei_span s, int kind, float score) {
    moei_chars chars = moei_chars_of(s);
    moe_buffer *texts = &v->t.texts;
    moei_symbol *symbol = moei_symbols(&v->t) + id;
    int c;
    if (texts->size + moei_span_length(s) > 0x7fffffffu)
        return moei_error(v->r.error, MOE_ERR_OVERFLOW, "%s: the texts of the tokens have 2 GiB or more", v->file);
    if (moei_buffer_reserve(texts, moei_span_length(s) + 1) != MOE_OK) return moei_vocab_memory(v);
    symbol->at = (uint32_t)texts->size;
    while ((c = moei_chars_next(&chars)) >= 0) texts->data[texts->size++] = (unsigned char)c;
    symbol->size = (uint32_t)texts->size - symbol->at;
    symbol->kind = (unsigned char)kind;
    symbol->score = score;
    if (symbol->size > v->t.longest) v->t.longest = symbol->size;
    return MOE_OK;
}

typedef struct moei_vocab_entry {
    moei_span text;
    size_t id;
    moe_real score;
    int kind;
} moei_vocab_entry;

/* Reads the next entry: of BPE (form 'b') "text": id, of Unigram ["text", score]; 0: the end, or an
   error. */
static int moei_vocab_entry_next(moei_json *j, int form, int first, moei_vocab_entry *e, moe_status *status) {
    moei_span number;
    int more = 0;
    if (form == 'b') {
        *status = moei_json_key(j, first, &e->text, &more);
        if (!more) return 0;
        *status = moei_json_size(j, &e->id);
        return *status == MOE_OK;
    }
    if (!moei_vocab_item(j, first)) return 0;
    e->id += !first;
    *status = moei_json_take(j, '[');
    if (*status == MOE_OK) *status = moei_json_string(j, &e->text);
    if (*status == MOE_OK) *status = moei_json_take(j, ',');
    if (*status != MOE_OK) return 0;
    number = moei_config_word(j);
    if (!moei_parse_real((const char *)number.p, moei_span_length(number), &e->score))
        *status = moei_json_refuse(j, j->at, MOE_ERR_FORMAT, "a score is expected");
    else *status = moei_json_take(j, ']');
    return *status == MOE_OK;
}

/* The same for added_tokens. */
static int moei_vocab_added_next(const moe_buffer *text, moei_json *j, int first, moei_vocab_entry *e,
                                 moe_status *status) {
    moei_json inner;
    size_t id, content;
    if (!moei_vocab_item(j, first)) return 0;
    id = j->at < j->end && text->data[j->at] == '{' ? moei_import_json_member(text, j->at, "id") : 0;
    content = id > 0 ? moei_import_json_member(text, j->at, "content") : 0;
    if (content == 0) {
        *status = moei_json_refuse(j, j->at, MOE_ERR_FORMAT, "an added token needs id and content");
        return 0;
    }
    if (moei_vocab_true(text, j->at, "single_word", 0)) {
        *status = moei_json_refuse(j, j->at, MOE_ERR_UNSUPPORTED, "an added token with single_word is not supported");
        return 0;
    }
    e->kind = moei_vocab_true(text, j->at, "special", 0) ? MOEI_TOKEN_CONTROL : MOEI_TOKEN_USER;
    if (moei_vocab_true(text, j->at, "lstrip", 0)) e->kind |= MOEI_SPECIAL_LEFT;
    if (moei_vocab_true(text, j->at, "rstrip", 0)) e->kind |= MOEI_SPECIAL_RIGHT;
    inner = moei_import_json_at(text, id, j->error);
    *status = moei_json_size(&inner, &e->id);
    inner.at = content;
    if (*status == MOE_OK) *status = moei_json_string(&inner, &e->text);
    (void)moei_config_skip(j);
    return *status == MOE_OK;
}

/* Walks over the vocabulary at `at` (form 'b' or 'u'; 'a': added_tokens). set = 0: counts entries
   and finds the highest id; 1: sets the texts. */
static moe_status moei_vocab_entries(moei_vocab *v, size_t at, int form, int set, size_t *count, size_t *highest) {
    const moe_buffer *text = &v->r.index;
    moei_vocab_entry e;
    moe_error why;
    moei_json j = moei_import_json_at(text, at, &why);
    moe_status status = MOE_OK;
    int first = 1;
    memset(&e, 0, sizeof e);
    e.kind = MOEI_TOKEN_NORMAL;
    why.message[0] = '\0';
    if (at == 0) return MOE_OK;
    if (form == 'b') status = moei_json_take(&j, '{');
    for (; status == MOE_OK; first = 0) {
        if (!(form == 'a' ? moei_vocab_added_next(text, &j, first, &e, &status)
                          : moei_vocab_entry_next(&j, form, first, &e, &status)))
            break;
        ++*count;
        if (e.id > *highest) *highest = e.id;
        if (set) status = moei_vocab_set(v, e.id, e.text, e.kind, (float)e.score);
        else if (*highest >= MOEI_SYMBOL_MOST) break;
    }
    return status == MOE_OK || why.message[0] == '\0'
               ? status
               : moei_error(v->r.error, status, "%s, %s", v->file, why.message);
}

/* Reads the tokens. A vocabulary may skip ids, but not most of them. */
static moe_status moei_vocab_json_tokens(moei_vocab *v, size_t vocab, int form, size_t added) {
    moe_tokenizer *t = &v->t;
    size_t count = 0, highest = 0, bytes, i;
    moe_status status = moei_vocab_entries(v, vocab, form, 0, &count, &highest);
    if (status == MOE_OK) status = moei_vocab_entries(v, added, 'a', 0, &count, &highest);
    if (status != MOE_OK) return status;
    if (count == 0) return moei_error(v->r.error, MOE_ERR_NOT_FOUND, "%s: has no vocabulary", v->file);
    if (highest >= MOEI_SYMBOL_MOST || highest > 2 * count + 65536)
        return moei_error(v->r.error, highest >= MOEI_SYMBOL_MOST ? MOE_ERR_UNSUPPORTED : MOE_ERR_FORMAT,
                          "%s: token id %z of %z tokens is too large", v->file, highest, count);
    bytes = (highest + 1) * sizeof(moei_symbol);
    if (moei_buffer_reserve(&t->symbols, bytes) != MOE_OK) return moei_vocab_memory(v);
    memset(t->symbols.data, 0, bytes);
    t->symbols.size = bytes;
    t->n_tokens = (int32_t)highest + 1;
    t->n_symbols = (uint32_t)t->n_tokens;
    for (i = 0; i <= highest; i++) moei_symbols(t)[i].kind = MOEI_TOKEN_UNUSED;
    status = moei_vocab_entries(v, vocab, form, 1, &count, &highest);
    for (i = 0; i <= highest && status == MOE_OK; i++)
        if (moei_symbols(t)[i].score < t->lowest) t->lowest = moei_symbols(t)[i].score;
    if (status == MOE_OK) status = moei_vocab_entries(v, added, 'a', 1, &count, &highest);
    return status == MOE_OK ? moei_vocab_index(v) : status;
}

static moe_status moei_vocab_unescape(moei_vocab *v, moei_json *j, moe_buffer *to) {
    moei_span s;
    moei_chars chars;
    int c;
    moe_status status = moei_json_string(j, &s);
    if (status != MOE_OK) return status;
    if (moei_buffer_reserve(to, moei_span_length(s) + 1) != MOE_OK) return moei_vocab_memory(v);
    for (chars = moei_chars_of(s); (c = moei_chars_next(&chars)) >= 0;) to->data[to->size++] = (unsigned char)c;
    return MOE_OK;
}

/* Merges as "a b" or as ["a", "b"]. */
static moe_status moei_vocab_json_merges(moei_vocab *v, size_t at) {
    moe_buffer text;
    moei_json j = moei_import_json_at(&v->r.index, at, NULL);
    moe_status status = MOE_OK;
    int first = 1;
    memset(&text, 0, sizeof text);
    text.allocator = v->r.allocator;
    for (; at > 0 && status == MOE_OK && moei_vocab_item(&j, first); first = 0) {
        size_t left = 1;
        text.size = 0;
        if (v->t.merges.size / sizeof(moei_merge) == MOEI_MERGE_MOST)
            status = moei_vocab_refuse(v, "a list of merges with", "more than 8388608 pairs");
        else if (moei_json_peek(&j) == '[') {
            j.at++;
            status = moei_vocab_unescape(v, &j, &text);
            left = text.size;
            if (status == MOE_OK) status = moei_json_take(&j, ',');
            if (status == MOE_OK) status = moei_vocab_unescape(v, &j, &text);
            if (status == MOE_OK) status = moei_json_take(&j, ']');
        } else {
            status = moei_vocab_unescape(v, &j, &text);
            while (status == MOE_OK && left < text.size && text.data[left] != ' ') left++;
            if (left < text.size) memmove(text.data + left, text.data + left + 1, --text.size - left);
        }
        if (status == MOE_OK) status = moei_merge_add(v, text.data, left, text.size > left ? text.size - left : 0);
        else if (v->r.error->message[0] == '\0')
            status = moei_error(v->r.error, status, "%s: byte %z: a merge is not a pair of strings", v->file, j.at);
    }
    moe_buffer_free(&text);
    return status == MOE_OK ? moei_vocab_pairs(v) : status;
}

/* Opens another file of the folder as JSON; a missing one leaves the text empty. */
static moe_status moei_vocab_open(moei_vocab *v, const char *name, size_t most, moe_buffer *text) {
    moei_import_shard *file;
    moe_status status = moei_import_shard_open(&v->r, name, &file);
    if (status == MOE_ERR_NOT_FOUND) return MOE_OK;
    return status == MOE_OK ? moei_import_json_open(&v->r, file, most, text) : status;
}

/* A token of tokenizer_config.json: its text, or an object with "content". */
static void moei_vocab_named(const moei_vocab *v, const moe_buffer *text, const char *key, int32_t *id) {
    char name[MOEI_IMPORT_NAME];
    const size_t at = moei_import_json_member(text, 0, key);
    int32_t found = -1;
    if (at == 0) return;
    if (moei_vocab_text(text, 0, key, name, sizeof name) ||
        (text->data[at] == '{' && moei_vocab_text(text, at, "content", name, sizeof name)))
        found = moei_token_find(&v->t, name);
    if (found >= 0) *id = found;
}

/* An id of config.json: a number, or the first of a list. */
static void moei_vocab_numbered(const moei_vocab *v, const moe_buffer *text, const char *key, int32_t *id) {
    size_t at = moei_import_json_member(text, 0, key), value;
    moei_json j;
    if (at == 0 || *id >= 0) return;
    j = moei_import_json_at(text, at, NULL);
    if (moei_json_peek(&j) == '[') j.at++;
    if (moei_json_size(&j, &value) == MOE_OK && value < (size_t)v->t.n_tokens) *id = (int32_t)value;
}

/* The chat template: a text, or the one of a list that is called "default". */
static moe_status moei_vocab_chat(moei_vocab *v, const moe_buffer *text) {
    size_t at = moei_import_json_member(text, 0, "chat_template");
    moei_json j = moei_import_json_at(text, at, NULL);
    char name[MOEI_IMPORT_VALUE];
    int first = 1;
    moe_status status = MOE_OK;
    if (at > 0 && text->data[at] == '[') {
        for (at = 0; at == 0 && moei_vocab_item(&j, first) && text->data[j.at] == '{'; first = 0) {
            if (moei_vocab_text(text, j.at, "name", name, sizeof name) && moei_strcmp(name, "default") == 0)
                at = moei_import_json_member(text, j.at, "template");
            (void)moei_config_skip(&j);
        }
        j.at = at;
    }
    if (at == 0 || text->data[at] != '"') return MOE_OK;
    status = moei_vocab_unescape(v, &j, &v->t.chat);
    if (status == MOE_OK && moei_buffer_write(&v->t.chat, "", 1) != MOE_OK) status = moei_vocab_memory(v);
    return status;
}

/* Reads tokenizer_config.json and config.json beside tokenizer.json. */
static moe_status moei_vocab_beside(moei_vocab *v) {
    moe_tokenizer *t = &v->t;
    moe_buffer config;
    moe_status status;
    memset(&config, 0, sizeof config);
    config.allocator = v->r.allocator;
    status = moei_vocab_open(v, "tokenizer_config.json", MOEI_VOCAB_JSON, &config);
    if (status == MOE_OK && config.size > 0) {
        moei_vocab_named(v, &config, "bos_token", &t->bos);
        moei_vocab_named(v, &config, "eos_token", &t->eos);
        moei_vocab_named(v, &config, "pad_token", &t->padding);
        moei_vocab_named(v, &config, "unk_token", &t->unknown);
        t->add_bos = moei_vocab_true(&config, 0, "add_bos_token", t->add_bos);
        t->add_eos = moei_vocab_true(&config, 0, "add_eos_token", t->add_eos);
        status = moei_vocab_chat(v, &config);
    }
    moe_buffer_free(&config);
    if (status == MOE_OK) status = moei_vocab_open(v, "config.json", MOEI_IMPORT_CONFIG, &v->r.config);
    if (status == MOE_OK && v->r.config.size > 0) {
        moei_vocab_numbered(v, &v->r.config, "bos_token_id", &t->bos);
        moei_vocab_numbered(v, &v->r.config, "eos_token_id", &t->eos);
        (void)moei_vocab_text(&v->r.config, 0, "model_type", t->architecture, sizeof t->architecture);
    }
    t->add_bos = t->add_bos && t->bos >= 0;
    t->add_eos = t->add_eos && t->eos >= 0;
    return status;
}

/* Kind and vocabulary; model is the offset of "model". */
static moe_status moei_vocab_json_model(moei_vocab *v, size_t model) {
    const moe_buffer *text = &v->r.index;
    moe_tokenizer *t = &v->t;
    const size_t vocab = moei_import_json_member(text, model, "vocab");
    const size_t unknown = moei_import_json_member(text, model, "unk_id");
    const size_t merges = moei_import_json_member(text, model, "merges");
    char type[MOEI_IMPORT_NAME];
    int unigram;
    moe_status status;
    (void)moei_vocab_text(text, model, "type", type, sizeof type);
    unigram = moei_strcmp(type, "Unigram") == 0;
    if (unigram) t->kind = MOE_TOKENIZER_UNIGRAM;
    else if (type[0] != '\0' && moei_strcmp(type, "BPE") != 0) return moei_vocab_refuse(v, "model type", type);
    if (moei_vocab_text(text, model, "continuing_subword_prefix", type, sizeof type) && type[0] != '\0')
        return moei_vocab_refuse(v, "continuing_subword_prefix", type);
    if (moei_vocab_text(text, model, "end_of_word_suffix", type, sizeof type) && type[0] != '\0')
        return moei_vocab_refuse(v, "end_of_word_suffix", type);
    v->byte_fallback = moei_vocab_true(text, model, "byte_fallback", 0);
    t->whole = !unigram && moei_vocab_true(text, model, "ignore_merges", 0);
    t->fuse = moei_vocab_true(text, model, "fuse_unk", 0);
    status = moei_vocab_json_tokens(v, vocab, unigram ? 'u' : 'b', moei_import_json_member(text, 0, "added_tokens"));
    if (status != MOE_OK) return status;
    if (unigram && t->longest > 256) return moei_vocab_refuse(v, "Unigram with a token of", "more than 256 bytes");
    if (moei_vocab_text(text, model, "unk_token", type, sizeof type)) t->unknown = moei_token_find(t, type);
    if (unknown > 0) {
        moei_json j = moei_import_json_at(text, unknown, NULL);
        size_t id;
        if (moei_json_size(&j, &id) == MOE_OK && id < (size_t)t->n_tokens) t->unknown = (int32_t)id;
    }
    if (!unigram && merges == 0) return moei_error(v->r.error, MOE_ERR_FORMAT, "%s: the model has no merges", v->file);
    return unigram ? MOE_OK : moei_vocab_json_merges(v, merges);
}

static moe_status moei_vocab_json_read(moei_vocab *v, const moei_import_shard *file) {
    const moe_buffer *text = &v->r.index;
    moe_status status = moei_import_json_open(&v->r, file, MOEI_VOCAB_JSON, &v->r.index);
    size_t model;
    if (status != MOE_OK) return status;
    model = moei_import_json_member(text, 0, "model");
    if (model == 0 || text->data[model] != '{')
        return moei_error(v->r.error, MOE_ERR_NOT_FOUND, "%s: has no vocabulary", v->file);
    v->t.kind = MOE_TOKENIZER_RANKS;
    status = moei_vocab_each(v, moei_import_json_member(text, 0, "normalizer"), "normalizers", moei_vocab_normalizer);
    if (status == MOE_OK)
        status = moei_vocab_each(v, moei_import_json_member(text, 0, "pre_tokenizer"), "pretokenizers", moei_vocab_pre);
    if (status == MOE_OK) status = moei_vocab_json_model(v, model);
    if (status == MOE_OK)
        status = moei_vocab_each(v, moei_import_json_member(text, 0, "post_processor"), "processors", moei_vocab_post);
    v->t.strip = v->t.space > MOEI_SPACE_META;
    return status == MOE_OK ? moei_vocab_beside(v) : status;
}

/* ---- encoding ---- */

/* A part of a word while it is merged. */
typedef struct moei_part {
    uint32_t symbol;     /* MOEI_NO_SYMBOL: a text without an id */
    uint32_t at, size;   /* in the word; size 0: merged into another */
    uint32_t prev, next; /* MOEI_NO_SYMBOL: none */
} moei_part;

/* A pair of neighbors that can merge. */
typedef struct moei_bigram {
    uint32_t rank, at; /* rank of the merge, index of the left part */
    uint32_t left, right, result;
} moei_bigram;

typedef struct moei_encoder {
    const moe_tokenizer *t;
    int32_t *ids;
    size_t room, n;
    moe_status status;
    const unsigned char *word;     /* being merged */
    moe_buffer parts, heap, text;
    int begun;                     /* some text was encoded */
} moei_encoder;

static void moei_encode_push(moei_encoder *e, int32_t id) {
    if (e->n < e->room) e->ids[e->n] = id;
    e->n++;
}

/* Order of merging. */
static int moei_bigram_before(const moei_bigram *a, const moei_bigram *b) {
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

static void moei_bigram_push(moei_encoder *e, const moei_bigram *pair) {
    moei_bigram *heap;
    size_t at = e->heap.size / sizeof *heap;
    e->status = moei_buffer_write(&e->heap, pair, sizeof *pair);
    if (e->status != MOE_OK) return;
    heap = (moei_bigram *)(void *)e->heap.data;
    for (; at > 0 && moei_bigram_before(pair, heap + (at - 1) / 2); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = *pair;
}

static moei_bigram moei_bigram_pop(moei_encoder *e) {
    moei_bigram *heap = (moei_bigram *)(void *)e->heap.data;
    const moei_bigram first = heap[0], last = heap[e->heap.size / sizeof *heap - 1];
    const size_t n = e->heap.size / sizeof *heap - 1;
    size_t at = 0, child;
    e->heap.size -= sizeof *heap;
    for (; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && moei_bigram_before(heap + child + 1, heap + child)) child++;
        if (!moei_bigram_before(heap + child, &last)) break;
        heap[at] = heap[child];
    }
    if (n > 0) heap[at] = last;
    return first;
}

/* A rank that is lower for a higher score. */
static uint32_t moei_score_rank(float score) {
    uint32_t bits;
    memcpy(&bits, &score, sizeof bits);
    return (bits >> 31) != 0 ? bits : 0x7fffffffu - bits;
}

/* Adds the pair of a part and the next one, if these merge. */
static void moei_encode_pair(moei_encoder *e, uint32_t at) {
    const moe_tokenizer *t = e->t;
    const moei_part *parts = (const moei_part *)(const void *)e->parts.data, *a = parts + at, *b;
    moei_bigram pair;
    if (a->next == MOEI_NO_SYMBOL || e->status != MOE_OK) return;
    b = parts + a->next;
    pair.at = at;
    pair.left = a->symbol;
    pair.right = b->symbol;
    if (t->kind == MOE_TOKENIZER_SCORES) {
        pair.result = moei_symbol_find(t, e->word + a->at, (size_t)a->size + b->size);
        if (pair.result == MOEI_NO_SYMBOL) return;
        pair.rank = moei_score_rank(moei_symbols(t)[pair.result].score);
    } else {
        moei_probe probe;
        if (a->symbol == MOEI_NO_SYMBOL || b->symbol == MOEI_NO_SYMBOL) return;
        probe = moei_pair_probe(t, a->symbol, b->symbol);
        pair.rank = probe.left > 0 ? moei_probe_value(&probe) : MOEI_NO_SYMBOL;
        if (pair.rank == MOEI_NO_SYMBOL) return;
        pair.result = ((const moei_merge *)(const void *)t->merges.data)[pair.rank].result;
    }
    moei_bigram_push(e, &pair);
}

/* The ids of a part that is not a token: its bytes, or the unknown token, which with `fuse` is left
   out after another one. Returns whether it is the unknown token. */
static int moei_encode_unknown(moei_encoder *e, const moei_part *part, int fuse) {
    const moe_tokenizer *t = e->t;
    uint32_t i, known = 0;
    for (i = 0; i < part->size; i++) known += t->bytes[e->word[part->at + i]] >= 0;
    if (t->kind == MOE_TOKENIZER_BYTES ? part->size > 1 && known > 0 : known == part->size) {
        for (i = 0; i < part->size; i++) {
            const int32_t id = t->bytes[e->word[part->at + i]];
            if (id >= 0 && id < t->n_tokens) moei_encode_push(e, id);
            else if (t->unknown >= 0) moei_encode_push(e, t->unknown);
        }
        return 0;
    }
    if (t->unknown >= 0 && !fuse) moei_encode_push(e, t->unknown);
    return 1;
}

/* Splits a word into its bytes or characters. */
static void moei_encode_split(moei_encoder *e, size_t size) {
    const moe_tokenizer *t = e->t;
    const char *word = (const char *)e->word;
    size_t at = 0;
    uint32_t n = 0;
    e->parts.size = e->heap.size = 0;
    while (at < size && e->status == MOE_OK) {
        moei_part part;
        part.at = (uint32_t)at;
        if (t->kind == MOE_TOKENIZER_BYTES) {
            part.size = 1;
            part.symbol = (uint32_t)t->bytes[e->word[at]]; /* -1 is MOEI_NO_SYMBOL */
        } else {
            part.size = (uint32_t)moei_rune_at(word + at, word + size).size;
            part.symbol = moei_symbol_find(t, e->word + at, part.size);
        }
        at += part.size;
        part.prev = n - 1u;
        part.next = at < size ? n + 1 : MOEI_NO_SYMBOL;
        n++;
        e->status = moei_buffer_write(&e->parts, &part, sizeof part);
    }
}

/* Merges a word and appends its ids. */
static void moei_encode_merge(moei_encoder *e, size_t size) {
    moei_part *parts;
    uint32_t i;
    int fuse = 0;
    moei_encode_split(e, size);
    parts = (moei_part *)(void *)e->parts.data;
    for (i = 0; i < e->parts.size / sizeof *parts; i++) moei_encode_pair(e, i);
    while (e->heap.size > 0 && e->status == MOE_OK) {
        const moei_bigram pair = moei_bigram_pop(e);
        moei_part *a = parts + pair.at, *b;
        if (a->size == 0 || a->next == MOEI_NO_SYMBOL || a->symbol != pair.left) continue;
        b = parts + a->next;
        if (b->symbol != pair.right) continue;
        a->symbol = pair.result;
        a->size += b->size;
        a->next = b->next;
        b->size = 0;
        if (a->next != MOEI_NO_SYMBOL) parts[a->next].prev = pair.at;
        if (a->prev != MOEI_NO_SYMBOL) moei_encode_pair(e, a->prev);
        moei_encode_pair(e, pair.at);
    }
    for (i = 0; e->status == MOE_OK && i != MOEI_NO_SYMBOL && e->parts.size > 0; i = parts[i].next)
        if (parts[i].symbol < (uint32_t)e->t->n_tokens) {
            moei_encode_push(e, (int32_t)parts[i].symbol);
            fuse = 0;
        } else fuse = moei_encode_unknown(e, parts + i, fuse) && e->t->fuse;
}

/* The best tokens up to a position in a text: their sum of scores, and the last of them. */
typedef struct moei_way {
    double sum;
    uint32_t size, symbol; /* MOEI_NO_SYMBOL: a character without a token */
} moei_way;

/* Traces the best tokens back, so that each position has the token that begins there, and appends
   the ids. Neighboring characters without a token are one unknown token. */
static void moei_encode_way(moei_encoder *e, moei_way *ways, size_t size) {
    moei_way way = ways[size];
    moei_part part;
    size_t at = size;
    memset(&part, 0, sizeof part);
    while (at > 0) {
        const moei_way before = ways[at -= way.size];
        ways[at] = way;
        way = before;
    }
    for (; at < size; at += way.size) {
        way = ways[at];
        if (way.symbol != MOEI_NO_SYMBOL) {
            moei_encode_push(e, (int32_t)way.symbol);
            continue;
        }
        part.at = (uint32_t)at;
        part.size = way.size;
        while (at + way.size < size && ways[at + way.size].symbol == MOEI_NO_SYMBOL) {
            at += way.size;
            way = ways[at];
            part.size += way.size;
        }
        (void)moei_encode_unknown(e, &part, 0);
    }
}

/* The tokens of a text with the highest sum of scores. An unknown character scores 10 less than the
   lowest score, as in SentencePiece. */
static void moei_encode_unigram(moei_encoder *e, size_t size) {
    const moe_tokenizer *t = e->t;
    const char *word = (const char *)e->word, *end = word + size;
    moei_way *ways;
    size_t at, n;
    e->parts.size = 0;
    e->status = moei_buffer_reserve(&e->parts, (size + 1) * sizeof *ways);
    if (e->status != MOE_OK) return;
    ways = (moei_way *)(void *)e->parts.data;
    memset(ways, 0, (size + 1) * sizeof *ways);
    for (at = 0; at < size; at += moei_rune_at(word + at, end).size) {
        const size_t first = moei_rune_at(word + at, end).size;
        for (n = first; n <= (t->longest > first ? t->longest : first);) {
            const uint32_t id = moei_symbol_find(t, e->word + at, n);
            const int known = id < (uint32_t)t->n_tokens && (moei_symbols(t)[id].kind & 15) == MOEI_TOKEN_NORMAL;
            const double sum = ways[at].sum + (known ? (double)moei_symbols(t)[id].score : (double)t->lowest - 10);
            moei_way *way = ways + at + n;
            if ((known || n == first) && (way->size == 0 || sum > way->sum)) {
                way->sum = sum;
                way->size = (uint32_t)n;
                way->symbol = known ? id : MOEI_NO_SYMBOL;
            }
            if (at + n == size) break;
            n += moei_rune_at(word + at + n, end).size;
        }
    }
    moei_encode_way(e, ways, size);
}

static void moei_encode_word(moei_encoder *e, const char *word, size_t size) {
    const moe_tokenizer *t = e->t;
    unsigned char out[2];
    size_t i;
    e->word = (const unsigned char *)word;
    if (t->whole && e->status == MOE_OK) {
        uint32_t id;
        e->text.size = 0;
        for (i = 0; i < size && e->text.size <= t->longest && e->status == MOE_OK; i++) {
            const size_t n = t->kind == MOE_TOKENIZER_BYTES ? moei_byte_stand_in(e->word[i], out) : 1;
            e->status = moei_buffer_write(&e->text, t->kind == MOE_TOKENIZER_BYTES ? out : e->word + i, n);
        }
        id = moei_symbol_find(t, e->text.data, e->text.size);
        if (id < (uint32_t)t->n_tokens) {
            moei_encode_push(e, (int32_t)id);
            return;
        }
    }
    if (e->status != MOE_OK) return;
    if (t->kind == MOE_TOKENIZER_UNIGRAM) moei_encode_unigram(e, size);
    else moei_encode_merge(e, size);
}

/* Splits a text by the passes from `pass` on; each splits the pieces of the one before it. */
static void moei_encode_cut(moei_encoder *e, int pass, const char *p, const char *end) {
    const char *gap = p;
    if (p == end) return;
    if (pass == e->t->n_passes) {
        moei_encode_word(e, p, (size_t)(end - p));
        return;
    }
    while (p < end && e->status == MOE_OK) {
        const moei_cut_pass *cut = moei_passes + e->t->passes[pass];
        int taken;
        const size_t n = cut->match(cut, p, end, &taken);
        if (taken) {
            moei_encode_cut(e, pass + 1, gap, p);
            moei_encode_cut(e, pass + 1, p, p + n);
            gap = p + n;
        }
        p += n;
    }
    moei_encode_cut(e, pass + 1, gap, end);
}

/* Encodes text between special tokens. */
static void moei_encode_stretch(moei_encoder *e, const char *p, const char *end) {
    static const char meta[] = "\xE2\x96\x81";
    const int space = e->t->space, first = !e->begun;
    const int begins = p < end && (*p == ' ' || moei_rune_at(p, end).code == 0x2581u); /* with a space */
    moe_buffer text;
    if (p == end || e->status != MOE_OK) return;
    e->begun = 1;
    if (space == MOEI_SPACE_KEPT) {
        moei_encode_cut(e, 0, p, end);
        return;
    }
    memset(&text, 0, sizeof text);
    text.allocator = e->t->allocator;
    if (space == MOEI_SPACE_EACH || (!begins && (space == MOEI_SPACE_UNLESS || (space == MOEI_SPACE_FIRST && first))))
        e->status = moei_buffer_write(&text, meta, 3);
    for (; p < end && e->status == MOE_OK; p++)
        e->status = *p == ' ' ? moei_buffer_write(&text, meta, 3) : moei_buffer_write(&text, p, 1);
    if (e->status == MOE_OK) moei_encode_cut(e, 0, (const char *)text.data, (const char *)text.data + text.size);
    moe_buffer_free(&text);
}

/* The longest special token at p; MOEI_NO_SYMBOL: none. */
static uint32_t moei_special_at(const moe_tokenizer *t, const char *p, const char *end, int flags) {
    const uint32_t *ids = (const uint32_t *)(const void *)t->special.data;
    const int first = (unsigned char)*p;
    uint32_t i;
    for (i = t->n_special[first]; i < t->n_special[first + 1]; i++) {
        const moei_symbol *s = moei_symbols(t) + ids[i];
        if ((flags & MOE_TOKENIZER_SPECIAL) == 0 && (s->kind & 15) != MOEI_TOKEN_USER) continue;
        if (s->size <= (size_t)(end - p) && moei_memcmp(p, moei_symbol_text(t, ids[i]), s->size) == 0) return ids[i];
    }
    return MOEI_NO_SYMBOL;
}

/* The start of the white space that ends at p; all of it has at most 3 bytes a character. */
static const char *moei_white_before(const char *from, const char *p) {
    size_t n;
    for (n = 1; n <= 3 && n <= (size_t)(p - from); n++) {
        const moei_rune r = moei_rune_at(p - n, p);
        if (r.size != n || r.kind != MOEI_RUNE_SPACE) continue;
        p -= n;
        n = 0;
    }
    return p;
}

/* Encodes special tokens and the text between them. */
static void moei_encode_text(moei_encoder *e, const char *p, const char *end, int flags) {
    const moe_tokenizer *t = e->t;
    const char *from = p;
    while (p < end && e->status == MOE_OK) {
        const uint32_t id = moei_special_at(t, p, end, flags);
        const char *to = p;
        if (id == MOEI_NO_SYMBOL) {
            p++;
            continue;
        }
        if ((moei_symbols(t)[id].kind & MOEI_SPECIAL_LEFT) != 0) to = moei_white_before(from, p);
        moei_encode_stretch(e, from, to);
        moei_encode_push(e, (int32_t)id);
        p += moei_symbols(t)[id].size;
        if ((moei_symbols(t)[id].kind & MOEI_SPECIAL_RIGHT) != 0) p = moei_runes(p, end, MOEI_RUNE_SPACE, 0);
        e->begun = 1;
        from = p;
    }
    moei_encode_stretch(e, from, end);
}

moe_status moe_tokenizer_encode(const moe_tokenizer *t, const char *text, size_t size, int flags, int32_t *ids,
                                size_t room, size_t *n) {
    moei_encoder e;
    if (t == NULL || n == NULL || (text == NULL && size > 0) || (ids == NULL && room > 0)) return MOE_ERR_ARGUMENT;
    *n = 0;
    if (size >= (size_t)1 << 30) return MOE_ERR_OVERFLOW;
    memset(&e, 0, sizeof e);
    e.t = t;
    e.ids = ids;
    e.room = room;
    e.parts.allocator = e.heap.allocator = e.text.allocator = t->allocator;
    if ((flags & MOE_TOKENIZER_BOUNDS) != 0 && t->add_bos) moei_encode_push(&e, t->bos);
    if (size > 0) moei_encode_text(&e, text, text + size, flags);
    if ((flags & MOE_TOKENIZER_BOUNDS) != 0 && t->add_eos) moei_encode_push(&e, t->eos);
    moe_buffer_free(&e.parts);
    moe_buffer_free(&e.heap);
    moe_buffer_free(&e.text);
    *n = e.n;
    if (e.status != MOE_OK) return e.status;
    return e.n > room ? MOE_ERR_SPACE : MOE_OK;
}

/* ---- decoding ---- */

/* The number of bytes of a token, which out receives unless it is NULL. */
static size_t moei_decode_token(const moe_decoder *d, int32_t id, unsigned char *out) {
    const moe_tokenizer *t = d->tokenizer;
    const moei_symbol *s = moei_symbols(t) + id;
    const unsigned char *text = moei_symbol_text(t, (uint32_t)id);
    const char *begin = (const char *)text, *end = begin + s->size;
    const char *p = begin;
    const int kind = s->kind & 15, normal = kind == MOEI_TOKEN_NORMAL;
    size_t n = 0, size;
    if (kind == MOEI_TOKEN_UNUSED) return 0;
    if ((kind == MOEI_TOKEN_CONTROL || kind == MOEI_TOKEN_UNKNOWN) && (d->flags & MOE_TOKENIZER_SPECIAL) == 0) return 0;
    if (kind == MOEI_TOKEN_BYTE && s->size == 6 && moei_hex_digit(text[3]) >= 0 && moei_hex_digit(text[4]) >= 0) {
        if (out != NULL) out[0] = (unsigned char)(moei_hex_digit(text[3]) << 4 | moei_hex_digit(text[4]));
        return 1;
    }
    for (; p < end; p += size) {
        const moei_rune r = moei_rune_at(p, end);
        int byte = normal && t->kind == MOE_TOKENIZER_BYTES ? moei_byte_of(r.code) : -1;
        if (r.code == 0x2581u && normal && t->space != MOEI_SPACE_KEPT) byte = ' ';
        size = r.size;
        if (p == begin && normal && t->strip && !d->begun && (byte == ' ' || (byte < 0 && *p == ' '))) continue;
        if (byte >= 0 && out != NULL) out[n] = (unsigned char)byte;
        if (byte < 0 && out != NULL) memcpy(out + n, p, size);
        n += byte >= 0 ? 1 : size;
    }
    return n;
}

/* How many of the last bytes belong to an incomplete character, 0 to 3. The second byte may exclude
   one: overlong forms, surrogates, code points beyond U+10FFFF. */
static size_t moei_decode_open(const char *text, size_t n) {
    size_t back;
    for (back = 1; back <= 3 && back <= n; back++) {
        const unsigned char *p = (const unsigned char *)text + n - back;
        const unsigned second = back > 1 ? p[1] : *p == 0xE0 || *p == 0xF0 ? 0xBFu : 0x80u;
        const size_t wanted = *p < 0xC2 || *p > 0xF4 ? 1 : *p < 0xE0 ? 2 : *p < 0xF0 ? 3 : 4;
        if ((*p & 0xC0) == 0x80) continue;
        if ((*p == 0xE0 && second < 0xA0) || (*p == 0xED && second > 0x9F)) return 0;
        if ((*p == 0xF0 && second < 0x90) || (*p == 0xF4 && second > 0x8F)) return 0;
        return wanted > back ? back : 0;
    }
    return 0;
}

size_t moe_tokenizer_room(const moe_tokenizer *t) { return t != NULL ? (size_t)t->longest + 4 : 0; }

size_t moe_tokenizer_decode(moe_decoder *d, int32_t id, char *text, size_t room) {
    const moe_tokenizer *t = d != NULL ? d->tokenizer : NULL;
    size_t n, held, all;
    if (t == NULL || id >= t->n_tokens) return 0;
    n = (size_t)d->n_held;
    all = n + (id >= 0 ? moei_decode_token(d, id, NULL) : 0);
    if (all > room) return all;
    if (n > 0) memcpy(text, d->held, n); /* text may be NULL without room */
    if (id < 0) {
        d->n_held = d->begun = 0;
        return n;
    }
    if (all > n) (void)moei_decode_token(d, id, (unsigned char *)text + n);
    if (all > n || (moei_symbols(t)[id].kind & 15) == MOEI_TOKEN_NORMAL) d->begun = 1;
    held = moei_decode_open(text, all);
    if (held > 0) memcpy(d->held, text + all - held, held);
    d->n_held = (int)held;
    return all - held;
}

int32_t moe_tokenizer_find(const moe_tokenizer *t, const char *text) {
    return t != NULL && text != NULL ? moei_token_find(t, text) : -1;
}

int moe_tokenizer_is_end(const moe_tokenizer *t, int32_t id) {
    int i;
    if (t == NULL || id < 0 || id >= t->n_tokens) return 0;
    if (id == t->eos || id == t->eot) return 1;
    for (i = 0; i < MOEI_ENDS && (moei_symbols(t)[id].kind & 15) != MOEI_TOKEN_NORMAL; i++)
        if (moei_token_find(t, moei_ends[i]) == id) return 1;
    return 0;
}

void moe_tokenizer_free(moe_tokenizer *t) {
    if (t == NULL) return;
    moe_buffer_free(&t->texts);
    moe_buffer_free(&t->symbols);
    moe_buffer_free(&t->lookup);
    moe_buffer_free(&t->merges);
    moe_buffer_free(&t->pairs);
    moe_buffer_free(&t->special);
    moe_buffer_free(&t->chat);
    memset(t, 0, sizeof *t);
}

/* ---- loading ---- */

static moe_status moei_vocab_run(moe_tokenizer *t, const moei_import_folder *folder, const char *name,
                                 const moe_allocator *allocator, moe_error *error) {
    moei_vocab v;
    moe_error own;
    moei_import_shard *file;
    unsigned char begin[4] = {0, 0, 0, 0};
    moe_status status;
    if (!moei_can_allocate(allocator))
        return moei_error(error, MOE_ERR_ARGUMENT, "allocator is required with MOE_NO_MALLOC");
    memset(&v, 0, sizeof v);
    own.message[0] = '\0';
    v.r.folder = folder;
    v.r.error = &own;
    if (allocator != NULL) v.r.allocator = *allocator;
    v.t.allocator = v.r.allocator;
    v.t.texts.allocator = v.t.symbols.allocator = v.t.lookup.allocator = v.t.merges.allocator = v.r.allocator;
    v.t.pairs.allocator = v.t.special.allocator = v.t.chat.allocator = v.r.allocator;
    v.t.bos = v.t.eos = v.t.eot = v.t.unknown = v.t.padding = -1;
    status = moei_import_shard_open(&v.r, name, &file);
    if (status == MOE_OK) {
        v.r.first = file;
        v.file = file->shown;
        if (file->source.size >= sizeof begin) status = moei_import_read_at(&v.r, file, 0, begin, sizeof begin);
    }
    if (status == MOE_OK)
        status = moei_memcmp(begin, "GGUF", 4) == 0 ? moei_vocab_gguf_read(&v, file) : moei_vocab_json_read(&v, file);
    if (status == MOE_OK) status = moei_vocab_finish(&v);
    moei_importer_close(&v.r);
    moei_import_clean(own.message);
    if (status == MOE_OK) {
        *t = v.t;
        return MOE_OK;
    }
    moe_tokenizer_free(&v.t);
    return moei_error(error, status, "%s", own.message[0] != '\0' ? own.message : moe_status_text(status));
}

moe_status moe_import_read_tokenizer(moe_tokenizer *t, const moe_import_source *sources, size_t n_sources,
                                     const moe_allocator *allocator, moe_error *error) {
    moei_import_sources s;
    moei_import_folder folder = moei_import_sources_folder(&s);
    if (t == NULL || sources == NULL || n_sources == 0)
        return moei_error(error, MOE_ERR_ARGUMENT, "t or sources is NULL, or there are no sources");
    s.sources = sources;
    s.n = n_sources;
    return moei_vocab_run(t, &folder, sources[0].name != NULL ? sources[0].name : "the file", allocator, error);
}

#ifndef MOE_NO_STDIO
moe_status moe_import_tokenizer(moe_tokenizer *t, const char *path, const moe_allocator *allocator, moe_error *error) {
    static const char *const names[] = {"tokenizer.json", NULL};
    moei_import_disk disk;
    moei_import_folder folder;
    const char *name;
    moe_status status;
    if (t == NULL || path == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "t or path is NULL");
    status = moei_import_disk_begin(&disk, &folder, path, allocator, names, &name, error);
    return status == MOE_OK ? moei_vocab_run(t, &folder, name, allocator, error) : status;
}
#endif

/* ---- chat ---- */

#define MOEI_DEEP(word) "<\357\275\234" word "\357\275\234>" /* DeepSeek's bars are U+FF5C, its space U+2581 */
#define MOEI_CHATML "<|im_start|>"

/* Chat formats, from the authors' templates; those with more specific marks first. before and
   after: system, user, assistant. */
static const moe_chat moei_chats[] = {
    {"kimi", {"<|im_middle|>", NULL}, "kimi-k2", "",
     {"<|im_system|>system<|im_middle|>", "<|im_user|>user<|im_middle|>", "<|im_assistant|>assistant<|im_middle|>"},
     {"<|im_end|>", "<|im_end|>", "<|im_end|>"}, "<|im_assistant|>assistant<|im_middle|>", 0},
    {"chatml", {MOEI_CHATML, NULL}, "qwen2moe qwen2_moe qwen3moe qwen3_moe dbrx lfm2moe lfm2_moe", "",
     {MOEI_CHATML "system\n", MOEI_CHATML "user\n", MOEI_CHATML "assistant\n"},
     {"<|im_end|>\n", "<|im_end|>\n", "<|im_end|>\n"}, MOEI_CHATML "assistant\n", 0},
    {"mistral", {"[INST]", NULL}, "llama mixtral", "", {"[INST] ", "[INST] ", ""}, {"\n\n", " [/INST]", "</s>"}, "", 1},
    {"granite", {"<|start_of_role|>", NULL}, "granitemoe granitemoeshared", "",
     {"<|start_of_role|>system<|end_of_role|>", "<|start_of_role|>user<|end_of_role|>",
      "<|start_of_role|>assistant<|end_of_role|>"},
     {"<|end_of_text|>\n", "<|end_of_text|>\n", "<|end_of_text|>\n"}, "<|start_of_role|>assistant<|end_of_role|>", 0},
    {"gpt-oss", {"<|channel|>", NULL}, "gpt-oss gpt_oss", "",
     {"<|start|>system<|message|>", "<|start|>user<|message|>", "<|start|>assistant<|channel|>final<|message|>"},
     {"<|end|>", "<|end|>", "<|end|>"}, "<|start|>assistant", 0},
    {"llama4", {"<|header_start|>", NULL}, "llama4 llama4_text", "",
     {"<|header_start|>system<|header_end|>\n\n", "<|header_start|>user<|header_end|>\n\n",
      "<|header_start|>assistant<|header_end|>\n\n"},
     {"<|eot|>", "<|eot|>", "<|eot|>"}, "<|header_start|>assistant<|header_end|>\n\n", 0},
    {"dots1", {"<|userprompt|>", NULL}, "dots1", "", {"<|system|>", "<|userprompt|>", "<|response|>"},
     {"<|endofsystem|>", "<|endofuserprompt|>", "<|endofresponse|>"}, "<|response|>", 0},
    {"minimax-m2", {"]~b]", NULL}, "minimax-m2 minimax_m2 minimax", "]~!b[", {"]~b]system\n", "]~b]user\n", "]~b]ai\n"},
     {"[e~[\n", "[e~[\n", "[e~[\n"}, "]~b]ai\n", 0},
    {"bailing2", {"<role>", "<|role_end|>"}, "bailingmoe2 bailing_moe_v2", "",
     {"<role>SYSTEM</role>", "<role>HUMAN</role>", "<role>ASSISTANT</role>"},
     {"<|role_end|>", "<|role_end|>", "<|role_end|>"}, "<role>ASSISTANT</role>", 0},
    {"bailing", {"<role>", NULL}, "bailingmoe bailing_moe", "",
     {"<role>SYSTEM</role>", "<role>HUMAN</role>", "<role>ASSISTANT</role>"}, {"", "", ""},
     "<role>ASSISTANT</role>", 0},
    {"hunyuan", {"<|extra_0|>", NULL}, "hunyuan-moe hunyuan_v1_moe", "", {"<|startoftext|>", "<|startoftext|>", ""},
     {"<|extra_4|>", "<|extra_0|>", "<|eos|>"}, "", 0},
    {"grok-2", {"<|separator|>", NULL}, "grok", "", {"System: ", "Human: ", "Assistant: "},
     {"<|separator|>\n\n", "<|separator|>\n\n", "<|separator|>\n\n"}, "Assistant:", 0},
    {"glm4", {"[gMASK]<sop>", NULL}, "glm4moe glm4_moe", "[gMASK]<sop>",
     {"<|system|>\n", "<|user|>\n", "<|assistant|>\n"}, {"", "", ""}, "<|assistant|>\n", 0},
    {"phi3", {"<|assistant|>", "<|end|>"}, "phimoe", "", {"<|system|>\n", "<|user|>\n", "<|assistant|>\n"},
     {"<|end|>\n", "<|end|>\n", "<|end|>\n"}, "<|assistant|>\n", 0},
    {"olmoe", {"<|assistant|>", "<|user|>"}, "olmoe", "", {"<|system|>\n", "<|user|>\n", "<|assistant|>\n"},
     {"\n", "\n", "<|endoftext|>\n"}, "<|assistant|>\n", 0},
    {"deepseek3", {MOEI_DEEP("Assistant"), NULL}, "deepseek_v3 deepseek3", "",
     {"", MOEI_DEEP("User"), MOEI_DEEP("Assistant")}, {"", "", MOEI_SENTENCE_END}, MOEI_DEEP("Assistant"), 0},
    {"ernie", {"<|begin_of_sentence|>", NULL}, "ernie4_5-moe ernie4_5_moe", "", {"", "User: ", "Assistant: "},
     {"\n", "\n", "<|end_of_sentence|>"}, "Assistant: ", 0},
    {"deepseek2", {"User: ", "Assistant: "}, "deepseek deepseek2 deepseek_v2", "", {"", "User: ", "Assistant: "},
     {"\n\n", "\n\n", MOEI_SENTENCE_END}, "Assistant:", 0}};
enum { MOEI_CHATS = (int)(sizeof moei_chats / sizeof *moei_chats) };

static int moei_contains(const char *text, const char *part) {
    const size_t n = moei_strlen(part), all = moei_strlen(text);
    size_t i;
    for (i = 0; i + n <= all; i++)
        if (moei_memcmp(text + i, part, n) == 0) return 1;
    return 0;
}

const moe_chat *moe_chat_find(const moe_tokenizer *t) {
    int i;
    for (i = 0; i < MOEI_CHATS && t != NULL; i++) {
        const moe_chat *c = moei_chats + i;
        if (t->chat_template == NULL ? moei_is_word_of(t->architecture, c->architectures)
                                     : moei_contains(t->chat_template, c->marks[0]) &&
                                           (c->marks[1] == NULL || moei_contains(t->chat_template, c->marks[1])))
            return c;
    }
    return NULL;
}

moe_status moe_chat_put(const moe_chat *c, int role, int previous, const char *text, moe_buffer *to) {
    const char *parts[4] = {"", "", "", ""};
    size_t i, size, had;
    moe_status status = MOE_OK;
    if (c == NULL || to == NULL || role < 0 || role >= MOE_CHAT_ROLES) return MOE_ERR_ARGUMENT;
    if (text == NULL && role != MOE_CHAT_ASSISTANT) return MOE_ERR_ARGUMENT;
    if (previous < 0) parts[0] = c->begin;
    if (!c->joined || previous != MOE_CHAT_SYSTEM) parts[1] = text != NULL ? c->before[role] : c->reply;
    parts[2] = text != NULL ? text : "";
    parts[3] = text != NULL ? c->after[role] : "";
    for (i = 0, had = to->size; i < 4 && status == MOE_OK; i++) {
        size = moei_strlen(parts[i]);
        status = moei_buffer_write(to, parts[i], size);
    }
    if (status != MOE_OK) to->size = had;
    return status;
}

#ifdef __cplusplus
}
#endif
#endif /* MOE_NO_FLOAT */
#endif /* MOE_IMPLEMENTATION */
