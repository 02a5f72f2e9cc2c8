/* moe_import.h - MoE layers of other programs' weight files - an extra of moe, after moe.h

   Reads the MoE layers of Mixtral, Qwen, OLMoE, DeepSeek, Llama 4, GPT-OSS and others from the
   files that their authors publish (safetensors and GGUF), and writes safetensors with the same
   names. Converts llama.cpp's quantized rows to packed weights. MIT or public domain, as moe.h.

   Contents: search for
     >>recipe   >>program   >>options   >>manual   >>families   >>limits
     >>layer       moe_import_layer, moe_import_read, moe_import_source, moe_import_memory
     >>save        moe_import_save, moe_import_write
     >>blocks      moe_import_pack_blocks, moe_import_unpack_blocks
     >>code        the implementation, in the order of the data flow:
                   >>names >>sources >>gguf >>json >>walk >>prefix >>collect >>family >>shapes
                   >>settings >>values >>complete >>files >>write >>panels

   >>recipe
     In the one source file that defines MOE_IMPLEMENTATION, and wherever you call these functions:
       #include "moe.h"
       #include "examples/extras/moe_import.h"
     Link as for moe.h (-lm).

   >>program: makes a small layer, writes it as Mixtral's authors do, imports it and compares.
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
     None of its own. MOE_NO_STDIO leaves out moe_import_layer and moe_import_save, MOE_NO_TRAIN
     leaves out moe_import_write and moe_import_save, MOE_NO_QUANT leaves out the functions for
     blocks, MOE_NO_FLOAT leaves out everything. In the double build each function carries the
     suffix _f64, as in moe.h.

   >>manual
     Import.  A path, the prefix of the layer's tensor names, and usually nothing else:
       moe_import_layer(&layer, "Mixtral-8x7B", "model.layers.3", NULL, NULL, &error);
     The path is a .safetensors file, the index of several (.index.json), a .gguf file (of a split
     one, part 1, NAME-00001-of-00003.gguf, with the others beside it), or a folder
     that holds model.safetensors or model.safetensors.index.json. Only headers and the tensors of
     that layer are read from large files. If the prefix does not lead to an MoE layer, the message
     lists those of the file.

     Family and settings.  The family comes from model_type in config.json (GGUF:
     general.architecture); without one, from the tensor names. Sizes come from the tensors. Router
     settings come from config.json (GGUF: metadata). What is missing there takes the defaults of
     the family's own program (GGUF: of llama.cpp) where model_type names the family, else those of
     its preset, or of the preset that you name. The layer computes what that program computes, in
     float32 (float64 in the double build).

     Afterwards.  The layer is like any other: run it, quantize it, put its tensors into a network
     (moe_net_find). It has no gradients; to train it, save it with moe_layer_save and load it with
     moe_layer_load and trainable = 1.

     Without files by path.  moe_import_read takes sources: functions that read bytes at an offset,
     or memory (moe_import_memory). The first source is the file; config.json and the files of an
     index are found among the others by name.

     Back.  moe_import_save writes the weights under a family's names. Other programs need a
     config.json as well, which is not written.

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
     granite_moe
       router.layer.weight, input_linear.weight [E,2f,d], output_linear.weight [E,d,f]
     GGUF, any family
       ffn_gate_inp, ffn_gate_exps, ffn_up_exps, ffn_down_exps or ffn_gate_up_exps, in older files
       ffn_gate.%, ffn_up.%, ffn_down.%; ffn_gate_shexp, ffn_up_shexp, ffn_down_shexp,
       ffn_gate_inp_shexp; exp_probs_b; .bias of router and experts
     A family is also the name of its preset, except that qwen3_next computes as qwen2_moe, and
     glm4_moe and dots1 as deepseek_v3. model_type and general.architecture have the same names or
     those that the programs use (phimoe, granitemoe, deepseek2, ...).

   >>limits
     - One layer at a time: attention, norms and embeddings are not imported.
     - Element types: F32, F16, BF16, F64; in GGUF also Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K,
       IQ4_NL, IQ4_XS and MXFP4, dequantized exactly (rounded once). Other quantized files (IQ1 to
       IQ3, and safetensors of MXFP4, FP8, GPTQ, AWQ) are refused: dequantize or convert them.
     - GGUF versions 2 and 3, little-endian. config.json up to 1 MiB.
     - Experts are SwiGLU, those of grok1 and gemma4 glu with gelu_tanh. Any other hidden_act
       is refused, as is an unknown tensor of the layer.
     - Losses, noise and learning rates of the original training are not read.
     - deepseek_v2 with norm_topk_prob ignores routed_scaling_factor, like its own program.
     - A GGUF file computes what llama.cpp computes: phi35_moe a softmax over the chosen experts,
       not sparsemixer; groups compared by their two best experts; minimax_m2 and dots1 need
       expert_gating_func. llama.cpp also takes 6.1e-5 for a smaller sum of weights.
     - Tested with small stand-ins of every family, whose outputs tests/unit/published.py computes
       independently. No published weights were available.
*/
#ifndef MOE_H
#error "moe_import.h: include moe.h before it"
#endif

#ifndef MOE_IMPORT_H
#define MOE_IMPORT_H

#ifndef MOE_NO_FLOAT
#if MOE_REAL_IS_DOUBLE
#define moe_import_layer moe_import_layer_f64
#define moe_import_memory moe_import_memory_f64
#define moe_import_pack_blocks moe_import_pack_blocks_f64
#define moe_import_read moe_import_read_f64
#define moe_import_save moe_import_save_f64
#define moe_import_unpack_blocks moe_import_unpack_blocks_f64
#define moe_import_write moe_import_write_f64
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
              family is detected. They hold where the file says nothing; numbers of the file
              replace those of a preset
     allocator   NULL: the standard heap
   The layer owns its tensors and has no gradients. On failure *layer is untouched.
     MOE_ERR_NOT_FOUND    no MoE layer at this prefix (the message lists those of the file), a
                          tensor that the family needs is missing, no such preset or setting
     MOE_ERR_UNSUPPORTED  an element type, a tensor that the family or the preset does not have, a
                          setting that would change the result; named in the message
     MOE_ERR_SHAPE        a tensor whose shape does not fit the others
     MOE_ERR_CONFIG       settings that do not fit each other or the tensors; a file of another
                          family than the preset's, one whose gate or weights are others than the
                          preset's, one that gives another value to a setting of `preset`
     MOE_ERR_FORMAT       a malformed file; a tensor that occurs twice, or shares bytes with another
     MOE_ERR_ARGUMENT     layer, path or prefix is NULL; prefix or path is too long
     MOE_ERR_IO, MOE_ERR_MEMORY, MOE_ERR_OVERFLOW
   While it runs it needs memory for the headers, an index and config.json as a whole, about 250
   bytes per tensor of the layer, and the layer; and 24 KiB of stack. Files are not trusted: the
   layer is never larger than its tensors in the file. Thread-safe. */
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

/* A source in memory. The bytes stay the caller's and must outlive it. bytes NULL: empty. */
MOE_API moe_import_source moe_import_memory(const char *name, const void *bytes, size_t size);

/* moe_import_layer without paths. sources[0], n_sources >= 1, is a safetensors file, an index or a
   GGUF file; config.json and the files of an index are found among the other sources by name.
   Errors as above, and what read_at returns. Thread-safe if the sources are not shared. */
MOE_API moe_status moe_import_read(moe_layer *layer, const moe_import_source *sources, size_t n_sources,
                                   const char *prefix, const char *preset, const moe_allocator *allocator,
                                   moe_error *error);

/* ---- >>save: writing a family's names ---- */

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
   packed: panels as moe_pack makes them, stride panels apart. Both directions keep every bit.
     MOE_ERR_ARGUMENT  another type; stride = 0
     MOE_ERR_SHAPE     inner is not a multiple of 32
     MOE_ERR_OVERFLOW  a size
   Thread-safe. */
MOE_API moe_status moe_import_pack_blocks(int type, size_t n, size_t inner, const void *blocks, void *packed,
                                          size_t stride);
MOE_API moe_status moe_import_unpack_blocks(int type, size_t n, size_t inner, const void *packed, size_t stride,
                                            void *blocks);
#endif

#ifdef __cplusplus
}
#endif
#endif /* MOE_NO_FLOAT */
#endif /* MOE_IMPORT_H */

#if defined(MOE_IMPLEMENTATION) && !defined(MOEI_IMPORT_IMPLEMENTED)
#define MOEI_IMPORT_IMPLEMENTED

#ifndef MOE_NO_FLOAT

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
#define MOEI_SET_EXPERT_BIAS (1L << 16) /* "expert_bias" is added for the choice */
#define MOEI_SET_WG (1L << 17) /* "gate.wg.weight" is the router */
#define MOEI_SET_SHARED_MLP (1L << 18) /* "shared_mlp" */
#define MOEI_SET_SHARED_LINEAR (1L << 19) /* "shared_mlp", gate and up in one tensor */
#define MOEI_SET_G_EXPERTS (1L << 20) /* GGUF: router and experts */
#define MOEI_SET_G_ROUTER_BIAS (1L << 21)
#define MOEI_SET_G_BIASES (1L << 22)
#define MOEI_SET_G_CORRECTION (1L << 23)
#define MOEI_SET_G_SHARED (1L << 24)
#define MOEI_SET_G_SHARED_GATE (1L << 25)

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
    {0, NULL, NULL, 0, 0, 0}};

typedef struct moei_family {
    const char *name, *preset;
    /* values of model_type and general.architecture, separated by spaces */
    const char *types, *archs;
    /* sets that may occur (0: there are no such files); that must occur; that must also occur when
       only the tensor names identify the family (-1: they cannot) */
    long sets, needs, telling;
    long gguf_sets, gguf_needs;
    /* settings that it reads besides moei_family_common_keys */
    const char *keys;
    /* what its own program assumes for missing settings, where the preset says otherwise */
    const char *defaults;
    /* GGUF: the same of llama.cpp; a key without which llama.cpp refuses the file (NULL: none) */
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
     MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED | MOEI_SET_G_CORRECTION, MOEI_SET_G_EXPERTS | MOEI_SET_G_CORRECTION,
     MOEI_KEYS_DEEPSEEK, "groups=1 groups_kept=1 scale=1 weight=raw", MOEI_GGUF_DEEPSEEK, "expert_gating_func"},
    {"llama4", "llama4", "llama4 llama4_text", "llama4",
     MOEI_SET_ROUTER | MOEI_SET_TRANSPOSED | MOEI_SET_SHARED,
     MOEI_SET_ROUTER | MOEI_SET_SHARED, 0,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED, MOEI_SET_G_EXPERTS | MOEI_SET_G_SHARED,
     "", "", "", NULL},
    {"gpt_oss", "gpt_oss", "gpt_oss", "gpt-oss",
     MOEI_SET_ROUTER | MOEI_SET_ROUTER_BIAS | MOEI_SET_INTERLEAVED,
     MOEI_SET_ROUTER | MOEI_SET_ROUTER_BIAS | MOEI_SET_INTERLEAVED, 0,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_BIASES | MOEI_SET_G_ROUTER_BIAS,
     MOEI_SET_G_EXPERTS | MOEI_SET_G_BIASES | MOEI_SET_G_ROUTER_BIAS,
     "swiglu_limit", "", "", NULL},
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
     "norm_topk_prob routed_scaling_factor expert_gating_func expert_weights_scale", "top_k=4", "", "expert_gating_func"},
    {"dbrx", "dbrx", "", "dbrx",
     0, 0, -1,
     MOEI_SET_G_EXPERTS, MOEI_SET_G_EXPERTS,
     "", "", "", NULL},
    {"grok", "grok1", "", "grok",
     0, 0, -1,
     MOEI_SET_G_EXPERTS, MOEI_SET_G_EXPERTS,
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
    {"num_experts_per_tok", NULL, "top_k", 0},
    {"experts_per_token", NULL, "top_k", 0},
    {"moe_num_experts", NULL, "n_experts", 0},
    {"moe_k", NULL, "top_k", 0},
    {"moe_topk", NULL, "top_k", 0},
    {"moe_num_shared_experts", NULL, "n_shared", 1},
    {"n_group", NULL, "groups", 1},
    {"topk_group", NULL, "groups_kept", 1},
    {"n_shared_experts", NULL, "n_shared", 1},
    {"routed_scaling_factor", NULL, "scale", 0},
    {"swiglu_limit", NULL, "swiglu_limit", 0},
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
    memcpy(&s.ctx, &bytes, sizeof s.ctx); /* only read through */
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
    uint32_t split_no, split_count; /* which part, from 0, of how many; 0: not split */
    moe_import_source source;
    moe_buffer bytes;
    moe_file file;
    char name[MOEI_IMPORT_NAME];
    char shown[44]; /* the end of a long name, so that messages have room for the reason */
} moei_import_shard;

/* An element type. A moe_external_type of this header is always the first member of one. */
typedef struct moei_block_type {
    moe_external_type external; /* bytes 0: not supported */
    int code;                   /* number in GGUF, or MOEI_TYPE_ */
    int dtype;                  /* of single numbers; MOE_DTYPE_COUNT: blocks, or not supported */
    void (*read)(const unsigned char *block, moe_real *values); /* NULL: no blocks */
} moei_block_type;

/* A tensor of the layer, as found in a file. */
typedef struct moei_import_tensor {
    /* its name after the prefix, truncated; no known name is this long */
    char suffix[MOEI_IMPORT_SUFFIX];
    const moei_import_shard *shard;
    uint64_t at;            /* offset of its data in the file */
    size_t count, bytes;
    const moei_block_type *type; /* in GGUF; NULL: unknown */
    int dtype, n_dims;      /* dtype MOE_DTYPE_COUNT: blocks, or not supported */
    int code;               /* type number in GGUF */
    size_t shape[MOE_FILE_MAX_DIMS];
    const moei_tensor_name *row;
    size_t expert;
    int block;              /* of a model; -1: outside its blocks */
} moei_import_tensor;

enum { MOEI_IMPORT_FILE = 0, MOEI_IMPORT_INDEX, MOEI_IMPORT_GGUF };
enum { MOEI_VALUE_NONE = 0, MOEI_VALUE_SCALAR, MOEI_VALUE_TEXT, MOEI_VALUE_OTHER };

/* One key of GGUF metadata, without the architecture in front. */
typedef struct moei_gguf_fact {
    char key[MOEI_IMPORT_SUFFIX]; /* truncated; no known key is this long */
    char text[MOEI_IMPORT_VALUE]; /* of a number, a truth value or a string */
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
    /* arrays of moei_import_tensor; listed: entries of the index (only suffix and shard are set) */
    moe_buffer found, listed;
    moe_buffer all;             /* the same of all tensors of a model */
    size_t block;               /* of a model: whose elements are read where settings are lists */
    int is_model;               /* 1: a whole model, not a layer */
    const moei_family *family;
    const moe_preset *preset;   /* of the caller, or NULL */
    const char *changes;        /* settings of the caller, after the preset's name; "": none */
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

/* Reads the first size bytes of a file. */
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

/* Copies a text; of one that is longer than room only the end, behind dots. */
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
    if (status == MOE_OK && s->source.read_at == NULL) {
        if (r->folder->close != NULL) r->folder->close(r->folder->ctx, &s->source);
        status = moei_error(r->error, MOE_ERR_ARGUMENT, "a source's read_at is NULL");
    }
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
    uint64_t end; /* of the last tensor's data, from the beginning of all data */
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
    /* a zero byte would cut the name, which could then look like a known one */
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

/* Reads a number of 4 bytes, or of 2, into *number if the key has this name. */
static int moei_gguf_key_number(moei_gguf *g, const char *key, const char *name, uint32_t type, uint32_t *number) {
    if (moei_strcmp(key, name) != 0 || (type != 2 && type != 4)) return 0;
    *number = (uint32_t)moei_gguf_number(g, type == 2 ? 2 : 4);
    return 1;
}

/* Reads the metadata. The first pass finds general.architecture, general.alignment and which part
   of a split file this is; the second pass (behind_arch = 1) keeps the keys that start with the
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
                                    moei_gguf_key_number(g, key, "split.count", type, &file->split_count)))
            kind = MOEI_VALUE_SCALAR;
        if (kind == MOEI_VALUE_NONE) moei_gguf_skip_value(g, type);
    }
}

/* Blocks of GGUF. Each function writes the values of one block, rounded at most once: products of
   scales and codes are exact in float. */

static moe_real moei_block_scale(const unsigned char *p) { return moei_from_f16((uint16_t)moei_load(p, 2)); }

/* Code i of 32: low halves of 16 bytes first. */
static int moei_block_nibble(const unsigned char *q, int i) { return i < 16 ? q[i] & 15 : q[i - 16] >> 4; }

static void moei_block_q4_0(const unsigned char *p, moe_real *values) {
    const moe_real d = moei_block_scale(p);
    int i;
    for (i = 0; i < 32; i++) values[i] = d * (moe_real)(moei_block_nibble(p + 2, i) - 8);
}

static void moei_block_q4_1(const unsigned char *p, moe_real *values) {
    const moe_real d = moei_block_scale(p), m = moei_block_scale(p + 2);
    int i;
    for (i = 0; i < 32; i++) values[i] = d * (moe_real)moei_block_nibble(p + 4, i) + m;
}

/* Code i with its fifth bit, which stands in 4 bytes before the halves. */
static int moei_block_five(const unsigned char *p, int i) {
    return moei_block_nibble(p + 4, i) | (p[i / 8] >> i % 8 & 1) << 4;
}

static void moei_block_q5_0(const unsigned char *p, moe_real *values) {
    const moe_real d = moei_block_scale(p);
    int i;
    for (i = 0; i < 32; i++) values[i] = d * (moe_real)(moei_block_five(p + 2, i) - 16);
}

static void moei_block_q5_1(const unsigned char *p, moe_real *values) {
    const moe_real d = moei_block_scale(p), m = moei_block_scale(p + 2);
    int i;
    for (i = 0; i < 32; i++) values[i] = d * (moe_real)moei_block_five(p + 4, i) + m;
}

static void moei_block_q8_0(const unsigned char *p, moe_real *values) {
    const moe_real d = moei_block_scale(p);
    int i;
    for (i = 0; i < 32; i++) values[i] = d * (moe_real)moei_load_signed(p + 2 + i, 1);
}

static const signed char moei_iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                1,    13,   25,  38,  53,  69,  89,  113};

static void moei_block_iq4_nl(const unsigned char *p, moe_real *values) {
    const moe_real d = moei_block_scale(p);
    int i;
    for (i = 0; i < 32; i++) values[i] = d * (moe_real)moei_iq4_values[moei_block_nibble(p + 2, i)];
}

/* Twice the values of E2M1, and half of a power of two that is stored as E8M0: neither overflows
   where their product does not. */
static const signed char moei_fp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static moe_real moei_e8m0_half(unsigned e) {
    return (moe_real)moei_binary32(e < 2 ? (uint32_t)0x200000 << e : (uint32_t)(e - 1) << 23);
}

static void moei_block_mxfp4(const unsigned char *p, moe_real *values) {
    const moe_real d = moei_e8m0_half(p[0]);
    int i;
    for (i = 0; i < 32; i++) values[i] = d * (moe_real)moei_fp4_values[moei_block_nibble(p + 1, i)];
}

/* Blocks of 256: element e is l of 32 in part j of 8, which is k of 4 in half h. */

static void moei_block_q2_k(const unsigned char *p, moe_real *values) {
    const moe_real d = moei_block_scale(p + 80), m = moei_block_scale(p + 82);
    int e;
    for (e = 0; e < 256; e++) {
        const int h = e / 128, k = e / 32 % 4;
        const int l = e % 32, s = p[e / 16];
        values[e] = d * (moe_real)((s & 15) * (p[16 + 32 * h + l] >> 2 * k & 3)) - m * (moe_real)(s >> 4);
    }
}

static void moei_block_q3_k(const unsigned char *p, moe_real *values) {
    const unsigned char *q = p + 32, *s = p + 96;
    const moe_real d = moei_block_scale(p + 108);
    int e;
    for (e = 0; e < 256; e++) {
        const int h = e / 128, k = e / 32 % 4;
        const int l = e % 32, i = e / 16;
        const int scale = (i < 8 ? s[i] & 15 : s[i - 8] >> 4) | (s[8 + i % 4] >> 2 * (i / 4) & 3) << 4;
        const int code = (q[32 * h + l] >> 2 * k & 3) - (p[l] >> (4 * h + k) & 1 ? 0 : 4);
        values[e] = d * (moe_real)(scale - 32) * (moe_real)code;
    }
}

/* Scale (offset 0) or minimum (offset 4) of part j, 6 bits each in 12 bytes. */
static int moei_block_six(const unsigned char *s, int j, int offset) {
    if (j < 4) return s[j + offset] & 63;
    return (offset == 0 ? s[j + 4] & 15 : s[j + 4] >> 4) | (s[j - 4 + offset] >> 6) << 4;
}

/* Q4_K, and with high bits Q5_K. */
static void moei_block_k(const unsigned char *p, const unsigned char *high, const unsigned char *q,
                         moe_real *values) {
    const moe_real d = moei_block_scale(p), m = moei_block_scale(p + 2);
    int e;
    for (e = 0; e < 256; e++) {
        const int j = e / 32, l = e % 32;
        const int byte = q[32 * (j / 2) + l];
        const int code = (j % 2 == 0 ? byte & 15 : byte >> 4) | (high != NULL ? (high[l] >> j & 1) << 4 : 0);
        values[e] = d * (moe_real)(moei_block_six(p + 4, j, 0) * code) - m * (moe_real)moei_block_six(p + 4, j, 4);
    }
}

static void moei_block_q4_k(const unsigned char *p, moe_real *values) { moei_block_k(p, NULL, p + 16, values); }
static void moei_block_q5_k(const unsigned char *p, moe_real *values) { moei_block_k(p, p + 16, p + 48, values); }

static void moei_block_q6_k(const unsigned char *p, moe_real *values) {
    const moe_real d = moei_block_scale(p + 208);
    int e;
    for (e = 0; e < 256; e++) {
        const int h = e / 128, k = e / 32 % 4;
        const int l = e % 32, low = p[64 * h + 32 * (k & 1) + l];
        const int code = (k > 1 ? low >> 4 : low & 15) | (p[128 + 32 * h + l] >> 2 * k & 3) << 4;
        values[e] = d * (moe_real)moei_load_signed(p + 192 + e / 16, 1) * (moe_real)(code - 32);
    }
}

static void moei_block_iq4_xs(const unsigned char *p, moe_real *values) {
    const moe_real d = moei_block_scale(p);
    const unsigned high = (unsigned)moei_load(p + 2, 2);
    int e;
    for (e = 0; e < 256; e++) {
        const int j = e / 32;
        const int scale = (p[4 + j / 2] >> 4 * (j & 1) & 15) | (int)(high >> 2 * j & 3u) << 4;
        values[e] = d * (moe_real)(scale - 32) *
                    (moe_real)moei_iq4_values[moei_block_nibble(p + 8 + 16 * j, e % 32)];
    }
}

/* The block of a matrix that begins with element p of a row. */
static const unsigned char *moei_external_block(const moe_external *w, size_t row, size_t p) {
    return w->data + row * w->row + p / (size_t)w->type->block * w->column;
}

/* The moe_external_type.unpack of types of blocks. */
static void moei_unpack_blocks(const moe_kernels *k, const moe_external *w, size_t row, size_t from, size_t count,
                               moe_real *values) {
    const moei_block_type *type = (const moei_block_type *)(const void *)w->type;
    const size_t block = (size_t)type->external.block;
    size_t p;
    (void)k;
    for (p = 0; p < count; p += block) type->read(moei_external_block(w, row, from + p), values + p);
}

/* Of single numbers. */
static void moei_unpack_numbers(const moe_kernels *k, const moe_external *w, size_t row, size_t from, size_t count,
                                moe_real *values) {
    const moei_block_type *type = (const moei_block_type *)(const void *)w->type;
    moe_file_tensor t;
    size_t p, run = w->column == (size_t)type->external.bytes ? count : 1;
    (void)k;
    memset(&t, 0, sizeof t);
    t.dtype = type->dtype;
    for (p = 0; p < count; p += run) {
        t.data = moei_external_block(w, row, from + p);
        t.count = run;
        t.bytes = run * (size_t)type->external.bytes;
        (void)moe_file_values(&t, 0, run, values + p, NULL);
    }
}

/* The number of a byte in FP8's format E4M3: no infinities, 0x7f and 0xff are NaN (Micikevicius et
   al. 2022, FP8 formats for deep learning). */
static moe_real moei_from_e4m3(unsigned byte) {
    const uint32_t sign = (uint32_t)(byte & 128u) << 24, size = byte & 127u;
    if (size == 127u) return (moe_real)moei_binary32(sign | 0x7fc00000u);
    if (size < 8u) return (sign ? MOEI_R(-0.001953125) : MOEI_R(0.001953125)) * (moe_real)size;
    return (moe_real)moei_binary32(sign | ((size << 20) + (120u << 23)));
}

/* FP8 with one float32 scale for scale_rows rows and scale_columns columns. */
static void moei_unpack_e4m3(const moe_kernels *k, const moe_external *w, size_t row, size_t from, size_t count,
                             moe_real *values) {
    const unsigned char *scales = w->scales == NULL ? NULL : w->scales + row / (size_t)w->scale_rows * w->scale_row;
    size_t p;
    (void)k;
    for (p = 0; p < count; p++) {
        values[p] = moei_from_e4m3(*moei_external_block(w, row, from + p));
        if (scales == NULL) continue;
        values[p] *= (moe_real)moei_binary32(
            (uint32_t)moei_load(scales + (from + p) / (size_t)w->scale_columns * 4, 4));
    }
}

/* MXFP4 of safetensors: pairs of neighbors in a byte, the first one low, the powers of two
   apart. */
static void moei_unpack_mxfp4(const moe_kernels *k, const moe_external *w, size_t row, size_t from, size_t count,
                              moe_real *values) {
    const unsigned char *scales = w->scales + row / (size_t)w->scale_rows * w->scale_row;
    size_t p;
    (void)k;
    for (p = 0; p < count; p++) {
        const unsigned byte = moei_external_block(w, row, from + p)[(from + p) % 32 / 2];
        const int code = moei_fp4_values[(from + p) % 2 == 0 ? byte & 15u : byte >> 4];
        values[p] = moei_e8m0_half(scales[(from + p) / 32]) * (moe_real)code;
    }
}

/* Types of safetensors alone: numbers that no GGUF file can have. */
enum { MOEI_TYPE_E4M3 = -1, MOEI_TYPE_MXFP4 = -2 };

/* Element types of GGUF and of safetensors. 0 bytes: not supported. */
static const moei_block_type moei_gguf_types[] = {
    {{"F32", 1, 4, moei_unpack_numbers}, 0, MOE_DTYPE_F32, NULL},
    {{"F16", 1, 2, moei_unpack_numbers}, 1, MOE_DTYPE_F16, NULL},
    {{"Q4_0", 32, 18, moei_unpack_blocks}, 2, MOE_DTYPE_COUNT, moei_block_q4_0},
    {{"Q4_1", 32, 20, moei_unpack_blocks}, 3, MOE_DTYPE_COUNT, moei_block_q4_1},
    {{"Q5_0", 32, 22, moei_unpack_blocks}, 6, MOE_DTYPE_COUNT, moei_block_q5_0},
    {{"Q5_1", 32, 24, moei_unpack_blocks}, 7, MOE_DTYPE_COUNT, moei_block_q5_1},
    {{"Q8_0", 32, 34, moei_unpack_blocks}, 8, MOE_DTYPE_COUNT, moei_block_q8_0},
    {{"Q8_1", 1, 0, NULL}, 9, MOE_DTYPE_COUNT, NULL},
    {{"Q2_K", 256, 84, moei_unpack_blocks}, 10, MOE_DTYPE_COUNT, moei_block_q2_k},
    {{"Q3_K", 256, 110, moei_unpack_blocks}, 11, MOE_DTYPE_COUNT, moei_block_q3_k},
    {{"Q4_K", 256, 144, moei_unpack_blocks}, 12, MOE_DTYPE_COUNT, moei_block_q4_k},
    {{"Q5_K", 256, 176, moei_unpack_blocks}, 13, MOE_DTYPE_COUNT, moei_block_q5_k},
    {{"Q6_K", 256, 210, moei_unpack_blocks}, 14, MOE_DTYPE_COUNT, moei_block_q6_k},
    {{"Q8_K", 1, 0, NULL}, 15, MOE_DTYPE_COUNT, NULL},
    {{"IQ2_XXS", 1, 0, NULL}, 16, MOE_DTYPE_COUNT, NULL},
    {{"IQ2_XS", 1, 0, NULL}, 17, MOE_DTYPE_COUNT, NULL},
    {{"IQ3_XXS", 1, 0, NULL}, 18, MOE_DTYPE_COUNT, NULL},
    {{"IQ1_S", 1, 0, NULL}, 19, MOE_DTYPE_COUNT, NULL},
    {{"IQ4_NL", 32, 18, moei_unpack_blocks}, 20, MOE_DTYPE_COUNT, moei_block_iq4_nl},
    {{"IQ3_S", 1, 0, NULL}, 21, MOE_DTYPE_COUNT, NULL},
    {{"IQ2_S", 1, 0, NULL}, 22, MOE_DTYPE_COUNT, NULL},
    {{"IQ4_XS", 256, 136, moei_unpack_blocks}, 23, MOE_DTYPE_COUNT, moei_block_iq4_xs},
    {{"I8", 1, 0, NULL}, 24, MOE_DTYPE_COUNT, NULL},
    {{"I16", 1, 0, NULL}, 25, MOE_DTYPE_COUNT, NULL},
    {{"I32", 1, 0, NULL}, 26, MOE_DTYPE_COUNT, NULL},
    {{"I64", 1, 0, NULL}, 27, MOE_DTYPE_COUNT, NULL},
    {{"F64", 1, 8, moei_unpack_numbers}, 28, MOE_DTYPE_F64, NULL},
    {{"IQ1_M", 1, 0, NULL}, 29, MOE_DTYPE_COUNT, NULL},
    {{"BF16", 1, 2, moei_unpack_numbers}, 30, MOE_DTYPE_BF16, NULL},
    {{"TQ1_0", 1, 0, NULL}, 34, MOE_DTYPE_COUNT, NULL},
    {{"TQ2_0", 1, 0, NULL}, 35, MOE_DTYPE_COUNT, NULL},
    {{"MXFP4", 32, 17, moei_unpack_blocks}, 39, MOE_DTYPE_COUNT, moei_block_mxfp4},
    {{"F8_E4M3", 1, 1, moei_unpack_e4m3}, MOEI_TYPE_E4M3, MOE_DTYPE_COUNT, NULL},
    {{"MXFP4", 32, 16, moei_unpack_mxfp4}, MOEI_TYPE_MXFP4, MOE_DTYPE_COUNT, NULL}};

enum { MOEI_GGUF_TYPE_COUNT = (int)(sizeof moei_gguf_types / sizeof moei_gguf_types[0]) };

/* The row of a number; NULL: none. */
static const moei_block_type *moei_gguf_type_find(int code) {
    size_t i;
    for (i = 0; i < MOEI_GGUF_TYPE_COUNT; i++)
        if (moei_gguf_types[i].code == code) return &moei_gguf_types[i];
    return NULL;
}

/* Reads the next tensor description. bytes stays 0 for types that are not supported. The data must
   have the order of the descriptions, as every GGUF file: tensors that share bytes would let a
   small file make a large layer. */
static void moei_gguf_tensor(moei_gguf *g, char name[MOEI_IMPORT_NAME], moei_import_tensor *f) {
    const moei_block_type *type;
    uint64_t n, i, elements = 1, most = (size_t)-1 / 8;
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
    f->code = (int)(moei_gguf_number(g, 4) & 0x7fffffffu);
    f->at = moei_gguf_number(g, 8);
    f->dtype = MOE_DTYPE_COUNT;
    type = f->type = moei_gguf_type_find(f->code);
    if (type != NULL && g->status == MOE_OK) {
        f->dtype = type->dtype;
        f->bytes = f->count / (size_t)type->external.block * (size_t)type->external.bytes;
        if (n > 0 && f->shape[n - 1] % (size_t)type->external.block != 0)
            moei_gguf_refuse(g, MOE_ERR_FORMAT, "the rows of a tensor are not a multiple of its block size");
    }
    if (f->at > g->file->source.size)
        moei_gguf_refuse(g, MOE_ERR_FORMAT, "a tensor starts beyond the end of the file");
    if (f->at < g->end) moei_gguf_refuse(g, MOE_ERR_FORMAT, "a tensor overlaps the one before it");
    g->end = f->at + f->bytes;
}

/* Reads everything before the data: header, metadata, tensor descriptions. Only the first file, or
   the first part of a split one, gives the facts. */
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
    for (i = 0; i < file->n_tensors && g.status == MOE_OK; i++) moei_gguf_tensor(&g, name, &f);
    if (alignment == 0 || alignment > 65536)
        moei_gguf_refuse(&g, MOE_ERR_FORMAT, "general.alignment must be 1 to 65536");
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

/* Opens a part of a split file and checks that it is that part. */
static moe_status moei_gguf_open_part(moei_importer *r, uint32_t no, moei_import_shard **part) {
    const size_t stem = moei_strlen(r->first->name) - 20;
    const uint32_t count = r->first->split_count;
    char name[MOEI_IMPORT_NAME];
    unsigned char begin[4];
    moe_status status;
    memcpy(name, r->first->name, stem);
    moei_gguf_part_end(no + 1, count, name + stem);
    status = moei_import_shard_open(r, name, part);
    if (status == MOE_ERR_NOT_FOUND)
        return moei_error(r->error, status, "%s: part %d of %d of this split file is missing; it lies beside part 1",
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
    uint32_t no;
    moe_status status = moei_gguf_open(r, last);
    if (status != MOE_OK || last->split_count <= 1) return status;
    if (last->split_no > 0 || last->split_count > 65535)
        return moei_error(r->error, MOE_ERR_UNSUPPORTED,
                          "%s: part %d of %d of a split file; open part 1, which has the settings of the model",
                          last->shown, (int)(last->split_no & 0xffffu) + 1, (int)(last->split_count & 0xffffu));
    moei_gguf_part_end(1, last->split_count, end);
    if (length < 20 || moei_strcmp(last->name + length - 20, end) != 0)
        return moei_error(r->error, MOE_ERR_UNSUPPORTED,
                          "%s: part 1 of %d of a split file; its name must end with %s, so that the others are found",
                          last->shown, (int)last->split_count, end);
    for (no = 1; no < r->first->split_count && status == MOE_OK; no++) {
        status = moei_gguf_open_part(r, no, &last->part);
        last = last->part;
    }
    return status;
}

/* ---- >>json: the index and config.json ---- */

/* Checks a text: one object and nothing after it. */
static moe_status moei_import_json_check(moei_json *j) {
    if (moei_json_peek(j) != '{') return moei_json_refuse(j, j->at, MOE_ERR_FORMAT, "not a JSON object");
    if (moei_config_skip(j) != MOE_OK) return j->error != NULL ? j->error->code : MOE_ERR_FORMAT;
    if (moei_json_peek(j) >= 0) return moei_json_refuse(j, j->at, MOE_ERR_FORMAT, "unexpected text after the object");
    return MOE_OK;
}

static moei_json moei_import_json_at(const moe_buffer *text, size_t at, moe_error *error) {
    moei_json j;
    memset(&j, 0, sizeof j);
    j.bytes = text->data;
    j.at = at;
    j.end = text->size;
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
    for (first = 1; moei_json_key(&j, first, &name, &more) == MOE_OK && more; first = 0) {
        (void)moei_json_peek(&j);
        if (moei_span_is(name, key)) found = j.at;
        if (moei_config_skip(&j) != MOE_OK) break;
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

/* The same for a key of a key, "rope_scaling.factor". */
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

/* Kind and text of a value in config.json; of a list, in a model, the element of the block. null
   counts as absent. */
static int moei_import_config_value(const moei_importer *r, const char *key, char text[MOEI_IMPORT_VALUE]) {
    size_t at = moei_import_config_at(r, key);
    moei_json j;
    moei_span s;
    int c;
    text[0] = '\0';
    if (at == 0) return MOEI_VALUE_NONE;
    if (r->is_model && r->config.data[at] == '[') {
        at = moei_import_json_element(&r->config, at, r->block);
        if (at == 0) return MOEI_VALUE_OTHER;
    }
    j = moei_import_json_at(&r->config, at, NULL);
    c = moei_json_peek(&j);
    if (c == '{' || c == '[') return MOEI_VALUE_OTHER;
    if (c == '"') {
        if (moei_json_string(&j, &s) != MOE_OK) return MOEI_VALUE_OTHER;
        moei_import_span(s, text, MOEI_IMPORT_VALUE);
        return MOEI_VALUE_TEXT;
    }
    s = moei_config_word(&j);
    if (moei_span_is(s, "null")) return MOEI_VALUE_NONE;
    moei_import_span(s, text, MOEI_IMPORT_VALUE);
    return moei_span_length(s) < MOEI_IMPORT_VALUE ? MOEI_VALUE_SCALAR : MOEI_VALUE_OTHER;
}

/* The metadata of a key after "ARCH."; of equal keys the last. NULL: none. */
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
    if (r->is_model && fact->type == MOEI_GGUF_ARRAY) return moei_gguf_element(r, fact, r->block, text);
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
    if (moei_import_value(r, "quantization_config", text) != MOEI_VALUE_NONE)
        return moei_error(r->error, MOE_ERR_UNSUPPORTED,
                          "config.json: quantization_config: this kind of quantized model is not supported; save it "
                          "dequantized (bf16) or as GGUF");
    return MOE_OK;
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

/* Next tensor of a safetensors file. */
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
    f->shard = shard;
    return MOE_OK;
}

/* Next tensor name of an index, with the name of its file. */
static moe_status moei_import_walk_index(moei_import_walk *w, char name[MOEI_IMPORT_NAME],
                                         char file[MOEI_IMPORT_NAME]) {
    moei_span key, value;
    int more;
    moe_status status = moei_json_key(&w->json, w->first, &key, &more);
    if (status != MOE_OK || !more) return status != MOE_OK ? status : MOE_ERR_NOT_FOUND;
    w->first = 0;
    moei_import_span(key, name, MOEI_IMPORT_NAME);
    if (moei_json_peek(&w->json) != '"') {
        file[0] = '\0';
        return moei_config_skip(&w->json);
    }
    if ((status = moei_json_string(&w->json, &value)) != MOE_OK) return status;
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

/* ---- >>collect the tensors of the layer ---- */

static size_t moei_import_tensor_count(const moe_buffer *list) { return list->size / sizeof(moei_import_tensor); }
static moei_import_tensor *moei_import_tensor_at(const moe_buffer *list, size_t i) {
    return (moei_import_tensor *)(void *)list->data + i;
}

/* Full tensor name for messages, with a long prefix cut at the front, so that the rest of a message
   has room. */
static const char *moei_import_full_name(const moei_importer *r, const char *suffix, char out[112]) {
    char prefix[36];
    moei_text t = moei_import_text(out, 112);
    moei_import_show(r->prefix, prefix, sizeof prefix);
    moei_put(&t, prefix, moei_strlen(prefix));
    moei_put(&t, ".", 1);
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

/* In GGUF, attention and norms of a block share the prefix of the layer. */
static int moei_import_is_moe(const moei_importer *r, const char *suffix) {
    const char *p;
    if (r->kind != MOEI_IMPORT_GGUF) return 1;
    for (p = suffix; *p != '\0'; p++)
        if (moei_import_starts(p, "norm")) return 0;
    return moei_import_starts(suffix, "ffn_") || moei_import_starts(suffix, "exp_");
}

static moe_status moei_import_tensor_add(moei_importer *r, moe_buffer *list, moei_import_tensor *f,
                                         const char *suffix) {
    moe_status status;
    moei_import_copy(f->suffix, sizeof f->suffix, suffix);
    list->allocator = r->allocator;
    status = moei_buffer_write(list, f, sizeof *f);
    return status == MOE_OK ? MOE_OK : moei_error(r->error, status, "no memory for the list of tensors");
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
    return MOE_OK;
}

/* ---- >>family of the layer ---- */

/* Whether a family reads a key. */
static int moei_family_reads(const moei_family *family, const char *key) {
    return moei_is_word_of(key, moei_family_common_keys) || moei_is_word_of(key, family->keys);
}

static int moei_is_per_expert(const moei_tensor_name *row) {
    return moei_memchr(row->name, '%', moei_strlen(row->name)) != NULL;
}

static long moei_sets_of_family(const moei_importer *r, const moei_family *family) {
    return r->kind == MOEI_IMPORT_GGUF ? family->gguf_sets : family->sets;
}

/* Whether the tensors fit a family: every name is known to it, and every set that it needs
   occurs. */
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
            return ": MXFP4, FP8, GPTQ and AWQ are not supported; save it dequantized (bf16) or as GGUF Q8_0";
    return "";
}

/* The error when the names do not fit: a family, or (NULL) any family. */
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

/* The families that the preset, model_type or general.architecture leaves, as a bit mask.
   *by_names: nothing but the tensor names identifies the family. */
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
    /* norm_topk_prob in the settings makes equal names unambiguous */
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
    for (i = 0; i < n; i++) sizes[i] = moei_shape_size(r->sizes, f->row->shape[i]);
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
    int known = f->dtype <= MOE_DTYPE_BF16 || (f->type != NULL && f->type->read != NULL);
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
    moe_error why;
    moe_status status;
    why.message[0] = '\0';
    if (s->value != NULL && moei_strcmp(s->value, text) != 0) return MOE_OK;
    *done = 1;
    if (s->value != NULL) return moe_fields_apply(moei_layer_fields, &r->settings, s->settings, r->error);
    field = moe_field_find(moei_layer_fields, s->settings);
    status = kind == MOEI_VALUE_SCALAR ? moei_field_set_n(field, &r->settings, text, moei_strlen(text), &why)
                                       : MOE_ERR_CONFIG;
    if (status == MOE_OK && (s->zero || !moei_field_is_zero(field, &r->settings))) return MOE_OK;
    return moei_error(r->error, MOE_ERR_CONFIG, "%s: %s = %s: expected a number%s", moei_settings_source(r), s->key,
                      text, status == MOE_OK ? " other than 0" : "");
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

/* Refuses a GGUF file without a key that llama.cpp has no default for; 0 (none) is no value. */
static moe_status moei_settings_required(const moei_importer *r) {
    char text[MOEI_IMPORT_VALUE];
    const char *key = r->family->gguf_key;
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
    return MOE_OK;
}

/* The gate or the weights that a preset of the caller is known for, where the file says others. */
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
                              "preset = %s has %s = %s, but %s says %s; \"%s %s=%s\" is a preset with a change",
                              r->preset->name, names[i], said, moei_settings_source(r), found, r->preset->name,
                              names[i], found);
    }
    return MOE_OK;
}

/* Whether the file leaves all settings of the caller as they are. */
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
    c->router.bias_rate = c->router.loss_balance = c->router.loss_z = MOEI_R(0.0); /* only training uses them */
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

static moe_status moei_import_tensor_read(moei_importer *r, const moei_import_tensor *f, moe_layer *layer) {
    unsigned char bytes[MOEI_IMPORT_CHUNK * 8];
    moe_real values[MOEI_IMPORT_CHUNK];
    const moei_tensor_view view = moei_tensor_view_of(layer, f->row, r->sizes, f->expert);
    const moei_block_type *blocks = f->dtype >= MOE_DTYPE_COUNT ? f->type : NULL;
    const size_t block = blocks != NULL ? (size_t)blocks->external.block : 1;
    const size_t each = blocks != NULL ? (size_t)blocks->external.bytes : 1;
    moe_file_tensor t;
    uint64_t at = f->at;
    size_t done, n, size, i;
    moe_status status;
    memset(&t, 0, sizeof t);
    for (done = 0; done < f->count; done += n, at += size) {
        n = f->count - done < MOEI_IMPORT_CHUNK ? f->count - done : (size_t)MOEI_IMPORT_CHUNK;
        size = blocks != NULL ? n / block * each : n * moei_dtypes[f->dtype].size;
        status = moei_import_read_at(r, f->shard, at, bytes, size);
        if (status != MOE_OK) return status;
        t.dtype = f->dtype;
        t.count = n;
        t.data = bytes;
        t.bytes = size;
        for (i = 0; blocks != NULL && i < n / block; i++) blocks->read(bytes + i * each, values + i * block);
        if (blocks == NULL && (status = moe_file_values(&t, 0, n, values, NULL)) != MOE_OK) return status;
        moei_tensor_view_copy(&view, done, n, values, 0);
    }
    return MOE_OK;
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

/* The parameters that a tensor fills and that the layer has in this size, as a bit mask: it has no
   other place. */
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

/* The error for a parameter that no tensor fills. It names a tensor in the form that the other
   tensors of the layer have. */
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
    int param;
    for (i = 0; i < moei_import_tensor_count(&r->found); i++) {
        const moei_import_tensor *f = moei_import_tensor_at(&r->found, i);
        if (!moei_import_mark(seen, experts, f->row, f->expert))
            return moei_error(r->error, MOE_ERR_FORMAT, "tensor '%s': duplicates another tensor",
                              moei_import_full_name(r, f->suffix, shown));
    }
    for (i = 0; i < moei_import_tensor_count(&r->listed); i++) {
        const moei_import_tensor *f = moei_import_tensor_at(&r->listed, i);
        const moei_tensor_name *row = moei_tensor_name_find(moei_sets_of_family(r, r->family), f->suffix, &expert);
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
    if (status != MOE_OK) return status;
    for (i = 0; i < moei_import_tensor_count(&r->found) && status == MOE_OK; i++)
        status = moei_import_tensor_read(r, moei_import_tensor_at(&r->found, i), layer);
    if (status != MOE_OK) moe_layer_free(layer);
    return status;
}

/* Opens the file, detects its format and reads what precedes the tensors. */
static moe_status moei_import_open(moei_importer *r, const char *name) {
    /* of an index */
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
    if (begin[0] != '{' && begin[0] != ' ' && begin[0] != '\n' && begin[0] != '\r')
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

/* ---- >>models: what a whole model is ---- */

/* What an architecture has; bits. Those of a block leave out what this block does without. */
#define MOEI_ARCH_NEIGHBOURS (UINT64_C(1) << 0)    /* rotary pairs are neighbours, not halves */
#define MOEI_ARCH_SEPARATE (UINT64_C(1) << 1)      /* matrices of queries, keys and values */
#define MOEI_ARCH_FUSED (UINT64_C(1) << 2)         /* one matrix of all three, or separate ones */
#define MOEI_ARCH_BIAS (UINT64_C(1) << 3)          /* biases of queries, keys and values */
#define MOEI_ARCH_MAY_BIAS (UINT64_C(1) << 4)
#define MOEI_ARCH_OUT_BIAS (UINT64_C(1) << 5)      /* of attention's output */
#define MOEI_ARCH_HEAD_NORM (UINT64_C(1) << 6)     /* norms of each head's query and key */
#define MOEI_ARCH_MAY_HEAD_NORM (UINT64_C(1) << 7)
#define MOEI_ARCH_WHOLE_NORM (UINT64_C(1) << 8)    /* norms of all queries and all keys of a token */
#define MOEI_ARCH_NORM_AFTER (UINT64_C(1) << 9)    /* after the rotation */
#define MOEI_ARCH_SINKS (UINT64_C(1) << 10)
#define MOEI_ARCH_LAYER_NORM (UINT64_C(1) << 11)   /* layer norms, not RMS norms */
#define MOEI_ARCH_NORM_BIAS (UINT64_C(1) << 12)
#define MOEI_ARCH_LATENT (UINT64_C(1) << 13)       /* multi-head latent attention */
#define MOEI_ARCH_CONVOLUTION (UINT64_C(1) << 14)  /* some blocks have one in the place of attention */
#define MOEI_ARCH_POST_NORM (UINT64_C(1) << 15)    /* norms before both residual sums */
#define MOEI_ARCH_SECOND_POST (UINT64_C(1) << 16)  /* GGUF: the second norm is post_attention_norm */
#define MOEI_ARCH_SECOND_ATTN (UINT64_C(1) << 17)  /* GGUF: it is attn_output_norm */
#define MOEI_ARCH_SECOND_FFN (UINT64_C(1) << 18)   /* it is ffn_norm */
#define MOEI_ARCH_DENSE (UINT64_C(1) << 19)        /* some blocks are dense */
#define MOEI_ARCH_HEAD_BIAS (UINT64_C(1) << 20)    /* of the logits */
#define MOEI_ARCH_FACTORS (UINT64_C(1) << 21)      /* GGUF: rope_factors_long, _short */
#define MOEI_ARCH_FREQS (UINT64_C(1) << 22)        /* GGUF: rope_freqs */
#define MOEI_ARCH_LFM (UINT64_C(1) << 23)          /* names of lfm2 */
#define MOEI_ARCH_CHUNKS (UINT64_C(1) << 24)       /* llama4: chunks, layers without rotation */
#define MOEI_ARCH_ROT_SCALE (UINT64_C(1) << 25)    /* scores are divided by sqrt(n_rot) */
#define MOEI_ARCH_GROK (UINT64_C(1) << 26)         /* multipliers and a cap of scores by default */
#define MOEI_ARCH_WINDOW (UINT64_C(1) << 27)       /* a window in blocks 0, 2, ... */
#define MOEI_ARCH_WINDOWS (UINT64_C(1) << 32)      /* in every block */
#define MOEI_ARCH_MULTIPLIERS (UINT64_C(1) << 33)  /* of the embedding, residual sums, scores and logits */
#define MOEI_ARCH_CLAMP (UINT64_C(1) << 34)        /* of queries, keys and values */
/* set by a file's sizes */
#define MOEI_ARCH_LOW_QUERY (UINT64_C(1) << 28)    /* latent: queries by way of a low rank */
#define MOEI_ARCH_FULL_QUERY (UINT64_C(1) << 29)   /* latent: or not */
#define MOEI_ARCH_HALVES_B (UINT64_C(1) << 30)     /* latent: attn_k_b and attn_v_b */
#define MOEI_ARCH_WHOLE_B (UINT64_C(1) << 31)      /* latent: attn_kv_b */

/* An architecture: how blocks are made. Its mixtures are rows of moei_families. */
typedef struct moei_arch {
    const char *archs, *types;     /* general.architecture and model_type; "": there are none */
    uint64_t both, gguf, folder;   /* MOEI_ARCH_ of GGUF and folders, of GGUF, of folders */
} moei_arch;

#define MOEI_ARCH_PLAIN (MOEI_ARCH_SEPARATE | MOEI_ARCH_SECOND_FFN)

static const moei_arch moei_archs[] = {
    {"llama", "mixtral", MOEI_ARCH_PLAIN,
     MOEI_ARCH_NEIGHBOURS | MOEI_ARCH_FREQS | MOEI_ARCH_FUSED | MOEI_ARCH_MAY_BIAS, MOEI_ARCH_WINDOWS},
    {"granitemoe", "granitemoe granitemoeshared", MOEI_ARCH_PLAIN | MOEI_ARCH_MULTIPLIERS,
     MOEI_ARCH_NEIGHBOURS | MOEI_ARCH_FREQS | MOEI_ARCH_FUSED, 0},
    {"olmoe", "olmoe", MOEI_ARCH_PLAIN | MOEI_ARCH_WHOLE_NORM, 0, MOEI_ARCH_CLAMP},
    {"qwen2moe", "qwen2_moe", MOEI_ARCH_PLAIN | MOEI_ARCH_BIAS, 0, MOEI_ARCH_DENSE},
    {"qwen3moe", "qwen3_moe", MOEI_ARCH_PLAIN | MOEI_ARCH_HEAD_NORM, 0, MOEI_ARCH_DENSE},
    {"deepseek", "", MOEI_ARCH_PLAIN | MOEI_ARCH_DENSE, MOEI_ARCH_NEIGHBOURS, 0},
    {"deepseek2", "deepseek_v2 deepseek_v3 kimi_k2",
     MOEI_ARCH_LATENT | MOEI_ARCH_SECOND_FFN | MOEI_ARCH_DENSE | MOEI_ARCH_NEIGHBOURS, 0, 0},
    {"gpt-oss", "gpt_oss",
     MOEI_ARCH_SEPARATE | MOEI_ARCH_BIAS | MOEI_ARCH_OUT_BIAS | MOEI_ARCH_SINKS | MOEI_ARCH_WINDOW,
     MOEI_ARCH_SECOND_POST, MOEI_ARCH_SECOND_FFN},
    {"phimoe", "phimoe",
     MOEI_ARCH_PLAIN | MOEI_ARCH_BIAS | MOEI_ARCH_OUT_BIAS | MOEI_ARCH_NORM_BIAS | MOEI_ARCH_HEAD_BIAS,
     MOEI_ARCH_FACTORS, MOEI_ARCH_LAYER_NORM | MOEI_ARCH_WINDOWS},
    {"dots1", "dots1", MOEI_ARCH_PLAIN | MOEI_ARCH_HEAD_NORM | MOEI_ARCH_DENSE, 0, 0},
    {"glm4moe", "glm4_moe",
     MOEI_ARCH_SEPARATE | MOEI_ARCH_MAY_BIAS | MOEI_ARCH_MAY_HEAD_NORM | MOEI_ARCH_DENSE, MOEI_ARCH_SECOND_POST,
     MOEI_ARCH_SECOND_FFN},
    {"ernie4_5-moe", "ernie4_5_moe", MOEI_ARCH_PLAIN | MOEI_ARCH_DENSE | MOEI_ARCH_NEIGHBOURS, 0, 0},
    {"hunyuan-moe", "hunyuan_v1_moe", MOEI_ARCH_PLAIN | MOEI_ARCH_HEAD_NORM | MOEI_ARCH_NORM_AFTER, 0, 0},
    {"bailingmoe", "", MOEI_ARCH_PLAIN | MOEI_ARCH_NEIGHBOURS | MOEI_ARCH_ROT_SCALE, 0, 0},
    {"bailingmoe2", "", MOEI_ARCH_PLAIN | MOEI_ARCH_FUSED | MOEI_ARCH_HEAD_NORM | MOEI_ARCH_DENSE, 0, 0},
    {"lfm2moe", "lfm2_moe",
     MOEI_ARCH_PLAIN | MOEI_ARCH_HEAD_NORM | MOEI_ARCH_DENSE | MOEI_ARCH_CONVOLUTION | MOEI_ARCH_LFM, 0, 0},
    {"minimax-m2", "minimax_m2", MOEI_ARCH_PLAIN | MOEI_ARCH_WHOLE_NORM, 0, 0},
    {"llama4", "llama4 llama4_text",
     MOEI_ARCH_PLAIN | MOEI_ARCH_DENSE | MOEI_ARCH_NEIGHBOURS | MOEI_ARCH_CHUNKS, MOEI_ARCH_FREQS, 0},
    {"dbrx", "",
     MOEI_ARCH_SEPARATE | MOEI_ARCH_FUSED | MOEI_ARCH_LAYER_NORM | MOEI_ARCH_SECOND_ATTN | MOEI_ARCH_CLAMP, 0, 0},
    {"grok", "", MOEI_ARCH_PLAIN | MOEI_ARCH_POST_NORM | MOEI_ARCH_GROK, 0, 0},
    {NULL, NULL, 0, 0, 0}};

/* Places of a model's tensors outside its mixtures. */
enum {
    MOEI_PLACE_EMBEDDING, MOEI_PLACE_NORM, MOEI_PLACE_NORM_BIAS, MOEI_PLACE_HEAD, MOEI_PLACE_HEAD_BIAS,
    MOEI_PLACE_FREQS, MOEI_PLACE_LONG, MOEI_PLACE_SHORT,
    /* of every block */
    MOEI_PLACE_FIRST, MOEI_PLACE_FIRST_BIAS, MOEI_PLACE_SECOND, MOEI_PLACE_SECOND_BIAS, MOEI_PLACE_QUERY,
    MOEI_PLACE_KEY, MOEI_PLACE_VALUE, MOEI_PLACE_OUTPUT, MOEI_PLACE_FUSED, MOEI_PLACE_QUERY_BIAS, MOEI_PLACE_KEY_BIAS,
    MOEI_PLACE_VALUE_BIAS, MOEI_PLACE_FUSED_BIAS, MOEI_PLACE_OUTPUT_BIAS, MOEI_PLACE_QUERY_NORM, MOEI_PLACE_KEY_NORM,
    MOEI_PLACE_SINKS, MOEI_PLACE_QUERY_A, MOEI_PLACE_QUERY_A_NORM, MOEI_PLACE_QUERY_B, MOEI_PLACE_KV_A,
    MOEI_PLACE_KV_A_NORM, MOEI_PLACE_KV_B, MOEI_PLACE_KEY_B, MOEI_PLACE_VALUE_B, MOEI_PLACE_CONVOLUTION,
    MOEI_PLACE_CONVOLUTION_IN, MOEI_PLACE_CONVOLUTION_OUT, MOEI_PLACE_POST_FIRST, MOEI_PLACE_POST_SECOND,
    MOEI_PLACE_GATE, MOEI_PLACE_UP, MOEI_PLACE_DOWN, MOEI_PLACE_IGNORED, MOEI_PLACE_COUNT
};

/* The name of a place. Letters of a shape: V vocabulary, H d_model, h heads, D width of a key, Q all
   queries, K all keys, U all values, O all heads' outputs, T = Q + K + U, r half of n_rot, F width of
   a dense block, L kernel of the convolution, 3 = 3 H; latent: A rank of queries, C of keys and
   values, R = C + n_rot, n and v widths of a head's unrotated key and of its value, N = h (n + v),
   S = h (n + n_rot). */
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
    {MOEI_PLACE_CONVOLUTION, "shortconv.conv.weight", NULL, "HL", MOEI_ARCH_CONVOLUTION, 0},
    {MOEI_PLACE_CONVOLUTION, NULL, "conv.conv.weight", "H1L", MOEI_ARCH_CONVOLUTION, 0},
    {MOEI_PLACE_CONVOLUTION_IN, "shortconv.in_proj.weight", "conv.in_proj.weight", "3H", MOEI_ARCH_CONVOLUTION,
     MOEI_ARCH_CONVOLUTION},
    {MOEI_PLACE_CONVOLUTION_OUT, "shortconv.out_proj.weight", "conv.out_proj.weight", "HH", MOEI_ARCH_CONVOLUTION,
     MOEI_ARCH_CONVOLUTION},
    {MOEI_PLACE_POST_FIRST, "attn_output_norm.weight", NULL, "H", MOEI_ARCH_POST_NORM, MOEI_ARCH_POST_NORM},
    {MOEI_PLACE_POST_SECOND, "layer_output_norm.weight", NULL, "H", MOEI_ARCH_POST_NORM, 0},
    {MOEI_PLACE_POST_SECOND, "post_ffw_norm.weight", NULL, "H", MOEI_ARCH_POST_NORM, 0},
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

/* Sizes and settings of a model; those that differ from block to block are of the block read last. */
typedef struct moei_model {
    const moei_arch *arch;
    uint64_t traits;
    int blocks, d_model, context, heads, kv_heads, key, value, n_rot;
    int original, nextn, window, chunk, kernel, experts, full_blocks;
    int query_rank, kv_rank, key_mla, value_mla, nope, tuning_floor;
    int vocabulary, d_dense; /* of the tensors */
    int is_long;             /* 1: a context longer than that of the training */
    moe_real eps, base, base_window, rotated_part, factor, attention_factor, log_multiplier;
    moe_real beta_fast, beta_slow, mscale, mscale_all, low_freq, high_freq, long_mscale, short_mscale;
    moe_real embedding_scale, residual_scale, attention_scale, logit_scale, clamp, output_scale, score_cap, logit_cap;
    moe_real tuning;
    const moei_import_tensor *places[MOEI_PLACE_FIRST];
    const moei_import_tensor *factors; /* of single rotary pairs; NULL: none */
} moei_model;

/* A setting of a model: keys in GGUF (after "ARCH.") and in config.json, of which the first that
   exists counts. */
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
    MOEI_MODEL_REAL("", "partial_rotary_factor rope_parameters.partial_rotary_factor", rotated_part, 0, 1),
    MOEI_MODEL_INT("expert_count", "", experts, 0, 1048576),
    MOEI_MODEL_INT("", "max_window_layers", full_blocks, 0, 1048576),
    MOEI_MODEL_INT("nextn_predict_layers", "num_nextn_predict_layers", nextn, 0, 1024),
    MOEI_MODEL_INT("attention.sliding_window", "sliding_window", window, 0, 16777216),
    MOEI_MODEL_INT("", "attention_chunk_size", chunk, 0, 16777216),
    MOEI_MODEL_INT("shortconv.l_cache", "conv_L_cache", kernel, 1, 64),
    MOEI_MODEL_INT("attention.q_lora_rank", "q_lora_rank", query_rank, 0, MOE_MAX_WIDTH),
    MOEI_MODEL_INT("attention.kv_lora_rank", "kv_lora_rank", kv_rank, 1, MOE_MAX_WIDTH),
    MOEI_MODEL_INT("attention.key_length_mla", "", key_mla, 1, 65536),
    MOEI_MODEL_INT("attention.value_length_mla", "", value_mla, 1, 65536),
    MOEI_MODEL_INT("", "qk_nope_head_dim", nope, 1, 65536),
    MOEI_MODEL_REAL("attention.layer_norm_rms_epsilon attention.layer_norm_epsilon", "rms_norm_eps norm_eps", eps, 0, 1),
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
    MOEI_MODEL_REAL("", "rope_scaling.long_mscale", long_mscale, 0, 1e6),
    MOEI_MODEL_REAL("", "rope_scaling.short_mscale", short_mscale, 0, 1e6),
    MOEI_MODEL_REAL("embedding_scale", "embedding_multiplier", embedding_scale, -1e6, 1e6),
    MOEI_MODEL_REAL("residual_scale", "residual_multiplier", residual_scale, -1e6, 1e6),
    MOEI_MODEL_REAL("attention.scale", "attention_multiplier", attention_scale, -1e6, 1e6),
    MOEI_MODEL_REAL("logit_scale", "logits_scaling", logit_scale, -1e6, 1e6),
    MOEI_MODEL_REAL("attention.clamp_kqv", "clip_qkv", clamp, 0, 1e6),
    MOEI_MODEL_REAL("attention.output_scale", "", output_scale, -1e6, 1e6),
    MOEI_MODEL_REAL("attn_logit_softcapping", "", score_cap, 0, 1e6),
    MOEI_MODEL_REAL("final_logit_softcapping", "", logit_cap, 0, 1e6),
    MOEI_MODEL_REAL("", "attn_scale", tuning, 0, 1e6),
    MOEI_MODEL_INT("", "floor_scale", tuning_floor, 1, 16777216),
    {NULL, NULL, 0, 0, 0.0, 0.0}};

/* What one block is. */
typedef struct moei_model_block {
    uint64_t traits;
    int is_moe, is_convolution, rotates, qk_plain;
    int window, chunk, tuned;
    const moei_import_tensor *places[MOEI_PLACE_COUNT];
    moe_layer_config mixture;
} moei_model_block;

/* ---- >>model_names ---- */

/* The rest of a tensor's name behind its block's prefix; *block receives the block's number, -1 for
   the model's own tensors. */
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

/* Adds a tensor of the model to the list of all. */
static moe_status moei_model_add(moei_importer *r, const char *name, moei_import_tensor *f) {
    const char *rest = moei_model_rest(r, name, &f->block);
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

/* Whether a row is of the model itself (block -1) or of its blocks. */
static int moei_place_is_of(const moei_place_name *row, int block) {
    return (row->place < MOEI_PLACE_FIRST) == (block < 0);
}

/* The row of a tensor outside the mixtures; NULL: none. */
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

/* Reads a setting from the first of its keys that the file has. *have: it has one. */
static moe_status moei_model_key_read(moei_importer *r, const moei_model_key *row, moei_model *m) {
    const char *keys = r->kind == MOEI_IMPORT_GGUF ? row->gguf : row->folder;
    const char *sources = moei_settings_source(r);
    char key[80], text[MOEI_IMPORT_VALUE];
    moe_real number;
    while (*keys != '\0') {
        size_t n = 0;
        int kind, whole;
        while (keys[n] != '\0' && keys[n] != ' ') n++;
        memcpy(key, keys, n);
        key[n] = '\0';
        keys += n + (keys[n] == ' ');
        kind = moei_import_value(r, key, text);
        if (kind == MOEI_VALUE_NONE) continue;
        if (kind != MOEI_VALUE_SCALAR || !moei_parse_real(text, moei_strlen(text), &number))
            return moei_error(r->error, MOE_ERR_CONFIG, "%s: %s = %s: expected a number", sources, key,
                              kind == MOEI_VALUE_OTHER ? "a list" : text);
        whole = row->is_real || (number >= MOEI_R(-16777216.0) && number <= MOEI_R(16777216.0) &&
                                 !(number < (moe_real)(int)number) && !(number > (moe_real)(int)number));
        if (!whole || !((double)number >= row->least && (double)number <= row->most))
            return moei_error(r->error, MOE_ERR_CONFIG, "%s: %s = %s: must be %s%g to %g", sources, key, text,
                              row->is_real ? "" : "an integer, ", row->least, row->most);
        if (row->is_real) memcpy((unsigned char *)m + row->offset, &number, sizeof number);
        else {
            const int integer = (int)number;
            memcpy((unsigned char *)m + row->offset, &integer, sizeof integer);
        }
        return MOE_OK;
    }
    return MOE_OK;
}

static int moei_model_is_folder(const moei_importer *r) { return r->kind != MOEI_IMPORT_GGUF; }

/* The architecture by general.architecture or model_type. */
static moe_status moei_model_arch(moei_importer *r, moei_model *m) {
    char type[MOEI_IMPORT_VALUE];
    const moei_arch *arch;
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
    if (m->n_rot == 0) m->n_rot = folder && m->rotated_part > MOEI_R(0.0) ? (int)(m->rotated_part * (moe_real)m->key)
                                                                          : m->key;
}

/* Reads the settings that block `block` sees; what the tensors told stays. */
static moe_status moei_model_read(moei_importer *r, moei_model *m, size_t block) {
    const moei_model before = *m;
    const moei_model_key *row;
    moe_status status;
    memset(m, 0, sizeof *m);
    memcpy(m->places, before.places, sizeof m->places);
    m->factors = before.factors;
    m->vocabulary = before.vocabulary;
    m->is_long = before.is_long;
    m->kv_heads = m->window = m->chunk = -1;
    r->block = block;
    status = moei_model_arch(r, m);
    for (row = moei_model_keys; row->gguf != NULL && status == MOE_OK; row++) status = moei_model_key_read(r, row, m);
    if (status != MOE_OK) return status;
    if (m->blocks == 0 || m->d_model == 0 || !(m->eps > MOEI_R(0.0))) {
        const moei_model_key *lacks = moei_model_keys + (m->blocks == 0 ? 0 : 1);
        const char *name = moei_model_is_folder(r) ? lacks->folder : lacks->gguf;
        if (m->blocks != 0 && m->d_model != 0) name = moei_model_is_folder(r) ? "rms_norm_eps" : "attention.layer_norm_rms_epsilon";
        return moei_error(r->error, MOE_ERR_NOT_FOUND, "%s: %s is missing", moei_settings_source(r), name);
    }
    if (m->nextn >= m->blocks && !moei_model_is_folder(r))
        return moei_error(r->error, MOE_ERR_CONFIG, "metadata: nextn_predict_layers = %d: must be less than block_count = %d",
                          m->nextn, m->blocks);
    if (!moei_model_is_folder(r)) m->blocks -= m->nextn;
    moei_model_widths(r, m);
    moei_default_real(&m->base, MOEI_R(10000.0));
    moei_default_real(&m->factor, MOEI_R(1.0));
    if (m->original == 0) m->original = m->context;
    return MOE_OK;
}

/* ---- >>model_blocks ---- */

/* The size that a letter of a place's shape stands for; 0: any. */
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

/* Checks the shape of a tensor outside the mixtures; the vocabulary and the width of a dense block
   come from the first one that has them. */
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

/* Puts a tensor at its place. */
static moe_status moei_place_take(const moei_importer *r, moei_model *m, const moei_place_name *row,
                                  const moei_import_tensor *f, const moei_import_tensor **places) {
    char shown[112];
    moe_status status;
    if (row->place == MOEI_PLACE_IGNORED) return MOE_OK;
    if (places[row->place] != NULL)
        return moei_error(r->error, MOE_ERR_FORMAT, "tensor '%s': duplicates another tensor",
                          moei_model_name(r, f->block, f->suffix, shown));
    status = moei_place_check(r, m, row, f);
    if (status == MOE_OK) places[row->place] = f;
    return status;
}

/* Names a tensor that is missing. */
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

/* The name of a tensor of a mixture, behind the name of the block's part that holds it. */
static const char *moei_model_suffix(const moei_importer *r, const char *rest) {
    static const char *const parts[] = {"mlp.", "block_sparse_moe.", "feed_forward."};
    int i;
    for (i = 0; i < 3 && moei_model_is_folder(r); i++)
        if (moei_import_starts(rest, parts[i])) return rest + moei_strlen(parts[i]);
    return rest;
}

/* What the tensors of a block tell: whether it has a router, a convolution, which form of latent
   attention, one matrix of queries, keys and values. */
static void moei_model_block_traits(const moei_importer *r, const moei_model *m, int block, moei_model_block *b) {
    size_t i, n = moei_import_tensor_count(&r->all);
    int halves = 0, fused = 0;
    memset(b, 0, sizeof *b);
    for (i = 0; i < n; i++) {
        const moei_import_tensor *f = moei_import_tensor_at(&r->all, i);
        if (f->block != block) continue;
        if (moei_import_is_router(r, moei_model_suffix(r, f->suffix))) b->is_moe = 1;
        if (moei_strcmp(f->suffix, "shortconv.in_proj.weight") == 0 || moei_strcmp(f->suffix, "conv.in_proj.weight") == 0)
            b->is_convolution = 1;
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

/* A truth value of config.json; `otherwise` where it is absent. */
static int moei_model_flag(const moei_importer *r, const char *key, int otherwise) {
    char text[MOEI_IMPORT_VALUE];
    if (moei_import_value(r, key, text) != MOEI_VALUE_SCALAR) return otherwise;
    return moei_strcmp(text, "false") != 0 && moei_strcmp(text, "0") != 0;
}

/* Llama 4: blocks see chunks and are rotated, or see everything, are not rotated, and their queries
   grow with the position. */
static void moei_model_block_chunks(const moei_importer *r, const moei_model *m, int by_type, int is_chunked, moei_model_block *b) {
    const int fourth = r->block % 4 == 3, folder = moei_model_is_folder(r);
    b->rotates = folder ? moei_model_flag(r, "no_rope_layers", !fourth) : !fourth || m->window == 0;
    b->tuned = !b->rotates && (!folder || moei_model_flag(r, "attn_temperature_tuning", 1));
    b->qk_plain = b->rotates && (folder ? moei_model_flag(r, "use_qk_norm", 1) : m->experts != 128);
    b->chunk = folder ? (m->chunk > 0 ? m->chunk : 0) : m->window == 0 ? 0 : 8192;
    if (by_type ? !is_chunked : !b->rotates) b->chunk = 0;
}

/* Window, chunk and rotation of a block. */
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
    else if (!by_type && (m->traits & MOEI_ARCH_WINDOWS) != 0) kind = 2;
    else if (!by_type && folder && moei_model_flag(r, "use_sliding_window", 0) && r->block >= (size_t)m->full_blocks)
        kind = 2;
    if (kind == 2 && m->window > 0) b->window = m->window;
    return MOE_OK;
}

/* ---- >>model_attention ---- */

static moe_real moei_ln(moe_real x) { return (moe_real)log((double)x); }

static int moei_is_zero(moe_real x) { return !(x < MOEI_R(0.0)) && !(x > MOEI_R(0.0)); }

/* 1 + 0.1 s ln factor, as yarn's authors and DeepSeek's program compute magnitudes. */
static moe_real moei_yarn_magnitude(moe_real factor, moe_real s) {
    return factor > MOEI_R(1.0) ? MOEI_R(1.0) + MOEI_R(0.1) * s * moei_ln(factor) : MOEI_R(1.0);
}

/* How config.json scales the angles. */
static moe_status moei_folder_rotary(const moei_importer *r, const moei_model *m, moe_attention_config *c) {
    static const char *const keys[] = {"rope_scaling.rope_type", "rope_scaling.type", "rope_parameters.rope_type"};
    char type[MOEI_IMPORT_VALUE];
    int i, kind = MOEI_VALUE_NONE;
    for (i = 0; i < 3 && kind == MOEI_VALUE_NONE; i++) kind = moei_import_value(r, keys[i], type);
    if (kind == MOEI_VALUE_NONE || moei_strcmp(type, "default") == 0) return MOE_OK;
    c->rotary_factor = m->factor;
    if (moei_strcmp(type, "linear") == 0) c->rotary_scaling = MOE_ROTARY_LINEAR;
    else if (moei_strcmp(type, "llama3") == 0) {
        c->rotary_scaling = MOE_ROTARY_LLAMA3;
        c->rotary_length = m->original;
        c->low_factor = m->low_freq;
        c->high_factor = m->high_freq;
    } else if (moei_strcmp(type, "yarn") == 0) {
        c->rotary_scaling = MOE_ROTARY_YARN;
        c->rotary_length = m->original;
        c->beta_fast = m->beta_fast;
        c->beta_slow = m->beta_slow;
        c->no_truncation = !(moei_model_flag(r, "rope_scaling.truncate", 1) &&
                             moei_model_flag(r, "rope_parameters.truncate", 1));
        c->rotary_magnitude = m->attention_factor;
        if (!moei_is_zero(m->mscale) && !moei_is_zero(m->mscale_all))
            moei_default_real(&c->rotary_magnitude,
                              moei_yarn_magnitude(m->factor, m->mscale) / moei_yarn_magnitude(m->factor, m->mscale_all));
        moei_default_real(&c->rotary_magnitude, moei_yarn_magnitude(m->factor, MOEI_R(1.0)));
        if (c->kv_lora > 0 && !moei_is_zero(m->mscale_all))
            c->scale *= moei_yarn_magnitude(m->factor, m->mscale_all) * moei_yarn_magnitude(m->factor, m->mscale_all);
    } else if (moei_strcmp(type, "longrope") == 0 || moei_strcmp(type, "su") == 0) {
        c->rotary_scaling = MOE_ROTARY_FACTORS;
        c->rotary_factor = MOEI_R(0.0);
        c->rotary_magnitude = m->is_long ? m->long_mscale : m->short_mscale;
        moei_default_real(&c->rotary_magnitude, m->attention_factor);
        if (m->original > 0 && m->context > m->original)
            moei_default_real(&c->rotary_magnitude,
                              (moe_real)sqrt(1.0 + log((double)m->context / (double)m->original) / log((double)m->original)));
    } else
        return moei_error(r->error, MOE_ERR_UNSUPPORTED, "config.json: rope_scaling: type '%s' is not supported", type);
    return MOE_OK;
}

/* How llama.cpp scales the angles. Factors of single pairs are divided as linear scaling divides. */
static moe_status moei_gguf_rotary(const moei_importer *r, const moei_model *m, moe_attention_config *c) {
    char type[MOEI_IMPORT_VALUE];
    const int kind = moei_import_value(r, "rope.scaling.type", type);
    const int yarn = kind == MOEI_VALUE_TEXT && moei_strcmp(type, "yarn") == 0;
    const int none = kind == MOEI_VALUE_TEXT && moei_strcmp(type, "none") == 0;
    if (kind != MOEI_VALUE_NONE && !yarn && !none && moei_strcmp(type, "linear") != 0 &&
        moei_strcmp(type, "longrope") != 0)
        return moei_error(r->error, MOE_ERR_UNSUPPORTED, "metadata: rope.scaling.type = %s is not supported",
                          kind == MOEI_VALUE_OTHER ? "a list" : type);
    c->rotary_magnitude = m->attention_factor;
    if (!none) c->rotary_factor = m->factor;
    if (m->factors != NULL) {
        if (yarn)
            return moei_error(r->error, MOE_ERR_UNSUPPORTED, "metadata: rope.scaling.type = yarn is not supported with "
                              "factors of single pairs");
        c->rotary_scaling = MOE_ROTARY_FACTORS;
    } else if (yarn) {
        moei_default_real(&c->rotary_magnitude, MOEI_R(1.0));
        c->rotary_scaling = MOE_ROTARY_YARN;
        c->rotary_length = m->original;
        if ((m->traits & MOEI_ARCH_GROK) != 0) {
            c->beta_fast = m->beta_fast > MOEI_R(0.0) ? m->beta_fast : MOEI_R(8.0);
            c->beta_slow = m->beta_slow;
        }
        if (c->kv_lora == 0) c->rotary_magnitude *= moei_yarn_magnitude(m->factor, MOEI_R(1.0));
    } else if (!none && (m->factor < MOEI_R(1.0) || m->factor > MOEI_R(1.0)))
        c->rotary_scaling = MOE_ROTARY_LINEAR;
    if (c->kv_lora > 0) {
        const moe_real s = MOEI_R(1.0) + m->log_multiplier * moei_ln(m->factor);
        c->scale *= s * s;
    }
    return MOE_OK;
}

/* The scale of scores. */
static moe_real moei_model_block_scale(const moei_model *m) {
    const moe_real width = (moe_real)((m->traits & MOEI_ARCH_ROT_SCALE) != 0 ? m->n_rot : m->key);
    moe_real scale = MOEI_R(0.0);
    if ((m->traits & MOEI_ARCH_MULTIPLIERS) != 0) scale = m->attention_scale;
    if ((m->traits & MOEI_ARCH_GROK) != 0) scale = moei_is_zero(m->output_scale) ? MOEI_R(0.08838834764831845) : m->output_scale;
    return moei_is_zero(scale) ? MOEI_R(1.0) / (moe_real)sqrt((double)width) : scale;
}

/* The attention of a block whose tensors have their places. */
static moe_status moei_model_block_attention(const moei_importer *r, const moei_model *m, const moei_model_block *b,
                                       moe_attention_config *c) {
    moe_status status = MOE_OK;
    memset(c, 0, sizeof *c);
    c->heads = m->heads;
    c->d_head = m->key;
    c->d_value = m->value;
    c->eps = m->eps;
    c->scale = moei_model_block_scale(m);
    c->bias = b->places[MOEI_PLACE_QUERY_BIAS] != NULL || b->places[MOEI_PLACE_FUSED_BIAS] != NULL;
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
    if ((m->traits & MOEI_ARCH_GROK) != 0) c->cap = m->score_cap > MOEI_R(0.0) ? m->score_cap : MOEI_R(30.0);
    if ((m->traits & MOEI_ARCH_CLAMP) != 0) c->clamp = m->clamp;
    if (b->tuned) {
        c->query_floor = m->tuning_floor > 0 ? m->tuning_floor : 8192;
        c->query_growth = m->tuning > MOEI_R(0.0) ? m->tuning : MOEI_R(0.1);
    }
    if (!b->rotates) return MOE_OK;
    c->rotary = 1;
    c->rotary_base = b->window > 0 && m->base_window > MOEI_R(0.0) ? m->base_window : m->base;
    c->rotary_dims = m->n_rot;
    c->rotary_neighbours = (m->traits & MOEI_ARCH_NEIGHBOURS) != 0;
    status = moei_model_is_folder(r) ? moei_folder_rotary(r, m, c) : moei_gguf_rotary(r, m, c);
    if (c->rotary_scaling == MOE_ROTARY_PLAIN || c->rotary_scaling == MOE_ROTARY_FACTORS)
        c->rotary_factor = MOEI_R(0.0);
    return status;
}

/* ---- >>model_check: every tensor has its place ---- */

/* The mixture of a block, from r->found. */
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

/* Finds places for all tensors of a block. Those of its mixture are then in r->found. */
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
    r->found.size = 0;
    m->d_dense = 0;
    for (i = 0; i < n && status == MOE_OK; i++) {
        moei_import_tensor *f = moei_import_tensor_at(&r->all, i);
        const moei_place_name *row;
        if (f->block != block) continue;
        row = moei_place_find(r, b->traits, block, f->suffix);
        if (row != NULL) status = moei_place_take(r, m, row, f, b->places);
        else {
            moei_import_tensor copy = *f;
            status = moei_import_tensor_add(r, &r->found, &copy, moei_model_suffix(r, f->suffix));
        }
    }
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
    return MOE_OK;
}

/* Opens the file and finds places for the tensors outside blocks. */
static moe_status moei_model_open(moei_importer *r, const char *name, moei_model *m) {
    size_t i;
    char shown[112];
    moe_status status;
    memset(m, 0, sizeof *m);
    r->is_model = 1;
    status = moei_import_open(r, name);
    if (status == MOE_OK) status = moei_model_read(r, m, 0);
    if (status == MOE_OK) status = moei_model_collect(r);
    for (i = 0; i < moei_import_tensor_count(&r->all) && status == MOE_OK; i++) {
        const moei_import_tensor *f = moei_import_tensor_at(&r->all, i);
        const moei_place_name *row = f->block < 0 ? moei_place_find(r, m->traits, -1, f->suffix) : NULL;
        if (row != NULL) status = moei_place_take(r, m, row, f, m->places);
        else if (f->block < 0 || (f->block >= m->blocks + m->nextn))
            status = moei_error(r->error, MOE_ERR_UNSUPPORTED, "tensor '%s': %s has no such tensor",
                                moei_model_name(r, f->block, f->suffix, shown),
                                moei_model_is_folder(r) ? m->arch->types : m->arch->archs);
    }
    if (status == MOE_OK) status = moei_places_complete(r, m->traits, -1, m->places);
    if (status != MOE_OK) return status;
    m->factors = m->places[MOEI_PLACE_FREQS];
    if (m->places[MOEI_PLACE_LONG] != NULL || m->places[MOEI_PLACE_SHORT] != NULL)
        m->factors = m->places[m->is_long ? MOEI_PLACE_LONG : MOEI_PLACE_SHORT];
    return MOE_OK;
}

/* Names of files and values in a message come from strangers: what is not UTF-8 or cannot be shown
   becomes a question mark. */
static void moei_import_clean(char *text) {
    const char *next = text;
    uint32_t code;
    for (; *text != '\0'; text += next - text) {
        const int good = moei_next_utf8(&next, NULL, &code);
        if (!good || code < 0x20u || code == 0x7fu) *text = '?';
    }
}

/* "NAME field=value ...", "NAME" or "field=value ...". */
static moe_status moei_import_asked(moei_importer *r, const char *text, moe_error *error) {
    char name[52];
    size_t n = 0;
    r->changes = "";
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

/* Sources in memory as a folder. The first one may have no name. */
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

moe_status moe_import_read(moe_layer *layer, const moe_import_source *sources, size_t n_sources, const char *prefix,
                           const char *preset, const moe_allocator *allocator, moe_error *error) {
    moei_import_sources s;
    moei_import_folder folder;
    if (layer == NULL || sources == NULL || n_sources == 0 || prefix == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "layer, sources or prefix is NULL, or there are no sources");
    s.sources = sources;
    s.n = n_sources;
    folder.ctx = &s;
    folder.open = moei_import_sources_open;
    folder.close = NULL;
    folder.reason = NULL;
    return moei_import_run(layer, &folder, sources[0].name != NULL ? sources[0].name : "the file", prefix, preset,
                               allocator, error);
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

/* An open file and its position. */
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

/* Interprets path as a folder. *name stays NULL if it contains neither file. */
static moe_status moei_import_disk_folder(moei_import_disk *d, const char *path, const char **name, moe_error *error) {
    static const char *const names[2] = {"model.safetensors.index.json", "model.safetensors"};
    moei_text t;
    FILE *f;
    int i, reason;
    for (i = 0; i < 2 && *name == NULL; i++) {
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

/* Splits path into folder and file name. */
static const char *moei_import_disk_split(moei_import_disk *d, const char *path) {
    size_t length = moei_strlen(path);
    while (length > 0 && path[length - 1] != '/' && path[length - 1] != '\\') length--;
    memcpy(d->path, path, length);
    d->path[length] = '\0';
    d->length = length;
    return path + length;
}

static int moei_import_ends(const char *text, const char *with) {
    size_t n = moei_strlen(text), m = moei_strlen(with);
    return n >= m && moei_strcmp(text + n - m, with) == 0;
}

moe_status moe_import_layer(moe_layer *layer, const char *path, const char *prefix, const char *preset,
                            const moe_allocator *allocator, moe_error *error) {
    moei_import_disk disk;
    moei_import_folder folder;
    const char *name = NULL;
    moe_status status = MOE_OK;
    if (layer == NULL || path == NULL || prefix == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "layer, path or prefix is NULL");
    if (moei_strlen(path) + MOEI_IMPORT_NAME + 2 > MOEI_PATH_SIZE)
        return moei_error(error, MOE_ERR_ARGUMENT, "the path is longer than %d bytes",
                          (int)MOEI_PATH_SIZE - (int)MOEI_IMPORT_NAME - 2);
    if (!moei_can_allocate(allocator))
        return moei_error(error, MOE_ERR_ARGUMENT, "allocator is required with MOE_NO_MALLOC");
    memset(&disk, 0, sizeof disk);
    disk.allocator = allocator;
    folder.ctx = &disk;
    folder.open = moei_import_disk_open;
    folder.close = moei_import_disk_close;
    folder.reason = moei_import_disk_reason;
    if (!moei_import_ends(path, ".safetensors") && !moei_import_ends(path, ".gguf") && !moei_import_ends(path, ".json"))
        status = moei_import_disk_folder(&disk, path, &name, error);
    if (status != MOE_OK) return status;
    if (name == NULL) name = moei_import_disk_split(&disk, path);
    if (moei_strlen(name) >= MOEI_IMPORT_NAME)
        return moei_error(error, MOE_ERR_ARGUMENT, "the file name is longer than %d bytes",
                          (int)MOEI_IMPORT_NAME - 1);
    return moei_import_run(layer, &folder, name, prefix, preset, allocator, error);
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

/* Whether files of the family are written with this name. Where a family has both forms, each
   expert gets its own tensors. */
static int moei_is_written(const moei_family *family, const moei_tensor_name *row) {
    return (row->set & family->sets & ~MOEI_SET_FUSED) != 0;
}

/* Checks that layer and family have the same tensors. */
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

/* State of one write. */
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

/* The element type of a tensor: the selection bias is compared with sums of its size, so that
   families keep it in F32 where weights have 16 bits. */
static int moei_import_writer_dtype(const moei_import_writer *w, const moei_tensor_name *row) {
    return row->param == MOE_ROUTER_SELECTION_BIAS && w->dtype > MOE_DTYPE_F32 ? (int)MOE_DTYPE_F32 : w->dtype;
}

/* Adds a tensor to the header. */
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

/* Writes the values of a tensor. */
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
    if (layer == NULL || stream == NULL || stream->write == NULL || prefix == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "layer, stream, its write or prefix is NULL");
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

/* Where byte t of block b of an output lies in its panel. */
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

#ifdef __cplusplus
}
#endif
#endif /* MOE_NO_FLOAT */
#endif /* MOE_IMPLEMENTATION */
