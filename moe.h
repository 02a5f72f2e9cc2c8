/* moe.h - v0.2.0 - mixture of experts: layers, networks, training, files, inference - MIT or public
   domain, see LICENSE

   Mixture-of-experts layers with a forward and a backward pass, networks of them, a trainer, files
   in safetensors, decoding, and inference models for microcontrollers, in C99 without dependencies
   at run time. Routers are in moe_routers.h, matrix products in moe_kernels.h; both are included.

   Contents (search for the tag)
     >>options      what can be set at compile time
     >>glossary     words
     >>manual       how the parts work together
     >>memory       allocators, streams, buffers, whole files
     >>safetensors  tensors; reading and writing the file format
     >>config       the configuration of an MoE layer
     >>layer        an MoE layer: parameters, packed weights, forward, backward, files
     >>network      modules, build, forward
     >>decoding     a sequence token by token; sampling
     >>training     backward, losses, data, trainer, checkpoints, fit, evaluation
     >>network_files  a network's file
     >>inference    models as constants: no heap, no initialization
     >>code         the implementation: >>code_memory, >>code_safetensors, >>code_experts,
                    >>code_config, >>code_parameters, >>code_packed, >>code_forward,
                    >>code_backward, >>code_network, >>code_training, >>code_files,
                    >>code_checkpoints, >>code_fit, >>code_inference

   Recipe
     1. Copy moe.h, moe_routers.h and moe_kernels.h into your project, or the one file that
        `sh amalgamate` prints.
     2. In ONE source file:   #define MOE_IMPLEMENTATION   and then   #include "moe.h"
     3. Everywhere else:      #include "moe.h"       Link with the math library (-lm). There is no
        build system, and no compiler option is needed.
     Where the implementation is compiled, the three files need stb_ds.h (Debian: libstb-dev) unless
     MOE_NO_TRAIN is defined. The one file has it inside.

   First program: a layer of experts learns to double its input, is saved and loaded.
 * --- first program ---
 * #define MOE_IMPLEMENTATION
 * #include "moe.h"
 * #include <stdio.h>
 *
 * int main(void) {
 *     moe_layer_config config = {0}; // 8 experts, 2 per token, swiglu; C++: = {}
 *     moe_net net = {0}, copy = {0};
 *     moe_train_config training = {0}; // AdamW, batches of 32
 *     moe_evaluation result;
 *     moe_data data = {0};
 *     moe_error error;
 *     static moe_real x[512 * 4], target[512 * 4];
 *     moe_rng rng = {1};
 *     int i;
 *     for (i = 0; i < 512 * 4; i++) {
 *         x[i] = moe_rng_normal(&rng);
 *         target[i] = 2 * x[i];
 *     }
 *     data.n = 512;
 *     data.x = x;
 *     data.targets = target;
 *     training.criterion = MOE_CRITERION_SQUARED_ERROR;
 *     training.epochs = 30;
 *     moe_net_init(&net, 4, MOE_KERNELS_AUTO, NULL);
 *     moe_net_mixture(&net, &config);
 *     if (moe_net_build(&net, 1, 42, &error) || moe_fit(&net, &data, NULL, &training, &error) ||
 *         moe_net_save(&net, "first.safetensors", &error) ||
 *         moe_net_load(&copy, "first.safetensors", 0, MOE_KERNELS_AUTO, NULL, &error) ||
 *         moe_evaluate(&copy, &data, MOE_CRITERION_SQUARED_ERROR, &result, &error)) {
 *         puts(error.message);
 *         return 1;
 *     }
 *     printf("mean loss after training, saving and loading: %.4f\n", (double)result.loss);
 *     moe_net_free(&net);
 *     moe_net_free(&copy);
 *     return remove("first.safetensors");
 * }
 * --- end ---

   >>options  Besides those of moe_kernels.h:
     macro             must match in every file?   meaning
     MOE_NO_TRAIN      yes   inference only: no backward pass, no trainer, no writing of files;
                             implies MOE_NO_STDIO and MOE_NO_MALLOC, see there
     MOE_NO_STDIO      yes   no function takes a path; files are read from and written to memory.
                             MOE_STDIO keeps them under MOE_NO_TRAIN
     MOE_NO_MALLOC     no    there is no standard heap: what allocates needs a moe_allocator.
                             MOE_MALLOC keeps it under MOE_NO_TRAIN
     MOE_NO_QUANT      yes   no int8 and int4 weights (see moe_kernels.h)
     MOE_STB_DS_PATH   no    the header's name in quotes, when it is not found as "stb_ds.h" or
                             <stb/stb_ds.h>
   Of the object's 0.6 MB (gcc -O2, x86-64; tests/bench/options.sh measures it), MOE_NO_TRAIN
   saves about a quarter, MOE_NO_QUANT a tenth and MOE_NO_STDIO 1 %. None changes the speed of a
   forward pass.
*/
#include "moe_routers.h"

/* Names of the double build (MOE_REAL=double), so that both builds link into one program. Skip to
   >>glossary. */
#if MOE_REAL_IS_DOUBLE && !defined(moe_infer)
#define moe_arena_allocator moe_arena_allocator_f64
#define moe_buffer_stream moe_buffer_stream_f64
#define moe_buffer_free moe_buffer_free_f64
#define moe_file_read moe_file_read_f64
#define moe_file_replace moe_file_replace_f64
#define moe_file_limit moe_file_limit_f64
#define moe_file_open moe_file_open_f64
#define moe_file_next moe_file_next_f64
#define moe_file_find moe_file_find_f64
#define moe_file_metadata moe_file_metadata_f64
#define moe_file_values moe_file_values_f64
#define moe_file_write moe_file_write_f64
#define moe_layer_fields moe_layer_fields_f64
#define moe_layer_check moe_layer_check_f64
#define moe_layer_preset moe_layer_preset_f64
#define moe_layer_parameter moe_layer_parameter_f64
#define moe_layer_init moe_layer_init_f64
#define moe_layer_create moe_layer_create_f64
#define moe_layer_free moe_layer_free_f64
#define moe_layer_tensor moe_layer_tensor_f64
#define moe_layer_find moe_layer_find_f64
#define moe_layer_parameter_count moe_layer_parameter_count_f64
#define moe_layer_pack moe_layer_pack_f64
#define moe_layer_pack_size moe_layer_pack_size_f64
#define moe_layer_quantize moe_layer_quantize_f64
#define moe_layer_work_size moe_layer_work_size_f64
#define moe_layer_forward moe_layer_forward_f64
#define moe_layer_backward moe_layer_backward_f64
#define moe_layer_backward_experts moe_layer_backward_experts_f64
#define moe_layer_observe moe_layer_observe_f64
#define moe_layer_advance moe_layer_advance_f64
#define moe_net_observe moe_net_observe_f64
#define moe_net_advance moe_net_advance_f64
#define moe_layer_write moe_layer_write_f64
#define moe_layer_save moe_layer_save_f64
#define moe_layer_read moe_layer_read_f64
#define moe_layer_load moe_layer_load_f64
#define moe_cross_entropy moe_cross_entropy_f64
#define moe_evaluate moe_evaluate_f64
#define moe_fit moe_fit_f64
#define moe_net_activation moe_net_activation_f64
#define moe_net_backward moe_net_backward_f64
#define moe_net_build moe_net_build_f64
#define moe_net_find moe_net_find_f64
#define moe_net_forward moe_net_forward_f64
#define moe_net_free moe_net_free_f64
#define moe_net_init moe_net_init_f64
#define moe_net_layer_norm moe_net_layer_norm_f64
#define moe_net_linear moe_net_linear_f64
#define moe_net_load moe_net_load_f64
#define moe_net_mixture moe_net_mixture_f64
#define moe_net_parameter_count moe_net_parameter_count_f64
#define moe_net_read moe_net_read_f64
#define moe_net_residual moe_net_residual_f64
#define moe_net_routing moe_net_routing_f64
#define moe_net_save moe_net_save_f64
#define moe_net_work_size moe_net_work_size_f64
#define moe_net_write moe_net_write_f64
#define moe_squared_error moe_squared_error_f64
#define moe_trainer_free moe_trainer_free_f64
#define moe_trainer_init moe_trainer_init_f64
#define moe_trainer_step moe_trainer_step_f64
#define moe_trainer_accumulate moe_trainer_accumulate_f64
#define moe_trainer_update moe_trainer_update_f64
#define moe_trainer_write moe_trainer_write_f64
#define moe_trainer_read moe_trainer_read_f64
#define moe_trainer_save moe_trainer_save_f64
#define moe_trainer_load moe_trainer_load_f64
#define moe_net_embedding moe_net_embedding_f64
#define moe_net_positions moe_net_positions_f64
#define moe_net_attention moe_net_attention_f64
#define moe_net_rms_norm moe_net_rms_norm_f64
#define moe_net_dropout moe_net_dropout_f64
#define moe_net_feed_forward moe_net_feed_forward_f64
#define moe_net_tied moe_net_tied_f64
#define moe_net_append moe_net_append_f64
#define moe_net_pack moe_net_pack_f64
#define moe_net_pack_size moe_net_pack_size_f64
#define moe_net_quantize moe_net_quantize_f64
#define moe_net_cache_init moe_net_cache_init_f64
#define moe_net_decode_size moe_net_decode_size_f64
#define moe_net_decode moe_net_decode_f64
#define moe_sample moe_sample_f64
#define moe_infer moe_infer_f64
#define moe_infer_levels moe_infer_levels_f64
#define moe_infer_choices moe_infer_choices_f64
#define moei_int_model_run moei_int_model_run_f64
#define moei_int_model_choices moei_int_model_choices_f64
#define moei_float_model_run moei_float_model_run_f64
#define moei_float_model_choices moei_float_model_choices_f64
#define moei_int_op_int8 moei_int_op_int8_f64
#define moei_int_op_int4 moei_int_op_int4_f64
#define moei_int_op_int8_add moei_int_op_int8_add_f64
#define moei_int_op_int4_add moei_int_op_int4_add_f64
#define moei_int_op_int16 moei_int_op_int16_f64
#define moei_int_op_int16_add moei_int_op_int16_add_f64
#define moei_int_op_curve moei_int_op_curve_f64
#define moei_int_op_multiply moei_int_op_multiply_f64
#define moei_int_op_add moei_int_op_add_f64
#define moei_int_op_rescale moei_int_op_rescale_f64
#define moei_int_op_mixture moei_int_op_mixture_f64
#define moei_int_op_row moei_int_op_row_f64
#define moei_int_op_norm moei_int_op_norm_f64
#define moei_int_op_rotate moei_int_op_rotate_f64
#define moei_int_op_attention moei_int_op_attention_f64
#define moei_int_op_unit moei_int_op_unit_f64
#define moei_int_op_cluster moei_int_op_cluster_f64
#define moei_int_op_norm_l1 moei_int_op_norm_l1_f64
#define moei_int_op_norm_l2 moei_int_op_norm_l2_f64
#define moei_int_op_norm_linf moei_int_op_norm_linf_f64
#define moei_int_op_match moei_int_op_match_f64
#define moei_int_op_apply_weight moei_int_op_apply_weight_f64
#define moei_int_op_set_weight moei_int_op_set_weight_f64
#define moei_int_op_accumulate moei_int_op_accumulate_f64
#define moei_int_op_add_rest moei_int_op_add_rest_f64
#endif

/* >>glossary (besides that of moe_routers.h)

     MoE layer    a router and E experts: y_t = sum over e in S_t of w_te f_e(x_t), plus shared
                  experts.
     gather       copying the rows of x that one expert takes next to each other. combine: adding
                  its weighted output rows to y.
     pass         what a forward call leaves in the workspace: the routing for reports, and what the
                  backward pass needs.
     network      a list of modules; net in names.
     trainer      an optimizer and the network that it trains.
     packed       weights in the order in which the kernels read them.
     cache        what decoding keeps of a sequence's earlier tokens, in the caller's memory.
     inference model   a network exported for moe_infer: constants only.
     code         a quantized value of an integer model, an integer: value = code * scale.

   >>manual

   Data flow. x [N,d] -> moe_route -> dispatch plan -> gather by expert -> expert -> weighted
   combine -> y [N,d]. The backward pass runs the other way: dy -> experts (dW, dx, dweight) ->
   router (dW, dx).

   A layer alone.
     moe_layer_config config;  moe_layer layer;  moe_error error;
     moe_layer_preset("mixtral", &config, &error);          or {0}, or any mix of fields
     config.router.d_model = 64;  config.d_ff = 128;
     moe_layer_create(&layer, &config, 1, seed, NULL, &error);   1: with gradients; NULL: the heap
     moe_layer_work_size(&layer, n, 1, &bytes);  work = malloc(bytes);
     moe_call call = {0};  call.n_tokens = n;  call.x = x;  call.training = 1;  call.error = &error;
     moe_layer_forward(&layer, &call, y, work, bytes, &pass);    pass.routing: who went where
     moe_layer_backward(&layer, dy, dx, NULL, &pass);            adds to layer.gradients and dx
     moe_layer_save(&layer, "layer.safetensors", &error);
     moe_layer_free(&layer);
   Weights in flash or in a mapped file: moe_layer_init makes a layer without memory. Set
   layer.tensors[i] for every i for which moe_layer_parameter returns MOE_OK. Nothing is copied, and
   forward allocates nothing.

   Faster inference. moe_layer_pack reorders the weights of all experts once for the kernels;
   the results stay bit-identical.
     moe_layer_pack_size(&layer, MOE_TYPE_REAL, 0, &bytes, NULL);  packed = malloc(bytes);
     moe_layer_pack(&layer, MOE_TYPE_REAL, packed, bytes, &error);
   Then ask for the size of the workspace again and call forward as before. MOE_TYPE_Q8, Q8_BLOCK
   and Q4 quantize the experts to 8 or 4 bits (the router stays as it is), MOE_TYPE_F16 and BF16
   round them to 16-bit floats; moe_layer_quantize does the same and reports the error of every
   expert. Packed weights are not saved. moe_net_pack and moe_net_quantize take a whole network; the
   layer of its module i is net.modules[i].layer.

   Experts are data. Each kind is a row of steps over named activations (low, gate, up, act,
   product, output). A score that reads one of them, such as `norm`, has it computed for all
   experts; the chosen experts continue from there.

   A network. moe_net_init, module calls, moe_net_build. Build returns the error of the first module
   call that failed, so one check is enough. moe_net_find finds a parameter by its name,
   "2.router.weight".

   A language model is a network of token ids (d_in = 0). Here one block with an MoE layer, 256
   tokens, width 64, sequences of up to 128:
     moe_net_init(&net, 0, MOE_KERNELS_AUTO, NULL);
     moe_net_embedding(&net, 256, 64);  moe_net_positions(&net, 128);
     moe_net_rms_norm(&net);  moe_net_attention(&net, NULL);    moe_net_residual(&net, 2);
     moe_net_rms_norm(&net);  moe_net_mixture(&net, &config);   moe_net_residual(&net, 2);
     moe_net_rms_norm(&net);  moe_net_tied(&net);  moe_net_build(&net, 1, seed, &error);
   In a call, token_ids [N] takes the place of x, and sequences says where each begins; y [N,256]
   are the logits of the next tokens. Attention with rotary = 1 needs no positions. A router behind
   attention may refine by it (refine = attention); the network supplies what it reads.

   Decoding continues a sequence from a cache of its earlier tokens:
     moe_net_decode_size(&net, 128, 128, &size, &bytes, &error);  work = malloc(bytes);
     moe_net_cache_init(&cache, &net, 128, malloc(size), size, &error);
     moe_net_decode(&net, &cache, &call, work, bytes, &pass);     the prompt: n_tokens, token_ids
     moe_sample(NULL, 256, pass.y + (n - 1) * 256, ...);          then one token at a time, n = 1

   Training. moe_fit runs a whole training; moe_trainer_step runs one step, for a training loop of
   your own. Both update the routers' state after each step. data.length is the length of the
   sequences that the samples form; negative labels are ignored.
     config.warmup = 100;  config.final_rate = 0.1;     warmup, then cosine decay (or linear)
     moe_param_group groups[] = {{"*.router.*", 0.1, 0, 0}, {"experts.*[3]", 0, 0, 1}};
                                        routers learn slowly, expert 3 is frozen
     config.groups = groups;  config.n_groups = 2;
     config.accumulate = 4;             a step takes the mean gradient of four batches
     config.checkpoint = "run.safetensors";  config.checkpoint_every = 500;  config.resume = 1;
   A training run that is stopped or killed and resumed with the same settings ends with the same
   bits as an uninterrupted one. A training loop of your own calls moe_trainer_accumulate and
   moe_trainer_update, moe_trainer_save and moe_trainer_load.

   The classical mixture of experts. An MoE layer with select = dense and weight = raw as the last
   module; its experts can be small networks. The criteria after the first two use each expert's
   output. They, hierarchical mixtures and modular networks are in examples/extras/moe_classic.h.

   Inference models. examples/extras/moe_export.h converts a trained network to float or integer
   constants and prints them as a C header that firmware includes:
     #define MOE_IMPLEMENTATION
     #define MOE_NO_FLOAT                      integers alone; a float model takes MOE_NO_TRAIN
     #include "digits.h"
     static unsigned char scratch[DIGITS_SCRATCH];
     moe_infer(&digits, NULL, input, output, scratch, sizeof scratch);
     moe_infer_choices(&digits, 0, scratch, choices, room, &count);
   Integer models compute in integers from input to output, so their bits are the same on every
   machine. A value is code * scale, with NAME_INPUT_SCALE and NAME_OUTPUT_SCALE in the header.
   Inputs of matrix products have codes within +-127; residual sums, logits and inputs of norms have
   16 bits. Weights have one scale per output (int4: and one per 32 inputs), as in moe_pack.
   Products are sums of int8 times int8 in 32 bits; activations and gates are curves or powers of
   two in fixed point. A model names the function of every stage in a constant, so a linker with
   --gc-sections keeps only what the model uses. Routers see one token at a time: what
   moe_net_decode_size refuses cannot be exported. Experts outside the address space are read by a
   moe_loader, the chosen ones only. On AVR, constants stay in program memory and must lie in its
   first 64 KiB.

   Files are safetensors, with the configuration as JSON text in the metadata under the key "moe".
   Values are float32 (float64 in the double build), little-endian. Each tensor's checksum is saved
   and compared. Unknown keys of the configuration are refused by name, except those that begin with
   "_". A file may come from a stranger: every length, offset, shape, type and name is checked
   before it is used. A file is replaced by writing beside it, syncing and renaming, so a failed
   save, a kill or a loss of power leaves the old one.

   Several machines. examples/extras/moe_ranks.h distributes the experts of layers and networks over
   processes; config.transport and net.transport belong to it.

   Memory. Objects that own memory take it from a moe_allocator (NULL: the standard heap) and say
   so; forward and backward work in the caller's workspace and allocate nothing. The size of a
   workspace comes from the function that lays it out, so it is exact.
   On Linux, heap blocks of 2 MiB and more request huge pages, which make reading weights faster; do
   the same with memory of your own (MADV_HUGEPAGE).

   Arguments have the same order for layer, network and trainer: the object, the source (path, or
   bytes and size), trainable, kernels, allocator, error.

   Pointers. Every moe_error may be NULL, every moe_allocator (the standard heap) and every
   configuration that documents {0} as a valid default; other arguments and fields may be NULL where
   their comment says so. For other NULL pointers a call that returns moe_status returns
   MOE_ERR_ARGUMENT (moe_layer_parameter does not check), and one that frees does nothing.

   Errors. Every call that can fail returns a moe_status; 0 is success. Calls that check a
   configuration or read a file fill a moe_error; forward, backward and decode fill call.error: one
   line that names the field or byte and the value. A failed call leaves its objects as they were.
   Nothing aborts or prints.

   Determinism. Bitwise, for the same build and kernels: a token's result does not depend on its
   batch (causal routers); a token's experts are added in ascending order; inference and training
   calls give the same y; a loaded model gives the results of the saved one; the same seed gives the
   same model. Different kernels agree within rounding.

   Non-finite numbers. Inputs up to 1e4 in magnitude give finite outputs, losses and gradients of a
   layer with weights as they are initialized. (A gated expert roughly squares its input: in deep
   networks norms keep it small.) Infinities and NaN are not repaired: a router that meets one ends
   the call with MOE_ERR_NONFINITE, the trainer refuses such data, losses and gradients (in a
   network the message names the module where it arose, and its tensor that has one), and elsewhere
   they affect only what is computed from them: their own token's row, and with attention and
   convolution those of later tokens. Files store every value unchanged. Compiler options that break
   IEEE arithmetic (-ffast-math) void these guarantees.

   Threads. There are no globals. Several threads may run inference on one layer or network, each
   with its own workspace; only one thread may train a network. A call distributes the work
   of experts, attention and linear modules over OpenMP's threads if OpenMP is enabled (-fopenmp;
   OMP_NUM_THREADS=1 limits it to one), else over those of call.parallel, a function of the caller's
   that runs tasks. Every thread computes the same number of columns of each expert and owns what it
   writes: no thread waits for a popular expert, and the bits are the same for any number of
   threads. Small calls use one thread.
*/
#ifndef MOE_H
#define MOE_H

#if MOE_VERSION_MAJOR != 0 || MOE_VERSION_MINOR != 2 || MOE_VERSION_PATCH != 0
#error "moe: this is moe.h of version 0.2.0, and moe_kernels.h is of another: copy all headers of one version"
#endif

#ifdef __cplusplus
extern "C" {
#endif

#ifndef MOE_NO_FLOAT
/* ==== >>memory: allocators, streams, buffers, whole files ===================================== */

/* Where objects that own memory allocate it. resize(ctx, NULL, 0, n) allocates, resize(ctx, p, old,
   n) grows or shrinks and keeps the first min(old, n) bytes, resize(ctx, p, old, 0) frees and
   returns NULL. Blocks are aligned as malloc aligns. On failure it returns NULL and leaves the old
   block as it was. A NULL moe_allocator pointer anywhere, or a NULL resize, means the standard
   library's heap (with MOE_NO_MALLOC there is none: MOE_ERR_ARGUMENT). The struct is copied; ctx
   stays the caller's. */
typedef struct moe_allocator {
    void *ctx;
    void *(*resize)(void *ctx, void *block, size_t old_size, size_t new_size);
} moe_allocator;

/* Memory of the caller that is handed out block by block. Only the last block can be freed and
   reused, then the one before it; freeing another block does nothing. {base, size, 0} is a valid
   empty arena. Not thread-safe. */
typedef struct moe_arena {
    void *base;
    size_t size, used;
} moe_arena;

/* An allocator that takes from arena, which must outlive all its users. */
MOE_API moe_allocator moe_arena_allocator(moe_arena *arena);

/* ---- streams ---- */

/* A source or destination of bytes. read fills up to size bytes and stores how many in *got (0 at
   the end); write takes all size bytes; sync makes what was written survive a loss of power, and is
   called after the last byte of a safetensors file. All return MOE_OK or an error, usually
   MOE_ERR_IO. Each may be NULL when it is not needed; without sync nothing is made durable. */
typedef struct moe_stream {
    void *ctx;
    moe_status (*read)(void *ctx, void *to, size_t size, size_t *got);
    moe_status (*write)(void *ctx, const void *from, size_t size);
    moe_status (*sync)(void *ctx);
} moe_stream;

/* Memory that grows as a stream writes to it. {0} is empty. */
typedef struct moe_buffer {
    moe_allocator allocator; /* resize NULL: the standard heap */
    unsigned char *data;     /* owned */
    size_t size, capacity;
    size_t most;             /* the largest size that it may grow to, else MOE_ERR_SPACE [0: no limit] */
} moe_buffer;

/* A stream that appends what is written to buffer; buffer must outlive it. A failed write leaves
   buffer as it was. */
MOE_API moe_stream moe_buffer_stream(moe_buffer *buffer);
/* Frees the buffer's memory and empties it. NULL is allowed. */
MOE_API void moe_buffer_free(moe_buffer *buffer);

#ifndef MOE_NO_STDIO
/* Reads a whole file into buffer, which must be empty. Errors: MOE_ERR_IO (error says which file
   and why; on POSIX systems a device, pipe or socket is refused, as it may never end),
   MOE_ERR_MEMORY, MOE_ERR_SPACE (a file larger than buffer->most). */
MOE_API moe_status moe_file_read(const char *path, moe_buffer *buffer, moe_error *error);
/* Calls write_contents(ctx, stream) on a new file beside path ("path.tmp0", or the next free number
   up to 99), makes it durable and renames it over path; on any failure the file at path is
   unchanged and the new file is removed. If write_contents fails, its status is returned and its
   message in error (if it was given the same one) is kept; other failures are MOE_ERR_IO.
   After a loss of power there is the old file or the new one, whole; after MOE_OK the new one. (On
   POSIX systems the folder is made durable too. If that fails, the new file is already at path, and
   error says so. Of other systems only Windows writes through to the disk.)
   The names path.tmp0 to path.tmp99 belong to this function: files that killed processes left there
   are recognized (no process holds their lock; on Windows: none has them open) and removed.
   POSIX systems: only regular files are replaced, others are refused; the new file gets the
   permissions (read, write, execute) of the old one, and its owner and group where the system
   allows it; without the group, the group gets no permission that others lack. A new file has
   default permissions. Symbolic links stay: the file that they lead to is replaced. Hard links,
   access control lists and extended attributes are not kept. */
MOE_API moe_status moe_file_replace(const char *path, moe_status (*write_contents)(void *ctx, moe_stream *stream),
                                    void *ctx, moe_error *error);
#endif

/* ==== >>safetensors: tensors and the file format ============================================== */

/* The size of a tensor's name, terminator included. */
enum { MOE_NAME_SIZE = 64 };

/* One named parameter: row-major, shape[0] slowest. data and gradient belong to whoever made the
   object. */
typedef struct moe_tensor {
    char name[MOE_NAME_SIZE]; /* "router.weight", in a network "2.router.weight" */
    int n_dims;
    size_t shape[MOE_MAX_DIMS];
    size_t count;        /* product of shape */
    unsigned flags;      /* MOE_PARAM_ bits */
    moe_real *data;      /* [count] */
    moe_real *gradient;  /* [count], or NULL */
} moe_tensor;

/* ---- safetensors ---- */

/* Element types of the format. */
enum {
    MOE_DTYPE_F64 = 0, MOE_DTYPE_F32, MOE_DTYPE_F16, MOE_DTYPE_BF16, MOE_DTYPE_I64, MOE_DTYPE_I32, MOE_DTYPE_I16,
        MOE_DTYPE_I8,
    MOE_DTYPE_U64, MOE_DTYPE_U32, MOE_DTYPE_U16, MOE_DTYPE_U8, MOE_DTYPE_BOOL, MOE_DTYPE_COUNT
};

/* The most dimensions of a tensor in a file. */
enum { MOE_FILE_MAX_DIMS = 8 };

/* The most tensors, and the most metadata entries, that a file may have: it bounds the time that a
   malicious file can cost. */
#define MOE_FILE_MAX_TENSORS (SIZE_MAX > 65535 ? 65536u : 1024u)

/* One tensor of an opened file; everything points into the file's bytes. */
typedef struct moe_file_tensor {
    const char *name;    /* as it stands in the file, JSON escapes included, not terminated */
    size_t name_length;
    int dtype;           /* MOE_DTYPE_ */
    int n_dims;
    size_t shape[MOE_FILE_MAX_DIMS];
    size_t count;        /* product of shape, 1 for a scalar */
    const unsigned char *data; /* little-endian, any alignment */
    size_t bytes;
} moe_file_tensor;

/* A safetensors file in memory. Allocates nothing; bytes stay the caller's and must outlive it.
   Read-only use is thread-safe, except that next moves `at`. */
typedef struct moe_file {
    const unsigned char *bytes;
    size_t size;
    size_t header_size;  /* bytes of JSON after the first 8 */
    size_t n_tensors;
    size_t n_metadata;   /* keys of __metadata__ */
    size_t at;           /* where moe_file_next continues; 0: at the first tensor */
    /* private: where the object __metadata__ lies; 0, 0: there is none */
    size_t metadata_at, metadata_end;
    /* private: 1: the bytes end with the header, and unknown element types are accepted */
    int of_header;
} moe_file;

/* Checks a whole file: header length, JSON, types, shapes, sizes, offsets that cover the data
   without gaps or overlaps, unique names. Errors: MOE_ERR_FORMAT, MOE_ERR_OVERFLOW (a size beyond
   size_t), MOE_ERR_UNSUPPORTED (an unknown dtype, more than MOE_FILE_MAX_DIMS dimensions, too many
   tensors); error names the tensor and the byte. Stricter than the format in three points: U+0000
   in a string, duplicate metadata keys and an unknown key of a tensor are errors. On failure *file
   is untouched. 5 KiB of stack; no recursion. */
MOE_API moe_status moe_file_open(moe_file *file, const void *bytes, size_t size, moe_error *error);

/* What a caller accepts of a file at most, within the library's own limits. 0: only those. */
typedef struct moe_limits {
    size_t size;         /* bytes */
    size_t tensors, metadata; /* at most MOE_FILE_MAX_TENSORS of each in any case */
    size_t modules;      /* of a network; at most MOE_NET_MAX_MODULES in any case */
} moe_limits;

/* Compares an opened file with limits: MOE_ERR_SPACE if it has more, and error names the limit. No
   memory is allocated. modules counts the objects of the configuration that can be modules, so a
   note with braces may count too. For files that are not trusted: moe_file_read with buffer.most,
   moe_file_open, moe_file_limit, then moe_net_read or moe_layer_read with an allocator that gives
   only so much memory. Thread-safe. */
MOE_API moe_status moe_file_limit(const moe_file *file, const moe_limits *limits, moe_error *error);
/* The next tensor in the order of the header; MOE_ERR_NOT_FOUND after the last. file->at = 0 starts
   over. */
MOE_API moe_status moe_file_next(moe_file *file, moe_file_tensor *tensor);
/* The tensor of a name (UTF-8, not escaped); MOE_ERR_NOT_FOUND. Searches the header in linear time.
   Thread-safe. */
MOE_API moe_status moe_file_find(const moe_file *file, const char *name, moe_file_tensor *tensor);
/* The value of a key of __metadata__, unescaped to UTF-8 and terminated, into value[room]; *length
   (may be NULL) gets its length without the terminator. MOE_ERR_NOT_FOUND; MOE_ERR_SPACE when room
   is too small (then *length is still set, so that value NULL, room 0 asks for the size). */
MOE_API moe_status moe_file_metadata(const moe_file *file, const char *key, char *value, size_t room, size_t *length);
/* Converts count elements from first on to floats in values (all types; BOOL gives 0 or 1; an F64
   too large for float becomes infinite) or to int64 in integers (integers and BOOL; MOE_ERR_FORMAT
   for a floating type or a U64 beyond int64): one of the two is NULL, with count = 0 both may be.
   MOE_ERR_SHAPE beyond the end. Thread-safe. */
MOE_API moe_status moe_file_values(const moe_file_tensor *tensor, size_t first, size_t count, moe_real *values,
                                   int64_t *integers);

#ifndef MOE_NO_TRAIN
/* One key and value of the file's metadata, terminated UTF-8. */
typedef struct moe_metadata {
    const char *key, *value;
} moe_metadata;

/* Writes a safetensors file: metadata in the given order, then tensors in the given order, F32 (F64
   in the double build). The same input gives the same bytes. The data section starts at a multiple
   of 8. Names and keys must be valid UTF-8 and unique, a name is not "__metadata__"
   (MOE_ERR_ARGUMENT); count is the product of shape (MOE_ERR_SHAPE). Everything is checked before
   the first write. allocator NULL: the standard heap (for the header only). */
MOE_API moe_status moe_file_write(moe_stream *stream, const moe_tensor *tensors, size_t n_tensors,
                                  const moe_metadata *metadata, size_t n_metadata, const moe_allocator *allocator,
                                  moe_error *error);
#endif

/* ==== >>config: the configuration of an MoE layer ============================================= */

/* Kinds of experts; matrices are [out,in], one block for each of E experts in every tensor:
     swiglu      y = down (silu(gate x) * (up x))
                 (Shazeer 2020, GLU variants improve transformer)
                 experts.gate, .up [E,f,d], .down [E,o,f]
       or, with g = min(gate x + b_g, L) and u = max(-L, min(up x + b_u, L)),
                 y = down (g sigmoid(alpha g) * (u + offset)) + b_d              (gpt-oss, 2025)
                 and experts.gate_bias, .up_bias [E,f], .down_bias [E,o]
     mlp         y = W2 act(W1 x + b1) + b2
                 experts.fc1.weight [E,f,d], .fc1.bias [E,f], .fc2.weight [E,o,f], .fc2.bias [E,o]
     linear      y = W x + b
                 experts.weight [E,o,d], .bias [E,o]
     factorised  y = down (silu(expand (reduce x)) * (up x))                (Lv et al. 2025)
                 experts.reduce [E,l,d], .expand [E,f,l], .up [E,f,d], .down [E,o,f]
     glu         y = down (act(gate x + b_g) * (up x + b_u)) + b_d, biases with expert_bias;
                 tensors as swiglu, which is glu with act = silu               (Shazeer 2020)
   Experts without matrices (router.n_zero, n_copy, n_constant) have no blocks there: only the first
   R of the E experts do. Constant experts have experts.constant [Z,d], the vectors v, and
   experts.constant_gate [Z,2,d], the W of [a1, a2] = softmax(W x). copy and constant need d_out =
   d_model. */
#define MOE_EXPERT_KINDS(X) \
    X(MOE_EXPERT_SWIGLU, "swiglu", MOEI_GATED(MOEI_MAY_HAVE_BIASES | MOEI_HAS_SHAPE)) \
    X(MOE_EXPERT_MLP, "mlp", MOEI_MLP) \
    X(MOE_EXPERT_LINEAR, "linear", MOEI_LINEAR) \
    X(MOE_EXPERT_FACTORISED, "factorised", MOEI_FACTORISED) \
    X(MOE_EXPERT_GLU, "glu", MOEI_GATED(MOEI_MAY_HAVE_BIASES | MOEI_HAS_ACT))
#define MOEI_KIND_VALUE(value, name, ...) value,
enum { MOE_EXPERT_KINDS(MOEI_KIND_VALUE) MOE_EXPERT_COUNT };
/* relu where 0 means another default: moe_layer_config.act of glu experts. */
enum { MOE_ACT_NAMED_RELU = MOE_ACT_COUNT };

/* An MoE layer. {0} with router.d_model set is a valid default: 8 swiglu experts of width 4 d, the
   best 2 per token. 0 in a field means the value in brackets. */
typedef struct moe_layer_config {
    /* how tokens are routed; router.d_model is the layer's input width */
    moe_router_config router;
    int d_out;                /* o, width of the output [d_model] */
    int expert;               /* MOE_EXPERT_ [swiglu] */
    /* f, hidden width of an expert [4 d_model; factorised: swiglu's parameter count at that
       width if o = d_model, m = 0] */
    int d_ff;
    int d_low;                /* l, rows of reduce [(d_model + 2) / 3] */
    /* m, width of the experts' latent space; -k: d_model / k, rounded up. The experts read
       h = W_in x instead of x, and y = W_out (sum w f(h)) (NVIDIA 2025, Nemotron 3: LatentMoE). The
       router and shared experts read x [0: none, the experts read x] */
    int d_latent;
    /* MOE_ACT_ of mlp and glu experts; 0: relu of mlp, silu of glu. relu of glu is
       MOE_ACT_NAMED_RELU, in texts "relu" as for mlp. swiglu and factorised always take silu */
    int act;
    int no_expert_bias;       /* 1: mlp and linear experts have no biases [0] */
    moe_real swiglu_alpha;    /* alpha of swiglu experts, 1e-6 to 1e6 [0: 1] */
    /* L of swiglu experts, 1e-6 to 1e6 [0: none]; the derivative beyond a limit is 0 */
    moe_real swiglu_limit;
    moe_real swiglu_offset;   /* added to u of swiglu experts, -1e6 to 1e6 [0] */
    int expert_bias;          /* 1: swiglu and glu experts have biases [0] */
    /* shared experts: one plain swiglu of width n_shared * d_shared that every token uses [0] */
    int n_shared;
    int d_shared;             /* width of one shared expert [d_ff] */
    int shared_act;           /* MOE_ACT_ of the shared expert instead of silu, as act of glu [silu] */
    /* 1: y = sum w f(x) + (1 - sum w) x, w the weights of the experts that took the token: if the
       weights of all choices sum to 1, x only replaces dropped assignments and tokens without a
       choice; needs d_out = d_model [0] */
    int add_input;
    /* 1: the shared expert is multiplied by sigmoid(shared.sigmoid . x) [0] */
    int shared_sigmoid;
    int kernels;              /* MOE_KERNELS_ [auto]; not saved in files */
    /* expert parallelism over several processes, see examples/extras/moe_ranks.h; not saved in
       files [NULL: all experts are local] */
    const struct moe_transport *transport;
} moe_layer_config;

/* The rows of moe_layer_config, those of its router included; the last has name NULL. Constant,
   thread-safe. */
MOE_API const moe_field *moe_layer_fields(void);
/* Checks a configuration and writes it to *out (may be NULL) with every default filled in.
   MOE_ERR_CONFIG: error names field and value. */
MOE_API moe_status moe_layer_check(const moe_layer_config *config, moe_layer_config *out, moe_error *error);
/* Sets *config to {0} plus a preset of moe_presets: router and kind of experts. Set router.d_model
   and d_ff afterwards. MOE_ERR_NOT_FOUND: no such preset. */
MOE_API moe_status moe_layer_preset(const char *name, moe_layer_config *config, moe_error *error);

/* ==== >>layer: parameters, packed weights, forward, backward, files =========================== */

/* The parameters of experts by index, in the order of files, after those of the router. With
   d_latent the experts' d and o are m. */
#define MOE_EXPERT_PARAMETERS(X) \
    X(MOE_EXPERTS_GATE, "experts.gate")               /* [E,f,d] */ \
    X(MOE_EXPERTS_UP, "experts.up")                   /* [E,f,d] */ \
    X(MOE_EXPERTS_DOWN, "experts.down")               /* [E,o,f] */ \
    X(MOE_EXPERTS_FC1_WEIGHT, "experts.fc1.weight")   /* [E,f,d] */ \
    X(MOE_EXPERTS_FC1_BIAS, "experts.fc1.bias")       /* [E,f] */ \
    X(MOE_EXPERTS_FC2_WEIGHT, "experts.fc2.weight")   /* [E,o,f] */ \
    X(MOE_EXPERTS_FC2_BIAS, "experts.fc2.bias")       /* [E,o] */ \
    X(MOE_EXPERTS_WEIGHT, "experts.weight")           /* [E,o,d] */ \
    X(MOE_EXPERTS_BIAS, "experts.bias")               /* [E,o] */ \
    X(MOE_EXPERTS_REDUCE, "experts.reduce")           /* [E,l,d] */ \
    X(MOE_EXPERTS_EXPAND, "experts.expand")           /* [E,f,l] */ \
    X(MOE_EXPERTS_GATE_BIAS, "experts.gate_bias")     /* [E,f] */ \
    X(MOE_EXPERTS_UP_BIAS, "experts.up_bias")         /* [E,f] */ \
    X(MOE_EXPERTS_DOWN_BIAS, "experts.down_bias")     /* [E,o] */ \
    X(MOE_SHARED_GATE, "shared.gate")                 /* [s,d], s = n_shared d_shared */ \
    X(MOE_SHARED_UP, "shared.up")                     /* [s,d] */ \
    X(MOE_SHARED_DOWN, "shared.down")                 /* [o,s] */ \
    X(MOE_SHARED_SIGMOID, "shared.sigmoid")           /* [d] */ \
    X(MOE_LATENT_IN, "latent.in")                     /* [m,d], m = d_latent */ \
    X(MOE_LATENT_OUT, "latent.out")                   /* [o,m] */ \
    X(MOE_EXPERTS_CONSTANT, "experts.constant")       /* [n_constant,d] */ \
    X(MOE_EXPERTS_CONSTANT_GATE, "experts.constant_gate") /* [n_constant,2,d] */
enum {
    MOEI_BEFORE_EXPERTS = MOE_ROUTER_PARAMETER_COUNT - 1,
    MOE_EXPERT_PARAMETERS(MOEI_VALUE2) MOE_LAYER_PARAMETER_COUNT
};

/* A layer: checked configuration, kernels and pointers to its parameters. Read-only use is
   thread-safe. The parameters are the caller's (init, then set tensors[]; constants in flash are
   fine) or the layer's own (create). */
typedef struct moe_layer {
    moe_layer_config config;  /* with defaults filled in */
    /* its own tensors[] stay empty: the first MOE_ROUTER_PARAMETER_COUNT of the layer's are used */
    moe_router router;
    const moe_kernels *kernels;
    uint64_t present;          /* private: bit i is set when the configuration has parameter i */
    /* by parameter index; NULL where moe_layer_parameter finds none */
    const moe_real *tensors[MOE_LAYER_PARAMETER_COUNT];
    moe_real *gradients[MOE_LAYER_PARAMETER_COUNT];     /* by index; NULL: not wanted */
    /* by index, set by moe_layer_pack: what inference reads instead of the tensor */
    const void *packed[MOE_LAYER_PARAMETER_COUNT];
    int packed_type; /* MOE_TYPE_ of packed */
    /* by index, set by the caller for matrices and biases of experts that lie in another program's
       file and are read there instead of the tensor: [E], one for each expert, else [1]; and for
       router.weight. For inference without a transport. With any but router.weight, packed weights
       are not read; ask for the size of the workspace again */
    const moe_external *external[MOE_LAYER_PARAMETER_COUNT];
    int is_packed; /* 1: moe_layer_pack was called */
    moe_real *memory;         /* owned by the layer if made by create, else NULL */
    size_t memory_size;       /* bytes */
    moe_allocator allocator;
} moe_layer;

/* Describes the parameter of an index in a checked configuration. MOE_ERR_NOT_FOUND: the
   configuration has no such parameter; MOE_ERR_OVERFLOW. */
MOE_API moe_status moe_layer_parameter(const moe_layer_config *config, int index, moe_parameter *out);

/* Checks config and makes a layer without tensors and without memory; set layer->tensors
   (moe_layer_parameter gives the shapes). Errors as moe_layer_check; MOE_ERR_UNSUPPORTED: these
   kernels cannot run here; MOE_ERR_OVERFLOW. On failure *layer is untouched. */
MOE_API moe_status moe_layer_init(moe_layer *layer, const moe_layer_config *config, moe_error *error);
/* Checks config and makes a layer that owns its tensors (moe_layer_free) and, with trainable = 1,
   their gradients, set to 0. The tensors are initialized from a moe_rng seeded with seed, so draw
   data from another seed. allocator NULL: the standard heap. Errors as moe_layer_init, with
   trainable = 1 also as moe_router_check_training; MOE_ERR_MEMORY. On failure *layer is untouched.
   With a transport it is collective, and settings that differ between ranks are MOE_ERR_CONFIG. */
MOE_API moe_status moe_layer_create(moe_layer *layer, const moe_layer_config *config, int trainable, uint64_t seed,
                                    const moe_allocator *allocator, moe_error *error);
/* Frees what create allocated; {0} and a second call are harmless. */
MOE_API void moe_layer_free(moe_layer *layer);
/* Tensor i, from 0, of those that the layer has, in the order of files; MOE_ERR_NOT_FOUND past the
   last. The pointers in *out are the layer's. */
MOE_API moe_status moe_layer_tensor(const moe_layer *layer, size_t i, moe_tensor *out);
/* The same by name ("router.weight"). */
MOE_API moe_status moe_layer_find(const moe_layer *layer, const char *name, moe_tensor *out);
/* The parameter count, and the most parameters that one token uses: all of the router and the
   shared expert, top_k experts (E where a selection has no K, 1 of affinity), and what a score
   reads of all experts. */
MOE_API size_t moe_layer_parameter_count(const moe_layer *layer, size_t *used_per_token);

/* Packs the weights of all experts, the shared one and the matrices of d_latent included, for
   inference: panels of 16 outputs as moe_pack makes them, which the products read once and in
   order. MOE_TYPE_REAL keeps every bit of the results. From then on moe_layer_forward reads the
   packed weights unless call->training or keep = 1; the tensors that they replace (where
   layer->packed is not NULL) may be set to NULL in layer->tensors and freed. When the tensors have
   changed, pack again, and ask for the size of the workspace again, which may differ. memory
   [moe_layer_pack_size] belongs to the caller, stays in use, and may have any alignment (64 is
   best). MOE_ERR_SPACE: size is too small; MOE_ERR_ARGUMENT: a tensor is not set or the type is
   unknown; MOE_ERR_OVERFLOW, MOE_ERR_UNSUPPORTED, MOE_ERR_NONFINITE (quantized types): as moe_pack.
   On failure the layer is unchanged or, if memory holds its present packed weights, no longer
   packed. layer->is_packed = 0 unpacks a layer that still has its tensors; a step of the trainer
   does so. Not thread-safe with other calls on the same layer. */
MOE_API moe_status moe_layer_pack(moe_layer *layer, int type, void *memory, size_t size, moe_error *error);
/* Exact sizes for a type; either may be NULL: *bytes of the packed weights, and *work of the
   workspace in which moe_layer_quantize reports on n_tokens (n_past + n_tokens of its call).
   MOE_ERR_OVERFLOW, MOE_ERR_ARGUMENT; MOE_ERR_UNSUPPORTED: the build has MOE_NO_QUANT. */
MOE_API moe_status moe_layer_pack_size(const moe_layer *layer, int type, size_t n_tokens, size_t *bytes, size_t *work);

/* How far one expert's packed weights are from its tensors. */
typedef struct moe_quant_error {
    /* tokens of the calibration that the router sends to the expert; 0: it was measured on others,
       see moe_layer_quantize */
    size_t rows;
    /* |f_packed(x) - f(x)| / |f(x)|, over all measured tokens and numbers of the output; 0 where
       f(x) is 0 */
    moe_real output;
} moe_quant_error;

/* moe_layer_pack, which needs no data, and then a report: errors[E] from running each expert with
   its tensors and with the packed weights on the tokens of `calibration` that its router sends to
   it (quantized types: activations are quantized too). An expert that receives no token is measured
   on the first real tokens of the batch, at most 64. Soft layers are measured on tokens, not on
   slots, and rows is then N; the shared expert is packed but not measured. calibration is a call
   for inference of at least one token. errors NULL: no report; calibration and work may then be
   NULL too. work [work of moe_layer_pack_size]. Errors are those of moe_layer_pack, on failure as
   there, and moe_layer_forward. */
MOE_API moe_status moe_layer_quantize(moe_layer *layer, int type, void *memory, size_t size,
                                      const moe_call *calibration, void *work, size_t work_size,
                                      moe_quant_error *errors, moe_error *error);

/* What one forward call leaves behind: the routing for reports, and the intermediate values for the
   backward pass. It points into the workspace. */
typedef struct moe_layer_pass {
    moe_routing routing;
    /* After a forward with call->training or keep = 1, the experts' outputs of all assignments in
       the plan's order: [offsets[E],o], rows offsets[e].. are expert e's. For select = dense
       without padding that is [E,N,o]. NULL otherwise, for soft, whose rows are slots, with
       d_latent, and with a transport. */
    const moe_real *expert_outputs;
    /* Private to moe.h. */
    moe_call call;
    const moe_real *x;
    const moe_real *inputs;               /* what the experts read: x, or with d_latent latent[1] */
    /* with d_latent: [N,d] x with zeros for padding, [N,m] W_in x, [N,m] the experts' sum;
       gradients of the second and third, and [N,o] of y with zeros for padding */
    moe_real *latent[3], *d_latent[3];
    /* [rows, width] activations of the plan's assignments: of all experts in training, else reused
       from expert to expert */
    moe_real *node[MOE_NODE_COUNT];
    moe_real *all[MOE_NODE_COUNT];        /* [E,N,width] for scores that read experts */
    /* rows for quantized weights: of x, of the activation that a stage reads */
    unsigned char *quantized[2];
    size_t quantized_size[2];             /* bytes of a row */
    moe_real *rows, *d_rows;              /* [N,d] gathered input of one expert, its gradient */
    moe_real *clean;                      /* [N,d] inputs with zeros for padding */
    moe_real *d_node[MOE_NODE_COUNT], *d_all[MOE_NODE_COUNT];
    moe_real *shared[MOE_NODE_COUNT], *d_shared[MOE_NODE_COUNT], *shared_factor;
    void *route_memory;
    size_t route_size;
    struct moei_ranks *ranks;             /* with a transport */
} moe_layer_pass;

/* Exact bytes of workspace for n_tokens: for forward alone (training = 0) or forward and backward
   (1); those of n_past + n_tokens are enough for a call with n_past. With a transport n_tokens is
   the largest of any rank, and the workspace has room for what all ranks may send to the local
   experts (MOE_ERR_UNSUPPORTED for n_past). MOE_ERR_OVERFLOW. */
MOE_API moe_status moe_layer_work_size(const moe_layer *layer, size_t n_tokens, int training, size_t *bytes);
/* y_t = sum over e in S_t, ascending, of w_te f_e(x_t) + shared(x_t);  y [N,o] is overwritten, must
   not overlap x. Padding gets the shared expert only. work[work_size] has any alignment and stays
   in use until backward is done. Allocates nothing. Errors as moe_route. pass may be NULL if
   neither the routing nor a backward pass is needed. On failure y is unspecified and *pass
   untouched. An expert that computes infinity or NaN for a token is no error: it is in y_t and in
   no other row of y (soft: in all rows that read the slot). With a transport: collective; n_past,
   decoding and batch are MOE_ERR_UNSUPPORTED; MOE_ERR_CONFIG or MOE_ERR_STATE if settings or kinds
   of call differ between ranks. */
MOE_API moe_status moe_layer_forward(const moe_layer *layer, const moe_call *call, moe_real *y, void *work,
                                     size_t work_size, moe_layer_pass *pass);

#ifndef MOE_NO_TRAIN
/* The backward pass of a forward with call->training = 1: dy [N,o] is the gradient of y. Adds to
   layer->gradients, to dx [N,d] and d_router_x [N,d] (either may be NULL; without router_x the
   router's part goes to dx). The router's losses are included. x, router_x and the tensors must be
   as they were in forward. A failure is reported in the error of forward's call, which must still
   exist if there was one. Rows of padding contribute to no gradient, whatever they hold, except to
   a shared expert's. */
MOE_API moe_status moe_layer_backward(const moe_layer *layer, const moe_real *dy, moe_real *dx, moe_real *d_router_x,
                                      moe_layer_pass *pass);
/* The backward pass for a loss of each expert's own output instead of y (moe_classic.h): d_outputs
   [offsets[E],o] and d_weights [offsets[E]] are its gradients with respect to the outputs and the
   weights of the assignments. Otherwise as moe_layer_backward. MOE_ERR_STATE as there and for soft;
   MOE_ERR_UNSUPPORTED: n_shared, add_input, d_latent or apply_to = input, which such a loss does
   not see. */
MOE_API moe_status moe_layer_backward_experts(const moe_layer *layer, const moe_real *d_outputs,
                                              const moe_real *d_weights, moe_real *dx, moe_real *d_router_x,
                                              moe_layer_pass *pass);
/* moe_router_observe and moe_router_advance on the layer's own tensors: after each training pass,
   and once per step of the optimizer. moe_trainer_step calls them. MOE_ERR_STATE: the layer was not
   made with trainable = 1. They do nothing for a layer without state. */
MOE_API moe_status moe_layer_observe(moe_layer *layer, const moe_layer_pass *pass);
MOE_API moe_status moe_layer_advance(moe_layer *layer);
/* Writes configuration and tensors to a safetensors file; moe_layer_load reads it into a new layer
   with tensors of its own. A failed save leaves the old file unchanged, a failed load *layer.
   Errors as moe_file_write; a file's also as moe_file_replace. */
MOE_API moe_status moe_layer_write(const moe_layer *layer, moe_stream *stream, moe_error *error);
#ifndef MOE_NO_STDIO
MOE_API moe_status moe_layer_save(const moe_layer *layer, const char *path, moe_error *error);
#endif
#endif
/* Makes a layer from a file in memory; bytes are not needed afterwards. trainable and allocator as
   in create, kernels as config.kernels. Errors as moe_net_read, a file's also as moe_file_read. */
MOE_API moe_status moe_layer_read(moe_layer *layer, const void *bytes, size_t size, int trainable, int kernels,
                                  const moe_allocator *allocator, moe_error *error);
#ifndef MOE_NO_STDIO
MOE_API moe_status moe_layer_load(moe_layer *layer, const char *path, int trainable, int kernels,
                                  const moe_allocator *allocator, moe_error *error);
#endif

/* ==== >>network: modules, build, forward ====================================================== */

/* Modules and the names of their parameters; I is the module's number, from 0, d the width of its
   input.
     linear        y = W x + b                     "I.weight" [o,d], "I.bias" [o] unless no_bias
     activation    y = act(x)
     layer_norm    y = (x - mean)/sqrt(var + eps) * g + b    "I.weight" [d], "I.bias" [d] unless
                   no_bias
     mixture       a moe_layer                     "I.router.weight", "I.experts.gate", ...
     residual      y = x + the input of the module `span` before it; span = 1 adds the input of the
                   module just before
     embedding     y_t = W[token_ids[t]]           "I.weight" [V,d]; the first module, d_in = 0
     positions     y_t = x_t + P[position of t in its sequence]    "I.weight" [L,d]
     attention     see moe_attention_config, which names its parameters
     rms_norm      y = x / sqrt(mean x^2 + eps) * g    "I.weight" [d]; with bias: + b, "I.bias" [d]
                   (Zhang, Sennrich 2019, Root mean square layer normalization)
     dropout       y = x m / (1 - rate) in training, m = 0 with probability rate, else 1; else y = x
                   (Srivastava et al. 2014, Dropout)
     feed_forward  one expert for every token, without a router    "I.experts.gate" [1,f,d], ... as
                   in moe_layer_config
     tied          y = E x + b, E the weight [V,d] of the network's embedding    "I.bias" [V]
                   unless no_bias
     scale         y = s x, or with a cap c: c tanh(s x / c)
     convolution   [B|C|X] = W_in x; u = B X; z_t = sum over k < L of w[.,k] u_{t-L+1+k}; y = W_out
                   (C z), products of vectors by element, u = 0 before the sequence
                   "I.in" [3 d,d], "I.taps" [d,L], "I.out" [d,d]
                   (Liquid AI 2025, LFM2: short convolutions) */
enum {
    MOE_MODULE_LINEAR = 0, MOE_MODULE_ACTIVATION, MOE_MODULE_LAYER_NORM, MOE_MODULE_MIXTURE, MOE_MODULE_RESIDUAL,
    MOE_MODULE_EMBEDDING, MOE_MODULE_POSITIONS, MOE_MODULE_ATTENTION, MOE_MODULE_RMS_NORM, MOE_MODULE_DROPOUT,
    MOE_MODULE_FEED_FORWARD, MOE_MODULE_TIED, MOE_MODULE_SCALE, MOE_MODULE_CONVOLUTION, MOE_MODULE_COUNT
};
enum { MOE_NET_MAX_MODULES = 4096 };

/* How queries and keys are normalized (x / sqrt(mean x^2 + eps) * g) before the scores. */
#define MOE_QK_NORMS(X) \
    X(MOE_QK_NORM_NONE, "none") \
    /* all heads of a token as one vector; g is as wide */ \
    X(MOE_QK_NORM_WHOLE, "whole") \
    /* each head by itself, the same g [w] for every head */ \
    X(MOE_QK_NORM_HEAD, "head") \
    /* each head by itself, without g */ \
    X(MOE_QK_NORM_PLAIN, "plain")
enum { MOE_QK_NORMS(MOEI_VALUE2) MOE_QK_NORM_COUNT };

/* How the angles of rotary positions are scaled for sequences longer than in training. With n the
   rotary_dims and a_i = position * base^(-2 i / n) the angle of pair i < n / 2, the angle is */
#define MOE_ROTARY_SCALINGS(X) \
    X(MOE_ROTARY_PLAIN, "none") \
    /* a_i / factor (Chen et al. 2023, Extending context window via positional interpolation) */ \
    X(MOE_ROTARY_LINEAR, "linear") \
    /* a_i (1 - r) / factor + a_i r, r = 1 - clamp((i - low) / max(0.001, high - low), 0, 1), \
       low = floor(c(beta_fast)) >= 0, high = ceil(c(beta_slow)) <= n - 1, \
       c(b) = n ln(rotary_length / (2 pi b)) / (2 ln base); no_truncation: without floor and ceil. \
       Magnitude 1 + 0.1 ln factor, at least 1 (Peng et al. 2023, YaRN) */ \
    X(MOE_ROTARY_YARN, "yarn") \
    /* a_i ((1 - s) / factor + s), s = (rotary_length / l_i - low_factor) / (high_factor - \
       low_factor) clamped to 0..1, l_i the wavelength 2 pi base^(2 i / n) (Llama 3.1) */ \
    X(MOE_ROTARY_LLAMA3, "llama3") \
    /* a_i / f_i, f a parameter, "I.rotary_factors" [n / 2], which starts at 1 and is not trained \
       (Ding et al. 2024, LongRoPE) */ \
    X(MOE_ROTARY_FACTORS, "factors")
enum { MOE_ROTARY_SCALINGS(MOEI_VALUE2) MOE_ROTARY_COUNT };

/* Multi-head self-attention within each sequence (Vaswani et al. 2017, Attention is all you need).
   With q, k, v = W x, and w the width of a head of q and k,
     A_h[i,j] = softmax over j of q_hi . k_gj * scale      y_i = output . (sum_j A_0[i,j] v_0j,
       sum_j A_1[i,j] v_1j, ...)
   where g = floor(h K / H) is the head of keys and values that head h of H reads, and j runs over
   the real tokens of i's sequence, j <= i unless full. Padding gets y = 0. q, k and v are computed
   in this order: product and bias, norm (unless norm_after), clamp, rotation, norm (if norm_after).
   Parameters: "I.query" [H w,d], "I.key" [K w,d], "I.value" [K u,d], "I.output" [d,H u], then those
   that fields name. {0} is a valid default: causal. 0 means the value in brackets. */
typedef struct moe_attention_config {
    int heads;            /* H [the largest divisor of d up to d/32 and 4096, at least 1] */
    int d_head;           /* w [d / heads, which must be whole] */
    int full;             /* 1: a token attends to later tokens of its sequence too [0: causal] */
    /* 1: the halves of q and k are rotated by the angles position / base^(2 i / w) (Su et al. 2021,
       RoFormer); rotary_dims is even [0] */
    int rotary;
    moe_real rotary_base; /* [10000] */
    /* K, a divisor of heads (Ainslie et al. 2023, GQA: training generalized multi-query
       transformers) [heads] */
    int kv_heads;
    int d_value;          /* u, width of a head of values [d_head] */
    int bias;             /* 1: "I.query_bias" [H w], "I.key_bias" [K w], "I.value_bias" [K u] [0] */
    int output_bias;      /* 1: "I.output_bias" [d] [0] */
    int qk_norm;          /* MOE_QK_NORM_; "I.query_norm", "I.key_norm" [H w], [K w] or [w] [none] */
    int norm_after;       /* 1: qk_norm comes after the rotation [0: before it] */
    moe_real eps;         /* of qk_norm and of the norms of MLA [1e-5] */
    moe_real scale;       /* of scores [1 / sqrt(w)] */
    moe_real cap;         /* c: scores s become c tanh(s / c) [none] */
    moe_real clamp;       /* q, k and v are clamped to +-clamp [none] */
    /* 1: "I.sinks" [H]: exp(sink_h) is added to the softmax's sum and has no value (OpenAI 2025,
       gpt-oss) [0] */
    int sinks;
    /* token i attends to the last `window` tokens, i included (Beltagy et al. 2020, Longformer)
       [all]; needs full = 0 */
    int window;
    /* token i attends to tokens from i - i mod chunk on (Meta 2025, Llama 4) [all]; needs full =
       0 */
    int chunk;
    /* q is multiplied by 1 + query_growth ln(floor((i + 1) / query_floor) + 1) at position i
       [none]; Llama 4: 8192 and 0.1 */
    int query_floor;
    moe_real query_growth; /* [0.1 if query_floor is set] */
    int rotary_dims;       /* how many dimensions of a head are rotated, the first ones (MLA: the
                              last ones), even [w] */
    int rotary_neighbours; /* 1: pairs are (0,1), (2,3), ... [0: the halves, (0,n/2), ...] */
    int rotary_scaling;    /* MOE_ROTARY_ [none] */
    moe_real rotary_factor; /* factor of linear, yarn and llama3 [1] */
    int rotary_length;      /* yarn and llama3: the context length of pretraining; required there */
    moe_real beta_fast, beta_slow;    /* yarn [32, 1] */
    int no_truncation;                /* yarn [0] */
    moe_real low_factor, high_factor; /* llama3 [1, 4] */
    moe_real rotary_magnitude; /* cos and sin are multiplied by it [yarn: as above; else 1] */
    /* Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2) if kv_lora is not 0. With n = w -
       rotary_dims, c = kv_lora:
         q = query . x, or with q_lora: query . rms_norm(query_down . x); per head [n|rotary_dims]
         [l|p] = latent . x;  l = rms_norm(l);  k_h = [K_h l | rotated p],  v_h = V_h l
       "I.key" [H (n + u),c] has K_h [n,c] and then V_h [u,c] of every head, there is no "I.value";
       "I.latent" [c + rotary_dims,d], "I.latent_norm" [c]; with q_lora "I.query" [H w,q_lora],
       "I.query_down" [q_lora,d], "I.query_norm" [q_lora]. Computed in the absorbed form,
       (K_h^T q_h) . l, so that the cache keeps l and p alone. Needs rotary and rotary_dims;
       kv_heads, bias, qk_norm and clamp must be 0 [0: none] */
    int kv_lora, q_lora;
} moe_attention_config;

/* Indices of the parameters of modules without a moe_layer. */
enum {
    MOE_MODULE_WEIGHT = 0, MOE_MODULE_BIAS = 1,
    /* attention */
    MOE_MODULE_QUERY = 0, MOE_MODULE_KEY = 1, MOE_MODULE_VALUE = 2, MOE_MODULE_OUTPUT = 3,
    MOE_MODULE_QUERY_BIAS = 4, MOE_MODULE_KEY_BIAS = 5, MOE_MODULE_VALUE_BIAS = 6, MOE_MODULE_OUTPUT_BIAS = 7,
    MOE_MODULE_QUERY_NORM = 8, MOE_MODULE_KEY_NORM = 9, MOE_MODULE_SINKS = 10, MOE_MODULE_ROTARY_FACTORS = 11,
    MOE_MODULE_QUERY_DOWN = 12, MOE_MODULE_LATENT = 13, MOE_MODULE_LATENT_NORM = 14,
    /* convolution */
    MOE_MODULE_IN = 0, MOE_MODULE_TAPS = 1, MOE_MODULE_OUT = 2,
    MOE_MODULE_SLOTS = 15
};

/* One module of a network; see the table above. Only the fields of its kind are set. */
typedef struct moe_module {
    int kind;        /* MOE_MODULE_ */
    int d_in, d_out; /* widths */
    int act;         /* activation: MOE_ACT_ */
    int span;        /* residual */
    int n_rows;      /* embedding: V; positions: L */
    int length;      /* convolution: L, 1..64 */
    int no_bias;     /* linear, layer_norm, tied: 1: without "I.bias" */
    int bias;        /* rms_norm: 1: with "I.bias" */
    moe_real eps;    /* layer_norm, rms_norm: 1e-12..1 [1e-5] */
    moe_real scale;  /* scale: s [1] */
    moe_real cap;    /* scale: c [none] */
    moe_real rate;   /* dropout */
    moe_attention_config attention; /* heads and d_head filled in */
    /* mixture and feed_forward; its tensors lie in the network's memory. Other kinds have packed
       (by index; NULL: the tensor is read), packed_type and is_packed alone: see moe_net_pack */
    moe_layer layer;
    /* the other kinds, by index, in the network's memory; tied: MOE_MODULE_WEIGHT is the
       embedding's */
    moe_real *tensors[MOE_MODULE_SLOTS];
    moe_real *gradients[MOE_MODULE_SLOTS]; /* by index; NULL: not built trainable */
    /* [MOE_MODULE_SLOTS] matrices as in layer.external (tied: the embedding's), but not taps,
       positions and the `output` of an attention that a router reads; without a type: the tensor
       has it. NULL: none. For inference only. Of MLA, KEY without VALUE is [H][n + u rows of c];
       with VALUE, KEY is [H][c rows of n], K_h transposed, and VALUE [H][u rows of c] */
    const moe_external *external;
    size_t first_tensor; /* private: where its tensors begin in net.tensors */
} moe_module;

/* A network, made by init, the module calls and build, or by load. It owns its tensors. After build
   the list of modules is fixed. Inference on one network is thread-safe with a workspace per
   thread; training is not. The struct may be moved unless a trainer points to it; a copy shares
   everything, so free only one of them. */
typedef struct moe_net {
    int d_in, d_out;
    size_t n_modules;
    moe_module *modules;  /* owned */
    size_t n_tensors;
    /* owned: every parameter by name, in the order of files; filled by build */
    moe_tensor *tensors;
    int kernels_wanted;   /* MOE_KERNELS_ */
    const moe_kernels *kernels;
    /* expert parallelism over several processes, see examples/extras/moe_ranks.h: the caller's, set
       after init and before the modules [NULL: one process] */
    const struct moe_transport *transport;
    /* for criteria of the classical mixture: the caller's, set after init or loading [NULL:
       none] */
    const struct moe_mixture_losses *mixture_losses;
    /* 1: the caller supplies the tensors' values, from a mapped file for example: build allocates
       none, and before the first call every tensor of modules[i] and of its layer, or its external,
       must be set. Such a network is for inference: it is neither trained nor saved. Set after init
       [0] */
    int external;
    /* the type of keys and values in a cache: MOE_TYPE_REAL, F16, BF16 or Q8_BLOCK; the caller's,
       set before moe_net_decode_size. Only MOE_TYPE_REAL gives the bits of moe_net_forward
       [real] */
    int cache_type;
    /* 1: moe_net_decode computes the last modules that process each token by itself (norms, logits)
       for the call's last token only, and pass.y is [1,d_out]. The caller's, set before
       moe_net_decode_size [0] */
    int last_only;
    moe_allocator allocator;
    moe_real *memory;     /* owned: the tensors' values, then their gradients */
    size_t memory_size;   /* bytes */
    int built, trainable;
    moe_error error;      /* of the first module call that failed; build returns it */
} moe_net;

/* An empty network for inputs of width d_in, 1..MOE_MAX_WIDTH, or 0: it reads token ids, and its
   first module is an embedding. kernels: MOE_KERNELS_, 0: the best available. allocator NULL: the
   standard heap. *net is overwritten, not freed. On failure (MOE_ERR_CONFIG, MOE_ERR_UNSUPPORTED:
   these kernels cannot run here, MOE_ERR_ARGUMENT: no heap) *net is empty and remembers the failure
   in net->error, as module calls do. */
MOE_API moe_status moe_net_init(moe_net *net, int d_in, int kernels, const moe_allocator *allocator);
/* y = W x + b, d_out wide (1..MOE_MAX_WIDTH). This and the next calls, up to moe_net_append, append
   one module each. On failure (MOE_ERR_CONFIG, MOE_ERR_MEMORY, MOE_ERR_OVERFLOW) the list is
   unchanged; net->error keeps the first failure, and later calls only return its code, so it is
   enough to check build. After build they return MOE_ERR_STATE and change nothing. */
MOE_API moe_status moe_net_linear(moe_net *net, int d_out);
/* y = act(x), act one of MOE_ACT_. */
MOE_API moe_status moe_net_activation(moe_net *net, int act);
/* y = (x - mean)/sqrt(var + eps) * g + b, each row by itself. */
MOE_API moe_status moe_net_layer_norm(moe_net *net);
/* An MoE layer. config->router.d_model 0: the width of its input. config->kernels 0: the network's.
   config->transport NULL: the network's; another one is an error. Adaptive clustering takes its
   clusters from the previous MoE layer of the network: MOE_ERR_CONFIG if there is none, if it has
   more experts, or (modes paper, running) another width. The functions of a custom router
   (moe_custom) are set in net->modules[i].layer.router.custom, after loading too. */
MOE_API moe_status moe_net_mixture(moe_net *net, const moe_layer_config *config);
/* y = x + the input of the module `span` modules before, 1..modules so far; both must have the same
   width. */
MOE_API moe_status moe_net_residual(moe_net *net, int span);
/* A row [d] per token id 0..vocabulary-1 (call.token_ids). Only the first module of a network with
   d_in = 0 can be one. Starts normal with standard deviation 1/sqrt(d). */
MOE_API moe_status moe_net_embedding(moe_net *net, int vocabulary, int d);
/* Adds a learned row per position in the sequence, initialized as an embedding's. forward refuses
   sequences of more than `most` tokens: MOE_ERR_ARGUMENT. */
MOE_API moe_status moe_net_positions(moe_net *net, int most);
/* Attention. config NULL: {0}. Later MoE layers whose router refines by attention read its matrices
   A, its heads' outputs o_hj = h output_h v_hj (h the number of heads, output_h the columns of
   `output` for one) and its output y, up to the next attention: their `heads` may be 0, their
   d_model must be the attention's width. These arrays take heads N (N + d) floats of the workspace,
   twice that in training. An MoE layer that refines (similarity or attention) after causal
   attention refines causally: its router.causal becomes 1. */
MOE_API moe_status moe_net_attention(moe_net *net, const moe_attention_config *config);
/* y = x / sqrt(mean x^2 + eps) * g, each row by itself. */
MOE_API moe_status moe_net_rms_norm(moe_net *net);
/* rate in [0,1). Training draws from call.rng, which is required unless rate is 0. */
MOE_API moe_status moe_net_dropout(moe_net *net, moe_real rate);
/* An expert for every token. Of config, expert, d_ff, d_low, act, no_expert_bias, swiglu_... and
   expert_bias are read, all else must be 0; NULL: {0}, a swiglu of width 4 d. */
MOE_API moe_status moe_net_feed_forward(moe_net *net, const moe_layer_config *config);
/* Logits by the embedding's own rows (weight tying; Press, Wolf 2017, Using the output embedding to
   improve language models). The network must begin with an embedding as wide as this module's
   input. */
MOE_API moe_status moe_net_tied(moe_net *net);
/* Appends the module that *module describes by the fields that its kind reads: kind, d_out (linear,
   embedding), act, span, n_rows, length, no_bias, bias, eps, scale, cap, rate, attention,
   layer.config; all other fields are ignored. This is how modules get settings that their calls do
   not take, and the only way to add scale and convolution. Errors as the calls;
   MOE_ERR_ARGUMENT. */
MOE_API moe_status moe_net_append(moe_net *net, const moe_module *module);
/* Names and allocates all tensors (with trainable = 1 their gradients too, set to 0) and
   initializes them from seed: the same seed gives the same bits on every machine. A linear weight
   starts normal with standard deviation 1/sqrt(d_in), sqrt(2) times that before relu, silu or gelu;
   biases 0, gains 1; an MoE layer as moe_layer_create. Errors: that of the first failed call;
   MOE_ERR_CONFIG (no modules; a router that cannot learn: moe_router_check_training); MOE_ERR_STATE
   (built already); MOE_ERR_MEMORY, MOE_ERR_OVERFLOW. On failure the network is unchanged and build
   may be called again. */
MOE_API moe_status moe_net_build(moe_net *net, int trainable, uint64_t seed, moe_error *error);
/* Frees everything and makes *net {0}; {0} and NULL are harmless. */
MOE_API void moe_net_free(moe_net *net);
/* The tensor of a name ("2.router.weight"); the pointers in *out are the network's.
   MOE_ERR_NOT_FOUND (also before build), MOE_ERR_ARGUMENT. */
MOE_API moe_status moe_net_find(const moe_net *net, const char *name, moe_tensor *out);
/* Parameter count (with a transport: of this rank), and how many parameters one token uses
   (may be NULL), as moe_layer_parameter_count counts: one row of an embedding or of positions, all
   of it for tied. 0 before build. */
MOE_API size_t moe_net_parameter_count(const moe_net *net, size_t *used_per_token);

/* What one forward call leaves behind. It points into the workspace, which must stay until backward
   and reports are done. */
typedef struct moe_net_pass {
    size_t n_tokens;
    int training;      /* as in the call */
    const moe_real *y; /* [N,d_out] the network's output */
    /* Private to moe.h. */
    moe_call call;
    size_t past, most; /* decoding: tokens before those of the call, capacity of the cache (else 0) */
    size_t first, total; /* tokens of the ranks before this one, and of all */
    struct moe_module_pass *modules;
    void *scratch;
    moe_real *d_x;
} moe_net_pass;

/* Exact bytes of workspace for n_tokens (with a transport: the largest of any rank): every module
   keeps its output, for residuals and reports, and with training = 1 its gradient. More tokens
   never need less. MOE_ERR_STATE before build, MOE_ERR_OVERFLOW. */
MOE_API moe_status moe_net_work_size(const moe_net *net, size_t n_tokens, int training, size_t *bytes);
/* Runs all modules on call->x [N,d_in], or with d_in = 0 on call->token_ids [N], each below the
   embedding's V; pass->y is the output, in work[work_size] (any alignment). Every MoE layer gets
   the other fields of call as they are: mask, sequences, rng, training, ...; attention and
   convolution read mask and sequences too, positions read sequences. router_x, activations and
   batch must be NULL, n_past 0; attention_* must be NULL too if every router that reads them has an
   attention before it. given and teacher hold those of all MoE layers (soft ones have none) one
   after another. Padding gets y = 0 from attention and convolution; all others but MoE layers
   compute it like any row. Allocates nothing. Errors: MOE_ERR_STATE before build, MOE_ERR_SPACE,
   MOE_ERR_ARGUMENT, else as moe_route; with a transport, where it is collective, MOE_ERR_STATE also
   when training or call.rng differ between ranks. A failed call leaves *pass and rng as they were.
   Thread-safe for different work (with a transport: one thread at a time). Infinities and NaN in x:
   MoE layers and feed_forwards (these in padding too) end the call with MOE_ERR_NONFINITE; in other
   modules they stay in their token's row, and attention and convolution spread them to the tokens
   that read it; all others keep every bit. */
MOE_API moe_status moe_net_forward(const moe_net *net, const moe_call *call, void *work, size_t work_size,
                                   moe_net_pass *pass);
/* moe_layer_pack for the layers of a built network and for the matrices of linear, tied,
   convolution and attention (except those of single heads in MLA), in one block of memory; those in
   other programs' files stay as they are. The tensors of modules other than layers stay set.
   modules[i].layer.is_packed = 0 unpacks any module. Also MOE_ERR_STATE before build. */
MOE_API moe_status moe_net_pack(moe_net *net, int type, void *memory, size_t size, moe_error *error);
/* moe_layer_pack_size for moe_net_pack and moe_net_quantize. MOE_ERR_STATE before build. */
MOE_API moe_status moe_net_pack_size(const moe_net *net, int type, size_t n_tokens, size_t *bytes, size_t *work);
/* moe_net_pack, and then a report on the calibration as of moe_layer_quantize: errors[n_modules]
   compares each module's output in a pass with packed weights to that with the tensors; the last is
   the network's; rows is the number of real tokens. Also the errors of moe_net_forward; if the
   packed pass has one, the network is no longer packed. MOE_ERR_UNSUPPORTED: a report with a
   transport. */
MOE_API moe_status moe_net_quantize(moe_net *net, int type, void *memory, size_t size, const moe_call *calibration,
                                    void *work, size_t work_size, moe_quant_error *errors, moe_error *error);
/* The routing of module i in a pass, or NULL if module i does not exist or is not an MoE layer. */
MOE_API const moe_routing *moe_net_routing(const moe_net *net, const moe_net_pass *pass, size_t i);

/* ==== >>decoding: a sequence token by token =================================================== */

/* What decoding keeps of one sequence's earlier tokens: keys and values of every attention, and
   what causal refinement reads. Lower n_tokens to go back to an earlier position; 0 begins a new
   sequence. Attention with a window or chunk keeps only the last tokens, and a convolution those
   before the last call, even if that failed: where they are gone, decode returns MOE_ERR_STATE. One
   thread at a time. It is not updated when the network's tensors change. */
typedef struct moe_cache {
    const moe_net *net;  /* the caller's, must outlive it */
    size_t n_tokens;     /* tokens so far: the position of the next one */
    size_t most; /* its capacity in tokens */
    /* Private to moe.h. */
    void *memory;
    size_t size;
} moe_cache;

/* Exact sizes for sequences of up to most tokens; either may be NULL: *bytes of a cache, *work of
   the workspace in which moe_net_decode takes up to n_tokens new tokens (n_tokens above most counts
   as most). With both NULL it checks whether the network can decode, before build too. Errors:
   MOE_ERR_UNSUPPORTED (a transport, an attention with full = 1, or a router that
   moe_router_check_decoding refuses: error names the module), MOE_ERR_STATE before build,
   MOE_ERR_OVERFLOW, MOE_ERR_ARGUMENT. */
MOE_API moe_status moe_net_decode_size(const moe_net *net, size_t most, size_t n_tokens, size_t *bytes, size_t *work,
                                       moe_error *error);
/* Makes an empty cache in memory[size] (any alignment). Errors as moe_net_decode_size;
   MOE_ERR_SPACE: size is too small. */
MOE_API moe_status moe_net_cache_init(moe_cache *cache, const moe_net *net, size_t most, void *memory, size_t size,
                                      moe_error *error);
/* Runs the call's tokens as the next ones of the sequence; pass->y [N,d_out] is what
   moe_net_forward on the whole sequence with decoding = 1 gives for them: the same bits for the
   same build and kernels (see net.cache_type and net.last_only). One token or a whole prompt at
   once; modules share memory, so that work is small. call: x or token_ids, n_tokens; training,
   keep, sequences, mask, n_past and the past_ arrays must be 0. Adds n_tokens to cache->n_tokens.
   MOE_ERR_SPACE: no room in the cache or in work; errors of moe_net_forward. On failure the cache
   is unchanged, but a failed call of more than 256 tokens may lose those of a window or chunk. */
MOE_API moe_status moe_net_decode(const moe_net *net, moe_cache *cache, const moe_call *call, void *work,
                                  size_t work_size, moe_net_pass *pass);

/* How the next token is chosen. {0}: drawn from softmax(logits). */
typedef struct moe_sampling {
    int greedy;           /* 1: the largest logit, the first of equals; draws nothing [0] */
    moe_real temperature; /* logits are divided by it, 1e-6 to 1e6 [1] */
    int top_k;            /* only the k largest are kept [0: all] */
    /* of these, renormalized to sum 1, the most probable are kept until their sum reaches p,
       including the one that crosses it (Holtzman et al. 2020, The curious case of neural text
       degeneration) [1] */
    moe_real top_p;
} moe_sampling;

/* *token = one of 0..n-1 by logits [n]. p [n] receives the probabilities it was drawn from (if
   greedy, 1 at the token); order [n] is workspace. Of equal logits the first are kept. how NULL:
   {0}. Draws once from rng (may be NULL if greedy). MOE_ERR_ARGUMENT: NULL, n = 0 or above
   INT32_MAX, rng missing; MOE_ERR_CONFIG: a field out of range; MOE_ERR_NONFINITE: a logit. On
   failure nothing changes. */
MOE_API moe_status moe_sample(const moe_sampling *how, size_t n, const moe_real *logits, moe_rng *rng, moe_real *p,
                              int32_t *order, int32_t *token, moe_error *error);

#ifndef MOE_NO_TRAIN
/* Adds the gradients of sum(y * dy), dy [N,d_out], and of all router losses to the tensors'
   gradients, and that of x to dx [N,d_in] (may be NULL; not touched with d_in = 0). The pass must
   come from a forward with call->training = 1 (else MOE_ERR_STATE, as when the network was not
   built trainable). Not checked: it is of the same network, whose tensors and x are as they were
   then, and no backward has used it. */
MOE_API moe_status moe_net_backward(const moe_net *net, const moe_real *dy, moe_real *dx, moe_net_pass *pass);
/* moe_layer_observe and moe_layer_advance of all MoE layers. MOE_ERR_STATE: not built with
   trainable = 1, or the pass is not one of training. */
MOE_API moe_status moe_net_observe(moe_net *net, const moe_net_pass *pass);
MOE_API moe_status moe_net_advance(moe_net *net);

/* ==== >>training: losses, data, trainer, checkpoints ========================================== */

/* What is minimized: the mean over samples of -log softmax(y)[label], or of sum_j (y_j -
   target_j)^2 / 2. The others are those of the classical mixture (moe_mixture_loss): the network's
   last module is then an MoE layer of all experts, select = dense and weight = raw, whose outputs
   are the answers. The same holds if its expert_temperature is set: then its experts learn with p
   at that temperature, its gate with p (dual temperature). Both need net.mixture_losses =
   moe_classic_losses() of examples/extras/moe_classic.h, else they are MOE_ERR_UNSUPPORTED. */
enum {
    MOE_CRITERION_CROSS_ENTROPY = 0, MOE_CRITERION_SQUARED_ERROR, MOE_CRITERION_EXPECTATION, MOE_CRITERION_STOCHASTIC,
    MOE_CRITERION_STOCHASTIC_SQUARED, MOE_CRITERION_JACOBS, MOE_CRITERION_JACOBS_SQUARED, MOE_CRITERION_COUNT
};

/* n samples, each with the outputs of all E experts. All arrays are the caller's and hold finite
   numbers. */
typedef struct moe_mixture {
    size_t n, experts, width; /* samples, E >= 1, C >= 1 */
    /* [n,E] gate probabilities, >= 0; exactly 0 is fine, a row need not sum to 1 */
    const moe_real *p;
    /* [n,E], or NULL: p. With it the gate learns from the loss with p, the experts from the loss
       with expert_p */
    const moe_real *expert_p;
    const moe_real *outputs;  /* [E,n,C] o, expert by expert */
    const int32_t *labels;    /* [n] in 0..C-1, read by losses over classes */
    const moe_real *targets;  /* [n,C], read by squared losses */
    /* T of cross_entropy, 1e-6 to 1e6 [1]; for the other criteria 0 or 1 */
    moe_real temperature;
} moe_mixture;

/* The losses of a classical mixture and its answers: moe_mixture_loss and moe_mixture_answer of
   moe_classic.h (moe_classic_losses). */
typedef struct moe_mixture_losses {
    moe_status (*loss)(int criterion, const moe_mixture *mixture, moe_real *loss, moe_real *d_p, moe_real *d_outputs,
                       moe_error *error);
    moe_status (*answer)(int criterion, const moe_mixture *mixture, moe_rng *rng, moe_real *answer, moe_error *error);
} moe_mixture_losses;

/* Mean over the labeled rows of y [n,classes] of -log softmax(y)[label]; dy [n,classes] (may be
   NULL, must not be y) receives its gradient. Labels are in 0..classes-1 (not checked here);
   negative labels are ignored, and their rows get dy = 0. 0 without labeled rows. NaN or +inf in a
   labeled row makes the loss and that row of dy infinite or NaN, -inf at its label only the
   loss. */
MOE_API moe_real moe_cross_entropy(size_t n, size_t classes, const moe_real *y, const int32_t *labels, moe_real *dy);
/* Mean over n rows of sum_j (y_j - target_j)^2 / 2, y and targets [n,width]; dy [n,width] (may be
   NULL or y) receives its gradient, element by element. The loss is infinite if a square
   overflows. */
MOE_API moe_real moe_squared_error(size_t n, size_t width, const moe_real *y, const moe_real *targets, moe_real *dy);

/* adamw: Loshchilov, Hutter 2019, Decoupled weight decay regularization. sgd: v = momentum v + g, w
   -= rate v, decay added to g. */
enum { MOE_OPTIMIZER_ADAMW = 0, MOE_OPTIMIZER_SGD, MOE_OPTIMIZER_COUNT };

/* Samples; all arrays are the caller's. */
typedef struct moe_data {
    size_t n;                /* samples */
    const moe_real *x;       /* [n,d_in] */
    /* [n] for cross-entropy; negative labels are ignored, except by moe_mixture_loss, which refuses
       them */
    const int32_t *labels;
    const moe_real *targets; /* [n,d_out] for squared error */
    /* moe_trainer_step: other inputs of routers (token_ids, sequences, given, teacher,
       attention_weights, ...) for these n rows; its n_tokens, x, training and rng are ignored.
       Rows with mask = 0 count in the criterion: give them a negative label. NULL: none. It must be
       NULL for moe_fit and moe_evaluate */
    const moe_call *call;
    /* [n] for networks with d_in = 0, which read no x, and for hash routers; those of call take
       precedence */
    const int32_t *token_ids;
    /* samples form consecutive sequences of this length; n, and for moe_fit config.batch, is a
       multiple of it. moe_fit and moe_evaluate then split and shuffle whole sequences, and routers
       see them unless call has others. [0: samples are split and shuffled one by one, and each call
       is one sequence; moe_fit and moe_evaluate refuse 0 with attention, positions or
       convolution] */
    size_t length;
} moe_data;

/* How good a network is on some samples. */
typedef struct moe_evaluation {
    size_t n;          /* samples that count: those with a label */
    moe_real loss;     /* mean of the criterion; exp(loss) is the perplexity of a language model */
    /* fraction of samples whose largest output is at their label; 0 for squared error */
    moe_real accuracy;
} moe_evaluation;

/* Handed to the progress callback after every step of the optimizer. */
typedef struct moe_progress {
    int epoch, epochs;          /* from 1 */
    size_t step, steps;         /* from 1, within the epoch */
    moe_real loss;              /* mean criterion of this epoch so far */
    moe_real router_loss;       /* sum of the router losses, mean of this epoch so far */
    moe_real gradient_norm;     /* of this step, before clipping */
    int epoch_ended;            /* 1 after the last step of an epoch */
    /* filled in at the end of an epoch and every evaluate_every steps, if there is a test set; n =
       0: none */
    moe_evaluation test;
    moe_real rate;              /* of this step */
    /* over all epochs, from 1; including those before a resume */
    uint64_t total_step, total_steps;
    /* processed in this call of moe_fit: for tokens per second and the time left */
    uint64_t samples;
} moe_progress;

/* The learning rate of step s = 0, 1, ... of T = total_steps, of which W = warmup, with f =
   final_rate:
     rate (s + 1) / (W + 1) for s < W, then rate (f + (1 - f) g(a)), a = (s - W) / (T - 1 - W) up to
     1, where it stays (0 / 0: 0)
     cosine  g(a) = (1 + cos(pi a)) / 2           linear  g(a) = 1 - a */
enum { MOE_SCHEDULE_COSINE = 0, MOE_SCHEDULE_LINEAR, MOE_SCHEDULE_COUNT };

/* Settings for some tensors or for rows of them. A pattern matches the name of a tensor, with or
   without its module's number. A pattern that ends in [e] or [a:b] is for row e, or rows a to b -
   1, of each tensor that it matches, and a row of experts.* is an expert. The last group that
   matches a row applies. A pattern that matches no tensor with such rows is MOE_ERR_CONFIG. */
typedef struct moe_param_group {
    /* "*.router.*", "0.weight", "experts.*[3]", "2.experts.up[0:4]": * stands for any characters */
    const char *pattern;
    moe_real rate;       /* factor on the learning rate, up to 1e6 [1] */
    /* factor on the weight decay, 0 to 1e6; if set, biases and gains are decayed too [1, but 0 for
       biases and gains]; negative: no decay */
    moe_real decay;
    /* 1: not trained, and not part of the gradient's norm: values and moments keep their bits */
    int frozen;
} moe_param_group;

/* {0} is a valid default: AdamW at 0.001, batches of 32, 10 epochs. 0 in a field means the value in
   brackets. */
typedef struct moe_train_config {
    int criterion;           /* MOE_CRITERION_ [cross entropy] */
    int optimizer;           /* MOE_OPTIMIZER_ [adamw] */
    int epochs;              /* [10] */
    int batch;               /* samples per batch; a step takes `accumulate` batches [32] */
    moe_real rate;           /* learning rate [0.001; sgd 0.01] */
    moe_real final_rate;     /* last learning rate as a fraction of rate, see schedule [1: constant] */
    moe_real momentum;       /* of sgd, -1 to 0.999999 [0.9]; negative: none */
    moe_real beta1, beta2;   /* adamw [0.9, 0.999] */
    moe_real epsilon;        /* adamw [1e-8] */
    moe_real decay;          /* weight decay [0] */
    /* maximum norm of the gradient of all tensors together [0: no clipping] */
    moe_real clip;
    uint64_t seed;           /* order of the samples and random stages of routers */
    /* may be NULL; a result other than 0 stops training */
    int (*progress)(void *ctx, const moe_progress *progress);
    void *progress_ctx;
    /* moe_fit: batches per step, which uses their mean gradient; the last step of an epoch may have
       fewer [1] */
    int accumulate;
    int schedule;            /* MOE_SCHEDULE_ of final_rate [cosine] */
    /* steps in which the learning rate rises linearly to its full value; a trainer needs
       total_steps for it [0] */
    int warmup;
    /* steps of the schedule [moe_fit: all of its steps; a trainer of your own: no schedule, a
       constant rate] */
    int total_steps;
    const moe_param_group *groups; /* [n_groups] the caller's, read by init (and moe_fit) only */
    int n_groups;            /* up to 4096 */
    /* moe_fit: steps between evaluations on test [0: at the end of each epoch only] */
    int evaluate_every;
    /* moe_fit: file of the checkpoint, replaced every checkpoint_every steps, at the end, and when
       progress stops training; NULL: none */
    const char *checkpoint;
    int checkpoint_every;    /* [0: at the end of each epoch] */
    /* 1: moe_fit resumes from the checkpoint if the file exists; the network gets the checkpoint's
       values */
    int resume;
} moe_train_config;

/* An optimizer of one network. It owns its moments and workspace (moe_trainer_free). */
typedef struct moe_trainer {
    moe_net *net;
    moe_train_config config; /* with defaults filled in */
    uint64_t steps;          /* taken so far */
    moe_rng rng;
    /* of the next step; with total_steps the schedule sets it again after each step */
    moe_real rate;
    uint64_t total_steps;    /* of the schedule; 0: there is none */
    int n_accumulated;       /* batches since the last step */
    /* the caller's: its position in the data, saved in checkpoints. moe_fit stores the number of
       completed epochs, the steps in this one, and the bits of its two sums of losses */
    uint64_t position[4];
    moe_real *memory;        /* owned: two moments (sgd: one) per parameter, then the factors */
    size_t memory_size;
    /* private: factor on the rate and weight decay of every row of every tensor */
    moe_real *factors;
    void *work;              /* owned: for one batch */
    size_t work_size;
    size_t most;             /* private: the most samples of a batch on this rank */
} moe_trainer;

/* The results of one step. */
typedef struct moe_step {
    moe_real loss;          /* criterion, mean over the batch, before the step */
    moe_real router_loss;   /* sum of all router losses */
    moe_real gradient_norm; /* of all trained tensors, before clipping */
} moe_step;

/* Checks config (NULL: {0}) and makes a trainer for net, which must outlive it and must not be
   moved. MOE_ERR_STATE: net is not built with trainable = 1. MOE_ERR_CONFIG: a field is out of
   range. MOE_ERR_MEMORY, MOE_ERR_OVERFLOW. On failure *trainer is untouched. */
MOE_API moe_status moe_trainer_init(moe_trainer *trainer, moe_net *net, const moe_train_config *config,
                                    moe_error *error);
/* One step on 1..config.batch samples (with a transport 0 or more, at least one on some rank):
   gradients to 0, forward, loss, backward, clip, state of the routers, optimizer. Tensors frozen by
   MOE_PARAM_FROZEN, a group or freeze_at do not change; biases and gains are not decayed. Data is
   checked first: MOE_ERR_ARGUMENT (error names the row and the label, or the router that needs more
   than x and what batch->call lacks), MOE_ERR_NONFINITE (x or a target). MOE_ERR_NONFINITE also
   when loss or gradient is not finite, or the gradient's norm is beyond 1e19 (1e150 in the double
   build). On failure only the gradients change. A weight that is not finite fails the next step
   that uses it. step may be NULL. Allocates nothing. */
MOE_API moe_status moe_trainer_step(moe_trainer *trainer, const moe_data *batch, moe_step *step, moe_error *error);
/* The two halves of a step, for steps of several batches: accumulate runs forward and backward,
   adds the gradients to those since the last update and updates the routers' statistics
   (moe_net_observe); update takes a step with the mean gradient and advances the routers' state.
   moe_trainer_step is both. accumulate sets loss and router_loss of *step, for this batch; update
   sets gradient_norm, that of the mean gradient. Errors as moe_trainer_step. Refused data change
   nothing; if accumulate fails later, the batches since the last update are lost: n_accumulated is
   0 (the routers' statistics keep them). update: MOE_ERR_STATE without a batch; a failed one
   changes nothing (with a transport the batches are lost where it fails after the ranks' gradients
   were added). */
MOE_API moe_status moe_trainer_accumulate(moe_trainer *trainer, const moe_data *batch, moe_step *step,
                                          moe_error *error);
MOE_API moe_status moe_trainer_update(moe_trainer *trainer, moe_step *step, moe_error *error);
/* A checkpoint: the network's file, and in it the optimizer's moments ("trainer.first" and, of
   adamw, "trainer.second": one number per parameter, in the order of the network's tensors), and
   under the metadata key "moe.trainer" steps, random state, rate and position. moe_net_read reads
   it as a network. Between steps only: MOE_ERR_STATE while batches are accumulated.
   MOE_ERR_ARGUMENT: rate is not finite. Training resumed from it has the same bits as uninterrupted
   training. */
MOE_API moe_status moe_trainer_write(const moe_trainer *trainer, moe_stream *stream, moe_error *error);
/* Sets a trainer, made for a network of the same modules with the same optimizer, and its network
   to a checkpoint; the trainer keeps the rest of its config, including the schedule, which sets the
   rate again. Any number of ranks may have written the checkpoint. Accumulated batches are dropped.
   The file need not be trusted; errors as moe_net_read, and MOE_ERR_CONFIG: other modules or
   another optimizer. On failure both are unchanged. */
MOE_API moe_status moe_trainer_read(moe_trainer *trainer, const void *bytes, size_t size, moe_error *error);
#ifndef MOE_NO_STDIO
/* The same with a file; a failed save leaves the old one unchanged (moe_file_replace). */
MOE_API moe_status moe_trainer_save(const moe_trainer *trainer, const char *path, moe_error *error);
MOE_API moe_status moe_trainer_load(moe_trainer *trainer, const char *path, moe_error *error);
#endif
/* Frees what init allocated, but not the network. {0}, NULL and a second call are harmless. */
MOE_API void moe_trainer_free(moe_trainer *trainer);

/* Trains net on train for config.epochs, in a new random order each epoch, and evaluates on test
   (NULL or n = 0: none) after each. All data is checked and all memory allocated before the first
   step; errors are those of trainer_init and trainer_step. A failure in the middle
   (MOE_ERR_NONFINITE when training diverges: error begins with "epoch E, step S: ", the step that
   failed, or after which the evaluation on test failed), or MOE_ERR_STOPPED when the callback stops
   it, leaves the network with what it has learned, and the last checkpoint that was written. The
   same seed gives the same bits: the order of the samples comes from config.seed, random stages of
   routers from a separate stream derived from it. With config.checkpoint the training can be
   stopped or killed at any time and resumed with the same bits, those of progress included. A
   resumed training needs the same modules, optimizer, n, length, batch, accumulate and seed
   (MOE_ERR_CONFIG names what differs); a finished one continues if epochs is raised, else there is
   nothing left to do; the number of ranks may differ, which changes the rounding only. With a
   transport every rank reads the checkpoint (MOE_ERR_CONFIG if some ranks lack it), and rank 0
   writes it. A checkpoint that cannot be written ends training: MOE_ERR_IO, or MOE_ERR_MEMORY, as
   it allocates; the previous file is kept. MOE_ERR_UNSUPPORTED: a checkpoint with MOE_NO_STDIO. */
MOE_API moe_status moe_fit(moe_net *net, const moe_data *train, const moe_data *test, const moe_train_config *config,
                           moe_error *error);
/* Loss and accuracy of net on data, 64 samples at a time (data->length > 0: as many whole sequences
   as fit into 512 samples and soft_sequences, at least one; with a transport each rank evaluates
   its part of them), with training = 0. Data is checked as in a step; MOE_ERR_NONFINITE also when
   an output or the loss is not finite. n = 0 gives zeros. On failure *result is untouched. */
MOE_API moe_status moe_evaluate(const moe_net *net, const moe_data *data, int criterion, moe_evaluation *result,
                                moe_error *error);

/* ==== >>network_files ========================================================================= */

/* Writes a safetensors file: all tensors by name, and under the metadata key "moe" the
   configuration as JSON text,
     {"format":2,"net":{"d_in":64,"modules":[{"module":"linear","d_out":32},
      {"module":"activation","act":"relu"},{"module":"layer_norm"},
      {"module":"mixture","d_model":32,"n_experts":8,"score":"cosine"},
      {"module":"residual","span":1}]}}
   where a mixture has the fields of moe_layer_fields that are not 0, without kernels. (A layer
   alone: {"format":2,"layer":{"d_model":...}}.) The same network gives the same bytes. The metadata
   "moe.crc32" has the CRC-32 (zlib's) of each tensor's bytes, as eight hexadecimal digits, in the
   order of net.tensors; reading compares them. A program that changes tensors drops the key: files
   without it, as 0.1 wrote them, are read too.
   MOE_ERR_STATE before build; else the errors of moe_file_write. */
MOE_API moe_status moe_net_write(const moe_net *net, moe_stream *stream, moe_error *error);
#ifndef MOE_NO_STDIO
/* The same to a file, by moe_file_replace: a failed save leaves the old file unchanged. */
MOE_API moe_status moe_net_save(const moe_net *net, const char *path, moe_error *error);
#endif
#endif /* MOE_NO_TRAIN */

/* Makes a network from a file in memory; bytes are not needed afterwards. trainable, kernels and
   allocator as in build and init. Numbers of any type are converted; infinities and NaN are kept.
   The file need not be trusted: names and shapes are compared with the configuration before memory
   for tensors is allocated, so n bytes cost at most (1 + 2 sizeof(moe_real)) n bytes of memory and
   12 KiB for each module and for 8 more; n bytes describe n / 22 modules at most. Errors: those of
   moe_file_open and of the module calls; MOE_ERR_FORMAT (no configuration, or it is malformed, or
   that of a layer; a tensor whose checksum differs), MOE_ERR_UNSUPPORTED (another format; an
   unknown key, unless it begins with "_"; an unknown tensor, unless its name begins with
   "trainer.", as in a checkpoint), MOE_ERR_NOT_FOUND (a missing tensor), MOE_ERR_SHAPE; error names
   it. On failure *net is untouched. */
MOE_API moe_status moe_net_read(moe_net *net, const void *bytes, size_t size, int trainable, int kernels,
                                const moe_allocator *allocator, moe_error *error);
#ifndef MOE_NO_STDIO
/* The same from a file; also the errors of moe_file_read. */
MOE_API moe_status moe_net_load(moe_net *net, const char *path, int trainable, int kernels,
                                const moe_allocator *allocator, moe_error *error);
#endif

#endif /* MOE_NO_FLOAT */

/* ==== >>inference: models as constants: no heap, no initialization ============================ */

/* How a model stores its weights and computes. FLOAT: in floating point, as the network. INT8,
   INT4: integers of 8 or 4 bits and no floating point in moe_infer: the same bits on every
   machine. */
enum { MOE_WEIGHTS_FLOAT = 0, MOE_WEIGHTS_INT8, MOE_WEIGHTS_INT4, MOE_WEIGHTS_COUNT };

struct moe_net;
struct moei_int_run;
struct moe_choice;

/* Reads experts' weights from outside the address space (serial flash, a card): copies size bytes,
   from offset `at` of the bytes that moe_export_experts wrote, to `to`. If it returns another
   status than MOE_OK, moe_infer ends and returns it. */
typedef struct moe_loader {
    void *ctx;
    moe_status (*fetch)(void *ctx, size_t at, size_t size, void *to);
} moe_loader;

/* An MoE layer: the operations that compute the logits z, the router, the operations of one expert,
   which run for each chosen expert in ascending order and add to sum, and those of the shared
   expert. Operations are indices into the model's list; offsets count int16 from the start of the
   vectors. */
typedef struct moei_int_mixture {
    moei_int_router router;
    uint32_t score, n_score;    /* operations */
    uint32_t expert, n_expert;
    uint32_t shared, n_shared;
    /* block of expert 0 in the model's experts, and bytes of a block, a multiple of 4 */
    uint32_t experts, stride;
    /* logits int16 [E]; gate int32 [E]; sum of the experts int32 [d_out] */
    uint32_t z, p, sum;
    /* int16: the number of choices, the experts in order of choice [router.most], their weights
       [router.most] */
    uint32_t choices;
    uint32_t block;             /* buffer for one block; MOEI_INT_NONE: experts are read in place */
    int16_t weight_bits;        /* a weight is code * 2^(weight_bits - 15) */
    /* experts without matrices: zero experts from `zeros` on, copies from `copies` on, whose
       operations are the same, constant ones from `constants` on, with n_constant operations each,
       one expert after the other; their constants are the model's */
    uint16_t zeros, copies, constants;
    uint32_t copy, n_copy;
    uint32_t constant, n_constant;
} moei_int_mixture;

/* Attention over the tokens of a sequence so far. */
typedef struct moei_int_attention {
    uint16_t heads, d_head;
    uint32_t keys, values; /* bytes from the start of the state: int8 [length, heads d_head] each */
    uint32_t value;        /* vector: the token's own v */
    /* int16 from the start of the vectors: int32 [length + 1] for scores, int16 [length] for
       weights */
    uint32_t room;
    uint16_t bits;         /* scores have 2^bits steps per factor of 2 */
} moei_int_attention;

/* An inference model: moe_export_c writes it as a constant, moe_model_create makes it in memory. It
   is read-only and may be used by any number of threads, each with its own scratch memory. Its
   fields may be read; they change with the version, which moe_infer checks. */
typedef struct moe_model {
    uint32_t version;         /* MOE_MODEL_VERSION */
    int weights_are;          /* MOE_WEIGHTS_ */
    moe_status (*run)(const struct moe_model *model, const moe_loader *loader, const void *input, void *output,
                      void *scratch);
    moe_status (*choices)(const struct moe_model *model, size_t mixture, const void *scratch,
                          struct moe_choice *choices, size_t room, size_t *count);
    size_t d_in, d_out;       /* widths; d_in = 0: it reads token ids */
    size_t length;            /* most tokens of a sequence; 0: calls are independent */
    size_t scratch_size;      /* bytes of scratch memory, any alignment */
    size_t state_size;        /* bytes at its start that persist between calls of a sequence */
    float input_scale, output_scale; /* integer models: value = code * scale */
    const unsigned char *weights;    /* constants, except those of experts */
    size_t weights_size;
    const unsigned char *experts;    /* blocks of experts, NULL: read by a loader */
    size_t experts_size;
    const moei_int_op *ops;    /* first the model's own, then those of its mixtures */
    uint32_t n_ops, n_main;
    const moei_int_mixture *mixtures;
    uint32_t n_mixtures;
    const moei_int_attention *attentions;
    uint32_t n_attentions;
    const struct moe_net *net; /* float models */
    size_t multiplications;   /* the most multiply-accumulates of one call */
} moe_model;

/* The required moe_model.version. It changes with the format of models. */
#define MOE_MODEL_VERSION 8

/* Private: the operations of integer models, void moei_int_op_NAME(op, run), named by constants. */
#define MOEI_INT_OPS(X) \
    X(int8)         /* out = W in + b, 8-bit codes */ \
    X(int4)         /* the same, 4-bit codes */ \
    X(int8_add)     /* sum out += weight (W in + b) */ \
    X(int4_add)     /* the same, 4-bit codes */ \
    X(int16)        /* out = W in + b, 16-bit codes of inputs */ \
    X(int16_add)    /* sum out += weight (W in + b), the same */ \
    X(curve)        /* out = c(in), a curve of 65 points */ \
    X(multiply)     /* out = in * other */ \
    X(add)          /* out = in * factor + other * factor2 */ \
    X(rescale)      /* out = in * factor */ \
    X(mixture)      /* out = the output of an MoE layer */ \
    /* sequences */ \
    X(row)          /* out = the row of the token (embedding) or of its position */ \
    X(norm)         /* out = in / rms * gain, or (in - mean) / std * gain + bias */ \
    X(rotate)       /* out = in, the halves of each head rotated by the position's angles */ \
    X(attention)    /* out = attention of in; appends other, the token's key, and its value */ \
    /* routers */ \
    X(unit)         /* out = in / |in| */ \
    X(cluster)      /* out = in * the row of a table that the previous layer's choices select */ \
    X(norm_l1)      /* out_e = |in|_1 of expert e, which the next k operations compute */ \
    X(norm_l2)      /* the same, |in|_2 */ \
    X(norm_linf)    /* the same, |in|_inf */ \
    X(match)        /* the same, in . other */ \
    /* experts */ \
    X(apply_weight) /* out = weight * in; then weight = 1 */ \
    X(set_weight)   /* weight = in_k */ \
    X(accumulate)   /* sum out += weight * in */ \
    X(add_rest)     /* sum out += (1 - the sum of the chosen experts' weights) * in */
#define MOEI_INT_OP(name) MOEI_API void moei_int_op_##name(const moei_int_op *op, moei_int_run *run);
MOEI_INT_OPS(MOEI_INT_OP)
#undef MOEI_INT_OP

#if !defined(MOE_NO_FLOAT) && !MOE_REAL_IS_DOUBLE
/* Private: the operations of float models that need a model; the rest are MOEI_FLOAT_OPS. */
#define MOEI_MODEL_OPS(X) \
    X(mixture)        /* out = the output of an MoE layer */ \
    X(choose)         /* the k largest of in [n]; all choices also check the logits, out */ \
    X(choose_above)   /* those above c [n]; factor 1: or the largest; factor2 1: by falling logits */ \
    X(choose_sum)     /* the largest until they sum to more than c_0 */ \
    X(choose_listed)  /* the row of c [index,k] of the token */
#define MOEI_FLOAT_OP(name) MOEI_API void moei_float_op_##name(const moei_int_op *op, moei_int_run *run);
MOEI_MODEL_OPS(MOEI_FLOAT_OP)
#undef MOEI_FLOAT_OP
#endif

/* The values of moe_model.run and moe_model.choices, for integer and float models. moe_infer and
   moe_infer_choices call them; errors are theirs. Pointers are not checked here. */
MOEI_API moe_status moei_int_model_run(const moe_model *model, const moe_loader *loader, const void *input,
                                       void *output, void *scratch);
MOEI_API moe_status moei_int_model_choices(const moe_model *model, size_t mixture, const void *scratch,
                                           struct moe_choice *choices, size_t room, size_t *count);
#ifndef MOE_NO_FLOAT
MOEI_API moe_status moei_float_model_run(const moe_model *model, const moe_loader *loader, const void *input,
                                         void *output, void *scratch);
MOEI_API moe_status moei_float_model_choices(const moe_model *model, size_t mixture, const void *scratch,
                                             struct moe_choice *choices, size_t room, size_t *count);
#if !MOE_REAL_IS_DOUBLE
/* The same of float models that are lists of operations. */
MOEI_API moe_status moei_float_ops_run(const moe_model *model, const moe_loader *loader, const void *input,
                                       void *output, void *scratch);
MOEI_API moe_status moei_float_ops_choices(const moe_model *model, size_t mixture, const void *scratch,
                                           struct moe_choice *choices, size_t room, size_t *count);
#endif
#endif

/* output = the network's output for one input; loader reads the experts of a model that does not
   contain them, else NULL. Integer models: input int8_t [d_in] codes within +-127, output int16_t
   [d_out] codes. Float models: moe_real [d_in], [d_out]. d_in = 0: input is one id, int32_t.
   scratch [model->scratch_size], any alignment, is the workspace. A model of sequences (length > 0)
   takes one token per call, and its scratch memory must not change in between; set its first 32
   bytes to 0 to begin a sequence. That of an integer model may be moved between calls to another
   address with the same remainder modulo 4, and only its first state_size bytes (+ 3 for the
   alignment) are needed: they hold the sequence so far. Errors: MOE_ERR_ARGUMENT (NULL, an id
   beyond the vocabulary), MOE_ERR_SPACE (scratch_size too small), MOE_ERR_STATE (the sequence is
   longer than length), MOE_ERR_UNSUPPORTED (a model of another version; experts that need a
   loader), MOE_ERR_NONFINITE (float models whose router meets such a number). On failure output is
   unspecified, and the sequence does not advance. The model itself is trusted: one of unknown
   origin goes through moe_model_check (examples/extras/moe_check.h) first. */
MOE_API moe_status moe_infer(const moe_model *model, const moe_loader *loader, const void *input, void *output,
                             void *scratch, size_t scratch_size);

#ifndef MOE_NO_FLOAT
/* levels[i] = x[i] / model->input_scale, rounded to nearest and clamped to +-127: quantizes floats
   to the input codes [d_in] of an integer model; NaN becomes 0. Does nothing if a pointer is NULL
   or the model reads token ids. Thread-safe. */
MOE_API void moe_infer_levels(const moe_model *model, const moe_real *x, int8_t *levels);
#endif

/* A chosen expert and its weight in units of 2^-15. */
typedef struct moe_choice {
    int32_t expert, weight;
} moe_choice;

/* The experts chosen in MoE layer number `mixture` (from 0) in the last call with this scratch
   memory: up to room choices in order of choice, and their number in *count; in zeroed memory 0.
   After a failed call they are its own, those of an earlier one or none, in memory that was zeroed
   at first. A weight beyond int32 is +-INT32_MAX. MOE_ERR_NOT_FOUND: no such MoE layer;
   MOE_ERR_ARGUMENT: NULL; MOE_ERR_UNSUPPORTED: a model of another version. */
MOE_API moe_status moe_infer_choices(const moe_model *model, size_t mixture, const void *scratch, moe_choice *choices,
                                     size_t room, size_t *count);

#ifdef __cplusplus
}
#endif
#endif /* MOE_H */

#if defined(MOE_IMPLEMENTATION) && !defined(MOEI_MOE_IMPLEMENTED)
#define MOEI_MOE_IMPLEMENTED

#ifndef MOE_NO_FLOAT
/* ==== >>code_memory: memory, streams and files ================================================ */

#ifndef MOE_NO_MALLOC
#include <stdlib.h>
#endif

/* ---- memory ---- */

#if defined(__linux__) && !defined(MOE_NO_MALLOC)
#include <sys/mman.h>
#define MOEI_HUGE_PAGE ((size_t)1 << 21)
#ifndef __cplusplus
extern int madvise(void *block, size_t bytes, int advice); /* -std=c99 hides it */
#endif
#endif

/* 0 if there is no allocator and the standard heap is not compiled in: calls that need memory then
   fail with MOE_ERR_ARGUMENT. */
MOEI_TOOL int moei_can_allocate(const moe_allocator *a) {
#ifdef MOE_NO_MALLOC
    return a != NULL && a->resize != NULL;
#else
    (void)a;
    return 1;
#endif
}

MOEI_TOOL moe_status moei_allocator_check(const moe_allocator *a, moe_error *error) {
    return moei_can_allocate(a) ? MOE_OK : MOEI_REFUSE(error, "allocator is required with MOE_NO_MALLOC");
}

/* The resize of an allocator as moe_allocator describes it; NULL allocator or function: the
   standard heap. */
MOEI_TOOL void *moei_resize(const moe_allocator *a, void *p, size_t old_size, size_t new_size) {
    if (a != NULL && a->resize != NULL) return a->resize(a->ctx, p, old_size, new_size);
#ifdef MOE_NO_MALLOC
    (void)p;
    (void)old_size;
    (void)new_size;
    return NULL;
#else
    (void)old_size;
    if (new_size > 0) return realloc(p, new_size);
    free(p);
    return NULL;
#endif
}

/* Requests huge pages for a large block: reading weights then misses the TLB less often. */
static void moei_ask_huge_pages(void *block, size_t bytes) {
#ifdef MOEI_HUGE_PAGE
    enum { ADVICE = 14 }; /* MADV_HUGEPAGE, which C libraries hide from C99 */
    const size_t skip = (MOEI_HUGE_PAGE - (uintptr_t)block % MOEI_HUGE_PAGE) % MOEI_HUGE_PAGE;
    if (bytes < skip || bytes - skip < MOEI_HUGE_PAGE) return;
    bytes = (bytes - skip) / MOEI_HUGE_PAGE * MOEI_HUGE_PAGE;
    (void)madvise((unsigned char *)block + skip, bytes, ADVICE); /* refusal costs only speed */
#else
    (void)block;
    (void)bytes;
#endif
}

/* count elements of size bytes, all zero; NULL only on failure: a request for 0 bytes gets a block
   of one. */
MOEI_TOOL void *moei_alloc(const moe_allocator *a, size_t count, size_t size) {
    size_t bytes;
    void *p;
    if (!moei_mul(count, size, &bytes)) return NULL;
    if (bytes == 0) bytes = 1;
    p = moei_resize(a, NULL, 0, bytes);
    if (p == NULL) return NULL;
    if (a == NULL || a->resize == NULL) moei_ask_huge_pages(p, bytes);
    memset(p, 0, bytes);
    return p;
}

/* Frees what moei_alloc returned; size is the product of its count and size. p may be NULL. */
MOEI_TOOL void moei_free(const moe_allocator *a, void *p, size_t size) {
    if (p != NULL) (void)moei_resize(a, p, size > 0 ? size : 1, 0);
}

/* Bytes from p to the next address at which a block can begin. */
static size_t moei_arena_pad(const unsigned char *p) {
    return (MOEI_ALIGN - (uintptr_t)p % MOEI_ALIGN) % MOEI_ALIGN;
}

static void *moei_arena_resize(void *ctx, void *block, size_t old_size, size_t new_size) {
    moe_arena *arena = (moe_arena *)ctx;
    unsigned char *base = (unsigned char *)arena->base, *p = (unsigned char *)block;
    size_t at, pad;
    if (p != NULL) {
        /* The last block grows, shrinks and is freed in place. Where a later one was freed, what
           aligned that is still in use. */
        at = (size_t)(p - base);
        if (arena->used - at - old_size <= moei_arena_pad(p + old_size)) {
            if (new_size > arena->size - at) return NULL;
            arena->used = at + new_size;
            return new_size > 0 ? block : NULL;
        }
    }
    if (new_size <= old_size) return new_size > 0 ? block : NULL;
    if (base == NULL || arena->used > arena->size) return NULL;
    pad = moei_arena_pad(base + arena->used);
    if (pad > arena->size - arena->used || new_size > arena->size - arena->used - pad) return NULL;
    p = base + arena->used + pad;
    arena->used += pad + new_size;
    if (block != NULL) memcpy(p, block, old_size);
    return p;
}

moe_allocator moe_arena_allocator(moe_arena *arena) {
    moe_allocator a;
    a.ctx = arena;
    a.resize = moei_arena_resize;
    return a;
}

/* ---- buffers ---- */

static moe_status moei_buffer_resize(moe_buffer *b, size_t capacity) {
    unsigned char *p;
    if (!moei_can_allocate(&b->allocator)) return MOE_ERR_ARGUMENT;
    p = (unsigned char *)moei_resize(&b->allocator, b->data, b->capacity, capacity);
    if (p == NULL) return MOE_ERR_MEMORY;
    b->data = p;
    b->capacity = capacity;
    return MOE_OK;
}

/* Makes room for `more` bytes. At least doubles the capacity, so that many small writes are cheap,
   unless memory is too short. */
static moe_status moei_buffer_reserve(moe_buffer *b, size_t more) {
    size_t need, twice;
    if (!moei_add(b->size, more, &need)) return MOE_ERR_OVERFLOW;
    if (need <= b->capacity) return MOE_OK;
    if (moei_mul(b->capacity, 2, &twice) && twice > need && moei_buffer_resize(b, twice) == MOE_OK) return MOE_OK;
    return moei_buffer_resize(b, need);
}

static int moei_buffer_may_grow(const moe_buffer *b, size_t more) {
    return b->most == 0 || (b->size <= b->most && more <= b->most - b->size);
}

static moe_status moei_buffer_write(void *ctx, const void *from, size_t size) {
    moe_buffer *b = (moe_buffer *)ctx;
    moe_status status = moei_buffer_may_grow(b, size) ? moei_buffer_reserve(b, size) : MOE_ERR_SPACE;
    if (status != MOE_OK) return status;
    if (size > 0) memcpy(b->data + b->size, from, size);
    b->size += size;
    return MOE_OK;
}

moe_stream moe_buffer_stream(moe_buffer *buffer) {
    moe_stream s;
    s.ctx = buffer;
    s.read = NULL;
    s.write = moei_buffer_write;
    s.sync = NULL;
    return s;
}

void moe_buffer_free(moe_buffer *buffer) {
    if (buffer == NULL) return;
    if (buffer->data != NULL) (void)moei_resize(&buffer->allocator, buffer->data, buffer->capacity, 0);
    buffer->data = NULL;
    buffer->size = buffer->capacity = 0;
}

/* ---- files by stdio ---- */

#ifndef MOE_NO_STDIO
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#if defined(__unix__) || defined(__APPLE__)
#define MOEI_POSIX 1
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>
#ifndef __cplusplus
/* As POSIX declares them: with -std=c99 C libraries hide these, but not the others used here. */
extern FILE *fdopen(int file, const char *mode);
extern int fsync(int file);
extern int fchmod(int file, mode_t mode);
extern int fchown(int file, uid_t owner, gid_t group);
extern ssize_t readlink(const char *path, char *to, size_t room);
#endif
#else
#define MOEI_POSIX 0
#ifdef _WIN32
#include <io.h>
#endif
#endif

#ifdef _MSC_VER
#pragma warning(push)
#pragma warning(disable : 4996) /* fopen and strerror are standard C */
#endif

enum { MOEI_PATH_SIZE = 4096, MOEI_READ_SIZE = 4096, MOEI_TEMPORARIES = 100 };

/* Reasons other than errno values. */
enum { MOEI_NOT_REGULAR = -1, MOEI_ALL_TAKEN = -2 };

/* "what path: reason"; of a long path only the end, so that the reason fits the message. */
static moe_status moei_file_failed(moe_error *error, const char *what, const char *path, int reason) {
    size_t length = moei_strlen(path), cut = length > 120 ? length - 117 : 0;
    const char *why = reason == MOEI_NOT_REGULAR ? "not a regular file, but a device, pipe or socket"
                      : reason == MOEI_ALL_TAKEN ? "its .tmp0 to .tmp99 are in use or cannot be removed"
                      : reason != 0              ? strerror(reason)
                                                 : "the system gives no reason";
    return moei_error(error, MOE_ERR_IO, "%s %s%s: %s", what, cut > 0 ? "..." : "", path + cut, why);
}

/* Opens a file for reading, unless reading it could block or never end. */
MOEI_TOOL FILE *moei_file_open(const char *path, int *reason) {
    FILE *f;
#if MOEI_POSIX
    struct stat is;
    if (stat(path, &is) == 0 && !S_ISREG(is.st_mode)) {
        *reason = S_ISDIR(is.st_mode) ? EISDIR : MOEI_NOT_REGULAR;
        return NULL;
    }
#endif
    errno = 0;
    f = fopen(path, "rb");
    *reason = errno;
    return f;
}

/* *left: the number of bytes of f after its position, or 0 if unknown (a pipe, a device). Returns 0
   if the position cannot be restored. */
static int moei_file_left(FILE *f, size_t *left) {
    long at = ftell(f), end;
    *left = 0;
    if (at < 0 || fseek(f, 0, SEEK_END) != 0) return 1;
    end = ftell(f);
    if (fseek(f, at, SEEK_SET) != 0) return 0;
    if (end > at) *left = (size_t)(end - at);
    return 1;
}

/* Reserves what is left of the file, if known, so that a large file is not copied, and one byte
   more, so that the last read finds the end without growing. */
static moe_status moei_file_read_all(FILE *f, moe_buffer *b) {
    size_t got;
    do {
        if (b->size == b->capacity) {
            size_t left = 0, more = MOEI_READ_SIZE;
            moe_status status;
            if (b->size > 0 && !moei_file_left(f, &left)) return MOE_ERR_IO;
            if (left > 0 && left < (size_t)-1) more = left + 1;
            status = moei_buffer_may_grow(b, left) ? moei_buffer_reserve(b, more) : MOE_ERR_SPACE;
            if (status != MOE_OK) return status;
        }
        got = fread(b->data + b->size, 1, b->capacity - b->size, f);
        b->size += got;
        if (!moei_buffer_may_grow(b, 0)) return MOE_ERR_SPACE;
    } while (got > 0);
    return ferror(f) ? MOE_ERR_IO : MOE_OK;
}

moe_status moe_file_read(const char *path, moe_buffer *buffer, moe_error *error) {
    FILE *f;
    moe_status status;
    int reason;
    if (path == NULL || buffer == NULL) return MOEI_REFUSE(error, "path or buffer is NULL");
    if (buffer->data != NULL || buffer->size != 0 || buffer->capacity != 0)
        return MOEI_REFUSE(error, "the buffer is not empty");
    f = moei_file_open(path, &reason);
    if (f == NULL) return moei_file_failed(error, "cannot open", path, reason);
    errno = 0;
    status = moei_file_read_all(f, buffer);
    reason = errno;
    (void)fclose(f);
    if (status == MOE_OK) return MOE_OK;
    moe_buffer_free(buffer);
    if (status == MOE_ERR_IO) return moei_file_failed(error, "cannot read", path, reason);
    if (status == MOE_ERR_SPACE)
        return moei_error(error, status, "%s is larger than %z bytes, the limit of its reader", path, buffer->most);
    return moei_error(error, status, "%s: reading %s", moe_status_text(status), path);
}

/* Only a file that does not exist is missing; one that cannot be opened is an error. */
MOEI_TOOL int moei_file_is_missing(const char *path) {
    int reason;
    FILE *file = moei_file_open(path, &reason);
    if (file == NULL) return reason == ENOENT;
    (void)fclose(file);
    return 0;
}

#ifdef _WIN32
/* As <windows.h> declares them; including it would bring in thousands of names. */
#ifdef __cplusplus
extern "C" {
#endif
__declspec(dllimport) int __stdcall MoveFileExA(const char *from, const char *to, unsigned long flags);
__declspec(dllimport) unsigned long __stdcall GetLastError(void);
#ifdef __cplusplus
}
#endif

static moe_status moei_file_rename(const char *from, const char *to, moe_error *error) {
    const unsigned long replace_existing = 1, write_through = 8;
    if (MoveFileExA(from, to, replace_existing | write_through)) return MOE_OK;
    return moei_error(error, MOE_ERR_IO, "cannot replace %s: Windows error %d", to, (int)GetLastError());
}
#else
static moe_status moei_file_rename(const char *from, const char *to, moe_error *error) {
    errno = 0;
    if (rename(from, to) == 0) return MOE_OK;
    return moei_file_failed(error, "cannot replace", to, errno);
}
#endif

/* A file being written beside the one that it will replace. */
typedef struct moei_stdio {
    FILE *file;
    int failed, reason; /* a write failed, and its errno */
    int synced;         /* all that was written is durable */
    int held, folder;   /* POSIX: open until the end: the file, with its lock, and its folder, or -1 */
    char name[MOEI_PATH_SIZE], target[MOEI_PATH_SIZE]; /* its own, and that of the file to be replaced */
} moei_stdio;

static void moei_file_name_beside(moei_stdio *out, int i) {
    moei_text t = moei_text_begin(out->name, MOEI_PATH_SIZE);
    moei_put_text(&t, out->target);
    moei_put(&t, ".tmp", 4);
    moei_put_integer(&t, i);
}

#if MOEI_POSIX

/* The length of a name's folder, slash included. */
static size_t moei_folder_length(const char *name) {
    size_t n = moei_strlen(name);
    while (n > 0 && name[n - 1] != '/') n--;
    return n;
}

/* Follows the symbolic links at target; the file they lead to need not exist. 0 and errno if that
   fails. */
static int moei_file_follow(char *target) {
    char link[MOEI_PATH_SIZE];
    int left;
    for (left = 40; left > 0; left--) {
        ssize_t n = readlink(target, link, sizeof link);
        size_t folder = n > 0 && link[0] == '/' ? 0 : moei_folder_length(target);
        if (n <= 0) return 1;
        errno = ENAMETOOLONG;
        if ((size_t)n + folder + 8 > MOEI_PATH_SIZE) return 0;
        memcpy(target + folder, link, (size_t)n);
        target[folder + (size_t)n] = '\0';
    }
    errno = ELOOP;
    return 0;
}

/* The process that writes a file holds its lock and loses it when killed. 1: locked; 0: another
   process holds it; -1: no locks are available. */
static int moei_file_lock(int file) {
#ifdef LOCK_EX
    if (flock(file, LOCK_EX | LOCK_NB) == 0) return 1;
    return errno == EWOULDBLOCK ? 0 : -1;
#else
    (void)file;
    return -1;
#endif
}

/* Whether a name still belongs to an open regular file. */
static int moei_file_has_name(int file, const char *name) {
    struct stat is, named;
    return fstat(file, &is) == 0 && stat(name, &named) == 0 && is.st_dev == named.st_dev &&
           is.st_ino == named.st_ino && S_ISREG(is.st_mode);
}

/* Removes a file that no process writes any more. Only the lock's holder removes the name, so it is
   not that of a newer file. */
static void moei_file_remove_stale(const char *name) {
    int file = open(name, O_RDWR | O_NONBLOCK);
    if (file < 0 && errno == EACCES) file = open(name, O_RDONLY | O_NONBLOCK);
    if (file < 0) return;
    if (moei_file_lock(file) == 1 && moei_file_has_name(file, name)) (void)remove(name);
    (void)close(file);
}

/* Creates a file and locks it; -1 and errno on failure, EEXIST also if another process has removed
   it as stale in the meantime. */
static int moei_file_create(const char *name, int is_private) {
    int file = open(name, O_WRONLY | O_CREAT | O_EXCL, is_private ? 0600 : 0666), locked;
    if (file < 0) return -1;
    locked = moei_file_lock(file);
    if (locked < 0 || (locked == 1 && moei_file_has_name(file, name))) return file;
    (void)close(file);
    errno = EEXIST;
    return -1;
}

/* Gives a file, still empty and readable only by its owner, the old one's owner, group and
   permissions. */
static void moei_file_keep(int file, const struct stat *old) {
    mode_t mode = old->st_mode & 0777;
    if (fchown(file, old->st_uid, old->st_gid) != 0 && fchown(file, (uid_t)-1, old->st_gid) != 0)
        mode = (mode_t)(mode & (0707 | (mode & 7) << 3));
    (void)fchmod(file, mode);
}

/* 0 and errno if an open file or folder cannot be made durable; 1 also where the system does not
   support it. */
static int moei_file_sync(int file) {
#ifdef F_FULLFSYNC /* macOS, where fsync leaves data in the disk's cache */
    if (fcntl(file, F_FULLFSYNC) == 0) return 1;
#endif
    return fsync(file) == 0 || errno == EINVAL || errno == EBADF || errno == ENOTSUP;
}

/* Opens the folder, or leaves it closed if it may not be read. */
static int moei_folder_open(moei_stdio *out) {
    size_t n = moei_folder_length(out->target);
    memcpy(out->name, n > 0 ? out->target : ".", n > 0 ? n : 1);
    out->name[n > 0 ? n : 1] = '\0';
    out->folder = open(out->name, O_RDONLY);
    return out->folder >= 0 || errno == EACCES;
}

static moe_status moei_file_begin(moei_stdio *out, const char *path, moe_error *error) {
    struct stat old;
    int i, keep = stat(path, &old) == 0, made;
    if (keep && !S_ISREG(old.st_mode))
        return moei_file_failed(error, "cannot replace", path, S_ISDIR(old.st_mode) ? EISDIR : MOEI_NOT_REGULAR);
    if ((!keep && errno != ENOENT) || !moei_file_follow(out->target))
        return moei_file_failed(error, "cannot replace", path, errno);
    if (!moei_folder_open(out)) return moei_file_failed(error, "cannot create a file beside", path, errno);
    for (i = 0, made = -1; i < MOEI_TEMPORARIES; i++) {
        moei_file_name_beside(out, i);
        moei_file_remove_stale(out->name);
        if (out->held >= 0 || (out->held = moei_file_create(out->name, keep)) < 0) {
            if (out->held < 0 && errno != EEXIST)
                return moei_file_failed(error, "cannot create a file beside", path, errno);
            continue;
        }
        made = i;
    }
    if (made < 0) return moei_file_failed(error, "cannot create a file beside", path, MOEI_ALL_TAKEN);
    moei_file_name_beside(out, made);
    if (keep) moei_file_keep(out->held, &old);
    errno = 0;
    i = dup(out->held);
    if (i >= 0 && (out->file = fdopen(i, "wb")) != NULL) return MOE_OK;
    made = errno;
    if (i >= 0) (void)close(i);
    (void)remove(out->name);
    return moei_file_failed(error, "cannot open", out->name, made);
}

#else

/* Creates the new file under the first free name. */
static moe_status moei_file_begin(moei_stdio *out, const char *path, moe_error *error) {
    int i, made = -1, reason = 0;
    for (i = 0; i < MOEI_TEMPORARIES; i++) {
        FILE *f;
        moei_file_name_beside(out, i);
        f = fopen(out->name, "rb");
        if (f != NULL) {
            (void)fclose(f);
#ifdef _WIN32 /* which does not remove a file that a process has open */
            if (remove(out->name) != 0) continue;
#else
            continue;
#endif
        }
        if (made >= 0) continue;
        errno = 0;
        out->file = fopen(out->name, "wb");
        if (out->file != NULL) made = i;
        else reason = errno;
    }
    if (made < 0)
        return moei_file_failed(error, "cannot create a file beside", path, reason != 0 ? reason : MOEI_ALL_TAKEN);
    moei_file_name_beside(out, made);
    return MOE_OK;
}

#endif

static moe_status moei_stdio_write(void *ctx, const void *from, size_t size) {
    moei_stdio *out = (moei_stdio *)ctx;
    if (size == 0) return MOE_OK;
    out->synced = 0;
    errno = 0;
    if (fwrite(from, 1, size, out->file) == size) return MOE_OK;
    if (!out->failed) out->reason = errno;
    out->failed = 1;
    return MOE_ERR_IO;
}

static moe_status moei_stdio_sync(void *ctx) {
    moei_stdio *out = (moei_stdio *)ctx;
    int good = out->synced && !out->failed;
    if (!good && !out->failed) {
        errno = 0;
        good = fflush(out->file) == 0 && !ferror(out->file);
#if MOEI_POSIX
        good = good && moei_file_sync(out->held);
#elif defined(_WIN32)
        good = good && _commit(_fileno(out->file)) == 0;
#endif
        out->synced = good;
        out->failed = !good;
        out->reason = errno;
    }
    return good ? MOE_OK : MOE_ERR_IO;
}

/* Lets write_contents write, and closes the file. */
static moe_status moei_stdio_fill(moei_stdio *out, const char *path,
                                  moe_status (*write_contents)(void *ctx, moe_stream *stream), void *ctx,
                                  moe_error *error) {
    moe_stream stream;
    moe_status status;
    stream.ctx = out;
    stream.read = NULL;
    stream.write = moei_stdio_write;
    stream.sync = moei_stdio_sync;
    status = write_contents(ctx, &stream);
    if (status == MOE_OK) (void)moei_stdio_sync(out);
    errno = 0;
    if (fclose(out->file) != 0 && !out->failed) {
        out->reason = errno;
        out->failed = 1;
    }
    if (out->failed) return moei_file_failed(error, "cannot write", path, out->reason);
    return status;
}

/* After the rename: makes it durable, and closes what is still open. */
static moe_status moei_file_end(moei_stdio *out, const char *path, moe_status status, moe_error *error) {
#if MOEI_POSIX
    if (status == MOE_OK && out->folder >= 0 && !moei_file_sync(out->folder))
        status = moei_file_failed(error, "replaced, but its folder cannot be made durable:", path, errno);
    if (out->folder >= 0) (void)close(out->folder);
    if (out->held >= 0) (void)close(out->held);
#else
    (void)out;
    (void)path;
    (void)error;
#endif
    return status;
}

moe_status moe_file_replace(const char *path, moe_status (*write_contents)(void *ctx, moe_stream *stream), void *ctx,
                            moe_error *error) {
    moei_stdio out;
    moe_error before;
    moe_status status;
    size_t length;
    if (path == NULL || write_contents == NULL) return MOEI_REFUSE(error, "path or write_contents is NULL");
    length = moei_strlen(path);
    if (length + 8 > MOEI_PATH_SIZE)
        return MOEI_REFUSE(error, "the path is longer than %d bytes", (int)MOEI_PATH_SIZE - 8);
    memcpy(out.target, path, length + 1);
    out.file = NULL;
    out.failed = out.reason = out.synced = 0;
    out.held = out.folder = -1;
    /* write_contents may have set it: that message is closer to the cause */
    if (error != NULL) {
        before = *error;
        error->code = MOE_OK;
    }
    status = moei_file_begin(&out, path, error);
    if (status == MOE_OK) {
        status = moei_stdio_fill(&out, path, write_contents, ctx, error);
        if (status == MOE_OK) status = moei_file_rename(out.name, out.target, error);
        if (status != MOE_OK) (void)remove(out.name);
    }
    status = moei_file_end(&out, path, status, error);
    if (error != NULL && status == MOE_OK) *error = before;
    else if (error != NULL && error->code == MOE_OK)
        (void)moei_error(error, status, "writing %s: %s", path, moe_status_text(status));
    return status;
}

#ifdef _MSC_VER
#pragma warning(pop)
#endif
#endif /* MOE_NO_STDIO */

/* ==== >>code_safetensors: one entry of the header ============================================= */

enum { MOEI_FILE_START = 9 };           /* the header's first byte after its '{' */
#define MOEI_FILE_MAX_HEADER 100000000u /* bytes; the format's own limit */

/* The element types in the order of MOE_DTYPE_. */
typedef struct moei_dtype {
    const char *name;
    unsigned char size; /* bytes */
} moei_dtype;

static const moei_dtype moei_dtypes[MOE_DTYPE_COUNT] = {
    {"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8}, {"I32", 4}, {"I16", 2},
    {"I8", 1},  {"U64", 8}, {"U32", 4}, {"U16", 2},  {"U8", 1},  {"BOOL", 1},
};

static moe_status moei_file_dtype(moei_json *j, int *dtype) {
    char shown[52];
    moei_span s;
    moe_status status = moei_json_string(j, &s);
    if (status != MOE_OK) return status;
    for (*dtype = 0; *dtype < MOE_DTYPE_COUNT; (*dtype)++)
        if (moei_span_is(s, moei_dtypes[*dtype].name)) return MOE_OK;
    if (j->any_dtype) return MOE_OK;
    return moei_json_refuse(j, (size_t)(s.p - j->bytes), MOE_ERR_UNSUPPORTED, "unknown dtype '%s'",
                            moei_span_text(s, shown));
}

/* The object that describes a tensor: dtype, shape and data_offsets, each once, nothing else. */
static moe_status moei_file_fields(moei_json *j, moe_file_tensor *t, size_t range[2]) {
    static const char *const keys[3] = {"dtype", "shape", "data_offsets"};
    char shown[52];
    unsigned seen = 0;
    int i, first, more, count;
    size_t at;
    moei_span key;
    moe_status status = moei_json_take(j, '{');
    if (status != MOE_OK) return status;
    for (first = 1;; first = 0) {
        if ((status = moei_json_key(j, first, &key, &more)) != MOE_OK) return status;
        if (!more) break;
        at = (size_t)(key.p - j->bytes);
        for (i = 0; i < 3 && !moei_span_is(key, keys[i]);) i++;
        if (i == 3) return moei_json_refuse(j, at, MOE_ERR_FORMAT, "unknown key '%s'", moei_span_text(key, shown));
        if ((seen & 1u << i) != 0) return moei_json_refuse(j, at, MOE_ERR_FORMAT, "the key %s occurs twice", keys[i]);
        seen |= 1u << i;
        if (i == 0) status = moei_file_dtype(j, &t->dtype);
        else if (i == 1) status = moei_json_sizes(j, t->shape, MOE_FILE_MAX_DIMS, &t->n_dims);
        else if ((status = moei_json_sizes(j, range, 2, &count)) == MOE_OK && count != 2)
            return moei_json_refuse(j, at, MOE_ERR_FORMAT, "data_offsets needs two numbers");
        if (status != MOE_OK) return status;
    }
    for (i = 0; i < 3; i++)
        if ((seen & 1u << i) == 0) return moei_json_refuse(j, j->at, MOE_ERR_FORMAT, "%s is missing", keys[i]);
    return MOE_OK;
}

/* Checks the shape against the byte range, and the range against the data. */
static moe_status moei_file_offsets(moei_json *j, size_t at, const moe_file *file, moe_file_tensor *t,
                                  const size_t range[2]) {
    size_t start = 8 + file->header_size, size = file->size - start;
    int i, known = t->dtype < MOE_DTYPE_COUNT;
    t->count = 1;
    for (i = 0; i < t->n_dims; i++)
        if (!moei_mul(t->count, t->shape[i], &t->count))
            return moei_json_refuse(j, at, MOE_ERR_OVERFLOW, "the shape has more elements than size_t holds");
    if (!moei_mul(t->count, known ? moei_dtypes[t->dtype].size : 0, &t->bytes))
        return moei_json_refuse(j, at, MOE_ERR_OVERFLOW, "the shape needs more bytes than size_t holds");
    if (range[1] > size)
        return moei_json_refuse(j, at, MOE_ERR_FORMAT, "data_offsets [%z, %z] go beyond the %z bytes of data", range[0],
                                range[1], size);
    if (range[0] > range[1])
        return moei_json_refuse(j, at, MOE_ERR_FORMAT, "data_offsets [%z, %z] end before they begin", range[0],
                                range[1]);
    if (!known) t->bytes = range[1] - range[0];
    if (range[1] - range[0] != t->bytes)
        return moei_json_refuse(j, at, MOE_ERR_FORMAT,
                                "the shape needs %z bytes, data_offsets [%z, %z] have another size", t->bytes, range[0],
                                range[1]);
    if (!file->of_header) t->data = file->bytes + start + range[0];
    return MOE_OK;
}

enum { MOEI_ENTRY_END = 0, MOEI_ENTRY_TENSOR = 1, MOEI_ENTRY_METADATA = 2 };

/* The next entry of the header's object. A tensor's entry is read completely, and *begin gets its
   offset in the data; of the metadata only the key is read. If the entry is no tensor, *t is
   empty. */
static moe_status moei_file_entry(moei_json *j, int first, const moe_file *file, moe_file_tensor *t, size_t *begin,
                                  int *kind) {
    size_t range[2] = {0, 0}, at;
    moei_span key;
    int more;
    moe_status status;
    *kind = MOEI_ENTRY_END;
    *begin = 0;
    memset(t, 0, sizeof *t);
    t->name = (const char *)file->bytes;
    t->data = file->bytes;
    j->name.p = NULL;
    if ((status = moei_json_key(j, first, &key, &more)) != MOE_OK || !more) return status;
    if (moei_span_is(key, "__metadata__")) {
        *kind = MOEI_ENTRY_METADATA;
        return MOE_OK;
    }
    *kind = MOEI_ENTRY_TENSOR;
    t->name = (const char *)key.p;
    t->name_length = moei_span_length(key);
    j->name = key;
    (void)moei_json_peek(j);
    at = j->at;
    if ((status = moei_file_fields(j, t, range)) != MOE_OK) return status;
    *begin = range[0];
    return moei_file_offsets(j, at, file, t, range);
}

/* The metadata: an object of strings, or null, which counts as none; *count gets their number. */
static moe_status moei_file_metadata_object(moei_json *j, moe_file *file, size_t *count) {
    static const char null[] = "null";
    moei_span key, value;
    size_t at;
    int i, first, more;
    moe_status status;
    (void)moei_json_peek(j);
    if (file->metadata_at != 0) return moei_json_refuse(j, j->at, MOE_ERR_FORMAT, "__metadata__ occurs twice");
    file->metadata_at = j->at;
    *count = 0;
    for (at = j->at, i = 0; i < 4 && at < j->end && j->bytes[at] == (unsigned char)null[i]; i++) at++;
    if (i == 4) {
        file->metadata_end = j->at = at;
        return MOE_OK;
    }
    if ((status = moei_json_take(j, '{')) != MOE_OK) return status;
    for (first = 1;; first = 0, ++*count) {
        if ((status = moei_json_key(j, first, &key, &more)) != MOE_OK) return status;
        if (!more) break;
        if (*count == MOE_FILE_MAX_TENSORS)
            return moei_json_refuse(j, j->at, MOE_ERR_UNSUPPORTED, "too many keys in __metadata__");
        if ((status = moei_json_string(j, &value)) != MOE_OK) return status;
    }
    file->metadata_end = j->at;
    return MOE_OK;
}

/* ---- safetensors: names ---- */

static uint64_t moei_file_hash_step(uint64_t hash, int c) {
    return (hash ^ (uint64_t)(unsigned)c) * UINT64_C(0x100000001b3);
}

/* A walk over the keys of an object that was checked before: the header's (values are objects) or
   the metadata's (strings). */
typedef struct moei_names {
    const unsigned char *bytes;
    size_t at, end;
    /* where the metadata's value lies in the header; 0: none, or this walk is inside it */
    size_t skip_at, skip_end;
    int texts;
} moei_names;

static moei_names moei_names_of(const moe_file *file, int metadata) {
    moei_names w;
    w.bytes = file->bytes;
    w.at = metadata ? file->metadata_at : (size_t)MOEI_FILE_START;
    w.end = metadata ? file->metadata_end : 8 + file->header_size;
    w.skip_at = metadata ? 0 : file->metadata_at;
    w.skip_end = file->metadata_end;
    w.texts = metadata;
    return w;
}

/* Skips past the next byte c; 0 if there is none. */
static int moei_names_seek(moei_names *w, int c) {
    while (w->at < w->end)
        if (w->bytes[w->at++] == c) return 1;
    return 0;
}

/* A string with its hash, over the unescaped bytes; w->at moves from one quote past the other. */
static int moei_names_string(moei_names *w, moei_span *s, uint64_t *hash) {
    const unsigned char *p, *end = w->bytes + w->end;
    unsigned char out[4];
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    int i, n;
    if (!moei_names_seek(w, '"')) return 0;
    for (p = s->p = w->bytes + w->at; p < end && *p != '"';) {
        if (*p != '\\') {
            h = moei_file_hash_step(h, *p++);
            continue;
        }
        p++;
        if ((n = moei_unescape(&p, end, out)) == 0) return 0;
        for (i = 0; i < n; i++) h = moei_file_hash_step(h, out[i]);
    }
    if (p >= end) return 0;
    s->end = p;
    w->at = (size_t)(p - w->bytes) + 1;
    *hash = moei_mix_bits(h);
    return 1;
}

/* The next key; w->at is then past its value. 0 at the end. */
static int moei_names_next(moei_names *w, moei_span *name, uint64_t *hash) {
    moei_span value;
    uint64_t unused;
    size_t from;
    for (;;) {
        if (!moei_names_string(w, name, hash)) return 0;
        if (w->texts) return moei_names_string(w, &value, &unused);
        from = w->at;
        if (!moei_names_seek(w, '{')) return 0;
        /* no string inside a tensor's object has one */
        if (w->skip_at < from || w->skip_at >= w->at) return moei_names_seek(w, '}');
        w->at = w->skip_end;
    }
}

/* Whether an earlier key equals name. */
static int moei_names_before(moei_names w, moei_span name) {
    moei_span other;
    uint64_t unused;
    while (moei_names_next(&w, &other, &unused) && other.p != name.p)
        if (moei_span_same(other, name)) return 1;
    return 0;
}

enum { MOEI_NAMES_SLOTS = 2048, MOEI_NAMES_PER_PASS = 1536, MOEI_NAMES_DOUBTS = 32 };

/* NULL if no two of the n keys are equal after unescaping, else what is wrong with *name. Nothing
   is allocated, so this takes several passes: each keeps 16-bit hashes of one part of the names in
   a table on the stack, and names with equal hashes are compared. Names crafted to fill one part or
   to collide too often are refused, which bounds the time. */
static const char *moei_names_problem(moei_names names, size_t n, moei_span *name) {
    static const char crafted[] = "too many names have the same hash";
    uint16_t slots[MOEI_NAMES_SLOTS];
    size_t pass, passes = n / MOEI_NAMES_PER_PASS + 1;
    int doubts = 0;
    for (pass = 0; pass < passes; pass++) {
        moei_names w = names;
        uint64_t hash;
        size_t used = 0;
        memset(slots, 0, sizeof slots);
        while (moei_names_next(&w, name, &hash)) {
            uint16_t tag = (uint16_t)(hash >> 16 & 0xffffu);
            size_t slot = (size_t)(hash % MOEI_NAMES_SLOTS);
            if ((size_t)((hash >> 32) * passes >> 32) != pass) continue;
            if (tag == 0) tag = 1; /* 0 is an empty slot */
            for (; slots[slot] != 0; slot = (slot + 1) % MOEI_NAMES_SLOTS) {
                if (slots[slot] != tag) continue;
                if (moei_names_before(names, *name)) return "the name occurs twice";
                if (++doubts > MOEI_NAMES_DOUBTS) return crafted;
            }
            slots[slot] = tag;
            if (++used == MOEI_NAMES_SLOTS) return crafted;
        }
    }
    return NULL;
}

/* Finds the key `text` in the walk w; 0: not there. */
static int moei_names_find(moei_names *w, const char *text, moei_span *name) {
    uint64_t hash, wanted = UINT64_C(0xcbf29ce484222325);
    const char *p;
    for (p = text; *p != '\0'; p++) wanted = moei_file_hash_step(wanted, (unsigned char)*p);
    wanted = moei_mix_bits(wanted);
    while (moei_names_next(w, name, &hash))
        if (hash == wanted && moei_span_is(*name, text)) return 1;
    return 0;
}

/* ---- safetensors: reading ---- */

/* Whether the tensors cover the data exactly, in whatever order the header lists them, without
   sorting. Take each as a step from its begin to its end. If the begins together with the end of
   the data are the same multiset as the ends together with 0, the steps form one path from 0 to the
   end, and cycles; no step goes back, so a cycle is an empty tensor, and the path is the tiling.
   Multisets are compared by the sum of a 64-bit mix of their numbers. The mix depends on the whole
   header, so offsets cannot simply be chosen to fool it; even then a tensor could only expose bytes
   of another. An empty tensor must lie where a step begins or ends: those that do not lie at the
   end of the entry before them are looked up afterwards. */
typedef struct moei_tiles {
    uint64_t seed, begins, ends;
    size_t covered;      /* bytes of all tensors so far */
    size_t last;         /* end of the tensor before */
    int strays;          /* an empty tensor begins elsewhere */
    /* the first that does not begin there: in files written in order, the one at fault */
    moei_span odd;
    size_t odd_at;
} moei_tiles;

static void moei_tiles_add(moei_tiles *s, const moe_file_tensor *t, size_t begin, size_t at) {
    s->begins += moei_mix_bits(s->seed + begin);
    s->ends += moei_mix_bits(s->seed + begin + t->bytes);
    s->covered += t->bytes;
    s->strays |= t->bytes == 0 && begin != s->last;
    if (begin != s->last && s->odd.p == NULL) {
        s->odd = moei_span_of(t->name, t->name_length);
        s->odd_at = at;
    }
    s->last = begin + t->bytes;
}

static moe_status moei_tiles_check(const moei_tiles *s, moei_json *j, size_t size) {
    size_t at = s->odd.p != NULL ? s->odd_at : j->at;
    j->name = s->odd;
    if (s->covered != size)
        return moei_json_refuse(j, at, MOE_ERR_FORMAT, "a hole: the tensors cover %z of %z bytes of data", s->covered,
                                size);
    if (s->begins + moei_mix_bits(s->seed + size) != s->ends + moei_mix_bits(s->seed))
        return moei_json_refuse(j, at, MOE_ERR_FORMAT, "the tensors overlap and leave a hole");
    return MOE_OK;
}

static moei_json moei_file_json(const moe_file *file, size_t at) {
    moei_json j;
    memset(&j, 0, sizeof j);
    j.bytes = file->bytes;
    j.at = at;
    j.end = 8 + file->header_size;
    j.any_dtype = file->of_header;
    return j;
}

/* moe_file_next, and where in the data the tensor begins. */
static moe_status moei_file_next(moe_file *file, moe_file_tensor *tensor, size_t *begin) {
    moei_json j;
    moe_file_tensor t;
    moe_status status;
    int kind;
    if (file->n_tensors == 0) return MOE_ERR_NOT_FOUND;
    j = moei_file_json(file, file->at > 0 ? file->at : (size_t)MOEI_FILE_START);
    if ((status = moei_file_entry(&j, j.at == MOEI_FILE_START, file, &t, begin, &kind)) != MOE_OK) return status;
    if (kind == MOEI_ENTRY_METADATA) {
        j.at = file->metadata_end;
        if ((status = moei_file_entry(&j, 0, file, &t, begin, &kind)) != MOE_OK) return status;
    }
    if (kind != MOEI_ENTRY_TENSOR) return MOE_ERR_NOT_FOUND;
    file->at = j.at;
    *tensor = t;
    return MOE_OK;
}

enum { MOEI_TILES_SLOTS = 512, MOEI_TILES_BATCH = 384 };

/* The slot that has the offset, or would have it; 0: it is free. */
static size_t *moei_tiles_slot(size_t slots[MOEI_TILES_SLOTS], uint64_t seed, size_t offset) {
    size_t i = (size_t)(moei_mix_bits(seed + offset) % MOEI_TILES_SLOTS);
    while (slots[i] != 0 && slots[i] != offset) i = (i + 1) % MOEI_TILES_SLOTS;
    return &slots[i];
}

/* Checks that no empty tensor lies inside another. Of each batch of them, those at the beginning of
   another tensor are struck from the table (SIZE_MAX); any that are left are errors. */
static moe_status moei_tiles_strays(const moei_tiles *s, moei_json *j, const moe_file *file, size_t size) {
    size_t slots[MOEI_TILES_SLOTS], *slot, begin, used = 1;
    moe_file next = *file, all;
    moe_file_tensor t;
    int left;
    while (s->strays && used > 0) {
        memset(slots, 0, sizeof slots);
        for (used = 0; used < MOEI_TILES_BATCH && moei_file_next(&next, &t, &begin) == MOE_OK;) {
            if (t.bytes > 0 || begin == 0 || begin == size) continue;
            slot = moei_tiles_slot(slots, s->seed, begin);
            used += *slot == 0;
            *slot = begin;
        }
        for (left = (int)used, all = *file; left > 0 && moei_file_next(&all, &t, &begin) == MOE_OK;) {
            if (t.bytes == 0 || begin == 0) continue;
            slot = moei_tiles_slot(slots, s->seed, begin);
            left -= *slot == begin;
            if (*slot == begin) *slot = SIZE_MAX;
        }
        for (all = *file; left > 0 && moei_file_next(&all, &t, &begin) == MOE_OK;) {
            if (t.bytes > 0 || begin == 0 || *moei_tiles_slot(slots, s->seed, begin) != begin) continue;
            j->name = moei_span_of(t.name, t.name_length);
            return moei_json_refuse(j, (size_t)(j->name.p - file->bytes), MOE_ERR_FORMAT,
                                    "an empty tensor at offset %z lies inside another", begin);
        }
    }
    return MOE_OK;
}

/* Also for numbers beyond size_t, which moei_error cannot show. */
static const char *moei_unsigned_text(uint64_t value, char out[24]) {
    moei_text t = moei_text_begin(out, 24);
    moei_put_unsigned(&t, value);
    return out;
}

/* The eight bytes of the header's length. */
static moe_status moei_file_header(moei_json *j, moe_file *file) {
    uint64_t length;
    if (file->size < 8)
        return moei_json_refuse(j, 0, MOE_ERR_FORMAT,
                                "not a safetensors file: it ends within its first 8 bytes, it has %z", file->size);
    length = moei_load(file->bytes, 8);
    if (length > MOEI_FILE_MAX_HEADER) {
        char digits[24];
        return moei_json_refuse(j, 0, MOE_ERR_FORMAT,
                                "not a safetensors file: the header length would be %s, allowed are 100000000",
                                moei_unsigned_text(length, digits));
    }
    if (length > file->size - 8)
        return moei_json_refuse(
            j, 0, MOE_ERR_FORMAT,
            "not a safetensors file, or one cut short: the header length is %z, but only %z bytes follow",
            (size_t)length, file->size - 8);
    file->header_size = (size_t)length;
    j->end = 8 + file->header_size;
    j->at = 8;
    if (length == 0 || file->bytes[8] != '{')
        return moei_json_refuse(j, 8, MOE_ERR_FORMAT, "not a safetensors file: the header does not begin with {");
    j->at = MOEI_FILE_START;
    return MOE_OK;
}

/* All entries up to the closing brace, and the padding after it. */
static moe_status moei_file_entries(moei_json *j, moe_file *file, moei_tiles *tiles) {
    size_t start = 8 + file->header_size, size = file->size - start;
    moe_file_tensor t;
    int first, kind;
    moe_status status;
    for (first = 1;; first = 0) {
        size_t at = j->at, begin;
        if ((status = moei_file_entry(j, first, file, &t, &begin, &kind)) != MOE_OK) return status;
        if (kind == MOEI_ENTRY_END) break;
        if (kind == MOEI_ENTRY_METADATA) {
            if ((status = moei_file_metadata_object(j, file, &file->n_metadata)) != MOE_OK) return status;
            continue;
        }
        if (file->n_tensors == MOE_FILE_MAX_TENSORS)
            return moei_json_refuse(j, at, MOE_ERR_UNSUPPORTED, "the file has more than %z tensors",
                                    (size_t)MOE_FILE_MAX_TENSORS);
        file->n_tensors++;
        if (t.bytes > size - tiles->covered)
            return moei_json_refuse(j, at, MOE_ERR_FORMAT,
                                    "tensors overlap: together they are larger than the data, %z bytes", size);
        moei_tiles_add(tiles, &t, begin, at);
    }
    for (; j->at < j->end; j->at++)
        if (j->bytes[j->at] != ' ')
            return moei_json_refuse(j, j->at, MOE_ERR_FORMAT, "only spaces may follow the header's object");
    return MOE_OK;
}

static moe_status moei_file_unique(moei_json *j, const moe_file *file, int metadata, size_t n) {
    moei_span name;
    const char *problem = n > 1 ? moei_names_problem(moei_names_of(file, metadata), n, &name) : NULL;
    char shown[52];
    if (problem == NULL) return MOE_OK;
    j->name.p = NULL;
    return moei_json_refuse(j, (size_t)(name.p - file->bytes), MOE_ERR_FORMAT, "%s '%s': %s",
                            metadata ? "metadata" : "tensor", moei_span_text(name, shown), problem);
}

/* Checks a whole file of size bytes or, with of_header, its first 8 bytes and the header. */
static moe_status moei_file_check(moe_file *file, const unsigned char *bytes, size_t size, int of_header,
                                  moe_error *error) {
    moe_file f;
    moei_json j;
    moei_tiles tiles;
    size_t i;
    moe_status status;
    memset(&f, 0, sizeof f);
    memset(&j, 0, sizeof j);
    memset(&tiles, 0, sizeof tiles);
    f.bytes = bytes;
    f.size = size;
    f.of_header = j.any_dtype = of_header;
    j.bytes = f.bytes;
    j.error = error;
    if ((status = moei_file_header(&j, &f)) != MOE_OK) return status;
    for (i = 8; i < j.end; i++) tiles.seed = moei_file_hash_step(tiles.seed, f.bytes[i]);
    tiles.seed = moei_mix_bits(tiles.seed);
    if ((status = moei_file_entries(&j, &f, &tiles)) != MOE_OK ||
        (status = moei_tiles_check(&tiles, &j, size - j.end)) != MOE_OK ||
        (status = moei_file_unique(&j, &f, 0, f.n_tensors)) != MOE_OK ||
        (status = moei_file_unique(&j, &f, 1, f.n_metadata)) != MOE_OK)
        return status;
    f.at = MOEI_FILE_START;
    if ((status = moei_tiles_strays(&tiles, &j, &f, size - j.end)) != MOE_OK) return status;
    *file = f;
    return MOE_OK;
}

moe_status moe_file_open(moe_file *file, const void *bytes, size_t size, moe_error *error) {
    if (file == NULL || bytes == NULL) return MOEI_REFUSE(error, "file or bytes is NULL");
    return moei_file_check(file, (const unsigned char *)bytes, size, 0, error);
}

moe_status moe_file_next(moe_file *file, moe_file_tensor *tensor) {
    size_t begin;
    if (file == NULL || tensor == NULL) return MOE_ERR_ARGUMENT;
    return moei_file_next(file, tensor, &begin);
}

/* moe_file_find, and where in the data the tensor begins. */
static moe_status moei_file_find(const moe_file *file, const char *name, moe_file_tensor *tensor, size_t *begin) {
    moei_names w;
    moei_span span;
    moei_json j;
    moe_file_tensor t;
    moe_status status;
    int kind;
    if (file->n_tensors == 0) return MOE_ERR_NOT_FOUND;
    w = moei_names_of(file, 0);
    if (!moei_names_find(&w, name, &span)) return MOE_ERR_NOT_FOUND;
    j = moei_file_json(file, (size_t)(span.p - file->bytes) - 1);
    if ((status = moei_file_entry(&j, 1, file, &t, begin, &kind)) != MOE_OK) return status;
    if (kind != MOEI_ENTRY_TENSOR) return MOE_ERR_NOT_FOUND;
    *tensor = t;
    return MOE_OK;
}

moe_status moe_file_find(const moe_file *file, const char *name, moe_file_tensor *tensor) {
    size_t begin;
    if (file == NULL || name == NULL || tensor == NULL) return MOE_ERR_ARGUMENT;
    return moei_file_find(file, name, tensor, &begin);
}

/* The value of a key as it stands in the file. */
static int moei_file_metadata_span(const moe_file *file, const char *key, moei_span *span) {
    moei_names w;
    uint64_t unused;
    if (file->metadata_at == 0) return 0;
    w = moei_names_of(file, 1);
    if (!moei_names_find(&w, key, span)) return 0;
    w.at = (size_t)(span->end - file->bytes) + 1; /* the value is the string after the key */
    return moei_names_string(&w, span, &unused);
}

moe_status moe_file_metadata(const moe_file *file, const char *key, char *value, size_t room, size_t *length) {
    moei_span span;
    moei_chars chars;
    size_t n = 0;
    int c;
    if (file == NULL || key == NULL || (value == NULL && room > 0)) return MOE_ERR_ARGUMENT;
    if (!moei_file_metadata_span(file, key, &span)) return MOE_ERR_NOT_FOUND;
    for (chars = moei_chars_of(span); moei_chars_next(&chars) >= 0;) n++;
    if (length != NULL) *length = n;
    if (n >= room) return MOE_ERR_SPACE;
    for (chars = moei_chars_of(span), n = 0; n + 1 < room && (c = moei_chars_next(&chars)) >= 0;) value[n++] = (char)c;
    value[n] = '\0';
    return MOE_OK;
}

#define MOEI_CONFIG_KEY "moe" /* of the metadata: the configuration */

/* The number of objects in a configuration's list of modules; a { in a note counts too. */
static size_t moei_file_modules(const moe_file *file) {
    moei_span span;
    moei_chars chars;
    size_t n = 0;
    int c;
    if (!moei_file_metadata_span(file, MOEI_CONFIG_KEY, &span)) return 0;
    for (chars = moei_chars_of(span); (c = moei_chars_next(&chars)) >= 0;) n += c == '{';
    return n > 2 ? n - 2 : 0; /* without the outermost object and the network */
}

moe_status moe_file_limit(const moe_file *file, const moe_limits *limits, moe_error *error) {
    static const char *const names[] = {"bytes", "tensors", "metadata entries", "modules"};
    size_t has[4], most[4], i;
    if (file == NULL || limits == NULL) return MOEI_REFUSE(error, "file or limits is NULL");
    has[0] = file->size;
    has[1] = file->n_tensors;
    has[2] = file->n_metadata;
    has[3] = moei_file_modules(file);
    most[0] = limits->size;
    most[1] = limits->tensors;
    most[2] = limits->metadata;
    most[3] = limits->modules;
    for (i = 0; i < 4; i++)
        if (most[i] > 0 && has[i] > most[i])
            return moei_error(error, MOE_ERR_SPACE, "the file has %z %s, the limit is %z", has[i], names[i], most[i]);
    return MOE_OK;
}

/* ---- safetensors: values ---- */

static int moei_dtype_is_signed(int dtype) { return dtype >= MOE_DTYPE_I64 && dtype <= MOE_DTYPE_I8; }

static moe_status moei_values_check(const moe_file_tensor *t, size_t first, size_t count, const void *values) {
    if (t == NULL || (values == NULL && count > 0) || t->dtype < 0 || t->dtype >= MOE_DTYPE_COUNT)
        return MOE_ERR_ARGUMENT;
    if (first > t->count || count > t->count - first) return MOE_ERR_SHAPE;
    if (t->bytes / moei_dtypes[t->dtype].size < t->count || (t->data == NULL && count > 0)) return MOE_ERR_ARGUMENT;
    return MOE_OK;
}

static moe_status moei_file_reals(const moe_file_tensor *tensor, size_t first, size_t count, moe_real *values) {
    moe_status status = moei_values_check(tensor, first, count, values);
    const unsigned char *p;
    int dtype, size;
    size_t i;
    if (status != MOE_OK || count == 0) return status;
    dtype = tensor->dtype;
    size = moei_dtypes[dtype].size;
    p = tensor->data + first * (size_t)size;
    if (dtype == MOE_DTYPE_F64)
        for (i = 0; i < count; i++) values[i] = moei_real_of_bits(moei_load(p + 8 * i, 8));
    else if (dtype == MOE_DTYPE_F32)
        for (i = 0; i < count; i++) values[i] = (moe_real)moei_binary32((uint32_t)moei_load(p + 4 * i, 4));
    else if (dtype == MOE_DTYPE_F16)
        for (i = 0; i < count; i++) values[i] = (moe_real)moei_from_f16((uint16_t)moei_load(p + 2 * i, 2));
    else if (dtype == MOE_DTYPE_BF16)
        for (i = 0; i < count; i++) values[i] = (moe_real)moei_binary32((uint32_t)moei_load(p + 2 * i, 2) << 16);
    else if (dtype == MOE_DTYPE_BOOL)
        for (i = 0; i < count; i++) values[i] = p[i] != 0 ? MOEI_R(1.0) : 0;
    else if (moei_dtype_is_signed(dtype))
        for (i = 0; i < count; i++) values[i] = (moe_real)moei_load_signed(p + (size_t)size * i, size);
    else
        for (i = 0; i < count; i++) values[i] = (moe_real)moei_load(p + (size_t)size * i, size);
    return MOE_OK;
}

static moe_status moei_file_integers(const moe_file_tensor *tensor, size_t first, size_t count, int64_t *values) {
    moe_status status = moei_values_check(tensor, first, count, values);
    const unsigned char *p;
    int dtype, size;
    size_t i;
    if (status != MOE_OK) return status;
    dtype = tensor->dtype;
    if (dtype <= MOE_DTYPE_BF16) return MOE_ERR_FORMAT; /* floats */
    if (count == 0) return MOE_OK;
    size = moei_dtypes[dtype].size;
    p = tensor->data + first * (size_t)size;
    for (i = 0; dtype == MOE_DTYPE_U64 && i < count; i++)
        if (p[8 * i + 7] > 0x7f) return MOE_ERR_FORMAT;
    if (dtype == MOE_DTYPE_BOOL)
        for (i = 0; i < count; i++) values[i] = p[i] != 0;
    else if (moei_dtype_is_signed(dtype))
        for (i = 0; i < count; i++) values[i] = moei_load_signed(p + (size_t)size * i, size);
    else
        for (i = 0; i < count; i++) values[i] = (int64_t)moei_load(p + (size_t)size * i, size);
    return MOE_OK;
}

moe_status moe_file_values(const moe_file_tensor *tensor, size_t first, size_t count, moe_real *values,
                           int64_t *integers) {
    if (values != NULL && integers != NULL) return MOE_ERR_ARGUMENT;
    return integers != NULL ? moei_file_integers(tensor, first, count, integers)
                            : moei_file_reals(tensor, first, count, values);
}

#ifndef MOE_NO_TRAIN

/* ---- stb_ds: growing lists off the inference path -----------------------------------------------
   Lists have the form of stb_ds arrays, but grow through moei_array_reserve: stb_ds does not check
   its reallocation, and knows no allocator. So only its declarations are included, never its
   implementation, and no function of it is called or linked. MOE_STB_DS_PATH names the header,
   quotes or angle brackets included. A program that wants the short names of stb_ds includes it
   before this file. */

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Weverything"
#elif defined(__GNUC__) && !defined(__PCC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wpedantic"
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wsign-conversion"
#pragma GCC diagnostic ignored "-Wsign-compare"
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wcast-align"
#pragma GCC diagnostic ignored "-Wcast-qual"
#pragma GCC diagnostic ignored "-Wundef"
#pragma GCC diagnostic ignored "-Wunused-value"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wextra"
#pragma GCC diagnostic ignored "-Wimplicit-fallthrough"
#pragma GCC diagnostic ignored "-Wold-style-cast"
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#pragma GCC diagnostic ignored "-Wstrict-prototypes"
#pragma GCC diagnostic ignored "-Wnonnull"
#pragma GCC diagnostic ignored "-Warray-bounds"
#pragma GCC diagnostic ignored "-Wstringop-overflow"
#elif defined(_MSC_VER)
#pragma warning(push, 0)
#endif

/* stb_ds: begin */
#ifndef INCLUDE_STB_DS_H
#ifdef STB_DS_IMPLEMENTATION /* meant for an include of the program's own */
#undef STB_DS_IMPLEMENTATION
#define MOEI_STB_DS_IMPLEMENTATION
#endif
#ifndef STBDS_NO_SHORT_NAMES
#define STBDS_NO_SHORT_NAMES
#define MOEI_STB_DS_NAMES
#endif
#if defined(MOE_STB_DS_PATH)
#include MOE_STB_DS_PATH
#elif defined(__has_include)
#if __has_include("stb_ds.h")
#include "stb_ds.h"
#elif __has_include(<stb/stb_ds.h>)
#include <stb/stb_ds.h>
#else
#error "moe.h needs stb_ds.h: install it (Debian: apt-get install libstb-dev), or use the file of `sh amalgamate`"
/* What moe.h uses of it, so that no other error hides this one. */
typedef struct stbds_array_header {
    size_t length, capacity;
} stbds_array_header;
#define stbds_header(list) ((stbds_array_header *)(list) - 1)
#endif
#else
#include "stb_ds.h"
#endif
#ifdef MOEI_STB_DS_NAMES
#undef STBDS_NO_SHORT_NAMES
#undef MOEI_STB_DS_NAMES
#endif
#ifdef MOEI_STB_DS_IMPLEMENTATION
#define STB_DS_IMPLEMENTATION
#undef MOEI_STB_DS_IMPLEMENTATION
#endif
#endif
/* stb_ds: end */

/* The block before an array's elements. The elements are aligned as the block is, as by malloc;
   hence no warning. */
static stbds_array_header *moei_array_header(void *list) { return list != NULL ? stbds_header(list) : NULL; }

/* The number of elements of an array (NULL: 0). */
MOEI_TOOL size_t moei_array_length(const void *list) {
    return list != NULL ? ((const stbds_array_header *)list - 1)->length : 0;
}

/* Makes room for a total of capacity elements in the array whose pointer is at list. Grows at least
   by half, so that reserving one more each time is cheap. Returns 0 if out of memory; the array is
   then unchanged. The array belongs to a from its first reserve on. */
MOEI_TOOL int moei_array_reserve(const moe_allocator *a, void *list, size_t element_size, size_t capacity) {
    stbds_array_header *h;
    void *elements;
    size_t old_size = 0, size, grown;
    /* the pointer may have any type, so its bytes are copied */
    memcpy(&elements, list, sizeof elements);
    h = moei_array_header(elements);
    if (h != NULL) {
        if (capacity <= h->capacity) return 1;
        if (moei_add(h->capacity, h->capacity / 2 + 4, &grown) && capacity < grown) capacity = grown;
        old_size = sizeof *h + h->capacity * element_size;
    }
    if (!moei_mul(capacity, element_size, &size) || !moei_add(size, sizeof *h, &size)) return 0;
    h = (stbds_array_header *)moei_resize(a, h, old_size, size);
    if (h == NULL) return 0;
    if (old_size == 0) memset(h, 0, sizeof *h);
    h->capacity = capacity;
    elements = h + 1;
    memcpy(list, &elements, sizeof elements);
    return 1;
}

/* Frees an array that moei_array_reserve made, and sets its pointer to NULL. */
MOEI_TOOL void moei_array_free(const moe_allocator *a, void *list, size_t element_size) {
    stbds_array_header *h;
    void *elements;
    memcpy(&elements, list, sizeof elements);
    h = moei_array_header(elements);
    if (h != NULL) (void)moei_resize(a, h, sizeof *h + h->capacity * element_size, 0);
    elements = NULL;
    memcpy(list, &elements, sizeof elements);
}

/* Appends n bytes to an array of characters; 0 if out of memory. */
MOEI_TOOL int moei_array_append(const moe_allocator *a, char **list, const char *s, size_t n) {
    size_t need;
    if (n == 0) return 1;
    if (!moei_add(moei_array_length(*list), n, &need) || !moei_array_reserve(a, list, 1, need)) return 0;
    memcpy(*list + moei_array_length(*list), s, n);
    moei_array_header(*list)->length += n;
    return 1;
}

#if defined(__clang__)
#pragma clang diagnostic pop
#elif defined(__GNUC__) && !defined(__PCC__)
#pragma GCC diagnostic pop
#elif defined(_MSC_VER)
#pragma warning(pop)
#endif

/* ---- safetensors: writing ---- */

/* The header under construction; after a failed allocation nothing more is added. */
typedef struct moei_header {
    const moe_allocator *allocator;
    char *text; /* a list */
    int failed;
} moei_header;

static size_t moei_header_length(const moei_header *h) { return moei_array_length(h->text); }

static void moei_header_put(moei_header *h, const char *s, size_t n) {
    if (!h->failed && !moei_array_append(h->allocator, &h->text, s, n)) h->failed = 1;
}

static void moei_header_put_text(moei_header *h, const char *s) { moei_header_put(h, s, moei_strlen(s)); }

static void moei_header_put_size(moei_header *h, size_t value) {
    char digits[24];
    moei_text t = moei_text_begin(digits, sizeof digits);
    moei_put_unsigned(&t, value);
    moei_header_put(h, digits, t.length);
}

/* Appends a quoted string. */
static void moei_header_put_string(moei_header *h, const char *s) {
    const char *run = s; /* bytes that need no escape are copied in runs */
    moei_header_put(h, "\"", 1);
    for (; *s != '\0'; s++) {
        char escape[6] = {'\\', 'u', '0', '0', '0', '0'};
        int c = (unsigned char)*s, quoted = c == '"' || c == '\\';
        if (c >= 0x20 && !quoted) continue;
        moei_header_put(h, run, (size_t)(s - run));
        run = s + 1;
        escape[1] = (char)(quoted ? *s : 'u');
        escape[4] = (char)('0' + (c >> 4));
        escape[5] = "0123456789abcdef"[c & 15];
        moei_header_put(h, escape, quoted ? 2 : 6);
    }
    moei_header_put(h, run, (size_t)(s - run));
    moei_header_put(h, "\"", 1);
}

static int moei_is_utf8(const char *s) {
    uint32_t code;
    while (*s != '\0')
        if (!moei_next_utf8(&s, NULL, &code)) return 0;
    return 1;
}

/* Checks one tensor; *bytes gets its size in the file. */
static moe_status moei_write_check(const moe_tensor *t, size_t index, size_t *bytes, moe_error *error) {
    size_t count = 1;
    int i;
    if (moei_memchr(t->name, '\0', MOE_NAME_SIZE) == NULL)
        return MOEI_REFUSE(error, "tensor %z: the name is not terminated", index);
    if (!moei_is_utf8(t->name)) return MOEI_REFUSE(error, "tensor %z: the name is not UTF-8", index);
    if (moei_strcmp(t->name, "__metadata__") == 0)
        return MOEI_REFUSE(error, "tensor %z: the name __metadata__ is reserved", index);
    if (t->n_dims < 0 || t->n_dims > MOE_MAX_DIMS)
        return MOEI_REFUSE(error, "tensor %z, %s: n_dims = %d, allowed are 0 to %d", index, t->name, t->n_dims,
                           (int)MOE_MAX_DIMS);
    for (i = 0; i < t->n_dims; i++)
        if (!moei_mul(count, t->shape[i], &count)) break;
    if (i < t->n_dims || !moei_mul(count, sizeof(moe_real), bytes))
        return moei_error(error, MOE_ERR_OVERFLOW, "tensor %z, %s: the shape needs more bytes than size_t holds", index,
                          t->name);
    if (count != t->count)
        return moei_error(error, MOE_ERR_SHAPE, "tensor %z, %s: count = %z, but the shape has %z elements", index,
                          t->name, t->count, count);
    if (t->data == NULL && count > 0) return MOEI_REFUSE(error, "tensor %z, %s: data is NULL", index, t->name);
    return MOE_OK;
}

static moe_status moei_header_metadata(moei_header *h, const moe_metadata *metadata, size_t n, moe_error *error) {
    size_t i;
    moei_header_put_text(h, "\"__metadata__\":{");
    for (i = 0; i < n; i++) {
        if (metadata[i].key == NULL || metadata[i].value == NULL)
            return MOEI_REFUSE(error, "metadata %z: key or value is NULL", i);
        if (!moei_is_utf8(metadata[i].key) || !moei_is_utf8(metadata[i].value))
            return MOEI_REFUSE(error, "metadata %z: key or value is not UTF-8", i);
        if (i > 0) moei_header_put(h, ",", 1);
        moei_header_put_string(h, metadata[i].key);
        moei_header_put(h, ":", 1);
        moei_header_put_string(h, metadata[i].value);
    }
    moei_header_put(h, "}", 1);
    return MOE_OK;
}

/* Appends what follows a tensor's name. */
static void moei_header_put_entry(moei_header *h, int dtype, const size_t *shape, int n_dims, size_t begin,
                                  size_t end) {
    int d;
    moei_header_put_text(h, ":{\"dtype\":\"");
    moei_header_put_text(h, moei_dtypes[dtype].name);
    moei_header_put_text(h, "\",\"shape\":[");
    for (d = 0; d < n_dims; d++) {
        if (d > 0) moei_header_put(h, ",", 1);
        moei_header_put_size(h, shape[d]);
    }
    moei_header_put_text(h, "],\"data_offsets\":[");
    moei_header_put_size(h, begin);
    moei_header_put(h, ",", 1);
    moei_header_put_size(h, end);
    moei_header_put_text(h, "]}");
}

static moe_status moei_header_tensors(moei_header *h, const moe_tensor *tensors, size_t n, int comma,
                                      moe_error *error) {
    size_t i, begin = 0, bytes = 0, end;
    for (i = 0; i < n; i++, begin = end) {
        const moe_tensor *t = &tensors[i];
        moe_status status = moei_write_check(t, i, &bytes, error);
        if (status != MOE_OK) return status;
        if (!moei_add(begin, bytes, &end))
            return moei_error(error, MOE_ERR_OVERFLOW, "tensor %z, %s: the file is too large", i, t->name);
        if (comma || i > 0) moei_header_put(h, ",", 1);
        moei_header_put_string(h, t->name);
        moei_header_put_entry(h, MOE_REAL_IS_DOUBLE ? MOE_DTYPE_F64 : MOE_DTYPE_F32, t->shape, t->n_dims, begin, end);
    }
    return MOE_OK;
}

/* Checks the names in the finished text as the reader does. */
static moe_status moei_header_unique(const moei_header *h, const moei_names *where, size_t n, moe_error *error) {
    moei_names w = *where;
    moei_span name;
    char shown[52];
    const char *problem;
    w.bytes = (const unsigned char *)h->text;
    problem = n > 1 ? moei_names_problem(w, n, &name) : NULL;
    if (problem == NULL) return MOE_OK;
    return MOEI_REFUSE(error, "%s '%s': %s", w.texts ? "metadata" : "tensor", moei_span_text(name, shown), problem);
}

/* Ends the object with a brace and spaces up to a multiple of 8, and sets the length before it. */
static moe_status moei_header_end(moei_header *h, moe_error *error) {
    size_t length;
    int i;
    moei_header_put(h, "}", 1);
    moei_header_put(h, "       ", (8 - moei_header_length(h) % 8) % 8);
    if (h->failed) return moei_error(error, MOE_ERR_MEMORY, "out of memory: the header of the file");
    length = moei_header_length(h) - 8;
    if (length > MOEI_FILE_MAX_HEADER)
        return MOEI_REFUSE(error, "names and metadata need a header of %z bytes, allowed are 100000000", length);
    for (i = 0; i < 8; i++) h->text[i] = (char)(unsigned char)((uint64_t)length >> 8 * i & 0xffu);
    return MOE_OK;
}

/* Builds the whole header: the length's eight bytes, the object, and spaces up to a multiple of
   8. */
static moe_status moei_header_build(moei_header *h, const moe_tensor *tensors, size_t n_tensors,
                                    const moe_metadata *metadata, size_t n_metadata, moe_error *error) {
    moei_names inner, outer;
    moe_status status;
    memset(&inner, 0, sizeof inner);
    memset(&outer, 0, sizeof outer);
    inner.texts = 1;
    moei_header_put(h, "        {", 9);
    outer.at = 9;
    if (n_metadata > 0) {
        inner.at = outer.skip_at = 9 + moei_strlen("\"__metadata__\":");
        if ((status = moei_header_metadata(h, metadata, n_metadata, error)) != MOE_OK) return status;
        inner.end = outer.skip_end = moei_header_length(h);
    }
    if ((status = moei_header_tensors(h, tensors, n_tensors, n_metadata > 0, error)) != MOE_OK) return status;
    if ((status = moei_header_end(h, error)) != MOE_OK) return status;
    outer.end = moei_header_length(h);
    if ((status = moei_header_unique(h, &outer, n_tensors, error)) != MOE_OK) return status;
    return moei_header_unique(h, &inner, n_metadata, error);
}

/* The status of a stream's function. MOE_ERR_TRANSPORT would end the exchanges in this process
   alone. */
static moe_status moei_streamed(moe_status status, moe_error *error) {
    if (status == MOE_ERR_TRANSPORT) status = MOE_ERR_IO;
    return status == MOE_OK ? status : moei_error(error, status, "the stream failed: %s", moe_status_text(status));
}

static moe_status moei_write_reals(moe_stream *stream, const moe_real *x, size_t n, moe_error *error) {
    unsigned char out[256 * sizeof(moe_real)];
    while (n > 0) {
        size_t i, b, block = n < 256 ? n : 256;
        moe_status status;
        for (i = 0; i < block; i++) {
            const moei_bits bits = moei_real_bits(x[i]);
            for (b = 0; b < sizeof bits; b++) out[i * sizeof bits + b] = (unsigned char)(bits >> 8 * b & 0xffu);
        }
        status = moei_streamed(stream->write(stream->ctx, out, block * sizeof(moe_real)), error);
        if (status != MOE_OK) return status;
        x += block;
        n -= block;
    }
    return MOE_OK;
}

/* The source of a file's tensor values if the tensors do not hold all of them. */
typedef struct moei_values {
    void *ctx;
    /* called after the header is built; status: whether that succeeded */
    moe_status (*ready)(void *ctx, moe_status status, moe_error *error);
    /* Writes tensor i unless status is an earlier failure; returns the new status. */
    moe_status (*put)(void *ctx, moe_status status, size_t i, moe_error *error);
} moei_values;

static moe_status moei_write_check_call(const moe_stream *stream, const moe_tensor *tensors, size_t n_tensors,
                                        const moe_metadata *metadata, size_t n_metadata, const moe_allocator *allocator,
                                        moe_error *error) {
    if (stream == NULL || stream->write == NULL) return MOEI_REFUSE(error, "stream or its write is NULL");
    if ((tensors == NULL && n_tensors > 0) || (metadata == NULL && n_metadata > 0))
        return MOEI_REFUSE(error, "tensors or metadata is NULL");
    if (n_tensors > MOE_FILE_MAX_TENSORS || n_metadata > MOE_FILE_MAX_TENSORS)
        return MOEI_REFUSE(error, "%z tensors, %z metadata: a file takes %z of each", n_tensors, n_metadata,
                           (size_t)MOE_FILE_MAX_TENSORS);
    return moei_allocator_check(allocator, error);
}

/* values NULL: the tensors' data. */
static moe_status moei_file_write(moe_stream *stream, const moe_tensor *tensors, size_t n_tensors,
                                  const moe_metadata *metadata, size_t n_metadata, const moei_values *values,
                                  const moe_allocator *allocator, moe_error *error) {
    moei_header h;
    moe_status status = moei_write_check_call(stream, tensors, n_tensors, metadata, n_metadata, allocator, error);
    size_t i;
    memset(&h, 0, sizeof h);
    h.allocator = allocator;
    if (status == MOE_OK) status = moei_header_build(&h, tensors, n_tensors, metadata, n_metadata, error);
    if (values != NULL) status = values->ready(values->ctx, status, error);
    if (status == MOE_OK) {
        status = moei_streamed(stream->write(stream->ctx, h.text, moei_header_length(&h)), error);
        for (i = 0; i < n_tensors && status == MOE_OK && values == NULL; i++)
            status = moei_write_reals(stream, tensors[i].data, tensors[i].count, error);
        for (i = 0; i < n_tensors && values != NULL; i++) status = values->put(values->ctx, status, i, error);
        if (status == MOE_OK && stream->sync != NULL) status = moei_streamed(stream->sync(stream->ctx), error);
    }
    moei_array_free(allocator, &h.text, 1);
    return status;
}

moe_status moe_file_write(moe_stream *stream, const moe_tensor *tensors, size_t n_tensors, const moe_metadata *metadata,
                                  size_t n_metadata, const moe_allocator *allocator, moe_error *error) {
    return moei_file_write(stream, tensors, n_tensors, metadata, n_metadata, NULL, allocator, error);
}

#endif /* MOE_NO_TRAIN */

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>code_experts: each kind is a short program of steps over named activations ============ */

enum { MOEI_STEP_MATMUL = 0, MOEI_STEP_ACT, MOEI_STEP_GATED };
/* the expert's input, after the activations that steps compute */
enum { MOEI_X = MOE_NODE_COUNT, MOEI_ACTIVATIONS };

/* to = W from + bias; to = act(from); to = act(from) * second. Within a stage, a step reads of the
   others' results only the columns that it computes itself, so all steps of a stage process a few
   columns at a time. All results of a stage have the same width. */
typedef struct moei_step {
    int op, stage, to, from, second;
    int weight, bias; /* parameter indices; bias -1: none */
} moei_step;

/* What the configuration may set for a kind. */
enum {
    MOEI_HAS_ACT = 1,      /* act */
    MOEI_HAS_LOW = 2,      /* d_low */
    MOEI_HAS_BIASES = 4,   /* biases, unless no_expert_bias is set */
    MOEI_MAY_HAVE_BIASES = 8, /* biases, if expert_bias is set */
    MOEI_HAS_SHAPE = 16    /* swiglu_alpha, swiglu_limit, swiglu_offset */
};

enum { MOEI_MAX_STEPS = 6, MOEI_MAX_STAGES = 3 };

typedef struct moei_expert {
    unsigned has;          /* MOEI_HAS_ */
    /* what these names mean for a kind without a linear branch; -1: nothing */
    int up_is, product_is;
    int n_stages, n_steps;
    moei_step steps[MOEI_MAX_STEPS];
} moei_expert;

/* The row of each kind of MOE_EXPERT_KINDS. The output of the activation function is stored
   separately for gated kinds only if a score reads it. */
#define MOEI_GATED(has) \
    {has, MOE_NODE_UP, MOE_NODE_PRODUCT, 2, 5, \
     {{MOEI_STEP_MATMUL, 0, MOE_NODE_GATE, MOEI_X, 0, MOE_EXPERTS_GATE, MOE_EXPERTS_GATE_BIAS}, \
      {MOEI_STEP_ACT, 0, MOE_NODE_ACT, MOE_NODE_GATE, 0, 0, 0}, \
      {MOEI_STEP_MATMUL, 0, MOE_NODE_UP, MOEI_X, 0, MOE_EXPERTS_UP, MOE_EXPERTS_UP_BIAS}, \
      {MOEI_STEP_GATED, 0, MOE_NODE_PRODUCT, MOE_NODE_GATE, MOE_NODE_UP, 0, 0}, \
      {MOEI_STEP_MATMUL, 1, MOE_NODE_OUTPUT, MOE_NODE_PRODUCT, 0, MOE_EXPERTS_DOWN, MOE_EXPERTS_DOWN_BIAS}}}
#define MOEI_MLP \
    {MOEI_HAS_BIASES | MOEI_HAS_ACT, MOE_NODE_GATE, MOE_NODE_ACT, 2, 3, \
     {{MOEI_STEP_MATMUL, 0, MOE_NODE_GATE, MOEI_X, 0, MOE_EXPERTS_FC1_WEIGHT, MOE_EXPERTS_FC1_BIAS}, \
      {MOEI_STEP_ACT, 0, MOE_NODE_ACT, MOE_NODE_GATE, 0, 0, 0}, \
      {MOEI_STEP_MATMUL, 1, MOE_NODE_OUTPUT, MOE_NODE_ACT, 0, MOE_EXPERTS_FC2_WEIGHT, MOE_EXPERTS_FC2_BIAS}}}
#define MOEI_LINEAR \
    { \
        MOEI_HAS_BIASES, -1, -1, 1, 1, { \
            { MOEI_STEP_MATMUL, 0, MOE_NODE_OUTPUT, MOEI_X, 0, MOE_EXPERTS_WEIGHT, MOE_EXPERTS_BIAS } \
        } \
    }
#define MOEI_FACTORISED \
    {MOEI_HAS_LOW, MOE_NODE_UP, MOE_NODE_PRODUCT, 3, 6, \
     {{MOEI_STEP_MATMUL, 0, MOE_NODE_LOW, MOEI_X, 0, MOE_EXPERTS_REDUCE, -1}, \
      {MOEI_STEP_MATMUL, 1, MOE_NODE_GATE, MOE_NODE_LOW, 0, MOE_EXPERTS_EXPAND, -1}, \
      {MOEI_STEP_ACT, 1, MOE_NODE_ACT, MOE_NODE_GATE, 0, 0, 0}, \
      {MOEI_STEP_MATMUL, 1, MOE_NODE_UP, MOEI_X, 0, MOE_EXPERTS_UP, -1}, \
      {MOEI_STEP_GATED, 1, MOE_NODE_PRODUCT, MOE_NODE_GATE, MOE_NODE_UP, 0, 0}, \
      {MOEI_STEP_MATMUL, 2, MOE_NODE_OUTPUT, MOE_NODE_PRODUCT, 0, MOE_EXPERTS_DOWN, -1}}}
#define MOEI_SHARED_EXPERT \
    {0, MOE_NODE_UP, MOE_NODE_PRODUCT, 2, 4, \
     {{MOEI_STEP_MATMUL, 0, MOE_NODE_GATE, MOEI_X, 0, MOE_SHARED_GATE, -1}, \
      {MOEI_STEP_MATMUL, 0, MOE_NODE_UP, MOEI_X, 0, MOE_SHARED_UP, -1}, \
      {MOEI_STEP_GATED, 0, MOE_NODE_PRODUCT, MOE_NODE_GATE, MOE_NODE_UP, 0, 0}, \
      {MOEI_STEP_MATMUL, 1, MOE_NODE_OUTPUT, MOE_NODE_PRODUCT, 0, MOE_SHARED_DOWN, -1}}}

/* One product: into the width of the experts, or out of it. */
#define MOEI_LATENT(weight) {0, -1, -1, 1, 1, {{MOEI_STEP_MATMUL, 0, MOE_NODE_OUTPUT, MOEI_X, 0, weight, -1}}}

#define MOEI_KIND_ROW(value, name, ...) __VA_ARGS__,
#define MOEI_KIND_NAME(value, name, ...) name,

/* What every token passes through: three more kinds, after those that a configuration can
   choose. */
enum { MOEI_SHARED = MOE_EXPERT_COUNT, MOEI_LATENT_IN, MOEI_LATENT_OUT };
static const moei_expert moei_experts[] = {MOE_EXPERT_KINDS(MOEI_KIND_ROW) MOEI_SHARED_EXPERT,
                                           MOEI_LATENT(MOE_LATENT_IN), MOEI_LATENT(MOE_LATENT_OUT)};
static const char *const moei_expert_names[] = {MOE_EXPERT_KINDS(MOEI_KIND_NAME) NULL};

/* ==== processes that share experts ============================================================ */

struct moei_brought;
struct moei_contents;
struct moei_returned;
struct moei_writing;

/* The tokens of one call in all processes. */
typedef struct moei_tokens {
    /* of the processes before this one, of all, and the most of one process */
    size_t first, total, most;
} moei_tokens;

/* What layers, networks, trainers and files call where processes share experts. config.transport
   and net.transport point to a record that begins with a moe_batch of one row per process: first is
   this process's number, total their number, hooks this table. moe_ranks.h supplies it; a program
   without a transport links none of it. All but check and size are collective. A function that
   takes a status returns MOE_OK if every process passes MOE_OK, else the caller's failure or
   MOE_ERR_PEER. */
struct moei_hooks {
    moe_status (*check)(const moe_layer_config *config, moe_error *error);
    /* whether all processes have the same settings */
    moe_status (*agree)(const moe_layer_config *config, int trainable, uint64_t seed, moe_error *error);
    moe_status (*size)(const moe_layer *layer, size_t n, int training, size_t *bytes);
    moe_status (*forward)(const moe_layer *layer, const moe_call *call, moe_real *y, void *work, size_t work_size,
                          moe_layer_pass *pass);
    moe_status (*net_agree)(const moe_net *net, int trainable, uint64_t seed, moe_error *error);
    moe_status (*net_meet)(const moe_net *net, const moe_call *call, size_t work_size, moe_status status,
                           moei_tokens *tokens);
    /* values[i] = the sum over all processes in their order, the same bits on all; n <= 7. */
    moe_status (*add)(const moe_batch *group, moe_status status, size_t n, double *values, moe_error *error);
    moe_status (*file_agree)(const moe_batch *group, const struct moei_contents *c, int trainable,
                             const moe_kernels *kernels, moe_error *error);
#ifndef MOE_NO_STDIO
    /* Reads the header alone. */
    moe_status (*file_open)(const moe_batch *group, struct moei_contents *c, const char *path, moe_error *error);
#endif
#ifndef MOE_NO_TRAIN
    moe_status (*backward)(const moe_layer *layer, const struct moei_returned *back, moe_real *dx, moe_real *d_router_x,
                           moe_layer_pass *pass);
    moe_status (*observe)(const moe_layer *layer, const moe_layer_pass *pass, moe_real *const *state);
    moe_status (*data_agree)(const moe_net *net, const moe_data *data, int criterion, const char *where,
                             moe_error *error);
    moe_status (*train_agree)(const moe_net *net, const moe_train_config *config, moe_error *error);
    moe_status (*train_meet)(const moe_trainer *trainer, moe_status status, struct moei_brought *brought,
                             moe_error *error);
    /* sums the gradients of tensors that every process holds */
    moe_status (*train_reduce)(const moe_trainer *trainer, moe_error *error);
    moe_status (*write_experts)(const struct moei_writing *w, moe_status status, size_t experts,
                                const moe_tensor *tensor, const moe_real *data, moe_error *error);
#endif
};

static const moe_batch *moei_group(const struct moe_transport *t) { return (const moe_batch *)(const void *)t; }

/* The hooks of a transport. NULL: t is NULL, or moe_transport_begin has not been called, which
   *status and error say. */
static const struct moei_hooks *moei_hooks_of(const struct moe_transport *t, moe_status *status, moe_error *error) {
    if (t == NULL) return NULL;
    if (moei_group(t)->hooks == NULL && *status == MOE_OK)
        *status = moei_error(error, MOE_ERR_CONFIG, "transport is not ready: call moe_transport_begin first");
    return moei_group(t)->hooks;
}

/* hooks->add. */
static moe_status moei_add_over(const struct moe_transport *t, moe_status status, size_t n, double *values,
                                moe_error *error) {
    const struct moei_hooks *hooks = moei_hooks_of(t, &status, error);
    return hooks != NULL ? hooks->add(moei_group(t), status, n, values, error) : status;
}

/* The status of all processes. Allocates nothing, so a process that is out of memory can report
   it. */
static moe_status moei_vote(const struct moe_transport *t, moe_status status, moe_error *error) {
    return moei_add_over(t, status, 0, NULL, error);
}

/* Part number `part` of n things: parts are consecutive and differ by at most one in length. */
static void moei_nth_part(size_t n, size_t part, size_t parts, size_t *first, size_t *count) {
    size_t each = n / parts, more = n % parts;
    *first = part * each + (part < more ? part : more);
    *count = each + (part < more);
}

/* This process's part of n things. */
static void moei_own_part(const struct moe_transport *t, size_t n, size_t *first, size_t *count) {
    moei_nth_part(n, moei_group(t)->first, moei_group(t)->total, first, count);
}

/* ==== >>code_config =========================================================================== */

/* For experts, 0 is the kind's default, and "relu" comes after the other names. */
#define MOEI_EXPERT_ACT(value, name, f, field) (value) == MOE_ACT_RELU ? "default" : (name),
static const char *const moei_expert_act_names[] = {MOE_ACTS(MOEI_EXPERT_ACT) "relu", NULL};

#define MOEI_L moe_layer_config

/* The rows of an expert, in a mixture and in feed_forward. */
#define MOEI_EXPERT_ROWS \
    MOEI_CHOICE(MOEI_L, expert, MOE_EXPERT_COUNT, moei_expert_names, "kind of experts"), \
    MOEI_INT(MOEI_L, d_ff, 1, MOE_MAX_WIDTH, "hidden width of an expert"), \
    MOEI_INT(MOEI_L, d_low, 1, MOE_MAX_WIDTH, "rows of reduce in a factorised expert"), \
    MOEI_CHOICE(MOEI_L, act, MOE_ACT_NAMED_RELU + 1, moei_expert_act_names, "activation of mlp and glu experts"), \
    MOEI_FLAG(MOEI_L, no_expert_bias, "mlp and linear experts have no biases"), \
    MOEI_REAL(MOEI_L, swiglu_alpha, 1e-6, 1e6, "alpha of swiglu experts"), \
    MOEI_REAL(MOEI_L, swiglu_limit, 1e-6, 1e6, "limit of swiglu experts"), \
    MOEI_REAL(MOEI_L, swiglu_offset, -1e6, 1e6, "offset of swiglu experts"), \
    MOEI_FLAG(MOEI_L, expert_bias, "swiglu and glu experts have biases"),

/* The router's rows come first: its configuration is at offset 0. */
static const moe_field moei_layer_fields[] = {
    MOEI_ROUTER_ROWS
    MOEI_INT(MOEI_L, d_out, 1, MOE_MAX_WIDTH, "width of the output"),
    MOEI_EXPERT_ROWS
    MOEI_INT(MOEI_L, n_shared, 1, 4096, "number of shared experts"),
    MOEI_INT(MOEI_L, d_shared, 1, MOE_MAX_WIDTH, "width of one shared expert"),
    MOEI_CHOICE(MOEI_L, shared_act, MOE_ACT_NAMED_RELU + 1, moei_expert_act_names, "activation of shared experts"),
    MOEI_FLAG(MOEI_L, add_input, "the input is added with weight 1 - sum of w"),
    MOEI_FLAG(MOEI_L, shared_sigmoid, "the shared expert is gated by a sigmoid"),
    MOEI_INT(MOEI_L, d_latent, -MOE_MAX_WIDTH, MOE_MAX_WIDTH, "width of the experts' latent space"),
    MOEI_CHOICE(MOEI_L, kernels, MOE_KERNELS_COUNT, moei_kernel_names, "instruction set"),
    MOEI_FIELDS_END};

const moe_field *moe_layer_fields(void) { return moei_layer_fields; }

/* The activation that the score reads, or -1: the score reads none, or this kind of expert has no
   such activation. */
static int moei_scored_activation(const moe_layer_config *c) {
    const moei_expert *kind = &moei_experts[c->expert];
    int scored = c->router.norm_node, i;
    if (!(moei_score_flags[c->router.score] & MOE_TRAIT_NEEDS_ALL_EXPERTS)) return -1;
    if (c->router.score == MOE_SCORE_COMPETITION) scored = MOE_NODE_OUTPUT;
    /* what the last projection reads */
    if (c->router.score == MOE_SCORE_ATTENTIVE) scored = MOE_NODE_PRODUCT;
    if (scored == MOE_NODE_UP) scored = kind->up_is;
    if (scored == MOE_NODE_PRODUCT) scored = kind->product_is;
    for (i = 0; i < kind->n_steps; i++)
        if (kind->steps[i].to == scored) return scored;
    return -1;
}

/* The width at which a factorised expert has the parameters of swiglu of width 4 d: d_low d +
   f (d_low + 2 d) = 12 d^2, rounded down. */
static int moei_parity_width(int d, int d_low) {
    const int64_t left = (int64_t)12 * d * d - (int64_t)d_low * d, width = left / (d_low + (int64_t)2 * d);
    return width < 1 ? 1 : width < MOE_MAX_WIDTH ? (int)width : (int)MOE_MAX_WIDTH;
}

static void moei_layer_defaults(moe_layer_config *c) {
    int d = c->router.d_model;
    moei_default(&c->d_out, d);
    if (c->expert == MOE_EXPERT_GLU) moei_default(&c->act, MOE_ACT_SILU);
    else if (c->act == MOE_ACT_NAMED_RELU) c->act = MOE_ACT_RELU;
    if (moei_experts[c->expert].has & MOEI_HAS_LOW) {
        moei_default(&c->d_low, (d + 2) / 3);
        moei_default(&c->d_ff, moei_parity_width(d, c->d_low));
    }
    moei_default(&c->d_ff, d <= MOE_MAX_WIDTH / 4 ? 4 * d : MOE_MAX_WIDTH);
    if (c->router.score == MOE_SCORE_ATTENTIVE) moei_default(&c->router.router_hidden, c->d_ff);
    if (c->n_shared > 0) moei_default(&c->d_shared, c->d_ff);
    if (c->d_latent < 0) c->d_latent = d / -c->d_latent + (d % -c->d_latent > 0);
}

/* Refuses a field that this kind of expert does not have, or resets it if the preset set it. */
static moe_status moei_kind_clashes(moe_layer_config *c, int preset, moe_error *error) {
    static const struct {
        const char *field;
        unsigned has;
    } rows[] = {{"act", MOEI_HAS_ACT}, {"d_low", MOEI_HAS_LOW}, {"no_expert_bias", MOEI_HAS_BIASES},
                {"swiglu_alpha", MOEI_HAS_SHAPE}, {"swiglu_limit", MOEI_HAS_SHAPE}, {"swiglu_offset", MOEI_HAS_SHAPE},
                {"expert_bias", MOEI_MAY_HAVE_BIASES}};
    char value[40], kinds[40];
    moe_layer_config made;
    uint32_t with = 0;
    size_t i;
    int kind;
    memset(&made, 0, sizeof made);
    if (preset > 0) (void)moe_layer_preset(moe_presets()[preset - 1].name, &made, NULL);
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const moe_field *field = moe_field_find(moei_layer_fields, rows[i].field);
        if ((moei_experts[c->expert].has & rows[i].has) || moei_field_is_zero(field, c)) continue;
        moe_field_text(field, c, value, sizeof value);
        moe_field_text(field, &made, kinds, sizeof kinds);
        if (moei_strcmp(value, kinds) == 0) {
            if (field->kind == MOE_FIELD_REAL) *moei_field_real(field, c) = 0;
            else *moei_field_int(field, c) = 0;
            continue;
        }
        for (kind = 0; kind < MOE_EXPERT_COUNT; kind++)
            if (moei_experts[kind].has & rows[i].has) with |= MOEI_BIT(kind);
        field = moe_field_find(moei_layer_fields, "expert");
        return moei_error(error, MOE_ERR_CONFIG, "%s = %s is incompatible with expert = %s: it is for %s",
                          rows[i].field, value, moei_expert_names[c->expert],
                          moei_choices_text(field, with, ", ", kinds, sizeof kinds));
    }
    return MOE_OK;
}

static moe_status moei_layer_clashes(const moe_layer_config *c, moe_error *error) {
    const char *kind = moei_expert_names[c->expert];
    const struct moei_hooks *hooks;
    moe_status status = MOE_OK;
    int reads_experts = (moe_router_traits(&c->router) & MOE_TRAIT_NEEDS_ALL_EXPERTS) != 0;
    if (c->router.score == MOE_SCORE_ATTENTIVE && moei_scored_activation(c) < 0)
        return moei_error(error, MOE_ERR_CONFIG,
                          "score = attentive is incompatible with expert = %s: it has no hidden layer", kind);
    if (c->router.score == MOE_SCORE_ATTENTIVE && c->router.router_hidden != c->d_ff)
        return moei_error(error, MOE_ERR_CONFIG,
                          "router_hidden = %d: score = attentive needs the experts' width, d_ff = %d",
                          c->router.router_hidden, c->d_ff);
    if (reads_experts && moei_scored_activation(c) < 0)
        return moei_error(error, MOE_ERR_CONFIG,
                          "score = norm reads norm_node = %s: an expert = %s has no such activation",
                          moei_node_names[c->router.norm_node], kind);
    if (c->n_shared == 0 && (c->d_shared != 0 || c->shared_act != 0 || c->shared_sigmoid))
        return moei_error(error, MOE_ERR_CONFIG, "%s is set but n_shared = 0: there is no shared expert",
                          c->d_shared != 0 ? "d_shared" : c->shared_act != 0 ? "shared_act" : "shared_sigmoid");
    if (c->router.n_copy + c->router.n_constant > 0 && c->d_latent > 0)
        return moei_error(error, MOE_ERR_CONFIG, "%s = %d is incompatible with d_latent = %d",
                          c->router.n_copy > 0 ? "n_copy" : "n_constant",
                          c->router.n_copy > 0 ? c->router.n_copy : c->router.n_constant, c->d_latent);
    if (c->router.n_copy + c->router.n_constant > 0 && c->d_out != c->router.d_model)
        return moei_error(error, MOE_ERR_CONFIG, "%s > 0 needs d_out = d_model = %d, not d_out = %d",
                          c->router.n_copy > 0 ? "n_copy" : "n_constant", c->router.d_model, c->d_out);
    if (c->add_input && c->d_out != c->router.d_model)
        return moei_error(error, MOE_ERR_CONFIG, "add_input = 1 needs d_out = d_model = %d, not d_out = %d",
                          c->router.d_model, c->d_out);
    if (c->add_input && (c->router.apply_to != MOE_APPLY_OUTPUT || moei_is_soft(&c->router)))
        return moei_error(error, MOE_ERR_CONFIG, "add_input = 1 is incompatible with %s",
                          moei_is_soft(&c->router) ? "select = soft" : "apply_to = input");
    if (c->n_shared > 0 && c->d_shared > MOE_MAX_WIDTH / c->n_shared)
        return moei_error(error, MOE_ERR_CONFIG, "d_shared = %d: with n_shared = %d the width exceeds %d", c->d_shared,
                          c->n_shared, (int)MOE_MAX_WIDTH);
    hooks = moei_hooks_of(c->transport, &status, error);
    return hooks != NULL ? hooks->check(c, error) : status;
}

moe_status moe_layer_check(const moe_layer_config *config, moe_layer_config *out, moe_error *error) {
    moe_layer_config c;
    moe_status status;
    if (config == NULL) return MOEI_REFUSE(error, "config must not be NULL");
    c = *config;
    status = moe_router_check(&c.router, &c.router, error);
    if (status == MOE_OK) status = moei_fields_check(moei_layer_fields, &c, error);
    if (status != MOE_OK) return status;
    moei_layer_defaults(&c);
    status = moei_kind_clashes(&c, config->router.preset, error);
    if (status == MOE_OK) status = moei_layer_clashes(&c, error);
    if (status != MOE_OK) return status;
    if (out != NULL) *out = c;
    return MOE_OK;
}

moe_status moe_layer_preset(const char *name, moe_layer_config *config, moe_error *error) {
    const moe_preset *preset = moe_preset_find(name);
    moe_layer_config made;
    moe_status status;
    if (config == NULL) return MOEI_REFUSE(error, "config must not be NULL");
    memset(&made, 0, sizeof made);
    status = moe_router_preset(name, &made.router, error);
    if (status == MOE_OK) status = moe_fields_apply(moei_layer_fields, &made, preset->layer, error);
    if (status == MOE_OK) *config = made;
    return status;
}

/* ==== >>code_parameters ======================================================================= */

/* The experts with matrices that a layer of this configuration holds: all, or its rank's. */
MOEI_TOOL size_t moei_own_experts(const moe_layer_config *c, size_t *first) {
    size_t count = (size_t)MOEI_REAL_EXPERTS(&c->router);
    *first = 0;
    if (c->transport != NULL) moei_own_part(c->transport, count, first, &count);
    return count;
}

/* E matrices [out,in], or E bias rows when in is 0. */
static int moei_slot_experts(moe_parameter *slot, const moe_layer_config *c, int out, int in) {
    size_t first, experts = moei_own_experts(c, &first);
    if (in == 0)
        return moei_parameter_set(slot, 2, experts, (size_t)out, 1, MOE_PARAM_NO_DECAY, 0, 0);
    return moei_parameter_set(slot, 3, experts, (size_t)out, (size_t)in, MOE_PARAM_TRAINED, 0,
                              MOEI_R(1.0) / MOEI_F(sqrt)((moe_real)in));
}

/* How wide an activation is in experts of this kind. */
static int moei_activation_width(const moe_layer_config *c, int kind, int activation) {
    int experts = c->d_latent > 0 && kind != MOEI_SHARED;
    if (activation == MOEI_X) return experts && kind != MOEI_LATENT_IN ? c->d_latent : c->router.d_model;
    if (activation == MOE_NODE_LOW) return c->d_low;
    if (activation == MOE_NODE_OUTPUT) return experts && kind != MOEI_LATENT_OUT ? c->d_latent : c->d_out;
    return kind == MOEI_SHARED ? c->n_shared * c->d_shared : c->d_ff;
}

static int moei_has_biases(const moe_layer_config *c) {
    unsigned has = moei_experts[c->expert].has;
    return has & MOEI_HAS_BIASES ? !c->no_expert_bias : (has & MOEI_MAY_HAVE_BIASES) && c->expert_bias;
}

/* The shape of parameter `index`, from the step that reads it. 1; 0: its size overflows size_t; -1:
   no step reads it. */
static int moei_expert_parameter(const moe_layer_config *c, int kind, int index, moe_parameter *slot) {
    const moei_expert *expert = &moei_experts[kind];
    int i;
    for (i = 0; i < expert->n_steps; i++) {
        const moei_step *step = &expert->steps[i];
        int out = moei_activation_width(c, kind, step->to), in = moei_activation_width(c, kind, step->from);
        if (step->op != MOEI_STEP_MATMUL) continue;
        if (step->weight == index && kind >= MOEI_SHARED)
            return moei_parameter_matrix(slot, (size_t)out, (size_t)in, MOE_PARAM_TRAINED);
        if (step->weight == index) return moei_slot_experts(slot, c, out, in);
        if (step->bias == index && moei_has_biases(c)) return moei_slot_experts(slot, c, out, 0);
    }
    return -1;
}

static int moei_is_constant(int index) { return index == MOE_EXPERTS_CONSTANT || index == MOE_EXPERTS_CONSTANT_GATE; }

/* The vectors and gates of constant experts. */
static int moei_constant_parameter(const moe_layer_config *c, int index, moe_parameter *slot) {
    const size_t n = (size_t)c->router.n_constant, d = (size_t)c->router.d_model;
    const moe_real init_std = MOEI_R(1.0) / MOEI_F(sqrt)((moe_real)d);
    if (n == 0) return -1;
    if (index == MOE_EXPERTS_CONSTANT) return moei_parameter_matrix(slot, n, d, MOE_PARAM_TRAINED);
    return moei_parameter_set(slot, 3, n, 2, d, MOE_PARAM_TRAINED, 0, init_std);
}

static const char *moei_layer_parameter_name(int index) {
    static const char *const names[] = {MOE_EXPERT_PARAMETERS(MOEI_NAME2)};
    if (index < MOE_ROUTER_PARAMETER_COUNT) return moei_router_parameter_name(index);
    return names[index - MOE_ROUTER_PARAMETER_COUNT];
}

moe_status moe_layer_parameter(const moe_layer_config *config, int index, moe_parameter *out) {
    const moe_layer_config *c = config;
    moe_parameter made;
    int fits = -1; /* -1: not there */
    if (index < MOE_ROUTER_PARAMETER_COUNT) return moe_router_parameter(&c->router, index, out);
    if (index >= MOE_LAYER_PARAMETER_COUNT) return MOE_ERR_NOT_FOUND;
    memset(&made, 0, sizeof made);
    if (index < MOE_SHARED_GATE) fits = moei_expert_parameter(c, c->expert, index, &made);
    else if (moei_is_constant(index)) fits = moei_constant_parameter(c, index, &made);
    else if (index >= MOE_LATENT_IN && c->d_latent > 0)
        fits = moei_expert_parameter(c, MOEI_LATENT_IN + index - MOE_LATENT_IN, index, &made);
    else if (c->n_shared > 0 && index < MOE_SHARED_SIGMOID) fits = moei_expert_parameter(c, MOEI_SHARED, index, &made);
    else if (c->n_shared > 0 && c->shared_sigmoid && index == MOE_SHARED_SIGMOID)
        fits = moei_parameter_vector(&made, (size_t)c->router.d_model, MOE_PARAM_TRAINED, 0);
    if (fits < 0) return MOE_ERR_NOT_FOUND;
    if (!fits) return MOE_ERR_OVERFLOW;
    made.name = moei_layer_parameter_name(index);
    *out = made;
    return MOE_OK;
}

/* Initializes a tensor: init_value + init_std * normal. */
MOEI_TOOL void moei_slot_fill(const moe_parameter *slot, moe_real *data, moe_rng *rng) {
    size_t i;
    for (i = 0; i < slot->count; i++)
        data[i] =
            slot->init_value + (slot->init_std > 0 ? slot->init_std * moe_rng_normal(rng) : 0);
}

static moe_status moei_kernels_of(int wanted, const moe_kernels **kernels, moe_error *error) {
    *kernels = moe_kernels_select(wanted);
    if (*kernels != NULL) return MOE_OK;
    return moei_error(error, MOE_ERR_UNSUPPORTED, "kernels = %s: not compiled in, or this machine cannot run them",
                      moei_kernel_names[wanted]);
}

moe_status moe_layer_init(moe_layer *layer, const moe_layer_config *config, moe_error *error) {
    moe_layer made;
    moe_parameter slot;
    moe_status status;
    int index;
    if (layer == NULL) return MOEI_REFUSE(error, "layer must not be NULL");
    memset(&made, 0, sizeof made);
    status = moe_layer_check(config, &made.config, error);
    if (status != MOE_OK) return status;
    for (index = 0; index < MOE_LAYER_PARAMETER_COUNT; index++) {
        status = moe_layer_parameter(&made.config, index, &slot);
        if (status == MOE_ERR_OVERFLOW)
            return moei_error(error, status, "tensor number %d does not fit this machine's memory", index);
        if (status == MOE_OK) made.present |= (uint64_t)1 << index;
    }
    status = moei_kernels_of(made.config.kernels, &made.kernels, error);
    if (status == MOE_OK) status = moe_router_init(&made.router, &made.config.router, made.kernels, error);
    if (status == MOE_OK) *layer = made;
    return status;
}

/* Counts the parameters; 0 if their number overflows size_t. */
static int moei_layer_count(const moe_layer *layer, size_t *count) {
    moe_parameter slot;
    int index;
    *count = 0;
    for (index = 0; index < MOE_LAYER_PARAMETER_COUNT; index++)
        if (moe_layer_parameter(&layer->config, index, &slot) == MOE_OK && !moei_add(*count, slot.count, count))
            return 0;
    return 1;
}

/* Places the tensors one after another in values, the gradients likewise (gradients NULL: none). */
MOEI_TOOL void moei_layer_bind(moe_layer *layer, moe_real *values, moe_real *gradients) {
    moe_parameter slot;
    size_t at = 0;
    int index;
    for (index = 0; index < MOE_LAYER_PARAMETER_COUNT; index++) {
        if (moe_layer_parameter(&layer->config, index, &slot) != MOE_OK) continue;
        layer->tensors[index] = values + at;
        layer->gradients[index] = gradients != NULL ? gradients + at : NULL;
        at += slot.count;
    }
}

static size_t moei_common_divisor(size_t a, size_t b) {
    while (b != 0) {
        size_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* A random table of experts for hash: in every block of E token ids each expert occurs once in each
   column, and no row has an expert twice. */
static void moei_table_fill(const moe_parameter *slot, size_t experts, moe_real *table, moe_rng *rng) {
    size_t columns = slot->shape[1], from, row, i, other, step;
    for (from = 0; from < slot->shape[0]; from += experts) {
        size_t rows = moei_smaller(slot->shape[0] - from, experts);
        moe_real *block = table + from * columns, swap;
        size_t shift = (size_t)moe_rng_below(rng, experts);
        do step = 1 + (size_t)moe_rng_below(rng, experts);
        while (moei_common_divisor(step, experts) != 1);
        for (row = 0; row < rows; row++) block[row * columns] = (moe_real)((row + shift) % experts);
        for (row = rows; row > 1; row--) {
            other = (size_t)moe_rng_below(rng, row);
            swap = block[(row - 1) * columns];
            block[(row - 1) * columns] = block[other * columns];
            block[other * columns] = swap;
        }
        for (row = 0; row < rows; row++)
            for (i = 1; i < columns; i++)
                block[row * columns + i] = (moe_real)(((size_t)block[row * columns] + i * step) % experts);
    }
}

/* Skips the random numbers of other ranks' experts. */
static void moei_slot_skip(const moe_parameter *slot, size_t experts, moe_rng *rng) {
    size_t i, own = slot->shape[0] > 0 ? slot->count / slot->shape[0] : 0;
    for (i = 0; i < experts * own && slot->init_std > 0; i++) (void)moe_rng_normal(rng);
}

/* Initializes one tensor of a layer; of a tensor of experts the local ones, to the values that they
   have in the whole layer. */
static void moei_parameter_fill(const moe_layer_config *c, int index, const moe_parameter *slot, moe_real *values,
                                moe_rng *rng) {
    size_t i, first = 0, others = 0;
    if (index == MOE_ROUTER_TABLE) {
        moei_table_fill(slot, (size_t)c->router.n_experts, values, rng);
        return;
    }
    if (index >= MOE_EXPERTS_GATE && index < MOE_SHARED_GATE)
        others = (size_t)MOEI_REAL_EXPERTS(&c->router) - moei_own_experts(c, &first);
    moei_slot_skip(slot, first, rng);
    moei_slot_fill(slot, values, rng);
    moei_slot_skip(slot, others - first, rng);
    /* factors on features are not negative */
    for (i = 0; i < slot->count && index == MOE_ROUTER_AC_RUNNING; i++)
        if (values[i] < 0) values[i] = 0;
}

/* Initializes all tensors in values, where moei_layer_bind placed them. */
MOEI_TOOL void moei_layer_fill(const moe_layer_config *config, moe_real *values, moe_rng *rng) {
    moe_parameter slot;
    int index;
    for (index = 0; index < MOE_LAYER_PARAMETER_COUNT; index++) {
        if (moe_layer_parameter(config, index, &slot) != MOE_OK) continue;
        moei_parameter_fill(config, index, &slot, values, rng);
        values += slot.count;
    }
}

/* Allocates the memory of a layer that init made; its allocator has been checked. */
static moe_status moei_layer_allocate(moe_layer *layer, int trainable, moe_error *error) {
    size_t count, all;
#ifndef MOE_NO_TRAIN
    moe_status status = trainable ? moe_router_check_training(&layer->config.router, error) : MOE_OK;
    if (status != MOE_OK) return status;
#else
    if (trainable) return moei_error(error, MOE_ERR_UNSUPPORTED, "trainable = 1: this build has MOE_NO_TRAIN");
#endif
    if (!moei_layer_count(layer, &count) || !moei_mul(count, trainable ? 2 : 1, &all) ||
        !moei_mul(all, sizeof(moe_real), &layer->memory_size))
        return moei_error(error, MOE_ERR_OVERFLOW, "the layer's tensors do not fit this machine's memory");
    layer->memory = (moe_real *)moei_alloc(&layer->allocator, all, sizeof(moe_real));
    if (layer->memory == NULL)
        return moei_error(error, MOE_ERR_MEMORY, "no memory for %z bytes of tensors", layer->memory_size);
    moei_layer_bind(layer, layer->memory, trainable ? layer->memory + count : NULL);
    return MOE_OK;
}

moe_status moe_layer_create(moe_layer *layer, const moe_layer_config *config, int trainable, uint64_t seed,
                            const moe_allocator *allocator, moe_error *error) {
    const struct moe_transport *t = config != NULL ? config->transport : NULL;
    moe_layer made;
    moe_rng rng;
    moe_status status;
    if (layer == NULL) return MOEI_REFUSE(error, "layer must not be NULL");
    status = moei_allocator_check(allocator, error);
    if (status == MOE_OK) status = moe_layer_init(&made, config, error);
    status = moei_vote(t, status, error);
    if (status == MOE_OK && t != NULL) status = moei_group(t)->hooks->agree(&made.config, trainable, seed, error);
    if (status != MOE_OK) return status;
    if (allocator != NULL) made.allocator = *allocator;
    status = moei_vote(t, moei_layer_allocate(&made, trainable, error), error);
    if (status == MOE_OK) {
        moe_rng_seed(&rng, seed);
        moei_layer_fill(&made.config, made.memory, &rng);
        *layer = made;
    } else moe_layer_free(&made);
    return status;
}

void moe_layer_free(moe_layer *layer) {
    if (layer == NULL) return;
    if (layer->memory != NULL) moei_free(&layer->allocator, layer->memory, layer->memory_size);
    memset(layer, 0, sizeof *layer);
}

/* Sets all of a tensor but its name and values. */
static void moei_tensor_shape(const moe_parameter *slot, moe_tensor *out) {
    int i;
    memset(out, 0, sizeof *out);
    out->n_dims = slot->n_dims;
    for (i = 0; i < MOE_MAX_DIMS; i++) out->shape[i] = slot->shape[i];
    out->count = slot->count;
    out->flags = slot->flags;
}

moe_status moe_layer_tensor(const moe_layer *layer, size_t i, moe_tensor *out) {
    moe_parameter slot;
    int index;
    if (layer == NULL || out == NULL) return MOE_ERR_ARGUMENT;
    for (index = 0; index < MOE_LAYER_PARAMETER_COUNT; index++) {
        if (!(layer->present >> index & 1u) || i-- > 0) continue;
        if (moe_layer_parameter(&layer->config, index, &slot) != MOE_OK) return MOE_ERR_NOT_FOUND;
        moei_tensor_shape(&slot, out);
        memcpy(out->name, slot.name, moei_strlen(slot.name) + 1);
        /* a layer that owns its tensors lets them be changed */
        memcpy(&out->data, &layer->tensors[index], sizeof out->data);
        out->gradient = layer->gradients[index];
        return MOE_OK;
    }
    return MOE_ERR_NOT_FOUND;
}

moe_status moe_layer_find(const moe_layer *layer, const char *name, moe_tensor *out) {
    moe_tensor tensor;
    size_t i;
    if (layer == NULL || name == NULL || out == NULL) return MOE_ERR_ARGUMENT;
    for (i = 0; moe_layer_tensor(layer, i, &tensor) == MOE_OK; i++)
        if (moei_strcmp(tensor.name, name) == 0) {
            *out = tensor;
            return MOE_OK;
        }
    return MOE_ERR_NOT_FOUND;
}

/* The bits of an activation and of those it is computed from; 0 for -1. */
static unsigned moei_ancestors(const moei_expert *kind, int activation) {
    unsigned mask = activation < 0 ? 0 : 1u << activation;
    int i;
    for (i = kind->n_steps - 1; i >= 0; i--) {
        const moei_step *step = &kind->steps[i];
        if (!(mask >> step->to & 1u)) continue;
        mask |= 1u << step->from;
        if (step->op == MOEI_STEP_GATED) mask |= 1u << step->second;
    }
    return mask;
}

/* Whether a tensor is read for every expert and token, because the score needs it. */
static int moei_all_read(const moe_layer *layer, int index) {
    const moei_expert *expert = &moei_experts[layer->config.expert];
    unsigned all = moei_ancestors(expert, moei_scored_activation(&layer->config));
    int i;
    for (i = 0; i < expert->n_steps; i++)
        if ((all >> expert->steps[i].to & 1u) && expert->steps[i].op == MOEI_STEP_MATMUL &&
            (expert->steps[i].weight == index || expert->steps[i].bias == index))
            return 1;
    return 0;
}

size_t moe_layer_parameter_count(const moe_layer *layer, size_t *used_per_token) {
    size_t count = 0, used = 0, chosen, most;
    size_t n[2], each[2] = {0, 0}; /* [1]: of constant experts */
    moe_router_config c;
    moe_parameter slot;
    int index, constant;
    if (layer == NULL) return 0;
    c = layer->config.router;
    if (c.select == MOE_SELECT_AFFINITY && moei_switches(&c)) c.select = c.switch_from;
    if (c.switch_from == MOE_SELECT_AFFINITY) c.switch_from = c.select;
    n[0] = moei_own_experts(&layer->config, &most);
    n[1] = (size_t)c.n_constant;
    chosen = moei_is_soft(&c) ? n[0] : c.select == MOE_SELECT_AFFINITY ? 1 : moei_max_choices(&c);
    for (index = 0; index < MOE_LAYER_PARAMETER_COUNT; index++) {
        if (moe_layer_parameter(&layer->config, index, &slot) != MOE_OK) continue;
        count += slot.count;
        constant = moei_is_constant(index);
        if (index < MOE_EXPERTS_GATE || (index >= MOE_SHARED_GATE && !constant) || moei_all_read(layer, index))
            used += slot.count;
        else each[constant] += slot.count / slot.shape[0];
    }
    constant = each[1] > each[0]; /* the larger ones first */
    most = moei_smaller(chosen, n[constant]);
    used += most * each[constant] + moei_smaller(chosen - most, n[!constant]) * each[!constant];
    if (used_per_token != NULL) *used_per_token = used;
    return count;
}

/* ==== >>code_packed =========================================================================== */

/* The matrices of the experts as data: parameters with three dimensions [E,out,in] and those of the
   shared expert and of d_latent [out,in]. */
static int moei_is_matrix(const moe_layer *layer, int index, moe_parameter *slot) {
    if (index < MOE_EXPERTS_GATE || moei_is_constant(index) || !(layer->present >> index & 1u) ||
        moe_layer_parameter(&layer->config, index, slot) != MOE_OK)
        return 0;
    return slot->n_dims == 3 || (index >= MOE_SHARED_GATE && slot->n_dims == 2);
}

static moe_status moei_pack_layer(moei_packing *p, const moe_layer *layer, const void *packed[]) {
    moe_status status = MOE_OK;
    moe_parameter slot;
    int i;
    for (i = MOE_EXPERTS_GATE; i < MOE_LAYER_PARAMETER_COUNT && status == MOE_OK; i++)
        if (moei_is_matrix(layer, i, &slot))
            status = moei_pack_matrix(p, slot.name, slot.n_dims == 3 ? slot.shape[0] : 1, slot.shape[slot.n_dims - 2],
                                      slot.shape[slot.n_dims - 1], layer->tensors[i], &packed[i]);
    return status;
}

#define MOEI_PACK_SPACE "size = %z: the packed weights need %z bytes"

static void moei_layer_set_packed(moe_layer *layer, int type, const void *const packed[]) {
    memcpy(layer->packed, packed, sizeof layer->packed);
    layer->packed_type = type;
    layer->is_packed = 1;
}

/* Weights packed in this memory are not read again, even if the call fails halfway. old: their
   layout. */
static void moei_unpack(moe_layer *layer, const moei_packing *old, const void *memory, size_t size) {
    if (moei_overlaps(layer->packed, MOE_LAYER_PARAMETER_COUNT, old->used - (MOEI_PACK_ALIGN - 1), memory, size))
        layer->is_packed = 0;
}

static void moei_layer_unpack(moe_layer *layer, const void *memory, size_t size) {
    const void *packed[MOE_LAYER_PARAMETER_COUNT];
    moei_packing old = moei_packing_begin(NULL, layer->packed_type, 0, NULL, NULL);
    (void)moei_pack_layer(&old, layer, packed);
    moei_unpack(layer, &old, memory, size);
}

moe_status moe_layer_pack(moe_layer *layer, int type, void *memory, size_t size, moe_error *error) {
    const void *packed[MOE_LAYER_PARAMETER_COUNT] = {0};
    moei_packing p;
    moe_status status;
    if (layer == NULL || memory == NULL)
        return MOEI_REFUSE(error, "%s must not be NULL", layer == NULL ? "layer" : "memory");
    p = moei_packing_begin(layer->kernels, type, 1, NULL, error);
    status = moei_pack_layer(&p, layer, packed);
    if (status != MOE_OK) return status;
    if (size < p.used) return moei_error(error, MOE_ERR_SPACE, MOEI_PACK_SPACE, size, p.used);
    moei_layer_unpack(layer, memory, size);
    p = moei_packing_begin(layer->kernels, type, 1, memory, error);
    status = moei_pack_layer(&p, layer, packed);
    if (status != MOE_OK) return status;
    moei_layer_set_packed(layer, type, packed);
    return MOE_OK;
}

/* ==== rows through an expert ================================================================== */

/* The state of n rows in one expert. MOEI_X is its input, which is only read. */
typedef struct moei_expert_run {
    const moe_layer *layer;
    const moei_expert *kind;
    size_t expert;      /* its block of each parameter; 0 for what every token passes through */
    int act, packed;    /* packed: the packed weights are read */
    int in_file;        /* matrices lie in files; 2: products quantize activations */
    size_t weights;     /* in an expert's matrices; of a task: in those of all its experts */
    int shaped;         /* the gate has an alpha, a limit or an offset */
    moe_real alpha, limit, offset; /* limit is infinite for none */
    unsigned needed;    /* bits of the activations that the output is computed from */
    int scored;         /* the activation that the score reads; -1: none */
    unsigned for_score; /* its bit and those of what it is computed from */
    /* bits of activations whose gradients are added to, not overwritten */
    unsigned summed;
    size_t n;
    /* numbers in a row; distance between rows */
    size_t width[MOEI_ACTIVATIONS], ld[MOEI_ACTIVATIONS];
    /* the width that all results of a stage have */
    size_t stage_width[MOEI_MAX_STAGES];
    moe_real *activation[MOEI_ACTIVATIONS]; /* [n,width] */
    /* [n,width], of the loss; of x NULL: not wanted */
    moe_real *gradient[MOEI_ACTIVATIONS];
    /* rows for quantized weights: of x, of the activation that a stage reads */
    unsigned char *quantized[2];
    int reads_x;                 /* the input is read where it lies in x, not gathered */
    size_t first, n_assignments; /* a chosen expert's assignments in the dispatch plan */
    const moe_assignment *assignments;
} moei_expert_run;

enum {
    MOEI_STAGE_COLUMNS = 64, /* the least number of columns that a stage processes at a time */
    MOEI_LINE_NUMBERS = 16   /* numbers that fill a cache line or, in double, two */
};

/* The number of floats of a result that a stage's steps process at a time: they fit into the
   second-level cache. */
#if SIZE_MAX > 65535
#define MOEI_PART ((size_t)131072)
#else
#define MOEI_PART ((size_t)16384)
#endif

/* The distance between rows of a workspace: an odd number of whole cache lines, so that rows do not
   map to the same sets of a cache. Plain C uses the width itself, to save memory on small
   machines. */
static size_t moei_stride(const moe_layer *layer, size_t width) {
    size_t lines = width / MOEI_LINE_NUMBERS + (width % MOEI_LINE_NUMBERS > 0);
    return moei_table(layer->kernels)->id == MOE_KERNELS_C ? width : (lines | 1) * MOEI_LINE_NUMBERS;
}

/* Constant 0 in builds without shaped gates. */
#define MOEI_SHAPED(run) (MOEI_KEPT(EXTRAS, MOE_EXTRA_SHAPED) && (run)->shaped)

/* Sets the activation that the score reads of all experts. */
static void moei_run_scores(moei_expert_run *run, int activation) {
    run->scored = activation;
    run->for_score = moei_ancestors(run->kind, activation);
}

/* Whether matrices lie in files: 2 if products quantize activations, else 1. */
static int moei_has_external(const moe_layer *layer) {
    int has = 0, i;
    size_t e;
    for (i = MOE_EXPERTS_GATE; i < MOE_LAYER_PARAMETER_COUNT; i++) {
        const moe_external *w = layer->external[i];
        if (w == NULL) continue;
        has = 1;
        for (e = i < MOE_SHARED_GATE ? (size_t)MOEI_REAL_EXPERTS(&layer->config.router) : 1; e-- > 0;)
            if (moei_external_quantizes(w + e)) return 2;
    }
    return has;
}

/* Whether experts compete in a call whose forward pass has begun. */
#define MOEI_COMPETED(call) ((call)->training && (call)->activation_width > 0)

/* What the runs of all experts of a kind share. competes: they compete for the tokens of this call,
   or may. */
static moei_expert_run moei_expert_run_begin(const moe_layer *layer, int kind, int competes) {
    const moe_layer_config *c = &layer->config;
    moei_expert_run run;
    int i;
    memset(&run, 0, sizeof run);
    run.layer = layer;
    run.kind = &moei_experts[kind];
    run.act = MOE_ACT_SILU;
    if (run.kind->has & MOEI_HAS_ACT) run.act = c->act;
    if (kind == MOEI_SHARED && c->shared_act != 0) run.act = c->shared_act;
    if (run.act == MOE_ACT_NAMED_RELU) run.act = MOE_ACT_RELU;
    run.alpha = MOEI_R(1.0);
    run.limit = MOEI_INFINITY;
    if (run.kind->has & MOEI_HAS_SHAPE) {
        if (c->swiglu_alpha > 0) run.alpha = c->swiglu_alpha;
        if (c->swiglu_limit > 0) run.limit = c->swiglu_limit;
        run.offset = c->swiglu_offset;
        run.shaped = run.alpha < MOEI_R(1.0) || run.alpha > MOEI_R(1.0) || run.limit < MOEI_INFINITY ||
                     run.offset < 0 || run.offset > 0;
    }
    for (i = 0; i < MOEI_ACTIVATIONS; i++) run.width[i] = (size_t)moei_activation_width(c, kind, i);
    for (i = 0; i < run.kind->n_steps; i++) {
        const moei_step *step = &run.kind->steps[i];
        run.ld[step->to] = moei_stride(layer, run.width[step->to]);
        run.stage_width[step->stage] = run.width[step->to];
        if (step->op != MOEI_STEP_MATMUL) continue;
        if (layer->external[step->weight] != NULL) run.in_file = moei_has_external(layer);
        run.weights += run.width[step->from] * run.width[step->to];
    }
    run.ld[MOEI_X] = run.width[MOEI_X];
    run.needed = moei_ancestors(run.kind, MOE_NODE_OUTPUT);
    run.scored = -1;
    if (kind < MOEI_SHARED && (moei_score_flags[c->router.score] & MOE_TRAIT_NEEDS_ALL_EXPERTS))
        moei_run_scores(&run, moei_scored_activation(c));
    if (competes && c->router.compete_rate > 0) moei_run_scores(&run, MOE_NODE_OUTPUT);
    return run;
}

/* The expert's block of a parameter of `size` numbers per expert; NULL if the layer has none. */
static const moe_real *moei_block(const moei_expert_run *run, int index, size_t size) {
    const moe_real *values = index < 0 ? NULL : run->layer->tensors[index];
    return values == NULL ? NULL : values + run->expert * size;
}

/* Whether a call reads packed weights. Training reads the tensors, which it changes, and so do
   calls that keep all rows. */
static int moei_uses_packed(const moe_layer *layer, const moe_call *call) {
    return layer->is_packed && !call->training && !call->keep && !moei_has_external(layer);
}

/* out [n,o] = in [n,i] times o rows of packed weights, from panel `first` on; rows: in quantized,
   for types that read it so. A call reads `all` weights, which a cache may hold up to 32 MiB. */
static void moei_panels_product(const moe_kernels *k, int type, const void *packed, size_t first, size_t n, size_t o,
                                size_t i, const moe_real *in, size_t ldi, const void *rows, moe_real *out, size_t ldo,
                                size_t all) {
    size_t panel = 0;
    const unsigned char *b = (const unsigned char *)packed;
    if (moe_panel_size(type, i, &panel) != MOE_OK) return; /* checked when they were packed */
    b += first * panel;
#ifndef MOE_NO_QUANT
    if (moei_is_quantized(type)) {
        moe_matmul_quantized(k, type, n, o, i, rows, b, 1, out, ldo);
        return;
    }
#endif
    if (type == MOE_TYPE_REAL && all / 1024 > 32768 / sizeof(moe_real))
        moei_table(k)->streamed(n, o, i, in, ldi, 1, (const moe_real *)(const void *)b, i * MOEI_PANEL, out, ldo, 0);
    else moe_matmul_packed(k, type, n, o, i, in, ldi, b, out, ldo);
    (void)rows;
}

/* Columns j .. j + count of the result of a product with packed weights. The rest of the last panel
   is scratch if the row has room for it. */
static void moei_packed_product(const moei_expert_run *run, const moei_step *step, size_t j, size_t count) {
    const moe_layer *layer = run->layer;
    size_t first = run->expert * moei_panels(run->width[step->to]) + j / MOEI_PANEL, ld = run->ld[step->to];
    if (j + moei_panels(count) * MOEI_PANEL <= ld) count = moei_panels(count) * MOEI_PANEL;
    moei_panels_product(layer->kernels, layer->packed_type, layer->packed[step->weight], first, run->n, count,
                        run->width[step->from], run->activation[step->from], run->ld[step->from],
                        run->quantized[step->from != MOEI_X], run->activation[step->to] + j, ld, run->weights);
}

#ifndef MOE_NO_QUANT
/* Quantizes rows from .. to of what the products of a stage read; x only for the first stage that
   reads it. */
static void moei_quantize_stage(const moei_expert_run *run, int stage, unsigned mask, size_t from, size_t to) {
    const moe_layer *layer = run->layer;
    int done[2] = {0, 0}, i;
    for (i = 0; i < run->kind->n_steps && to > from; i++) {
        const moei_step *step = &run->kind->steps[i];
        size_t width = run->width[step->from], ld = run->ld[step->from], size;
        int which = step->from != MOEI_X;
        const moe_external *external;
        if (step->op != MOEI_STEP_MATMUL || step->stage > stage || !(mask >> step->to & 1u)) continue;
        external = layer->external[step->weight];
        if (!run->packed && (external == NULL || !moei_external_quantizes(external + run->expert))) continue;
        if (done[which] || (step->stage < stage && which)) continue;
        done[which] = 1;
        if (step->stage < stage) continue; /* x was quantized for that stage */
        if (!run->packed) {
            moei_external_quantize(layer->kernels, to - from, width, run->activation[step->from] + from * ld, ld,
                                   run->quantized[which] + from * moei_external_row_size(width));
            continue;
        }
        size = moe_quantized_row_size(layer->packed_type, width);
        moe_rows_quantize(layer->kernels, layer->packed_type, to - from, width, run->activation[step->from] + from * ld,
                          ld, run->quantized[which] + from * size);
    }
}
#endif

/* Columns j .. j + count of to = W from + bias: rows j .. of W. */
static void moei_matmul_columns(const moei_expert_run *run, const moei_step *step, size_t j, size_t count) {
    const moe_kernels *k = run->layer->kernels;
    size_t from = run->width[step->from], to = run->width[step->to];
    size_t ld = run->ld[step->to], i;
    const moe_real *in = run->activation[step->from], *bias = moei_block(run, step->bias, to);
    const moe_external *external = run->layer->external[step->weight];
    const moe_external *added = step->bias < 0 ? NULL : run->layer->external[step->bias];
    moe_real *out = run->activation[step->to] + j;
    if (external != NULL)
        moei_external_columns(k, external + run->expert, j, run->n, count, from, in, run->ld[step->from],
                              run->quantized[step->from != MOEI_X], out, ld);
    else if (run->packed) moei_packed_product(run, step, j, count);
    else
        moe_matmul(k, MOE_MATMUL_NT, MOE_TYPE_REAL, run->n, count, from, in, run->ld[step->from],
                   moei_block(run, step->weight, to * from) + j * from, from, out, ld, 0);
    if (added != NULL) moei_external_add(k, added + run->expert, j, run->n, count, out, ld);
    for (i = 0; added == NULL && bias != NULL && i < run->n; i++) MOEI_ADD(k, count, bias + j, out + i * ld);
}

/* A shaped gate as a plain one, silu(t) v: t = alpha min(g, L), v = factor (max(-L, min(u, L)) +
   offset), or factor where up is NULL. */
static void moei_shape_gate(const moei_expert_run *run, size_t n, const moe_real *gate, const moe_real *up,
                            moe_real factor, moe_real *t, moe_real *v) {
    const moe_real limit = run->limit, alpha = run->alpha;
    const moe_real offset = run->offset;
    size_t i;
    for (i = 0; i < n; i++) t[i] = alpha * (gate[i] > limit ? limit : gate[i]);
    for (i = 0; i < n && up == NULL; i++) v[i] = factor;
    for (i = 0; i < n && up != NULL; i++)
        v[i] = factor * ((up[i] > limit ? limit : up[i] < -limit ? -limit : up[i]) + offset);
}

/* The elementwise steps with a shaped gate; the results may overwrite the inputs. */
static void moei_shaped_columns(const moei_expert_run *run, const moei_step *step, size_t j, size_t count) {
    moe_real t[MOEI_STAGE_COLUMNS], v[MOEI_STAGE_COLUMNS];
    size_t ld = run->ld[step->to], i, p, n;
    for (i = 0; i < run->n; i++)
        for (p = j; p < j + count; p += n) {
            const moe_real *gate = run->activation[step->from] + i * run->ld[step->from] + p, *up = NULL;
            if (step->op == MOEI_STEP_GATED) up = run->activation[step->second] + i * run->ld[step->second] + p;
            n = moei_smaller(j + count - p, MOEI_STAGE_COLUMNS);
            moei_shape_gate(run, n, gate, up, MOEI_R(1.0) / run->alpha, t, v);
            moe_gated(run->layer->kernels, run->act, 1, n, t, n, v, n, run->activation[step->to] + i * ld + p, ld);
        }
}

/* Columns j .. j + count of an elementwise step. */
static void moei_elementwise_columns(const moei_expert_run *run, const moei_step *step, size_t j, size_t count) {
    const moe_real *in = run->activation[step->from] + j, *up = NULL;
    size_t ld_up = 0;
    if (step->op == MOEI_STEP_GATED) {
        up = run->activation[step->second] + j;
        ld_up = run->ld[step->second];
    }
    if (MOEI_SHAPED(run)) moei_shaped_columns(run, step, j, count);
    else
        moe_gated(run->layer->kernels, run->act, run->n, count, in, run->ld[step->from], up, ld_up,
                  run->activation[step->to] + j, run->ld[step->to]);
}

/* Columns from .. to of those results of one stage that are in mask. */
static void moei_stage_columns(const moei_expert_run *run, int stage, unsigned mask, size_t from, size_t to) {
    size_t count, part = run->n > 0 ? MOEI_PART / run->n / MOEI_STAGE_COLUMNS * MOEI_STAGE_COLUMNS : 0;
    int i;
    if (part < MOEI_STAGE_COLUMNS) part = MOEI_STAGE_COLUMNS;
    for (; from < to && run->n > 0; from += count) {
        count = moei_smaller(to - from, part);
        for (i = 0; i < run->kind->n_steps; i++) {
            const moei_step *step = &run->kind->steps[i];
            if (step->stage != stage || !(mask >> step->to & 1u)) continue;
            if (step->op == MOEI_STEP_MATMUL) moei_matmul_columns(run, step, from, count);
            else moei_elementwise_columns(run, step, from, count);
        }
    }
}

/* The bits of the computed activations that the remaining steps on the way to the output read. */
static unsigned moei_frontier(const moei_expert *kind, unsigned computed) {
    unsigned read = 1u << MOE_NODE_OUTPUT, needed = moei_ancestors(kind, MOE_NODE_OUTPUT);
    int i;
    for (i = 0; i < kind->n_steps; i++) {
        const moei_step *step = &kind->steps[i];
        if ((computed >> step->to & 1u) || !(needed >> step->to & 1u)) continue;
        read |= 1u << step->from;
        if (step->op == MOEI_STEP_GATED) read |= 1u << step->second;
    }
    return computed & read;
}

/* The columns of task `index` of n_tasks: equal parts, in whole lines. */
static void moei_columns_of(size_t columns, int index, int n_tasks, size_t *from, size_t *to) {
    size_t lines = columns / MOEI_LINE_NUMBERS + (columns % MOEI_LINE_NUMBERS > 0);
    *from = n_tasks > 1 ? lines * (size_t)index / (size_t)n_tasks * MOEI_LINE_NUMBERS : 0;
    *to = index + 1 < n_tasks ? lines * ((size_t)index + 1) / (size_t)n_tasks * MOEI_LINE_NUMBERS : columns;
}

#ifndef MOE_NO_TRAIN

static moe_real *moei_gradient_block(const moei_expert_run *run, int index, size_t size) {
    moe_real *values = index < 0 ? NULL : run->layer->gradients[index];
    return values == NULL ? NULL : values + run->expert * size;
}

/* Rows j .. j + count of dW and dbias of one product. */
static void moei_weight_backward(const moei_expert_run *run, const moei_step *step, size_t j, size_t count) {
    const moe_kernels *k = run->layer->kernels;
    size_t to = run->width[step->to], from = run->width[step->from];
    size_t ld = run->ld[step->to], i;
    const moe_real *in = run->activation[step->from], *d_out = run->gradient[step->to] + j;
    moe_real *d_w = moei_gradient_block(run, step->weight, to * from),
             *d_bias = moei_gradient_block(run, step->bias, to);
    if (d_w != NULL)
        moe_matmul(k, MOE_MATMUL_TN, MOE_TYPE_REAL, count, from, run->n, d_out, ld, in, run->ld[step->from],
                   d_w + j * from, from, 1);
    for (i = 0; d_bias != NULL && i < run->n; i++) MOEI_ADD(k, count, d_out + i * ld, d_bias + j);
}

/* Columns j .. j + count of the gradient of what a product reads; sum: added to what is there. */
static void moei_input_backward(const moei_expert_run *run, const moei_step *step, size_t j, size_t count, int sum) {
    size_t to = run->width[step->to], from = run->width[step->from];
    moe_real *d_in = run->gradient[step->from];
    if (d_in == NULL) return;
    moe_matmul(run->layer->kernels, MOE_MATMUL_NN, MOE_TYPE_REAL, run->n, count, to, run->gradient[step->to],
               run->ld[step->to], moei_block(run, step->weight, to * from) + j, from, d_in + j, run->ld[step->from],
               sum);
}

/* The backward pass of n columns, from p, of row i of a shaped gate: y = silu(t) v / alpha,
   dg = dy v silu'(t), du = dy silu(t) / alpha; 0 beyond a limit. */
static void moei_shaped_backward(const moei_expert_run *run, const moei_step *step, size_t i, size_t p, size_t n) {
    moe_real t[MOEI_STAGE_COLUMNS], v[MOEI_STAGE_COLUMNS], d_t[MOEI_STAGE_COLUMNS], d_v[MOEI_STAGE_COLUMNS];
    size_t at = i * run->ld[step->from] + p, at_up = i * run->ld[step->second] + p, q;
    const moe_real *gate = run->activation[step->from] + at, *up = NULL;
    const moe_real limit = run->limit;
    const moe_real *d_out = run->gradient[step->to] + i * run->ld[step->to] + p;
    moe_real *d_gate = run->gradient[step->from] + at;
    if (step->op == MOEI_STEP_GATED) up = run->activation[step->second] + at_up;
    moei_shape_gate(run, n, gate, up, MOEI_R(1.0), t, v);
    moe_gated_backward(run->layer->kernels, run->act, n, t, v, d_out, d_t, d_v);
    for (q = 0; q < n; q++) {
        if (gate[q] > limit) d_t[q] = 0;
        d_gate[q] = up == NULL ? d_gate[q] + d_t[q] : d_t[q]; /* up NULL: of the score, a sum */
    }
    for (q = 0; q < n && up != NULL; q++)
        run->gradient[step->second][at_up + q] = up[q] > limit || up[q] < -limit ? 0 : d_v[q] / run->alpha;
}

/* The backward pass of n columns, from p, of row i of a plain elementwise step. */
static void moei_plain_backward(const moei_expert_run *run, const moei_step *step, size_t i, size_t p, size_t n) {
    const moe_kernels *k = run->layer->kernels;
    size_t at = i * run->ld[step->from] + p, at_up = i * run->ld[step->second] + p, from, count;
    const moe_real *in = run->activation[step->from] + at, *d_out = run->gradient[step->to] + i * run->ld[step->to] + p;
    moe_real *d_in = run->gradient[step->from] + at, part[MOEI_STAGE_COLUMNS];
    if (step->op == MOEI_STEP_GATED) {
        moe_gated_backward(k, run->act, n, in, run->activation[step->second] + at_up, d_out, d_in,
                           run->gradient[step->second] + at_up);
        return;
    }
    if (!(run->summed >> step->from & 1u)) {
        moe_activate_backward(k, run->act, n, in, d_out, d_in);
        return;
    }
    for (from = 0; from < n; from += count) {
        count = moei_smaller(n - from, MOEI_STAGE_COLUMNS);
        moe_activate_backward(k, run->act, count, in + from, d_out + from, part);
        MOEI_ADD(k, count, part, d_in + from);
    }
}

/* The backward pass of columns j .. j + count of an elementwise step. */
static void moei_elementwise_backward(const moei_expert_run *run, const moei_step *step, size_t j, size_t count) {
    size_t i, p, n;
    for (i = 0; i < run->n; i++) {
        if (!MOEI_SHAPED(run)) moei_plain_backward(run, step, i, j, count);
        for (p = 0; p < count && MOEI_SHAPED(run); p += n) {
            n = moei_smaller(count - p, MOEI_STAGE_COLUMNS);
            moei_shaped_backward(run, step, i, j + p, n);
        }
    }
}

/* Whether a product of the mask in a stage after this one reads an activation. */
static int moei_is_read_after(const moei_expert *kind, int activation, int stage, unsigned mask) {
    int i;
    for (i = 0; i < kind->n_steps; i++) {
        const moei_step *step = &kind->steps[i];
        if (step->op == MOEI_STEP_MATMUL && step->from == activation && step->stage > stage && (mask >> step->to & 1u))
            return 1;
    }
    return 0;
}

/* Columns of the gradient of one activation, computed from the products of a stage that read it,
   then on these columns the backward pass of the elementwise step that computed the activation. */
static void moei_read_backward(const moei_expert_run *run, int activation, int stage, unsigned mask, size_t from,
                               size_t to) {
    const moei_expert *kind = run->kind;
    int sum = (run->summed >> activation & 1u) || moei_is_read_after(kind, activation, stage, mask), read = 0, i;
    for (i = 0; i < kind->n_steps; i++) {
        const moei_step *step = &kind->steps[i];
        if (step->op != MOEI_STEP_MATMUL || step->stage != stage || step->from != activation ||
            !(mask >> step->to & 1u))
            continue;
        moei_input_backward(run, step, from, to - from, sum || read);
        read = 1;
    }
    for (i = kind->n_steps - 1; i >= 0 && read && (mask >> activation & 1u); i--)
        if (kind->steps[i].to == activation && kind->steps[i].op != MOEI_STEP_MATMUL)
            moei_elementwise_backward(run, &kind->steps[i], from, to - from);
}

/* One task of the backward pass of a stage: rows of the gradients of its weights; columns of the
   gradients of what its products read. The gradients of the stage's own results are complete. */
static void moei_stage_backward(const moei_expert_run *run, int stage, unsigned mask, int index, int n_tasks) {
    const moei_expert *kind = run->kind;
    size_t from, to;
    int i;
    for (i = kind->n_steps - 1; i >= 0; i--) {
        const moei_step *step = &kind->steps[i];
        if (step->op != MOEI_STEP_MATMUL || step->stage != stage || !(mask >> step->to & 1u)) continue;
        moei_columns_of(run->width[step->to], index, n_tasks, &from, &to);
        if (to > from) moei_weight_backward(run, step, from, to - from);
    }
    for (i = 0; i < MOEI_ACTIVATIONS; i++) {
        moei_columns_of(run->width[i], index, n_tasks, &from, &to);
        if (to > from) moei_read_backward(run, i, stage, mask, from, to);
    }
}

#endif

/* ==== the workspace of a call ================================================================= */

/* The most rows that one expert gets; SIZE_MAX: beyond size_t. */
static size_t moei_expert_rows(const moe_layer_config *c, size_t n) {
    if (!moei_is_soft(&c->router)) return n;
    return moei_mul((size_t)c->router.slots, (size_t)c->router.soft_sequences, &n) ? n : SIZE_MAX;
}

/* Counts the rows whose activations training keeps. */
static int moei_kept_rows(const moe_layer_config *c, size_t n, size_t *rows) {
    if (moei_is_soft(&c->router)) return moei_mul(moei_expert_rows(c, n), (size_t)c->router.n_experts, rows);
    return moei_mul(n, moei_max_choices(&c->router), rows);
}

/* Rows that begin with a cache line, for kernels with vectors: no vector then lies in two lines,
   and no line belongs to two threads. */
static moe_real *moei_take_lines(const moe_layer *layer, moei_layout *l, size_t rows, size_t stride) {
    enum { LINE = 64, SLACK = LINE - MOEI_ALIGN };
    unsigned char *p;
    size_t bytes = 0;
    if (moei_table(layer->kernels)->id == MOE_KERNELS_C) return moei_take_reals(l, rows, stride);
    if (!moei_mul(rows, stride, &bytes) || !moei_mul(bytes, sizeof(moe_real), &bytes) ||
        !moei_add(bytes, SLACK, &bytes))
        l->overflow = 1;
    p = (unsigned char *)moei_take(l, bytes, 1);
    if (p != NULL) p += (LINE - (uintptr_t)p % LINE) % LINE;
    return (moe_real *)(void *)p;
}

/* Room for the activations of `rows` rows. The output's rows are contiguous in calls that keep
   them, for callers that read them; others have gaps. Other calls overwrite what the activation
   function read. */
static void moei_take_activations(const moei_expert_run *run, moei_layout *l, size_t rows, int keeps,
                                  moe_real **activations) {
    int i;
    for (i = 0; i < MOE_NODE_COUNT; i++) {
        size_t stride = i == MOE_NODE_OUTPUT && keeps ? run->width[i] : run->ld[i];
        if (!(run->needed >> i & 1u)) continue;
        if (!keeps && (i == MOE_NODE_ACT || i == MOE_NODE_PRODUCT)) activations[i] = activations[MOE_NODE_GATE];
        else activations[i] = moei_take_lines(run->layer, l, rows, stride);
    }
}

/* Room for the activations that the score reads, of all experts. */
static void moei_take_scored(const moei_expert_run *run, moei_layout *l, size_t rows, moe_real **activations) {
    int i;
    for (i = 0; i < MOE_NODE_COUNT; i++)
        if (run->for_score >> i & 1u) activations[i] = moei_take_reals(l, rows, run->width[i]);
}

#ifndef MOE_NO_QUANT
/* Room for quantized rows of one group of experts and of all tokens for the shared expert or the
   score. */
static void moei_take_quantized(const moe_layer *layer, moei_layout *l, size_t rows, size_t n, moe_layer_pass *p) {
    const moe_layer_config *c = &layer->config;
    int hidden = c->d_ff > c->d_low ? c->d_ff : c->d_low, all = c->n_shared * c->d_shared;
    int widest = c->router.d_model > c->d_latent ? c->router.d_model : c->d_latent;
    const int external = moei_has_external(layer);
    int i;
    if (external == 1 || (external == 0 && (!layer->is_packed || !moei_is_quantized(layer->packed_type)))) return;
    if (hidden < all) hidden = all;
    if (rows < n) rows = n;
    for (i = 0; i < 2; i++) {
        const size_t width = (size_t)(i == 0 ? widest : hidden);
        p->quantized_size[i] =
            external ? moei_external_row_size(width) : moe_quantized_row_size(layer->packed_type, width);
        if (p->quantized_size[i] == 0) l->overflow = 1;
        p->quantized[i] = (unsigned char *)moei_take(l, rows, p->quantized_size[i]);
    }
}
#endif

/* Room for what d_latent adds. */
static void moei_take_latent(const moe_layer_config *c, moei_layout *l, size_t n, int training, moe_layer_pass *p) {
    size_t width = (size_t)c->d_latent;
    int i;
    for (i = 0; i < 3; i++) p->latent[i] = moei_take_reals(l, n, i > 0 ? width : (size_t)c->router.d_model);
    for (i = 0; i < 3 && training; i++) p->d_latent[i] = moei_take_reals(l, n, i < 2 ? width : (size_t)c->d_out);
}

/* Lays a pass out in memory; the same function with an empty base counts the bytes. */
static void moei_layer_layout(const moe_layer *layer, const moei_expert_run *run, size_t n, size_t past, int training,
                              moei_layout *l, moe_layer_pass *p) {
    const moe_layer_config *c = &layer->config;
    moei_expert_run shared;
    size_t rows = moei_expert_rows(c, n), kept = rows;
    size_t everywhere = 0, stride = moei_stride(layer, run->width[MOEI_X]);
    memset(p, 0, sizeof *p);
    if (c->n_shared > 0) shared = moei_expert_run_begin(layer, MOEI_SHARED, 0);
    if (!MOEI_FITS_INT32(past) ||
        moei_route_bytes(&layer->router, past + n, past + n, 0, training, &p->route_size) != MOE_OK)
        l->overflow = 1;
    p->route_memory = moei_take(l, p->route_size, 1);
    if (c->d_latent > 0) moei_take_latent(c, l, n, training, p);
    if (training && !moei_kept_rows(c, n, &kept)) l->overflow = 1;
    if (!moei_mul(n, (size_t)c->router.n_experts, &everywhere)) l->overflow = 1;
    p->rows = moei_take_lines(layer, l, rows, stride);
    p->clean = run->scored >= 0 ? moei_take_reals(l, n, run->width[MOEI_X]) : NULL;
    moei_take_activations(run, l, kept, training, p->node);
    if (run->scored >= 0) moei_take_scored(run, l, everywhere, p->all);
    if (c->n_shared > 0) {
        moei_take_activations(&shared, l, n, training, p->shared);
        p->shared_factor = moei_take_reals(l, n, 1);
    }
#ifndef MOE_NO_QUANT
    /* calls that keep rows never quantize for packed weights */
    if ((!training && layer->is_packed) || moei_has_external(layer) == 2) moei_take_quantized(layer, l, rows, n, p);
#endif
    if (!training) return;
    p->d_rows = moei_take_lines(layer, l, rows, stride);
    moei_take_activations(run, l, rows, 1, p->d_node);
    if (run->scored >= 0) moei_take_scored(run, l, everywhere, p->d_all);
    if (c->n_shared > 0) moei_take_activations(&shared, l, n, 1, p->d_shared);
}

/* Bytes of workspace for n tokens that follow up to `past` others. */
static moe_status moei_layer_size(const moe_layer *layer, size_t n, size_t past, int training, size_t *bytes) {
    moei_layout l = moei_layout_begin(NULL);
    moe_layer_pass p;
    moei_expert_run run;
    if (!MOEI_FITS_INT32(n)) return MOE_ERR_OVERFLOW;
    if (layer->config.transport != NULL) {
        if (past > 0) return MOE_ERR_UNSUPPORTED;
        return moei_group(layer->config.transport)->hooks->size(layer, n, training, bytes);
    }
    run = moei_expert_run_begin(layer, layer->config.expert, training);
    moei_layer_layout(layer, &run, n, past, training, &l, &p);
    if (l.overflow) return MOE_ERR_OVERFLOW;
    *bytes = l.used;
    return MOE_OK;
}

moe_status moe_layer_work_size(const moe_layer *layer, size_t n_tokens, int training, size_t *bytes) {
    return layer == NULL || bytes == NULL ? MOE_ERR_ARGUMENT : moei_layer_size(layer, n_tokens, 0, training, bytes);
}

/* Whether a call keeps all rows of all experts. */
static int moei_keeps(const moe_call *call) { return call->training || call->keep; }

/* Sets *router to the layer's with the layer's tensors. */
static void moei_layer_router(const moe_layer *layer, moe_router *router) {
    memcpy(router, &layer->router, offsetof(moe_router, tensors));
    router->external = layer->external[MOE_ROUTER_WEIGHT];
    memcpy(router->tensors, layer->tensors, sizeof router->tensors);
}

static int moei_task_count(const moe_parallel *team, const moei_expert_run *run, size_t rows, size_t experts) {
    double weights = 0.0;
    int i;
    for (i = 0; i < run->kind->n_steps; i++) {
        const moei_step *step = &run->kind->steps[i];
        if (step->op == MOEI_STEP_MATMUL) weights += (double)run->width[step->to] * (double)run->width[step->from];
    }
    return moei_is_short(weights, rows, moei_smaller(experts, rows)) && !team->always ? 1 : team->threads;
}

/* ==== expert runs of a call =================================================================== */

/* Which experts run: all of them on all tokens, for what the score reads; the chosen ones on their
   tokens; the shared one, or a matrix of d_latent, on all tokens. */
enum { MOEI_RUN_SCORED = 0, MOEI_RUN_CHOSEN, MOEI_RUN_SHARED, MOEI_RUN_LATENT, MOEI_RUN_KINDS };

/* A call runs phase by phase (moei_phases). This is what all tasks of a phase read. */
typedef struct moei_task {
    const moe_layer *layer;
    moe_layer_pass *p;
    int kind;                /* MOEI_RUN_ */
    /* all rows of all experts are kept; the experts' input is x as it is */
    int keeps, plain;
    int quantizes;           /* rows are quantized, for packed weights */
    /* bits of activations computed for the score that the chosen experts reuse */
    unsigned computed;
    unsigned frontier;       /* those of them that are read */
    unsigned mask;           /* bits of activations to compute */
    size_t experts, room;    /* number of tasks; rows that the buffers hold */
    /* experts first to end share the buffers, which begin with row `base` of the plan */
    size_t first, end, base;
    int phase, n_tasks;
    moe_real *y, *dx;
    const struct moei_returned *returned;
    /* what the runs of all experts share; moei_run_experts derives each run from it */
    moei_expert_run run;
} moei_task;

/* The number of token-expert assignments of expert e. */
static size_t moei_entry_count(const moe_layer_pass *p, size_t e) {
    return p->routing.plan.offsets[e + 1] - p->routing.plan.offsets[e];
}

/* The rows of expert e in the dispatch plan: one per assignment; soft: one per slot. */
static size_t moei_rows_of(const moe_layer_pass *p, size_t e) {
    const moe_dispatch_plan *plan = &p->routing.plan;
    return plan->rows > 0 ? plan->rows : plan->offsets[e + 1] - plan->offsets[e];
}

/* run: from moei_expert_run_begin for these experts. */
static void moei_task_begin(moei_task *task, const moe_layer *layer, moe_layer_pass *p, int kind,
                            const moei_expert_run *run) {
    memset(task, 0, offsetof(moei_task, run));
    task->layer = layer;
    task->p = p;
    task->kind = kind;
    task->n_tasks = 1;
    task->experts = kind >= MOEI_RUN_SHARED ? 1 : (size_t)MOEI_REAL_EXPERTS(&layer->config.router);
    task->room = SIZE_MAX;
    task->keeps = moei_keeps(&p->call);
    task->run = *run;
    task->run.packed = moei_uses_packed(layer, &p->call);
    if (task->keeps) task->run.ld[MOE_NODE_OUTPUT] = task->run.width[MOE_NODE_OUTPUT];
#ifndef MOE_NO_QUANT
    task->quantizes = (task->run.packed && moei_is_quantized(layer->packed_type)) || run->in_file == 2;
#endif
    task->mask = kind == MOEI_RUN_SCORED ? run->for_score : run->needed;
    task->run.weights *=
        kind == MOEI_RUN_CHOSEN ? moei_smaller(task->experts, p->routing.plan.offsets[task->experts]) : task->experts;
    if (kind != MOEI_RUN_CHOSEN) return;
    task->room = moei_expert_rows(&layer->config, p->call.n_tokens);
    task->plain = p->routing.plan.rows == 0 && layer->config.router.apply_to == MOE_APPLY_OUTPUT;
    if (layer->config.router.apply_to != MOE_APPLY_OUTPUT || run->scored < 0)
        return; /* computed from the unweighted input */
    task->computed = run->for_score;
    task->frontier = moei_frontier(run->kind, task->computed);
    task->mask &= ~task->computed;
}

/* The run's quantized rows begin with row `at` of the buffers. */
static void moei_quantized_rows(const moei_task *task, size_t at, moei_expert_run *run) {
    int i;
    for (i = 0; i < 2; i++) run->quantized[i] = task->p->quantized[i] + at * task->p->quantized_size[i];
}

/* Expert e on all tokens, for the score. */
static void moei_scored_run(const moei_task *task, size_t e, moei_expert_run *run) {
    const moe_layer_pass *p = task->p;
    int i;
    run->expert = e;
    run->n = p->call.n_tokens;
    run->activation[MOEI_X] = p->clean;
    run->gradient[MOEI_X] = task->dx;
    run->summed = ~0u;
    if (task->quantizes) moei_quantized_rows(task, 0, run);
    for (i = 0; i < MOE_NODE_COUNT; i++) {
        size_t at = e * run->n * run->width[i];
        run->ld[i] = run->width[i];
        if (p->all[i] != NULL) run->activation[i] = p->all[i] + at;
        if (p->d_all[i] != NULL) run->gradient[i] = p->d_all[i] + at;
    }
}

/* Expert e on its rows of the plan. Training keeps all rows, other calls use the same buffers for
   every group of experts. */
static void moei_chosen_run(const moei_task *task, size_t e, moei_expert_run *run) {
    const moe_layer_pass *p = task->p;
    const moe_dispatch_plan *plan = &p->routing.plan;
    size_t first = plan->rows > 0 ? e * plan->rows : plan->offsets[e], at = first - task->base;
    int i;
    run->expert = e;
    run->first = plan->offsets[e];
    run->n_assignments = plan->offsets[e + 1] - run->first;
    run->assignments = plan->assignments + run->first;
    run->n = plan->rows > 0 ? plan->rows : run->n_assignments;
    run->reads_x = run->n == 1 && task->plain && !task->keeps;
    if (run->reads_x) {
        const moe_real *x = p->inputs + (size_t)run->assignments->token * run->width[MOEI_X];
        memcpy(&run->activation[MOEI_X], &x, sizeof x);
        run->ld[MOEI_X] = run->width[MOEI_X];
    } else {
        run->ld[MOEI_X] = moei_stride(task->layer, run->width[MOEI_X]);
        run->activation[MOEI_X] = p->rows + at * run->ld[MOEI_X];
    }
    if (task->quantizes) moei_quantized_rows(task, at, run);
    for (i = 0; i < MOE_NODE_COUNT; i++) {
        if (p->node[i] != NULL) run->activation[i] = p->node[i] + (task->keeps ? first : at) * run->ld[i];
        if (p->d_node[i] != NULL) run->gradient[i] = p->d_node[i] + at * run->ld[i];
    }
    /* only dx and weights on the input read the gradient of the rows */
    if (p->d_rows != NULL && (task->dx != NULL || !task->plain))
        run->gradient[MOEI_X] = p->d_rows + at * run->ld[MOEI_X];
}

static void moei_shared_run(const moei_task *task, size_t e, moei_expert_run *run) {
    const moe_layer_pass *p = task->p;
    int i;
    (void)e;
    run->n = p->call.n_tokens;
    memcpy(&run->activation[MOEI_X], &p->x, sizeof p->x);
    run->gradient[MOEI_X] = task->dx;
    run->summed = 1u << MOEI_X;
    if (task->quantizes) moei_quantized_rows(task, 0, run);
    for (i = 0; i < MOE_NODE_COUNT; i++) {
        run->activation[i] = p->shared[i];
        run->gradient[i] = p->d_shared[i];
    }
}

static void moei_latent_run(const moei_task *task, size_t e, moei_expert_run *run) {
    const moe_layer_pass *p = task->p;
    int out = run->kind == &moei_experts[MOEI_LATENT_OUT];
    (void)e;
    run->n = p->call.n_tokens;
    run->activation[MOEI_X] = p->latent[out ? 2 : 0];
    run->activation[MOE_NODE_OUTPUT] = task->y;
    run->gradient[MOEI_X] = task->dx;
    run->gradient[MOE_NODE_OUTPUT] = p->d_latent[out ? 2 : 0];
    run->ld[MOE_NODE_OUTPUT] = run->width[MOE_NODE_OUTPUT];
    run->summed = out ? 0 : 1u << MOEI_X;
    if (task->quantizes) moei_quantized_rows(task, 0, run);
}

/* One for each of MOEI_RUN_: sets what depends on the expert in task->run or in a copy of it. */
static void (*const moei_expert_runs[])(const moei_task *task, size_t e, moei_expert_run *run) = {
    moei_scored_run, moei_chosen_run, moei_shared_run, moei_latent_run};

/* Adds sources, n numbers each, times an expert's weights to targets: of tokens to its rows
   (to_rows), or of rows to tokens. Soft: up to MOST terms of a sum at once. */
static void moei_add_weighted(const moei_task *task, const moei_expert_run *run, int to_rows, int weight_in, size_t n,
                              const moe_real *source, size_t lds, moe_real *target, size_t ldt) {
    enum { MOST = 8 };
    const int soft = task->p->routing.plan.rows > 0;
    const size_t step = to_rows ? (size_t)task->layer->config.router.slots : 1;
    const moe_kernels *k = moei_table(task->layer->kernels);
    size_t i, j, count, end = run->n_assignments;
    for (i = 0; !soft && i < end; i++) {
        const moe_assignment *entry = run->assignments + i;
        const size_t token = (size_t)entry->token;
        k->axpy(n, weight_in ? entry->weight_in : entry->weight_out, source + (to_rows ? token : i) * lds,
                target + (to_rows ? i : token) * ldt);
    }
    for (i = 0; soft && i < end; i += (count - 1) * step) {
        const moe_assignment *first = run->assignments + i;
        const size_t stop = i + step;
        for (count = 1; count < MOST && i + count * step < end; count++) {
            const moe_assignment *next = first + count * step;
            if (to_rows ? next->token != first->token + (int32_t)count || next->choice != first->choice
                        : next->token != first->token)
                break;
        }
        for (; i < stop; i++, first++) {
            const size_t row = (size_t)first->choice, token = (size_t)first->token;
            moe_real alpha[MOST];
            for (j = 0; j < count; j++) alpha[j] = weight_in ? first[j * step].weight_in : first[j * step].weight_out;
            k->axpy_rows(count, n, alpha, source + (to_rows ? token : row) * lds, lds,
                         target + (to_rows ? row : token) * ldt);
        }
    }
}

/* ---- the phases of a forward pass ---- */

/* Columns from .. to of the input rows of an expert: its tokens, times the weight on the input;
   soft mixes them. */
static void moei_gather_input(const moei_task *task, const moei_expert_run *run, size_t from, size_t to) {
    const moe_layer_pass *p = task->p;
    size_t d = run->width[MOEI_X], ld = run->ld[MOEI_X], i;
    moe_real *rows = run->activation[MOEI_X] + from;
    for (i = 0; i < run->n; i++) {
        if (!task->plain) memset(rows + i * ld, 0, (to - from) * sizeof(moe_real));
        else
            memcpy(rows + i * ld, p->inputs + (size_t)run->assignments[i].token * d + from,
                   (to - from) * sizeof(moe_real));
    }
    if (!task->plain) moei_add_weighted(task, run, 1, 1, to - from, p->inputs + from, d, rows, ld);
}

/* Reuses activations that the score has computed. */
static void moei_gather_activations(const moei_task *task, const moei_expert_run *run, int index) {
    const moe_layer_pass *p = task->p;
    size_t i, from, to;
    int a;
    for (a = 0; a < MOE_NODE_COUNT; a++) {
        size_t width = run->width[a];
        if (!(task->frontier >> a & 1u)) continue;
        moei_columns_of(width, index, task->n_tasks, &from, &to);
        for (i = 0; i < run->n; i++) {
            size_t row = run->expert * p->call.n_tokens + (size_t)run->assignments[i].token;
            memcpy(run->activation[a] + i * run->ld[a] + from, p->all[a] + row * width + from,
                   (to - from) * sizeof(moe_real));
        }
    }
}

static void moei_gather(const moei_task *task, const moei_expert_run *run, int stage, int index) {
    size_t from, to;
    (void)stage;
    moei_columns_of(run->width[MOEI_X], index, task->n_tasks, &from, &to);
    if (to > from && !run->reads_x) moei_gather_input(task, run, from, to);
    if (task->frontier != 0) moei_gather_activations(task, run, index);
}

/* Quantizes a task's share of the rows that a stage reads. */
static void moei_quantize_rows(const moei_task *task, const moei_expert_run *run, int stage, int index) {
#ifndef MOE_NO_QUANT
    size_t from, count;
    moei_nth_part(run->n, (size_t)index, (size_t)task->n_tasks, &from, &count);
    moei_quantize_stage(run, stage, task->mask, from, from + count);
#else
    (void)task;
    (void)run;
    (void)stage;
    (void)index;
#endif
}

static void moei_stage_of_task(const moei_task *task, const moei_expert_run *run, int stage, int index) {
    size_t from, to;
    moei_columns_of(run->stage_width[stage], index, task->n_tasks, &from, &to);
    moei_stage_columns(run, stage, task->mask, from, to);
}

/* The columns of a stage; those of the last one are added to y_t, times the assignment's weight or
   the shared expert's factor. */
static void moei_added_columns(const moei_task *task, const moei_expert_run *run, int stage, int index) {
    size_t o = run->width[MOE_NODE_OUTPUT], ld = run->ld[MOE_NODE_OUTPUT], from, to, i;
    const int shared = run->kind == &moei_experts[MOEI_SHARED], last = stage + 1 == run->kind->n_stages;
    const moe_real *outputs;
    moei_columns_of(run->stage_width[stage], index, task->n_tasks, &from, &to);
    if (to <= from) return;
    outputs = run->activation[MOE_NODE_OUTPUT] + from;
    moei_stage_columns(run, stage, task->mask, from, to);
    for (i = 0; last && shared && i < run->n; i++)
        moe_axpy(task->layer->kernels, to - from, task->p->shared_factor[i], outputs + i * ld, task->y + i * o + from);
    if (last && !shared) moei_add_weighted(task, run, 0, 0, to - from, outputs, ld, task->y + from, o);
}

/* ---- the phases of a backward pass ---- */

#ifndef MOE_NO_TRAIN

/* The gradients of a loss: of y, or of every assignment's output and weight. */
typedef struct moei_returned {
    const moe_real *dy, *d_outputs, *d_weights;
} moei_returned;

/* dO = w dy, columns from .. to, for the rows of one expert. */
static void moei_scatter_backward(const moei_task *task, const moei_expert_run *run, size_t from, size_t to) {
    size_t o = run->width[MOE_NODE_OUTPUT], bytes = (to - from) * sizeof(moe_real), i;
    moe_real *d_output = run->gradient[MOE_NODE_OUTPUT] + from;
    const moe_real *dy = task->returned->dy;
    for (i = 0; i < run->n; i++) {
        if (dy == NULL) memcpy(d_output + i * o, task->returned->d_outputs + (run->first + i) * o + from, bytes);
        else memset(d_output + i * o, 0, bytes);
    }
    if (dy != NULL) moei_add_weighted(task, run, 1, 0, to - from, dy + from, o, d_output, o);
}

/* Gathers the input rows again, and the gradient of the outputs. */
static void moei_chosen_begin_backward(const moei_task *task, const moei_expert_run *run, int stage, int index) {
    size_t from, to, i;
    (void)stage;
    moei_columns_of(run->width[MOE_NODE_OUTPUT], index, task->n_tasks, &from, &to);
    if (to > from) moei_scatter_backward(task, run, from, to);
    moei_columns_of(run->width[MOEI_X], index, task->n_tasks, &from, &to);
    if (to > from) moei_gather_input(task, run, from, to);
    if (run->gradient[MOEI_X] == NULL || moei_is_read_after(run->kind, MOEI_X, -1, task->mask)) return;
    for (i = 0; i < run->n; i++) /* no product reads x */
        memset(run->gradient[MOEI_X] + i * run->ld[MOEI_X] + from, 0, (to - from) * sizeof(moe_real));
}

/* The backward pass of elementwise steps whose result only the score reads. */
static void moei_scored_begin_backward(const moei_task *task, const moei_expert_run *run, int stage, int index) {
    size_t from, to;
    int i;
    (void)stage;
    for (i = run->kind->n_steps - 1; i >= 0; i--) {
        const moei_step *step = &run->kind->steps[i];
        if (step->op == MOEI_STEP_MATMUL || !(task->mask >> step->to & 1u)) continue;
        if (moei_is_read_after(run->kind, step->to, -1, task->mask)) continue;
        moei_columns_of(run->width[step->to], index, task->n_tasks, &from, &to);
        if (to > from) moei_elementwise_backward(run, step, from, to - from);
    }
}

static void moei_products_backward(const moei_task *task, const moei_expert_run *run, int stage, int index) {
    moei_stage_backward(run, stage, task->mask, index, task->n_tasks);
}

/* As moei_products_backward; after the first stage also dx_t += w_in d_row. */
static void moei_chosen_backward(const moei_task *task, const moei_expert_run *run, int stage, int index) {
    size_t d = run->width[MOEI_X], from, to;
    moei_stage_backward(run, stage, task->mask, index, task->n_tasks);
    if (stage > 0 || task->dx == NULL) return;
    moei_columns_of(d, index, task->n_tasks, &from, &to);
    if (to > from)
        moei_add_weighted(task, run, 0, 1, to - from, run->gradient[MOEI_X] + from, run->ld[MOEI_X], task->dx + from,
                          d);
}

/* What needs whole rows, for a task's share of the assignments: dw_out = dy . O, dw_in = d_row .
   x_t, and the gradients of activations that were computed for the score. */
static void moei_weights_backward(const moei_task *task, const moei_expert_run *run, int stage, int index) {
    const moe_layer_pass *p = task->p;
    const moe_kernels *k = task->layer->kernels;
    size_t d = run->width[MOEI_X], o = run->width[MOE_NODE_OUTPUT], from, to, i;
    int a;
    (void)stage;
    moei_columns_of(run->n_assignments, index, task->n_tasks, &from, &to);
    for (i = from; i < to; i++) {
        const moe_assignment *entry = run->assignments + i;
        size_t row = p->routing.plan.rows > 0 ? (size_t)entry->choice : i, t = (size_t)entry->token;
        const moe_real *dy = task->returned->dy;
        p->routing.d_weight_out[run->first + i] =
            dy == NULL ? task->returned->d_weights[run->first + i]
                       : moe_dot(k, o, dy + t * o, run->activation[MOE_NODE_OUTPUT] + row * o);
        if (!task->plain)
            p->routing.d_weight_in[run->first + i] =
                moe_dot(k, d, run->gradient[MOEI_X] + row * run->ld[MOEI_X], p->inputs + t * d);
        for (a = 0; a < MOE_NODE_COUNT; a++)
            if (task->frontier >> a & 1u)
                MOEI_ADD(k, run->width[a], run->gradient[a] + i * run->ld[a],
                         p->d_all[a] + (run->expert * p->call.n_tokens + t) * run->width[a]);
    }
}

#endif

/* ---- the phases in their order ---- */

/* A call runs phase by phase, and every task of a phase ends before the next phase begins. Columns
   are divided among the tasks, not experts: every task has the same work whatever the load of the
   experts, reads each weight that it needs once, and owns its columns of y and of the gradients.
   Each number is summed by one task, in the same order, so results do not depend on the number of
   threads. */
typedef struct moei_phase {
    /* stage of the expert's steps; kinds of experts with fewer stages skip the phase */
    int backward, stage;
    void (*run[MOEI_RUN_KINDS])(const moei_task *task, const moei_expert_run *run, int stage,
                                int index); /* NULL: skipped */
} moei_phase;

static const moei_phase moei_phases[] = {
    /*     scored                      chosen                      shared                  latent */
    {0, 0, {NULL,                       moei_gather,                NULL,                   NULL}},
    {0, 0, {moei_quantize_rows,         moei_quantize_rows,         moei_quantize_rows,     moei_quantize_rows}},
    {0, 0, {moei_stage_of_task,         moei_added_columns,         moei_added_columns,     moei_stage_of_task}},
    {0, 1, {moei_quantize_rows,         moei_quantize_rows,         moei_quantize_rows,     NULL}},
    {0, 1, {moei_stage_of_task,         moei_added_columns,         moei_added_columns,     NULL}},
    {0, 2, {moei_quantize_rows,         moei_quantize_rows,         moei_quantize_rows,     NULL}},
    {0, 2, {moei_stage_of_task,         moei_added_columns,         moei_added_columns,     NULL}},
#ifndef MOE_NO_TRAIN
    {1, 0, {moei_scored_begin_backward, moei_chosen_begin_backward, NULL,                   NULL}},
    {1, 2, {moei_products_backward,     moei_chosen_backward,       moei_products_backward, NULL}},
    {1, 1, {moei_products_backward,     moei_chosen_backward,       moei_products_backward, NULL}},
    {1, 0, {moei_products_backward,     moei_chosen_backward,       moei_products_backward, moei_products_backward}},
    {1, 0, {NULL,                       moei_weights_backward,      NULL,                   NULL}},
#endif
};

enum { MOEI_PHASES = (int)(sizeof moei_phases / sizeof moei_phases[0]) };

/* One task of a phase: its share of each expert of the group. */
static void moei_run_task(void *work, int index) {
    const moei_task *task = (const moei_task *)work;
    const moei_phase *phase = &moei_phases[task->phase];
    size_t e;
    for (e = task->first; e < task->end; e++) {
        moei_expert_run run = task->run;
        moei_expert_runs[task->kind](task, e, &run);
        if (run.n > 0) phase->run[task->kind](task, &run, phase->stage, index);
    }
}

/* Selects the next experts: as many as fit the buffers together or, with one task, one. 0: none is
   left. */
static int moei_next_group(moei_task *task) {
    int chosen = task->kind == MOEI_RUN_CHOSEN;
    const moe_dispatch_plan *plan = &task->p->routing.plan;
    size_t n = task->p->call.n_tokens, rows = 0;
    task->first = task->end;
    while (chosen && task->first < task->experts && moei_rows_of(task->p, task->first) == 0) task->first++;
    if (task->first == task->experts) return 0;
    if (chosen) task->base = plan->rows > 0 ? task->first * plan->rows : plan->offsets[task->first];
    for (task->end = task->first; task->end < task->experts; task->end++) {
        rows += chosen ? moei_rows_of(task->p, task->end) : n;
        if (rows > task->room || (task->n_tasks == 1 && task->end > task->first)) break;
    }
    return 1;
}

/* A forward or backward pass of all experts on `rows` rows in all: group by group, on several
   threads or, with one task, in this one. */
static void moei_run_experts(moei_task *task, const moe_parallel *team, size_t rows, int backward) {
    if (team != NULL && team->threads > 1)
        task->n_tasks = moei_task_count(team, &task->run, backward ? 2 * rows : rows, task->experts);
    while (moei_next_group(task)) {
        moei_expert_run *run = &task->run;
        moei_expert_runs[task->kind](task, task->first, run);
        for (task->phase = 0; task->phase < MOEI_PHASES; task->phase++) {
            const moei_phase *phase = &moei_phases[task->phase];
            if (phase->backward != backward || phase->stage >= run->kind->n_stages) continue;
            if (phase->run[task->kind] == NULL) continue;
            if (phase->run[task->kind] == moei_quantize_rows && !task->quantizes) continue;
            if (task->n_tasks > 1) team->run(team->ctx, moei_run_task, task, task->n_tasks);
            else if (phase->run[task->kind] == moei_gather && run->reads_x && task->frontier == 0) continue;
            else if (run->n > 0) phase->run[task->kind](task, run, phase->stage, 0);
        }
    }
}

/* ==== >>code_forward ========================================================================== */

/* Copies rows, with zeros for padding. */
static void moei_clean(const moe_call *call, size_t width, const moe_real *rows, moe_real *clean) {
    size_t t;
    for (t = 0; t < call->n_tokens; t++)
        if (moei_is_real(call, t)) memcpy(clean + t * width, rows + t * width, width * sizeof(moe_real));
        else memset(clean + t * width, 0, width * sizeof(moe_real));
}

/* One of the two matrices of d_latent on all tokens, forward into y or backward into dx. */
static void moei_latent_product(const moe_layer *layer, moe_layer_pass *p, int kind, int backward, moe_real *y,
                                moe_real *dx, const moe_parallel *team) {
    moei_expert_run run = moei_expert_run_begin(layer, kind, 0);
    moei_task task;
    moei_task_begin(&task, layer, p, MOEI_RUN_LATENT, &run);
    task.y = y;
    task.dx = dx;
    moei_run_experts(&task, team, p->call.n_tokens, backward);
}

/* Computes W_in x, which the experts read. */
static void moei_inputs_forward(const moe_layer *layer, moe_layer_pass *p, const moe_parallel *team) {
    moei_clean(&p->call, (size_t)layer->config.router.d_model, p->x, p->latent[0]);
    moei_latent_product(layer, p, MOEI_LATENT_IN, 0, p->latent[1], NULL, team);
    p->inputs = p->latent[1];
}

/* Whether the experts may compete in a call, and whether a random number decides. */
static int moei_may_compete(const moe_layer *layer, const moe_call *call) {
    const moe_router_config *c = &layer->config.router;
    const moe_real *step = layer->tensors[MOE_ROUTER_STEP];
    if (!(c->compete_rate > 0) || !call->training) return 0;
    if (c->freeze_at > 0 && step != NULL && step[0] >= (moe_real)c->freeze_at) return 0;
    return c->compete_from == 0 || (step != NULL && step[0] >= (moe_real)c->compete_from);
}

static int moei_draws_competition(const moe_layer *layer, const moe_call *call) {
    return moei_may_compete(layer, call) && layer->config.router.compete_rate < MOEI_R(1.0);
}

/* Whether experts compete for the tokens of this call: sets activation_width, which tells the
   router. */
static moe_status moei_compete_begin(const moe_layer *layer, moe_call *call) {
    const moe_layer_config *c = &layer->config;
    int competes = moei_may_compete(layer, call);
    if (moei_draws_competition(layer, call)) {
        if (call->rng == NULL) return moei_missing(call, "rng", "compete_rate");
        competes = moe_rng_uniform(call->rng) < c->router.compete_rate;
    }
    call->activations = NULL;
    call->activation_width = competes ? (size_t)moei_activation_width(c, c->expert, MOE_NODE_OUTPUT) : 0;
    return MOE_OK;
}

/* For scores that read experts: the activation of every expert for every token. Padding counts as
   zeros. */
static void moei_scored_forward(const moe_layer *layer, moe_layer_pass *p, const moei_expert_run *run,
                                const moe_parallel *team) {
    moei_task task;
    size_t n = p->call.n_tokens;
    if (n == 0) return;
    moei_task_begin(&task, layer, p, MOEI_RUN_SCORED, run);
    moei_clean(&p->call, run->width[MOEI_X], p->inputs, p->clean);
    /* one expert at a time: they share the buffer of quantized rows */
    if (task.quantizes) task.room = n;
    moei_run_experts(&task, team, n * task.experts, 0);
    p->call.activations = p->all[run->scored];
    p->call.activation_width = run->width[run->scored];
}

/* y_t += w_te f_e(x_t) for all assignments of the plan; with `returned` (else NULL) the backward
   pass of that. */
static void moei_chosen_experts(const moe_layer *layer, moe_layer_pass *p, const moei_expert_run *run, moe_real *y,
                                const struct moei_returned *returned, moe_real *dx, const moe_parallel *team) {
    moei_task task;
    const moe_dispatch_plan *plan = &p->routing.plan;
    moei_task_begin(&task, layer, p, MOEI_RUN_CHOSEN, run);
    task.y = y;
    task.returned = returned;
    task.dx = dx;
    moei_run_experts(&task, team, plan->rows > 0 ? task.experts * plan->rows : plan->offsets[task.experts],
                     returned != NULL);
}

/* A copy or constant expert for one token: f(w x) = on_x x + on_v v. */
typedef struct moei_zero {
    moe_real on_x, on_v, slope; /* slope: of on_v by a logit, exact where it saturates */
    const moe_real *v, *gate;   /* constant: v [d] and W [2,d]; else NULL */
    size_t index;               /* which constant expert it is */
} moei_zero;

static moei_zero moei_zero_of(const moe_layer *layer, size_t e, const moe_real *x, moe_real w) {
    const moe_router_config *c = &layer->config.router;
    const size_t d = (size_t)c->d_model, constants = (size_t)(c->n_experts - c->n_constant);
    moei_zero z;
    moe_real ahead, part;
    memset(&z, 0, sizeof z);
    z.on_x = w;
    if (e < constants) return z;
    z.index = e - constants;
    z.v = layer->tensors[MOE_EXPERTS_CONSTANT] + z.index * d;
    z.gate = layer->tensors[MOE_EXPERTS_CONSTANT_GATE] + z.index * 2 * d;
    ahead = w * (moe_dot(layer->kernels, d, z.gate, x) - moe_dot(layer->kernels, d, z.gate + d, x));
    part = moe_sigmoid(ahead); /* a softmax of two */
    z.on_x = w * part;
    z.on_v = moe_sigmoid(-ahead);
    z.slope = z.on_v * part;
    return z;
}

/* The assignments of experts without matrices, the last of the plan: y_t += w_te f_e(x_t). */
static void moei_zero_forward(const moe_layer *layer, const moe_layer_pass *p, moe_real *y) {
    const size_t *offsets = p->routing.plan.offsets;
    const size_t real = p->routing.real_experts, experts = p->routing.n_experts;
    const size_t d = (size_t)layer->config.router.d_model;
    const size_t o = (size_t)moei_activation_width(&layer->config, layer->config.expert, MOE_NODE_OUTPUT);
    moe_real *outputs = moei_keeps(&p->call) ? p->node[MOE_NODE_OUTPUT] : NULL;
    size_t e, i;
    if (offsets[real] == offsets[experts]) return;
    if (outputs != NULL)
        memset(outputs + offsets[real] * o, 0, (offsets[experts] - offsets[real]) * o * sizeof(moe_real));
    for (e = real + (size_t)layer->config.router.n_zero; e < experts; e++)
        for (i = offsets[e]; i < offsets[e + 1]; i++) {
            const moe_assignment *entry = p->routing.plan.assignments + i;
            const moe_real *x = p->x + (size_t)entry->token * d;
            const moei_zero z = moei_zero_of(layer, e, x, entry->weight_in);
            moe_real *to = y + (size_t)entry->token * d;
            moe_axpy(layer->kernels, d, entry->weight_out * z.on_x, x, to);
            if (z.v != NULL) moe_axpy(layer->kernels, d, entry->weight_out * z.on_v, z.v, to);
            if (outputs == NULL) continue;
            moe_axpy(layer->kernels, d, z.on_x, x, outputs + i * d);
            if (z.v != NULL) moe_axpy(layer->kernels, d, z.on_v, z.v, outputs + i * d);
        }
}

/* 1 - sum of a token's weights: the weight of the input itself. */
static moe_real moei_input_weight(const moe_layer *layer, const moe_layer_pass *p, size_t t) {
    size_t experts = (size_t)layer->config.router.n_experts, e;
    moe_real weight = MOEI_R(1.0);
    for (e = 0; e < experts; e++) weight -= p->routing.weights[(p->routing.first + t) * experts + e];
    return weight;
}

/* y_t += (1 - sum_e w_te) x_t; padding has no weights and is skipped. */
static void moei_add_input(const moe_layer *layer, const moe_layer_pass *p, moe_real *y) {
    size_t d = (size_t)layer->config.router.d_model, t;
    for (t = 0; t < p->call.n_tokens; t++)
        if (moei_is_real(&p->call, t))
            moe_axpy(layer->kernels, d, moei_input_weight(layer, p, t), p->x + t * d, y + t * d);
}

/* y_t += shared(x_t), times sigmoid(s . x_t) with shared_sigmoid; for padding too. */
static void moei_shared_forward(const moe_layer *layer, moe_layer_pass *p, moe_real *y, const moe_parallel *team) {
    const moe_real *gate = layer->tensors[MOE_SHARED_SIGMOID];
    moei_expert_run run = moei_expert_run_begin(layer, MOEI_SHARED, 0);
    moei_task task;
    size_t n = p->call.n_tokens, d = run.width[MOEI_X], t;
    moei_task_begin(&task, layer, p, MOEI_RUN_SHARED, &run);
    task.y = y;
    for (t = 0; t < n; t++)
        p->shared_factor[t] = gate != NULL ? moe_sigmoid(moe_dot(layer->kernels, d, gate, p->x + t * d)) : MOEI_R(1.0);
    moei_run_experts(&task, team, n, 0);
}

/* Checks what must be set before anything is computed; the router checks the rest. */
static moe_status moei_layer_call_check(const moe_layer *layer, const moei_expert_run *run, const moe_call *call) {
    uint64_t set = 0; /* bit i: tensor i is set */
    int i;
    if ((run->kind->n_steps > 1 && !MOEI_KEPT(ACTS, run->act)) ||
        (!MOEI_KEPT(EXTRAS, MOE_EXTRA_SHAPED) && run->shaped) ||
        (layer->config.n_shared > 0 && !MOEI_KEPT(ACTS, moei_expert_run_begin(layer, MOEI_SHARED, 0).act)))
        return moei_error(call->error, MOE_ERR_UNSUPPORTED,
                          "a MOE_KEEP_ macro has left the experts' activation out of this build");
    if (!MOEI_FITS_INT32(call->n_tokens))
        return moei_error(call->error, MOE_ERR_OVERFLOW, "call.n_tokens = %z: too many", call->n_tokens);
    if (call->n_tokens > 0 && call->x == NULL) return MOEI_REFUSE(call->error, "call.x is NULL");
    for (i = MOE_LAYER_PARAMETER_COUNT; i-- > 0;) set = set << 1 | (layer->tensors[i] != NULL);
    if (set == layer->present && !call->training) return MOE_OK; /* the common case */
    for (i = 0; i < MOE_LAYER_PARAMETER_COUNT; i++) {
        if (layer->external[i] != NULL && call->training)
            return moei_error(call->error, MOE_ERR_UNSUPPORTED,
                              "%s lies in a file (layer.external): it cannot be trained", moei_layer_parameter_name(i));
        if (layer->external[i] != NULL && !moei_is_constant(i) && i != MOE_SHARED_SIGMOID) continue;
        if (moei_parameter_is_set(i, layer->present, layer->tensors[i])) continue;
        if (layer->packed[i] != NULL && moei_uses_packed(layer, call)) continue;
        return MOEI_REFUSE(call->error, "%s is not set: layer.tensors[%d] is NULL", moei_layer_parameter_name(i), i);
    }
    return MOE_OK;
}

moe_status moe_layer_forward(const moe_layer *layer, const moe_call *call, moe_real *y, void *work, size_t work_size,
                             moe_layer_pass *pass) {
    moei_layout l = moei_layout_begin(work);
    moe_layer_pass p;
    moe_parallel team;
    moei_expert_run run;
    moe_real *sum;
    moe_router router;
    moe_status status;
    if (call == NULL) return MOE_ERR_ARGUMENT;
    if (layer == NULL) return MOEI_REFUSE(call->error, "layer is NULL");
    if (layer->config.transport != NULL)
        return moei_group(layer->config.transport)->hooks->forward(layer, call, y, work, work_size, pass);
    if (work == NULL || (call->n_tokens > 0 && y == NULL))
        return MOEI_REFUSE(call->error, "%s is NULL", work == NULL ? "work" : "y");
    if (call->batch != NULL)
        return MOEI_REFUSE(call->error,
                           "call.batch is set: a layer decides over several calls with config.transport only");
    run = moei_expert_run_begin(layer, layer->config.expert, moei_keeps(call));
    status = moei_layer_call_check(layer, &run, call);
    if (status != MOE_OK) return status;
    moei_layer_layout(layer, &run, call->n_tokens, call->n_past, moei_keeps(call), &l, &p);
    if (l.overflow)
        return moei_error(call->error, MOE_ERR_OVERFLOW, "call.n_tokens = %z: the workspace exceeds size_t",
                          call->n_tokens);
    if (l.used > work_size)
        return moei_error(call->error, MOE_ERR_SPACE, "work_size = %z: the call takes %z bytes", work_size, l.used);
    p.call = *call;
    p.x = call->x;
    if (layer->config.router.compete_rate > 0) {
        status = moei_compete_begin(layer, &p.call);
        if (status != MOE_OK) return status;
        run = moei_expert_run_begin(layer, layer->config.expert, MOEI_COMPETED(&p.call));
    }
    team = moei_team(call);
    p.inputs = p.x;
    if (layer->config.d_latent > 0) moei_inputs_forward(layer, &p, &team);
    if (run.scored >= 0) moei_scored_forward(layer, &p, &run, &team);
    moei_layer_router(layer, &router);
    status = moe_route(&router, &p.call, p.route_memory, p.route_size, &p.routing);
    if (status != MOE_OK) return status;
    sum = layer->config.d_latent > 0 ? p.latent[2] : y;
    if (call->n_tokens > 0) memset(sum, 0, call->n_tokens * run.width[MOE_NODE_OUTPUT] * sizeof *sum);
    moei_chosen_experts(layer, &p, &run, sum, NULL, NULL, &team);
    if (layer->config.d_latent > 0) moei_latent_product(layer, &p, MOEI_LATENT_OUT, 0, y, NULL, &team);
    if (p.routing.real_experts < p.routing.n_experts) moei_zero_forward(layer, &p, y);
    if (layer->config.add_input) moei_add_input(layer, &p, y);
    if (layer->config.n_shared > 0) moei_shared_forward(layer, &p, y, &team);
    if (moei_keeps(call) && p.routing.plan.rows == 0 && layer->config.d_latent == 0)
        p.expert_outputs = p.node[MOE_NODE_OUTPUT];
    if (pass != NULL) *pass = p;
    return MOE_OK;
}

/* ==== >>code_backward ========================================================================= */

#ifndef MOE_NO_TRAIN

/* The backward pass of one assignment of a constant expert: from dO = s g, with a = softmax(l), l =
   w W x:  dl1 = a1 a2 dO . (w x - v) = -dl2,  dv += a2 dO,  dW += dl w x^T,  dx += w (W1 - W2) dl1.
   Returns that part of dw. */
static moe_real moei_constant_backward(const moe_layer *layer, const moei_zero *z, const moe_real *x, moe_real w,
                                       const moe_real *g, moe_real s, moe_real *dx) {
    const moe_kernels *k = layer->kernels;
    const size_t d = (size_t)layer->config.router.d_model;
    moe_real *d_v = layer->gradients[MOE_EXPERTS_CONSTANT], *d_gate = layer->gradients[MOE_EXPERTS_CONSTANT_GATE];
    const moe_real dl = s * z->slope * (w * moe_dot(k, d, g, x) - moe_dot(k, d, g, z->v));
    if (d_v != NULL) moe_axpy(k, d, s * z->on_v, g, d_v + z->index * d);
    if (d_gate != NULL) {
        moe_axpy(k, d, w * dl, x, d_gate + z->index * 2 * d);
        moe_axpy(k, d, -w * dl, x, d_gate + (z->index * 2 + 1) * d);
    }
    if (dx != NULL) {
        moe_axpy(k, d, w * dl, z->gate, dx);
        moe_axpy(k, d, -w * dl, z->gate + d, dx);
    }
    return dl * (moe_dot(k, d, z->gate, x) - moe_dot(k, d, z->gate + d, x));
}

/* The backward pass of moei_zero_forward. */
static void moei_zero_backward(const moe_layer *layer, moe_layer_pass *p, const moei_returned *returned, moe_real *dx) {
    const size_t *offsets = p->routing.plan.offsets;
    const size_t real = p->routing.real_experts, experts = p->routing.n_experts;
    const size_t d = (size_t)layer->config.router.d_model;
    const moe_kernels *k = layer->kernels;
    const moe_real *dy = returned->dy;
    size_t e, i;
    for (i = offsets[real]; i < offsets[experts]; i++) {
        p->routing.d_weight_out[i] = dy != NULL ? 0 : returned->d_weights[i];
        p->routing.d_weight_in[i] = 0;
    }
    for (e = real + (size_t)layer->config.router.n_zero; e < experts; e++)
        for (i = offsets[e]; i < offsets[e + 1]; i++) {
            const moe_assignment *entry = p->routing.plan.assignments + i;
            const size_t t = (size_t)entry->token * d;
            const moe_real *x = p->x + t, *g = dy != NULL ? dy + t : returned->d_outputs + i * d;
            const moe_real w = entry->weight_in, s = dy != NULL ? entry->weight_out : MOEI_R(1.0);
            const moei_zero z = moei_zero_of(layer, e, x, w);
            moe_real *d_x = dx != NULL ? dx + t : NULL, *d_in = p->routing.d_weight_in + i;
            if (dy != NULL) p->routing.d_weight_out[i] = moe_dot(k, d, g, p->node[MOE_NODE_OUTPUT] + i * d);
            if (z.v != NULL) *d_in = moei_constant_backward(layer, &z, x, w, g, s, d_x);
            *d_in += s * (MOEI_R(1.0) - z.on_v) * moe_dot(k, d, g, x);
            if (d_x != NULL) moe_axpy(k, d, s * z.on_x, g, d_x);
        }
}

/* dx_t += (1 - sum w) dy_t and dw_te -= dy_t . x_t. */
static void moei_add_input_backward(const moe_layer *layer, moe_layer_pass *p, const moe_real *dy, moe_real *dx) {
    size_t d = (size_t)layer->config.router.d_model, t, i;
    for (t = 0; t < p->call.n_tokens; t++)
        if (dx != NULL && moei_is_real(&p->call, t))
            moe_axpy(layer->kernels, d, moei_input_weight(layer, p, t), dy + t * d, dx + t * d);
    for (i = 0; i < p->routing.plan.offsets[layer->config.router.n_experts]; i++) {
        t = (size_t)p->routing.plan.assignments[i].token;
        p->routing.d_weight_out[i] -= moe_dot(layer->kernels, d, dy + t * d, p->x + t * d);
    }
}

/* With s = sigmoid(v . x): dO = s dy, dv += s (1 - s) (dy . O) x, dx += the same times v; then the
   backward pass of the shared expert. */
static void moei_shared_backward(const moe_layer *layer, moe_layer_pass *p, const moe_real *dy, moe_real *dx,
                                 const moe_parallel *team) {
    const moe_real *gate = layer->tensors[MOE_SHARED_SIGMOID];
    moe_real *d_gate = layer->gradients[MOE_SHARED_SIGMOID];
    const moe_kernels *k = layer->kernels;
    moei_expert_run run = moei_expert_run_begin(layer, MOEI_SHARED, 0);
    moei_task task;
    size_t n = p->call.n_tokens, o = run.width[MOE_NODE_OUTPUT];
    size_t d = run.width[MOEI_X], t;
    moe_real *d_output = p->d_shared[MOE_NODE_OUTPUT];
    moei_task_begin(&task, layer, p, MOEI_RUN_SHARED, &run);
    memset(d_output, 0, n * o * sizeof(moe_real));
    for (t = 0; t < n; t++) {
        moe_real s = p->shared_factor[t], slope;
        moe_axpy(k, o, s, dy + t * o, d_output + t * o);
        if (gate == NULL) continue;
        slope = s * (MOEI_R(1.0) - s) * moe_dot(k, o, dy + t * o, p->shared[MOE_NODE_OUTPUT] + t * o);
        if (d_gate != NULL) moe_axpy(k, d, slope, p->x + t * d, d_gate);
        if (dx != NULL) moe_axpy(k, d, slope, gate, dx + t * d);
    }
    task.dx = dx;
    moei_run_experts(&task, team, n, 1);
}

/* Sets the gradients of all activations that the score read to 0. */
static void moei_scored_zero(const moe_layer *layer, moe_layer_pass *p, const moei_expert_run *run) {
    size_t rows = p->call.n_tokens * (size_t)layer->config.router.n_experts;
    int i;
    for (i = 0; i < MOE_NODE_COUNT; i++)
        if (p->d_all[i] != NULL) memset(p->d_all[i], 0, rows * run->width[i] * sizeof(moe_real));
}

/* The backward pass of the activations that the score read, for all experts and tokens. dx is added
   to. */
static void moei_scored_backward(const moe_layer *layer, moe_layer_pass *p, const moei_expert_run *run, moe_real *dx) {
    moei_task task;
    moei_task_begin(&task, layer, p, MOEI_RUN_SCORED, run);
    task.dx = dx;
    moei_run_experts(&task, NULL, 0, 1);
}

/* Replaces dy by the gradient of the experts' sum; returns that of their inputs, set to 0. Without
   d_latent: dx. */
static moe_real *moei_sum_backward(const moe_layer *layer, moe_layer_pass *p, moei_returned *back, moe_real *dx,
                                   const moe_parallel *team) {
    size_t n = p->call.n_tokens;
    if (layer->config.d_latent == 0) return dx;
    moei_clean(&p->call, (size_t)layer->config.d_out, back->dy, p->d_latent[2]);
    moei_latent_product(layer, p, MOEI_LATENT_OUT, 1, NULL, p->d_latent[1], team);
    back->dy = p->d_latent[1];
    if (n > 0) memset(p->d_latent[0], 0, n * (size_t)layer->config.d_latent * sizeof(moe_real));
    return p->d_latent[0];
}

static void moei_inputs_backward(const moe_layer *layer, moe_layer_pass *p, moe_real *dx, const moe_parallel *team) {
    if (layer->config.d_latent > 0) moei_latent_product(layer, p, MOEI_LATENT_IN, 1, NULL, dx, team);
}

static moe_status moei_layer_backward(const moe_layer *layer, const moei_returned *returned, moe_real *dx,
                                      moe_real *d_router_x, moe_layer_pass *pass) {
    moe_parallel team = moei_team(&pass->call);
    moe_router router;
    moei_expert_run run = moei_expert_run_begin(layer, layer->config.expert, MOEI_COMPETED(&pass->call));
    moe_real *d_scored = run.scored >= 0 ? pass->d_all[run.scored] : NULL, *d_inputs;
    moei_returned back = *returned;
    moe_status status;
    moei_layer_router(layer, &router);
    if (run.scored >= 0) moei_scored_zero(layer, pass, &run);
    if (returned->dy != NULL && layer->config.n_shared > 0) moei_shared_backward(layer, pass, returned->dy, dx, &team);
    d_inputs = moei_sum_backward(layer, pass, &back, dx, &team);
    moei_chosen_experts(layer, pass, &run, NULL, &back, d_inputs, &team);
    moei_zero_backward(layer, pass, returned, dx);
    if (returned->dy != NULL && layer->config.add_input) moei_add_input_backward(layer, pass, returned->dy, dx);
    status = moe_route_backward(&router, &pass->call, &pass->routing, layer->gradients,
                                pass->call.router_x != NULL ? d_router_x : dx, d_scored);
    if (status == MOE_OK && run.scored >= 0) moei_scored_backward(layer, pass, &run, d_inputs);
    if (status == MOE_OK) moei_inputs_backward(layer, pass, dx, &team);
    return status;
}

#define MOEI_NOT_TRAINING "the pass is not one of a forward with call.training = 1"

moe_status moe_layer_backward(const moe_layer *layer, const moe_real *dy, moe_real *dx, moe_real *d_router_x,
                              moe_layer_pass *pass) {
    moei_returned back;
    if (layer == NULL || pass == NULL) return MOE_ERR_ARGUMENT;
    back.dy = dy;
    back.d_outputs = back.d_weights = NULL;
    if (pass->ranks != NULL)
        return moei_group(layer->config.transport)->hooks->backward(layer, &back, dx, d_router_x, pass);
    if (pass->d_rows == NULL || !pass->call.training)
        return moei_error(pass->call.error, MOE_ERR_STATE, MOEI_NOT_TRAINING);
    if (pass->call.n_tokens == 0) return MOE_OK;
    if (dy == NULL) return MOEI_REFUSE(pass->call.error, "dy is NULL");
    return moei_layer_backward(layer, &back, dx, d_router_x, pass);
}

/* What a loss on single experts does not see, or NULL. */
static const char *moei_unseen(const moe_layer_config *c) {
    if (c->router.apply_to == MOE_APPLY_INPUT) return "apply_to = input";
    if (c->d_latent > 0) return "d_latent > 0";
    if (c->add_input) return "add_input = 1";
    return c->n_shared > 0 ? "n_shared > 0" : NULL;
}

moe_status moe_layer_backward_experts(const moe_layer *layer, const moe_real *d_outputs, const moe_real *d_weights,
                                      moe_real *dx, moe_real *d_router_x, moe_layer_pass *pass) {
    moei_returned back;
    const char *unseen;
    if (layer == NULL || pass == NULL) return MOE_ERR_ARGUMENT;
    if (pass->d_rows == NULL || !pass->call.training)
        return moei_error(pass->call.error, MOE_ERR_STATE, MOEI_NOT_TRAINING);
    if (pass->routing.plan.rows > 0)
        return moei_error(pass->call.error, MOE_ERR_STATE,
                          "select = soft: its experts read slots, which have no outputs per token");
    unseen = pass->ranks != NULL ? "a transport" : moei_unseen(&layer->config);
    if (unseen != NULL)
        return moei_error(pass->call.error, MOE_ERR_UNSUPPORTED,
                          "%s: a loss on single experts does not include it", unseen);
    if (pass->call.n_tokens == 0) return MOE_OK;
    if (d_outputs == NULL || d_weights == NULL)
        return MOEI_REFUSE(pass->call.error, "%s is NULL", d_outputs == NULL ? "d_outputs" : "d_weights");
    back.dy = NULL;
    back.d_outputs = d_outputs;
    back.d_weights = d_weights;
    return moei_layer_backward(layer, &back, dx, d_router_x, pass);
}

/* A trainable layer's parameter as writable memory. */
static moe_real *moei_layer_memory(const moe_layer *layer, int place) {
    moe_real *memory;
    memcpy(&memory, &layer->tensors[place], sizeof memory);
    return memory;
}

/* The router's state; only a layer that is trained changes it. */
static moe_status moei_layer_state(const moe_layer *layer, moe_real **state) {
    moe_parameter slot;
    int place;
    for (place = 0; place < MOE_ROUTER_PARAMETER_COUNT; place++) {
        state[place] = NULL;
        if (moe_layer_parameter(&layer->config, place, &slot) != MOE_OK ||
            (slot.flags & (unsigned)MOE_PARAM_STATE) == 0)
            continue;
        if (layer->gradients[place] == NULL) return MOE_ERR_STATE;
        state[place] = moei_layer_memory(layer, place);
    }
    return MOE_OK;
}

moe_status moe_layer_observe(moe_layer *layer, const moe_layer_pass *pass) {
    moe_real *state[MOE_ROUTER_PARAMETER_COUNT];
    moe_router router;
    moe_status status;
    if (layer == NULL || pass == NULL) return MOE_ERR_ARGUMENT;
    if (pass->d_rows == NULL || !pass->call.training) return MOE_ERR_STATE;
    status = moei_layer_state(layer, state);
    if (status != MOE_OK) return status;
    if (pass->ranks != NULL) return moei_group(layer->config.transport)->hooks->observe(layer, pass, state);
    moei_layer_router(layer, &router);
    return moe_router_observe(&router, &pass->call, &pass->routing, state);
}

moe_status moe_layer_advance(moe_layer *layer) {
    moe_real *state[MOE_ROUTER_PARAMETER_COUNT];
    moe_status status;
    if (layer == NULL) return MOE_ERR_ARGUMENT;
    status = moei_layer_state(layer, state);
    return status == MOE_OK ? moe_router_advance(&layer->router, state) : status;
}

#endif

/* ==== the report on packed weights ============================================================ */

enum { MOEI_PROBES = 64 }; /* the most tokens for an expert that receives none */

/* The width of a row that holds an output of the layer, and later of an expert. */
static size_t moei_report_width(const moe_layer_config *c) {
    return (size_t)(c->d_out > c->d_latent ? c->d_out : c->d_latent);
}

/* Bytes of the workspace in which moe_layer_quantize reports on n tokens. */
static moe_status moei_report_size(const moe_layer *layer, int type, size_t n, size_t *bytes) {
    moei_layout l = moei_layout_begin(NULL);
    moe_layer as_packed;
    moe_layer_pass p;
    moei_expert_run run;
    if (!MOEI_FITS_INT32(n)) return MOE_ERR_OVERFLOW;
    as_packed = *layer;
    as_packed.is_packed = 1;
    as_packed.packed_type = type;
    run = moei_expert_run_begin(&as_packed, layer->config.expert, 0);
    moei_layer_layout(&as_packed, &run, n, 0, 0, &l, &p);
    (void)moei_take_reals(&l, n, moei_report_width(&layer->config));
    if (l.overflow) return MOE_ERR_OVERFLOW;
    *bytes = l.used;
    return MOE_OK;
}

moe_status moe_layer_pack_size(const moe_layer *layer, int type, size_t n_tokens, size_t *bytes, size_t *work) {
    const void *packed[MOE_LAYER_PARAMETER_COUNT];
    size_t report = 0;
    moei_packing p;
    moe_status status;
    if (layer == NULL || (bytes == NULL && work == NULL)) return MOE_ERR_ARGUMENT;
    p = moei_packing_begin(NULL, type, 0, NULL, NULL);
    status = moei_pack_layer(&p, layer, packed);
    if (status == MOE_OK && work != NULL) status = moei_report_size(layer, type, n_tokens, &report);
    if (status != MOE_OK) return status;
    if (bytes != NULL) *bytes = p.used;
    if (work != NULL) *work = report;
    return MOE_OK;
}

/* All stages of a run in this thread. */
static void moei_run_stages(const moei_task *task, const moei_expert_run *run) {
    int stage;
    for (stage = 0; stage < run->kind->n_stages; stage++) {
        if (run->packed && task->quantizes) moei_quantize_rows(task, run, stage, 0);
        moei_stage_columns(run, stage, task->mask, 0, run->stage_width[stage]);
    }
}

/* Gathers the rows on which expert e is measured: its tokens, or the batch's first real ones. */
static void moei_measured_rows(const moei_task *task, size_t e, int visited, moei_expert_run *run) {
    const moe_layer_pass *p = task->p;
    const moe_assignment *entries = p->routing.plan.assignments + p->routing.plan.offsets[e];
    size_t d = run->width[MOEI_X], i, t;
    for (i = t = 0; i < run->n; i++, t++) {
        while (!visited && t < p->call.n_tokens && !moei_is_real(&p->call, t)) t++;
        if (t == p->call.n_tokens) break;
        memcpy(p->rows + i * run->ld[MOEI_X], p->inputs + (visited ? (size_t)entries[i].token : t) * d,
               d * sizeof(moe_real));
    }
    run->n = i;
}

/* Runs expert e with the tensors, into exact [n,o], and with the packed weights. */
static void moei_measure_expert(const moei_task *task, size_t e, moe_real *exact, moe_quant_error *out) {
    const moe_layer_pass *p = task->p;
    moei_expert_run run = task->run;
    size_t n = p->call.n_tokens, room = moei_expert_rows(&task->layer->config, n);
    size_t o = run.width[MOE_NODE_OUTPUT], ld = run.ld[MOE_NODE_OUTPUT], i;
    double sums[2] = {0.0, 0.0};
    int soft = p->routing.plan.rows > 0, visited, a;
    out->rows = soft ? n : moei_entry_count(p, e);
    visited = !soft && out->rows > 0;
    run.n = visited ? out->rows : moei_smaller(n, MOEI_PROBES);
    if (run.n > room) run.n = room;
    run.expert = e;
    run.activation[MOEI_X] = p->rows;
    run.ld[MOEI_X] = moei_stride(task->layer, run.width[MOEI_X]);
    if (task->quantizes) moei_quantized_rows(task, 0, &run);
    for (a = 0; a < MOE_NODE_COUNT; a++) run.activation[a] = p->node[a];
    moei_measured_rows(task, e, visited, &run);
    run.packed = 0;
    moei_run_stages(task, &run);
    for (i = 0; i < run.n; i++) memcpy(exact + i * o, run.activation[MOE_NODE_OUTPUT] + i * ld, o * sizeof(moe_real));
    run.packed = 1;
    moei_run_stages(task, &run);
    for (i = 0; i < run.n; i++) moei_add_error(o, exact + i * o, run.activation[MOE_NODE_OUTPUT] + i * ld, sums);
    out->output = moei_error_of(sums);
}

/* The report: packed is the layer with its packed weights. */
static moe_status moei_measure(const moe_layer *packed, const moe_call *calibration, void *work, size_t work_size,
                               moe_quant_error *errors) {
    moe_layer plain = *packed;
    moe_call call = *calibration;
    moe_layer_pass routed, p;
    moei_layout l = moei_layout_begin(work);
    moei_expert_run run;
    moei_task task;
    moe_real *y;
    size_t e;
    moe_status status;
    call.training = call.keep = 0;
    run = moei_expert_run_begin(packed, packed->config.expert, 0);
    moei_layer_layout(packed, &run, call.n_tokens, call.n_past, 0, &l, &p);
    y = moei_take_reals(&l, call.n_tokens, moei_report_width(&packed->config));
    if (l.overflow) return MOE_ERR_OVERFLOW;
    if (l.used > work_size) return MOE_ERR_SPACE;
    plain.is_packed = 0;
    status = moe_layer_forward(&plain, &call, y, work, work_size, &routed);
    if (status != MOE_OK) return status;
    p.call = routed.call;
    p.x = routed.x;
    p.inputs = routed.inputs;
    p.routing = routed.routing; /* the routing lies first in both layouts */
    moei_task_begin(&task, packed, &p, MOEI_RUN_CHOSEN, &run);
    task.mask = run.needed;
    for (e = 0; e < task.experts; e++) moei_measure_expert(&task, e, y, errors + e);
    for (; e < p.routing.n_experts; e++) {
        errors[e].rows = moei_entry_count(&p, e);
        errors[e].output = 0; /* no matrices */
    }
    return MOE_OK;
}

static moe_status moei_report_check(const moe_call *calibration, const void *work, moe_error *error) {
    if (calibration != NULL && work != NULL && calibration->n_tokens > 0) return MOE_OK;
    return MOEI_REFUSE(error, "a report needs calibration with at least one token, and work");
}

/* Checks a report's workspace; status is that of counting the bytes. */
static moe_status moei_report_room(moe_status status, int type, size_t bytes, size_t work_size, moe_error *error) {
    if (status != MOE_OK)
        return moei_error(error, status, "type = %d for this batch: %s", type, moe_status_text(status));
    if (work_size >= bytes) return MOE_OK;
    return moei_error(error, MOE_ERR_SPACE, "work_size = %z: the report needs %z bytes", work_size, bytes);
}

moe_status moe_layer_quantize(moe_layer *layer, int type, void *memory, size_t size, const moe_call *calibration,
                              void *work, size_t work_size, moe_quant_error *errors, moe_error *error) {
    moe_layer made;
    moe_status status = MOE_OK;
    size_t bytes = 0;
    if (layer == NULL) return MOEI_REFUSE(error, "layer must not be NULL");
    if (errors != NULL && layer->config.transport != NULL)
        return moei_error(error, MOE_ERR_UNSUPPORTED,
                          "a report needs all experts, and the layer holds those of one rank: errors must be NULL");
    if (errors != NULL) status = moei_report_check(calibration, work, error);
    if (errors != NULL && status == MOE_OK) {
        status = !moei_fit_int32(calibration->n_past, calibration->n_tokens)
                     ? MOE_ERR_OVERFLOW
                     : moe_layer_pack_size(layer, type, calibration->n_past + calibration->n_tokens, NULL, &bytes);
        status = moei_report_room(status, type, bytes, work_size, error);
    }
    if (status != MOE_OK) return status;
    made = *layer;
    status = moe_layer_pack(&made, type, memory, size, error);
    if (status != MOE_OK) layer->is_packed = layer->is_packed && made.is_packed;
    if (status == MOE_OK && errors != NULL) {
        status = moei_measure(&made, calibration, work, work_size, errors);
        if (status != MOE_OK) moei_layer_unpack(layer, memory, size);
        if (status != MOE_OK) return moei_error(error, status, "the calibration batch: %s", moe_status_text(status));
    }
    if (status == MOE_OK) *layer = made;
    return status;
}

#ifdef __cplusplus
}
#endif

/* ==== >>code_network ========================================================================== */

/* ---- lists: of stb_ds, or resized to the exact length in builds without training ---- */

#ifndef MOE_NO_TRAIN
#define MOEI_ARRAY_ADD(list, count, item) ((list)[moei_array_header(list)->length++] = (item), (count)++)
#else
#define MOEI_ARRAY_ADD(list, count, item) ((list)[(count)++] = (item))
#endif

/* Makes room for wanted > count elements in the array at *list; 0 if out of memory. */
static int moei_net_grow(const moe_allocator *a, void *list, size_t element_size, size_t count, size_t wanted) {
#ifndef MOE_NO_TRAIN
    (void)count;
    return moei_array_reserve(a, list, element_size, wanted);
#else
    size_t bytes;
    void *elements;
    memcpy(&elements, list, sizeof elements);
    if (!moei_mul(wanted, element_size, &bytes)) return 0;
    elements = moei_resize(a, elements, count * element_size, bytes);
    if (elements != NULL) memcpy(list, &elements, sizeof elements);
    return elements != NULL;
#endif
}

static void moei_net_drop(const moe_allocator *a, void *list, size_t element_size, size_t count) {
#ifndef MOE_NO_TRAIN
    (void)count;
    moei_array_free(a, list, element_size);
#else
    void *elements;
    memcpy(&elements, list, sizeof elements);
    moei_free(a, elements, count * element_size);
    elements = NULL;
    memcpy(list, &elements, sizeof elements);
#endif
}

static moei_tokens moei_tokens_alone(size_t n) {
    moei_tokens s;
    s.first = 0;
    s.total = s.most = n;
    return s;
}

/* ---- kinds of modules as data ---- */

#define MOEI_M moe_module
#define MOEI_A moe_attention_config
enum { MOEI_MAX_TAPS = 64 };

static const char *const moei_qk_norm_names[] = {MOE_QK_NORMS(MOEI_NAME2) NULL};
static const char *const moei_rotary_names[] = {MOE_ROTARY_SCALINGS(MOEI_NAME2) NULL};

static const moe_field moei_net_fields[] = {
    MOEI_INT(MOEI_M, d_in, 0, MOE_MAX_WIDTH, "width of the input; 0: token ids"), MOEI_FIELDS_END};
static const moe_field moei_linear_fields[] = {
    MOEI_INT(MOEI_M, d_out, 1, MOE_MAX_WIDTH, "width of the output"),
    MOEI_FLAG(MOEI_M, no_bias, "has no bias"), MOEI_FIELDS_END};
static const moe_field moei_layer_norm_fields[] = {
    MOEI_REAL(MOEI_M, eps, 1e-12, 1, "added to the variance"),
    MOEI_FLAG(MOEI_M, no_bias, "has no bias"), MOEI_FIELDS_END};
static const moe_field moei_rms_norm_fields[] = {
    MOEI_REAL(MOEI_M, eps, 1e-12, 1, "added to the mean square"),
    MOEI_FLAG(MOEI_M, bias, "with a bias"), MOEI_FIELDS_END};
static const moe_field moei_tied_fields[] = {MOEI_FLAG(MOEI_M, no_bias, "has no bias"), MOEI_FIELDS_END};
static const moe_field moei_scale_fields[] = {
    MOEI_REAL(MOEI_M, scale, -1e9, 1e9, "factor"),
    MOEI_REAL(MOEI_M, cap, 1e-6, 1e9, "soft cap of the output"),
    MOEI_FIELDS_END};
static const moe_field moei_convolution_fields[] = {
    MOEI_INT(MOEI_M, length, 1, MOEI_MAX_TAPS, "kernel size in tokens"), MOEI_FIELDS_END};
static const moe_field moei_activation_fields[] = {
    MOEI_CHOICE(MOEI_M, act, MOE_ACT_COUNT, moei_act_names, "activation"), MOEI_FIELDS_END};
static const moe_field moei_residual_fields[] = {
    MOEI_INT(MOEI_M, span, 1, MOE_NET_MAX_MODULES, "number of modules it spans"), MOEI_FIELDS_END};
/* In files, the rows of an embedding and of positions have names of their own. */
#define MOEI_INT_AS(name, member, about) \
    { name, MOE_FIELD_INT, offsetof(moe_module, member), 1, MOE_MAX_WIDTH, 0, NULL, about }
static const moe_field moei_embedding_fields[] = {
    MOEI_INT_AS("vocabulary", n_rows, "number of token ids"),
    MOEI_INT_AS("d", d_out, "width of the output"), MOEI_FIELDS_END};
static const moe_field moei_positions_fields[] = {
    MOEI_INT_AS("most", n_rows, "maximum tokens per sequence"),
    MOEI_FIELDS_END};
static const moe_field moei_attention_fields[] = {
    MOEI_INT(MOEI_A, heads, 1, 4096, "heads"),
    MOEI_INT(MOEI_A, d_head, 1, MOE_MAX_WIDTH, "width of a head"),
    MOEI_FLAG(MOEI_A, full, "no causal mask"),
    MOEI_FLAG(MOEI_A, rotary, "queries and keys are rotated by their positions"),
    MOEI_REAL(MOEI_A, rotary_base, 1, 1e9, "base of the rotation angles"),
    MOEI_INT(MOEI_A, kv_heads, 1, 4096, "heads of keys and values"),
    MOEI_INT(MOEI_A, d_value, 1, MOE_MAX_WIDTH, "width of a head of values"),
    MOEI_FLAG(MOEI_A, bias, "query, key and value have biases"),
    MOEI_FLAG(MOEI_A, output_bias, "the output has a bias"),
    MOEI_CHOICE(MOEI_A, qk_norm, MOE_QK_NORM_COUNT, moei_qk_norm_names, "how queries and keys are normalized"),
    MOEI_FLAG(MOEI_A, norm_after, "qk_norm comes after the rotation"),
    MOEI_REAL(MOEI_A, eps, 1e-12, 1, "added to the mean squares of norms"),
    MOEI_REAL(MOEI_A, scale, 1e-6, 1e6, "factor of scores"),
    MOEI_REAL(MOEI_A, cap, 1e-6, 1e9, "soft cap of scores"),
    MOEI_REAL(MOEI_A, clamp, 1e-6, 1e9, "queries, keys and values are clamped to this magnitude"),
    MOEI_FLAG(MOEI_A, sinks, "attention sinks, a learned score per head"),
    MOEI_INT(MOEI_A, window, 1, MOE_MAX_WIDTH, "size of the sliding window in tokens"),
    MOEI_INT(MOEI_A, chunk, 1, MOE_MAX_WIDTH, "size of the chunks within which tokens attend"),
    MOEI_INT(MOEI_A, query_floor, 1, MOE_MAX_WIDTH, "position from which queries are scaled up"),
    MOEI_REAL(MOEI_A, query_growth, 1e-6, 1e6, "strength of that scaling"),
    MOEI_INT(MOEI_A, rotary_dims, 2, MOE_MAX_WIDTH, "dimensions of a head that are rotated"),
    MOEI_FLAG(MOEI_A, rotary_neighbours, "adjacent dimensions form pairs"),
    MOEI_CHOICE(MOEI_A, rotary_scaling, MOE_ROTARY_COUNT, moei_rotary_names, "extension to longer contexts"),
    MOEI_REAL(MOEI_A, rotary_factor, 1e-6, 1e6, "factor by which the context grows"),
    MOEI_INT(MOEI_A, rotary_length, 1, MOE_MAX_WIDTH, "context length of pretraining"),
    MOEI_REAL(MOEI_A, beta_fast, 1e-6, 1e6, "yarn: rotations from which pairs stay"),
    MOEI_REAL(MOEI_A, beta_slow, 1e-6, 1e6, "yarn: rotations up to which pairs are scaled"),
    MOEI_FLAG(MOEI_A, no_truncation, "yarn: the range is not rounded"),
    MOEI_REAL(MOEI_A, low_factor, 1e-6, 1e6, "llama3: rotations up to which pairs are scaled"),
    MOEI_REAL(MOEI_A, high_factor, 1e-6, 1e6, "llama3: rotations from which pairs stay"),
    MOEI_REAL(MOEI_A, rotary_magnitude, 1e-6, 1e6, "factor applied to cosines and sines"),
    MOEI_INT(MOEI_A, kv_lora, 1, MOE_MAX_WIDTH, "width of the latent vector of keys and values"),
    MOEI_INT(MOEI_A, q_lora, 1, MOE_MAX_WIDTH, "width of the latent vector of queries"),
    MOEI_FIELDS_END};
static const moe_field moei_dropout_fields[] = {
    MOEI_REAL(MOEI_M, rate, 0, 1, "probability of dropping a value"),
    MOEI_FIELDS_END};
static const moe_field moei_feed_forward_fields[] = {MOEI_EXPERT_ROWS MOEI_FIELDS_END};

/* The kinds, in the order of their numbers: value, name, whose code runs, whose fields. */
#define MOEI_MODULE_KINDS(ROW) \
    ROW(LINEAR, linear, linear, linear) \
    ROW(ACTIVATION, activation, activation, activation) \
    ROW(LAYER_NORM, layer_norm, layer_norm, layer_norm) \
    ROW(MIXTURE, mixture, mixture, layer) \
    ROW(RESIDUAL, residual, residual, residual) \
    ROW(EMBEDDING, embedding, embedding, embedding) \
    ROW(POSITIONS, positions, positions, positions) \
    ROW(ATTENTION, attention, attention, attention) \
    ROW(RMS_NORM, rms_norm, rms_norm, rms_norm) \
    ROW(DROPOUT, dropout, dropout, dropout) \
    ROW(FEED_FORWARD, feed_forward, feed_forward, feed_forward) \
    ROW(TIED, tied, linear, tied) \
    ROW(SCALE, scale, scale, scale) \
    ROW(CONVOLUTION, convolution, convolution, convolution)
#define MOEI_MODULE_NAME(value, name, code, fields) #name,
#define MOEI_MODULE_FIELDS(value, name, code, fields) moei_##fields##_fields,

static const char *const moei_module_names[] = {MOEI_MODULE_KINDS(MOEI_MODULE_NAME) NULL};
static const moe_field *const moei_module_fields[] = {MOEI_MODULE_KINDS(MOEI_MODULE_FIELDS)};

static int moei_routes(const moe_net *net, size_t i) { return net->modules[i].kind == MOE_MODULE_MIXTURE; }

/* Whether a module is a moe_layer. Only a mixture's router is used. */
static int moei_is_layer(const moe_module *m) {
    return m->kind == MOE_MODULE_MIXTURE || m->kind == MOE_MODULE_FEED_FORWARD;
}

/* The struct whose fields moei_module_fields lists. */
MOEI_TOOL void *moei_module_settings(const moe_module *m) {
    if (moei_is_layer(m)) return (void *)&m->layer.config;
    return m->kind == MOE_MODULE_ATTENTION ? (void *)&m->attention : (void *)m;
}

/* ---- building ---- */

moe_status moe_net_init(moe_net *net, int d_in, int kernels, const moe_allocator *allocator) {
    if (net == NULL) return MOE_ERR_ARGUMENT;
    memset(net, 0, sizeof *net);
    if (moei_allocator_check(allocator, &net->error) != MOE_OK) return MOE_ERR_ARGUMENT;
    if (allocator != NULL) net->allocator = *allocator;
    if (d_in < 0 || d_in > MOE_MAX_WIDTH)
        return moei_error(&net->error, MOE_ERR_CONFIG, "d_in = %d: must be 1 to %d, or 0 for token ids", d_in,
                          (int)MOE_MAX_WIDTH);
    if (moe_kernels_name(kernels) == NULL)
        return moei_error(&net->error, MOE_ERR_CONFIG, "kernels = %d: no such kernels", kernels);
    if (moei_kernels_of(kernels, &net->kernels, &net->error) != MOE_OK) return net->error.code;
    net->kernels_wanted = kernels;
    net->d_in = net->d_out = d_in;
    return MOE_OK;
}

/* Remembers why a module cannot be added; returns code. */
static moe_status moei_module_refuse(moe_net *net, int kind, moe_status code, const char *format, ...) {
    char why[sizeof net->error.message];
    moei_text t = moei_text_begin(why, sizeof why);
    va_list arguments;
    va_start(arguments, format);
    moei_put_format(&t, format, arguments);
    va_end(arguments);
    return moei_error(&net->error, code, "module %z (%s): %s", net->n_modules, moei_module_names[kind], why);
}

/* An empty module of the right input width. Fails after a failed call, and in a full network. */
static moe_status moei_module_begin(moe_net *net, int kind, moe_module *m) {
    if (net == NULL) return MOE_ERR_ARGUMENT;
    if (net->error.code != MOE_OK) return net->error.code;
    if (net->built || net->kernels == NULL) return MOE_ERR_STATE;
    if (kind < 0 || kind >= MOE_MODULE_COUNT)
        return moei_error(&net->error, MOE_ERR_ARGUMENT, "module %z: NULL or kind = %d", net->n_modules, kind);
    if (net->n_modules >= MOE_NET_MAX_MODULES)
        return moei_module_refuse(net, kind, MOE_ERR_CONFIG, "at most %d modules are possible",
                                  (int)MOE_NET_MAX_MODULES);
    if ((net->d_out == 0) != (kind == MOE_MODULE_EMBEDDING))
        return moei_module_refuse(net, kind, MOE_ERR_CONFIG,
                                  net->d_out == 0
                                      ? "d_in = %d, so the first module must be an embedding"
                                      : "d_in = %d: only the first module of a network with d_in = 0 can be one",
                                  net->d_in);
    memset(m, 0, sizeof *m);
    m->kind = kind;
    m->d_in = m->d_out = net->d_out;
    return MOE_OK;
}

static moe_status moei_module_append(moe_net *net, const moe_module *m) {
    if (!moei_net_grow(&net->allocator, &net->modules, sizeof *net->modules, net->n_modules, net->n_modules + 1))
        return moei_module_refuse(net, m->kind, MOE_ERR_MEMORY, "no memory for one more module");
    MOEI_ARRAY_ADD(net->modules, net->n_modules, *m);
    net->d_out = m->d_out;
    return MOE_OK;
}

/* A field that, if set, needs another one to be set or (apart) to be 0. */
typedef struct moei_field_rule {
    const char *field, *other;
    int apart;
} moei_field_rule;

static const moei_field_rule moei_attention_rules[] = {
    {"rotary_base", "rotary", 0},
    {"rotary_dims", "rotary", 0},
    {"rotary_neighbours", "rotary", 0},
    {"rotary_scaling", "rotary", 0},
    {"rotary_magnitude", "rotary", 0},
    {"rotary_factor", "rotary_scaling", 0},
    {"rotary_length", "rotary_scaling", 0},
    {"beta_fast", "rotary_scaling", 0},
    {"beta_slow", "rotary_scaling", 0},
    {"no_truncation", "rotary_scaling", 0},
    {"low_factor", "rotary_scaling", 0},
    {"high_factor", "rotary_scaling", 0},
    {"norm_after", "qk_norm", 0},
    {"query_growth", "query_floor", 0},
    {"q_lora", "kv_lora", 0},
    {"kv_lora", "rotary", 0},
    {"kv_lora", "rotary_dims", 0},
    {"kv_lora", "kv_heads", 1},
    {"kv_lora", "bias", 1},
    {"kv_lora", "qk_norm", 1},
    {"kv_lora", "clamp", 1},
    {"window", "full", 1},
    {"chunk", "full", 1},
    {"query_floor", "full", 1},
    {NULL, NULL, 0}};

static moe_status moei_attention_rules_check(const moe_attention_config *c, moe_error *error) {
    const moei_field_rule *rule;
    for (rule = moei_attention_rules; rule->field != NULL; rule++) {
        const moe_field *field = moe_field_find(moei_attention_fields, rule->field);
        const moe_field *other = moe_field_find(moei_attention_fields, rule->other);
        char value[40], of_other[40];
        if (moei_field_is_zero(field, c) || moei_field_is_zero(other, c) == rule->apart) continue;
        moe_field_text(field, c, value, sizeof value);
        moe_field_text(other, c, of_other, sizeof of_other);
        return moei_error(error, MOE_ERR_CONFIG, "%s = %s is incompatible with %s = %s", field->name, value,
                          other->name, of_other);
    }
    return MOE_OK;
}

static moe_status moei_head_refuse(const char *name, int width, int heads, moe_error *error) {
    return moei_error(error, MOE_ERR_CONFIG, "%s = %d: with heads = %d the width exceeds %d", name, width, heads,
                      (int)MOE_MAX_WIDTH);
}

/* Checks a configuration and fills in the defaults for width d. */
static moe_status moei_attention_check(moe_attention_config *c, int d, moe_error *error) {
    int most;
    moe_status status = moei_fields_check(moei_attention_fields, c, error);
    if (status == MOE_OK) status = moei_attention_rules_check(c, error);
    if (status != MOE_OK) return status;
    if (c->heads == 0)
        for (c->heads = d < 64 ? 1 : d / 32 < 4096 ? d / 32 : 4096; d % c->heads != 0;) c->heads--;
    if (c->d_head == 0 && d % c->heads != 0)
        return moei_error(error, MOE_ERR_CONFIG,
                          "heads = %d: must divide the input width %d unless d_head is set", c->heads, d);
    moei_default(&c->d_head, d / c->heads);
    most = MOE_MAX_WIDTH / c->heads;
    if (c->d_head > most) return moei_head_refuse("d_head", c->d_head, c->heads, error);
    if (c->d_value > most) return moei_head_refuse("d_value", c->d_value, c->heads, error);
    if (c->kv_heads != 0 && c->heads % c->kv_heads != 0)
        return moei_error(error, MOE_ERR_CONFIG, "kv_heads = %d: must divide heads = %d", c->kv_heads, c->heads);
    if (c->rotary && c->rotary_dims == 0 && c->d_head % 2 != 0)
        return moei_error(error, MOE_ERR_CONFIG, "d_head = %d: must be even for rotary = 1", c->d_head);
    if (c->rotary_dims % 2 != 0 || c->rotary_dims > c->d_head || (c->kv_lora != 0 && c->rotary_dims == c->d_head))
        return moei_error(error, MOE_ERR_CONFIG, "rotary_dims = %d: must be even and at most d_head = %d%s",
                          c->rotary_dims, c->d_head, c->kv_lora != 0 ? ", and with kv_lora less" : "");
    if (c->kv_lora != 0 && c->kv_lora > most - c->d_head)
        return moei_head_refuse("kv_lora", c->kv_lora, c->heads, error);
    if ((c->rotary_scaling == MOE_ROTARY_YARN || c->rotary_scaling == MOE_ROTARY_LLAMA3) && c->rotary_length == 0)
        return moei_error(error, MOE_ERR_CONFIG, "rotary_length = 0: rotary_scaling = %s needs it",
                          moei_rotary_names[c->rotary_scaling]);
    if (c->rotary) moei_default_real(&c->rotary_base, MOEI_R(10000.0));
    return MOE_OK;
}

static size_t moei_field_size(const moe_field *field) {
    return field->kind == MOE_FIELD_REAL ? sizeof(moe_real) : sizeof(int);
}

/* The layer of a feed_forward for width d: its one expert takes every token; its score has no
   parameters. Every rank has all of it. */
static moe_status moei_feed_forward_config(const moe_layer_config *wanted, int d, moe_layer_config *c,
                                           moe_error *error) {
    const moe_field *field;
    moe_layer_config full; /* what a feed_forward of a network has */
    char value[40];
    int copied;
    memset(c, 0, sizeof *c);
    for (field = moei_feed_forward_fields; wanted != NULL && field->name != NULL; field++)
        memcpy((char *)c + field->offset, (const char *)wanted + field->offset, moei_field_size(field));
    c->router.d_model = d;
    c->router.n_experts = c->router.top_k = 1;
    c->router.score = MOE_SCORE_GRAP;
    c->router.weight = MOE_WEIGHT_ONE;
    copied = wanted != NULL && wanted->router.n_experts == 1 && moe_layer_check(c, &full, NULL) == MOE_OK;
    if (copied) full.kernels = wanted->kernels;
    for (field = moe_layer_fields(); wanted != NULL && field->name != NULL; field++)
        if (moe_field_find(moei_feed_forward_fields, field->name) == NULL && !moei_field_is_zero(field, wanted) &&
            !(copied && moei_memcmp((const char *)wanted + field->offset, (const char *)&full + field->offset,
                                    moei_field_size(field)) == 0)) {
            moe_field_text(field, wanted, value, sizeof value);
            return moei_error(error, MOE_ERR_CONFIG, "%s = %s: must be 0, a feed_forward has %s", field->name, value,
                              "expert, d_ff, d_low, act, no_expert_bias, expert_bias and swiglu_...");
        }
    return MOE_OK;
}

/* The last module of a kind before module i, or i. */
static size_t moei_previous(const moe_net *net, size_t i, int kind) {
    size_t j;
    for (j = i; j-- > 0;)
        if (net->modules[j].kind == kind) return j;
    return i;
}

static size_t moei_previous_mixture(const moe_net *net, size_t i) { return moei_previous(net, i, MOE_MODULE_MIXTURE); }

static size_t moei_previous_attention(const moe_net *net, size_t i) {
    return moei_previous(net, i, MOE_MODULE_ATTENTION);
}

/* Checks that a router that reads the previous MoE layer finds what it needs there; the new
   module's number is n_modules. */
static moe_status moei_previous_check(const moe_net *net, const moe_router_config *c, moe_error *error) {
    size_t at = moei_previous_mixture(net, net->n_modules);
    const moe_router_config *previous;
    if (!(moe_router_traits(c) & MOE_TRAIT_NEEDS_PREVIOUS_LAYER)) return MOE_OK;
    if (at == net->n_modules)
        return moei_error(
            error, MOE_ERR_CONFIG,
            "input = adaptive_clustering has the trait %s: this is the first MoE layer, there is none before it",
            moe_trait_name(MOE_TRAIT_NEEDS_PREVIOUS_LAYER));
    previous = &net->modules[at].layer.config.router;
    if (previous->n_experts > c->n_experts)
        return moei_error(error, MOE_ERR_CONFIG,
                          "n_experts = %d: input = adaptive_clustering needs at least those of module %z before it, %d",
                          c->n_experts, at, previous->n_experts);
    if (previous->d_model != c->d_model && (c->ac_mode == MOE_AC_PAPER || c->ac_mode == MOE_AC_RUNNING))
        return moei_error(error, MOE_ERR_CONFIG,
                          "d_model = %d: ac_mode = %s needs the width of module %z before it, %d", c->d_model,
                          moei_ac_names[c->ac_mode], at, previous->d_model);
    return MOE_OK;
}

/* Checks that the previous MoE layer, if any, has as many logits as router_residual reads. */
static moe_status moei_residual_check(const moe_net *net, const moe_router_config *c, moe_error *error) {
    size_t at = moei_previous_mixture(net, net->n_modules);
    const moe_router_config *previous;
    if (!c->router_residual || at == net->n_modules) return MOE_OK;
    previous = &net->modules[at].layer.config.router;
    if (moei_is_soft(previous))
        return moei_error(error, MOE_ERR_CONFIG,
                          "router_residual = 1 is incompatible with module %z before it: select = soft has no logits",
                          at);
    if (previous->n_experts == c->n_experts) return MOE_OK;
    return moei_error(error, MOE_ERR_CONFIG,
                      "n_experts = %d: router_residual = 1 needs as many as module %z before it, %d", c->n_experts, at,
                      previous->n_experts);
}

/* Adapts a router that refines to the attention before the new module, if there is one. */
static moe_status moei_refine_fit(const moe_net *net, moe_router_config *c, moe_error *error) {
    size_t at = moei_previous_attention(net, net->n_modules);
    const moe_module *attention;
    if (at == net->n_modules || c->refine == MOE_REFINE_NONE) return MOE_OK;
    attention = &net->modules[at];
    if (!attention->attention.full) c->causal = 1;
    if (c->refine != MOE_REFINE_ATTENTION) return MOE_OK;
    if (attention->attention.kv_lora > 0)
        return moei_error(error, MOE_ERR_CONFIG,
                          "refine = attention is incompatible with kv_lora = %d of the attention before it, module %z",
                          attention->attention.kv_lora, at);
    if (c->heads == 0) c->heads = attention->attention.heads;
    if (c->heads != attention->attention.heads)
        return moei_error(error, MOE_ERR_CONFIG,
                          "heads = %d: the attention that refine = attention reads, module %z, has heads = %d",
                          c->heads, at, attention->attention.heads);
    if (c->d_model != attention->d_out)
        return moei_error(error, MOE_ERR_CONFIG,
                          "d_model = %d: the attention that refine = attention reads, module %z, is %d wide",
                          c->d_model, at, attention->d_out);
    return MOE_OK;
}

/* Completes the layer of a mixture or feed_forward whose configuration is *c. */
static moe_status moei_module_layer(moe_net *net, moe_module *m, moe_layer_config *c, moe_error *error) {
    moe_status status = MOE_OK;
    if (m->kind == MOE_MODULE_FEED_FORWARD) {
        moe_layer_config wanted = *c;
        status = moei_feed_forward_config(&wanted, m->d_in, c, error);
        c->kernels = moei_table(net->kernels)->id;
        return status == MOE_OK ? moe_layer_init(&m->layer, c, error) : status;
    }
    if (c->router.d_model == 0) c->router.d_model = m->d_in;
    if (c->router.d_model != m->d_in)
        return moei_error(error, MOE_ERR_CONFIG, "d_model = %d, but its input is %d wide", c->router.d_model, m->d_in);
    if (c->kernels == MOE_KERNELS_AUTO) c->kernels = moei_table(net->kernels)->id;
    if (c->transport == NULL) c->transport = net->transport;
    if (c->transport != net->transport)
        return moei_error(
            error, MOE_ERR_CONFIG,
            "transport is not the network's: set net.transport before adding modules and leave config.transport NULL");
    status = moei_refine_fit(net, &c->router, error);
    if (status == MOE_OK) status = moe_layer_init(&m->layer, c, error);
    if (status == MOE_OK) status = moei_previous_check(net, &m->layer.config.router, error);
    if (status == MOE_OK) status = moei_residual_check(net, &m->layer.config.router, error);
    m->d_out = m->layer.config.d_out;
    return status;
}

/* Checks a module against those before it, and fills in the rest. */
static moe_status moei_module_complete(moe_net *net, moe_module *m, moe_error *error) {
    moe_layer_config c = m->layer.config;
    switch (m->kind) {
    case MOE_MODULE_MIXTURE:
    case MOE_MODULE_FEED_FORWARD: return moei_module_layer(net, m, &c, error);
    case MOE_MODULE_ATTENTION: return moei_attention_check(&m->attention, m->d_in, error);
    case MOE_MODULE_RESIDUAL:
        if ((size_t)m->span > net->n_modules)
            return moei_error(error, MOE_ERR_CONFIG, "span = %d: only %z modules precede it", m->span, net->n_modules);
        if (net->modules[net->n_modules - (size_t)m->span].d_in == m->d_in) return MOE_OK;
        return moei_error(error, MOE_ERR_CONFIG, "span = %d: width %d cannot be added to width %d", m->span,
                          net->modules[net->n_modules - (size_t)m->span].d_in, m->d_in);
    case MOE_MODULE_DROPOUT:
        if (m->rate < MOEI_R(1.0)) return MOE_OK;
        return moei_error(error, MOE_ERR_CONFIG, "rate = %g: must be at least 0 and below 1", (double)m->rate);
    case MOE_MODULE_TIED:
        if (net->d_in != 0)
            return moei_error(error, MOE_ERR_CONFIG, "there is no embedding: d_in of the network is %d", net->d_in);
        m->d_out = net->modules[0].n_rows;
        if (net->modules[0].d_out == m->d_in) return MOE_OK;
        return moei_error(error, MOE_ERR_CONFIG, "the embedding is %d wide, but the input %d",
                          net->modules[0].d_out, m->d_in);
    default: return MOE_OK;
    }
}

/* Takes the settings of *from and checks their ranges. A module's own integers have no default. */
static moe_status moei_module_take(moe_module *m, const moe_module *from, moe_error *error) {
    const moe_field *fields = moei_module_fields[from->kind], *field;
    if (from->kind == MOE_MODULE_ATTENTION) m->attention = from->attention;
    if (moei_is_layer(from)) m->layer.config = from->layer.config;
    if (from->kind == MOE_MODULE_ATTENTION || moei_is_layer(from)) return MOE_OK; /* checked later */
    for (field = fields; field->name != NULL; field++) {
        memcpy((char *)m + field->offset, (const char *)from + field->offset, moei_field_size(field));
        if (field->kind == MOE_FIELD_INT && moei_field_is_zero(field, m))
            return moei_error(error, MOE_ERR_CONFIG, "%s = 0: must be %d to %d", field->name, (int)field->min,
                              (int)field->max);
    }
    return moei_fields_check(fields, m, error);
}

moe_status moe_net_append(moe_net *net, const moe_module *module) {
    moe_module m;
    moe_error why;
    moe_status status;
    if ((status = moei_module_begin(net, module == NULL ? -1 : module->kind, &m)) != MOE_OK) return status;
    status = moei_module_take(&m, module, &why);
    if (status == MOE_OK) status = moei_module_complete(net, &m, &why);
    return status == MOE_OK ? moei_module_append(net, &m) : moei_module_refuse(net, m.kind, status, "%s", why.message);
}

static moe_module moei_module_of(int kind) {
    moe_module m;
    memset(&m, 0, sizeof m);
    m.kind = kind;
    return m;
}

static moe_status moei_net_add(moe_net *net, int kind, int n_rows, int d_out) {
    moe_module m = moei_module_of(kind);
    m.n_rows = n_rows;
    m.d_out = d_out;
    return moe_net_append(net, &m);
}

moe_status moe_net_linear(moe_net *net, int d_out) {
    return moei_net_add(net, MOE_MODULE_LINEAR, 0, d_out);
}

moe_status moe_net_activation(moe_net *net, int act) {
    moe_module m = moei_module_of(MOE_MODULE_ACTIVATION);
    m.act = act;
    return moe_net_append(net, &m);
}

moe_status moe_net_layer_norm(moe_net *net) {
    return moei_net_add(net, MOE_MODULE_LAYER_NORM, 0, 0);
}

moe_status moe_net_rms_norm(moe_net *net) {
    return moei_net_add(net, MOE_MODULE_RMS_NORM, 0, 0);
}

moe_status moe_net_mixture(moe_net *net, const moe_layer_config *config) {
    moe_module m = moei_module_of(MOE_MODULE_MIXTURE);
    if (config != NULL) m.layer.config = *config;
    else if (moei_module_begin(net, m.kind, &m) == MOE_OK)
        return moei_module_refuse(net, m.kind, MOE_ERR_ARGUMENT, "config must not be NULL");
    return moe_net_append(net, &m);
}

moe_status moe_net_residual(moe_net *net, int span) {
    moe_module m = moei_module_of(MOE_MODULE_RESIDUAL);
    m.span = span;
    return moe_net_append(net, &m);
}

moe_status moe_net_embedding(moe_net *net, int vocabulary, int d) {
    return moei_net_add(net, MOE_MODULE_EMBEDDING, vocabulary, d);
}

moe_status moe_net_positions(moe_net *net, int most) {
    return moei_net_add(net, MOE_MODULE_POSITIONS, most, 0);
}

moe_status moe_net_attention(moe_net *net, const moe_attention_config *config) {
    moe_module m = moei_module_of(MOE_MODULE_ATTENTION);
    if (config != NULL) m.attention = *config;
    return moe_net_append(net, &m);
}

moe_status moe_net_dropout(moe_net *net, moe_real rate) {
    moe_module m = moei_module_of(MOE_MODULE_DROPOUT);
    m.rate = rate;
    return moe_net_append(net, &m);
}

moe_status moe_net_feed_forward(moe_net *net, const moe_layer_config *config) {
    moe_module m = moei_module_of(MOE_MODULE_FEED_FORWARD);
    if (config != NULL) m.layer.config = *config;
    return moe_net_append(net, &m);
}

moe_status moe_net_tied(moe_net *net) {
    return moei_net_add(net, MOE_MODULE_TIED, 0, 0);
}

/* Whether module i is followed by an activation that passes only about half of its input. */
static int moei_feeds_relu(const moe_net *net, size_t i) {
    const moe_module *next = net->modules + i + 1;
    return i + 1 < net->n_modules && next->kind == MOE_MODULE_ACTIVATION &&
           (next->act <= MOE_ACT_GELU || next->act == MOE_ACT_GELU_TANH);
}

/* A matrix of a module or, with columns = 0, a vector initialized to value. */
typedef struct moei_module_tensor {
    const char *name; /* NULL: there is none */
    int rows, columns;
    moe_real value;
} moei_module_tensor;

static moei_module_tensor moei_tensor_of(const char *name, int rows, int columns, moe_real value) {
    moei_module_tensor t;
    t.name = name;
    t.rows = rows;
    t.columns = columns;
    t.value = value;
    return t;
}

static size_t moei_rotary_dims(const moe_attention_config *c) {
    return (size_t)(c->rotary_dims > 0 ? c->rotary_dims : c->d_head);
}

/* u, the width of a head of values */
static size_t moei_head_value(const moe_attention_config *c) {
    return (size_t)(c->d_value > 0 ? c->d_value : c->d_head);
}

/* Parameter `place` of an attention. */
static moei_module_tensor moei_attention_tensor(const moe_module *m, int place) {
    const moe_attention_config *c = &m->attention;
    int latent = c->kv_lora > 0, kv = c->kv_heads > 0 ? c->kv_heads : c->heads;
    int w = c->d_head, rotated = (int)moei_rotary_dims(c);
    int u = (int)moei_head_value(c);
    int whole = c->qk_norm == MOE_QK_NORM_WHOLE, gain = whole || c->qk_norm == MOE_QK_NORM_HEAD;
    const moe_real zero = 0, one = MOEI_R(1.0);
    switch (place) {
    case MOE_MODULE_QUERY: return moei_tensor_of("query", c->heads * w, c->q_lora > 0 ? c->q_lora : m->d_in, zero);
    case MOE_MODULE_KEY:
        return moei_tensor_of("key", latent ? c->heads * (w - rotated + u) : kv * w, latent ? c->kv_lora : m->d_in,
                              zero);
    case MOE_MODULE_VALUE: return moei_tensor_of(latent ? NULL : "value", kv * u, m->d_in, zero);
    case MOE_MODULE_OUTPUT: return moei_tensor_of("output", m->d_out, c->heads * u, zero);
    case MOE_MODULE_QUERY_BIAS: return moei_tensor_of(c->bias ? "query_bias" : NULL, c->heads * w, 0, zero);
    case MOE_MODULE_KEY_BIAS: return moei_tensor_of(c->bias ? "key_bias" : NULL, kv * w, 0, zero);
    case MOE_MODULE_VALUE_BIAS: return moei_tensor_of(c->bias ? "value_bias" : NULL, kv * u, 0, zero);
    case MOE_MODULE_OUTPUT_BIAS: return moei_tensor_of(c->output_bias ? "output_bias" : NULL, m->d_out, 0, zero);
    case MOE_MODULE_QUERY_NORM:
        if (c->q_lora > 0) return moei_tensor_of("query_norm", c->q_lora, 0, one);
        return moei_tensor_of(gain ? "query_norm" : NULL, whole ? c->heads * w : w, 0, one);
    case MOE_MODULE_KEY_NORM: return moei_tensor_of(gain ? "key_norm" : NULL, whole ? kv * w : w, 0, one);
    case MOE_MODULE_SINKS: return moei_tensor_of(c->sinks ? "sinks" : NULL, c->heads, 0, zero);
    case MOE_MODULE_ROTARY_FACTORS:
        return moei_tensor_of(c->rotary_scaling == MOE_ROTARY_FACTORS ? "rotary_factors" : NULL, rotated / 2, 0, one);
    case MOE_MODULE_QUERY_DOWN: return moei_tensor_of(c->q_lora > 0 ? "query_down" : NULL, c->q_lora, m->d_in, zero);
    case MOE_MODULE_LATENT: return moei_tensor_of(latent ? "latent" : NULL, c->kv_lora + rotated, m->d_in, zero);
    case MOE_MODULE_LATENT_NORM: return moei_tensor_of(latent ? "latent_norm" : NULL, c->kv_lora, 0, one);
    default: return moei_tensor_of(NULL, 0, 0, zero);
    }
}

/* Parameter `place` of a module without a moe_layer. */
static moei_module_tensor moei_module_tensor_of(const moe_module *m, int place) {
    int bias = place == MOE_MODULE_BIAS && !m->no_bias;
    if (m->kind == MOE_MODULE_ATTENTION) return moei_attention_tensor(m, place);
    if (m->kind == MOE_MODULE_CONVOLUTION) {
        if (place == MOE_MODULE_IN) return moei_tensor_of("in", 3 * m->d_in, m->d_in, 0);
        if (place == MOE_MODULE_TAPS) return moei_tensor_of("taps", m->d_in, m->length, 0);
        return moei_tensor_of(place == MOE_MODULE_OUT ? "out" : NULL, m->d_in, m->d_in, 0);
    }
    if (bias && (m->kind == MOE_MODULE_LINEAR || m->kind == MOE_MODULE_LAYER_NORM || m->kind == MOE_MODULE_TIED ||
                 (m->kind == MOE_MODULE_RMS_NORM && m->bias)))
        return moei_tensor_of("bias", m->d_out, 0, 0);
    if (place == MOE_MODULE_WEIGHT && (m->kind == MOE_MODULE_LAYER_NORM || m->kind == MOE_MODULE_RMS_NORM))
        return moei_tensor_of("weight", m->d_out, 0, MOEI_R(1.0));
    if (place == MOE_MODULE_WEIGHT && m->kind == MOE_MODULE_LINEAR)
        return moei_tensor_of("weight", m->d_out, m->d_in, 0);
    if (place == MOE_MODULE_WEIGHT && m->n_rows > 0) return moei_tensor_of("weight", m->n_rows, m->d_out, 0);
    return moei_tensor_of(NULL, 0, 0, 0);
}

/* Describes parameter `place` of module i, its name without the module's number; MOE_ERR_NOT_FOUND
   if it has none. */
static moe_status moei_module_parameter(const moe_net *net, size_t i, int place, moe_parameter *out) {
    const moe_module *m = &net->modules[i];
    moei_module_tensor t;
    int fits;
    if (moei_is_layer(m)) return moe_layer_parameter(&m->layer.config, place, out);
    t = moei_module_tensor_of(m, place);
    if (t.name == NULL) return MOE_ERR_NOT_FOUND;
    memset(out, 0, sizeof *out);
    if (t.columns == 0)
        fits = moei_parameter_vector(out, (size_t)t.rows,
                                     m->kind == MOE_MODULE_ATTENTION && place == MOE_MODULE_ROTARY_FACTORS
                                         ? MOE_PARAM_FROZEN
                                         : MOE_PARAM_TRAINED,
                                     t.value);
    else fits = moei_parameter_matrix(out, (size_t)t.rows, (size_t)t.columns, MOE_PARAM_TRAINED);
    if (m->kind == MOE_MODULE_LINEAR && moei_feeds_relu(net, i)) out->init_std *= MOEI_R(1.4142135623730951);
    out->name = t.name;
    return fits ? MOE_OK : MOE_ERR_OVERFLOW;
}

/* Layers with l1_controller = net share the tensor "net.l1", that of the first of them. */
static int moei_shares_l1(const moe_module *m) {
    return m->kind == MOE_MODULE_MIXTURE && m->layer.config.router.l1_controller == MOE_L1_NET;
}

/* The first module that shares the factor of module i, or i. */
static size_t moei_l1_owner(const moe_net *net, size_t i) {
    size_t first = 0;
    if (!moei_shares_l1(&net->modules[i])) return i;
    while (!moei_shares_l1(&net->modules[first])) first++;
    return first;
}

static moe_status moei_net_count(const moe_net *net, size_t *tensors, size_t *numbers, moe_error *error) {
    moe_parameter slot;
    size_t i;
    int place;
    *tensors = *numbers = 0;
    for (i = 0; i < net->n_modules; i++)
        for (place = 0; place < MOE_LAYER_PARAMETER_COUNT; place++) {
            moe_status status = moei_module_parameter(net, i, place, &slot);
            if (status == MOE_ERR_NOT_FOUND) continue;
            if (status != MOE_OK || !moei_add(*numbers, slot.count, numbers))
                return moei_error(error, MOE_ERR_OVERFLOW,
                                  "module %z (%s): the tensors do not fit this machine's memory", i,
                                  moei_module_names[net->modules[i].kind]);
            *tensors += place != MOE_ROUTER_L1 || moei_l1_owner(net, i) == i;
        }
    return MOE_OK;
}

static void moei_tensor_describe(size_t module, const moe_parameter *slot, moe_tensor *out) {
    moei_text t = moei_text_begin(out->name, sizeof out->name);
    moei_tensor_shape(slot, out);
    moei_put_integer(&t, (int64_t)module);
    moei_put(&t, ".", 1);
    moei_put_text(&t, slot->name);
}

/* Fills net->tensors with names and shapes; moei_net_allocate adds the values. */
static moe_status moei_net_register(moe_net *net, moe_error *error) {
    moe_parameter slot;
    moe_tensor tensor;
    size_t i, count, numbers;
    int place;
    moe_status status = moei_net_count(net, &count, &numbers, error);
    if (status != MOE_OK || count == 0) return status;
    if (!moei_net_grow(&net->allocator, &net->tensors, sizeof *net->tensors, 0, count))
        return moei_error(error, MOE_ERR_MEMORY, "no memory for the list of %z tensors", count);
    for (i = 0; i < net->n_modules; i++) {
        net->modules[i].first_tensor = net->n_tensors;
        for (place = 0; place < MOE_LAYER_PARAMETER_COUNT; place++) {
            if (moei_module_parameter(net, i, place, &slot) != MOE_OK) continue;
            if (place == MOE_ROUTER_L1 && moei_l1_owner(net, i) != i) continue;
            moei_tensor_describe(i, &slot, &tensor);
            if (place == MOE_ROUTER_L1 && moei_shares_l1(&net->modules[i]))
                memcpy(tensor.name, "net.l1", sizeof "net.l1");
            MOEI_ARRAY_ADD(net->tensors, net->n_tensors, tensor);
        }
    }
    return MOE_OK;
}

static void moei_net_unregister(moe_net *net) {
    moei_net_drop(&net->allocator, &net->tensors, sizeof *net->tensors, net->n_tensors);
    net->n_tensors = 0;
}

/* The number of experts over all ranks in a tensor that is divided among them (an MoE layer's
   experts). 0: every rank has the whole tensor. The network may stand for a layer's tensors: no
   modules, but modules[0] is the layer. */
static size_t moei_parted(const moe_net *net, const moe_tensor *t) {
    static const char experts[] = "experts.";
    const char *p = t->name;
    size_t i = 0;
    if (net->transport == NULL) return 0;
    if (net->n_modules > 0) {
        for (; *p >= '0' && *p <= '9' && i < net->n_modules; p++) i = i * 10 + (size_t)(*p - '0');
        if (i >= net->n_modules || !moei_routes(net, i) || *p++ != '.') return 0;
    }
    if (moei_strlen(p) < sizeof experts || moei_memcmp(p, experts, sizeof experts - 1) != 0) return 0;
    return (size_t)net->modules[i].layer.config.router.n_experts;
}

/* The tensor as in files: with the experts of all ranks. */
static moe_tensor moei_whole_tensor(const moe_net *net, const moe_tensor *t) {
    moe_tensor whole = *t;
    size_t experts = moei_parted(net, t);
    if (experts == 0) return whole;
    whole.shape[0] = experts;
    /* the writer finds that its shape is too large */
    if (!moei_mul(t->count / t->shape[0], experts, &whole.count)) whole.count = 0;
    return whole;
}

/* Where this rank's values begin in the whole tensor. */
static size_t moei_whole_first(const moe_net *net, const moe_tensor *t) {
    size_t experts = moei_parted(net, t), first = 0, count;
    if (experts > 0) moei_own_part(net->transport, experts, &first, &count);
    return experts > 0 ? t->count / t->shape[0] * first : 0;
}

/* The first tensor after those of module i. */
static size_t moei_last_tensor(const moe_net *net, size_t i) {
    return i + 1 < net->n_modules ? net->modules[i + 1].first_tensor : net->n_tensors;
}

/* Assigns values and gradients (NULL: none) to the registered tensors, one after another, and to
   the modules. */
static void moei_net_bind(moe_net *net, moe_real *values, moe_real *gradients) {
    size_t i, t, at = 0;
    int place;
    for (i = 0; i < net->n_modules; i++) {
        moe_module *m = &net->modules[i];
        const size_t owner = moei_l1_owner(net, i);
        if (moei_is_layer(m)) moei_layer_bind(&m->layer, values + at, gradients != NULL ? gradients + at : NULL);
        for (t = m->first_tensor; t < moei_last_tensor(net, i); t++) {
            at += owner != i && m->layer.tensors[MOE_ROUTER_L1] == values + at; /* its own is not used */
            net->tensors[t].data = values + at;
            net->tensors[t].gradient = gradients != NULL ? gradients + at : NULL;
            at += net->tensors[t].count;
        }
        if (owner != i) {
            m->layer.tensors[MOE_ROUTER_L1] = net->modules[owner].layer.tensors[MOE_ROUTER_L1];
            m->layer.gradients[MOE_ROUTER_L1] = net->modules[owner].layer.gradients[MOE_ROUTER_L1];
        }
        for (t = m->first_tensor, place = 0; place < MOE_MODULE_SLOTS && !moei_is_layer(m); place++) {
            const moe_tensor *tensor = moei_module_tensor_of(m, place).name != NULL ? &net->tensors[t++] : NULL;
            m->tensors[place] = tensor != NULL ? tensor->data : NULL;
            m->gradients[place] = tensor != NULL ? tensor->gradient : NULL;
        }
        if (m->kind != MOE_MODULE_TIED) continue;
        m->tensors[MOE_MODULE_WEIGHT] = net->modules[0].tensors[MOE_MODULE_WEIGHT];
        m->gradients[MOE_MODULE_WEIGHT] = net->modules[0].gradients[MOE_MODULE_WEIGHT];
    }
}

/* Whether every router can learn; message as from the module's call. */
static moe_status moei_net_check_training(const moe_net *net, moe_error *error) {
#ifndef MOE_NO_TRAIN
    moe_error why;
    size_t i;
    for (i = 0; i < net->n_modules; i++) {
        moe_status status = MOE_OK;
        if (moei_routes(net, i))
            status = moe_router_check_training(&net->modules[i].layer.config.router, &why);
        if (status != MOE_OK) return moei_error(error, status, "module %z (mixture): %s", i, why.message);
    }
    return MOE_OK;
#else
    (void)net;
    return moei_error(error, MOE_ERR_UNSUPPORTED, "trainable = 1: this build has MOE_NO_TRAIN");
#endif
}

/* Allocates the memory of a registered network, all zero. */
static moe_status moei_net_allocate(moe_net *net, int trainable, moe_error *error) {
    size_t count, numbers, all, bytes;
    moe_status status = trainable ? moei_net_check_training(net, error) : MOE_OK;
    if (status == MOE_OK) status = moei_net_count(net, &count, &numbers, error);
    if (status == MOE_OK && net->external && (trainable || net->transport != NULL))
        status = moei_error(error, MOE_ERR_UNSUPPORTED, "%s is incompatible with net.external = 1",
                            trainable ? "trainable = 1" : "net.transport");
    if (status != MOE_OK) return status;
    net->built = net->external;
    if (net->external) return MOE_OK;
    if (!moei_mul(numbers, trainable ? 2 : 1, &all) || !moei_mul(all, sizeof(moe_real), &bytes))
        return moei_error(error, MOE_ERR_OVERFLOW, "the network's tensors do not fit this machine's memory");
    net->memory = (moe_real *)moei_alloc(&net->allocator, all, sizeof(moe_real));
    if (net->memory == NULL) return moei_error(error, MOE_ERR_MEMORY, "no memory for %z bytes of tensors", bytes);
    net->memory_size = bytes;
    net->trainable = trainable != 0;
    net->built = 1;
    moei_net_bind(net, net->memory, trainable ? net->memory + numbers : NULL);
    return MOE_OK;
}

/* Initializes all tensors in the order of files from one stream, so one seed gives one network. */
static void moei_net_start(moe_net *net, uint64_t seed) {
    moe_parameter slot;
    moe_rng rng;
    size_t i;
    int place;
    moe_rng_seed(&rng, seed);
    for (i = 0; i < net->n_modules; i++) {
        const moe_module *m = &net->modules[i];
        if (moei_is_layer(m)) moei_layer_fill(&m->layer.config, net->tensors[m->first_tensor].data, &rng);
        for (place = 0; place < MOE_MODULE_SLOTS && !moei_is_layer(m); place++)
            if (moei_module_parameter(net, i, place, &slot) == MOE_OK) moei_slot_fill(&slot, m->tensors[place], &rng);
    }
}

/* Undoes register and allocate. */
static void moei_net_unbuild(moe_net *net) {
    size_t i;
    for (i = 0; net->built && i < net->n_modules; i++) {
        moe_module *m = &net->modules[i];
        memset(m->layer.tensors, 0, sizeof m->layer.tensors);
        memset(m->layer.gradients, 0, sizeof m->layer.gradients);
        memset(m->tensors, 0, sizeof m->tensors);
        memset(m->gradients, 0, sizeof m->gradients);
    }
    moei_free(&net->allocator, net->memory, net->memory_size);
    net->memory = NULL;
    net->memory_size = 0;
    net->built = net->trainable = 0;
    moei_net_unregister(net);
}

/* Whether a network can be built, as far as one process can tell. */
static moe_status moei_net_ready(const moe_net *net, moe_error *error) {
    size_t i;
    if (net->error.code != MOE_OK) {
        if (error != NULL) *error = net->error;
        return net->error.code;
    }
    if (net->built) return moei_error(error, MOE_ERR_STATE, "the network is already built");
    if (net->n_modules == 0) return moei_error(error, MOE_ERR_CONFIG, "the network has no modules");
    for (i = 0; i < net->n_modules; i++)
        if (moei_routes(net, i) && net->modules[i].layer.config.transport != net->transport)
            return moei_error(
                error, MOE_ERR_CONFIG,
                "module %z (mixture): its transport is not the network's: set net.transport before adding modules", i);
    return MOE_OK;
}

moe_status moe_net_build(moe_net *net, int trainable, uint64_t seed, moe_error *error) {
    moe_status status;
    if (net == NULL) return MOEI_REFUSE(error, "net must not be NULL");
    status = moei_vote(net->transport, moei_net_ready(net, error), error);
    if (status == MOE_OK && net->transport != NULL)
        status = moei_group(net->transport)->hooks->net_agree(net, trainable, seed, error);
    if (status != MOE_OK) return status;
    status = moei_net_register(net, error);
    if (status == MOE_OK) status = moei_net_allocate(net, trainable, error);
    status = moei_vote(net->transport, status, error);
    if (status != MOE_OK) moei_net_unbuild(net);
    else if (!net->external) moei_net_start(net, seed);
    return status;
}

void moe_net_free(moe_net *net) {
    if (net == NULL) return;
    moei_free(&net->allocator, net->memory, net->memory_size);
    moei_net_unregister(net);
    moei_net_drop(&net->allocator, &net->modules, sizeof *net->modules, net->n_modules);
    memset(net, 0, sizeof *net);
}

static moe_tensor *moei_net_tensor(const moe_net *net, const char *name) {
    const char *p = name;
    size_t i = 0, t;
    if (net == NULL || name == NULL) return NULL;
    if (moei_strcmp(name, "net.l1") == 0) {
        while (i < net->n_modules && !moei_shares_l1(&net->modules[i])) i++;
    } else {
        for (; *p >= '0' && *p <= '9' && i < net->n_modules; p++) i = i * 10 + (size_t)(*p - '0');
        if (*p != '.') return NULL;
    }
    if (i >= net->n_modules) return NULL;
    for (t = net->modules[i].first_tensor; t < moei_last_tensor(net, i); t++)
        if (moei_strcmp(net->tensors[t].name, name) == 0) return &net->tensors[t];
    return NULL;
}

moe_status moe_net_find(const moe_net *net, const char *name, moe_tensor *out) {
    const moe_tensor *found = net != NULL && net->built ? moei_net_tensor(net, name) : NULL;
    if (net == NULL || name == NULL || out == NULL) return MOE_ERR_ARGUMENT;
    if (found == NULL) return MOE_ERR_NOT_FOUND;
    *out = *found;
    return MOE_OK;
}

size_t moe_net_parameter_count(const moe_net *net, size_t *used_per_token) {
    size_t i, t, count = 0, used = 0, by_token;
    for (i = 0; net != NULL && net->built && i < net->n_modules; i++) {
        const moe_module *m = &net->modules[i];
        by_token = 0;
        for (t = m->first_tensor; t < moei_last_tensor(net, i); t++) by_token += net->tensors[t].count;
        count += by_token;
        if (moei_is_layer(m)) (void)moe_layer_parameter_count(&m->layer, &by_token);
        by_token -= moei_l1_owner(net, i) != i; /* net.l1 counts once */
        if (m->n_rows > 0) by_token = (size_t)m->d_out;
        if (m->kind == MOE_MODULE_TIED) by_token += (size_t)m->d_in * (size_t)m->d_out;
        used += by_token;
    }
    if (used_per_token != NULL) *used_per_token = used;
    return count;
}

/* ---- forward ---- */

/* What the forward pass of one module leaves behind. */
struct moe_module_pass {
    const moe_real *x;     /* [N,d_in] */
    moe_real *y;           /* [N,d_out] */
    moe_real *d_x;         /* [N,d_in] training; NULL for module 0: the caller's */
    moe_real *mean, *rstd; /* [N] of norms */
    unsigned char *stays;  /* [N,d_in] dropout in training: 1 where x is kept */
    moei_attend t;         /* attention; decoding: keys and values lie in the cache */
    moe_real *raw[3];      /* training: q, k and v before clamp and norms, where needed */
    /* MLA: [N,q_lora] twice, [N,heads d_head], [N,heads d_value] */
    moe_real *query_down, *query_normed, *query_heads, *values;
    moe_real *parts; /* convolution: [N,3 d_in] B, C and X; mixed is in t: [N,d_in] C z */
    /* decoding a convolution: two states, each with the number of tokens before it, and u of the
       last L - 1 of these, [2,L - 1,d_in] */
    size_t *counts;
    moe_real *states;
    size_t *first; /* in a cache that keeps a window: the position of its first key; NULL: 0 */
    moe_real *d_weights;           /* [heads,N,past+N] of attention that a later router reads */
    moe_real *outputs, *d_outputs; /* o [heads,past+N,d_out] and its gradient */
    moe_real *past_outputs;        /* [heads,most,d_out] decoding: o in the cache */
    /* [most,d_in], [most,E] decoding: u and gate of a mixture that refines, in the cache */
    moe_real *past_u, *past_gate;
    /* [N,d_head] cosines, then sines, of each token's angles; the first attention with these angles
       computes them */
    moe_real *rotations;
    void *work;            /* mixture and feed_forward */
    size_t work_size;
    /* mixture that reads the previous one: choices per token there */
    size_t n_previous;
    int32_t *previous_experts;  /* [N,n_previous] */
    moe_real *previous_weights; /* [N,n_previous] */
    moe_real *d_logits;    /* [N,E] mixture in training whose logits the next one reads */
    moe_layer_pass *layer; /* mixture and feed_forward */
};

/* The most experts per token of module i, a mixture; soft: all of them. */
static size_t moei_mixture_choices(const moe_net *net, size_t i) {
    const moe_router_config *c = &net->modules[i].layer.config.router;
    return moei_is_soft(c) ? (size_t)c->n_experts : moei_max_choices(c);
}

/* What scores are divided by. */
static moe_real moei_score_root(const moe_attention_config *c) {
    return c->scale > 0 ? MOEI_R(1.0) / c->scale : MOEI_F(sqrt)((moe_real)c->d_head);
}

static moei_heads moei_heads_of(const moe_module *m) {
    const moe_attention_config *c = &m->attention;
    moei_heads s;
    int latent = c->kv_lora > 0;
    s.heads = (size_t)c->heads;
    s.kv = latent ? 1 : c->kv_heads > 0 ? (size_t)c->kv_heads : s.heads;
    s.group = s.heads / s.kv;
    s.w = latent ? (size_t)c->kv_lora + moei_rotary_dims(c) : (size_t)c->d_head;
    s.u = latent ? (size_t)c->kv_lora : moei_head_value(c);
    s.q = s.heads * s.w;
    s.k = s.kv * s.w;
    s.v = latent ? s.k : s.kv * s.u;
    s.mixed = s.heads * s.u;
    return s;
}

/* Whether two attentions rotate by the same angles. */
static int moei_rotates_alike(const moe_module *a, const moe_module *b) {
    const moe_attention_config *x = &a->attention, *y = &b->attention;
    const moe_field *field = moe_field_find(moei_attention_fields, "rotary_scaling");
    if (!x->rotary || !y->rotary || moei_rotary_dims(x) != moei_rotary_dims(y) || x->rotary_base < y->rotary_base ||
        x->rotary_base > y->rotary_base)
        return 0;
    for (; field->name != NULL && field->offset < offsetof(moe_attention_config, kv_lora); field++) {
        const size_t at = field->offset;
        if (moei_memcmp((const char *)x + at, (const char *)y + at, moei_field_size(field)) != 0) return 0;
    }
    return a->tensors[MOE_MODULE_ROTARY_FACTORS] == b->tensors[MOE_MODULE_ROTARY_FACTORS];
}

/* The first attention that rotates by the same angles as module i, or i if that does not rotate. */
static size_t moei_rotation_of(const moe_net *net, size_t i) {
    size_t j;
    for (j = 0; j < i; j++)
        if (net->modules[j].kind == MOE_MODULE_ATTENTION && moei_rotates_alike(&net->modules[j], &net->modules[i]))
            return j;
    return i;
}

/* Whether the next mixture after module i, a mixture, reads its logits. */
static int moei_logits_are_read(const moe_net *net, size_t i) {
    for (i++; i < net->n_modules; i++)
        if (moei_routes(net, i)) return net->modules[i].layer.config.router.router_residual;
    return 0;
}

/* The attention that the router of module i reads in this network, or i: none. */
static size_t moei_attention_read(const moe_net *net, size_t i) {
    const moe_module *m = &net->modules[i];
    return m->kind == MOE_MODULE_MIXTURE && m->layer.config.router.refine == MOE_REFINE_ATTENTION
               ? moei_previous_attention(net, i)
               : i;
}

/* Whether a router reads attention i. */
static int moei_is_read(const moe_net *net, size_t i) {
    size_t j;
    for (j = i + 1; j < net->n_modules && net->modules[j].kind != MOE_MODULE_ATTENTION; j++)
        if (moei_attention_read(net, j) == i) return 1;
    return 0;
}

/* What a pass is laid out for. */
typedef struct moei_extent {
    size_t n, past; /* tokens of the call, and the most before them */
    int training;   /* what the backward pass needs is kept */
    int decoding;   /* keys, values and other data of earlier tokens are in a cache */
    int type;       /* as if all weights were packed in this type; -1: as they are */
} moei_extent;

static moei_extent moei_extent_of(size_t n, int training) {
    moei_extent e;
    e.n = n;
    e.past = 0;
    e.training = training;
    e.decoding = 0;
    e.type = -1;
    return e;
}

/* n tokens at the end of a cache for most. */
static moei_extent moei_extent_decoding(size_t n, size_t most) {
    moei_extent e = moei_extent_of(n, 0);
    e.past = most - n;
    e.decoding = 1;
    return e;
}

/* Rows that the backward pass needs: what clamp and norms read. */
static void moei_attention_raw_layout(const moe_module *m, size_t n, moei_layout *l, struct moe_module_pass *p) {
    const moe_attention_config *c = &m->attention;
    moei_heads s = moei_heads_of(m);
    int finished = c->qk_norm != MOE_QK_NORM_NONE || c->clamp > 0;
    if (finished) p->raw[0] = moei_take_reals(l, n, s.q);
    if (finished || c->kv_lora > 0) p->raw[1] = moei_take_reals(l, n, s.k);
    if (c->clamp > 0) p->raw[2] = moei_take_reals(l, n, s.v);
}

static void moei_attention_layout(const moe_net *net, size_t i, const moei_extent *e, moei_layout *kept, moei_layout *l,
                                  struct moe_module_pass *p) {
    const moe_module *m = &net->modules[i];
    const moe_attention_config *c = &m->attention;
    moei_heads s = moei_heads_of(m);
    size_t rows = 0, keys = 0;
    p->t.k = net->kernels;
    p->t.s = s;
    p->t.full = c->full;
    p->t.window = (size_t)c->window;
    p->t.chunk = (size_t)c->chunk;
    p->t.root = moei_score_root(c);
    p->t.cap = c->cap;
    p->t.sinks = m->tensors[MOE_MODULE_SINKS];
    p->t.type = net->cache_type;
    p->t.q = moei_take_reals(l, e->n, s.q);
    if (!e->decoding || net->cache_type != MOE_TYPE_REAL) {
        p->t.keys = moei_take_reals(l, e->n, s.k);
        p->t.values = c->kv_lora > 0 ? p->t.keys : moei_take_reals(l, e->n, s.v);
    }
    p->t.mixed = moei_take_reals(l, e->n, s.mixed);
    if (c->q_lora > 0) {
        p->query_down = moei_take_reals(l, e->n, (size_t)c->q_lora);
        p->query_normed = moei_take_reals(l, e->n, (size_t)c->q_lora);
    }
    if (c->kv_lora > 0) {
        p->query_heads = moei_take_reals(l, e->n, s.heads * (size_t)c->d_head);
        p->values = moei_take_reals(l, e->n, s.heads * moei_head_value(c));
    }
    if (e->training) moei_attention_raw_layout(m, e->n, l, p);
    if (c->rotary && moei_rotation_of(net, i) == i) p->rotations = moei_take_reals(kept, e->n, moei_rotary_dims(c));
    if (!moei_is_read(net, i)) return;
    if (!moei_mul(e->n, s.heads, &rows) || !moei_mul(e->past + e->n, s.heads, &keys)) l->overflow = 1;
    p->t.weights = moei_take_reals(l, rows, e->past + e->n);
    p->outputs = moei_take_reals(l, keys, (size_t)m->d_out);
    if (!e->training) return;
    p->d_weights = moei_take_reals(l, rows, e->n);
    p->d_outputs = moei_take_reals(l, keys, (size_t)m->d_out);
}

/* Whether a module is a mixture whose router refines, and so reads earlier tokens. */
static int moei_refines(const moe_module *m) {
    return m->kind == MOE_MODULE_MIXTURE && m->layer.config.router.refine != MOE_REFINE_NONE;
}

/* Whether a module computes each token by itself, from the output of the module before alone. */
static int moei_is_rowwise(int kind) {
    return kind == MOE_MODULE_LINEAR || kind == MOE_MODULE_ACTIVATION || kind == MOE_MODULE_LAYER_NORM ||
           kind == MOE_MODULE_RMS_NORM || kind == MOE_MODULE_TIED || kind == MOE_MODULE_SCALE;
}

/* How many tokens module i computes: with last_only, the trailing modules compute one. */
static size_t moei_module_tokens(const moe_net *net, size_t i, const moei_extent *e) {
    if (!net->last_only || !e->decoding || e->n < 2 || i == 0) return e->n;
    while (i < net->n_modules && moei_is_rowwise(net->modules[i].kind)) i++;
    return i == net->n_modules ? 1 : e->n;
}

/* Lays out one module's pass: in kept what later modules read, in l the rest. Outputs and the
   workspaces of layers are included only if modules share no memory (kept = l). */
static moe_status moei_module_layout(const moe_net *net, size_t i, const moei_extent *e, moei_layout *kept,
                                     moei_layout *l, struct moe_module_pass *p) {
    const moe_module *m = &net->modules[i];
    size_t n = moei_module_tokens(net, i, e);
    int training = e->training;
    moe_status status = MOE_OK;
    memset(p, 0, sizeof *p);
    if (kept == l) p->y = moei_take_reals(l, n, (size_t)m->d_out);
    if (training && i > 0) p->d_x = moei_take_reals(l, n, (size_t)m->d_in);
    if (m->kind == MOE_MODULE_LAYER_NORM) p->mean = moei_take_reals(l, n, 1);
    if (m->kind == MOE_MODULE_LAYER_NORM || m->kind == MOE_MODULE_RMS_NORM) p->rstd = moei_take_reals(l, n, 1);
    if (m->kind == MOE_MODULE_DROPOUT && training) p->stays = (unsigned char *)moei_take(l, n, (size_t)m->d_in);
    if (m->kind == MOE_MODULE_ATTENTION) moei_attention_layout(net, i, e, kept, l, p);
    if (m->kind == MOE_MODULE_CONVOLUTION) {
        p->parts = moei_take_reals(l, n, 3 * (size_t)m->d_in);
        p->t.mixed = moei_take_reals(l, n, (size_t)m->d_in);
    }
    if (m->kind == MOE_MODULE_MIXTURE &&
        (moe_router_traits(&m->layer.config.router) & MOE_TRAIT_NEEDS_PREVIOUS_LAYER)) {
        p->n_previous = moei_mixture_choices(net, moei_previous_mixture(net, i));
        p->previous_experts = (int32_t *)moei_take(l, n, p->n_previous * sizeof(int32_t));
        p->previous_weights = moei_take_reals(l, n, p->n_previous);
    }
    if (m->kind == MOE_MODULE_MIXTURE && training && moei_logits_are_read(net, i))
        p->d_logits = moei_take_reals(l, n, (size_t)m->layer.config.router.n_experts);
    if (moei_is_layer(m)) {
        p->layer = (moe_layer_pass *)moei_take(kept, 1, sizeof *p->layer);
        status = e->type < 0 ? moei_layer_size(&m->layer, n, moei_refines(m) ? e->past : 0, training, &p->work_size)
                             : moei_report_size(&m->layer, e->type, n, &p->work_size);
    }
    if (moei_is_layer(m) && status == MOE_OK && kept == l) p->work = moei_take(l, p->work_size, 1);
    return status;
}

/* Scratch memory of the current module, shared by all modules. */
typedef struct moei_room {
    /* [rows,keys] attention: one block of A, its gradient, and the slopes of a cap */
    moe_real *a, *d_a, *slopes;
    size_t rows, columns, parts; /* of arrays of scores; so many threads have their own */
    moe_real *keys;     /* [MOEI_KEYS,width] unpacked from a cache */
    moe_real *unpacked; /* MLA: [MOEI_KEYS,kv_lora] rows of K_h */
    void *quantized;    /* rows, for products */
    moe_real *d_q, *d_k, *d_v, *d_mixed; /* as the pass has them; but MLA: d_v [N,u] */
    size_t d_v_step;
    moe_real *d_values, *d_heads, *d_down; /* MLA */
    moe_real *row;    /* two rows of q or k */
    moe_real *d_act;  /* [N,d_in] activation */
    moe_real *d_rows; /* [N,d_in] and [N,3 d_in] convolution */
} moei_room;

/* Parameter `place` if it lies in another program's file, or NULL. */
static const moe_external *moei_external_of(const moe_module *m, int place) {
    return m->external != NULL && m->external[place].type != NULL ? &m->external[place] : NULL;
}

static size_t moei_larger(size_t a, size_t b) { return a > b ? a : b; }

/* The most keys that a block of queries sees. */
static size_t moei_keys_seen(const moe_attention_config *c, size_t all) {
    size_t most = all;
    if (c->window > 0 && (size_t)c->window + 2 * MOEI_WINDOW_STEP < most)
        most = (size_t)c->window + 2 * MOEI_WINDOW_STEP;
    return c->chunk > 0 && (size_t)c->chunk < most ? (size_t)c->chunk : most;
}

static void moei_attention_room(const moe_net *net, const moe_module *m, const moei_extent *e, moei_layout *l,
                                moei_room *room) {
    const moe_attention_config *c = &m->attention;
    moei_heads s = moei_heads_of(m);
    size_t n = e->n, rows = moei_larger(moei_smaller(n, MOEI_ATTENTION_ROWS), s.heads);
    size_t columns = moei_keys_seen(c, e->past + n) + (size_t)c->sinks, widest = moei_larger(s.q, s.k);
    room->parts = e->training ? moei_smaller(s.kv, 4) : 1;
    room->rows = rows *= room->parts;
    room->columns = columns;
    room->a = moei_take_reals(l, rows, columns);
    if (e->decoding && net->cache_type != MOE_TYPE_REAL)
        room->keys = moei_take_reals(l, MOEI_KEYS, moei_kept_width(moei_larger(s.w, s.u)));
    if (c->kv_lora > 0 && moei_external_of(m, MOE_MODULE_KEY) != NULL)
        room->unpacked = moei_take_reals(l, MOEI_KEYS, s.u);
    if (!e->training) return;
    room->d_a = moei_take_reals(l, rows, columns);
    if (c->cap > 0) room->slopes = moei_take_reals(l, rows, columns);
    room->d_q = moei_take_reals(l, n, s.q);
    room->d_k = moei_take_reals(l, n, s.k);
    room->d_v_step = c->kv_lora > 0 ? s.u : s.v;
    room->d_v = moei_take_reals(l, n, room->d_v_step);
    room->d_mixed = moei_take_reals(l, n, s.mixed);
    if (c->kv_lora > 0) room->d_values = moei_take_reals(l, n, s.heads * moei_head_value(c));
    if (c->kv_lora > 0) room->d_heads = moei_take_reals(l, n, s.heads * (size_t)c->d_head);
    if (c->q_lora > 0) room->d_down = moei_take_reals(l, n, (size_t)c->q_lora);
    if (c->qk_norm != MOE_QK_NORM_NONE || c->clamp > 0 || c->kv_lora > 0)
        room->row = moei_take_reals(l, 2, moei_larger(widest, (size_t)c->q_lora));
}

/* The module whose matrix a module multiplies by: tied reads the embedding's. */
static const moe_module *moei_weights_of(const moe_net *net, const moe_module *m) {
    return m->kind == MOE_MODULE_TIED ? &net->modules[0] : m;
}

/* Whether parameter `place` is a matrix [n,k] that all rows are multiplied by, and not in another
   program's file. */
static int moei_module_matrix(const moe_net *net, const moe_module *m, int place, size_t *n, size_t *k) {
    const int tied = m->kind == MOE_MODULE_TIED && place == MOE_MODULE_WEIGHT;
    moei_module_tensor t = moei_module_tensor_of(m, place);
    if (tied) t = moei_tensor_of("weight", m->d_out, m->d_in, 0);
    if (moei_is_layer(m) || t.name == NULL || t.columns == 0 || m->n_rows > 0 ||
        moei_external_of(moei_weights_of(net, m), place) != NULL ||
        (m->kind == MOE_MODULE_CONVOLUTION && place == MOE_MODULE_TAPS) ||
        (m->kind == MOE_MODULE_ATTENTION && m->attention.kv_lora > 0 && place == MOE_MODULE_KEY))
        return 0;
    *n = (size_t)t.rows;
    *k = (size_t)t.columns;
    return 1;
}

/* The most bytes of quantized rows that a matrix of the module needs. */
static size_t moei_rows_size(const moe_net *net, const moe_module *m, const moei_extent *e) {
    const moe_attention_config *c = &m->attention;
    const int type = e->type >= 0 ? e->type : m->layer.is_packed && !e->training ? m->layer.packed_type : -1;
    size_t inner = (size_t)m->d_in, most = 0, size, n, k;
    int place;
    if (m->kind == MOE_MODULE_ATTENTION) {
        inner = moei_larger(inner, (size_t)c->heads * moei_head_value(c));
        inner = moei_larger(inner, moei_larger((size_t)c->kv_lora, (size_t)c->q_lora));
        inner = moei_larger(inner, (size_t)c->d_head);
    }
    for (place = 0; place < MOE_MODULE_SLOTS && !moei_is_layer(m); place++) {
        const moe_external *w = moei_external_of(moei_weights_of(net, m), place);
        size = w != NULL && m->kind != MOE_MODULE_EMBEDDING ? moe_external_work_size(w, e->n, inner) : 0;
        if (moei_is_quantized(type) && moei_module_matrix(net, m, place, &n, &k) &&
            !moei_mul(MOEI_ROW_SIZE(type, k), e->n, &size))
            size = SIZE_MAX;
        most = moei_larger(most, size);
    }
    return most;
}

static moei_room moei_room_layout(const moe_net *net, const moe_module *m, const moei_extent *e, moei_layout *l) {
    moei_room room;
    memset(&room, 0, sizeof room);
    if (m->kind == MOE_MODULE_ACTIVATION && e->training) room.d_act = moei_take_reals(l, e->n, (size_t)m->d_in);
    if (m->kind == MOE_MODULE_CONVOLUTION && e->training) room.d_rows = moei_take_reals(l, e->n, 4 * (size_t)m->d_in);
    if (m->kind == MOE_MODULE_ATTENTION) moei_attention_room(net, m, e, l, &room);
    room.quantized = moei_take(l, moei_rows_size(net, m, e), 1);
    return room;
}

/* Whether modules of a pass may use each other's memory: in decoding, unless a router reads modules
   other than the one before it. */
static int moei_shares(const moe_net *net, const moei_extent *e) {
    size_t i;
    for (i = 0; i < net->n_modules && e->decoding; i++) {
        const moe_router_config *c = &net->modules[i].layer.config.router;
        if (moei_routes(net, i) &&
            (c->refine != MOE_REFINE_NONE || c->raw_input || c->router_residual ||
             (moe_router_traits(c) & MOE_TRAIT_NEEDS_PREVIOUS_LAYER)))
            return 0;
    }
    return e->decoding;
}

/* Memory that modules share. A layer's workspace begins with its routing, which is kept for
   reports; the next layer's overwrites the rest. An output stays in one of a few places until the
   last module that reads it. */
enum { MOEI_PLACES = 6 };
typedef struct moei_shared {
    size_t scratch, works, work; /* bytes for the largest module, for all layers; where the next layer's begins */
    size_t busy[MOEI_PLACES];    /* the last module that reads what is there */
    size_t bytes[MOEI_PLACES];
    unsigned char *at[MOEI_PLACES];
} moei_shared;

/* The last module that reads the output of module i. */
static size_t moei_last_reader(const moe_net *net, size_t i) {
    size_t last = i + 1, j;
    for (j = i + 2; j < net->n_modules; j++)
        if (net->modules[j].kind == MOE_MODULE_RESIDUAL && j - (size_t)net->modules[j].span == i + 1) last = j;
    return last;
}

/* The place of module i's output; MOEI_PLACES: it needs one of its own. */
static size_t moei_place_of(const moe_net *net, size_t i, size_t bytes, moei_shared *s) {
    size_t k = 0;
    while (k < MOEI_PLACES && i > 0 && s->busy[k] >= i) k++;
    if (k == MOEI_PLACES) return k;
    s->busy[k] = moei_last_reader(net, i);
    s->bytes[k] = moei_larger(s->bytes[k], bytes);
    return k;
}

/* The offset of a layer's workspace in that of all layers. */
static size_t moei_work_of(const moe_module *m, size_t n, size_t size, moei_shared *s) {
    size_t at = s->work, routing = 0;
    if (m->kind == MOE_MODULE_MIXTURE && moei_route_bytes(&m->layer.router, n, n, 0, 0, &routing) == MOE_OK) {
        routing -= n * (size_t)m->d_in * sizeof(moe_real); /* u, which nothing reads later */
        s->work += (routing + 2 * MOEI_ALIGN - 1) / MOEI_ALIGN * MOEI_ALIGN;
    }
    if (!moei_add(at, size, &size)) size = SIZE_MAX;
    s->works = moei_larger(s->works, size);
    return at;
}

/* Lays out what the modules share, after all bytes are known: lengths [3] of scratch, works and
   outputs. */
static moe_status moei_shared_begin(const moe_net *net, const moei_extent *e, int shares, moei_layout *l,
                                    moei_shared *s, void **scratch, unsigned char **works) {
    struct moe_module_pass unplaced;
    size_t i;
    memset(s, 0, sizeof *s);
    for (i = 0; i < net->n_modules; i++) {
        moei_layout room = moei_layout_begin(NULL), kept = room;
        size_t n = moei_module_tokens(net, i, e), bytes = 0;
        moe_status status = MOE_OK;
        (void)moei_room_layout(net, &net->modules[i], e, &room);
        if (shares) status = moei_module_layout(net, i, e, &kept, &room, &unplaced);
        if (status != MOE_OK) return status;
        if (shares &&
            (!moei_mul(n, (size_t)net->modules[i].d_out, &bytes) || !moei_mul(bytes, sizeof(moe_real), &bytes)))
            room.overflow = 1;
        if (room.overflow) return MOE_ERR_OVERFLOW;
        if (shares) (void)moei_place_of(net, i, bytes, s);
        if (shares && moei_is_layer(&net->modules[i])) (void)moei_work_of(&net->modules[i], n, unplaced.work_size, s);
        s->scratch = moei_larger(s->scratch, room.used);
    }
    *scratch = moei_take(l, s->scratch, 1);
    *works = (unsigned char *)moei_take(l, s->works, 1);
    for (i = 0; i < MOEI_PLACES; i++) s->at[i] = (unsigned char *)moei_take(l, s->bytes[i], 1);
    memset(s->busy, 0, sizeof s->busy);
    s->work = 0;
    return MOE_OK;
}

/* Lays a pass out in memory; the same function with an empty base counts the bytes. Every module
   keeps its output for later residuals and reports, unless they share. */
static moe_status moei_net_layout(const moe_net *net, const moei_extent *e, moei_layout *l, moe_net_pass *pass) {
    struct moe_module_pass unplaced;
    moei_shared s;
    unsigned char *works = NULL;
    size_t i, k;
    int shares = moei_shares(net, e);
    moe_status status;
    memset(pass, 0, sizeof *pass);
    memset(&unplaced, 0, sizeof unplaced);
    pass->modules = (struct moe_module_pass *)moei_take(l, net->n_modules, sizeof *pass->modules);
    status = moei_shared_begin(net, e, shares, l, &s, &pass->scratch, &works);
    for (i = 0; i < net->n_modules && status == MOE_OK; i++) {
        const moe_module *m = &net->modules[i];
        struct moe_module_pass *p = pass->modules != NULL && !l->overflow ? &pass->modules[i] : &unplaced;
        size_t n = moei_module_tokens(net, i, e);
        moei_layout room = moei_layout_begin(pass->scratch);
        (void)moei_room_layout(net, m, e, &room);
        status = moei_module_layout(net, i, e, l, shares ? &room : l, p);
        if (status != MOE_OK || !shares) continue;
        k = moei_place_of(net, i, 0, &s);
        p->y = k < MOEI_PLACES ? (moe_real *)(void *)s.at[k] : moei_take_reals(l, n, (size_t)m->d_out);
        if (moei_is_layer(m)) k = moei_work_of(m, n, p->work_size, &s);
        if (moei_is_layer(m)) p->work = works != NULL ? works + k : NULL;
    }
    return status == MOE_OK && l->overflow ? MOE_ERR_OVERFLOW : status;
}

static moe_status moei_net_size(const moe_net *net, const moei_extent *e, size_t *bytes) {
    moei_layout l = moei_layout_begin(NULL);
    moe_net_pass pass;
    moe_status status;
    if (!moei_fit_int32(e->past, e->n)) return MOE_ERR_OVERFLOW;
    status = moei_net_layout(net, e, &l, &pass);
    if (status == MOE_OK) *bytes = l.used;
    return status;
}

moe_status moe_net_work_size(const moe_net *net, size_t n_tokens, int training, size_t *bytes) {
    moei_extent e = moei_extent_of(n_tokens, training);
    if (net == NULL || bytes == NULL) return MOE_ERR_ARGUMENT;
    return net->built ? moei_net_size(net, &e, bytes) : MOE_ERR_STATE;
}

static void moei_net_unpack(moe_net *net) {
    size_t i;
    for (i = 0; i < net->n_modules; i++) net->modules[i].layer.is_packed = 0;
}

static moe_status moei_pack_module(moei_packing *p, const moe_net *net, const moe_module *m, const void *packed[]) {
    moe_status status = MOE_OK;
    size_t n = 0, k = 0;
    int place;
    if (moei_is_layer(m)) return moei_pack_layer(p, &m->layer, packed);
    for (place = 0; place < MOE_MODULE_SLOTS && status == MOE_OK; place++) {
        const char *name = m->kind == MOE_MODULE_TIED ? "weight" : moei_module_tensor_of(m, place).name;
        if (moei_module_matrix(net, m, place, &n, &k))
            status = moei_pack_matrix(p, name, 1, n, k, moei_weights_of(net, m)->tensors[place], &packed[place]);
    }
    return status;
}

/* Packs all modules; those at sets (may be NULL) then read the packed weights. */
static moe_status moei_pack_net(moei_packing p, const moe_net *net, moe_module *sets, size_t *bytes) {
    moe_error why, *error = p.error;
    size_t i;
    p.error = &why;
    for (i = 0; i < net->n_modules; i++) {
        const moe_module *m = &net->modules[i];
        const void *packed[MOE_LAYER_PARAMETER_COUNT] = {0};
        moe_status status;
        if (moei_has_external(&m->layer)) continue;
        status = moei_pack_module(&p, net, m, packed);
        if (status != MOE_OK)
            return moei_error(error, status, "module %z (%s): %s", i, moei_module_names[m->kind], why.message);
        if (sets != NULL) moei_layer_set_packed(&sets[i].layer, p.type, packed);
    }
    *bytes = p.used;
    return MOE_OK;
}

moe_status moe_net_pack(moe_net *net, int type, void *memory, size_t size, moe_error *error) {
    size_t bytes, i;
    moe_status status;
    if (net == NULL || memory == NULL) return MOEI_REFUSE(error, "%s must not be NULL", net == NULL ? "net" : "memory");
    if (!net->built) return moei_error(error, MOE_ERR_STATE, "the network is not built");
    status = moei_pack_net(moei_packing_begin(net->kernels, type, 0, NULL, error), net, NULL, &bytes);
    if (status != MOE_OK) return status;
    if (size < bytes) return moei_error(error, MOE_ERR_SPACE, MOEI_PACK_SPACE, size, bytes);
    for (i = 0; i < net->n_modules; i++) {
        const void *packed[MOE_LAYER_PARAMETER_COUNT];
        moe_layer *layer = &net->modules[i].layer;
        moei_packing old = moei_packing_begin(NULL, layer->packed_type, 0, NULL, NULL);
        (void)moei_pack_module(&old, net, &net->modules[i], packed);
        moei_unpack(layer, &old, memory, size);
    }
    status = moei_pack_net(moei_packing_begin(net->kernels, type, 1, memory, error), net, NULL, &bytes);
    if (status != MOE_OK) return status;
    return moei_pack_net(moei_packing_begin(net->kernels, type, 0, memory, error), net, net->modules, &bytes);
}

moe_status moe_net_pack_size(const moe_net *net, int type, size_t n_tokens, size_t *bytes, size_t *work) {
    moei_extent e = moei_extent_of(n_tokens, 1);
    size_t weights = 0, exact = 0;
    size_t packed = 0;
    moe_status status;
    if (net == NULL || (bytes == NULL && work == NULL)) return MOE_ERR_ARGUMENT;
    if (!net->built) return MOE_ERR_STATE;
    status = moei_pack_net(moei_packing_begin(NULL, type, 0, NULL, NULL), net, NULL, &weights);
    if (status == MOE_OK && work != NULL) status = moei_net_size(net, &e, &exact);
    e.training = 0;
    e.type = type;
    if (status == MOE_OK && work != NULL) status = moei_net_size(net, &e, &packed);
    if (status == MOE_OK && !moei_add(exact, packed, &exact)) status = MOE_ERR_OVERFLOW;
    if (status != MOE_OK) return status;
    if (bytes != NULL) *bytes = weights;
    if (work != NULL) *work = exact;
    return MOE_OK;
}

/* One module's pass over the n rows of a call. */
typedef struct moei_run {
    const moe_net *net;
    const moe_kernels *k;
    const moe_call *call;
    const moe_module *m;
    struct moe_module_pass *p;
    moe_net_pass *pass;
    size_t i, n, d_in, d_out;
    /* [n,d_out] backward only; NULL in a last mixture with a loss per expert */
    const moe_real *dy;
    const moe_real *d_outputs, *d_weights; /* then these, by assignments of its plan */
    moe_real *dx;       /* [n,d_in] added to; NULL: not wanted */
} moei_run;

static moei_run moei_run_begin(const moe_net *net, moe_net_pass *pass, size_t i) {
    moei_extent e;
    moei_run r;
    r.net = net;
    r.k = net->kernels;
    r.call = &pass->call;
    r.m = &net->modules[i];
    r.p = &pass->modules[i];
    r.pass = pass;
    r.i = i;
    e = moei_extent_of(pass->n_tokens, 0);
    e.decoding = pass->most > 0;
    r.n = moei_module_tokens(net, i, &e);
    r.d_in = (size_t)r.m->d_in;
    r.d_out = (size_t)r.m->d_out;
    r.dy = r.d_outputs = r.d_weights = NULL;
    r.dx = NULL;
    return r;
}

static moei_room moei_run_room(const moei_run *r) {
    moei_layout l = moei_layout_begin(r->pass->scratch);
    moei_extent e = moei_extent_of(r->n, moei_keeps(r->call));
    e.past = r->pass->past;
    e.decoding = r->pass->most > 0;
    return moei_room_layout(r->net, r->m, &e, &l);
}

/* ---- products with a module's matrices: tensors or as they lie in other programs' files ---- */

/* A product of rows with parameter `place`, or its gradients. */
typedef struct moei_rows_product {
    const moei_run *r;
    int place, bias, n_tasks; /* bias 0: none */
    size_t first, n, i, o, ldi, ldo;
    const moe_real *in;
    moe_real *out;
    const moe_real *weights;
    const void *packed;
    void *rows; /* in, quantized */
    const moe_external *external;
    const moe_real *d_out;
    moe_real *d_in; /* or NULL */
} moei_rows_product;

static void moei_product_run(moei_rows_product *p, size_t rows, void (*task)(void *work, int index)) {
    const moe_parallel team = moei_team_for(p->r->call, (double)p->i * (double)p->o, rows, 1);
    p->n_tasks = team.threads;
    if (p->n_tasks > 1) team.run(team.ctx, task, p, p->n_tasks);
    else task(p, 0);
}

/* A task's columns. */
static void moei_product_task(void *work, int index) {
    const moei_rows_product *p = (const moei_rows_product *)work;
    const moe_real *bias = p->bias != 0 ? p->r->m->tensors[p->bias] : NULL;
    const moe_kernels *k = p->r->k;
    moe_real *out;
    size_t j, o, t;
    moei_columns_of(p->o, index, p->n_tasks, &j, &o);
    if ((o -= j) == 0) return;
    out = p->out + j;
    if (p->external != NULL)
        moei_external_columns(k, p->external, p->first + j, p->n, o, p->i, p->in, p->ldi,
                              (const unsigned char *)p->rows, out, p->ldo);
    else if (p->packed != NULL)
        moei_panels_product(k, p->r->m->layer.packed_type, p->packed, j / MOEI_PANEL, p->n, o, p->i, p->in, p->ldi,
                            p->rows, out, p->ldo, p->i * p->o);
    else
        moe_matmul(k, MOE_MATMUL_NT, MOE_TYPE_REAL, p->n, o, p->i, p->in, p->ldi, p->weights + (p->first + j) * p->i,
                   p->i, out, p->ldo, 0);
    for (t = 0; t < p->n && bias != NULL; t++) MOEI_ADD(k, o, bias + j, out + t * p->ldo);
}

/* out [n,o], rows ldo apart, = in [n,i], rows ldi apart, times rows first .. first + o of parameter
   `place`, [..,i], + bias. */
static void moei_module_product(const moei_run *r, int place, int bias, size_t first, size_t n, size_t i, size_t o,
                                const moe_real *in, size_t ldi, moe_real *out, size_t ldo) {
    const moe_module *m = moei_weights_of(r->net, r->m);
    moei_rows_product p = {r, place, bias, 1, first, n, i, o, ldi, ldo, in, out, NULL, NULL, NULL, NULL, NULL, NULL};
    p.weights = m->tensors[place];
    p.external = r->pass->training ? NULL : moei_external_of(m, place);
    if (moei_uses_packed(&r->m->layer, r->call)) p.packed = r->m->layer.packed[place];
    if (p.external != NULL || p.packed != NULL) p.rows = moei_run_room(r).quantized;
#ifndef MOE_NO_QUANT
    if (p.external != NULL && moei_external_quantizes(p.external))
        moei_external_quantize(r->k, n, i, in, ldi, (unsigned char *)p.rows);
    else if (p.external == NULL && p.packed != NULL && moei_is_quantized(r->m->layer.packed_type))
        moe_rows_quantize(r->k, r->m->layer.packed_type, n, i, in, ldi, p.rows);
#endif
    moei_product_run(&p, n, moei_product_task);
}

/* MLA: whether KEY has the rows of V_h too. */
static int moei_is_joint(const moe_module *m) {
    return moei_external_of(m, MOE_MODULE_VALUE) == NULL && m->tensors[MOE_MODULE_VALUE] == NULL;
}

/* MLA: out [n,c] = in [n,i] K_h for head h of H, K_h [i,c]. */
static void moei_mla_product(const moei_run *r, size_t h, size_t i, size_t c, const moe_real *in, size_t ldi,
                             moe_real *out, size_t ldo) {
    const moe_kernels *k = r->k;
    const moe_external *w = r->pass->training ? NULL : moei_external_of(r->m, MOE_MODULE_KEY);
    size_t first = h * (i + moei_head_value(&r->m->attention)), at, count, j;
    moe_real *room;
    if (!moei_is_joint(r->m)) {
        moei_module_product(r, MOE_MODULE_KEY, 0, h * c, r->n, i, c, in, ldi, out, ldo);
        return;
    }
    if (w == NULL) {
        moe_matmul(k, MOE_MATMUL_NN, MOE_TYPE_REAL, r->n, c, i, in, ldi, r->m->tensors[MOE_MODULE_KEY] + first * c, c,
                   out, ldo, 0);
        return;
    }
    room = moei_run_room(r).unpacked;
    for (at = 0; at < i; at += count) {
        count = moei_smaller(i - at, MOEI_KEYS);
        for (j = 0; j < count; j++) w->type->unpack(k, w, first + at + j, 0, c, room + j * c);
        moe_matmul(k, MOE_MATMUL_NN, MOE_TYPE_REAL, r->n, c, count, in + at, ldi, room, c, out, ldo, at > 0);
    }
}

static moe_status moei_linear_forward(const moei_run *r) {
    moei_module_product(r, MOE_MODULE_WEIGHT, MOE_MODULE_BIAS, 0, r->n, r->d_in, r->d_out, r->p->x, r->d_in, r->p->y,
                        r->d_out);
    return MOE_OK;
}

static moe_status moei_activation_forward(const moei_run *r) {
    moe_activate(r->k, r->m->act, r->n * r->d_in, r->p->x, r->p->y);
    return MOE_OK;
}

static moe_real moei_eps_of(moe_real eps) { return eps > 0 ? eps : MOEI_R(1e-5); }

static moe_status moei_layer_norm_forward(const moei_run *r) {
    size_t t;
    for (t = 0; t < r->n; t++)
        moe_layer_norm(r->d_in, r->p->x + t * r->d_in, r->m->tensors[MOE_MODULE_WEIGHT], r->m->tensors[MOE_MODULE_BIAS],
                       moei_eps_of(r->m->eps), r->p->y + t * r->d_in, r->p->mean + t, r->p->rstd + t);
    return MOE_OK;
}

static moe_status moei_rms_norm_forward(const moei_run *r) {
    size_t t;
    for (t = 0; t < r->n; t++)
        moei_rms_norm_row(r->k, r->d_in, r->p->x + t * r->d_in, r->m->tensors[MOE_MODULE_WEIGHT],
                          moei_eps_of(r->m->eps), r->p->y + t * r->d_in, r->p->rstd + t);
    for (t = 0; t < r->n && r->m->bias; t++)
        MOEI_ADD(r->k, r->d_in, r->m->tensors[MOE_MODULE_BIAS], r->p->y + t * r->d_in);
    return MOE_OK;
}

static moe_status moei_embedding_forward(const moei_run *r) {
    const moe_external *w = r->pass->training ? NULL : moei_external_of(r->m, MOE_MODULE_WEIGHT);
    size_t t;
    for (t = 0; t < r->n; t++) {
        size_t id = (size_t)r->call->token_ids[t];
        moe_real *y = r->p->y + t * r->d_out;
        if (w != NULL) w->type->unpack(r->k, w, id, 0, r->d_out, y);
        else memcpy(y, r->m->tensors[MOE_MODULE_WEIGHT] + id * r->d_out, r->d_out * sizeof(moe_real));
    }
    return MOE_OK;
}

static moe_status moei_positions_forward(const moei_run *r) {
    size_t i, from, to;
    memcpy(r->p->y, r->p->x, r->n * r->d_in * sizeof(moe_real));
    for (i = 0; moei_sequence(r->call, i, &from, &to); i++)
        MOEI_ADD(r->k, (to - from) * r->d_in, r->m->tensors[MOE_MODULE_WEIGHT] + r->pass->past * r->d_in,
                 r->p->y + from * r->d_in);
    return MOE_OK;
}

/* Skips the random numbers of other processes' tokens, `each` per token. */
static void moei_skip(moe_rng *rng, size_t tokens, size_t each) {
    for (tokens *= each; tokens > 0; tokens--) (void)moe_rng_next(rng);
}

/* y = x where it is kept, times 1 / (1 - rate). */
static moe_status moei_dropout_forward(const moei_run *r) {
    moe_real factor = MOEI_R(1.0) / (MOEI_R(1.0) - r->m->rate);
    int draws = r->pass->training && r->m->rate > 0;
    size_t i;
    if (draws) moei_skip(r->call->rng, r->pass->first, r->d_in);
    memcpy(r->p->y, r->p->x, r->n * r->d_in * sizeof(moe_real));
    for (i = 0; r->pass->training && i < r->n * r->d_in; i++) {
        r->p->stays[i] = !(r->m->rate > 0) || moe_rng_uniform(r->call->rng) >= r->m->rate;
        r->p->y[i] = r->p->stays[i] ? r->p->x[i] * factor : 0;
    }
    if (draws) moei_skip(r->call->rng, r->pass->total - r->pass->first - r->n, r->d_in);
    return MOE_OK;
}

/* ---- attention ---- */

/* out = in W^T + bias for tokens [at, at + count), W the parameter `place` [o,i]; 0 for padding. in
   is [N,i] and begins with token 0, out [count,o] with token `at`. */
static void moei_project(const moei_run *r, int place, int bias, size_t at, size_t count, size_t i, size_t o,
                         const moe_real *in, moe_real *out) {
    size_t run, length;
    if (r->call->mask != NULL) memset(out, 0, count * o * sizeof(moe_real));
    for (run = at; (length = moei_real_run(r->call, &run, at + count)) > 0; run += length)
        moei_module_product(r, place, bias, 0, length, i, o, in + run * i, i, out + (run - at) * o, o);
}

/* The angle of pair i per position. */
static double moei_rotary_step(const moe_module *m, size_t i) {
    const moe_attention_config *c = &m->attention;
    const size_t pairs = moei_rotary_dims(c) / 2;
    double half = (double)pairs, base = (double)c->rotary_base;
    double step = MOEI_D(pow)(base, -(double)i / half), length = (double)c->rotary_length;
    double factor = c->rotary_factor > 0 ? (double)c->rotary_factor : 1.0, low, high, part;
    const double turn = 6.283185307179586476925;
    switch (c->rotary_scaling) {
    case MOE_ROTARY_LINEAR: return step / factor;
    case MOE_ROTARY_FACTORS: return step / (double)m->tensors[MOE_MODULE_ROTARY_FACTORS][i];
    case MOE_ROTARY_YARN:
        low = c->beta_fast > 0 ? (double)c->beta_fast : 32.0;
        high = c->beta_slow > 0 ? (double)c->beta_slow : 1.0;
        low = half * MOEI_D(log)(length / (turn * low)) / MOEI_D(log)(base);
        high = half * MOEI_D(log)(length / (turn * high)) / MOEI_D(log)(base);
        if (!c->no_truncation) {
            low = MOEI_D(floor)(low);
            high = -MOEI_D(floor)(-high);
        }
        low = low > 0.0 ? low : 0.0;
        high = high < 2.0 * half - 1.0 ? high : 2.0 * half - 1.0;
        part = ((double)i - low) / (high - low > 0.001 ? high - low : 0.001);
        break;
    case MOE_ROTARY_LLAMA3:
        low = c->low_factor > 0 ? (double)c->low_factor : 1.0;
        high = c->high_factor > 0 ? (double)c->high_factor : 4.0;
        part = (high - length * step / turn) / (high - low);
        break;
    default: return step;
    }
    part = part > 0.0 ? part < 1.0 ? part : 1.0 : 0.0; /* the share that is divided by factor */
    return step * (part / factor + (1.0 - part));
}

/* The factor on cosines and sines. */
static double moei_rotary_magnitude(const moe_attention_config *c) {
    if (c->rotary_magnitude > 0) return (double)c->rotary_magnitude;
    if (c->rotary_scaling != MOE_ROTARY_YARN || !(c->rotary_factor > MOEI_R(1.0))) return 1.0;
    return 1.0 + 0.1 * MOEI_D(log)((double)c->rotary_factor);
}

/* Cosines and sines for the positions of this call, in double: float angles of late positions would
   be inaccurate. */
static void moei_rotations_fill(const moei_run *r, moe_real *rotations) {
    size_t half = moei_rotary_dims(&r->m->attention) / 2, i, t, from, to, longest = 0;
    double magnitude = moei_rotary_magnitude(&r->m->attention);
    for (i = 0; moei_sequence(r->call, i, &from, &to); i++)
        if (to - from > longest) longest = to - from;
    for (i = 0; i < half; i++) {
        double step = moei_rotary_step(r->m, i);
        for (t = 0; t < longest; t++) {
            double angle = (double)(r->pass->past + t) * step;
            rotations[2 * t * half + i] = (moe_real)(MOEI_D(cos)(angle) * magnitude);
            rotations[(2 * t + 1) * half + i] = (moe_real)(MOEI_D(sin)(angle) * magnitude);
        }
    }
}

static moei_row_kind moei_row_kind_of(const moei_run *r, int is_query) {
    const moe_attention_config *c = &r->m->attention;
    int gain = is_query ? MOE_MODULE_QUERY_NORM : MOE_MODULE_KEY_NORM;
    moei_row_kind kind;
    kind.k = r->k;
    kind.heads = is_query ? r->p->t.s.heads : r->p->t.s.kv;
    kind.width = is_query || c->kv_lora == 0 ? (size_t)c->d_head : r->p->t.s.w;
    kind.pairs = c->rotary ? moei_rotary_dims(c) / 2 : 0;
    kind.rotated = c->kv_lora > 0 ? kind.width - 2 * kind.pairs : 0;
    kind.neighbours = c->rotary_neighbours;
    kind.normed = c->qk_norm == MOE_QK_NORM_NONE ? 0 : c->norm_after ? 2 : 1;
    kind.norms = c->qk_norm == MOE_QK_NORM_WHOLE ? 1 : kind.heads;
    kind.eps = moei_eps_of(c->eps);
    kind.clamp = c->clamp;
    kind.growth = c->query_growth > 0 ? (double)c->query_growth : 0.1;
    kind.floor = is_query ? (size_t)c->query_floor : 0;
    kind.gain = r->m->tensors[gain];
    kind.d_gain = r->m->gradients[gain];
    kind.room = moei_run_room(r).row;
    return kind;
}

/* The rotations of token t of the call. */
static const moe_real *moei_rotation_at(const moei_run *r, const moe_real *rotations, size_t t) {
    return rotations != NULL ? rotations + t * moei_rotary_dims(&r->m->attention) : NULL;
}

/* Finishes the queries or keys of tokens [at, at + count); rows begins with token `at`. */
static void moei_rows_finish(const moei_run *r, int is_query, size_t at, size_t count, moe_real *rows) {
    moei_row_kind kind = moei_row_kind_of(r, is_query);
    const moe_real *rotations = r->pass->modules[moei_rotation_of(r->net, r->i)].rotations;
    size_t i, t, from, to;
    for (i = 0; moei_sequence(r->call, i, &from, &to); i++)
        for (t = from > at ? from : at; t < to && t < at + count; t++)
            moei_row_finish(&kind, moei_rotation_at(r, rotations, t - from), r->pass->past + t - from,
                            rows + (t - at) * kind.heads * kind.width);
}

/* ---- attention: keys and values, in the workspace or in a cache ---- */

/* The number of tokens whose keys and values a cache for `most` tokens keeps. */
static size_t moei_cache_capacity(const moe_attention_config *c, size_t most) {
    size_t window = (size_t)c->window + MOEI_WINDOW_STEP + MOEI_WINDOW_PIECE;
    size_t chunk = (size_t)c->chunk + MOEI_WINDOW_PIECE;
    if (c->window > 0 && window < most) most = window;
    return c->chunk > 0 && chunk < most ? chunk : most;
}

/* Makes room for tokens [at, at + count) of the call in a cache that keeps a window: drops what no
   later token sees. */
static moe_status moei_cache_slide(const moei_run *r, size_t at, size_t count) {
    size_t position = r->pass->past + at;
    r->p->t.first = position > 0 ? *r->p->first : 0;
    if (!moei_keys_slide(&r->p->t, position, count))
        return moei_error(r->call->error, MOE_ERR_STATE,
                          "cache.n_tokens = %z: the window's earlier tokens are gone; 0 begins a new sequence",
                          r->pass->past);
    *r->p->first = r->p->t.first;
    return MOE_OK;
}

/* ---- attention: multi-head latent attention ---- */

/* The d_head - rotary_dims dimensions of a head that are not rotated. */
static size_t moei_mla_plain(const moe_attention_config *c) { return (size_t)(c->d_head - c->rotary_dims); }

/* q of the latent keys: K_h^T of the plain part of each head, then its rotated part. */
static void moei_mla_queries(const moei_run *r) {
    const moe_attention_config *c = &r->m->attention;
    moei_heads s = r->p->t.s;
    size_t n = moei_mla_plain(c), width = s.heads * (size_t)c->d_head, h, t;
    for (h = 0; h < s.heads; h++) {
        const moe_real *from = r->p->query_heads + h * (size_t)c->d_head;
        moei_mla_product(r, h, n, s.u, from, width, r->p->t.q + h * s.w, s.q);
        for (t = 0; t < r->n; t++)
            memcpy(r->p->t.q + t * s.q + h * s.w + s.u, from + t * width + n, (s.w - s.u) * sizeof(moe_real));
    }
}

/* Computes the queries. */
static void moei_queries_make(const moei_run *r) {
    const moe_attention_config *c = &r->m->attention;
    moei_heads s = r->p->t.s;
    size_t lora = (size_t)c->q_lora, width = s.heads * (size_t)c->d_head, t;
    moe_real *rows = c->kv_lora > 0 ? r->p->query_heads : r->p->t.q;
    const moe_real *in = lora > 0 ? r->p->query_normed : r->p->x;
    if (lora > 0) moei_project(r, MOE_MODULE_QUERY_DOWN, 0, 0, r->n, r->d_in, lora, r->p->x, r->p->query_down);
    for (t = 0; t < r->n && lora > 0; t++)
        moei_rms_norm_row(r->k, lora, r->p->query_down + t * lora, r->m->tensors[MOE_MODULE_QUERY_NORM],
                          moei_eps_of(c->eps), r->p->query_normed + t * lora, NULL);
    moei_project(r, MOE_MODULE_QUERY, c->bias ? MOE_MODULE_QUERY_BIAS : 0, 0, r->n, lora > 0 ? lora : r->d_in, width,
                 in, rows);
    if (r->p->raw[0] != NULL) memcpy(r->p->raw[0], rows, r->n * width * sizeof(moe_real));
    moei_rows_finish(r, 1, 0, r->n, rows);
    if (c->kv_lora > 0) moei_mla_queries(r);
}

/* Computes the keys and values of tokens [at, at + count) into rows k and v. */
static void moei_keys_make(const moei_run *r, size_t at, size_t count, moe_real *k, moe_real *v) {
    const moe_attention_config *c = &r->m->attention;
    moei_heads s = r->p->t.s;
    int latent = c->kv_lora > 0;
    size_t t;
    moei_project(r, latent ? MOE_MODULE_LATENT : MOE_MODULE_KEY, c->bias ? MOE_MODULE_KEY_BIAS : 0, at, count, r->d_in,
                 s.k, r->p->x, k);
    if (r->p->raw[1] != NULL) memcpy(r->p->raw[1] + at * s.k, k, count * s.k * sizeof(moe_real));
    for (t = 0; t < count && latent; t++)
        moei_rms_norm_row(r->k, s.u, k + t * s.k, r->m->tensors[MOE_MODULE_LATENT_NORM], moei_eps_of(c->eps),
                          k + t * s.k, NULL);
    moei_rows_finish(r, 0, at, count, k);
    if (latent) return;
    moei_project(r, MOE_MODULE_VALUE, c->bias ? MOE_MODULE_VALUE_BIAS : 0, at, count, r->d_in, s.v, r->p->x, v);
    if (r->p->raw[2] != NULL) memcpy(r->p->raw[2] + at * s.v, v, count * s.v * sizeof(moe_real));
    moei_row_clamp(c->clamp, count * s.v, v);
}

/* o: of past tokens from the cache, of the call's tokens heads * output_h v_h, so that the mean
   over heads of A o is y (without its bias). v [count] begins with token `at`. */
static void moei_attention_outputs(const moei_run *r, size_t at, size_t count, const moe_real *v) {
    moei_heads s = r->p->t.s;
    size_t past = r->pass->past, h, i;
    for (h = 0; h < s.heads; h++) {
        moe_real *o = r->p->outputs + h * (past + r->n) * r->d_out;
        if (past > 0 && at == 0)
            memcpy(o, r->p->past_outputs + h * r->pass->most * r->d_out, past * r->d_out * sizeof(moe_real));
        o += (past + at) * r->d_out;
        moe_matmul(r->k, MOE_MATMUL_NT, MOE_TYPE_REAL, count, r->d_out, s.u, v + h / s.group * s.u, s.v,
                   r->m->tensors[MOE_MODULE_OUTPUT] + h * s.u, s.mixed, o, r->d_out, 0);
        for (i = 0; i < count * r->d_out; i++) o[i] *= (moe_real)s.heads;
        if (r->p->past_outputs != NULL)
            memcpy(r->p->past_outputs + (h * r->pass->most + past + at) * r->d_out, o,
                   count * r->d_out * sizeof(moe_real));
    }
}

/* Computes y from the mixed rows; latent ones first go through each head's V_h. */
static void moei_attention_output(const moei_run *r) {
    const moe_attention_config *c = &r->m->attention;
    moei_heads s = r->p->t.s;
    size_t value = moei_head_value(c), n = c->kv_lora > 0 ? moei_mla_plain(c) : 0, h;
    const moe_real *in = c->kv_lora > 0 ? r->p->values : r->p->t.mixed;
    for (h = 0; h < s.heads && c->kv_lora > 0; h++) {
        int joint = moei_is_joint(r->m);
        moei_module_product(r, joint ? MOE_MODULE_KEY : MOE_MODULE_VALUE, 0, joint ? h * (n + value) + n : h * value,
                            r->n, s.u, value, r->p->t.mixed + h * s.u, s.mixed, r->p->values + h * value,
                            s.heads * value);
    }
    moei_project(r, MOE_MODULE_OUTPUT, c->output_bias ? MOE_MODULE_OUTPUT_BIAS : 0, 0, r->n, s.heads * value, r->d_out,
                 in, r->p->y);
}

/* The blocks of a sequence; each task has `room` numbers of every array of scores. */
typedef struct moei_attend_tasks {
    const moei_attend *t;
    size_t from, to, at, count, room;
    void (*work)(const moei_attend *t, const moei_queries *b);
} moei_attend_tasks;

static void moei_attend_task(void *work, int index) {
    const moei_attend_tasks *all = (const moei_attend_tasks *)work;
    moei_attend t = *all->t;
    size_t skip = (size_t)index * all->room;
    t.task = (size_t)index;
    t.a += skip;
    if (t.d_a != NULL) t.d_a += skip;
    if (t.slopes != NULL) t.slopes += skip;
    moei_attend_blocks(&t, all->from, all->to, all->at, all->count, all->work);
}

/* The threads for `count` queries. Those of a forward pass divide the rows of scores; a backward
   pass needs whole blocks, in whose order it sums. */
static moe_parallel moei_attention_team(const moei_run *r, const moei_room *room, size_t count) {
    const moei_attend *t = &r->p->t;
    const size_t least = room->d_a != NULL ? room->rows / room->parts : count == 1 ? t->s.group : 8;
    const double each = (double)(t->s.w + t->s.u) * (double)t->s.heads * (double)(t->past + t->n);
    moe_parallel team = moei_team_for(r->call, each, count, 0);
    if ((size_t)team.threads > room->rows / least) team.threads = (int)(room->rows / least);
    if (team.threads < 1 || room->keys != NULL) team.threads = 1;
    return team;
}

/* work(block) for the queries of tokens [at, at + count). */
static void moei_attention_blocks(const moei_run *r, size_t at, size_t count,
                                  void (*work)(const moei_attend *t, const moei_queries *b)) {
    moei_room room = moei_run_room(r);
    moei_attend *t = &r->p->t;
    moe_parallel team;
    moei_attend_tasks all = {t, 0, 0, at, count, 0, work};
    size_t i;
    t->n = r->n;
    t->past = r->pass->past;
    t->mask = r->call->mask;
    t->first = r->p->first != NULL ? *r->p->first : 0;
    t->unpacked = room.keys;
    t->a = room.a;
    t->d_a = room.d_a;
    t->slopes = room.slopes;
    t->d_weights = r->p->d_weights;
    t->d_q = room.d_q;
    t->d_keys = room.d_k;
    t->d_values = room.d_v;
    t->d_values_step = room.d_v_step;
    t->d_mixed = room.d_mixed;
    t->d_sinks = r->m->gradients[MOE_MODULE_SINKS];
    team = moei_attention_team(r, &room, count);
    t->n_tasks = (size_t)team.threads;
    t->rows = moei_smaller(room.rows / t->n_tasks, MOEI_ATTENTION_ROWS);
    all.room = room.rows / t->n_tasks * room.columns;
    for (i = 0; moei_sequence(r->call, i, &all.from, &all.to); i++) {
        if (team.threads > 1) team.run(team.ctx, moei_attend_task, &all, team.threads);
        else moei_attend_blocks(t, all.from, all.to, at, count, work);
    }
}

/* With a cache that keeps a window, the tokens of a call are processed in pieces, and the earliest
   are dropped. */
static moe_status moei_attention_forward(const moei_run *r) {
    moei_heads s = r->p->t.s;
    size_t cells = s.heads * r->n * (r->pass->past + r->n), at, count;
    moe_status status = MOE_OK;
    if (r->p->rotations != NULL) moei_rotations_fill(r, r->p->rotations);
    moei_queries_make(r);
    if (r->p->t.weights != NULL) memset(r->p->t.weights, 0, cells * sizeof(moe_real));
    for (at = 0; at < r->n; at += count) {
        size_t place = at;
        count = r->n - at;
        if (r->p->first != NULL && count > MOEI_WINDOW_PIECE) count = MOEI_WINDOW_PIECE;
        if (r->p->first != NULL && (status = moei_cache_slide(r, at, count)) != MOE_OK) return status;
        if (r->p->t.cells[0] == NULL) place += r->pass->past - (r->p->first != NULL ? *r->p->first : 0);
        moei_keys_make(r, at, count, r->p->t.keys + place * s.k, r->p->t.values + place * s.v);
        if (r->p->t.cells[0] != NULL)
            moei_keys_keep(&r->p->t, r->pass->past + at, count, r->p->t.keys + place * s.k,
                           r->p->t.values + place * s.v);
        moei_attention_blocks(r, at, count, moei_block_forward);
        if (r->p->outputs != NULL) moei_attention_outputs(r, at, count, r->p->t.values + place * s.v);
    }
    moei_attention_output(r);
    return status;
}

/* ---- convolution ---- */

static moei_convolve moei_convolve_of(const moei_run *r, size_t from, const moe_real *state) {
    moei_convolve v;
    v.d = r->d_in;
    v.length = (size_t)r->m->length;
    v.past = r->pass->past;
    v.taps = r->m->tensors[MOE_MODULE_TAPS];
    v.parts = r->p->parts + from * 3 * r->d_in;
    v.state = state;
    return v;
}

/* Decoding: *now is the state before the call, *next gets the one after it, in place of an older
   one, so a failed call changes nothing. */
static moe_status moei_convolution_states(const moei_run *r, const moe_real **now, moe_real **next) {
    size_t size = (size_t)(r->m->length - 1) * r->d_in, past = r->pass->past;
    size_t i = 0;
    *now = NULL;
    *next = NULL;
    if (r->p->counts == NULL) return MOE_OK;
    if (past == 0) r->p->counts[0] = 0;
    else
        while (i < 2 && r->p->counts[i] != past) i++;
    if (i == 2)
        return moei_error(r->call->error, MOE_ERR_STATE,
                          "cache.n_tokens = %z: the tokens before it are gone; 0 begins a new sequence", past);
    *now = r->p->states + i * size;
    *next = r->p->states + (1 - i) * size;
    r->p->counts[1 - i] = past + r->n;
    return MOE_OK;
}

static moe_status moei_convolution_forward(const moei_run *r) {
    size_t d = r->d_in, i, from, to;
    const moe_real *state;
    moe_real *next;
    moei_convolve v;
    moe_status status = moei_convolution_states(r, &state, &next);
    if (status != MOE_OK) return status;
    moei_project(r, MOE_MODULE_IN, 0, 0, r->n, d, 3 * d, r->p->x, r->p->parts);
    for (i = 0; moei_sequence(r->call, i, &from, &to); i++) {
        v = moei_convolve_of(r, from, state);
        moei_convolve_forward(&v, to - from, r->p->t.mixed + from * d);
        if (next != NULL) moei_convolve_state(&v, to, next);
    }
    moei_project(r, MOE_MODULE_OUT, 0, 0, r->n, d, d, r->p->t.mixed, r->p->y);
    return MOE_OK;
}

/* ---- modules that are layers ---- */

/* The call has no inputs of routers and no mask: padding is processed like any row. */
static moe_status moei_feed_forward_forward(const moei_run *r) {
    moe_call call;
    memset(&call, 0, sizeof call);
    call.n_tokens = r->n;
    call.x = r->p->x;
    call.parallel = r->call->parallel;
    call.training = r->call->training;
    call.keep = r->call->keep;
    call.error = r->call->error;
    return moe_layer_forward(&r->m->layer, &call, r->p->y, r->p->work, r->p->work_size, r->p->layer);
}

/* The experts that process a token after capacity, and their weights, for the next mixture. */
static void moei_mixture_previous(const moei_run *r, moe_call *call) {
    size_t at = moei_previous_mixture(r->net, r->i), width = r->p->n_previous, t, j;
    const moe_routing *before = &r->pass->modules[at].layer->routing;
    /* with global routing it covers all ranks' tokens */
    size_t first = before->first;
    int soft = before->plan.rows > 0;
    for (t = 0; t < r->n; t++)
        for (j = 0; j < width; j++) {
            size_t to = t * width + j, choice = (first + t) * before->max_choices + j;
            int kept = soft ? moei_is_real(call, t) : j < (size_t)before->n_choices[first + t] && before->kept[choice];
            r->p->previous_experts[to] = !kept ? -1 : soft ? (int32_t)j : before->choices[choice];
            r->p->previous_weights[to] =
                kept ? before->weights[(first + t) * before->n_experts + (size_t)r->p->previous_experts[to]]
                     : 0;
        }
    call->previous_input = r->pass->modules[at].x;
    call->previous_experts = r->p->previous_experts;
    call->previous_weights = r->p->previous_weights;
    call->n_previous = width;
}

/* The previous mixture's logits, for router_residual, and where gradients of logits go. */
static void moei_mixture_residual(const moei_run *r, moe_call *call) {
    size_t at = moei_previous_mixture(r->net, r->i);
    call->previous_logits = NULL;
    call->d_previous_logits = NULL;
    call->d_clean_logits = r->p->d_logits;
    if (!r->m->layer.config.router.router_residual || at == r->i) return;
    call->previous_logits = r->pass->modules[at].layer->routing.clean_logits;
    call->d_previous_logits = r->pass->modules[at].d_logits;
}

/* Advances given and teacher past those of the mixtures before this one. */
static void moei_mixture_own(const moei_run *r, moe_call *call) {
    size_t j;
    for (j = 0; j < r->i; j++) {
        const moe_module *m = &r->net->modules[j];
        if (m->kind != MOE_MODULE_MIXTURE || moei_is_soft(&m->layer.config.router)) continue;
        if (call->given != NULL) call->given += r->n * moei_max_choices(&m->layer.config.router);
        if (call->teacher != NULL) call->teacher += r->n * (size_t)m->layer.config.router.n_experts;
    }
    if (moei_is_soft(&r->m->layer.config.router)) call->given = NULL;
}

/* The arrays of the attention that this router reads and, in training, where their gradients go:
   that of its output is the gradient of the next module's input. */
static void moei_mixture_attention(const moei_run *r, moe_call *call) {
    size_t at = moei_attention_read(r->net, r->i);
    const struct moe_module_pass *p = &r->pass->modules[at];
    if (at == r->i) return;
    call->attention_weights = p->t.weights;
    call->attention_outputs = p->outputs;
    call->attention_output = p->y;
    if (!call->training) return;
    call->d_attention_weights = p->d_weights;
    call->d_attention_outputs = p->d_outputs;
    call->d_attention_output = r->pass->modules[at + 1].d_x;
}

/* raw_input: the first of the norms directly before module i, whose input the router reads; i if
   there is none. */
static size_t moei_first_norm(const moe_net *net, size_t i) {
    size_t at = i;
    if (!net->modules[i].layer.config.router.raw_input) return i;
    while (at > 0 && (net->modules[at - 1].kind == MOE_MODULE_RMS_NORM ||
                      net->modules[at - 1].kind == MOE_MODULE_LAYER_NORM))
        at--;
    return at;
}

/* Decoding: supplies what refining reads of earlier tokens. */
static void moei_mixture_past(const moei_run *r, moe_call *call) {
    if (r->pass->most == 0) return;
    call->decoding = 1;
    if (r->p->past_u == NULL) return;
    call->n_past = r->pass->past;
    call->past_u = r->p->past_u;
    call->past_gate = r->p->past_gate;
}

/* Stores what refining will read of the call's tokens. */
static void moei_mixture_remember(const moei_run *r) {
    const moe_routing *routing = &r->p->layer->routing;
    size_t experts = routing->n_experts;
    if (r->p->past_u == NULL || r->n == 0) return;
    memcpy(r->p->past_u + r->pass->past * r->d_in, routing->u, r->n * r->d_in * sizeof(moe_real));
    memcpy(r->p->past_gate + r->pass->past * experts, routing->gate, r->n * experts * sizeof(moe_real));
}

static moe_status moei_mixture_forward(const moei_run *r) {
    moe_call call = *r->call;
    moe_status status;
    call.x = r->p->x;
    moei_mixture_own(r, &call);
    moei_mixture_attention(r, &call);
    moei_mixture_residual(r, &call);
    moei_mixture_past(r, &call);
    if (moei_first_norm(r->net, r->i) < r->i) call.router_x = r->pass->modules[moei_first_norm(r->net, r->i)].x;
    if (r->p->n_previous > 0) moei_mixture_previous(r, &call);
    status = moe_layer_forward(&r->m->layer, &call, r->p->y, r->p->work, r->p->work_size, r->p->layer);
    if (status == MOE_OK) moei_mixture_remember(r);
    return status;
}

static moe_status moei_residual_forward(const moei_run *r) {
    const moe_real *earlier = r->pass->modules[r->i - (size_t)r->m->span].x;
    size_t i;
    for (i = 0; i < r->n * r->d_in; i++) r->p->y[i] = r->p->x[i] + earlier[i];
    return MOE_OK;
}

/* s; 0 means 1. */
static moe_real moei_scale_of(const moe_module *m) {
    return m->scale < 0 || m->scale > 0 ? m->scale : MOEI_R(1.0);
}

static moe_status moei_scale_forward(const moei_run *r) {
    moe_real scale = moei_scale_of(r->m), cap = r->m->cap;
    size_t i;
    for (i = 0; i < r->n * r->d_in; i++) {
        r->p->y[i] = scale * r->p->x[i];
        if (cap > 0) r->p->y[i] = cap * MOEI_F(tanh)(r->p->y[i] / cap);
    }
    return MOE_OK;
}

#ifndef MOE_NO_TRAIN

/* dy/dx = s, with a cap s (1 - (y / c)^2). */
static moe_status moei_scale_backward(const moei_run *r) {
    moe_real scale = moei_scale_of(r->m), cap = r->m->cap;
    size_t i;
    for (i = 0; r->dx != NULL && i < r->n * r->d_in; i++) {
        moe_real part = cap > 0 ? r->p->y[i] / cap : 0;
        r->dx[i] += r->dy[i] * scale * (MOEI_R(1.0) - part * part);
    }
    return MOE_OK;
}

/* A task's columns of d_in += d_out W, then its rows of dW += d_out^T in and d_bias += d_out. */
static void moei_gradient_task(void *work, int index) {
    const moei_rows_product *p = (const moei_rows_product *)work;
    moe_real *d_w = p->r->m->gradients[p->place];
    moe_real *d_bias = p->bias != 0 ? p->r->m->gradients[p->bias] : NULL;
    const moe_kernels *k = p->r->k;
    size_t j, to, t;
    moei_columns_of(p->i, index, p->n_tasks, &j, &to);
    if (to > j && p->d_in != NULL)
        moe_matmul(k, MOE_MATMUL_NN, MOE_TYPE_REAL, p->n, to - j, p->o, p->d_out, p->o, p->weights + j, p->i,
                   p->d_in + j, p->i, 1);
    moei_columns_of(p->o, index, p->n_tasks, &j, &to);
    if (to > j && d_w != NULL)
        moe_matmul(k, MOE_MATMUL_TN, MOE_TYPE_REAL, to - j, p->i, p->n, p->d_out + j, p->o, p->in, p->i, d_w + j * p->i,
                   p->i, 1);
    for (t = 0; t < p->n && to > j && d_bias != NULL; t++) MOEI_ADD(k, to - j, p->d_out + t * p->o + j, d_bias + j);
}

static void moei_product_backward(const moei_run *r, int place, int bias, size_t n, size_t i, size_t o,
                                  const moe_real *in, const moe_real *d_out, moe_real *d_in) {
    moei_rows_product p = {r, place, bias, 1, 0, n, i, o, i, o, in, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    p.weights = r->m->tensors[place];
    p.d_out = d_out;
    p.d_in = d_in;
    moei_product_run(&p, 2 * n, moei_gradient_task);
}

static moe_status moei_linear_backward(const moei_run *r) {
    moei_product_backward(r, MOE_MODULE_WEIGHT, MOE_MODULE_BIAS, r->n, r->d_in, r->d_out, r->p->x, r->dy, r->dx);
    return MOE_OK;
}

static moe_status moei_activation_backward(const moei_run *r) {
    moe_real *d_act = moei_run_room(r).d_act;
    if (r->dx == NULL) return MOE_OK;
    moe_activate_backward(r->k, r->m->act, r->n * r->d_in, r->p->x, r->dy, d_act);
    MOEI_ADD(r->k, r->n * r->d_in, d_act, r->dx);
    return MOE_OK;
}

static moe_status moei_layer_norm_backward(const moei_run *r) {
    size_t t, at;
    for (t = 0; t < r->n; t++) {
        at = t * r->d_in;
        moe_layer_norm_backward(r->d_in, r->p->x + at, r->m->tensors[MOE_MODULE_WEIGHT], r->p->mean[t], r->p->rstd[t],
                                r->dy + at, r->dx != NULL ? r->dx + at : NULL, r->m->gradients[MOE_MODULE_WEIGHT],
                                r->m->gradients[MOE_MODULE_BIAS]);
    }
    return MOE_OK;
}

static moe_status moei_rms_norm_backward(const moei_run *r) {
    size_t t, at;
    for (t = 0; t < r->n; t++) {
        at = t * r->d_in;
        moei_rms_norm_row_backward(r->k, r->d_in, r->p->x + at, r->m->tensors[MOE_MODULE_WEIGHT], r->p->rstd[t],
                                   r->dy + at, r->dx != NULL ? r->dx + at : NULL, r->m->gradients[MOE_MODULE_WEIGHT]);
        if (r->m->bias) MOEI_ADD(r->k, r->d_in, r->dy + at, r->m->gradients[MOE_MODULE_BIAS]);
    }
    return MOE_OK;
}

static moe_status moei_embedding_backward(const moei_run *r) {
    size_t t;
    for (t = 0; t < r->n; t++)
        MOEI_ADD(r->k, r->d_out, r->dy + t * r->d_out,
                 r->m->gradients[MOE_MODULE_WEIGHT] + (size_t)r->call->token_ids[t] * r->d_out);
    return MOE_OK;
}

static moe_status moei_positions_backward(const moei_run *r) {
    size_t i, from, to;
    if (r->dx != NULL) MOEI_ADD(r->k, r->n * r->d_in, r->dy, r->dx);
    for (i = 0; moei_sequence(r->call, i, &from, &to); i++)
        MOEI_ADD(r->k, (to - from) * r->d_in, r->dy + from * r->d_in, r->m->gradients[MOE_MODULE_WEIGHT]);
    return MOE_OK;
}

static moe_status moei_dropout_backward(const moei_run *r) {
    moe_real factor = MOEI_R(1.0) / (MOEI_R(1.0) - r->m->rate);
    size_t i;
    for (i = 0; r->dx != NULL && i < r->n * r->d_in; i++)
        if (r->p->stays[i]) r->dx[i] += r->dy[i] * factor;
    return MOE_OK;
}

/* The backward pass of moei_project: d_in += d_out W (d_in may be NULL), dW += d_out^T in. */
static void moei_project_backward(const moei_run *r, int place, int bias, size_t i, size_t o, const moe_real *in,
                                  const moe_real *d_out, moe_real *d_in) {
    size_t run, length;
    for (run = 0; (length = moei_real_run(r->call, &run, r->n)) > 0; run += length)
        moei_product_backward(r, place, bias, length, i, o, in + run * i, d_out + run * o,
                              d_in != NULL ? d_in + run * i : NULL);
}

/* The backward pass of o, which routers read: to v and to the output projection. */
static void moei_attention_outputs_backward(const moei_run *r, moe_real *d_v) {
    const moe_kernels *k = r->k;
    moei_heads s = r->p->t.s;
    size_t h, i;
    for (h = 0; h < s.heads; h++) {
        moe_real *d_o = r->p->d_outputs + h * r->n * r->d_out;
        for (i = 0; i < r->n * r->d_out; i++) d_o[i] *= (moe_real)s.heads;
        moe_matmul(k, MOE_MATMUL_NN, MOE_TYPE_REAL, r->n, s.u, r->d_out, d_o, r->d_out,
                   r->m->tensors[MOE_MODULE_OUTPUT] + h * s.u, s.mixed, d_v + h / s.group * s.u, s.v, 1);
        moe_matmul(k, MOE_MATMUL_TN, MOE_TYPE_REAL, r->d_out, s.u, r->n, d_o, r->d_out,
                   r->p->t.values + h / s.group * s.u, s.v, r->m->gradients[MOE_MODULE_OUTPUT] + h * s.u, s.mixed, 1);
    }
}

static void moei_rows_finish_backward(const moei_run *r, int is_query, moe_real *rows) {
    moei_row_kind kind = moei_row_kind_of(r, is_query);
    size_t width = kind.heads * kind.width, i, t, from, to;
    const moe_real *rotations = r->pass->modules[moei_rotation_of(r->net, r->i)].rotations;
    for (i = 0; moei_sequence(r->call, i, &from, &to); i++)
        for (t = from; t < to; t++)
            moei_row_finish_backward(&kind, moei_rotation_at(r, rotations, t - from), t - from,
                                     moei_from_row(r->p->raw[!is_query], t * width), rows + t * width);
}

/* rows := the gradients of x [n,ld], the inputs of a norm of `width` at the beginning of each row,
   from those of its outputs. */
static void moei_norm_rows_backward(const moei_run *r, int gain, size_t width, const moe_real *x, size_t ld,
                                    moe_real *rows) {
    size_t t;
    for (t = 0; t < r->n; t++)
        moei_norm_gradient(r->k, width, x + t * ld, r->m->tensors[gain], moei_eps_of(r->m->attention.eps),
                           rows + t * ld, r->m->gradients[gain], moei_run_room(r).row);
}

/* MLA: the gradients of the heads' values, of V_h, and of mixed from those of the values. */
static void moei_mla_values_backward(const moei_run *r, const moei_room *room) {
    const moe_kernels *k = r->k;
    moei_heads s = r->p->t.s;
    size_t value = moei_head_value(&r->m->attention), n = moei_mla_plain(&r->m->attention), h;
    for (h = 0; h < s.heads; h++) {
        size_t at = (h * (n + value) + n) * s.u;
        const moe_real *d = room->d_values + h * value;
        moe_matmul(k, MOE_MATMUL_NN, MOE_TYPE_REAL, r->n, s.u, value, d, s.heads * value,
                   r->m->tensors[MOE_MODULE_KEY] + at, s.u, room->d_mixed + h * s.u, s.mixed, 0);
        moe_matmul(k, MOE_MATMUL_TN, MOE_TYPE_REAL, value, s.u, r->n, d, s.heads * value, r->p->t.mixed + h * s.u,
                   s.mixed, r->m->gradients[MOE_MODULE_KEY] + at, s.u, 1);
    }
}

/* MLA: the gradients of the heads of queries and of K_h from those of q. */
static void moei_mla_queries_backward(const moei_run *r, const moei_room *room) {
    const moe_attention_config *c = &r->m->attention;
    const moe_kernels *k = r->k;
    moei_heads s = r->p->t.s;
    size_t n = moei_mla_plain(c), width = s.heads * (size_t)c->d_head, h, t;
    for (h = 0; h < s.heads; h++) {
        size_t at = h * (n + moei_head_value(c)) * s.u;
        const moe_real *d = room->d_q + h * s.w;
        moe_real *to = room->d_heads + h * (size_t)c->d_head;
        moe_matmul(k, MOE_MATMUL_NT, MOE_TYPE_REAL, r->n, n, s.u, d, s.q, r->m->tensors[MOE_MODULE_KEY] + at, s.u, to,
                   width, 0);
        moe_matmul(k, MOE_MATMUL_TN, MOE_TYPE_REAL, n, s.u, r->n, r->p->query_heads + h * (size_t)c->d_head, width, d,
                   s.q, r->m->gradients[MOE_MODULE_KEY] + at, s.u, 1);
        for (t = 0; t < r->n; t++) memcpy(to + t * width + n, d + t * s.q + s.u, (s.w - s.u) * sizeof(moe_real));
    }
}

/* The backward pass from queries to x and the parameters. */
static void moei_queries_backward(const moei_run *r, const moei_room *room) {
    const moe_attention_config *c = &r->m->attention;
    moei_heads s = r->p->t.s;
    size_t lora = (size_t)c->q_lora, width = s.heads * (size_t)c->d_head;
    moe_real *rows = c->kv_lora > 0 ? room->d_heads : room->d_q;
    if (c->kv_lora > 0) moei_mla_queries_backward(r, room);
    moei_rows_finish_backward(r, 1, rows);
    if (lora == 0) {
        moei_project_backward(r, MOE_MODULE_QUERY, c->bias ? MOE_MODULE_QUERY_BIAS : 0, r->d_in, width, r->p->x, rows,
                              r->dx);
        return;
    }
    memset(room->d_down, 0, r->n * lora * sizeof(moe_real));
    moei_project_backward(r, MOE_MODULE_QUERY, 0, lora, width, r->p->query_normed, rows, room->d_down);
    moei_norm_rows_backward(r, MOE_MODULE_QUERY_NORM, lora, r->p->query_down, lora, room->d_down);
    moei_project_backward(r, MOE_MODULE_QUERY_DOWN, 0, r->d_in, lora, r->p->x, room->d_down, r->dx);
}

/* The same from keys and values. */
static void moei_keys_backward(const moei_run *r, const moei_room *room) {
    const moe_attention_config *c = &r->m->attention;
    moei_heads s = r->p->t.s;
    int latent = c->kv_lora > 0;
    size_t i;
    for (i = 0; i < r->n && latent; i++) MOEI_ADD(r->k, s.u, room->d_v + i * room->d_v_step, room->d_k + i * s.k);
    moei_rows_finish_backward(r, 0, room->d_k);
    if (latent) moei_norm_rows_backward(r, MOE_MODULE_LATENT_NORM, s.u, r->p->raw[1], s.k, room->d_k);
    moei_project_backward(r, latent ? MOE_MODULE_LATENT : MOE_MODULE_KEY, c->bias ? MOE_MODULE_KEY_BIAS : 0, r->d_in,
                          s.k, r->p->x, room->d_k, r->dx);
    if (latent) return;
    for (i = 0; i < r->n * s.v && c->clamp > 0; i++)
        if (r->p->raw[2][i] > c->clamp || r->p->raw[2][i] < -c->clamp) room->d_v[i] = 0;
    moei_project_backward(r, MOE_MODULE_VALUE, c->bias ? MOE_MODULE_VALUE_BIAS : 0, r->d_in, s.v, r->p->x, room->d_v,
                          r->dx);
}

static moe_status moei_attention_backward(const moei_run *r) {
    const moe_attention_config *c = &r->m->attention;
    moei_heads s = r->p->t.s;
    int latent = c->kv_lora > 0;
    size_t value = moei_head_value(c), i;
    moe_real scale = MOEI_R(1.0) / moei_score_root(c);
    moei_room room = moei_run_room(r);
    memset(room.d_mixed, 0, r->n * s.mixed * sizeof(moe_real));
    memset(room.d_k, 0, r->n * s.k * sizeof(moe_real));
    memset(room.d_v, 0, r->n * room.d_v_step * sizeof(moe_real));
    if (latent) memset(room.d_values, 0, r->n * s.heads * value * sizeof(moe_real));
    moei_project_backward(r, MOE_MODULE_OUTPUT, c->output_bias ? MOE_MODULE_OUTPUT_BIAS : 0, s.heads * value, r->d_out,
                          latent ? r->p->values : r->p->t.mixed, r->dy, latent ? room.d_values : room.d_mixed);
    if (latent) moei_mla_values_backward(r, &room);
    if (r->p->d_outputs != NULL) moei_attention_outputs_backward(r, room.d_v);
    moei_attention_blocks(r, 0, r->n, moei_block_backward);
    for (i = 0; i < r->n * s.q; i++) room.d_q[i] *= scale;
    for (i = 0; i < r->n * s.k; i++) room.d_k[i] *= scale;
    moei_queries_backward(r, &room);
    moei_keys_backward(r, &room);
    return MOE_OK;
}

static moe_status moei_convolution_backward(const moei_run *r) {
    size_t d = r->d_in, i, from, to;
    moe_real *d_mixed = moei_run_room(r).d_rows, *d_parts = d_mixed + r->n * d;
    moei_convolve v;
    memset(d_mixed, 0, r->n * 4 * d * sizeof(moe_real));
    moei_project_backward(r, MOE_MODULE_OUT, 0, d, d, r->p->t.mixed, r->dy, d_mixed);
    for (i = 0; moei_sequence(r->call, i, &from, &to); i++) {
        v = moei_convolve_of(r, from, NULL);
        moei_convolve_backward(&v, to - from, d_mixed + from * d, d_parts + from * 3 * d,
                               r->m->gradients[MOE_MODULE_TAPS]);
    }
    moei_project_backward(r, MOE_MODULE_IN, 0, d, 3 * d, r->p->x, d_parts, r->dx);
    return MOE_OK;
}

static moe_status moei_feed_forward_backward(const moei_run *r) {
    return moe_layer_backward(&r->m->layer, r->dy, r->dx, NULL, r->p->layer);
}

/* The gradient of the input of module `from`, which an earlier module of the backward pass adds to;
   complete before that module needs it, because modules run in reverse order. NULL: not wanted. */
static moe_real *moei_earlier_gradient(const moei_run *r, size_t from) {
    return from > 0 ? r->pass->modules[from].d_x : r->pass->d_x;
}

static moe_status moei_mixture_backward(const moei_run *r) {
    moe_real *raw = moei_earlier_gradient(r, moei_first_norm(r->net, r->i));
    if (r->dy == NULL)
        return moe_layer_backward_experts(&r->m->layer, r->d_outputs, r->d_weights, r->dx, raw, r->p->layer);
    return moe_layer_backward(&r->m->layer, r->dy, r->dx, raw, r->p->layer);
}

static moe_status moei_residual_backward(const moei_run *r) {
    moe_real *earlier = moei_earlier_gradient(r, r->i - (size_t)r->m->span);
    if (r->dx != NULL) MOEI_ADD(r->k, r->n * r->d_in, r->dy, r->dx);
    if (earlier != NULL) MOEI_ADD(r->k, r->n * r->d_in, r->dy, earlier);
    return MOE_OK;
}

#endif

typedef struct moei_module_kind {
    moe_status (*forward)(const moei_run *r);
    moe_status (*backward)(const moei_run *r);
} moei_module_kind;

#define MOEI_MODULE_CODE(value, name, code, fields) \
    {MOEI_KEEP(MODULES, MOE_MODULE_##value, moei_##code##_forward), MOEI_BACKWARD(moei_##code##_backward)},

static const moei_module_kind moei_module_kinds[] = {MOEI_MODULE_KINDS(MOEI_MODULE_CODE)};

/* Whether every token after `past` others has a row in positions. */
static int moei_positions_fit(const moe_module *positions, const moe_call *call, size_t past) {
    size_t i, from, to;
    for (i = 0; moei_sequence(call, i, &from, &to); i++)
        if (to > from && past + (to - from) > (size_t)positions->n_rows) return 0;
    return 1;
}

/* Whether the caller's arrays of attention have a reader, if the network has attentions of its
   own. */
static int moei_supplied_fit(const moe_net *net, const moe_call *call) {
    size_t i, own = 0, others = 0;
    for (i = 0; i < net->n_modules; i++) {
        if (!moei_routes(net, i) ||
            net->modules[i].layer.config.router.refine != MOE_REFINE_ATTENTION)
            continue;
        if (moei_attention_read(net, i) < i) own++;
        else others++;
    }
    return own == 0 || others > 0 ||
           (call->attention_weights == NULL && call->attention_outputs == NULL && call->attention_output == NULL);
}

/* Checks that the caller has set all tensors of a module; a layer checks its own. */
static moe_status moei_module_is_set(const moe_net *net, size_t i, moe_error *error) {
    const moe_module *m = &net->modules[i];
    int place;
    for (place = 0; place < MOE_MODULE_SLOTS && !moei_is_layer(m); place++) {
        const moei_module_tensor t = moei_module_tensor_of(m, place);
        const int in_file = moei_external_of(m, place) != NULL && t.columns > 0 && m->kind != MOE_MODULE_POSITIONS &&
                            (m->kind != MOE_MODULE_CONVOLUTION || place != MOE_MODULE_TAPS) &&
                            (place != MOE_MODULE_OUTPUT || !moei_is_read(net, i));
        if (t.name != NULL && m->tensors[place] == NULL && !in_file)
            return moei_error(error, MOE_ERR_STATE, "module %z (%s): net.external = 1, but %s is not set", i,
                              moei_module_names[m->kind], t.name);
    }
    return MOE_OK;
}

static moe_status moei_module_call_check(const moe_net *net, const moe_call *call, size_t i, size_t past) {
    const moe_module *m = &net->modules[i];
    if (!MOEI_KEPT(MODULES, m->kind) || (m->kind == MOE_MODULE_ACTIVATION && !MOEI_KEPT(ACTS, m->act)))
        return moei_error(call->error, MOE_ERR_UNSUPPORTED,
                          "module %z (%s): a MOE_KEEP_ macro has left it out of this build", i,
                          moei_module_names[m->kind]);
    if (m->kind == MOE_MODULE_EMBEDDING && call->n_tokens > 0 && call->token_ids == NULL)
        return moei_missing(call, "token_ids", "module 0 (embedding)");
    if (m->kind == MOE_MODULE_EMBEDDING)
        return moei_check_indices(call, "token_ids", call->token_ids, call->n_tokens, 0, 0, m->n_rows);
    if (m->kind == MOE_MODULE_POSITIONS && !moei_positions_fit(m, call, past))
        return MOEI_REFUSE(call->error, "module %z (positions): a sequence has more than %d tokens", i, m->n_rows);
    if (m->kind == MOE_MODULE_DROPOUT && call->training && m->rate > 0 && call->rng == NULL)
        return MOEI_REFUSE(call->error, "module %z (dropout): call.rng is NULL, and training draws from it", i);
    return MOE_OK;
}

/* Checks what modules other than mixtures require of a call. */
static moe_status moei_net_call_check(const moe_net *net, const moe_call *call, size_t past) {
    const char *set = NULL;
    moe_status status = MOE_OK;
    size_t i;
    if (!MOEI_FITS_INT32(call->n_tokens))
        return moei_error(call->error, MOE_ERR_OVERFLOW, "call.n_tokens = %z: too many", call->n_tokens);
    if (net->d_in > 0 && call->n_tokens > 0 && call->x == NULL) return MOEI_REFUSE(call->error, "call.x is NULL");
    if (call->router_x != NULL) set = "router_x";
    if (call->activations != NULL) set = "activations";
    if (call->n_past > 0) set = "n_past";
    if (set != NULL) return MOEI_REFUSE(call->error, "call.%s is set: only a call of one layer takes it", set);
    if (call->batch != NULL)
        return MOEI_REFUSE(call->error, "call.batch is set: a net decides over several calls with net.transport only");
    status = moei_offsets_check(call);
    if (status != MOE_OK) return status;
    if (net->external && call->training)
        return moei_error(call->error, MOE_ERR_UNSUPPORTED, "call.training = 1 is incompatible with net.external = 1");
    for (i = 0; i < net->n_modules && net->external && status == MOE_OK; i++)
        status = moei_module_is_set(net, i, call->error);
    if (status != MOE_OK) return status;
    if (!moei_supplied_fit(net, call))
        return MOEI_REFUSE(call->error,
                           "call.attention_* is set, but each router that reads it follows an attention module");
    for (i = 0; i < net->n_modules && status == MOE_OK; i++) status = moei_module_call_check(net, call, i, past);
    return status;
}

/* Prefixes the message in call.error with the module. */
static moe_status moei_module_error(const moei_run *r, moe_status status) {
    moe_error *error = r->call->error, why;
    if (status == MOE_OK || error == NULL) return status;
    why = *error;
    return moei_error(error, status, "module %z (%s): %s", r->i, moei_module_names[r->m->kind], why.message);
}

/* Whether the rows of all real tokens are finite. */
static int moei_rows_finite(const moe_call *call, const moe_real *rows, size_t columns) {
    size_t t;
    for (t = 0; t < call->n_tokens; t++)
        if ((call->mask == NULL || call->mask[t] != 0) && !moei_all_finite(columns, rows + t * columns)) return 0;
    return 1;
}

/* Adds to the message where infinity or NaN arose: the first module before `end` whose output or
   losses have one, else module `end`; and its first such tensor. */
static void moei_nonfinite_source(const moe_net *net, const moe_net_pass *p, size_t end, moe_error *error) {
    const moe_tensor *w = net->tensors;
    const char *name = NULL;
    moe_error why;
    size_t i, t;
    if (error == NULL) return;
    why = *error;
    i = p->most > 0 ? end : 0; /* decoding: outputs may be gone */
    for (; i < end && moei_rows_finite(&p->call, p->modules[i].y, (size_t)net->modules[i].d_out); i++) {
        const moe_routing *routing = moe_net_routing(net, p, i);
        if (routing != NULL && !moei_all_finite(MOE_LOSS_COUNT, routing->loss)) break;
    }
    if (i == net->n_modules) return; /* the loss overflowed, or it arose on another rank */
    if (net->d_in > 0 && !moei_rows_finite(&p->call, p->call.x, (size_t)net->d_in)) {
        (void)moei_error(error, why.code, "%s; call.x has it", why.message);
        return;
    }
    for (t = net->modules[i].first_tensor; t < moei_last_tensor(net, i) && name == NULL; t++)
        if (w[t].data != NULL && !moei_all_finite(w[t].count, w[t].data)) name = w[t].name;
    if (name == NULL && net->modules[i].kind == MOE_MODULE_TIED && w->data != NULL &&
        !moei_all_finite(w->count, w->data))
        name = w->name;
    (void)moei_error(error, why.code, "%s; it %s in module %z (%s), %s%s", why.message,
                     p->most > 0 ? "was found" : "arose", i, moei_module_names[net->modules[i].kind],
                     name != NULL ? "tensor " : "whose tensors are finite", name != NULL ? name : "");
}

/* Runs all modules of a pass. Only a feed_forward can fail on one rank alone: the ranks exchange
   the status before the next mixture, or at the end. */
static moe_status moei_net_run(const moe_net *net, const moe_call *call, const moei_tokens *share, moe_net_pass *p) {
    moe_status status = MOE_OK;
    size_t i, rows = call->n_tokens;
    int alone = 0;
    p->n_tokens = call->n_tokens;
    p->training = call->training;
    p->call = *call;
    p->first = share->first;
    p->total = share->total;
    for (i = 0; i < net->n_modules; i++) {
        moei_run r = moei_run_begin(net, p, i);
        if (alone && r.m->kind == MOE_MODULE_MIXTURE) {
            status = moei_vote(net->transport, status, call->error);
            alone = 0;
        }
        if (status != MOE_OK && !alone) return status;
        /* the last one is never read */
        r.p->x = i > 0 ? p->modules[i - 1].y : net->d_in > 0 && call->x != NULL ? call->x : r.p->y;
        if (r.n < rows) r.p->x += (rows - r.n) * r.d_in;
        rows = r.n;
        if (status == MOE_OK) {
            status = moei_module_error(&r, moei_module_kinds[r.m->kind].forward(&r));
            /* it computes padding too */
            if (status != MOE_OK && r.m->kind == MOE_MODULE_FEED_FORWARD) p->call.mask = NULL;
            if (status == MOE_ERR_NONFINITE) moei_nonfinite_source(net, p, i, call->error);
        }
        if (net->transport != NULL && r.m->kind == MOE_MODULE_FEED_FORWARD) alone = 1;
    }
    p->y = p->modules[net->n_modules - 1].y;
    if (net->last_only && p->most > 0 && rows > 1) p->y += (rows - 1) * (size_t)net->d_out;
    return alone ? moei_vote(net->transport, status, call->error) : status;
}

/* Runs a pass that has been checked. A failure leaves rng, of which some ranks drew more. */
static moe_status moei_net_pass(const moe_net *net, const moe_call *call, const moei_tokens *share, void *work,
                                moe_net_pass *pass) {
    moei_layout l = moei_layout_begin(work);
    moei_extent e = moei_extent_of(share->most, moei_keeps(call));
    moe_net_pass p;
    uint64_t state = call->rng != NULL ? call->rng->state : 0;
    moe_status status = moei_net_layout(net, &e, &l, &p);
    if (status == MOE_OK) status = moei_net_run(net, call, share, &p);
    if (status == MOE_OK) *pass = p;
    else if (call->rng != NULL) call->rng->state = state;
    return status;
}

/* Whether work is large enough for a pass. */
static moe_status moei_net_fits(const moe_net *net, const moe_call *call, const moei_extent *e, size_t work_size) {
    size_t size = 0;
    moe_status status = moei_net_size(net, e, &size);
    if (status != MOE_OK)
        return moei_error(call->error, status, "call.n_tokens = %z: the size of the workspace: %s", call->n_tokens,
                          moe_status_text(status));
    if (size <= work_size) return MOE_OK;
    return moei_error(call->error, MOE_ERR_SPACE, "work_size = %z: the call takes %z bytes", work_size, size);
}

/* Checks what does not depend on other processes' tokens. */
static moe_status moei_net_forward_check(const moe_net *net, const moe_call *call, const void *work,
                                         const moe_net_pass *pass) {
    if (call == NULL) return MOE_ERR_ARGUMENT;
    if (work == NULL || pass == NULL) return MOEI_REFUSE(call->error, "%s is NULL", work == NULL ? "work" : "pass");
    if (!net->built) return moei_error(call->error, MOE_ERR_STATE, "the network is not built");
    return moei_net_call_check(net, call, 0);
}

moe_status moe_net_forward(const moe_net *net, const moe_call *call, void *work, size_t work_size, moe_net_pass *pass) {
    const struct moei_hooks *hooks;
    moei_tokens tokens;
    moei_extent e;
    moe_status status;
    if (net == NULL) return moei_error(call != NULL ? call->error : NULL, MOE_ERR_ARGUMENT, "net is NULL");
    status = moei_net_forward_check(net, call, work, pass);
    if ((hooks = moei_hooks_of(net->transport, &status, NULL)) != NULL)
        status = hooks->net_meet(net, call, work_size, status, &tokens);
    if (net->transport == NULL && status == MOE_OK) {
        tokens = moei_tokens_alone(call->n_tokens);
        e = moei_extent_of(tokens.most, moei_keeps(call));
        status = moei_net_fits(net, call, &e, work_size);
    }
    return status == MOE_OK ? moei_net_pass(net, call, &tokens, work, pass) : status;
}

moe_status moe_net_quantize(moe_net *net, int type, void *memory, size_t size, const moe_call *calibration, void *work,
                            size_t work_size, moe_quant_error *errors, moe_error *error) {
    moe_call call;
    moe_rng drawn;
    moe_net_pass exact, packed;
    size_t all = 0, first = 0;
    size_t i, t;
    moe_status status;
    if (net == NULL || errors == NULL) return moe_net_pack(net, type, memory, size, error);
    if (net->transport != NULL)
        return moei_error(error, MOE_ERR_UNSUPPORTED, "a report is of one process: net.transport must be NULL");
    if ((status = moei_report_check(calibration, work, error)) != MOE_OK) return status;
    call = *calibration;
    call.error = error;
    call.training = 0;
    call.keep = 1;
    if (call.rng != NULL) {
        drawn = *call.rng;
        call.rng = &drawn;
    }
    status = moe_net_pack_size(net, type, call.n_tokens, NULL, &all);
    if (status == MOE_OK) status = moe_net_work_size(net, call.n_tokens, 1, &first);
    status = moei_report_room(status, type, all, work_size, error);
    if (status == MOE_OK) status = moe_net_forward(net, &call, work, first, &exact);
    if (status == MOE_OK) status = moe_net_pack(net, type, memory, size, error);
    if (status != MOE_OK) return status;
    call.keep = 0;
    call.rng = calibration->rng; /* both passes draw alike */
    status = moe_net_forward(net, &call, (unsigned char *)work + first, all - first, &packed);
    if (status != MOE_OK) moei_net_unpack(net);
    for (i = 0; i < net->n_modules && status == MOE_OK; i++) {
        const size_t d = (size_t)net->modules[i].d_out;
        double sums[2] = {0.0, 0.0};
        for (t = 0; t < call.n_tokens; t++)
            if (moei_is_real(&call, t))
                moei_add_error(d, exact.modules[i].y + t * d, packed.modules[i].y + t * d, sums);
        errors[i].rows = moei_real_tokens(&call, 0, call.n_tokens);
        errors[i].output = moei_error_of(sums);
    }
    return status;
}

static moe_status moei_net_decodes(const moe_net *net, moe_error *error) {
    moe_error why;
    size_t i;
    if (net == NULL) return MOEI_REFUSE(error, "net must not be NULL");
    if (net->transport != NULL)
        return moei_error(error, MOE_ERR_UNSUPPORTED,
                          "a network on several ranks cannot decode: load its file without transport");
    if (net->cache_type != MOE_TYPE_REAL && net->cache_type != MOE_TYPE_F16 && net->cache_type != MOE_TYPE_BF16 &&
        net->cache_type != MOE_TYPE_Q8_BLOCK)
        return MOEI_REFUSE(error, "net.cache_type = %d: must be MOE_TYPE_REAL, F16, BF16 or Q8_BLOCK", net->cache_type);
    for (i = 0; i < net->n_modules; i++) {
        const moe_module *m = &net->modules[i];
        moe_status status = MOE_OK;
        if (m->kind == MOE_MODULE_ATTENTION && m->attention.full)
            return moei_error(
                error, MOE_ERR_UNSUPPORTED,
                "module %z (attention): full = 1 sees later tokens and cannot decode; full = 0 can",
                i);
        if (m->kind == MOE_MODULE_MIXTURE) status = moe_router_check_decoding(&m->layer.config.router, &why);
        if (status != MOE_OK) return moei_error(error, status, "module %z (mixture): %s", i, why.message);
    }
    return MOE_OK;
}

/* ---- decoding ---- */

static void moei_attention_cache(const moe_net *net, const moe_module *m, size_t most, moei_layout *l,
                                 struct moe_module_pass *p) {
    moei_heads s = moei_heads_of(m);
    int latent = m->attention.kv_lora > 0;
    size_t rows = 0, capacity = moei_cache_capacity(&m->attention, most);
    p->t.capacity = capacity;
    if (capacity < most) p->first = (size_t *)moei_take(l, 1, sizeof *p->first);
    if (net->cache_type == MOE_TYPE_REAL) {
        p->t.keys = moei_take_reals(l, capacity, s.k);
        p->t.values = latent ? p->t.keys : moei_take_reals(l, capacity, s.v);
        return;
    }
    if (!moei_mul(capacity, s.kv, &rows)) l->overflow = 1;
    p->t.cells[0] = (unsigned char *)moei_take(l, rows, moei_kept_size(net->cache_type, s.w));
    if (!latent) p->t.cells[1] = (unsigned char *)moei_take(l, rows, moei_kept_size(net->cache_type, s.u));
}

/* Assigns parts of a cache to the modules of a pass; modules NULL: counts bytes. */
static void moei_cache_layout(const moe_net *net, size_t most, moei_layout *l, struct moe_module_pass *modules) {
    struct moe_module_pass uncounted;
    size_t i, rows = 0;
    for (i = 0; i < net->n_modules; i++) {
        const moe_module *m = &net->modules[i];
        struct moe_module_pass *p = modules != NULL ? &modules[i] : &uncounted;
        if (m->kind == MOE_MODULE_ATTENTION) {
            moei_attention_cache(net, m, most, l, p);
            if (!moei_mul(most, (size_t)m->attention.heads, &rows)) l->overflow = 1;
            if (moei_is_read(net, i)) p->past_outputs = moei_take_reals(l, rows, (size_t)m->d_out);
        }
        if (m->kind == MOE_MODULE_CONVOLUTION) {
            p->counts = (size_t *)moei_take(l, 2, sizeof *p->counts);
            p->states = moei_take_reals(l, 2 * (size_t)(m->length - 1), (size_t)m->d_in);
        }
        if (!moei_refines(m)) continue;
        p->past_u = moei_take_reals(l, most, (size_t)m->d_in);
        p->past_gate = moei_take_reals(l, most, (size_t)m->layer.config.router.n_experts);
    }
}

/* moe_net_decode_size for a network that can decode, without messages, which would triple the code
   of exported float models. */
static moe_status moei_decode_size(const moe_net *net, size_t most, size_t n_tokens, size_t *bytes, size_t *work) {
    moei_extent e = moei_extent_decoding(moei_smaller(n_tokens, most), most);
    moei_layout l = moei_layout_begin(NULL);
    moe_status status = MOE_OK;
    if (!net->built) return MOE_ERR_STATE;
    if (!MOEI_FITS_INT32(most)) return MOE_ERR_OVERFLOW;
    moei_cache_layout(net, most, &l, NULL);
    if (l.overflow) return MOE_ERR_OVERFLOW;
    if (work != NULL) status = moei_net_size(net, &e, work);
    if (status == MOE_OK && bytes != NULL) *bytes = l.used;
    return status;
}

moe_status moe_net_decode_size(const moe_net *net, size_t most, size_t n_tokens, size_t *bytes, size_t *work,
                               moe_error *error) {
    moe_status status = moei_net_decodes(net, error);
    if (status != MOE_OK || (bytes == NULL && work == NULL)) return status;
    if (!net->built) return moei_error(error, MOE_ERR_STATE, "the network is not built");
    status = moei_decode_size(net, most, n_tokens, bytes, work);
    if (status == MOE_OK) return MOE_OK;
    return moei_error(error, status, "most = %z tokens: %s", most, moe_status_text(status));
}

moe_status moe_net_cache_init(moe_cache *cache, const moe_net *net, size_t most, void *memory, size_t size,
                              moe_error *error) {
    size_t wanted;
    moe_status status;
    if (cache == NULL || net == NULL || (memory == NULL && size > 0))
        return MOEI_REFUSE(error, "cache, net and memory must not be NULL");
    status = moe_net_decode_size(net, most, 1, &wanted, NULL, error);
    if (status != MOE_OK) return status;
    if (size < wanted)
        return moei_error(error, MOE_ERR_SPACE, "size = %z: a cache for %z tokens takes %z bytes", size, most, wanted);
    cache->net = net;
    cache->n_tokens = 0;
    cache->most = most;
    cache->memory = memory;
    cache->size = size;
    return MOE_OK;
}

static moe_status moei_decode_check(const moe_net *net, const moe_cache *cache, const moe_call *call) {
    const char *set = NULL;
    if (!net->built) return moei_error(call->error, MOE_ERR_STATE, "the network is not built");
    if (net->transport != NULL)
        return moei_error(call->error, MOE_ERR_UNSUPPORTED, "a network with a transport cannot decode");
    if (cache->net != net || cache->n_tokens > cache->most)
        return MOEI_REFUSE(call->error, "the cache is of another network, or cache.n_tokens is above most");
    if (call->training) set = "training";
    if (call->keep) set = "keep";
    if (call->sequences != NULL) set = "sequences";
    if (call->mask != NULL) set = "mask";
    if (call->past_u != NULL) set = "past_u";
    if (call->past_gate != NULL) set = "past_gate";
    if (set != NULL) return MOEI_REFUSE(call->error, "call.%s is set: decoding does not take it", set);
    if (call->n_tokens > cache->most - cache->n_tokens)
        return moei_error(call->error, MOE_ERR_SPACE, "call.n_tokens = %z: the cache has room for %z more",
                          call->n_tokens, cache->most - cache->n_tokens);
    return moei_net_call_check(net, call, cache->n_tokens);
}

moe_status moe_net_decode(const moe_net *net, moe_cache *cache, const moe_call *call, void *work, size_t work_size,
                          moe_net_pass *pass) {
    moei_layout l = moei_layout_begin(work), of_cache;
    moei_extent e;
    moei_tokens share;
    moe_net_pass p;
    moe_status status;
    if (call == NULL) return MOE_ERR_ARGUMENT;
    if (net == NULL || cache == NULL || work == NULL || pass == NULL)
        return MOEI_REFUSE(call->error, "net, cache, work and pass must not be NULL");
    if ((status = moei_decode_check(net, cache, call)) != MOE_OK) return status;
    e = moei_extent_decoding(call->n_tokens, cache->most);
    if ((status = moei_net_fits(net, call, &e, work_size)) != MOE_OK) return status;
    if ((status = moei_net_layout(net, &e, &l, &p)) != MOE_OK) return status;
    of_cache = moei_layout_begin(cache->memory);
    moei_cache_layout(net, cache->most, &of_cache, p.modules);
    if (of_cache.overflow || of_cache.used > cache->size)
        return moei_error(call->error, MOE_ERR_SPACE, "cache_type or most has changed");
    p.past = cache->n_tokens;
    p.most = cache->most;
    share = moei_tokens_alone(call->n_tokens);
    status = moei_net_run(net, call, &share, &p);
    if (status != MOE_OK) return status;
    cache->n_tokens += call->n_tokens;
    *pass = p;
    return MOE_OK;
}

const moe_routing *moe_net_routing(const moe_net *net, const moe_net_pass *pass, size_t i) {
    if (net == NULL || pass == NULL || pass->modules == NULL || i >= net->n_modules ||
        !moei_routes(net, i))
        return NULL;
    return &pass->modules[i].layer->routing;
}

/* ---- sampling ---- */

#define MOEI_S moe_sampling

static const moe_field moei_sampling_fields[] = {
    MOEI_FLAG(MOEI_S, greedy, "take the largest logit; nothing is drawn"),
    MOEI_REAL(MOEI_S, temperature, 1e-6, 1e6, "divisor of the logits"),
    MOEI_INT(MOEI_S, top_k, 1, (int)((unsigned)-1 / 2), "draw among this many largest logits"),
    MOEI_REAL(MOEI_S, top_p, 0, 1, "draw among the largest of this total probability"),
    MOEI_FIELDS_END};

static moe_status moei_sample_begin(moei_sample *s, const moe_sampling *wanted, size_t n, const moe_real *logits,
                                    moe_error *error) {
    moe_sampling how;
    size_t i;
    moe_status status;
    memset(&how, 0, sizeof how);
    if (wanted != NULL) how = *wanted;
    if ((status = moei_fields_check(moei_sampling_fields, &how, error)) != MOE_OK) return status;
    moei_default_real(&how.temperature, MOEI_R(1.0));
    moei_default_real(&how.top_p, MOEI_R(1.0));
    for (i = 0; i < n; i++)
        if (!moe_is_finite(logits[i]))
            return moei_error(error, MOE_ERR_NONFINITE, "logits[%z] = %g: must be finite", i, (double)logits[i]);
    s->temperature = how.temperature;
    s->top_p = how.top_p;
    s->top_k = how.top_k > 0 ? moei_smaller((size_t)how.top_k, n) : n;
    s->greedy = how.greedy;
    s->n = n;
    s->logits = logits;
    moe_top_k(n, logits, 1, &s->best);
    return MOE_OK;
}

moe_status moe_sample(const moe_sampling *how, size_t n, const moe_real *logits, moe_rng *rng, moe_real *p,
                      int32_t *order, int32_t *token, moe_error *error) {
    moei_sample s;
    moe_status status;
    if (logits == NULL || p == NULL || order == NULL || token == NULL)
        return MOEI_REFUSE(error, "%s must not be NULL",
                           logits == NULL  ? "logits"
                           : p == NULL     ? "p"
                           : order == NULL ? "order"
                                           : "token");
    if (n == 0 || !MOEI_FITS_INT32(n)) return MOEI_REFUSE(error, "n = %z: must be 1 to 2147483647", n);
    if ((status = moei_sample_begin(&s, how, n, logits, error)) != MOE_OK) return status;
    if (!s.greedy && rng == NULL) return MOEI_REFUSE(error, "rng must not be NULL: only greedy = 1 draws nothing");
    s.order = order;
    if (s.greedy) {
        memset(p, 0, n * sizeof *p);
        p[s.best] = MOEI_R(1.0);
        *token = s.best;
    } else *token = moei_sample_draw(&s, rng, p);
    return MOE_OK;
}

/* ---- backward ---- */

#ifndef MOE_NO_TRAIN

/* Zeroes the gradients that later modules add to. */
static void moei_module_zero(const moe_module *m, const struct moe_module_pass *p, size_t n) {
    size_t rows = (size_t)m->attention.heads * n;
    if (p->d_x != NULL) memset(p->d_x, 0, n * (size_t)m->d_in * sizeof(moe_real));
    if (p->d_weights != NULL) memset(p->d_weights, 0, rows * n * sizeof(moe_real));
    if (p->d_outputs != NULL) memset(p->d_outputs, 0, rows * (size_t)m->d_out * sizeof(moe_real));
    if (p->d_logits != NULL)
        memset(p->d_logits, 0, n * (size_t)m->layer.config.router.n_experts * sizeof(moe_real));
}

static moe_status moei_net_backward(const moe_net *net, moe_net_pass *pass, const moei_returned *back, moe_real *dx) {
    moe_status status = MOE_OK;
    size_t i;
    if (net->d_in == 0) dx = NULL;
    pass->d_x = dx;
    for (i = 0; i < net->n_modules; i++) moei_module_zero(&net->modules[i], &pass->modules[i], pass->n_tokens);
    for (i = net->n_modules; i-- > 0 && status == MOE_OK;) {
        moei_run r = moei_run_begin(net, pass, i);
        r.dy = i + 1 < net->n_modules ? pass->modules[i + 1].d_x : back->dy;
        r.d_outputs = back->d_outputs;
        r.d_weights = back->d_weights;
        r.dx = i > 0 ? r.p->d_x : dx;
        status = moei_module_error(&r, moei_module_kinds[r.m->kind].backward(&r));
    }
    return status;
}

moe_status moe_net_backward(const moe_net *net, const moe_real *dy, moe_real *dx, moe_net_pass *pass) {
    moei_returned back;
    moe_status status = MOE_OK;
    if (net == NULL || pass == NULL) return MOE_ERR_ARGUMENT;
    if (!net->built || !net->trainable)
        status = moei_error(pass->call.error, MOE_ERR_STATE, "the network is not built with trainable = 1");
    else if (!pass->training || pass->modules == NULL)
        status = moei_error(pass->call.error, MOE_ERR_STATE, MOEI_NOT_TRAINING);
    else if (dy == NULL && pass->n_tokens > 0) status = MOEI_REFUSE(pass->call.error, "dy is NULL");
    status = moei_vote(net->transport, status, pass->call.error);
    if (status != MOE_OK || pass->total == 0) return status;
    back.dy = dy != NULL ? dy : pass->y; /* unread: there are no rows */
    back.d_outputs = back.d_weights = NULL;
    return moei_net_backward(net, pass, &back, dx);
}

moe_status moe_net_observe(moe_net *net, const moe_net_pass *pass) {
    moe_status status = MOE_OK;
    size_t i;
    if (net == NULL || pass == NULL) return MOE_ERR_ARGUMENT;
    if (!net->built || !net->trainable || !pass->training || pass->modules == NULL) return MOE_ERR_STATE;
    for (i = 0; i < net->n_modules && status == MOE_OK; i++)
        if (moei_routes(net, i))
            status = moe_layer_observe(&net->modules[i].layer, pass->modules[i].layer);
    return status;
}

/* The next factor of all L1 losses with l1_controller = net, by the mean gap of their layers;
   unchanged if there is none or no load has been measured. */
static void moei_net_l1(const moe_net *net, moe_real *factor) {
    moe_real gap = 0;
    size_t i, count = 0;
    for (i = 0; i < net->n_modules; i++) {
        const moe_layer *layer = &net->modules[i].layer;
        const moe_router_config *c = &layer->config.router;
        const moe_real *step = layer->tensors[MOE_ROUTER_STEP], *load = layer->tensors[MOE_ROUTER_LOAD];
        if (!moei_shares_l1(&net->modules[i]) || !(load[c->n_experts] > 0)) continue;
        if (c->freeze_at > 0 && step[0] >= (moe_real)c->freeze_at) continue;
        if (count++ == 0) *factor = layer->tensors[MOE_ROUTER_L1][0];
        gap += moei_l1_gap(c, load);
    }
    if (count > 0) moei_advance_l1(gap, factor);
}

moe_status moe_net_advance(moe_net *net) {
    moe_real factor = 0;
    moe_status status = MOE_OK;
    size_t i;
    if (net == NULL) return MOE_ERR_ARGUMENT;
    if (!net->built || !net->trainable) return MOE_ERR_STATE;
    moei_net_l1(net, &factor);
    for (i = 0; i < net->n_modules && status == MOE_OK; i++) {
        moe_layer *layer = &net->modules[i].layer;
        if (!moei_routes(net, i)) continue;
        status = moe_layer_advance(layer);
        if (status == MOE_OK && moei_shares_l1(&net->modules[i]) && factor > 0)
            moei_layer_memory(layer, MOE_ROUTER_L1)[0] = factor;
    }
    return status;
}

static void moei_net_zero_gradients(moe_net *net) {
    size_t i;
    for (i = 0; net != NULL && i < net->n_tensors; i++)
        if (net->tensors[i].gradient != NULL)
            memset(net->tensors[i].gradient, 0, net->tensors[i].count * sizeof(moe_real));
}

/* ==== >>code_training ========================================================================= */

/* ---- losses ---- */

static size_t moei_count_labeled(size_t n, const int32_t *labels) {
    size_t t, count = 0;
    for (t = 0; t < n; t++) count += labels[t] >= 0;
    return count;
}

/* The sum of exp(y_j - max) over all j but best, the first largest one; they are stored in d (may
   be NULL) too, with 1 at best. */
static moe_real moei_exp_others(const moe_kernels *kernels, size_t n, const moe_real *y, size_t best, moe_real *d) {
    enum { PART = 64 };
    moe_real room[PART], sum = 0;
    size_t from, count;
    for (from = 0; from < n; from += count) {
        moe_real *part = d != NULL ? d + from : room;
        count = moei_smaller(n - from, PART);
        memcpy(part, y + from, count * sizeof *part);
        if (best - from < count) part[best - from] = -MOEI_INFINITY;
        sum += moei_exp_sum(kernels, count, y[best], part);
    }
    if (d != NULL) d[best] = MOEI_R(1.0);
    return sum;
}

/* One row: -log softmax(y)[label], and in d (may be NULL) factor times its gradient, softmax(y)_j -
   [j = label]. log1p keeps small losses exact. */
static moe_real moei_cross_entropy_row(const moe_kernels *kernels, size_t n, const moe_real *y, size_t label,
                                       moe_real factor, moe_real *d) {
    size_t best = moei_max_index(n, y), j;
    moe_real others, share;
    if (!moe_is_finite(y[best])) { /* there is no gradient */
        for (j = 0; d != NULL && j < n; j++) d[j] = y[best] - y[best];
        return moe_log_sum_exp(n, y) - y[label];
    }
    others = moei_exp_others(kernels, n, y, best, d);
    share = factor / (MOEI_R(1.0) + others);
    for (j = 0; d != NULL && j < n; j++) d[j] *= share;
    if (d != NULL) d[label] -= factor;
    return y[best] - y[label] + MOEI_F(log1p)(others);
}

/* These rows' part of the mean over `labeled` rows. */
static moe_real moei_cross_entropy(const moe_kernels *kernels, size_t n, size_t classes, size_t labeled,
                                   const moe_real *y, const int32_t *labels, moe_real *dy) {
    size_t t;
    moe_real over_n = labeled > 0 ? MOEI_R(1.0) / (moe_real)labeled : 0, sum = 0;
    for (t = 0; t < n; t++, y += classes) {
        moe_real *d = dy != NULL ? dy + t * classes : NULL;
        if (labels[t] >= 0) sum += moei_cross_entropy_row(kernels, classes, y, (size_t)labels[t], over_n, d);
        else if (d != NULL) memset(d, 0, classes * sizeof *d);
    }
    return sum * over_n;
}

moe_real moe_cross_entropy(size_t n, size_t classes, const moe_real *y, const int32_t *labels, moe_real *dy) {
    return moei_cross_entropy(NULL, n, classes, moei_count_labeled(n, labels), y, labels, dy);
}

/* These rows' part of the mean over `all` rows. */
static moe_real moei_squared_error(size_t n, size_t width, size_t all, const moe_real *y, const moe_real *targets,
                                   moe_real *dy) {
    moe_real over_n = all > 0 ? MOEI_R(1.0) / (moe_real)all : 0, sum = 0;
    size_t i;
    for (i = 0; i < n * width; i++) {
        moe_real e = y[i] - targets[i];
        sum += e * e;
        if (dy != NULL) dy[i] = over_n * e;
    }
    return MOEI_R(0.5) * sum * over_n;
}

moe_real moe_squared_error(size_t n, size_t width, const moe_real *y, const moe_real *targets, moe_real *dy) {
    return moei_squared_error(n, width, n, y, targets, dy);
}

static const char *const moei_criterion_names[] = {
    "cross_entropy",      "squared_error", "expectation",    "stochastic",
    "stochastic_squared", "jacobs",        "jacobs_squared", NULL};

/* Whether a criterion compares with targets, not with labels. */
static int moei_is_squared(int criterion) {
    return criterion == MOE_CRITERION_SQUARED_ERROR || criterion == MOE_CRITERION_STOCHASTIC_SQUARED ||
           criterion == MOE_CRITERION_JACOBS_SQUARED;
}

/* Whether the loss reads the experts of the last module one by one. */
static int moei_reads_experts(const moe_net *net, int criterion) {
    const moe_module *last = &net->modules[net->n_modules - 1];
    return criterion > MOE_CRITERION_SQUARED_ERROR ||
           (last->kind == MOE_MODULE_MIXTURE && last->layer.config.router.expert_temperature > 0);
}

/* Whether the last module is a mixture that such a loss can read. */
static moe_status moei_mixture_fits(const moe_net *net, int criterion, moe_error *error) {
    const moe_module *last = &net->modules[net->n_modules - 1];
    const moe_router_config *c = &last->layer.config.router;
    const char *name = moei_criterion_names[criterion];
    if (!moei_reads_experts(net, criterion)) return MOE_OK;
    if (net->transport != NULL)
        return moei_error(error, MOE_ERR_UNSUPPORTED,
                          "criterion = %s reads all experts, and net.transport distributes them over ranks", name);
    if (last->kind != MOE_MODULE_MIXTURE)
        return moei_error(error, MOE_ERR_CONFIG, "criterion = %s: the last module must be an MoE layer", name);
    if (c->select != MOE_SELECT_DENSE || c->weight != MOE_WEIGHT_RAW || c->scale < MOEI_R(1.0) ||
        c->scale > MOEI_R(1.0) || c->expert_scale || c->capacity_factor > 0 ||
        c->capacity_factor_eval > 0 || c->drop_capacity > 0 || c->capacity_bound != MOE_BOUND_NONE ||
        c->drop_rule != MOE_DROP_RULE_NONE || c->expert_dropout > 0 || moei_switches(c) || c->student ||
        moei_unseen(&last->layer.config) != NULL)
        return moei_error(error, MOE_ERR_CONFIG,
                          "module %z (mixture): criterion = %s or expert_temperature needs select = dense and weight = "
                          "raw, and nothing beside it",
                          net->n_modules - 1, name);
    if (c->expert_temperature > 0 && (c->gate != MOE_GATE_SOFTMAX || c->refine != MOE_REFINE_NONE))
        return moei_error(error, MOE_ERR_CONFIG,
                          "module %z (mixture): expert_temperature needs gate = softmax without refine",
                          net->n_modules - 1);
    if (net->mixture_losses == NULL)
        return moei_error(
            error, MOE_ERR_UNSUPPORTED,
            "criterion = %s or expert_temperature: set net.mixture_losses = moe_classic_losses(), of moe_classic.h",
            name);
    return MOE_OK;
}

/* These samples' part of the mean over `counted` samples. */
static moe_real moei_criterion(int criterion, const moe_net *net, const moe_data *data, size_t counted,
                               const moe_real *y, moe_real *dy) {
    size_t width = (size_t)net->d_out;
    if (criterion == MOE_CRITERION_CROSS_ENTROPY)
        return moei_cross_entropy(net->kernels, data->n, width, counted, y, data->labels, dy);
    return moei_squared_error(data->n, width, counted, y, data->targets, dy);
}

/* ---- data ---- */

static moe_status moei_reals_check(const char *name, const moe_real *v, size_t n, size_t width, moe_error *error) {
    size_t t, j;
    for (t = 0; t < n; t++)
        for (j = 0; j < width; j++)
            if (!moe_is_finite(v[t * width + j]))
                return moei_error(error, MOE_ERR_NONFINITE, "%s[%z][%z] = %g: must be a finite number", name, t, j,
                                  (double)v[t * width + j]);
    return MOE_OK;
}

/* The bound of token ids: the least number of rows of the embedding and of the tables of hash
   routers. */
static size_t moei_token_ids_end(const moe_net *net) {
    size_t i, end = (size_t)INT32_MAX + 1;
    if (net->modules[0].kind == MOE_MODULE_EMBEDDING) end = net->tensors[net->modules[0].first_tensor].shape[0];
    for (i = 0; i < net->n_modules; i++) {
        const moe_router_config *c = &net->modules[i].layer.config.router;
        if (moei_routes(net, i) && c->table_size > 0 && (size_t)c->table_size < end)
            end = (size_t)c->table_size;
    }
    return end;
}

static moe_status moei_inputs_check(const moe_net *net, const moe_data *data, moe_error *error) {
    size_t t, end = moei_token_ids_end(net);
    int in_call = data->call != NULL && data->call->token_ids != NULL;
    if (net->d_in == 0 && data->token_ids == NULL && !in_call)
        return MOEI_REFUSE(error, "token_ids must not be NULL: the network reads them");
    for (t = 0; data->token_ids != NULL && t < data->n; t++)
        if (data->token_ids[t] < 0 || (size_t)data->token_ids[t] >= end)
            return MOEI_REFUSE(error, "token_ids[%z] = %d: must be 0 to %z", t, (int)data->token_ids[t], end - 1);
    if (net->d_in == 0) return MOE_OK;
    if (data->x == NULL) return MOEI_REFUSE(error, "x must not be NULL");
    return moei_reals_check("x", data->x, data->n, (size_t)net->d_in, error);
}

/* A loss per expert needs a label for every row. */
static moe_status moei_labels_check(const moe_net *net, const moe_data *data, int criterion, moe_error *error) {
    int reads = moei_reads_experts(net, criterion);
    size_t t;
    if (data->labels == NULL) return MOEI_REFUSE(error, "labels must not be NULL for the cross-entropy");
    for (t = 0; t < data->n; t++)
        if (data->labels[t] >= net->d_out || (reads && data->labels[t] < 0))
            return MOEI_REFUSE(error, "labels[%z] = %d: must be 0 to %d%s", t, (int)data->labels[t], net->d_out - 1,
                               reads ? "" : ", or negative: no label");
    return MOE_OK;
}

/* Whether sequences are no longer than positions allow. */
static moe_status moei_length_check(const moe_net *net, const moe_data *data, moe_error *error) {
    size_t i;
    /* these have lengths of their own */
    if (data->call != NULL && data->call->sequences != NULL) return MOE_OK;
    for (i = 0; i < net->n_modules; i++)
        if (net->modules[i].kind == MOE_MODULE_POSITIONS && data->length > (size_t)net->modules[i].n_rows)
            return MOEI_REFUSE(error, "length = %z: module %z (positions) has most = %d", data->length, i,
                               net->modules[i].n_rows);
    return MOE_OK;
}

static moe_status moei_data_check(const moe_net *net, const moe_data *data, int criterion, moe_error *error) {
    moe_status status;
    if (data == NULL) return MOEI_REFUSE(error, "data must not be NULL");
    if (data->n == 0) return MOE_OK;
    if (data->length > 0 && data->n % data->length != 0)
        return MOEI_REFUSE(error, "n = %z: must be a multiple of length = %z", data->n, data->length);
    status = moei_length_check(net, data, error);
    if (status == MOE_OK) status = moei_inputs_check(net, data, error);
    if (status != MOE_OK) return status;
    if (!moei_is_squared(criterion)) return moei_labels_check(net, data, criterion, error);
    if (data->targets == NULL) return MOEI_REFUSE(error, "targets must not be NULL for the squared error");
    return moei_reals_check("targets", data->targets, data->n, (size_t)net->d_out, error);
}

/* Whether samples can be shuffled and split into batches: other inputs of routers would have to be
   split too, and sequences need a known length. */
static moe_status moei_samples_alone(const moe_net *net, const moe_data *data, moe_error *error) {
    size_t i;
    if (data->call != NULL) return MOEI_REFUSE(error, "call must be NULL here: only moe_trainer_step takes it");
    for (i = 0; i < net->n_modules; i++) {
        const int kind = net->modules[i].kind;
        if (data->length == 0 && data->n > 0 &&
            (kind == MOE_MODULE_ATTENTION || kind == MOE_MODULE_POSITIONS || kind == MOE_MODULE_CONVOLUTION))
            return MOEI_REFUSE(error, "length = 0: module %z needs to know how long the sequences are", i);
    }
    return MOE_OK;
}

/* The number of sequences that n samples of one pass form. */
static size_t moei_batch_sequences(const moe_data *data, size_t n) {
    return data->length > 0 && (data->call == NULL || data->call->sequences == NULL) ? n / data->length : 1;
}

/* The most sequences of one pass, which soft routers limit. */
static size_t moei_sequences_most(const moe_net *net) {
    size_t i, most = (size_t)INT32_MAX;
    for (i = 0; i < net->n_modules; i++) {
        const moe_router_config *c = &net->modules[i].layer.config.router;
        if (moei_routes(net, i) && moei_is_soft(c) && (size_t)c->soft_sequences < most)
            most = (size_t)c->soft_sequences;
    }
    return most;
}

/* What router i lacks in the samples, as traits. */
static unsigned moei_router_lacks(const moe_net *net, size_t i, const moe_data *data) {
    const moe_call *call = data->call;
    unsigned lacks = 0;
    size_t j;
    int attention = call != NULL && call->attention_weights != NULL && call->attention_outputs != NULL;
    for (j = 0; j < i; j++) attention |= net->modules[j].kind == MOE_MODULE_ATTENTION;
    if (data->token_ids == NULL && (call == NULL || call->token_ids == NULL)) lacks |= MOE_TRAIT_NEEDS_TOKEN_IDS;
    if (!attention) lacks |= MOE_TRAIT_NEEDS_ATTENTION;
    if (call == NULL || call->given == NULL) lacks |= MOE_TRAIT_NEEDS_GIVEN;
    return lacks & moe_router_traits(&net->modules[i].layer.config.router);
}

/* Whether the samples hold what routers read besides x, and the routers accept that many sequences
   in one pass. */
static moe_status moei_routers_check(const moe_net *net, const moe_data *data, size_t n_sequences, int training,
                                     moe_error *error) {
    size_t i;
    if (n_sequences > moei_sequences_most(net))
        return MOEI_REFUSE(error, "length = %z: a batch has %z sequences, but a router's soft_sequences allows %z",
                           data->length, n_sequences, moei_sequences_most(net));
    for (i = 0; i < net->n_modules; i++) {
        const moe_router_config *c = &net->modules[i].layer.config.router;
        unsigned lacks;
        if (!moei_routes(net, i)) continue;
        lacks = moei_router_lacks(net, i, data);
        if (lacks != 0)
            return MOEI_REFUSE(error, "module %z (mixture): its router has the trait %s, but the samples have only x%s",
                               i, moe_trait_name(lacks & (~lacks + 1u)),
                               data->token_ids != NULL ? " and token_ids" : "");
        if (training && moei_wants_teacher(c) && (data->call == NULL || data->call->teacher == NULL))
            return MOEI_REFUSE(
                error,
                "module %z (mixture): loss_distill needs a teacher, but the samples have only x; student "
                "= 1 needs none",
                i);
    }
    return MOE_OK;
}

/* The number of samples over which the loss is the mean. */
static size_t moei_counted(int criterion, const moe_data *data) {
    if (data->n == 0) return 0;
    return moei_is_squared(criterion) ? data->n : moei_count_labeled(data->n, data->labels);
}

/* Samples from..from+n-1. */
static moe_data moei_data_part(const moe_net *net, const moe_data *data, size_t from, size_t n) {
    moe_data part = *data;
    part.n = n;
    if (part.x != NULL) part.x += from * (size_t)net->d_in;
    if (part.token_ids != NULL) part.token_ids += from;
    if (part.labels != NULL) part.labels += from;
    if (part.targets != NULL) part.targets += from * (size_t)net->d_out;
    return part;
}

/* The call for the rows of data; offsets of its sequences go to sequences [n / length + 1], unless
   data->call has its own. */
static moe_call moei_data_call(const moe_data *data, int32_t *sequences) {
    moe_call call;
    size_t i;
    memset(&call, 0, sizeof call);
    if (data->call != NULL) call = *data->call;
    call.n_tokens = data->n;
    call.x = data->x;
    if (call.token_ids == NULL) call.token_ids = data->token_ids;
    if (data->n == 0) call.sequences = NULL; /* a rank without samples has no sequence to begin */
    if (call.sequences != NULL || data->length == 0 || data->n == 0) return call;
    call.n_sequences = data->n / data->length;
    for (i = 0; i <= call.n_sequences; i++) sequences[i] = (int32_t)(i * data->length);
    call.sequences = sequences;
    return call;
}

/* ---- evaluation ---- */

/* This process's part of n samples, which are divided in whole units. */
static moei_tokens moei_tokens_split(const struct moe_transport *t, size_t n, size_t unit, size_t *own) {
    moei_tokens s;
    size_t processes = moei_group(t)->total;
    moei_own_part(t, n / unit, &s.first, own);
    s.first *= unit;
    *own *= unit;
    s.total = n;
    s.most = (n / unit + processes - 1) / processes * unit;
    return s;
}

/* The most of n samples that one process gets. */
static size_t moei_part_most(const struct moe_transport *t, size_t n, size_t length) {
    size_t own;
    return t != NULL ? moei_tokens_split(t, n, length > 0 ? length : 1, &own).most : n;
}

/* The most samples of one batch. */
static size_t moei_evaluate_most(const moe_net *net, const moe_data *data) {
    size_t most = 64, sequences;
    if (data->length > 0) {
        sequences = data->length < 512 ? 512 / data->length : 1;
        if (sequences > moei_sequences_most(net)) sequences = moei_sequences_most(net);
        most = sequences * data->length;
    }
    return moei_smaller(data->n, most);
}

/* The workspace of an evaluation: the network's, and the answers of a classical mixture. */
typedef struct moei_answers {
    moe_real *answer;   /* [most,d_out] */
    int32_t *sequences; /* [most / length + 1] */
    void *net_work;
    size_t net_size;
} moei_answers;

static moe_status moei_answers_layout(const moe_net *net, int criterion, const moe_data *all, moei_layout *l,
                                      moei_answers *a) {
    int reads = moei_reads_experts(net, criterion);
    size_t most = moei_part_most(net->transport, moei_evaluate_most(net, all), all->length);
    moe_status status = moe_net_work_size(net, most, reads, &a->net_size);
    if (status != MOE_OK) return status;
    a->answer = reads ? moei_take_reals(l, most, (size_t)net->d_out) : NULL;
    a->sequences = all->length > 0 ? (int32_t *)moei_take(l, most / all->length + 1, sizeof(int32_t)) : NULL;
    a->net_work = moei_take(l, a->net_size, 1);
    return l->overflow ? MOE_ERR_OVERFLOW : MOE_OK;
}

static moe_status moei_evaluate_size(const moe_net *net, int criterion, const moe_data *all, size_t *bytes) {
    moei_layout l = moei_layout_begin(NULL);
    moei_answers a;
    moe_status status;
    memset(&a, 0, sizeof a);
    status = moei_answers_layout(net, criterion, all, &l, &a);
    *bytes = l.used;
    return status;
}

/* The last module of a pass as input of moe_mixture_loss. */
static moe_mixture moei_mixture_of(const moe_net *net, const moe_net_pass *pass, const moe_data *data) {
    const moe_layer_pass *p = pass->modules[net->n_modules - 1].layer;
    moe_mixture m;
    memset(&m, 0, sizeof m);
    m.n = data->n;
    m.experts = p->routing.n_experts;
    m.width = (size_t)net->d_out;
    m.p = p->routing.weights;
    m.outputs = p->expert_outputs;
    m.labels = data->labels;
    m.targets = data->targets;
    return m;
}

/* Reports a failed pass, with its message or the text of its status. */
static moe_status moei_pass_failed(moe_error *error, moe_status status, const char *pass, const moe_error *why) {
    return moei_error(error, status, "the network's %s pass: %s", pass,
                      why->message[0] != '\0' ? why->message : moe_status_text(status));
}

/* Sums over the samples of an evaluation. */
typedef struct moei_evaluated {
    double loss;
    size_t counted, right;
} moei_evaluated;

/* The state of one batch of an evaluation. */
typedef struct moei_evaluating {
    const moe_net *net;
    const moe_data *all; /* the samples */
    int criterion;
    void *work;
    moei_evaluated sums;
} moei_evaluating;

/* Adds the samples of a batch that are this rank's. */
static moe_status moei_evaluate_part(moei_evaluating *e, const moe_data *batch, const moei_tokens *tokens,
                                     moe_error *error) {
    const moe_net *net = e->net;
    moei_layout l = moei_layout_begin(e->work);
    moei_answers a;
    moe_call call;
    moe_error why;
    moe_net_pass pass;
    moe_mixture mixture;
    moe_status status;
    moe_real mean = 0;
    const moe_real *answer;
    size_t t, counted = moei_counted(e->criterion, batch), width = (size_t)net->d_out;
    why.message[0] = '\0';
    status = moei_answers_layout(net, e->criterion, e->all, &l, &a);
    if (status == MOE_OK) {
        call = moei_data_call(batch, a.sequences);
        call.keep = moei_reads_experts(net, e->criterion);
        call.error = &why;
        status = moei_net_call_check(net, &call, 0);
        if (status == MOE_OK) status = moei_net_pass(net, &call, tokens, a.net_work, &pass);
    }
    if (status != MOE_OK) return moei_pass_failed(error, status, "forward", &why);
    answer = pass.y;
    status = moei_reals_check("the network's output", pass.y, batch->n, width, error);
    if (status != MOE_OK) {
        moei_nonfinite_source(net, &pass, net->n_modules, error);
        return status;
    }
    if (moei_reads_experts(net, e->criterion)) {
        mixture = moei_mixture_of(net, &pass, batch);
        status = net->mixture_losses->loss(e->criterion, &mixture, &mean, NULL, NULL, error);
        if (status == MOE_OK) status = net->mixture_losses->answer(e->criterion, &mixture, NULL, a.answer, error);
        if (status != MOE_OK) return status;
        answer = a.answer;
    } else mean = moei_criterion(e->criterion, net, batch, counted, pass.y, NULL);
    e->sums.loss += (double)mean * (double)counted;
    e->sums.counted += counted;
    for (t = 0; !moei_is_squared(e->criterion) && t < batch->n; t++)
        if (batch->labels[t] >= 0)
            e->sums.right += moei_max_index(width, answer + t * width) == (size_t)batch->labels[t];
    return MOE_OK;
}

/* A batch of n samples from `from` on; each rank takes its part of it. */
static moe_status moei_evaluate_batch(moei_evaluating *e, size_t from, size_t n, moe_error *error) {
    const struct moe_transport *t = e->net->transport;
    moei_tokens tokens = moei_tokens_alone(n);
    moe_data part;
    size_t first = 0, own = n;
    if (t != NULL) {
        tokens = moei_tokens_split(t, n, e->all->length > 0 ? e->all->length : 1, &own);
        first = tokens.first;
    }
    part = moei_data_part(e->net, e->all, from + first, own);
    return moei_vote(t, moei_evaluate_part(e, &part, &tokens, error), error);
}

/* Adds the sums of all processes. */
static moe_status moei_evaluate_add(moei_evaluating *e, moe_error *error) {
    double sums[3];
    moe_status status;
    sums[0] = e->sums.loss;
    sums[1] = (double)e->sums.counted;
    sums[2] = (double)e->sums.right;
    status = moei_add_over(e->net->transport, MOE_OK, 3, sums, error);
    e->sums.loss = sums[0];
    e->sums.counted = (size_t)sums[1];
    e->sums.right = (size_t)sums[2];
    return status;
}

static moe_status moei_evaluate(const moe_net *net, const moe_data *data, int criterion, void *work,
                                moe_evaluation *result, moe_error *error) {
    moei_evaluating e;
    moe_evaluation made;
    moe_status status = MOE_OK;
    size_t from, most = moei_evaluate_most(net, data);
    memset(&e, 0, sizeof e);
    e.net = net;
    e.all = data;
    e.criterion = criterion;
    e.work = work;
    for (from = 0; from < data->n && status == MOE_OK; from += most)
        status = moei_evaluate_batch(&e, from, moei_smaller(data->n - from, most), error);
    if (status == MOE_OK) status = moei_evaluate_add(&e, error);
    if (status != MOE_OK) return status;
    memset(&made, 0, sizeof made);
    made.n = e.sums.counted;
    if (made.n > 0) {
        made.loss = (moe_real)(e.sums.loss / (double)made.n);
        made.accuracy = (moe_real)((double)e.sums.right / (double)made.n);
    }
    if (!moe_is_finite(made.loss))
        return moei_error(error, MOE_ERR_NONFINITE, "the loss is not finite: %g", (double)made.loss);
    *result = made;
    return MOE_OK;
}

static moe_status moei_evaluate_check(const moe_net *net, const moe_data *data, int criterion,
                                      const moe_evaluation *result, moe_error *error) {
    moe_status status;
    if (result == NULL) return MOEI_REFUSE(error, "net and result must not be NULL");
    if (!net->built) return moei_error(error, MOE_ERR_STATE, "the network is not built");
    if (criterion < 0 || criterion >= MOE_CRITERION_COUNT)
        return MOEI_REFUSE(error, "criterion = %d: no such criterion", criterion);
    status = moei_data_check(net, data, criterion, error);
    if (status == MOE_OK) status = moei_samples_alone(net, data, error);
    if (status == MOE_OK && data->n > 0) status = moei_routers_check(net, data, 1, 0, error);
    return status == MOE_OK ? moei_mixture_fits(net, criterion, error) : status;
}

moe_status moe_evaluate(const moe_net *net, const moe_data *data, int criterion, moe_evaluation *result,
                        moe_error *error) {
    moe_status status;
    size_t size = 0;
    void *work = NULL;
    if (net == NULL) return MOEI_REFUSE(error, "net and result must not be NULL");
    status = moei_vote(net->transport, moei_evaluate_check(net, data, criterion, result, error), error);
    if (status == MOE_OK && net->transport != NULL)
        status = moei_group(net->transport)->hooks->data_agree(net, data, criterion, "the samples: ", error);
    if (status != MOE_OK) return status;
    status = moei_evaluate_size(net, criterion, data, &size);
    if (status != MOE_OK) (void)moei_error(error, status, "workspace: %s", moe_status_text(status));
    else work = moei_alloc(&net->allocator, size, 1);
    if (status == MOE_OK && work == NULL)
        status = moei_error(error, MOE_ERR_MEMORY, "no memory for %z bytes of work", size);
    status = moei_vote(net->transport, status, error);
    if (status == MOE_OK) status = moei_evaluate(net, data, criterion, work, result, error);
    if (work != NULL) moei_free(&net->allocator, work, size);
    return status;
}

/* ---- the trainer ---- */

static const char *const moei_optimizer_names[] = {"adamw", "sgd", NULL};
static const char *const moei_schedule_names[] = {"cosine", "linear", NULL};

#define MOEI_T moe_train_config
#define MOEI_G moe_param_group

static const moe_field moei_train_fields[] = {
    MOEI_CHOICE(MOEI_T, criterion, MOE_CRITERION_COUNT, moei_criterion_names, "loss that is minimized"),
    MOEI_CHOICE(MOEI_T, optimizer, MOE_OPTIMIZER_COUNT, moei_optimizer_names, "optimizer"),
    MOEI_INT(MOEI_T, epochs, 1, 1000000, "passes over the samples"),
    MOEI_INT(MOEI_T, batch, 1, 1000000, "samples per step"),
    MOEI_REAL(MOEI_T, rate, 1e-12, 1e6, "learning rate"),
    MOEI_REAL(MOEI_T, final_rate, 1e-12, 1, "final rate as a fraction of rate"),
    MOEI_REAL(MOEI_T, momentum, -1, 0.999999, "momentum of sgd"),
    MOEI_REAL(MOEI_T, beta1, 1e-6, 0.999999, "decay of the first moment"),
    MOEI_REAL(MOEI_T, beta2, 1e-6, 0.999999, "decay of the second moment"),
    MOEI_REAL(MOEI_T, epsilon, 1e-30, 1, "added to the root of the second moment"),
    MOEI_REAL(MOEI_T, decay, 0, 1e3, "weight decay"),
    MOEI_REAL(MOEI_T, clip, 1e-12, 1e12, "maximum norm of the gradient"),
    MOEI_INT(MOEI_T, accumulate, 1, 1000000, "batches per step"),
    MOEI_CHOICE(MOEI_T, schedule, MOE_SCHEDULE_COUNT, moei_schedule_names, "decay of the learning rate"),
    MOEI_INT(MOEI_T, warmup, 1, 2147483647, "steps of linear warmup"),
    MOEI_INT(MOEI_T, total_steps, 1, 2147483647, "steps of the schedule"),
    MOEI_INT(MOEI_T, n_groups, 1, 4096, "groups of tensors"),
    MOEI_INT(MOEI_T, evaluate_every, 1, 2147483647, "steps between evaluations"),
    MOEI_INT(MOEI_T, checkpoint_every, 1, 2147483647, "steps between checkpoints"),
    MOEI_FLAG(MOEI_T, resume, "resume from the checkpoint"),
    MOEI_FIELDS_END};

static const moe_field moei_group_fields[] = {
    MOEI_REAL(MOEI_G, rate, 0, 1e6, "factor on the rate"),
    MOEI_REAL(MOEI_G, decay, -1e6, 1e6, "factor on the decay"),
    MOEI_FLAG(MOEI_G, frozen, "not trained"),
    MOEI_FIELDS_END};

static moe_status moei_train_check(const moe_train_config *config, moe_train_config *out, moe_error *error) {
    moe_status status;
    memset(out, 0, sizeof *out);
    if (config != NULL) *out = *config;
    status = moei_fields_check(moei_train_fields, out, error);
    if (status != MOE_OK) return status;
    moei_default(&out->epochs, 10);
    moei_default(&out->batch, 32);
    moei_default_real(&out->rate, out->optimizer == MOE_OPTIMIZER_SGD ? MOEI_R(0.01) : MOEI_R(0.001));
    moei_default_real(&out->final_rate, MOEI_R(1.0));
    moei_default_real(&out->momentum, MOEI_R(0.9));
    if (out->momentum < 0) out->momentum = 0;
    moei_default_real(&out->beta1, MOEI_R(0.9));
    moei_default_real(&out->beta2, MOEI_R(0.999));
    moei_default_real(&out->epsilon, MOEI_R(1e-8));
    moei_default(&out->accumulate, 1);
    return MOE_OK;
}

/* Consumes a required word; 0 if it is missing. */
static int moei_take_word(const char **p, const char *word) {
    size_t n = moei_strlen(word);
    if (strncmp(*p, word, n) != 0) return 0;
    *p += n;
    return 1;
}

/* Consumes an integer as the writer writes it: only digits, no leading zero. */
static int moei_take_number(const char **p, uint64_t *value) {
    const char *from = *p;
    for (*value = 0; **p >= '0' && **p <= '9'; ++*p) {
        uint64_t digit = (uint64_t)(**p - '0');
        if (*value > (UINT64_MAX - digit) / 10) return 0;
        *value = *value * 10 + digit;
    }
    return *p > from && (*from != '0' || *p == from + 1);
}

/* Whether name matches pattern, in which * stands for any characters: after a mismatch the last *
   takes one more character. The pattern ends before rows in brackets. */
static int moei_fits_pattern(const char *pattern, const char *name) {
    const char *star = NULL, *from = NULL;
    while (*name != '\0') {
        if (*pattern == '*') {
            star = pattern++;
            from = name;
        } else if (*pattern == *name) {
            pattern++;
            name++;
        } else if (star != NULL) {
            pattern = star + 1;
            name = ++from;
        } else return 0;
    }
    while (*pattern == '*') pattern++;
    return *pattern == '\0' || *pattern == '[';
}

/* The same for the name of a tensor of a network, with or without the module's number. */
static int moei_fits_name(const char *pattern, const char *name) {
    const char *rest = name;
    while (*rest >= '0' && *rest <= '9') rest++;
    return moei_fits_pattern(pattern, name) || (*rest == '.' && moei_fits_pattern(pattern, rest + 1));
}

/* The rows of a pattern that ends in [e] or [a:b]: 1. 0: it has no [; -1: what follows the [ is
   neither. */
static int moei_pattern_rows(const char *pattern, uint64_t *from, uint64_t *to) {
    *from = *to = 0;
    while (*pattern != '\0' && *pattern != '[') pattern++;
    if (*pattern == '\0') return 0;
    pattern++;
    if (!moei_take_number(&pattern, from)) return -1;
    *to = *from + 1;
    if (moei_take_word(&pattern, ":") && !moei_take_number(&pattern, to)) return -1;
    return moei_take_word(&pattern, "]") && *pattern == '\0' && *from < *to ? 1 : -1;
}

static moe_status moei_groups_check(const moe_net *net, const moe_train_config *config, moe_error *error) {
    moe_error why;
    uint64_t from, to;
    size_t t;
    int g, rows;
    if (config->n_groups > 0 && config->groups == NULL)
        return moei_error(error, MOE_ERR_CONFIG, "groups must not be NULL: n_groups = %d", config->n_groups);
    for (g = 0; g < config->n_groups; g++) {
        const moe_param_group *group = &config->groups[g];
        if (moei_fields_check(moei_group_fields, group, &why) != MOE_OK)
            return moei_error(error, MOE_ERR_CONFIG, "groups[%d]: %s", g, why.message);
        if (group->pattern == NULL) return moei_error(error, MOE_ERR_CONFIG, "groups[%d]: pattern must not be NULL", g);
        rows = moei_pattern_rows(group->pattern, &from, &to);
        if (rows < 0)
            return moei_error(error, MOE_ERR_CONFIG, "groups[%d]: pattern = '%s': [ begins rows, as [3] or [0:4]", g,
                              group->pattern);
        for (t = 0; t < net->n_tensors; t++)
            if (moei_fits_name(group->pattern, net->tensors[t].name) &&
                to <= moei_whole_tensor(net, &net->tensors[t]).shape[0])
                break;
        if (t == net->n_tensors)
            return moei_error(error, MOE_ERR_CONFIG, "groups[%d]: pattern = '%s' fits the name of no tensor%s", g,
                              group->pattern, rows > 0 ? " with these rows" : "");
    }
    return MOE_OK;
}

/* Two numbers of a group (NULL: none) for a tensor or a row of it: the factor on the rate, 0 when
   it does not learn, and the weight decay. */
static void moei_group_numbers(const moe_train_config *config, const moe_tensor *t, const moe_param_group *group,
                               moe_real *out) {
    int none = (t->flags & (unsigned)MOE_PARAM_NO_DECAY) != 0;
    out[0] = MOEI_R(1.0);
    out[1] = none ? 0 : config->decay;
    if (group == NULL) return;
    if (group->rate > 0) out[0] = group->rate;
    if (group->frozen) out[0] = 0;
    if (group->decay > 0) out[1] = group->decay * config->decay;
    if (group->decay < 0) out[1] = 0;
}

/* These two numbers for every row of a tensor: of the last group that matches it. */
static void moei_group_factors(const moe_net *net, const moe_train_config *config, const moe_tensor *t, moe_real *out) {
    size_t rows = t->shape[0], first = moei_whole_first(net, t) / (t->count / rows), i;
    uint64_t from, to;
    int g;
    for (i = 0; i < rows; i++) moei_group_numbers(config, t, NULL, out + 2 * i);
    for (g = 0; g < config->n_groups; g++) {
        const moe_param_group *group = &config->groups[g];
        const int whole = moei_pattern_rows(group->pattern, &from, &to) == 0;
        if (!moei_fits_name(group->pattern, t->name)) continue;
        for (i = 0; i < rows; i++)
            if (whole || (first + i >= from && first + i < to)) moei_group_numbers(config, t, group, out + 2 * i);
    }
}

/* One batch in the trainer's workspace. */
typedef struct moei_batch {
    moe_real *dy;       /* [batch,d_out] */
    int32_t *sequences; /* [batch+1] */
    /* [batch,E], [E,batch], [E,batch,d_out] of a classical mixture */
    moe_real *expert_p, *d_p, *d_weights, *d_outputs;
    void *net_work;
    size_t net_size;
} moei_batch;

static moe_status moei_batch_layout(const moe_trainer *trainer, moei_layout *l, moei_batch *b) {
    size_t batch = trainer->most;
    moe_status status = moe_net_work_size(trainer->net, batch, 1, &b->net_size);
    if (status != MOE_OK) return status;
    b->dy = moei_take_reals(l, batch, (size_t)trainer->net->d_out);
    b->sequences = (int32_t *)moei_take(l, batch + 1, sizeof(int32_t));
    if (moei_reads_experts(trainer->net, trainer->config.criterion)) {
        size_t cells = 0;
        if (!moei_mul(batch, (size_t)trainer->net->modules[trainer->net->n_modules - 1].layer.config.router.n_experts,
                      &cells))
            l->overflow = 1;
        b->expert_p = moei_take_reals(l, cells, 1);
        b->d_p = moei_take_reals(l, cells, 1);
        b->d_weights = moei_take_reals(l, cells, 1);
        b->d_outputs = moei_take_reals(l, cells, (size_t)trainer->net->d_out);
    }
    b->net_work = moei_take(l, b->net_size, 1);
    return l->overflow ? MOE_ERR_OVERFLOW : MOE_OK;
}

/* The values in memory; layers that share net.l1 leave some unused. */
static size_t moei_net_numbers(const moe_net *net) { return net->memory_size / sizeof(moe_real) / 2; }
static size_t moei_moments(const moe_trainer *t) { return t->config.optimizer == MOE_OPTIMIZER_ADAMW ? 2 : 1; }

static moe_status moei_trainer_allocate(moe_trainer *t, moe_error *error) {
    const moe_allocator *a = &t->net->allocator;
    moei_layout l = moei_layout_begin(NULL);
    moei_batch batch;
    moe_status status = moei_batch_layout(t, &l, &batch);
    size_t moments, factors, i;
    if (status != MOE_OK) return moei_error(error, status, "batch = %d: %s", t->config.batch, moe_status_text(status));
    for (i = 0, factors = 0; i < t->net->n_tensors; i++) factors += t->net->tensors[i].shape[0];
    if (!moei_mul(moei_net_numbers(t->net), moei_moments(t), &moments) || !moei_mul(factors, 2, &factors) ||
        !moei_add(moments, factors, &t->memory_size) ||
        !moei_mul(t->memory_size, sizeof(moe_real), &t->memory_size))
        return moei_error(error, MOE_ERR_OVERFLOW, "the optimizer's moments do not fit this machine's memory");
    t->work_size = l.used;
    t->memory = (moe_real *)moei_alloc(a, t->memory_size, 1);
    t->work = moei_alloc(a, t->work_size, 1);
    t->factors = t->memory != NULL ? t->memory + moments : NULL;
    if (t->memory != NULL && t->work != NULL) return MOE_OK;
    moei_free(a, t->work, t->work_size);
    moei_free(a, t->memory, t->memory_size);
    t->memory = NULL;
    return moei_error(error, MOE_ERR_MEMORY, "no memory for %z bytes of moments and %z of work", t->memory_size,
                      t->work_size);
}

/* The rate of the next step, as at MOE_SCHEDULE_. */
static void moei_trainer_rate(moe_trainer *t) {
    const moe_train_config *c = &t->config;
    double step = (double)t->steps, warmup = (double)c->warmup;
    double last = (double)t->total_steps - 1.0, at;
    moe_real left;
    if (t->total_steps == 0) return;
    t->rate = c->rate;
    if (step < warmup) t->rate = c->rate * (moe_real)((step + 1.0) / (warmup + 1.0));
    if (step < warmup || !(c->final_rate < MOEI_R(1.0))) return;
    at = step > last ? 1.0 : last > warmup ? (step - warmup) / (last - warmup) : 0.0;
    left = c->schedule == MOE_SCHEDULE_LINEAR ? (moe_real)(1.0 - at)
                                              : MOEI_R(0.5) * (MOEI_R(1.0) + (moe_real)cos(3.14159265358979324 * at));
    t->rate = c->rate * (c->final_rate + (MOEI_R(1.0) - c->final_rate) * left);
}

/* Sets the first learning rate, and gives the trainer's steps to routers with a schedule but no
   steps of their own. */
static void moei_trainer_plan(moe_trainer *t) {
    const int steps = t->total_steps < (uint64_t)MOE_MAX_WIDTH ? (int)t->total_steps : (int)MOE_MAX_WIDTH;
    size_t i;
    moei_trainer_rate(t);
    for (i = 0; i < t->net->n_modules; i++) {
        moe_layer *layer = &t->net->modules[i].layer;
        if (!moei_routes(t->net, i) || !moei_has_schedule(&layer->config.router)) continue;
        if (layer->config.router.schedule_steps > 0) continue;
        layer->config.router.schedule_steps = layer->router.config.schedule_steps = steps;
    }
}

/* Checks a trainer's configuration; *c gets it with defaults filled in. */
static moe_status moei_trainer_config(const moe_trainer *trainer, const moe_net *net, const moe_train_config *config,
                                      int fit, moe_train_config *c, moe_error *error) {
    moe_status status;
    if (trainer == NULL) return MOEI_REFUSE(error, "trainer and net must not be NULL");
    if (!net->built || !net->trainable)
        return moei_error(error, MOE_ERR_STATE, "the network is not built with trainable = 1");
    if (!fit && config != NULL && config->warmup > 0 && config->total_steps == 0)
        return moei_error(error, MOE_ERR_CONFIG,
                          "warmup = %d: a trainer needs total_steps for it, which only moe_fit sets itself",
                          config->warmup);
    status = moei_train_check(config, c, error);
    if (status == MOE_OK) status = moei_groups_check(net, c, error);
    return status == MOE_OK ? moei_mixture_fits(net, c->criterion, error) : status;
}

/* data: the samples of moe_fit, of which each process takes its part; NULL: there are none, or it
   is a trainer of the caller's own. */
static moe_status moei_trainer_make(moe_trainer *trainer, moe_net *net, const moe_train_config *config, int fit,
                                    const moe_data *data, moe_error *error) {
    moe_trainer made;
    moe_status status;
    moe_real *factors;
    size_t i;
    if (net == NULL) return MOEI_REFUSE(error, "trainer and net must not be NULL");
    memset(&made, 0, sizeof made);
    made.net = net;
    status = moei_vote(net->transport, moei_trainer_config(trainer, net, config, fit, &made.config, error), error);
    if (status == MOE_OK && net->transport != NULL)
        status = moei_group(net->transport)->hooks->train_agree(net, &made.config, error);
    if (status != MOE_OK) return status;
    made.most = (size_t)made.config.batch;
    if (data != NULL && data->n < made.most) made.most = data->n;
    made.most = data != NULL ? moei_part_most(net->transport, made.most, data->length) : made.most;
    status = moei_trainer_allocate(&made, error);
    status = moei_vote(net->transport, status, error);
    if (status != MOE_OK) {
        if (made.memory != NULL) moe_trainer_free(&made);
        return status;
    }
    for (i = 0, factors = made.factors; i < net->n_tensors; factors += 2 * net->tensors[i++].shape[0])
        moei_group_factors(net, &made.config, &net->tensors[i], factors);
    made.config.groups = NULL;
    moe_rng_seed(&made.rng, made.config.seed);
    made.rate = made.config.rate;
    made.total_steps = (uint64_t)made.config.total_steps;
    if (!fit) moei_trainer_plan(&made);
    *trainer = made;
    return MOE_OK;
}

moe_status moe_trainer_init(moe_trainer *trainer, moe_net *net, const moe_train_config *config, moe_error *error) {
    return moei_trainer_make(trainer, net, config, 0, NULL, error);
}

void moe_trainer_free(moe_trainer *trainer) {
    if (trainer == NULL || trainer->net == NULL) return;
    moei_free(&trainer->net->allocator, trainer->work, trainer->work_size);
    moei_free(&trainer->net->allocator, trainer->memory, trainer->memory_size);
    memset(trainer, 0, sizeof *trainer);
}

/* Flags may change between steps, groups do not. */
static int moei_is_trained(const moe_tensor *t) {
    return (t->flags & (unsigned)(MOE_PARAM_FROZEN | MOE_PARAM_STATE)) == 0;
}

/* Whether freeze_at has frozen a tensor; with a student only the student's. moe_net_advance has
   counted the step. */
static int moei_is_frozen(const moe_net *net, const moe_tensor *t) {
    const char *name = t->name;
    const moe_layer *layer;
    uint64_t i;
    int end;
    if (!moei_take_number(&name, &i)) return 0; /* net.l1 */
    layer = &net->modules[i].layer;
    end = layer->config.router.freeze_at;
    return end > 0 && layer->tensors[MOE_ROUTER_STEP][0] > (moe_real)end &&
           moei_take_word(&name, layer->config.router.student ? ".router.student" : ".router.");
}

/* Consecutive rows of one tensor that learn alike. */
typedef struct moei_rows {
    size_t tensor, row;     /* its index; the row after the last of these */
    size_t first, count;    /* their elements in the tensor */
    const moe_real *factors, *next; /* of these rows; of the row after them */
} moei_rows;

static moei_rows moei_rows_begin(const moe_trainer *trainer) {
    moei_rows r;
    memset(&r, 0, sizeof r);
    r.next = trainer->factors;
    return r;
}

/* The next rows that learn; 0: there are none. */
static int moei_rows_next(const moe_trainer *trainer, moei_rows *r) {
    for (; r->tensor < trainer->net->n_tensors; r->tensor++, r->row = 0) {
        const moe_tensor *t = &trainer->net->tensors[r->tensor];
        while (r->row < t->shape[0]) {
            size_t from = r->row, width = t->count / t->shape[0];
            r->factors = r->next;
            do {
                r->row++;
                r->next += 2;
            } while (r->row < t->shape[0] && !(r->factors[0] < r->next[0]) &&
                     !(r->factors[0] > r->next[0]) && r->factors[1] == r->next[1]);
            r->first = from * width;
            r->count = (r->row - from) * width;
            if (moei_is_trained(t) && r->factors[0] > 0 && !moei_is_frozen(trainer->net, t)) return 1;
        }
    }
    return 0;
}

/* The loss of a classical mixture, and its gradients in the order of the plan. */
static moe_status moei_mixture_gradients(const moe_trainer *t, const moe_data *data, const moe_net_pass *pass,
                                         const moei_batch *b, moe_real *loss, moe_error *error) {
    const moe_layer *layer = &t->net->modules[t->net->n_modules - 1].layer;
    const moe_routing *routing = &pass->modules[t->net->n_modules - 1].layer->routing;
    moe_real temperature = layer->config.router.expert_temperature;
    moe_mixture m = moei_mixture_of(t->net, pass, data);
    moe_status status;
    size_t i, e;
    if (routing->plan.offsets[m.experts] != m.n * m.experts)
        return MOEI_REFUSE(error, "a classical mixture takes no padding, and all experts in call.given");
    for (i = 0; i < m.n && temperature > 0; i++)
        moe_softmax(t->net->kernels, m.experts, routing->logits + i * m.experts, temperature,
                    b->expert_p + i * m.experts);
    if (temperature > 0) m.expert_p = b->expert_p;
    status = t->net->mixture_losses->loss(t->config.criterion, &m, loss, b->d_p, b->d_outputs, error);
    for (e = 0; e < m.experts && status == MOE_OK; e++)
        for (i = 0; i < m.n; i++) b->d_weights[e * m.n + i] = b->d_p[i * m.experts + e];
    return status;
}

/* The tokens and labeled samples of one batch, of all processes. */
typedef struct moei_brought {
    moei_tokens tokens;
    size_t counted; /* samples that the loss is the mean of */
} moei_brought;

/* Sums this process's part of a batch over all processes; status is this process's result so far.
   batch NULL: none, before a step of the optimizer. */
static moe_status moei_trainer_meet(const moe_trainer *t, const moe_data *batch, moe_status status, moei_brought *b,
                                    moe_error *error) {
    const struct moei_hooks *hooks;
    b->tokens = moei_tokens_alone(0);
    b->counted = 0;
    if (status == MOE_OK && batch != NULL) {
        b->tokens = moei_tokens_alone(batch->n);
        b->counted = moei_counted(t->config.criterion, batch);
    }
    if ((hooks = moei_hooks_of(t->net->transport, &status, error)) != NULL)
        status = hooks->train_meet(t, status, b, error);
    if (status == MOE_OK && batch != NULL && b->tokens.total == 0)
        status = MOEI_REFUSE(error, "n = 0: at least one rank must have a sample");
    return status;
}

/* Forward, loss and backward on one batch, added to the gradients since the last step. A failure in
   one process is a failure in all. */
static moe_status moei_trainer_gradients(moe_trainer *t, const moe_data *data, const moe_call *call,
                                         const moei_brought *brought, moe_net_pass *pass, moe_step *step,
                                         moe_error *error) {
    moei_layout l = moei_layout_begin(t->work);
    moei_batch batch;
    moei_returned back;
    moe_call own;
    moe_error why;
    size_t i;
    double all;
    int loss, local = 0, reads = moei_reads_experts(t->net, t->config.criterion);
    moe_status status = moei_batch_layout(t, &l, &batch);
    if (t->n_accumulated == 0) moei_net_zero_gradients(t->net);
    own = *call;
    own.error = &why;
    why.message[0] = '\0';
    if (status == MOE_OK) status = moei_net_pass(t->net, &own, &brought->tokens, batch.net_work, pass);
    if (status != MOE_OK) return moei_pass_failed(error, status, "forward", &why);
    if (!reads) step->loss = moei_criterion(t->config.criterion, t->net, data, brought->counted, pass->y, batch.dy);
    else status = moei_mixture_gradients(t, data, pass, &batch, &step->loss, error);
    all = (double)step->loss;
    if (status == MOE_OK) status = moei_add_over(t->net->transport, status, 1, &all, error);
    if (status != MOE_OK) return status;
    step->loss = (moe_real)all;
    step->router_loss = 0;
    for (i = 0; i < t->net->n_modules; i++) {
        const moe_routing *routing = moe_net_routing(t->net, pass, i);
        for (loss = 0; routing != NULL && loss < MOE_LOSS_COUNT; loss++) step->router_loss += routing->loss[loss];
        if (routing != NULL && pass->modules[i].layer->call.batch == NULL) local = 1;
    }
    if (t->net->transport != NULL && local) { /* each process has its share of them */
        all = (double)step->router_loss;
        status = moei_add_over(t->net->transport, status, 1, &all, error);
        if (status != MOE_OK) return status;
        step->router_loss = (moe_real)all;
    }
    if (!moe_is_finite(step->loss) || !moe_is_finite(step->router_loss)) {
        (void)moei_error(error, MOE_ERR_NONFINITE, "the loss is not finite: %g, of the routers %g", (double)step->loss,
                         (double)step->router_loss);
        moei_nonfinite_source(t->net, pass, t->net->n_modules, error);
        return MOE_ERR_NONFINITE;
    }
    back.dy = reads ? NULL : batch.dy;
    back.d_outputs = reads ? batch.d_outputs : NULL;
    back.d_weights = reads ? batch.d_weights : NULL;
    status = moei_net_backward(t->net, pass, &back, NULL);
    return status == MOE_OK ? MOE_OK : moei_pass_failed(error, status, "backward", &why);
}

/* *sum += the squares of numbers first..first+n-1 of a tensor's gradient: in double where the
   kernels' sum is not reliable. */
static moe_status moei_add_squares(const moe_kernels *kernels, const moe_tensor *t, size_t first, size_t n,
                                   double *sum) {
    const moe_real *g = t->gradient + first, fast = moe_dot(kernels, n, g, g);
    size_t i;
    if (fast > MOEI_R(1e-30) && moe_is_finite(fast)) {
        *sum += (double)fast;
        return MOE_OK;
    }
    for (i = 0; i < n; i++) {
        if (!moe_is_finite(g[i])) return MOE_ERR_NONFINITE;
        *sum += (double)g[i] * (double)g[i];
    }
    return MOE_OK;
}

/* Names the tensor whose gradient is not finite: the last of several, as the backward pass meets it
   first. */
static moe_status moei_gradient_refuse(const moe_trainer *trainer, moe_error *error) {
    const moe_net *net = trainer->net;
    moei_rows r = moei_rows_begin(trainer), bad = r;
    size_t m = net->n_modules - 1, i;
    while (moei_rows_next(trainer, &r))
        if (!moei_all_finite(r.count, net->tensors[r.tensor].gradient + r.first)) bad = r;
    while (net->modules[m].first_tensor > bad.tensor) m--;
    for (i = bad.first; moe_is_finite(net->tensors[bad.tensor].gradient[i]);) i++;
    return moei_error(error, MOE_ERR_NONFINITE, "module %z (%s), tensor %s: number %z of the gradient is not finite", m,
                      moei_module_names[net->modules[m].kind], net->tensors[bad.tensor].name, i);
}

/* The sum of squares of the gradients of all trained tensors that are divided among processes, or
   of the others. */
static moe_status moei_trainer_squares(const moe_trainer *trainer, int parted, double *sum, moe_error *error) {
    enum { PART = 1024 };
    moei_rows r = moei_rows_begin(trainer);
    moe_status status = MOE_OK;
    size_t i;
    while (moei_rows_next(trainer, &r)) {
        const moe_tensor *t = &trainer->net->tensors[r.tensor];
        if ((moei_parted(trainer->net, t) > 0) != parted) continue;
        for (i = 0; i < r.count && status == MOE_OK; i += PART)
            status = moei_add_squares(trainer->net->kernels, t, r.first + i, moei_smaller(r.count - i, PART), sum);
    }
    return status == MOE_OK ? MOE_OK : moei_gradient_refuse(trainer, error);
}

/* The norm of the mean of n batches' gradients, of all trained tensors together; whole: of all
   processes, else of this one. Beyond 1e19 (float) its square, which AdamW forms, would not be
   finite. */
static moe_status moei_trainer_norm(const moe_trainer *trainer, int n, int whole, moe_real *norm, moe_error *error) {
    double sum = 0.0, parts = 0.0, length;
    moe_status status = moei_trainer_squares(trainer, 0, &sum, error);
    if (status == MOE_OK && trainer->net->transport != NULL) status = moei_trainer_squares(trainer, 1, &parts, error);
    if (whole) status = moei_add_over(trainer->net->transport, status, 1, &parts, error);
    if (status != MOE_OK) return status;
    length = sqrt(sum + parts) / (double)n;
    if (!(length <= (MOE_REAL_IS_DOUBLE ? 1e150 : 1e19)))
        return moei_error(error, MOE_ERR_NONFINITE, "the gradient is too large to square");
    *norm = (moe_real)length;
    return MOE_OK;
}

static moe_status moei_trainer_reduce(const moe_trainer *trainer, moe_error *error) {
    return trainer->net->transport != NULL ? moei_group(trainer->net->transport)->hooks->train_reduce(trainer, error)
                                           : MOE_OK;
}

/* base to the power n, by squaring: as reproducible as multiplication. */
static moe_real moei_power(moe_real base, uint64_t n) {
    moe_real power = MOEI_R(1.0);
    for (; n > 0; n >>= 1, base *= base)
        if (n & 1u) power *= base;
    return power;
}

/* v = momentum v + g + decay w,  w -= rate v */
static void moei_sgd(size_t n, moe_real scale, moe_real rate, moe_real decay, moe_real momentum, const moe_real *g,
                     moe_real *w, moe_real *v) {
    size_t i;
    for (i = 0; i < n; i++) {
        v[i] = momentum * v[i] + scale * g[i] + decay * w[i];
        w[i] -= rate * v[i];
    }
}

/* Updates all trained tensors; their gradients are multiplied by scale. */
static void moei_trainer_move(moe_trainer *trainer, moe_real scale) {
    const moe_train_config *c = &trainer->config;
    moe_real *first = trainer->memory, *second = first + moei_net_numbers(trainer->net);
    moei_rows r = moei_rows_begin(trainer);
    moe_adamw_step a;
    a.scale = scale;
    a.beta1 = c->beta1;
    a.beta2 = c->beta2;
    a.epsilon = c->epsilon;
    a.correction1 = MOEI_R(1.0) / (MOEI_R(1.0) - moei_power(c->beta1, trainer->steps + 1));
    a.correction2 = MOEI_R(1.0) / (MOEI_R(1.0) - moei_power(c->beta2, trainer->steps + 1));
    while (moei_rows_next(trainer, &r)) {
        const moe_tensor *t = &trainer->net->tensors[r.tensor];
        const moe_real *gradient = t->gradient + r.first;
        moe_real *data = t->data + r.first;
        ptrdiff_t at = data - trainer->net->memory;
        a.lr = trainer->rate * r.factors[0];
        a.weight_decay = r.factors[1];
        if (c->optimizer == MOE_OPTIMIZER_ADAMW)
            moe_adamw(trainer->net->kernels, &a, r.count, gradient, first + at, second + at, data);
        else moei_sgd(r.count, scale, a.lr, a.weight_decay, c->momentum, gradient, data, first + at);
    }
}

static moe_status moei_rate_check(const moe_trainer *trainer, moe_error *error) {
    if (moe_is_finite(trainer->rate)) return MOE_OK;
    return MOEI_REFUSE(error, "rate = %g: must be a finite number", (double)trainer->rate);
}

/* Checks a batch; changes nothing. */
static moe_status moei_trainer_check(const moe_trainer *trainer, const moe_data *batch, moe_error *error) {
    moe_status status;
    size_t least = trainer->net->transport == NULL;
    if (batch == NULL) return MOEI_REFUSE(error, "trainer and batch must not be NULL");
    if (trainer->n_accumulated == INT32_MAX)
        return moei_error(error, MOE_ERR_STATE, "%d batches since the last update", trainer->n_accumulated);
    if (batch->n < least || batch->n > trainer->most)
        return MOEI_REFUSE(error, "n = %z: must be %z to batch = %z", batch->n, least, trainer->most);
    status = moei_rate_check(trainer, error);
    if (status != MOE_OK) return status;
    status = moei_data_check(trainer->net, batch, trainer->config.criterion, error);
    if (status != MOE_OK) return status;
    if (batch->n == 0) return MOE_OK;
    return moei_routers_check(trainer->net, batch, moei_batch_sequences(batch, batch->n), 1, error);
}

/* The call of a checked batch. */
static moe_status moei_trainer_call(moe_trainer *t, const moe_data *data, moe_call *call, moe_error *error) {
    moei_layout l = moei_layout_begin(t->work);
    moei_batch batch;
    moe_error why;
    moe_status status = moei_trainer_check(t, data, error);
    if (status != MOE_OK) return status;
    (void)moei_batch_layout(t, &l, &batch);
    *call = moei_data_call(data, batch.sequences);
    call->training = 1;
    call->rng = &t->rng;
    call->error = &why;
    why.message[0] = '\0';
    status = moei_net_call_check(t->net, call, 0);
    call->error = NULL;
    return status == MOE_OK ? status : moei_pass_failed(error, status, "forward", &why);
}

/* The first half of a step; *norm is that of the mean gradient so far; with last = 1 of all
   processes, whose gradients are then summed. The routers see the pass last, when nothing can fail
   any more. */
static moe_status moei_trainer_add(moe_trainer *trainer, const moe_data *batch, int last, moe_step *made,
                                   moe_real *norm, moe_error *error) {
    moe_net_pass pass;
    moe_rng rng;
    moe_call call;
    moei_brought brought;
    moe_status status;
    if (trainer == NULL) return MOEI_REFUSE(error, "trainer and batch must not be NULL");
    if (trainer->net == NULL) return moei_error(error, MOE_ERR_STATE, "the trainer is not made");
    status = moei_trainer_call(trainer, batch, &call, error);
    status = moei_trainer_meet(trainer, batch, status, &brought, error);
    if (status != MOE_OK) return status;
    rng = trainer->rng;
    status = moei_trainer_gradients(trainer, batch, &call, &brought, &pass, made, error);
    if (status == MOE_OK && last) status = moei_trainer_reduce(trainer, error);
    if (status == MOE_OK) status = moei_trainer_norm(trainer, trainer->n_accumulated + 1, last, norm, error);
    if (!last) status = moei_vote(trainer->net->transport, status, error);
    if (status == MOE_OK && (status = moe_net_observe(trainer->net, &pass)) != MOE_OK)
        (void)moei_error(error, status, "the routers' state: %s", moe_status_text(status));
    if (status == MOE_OK) trainer->n_accumulated++;
    else {
        trainer->rng = rng;
        trainer->n_accumulated = 0;
    }
    return status;
}

/* The second half, with the norm of the mean gradient. */
static moe_status moei_trainer_apply(moe_trainer *trainer, moe_real norm, moe_error *error) {
    moe_real scale =
        trainer->config.clip > 0 && norm > trainer->config.clip ? trainer->config.clip / norm : MOEI_R(1.0);
    moe_status status = moe_net_advance(trainer->net);
    if (status != MOE_OK) return moei_error(error, status, "the routers' state: %s", moe_status_text(status));
    /* the tensors change */
    moei_net_unpack(trainer->net);
    moei_trainer_move(trainer, scale / (moe_real)trainer->n_accumulated);
    trainer->n_accumulated = 0;
    trainer->steps++;
    moei_trainer_rate(trainer);
    return MOE_OK;
}

moe_status moe_trainer_accumulate(moe_trainer *trainer, const moe_data *batch, moe_step *step, moe_error *error) {
    moe_step made;
    moe_real norm;
    moe_status status = moei_trainer_add(trainer, batch, 0, &made, &norm, error);
    if (status == MOE_OK && step != NULL) {
        step->loss = made.loss;
        step->router_loss = made.router_loss;
    }
    return status;
}

static moe_status moei_update_check(const moe_trainer *trainer, moe_error *error) {
    if (trainer->n_accumulated < 1) return moei_error(error, MOE_ERR_STATE, "no batch since the last update");
    return moei_rate_check(trainer, error);
}

moe_status moe_trainer_update(moe_trainer *trainer, moe_step *step, moe_error *error) {
    moei_brought none;
    moe_real norm;
    moe_status status;
    if (trainer == NULL) return MOEI_REFUSE(error, "trainer must not be NULL");
    if (trainer->net == NULL) return moei_error(error, MOE_ERR_STATE, "no batch since the last update");
    status = moei_trainer_meet(trainer, NULL, moei_update_check(trainer, error), &none, error);
    if (status != MOE_OK) return status;
    status = moei_trainer_reduce(trainer, error);
    if (status == MOE_OK) status = moei_trainer_norm(trainer, trainer->n_accumulated, 1, &norm, error);
    if (status == MOE_OK) status = moei_trainer_apply(trainer, norm, error);
    /* the gradients have been summed over ranks */
    if (status != MOE_OK && trainer->net->transport != NULL) trainer->n_accumulated = 0;
    if (status == MOE_OK && step != NULL) step->gradient_norm = norm;
    return status;
}

moe_status moe_trainer_step(moe_trainer *trainer, const moe_data *batch, moe_step *step, moe_error *error) {
    moe_step made;
    moe_status status = moei_trainer_add(trainer, batch, 1, &made, &made.gradient_norm, error);
    if (status == MOE_OK) status = moei_trainer_apply(trainer, made.gradient_norm, error);
    if (status == MOE_OK && step != NULL) *step = made;
    return status;
}

#endif /* MOE_NO_TRAIN */

/* ==== >>code_files ============================================================================ */

/* The format of the configuration, which is JSON, that this version writes: of 0.2. It also reads
   1, that of 0.1, in which fields without effect are reset, not refused. A router that still has
   such a field, because its tensor is in the file, is written in format 1. */
enum { MOEI_CONFIG_FORMAT = 2 };

/* The metadata key of the checksums: of each tensor the CRC-32 (that of zlib) of its bytes in the
   file, as eight hexadecimal digits, in the order of the network's parameters, then the trainer's
   tensors. */
#define MOEI_SUMS_KEY "moe.crc32"

/* Whether a field is saved: not one that says how a model runs. */
static int moei_is_saved(const moe_field *field) { return moei_strcmp(field->name, "kernels") != 0; }

/* A layer's tensors as those of a network without modules; *module becomes that layer. */
static moe_net moei_layer_list(const moe_layer *layer, moe_tensor tensors[MOE_LAYER_PARAMETER_COUNT],
                               moe_module *module) {
    moe_net list;
    memset(&list, 0, sizeof list);
    memset(module, 0, sizeof *module);
    module->kind = MOE_MODULE_MIXTURE;
    module->layer = *layer;
    list.allocator = layer->allocator;
    list.transport = layer->config.transport;
    list.modules = module;
    list.tensors = tensors;
    while (list.n_tensors < MOE_LAYER_PARAMETER_COUNT &&
           moe_layer_tensor(layer, list.n_tensors, &tensors[list.n_tensors]) == MOE_OK)
        list.n_tensors++;
    return list;
}

/* ---- writing the configuration ---- */

#ifndef MOE_NO_TRAIN

/* The text under construction; after a failure nothing more is added. */
typedef struct moei_config_text {
    moe_buffer buffer;
    moe_status status;
} moei_config_text;

static void moei_config_put(moei_config_text *c, const char *s) {
    if (c->status == MOE_OK) c->status = moei_buffer_write(&c->buffer, s, moei_strlen(s));
}

/* "name":value for every field that is not 0, or for all; comma: others precede them. */
static void moei_config_put_fields(moei_config_text *c, const moe_field *fields, const void *config, int all,
                                   int comma) {
    char value[64];
    for (; fields->name != NULL; fields++) {
        const char *quote = fields->kind == MOE_FIELD_CHOICE ? "\"" : "";
        if (!moei_is_saved(fields) || (!all && moei_field_is_zero(fields, config))) continue;
        moe_field_text(fields, config, value, sizeof value);
        if (comma) moei_config_put(c, ",");
        moei_config_put(c, "\"");
        moei_config_put(c, fields->name);
        moei_config_put(c, "\":");
        moei_config_put(c, quote);
        moei_config_put(c, value);
        moei_config_put(c, quote);
        comma = 1;
    }
}

static void moei_config_put_module(moei_config_text *c, const moe_module *m) {
    moei_config_put(c, "{\"module\":\"");
    moei_config_put(c, moei_module_names[m->kind]);
    moei_config_put(c, "\"");
    moei_config_put_fields(c, moei_module_fields[m->kind], moei_module_settings(m),
                           m->kind == MOE_MODULE_ACTIVATION || m->kind == MOE_MODULE_DROPOUT, 1);
    moei_config_put(c, "}");
}

static void moei_config_put_net(moei_config_text *c, const moe_net *net) {
    moe_module head;
    size_t i;
    int old = 0;
    memset(&head, 0, sizeof head);
    head.d_in = net->d_in;
    for (i = 0; i < net->n_modules; i++)
        old |= moei_routes(net, i) && net->modules[i].layer.config.router.preset == MOEI_OF_A_FILE;
    moei_config_put(c, old ? "{\"format\":1,\"net\":{" : "{\"format\":2,\"net\":{");
    moei_config_put_fields(c, moei_net_fields, &head, 1, 0);
    moei_config_put(c, ",\"modules\":[");
    for (i = 0; i < net->n_modules; i++) {
        if (i > 0) moei_config_put(c, ",");
        moei_config_put_module(c, &net->modules[i]);
    }
    moei_config_put(c, "]}}");
}

static void moei_config_put_layer(moei_config_text *c, const moe_layer_config *config) {
    const int old = config->router.preset == MOEI_OF_A_FILE;
    moei_config_put(c, old ? "{\"format\":1,\"layer\":{" : "{\"format\":2,\"layer\":{");
    moei_config_put_fields(c, moe_layer_fields(), config, 0, 0);
    moei_config_put(c, "}}");
}

/* The text as the value of metadata, terminated. */
static moe_status moei_config_end(moei_config_text *c, moe_error *error) {
    if (c->status == MOE_OK) c->status = moei_buffer_write(&c->buffer, "", 1);
    return c->status == MOE_OK
               ? MOE_OK
               : moei_error(error, c->status, "the configuration's text: %s", moe_status_text(c->status));
}

/* ---- writing the tensors: the first process writes and fetches the others' experts ---- */

#ifndef MOEI_PIECE
#define MOEI_PIECE 65536 /* numbers */
#endif

static const char *const moei_moment_names[] = {"trainer.first", "trainer.second"};

/* Whether this process writes the file. */
static int moei_writes(const struct moe_transport *t) { return t == NULL || moei_group(t)->lead; }

/* A file being written. */
typedef struct moei_writing {
    const moe_net *net;         /* or one that holds a layer's tensors */
    const moe_trainer *trainer; /* its moments follow the network's tensors, or NULL */
    moe_stream *stream;         /* of the process that writes, else NULL */
    int over;            /* 1: all processes know that it has failed */
    size_t n_tensors;    /* in the file */
    moe_tensor *tensors; /* [n_tensors] as in the file */
    char *sums;          /* [8 n_tensors + 1] */
    moe_real *piece;     /* [MOEI_PIECE] of the first of several processes */
    void *memory;        /* all of these */
    size_t size;
} moei_writing;

/* A tensor of the network, or its moments: data [count] is what this process holds. Does nothing
   after a failure that all processes know of. */
static moe_status moei_put_tensor(moei_writing *w, moe_status status, const moe_tensor *tensor, const moe_real *data,
                                  moe_error *error) {
    size_t experts = moei_parted(w->net, tensor);
    if (w->over) return status;
    if (experts > 0) {
        status = moei_group(w->net->transport)->hooks->write_experts(w, status, experts, tensor, data, error);
        w->over = status != MOE_OK;
        return status;
    }
    if (status != MOE_OK || w->stream == NULL) return status;
    return moei_write_reals(w->stream, data, tensor->count, error);
}

/* Writes tensor i of the file. */
static moe_status moei_put_values(void *ctx, moe_status status, size_t i, moe_error *error) {
    moei_writing *w = (moei_writing *)ctx;
    const moe_net *net = w->net;
    const moe_real *moments;
    size_t k;
    if (i < net->n_tensors) return moei_put_tensor(w, status, &net->tensors[i], net->tensors[i].data, error);
    moments = w->trainer->memory + (i - net->n_tensors) * moei_net_numbers(net);
    for (k = 0; k < net->n_tensors; k++)
        status = moei_put_tensor(w, status, &net->tensors[k], moments + (net->tensors[k].data - net->memory), error);
    return status;
}

static moe_status moei_put_ready(void *ctx, moe_status status, moe_error *error) {
    return moei_vote(((const moei_writing *)ctx)->net->transport, status, error);
}

/* The parameter count of the network's file; 0: it does not fit size_t. */
static size_t moei_net_parameter_count(const moe_net *net) {
    size_t i, numbers = 0;
    for (i = 0; i < net->n_tensors; i++) {
        moe_tensor whole = moei_whole_tensor(net, &net->tensors[i]);
        if ((whole.count == 0 && net->tensors[i].count > 0) || !moei_add(numbers, whole.count, &numbers)) return 0;
    }
    return numbers;
}

/* Moment i as a tensor of the file. */
static void moei_moment(const moe_trainer *trainer, size_t i, moe_tensor *out) {
    memset(out, 0, sizeof *out);
    memcpy(out->name, moei_moment_names[i], moei_strlen(moei_moment_names[i]));
    out->n_dims = 1;
    out->shape[0] = out->count = moei_net_parameter_count(trainer->net);
    out->data = trainer->memory + i * moei_net_numbers(trainer->net);
}

static moe_status moei_writing_begin(moei_writing *w, const moe_net *net, const moe_trainer *trainer,
                                     moe_stream *stream, moe_error *error) {
    const struct moe_transport *t = net->transport;
    moei_layout l = moei_layout_begin(NULL);
    size_t i, moments = trainer != NULL ? moei_moments(trainer) : 0;
    int again;
    memset(w, 0, sizeof *w);
    w->net = net;
    w->trainer = trainer;
    w->stream = moei_writes(t) ? stream : NULL;
    w->n_tensors = net->n_tensors + moments;
    for (again = 0; again < 2; again++) {
        w->tensors = (moe_tensor *)moei_take(&l, w->n_tensors, sizeof *w->tensors);
        w->sums = (char *)moei_take(&l, 8 * w->n_tensors + 1, 1);
        w->piece = t != NULL && moei_writes(t) ? moei_take_reals(&l, MOEI_PIECE, 1) : NULL;
        if (again) break;
        w->size = l.used;
        w->memory = l.overflow ? NULL : moei_alloc(&net->allocator, w->size, 1);
        if (w->memory == NULL)
            return moei_error(error, MOE_ERR_MEMORY, "no memory for the list of %z tensors", w->n_tensors);
        l = moei_layout_begin(w->memory);
    }
    for (i = 0; i < net->n_tensors; i++) w->tensors[i] = moei_whole_tensor(net, &net->tensors[i]);
    for (i = 0; i < moments; i++) moei_moment(trainer, i, &w->tensors[net->n_tensors + i]);
    return MOE_OK;
}

static moe_status moei_crc_write(void *ctx, const void *from, size_t size) {
    moei_crc_add((moei_crc *)ctx, (const unsigned char *)from, size);
    return MOE_OK;
}

/* The checksums precede the data, and a stream cannot seek, so all tensors are put twice, first
   into their checksums. */
static moe_status moei_writing_sums(moei_writing *w, moe_error *error) {
    moe_stream *stream = w->stream, to;
    moei_crc crc;
    moe_status status = MOE_OK;
    size_t i;
    int digit;
    to.ctx = &crc;
    to.read = NULL;
    to.write = moei_crc_write;
    to.sync = NULL;
    if (stream != NULL) w->stream = &to;
    for (i = 0; i < w->n_tensors && status == MOE_OK; i++) {
        moei_crc_begin(&crc);
        status = moei_put_values(w, status, i, error);
        for (digit = 0; digit < 8; digit++)
            w->sums[8 * i + (size_t)digit] = "0123456789abcdef"[~crc.sum >> (28 - 4 * digit) & 15u];
    }
    w->sums[8 * w->n_tensors] = '\0';
    w->stream = stream;
    return status;
}

/* Writes a file with the given metadata, unless status is an earlier failure. Of several processes
   the first one writes, and the others send it their experts. */
static moe_status moei_write(const moe_net *net, const moe_trainer *trainer, const moe_metadata *metadata,
                             size_t n_metadata, moe_stream *stream, moe_status status, moe_error *error) {
    const struct moe_transport *t = net->transport;
    moe_metadata all[3];
    moei_writing w;
    moei_values values;
    size_t i, bytes;
    int begun;
    memset(&w, 0, sizeof w);
    if (status == MOE_OK) status = moei_writing_begin(&w, net, trainer, stream, error);
    for (i = 0; i < w.n_tensors && status == MOE_OK; i++) status = moei_write_check(&w.tensors[i], i, &bytes, error);
    status = moei_vote(t, status, error);
    begun = status == MOE_OK;
    if (begun) status = moei_writing_sums(&w, error);
    memcpy(all, metadata, n_metadata * sizeof *all);
    all[n_metadata].key = MOEI_SUMS_KEY;
    all[n_metadata].value = w.sums;
    values.ctx = &w;
    values.ready = moei_put_ready;
    values.put = moei_put_values;
    if (status == MOE_OK && moei_writes(t))
        status = moei_file_write(stream, w.tensors, w.n_tensors, all, n_metadata + 1, &values, &net->allocator, error);
    else if (status == MOE_OK) {
        status = moei_put_ready(&w, status, error);
        for (i = 0; i < w.n_tensors && status == MOE_OK; i++) status = moei_put_values(&w, status, i, error);
    }
    if (w.memory != NULL) moei_free(&net->allocator, w.memory, w.size);
    return begun ? moei_vote(t, status, error) : status;
}

/* Writes a network, or (layer not NULL) the list of a layer's tensors. */
static moe_status moei_list_write(const moe_net *list, const moe_layer *layer, moe_stream *stream, moe_error *error) {
    moei_config_text c;
    moe_metadata metadata;
    moe_status status = MOE_OK;
    memset(&c, 0, sizeof c);
    c.buffer.allocator = list->allocator;
    if (stream == NULL && moei_writes(list->transport))
        status = MOEI_REFUSE(error, "%s and stream must not be NULL", layer != NULL ? "layer" : "net");
    else if (layer == NULL && (!list->built || list->external))
        status = moei_error(error, MOE_ERR_STATE, "the network %s",
                            list->built ? "has tensors of the caller (net.external = 1)" : "is not built");
    else if (moei_writes(list->transport)) {
        if (layer != NULL) moei_config_put_layer(&c, &layer->config);
        else moei_config_put_net(&c, list);
        status = moei_config_end(&c, error);
    }
    metadata.key = MOEI_CONFIG_KEY;
    metadata.value = (const char *)c.buffer.data;
    status = moei_write(list, NULL, &metadata, 1, stream, status, error);
    moe_buffer_free(&c.buffer);
    return status;
}

moe_status moe_net_write(const moe_net *net, moe_stream *stream, moe_error *error) {
    if (net == NULL) return MOEI_REFUSE(error, "net and stream must not be NULL");
    return moei_list_write(net, NULL, stream, error);
}

moe_status moe_layer_write(const moe_layer *layer, moe_stream *stream, moe_error *error) {
    moe_tensor tensors[MOE_LAYER_PARAMETER_COUNT];
    moe_module module;
    moe_net list;
    if (layer == NULL) return MOEI_REFUSE(error, "layer and stream must not be NULL");
    list = moei_layer_list(layer, tensors, &module);
    return moei_list_write(&list, layer, stream, error);
}

#ifndef MOE_NO_STDIO

/* What moe_file_replace hands to its callback. */
typedef struct moei_saved {
    moe_status (*write)(const void *object, moe_stream *stream, moe_error *error);
    const void *object;
    moe_error *error;
    int begun;
} moei_saved;

static moe_status moei_save(void *ctx, moe_stream *stream) {
    moei_saved *s = (moei_saved *)ctx;
    s->begun = 1;
    return s->write(s->object, stream, s->error);
}

/* moe_file_replace in the first process, while the others send it their tensors. write takes part
   in a vote before it ends; if no file can be created, that vote is taken here. */
static moe_status moei_save_on(const struct moe_transport *t, const char *path,
                               moe_status (*write)(const void *object, moe_stream *stream, moe_error *error),
                               const void *object, moe_error *error) {
    moei_saved s;
    moe_status status;
    s.write = write;
    s.object = object;
    s.error = error;
    s.begun = 0;
    status = moei_writes(t) ? moe_file_replace(path, moei_save, &s, error) : moei_save(&s, NULL);
    if (!s.begun) status = moei_vote(t, status, error);
    return moei_vote(t, status, error);
}

static moe_status moei_net_save(const void *net, moe_stream *stream, moe_error *error) {
    return moe_net_write((const moe_net *)net, stream, error);
}

moe_status moe_net_save(const moe_net *net, const char *path, moe_error *error) {
    return net != NULL ? moei_save_on(net->transport, path, moei_net_save, net, error)
                       : MOEI_REFUSE(error, "net must not be NULL");
}

static moe_status moei_layer_save(const void *layer, moe_stream *stream, moe_error *error) {
    return moe_layer_write((const moe_layer *)layer, stream, error);
}

moe_status moe_layer_save(const moe_layer *layer, const char *path, moe_error *error) {
    return layer != NULL ? moei_save_on(layer->config.transport, path, moei_layer_save, layer, error)
                         : MOEI_REFUSE(error, "layer must not be NULL");
}

#endif
#endif /* MOE_NO_TRAIN */

/* ---- reading the configuration: a pull parser without recursion ---- */

enum { MOEI_CONFIG_FIELDS = 192 };

/* Keys that begin with _ are notes: nothing reads them. */
static int moei_is_note(moei_span key) { return key.p < key.end && key.p[0] == '_'; }

/* A key that is unknown, or occurs twice. */
static moe_status moei_config_refuse(moei_json *j, const char *place, moei_span key, int twice) {
    char shown[52];
    return moei_json_refuse(j, (size_t)(key.p - j->bytes), twice ? MOE_ERR_FORMAT : MOE_ERR_UNSUPPORTED,
                            twice ? "%s: the key '%s' occurs twice" : "%s: unknown key '%s'", place,
                            moei_span_text(key, shown));
}

/* Walks over an object whose keys are names (NULL at the end) and notes; at[i] gets where the value
   of names[i] begins, 0 when it is not there. */
static moe_status moei_config_members(moei_json *j, const char *place, const char *const *names, size_t *at) {
    moei_span key;
    int i, first, more;
    moe_status status = moei_json_take(j, '{');
    for (i = 0; names[i] != NULL; i++) at[i] = 0;
    for (first = 1; status == MOE_OK; first = 0) {
        if ((status = moei_json_key(j, first, &key, &more)) != MOE_OK || !more) break;
        for (i = 0; names[i] != NULL && !moei_span_is(key, names[i]);) i++;
        if (names[i] == NULL && !moei_is_note(key)) return moei_config_refuse(j, place, key, 0);
        if (names[i] != NULL && at[i] != 0) return moei_config_refuse(j, place, key, 1);
        if (names[i] != NULL) at[i] = j->at;
        status = moei_config_skip(j);
    }
    return status;
}

/* The value of one field: a text for a choice, else a number, as of flags that became choices. */
static moe_status moei_config_value(moei_json *j, const char *place, const moe_field *field, void *config) {
    char shown[52];
    const char *value = shown;
    const int c = moei_json_peek(j), text = field->kind == MOE_FIELD_CHOICE && (c < '0' || c > '9');
    moe_error why;
    moei_span s;
    size_t at = j->at;
    int i;
    moe_status status = MOE_OK;
    if (text) {
        status = moei_json_string(j, &s);
        if (status != MOE_OK) return status;
        (void)moei_span_text(s, shown);
        for (i = 0; field->choices[i] != NULL; i++)
            if (moei_span_is(s, field->choices[i])) value = field->choices[i];
    } else {
        s = moei_config_word(j);
        if (!moei_is_json_number(s))
            return moei_json_refuse(j, at, MOE_ERR_FORMAT, "%s: %s must be a number", place, field->name);
        value = (const char *)s.p;
    }
    status = moei_field_set_n(field, config, value, text ? moei_strlen(value) : moei_span_length(s), &why);
    return status == MOE_OK ? MOE_OK : moei_json_refuse(j, at, status, "%s: %s", place, why.message);
}

/* An object whose keys are fields, notes and, for a module, "module". */
static moe_status moei_config_fields(moei_json *j, const char *place, const moe_field *fields, void *config,
                                     int is_module) {
    unsigned char seen[MOEI_CONFIG_FIELDS];
    moei_span key;
    int first, more;
    moe_status status = moei_json_take(j, '{');
    memset(seen, 0, sizeof seen);
    for (first = 1; status == MOE_OK; first = 0) {
        int i = 0;
        if ((status = moei_json_key(j, first, &key, &more)) != MOE_OK || !more) break;
        if (moei_is_note(key) || (is_module && moei_span_is(key, "module"))) {
            status = moei_config_skip(j);
            continue;
        }
        while (fields[i].name != NULL && !moei_span_is(key, fields[i].name)) i++;
        if (fields[i].name == NULL || !moei_is_saved(&fields[i]) || i >= MOEI_CONFIG_FIELDS)
            return moei_config_refuse(j, place, key, 0);
        if (seen[i]++) return moei_config_refuse(j, place, key, 1);
        status = moei_config_value(j, place, &fields[i], config);
    }
    return status;
}

/* The kind of the module whose object begins at j; j stays there. */
static moe_status moei_config_kind(moei_json *j, const char *place, int *kind) {
    size_t at = j->at;
    char shown[52];
    moei_span key, name;
    int first, more;
    moe_status status = moei_json_take(j, '{');
    for (first = 1, *kind = -1; status == MOE_OK; first = 0) {
        if ((status = moei_json_key(j, first, &key, &more)) != MOE_OK || !more) break;
        if (!moei_span_is(key, "module")) {
            status = moei_config_skip(j);
            continue;
        }
        if (*kind >= 0) return moei_config_refuse(j, place, key, 1);
        if ((status = moei_json_string(j, &name)) != MOE_OK) break;
        for (*kind = 0; *kind < MOE_MODULE_COUNT && !moei_span_is(name, moei_module_names[*kind]);) ++*kind;
        if (*kind == MOE_MODULE_COUNT)
            return moei_json_refuse(j, (size_t)(name.p - j->bytes), MOE_ERR_UNSUPPORTED, "%s: unknown module '%s'",
                                    place, moei_span_text(name, shown));
    }
    if (status == MOE_OK && *kind < 0)
        return moei_json_refuse(j, at, MOE_ERR_FORMAT, "%s: the key 'module' is missing", place);
    if (status == MOE_OK) j->at = at;
    return status;
}

/* In a file, act is ignored with kinds of experts that have none. */
static void moei_config_act(moe_layer_config *config) {
    if (!(moei_experts[config->expert].has & MOEI_HAS_ACT)) config->act = 0;
}

/* Adds one element of "modules" to the network. */
static moe_status moei_config_module(moei_json *j, moe_net *net, int origin) {
    moe_module m;
    char place[32];
    moei_text t = moei_text_begin(place, sizeof place);
    size_t at;
    moe_status status;
    moei_put(&t, "module ", 7);
    moei_put_integer(&t, (int64_t)net->n_modules);
    memset(&m, 0, sizeof m);
    (void)moei_json_peek(j);
    at = j->at;
    status = moei_config_kind(j, place, &m.kind);
    m.layer.config.router.preset = origin;
    if (status == MOE_OK)
        status = moei_config_fields(j, place, moei_module_fields[m.kind], moei_module_settings(&m), 1);
    if (status != MOE_OK) return status;
    moei_config_act(&m.layer.config);
    status = moe_net_append(net, &m);
    return status == MOE_OK ? MOE_OK : moei_json_refuse(j, at, status, "%s", net->error.message);
}

/* The whole text: finds where the value of "net" or "layer" begins, and checks the format. *origin
   is where its routers come from (moe_router_config.preset). */
static moe_status moei_config_top(moei_json *j, const char *wanted, size_t *value_at, int *origin) {
    static const char *const names[] = {"format", "net", "layer", NULL};
    char shown[52];
    size_t at[3];
    moei_span format;
    moe_real number;
    int layer = moei_strcmp(wanted, "layer") == 0;
    moe_status status = moei_config_members(j, "the top", names, at);
    if (status != MOE_OK) return status;
    if (moei_json_peek(j) >= 0) return moei_json_refuse(j, j->at, MOE_ERR_FORMAT, "nothing may follow the object");
    j->at = at[0];
    if (at[0] == 0) return moei_json_refuse(j, 0, MOE_ERR_FORMAT, "the key 'format' is missing");
    format = moei_config_word(j);
    if (!moei_is_json_number(format) || !moei_parse_real((const char *)format.p, moei_span_length(format), &number))
        return moei_json_refuse(j, at[0], MOE_ERR_FORMAT, "format must be a number");
    *origin = number < (moe_real)MOEI_CONFIG_FORMAT ? MOEI_OF_A_FILE : 0;
    if (number < MOEI_R(1.0) || number > (moe_real)MOEI_CONFIG_FORMAT ||
        number < (moe_real)(int)number || number > (moe_real)(int)number)
        return moei_json_refuse(j, at[0], MOE_ERR_UNSUPPORTED, "format = %s: this version reads formats 1 to %d",
                                moei_span_text(format, shown), (int)MOEI_CONFIG_FORMAT);
    *value_at = at[layer ? 2 : 1];
    if (*value_at == 0 || at[layer ? 1 : 2] != 0)
        return moei_json_refuse(j, j->at, MOE_ERR_FORMAT,
                                "this is not the file of a single %s: 'net' is %s, 'layer' is %s", wanted,
                                at[1] != 0 ? "there" : "missing", at[2] != 0 ? "there" : "missing");
    return MOE_OK;
}

/* How a network or a layer is read. */
typedef struct moei_net_options {
    int kernels;
    const moe_allocator *allocator;
    const struct moe_transport *transport;
    int trainable;
} moei_net_options;

static moe_status moei_config_net(moei_json *j, moe_net *net, const moei_net_options *options) {
    static const char *const names[] = {"d_in", "modules", NULL};
    moe_module head;
    size_t start, at[2];
    int origin;
    moe_status status = moei_config_top(j, "net", &start, &origin);
    if (status != MOE_OK) return status;
    j->at = start;
    if ((status = moei_config_members(j, "net", names, at)) != MOE_OK) return status;
    if (at[0] == 0 || at[1] == 0)
        return moei_json_refuse(j, start, MOE_ERR_FORMAT, "net: the key '%s' is missing", names[at[0] == 0 ? 0 : 1]);
    memset(&head, 0, sizeof head);
    j->at = at[0];
    if ((status = moei_config_value(j, "net", moei_net_fields, &head)) != MOE_OK) return status;
    status = moe_net_init(net, head.d_in, options->kernels, options->allocator);
    if (status != MOE_OK) return moei_json_refuse(j, at[0], status, "%s", net->error.message);
    net->transport = options->transport;
    j->at = at[1];
    if ((status = moei_json_take(j, '[')) != MOE_OK) return status;
    do {
        if ((status = moei_config_module(j, net, origin)) != MOE_OK) return status;
        if (moei_json_peek(j) == ']') return MOE_OK;
    } while ((status = moei_json_take(j, ',')) == MOE_OK);
    return status;
}

static moe_status moei_config_layer(moei_json *j, moe_layer_config *config) {
    size_t start;
    int origin;
    moe_status status = moei_config_top(j, "layer", &start, &origin);
    if (status != MOE_OK) return status;
    j->at = start;
    memset(config, 0, sizeof *config);
    config->router.preset = origin;
    status = moei_config_fields(j, "layer", moe_layer_fields(), config, 0);
    moei_config_act(config);
    return status;
}

static moe_status moei_config_length(const moe_file *file, size_t *length, moe_error *error) {
    return moe_file_metadata(file, MOEI_CONFIG_KEY, NULL, 0, length) != MOE_ERR_NOT_FOUND
               ? MOE_OK
               : moei_error(error, MOE_ERR_FORMAT, "the file has no configuration: no metadata with the key '%s'",
                            MOEI_CONFIG_KEY);
}

/* Reads the configuration of a file into net, or when that is NULL into layer. */
static moe_status moei_config_read(const moe_file *file, const moei_net_options *options, moe_net *net,
                                   moe_layer_config *layer, moe_error *error) {
    moei_json j;
    moe_error why;
    char *text;
    size_t length = 0;
    moe_status status = moei_config_length(file, &length, error);
    if (status == MOE_OK) status = moei_allocator_check(options->allocator, error);
    if (status != MOE_OK) return status;
    text = (char *)moei_alloc(options->allocator, length + 1, 1);
    if (text == NULL) return moei_error(error, MOE_ERR_MEMORY, "no memory for %z bytes of configuration", length + 1);
    memset(&j, 0, sizeof j);
    j.bytes = (const unsigned char *)text;
    j.end = length;
    j.error = &why;
    why.message[0] = '\0';
    status = moe_file_metadata(file, MOEI_CONFIG_KEY, text, length + 1, &length);
    if (status == MOE_OK) status = net != NULL ? moei_config_net(&j, net, options) : moei_config_layer(&j, layer);
    if (status == MOE_ERR_FORMAT && moei_json_peek(&j) < 0)
        (void)moei_error(error, status, "configuration: the text ends too early, after %z bytes", length);
    else if (status != MOE_OK) (void)moei_error(error, status, "configuration, %s", why.message);
    moei_free(options->allocator, text, length + 1);
    return status;
}

/* ---- reading the tensors ---- */

/* Whether a tensor of a file belongs to a trainer, not to the network. */
static int moei_is_of_trainer(const moe_file_tensor *t) {
    const char *p = "trainer.";
    moei_chars chars;
    for (chars = moei_chars_of(moei_span_of(t->name, t->name_length)); *p != '\0'; p++)
        if (moei_chars_next(&chars) != *p) return 0;
    return 1;
}

/* The tensor of a name as in the file; a network without modules is a plain array. */
static moe_tensor *moei_file_wanted(const moe_net *net, const moe_file_tensor *t) {
    char name[MOE_NAME_SIZE];
    moei_chars chars;
    size_t n = 0;
    int c;
    for (chars = moei_chars_of(moei_span_of(t->name, t->name_length)); (c = moei_chars_next(&chars)) >= 0;
         name[n++] = (char)c)
        if (n + 1 == sizeof name) return NULL;
    name[n] = '\0';
    if (net->n_modules > 0) return moei_net_tensor(net, name);
    for (n = 0; n < net->n_tensors; n++)
        if (moei_strcmp(net->tensors[n].name, name) == 0) return &net->tensors[n];
    return NULL;
}

/* "[10,64]" */
static const char *moei_shape_text(const size_t *shape, int n_dims, char out[80]) {
    moei_text t = moei_text_begin(out, 80);
    int i;
    moei_put(&t, "[", 1);
    for (i = 0; i < n_dims; i++) {
        if (i > 0) moei_put(&t, ",", 1);
        moei_put_unsigned(&t, shape[i]);
    }
    moei_put(&t, "]", 1);
    return out;
}

static moe_status moei_file_fits(const moe_file_tensor *found, const char *name, const size_t *shape, int n_dims,
                                 moe_error *error) {
    char want[80], have[80];
    if (found->dtype >= MOE_DTYPE_COUNT)
        return moei_error(error, MOE_ERR_UNSUPPORTED, "tensor '%s': an element type that this version does not know",
                          name);
    if (found->n_dims == n_dims && moei_memcmp(shape, found->shape, (size_t)n_dims * sizeof *shape) == 0)
        return MOE_OK;
    return moei_error(error, MOE_ERR_SHAPE, "tensor '%s': the shape must be %s, the file has %s", name,
                      moei_shape_text(shape, n_dims, want), moei_shape_text(found->shape, found->n_dims, have));
}

static moe_status moei_file_compare(const moe_net *net, const moe_file_tensor *found, const moe_tensor **wanted,
                                    moe_error *error) {
    char shown[52];
    const moe_tensor *t = moei_file_wanted(net, found);
    moe_tensor whole;
    if (t == NULL)
        return moei_error(error, MOE_ERR_UNSUPPORTED, "tensor '%s': the configuration has no tensor of this name",
                          moei_span_text(moei_span_of(found->name, found->name_length), shown));
    whole = moei_whole_tensor(net, t);
    *wanted = t;
    return moei_file_fits(found, t->name, whole.shape, t->n_dims, error);
}

/* Compares names and shapes, before memory for the values is allocated: exactly the registered
   tensors must be in the file, besides those of a trainer in a network's file. So the memory that a
   file costs is bounded by its size. */
static moe_status moei_file_match(const moe_net *net, moe_file *file, moe_error *error) {
    moe_file_tensor found;
    const moe_tensor *wanted = NULL;
    unsigned char *seen = (unsigned char *)moei_alloc(&net->allocator, net->n_tensors, 1);
    moe_status status = MOE_OK;
    size_t i;
    if (seen == NULL) return moei_error(error, MOE_ERR_MEMORY, "no memory for the list of %z tensors", net->n_tensors);
    file->at = 0;
    while (status == MOE_OK && moe_file_next(file, &found) == MOE_OK) {
        if (net->n_modules > 0 && moei_is_of_trainer(&found)) continue;
        status = moei_file_compare(net, &found, &wanted, error);
        if (status == MOE_OK) seen[wanted - net->tensors] = 1;
    }
    for (i = 0; i < net->n_tensors && status == MOE_OK; i++)
        if (!seen[i])
            status = moei_error(error, MOE_ERR_NOT_FOUND, "tensor '%s': missing in the file", net->tensors[i].name);
    moei_free(&net->allocator, seen, net->n_tensors);
    return status;
}

/* ---- a file's bytes: in memory, or, with several processes, those that this one needs ---- */

static uint64_t moei_hash(uint64_t hash, const void *bytes, size_t n) {
    const unsigned char *p = (const unsigned char *)bytes;
    uint64_t word;
    for (; n >= sizeof word; p += sizeof word, n -= sizeof word) {
        memcpy(&word, p, sizeof word);
        hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 32;
    }
    for (; n > 0; p++, n--) hash = (hash ^ *p) * UINT64_C(0x100000001b3);
    return hash;
}

typedef struct moei_contents {
    moe_file file;       /* opened */
    moe_buffer bytes;    /* of all of it, or of its header; empty: they are the caller's */
    /* Reads size bytes from `at` on, where they are on the disk; NULL: all is in memory. */
    moe_status (*read)(struct moei_contents *c, size_t at, void *to, size_t size, moe_error *error);
    void *disk;          /* the FILE */
    const char *path;    /* its name */
    /* [size] what was read of the file: each tensor's part, in the order of the walk */
    unsigned char *data;
    size_t size, at;
    uint64_t mark;       /* hash of what all processes read */
    moei_span sums;      /* the checksums; p NULL: there are none */
    size_t index;        /* of the tensor that is checked */
    uint32_t damage;     /* of the checksums of parts, see moei_sum_part */
    moe_allocator allocator;
} moei_contents;

/* Finds the checksums of a file; those before version 0.2 have none. */
static moe_status moei_contents_sums(moei_contents *c, moe_error *error) {
    c->sums.p = c->sums.end = NULL;
    if (!moei_file_metadata_span(&c->file, MOEI_SUMS_KEY, &c->sums)) c->sums.p = NULL;
    else if (moei_span_length(c->sums) / 8 != c->file.n_tensors || moei_span_length(c->sums) % 8 != 0)
        return moei_error(error, MOE_ERR_FORMAT, "metadata " MOEI_SUMS_KEY ": %z tensors need 8 digits each",
                          c->file.n_tensors);
    return MOE_OK;
}

/* The checksum of tensor `index`, in a file that has checksums. */
static moe_status moei_sum_wanted(const moei_contents *c, const char *name, size_t index, uint32_t *wanted,
                                  moe_error *error) {
    int i, digit = 0;
    *wanted = 0;
    for (i = 0; i < 8 && digit >= 0; i++) {
        digit = index < c->file.n_tensors ? moei_hex_digit(c->sums.p[8 * index + (size_t)i]) : -1;
        *wanted = *wanted << 4 | ((uint32_t)digit & 15u);
    }
    if (digit >= 0) return MOE_OK;
    return moei_error(error, MOE_ERR_FORMAT, "metadata " MOEI_SUMS_KEY ": the checksum of '%s' is malformed", name);
}

/* Compares the bytes of tensor `index` with their checksum, if there is one. */
static moe_status moei_sum_check(const moei_contents *c, const char *name, size_t index, const unsigned char *bytes,
                                 size_t size, moe_error *error) {
    moei_crc crc;
    uint32_t wanted = 0;
    moe_status status = c->sums.p != NULL ? moei_sum_wanted(c, name, index, &wanted, error) : MOE_OK;
    if (c->sums.p == NULL || status != MOE_OK) return status;
    moei_crc_begin(&crc);
    moei_crc_add(&crc, bytes, size);
    if (~crc.sum == wanted) return MOE_OK;
    return moei_error(error, MOE_ERR_FORMAT,
                      "tensor '%s': damaged, its CRC-32 does not match the saved one (metadata " MOEI_SUMS_KEY
                      ")", name);
}

/* The same for a part with `before` bytes before it and `after` after it. The ^ of c->damage over
   the processes that have the parts is 0 if no tensor is damaged. It is shifted by index: equal
   damage in two tensors does not cancel. */
static moe_status moei_sum_part(moei_contents *c, const char *name, size_t index, const unsigned char *bytes,
                                size_t size, size_t before, size_t after, moe_error *error) {
    moei_crc crc;
    uint32_t wanted = 0;
    moe_status status = c->sums.p != NULL ? moei_sum_wanted(c, name, index, &wanted, error) : MOE_OK;
    if (c->sums.p == NULL || status != MOE_OK || size == 0) return status;
    moei_crc_begin(&crc);
    if (before > 0) crc.sum = 0;
    moei_crc_add(&crc, bytes, size);
    c->damage ^= moei_crc_zeros(moei_crc_zeros(crc.sum, after) ^ (before > 0 ? 0 : ~wanted), index);
    return MOE_OK;
}

static moe_status moei_contents_memory(moei_contents *c, const void *bytes, size_t size, const moe_allocator *allocator,
                                       moe_error *error) {
    memset(c, 0, sizeof *c);
    if (allocator != NULL) c->allocator = *allocator;
    return moe_file_open(&c->file, bytes, size, error);
}

#ifndef MOE_NO_STDIO

#ifndef MOEI_SEEK_MOST
#define MOEI_SEEK_MOST LONG_MAX /* the longest single seek */
#endif

/* Seeks in several steps if necessary: long may have 32 bits where files are larger. */
MOEI_TOOL int moei_disk_seek(FILE *f, uint64_t to) {
    int from = SEEK_SET;
    do {
        const uint64_t step = to < (uint64_t)MOEI_SEEK_MOST ? to : (uint64_t)MOEI_SEEK_MOST;
        if (fseek(f, (long)step, from) != 0) return 0;
        to -= step;
        from = SEEK_CUR;
    } while (to > 0);
    return 1;
}

/* 1: the file has a byte at an offset; 0: it has none; -1: unknown. */
MOEI_TOOL int moei_disk_has(FILE *f, uint64_t at) {
    unsigned char byte;
    if (!moei_disk_seek(f, at)) return -1;
    if (fread(&byte, 1, 1, f) == 1) return 1;
    return ferror(f) ? -1 : 0;
}

/* The size of a file: by ftell or, where a long is too small for it, by probing. */
MOEI_TOOL int moei_disk_size(FILE *f, uint64_t *size) {
    uint64_t low = 0, high = 1;
    long end = fseek(f, 0, SEEK_END) == 0 ? ftell(f) : -1;
    int has = 1;
    *size = (uint64_t)end;
    /* a file of size 0 may still deliver bytes, or an error */
    if (end > 0) return 1;
    while (has > 0 && high < (uint64_t)1 << 50)
        if ((has = moei_disk_has(f, high - 1)) > 0) {
            low = high;
            high *= 2;
        }
    while (has >= 0 && high - low > 1) { /* low bytes are there, high are not */
        uint64_t middle = low + (high - low) / 2;
        has = moei_disk_has(f, middle - 1);
        if (has > 0) low = middle;
        else high = middle;
    }
    *size = low;
    return has >= 0;
}

/* Opens a file; a single process reads all of it. */
static moe_status moei_contents_file(moei_contents *c, const char *path, const struct moe_transport *t,
                                     const moe_allocator *allocator, moe_error *error) {
    const struct moei_hooks *hooks;
    moe_status status = MOE_OK;
    memset(c, 0, sizeof *c);
    if (allocator != NULL) c->allocator = c->bytes.allocator = *allocator;
    c->path = path;
    hooks = moei_hooks_of(t, &status, error);
    if (hooks != NULL) return hooks->file_open(moei_group(t), c, path, error);
    if (status == MOE_OK) status = moe_file_read(path, &c->bytes, error);
    return status == MOE_OK ? moe_file_open(&c->file, c->bytes.data, c->bytes.size, error) : status;
}

static void moei_contents_close(moei_contents *c) {
    if (c->disk != NULL) (void)fclose((FILE *)c->disk);
    if (c->data != NULL) moei_free(&c->allocator, c->data, c->size);
    moe_buffer_free(&c->bytes);
}

#endif

/* What a walk does with the part of each tensor that this process needs. The bytes of a file on
   disk are counted, then read, then converted; those in memory are only converted. Checksums are
   compared: in memory of all tensors, on disk of what is read, by all processes together. */
enum { MOEI_WALK_COUNT = 0, MOEI_WALK_READ, MOEI_WALK_VALUES, MOEI_WALK_CHECK };

/* Checks what was just read of a tensor, all of it or a part, against its checksum. The parts of a
   moment that all processes have count once. */
static moe_status moei_sum_of(moei_contents *c, const moe_net *net, const moe_tensor *t, const moe_file_tensor *found,
                              size_t before, size_t bytes, moe_error *error) {
    const unsigned char *data = c->data + c->at;
    if (bytes == found->bytes) return moei_sum_check(c, t->name, c->index, data, bytes, error);
    if (moei_parted(net, t) == 0 && !moei_group(net->transport)->lead) return MOE_OK;
    return moei_sum_part(c, t->name, c->index, data, bytes, before, found->bytes - before - bytes, error);
}

/* t: a tensor of the network, whose values begin with element `first` of the tensor *found, whose
   bytes begin at `begin` of the data. */
static moe_status moei_walk_part(moei_contents *c, int walk, const moe_net *net, const moe_tensor *t,
                                 const moe_file_tensor *found, size_t begin, size_t first, moe_real *to,
                                 moe_error *error) {
    moe_file_tensor part = *found;
    /* moei_file_match found as much in the file */
    size_t each = moei_dtypes[found->dtype].size, bytes = t->count * each;
    moe_status status = MOE_OK;
    if (walk == MOEI_WALK_CHECK)
        return moei_sum_check(c, t->name, c->index, found->data, found->bytes, error);
    if (walk == MOEI_WALK_COUNT) {
        c->size += bytes;
        return MOE_OK;
    }
    if (walk == MOEI_WALK_VALUES) {
        if (c->read != NULL) {
            part.data = c->data + c->at;
            part.count = t->count;
            first = 0;
        }
        status = moe_file_values(&part, first, t->count, to, NULL);
        if (status != MOE_OK) (void)moei_error(error, status, "a tensor's values: %s", moe_status_text(status));
    }
    if (walk == MOEI_WALK_READ) {
        status = c->read(c, 8 + c->file.header_size + begin + first * each, c->data + c->at, bytes, error);
        if (status == MOE_OK && moei_parted(net, t) == 0) c->mark = moei_hash(c->mark, c->data + c->at, bytes);
        if (status == MOE_OK) status = moei_sum_of(c, net, t, found, first * each, bytes, error);
    }
    if (c->read != NULL) c->at += bytes;
    return status;
}

/* Walks the network's tensors, after moei_file_match. */
static moe_status moei_contents_walk(moei_contents *c, int walk, const moe_net *net, moe_error *error) {
    moe_file_tensor found;
    moe_status status = MOE_OK;
    size_t begin;
    c->at = 0;
    c->file.at = 0;
    while (status == MOE_OK && moei_file_next(&c->file, &found, &begin) == MOE_OK) {
        const moe_tensor *t = moei_file_wanted(net, &found);
        if (net->n_modules > 0 && moei_is_of_trainer(&found)) continue;
        if (t != NULL) c->index = (size_t)(t - net->tensors);
        status = t != NULL ? moei_walk_part(c, walk, net, t, &found, begin, moei_whole_first(net, t), t->data, error)
                           : moei_error(error, MOE_ERR_FORMAT, "the file changed while it was read");
    }
    return status;
}

/* Allocates what has been counted. */
static moe_status moei_contents_take(moei_contents *c, moe_error *error) {
    c->data = (unsigned char *)moei_alloc(&c->allocator, c->size, 1);
    c->mark = moei_hash(0, c->bytes.data, c->bytes.size);
    return c->data != NULL ? MOE_OK : moei_error(error, MOE_ERR_MEMORY, "no memory for %z bytes of the file", c->size);
}

/* Reads this process's part of a file on the disk, and compares checksums. */
static moe_status moei_contents_fetch(moei_contents *c, const moe_net *net, moe_error *error) {
    moe_status status = moei_contents_sums(c, error);
    if (status == MOE_OK && c->read == NULL) return moei_contents_walk(c, MOEI_WALK_CHECK, net, error);
    if (status == MOE_OK) status = moei_contents_walk(c, MOEI_WALK_COUNT, net, error);
    if (status == MOE_OK) status = moei_contents_take(c, error);
    return status == MOE_OK ? moei_contents_walk(c, MOEI_WALK_READ, net, error) : status;
}

/* The layer that a file describes, without tensors. */
static moe_status moei_layer_open(moe_layer *made, const moe_file *file, const moei_net_options *o, moe_error *error) {
    moe_layer_config config;
    moe_status status = moei_config_read(file, o, NULL, &config, error);
    if (status != MOE_OK) return status;
    config.kernels = o->kernels;
    config.transport = o->transport;
    status = moe_layer_init(made, &config, error);
    if (status == MOE_OK && o->allocator != NULL) made->allocator = *o->allocator;
    return status;
}

static moe_status moei_net_open(moe_net *made, const moe_file *file, const moei_net_options *o, moe_error *error) {
    const moe_status status = moei_config_read(file, o, made, NULL, error);
    return status == MOE_OK ? moei_net_register(made, error) : status;
}

/* Reads object, a moe_layer or a moe_net; status is the result of opening the file. */
static moe_status moei_object_read(int is_layer, void *object, moei_contents *c, moe_status status,
                                   const moei_net_options *o, moe_error *error) {
    const moe_batch *group = moei_group(o->transport);
    moe_tensor tensors[MOE_LAYER_PARAMETER_COUNT];
    moe_module module;
    moe_layer layer;
    moe_net net; /* or one that holds the layer's tensors */
    if (object == NULL) status = MOEI_REFUSE(error, "%s must not be NULL", is_layer ? "layer" : "net");
    memset(&layer, 0, sizeof layer);
    memset(&net, 0, sizeof net);
    if (status == MOE_OK)
        status = is_layer ? moei_layer_open(&layer, &c->file, o, error) : moei_net_open(&net, &c->file, o, error);
    if (status == MOE_OK && is_layer) net = moei_layer_list(&layer, tensors, &module);
    if (status == MOE_OK) status = moei_file_match(&net, &c->file, error);
    if (status == MOE_OK) status = moei_contents_fetch(c, &net, error);
    status = moei_vote(o->transport, status, error);
    if (status == MOE_OK && group != NULL)
        status = group->hooks->file_agree(group, c, o->trainable, is_layer ? layer.kernels : net.kernels, error);
    if (status == MOE_OK) {
        status = is_layer ? moei_layer_allocate(&layer, o->trainable, error)
                          : moei_net_allocate(&net, o->trainable, error);
        if (status == MOE_OK && is_layer) net = moei_layer_list(&layer, tensors, &module);
        if (status == MOE_OK) status = moei_contents_walk(c, MOEI_WALK_VALUES, &net, error);
        status = moei_vote(o->transport, status, error);
    }
    if (status == MOE_OK && is_layer) *(moe_layer *)object = layer;
    else if (status == MOE_OK) *(moe_net *)object = net;
    else if (is_layer) moe_layer_free(&layer);
    else moe_net_free(&net);
    return status;
}

moe_status moe_net_read(moe_net *net, const void *bytes, size_t size, int trainable, int kernels,
                        const moe_allocator *allocator, moe_error *error) {
    const moei_net_options options = {kernels, allocator, NULL, trainable};
    moei_contents c;
    const moe_status status = moei_contents_memory(&c, bytes, size, allocator, error);
    return moei_object_read(0, net, &c, status, &options, error);
}

moe_status moe_layer_read(moe_layer *layer, const void *bytes, size_t size, int trainable, int kernels,
                          const moe_allocator *allocator, moe_error *error) {
    const moei_net_options options = {kernels, allocator, NULL, trainable};
    moei_contents c;
    const moe_status status = moei_contents_memory(&c, bytes, size, allocator, error);
    return moei_object_read(1, layer, &c, status, &options, error);
}

#ifndef MOE_NO_STDIO

moe_status moe_net_load(moe_net *net, const char *path, int trainable, int kernels, const moe_allocator *allocator,
                        moe_error *error) {
    const moei_net_options options = {kernels, allocator, NULL, trainable};
    moei_contents c;
    moe_status status = moei_contents_file(&c, path, NULL, allocator, error);
    status = moei_object_read(0, net, &c, status, &options, error);
    moei_contents_close(&c);
    return status;
}

moe_status moe_layer_load(moe_layer *layer, const char *path, int trainable, int kernels,
                          const moe_allocator *allocator, moe_error *error) {
    const moei_net_options options = {kernels, allocator, NULL, trainable};
    moei_contents c;
    moe_status status = moei_contents_file(&c, path, NULL, allocator, error);
    status = moei_object_read(1, layer, &c, status, &options, error);
    moei_contents_close(&c);
    return status;
}

#endif

/* ==== >>code_checkpoints ====================================================================== */

#ifndef MOE_NO_TRAIN

typedef struct moei_checkpoint {
    uint64_t format, optimizer, steps, rng, rate, position[4], batch, accumulate, seed;
    uint64_t n, length; /* the samples of moe_fit; 0: of a trainer alone */
} moei_checkpoint;

/* What a checkpoint must contain for moe_fit to resume from it, and the steps of each epoch. */
typedef struct moei_training {
    moei_checkpoint numbers;
    uint64_t epochs, steps;
} moei_training;

#define MOEI_CHECKPOINT_KEY "moe.trainer"
enum { MOEI_CHECKPOINT_FORMAT = 1, MOEI_CHECKPOINT_TEXT = 800 };

/* The text is "name number" of all rows, separated by spaces. */
typedef struct moei_checkpoint_row {
    const char *name;
    size_t offset; /* of an uint64_t in moei_checkpoint */
    int of_fit;    /* moe_fit resumes only if it is the same */
} moei_checkpoint_row;

#define MOEI_ROW(name, member, of_fit) {#name, offsetof(moei_checkpoint, member), of_fit}
static const moei_checkpoint_row moei_checkpoint_rows[] = {
    MOEI_ROW(format, format, 0),
    MOEI_ROW(optimizer, optimizer, 0),
    MOEI_ROW(steps, steps, 0),
    MOEI_ROW(rng, rng, 0),
    MOEI_ROW(rate, rate, 0), /* the bits of a double */
    MOEI_ROW(position0, position[0], 0),
    MOEI_ROW(position1, position[1], 0),
    MOEI_ROW(position2, position[2], 0),
    MOEI_ROW(position3, position[3], 0),
    MOEI_ROW(batch, batch, 1),
    MOEI_ROW(accumulate, accumulate, 1),
    MOEI_ROW(seed, seed, 1),
    MOEI_ROW(n, n, 1),
    MOEI_ROW(length, length, 1)};
#undef MOEI_ROW

enum { MOEI_CHECKPOINT_ROWS = (int)(sizeof moei_checkpoint_rows / sizeof moei_checkpoint_rows[0]) };

static uint64_t moei_checkpoint_get(const moei_checkpoint *c, int row) {
    uint64_t value;
    memcpy(&value, (const char *)c + moei_checkpoint_rows[row].offset, sizeof value);
    return value;
}

static moei_checkpoint moei_checkpoint_of(const moe_trainer *trainer) {
    moei_checkpoint c;
    double rate = (double)trainer->rate;
    memset(&c, 0, sizeof c);
    c.format = MOEI_CHECKPOINT_FORMAT;
    c.optimizer = (uint64_t)trainer->config.optimizer;
    c.steps = trainer->steps;
    c.rng = trainer->rng.state;
    memcpy(&c.rate, &rate, sizeof c.rate);
    memcpy(c.position, trainer->position, sizeof c.position);
    c.batch = (uint64_t)trainer->config.batch;
    c.accumulate = (uint64_t)trainer->config.accumulate;
    c.seed = trainer->config.seed;
    return c;
}

/* ---- writing ---- */

static void moei_checkpoint_put(const moei_checkpoint *c, char out[MOEI_CHECKPOINT_TEXT]) {
    moei_text t = moei_text_begin(out, MOEI_CHECKPOINT_TEXT);
    int i;
    for (i = 0; i < MOEI_CHECKPOINT_ROWS; i++) {
        if (i > 0) moei_put(&t, " ", 1);
        moei_put_text(&t, moei_checkpoint_rows[i].name);
        moei_put(&t, " ", 1);
        moei_put_unsigned(&t, moei_checkpoint_get(c, i));
    }
}

/* The network's configuration as text, terminated; free it with moe_buffer_free. */
static moe_status moei_checkpoint_config(const moe_net *net, moei_config_text *text, moe_error *error) {
    moe_status status;
    memset(text, 0, sizeof *text);
    text->buffer.allocator = net->allocator;
    moei_config_put_net(text, net);
    status = moei_config_end(text, error);
    if (status != MOE_OK) moe_buffer_free(&text->buffer);
    return status;
}

/* status: whether a checkpoint may be written. */
static moe_status moei_checkpoint_write(const moe_trainer *trainer, const moei_checkpoint *c, moe_stream *stream,
                                        moe_status status, moe_error *error) {
    char numbers[MOEI_CHECKPOINT_TEXT];
    moei_config_text text;
    moe_metadata metadata[2];
    memset(&text, 0, sizeof text);
    if (status == MOE_OK && stream == NULL && moei_writes(trainer->net->transport))
        status = MOEI_REFUSE(error, "stream or its write is NULL");
    if (status == MOE_OK) status = moei_checkpoint_config(trainer->net, &text, error);
    moei_checkpoint_put(c, numbers);
    metadata[0].key = MOEI_CONFIG_KEY;
    metadata[0].value = (const char *)text.buffer.data;
    metadata[1].key = MOEI_CHECKPOINT_KEY;
    metadata[1].value = numbers;
    status = moei_write(trainer->net, trainer, metadata, 2, stream, status, error);
    moe_buffer_free(&text.buffer);
    return status;
}

static moe_status moei_trainer_is_made(const moe_trainer *trainer, moe_error *error) {
    if (trainer == NULL) return MOEI_REFUSE(error, "trainer must not be NULL");
    return trainer->net != NULL ? MOE_OK : moei_error(error, MOE_ERR_STATE, "the trainer is not made");
}

static moe_status moei_trainer_between_steps(const moe_trainer *trainer, moe_error *error) {
    if (trainer->n_accumulated > 0)
        return moei_error(error, MOE_ERR_STATE, "%d batches are accumulated: a checkpoint is written between steps",
                          trainer->n_accumulated);
    return MOE_OK;
}

moe_status moe_trainer_write(const moe_trainer *trainer, moe_stream *stream, moe_error *error) {
    moei_checkpoint c;
    moe_status status = moei_trainer_is_made(trainer, error);
    if (status != MOE_OK) return status;
    c = moei_checkpoint_of(trainer);
    status = moei_trainer_between_steps(trainer, error);
    if (status == MOE_OK) status = moei_rate_check(trainer, error);
    return moei_checkpoint_write(trainer, &c, stream, status, error);
}

/* ---- reading ---- */

static moe_status moei_checkpoint_parse(const char *text, moei_checkpoint *c, moe_error *error) {
    const char *p = text;
    double rate;
    int i, good;
    memset(c, 0, sizeof *c);
    for (i = 0, good = 1; i < MOEI_CHECKPOINT_ROWS; i++) {
        uint64_t value;
        good = (i == 0 || moei_take_word(&p, " ")) && moei_take_word(&p, moei_checkpoint_rows[i].name) &&
               moei_take_word(&p, " ") && moei_take_number(&p, &value);
        if (!good) break;
        memcpy((char *)c + moei_checkpoint_rows[i].offset, &value, sizeof value);
        if (c->format != MOEI_CHECKPOINT_FORMAT)
            return moei_error(error, MOE_ERR_UNSUPPORTED,
                              "metadata " MOEI_CHECKPOINT_KEY ": this version reads format %d",
                              (int)MOEI_CHECKPOINT_FORMAT);
    }
    if (!good || *p != '\0')
        return moei_error(error, MOE_ERR_FORMAT, "metadata " MOEI_CHECKPOINT_KEY ", byte %z: %s is expected",
                          (size_t)(p - text), good ? "the end" : moei_checkpoint_rows[i].name);
    memcpy(&rate, &c->rate, sizeof rate);
    if (!(fabs(rate) <= (MOE_REAL_IS_DOUBLE ? 1e308 : 3.4e38)) || c->steps >> 53 != 0)
        return moei_error(error, MOE_ERR_FORMAT, "metadata " MOEI_CHECKPOINT_KEY ": steps or rate is out of range");
    return MOE_OK;
}

#ifndef MOE_NO_STDIO

/* Names the first number that must be the same and is not. */
static moe_status moei_checkpoint_differs(const moei_checkpoint *has, const moei_checkpoint *wanted, moe_error *error) {
    char is[24], was[24];
    int i;
    for (i = 0; i < MOEI_CHECKPOINT_ROWS; i++) {
        if (!moei_checkpoint_rows[i].of_fit || moei_checkpoint_get(has, i) == moei_checkpoint_get(wanted, i)) continue;
        return moei_error(error, MOE_ERR_CONFIG, "%s = %s: the training of the checkpoint has %s",
                          moei_checkpoint_rows[i].name, moei_unsigned_text(moei_checkpoint_get(wanted, i), is),
                          moei_unsigned_text(moei_checkpoint_get(has, i), was));
    }
    return MOE_OK;
}

/* Whether a checkpoint is one of this training. */
static moe_status moei_checkpoint_continues(const moei_checkpoint *c, const moei_training *training, moe_error *error) {
    double sums[2];
    moe_status status = moei_checkpoint_differs(c, &training->numbers, error);
    if (status != MOE_OK || c->position[0] >= training->epochs) return status;
    memcpy(sums, c->position + 2, sizeof sums);
    if (c->position[1] < training->steps && c->steps == c->position[0] * training->steps + c->position[1] &&
        fabs(sums[0]) < MOEI_HUGE && fabs(sums[1]) < MOEI_HUGE)
        return MOE_OK;
    return moei_error(error, MOE_ERR_FORMAT, "the checkpoint's position does not occur in this training");
}

#endif

/* Removes the steps of schedules, which trainers set, from a text; its format becomes 2. */
static void moei_drop_steps(char *to) {
    const char *from = to;
    uint64_t steps;
    if (moei_take_word(&from, "{\"format\":1")) to[10] = '2';
    from = to;
    while (*from != '\0')
        if (moei_take_word(&from, ",\"schedule_steps\":")) (void)moei_take_number(&from, &steps);
        else *to++ = *from++;
    *to = '\0';
}

/* Whether the file's configuration is otherwise what the trainer's network would write. */
static moe_status moei_checkpoint_same_net(const moe_net *net, const moe_file *file, moe_error *error) {
    moei_config_text text;
    char *found;
    size_t length = 0;
    moe_status status = moei_config_length(file, &length, error);
    if (status != MOE_OK) return status;
    status = moei_checkpoint_config(net, &text, error);
    if (status != MOE_OK) return status;
    found = (char *)moei_alloc(&net->allocator, length + 1, 1);
    if (found == NULL)
        status = moei_error(error, MOE_ERR_MEMORY, "no memory for %z bytes of configuration", length + 1);
    else {
        (void)moe_file_metadata(file, MOEI_CONFIG_KEY, found, length + 1, NULL);
        moei_drop_steps(found);
        moei_drop_steps((char *)text.buffer.data);
        if (moei_strcmp(found, (char *)text.buffer.data) != 0)
            status = moei_error(error, MOE_ERR_CONFIG, "the checkpoint is of a network with other modules");
    }
    moei_free(&net->allocator, found, length + 1);
    moe_buffer_free(&text.buffer);
    return status;
}

/* Checks that the file has exactly the trainer's moments. */
static moe_status moei_checkpoint_moments(const moe_trainer *trainer, moe_file *file, moe_error *error) {
    moe_file_tensor found;
    moe_status status;
    size_t i, count = 0, numbers = moei_net_parameter_count(trainer->net);
    for (i = 0; i < moei_moments(trainer); i++) {
        if (moe_file_find(file, moei_moment_names[i], &found) != MOE_OK)
            return moei_error(error, MOE_ERR_NOT_FOUND, "tensor '%s': missing in the file", moei_moment_names[i]);
        status = moei_file_fits(&found, moei_moment_names[i], &numbers, 1, error);
        if (status != MOE_OK) return status;
    }
    for (file->at = 0; moe_file_next(file, &found) == MOE_OK;) count += (size_t)moei_is_of_trainer(&found);
    if (count == i) return MOE_OK;
    return moei_error(error, MOE_ERR_UNSUPPORTED, "the file has %z tensors of a trainer instead of %z", count, i);
}

/* Checks all of a checkpoint; changes nothing. */
static moe_status moei_checkpoint_check(const moe_trainer *trainer, moe_file *file, moei_checkpoint *c,
                                        moe_error *error) {
    char text[MOEI_CHECKPOINT_TEXT];
    moe_status status = moe_file_metadata(file, MOEI_CHECKPOINT_KEY, text, sizeof text, NULL);
    if (status == MOE_ERR_NOT_FOUND)
        return moei_error(error, MOE_ERR_FORMAT,
                          "not a checkpoint: no metadata with the key '" MOEI_CHECKPOINT_KEY "'");
    if (status != MOE_OK)
        return moei_error(error, MOE_ERR_FORMAT, "metadata " MOEI_CHECKPOINT_KEY ": the text is too long");
    status = moei_checkpoint_parse(text, c, error);
    if (status == MOE_OK) status = moei_checkpoint_same_net(trainer->net, file, error);
    if (status == MOE_OK && c->optimizer != (uint64_t)trainer->config.optimizer)
        status = moei_error(error, MOE_ERR_CONFIG, "optimizer = %s: the checkpoint is of another one",
                            moei_optimizer_names[trainer->config.optimizer]);
    if (status == MOE_OK) status = moei_file_match(trainer->net, file, error);
    return status == MOE_OK ? moei_checkpoint_moments(trainer, file, error) : status;
}

/* Walks the network's tensors, then the moments: of each what this process holds. */
static moe_status moei_checkpoint_walk(const moe_trainer *trainer, moei_contents *c, int walk, moe_error *error) {
    const moe_net *net = trainer->net;
    moe_file_tensor found;
    size_t i, k, at, begin;
    moe_status status = moei_contents_walk(c, walk, net, error);
    for (i = 0; i < moei_moments(trainer) && status == MOE_OK; i++) {
        moe_real *to = trainer->memory + i * moei_net_numbers(net);
        c->index = net->n_tensors + i;
        status = moei_file_find(&c->file, moei_moment_names[i], &found, &begin);
        for (k = 0, at = 0; k < net->n_tensors && status == MOE_OK; k++) {
            const moe_tensor *t = &net->tensors[k];
            status = moei_walk_part(c, walk, net, t, &found, begin, at + moei_whole_first(net, t),
                                    to + (t->data - net->memory), error);
            at += moei_whole_tensor(net, t).count;
        }
    }
    return status;
}

/* As moei_contents_fetch. */
static moe_status moei_checkpoint_fetch(const moe_trainer *trainer, moei_contents *c, moe_error *error) {
    moe_file_tensor found;
    size_t i;
    moe_status status = moei_contents_sums(c, error);
    if (status == MOE_OK && c->read == NULL) {
        status = moei_contents_walk(c, MOEI_WALK_CHECK, trainer->net, error);
        for (i = 0; i < moei_moments(trainer) && status == MOE_OK; i++)
            if ((status = moe_file_find(&c->file, moei_moment_names[i], &found)) == MOE_OK)
                status = moei_sum_check(c, moei_moment_names[i], trainer->net->n_tensors + i, found.data, found.bytes,
                                        error);
        return status;
    }
    if (status == MOE_OK) status = moei_checkpoint_walk(trainer, c, MOEI_WALK_COUNT, error);
    if (status == MOE_OK) status = moei_contents_take(c, error);
    return status == MOE_OK ? moei_checkpoint_walk(trainer, c, MOEI_WALK_READ, error) : status;
}

/* After all checks: nothing can fail. */
static moe_status moei_checkpoint_apply(moe_trainer *trainer, moei_contents *contents, const moei_checkpoint *c,
                                        moe_error *error) {
    double rate;
    moe_status status = moei_checkpoint_walk(trainer, contents, MOEI_WALK_VALUES, error);
    moei_net_unpack(trainer->net);
    trainer->steps = c->steps;
    trainer->rng.state = c->rng;
    trainer->n_accumulated = 0;
    memcpy(&rate, &c->rate, sizeof rate);
    trainer->rate = (moe_real)rate;
    memcpy(trainer->position, c->position, sizeof trainer->position);
    moei_trainer_rate(trainer);
    return status;
}

/* Reads a checkpoint from an open file; status is the result of opening it. training: the one that
   it must belong to, or NULL. */
static moe_status moei_checkpoint_take(moe_trainer *trainer, moei_contents *contents, moe_status status,
                                       const moei_training *training, moe_error *error) {
    const struct moe_transport *t = trainer->net->transport;
    moei_checkpoint c;
    memset(&c, 0, sizeof c);
    if (status == MOE_OK) status = moei_checkpoint_check(trainer, &contents->file, &c, error);
#ifndef MOE_NO_STDIO
    if (status == MOE_OK && training != NULL) status = moei_checkpoint_continues(&c, training, error);
#else
    (void)training;
#endif
    if (status == MOE_OK) status = moei_checkpoint_fetch(trainer, contents, error);
    status = moei_vote(t, status, error);
    if (status == MOE_OK && t != NULL)
        status = moei_group(t)->hooks->file_agree(moei_group(t), contents, 1, trainer->net->kernels, error);
    return status == MOE_OK ? moei_checkpoint_apply(trainer, contents, &c, error) : status;
}

moe_status moe_trainer_read(moe_trainer *trainer, const void *bytes, size_t size, moe_error *error) {
    moei_contents c;
    moe_status status = moei_trainer_is_made(trainer, error);
    if (status != MOE_OK) return status;
    status = moei_contents_memory(&c, bytes, size, &trainer->net->allocator, error);
    return moei_checkpoint_take(trainer, &c, status, NULL, error);
}

#ifndef MOE_NO_STDIO

static moe_status moei_trainer_save(const void *trainer, moe_stream *stream, moe_error *error) {
    return moe_trainer_write((const moe_trainer *)trainer, stream, error);
}

moe_status moe_trainer_save(const moe_trainer *trainer, const char *path, moe_error *error) {
    moe_status status = moei_trainer_is_made(trainer, error);
    if (status != MOE_OK) return status;
    status = moei_vote(trainer->net->transport, moei_trainer_between_steps(trainer, error), error);
    return status == MOE_OK ? moei_save_on(trainer->net->transport, path, moei_trainer_save, trainer, error) : status;
}

static moe_status moei_checkpoint_load(moe_trainer *trainer, const char *path, const moei_training *training,
                                       moe_error *error) {
    const moe_net *net = trainer->net;
    moei_contents c;
    moe_status status = moei_contents_file(&c, path, net->transport, &net->allocator, error);
    status = moei_checkpoint_take(trainer, &c, status, training, error);
    moei_contents_close(&c);
    return status;
}

moe_status moe_trainer_load(moe_trainer *trainer, const char *path, moe_error *error) {
    if (trainer == NULL || trainer->net == NULL) return MOEI_REFUSE(error, "trainer must be made by moe_trainer_init");
    return moei_checkpoint_load(trainer, path, NULL, error);
}

#endif
#endif /* MOE_NO_TRAIN */

/* ==== >>code_fit ============================================================================== */

#ifndef MOE_NO_TRAIN

/* One training from beginning to end; all memory is allocated before the first step. */
typedef struct moei_fit {
    moe_trainer trainer;
    const moe_data *train, *test; /* test NULL: none */
    void *memory;
    size_t memory_size;
    size_t *order;         /* [units] where samples, or sequences, are taken from */
    size_t unit, units;    /* samples that stay together, and how many of these there are */
    moe_rng rng;           /* of the order; trainer.rng is for the routers' random stages */
    moe_real *x, *targets; /* one batch, gathered: this process's part of it */
    int32_t *labels, *token_ids;
    void *test_work;
    size_t test_size;
    /* sums over the samples of this epoch, the loss over those that count */
    double loss, router_loss;
    size_t seen, counted;     /* samples of this epoch so far, and those that count in the loss */
    moe_progress progress;
} moei_fit;

static moe_status moei_fit_layout(moei_fit *f, moei_layout *l) {
    const moe_net *net = f->trainer.net;
    size_t batch = f->trainer.most;
    int labels = !moei_is_squared(f->trainer.config.criterion);
    moe_status status =
        f->test != NULL ? moei_evaluate_size(net, f->trainer.config.criterion, f->test, &f->test_size) : MOE_OK;
    if (status != MOE_OK) return status;
    f->order = (size_t *)moei_take(l, f->units, sizeof(size_t));
    f->x = moei_take_reals(l, batch, (size_t)net->d_in);
    f->labels = labels ? (int32_t *)moei_take(l, batch, sizeof(int32_t)) : NULL;
    f->targets = labels ? NULL : moei_take_reals(l, batch, (size_t)net->d_out);
    f->token_ids = f->train->token_ids != NULL ? (int32_t *)moei_take(l, batch, sizeof(int32_t)) : NULL;
    f->test_work = moei_take(l, f->test_size, 1);
    return l->overflow ? MOE_ERR_OVERFLOW : MOE_OK;
}

static moe_status moei_fit_files_check(const moe_train_config *c, moe_error *error) {
#ifdef MOE_NO_STDIO
    if (c->checkpoint != NULL)
        return moei_error(error, MOE_ERR_UNSUPPORTED, "checkpoint = '%s': MOE_NO_STDIO is set", c->checkpoint);
#endif
    if (c->resume && c->checkpoint == NULL)
        return moei_error(error, MOE_ERR_CONFIG, "resume = 1: checkpoint must name the file");
    return MOE_OK;
}

static moe_status moei_fit_check(const moei_fit *f, moe_error *error) {
    const moe_net *net = f->trainer.net;
    const moe_data *train = f->train;
    size_t batch = (size_t)f->trainer.config.batch;
    int criterion = f->trainer.config.criterion;
    moe_status status =
        train != NULL ? moei_samples_alone(net, train, error) : MOEI_REFUSE(error, "data must not be NULL");
    if (status == MOE_OK)
        status =
            moei_routers_check(net, train, moei_batch_sequences(train, moei_smaller(train->n, batch)), 1, error);
    if (status == MOE_OK) status = moei_data_check(net, train, criterion, error);
    if (status == MOE_OK && train->n == 0) status = MOEI_REFUSE(error, "there are no samples to train on");
    if (status == MOE_OK && train->length > 0 && train->n > batch && batch % train->length != 0)
        status = MOEI_REFUSE(error, "batch = %z: must be a multiple of length = %z", batch, train->length);
    if (status == MOE_OK && f->test != NULL) status = moei_samples_alone(net, f->test, error);
    if (status == MOE_OK && f->test != NULL) status = moei_routers_check(net, f->test, 1, 0, error);
    return status == MOE_OK && f->test != NULL ? moei_data_check(net, f->test, criterion, error) : status;
}

/* Steps of an epoch and of all; two generators, so that the order of the samples can be repeated
   without the random stages of routers. */
static void moei_fit_count(moei_fit *f) {
    moe_trainer *t = &f->trainer;
    size_t batches = (f->train->n - 1) / (size_t)t->config.batch + 1;
    moe_rng other;
    f->progress.epochs = t->config.epochs;
    f->progress.steps = (batches - 1) / (size_t)t->config.accumulate + 1;
    f->progress.total_steps = (uint64_t)f->progress.steps * (uint64_t)f->progress.epochs;
    if (t->total_steps == 0) t->total_steps = f->progress.total_steps;
    moe_rng_seed(&f->rng, t->config.seed);
    moe_rng_seed(&other, ~t->config.seed);
    moe_rng_seed(&t->rng, moe_rng_next(&other));
}

/* Whether all processes have the same samples. */
static moe_status moei_fit_agree(const moei_fit *f, moe_error *error) {
    const moe_net *net = f->trainer.net;
    const struct moei_hooks *hooks;
    moe_status status;
    if (net->transport == NULL) return MOE_OK;
    hooks = moei_group(net->transport)->hooks;
    status = hooks->data_agree(net, f->train, f->trainer.config.criterion, "the samples to train on: ", error);
    return status == MOE_OK
               ? hooks->data_agree(net, f->test, f->trainer.config.criterion, "the samples to test on: ", error)
               : status;
}

/* *l: the layout of what is allocated. */
static moe_status moei_fit_allocate(moei_fit *f, moei_layout *l, moe_error *error) {
    moe_status status = moei_fit_layout(f, l);
    if (status != MOE_OK) return moei_error(error, status, "workspace: %s", moe_status_text(status));
    f->memory = moei_alloc(&f->trainer.net->allocator, l->used, 1);
    if (f->memory == NULL) return moei_error(error, MOE_ERR_MEMORY, "no memory for %z bytes of samples", l->used);
    f->memory_size = l->used;
    return MOE_OK;
}

static moe_status moei_fit_begin(moei_fit *f, moe_net *net, const moe_train_config *config, moe_error *error) {
    moei_layout l = moei_layout_begin(NULL);
    size_t i;
    moe_status status = moei_trainer_make(&f->trainer, net, config, 1, f->train, error);
    if (status != MOE_OK) return status;
    status = moei_fit_files_check(&f->trainer.config, error);
    if (status == MOE_OK) status = moei_fit_check(f, error);
    status = moei_vote(net->transport, status, error);
    if (status == MOE_OK) status = moei_fit_agree(f, error);
    if (status != MOE_OK) return status;
    f->unit = f->train->length > 0 ? f->train->length : 1;
    f->units = f->train->n / f->unit;
    status = moei_vote(net->transport, moei_fit_allocate(f, &l, error), error);
    if (status != MOE_OK) return status;
    l = moei_layout_begin(f->memory);
    (void)moei_fit_layout(f, &l);
    for (i = 0; i < f->units; i++) f->order[i] = i;
    moei_fit_count(f);
    return MOE_OK;
}

/* A Fisher-Yates shuffle. */
static void moei_fit_shuffle(moei_fit *f) {
    size_t i, j, kept;
    for (i = f->units; i > 1; i--) {
        j = (size_t)moe_rng_below(&f->rng, i);
        kept = f->order[i - 1];
        f->order[i - 1] = f->order[j];
        f->order[j] = kept;
    }
}

/* The sample at position i of this epoch's order. */
static size_t moei_fit_row(const moei_fit *f, size_t i) { return f->order[i / f->unit] * f->unit + i % f->unit; }

/* The samples of the batch that begins with sample `from` of this epoch's order. */
static size_t moei_fit_size(const moei_fit *f, size_t from) {
    return moei_smaller(f->train->n - from, (size_t)f->trainer.config.batch);
}

/* This process's part of that batch. */
static moe_data moei_fit_batch(moei_fit *f, size_t from) {
    const struct moe_transport *t = f->trainer.net->transport;
    size_t d = (size_t)f->trainer.net->d_in, o = (size_t)f->trainer.net->d_out, i;
    moe_data batch = *f->train;
    batch.n = moei_fit_size(f, from);
    if (t != NULL) from += moei_tokens_split(t, batch.n, f->unit, &batch.n).first;
    for (i = 0; i < batch.n; i++) {
        size_t row = moei_fit_row(f, from + i);
        if (d > 0) memcpy(f->x + i * d, f->train->x + row * d, d * sizeof(moe_real));
        if (f->token_ids != NULL) f->token_ids[i] = f->train->token_ids[row];
        if (f->labels != NULL) f->labels[i] = f->train->labels[row];
        else memcpy(f->targets + i * o, f->train->targets + row * o, o * sizeof(moe_real));
    }
    batch.x = d > 0 ? f->x : NULL;
    batch.token_ids = f->token_ids;
    batch.labels = f->labels;
    batch.targets = f->targets;
    return batch;
}

/* The number of samples, of n from `from` on, that count in the loss. */
static size_t moei_fit_counted(const moei_fit *f, size_t from, size_t n) {
    size_t i, counted = 0;
    for (i = from; i < from + n; i++) counted += f->labels == NULL || f->train->labels[moei_fit_row(f, i)] >= 0;
    return counted;
}

/* Reports a failure during training, with its epoch and step. */
static moe_status moei_fit_failed(const moei_fit *f, const moe_error *why, moe_error *error) {
    return moei_error(error, why->code, "epoch %d, step %z: %s", f->progress.epoch, f->progress.step, why->message);
}

/* One step of the optimizer, on as many batches as it takes. */
static moe_status moei_fit_step(moei_fit *f, moe_error *error) {
    const moe_train_config *c = &f->trainer.config;
    int i;
    for (i = 0; i < c->accumulate && f->seen < f->train->n; i++) {
        moe_data batch = moei_fit_batch(f, f->seen);
        size_t n = moei_fit_size(f, f->seen), counted = moei_fit_counted(f, f->seen, n);
        int last = i + 1 == c->accumulate || f->seen + n == f->train->n;
        moe_step step;
        moe_status status = moei_trainer_add(&f->trainer, &batch, last, &step, &f->progress.gradient_norm, error);
        if (status != MOE_OK) return status;
        f->loss += (double)step.loss * (double)counted;
        f->router_loss += (double)step.router_loss * (double)n;
        f->counted += counted;
        f->seen += n;
        f->progress.samples += n;
    }
    f->progress.rate = f->trainer.rate;
    return moei_trainer_apply(&f->trainer, f->progress.gradient_norm, error);
}

static moe_status moei_fit_report(moei_fit *f, moe_error *error) {
    const moe_train_config *c = &f->trainer.config;
    moe_progress *p = &f->progress;
    moe_status status;
    double stop;
    p->loss = f->counted > 0 ? (moe_real)(f->loss / (double)f->counted) : 0;
    p->router_loss = (moe_real)(f->router_loss / (double)f->seen);
    p->epoch_ended = p->step == p->steps;
    p->total_step = f->trainer.steps;
    memset(&p->test, 0, sizeof p->test);
    if (f->test != NULL &&
        (p->epoch_ended || (c->evaluate_every > 0 && p->total_step % (uint64_t)c->evaluate_every == 0))) {
        moe_error why;
        if (moei_evaluate(f->trainer.net, f->test, c->criterion, f->test_work, &p->test, &why) != MOE_OK)
            return moei_fit_failed(f, &why, error);
    }
    stop = c->progress != NULL && c->progress(c->progress_ctx, p) != 0 ? 1.0 : 0.0;
    status = moei_add_over(f->trainer.net->transport, MOE_OK, 1, &stop, error);
    if (status != MOE_OK || !(stop > 0.0)) return status;
    return moei_error(error, MOE_ERR_STOPPED, "the progress callback stopped training in epoch %d, step %z", p->epoch,
                      p->step);
}

/* The position of the training, for the checkpoint: at the end of an epoch, before the first step
   of the next. */
static void moei_fit_position(moei_fit *f) {
    uint64_t *position = f->trainer.position;
    double sums[2];
    memset(position, 0, sizeof f->trainer.position);
    position[0] = (uint64_t)f->progress.epoch - (f->progress.epoch_ended ? 0 : 1);
    if (f->progress.epoch_ended) return;
    position[1] = f->progress.step;
    sums[0] = f->loss;
    sums[1] = f->router_loss;
    memcpy(position + 2, sums, sizeof sums);
}

#ifndef MOE_NO_STDIO

static moei_checkpoint moei_fit_numbers(const moei_fit *f) {
    moei_checkpoint c = moei_checkpoint_of(&f->trainer);
    c.n = f->train->n;
    c.length = f->train->length;
    return c;
}

static moe_status moei_fit_save(const void *fit, moe_stream *stream, moe_error *error) {
    const moei_fit *f = (const moei_fit *)fit;
    moei_checkpoint c = moei_fit_numbers(f);
    return moei_checkpoint_write(&f->trainer, &c, stream, MOE_OK, error);
}

/* Writes the checkpoint when it is due, or when training is about to stop: status. */
static moe_status moei_fit_keep(moei_fit *f, moe_status status, moe_error *error) {
    const moe_train_config *c = &f->trainer.config;
    const moe_progress *p = &f->progress;
    int due = c->checkpoint_every > 0 ? p->total_step % (uint64_t)c->checkpoint_every == 0 : p->epoch_ended;
    moe_status kept;
    if (c->checkpoint == NULL || (!due && status == MOE_OK && p->total_step != p->total_steps)) return status;
    kept = moei_save_on(f->trainer.net->transport, c->checkpoint, moei_fit_save, f, error);
    return kept == MOE_OK ? status : kept;
}

#endif

/* Restores the steps, samples and sums of the epoch from before training stopped. */
static void moei_fit_seen(moei_fit *f) {
    const uint64_t *position = f->trainer.position;
    double sums[2];
    memcpy(sums, position + 2, sizeof sums);
    f->loss = sums[0];
    f->router_loss = sums[1];
    f->progress.step = (size_t)position[1];
    f->seen = f->progress.step * (size_t)f->trainer.config.accumulate * (size_t)f->trainer.config.batch;
    f->counted = 0;
}

static moe_status moei_fit_epoch(moei_fit *f, moe_error *error) {
    moe_status status = MOE_OK;
    moei_fit_shuffle(f);
    moei_fit_seen(f);
    f->counted = moei_fit_counted(f, 0, f->seen);
    while (status == MOE_OK && f->seen < f->train->n) {
        moe_error why;
        f->progress.step++;
        status = moei_fit_step(f, &why);
        if (status != MOE_OK) return moei_fit_failed(f, &why, error);
        status = moei_fit_report(f, error);
        if (status != MOE_OK && status != MOE_ERR_STOPPED) return status;
        moei_fit_position(f);
#ifndef MOE_NO_STDIO
        status = moei_fit_keep(f, status, error);
#endif
    }
    return status;
}

#ifndef MOE_NO_STDIO

static moe_status moei_fit_resume(moei_fit *f, moe_error *error) {
    const struct moe_transport *t = f->trainer.net->transport;
    const char *path = f->trainer.config.checkpoint;
    size_t processes = t != NULL ? moei_group(t)->total : 1, missing;
    moei_training training;
    double sum;
    moe_status status;
    if (!f->trainer.config.resume) return MOE_OK;
    sum = moei_file_is_missing(path) ? 1.0 : 0.0;
    status = moei_add_over(t, MOE_OK, 1, &sum, error);
    missing = (size_t)sum;
    if (status != MOE_OK || missing == processes) return status;
    if (missing > 0)
        return moei_error(error, MOE_ERR_CONFIG, "checkpoint = '%s': it is missing on %z of %z ranks", path, missing,
                          processes);
    training.numbers = moei_fit_numbers(f);
    training.epochs = (uint64_t)f->progress.epochs;
    training.steps = f->progress.steps;
    return moei_checkpoint_load(&f->trainer, path, &training, error);
}

#endif

static moe_status moei_fit_run(moei_fit *f, moe_error *error) {
    uint64_t from, epoch;
    moe_status status = MOE_OK;
#ifndef MOE_NO_STDIO
    status = moei_fit_resume(f, error);
#endif
    if (status == MOE_OK) moei_trainer_plan(&f->trainer);
    from = f->trainer.position[0];
    for (epoch = 0; status == MOE_OK && epoch < (uint64_t)f->progress.epochs; epoch++) {
        f->progress.epoch = (int)epoch + 1;
        if (epoch < from) moei_fit_shuffle(f); /* seen before training stopped */
        else status = moei_fit_epoch(f, error);
    }
    return status;
}

moe_status moe_fit(moe_net *net, const moe_data *train, const moe_data *test, const moe_train_config *config,
                   moe_error *error) {
    moei_fit f;
    moe_status status;
    memset(&f, 0, sizeof f);
    f.train = train;
    f.test = test != NULL && test->n > 0 ? test : NULL;
    status = moei_fit_begin(&f, net, config, error);
    if (status == MOE_OK) status = moei_fit_run(&f, error);
    if (f.memory != NULL) moei_free(&net->allocator, f.memory, f.memory_size);
    moe_trainer_free(&f.trainer);
    return status;
}

#endif /* MOE_NO_TRAIN */

/* ==== float models: a network as constants, one token at a time ==================================

   A network's struct can be a constant: kernels NULL mean plain C, and inference does not write to
   it. The exporter prints configurations by the tables of their fields, in the order of their
   offsets, and refuses a table with a gap. */

/* The scratch memory of a float model. Models of sequences begin with the number of tokens so far
   and their cache. */
typedef struct moei_float_room {
    unsigned char *place; /* size_t */
    void *cache;
    void *work;           /* the rest, for the network */
    size_t cache_size;
    size_t state_size;    /* bytes at the start of scratch that persist between calls */
} moei_float_room;

/* Lays out the start of scratch memory for sequences of up to length tokens, 0 for a network
   without sequences; scratch NULL counts bytes into l->used. The pass checks the size of the
   rest. */
MOEI_TOOL moe_status moei_float_layout(const moe_net *net, size_t length, moei_layout *l, moei_float_room *room) {
    memset(room, 0, sizeof *room);
    if (length > 0) {
        moe_status status = moei_decode_size(net, length, 1, &room->cache_size, NULL);
        if (status != MOE_OK) return status;
        room->place = (unsigned char *)moei_take(l, 1, sizeof(size_t));
        room->cache = moei_take(l, room->cache_size, 1);
        room->state_size = l->used;
    }
    room->work = moei_take(l, 0, 1);
    return l->overflow ? MOE_ERR_OVERFLOW : MOE_OK;
}

/* Bytes of scratch memory that moei_float_infer needs, and how many at its start persist between
   calls (may be NULL). */
MOEI_TOOL moe_status moei_float_size(const moe_net *net, size_t length, size_t *scratch_size, size_t *state_size) {
    moei_layout l = moei_layout_begin(NULL);
    moei_float_room room;
    size_t work = 0;
    moe_status status = moei_float_layout(net, length, &l, &room);
    if (status == MOE_OK)
        status = length > 0 ? moei_decode_size(net, length, 1, NULL, &work) : moe_net_work_size(net, 1, 0, &work);
    (void)moei_take(&l, work, 1);
    if (status == MOE_OK && l.overflow) status = MOE_ERR_OVERFLOW;
    if (status == MOE_OK) *scratch_size = l.used;
    if (status == MOE_OK && state_size != NULL) *state_size = room.state_size;
    return status;
}

/* Runs one token through a network: input [d_in], or with d_in = 0 one id, int32_t. The bits are
   those of moe_net_decode. MOE_ERR_SPACE: scratch is too small; MOE_ERR_STATE: the sequence is
   length long; else as that. On failure the sequence does not advance. */
MOEI_TOOL moe_status moei_float_infer(const moe_net *net, size_t length, const void *input, moe_real *output,
                                      void *scratch, size_t scratch_size) {
    moei_layout l = moei_layout_begin(scratch);
    moei_float_room room;
    moe_net_pass pass;
    moe_cache cache;
    moe_call call;
    moe_status status = moei_float_layout(net, length, &l, &room);
    if (status != MOE_OK) return status;
    if (l.used > scratch_size) return MOE_ERR_SPACE;
    memset(&call, 0, sizeof call);
    call.n_tokens = 1;
    call.decoding = 1; /* for predictors */
    if (net->d_in > 0) call.x = (const moe_real *)input;
    else call.token_ids = (const int32_t *)input;
    if (length > 0) {
        memcpy(&cache.n_tokens, room.place, sizeof cache.n_tokens);
        if (cache.n_tokens >= length) return MOE_ERR_STATE;
        cache.net = net;
        cache.most = length;
        cache.memory = room.cache;
        cache.size = room.cache_size;
        status = moe_net_decode(net, &cache, &call, room.work, scratch_size - l.used, &pass);
        if (status == MOE_OK) memcpy(room.place, &cache.n_tokens, sizeof cache.n_tokens);
    } else status = moe_net_forward(net, &call, room.work, scratch_size - l.used, &pass);
    if (status == MOE_OK) memcpy(output, pass.y, (size_t)net->d_out * sizeof(moe_real));
    return status;
}

/* The pass of MoE layer number `mixture` in the last call of moei_float_infer with this scratch
   memory, or NULL if there is no such layer; its layer is NULL in zeroed memory, before a call. */
MOEI_TOOL struct moe_module_pass *moei_float_pass(const moe_net *net, size_t length, size_t mixture, void *scratch) {
    moei_layout l = moei_layout_begin(scratch), of_work;
    moei_float_room room;
    struct moe_module_pass *modules;
    size_t i;
    if (moei_float_layout(net, length, &l, &room) != MOE_OK) return NULL;
    /* a pass begins with its modules, see moei_net_layout */
    of_work = moei_layout_begin(room.work);
    modules = (struct moe_module_pass *)moei_take(&of_work, net->n_modules, sizeof *modules);
    for (i = 0; i < net->n_modules; i++)
        if (moei_routes(net, i) && mixture-- == 0) return &modules[i];
    return NULL;
}

#endif /* MOE_NO_FLOAT */

/* ==== >>code_inference ======================================================================== */

/* Scratch memory is laid out from a multiple of 4. */
enum { MOEI_INT_ALIGN = 4 };

MOEI_TOOL unsigned char *moei_int_scratch(void *scratch) {
    unsigned char *p = (unsigned char *)scratch;
    return p + (MOEI_INT_ALIGN - (uintptr_t)p % MOEI_INT_ALIGN) % MOEI_INT_ALIGN;
}

static int16_t *moei_int_vector(const moei_int_run *run, uint32_t at) { return run->vectors + at; }

static int32_t *moei_int_wide(const moei_int_run *run, uint32_t at) { return (int32_t *)(void *)(run->vectors + at); }

/* Sets n > 0 sums, and up to the next multiple of 4, to value. */
static void moei_int_fill(int32_t *sum, unsigned n, int32_t value) {
    const int32_t *end = sum + n;
    do sum[0] = sum[1] = sum[2] = sum[3] = value;
    while ((sum += 4) < end);
}

/* The sums of an int4 product's input, in other; index = 1: an earlier product has computed
   them. */
MOEI_INLINE const int16_t *moei_int_sums(const moei_int_op *op, const moei_int_run *run) {
    int16_t *sums = moei_int_vector(run, op->other);
    if (op->index == 0) moei_int4_sums(op->shape.k, moei_int_vector(run, op->in), sums);
    return sums;
}

#define MOEI_INT4_IN moei_int_vector(run, op->in), moei_int_sums(op, run)
#define MOEI_INT_PRODUCT(name, IN) \
    void moei_int_op_##name(const moei_int_op *op, moei_int_run *run) { \
        moei_##name##_product(&op->shape, run->base + op->at, IN, moei_int_vector(run, op->out)); \
    } \
    void moei_int_op_##name##_add(const moei_int_op *op, moei_int_run *run) { \
        moei_##name##_product_add(&op->shape, run->base + op->at, IN, run->weight, moei_int_wide(run, op->out)); \
    }
MOEI_INT_PRODUCT(int8, moei_int_vector(run, op->in))
MOEI_INT_PRODUCT(int4, MOEI_INT4_IN)
#undef MOEI_INT_PRODUCT
#undef MOEI_INT4_IN

/* Products of 16-bit inputs, with as many digits as the inputs of this call have: with M the
   bitwise or of all |x_p| and e <= 14 the largest power with 2^e M <= 32639 (else 0), x_p 2^e =
   256 upper_p + lower_p, both clamped to +-127. Constants: those of an int8 product, whose biases
   only round, then bias int32 [n rounded up to 2]. With t of that product (moe_kernels.h), for a
   weight w
     u_j = 1 + ((t_j(upper) w) >> 16) + ((t_j(lower) ((w + 128) >> 8)) >> 16)
     v_j = u_j 2^(6 - e), halves rounded up, + ((bias_j w) >> 16)
     int16       out_j = clamp((v_j + round) >> shift) with w = MOEI_INT_UPPER
     int16_add   sum_j += v_j with the weight of the expert
   other: int16 [2 (k rounded up to 4) + 2 (n rounded up to 4)]. |v_j| < 2^30. */
enum { MOEI_INT_UPPER = 127 * 256, MOEI_INT_GUARD = 6 };

/* upper and, k4 after it, lower; returns e. */
static int moei_int_halves(unsigned k, const int16_t *x, int16_t *upper, unsigned k4) {
    int32_t most = 0;
    int e = 0;
    unsigned i;
    for (i = 0; i < k; i++) most |= x[i] < 0 ? -x[i] : x[i];
    while (e < 14 && most << (e + 1) <= 32639) e++;
    for (i = 0; i < k4; i++) {
        const int32_t code = i < k ? x[i] * ((int32_t)1 << e) : 0;
        const int32_t high = moei_int_clamp_to(-127, 127, (code + 128) >> 8);
        upper[i] = (int16_t)high;
        upper[k4 + i] = moei_int_clamp_to(-127, 127, code - high * 256);
    }
    return e;
}

/* Computes v_j + more, in scratch memory. */
static int32_t *moei_int_wide_product(const moei_int_op *op, moei_int_run *run, int16_t weight, int32_t more) {
    const unsigned n = op->shape.n, k4 = (op->shape.k + 3u) & ~3u;
    const unsigned char *data = run->base + op->at, *bias = data + moei_int8_size(n, op->shape.k);
    int16_t *upper = moei_int_vector(run, op->other);
    int32_t *v = moei_int_wide(run, op->other + 2 * k4);
    const int e = moei_int_halves(op->shape.k, moei_int_vector(run, op->in), upper, k4) - MOEI_INT_GUARD;
    unsigned j;
    moei_int_fill(v, n, 1); /* two halves that products round down */
    moei_int8_product_add(&op->shape, data, upper, weight, v);
    moei_int8_product_add(&op->shape, data, upper + k4, (int16_t)((weight + 128L) >> 8), v);
    for (j = 0; j < n; j++) {
        v[j] = e > 0 ? (v[j] + ((int32_t)1 << e >> 1)) >> e : v[j] * ((int32_t)1 << -e);
        v[j] += moei_int_scale(moei_flash_32(bias + 4 * j), weight) + more;
    }
    return v;
}

void moei_int_op_int16(const moei_int_op *op, moei_int_run *run) {
    moei_int_store(&op->shape, moei_int_wide_product(op, run, MOEI_INT_UPPER, moei_int_round(&op->shape)),
                   moei_int_vector(run, op->out));
}

void moei_int_op_int16_add(const moei_int_op *op, moei_int_run *run) {
    const int32_t *v = moei_int_wide_product(op, run, run->weight, 0), *end = v + op->shape.n;
    int32_t *sum = moei_int_wide(run, op->out);
    while (v != end) *sum++ += *v++;
}

/* Curves are the same for all experts, so they are among the model's own constants. */
void moei_int_op_curve(const moei_int_op *op, moei_int_run *run) {
    moei_int_curve(&op->shape, run->model->weights + op->at, moei_int_vector(run, op->in),
                   moei_int_vector(run, op->out));
}

void moei_int_op_multiply(const moei_int_op *op, moei_int_run *run) {
    moei_int_multiply(&op->shape, moei_int_vector(run, op->in), moei_int_vector(run, op->other),
                      moei_int_vector(run, op->out));
}

void moei_int_op_add(const moei_int_op *op, moei_int_run *run) {
    moei_int_add(&op->shape, moei_int_vector(run, op->in), op->factor, moei_int_vector(run, op->other), op->factor2,
                 moei_int_vector(run, op->out));
}

void moei_int_op_rescale(const moei_int_op *op, moei_int_run *run) {
    moei_int_add(&op->shape, moei_int_vector(run, op->in), op->factor, NULL, 0, moei_int_vector(run, op->out));
}

/* ---- sequences and norms ---- */

/* out_p = clamp(((((w_p << 15) * factor) >> 16) + round) >> shift) for n numbers, zeros after
   them, where w_p and factor are those of output r of an int8 product with k outputs and n inputs
   (moe_kernels.h), so that a tied module may have the same. r is the token
   (index = 0) or its position (1). A row out of range is MOE_ERR_ARGUMENT. */
void moei_int_op_row(const moei_int_op *op, moei_int_run *run) {
    const unsigned n = op->shape.n;
    const uint32_t r = op->index == 0 ? (uint32_t)run->token : run->place;
    const unsigned side = moei_int8_side(op->shape.k, r);
    const unsigned char *pair = run->base + op->at;
    const int32_t round = moei_int_round(&op->shape);
    int16_t *y = moei_int_vector(run, op->out), factor;
    unsigned p;
    if (r >= op->shape.k) {
        run->status = MOE_ERR_ARGUMENT;
        return;
    }
    pair += (size_t)(r / 2) * moei_int8_pair_size(n);
    factor = moei_flash_16(pair + moei_int8_factor_at(side));
    for (p = 0; p < n; p++) {
        const int32_t level = moei_int8_weight(pair, side, p);
        y[p] = moei_int_clamp(&op->shape, (moei_int_scale(level * 32768, factor) + round) >> op->shape.shift);
    }
    moei_int_put_zeros(n, y);
}

/* 1 / sqrt(d): d = m 4^e with m in [2^30, 2^32), and the inverse is (2^30 - 1) / floor(sqrt(m)) *
   2^-(30 + e), the quotient in 2^14..2^15 - 1. */
static int16_t moei_int_inverse_root(uint64_t d, int *e) {
    uint32_t m;
    for (*e = 0; d >> 32 != 0; d >>= 2) ++*e;
    for (m = (uint32_t)d; m < (uint32_t)1 << 30; m *= 4) --*e;
    return (int16_t)((((uint32_t)1 << 30) - 1) / moei_int_sqrt(m));
}

/* Both norms are the same but for a sum that one leaves out: with s = sum_p x_p for a layer norm
   (index = 1), 0 for a root mean square norm (index = 0),
     d = (n sum_p x_p^2 - s^2) 4^factor + eps, all of its bits; 0 counts as 1
     v_p = n x_p - s
   a number in units of its spread is 2^factor v_p / sqrt(d): with m, e and quotient r as in
   moei_int_inverse_root (2^factor |v_p| < sqrt(n d), so nothing overflows)
     t_p = ((v_p * 2^(7 + factor - e)) * r) >> 16, in units of 2^-21; a negative power shifts down
     out_p = clamp((((t_p sign_p * |gain_p|) >> 16) + bias_p + round) >> shift), zeros after n;
     sign_p that of the gain
   Constants: eps uint32 low, uint32 high; gain int16 [n rounded up to 2]; layer norm: bias int32
   [n]. n <= 32767, d < 2^62, factor, which gives a small eps its digits, within 0..8. */
void moei_int_op_norm(const moei_int_op *op, moei_int_run *run) {
    const unsigned n = op->shape.n;
    const unsigned char *eps = run->base + op->at, *gain = eps + 8;
    const unsigned char *bias = gain + (n + 1u) / 2 * 4;
    const int32_t round = moei_int_round(&op->shape);
    const int16_t *x = moei_int_vector(run, op->in);
    int16_t *y = moei_int_vector(run, op->out), inverse;
    uint32_t low = 0, high = 0;
    int32_t sum = 0;
    uint64_t d;
    unsigned p;
    int e;
    for (p = 0; p < n; p++) {
        const uint32_t square = (uint32_t)((int32_t)x[p] * x[p]);
        low += square & 0xffffu;
        high += square >> 16;
        sum += x[p];
    }
    if (op->index == 0) sum = 0;
    d = ((((uint64_t)high << 16) + low) * n - (uint64_t)((int64_t)sum * sum)) * ((uint32_t)1 << 2 * op->factor);
    d += (uint64_t)(uint32_t)moei_flash_32(eps + 4) << 32 | (uint32_t)moei_flash_32(eps);
    inverse = moei_int_inverse_root(d > 0 ? d : 1, &e);
    e -= 7 + op->factor;
    for (p = 0; p < n; p++) {
        const int32_t v = (int32_t)n * x[p] - sum;
        const int32_t t = moei_int_scale(e > 0 ? v >> e : v * ((int32_t)1 << -e), inverse);
        const int16_t g = moei_flash_16(gain + 2 * p);
        const int32_t scaled = g < 0 ? moei_int_scale(-t, (int16_t)-g) : moei_int_scale(t, g);
        y[p] = moei_int_clamp(&op->shape,
                              (scaled + (op->index != 0 ? moei_flash_32(bias + 4 * p) : 0) + round) >> op->shape.shift);
    }
    moei_int_put_zeros(n, y);
}

/* Rotates n / k heads of k numbers; (a, b) are numbers i and k/2 + i of a head:
     c = (c1 c2 - s1 s2) >> 15, a' = clamp((a c - b s + round) >> shift)
     s = (s1 c2 + c1 s2) >> 15, b' = clamp((a s + b c + round) >> shift)
   where (c1, s1) are cosine and sine, in 1/32767, of angle i of the position modulo 16, and
   (c2, s2) those of the position's multiple of 16.
   Constants: int16 c, s for each i of each row. Zeros beyond n; in and out may be one vector;
   |a|, |b| <= MOEI_INT_ROTATED. */
enum { MOEI_INT_ANGLES = 16, MOEI_INT_ROTATED = 23169 };

void moei_int_op_rotate(const moei_int_op *op, moei_int_run *run) {
    const unsigned n = op->shape.n, half = op->shape.k / 2u;
    const unsigned char *at1 = run->base + op->at + (size_t)(run->place % MOEI_INT_ANGLES) * half * 4;
    const unsigned char *at2 = run->base + op->at + (size_t)(MOEI_INT_ANGLES + run->place / MOEI_INT_ANGLES) * half * 4;
    const int32_t round = moei_int_round(&op->shape);
    const int16_t *x = moei_int_vector(run, op->in);
    int16_t *y = moei_int_vector(run, op->out);
    unsigned i, j;
    for (i = 0; i < half; i++, at1 += 4, at2 += 4) {
        const int32_t c1 = moei_flash_16(at1), s1 = moei_flash_16(at1 + 2);
        const int32_t c2 = moei_flash_16(at2), s2 = moei_flash_16(at2 + 2);
        const int32_t c = (c1 * c2 - s1 * s2) >> 15, s = (s1 * c2 + c1 * s2) >> 15;
        for (j = i; j < n; j += 2 * half) {
            const int32_t a = x[j], b = x[j + half];
            y[j] = moei_int_clamp(&op->shape, (a * c - b * s + round) >> op->shape.shift);
            y[j + half] = moei_int_clamp(&op->shape, (a * s + b * c + round) >> op->shape.shift);
        }
    }
    moei_int_put_zeros(n, y);
}

/* *a = sum_i u_i x_i and *b the same for the numbers `apart` from x; those of x are `step` apart.
   Both loops of attention, two results at a time; n > 0. */
static MOEI_INT_CALLED void moei_int_dots(unsigned n, const int16_t *u, const signed char *x, unsigned step,
                                          unsigned apart, int32_t *a, int32_t *b) {
    const int16_t *end = u + n;
    int32_t sum_a = 0, sum_b = 0;
    do {
        sum_a += (int32_t)*u * x[0];
        sum_b += (int32_t)*u * x[apart];
        u++;
        x += step;
    } while (u != end);
    *a = sum_a;
    *b = sum_b;
}

/* One head of attention over n tokens: q, keys, values and y are at its first number, rows of keys
   and values `width` apart. */
typedef struct moei_int_head {
    const moei_int_op *op;
    const int16_t *q;
    const signed char *keys, *values;
    int32_t *scores;  /* [n], and one more */
    int16_t *weights; /* [n] */
    int16_t *y;
    unsigned n, width, d_head, bits;
} moei_int_head;

/* Weights from scores, as moei_int_op_attention says; returns their sum. */
static uint32_t moei_int_weigh(const moei_int_head *h, unsigned less) {
    const signed char *key = h->keys;
    int32_t most = INT32_MIN, *score = h->scores;
    uint32_t total = 0;
    unsigned j;
    for (j = 0; j < h->n; j += 2, key += 2 * (size_t)h->width)
        moei_int_dots(h->d_head, h->q, key, 1, j + 1 < h->n ? h->width : 0, score + j, score + j + 1);
    for (j = 0; j < h->n; j++)
        if (score[j] > most) most = score[j];
    for (j = 0; j < h->n; j++) {
        uint32_t w = moei_int_exp2((uint32_t)moei_int_scale(most - score[j], h->op->factor), (int)h->bits) >> less;
        if (w > 32767) w = 32767;
        h->weights[j] = (int16_t)w;
        total += w;
    }
    return total;
}

static void moei_int_mix(const moei_int_head *h) {
    moei_int_shape shape = h->op->shape;
    unsigned less = 0, p, more, down = 0;
    uint32_t total;
    int32_t sums[2];
    int16_t factor;
    int32_t round;
    while ((h->n - 1) >> 9 >> less != 0) less++;
    shape.shift = (uint8_t)(shape.shift - less);
    round = moei_int_round(&shape);
    total = moei_int_weigh(h, less);
    while (total >> down > 0xffffu) down++;
    factor = (int16_t)(((uint32_t)h->op->factor2 << 15 >> less) / (total >> down));
    for (p = 0; p < h->d_head; p += 2) {
        more = p + 1 < h->d_head;
        moei_int_dots(h->n, h->weights, h->values + p, h->width, more, &sums[0], &sums[1]);
        h->y[p] = moei_int_clamp(&shape, (moei_int_scale(sums[0] >> down, factor) + round) >> shape.shift);
        h->y[p + more] = moei_int_clamp(&shape, (moei_int_scale(sums[1] >> down, factor) + round) >> shape.shift);
    }
}

/* Attention of one token. in: q, wide; other: its key, attention.value: its value, both narrow,
   which are appended to those in the state first. With n = place + 1 tokens, less = the bits of
   place >> 9, and for each head
     s_j = sum_p q_p key_jp; total = sum_j w_j
     w_j = min(32767, moei_int_exp2(((max s - s_j) * factor) >> 16, bits) >> less)
     r = ((factor2 << 15) >> less) / (total >> down), rounded down, with the least `down` for which
       total >> down < 2^16
     out_p = clamp((((sum_j w_j value_jp >> down) * r >> 16) + round) >> (shift - less))
       round is that of shift - less; zeros after the heads
   The maker sees to |s_j| < 2^30; factor2 <= 32766; 7 <= shift; n <= 65535, so that total <= 2^24
   and less <= 7. */
void moei_int_op_attention(const moei_int_op *op, moei_int_run *run) {
    const moei_int_attention *a = run->model->attentions + op->index;
    const unsigned width = (unsigned)a->heads * a->d_head;
    const int16_t *key = moei_int_vector(run, op->other), *value = moei_int_vector(run, a->value);
    signed char *keys = (signed char *)run->state + a->keys, *values = (signed char *)run->state + a->values;
    moei_int_head h;
    unsigned i;
    for (i = 0; i < width; i++) {
        keys[(size_t)run->place * width + i] = (signed char)key[i];
        values[(size_t)run->place * width + i] = (signed char)value[i];
    }
    h.op = op;
    h.scores = moei_int_wide(run, a->room);
    h.weights = moei_int_vector(run, a->room) + 2 * ((size_t)run->model->length + 1);
    h.n = (unsigned)run->place + 1;
    h.width = width;
    h.d_head = a->d_head;
    h.bits = a->bits;
    for (i = 0; i < width; i += a->d_head) {
        h.q = moei_int_vector(run, op->in) + i;
        h.y = moei_int_vector(run, op->out) + i;
        h.keys = keys + i;
        h.values = values + i;
        moei_int_mix(&h);
    }
    moei_int_put_zeros(width, moei_int_vector(run, op->out));
}

/* The constants outside of experts, if there are any. */
MOEI_INLINE const unsigned char *moei_int_constants(const moe_model *model) {
    return model->weights != NULL ? model->weights : (const unsigned char *)model;
}

static void moei_int_ops(moei_int_run *run, uint32_t first, uint32_t n) {
    const moei_int_op *op = run->model->ops + first, *end = op + n;
    if (n == 0 || run->status != MOE_OK) return;
    do op->run(op, run);
    while (++op < end && run->status == MOE_OK);
}

/* An expert's constants: in place, or the first size bytes in scratch memory. */
static const unsigned char *moei_int_block(const moei_int_mixture *m, moei_int_run *run, uint32_t expert,
                                           uint32_t size) {
    const size_t at = (size_t)m->experts + (size_t)expert * (size_t)m->stride;
    void *block;
    if (m->block == MOEI_INT_NONE) return run->model->experts + at;
    block = moei_int_vector(run, m->block);
    run->status = run->loader->fetch(run->loader->ctx, at, (size_t)size, block);
    return (const unsigned char *)block;
}

/* The choice with the lowest expert of those above `last`; -1: none. */
MOEI_INLINE int moei_int_next(const int16_t *experts, int count, int last) {
    int i, next = -1;
    for (i = 0; i < count; i++)
        if (experts[i] > last && (next < 0 || experts[i] < experts[next])) next = i;
    return next;
}

/* The operations of a chosen expert. */
static void moei_int_expert(const moei_int_mixture *m, moei_int_run *run, unsigned e) {
    if (e < m->zeros) {
        run->base = moei_int_block(m, run, (uint32_t)e, m->stride);
        moei_int_ops(run, m->expert, m->n_expert);
        return;
    }
    run->base = moei_int_constants(run->model);
    if (e >= m->constants) moei_int_ops(run, m->constant + (uint32_t)(e - m->constants) * m->n_constant, m->n_constant);
    else if (e >= m->copies) moei_int_ops(run, m->copy, m->n_copy);
}

void moei_int_op_mixture(const moei_int_op *op, moei_int_run *run) {
    const moei_int_mixture *m = run->model->mixtures + op->index;
    const unsigned char *base = run->base;
    int16_t *choices = moei_int_vector(run, m->choices), *experts = choices + 1;
    int16_t *weights = experts + m->router.most;
    int32_t *sum = moei_int_wide(run, m->sum);
    size_t count = 0, left;
    int i, last = -1;
    moei_int_ops(run, m->score, m->n_score);
    if (run->status == MOE_OK)
        run->status = moei_int_route(&m->router, run->model->weights, run->token, moei_int_vector(run, m->z),
                                     moei_int_wide(run, m->p), experts, weights, &count);
    choices[0] = (int16_t)count;
    moei_int_fill(sum, op->shape.n, moei_int_round(&op->shape) + (((int32_t)count * op->factor + op->factor2) >> 1));
    for (left = count; left > 0 && run->status == MOE_OK; left--) {
        if ((i = moei_int_next(experts, (int)count, last)) < 0) break;
        last = experts[i];
        run->weight = weights[i];
        moei_int_expert(m, run, (unsigned)last);
    }
    run->base = base;
    run->weight = 32767;
    moei_int_ops(run, m->shared, m->n_shared);
    moei_int_store(&op->shape, sum, moei_int_vector(run, op->out));
}

/* ---- operations of routers ---- */

/* also + sum x_i^2 = result * 2^*power, rounded down, with 2^30 <= result unless it is 0; *power is
   even. Exact in two halves of 16 and 32 bits. */
static uint32_t moei_int_squares(unsigned n, const int16_t *x, uint32_t also, int *power) {
    uint32_t high = also >> 16, low = also & 0xffffu;
    for (; n > 0; n--, x++) {
        const uint32_t square = (uint32_t)((int32_t)*x * *x);
        high += square >> 16;
        low += square & 0xffffu;
    }
    high += low >> 16;
    low &= 0xffffu;
    for (*power = 0; high > 0xffffu; high >>= 2, *power += 2) low = low >> 2 | (high & 3u) << 14;
    low |= high << 16;
    for (; low != 0 && low < (uint32_t)1 << 30; low <<= 2) *power -= 2;
    return low;
}

/* out = clamp((in * m + round) >> s): with r * 2^power = in . in + at as moei_int_squares gives it,
   root = floor(sqrt(r)), m = floor(factor * 2^15 / root) and s = 15 + shift + power / 2. All 0
   where r is 0. */
void moei_int_op_unit(const moei_int_op *op, moei_int_run *run) {
    const int16_t *x = moei_int_vector(run, op->in);
    int16_t *y = moei_int_vector(run, op->out);
    moei_int_shape shape = op->shape;
    int power;
    const uint32_t square = moei_int_squares(shape.n, x, op->at, &power);
    const int32_t m = square > 0 ? (int32_t)(((uint32_t)op->factor << 15) / moei_int_sqrt(square)) : 0;
    int32_t round;
    unsigned i;
    shape.shift = (uint8_t)(15 + shape.shift + power / 2);
    round = moei_int_round(&shape);
    for (i = 0; i < shape.n; i++) y[i] = m > 0 ? moei_int_clamp(&shape, (x[i] * m + round) >> shape.shift) : 0;
    moei_int_put_zeros(i, y);
}

/* The choice that comes after choice `last` (-1: the first) by falling weight, of equal ones the
   one listed first; -1: none. */
static int moei_int_lighter(const int16_t *weights, int count, int last) {
    int i, next = -1;
    for (i = 0; i < count; i++) {
        if (last >= 0 && (weights[i] > weights[last] || (weights[i] == weights[last] && i <= last))) continue;
        if (next < 0 || weights[i] > weights[next]) next = i;
    }
    return next;
}

/* out = clamp((in * c + round) >> shift). The factor2 heaviest choices of mixture number `index`,
   whose choices are in other, have shares a_j = floor(w_j * 32767 / sum w), or 32767 for a single
   one, and c = sum_j (a_j * row_j + 2^14) >> 15 with the rows int16 [n rounded up to 4] at `at`,
   one per expert. c = factor where none was chosen, or the weights of several are all 0. */
void moei_int_op_cluster(const moei_int_op *op, moei_int_run *run) {
    const int16_t *choices = moei_int_vector(run, op->other), *experts = choices + 1, *weights;
    const int16_t *x = moei_int_vector(run, op->in);
    const int32_t round = moei_int_round(&op->shape);
    const unsigned width = (op->shape.n + 3u) & ~3u;
    int16_t *y = moei_int_vector(run, op->out);
    int32_t sum = 0;
    int j, i;
    unsigned q;
    weights = experts + run->model->mixtures[op->index].router.most;
    for (i = 0, j = -1; i < op->factor2 && (j = moei_int_lighter(weights, choices[0], j)) >= 0; i++)
        sum += op->factor2 > 1 ? weights[j] : 1;
    for (q = 0; q < width; q++) y[q] = (int16_t)(sum > 0 ? 0 : op->factor);
    for (i = 0, j = -1; sum > 0 && i < op->factor2 && (j = moei_int_lighter(weights, choices[0], j)) >= 0; i++) {
        const unsigned char *row = run->model->weights + op->at + (size_t)experts[j] * width * 2;
        const int32_t a = op->factor2 > 1 ? weights[j] * (int32_t)32767 / sum : 32767;
        for (q = 0; q < width; q++) y[q] = (int16_t)(y[q] + ((a * moei_flash_16(row + 2 * q) + 16384) >> 15));
    }
    for (q = 0; q < op->shape.n; q++)
        y[q] = moei_int_clamp(&op->shape, ((int32_t)x[q] * y[q] + round) >> op->shape.shift);
    moei_int_put_zeros(q, y);
}

/* out_e = clamp((t + round) >> shift) with t = (measure * factor) >> 16, for each expert e of
   mixture number `index`: the next shape.k operations compute `in` [shape.n] from the first `at`
   bytes of its block, measure reduces it to one number. */
static void moei_int_each(const moei_int_op *op, moei_int_run *run,
                          int32_t (*measure)(const moei_int_op *op, const int16_t *v, const int16_t *other)) {
    const moei_int_mixture *m = run->model->mixtures + op->index;
    const unsigned char *base = run->base;
    const int32_t round = moei_int_round(&op->shape);
    int16_t *z = moei_int_vector(run, op->out);
    unsigned e;
    for (e = 0; e < m->router.n_experts; e++) {
        run->base = moei_int_block(m, run, e, op->at);
        moei_int_ops(run, (uint32_t)(op - run->model->ops) + 1, op->shape.k);
        if (run->status != MOE_OK) break; /* `in` was not computed */
        z[e] = moei_int_clamp(
            &op->shape,
            (moei_int_scale(measure(op, moei_int_vector(run, op->in), moei_int_vector(run, op->other)), op->factor) +
             round) >>
                op->shape.shift);
    }
    moei_int_put_zeros(e, z);
    run->base = base;
}

/* Measures, in units of 2^-factor2 of a code. sum |v_i|; */
static int32_t moei_int_l1(const moei_int_op *op, const int16_t *v, const int16_t *other) {
    int32_t sum = 0;
    unsigned i;
    (void)other;
    for (i = 0; i < op->shape.n; i++) sum += v[i] < 0 ? -v[i] : v[i];
    return sum * ((int32_t)1 << op->factor2);
}

/* the largest |v_i|; */
static int32_t moei_int_linf(const moei_int_op *op, const int16_t *v, const int16_t *other) {
    int32_t most = 0;
    unsigned i;
    (void)other;
    for (i = 0; i < op->shape.n; i++) {
        const int32_t a = v[i] < 0 ? -v[i] : v[i];
        if (a > most) most = a;
    }
    return most * ((int32_t)1 << op->factor2);
}

/* the root of moei_int_squares, shifted by power / 2 + factor2; */
static int32_t moei_int_l2(const moei_int_op *op, const int16_t *v, const int16_t *other) {
    int power, up;
    const uint32_t root = moei_int_sqrt(moei_int_squares(op->shape.n, v, 0, &power));
    (void)other;
    up = power / 2 + op->factor2;
    return (int32_t)(up >= 0 ? root << up : up > -32 ? root >> -up : 0);
}

/* sum v_i other_i, both narrow. */
static int32_t moei_int_dot(const moei_int_op *op, const int16_t *v, const int16_t *other) {
    int32_t sum = 0;
    unsigned i;
    for (i = 0; i < op->shape.n; i++) sum += (int32_t)v[i] * other[i];
    return sum * ((int32_t)1 << op->factor2);
}

void moei_int_op_norm_l1(const moei_int_op *op, moei_int_run *run) { moei_int_each(op, run, moei_int_l1); }
void moei_int_op_norm_l2(const moei_int_op *op, moei_int_run *run) { moei_int_each(op, run, moei_int_l2); }
void moei_int_op_norm_linf(const moei_int_op *op, moei_int_run *run) { moei_int_each(op, run, moei_int_linf); }
void moei_int_op_match(const moei_int_op *op, moei_int_run *run) { moei_int_each(op, run, moei_int_dot); }

/* ---- operations on weights ---- */

/* out = clamp((in * m + round) >> shift), m = (weight * factor + 2^14) >> 15; then the weight is
   32767. */
void moei_int_op_apply_weight(const moei_int_op *op, moei_int_run *run) {
    const int16_t *x = moei_int_vector(run, op->in);
    int16_t *y = moei_int_vector(run, op->out);
    const int32_t m = ((int32_t)run->weight * op->factor + 16384) >> 15, round = moei_int_round(&op->shape);
    unsigned i;
    for (i = 0; i < op->shape.n; i++) y[i] = moei_int_clamp(&op->shape, (x[i] * m + round) >> op->shape.shift);
    moei_int_put_zeros(i, y);
    run->weight = 32767;
}

void moei_int_op_set_weight(const moei_int_op *op, moei_int_run *run) {
    run->weight = moei_int_vector(run, op->in)[op->shape.k];
}

/* sum out_i += (in_i * weight + round) >> shift. */
void moei_int_op_accumulate(const moei_int_op *op, moei_int_run *run) {
    const int16_t *x = moei_int_vector(run, op->in);
    int32_t *sum = moei_int_wide(run, op->out);
    const int32_t round = moei_int_round(&op->shape), weight = run->weight;
    unsigned i;
    for (i = 0; i < op->shape.n; i++) sum[i] += (x[i] * weight + round) >> op->shape.shift;
}

/* sum out_i += (((in_i * factor + round) >> shift) * rest) >> 16 with rest = at - ((sum of the
   weights of choices, which are in other) >> factor2) within int16. */
void moei_int_op_add_rest(const moei_int_op *op, moei_int_run *run) {
    const int16_t *choices = moei_int_vector(run, op->other),
                  *weights = choices + 1 + run->model->mixtures[op->index].router.most;
    const int16_t *x = moei_int_vector(run, op->in);
    const int32_t round = moei_int_round(&op->shape);
    int32_t *sum = moei_int_wide(run, op->out), taken = 0, rest;
    int i;
    unsigned q;
    for (i = 0; i < choices[0]; i++) taken += weights[i];
    rest = (int32_t)op->at - (taken >> op->factor2);
    rest = rest > 32767 ? 32767 : rest < -32767 ? -32767 : rest;
    for (q = 0; q < op->shape.n; q++)
        sum[q] += moei_int_scale(((int32_t)x[q] * op->factor + round) >> op->shape.shift, (int16_t)rest);
}

/* Widens the input to a vector. */
static void moei_int_enter(int16_t *x, const signed char *input, size_t n) {
    const signed char *end = input + n;
#if defined(MOEI_INT_DSP) && defined(__ARM_FEATURE_UNALIGNED)
    if (n >= 8)
        __asm__ volatile(
            "1:\tldr r4,[%1],#4\nldr r6,[%1],#4\nsxtb16 r5,r4,ror #8\nsxtb16 r4,r4\npkhbt r3,r4,r5,lsl #16\n"
            "pkhtb r4,r5,r4,asr #16\nsxtb16 r12,r6,ror #8\nsxtb16 r6,r6\npkhbt r5,r6,r12,lsl #16\n"
            "pkhtb r6,r12,r6,asr #16\nstm %0!,{r3,r4,r5,r6}\ncmp %1,%2\nbne 1b"
            : "+r"(x), "+r"(input)
            : "r"(input + (n & ~(size_t)7))
            : "r3", "r4", "r5", "r6", "r12", "cc", "memory");
#endif
    while (input != end) *x++ = *input++;
    for (; n % 4 != 0; n++) *x++ = 0;
}

MOEI_INLINE moe_status moei_int_begin(const moe_model *model, const moe_loader *loader, const void *input,
                                      void *scratch, moei_int_run *run) {
    unsigned char *memory = moei_int_scratch(scratch);
    run->model = model;
    run->loader = loader;
    run->base = moei_int_constants(model);
    run->state = memory;
    run->vectors = (int16_t *)(void *)(memory + model->state_size);
    run->place = 0;
    run->weight = 32767;
    run->status = MOE_OK;
    run->token = model->d_in == 0 ? *(const int32_t *)input : 0;
    if (model->length == 0) return MOE_OK;
    memcpy(&run->place, memory, sizeof run->place);
    return run->place >= model->length ? MOE_ERR_STATE : MOE_OK;
}

/* Runs the operations and copies the output, numbers of size bytes. */
MOEI_INLINE moe_status moei_int_end(moei_int_run *run, void *output, size_t size) {
    const moe_model *model = run->model;
    const int16_t *from;
    int16_t *to = (int16_t *)output, *end = to + model->d_out;
    moei_int_ops(run, 0, model->n_main);
    if (run->status != MOE_OK) return run->status;
    from = moei_int_vector(run, model->ops[model->n_main - 1].out);
    if (size != sizeof *to) memcpy(output, from, model->d_out * size); /* floats are no int16_t */
    else
        do *to++ = *from++;
        while (to != end);
    run->place++;
    if (model->length > 0) memcpy(run->state, &run->place, sizeof run->place);
    return MOE_OK;
}

moe_status moei_int_model_run(const moe_model *model, const moe_loader *loader, const void *input, void *output,
                              void *scratch) {
    moei_int_run run;
    const moe_status status = moei_int_begin(model, loader, input, scratch, &run);
    if (status != MOE_OK) return status;
    if (model->d_in > 0) moei_int_enter(run.vectors, (const signed char *)input, model->d_in);
    return moei_int_end(&run, output, sizeof(int16_t));
}

moe_status moe_infer(const moe_model *model, const moe_loader *loader, const void *input, void *output, void *scratch,
                     size_t scratch_size) {
    if (model == NULL || input == NULL || output == NULL || scratch == NULL) return MOE_ERR_ARGUMENT;
    if (model->version != MOE_MODEL_VERSION) return MOE_ERR_UNSUPPORTED;
    if (model->experts == NULL && model->n_mixtures > 0 && model->weights_are != MOE_WEIGHTS_FLOAT &&
        (loader == NULL || loader->fetch == NULL))
        return MOE_ERR_UNSUPPORTED;
    if (scratch_size < model->scratch_size) return MOE_ERR_SPACE;
    return model->run(model, loader, input, output, scratch);
}

/* code * 2^bits, within int32. */
static int32_t moei_choice_weight(int32_t level, int bits) {
    if (bits < 0) return level >> (bits < -31 ? 31 : -bits);
    if (bits <= 16 || level == 0) return level * ((int32_t)1 << (bits <= 16 ? bits : 0));
    return level > 0 ? INT32_MAX : -INT32_MAX;
}

moe_status moei_int_model_choices(const moe_model *model, size_t mixture, const void *scratch, moe_choice *choices,
                                  size_t room, size_t *count) {
    const moei_int_mixture *m;
    const int16_t *made;
    size_t i;
    if (mixture >= model->n_mixtures) return MOE_ERR_NOT_FOUND;
    m = model->mixtures + mixture;
    made =
        (const int16_t *)(const void *)(moei_int_scratch((void *)(uintptr_t)scratch) + model->state_size) + m->choices;
    *count = (size_t)made[0];
    for (i = 0; i < *count && i < room; i++) {
        choices[i].expert = made[1 + i];
        choices[i].weight = moei_choice_weight(made[1 + m->router.most + i], m->weight_bits);
    }
    return MOE_OK;
}

moe_status moe_infer_choices(const moe_model *model, size_t mixture, const void *scratch, moe_choice *choices,
                             size_t room, size_t *count) {
    if (model == NULL || scratch == NULL || count == NULL || (choices == NULL && room > 0)) return MOE_ERR_ARGUMENT;
    if (model->version != MOE_MODEL_VERSION) return MOE_ERR_UNSUPPORTED;
    return model->choices(model, mixture, scratch, choices, room, count);
}

#ifndef MOE_NO_FLOAT
void moe_infer_levels(const moe_model *model, const moe_real *x, int8_t *levels) {
    size_t i;
    if (model == NULL || x == NULL || levels == NULL) return;
    for (i = 0; i < model->d_in; i++) {
        const moe_real level = x[i] / (moe_real)model->input_scale;
        if (level >= 127) levels[i] = 127;
        else if (level <= -127) levels[i] = -127;
        else levels[i] = (int8_t)(level >= 0 ? level + MOEI_R(0.5) : level < 0 ? level - MOEI_R(0.5) : 0);
    }
}

static moe_choice moei_float_choice(int32_t expert, moe_real weight) {
    const moe_real w = weight * MOEI_R(32768.0);
    moe_choice choice;
    choice.expert = expert;
    choice.weight = w > MOEI_R(2e9)    ? INT32_MAX
                    : w < MOEI_R(-2e9) ? -INT32_MAX
                                       : (int32_t)(w + (w < 0 ? MOEI_R(-0.5) : MOEI_R(0.5)));
    return choice;
}

moe_status moei_float_model_run(const moe_model *model, const moe_loader *loader, const void *input, void *output,
                                void *scratch) {
    struct moe_module_pass *pass;
    size_t i = 0;
    const moe_status status =
        moei_float_infer(model->net, model->length, input, (moe_real *)output, scratch, model->scratch_size);
    (void)loader;
    if (status == MOE_OK || status == MOE_ERR_SPACE) return status;
    /* no choices: those of layers that the call did not reach are not there */
    while ((pass = moei_float_pass(model->net, model->length, i++, scratch)) != NULL) pass->layer = NULL;
    return status;
}

moe_status moei_float_model_choices(const moe_model *model, size_t mixture, const void *scratch, moe_choice *choices,
                                    size_t room, size_t *count) {
    const struct moe_module_pass *pass =
        moei_float_pass(model->net, model->length, mixture, (void *)(uintptr_t)scratch);
    const moe_routing *routing;
    size_t i;
    if (pass == NULL) return MOE_ERR_NOT_FOUND;
    *count = 0;
    if (pass->layer == NULL) return MOE_OK;
    routing = &pass->layer->routing;
    *count = (size_t)routing->n_choices[0];
    for (i = 0; i < *count && i < room; i++)
        choices[i] = moei_float_choice(routing->choices[i], routing->weights[routing->choices[i]]);
    return MOE_OK;
}

#if !MOE_REAL_IS_DOUBLE
/* The k largest of those above least (NULL: of all), by falling key, with factor2 by falling
   logits; of equal ones the first. */
static void moei_float_choose(const moei_int_op *op, moei_int_run *run, const float *least, int k) {
    const moei_float_view v = moei_float_see(op, run);
    const float *key = op->factor2 != 0 ? v.y : v.x;
    int16_t *experts = v.choices + 1;
    int i, at, count = 0;
    for (i = 0; i < v.n; i++) {
        if (!moe_is_finite(v.y[i])) run->status = MOE_ERR_NONFINITE;
        if ((least != NULL && !(v.x[i] > least[i])) || (count == k && !(key[i] > key[experts[k - 1]]))) continue;
        for (at = count < k ? count++ : k - 1; at > 0 && key[i] > key[experts[at - 1]]; at--)
            experts[at] = experts[at - 1];
        experts[at] = (int16_t)i;
    }
    v.choices[0] = (int16_t)(run->status == MOE_OK ? count : 0);
}

void moei_float_op_choose(const moei_int_op *op, moei_int_run *run) { moei_float_choose(op, run, NULL, op->shape.k); }

void moei_float_op_choose_above(const moei_int_op *op, moei_int_run *run) {
    const moei_float_view v = moei_float_see(op, run);
    moei_float_choose(op, run, v.c, v.n);
    if (v.choices[0] == 0 && op->factor != 0) moei_float_choose(op, run, NULL, 1);
}

void moei_float_op_choose_sum(const moei_int_op *op, moei_int_run *run) {
    const moei_float_view v = moei_float_see(op, run);
    float sum = 0;
    int i;
    moei_float_choose(op, run, NULL, v.n);
    for (i = 0; i < v.choices[0] && !(sum > v.c[0]); i++) sum += v.x[v.choices[1 + i]];
    v.choices[0] = (int16_t)i;
}

void moei_float_op_choose_listed(const moei_int_op *op, moei_int_run *run) {
    const moei_float_view v = moei_float_see(op, run);
    int16_t *experts = v.choices + 1;
    int i, at;
    moei_float_choose(op, run, NULL, 0); /* the logits */
    if ((uint32_t)run->token >= op->index) run->status = MOE_ERR_ARGUMENT;
    if (run->status != MOE_OK) return;
    for (i = 0; i < v.k; i++) {
        const int16_t e = (int16_t)v.c[(size_t)run->token * op->shape.k + (size_t)i];
        for (at = i; at > 0; at--) {
            const int16_t o = experts[at - 1];
            if (v.x[e] < v.x[o] || (!(v.x[e] > v.x[o]) && e > o)) break;
            experts[at] = o;
        }
        experts[at] = e;
    }
    v.choices[0] = (int16_t)v.k;
}

void moei_float_op_mixture(const moei_int_op *op, moei_int_run *run) {
    const moei_int_mixture *m = run->model->mixtures + op->index;
    const unsigned char *base = run->base;
    int16_t *choices = moei_int_vector(run, m->choices);
    float *y = (float *)(void *)moei_int_vector(run, op->out);
    int i, last = -1;
    choices[0] = 0;
    moei_int_ops(run, m->score, m->n_score);
    for (i = 0; i < op->shape.n; i++) y[i] = 0;
    while (run->status == MOE_OK && (i = moei_int_next(choices + 1, choices[0], last)) >= 0) {
        last = choices[1 + i];
        run->share = moei_float_weights(choices, m->router.most)[i];
        run->base = moei_int_block(m, run, (uint32_t)last, m->stride);
        moei_int_ops(run, m->expert, m->n_expert);
    }
    run->base = base;
    run->share = 1;
    moei_int_ops(run, m->shared, m->n_shared);
}

moe_status moei_float_ops_run(const moe_model *model, const moe_loader *loader, const void *input, void *output,
                              void *scratch) {
    moei_int_run run;
    const moe_status status = moei_int_begin(model, loader, input, scratch, &run);
    run.share = 1;
    if (status != MOE_OK) return status;
    memcpy(run.vectors, input, model->d_in * sizeof(float));
    return moei_int_end(&run, output, sizeof(float));
}

moe_status moei_float_ops_choices(const moe_model *model, size_t mixture, const void *scratch, moe_choice *choices,
                                  size_t room, size_t *count) {
    const moei_int_mixture *m;
    int16_t *made;
    size_t i;
    if (mixture >= model->n_mixtures) return MOE_ERR_NOT_FOUND;
    m = model->mixtures + mixture;
    made = (int16_t *)(void *)(moei_int_scratch((void *)(uintptr_t)scratch) + model->state_size) + m->choices;
    *count = (size_t)made[0];
    for (i = 0; i < *count && i < room; i++)
        choices[i] = moei_float_choice(made[1 + i], moei_float_weights(made, m->router.most)[i]);
    return MOE_OK;
}
#endif
#endif

#endif /* MOE_IMPLEMENTATION */
