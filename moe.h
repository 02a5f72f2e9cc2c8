/* moe.h - 0.1.0 - mixtures of experts in C: experts, layers, nets, training, files - MIT or public domain, at your choice (see LICENSE)

   Recipe
     1. Copy moe.h, moe_routers.h and moe_kernels.h into your project (or the one file that `sh amalgamate` writes to standard output).
     2. In ONE source file:   #define MOE_IMPLEMENTATION   and then   #include "moe.h"
     3. Everywhere else:      #include "moe.h"       Link with the mathematics library (-lm). No build system, no compiler option needed.
     The three files need stb_ds.h (its declarations only) where the implementation is compiled, unless MOE_NO_TRAIN is defined; Debian: libstb-dev. The
     one file has it inside.

   First program: a layer of experts learns to double its input, is saved and loaded.
 * --- first program ---
 * #define MOE_IMPLEMENTATION
 * #include "moe.h"
 * #include <stdio.h>
 *
 * int main(void) {
 *     moe_layer_config config = {0}; // 8 experts, 2 per token, swiglu
 *     moe_net net = {0}, copy = {0};
 *     moe_train_config training = {0}; // AdamW, batches of 32
 *     moe_evaluation result;
 *     moe_data data = {0};
 *     moe_error error;
 *     static moe_real x[512 * 4], target[512 * 4];
 *     moe_rng rng = {1};
 *     int i;
 *     for (i = 0; i < 512 * 4; i++) x[i] = moe_rng_normal(&rng), target[i] = 2 * x[i];
 *     data.n = 512, data.x = x, data.targets = target;
 *     training.criterion = MOE_CRITERION_SQUARED_ERROR;
 *     training.epochs = 30;
 *     moe_net_init(&net, 4, MOE_KERNELS_AUTO, NULL);
 *     moe_net_mixture(&net, &config);
 *     if (moe_net_build(&net, 1, 42, &error) || moe_fit(&net, &data, NULL, &training, &error) ||
 *         moe_net_save(&net, "first.safetensors", &error) ||
 *         moe_net_load(&copy, "first.safetensors", 0, MOE_KERNELS_AUTO, NULL, &error) ||
 *         moe_evaluate(&copy, &data, MOE_CRITERION_SQUARED_ERROR, &result, &error))
 *         return printf("%s\n", error.message), 1;
 *     printf("mean loss after training, saving and loading: %.4f\n", (double)result.loss);
 *     moe_net_free(&net);
 *     moe_net_free(&copy);
 *     return remove("first.safetensors");
 * }
 * --- end ---

   Options, besides those of moe_kernels.h
     macro             must match in every file?   meaning
     MOE_NO_TRAIN      yes   inference only: no backward pass, no trainer, no writing of files; implies MOE_NO_STDIO and MOE_NO_MALLOC unless asked back
     MOE_NO_STDIO      yes   no function takes a path; files are read from and written to memory. MOE_STDIO asks it back under MOE_NO_TRAIN
     MOE_NO_MALLOC     no    there is no standard heap: what allocates needs a moe_allocator. MOE_MALLOC asks it back under MOE_NO_TRAIN
     MOE_NO_QUANT      yes   no int8 and int4 weights (see moe_kernels.h)
     MOE_NO_REPORT     yes   no figures and reports (moe_report_svg and its neighbours); MOE_NO_TRAIN leaves them out too
     MOE_STB_DS_PATH   no    the header's name in quotes, when it is not found as "stb_ds.h" or <stb/stb_ds.h>
     What they save of the object's 662 kB (gcc -O2, x86-64; measured by tests/options.sh, more in moe_kernels.h): MOE_NO_TRAIN 288 kB, MOE_NO_QUANT 99 kB,
     MOE_NO_REPORT 58 kB, MOE_NO_STDIO 10 kB, MOE_NO_MALLOC next to nothing. None of them changes the speed of a forward pass.

   Glossary (the words of moe_routers.h, and)
     layer        a router and E experts: y_t = sum over the chosen e of w_te f_e(x_t), plus shared experts.
     gather       copying the rows of x that an expert takes next to each other.   combine: adding its weighted rows into y.
     work memory  the caller's memory for one call; its exact size can be asked beforehand.
     pass         what one forward call leaves in work memory: the routing for reports, and what the way back needs.
     net          a list of modules built by calls.   trainer: an optimiser at work on one net.
     packed       weights in the order in which the kernels read them, see moe_layer_pack.
     cache        what decoding keeps of a sequence's earlier tokens, in the caller's memory.
     model        a net made ready for moe_infer: constants alone.   level: the whole number that stands for a real one: real = level * scale.
     calibration  inputs like those that will come; they show how large numbers become.   scratch: the memory that moe_infer works in.
     slot, place  the number under which a tensor of a layer or router is kept; which exist depends on the configuration.

   Manual
     The data's way.   x [N,d] -> moe_route -> plan -> gather by expert -> expert -> weighted scatter -> y [N,d].   Backward walks the same road
     the other way: dy -> experts (dW, dx, dweight) -> router (dW, dx).

     A layer alone.
       moe_layer_config config;  moe_layer layer;  moe_error error;
       moe_layer_preset("mixtral", &config, &error);          or {0}, or any mix of fields
       config.router.d_model = 64;  config.d_ff = 128;
       moe_layer_create(&layer, &config, 1, seed, NULL, &error);       1: with gradients; NULL: the standard heap
       moe_layer_work_size(&layer, n, 1, &bytes);  work = malloc(bytes);
       moe_call call = {0};  call.n_tokens = n;  call.x = x;  call.training = 1;
       moe_layer_forward(&layer, &call, y, work, bytes, &pass);        y [n,64]; pass.routing says who went where
       moe_layer_backward(&layer, dy, dx, NULL, &pass);                adds to layer.gradients and dx
       moe_layer_save(&layer, "layer.safetensors", &error);
       moe_layer_free(&layer);
     Weights in flash or in a mapped file: moe_layer_init makes a layer without memory; set layer.tensors[place] for every place for which
     moe_layer_slot answers MOE_OK. Nothing is copied, and forward allocates nothing.

     Faster inference.   moe_layer_pack re-orders the weights of all experts once, for the kernels; results keep their bits.
       moe_layer_pack_size(&layer, MOE_TYPE_REAL, &bytes);  packed = malloc(bytes);
       moe_layer_pack(&layer, MOE_TYPE_REAL, packed, bytes, &error);   then ask for the work size again and call forward as before
     MOE_TYPE_Q8, Q8_BLOCK and Q4 make them int8 or 4 bits (the router stays as it is), MOE_TYPE_F16 and BF16 16-bit floats;
     moe_layer_quantise does the same and reports how far every expert is off. Packed weights are not saved. A layer inside a net is
     net.modules[i].layer.

     Experts are data: each kind is a row of steps over named activations (low, gate, up, act, product, output). The score `norm` reads one of them:
     it is then computed for all experts, and the chosen experts go on from there.

     A net.   moe_net_init, module calls, moe_net_build; a failed module call is remembered and returned by build, so one check is enough.
     Every tensor has a name, "2.router.weight", and is reached by it: moe_net_find.

     A language model is a net of token ids (d_in = 0): here one block with a mixture, 256 tokens, width 64, sequences of up to 128.
       moe_net_init(&net, 0, MOE_KERNELS_AUTO, NULL);
       moe_net_embedding(&net, 256, 64);  moe_net_positions(&net, 128);
       moe_net_rms_norm(&net);  moe_net_attention(&net, NULL);    moe_net_residual(&net, 2);
       moe_net_rms_norm(&net);  moe_net_mixture(&net, &config);   moe_net_residual(&net, 2);
       moe_net_rms_norm(&net);  moe_net_tied(&net);  moe_net_build(&net, 1, seed, &error);
     In a call, token_ids [N] takes the place of x, and sequences says where each begins; y [N,256] are the logits of the tokens that follow. Attention
     with rotary = 1 needs no positions. A router behind attention may refine by it (refine = attention); the net hands it what it reads.

     Decoding continues a sequence with what a cache keeps of its earlier tokens, in the caller's memory:
       moe_net_cache_size(&net, 128, &bytes);               moe_net_cache_init(&cache, &net, 128, malloc(bytes), bytes, &error);
       moe_net_decode_work_size(&net, 128, 128, &bytes);    work = malloc(bytes);
       moe_net_decode(&net, &cache, &call, work, bytes, &pass);   the prompt, n_tokens and token_ids in call; then each token that
       moe_sample(NULL, 256, pass.y + (n - 1) * 256, ...);        was drawn from the logits of the one before it, n = 1

     Training.   moe_fit does it all; moe_trainer_step does one step, for loops of your own. Both change the routers' state, after each step.
     Samples that stand in sequences say how long these are (data.length); a negative label is none.
       config.warmup = 100;  config.final_rate = 0.1;                  the rate rises, then falls along a cosine (or schedule = linear)
       moe_param_group groups[] = {{"*.router.*", 0.1, 0, 0}, {"0.*", 0, 0, 1}};     routers learn slowly, module 0 is frozen
       config.groups = groups;  config.n_groups = 2;  config.accumulate = 4;         the mean gradient of four batches is a step
       config.checkpoint = "run.safetensors";  config.checkpoint_every = 500;  config.resume = 1;
     Stopped or killed, and called again with the same settings, moe_fit goes on to the bits that it would have had. Loops of your own have
     moe_trainer_accumulate and _update, and moe_trainer_save and _load.

     The classical mixture.   A mixture layer with select = dense and weight = raw as the last module, whole small networks as experts: the criteria
     beyond the first two read its experts one by one (moe_mixture_loss does it for arrays of your own). moe_modular_* are modular networks by hard
     EM, moe_hme_* the hierarchical mixture. Decoupled training: train the experts on splits of the data, freeze them (MOE_PARAM_FROZEN in the flags
     of their tensors), then train the gate; an attentive gate teaches an ordinary one by loss_distill with its logits as the teacher.

     Reports.   A moe_figure is plain data: an expert x class table, loads, curves over training, a text coloured by expert, a comparison, a map of regions.
     moe_report_svg draws it, moe_report_html makes a page of several, moe_report_text writes it for a terminal; moe_report_save takes the form from a name:
       moe_figure figures[2];  figures[0] = moe_figure_classes(&report);  figures[1] = moe_figure_history(&history, 0, 2, names);
       moe_report_save("report.html", "My experts", figures, 2, &error);         report is that of moe_metrics_report, history of moe_history_add

     A model for small machines.   moe_model_create makes one of a trained net, with float weights or in integers; moe_infer runs it here;
     moe_export_c writes it as a C header with constants, which firmware includes:
       moe_model_config config = {0};  moe_built_model built;
       config.weights = MOE_WEIGHTS_INT8;  config.calibration = &some_hundred_rows;
       moe_model_create(&built, &net, &config, &error);      moe_infer(&built.model, input, output, scratch, built.model.scratch_size);
       stream = moe_buffer_stream(&buffer);  moe_export_c(&built, "digits", &stream, &error);  moe_model_free(&built);
     and on the device, where nothing is allocated or initialised:
       #define MOE_IMPLEMENTATION
       #define MOE_NO_FLOAT                      integers alone; a float model takes MOE_NO_TRAIN
       #include "digits.h"
       static unsigned char scratch[DIGITS_SCRATCH];
       moe_infer(&digits, input, output, scratch, sizeof scratch);     moe_infer_choices(&digits, 0, scratch, choices, room, &count);
     Integer models compute in whole numbers from input to output, so their bits are the same on every machine. Real numbers are level * scale: the
     header's NAME_INPUT_SCALE and NAME_OUTPUT_SCALE. Vectors that products read have levels within +-127, sums of residuals, logits and what norms read have
     16 bits; weights have one scale per output (int4: and one per 32 inputs), by the rules of moe_pack. Products are sums of int8 times int8 in 32
     bits; activations and gates are curves or powers of two in fixed point. Every stage is named by its function in a constant, so a linker with
     --gc-sections keeps what the model uses. Routers decide by one token: what moe_net_check_decoding refuses stays refused. Experts that lie outside the
     address space come through a moe_loader, chosen ones only. On AVR constants stay in program memory; all of them must lie in its first 64 KiB.

     Files.   safetensors, with the configuration as JSON text in the metadata under the key "moe". Values are float32 (float64 in the double build),
     little-endian. Keys of the configuration that this version does not know are refused by name, except those that begin with "_". What is
     read may come from strangers: every length, offset, shape, type and name is checked before it is used. A file is replaced by writing
     beside it and renaming, so a failed save leaves the old one.

     Published layers.   The mixtures of Mixtral, Qwen, OLMoE, DeepSeek, Llama 4, GPT-OSS and others load from the files that their authors ship:
       moe_load_layer(&layer, "Mixtral-8x7B", "model.layers.3.mlp", NULL, NULL, &error);    a folder, a .safetensors, an index or a .gguf (blk.3)
       moe_save_published(&layer, "new.safetensors", "model.layers.3.block_sparse_moe", "mixtral", MOE_DTYPE_BF16, &error);
     Settings come from config.json beside the file or the GGUF's metadata, else from a preset. Of large files only the layer's own part is read.

     Memory.   Objects that own memory take it from a moe_allocator (NULL: the standard heap) and say so; forward and backward work in the caller's memory and
     allocate nothing. Work sizes come from the function that also lays the memory out, so they are exact.

     Pointers.   Every moe_error may be NULL, every moe_allocator (the standard heap) and every configuration of which {0} is a valid one and that says so;
     what else may be NULL is said with the function or field. Where another pointer is NULL, a call that returns moe_status answers MOE_ERR_ARGUMENT
     (moe_layer_slot does not look), and one that frees does nothing.

     Errors.   Every call that can fail returns a moe_status; 0 is success. Calls that check a configuration or read a file also fill a moe_error:
     one line that names the field or byte and the value. A failed call leaves its objects as they were. Nothing aborts or prints.

     Promises.   Bitwise, for the same build and kernels: a token's result does not depend on the batch it comes in (for causal routers); a token's
     experts are added in ascending order; inference and training calls give the same y; a loaded model gives the same results as the saved one;
     the same seed gives the same model. Between kernels, results agree within rounding.

     Numbers that are not finite.   Inputs up to 1e4 in size give finite outputs, losses and gradients of a layer with weights as they are initialised. (A
     gated expert about squares its input's size: in deep nets norms keep it small.) What is infinite or NaN is not repaired: a router that meets it ends
     the call with MOE_ERR_NONFINITE, the trainer refuses such data, losses and gradients, and elsewhere it stays in what is computed from it: its own
     token's numbers, and with attention later tokens'. Files keep every number as it is. Options that break IEEE arithmetic (-ffast-math) void this
     and the promises above.

     Threads.   No globals. Reading one layer or net from several threads is safe with work memory per thread; training is for one thread per net.
     One call spreads its experts' work over OpenMP's threads where the compiler has OpenMP on (-fopenmp; OMP_NUM_THREADS=1 keeps it to one), else over
     those of call.parallel, a function of the caller's that runs tasks. Every thread gets the same share of each expert's columns, so nobody waits for
     a popular expert, and owns what it writes: the bits are the same for any number of threads. Small calls stay in one thread.
*/
#include "moe_routers.h"

#ifndef MOE_H
#define MOE_H

#if MOE_VERSION_MAJOR != 0 || MOE_VERSION_MINOR != 1 || MOE_VERSION_PATCH != 0
#error "moe: this is moe.h of version 0.1.0, and moe_kernels.h is of another: copy all headers of one version"
#endif

/* In the double build every public function carries the suffix _f64; see moe_kernels.h. */
#if MOE_REAL_IS_DOUBLE
#define moe_arena_allocator moe_arena_allocator_f64
#define moe_buffer_stream moe_buffer_stream_f64
#define moe_buffer_free moe_buffer_free_f64
#define moe_file_read moe_file_read_f64
#define moe_file_replace moe_file_replace_f64
#define moe_file_open moe_file_open_f64
#define moe_file_next moe_file_next_f64
#define moe_file_rewind moe_file_rewind_f64
#define moe_file_find moe_file_find_f64
#define moe_file_metadata moe_file_metadata_f64
#define moe_file_values moe_file_values_f64
#define moe_file_integers moe_file_integers_f64
#define moe_file_write moe_file_write_f64
#define moe_layer_fields moe_layer_fields_f64
#define moe_layer_check moe_layer_check_f64
#define moe_layer_preset moe_layer_preset_f64
#define moe_layer_slot moe_layer_slot_f64
#define moe_layer_init moe_layer_init_f64
#define moe_layer_create moe_layer_create_f64
#define moe_layer_free moe_layer_free_f64
#define moe_layer_tensor moe_layer_tensor_f64
#define moe_layer_find moe_layer_find_f64
#define moe_layer_parameters moe_layer_parameters_f64
#define moe_layer_pack moe_layer_pack_f64
#define moe_layer_pack_size moe_layer_pack_size_f64
#define moe_layer_quantise moe_layer_quantise_f64
#define moe_layer_quantise_work_size moe_layer_quantise_work_size_f64
#define moe_layer_work_size moe_layer_work_size_f64
#define moe_layer_forward moe_layer_forward_f64
#define moe_layer_backward moe_layer_backward_f64
#define moe_layer_expert_outputs moe_layer_expert_outputs_f64
#define moe_layer_backward_experts moe_layer_backward_experts_f64
#define moe_layer_observe moe_layer_observe_f64
#define moe_layer_advance moe_layer_advance_f64
#define moe_net_check_decoding moe_net_check_decoding_f64
#define moe_net_observe moe_net_observe_f64
#define moe_net_advance moe_net_advance_f64
#define moe_layer_write moe_layer_write_f64
#define moe_layer_save moe_layer_save_f64
#define moe_layer_read moe_layer_read_f64
#define moe_layer_load moe_layer_load_f64
#define moe_memory_source moe_memory_source_f64
#define moe_rank_part moe_rank_part_f64
#define moe_transport_begin moe_transport_begin_f64
#define moe_transport_agree moe_transport_agree_f64
#define moe_transport_end moe_transport_end_f64
#define moe_transport_status moe_transport_status_f64
#define moe_read_published moe_read_published_f64
#define moe_load_layer moe_load_layer_f64
#define moe_write_published moe_write_published_f64
#define moe_save_published moe_save_published_f64
#define moe_cross_entropy moe_cross_entropy_f64
#define moe_consistency_loss moe_consistency_loss_f64
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
#define moe_net_parameters moe_net_parameters_f64
#define moe_net_read moe_net_read_f64
#define moe_net_residual moe_net_residual_f64
#define moe_net_routing moe_net_routing_f64
#define moe_net_save moe_net_save_f64
#define moe_net_work_size moe_net_work_size_f64
#define moe_net_write moe_net_write_f64
#define moe_net_zero_gradients moe_net_zero_gradients_f64
#define moe_squared_error moe_squared_error_f64
#define moe_trainer_free moe_trainer_free_f64
#define moe_modular_init moe_modular_init_f64
#define moe_modular_free moe_modular_free_f64
#define moe_modular_step moe_modular_step_f64
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
#define moe_net_cache_size moe_net_cache_size_f64
#define moe_net_cache_init moe_net_cache_init_f64
#define moe_net_decode_work_size moe_net_decode_work_size_f64
#define moe_net_decode moe_net_decode_f64
#define moe_sample moe_sample_f64
#define moe_hme_create moe_hme_create_f64
#define moe_hme_em moe_hme_em_f64
#define moe_hme_free moe_hme_free_f64
#define moe_hme_gradient moe_hme_gradient_f64
#define moe_hme_log_likelihood moe_hme_log_likelihood_f64
#define moe_hme_posteriors moe_hme_posteriors_f64
#define moe_hme_predict moe_hme_predict_f64
#define moe_mixture_answer moe_mixture_answer_f64
#define moe_infer moe_infer_f64
#define moe_infer_loading moe_infer_loading_f64
#define moe_infer_restart moe_infer_restart_f64
#define moe_infer_levels moe_infer_levels_f64
#define moe_infer_choices moe_infer_choices_f64
#define moe_int_model_run moe_int_model_run_f64
#define moe_int_model_choices moe_int_model_choices_f64
#define moe_float_model_run moe_float_model_run_f64
#define moe_float_model_choices moe_float_model_choices_f64
#define moe_model_create moe_model_create_f64
#define moe_model_free moe_model_free_f64
#define moe_export_c moe_export_c_f64
#define moe_export_experts moe_export_experts_f64
#define moe_int_op_int8 moe_int_op_int8_f64
#define moe_int_op_int4 moe_int_op_int4_f64
#define moe_int_op_int8_add moe_int_op_int8_add_f64
#define moe_int_op_int4_add moe_int_op_int4_add_f64
#define moe_int_op_curve moe_int_op_curve_f64
#define moe_int_op_multiply moe_int_op_multiply_f64
#define moe_int_op_add moe_int_op_add_f64
#define moe_int_op_rescale moe_int_op_rescale_f64
#define moe_int_op_mixture moe_int_op_mixture_f64
#define moe_int_op_row moe_int_op_row_f64
#define moe_int_op_norm moe_int_op_norm_f64
#define moe_int_op_turn moe_int_op_turn_f64
#define moe_int_op_attention moe_int_op_attention_f64
#define moe_int_op_unit moe_int_op_unit_f64
#define moe_int_op_cluster moe_int_op_cluster_f64
#define moe_int_op_norm_l1 moe_int_op_norm_l1_f64
#define moe_int_op_norm_l2 moe_int_op_norm_l2_f64
#define moe_int_op_norm_linf moe_int_op_norm_linf_f64
#define moe_int_op_match moe_int_op_match_f64
#define moe_int_op_weigh moe_int_op_weigh_f64
#define moe_int_op_weight moe_int_op_weight_f64
#define moe_int_op_accumulate moe_int_op_accumulate_f64
#define moe_int_op_rest moe_int_op_rest_f64
#define moe_mixture_loss moe_mixture_loss_f64
#define moe_struct_names moe_struct_names_f64
#define moe_struct_place moe_struct_place_f64
#define moe_report_svg moe_report_svg_f64
#define moe_report_html moe_report_html_f64
#define moe_report_text moe_report_text_f64
#define moe_report_save moe_report_save_f64
#define moe_figure_classes moe_figure_classes_f64
#define moe_figure_load moe_figure_load_f64
#define moe_history_add moe_history_add_f64
#define moe_figure_history moe_figure_history_f64
#endif

#ifdef __cplusplus
extern "C" {
#endif



#ifndef MOE_NO_FLOAT
/* ---- memory ------------------------------------------------------------------------------------------------------------ */

/* Where objects that own memory get it from. resize(ctx, NULL, 0, n) allocates, resize(ctx, p, old, n) grows or shrinks and keeps
   the first min(old, n) bytes, resize(ctx, p, old, 0) frees and returns NULL. Blocks are aligned as malloc aligns. On failure it
   returns NULL and leaves the old block as it was. A NULL moe_allocator pointer anywhere, or a NULL resize, means the standard
   library's heap (not there with MOE_NO_MALLOC: then it is MOE_ERR_ARGUMENT). The struct is copied; ctx stays the caller's. */
typedef struct moe_allocator {
    void *ctx;
    void *(*resize)(void *ctx, void *block, size_t old_size, size_t new_size);
} moe_allocator;

/* A piece of caller's memory that hands out blocks one after another; freeing the last block gives it back, freeing others is a
   no-op until the whole arena is dropped. {base, size, 0} is a valid empty arena. Not thread-safe. */
typedef struct moe_arena {
    void *base;
    size_t size, used;
} moe_arena;

/* An allocator that takes from arena, which must outlive all its users. */
MOE_API moe_allocator moe_arena_allocator(moe_arena *arena);

/* ---- streams ------------------------------------------------------------------------------------------------------------ */

/* Reading and writing go through this. read fills up to size bytes and stores how many in *got (0 at the end); write takes all
   size bytes. Both return MOE_OK or an error, usually MOE_ERR_IO. Either may be NULL when it is not needed. */
typedef struct moe_stream {
    void *ctx;
    moe_status (*read)(void *ctx, void *to, size_t size, size_t *got);
    moe_status (*write)(void *ctx, const void *from, size_t size);
} moe_stream;

/* A growing piece of memory that can be written as a stream. {0} is empty. */
typedef struct moe_buffer {
    moe_allocator allocator; /* resize NULL: the standard heap */
    unsigned char *data;     /* owned */
    size_t size, capacity;
} moe_buffer;

/* A stream that appends what is written to buffer; buffer must outlive it. A failed write leaves buffer as it was. */
MOE_API moe_stream moe_buffer_stream(moe_buffer *buffer);
/* Gives the buffer's memory back and makes it empty. NULL is allowed. */
MOE_API void moe_buffer_free(moe_buffer *buffer);

#ifndef MOE_NO_STDIO
/* Reads a whole file into buffer, which must be empty. Errors: MOE_ERR_IO (error says which file and why), MOE_ERR_MEMORY. */
MOE_API moe_status moe_file_read(const char *path, moe_buffer *buffer, moe_error *error);
/* Calls write_contents(ctx, stream) on a new file beside path ("path.tmp0", or the next free number), flushes it and renames it
   over path; when anything fails, path still holds what it held before and the new file is removed. When write_contents itself
   fails, its status comes back, and what it put into error (if it holds the same one) stays; else MOE_ERR_IO. The new file has default permissions;
   a symbolic link at path is replaced, not followed. */
MOE_API moe_status moe_file_replace(const char *path, moe_status (*write_contents)(void *ctx, moe_stream *stream), void *ctx,
                                    moe_error *error);
#endif

/* ---- tensors ------------------------------------------------------------------------------------------------------------- */

/* Room for a tensor's name, its end included. */
enum { MOE_NAME_SIZE = 64 };

/* One named parameter: row-major, shape[0] slowest. data and gradient belong to whoever made the object. */
typedef struct moe_tensor {
    char name[MOE_NAME_SIZE]; /* "router.weight", in a net "2.router.weight" */
    int n_dims;
    size_t shape[MOE_MAX_DIMS];
    size_t count;        /* product of shape */
    unsigned flags;      /* MOE_PARAM_ bits */
    moe_real *data;      /* [count] */
    moe_real *gradient;  /* [count], or NULL */
} moe_tensor;

/* ---- safetensors ---------------------------------------------------------------------------------------------------------- */

/* Element types of the format. */
enum {
    MOE_DTYPE_F64 = 0, MOE_DTYPE_F32, MOE_DTYPE_F16, MOE_DTYPE_BF16, MOE_DTYPE_I64, MOE_DTYPE_I32, MOE_DTYPE_I16, MOE_DTYPE_I8,
    MOE_DTYPE_U64, MOE_DTYPE_U32, MOE_DTYPE_U16, MOE_DTYPE_U8, MOE_DTYPE_BOOL, MOE_DTYPE_COUNT
};

/* The most dimensions of a tensor in a file. */
enum { MOE_FILE_MAX_DIMS = 8 };

/* The most tensors, and the most metadata entries, that a file may have: it bounds the time that a hostile file can take. */
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

/* A safetensors file in memory. Allocates nothing; bytes stay the caller's and must outlive it. Read-only use is thread-safe,
   except that next moves `at`. */
typedef struct moe_file {
    const unsigned char *bytes;
    size_t size;
    size_t header_size;  /* bytes of JSON after the first 8 */
    size_t n_tensors;
    size_t at;           /* private: where next continues */
    size_t metadata_at, metadata_end; /* private: where the object __metadata__ lies; 0, 0: there is none */
    int of_header;       /* private: 1: the bytes end with the header, and element types that are none of MOE_DTYPE_ are let pass */
} moe_file;

/* Checks all of a file: header length, JSON, types, shapes, sizes, offsets that tile the data without overlap or hole, no
   name twice. Errors: MOE_ERR_FORMAT, MOE_ERR_OVERFLOW (a size beyond size_t), MOE_ERR_UNSUPPORTED (an unknown dtype, more than
   MOE_FILE_MAX_DIMS dimensions, too many tensors); error names the tensor and the byte. Stricter than the format in two points: no
   U+0000 in a string, no metadata key twice. On failure *file is untouched. 4 KiB of stack; no recursion. */
MOE_API moe_status moe_file_open(moe_file *file, const void *bytes, size_t size, moe_error *error);
/* The next tensor in the order of the header; MOE_ERR_NOT_FOUND after the last. moe_file_rewind starts over. */
MOE_API moe_status moe_file_next(moe_file *file, moe_file_tensor *tensor);
MOE_API void moe_file_rewind(moe_file *file);
/* The tensor of a name (UTF-8, not escaped); MOE_ERR_NOT_FOUND. Walks the header: O(its length). Thread-safe. */
MOE_API moe_status moe_file_find(const moe_file *file, const char *name, moe_file_tensor *tensor);
/* The value of a key of __metadata__, unescaped to UTF-8 and terminated, into value[room]; *length (may be NULL) gets its length
   without the terminator. MOE_ERR_NOT_FOUND; MOE_ERR_SPACE when room is too small (then *length is still set, so that value NULL,
   room 0 asks for the size). */
MOE_API moe_status moe_file_metadata(const moe_file *file, const char *key, char *value, size_t room, size_t *length);
/* Converts count elements from first on to real numbers (all types; BOOL gives 0 or 1; a F64 too large for float becomes
   infinite). MOE_ERR_SHAPE beyond the end. */
MOE_API moe_status moe_file_values(const moe_file_tensor *tensor, size_t first, size_t count, moe_real *values);
/* The same for integers and BOOL into int64; MOE_ERR_FORMAT for a floating type or an U64 beyond int64. */
MOE_API moe_status moe_file_integers(const moe_file_tensor *tensor, size_t first, size_t count, int64_t *values);

#ifndef MOE_NO_TRAIN
/* One key and value of the file's metadata, terminated UTF-8. */
typedef struct moe_metadata {
    const char *key, *value;
} moe_metadata;

/* Writes a safetensors file: metadata in the given order, then tensors in the given order, F32 (F64 in the double build). The
   same input gives the same bytes. The data section starts at a multiple of 8. Names and keys must be valid UTF-8 and unique, a name
   is not "__metadata__" (MOE_ERR_ARGUMENT); count is the product of shape (MOE_ERR_SHAPE). All is checked before the first write.
   allocator NULL: the standard heap (for the header only). */
MOE_API moe_status moe_file_write(moe_stream *stream, const moe_tensor *tensors, size_t n_tensors, const moe_metadata *metadata,
                                  size_t n_metadata, const moe_allocator *allocator, moe_error *error);
#endif

/* ---- experts -------------------------------------------------------------------------------------------------------------- */

/* Kinds of experts, [out,in] matrices, one block of E in each tensor:
     swiglu      y = down (silu(gate x) * (up x))                        experts.gate, .up [E,f,d], .down [E,o,f]  (Shazeer 2020, GLU variants improve transformer)
       or, with g = min(gate x + b_g, L), u = max(-L, min(up x + b_u, L)),
                 y = down (g sigmoid(alpha g) * (u + offset)) + b_d      and experts.gate_bias, .up_bias [E,f], .down_bias [E,o]  (gpt-oss, 2025)
     mlp         y = W2 act(W1 x + b1) + b2                              experts.fc1.weight [E,f,d], .fc1.bias [E,f], .fc2.weight [E,o,f], .fc2.bias [E,o]
     linear      y = W x + b                                             experts.weight [E,o,d], .bias [E,o]
     factorised  y = down (silu(expand (reduce x)) * (up x))             experts.reduce [E,l,d], .expand [E,f,l], .up [E,f,d], .down [E,o,f] (Lv et al. 2025) */
enum { MOE_EXPERT_SWIGLU = 0, MOE_EXPERT_MLP, MOE_EXPERT_LINEAR, MOE_EXPERT_FACTORISED, MOE_EXPERT_COUNT };

/* A mixture layer. {0} with router.d_model set is a good one: 8 swiglu experts of width 4 d, the 2 best per token. 0 in any field
   means its default, given here in brackets. */
typedef struct moe_layer_config {
    moe_router_config router; /* how tokens find experts; router.d_model is the layer's input width */
    int d_out;                /* o, width of the output [d_model] */
    int expert;               /* MOE_EXPERT_ [swiglu] */
    int d_ff;                 /* f, hidden width of an expert [4 d_model] */
    int d_low;                /* l, rows of reduce [(d_model + 2) / 3] */
    int act;                  /* MOE_ACT_ of mlp experts [relu]; swiglu and factorised always take silu */
    int no_expert_bias;       /* 1: mlp and linear experts have no biases [0] */
    moe_real swiglu_alpha;    /* alpha of swiglu experts, 1e-6 to 1e6 [0: 1] */
    moe_real swiglu_limit;    /* L of swiglu experts, 1e-6 to 1e6 [0: none]; the derivative beyond a limit is 0 */
    moe_real swiglu_offset;   /* what is added to their u, -1e6 to 1e6 [0] */
    int expert_bias;          /* 1: swiglu experts have biases [0] */
    int n_shared;             /* shared experts: one plain swiglu of width n_shared * d_shared that every token passes [0] */
    int d_shared;             /* width of one shared expert [d_ff] */
    int add_input;            /* 1: y = sum w f(x) + (1 - sum w) x, w the weights of the experts that took the token; needs d_out = d_model [0] */
    int shared_sigmoid;       /* 1: the shared expert is multiplied by sigmoid(shared.sigmoid . x) [0] */
    int kernels;              /* MOE_KERNELS_ [auto]; not saved in files */
    const struct moe_transport *transport; /* the processes that share the experts, see "experts on several machines"; not saved in files [NULL: all are here] */
} moe_layer_config;

/* The rows of moe_layer_config, those of its router included; the last has name NULL. Constant, thread-safe. */
MOE_API const moe_field *moe_layer_fields(void);
/* Checks a configuration and writes it to *out (may be NULL) with every default filled in. MOE_ERR_CONFIG: error names field and value. */
MOE_API moe_status moe_layer_check(const moe_layer_config *config, moe_layer_config *out, moe_error *error);
/* Sets *config to {0} plus a preset of moe_presets: router and kind of experts. Set router.d_model and d_ff afterwards. MOE_ERR_NOT_FOUND: no such preset. */
MOE_API moe_status moe_layer_preset(const char *name, moe_layer_config *config, moe_error *error);

/* ---- the mixture layer ----------------------------------------------------------------------------------------------------- */

/* The layer's tensors by place: the router's come first (MOE_ROUTER_WEIGHT, ...). */
enum {
    MOE_EXPERTS_GATE = MOE_ROUTER_SLOTS, /* "experts.gate" [E,f,d] */
    MOE_EXPERTS_UP,                      /* "experts.up" [E,f,d] */
    MOE_EXPERTS_DOWN,                    /* "experts.down" [E,o,f] */
    MOE_EXPERTS_FC1_WEIGHT,              /* "experts.fc1.weight" [E,f,d] */
    MOE_EXPERTS_FC1_BIAS,                /* "experts.fc1.bias" [E,f] */
    MOE_EXPERTS_FC2_WEIGHT,              /* "experts.fc2.weight" [E,o,f] */
    MOE_EXPERTS_FC2_BIAS,                /* "experts.fc2.bias" [E,o] */
    MOE_EXPERTS_WEIGHT,                  /* "experts.weight" [E,o,d] */
    MOE_EXPERTS_BIAS,                    /* "experts.bias" [E,o] */
    MOE_EXPERTS_REDUCE,                  /* "experts.reduce" [E,l,d] */
    MOE_EXPERTS_EXPAND,                  /* "experts.expand" [E,f,l] */
    MOE_EXPERTS_GATE_BIAS,               /* "experts.gate_bias" [E,f] */
    MOE_EXPERTS_UP_BIAS,                 /* "experts.up_bias" [E,f] */
    MOE_EXPERTS_DOWN_BIAS,               /* "experts.down_bias" [E,o] */
    MOE_SHARED_GATE,                     /* "shared.gate" [s,d] */
    MOE_SHARED_UP,                       /* "shared.up" [s,d] */
    MOE_SHARED_DOWN,                     /* "shared.down" [o,s] */
    MOE_SHARED_SIGMOID,                  /* "shared.sigmoid" [d] */
    MOE_LAYER_SLOTS
};

/* A layer: checked configuration, kernels and where its tensors lie. Read-only use is thread-safe. The tensors are either the
   caller's (init, then set tensors[]; constants in flash are fine) or the layer's own (create). */
typedef struct moe_layer {
    moe_layer_config config;  /* with defaults filled in */
    moe_router router;        /* its own tensors[] stay empty: the first MOE_ROUTER_SLOTS of the layer's are used */
    const moe_kernels *kernels;
    uint64_t places;          /* private: bit i is set when the configuration has tensor i */
    const moe_real *tensors[MOE_LAYER_SLOTS]; /* by place; NULL where moe_layer_slot finds none */
    moe_real *gradients[MOE_LAYER_SLOTS];     /* by place; NULL: not wanted */
    const void *packed[MOE_LAYER_SLOTS];      /* by place, set by moe_layer_pack: what inference reads instead of the tensor */
    int packed_type;                          /* MOE_TYPE_ of packed */
    int is_packed;                            /* 1: moe_layer_pack was called */
    moe_real *memory;         /* owned by the layer when create made it, else NULL */
    size_t memory_size;       /* bytes */
    moe_allocator allocator;
} moe_layer;

/* Describes tensor `slot` of a checked configuration. MOE_ERR_NOT_FOUND when this configuration has none there, MOE_ERR_OVERFLOW. */
MOE_API moe_status moe_layer_slot(const moe_layer_config *config, int slot, moe_slot *out);

/* Checks config and makes a layer without tensors and without memory; set layer->tensors (moe_layer_slot tells the shapes). Errors as moe_layer_check;
   MOE_ERR_UNSUPPORTED: these kernels cannot run here; MOE_ERR_OVERFLOW. On failure *layer is untouched. */
MOE_API moe_status moe_layer_init(moe_layer *layer, const moe_layer_config *config, moe_error *error);
/* Checks config and makes a layer that owns its tensors (moe_layer_free) and, with trainable = 1, their gradients, set to 0. The
   tensors start at random from seed: by a moe_rng seeded with it, so draw data from another seed. allocator NULL: the standard heap. Errors as moe_layer_init;
   MOE_ERR_MEMORY. On failure *layer is untouched. With a transport it is collective, and a setting that another rank has otherwise is MOE_ERR_CONFIG. */
MOE_API moe_status moe_layer_create(moe_layer *layer, const moe_layer_config *config, int trainable, uint64_t seed, const moe_allocator *allocator,
                                    moe_error *error);
/* Gives back what create took; {0} and a second call are harmless. */
MOE_API void moe_layer_free(moe_layer *layer);
/* Tensor number i, 0 <= i < count, of the tensors that this layer has, in the order of files; MOE_ERR_NOT_FOUND past the last. The pointers
   in *out are the layer's. */
MOE_API moe_status moe_layer_tensor(const moe_layer *layer, size_t i, moe_tensor *out);
/* The same by name ("router.weight"). */
MOE_API moe_status moe_layer_find(const moe_layer *layer, const char *name, moe_tensor *out);
/* Numbers in all tensors, and the most that one token uses: all of the router and the shared expert, top_k experts (E where a selection has no K, 1 of
   affinity), and what a score reads of all experts. */
MOE_API size_t moe_layer_parameters(const moe_layer *layer, size_t *used_per_token);

/* Packs the weights of all experts, the shared one included, for inference: panels of 16 outputs as moe_pack makes them, read once and in a row by the
   products. MOE_TYPE_REAL keeps every bit of the results. From then on moe_layer_forward reads the packed weights unless call->training or keep = 1; the
   tensors that they stand for (where layer->packed is not NULL) may be set to NULL in layer->tensors and their memory given back. After a
   change of the tensors pack again, and ask for the work size again, which may be another. memory [moe_layer_pack_size] belongs to the caller, stays in use, and may have any alignment (64 is best).
   MOE_ERR_SPACE: size is too small; MOE_ERR_ARGUMENT: a tensor is not set or the type is none; MOE_ERR_OVERFLOW, MOE_ERR_UNSUPPORTED,
   MOE_ERR_NONFINITE (quantised types): as moe_pack. On failure the layer is as before, or, where memory holds the weights that it has packed
   now, no longer packed. layer->is_packed = 0 unpacks a layer that has its tensors; a step of the trainer does that. Not thread-safe beside calls on the same layer. */
MOE_API moe_status moe_layer_pack(moe_layer *layer, int type, void *memory, size_t size, moe_error *error);
/* Bytes that moe_layer_pack needs for a type. MOE_ERR_OVERFLOW, MOE_ERR_ARGUMENT; MOE_ERR_UNSUPPORTED: the build has MOE_NO_QUANT. */
MOE_API moe_status moe_layer_pack_size(const moe_layer *layer, int type, size_t *bytes);

/* How far one expert's packed weights are from its tensors. */
typedef struct moe_quant_error {
    size_t rows;     /* tokens of the calibration that the router sends to the expert; 0: it was measured on others, see moe_layer_quantise */
    moe_real output; /* |f_packed(x) - f(x)| / |f(x)|, over all measured tokens and numbers of the output; 0 where f(x) is 0 */
} moe_quant_error;

/* moe_layer_pack, which changes no more than the weights' precision and so needs no data, and then a report: errors[E] from running each
   expert with its tensors and with the packed weights on the tokens of `calibration` that its router sends to it (quantised types: activations are
   quantised too). An expert that no token visits is measured on the first tokens of the batch instead, at most 64, so that none stays unknown.
   Soft layers are measured on tokens, not on their mixtures, and rows is then N; the shared expert is packed but not measured. calibration is a
   call for inference of at least one token. errors NULL: no report, then calibration and work may be NULL too.
   work [moe_layer_quantise_work_size of n_past + n_tokens]. Errors as of moe_layer_pack and moe_layer_forward; then the layer is as before. */
MOE_API moe_status moe_layer_quantise(moe_layer *layer, int type, void *memory, size_t size, const moe_call *calibration, void *work, size_t work_size,
                                      moe_quant_error *errors, moe_error *error);
/* Bytes of work memory that it takes for so many tokens. MOE_ERR_OVERFLOW, MOE_ERR_ARGUMENT. */
MOE_API moe_status moe_layer_quantise_work_size(const moe_layer *layer, int type, size_t n_tokens, size_t *bytes);

/* What one forward call leaves behind: the routing for reports, and the intermediate values for the way back. It points into the work memory. */
typedef struct moe_layer_pass {
    moe_routing routing;
    /* Private to moe.h. */
    moe_call call;
    const moe_real *x;
    moe_real *node[MOE_NODE_COUNT];       /* [rows, width] per entry of the plan, kept for all experts in training, else reused */
    moe_real *all[MOE_NODE_COUNT];        /* [E,N,width] for scores that read experts */
    unsigned char *quantised[2];          /* rows for quantised weights: of x, of the activation that a stage reads */
    size_t quantised_size[2];             /* bytes of a row */
    moe_real *rows, *d_rows;              /* [N,d] gathered input of one expert, its gradient */
    moe_real *clean;                      /* [N,d] x with zeros for padding */
    moe_real *d_node[MOE_NODE_COUNT], *d_all[MOE_NODE_COUNT];
    moe_real *shared[MOE_NODE_COUNT], *d_shared[MOE_NODE_COUNT], *shared_factor;
    void *route_memory;
    size_t route_size;
    struct moei_ranks *ranks;             /* with a transport */
} moe_layer_pass;

/* Exact bytes of work memory for n_tokens: for forward alone (training = 0) or forward and backward (1); those of n_past + n_tokens are enough for a
   call with n_past. MOE_ERR_OVERFLOW. */
MOE_API moe_status moe_layer_work_size(const moe_layer *layer, size_t n_tokens, int training, size_t *bytes);
/* y_t = sum over e in S_t, ascending, of w_te f_e(x_t) + shared(x_t);  y [N,o] is overwritten, must not overlap x. Padding gets the shared
   expert only. work[work_size] has any alignment and stays in use until backward is done. Allocates nothing. Errors as moe_route. pass may be NULL
   when neither the routing nor backward is wanted. On failure y is unspecified and *pass untouched. An expert that computes infinity or NaN for a token
   is no error: it is in y_t and in no other row of y (soft: in all rows that read the slot). */
MOE_API moe_status moe_layer_forward(const moe_layer *layer, const moe_call *call, moe_real *y, void *work, size_t work_size, moe_layer_pass *pass);

#ifndef MOE_NO_TRAIN
/* The way back of a forward with call->training = 1: dy [N,o] is the gradient of y. Adds to layer->gradients, to dx [N,d] and
   d_router_x [N,d] (either may be NULL; without router_x the router's part goes to dx). The losses of the router take part.
   x, router_x and the tensors are as they were in forward. Padding's rows of x reach no gradient, whatever they hold, but those of a shared expert. */
MOE_API moe_status moe_layer_backward(const moe_layer *layer, const moe_real *dy, moe_real *dx, moe_real *d_router_x, moe_layer_pass *pass);
/* The outputs of all entries of the plan after a forward with call->training or keep = 1, in the plan's order: [offsets[E],o], rows offsets[e].. are expert e's. For
   select = dense without padding that is [E,N,o]. They lie in the work memory. NULL: not such a pass, or soft, whose rows are mixtures, or
   with a transport. */
MOE_API const moe_real *moe_layer_expert_outputs(const moe_layer *layer, const moe_layer_pass *pass);
/* The way back for a loss that reads the experts one by one instead of y (section "the classical mixture"): d_outputs [offsets[E],o] and d_weights
   [offsets[E]] are its gradients by the outputs and by the weights of the entries. Otherwise as moe_layer_backward. MOE_ERR_STATE as there and for
   soft; MOE_ERR_UNSUPPORTED: n_shared, add_input or apply_to = input, which such a loss does not see. */
MOE_API moe_status moe_layer_backward_experts(const moe_layer *layer, const moe_real *d_outputs, const moe_real *d_weights, moe_real *dx,
                                              moe_real *d_router_x, moe_layer_pass *pass);
/* moe_router_observe and moe_router_advance on the layer's own tensors: after each training pass, and once per step of the optimiser. moe_trainer_step
   calls them. MOE_ERR_STATE: the layer was not made with trainable = 1. A layer without state is left as it is. */
MOE_API moe_status moe_layer_observe(moe_layer *layer, const moe_layer_pass *pass);
MOE_API moe_status moe_layer_advance(moe_layer *layer);
/* Writes configuration and tensors to a safetensors file; moe_layer_load reads it into a new layer with tensors of its own. A failed save
   leaves the old file, a failed load *layer, as it was. Errors as moe_file_write; a file's also as moe_file_replace. */
MOE_API moe_status moe_layer_write(const moe_layer *layer, moe_stream *stream, moe_error *error);
#ifndef MOE_NO_STDIO
MOE_API moe_status moe_layer_save(const moe_layer *layer, const char *path, moe_error *error);
#endif
#endif
/* Makes a layer from a file in memory; bytes are not needed afterwards. trainable and allocator as in create. Errors as moe_net_read, a file's also as
   moe_file_read. */
MOE_API moe_status moe_layer_read(moe_layer *layer, const void *bytes, size_t size, int trainable, const moe_allocator *allocator, moe_error *error);
#ifndef MOE_NO_STDIO
MOE_API moe_status moe_layer_load(moe_layer *layer, const char *path, int trainable, const moe_allocator *allocator, moe_error *error);
#endif

/* ---- experts on several machines -------------------------------------------------------------------------------------------------
   Processes, called ranks 0..R-1 as in MPI, share the experts of a layer: rank r holds experts moe_rank_part(E, r, R) and no others. Every rank
   brings its own tokens; a call takes them together as one batch, those of rank 0 first. It routes them, sends each token's row to its experts' home,
   computes there, and sends the results back:
     plan -> counts -> rows of x -> experts at home -> rows of f_e(x) -> y          backward: rows of w dy -> experts at home -> rows of dx
   What comes out is what one process would make of the whole batch (a moe_call of all tokens): y, dx and the experts' gradients have its bits with the
   plain C kernels (other kernels: within rounding), capacity, losses, metrics and the routers' state are those of the whole batch. The
   gradients of what every rank holds (router, shared expert) are the part of the rank's own tokens; moe_transport.sum over all ranks completes them
   (the trainer does it), so they agree within rounding. So does dx of routers that read experts (trait needs_all_experts), and their experts' gradients.
   Calls with a transport are collective: all ranks make the same calls in the same order, with tokens or without, and the same configuration. Where
   one rank fails before it sends, the others end the call too, with MOE_ERR_PEER, and all can go on. MOE_ERR_TRANSPORT: a function of the transport
   failed; what the ranks have agreed upon is lost, end them all. The library moves no byte by itself: examples/mpi.c has the three functions for MPI. */

/* Rows on their way: rank r gets send_counts[r] rows from row send_at[r] of send on, and what it sends comes to row receive_at[r] of receive on. */
typedef struct moe_exchange {
    size_t row_bytes;             /* of one row; rows are bytes to the transport */
    const void *send;             /* stays unchanged until the exchange has ended */
    const size_t *send_counts;    /* [R]; what a rank sends to itself is there too */
    const size_t *send_at;        /* [R]; several ranks may be sent the same rows */
    void *receive;                /* apart from send */
    const size_t *receive_counts; /* [R] what the other side sends, known beforehand */
    const size_t *receive_at;     /* [R] */
    int slot;                     /* 0..MOE_EXCHANGES-1, one for each exchange that is under way: the place of the transport's requests */
} moe_exchange;

/* The most exchanges under way at a time; the two parts of one. */
enum { MOE_EXCHANGES = 2, MOE_EXCHANGE_BEGIN = 1, MOE_EXCHANGE_END = 2 };

/* What a rank has sent; the library adds, the caller makes it {0}. The arrays are the caller's, [R] or NULL. */
typedef struct moe_traffic {
    uint64_t *rows;       /* token rows for each rank: x, w dy and what comes back; the rank itself included, where nothing travels */
    uint64_t *bytes;      /* all bytes sent to each rank: rows, what routers gather, counts; with two_level, to the next rank on their way; for the rank itself 0 */
    uint64_t tokens;      /* tokens routed */
    uint64_t pairs;       /* tokens times experts that took them */
    uint64_t pairs_away;  /* those whose expert lives on another rank */
    uint64_t pairs_far;   /* those whose expert lives on another node */
    uint64_t exchanges;   /* calls of rows with MOE_EXCHANGE_BEGIN */
    uint64_t messages;    /* in these, other ranks that are sent at least a row */
    uint64_t messages_far; /* those of them on another node */
} moe_traffic;

/* How ranks reach each other: three functions of the caller's, which return MOE_OK or MOE_ERR_TRANSPORT. Set the fields, then call moe_transport_begin. It must
   outlive the layers and nets that are configured with it and stay where it is. One thread at a time. */
typedef struct moe_transport {
    void *ctx;               /* the caller's, handed to every function */
    int rank, n_ranks;       /* r and R, 0 <= r < R */
    int ranks_per_node;      /* consecutive ranks that share a machine [R]; divides R */
    int two_level;           /* 1: rows for another node go through the rank of the own node that has the place of their goal there: fewer, longer messages [0] */
    int chunks;              /* the experts of a home are computed in so many parts, and the rows of one part travel while another is computed [1] */
    /* receive[r n ..] = what rank r has at send[own rank * n ..]: n numbers from every rank to every rank, send and receive [R,n]. */
    moe_status (*counts)(void *ctx, size_t n, const uint64_t *send, uint64_t *receive);
    /* stage MOE_EXCHANGE_BEGIN starts moving rows, MOE_EXCHANGE_END (the same exchange, the same arrays) returns when they are there; both bits: at once. A transport
       that cannot do otherwise moves everything at BEGIN. */
    moe_status (*rows)(void *ctx, int stage, const moe_exchange *exchange);
    /* values[i] = the sum over all ranks of values[i], the same bits on all of them. */
    moe_status (*sum)(void *ctx, size_t n, moe_real *values);
    moe_traffic *traffic;    /* counted there, or NULL */
    const moe_allocator *allocator; /* of 128 bytes for each rank [the standard heap] */
    const struct moei_ways *ways; /* private, as what follows: set by moe_transport_begin */
    uint64_t *memory;        /* [2,R,MOEI_WORDS] */
    size_t memory_size;
} moe_transport;

/* Part r of R of n things: *count of them from *first on. Parts are consecutive and differ by at most one in length. r in 0..R-1. Thread-safe. */
MOE_API void moe_rank_part(size_t n, int rank, int n_ranks, size_t *first, size_t *count);
/* Checks the transport and makes it ready. Collective. MOE_ERR_CONFIG: a field is out of range, or another rank has another value there, or another
   version or MOE_REAL (error names field and rank); MOE_ERR_ARGUMENT: a function is NULL; MOE_ERR_MEMORY; MOE_ERR_TRANSPORT. */
MOE_API moe_status moe_transport_begin(moe_transport *transport, moe_error *error);
/* Gives back what begin took; {0} and a second call are harmless. Not collective. */
MOE_API void moe_transport_end(moe_transport *transport);
/* Whether all ranks have the same n numbers: MOE_OK on all, or MOE_ERR_CONFIG on all. *rank and *i (may be NULL) name the first rank that differs from this
   one and the first of its numbers. For settings of the caller's own. Collective. */
MOE_API moe_status moe_transport_agree(const moe_transport *transport, size_t n, const uint64_t *values, int *rank, size_t *i);
/* Ends a stretch of work in which one rank may have failed: MOE_OK where all ranks say so, else on each its own status, or MOE_ERR_PEER. Collective. */
MOE_API moe_status moe_transport_status(const moe_transport *transport, moe_status status);

/* ---- published layers: the mixtures of models as their authors ship them ------------------------------------------------------ */

/* Bytes that are read at places, so that of a file of gigabytes only the header and one layer's tensors are fetched. */
typedef struct moe_source {
    const char *name; /* what the file is called, without folders; an index names its files so, and messages do. NULL: nothing */
    uint64_t size;
    void *ctx;
    moe_status (*read_at)(void *ctx, uint64_t at, void *to, size_t size); /* size bytes from `at` on; is asked for nothing beyond the end */
} moe_source;

/* A source of bytes in memory, which stay the caller's and must outlive it. */
MOE_API moe_source moe_memory_source(const char *name, const void *bytes, size_t size);

/* Makes a layer from a file that another program wrote, with tensors of its own (moe_layer_free; no gradients: moe_layer_save and moe_layer_load with
   trainable = 1 add them). What it computes is what the model's own program computes, in F32. The families, by the names of their presets:
     mixtral, phi35_moe, minimax_m2     gate.weight, experts.J.w1, .w3, .w2.weight                             (block_sparse_moe)
     qwen2_moe, qwen3_next, qwen3_moe, olmoe, deepseek_v2, deepseek_v3, glm4_moe, dots1
                                        gate.weight, experts.J.gate_proj, .up_proj, .down_proj.weight; shared_expert(s).*, shared_expert_gate.weight,
                                        gate.e_score_correction_bias
       and all of these also fused, experts.gate_up_proj [E,2f,d], experts.down_proj [E,d,f], as transformers 5 holds them
     llama4                             router.weight, experts.gate_up_proj [E,d,2f], experts.down_proj [E,f,d], shared_expert.*
     gpt_oss                            router.weight, .bias, experts.gate_up_proj [E,d,2f] with gate and up in turn, down_proj [E,f,d], biases
     granite_moe                        router.layer.weight, input_linear.weight [E,2f,d], output_linear.weight [E,d,f]
   and GGUF (versions 2 and 3, little-endian): ffn_gate_inp, ffn_{gate,up,down}_exps, ffn_gate_up_exps, ffn_{gate,up,down}_shexp, exp_probs_b, their
   biases, and ffn_{gate,up,down}.J of older files. Numbers are F32, F16, BF16 or F64, in GGUF also Q8_0 and Q4_0.
     sources  sources[0] is a safetensors file, an index of several (a text with weight_map) or a GGUF file; the others, found by their names, are the
              files that the index names, and config.json
     prefix   what the layer's names begin with: "model.layers.3.mlp", in GGUF "blk.3". A last part mlp, block_sparse_moe or feed_forward may stand for
              any of these, or be left out
     preset   a name of moe_presets, or NULL: the family that model_type of config.json (GGUF: general.architecture) names, or the one that the tensors'
              names show. The router's settings are those that config.json (GGUF: its metadata) gives and that family reads; for the rest with preset
              = NULL and a model_type what the model's own program assumes, else the preset's. Widths and E come from the tensors. Losses, noise and rates
              of training are not read
   deepseek_v2 with norm_topk_prob does not scale, as in its authors' program. Errors: MOE_ERR_NOT_FOUND (no such layer: error lists those of the file; a tensor
   that is missing; no such preset), MOE_ERR_SHAPE, MOE_ERR_UNSUPPORTED (an element type, a tensor that the family does not have, settings that change the
   meaning, as hidden_act and quantization_config, by name), MOE_ERR_FORMAT, MOE_ERR_CONFIG (settings and sizes clash), MOE_ERR_IO, MOE_ERR_MEMORY, MOE_ERR_OVERFLOW.
   Memory while it reads: headers and texts (an index and config.json as a whole), about 250 bytes for each tensor of the layer, and the layer, which is bounded by its
   tensors in the file. 24 KiB of stack. On failure *layer is untouched. allocator NULL: the standard heap. Thread-safe with sources of its own. */
MOE_API moe_status moe_read_published(moe_layer *layer, const moe_source *sources, size_t n_sources, const char *prefix, const char *preset,
                                      const moe_allocator *allocator, moe_error *error);
#ifndef MOE_NO_STDIO
/* The same from files. path: a .safetensors or .gguf file, an .index.json, or a folder that holds model.safetensors.index.json or model.safetensors;
   config.json, if there is one, and an index's files lie beside it. */
MOE_API moe_status moe_load_layer(moe_layer *layer, const char *path, const char *prefix, const char *preset, const moe_allocator *allocator, moe_error *error);
#endif
#ifndef MOE_NO_TRAIN
/* Writes a layer as a safetensors file with the names, shapes and order of elements that a family (above; its name) ships, one file, metadata
   {"format":"pt"}. dtype: MOE_DTYPE_F64, _F32, _F16 or _BF16, rounded to nearest even. The layer's settings are not in the file, as with the models' own: their place
   is config.json, which is not written. State of training is left out. MOE_ERR_CONFIG: the layer has a tensor that the family does not have, or the other
   way round, or d_out is not d_model; MOE_ERR_ARGUMENT: dtype, a prefix that is not UTF-8 or longer than 180 bytes, a tensor that is not set;
   MOE_ERR_NOT_FOUND: no such family; MOE_ERR_MEMORY, MOE_ERR_OVERFLOW; else what the stream returns. */
MOE_API moe_status moe_write_published(const moe_layer *layer, moe_stream *stream, const char *prefix, const char *family, int dtype, moe_error *error);
#ifndef MOE_NO_STDIO
/* moe_write_published to a file, by moe_file_replace: a failed save leaves the old file as it was. Errors as of both. */
MOE_API moe_status moe_save_published(const moe_layer *layer, const char *path, const char *prefix, const char *family, int dtype, moe_error *error);
#endif
#endif

/* ---- nets: a list of modules, built by calls ------------------------------------------------------------------------------- */

/* Modules; d is the width that arrives.
     linear      y = W x + b                    "I.weight" [o,d], "I.bias" [o]      (I: the module's number, from 0)
     activation  y = act(x)
     layer_norm  y = (x - mean)/sqrt(var + 1e-5) * g + b    "I.weight" [d], "I.bias" [d]
     mixture     a moe_layer                    "I.router.weight", "I.experts.gate", ...
     residual    y = x + what entered the module `span` places before   (span = 1: around the last module)
     embedding   y_t = W[token_ids[t]]          "I.weight" [V,d]                    the first module of a net with d_in = 0, and no other
     positions   y_t = x_t + P[place of t]      "I.weight" [L,d]                    a token's place in its sequence, from 0, padding counted
     attention   see moe_attention_config       "I.query", "I.key", "I.value" [h w,d], "I.output" [d,h w]
     rms_norm    y = x / sqrt(mean x^2 + 1e-5) * g   "I.weight" [d]                 (Zhang, Sennrich 2019, Root mean square layer normalization)
     dropout     y = x m / (1 - rate) in training, m = 0 with probability rate, else 1; else y = x (Srivastava et al. 2014, Dropout)
     feed_forward  an expert that every token passes   "I.experts.gate" [1,f,d], ...  as in moe_layer_config, without a router
     tied        y = E x + b, E the weight [V,d] of the net's embedding   "I.bias" [V] */
enum {
    MOE_MODULE_LINEAR = 0, MOE_MODULE_ACTIVATION, MOE_MODULE_LAYER_NORM, MOE_MODULE_MIXTURE, MOE_MODULE_RESIDUAL, MOE_MODULE_EMBEDDING, MOE_MODULE_POSITIONS,
    MOE_MODULE_ATTENTION, MOE_MODULE_RMS_NORM, MOE_MODULE_DROPOUT, MOE_MODULE_FEED_FORWARD, MOE_MODULE_TIED, MOE_MODULE_COUNT
};
enum { MOE_NET_MAX_MODULES = 4096 };

/* Multi-head self-attention within each sequence (Vaswani et al. 2017, Attention is all you need). With q, k, v = W x, and w the width of a head,
     A_h[i,j] = softmax over j of q_hi . k_hj / sqrt(w)        y_i = output . (sum_j A_0[i,j] v_0j, sum_j A_1[i,j] v_1j, ...)
   where j runs over the real tokens of i's sequence, j <= i unless full. Padding gets y = 0. {0} is a good one: causal. 0 means the value in brackets. */
typedef struct moe_attention_config {
    int heads;            /* h [the largest divisor of d up to d/32, at least 1] */
    int d_head;           /* w [d / heads, which must be whole] */
    int full;             /* 1: a token sees the later tokens of its sequence too [0: causal] */
    int rotary;           /* 1: the halves of q and k are turned against each other by angles place / base^(2 i / w) (Su et al. 2021, RoFormer); w is even [0] */
    moe_real rotary_base; /* [10000] */
} moe_attention_config;

/* The tensors of modules that are no moe_layer, by place. */
enum {
    MOE_MODULE_WEIGHT = 0, MOE_MODULE_BIAS = 1,
    MOE_MODULE_QUERY = 0, MOE_MODULE_KEY = 1, MOE_MODULE_VALUE = 2, MOE_MODULE_OUTPUT = 3, /* attention */
    MOE_MODULE_SLOTS = 4
};

/* One module of a net; see the table above. Only the fields of its kind are set. */
typedef struct moe_module {
    int kind;        /* MOE_MODULE_ */
    int d_in, d_out; /* widths */
    int act;         /* activation: MOE_ACT_ */
    int span;        /* residual */
    int n_rows;      /* embedding: V; positions: L */
    moe_real rate;   /* dropout */
    moe_attention_config attention; /* with defaults filled in */
    moe_layer layer; /* mixture and feed_forward; its tensors lie in the net's memory */
    moe_real *tensors[MOE_MODULE_SLOTS];   /* the other kinds, by place, in the net's memory; tied: MOE_MODULE_WEIGHT is the embedding's */
    moe_real *gradients[MOE_MODULE_SLOTS]; /* by place; NULL: not built trainable */
    size_t first_tensor; /* private: where its tensors begin in the net's list */
} moe_module;

/* A net. Made by init, the module calls and build, or by load; owns its tensors. After build the list of modules is fixed.
   Inference on one net is thread-safe with work memory per thread; training is not. The struct may be moved, but not while a
   trainer points to it; a copy shares everything and must not be freed as well. */
typedef struct moe_net {
    int d_in, d_out;
    size_t n_modules;
    moe_module *modules;  /* owned */
    size_t n_tensors;
    moe_tensor *tensors;  /* owned: every parameter by name, in the order of files; filled by build */
    int kernels_wanted;   /* MOE_KERNELS_ */
    const moe_kernels *kernels;
    const moe_transport *transport; /* the processes that share the net, see "nets on several machines": the caller's, set after init and before the
                                       modules [NULL: it is here alone] */
    moe_allocator allocator;
    moe_real *memory;     /* owned: the tensors' values, then their gradients */
    size_t memory_size;   /* bytes */
    int built, trainable;
    moe_error error;      /* the first module call that failed; build returns it again */
} moe_net;

/* An empty net for inputs of width d_in, 1..MOE_MAX_WIDTH, or 0: it reads token ids, and its first module is an embedding. kernels: MOE_KERNELS_, 0 = the
   best there is. allocator NULL: the standard heap. Whatever *net held is overwritten, not freed. On failure (MOE_ERR_CONFIG, MOE_ERR_UNSUPPORTED: these kernels cannot run here,
   MOE_ERR_ARGUMENT: no heap) *net is empty and remembers the failure in net->error, as module calls do. */
MOE_API moe_status moe_net_init(moe_net *net, int d_in, int kernels, const moe_allocator *allocator);
/* y = W x + b, d_out wide (1..MOE_MAX_WIDTH). This and the next calls, up to moe_net_tied, append one module each. On failure (MOE_ERR_CONFIG, MOE_ERR_MEMORY,
   MOE_ERR_OVERFLOW) the list stays as it was; net->error remembers the first failure, and later calls only return its code: so a
   chain of calls needs one check, that of build. After build they return MOE_ERR_STATE and change nothing. */
MOE_API moe_status moe_net_linear(moe_net *net, int d_out);
/* y = act(x), act one of MOE_ACT_. */
MOE_API moe_status moe_net_activation(moe_net *net, int act);
/* y = (x - mean)/sqrt(var + 1e-5) * g + b, each row by itself. */
MOE_API moe_status moe_net_layer_norm(moe_net *net);
/* A mixture layer. config->router.d_model may be 0: the width that arrives. config->kernels 0: the net's. Adaptive clustering takes its clusters from the
   mixture before it in the net: MOE_ERR_CONFIG when there is none, when that one has more experts, or (modes paper, running) another width. */
MOE_API moe_status moe_net_mixture(moe_net *net, const moe_layer_config *config);
/* y = x + what entered the module `span` places before, 1..modules so far; both must be equally wide. */
MOE_API moe_status moe_net_residual(moe_net *net, int span);
/* A row [d] per token id 0..vocabulary-1 (call.token_ids). Only as the first module of a net with d_in = 0. Starts normal with spread 1/sqrt(d). */
MOE_API moe_status moe_net_embedding(moe_net *net, int vocabulary, int d);
/* Adds a learned row per place in the sequence, which starts as those of an embedding. A sequence longer than `most` tokens is refused by forward:
   MOE_ERR_ARGUMENT. */
MOE_API moe_status moe_net_positions(moe_net *net, int most);
/* Attention. config NULL: {0}. Mixtures behind it whose router refines by attention read its matrices A, its heads' outputs o_hj = h output_h v_hj (h the
   number of heads, output_h the columns of `output` for one) and its output y, up to the next attention: their `heads` may be 0, their d_model must be
   the attention's width. These arrays take heads N (N + d) numbers of work memory, twice that in training. A mixture that refines (similarity or
   attention) behind causal attention refines causally: its router.causal becomes 1. */
MOE_API moe_status moe_net_attention(moe_net *net, const moe_attention_config *config);
/* y = x / sqrt(mean x^2 + 1e-5) * g, each row by itself. */
MOE_API moe_status moe_net_rms_norm(moe_net *net);
/* rate in [0,1); draws from call.rng in training, which must then be there unless rate is 0. */
MOE_API moe_status moe_net_dropout(moe_net *net, moe_real rate);
/* config: expert, d_ff, d_low, act, no_expert_bias, swiglu_..., expert_bias are read, all else must be 0; NULL: {0}, a swiglu of width 4 d. */
MOE_API moe_status moe_net_feed_forward(moe_net *net, const moe_layer_config *config);
/* Logits by the embedding's own rows (weight tying; Press, Wolf 2017, Using the output embedding to improve language models). The net begins with an
   embedding as wide as what arrives. */
MOE_API moe_status moe_net_tied(moe_net *net);
/* Registers the names of all tensors, allocates them (and, with trainable = 1, gradients set to 0), and starts them at random from seed:
   the same seed gives the same bits on every machine. A linear weight starts normal with spread 1/sqrt(d_in), sqrt(2) times that before
   relu, silu or gelu; biases 0, gains 1; a mixture as moe_layer_create. Errors: that of the first failed call; MOE_ERR_CONFIG (no
   modules; a router that cannot learn: moe_router_check_training); MOE_ERR_STATE (built already); MOE_ERR_MEMORY, MOE_ERR_OVERFLOW.
   After a failure the net is as it was and build may be tried again. */
MOE_API moe_status moe_net_build(moe_net *net, int trainable, uint64_t seed, moe_error *error);
/* Gives everything back and makes *net {0}; {0} and NULL are harmless. */
MOE_API void moe_net_free(moe_net *net);
/* The tensor of a name ("2.router.weight"), or NULL (also before build). It belongs to the net; its values may be changed. */
MOE_API moe_tensor *moe_net_find(const moe_net *net, const char *name);
/* Numbers in all tensors, and those that one token uses (may be NULL), as moe_layer_parameters counts: one row of an embedding or of positions, all of
   it for tied. 0 before build. */
MOE_API size_t moe_net_parameters(const moe_net *net, size_t *used_per_token);

/* What one forward call leaves behind; points into the work memory, which must stay until backward and reports are done. */
typedef struct moe_net_pass {
    size_t n_tokens;
    int training;      /* as in the call */
    const moe_real *y; /* [N,d_out] the net's output */
    /* Private to moe.h. */
    moe_call call;
    size_t past, most; /* decoding: tokens before those of the call, room of the cache (else 0) */
    size_t first, total; /* tokens of the ranks before this one, and of all */
    struct moe_module_pass *modules;
    void *scratch;
    moe_real *d_x;
} moe_net_pass;

/* Exact bytes of work memory for n_tokens: every module keeps its output (so residuals and reports may look back), and with training = 1
   its gradient. Never less for more tokens. MOE_ERR_STATE before build, MOE_ERR_OVERFLOW. */
MOE_API moe_status moe_net_work_size(const moe_net *net, size_t n_tokens, int training, size_t *bytes);
/* Runs all modules on call->x [N,d_in], or with d_in = 0 on call->token_ids [N], each below the embedding's V; pass->y is the output, in
   work[work_size] (any alignment). Everything in call but x reaches every mixture layer as it is: mask, sequences, rng, training, ...; attention
   and positions follow mask and sequences too. router_x and nodes must be NULL, n_past 0; attention_* too when every router that reads them has an
   attention before it. given and teacher hold those of all mixture layers (soft ones have none) one after another. Padding gets y = 0 from attention,
   and passes the other modules but mixtures like any row. Allocates nothing. Errors: MOE_ERR_STATE before build, MOE_ERR_SPACE,
   MOE_ERR_ARGUMENT, else as moe_route. On failure *pass is untouched. Thread-safe for different work.
   x may hold infinities and NaN: mixtures and feed_forwards (these in padding too) end the call with MOE_ERR_NONFINITE, in the other modules they stay in
   their token's row, and attention takes them to the tokens that see it, to the bit no others. */
MOE_API moe_status moe_net_forward(const moe_net *net, const moe_call *call, void *work, size_t work_size, moe_net_pass *pass);
/* Whether the net can decode token by token: no attention is full, and all mixture layers pass moe_router_check_decoding. MOE_ERR_UNSUPPORTED: error
   names the first module that cannot. */
MOE_API moe_status moe_net_check_decoding(const moe_net *net, moe_error *error);
/* The routing of module i in a pass, or NULL when module i is not a mixture or not there. */
MOE_API const moe_routing *moe_net_routing(const moe_net *net, const moe_net_pass *pass, size_t i);

/* ---- decoding: a sequence token by token ------------------------------------------------------------------------------------ */

/* What decoding keeps of one sequence's earlier tokens: keys and values of every attention, and what causal refining reads. Lies in the caller's
   memory. n_tokens may be lowered to go back to an earlier place, 0 begins a new sequence. One thread at a time. After a change of the net's
   tensors what it holds is of the old ones. */
typedef struct moe_cache {
    const moe_net *net;  /* the caller's, must outlive it */
    size_t n_tokens;     /* tokens so far: the place of the next one */
    size_t most;         /* room for so many */
    /* Private to moe.h. */
    void *memory;
    size_t size;
} moe_cache;

/* Exact bytes of a cache for sequences of up to most tokens. MOE_ERR_STATE before build, MOE_ERR_OVERFLOW. */
MOE_API moe_status moe_net_cache_size(const moe_net *net, size_t most, size_t *bytes);
/* Makes an empty cache in memory[size] (any alignment). MOE_ERR_UNSUPPORTED: the net cannot decode, as moe_net_check_decoding says; MOE_ERR_SPACE. */
MOE_API moe_status moe_net_cache_init(moe_cache *cache, const moe_net *net, size_t most, void *memory, size_t size, moe_error *error);
/* Exact bytes of work memory for moe_net_decode with at most n_tokens new tokens in a cache for `most`; more tokens than that count as most.
   MOE_ERR_STATE before build, MOE_ERR_OVERFLOW. */
MOE_API moe_status moe_net_decode_work_size(const moe_net *net, size_t most, size_t n_tokens, size_t *bytes);
/* Runs the call's tokens as the next ones of the sequence; pass->y [N,d_out] is what moe_net_forward on the whole sequence gives for them: the same bits
   for the same build and kernels. One token or a whole prompt at once. call: x or token_ids, n_tokens; training, keep, sequences, mask, n_past and the
   past_ arrays must be 0. Adds n_tokens to cache->n_tokens. MOE_ERR_SPACE: no room in the cache or in work; errors of moe_net_forward. On failure the
   cache is as it was. */
MOE_API moe_status moe_net_decode(const moe_net *net, moe_cache *cache, const moe_call *call, void *work, size_t work_size, moe_net_pass *pass);

/* How the next token is chosen. {0}: drawn from softmax(logits). */
typedef struct moe_sampling {
    int greedy;           /* 1: the largest logit, the first of equals; nothing is drawn [0] */
    moe_real temperature; /* logits are divided by it, 1e-6 to 1e6 [1] */
    int top_k;            /* only the k largest stay [0: all] */
    moe_real top_p;       /* of these, whose probabilities now sum to 1, the most probable until their sum reaches p, the crossing one included
                             (Holtzman et al. 2020, The curious case of neural text degeneration) [1] */
} moe_sampling;

/* *token = one of 0..n-1 by logits [n]. p [n] receives the probabilities it was drawn from (after greedy, 1 at the token); order [n] is room to
   work. Of equal logits the first ones stay. how NULL: {0}. Takes one draw of rng (may be NULL for greedy). MOE_ERR_ARGUMENT: NULL, n = 0 or above
   INT32_MAX, rng missing; MOE_ERR_CONFIG: a field out of range; MOE_ERR_NONFINITE: a logit. On failure nothing has changed. Allocates nothing. */
MOE_API moe_status moe_sample(const moe_sampling *how, size_t n, const moe_real *logits, moe_rng *rng, moe_real *p, int32_t *order, int32_t *token,
                              moe_error *error);

#ifndef MOE_NO_TRAIN
/* Adds the gradients of sum(y * dy), dy [N,d_out], and of all router losses to the tensors' gradients, and that of x to dx [N,d_in] (may be
   NULL; not touched with d_in = 0). The pass must come from a forward with call->training = 1 on the same net, whose tensors and x are as they were then; one
   backward per forward. MOE_ERR_STATE otherwise, or when the net was not built trainable. */
MOE_API moe_status moe_net_backward(const moe_net *net, moe_net_pass *pass, const moe_real *dy, moe_real *dx);
/* moe_layer_observe and moe_layer_advance of all mixture layers. MOE_ERR_STATE: not built with trainable = 1, or the pass is not one of training. */
MOE_API moe_status moe_net_observe(moe_net *net, const moe_net_pass *pass);
MOE_API moe_status moe_net_advance(moe_net *net);
/* Sets all gradients to 0. */
MOE_API void moe_net_zero_gradients(moe_net *net);

/* ---- training ------------------------------------------------------------------------------------------------------------- */

/* What is minimised: the mean over samples of -log softmax(y)[label], or of sum_j (y_j - target_j)^2 / 2. The others are those of the classical mixture
   (moe_mixture_loss): the net's last module is then a mixture of all experts, select = dense and weight = raw, whose outputs are the answers. So it
   is too where its expert_temperature is set: its experts learn with p at that temperature, its gate with p (dual temperature). */
enum {
    MOE_CRITERION_CROSS_ENTROPY = 0, MOE_CRITERION_SQUARED_ERROR, MOE_CRITERION_EXPECTATION, MOE_CRITERION_STOCHASTIC,
    MOE_CRITERION_STOCHASTIC_SQUARED, MOE_CRITERION_JACOBS, MOE_CRITERION_JACOBS_SQUARED, MOE_CRITERION_COUNT
};

/* Mean over the labelled rows of y [n,classes] of -log softmax(y)[label]; dy [n,classes] (may be NULL, must not be y) receives its gradient. Labels
   lie in 0..classes-1 (not checked here), or are negative: such a row has none, and gets dy = 0. 0 without labelled rows. NaN or +inf in a row that
   counts makes the loss and that row of dy infinite or NaN, -inf at its label the loss alone. */
MOE_API moe_real moe_cross_entropy(size_t n, size_t classes, const moe_real *y, const int32_t *labels, moe_real *dy);
/* Mean over n rows of sum_j (y_j - target_j)^2 / 2, y and targets [n,width]; dy [n,width] (may be NULL or y) receives its gradient, place by place. The
   loss is infinite where a square overflows. */
MOE_API moe_real moe_squared_error(size_t n, size_t width, const moe_real *y, const moe_real *targets, moe_real *dy);

/* Mean over n rows of (KL(p || q) + KL(q || p)) / 2 between p = softmax(a) and q = softmax(b), a and b [n,classes]: how far two passes with different random
   choices disagree (Zuo et al. 2022, THOR). da and db (may be NULL) receive the gradients. 0 for n = 0. Logits up to 1e30 in size give finite
   results; one that is infinite or NaN gives NaN, -inf too. */
MOE_API moe_real moe_consistency_loss(size_t n, size_t classes, const moe_real *a, const moe_real *b, moe_real *da, moe_real *db);

/* adamw: Loshchilov, Hutter 2019, Decoupled weight decay regularization. sgd: v = momentum v + g, w -= rate v, decay added to g. */
enum { MOE_OPTIMIZER_ADAMW = 0, MOE_OPTIMIZER_SGD, MOE_OPTIMIZER_COUNT };

/* Samples; all arrays are the caller's. */
typedef struct moe_data {
    size_t n;                /* samples */
    const moe_real *x;       /* [n,d_in] */
    const int32_t *labels;   /* [n] for cross-entropy; negative: a row without a label, which only moe_mixture_loss does not take */
    const moe_real *targets; /* [n,d_out] for squared error */
    const moe_call *call;    /* moe_trainer_step: what else routers read (token_ids, sequences, given, teacher, attention_weights, ...), for these n rows;
                                its n_tokens, x, training and rng are not used. NULL: nothing. moe_fit and moe_evaluate take none */
    const int32_t *token_ids; /* [n] for nets with d_in = 0, which read no x, and for routers that hash them; those of call count before */
    size_t length;           /* samples stand in sequences of this length, one after another; n is a multiple of it. moe_fit and moe_evaluate then cut and
                                shuffle whole sequences, and routers see them unless call has others. [0: samples are cut and shuffled one by one, what is
                                passed at once is one sequence. Nets with attention or positions then need it in moe_fit and moe_evaluate] */
} moe_data;

/* How good a net is on some samples. */
typedef struct moe_evaluation {
    size_t n;          /* samples that count: those with a label */
    moe_real loss;     /* mean of the criterion; exp(loss) is the perplexity of a language model */
    moe_real accuracy; /* share of samples whose largest output is their label; 0 for squared error */
} moe_evaluation;

/* Handed to the progress callback after every step of the optimiser. */
typedef struct moe_progress {
    int epoch, epochs;          /* from 1 */
    size_t step, steps;         /* from 1, within the epoch */
    moe_real loss;              /* mean criterion of this epoch so far */
    moe_real router_loss;       /* sum of the router losses, mean of this epoch so far */
    moe_real gradient_norm;     /* of this step, before clipping */
    int epoch_ended;            /* 1 after the last step of an epoch */
    moe_evaluation test;        /* filled in at the end of an epoch and every evaluate_every steps, if there is a test set; n = 0: none */
    moe_real rate;              /* of this step */
    uint64_t total_step, total_steps; /* over all epochs, from 1; those of a resumed training included */
    uint64_t samples;           /* seen in this call of moe_fit: with a clock, tokens per second and time left */
} moe_progress;

/* The rate of step s = 0, 1, ... of T = total_steps, of which W = warmup, with f = final_rate:
     rate (s + 1) / (W + 1) for s < W, then rate (f + (1 - f) g(a)), a = (s - W) / (T - 1 - W) up to 1, where it stays
     cosine  g(a) = (1 + cos(pi a)) / 2           linear  g(a) = 1 - a */
enum { MOE_SCHEDULE_COSINE = 0, MOE_SCHEDULE_LINEAR, MOE_SCHEDULE_COUNT };

/* Tensors that learn differently. The first group whose pattern fits a tensor's name counts; one that fits no tensor is MOE_ERR_CONFIG. */
typedef struct moe_param_group {
    const char *pattern; /* "*.router.*", "0.weight": * stands for any characters */
    moe_real rate;       /* factor on the rate, up to 1e6 [1] */
    moe_real decay;      /* factor on the decay, 0 to 1e6; it also decays biases and gains when given [1, but 0 for biases and gains]; negative: none */
    int frozen;          /* 1: stays as it is, takes no part in the gradient's norm */
} moe_param_group;

/* {0} is a good default: AdamW at 0.001, batches of 32, 10 epochs. 0 in a field means the value in brackets. */
typedef struct moe_train_config {
    int criterion;           /* MOE_CRITERION_ [cross entropy] */
    int optimizer;           /* MOE_OPTIMIZER_ [adamw] */
    int epochs;              /* [10] */
    int batch;               /* samples at a time: a step, unless accumulate says more [32] */
    moe_real rate;           /* learning rate [0.001; sgd 0.01] */
    moe_real final_rate;     /* the rate falls to this share of it as schedule says [1: constant] */
    moe_real momentum;       /* sgd [0.9]; negative: none */
    moe_real beta1, beta2;   /* adamw [0.9, 0.999] */
    moe_real epsilon;        /* adamw [1e-8] */
    moe_real decay;          /* weight decay [0] */
    moe_real clip;           /* largest norm of the gradient of all tensors together [0: no clipping] */
    uint64_t seed;           /* order of the samples and random stages of routers */
    int (*progress)(void *ctx, const moe_progress *progress); /* may be NULL; a result other than 0 stops training */
    void *progress_ctx;
    int accumulate;          /* moe_fit: batches whose mean gradient makes one step; the last of an epoch may have fewer [1] */
    int schedule;            /* MOE_SCHEDULE_ of final_rate [cosine] */
    int warmup;              /* steps in which the rate rises on a straight line to its full value; a trainer needs total_steps for it [0] */
    int total_steps;         /* steps of the schedule [moe_fit: all of its steps; a trainer of your own: no schedule, its rate stays] */
    const moe_param_group *groups; /* [n_groups] the caller's, read by init (and moe_fit) only */
    int n_groups;            /* up to 4096 */
    int evaluate_every;      /* moe_fit: steps between evaluations on test [0: at the end of each epoch only] */
    const char *checkpoint;  /* moe_fit: a file that is replaced every checkpoint_every steps, at the end, and when progress stops training; NULL: none */
    int checkpoint_every;    /* [0: at the end of each epoch] */
    int resume;              /* 1: moe_fit goes on where the checkpoint ends, if the file exists; the net gets the checkpoint's values */
} moe_train_config;

/* An optimiser at work on one net. Owns its moments and work memory (moe_trainer_free). */
typedef struct moe_trainer {
    moe_net *net;
    moe_train_config config; /* with defaults filled in */
    uint64_t steps;          /* taken so far */
    moe_rng rng;
    moe_real rate;           /* of the next step; with total_steps the schedule sets it again after each step */
    uint64_t total_steps;    /* of the schedule; 0: there is none */
    int n_accumulated;       /* batches since the last step */
    uint64_t position[4];    /* the caller's: where it stands in its data; saved in checkpoints. moe_fit keeps there the epochs that are complete, the steps
                                in this one, and the bits of its two sums of losses */
    moe_real *memory;        /* owned: two moments (sgd: one) per number, then the factors */
    size_t memory_size;
    moe_real *factors;       /* private: [tensors,2] of the groups */
    void *work;              /* owned: for one batch */
    size_t work_size;
    size_t most;             /* private: the most samples of a batch on this rank */
} moe_trainer;

/* What one step saw. */
typedef struct moe_step {
    moe_real loss;          /* criterion, mean over the batch, before the step */
    moe_real router_loss;   /* sum of all router losses */
    moe_real gradient_norm; /* of all trained tensors, before clipping */
} moe_step;

/* Checks config (NULL: {0}) and makes a trainer for net, which must outlive it and stay where it is. MOE_ERR_STATE: net is not built with
   trainable = 1. MOE_ERR_CONFIG: a field is out of range. MOE_ERR_MEMORY, MOE_ERR_OVERFLOW. On failure *trainer is untouched. */
MOE_API moe_status moe_trainer_init(moe_trainer *trainer, moe_net *net, const moe_train_config *config, moe_error *error);
/* One step on 1..config.batch samples: gradients to 0, forward, loss, backward, clip, state of the routers, optimiser. Tensors that are frozen, by
   MOE_PARAM_FROZEN or a group, stay as they are; biases and gains are not decayed. Data is checked first: MOE_ERR_ARGUMENT (error names the row and
   the label, or the router that needs more than x and what batch->call lacks), MOE_ERR_NONFINITE (x or a target). MOE_ERR_NONFINITE also when loss
   or gradient is not finite, or the gradient's norm is beyond 1e19 (1e150 in the double build). After a failure only the gradients have changed.
   A broken weight shows in the next step that uses it. step may be NULL. Allocates nothing. */
MOE_API moe_status moe_trainer_step(moe_trainer *trainer, const moe_data *batch, moe_step *step, moe_error *error);
/* The two halves of a step, for steps of several batches: accumulate runs forward and backward, adds the gradients to those since the last update
   and shows the pass to the routers' state; update steps on the mean of the gradients and advances that state. moe_trainer_step is both. In *step
   loss and router_loss are of this batch (accumulate), gradient_norm is of the mean (update); each leaves the other's fields alone. Errors as
   moe_trainer_step. Data that are refused change nothing; when accumulate fails later, the batches since the last update are lost: n_accumulated
   is 0 (what the routers' state has seen of them stays). update: MOE_ERR_STATE without a batch; a failed one changes nothing. */
MOE_API moe_status moe_trainer_accumulate(moe_trainer *trainer, const moe_data *batch, moe_step *step, moe_error *error);
MOE_API moe_status moe_trainer_update(moe_trainer *trainer, moe_step *step, moe_error *error);
/* A checkpoint: the net's file, and in it the optimiser's moments ("trainer.first" and, of adamw, "trainer.second": one number for each of the net's,
   in the order of its tensors), and under the metadata key "moe.trainer" steps, random state, rate and position. moe_net_read takes it as a net.
   Between steps only: MOE_ERR_STATE while batches are accumulated. Training that goes on from it has the same bits as training that was not interrupted. */
MOE_API moe_status moe_trainer_write(const moe_trainer *trainer, moe_stream *stream, moe_error *error);
/* Sets a trainer, made for a net of the same modules with the same optimiser, and its net to a checkpoint; the rest of its config is its own, also the
   schedule, which sets the rate again. Accumulated batches are dropped. The file may come from a stranger; errors as moe_net_read, and
   MOE_ERR_CONFIG: other modules or another optimiser. On failure both are as they were. */
MOE_API moe_status moe_trainer_read(moe_trainer *trainer, const void *bytes, size_t size, moe_error *error);
#ifndef MOE_NO_STDIO
/* The same with a file, which a failed save leaves as it was (moe_file_replace). */
MOE_API moe_status moe_trainer_save(const moe_trainer *trainer, const char *path, moe_error *error);
MOE_API moe_status moe_trainer_load(moe_trainer *trainer, const char *path, moe_error *error);
#endif
/* Gives back what init took; the net stays. {0}, NULL and a second call are harmless. */
MOE_API void moe_trainer_free(moe_trainer *trainer);

/* Modular networks (Kirsch, Kunze, Barber 2018, Modular networks: learning to decompose neural computation): every mixture layer's gate chooses one of its
   modules, and the choices are latent: hard EM. Every mixture of the trainer's net has select = sample, top_k = 1 and loss_distill > 0 without
   student (by which its gate learns the assigned choices); weight = one leaves the modules unweighted. By gradient instead: weight = raw, moe_fit. */
typedef struct moe_modular {
    moe_trainer *trainer;
    /* Private to moe.h; owned. */
    void *memory;
    size_t memory_size;
    moe_real *teacher;
    size_t n_teacher, n_mixtures;
    int32_t *candidate;
    double *best, *drawn;
    unsigned char *changed;
    int32_t *sequences;
    void *net_work;
    size_t net_size;
} moe_modular;

/* What one step of EM saw. */
typedef struct moe_modular_step_result {
    double log_likelihood; /* mean over the samples of -loss + sum over layers of ln p(choice), of the assigned choices, before the M-steps */
    double changed;        /* share of the samples whose assignment the E-step changed */
    moe_step last;         /* of the last M-step */
} moe_modular_step_result;

/* Takes memory for batches of the trainer's size; the trainer must outlive it. MOE_ERR_CONFIG: error names the layer that is not as above. */
MOE_API moe_status moe_modular_init(moe_modular *modular, moe_trainer *trainer, moe_error *error);
MOE_API void moe_modular_free(moe_modular *modular);
/* choices [mixtures,n] is the caller's and is kept from one step to the next for the same batch: the module of each sample at each mixture layer, -1 at
   first. E: of the present choices and `draws` ones drawn from the gates, the best by -loss + sum ln p; so this sum never falls. M: m_steps steps of
   the trainer on the assigned choices. result may be NULL. Errors as moe_trainer_step, choices then hold what the E-step found; draws, m_steps: 0 or
   more (0 draws need choices). */
MOE_API moe_status moe_modular_step(moe_modular *modular, const moe_data *batch, int draws, int m_steps, int32_t *choices, moe_modular_step_result *result,
                                    moe_error *error);

/* Trains net on train for config.epochs, in a new random order each epoch, and evaluates on test (NULL or n = 0: none) after each. All data
   is checked and all memory taken before the first step; errors are those of trainer_init and trainer_step. A failure in the middle (MOE_ERR_NONFINITE
   when training diverges: error begins with "epoch E, step S: ", the step that was not made, or after which test was not passed), or MOE_ERR_STOPPED
   when the callback stopped it, leaves the net with what it has learned, and the checkpoint as it was written last. The same seed gives the same bits:
   the order of the samples comes from config.seed, random stages of routers from a stream of their own that is made from it.
   With config.checkpoint the training can be stopped or killed at any time and resumed with the same bits, those of progress included. A resumed
   one wants the same modules, optimizer, n, length, batch, accumulate and seed (MOE_ERR_CONFIG names what differs); with more epochs a finished one
   goes on, with the same there is nothing more to do. A checkpoint that cannot be written ends training: MOE_ERR_IO, or MOE_ERR_MEMORY, for it
   takes memory; the file is then the one before. MOE_ERR_UNSUPPORTED: a checkpoint with MOE_NO_STDIO. */
MOE_API moe_status moe_fit(moe_net *net, const moe_data *train, const moe_data *test, const moe_train_config *config, moe_error *error);
/* Loss and accuracy of net on data, 64 samples at a time (data->length > 0: as many whole sequences as fit into 512 samples and soft_sequences, at
   least one), with training = 0. Data is checked as in a step; MOE_ERR_NONFINITE also when an output or the loss is not finite. n = 0 gives zeros. On
   failure *result is untouched. */
MOE_API moe_status moe_evaluate(const moe_net *net, const moe_data *data, int criterion, moe_evaluation *result, moe_error *error);

/* ---- the classical mixture: losses over plain arrays, the hierarchical mixture of experts --------------------------------- */

/* n samples, each answered by all of E experts. All arrays are the caller's, all numbers in them finite. */
typedef struct moe_mixture {
    size_t n, experts, width; /* samples, E >= 1, C >= 1 */
    const moe_real *p;        /* [n,E] gate probabilities, >= 0; exactly 0 is fine, a row need not sum to 1 */
    const moe_real *expert_p; /* [n,E], or NULL: p. With it the gate learns from the loss with p, the experts from that with expert_p */
    const moe_real *outputs;  /* [E,n,C] o, the rows of one expert after those of another */
    const int32_t *labels;    /* [n] in 0..C-1, read where the loss is one of classes */
    const moe_real *targets;  /* [n,C], read where the loss is squared */
    moe_real temperature;     /* T of cross_entropy, 1e-6 to 1e6 [1]; the other criteria want 0 or 1 */
} moe_mixture;

/* *loss becomes the mean over samples of what follows, where l_i = -log softmax(o_i)[label] and s_i = sum_j (o_ij - target_j)^2 / 2:
     cross_entropy   -log softmax(sum_i p_i o_i / T)[label]              squared_error        sum_j (sum_i p_i o_ij - target_j)^2 / 2
     expectation     -log sum_i p_i exp(-l_i), the sum being sum_i p_i softmax(o_i)[label]
     stochastic      sum_i p_i l_i                                       stochastic_squared   sum_i p_i s_i
     jacobs          -log sum_i p_i exp(-l_i / 2)                        jacobs_squared       -log sum_i p_i exp(-s_i)
   (Jacobs, Jordan, Nowlan, Hinton 1991, Adaptive mixtures of local experts). d_p [n,E] and d_outputs [E,n,C] receive the gradients;
   either may be NULL, neither overlaps an input. With expert_p (dual temperature) *loss and d_p are those with p, d_outputs is that of
   the loss with expert_p. Computed in double, by log-sum-exp; a gradient beyond 1e38 (1e308 in the double build), which takes p_i = 0 or
   huge numbers, is cut there. n = 0 gives 0. MOE_ERR_ARGUMENT: no such criterion, an array is missing, p below 0, a label or T out of
   range; MOE_ERR_NONFINITE: in an array, or a loss, as when all p are 0 under a log; MOE_ERR_OVERFLOW. error names row and value. A
   failed call changes nothing. Allocates nothing; thread-safe for different results. */
MOE_API moe_status moe_mixture_loss(int criterion, const moe_mixture *mixture, moe_real *loss, moe_real *d_p, moe_real *d_outputs,
                                    moe_error *error);
/* answer [n,C], no part of an input: sum_i p_i o_i / T (cross_entropy, squared_error), sum_i p_i softmax(o_i) (expectation), else the
   output of the expert with the largest p, the first of equals, or given an rng (else NULL) of one drawn in proportion to p, by one
   draw of the stream per sample. labels, targets and expert_p are not read. Errors as above; a failed call changes nothing. */
MOE_API moe_status moe_mixture_answer(int criterion, const moe_mixture *mixture, moe_rng *rng, moe_real *answer, moe_error *error);

/* How the experts of a hierarchical mixture see y: as numbers, or as a class. */
enum { MOE_HME_GAUSSIAN = 0, MOE_HME_SOFTMAX, MOE_HME_COUNT };

/* 0 in a field means the value in brackets; d_in and d_out must be set. */
typedef struct moe_hme_config {
    int d_in, d_out;       /* d, and C: numbers or classes */
    int n_groups;          /* G [2] */
    int n_experts;         /* E, experts in a group [2] */
    int family;            /* MOE_HME_ [gaussian] */
    int steps;             /* rounds of IRLS per EM iteration for a gate or softmax expert, 1 to 100 [2] */
    moe_real variance;     /* v of all gaussian experts, held fixed, 1e-12 to 1e12; 0: each expert's is estimated, from 1 on */
    moe_real min_variance; /* an estimate stops here, 1e-12 to 1e12; without a bound the likelihood has none [1e-6] */
} moe_hme_config;

/* Hierarchical mixture of experts (Jordan, Jacobs 1994, Hierarchical mixtures of experts and the EM algorithm). With x followed by a 1,
     p(y | x) = sum_i g_i sum_j g_{j|i} p_ij(y | x)        g = softmax(gate x)      g_{.|i} = softmax(gates_i x)
     gaussian: p_ij = product over k of N(y_k; (experts_ij x)_k, variances_ij)      softmax: p_ij = softmax(experts_ij x)[label]
   Parameters and sums are double in both builds. They start at random for inputs of about unit size: standardise x. Calls that take it
   as const are thread-safe. */
typedef struct moe_hme {
    moe_hme_config config; /* with defaults filled in */
    double *gate;          /* [G,d+1], in each row the bias last */
    double *gates;         /* [G,E,d+1] */
    double *experts;       /* [G,E,C,d+1] */
    double *variances;     /* [G,E], read by the gaussian family only */
    double *parameters;    /* all of the above, one after another */
    size_t n_parameters;
    double *kept, *best, *gradient, *normal, *outputs, *groups; /* private: work memory of em and gradient */
    size_t row, width, in_group, all; /* private: d + 1, C, E, G E */
    void *memory;          /* owned */
    size_t memory_size;    /* bytes */
    moe_allocator allocator;
} moe_hme;

/* Makes a mixture that owns its parameters and work memory, whose size depends on config alone (moe_hme_free). allocator NULL: the
   standard heap. MOE_ERR_CONFIG: error names field and value; MOE_ERR_MEMORY, MOE_ERR_OVERFLOW. On failure *hme is untouched. */
MOE_API moe_status moe_hme_create(moe_hme *hme, const moe_hme_config *config, uint64_t seed, const moe_allocator *allocator,
                                  moe_error *error);
/* Gives back what create took; {0}, NULL and a second call are harmless. */
MOE_API void moe_hme_free(moe_hme *hme);
/* y [n,C] = sum_i g_i sum_j g_{j|i} y_ij for x [n,d], the mean or class probabilities. Errors, of this and the next calls up to moe_hme_gradient:
   MOE_ERR_STATE (not created), MOE_ERR_ARGUMENT (an array is missing, a label is out of range), MOE_ERR_NONFINITE (x, a target, or a result),
   MOE_ERR_OVERFLOW; error names row and value. After a failure the arrays of results are unspecified, *log_likelihood and *hme as they
   were. None allocates. */
MOE_API moe_status moe_hme_predict(const moe_hme *hme, size_t n, const moe_real *x, moe_real *y, moe_error *error);
/* Mean over samples of log p(y | x), y from data->targets (gaussian) or data->labels (softmax); 0 for n = 0. */
MOE_API moe_status moe_hme_log_likelihood(const moe_hme *hme, const moe_data *data, double *log_likelihood, moe_error *error);
/* group [n,G] = h_i and expert [n,G,E] = h_{j|i}: the gates' probabilities given x and y, or given x alone where data has no y. */
MOE_API moe_status moe_hme_posteriors(const moe_hme *hme, const moe_data *data, double *group, double *expert, moe_error *error);
/* One EM iteration. E: the caller's h [n,G,E] receives h_i h_{j|i} under the parameters as they were. M, each model by its own weighted
   log-likelihood: least squares for gaussian experts, then their variances; for gates and softmax experts IRLS, a Newton step of one
   row after another, halved until it does not lose (Boehning 1992, Multinomial logistic regression algorithm, bounds how often).
   Equations are solved for the change, by Cholesky with 1e-10 of the diagonal added: what the data leave open stays as it is, and so
   does a model without posterior mass. *log_likelihood (may be NULL) is the mean after the step, never below the one before: a step
   that rounding spoils is undone. */
MOE_API moe_status moe_hme_em(moe_hme *hme, const moe_data *data, double *h, double *log_likelihood, moe_error *error);
/* One step of ascent, parameters += rate * gradient of the mean log-likelihood; variances move by their logarithm and stop at
   min_variance. h as above; *log_likelihood (may be NULL) is the one before. MOE_ERR_NONFINITE also when the step is too large. */
MOE_API moe_status moe_hme_gradient(moe_hme *hme, const moe_data *data, moe_real rate, double *h, double *log_likelihood,
                                    moe_error *error);

/* Writes a safetensors file: all tensors by name, and under the metadata key "moe" the configuration as JSON text,
     {"format":1,"net":{"d_in":64,"modules":[{"module":"linear","d_out":32},{"module":"activation","act":"relu"},{"module":"layer_norm"},
      {"module":"mixture","d_model":32,"n_experts":8,"score":"cosine"},{"module":"residual","span":1}]}}
   where a mixture has the rows of moe_layer_fields that are not 0, without kernels. (A layer alone: {"format":1,"layer":{"d_model":...}}.)
   The same net gives the same bytes. MOE_ERR_STATE before build; else the errors of moe_file_write. */
MOE_API moe_status moe_net_write(const moe_net *net, moe_stream *stream, moe_error *error);
#ifndef MOE_NO_STDIO
/* The same to a file, by moe_file_replace: a failed save leaves the old file as it was. */
MOE_API moe_status moe_net_save(const moe_net *net, const char *path, moe_error *error);
#endif
#endif /* MOE_NO_TRAIN */

/* Makes a net from a file in memory; bytes are not needed afterwards. trainable, kernels and allocator as in build and init. Numbers of
   any type are converted; infinities and NaN are read as such. The file may come from a stranger: names and shapes are compared with
   the configuration before memory for tensors is taken, so n bytes take at most (1 + 2 sizeof(moe_real)) n bytes of memory and 12 KiB for each module and for 8 more; n bytes
   describe n / 22 modules at most. Errors: those of moe_file_open and of the module calls; MOE_ERR_FORMAT (no configuration, or it is
   malformed, or that of a layer), MOE_ERR_UNSUPPORTED (another format, an unknown key, unless it begins with "_", or a tensor too many,
   unless its name begins with "trainer.": the file may be a checkpoint), MOE_ERR_NOT_FOUND (a tensor too few), MOE_ERR_SHAPE; error names
   it. On failure *net is untouched. */
MOE_API moe_status moe_net_read(moe_net *net, const void *bytes, size_t size, int trainable, int kernels, const moe_allocator *allocator,
                                moe_error *error);
#ifndef MOE_NO_STDIO
/* The same from a file; also the errors of moe_file_read. */
MOE_API moe_status moe_net_load(moe_net *net, const char *path, int trainable, int kernels, const moe_allocator *allocator,
                                moe_error *error);
#endif

#ifndef MOE_NO_TRAIN
/* ---- reports: figures as SVG, HTML and text --------------------------------------------------------------------------------- */

/* What a figure shows. The first is {0}.
     HEAT    a table coloured by value: expert x class, layer x expert
     BARS    a bar per row, for up to 4 columns side by side; spread: whiskers
     LINES   a curve per row through those of its columns that have a value: losses and entropies over steps; 32 rows have a style and a name each
     TOKENS  a text, column by column, with the expert that each row (a layer) chose for each token; values: its weight, 0..1
     TABLE   numbers, or texts where there are cells: comparisons; spread: "0.52 +- 0.03"
     MAP     a plane of regions: the expert at each point of a grid, row 0 at the top */
enum { MOE_FIGURE_HEAT = 0, MOE_FIGURE_BARS, MOE_FIGURE_LINES, MOE_FIGURE_TOKENS, MOE_FIGURE_TABLE, MOE_FIGURE_MAP, MOE_FIGURE_COUNT };

/* One figure: plain data, all of it the caller's, read during the call only. {0} is a figure with nothing in it, and says so. Texts are UTF-8 ended by
   0 and may hold anything: what HTML would take for its own is escaped, bytes that are no UTF-8, control characters and characters that turn
   the direction of writing show as U+FFFD (in TOKENS line breaks, tabs and spaces show as signs). A value that is NaN or infinite is no value: it is left out,
   and where a number would stand there is a dash. What is larger than a picture can show is thinned, and the figure says how. */
typedef struct moe_figure {
    int kind;                /* MOE_FIGURE_ */
    const char *title;       /* a line [what the kind is called] */
    const char *caption;     /* what it shows, a paragraph [none] */
    size_t rows, columns;
    size_t stride;           /* numbers from one row to the next of values, spread, experts and cells [columns] */
    const double *values;    /* [rows,columns]; TOKENS may, MAP does go without, TABLE with cells too */
    const double *spread;    /* [rows,columns] half widths of intervals for BARS and TABLE, negative or NaN: none [none] */
    const int32_t *experts;  /* [rows,columns] of TOKENS and MAP; negative: none */
    const char *const *cells; /* [rows,columns] texts of TABLE in place of values; a NULL among them: its value [none] */
    const char *const *row_names; /* [rows] [row_label and 0, 1, ...] */
    const char *const *column_names; /* [columns] [column_label and 0, 1, ...]; TOKENS: the tokens' texts, wanted */
    const char *row_label;   /* what a row is: "expert"; of MAP the axis upwards [TOKENS "layer", LINES "series", else "expert"] */
    const char *column_label; /* what a column is: "class", "step" [BARS and TABLE none, TOKENS "token", else "column"] */
    const char *value_label; /* what a number is, with its unit: "tokens", "loss (nats)" [none] */
    const double *x;         /* [columns] where the columns lie, for LINES and MAP [LINES 1, 2, ...; MAP: no axis]. Ascending, as a rule */
    const double *y;         /* [rows] where the rows of MAP lie [no axis] */
    int n_experts;           /* of TOKENS and MAP: the legend names so many [as many as occur] */
    int decimals;            /* digits behind the point, up to 9; -1: none [0: as many as the numbers need, one number for a column of TABLE, else for all] */
    double reference;        /* BARS, LINES: a line at this value, named reference_name: what would be even, or by chance [0: none] */
    const char *reference_name; /* ["reference"] */
} moe_figure;

/* A record of numbers over training, of any length in this much memory: when it is full, every other point goes and from then on every other one
   is kept; the first and the newest are always there. {0} is empty. Read freely, change only by moe_history_add. */
enum { MOE_HISTORY_POINTS = 512, MOE_HISTORY_SERIES = 8 };
typedef struct moe_history {
    size_t n;                /* points */
    double at[MOE_HISTORY_POINTS];
    double values[MOE_HISTORY_SERIES][MOE_HISTORY_POINTS];
    size_t seen, every;      /* private: points added, and how many of them make one that is kept */
} moe_history;

#ifndef MOE_NO_REPORT
/* Writes figure as one SVG file: no script, nothing fetched, the same bytes for the same figure. Colours follow the reader's light or dark
   scheme, text has a contrast of 4.5 and more, an expert or series is told by number, name or pattern too; title and description say in words what
   the picture shows. One unit is one pixel, and text has at least 12 of them; it is as wide as a phone where the figure allows, and grows to
   at most half as much again. MOE_ERR_ARGUMENT: NULL, a kind that is none, columns > stride, an array that is wanted is NULL (error names figure and field);
   MOE_ERR_OVERFLOW: rows times stride; else what the stream returned. Allocates nothing; thread-safe. */
MOE_API moe_status moe_report_svg(const moe_figure *figure, moe_stream *stream, moe_error *error);
/* Writes a page with n figures (0 or more) as one HTML file, under the same promises; the figures stand in as many columns as the screen has room for, a
   wide one scrolls in its own frame, and behind each its numbers are a table (of up to 1000 rows: then every so many-th). title NULL: "Report". Errors as moe_report_svg. */
MOE_API moe_status moe_report_html(const char *title, const moe_figure *figures, size_t n, moe_stream *stream, moe_error *error);
/* Writes figure as text in lines of at most `columns` characters (0: 80; 40 to 400). Frames and bars are ASCII. colour 1: with the colours of ANSI
   terminals (ESC [ 48;5;n m), for the caller who knows that the stream is one. Errors as moe_report_svg, MOE_ERR_ARGUMENT for columns too. */
MOE_API moe_status moe_report_text(const moe_figure *figure, int columns, int colour, moe_stream *stream, moe_error *error);
#ifndef MOE_NO_STDIO
/* Replaces the file at path (moe_file_replace): a page if the name ends in .html or .htm, the first figure as a picture if in .svg, else all figures as text in
   80 columns. MOE_ERR_ARGUMENT: path NULL, or .svg and n = 0. */
MOE_API moe_status moe_report_save(const char *path, const char *title, const moe_figure *figures, size_t n, moe_error *error);
#endif

/* Figures of moe_metrics_report; they point into the metrics' memory, and any field can be changed afterwards. NULL, or nothing of the kind in report: {0}.
   classes: HEAT of the pairs, expert x class. load: BARS of the pairs of each expert, with a line at their mean. */
MOE_API moe_figure moe_figure_classes(const moe_report *report);
MOE_API moe_figure moe_figure_load(const moe_report *report);

/* Adds a point: at (a step, an epoch) and the first `count` series there; the other series have no value there, nor have NaNs. Call it from the progress
   callback of moe_fit, for example with loss, router_loss and test.loss. MOE_ERR_ARGUMENT: NULL (values may be NULL for count = 0), or count beyond MOE_HISTORY_SERIES. */
MOE_API moe_status moe_history_add(moe_history *history, double at, const double *values, size_t count);
/* LINES of `count` series from `first` on, which names [count] names (the caller's; NULL: numbers). Points into history, which must outlive it. NULL, or series that are not
   there: {0}. */
MOE_API moe_figure moe_figure_history(const moe_history *history, size_t first, size_t count, const char *const *names);
#endif /* MOE_NO_REPORT */
#endif /* MOE_NO_TRAIN */

#endif /* MOE_NO_FLOAT */

/* ---- models for small machines: constants in flash, no heap, no initialisation ------------------------------------------------- */

/* How a model's weights are stored and computed with. FLOAT: as in the net, in floating point. INT8, INT4: whole numbers of 8 or 4 bits, and no
   floating point at all in moe_infer: the same bits on every machine. */
enum { MOE_WEIGHTS_FLOAT = 0, MOE_WEIGHTS_INT8, MOE_WEIGHTS_INT4, MOE_WEIGHTS_COUNT };

struct moe_net;
struct moe_int_run;
struct moe_choice;

/* Brings experts' weights from where the processor cannot read them in place (flash behind a serial bus, a card): copies size bytes from place `at`
   of the bytes that moe_export_experts wrote to `to`. What it returns other than MOE_OK ends moe_infer, which returns it. */
typedef struct moe_loader {
    void *ctx;
    moe_status (*fetch)(void *ctx, size_t at, size_t size, void *to);
} moe_loader;

/* One operation on vectors in scratch memory. A vector is int16 [width rounded up to 4], zeros behind its width; a real number is level * scale, and the
   scales are known to moe_model_create alone. Operations name their function, so a linker drops those that no model uses. */
typedef struct moe_int_op {
    void (*run)(const struct moe_int_op *op, struct moe_int_run *run);
    moe_int_shape shape;     /* width of the result, of what is read; limits and shift of the result */
    uint32_t at;             /* its constants: bytes from the base, which is the model's weights or, in an expert, its block */
    uint32_t in, other, out; /* its vectors: int16 from the start of the vectors */
    int16_t factor, factor2;
    uint16_t index;          /* mixture, attention: its number in the model; row: whose row; norm: 1 centres */
} moe_int_op;

/* A mixture: the operations that make the logits z, the router, the operations of one expert, which run for each chosen one in ascending order and add
   to sum, those of the shared expert. Operations are numbers in the model's list; places are int16 from the start of the vectors. */
typedef struct moe_int_mixture {
    moe_int_router router;
    uint32_t score, n_score;    /* operations */
    uint32_t expert, n_expert;
    uint32_t shared, n_shared;
    uint32_t experts, stride;   /* block of expert 0 in the model's experts, and bytes of a block, a multiple of 4 */
    uint32_t z, p, sum;         /* logits int16 [E]; gate int32 [E]; sum of the experts int32 [d_out] */
    uint32_t choices;           /* int16: how many, the experts in the order of choice [router.most], their weights [router.most] */
    uint32_t block;             /* room for one block; MOE_INT_NONE: experts are read in place */
    int16_t weight_bits;        /* a weight is level * 2^(weight_bits - 15) */
} moe_int_mixture;

/* Attention over the tokens of a sequence so far. */
typedef struct moe_int_attention {
    uint16_t heads, d_head;
    uint32_t keys, values; /* bytes from the start of the state: int8 [length, heads d_head] each */
    uint32_t value;        /* vector: the token's own v */
    uint32_t room;         /* int16 from the start of the vectors: int32 [length + 1] for scores, int16 [length] for weights */
    uint16_t bits;         /* 2^bits to an octave, in which scores are compared */
} moe_int_attention;

/* A model: what moe_export_c writes as a constant, and moe_model_create makes in memory. Read-only; used by any number of threads with scratch memory of
   their own. Its fields are for reading: they change with the version, which moe_infer checks. */
typedef struct moe_model {
    uint32_t version;         /* MOE_MODEL_VERSION */
    int weights_are;          /* MOE_WEIGHTS_ */
    moe_status (*run)(const struct moe_model *model, const moe_loader *loader, const void *input, void *output, void *scratch);
    moe_status (*choices)(const struct moe_model *model, size_t mixture, const void *scratch, struct moe_choice *choices, size_t room, size_t *count);
    size_t d_in, d_out;       /* widths; d_in = 0: it reads token ids */
    size_t length;            /* most tokens of a sequence; 0: every call stands for itself */
    size_t scratch_size;      /* bytes of scratch memory, any alignment */
    size_t state_size;        /* bytes at its start that stay from call to call of a sequence */
    float input_scale, output_scale; /* integer models: real = level * scale */
    const unsigned char *weights;    /* constants but those of experts */
    size_t weights_size;
    const unsigned char *experts;    /* blocks of experts, NULL: they are behind a loader */
    size_t experts_size;
    const moe_int_op *ops;    /* first the model's own, then those of its mixtures */
    uint32_t n_ops, n_main;
    const moe_int_mixture *mixtures;
    uint32_t n_mixtures;
    const moe_int_attention *attentions;
    uint32_t n_attentions;
    const struct moe_net *net; /* float models */
    size_t multiplications;   /* multiply-accumulates of one call at most */
} moe_model;

/* What moe_model.version must be: it changes when what models hold does. */
#define MOE_MODEL_VERSION 2

/* One call of a model at work; on the stack of moe_infer. */
typedef struct moe_int_run {
    const moe_model *model;
    const moe_loader *loader;
    const unsigned char *base; /* of the operations' constants */
    int16_t *vectors;
    unsigned char *state;
    int32_t token;             /* id, where the model reads ids */
    uint32_t place;            /* of the token in its sequence */
    int16_t weight;            /* of the expert at work: 32767 stands for 1 */
    moe_status status;
} moe_int_run;

/* The functions of operations. They belong to models, nothing else calls them; their code says to the bit what they do. */
MOE_API void moe_int_op_int8(const moe_int_op *op, moe_int_run *run); /* out = W in + b, weights of 8 bits */
MOE_API void moe_int_op_int4(const moe_int_op *op, moe_int_run *run); /* the same, of 4 bits */
MOE_API void moe_int_op_int8_add(const moe_int_op *op, moe_int_run *run); /* sum out += weight (W in + b) */
MOE_API void moe_int_op_int4_add(const moe_int_op *op, moe_int_run *run);
MOE_API void moe_int_op_curve(const moe_int_op *op, moe_int_run *run); /* out = c(in), a curve of 65 points */
MOE_API void moe_int_op_multiply(const moe_int_op *op, moe_int_run *run); /* out = in * other */
MOE_API void moe_int_op_add(const moe_int_op *op, moe_int_run *run); /* out = in * factor + other * factor2 */
MOE_API void moe_int_op_rescale(const moe_int_op *op, moe_int_run *run); /* out = in * factor */
MOE_API void moe_int_op_mixture(const moe_int_op *op, moe_int_run *run); /* out = a mixture's output */
/* of sequences */
MOE_API void moe_int_op_row(const moe_int_op *op, moe_int_run *run); /* out = a row of a table: the token's (embedding) or the place's (positions) */
MOE_API void moe_int_op_norm(const moe_int_op *op, moe_int_run *run); /* out = in / its root mean square * gain, or (in - mean) / its standard deviation * gain + bias */
MOE_API void moe_int_op_turn(const moe_int_op *op, moe_int_run *run); /* out = the halves of each head of in turned against each other by the place's angles */
MOE_API void moe_int_op_attention(const moe_int_op *op, moe_int_run *run); /* out = the values of the tokens so far, weighted by softmax(in . their keys); appends other, the token's key, and its value */
/* of routers */
MOE_API void moe_int_op_unit(const moe_int_op *op, moe_int_run *run); /* out = in / |in| */
MOE_API void moe_int_op_cluster(const moe_int_op *op, moe_int_run *run); /* out = in * the row of a table that the previous mixture's choices mean */
MOE_API void moe_int_op_norm_l1(const moe_int_op *op, moe_int_run *run); /* out_e = a norm of in, which the next k operations have made of expert e: the sum of the sizes */
MOE_API void moe_int_op_norm_l2(const moe_int_op *op, moe_int_run *run); /* the same with the square root of the sum of squares */
MOE_API void moe_int_op_norm_linf(const moe_int_op *op, moe_int_run *run); /* the same with the largest */
MOE_API void moe_int_op_match(const moe_int_op *op, moe_int_run *run); /* out_e = in . other, in made likewise */
/* of a mixture's experts and shared expert */
MOE_API void moe_int_op_weigh(const moe_int_op *op, moe_int_run *run); /* out = weight * in; what follows has weight 1 */
MOE_API void moe_int_op_weight(const moe_int_op *op, moe_int_run *run); /* what follows has the weight in_0 */
MOE_API void moe_int_op_accumulate(const moe_int_op *op, moe_int_run *run); /* sum out += weight * in */
MOE_API void moe_int_op_rest(const moe_int_op *op, moe_int_run *run); /* sum out += (1 - the sum of the chosen experts' weights) * in */
/* What moe_model.run and moe_model.choices are: integer and float models. moe_infer and moe_infer_choices call them, and errors are as there; here
   pointers are not looked at. */
MOE_API moe_status moe_int_model_run(const moe_model *model, const moe_loader *loader, const void *input, void *output, void *scratch);
MOE_API moe_status moe_int_model_choices(const moe_model *model, size_t mixture, const void *scratch, struct moe_choice *choices, size_t room, size_t *count);
#ifndef MOE_NO_FLOAT
MOE_API moe_status moe_float_model_run(const moe_model *model, const moe_loader *loader, const void *input, void *output, void *scratch);
MOE_API moe_status moe_float_model_choices(const moe_model *model, size_t mixture, const void *scratch, struct moe_choice *choices, size_t room, size_t *count);
#endif

/* output = what the net says to one input. Integer models: input int8_t [d_in] levels within +-127, output int16_t [d_out] levels. Float models: moe_real
   [d_in], [d_out]. d_in = 0: input is one id, int32_t. scratch [model->scratch_size], any alignment, holds all that is computed. A model of sequences
   (length > 0) takes one token in each call, and its scratch memory stays the caller's but unchanged in between; zeroed memory begins a sequence, as does
   moe_infer_restart. That of an integer model may be copied between calls to another address with the same remainder by 4, and only its first
   state_size bytes (+ 3 for the alignment) need be: they are the sequence up to here. Errors: MOE_ERR_ARGUMENT (NULL, an id beyond the vocabulary),
   MOE_ERR_SPACE (scratch_size too small), MOE_ERR_STATE (the sequence is longer than length), MOE_ERR_UNSUPPORTED (a model of another version; experts
   behind a loader), MOE_ERR_NONFINITE (float models whose router meets such a number). After an error output is unspecified, and the sequence is where
   it was. */
MOE_API moe_status moe_infer(const moe_model *model, const void *input, void *output, void *scratch, size_t scratch_size);
/* The same for a model whose experts are behind a loader. loader NULL: as moe_infer. */
MOE_API moe_status moe_infer_loading(const moe_model *model, const moe_loader *loader, const void *input, void *output, void *scratch, size_t scratch_size);
/* Begins a new sequence in scratch. NULL is allowed. */
MOE_API void moe_infer_restart(const moe_model *model, void *scratch, size_t scratch_size);

#ifndef MOE_NO_FLOAT
/* level_i = x_i / model->input_scale, rounded to nearest and held within +-127: an integer model's input [d_in] from real numbers; 0 for what is not a
   number. Nothing where a pointer is NULL or the model reads token ids. Thread-safe. */
MOE_API void moe_infer_levels(const moe_model *model, const moe_real *x, int8_t *levels);
#endif

/* A chosen expert and its weight in units of 2^-15. */
typedef struct moe_choice {
    int32_t expert, weight;
} moe_choice;

/* Who was chosen in mixture number `mixture` (from 0) in the last call with this scratch memory: up to room choices in the order of choice, *count how
   many there are; in zeroed memory 0. A weight beyond int32 is +-INT32_MAX. MOE_ERR_NOT_FOUND: no such mixture; MOE_ERR_ARGUMENT: NULL;
   MOE_ERR_UNSUPPORTED: a model of another version. */
MOE_API moe_status moe_infer_choices(const moe_model *model, size_t mixture, const void *scratch, moe_choice *choices, size_t room, size_t *count);

#ifndef MOE_NO_TRAIN
/* How a net becomes a model. {0}: float weights. */
typedef struct moe_model_config {
    int weights;                 /* MOE_WEIGHTS_ [float] */
    const moe_data *calibration; /* integers: inputs like those that will come (n, x or token_ids, length); some hundred rows. Not read for float */
    size_t length;               /* most tokens of a sequence, where the net has attention or positions [128] */
    int loader;                  /* integers: 1: experts' weights come through a loader (moe_export_experts writes them) [0] */
    moe_allocator allocator;     /* {0}: the standard heap */
} moe_model_config;

/* The functions that a moe_int_router names, for printing; NULL: none. */
typedef struct moe_int_router_names {
    const char *name[5];
} moe_int_router_names;

/* A model with the memory that it owns. model points into the struct, which therefore stays where it was made. */
typedef struct moe_built_model {
    moe_model model;
    moe_buffer weights, experts;
    moe_int_op *ops;
    moe_int_mixture *mixtures;
    moe_int_router_names *router_names;
    moe_int_attention *attentions;
    int external;                /* 1: experts come through a loader */
    moe_net net;                 /* float models: the net's modules with plain C kernels; the tensors stay the net's */
    moe_allocator allocator;
} moe_built_model;

/* Makes a model of a net, which stays the caller's; a float model points to it, an integer model keeps nothing of it. Integers: every vector gets a scale
   from the largest number that calibration shows there; weights get one per output (INT4: per 32 inputs), by the rules of moe_pack.
   MOE_ERR_UNSUPPORTED: names the module or option that has no such form; MOE_ERR_ARGUMENT (NULL, no calibration), MOE_ERR_STATE (a net that is not built),
   MOE_ERR_CONFIG, MOE_ERR_NONFINITE (a weight, or what calibration computes), MOE_ERR_MEMORY, MOE_ERR_OVERFLOW (sizes, or numbers too far apart for
   integers). On failure *built is untouched. */
MOE_API moe_status moe_model_create(moe_built_model *built, const moe_net *net, const moe_model_config *config, moe_error *error);
/* Gives everything back; {0} and NULL are harmless. */
MOE_API void moe_model_free(moe_built_model *built);
/* Writes a C header (C99 and C++11) that holds the model as a constant: NAME, and macros NAME_SCRATCH, NAME_INPUTS, NAME_OUTPUTS, ... in capitals; its comment tells
   what it takes. name is an identifier, no word of C or C++. MOE_ERR_ARGUMENT, MOE_ERR_IO as the stream says. */
MOE_API moe_status moe_export_c(const moe_built_model *built, const char *name, moe_stream *stream, moe_error *error);
/* Writes the blocks of all experts as bytes, for a loader; MOE_ERR_STATE: they are part of the model. */
MOE_API moe_status moe_export_experts(const moe_built_model *built, moe_stream *stream, moe_error *error);

/* ---- for programs in other languages -------------------------------------------------------------------------------------------- */

/* Where the members of all public structs lie, for programs that cannot include the headers: they ask, and need no layout of their own, which another
   version or machine would break. Struct number i, 0, 1, ...: its name and those of its members in order, a space between them ("moe_error code message");
   NULL past the last. A constant string. Thread-safe. */
MOE_API const char *moe_struct_names(size_t i);
/* *offset and *size (either may be NULL) in bytes of a member of a struct, with member NULL of the struct itself: moe_struct_place("moe_call", "x",
   &offset, &size). A member of a member is found in two steps. MOE_ERR_NOT_FOUND: there is no such struct or member; MOE_ERR_ARGUMENT: name is NULL.
   Then both are untouched. Thread-safe. */
MOE_API moe_status moe_struct_place(const char *name, const char *member, size_t *offset, size_t *size);
#endif

#ifdef __cplusplus
}
#endif
#endif /* MOE_H */

#if defined(MOE_IMPLEMENTATION) && !defined(MOEI_MOE_IMPLEMENTED)
#define MOEI_MOE_IMPLEMENTED

#ifndef MOE_NO_FLOAT
/* ==== memory, streams and files ======================================================================================== */

#ifndef MOE_NO_MALLOC
#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#endif

/* ---- memory ----------------------------------------------------------------------------------------------------------- */

/* 0 when there is no allocator and the standard heap is not compiled in: a call that needs memory is then MOE_ERR_ARGUMENT. */
MOEI_TOOL int moei_can_allocate(const moe_allocator *a) {
#ifdef MOE_NO_MALLOC
    return a != NULL && a->resize != NULL;
#else
    (void)a;
    return 1;
#endif
}

/* The resize of an allocator as moe_allocator describes it; NULL allocator or function: the standard heap. */
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

/* count elements of size bytes, all zero; NULL on failure only: no bytes at all are given a block of one. */
MOEI_TOOL void *moei_alloc(const moe_allocator *a, size_t count, size_t size) {
    size_t bytes;
    void *p;
    if (!moei_mul(count, size, &bytes)) return NULL;
    if (bytes == 0) bytes = 1;
    p = moei_resize(a, NULL, 0, bytes);
    if (p != NULL) memset(p, 0, bytes);
    return p;
}

/* Frees what moei_alloc gave; size is the product of its count and size. p may be NULL. */
MOEI_TOOL void moei_free(const moe_allocator *a, void *p, size_t size) {
    if (p != NULL) (void)moei_resize(a, p, size > 0 ? size : 1, 0);
}

static void *moei_arena_resize(void *ctx, void *block, size_t old_size, size_t new_size) {
    moe_arena *arena = (moe_arena *)ctx;
    unsigned char *base = (unsigned char *)arena->base, *p = (unsigned char *)block;
    size_t pad;
    if (p != NULL && (size_t)(p - base) + old_size == arena->used) { /* the last block grows, shrinks and goes in place */
        size_t at = (size_t)(p - base);
        if (new_size > arena->size - at) return NULL;
        arena->used = at + new_size;
        return new_size > 0 ? block : NULL;
    }
    if (new_size <= old_size) return new_size > 0 ? block : NULL;
    if (base == NULL || arena->used > arena->size) return NULL;
    pad = (MOEI_ALIGN - (uintptr_t)(base + arena->used) % MOEI_ALIGN) % MOEI_ALIGN;
    if (pad > arena->size - arena->used || new_size > arena->size - arena->used - pad) return NULL;
    p = base + arena->used + pad;
    arena->used += pad + new_size;
    if (block != NULL) memcpy(p, block, old_size);
    return p;
}

MOE_API moe_allocator moe_arena_allocator(moe_arena *arena) {
    moe_allocator a;
    a.ctx = arena;
    a.resize = moei_arena_resize;
    return a;
}

/* ---- buffers ---------------------------------------------------------------------------------------------------------- */

static moe_status moei_buffer_resize(moe_buffer *b, size_t capacity) {
    unsigned char *p;
    if (!moei_can_allocate(&b->allocator)) return MOE_ERR_ARGUMENT;
    p = (unsigned char *)moei_resize(&b->allocator, b->data, b->capacity, capacity);
    if (p == NULL) return MOE_ERR_MEMORY;
    b->data = p;
    b->capacity = capacity;
    return MOE_OK;
}

/* Makes room for more bytes: at least doubles, so that many small writes stay cheap, unless memory is too short for that. */
static moe_status moei_buffer_reserve(moe_buffer *b, size_t more) {
    size_t need, twice;
    if (!moei_add(b->size, more, &need)) return MOE_ERR_OVERFLOW;
    if (need <= b->capacity) return MOE_OK;
    if (moei_mul(b->capacity, 2, &twice) && twice > need && moei_buffer_resize(b, twice) == MOE_OK) return MOE_OK;
    return moei_buffer_resize(b, need);
}

static moe_status moei_buffer_write(void *ctx, const void *from, size_t size) {
    moe_buffer *b = (moe_buffer *)ctx;
    moe_status status = moei_buffer_reserve(b, size);
    if (status != MOE_OK) return status;
    if (size > 0) memcpy(b->data + b->size, from, size);
    b->size += size;
    return MOE_OK;
}

MOE_API moe_stream moe_buffer_stream(moe_buffer *buffer) {
    moe_stream s;
    s.ctx = buffer;
    s.read = NULL;
    s.write = moei_buffer_write;
    return s;
}

MOE_API void moe_buffer_free(moe_buffer *buffer) {
    if (buffer == NULL) return;
    if (buffer->data != NULL) (void)moei_resize(&buffer->allocator, buffer->data, buffer->capacity, 0);
    buffer->data = NULL;
    buffer->size = buffer->capacity = 0;
}

/* ---- files by stdio --------------------------------------------------------------------------------------------------- */

#ifndef MOE_NO_STDIO
#include <errno.h>
#include <limits.h>
#include <stdio.h>

#ifdef _MSC_VER
#pragma warning(push)
#pragma warning(disable : 4996) /* fopen and strerror are standard C */
#endif

enum { MOEI_PATH_SIZE = 4096, MOEI_READ_SIZE = 4096 };

/* "what path: reason"; of a long path only the end, so that the reason fits the message. */
static moe_status moei_file_failed(moe_error *error, const char *what, const char *path, int reason) {
    size_t length = moei_strlen(path), cut = length > 120 ? length - 117 : 0;
    return moei_error(error, MOE_ERR_IO, "%s %s%s: %s", what, cut > 0 ? "..." : "", path + cut,
                      reason != 0 ? strerror(reason) : "the system gives no reason");
}

/* *left: how many bytes of f follow its position, or 0 when it cannot tell (a pipe, a device). Returns 0 when the position is lost: what would be
   read from then on is not what follows. */
static int moei_file_left(FILE *f, size_t *left) {
    long at = ftell(f), end;
    *left = 0;
    if (at < 0 || fseek(f, 0, SEEK_END) != 0) return 1;
    end = ftell(f);
    if (fseek(f, at, SEEK_SET) != 0) return 0;
    if (end > at) *left = (size_t)(end - at);
    return 1;
}

/* Grows by what the file still has, when it can tell, so that a large file needs no second copy of itself. One byte more than
   that lets the last read find the end without another growth. */
static moe_status moei_file_read_all(FILE *f, moe_buffer *b) {
    size_t got;
    do {
        if (b->size == b->capacity) {
            size_t left = 0, more = MOEI_READ_SIZE;
            moe_status status;
            if (b->size > 0 && !moei_file_left(f, &left)) return MOE_ERR_IO;
            if (left > 0 && left < (size_t)-1) more = left + 1;
            status = moei_buffer_reserve(b, more);
            if (status != MOE_OK) return status;
        }
        got = fread(b->data + b->size, 1, b->capacity - b->size, f);
        b->size += got;
    } while (got > 0);
    return ferror(f) ? MOE_ERR_IO : MOE_OK;
}

MOE_API moe_status moe_file_read(const char *path, moe_buffer *buffer, moe_error *error) {
    FILE *f;
    moe_status status;
    int reason;
    if (path == NULL || buffer == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "path or buffer is NULL");
    if (buffer->data != NULL || buffer->size != 0 || buffer->capacity != 0)
        return moei_error(error, MOE_ERR_ARGUMENT, "the buffer is not empty");
    errno = 0;
    f = fopen(path, "rb");
    if (f == NULL) return moei_file_failed(error, "cannot open", path, errno);
    errno = 0;
    status = moei_file_read_all(f, buffer);
    reason = errno;
    (void)fclose(f);
    if (status == MOE_OK) return MOE_OK;
    moe_buffer_free(buffer);
    if (status == MOE_ERR_IO) return moei_file_failed(error, "cannot read", path, reason);
    return moei_error(error, status, "%s: reading %s", moe_status_text(status), path);
}

/* Only a file that is not there is missing; one that cannot be opened is an error. */
MOEI_TOOL int moei_file_is_missing(const char *path) {
    FILE *file;
    errno = 0;
    file = fopen(path, "rb");
    if (file == NULL) return errno == ENOENT;
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

/* The mode x makes a new file or none, whatever lies there, and whoever makes the same one just now. Where not all C libraries know it a file that is
   there must be seen before; where they do it is not even opened, for that waits if it is a pipe. */
#if defined(__linux__) || defined(__APPLE__) || defined(__FreeBSD__) || defined(__OpenBSD__) || defined(__NetBSD__)
#define MOEI_CREATE "wbx"
#define MOEI_CREATES_NEW 1
#elif defined(__unix__)
#define MOEI_CREATE "wbx"
#define MOEI_CREATES_NEW 0
#else
#define MOEI_CREATE "wb"
#define MOEI_CREATES_NEW 0
#endif

/* Opens path.tmp0, or the next number for which there is no file yet; its name goes to name[MOEI_PATH_SIZE]. */
static FILE *moei_file_create_beside(const char *path, char *name) {
    int i;
    for (i = 0; i < 100; i++) {
        moei_text t;
        FILE *f;
        t.out = name, t.room = MOEI_PATH_SIZE, t.length = 0;
        moei_put(&t, path, moei_strlen(path));
        moei_put(&t, ".tmp", 4);
        moei_put_integer(&t, i);
        f = MOEI_CREATES_NEW ? NULL : fopen(name, "rb");
        if (f == NULL) {
            f = fopen(name, MOEI_CREATE);
            if (f != NULL) return f;
        } else
            (void)fclose(f);
    }
    return NULL;
}

typedef struct moei_stdio {
    FILE *file;
    int failed, reason; /* a write failed, and its errno */
} moei_stdio;

static moe_status moei_stdio_write(void *ctx, const void *from, size_t size) {
    moei_stdio *out = (moei_stdio *)ctx;
    if (size == 0) return MOE_OK;
    errno = 0;
    if (fwrite(from, 1, size, out->file) == size) return MOE_OK;
    if (!out->failed) out->reason = errno;
    out->failed = 1;
    return MOE_ERR_IO;
}

/* Lets write_contents write, and closes the file. */
static moe_status moei_stdio_fill(moei_stdio *out, const char *path, moe_status (*write_contents)(void *ctx, moe_stream *stream),
                                  void *ctx, moe_error *error) {
    moe_stream stream;
    moe_status status;
    stream.ctx = out;
    stream.read = NULL;
    stream.write = moei_stdio_write;
    status = write_contents(ctx, &stream);
    errno = 0;
    if (fflush(out->file) != 0 || ferror(out->file)) {
        if (!out->failed) out->reason = errno;
        out->failed = 1;
    }
    errno = 0;
    if (fclose(out->file) != 0 && !out->failed) {
        out->reason = errno;
        out->failed = 1;
    }
    if (out->failed) return moei_file_failed(error, "cannot write", path, out->reason);
    return status;
}

MOE_API moe_status moe_file_replace(const char *path, moe_status (*write_contents)(void *ctx, moe_stream *stream), void *ctx,
                                    moe_error *error) {
    char name[MOEI_PATH_SIZE];
    moei_stdio out;
    moe_error before;
    moe_status status;
    if (path == NULL || write_contents == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "path or write_contents is NULL");
    if (moei_strlen(path) + 8 > MOEI_PATH_SIZE)
        return moei_error(error, MOE_ERR_ARGUMENT, "the path is longer than %d bytes", (int)MOEI_PATH_SIZE - 8);
    errno = 0;
    out.file = moei_file_create_beside(path, name);
    out.failed = out.reason = 0;
    if (out.file == NULL) return moei_file_failed(error, "cannot create a file beside", path, errno);
    if (error != NULL) { /* write_contents may fill the same one: its message is nearer to the cause */
        before = *error;
        error->code = MOE_OK;
    }
    status = moei_stdio_fill(&out, path, write_contents, ctx, error);
    if (status == MOE_OK) status = moei_file_rename(name, path, error);
    if (status != MOE_OK) (void)remove(name);
    if (error != NULL && status == MOE_OK) *error = before;
    else if (error != NULL && error->code == MOE_OK)
        (void)moei_error(error, status, "writing %s: %s", path, moe_status_text(status));
    return status;
}

#ifdef _MSC_VER
#pragma warning(pop)
#endif
#endif /* MOE_NO_STDIO */

/* ---- JSON, as far as a safetensors header needs it --------------------------------------------------------------------
   Nothing here trusts that bytes which were checked once are still the same: every step is bounded by the end it was given. */

enum { MOEI_FILE_START = 9 };           /* the header's first byte after its '{' */
#define MOEI_FILE_MAX_HEADER 100000000u /* bytes; the format's own limit */

/* Two pointers, always compared by <, and no length: so an analysis that knows of each variable its range alone can prove that reads
   stay inside (tests/eva.c). */
typedef struct moei_span {
    const unsigned char *p, *end; /* inside the quotes, escapes as they stand */
} moei_span;

static moei_span moei_span_of(const char *p, size_t n) {
    moei_span s;
    s.p = (const unsigned char *)p;
    s.end = s.p + n;
    return s;
}

static size_t moei_span_length(moei_span s) { return (size_t)(s.end - s.p); }

typedef struct moei_json {
    const unsigned char *bytes;
    size_t at, end;
    moei_span name; /* the tensor being read, for messages; p NULL: none */
    moe_error *error;
    int any_dtype; /* 1: one that is unknown reads as MOE_DTYPE_COUNT */
} moei_json;

/* A copy of a span that is safe to print: ASCII, terminated, cut with dots. Returns out. */
static const char *moei_span_text(moei_span s, char out[52]) {
    size_t i;
    for (i = 0; s.p < s.end && i < 48; i++, s.p++) out[i] = (char)(*s.p >= 0x20 && *s.p < 0x7f ? *s.p : '?');
    if (s.p < s.end) out[45] = out[46] = out[47] = '.';
    out[i] = '\0';
    return out;
}

/* Fills error with "tensor 'name', byte at: " and the rest; returns code. */
static moe_status moei_json_refuse(moei_json *j, size_t at, moe_status code, const char *format, ...) {
    char shown[52];
    moei_text t;
    va_list arguments;
    if (j->error == NULL) return code;
    (void)moei_error(j->error, code, j->name.p != NULL ? "tensor '%s', byte %z: " : "%sbyte %z: ",
                     j->name.p != NULL ? moei_span_text(j->name, shown) : "", at);
    t.out = j->error->message, t.room = sizeof j->error->message, t.length = moei_strlen(t.out);
    va_start(arguments, format);
    moei_put_format(&t, format, arguments);
    va_end(arguments);
    return code;
}

/* The next byte that is no white space, not taken; -1 at the end. */
static int moei_json_peek(moei_json *j) {
    while (j->at < j->end) {
        int c = j->bytes[j->at];
        if (c != ' ' && c != '\n' && c != '\r' && c != '\t') return c;
        j->at++;
    }
    return -1;
}

static moe_status moei_json_take(moei_json *j, char wanted) {
    char text[2];
    int c = moei_json_peek(j);
    if (c == (unsigned char)wanted) {
        j->at++;
        return MOE_OK;
    }
    text[0] = wanted, text[1] = '\0';
    return moei_json_refuse(j, j->at, MOE_ERR_FORMAT, c < 0 ? "the header ends where %s is expected" : "%s is expected", text);
}

static int moei_hex_digit(int c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* u and four hexadecimal digits. */
static int moei_hex4(const unsigned char **at, const unsigned char *end, uint32_t *value) {
    int i;
    if (end - *at < 5 || **at != 'u') return 0;
    *value = 0;
    for (i = 1; i <= 4; i++) {
        int digit = moei_hex_digit((*at)[i]);
        if (digit < 0) return 0;
        *value = *value << 4 | (uint32_t)digit;
    }
    *at += 5;
    return 1;
}

/* The bytes of an escape whose backslash is just before *at, into out[4]; how many, or 0 when it is malformed. U+0000 is
   malformed, because our strings end there; so is half a surrogate pair. */
static int moei_unescape(const unsigned char **at, const unsigned char *end, unsigned char *out) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    uint32_t code, low;
    int i;
    for (i = 0; *at < end && from[i] != '\0'; i++)
        if (**at == (unsigned char)from[i]) {
            (*at)++;
            out[0] = (unsigned char)to[i];
            return 1;
        }
    if (!moei_hex4(at, end, &code) || code == 0 || (code >= 0xDC00u && code <= 0xDFFFu)) return 0;
    if (code >= 0xD800u && code <= 0xDBFFu) {
        if (*at >= end || *(*at)++ != '\\' || !moei_hex4(at, end, &low) || low < 0xDC00u || low > 0xDFFFu) return 0;
        code = 0x10000u + ((code - 0xD800u) << 10) + (low - 0xDC00u);
    }
    if (code < 0x80u) {
        out[0] = (unsigned char)code;
        return 1;
    }
    if (code < 0x800u) {
        out[0] = (unsigned char)(0xC0u | code >> 6), out[1] = (unsigned char)(0x80u | (code & 63u));
        return 2;
    }
    if (code < 0x10000u) {
        out[0] = (unsigned char)(0xE0u | code >> 12), out[1] = (unsigned char)(0x80u | (code >> 6 & 63u));
        out[2] = (unsigned char)(0x80u | (code & 63u));
        return 3;
    }
    out[0] = (unsigned char)(0xF0u | code >> 18), out[1] = (unsigned char)(0x80u | (code >> 12 & 63u));
    out[2] = (unsigned char)(0x80u | (code >> 6 & 63u)), out[3] = (unsigned char)(0x80u | (code & 63u));
    return 4;
}

/* The unescaped bytes of a string, one after another. */
typedef struct moei_chars {
    const unsigned char *p, *end;
    unsigned char out[4];
    int used, have;
} moei_chars;

static moei_chars moei_chars_of(moei_span s) {
    moei_chars c;
    memset(&c, 0, sizeof c);
    c.p = s.p;
    c.end = s.end;
    return c;
}

static int moei_chars_next(moei_chars *c) {
    if (c->used < c->have) return c->out[c->used++];
    if (c->p >= c->end) return -1;
    if (*c->p != '\\') return *c->p++;
    c->p++;
    c->have = moei_unescape(&c->p, c->end, c->out);
    c->used = 1;
    return c->have > 0 ? c->out[0] : -1;
}

static int moei_span_is(moei_span s, const char *text) {
    moei_chars c = moei_chars_of(s);
    int x;
    while ((x = moei_chars_next(&c)) >= 0 && *text != '\0' && x == (unsigned char)*text) text++;
    return x < 0 && *text == '\0';
}

static int moei_span_same(moei_span s, moei_span t) {
    moei_chars a = moei_chars_of(s), b = moei_chars_of(t);
    int x, y;
    do {
        x = moei_chars_next(&a);
        y = moei_chars_next(&b);
    } while (x == y && x >= 0);
    return x == y;
}

static moe_status moei_json_string(moei_json *j, moei_span *s) {
    const unsigned char *p, *end = j->bytes + j->end;
    unsigned char out[4];
    moe_status status = moei_json_take(j, '"');
    if (status != MOE_OK) return status;
    for (p = s->p = j->bytes + j->at; p < end && *p != '"';) {
        size_t at = (size_t)(p - j->bytes);
        if (*p < 0x20) return moei_json_refuse(j, at, MOE_ERR_FORMAT, "control character %d in a string", (int)*p);
        if (*p++ == '\\' && !moei_unescape(&p, end, out)) return moei_json_refuse(j, at, MOE_ERR_FORMAT, "malformed escape in a string");
    }
    if (p >= end) return moei_json_refuse(j, j->at, MOE_ERR_FORMAT, "the string does not end");
    s->end = p;
    j->at = (size_t)(p - j->bytes) + 1;
    return MOE_OK;
}

/* The next key of an object, its colon taken too; *more = 0: the object's end was taken instead, the key is empty. */
static moe_status moei_json_key(moei_json *j, int first, moei_span *key, int *more) {
    moe_status status;
    *more = 0;
    key->p = key->end = j->bytes + j->at;
    if (moei_json_peek(j) == '}') {
        j->at++;
        return MOE_OK;
    }
    if (!first && (status = moei_json_take(j, ',')) != MOE_OK) return status;
    if ((status = moei_json_string(j, key)) != MOE_OK || (status = moei_json_take(j, ':')) != MOE_OK) return status;
    *more = 1;
    return MOE_OK;
}

static moe_status moei_json_size(moei_json *j, size_t *value) {
    size_t start;
    int first = moei_json_peek(j), next;
    *value = 0;
    start = j->at;
    while (j->at < j->end && j->bytes[j->at] >= '0' && j->bytes[j->at] <= '9') {
        if (!moei_mul(*value, 10, value) || !moei_add(*value, (size_t)(j->bytes[j->at] - '0'), value))
            return moei_json_refuse(j, start, MOE_ERR_OVERFLOW, "the number does not fit size_t");
        j->at++;
    }
    next = j->at < j->end ? j->bytes[j->at] : ' ';
    if (j->at == start || (first == '0' && j->at > start + 1) || next == '.' || next == 'e' || next == 'E')
        return moei_json_refuse(j, start, MOE_ERR_FORMAT, "a plain non-negative integer is expected");
    return MOE_OK;
}

/* An array of at most max sizes. */
static moe_status moei_json_sizes(moei_json *j, size_t *values, int max, int *count) {
    moe_status status = moei_json_take(j, '[');
    *count = 0;
    if (status == MOE_OK && moei_json_peek(j) == ']') {
        j->at++;
        return MOE_OK;
    }
    for (; status == MOE_OK; status = moei_json_take(j, ',')) {
        if (*count == max) return moei_json_refuse(j, j->at, MOE_ERR_UNSUPPORTED, "the array has more than %d numbers", max);
        if ((status = moei_json_size(j, &values[*count])) != MOE_OK) return status;
        (*count)++;
        if (moei_json_peek(j) == ']') {
            j->at++;
            return MOE_OK;
        }
    }
    return status;
}

/* ---- safetensors: one entry of the header ----------------------------------------------------------------------------- */

static const char *const moei_dtype_names[MOE_DTYPE_COUNT] = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16",
                                                              "I8",  "U64", "U32", "U16",  "U8",  "BOOL"};
static const unsigned char moei_dtype_sizes[MOE_DTYPE_COUNT] = {8, 4, 2, 2, 8, 4, 2, 1, 8, 4, 2, 1, 1};

static moe_status moei_file_dtype(moei_json *j, int *dtype) {
    char shown[52];
    moei_span s;
    moe_status status = moei_json_string(j, &s);
    if (status != MOE_OK) return status;
    for (*dtype = 0; *dtype < MOE_DTYPE_COUNT; (*dtype)++)
        if (moei_span_is(s, moei_dtype_names[*dtype])) return MOE_OK;
    if (j->any_dtype) return MOE_OK;
    return moei_json_refuse(j, (size_t)(s.p - j->bytes), MOE_ERR_UNSUPPORTED, "unknown dtype '%s'", moei_span_text(s, shown));
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
static moe_status moei_file_place(moei_json *j, size_t at, const moe_file *file, moe_file_tensor *t, const size_t range[2]) {
    size_t start = 8 + file->header_size, size = file->size - start;
    int i, known = t->dtype < MOE_DTYPE_COUNT;
    t->count = 1;
    for (i = 0; i < t->n_dims; i++)
        if (!moei_mul(t->count, t->shape[i], &t->count))
            return moei_json_refuse(j, at, MOE_ERR_OVERFLOW, "the shape has more elements than size_t holds");
    if (!moei_mul(t->count, known ? moei_dtype_sizes[t->dtype] : 0, &t->bytes))
        return moei_json_refuse(j, at, MOE_ERR_OVERFLOW, "the shape needs more bytes than size_t holds");
    if (range[1] > size)
        return moei_json_refuse(j, at, MOE_ERR_FORMAT, "data_offsets [%z, %z] go beyond the %z bytes of data", range[0], range[1], size);
    if (range[0] > range[1])
        return moei_json_refuse(j, at, MOE_ERR_FORMAT, "data_offsets [%z, %z] end before they begin", range[0], range[1]);
    if (!known) t->bytes = range[1] - range[0];
    if (range[1] - range[0] != t->bytes)
        return moei_json_refuse(j, at, MOE_ERR_FORMAT, "the shape needs %z bytes, data_offsets [%z, %z] hold another size", t->bytes,
                                range[0], range[1]);
    if (!file->of_header) t->data = file->bytes + start + range[0];
    return MOE_OK;
}

enum { MOEI_ENTRY_END = 0, MOEI_ENTRY_TENSOR = 1, MOEI_ENTRY_METADATA = 2 };

/* The next entry of the header's object. A tensor is read whole, and *begin gets where in the data it lies; of the metadata only the key is taken. Where
   there is no tensor, *t is an empty one. */
static moe_status moei_file_entry(moei_json *j, int first, const moe_file *file, moe_file_tensor *t, size_t *begin, int *kind) {
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
    return moei_file_place(j, at, file, t, range);
}

/* The object of texts; *count gets how many. */
static moe_status moei_file_metadata_object(moei_json *j, moe_file *file, size_t *count) {
    moei_span key, value;
    int first, more;
    moe_status status;
    (void)moei_json_peek(j);
    if (file->metadata_at != 0) return moei_json_refuse(j, j->at, MOE_ERR_FORMAT, "__metadata__ occurs twice");
    file->metadata_at = j->at;
    if ((status = moei_json_take(j, '{')) != MOE_OK) return status;
    for (first = 1, *count = 0;; first = 0, ++*count) {
        if ((status = moei_json_key(j, first, &key, &more)) != MOE_OK) return status;
        if (!more) break;
        if (*count == MOE_FILE_MAX_TENSORS) return moei_json_refuse(j, j->at, MOE_ERR_UNSUPPORTED, "too many keys in __metadata__");
        if ((status = moei_json_string(j, &value)) != MOE_OK) return status;
    }
    file->metadata_end = j->at;
    return MOE_OK;
}

/* ---- safetensors: names ----------------------------------------------------------------------------------------------- */

static uint64_t moei_file_mix(uint64_t x) {
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static uint64_t moei_file_hash_step(uint64_t hash, int c) { return (hash ^ (uint64_t)(unsigned)c) * UINT64_C(0x100000001b3); }

/* A walk over the keys of an object that was checked before: the header's (values are objects) or the metadata's (texts). */
typedef struct moei_names {
    const unsigned char *bytes;
    size_t at, end;
    size_t skip_at, skip_end; /* the metadata object inside the header's; 0: none, or this walk is inside it */
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

/* Moves behind the next byte c; 0 when there is none. */
static int moei_names_seek(moei_names *w, int c) {
    while (w->at < w->end)
        if (w->bytes[w->at++] == c) return 1;
    return 0;
}

/* A string with its hash, over the unescaped bytes; w->at moves from one quote to behind the other. */
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
    *hash = moei_file_mix(h);
    return 1;
}

/* The next key; w->at is then behind its value. 0 at the end. */
static int moei_names_next(moei_names *w, moei_span *name, uint64_t *hash) {
    moei_span value;
    uint64_t unused;
    for (;;) {
        if (!moei_names_string(w, name, hash)) return 0;
        if (w->texts) return moei_names_string(w, &value, &unused);
        if (!moei_names_seek(w, '{')) return 0;
        if (w->at - 1 != w->skip_at) return moei_names_seek(w, '}'); /* no string inside a tensor's object has one */
        w->at = w->skip_end;
    }
}

/* Is there the same key before name? */
static int moei_names_before(moei_names w, moei_span name) {
    moei_span other;
    uint64_t unused;
    while (moei_names_next(&w, &other, &unused) && other.p != name.p)
        if (moei_span_same(other, name)) return 1;
    return 0;
}

enum { MOEI_NAMES_SLOTS = 2048, MOEI_NAMES_PER_PASS = 1536, MOEI_NAMES_DOUBTS = 32 };

/* NULL when no two of the n keys are equal after unescaping, else what is wrong with *name. Without memory of our own that takes
   several walks: each keeps 16 bits of hash of one part of the names in a table on the stack, and where those agree the names
   themselves are compared. Names drawn to fill one part, or to agree too often, are refused: the time stays bounded. */
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

/* The key text in the walk w; 0: not there. */
static int moei_names_find(moei_names *w, const char *text, moei_span *name) {
    uint64_t hash, wanted = UINT64_C(0xcbf29ce484222325);
    const char *p;
    for (p = text; *p != '\0'; p++) wanted = moei_file_hash_step(wanted, (unsigned char)*p);
    wanted = moei_file_mix(wanted);
    while (moei_names_next(w, name, &hash))
        if (hash == wanted && moei_span_is(*name, text)) return 1;
    return 0;
}

/* ---- safetensors: reading --------------------------------------------------------------------------------------------- */

/* Whether the tensors cover the data exactly, in whatever order the header lists them, without sorting. Take each as a step from
   its begin to its end. If the begins and the end of the data are together the same collection of numbers as the ends and 0, the
   steps make up one path from 0 to the end and closed rounds; a step never goes back, so a round is an empty tensor, and the path
   is the tiling. Collections are compared by the sum of a 64-bit mix of their numbers. The mix depends on the whole header, so
   that offsets cannot simply be drawn to fool it; even then a tensor could only show bytes that belong to another. */
typedef struct moei_tiles {
    uint64_t seed, begins, ends;
    size_t covered;      /* bytes of all tensors so far */
    size_t last;         /* end of the tensor before */
    moei_span odd;       /* the first that does not begin there: in files written in order, the culprit */
    size_t odd_at;
} moei_tiles;

static void moei_tiles_add(moei_tiles *s, const moe_file_tensor *t, size_t begin, size_t at) {
    s->begins += moei_file_mix(s->seed + begin);
    s->ends += moei_file_mix(s->seed + begin + t->bytes);
    s->covered += t->bytes;
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
        return moei_json_refuse(j, at, MOE_ERR_FORMAT, "a hole: the tensors cover %z of %z bytes of data", s->covered, size);
    if (s->begins + moei_file_mix(s->seed + size) != s->ends + moei_file_mix(s->seed))
        return moei_json_refuse(j, at, MOE_ERR_FORMAT, "the tensors overlap and leave a hole");
    return MOE_OK;
}

/* A number beyond int64 too, which the format of moei_error would show as negative. */
static const char *moei_unsigned_text(uint64_t value, char out[24]) {
    moei_text t;
    t.out = out, t.room = 24, t.length = 0;
    if (value >= 10) moei_put_integer(&t, (int64_t)(value / 10));
    moei_put_integer(&t, (int64_t)(value % 10));
    return out;
}

/* The eight bytes of the header's length, and room for it. */
static moe_status moei_file_header(moei_json *j, moe_file *file) {
    uint64_t length = 0;
    int i;
    if (file->size < 8) return moei_json_refuse(j, 0, MOE_ERR_FORMAT, "the file ends within its first 8 bytes, it has %z", file->size);
    for (i = 0; i < 8; i++) length |= (uint64_t)file->bytes[i] << 8 * i;
    if (length > MOEI_FILE_MAX_HEADER) {
        char digits[24];
        return moei_json_refuse(j, 0, MOE_ERR_FORMAT, "the header length is %s, allowed are 100000000", moei_unsigned_text(length, digits));
    }
    if (length > file->size - 8)
        return moei_json_refuse(j, 0, MOE_ERR_FORMAT, "the header length is %z, but only %z bytes follow", (size_t)length, file->size - 8);
    file->header_size = (size_t)length;
    j->end = 8 + file->header_size;
    j->at = 8;
    if (length == 0 || file->bytes[8] != '{') return moei_json_refuse(j, 8, MOE_ERR_FORMAT, "the header does not begin with {");
    j->at = MOEI_FILE_START;
    return MOE_OK;
}

/* All entries up to the closing brace, and the padding behind it. */
static moe_status moei_file_entries(moei_json *j, moe_file *file, moei_tiles *tiles, size_t *n_metadata) {
    size_t start = 8 + file->header_size, size = file->size - start;
    moe_file_tensor t;
    int first, kind;
    moe_status status;
    for (first = 1;; first = 0) {
        size_t at = j->at, begin;
        if ((status = moei_file_entry(j, first, file, &t, &begin, &kind)) != MOE_OK) return status;
        if (kind == MOEI_ENTRY_END) break;
        if (kind == MOEI_ENTRY_METADATA) {
            if ((status = moei_file_metadata_object(j, file, n_metadata)) != MOE_OK) return status;
            continue;
        }
        if (file->n_tensors == MOE_FILE_MAX_TENSORS)
            return moei_json_refuse(j, at, MOE_ERR_UNSUPPORTED, "the file has more than %z tensors", (size_t)MOE_FILE_MAX_TENSORS);
        file->n_tensors++;
        if (t.bytes > size - tiles->covered)
            return moei_json_refuse(j, at, MOE_ERR_FORMAT, "tensors overlap: together they are larger than the data, %z bytes", size);
        moei_tiles_add(tiles, &t, begin, at);
    }
    for (; j->at < j->end; j->at++)
        if (j->bytes[j->at] != ' ') return moei_json_refuse(j, j->at, MOE_ERR_FORMAT, "only spaces may follow the header's object");
    return MOE_OK;
}

static moe_status moei_file_unique(moei_json *j, const moe_file *file, int metadata, size_t n) {
    moei_span name;
    const char *problem = n > 1 ? moei_names_problem(moei_names_of(file, metadata), n, &name) : NULL;
    char shown[52];
    if (problem == NULL) return MOE_OK;
    j->name.p = NULL;
    return moei_json_refuse(j, (size_t)(name.p - file->bytes), MOE_ERR_FORMAT, "%s '%s': %s", metadata ? "metadata" : "tensor",
                            moei_span_text(name, shown), problem);
}

/* Of a file of size bytes these are all, or with of_header the first 8 and the header behind them. */
static moe_status moei_file_check(moe_file *file, const unsigned char *bytes, size_t size, int of_header, moe_error *error) {
    moe_file f;
    moei_json j;
    moei_tiles tiles;
    size_t i, n_metadata = 0;
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
    tiles.seed = moei_file_mix(tiles.seed);
    if ((status = moei_file_entries(&j, &f, &tiles, &n_metadata)) != MOE_OK ||
        (status = moei_tiles_check(&tiles, &j, size - j.end)) != MOE_OK ||
        (status = moei_file_unique(&j, &f, 0, f.n_tensors)) != MOE_OK || (status = moei_file_unique(&j, &f, 1, n_metadata)) != MOE_OK)
        return status;
    f.at = MOEI_FILE_START;
    *file = f;
    return MOE_OK;
}

MOE_API moe_status moe_file_open(moe_file *file, const void *bytes, size_t size, moe_error *error) {
    if (file == NULL || bytes == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "file or bytes is NULL");
    return moei_file_check(file, (const unsigned char *)bytes, size, 0, error);
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
    j = moei_file_json(file, file->at);
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

MOE_API moe_status moe_file_next(moe_file *file, moe_file_tensor *tensor) {
    size_t begin;
    if (file == NULL || tensor == NULL) return MOE_ERR_ARGUMENT;
    return moei_file_next(file, tensor, &begin);
}

MOE_API void moe_file_rewind(moe_file *file) {
    if (file != NULL) file->at = MOEI_FILE_START;
}

MOE_API moe_status moe_file_find(const moe_file *file, const char *name, moe_file_tensor *tensor) {
    moei_names w;
    moei_span span;
    moei_json j;
    moe_file_tensor t;
    moe_status status;
    size_t begin;
    int kind;
    if (file == NULL || name == NULL || tensor == NULL) return MOE_ERR_ARGUMENT;
    if (file->n_tensors == 0) return MOE_ERR_NOT_FOUND;
    w = moei_names_of(file, 0);
    if (!moei_names_find(&w, name, &span)) return MOE_ERR_NOT_FOUND;
    j = moei_file_json(file, (size_t)(span.p - file->bytes) - 1);
    if ((status = moei_file_entry(&j, 1, file, &t, &begin, &kind)) != MOE_OK) return status;
    if (kind != MOEI_ENTRY_TENSOR) return MOE_ERR_NOT_FOUND;
    *tensor = t;
    return MOE_OK;
}

MOE_API moe_status moe_file_metadata(const moe_file *file, const char *key, char *value, size_t room, size_t *length) {
    moei_names w, whole;
    moei_span span;
    moei_chars chars;
    uint64_t unused;
    size_t n = 0;
    int c;
    if (file == NULL || key == NULL || (value == NULL && room > 0)) return MOE_ERR_ARGUMENT;
    if (file->metadata_at == 0) return MOE_ERR_NOT_FOUND;
    w = whole = moei_names_of(file, 1);
    if (!moei_names_find(&w, key, &span)) return MOE_ERR_NOT_FOUND;
    w = whole;
    w.at = (size_t)(span.end - file->bytes) + 1; /* the value is the string behind the key */
    if (!moei_names_string(&w, &span, &unused)) return MOE_ERR_NOT_FOUND;
    for (chars = moei_chars_of(span); moei_chars_next(&chars) >= 0;) n++;
    if (length != NULL) *length = n;
    if (n >= room) return MOE_ERR_SPACE;
    for (chars = moei_chars_of(span), n = 0; n + 1 < room && (c = moei_chars_next(&chars)) >= 0;) value[n++] = (char)c;
    value[n] = '\0';
    return MOE_OK;
}

/* ---- safetensors: values ---------------------------------------------------------------------------------------------- */

static uint64_t moei_load(const unsigned char *p, int bytes) {
    uint64_t v = 0;
    int i;
    for (i = 0; i < bytes; i++) v |= (uint64_t)p[i] << 8 * i;
    return v;
}

/* Two's complement of so many bytes, without a conversion that the implementation defines. */
static int64_t moei_load_signed(const unsigned char *p, int bytes) {
    uint64_t v = moei_load(p, bytes), sign = (uint64_t)1 << (8 * bytes - 1);
    return (v & sign) == 0 ? (int64_t)v : -(int64_t)(sign - 1 - (v & (sign - 1))) - 1;
}

/* The nearest real number. C leaves a double beyond the range of float undefined: it becomes infinite here, as in IEEE 754. */
static moe_real moei_real_of_bits(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
#if !MOE_REAL_IS_DOUBLE
    {
        uint64_t size = bits & UINT64_C(0x7fffffffffffffff), infinite = UINT64_C(0x7ff0000000000000);
        if (size >= UINT64_C(0x47efffffe0000000) && size < infinite) { /* from the largest float on */
            int round_up = size >= UINT64_C(0x47effffff0000000);
            return moei_binary32((uint32_t)(bits >> 63) << 31 | (round_up ? 0x7f800000u : 0x7f7fffffu));
        }
    }
#endif
    return (moe_real)x;
}

static int moei_dtype_is_float(int dtype) { return dtype <= MOE_DTYPE_BF16; }

static int moei_dtype_is_signed(int dtype) { return dtype >= MOE_DTYPE_I64 && dtype <= MOE_DTYPE_I8; }

static moe_status moei_values_check(const moe_file_tensor *t, size_t first, size_t count, const void *values) {
    if (t == NULL || (values == NULL && count > 0) || t->dtype < 0 || t->dtype >= MOE_DTYPE_COUNT) return MOE_ERR_ARGUMENT;
    if (first > t->count || count > t->count - first) return MOE_ERR_SHAPE;
    if (t->bytes / moei_dtype_sizes[t->dtype] < t->count || (t->data == NULL && count > 0)) return MOE_ERR_ARGUMENT;
    return MOE_OK;
}

MOE_API moe_status moe_file_values(const moe_file_tensor *tensor, size_t first, size_t count, moe_real *values) {
    moe_status status = moei_values_check(tensor, first, count, values);
    const unsigned char *p;
    int dtype, size;
    size_t i;
    if (status != MOE_OK || count == 0) return status;
    dtype = tensor->dtype;
    size = moei_dtype_sizes[dtype];
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
        for (i = 0; i < count; i++) values[i] = p[i] != 0 ? MOEI_R(1.0) : MOEI_R(0.0);
    else if (moei_dtype_is_signed(dtype))
        for (i = 0; i < count; i++) values[i] = (moe_real)moei_load_signed(p + (size_t)size * i, size);
    else
        for (i = 0; i < count; i++) values[i] = (moe_real)moei_load(p + (size_t)size * i, size);
    return MOE_OK;
}

MOE_API moe_status moe_file_integers(const moe_file_tensor *tensor, size_t first, size_t count, int64_t *values) {
    moe_status status = moei_values_check(tensor, first, count, values);
    const unsigned char *p;
    int dtype, size;
    size_t i;
    if (status != MOE_OK) return status;
    dtype = tensor->dtype;
    if (moei_dtype_is_float(dtype)) return MOE_ERR_FORMAT;
    if (count == 0) return MOE_OK;
    size = moei_dtype_sizes[dtype];
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

#ifndef MOE_NO_TRAIN

/* ---- stb_ds: growing lists off the inference path ---------------------------------------------------------------------
   Lists have the form of stb_ds arrays, but grow through moei_list_reserve: stb_ds does not check its reallocation, and knows no allocator.
   So only its declarations are included, never its implementation, and no function of it is called or linked. MOE_STB_DS_PATH names the
   header, quotes or angle brackets included. A program that wants the short names of stb_ds includes it before this file. */

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
#include "stb_ds.h"
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

/* The block in front of a list's elements. The elements' alignment is that of the header, like malloc's; hence no warning. */
static stbds_array_header *moei_list_header(void *list) { return list != NULL ? stbds_header(list) : NULL; }

/* How many elements a list (NULL: an empty one) has. */
MOEI_TOOL size_t moei_list_length(const void *list) { return list != NULL ? ((const stbds_array_header *)list - 1)->length : 0; }

/* Makes room for capacity elements in all in the list whose pointer lies at list. Grows at least by half, so that reserving one
   more each time is cheap. Returns 0 without memory; the list is then as it was. The list belongs to a from its first reserve on. */
MOEI_TOOL int moei_list_reserve(const moe_allocator *a, void *list, size_t element_size, size_t capacity) {
    stbds_array_header *h;
    void *elements;
    size_t old_size = 0, size, grown;
    memcpy(&elements, list, sizeof elements); /* a pointer of whatever type: its bytes, not an object of type void * */
    h = moei_list_header(elements);
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

/* Frees a list that moei_list_reserve made, and sets its pointer to NULL. */
MOEI_TOOL void moei_list_free(const moe_allocator *a, void *list, size_t element_size) {
    stbds_array_header *h;
    void *elements;
    memcpy(&elements, list, sizeof elements);
    h = moei_list_header(elements);
    if (h != NULL) (void)moei_resize(a, h, sizeof *h + h->capacity * element_size, 0);
    elements = NULL;
    memcpy(list, &elements, sizeof elements);
}

/* Appends n bytes to a list of characters; 0 without memory. */
MOEI_TOOL int moei_list_append(const moe_allocator *a, char **list, const char *s, size_t n) {
    size_t need;
    if (n == 0) return 1;
    if (!moei_add(moei_list_length(*list), n, &need) || !moei_list_reserve(a, list, 1, need)) return 0;
    memcpy(*list + moei_list_length(*list), s, n);
    moei_list_header(*list)->length += n;
    return 1;
}

#if defined(__clang__)
#pragma clang diagnostic pop
#elif defined(__GNUC__) && !defined(__PCC__)
#pragma GCC diagnostic pop
#elif defined(_MSC_VER)
#pragma warning(pop)
#endif

/* ---- safetensors: writing --------------------------------------------------------------------------------------------- */

/* The growing header; after a failed allocation all else is ignored. */
typedef struct moei_header {
    const moe_allocator *allocator;
    char *text; /* a list */
    int failed;
} moei_header;

static size_t moei_header_length(const moei_header *h) { return moei_list_length(h->text); }

static void moei_header_put(moei_header *h, const char *s, size_t n) {
    if (!h->failed && !moei_list_append(h->allocator, &h->text, s, n)) h->failed = 1;
}

static void moei_header_put_text(moei_header *h, const char *s) { moei_header_put(h, s, moei_strlen(s)); }

static void moei_header_put_size(moei_header *h, size_t value) {
    char digits[24];
    moei_text t;
    t.out = digits, t.room = sizeof digits, t.length = 0;
    moei_put_integer(&t, (int64_t)value);
    moei_header_put(h, digits, t.length);
}

/* A quoted string. */
static void moei_header_put_string(moei_header *h, const char *s) {
    const char *run = s; /* what needs no escape is copied in runs */
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

/* The character that begins at *text, which goes on behind it; 0 for what is no UTF-8: a stray or missing continuation, a longer form than needed, a
   surrogate, anything beyond U+10FFFF. *text then goes on by a byte. */
static int moei_next_utf8(const char **text, uint32_t *code) {
    const unsigned char *p = (const unsigned char *)*text;
    uint32_t c = *p++, least = 0;
    int more = c < 0x80u ? 0 : c >= 0xC0u && c < 0xE0u ? 1 : c >= 0xE0u && c < 0xF0u ? 2 : c >= 0xF0u && c < 0xF8u ? 3 : -1, left = more;
    ++*text;
    if (more < 0) return 0;
    if (more > 0) c &= 63u >> more, least = more == 1 ? 0x80u : more == 2 ? 0x800u : 0x10000u;
    for (; left > 0; left--, c = c << 6 | (*p++ & 63u))
        if ((*p & 0xC0u) != 0x80u) return 0;
    if (c < least || c > 0x10FFFFu || (c >= 0xD800u && c <= 0xDFFFu)) return 0;
    *text += more, *code = c;
    return 1;
}

static int moei_is_utf8(const char *s) {
    uint32_t code;
    while (*s != '\0')
        if (!moei_next_utf8(&s, &code)) return 0;
    return 1;
}

/* Checks one tensor; *bytes gets its size in the file. */
static moe_status moei_write_check(const moe_tensor *t, size_t index, size_t *bytes, moe_error *error) {
    size_t count = 1;
    int i;
    if (moei_memchr(t->name, '\0', MOE_NAME_SIZE) == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "tensor %z: the name is not terminated", index);
    if (!moei_is_utf8(t->name)) return moei_error(error, MOE_ERR_ARGUMENT, "tensor %z: the name is not UTF-8", index);
    if (moei_strcmp(t->name, "__metadata__") == 0)
        return moei_error(error, MOE_ERR_ARGUMENT, "tensor %z: the name __metadata__ is reserved", index);
    if (t->n_dims < 0 || t->n_dims > MOE_MAX_DIMS)
        return moei_error(error, MOE_ERR_ARGUMENT, "tensor %z, %s: n_dims = %d, allowed are 0 to %d", index, t->name, t->n_dims,
                          (int)MOE_MAX_DIMS);
    for (i = 0; i < t->n_dims; i++)
        if (!moei_mul(count, t->shape[i], &count)) break;
    if (i < t->n_dims || !moei_mul(count, sizeof(moe_real), bytes))
        return moei_error(error, MOE_ERR_OVERFLOW, "tensor %z, %s: the shape needs more bytes than size_t holds", index, t->name);
    if (count != t->count)
        return moei_error(error, MOE_ERR_SHAPE, "tensor %z, %s: count = %z, but the shape has %z elements", index, t->name, t->count,
                          count);
    if (t->data == NULL && count > 0) return moei_error(error, MOE_ERR_ARGUMENT, "tensor %z, %s: data is NULL", index, t->name);
    return MOE_OK;
}

static moe_status moei_header_metadata(moei_header *h, const moe_metadata *metadata, size_t n, moe_error *error) {
    size_t i;
    moei_header_put_text(h, "\"__metadata__\":{");
    for (i = 0; i < n; i++) {
        if (metadata[i].key == NULL || metadata[i].value == NULL)
            return moei_error(error, MOE_ERR_ARGUMENT, "metadata %z: key or value is NULL", i);
        if (!moei_is_utf8(metadata[i].key) || !moei_is_utf8(metadata[i].value))
            return moei_error(error, MOE_ERR_ARGUMENT, "metadata %z: key or value is not UTF-8", i);
        if (i > 0) moei_header_put(h, ",", 1);
        moei_header_put_string(h, metadata[i].key);
        moei_header_put(h, ":", 1);
        moei_header_put_string(h, metadata[i].value);
    }
    moei_header_put(h, "}", 1);
    return MOE_OK;
}

/* What follows a tensor's name. */
static void moei_header_put_entry(moei_header *h, int dtype, const size_t *shape, int n_dims, size_t begin, size_t end) {
    int d;
    moei_header_put_text(h, ":{\"dtype\":\"");
    moei_header_put_text(h, moei_dtype_names[dtype]);
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

static moe_status moei_header_tensors(moei_header *h, const moe_tensor *tensors, size_t n, int comma, moe_error *error) {
    size_t i, begin = 0, bytes = 0, end;
    for (i = 0; i < n; i++, begin = end) {
        const moe_tensor *t = &tensors[i];
        moe_status status = moei_write_check(t, i, &bytes, error);
        if (status != MOE_OK) return status;
        if (!moei_add(begin, bytes, &end)) return moei_error(error, MOE_ERR_OVERFLOW, "tensor %z, %s: the file is too large", i, t->name);
        if (comma || i > 0) moei_header_put(h, ",", 1);
        moei_header_put_string(h, t->name);
        moei_header_put_entry(h, MOE_REAL_IS_DOUBLE ? MOE_DTYPE_F64 : MOE_DTYPE_F32, t->shape, t->n_dims, begin, end);
    }
    return MOE_OK;
}

/* The finished text is walked by the reader's own check. */
static moe_status moei_header_unique(const moei_header *h, const moei_names *where, size_t n, moe_error *error) {
    moei_names w = *where;
    moei_span name;
    char shown[52];
    const char *problem;
    w.bytes = (const unsigned char *)h->text;
    problem = n > 1 ? moei_names_problem(w, n, &name) : NULL;
    if (problem == NULL) return MOE_OK;
    return moei_error(error, MOE_ERR_ARGUMENT, "%s '%s': %s", w.texts ? "metadata" : "tensor", moei_span_text(name, shown), problem);
}

/* The object's last brace, spaces up to a multiple of 8, and the length in the first eight bytes. */
static moe_status moei_header_end(moei_header *h, moe_error *error) {
    size_t length;
    int i;
    moei_header_put(h, "}", 1);
    moei_header_put(h, "       ", (8 - moei_header_length(h) % 8) % 8);
    if (h->failed) return moei_error(error, MOE_ERR_MEMORY, "out of memory: the header of the file");
    length = moei_header_length(h) - 8;
    if (length > MOEI_FILE_MAX_HEADER)
        return moei_error(error, MOE_ERR_ARGUMENT, "names and metadata need a header of %z bytes, allowed are 100000000", length);
    for (i = 0; i < 8; i++) h->text[i] = (char)(unsigned char)((uint64_t)length >> 8 * i & 0xffu);
    return MOE_OK;
}

/* Builds the whole header: the length's eight bytes, the object, and spaces up to a multiple of 8. */
static moe_status moei_header_build(moei_header *h, const moe_tensor *tensors, size_t n_tensors, const moe_metadata *metadata,
                                    size_t n_metadata, moe_error *error) {
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

static moe_status moei_write_reals(moe_stream *stream, const moe_real *x, size_t n) {
    unsigned char out[256 * sizeof(moe_real)];
    while (n > 0) {
        size_t i, b, block = n < 256 ? n : 256;
        moe_status status;
        for (i = 0; i < block; i++) {
#if MOE_REAL_IS_DOUBLE
            uint64_t bits;
#else
            uint32_t bits;
#endif
            memcpy(&bits, &x[i], sizeof bits);
            for (b = 0; b < sizeof bits; b++) out[i * sizeof bits + b] = (unsigned char)(bits >> 8 * b & 0xffu);
        }
        if ((status = stream->write(stream->ctx, out, block * sizeof(moe_real))) != MOE_OK) return status;
        x += block;
        n -= block;
    }
    return MOE_OK;
}

MOE_API moe_status moe_file_write(moe_stream *stream, const moe_tensor *tensors, size_t n_tensors, const moe_metadata *metadata,
                                  size_t n_metadata, const moe_allocator *allocator, moe_error *error) {
    moei_header h;
    moe_status status;
    size_t i;
    if (stream == NULL || stream->write == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "stream or its write is NULL");
    if ((tensors == NULL && n_tensors > 0) || (metadata == NULL && n_metadata > 0))
        return moei_error(error, MOE_ERR_ARGUMENT, "tensors or metadata is NULL");
    if (n_tensors > MOE_FILE_MAX_TENSORS || n_metadata > MOE_FILE_MAX_TENSORS)
        return moei_error(error, MOE_ERR_ARGUMENT, "%z tensors, %z metadata: a file takes %z of each", n_tensors, n_metadata,
                          (size_t)MOE_FILE_MAX_TENSORS);
    if (!moei_can_allocate(allocator)) return moei_error(error, MOE_ERR_ARGUMENT, "allocator is NULL, and MOE_NO_MALLOC leaves no other");
    memset(&h, 0, sizeof h);
    h.allocator = allocator;
    status = moei_header_build(&h, tensors, n_tensors, metadata, n_metadata, error);
    if (status == MOE_OK) {
        status = stream->write(stream->ctx, h.text, moei_header_length(&h));
        for (i = 0; i < n_tensors && status == MOE_OK; i++) status = moei_write_reals(stream, tensors[i].data, tensors[i].count);
        if (status != MOE_OK) (void)moei_error(error, status, "the stream failed: %s", moe_status_text(status));
    }
    moei_list_free(allocator, &h.text, 1);
    return status;
}

#endif /* MOE_NO_TRAIN */

#ifdef __cplusplus
extern "C" {
#endif

/* ==== experts as data: each kind is a short program of steps over named activations ======================================= */

enum { MOEI_STEP_MATMUL = 0, MOEI_STEP_ACT, MOEI_STEP_GATED };
enum { MOEI_X = -1 }; /* the step reads the expert's input */

/* to = W from + bias;  to = act(from);  to = act(from) * second. The steps of one stage need of each other's results only the columns that they make
   themselves, so they pass a few columns together. */
typedef struct moei_step {
    int op, stage, to, from, second;
    int weight, bias; /* places of the tensors; bias -1: none */
} moei_step;

enum { MOEI_MAX_STEPS = 6 };

typedef struct moei_expert {
    int n_steps;
    moei_step steps[MOEI_MAX_STEPS];
    int up_is, product_is; /* what these names mean for a kind without a linear branch; -1: nothing */
} moei_expert;

/* The row after the kinds of experts is the shared expert. */
enum { MOEI_SHARED = MOE_EXPERT_COUNT };

/* The activation of swiglu and factorised as a node of its own is made only for a score that reads it. */
static const moei_expert moei_experts[MOE_EXPERT_COUNT + 1] = {
    /* swiglu */
    {5,
     {{MOEI_STEP_MATMUL, 0, MOE_NODE_GATE, MOEI_X, 0, MOE_EXPERTS_GATE, MOE_EXPERTS_GATE_BIAS},
      {MOEI_STEP_ACT, 0, MOE_NODE_ACT, MOE_NODE_GATE, 0, 0, 0},
      {MOEI_STEP_MATMUL, 0, MOE_NODE_UP, MOEI_X, 0, MOE_EXPERTS_UP, MOE_EXPERTS_UP_BIAS},
      {MOEI_STEP_GATED, 0, MOE_NODE_PRODUCT, MOE_NODE_GATE, MOE_NODE_UP, 0, 0},
      {MOEI_STEP_MATMUL, 1, MOE_NODE_OUTPUT, MOE_NODE_PRODUCT, 0, MOE_EXPERTS_DOWN, MOE_EXPERTS_DOWN_BIAS},
      {0, 0, 0, 0, 0, 0, 0}},
     MOE_NODE_UP,
     MOE_NODE_PRODUCT},
    /* mlp */
    {3,
     {{MOEI_STEP_MATMUL, 0, MOE_NODE_GATE, MOEI_X, 0, MOE_EXPERTS_FC1_WEIGHT, MOE_EXPERTS_FC1_BIAS},
      {MOEI_STEP_ACT, 0, MOE_NODE_ACT, MOE_NODE_GATE, 0, 0, 0},
      {MOEI_STEP_MATMUL, 1, MOE_NODE_OUTPUT, MOE_NODE_ACT, 0, MOE_EXPERTS_FC2_WEIGHT, MOE_EXPERTS_FC2_BIAS},
      {0, 0, 0, 0, 0, 0, 0},
      {0, 0, 0, 0, 0, 0, 0},
      {0, 0, 0, 0, 0, 0, 0}},
     MOE_NODE_GATE,
     MOE_NODE_ACT},
    /* linear */
    {1,
     {{MOEI_STEP_MATMUL, 0, MOE_NODE_OUTPUT, MOEI_X, 0, MOE_EXPERTS_WEIGHT, MOE_EXPERTS_BIAS},
      {0, 0, 0, 0, 0, 0, 0},
      {0, 0, 0, 0, 0, 0, 0},
      {0, 0, 0, 0, 0, 0, 0},
      {0, 0, 0, 0, 0, 0, 0},
      {0, 0, 0, 0, 0, 0, 0}},
     -1,
     -1},
    /* factorised */
    {6,
     {{MOEI_STEP_MATMUL, 0, MOE_NODE_LOW, MOEI_X, 0, MOE_EXPERTS_REDUCE, -1},
      {MOEI_STEP_MATMUL, 1, MOE_NODE_GATE, MOE_NODE_LOW, 0, MOE_EXPERTS_EXPAND, -1},
      {MOEI_STEP_ACT, 1, MOE_NODE_ACT, MOE_NODE_GATE, 0, 0, 0},
      {MOEI_STEP_MATMUL, 1, MOE_NODE_UP, MOEI_X, 0, MOE_EXPERTS_UP, -1},
      {MOEI_STEP_GATED, 1, MOE_NODE_PRODUCT, MOE_NODE_GATE, MOE_NODE_UP, 0, 0},
      {MOEI_STEP_MATMUL, 2, MOE_NODE_OUTPUT, MOE_NODE_PRODUCT, 0, MOE_EXPERTS_DOWN, -1}},
     MOE_NODE_UP,
     MOE_NODE_PRODUCT},
    /* the shared expert */
    {4,
     {{MOEI_STEP_MATMUL, 0, MOE_NODE_GATE, MOEI_X, 0, MOE_SHARED_GATE, -1},
      {MOEI_STEP_MATMUL, 0, MOE_NODE_UP, MOEI_X, 0, MOE_SHARED_UP, -1},
      {MOEI_STEP_GATED, 0, MOE_NODE_PRODUCT, MOE_NODE_GATE, MOE_NODE_UP, 0, 0},
      {MOEI_STEP_MATMUL, 1, MOE_NODE_OUTPUT, MOE_NODE_PRODUCT, 0, MOE_SHARED_DOWN, -1},
      {0, 0, 0, 0, 0, 0, 0},
      {0, 0, 0, 0, 0, 0, 0}},
     MOE_NODE_UP,
     MOE_NODE_PRODUCT}};

/* ==== the configuration of a layer ========================================================================================= */

static const char *const moei_expert_names[] = {"swiglu", "mlp", "linear", "factorised", NULL};
static const char *const moei_kernel_names[] = {"auto", "c", "avx2", "avx512", "neon", "wasm", NULL};

#define MOEI_L moe_layer_config

/* The router's rows come first: its configuration stands at offset 0. */
struct moei_returned;

/* What layers do with a transport. They reach it through moe_transport_begin alone, so that a program without a transport does not link it. */
typedef struct moei_ways {
    moe_status (*agree)(const moe_layer_config *config, uint64_t seed, moe_error *error);
    moe_status (*size)(const moe_layer *layer, size_t n, int training, size_t *bytes);
    moe_status (*forward)(const moe_layer *layer, const moe_call *call, moe_real *y, void *work, size_t work_size, moe_layer_pass *pass);
    moe_status (*backward)(const moe_layer *layer, const struct moei_returned *back, moe_real *dx, moe_real *d_router_x, moe_layer_pass *pass);
} moei_ways;

static const moe_field moei_layer_fields[] = {
    MOEI_ROUTER_FIELDS,
    MOEI_INT(MOEI_L, d_out, 1, MOE_MAX_WIDTH, "width of the output"),
    MOEI_CHOICE(MOEI_L, expert, MOE_EXPERT_COUNT, moei_expert_names, "kind of experts"),
    MOEI_INT(MOEI_L, d_ff, 1, MOE_MAX_WIDTH, "hidden width of an expert"),
    MOEI_INT(MOEI_L, d_low, 1, MOE_MAX_WIDTH, "rows of reduce in a factorised expert"),
    MOEI_CHOICE(MOEI_L, act, MOE_ACT_COUNT, moei_act_names, "activation of mlp experts"),
    MOEI_FLAG(MOEI_L, no_expert_bias, "mlp and linear experts have no biases"),
    MOEI_REAL(MOEI_L, swiglu_alpha, 1e-6, 1e6, "alpha of swiglu experts"),
    MOEI_REAL(MOEI_L, swiglu_limit, 1e-6, 1e6, "limit of swiglu experts"),
    MOEI_REAL(MOEI_L, swiglu_offset, -1e6, 1e6, "offset of swiglu experts"),
    MOEI_FLAG(MOEI_L, expert_bias, "swiglu experts have biases"),
    MOEI_INT(MOEI_L, n_shared, 1, 4096, "number of shared experts"),
    MOEI_INT(MOEI_L, d_shared, 1, MOE_MAX_WIDTH, "width of one shared expert"),
    MOEI_FLAG(MOEI_L, add_input, "what the weights leave over is given to the input itself"),
    MOEI_FLAG(MOEI_L, shared_sigmoid, "the shared expert is gated by a sigmoid"),
    MOEI_CHOICE(MOEI_L, kernels, MOE_KERNELS_COUNT, moei_kernel_names, "instruction set"),
    MOEI_FIELDS_END};

const moe_field *moe_layer_fields(void) { return moei_layer_fields; }

static int moei_makes_node(const moei_expert *expert, int node) {
    int i;
    for (i = 0; i < expert->n_steps; i++)
        if (expert->steps[i].to == node) return 1;
    return 0;
}

/* The activation that the score reads, or -1: the score reads none, or this kind of expert has no such activation. */
static int moei_scored_node(const moe_layer_config *c) {
    const moei_expert *expert = &moei_experts[c->expert];
    int node = c->router.norm_node;
    if (!(moe_router_traits(&c->router) & MOE_TRAIT_NEEDS_ALL_EXPERTS)) return -1;
    if (c->router.score == MOE_SCORE_COMPETITION) node = MOE_NODE_OUTPUT;
    if (c->router.score == MOE_SCORE_ATTENTIVE) node = MOE_NODE_PRODUCT; /* what the last projection reads */
    if (node == MOE_NODE_UP) node = expert->up_is;
    if (node == MOE_NODE_PRODUCT) node = expert->product_is;
    return node >= 0 && moei_makes_node(expert, node) ? node : -1;
}

static void moei_layer_defaults(moe_layer_config *c) {
    int d = c->router.d_model;
    moei_default(&c->d_out, d);
    moei_default(&c->d_ff, d <= MOE_MAX_WIDTH / 4 ? 4 * d : MOE_MAX_WIDTH);
    if (c->router.score == MOE_SCORE_ATTENTIVE) moei_default(&c->router.router_hidden, c->d_ff);
    if (c->expert == MOE_EXPERT_FACTORISED) moei_default(&c->d_low, (d + 2) / 3);
    if (c->n_shared > 0) moei_default(&c->d_shared, c->d_ff);
}

/* Whether a real field is set; it is finite. */
static int moei_is_set(moe_real value) { return value < MOEI_R(0.0) || value > MOEI_R(0.0); }

/* The first field that is set though only swiglu experts have it, and its value; NULL for none. */
static const char *moei_swiglu_field(const moe_layer_config *c, double *value) {
    static const char *const names[] = {"swiglu_alpha", "swiglu_limit", "swiglu_offset", "expert_bias"};
    const moe_real values[] = {c->swiglu_alpha, c->swiglu_limit, c->swiglu_offset, (moe_real)c->expert_bias};
    size_t i = 0;
    while (i < 4 && !moei_is_set(values[i])) i++;
    *value = i < 4 ? (double)values[i] : 0.0;
    return i < 4 ? names[i] : NULL;
}

static moe_status moei_layer_clashes(const moe_layer_config *c, moe_error *error) {
    const char *kind = moei_expert_names[c->expert], *name;
    double value;
    int reads_experts = (moe_router_traits(&c->router) & MOE_TRAIT_NEEDS_ALL_EXPERTS) != 0;
    if (c->router.score == MOE_SCORE_ATTENTIVE && moei_scored_node(c) < 0)
        return moei_error(error, MOE_ERR_CONFIG, "score = attentive does not go with expert = %s: it has no hidden layer", kind);
    if (c->router.score == MOE_SCORE_ATTENTIVE && c->router.router_hidden != c->d_ff)
        return moei_error(error, MOE_ERR_CONFIG, "router_hidden = %d: score = attentive needs the experts' width, d_ff = %d", c->router.router_hidden, c->d_ff);
    if (reads_experts && moei_scored_node(c) < 0)
        return moei_error(error, MOE_ERR_CONFIG, "score = norm reads norm_node = %s: an expert = %s has no such activation",
                          moei_node_names[c->router.norm_node], kind);
    if (c->act != 0 && c->expert != MOE_EXPERT_MLP)
        return moei_error(error, MOE_ERR_CONFIG, "act = %s does not go with expert = %s: only mlp experts choose it", moei_act_names[c->act], kind);
    if (c->d_low != 0 && c->expert != MOE_EXPERT_FACTORISED)
        return moei_error(error, MOE_ERR_CONFIG, "d_low = %d does not go with expert = %s: only factorised experts have it", c->d_low, kind);
    if (c->no_expert_bias && c->expert != MOE_EXPERT_MLP && c->expert != MOE_EXPERT_LINEAR)
        return moei_error(error, MOE_ERR_CONFIG, "no_expert_bias = 1 does not go with expert = %s: it has no biases anyway", kind);
    if (c->expert != MOE_EXPERT_SWIGLU && (name = moei_swiglu_field(c, &value)) != NULL)
        return moei_error(error, MOE_ERR_CONFIG, "%s = %g does not go with expert = %s: only swiglu experts have it", name, value, kind);
    if (c->n_shared == 0 && (c->d_shared != 0 || c->shared_sigmoid))
        return moei_error(error, MOE_ERR_CONFIG, "%s is set but n_shared = 0: there is no shared expert", c->d_shared != 0 ? "d_shared" : "shared_sigmoid");
    if (c->add_input && c->d_out != c->router.d_model)
        return moei_error(error, MOE_ERR_CONFIG, "add_input = 1 needs d_out = d_model = %d, not d_out = %d", c->router.d_model, c->d_out);
    if (c->add_input && (c->router.apply_to != MOE_APPLY_OUTPUT || moei_is_soft(&c->router)))
        return moei_error(error, MOE_ERR_CONFIG, "add_input = 1 does not go with %s", moei_is_soft(&c->router) ? "select = soft" : "apply_to = input");
    if (c->n_shared > 0 && c->d_shared > MOE_MAX_WIDTH / c->n_shared)
        return moei_error(error, MOE_ERR_CONFIG, "d_shared = %d: n_shared = %d of them are wider than %d", c->d_shared, c->n_shared, (int)MOE_MAX_WIDTH);
    if (c->transport != NULL && c->transport->ways == NULL)
        return moei_error(error, MOE_ERR_CONFIG, "transport is not ready: call moe_transport_begin first");
    if (c->transport != NULL && moei_is_soft(&c->router) && moei_crosses_sequences(&c->router))
        return moei_error(error, MOE_ERR_CONFIG, "select = soft with input = adaptive_clustering does not go with a transport: the clusters are those of all ranks' tokens");
    if (c->transport != NULL && c->transport->n_ranks > c->router.n_experts)
        return moei_error(error, MOE_ERR_CONFIG, "n_experts = %d: the transport has n_ranks = %d, and every rank must hold at least one expert",
                          c->router.n_experts, c->transport->n_ranks);
    return MOE_OK;
}

moe_status moe_layer_check(const moe_layer_config *config, moe_layer_config *out, moe_error *error) {
    moe_layer_config c;
    moe_status status;
    if (config == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "config must not be NULL");
    c = *config;
    status = moe_router_check(&c.router, &c.router, error);
    if (status == MOE_OK) status = moei_fields_check(moei_layer_fields, &c, error);
    if (status != MOE_OK) return status;
    moei_layer_defaults(&c);
    status = moei_layer_clashes(&c, error);
    if (status != MOE_OK) return status;
    if (out != NULL) *out = c;
    return MOE_OK;
}

moe_status moe_layer_preset(const char *name, moe_layer_config *config, moe_error *error) {
    const moe_preset *preset = moe_preset_find(name);
    moe_layer_config made;
    moe_status status;
    if (config == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "config must not be NULL");
    memset(&made, 0, sizeof made);
    status = moe_router_preset(name, &made.router, error);
    if (status == MOE_OK) status = moe_fields_apply(moei_layer_fields, &made, preset->layer, error);
    if (status == MOE_OK) *config = made;
    return status;
}

/* ==== the layer's tensors ===================================================================================================== */

/* The experts that a layer of this configuration holds: all, or its rank's. */
MOEI_TOOL size_t moei_own_experts(const moe_layer_config *c, size_t *first) {
    size_t count = (size_t)c->router.n_experts;
    *first = 0;
    if (c->transport != NULL) moe_rank_part(count, c->transport->rank, c->transport->n_ranks, first, &count);
    return count;
}

/* E matrices [out,in], or E bias rows when in is 0. */
static int moei_slot_experts(moe_slot *slot, const moe_layer_config *c, int out, int in) {
    size_t first, experts = moei_own_experts(c, &first);
    if (in == 0) return moei_slot_set(slot, 2, experts, (size_t)out, 1, MOE_PARAM_NO_DECAY, MOEI_R(0.0), MOEI_R(0.0));
    return moei_slot_set(slot, 3, experts, (size_t)out, (size_t)in, MOE_PARAM_TRAINED, MOEI_R(0.0), MOEI_R(1.0) / MOEI_F(sqrt)((moe_real)in));
}

moe_status moe_layer_slot(const moe_layer_config *config, int slot, moe_slot *out) {
    static const char *const names[MOE_LAYER_SLOTS - (int)MOE_ROUTER_SLOTS] = {
        "experts.gate", "experts.up", "experts.down", "experts.fc1.weight", "experts.fc1.bias", "experts.fc2.weight", "experts.fc2.bias", "experts.weight",
        "experts.bias", "experts.reduce", "experts.expand", "experts.gate_bias", "experts.up_bias", "experts.down_bias", "shared.gate", "shared.up",
        "shared.down", "shared.sigmoid"};
    const moe_layer_config *c = config;
    int swiglu = c->expert == MOE_EXPERT_SWIGLU, mlp = c->expert == MOE_EXPERT_MLP, linear = c->expert == MOE_EXPERT_LINEAR;
    int factorised = c->expert == MOE_EXPERT_FACTORISED, gated = swiglu || factorised, biases = !c->no_expert_bias;
    int d = c->router.d_model, o = c->d_out, f = c->d_ff, shared = c->n_shared * c->d_shared;
    moe_slot made;
    int fits = -1; /* -1: not there */
    if (slot < MOE_ROUTER_SLOTS) return moe_router_slot(&c->router, slot, out);
    memset(&made, 0, sizeof made);
    switch (slot) {
    case MOE_EXPERTS_GATE:
        if (swiglu) fits = moei_slot_experts(&made, c, f, d);
        break;
    case MOE_EXPERTS_UP:
        if (gated) fits = moei_slot_experts(&made, c, f, d);
        break;
    case MOE_EXPERTS_DOWN:
        if (gated) fits = moei_slot_experts(&made, c, o, f);
        break;
    case MOE_EXPERTS_FC1_WEIGHT:
        if (mlp) fits = moei_slot_experts(&made, c, f, d);
        break;
    case MOE_EXPERTS_FC1_BIAS:
        if (mlp && biases) fits = moei_slot_experts(&made, c, f, 0);
        break;
    case MOE_EXPERTS_FC2_WEIGHT:
        if (mlp) fits = moei_slot_experts(&made, c, o, f);
        break;
    case MOE_EXPERTS_FC2_BIAS:
        if (mlp && biases) fits = moei_slot_experts(&made, c, o, 0);
        break;
    case MOE_EXPERTS_WEIGHT:
        if (linear) fits = moei_slot_experts(&made, c, o, d);
        break;
    case MOE_EXPERTS_BIAS:
        if (linear && biases) fits = moei_slot_experts(&made, c, o, 0);
        break;
    case MOE_EXPERTS_REDUCE:
        if (factorised) fits = moei_slot_experts(&made, c, c->d_low, d);
        break;
    case MOE_EXPERTS_EXPAND:
        if (factorised) fits = moei_slot_experts(&made, c, f, c->d_low);
        break;
    case MOE_EXPERTS_GATE_BIAS:
    case MOE_EXPERTS_UP_BIAS:
        if (swiglu && c->expert_bias) fits = moei_slot_experts(&made, c, f, 0);
        break;
    case MOE_EXPERTS_DOWN_BIAS:
        if (swiglu && c->expert_bias) fits = moei_slot_experts(&made, c, o, 0);
        break;
    case MOE_SHARED_GATE:
    case MOE_SHARED_UP:
        if (shared > 0) fits = moei_slot_matrix(&made, (size_t)shared, (size_t)d, MOE_PARAM_TRAINED);
        break;
    case MOE_SHARED_DOWN:
        if (shared > 0) fits = moei_slot_matrix(&made, (size_t)o, (size_t)shared, MOE_PARAM_TRAINED);
        break;
    case MOE_SHARED_SIGMOID:
        if (shared > 0 && c->shared_sigmoid) fits = moei_slot_vector(&made, (size_t)d, MOE_PARAM_TRAINED, MOEI_R(0.0));
        break;
    default:
        break;
    }
    if (fits < 0) return MOE_ERR_NOT_FOUND;
    if (!fits) return MOE_ERR_OVERFLOW;
    made.name = names[slot - MOE_ROUTER_SLOTS];
    *out = made;
    return MOE_OK;
}

/* Starts a tensor: init_value + init_spread * normal. */
MOEI_TOOL void moei_slot_fill(const moe_slot *slot, moe_real *data, moe_rng *rng) {
    size_t i;
    for (i = 0; i < slot->count; i++)
        data[i] = slot->init_value + (slot->init_spread > MOEI_R(0.0) ? slot->init_spread * moe_rng_normal(rng) : MOEI_R(0.0));
}

moe_status moe_layer_init(moe_layer *layer, const moe_layer_config *config, moe_error *error) {
    moe_layer made;
    moe_slot slot;
    moe_status status;
    int place;
    if (layer == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "layer must not be NULL");
    memset(&made, 0, sizeof made);
    status = moe_layer_check(config, &made.config, error);
    if (status != MOE_OK) return status;
    for (place = 0; place < MOE_LAYER_SLOTS; place++) {
        status = moe_layer_slot(&made.config, place, &slot);
        if (status == MOE_ERR_OVERFLOW) return moei_error(error, status, "tensor number %d does not fit this machine's memory", place);
        if (status == MOE_OK) made.places |= (uint64_t)1 << place;
    }
    made.kernels = moe_kernels_select(made.config.kernels);
    if (made.kernels == NULL)
        return moei_error(error, MOE_ERR_UNSUPPORTED, "kernels = %s: not compiled in, or this machine cannot run them", moei_kernel_names[made.config.kernels]);
    status = moe_router_init(&made.router, &made.config.router, made.kernels, error);
    if (status == MOE_OK) *layer = made;
    return status;
}

/* Numbers in all tensors; 0 when they do not fit size_t. */
static int moei_layer_count(const moe_layer *layer, size_t *count) {
    moe_slot slot;
    int place;
    *count = 0;
    for (place = 0; place < MOE_LAYER_SLOTS; place++)
        if (moe_layer_slot(&layer->config, place, &slot) == MOE_OK && !moei_add(*count, slot.count, count)) return 0;
    return 1;
}

/* Places the tensors one after another in values, the gradients likewise (gradients NULL: none). */
MOEI_TOOL void moei_layer_bind(moe_layer *layer, moe_real *values, moe_real *gradients) {
    moe_slot slot;
    size_t at = 0;
    int place;
    for (place = 0; place < MOE_LAYER_SLOTS; place++) {
        if (moe_layer_slot(&layer->config, place, &slot) != MOE_OK) continue;
        layer->tensors[place] = values + at;
        layer->gradients[place] = gradients != NULL ? gradients + at : NULL;
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

/* A random table of experts for hash: in every block of E token ids each expert stands once in each column, and no row has one twice. */
static void moei_table_fill(const moe_slot *slot, size_t experts, moe_real *table, moe_rng *rng) {
    size_t columns = slot->shape[1], from, row, i, other, step;
    for (from = 0; from < slot->shape[0]; from += experts) {
        size_t rows = slot->shape[0] - from < experts ? slot->shape[0] - from : experts;
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
            for (i = 1; i < columns; i++) block[row * columns + i] = (moe_real)(((size_t)block[row * columns] + i * step) % experts);
    }
}

/* Passes by what other ranks' experts draw. */
static void moei_slot_skip(const moe_slot *slot, size_t experts, moe_rng *rng) {
    size_t i, own = slot->shape[0] > 0 ? slot->count / slot->shape[0] : 0;
    for (i = 0; i < experts * own && slot->init_spread > MOEI_R(0.0); i++) (void)moe_rng_normal(rng);
}

/* Starts one tensor of a layer at random; of a tensor of experts the own ones, with the numbers that they have among all. */
static void moei_place_fill(const moe_layer_config *c, int place, const moe_slot *slot, moe_real *values, moe_rng *rng) {
    size_t i, first = 0, others = 0;
    if (place == MOE_ROUTER_TABLE) {
        moei_table_fill(slot, (size_t)c->router.n_experts, values, rng);
        return;
    }
    if (place >= MOE_EXPERTS_GATE && place < MOE_SHARED_GATE) others = (size_t)c->router.n_experts - moei_own_experts(c, &first);
    moei_slot_skip(slot, first, rng);
    moei_slot_fill(slot, values, rng);
    moei_slot_skip(slot, others - first, rng);
    for (i = 0; i < slot->count && place == MOE_ROUTER_AC_RUNNING; i++) /* factors of features are not negative */
        if (values[i] < MOEI_R(0.0)) values[i] = MOEI_R(0.0);
}

/* Starts all tensors at random; values are those that bind placed. */
MOEI_TOOL void moei_layer_fill(const moe_layer_config *config, moe_real *values, moe_rng *rng) {
    moe_slot slot;
    int place;
    for (place = 0; place < MOE_LAYER_SLOTS; place++) {
        if (moe_layer_slot(config, place, &slot) != MOE_OK) continue;
        moei_place_fill(config, place, &slot, values, rng);
        values += slot.count;
    }
}

/* The memory of a layer that init made. */
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
    if (!moei_can_allocate(&layer->allocator)) return moei_error(error, MOE_ERR_ARGUMENT, "allocator is NULL, and MOE_NO_MALLOC leaves no other");
    layer->memory = (moe_real *)moei_alloc(&layer->allocator, all, sizeof(moe_real));
    if (layer->memory == NULL) return moei_error(error, MOE_ERR_MEMORY, "no memory for %z bytes of tensors", layer->memory_size);
    moei_layer_bind(layer, layer->memory, trainable ? layer->memory + count : NULL);
    return MOE_OK;
}

moe_status moe_layer_create(moe_layer *layer, const moe_layer_config *config, int trainable, uint64_t seed, const moe_allocator *allocator,
                            moe_error *error) {
    moe_layer made;
    moe_rng rng;
    moe_status status;
    if (layer == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "layer must not be NULL");
    if (!moei_can_allocate(allocator)) return moei_error(error, MOE_ERR_ARGUMENT, "allocator is NULL, and MOE_NO_MALLOC leaves no other");
    status = moe_layer_init(&made, config, error);
    if (status == MOE_OK && made.config.transport != NULL) status = made.config.transport->ways->agree(&made.config, seed, error);
    if (status != MOE_OK) return status;
    if (allocator != NULL) made.allocator = *allocator;
    status = moei_layer_allocate(&made, trainable, error);
    if (status != MOE_OK) return status;
    moe_rng_seed(&rng, seed);
    moei_layer_fill(&made.config, made.memory, &rng);
    *layer = made;
    return MOE_OK;
}

void moe_layer_free(moe_layer *layer) {
    if (layer == NULL) return;
    if (layer->memory != NULL) moei_free(&layer->allocator, layer->memory, layer->memory_size);
    memset(layer, 0, sizeof *layer);
}

/* Describes the tensor at a place that exists. */
static void moei_layer_describe(const moe_layer *layer, int place, const moe_slot *slot, moe_tensor *out) {
    int i;
    memset(out, 0, sizeof *out);
    memcpy(out->name, slot->name, moei_strlen(slot->name) + 1);
    out->n_dims = slot->n_dims;
    for (i = 0; i < MOE_MAX_DIMS; i++) out->shape[i] = slot->shape[i];
    out->count = slot->count;
    out->flags = slot->flags;
    memcpy(&out->data, &layer->tensors[place], sizeof out->data); /* a layer that owns its tensors lets them be changed */
    out->gradient = layer->gradients[place];
}

moe_status moe_layer_tensor(const moe_layer *layer, size_t i, moe_tensor *out) {
    moe_slot slot;
    int place;
    if (layer == NULL || out == NULL) return MOE_ERR_ARGUMENT;
    for (place = 0; place < MOE_LAYER_SLOTS; place++) {
        if (!(layer->places >> place & 1u) || i-- > 0) continue;
        if (moe_layer_slot(&layer->config, place, &slot) != MOE_OK) return MOE_ERR_NOT_FOUND;
        moei_layer_describe(layer, place, &slot, out);
        return MOE_OK;
    }
    return MOE_ERR_NOT_FOUND;
}

moe_status moe_layer_find(const moe_layer *layer, const char *name, moe_tensor *out) {
    moe_slot slot;
    int place;
    if (layer == NULL || name == NULL || out == NULL) return MOE_ERR_ARGUMENT;
    for (place = 0; place < MOE_LAYER_SLOTS; place++) {
        if (!(layer->places >> place & 1u) || moe_layer_slot(&layer->config, place, &slot) != MOE_OK || moei_strcmp(slot.name, name) != 0) continue;
        moei_layer_describe(layer, place, &slot, out);
        return MOE_OK;
    }
    return MOE_ERR_NOT_FOUND;
}

/* A scored node, together with all that it is computed from. */
static unsigned moei_ancestors(const moei_expert *expert, int node) {
    unsigned mask = node < 0 ? 0 : 1u << node;
    int i;
    for (i = expert->n_steps - 1; i >= 0; i--) {
        const moei_step *step = &expert->steps[i];
        if (!(mask >> step->to & 1u)) continue;
        if (step->from != MOEI_X) mask |= 1u << step->from;
        if (step->op == MOEI_STEP_GATED) mask |= 1u << step->second;
    }
    return mask;
}

/* Whether a tensor is read for every expert and token, because the score needs it. */
static int moei_all_read(const moe_layer *layer, int place) {
    const moei_expert *expert = &moei_experts[layer->config.expert];
    unsigned all = moei_ancestors(expert, moei_scored_node(&layer->config));
    int i;
    for (i = 0; i < expert->n_steps; i++)
        if ((all >> expert->steps[i].to & 1u) && expert->steps[i].op == MOEI_STEP_MATMUL && (expert->steps[i].weight == place || expert->steps[i].bias == place)) return 1;
    return 0;
}

size_t moe_layer_parameters(const moe_layer *layer, size_t *used_per_token) {
    size_t count = 0, used = 0, experts, chosen, first;
    moe_slot slot;
    int place;
    if (layer == NULL) return 0;
    experts = moei_own_experts(&layer->config, &first);
    chosen = moei_is_soft(&layer->config.router) ? experts : layer->config.router.select == MOE_SELECT_AFFINITY ? 1 : moei_max_choices(&layer->config.router);
    for (place = 0; place < MOE_LAYER_SLOTS; place++) {
        if (moe_layer_slot(&layer->config, place, &slot) != MOE_OK) continue;
        count += slot.count;
        used += place >= MOE_EXPERTS_GATE && place < MOE_SHARED_GATE && !moei_all_read(layer, place) ? slot.count / experts * chosen : slot.count;
    }
    if (used_per_token != NULL) *used_per_token = used;
    return count;
}

/* ==== packed weights ============================================================================================================== */

/* The matrices of the experts as data: places with three dimensions [E,out,in] and those of the shared expert [out,in]. */
static int moei_is_matrix(const moe_layer *layer, int place, moe_slot *slot) {
    if (place < MOE_EXPERTS_GATE || !(layer->places >> place & 1u) || moe_layer_slot(&layer->config, place, slot) != MOE_OK) return 0;
    return slot->n_dims == 3 || (place >= MOE_SHARED_GATE && slot->n_dims == 2);
}

/* Rows, columns and blocks of a matrix, and the bytes of one packed panel; 0 when a size does not fit. */
static moe_status moei_matrix_shape(const moe_slot *slot, int type, size_t *blocks, size_t *n, size_t *k, size_t *panel) {
    *blocks = slot->n_dims == 3 ? slot->shape[0] : 1;
    *n = slot->shape[slot->n_dims - 2], *k = slot->shape[slot->n_dims - 1];
    return moe_panel_size(type, *k, panel);
}

static size_t moei_panels(size_t n) { return n / MOEI_PANEL + (n % MOEI_PANEL > 0); }

enum { MOEI_PACK_ALIGN = 64 };

moe_status moe_layer_pack_size(const moe_layer *layer, int type, size_t *bytes) {
    size_t all = MOEI_PACK_ALIGN - 1, blocks, n, k, panel, part;
    moe_status status;
    moe_slot slot;
    int place;
    if (layer == NULL || bytes == NULL) return MOE_ERR_ARGUMENT;
    for (place = MOE_EXPERTS_GATE; place < MOE_LAYER_SLOTS; place++) {
        if (!moei_is_matrix(layer, place, &slot)) continue;
        status = moei_matrix_shape(&slot, type, &blocks, &n, &k, &panel);
        if (status != MOE_OK) return status;
        if (!moei_mul(panel, moei_panels(n), &part) || !moei_mul(part, blocks, &part) || !moei_add(all, part, &all)) return MOE_ERR_OVERFLOW;
    }
    *bytes = all;
    return MOE_OK;
}

/* Packs one matrix of every expert; *at moves behind it. */
static moe_status moei_pack_matrix(const moe_layer *layer, int place, const moe_slot *slot, int type, unsigned char **at) {
    size_t blocks, n, k, panel, e;
    moe_status status = moei_matrix_shape(slot, type, &blocks, &n, &k, &panel);
    for (e = 0; status == MOE_OK && e < blocks; e++, *at += moei_panels(n) * panel)
        status = moe_pack(layer->kernels, type, n, k, layer->tensors[place] + e * n * k, k, *at, 1);
    return status;
}

/* Whether packed weights of the layer begin in the memory. */
static int moei_overlaps(const moe_layer *layer, const void *memory, size_t size) {
    int place;
    for (place = MOE_EXPERTS_GATE; place < MOE_LAYER_SLOTS; place++)
        if (layer->packed[place] != NULL && (uintptr_t)layer->packed[place] - (uintptr_t)memory < size) return 1;
    return 0;
}

moe_status moe_layer_pack(moe_layer *layer, int type, void *memory, size_t size, moe_error *error) {
    const void *packed[MOE_LAYER_SLOTS] = {0};
    unsigned char *at = (unsigned char *)memory;
    size_t bytes;
    moe_status status;
    moe_slot slot;
    int place;
    if (layer == NULL || memory == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "%s must not be NULL", layer == NULL ? "layer" : "memory");
    status = moe_layer_pack_size(layer, type, &bytes);
    if (status != MOE_OK) return moei_error(error, status, "type = %d cannot be packed: %s", type, moe_status_text(status));
    if (size < bytes) return moei_error(error, MOE_ERR_SPACE, "size = %z: the packed weights need %z bytes", size, bytes);
    at += (MOEI_PACK_ALIGN - (uintptr_t)at % MOEI_PACK_ALIGN) % MOEI_PACK_ALIGN;
    if (moei_overlaps(layer, memory, size)) layer->is_packed = 0; /* not read again, even if this call fails half way */
    for (place = MOE_EXPERTS_GATE; place < MOE_LAYER_SLOTS; place++) {
        if (!moei_is_matrix(layer, place, &slot)) continue;
        if (layer->tensors[place] == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "%s is not set", slot.name);
        packed[place] = at;
        status = moei_pack_matrix(layer, place, &slot, type, &at);
        if (status != MOE_OK) return moei_error(error, status, "%s cannot be packed: %s", slot.name, moe_status_text(status));
    }
    memcpy(layer->packed, packed, sizeof packed);
    layer->packed_type = type;
    layer->is_packed = 1;
    return MOE_OK;
}

/* ==== rows through an expert ==================================================================================================== */

/* n rows on their way through one expert: the activations and where they lie, rows ld apart. */
typedef struct moei_chain {
    const moe_layer *layer;
    const moei_expert *expert;
    size_t block;  /* which of the E blocks of each tensor; 0 for the shared expert */
    int act, packed; /* packed: the packed weights are read */
    int shaped;      /* the gate has an alpha, a limit or an offset; limit is infinite for none */
    moe_real alpha, limit, offset;
    size_t width[MOE_NODE_COUNT], ld[MOE_NODE_COUNT];
    size_t n, d, ldx;
    const moe_real *x;                /* [n,d] */
    moe_real *node[MOE_NODE_COUNT];   /* [n,width] */
    moe_real *d_x;                    /* [n,d], NULL: not wanted */
    moe_real *d_node[MOE_NODE_COUNT]; /* [n,width] */
    size_t ld_dx;
    unsigned char *quantised[2];      /* rows for quantised weights: of x, of the node that the stage reads */
    unsigned needed;                  /* bits of the nodes on the way to the output */
    unsigned summed;                  /* bit of a node, MOE_NODE_COUNT for x: its gradient is added to, not overwritten */
} moei_chain;

enum {
    MOEI_STAGE_COLUMNS = 64, /* at least so many columns do */
    MOEI_UNIT = 16     /* numbers that fill a cache line or, in double, two */
};

/* So many numbers of a result pass through a stage's steps together: they stay in the second-level cache. */
#if SIZE_MAX > 65535
#define MOEI_PART ((size_t)131072)
#else
#define MOEI_PART ((size_t)16384)
#endif

/* The distance of rows in work memory: whole cache lines, an odd number of them, so that rows do not fall onto the same places of a cache. Plain C
   takes the width itself: it serves machines whose memory is dear. */
static size_t moei_stride(const moe_layer *layer, size_t width) {
    size_t lines = width / MOEI_UNIT + (width % MOEI_UNIT > 0);
    return moei_table(layer->kernels)->id == MOE_KERNELS_C ? width : (lines | 1) * MOEI_UNIT;
}

/* Whether the experts' gates are more than silu(gate) * up. */
static int moei_is_shaped(const moe_layer_config *c) {
    if (moei_is_set(c->swiglu_alpha) && moei_is_set(c->swiglu_alpha - MOEI_R(1.0))) return 1;
    return moei_is_set(c->swiglu_limit) || moei_is_set(c->swiglu_offset);
}

static void moei_chain_shape(moei_chain *chain, const moe_layer_config *c) {
    chain->alpha = c->swiglu_alpha > MOEI_R(0.0) ? c->swiglu_alpha : MOEI_R(1.0);
    chain->limit = c->swiglu_limit > MOEI_R(0.0) ? c->swiglu_limit : MOEI_INFINITY;
    chain->offset = c->swiglu_offset;
    chain->shaped = moei_is_shaped(c);
}

/* A constant 0 where such gates are left out. */
#define MOEI_SHAPED(chain) (MOEI_KEPT(EXTRAS, MOE_EXTRA_SHAPED) && (chain)->shaped)

static moei_chain moei_chain_begin(const moe_layer *layer, int kind) {
    const moe_layer_config *c = &layer->config;
    moei_chain chain;
    size_t hidden = kind == MOEI_SHARED ? (size_t)c->n_shared * (size_t)c->d_shared : (size_t)c->d_ff;
    int node;
    memset(&chain, 0, sizeof chain);
    chain.layer = layer;
    chain.expert = &moei_experts[kind];
    chain.act = kind == MOE_EXPERT_MLP ? c->act : MOE_ACT_SILU;
    if (kind == MOE_EXPERT_SWIGLU) moei_chain_shape(&chain, c);
    chain.d = chain.ldx = (size_t)c->router.d_model;
    chain.ld_dx = chain.d;
    chain.width[MOE_NODE_LOW] = (size_t)c->d_low;
    chain.width[MOE_NODE_GATE] = chain.width[MOE_NODE_UP] = chain.width[MOE_NODE_ACT] = chain.width[MOE_NODE_PRODUCT] = hidden;
    chain.width[MOE_NODE_OUTPUT] = (size_t)c->d_out;
    chain.needed = moei_ancestors(chain.expert, MOE_NODE_OUTPUT);
    for (node = 0; node < MOE_NODE_COUNT; node++)
        if (moei_makes_node(chain.expert, node)) chain.ld[node] = moei_stride(layer, chain.width[node]);
    return chain;
}

static size_t moei_from_width(const moei_chain *chain, int from) { return from == MOEI_X ? chain->d : chain->width[from]; }

static const moe_real *moei_from(const moei_chain *chain, int from, size_t *ld) {
    *ld = from == MOEI_X ? chain->ldx : chain->ld[from];
    return from == MOEI_X ? chain->x : chain->node[from];
}

/* The expert's block of a tensor of size numbers per expert; NULL when the layer has none. */
static const moe_real *moei_block(const moei_chain *chain, int place, size_t size) {
    const moe_real *tensor = place < 0 ? NULL : chain->layer->tensors[place];
    return tensor == NULL ? NULL : tensor + chain->block * size;
}

static int moei_runs(const moei_step *step, int stage, unsigned mask) { return step->stage == stage && (mask >> step->to & 1u); }

static int moei_last_stage(const moei_expert *expert) { return expert->steps[expert->n_steps - 1].stage; }

/* Whether a call reads packed weights; training takes the tensors, which it changes, and so do calls that keep all rows. */
static int moei_uses_packed(const moe_layer *layer, const moe_call *call) { return layer->is_packed && !call->training && !call->keep; }

/* The same product with packed weights: what lies behind the last column up to a whole panel is scratch where the row has room for it. */
static void moei_packed_product(const moei_chain *chain, const moei_step *step, const moe_real *in, size_t ld_in, size_t j, size_t count, moe_real *out,
                                size_t ld) {
    const moe_layer *layer = chain->layer;
    size_t from = moei_from_width(chain, step->from), panel = 0, whole = moei_panels(count) * MOEI_PANEL;
    const unsigned char *b = (const unsigned char *)layer->packed[step->weight];
    if (moe_panel_size(layer->packed_type, from, &panel) != MOE_OK) return; /* moe_layer_pack has seen it fit */
    b += (chain->block * moei_panels(chain->width[step->to]) + j / MOEI_PANEL) * panel;
    if (j + whole <= ld) count = whole;
#ifndef MOE_NO_QUANT
    if (moei_is_quant(layer->packed_type)) {
        moe_matmul_quant(layer->kernels, layer->packed_type, chain->n, count, from, chain->quantised[step->from != MOEI_X], b, 1, out, ld);
        return;
    }
#endif
    moe_matmul_packed(layer->kernels, layer->packed_type, chain->n, count, from, in, ld_in, b, out, ld);
}

#ifndef MOE_NO_QUANT
/* Rows from .. to of what the products of a stage read, quantised; x only for the first stage that reads it. */
static void moei_quantise_stage(const moei_chain *chain, int stage, unsigned mask, size_t from, size_t to) {
    const moe_layer *layer = chain->layer;
    unsigned done = 0;
    int i, node;
    for (i = 0; i < chain->expert->n_steps && to > from; i++) {
        const moei_step *step = &chain->expert->steps[i];
        unsigned bit = 1u << (step->from != MOEI_X);
        size_t width = moei_from_width(chain, step->from), ld, size;
        const moe_real *in = moei_from(chain, step->from, &ld);
        node = step->from == MOEI_X;
        if (step->op != MOEI_STEP_MATMUL || step->stage > stage || !(mask >> step->to & 1u) || (done & bit)) continue;
        if (step->stage < stage) {
            if (node) done |= bit; /* x was quantised for an earlier stage */
            continue;
        }
        done |= bit;
        size = moe_quant_row_size(layer->packed_type, width);
        moe_quantise_rows(layer->kernels, layer->packed_type, to - from, width, in + from * ld, ld, chain->quantised[!node] + from * size);
    }
}
#endif

/* Columns j .. j + count of to = W from + bias: rows j .. of W. */
static void moei_matmul_columns(const moei_chain *chain, const moei_step *step, size_t j, size_t count) {
    const moe_kernels *k = chain->layer->kernels;
    size_t from = moei_from_width(chain, step->from), to = chain->width[step->to], ld = chain->ld[step->to], ld_in, i;
    const moe_real *in = moei_from(chain, step->from, &ld_in), *bias = moei_block(chain, step->bias, to);
    moe_real *out = chain->node[step->to] + j;
    if (chain->packed) moei_packed_product(chain, step, in, ld_in, j, count, out, ld);
    else moe_matmul(k, MOE_MATMUL_NT, MOE_TYPE_REAL, chain->n, count, from, in, ld_in, moei_block(chain, step->weight, to * from) + j * from, from, out, ld, 0);
    for (i = 0; bias != NULL && i < chain->n; i++) moe_axpy(k, count, MOEI_R(1.0), bias + j, out + i * ld);
}

/* A shaped gate as a plain one, silu(t) v: t = alpha min(g, L), v = factor (max(-L, min(u, L)) + offset), or factor where up is NULL. */
static void moei_shape(const moei_chain *chain, size_t n, const moe_real *gate, const moe_real *up, moe_real factor, moe_real *t,
                       moe_real *v) {
    const moe_real limit = chain->limit, alpha = chain->alpha, offset = chain->offset;
    size_t i;
    for (i = 0; i < n; i++) t[i] = alpha * (gate[i] > limit ? limit : gate[i]);
    for (i = 0; i < n && up == NULL; i++) v[i] = factor;
    for (i = 0; i < n && up != NULL; i++) v[i] = factor * ((up[i] > limit ? limit : up[i] < -limit ? -limit : up[i]) + offset);
}

/* The elementwise steps with a shaped gate; the results may take the place of what is read. */
static void moei_shaped_columns(const moei_chain *chain, const moei_step *step, size_t j, size_t count) {
    moe_real t[MOEI_STAGE_COLUMNS], v[MOEI_STAGE_COLUMNS];
    size_t ld = chain->ld[step->to], i, p, n;
    for (i = 0; i < chain->n; i++)
        for (p = j; p < j + count; p += n) {
            const moe_real *up = step->op == MOEI_STEP_GATED ? chain->node[step->second] + i * chain->ld[step->second] + p : NULL;
            n = j + count - p < MOEI_STAGE_COLUMNS ? j + count - p : (size_t)MOEI_STAGE_COLUMNS;
            moei_shape(chain, n, chain->node[step->from] + i * chain->ld[step->from] + p, up, MOEI_R(1.0) / chain->alpha, t, v);
            moe_gated(chain->layer->kernels, chain->act, 1, n, t, n, v, n, chain->node[step->to] + i * ld + p, ld);
        }
}

static void moei_step_columns(const moei_chain *chain, const moei_step *step, size_t j, size_t count) {
    const moe_kernels *k = chain->layer->kernels;
    size_t ld = chain->ld[step->to], ld_in;
    const moe_real *in;
    if (step->op == MOEI_STEP_MATMUL || MOEI_SHAPED(chain)) {
        if (step->op == MOEI_STEP_MATMUL) moei_matmul_columns(chain, step, j, count);
        else moei_shaped_columns(chain, step, j, count);
        return;
    }
    in = moei_from(chain, step->from, &ld_in) + j;
    if (step->op == MOEI_STEP_ACT) moe_gated(k, chain->act, chain->n, count, in, ld_in, NULL, 0, chain->node[step->to] + j, ld);
    else moe_gated(k, chain->act, chain->n, count, in, ld_in, chain->node[step->second] + j, chain->ld[step->second], chain->node[step->to] + j, ld);
}

/* Columns from .. to of one stage, as far as its results are among the nodes of mask (bit per node). */
static void moei_stage_columns(const moei_chain *chain, int stage, unsigned mask, size_t from, size_t to) {
    size_t count, part = chain->n > 0 ? MOEI_PART / chain->n / MOEI_STAGE_COLUMNS * MOEI_STAGE_COLUMNS : 0;
    int i;
    if (part < MOEI_STAGE_COLUMNS) part = MOEI_STAGE_COLUMNS;
    for (; from < to && chain->n > 0; from += count) {
        count = to - from < part ? to - from : part;
        for (i = 0; i < chain->expert->n_steps; i++)
            if (moei_runs(&chain->expert->steps[i], stage, mask)) moei_step_columns(chain, &chain->expert->steps[i], from, count);
    }
}

/* The width that all results of a stage have. */
static size_t moei_stage_width(const moei_chain *chain, int stage) {
    int i = 0;
    while (chain->expert->steps[i].stage != stage) i++;
    return chain->width[chain->expert->steps[i].to];
}

/* Of the nodes already there, those that the remaining steps on the way to the output read. */
static unsigned moei_border(const moei_expert *expert, unsigned there) {
    unsigned read = 1u << MOE_NODE_OUTPUT, needed = moei_ancestors(expert, MOE_NODE_OUTPUT);
    int i;
    for (i = 0; i < expert->n_steps; i++) {
        const moei_step *step = &expert->steps[i];
        if ((there >> step->to & 1u) || !(needed >> step->to & 1u)) continue;
        if (step->from != MOEI_X) read |= 1u << step->from;
        if (step->op == MOEI_STEP_GATED) read |= 1u << step->second;
    }
    return there & read;
}

/* Share number `share` of `of` equal ones of so many columns, in whole lines. */
static void moei_columns_of(size_t columns, int share, int of, size_t *from, size_t *to) {
    size_t lines = columns / MOEI_UNIT + (columns % MOEI_UNIT > 0);
    *from = of > 1 ? lines * (size_t)share / (size_t)of * MOEI_UNIT : 0;
    *to = share + 1 < of ? lines * ((size_t)share + 1) / (size_t)of * MOEI_UNIT : columns;
    if (*to > columns) *to = columns;
}

#ifndef MOE_NO_TRAIN

static moe_real *moei_gradient_block(const moei_chain *chain, int place, size_t size) {
    moe_real *tensor = place < 0 ? NULL : chain->layer->gradients[place];
    return tensor == NULL ? NULL : tensor + chain->block * size;
}

/* dW and dbias of one product: their rows j .. j + count. */
static void moei_weight_backward(const moei_chain *chain, const moei_step *step, size_t j, size_t count) {
    const moe_kernels *k = chain->layer->kernels;
    size_t to = chain->width[step->to], from = moei_from_width(chain, step->from), ld = chain->ld[step->to], ld_in, i;
    const moe_real *in = moei_from(chain, step->from, &ld_in), *d_out = chain->d_node[step->to] + j;
    moe_real *d_w = moei_gradient_block(chain, step->weight, to * from), *d_bias = moei_gradient_block(chain, step->bias, to);
    if (d_w != NULL) moe_matmul(k, MOE_MATMUL_TN, MOE_TYPE_REAL, count, from, chain->n, d_out, ld, in, ld_in, d_w + j * from, from, 1);
    for (i = 0; d_bias != NULL && i < chain->n; i++) moe_axpy(k, count, MOEI_R(1.0), d_out + i * ld, d_bias + j);
}

/* Columns j .. j + count of the gradient of what a product reads; sum: added to what is there. */
static void moei_input_backward(const moei_chain *chain, const moei_step *step, size_t j, size_t count, int sum) {
    size_t to = chain->width[step->to], from = moei_from_width(chain, step->from);
    moe_real *d_in = step->from == MOEI_X ? chain->d_x : chain->d_node[step->from];
    size_t ld = step->from == MOEI_X ? chain->ld_dx : chain->ld[step->from];
    if (d_in == NULL) return;
    moe_matmul(chain->layer->kernels, MOE_MATMUL_NN, MOE_TYPE_REAL, chain->n, count, to, chain->d_node[step->to], chain->ld[step->to],
               moei_block(chain, step->weight, to * from) + j, from, d_in + j, ld, sum);
}

/* Back through n columns, from p, of row i of a shaped gate: y = silu(t) v / alpha, dg = dy v silu'(t), du = dy silu(t) / alpha; 0 beyond a
   limit. */
static void moei_shaped_backward(const moei_chain *chain, const moei_step *step, size_t i, size_t p, size_t n) {
    moe_real t[MOEI_STAGE_COLUMNS], v[MOEI_STAGE_COLUMNS], d_t[MOEI_STAGE_COLUMNS], d_v[MOEI_STAGE_COLUMNS];
    const moe_real *gate = chain->node[step->from] + i * chain->ld[step->from] + p, limit = chain->limit;
    const moe_real *up = step->op == MOEI_STEP_GATED ? chain->node[step->second] + i * chain->ld[step->second] + p : NULL;
    moe_real *d_gate = chain->d_node[step->from] + i * chain->ld[step->from] + p;
    moe_real *d_up = up != NULL ? chain->d_node[step->second] + i * chain->ld[step->second] + p : NULL;
    size_t q;
    moei_shape(chain, n, gate, up, MOEI_R(1.0), t, v);
    moe_gated_backward(chain->layer->kernels, chain->act, n, t, v, chain->d_node[step->to] + i * chain->ld[step->to] + p, d_t, d_v);
    for (q = 0; q < n; q++) {
        if (gate[q] > limit) d_t[q] = MOEI_R(0.0);
        d_gate[q] = up == NULL && (chain->summed >> step->from & 1u) ? d_gate[q] + d_t[q] : d_t[q];
    }
    for (q = 0; q < n && up != NULL; q++) d_up[q] = up[q] > limit || up[q] < -limit ? MOEI_R(0.0) : d_v[q] / chain->alpha;
}

/* Columns j .. j + count back through an elementwise step. */
static void moei_elementwise_backward(const moei_chain *chain, const moei_step *step, size_t j, size_t count) {
    const moe_kernels *k = chain->layer->kernels;
    size_t ld = chain->ld[step->to], ld_in, i, p;
    const moe_real *in = moei_from(chain, step->from, &ld_in) + j, *d_out = chain->d_node[step->to] + j;
    moe_real *d_in = chain->d_node[step->from] + j, part[MOEI_STAGE_COLUMNS];
    for (i = 0; i < chain->n && MOEI_SHAPED(chain); i++)
        for (p = 0; p < count; p += MOEI_STAGE_COLUMNS)
            moei_shaped_backward(chain, step, i, j + p, count - p < MOEI_STAGE_COLUMNS ? count - p : (size_t)MOEI_STAGE_COLUMNS);
    for (i = 0; i < chain->n && !MOEI_SHAPED(chain); i++, in += ld_in, d_in += ld_in, d_out += ld) {
        if (step->op == MOEI_STEP_GATED) {
            size_t at = i * chain->ld[step->second] + j;
            moe_gated_backward(k, chain->act, count, in, chain->node[step->second] + at, d_out, d_in, chain->d_node[step->second] + at);
        } else if (!(chain->summed >> step->from & 1u))
            moe_activate_backward(k, chain->act, count, in, d_out, d_in);
        else
            for (p = 0; p < count; p += MOEI_STAGE_COLUMNS) {
                size_t part_count = count - p < MOEI_STAGE_COLUMNS ? count - p : (size_t)MOEI_STAGE_COLUMNS;
                moe_activate_backward(k, chain->act, part_count, in + p, d_out + p, part);
                moe_axpy(k, part_count, MOEI_R(1.0), part, d_in + p);
            }
    }
}

/* Whether a product of the mask in a stage after this one reads a node. */
static int moei_begun(const moei_expert *expert, int node, int stage, unsigned mask) {
    int i;
    for (i = 0; i < expert->n_steps; i++) {
        const moei_step *step = &expert->steps[i];
        if (step->op == MOEI_STEP_MATMUL && step->from == node && step->stage > stage && (mask >> step->to & 1u)) return 1;
    }
    return 0;
}

/* One share of the way back through a stage, of `of` equal ones: rows of the gradients of its weights; columns of the gradients of what its products
   read, and on these columns the elementwise steps before. The gradients of the stage's own results are complete. */
static void moei_stage_backward(const moei_chain *chain, int stage, unsigned mask, int share, int of) {
    const moei_expert *expert = chain->expert;
    size_t from, to;
    int node, i;
    if (chain->n == 0) return;
    for (i = expert->n_steps - 1; i >= 0; i--) {
        if (!moei_runs(&expert->steps[i], stage, mask) || expert->steps[i].op != MOEI_STEP_MATMUL) continue;
        moei_columns_of(chain->width[expert->steps[i].to], share, of, &from, &to);
        if (to > from) moei_weight_backward(chain, &expert->steps[i], from, to - from);
    }
    for (node = MOEI_X; node < MOE_NODE_COUNT; node++) {
        int sum = (int)(chain->summed >> (node == MOEI_X ? (int)MOE_NODE_COUNT : node) & 1u), read = 0;
        moei_columns_of(moei_from_width(chain, node), share, of, &from, &to);
        for (i = 0; i < expert->n_steps && to > from; i++) { /* an earlier stage's product may have begun it: moei_begun */
            const moei_step *step = &expert->steps[i];
            if (!moei_runs(step, stage, mask) || step->op != MOEI_STEP_MATMUL || step->from != node) continue;
            moei_input_backward(chain, step, from, to - from, sum || read || moei_begun(expert, node, stage, mask));
            read = 1;
        }
        for (i = expert->n_steps - 1; i >= 0 && read; i--)
            if (node >= 0 && expert->steps[i].to == node && expert->steps[i].op != MOEI_STEP_MATMUL && (mask >> node & 1u))
                moei_elementwise_backward(chain, &expert->steps[i], from, to - from);
    }
}

/* Back through the steps of mask in one thread; the gradient of the last result is there. */
static void moei_chain_backward(const moei_chain *chain, unsigned mask) {
    int stage, i;
    for (i = chain->expert->n_steps - 1; i >= 0; i--) { /* elementwise steps whose result no product of the mask reads: a scored node */
        const moei_step *step = &chain->expert->steps[i];
        if ((mask >> step->to & 1u) && step->op != MOEI_STEP_MATMUL && !moei_begun(chain->expert, step->to, -1, mask))
            moei_elementwise_backward(chain, step, 0, chain->width[step->to]);
    }
    for (stage = moei_last_stage(chain->expert); stage >= 0; stage--) moei_stage_backward(chain, stage, mask, 0, 1);
}

#endif

/* ==== one call: forward ============================================================================================================ */

/* Whether activations that the score made are used again by the chosen experts: they are those of the unweighted input. */
static int moei_reuses(const moe_layer *layer) { return layer->config.router.apply_to == MOE_APPLY_OUTPUT; }

/* The nodes that are computed for all experts and tokens, because the score reads one of them. */
static unsigned moei_all_nodes(const moe_layer *layer) {
    return moei_ancestors(&moei_experts[layer->config.expert], moei_scored_node(&layer->config));
}

/* The most rows that one expert gets, and all rows whose activations training keeps. */
static size_t moei_expert_rows(const moe_layer_config *c, size_t n) {
    return moei_is_soft(&c->router) ? (size_t)c->router.slots * (size_t)c->router.soft_sequences : n;
}

static int moei_kept_rows(const moe_layer_config *c, size_t n, size_t *rows) {
    if (moei_is_soft(&c->router)) return moei_mul(moei_expert_rows(c, n), (size_t)c->router.n_experts, rows);
    return moei_mul(n, moei_max_choices(&c->router), rows);
}

/* Rows of work memory that begin with a cache line, for kernels with vectors: no vector then lies in two lines, and no line belongs to two threads. */
static moe_real *moei_take_lines(const moe_layer *layer, moei_layout *l, size_t rows, size_t stride) {
    enum { LINE = 64, SLACK = LINE - MOEI_ALIGN };
    unsigned char *p;
    size_t bytes = 0;
    if (moei_table(layer->kernels)->id == MOE_KERNELS_C) return moei_take_reals(l, rows, stride);
    if (!moei_mul(rows, stride, &bytes) || !moei_mul(bytes, sizeof(moe_real), &bytes) || !moei_add(bytes, SLACK, &bytes)) l->overflow = 1;
    p = (unsigned char *)moei_take(l, bytes, 1);
    if (p != NULL) p += (LINE - (uintptr_t)p % LINE) % LINE;
    return (moe_real *)(void *)p;
}

/* Room for the nodes of one chain in work memory; only the output's rows lie without gaps, for whoever reads them. Inference overwrites what the
   activation read. */
static void moei_take_nodes(const moei_chain *chain, moei_layout *l, size_t rows, int keeps, moe_real **nodes) {
    int node;
    for (node = 0; node < MOE_NODE_COUNT; node++) {
        size_t stride = node == MOE_NODE_OUTPUT && keeps ? chain->width[node] : chain->ld[node];
        if (!(chain->needed >> node & 1u)) continue;
        if (!keeps && (node == MOE_NODE_ACT || node == MOE_NODE_PRODUCT)) nodes[node] = nodes[MOE_NODE_GATE];
        else nodes[node] = moei_take_lines(chain->layer, l, rows, stride);
    }
}

/* Room for quantised rows of one group of experts and of all tokens for the shared expert or the score. */
static void moei_take_quantised(const moe_layer *layer, moei_layout *l, size_t rows, size_t n, moe_layer_pass *p) {
#ifndef MOE_NO_QUANT
    const moe_layer_config *c = &layer->config;
    int hidden = c->d_ff > c->d_low ? c->d_ff : c->d_low, all = c->n_shared * c->d_shared;
    if (!layer->is_packed || !moei_is_quant(layer->packed_type)) return;
    if (hidden < all) hidden = all;
    if (rows < n) rows = n;
    p->quantised_size[0] = moe_quant_row_size(layer->packed_type, (size_t)c->router.d_model);
    p->quantised_size[1] = moe_quant_row_size(layer->packed_type, (size_t)hidden);
    if (p->quantised_size[0] == 0 || p->quantised_size[1] == 0) l->overflow = 1;
    p->quantised[0] = (unsigned char *)moei_take(l, rows, p->quantised_size[0]);
    p->quantised[1] = (unsigned char *)moei_take(l, rows, p->quantised_size[1]);
#else
    (void)layer, (void)l, (void)rows, (void)n, (void)p;
#endif
}

/* Lays a pass out in memory; the same function with an empty base counts the bytes. */
static void moei_layer_layout(const moe_layer *layer, const moei_chain *chain, size_t n, size_t past, int training, moei_layout *l, moe_layer_pass *p) {
    const moe_layer_config *c = &layer->config;
    moei_chain shared;
    size_t rows = moei_expert_rows(c, n), kept = rows, everywhere = 0, stride = moei_stride(layer, chain->d);
    unsigned all = moei_all_nodes(layer);
    int node;
    memset(p, 0, sizeof *p);
    if (c->n_shared > 0) shared = moei_chain_begin(layer, MOEI_SHARED);
    if (!moei_fit_int32(past, n) || moe_route_size(&layer->router, past + n, training, &p->route_size) != MOE_OK) l->overflow = 1;
    p->route_memory = moei_take(l, p->route_size, 1);
    if (training && !moei_kept_rows(c, n, &kept)) l->overflow = 1;
    if (!moei_mul(n, (size_t)c->router.n_experts, &everywhere)) l->overflow = 1;
    p->rows = moei_take_lines(layer, l, rows, stride);
    p->clean = all != 0 ? moei_take_reals(l, n, chain->d) : NULL;
    moei_take_nodes(chain, l, kept, training, p->node);
    for (node = 0; node < MOE_NODE_COUNT; node++)
        if (all >> node & 1u) p->all[node] = moei_take_reals(l, everywhere, chain->width[node]);
    if (c->n_shared > 0) {
        moei_take_nodes(&shared, l, n, training, p->shared);
        p->shared_factor = moei_take_reals(l, n, 1);
    }
    if (!training) { /* calls that keep rows never quantise */
        moei_take_quantised(layer, l, rows, n, p);
        return;
    }
    p->d_rows = moei_take_lines(layer, l, rows, stride);
    moei_take_nodes(chain, l, rows, 1, p->d_node);
    for (node = 0; node < MOE_NODE_COUNT; node++)
        if (all >> node & 1u) p->d_all[node] = moei_take_reals(l, everywhere, chain->width[node]);
    if (c->n_shared > 0) moei_take_nodes(&shared, l, n, 1, p->d_shared);
}

/* Bytes of work memory for n tokens that follow up to `past` others. */
static moe_status moei_layer_size(const moe_layer *layer, size_t n, size_t past, int training, size_t *bytes) {
    moei_layout l = moei_layout_begin(NULL);
    moe_layer_pass p;
    moei_chain chain;
    if (!MOEI_FITS_INT32(n)) return MOE_ERR_OVERFLOW;
    if (layer->config.transport != NULL) return past > 0 ? MOE_ERR_UNSUPPORTED : layer->config.transport->ways->size(layer, n, training, bytes);
    chain = moei_chain_begin(layer, layer->config.expert);
    moei_layer_layout(layer, &chain, n, past, training, &l, &p);
    if (l.overflow) return MOE_ERR_OVERFLOW;
    *bytes = l.used;
    return MOE_OK;
}

moe_status moe_layer_work_size(const moe_layer *layer, size_t n_tokens, int training, size_t *bytes) {
    return layer == NULL || bytes == NULL ? MOE_ERR_ARGUMENT : moei_layer_size(layer, n_tokens, 0, training, bytes);
}

/* Whether a call keeps all rows of all experts. */
static int moei_keeps(const moe_call *call) { return call->training || call->keep; }

/* The router with the layer's tensors. */
static moe_router moei_layer_router(const moe_layer *layer) {
    moe_router router = layer->router;
    int place;
    for (place = 0; place < MOE_ROUTER_SLOTS; place++) router.tensors[place] = layer->tensors[place];
    return router;
}

/* ---- threads: a phase of the work at a time, each thread with its share of the columns ------------------------------------------------

   Columns are shared out and not experts: every thread gets the same work whatever the load of the experts, reads each weight that it needs once,
   and owns its columns of y and of the gradients. Each number is summed by one thread in the same order, so the result does not depend on how many
   there are. */

/* What all tasks of a phase read. */
typedef struct moei_job {
    const moe_layer *layer;
    moe_layer_pass *p;
    unsigned there, mask, border;
    size_t first, end, base;   /* experts first to end share the buffers, which begin with row base of the plan */
    int phase, of;             /* of so many tasks */
    moe_real *y, *dx;
    const struct moei_returned *back;
    moei_chain chain;          /* what the chains of all experts have in common */
} moei_job;

#ifdef _OPENMP
static void moei_openmp_run(void *ctx, void (*task)(void *work, int index), void *work, int count) {
    int i;
    (void)ctx;
#pragma omp parallel for schedule(static, 1) num_threads(count)
    for (i = 0; i < count; i++) task(work, i);
}
#endif

/* The threads of a call: the caller's, or OpenMP's where the compiler has it on, or one. */
static moe_parallel moei_team(const moe_call *call) {
    moe_parallel team;
    memset(&team, 0, sizeof team);
    team.threads = 1;
    if (call->parallel != NULL) {
        team = *call->parallel;
        if (team.threads < 1 || team.run == NULL) team.threads = 1;
        return team;
    }
#ifdef _OPENMP
    if (!omp_in_parallel()) team.threads = omp_get_max_threads(), team.run = moei_openmp_run;
#endif
    return team;
}

/* How many tasks pay for n rows through the steps of a kind of expert, `experts` of them read: starting them takes a few microseconds. Counted
   in billionths of a second of one thread: 50 multiplications, or 20 bytes beyond the second-level cache, take one. */
static int moei_tasks(const moe_parallel *team, const moei_chain *chain, size_t rows, size_t experts) {
    double weights = 0.0, bytes, time;
    int i;
    if (team->threads <= 1) return 1;
    for (i = 0; i < chain->expert->n_steps; i++)
        if (chain->expert->steps[i].op == MOEI_STEP_MATMUL)
            weights += (double)chain->width[chain->expert->steps[i].to] * (double)moei_from_width(chain, chain->expert->steps[i].from);
    bytes = weights * (double)(experts < rows ? experts : rows) * (double)sizeof(moe_real) - 1e6;
    time = weights * (double)rows / 50.0 + (bytes > 0.0 ? bytes / 20.0 : 0.0);
    return time < 4e4 && !team->always ? 1 : team->threads;
}

static void moei_run_phase(const moe_parallel *team, void (*task)(void *work, int index), moei_job *job) {
    if (job->of <= 1) task(job, 0);
    else team->run(team->ctx, task, job, job->of);
}

/* ---- quantised weights: rows are quantised between the stages, each thread a share of the rows ------------------------------------------- */

static int moei_quantises(const moei_job *job) {
#ifndef MOE_NO_QUANT
    return job->chain.packed && moei_is_quant(job->layer->packed_type);
#else
    (void)job;
    return 0;
#endif
}

/* The chain's first quantised row is number `at` of the buffers. */
static void moei_quantised_rows(moei_chain *chain, const moe_layer_pass *p, size_t at) {
    int i;
    for (i = 0; i < 2; i++) chain->quantised[i] = p->quantised[i] == NULL ? NULL : p->quantised[i] + at * p->quantised_size[i];
}

/* A share of the rows that a stage reads. */
static void moei_quantise_share(const moei_job *job, const moei_chain *chain, int stage, unsigned mask, int share) {
#ifndef MOE_NO_QUANT
    size_t part = chain->n / (size_t)job->of, rest = chain->n % (size_t)job->of, index = (size_t)share;
    size_t from = part * index + (index < rest ? index : rest);
    moei_quantise_stage(chain, stage, mask, from, from + part + (index < rest));
#else
    (void)job, (void)chain, (void)stage, (void)mask, (void)share;
#endif
}

/* ---- all experts for all tokens, for scores that read experts ------------------------------------------------------------------------- */

static moei_job moei_job_begin(const moe_layer *layer, moe_layer_pass *p, const moei_chain *chain) {
    moei_job job;
    memset(&job, 0, offsetof(moei_job, chain));
    job.layer = layer, job.p = p, job.of = 1;
    job.chain = *chain;
    job.chain.packed = moei_uses_packed(layer, &p->call);
    if (moei_keeps(&p->call)) job.chain.ld[MOE_NODE_OUTPUT] = job.chain.width[MOE_NODE_OUTPUT];
    if (chain->expert != &moei_experts[MOEI_SHARED] && moei_reuses(layer)) job.there = moei_all_nodes(layer);
    if (job.there != 0) job.border = moei_border(chain->expert, job.there);
    job.mask = chain->needed & ~job.there;
    return job;
}

/* Block e of activations that exist for all experts, as a chain over all tokens. */
static moei_chain moei_all_chain(const moei_job *job, size_t e) {
    const moe_layer_pass *p = job->p;
    moei_chain chain = job->chain;
    int node;
    chain.block = e;
    chain.n = p->call.n_tokens;
    chain.x = p->clean;
    chain.summed = ~0u;
    moei_quantised_rows(&chain, p, 0);
    for (node = 0; node < MOE_NODE_COUNT; node++) {
        size_t at = e * chain.n * chain.width[node];
        chain.ld[node] = chain.width[node];
        if (p->all[node] != NULL) chain.node[node] = p->all[node] + at;
        if (p->d_all[node] != NULL) chain.d_node[node] = p->d_all[node] + at;
    }
    return chain;
}

static void moei_score_task(void *work, int index) {
    const moei_job *job = (const moei_job *)work;
    moei_chain chain;
    size_t e, from, to;
    for (e = job->first; e < job->end; e++) {
        chain = moei_all_chain(job, e);
        if (job->phase % 2 == 0) {
            if (moei_quantises(job)) moei_quantise_share(job, &chain, job->phase / 2, job->mask, index);
            continue;
        }
        moei_columns_of(moei_stage_width(&chain, job->phase / 2), index, job->of, &from, &to);
        moei_stage_columns(&chain, job->phase / 2, job->mask, from, to);
    }
}

/* A copy of x with zeros for padding. */
static void moei_clean(const moe_call *call, size_t d, moe_real *clean) {
    size_t t;
    for (t = 0; t < call->n_tokens; t++)
        if (moei_is_real(call, t)) memcpy(clean + t * d, call->x + t * d, d * sizeof(moe_real));
        else memset(clean + t * d, 0, d * sizeof(moe_real));
}

/* For scores that read experts: the activation of every expert for every token. Padding counts as zeros. */
static void moei_layer_score_experts(const moe_layer *layer, moe_layer_pass *p, const moei_chain *chain, const moe_parallel *team) {
    int scored = moei_scored_node(&layer->config);
    size_t d = (size_t)layer->config.router.d_model, experts = (size_t)layer->config.router.n_experts;
    moei_job job;
    if (scored < 0 || p->call.n_tokens == 0) return;
    job = moei_job_begin(layer, p, chain);
    moei_clean(&p->call, d, p->clean);
    job.of = moei_tasks(team, &job.chain, p->call.n_tokens * experts, experts);
    job.mask = moei_all_nodes(layer);
    for (job.end = 0; job.end < experts; ) { /* all experts together, or one by one where they share the buffer of quantised rows */
        job.first = job.end, job.end = moei_quantises(&job) ? job.end + 1 : experts;
        for (job.phase = !moei_quantises(&job); job.phase / 2 <= moei_last_stage(job.chain.expert); job.phase += moei_quantises(&job) ? 1 : 2)
            moei_run_phase(team, moei_score_task, &job);
    }
    p->call.nodes = p->all[scored];
    p->call.node_width = job.chain.width[scored];
}

/* ---- the chosen experts ------------------------------------------------------------------------------------------------------------------ */

/* The rows of expert e in the plan. */
static size_t moei_rows_of(const moe_layer_pass *p, size_t e) {
    return p->routing.plan.rows > 0 ? p->routing.plan.rows : p->routing.plan.offsets[e + 1] - p->routing.plan.offsets[e];
}

static size_t moei_first_row(const moe_layer_pass *p, size_t e) {
    return p->routing.plan.rows > 0 ? e * p->routing.plan.rows : p->routing.plan.offsets[e];
}

/* Whether the rows of the plan are x as it is. */
static int moei_is_plain(const moe_layer *layer, const moe_layer_pass *p) {
    return p->routing.plan.rows == 0 && layer->config.router.apply_to == MOE_APPLY_OUTPUT;
}

/* The rows of expert e in the plan, as a chain. Inference uses the same buffers for every group of experts, training keeps all rows. */
static moei_chain moei_expert_chain(const moei_job *job, size_t e) {
    const moe_layer_pass *p = job->p;
    moei_chain chain = job->chain;
    size_t first = moei_first_row(p, e), at = first - job->base;
    int node;
    chain.block = e;
    chain.n = moei_rows_of(p, e);
    if (chain.n == 1 && moei_is_plain(job->layer, p) && !moei_keeps(&p->call)) /* read where it lies */
        chain.x = p->x + (size_t)p->routing.plan.entries[first].token * chain.d;
    else {
        chain.ldx = moei_stride(job->layer, chain.d);
        chain.x = p->rows + at * chain.ldx;
    }
    moei_quantised_rows(&chain, p, at);
    for (node = 0; node < MOE_NODE_COUNT; node++) {
        if (p->node[node] != NULL) chain.node[node] = p->node[node] + (moei_keeps(&p->call) ? first : at) * chain.ld[node];
        if (p->d_node[node] != NULL) chain.d_node[node] = p->d_node[node] + at * chain.ld[node];
    }
    if (p->d_rows != NULL) chain.d_x = p->d_rows + at * chain.ldx, chain.ld_dx = chain.ldx;
    return chain;
}

/* The row of its expert's input that entry i, counted from the expert's first, takes part in. */
static size_t moei_row_of(const moe_layer_pass *p, const moe_entry *entry, size_t i) { return p->routing.plan.rows > 0 ? (size_t)entry->rank : i; }

static size_t moei_entry_count(const moe_layer_pass *p, size_t e) { return p->routing.plan.offsets[e + 1] - p->routing.plan.offsets[e]; }

/* gather, columns from .. to: the input rows of an expert: its tokens, times the weight on the input; soft mixes them. */
static void moei_gather(const moei_job *job, const moei_chain *chain, size_t from, size_t to) {
    const moe_layer_pass *p = job->p;
    const moe_entry *entries = p->routing.plan.entries + p->routing.plan.offsets[chain->block];
    size_t count = moei_entry_count(p, chain->block), i;
    moe_real *rows = p->rows + (moei_first_row(p, chain->block) - job->base) * chain->ldx + from;
    int plain = moei_is_plain(job->layer, p);
    if (chain->x != rows - from) return; /* x itself is read */
    for (i = 0; !plain && i < chain->n; i++) memset(rows + i * chain->ldx, 0, (to - from) * sizeof(moe_real));
    for (i = 0; i < count; i++) {
        const moe_real *x = p->x + (size_t)entries[i].token * chain->d + from;
        moe_real *row = rows + moei_row_of(p, entries + i, i) * chain->ldx;
        if (plain) memcpy(row, x, (to - from) * sizeof(moe_real));
        else moe_axpy(job->layer->kernels, to - from, entries[i].weight_in, x, row);
    }
}

/* Takes over activations that the score has made already. */
static void moei_gather_nodes(const moei_job *job, const moei_chain *chain, int share) {
    const moe_layer_pass *p = job->p;
    const moe_entry *entries = p->routing.plan.entries + p->routing.plan.offsets[chain->block];
    size_t i, from, to;
    int node;
    for (node = 0; node < MOE_NODE_COUNT; node++) {
        size_t width = chain->width[node];
        if (!(job->border >> node & 1u)) continue;
        moei_columns_of(width, share, job->of, &from, &to);
        for (i = 0; i < chain->n; i++)
            memcpy(chain->node[node] + i * chain->ld[node] + from,
                   p->all[node] + (chain->block * p->call.n_tokens + (size_t)entries[i].token) * width + from, (to - from) * sizeof(moe_real));
    }
}

/* y_t += w_te f_e(x_t) for the entries of one expert, columns from .. to. */
static void moei_scatter(const moei_job *job, const moei_chain *chain, size_t from, size_t to) {
    const moe_layer_pass *p = job->p;
    const moe_entry *entries = p->routing.plan.entries + p->routing.plan.offsets[chain->block];
    size_t o = chain->width[MOE_NODE_OUTPUT], ld = chain->ld[MOE_NODE_OUTPUT], count = moei_entry_count(p, chain->block), i;
    for (i = 0; i < count; i++)
        moe_axpy(chain->layer->kernels, to - from, entries[i].weight_out, chain->node[MOE_NODE_OUTPUT] + moei_row_of(p, entries + i, i) * ld + from,
                 job->y + (size_t)entries[i].token * o + from);
}

/* One share of phase number `phase` of one expert's way: 0 gathers; then two for each stage: 1, 3, ... quantise what it reads, 2, 4, ... make its
   columns. */
static void moei_expert_phase(const moei_job *job, const moei_chain *chain, int phase, int share) {
    size_t from, to;
    int stage = (phase - 1) / 2;
    if (chain->n == 0) return;
    if (phase == 0) {
        moei_columns_of(chain->d, share, job->of, &from, &to);
        if (to > from) moei_gather(job, chain, from, to);
        if (job->border != 0) moei_gather_nodes(job, chain, share);
        return;
    }
    if (phase % 2 == 1) {
        moei_quantise_share(job, chain, stage, job->mask, share);
        return;
    }
    moei_columns_of(moei_stage_width(chain, stage), share, job->of, &from, &to);
    if (to <= from) return;
    moei_stage_columns(chain, stage, job->mask, from, to);
    if (stage == moei_last_stage(chain->expert)) moei_scatter(job, chain, from, to);
}

static void moei_expert_task(void *work, int index) {
    const moei_job *job = (const moei_job *)work;
    size_t e;
    for (e = job->first; e < job->end; e++) {
        moei_chain chain = moei_expert_chain(job, e);
        moei_expert_phase(job, &chain, job->phase, index);
    }
}

/* The next experts whose rows fit the buffers of `room` rows together: all that do for several threads, else one. 0: none is left. */
static int moei_next_group(moei_job *job, size_t room) {
    size_t experts = (size_t)job->layer->config.router.n_experts, rows = 0;
    job->first = job->end;
    while (job->first < experts && moei_rows_of(job->p, job->first) == 0) job->first++;
    if (job->first == experts) return 0;
    job->base = moei_first_row(job->p, job->first);
    for (job->end = job->first; job->end < experts; job->end++) {
        rows += moei_rows_of(job->p, job->end);
        if (rows > room || (job->of == 1 && job->end > job->first)) break;
    }
    return 1;
}

static void moei_layer_experts(const moe_layer *layer, moe_layer_pass *p, const moei_chain *common, moe_real *y, const moe_parallel *team) {
    size_t experts = (size_t)layer->config.router.n_experts, room = moei_expert_rows(&layer->config, p->call.n_tokens);
    moei_job job = moei_job_begin(layer, p, common);
    int last = 2 * moei_last_stage(job.chain.expert) + 2, step = moei_quantises(&job) ? 1 : 2;
    job.y = y;
    job.of = moei_tasks(team, &job.chain, p->routing.plan.rows > 0 ? experts * p->routing.plan.rows : p->routing.plan.offsets[experts], experts);
    while (moei_next_group(&job, room)) {
        if (job.of == 1) {
            moei_chain chain = moei_expert_chain(&job, job.first);
            for (job.phase = 0; job.phase <= last; job.phase += step) moei_expert_phase(&job, &chain, job.phase, 0);
        } else
            for (job.phase = 0; job.phase <= last; job.phase += step) moei_run_phase(team, moei_expert_task, &job);
    }
}

/* ---- what is added to y besides ------------------------------------------------------------------------------------------------------------ */

/* 1 - sum of a token's weights: the share of the input itself. */
static moe_real moei_input_share(const moe_layer *layer, const moe_layer_pass *p, size_t t) {
    size_t experts = (size_t)layer->config.router.n_experts, e;
    moe_real share = MOEI_R(1.0);
    for (e = 0; e < experts; e++) share -= p->routing.weights[(p->routing.first + t) * experts + e];
    return share;
}

/* y_t += (1 - sum_e w_te) x_t; padding has no weights and stays out. */
static void moei_layer_add_input(const moe_layer *layer, const moe_layer_pass *p, moe_real *y) {
    size_t d = (size_t)layer->config.router.d_model, t;
    for (t = 0; layer->config.add_input && t < p->call.n_tokens; t++)
        if (moei_is_real(&p->call, t)) moe_axpy(layer->kernels, d, moei_input_share(layer, p, t), p->x + t * d, y + t * d);
}

static moei_chain moei_shared_chain(const moei_job *job) {
    const moe_layer_pass *p = job->p;
    moei_chain chain = job->chain;
    int node;
    chain.n = p->call.n_tokens;
    chain.x = p->x;
    moei_quantised_rows(&chain, p, 0);
    for (node = 0; node < MOE_NODE_COUNT; node++) chain.node[node] = p->shared[node], chain.d_node[node] = p->d_shared[node];
    return chain;
}

/* y_t += shared(x_t), times sigmoid(s . x_t) when there is such a gate; for padding too. */
static void moei_shared_task(void *work, int index) {
    const moei_job *job = (const moei_job *)work;
    const moe_layer_pass *p = job->p;
    moei_chain chain = moei_shared_chain(job);
    size_t o = chain.width[MOE_NODE_OUTPUT], ld = chain.ld[MOE_NODE_OUTPUT], from, to, t;
    if (job->phase % 2 == 0) {
        moei_quantise_share(job, &chain, job->phase / 2, job->mask, index);
        return;
    }
    moei_columns_of(moei_stage_width(&chain, job->phase / 2), index, job->of, &from, &to);
    if (to <= from) return;
    moei_stage_columns(&chain, job->phase / 2, job->mask, from, to);
    if (job->phase / 2 < moei_last_stage(chain.expert)) return;
    for (t = 0; t < chain.n; t++)
        moe_axpy(job->layer->kernels, to - from, p->shared_factor[t], chain.node[MOE_NODE_OUTPUT] + t * ld + from, job->y + t * o + from);
}

static void moei_layer_shared(const moe_layer *layer, moe_layer_pass *p, moe_real *y, const moe_parallel *team) {
    const moe_real *gate = layer->tensors[MOE_SHARED_SIGMOID];
    moei_chain common;
    moei_job job;
    size_t t;
    if (layer->config.n_shared == 0) return;
    common = moei_chain_begin(layer, MOEI_SHARED);
    job = moei_job_begin(layer, p, &common);
    job.y = y;
    job.of = moei_tasks(team, &job.chain, p->call.n_tokens, 1);
    for (t = 0; t < p->call.n_tokens; t++)
        p->shared_factor[t] = gate != NULL ? moe_sigmoid(moe_dot(layer->kernels, job.chain.d, gate, p->x + t * job.chain.d)) : MOEI_R(1.0);
    for (job.phase = !moei_quantises(&job); job.phase / 2 <= moei_last_stage(job.chain.expert); job.phase += moei_quantises(&job) ? 1 : 2)
        moei_run_phase(team, moei_shared_task, &job);
}

/* What must be there before anything is computed; the router checks the rest. */
static moe_status moei_layer_call_check(const moe_layer *layer, const moe_call *call) {
    int place;
    if (!MOEI_KEPT(ACTS, layer->config.expert == MOE_EXPERT_MLP ? layer->config.act : (int)MOE_ACT_SILU) && layer->config.expert != MOE_EXPERT_LINEAR)
        return MOE_ERR_UNSUPPORTED;
    if (layer->config.n_shared > 0 && !MOEI_KEPT(ACTS, MOE_ACT_SILU)) return MOE_ERR_UNSUPPORTED;
    if (!MOEI_KEPT(EXTRAS, MOE_EXTRA_SHAPED) && moei_is_shaped(&layer->config)) return MOE_ERR_UNSUPPORTED;
    if (!MOEI_FITS_INT32(call->n_tokens)) return MOE_ERR_OVERFLOW;
    if (call->n_tokens > 0 && call->x == NULL) return MOE_ERR_ARGUMENT;
    for (place = 0; layer->places >> place != 0; place++)
        if (!moei_place_is_set(place, layer->places, layer->tensors[place]) && !(layer->packed[place] != NULL && moei_uses_packed(layer, call)))
            return MOE_ERR_ARGUMENT;
    return MOE_OK;
}

moe_status moe_layer_forward(const moe_layer *layer, const moe_call *call, moe_real *y, void *work, size_t work_size, moe_layer_pass *pass) {
    moei_layout l = moei_layout_begin(work);
    moe_layer_pass p;
    moe_parallel team;
    moei_chain chain;
    moe_router router;
    moe_status status;
    if (layer == NULL || call == NULL) return MOE_ERR_ARGUMENT;
    if (layer->config.transport != NULL) return layer->config.transport->ways->forward(layer, call, y, work, work_size, pass);
    if (work == NULL || (call->n_tokens > 0 && y == NULL)) return MOE_ERR_ARGUMENT;
    status = call->batch == NULL ? moei_layer_call_check(layer, call) : MOE_ERR_ARGUMENT; /* a batch needs the experts of all */
    if (status != MOE_OK) return status;
    chain = moei_chain_begin(layer, layer->config.expert);
    moei_layer_layout(layer, &chain, call->n_tokens, call->n_past, moei_keeps(call), &l, &p);
    if (l.overflow) return MOE_ERR_OVERFLOW;
    if (l.used > work_size) return MOE_ERR_SPACE;
    p.call = *call;
    p.x = call->x;
    team = moei_team(call);
    router = moei_layer_router(layer);
    moei_layer_score_experts(layer, &p, &chain, &team);
    status = moe_route(&router, &p.call, p.route_memory, p.route_size, &p.routing);
    if (status != MOE_OK) return status;
    if (call->n_tokens > 0) memset(y, 0, call->n_tokens * (size_t)layer->config.d_out * sizeof(moe_real));
    moei_layer_experts(layer, &p, &chain, y, &team);
    moei_layer_add_input(layer, &p, y);
    moei_layer_shared(layer, &p, y, &team);
    if (pass != NULL) *pass = p;
    return MOE_OK;
}

/* ==== the report on packed weights ================================================================================================== */

enum { MOEI_PROBES = 64 }; /* tokens for an expert that the router leaves out */

moe_status moe_layer_quantise_work_size(const moe_layer *layer, int type, size_t n_tokens, size_t *bytes) {
    moei_layout l = moei_layout_begin(NULL);
    moe_layer as_packed;
    moe_layer_pass p;
    moei_chain chain;
    moe_status status;
    if (layer == NULL || bytes == NULL) return MOE_ERR_ARGUMENT;
    if (!MOEI_FITS_INT32(n_tokens)) return MOE_ERR_OVERFLOW;
    status = moe_layer_pack_size(layer, type, bytes);
    if (status != MOE_OK) return status;
    as_packed = *layer;
    as_packed.is_packed = 1, as_packed.packed_type = type;
    chain = moei_chain_begin(&as_packed, layer->config.expert);
    moei_layer_layout(&as_packed, &chain, n_tokens, 0, 0, &l, &p);
    (void)moei_take_reals(&l, n_tokens, (size_t)layer->config.d_out);
    if (l.overflow) return MOE_ERR_OVERFLOW;
    *bytes = l.used;
    return MOE_OK;
}

/* All stages of a chain in this thread. */
static void moei_chain_forward(const moei_job *job, const moei_chain *chain, unsigned mask) {
    int stage;
    for (stage = 0; stage <= moei_last_stage(chain->expert); stage++) {
        if (chain->packed && moei_quantises(job)) moei_quantise_share(job, chain, stage, mask, 0);
        moei_stage_columns(chain, stage, mask, 0, moei_stage_width(chain, stage));
    }
}

/* Runs expert e with the tensors, into exact [n,o], and with the packed weights. */
static void moei_measure_expert(moei_job *job, size_t e, moe_real *exact, moe_quant_error *out) {
    const moe_layer_pass *p = job->p;
    const moe_entry *entries = p->routing.plan.entries + p->routing.plan.offsets[e];
    moei_chain chain = job->chain;
    size_t o = chain.width[MOE_NODE_OUTPUT], ld = chain.ld[MOE_NODE_OUTPUT], i, j, t;
    double off = 0.0, all = 0.0;
    int node;
    out->rows = p->routing.plan.rows > 0 ? p->call.n_tokens : moei_entry_count(p, e);
    chain.n = p->routing.plan.rows == 0 && out->rows > 0 ? out->rows : p->call.n_tokens < MOEI_PROBES ? p->call.n_tokens : (size_t)MOEI_PROBES;
    if (chain.n > moei_expert_rows(&job->layer->config, p->call.n_tokens)) chain.n = moei_expert_rows(&job->layer->config, p->call.n_tokens);
    chain.block = e, chain.x = p->rows, chain.ldx = moei_stride(job->layer, chain.d);
    moei_quantised_rows(&chain, p, 0);
    for (node = 0; node < MOE_NODE_COUNT; node++) chain.node[node] = p->node[node];
    for (i = 0, t = 0; i < chain.n; i++, t++) {
        while (out->rows == 0 && t < p->call.n_tokens && !moei_is_real(&p->call, t)) t++;
        if (t >= p->call.n_tokens) t = p->call.n_tokens - 1; /* fewer real tokens than rows: the last one again */
        memcpy(p->rows + i * chain.ldx, p->x + (p->routing.plan.rows == 0 && out->rows > 0 ? (size_t)entries[i].token : t) * chain.d,
               chain.d * sizeof(moe_real));
    }
    chain.packed = 0;
    moei_chain_forward(job, &chain, moei_ancestors(chain.expert, MOE_NODE_OUTPUT));
    for (i = 0; i < chain.n; i++) memcpy(exact + i * o, chain.node[MOE_NODE_OUTPUT] + i * ld, o * sizeof(moe_real));
    chain.packed = 1;
    moei_chain_forward(job, &chain, moei_ancestors(chain.expert, MOE_NODE_OUTPUT));
    for (i = 0; i < chain.n; i++)
        for (j = 0; j < o; j++) {
            double is = (double)exact[i * o + j], other = (double)chain.node[MOE_NODE_OUTPUT][i * ld + j] - is;
            off += other * other, all += is * is;
        }
    out->output = all <= 0.0 ? MOEI_R(0.0) : (moe_real)MOEI_D(sqrt)(off / all); /* NaN stays */
}

/* The report: packed is the layer with its packed weights. */
static moe_status moei_measure(const moe_layer *packed, const moe_call *calibration, void *work, size_t work_size, moe_quant_error *errors) {
    moe_layer plain = *packed;
    moe_call call = *calibration;
    moe_layer_pass routed, p;
    moei_layout l = moei_layout_begin(work);
    moei_chain chain;
    moei_job job;
    moe_real *y;
    size_t e;
    moe_status status;
    call.training = call.keep = 0;
    chain = moei_chain_begin(packed, packed->config.expert);
    moei_layer_layout(packed, &chain, call.n_tokens, call.n_past, 0, &l, &p);
    y = moei_take_reals(&l, call.n_tokens, (size_t)packed->config.d_out);
    if (l.overflow) return MOE_ERR_OVERFLOW;
    if (l.used > work_size) return MOE_ERR_SPACE;
    plain.is_packed = 0;
    status = moe_layer_forward(&plain, &call, y, work, work_size, &routed);
    if (status != MOE_OK) return status;
    p.call = routed.call, p.x = routed.x, p.routing = routed.routing; /* the routing lies first in both layouts */
    job = moei_job_begin(packed, &p, &chain);
    for (e = 0; e < (size_t)packed->config.router.n_experts; e++) moei_measure_expert(&job, e, y, errors + e);
    return MOE_OK;
}

moe_status moe_layer_quantise(moe_layer *layer, int type, void *memory, size_t size, const moe_call *calibration, void *work, size_t work_size,
                              moe_quant_error *errors, moe_error *error) {
    moe_layer made;
    moe_status status;
    size_t bytes;
    if (layer == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "layer must not be NULL");
    if (errors != NULL && layer->config.transport != NULL)
        return moei_error(error, MOE_ERR_UNSUPPORTED, "a report needs all experts, and the layer holds those of one rank: errors must be NULL");
    if (errors != NULL && (calibration == NULL || work == NULL || calibration->n_tokens == 0))
        return moei_error(error, MOE_ERR_ARGUMENT, "a report needs calibration with at least one token, and work");
    if (errors != NULL) {
        status = !moei_fit_int32(calibration->n_past, calibration->n_tokens)
                     ? MOE_ERR_OVERFLOW
                     : moe_layer_quantise_work_size(layer, type, calibration->n_past + calibration->n_tokens, &bytes);
        if (status != MOE_OK) return moei_error(error, status, "type = %d for this batch: %s", type, moe_status_text(status));
        if (work_size < bytes) return moei_error(error, MOE_ERR_SPACE, "work_size = %z: the report needs %z bytes", work_size, bytes);
    }
    made = *layer;
    status = moe_layer_pack(&made, type, memory, size, error);
    if (status != MOE_OK) layer->is_packed = layer->is_packed && made.is_packed;
    if (status == MOE_OK && errors != NULL) {
        status = moei_measure(&made, calibration, work, work_size, errors);
        if (status != MOE_OK && layer->is_packed && moei_overlaps(layer, memory, size)) layer->is_packed = 0;
        if (status != MOE_OK) return moei_error(error, status, "the calibration batch: %s", moe_status_text(status));
    }
    if (status == MOE_OK) *layer = made;
    return status;
}

/* ==== one call: backward ============================================================================================================ */

#ifndef MOE_NO_TRAIN

/* What a loss hands back: the gradient of y, or those of every entry's output and weight. */
typedef struct moei_returned {
    const moe_real *dy, *d_outputs, *d_weights;
} moei_returned;

/* dO = w dy, columns from .. to, for the rows of one expert. */
static void moei_scatter_backward(const moei_job *job, const moei_chain *chain, size_t from, size_t to) {
    size_t first = job->p->routing.plan.offsets[chain->block], o = chain->width[MOE_NODE_OUTPUT], i, bytes = (to - from) * sizeof(moe_real);
    moe_real *d_output = chain->d_node[MOE_NODE_OUTPUT] + from;
    const moe_real *dy = job->back->dy;
    for (i = 0; i < chain->n; i++) {
        if (dy == NULL) memcpy(d_output + i * o, job->back->d_outputs + (first + i) * o + from, bytes);
        else memset(d_output + i * o, 0, bytes);
    }
    for (i = 0; dy != NULL && i < moei_entry_count(job->p, chain->block); i++) {
        const moe_entry *entry = job->p->routing.plan.entries + first + i;
        moe_axpy(chain->layer->kernels, to - from, entry->weight_out, dy + (size_t)entry->token * o + from,
                 d_output + moei_row_of(job->p, entry, i) * o);
    }
}

/* dw = dy . O for the entries from .. to of one expert. */
static void moei_weights_backward(const moei_job *job, const moei_chain *chain, size_t from, size_t to) {
    size_t first = job->p->routing.plan.offsets[chain->block], o = chain->width[MOE_NODE_OUTPUT], i;
    moe_real *d_weight = job->p->routing.d_weight_out + first;
    for (i = from; i < to; i++) {
        const moe_entry *entry = job->p->routing.plan.entries + first + i;
        if (job->back->dy == NULL) d_weight[i] = job->back->d_weights[first + i];
        else
            d_weight[i] = moe_dot(chain->layer->kernels, o, job->back->dy + (size_t)entry->token * o,
                                  chain->node[MOE_NODE_OUTPUT] + moei_row_of(job->p, entry, i) * o);
    }
}

/* dx_t += w_in d_row, columns from .. to. */
static void moei_gather_backward(const moei_job *job, const moei_chain *chain, size_t from, size_t to) {
    size_t first = job->p->routing.plan.offsets[chain->block], i;
    for (i = 0; job->dx != NULL && i < moei_entry_count(job->p, chain->block); i++) {
        const moe_entry *entry = job->p->routing.plan.entries + first + i;
        moe_axpy(chain->layer->kernels, to - from, entry->weight_in, chain->d_x + moei_row_of(job->p, entry, i) * chain->ld_dx + from,
                 job->dx + (size_t)entry->token * chain->d + from);
    }
}

/* dw_in = d_row . x_t for the entries from .. to. */
static void moei_input_weights_backward(const moei_job *job, const moei_chain *chain, size_t from, size_t to) {
    size_t first = job->p->routing.plan.offsets[chain->block], i;
    for (i = from; i < to; i++) {
        const moe_entry *entry = job->p->routing.plan.entries + first + i;
        job->p->routing.d_weight_in[first + i] = moe_dot(chain->layer->kernels, chain->d, chain->d_x + moei_row_of(job->p, entry, i) * chain->ld_dx,
                                                         job->p->x + (size_t)entry->token * chain->d);
    }
}

/* Hands the gradients of activations that were taken over to where they came from. */
static void moei_gather_nodes_backward(const moei_job *job, const moei_chain *chain, size_t from, size_t to) {
    const moe_layer_pass *p = job->p;
    const moe_entry *entries = p->routing.plan.entries + p->routing.plan.offsets[chain->block];
    size_t i;
    int node;
    for (node = 0; node < MOE_NODE_COUNT; node++)
        for (i = from; (job->border >> node & 1u) && i < to; i++)
            moe_axpy(chain->layer->kernels, chain->width[node], MOEI_R(1.0), chain->d_node[node] + i * chain->ld[node],
                     p->d_all[node] + (chain->block * p->call.n_tokens + (size_t)entries[i].token) * chain->width[node]);
}

static void moei_zero_nodes(const moei_chain *chain) {
    int node;
    for (node = 0; node < MOE_NODE_COUNT; node++)
        if (chain->d_node[node] != NULL) memset(chain->d_node[node], 0, chain->n * chain->ld[node] * sizeof(moe_real));
}

/* One share of a phase: 0 prepares, then the stages from the last to the first, then what reads whole rows. */
static void moei_expert_back_phase(const moei_job *job, const moei_chain *chain, int phase, int share) {
    int stages = moei_last_stage(chain->expert) + 1, stage = stages - phase, row;
    size_t from, to, d_from, d_to;
    if (chain->n == 0) return;
    moei_columns_of(chain->d, share, job->of, &d_from, &d_to);
    if (phase == 0) {
        moei_columns_of(chain->width[MOE_NODE_OUTPUT], share, job->of, &from, &to);
        if (d_to > d_from) moei_gather(job, chain, d_from, d_to);
        if (to > from) moei_scatter_backward(job, chain, from, to);
        for (row = 0; (size_t)row < chain->n && !moei_begun(chain->expert, MOEI_X, -1, job->mask); row++)
            memset(chain->d_x + (size_t)row * chain->ld_dx + d_from, 0, (d_to - d_from) * sizeof(moe_real)); /* nobody reads x */
    }
    if (phase > 0 && stage >= 0) moei_stage_backward(chain, stage, job->mask, share, job->of);
    if (stage == 0 && d_to > d_from) moei_gather_backward(job, chain, d_from, d_to);
    if (stage >= 0) return;
    moei_columns_of(moei_entry_count(job->p, chain->block), share, job->of, &from, &to);
    moei_weights_backward(job, chain, from, to);
    if (!moei_is_plain(job->layer, job->p)) moei_input_weights_backward(job, chain, from, to);
    moei_gather_nodes_backward(job, chain, from, to);
}

static void moei_expert_back_task(void *work, int index) {
    const moei_job *job = (const moei_job *)work;
    size_t e;
    for (e = job->first; e < job->end; e++) {
        moei_chain chain = moei_expert_chain(job, e);
        moei_expert_back_phase(job, &chain, job->phase, index);
    }
}

static void moei_experts_backward(const moe_layer *layer, moe_layer_pass *p, const moei_returned *back, moe_real *dx, const moe_parallel *team) {
    size_t experts = (size_t)layer->config.router.n_experts, room = moei_expert_rows(&layer->config, p->call.n_tokens);
    moei_chain common = moei_chain_begin(layer, layer->config.expert);
    moei_job job = moei_job_begin(layer, p, &common);
    int last = moei_last_stage(job.chain.expert) + 2;
    job.back = back, job.dx = dx;
    job.of = moei_tasks(team, &job.chain, 2 * (p->routing.plan.rows > 0 ? experts * p->routing.plan.rows : p->routing.plan.offsets[experts]), experts);
    while (moei_next_group(&job, room)) {
        if (job.of == 1) {
            moei_chain chain = moei_expert_chain(&job, job.first);
            for (job.phase = 0; job.phase <= last; job.phase++) moei_expert_back_phase(&job, &chain, job.phase, 0);
        } else
            for (job.phase = 0; job.phase <= last; job.phase++) moei_run_phase(team, moei_expert_back_task, &job);
    }
}

/* dx_t += (1 - sum w) dy_t and dw_te -= dy_t . x_t. */
static void moei_add_input_backward(const moe_layer *layer, moe_layer_pass *p, const moe_real *dy, moe_real *dx) {
    size_t d = (size_t)layer->config.router.d_model, t, i;
    if (!layer->config.add_input) return;
    for (t = 0; t < p->call.n_tokens; t++)
        if (dx != NULL && moei_is_real(&p->call, t)) moe_axpy(layer->kernels, d, moei_input_share(layer, p, t), dy + t * d, dx + t * d);
    for (i = 0; i < p->routing.plan.offsets[layer->config.router.n_experts]; i++) {
        t = (size_t)p->routing.plan.entries[i].token;
        p->routing.d_weight_out[i] -= moe_dot(layer->kernels, d, dy + t * d, p->x + t * d);
    }
}

/* Back through the activations that the score read, for all experts and tokens. */
static void moei_score_experts_backward(const moe_layer *layer, moe_layer_pass *p, moe_real *dx) {
    moei_chain common;
    moei_job job;
    size_t e;
    if (moei_scored_node(&layer->config) < 0) return;
    common = moei_chain_begin(layer, layer->config.expert);
    job = moei_job_begin(layer, p, &common);
    for (e = 0; e < (size_t)layer->config.router.n_experts; e++) {
        moei_chain chain = moei_all_chain(&job, e);
        chain.d_x = dx;
        moei_chain_backward(&chain, moei_all_nodes(layer));
    }
}

static void moei_shared_back_task(void *work, int index) {
    const moei_job *job = (const moei_job *)work;
    moei_chain chain = moei_shared_chain(job);
    chain.d_x = job->dx;
    chain.summed = 1u << MOE_NODE_COUNT;
    moei_stage_backward(&chain, job->phase, job->mask, index, job->of);
}

/* With s = sigmoid(v . x): dO = s dy, dv += s (1 - s) (dy . O) x, dx += the same times v. */
static void moei_shared_backward(const moe_layer *layer, moe_layer_pass *p, const moe_real *dy, moe_real *dx, const moe_parallel *team) {
    const moe_real *gate = layer->tensors[MOE_SHARED_SIGMOID];
    moe_real *d_gate = layer->gradients[MOE_SHARED_SIGMOID];
    const moe_kernels *k = layer->kernels;
    size_t t, o = (size_t)layer->config.d_out, d = (size_t)layer->config.router.d_model;
    moei_chain common;
    moei_job job;
    moei_chain chain;
    if (layer->config.n_shared == 0) return;
    common = moei_chain_begin(layer, MOEI_SHARED);
    job = moei_job_begin(layer, p, &common);
    job.dx = dx;
    chain = moei_shared_chain(&job);
    memset(chain.d_node[MOE_NODE_OUTPUT], 0, chain.n * o * sizeof(moe_real));
    for (t = 0; t < chain.n; t++) {
        moe_real s = p->shared_factor[t], slope;
        moe_axpy(k, o, s, dy + t * o, chain.d_node[MOE_NODE_OUTPUT] + t * o);
        if (gate == NULL) continue;
        slope = s * (MOEI_R(1.0) - s) * moe_dot(k, o, dy + t * o, chain.node[MOE_NODE_OUTPUT] + t * o);
        if (d_gate != NULL) moe_axpy(k, d, slope, p->x + t * d, d_gate);
        if (dx != NULL) moe_axpy(k, d, slope, gate, dx + t * d);
    }
    job.of = moei_tasks(team, &job.chain, 2 * chain.n, 1);
    for (job.phase = moei_last_stage(chain.expert); job.phase >= 0; job.phase--) moei_run_phase(team, moei_shared_back_task, &job);
}

static moe_status moei_layer_backward(const moe_layer *layer, const moei_returned *back, moe_real *dx, moe_real *d_router_x, moe_layer_pass *pass) {
    moe_parallel team = moei_team(&pass->call);
    moe_router router;
    moe_status status;
    size_t e;
    int scored;
    router = moei_layer_router(layer);
    scored = moei_scored_node(&layer->config);
    if (scored >= 0) {
        moei_chain common = moei_chain_begin(layer, layer->config.expert);
        moei_job job = moei_job_begin(layer, pass, &common);
        for (e = 0; e < (size_t)layer->config.router.n_experts; e++) {
            moei_chain chain = moei_all_chain(&job, e);
            moei_zero_nodes(&chain);
        }
    }
    if (back->dy != NULL) moei_shared_backward(layer, pass, back->dy, dx, &team);
    moei_experts_backward(layer, pass, back, dx, &team);
    if (back->dy != NULL) moei_add_input_backward(layer, pass, back->dy, dx);
    status = moe_route_backward(&router, &pass->call, &pass->routing, layer->gradients, pass->call.router_x != NULL ? d_router_x : dx,
                                scored < 0 ? NULL : pass->d_all[scored]);
    if (status != MOE_OK) return status;
    moei_score_experts_backward(layer, pass, dx);
    return MOE_OK;
}

moe_status moe_layer_backward(const moe_layer *layer, const moe_real *dy, moe_real *dx, moe_real *d_router_x, moe_layer_pass *pass) {
    moei_returned back;
    if (layer == NULL || pass == NULL) return MOE_ERR_ARGUMENT;
    back.dy = dy, back.d_outputs = back.d_weights = NULL;
    if (pass->ranks != NULL) return layer->config.transport->ways->backward(layer, &back, dx, d_router_x, pass);
    if (pass->call.n_tokens > 0 && dy == NULL) return MOE_ERR_ARGUMENT;
    if (pass->d_rows == NULL || !pass->call.training) return MOE_ERR_STATE;
    if (pass->call.n_tokens == 0) return MOE_OK;
    return moei_layer_backward(layer, &back, dx, d_router_x, pass);
}

const moe_real *moe_layer_expert_outputs(const moe_layer *layer, const moe_layer_pass *pass) {
    if (layer == NULL || pass == NULL || pass->d_rows == NULL || pass->routing.plan.rows > 0 || pass->ranks != NULL) return NULL;
    return pass->node[MOE_NODE_OUTPUT];
}

moe_status moe_layer_backward_experts(const moe_layer *layer, const moe_real *d_outputs, const moe_real *d_weights, moe_real *dx, moe_real *d_router_x,
                                      moe_layer_pass *pass) {
    moei_returned back;
    if (layer == NULL || pass == NULL) return MOE_ERR_ARGUMENT;
    if (pass->d_rows == NULL || !pass->call.training || pass->routing.plan.rows > 0) return MOE_ERR_STATE;
    if (layer->config.n_shared > 0 || layer->config.add_input || layer->config.router.apply_to == MOE_APPLY_INPUT || pass->ranks != NULL)
        return MOE_ERR_UNSUPPORTED;
    if (pass->call.n_tokens == 0) return MOE_OK;
    if (d_outputs == NULL || d_weights == NULL) return MOE_ERR_ARGUMENT;
    back.dy = NULL, back.d_outputs = d_outputs, back.d_weights = d_weights;
    return moei_layer_backward(layer, &back, dx, d_router_x, pass);
}

/* Where the router's state lies; only a layer that is trained changes it. */
static moe_status moei_layer_state(const moe_layer *layer, moe_real **state) {
    moe_slot slot;
    int place;
    for (place = 0; place < MOE_ROUTER_SLOTS; place++) {
        state[place] = NULL;
        if (moe_layer_slot(&layer->config, place, &slot) != MOE_OK || (slot.flags & (unsigned)MOE_PARAM_STATE) == 0) continue;
        if (layer->gradients[place] == NULL) return MOE_ERR_STATE;
        memcpy(&state[place], &layer->tensors[place], sizeof state[place]);
    }
    return MOE_OK;
}

moe_status moe_layer_observe(moe_layer *layer, const moe_layer_pass *pass) {
    moe_real *state[MOE_ROUTER_SLOTS];
    moe_router router;
    moe_status status;
    if (layer == NULL || pass == NULL) return MOE_ERR_ARGUMENT;
    if (pass->d_rows == NULL || !pass->call.training) return MOE_ERR_STATE;
    status = moei_layer_state(layer, state);
    if (status != MOE_OK) return status;
    router = moei_layer_router(layer);
    return moe_router_observe(&router, &pass->call, &pass->routing, state);
}

moe_status moe_layer_advance(moe_layer *layer) {
    moe_real *state[MOE_ROUTER_SLOTS];
    moe_status status;
    if (layer == NULL) return MOE_ERR_ARGUMENT;
    status = moei_layer_state(layer, state);
    return status == MOE_OK ? moe_router_advance(&layer->router, state) : status;
}

#endif

/* ==== experts on several machines ======================================================================================================= */

void moe_rank_part(size_t n, int rank, int n_ranks, size_t *first, size_t *count) {
    size_t parts = n_ranks > 0 ? (size_t)n_ranks : 1, part = rank > 0 ? (size_t)rank : 0, each = n / parts, more = n % parts;
    *first = part * each + (part < more ? part : more);
    *count = each + (part < more);
}

enum { MOEI_WORDS = 8 }; /* numbers for each rank that a transport can exchange without other memory */

/* ---- agreement ------------------------------------------------------------------------------------------------------------------- */

/* counts of the transport, counted. */
static moe_status moei_counts(const moe_transport *t, size_t n, const uint64_t *send, uint64_t *receive) {
    int r;
    for (r = 0; r < t->n_ranks && t->traffic != NULL && t->traffic->bytes != NULL; r++)
        if (r != t->rank) t->traffic->bytes[r] += n * sizeof(uint64_t);
    return t->counts(t->ctx, n, send, receive) == MOE_OK ? MOE_OK : MOE_ERR_TRANSPORT;
}

/* The same n <= MOEI_WORDS numbers to all; *all = those of rank r from all[r n] on. */
static moe_status moei_tell_ranks(const moe_transport *t, size_t n, const uint64_t *values, const uint64_t **all) {
    uint64_t *send = t->memory, *receive = send + (size_t)t->n_ranks * MOEI_WORDS;
    int r;
    for (r = 0; r < t->n_ranks; r++) memcpy(send + (size_t)r * n, values, n * sizeof *values);
    *all = receive;
    return moei_counts(t, n, send, receive);
}

/* A status as a number, and what a rank returns that hears those of all, `stride` numbers apart. */
static uint64_t moei_status_word(moe_status status) { return (uint64_t)(unsigned)-(int)status; }

static moe_status moei_heard(const moe_transport *t, moe_status own, const uint64_t *words, size_t stride) {
    int r;
    for (r = 0; r < t->n_ranks && own == MOE_OK; r++)
        if (words[(size_t)r * stride] != 0) own = MOE_ERR_PEER;
    return own;
}

moe_status moe_transport_status(const moe_transport *transport, moe_status status) {
    const uint64_t *all;
    uint64_t word = moei_status_word(status);
    moe_status sent;
    if (transport == NULL || transport->ways == NULL) return MOE_ERR_ARGUMENT;
    sent = moei_tell_ranks(transport, 1, &word, &all);
    return sent == MOE_OK ? moei_heard(transport, status, all, 1) : sent;
}

/* *rank: the first that differs in *i, the first number that any rank has otherwise than rank 0; *theirs is its number. All ranks see the same. */
static moe_status moei_agree(const moe_transport *t, size_t n, const uint64_t *values, int *rank, size_t *i, uint64_t *theirs) {
    const uint64_t *all;
    size_t from, part, j;
    int r;
    for (from = 0; from < n; from += part) {
        part = n - from < MOEI_WORDS ? n - from : (size_t)MOEI_WORDS;
        if (moei_tell_ranks(t, part, values + from, &all) != MOE_OK) return MOE_ERR_TRANSPORT;
        for (j = 0; j < part; j++)
            for (r = 1; r < t->n_ranks; r++)
                if (all[(size_t)r * part + j] != all[j]) {
                    for (*rank = 0; all[(size_t)*rank * part + j] == all[(size_t)t->rank * part + j];) ++*rank; /* as seen from here */
                    *i = from + j, *theirs = all[(size_t)*rank * part + j];
                    return MOE_ERR_CONFIG;
                }
    }
    return MOE_OK;
}

moe_status moe_transport_agree(const moe_transport *transport, size_t n, const uint64_t *values, int *rank, size_t *i) {
    uint64_t theirs = 0;
    int other = 0;
    size_t place = 0;
    moe_status status;
    if (transport == NULL || transport->ways == NULL || (n > 0 && values == NULL)) return MOE_ERR_ARGUMENT;
    status = moei_agree(transport, n, values, &other, &place, &theirs);
    if (status == MOE_ERR_CONFIG && rank != NULL) *rank = other;
    if (status == MOE_ERR_CONFIG && i != NULL) *i = place;
    return status;
}

/* A field of a configuration as a number. */
MOEI_TOOL uint64_t moei_field_bits(const moe_field *field, const void *config) {
    const unsigned char *at = (const unsigned char *)config + field->offset;
    uint64_t bits = 0;
    double real;
    moe_real value;
    int whole;
    if (field->kind == MOE_FIELD_REAL) {
        memcpy(&value, at, sizeof value);
        real = (double)value;
        memcpy(&bits, &real, sizeof bits);
        return bits;
    }
    memcpy(&whole, at, sizeof whole);
    return (uint64_t)(int64_t)whole;
}

/* Writes a field's number, which another rank has, into a configuration of scratch, and its text. */
static void moei_bits_text(const moe_field *field, uint64_t bits, void *config, char *text, size_t room) {
    unsigned char *at = (unsigned char *)config + field->offset;
    double real;
    moe_real value;
    int whole = (int)(int64_t)bits;
    memcpy(&real, &bits, sizeof real);
    value = (moe_real)real;
    if (field->kind == MOE_FIELD_REAL) memcpy(at, &value, sizeof value);
    else memcpy(at, &whole, sizeof whole);
    moe_field_text(field, config, text, room);
}

/* All settings as one number. The instruction set is each rank's own. */
static uint64_t moei_fields_sum(const moe_field *fields, const void *config) {
    uint64_t sum = 0;
    for (; fields->name != NULL; fields++)
        if (moei_strcmp(fields->name, "kernels") != 0) sum = (sum ^ moei_field_bits(fields, config)) * UINT64_C(0x9e3779b97f4a7c15) + (sum >> 29);
    return sum;
}

/* Whether all ranks have the same in every field; `scratch` is a copy of config that may be written to. */
MOEI_TOOL moe_status moei_agree_fields(const moe_transport *t, const moe_field *fields, const void *config, void *scratch, const char *what, moe_error *error) {
    char own[40], other[40];
    uint64_t bits = moei_fields_sum(fields, config), theirs = 0;
    size_t i, f;
    int rank = 0;
    moe_status status = moei_agree(t, 1, &bits, &rank, &i, &theirs);
    if (status == MOE_OK) return MOE_OK;
    if (status == MOE_ERR_TRANSPORT) return moei_error(error, status, "%sthe transport failed", what);
    for (f = 0; fields[f].name != NULL; f++) {
        if (moei_strcmp(fields[f].name, "kernels") == 0) continue;
        bits = moei_field_bits(&fields[f], config);
        status = moei_agree(t, 1, &bits, &rank, &i, &theirs);
        if (status == MOE_ERR_TRANSPORT) return moei_error(error, status, "%sthe transport failed", what);
        if (status == MOE_OK) continue;
        moe_field_text(&fields[f], config, own, sizeof own);
        moei_bits_text(&fields[f], theirs, scratch, other, sizeof other);
        return moei_error(error, status, "%s%s = %s: rank %d has %s; all ranks must have the same settings", what, fields[f].name, own, rank, other);
    }
    return MOE_OK;
}

static moe_status moei_layer_agree(const moe_layer_config *config, uint64_t seed, moe_error *error) {
    moe_layer_config scratch = *config;
    uint64_t theirs = 0;
    size_t i;
    int rank = 0;
    moe_status status = moei_agree_fields(config->transport, moei_layer_fields, config, &scratch, "", error);
    if (status == MOE_OK && (status = moei_agree(config->transport, 1, &seed, &rank, &i, &theirs)) != MOE_OK)
        return moei_error(error, status, "seed: rank %d has another one; all ranks must have the same", rank);
    return status;
}

/* ---- a batch of all ranks --------------------------------------------------------------------------------------------------------- */

/* The places of rows in one exchange, R numbers each. */
typedef struct moei_places {
    size_t *send_counts, *send_at, *receive_counts, *receive_at;
} moei_places;

/* What a layer with a transport needs in one call beside the pass of its own tokens. It lies in the work memory. */
typedef struct moei_ranks {
    const moe_transport *transport;
    moe_batch batch;
    size_t most;                 /* the most tokens of a rank */
    size_t first_expert, experts, most_experts; /* own, the most of a rank */
    size_t chunks;
    int is_broken;               /* the transport has failed; nobody calls it again */
    size_t *first_tokens;        /* [R+1] of each rank, and the end */
    uint64_t *out_counts, *in_counts; /* [R,most_experts+1] a status, and rows for each expert of the goal */
    moei_places places[MOE_EXCHANGES];
    moe_exchange exchange[MOE_EXCHANGES];
    moei_places hop_places[MOE_EXCHANGES]; /* with two_level: of the present hop, its rows on their way out and in, [hop_rows] */
    moe_exchange hop[MOE_EXCHANGES];
    unsigned char *hop_out[MOE_EXCHANGES], *hop_in[MOE_EXCHANGES];
    size_t hop_bytes;
    uint64_t *hop_counts, *hop_heard; /* [R,nodes] rows for the ranks of one place in every node */
    unsigned char *copy;         /* own rows on their way to all */
    moe_real *rows, *outputs, *d_outputs; /* [own rows: d, o, o] of the plan: x, f(x), its gradient */
    moe_real *received, *made, *d_received; /* [rows at home: d, o, d] x, f(x) or its gradient, gradient of x */
    size_t most_received;
    size_t *chunk_offsets;       /* [own experts + 1] the home's plan, but for the experts of one chunk without rows */
    moe_layer home;              /* the own experts as a layer of their own */
    moe_layer_pass home_pass;    /* its pass on what has been received */
    moe_layer_pass scored_pass;  /* and, for scores that read experts, on the tokens of all ranks */
    moe_real *all_x, *d_all_x;   /* [R most,d] */
    moe_real *nodes, *d_nodes;   /* [E,most,width] what the score reads of the own tokens */
    moe_real *parts;             /* [R most,d] gradients of the own tokens, from each rank */
} moei_ranks;

/* rows of the transport, counted. */
static moe_status moei_rows(const moe_transport *t, int stage, const moe_exchange *e) {
    int r;
    for (r = 0; r < t->n_ranks && t->traffic != NULL && (stage & MOE_EXCHANGE_BEGIN); r++) {
        if (r == t->rank || e->send_counts[r] == 0) continue;
        if (t->traffic->bytes != NULL) t->traffic->bytes[r] += e->send_counts[r] * e->row_bytes;
        t->traffic->messages++;
        t->traffic->messages_far += r / t->ranks_per_node != t->rank / t->ranks_per_node;
    }
    if (t->traffic != NULL && (stage & MOE_EXCHANGE_BEGIN)) t->traffic->exchanges++;
    return t->rows(t->ctx, stage, e) == MOE_OK ? MOE_OK : MOE_ERR_TRANSPORT;
}

/* ---- two levels: to the rank of the own node that has the place of the goal in its node, and from there to the goal -------------------------- */

static unsigned char *moei_copy_rows(unsigned char *to, const void *rows, size_t at, size_t count, size_t bytes) {
    if (count > 0) memcpy(to, (const unsigned char *)rows + at * bytes, count * bytes);
    return to + count * bytes;
}

/* Where a hop's rows lie: those of each rank behind those of the rank before. Returns how many come in. */
static size_t moei_hop_places(const moe_transport *t, const moei_places *p) {
    size_t out = 0, in = 0;
    int r;
    for (r = 0; r < t->n_ranks; r++) {
        p->send_at[r] = out, out += p->send_counts[r];
        p->receive_at[r] = in, in += p->receive_counts[r];
    }
    return in;
}

/* The first hop, inside the node: the rows for the ranks of place j in all nodes go to place j of this one; and how many come in for each node. */
static moe_status moei_hop_inside(moei_ranks *k, int slot, const moe_exchange *e) {
    const moe_transport *t = k->transport;
    const moei_places *p = &k->hop_places[slot];
    int each = t->ranks_per_node, nodes = t->n_ranks / each, node = t->rank / each, r, b;
    unsigned char *out = k->hop_out[slot];
    moe_status status;
    memset(k->hop_counts, 0, (size_t)t->n_ranks * (size_t)nodes * sizeof(uint64_t));
    for (r = 0; r < t->n_ranks; r++) {
        p->send_counts[r] = p->receive_counts[r] = 0;
        for (b = 0; b < nodes && r / each == node; b++) {
            int goal = b * each + r % each;
            k->hop_counts[(size_t)r * (size_t)nodes + (size_t)b] = e->send_counts[goal];
            p->send_counts[r] += e->send_counts[goal];
            out = moei_copy_rows(out, e->send, e->send_at[goal], e->send_counts[goal], e->row_bytes);
        }
    }
    status = moei_counts(t, (size_t)nodes, k->hop_counts, k->hop_heard);
    if (status != MOE_OK) return status;
    for (r = 0; r < t->n_ranks; r++)
        for (b = 0; b < nodes && r / each == node; b++) {
            uint64_t count = k->hop_heard[(size_t)r * (size_t)nodes + (size_t)b];
            if (count > k->hop_bytes / e->row_bytes) return MOE_ERR_TRANSPORT;
            p->receive_counts[r] += (size_t)count;
        }
    if (moei_hop_places(t, p) > k->hop_bytes / e->row_bytes) return MOE_ERR_TRANSPORT;
    k->hop[slot] = *e;
    k->hop[slot].send = k->hop_out[slot], k->hop[slot].receive = k->hop_in[slot];
    k->hop[slot].send_counts = p->send_counts, k->hop[slot].send_at = p->send_at;
    k->hop[slot].receive_counts = p->receive_counts, k->hop[slot].receive_at = p->receive_at;
    return moei_rows(t, MOE_EXCHANGE_BEGIN | MOE_EXCHANGE_END, &k->hop[slot]);
}

/* The second hop, between nodes: what the ranks of this node have for each other node, rank after rank. */
static moe_status moei_hop_across(moei_ranks *k, int slot, const moe_exchange *e) {
    const moe_transport *t = k->transport;
    const moei_places *p = &k->hop_places[slot];
    int each = t->ranks_per_node, nodes = t->n_ranks / each, node = t->rank / each, place = t->rank % each, r, b, i;
    unsigned char *out = k->hop_out[slot];
    for (b = 0; b < nodes; b++)
        for (i = 0; i < each; i++) { /* what rank i of this node sent: its rows for node 0, 1, ... */
            const uint64_t *counts = k->hop_heard + (size_t)(node * each + i) * (size_t)nodes;
            size_t at = p->receive_at[node * each + i];
            for (r = 0; r < b; r++) at += (size_t)counts[r];
            out = moei_copy_rows(out, k->hop_in[slot], at, (size_t)counts[b], e->row_bytes);
        }
    for (r = 0; r < t->n_ranks; r++) {
        p->send_counts[r] = p->receive_counts[r] = 0;
        for (i = 0; i < each && r % each == place; i++) {
            p->send_counts[r] += (size_t)k->hop_heard[(size_t)(node * each + i) * (size_t)nodes + (size_t)(r / each)];
            p->receive_counts[r] += e->receive_counts[r / each * each + i];
        }
    }
    if (moei_hop_places(t, p) > k->hop_bytes / e->row_bytes) return MOE_ERR_TRANSPORT;
    return moei_rows(t, MOE_EXCHANGE_BEGIN, &k->hop[slot]);
}

static moe_status moei_two_hops(moei_ranks *k, int slot, int stage) {
    const moe_exchange *e = &k->exchange[slot];
    const unsigned char *in = k->hop_in[slot];
    moe_status status = MOE_OK;
    int r;
    if (stage & MOE_EXCHANGE_BEGIN) {
        status = moei_hop_inside(k, slot, e);
        if (status == MOE_OK) status = moei_hop_across(k, slot, e);
    }
    if (status != MOE_OK || !(stage & MOE_EXCHANGE_END)) return status;
    status = moei_rows(k->transport, MOE_EXCHANGE_END, &k->hop[slot]);
    for (r = 0; r < k->transport->n_ranks && status == MOE_OK; r++) {
        if (e->receive_counts[r] > 0)
            memcpy((unsigned char *)e->receive + e->receive_at[r] * e->row_bytes, in, e->receive_counts[r] * e->row_bytes);
        in += e->receive_counts[r] * e->row_bytes;
    }
    return status;
}

/* Kinds of rows: of settings and decisions; of tokens; of the tokens of a plan, which go by two levels where that is wanted. */
enum { MOEI_ROWS_PLAIN = 0, MOEI_ROWS_TOKENS, MOEI_ROWS_PLAN };

/* A step of an exchange. */
static moe_status moei_move(moei_ranks *k, int slot, int stage, int kind) {
    const moe_transport *t = k->transport;
    int r;
    for (r = 0; r < t->n_ranks && kind != MOEI_ROWS_PLAIN && t->traffic != NULL && t->traffic->rows != NULL && (stage & MOE_EXCHANGE_BEGIN); r++)
        t->traffic->rows[r] += k->exchange[slot].send_counts[r];
    return kind == MOEI_ROWS_PLAN && k->hop_bytes > 0 ? moei_two_hops(k, slot, stage) : moei_rows(t, stage, &k->exchange[slot]);
}

/* Sets up an exchange whose places are filled in. */
static void moei_exchange_of(moei_ranks *k, int slot, size_t row_bytes, const void *send, void *receive, int back) {
    const moei_places *p = &k->places[slot];
    moe_exchange *e = &k->exchange[slot];
    e->slot = slot, e->row_bytes = row_bytes, e->send = send, e->receive = receive;
    e->send_counts = back ? p->receive_counts : p->send_counts, e->send_at = back ? p->receive_at : p->send_at;
    e->receive_counts = back ? p->send_counts : p->receive_counts, e->receive_at = back ? p->send_at : p->receive_at;
}

/* moe_batch.gather: the own rows to all. */
static moe_status moei_ranks_gather(void *ctx, moe_status status, size_t row_bytes, void *rows) {
    moei_ranks *k = (moei_ranks *)ctx;
    const moei_places *p = &k->places[0];
    size_t rank = (size_t)k->transport->rank, own = k->first_tokens[rank + 1] - k->first_tokens[rank];
    uint64_t word = moei_status_word(status);
    const uint64_t *heard;
    moe_status sent;
    int r;
    if (k->is_broken) return MOE_ERR_TRANSPORT;
    sent = moei_tell_ranks(k->transport, 1, &word, &heard);
    k->is_broken = sent != MOE_OK;
    status = sent == MOE_OK ? moei_heard(k->transport, status, heard, 1) : sent;
    if (status != MOE_OK) return status;
    if (own > 0) memcpy(k->copy, (unsigned char *)rows + k->batch.first * row_bytes, own * row_bytes);
    for (r = 0; r < k->transport->n_ranks; r++) {
        p->send_counts[r] = own, p->send_at[r] = 0;
        p->receive_counts[r] = k->first_tokens[r + 1] - k->first_tokens[r], p->receive_at[r] = k->first_tokens[r];
    }
    moei_exchange_of(k, 0, row_bytes, k->copy, rows, 0);
    sent = moei_move(k, 0, MOE_EXCHANGE_BEGIN | MOE_EXCHANGE_END, MOEI_ROWS_PLAIN);
    k->is_broken = sent != MOE_OK;
    return sent;
}

/* The experts of a rank, and those of them that are in a chunk, counted from the rank's first. */
static void moei_rank_experts(const moe_layer *layer, int rank, size_t *first, size_t *count) {
    moe_rank_part((size_t)layer->config.router.n_experts, rank, layer->config.transport->n_ranks, first, count);
}

static void moei_chunk_of(const moei_ranks *k, size_t experts, size_t chunk, size_t *from, size_t *to) {
    size_t count;
    moe_rank_part(experts, (int)chunk, (int)k->chunks, from, &count);
    *to = *from + count;
}

/* ---- work memory ------------------------------------------------------------------------------------------------------------------ */

/* The own experts as a layer: rows in, rows out. */
static moe_layer moei_home_layer(const moe_layer *layer) {
    moe_layer home = *layer;
    size_t first;
    home.config.router.n_experts = (int)moei_own_experts(&layer->config, &first);
    home.config.router.select = MOE_SELECT_TOP_K;
    home.config.router.top_k = 1;
    home.config.router.apply_to = MOE_APPLY_OUTPUT;
    home.config.router.score = MOE_SCORE_LINEAR;
    home.config.transport = NULL;
    home.config.n_shared = 0;
    return home;
}

/* The most rows that one expert gets from all ranks, and that all experts of one rank get. */
static int moei_home_rows(const moe_layer *layer, const moei_ranks *k, size_t *of_one, size_t *of_all) {
    const moe_layer_config *c = &layer->config;
    size_t choices = moei_max_choices(&c->router), experts = moei_is_soft(&c->router) || choices > k->experts ? k->experts : choices;
    return moei_mul(moei_expert_rows(c, k->most), (size_t)k->transport->n_ranks, of_one) && moei_mul(*of_one, experts, of_all);
}

static void moei_home_layout(const moe_layer *layer, moei_ranks *k, int training, moei_layout *l) {
    moei_chain chain = moei_chain_begin(&k->home, k->home.config.expert);
    moe_layer_pass *h = &k->home_pass;
    size_t of_one = 0, of_all = 0, stride = moei_stride(layer, chain.d);
    if (!moei_home_rows(layer, k, &of_one, &of_all)) l->overflow = 1;
    k->most_received = of_all;
    memset(h, 0, sizeof *h);
    h->call.n_tokens = of_one; /* what one expert may get */
    h->routing.plan.offsets = (size_t *)moei_take(l, k->experts + 1, sizeof(size_t));
    h->routing.plan.entries = (moe_entry *)moei_take(l, of_all, sizeof(moe_entry));
    h->routing.plan.n_experts = k->experts;
    k->chunk_offsets = (size_t *)moei_take(l, k->experts + 1, sizeof(size_t));
    k->received = moei_take_reals(l, of_all, chain.d);
    k->made = moei_take_reals(l, of_all, chain.width[MOE_NODE_OUTPUT]);
    h->x = k->received;
    h->rows = moei_take_lines(layer, l, of_one, stride);
    moei_take_nodes(&chain, l, training ? of_all : of_one, training, h->node);
    if (!training) {
        moei_take_quantised(&k->home, l, of_one, of_one, h);
        return;
    }
    h->routing.d_weight_out = moei_take_reals(l, of_all, 1);
    k->d_received = moei_take_reals(l, of_all, chain.d);
    h->d_rows = moei_take_lines(layer, l, of_one, stride);
    moei_take_nodes(&chain, l, of_one, 1, h->d_node);
}

/* For scores that read experts: the own experts on the tokens of all ranks. */
static void moei_scored_layout(const moe_layer *layer, moei_ranks *k, int training, moei_layout *l) {
    const moe_layer_config *c = &layer->config;
    moei_chain chain = moei_chain_begin(layer, c->expert);
    moe_layer_pass *a = &k->scored_pass;
    unsigned all = moei_all_nodes(layer);
    size_t total = 0, cells = 0, own = 0, width;
    int node;
    memset(a, 0, sizeof *a);
    if (all == 0) return;
    width = chain.width[moei_scored_node(c)];
    if (!moei_mul((size_t)k->transport->n_ranks, k->most, &total) || !moei_mul(total, k->experts, &cells) ||
        !moei_mul(k->most, (size_t)c->router.n_experts, &own))
        l->overflow = 1;
    k->all_x = moei_take_reals(l, total, chain.d);
    k->nodes = moei_take_reals(l, own, width);
    a->clean = moei_take_reals(l, total, chain.d);
    for (node = 0; node < MOE_NODE_COUNT; node++)
        if (all >> node & 1u) a->all[node] = moei_take_reals(l, cells, chain.width[node]);
    if (!training) {
        moei_take_quantised(layer, l, total, total, a);
        return;
    }
    k->d_nodes = moei_take_reals(l, own, width);
    k->d_all_x = moei_take_reals(l, total, chain.d);
    k->parts = moei_take_reals(l, total, chain.d);
    for (node = 0; node < MOE_NODE_COUNT; node++)
        if (all >> node & 1u) a->d_all[node] = moei_take_reals(l, cells, chain.width[node]);
}

/* Bytes of the longest row that a router gathers. */
static size_t moei_longest_row(const moe_router_config *c) {
    size_t row = (size_t)c->n_experts > (size_t)c->d_model ? (size_t)c->n_experts : (size_t)c->d_model, choices = moei_max_choices(c) * sizeof(int32_t);
    return row * sizeof(moe_real) > choices ? row * sizeof(moe_real) : choices;
}

static void moei_shared_layout(const moe_layer *layer, size_t n, int training, moei_layout *l, moe_layer_pass *p) {
    moei_chain shared;
    if (layer->config.n_shared == 0) return;
    shared = moei_chain_begin(layer, MOEI_SHARED);
    moei_take_nodes(&shared, l, n, training, p->shared);
    p->shared_factor = moei_take_reals(l, n, 1);
    if (training) moei_take_nodes(&shared, l, n, 1, p->d_shared);
    else moei_take_quantised(layer, l, n, n, p);
}

static void moei_take_places(moei_layout *l, size_t ranks, moei_places *places) {
    places->send_counts = (size_t *)moei_take(l, ranks, sizeof(size_t));
    places->send_at = (size_t *)moei_take(l, ranks, sizeof(size_t));
    places->receive_counts = (size_t *)moei_take(l, ranks, sizeof(size_t));
    places->receive_at = (size_t *)moei_take(l, ranks, sizeof(size_t));
}

/* On a rank of the way meet the rows of all ranks of its node, or those for the ranks of its place in all nodes; at the goal all that it receives. */
static void moei_hop_layout(moei_ranks *k, size_t own_rows, size_t width, moei_layout *l) {
    size_t ranks = (size_t)k->transport->n_ranks, each = (size_t)k->transport->ranks_per_node, nodes = ranks / each, most = 0, words = 0;
    int slot;
    if (!moei_mul(own_rows, each > nodes ? each : nodes, &most) || !moei_mul(ranks, nodes, &words)) l->overflow = 1;
    if (most < k->most_received) most = k->most_received;
    if (!moei_mul(most > 0 ? most : 1, width, &k->hop_bytes) || !moei_mul(k->hop_bytes, sizeof(moe_real), &k->hop_bytes)) l->overflow = 1;
    k->hop_counts = (uint64_t *)moei_take(l, words, sizeof(uint64_t));
    k->hop_heard = (uint64_t *)moei_take(l, words, sizeof(uint64_t));
    for (slot = 0; slot < MOE_EXCHANGES; slot++) {
        moei_take_places(l, ranks, &k->hop_places[slot]);
        k->hop_out[slot] = (unsigned char *)moei_take(l, k->hop_bytes, 1);
        k->hop_in[slot] = (unsigned char *)moei_take(l, k->hop_bytes, 1);
    }
}

/* Lays a pass out in memory where no rank brings more than `most` tokens; the same function with an empty base counts the bytes. */
static moei_ranks *moei_ranks_layout(const moe_layer *layer, size_t most, int training, moei_layout *l, moe_layer_pass *p, moei_ranks *counting) {
    const moe_transport *t = layer->config.transport;
    moei_ranks *k = (moei_ranks *)moei_take(l, 1, sizeof *k);
    size_t ranks = (size_t)t->n_ranks, total = 0, rows = 0, words = 0, d = (size_t)layer->config.router.d_model, o = (size_t)layer->config.d_out;
    int slot;
    memset(p, 0, sizeof *p);
    if (k == NULL) k = counting;
    memset(k, 0, sizeof *k);
    k->transport = t, k->most = most;
    k->experts = moei_own_experts(&layer->config, &k->first_expert);
    k->most_experts = ((size_t)layer->config.router.n_experts + ranks - 1) / ranks;
    k->chunks = t->chunks > 1 ? (size_t)t->chunks : 1;
    if (k->chunks > k->most_experts) k->chunks = k->most_experts;
    k->home = moei_home_layer(layer);
    if (!moei_mul(most, ranks, &total) || !MOEI_FITS_INT32(total) || !moei_kept_rows(&layer->config, most, &rows) ||
        !moei_mul(ranks, k->most_experts + 1, &words))
        l->overflow = 1;
    k->first_tokens = (size_t *)moei_take(l, ranks + 1, sizeof(size_t));
    k->out_counts = (uint64_t *)moei_take(l, words, sizeof(uint64_t));
    k->in_counts = (uint64_t *)moei_take(l, words, sizeof(uint64_t));
    for (slot = 0; slot < MOE_EXCHANGES; slot++) moei_take_places(l, ranks, &k->places[slot]);
    k->copy = (unsigned char *)moei_take(l, most, moei_longest_row(&layer->config.router));
    if (l->overflow || moe_route_batch_size(&layer->router, most, total, training, &p->route_size) != MOE_OK) l->overflow = 1;
    p->route_memory = moei_take(l, p->route_size, 1);
    p->clean = moei_all_nodes(layer) != 0 ? moei_take_reals(l, most, d) : NULL;
    k->rows = moei_take_reals(l, rows, d);
    k->outputs = moei_take_reals(l, rows, o);
    if (training) k->d_outputs = moei_take_reals(l, rows, o);
    moei_home_layout(layer, k, training, l);
    if (t->two_level && t->ranks_per_node < t->n_ranks) moei_hop_layout(k, rows, d > o ? d : o, l);
    moei_scored_layout(layer, k, training, l);
    moei_shared_layout(layer, most, training, l, p);
    p->d_rows = training ? k->rows : NULL;
    p->ranks = k;
    return k;
}

static moe_status moei_ranks_size(const moe_layer *layer, size_t n, int training, size_t *bytes) {
    moei_layout l = moei_layout_begin(NULL);
    moe_layer_pass p;
    moei_ranks counting;
    (void)moei_ranks_layout(layer, n, training, &l, &p, &counting);
    if (l.overflow) return MOE_ERR_OVERFLOW;
    *bytes = l.used;
    return MOE_OK;
}

/* ---- to the experts and back -------------------------------------------------------------------------------------------------------- */

static size_t moei_plan_length(const moe_layer *layer, const moe_layer_pass *p) {
    size_t experts = (size_t)layer->config.router.n_experts;
    return p->routing.plan.rows > 0 ? experts * p->routing.plan.rows : p->routing.plan.offsets[experts];
}

/* Tells every rank how many rows its experts get, or that there will be none. */
static moe_status moei_tell_counts(const moe_layer *layer, const moe_layer_pass *p, moe_status status) {
    moei_ranks *k = p->ranks;
    size_t n = k->most_experts + 1, first, count, e;
    moe_status sent;
    int r;
    memset(k->out_counts, 0, (size_t)k->transport->n_ranks * n * sizeof(uint64_t));
    for (r = 0; r < k->transport->n_ranks; r++) {
        moei_rank_experts(layer, r, &first, &count);
        k->out_counts[(size_t)r * n] = moei_status_word(status);
        for (e = 0; e < count && status == MOE_OK; e++) k->out_counts[(size_t)r * n + 1 + e] = moei_rows_of(p, first + e);
    }
    sent = moei_counts(k->transport, n, k->out_counts, k->in_counts);
    return sent == MOE_OK ? moei_heard(k->transport, status, k->in_counts, n) : sent;
}

/* The home's plan: the rows of an expert by rank, then as the rank sent them, which is the order of tokens. They are received chunk after chunk, in it rank
   after rank. Numbers that no rank can have are the transport's fault. */
static moe_status moei_home_plan(moei_ranks *k) {
    moe_plan *plan = &k->home_pass.routing.plan;
    size_t n = k->most_experts + 1, e, at = 0, chunk, from, to, r, i;
    for (e = 0; e < k->experts; e++)
        for (r = 0, plan->offsets[e] = at; r < (size_t)k->transport->n_ranks; r++) {
            uint64_t count = k->in_counts[r * n + 1 + e];
            if (count > k->most_received - at) return MOE_ERR_TRANSPORT;
            at += (size_t)count;
        }
    plan->offsets[k->experts] = at;
    memcpy(k->chunk_offsets, plan->offsets, (k->experts + 1) * sizeof(size_t)); /* here: where the next row of an expert goes */
    for (chunk = 0, at = 0; chunk < k->chunks; chunk++) {
        moei_chunk_of(k, k->experts, chunk, &from, &to);
        for (r = 0; r < (size_t)k->transport->n_ranks; r++)
            for (e = from; e < to; e++)
                for (i = 0; i < (size_t)k->in_counts[r * n + 1 + e]; i++) {
                    moe_entry *entry = plan->entries + k->chunk_offsets[e]++;
                    entry->token = (int32_t)at++;
                    entry->rank = 0;
                    entry->weight_in = entry->weight_out = MOEI_R(1.0);
                }
    }
    plan->n_tokens = at;
    return MOE_OK;
}

/* The places of a chunk's rows: in the own plan, and among what is received. */
static void moei_chunk_places(const moe_layer *layer, const moe_layer_pass *p, size_t chunk, const moei_places *places) {
    const moei_ranks *k = p->ranks;
    size_t n = k->most_experts + 1, first, count, from, to, e, at;
    int r;
    moei_chunk_of(k, k->experts, chunk, &from, &to);
    at = k->home_pass.routing.plan.offsets[from]; /* all rows of earlier chunks, which are earlier experts */
    for (r = 0; r < k->transport->n_ranks; r++) {
        places->receive_counts[r] = 0;
        for (e = from; e < to; e++) places->receive_counts[r] += (size_t)k->in_counts[(size_t)r * n + 1 + e];
        places->receive_at[r] = at;
        at += places->receive_counts[r];
    }
    for (r = 0; r < k->transport->n_ranks; r++) {
        size_t own_from, own_to;
        moei_rank_experts(layer, r, &first, &count);
        moei_chunk_of(k, count, chunk, &own_from, &own_to);
        places->send_counts[r] = 0;
        for (e = own_from; e < own_to; e++) places->send_counts[r] += moei_rows_of(p, first + e);
        places->send_at[r] = places->send_counts[r] > 0 ? moei_first_row(p, first + own_from) : 0;
    }
}

/* The home's pass with the rows of one chunk alone: the other experts have none, and all keep their places. */
static void moei_chunk_pass(moei_ranks *k, size_t chunk, moe_layer_pass *pass) {
    const size_t *all = k->home_pass.routing.plan.offsets;
    size_t from, to, e;
    moei_chunk_of(k, k->experts, chunk, &from, &to);
    for (e = 0; e <= k->experts; e++) k->chunk_offsets[e] = all[e < from ? from : e > to ? to : e];
    *pass = k->home_pass;
    pass->routing.plan.offsets = k->chunk_offsets;
}

/* What a chunk's rows become at home: a row of numbers each. */
typedef struct moei_errand {
    const moe_layer *layer;
    moe_layer_pass *p;
    const moe_parallel *team;
    size_t d_there, d_back;        /* widths of rows */
    const moe_real *there;         /* own rows on their way out, [own rows,d_there] */
    moe_real *at_home, *from_home; /* [rows at home: d_there, d_back] */
    moe_real *back;                /* [own rows,d_back] */
    void (*work)(const struct moei_errand *errand, moe_layer_pass *pass);
} moei_errand;

/* Takes all chunks there and back. The rows of one travel while another is worked on: slot 0 out, slot 1 back. */
static moe_status moei_run_errand(const moei_errand *errand) {
    enum { OUT = 0, BACK = 1 };
    moei_ranks *k = errand->p->ranks;
    size_t there = errand->d_there * sizeof(moe_real), back = errand->d_back * sizeof(moe_real), chunk, first, end;
    moe_layer_pass pass;
    moe_status status;
    moei_chunk_places(errand->layer, errand->p, 0, &k->places[OUT]);
    moei_exchange_of(k, OUT, there, errand->there, errand->at_home, 0);
    status = moei_move(k, OUT, MOE_EXCHANGE_BEGIN, MOEI_ROWS_PLAN);
    for (chunk = 0; chunk < k->chunks && status == MOE_OK; chunk++) {
        status = moei_move(k, OUT, MOE_EXCHANGE_END, MOEI_ROWS_PLAN);
        if (status == MOE_OK && chunk + 1 < k->chunks) {
            moei_chunk_places(errand->layer, errand->p, chunk + 1, &k->places[OUT]);
            moei_exchange_of(k, OUT, there, errand->there, errand->at_home, 0);
            status = moei_move(k, OUT, MOE_EXCHANGE_BEGIN, MOEI_ROWS_PLAN);
        }
        moei_chunk_pass(k, chunk, &pass);
        first = pass.routing.plan.offsets[0], end = pass.routing.plan.offsets[k->experts];
        if (end > first) memset(errand->from_home + first * errand->d_back, 0, (end - first) * back);
        if (status == MOE_OK) errand->work(errand, &pass);
        if (status == MOE_OK && chunk > 0) status = moei_move(k, BACK, MOE_EXCHANGE_END, MOEI_ROWS_PLAN);
        moei_chunk_places(errand->layer, errand->p, chunk, &k->places[BACK]);
        moei_exchange_of(k, BACK, back, errand->from_home, errand->back, 1);
        if (status == MOE_OK) status = moei_move(k, BACK, MOE_EXCHANGE_BEGIN, MOEI_ROWS_PLAN);
    }
    return status == MOE_OK ? moei_move(k, BACK, MOE_EXCHANGE_END, MOEI_ROWS_PLAN) : status;
}

static void moei_errand_forward(const moei_errand *errand, moe_layer_pass *pass) {
    const moe_layer *home = &errand->p->ranks->home;
    moei_chain chain = moei_chain_begin(home, home->config.expert);
    moei_layer_experts(home, pass, &chain, errand->from_home, errand->team);
}

/* The rows of x that the plan names, times the weight on the input; soft mixes them. */
static void moei_send_rows(const moe_layer *layer, const moe_layer_pass *p, moe_real *rows) {
    size_t d = (size_t)layer->config.router.d_model, e, i;
    int plain = moei_is_plain(layer, p);
    if (!plain) memset(rows, 0, moei_plan_length(layer, p) * d * sizeof(moe_real));
    for (e = 0; e < (size_t)layer->config.router.n_experts; e++)
        for (i = 0; i < moei_entry_count(p, e); i++) {
            const moe_entry *entry = p->routing.plan.entries + p->routing.plan.offsets[e] + i;
            const moe_real *x = p->x + (size_t)entry->token * d;
            moe_real *row = rows + (moei_first_row(p, e) + moei_row_of(p, entry, i)) * d;
            if (plain) memcpy(row, x, d * sizeof(moe_real));
            else moe_axpy(layer->kernels, d, entry->weight_in, x, row);
        }
}

/* y_t += w_te f_e(x_t), experts in ascending order. */
static void moei_combine(const moe_layer *layer, const moe_layer_pass *p, const moe_real *outputs, moe_real *y) {
    size_t o = (size_t)layer->config.d_out, e, i;
    for (e = 0; e < (size_t)layer->config.router.n_experts; e++)
        for (i = 0; i < moei_entry_count(p, e); i++) {
            const moe_entry *entry = p->routing.plan.entries + p->routing.plan.offsets[e] + i;
            moe_axpy(layer->kernels, o, entry->weight_out, outputs + (moei_first_row(p, e) + moei_row_of(p, entry, i)) * o, y + (size_t)entry->token * o);
        }
}

static void moei_count_pairs(const moe_layer *layer, const moe_layer_pass *p) {
    const moe_transport *t = layer->config.transport;
    int per_node = t->ranks_per_node, r;
    size_t first, count, e, rows;
    if (t->traffic == NULL) return;
    t->traffic->tokens += moei_real_tokens(&p->call, 0, p->call.n_tokens);
    for (r = 0; r < t->n_ranks; r++) {
        moei_rank_experts(layer, r, &first, &count);
        for (e = first, rows = 0; e < first + count; e++) rows += moei_rows_of(p, e);
        t->traffic->pairs += rows;
        if (r != t->rank) t->traffic->pairs_away += rows;
        if (r / per_node != t->rank / per_node) t->traffic->pairs_far += rows;
    }
}

/* ---- scores that read experts ---------------------------------------------------------------------------------------------------------- */

/* The places of [total,d] rows, those of each rank's tokens: own ones to all. */
static void moei_all_places(const moei_ranks *k, const moei_places *places) {
    size_t rank = (size_t)k->transport->rank;
    int r;
    for (r = 0; r < k->transport->n_ranks; r++) {
        places->send_counts[r] = k->first_tokens[rank + 1] - k->first_tokens[rank], places->send_at[r] = 0;
        places->receive_counts[r] = k->first_tokens[r + 1] - k->first_tokens[r], places->receive_at[r] = k->first_tokens[r];
    }
}

/* The rows of a node: from home, where expert number e of every rank has those of all tokens, to the tokens' ranks. */
static void moei_node_places(const moe_layer *layer, const moei_ranks *k, size_t e, const moei_places *places) {
    size_t rank = (size_t)k->transport->rank, own = k->first_tokens[rank + 1] - k->first_tokens[rank], first, count;
    int r;
    for (r = 0; r < k->transport->n_ranks; r++) {
        moei_rank_experts(layer, r, &first, &count);
        places->send_counts[r] = e < k->experts ? k->first_tokens[r + 1] - k->first_tokens[r] : 0;
        places->send_at[r] = e < k->experts ? e * k->batch.total + k->first_tokens[r] : 0;
        places->receive_counts[r] = e < count ? own : 0;
        places->receive_at[r] = e < count ? (first + e) * own : 0;
    }
}

/* Every expert's activation for the own tokens: the tokens go to all ranks, what the own experts make of all tokens comes back. */
static moe_status moei_ranks_score(const moe_layer *layer, moe_layer_pass *p, const moe_parallel *team) {
    moei_ranks *k = p->ranks;
    moe_layer_pass *a = &k->scored_pass;
    moe_layer own = *layer;
    moei_chain chain;
    size_t e, row;
    moe_status status;
    int scored = moei_scored_node(&layer->config);
    if (scored < 0) return MOE_OK;
    own.config.router.n_experts = (int)k->experts, own.config.transport = NULL;
    chain = moei_chain_begin(&own, own.config.expert);
    moei_clean(&p->call, chain.d, p->clean);
    moei_all_places(k, &k->places[0]);
    moei_exchange_of(k, 0, chain.d * sizeof(moe_real), p->clean, k->all_x, 0);
    status = moei_move(k, 0, MOE_EXCHANGE_BEGIN | MOE_EXCHANGE_END, MOEI_ROWS_TOKENS);
    if (status != MOE_OK) return status;
    a->call.n_tokens = k->batch.total, a->call.x = a->x = k->all_x, a->call.training = p->call.training, a->call.keep = p->call.keep;
    moei_layer_score_experts(&own, a, &chain, team);
    row = chain.width[scored];
    for (e = 0; e < k->most_experts && status == MOE_OK; e++) {
        moei_node_places(layer, k, e, &k->places[0]);
        moei_exchange_of(k, 0, row * sizeof(moe_real), a->all[scored], k->nodes, 0);
        status = moei_move(k, 0, MOE_EXCHANGE_BEGIN | MOE_EXCHANGE_END, MOEI_ROWS_TOKENS);
    }
    p->call.nodes = k->nodes, p->call.node_width = row;
    return status;
}

/* ---- forward ----------------------------------------------------------------------------------------------------------------------------- */

/* What the ranks tell each other at the start of a call. */
enum { MOEI_SAYS_STATUS = 0, MOEI_SAYS_TOKENS, MOEI_SAYS_SETTINGS, MOEI_SAYS_KIND, MOEI_SAYS };

/* Who brings how many tokens; whether all make the same call. Afterwards the transport's memory holds what every rank said. */
static moe_status moei_ranks_meet(const moe_layer *layer, const moe_call *call, moe_status status, size_t *most, const uint64_t **said) {
    const moe_transport *t = layer->config.transport;
    uint64_t say[MOEI_SAYS], sum = 0;
    moe_status sent;
    int r;
    say[MOEI_SAYS_STATUS] = moei_status_word(status), say[MOEI_SAYS_TOKENS] = call->n_tokens, say[MOEI_SAYS_SETTINGS] = moei_fields_sum(moei_layer_fields, &layer->config);
    say[MOEI_SAYS_KIND] = (uint64_t)(unsigned)(call->training != 0) | (uint64_t)(unsigned)(call->keep != 0) << 1;
    sent = moei_tell_ranks(t, MOEI_SAYS, say, said);
    if (sent != MOE_OK) return sent;
    status = moei_heard(t, status, *said, MOEI_SAYS);
    for (r = 0, *most = 0; r < t->n_ranks && status == MOE_OK; r++) {
        const uint64_t *one = *said + (size_t)r * MOEI_SAYS;
        if (one[MOEI_SAYS_SETTINGS] != (*said)[MOEI_SAYS_SETTINGS]) status = MOE_ERR_CONFIG;
        if (one[MOEI_SAYS_KIND] != (*said)[MOEI_SAYS_KIND]) status = MOE_ERR_STATE;
        if (one[MOEI_SAYS_TOKENS] > INT32_MAX || (sum += one[MOEI_SAYS_TOKENS]) > INT32_MAX) return MOE_ERR_OVERFLOW;
        if (one[MOEI_SAYS_TOKENS] > *most) *most = (size_t)one[MOEI_SAYS_TOKENS];
    }
    return status;
}

/* The batch of this call, from what the ranks said. */
static void moei_ranks_batch(moei_ranks *k, const uint64_t *said) {
    size_t rank = (size_t)k->transport->rank;
    int r;
    for (r = 0, k->first_tokens[0] = 0; r < k->transport->n_ranks; r++)
        k->first_tokens[r + 1] = k->first_tokens[r] + (size_t)said[(size_t)r * MOEI_SAYS + MOEI_SAYS_TOKENS];
    k->batch.first = k->first_tokens[rank];
    k->batch.total = k->first_tokens[k->transport->n_ranks];
    k->batch.lead = rank == 0;
    k->batch.ctx = k;
    k->batch.gather = moei_ranks_gather;
}

/* Routes the own tokens and takes their rows to the experts and back. */
static moe_status moei_ranks_experts(const moe_layer *layer, moe_layer_pass *p, const moe_parallel *team) {
    moei_ranks *k = p->ranks;
    moe_router router = moei_layer_router(layer);
    moei_errand errand;
    moe_status status = moei_ranks_score(layer, p, team);
    if (status != MOE_OK) return status;
    status = moe_route(&router, &p->call, p->route_memory, p->route_size, &p->routing);
    if (k->is_broken) return MOE_ERR_TRANSPORT;
    status = moei_tell_counts(layer, p, status);
    if (status == MOE_OK) status = moei_home_plan(k);
    if (status != MOE_OK) return status;
    moei_count_pairs(layer, p);
    moei_send_rows(layer, p, k->rows);
    k->home_pass.call.training = p->call.training, k->home_pass.call.keep = p->call.keep;
    memset(&errand, 0, sizeof errand);
    errand.layer = layer, errand.p = p, errand.team = team;
    errand.d_there = (size_t)layer->config.router.d_model, errand.d_back = (size_t)layer->config.d_out;
    errand.there = k->rows, errand.at_home = k->received, errand.from_home = k->made, errand.back = k->outputs;
    errand.work = moei_errand_forward;
    return moei_run_errand(&errand);
}

static moe_status moei_ranks_forward(const moe_layer *layer, const moe_call *call, moe_real *y, void *work, size_t work_size, moe_layer_pass *pass) {
    moei_layout l = moei_layout_begin(work);
    moe_layer_pass p;
    moei_ranks counting, *k;
    const uint64_t *said;
    moe_parallel team;
    size_t most = 0;
    moe_status status = work == NULL || (call->n_tokens > 0 && y == NULL) ? MOE_ERR_ARGUMENT : moei_layer_call_check(layer, call);
    if (status == MOE_OK && (call->n_past > 0 || call->decoding || call->batch != NULL)) status = MOE_ERR_UNSUPPORTED;
    status = moei_ranks_meet(layer, call, status, &most, &said);
    if (status != MOE_OK) return status;
    {
        moei_layout room = moei_layout_begin(NULL);
        (void)moei_ranks_layout(layer, most, moei_keeps(call), &room, &p, &counting);
        status = room.overflow ? MOE_ERR_OVERFLOW : room.used > work_size ? MOE_ERR_SPACE : MOE_OK;
    }
    if (status == MOE_OK) {
        k = moei_ranks_layout(layer, most, moei_keeps(call), &l, &p, &counting);
        moei_ranks_batch(k, said);
    }
    status = moe_transport_status(layer->config.transport, status);
    if (status != MOE_OK) return status;
    p.call = *call;
    p.call.batch = &p.ranks->batch;
    p.x = call->x;
    team = moei_team(call);
    status = moei_ranks_experts(layer, &p, &team);
    if (status != MOE_OK) return status;
    if (call->n_tokens > 0) memset(y, 0, call->n_tokens * (size_t)layer->config.d_out * sizeof(moe_real));
    moei_combine(layer, &p, p.ranks->outputs, y);
    moei_layer_add_input(layer, &p, y);
    moei_layer_shared(layer, &p, y, &team);
    if (pass != NULL) *pass = p;
    return MOE_OK;
}

/* ---- backward ---------------------------------------------------------------------------------------------------------------------------- */

#ifndef MOE_NO_TRAIN
static void moei_errand_backward(const moei_errand *errand, moe_layer_pass *pass) {
    moei_returned back;
    back.dy = errand->at_home, back.d_outputs = back.d_weights = NULL;
    moei_experts_backward(&errand->p->ranks->home, pass, &back, errand->from_home, errand->team);
}

/* Rows of w_te dy_t for the experts. */
static void moei_send_gradients(const moe_layer *layer, const moe_layer_pass *p, const moe_real *dy, moe_real *rows) {
    size_t o = (size_t)layer->config.d_out, e, i;
    memset(rows, 0, moei_plan_length(layer, p) * o * sizeof(moe_real));
    for (e = 0; e < (size_t)layer->config.router.n_experts; e++)
        for (i = 0; i < moei_entry_count(p, e); i++) {
            const moe_entry *entry = p->routing.plan.entries + p->routing.plan.offsets[e] + i;
            moe_axpy(layer->kernels, o, entry->weight_out, dy + (size_t)entry->token * o, rows + (moei_first_row(p, e) + moei_row_of(p, entry, i)) * o);
        }
}

/* dx_t += w_in dx_row, dw_out = dy_t . f_e(x_t), dw_in = dx_row . x_t, experts in ascending order. */
static void moei_take_gradients(const moe_layer *layer, moe_layer_pass *p, const moe_real *dy, const moe_real *d_rows, moe_real *dx) {
    size_t d = (size_t)layer->config.router.d_model, o = (size_t)layer->config.d_out, e, i;
    int plain = moei_is_plain(layer, p);
    for (e = 0; e < (size_t)layer->config.router.n_experts; e++)
        for (i = 0; i < moei_entry_count(p, e); i++) {
            size_t at = p->routing.plan.offsets[e] + i;
            const moe_entry *entry = p->routing.plan.entries + at;
            size_t row = moei_first_row(p, e) + moei_row_of(p, entry, i), t = (size_t)entry->token;
            if (dx != NULL) moe_axpy(layer->kernels, d, entry->weight_in, d_rows + row * d, dx + t * d);
            p->routing.d_weight_out[at] = moe_dot(layer->kernels, o, dy + t * o, p->ranks->outputs + row * o);
            if (!plain) p->routing.d_weight_in[at] = moe_dot(layer->kernels, d, d_rows + row * d, p->x + t * d);
        }
}

/* Back through the activations that the score read: their gradients go home, those of the tokens come back from every rank and are added in the ranks' order. */
static moe_status moei_ranks_score_backward(const moe_layer *layer, moe_layer_pass *p, moe_real *dx) {
    moei_ranks *k = p->ranks;
    moe_layer_pass *a = &k->scored_pass;
    moe_layer own = *layer;
    moei_chain common, chain;
    moei_job job;
    size_t e, t, own_tokens = p->call.n_tokens, r;
    moe_status status = MOE_OK;
    int scored = moei_scored_node(&layer->config);
    if (scored < 0) return MOE_OK;
    own.config.router.n_experts = (int)k->experts, own.config.transport = NULL;
    common = moei_chain_begin(&own, own.config.expert);
    job = moei_job_begin(&own, a, &common);
    for (e = 0; e < k->experts; e++) {
        chain = moei_all_chain(&job, e);
        moei_zero_nodes(&chain);
    }
    for (e = 0; e < k->most_experts && status == MOE_OK; e++) {
        moei_node_places(layer, k, e, &k->places[0]);
        moei_exchange_of(k, 0, common.width[scored] * sizeof(moe_real), k->d_nodes, a->d_all[scored], 1);
        status = moei_move(k, 0, MOE_EXCHANGE_BEGIN | MOE_EXCHANGE_END, MOEI_ROWS_TOKENS);
    }
    if (status != MOE_OK) return status;
    memset(k->d_all_x, 0, k->batch.total * common.d * sizeof(moe_real));
    for (e = 0; e < k->experts; e++) {
        chain = moei_all_chain(&job, e);
        chain.d_x = k->d_all_x;
        moei_chain_backward(&chain, moei_all_nodes(layer));
    }
    moei_all_places(k, &k->places[0]);
    for (r = 0; r < (size_t)k->transport->n_ranks; r++) k->places[0].send_at[r] = r * own_tokens;
    moei_exchange_of(k, 0, common.d * sizeof(moe_real), k->d_all_x, k->parts, 1);
    status = moei_move(k, 0, MOE_EXCHANGE_BEGIN | MOE_EXCHANGE_END, MOEI_ROWS_TOKENS);
    for (r = 0; r < (size_t)k->transport->n_ranks && status == MOE_OK && dx != NULL; r++)
        for (t = 0; t < own_tokens; t++) moe_axpy(layer->kernels, common.d, MOEI_R(1.0), k->parts + (r * own_tokens + t) * common.d, dx + t * common.d);
    return status;
}

static moe_status moei_ranks_backward(const moe_layer *layer, const moei_returned *back, moe_real *dx, moe_real *d_router_x, moe_layer_pass *pass) {
    moei_ranks *k = pass->ranks;
    moe_parallel team = moei_team(&pass->call);
    moe_router router = moei_layer_router(layer);
    moei_errand errand;
    moe_status status;
    size_t own = pass->call.n_tokens, experts = (size_t)layer->config.router.n_experts;
    int scored = moei_scored_node(&layer->config);
    status = pass->d_rows == NULL || !pass->call.training ? MOE_ERR_STATE : own > 0 && back->dy == NULL ? MOE_ERR_ARGUMENT : MOE_OK;
    status = moe_transport_status(k->transport, status);
    if (status != MOE_OK) return status;
    if (own > 0) moei_shared_backward(layer, pass, back->dy, dx, &team);
    moei_send_gradients(layer, pass, back->dy, k->d_outputs);
    memset(&errand, 0, sizeof errand);
    errand.layer = layer, errand.p = pass, errand.team = &team;
    errand.d_there = (size_t)layer->config.d_out, errand.d_back = (size_t)layer->config.router.d_model;
    errand.there = k->d_outputs, errand.at_home = k->made, errand.from_home = k->d_received, errand.back = k->rows;
    errand.work = moei_errand_backward;
    status = moei_run_errand(&errand);
    if (status != MOE_OK) return status;
    moei_take_gradients(layer, pass, back->dy, k->rows, dx);
    if (own > 0) moei_add_input_backward(layer, pass, back->dy, dx);
    if (scored >= 0) memset(k->d_nodes, 0, experts * own * pass->call.node_width * sizeof(moe_real));
    status = moe_route_backward(&router, &pass->call, &pass->routing, layer->gradients, pass->call.router_x != NULL ? d_router_x : dx,
                                scored < 0 ? NULL : k->d_nodes);
    return status == MOE_OK ? moei_ranks_score_backward(layer, pass, dx) : status;
}
#define MOEI_RANKS_BACKWARD moei_ranks_backward
#else
#define MOEI_RANKS_BACKWARD NULL
#endif

/* ---- the transport ----------------------------------------------------------------------------------------------------------------------- */

static const moei_ways moei_rank_ways = {moei_layer_agree, moei_ranks_size, moei_ranks_forward, MOEI_RANKS_BACKWARD};

/* What must be right before a rank can tell others that something is not. */
static moe_status moei_transport_speaks(const moe_transport *t, moe_error *error) {
    if (t->counts == NULL || t->rows == NULL || t->sum == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "transport: %s must not be NULL", t->counts == NULL ? "counts" : t->rows == NULL ? "rows" : "sum");
    if (t->n_ranks < 1 || t->n_ranks > MOE_MAX_EXPERTS)
        return moei_error(error, MOE_ERR_CONFIG, "n_ranks = %d: must be 1 to %d", t->n_ranks, (int)MOE_MAX_EXPERTS);
    if (t->rank < 0 || t->rank >= t->n_ranks) return moei_error(error, MOE_ERR_CONFIG, "rank = %d: must be 0 to n_ranks - 1 = %d", t->rank, t->n_ranks - 1);
    return MOE_OK;
}

static moe_status moei_transport_check(const moe_transport *t, moe_error *error) {
    if (t->ranks_per_node < 0 || (t->ranks_per_node > 0 && t->n_ranks % t->ranks_per_node != 0))
        return moei_error(error, MOE_ERR_CONFIG, "ranks_per_node = %d: must divide n_ranks = %d", t->ranks_per_node, t->n_ranks);
    if (t->two_level != 0 && t->two_level != 1) return moei_error(error, MOE_ERR_CONFIG, "two_level = %d: must be 0 or 1", t->two_level);
    if (t->chunks < 0 || t->chunks > MOE_MAX_EXPERTS) return moei_error(error, MOE_ERR_CONFIG, "chunks = %d: must be 0 to %d", t->chunks, (int)MOE_MAX_EXPERTS);
    return MOE_OK;
}

moe_status moe_transport_begin(moe_transport *transport, moe_error *error) {
    static const char *const names[] = {"version of moe", "size of moe_real", "n_ranks", "ranks_per_node", "two_level", "chunks"};
    uint64_t said[6], word, theirs = 0;
    const uint64_t *heard;
    moe_transport made;
    moe_allocator allocator;
    moe_status status;
    size_t i = 0;
    int rank = 0;
    if (transport == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "transport must not be NULL");
    status = moei_transport_speaks(transport, error);
    if (status != MOE_OK) return status;
    if (!moei_can_allocate(transport->allocator)) return moei_error(error, MOE_ERR_ARGUMENT, "allocator is NULL, and MOE_NO_MALLOC leaves no other");
    made = *transport;
    memset(&allocator, 0, sizeof allocator);
    if (made.allocator != NULL) allocator = *made.allocator;
    if (made.ranks_per_node == 0) made.ranks_per_node = made.n_ranks;
    if (made.chunks == 0) made.chunks = 1;
    made.memory_size = 2 * MOEI_WORDS * (size_t)made.n_ranks * sizeof(uint64_t);
    made.memory = (uint64_t *)moei_alloc(&allocator, made.memory_size, 1);
    if (made.memory == NULL) return moei_error(error, MOE_ERR_MEMORY, "no memory for %z bytes of the transport", made.memory_size);
    word = moei_status_word(status = moei_transport_check(transport, error));
    if (moei_tell_ranks(&made, 1, &word, &heard) != MOE_OK) status = moei_error(error, MOE_ERR_TRANSPORT, "the transport's counts failed");
    else if (status == MOE_OK && moei_heard(&made, status, heard, 1) != MOE_OK)
        status = moei_error(error, MOE_ERR_PEER, "another rank's transport is not set up well");
    if (status != MOE_OK) {
        moei_free(&allocator, made.memory, made.memory_size);
        return status;
    }
    said[0] = MOE_VERSION_MAJOR * 1000000 + MOE_VERSION_MINOR * 1000 + MOE_VERSION_PATCH, said[1] = sizeof(moe_real);
    said[2] = (uint64_t)made.n_ranks, said[3] = (uint64_t)made.ranks_per_node, said[4] = (uint64_t)made.two_level, said[5] = (uint64_t)made.chunks;
    status = moei_agree(&made, 6, said, &rank, &i, &theirs);
    if (status == MOE_OK) {
        made.ways = &moei_rank_ways;
        *transport = made;
        return MOE_OK;
    }
    moei_free(&allocator, made.memory, made.memory_size);
    if (status == MOE_ERR_TRANSPORT) return moei_error(error, status, "the transport's counts failed");
    return moei_error(error, status, "%s = %z: rank %d has %z; all ranks must have the same", names[i], (size_t)said[i], rank, (size_t)theirs);
}

void moe_transport_end(moe_transport *transport) {
    moe_allocator allocator;
    if (transport == NULL) return;
    memset(&allocator, 0, sizeof allocator);
    if (transport->allocator != NULL) allocator = *transport->allocator;
    if (transport->memory != NULL) moei_free(&allocator, transport->memory, transport->memory_size);
    transport->memory = NULL, transport->memory_size = 0, transport->ways = NULL;
}

#ifdef __cplusplus
}
#endif

/* ==== nets ================================================================================================================ */

/* ---- lists: of stb_ds where there is training; a build without it includes no stb_ds and resizes to the exact length ----------- */

#ifndef MOE_NO_TRAIN
#define MOEI_LIST_ADD(list, count, item) ((list)[moei_list_header(list)->length++] = (item), (count)++)
#else
#define MOEI_LIST_ADD(list, count, item) ((list)[(count)++] = (item))
#endif

/* Makes room for wanted > count elements in the list whose pointer lies at list and which has count; 0 without memory. */
static int moei_net_grow(const moe_allocator *a, void *list, size_t element_size, size_t count, size_t wanted) {
#ifndef MOE_NO_TRAIN
    (void)count;
    return moei_list_reserve(a, list, element_size, wanted);
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
    moei_list_free(a, list, element_size);
#else
    void *elements;
    memcpy(&elements, list, sizeof elements);
    moei_free(a, elements, count * element_size);
    elements = NULL;
    memcpy(list, &elements, sizeof elements);
#endif
}

/* ---- ranks: what the processes that share a net tell each other ---------------------------------------------------------------- */

/* Whether all went well on all ranks: a status other than MOE_OK comes back as it is; elsewhere, where others failed, it is MOE_ERR_PEER. *wishes (may be
   NULL): the caller's number before, the sum of all ranks' after. Takes no memory: a rank that has none can say so. After MOE_ERR_TRANSPORT nobody
   listens. */
static moe_status moei_ranks_vote(const moe_transport *t, moe_status status, int *wishes, moe_error *error) {
    moe_real words[4], ranks;
    if (t == NULL || status == MOE_ERR_TRANSPORT) return status;
    words[0] = status != MOE_OK ? MOEI_R(1.0) : MOEI_R(0.0);
    words[1] = words[0] * (moe_real)t->rank;
    words[2] = (moe_real)-status;
    words[3] = wishes != NULL ? (moe_real)*wishes : MOEI_R(0.0);
    ranks = (moe_real)t->n_ranks;
    if (t->sum(t->ctx, 4, words) != MOE_OK || !(words[0] >= MOEI_R(0.0) && words[0] <= ranks && words[3] >= MOEI_R(0.0) && words[3] <= ranks))
        return moei_error(error, MOE_ERR_TRANSPORT, "the transport's sum failed");
    if (wishes != NULL) *wishes = (int)words[3];
    if (status != MOE_OK || words[0] < MOEI_R(0.5)) return status;
    if (words[0] < MOEI_R(1.5) && words[1] < ranks && words[2] < MOEI_R(100.0))
        return moei_error(error, MOE_ERR_PEER, "rank %d: %s", (int)words[1], moe_status_text(-(int)words[2]));
    return moei_error(error, MOE_ERR_PEER, "%d other ranks failed", (int)words[0]);
}

/* The words that moei_ranks_tell needs for n of each rank. */
static size_t moei_ranks_room(const moe_transport *t, size_t n) { return t != NULL ? 2 * n * (size_t)t->n_ranks : 0; }

/* Tells all ranks the status and n - 1 more words, mine[1..n-1]; what rank r says begins at *told + n r, in room [moei_ranks_room]. The result is as that
   of a vote. */
static moe_status moei_ranks_tell(const moe_transport *t, moe_status status, size_t n, uint64_t *mine, uint64_t *room, const uint64_t **told, moe_error *error) {
    size_t r, ranks = (size_t)t->n_ranks;
    uint64_t *all = room + n * ranks;
    if (status == MOE_ERR_TRANSPORT) return status;
    mine[0] = (uint64_t)-(int64_t)status;
    for (r = 0; r < ranks; r++) memcpy(room + r * n, mine, n * sizeof *mine);
    if (t->counts(t->ctx, n, room, all) != MOE_OK) return moei_error(error, MOE_ERR_TRANSPORT, "the transport's exchange of counts failed");
    *told = all;
    for (r = 0; r < ranks && status == MOE_OK; r++)
        if (all[r * n] != 0) status = moei_error(error, MOE_ERR_PEER, "rank %z: %s", r, all[r * n] < 100 ? moe_status_text(-(int)all[r * n]) : "failed");
    return status;
}

/* The tokens of all ranks in one call. */
typedef struct moei_tokens {
    size_t first, total, most; /* those of the ranks before this one, all, and the most that one of them brings */
} moei_tokens;

static moei_tokens moei_tokens_alone(size_t n) {
    moei_tokens s;
    s.first = 0, s.total = s.most = n;
    return s;
}

/* From each rank's number, `step` words apart. They must all fit an int32. */
static moe_status moei_tokens_of(const moe_transport *t, const uint64_t *numbers, size_t step, moei_tokens *s) {
    uint64_t first = 0, total = 0, most = 0;
    int r;
    for (r = 0; r < t->n_ranks; r++) {
        uint64_t n = numbers[(size_t)r * step];
        if (n > (uint64_t)INT32_MAX - total) return MOE_ERR_OVERFLOW;
        if (r < t->rank) first += n;
        if (n > most) most = n;
        total += n;
    }
    s->first = (size_t)first, s->total = (size_t)total, s->most = (size_t)most;
    return MOE_OK;
}

static uint64_t moei_double_bits(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

MOEI_TOOL double moei_bits_double(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Settings that must be the same on all ranks: up to so many are compared at once. */
enum { MOEI_SETTINGS = 32 };

typedef struct moei_agreed {
    const moe_transport *transport;
    const char *where; /* "module 3 (mixture): " */
    size_t n;
    uint64_t values[MOEI_SETTINGS];
    const char *names[MOEI_SETTINGS];
    moe_error *error;
} moei_agreed;

static moei_agreed moei_agreed_begin(const moe_transport *t, const char *where, moe_error *error) {
    moei_agreed s;
    memset(&s, 0, sizeof s);
    s.transport = t, s.where = where, s.error = error;
    return s;
}

/* Compares what has been collected: MOE_OK on all ranks, or on none. */
static moe_status moei_agreed_end(moei_agreed *s) {
    size_t i = 0;
    int rank = 0;
    moe_status status = s->n > 0 ? moe_transport_agree(s->transport, s->n, s->values, &rank, &i) : MOE_OK;
    if (status == MOE_ERR_CONFIG && i < s->n)
        return moei_error(s->error, status, "%s%s: rank %d has another value than rank %d", s->where, s->names[i], rank, s->transport->rank);
    s->n = 0;
    return status == MOE_OK ? status : moei_error(s->error, status, "%sthe ranks could not compare their settings: %s", s->where, moe_status_text(status));
}

static moe_status moei_agreed_add(moei_agreed *s, const char *name, uint64_t value) {
    moe_status status = s->n == MOEI_SETTINGS ? moei_agreed_end(s) : MOE_OK;
    if (status != MOE_OK) return status;
    s->values[s->n] = value, s->names[s->n++] = name;
    return MOE_OK;
}

/* All fields of a configuration. */
static moe_status moei_agreed_fields(moei_agreed *s, const moe_field *fields, const void *config) {
    moe_status status = MOE_OK;
    for (; fields->name != NULL && status == MOE_OK; fields++) {
        int real = fields->kind == MOE_FIELD_REAL;
        uint64_t value = real ? moei_double_bits((double)moei_field_get_real(fields, config)) : (uint64_t)(int64_t)moei_field_get_int(fields, config);
        status = moei_agreed_add(s, fields->name, value);
    }
    return status;
}

/* ---- kinds of modules as data ------------------------------------------------------------------------------------------------- */

/* The settings of modules, as files name them. */
typedef struct moei_module_config {
    int d_in; /* of the net itself */
    int d_out, act, span, vocabulary, d, most;
    moe_real rate;
    moe_attention_config attention;
    moe_layer_config layer;
} moei_module_config;

#define MOEI_M moei_module_config
#define MOEI_A moe_attention_config

static const moe_field moei_net_fields[] = {MOEI_INT(MOEI_M, d_in, 0, MOE_MAX_WIDTH, "width of the net's input; 0: token ids"), MOEI_FIELDS_END};
static const moe_field moei_linear_fields[] = {MOEI_INT(MOEI_M, d_out, 1, MOE_MAX_WIDTH, "width that leaves"), MOEI_FIELDS_END};
static const moe_field moei_activation_fields[] = {MOEI_CHOICE(MOEI_M, act, MOE_ACT_COUNT, moei_act_names, "activation"), MOEI_FIELDS_END};
static const moe_field moei_no_fields[] = {MOEI_FIELDS_END};
static const moe_field moei_residual_fields[] = {MOEI_INT(MOEI_M, span, 1, MOE_NET_MAX_MODULES, "modules it goes around"), MOEI_FIELDS_END};
static const moe_field moei_embedding_fields[] = {MOEI_INT(MOEI_M, vocabulary, 1, MOE_MAX_WIDTH, "number of token ids"),
                                                  MOEI_INT(MOEI_M, d, 1, MOE_MAX_WIDTH, "width that leaves"), MOEI_FIELDS_END};
static const moe_field moei_positions_fields[] = {MOEI_INT(MOEI_M, most, 1, MOE_MAX_WIDTH, "tokens of the longest sequence"), MOEI_FIELDS_END};
static const moe_field moei_attention_fields[] = {MOEI_INT(MOEI_A, heads, 1, 4096, "heads"),
                                                  MOEI_INT(MOEI_A, d_head, 1, MOE_MAX_WIDTH, "width of a head"),
                                                  MOEI_FLAG(MOEI_A, full, "tokens see later ones"),
                                                  MOEI_FLAG(MOEI_A, rotary, "queries and keys are turned by their places"),
                                                  MOEI_REAL(MOEI_A, rotary_base, 1, 1e9, "base of the angles"),
                                                  MOEI_FIELDS_END};
static const moe_field moei_dropout_fields[] = {MOEI_REAL(MOEI_M, rate, 0, 1, "probability of a zero"), MOEI_FIELDS_END};
static const moe_field moei_feed_forward_fields[] = {MOEI_CHOICE(MOEI_L, expert, MOE_EXPERT_COUNT, moei_expert_names, "kind of expert"),
                                                     MOEI_INT(MOEI_L, d_ff, 1, MOE_MAX_WIDTH, "hidden width"),
                                                     MOEI_INT(MOEI_L, d_low, 1, MOE_MAX_WIDTH, "rows of reduce in a factorised expert"),
                                                     MOEI_CHOICE(MOEI_L, act, MOE_ACT_COUNT, moei_act_names, "activation of an mlp expert"),
                                                     MOEI_FLAG(MOEI_L, no_expert_bias, "mlp and linear experts have no biases"),
                                                     MOEI_REAL(MOEI_L, swiglu_alpha, 1e-6, 1e6, "alpha of a swiglu expert"),
                                                     MOEI_REAL(MOEI_L, swiglu_limit, 1e-6, 1e6, "limit of a swiglu expert"),
                                                     MOEI_REAL(MOEI_L, swiglu_offset, -1e6, 1e6, "offset of a swiglu expert"),
                                                     MOEI_FLAG(MOEI_L, expert_bias, "a swiglu expert has biases"),
                                                     MOEI_FIELDS_END};

static const char *const moei_module_names[] = {"linear",    "activation", "layer_norm", "mixture", "residual",     "embedding",
                                                "positions", "attention",  "rms_norm",   "dropout", "feed_forward", "tied",      NULL};

static const moe_field *moei_module_fields(int kind) {
    switch (kind) {
    case MOE_MODULE_LINEAR: return moei_linear_fields;
    case MOE_MODULE_ACTIVATION: return moei_activation_fields;
    case MOE_MODULE_MIXTURE: return moe_layer_fields();
    case MOE_MODULE_RESIDUAL: return moei_residual_fields;
    case MOE_MODULE_EMBEDDING: return moei_embedding_fields;
    case MOE_MODULE_POSITIONS: return moei_positions_fields;
    case MOE_MODULE_ATTENTION: return moei_attention_fields;
    case MOE_MODULE_DROPOUT: return moei_dropout_fields;
    case MOE_MODULE_FEED_FORWARD: return moei_feed_forward_fields;
    default: return moei_no_fields;
    }
}

/* What moei_module_fields describes. */
static void *moei_module_settings(moei_module_config *config, int kind) {
    if (kind == MOE_MODULE_MIXTURE || kind == MOE_MODULE_FEED_FORWARD) return &config->layer;
    return kind == MOE_MODULE_ATTENTION ? (void *)&config->attention : (void *)config;
}

/* The settings of a module, as files name them. */
static moei_module_config moei_module_config_of(const moe_module *m) {
    moei_module_config config;
    memset(&config, 0, sizeof config);
    config.d_out = config.d = m->d_out, config.act = m->act, config.span = m->span;
    config.vocabulary = config.most = m->n_rows, config.rate = m->rate;
    config.attention = m->attention;
    config.layer = m->layer.config;
    return config;
}

/* Whether a module is a moe_layer. Only a mixture's has a router to speak of. */
static int moei_is_layer(const moe_module *m) { return m->kind == MOE_MODULE_MIXTURE || m->kind == MOE_MODULE_FEED_FORWARD; }

/* ---- building ------------------------------------------------------------------------------------------------------------------ */

moe_status moe_net_init(moe_net *net, int d_in, int kernels, const moe_allocator *allocator) {
    if (net == NULL) return MOE_ERR_ARGUMENT;
    memset(net, 0, sizeof *net);
    if (!moei_can_allocate(allocator))
        return moei_error(&net->error, MOE_ERR_ARGUMENT, "allocator is NULL, and MOE_NO_MALLOC leaves no other");
    if (allocator != NULL) net->allocator = *allocator;
    if (d_in < 0 || d_in > MOE_MAX_WIDTH)
        return moei_error(&net->error, MOE_ERR_CONFIG, "d_in = %d: must be 1 to %d, or 0 for token ids", d_in, (int)MOE_MAX_WIDTH);
    if (moe_kernels_name(kernels) == NULL) return moei_error(&net->error, MOE_ERR_CONFIG, "kernels = %d: there are no such ones", kernels);
    net->kernels = moe_kernels_select(kernels);
    if (net->kernels == NULL)
        return moei_error(&net->error, MOE_ERR_UNSUPPORTED, "kernels = %s: not compiled in, or this machine cannot run them",
                          moe_kernels_name(kernels));
    net->kernels_wanted = kernels;
    net->d_in = net->d_out = d_in;
    return MOE_OK;
}

/* Remembers why a module cannot be added; returns code. */
static moe_status moei_module_refuse(moe_net *net, int kind, moe_status code, const char *format, ...) {
    char why[sizeof net->error.message];
    moei_text t;
    va_list arguments;
    t.out = why, t.room = sizeof why, t.length = 0;
    why[0] = '\0';
    va_start(arguments, format);
    moei_put_format(&t, format, arguments);
    va_end(arguments);
    return moei_error(&net->error, code, "module %z (%s): %s", net->n_modules, moei_module_names[kind], why);
}

/* An empty module that takes what arrives. Fails when a call before it has failed, or when the net takes no more. */
static moe_status moei_module_begin(moe_net *net, int kind, moe_module *m) {
    if (net == NULL) return MOE_ERR_ARGUMENT;
    if (net->error.code != MOE_OK) return net->error.code;
    if (net->built || net->kernels == NULL) return MOE_ERR_STATE;
    if (net->n_modules >= MOE_NET_MAX_MODULES)
        return moei_module_refuse(net, kind, MOE_ERR_CONFIG, "a net has at most %d modules", (int)MOE_NET_MAX_MODULES);
    if ((net->d_out == 0) != (kind == MOE_MODULE_EMBEDDING))
        return moei_module_refuse(net, kind, MOE_ERR_CONFIG, net->d_out == 0 ? "d_in = %d, so the first module must be an embedding"
                                                                             : "d_in = %d: only the first module of a net with d_in = 0 can be one", net->d_in);
    memset(m, 0, sizeof *m);
    m->kind = kind;
    m->d_in = m->d_out = net->d_out;
    return MOE_OK;
}

static moe_status moei_module_append(moe_net *net, const moe_module *m) {
    if (!moei_net_grow(&net->allocator, &net->modules, sizeof *net->modules, net->n_modules, net->n_modules + 1))
        return moei_module_refuse(net, m->kind, MOE_ERR_MEMORY, "no memory for one more module");
    MOEI_LIST_ADD(net->modules, net->n_modules, *m);
    net->d_out = m->d_out;
    return MOE_OK;
}

moe_status moe_net_linear(moe_net *net, int d_out) {
    moe_module m;
    moe_status status = moei_module_begin(net, MOE_MODULE_LINEAR, &m);
    if (status != MOE_OK) return status;
    if (d_out < 1 || d_out > MOE_MAX_WIDTH)
        return moei_module_refuse(net, m.kind, MOE_ERR_CONFIG, "d_out = %d: must be 1 to %d", d_out, (int)MOE_MAX_WIDTH);
    m.d_out = d_out;
    return moei_module_append(net, &m);
}

moe_status moe_net_activation(moe_net *net, int act) {
    moe_module m;
    moe_status status = moei_module_begin(net, MOE_MODULE_ACTIVATION, &m);
    if (status != MOE_OK) return status;
    if (act < 0 || act >= MOE_ACT_COUNT)
        return moei_module_refuse(net, m.kind, MOE_ERR_CONFIG, "act = %d: there is no such activation", act);
    m.act = act;
    return moei_module_append(net, &m);
}

/* A module without settings. */
static moe_status moei_module_plain(moe_net *net, int kind) {
    moe_module m;
    moe_status status = moei_module_begin(net, kind, &m);
    return status == MOE_OK ? moei_module_append(net, &m) : status;
}

moe_status moe_net_layer_norm(moe_net *net) { return moei_module_plain(net, MOE_MODULE_LAYER_NORM); }

moe_status moe_net_rms_norm(moe_net *net) { return moei_module_plain(net, MOE_MODULE_RMS_NORM); }

moe_status moe_net_embedding(moe_net *net, int vocabulary, int d) {
    moe_module m;
    moe_status status = moei_module_begin(net, MOE_MODULE_EMBEDDING, &m);
    if (status != MOE_OK) return status;
    if (vocabulary < 1 || vocabulary > MOE_MAX_WIDTH)
        return moei_module_refuse(net, m.kind, MOE_ERR_CONFIG, "vocabulary = %d: must be 1 to %d", vocabulary, (int)MOE_MAX_WIDTH);
    if (d < 1 || d > MOE_MAX_WIDTH) return moei_module_refuse(net, m.kind, MOE_ERR_CONFIG, "d = %d: must be 1 to %d", d, (int)MOE_MAX_WIDTH);
    m.n_rows = vocabulary;
    m.d_out = d;
    return moei_module_append(net, &m);
}

moe_status moe_net_positions(moe_net *net, int most) {
    moe_module m;
    moe_status status = moei_module_begin(net, MOE_MODULE_POSITIONS, &m);
    if (status != MOE_OK) return status;
    if (most < 1 || most > MOE_MAX_WIDTH)
        return moei_module_refuse(net, m.kind, MOE_ERR_CONFIG, "most = %d: must be 1 to %d", most, (int)MOE_MAX_WIDTH);
    m.n_rows = most;
    return moei_module_append(net, &m);
}

moe_status moe_net_dropout(moe_net *net, moe_real rate) {
    moe_module m;
    moe_status status = moei_module_begin(net, MOE_MODULE_DROPOUT, &m);
    if (status != MOE_OK) return status;
    if (!moe_is_finite(rate) || rate < MOEI_R(0.0) || rate >= MOEI_R(1.0))
        return moei_module_refuse(net, m.kind, MOE_ERR_CONFIG, "rate = %g: must be at least 0 and below 1", (double)rate);
    m.rate = rate;
    return moei_module_append(net, &m);
}

moe_status moe_net_tied(moe_net *net) {
    moe_module m;
    moe_status status = moei_module_begin(net, MOE_MODULE_TIED, &m);
    if (status != MOE_OK) return status;
    if (net->d_in != 0) return moei_module_refuse(net, m.kind, MOE_ERR_CONFIG, "the net has no embedding: its d_in is %d", net->d_in);
    if (net->modules[0].d_out != m.d_in)
        return moei_module_refuse(net, m.kind, MOE_ERR_CONFIG, "the embedding is %d wide, but width %d arrives", net->modules[0].d_out, m.d_in);
    m.d_out = net->modules[0].n_rows;
    return moei_module_append(net, &m);
}

/* Fills in the defaults for width d. */
static moe_status moei_attention_check(moe_attention_config *c, int d, moe_error *error) {
    moe_status status = moei_fields_check(moei_attention_fields, c, error);
    if (status != MOE_OK) return status;
    if (c->heads == 0)
        for (c->heads = d < 64 ? 1 : d / 32 < 4096 ? d / 32 : 4096; d % c->heads != 0;) c->heads--;
    if (c->d_head == 0 && d % c->heads != 0)
        return moei_error(error, MOE_ERR_CONFIG, "heads = %d: must divide the width that arrives, %d, or d_head be given", c->heads, d);
    moei_default(&c->d_head, d / c->heads);
    if (c->d_head > MOE_MAX_WIDTH / c->heads)
        return moei_error(error, MOE_ERR_CONFIG, "d_head = %d: heads = %d of them are wider than %d", c->d_head, c->heads, (int)MOE_MAX_WIDTH);
    if (c->rotary && c->d_head % 2 != 0) return moei_error(error, MOE_ERR_CONFIG, "d_head = %d: must be even for rotary = 1", c->d_head);
    if (!c->rotary && !moei_field_is_zero(moe_field_find(moei_attention_fields, "rotary_base"), c))
        return moei_error(error, MOE_ERR_CONFIG, "rotary_base = %g does not go with rotary = 0", (double)c->rotary_base);
    if (c->rotary) moei_default_real(&c->rotary_base, MOEI_R(10000.0));
    return MOE_OK;
}

moe_status moe_net_attention(moe_net *net, const moe_attention_config *config) {
    moe_module m;
    moe_error why;
    moe_status status = moei_module_begin(net, MOE_MODULE_ATTENTION, &m);
    if (status != MOE_OK) return status;
    if (config != NULL) m.attention = *config;
    status = moei_attention_check(&m.attention, m.d_in, &why);
    if (status != MOE_OK) return moei_module_refuse(net, m.kind, status, "%s", why.message);
    return moei_module_append(net, &m);
}

/* The layer of a feed_forward for width d: its one expert takes every token, whatever the score, which has no parameters. */
static moe_status moei_feed_forward_config(const moe_layer_config *wanted, int d, moe_layer_config *c, moe_error *error) {
    const moe_field *field;
    char value[40];
    memset(c, 0, sizeof *c);
    for (field = moe_layer_fields(); wanted != NULL && field->name != NULL; field++)
        if (moe_field_find(moei_feed_forward_fields, field->name) == NULL && !moei_field_is_zero(field, wanted)) {
            moe_field_text(field, wanted, value, sizeof value);
            return moei_error(error, MOE_ERR_CONFIG, "%s = %s: must be 0, a feed_forward has %s", field->name, value,
                              "expert, d_ff, d_low, act, no_expert_bias, expert_bias and swiglu_...");
        }
    if (wanted != NULL) *c = *wanted;
    c->transport = NULL; /* every rank has all of it */
    c->router.d_model = d;
    c->router.n_experts = c->router.top_k = 1;
    c->router.score = MOE_SCORE_GRAP;
    c->router.weight = MOE_WEIGHT_ONE;
    return MOE_OK;
}

moe_status moe_net_feed_forward(moe_net *net, const moe_layer_config *config) {
    moe_module m;
    moe_layer_config c;
    moe_error why;
    moe_status status = moei_module_begin(net, MOE_MODULE_FEED_FORWARD, &m);
    if (status != MOE_OK) return status;
    status = moei_feed_forward_config(config, m.d_in, &c, &why);
    c.kernels = moei_table(net->kernels)->id;
    if (status == MOE_OK) status = moe_layer_init(&m.layer, &c, &why);
    if (status != MOE_OK) return moei_module_refuse(net, m.kind, status, "%s", why.message);
    return moei_module_append(net, &m);
}

/* The last module of a kind before module i, or i. */
static size_t moei_previous(const moe_net *net, size_t i, int kind) {
    size_t j;
    for (j = i; j-- > 0;)
        if (net->modules[j].kind == kind) return j;
    return i;
}

static size_t moei_previous_mixture(const moe_net *net, size_t i) { return moei_previous(net, i, MOE_MODULE_MIXTURE); }

static size_t moei_previous_attention(const moe_net *net, size_t i) { return moei_previous(net, i, MOE_MODULE_ATTENTION); }

/* Whether a router that reads the previous mixture finds what it needs there; the new module's number is n_modules. */
static moe_status moei_previous_check(const moe_net *net, const moe_router_config *c, moe_error *error) {
    size_t at = moei_previous_mixture(net, net->n_modules);
    const moe_router_config *previous;
    if (!(moe_router_traits(c) & MOE_TRAIT_NEEDS_PREVIOUS_LAYER)) return MOE_OK;
    if (at == net->n_modules)
        return moei_error(error, MOE_ERR_CONFIG, "input = adaptive_clustering has the trait %s: this is the first mixture layer, there is none before it",
                          moe_trait_name(MOE_TRAIT_NEEDS_PREVIOUS_LAYER));
    previous = &net->modules[at].layer.config.router;
    if (previous->n_experts > c->n_experts)
        return moei_error(error, MOE_ERR_CONFIG, "n_experts = %d: input = adaptive_clustering needs at least those of module %z before it, %d", c->n_experts, at,
                          previous->n_experts);
    if (previous->d_model != c->d_model && (c->ac_mode == MOE_AC_PAPER || c->ac_mode == MOE_AC_RUNNING))
        return moei_error(error, MOE_ERR_CONFIG, "d_model = %d: ac_mode = %s needs the width of module %z before it, %d", c->d_model, moei_ac_names[c->ac_mode], at,
                          previous->d_model);
    return MOE_OK;
}

/* What the attention before the new module, if there is one, says of a router that refines. */
static moe_status moei_refine_fit(const moe_net *net, moe_router_config *c, moe_error *error) {
    size_t at = moei_previous_attention(net, net->n_modules);
    const moe_module *attention;
    if (at == net->n_modules || c->refine == MOE_REFINE_NONE) return MOE_OK;
    attention = &net->modules[at];
    if (!attention->attention.full) c->causal = 1;
    if (c->refine != MOE_REFINE_ATTENTION) return MOE_OK;
    if (c->heads == 0) c->heads = attention->attention.heads;
    if (c->heads != attention->attention.heads)
        return moei_error(error, MOE_ERR_CONFIG, "heads = %d: the attention that refine = attention reads, module %z, has heads = %d", c->heads, at,
                          attention->attention.heads);
    if (c->d_model != attention->d_out)
        return moei_error(error, MOE_ERR_CONFIG, "d_model = %d: the attention that refine = attention reads, module %z, is %d wide", c->d_model, at,
                          attention->d_out);
    return MOE_OK;
}

moe_status moe_net_mixture(moe_net *net, const moe_layer_config *config) {
    moe_module m;
    moe_layer_config c;
    moe_error why;
    moe_status status = moei_module_begin(net, MOE_MODULE_MIXTURE, &m);
    if (status != MOE_OK) return status;
    if (config == NULL) return moei_module_refuse(net, m.kind, MOE_ERR_ARGUMENT, "config must not be NULL");
    c = *config;
    if (c.router.d_model == 0) c.router.d_model = m.d_in;
    if (c.router.d_model != m.d_in)
        return moei_module_refuse(net, m.kind, MOE_ERR_CONFIG, "d_model = %d, but width %d arrives", c.router.d_model, m.d_in);
    if (c.kernels == MOE_KERNELS_AUTO) c.kernels = moei_table(net->kernels)->id;
    if (c.transport == NULL) c.transport = net->transport;
    if (c.transport != net->transport)
        return moei_module_refuse(net, m.kind, MOE_ERR_CONFIG, "transport is not the net's: set net.transport before the modules, config.transport stays NULL");
    status = moei_refine_fit(net, &c.router, &why);
    if (status == MOE_OK) status = moe_layer_init(&m.layer, &c, &why);
    if (status == MOE_OK) status = moei_previous_check(net, &m.layer.config.router, &why);
    if (status != MOE_OK) return moei_module_refuse(net, m.kind, status, "%s", why.message);
    m.d_out = m.layer.config.d_out;
    return moei_module_append(net, &m);
}

moe_status moe_net_residual(moe_net *net, int span) {
    moe_module m;
    moe_status status = moei_module_begin(net, MOE_MODULE_RESIDUAL, &m);
    if (status != MOE_OK) return status;
    if (span < 1 || (size_t)span > net->n_modules)
        return moei_module_refuse(net, m.kind, MOE_ERR_CONFIG, "span = %d: %z modules stand before it", span, net->n_modules);
    if (net->modules[net->n_modules - (size_t)span].d_in != m.d_in)
        return moei_module_refuse(net, m.kind, MOE_ERR_CONFIG, "span = %d: width %d entered there, but width %d arrives", span,
                                  net->modules[net->n_modules - (size_t)span].d_in, m.d_in);
    m.span = span;
    return moei_module_append(net, &m);
}

/* Whether module i is followed by an activation that passes only about half of what enters. */
static int moei_feeds_relu(const moe_net *net, size_t i) {
    const moe_module *next = net->modules + i + 1;
    return i + 1 < net->n_modules && next->kind == MOE_MODULE_ACTIVATION && next->act <= MOE_ACT_GELU;
}

/* A matrix of a module, or with columns = 0 a vector that starts at value. */
typedef struct moei_module_tensor {
    const char *name; /* NULL: there is none */
    int rows, columns;
    moe_real value;
} moei_module_tensor;

static moei_module_tensor moei_tensor_of(const char *name, int rows, int columns, moe_real value) {
    moei_module_tensor t;
    t.name = name, t.rows = rows, t.columns = columns, t.value = value;
    return t;
}

/* Tensor `place` of a module that is no layer. */
static moei_module_tensor moei_module_place(const moe_module *m, int place) {
    static const char *const of_attention[MOE_MODULE_SLOTS] = {"query", "key", "value", "output"};
    int inner = m->attention.heads * m->attention.d_head, bias = place == MOE_MODULE_BIAS;
    if (place < MOE_MODULE_SLOTS && m->kind == MOE_MODULE_ATTENTION)
        return place == MOE_MODULE_OUTPUT ? moei_tensor_of(of_attention[place], m->d_out, inner, MOEI_R(0.0))
                                          : moei_tensor_of(of_attention[place], inner, m->d_in, MOEI_R(0.0));
    if (bias && (m->kind == MOE_MODULE_LINEAR || m->kind == MOE_MODULE_LAYER_NORM || m->kind == MOE_MODULE_TIED))
        return moei_tensor_of("bias", m->d_out, 0, MOEI_R(0.0));
    if (place == MOE_MODULE_WEIGHT && (m->kind == MOE_MODULE_LAYER_NORM || m->kind == MOE_MODULE_RMS_NORM))
        return moei_tensor_of("weight", m->d_out, 0, MOEI_R(1.0));
    if (place == MOE_MODULE_WEIGHT && m->kind == MOE_MODULE_LINEAR) return moei_tensor_of("weight", m->d_out, m->d_in, MOEI_R(0.0));
    if (place == MOE_MODULE_WEIGHT && m->n_rows > 0) return moei_tensor_of("weight", m->n_rows, m->d_out, MOEI_R(0.0));
    return moei_tensor_of(NULL, 0, 0, MOEI_R(0.0));
}

/* Describes tensor `place` of module i, name without the module's number; MOE_ERR_NOT_FOUND where it has none. */
static moe_status moei_module_slot(const moe_net *net, size_t i, int place, moe_slot *out) {
    const moe_module *m = &net->modules[i];
    moei_module_tensor t;
    int fits;
    if (moei_is_layer(m)) return moe_layer_slot(&m->layer.config, place, out);
    t = moei_module_place(m, place);
    if (t.name == NULL) return MOE_ERR_NOT_FOUND;
    memset(out, 0, sizeof *out);
    if (t.columns == 0) fits = moei_slot_vector(out, (size_t)t.rows, MOE_PARAM_TRAINED, t.value);
    else fits = moei_slot_matrix(out, (size_t)t.rows, (size_t)t.columns, MOE_PARAM_TRAINED);
    if (m->kind == MOE_MODULE_LINEAR && moei_feeds_relu(net, i)) out->init_spread *= MOEI_R(1.4142135623730951);
    out->name = t.name;
    return fits ? MOE_OK : MOE_ERR_OVERFLOW;
}

/* How many tensors the net has, and how many numbers are in them. */
static moe_status moei_net_count(const moe_net *net, size_t *tensors, size_t *numbers, moe_error *error) {
    moe_slot slot;
    size_t i;
    int place;
    *tensors = *numbers = 0;
    for (i = 0; i < net->n_modules; i++)
        for (place = 0; place < MOE_LAYER_SLOTS; place++) {
            moe_status status = moei_module_slot(net, i, place, &slot);
            if (status == MOE_ERR_NOT_FOUND) continue;
            if (status != MOE_OK || !moei_add(*numbers, slot.count, numbers))
                return moei_error(error, MOE_ERR_OVERFLOW, "module %z (%s): the tensors do not fit this machine's memory", i,
                                  moei_module_names[net->modules[i].kind]);
            ++*tensors;
        }
    return MOE_OK;
}

static void moei_tensor_describe(size_t module, const moe_slot *slot, moe_tensor *out) {
    moei_text t;
    int i;
    memset(out, 0, sizeof *out);
    t.out = out->name, t.room = sizeof out->name, t.length = 0;
    moei_put_integer(&t, (int64_t)module);
    moei_put(&t, ".", 1);
    moei_put(&t, slot->name, moei_strlen(slot->name));
    out->n_dims = slot->n_dims;
    for (i = 0; i < MOE_MAX_DIMS; i++) out->shape[i] = slot->shape[i];
    out->count = slot->count;
    out->flags = slot->flags;
}

/* Fills net->tensors with names and shapes; the values come with moei_net_allocate. */
static moe_status moei_net_register(moe_net *net, moe_error *error) {
    moe_slot slot;
    moe_tensor tensor;
    size_t i, count, numbers;
    int place;
    moe_status status = moei_net_count(net, &count, &numbers, error);
    if (status != MOE_OK || count == 0) return status;
    if (!moei_net_grow(&net->allocator, &net->tensors, sizeof *net->tensors, 0, count))
        return moei_error(error, MOE_ERR_MEMORY, "no memory for the list of %z tensors", count);
    for (i = 0; i < net->n_modules; i++) {
        net->modules[i].first_tensor = net->n_tensors;
        for (place = 0; place < MOE_LAYER_SLOTS; place++) {
            if (moei_module_slot(net, i, place, &slot) != MOE_OK) continue;
            moei_tensor_describe(i, &slot, &tensor);
            MOEI_LIST_ADD(net->tensors, net->n_tensors, tensor);
        }
    }
    return MOE_OK;
}

static void moei_net_unregister(moe_net *net) {
    moei_net_drop(&net->allocator, &net->tensors, sizeof *net->tensors, net->n_tensors);
    net->n_tensors = 0;
}

/* Whether each rank has its own part of a tensor: the experts of a mixture. Of all others every rank has the same values. */
static int moei_is_parted(const moe_net *net, const moe_tensor *t) {
    static const char experts[] = ".experts.";
    const char *p = t->name;
    size_t i = 0;
    if (net->transport == NULL) return 0;
    for (; *p >= '0' && *p <= '9' && i < net->n_modules; p++) i = i * 10 + (size_t)(*p - '0');
    return i < net->n_modules && net->modules[i].kind == MOE_MODULE_MIXTURE && moei_strlen(p) >= sizeof experts - 1 && moei_memcmp(p, experts, sizeof experts - 1) == 0;
}

/* The first tensor behind those of module i. */
static size_t moei_last_tensor(const moe_net *net, size_t i) {
    return i + 1 < net->n_modules ? net->modules[i + 1].first_tensor : net->n_tensors;
}

/* Gives the registered tensors their places in values and gradients (NULL: none), one after another, and tells the modules. */
static void moei_net_bind(moe_net *net, moe_real *values, moe_real *gradients) {
    size_t i, t, at = 0;
    int place;
    for (i = 0; i < net->n_modules; i++) {
        moe_module *m = &net->modules[i];
        if (moei_is_layer(m)) moei_layer_bind(&m->layer, values + at, gradients != NULL ? gradients + at : NULL);
        for (t = m->first_tensor; t < moei_last_tensor(net, i); t++) {
            net->tensors[t].data = values + at;
            net->tensors[t].gradient = gradients != NULL ? gradients + at : NULL;
            at += net->tensors[t].count;
        }
        for (t = m->first_tensor, place = 0; place < MOE_MODULE_SLOTS && !moei_is_layer(m); place++) {
            const moe_tensor *tensor = moei_module_place(m, place).name != NULL ? &net->tensors[t++] : NULL;
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
        if (net->modules[i].kind == MOE_MODULE_MIXTURE) status = moe_router_check_training(&net->modules[i].layer.config.router, &why);
        if (status != MOE_OK) return moei_error(error, status, "module %z (mixture): %s", i, why.message);
    }
    return MOE_OK;
#else
    (void)net;
    return moei_error(error, MOE_ERR_UNSUPPORTED, "trainable = 1: this build has MOE_NO_TRAIN");
#endif
}

/* Settings of the net itself. Every message names a setting: kernels that differ would let what all ranks hold drift apart. */
static moe_status moei_net_agree_top(const moe_net *net, int trainable, uint64_t seed, moe_error *error) {
    moei_agreed s = moei_agreed_begin(net->transport, "the net: ", error);
    (void)moei_agreed_add(&s, "MOE_REAL", sizeof(moe_real));
    (void)moei_agreed_add(&s, "the version of the library", MOE_VERSION_MAJOR << 16 | MOE_VERSION_MINOR << 8 | MOE_VERSION_PATCH);
    (void)moei_agreed_add(&s, "kernels", (uint64_t)(int64_t)moei_table(net->kernels)->id);
    (void)moei_agreed_add(&s, "d_in", (uint64_t)net->d_in);
    (void)moei_agreed_add(&s, "the number of modules", net->n_modules);
    (void)moei_agreed_add(&s, "trainable", trainable != 0);
    (void)moei_agreed_add(&s, "seed", seed);
    return moei_agreed_end(&s);
}

/* "module 3 (mixture): " */
static const char *moei_module_where(const moe_net *net, size_t i, char out[64]) {
    const char *name = moei_module_names[net->modules[i].kind];
    moei_text t;
    t.out = out, t.room = 64, t.length = 0;
    moei_put(&t, "module ", 7);
    moei_put_unsigned(&t, i);
    moei_put(&t, " (", 2);
    moei_put(&t, name, moei_strlen(name));
    moei_put(&t, "): ", 3);
    return out;
}

/* Whether all ranks have the same modules and settings. Collective, and so is the result: MOE_OK on all ranks, or on none. */
static moe_status moei_net_agree(const moe_net *net, int trainable, uint64_t seed, moe_error *error) {
    char where[64];
    size_t i;
    moe_status status = moei_net_agree_top(net, trainable, seed, error);
    for (i = 0; i < net->n_modules && status == MOE_OK; i++) {
        const moe_module *m = &net->modules[i];
        moei_module_config config = moei_module_config_of(m);
        moei_agreed s = moei_agreed_begin(net->transport, moei_module_where(net, i, where), error);
        status = moei_agreed_add(&s, "the kind of module", (uint64_t)m->kind);
        if (status == MOE_OK) status = moei_agreed_end(&s); /* the same kinds have the same fields */
        if (status == MOE_OK) status = moei_agreed_fields(&s, moei_module_fields(m->kind), moei_module_settings(&config, m->kind));
        if (status == MOE_OK) status = moei_agreed_end(&s);
    }
    return status;
}

/* The memory of a registered net, all zero; the last step that can fail. */
static moe_status moei_net_allocate(moe_net *net, int trainable, moe_error *error) {
    size_t count, numbers, all, bytes;
    moe_status status = trainable ? moei_net_check_training(net, error) : MOE_OK;
    if (status == MOE_OK) status = moei_net_count(net, &count, &numbers, error);
    if (status != MOE_OK) return status;
    if (!moei_mul(numbers, trainable ? 2 : 1, &all) || !moei_mul(all, sizeof(moe_real), &bytes))
        return moei_error(error, MOE_ERR_OVERFLOW, "the net's tensors do not fit this machine's memory");
    net->memory = (moe_real *)moei_alloc(&net->allocator, all, sizeof(moe_real));
    if (net->memory == NULL) return moei_error(error, MOE_ERR_MEMORY, "no memory for %z bytes of tensors", bytes);
    net->memory_size = bytes;
    net->trainable = trainable != 0;
    net->built = 1;
    moei_net_bind(net, net->memory, trainable ? net->memory + numbers : NULL);
    return MOE_OK;
}

/* Starts all tensors at random, in the order of files: one stream, so one seed gives one net. */
static void moei_net_start(moe_net *net, uint64_t seed) {
    moe_slot slot;
    moe_rng rng;
    size_t i;
    int place;
    moe_rng_seed(&rng, seed);
    for (i = 0; i < net->n_modules; i++) {
        const moe_module *m = &net->modules[i];
        if (moei_is_layer(m)) moei_layer_fill(&m->layer.config, net->tensors[m->first_tensor].data, &rng);
        for (place = 0; place < MOE_MODULE_SLOTS && !moei_is_layer(m); place++)
            if (moei_module_slot(net, i, place, &slot) == MOE_OK) moei_slot_fill(&slot, m->tensors[place], &rng);
    }
}

/* Takes back what register and allocate have done. */
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

/* Whether a net can be built, as far as it knows by itself. */
static moe_status moei_net_ready(const moe_net *net, moe_error *error) {
    size_t i;
    if (net->error.code != MOE_OK) return moei_error(error, net->error.code, "%s", net->error.message);
    if (net->built) return moei_error(error, MOE_ERR_STATE, "the net is built already");
    if (net->n_modules == 0) return moei_error(error, MOE_ERR_CONFIG, "the net has no modules");
    for (i = 0; i < net->n_modules; i++)
        if (net->modules[i].kind == MOE_MODULE_MIXTURE && net->modules[i].layer.config.transport != net->transport)
            return moei_error(error, MOE_ERR_CONFIG, "module %z (mixture): its transport is not the net's: net.transport is set before the modules", i);
    return MOE_OK;
}

moe_status moe_net_build(moe_net *net, int trainable, uint64_t seed, moe_error *error) {
    moe_status status;
    if (net == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "net must not be NULL");
    status = moei_ranks_vote(net->transport, moei_net_ready(net, error), NULL, error);
    if (status == MOE_OK && net->transport != NULL) status = moei_net_agree(net, trainable, seed, error);
    if (status != MOE_OK) return status;
    status = moei_net_register(net, error);
    if (status == MOE_OK) status = moei_net_allocate(net, trainable, error);
    status = moei_ranks_vote(net->transport, status, NULL, error);
    if (status == MOE_OK) moei_net_start(net, seed);
    else moei_net_unbuild(net);
    return status;
}

void moe_net_free(moe_net *net) {
    if (net == NULL) return;
    moei_free(&net->allocator, net->memory, net->memory_size);
    moei_net_unregister(net);
    moei_net_drop(&net->allocator, &net->modules, sizeof *net->modules, net->n_modules);
    memset(net, 0, sizeof *net);
}

moe_tensor *moe_net_find(const moe_net *net, const char *name) {
    const char *p = name;
    size_t i = 0, t;
    if (net == NULL || name == NULL) return NULL;
    for (; *p >= '0' && *p <= '9' && i < net->n_modules; p++) i = i * 10 + (size_t)(*p - '0');
    if (*p != '.' || i >= net->n_modules) return NULL;
    for (t = net->modules[i].first_tensor; t < moei_last_tensor(net, i); t++)
        if (moei_strcmp(net->tensors[t].name, name) == 0) return &net->tensors[t];
    return NULL;
}

size_t moe_net_parameters(const moe_net *net, size_t *used_per_token) {
    size_t i, t, count = 0, used = 0, by_token;
    for (i = 0; net != NULL && net->built && i < net->n_modules; i++) {
        const moe_module *m = &net->modules[i];
        size_t before = count;
        for (t = m->first_tensor; t < moei_last_tensor(net, i); t++) count += net->tensors[t].count;
        by_token = count - before;
        if (moei_is_layer(m)) (void)moe_layer_parameters(&m->layer, &by_token);
        if (m->n_rows > 0) by_token = (size_t)m->d_out;
        if (m->kind == MOE_MODULE_TIED) by_token += (size_t)m->d_in * (size_t)m->d_out;
        used += by_token;
    }
    if (used_per_token != NULL) *used_per_token = used;
    return count;
}

/* ---- forward ------------------------------------------------------------------------------------------------------------------- */

/* What one module leaves behind. */
struct moe_module_pass {
    const moe_real *x;     /* [N,d_in] */
    moe_real *y;           /* [N,d_out] */
    moe_real *d_x;         /* [N,d_in] training; NULL for module 0: the caller's */
    moe_real *mean, *rstd; /* [N] norms */
    unsigned char *stays;  /* [N,d_in] dropout in training: 1 where x stays */
    moe_real *q, *k, *v;   /* [N,heads d_head] attention; decoding: k and v [most,heads d_head] lie in the cache */
    moe_real *mixed;       /* [N,heads d_head] its heads' outputs */
    moe_real *weights, *d_weights; /* [heads,N,past+N] attention that a router behind it reads: A, 0 outside of what is seen */
    moe_real *outputs, *d_outputs; /* [heads,past+N,d_out] and o */
    moe_real *past_outputs;        /* [heads,most,d_out] decoding: o in the cache */
    moe_real *past_u, *past_gate;  /* [most,d_in], [most,E] decoding: u and gate of a mixture that refines, in the cache */
    moe_real *turns;       /* [N,d_head] cosines, then sines, of the angles of each place; the first attention with these angles fills them */
    void *work;            /* mixture and feed_forward */
    size_t work_size;
    size_t n_previous;     /* mixture that reads the one before it: how many of its experts a token has */
    int32_t *previous_experts;  /* [N,n_previous] */
    moe_real *previous_weights; /* [N,n_previous] */
    moe_layer_pass layer;
};

/* How many experts module i, a mixture, gives one token at most; soft: all of them. */
static size_t moei_mixture_choices(const moe_net *net, size_t i) {
    const moe_router_config *c = &net->modules[i].layer.config.router;
    return moei_is_soft(c) ? (size_t)c->n_experts : moei_max_choices(c);
}

/* The first attention that turns by the same angles as module i does, or i when that does not turn at all. */
static size_t moei_turns_of(const moe_net *net, size_t i) {
    const moe_attention_config *c = &net->modules[i].attention, *other;
    size_t j;
    for (j = 0; c->rotary && j < i; j++) {
        other = &net->modules[j].attention;
        if (other->rotary && other->d_head == c->d_head && other->rotary_base >= c->rotary_base && other->rotary_base <= c->rotary_base) return j;
    }
    return i;
}

/* The attention that the router of module i reads in this net, or i: none. */
static size_t moei_attention_read(const moe_net *net, size_t i) {
    const moe_module *m = &net->modules[i];
    return m->kind == MOE_MODULE_MIXTURE && m->layer.config.router.refine == MOE_REFINE_ATTENTION ? moei_previous_attention(net, i) : i;
}

/* Whether a router reads attention i. */
static int moei_is_read(const moe_net *net, size_t i) {
    size_t j;
    for (j = i + 1; j < net->n_modules && net->modules[j].kind != MOE_MODULE_ATTENTION; j++)
        if (moei_attention_read(net, j) == i) return 1;
    return 0;
}

static size_t moei_attention_width(const moe_module *m) { return (size_t)m->attention.heads * (size_t)m->attention.d_head; }

/* What a pass is laid out for. */
typedef struct moei_extent {
    size_t n, past; /* tokens of the call, and the most before them */
    int training;   /* what the way back needs is kept */
    int decoding;   /* keys, values and what else is known of earlier tokens lie in a cache */
} moei_extent;

static moei_extent moei_extent_of(size_t n, int training) {
    moei_extent e;
    e.n = n, e.past = 0, e.training = training, e.decoding = 0;
    return e;
}

/* n tokens at the end of a cache for most. */
static moei_extent moei_extent_decoding(size_t n, size_t most) {
    moei_extent e;
    e.n = n, e.past = most - n, e.training = 0, e.decoding = 1;
    return e;
}

static void moei_attention_layout(const moe_net *net, size_t i, const moei_extent *e, moei_layout *l, struct moe_module_pass *p) {
    const moe_module *m = &net->modules[i];
    size_t width = moei_attention_width(m), heads = (size_t)m->attention.heads, rows = 0, keys = 0;
    p->q = moei_take_reals(l, e->n, width);
    if (!e->decoding) {
        p->k = moei_take_reals(l, e->n, width);
        p->v = moei_take_reals(l, e->n, width);
    }
    p->mixed = moei_take_reals(l, e->n, width);
    if (m->attention.rotary && moei_turns_of(net, i) == i) p->turns = moei_take_reals(l, e->n, (size_t)m->attention.d_head);
    if (!moei_is_read(net, i)) return;
    if (!moei_mul(e->n, heads, &rows) || !moei_mul(e->past + e->n, heads, &keys)) l->overflow = 1;
    p->weights = moei_take_reals(l, rows, e->past + e->n);
    p->outputs = moei_take_reals(l, keys, (size_t)m->d_out);
    if (!e->training) return;
    p->d_weights = moei_take_reals(l, rows, e->n);
    p->d_outputs = moei_take_reals(l, keys, (size_t)m->d_out);
}

/* Whether a module is a mixture whose router refines, and so reads earlier tokens. */
static int moei_refines(const moe_module *m) { return m->kind == MOE_MODULE_MIXTURE && m->layer.config.router.refine != MOE_REFINE_NONE; }

/* Lays one module's pass out in memory. */
static moe_status moei_module_layout(const moe_net *net, size_t i, const moei_extent *e, moei_layout *l, struct moe_module_pass *p) {
    const moe_module *m = &net->modules[i];
    size_t n = e->n;
    int training = e->training;
    moe_status status = MOE_OK;
    memset(p, 0, sizeof *p);
    p->y = moei_take_reals(l, n, (size_t)m->d_out);
    if (training && i > 0) p->d_x = moei_take_reals(l, n, (size_t)m->d_in);
    if (m->kind == MOE_MODULE_LAYER_NORM) p->mean = moei_take_reals(l, n, 1);
    if (m->kind == MOE_MODULE_LAYER_NORM || m->kind == MOE_MODULE_RMS_NORM) p->rstd = moei_take_reals(l, n, 1);
    if (m->kind == MOE_MODULE_DROPOUT && training) p->stays = (unsigned char *)moei_take(l, n, (size_t)m->d_in);
    if (m->kind == MOE_MODULE_ATTENTION) moei_attention_layout(net, i, e, l, p);
    if (m->kind == MOE_MODULE_MIXTURE && (moe_router_traits(&m->layer.config.router) & MOE_TRAIT_NEEDS_PREVIOUS_LAYER)) {
        p->n_previous = moei_mixture_choices(net, moei_previous_mixture(net, i));
        p->previous_experts = (int32_t *)moei_take(l, n, p->n_previous * sizeof(int32_t));
        p->previous_weights = moei_take_reals(l, n, p->n_previous);
    }
    if (moei_is_layer(m)) status = moei_layer_size(&m->layer, n, moei_refines(m) ? e->past : 0, training, &p->work_size);
    if (moei_is_layer(m) && status == MOE_OK) p->work = moei_take(l, p->work_size, 1);
    return status;
}

enum { MOEI_ATTENTION_ROWS = 64 }; /* queries of a block */

/* What a module needs while it is at work, in memory that all share. */
typedef struct moei_room {
    moe_real *a, *d_a;                   /* [MOEI_ATTENTION_ROWS,past+N] attention: one block of A and its gradient */
    moe_real *d_q, *d_k, *d_v, *d_mixed; /* [N,heads d_head] attention */
    moe_real *d_act;                     /* [N,d_in] activation */
} moei_room;

static moei_room moei_room_layout(const moe_module *m, const moei_extent *e, moei_layout *l) {
    size_t n = e->n, rows = n < MOEI_ATTENTION_ROWS ? n : (size_t)MOEI_ATTENTION_ROWS, width = moei_attention_width(m);
    moei_room room;
    memset(&room, 0, sizeof room);
    if (m->kind == MOE_MODULE_ACTIVATION && e->training) room.d_act = moei_take_reals(l, n, (size_t)m->d_in);
    if (m->kind != MOE_MODULE_ATTENTION) return room;
    room.a = moei_take_reals(l, rows, e->past + n);
    if (!e->training) return room;
    room.d_a = moei_take_reals(l, rows, n);
    room.d_q = moei_take_reals(l, n, width);
    room.d_k = moei_take_reals(l, n, width);
    room.d_v = moei_take_reals(l, n, width);
    room.d_mixed = moei_take_reals(l, n, width);
    return room;
}

/* What ranks tell each other at the beginning of a pass: the first of its memory. */
enum { MOEI_NET_WORDS = 3 };

static uint64_t *moei_net_room(const moe_net *net, moei_layout *l) {
    if (net->transport == NULL) return NULL;
    return (uint64_t *)moei_take(l, moei_ranks_room(net->transport, MOEI_NET_WORDS), sizeof(uint64_t));
}

/* Lays a pass out in memory; the same function with an empty base counts the bytes. Every module keeps its output: any later
   residual or report may read it. */
static moe_status moei_net_layout(const moe_net *net, const moei_extent *e, moei_layout *l, moe_net_pass *pass) {
    struct moe_module_pass unplaced;
    size_t i, most = 0;
    memset(pass, 0, sizeof *pass);
    (void)moei_net_room(net, l);
    pass->modules = (struct moe_module_pass *)moei_take(l, net->n_modules, sizeof *pass->modules);
    for (i = 0; i < net->n_modules; i++) {
        moei_layout room = moei_layout_begin(NULL);
        moe_status status =
            moei_module_layout(net, i, e, l, pass->modules != NULL && !l->overflow ? &pass->modules[i] : &unplaced);
        if (status != MOE_OK) return status;
        (void)moei_room_layout(&net->modules[i], e, &room);
        if (room.overflow) return MOE_ERR_OVERFLOW;
        if (room.used > most) most = room.used;
    }
    pass->scratch = moei_take(l, most, 1);
    return l->overflow ? MOE_ERR_OVERFLOW : MOE_OK;
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

/* One module at work on the n rows of a call. */
typedef struct moei_run {
    const moe_net *net;
    const moe_module *m;
    struct moe_module_pass *p;
    moe_net_pass *pass;
    size_t i, n, d_in, d_out;
    const moe_real *dy; /* [n,d_out] backward only; NULL in a last mixture whose experts are told one by one */
    const moe_real *d_outputs, *d_weights; /* then these, by entries of its plan */
    moe_real *dx;       /* [n,d_in] added to; NULL: not wanted */
} moei_run;

static moei_run moei_run_begin(const moe_net *net, moe_net_pass *pass, size_t i) {
    moei_run r;
    r.net = net;
    r.m = &net->modules[i];
    r.p = &pass->modules[i];
    r.pass = pass;
    r.i = i;
    r.n = pass->n_tokens;
    r.d_in = (size_t)r.m->d_in;
    r.d_out = (size_t)r.m->d_out;
    r.dy = r.d_outputs = r.d_weights = NULL;
    r.dx = NULL;
    return r;
}

static moei_room moei_run_room(const moei_run *r) {
    moei_layout l = moei_layout_begin(r->pass->scratch);
    moei_extent e = moei_extent_of(r->n, moei_keeps(&r->pass->call));
    e.past = r->pass->past;
    return moei_room_layout(r->m, &e, &l);
}

/* Of a tied module too, whose weight is the embedding's. */
static moe_status moei_linear_forward(const moei_run *r) {
    moei_affine(r->net->kernels, r->n, r->d_out, r->d_in, r->p->x, r->m->tensors[MOE_MODULE_WEIGHT], r->m->tensors[MOE_MODULE_BIAS], r->p->y);
    return MOE_OK;
}

static moe_status moei_activation_forward(const moei_run *r) {
    moe_activate(r->net->kernels, r->m->act, r->n * r->d_in, r->p->x, r->p->y);
    return MOE_OK;
}

#define MOEI_NORM_EPS MOEI_R(1e-5)

static moe_status moei_layer_norm_forward(const moei_run *r) {
    size_t t;
    for (t = 0; t < r->n; t++)
        moe_layer_norm(r->d_in, r->p->x + t * r->d_in, r->m->tensors[MOE_MODULE_WEIGHT], r->m->tensors[MOE_MODULE_BIAS], MOEI_NORM_EPS,
                       r->p->y + t * r->d_in, r->p->mean + t, r->p->rstd + t);
    return MOE_OK;
}

static moe_status moei_rms_norm_forward(const moei_run *r) {
    size_t t;
    for (t = 0; t < r->n; t++)
        moei_rms_norm_row(r->net->kernels, r->d_in, r->p->x + t * r->d_in, r->m->tensors[MOE_MODULE_WEIGHT], MOEI_NORM_EPS, r->p->y + t * r->d_in,
                          r->p->rstd + t);
    return MOE_OK;
}

static moe_status moei_embedding_forward(const moei_run *r) {
    size_t t;
    for (t = 0; t < r->n; t++)
        memcpy(r->p->y + t * r->d_out, r->m->tensors[MOE_MODULE_WEIGHT] + (size_t)r->pass->call.token_ids[t] * r->d_out, r->d_out * sizeof(moe_real));
    return MOE_OK;
}

static moe_status moei_positions_forward(const moei_run *r) {
    size_t i, from, to;
    memcpy(r->p->y, r->p->x, r->n * r->d_in * sizeof(moe_real));
    for (i = 0; i < moei_sequence_count(&r->pass->call); i++) {
        moei_sequence(&r->pass->call, i, &from, &to);
        moe_axpy(r->net->kernels, (to - from) * r->d_in, MOEI_R(1.0), r->m->tensors[MOE_MODULE_WEIGHT] + r->pass->past * r->d_in, r->p->y + from * r->d_in);
    }
    return MOE_OK;
}

/* The draws of other ranks' tokens, `each` for one. */
static void moei_skip(moe_rng *rng, size_t tokens, size_t each) {
    for (tokens *= each; tokens > 0; tokens--) (void)moe_rng_next(rng);
}

/* y = x where it stays, times 1 / (1 - rate). */
static moe_status moei_dropout_forward(const moei_run *r) {
    moe_real factor = MOEI_R(1.0) / (MOEI_R(1.0) - r->m->rate);
    int draws = r->pass->training && r->m->rate > MOEI_R(0.0);
    size_t i;
    if (draws) moei_skip(r->pass->call.rng, r->pass->first, r->d_in);
    memcpy(r->p->y, r->p->x, r->n * r->d_in * sizeof(moe_real));
    for (i = 0; r->pass->training && i < r->n * r->d_in; i++) {
        r->p->stays[i] = !(r->m->rate > MOEI_R(0.0)) || moe_rng_uniform(r->pass->call.rng) >= r->m->rate;
        r->p->y[i] = r->p->stays[i] ? r->p->x[i] * factor : MOEI_R(0.0);
    }
    if (draws) moei_skip(r->pass->call.rng, r->pass->total - r->pass->first - r->n, r->d_in);
    return MOE_OK;
}

/* ---- attention: worked off in blocks of queries of one head, whose part of A is made again in the backward pass instead of kept ------------- */

/* Queries [at, at + rows) of the call and the keys that they may see, [from, from + span); keys are counted from the first past one. What one row sums
   over, and in which order, depends on its place alone, so blocks leave no trace in the bits. */
typedef struct moei_queries {
    size_t head, at, rows, from, span;
} moei_queries;

/* The numbers of one head in row `at` of an array [N,heads d_head]. */
static moe_real *moei_head(const moei_run *r, moe_real *rows, size_t head, size_t at) {
    return rows + at * moei_attention_width(r->m) + head * (size_t)r->m->attention.d_head;
}

/* The next run of real tokens at or after *start; 0 when there is none. Padding is left out of products, for what stands there times 0 need not be 0. */
static size_t moei_run_of_real(const moei_run *r, size_t *start) {
    size_t length = 0;
    while (*start < r->n && !moei_is_real(&r->pass->call, *start)) ++*start;
    if (r->pass->call.mask == NULL) return r->n - *start;
    while (*start + length < r->n && moei_is_real(&r->pass->call, *start + length)) length++;
    return length;
}

/* out [N,o] = in [N,i] W^T, W the tensor [o,i] at a place; 0 for padding. */
static void moei_project(const moei_run *r, int place, size_t i, size_t o, const moe_real *in, moe_real *out) {
    size_t run, length;
    if (r->pass->call.mask != NULL) memset(out, 0, r->n * o * sizeof(moe_real));
    for (run = 0; (length = moei_run_of_real(r, &run)) > 0; run += length)
        moei_affine(r->net->kernels, length, o, i, in + run * i, r->m->tensors[place], NULL, out + run * o);
}

/* Cosines and sines for the places of this call, in double: float angles of late places would be off. */
static void moei_turns_fill(const moei_run *r, moe_real *turns) {
    size_t half = (size_t)r->m->attention.d_head / 2, i, t, from, to, longest = 0;
    for (i = 0; i < moei_sequence_count(&r->pass->call); i++) {
        moei_sequence(&r->pass->call, i, &from, &to);
        if (to - from > longest) longest = to - from;
    }
    for (i = 0; i < half; i++) {
        double step = MOEI_D(pow)((double)r->m->attention.rotary_base, -(double)i / (double)half);
        for (t = 0; t < longest; t++) {
            turns[2 * t * half + i] = (moe_real)MOEI_D(cos)((double)(r->pass->past + t) * step);
            turns[(2 * t + 1) * half + i] = (moe_real)MOEI_D(sin)((double)(r->pass->past + t) * step);
        }
    }
}

/* (a, b) -> (a cos - b sin, a sin + b cos), a and b the halves of a head; way = -1 turns back. */
static void moei_turn_row(size_t half, const moe_real *turns, moe_real way, moe_real *row) {
    size_t i;
    for (i = 0; i < half; i++) {
        moe_real a = row[i], b = row[half + i], c = turns[i], s = way * turns[half + i];
        row[i] = a * c - b * s;
        row[half + i] = a * s + b * c;
    }
}

/* Turns all heads of rows [N,heads d_head] by their places. */
static void moei_turn(const moei_run *r, moe_real way, moe_real *rows) {
    const moe_real *turns = r->pass->modules[moei_turns_of(r->net, r->i)].turns;
    size_t width = (size_t)r->m->attention.d_head, i, t, from, to, h;
    if (!r->m->attention.rotary) return;
    for (i = 0; i < moei_sequence_count(&r->pass->call); i++) {
        moei_sequence(&r->pass->call, i, &from, &to);
        for (t = from; t < to; t++)
            for (h = 0; h < (size_t)r->m->attention.heads; h++) moei_turn_row(width / 2, turns + (t - from) * width, way, moei_head(r, rows, h, t));
    }
}

/* How many keys of its block row i of it sees; none for padding. */
static size_t moei_block_seen(const moei_run *r, const moei_queries *b, size_t i) {
    if (!moei_is_real(&r->pass->call, b->at + i)) return 0;
    return r->m->attention.full ? b->span : r->pass->past + b->at + i + 1 - b->from;
}

/* a [rows,span] = the block's part of A. */
static void moei_block_weights(const moei_run *r, const moei_queries *b, moe_real *a) {
    size_t width = moei_attention_width(r->m), w = (size_t)r->m->attention.d_head, i, j, seen;
    moe_real root = MOEI_F(sqrt)((moe_real)w);
    moe_matmul(r->net->kernels, MOE_MATMUL_NT, MOE_TYPE_REAL, b->rows, b->span, w, moei_head(r, r->p->q, b->head, b->at), width,
               moei_head(r, r->p->k, b->head, b->from), width, a, b->span, 0);
    for (i = 0; i < b->rows; i++, a += b->span) {
        seen = moei_block_seen(r, b, i);
        for (j = 0; j < seen && r->pass->call.mask != NULL; j++) /* without past ones: a key is a token of the call */
            if (!moei_is_real(&r->pass->call, b->from + j)) a[j] = -MOEI_INFINITY;
        moe_softmax(r->net->kernels, seen, a, root, a);
        memset(a + seen, 0, (b->span - seen) * sizeof(moe_real));
    }
}

/* work(r, block) for all blocks. */
static void moei_attention_blocks(const moei_run *r, void (*work)(const moei_run *r, const moei_queries *b)) {
    moei_queries b;
    size_t i, to;
    for (i = 0; i < moei_sequence_count(&r->pass->call); i++) {
        moei_sequence(&r->pass->call, i, &b.from, &to);
        for (b.head = 0; b.head < (size_t)r->m->attention.heads; b.head++)
            for (b.at = b.from; b.at < to; b.at += b.rows) {
                b.rows = to - b.at < MOEI_ATTENTION_ROWS ? to - b.at : (size_t)MOEI_ATTENTION_ROWS;
                b.span = r->pass->past + (r->m->attention.full ? to : b.at + b.rows) - b.from;
                work(r, &b);
            }
    }
}

/* Where row i of the block begins in weights or d_weights. */
static size_t moei_block_cell(const moei_run *r, const moei_queries *b, size_t i) {
    return (b->head * r->n + b->at + i) * (r->pass->past + r->n) + b->from;
}

/* mixed of the block's rows [at, at + rows), summed over `seen` keys. */
static void moei_block_mix(const moei_run *r, const moei_queries *b, const moe_real *a, size_t at, size_t rows, size_t seen) {
    size_t width = moei_attention_width(r->m), w = (size_t)r->m->attention.d_head;
    moe_matmul(r->net->kernels, MOE_MATMUL_NN, MOE_TYPE_REAL, rows, w, seen, a + at * b->span, b->span, moei_head(r, r->p->v, b->head, b->from), width,
               moei_head(r, r->p->mixed, b->head, b->at + at), width, 0);
}

/* A causal row ends before its block does, and 0 times what is not finite is not 0. Of what the later keys hold the block's first row shows all: where it
   is not finite, each row sums over its own keys. */
static void moei_block_forward(const moei_run *r, const moei_queries *b) {
    size_t i;
    moe_real *a = moei_run_room(r).a;
    moei_block_weights(r, b, a);
    for (i = 0; i < b->rows && r->p->weights != NULL; i++)
        memcpy(r->p->weights + moei_block_cell(r, b, i), a + i * b->span, b->span * sizeof(moe_real));
    moei_block_mix(r, b, a, 0, b->rows, b->span);
    if (r->m->attention.full || moei_all_finite((size_t)r->m->attention.d_head, moei_head(r, r->p->mixed, b->head, b->at))) return;
    for (i = 0; i < b->rows; i++) moei_block_mix(r, b, a, i, 1, moei_block_seen(r, b, i));
}

/* o of the past tokens from the cache, of the call's heads W_O,h v_h, so that their mean over heads, weighted by A, is y. */
static void moei_attention_outputs(const moei_run *r) {
    size_t width = moei_attention_width(r->m), w = (size_t)r->m->attention.d_head, past = r->pass->past, h, i;
    for (h = 0; h < (size_t)r->m->attention.heads; h++) {
        moe_real *o = r->p->outputs + h * (past + r->n) * r->d_out;
        if (past > 0) memcpy(o, r->p->past_outputs + h * r->pass->most * r->d_out, past * r->d_out * sizeof(moe_real));
        o += past * r->d_out;
        moe_matmul(r->net->kernels, MOE_MATMUL_NT, MOE_TYPE_REAL, r->n, r->d_out, w, moei_head(r, r->p->v, h, past), width,
                   r->m->tensors[MOE_MODULE_OUTPUT] + h * w, width, o, r->d_out, 0);
        for (i = 0; i < r->n * r->d_out; i++) o[i] *= (moe_real)r->m->attention.heads;
        if (r->p->past_outputs != NULL) memcpy(r->p->past_outputs + (h * r->pass->most + past) * r->d_out, o, r->n * r->d_out * sizeof(moe_real));
    }
}

static moe_status moei_attention_forward(const moei_run *r) {
    size_t width = moei_attention_width(r->m), past = r->pass->past * width;
    size_t cells = (size_t)r->m->attention.heads * r->n * (r->pass->past + r->n);
    if (r->p->turns != NULL) moei_turns_fill(r, r->p->turns);
    moei_project(r, MOE_MODULE_QUERY, r->d_in, width, r->p->x, r->p->q);
    moei_project(r, MOE_MODULE_KEY, r->d_in, width, r->p->x, r->p->k + past);
    moei_project(r, MOE_MODULE_VALUE, r->d_in, width, r->p->x, r->p->v + past);
    moei_turn(r, MOEI_R(1.0), r->p->q);
    moei_turn(r, MOEI_R(1.0), r->p->k + past);
    if (r->p->weights != NULL) memset(r->p->weights, 0, cells * sizeof(moe_real));
    moei_attention_blocks(r, moei_block_forward);
    moei_project(r, MOE_MODULE_OUTPUT, width, r->d_out, r->p->mixed, r->p->y);
    if (r->p->outputs != NULL) moei_attention_outputs(r);
    return MOE_OK;
}

/* ---- modules that are layers ------------------------------------------------------------------------------------------------------------- */

/* The call without what is there for routers; the mask is too, for padding passes like any row. */
static moe_status moei_feed_forward_forward(const moei_run *r) {
    moe_call call;
    memset(&call, 0, sizeof call);
    call.n_tokens = r->n, call.x = r->p->x;
    call.parallel = r->pass->call.parallel;
    call.training = r->pass->call.training, call.keep = r->pass->call.keep;
    return moe_layer_forward(&r->m->layer, &call, r->p->y, r->p->work, r->p->work_size, &r->p->layer);
}

/* The experts that have a token after capacity, and their weights, for the next mixture. */
static void moei_mixture_previous(const moei_run *r, moe_call *call) {
    size_t at = moei_previous_mixture(r->net, r->i), width = r->p->n_previous, t, j;
    const moe_routing *before = &r->pass->modules[at].layer.routing;
    size_t first = before->first; /* where ranks decide together the routing is of all their tokens */
    int soft = before->plan.rows > 0;
    for (t = 0; t < r->n; t++)
        for (j = 0; j < width; j++) {
            size_t to = t * width + j, choice = (first + t) * before->max_choices + j;
            int kept = soft ? moei_is_real(call, t) : j < (size_t)before->n_choices[first + t] && before->kept[choice];
            r->p->previous_experts[to] = !kept ? -1 : soft ? (int32_t)j : before->choices[choice];
            r->p->previous_weights[to] = kept ? before->weights[(first + t) * before->n_experts + (size_t)r->p->previous_experts[to]] : MOEI_R(0.0);
        }
    call->previous_input = r->pass->modules[at].x;
    call->previous_experts = r->p->previous_experts;
    call->previous_weights = r->p->previous_weights;
    call->n_previous = width;
}

/* given and teacher of this layer: behind those of the mixtures before it. */
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

/* The arrays of the attention that this router reads; training fills their gradients, that of its output among those of what follows it. */
static void moei_mixture_attention(const moei_run *r, moe_call *call) {
    size_t at = moei_attention_read(r->net, r->i);
    const struct moe_module_pass *p = &r->pass->modules[at];
    if (at == r->i) return;
    call->attention_weights = p->weights, call->attention_outputs = p->outputs, call->attention_output = p->y;
    if (!call->training) return;
    call->d_attention_weights = p->d_weights, call->d_attention_outputs = p->d_outputs;
    call->d_attention_output = r->pass->modules[at + 1].d_x;
}

/* Decoding: what refining reads of earlier tokens. */
static void moei_mixture_past(const moei_run *r, moe_call *call) {
    if (r->pass->most == 0) return;
    call->decoding = 1;
    if (r->p->past_u == NULL) return;
    call->n_past = r->pass->past;
    call->past_u = r->p->past_u, call->past_gate = r->p->past_gate;
}

/* And of the call's tokens, later on. */
static void moei_mixture_remember(const moei_run *r) {
    const moe_routing *routing = &r->p->layer.routing;
    size_t experts = routing->n_experts;
    if (r->p->past_u == NULL || r->n == 0) return;
    memcpy(r->p->past_u + r->pass->past * r->d_in, routing->u, r->n * r->d_in * sizeof(moe_real));
    memcpy(r->p->past_gate + r->pass->past * experts, routing->gate, r->n * experts * sizeof(moe_real));
}

static moe_status moei_mixture_forward(const moei_run *r) {
    moe_call call = r->pass->call;
    moe_status status;
    call.x = r->p->x;
    moei_mixture_own(r, &call);
    moei_mixture_attention(r, &call);
    moei_mixture_past(r, &call);
    if (r->p->n_previous > 0) moei_mixture_previous(r, &call);
    status = moe_layer_forward(&r->m->layer, &call, r->p->y, r->p->work, r->p->work_size, &r->p->layer);
    if (status == MOE_OK) moei_mixture_remember(r);
    return status;
}

static moe_status moei_residual_forward(const moei_run *r) {
    const moe_real *earlier = r->pass->modules[r->i - (size_t)r->m->span].x;
    size_t i;
    for (i = 0; i < r->n * r->d_in; i++) r->p->y[i] = r->p->x[i] + earlier[i];
    return MOE_OK;
}

#ifndef MOE_NO_TRAIN

static moe_status moei_linear_backward(const moei_run *r) {
    moei_affine_backward(r->net->kernels, r->n, r->d_out, r->d_in, r->p->x, r->m->tensors[MOE_MODULE_WEIGHT], r->dy, r->dx,
                         r->m->gradients[MOE_MODULE_WEIGHT], r->m->gradients[MOE_MODULE_BIAS]);
    return MOE_OK;
}

static moe_status moei_activation_backward(const moei_run *r) {
    moe_real *d_act = moei_run_room(r).d_act;
    if (r->dx == NULL) return MOE_OK;
    moe_activate_backward(r->net->kernels, r->m->act, r->n * r->d_in, r->p->x, r->dy, d_act);
    moe_axpy(r->net->kernels, r->n * r->d_in, MOEI_R(1.0), d_act, r->dx);
    return MOE_OK;
}

static moe_status moei_layer_norm_backward(const moei_run *r) {
    size_t t, at;
    for (t = 0; t < r->n; t++) {
        at = t * r->d_in;
        moe_layer_norm_backward(r->d_in, r->p->x + at, r->m->tensors[MOE_MODULE_WEIGHT], r->p->mean[t], r->p->rstd[t], r->dy + at,
                                r->dx != NULL ? r->dx + at : NULL, r->m->gradients[MOE_MODULE_WEIGHT], r->m->gradients[MOE_MODULE_BIAS]);
    }
    return MOE_OK;
}

static moe_status moei_rms_norm_backward(const moei_run *r) {
    size_t t, at;
    for (t = 0; t < r->n; t++) {
        at = t * r->d_in;
        moei_rms_norm_row_backward(r->net->kernels, r->d_in, r->p->x + at, r->m->tensors[MOE_MODULE_WEIGHT], r->p->rstd[t], r->dy + at,
                                   r->dx != NULL ? r->dx + at : NULL, r->m->gradients[MOE_MODULE_WEIGHT]);
    }
    return MOE_OK;
}

static moe_status moei_embedding_backward(const moei_run *r) {
    size_t t;
    for (t = 0; t < r->n; t++)
        moe_axpy(r->net->kernels, r->d_out, MOEI_R(1.0), r->dy + t * r->d_out,
                 r->m->gradients[MOE_MODULE_WEIGHT] + (size_t)r->pass->call.token_ids[t] * r->d_out);
    return MOE_OK;
}

static moe_status moei_positions_backward(const moei_run *r) {
    size_t i, from, to;
    if (r->dx != NULL) moe_axpy(r->net->kernels, r->n * r->d_in, MOEI_R(1.0), r->dy, r->dx);
    for (i = 0; i < moei_sequence_count(&r->pass->call); i++) {
        moei_sequence(&r->pass->call, i, &from, &to);
        moe_axpy(r->net->kernels, (to - from) * r->d_in, MOEI_R(1.0), r->dy + from * r->d_in, r->m->gradients[MOE_MODULE_WEIGHT]);
    }
    return MOE_OK;
}

static moe_status moei_dropout_backward(const moei_run *r) {
    moe_real factor = MOEI_R(1.0) / (MOEI_R(1.0) - r->m->rate);
    size_t i;
    for (i = 0; r->dx != NULL && i < r->n * r->d_in; i++)
        if (r->p->stays[i]) r->dx[i] += r->dy[i] * factor;
    return MOE_OK;
}

/* The way back of moei_project: d_in += d_out W (d_in may be NULL), dW += d_out^T in. */
static void moei_project_backward(const moei_run *r, int place, size_t i, size_t o, const moe_real *in, const moe_real *d_out, moe_real *d_in) {
    size_t run, length;
    for (run = 0; (length = moei_run_of_real(r, &run)) > 0; run += length)
        moei_affine_backward(r->net->kernels, length, o, i, in + run * i, r->m->tensors[place], d_out + run * o, d_in != NULL ? d_in + run * i : NULL,
                             r->m->gradients[place], NULL);
}

/* What routers read of o: v and the output projection. */
static void moei_attention_outputs_backward(const moei_run *r, moe_real *d_v) {
    const moe_kernels *k = r->net->kernels;
    size_t width = moei_attention_width(r->m), w = (size_t)r->m->attention.d_head, h, i;
    for (h = 0; h < (size_t)r->m->attention.heads; h++) {
        moe_real *d_o = r->p->d_outputs + h * r->n * r->d_out;
        for (i = 0; i < r->n * r->d_out; i++) d_o[i] *= (moe_real)r->m->attention.heads;
        moe_matmul(k, MOE_MATMUL_NN, MOE_TYPE_REAL, r->n, w, r->d_out, d_o, r->d_out, r->m->tensors[MOE_MODULE_OUTPUT] + h * w, width,
                   moei_head(r, d_v, h, 0), width, 1);
        moe_matmul(k, MOE_MATMUL_TN, MOE_TYPE_REAL, r->d_out, w, r->n, d_o, r->d_out, moei_head(r, r->p->v, h, 0), width,
                   r->m->gradients[MOE_MODULE_OUTPUT] + h * w, width, 1);
    }
}

/* With d_a = d_mixed v^T, and what routers add: d_v += A^T d_mixed,  d_score = A d_a - A sum A d_a,  d_q = d_score k,  d_k += d_score^T q, where d_q and
   d_k lack the factor of scores, 1 / sqrt(w). */
static void moei_block_backward(const moei_run *r, const moei_queries *b) {
    const moe_kernels *k = r->net->kernels;
    size_t width = moei_attention_width(r->m), w = (size_t)r->m->attention.d_head, i;
    moei_room room = moei_run_room(r);
    moe_real *d_mixed = moei_head(r, room.d_mixed, b->head, b->at);
    moei_block_weights(r, b, room.a);
    moe_matmul(k, MOE_MATMUL_NT, MOE_TYPE_REAL, b->rows, b->span, w, d_mixed, width, moei_head(r, r->p->v, b->head, b->from), width, room.d_a, b->span, 0);
    moe_matmul(k, MOE_MATMUL_TN, MOE_TYPE_REAL, b->span, w, b->rows, room.a, b->span, d_mixed, width, moei_head(r, room.d_v, b->head, b->from), width, 1);
    for (i = 0; i < b->rows; i++) {
        const moe_real *a = room.a + i * b->span;
        moe_real *d_a = room.d_a + i * b->span, along;
        if (r->p->d_weights != NULL) moe_axpy(k, b->span, MOEI_R(1.0), r->p->d_weights + moei_block_cell(r, b, i), d_a);
        along = moe_dot(k, b->span, a, d_a);
        moe_multiply(k, b->span, a, d_a, d_a);
        moe_axpy(k, b->span, -along, a, d_a);
    }
    moe_matmul(k, MOE_MATMUL_NN, MOE_TYPE_REAL, b->rows, w, b->span, room.d_a, b->span, moei_head(r, r->p->k, b->head, b->from), width,
               moei_head(r, room.d_q, b->head, b->at), width, 0);
    moe_matmul(k, MOE_MATMUL_TN, MOE_TYPE_REAL, b->span, w, b->rows, room.d_a, b->span, moei_head(r, r->p->q, b->head, b->at), width,
               moei_head(r, room.d_k, b->head, b->from), width, 1);
}

static moe_status moei_attention_backward(const moei_run *r) {
    size_t width = moei_attention_width(r->m), bytes = r->n * width * sizeof(moe_real), i;
    moe_real scale = MOEI_R(1.0) / MOEI_F(sqrt)((moe_real)r->m->attention.d_head);
    moei_room room = moei_run_room(r);
    memset(room.d_mixed, 0, bytes);
    memset(room.d_k, 0, bytes);
    memset(room.d_v, 0, bytes);
    moei_project_backward(r, MOE_MODULE_OUTPUT, width, r->d_out, r->p->mixed, r->dy, room.d_mixed);
    if (r->p->d_outputs != NULL) moei_attention_outputs_backward(r, room.d_v);
    moei_attention_blocks(r, moei_block_backward);
    for (i = 0; i < r->n * width; i++) room.d_q[i] *= scale, room.d_k[i] *= scale;
    moei_turn(r, MOEI_R(-1.0), room.d_q);
    moei_turn(r, MOEI_R(-1.0), room.d_k);
    moei_project_backward(r, MOE_MODULE_QUERY, r->d_in, width, r->p->x, room.d_q, r->dx);
    moei_project_backward(r, MOE_MODULE_KEY, r->d_in, width, r->p->x, room.d_k, r->dx);
    moei_project_backward(r, MOE_MODULE_VALUE, r->d_in, width, r->p->x, room.d_v, r->dx);
    return MOE_OK;
}

static moe_status moei_feed_forward_backward(const moei_run *r) { return moe_layer_backward(&r->m->layer, r->dy, r->dx, NULL, &r->p->layer); }

static moe_status moei_mixture_backward(const moei_run *r) {
    if (r->dy == NULL) return moe_layer_backward_experts(&r->m->layer, r->d_outputs, r->d_weights, r->dx, NULL, &r->p->layer);
    return moe_layer_backward(&r->m->layer, r->dy, r->dx, NULL, &r->p->layer);
}

/* Modules run backward in turn, so the gradient of the earlier input is complete before that module needs it. */
static moe_status moei_residual_backward(const moei_run *r) {
    size_t from = r->i - (size_t)r->m->span;
    moe_real *earlier = from > 0 ? r->pass->modules[from].d_x : r->pass->d_x;
    if (r->dx != NULL) moe_axpy(r->net->kernels, r->n * r->d_in, MOEI_R(1.0), r->dy, r->dx);
    if (earlier != NULL) moe_axpy(r->net->kernels, r->n * r->d_in, MOEI_R(1.0), r->dy, earlier);
    return MOE_OK;
}

#endif

typedef struct moei_module_kind {
    moe_status (*forward)(const moei_run *r);
    moe_status (*backward)(const moei_run *r);
} moei_module_kind;

static const moei_module_kind moei_module_kinds[MOE_MODULE_COUNT] = {
    /* linear       */ {MOEI_KEEP(MODULES, MOE_MODULE_LINEAR, moei_linear_forward), MOEI_BACKWARD(moei_linear_backward)},
    /* activation   */ {MOEI_KEEP(MODULES, MOE_MODULE_ACTIVATION, moei_activation_forward), MOEI_BACKWARD(moei_activation_backward)},
    /* layer_norm   */ {MOEI_KEEP(MODULES, MOE_MODULE_LAYER_NORM, moei_layer_norm_forward), MOEI_BACKWARD(moei_layer_norm_backward)},
    /* mixture      */ {MOEI_KEEP(MODULES, MOE_MODULE_MIXTURE, moei_mixture_forward), MOEI_BACKWARD(moei_mixture_backward)},
    /* residual     */ {MOEI_KEEP(MODULES, MOE_MODULE_RESIDUAL, moei_residual_forward), MOEI_BACKWARD(moei_residual_backward)},
    /* embedding    */ {MOEI_KEEP(MODULES, MOE_MODULE_EMBEDDING, moei_embedding_forward), MOEI_BACKWARD(moei_embedding_backward)},
    /* positions    */ {MOEI_KEEP(MODULES, MOE_MODULE_POSITIONS, moei_positions_forward), MOEI_BACKWARD(moei_positions_backward)},
    /* attention    */ {MOEI_KEEP(MODULES, MOE_MODULE_ATTENTION, moei_attention_forward), MOEI_BACKWARD(moei_attention_backward)},
    /* rms_norm     */ {MOEI_KEEP(MODULES, MOE_MODULE_RMS_NORM, moei_rms_norm_forward), MOEI_BACKWARD(moei_rms_norm_backward)},
    /* dropout      */ {MOEI_KEEP(MODULES, MOE_MODULE_DROPOUT, moei_dropout_forward), MOEI_BACKWARD(moei_dropout_backward)},
    /* feed_forward */ {MOEI_KEEP(MODULES, MOE_MODULE_FEED_FORWARD, moei_feed_forward_forward), MOEI_BACKWARD(moei_feed_forward_backward)},
    /* tied         */ {MOEI_KEEP(MODULES, MOE_MODULE_TIED, moei_linear_forward), MOEI_BACKWARD(moei_linear_backward)}};

/* Whether the sequences are what moe_call says. */
static int moei_sequences_fit(const moe_call *call) {
    size_t i;
    if (call->sequences == NULL) return 1;
    if (call->n_sequences < 1 || call->sequences[0] != 0) return 0;
    for (i = 0; i < call->n_sequences; i++)
        if (call->sequences[i + 1] < call->sequences[i]) return 0;
    return (size_t)call->sequences[call->n_sequences] == call->n_tokens;
}

/* Whether each of the n token ids has a row in the embedding. */
static int moei_ids_fit(const moe_module *embedding, size_t n, const int32_t *ids) {
    size_t t;
    for (t = 0; t < n; t++)
        if (ids == NULL || ids[t] < 0 || ids[t] >= embedding->n_rows) return 0;
    return 1;
}

/* Whether every token after `past` others has a row in positions. */
static int moei_places_fit(const moe_module *positions, const moe_call *call, size_t past) {
    size_t i, from, to;
    for (i = 0; i < moei_sequence_count(call); i++) {
        moei_sequence(call, i, &from, &to);
        if (to > from && past + (to - from) > (size_t)positions->n_rows) return 0;
    }
    return 1;
}

/* Whether the caller's arrays of attention have a reader, where the net has some of its own. */
static int moei_supplied_fit(const moe_net *net, const moe_call *call) {
    size_t i, own = 0, others = 0;
    for (i = 0; i < net->n_modules; i++) {
        if (net->modules[i].kind != MOE_MODULE_MIXTURE || net->modules[i].layer.config.router.refine != MOE_REFINE_ATTENTION) continue;
        if (moei_attention_read(net, i) < i) own++;
        else others++;
    }
    return own == 0 || others > 0 || (call->attention_weights == NULL && call->attention_outputs == NULL && call->attention_output == NULL);
}

/* What a net's modules other than mixtures ask of a call, before anything is computed. */
static moe_status moei_net_call_check(const moe_net *net, const moe_call *call, size_t past) {
    size_t i;
    if (!MOEI_FITS_INT32(call->n_tokens)) return MOE_ERR_OVERFLOW;
    if (net->d_in > 0 && call->n_tokens > 0 && call->x == NULL) return MOE_ERR_ARGUMENT;
    if (call->router_x != NULL || call->nodes != NULL || call->n_past > 0 || !moei_sequences_fit(call) || !moei_supplied_fit(net, call))
        return MOE_ERR_ARGUMENT;
    for (i = 0; i < net->n_modules; i++) {
        const moe_module *m = &net->modules[i];
        if (!MOEI_KEPT(MODULES, m->kind) || (m->kind == MOE_MODULE_ACTIVATION && !MOEI_KEPT(ACTS, m->act))) return MOE_ERR_UNSUPPORTED;
        if (m->kind == MOE_MODULE_EMBEDDING && !moei_ids_fit(m, call->n_tokens, call->token_ids)) return MOE_ERR_ARGUMENT;
        if (m->kind == MOE_MODULE_POSITIONS && !moei_places_fit(m, call, past)) return MOE_ERR_ARGUMENT;
        if (m->kind == MOE_MODULE_DROPOUT && call->training && m->rate > MOEI_R(0.0) && call->rng == NULL) return MOE_ERR_ARGUMENT;
    }
    return MOE_OK;
}

/* Runs all modules of a pass that is laid out. What can fail on one rank alone is a feed_forward: the ranks hear of it before they meet in the next
   mixture, or at the end. */
static moe_status moei_net_run(const moe_net *net, const moe_call *call, const moei_tokens *share, moe_net_pass *p) {
    moe_status status = MOE_OK;
    size_t i;
    int alone = 0;
    p->n_tokens = call->n_tokens;
    p->training = call->training;
    p->call = *call;
    p->first = share->first, p->total = share->total;
    for (i = 0; i < net->n_modules; i++) {
        moei_run r = moei_run_begin(net, p, i);
        if (alone && r.m->kind == MOE_MODULE_MIXTURE) status = moei_ranks_vote(net->transport, status, NULL, NULL), alone = 0;
        if (status != MOE_OK && !alone) return status;
        r.p->x = i > 0 ? p->modules[i - 1].y : net->d_in > 0 && call->x != NULL ? call->x : r.p->y; /* there is nothing to read: any address will do */
        if (status == MOE_OK) status = moei_module_kinds[net->modules[i].kind].forward(&r);
        if (net->transport != NULL && r.m->kind == MOE_MODULE_FEED_FORWARD) alone = 1;
    }
    p->y = p->modules[net->n_modules - 1].y;
    return alone ? moei_ranks_vote(net->transport, status, NULL, NULL) : status;
}

/* A pass whose call is checked, laid out in work. */
static moe_status moei_net_pass(const moe_net *net, const moe_call *call, const moei_tokens *share, void *work, moe_net_pass *pass) {
    moei_layout l = moei_layout_begin(work);
    moei_extent e = moei_extent_of(share->most, moei_keeps(call));
    moe_net_pass p;
    moe_status status = moei_net_layout(net, &e, &l, &p);
    if (status == MOE_OK) status = moei_net_run(net, call, share, &p);
    if (status == MOE_OK) *pass = p;
    return status;
}

/* Whether work is large enough for a pass. */
static moe_status moei_net_fits(const moe_net *net, const moe_call *call, const moei_tokens *share, size_t work_size) {
    moei_extent e = moei_extent_of(share->most, moei_keeps(call));
    size_t size;
    moe_status status = moei_net_size(net, &e, &size);
    return status != MOE_OK ? status : size > work_size ? MOE_ERR_SPACE : MOE_OK;
}

/* What can be said of a call before others' tokens are known. */
static moe_status moei_net_forward_check(const moe_net *net, const moe_call *call, const void *work, const moe_net_pass *pass) {
    if (call == NULL || work == NULL || pass == NULL) return MOE_ERR_ARGUMENT;
    if (!net->built) return MOE_ERR_STATE;
    return moei_net_call_check(net, call, 0);
}

/* All ranks or none train. They draw the same random numbers. */
static moe_status moei_net_meet(const moe_net *net, const moe_call *call, void *work, size_t work_size, moe_status status, moei_tokens *share) {
    const moe_transport *t = net->transport;
    const uint64_t *told;
    uint64_t *room, mine[MOEI_NET_WORDS];
    moei_layout l = moei_layout_begin(work);
    int training = status == MOE_OK && call->training, r;
    room = moei_net_room(net, &l);
    if (status == MOE_OK && call->batch != NULL) status = MOE_ERR_ARGUMENT;
    if (status == MOE_OK && (l.overflow || l.used > work_size)) status = MOE_ERR_SPACE;
    status = moei_ranks_vote(t, status, &training, NULL);
    if (status == MOE_OK && training != 0 && training != t->n_ranks) status = MOE_ERR_ARGUMENT; /* on all ranks */
    if (status != MOE_OK) return status;
    mine[1] = call->n_tokens;
    mine[2] = call->training && call->rng != NULL ? call->rng->state : 0;
    status = moei_ranks_tell(t, status, MOEI_NET_WORDS, mine, room, &told, NULL);
    for (r = 0; r < t->n_ranks && status == MOE_OK; r++)
        if (told[r * MOEI_NET_WORDS + 2] != mine[2]) status = MOE_ERR_ARGUMENT;
    if (status == MOE_OK) status = moei_tokens_of(t, told + 1, MOEI_NET_WORDS, share);
    if (status != MOE_OK) return status;
    return moei_ranks_vote(t, moei_net_fits(net, call, share, work_size), NULL, NULL);
}

moe_status moe_net_forward(const moe_net *net, const moe_call *call, void *work, size_t work_size, moe_net_pass *pass) {
    moei_tokens share;
    moe_status status;
    if (net == NULL) return MOE_ERR_ARGUMENT;
    status = moei_net_forward_check(net, call, work, pass);
    if (net->transport != NULL) status = moei_net_meet(net, call, work, work_size, status, &share);
    else if (status == MOE_OK) {
        share = moei_tokens_alone(call->n_tokens);
        status = moei_net_fits(net, call, &share, work_size);
        if (call->batch != NULL) share.first = call->batch->first, share.total = call->batch->total;
    }
    return status == MOE_OK ? moei_net_pass(net, call, &share, work, pass) : status;
}

moe_status moe_net_check_decoding(const moe_net *net, moe_error *error) {
    moe_error why;
    size_t i;
    if (net == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "net must not be NULL");
    if (net->transport != NULL) return moei_error(error, MOE_ERR_UNSUPPORTED, "a net on several ranks cannot decode: load its file without transport");
    for (i = 0; i < net->n_modules; i++) {
        const moe_module *m = &net->modules[i];
        moe_status status = MOE_OK;
        if (m->kind == MOE_MODULE_ATTENTION && m->attention.full)
            return moei_error(error, MOE_ERR_UNSUPPORTED, "module %z (attention): full = 1 sees later tokens and cannot decode token by token; full = 0 decodes", i);
        if (m->kind == MOE_MODULE_MIXTURE) status = moe_router_check_decoding(&m->layer.config.router, &why);
        if (status != MOE_OK) return moei_error(error, status, "module %z (mixture): %s", i, why.message);
    }
    return MOE_OK;
}

/* ---- decoding ------------------------------------------------------------------------------------------------------------------- */

/* Tells the modules of a pass where their part of a cache for most tokens lies; modules NULL counts the bytes. */
static void moei_cache_layout(const moe_net *net, size_t most, moei_layout *l, struct moe_module_pass *modules) {
    struct moe_module_pass uncounted;
    size_t i, rows = 0;
    for (i = 0; i < net->n_modules; i++) {
        const moe_module *m = &net->modules[i];
        struct moe_module_pass *p = modules != NULL ? &modules[i] : &uncounted;
        if (m->kind == MOE_MODULE_ATTENTION) {
            p->k = moei_take_reals(l, most, moei_attention_width(m));
            p->v = moei_take_reals(l, most, moei_attention_width(m));
            if (!moei_mul(most, (size_t)m->attention.heads, &rows)) l->overflow = 1;
            if (moei_is_read(net, i)) p->past_outputs = moei_take_reals(l, rows, (size_t)m->d_out);
        }
        if (!moei_refines(m)) continue;
        p->past_u = moei_take_reals(l, most, (size_t)m->d_in);
        p->past_gate = moei_take_reals(l, most, (size_t)m->layer.config.router.n_experts);
    }
}

moe_status moe_net_cache_size(const moe_net *net, size_t most, size_t *bytes) {
    moei_layout l = moei_layout_begin(NULL);
    if (net == NULL || bytes == NULL) return MOE_ERR_ARGUMENT;
    if (!net->built) return MOE_ERR_STATE;
    if (!MOEI_FITS_INT32(most)) return MOE_ERR_OVERFLOW;
    moei_cache_layout(net, most, &l, NULL);
    if (l.overflow) return MOE_ERR_OVERFLOW;
    *bytes = l.used;
    return MOE_OK;
}

moe_status moe_net_cache_init(moe_cache *cache, const moe_net *net, size_t most, void *memory, size_t size, moe_error *error) {
    size_t wanted;
    moe_status status;
    if (cache == NULL || net == NULL || (memory == NULL && size > 0)) return moei_error(error, MOE_ERR_ARGUMENT, "cache, net and memory must not be NULL");
    status = moe_net_cache_size(net, most, &wanted);
    if (status != MOE_OK) return moei_error(error, status, "a cache for %z tokens: %s", most, moe_status_text(status));
    status = moe_net_check_decoding(net, error);
    if (status != MOE_OK) return status;
    if (size < wanted) return moei_error(error, MOE_ERR_SPACE, "size = %z: a cache for %z tokens takes %z bytes", size, most, wanted);
    cache->net = net;
    cache->n_tokens = 0;
    cache->most = most;
    cache->memory = memory;
    cache->size = size;
    return MOE_OK;
}

moe_status moe_net_decode_work_size(const moe_net *net, size_t most, size_t n_tokens, size_t *bytes) {
    moei_extent e = moei_extent_decoding(n_tokens < most ? n_tokens : most, most);
    if (net == NULL || bytes == NULL) return MOE_ERR_ARGUMENT;
    return net->built ? moei_net_size(net, &e, bytes) : MOE_ERR_STATE;
}

/* What moe_net_decode asks of a call and the cache. */
static moe_status moei_decode_check(const moe_net *net, const moe_cache *cache, const moe_call *call) {
    if (!net->built) return MOE_ERR_STATE;
    if (net->transport != NULL) return MOE_ERR_UNSUPPORTED;
    if (cache->net != net || cache->n_tokens > cache->most || call->training || call->keep || call->sequences != NULL || call->mask != NULL ||
        call->past_u != NULL || call->past_gate != NULL)
        return MOE_ERR_ARGUMENT;
    if (call->n_tokens > cache->most - cache->n_tokens) return MOE_ERR_SPACE;
    return moei_net_call_check(net, call, cache->n_tokens);
}

moe_status moe_net_decode(const moe_net *net, moe_cache *cache, const moe_call *call, void *work, size_t work_size, moe_net_pass *pass) {
    moei_layout l = moei_layout_begin(work), of_cache;
    moei_extent e;
    moei_tokens share;
    moe_net_pass p;
    moe_status status;
    size_t size;
    if (net == NULL || cache == NULL || call == NULL || work == NULL || pass == NULL) return MOE_ERR_ARGUMENT;
    if ((status = moei_decode_check(net, cache, call)) != MOE_OK) return status;
    e = moei_extent_decoding(call->n_tokens, cache->most);
    if ((status = moei_net_size(net, &e, &size)) != MOE_OK) return status;
    if (size > work_size) return MOE_ERR_SPACE;
    if ((status = moei_net_layout(net, &e, &l, &p)) != MOE_OK) return status;
    of_cache = moei_layout_begin(cache->memory);
    moei_cache_layout(net, cache->most, &of_cache, p.modules);
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
    if (net == NULL || pass == NULL || pass->modules == NULL || i >= net->n_modules || net->modules[i].kind != MOE_MODULE_MIXTURE)
        return NULL;
    return &pass->modules[i].layer.routing;
}

/* ==== float models: a net as constants, one token at a time ====================================================================

   A net's struct can be a constant: kernels NULL mean plain C, and nothing is written to it in inference. The printer writes configurations by the tables of
   their fields, in the order of their places, and refuses a table that leaves a gap. */

/* What a model of a net keeps in scratch memory. Nets of sequences begin with the number of tokens so far and their cache. */
typedef struct moei_float_room {
    unsigned char *place; /* size_t */
    void *cache, *work;   /* and what moe_net_forward or moe_net_decode take */
    size_t cache_size, work_size;
    size_t state_size;    /* bytes from the start of scratch that stay from call to call */
} moei_float_room;

/* Whether what the net says to a token depends on the tokens before it. */
MOEI_TOOL int moei_net_is_sequence(const moe_net *net) {
    size_t i;
    for (i = 0; i < net->n_modules; i++)
        if (net->modules[i].kind == MOE_MODULE_ATTENTION || net->modules[i].kind == MOE_MODULE_POSITIONS || moei_refines(&net->modules[i])) return 1;
    return 0;
}

/* Lays scratch memory out for sequences of up to length tokens, 0 for a net that is none; scratch NULL counts bytes into l->used. */
MOEI_TOOL moe_status moei_float_layout(const moe_net *net, size_t length, moei_layout *l, moei_float_room *room) {
    moe_status status = MOE_OK;
    memset(room, 0, sizeof *room);
    if (length > 0) {
        room->place = (unsigned char *)moei_take(l, 1, sizeof(size_t));
        status = moe_net_cache_size(net, length, &room->cache_size);
        if (status != MOE_OK) return status;
        room->cache = moei_take(l, room->cache_size, 1);
        room->state_size = l->used;
        status = moe_net_decode_work_size(net, length, 1, &room->work_size);
    } else status = moe_net_work_size(net, 1, 0, &room->work_size);
    if (status != MOE_OK) return status;
    room->work = moei_take(l, room->work_size, 1);
    return l->overflow ? MOE_ERR_OVERFLOW : MOE_OK;
}

/* Bytes of scratch memory that moei_float_infer takes, and how many at its start stay from call to call (may be NULL). */
MOEI_TOOL moe_status moei_float_size(const moe_net *net, size_t length, size_t *scratch_size, size_t *state_size) {
    moei_layout l = moei_layout_begin(NULL);
    moei_float_room room;
    moe_status status = moei_float_layout(net, length, &l, &room);
    if (status == MOE_OK) *scratch_size = l.used;
    if (status == MOE_OK && state_size != NULL) *state_size = room.state_size;
    return status;
}

/* One token through a net: input [d_in], or with d_in = 0 one id, int32_t. The bits are those of moe_net_forward, or moe_net_decode where length > 0.
   MOE_ERR_SPACE: scratch is too small; MOE_ERR_STATE: the sequence is length long; else as those. After an error the sequence is where it was. */
MOEI_TOOL moe_status moei_float_infer(const moe_net *net, size_t length, const void *input, moe_real *output, void *scratch, size_t scratch_size) {
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
    if (net->d_in > 0) call.x = (const moe_real *)input;
    else call.token_ids = (const int32_t *)input;
    if (length > 0) {
        memcpy(&cache.n_tokens, room.place, sizeof cache.n_tokens);
        if (cache.n_tokens >= length) return MOE_ERR_STATE;
        cache.net = net, cache.most = length, cache.memory = room.cache, cache.size = room.cache_size;
        status = moe_net_decode(net, &cache, &call, room.work, room.work_size, &pass);
        if (status == MOE_OK) memcpy(room.place, &cache.n_tokens, sizeof cache.n_tokens);
    } else status = moe_net_forward(net, &call, room.work, room.work_size, &pass);
    if (status == MOE_OK) memcpy(output, pass.y, (size_t)net->d_out * sizeof(moe_real));
    return status;
}

/* The routing of mixture number `mixture` in the last call of moei_float_infer with this scratch memory, or NULL. */
MOEI_TOOL const moe_routing *moei_float_routing(const moe_net *net, size_t length, size_t mixture, void *scratch) {
    moei_layout l = moei_layout_begin(scratch), of_work;
    moei_float_room room;
    const struct moe_module_pass *modules;
    size_t i;
    if (moei_float_layout(net, length, &l, &room) != MOE_OK) return NULL;
    of_work = moei_layout_begin(room.work); /* a pass begins with its modules, see moei_net_layout */
    modules = (const struct moe_module_pass *)moei_take(&of_work, net->n_modules, sizeof *modules);
    for (i = 0; i < net->n_modules; i++)
        if (net->modules[i].kind == MOE_MODULE_MIXTURE && mixture-- == 0) return &modules[i].layer.routing;
    return NULL;
}

#ifndef MOE_NO_TRAIN

/* Why a mixture cannot be part of a constant net that gets one token and nothing else; NULL: it can. */
static const char *moei_float_obstacle(const moe_net *net, size_t i) {
    const moe_router_config *c = &net->modules[i].layer.config.router;
    int switches = c->switch_at > 0;
    if (c->score == MOE_SCORE_CUSTOM) return "score = custom: a model cannot hold functions of the caller";
    if (c->select == MOE_SELECT_CUSTOM || (switches && c->switch_from == MOE_SELECT_CUSTOM))
        return "select = custom: a model cannot hold functions of the caller";
    if (c->select == MOE_SELECT_GIVEN) return "select = given: a model gets no recorded choices";
    if (net->d_in > 0 && (c->select == MOE_SELECT_HASH || (switches && c->switch_from == MOE_SELECT_HASH)))
        return "select = hash: a model with d_in > 0 gets no token ids";
    if (c->refine == MOE_REFINE_ATTENTION && moei_attention_read(net, i) == i) return "refine = attention: there is no attention before it in the net";
    return NULL;
}

/* The values of tensor `place` of module i; NULL: not set. */
static const moe_real *moei_float_values(const moe_net *net, size_t i, int place) {
    const moe_module *m = &net->modules[i];
    return moei_is_layer(m) ? m->layer.tensors[place] : m->tensors[place];
}

/* Whether a net can be a float model. */
static moe_status moei_float_check(const moe_net *net, moe_error *error) {
    moe_slot slot;
    size_t i, j;
    int place;
    if (MOE_REAL_IS_DOUBLE) return moei_error(error, MOE_ERR_UNSUPPORTED, "MOE_REAL is double: models are float");
    if (!net->built) return moei_error(error, MOE_ERR_STATE, "the net is not built");
    if (moe_net_check_decoding(net, error) != MOE_OK) return MOE_ERR_UNSUPPORTED;
    for (i = 0; i < net->n_modules; i++) {
        const char *obstacle = net->modules[i].kind == MOE_MODULE_MIXTURE ? moei_float_obstacle(net, i) : NULL;
        if (obstacle != NULL) return moei_error(error, MOE_ERR_UNSUPPORTED, "module %z (mixture): %s", i, obstacle);
        for (place = 0; place < MOE_LAYER_SLOTS; place++) {
            const moe_real *values;
            if (moei_module_slot(net, i, place, &slot) != MOE_OK) continue;
            values = moei_float_values(net, i, place);
            if (values == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "module %z: tensor %s is not set", i, slot.name);
            for (j = 0; j < slot.count; j++)
                if (!moe_is_finite(values[j])) return moei_error(error, MOE_ERR_NONFINITE, "module %z: tensor %s holds %g", i, slot.name, (double)values[j]);
        }
    }
    return MOE_OK;
}

/* A printer of constants: a line at a time. */
typedef struct moei_lines {
    moe_stream *out;
    moe_status status;
    const char *name; /* of the net: the names of its parts begin with it */
    moei_text line;
    char room[200];
} moei_lines;

static void moei_line_begin(moei_lines *p, moe_stream *out, const char *name) {
    p->out = out, p->status = MOE_OK, p->name = name;
    p->line.out = p->room, p->line.room = sizeof p->room, p->line.length = 0;
}

static void moei_line_end(moei_lines *p) {
    moei_put(&p->line, "\n", 1);
    if (p->status == MOE_OK) p->status = p->out->write(p->out->ctx, p->line.out, p->line.length);
    p->line.length = 0;
}

/* Pieces of up to 63 characters; a line that has grown long enough ends behind one. Names are pieces of their own and longer: see moei_line_name. */
static void moei_line(moei_lines *p, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    moei_put_format(&p->line, format, arguments);
    va_end(arguments);
    if (p->line.length > 110) moei_line_end(p);
}

/* The name of an array; it may have any length. */
static void moei_line_name(moei_lines *p, const char *part, size_t module) {
    char number[24];
    moei_text t;
    const char *pieces[4];
    int i;
    t.out = number, t.room = sizeof number, t.length = 0;
    moei_put_unsigned(&t, module);
    pieces[0] = p->name, pieces[1] = "_", pieces[2] = number, pieces[3] = part;
    if (p->line.length > 0 && p->status == MOE_OK) p->status = p->out->write(p->out->ctx, p->line.out, p->line.length);
    p->line.length = 0;
    for (i = 0; i < (part != NULL ? 4 : 1); i++) {
        const char *s = pieces[i];
        if (i == 3 && p->status == MOE_OK) p->status = p->out->write(p->out->ctx, "_", 1);
        for (; *s != '\0' && p->status == MOE_OK; s++) p->status = p->out->write(p->out->ctx, *s == '.' ? "_" : s, 1);
    }
}

/* 9 digits tell all floats apart. */
static void moei_line_real(moei_lines *p, moe_real value, const char *behind) {
    char digits[40];
    moei_text t;
    size_t i;
    int whole = 1;
    t.out = digits, t.room = sizeof digits, t.length = 0;
    if (moei_real_bits(value) == MOEI_SIGN_BIT) moei_put(&t, "-0", 2);
    else moei_put_digits(&t, (double)value, 9);
    for (i = 0; i < t.length; i++) whole = whole && digits[i] != '.' && digits[i] != 'e';
    moei_line(p, "%s%sf%s", digits, whole ? "." : "", behind);
}

static void moei_line_array(moei_lines *p, const char *part, size_t module, size_t count, const moe_real *values) {
    size_t i;
    moei_line(p, "static const float ");
    moei_line_name(p, part, module);
    moei_line(p, "[%z] MOE_FLASH = {", count);
    moei_line_end(p);
    for (i = 0; i < count; i++) moei_line_real(p, values[i], i + 1 < count ? "," : "};");
    moei_line_end(p);
}

static size_t moei_field_size(const moe_field *field) { return field->kind == MOE_FIELD_REAL ? sizeof(moe_real) : sizeof(int); }

/* The members of config from byte `from` to `to`, one after another: the row of a table that begins where the last one ended. */
static void moei_line_fields(moei_lines *p, const moe_field *fields, const void *config, size_t from, size_t to) {
    while (from < to) {
        const moe_field *field = fields;
        const unsigned char *at = (const unsigned char *)config + from;
        int whole;
        moe_real real;
        while (field->name != NULL && field->offset != from) field++;
        if (field->name == NULL) {
            if (p->status == MOE_OK) p->status = MOE_ERR_STATE; /* a member without a row: the test of all presets finds it */
            return;
        }
        from += moei_field_size(field);
        if (field->kind == MOE_FIELD_REAL) memcpy(&real, at, sizeof real), moei_line_real(p, real, from < to ? ", " : "");
        else memcpy(&whole, at, sizeof whole), moei_line(p, "%d%s", whole, from < to ? ", " : "");
    }
}

static void moei_line_router_config(moei_lines *p, const moe_router_config *config) {
    moei_line(p, "{");
    moei_line_fields(p, moe_router_fields(), config, 0, sizeof *config);
    moei_line(p, "}");
}

/* NULL for tensors that a module does not have; a tied module's weight is the embedding's. The cast is for members that training writes to. */
static void moei_line_tensors(moei_lines *p, const moe_net *net, size_t i, int from, int to, const char *cast) {
    const moe_module *m = &net->modules[i];
    moe_slot slot;
    int place;
    moei_line(p, "{");
    for (place = from; place < to; place++) {
        size_t owner = m->kind == MOE_MODULE_TIED && place == MOE_MODULE_WEIGHT && from == 0 ? 0 : i;
        if (place > from) moei_line(p, ", ");
        if (moei_module_slot(net, owner, place, &slot) == MOE_OK) moei_line(p, "%s", cast), moei_line_name(p, slot.name, owner);
        else moei_line(p, "NULL");
    }
    moei_line(p, "}");
}

/* All places of a layer that is none are NULL. */
static void moei_line_layer_tensors(moei_lines *p, const moe_net *net, size_t i, int to) {
    if (moei_is_layer(&net->modules[i])) moei_line_tensors(p, net, i, 0, to, "");
    else moei_line(p, "{NULL}");
}

static void moei_line_bits(moei_lines *p, uint64_t bits) {
    char digits[24];
    moei_text t;
    t.out = digits, t.room = sizeof digits, t.length = 0;
    moei_put_unsigned(&t, bits);
    moei_line(p, "%su%s", digits, bits >> 32 != 0 ? "ll" : ""); /* one piece: no line ends inside */
}

/* In the order of moe_layer's members; its router's own tensors stay empty. */
static void moei_line_layer(moei_lines *p, const moe_net *net, size_t i) {
    const moe_layer *layer = &net->modules[i].layer;
    moei_line(p, "{{");
    moei_line_router_config(p, &layer->config.router);
    moei_line(p, ", ");
    moei_line_fields(p, moe_layer_fields(), &layer->config, sizeof layer->config.router, offsetof(moe_layer_config, kernels) + sizeof(int));
    moei_line(p, ", NULL}, {"); /* no transport */
    moei_line_router_config(p, &layer->router.config);
    moei_line(p, ", {NULL, NULL, NULL, NULL}, NULL, ");
    moei_line_bits(p, layer->router.places);
    moei_line(p, ", ");
    moei_line_bits(p, layer->router.parts);
    moei_line(p, ", {NULL}}, NULL, ");
    moei_line_bits(p, layer->places);
    moei_line(p, ", ");
    moei_line_layer_tensors(p, net, i, MOE_LAYER_SLOTS);
    moei_line(p, ", {NULL}, {NULL}, 0, 0, NULL, 0, {NULL, NULL}}");
}

/* In the order of moe_module's members. */
static void moei_line_module(moei_lines *p, const moe_net *net, size_t i) {
    const moe_module *m = &net->modules[i];
    moei_line(p, "{%d, %d, %d, %d, %d, %d, ", m->kind, m->d_in, m->d_out, m->act, m->span, m->n_rows);
    moei_line_real(p, m->rate, ", {");
    moei_line_fields(p, moei_attention_fields, &m->attention, 0, sizeof m->attention);
    moei_line(p, "}, ");
    moei_line_layer(p, net, i);
    moei_line(p, ", ");
    if (moei_is_layer(m)) moei_line(p, "{NULL}");
    else moei_line_tensors(p, net, i, 0, MOE_MODULE_SLOTS, "(moe_real *)");
    moei_line(p, ", {NULL}, 0}%s", i + 1 < net->n_modules ? "," : "};");
    moei_line_end(p);
}

/* Writes `static const moe_net NAME` and what it points to. No heap, no initialisation: the struct serves moe_net_forward and moe_net_decode as it is,
   with plain C kernels, but has no list of named tensors. Errors of moei_float_check before the first byte, then those of the stream. */
MOEI_TOOL moe_status moei_print_net(moe_stream *out, const char *name, const moe_net *net, moe_error *error) {
    moei_lines p;
    moe_slot slot;
    size_t i;
    int place;
    moe_status status = moei_float_check(net, error);
    if (status != MOE_OK) return status;
    moei_line_begin(&p, out, name);
    for (i = 0; i < net->n_modules; i++)
        for (place = 0; place < MOE_LAYER_SLOTS; place++)
            if (moei_module_slot(net, i, place, &slot) == MOE_OK) moei_line_array(&p, slot.name, i, slot.count, moei_float_values(net, i, place));
    moei_line(&p, "static const moe_module ");
    moei_line_name(&p, NULL, 0);
    moei_line(&p, "_modules[%z] = {", net->n_modules);
    moei_line_end(&p);
    for (i = 0; i < net->n_modules; i++) moei_line_module(&p, net, i);
    moei_line(&p, "static const moe_net ");
    moei_line_name(&p, NULL, 0);
    moei_line(&p, " = {%d, %d, %z, (moe_module *)", net->d_in, net->d_out, net->n_modules);
    moei_line_name(&p, NULL, 0);
    moei_line(&p, "_modules, 0, NULL, MOE_KERNELS_C, NULL, NULL, {NULL, NULL}, NULL, 0, 1, 0, {MOE_OK, \"\"}};");
    moei_line_end(&p);
    return p.status == MOE_OK ? MOE_OK : moei_error(error, p.status, "writing net %s: %s", name, moe_status_text(p.status));
}
#endif /* MOE_NO_TRAIN */

/* ---- sampling ------------------------------------------------------------------------------------------------------------------ */

#define MOEI_S moe_sampling

static const moe_field moei_sampling_fields[] = {
    MOEI_FLAG(MOEI_S, greedy, "the largest logit, without a draw"),
    MOEI_REAL(MOEI_S, temperature, 1e-6, 1e6, "what the logits are divided by"),
    MOEI_INT(MOEI_S, top_k, 1, (int)((unsigned)-1 / 2), "how many of the largest logits stay"),
    MOEI_REAL(MOEI_S, top_p, 0, 1, "how much of the probability stays"),
    MOEI_FIELDS_END};

/* One choice among n logits. */
typedef struct moei_sample {
    moe_sampling how; /* with defaults filled in */
    size_t n;
    const moe_real *logits;
    int32_t best;
    int32_t *order; /* [n] the tokens that stay, unless all do */
} moei_sample;

static moe_status moei_sample_begin(moei_sample *s, const moe_sampling *how, size_t n, const moe_real *logits, moe_error *error) {
    size_t i;
    moe_status status;
    memset(s, 0, sizeof *s);
    if (how != NULL) s->how = *how;
    if ((status = moei_fields_check(moei_sampling_fields, &s->how, error)) != MOE_OK) return status;
    moei_default_real(&s->how.temperature, MOEI_R(1.0));
    moei_default_real(&s->how.top_p, MOEI_R(1.0));
    for (i = 0; i < n; i++)
        if (!moe_is_finite(logits[i])) return moei_error(error, MOE_ERR_NONFINITE, "logits[%z] = %g: must be finite", i, (double)logits[i]);
    s->n = n;
    s->logits = logits;
    moe_top_k(n, logits, 1, &s->best);
    return MOE_OK;
}

/* The probability of a token but for a common factor: 1 for the best. */
static moe_real moei_sample_weight(const moei_sample *s, size_t token) {
    return MOEI_F(exp)((s->logits[token] - s->logits[s->best]) / s->how.temperature);
}

/* How many of the first tokens in order, at most count, it takes until their weights reach enough. */
static size_t moei_sample_reach(const moei_sample *s, size_t count, double enough) {
    double sum = 0.0;
    size_t i;
    for (i = 0; i < count && sum < enough; i++) sum += (double)moei_sample_weight(s, (size_t)s->order[i]);
    return i;
}

/* How many tokens top_k and top_p leave; fewer than n stand in order. Mostly the first few reach top_p, so not all are sorted for it. */
static size_t moei_sample_stay(const moei_sample *s) {
    size_t most = s->how.top_k > 0 && (size_t)s->how.top_k < s->n ? (size_t)s->how.top_k : s->n, i, sorted, stay;
    double sum = 0.0, enough;
    if (most < s->n) moe_top_k(s->n, s->logits, most, s->order);
    if (!(s->how.top_p < MOEI_R(1.0))) return most;
    for (i = 0; i < most; i++) sum += (double)moei_sample_weight(s, most < s->n ? (size_t)s->order[i] : i);
    enough = sum * (double)s->how.top_p;
    if (most < s->n) return moei_sample_reach(s, most, enough);
    for (sorted = 64; sorted < s->n / 8; sorted *= 8) {
        moe_top_k(s->n, s->logits, sorted, s->order);
        if ((stay = moei_sample_reach(s, sorted, enough)) < sorted) return stay;
    }
    moe_top_k(s->n, s->logits, s->n, s->order);
    return moei_sample_reach(s, s->n, enough);
}

/* Fills p and draws from it. Sums are double: a float would lose what a large vocabulary has in its small probabilities. */
static int32_t moei_sample_draw(const moei_sample *s, moe_rng *rng, moe_real *p) {
    const size_t stay = moei_sample_stay(s);
    double sum = 0.0, left;
    size_t i;
    int32_t token = s->best;
    if (stay < s->n) memset(p, 0, s->n * sizeof *p);
    for (i = 0; i < stay; i++) {
        const size_t at = stay < s->n ? (size_t)s->order[i] : i;
        p[at] = moei_sample_weight(s, at);
        sum += (double)p[at];
    }
    left = (double)(moe_rng_next(rng) >> 11) * (1.0 / 9007199254740992.0) * sum;
    for (i = 0; i < s->n && left >= 0.0; i++) { /* where rounding leaves something over, the last possible token is taken */
        if (p[i] > MOEI_R(0.0)) token = (int32_t)i;
        left -= (double)p[i];
    }
    for (i = 0; i < s->n; i++) p[i] = (moe_real)((double)p[i] / sum);
    return token;
}

moe_status moe_sample(const moe_sampling *how, size_t n, const moe_real *logits, moe_rng *rng, moe_real *p, int32_t *order, int32_t *token,
                      moe_error *error) {
    moei_sample s;
    moe_status status;
    if (logits == NULL || p == NULL || order == NULL || token == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "%s must not be NULL", logits == NULL ? "logits" : p == NULL ? "p" : order == NULL ? "order" : "token");
    if (n == 0 || !MOEI_FITS_INT32(n)) return moei_error(error, MOE_ERR_ARGUMENT, "n = %z: must be 1 to 2147483647", n);
    if ((status = moei_sample_begin(&s, how, n, logits, error)) != MOE_OK) return status;
    if (!s.how.greedy && rng == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "rng must not be NULL: only greedy = 1 draws nothing");
    s.order = order;
    if (s.how.greedy) {
        memset(p, 0, n * sizeof *p);
        p[s.best] = MOEI_R(1.0);
        *token = s.best;
    } else *token = moei_sample_draw(&s, rng, p);
    return MOE_OK;
}

/* ---- backward ------------------------------------------------------------------------------------------------------------------ */

#ifndef MOE_NO_TRAIN

/* The gradients to which later modules add. */
static void moei_module_zero(const moe_module *m, const struct moe_module_pass *p, size_t n) {
    size_t rows = (size_t)m->attention.heads * n;
    if (p->d_x != NULL) memset(p->d_x, 0, n * (size_t)m->d_in * sizeof(moe_real));
    if (p->d_weights != NULL) memset(p->d_weights, 0, rows * n * sizeof(moe_real));
    if (p->d_outputs != NULL) memset(p->d_outputs, 0, rows * (size_t)m->d_out * sizeof(moe_real));
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
        r.d_outputs = back->d_outputs, r.d_weights = back->d_weights;
        r.dx = i > 0 ? r.p->d_x : dx;
        status = moei_module_kinds[net->modules[i].kind].backward(&r);
    }
    return status;
}

moe_status moe_net_backward(const moe_net *net, moe_net_pass *pass, const moe_real *dy, moe_real *dx) {
    moei_returned back;
    moe_status status;
    if (net == NULL || pass == NULL) return MOE_ERR_ARGUMENT;
    status = !net->built || !net->trainable || !pass->training || pass->modules == NULL ? MOE_ERR_STATE : MOE_OK;
    if (status == MOE_OK && dy == NULL && pass->n_tokens > 0) status = MOE_ERR_ARGUMENT;
    status = moei_ranks_vote(net->transport, status, NULL, NULL);
    if (status != MOE_OK || pass->total == 0) return status;
    back.dy = dy != NULL ? dy : pass->y, /* which has no rows */ back.d_outputs = back.d_weights = NULL;
    return moei_net_backward(net, pass, &back, dx);
}

moe_status moe_net_observe(moe_net *net, const moe_net_pass *pass) {
    moe_status status = MOE_OK;
    size_t i;
    if (net == NULL || pass == NULL) return MOE_ERR_ARGUMENT;
    if (!net->built || !net->trainable || !pass->training || pass->modules == NULL) return MOE_ERR_STATE;
    for (i = 0; i < net->n_modules && status == MOE_OK; i++)
        if (net->modules[i].kind == MOE_MODULE_MIXTURE) status = moe_layer_observe(&net->modules[i].layer, &pass->modules[i].layer);
    return status;
}

moe_status moe_net_advance(moe_net *net) {
    moe_status status = MOE_OK;
    size_t i;
    if (net == NULL) return MOE_ERR_ARGUMENT;
    if (!net->built || !net->trainable) return MOE_ERR_STATE;
    for (i = 0; i < net->n_modules && status == MOE_OK; i++)
        if (net->modules[i].kind == MOE_MODULE_MIXTURE) status = moe_layer_advance(&net->modules[i].layer);
    return status;
}

void moe_net_zero_gradients(moe_net *net) {
    size_t i;
    for (i = 0; net != NULL && i < net->n_tensors; i++)
        if (net->tensors[i].gradient != NULL) memset(net->tensors[i].gradient, 0, net->tensors[i].count * sizeof(moe_real));
}

/* ==== training =============================================================================================================== */

/* ---- losses -------------------------------------------------------------------------------------------------------------------- */

static size_t moei_count_labelled(size_t n, const int32_t *labels) {
    size_t t, count = 0;
    for (t = 0; t < n; t++) count += labels[t] >= 0;
    return count;
}

/* l = -log softmax(y)_label,  dl/dy_j = softmax(y)_j - [j = label],  both over the number of labels. */
/* The sum of exp(y_j - max) over all j but best, the first largest one; they go to d as well, with 1 at best, where d is not NULL. */
static moe_real moei_exp_others(const moe_kernels *kernels, size_t n, const moe_real *y, size_t best, moe_real *d) {
    enum { PART = 64 };
    moe_real room[PART], sum = MOEI_R(0.0);
    size_t from, count;
    for (from = 0; from < n; from += count) {
        moe_real *part = d != NULL ? d + from : room;
        count = n - from < PART ? n - from : (size_t)PART;
        memcpy(part, y + from, count * sizeof *part);
        if (best - from < count) part[best - from] = -MOEI_INFINITY;
        sum += moe_exp_sum(kernels, count, y[best], part);
    }
    if (d != NULL) d[best] = MOEI_R(1.0);
    return sum;
}

/* One row: -log softmax(y)[label], and in d (may be NULL) factor times its gradient. log1p keeps small losses exact. */
static moe_real moei_cross_entropy_row(const moe_kernels *kernels, size_t n, const moe_real *y, size_t label, moe_real factor, moe_real *d) {
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

/* The rows' part in the mean over `labelled` rows. */
static moe_real moei_cross_entropy(const moe_kernels *kernels, size_t n, size_t classes, size_t labelled, const moe_real *y, const int32_t *labels, moe_real *dy) {
    size_t t;
    moe_real over_n = labelled > 0 ? MOEI_R(1.0) / (moe_real)labelled : MOEI_R(0.0), sum = MOEI_R(0.0);
    for (t = 0; t < n; t++, y += classes) {
        moe_real *d = dy != NULL ? dy + t * classes : NULL;
        if (labels[t] >= 0) sum += moei_cross_entropy_row(kernels, classes, y, (size_t)labels[t], over_n, d);
        else if (d != NULL) memset(d, 0, classes * sizeof *d);
    }
    return sum * over_n;
}

moe_real moe_cross_entropy(size_t n, size_t classes, const moe_real *y, const int32_t *labels, moe_real *dy) {
    return moei_cross_entropy(NULL, n, classes, moei_count_labelled(n, labels), y, labels, dy);
}

/* The rows' part in the mean over `all` rows. */
static moe_real moei_squared_error(size_t n, size_t width, size_t all, const moe_real *y, const moe_real *targets, moe_real *dy) {
    moe_real over_n = all > 0 ? MOEI_R(1.0) / (moe_real)all : MOEI_R(0.0), sum = MOEI_R(0.0);
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

/* With l = ln p - ln q the loss is sum (p - q) l / 2; its slope by a_j is (p_j (l_j - sum p l) + p_j - q_j) / 2, by b_j the same with p and q exchanged. */
moe_real moe_consistency_loss(size_t n, size_t classes, const moe_real *a, const moe_real *b, moe_real *da, moe_real *db) {
    moe_real share = n > 0 ? MOEI_R(0.5) / (moe_real)n : MOEI_R(0.0), sum = MOEI_R(0.0);
    size_t t, j;
    for (t = 0; t < n; t++) {
        const moe_real *va = a + t * classes, *vb = b + t * classes;
        moe_real lse_a = moe_log_sum_exp(classes, va), lse_b = moe_log_sum_exp(classes, vb), p_l = MOEI_R(0.0), q_l = MOEI_R(0.0);
        for (j = 0; j < classes; j++) {
            moe_real l = (va[j] - lse_a) - (vb[j] - lse_b);
            p_l += MOEI_F(exp)(va[j] - lse_a) * l;
            q_l += MOEI_F(exp)(vb[j] - lse_b) * l;
        }
        sum += p_l - q_l;
        for (j = 0; j < classes; j++) {
            moe_real p = MOEI_F(exp)(va[j] - lse_a), q = MOEI_F(exp)(vb[j] - lse_b), l = (va[j] - lse_a) - (vb[j] - lse_b);
            if (da != NULL) da[t * classes + j] = share * (p * (l - p_l) + p - q);
            if (db != NULL) db[t * classes + j] = share * (q * (q_l - l) + q - p);
        }
    }
    return sum * share;
}

static const char *const moei_criterion_names[] = {"cross_entropy",      "squared_error", "expectation",    "stochastic",
                                                   "stochastic_squared", "jacobs",        "jacobs_squared", NULL};

/* Whether a criterion compares with targets, not with labels. */
static int moei_is_squared(int criterion) {
    return criterion == MOE_CRITERION_SQUARED_ERROR || criterion == MOE_CRITERION_STOCHASTIC_SQUARED || criterion == MOE_CRITERION_JACOBS_SQUARED;
}

/* Whether the loss reads the experts of the last module one by one. */
static int moei_reads_experts(const moe_net *net, int criterion) {
    const moe_module *last = &net->modules[net->n_modules - 1];
    return criterion > MOE_CRITERION_SQUARED_ERROR || (last->kind == MOE_MODULE_MIXTURE && last->layer.config.router.expert_temperature > MOEI_R(0.0));
}

/* Whether the last module is a mixture that such a loss can read. */
static moe_status moei_mixture_fits(const moe_net *net, int criterion, moe_error *error) {
    const moe_module *last = &net->modules[net->n_modules - 1];
    const moe_router_config *c = &last->layer.config.router;
    if (!moei_reads_experts(net, criterion)) return MOE_OK;
    if (net->transport != NULL)
        return moei_error(error, MOE_ERR_UNSUPPORTED, "criterion = %s reads all experts, and net.transport spreads them over ranks", moei_criterion_names[criterion]);
    if (last->kind != MOE_MODULE_MIXTURE)
        return moei_error(error, MOE_ERR_CONFIG, "criterion = %s: the net's last module must be a mixture", moei_criterion_names[criterion]);
    if (c->select != MOE_SELECT_DENSE || c->weight != MOE_WEIGHT_RAW || c->scale < MOEI_R(1.0) || c->scale > MOEI_R(1.0) || c->expert_scale || c->capacity_factor > MOEI_R(0.0) ||
        c->capacity_factor_eval > MOEI_R(0.0) || c->drop_capacity > 0 || c->capacity_bound != MOE_BOUND_NONE || c->drop_rule != MOE_DROP_RULE_NONE ||
        c->apply_to != MOE_APPLY_OUTPUT || last->layer.config.n_shared > 0 || last->layer.config.add_input)
        return moei_error(error, MOE_ERR_CONFIG, "module %z (mixture): criterion = %s or expert_temperature needs select = dense and weight = raw, and nothing beside it",
                          net->n_modules - 1, moei_criterion_names[criterion]);
    if (c->expert_temperature > MOEI_R(0.0) && (c->gate != MOE_GATE_SOFTMAX || c->refine != MOE_REFINE_NONE))
        return moei_error(error, MOE_ERR_CONFIG, "module %z (mixture): expert_temperature needs gate = softmax without refine", net->n_modules - 1);
    return MOE_OK;
}

/* The samples' part in the mean over `counted` of them. */
static moe_real moei_criterion(int criterion, const moe_net *net, const moe_data *data, size_t counted, const moe_real *y, moe_real *dy) {
    size_t width = (size_t)net->d_out;
    if (criterion == MOE_CRITERION_CROSS_ENTROPY) return moei_cross_entropy(net->kernels, data->n, width, counted, y, data->labels, dy);
    return moei_squared_error(data->n, width, counted, y, data->targets, dy);
}

/* ---- data ---------------------------------------------------------------------------------------------------------------------- */

static moe_status moei_reals_check(const char *name, const moe_real *v, size_t n, size_t width, moe_error *error) {
    size_t t, j;
    for (t = 0; t < n; t++)
        for (j = 0; j < width; j++)
            if (!moe_is_finite(v[t * width + j]))
                return moei_error(error, MOE_ERR_NONFINITE, "%s[%z][%z] = %g: must be a finite number", name, t, j,
                                  (double)v[t * width + j]);
    return MOE_OK;
}

/* Token ids of the net lie below this: there are so many rows in its embedding, and in the tables of routers that hash. */
static size_t moei_token_ids_end(const moe_net *net) {
    size_t i, end = (size_t)INT32_MAX + 1;
    if (net->modules[0].kind == MOE_MODULE_EMBEDDING) end = net->tensors[net->modules[0].first_tensor].shape[0];
    for (i = 0; i < net->n_modules; i++) {
        const moe_router_config *c = &net->modules[i].layer.config.router;
        if (net->modules[i].kind == MOE_MODULE_MIXTURE && c->select == MOE_SELECT_HASH && (size_t)c->table_size < end) end = (size_t)c->table_size;
    }
    return end;
}

static moe_status moei_inputs_check(const moe_net *net, const moe_data *data, moe_error *error) {
    size_t t, end = moei_token_ids_end(net);
    int in_call = data->call != NULL && data->call->token_ids != NULL;
    if (net->d_in == 0 && data->token_ids == NULL && !in_call)
        return moei_error(error, MOE_ERR_ARGUMENT, "token_ids must not be NULL: the net reads them");
    for (t = 0; data->token_ids != NULL && t < data->n; t++)
        if (data->token_ids[t] < 0 || (size_t)data->token_ids[t] >= end)
            return moei_error(error, MOE_ERR_ARGUMENT, "token_ids[%z] = %d: must be 0 to %z", t, (int)data->token_ids[t], end - 1);
    if (net->d_in == 0) return MOE_OK;
    if (data->x == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "x must not be NULL");
    return moei_reals_check("x", data->x, data->n, (size_t)net->d_in, error);
}

/* A loss that reads the experts one by one takes no rows without a label. */
static moe_status moei_labels_check(const moe_net *net, const moe_data *data, int criterion, moe_error *error) {
    int reads = moei_reads_experts(net, criterion);
    size_t t;
    if (data->labels == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "labels must not be NULL for the cross-entropy");
    for (t = 0; t < data->n; t++)
        if (data->labels[t] >= net->d_out || (reads && data->labels[t] < 0))
            return moei_error(error, MOE_ERR_ARGUMENT, "labels[%z] = %d: must be 0 to %d%s", t, (int)data->labels[t], net->d_out - 1,
                              reads ? "" : ", or negative: no label");
    return MOE_OK;
}

/* Whether sequences are no longer than positions allow. */
static moe_status moei_length_check(const moe_net *net, const moe_data *data, moe_error *error) {
    size_t i;
    if (data->call != NULL && data->call->sequences != NULL) return MOE_OK; /* these say how long they are */
    for (i = 0; i < net->n_modules; i++)
        if (net->modules[i].kind == MOE_MODULE_POSITIONS && data->length > (size_t)net->modules[i].n_rows)
            return moei_error(error, MOE_ERR_ARGUMENT, "length = %z: module %z (positions) has most = %d", data->length, i,
                              net->modules[i].n_rows);
    return MOE_OK;
}

/* Everything that samples can get wrong. */
static moe_status moei_data_check(const moe_net *net, const moe_data *data, int criterion, moe_error *error) {
    moe_status status;
    if (data == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "data must not be NULL");
    if (data->n == 0) return MOE_OK;
    if (data->length > 0 && data->n % data->length != 0)
        return moei_error(error, MOE_ERR_ARGUMENT, "n = %z: must be a multiple of length = %z", data->n, data->length);
    status = moei_length_check(net, data, error);
    if (status == MOE_OK) status = moei_inputs_check(net, data, error);
    if (status != MOE_OK) return status;
    if (!moei_is_squared(criterion)) return moei_labels_check(net, data, criterion, error);
    if (data->targets == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "targets must not be NULL for the squared error");
    return moei_reals_check("targets", data->targets, data->n, (size_t)net->d_out, error);
}

/* Where samples are shuffled or cut into batches, what else routers read would have to be as well, and nobody else can say where sequences end. */
static moe_status moei_samples_alone(const moe_net *net, const moe_data *data, moe_error *error) {
    size_t i;
    if (data->call != NULL) return moei_error(error, MOE_ERR_ARGUMENT, "call must be NULL here: only moe_trainer_step takes it");
    for (i = 0; i < net->n_modules; i++)
        if (data->length == 0 && data->n > 0 && (net->modules[i].kind == MOE_MODULE_ATTENTION || net->modules[i].kind == MOE_MODULE_POSITIONS))
            return moei_error(error, MOE_ERR_ARGUMENT, "length = 0: module %z needs to know how long the sequences are", i);
    return MOE_OK;
}

/* How many sequences length makes of the n samples in one pass. */
static size_t moei_batch_sequences(const moe_data *data, size_t n) {
    return data->length > 0 && (data->call == NULL || data->call->sequences == NULL) ? n / data->length : 1;
}

/* How many sequences one pass may have: soft routers say so. */
static size_t moei_sequences_most(const moe_net *net) {
    size_t i, most = (size_t)INT32_MAX;
    for (i = 0; i < net->n_modules; i++) {
        const moe_router_config *c = &net->modules[i].layer.config.router;
        if (net->modules[i].kind == MOE_MODULE_MIXTURE && moei_is_soft(c) && (size_t)c->soft_sequences < most) most = (size_t)c->soft_sequences;
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

/* Whether the routers find in the samples what they read beside x, and can take so many sequences in one pass. */
static moe_status moei_routers_check(const moe_net *net, const moe_data *data, size_t n_sequences, int training, moe_error *error) {
    size_t i;
    if (n_sequences > moei_sequences_most(net))
        return moei_error(error, MOE_ERR_ARGUMENT, "length = %z: a batch has %z sequences, but a router's soft_sequences allows %z", data->length, n_sequences,
                          moei_sequences_most(net));
    for (i = 0; i < net->n_modules; i++) {
        const moe_router_config *c = &net->modules[i].layer.config.router;
        unsigned lacks;
        if (net->modules[i].kind != MOE_MODULE_MIXTURE) continue;
        lacks = moei_router_lacks(net, i, data);
        if (lacks != 0)
            return moei_error(error, MOE_ERR_ARGUMENT, "module %z (mixture): its router has the trait %s, but the samples have only x%s", i,
                              moe_trait_name(lacks & (~lacks + 1u)), data->token_ids != NULL ? " and token_ids" : "");
        if (training && c->loss_distill > MOEI_R(0.0) && !c->student && (data->call == NULL || data->call->teacher == NULL))
            return moei_error(error, MOE_ERR_ARGUMENT, "module %z (mixture): loss_distill needs a teacher, but the samples have only x; student = 1 needs none", i);
    }
    return MOE_OK;
}

/* How many samples the loss is the mean of. */
static size_t moei_counted(int criterion, const moe_data *data) {
    if (data->n == 0) return 0;
    return moei_is_squared(criterion) ? data->n : moei_count_labelled(data->n, data->labels);
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

/* The call for the rows of data; offsets of its sequences go to sequences [n / length + 1], unless data->call has its own. */
static moe_call moei_data_call(const moe_data *data, int32_t *sequences) {
    moe_call call;
    size_t i;
    memset(&call, 0, sizeof call);
    if (data->call != NULL) call = *data->call;
    call.n_tokens = data->n;
    call.x = data->x;
    if (call.token_ids == NULL) call.token_ids = data->token_ids;
    if (data->n == 0) call.sequences = NULL, call.n_sequences = 0; /* a rank without samples has no sequence to begin */
    if (call.sequences != NULL || data->length == 0 || data->n == 0) return call;
    call.n_sequences = data->n / data->length;
    for (i = 0; i <= call.n_sequences; i++) sequences[i] = (int32_t)(i * data->length);
    call.sequences = sequences;
    return call;
}

/* ---- evaluation ---------------------------------------------------------------------------------------------------------------- */

/* The part of this rank in n samples that come in units of so many. */
static moei_tokens moei_tokens_split(const moe_transport *t, size_t n, size_t unit, size_t *own) {
    moei_tokens s;
    moe_rank_part(n / unit, t->rank, t->n_ranks, &s.first, own);
    s.first *= unit, *own *= unit;
    s.total = n;
    s.most = (n / unit + (size_t)t->n_ranks - 1) / (size_t)t->n_ranks * unit;
    return s;
}

/* The most samples that a rank gets of n. */
static size_t moei_part_most(const moe_transport *t, size_t n, size_t length) {
    size_t own;
    return t != NULL ? moei_tokens_split(t, n, length > 0 ? length : 1, &own).most : n;
}

/* How many samples go into one batch at most. */
static size_t moei_evaluate_most(const moe_net *net, const moe_data *data) {
    size_t most = 64, sequences;
    if (data->length > 0) {
        sequences = data->length < 512 ? 512 / data->length : 1;
        if (sequences > moei_sequences_most(net)) sequences = moei_sequences_most(net);
        most = sequences * data->length;
    }
    return data->n < most ? data->n : most;
}

/* The work memory of an evaluation: the net's, and the answers of a mixture. */
typedef struct moei_answers {
    moe_real *answer;   /* [most,d_out] */
    int32_t *sequences; /* [most / length + 1] */
    void *net_work;
    size_t net_size;
} moei_answers;

/* What ranks tell each other at the end: the first of an evaluation's memory. */
enum { MOEI_EVALUATE_WORDS = 4 };

static uint64_t *moei_evaluate_room(const moe_net *net, moei_layout *l) {
    if (net->transport == NULL) return NULL;
    return (uint64_t *)moei_take(l, moei_ranks_room(net->transport, MOEI_EVALUATE_WORDS), sizeof(uint64_t));
}

static moe_status moei_answers_layout(const moe_net *net, int criterion, const moe_data *all, moei_layout *l, moei_answers *a) {
    int reads = moei_reads_experts(net, criterion);
    size_t most = moei_part_most(net->transport, moei_evaluate_most(net, all), all->length);
    moe_status status = moe_net_work_size(net, most, reads, &a->net_size);
    if (status != MOE_OK) return status;
    (void)moei_evaluate_room(net, l);
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

/* What the last module of a pass tells moe_mixture_loss. */
static moe_mixture moei_mixture_of(const moe_net *net, const moe_net_pass *pass, const moe_data *data) {
    const moe_layer_pass *p = &pass->modules[net->n_modules - 1].layer;
    moe_mixture m;
    memset(&m, 0, sizeof m);
    m.n = data->n, m.experts = p->routing.n_experts, m.width = (size_t)net->d_out;
    m.p = p->routing.weights;
    m.outputs = moe_layer_expert_outputs(&net->modules[net->n_modules - 1].layer, p);
    m.labels = data->labels, m.targets = data->targets;
    return m;
}

static size_t moei_largest(size_t n, const moe_real *v) {
    size_t i, best = 0;
    for (i = 1; i < n; i++)
        if (v[i] > v[best]) best = i;
    return best;
}

/* Sums over the samples of an evaluation. */
typedef struct moei_evaluated {
    double loss;
    size_t counted, right;
} moei_evaluated;

/* One batch of an evaluation at work. */
typedef struct moei_evaluating {
    const moe_net *net;
    const moe_data *all; /* the samples */
    int criterion;
    void *work;
    moei_evaluated sums;
} moei_evaluating;

/* Adds the samples of a batch that are this rank's. */
static moe_status moei_evaluate_part(moei_evaluating *e, const moe_data *batch, const moei_tokens *tokens, moe_error *error) {
    const moe_net *net = e->net;
    moei_layout l = moei_layout_begin(e->work);
    moei_answers a;
    moe_call call;
    moe_net_pass pass;
    moe_mixture mixture;
    moe_status status;
    moe_real mean = MOEI_R(0.0);
    const moe_real *answer;
    size_t t, counted = moei_counted(e->criterion, batch), width = (size_t)net->d_out;
    status = moei_answers_layout(net, e->criterion, e->all, &l, &a);
    if (status == MOE_OK) {
        call = moei_data_call(batch, a.sequences);
        call.keep = moei_reads_experts(net, e->criterion);
        status = moei_net_call_check(net, &call, 0);
        if (status == MOE_OK) status = moei_net_pass(net, &call, tokens, a.net_work, &pass);
    }
    if (status != MOE_OK) return moei_error(error, status, "the net's forward pass: %s", moe_status_text(status));
    answer = pass.y;
    status = moei_reals_check("the net's output", pass.y, batch->n, width, error);
    if (status != MOE_OK) return status;
    if (moei_reads_experts(net, e->criterion)) {
        mixture = moei_mixture_of(net, &pass, batch);
        status = moe_mixture_loss(e->criterion, &mixture, &mean, NULL, NULL, error);
        if (status == MOE_OK) status = moe_mixture_answer(e->criterion, &mixture, NULL, a.answer, error);
        if (status != MOE_OK) return status;
        answer = a.answer;
    } else mean = moei_criterion(e->criterion, net, batch, counted, pass.y, NULL);
    e->sums.loss += (double)mean * (double)counted;
    e->sums.counted += counted;
    for (t = 0; !moei_is_squared(e->criterion) && t < batch->n; t++)
        if (batch->labels[t] >= 0) e->sums.right += moei_largest(width, answer + t * width) == (size_t)batch->labels[t];
    return MOE_OK;
}

/* The batch of one process, n samples from `from` on; each rank takes its part of it. */
static moe_status moei_evaluate_batch(moei_evaluating *e, size_t from, size_t n, moe_error *error) {
    const moe_transport *t = e->net->transport;
    moei_tokens tokens = moei_tokens_alone(n);
    moe_data part;
    size_t first = 0, own = n;
    if (t != NULL) {
        tokens = moei_tokens_split(t, n, e->all->length > 0 ? e->all->length : 1, &own);
        first = tokens.first;
    }
    part = moei_data_part(e->net, e->all, from + first, own);
    return moei_ranks_vote(t, moei_evaluate_part(e, &part, &tokens, error), NULL, error);
}

/* Adds the sums of all ranks, in their order: the same bits on all of them. */
static moe_status moei_evaluate_add(moei_evaluating *e, moe_error *error) {
    const moe_transport *t = e->net->transport;
    moei_layout l = moei_layout_begin(e->work);
    uint64_t mine[MOEI_EVALUATE_WORDS], *room;
    const uint64_t *told = NULL;
    moe_status status;
    int r;
    if (t == NULL) return MOE_OK;
    room = moei_evaluate_room(e->net, &l);
    mine[1] = moei_double_bits(e->sums.loss), mine[2] = e->sums.counted, mine[3] = e->sums.right;
    status = moei_ranks_tell(t, MOE_OK, MOEI_EVALUATE_WORDS, mine, room, &told, error);
    if (status != MOE_OK) return status;
    memset(&e->sums, 0, sizeof e->sums);
    for (r = 0; r < t->n_ranks; r++, told += MOEI_EVALUATE_WORDS)
        e->sums.loss += moei_bits_double(told[1]), e->sums.counted += (size_t)told[2], e->sums.right += (size_t)told[3];
    return MOE_OK;
}

static moe_status moei_evaluate(const moe_net *net, const moe_data *data, int criterion, void *work, moe_evaluation *result, moe_error *error) {
    moei_evaluating e;
    moe_evaluation made;
    moe_status status = MOE_OK;
    size_t from, most = moei_evaluate_most(net, data);
    memset(&e, 0, sizeof e);
    e.net = net, e.all = data, e.criterion = criterion, e.work = work;
    for (from = 0; from < data->n && status == MOE_OK; from += most)
        status = moei_evaluate_batch(&e, from, data->n - from < most ? data->n - from : most, error);
    if (status == MOE_OK) status = moei_evaluate_add(&e, error);
    if (status != MOE_OK) return status;
    memset(&made, 0, sizeof made);
    made.n = e.sums.counted;
    if (made.n > 0) {
        made.loss = (moe_real)(e.sums.loss / (double)made.n);
        made.accuracy = (moe_real)((double)e.sums.right / (double)made.n);
    }
    if (!moe_is_finite(made.loss)) return moei_error(error, MOE_ERR_NONFINITE, "the loss is not finite: %g", (double)made.loss);
    *result = made;
    return MOE_OK;
}

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

/* Whether all ranks have the same samples, for they are split among them. */
static moe_status moei_data_agree(const moe_net *net, const moe_data *data, int criterion, const char *where, moe_error *error) {
    moei_agreed s = moei_agreed_begin(net->transport, where, error);
    int squared = moei_is_squared(criterion);
    size_t n = data->n;
    if (net->transport == NULL) return MOE_OK;
    (void)moei_agreed_add(&s, "criterion", (uint64_t)criterion);
    (void)moei_agreed_add(&s, "n", n);
    (void)moei_agreed_add(&s, "length", data->length);
    (void)moei_agreed_add(&s, "x", n > 0 && net->d_in > 0 ? moei_hash(0, data->x, n * (size_t)net->d_in * sizeof(moe_real)) : 0);
    (void)moei_agreed_add(&s, "token_ids", n > 0 && data->token_ids != NULL ? moei_hash(0, data->token_ids, n * sizeof(int32_t)) : 0);
    (void)moei_agreed_add(&s, "labels", n > 0 && !squared ? moei_hash(0, data->labels, n * sizeof(int32_t)) : 0);
    (void)moei_agreed_add(&s, "targets", n > 0 && squared ? moei_hash(0, data->targets, n * (size_t)net->d_out * sizeof(moe_real)) : 0);
    return moei_agreed_end(&s);
}

/* What an evaluation can find wrong before it begins. */
static moe_status moei_evaluate_check(const moe_net *net, const moe_data *data, int criterion, const moe_evaluation *result, moe_error *error) {
    moe_status status;
    if (result == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "net and result must not be NULL");
    if (!net->built) return moei_error(error, MOE_ERR_STATE, "the net is not built");
    if (criterion < 0 || criterion >= MOE_CRITERION_COUNT)
        return moei_error(error, MOE_ERR_ARGUMENT, "criterion = %d: there is no such one", criterion);
    status = moei_data_check(net, data, criterion, error);
    if (status == MOE_OK) status = moei_samples_alone(net, data, error);
    if (status == MOE_OK && data->n > 0) status = moei_routers_check(net, data, 1, 0, error);
    return status == MOE_OK ? moei_mixture_fits(net, criterion, error) : status;
}

moe_status moe_evaluate(const moe_net *net, const moe_data *data, int criterion, moe_evaluation *result, moe_error *error) {
    moe_status status;
    size_t size = 0;
    void *work = NULL;
    if (net == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "net and result must not be NULL");
    status = moei_ranks_vote(net->transport, moei_evaluate_check(net, data, criterion, result, error), NULL, error);
    if (status == MOE_OK) status = moei_data_agree(net, data, criterion, "the samples: ", error);
    if (status != MOE_OK) return status;
    status = moei_evaluate_size(net, criterion, data, &size);
    if (status != MOE_OK) (void)moei_error(error, status, "work memory: %s", moe_status_text(status));
    else work = moei_alloc(&net->allocator, size, 1);
    if (status == MOE_OK && work == NULL) status = moei_error(error, MOE_ERR_MEMORY, "no memory for %z bytes of work", size);
    status = moei_ranks_vote(net->transport, status, NULL, error);
    if (status == MOE_OK) status = moei_evaluate(net, data, criterion, work, result, error);
    if (work != NULL) moei_free(&net->allocator, work, size);
    return status;
}

/* ---- the trainer --------------------------------------------------------------------------------------------------------------- */

static const char *const moei_optimizer_names[] = {"adamw", "sgd", NULL};
static const char *const moei_schedule_names[] = {"cosine", "linear", NULL};

#define MOEI_T moe_train_config
#define MOEI_G moe_param_group

static const moe_field moei_train_fields[] = {
    MOEI_CHOICE(MOEI_T, criterion, MOE_CRITERION_COUNT, moei_criterion_names, "what is minimised"),
    MOEI_CHOICE(MOEI_T, optimizer, MOE_OPTIMIZER_COUNT, moei_optimizer_names, "optimiser"),
    MOEI_INT(MOEI_T, epochs, 1, 1000000, "passes through the samples"),
    MOEI_INT(MOEI_T, batch, 1, 1000000, "samples per step"),
    MOEI_REAL(MOEI_T, rate, 1e-12, 1e6, "learning rate"),
    MOEI_REAL(MOEI_T, final_rate, 1e-12, 1, "share of the rate at the end"),
    MOEI_REAL(MOEI_T, momentum, -1, 0.999999, "momentum of sgd"),
    MOEI_REAL(MOEI_T, beta1, 1e-6, 0.999999, "decay of the first moment"),
    MOEI_REAL(MOEI_T, beta2, 1e-6, 0.999999, "decay of the second moment"),
    MOEI_REAL(MOEI_T, epsilon, 1e-30, 1, "added to the root of the second moment"),
    MOEI_REAL(MOEI_T, decay, 0, 1e3, "weight decay"),
    MOEI_REAL(MOEI_T, clip, 1e-12, 1e12, "largest norm of the gradient"),
    MOEI_INT(MOEI_T, accumulate, 1, 1000000, "batches per step"),
    MOEI_CHOICE(MOEI_T, schedule, MOE_SCHEDULE_COUNT, moei_schedule_names, "how the rate falls"),
    MOEI_INT(MOEI_T, warmup, 1, 2147483647, "steps in which the rate rises"),
    MOEI_INT(MOEI_T, total_steps, 1, 2147483647, "steps of the schedule"),
    MOEI_INT(MOEI_T, n_groups, 1, 4096, "groups of tensors"),
    MOEI_INT(MOEI_T, evaluate_every, 1, 2147483647, "steps between evaluations"),
    MOEI_INT(MOEI_T, checkpoint_every, 1, 2147483647, "steps between checkpoints"),
    MOEI_FLAG(MOEI_T, resume, "go on from the checkpoint"),
    MOEI_FIELDS_END};

static const moe_field moei_group_fields[] = {
    MOEI_REAL(MOEI_G, rate, 0, 1e6, "factor on the rate"),
    MOEI_REAL(MOEI_G, decay, -1e6, 1e6, "factor on the decay"),
    MOEI_FLAG(MOEI_G, frozen, "no learning"),
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
    if (out->momentum < MOEI_R(0.0)) out->momentum = MOEI_R(0.0);
    moei_default_real(&out->beta1, MOEI_R(0.9));
    moei_default_real(&out->beta2, MOEI_R(0.999));
    moei_default_real(&out->epsilon, MOEI_R(1e-8));
    moei_default(&out->accumulate, 1);
    return MOE_OK;
}

/* Whether name fits pattern, in which * stands for any characters: after a mismatch the last * takes one character more. */
static int moei_fits_pattern(const char *pattern, const char *name) {
    const char *star = NULL, *from = NULL;
    while (*name != '\0') {
        if (*pattern == '*') star = pattern++, from = name;
        else if (*pattern == *name) pattern++, name++;
        else if (star != NULL) pattern = star + 1, name = ++from;
        else return 0;
    }
    while (*pattern == '*') pattern++;
    return *pattern == '\0';
}

static moe_status moei_groups_check(const moe_net *net, const moe_train_config *config, moe_error *error) {
    moe_error why;
    size_t t;
    int g;
    if (config->n_groups > 0 && config->groups == NULL)
        return moei_error(error, MOE_ERR_CONFIG, "groups must not be NULL: n_groups = %d", config->n_groups);
    for (g = 0; g < config->n_groups; g++) {
        const moe_param_group *group = &config->groups[g];
        if (moei_fields_check(moei_group_fields, group, &why) != MOE_OK) return moei_error(error, MOE_ERR_CONFIG, "groups[%d]: %s", g, why.message);
        if (group->pattern == NULL) return moei_error(error, MOE_ERR_CONFIG, "groups[%d]: pattern must not be NULL", g);
        for (t = 0; t < net->n_tensors && !moei_fits_pattern(group->pattern, net->tensors[t].name);) t++;
        if (t == net->n_tensors) return moei_error(error, MOE_ERR_CONFIG, "groups[%d]: pattern = '%s' fits the name of no tensor", g, group->pattern);
    }
    return MOE_OK;
}

/* Two numbers for a tensor: the factor on the rate, 0 when it does not learn, and its weight decay. */
static void moei_group_factors(const moe_train_config *config, const moe_tensor *t, moe_real *out) {
    const moe_param_group *group = NULL;
    int g, none = (t->flags & (unsigned)MOE_PARAM_NO_DECAY) != 0;
    for (g = 0; g < config->n_groups && group == NULL; g++)
        if (moei_fits_pattern(config->groups[g].pattern, t->name)) group = &config->groups[g];
    out[0] = MOEI_R(1.0), out[1] = none ? MOEI_R(0.0) : config->decay;
    if (group == NULL) return;
    if (group->rate > MOEI_R(0.0)) out[0] = group->rate;
    if (group->frozen) out[0] = MOEI_R(0.0);
    if (group->decay > MOEI_R(0.0)) out[1] = group->decay * config->decay;
    if (group->decay < MOEI_R(0.0)) out[1] = MOEI_R(0.0);
}

/* One batch in the trainer's work memory. */
typedef struct moei_batch {
    uint64_t *room;     /* what ranks tell each other */
    moe_real *dy;       /* [batch,d_out] */
    int32_t *sequences; /* [batch+1] */
    moe_real *expert_p, *d_p, *d_weights, *d_outputs; /* [batch,E], [E,batch], [E,batch,d_out] of a classical mixture */
    void *net_work;
    size_t net_size;
} moei_batch;

enum { MOEI_TRAINER_WORDS = 4 };

static moe_status moei_batch_layout(const moe_trainer *trainer, moei_layout *l, moei_batch *b) {
    size_t batch = trainer->most;
    moe_status status = moe_net_work_size(trainer->net, batch, 1, &b->net_size);
    if (status != MOE_OK) return status;
    b->room = trainer->net->transport != NULL ? (uint64_t *)moei_take(l, moei_ranks_room(trainer->net->transport, MOEI_TRAINER_WORDS), sizeof(uint64_t)) : NULL;
    b->dy = moei_take_reals(l, batch, (size_t)trainer->net->d_out);
    b->sequences = (int32_t *)moei_take(l, batch + 1, sizeof(int32_t));
    if (moei_reads_experts(trainer->net, trainer->config.criterion)) {
        size_t cells = 0;
        if (!moei_mul(batch, (size_t)trainer->net->modules[trainer->net->n_modules - 1].layer.config.router.n_experts, &cells)) l->overflow = 1;
        b->expert_p = moei_take_reals(l, cells, 1);
        b->d_p = moei_take_reals(l, cells, 1);
        b->d_weights = moei_take_reals(l, cells, 1);
        b->d_outputs = moei_take_reals(l, cells, (size_t)trainer->net->d_out);
    }
    b->net_work = moei_take(l, b->net_size, 1);
    return l->overflow ? MOE_ERR_OVERFLOW : MOE_OK;
}

/* The numbers that one moment has, and how many moments there are. */
static size_t moei_net_numbers(const moe_net *net) { return moe_net_parameters(net, NULL); }
static size_t moei_moments(const moe_trainer *t) { return t->config.optimizer == MOE_OPTIMIZER_ADAMW ? 2 : 1; }

static moe_status moei_trainer_allocate(moe_trainer *t, moe_error *error) {
    const moe_allocator *a = &t->net->allocator;
    moei_layout l = moei_layout_begin(NULL);
    moei_batch batch;
    moe_status status = moei_batch_layout(t, &l, &batch);
    size_t moments;
    if (status != MOE_OK) return moei_error(error, status, "batch = %d: %s", t->config.batch, moe_status_text(status));
    if (!moei_mul(moei_net_numbers(t->net), moei_moments(t), &moments) || !moei_add(moments, 2 * t->net->n_tensors, &t->memory_size) ||
        !moei_mul(t->memory_size, sizeof(moe_real), &t->memory_size))
        return moei_error(error, MOE_ERR_OVERFLOW, "the optimiser's moments do not fit this machine's memory");
    t->work_size = l.used;
    t->memory = (moe_real *)moei_alloc(a, t->memory_size, 1);
    t->work = moei_alloc(a, t->work_size, 1);
    t->factors = t->memory != NULL ? t->memory + moments : NULL;
    if (t->memory != NULL && t->work != NULL) return MOE_OK;
    moei_free(a, t->memory, t->memory_size);
    moei_free(a, t->work, t->work_size);
    t->memory = NULL;
    return moei_error(error, MOE_ERR_MEMORY, "no memory for %z bytes of moments and %z of work", t->memory_size, t->work_size);
}

/* The rate of the next step, as at MOE_SCHEDULE_. */
static void moei_trainer_rate(moe_trainer *t) {
    const moe_train_config *c = &t->config;
    double step = (double)t->steps, warmup = (double)c->warmup, last = (double)t->total_steps - 1.0, at;
    moe_real left;
    if (t->total_steps == 0) return;
    t->rate = c->rate;
    if (step < warmup) t->rate = c->rate * (moe_real)((step + 1.0) / (warmup + 1.0));
    if (step < warmup || !(c->final_rate < MOEI_R(1.0))) return;
    at = step > last ? 1.0 : last > warmup ? (step - warmup) / (last - warmup) : 0.0;
    left = c->schedule == MOE_SCHEDULE_LINEAR ? (moe_real)(1.0 - at) : MOEI_R(0.5) * (MOEI_R(1.0) + (moe_real)cos(3.14159265358979324 * at));
    t->rate = c->rate * (c->final_rate + (MOEI_R(1.0) - c->final_rate) * left);
}

/* The settings of a trainer, which all ranks must have alike. */
static moe_status moei_train_agree(const moe_net *net, const moe_train_config *c, moe_error *error) {
    moei_agreed s = moei_agreed_begin(net->transport, "training: ", error);
    moe_status status = moei_agreed_fields(&s, moei_train_fields, c);
    int g;
    if (status == MOE_OK) status = moei_agreed_add(&s, "seed", c->seed);
    if (status == MOE_OK) status = moei_agreed_add(&s, "checkpoint (there is one, or none)", c->checkpoint != NULL);
    if (status == MOE_OK) status = moei_agreed_end(&s);
    for (g = 0; g < c->n_groups && status == MOE_OK; g++) {
        status = moei_agreed_add(&s, "the pattern of a group", moei_hash((uint64_t)g, c->groups[g].pattern, moei_strlen(c->groups[g].pattern)));
        if (status == MOE_OK) status = moei_agreed_fields(&s, moei_group_fields, &c->groups[g]);
    }
    return status == MOE_OK ? moei_agreed_end(&s) : status;
}

/* Everything that a trainer's configuration can get wrong; *c with defaults filled in. */
static moe_status moei_trainer_config(const moe_trainer *trainer, const moe_net *net, const moe_train_config *config, int fit, moe_train_config *c, moe_error *error) {
    moe_status status;
    if (trainer == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "trainer and net must not be NULL");
    if (!net->built || !net->trainable) return moei_error(error, MOE_ERR_STATE, "the net is not built with trainable = 1");
    if (!fit && config != NULL && config->warmup > 0 && config->total_steps == 0)
        return moei_error(error, MOE_ERR_CONFIG, "warmup = %d: a trainer needs total_steps for it, which only moe_fit knows by itself", config->warmup);
    status = moei_train_check(config, c, error);
    if (status == MOE_OK) status = moei_groups_check(net, c, error);
    return status == MOE_OK ? moei_mixture_fits(net, c->criterion, error) : status;
}

/* data: the samples of moe_fit, of which each rank takes its part; NULL: there are none, or it is a trainer of the caller's own. */
static moe_status moei_trainer_make(moe_trainer *trainer, moe_net *net, const moe_train_config *config, int fit, const moe_data *data, moe_error *error) {
    moe_trainer made;
    moe_status status;
    size_t i;
    if (net == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "trainer and net must not be NULL");
    memset(&made, 0, sizeof made);
    made.net = net;
    status = moei_ranks_vote(net->transport, moei_trainer_config(trainer, net, config, fit, &made.config, error), NULL, error);
    if (status == MOE_OK && net->transport != NULL) status = moei_train_agree(net, &made.config, error);
    if (status != MOE_OK) return status;
    made.most = (size_t)made.config.batch;
    if (data != NULL && data->n < made.most) made.most = data->n;
    made.most = data != NULL ? moei_part_most(net->transport, made.most, data->length) : made.most;
    status = moei_trainer_allocate(&made, error);
    status = moei_ranks_vote(net->transport, status, NULL, error);
    if (status != MOE_OK) {
        if (made.memory != NULL) moe_trainer_free(&made);
        return status;
    }
    for (i = 0; i < net->n_tensors; i++) moei_group_factors(&made.config, &net->tensors[i], made.factors + 2 * i);
    made.config.groups = NULL;
    moe_rng_seed(&made.rng, made.config.seed);
    made.rate = made.config.rate;
    made.total_steps = (uint64_t)made.config.total_steps;
    moei_trainer_rate(&made);
    *trainer = made;
    return MOE_OK;
}

moe_status moe_trainer_init(moe_trainer *trainer, moe_net *net, const moe_train_config *config, moe_error *error) {
    return moei_trainer_make(trainer, net, config, 0, NULL, error);
}

void moe_trainer_free(moe_trainer *trainer) {
    if (trainer == NULL || trainer->net == NULL) return;
    moei_free(&trainer->net->allocator, trainer->memory, trainer->memory_size);
    moei_free(&trainer->net->allocator, trainer->work, trainer->work_size);
    memset(trainer, 0, sizeof *trainer);
}

/* Flags may change between steps, groups do not. */
static int moei_is_trained(const moe_trainer *trainer, size_t i) {
    return (trainer->net->tensors[i].flags & (unsigned)(MOE_PARAM_FROZEN | MOE_PARAM_STATE)) == 0 && trainer->factors[2 * i] > MOEI_R(0.0);
}

/* The loss of a classical mixture, and its gradients in the order of the plan. */
static moe_status moei_mixture_gradients(const moe_trainer *t, const moe_data *data, const moe_net_pass *pass, const moei_batch *b, moe_real *loss,
                                         moe_error *error) {
    const moe_layer *layer = &t->net->modules[t->net->n_modules - 1].layer;
    const moe_routing *routing = &pass->modules[t->net->n_modules - 1].layer.routing;
    moe_real temperature = layer->config.router.expert_temperature;
    moe_mixture m = moei_mixture_of(t->net, pass, data);
    moe_status status;
    size_t i, e;
    if (routing->n_real != data->n) return moei_error(error, MOE_ERR_ARGUMENT, "a classical mixture takes no padding");
    for (i = 0; i < m.n && temperature > MOEI_R(0.0); i++)
        moe_softmax(t->net->kernels, m.experts, routing->logits + i * m.experts, temperature, b->expert_p + i * m.experts);
    if (temperature > MOEI_R(0.0)) m.expert_p = b->expert_p;
    status = moe_mixture_loss(t->config.criterion, &m, loss, b->d_p, b->d_outputs, error);
    for (e = 0; e < m.experts && status == MOE_OK; e++)
        for (i = 0; i < m.n; i++) b->d_weights[e * m.n + i] = b->d_p[i * m.experts + e];
    return status;
}

/* What all ranks bring to a batch. */
typedef struct moei_brought {
    moei_tokens tokens;
    size_t counted; /* samples that the loss is the mean of */
} moei_brought;

/* What must be the same on all ranks between two batches: if it is not they would drift apart in silence. */
static uint64_t moei_trainer_mark(const moe_trainer *t) {
    uint64_t mark = moei_hash(t->steps, &t->rng.state, sizeof t->rng.state);
    size_t i;
    mark = moei_hash(mark, &t->rate, sizeof t->rate);
    mark = moei_hash(mark, &t->n_accumulated, sizeof t->n_accumulated);
    for (i = 0; i < t->net->n_tensors; i++) {
        unsigned char trained = (unsigned char)moei_is_trained(t, i);
        mark = moei_hash(mark, &trained, 1);
    }
    return mark;
}

/* MOE_ERR_STATE on all ranks when their trainers are out of step; told: words of MOEI_TRAINER_WORDS, the second is a mark. */
static moe_status moei_marks_check(const moe_transport *t, const uint64_t *told, moe_error *error) {
    int r;
    for (r = 1; r < t->n_ranks; r++)
        if (told[r * MOEI_TRAINER_WORDS + 1] != told[1])
            return moei_error(error, MOE_ERR_STATE, "rank %d is out of step with rank 0: its steps, batches since the last one, rate, random state or frozen tensors are others", r);
    return MOE_OK;
}

/* The ranks tell each other whether a batch may begin, and what they bring to it. */
static moe_status moei_trainer_meet(const moe_trainer *t, const moe_data *data, moe_status status, moei_brought *b, moe_error *error) {
    const moe_transport *transport = t->net->transport;
    moei_layout l = moei_layout_begin(t->work);
    moei_batch batch;
    uint64_t mine[MOEI_TRAINER_WORDS];
    const uint64_t *told = NULL;
    int r;
    if (transport == NULL && status != MOE_OK) return status;
    if (status == MOE_OK) b->tokens = moei_tokens_alone(data->n), b->counted = moei_counted(t->config.criterion, data);
    if (transport == NULL) return MOE_OK;
    (void)moei_batch_layout(t, &l, &batch);
    mine[1] = moei_trainer_mark(t), mine[2] = status == MOE_OK ? data->n : 0, mine[3] = status == MOE_OK ? b->counted : 0;
    status = moei_ranks_tell(transport, status, MOEI_TRAINER_WORDS, mine, batch.room, &told, error);
    if (status == MOE_OK) status = moei_marks_check(transport, told, error);
    if (status != MOE_OK) return status;
    status = moei_tokens_of(transport, told + 2, MOEI_TRAINER_WORDS, &b->tokens);
    if (status != MOE_OK) return moei_error(error, status, "the samples of all ranks: %s", moe_status_text(status));
    if (b->tokens.total == 0) return moei_error(error, MOE_ERR_ARGUMENT, "n = 0: at least one rank must have a sample");
    for (b->counted = 0, r = 0; r < transport->n_ranks; r++) b->counted += (size_t)told[r * MOEI_TRAINER_WORDS + 3];
    return MOE_OK;
}

/* *sum = that of all ranks, in their order: the same bits on all of them. */
static moe_status moei_trainer_sum(const moe_trainer *t, moe_status status, double *sum, moe_error *error) {
    const moe_transport *transport = t->net->transport;
    moei_layout l = moei_layout_begin(t->work);
    moei_batch batch;
    uint64_t mine[2];
    const uint64_t *told = NULL;
    int r;
    if (transport == NULL) return status;
    (void)moei_batch_layout(t, &l, &batch);
    mine[1] = moei_double_bits(*sum);
    status = moei_ranks_tell(transport, status, 2, mine, batch.room, &told, error);
    if (status != MOE_OK) return status;
    for (*sum = 0.0, r = 0; r < transport->n_ranks; r++) *sum += moei_bits_double(told[2 * r + 1]);
    return MOE_OK;
}

/* Forward, loss and backward on one batch, added to the gradients since the last step. What fails, fails on all ranks. */
static moe_status moei_trainer_gradients(moe_trainer *t, const moe_data *data, const moe_call *call, const moei_brought *brought, moe_net_pass *pass, moe_step *step,
                                         moe_error *error) {
    moei_layout l = moei_layout_begin(t->work);
    moei_batch batch;
    moei_returned back;
    size_t i;
    double all;
    int loss, reads = moei_reads_experts(t->net, t->config.criterion);
    moe_status status = moei_batch_layout(t, &l, &batch);
    if (t->n_accumulated == 0) moe_net_zero_gradients(t->net);
    if (status == MOE_OK) status = moei_net_pass(t->net, call, &brought->tokens, batch.net_work, pass);
    if (status != MOE_OK) return moei_error(error, status, "the net's forward pass: %s", moe_status_text(status));
    if (!reads) step->loss = moei_criterion(t->config.criterion, t->net, data, brought->counted, pass->y, batch.dy);
    else status = moei_mixture_gradients(t, data, pass, &batch, &step->loss, error);
    all = (double)step->loss;
    if (status == MOE_OK) status = moei_trainer_sum(t, status, &all, error);
    if (status != MOE_OK) return status;
    step->loss = (moe_real)all;
    step->router_loss = MOEI_R(0.0);
    for (i = 0; i < t->net->n_modules; i++) {
        const moe_routing *routing = moe_net_routing(t->net, pass, i);
        for (loss = 0; routing != NULL && loss < MOE_LOSS_COUNT; loss++) step->router_loss += routing->loss[loss];
    }
    if (!moe_is_finite(step->loss) || !moe_is_finite(step->router_loss))
        return moei_error(error, MOE_ERR_NONFINITE, "the loss is not finite: %g, of the routers %g", (double)step->loss,
                          (double)step->router_loss);
    back.dy = reads ? NULL : batch.dy;
    back.d_outputs = reads ? batch.d_outputs : NULL, back.d_weights = reads ? batch.d_weights : NULL;
    status = moei_net_backward(t->net, pass, &back, NULL);
    return status == MOE_OK ? MOE_OK : moei_error(error, status, "the net's backward pass: %s", moe_status_text(status));
}

/* *sum += the squares of numbers first..first+n-1 of a tensor's gradient: in doubles where the kernels' sum of them is not to be trusted. */
static moe_status moei_add_squares(const moe_kernels *kernels, const moe_tensor *t, size_t first, size_t n, double *sum, moe_error *error) {
    const moe_real *g = t->gradient + first, fast = moe_dot(kernels, n, g, g);
    size_t i;
    if (fast > MOEI_R(1e-30) && moe_is_finite(fast)) {
        *sum += (double)fast;
        return MOE_OK;
    }
    for (i = 0; i < n; i++) {
        if (!moe_is_finite(g[i])) return moei_error(error, MOE_ERR_NONFINITE, "%s: number %z of the gradient is not finite", t->name, first + i);
        *sum += (double)g[i] * (double)g[i];
    }
    return MOE_OK;
}

/* The squares of all trained tensors' gradients: of those that each rank has its own part of, or of the others. */
static moe_status moei_trainer_squares(const moe_trainer *trainer, int parted, double *sum, moe_error *error) {
    enum { PART = 1024 };
    moe_status status = MOE_OK;
    size_t i, j;
    for (i = 0; i < trainer->net->n_tensors; i++) {
        const moe_tensor *t = &trainer->net->tensors[i];
        if (!moei_is_trained(trainer, i) || moei_is_parted(trainer->net, t) != parted) continue;
        for (j = 0; j < t->count && status == MOE_OK; j += PART)
            status = moei_add_squares(trainer->net->kernels, t, j, t->count - j < PART ? t->count - j : (size_t)PART, sum, error);
    }
    return status;
}

/* The norm of the mean of n batches' gradients, of all trained tensors together; whole: of all ranks, else of what is here. Beyond 1e19 (float) its square, which AdamW
   forms, would not be finite. */
static moe_status moei_trainer_norm(const moe_trainer *trainer, int n, int whole, moe_real *norm, moe_error *error) {
    double sum = 0.0, parts = 0.0, length;
    moe_status status = moei_trainer_squares(trainer, 0, &sum, error);
    if (status == MOE_OK && trainer->net->transport != NULL) status = moei_trainer_squares(trainer, 1, &parts, error);
    if (whole) status = moei_trainer_sum(trainer, status, &parts, error);
    if (status != MOE_OK) return status;
    length = sqrt(sum + parts) / (double)n;
    if (!(length <= (MOE_REAL_IS_DOUBLE ? 1e150 : 1e19))) return moei_error(error, MOE_ERR_NONFINITE, "the gradient is too large to square");
    *norm = (moe_real)length;
    return MOE_OK;
}

/* The gradients of what all ranks hold become the sums over all of them: one call for what lies between the experts of two mixtures. */
static moe_status moei_trainer_reduce(const moe_trainer *trainer, moe_error *error) {
    const moe_transport *transport = trainer->net->transport;
    const size_t most = (size_t)1 << 24; /* numbers in one call */
    size_t i, n = 0;
    moe_real *from = NULL;
    moe_status status = MOE_OK;
    if (transport == NULL) return MOE_OK;
    for (i = 0; i <= trainer->net->n_tensors && status == MOE_OK; i++) {
        const moe_tensor *t = &trainer->net->tensors[i < trainer->net->n_tensors ? i : 0];
        if (i < trainer->net->n_tensors && !moei_is_parted(trainer->net, t)) {
            if (n == 0) from = t->gradient;
            n += t->count;
            continue;
        }
        for (; n > 0 && status == MOE_OK; from += n < most ? n : most, n -= n < most ? n : most) status = transport->sum(transport->ctx, n < most ? n : most, from);
    }
    return status == MOE_OK ? status : moei_error(error, MOE_ERR_TRANSPORT, "the transport's sum of gradients failed");
}

/* base to the power n, by squaring: the same bits wherever multiplication is. */
static moe_real moei_power(moe_real base, uint64_t n) {
    moe_real power = MOEI_R(1.0);
    for (; n > 0; n >>= 1, base *= base)
        if (n & 1u) power *= base;
    return power;
}

/* v = momentum v + g + decay w,  w -= rate v */
static void moei_sgd(size_t n, moe_real scale, moe_real rate, moe_real decay, moe_real momentum, const moe_real *g, moe_real *w, moe_real *v) {
    size_t i;
    for (i = 0; i < n; i++) {
        v[i] = momentum * v[i] + scale * g[i] + decay * w[i];
        w[i] -= rate * v[i];
    }
}

/* Moves all trained tensors against scale times their gradients. */
static void moei_trainer_move(moe_trainer *trainer, moe_real scale) {
    const moe_train_config *c = &trainer->config;
    moe_real *first = trainer->memory, *second = first + moei_net_numbers(trainer->net);
    moe_adamw_step a;
    size_t i;
    a.scale = scale, a.beta1 = c->beta1, a.beta2 = c->beta2, a.epsilon = c->epsilon;
    a.over1 = MOEI_R(1.0) / (MOEI_R(1.0) - moei_power(c->beta1, trainer->steps + 1));
    a.over2 = MOEI_R(1.0) / (MOEI_R(1.0) - moei_power(c->beta2, trainer->steps + 1));
    for (i = 0; i < trainer->net->n_tensors; i++) {
        const moe_tensor *t = &trainer->net->tensors[i];
        ptrdiff_t at = t->data - trainer->net->memory;
        if (!moei_is_trained(trainer, i)) continue;
        a.rate = trainer->rate * trainer->factors[2 * i], a.decay = trainer->factors[2 * i + 1];
        if (c->optimizer == MOE_OPTIMIZER_ADAMW) moe_adamw(trainer->net->kernels, &a, t->count, t->gradient, first + at, second + at, t->data);
        else moei_sgd(t->count, scale, a.rate, a.decay, c->momentum, t->gradient, t->data, first + at);
    }
}

/* Checks a batch; changes nothing. */
static moe_status moei_trainer_check(const moe_trainer *trainer, const moe_data *batch, moe_error *error) {
    moe_status status;
    size_t least = trainer->net->transport == NULL;
    if (batch == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "trainer and batch must not be NULL");
    if (trainer->n_accumulated == INT32_MAX) return moei_error(error, MOE_ERR_STATE, "%d batches since the last update", trainer->n_accumulated);
    if (batch->n < least || batch->n > trainer->most)
        return moei_error(error, MOE_ERR_ARGUMENT, "n = %z: must be %z to batch = %z", batch->n, least, trainer->most);
    if (!moe_is_finite(trainer->rate))
        return moei_error(error, MOE_ERR_ARGUMENT, "rate = %g: must be a finite number", (double)trainer->rate);
    status = moei_data_check(trainer->net, batch, trainer->config.criterion, error);
    if (status != MOE_OK) return status;
    if (batch->n == 0) return MOE_OK;
    return moei_routers_check(trainer->net, batch, moei_batch_sequences(batch, batch->n), 1, error);
}

/* The call of a batch that is checked. */
static moe_status moei_trainer_call(moe_trainer *t, const moe_data *data, moe_call *call, moe_error *error) {
    moei_layout l = moei_layout_begin(t->work);
    moei_batch batch;
    moe_status status = moei_trainer_check(t, data, error);
    if (status != MOE_OK) return status;
    (void)moei_batch_layout(t, &l, &batch);
    *call = moei_data_call(data, batch.sequences);
    call->training = 1;
    call->rng = &t->rng;
    status = moei_net_call_check(t->net, call, 0);
    if (status == MOE_OK && call->batch != NULL) status = MOE_ERR_ARGUMENT;
    return status == MOE_OK ? status : moei_error(error, status, "the net's forward pass: %s", moe_status_text(status));
}

/* The first half of a step; *norm is that of the mean gradient so far, with last = 1 of all ranks, whose gradients are then added up. The routers see the
   pass last, when nothing can fail any more. */
static moe_status moei_trainer_add(moe_trainer *trainer, const moe_data *batch, int last, moe_step *made, moe_real *norm, moe_error *error) {
    const moe_transport *transport;
    moe_net_pass pass;
    moe_rng rng;
    moe_call call;
    moei_brought brought;
    moe_status status;
    if (trainer == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "trainer and batch must not be NULL");
    if (trainer->net == NULL) return moei_error(error, MOE_ERR_STATE, "the trainer is not made");
    transport = trainer->net->transport;
    status = moei_trainer_call(trainer, batch, &call, error);
    status = moei_trainer_meet(trainer, batch, status, &brought, error);
    if (status != MOE_OK) return status;
    rng = trainer->rng;
    status = moei_trainer_gradients(trainer, batch, &call, &brought, &pass, made, error);
    if (status == MOE_OK && last) status = moei_trainer_reduce(trainer, error);
    if (status == MOE_OK) status = moei_trainer_norm(trainer, trainer->n_accumulated + 1, last, norm, error);
    if (!last) status = moei_ranks_vote(transport, status, NULL, error);
    if (status == MOE_OK && (status = moe_net_observe(trainer->net, &pass)) != MOE_OK)
        (void)moei_error(error, status, "the routers' state: %s", moe_status_text(status));
    if (status == MOE_OK) trainer->n_accumulated++;
    else trainer->rng = rng, trainer->n_accumulated = 0;
    return status;
}

/* The second half, with the norm of the mean gradient. */
static moe_status moei_trainer_apply(moe_trainer *trainer, moe_real norm, moe_error *error) {
    moe_real scale = trainer->config.clip > MOEI_R(0.0) && norm > trainer->config.clip ? trainer->config.clip / norm : MOEI_R(1.0);
    moe_status status = moe_net_advance(trainer->net);
    size_t i;
    if (status != MOE_OK) return moei_error(error, status, "the routers' state: %s", moe_status_text(status));
    for (i = 0; i < trainer->net->n_modules; i++) trainer->net->modules[i].layer.is_packed = 0; /* the tensors change */
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
    if (status == MOE_OK && step != NULL) step->loss = made.loss, step->router_loss = made.router_loss;
    return status;
}

/* Whether a step can be taken. */
static moe_status moei_update_check(const moe_trainer *trainer, moe_error *error) {
    if (trainer->n_accumulated < 1) return moei_error(error, MOE_ERR_STATE, "no batch since the last update");
    if (!moe_is_finite(trainer->rate))
        return moei_error(error, MOE_ERR_ARGUMENT, "rate = %g: must be a finite number", (double)trainer->rate);
    return MOE_OK;
}

/* The ranks tell each other whether they can, and whether they stand at the same place. */
static moe_status moei_update_meet(const moe_trainer *trainer, moe_error *error) {
    const moe_transport *t = trainer->net->transport;
    moei_layout l = moei_layout_begin(trainer->work);
    moei_batch batch;
    uint64_t mine[MOEI_TRAINER_WORDS] = {0};
    const uint64_t *told = NULL;
    moe_status status = moei_update_check(trainer, error);
    if (t == NULL) return status;
    (void)moei_batch_layout(trainer, &l, &batch);
    mine[1] = moei_trainer_mark(trainer);
    status = moei_ranks_tell(t, status, MOEI_TRAINER_WORDS, mine, batch.room, &told, error);
    return status == MOE_OK ? moei_marks_check(t, told, error) : status;
}

moe_status moe_trainer_update(moe_trainer *trainer, moe_step *step, moe_error *error) {
    moe_real norm;
    moe_status status;
    if (trainer == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "trainer must not be NULL");
    if (trainer->net == NULL) return moei_error(error, MOE_ERR_STATE, "no batch since the last update");
    status = moei_update_meet(trainer, error);
    if (status != MOE_OK) return status;
    status = moei_trainer_reduce(trainer, error);
    if (status == MOE_OK) status = moei_trainer_norm(trainer, trainer->n_accumulated, 1, &norm, error);
    if (status == MOE_OK) status = moei_trainer_apply(trainer, norm, error);
    if (status != MOE_OK && trainer->net->transport != NULL) trainer->n_accumulated = 0; /* the gradients are sums by now */
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

/* ---- modular networks ------------------------------------------------------------------------------------------------------------ */

static moe_status moei_modular_layout(moe_modular *m, moei_layout *l) {
    const moe_net *net = m->trainer->net;
    size_t n = (size_t)m->trainer->config.batch, experts = 0, i;
    moe_status status = moe_net_work_size(net, n, 1, &m->net_size);
    if (status != MOE_OK) return status;
    for (i = 0, m->n_mixtures = 0; i < net->n_modules; i++)
        if (net->modules[i].kind == MOE_MODULE_MIXTURE) experts += (size_t)net->modules[i].layer.config.router.n_experts, m->n_mixtures++;
    if (!moei_mul(n, experts, &m->n_teacher)) return MOE_ERR_OVERFLOW;
    m->teacher = moei_take_reals(l, m->n_teacher, 1);
    m->candidate = (int32_t *)moei_take(l, n, m->n_mixtures * sizeof(int32_t));
    m->best = (double *)moei_take(l, n, sizeof(double));
    m->drawn = (double *)moei_take(l, n, sizeof(double));
    m->changed = (unsigned char *)moei_take(l, n, 1);
    m->sequences = (int32_t *)moei_take(l, n + 1, sizeof(int32_t));
    m->net_work = moei_take(l, m->net_size, 1);
    return l->overflow ? MOE_ERR_OVERFLOW : MOE_OK;
}

moe_status moe_modular_init(moe_modular *modular, moe_trainer *trainer, moe_error *error) {
    moei_layout l = moei_layout_begin(NULL);
    moe_modular made;
    moe_status status;
    size_t i;
    if (modular == NULL || trainer == NULL || trainer->net == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "modular and trainer must not be NULL");
    if (trainer->net->transport != NULL) return moei_error(error, MOE_ERR_UNSUPPORTED, "a modular network lives in one process: net.transport must be NULL");
    for (i = 0; i < trainer->net->n_modules; i++) {
        const moe_router_config *c = &trainer->net->modules[i].layer.config.router;
        if (trainer->net->modules[i].kind != MOE_MODULE_MIXTURE) continue;
        if (c->select != MOE_SELECT_SAMPLE || c->top_k != 1 || c->k_end > 1 || c->student || !(c->loss_distill > MOEI_R(0.0)))
            return moei_error(error, MOE_ERR_CONFIG, "module %z (mixture): a modular network needs select = sample, top_k = 1 and loss_distill without student", i);
    }
    memset(&made, 0, sizeof made);
    made.trainer = trainer;
    status = moei_modular_layout(&made, &l);
    if (status != MOE_OK) return moei_error(error, status, "batch = %d: %s", trainer->config.batch, moe_status_text(status));
    if (trainer->config.criterion > MOE_CRITERION_SQUARED_ERROR)
        return moei_error(error, MOE_ERR_CONFIG, "criterion = %s: a modular network takes cross_entropy or squared_error",
                          moei_criterion_names[trainer->config.criterion]);
    if (made.n_mixtures == 0) return moei_error(error, MOE_ERR_CONFIG, "the net has no mixture layer");
    made.memory_size = l.used;
    made.memory = moei_alloc(&trainer->net->allocator, made.memory_size, 1);
    if (made.memory == NULL) return moei_error(error, MOE_ERR_MEMORY, "no memory for %z bytes of work", made.memory_size);
    l = moei_layout_begin(made.memory);
    (void)moei_modular_layout(&made, &l);
    *modular = made;
    return MOE_OK;
}

void moe_modular_free(moe_modular *modular) {
    if (modular == NULL || modular->memory == NULL) return;
    moei_free(&modular->trainer->net->allocator, modular->memory, modular->memory_size);
    memset(modular, 0, sizeof *modular);
}

/* One pass: with given choices, or (NULL) drawn ones, which go to m->candidate. scores[n] receives -loss + sum ln p(choice) of each sample. */
static moe_status moei_modular_pass(moe_modular *m, const moe_data *batch, const int32_t *given, double *scores) {
    const moe_net *net = m->trainer->net;
    moe_net_pass pass;
    moe_call call;
    moe_status status;
    size_t i, t, at = 0, width = (size_t)net->d_out;
    call = moei_data_call(batch, m->sequences);
    call.training = 1, call.rng = &m->trainer->rng;
    call.given = given, call.teacher = m->teacher;
    status = moe_net_forward(net, &call, m->net_work, m->net_size, &pass);
    if (status != MOE_OK) return status;
    for (t = 0; t < batch->n; t++) {
        moe_data row = moei_data_part(net, batch, t, 1);
        scores[t] = -(double)moei_criterion(m->trainer->config.criterion, net, &row, moei_counted(m->trainer->config.criterion, &row), pass.y + t * width, NULL);
        if (!(scores[t] > -MOEI_HUGE)) return MOE_ERR_NONFINITE;
    }
    for (i = 0; i < net->n_modules; i++) {
        const moe_routing *r = moe_net_routing(net, &pass, i);
        for (t = 0; r != NULL && t < batch->n; t++, at++) {
            double p = r->n_choices[t] > 0 ? (double)r->probabilities[t * r->n_experts + (size_t)r->choices[t]] : 0.0;
            m->candidate[at] = r->n_choices[t] > 0 ? r->choices[t] : -1;
            scores[t] += log(p > 1e-300 ? p : 1e-300);
        }
    }
    return MOE_OK;
}

/* E: choices become the best of themselves and the draws. */
static moe_status moei_modular_expect(moe_modular *m, const moe_data *batch, int draws, int32_t *choices) {
    size_t n = batch->n, t, i;
    int draw, known = 1;
    moe_status status;
    for (i = 0; i < m->n_teacher; i++) m->teacher[i] = MOEI_R(0.0); /* its loss is not used here */
    for (i = 0; i < n * m->n_mixtures; i++) known &= choices[i] >= 0;
    if (!known && draws < 1) return MOE_ERR_ARGUMENT;
    for (t = 0; t < n; t++) m->best[t] = -MOEI_HUGE, m->changed[t] = 0;
    if (known && (status = moei_modular_pass(m, batch, choices, m->best)) != MOE_OK) return status;
    for (draw = 0; draw < draws; draw++) {
        status = moei_modular_pass(m, batch, NULL, m->drawn);
        if (status != MOE_OK) return status;
        for (t = 0; t < n; t++) {
            if (!(m->drawn[t] > m->best[t])) continue;
            m->best[t] = m->drawn[t];
            for (i = t; i < n * m->n_mixtures; i += n)
                if (choices[i] != m->candidate[i]) choices[i] = m->candidate[i], m->changed[t] = 1;
        }
    }
    return MOE_OK;
}

/* The assigned choices as a teacher of the gates: 1 at the assigned module, 0 elsewhere. */
static void moei_modular_teach(moe_modular *m, size_t n, const int32_t *choices) {
    const moe_net *net = m->trainer->net;
    moe_real *teacher = m->teacher;
    size_t i, t;
    for (i = 0; i < m->n_teacher; i++) teacher[i] = MOEI_R(0.0);
    for (i = 0; i < net->n_modules; i++) {
        size_t experts = (size_t)net->modules[i].layer.config.router.n_experts;
        if (net->modules[i].kind != MOE_MODULE_MIXTURE) continue;
        for (t = 0; t < n; t++) teacher[t * experts + (size_t)*choices++] = MOEI_R(1.0);
        teacher += n * experts;
    }
}

moe_status moe_modular_step(moe_modular *modular, const moe_data *batch, int draws, int m_steps, int32_t *choices, moe_modular_step_result *result,
                            moe_error *error) {
    moe_modular *m = modular;
    moe_modular_step_result made;
    moe_data assigned;
    moe_call call;
    moe_status status;
    size_t t, changed = 0; /* counted: a sum of shares may round above 1 */
    int step;
    memset(&made, 0, sizeof made);
    memset(&call, 0, sizeof call);
    if (m == NULL || batch == NULL || choices == NULL || m->memory == NULL || draws < 0 || m_steps < 0)
        return moei_error(error, MOE_ERR_ARGUMENT, "modular, batch and choices must not be NULL, draws and m_steps not negative");
    if (batch->n < 1 || batch->n > (size_t)m->trainer->config.batch)
        return moei_error(error, MOE_ERR_ARGUMENT, "n = %z: must be 1 to batch = %d", batch->n, m->trainer->config.batch);
    status = moei_data_check(m->trainer->net, batch, m->trainer->config.criterion, error);
    if (status != MOE_OK) return status;
    status = moei_modular_expect(m, batch, draws, choices);
    if (status != MOE_OK) return moei_error(error, status, "the E-step: %s", moe_status_text(status));
    for (t = 0; t < batch->n; t++) made.log_likelihood += m->best[t] / (double)batch->n, changed += m->changed[t];
    made.changed = (double)changed / (double)batch->n;
    moei_modular_teach(m, batch->n, choices);
    if (batch->call != NULL) call = *batch->call;
    call.given = choices, call.teacher = m->teacher;
    assigned = *batch;
    assigned.call = &call;
    for (step = 0; step < m_steps && status == MOE_OK; step++) status = moe_trainer_step(m->trainer, &assigned, &made.last, error);
    if (status == MOE_OK && result != NULL) *result = made;
    return status;
}

/* ---- fit ----------------------------------------------------------------------------------------------------------------------- */

/* What a checkpoint says beside its tensors. */
typedef struct moei_checkpoint {
    uint64_t format, optimizer, steps, rng, rate, position[4], batch, accumulate, seed;
    uint64_t n, length; /* the samples of moe_fit; 0: of a trainer alone */
} moei_checkpoint;

static moei_checkpoint moei_checkpoint_of(const moe_trainer *trainer);
static moe_status moei_checkpoint_write(const moe_trainer *trainer, const moei_checkpoint *c, moe_stream *stream, moe_error *error);

/* One training from beginning to end; all memory is taken before the first step. */
typedef struct moei_fit {
    moe_trainer trainer;
    const moe_data *train, *test; /* test NULL: none */
    void *memory;
    size_t memory_size;
    size_t *order;         /* [units] where samples, or sequences, are taken from */
    size_t unit, units;    /* samples that stay together, and how many of these there are */
    moe_rng rng;           /* of the order; trainer.rng is for the routers' random stages */
    moe_real *x, *targets; /* one batch, gathered: this rank's part of it */
    int32_t *labels, *token_ids;
    void *test_work;
    size_t test_size;
    double loss, router_loss; /* sums over the samples of this epoch, the loss over those that count */
    size_t seen, counted;     /* samples of this epoch so far, and those that count in the loss */
    moe_progress progress;
} moei_fit;

static moe_status moei_fit_layout(moei_fit *f, moei_layout *l) {
    const moe_net *net = f->trainer.net;
    size_t batch = f->trainer.most;
    int labels = !moei_is_squared(f->trainer.config.criterion);
    moe_status status = f->test != NULL ? moei_evaluate_size(net, f->trainer.config.criterion, f->test, &f->test_size) : MOE_OK;
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
    if (c->checkpoint != NULL) return moei_error(error, MOE_ERR_UNSUPPORTED, "checkpoint = '%s': MOE_NO_STDIO leaves no files", c->checkpoint);
#endif
    if (c->resume && c->checkpoint == NULL) return moei_error(error, MOE_ERR_CONFIG, "resume = 1: checkpoint must name the file");
    return MOE_OK;
}

/* Everything that samples can get wrong, before the first step. */
static moe_status moei_fit_check(const moei_fit *f, moe_error *error) {
    const moe_net *net = f->trainer.net;
    const moe_data *train = f->train;
    size_t batch = (size_t)f->trainer.config.batch;
    int criterion = f->trainer.config.criterion;
    moe_status status = train != NULL ? moei_samples_alone(net, train, error) : moei_error(error, MOE_ERR_ARGUMENT, "data must not be NULL");
    if (status == MOE_OK) status = moei_routers_check(net, train, moei_batch_sequences(train, train->n < batch ? train->n : batch), 1, error);
    if (status == MOE_OK) status = moei_data_check(net, train, criterion, error);
    if (status == MOE_OK && train->n == 0) status = moei_error(error, MOE_ERR_ARGUMENT, "there are no samples to train on");
    if (status == MOE_OK && train->length > 0 && train->n > batch && batch % train->length != 0)
        status = moei_error(error, MOE_ERR_ARGUMENT, "batch = %z: must be a multiple of length = %z", batch, train->length);
    if (status == MOE_OK && f->test != NULL) status = moei_samples_alone(net, f->test, error);
    if (status == MOE_OK && f->test != NULL) status = moei_routers_check(net, f->test, 1, 0, error);
    return status == MOE_OK && f->test != NULL ? moei_data_check(net, f->test, criterion, error) : status;
}

/* Steps of an epoch and of all; two generators, so that the order of the samples can be made again without the random stages of routers. */
static void moei_fit_count(moei_fit *f) {
    moe_trainer *t = &f->trainer;
    size_t batches = (f->train->n - 1) / (size_t)t->config.batch + 1;
    moe_rng other;
    f->progress.epochs = t->config.epochs;
    f->progress.steps = (batches - 1) / (size_t)t->config.accumulate + 1;
    f->progress.total_steps = (uint64_t)f->progress.steps * (uint64_t)f->progress.epochs;
    if (t->total_steps == 0) t->total_steps = f->progress.total_steps;
    moei_trainer_rate(t);
    moe_rng_seed(&f->rng, t->config.seed);
    moe_rng_seed(&other, ~t->config.seed);
    moe_rng_seed(&t->rng, moe_rng_next(&other));
}

/* Whether all ranks have the same samples. */
static moe_status moei_fit_agree(const moei_fit *f, moe_error *error) {
    const moe_net *net = f->trainer.net;
    moei_agreed s = moei_agreed_begin(net->transport, "", error);
    moe_status status;
    if (net->transport == NULL) return MOE_OK;
    (void)moei_agreed_add(&s, "whether there are samples to test on", f->test != NULL);
    status = moei_agreed_end(&s);
    if (status == MOE_OK) status = moei_data_agree(net, f->train, f->trainer.config.criterion, "the samples to train on: ", error);
    return status == MOE_OK && f->test != NULL ? moei_data_agree(net, f->test, f->trainer.config.criterion, "the samples to test on: ", error) : status;
}

/* *l: the layout of what is allocated. */
static moe_status moei_fit_allocate(moei_fit *f, moei_layout *l, moe_error *error) {
    moe_status status = moei_fit_layout(f, l);
    if (status != MOE_OK) return moei_error(error, status, "work memory: %s", moe_status_text(status));
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
    status = moei_ranks_vote(net->transport, status, NULL, error);
    if (status == MOE_OK) status = moei_fit_agree(f, error);
    if (status != MOE_OK) return status;
    f->unit = f->train->length > 0 ? f->train->length : 1;
    f->units = f->train->n / f->unit;
    status = moei_ranks_vote(net->transport, moei_fit_allocate(f, &l, error), NULL, error);
    if (status != MOE_OK) return status;
    l = moei_layout_begin(f->memory);
    (void)moei_fit_layout(f, &l);
    for (i = 0; i < f->units; i++) f->order[i] = i;
    moei_fit_count(f);
    return MOE_OK;
}

/* Fisher and Yates. */
static void moei_fit_shuffle(moei_fit *f) {
    size_t i, j, kept;
    for (i = f->units; i > 1; i--) {
        j = (size_t)moe_rng_below(&f->rng, i);
        kept = f->order[i - 1];
        f->order[i - 1] = f->order[j];
        f->order[j] = kept;
    }
}

/* The sample that stands in place i of this epoch's order. */
static size_t moei_fit_row(const moei_fit *f, size_t i) { return f->order[i / f->unit] * f->unit + i % f->unit; }

/* The samples of the batch that begins with sample `from` of this epoch's order. */
static size_t moei_fit_size(const moei_fit *f, size_t from) {
    size_t left = f->train->n - from, batch = (size_t)f->trainer.config.batch;
    return left < batch ? left : batch;
}

/* This rank's part of them. */
static moe_data moei_fit_batch(moei_fit *f, size_t from) {
    const moe_transport *t = f->trainer.net->transport;
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

/* How many of n samples from `from` on count in the loss. */
static size_t moei_fit_counted(const moei_fit *f, size_t from, size_t n) {
    size_t i, counted = 0;
    for (i = from; i < from + n; i++) counted += f->labels == NULL || f->train->labels[moei_fit_row(f, i)] >= 0;
    return counted;
}

/* A failure in the middle, with the place where it happened. */
static moe_status moei_fit_failed(const moei_fit *f, const moe_error *why, moe_error *error) {
    return moei_error(error, why->code, "epoch %d, step %z: %s", f->progress.epoch, f->progress.step, why->message);
}

/* One step of the optimiser, on so many batches as make one. */
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
    int stop;
    p->loss = f->counted > 0 ? (moe_real)(f->loss / (double)f->counted) : MOEI_R(0.0);
    p->router_loss = (moe_real)(f->router_loss / (double)f->seen);
    p->epoch_ended = p->step == p->steps;
    p->total_step = f->trainer.steps;
    memset(&p->test, 0, sizeof p->test);
    if (f->test != NULL && (p->epoch_ended || (c->evaluate_every > 0 && p->total_step % (uint64_t)c->evaluate_every == 0))) {
        moe_error why;
        if (moei_evaluate(f->trainer.net, f->test, c->criterion, f->test_work, &p->test, &why) != MOE_OK) return moei_fit_failed(f, &why, error);
    }
    stop = c->progress != NULL && c->progress(c->progress_ctx, p) != 0;
    status = moei_ranks_vote(f->trainer.net->transport, MOE_OK, &stop, error);
    if (status != MOE_OK || !stop) return status;
    return moei_error(error, MOE_ERR_STOPPED, "the progress callback stopped training in epoch %d, step %z", p->epoch, p->step);
}

/* Where training stands, for the checkpoint: at the end of an epoch, before the first step of the next. */
static void moei_fit_position(moei_fit *f) {
    uint64_t *position = f->trainer.position;
    double sums[2];
    memset(position, 0, sizeof f->trainer.position);
    position[0] = (uint64_t)f->progress.epoch - (f->progress.epoch_ended ? 0 : 1);
    if (f->progress.epoch_ended) return;
    position[1] = f->progress.step;
    sums[0] = f->loss, sums[1] = f->router_loss;
    memcpy(position + 2, sums, sizeof sums);
}

#ifndef MOE_NO_STDIO

static moei_checkpoint moei_fit_numbers(const moei_fit *f) {
    moei_checkpoint c = moei_checkpoint_of(&f->trainer);
    c.n = f->train->n, c.length = f->train->length;
    return c;
}

/* What moe_file_replace hands to its callback. */
typedef struct moei_fit_saved {
    const moei_fit *fit;
    moe_error *error;
} moei_fit_saved;

static moe_status moei_fit_write(void *ctx, moe_stream *stream) {
    const moei_fit_saved *s = (const moei_fit_saved *)ctx;
    moei_checkpoint c = moei_fit_numbers(s->fit);
    return moei_checkpoint_write(&s->fit->trainer, &c, stream, s->error);
}

/* Writes the checkpoint when it is due, or when training is about to stop. */
static moe_status moei_fit_keep(moei_fit *f, int stopped, moe_error *error) {
    const moe_train_config *c = &f->trainer.config;
    const moe_progress *p = &f->progress;
    moei_fit_saved s;
    int due = c->checkpoint_every > 0 ? p->total_step % (uint64_t)c->checkpoint_every == 0 : p->epoch_ended;
    moei_fit_position(f);
    s.fit = f, s.error = error;
    if (c->checkpoint == NULL || (!due && !stopped && p->total_step != p->total_steps)) return MOE_OK;
    return moe_file_replace(c->checkpoint, moei_fit_write, &s, error);
}

#else

static moe_status moei_fit_keep(moei_fit *f, int stopped, moe_error *error) {
    (void)stopped, (void)error;
    moei_fit_position(f);
    return MOE_OK;
}

#endif

/* The first samples of an epoch's order that were seen before training stopped. */
static void moei_fit_seen(moei_fit *f) {
    const uint64_t *position = f->trainer.position;
    double sums[2];
    memcpy(sums, position + 2, sizeof sums);
    f->loss = sums[0], f->router_loss = sums[1];
    f->progress.step = (size_t)position[1];
    f->seen = f->progress.step * (size_t)f->trainer.config.accumulate * (size_t)f->trainer.config.batch;
    f->counted = 0;
}

static moe_status moei_fit_epoch(moei_fit *f, moe_error *error) {
    moe_status status = MOE_OK, kept;
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
        kept = moei_fit_keep(f, status == MOE_ERR_STOPPED, error);
        if (kept != MOE_OK) status = kept;
    }
    return status;
}

#ifndef MOE_NO_STDIO

static moe_status moei_checkpoint_open(const moe_trainer *trainer, const void *bytes, size_t size, moe_file *file, moei_checkpoint *c, moe_error *error);
static moe_status moei_checkpoint_apply(moe_trainer *trainer, moe_file *file, const moei_checkpoint *c, moe_error *error);
static moe_status moei_checkpoint_differs(const moei_checkpoint *has, const moei_checkpoint *wanted, moe_error *error);

/* Whether a checkpoint is one of this training. */
static moe_status moei_fit_continues(const moei_fit *f, const moei_checkpoint *c, moe_error *error) {
    moei_checkpoint wanted = moei_fit_numbers(f);
    double sums[2];
    moe_status status = moei_checkpoint_differs(c, &wanted, error);
    if (status != MOE_OK || c->position[0] >= (uint64_t)f->progress.epochs) return status;
    memcpy(sums, c->position + 2, sizeof sums);
    if (c->position[1] < f->progress.steps && c->steps == c->position[0] * f->progress.steps + c->position[1] && fabs(sums[0]) < MOEI_HUGE &&
        fabs(sums[1]) < MOEI_HUGE)
        return MOE_OK;
    return moei_error(error, MOE_ERR_FORMAT, "the checkpoint's position is none of this training");
}

static moe_status moei_file_load(const char *path, const moe_allocator *allocator, moe_buffer *buffer, moe_error *error);

static moe_status moei_fit_resume(moei_fit *f, moe_error *error) {
    const char *path = f->trainer.config.checkpoint;
    moe_buffer buffer;
    moei_checkpoint c;
    moe_file file;
    moe_status status;
    if (!f->trainer.config.resume || moei_file_is_missing(path)) return MOE_OK;
    status = moei_file_load(path, &f->trainer.net->allocator, &buffer, error);
    if (status == MOE_OK) status = moei_checkpoint_open(&f->trainer, buffer.data, buffer.size, &file, &c, error);
    if (status == MOE_OK) status = moei_fit_continues(f, &c, error);
    if (status == MOE_OK) status = moei_checkpoint_apply(&f->trainer, &file, &c, error);
    moe_buffer_free(&buffer);
    return status;
}

#else

static moe_status moei_fit_resume(moei_fit *f, moe_error *error) {
    (void)f, (void)error;
    return MOE_OK;
}

#endif

static moe_status moei_fit_run(moei_fit *f, moe_error *error) {
    uint64_t from, epoch;
    moe_status status = moei_fit_resume(f, error);
    from = f->trainer.position[0];
    for (epoch = 0; status == MOE_OK && epoch < (uint64_t)f->progress.epochs; epoch++) {
        f->progress.epoch = (int)epoch + 1;
        if (epoch < from) moei_fit_shuffle(f); /* seen before training stopped */
        else status = moei_fit_epoch(f, error);
    }
    return status;
}

moe_status moe_fit(moe_net *net, const moe_data *train, const moe_data *test, const moe_train_config *config, moe_error *error) {
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

/* ==== the classical mixture =================================================================================================== */

/* log sum exp of a stream: its largest term, and the sum of exp(term - largest) over the others. */
typedef struct moei_lse {
    double largest, rest;
} moei_lse;

static const moei_lse moei_lse_empty = {-1e308, -1.0}; /* the first term makes the rest 0 */

static void moei_lse_add(moei_lse *s, double term) {
    if (term > s->largest) {
        s->rest = (s->rest + 1.0) * exp(s->largest - term);
        s->largest = term;
    } else s->rest += exp(term - s->largest);
}

static double moei_lse_value(const moei_lse *s) { return s->largest + log1p(s->rest); }

/* A term's share of the sum: the shares add up to 1, however large the terms. */
static double moei_lse_share(const moei_lse *s, double term) { return exp(term - s->largest) / (1.0 + s->rest); }

/* Whether a double may be converted to the real type. */
static int moei_fits_real(double v) { return fabs(v) <= (MOE_REAL_IS_DOUBLE ? 1e308 : 1e38); }

static moe_real moei_cut(double v) {
    double limit = MOE_REAL_IS_DOUBLE ? 1e308 : 1e38;
    return (moe_real)(v > limit ? limit : v < -limit ? -limit : v);
}

/* The right answers to n samples: labels below width, or targets [n,width]. */
static moe_status moei_answers_check(int squared, const int32_t *labels, const moe_real *targets, size_t n, size_t width,
                                     moe_error *error) {
    size_t t;
    if ((squared ? (const void *)targets : (const void *)labels) == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "%s must not be NULL", squared ? "targets" : "labels");
    if (squared) return moei_reals_check("targets", targets, n, width, error);
    for (t = 0; t < n; t++)
        if (labels[t] < 0 || (size_t)labels[t] >= width)
            return moei_error(error, MOE_ERR_ARGUMENT, "labels[%z] = %d: must be 0 to %z", t, (int)labels[t], width - 1);
    return MOE_OK;
}

/* ---- losses -------------------------------------------------------------------------------------------------------------------- */

/* Ways to put the loss l of one output, that of classes or half the squared error, on a mixture:
     blend   l(sum_i p_i o_i / T)     mean   sum_i p_i l(o_i)     log   -log sum_i p_i exp(-sharpness l(o_i)) */
enum { MOEI_MIX_BLEND = 0, MOEI_MIX_MEAN, MOEI_MIX_LOG };
enum { MOEI_ANSWER_BLEND = 0, MOEI_ANSWER_PROBABILITIES, MOEI_ANSWER_CHOSEN };

typedef struct moei_mix {
    int rule, squared, answer;
    double sharpness;
} moei_mix;

static const moei_mix moei_mixes[MOE_CRITERION_COUNT] = {
    {MOEI_MIX_BLEND, 0, MOEI_ANSWER_BLEND, 1.0},       /* cross_entropy */
    {MOEI_MIX_BLEND, 1, MOEI_ANSWER_BLEND, 1.0},       /* squared_error */
    {MOEI_MIX_LOG, 0, MOEI_ANSWER_PROBABILITIES, 1.0}, /* expectation */
    {MOEI_MIX_MEAN, 0, MOEI_ANSWER_CHOSEN, 1.0},       /* stochastic */
    {MOEI_MIX_MEAN, 1, MOEI_ANSWER_CHOSEN, 1.0},       /* stochastic_squared */
    {MOEI_MIX_LOG, 0, MOEI_ANSWER_CHOSEN, 0.5},        /* jacobs */
    {MOEI_MIX_LOG, 1, MOEI_ANSWER_CHOSEN, 1.0}};       /* jacobs_squared: half of the whole squared error */

/* One output of a sample, scale * sum_i p_i o_i, and its loss; an expert's own output is the sum over it alone. */
typedef struct moei_blend {
    const moe_real *o, *p; /* o_i begins at o + i stride */
    size_t experts, stride, label;
    double scale, at_label, loss;
    const moe_real *target; /* NULL: the loss is that of classes */
} moei_blend;

/* All experts of sample t weighted by p [E], or with p NULL expert i alone. */
static moei_blend moei_blend_of(const moe_mixture *m, size_t t, const moe_real *p, size_t i) {
    static const moe_real alone = MOEI_R(1.0);
    moei_blend b;
    memset(&b, 0, sizeof b);
    b.o = m->outputs + (p != NULL ? t : i * m->n + t) * m->width;
    b.p = p != NULL ? p : &alone;
    b.experts = p != NULL ? m->experts : 1;
    b.stride = m->n * m->width;
    b.scale = m->temperature > MOEI_R(0.0) ? 1.0 / (double)m->temperature : 1.0;
    return b;
}

static double moei_blend_at(const moei_blend *b, size_t j) {
    double sum = 0.0;
    size_t i;
    for (i = 0; i < b->experts; i++) sum += (double)b->p[i] * (double)b->o[i * b->stride + j];
    return sum * b->scale;
}

/* The same with its loss. Terms are taken relative to the label's: a small loss beside large outputs keeps its digits. */
static moei_blend moei_blend_measured(const moei_mix *mix, const moe_mixture *m, size_t t, const moe_real *p, size_t i) {
    moei_blend b = moei_blend_of(m, t, p, i);
    moei_lse sum = moei_lse_empty;
    size_t j;
    if (mix->squared) b.target = m->targets + t * m->width;
    else b.label = (size_t)m->labels[t], b.at_label = moei_blend_at(&b, b.label);
    for (j = 0; j < m->width; j++) {
        double e = moei_blend_at(&b, j) - (mix->squared ? (double)b.target[j] : b.at_label);
        if (mix->squared) b.loss += 0.5 * e * e;
        else moei_lse_add(&sum, e);
    }
    if (!mix->squared) b.loss = moei_lse_value(&sum);
    return b;
}

/* dl / d output_j */
static double moei_blend_slope(const moei_blend *b, size_t j) {
    if (b->target != NULL) return moei_blend_at(b, j) - (double)b->target[j];
    return exp(moei_blend_at(b, j) - b->at_label - b->loss) - (j == b->label ? 1.0 : 0.0);
}

/* The loss of sample t under the gate p [E]. */
static double moei_mix_loss(const moei_mix *mix, const moe_mixture *m, size_t t, const moe_real *p) {
    moei_lse log_sum = moei_lse_empty;
    double sum = 0.0, loss;
    size_t i;
    if (mix->rule == MOEI_MIX_BLEND) return moei_blend_measured(mix, m, t, p, 0).loss;
    for (i = 0; i < m->experts; i++) {
        if (!(p[i] > MOEI_R(0.0))) continue;
        loss = moei_blend_measured(mix, m, t, NULL, i).loss;
        if (mix->rule == MOEI_MIX_MEAN) sum += (double)p[i] * loss;
        else moei_lse_add(&log_sum, log((double)p[i]) - mix->sharpness * loss);
    }
    return mix->rule == MOEI_MIX_MEAN ? sum : -moei_lse_value(&log_sum);
}

/* d_p [E], and d_o with expert i's row at d_o + i n C, receive the gradient of sample t under the gate p, and q for d_o. By p_i: of a blend
   sum_j l'_j o_ij / T, else l_i or -exp(L - s l_i). By o_i: its weight q_i, or s times its posterior, times l' where it enters. */
static void moei_mix_backward(const moei_mix *mix, const moe_mixture *m, size_t t, const moe_real *p, const moe_real *q, moe_real *d_p,
                              moe_real *d_o) {
    int blend = mix->rule == MOEI_MIX_BLEND, logs = mix->rule == MOEI_MIX_LOG;
    double loss_p = logs ? moei_mix_loss(mix, m, t, p) : 0.0, loss_q = logs && q != p ? moei_mix_loss(mix, m, t, q) : loss_p, by_p, weight;
    moei_blend gate = moei_blend_measured(mix, m, t, blend ? p : NULL, 0), into = blend ? moei_blend_measured(mix, m, t, q, 0) : gate;
    size_t i, j;
    for (i = 0; i < m->experts; i++) {
        if (!blend && i > 0) gate = into = moei_blend_measured(mix, m, t, NULL, i);
        by_p = logs ? -exp(loss_p - mix->sharpness * into.loss) : blend ? 0.0 : into.loss;
        for (j = 0; blend && d_p != NULL && j < m->width; j++)
            by_p += gate.scale * moei_blend_slope(&gate, j) * (double)gate.o[i * gate.stride + j];
        weight = (double)q[i];
        if (logs && weight > 0.0) weight = mix->sharpness * exp(log(weight) + loss_q - mix->sharpness * into.loss);
        if (d_p != NULL) d_p[i] = moei_cut(by_p / (double)m->n);
        for (j = 0; d_o != NULL && j < m->width; j++)
            d_o[i * gate.stride + j] = moei_cut(weight > 0.0 ? weight * into.scale * moei_blend_slope(&into, j) / (double)m->n : 0.0);
    }
}

static moe_status moei_gates_check(const char *name, const moe_real *p, size_t n, size_t experts, moe_error *error) {
    size_t i;
    moe_status status = moei_reals_check(name, p, n, experts, error);
    for (i = 0; status == MOE_OK && i < n * experts; i++)
        if (p[i] < MOEI_R(0.0))
            return moei_error(error, MOE_ERR_ARGUMENT, "%s[%z][%z] = %g: must not be below 0", name, i / experts, i % experts,
                              (double)p[i]);
    return status;
}

/* result: where the call writes. learning: the right answers are read too. */
static moe_status moei_mixture_check(int criterion, const moe_mixture *m, const void *result, int learning, moe_error *error) {
    moe_real low = criterion == MOE_CRITERION_CROSS_ENTROPY ? MOEI_R(1e-6) : MOEI_R(1.0), high = MOEI_R(1.0) / low;
    size_t rows, cells;
    moe_status status;
    if (criterion < 0 || criterion >= MOE_CRITERION_COUNT)
        return moei_error(error, MOE_ERR_ARGUMENT, "criterion = %d: there is no such one", criterion);
    if (m == NULL || result == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "mixture and result must not be NULL");
    if (m->experts == 0 || m->width == 0)
        return moei_error(error, MOE_ERR_ARGUMENT, "experts = %z, width = %z: must be 1 or more", m->experts, m->width);
    if (!moe_is_finite(m->temperature) || m->temperature < MOEI_R(0.0) || m->temperature > high ||
        (m->temperature > MOEI_R(0.0) && m->temperature < low))
        return moei_error(error, MOE_ERR_ARGUMENT, "temperature = %g: must be %g to %g", (double)m->temperature, (double)low, (double)high);
    if (m->n == 0) return MOE_OK;
    if (!moei_mul(m->n, m->experts, &rows) || !moei_mul(rows, m->width, &cells) || !moei_mul(cells, sizeof(moe_real), &cells))
        return moei_error(error, MOE_ERR_OVERFLOW, "n = %z, experts = %z, width = %z: too large", m->n, m->experts, m->width);
    if (m->p == NULL || m->outputs == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "p and outputs must not be NULL");
    status = moei_gates_check("p", m->p, m->n, m->experts, error);
    if (status == MOE_OK) status = moei_reals_check("outputs", m->outputs, rows, m->width, error);
    if (status != MOE_OK || !learning) return status;
    if (m->expert_p != NULL) status = moei_gates_check("expert_p", m->expert_p, m->n, m->experts, error);
    return status != MOE_OK ? status : moei_answers_check(moei_mixes[criterion].squared, m->labels, m->targets, m->n, m->width, error);
}

/* The mean loss under the gate p [n,E]. */
static moe_status moei_mixture_mean(int criterion, const moe_mixture *m, const moe_real *p, double *mean, moe_error *error) {
    size_t t;
    *mean = 0.0;
    for (t = 0; t < m->n; t++) {
        *mean += moei_mix_loss(&moei_mixes[criterion], m, t, p + t * m->experts) / (double)m->n;
        if (!moei_fits_real(*mean))
            return moei_error(error, MOE_ERR_NONFINITE, "the loss of sample %z is not finite: p is all 0, or numbers are too large", t);
    }
    return MOE_OK;
}

moe_status moe_mixture_loss(int criterion, const moe_mixture *mixture, moe_real *loss, moe_real *d_p, moe_real *d_outputs,
                            moe_error *error) {
    const moe_mixture *m = mixture;
    double mean, unused;
    size_t t;
    moe_status status = moei_mixture_check(criterion, m, loss, 1, error);
    if (status == MOE_OK) status = moei_mixture_mean(criterion, m, m->p, &mean, error);
    if (status == MOE_OK && m->expert_p != NULL) status = moei_mixture_mean(criterion, m, m->expert_p, &unused, error);
    if (status != MOE_OK) return status;
    for (t = 0; (d_p != NULL || d_outputs != NULL) && t < m->n; t++) {
        const moe_real *p = m->p + t * m->experts, *q = m->expert_p != NULL ? m->expert_p + t * m->experts : p;
        moei_mix_backward(&moei_mixes[criterion], m, t, p, q, d_p != NULL ? d_p + t * m->experts : NULL,
                          d_outputs != NULL ? d_outputs + t * m->width : NULL);
    }
    *loss = (moe_real)mean;
    return MOE_OK;
}

/* The largest p, the first of equals; with an rng one drawn in proportion to p. */
static size_t moei_mixture_choice(size_t n, const moe_real *p, moe_rng *rng) {
    size_t i, chosen = moei_largest(n, p);
    double left = 0.0;
    if (rng == NULL) return chosen;
    for (i = 0; i < n; i++) left += (double)p[i];
    left *= (double)moe_rng_uniform(rng);
    for (i = 0; i < n && left >= 0.0; i++) {
        if (p[i] > MOEI_R(0.0)) chosen = i;
        left -= (double)p[i];
    }
    return chosen;
}

/* answer [C] += p softmax(output of expert i) */
static void moei_mixture_add(const moe_mixture *m, size_t t, size_t i, moe_real p, moe_real *answer) {
    const moei_blend own = moei_blend_of(m, t, NULL, i);
    moei_lse sum = moei_lse_empty;
    size_t j;
    for (j = 0; j < m->width; j++) moei_lse_add(&sum, moei_blend_at(&own, j));
    for (j = 0; j < m->width; j++) answer[j] = moei_cut((double)answer[j] + (double)p * moei_lse_share(&sum, moei_blend_at(&own, j)));
}

moe_status moe_mixture_answer(int criterion, const moe_mixture *mixture, moe_rng *rng, moe_real *answer, moe_error *error) {
    const moe_mixture *m = mixture;
    size_t t, i, j;
    moe_status status = moei_mixture_check(criterion, m, answer, 0, error);
    if (status != MOE_OK) return status;
    for (t = 0; t < m->n; t++, answer += m->width) {
        const moe_real *p = m->p + t * m->experts;
        int chosen = moei_mixes[criterion].answer == MOEI_ANSWER_CHOSEN, sum = moei_mixes[criterion].answer == MOEI_ANSWER_PROBABILITIES;
        moei_blend b = moei_blend_of(m, t, chosen ? NULL : p, chosen ? moei_mixture_choice(m->experts, p, rng) : 0);
        for (j = 0; j < m->width; j++) answer[j] = sum ? MOEI_R(0.0) : moei_cut(moei_blend_at(&b, j));
        for (i = 0; sum && i < m->experts; i++) moei_mixture_add(m, t, i, p[i], answer);
    }
    return MOE_OK;
}

/* ---- the hierarchical mixture -------------------------------------------------------------------------------------------------- */

static const char *const moei_hme_names[] = {"gaussian", "softmax", NULL};

#define MOEI_H moe_hme_config

static const moe_field moei_hme_fields[] = {
    MOEI_INT(MOEI_H, d_in, 1, MOE_MAX_WIDTH, "width of x"),
    MOEI_INT(MOEI_H, d_out, 1, MOE_MAX_WIDTH, "numbers or classes"),
    MOEI_INT(MOEI_H, n_groups, 1, MOE_MAX_EXPERTS, "groups"),
    MOEI_INT(MOEI_H, n_experts, 1, MOE_MAX_EXPERTS, "experts in a group"),
    MOEI_CHOICE(MOEI_H, family, MOE_HME_COUNT, moei_hme_names, "how experts see y"),
    MOEI_INT(MOEI_H, steps, 1, 100, "IRLS steps per EM iteration"),
    MOEI_REAL(MOEI_H, variance, 1e-12, 1e12, "fixed variance of gaussian experts"),
    MOEI_REAL(MOEI_H, min_variance, 1e-12, 1e12, "least variance of gaussian experts"),
    MOEI_FIELDS_END};

static moe_status moei_hme_check(const moe_hme_config *config, moe_hme_config *out, moe_error *error) {
    moe_status status;
    if (config == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "config must not be NULL");
    status = moei_fields_check(moei_hme_fields, config, error);
    if (status != MOE_OK) return status;
    if (config->d_in == 0 || config->d_out == 0)
        return moei_error(error, MOE_ERR_CONFIG, "d_in = %d, d_out = %d: both must be set", config->d_in, config->d_out);
    *out = *config;
    moei_default(&out->n_groups, 2);
    moei_default(&out->n_experts, 2);
    moei_default(&out->steps, 2);
    moei_default_real(&out->min_variance, MOEI_R(1e-6));
    return MOE_OK;
}

/* Every model, gate or expert, is some rows of d + 1 weights; the widest has no more of them than all together. */
static void moei_hme_layout(moe_hme *hme, moei_layout *l) {
    size_t groups = (size_t)hme->config.n_groups, rows, square, widest;
    hme->row = (size_t)hme->config.d_in + 1;
    hme->width = (size_t)hme->config.d_out;
    hme->in_group = (size_t)hme->config.n_experts;
    if (!moei_mul(groups, hme->in_group, &hme->all) || !moei_mul(hme->all, hme->width, &rows) || !moei_add(rows, hme->all, &rows) ||
        !moei_add(rows, groups, &rows) || !moei_mul(rows, hme->row, &rows) || !moei_add(rows, hme->all, &hme->n_parameters) ||
        !moei_mul(hme->row, hme->row, &square)) {
        l->overflow = 1;
        return;
    }
    widest = groups > hme->in_group ? groups : hme->in_group;
    if (widest < hme->width) widest = hme->width;
    hme->parameters = (double *)moei_take(l, hme->n_parameters, sizeof(double));
    hme->kept = (double *)moei_take(l, hme->n_parameters, sizeof(double));
    hme->best = (double *)moei_take(l, widest * hme->row, sizeof(double));
    hme->gradient = (double *)moei_take(l, widest * hme->row, sizeof(double));
    hme->normal = (double *)moei_take(l, square, sizeof(double));
    hme->outputs = (double *)moei_take(l, widest, sizeof(double));
    hme->groups = (double *)moei_take(l, groups, sizeof(double));
    if (l->base == NULL) return;
    hme->gate = hme->parameters;
    hme->gates = hme->gate + groups * hme->row;
    hme->experts = hme->gates + hme->all * hme->row;
    hme->variances = hme->experts + hme->all * hme->width * hme->row;
}

/* Gates divide the inputs from the start; experts begin nearly alike, so that at first the gates tell them apart. */
static void moei_hme_start(moe_hme *hme, uint64_t seed) {
    double *p = hme->parameters, over_root = 1.0 / sqrt((double)hme->config.d_in);
    moe_rng rng;
    moe_rng_seed(&rng, seed);
    for (; p < hme->experts; p++) *p = 2.0 * over_root * (double)moe_rng_normal(&rng);
    for (; p < hme->variances; p++) *p = 0.1 * over_root * (double)moe_rng_normal(&rng);
    for (; p < hme->parameters + hme->n_parameters; p++) *p = hme->config.variance > MOEI_R(0.0) ? (double)hme->config.variance : 1.0;
}

moe_status moe_hme_create(moe_hme *hme, const moe_hme_config *config, uint64_t seed, const moe_allocator *allocator, moe_error *error) {
    moei_layout l = moei_layout_begin(NULL);
    moe_hme made;
    moe_status status;
    if (hme == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "hme must not be NULL");
    memset(&made, 0, sizeof made);
    status = moei_hme_check(config, &made.config, error);
    if (status != MOE_OK) return status;
    if (!moei_can_allocate(allocator)) return moei_error(error, MOE_ERR_ARGUMENT, "allocator must not be NULL in this build");
    if (allocator != NULL) made.allocator = *allocator;
    moei_hme_layout(&made, &l);
    if (l.overflow) return moei_error(error, MOE_ERR_OVERFLOW, "the mixture does not fit this machine's memory");
    made.memory_size = l.used;
    made.memory = moei_alloc(&made.allocator, made.memory_size, 1);
    if (made.memory == NULL) return moei_error(error, MOE_ERR_MEMORY, "no memory for %z bytes of mixture", made.memory_size);
    l = moei_layout_begin(made.memory);
    moei_hme_layout(&made, &l);
    moei_hme_start(&made, seed);
    *hme = made;
    return MOE_OK;
}

void moe_hme_free(moe_hme *hme) {
    if (hme == NULL) return;
    moei_free(&hme->allocator, hme->memory, hme->memory_size);
    memset(hme, 0, sizeof *hme);
}

/* w [d+1] . (x, 1) */
static double moei_hme_dot(const moe_hme *hme, const double *w, const moe_real *x) {
    double sum = w[hme->row - 1];
    size_t q;
    for (q = 0; q + 1 < hme->row; q++) sum += w[q] * (double)x[q];
    return sum;
}

/* log sum exp over rows [n,d+1] of weights. */
static double moei_hme_total(const moe_hme *hme, size_t n, const double *rows, const moe_real *x) {
    moei_lse sum = moei_lse_empty;
    size_t k;
    for (k = 0; k < n; k++) moei_lse_add(&sum, moei_hme_dot(hme, rows + k * hme->row, x));
    return moei_lse_value(&sum);
}

/* log p_ij(y | x) of sample t for expert ij; 0 when data has no y. Not below -1e300, so that posteriors stay numbers. */
static double moei_hme_density(const moe_hme *hme, const moe_data *data, size_t t, size_t expert) {
    const double *w = hme->experts + expert * hme->width * hme->row;
    const moe_real *x = data->x + t * (hme->row - 1);
    double v = hme->variances[expert], sum = 0.0, e;
    size_t k;
    if (hme->config.family == MOE_HME_SOFTMAX) {
        if (data->labels == NULL) return 0.0;
        sum = moei_hme_dot(hme, w + (size_t)data->labels[t] * hme->row, x) - moei_hme_total(hme, hme->width, w, x);
    }
    for (k = 0; hme->config.family == MOE_HME_GAUSSIAN && data->targets != NULL && k < hme->width; k++) {
        e = (double)data->targets[t * hme->width + k] - moei_hme_dot(hme, w + k * hme->row, x);
        sum -= 0.5 * (e * e / v + log(6.28318530717958648 * v));
    }
    return sum > -1e300 ? sum : -1e300;
}

/* log p(y | x) of sample t; group [G] and expert [G,E], both or neither NULL, receive h_i and h_{j|i}. */
static double moei_hme_sample(const moe_hme *hme, const moe_data *data, size_t t, double *group, double *expert) {
    const moe_real *x = data->x + t * (hme->row - 1);
    moei_lse prior = moei_lse_empty, joint = moei_lse_empty;
    size_t groups = (size_t)hme->config.n_groups, i, e;
    for (i = 0; i < groups; i++) {
        moei_lse inner_prior = moei_lse_empty, inner_joint = moei_lse_empty;
        double z = moei_hme_dot(hme, hme->gate + i * hme->row, x), inner;
        for (e = i * hme->in_group; e < (i + 1) * hme->in_group; e++) {
            double z_e = moei_hme_dot(hme, hme->gates + e * hme->row, x), v = z_e + moei_hme_density(hme, data, t, e);
            moei_lse_add(&inner_prior, z_e);
            moei_lse_add(&inner_joint, v);
            if (expert != NULL) expert[e] = v;
        }
        for (e = i * hme->in_group; expert != NULL && e < (i + 1) * hme->in_group; e++) expert[e] = moei_lse_share(&inner_joint, expert[e]);
        inner = z + moei_lse_value(&inner_joint) - moei_lse_value(&inner_prior);
        moei_lse_add(&prior, z);
        moei_lse_add(&joint, inner);
        if (group != NULL) group[i] = inner;
    }
    for (i = 0; group != NULL && i < groups; i++) group[i] = moei_lse_share(&joint, group[i]);
    return moei_lse_value(&joint) - moei_lse_value(&prior);
}

/* The E-step: the mean of log p(y | x), and in h [n,G,E] (NULL: not wanted) h_i h_{j|i}. */
static double moei_hme_expect(const moe_hme *hme, const moe_data *data, double *h) {
    double sum = 0.0;
    size_t t, e;
    for (t = 0; t < data->n; t++) {
        sum += moei_hme_sample(hme, data, t, h != NULL ? hme->groups : NULL, h) / (double)data->n;
        for (e = 0; h != NULL && e < hme->all; e++) h[e] *= hme->groups[e / hme->in_group];
        if (h != NULL) h += hme->all;
    }
    return sum;
}

/* y [C] = sum_ij g_i g_{j|i} y_ij; 0 when that is no number. */
static int moei_hme_answer(const moe_hme *hme, const moe_real *x, moe_real *y) {
    double top = moei_hme_total(hme, (size_t)hme->config.n_groups, hme->gate, x), inner = 0.0, total = 0.0, g, o;
    int softmax = hme->config.family == MOE_HME_SOFTMAX, good = 1;
    size_t e, k;
    for (k = 0; k < hme->width; k++) y[k] = MOEI_R(0.0);
    for (e = 0; e < hme->all; e++) {
        const double *gate = hme->gates + e * hme->row, *w = hme->experts + e * hme->width * hme->row;
        if (e % hme->in_group == 0) inner = moei_hme_total(hme, hme->in_group, gate, x);
        if (softmax) total = moei_hme_total(hme, hme->width, w, x);
        g = exp(moei_hme_dot(hme, hme->gate + e / hme->in_group * hme->row, x) - top + moei_hme_dot(hme, gate, x) - inner);
        for (k = 0; k < hme->width; k++) {
            o = moei_hme_dot(hme, w + k * hme->row, x);
            y[k] = moei_cut((double)y[k] + g * (softmax ? exp(o - total) : o));
        }
    }
    for (k = 0; k < hme->width; k++) good &= moe_is_finite(y[k]);
    return good;
}

/* right: y must be there. result: where the call writes. */
static moe_status moei_hme_check_data(const moe_hme *hme, const moe_data *data, int right, const void *result, moe_error *error) {
    size_t cells;
    int squared;
    moe_status status;
    if (hme == NULL || data == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "hme and data must not be NULL");
    if (hme->memory == NULL) return moei_error(error, MOE_ERR_STATE, "the mixture is not created");
    if (data->n == 0) return MOE_OK;
    if (data->x == NULL || result == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "x and the array for results must not be NULL");
    cells = hme->all > hme->width ? hme->all : hme->width; /* of the widest array, in a row */
    if (!moei_mul(data->n, cells > hme->row ? cells : hme->row, &cells) || !moei_mul(cells, sizeof(double), &cells))
        return moei_error(error, MOE_ERR_OVERFLOW, "n = %z: too large", data->n);
    status = moei_reals_check("x", data->x, data->n, hme->row - 1, error);
    squared = hme->config.family == MOE_HME_GAUSSIAN;
    right |= squared ? data->targets != NULL : data->labels != NULL;
    if (status != MOE_OK || !right) return status;
    return moei_answers_check(squared, data->labels, data->targets, data->n, hme->width, error);
}

/* Every log-likelihood passes here on its way out. */
static moe_status moei_hme_give(double value, double *result, moe_error *error) {
    if (!(fabs(value) <= 1e308)) return moei_error(error, MOE_ERR_NONFINITE, "the log-likelihood is not finite: x or y is too large");
    if (result != NULL) *result = value;
    return MOE_OK;
}

moe_status moe_hme_predict(const moe_hme *hme, size_t n, const moe_real *x, moe_real *y, moe_error *error) {
    moe_data data;
    moe_status status;
    size_t t;
    memset(&data, 0, sizeof data);
    data.n = n;
    data.x = x;
    status = moei_hme_check_data(hme, &data, 0, y, error);
    for (t = 0; status == MOE_OK && t < n; t++)
        if (!moei_hme_answer(hme, x + t * (hme->row - 1), y + t * hme->width))
            return moei_error(error, MOE_ERR_NONFINITE, "y[%z] is not finite: x[%z] is too large", t, t);
    return status;
}

moe_status moe_hme_log_likelihood(const moe_hme *hme, const moe_data *data, double *log_likelihood, moe_error *error) {
    moe_status status = moei_hme_check_data(hme, data, 1, log_likelihood, error);
    return status != MOE_OK ? status : moei_hme_give(moei_hme_expect(hme, data, NULL), log_likelihood, error);
}

moe_status moe_hme_posteriors(const moe_hme *hme, const moe_data *data, double *group, double *expert, moe_error *error) {
    moe_status status = moei_hme_check_data(hme, data, 0, group != NULL ? expert : NULL, error);
    size_t t;
    for (t = 0; status == MOE_OK && t < data->n; t++, group += hme->config.n_groups, expert += hme->all)
        status = moei_hme_give(moei_hme_sample(hme, data, t, group, expert), NULL, error);
    return status;
}

/* ---- the hierarchical mixture: learning ---------------------------------------------------------------------------------------- */

/* What is fitted on its own, weighted by posteriors: model 0 is the top gate, then come the groups' gates, then the experts. */
typedef struct moei_model {
    double *weights;    /* [rows,d+1] */
    double *variance;   /* of a gaussian expert, else NULL */
    size_t rows;
    size_t first, span; /* gate: row k's share of a sample is the sum of h[first + k span ...], span of them. Expert: h[first], span 0 */
} moei_model;

typedef struct moei_sums {
    double objective; /* the model's log-likelihood, weighted by posteriors; of a gaussian expert minus half its squared errors */
    double mass;      /* sum of posteriors */
} moei_sums;

static moei_model moei_model_of(const moe_hme *hme, size_t number) {
    moei_model m = {hme->gate, NULL, (size_t)hme->config.n_groups, 0, hme->in_group};
    if (number == 0) return m;
    if (number <= m.rows) {
        m.first = (number - 1) * hme->in_group;
        m.weights = hme->gates + m.first * hme->row;
        m.rows = hme->in_group;
        m.span = 1;
        return m;
    }
    m.first = number - 1 - m.rows;
    m.weights = hme->experts + m.first * hme->width * hme->row;
    m.variance = hme->config.family == MOE_HME_GAUSSIAN ? hme->variances + m.first : NULL;
    m.rows = hme->width;
    m.span = 0;
    return m;
}

static double moei_sum(size_t n, const double *v) {
    double sum = 0.0;
    size_t i;
    for (i = 0; i < n; i++) sum += v[i];
    return sum;
}

/* Adds sample t with posteriors h [G,E] to *sums and leaves d objective / d output in hme->outputs from..to-1. Returns the curvature along
   the last of them: the mass for squares, for softmax the mass times p (1 - p), but at least 2^-16 of the mass, lest a sharp gate leap. */
static double moei_model_sample(moe_hme *hme, const moei_model *m, const moe_data *data, const double *h, size_t t, size_t from, size_t to,
                                moei_sums *sums) {
    double mass = moei_sum(m->span > 0 ? m->rows * m->span : 1, h + m->first), least = mass / 65536.0, curvature = mass, share, p;
    const moe_real *x = data->x + t * (hme->row - 1);
    double total, *o = hme->outputs;
    moei_lse lse = moei_lse_empty;
    size_t i;
    if (!(mass > 0.0)) return 0.0;
    sums->mass += mass;
    for (i = 0; i < m->rows; i++) {
        o[i] = moei_hme_dot(hme, m->weights + i * hme->row, x);
        if (m->variance == NULL) moei_lse_add(&lse, o[i]);
    }
    total = m->variance == NULL ? moei_lse_value(&lse) : 0.0;
    for (i = 0; i < m->rows; i++) {
        o[i] -= m->variance != NULL ? (double)data->targets[t * m->rows + i] : total;
        if (m->variance != NULL) {
            sums->objective -= 0.5 * mass * o[i] * o[i];
            o[i] *= -mass;
            continue;
        }
        share = m->span > 0 ? moei_sum(m->span, h + m->first + i * m->span) : (size_t)data->labels[t] == i ? mass : 0.0;
        sums->objective += share * o[i];
        if (i < from || i >= to) continue;
        p = exp(o[i]);
        o[i] = share - mass * p;
        curvature = mass * p * (1.0 - p);
    }
    return curvature > least ? curvature : least;
}

/* All samples. For rows from..to-1, perhaps none: their hme->gradient [rows,d+1], and in the lower half of hme->normal the sum of
   curvature (x, 1) (x, 1)^T along the last of them, which for squares is that of all. */
static moei_sums moei_model_pass(moe_hme *hme, const moei_model *m, const moe_data *data, const double *h, size_t from, size_t to) {
    moei_sums sums = {0.0, 0.0};
    size_t t, k, a, b;
    memset(hme->gradient + from * hme->row, 0, (to - from) * hme->row * sizeof(double));
    if (to > from) memset(hme->normal, 0, hme->row * hme->row * sizeof(double));
    for (t = 0; t < data->n; t++, h += hme->all) {
        const moe_real *x = data->x + t * (hme->row - 1);
        double curvature = moei_model_sample(hme, m, data, h, t, from, to, &sums);
        for (a = 0; to > from && curvature > 0.0 && a < hme->row; a++) {
            double x_a = a + 1 < hme->row ? (double)x[a] : 1.0;
            for (k = from; k < to; k++) hme->gradient[k * hme->row + a] += hme->outputs[k] * x_a;
            for (b = 0; b <= a; b++) hme->normal[a * hme->row + b] += curvature * x_a * (b < a ? (double)x[b] : x_a);
        }
    }
    return sums;
}

/* A := L with L L^T = A + 1e-10 diag(A), in the lower half of a [n,n]; 0 when that fails. An input that is always 0 gets a 1. */
static int moei_cholesky(size_t n, double *a) {
    size_t i, j, k;
    for (i = 0; i < n; i++)
        for (j = 0; j <= i; j++) {
            double sum = a[i * n + j];
            if (i == j) sum = sum > 0.0 ? sum * (1.0 + 1e-10) : 1.0;
            for (k = 0; k < j; k++) sum -= a[i * n + k] * a[j * n + k];
            if (i > j) a[i * n + j] = sum / a[j * n + j];
            else if (sum > 0.0) a[i * n + i] = sqrt(sum);
            else return 0;
        }
    return 1;
}

/* v := A^-1 v; returns v . A^-1 v as it was. */
static double moei_cholesky_solve(size_t n, const double *a, double *v) {
    double gain = 0.0;
    size_t i, k;
    for (i = 0; i < n; i++) {
        for (k = 0; k < i; k++) v[i] -= a[i * n + k] * v[k];
        v[i] /= a[i * n + i];
        gain += v[i] * v[i];
    }
    for (i = n; i-- > 0;) {
        for (k = i + 1; k < n; k++) v[i] -= a[k * n + i] * v[k];
        v[i] /= a[i * n + i];
    }
    return gain;
}

/* One Newton step of rows from..to-1 of a model: least squares for the change of their weights, halved until the objective does not lose.
   Along one row a softmax has no curvature beyond 1/4 of the mass (Boehning 1992), so with the least one of 2^-16 that is by 2^-14. Returns
   the sums where it ends. */
static moei_sums moei_model_improve(moe_hme *hme, const moei_model *m, const moe_data *data, const double *h, size_t from, size_t to) {
    moei_sums before = moei_model_pass(hme, m, data, h, from, to), after;
    double gain = 0.0, scale, *weights = m->weights + from * hme->row, *step = hme->gradient + from * hme->row;
    size_t i, count = (to - from) * hme->row;
    if (!moei_cholesky(hme->row, hme->normal)) return before;
    for (i = 0; i < count; i += hme->row) gain += moei_cholesky_solve(hme->row, hme->normal, step + i);
    if (!(gain > 1e-15 * fabs(before.objective))) return before;
    memcpy(hme->best, weights, count * sizeof(double));
    for (scale = 1.0; scale > 5e-5; scale *= 0.5) {
        for (i = 0; i < count; i++) weights[i] = hme->best[i] + scale * step[i];
        after = moei_model_pass(hme, m, data, h, 0, 0);
        if (after.objective >= before.objective) return after;
    }
    memcpy(weights, hme->best, count * sizeof(double));
    return before;
}

static void moei_model_variance(moe_hme *hme, const moei_model *m, double variance) {
    double least = (double)hme->config.min_variance;
    if (m->variance != NULL && !(hme->config.variance > MOEI_R(0.0))) *m->variance = variance > least ? variance : least;
}

/* The M-step of one model: squares are solved at once, a softmax row after row, several times. */
static void moei_model_maximise(moe_hme *hme, const moei_model *m, const moe_data *data, const double *h) {
    moei_sums sums;
    size_t i;
    if (m->variance != NULL) {
        sums = moei_model_improve(hme, m, data, h, 0, m->rows);
        if (sums.mass > 1e-250) moei_model_variance(hme, m, -2.0 * sums.objective / (sums.mass * (double)m->rows));
        return;
    }
    for (i = 0; i < (size_t)hme->config.steps * m->rows; i++) (void)moei_model_improve(hme, m, data, h, i % m->rows, i % m->rows + 1);
}

/* One step up the gradient of the mean log-likelihood. */
static void moei_model_ascend(moe_hme *hme, const moei_model *m, const moe_data *data, const double *h, double rate) {
    moei_sums sums = moei_model_pass(hme, m, data, h, 0, m->rows);
    double over = m->variance != NULL ? 1.0 / *m->variance : 1.0;
    size_t i;
    for (i = 0; i < m->rows * hme->row; i++) m->weights[i] += rate * over * hme->gradient[i];
    if (m->variance != NULL)
        moei_model_variance(hme, m, *m->variance * exp(rate * (-sums.objective * over - 0.5 * sums.mass * (double)m->rows)));
}

/* The E-step, and a copy of the parameters to go back to. */
static moe_status moei_hme_begin(moe_hme *hme, const moe_data *data, double *h, double *before, moe_error *error) {
    moe_status status = moei_hme_check_data(hme, data, 1, h, error);
    if (status == MOE_OK) status = moei_hme_give(moei_hme_expect(hme, data, h), before, error);
    if (status == MOE_OK) memcpy(hme->kept, hme->parameters, hme->n_parameters * sizeof(double));
    return status;
}

/* Back to the copy unless the result is good and made of numbers. */
static int moei_hme_settle(moe_hme *hme, int good) {
    size_t i;
    for (i = 0; i < hme->n_parameters; i++) good = good && fabs(hme->parameters[i]) <= 1e308;
    if (!good) memcpy(hme->parameters, hme->kept, hme->n_parameters * sizeof(double));
    return good;
}

static size_t moei_hme_models(const moe_hme *hme) { return 1 + (size_t)hme->config.n_groups + hme->all; }

moe_status moe_hme_em(moe_hme *hme, const moe_data *data, double *h, double *log_likelihood, moe_error *error) {
    double before = 0.0, after; /* gcc -O3 does not see that begin sets it */
    size_t i;
    moe_status status = moei_hme_begin(hme, data, h, &before, error);
    if (status != MOE_OK) return status;
    for (i = 0; i < moei_hme_models(hme); i++) {
        const moei_model m = moei_model_of(hme, i);
        moei_model_maximise(hme, &m, data, h);
    }
    after = moei_hme_expect(hme, data, NULL);
    if (!moei_hme_settle(hme, after >= before)) after = before;
    if (log_likelihood != NULL) *log_likelihood = after;
    return MOE_OK;
}

moe_status moe_hme_gradient(moe_hme *hme, const moe_data *data, moe_real rate, double *h, double *log_likelihood, moe_error *error) {
    double before = 0.0;
    size_t i;
    moe_status status = moei_hme_begin(hme, data, h, &before, error);
    if (status != MOE_OK) return status;
    if (!moe_is_finite(rate)) return moei_error(error, MOE_ERR_ARGUMENT, "rate = %g: must be a finite number", (double)rate);
    for (i = 0; data->n > 0 && i < moei_hme_models(hme); i++) {
        const moei_model m = moei_model_of(hme, i);
        moei_model_ascend(hme, &m, data, h, (double)rate / (double)data->n);
    }
    if (!moei_hme_settle(hme, 1))
        return moei_error(error, MOE_ERR_NONFINITE, "rate = %g: a parameter would not be finite", (double)rate);
    if (log_likelihood != NULL) *log_likelihood = before;
    return MOE_OK;
}

#endif /* MOE_NO_TRAIN */

/* Files, models in the making and reports are in no forward or backward pass: gcc compiles them at -O1 where the rest is at -O2 or -O3, which
   takes a fifth less time for the whole. Nothing depends on it. */
#if defined(__GNUC__) && !defined(__clang__) && !defined(__PCC__) && !defined(__INTEL_COMPILER) && defined(__OPTIMIZE__) && !defined(__OPTIMIZE_SIZE__)
#define MOEI_OFF_THE_PATH
#endif
#ifdef MOEI_OFF_THE_PATH
#pragma GCC push_options
#pragma GCC optimize("O1")
#endif

/* ==== files of nets and layers ================================================================================================ */

/* The metadata key whose value is the configuration, as JSON, and the format that this version writes and reads. */
#define MOEI_CONFIG_KEY "moe"
enum { MOEI_CONFIG_FORMAT = 1 };

/* Rows that say how something is run, not what it is: never in files. */
static int moei_is_saved(const moe_field *field) { return moei_strcmp(field->name, "kernels") != 0; }

/* ---- writing the configuration ------------------------------------------------------------------------------------------------- */

#ifndef MOE_NO_TRAIN

/* The growing text; after a failure all else is ignored. */
typedef struct moei_config_text {
    moe_buffer buffer;
    moe_status status;
} moei_config_text;

static void moei_config_put(moei_config_text *c, const char *s) {
    if (c->status == MOE_OK) c->status = moei_buffer_write(&c->buffer, s, moei_strlen(s));
}

/* "name":value for every field that is not 0, or for every field; comma: there are members before. */
static void moei_config_put_fields(moei_config_text *c, const moe_field *fields, const void *config, int all, int comma) {
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
    moei_module_config config = moei_module_config_of(m);
    moei_config_put(c, "{\"module\":\"");
    moei_config_put(c, moei_module_names[m->kind]);
    moei_config_put(c, "\"");
    moei_config_put_fields(c, moei_module_fields(m->kind), moei_module_settings(&config, m->kind), !moei_is_layer(m) && m->kind != MOE_MODULE_ATTENTION, 1);
    moei_config_put(c, "}");
}

static void moei_config_put_net(moei_config_text *c, const moe_net *net) {
    moei_module_config small;
    size_t i;
    memset(&small, 0, sizeof small);
    small.d_in = net->d_in;
    moei_config_put(c, "{\"format\":1,\"net\":{");
    moei_config_put_fields(c, moei_net_fields, &small, 1, 0);
    moei_config_put(c, ",\"modules\":[");
    for (i = 0; i < net->n_modules; i++) {
        if (i > 0) moei_config_put(c, ",");
        moei_config_put_module(c, &net->modules[i]);
    }
    moei_config_put(c, "]}}");
}

static void moei_config_put_layer(moei_config_text *c, const moe_layer_config *config) {
    moei_config_put(c, "{\"format\":1,\"layer\":{");
    moei_config_put_fields(c, moe_layer_fields(), config, 0, 0);
    moei_config_put(c, "}}");
}

/* Writes the file and gives the text back. */
static moe_status moei_config_write(moei_config_text *c, moe_stream *stream, const moe_tensor *tensors, size_t n_tensors,
                                    moe_error *error) {
    moe_metadata metadata;
    moe_status status = c->status;
    if (status == MOE_OK) status = moei_buffer_write(&c->buffer, "", 1);
    metadata.key = MOEI_CONFIG_KEY;
    metadata.value = (const char *)c->buffer.data;
    if (status == MOE_OK) status = moe_file_write(stream, tensors, n_tensors, &metadata, 1, &c->buffer.allocator, error);
    else (void)moei_error(error, status, "the configuration's text: %s", moe_status_text(status));
    moe_buffer_free(&c->buffer);
    return status;
}

moe_status moe_net_write(const moe_net *net, moe_stream *stream, moe_error *error) {
    moei_config_text c;
    if (net == NULL || stream == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "net and stream must not be NULL");
    if (!net->built) return moei_error(error, MOE_ERR_STATE, "the net is not built");
    memset(&c, 0, sizeof c);
    c.buffer.allocator = net->allocator;
    moei_config_put_net(&c, net);
    return moei_config_write(&c, stream, net->tensors, net->n_tensors, error);
}

moe_status moe_layer_write(const moe_layer *layer, moe_stream *stream, moe_error *error) {
    moei_config_text c;
    moe_tensor tensors[MOE_LAYER_SLOTS];
    size_t n = 0;
    if (layer == NULL || stream == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "layer and stream must not be NULL");
    while (n < MOE_LAYER_SLOTS && moe_layer_tensor(layer, n, &tensors[n]) == MOE_OK) n++;
    memset(&c, 0, sizeof c);
    c.buffer.allocator = layer->allocator;
    moei_config_put_layer(&c, &layer->config);
    return moei_config_write(&c, stream, tensors, n, error);
}

#ifndef MOE_NO_STDIO

/* What moe_file_replace hands to its callback. */
typedef struct moei_saved {
    const moe_net *net;
    const moe_layer *layer;
    moe_error *error;
} moei_saved;

static moe_status moei_save(void *ctx, moe_stream *stream) {
    const moei_saved *s = (const moei_saved *)ctx;
    return s->net != NULL ? moe_net_write(s->net, stream, s->error) : moe_layer_write(s->layer, stream, s->error);
}

moe_status moe_net_save(const moe_net *net, const char *path, moe_error *error) {
    moei_saved s;
    if (net == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "net must not be NULL");
    s.net = net, s.layer = NULL, s.error = error;
    return moe_file_replace(path, moei_save, &s, error);
}

moe_status moe_layer_save(const moe_layer *layer, const char *path, moe_error *error) {
    moei_saved s;
    if (layer == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "layer must not be NULL");
    s.net = NULL, s.layer = layer, s.error = error;
    return moe_file_replace(path, moei_save, &s, error);
}

#endif
#endif /* MOE_NO_TRAIN */

/* ---- reading the configuration: a pull parser without recursion ------------------------------------------------------------------ */

enum { MOEI_CONFIG_DEPTH = 16, MOEI_CONFIG_FIELDS = 128 };

static int moei_digits(const unsigned char *p, size_t n, size_t *at) {
    size_t from = *at;
    while (*at < n && p[*at] >= '0' && p[*at] <= '9') ++*at;
    return *at > from;
}

/* -?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)? */
static int moei_is_json_number(moei_span s) {
    const size_t n = moei_span_length(s);
    size_t i = 0, whole;
    if (i < n && s.p[i] == '-') i++;
    whole = i;
    if (!moei_digits(s.p, n, &i) || (s.p[whole] == '0' && i > whole + 1)) return 0;
    if (i < n && s.p[i] == '.' && (i++, !moei_digits(s.p, n, &i))) return 0;
    if (i < n && (s.p[i] == 'e' || s.p[i] == 'E')) {
        i++;
        if (i < n && (s.p[i] == '+' || s.p[i] == '-')) i++;
        if (!moei_digits(s.p, n, &i)) return 0;
    }
    return i == n;
}

/* The characters up to the next that cannot belong to a number or a word. */
static moei_span moei_config_word(moei_json *j) {
    moei_span s;
    (void)moei_json_peek(j);
    s.p = j->bytes + j->at;
    while (j->at < j->end) {
        int c = j->bytes[j->at];
        if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' || c == '+' || c == '-')) break;
        j->at++;
    }
    s.end = j->bytes + j->at;
    return s;
}

/* A value of any kind, of which nothing is wanted. */
static moe_status moei_config_skip(moei_json *j) {
    char open[MOEI_CONFIG_DEPTH];
    moei_span s;
    int depth = 0;
    for (;;) {
        int c = moei_json_peek(j), entered = c == '{' || c == '[';
        moe_status status = MOE_OK;
        if (entered) {
            if (depth == MOEI_CONFIG_DEPTH)
                return moei_json_refuse(j, j->at, MOE_ERR_UNSUPPORTED, "more than %d levels of nesting", (int)MOEI_CONFIG_DEPTH);
            open[depth++] = (char)(c == '{' ? '}' : ']');
            j->at++;
        } else if (c == '"') {
            status = moei_json_string(j, &s);
        } else {
            s = moei_config_word(j);
            if (!moei_is_json_number(s) && !moei_span_is(s, "true") && !moei_span_is(s, "false") && !moei_span_is(s, "null"))
                return moei_json_refuse(j, (size_t)(s.p - j->bytes), MOE_ERR_FORMAT, "a value is expected");
        }
        while (status == MOE_OK && depth > 0 && moei_json_peek(j) == open[depth - 1]) j->at++, depth--, entered = 0;
        if (status != MOE_OK || depth == 0) return status;
        if (!entered) status = moei_json_take(j, ',');
        if (status == MOE_OK && open[depth - 1] == '}' && (status = moei_json_string(j, &s)) == MOE_OK) status = moei_json_take(j, ':');
        if (status != MOE_OK) return status;
    }
}

/* Keys that begin with _ are notes: nothing reads them. */
static int moei_is_note(moei_span key) { return key.p < key.end && key.p[0] == '_'; }

static moe_status moei_config_unknown(moei_json *j, const char *place, moei_span key) {
    char shown[52];
    return moei_json_refuse(j, (size_t)(key.p - j->bytes), MOE_ERR_UNSUPPORTED, "%s: unknown key '%s'", place, moei_span_text(key, shown));
}

static moe_status moei_config_twice(moei_json *j, const char *place, moei_span key) {
    char shown[52];
    return moei_json_refuse(j, (size_t)(key.p - j->bytes), MOE_ERR_FORMAT, "%s: the key '%s' occurs twice", place,
                            moei_span_text(key, shown));
}

/* Walks over an object whose keys are names (NULL at the end) and notes; at[i] gets where the value of names[i] begins, 0 when
   it is not there. */
static moe_status moei_config_members(moei_json *j, const char *place, const char *const *names, size_t *at) {
    moei_span key;
    int i, first, more;
    moe_status status = moei_json_take(j, '{');
    for (i = 0; names[i] != NULL; i++) at[i] = 0;
    for (first = 1; status == MOE_OK; first = 0) {
        if ((status = moei_json_key(j, first, &key, &more)) != MOE_OK || !more) break;
        for (i = 0; names[i] != NULL && !moei_span_is(key, names[i]);) i++;
        if (names[i] == NULL && !moei_is_note(key)) return moei_config_unknown(j, place, key);
        if (names[i] != NULL && at[i] != 0) return moei_config_twice(j, place, key);
        if (names[i] != NULL) at[i] = j->at;
        status = moei_config_skip(j);
    }
    return status;
}

/* The value of one field: a text for a choice, else a number. */
static moe_status moei_config_value(moei_json *j, const char *place, const moe_field *field, void *config) {
    char shown[52];
    const char *value = shown;
    moe_error why;
    moei_span s;
    size_t at;
    int i;
    moe_status status = MOE_OK;
    (void)moei_json_peek(j);
    at = j->at;
    if (field->kind == MOE_FIELD_CHOICE) {
        status = moei_json_string(j, &s);
        if (status != MOE_OK) return status;
        (void)moei_span_text(s, shown);
        for (i = 0; field->choices[i] != NULL; i++)
            if (moei_span_is(s, field->choices[i])) value = field->choices[i];
    } else {
        s = moei_config_word(j);
        if (!moei_is_json_number(s)) return moei_json_refuse(j, at, MOE_ERR_FORMAT, "%s: %s must be a number", place, field->name);
        value = (const char *)s.p;
    }
    status = moei_field_set_n(field, config, value, field->kind == MOE_FIELD_CHOICE ? moei_strlen(value) : moei_span_length(s), &why);
    return status == MOE_OK ? MOE_OK : moei_json_refuse(j, at, status, "%s: %s", place, why.message);
}

/* An object whose keys are fields, notes and, for a module, "module". */
static moe_status moei_config_fields(moei_json *j, const char *place, const moe_field *fields, void *config, int is_module) {
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
        if (fields[i].name == NULL || !moei_is_saved(&fields[i]) || i >= MOEI_CONFIG_FIELDS) return moei_config_unknown(j, place, key);
        if (seen[i]++) return moei_config_twice(j, place, key);
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
        if (*kind >= 0) return moei_config_twice(j, place, key);
        if ((status = moei_json_string(j, &name)) != MOE_OK) break;
        for (*kind = 0; *kind < MOE_MODULE_COUNT && !moei_span_is(name, moei_module_names[*kind]);) ++*kind;
        if (*kind == MOE_MODULE_COUNT)
            return moei_json_refuse(j, (size_t)(name.p - j->bytes), MOE_ERR_UNSUPPORTED, "%s: unknown module '%s'", place,
                                    moei_span_text(name, shown));
    }
    if (status == MOE_OK && *kind < 0) return moei_json_refuse(j, at, MOE_ERR_FORMAT, "%s: the key 'module' is missing", place);
    if (status == MOE_OK) j->at = at;
    return status;
}

static moe_status moei_module_add(moe_net *net, int kind, const moei_module_config *c) {
    switch (kind) {
    case MOE_MODULE_LINEAR: return moe_net_linear(net, c->d_out);
    case MOE_MODULE_ACTIVATION: return moe_net_activation(net, c->act);
    case MOE_MODULE_MIXTURE: return moe_net_mixture(net, &c->layer);
    case MOE_MODULE_RESIDUAL: return moe_net_residual(net, c->span);
    case MOE_MODULE_EMBEDDING: return moe_net_embedding(net, c->vocabulary, c->d);
    case MOE_MODULE_POSITIONS: return moe_net_positions(net, c->most);
    case MOE_MODULE_ATTENTION: return moe_net_attention(net, &c->attention);
    case MOE_MODULE_DROPOUT: return moe_net_dropout(net, c->rate);
    case MOE_MODULE_FEED_FORWARD: return moe_net_feed_forward(net, &c->layer);
    case MOE_MODULE_TIED: return moe_net_tied(net);
    default: return moei_module_plain(net, kind);
    }
}

/* One element of "modules", added to the net. */
static moe_status moei_config_module(moei_json *j, moe_net *net) {
    moei_module_config config;
    moei_text t;
    char place[32];
    int kind;
    size_t at;
    moe_status status;
    t.out = place, t.room = sizeof place, t.length = 0;
    moei_put(&t, "module ", 7);
    moei_put_integer(&t, (int64_t)net->n_modules);
    memset(&config, 0, sizeof config);
    (void)moei_json_peek(j);
    at = j->at;
    status = moei_config_kind(j, place, &kind);
    if (status == MOE_OK) status = moei_config_fields(j, place, moei_module_fields(kind), moei_module_settings(&config, kind), 1);
    if (status != MOE_OK) return status;
    status = moei_module_add(net, kind, &config);
    return status == MOE_OK ? MOE_OK : moei_json_refuse(j, at, status, "%s", net->error.message);
}

/* The whole text: finds where the value of "net" or "layer" begins, and checks the format. */
static moe_status moei_config_top(moei_json *j, const char *wanted, size_t *value_at) {
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
    if (number < (moe_real)MOEI_CONFIG_FORMAT || number > (moe_real)MOEI_CONFIG_FORMAT)
        return moei_json_refuse(j, at[0], MOE_ERR_UNSUPPORTED, "format = %s: this version reads format %d", moei_span_text(format, shown),
                                (int)MOEI_CONFIG_FORMAT);
    *value_at = at[layer ? 2 : 1];
    if (*value_at == 0 || at[layer ? 1 : 2] != 0)
        return moei_json_refuse(j, j->at, MOE_ERR_FORMAT, "this is not the file of a single %s: 'net' is %s, 'layer' is %s", wanted,
                                at[1] != 0 ? "there" : "missing", at[2] != 0 ? "there" : "missing");
    return MOE_OK;
}

/* What the reader is about, besides where it stands. */
typedef struct moei_net_options {
    int kernels;
    const moe_allocator *allocator;
} moei_net_options;

static moe_status moei_config_net(moei_json *j, moe_net *net, const moei_net_options *options) {
    static const char *const names[] = {"d_in", "modules", NULL};
    moei_module_config small;
    size_t start, at[2];
    moe_status status = moei_config_top(j, "net", &start);
    if (status != MOE_OK) return status;
    j->at = start;
    if ((status = moei_config_members(j, "net", names, at)) != MOE_OK) return status;
    if (at[0] == 0 || at[1] == 0)
        return moei_json_refuse(j, start, MOE_ERR_FORMAT, "net: the key '%s' is missing", names[at[0] == 0 ? 0 : 1]);
    memset(&small, 0, sizeof small);
    j->at = at[0];
    if ((status = moei_config_value(j, "net", moei_net_fields, &small)) != MOE_OK) return status;
    status = moe_net_init(net, small.d_in, options->kernels, options->allocator);
    if (status != MOE_OK) return moei_json_refuse(j, at[0], status, "%s", net->error.message);
    j->at = at[1];
    if ((status = moei_json_take(j, '[')) != MOE_OK) return status;
    do {
        if ((status = moei_config_module(j, net)) != MOE_OK) return status;
        if (moei_json_peek(j) == ']') return MOE_OK;
    } while ((status = moei_json_take(j, ',')) == MOE_OK);
    return status;
}

static moe_status moei_config_layer(moei_json *j, moe_layer_config *config) {
    size_t start;
    moe_status status = moei_config_top(j, "layer", &start);
    if (status != MOE_OK) return status;
    j->at = start;
    memset(config, 0, sizeof *config);
    return moei_config_fields(j, "layer", moe_layer_fields(), config, 0);
}

/* Reads the configuration of a file into net, or when that is NULL into layer. */
static moe_status moei_config_read(const moe_file *file, const moei_net_options *options, moe_net *net, moe_layer_config *layer,
                                   moe_error *error) {
    moei_json j;
    moe_error why;
    char *text;
    size_t length = 0;
    moe_status status = moe_file_metadata(file, MOEI_CONFIG_KEY, NULL, 0, &length);
    if (status == MOE_ERR_NOT_FOUND)
        return moei_error(error, MOE_ERR_FORMAT, "the file has no configuration: no metadata of the key '%s'", MOEI_CONFIG_KEY);
    if (!moei_can_allocate(options->allocator))
        return moei_error(error, MOE_ERR_ARGUMENT, "allocator is NULL, and MOE_NO_MALLOC leaves no other");
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

/* ---- reading the tensors ---------------------------------------------------------------------------------------------------------- */

/* Whether a tensor of a file belongs to a trainer, not to the net. */
static int moei_is_of_trainer(const moe_file_tensor *t) {
    const char *p = "trainer.";
    moei_chars chars;
    for (chars = moei_chars_of(moei_span_of(t->name, t->name_length)); *p != '\0'; p++)
        if (moei_chars_next(&chars) != *p) return 0;
    return 1;
}

/* The tensor of a name as it stands in the file; a net without modules is a plain list. */
static moe_tensor *moei_file_wanted(const moe_net *net, const moe_file_tensor *t) {
    char name[MOE_NAME_SIZE];
    moei_chars chars;
    size_t n = 0;
    int c;
    for (chars = moei_chars_of(moei_span_of(t->name, t->name_length)); (c = moei_chars_next(&chars)) >= 0; name[n++] = (char)c)
        if (n + 1 == sizeof name) return NULL;
    name[n] = '\0';
    if (net->n_modules > 0) return moe_net_find(net, name);
    for (n = 0; n < net->n_tensors; n++)
        if (moei_strcmp(net->tensors[n].name, name) == 0) return &net->tensors[n];
    return NULL;
}

/* "[10,64]" */
static const char *moei_shape_text(const size_t *shape, int n_dims, char out[80]) {
    moei_text t;
    int i;
    t.out = out, t.room = 80, t.length = 0;
    moei_put(&t, "[", 1);
    for (i = 0; i < n_dims; i++) {
        if (i > 0) moei_put(&t, ",", 1);
        moei_put_integer(&t, (int64_t)shape[i]);
    }
    moei_put(&t, "]", 1);
    return out;
}

static moe_status moei_file_compare(const moe_net *net, const moe_file_tensor *found, const moe_tensor **wanted, moe_error *error) {
    char shown[52], want[80], have[80];
    const moe_tensor *t = moei_file_wanted(net, found);
    if (t == NULL)
        return moei_error(error, MOE_ERR_UNSUPPORTED, "tensor '%s': the configuration has none of this name",
                          moei_span_text(moei_span_of(found->name, found->name_length), shown));
    if (t->n_dims != found->n_dims || moei_memcmp(t->shape, found->shape, (size_t)t->n_dims * sizeof t->shape[0]) != 0)
        return moei_error(error, MOE_ERR_SHAPE, "tensor '%s': the shape must be %s, the file has %s", t->name,
                          moei_shape_text(t->shape, t->n_dims, want), moei_shape_text(found->shape, found->n_dims, have));
    *wanted = t;
    return MOE_OK;
}

/* Compares names and shapes, before memory for the values is taken: exactly the registered tensors must be in the file, besides those of a
   trainer in the file of a net. So what a file can ask for is bounded by its size. */
static moe_status moei_file_match(const moe_net *net, moe_file *file, moe_error *error) {
    moe_file_tensor found;
    const moe_tensor *wanted = NULL;
    unsigned char *seen = (unsigned char *)moei_alloc(&net->allocator, net->n_tensors, 1);
    moe_status status = MOE_OK;
    size_t i;
    if (seen == NULL) return moei_error(error, MOE_ERR_MEMORY, "no memory for the list of %z tensors", net->n_tensors);
    moe_file_rewind(file);
    while (status == MOE_OK && moe_file_next(file, &found) == MOE_OK) {
        if (net->n_modules > 0 && moei_is_of_trainer(&found)) continue;
        status = moei_file_compare(net, &found, &wanted, error);
        if (status == MOE_OK) seen[wanted - net->tensors] = 1;
    }
    for (i = 0; i < net->n_tensors && status == MOE_OK; i++)
        if (!seen[i]) status = moei_error(error, MOE_ERR_NOT_FOUND, "tensor '%s': missing in the file", net->tensors[i].name);
    moei_free(&net->allocator, seen, net->n_tensors);
    return status;
}

/* The values, after match. */
static moe_status moei_file_fill(const moe_net *net, moe_file *file, moe_error *error) {
    moe_file_tensor found;
    moe_status status = MOE_OK;
    moe_file_rewind(file);
    while (status == MOE_OK && moe_file_next(file, &found) == MOE_OK) {
        const moe_tensor *t = moei_file_wanted(net, &found);
        if (net->n_modules > 0 && moei_is_of_trainer(&found)) continue;
        status = t != NULL ? moe_file_values(&found, 0, t->count, t->data) : MOE_ERR_FORMAT;
        if (status != MOE_OK) (void)moei_error(error, status, "a tensor's values: %s", moe_status_text(status));
    }
    return status;
}

moe_status moe_net_read(moe_net *net, const void *bytes, size_t size, int trainable, int kernels, const moe_allocator *allocator,
                        moe_error *error) {
    moei_net_options options;
    moe_net made;
    moe_file file;
    moe_status status;
    if (net == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "net must not be NULL");
    status = moe_file_open(&file, bytes, size, error);
    if (status != MOE_OK) return status;
    memset(&made, 0, sizeof made);
    options.kernels = kernels, options.allocator = allocator;
    status = moei_config_read(&file, &options, &made, NULL, error);
    if (status == MOE_OK) status = moei_net_register(&made, error);
    if (status == MOE_OK) status = moei_file_match(&made, &file, error);
    if (status == MOE_OK) status = moei_net_allocate(&made, trainable, error);
    if (status == MOE_OK) status = moei_file_fill(&made, &file, error);
    if (status == MOE_OK) *net = made;
    else moe_net_free(&made);
    return status;
}

/* The tensors of a layer as the list of a net without modules. */
static moe_net moei_layer_list(const moe_layer *layer, moe_tensor tensors[MOE_LAYER_SLOTS]) {
    moe_net list;
    memset(&list, 0, sizeof list);
    list.allocator = layer->allocator;
    list.tensors = tensors;
    while (list.n_tensors < MOE_LAYER_SLOTS && moe_layer_tensor(layer, list.n_tensors, &tensors[list.n_tensors]) == MOE_OK)
        list.n_tensors++;
    return list;
}

moe_status moe_layer_read(moe_layer *layer, const void *bytes, size_t size, int trainable, const moe_allocator *allocator,
                          moe_error *error) {
    moei_net_options options;
    moe_layer_config config;
    moe_tensor tensors[MOE_LAYER_SLOTS];
    moe_layer made;
    moe_net list;
    moe_file file;
    moe_status status;
    if (layer == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "layer must not be NULL");
    status = moe_file_open(&file, bytes, size, error);
    if (status != MOE_OK) return status;
    memset(&made, 0, sizeof made);
    options.kernels = MOE_KERNELS_AUTO, options.allocator = allocator;
    status = moei_config_read(&file, &options, NULL, &config, error);
    if (status == MOE_OK) status = moe_layer_init(&made, &config, error);
    if (status != MOE_OK) return status;
    if (allocator != NULL) made.allocator = *allocator;
    list = moei_layer_list(&made, tensors);
    status = moei_file_match(&list, &file, error);
    if (status == MOE_OK) status = moei_layer_allocate(&made, trainable, error);
    if (status != MOE_OK) return status;
    list = moei_layer_list(&made, tensors);
    status = moei_file_fill(&list, &file, error);
    if (status == MOE_OK) *layer = made;
    else moe_layer_free(&made);
    return status;
}

#ifndef MOE_NO_STDIO

/* The whole file, in memory of allocator. */
static moe_status moei_file_load(const char *path, const moe_allocator *allocator, moe_buffer *buffer, moe_error *error) {
    memset(buffer, 0, sizeof *buffer);
    if (allocator != NULL) buffer->allocator = *allocator;
    return moe_file_read(path, buffer, error);
}

moe_status moe_net_load(moe_net *net, const char *path, int trainable, int kernels, const moe_allocator *allocator, moe_error *error) {
    moe_buffer buffer;
    moe_status status = moei_file_load(path, allocator, &buffer, error);
    if (status == MOE_OK) status = moe_net_read(net, buffer.data, buffer.size, trainable, kernels, allocator, error);
    moe_buffer_free(&buffer);
    return status;
}

moe_status moe_layer_load(moe_layer *layer, const char *path, int trainable, const moe_allocator *allocator, moe_error *error) {
    moe_buffer buffer;
    moe_status status = moei_file_load(path, allocator, &buffer, error);
    if (status == MOE_OK) status = moe_layer_read(layer, buffer.data, buffer.size, trainable, allocator, error);
    moe_buffer_free(&buffer);
    return status;
}

#endif

/* ==== published layers ========================================================================================================= */

/* ---- published layers: what the families call their tensors ---------------------------------------------------------------------- */

/* Kinds of names, bits of a long; a family has some of them. */
#define MOEI_N_GATE (1L << 0) /* "gate.weight": the router */
#define MOEI_N_ROUTER (1L << 1) /* "router.weight" */
#define MOEI_N_ROUTER_BIAS (1L << 2)
#define MOEI_N_ROUTER_LAYER (1L << 3)
#define MOEI_N_CORRECTION (1L << 4) /* "gate.e_score_correction_bias" */
#define MOEI_N_TOP_CORRECTION (1L << 5) /* "e_score_correction_bias" */
#define MOEI_N_W123 (1L << 6) /* per expert */
#define MOEI_N_PROJ (1L << 7)
#define MOEI_N_FUSED (1L << 8) /* as transformers 5 holds those */
#define MOEI_N_TURNED (1L << 9) /* [in,out] */
#define MOEI_N_IN_TURN (1L << 10) /* [in,out], gate and up in turn */
#define MOEI_N_LINEAR (1L << 11)
#define MOEI_N_SHARED (1L << 12) /* "shared_expert" */
#define MOEI_N_SHARED_GATE (1L << 13)
#define MOEI_N_SHARED_MANY (1L << 14) /* "shared_experts" */
#define MOEI_G_EXPERTS (1L << 15) /* GGUF, with its router */
#define MOEI_G_ROUTER_BIAS (1L << 16)
#define MOEI_G_BIASES (1L << 17)
#define MOEI_G_CORRECTION (1L << 18)
#define MOEI_G_SHARED (1L << 19)
#define MOEI_G_SHARED_GATE (1L << 20)

/* How the elements lie. */
enum { MOEI_IS_ROUTER = 1, MOEI_IS_TURNED = 2, MOEI_IS_IN_TURN = 4 };

typedef struct moei_named {
    long kind;
    const char *name;  /* % stands for an expert's number: the tensor is that expert's alone */
    const char *shape; /* a letter for each dimension: E, H d_model, I d_ff, J 2 d_ff, S width of the shared expert, 1 */
    int place, second; /* whose elements; gate and up in one have two, else second is -1 */
    int how;
} moei_named;

static const moei_named moei_names_known[] = {
    {MOEI_N_GATE, "gate.weight", "EH", MOE_ROUTER_WEIGHT, -1, MOEI_IS_ROUTER},
    {MOEI_N_ROUTER, "router.weight", "EH", MOE_ROUTER_WEIGHT, -1, MOEI_IS_ROUTER},
    {MOEI_N_ROUTER_LAYER, "router.layer.weight", "EH", MOE_ROUTER_WEIGHT, -1, MOEI_IS_ROUTER},
    {MOEI_G_EXPERTS, "ffn_gate_inp.weight", "EH", MOE_ROUTER_WEIGHT, -1, MOEI_IS_ROUTER},
    {MOEI_N_ROUTER_BIAS, "router.bias", "E", MOE_ROUTER_BIAS, -1, 0},
    {MOEI_N_CORRECTION, "gate.e_score_correction_bias", "E", MOE_ROUTER_SELECTION_BIAS, -1, 0},
    {MOEI_N_TOP_CORRECTION, "e_score_correction_bias", "E", MOE_ROUTER_SELECTION_BIAS, -1, 0},
    {MOEI_N_W123, "experts.%.w1.weight", "IH", MOE_EXPERTS_GATE, -1, 0},
    {MOEI_N_W123, "experts.%.w2.weight", "HI", MOE_EXPERTS_DOWN, -1, 0},
    {MOEI_N_W123, "experts.%.w3.weight", "IH", MOE_EXPERTS_UP, -1, 0},
    {MOEI_N_PROJ, "experts.%.gate_proj.weight", "IH", MOE_EXPERTS_GATE, -1, 0},
    {MOEI_N_PROJ, "experts.%.up_proj.weight", "IH", MOE_EXPERTS_UP, -1, 0},
    {MOEI_N_PROJ, "experts.%.down_proj.weight", "HI", MOE_EXPERTS_DOWN, -1, 0},
    {MOEI_N_FUSED, "experts.gate_up_proj", "EJH", MOE_EXPERTS_GATE, MOE_EXPERTS_UP, 0},
    {MOEI_N_FUSED, "experts.down_proj", "EHI", MOE_EXPERTS_DOWN, -1, 0},
    {MOEI_N_TURNED, "experts.gate_up_proj", "EHJ", MOE_EXPERTS_GATE, MOE_EXPERTS_UP, MOEI_IS_TURNED},
    {MOEI_N_TURNED, "experts.down_proj", "EIH", MOE_EXPERTS_DOWN, -1, MOEI_IS_TURNED},
    {MOEI_N_IN_TURN, "experts.gate_up_proj", "EHJ", MOE_EXPERTS_GATE, MOE_EXPERTS_UP, MOEI_IS_TURNED | MOEI_IS_IN_TURN},
    {MOEI_N_IN_TURN, "experts.gate_up_proj_bias", "EJ", MOE_EXPERTS_GATE_BIAS, MOE_EXPERTS_UP_BIAS, MOEI_IS_TURNED | MOEI_IS_IN_TURN},
    {MOEI_N_IN_TURN, "experts.down_proj", "EIH", MOE_EXPERTS_DOWN, -1, MOEI_IS_TURNED},
    {MOEI_N_IN_TURN, "experts.down_proj_bias", "EH", MOE_EXPERTS_DOWN_BIAS, -1, 0},
    {MOEI_N_LINEAR, "input_linear.weight", "EJH", MOE_EXPERTS_GATE, MOE_EXPERTS_UP, 0},
    {MOEI_N_LINEAR, "output_linear.weight", "EHI", MOE_EXPERTS_DOWN, -1, 0},
    {MOEI_N_SHARED, "shared_expert.gate_proj.weight", "SH", MOE_SHARED_GATE, -1, 0},
    {MOEI_N_SHARED, "shared_expert.up_proj.weight", "SH", MOE_SHARED_UP, -1, 0},
    {MOEI_N_SHARED, "shared_expert.down_proj.weight", "HS", MOE_SHARED_DOWN, -1, 0},
    {MOEI_N_SHARED_GATE, "shared_expert_gate.weight", "1H", MOE_SHARED_SIGMOID, -1, 0},
    {MOEI_N_SHARED_MANY, "shared_experts.gate_proj.weight", "SH", MOE_SHARED_GATE, -1, 0},
    {MOEI_N_SHARED_MANY, "shared_experts.up_proj.weight", "SH", MOE_SHARED_UP, -1, 0},
    {MOEI_N_SHARED_MANY, "shared_experts.down_proj.weight", "HS", MOE_SHARED_DOWN, -1, 0},
    {MOEI_G_ROUTER_BIAS, "ffn_gate_inp.bias", "E", MOE_ROUTER_BIAS, -1, 0},
    {MOEI_G_CORRECTION, "exp_probs_b.bias", "E", MOE_ROUTER_SELECTION_BIAS, -1, 0},
    {MOEI_G_EXPERTS, "ffn_gate_exps.weight", "EIH", MOE_EXPERTS_GATE, -1, 0},
    {MOEI_G_EXPERTS, "ffn_up_exps.weight", "EIH", MOE_EXPERTS_UP, -1, 0},
    {MOEI_G_EXPERTS, "ffn_down_exps.weight", "EHI", MOE_EXPERTS_DOWN, -1, 0},
    {MOEI_G_EXPERTS, "ffn_gate_up_exps.weight", "EJH", MOE_EXPERTS_GATE, MOE_EXPERTS_UP, 0},
    {MOEI_G_EXPERTS, "ffn_gate.%.weight", "IH", MOE_EXPERTS_GATE, -1, 0},
    {MOEI_G_EXPERTS, "ffn_up.%.weight", "IH", MOE_EXPERTS_UP, -1, 0},
    {MOEI_G_EXPERTS, "ffn_down.%.weight", "HI", MOE_EXPERTS_DOWN, -1, 0},
    {MOEI_G_BIASES, "ffn_gate_exps.bias", "EI", MOE_EXPERTS_GATE_BIAS, -1, 0},
    {MOEI_G_BIASES, "ffn_up_exps.bias", "EI", MOE_EXPERTS_UP_BIAS, -1, 0},
    {MOEI_G_BIASES, "ffn_gate_up_exps.bias", "EJ", MOE_EXPERTS_GATE_BIAS, MOE_EXPERTS_UP_BIAS, MOEI_IS_TURNED},
    {MOEI_G_BIASES, "ffn_down_exps.bias", "EH", MOE_EXPERTS_DOWN_BIAS, -1, 0},
    {MOEI_G_SHARED, "ffn_gate_shexp.weight", "SH", MOE_SHARED_GATE, -1, 0},
    {MOEI_G_SHARED, "ffn_up_shexp.weight", "SH", MOE_SHARED_UP, -1, 0},
    {MOEI_G_SHARED, "ffn_down_shexp.weight", "HS", MOE_SHARED_DOWN, -1, 0},
    {MOEI_G_SHARED_GATE, "ffn_gate_inp_shexp.weight", "H", MOE_SHARED_SIGMOID, -1, 0},
    {0, NULL, NULL, 0, 0, 0}};

typedef struct moei_family {
    const char *name, *preset;
    const char *types, *archs; /* model_type, general.architecture; words */
    long kinds, needs, marks;  /* names that may be there, that must be, and that must be for the names alone to show this family; -1: they never do */
    long gguf, gguf_needs;
    const char *keys;          /* settings beyond moei_common_keys that the model's own program reads */
    const char *assumed;       /* what it assumes where they are missing, if that is not the preset's */
} moei_family;

#define MOEI_P_QWEN (MOEI_N_GATE | MOEI_N_PROJ | MOEI_N_FUSED)
#define MOEI_P_DEEP (MOEI_P_QWEN | MOEI_N_SHARED_MANY)
#define MOEI_P_GROUPS "norm_topk_prob routed_scaling_factor n_group topk_group n_shared_experts " \
                      "expert_weights_norm expert_weights_scale expert_gating_func expert_group_count expert_group_used_count"
#define MOEI_P_NORM "norm_topk_prob expert_weights_norm expert_weights_scale expert_gating_func"

static const moei_family moei_families[] = {
    {"mixtral", "mixtral", "mixtral", "llama", MOEI_N_GATE | MOEI_N_W123 | MOEI_N_FUSED, MOEI_N_GATE, 0, MOEI_G_EXPERTS, MOEI_G_EXPERTS, "", "top_k=2"},
    {"phi35_moe", "phi35_moe", "phimoe", "phimoe", MOEI_N_GATE | MOEI_N_W123 | MOEI_N_FUSED, MOEI_N_GATE, -1, MOEI_G_EXPERTS, MOEI_G_EXPERTS, "router_jitter_noise", "top_k=2"},
    {"minimax_m2", "minimax_m2", "minimax_m2", "minimax-m2", MOEI_N_GATE | MOEI_N_W123 | MOEI_N_FUSED | MOEI_N_TOP_CORRECTION,
     MOEI_N_GATE | MOEI_N_TOP_CORRECTION, 0, MOEI_G_EXPERTS | MOEI_G_CORRECTION, MOEI_G_EXPERTS | MOEI_G_CORRECTION, "scoring_func expert_gating_func", ""},
    {"qwen2_moe", "qwen2_moe", "qwen2_moe", "qwen2moe", MOEI_P_QWEN | MOEI_N_SHARED | MOEI_N_SHARED_GATE, MOEI_N_GATE | MOEI_N_SHARED | MOEI_N_SHARED_GATE, 0,
     MOEI_G_EXPERTS | MOEI_G_SHARED | MOEI_G_SHARED_GATE, MOEI_G_EXPERTS | MOEI_G_SHARED | MOEI_G_SHARED_GATE, MOEI_P_NORM, "top_k=4"},
    {"qwen3_next", "qwen2_moe", "qwen3_next", "qwen3next", MOEI_P_QWEN | MOEI_N_SHARED | MOEI_N_SHARED_GATE, MOEI_N_GATE | MOEI_N_SHARED | MOEI_N_SHARED_GATE, -1,
     MOEI_G_EXPERTS | MOEI_G_SHARED | MOEI_G_SHARED_GATE, MOEI_G_EXPERTS | MOEI_G_SHARED | MOEI_G_SHARED_GATE, MOEI_P_NORM, "top_k=10 weight=sum"},
    {"qwen3_moe", "qwen3_moe", "qwen3_moe", "qwen3moe", MOEI_P_QWEN, MOEI_N_GATE, 0, MOEI_G_EXPERTS, MOEI_G_EXPERTS, MOEI_P_NORM, "weight=raw"},
    {"olmoe", "olmoe", "olmoe", "olmoe", MOEI_P_QWEN, MOEI_N_GATE, 0, MOEI_G_EXPERTS, MOEI_G_EXPERTS, MOEI_P_NORM, ""},
    {"deepseek_v2", "deepseek_v2", "deepseek_v2", "deepseek2", MOEI_P_DEEP, MOEI_N_GATE, MOEI_N_SHARED_MANY, MOEI_G_EXPERTS | MOEI_G_SHARED, MOEI_G_EXPERTS,
     MOEI_P_GROUPS " topk_method scoring_func", "select=top_k groups=1 groups_kept=1 scale=1"},
    {"deepseek_v3", "deepseek_v3", "deepseek_v3 deepseek_v32 kimi_k2", "deepseek2", MOEI_P_DEEP | MOEI_N_CORRECTION, MOEI_N_GATE | MOEI_N_CORRECTION, 0,
     MOEI_G_EXPERTS | MOEI_G_SHARED | MOEI_G_CORRECTION, MOEI_G_EXPERTS | MOEI_G_CORRECTION, MOEI_P_GROUPS " topk_method scoring_func", ""},
    {"glm4_moe", "deepseek_v3", "glm4_moe", "glm4moe", MOEI_P_DEEP | MOEI_N_CORRECTION, MOEI_N_GATE | MOEI_N_CORRECTION, -1,
     MOEI_G_EXPERTS | MOEI_G_SHARED | MOEI_G_CORRECTION, MOEI_G_EXPERTS | MOEI_G_CORRECTION, MOEI_P_GROUPS, "groups=1 groups_kept=1 scale=1"},
    {"dots1", "deepseek_v3", "dots1", "dots1", MOEI_P_DEEP | MOEI_N_CORRECTION, MOEI_N_GATE | MOEI_N_CORRECTION, -1,
     MOEI_G_EXPERTS | MOEI_G_SHARED | MOEI_G_CORRECTION, MOEI_G_EXPERTS | MOEI_G_CORRECTION, MOEI_P_GROUPS, "groups=1 groups_kept=1 scale=1 weight=raw"},
    {"llama4", "llama4", "llama4 llama4_text", "llama4", MOEI_N_ROUTER | MOEI_N_TURNED | MOEI_N_SHARED, MOEI_N_ROUTER | MOEI_N_SHARED, 0,
     MOEI_G_EXPERTS | MOEI_G_SHARED, MOEI_G_EXPERTS | MOEI_G_SHARED, "", ""},
    {"gpt_oss", "gpt_oss", "gpt_oss", "gpt-oss", MOEI_N_ROUTER | MOEI_N_ROUTER_BIAS | MOEI_N_IN_TURN, MOEI_N_ROUTER | MOEI_N_ROUTER_BIAS | MOEI_N_IN_TURN, 0,
     MOEI_G_EXPERTS | MOEI_G_BIASES | MOEI_G_ROUTER_BIAS, MOEI_G_EXPERTS | MOEI_G_BIASES | MOEI_G_ROUTER_BIAS, "swiglu_limit", ""},
    {"granite_moe", "granite_moe", "granitemoe", "granitemoe granite-moe", MOEI_N_ROUTER_LAYER | MOEI_N_LINEAR, MOEI_N_ROUTER_LAYER | MOEI_N_LINEAR, 0,
     MOEI_G_EXPERTS, MOEI_G_EXPERTS, "", "top_k=2"},
    {NULL, NULL, NULL, NULL, 0, 0, 0, 0, 0, NULL, NULL}};

/* The settings that all families read, of config.json and of GGUF. */
static const char moei_common_keys[] = "num_experts num_local_experts n_routed_experts hidden_size moe_intermediate_size num_experts_per_tok "
                                       "experts_per_token hidden_act expert_count expert_used_count";

/* A key with a value sets `settings`; one whose value is NULL is a number, and goes to the field `settings`. Keys of GGUF stand behind "ARCH.". */
typedef struct moei_setting {
    const char *key, *value, *settings;
    int zero; /* 1: the number may be 0, and is then as if it were not there */
} moei_setting;

static const moei_setting moei_settings[] = {
    {"num_experts", NULL, "n_experts", 0},
    {"num_local_experts", NULL, "n_experts", 0},
    {"n_routed_experts", NULL, "n_experts", 0},
    {"hidden_size", NULL, "d_model", 0},
    {"moe_intermediate_size", NULL, "d_ff", 0},
    {"num_experts_per_tok", NULL, "top_k", 0},
    {"experts_per_token", NULL, "top_k", 0},
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

/* ---- published layers: sources ----------------------------------------------------------------------------------------------------- */

static moe_status moei_memory_read(void *ctx, uint64_t at, void *to, size_t size) {
    memcpy(to, (const unsigned char *)ctx + (size_t)at, size);
    return MOE_OK;
}

moe_source moe_memory_source(const char *name, const void *bytes, size_t size) {
    moe_source s;
    s.name = name;
    s.size = bytes != NULL ? size : 0;
    memcpy(&s.ctx, &bytes, sizeof s.ctx); /* it is only read through */
    s.read_at = moei_memory_read;
    return s;
}

/* What stands behind "prefix." in text; NULL if it does not begin so. */
static const char *moei_after(const char *text, const char *prefix) {
    while (*prefix != '\0' && *text == *prefix) text++, prefix++;
    return *prefix == '\0' && *text == '.' ? text + 1 : NULL;
}

/* Opens a file by its name. MOE_ERR_NOT_FOUND: there is none. */
typedef struct moei_folder {
    void *ctx;
    moe_status (*open)(void *ctx, const char *name, moe_source *source, moe_error *error);
    void (*close)(void *ctx, moe_source *source);
    const char *(*reason)(void *ctx); /* why the last read failed; NULL: the status says it */
} moei_folder;

enum { MOEI_P_NAME = 256, MOEI_P_REST = 64, MOEI_P_TEXT = 64, MOEI_P_CHUNK = 1024, MOEI_P_PREFIX = 180 };
#define MOEI_P_CONFIG ((size_t)(SIZE_MAX > 65535 ? 1048576 : 32768)) /* bytes of config.json */

/* A file that is open; of safetensors the header is in memory. */
typedef struct moei_shard {
    struct moei_shard *next;
    moe_source source;
    moe_buffer bytes;
    moe_file file;
    char name[MOEI_P_NAME];
} moei_shard;

/* Element types of GGUF that are none of safetensors, behind MOE_DTYPE_COUNT, which is any other. */
enum { MOEI_DTYPE_Q8_0 = MOE_DTYPE_COUNT + 1, MOEI_DTYPE_Q4_0 };

/* A tensor of the layer. */
typedef struct moei_found {
    char rest[MOEI_P_REST]; /* its name behind the prefix; one that does not fit is cut, and no name of ours is as long */
    const moei_shard *shard;
    uint64_t at;            /* where it begins in the file */
    size_t count, bytes;
    int dtype, n_dims;
    int code;               /* GGUF's number of the type */
    size_t shape[MOE_FILE_MAX_DIMS];
    const moei_named *row;
    size_t expert;
} moei_found;

enum { MOEI_IS_FILE = 0, MOEI_IS_INDEX, MOEI_IS_GGUF };
enum { MOEI_VALUE_NONE = 0, MOEI_VALUE_SCALAR, MOEI_VALUE_TEXT, MOEI_VALUE_OTHER };
enum { MOEI_GGUF_KEYS = 8 };

typedef struct moei_gguf_facts {
    char arch[MOEI_P_TEXT];
    uint64_t kv_at, infos_at, data_at;
    size_t n_kv, n_tensors;
    int kinds[MOEI_GGUF_KEYS];
    char texts[MOEI_GGUF_KEYS][MOEI_P_TEXT];
} moei_gguf_facts;

/* Everything about one call; its error is never NULL. */
typedef struct moei_reader {
    const moei_folder *folder;
    moe_allocator allocator;
    moe_error *error;
    int kind;
    moei_shard *shards, *first; /* all, the last opened first; the one that the call names */
    moe_buffer index, config;   /* texts */
    size_t weight_map, text_config; /* where these objects begin; 0: there is none */
    moei_gguf_facts gguf;
    char prefix[MOEI_P_NAME];
    moe_buffer found, listed;   /* of moei_found; listed: what an index says, their shard alone is set */
    const moei_family *family;
    int by_type;                /* the family is that of model_type or general.architecture */
    size_t sizes[4];            /* E, H, I, S; 0: not known yet */
    moe_layer_config settings;
} moei_reader;

static moe_status moei_source_read(const moei_reader *r, const moei_shard *shard, uint64_t at, void *to, size_t size) {
    moe_status status;
    if (at > shard->source.size || size > shard->source.size - at)
        return moei_error(r->error, MOE_ERR_FORMAT, "%s: the file ends before byte %z", shard->name, (size_t)at + size);
    status = size > 0 ? shard->source.read_at(shard->source.ctx, at, to, size) : MOE_OK;
    if (status == MOE_OK) return MOE_OK;
    return moei_error(r->error, status, "%s: reading at byte %z: %s", shard->name, (size_t)at,
                      r->folder->reason != NULL ? r->folder->reason(r->folder->ctx) : moe_status_text(status));
}

/* size bytes of a file, from its beginning. */
static moe_status moei_source_take(moei_reader *r, const moei_shard *shard, size_t size, moe_buffer *buffer) {
    moe_status status;
    memset(buffer, 0, sizeof *buffer);
    buffer->allocator = r->allocator;
    status = moei_buffer_reserve(buffer, size + 1);
    if (status != MOE_OK) return moei_error(r->error, status, "%s: no memory for %z bytes of it", shard->name, size);
    buffer->size = size;
    return moei_source_read(r, shard, 0, buffer->data, size);
}

/* Copies as much as fits, terminated. */
static void moei_copy_text(char *to, size_t room, const char *from) {
    moei_text t;
    t.out = to, t.room = room, t.length = 0;
    to[0] = '\0';
    moei_put(&t, from, moei_strlen(from));
}

/* Opens a file of the folder. MOE_ERR_NOT_FOUND without a message when it is not there. */
static moe_status moei_shard_open(moei_reader *r, const char *name, moei_shard **shard) {
    moei_shard *s = (moei_shard *)moei_alloc(&r->allocator, 1, sizeof *s);
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
    moei_copy_text(s->name, sizeof s->name, name);
    s->next = r->shards;
    r->shards = *shard = s;
    return MOE_OK;
}

static void moei_reader_close(moei_reader *r) {
    while (r->shards != NULL) {
        moei_shard *s = r->shards;
        r->shards = s->next;
        if (r->folder->close != NULL) r->folder->close(r->folder->ctx, &s->source);
        moe_buffer_free(&s->bytes);
        moei_free(&r->allocator, s, sizeof *s);
    }
    moe_buffer_free(&r->index);
    moe_buffer_free(&r->config);
    moe_buffer_free(&r->found);
    moe_buffer_free(&r->listed);
}

/* Puts the name of the file in front of a message that speaks of bytes. */
static moe_status moei_of_shard(const moei_reader *r, const char *name, moe_status status) {
    moe_error why = *r->error;
    if (status == MOE_OK) return status;
    return moei_error(r->error, status, "%s, %s", name, why.message);
}

/* Reads and checks the header of a safetensors file. */
static moe_status moei_shard_header(moei_reader *r, moei_shard *s) {
    unsigned char first[8];
    uint64_t length;
    moe_status status = moei_source_read(r, s, 0, first, sizeof first);
    if (status != MOE_OK) return status;
    length = moei_load(first, 8);
    if (s->source.size > (uint64_t)(size_t)-1 / 2) return moei_error(r->error, MOE_ERR_OVERFLOW, "%s: it is larger than size_t can say", s->name);
    if (length == 0 || length > MOEI_FILE_MAX_HEADER || length > s->source.size - 8)
        return moei_error(r->error, MOE_ERR_FORMAT, "%s: no safetensors file: its header would have %s bytes, the file %z", s->name,
                          length > MOEI_FILE_MAX_HEADER ? "more than 100000000" : length == 0 ? "no" : "more than follow its", (size_t)s->source.size);
    status = moei_source_take(r, s, 8 + (size_t)length, &s->bytes);
    if (status != MOE_OK) return status;
    return moei_of_shard(r, s->name, moei_file_check(&s->file, s->bytes.data, (size_t)s->source.size, 1, r->error));
}

/* ---- published layers: GGUF ---------------------------------------------------------------------------------------------------------- */

enum { MOEI_GGUF_BOOL = 7, MOEI_GGUF_STRING = 8, MOEI_GGUF_ARRAY = 9, MOEI_GGUF_TYPES = 13, MOEI_GGUF_DEPTH = 4 };

/* Bytes of a value; signed numbers, then floats. */
static const unsigned char moei_gguf_sizes[MOEI_GGUF_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

static const char *const moei_gguf_names[MOEI_GGUF_KEYS] = {"expert_count",       "expert_used_count",       "expert_group_count",  "expert_group_used_count",
                                                            "expert_gating_func", "expert_weights_scale", "expert_weights_norm", "expert_shared_count"};

/* Reads along a source; after a failure everything is 0. */
typedef struct moei_gguf {
    const moei_reader *r;
    uint64_t at, base;
    size_t have;
    moe_status status;
    unsigned char window[256];
} moei_gguf;

static void moei_gguf_begin(moei_gguf *g, const moei_reader *r, uint64_t at) {
    memset(g, 0, sizeof *g);
    g->r = r;
    g->at = at;
}

static uint64_t moei_gguf_left(const moei_gguf *g) { return g->r->first->source.size - g->at; }

static void moei_gguf_refuse(moei_gguf *g, moe_status status, const char *what) {
    if (g->status == MOE_OK) g->status = moei_error(g->r->error, status, "%s: byte %z: %s", g->r->first->name, (size_t)g->at, what);
}

static void moei_gguf_take(moei_gguf *g, void *to, size_t n) {
    unsigned char *p = (unsigned char *)to;
    while (n > 0 && g->status == MOE_OK) {
        size_t from = (size_t)(g->at - g->base), some;
        if (g->at < g->base || g->at - g->base >= g->have) {
            from = 0, g->base = g->at;
            g->have = moei_gguf_left(g) < sizeof g->window ? (size_t)moei_gguf_left(g) : sizeof g->window;
            if (g->have == 0) moei_gguf_refuse(g, MOE_ERR_FORMAT, "the file ends here, and more is expected");
            else g->status = moei_source_read(g->r, g->r->first, g->base, g->window, g->have);
            if (g->status != MOE_OK) break;
        }
        some = g->have - from < n ? g->have - from : n;
        memcpy(p, g->window + from, some);
        p += some, n -= some, g->at += some;
    }
    if (n > 0) memset(p, 0, n);
}

static uint64_t moei_gguf_number(moei_gguf *g, int bytes) {
    unsigned char p[8];
    moei_gguf_take(g, p, (size_t)bytes);
    return moei_load(p, bytes);
}

static void moei_gguf_jump(moei_gguf *g, uint64_t count, size_t size) {
    if (g->status != MOE_OK) return;
    if (count > moei_gguf_left(g) / size) moei_gguf_refuse(g, MOE_ERR_FORMAT, "the length leads beyond the end of the file");
    else g->at += count * size;
}

/* A string, cut to room. */
static void moei_gguf_string(moei_gguf *g, char *to, size_t room) {
    uint64_t length = moei_gguf_number(g, 8), keep = length < room - 1 ? length : room - 1;
    size_t i;
    to[0] = '\0';
    if (g->status == MOE_OK && length > moei_gguf_left(g)) moei_gguf_refuse(g, MOE_ERR_FORMAT, "the length of a string leads beyond the end of the file");
    if (g->status != MOE_OK) return;
    moei_gguf_take(g, to, (size_t)keep);
    to[keep] = '\0';
    for (i = 0; i < (size_t)keep; i++)
        if ((unsigned char)to[i] < 0x20) to[i] = '?'; /* a name with a zero in it is no name of ours */
    moei_gguf_jump(g, length - keep, 1);
}

/* A value of which nothing is wanted. */
static void moei_gguf_skip(moei_gguf *g, uint32_t type) {
    uint64_t left[MOEI_GGUF_DEPTH], n;
    uint32_t types[MOEI_GGUF_DEPTH];
    int depth = 0;
    char none[1];
    memset(left, 0, sizeof left), memset(types, 0, sizeof types);
    for (;;) {
        if (type >= MOEI_GGUF_TYPES) moei_gguf_refuse(g, MOE_ERR_FORMAT, "a value has an unknown type");
        else if (type == MOEI_GGUF_STRING) moei_gguf_string(g, none, 1);
        else if (type != MOEI_GGUF_ARRAY) moei_gguf_jump(g, 1, moei_gguf_sizes[type]);
        else {
            type = (uint32_t)moei_gguf_number(g, 4), n = moei_gguf_number(g, 8);
            if (type < MOEI_GGUF_TYPES && moei_gguf_sizes[type] > 0) moei_gguf_jump(g, n, moei_gguf_sizes[type]);
            else if (depth == MOEI_GGUF_DEPTH) moei_gguf_refuse(g, MOE_ERR_UNSUPPORTED, "arrays in arrays in arrays");
            else types[depth] = type, left[depth++] = n;
        }
        while (depth > 0 && left[depth - 1] == 0) depth--;
        if (depth == 0 || g->status != MOE_OK) return;
        left[depth - 1]--, type = types[depth - 1];
    }
}

/* A value as text; its kind. */
static int moei_gguf_value(moei_gguf *g, uint32_t type, char text[MOEI_P_TEXT]) {
    unsigned char p[8];
    int64_t whole;
    moei_text t;
    t.out = text, t.room = MOEI_P_TEXT, t.length = 0;
    text[0] = '\0';
    if (type == MOEI_GGUF_STRING) {
        moei_gguf_string(g, text, MOEI_P_TEXT);
        return MOEI_VALUE_TEXT;
    }
    if (type >= MOEI_GGUF_TYPES || type == MOEI_GGUF_ARRAY) {
        moei_gguf_skip(g, type);
        return MOEI_VALUE_OTHER;
    }
    moei_gguf_take(g, p, moei_gguf_sizes[type]);
    if (type == MOEI_GGUF_BOOL) moei_put(&t, p[0] != 0 ? "true" : "false", p[0] != 0 ? 4 : 5);
    else if (type == 6) moei_put_real(&t, (moe_real)moei_binary32((uint32_t)moei_load(p, 4)));
    else if (type == 12) moei_put_real(&t, moei_real_of_bits(moei_load(p, 8)));
    else if (type % 2 == 1) { /* the odd ones are signed */
        whole = moei_load_signed(p, moei_gguf_sizes[type]);
        moei_put_integer(&t, whole);
    } else moei_put_unsigned(&t, moei_load(p, moei_gguf_sizes[type]));
    return MOEI_VALUE_SCALAR;
}

/* The metadata, once: with facts->arch empty for what stands for itself, then for what stands behind the architecture's name. */
static void moei_gguf_metadata(moei_gguf *g, moei_gguf_facts *facts, uint32_t *alignment, int behind_arch) {
    char key[MOEI_P_NAME], text[MOEI_P_TEXT];
    const char *behind;
    size_t i, n;
    int k;
    for (i = 0; i < facts->n_kv && g->status == MOE_OK; i++) {
        uint32_t type;
        int kind = MOEI_VALUE_NONE;
        moei_gguf_string(g, key, sizeof key);
        type = (uint32_t)moei_gguf_number(g, 4);
        behind = behind_arch ? moei_after(key, facts->arch) : NULL;
        if (behind != NULL) {
            for (k = 0; k < MOEI_GGUF_KEYS && moei_strcmp(behind, moei_gguf_names[k]) != 0;) k++;
            if (k < MOEI_GGUF_KEYS) kind = facts->kinds[k] = moei_gguf_value(g, type, facts->texts[k]);
        } else if (!behind_arch && moei_strcmp(key, "general.architecture") == 0 && type == MOEI_GGUF_STRING) {
            kind = moei_gguf_value(g, type, facts->arch);
        } else if (!behind_arch && moei_strcmp(key, "general.alignment") == 0 && type == 4) {
            kind = moei_gguf_value(g, type, text);
            for (n = *alignment = 0; text[n] != '\0'; n++) *alignment = *alignment * 10u + (uint32_t)(text[n] - '0');
        }
        if (kind == MOEI_VALUE_NONE) moei_gguf_skip(g, type);
    }
}

/* What is known of the element types: GGUF's number, ours, elements and bytes of a block. */
static const struct {
    int code, dtype;
    size_t elements, bytes;
} moei_gguf_types[] = {{0, MOE_DTYPE_F32, 1, 4}, {1, MOE_DTYPE_F16, 1, 2}, {2, MOEI_DTYPE_Q4_0, 32, 18}, {8, MOEI_DTYPE_Q8_0, 32, 34},
                       {28, MOE_DTYPE_F64, 1, 8}, {30, MOE_DTYPE_BF16, 1, 2}};
enum { MOEI_GGUF_KNOWN = 6 };

/* The next tensor's description. Its bytes are not known for types that are not read. */
static void moei_gguf_info(moei_gguf *g, char name[MOEI_P_NAME], moei_found *f) {
    uint64_t n, i, elements = 1, most = (size_t)-1 / 8;
    memset(f, 0, sizeof *f);
    moei_gguf_string(g, name, MOEI_P_NAME);
    n = moei_gguf_number(g, 4);
    if (n > 4) moei_gguf_refuse(g, MOE_ERR_FORMAT, "a tensor has more than 4 dimensions");
    if (g->status != MOE_OK) return;
    for (i = 0; i < n && g->status == MOE_OK; i++) {
        uint64_t ne = moei_gguf_number(g, 8);
        if (ne > 0 && elements > most / ne) moei_gguf_refuse(g, MOE_ERR_OVERFLOW, "a tensor has more elements than size_t holds");
        else elements *= ne, f->shape[n - 1 - i] = (size_t)ne;
    }
    f->n_dims = (int)n;
    f->count = (size_t)elements;
    f->code = (int)(moei_gguf_number(g, 4) & 0x7fffu);
    f->at = moei_gguf_number(g, 8);
    f->dtype = MOE_DTYPE_COUNT;
    for (i = 0; i < MOEI_GGUF_KNOWN && g->status == MOE_OK; i++)
        if (moei_gguf_types[i].code == f->code) {
            f->dtype = moei_gguf_types[i].dtype;
            f->bytes = f->count / moei_gguf_types[i].elements * moei_gguf_types[i].bytes;
            if (n > 0 && f->shape[n - 1] % moei_gguf_types[i].elements != 0)
                moei_gguf_refuse(g, MOE_ERR_FORMAT, "a tensor's rows are no whole number of blocks");
        }
}

/* Walks over all that comes before the data. */
static moe_status moei_gguf_open(moei_reader *r) {
    moei_gguf g;
    moei_gguf_facts *facts = &r->gguf;
    moei_found f;
    char name[MOEI_P_NAME];
    uint64_t version, n_tensors, n_kv;
    uint32_t alignment = 32;
    size_t i;
    if (r->first->source.size > (uint64_t)(size_t)-1 / 2) return moei_error(r->error, MOE_ERR_OVERFLOW, "%s: it is larger than size_t can say", r->first->name);
    moei_gguf_begin(&g, r, 4);
    version = moei_gguf_number(&g, 4), n_tensors = moei_gguf_number(&g, 8), n_kv = moei_gguf_number(&g, 8);
    if (g.status == MOE_OK && version != 2 && version != 3)
        return moei_error(r->error, MOE_ERR_UNSUPPORTED, "%s: GGUF version %z: 2 and 3, little-endian, are read", r->first->name, (size_t)version);
    if (n_tensors > MOE_FILE_MAX_TENSORS || n_kv > MOE_FILE_MAX_TENSORS) moei_gguf_refuse(&g, MOE_ERR_UNSUPPORTED, "too many tensors or keys before it");
    facts->n_tensors = (size_t)n_tensors, facts->n_kv = (size_t)n_kv, facts->kv_at = g.at;
    moei_gguf_metadata(&g, facts, &alignment, 0);
    facts->infos_at = g.at;
    for (i = 0; i < facts->n_tensors && g.status == MOE_OK; i++) moei_gguf_info(&g, name, &f);
    if (alignment == 0 || alignment > 65536) moei_gguf_refuse(&g, MOE_ERR_FORMAT, "general.alignment must be 1 to 65536");
    if (g.status != MOE_OK) return g.status;
    facts->data_at = g.at + (alignment - g.at % alignment) % alignment;
    moei_gguf_begin(&g, r, facts->kv_at);
    moei_gguf_metadata(&g, facts, &alignment, 1);
    return g.status;
}

/* ---- published layers: texts of JSON, the index and config.json --------------------------------------------------------------------------- */

/* Checks a whole text: one object, nothing behind it. */
static moe_status moei_text_check(moei_json *j) {
    if (moei_json_peek(j) != '{') return moei_json_refuse(j, j->at, MOE_ERR_FORMAT, "the text is no JSON object");
    if (moei_config_skip(j) != MOE_OK) return j->error != NULL ? j->error->code : MOE_ERR_FORMAT;
    if (moei_json_peek(j) >= 0) return moei_json_refuse(j, j->at, MOE_ERR_FORMAT, "nothing may follow the object");
    return MOE_OK;
}

static moei_json moei_text_at(const moe_buffer *text, size_t at, moe_error *error) {
    moei_json j;
    memset(&j, 0, sizeof j);
    j.bytes = text->data;
    j.at = at;
    j.end = text->size;
    j.error = error;
    return j;
}

/* Reads a text of a file whole, and checks it. */
static moe_status moei_text_open(moei_reader *r, const moei_shard *shard, size_t most, moe_buffer *text) {
    moei_json j;
    moe_error why;
    moe_status status;
    if (shard->source.size > most) return moei_error(r->error, MOE_ERR_UNSUPPORTED, "%s: it has %z bytes, allowed are %z", shard->name, (size_t)shard->source.size, most);
    status = moei_source_take(r, shard, (size_t)shard->source.size, text);
    if (status != MOE_OK) return status;
    why.message[0] = '\0';
    j = moei_text_at(text, 0, &why);
    status = moei_text_check(&j);
    return status == MOE_OK ? MOE_OK : moei_error(r->error, status, "%s, %s", shard->name, why.message);
}

/* Where the value of a key begins in the object that begins at `at` (a text that was checked); 0: there is none. Of keys that occur twice the last counts, as
   in Python. */
static size_t moei_text_member(const moe_buffer *text, size_t at, const char *key) {
    moei_json j = moei_text_at(text, at, NULL);
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

/* The unescaped text, cut to room; a zero cannot be in it. */
static void moei_span_copy(moei_span s, char *to, size_t room) {
    moei_chars chars = moei_chars_of(s);
    size_t n = 0;
    int c;
    while (n + 1 < room && (c = moei_chars_next(&chars)) >= 0) to[n++] = (char)c;
    to[n] = '\0';
}

/* The kind and text of a key's value in config.json: in text_config if it is there, else at the top. null is none. */
static int moei_config_lookup(const moei_reader *r, const char *key, char text[MOEI_P_TEXT]) {
    size_t at = r->text_config > 0 ? moei_text_member(&r->config, r->text_config, key) : 0;
    moei_json j;
    moei_span s;
    int c;
    text[0] = '\0';
    if (at == 0) at = moei_text_member(&r->config, 0, key);
    if (at == 0) return MOEI_VALUE_NONE;
    j = moei_text_at(&r->config, at, NULL);
    c = moei_json_peek(&j);
    if (c == '{' || c == '[') return MOEI_VALUE_OTHER;
    if (c == '"') {
        if (moei_json_string(&j, &s) != MOE_OK) return MOEI_VALUE_OTHER;
        moei_span_copy(s, text, MOEI_P_TEXT);
        return MOEI_VALUE_TEXT;
    }
    s = moei_config_word(&j);
    if (moei_span_is(s, "null")) return MOEI_VALUE_NONE;
    moei_span_copy(s, text, MOEI_P_TEXT);
    return moei_span_length(s) < MOEI_P_TEXT ? MOEI_VALUE_SCALAR : MOEI_VALUE_OTHER;
}

/* The same for whatever the file has. */
static int moei_lookup(const moei_reader *r, const char *key, char text[MOEI_P_TEXT]) {
    int k;
    text[0] = '\0';
    if (r->kind != MOEI_IS_GGUF) return r->config.size > 0 ? moei_config_lookup(r, key, text) : (int)MOEI_VALUE_NONE;
    for (k = 0; k < MOEI_GGUF_KEYS; k++)
        if (moei_strcmp(key, moei_gguf_names[k]) == 0) {
            memcpy(text, r->gguf.texts[k], MOEI_P_TEXT);
            return r->gguf.kinds[k];
        }
    return MOEI_VALUE_NONE;
}

static moe_status moei_config_open(moei_reader *r) {
    char text[MOEI_P_TEXT];
    moei_shard *shard;
    size_t at;
    moe_status status = moei_shard_open(r, "config.json", &shard);
    if (status == MOE_ERR_NOT_FOUND) return MOE_OK;
    if (status == MOE_OK) status = moei_text_open(r, shard, MOEI_P_CONFIG, &r->config);
    if (status != MOE_OK) return moei_of_shard(r, r->first->name, status);
    at = moei_text_member(&r->config, 0, "text_config");
    if (at > 0 && r->config.data[at] == '{') r->text_config = at;
    if (moei_lookup(r, "quantization_config", text) != MOEI_VALUE_NONE)
        return moei_error(r->error, MOE_ERR_UNSUPPORTED, "config.json: quantization_config: quantised models of this form are not read; save it dequantised (bf16), or as GGUF");
    return MOE_OK;
}

/* ---- published layers: the names in a file ---------------------------------------------------------------------------------------------------- */

/* A walk over the names of a file, of an index or of a GGUF file. */
typedef struct moei_walk {
    moe_file file;
    moei_json json;
    int first;
    moei_gguf gguf;
    size_t left;
} moei_walk;

static void moei_walk_begin(moei_walk *w, const moei_reader *r, const moei_shard *shard) {
    memset(w, 0, sizeof *w);
    w->file = shard->file;
    w->file.at = MOEI_FILE_START;
    w->left = r->gguf.n_tensors;
    w->first = 1;
    if (r->kind == MOEI_IS_GGUF) moei_gguf_begin(&w->gguf, r, r->gguf.infos_at);
    if (r->kind != MOEI_IS_INDEX) return;
    w->json = moei_text_at(&r->index, r->weight_map, NULL);
    (void)moei_json_take(&w->json, '{');
}

/* The next name of a safetensors file. */
static moe_status moei_walk_file(moei_walk *w, const moei_shard *shard, char name[MOEI_P_NAME], moei_found *f) {
    moe_file_tensor t;
    size_t begin;
    int i;
    moe_status status = moei_file_next(&w->file, &t, &begin);
    if (status != MOE_OK) return status;
    moei_span_copy(moei_span_of(t.name, t.name_length), name, MOEI_P_NAME);
    memset(f, 0, sizeof *f);
    f->at = (uint64_t)8 + w->file.header_size + begin;
    f->count = t.count, f->bytes = t.bytes, f->dtype = t.dtype, f->n_dims = t.n_dims;
    for (i = 0; i < t.n_dims; i++) f->shape[i] = t.shape[i];
    f->shard = shard;
    return MOE_OK;
}

/* The next name of an index, and the name of its file. */
static moe_status moei_walk_index(moei_walk *w, char name[MOEI_P_NAME], char file[MOEI_P_NAME]) {
    moei_span key, value;
    int more;
    moe_status status = moei_json_key(&w->json, w->first, &key, &more);
    if (status != MOE_OK || !more) return status != MOE_OK ? status : MOE_ERR_NOT_FOUND;
    w->first = 0;
    moei_span_copy(key, name, MOEI_P_NAME);
    if (moei_json_peek(&w->json) != '"') {
        file[0] = '\0';
        return moei_config_skip(&w->json);
    }
    if ((status = moei_json_string(&w->json, &value)) != MOE_OK) return status;
    moei_span_copy(value, file, MOEI_P_NAME);
    return MOE_OK;
}

/* The next name; MOE_ERR_NOT_FOUND after the last. */
static moe_status moei_walk_next(moei_walk *w, const moei_reader *r, char name[MOEI_P_NAME], moei_found *f, char file[MOEI_P_NAME]) {
    memset(f, 0, sizeof *f);
    file[0] = '\0';
    if (r->kind == MOEI_IS_INDEX) return moei_walk_index(w, name, file);
    if (r->kind == MOEI_IS_FILE) return moei_walk_file(w, r->first, name, f);
    if (w->left == 0) return MOE_ERR_NOT_FOUND;
    w->left--;
    moei_gguf_info(&w->gguf, name, f);
    f->shard = r->first;
    if (w->gguf.status == MOE_OK && f->at > r->first->source.size) moei_gguf_refuse(&w->gguf, MOE_ERR_FORMAT, "a tensor begins beyond the end of the file");
    f->at += r->gguf.data_at;
    return w->gguf.status;
}

/* Whether rest is the name of a row; *expert is the number in it, decimal without leading zeros. */
static int moei_is_named(const moei_named *row, const char *rest, size_t *expert) {
    const char *p = row->name;
    *expert = 0;
    for (; *p != '\0'; p++) {
        int digits = 0;
        if (*p != '%') {
            if (*rest++ != *p) return 0;
            continue;
        }
        for (; *rest >= '0' && *rest <= '9' && digits < 6; digits++) *expert = *expert * 10 + (size_t)(*rest++ - '0');
        if (digits == 0 || (digits > 1 && rest[-digits] == '0')) return 0;
    }
    return *rest == '\0';
}

/* The row of a name among those of the given kinds. */
static const moei_named *moei_named_row(long kinds, const char *rest, size_t *expert) {
    const moei_named *row;
    for (row = moei_names_known; row->name != NULL; row++)
        if ((row->kind & kinds) != 0 && moei_is_named(row, rest, expert)) return row;
    return NULL;
}

#define MOEI_P_GGUF_KINDS (-MOEI_G_EXPERTS)

static long moei_kinds_of_file(const moei_reader *r) { return r->kind == MOEI_IS_GGUF ? MOEI_P_GGUF_KINDS : ~MOEI_P_GGUF_KINDS; }

static int moei_is_router(const moei_reader *r, const char *rest) {
    size_t expert;
    const moei_named *row = moei_named_row(moei_kinds_of_file(r), rest, &expert);
    return row != NULL && (row->how & MOEI_IS_ROUTER) != 0;
}

/* ---- published layers: where the layer is --------------------------------------------------------------------------------------------------------- */

/* The part of a name before ".gate.weight" or another router's; 0: it is no router's. */
static size_t moei_router_prefix(const moei_reader *r, const char *name) {
    size_t i;
    for (i = 1; name[i - 1] != '\0'; i++)
        if (name[i] == '.' && moei_is_router(r, name + i + 1)) return i;
    return 0;
}

/* Variant i of the prefix that the caller gave, into out; 0: there is none. */
static int moei_prefix_variant(const moei_reader *r, const char *given, int i, char out[MOEI_P_NAME]) {
    static const char *const blocks[] = {"mlp", "block_sparse_moe", "feed_forward"};
    size_t length = moei_strlen(given), last, k;
    moei_text t;
    while (length > 0 && given[length - 1] == '.') length--;
    if (length == 0 || (i > 0 && r->kind == MOEI_IS_GGUF)) return 0;
    t.out = out, t.room = MOEI_P_NAME, t.length = 0;
    if (i > 3) { /* in place of the last part */
        for (last = length; last > 0 && given[last - 1] != '.';) last--;
        for (k = 0; k < 3 && !(moei_strlen(blocks[k]) == length - last && moei_memcmp(given + last, blocks[k], length - last) == 0);) k++;
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

/* Whether the file has a router with the prefix of the reader; *dense: it has a dense layer there. */
static moe_status moei_prefix_try(moei_reader *r, int *is, int *dense) {
    static const char *const plain[] = {"gate_proj.weight", "w1.weight", "up_proj.weight", "ffn_up.weight"};
    char name[MOEI_P_NAME], file[MOEI_P_NAME];
    const char *rest;
    moei_found f;
    moei_walk w;
    int i;
    moe_status status;
    moei_walk_begin(&w, r, r->first);
    while ((status = moei_walk_next(&w, r, name, &f, file)) == MOE_OK && !*is) {
        rest = moei_after(name, r->prefix);
        if (rest == NULL) continue;
        if (moei_is_router(r, rest)) *is = 1;
        for (i = 0; i < 4; i++)
            if (moei_strcmp(rest, plain[i]) == 0) *dense = 1;
    }
    return status == MOE_ERR_NOT_FOUND ? MOE_OK : status;
}

/* The error for a prefix without a router: what layers there are. */
static moe_status moei_prefix_missing(moei_reader *r, const char *given, int dense) {
    char name[MOEI_P_NAME], file[MOEI_P_NAME], shown[52], first[52], last[52];
    moei_found f;
    moei_walk w;
    size_t n = 0, length;
    moe_status status;
    first[0] = last[0] = '\0';
    moei_walk_begin(&w, r, r->first);
    while ((status = moei_walk_next(&w, r, name, &f, file)) == MOE_OK) {
        if ((length = moei_router_prefix(r, name)) == 0) continue;
        (void)moei_span_text(moei_span_of(name, length), n++ == 0 ? first : last);
    }
    if (status != MOE_ERR_NOT_FOUND) return status;
    (void)moei_span_text(moei_span_of(given, moei_strlen(given)), shown);
    if (dense) return moei_error(r->error, MOE_ERR_NOT_FOUND, "'%s' is a dense layer, without a router (first_k_dense_replace, mlp_only_layers); mixtures: %z%s%s%s%s", shown, n,
                                 n > 0 ? ", " : "", first, n > 1 ? " to " : "", last);
    if (n == 0) return moei_error(r->error, MOE_ERR_NOT_FOUND, "no router at '%s', nor anywhere else: %s has no mixture layer", shown, r->first->name);
    return moei_error(r->error, MOE_ERR_NOT_FOUND, "no router at '%s'; the file's mixtures (%z): %s%s%s", shown, n, first, n > 2 ? " ... " : n > 1 ? ", " : "", last);
}

static moe_status moei_prefix_find(moei_reader *r, const char *given) {
    int i, is = 0, dense = 0;
    for (i = 0; i < 7; i++) {
        moe_status status;
        if (!moei_prefix_variant(r, given, i, r->prefix)) continue;
        status = moei_prefix_try(r, &is, &dense);
        if (status != MOE_OK || is) return status;
    }
    return moei_prefix_missing(r, given, dense);
}

/* ---- published layers: which tensors are there ------------------------------------------------------------------------------------------------------ */

static size_t moei_n_found(const moe_buffer *list) { return list->size / sizeof(moei_found); }
static moei_found *moei_found_at(const moe_buffer *list, size_t i) { return (moei_found *)(void *)list->data + i; }

/* A tensor's whole name, cut in front, safe to print. */
static const char *moei_full_name(const moei_reader *r, const char *rest, char out[112]) {
    size_t length = moei_strlen(r->prefix), cut = length > 40 ? length - 40 : 0;
    moei_text t;
    char *p;
    t.out = out, t.room = 112, t.length = 0;
    out[0] = '\0';
    moei_put(&t, "...", cut > 0 ? 3 : 0);
    moei_put(&t, r->prefix + cut, length - cut);
    moei_put(&t, ".", 1);
    moei_put(&t, rest, moei_strlen(rest));
    for (p = out; *p != '\0'; p++)
        if ((unsigned char)*p < 0x20 || (unsigned char)*p > 0x7e) *p = '?';
    return out;
}

static int moei_begins(const char *text, const char *with) {
    while (*with != '\0' && *text == *with) text++, with++;
    return *with == '\0';
}

/* GGUF has a block's attention and norms under the same prefix. */
static int moei_is_of_mixture(const moei_reader *r, const char *rest) {
    const char *p;
    if (r->kind != MOEI_IS_GGUF) return 1;
    for (p = rest; *p != '\0'; p++)
        if (moei_begins(p, "norm")) return 0;
    return moei_begins(rest, "ffn_") || moei_begins(rest, "exp_");
}

static moe_status moei_list_add(moei_reader *r, moe_buffer *list, moei_found *f, const char *rest) {
    moe_status status;
    moei_copy_text(f->rest, sizeof f->rest, rest);
    list->allocator = r->allocator;
    status = moei_buffer_write(list, f, sizeof *f);
    return status == MOE_OK ? MOE_OK : moei_error(r->error, status, "no memory for the list of the layer's tensors");
}

/* Only plain names: what an index says must not lead out of its folder. */
static int moei_is_plain_name(const char *name) {
    const char *p;
    if (name[0] == '\0' || name[0] == '.') return 0;
    for (p = name; *p != '\0'; p++)
        if (*p == '/' || *p == '\\' || *p == ':' || (unsigned char)*p < 0x20) return 0;
    return 1;
}

/* The file that an index names, opened when it is not yet. */
static moe_status moei_shard_of(moei_reader *r, const char *rest, const char *file, moei_shard **shard) {
    char shown[52], of[52];
    moe_status status;
    for (*shard = r->shards; *shard != NULL; *shard = (*shard)->next)
        if (*shard != r->first && moei_strcmp((*shard)->name, file) == 0) return MOE_OK;
    (void)moei_span_text(moei_span_of(file, moei_strlen(file)), shown);
    (void)moei_span_text(moei_span_of(rest, moei_strlen(rest)), of);
    if (!moei_is_plain_name(file))
        return moei_error(r->error, MOE_ERR_FORMAT, "%s: the file of '%s' is called '%s': it must be a plain name in the same folder", r->first->name, of, shown);
    status = moei_shard_open(r, file, shard);
    if (status == MOE_ERR_NOT_FOUND) return moei_error(r->error, status, "%s: the file '%s', which has '%s', is missing", r->first->name, shown, of);
    return status == MOE_OK ? moei_shard_header(r, *shard) : status;
}

/* Collects the tensors behind the prefix. */
static moe_status moei_collect(moei_reader *r) {
    char name[MOEI_P_NAME], file[MOEI_P_NAME];
    const char *rest;
    moei_shard *shard;
    moei_found f;
    moei_walk w;
    moe_status status;
    moei_walk_begin(&w, r, r->first);
    while ((status = moei_walk_next(&w, r, name, &f, file)) == MOE_OK) {
        rest = moei_after(name, r->prefix);
        if (rest == NULL || !moei_is_of_mixture(r, rest)) continue;
        if (r->kind == MOEI_IS_INDEX) {
            if ((status = moei_shard_of(r, rest, file, &shard)) != MOE_OK) return status;
            f.shard = shard;
        }
        if ((status = moei_list_add(r, r->kind == MOEI_IS_INDEX ? &r->listed : &r->found, &f, rest)) != MOE_OK) return status;
    }
    if (status != MOE_ERR_NOT_FOUND) return status;
    for (shard = r->shards; shard != NULL && r->kind == MOEI_IS_INDEX; shard = shard->next) {
        if (shard->bytes.size == 0) continue; /* the index itself, config.json */
        moei_walk_begin(&w, r, shard);
        while ((status = moei_walk_file(&w, shard, name, &f)) == MOE_OK)
            if ((rest = moei_after(name, r->prefix)) != NULL && (status = moei_list_add(r, &r->found, &f, rest)) != MOE_OK) return status;
        if (status != MOE_ERR_NOT_FOUND) return status;
    }
    return MOE_OK;
}

/* ---- published layers: the family ------------------------------------------------------------------------------------------------------------------- */

/* Whether the family reads a key. */
static int moei_reads(const moei_family *family, const char *key) { return moei_is_word_of(key, moei_common_keys) || moei_is_word_of(key, family->keys); }

static int moei_is_single(const moei_named *row) { return moei_memchr(row->name, '%', moei_strlen(row->name)) != NULL; }

static long moei_kinds_of(const moei_reader *r, const moei_family *family) { return r->kind == MOEI_IS_GGUF ? family->gguf : family->kinds; }

/* Whether the names that are there are those of a family: all are known, and what must be there is. */
static int moei_family_fits(const moei_reader *r, const moei_family *family, int by_names) {
    long seen = 0, needs = r->kind == MOEI_IS_GGUF ? family->gguf_needs : family->needs;
    size_t i, expert;
    if (by_names && family->marks < 0) return 0;
    if (by_names && r->kind != MOEI_IS_GGUF) needs |= family->marks;
    for (i = 0; i < moei_n_found(&r->found); i++) {
        const moei_named *row = moei_named_row(moei_kinds_of(r, family), moei_found_at(&r->found, i)->rest, &expert);
        if (row == NULL) return 0;
        seen |= row->kind;
    }
    return (needs & ~seen) == 0;
}

/* Advice about names that mean a quantised model. */
static const char *moei_advice(const char *rest) {
    const char *p;
    for (p = rest; *p != '\0'; p++)
        if (moei_begins(p, "_blocks") || moei_begins(p, "scale") || moei_begins(p, "_packed") || moei_begins(p, "qweight") || moei_begins(p, "qzeros"))
            return ": quantised models of this form (MXFP4, FP8, GPTQ, AWQ) are not read; save it dequantised (bf16), or as GGUF in Q8_0 or Q4_0";
    return "";
}

/* The error for names that are not those of a family; NULL: of none. */
static moe_status moei_family_none(const moei_reader *r, const moei_family *family) {
    const long kinds = family != NULL ? moei_kinds_of(r, family) : moei_kinds_of_file(r);
    long missing = family == NULL ? 0 : r->kind == MOEI_IS_GGUF ? family->gguf_needs : family->needs;
    const moei_named *row;
    char shown[112];
    size_t i, expert;
    for (i = 0; i < moei_n_found(&r->found); i++) {
        const char *rest = moei_found_at(&r->found, i)->rest;
        if ((row = moei_named_row(kinds, rest, &expert)) == NULL)
            return moei_error(r->error, MOE_ERR_UNSUPPORTED, "tensor '%s': %s has none of this name%s", moei_full_name(r, rest, shown),
                              family != NULL ? family->name : "any known family", moei_advice(rest));
        missing &= ~row->kind;
    }
    for (row = moei_names_known; row->name != NULL; row++)
        if ((row->kind & missing) != 0) return moei_error(r->error, MOE_ERR_NOT_FOUND, "tensor '%s': missing in the file, and %s needs it", moei_full_name(r, row->name, shown), family->name);
    return moei_error(r->error, MOE_ERR_UNSUPPORTED, "'%s': the names of its tensors are together those of no family: name the model by preset", r->prefix);
}

/* What the caller's preset, or model_type or general.architecture, leaves of the families; *by_names: nothing but the names speaks. */
static moe_status moei_family_candidates(moei_reader *r, const moe_preset *preset, uint32_t *candidates, int *by_names) {
    char type[MOEI_P_TEXT], outer[MOEI_P_TEXT];
    const moei_family *family;
    uint32_t bit = 1, named = 0, exact = 0;
    int kind = MOEI_VALUE_NONE;
    *by_names = 0;
    type[0] = outer[0] = '\0';
    if (preset == NULL && r->kind == MOEI_IS_GGUF) {
        memcpy(type, r->gguf.arch, sizeof type);
        kind = MOEI_VALUE_TEXT;
    } else if (preset == NULL) kind = moei_lookup(r, "model_type", type);
    for (family = moei_families; family->name != NULL; family++, bit <<= 1) {
        if (preset != NULL && moei_strcmp(family->preset, preset->name) == 0) named |= bit;
        if (preset != NULL && moei_strcmp(family->name, preset->name) == 0) exact |= bit;
        if (preset == NULL && moei_is_word_of(type, r->kind == MOEI_IS_GGUF ? family->archs : family->types)) named |= bit;
    }
    r->by_type = preset == NULL && named != 0;
    if (exact != 0) named = exact;
    if (preset == NULL && named == 0 && kind != MOEI_VALUE_NONE)
        return moei_error(r->error, MOE_ERR_UNSUPPORTED, "%s = '%s': a family that is not known here; name one that computes the same by preset",
                          r->kind == MOEI_IS_GGUF ? "general.architecture" : "config.json: model_type", type);
    *by_names = named == 0;
    *candidates = named != 0 ? named : bit - 1;
    return MOE_OK;
}

static moe_status moei_family_find(moei_reader *r, const moe_preset *preset) {
    const moei_family *family, *fitting = NULL, *candidate = NULL, *second = NULL;
    uint32_t candidates = 0, bit = 1;
    int by_names, n = 0;
    char text[MOEI_P_TEXT];
    const int normed = moei_lookup(r, "norm_topk_prob", text) != MOEI_VALUE_NONE; /* families that this tells apart need no other name */
    moe_status status = moei_family_candidates(r, preset, &candidates, &by_names);
    if (status != MOE_OK) return status;
    for (family = moei_families; family->name != NULL; family++, bit <<= 1) {
        if (!(candidates & bit)) continue;
        if (candidate == NULL) candidate = family;
        if (!moei_family_fits(r, family, by_names) || (by_names && normed && !moei_reads(family, "norm_topk_prob"))) continue;
        if (n++ == 0) fitting = family;
        else second = family;
    }
    if (n > 1 && preset == NULL && !normed)
        return moei_error(r->error, MOE_ERR_UNSUPPORTED, "'%s': its names fit %s and %s: name the model by preset, or put its config.json beside", r->prefix, fitting->name,
                          second->name);
    r->family = fitting != NULL ? fitting : candidate;
    if (fitting != NULL) return MOE_OK;
    return moei_family_none(r, by_names ? NULL : candidate);
}

/* ---- published layers: shapes ------------------------------------------------------------------------------------------------------------------------- */

enum { MOEI_AT_E = 0, MOEI_AT_H, MOEI_AT_I, MOEI_AT_S };

/* The size that a letter of a shape stands for, as far as it is known. */
static size_t moei_letter(const size_t sizes[4], char letter) {
    switch (letter) {
    case 'E': return sizes[MOEI_AT_E];
    case 'H': return sizes[MOEI_AT_H];
    case 'I': return sizes[MOEI_AT_I];
    case 'J': return 2 * sizes[MOEI_AT_I];
    case 'S': return sizes[MOEI_AT_S];
    default: return 1;
    }
}

static moe_status moei_shape_refuse(const moei_reader *r, const moei_found *f) {
    char shown[112], want[80], have[80];
    size_t sizes[MOE_FILE_MAX_DIMS];
    int i, n = (int)moei_strlen(f->row->shape);
    for (i = 0; i < n; i++) sizes[i] = moei_letter(r->sizes, f->row->shape[i]);
    return moei_error(r->error, MOE_ERR_SHAPE, "tensor '%s': the shape must be %s, it is %s", moei_full_name(r, f->rest, shown), moei_shape_text(sizes, n, want),
                      moei_shape_text(f->shape, f->n_dims, have));
}

/* Takes the sizes that are not known yet from a tensor, and checks the others. */
static moe_status moei_shape_solve(moei_reader *r, const moei_found *f) {
    const char *shape = f->row->shape;
    int i, n = (int)moei_strlen(shape);
    for (i = 0; i < n && n == f->n_dims; i++) {
        size_t *size = &r->sizes[shape[i] == 'E' ? MOEI_AT_E : shape[i] == 'H' ? MOEI_AT_H : shape[i] == 'S' ? MOEI_AT_S : MOEI_AT_I];
        size_t most = shape[i] == 'E' ? (size_t)MOE_MAX_EXPERTS : (size_t)MOE_MAX_WIDTH;
        if (shape[i] != '1' && *size == 0) *size = shape[i] == 'J' ? f->shape[i] / 2 : f->shape[i];
        if (f->shape[i] == 0 || f->shape[i] > 2 * most || f->shape[i] != moei_letter(r->sizes, shape[i])) break;
    }
    return n == f->n_dims && i == n ? MOE_OK : moei_shape_refuse(r, f);
}

/* What is read of a file: is the element type known, and do its bytes lie in the file? */
static moe_status moei_found_check(const moei_reader *r, const moei_found *f) {
    char shown[112];
    int known = f->dtype <= MOE_DTYPE_BF16 || f->dtype > MOE_DTYPE_COUNT;
    if (!known && r->kind == MOEI_IS_GGUF)
        return moei_error(r->error, MOE_ERR_UNSUPPORTED, "tensor '%s': its type is GGUF's number %d; F32, F16, BF16, F64, Q8_0 and Q4_0 are read",
                          moei_full_name(r, f->rest, shown), f->code);
    if (!known)
        return moei_error(r->error, MOE_ERR_UNSUPPORTED, "tensor '%s': its dtype is %s; F32, F16, BF16 and F64 are read", moei_full_name(r, f->rest, shown),
                          f->dtype < MOE_DTYPE_COUNT ? moei_dtype_names[f->dtype] : "not known");
    if (f->at > f->shard->source.size || f->bytes > f->shard->source.size - f->at)
        return moei_error(r->error, MOE_ERR_FORMAT, "tensor '%s': %z bytes from byte %z on go beyond the end of the file", moei_full_name(r, f->rest, shown), f->bytes,
                          (size_t)f->at);
    return MOE_OK;
}

/* Gives every tensor its row, and solves the sizes in the order of the rows: the router's first. */
static moe_status moei_found_match(moei_reader *r) {
    char shown[112];
    const moei_named *row;
    size_t i;
    for (i = 0; i < moei_n_found(&r->found); i++) {
        moei_found *f = moei_found_at(&r->found, i);
        moe_status status;
        f->row = moei_named_row(moei_kinds_of(r, r->family), f->rest, &f->expert);
        if ((status = moei_found_check(r, f)) != MOE_OK) return status;
    }
    for (row = moei_names_known; row->name != NULL; row++)
        for (i = 0; i < moei_n_found(&r->found) && (row->kind & moei_kinds_of(r, r->family)) != 0; i++) {
            const moei_found *f = moei_found_at(&r->found, i);
            moe_status status = f->row == row ? moei_shape_solve(r, f) : MOE_OK;
            if (status != MOE_OK) return status;
            if (f->row == row && f->expert >= r->sizes[MOEI_AT_E])
                return moei_error(r->error, MOE_ERR_SHAPE, "tensor '%s': the router has only %z experts", moei_full_name(r, f->rest, shown), r->sizes[MOEI_AT_E]);
        }
    return MOE_OK;
}

/* ---- published layers: settings ------------------------------------------------------------------------------------------------------------------------- */

/* Where settings come from, for messages. */
static const char *moei_settings_place(const moei_reader *r) { return r->kind == MOEI_IS_GGUF ? "metadata" : "config.json"; }

/* Applies the value of a key, if it is there. *done: some row knew it. */
static moe_status moei_setting_apply(moei_reader *r, const moei_setting *s, const char *text, int kind, int *done) {
    const moe_field *field;
    moe_error why;
    moe_status status;
    why.message[0] = '\0';
    if (s->value != NULL && moei_strcmp(s->value, text) != 0) return MOE_OK;
    *done = 1;
    if (s->value != NULL) return moe_fields_apply(moei_layer_fields, &r->settings, s->settings, r->error);
    field = moe_field_find(moei_layer_fields, s->settings);
    status = kind == MOEI_VALUE_SCALAR ? moei_field_set_n(field, &r->settings, text, moei_strlen(text), &why) : MOE_ERR_CONFIG;
    if (status == MOE_OK && (s->zero || !moei_field_is_zero(field, &r->settings))) return MOE_OK;
    return moei_error(r->error, MOE_ERR_CONFIG, "%s: %s = %s: a number is expected%s", moei_settings_place(r), s->key, text, status == MOE_OK ? " that is not 0" : "");
}

/* All that the file says, over what stands in r->settings. */
static moe_status moei_settings_read(moei_reader *r) {
    const moei_setting *s, *t;
    char text[MOEI_P_TEXT];
    for (s = moei_settings; s->key != NULL; s = t) {
        int done = 0, kind = moei_reads(r->family, s->key) ? moei_lookup(r, s->key, text) : (int)MOEI_VALUE_NONE;
        for (t = s; t->key != NULL && moei_strcmp(t->key, s->key) == 0; t++) {
            moe_status status = kind != MOEI_VALUE_NONE ? moei_setting_apply(r, t, text, kind, &done) : MOE_OK;
            if (status != MOE_OK) return status;
        }
        if (kind != MOEI_VALUE_NONE && !done)
            return moei_error(r->error, MOE_ERR_UNSUPPORTED, "%s: %s = %s is not supported for %s", moei_settings_place(r), s->key,
                              kind == MOEI_VALUE_OTHER ? "a list" : text, r->family->name);
    }
    return MOE_OK;
}

/* A size that the settings give must be the tensors'. */
static moe_status moei_setting_size(const moei_reader *r, const char *what, int *field, size_t size) {
    if (*field != 0 && (size_t)*field != size)
        return moei_error(r->error, MOE_ERR_CONFIG, "%s: %s = %d, but the tensors say %z", moei_settings_place(r), what, *field, size);
    *field = (int)size;
    return MOE_OK;
}

/* Settings that belong together, and those of training, which a layer without gradients has no use for. */
static void moei_settings_settle(moei_reader *r) {
    moe_router_config *c = &r->settings.router;
    if (c->select == MOE_SELECT_GROUPED_TOP_K && c->groups <= 1) c->select = MOE_SELECT_TOP_K;
    if (c->select != MOE_SELECT_GROUPED_TOP_K) c->groups = c->groups_kept = c->group_score = 0;
    if (moei_strcmp(r->family->name, "deepseek_v2") == 0 && c->weight == MOE_WEIGHT_SUM) c->scale = MOEI_R(1.0);
    c->bias_rate = c->loss_balance = c->loss_z = MOEI_R(0.0);
}

/* Which tensors there are decides what the layer has; the widths are theirs. */
static moe_status moei_settings_sizes(moei_reader *r) {
    static const int places[4] = {MOE_ROUTER_BIAS, MOE_ROUTER_SELECTION_BIAS, MOE_EXPERTS_DOWN_BIAS, MOE_SHARED_SIGMOID};
    moe_layer_config *c = &r->settings;
    int *const flags[4] = {&c->router.router_bias, &c->router.selection_bias, &c->expert_bias, &c->shared_sigmoid};
    size_t i, shared = r->sizes[MOEI_AT_S];
    int k;
    moe_status status = moei_setting_size(r, "number of experts", &c->router.n_experts, r->sizes[MOEI_AT_E]);
    if (status == MOE_OK) status = moei_setting_size(r, "hidden_size", &c->router.d_model, r->sizes[MOEI_AT_H]);
    if (status == MOE_OK && r->sizes[MOEI_AT_I] > 0) status = moei_setting_size(r, "moe_intermediate_size", &c->d_ff, r->sizes[MOEI_AT_I]);
    if (status != MOE_OK) return status;
    for (k = 0; k < 4; k++) *flags[k] = 0;
    for (i = 0; i < moei_n_found(&r->found); i++)
        for (k = 0; k < 4; k++)
            if (moei_found_at(&r->found, i)->row->place == places[k] || moei_found_at(&r->found, i)->row->second == places[k]) *flags[k] = 1;
    if (shared > 0 && (c->n_shared <= 0 || shared % (size_t)c->n_shared != 0)) c->n_shared = 1;
    if (shared > 0) c->d_shared = (int)(shared / (size_t)c->n_shared);
    return MOE_OK;
}

static moe_status moei_settings_make(moei_reader *r, const moe_preset *preset) {
    moe_layer_config *c = &r->settings;
    moe_status status = moe_layer_preset(preset != NULL ? preset->name : r->family->preset, c, r->error);
    if (status != MOE_OK) return status;
    c->router.n_experts = c->n_shared = 0;
    if (r->by_type && r->kind != MOEI_IS_GGUF) status = moe_fields_apply(moei_layer_fields, c, r->family->assumed, r->error);
    if (r->by_type && r->kind == MOEI_IS_GGUF) c->router.groups = c->router.groups_kept = 1, c->router.scale = MOEI_R(1.0);
    if (status == MOE_OK) status = moei_settings_read(r);
    if (status != MOE_OK) return status;
    if (r->kind == MOEI_IS_GGUF && c->router.groups > 1) c->router.select = MOE_SELECT_GROUPED_TOP_K; /* it does not say by which score */
    moei_settings_settle(r);
    return moei_settings_sizes(r);
}

/* ---- published layers: reading the values ---------------------------------------------------------------------------------------------------------------- */

/* A tensor of a file beside the layer's numbers: [experts, outs, ins] or, turned, [experts, ins, outs]; outs are gate's and up's where there are two. */
typedef struct moei_part {
    moe_real *to[2];
    size_t experts, outs, ins, count;
    int two, turned, in_turn;
} moei_part;

/* slots hold the layer's tensors by place; what is read there may be constant. */
static moei_part moei_part_of(const moe_layer *layer, const moei_named *row, const size_t sizes[4], size_t expert) {
    const size_t n = moei_strlen(row->shape);
    moei_part p;
    size_t i;
    memset(&p, 0, sizeof p);
    for (p.count = 1, i = 0; i < n; i++) p.count *= moei_letter(sizes, row->shape[i]);
    p.two = row->second >= 0, p.turned = (row->how & MOEI_IS_TURNED) != 0, p.in_turn = (row->how & MOEI_IS_IN_TURN) != 0;
    p.experts = p.outs = 1, p.ins = p.count;
    if (p.two || p.turned) {
        p.experts = sizes[MOEI_AT_E];
        p.outs = moei_letter(sizes, row->shape[p.turned ? n - 1 : 1]);
        p.ins = p.count / p.experts / p.outs;
    }
    memcpy(&p.to[0], &layer->tensors[row->place], sizeof p.to[0]); /* only read through unless the layer owns them */
    if (p.two) memcpy(&p.to[1], &layer->tensors[row->second], sizeof p.to[1]);
    if (moei_is_single(row)) p.to[0] += expert * p.count;
    return p;
}

/* The layer's number for one of the file's. */
static moe_real *moei_part_at(const moei_part *p, size_t expert, size_t out, size_t in) {
    const size_t half = p->two ? p->outs / 2 : p->outs;
    const int second = p->two && (p->in_turn ? out % 2 != 0 : out >= half);
    const size_t row = !p->two ? out : p->in_turn ? out / 2 : second ? out - half : out;
    return p->to[second] + (expert * half + row) * p->ins + in;
}

/* Moves elements first .. first + n of the file's tensor to the layer (write = 0) or from it, line by line of the file. */
static void moei_part_move(const moei_part *p, size_t first, size_t n, moe_real *values, int write) {
    const size_t line = p->turned ? p->outs : p->ins, lines = p->turned ? p->ins : p->outs;
    size_t k, run;
    for (; n > 0; first += run, n -= run, values += run) {
        const size_t expert = first / line / lines, a = first / line % lines, b = first % line;
        moe_real *at = p->turned ? NULL : moei_part_at(p, expert, a, b);
        run = n < line - b ? n : line - b;
        if (at != NULL) memcpy(write ? values : at, write ? at : values, run * sizeof *at);
        for (k = 0; k < run && at == NULL; k++) {
            if (write) values[k] = *moei_part_at(p, expert, b + k, a);
            else *moei_part_at(p, expert, b + k, a) = values[k];
        }
    }
}

/* Blocks of 32: a scale in half precision, then 32 bytes, or 16 with two numbers each, all low halves first. */
static void moei_blocks(int dtype, const unsigned char *p, size_t blocks, moe_real *values) {
    for (; blocks > 0; blocks--, values += 32, p += dtype == MOEI_DTYPE_Q8_0 ? 34 : 18) {
        moe_real scale = moei_from_f16((uint16_t)moei_load(p, 2));
        int i;
        for (i = 0; i < 32 && dtype == MOEI_DTYPE_Q8_0; i++) values[i] = scale * (moe_real)moei_load_signed(p + 2 + i, 1);
        for (i = 0; i < 16 && dtype == MOEI_DTYPE_Q4_0; i++) {
            values[i] = scale * (moe_real)((int)(p[2 + i] & 15u) - 8);
            values[i + 16] = scale * (moe_real)((int)(p[2 + i] >> 4) - 8);
        }
    }
}

static moe_status moei_found_read(moei_reader *r, const moei_found *f, moe_layer *layer) {
    unsigned char bytes[MOEI_P_CHUNK * 8];
    moe_real values[MOEI_P_CHUNK];
    const moei_part part = moei_part_of(layer, f->row, r->sizes, f->expert);
    moe_file_tensor t;
    uint64_t at = f->at;
    size_t done, n, size;
    moe_status status;
    memset(&t, 0, sizeof t);
    for (done = 0; done < f->count; done += n, at += size) {
        n = f->count - done < MOEI_P_CHUNK ? f->count - done : (size_t)MOEI_P_CHUNK;
        size = f->dtype >= MOE_DTYPE_COUNT ? n / 32 * (f->dtype == MOEI_DTYPE_Q8_0 ? 34u : 18u) : n * moei_dtype_sizes[f->dtype];
        status = moei_source_read(r, f->shard, at, bytes, size);
        if (status != MOE_OK) return status;
        t.dtype = f->dtype, t.count = n, t.data = bytes, t.bytes = size;
        if (f->dtype >= MOE_DTYPE_COUNT) moei_blocks(f->dtype, bytes, n / 32, values);
        else if ((status = moe_file_values(&t, 0, n, values)) != MOE_OK) return status;
        moei_part_move(&part, done, n, values, 0);
    }
    return MOE_OK;
}

/* ---- published layers: is everything there, once? ---------------------------------------------------------------------------------------------------------- */

static int moei_is_of_experts(int place) { return place >= MOE_EXPERTS_GATE && place < MOE_SHARED_GATE; }

/* Marks what a row's tensor gives; 0: some of it was there before. seen[e] has a bit for each place. */
static int moei_found_mark(uint64_t *seen, size_t experts, const moei_named *row, size_t expert) {
    const int all = moei_is_of_experts(row->place) && !moei_is_single(row);
    uint64_t bits = (uint64_t)1 << row->place | (row->second >= 0 ? (uint64_t)1 << row->second : 0);
    size_t e;
    int fresh = 1;
    for (e = all ? 0 : expert; e < (all ? experts : expert + 1); e++) {
        if (seen[e] & bits) fresh = 0;
        seen[e] |= bits;
    }
    return fresh;
}

/* The error for a place that nothing fills: a tensor that would, in the form that the others have. */
static moe_status moei_place_missing(const moei_reader *r, int place, size_t expert) {
    char shown[112], rest[MOEI_P_REST];
    const moei_named *row, *best = NULL;
    const char *p;
    size_t i;
    int sure = 0;
    moei_text t;
    for (row = moei_names_known; row->name != NULL; row++) {
        if (!(row->kind & moei_kinds_of(r, r->family)) || (row->place != place && row->second != place)) continue;
        if (best == NULL) best = row;
        for (i = 0; i < moei_n_found(&r->found) && !sure; i++) { /* others of its form are there */
            const moei_named *other = moei_found_at(&r->found, i)->row;
            sure = other->kind == row->kind && !(other->how & MOEI_IS_ROUTER) && moei_is_single(other) == moei_is_single(row);
            if (sure) best = row;
        }
    }
    if (best == NULL) return moei_error(r->error, MOE_ERR_CONFIG, "the settings need a tensor of the layer, number %d, that %s does not have", place, r->family->name);
    t.out = rest, t.room = sizeof rest, t.length = 0;
    for (p = best->name; *p != '\0'; p++) {
        if (*p == '%') moei_put_integer(&t, (int64_t)expert);
        else moei_put(&t, p, 1);
    }
    return moei_error(r->error, MOE_ERR_NOT_FOUND, "tensor '%s': missing in the file", moei_full_name(r, rest, shown));
}

/* State of training is not published. */
static int moei_is_state(int place) { return place >= MOE_ROUTER_STEP && place <= MOE_ROUTER_CAPACITY; }

static moe_status moei_found_complete(moei_reader *r, const moe_layer *layer, uint64_t *seen) {
    char shown[112], of[52];
    size_t i, e, expert, experts = r->sizes[MOEI_AT_E];
    int place;
    for (i = 0; i < moei_n_found(&r->found); i++) {
        const moei_found *f = moei_found_at(&r->found, i);
        if (!moei_found_mark(seen, experts, f->row, f->expert))
            return moei_error(r->error, MOE_ERR_FORMAT, "tensor '%s': what it holds is there twice", moei_full_name(r, f->rest, shown));
    }
    for (i = 0; i < moei_n_found(&r->listed); i++) {
        const moei_found *f = moei_found_at(&r->listed, i);
        const moei_named *row = moei_named_row(moei_kinds_of(r, r->family), f->rest, &expert);
        if (row == NULL || expert >= experts || !(seen[expert] >> row->place & 1u))
            return moei_error(r->error, MOE_ERR_NOT_FOUND, "tensor '%s': the index has it in '%s', and it is not there", moei_full_name(r, f->rest, shown),
                              moei_span_text(moei_span_of(f->shard->name, moei_strlen(f->shard->name)), of));
    }
    for (place = 0; place < MOE_LAYER_SLOTS; place++)
        for (e = 0; e < (moei_is_of_experts(place) ? experts : 1) && (layer->places >> place & 1u) && !moei_is_state(place); e++)
            if (!(seen[e] >> place & 1u)) return moei_place_missing(r, place, e);
    return MOE_OK;
}

/* Settings and sizes are complete: makes the layer and fills it. */
static moe_status moei_published_fill(moei_reader *r, moe_layer *layer) {
    uint64_t *seen;
    size_t i;
    moe_status status = moe_layer_init(layer, &r->settings, r->error);
    if (status != MOE_OK) return moei_of_shard(r, r->family->name, status);
    layer->allocator = r->allocator;
    seen = (uint64_t *)moei_alloc(&r->allocator, r->sizes[MOEI_AT_E], sizeof *seen);
    if (seen == NULL) return moei_error(r->error, MOE_ERR_MEMORY, "no memory for the list of %z experts", r->sizes[MOEI_AT_E]);
    status = moei_found_complete(r, layer, seen);
    moei_free(&r->allocator, seen, r->sizes[MOEI_AT_E] * sizeof *seen);
    if (status == MOE_OK) status = moei_layer_allocate(layer, 0, r->error);
    if (status != MOE_OK) return status;
    for (i = 0; i < moei_n_found(&r->found) && status == MOE_OK; i++) status = moei_found_read(r, moei_found_at(&r->found, i), layer);
    if (status != MOE_OK) moe_layer_free(layer);
    return status;
}

/* What kind of file it is, and what comes before its tensors. */
static moe_status moei_published_open(moei_reader *r, const char *name) {
    unsigned char begin[9];
    uint64_t size;
    moe_status status = moei_shard_open(r, name, &r->first);
    if (status != MOE_OK) return status;
    size = r->first->source.size;
    memset(begin, 0, sizeof begin);
    if ((status = moei_source_read(r, r->first, 0, begin, size < sizeof begin ? (size_t)size : sizeof begin)) != MOE_OK) return status;
    if (moei_memcmp(begin, "GGUF", 4) == 0) {
        r->kind = MOEI_IS_GGUF;
        return moei_gguf_open(r);
    }
    if (begin[8] == '{' && begin[7] == 0) {
        status = moei_shard_header(r, r->first);
        return status == MOE_OK ? moei_config_open(r) : status;
    }
    if (begin[0] != '{' && begin[0] != ' ' && begin[0] != '\n' && begin[0] != '\r')
        return moei_error(r->error, MOE_ERR_FORMAT, "%s: neither a safetensors file, nor an index of some, nor GGUF", r->first->name);
    r->kind = MOEI_IS_INDEX;
    if ((status = moei_text_open(r, r->first, SIZE_MAX > 65535 ? (size_t)(MOEI_FILE_MAX_HEADER & SIZE_MAX) : (size_t)32768, &r->index)) != MOE_OK) return status;
    r->weight_map = moei_text_member(&r->index, 0, "weight_map");
    if (r->weight_map == 0 || r->index.data[r->weight_map] != '{')
        return moei_error(r->error, MOE_ERR_FORMAT, "%s: no index of safetensors files: it has no object 'weight_map'", r->first->name);
    return moei_config_open(r);
}

static moe_status moei_published_read(moe_layer *layer, const moei_folder *folder, const char *name, const char *prefix, const char *preset_name,
                                      const moe_allocator *allocator, moe_error *error) {
    const moe_preset *preset = preset_name != NULL ? moe_preset_find(preset_name) : NULL;
    char shown[52];
    moei_reader r;
    moe_layer made;
    moe_error own;
    moe_status status;
    if (preset_name != NULL && preset == NULL)
        return moei_error(error, MOE_ERR_NOT_FOUND, "preset = %s: there is no preset of this name; moe_presets lists them",
                          moei_span_text(moei_span_of(preset_name, moei_strlen(preset_name)), shown));
    if (moei_strlen(prefix) > MOEI_P_PREFIX) return moei_error(error, MOE_ERR_ARGUMENT, "prefix: longer than %d bytes", (int)MOEI_P_PREFIX);
    if (!moei_can_allocate(allocator)) return moei_error(error, MOE_ERR_ARGUMENT, "allocator is NULL, and MOE_NO_MALLOC leaves no other");
    memset(&r, 0, sizeof r);
    memset(&made, 0, sizeof made);
    own.message[0] = '\0';
    r.folder = folder;
    r.error = &own;
    if (allocator != NULL) r.allocator = *allocator;
    status = moei_published_open(&r, name);
    if (status == MOE_OK) status = moei_prefix_find(&r, prefix);
    if (status == MOE_OK) status = moei_collect(&r);
    if (status == MOE_OK) status = moei_family_find(&r, preset);
    if (status == MOE_OK) status = moei_found_match(&r);
    if (status == MOE_OK) status = moei_settings_make(&r, preset);
    if (status == MOE_OK) status = moei_published_fill(&r, &made);
    moei_reader_close(&r);
    if (status == MOE_OK) *layer = made;
    else (void)moei_error(error, status, "%s", own.message[0] != '\0' ? own.message : moe_status_text(status));
    return status;
}

/* Sources in memory as a folder; each is opened under its own name, the first under that too. */
typedef struct moei_sources {
    const moe_source *sources;
    size_t n;
} moei_sources;

static moe_status moei_sources_open(void *ctx, const char *name, moe_source *source, moe_error *error) {
    const moei_sources *s = (const moei_sources *)ctx;
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

moe_status moe_read_published(moe_layer *layer, const moe_source *sources, size_t n_sources, const char *prefix, const char *preset, const moe_allocator *allocator,
                              moe_error *error) {
    moei_sources s;
    moei_folder folder;
    if (layer == NULL || sources == NULL || n_sources == 0 || prefix == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "layer, sources or prefix is NULL, or there are no sources");
    s.sources = sources, s.n = n_sources;
    folder.ctx = &s, folder.open = moei_sources_open, folder.close = NULL, folder.reason = NULL;
    return moei_published_read(layer, &folder, sources[0].name != NULL ? sources[0].name : "the file", prefix, preset, allocator, error);
}

#ifndef MOE_NO_STDIO

#ifdef _MSC_VER
#pragma warning(push)
#pragma warning(disable : 4996)
#endif

/* ---- published layers: files ---------------------------------------------------------------------------------------------------------------------------- */

#ifndef MOEI_SEEK_MOST
#define MOEI_SEEK_MOST LONG_MAX /* the furthest that one seek goes */
#endif

typedef struct moei_disk {
    const moe_allocator *allocator;
    char path[MOEI_PATH_SIZE]; /* the folder, its last slash included, then the file opened last */
    size_t length;             /* of the folder's */
    int failed;                /* errno of the last read */
    int opened;                /* files so far: the first must be there */
} moei_disk;

/* A file and where it stands. */
typedef struct moei_disk_file {
    moei_disk *disk;
    FILE *file;
    uint64_t at;
} moei_disk_file;

/* Long seeks are several: long may have 32 bits where files have more. */
static int moei_disk_seek(FILE *f, uint64_t to) {
    uint64_t step = to < (uint64_t)MOEI_SEEK_MOST ? to : (uint64_t)MOEI_SEEK_MOST;
    if (fseek(f, (long)step, SEEK_SET) != 0) return 0;
    for (to -= step; to > 0; to -= step) {
        step = to < (uint64_t)MOEI_SEEK_MOST ? to : (uint64_t)MOEI_SEEK_MOST;
        if (fseek(f, (long)step, SEEK_CUR) != 0) return 0;
    }
    return 1;
}

static moe_status moei_disk_read(void *ctx, uint64_t at, void *to, size_t size) {
    moei_disk_file *f = (moei_disk_file *)ctx;
    size_t done = 0, got = 1;
    int good;
    errno = 0;
    good = f->at == at || moei_disk_seek(f->file, at);
    for (; good && done < size && got > 0; done += got) got = fread((unsigned char *)to + done, 1, size - done, f->file);
    f->disk->failed = errno;
    f->at = good && done == size ? at + size : UINT64_MAX;
    if (good && done == size) return MOE_OK;
    return good && !ferror(f->file) ? MOE_ERR_FORMAT : MOE_ERR_IO;
}

static const char *moei_disk_reason(void *ctx) {
    const moei_disk *d = (const moei_disk *)ctx;
    return d->failed != 0 ? strerror(d->failed) : "the file has become shorter, or the system gives no reason";
}

/* 1: there is a byte at a place; 0: there is none; -1: that cannot be told. */
static int moei_disk_has(FILE *f, uint64_t at) {
    unsigned char byte;
    if (!moei_disk_seek(f, at)) return -1;
    if (fread(&byte, 1, 1, f) == 1) return 1;
    return ferror(f) ? -1 : 0;
}

/* The size of a file: what ftell says, or where it cannot say that in a long, by looking. */
static int moei_disk_size(FILE *f, uint64_t *size) {
    uint64_t low = 0, high = 1;
    long end = fseek(f, 0, SEEK_END) == 0 ? ftell(f) : -1;
    int has = 1;
    *size = (uint64_t)end;
    if (end > 0) return 1; /* of a file that says 0 something may come yet, or why it cannot be read */
    while (has > 0 && high < (uint64_t)1 << 50)
        if ((has = moei_disk_has(f, high - 1)) > 0) low = high, high *= 2;
    while (has >= 0 && high - low > 1) { /* low bytes are there, high are not */
        uint64_t middle = low + (high - low) / 2;
        has = moei_disk_has(f, middle - 1);
        if (has > 0) low = middle;
        else high = middle;
    }
    *size = low;
    return has >= 0;
}

/* Whether a file could not be opened because there is none. */
static int moei_is_absence(int reason) { return reason == ENOENT || reason == ENOTDIR; }

static moe_status moei_disk_open(void *ctx, const char *name, moe_source *source, moe_error *error) {
    moei_disk *d = (moei_disk *)ctx;
    moei_disk_file *f = (moei_disk_file *)moei_alloc(d->allocator, 1, sizeof *f);
    moei_text t;
    if (f == NULL) return moei_error(error, MOE_ERR_MEMORY, "no memory to open a file");
    t.out = d->path, t.room = sizeof d->path, t.length = d->length;
    moei_put(&t, name, moei_strlen(name));
    errno = 0;
    f->file = fopen(d->path, "rb");
    if (f->file == NULL) {
        int reason = errno;
        moei_free(d->allocator, f, sizeof *f);
        return moei_is_absence(reason) && d->opened > 0 ? MOE_ERR_NOT_FOUND : moei_file_failed(error, "cannot open", d->path, reason);
    }
    memset(source, 0, sizeof *source);
    errno = 0;
    if (!moei_disk_size(f->file, &source->size)) {
        int reason = errno;
        (void)fclose(f->file);
        moei_free(d->allocator, f, sizeof *f);
        return moei_file_failed(error, "cannot read", d->path, reason);
    }
    f->disk = d, f->at = UINT64_MAX;
    d->opened++;
    source->ctx = f;
    source->read_at = moei_disk_read;
    return MOE_OK;
}

static void moei_disk_close(void *ctx, moe_source *source) {
    moei_disk *d = (moei_disk *)ctx;
    moei_disk_file *f = (moei_disk_file *)source->ctx;
    (void)fclose(f->file);
    moei_free(d->allocator, f, sizeof *f);
}

/* Takes path as a folder; *name stays NULL where neither of the two files is in it. */
static moe_status moei_disk_folder(moei_disk *d, const char *path, const char **name, moe_error *error) {
    static const char *const names[2] = {"model.safetensors.index.json", "model.safetensors"};
    moei_text t;
    FILE *f;
    int i;
    for (i = 0; i < 2 && *name == NULL; i++) {
        t.out = d->path, t.room = sizeof d->path, t.length = 0;
        moei_put(&t, path, moei_strlen(path));
        if (t.length > 0 && t.out[t.length - 1] != '/') moei_put(&t, "/", 1);
        d->length = t.length;
        moei_put(&t, names[i], moei_strlen(names[i]));
        errno = 0;
        f = fopen(d->path, "rb");
        if (f == NULL && !moei_is_absence(errno)) return moei_file_failed(error, "cannot open", path, errno);
        if (f == NULL) continue;
        (void)fclose(f);
        *name = names[i];
    }
    return MOE_OK;
}

/* Takes path as a file's. */
static const char *moei_disk_split(moei_disk *d, const char *path) {
    size_t length = moei_strlen(path);
    while (length > 0 && path[length - 1] != '/' && path[length - 1] != '\\') length--;
    memcpy(d->path, path, length);
    d->path[length] = '\0';
    d->length = length;
    return path + length;
}

static int moei_path_ends(const char *text, const char *with) {
    size_t n = moei_strlen(text), m = moei_strlen(with);
    return n >= m && moei_strcmp(text + n - m, with) == 0;
}

moe_status moe_load_layer(moe_layer *layer, const char *path, const char *prefix, const char *preset, const moe_allocator *allocator, moe_error *error) {
    moei_disk disk;
    moei_folder folder;
    const char *name = NULL;
    moe_status status = MOE_OK;
    if (layer == NULL || path == NULL || prefix == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "layer, path or prefix is NULL");
    if (moei_strlen(path) + MOEI_P_NAME + 2 > MOEI_PATH_SIZE)
        return moei_error(error, MOE_ERR_ARGUMENT, "the path is longer than %d bytes", (int)MOEI_PATH_SIZE - (int)MOEI_P_NAME - 2);
    if (!moei_can_allocate(allocator)) return moei_error(error, MOE_ERR_ARGUMENT, "allocator is NULL, and MOE_NO_MALLOC leaves no other");
    memset(&disk, 0, sizeof disk);
    disk.allocator = allocator;
    folder.ctx = &disk, folder.open = moei_disk_open, folder.close = moei_disk_close, folder.reason = moei_disk_reason;
    if (!moei_path_ends(path, ".safetensors") && !moei_path_ends(path, ".gguf") && !moei_path_ends(path, ".json")) status = moei_disk_folder(&disk, path, &name, error);
    if (status != MOE_OK) return status;
    if (name == NULL) name = moei_disk_split(&disk, path);
    if (moei_strlen(name) >= MOEI_P_NAME) return moei_error(error, MOE_ERR_ARGUMENT, "the file's name is longer than %d bytes", (int)MOEI_P_NAME - 1);
    return moei_published_read(layer, &folder, name, prefix, preset, allocator, error);
}

#ifdef _MSC_VER
#pragma warning(pop)
#endif
#endif /* MOE_NO_STDIO */

#ifndef MOE_NO_TRAIN

/* ---- published layers: writing ----------------------------------------------------------------------------------------------------------------------------- */

static const moei_family *moei_family_of(const char *name) {
    const moei_family *family;
    for (family = moei_families; family->name != NULL; family++)
        if (name != NULL && moei_strcmp(family->name, name) == 0) return family;
    return NULL;
}

/* The rows that a family's files are written with: where it has both forms, experts each by themselves. */
static int moei_is_written(const moei_family *family, const moei_named *row) { return (row->kind & family->kinds & ~MOEI_N_FUSED) != 0; }

/* Whether the layer's tensors are those of the family. */
static moe_status moei_published_check(const moe_layer *layer, const moei_family *family, moe_error *error) {
    const moei_named *row;
    uint64_t have = 0;
    moe_slot slot;
    int place;
    if (layer->config.transport != NULL)
        return moei_error(error, MOE_ERR_UNSUPPORTED, "a published file holds all experts, and the layer those of one rank: save it (moe_layer_save) and load it without a transport");
    if (layer->config.d_out != layer->config.router.d_model)
        return moei_error(error, MOE_ERR_CONFIG, "d_out = %d: published layers are as wide as their input, %d", layer->config.d_out, layer->config.router.d_model);
    for (row = moei_names_known; row->name != NULL; row++) {
        if (!moei_is_written(family, row)) continue;
        have |= (uint64_t)1 << row->place | (row->second >= 0 ? (uint64_t)1 << row->second : 0);
        if ((row->kind & family->needs) != 0 && !(layer->places >> row->place & 1u))
            return moei_error(error, MOE_ERR_CONFIG, "%s has a tensor '%s', and the layer has none for it", family->name, row->name);
    }
    for (place = 0; place < MOE_LAYER_SLOTS; place++) {
        if (!(layer->places >> place & 1u) || moei_is_state(place) || moe_layer_slot(&layer->config, place, &slot) != MOE_OK) continue;
        if (!(have >> place & 1u)) return moei_error(error, MOE_ERR_CONFIG, "the layer has a tensor '%s', and %s has none for it", slot.name, family->name);
        if (layer->tensors[place] == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "tensor '%s' is not set", slot.name);
    }
    return MOE_OK;
}

/* One layer being written. */
typedef struct moei_writer {
    const moe_layer *layer;
    const moei_family *family;
    const char *prefix;
    int dtype;
    size_t sizes[4];
    moei_header header;
    size_t begin;
    moe_stream *stream;
} moei_writer;

/* The entry of a tensor in the header. */
static moe_status moei_writer_entry(moei_writer *w, const moei_named *row, size_t expert, moe_error *error) {
    char name[MOEI_P_NAME];
    size_t shape[MOE_FILE_MAX_DIMS], bytes = moei_dtype_sizes[w->dtype], end;
    const char *p;
    moei_text t;
    int i;
    t.out = name, t.room = sizeof name, t.length = 0;
    moei_put(&t, w->prefix, moei_strlen(w->prefix));
    moei_put(&t, ".", 1);
    for (p = row->name; *p != '\0'; p++) {
        if (*p == '%') moei_put_integer(&t, (int64_t)expert);
        else moei_put(&t, p, 1);
    }
    for (i = 0; row->shape[i] != '\0'; i++) {
        shape[i] = moei_letter(w->sizes, row->shape[i]);
        if (!moei_mul(bytes, shape[i], &bytes)) return moei_error(error, MOE_ERR_OVERFLOW, "tensor '%s': its bytes do not fit size_t", row->name);
    }
    if (!moei_add(w->begin, bytes, &end)) return moei_error(error, MOE_ERR_OVERFLOW, "the file's bytes do not fit size_t");
    moei_header_put(&w->header, ",", 1);
    moei_header_put_string(&w->header, name);
    moei_header_put_entry(&w->header, w->dtype, shape, i, w->begin, end);
    w->begin = end;
    return MOE_OK;
}

/* The nearest number of 32 bits, as its bits. */
static uint32_t moei_to_binary32(moe_real x) {
    float nearest;
    uint32_t bits;
#if MOE_REAL_IS_DOUBLE
    double size = x < 0.0 ? -x : x;
    if (size >= 3.4028235677973366e38) return (x < 0.0 ? 0xff800000u : 0x7f800000u); /* half a step beyond the largest */
    if (size > 3.4028234663852886e38) x = x < 0.0 ? -3.4028234663852886e38 : 3.4028234663852886e38;
#endif
    nearest = (float)x;
    memcpy(&bits, &nearest, sizeof bits);
    return bits;
}

static uint64_t moei_to_bits(int dtype, moe_real x) {
    uint64_t bits;
    double wide = (double)x;
    if (dtype == MOE_DTYPE_F32) return moei_to_binary32(x);
    if (dtype == MOE_DTYPE_F16) return moei_narrow(x, 5, 10);
    if (dtype == MOE_DTYPE_BF16) return moei_narrow(x, 8, 7);
    memcpy(&bits, &wide, sizeof bits);
    return bits;
}

/* The values of a tensor. */
static moe_status moei_writer_values(moei_writer *w, const moei_named *row, size_t expert, moe_error *error) {
    unsigned char bytes[MOEI_P_CHUNK * 8];
    moe_real values[MOEI_P_CHUNK];
    const moei_part part = moei_part_of(w->layer, row, w->sizes, expert);
    size_t size = moei_dtype_sizes[w->dtype], done, n, i, b;
    moe_status status = MOE_OK;
    for (done = 0; done < part.count && status == MOE_OK; done += n) {
        n = part.count - done < MOEI_P_CHUNK ? part.count - done : (size_t)MOEI_P_CHUNK;
        moei_part_move(&part, done, n, values, 1);
        for (i = 0; i < n; i++) {
            uint64_t bits = moei_to_bits(w->dtype, values[i]);
            for (b = 0; b < size; b++) bytes[i * size + b] = (unsigned char)(bits >> 8 * b & 0xffu);
        }
        status = w->stream->write(w->stream->ctx, bytes, n * size);
    }
    if (status != MOE_OK) (void)moei_error(error, status, "the stream failed: %s", moe_status_text(status));
    return status;
}

/* All tensors: their entries, or their values. */
static moe_status moei_writer_rows(moei_writer *w, int values, moe_error *error) {
    const moei_named *row;
    size_t expert;
    moe_status status = MOE_OK;
    for (row = moei_names_known; row->name != NULL; row++) {
        if (!moei_is_written(w->family, row) || !(w->layer->places >> row->place & 1u)) continue;
        for (expert = 0; expert < (moei_is_single(row) ? w->sizes[MOEI_AT_E] : 1) && status == MOE_OK; expert++)
            status = values ? moei_writer_values(w, row, expert, error) : moei_writer_entry(w, row, expert, error);
    }
    return status;
}

moe_status moe_write_published(const moe_layer *layer, moe_stream *stream, const char *prefix, const char *family, int dtype, moe_error *error) {
    static const moe_metadata metadata = {"format", "pt"};
    moei_writer w;
    moe_status status;
    memset(&w, 0, sizeof w);
    if (layer == NULL || stream == NULL || stream->write == NULL || prefix == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "layer, stream, its write or prefix is NULL");
    w.layer = layer, w.stream = stream, w.prefix = prefix, w.dtype = dtype;
    w.family = moei_family_of(family);
    if (w.family == NULL) return moei_error(error, MOE_ERR_NOT_FOUND, "family = %s: there is none of this name", family);
    if (dtype < 0 || dtype > MOE_DTYPE_BF16) return moei_error(error, MOE_ERR_ARGUMENT, "dtype = %d: must be MOE_DTYPE_F64, _F32, _F16 or _BF16", dtype);
    if (moei_strlen(prefix) > MOEI_P_PREFIX || !moei_is_utf8(prefix)) return moei_error(error, MOE_ERR_ARGUMENT, "prefix: longer than %d bytes, or not UTF-8", (int)MOEI_P_PREFIX);
    status = moei_published_check(layer, w.family, error);
    if (status != MOE_OK) return status;
    if (!moei_can_allocate(&layer->allocator)) return moei_error(error, MOE_ERR_ARGUMENT, "the layer has no allocator, and MOE_NO_MALLOC leaves no other");
    w.sizes[MOEI_AT_E] = (size_t)layer->config.router.n_experts, w.sizes[MOEI_AT_H] = (size_t)layer->config.router.d_model;
    w.sizes[MOEI_AT_I] = (size_t)layer->config.d_ff, w.sizes[MOEI_AT_S] = (size_t)layer->config.n_shared * (size_t)layer->config.d_shared;
    w.header.allocator = &layer->allocator;
    moei_header_put(&w.header, "        {", 9);
    (void)moei_header_metadata(&w.header, &metadata, 1, error);
    status = moei_writer_rows(&w, 0, error);
    if (status == MOE_OK) status = moei_header_end(&w.header, error);
    if (status == MOE_OK) {
        status = stream->write(stream->ctx, w.header.text, moei_header_length(&w.header));
        if (status != MOE_OK) (void)moei_error(error, status, "the stream failed: %s", moe_status_text(status));
        else status = moei_writer_rows(&w, 1, error);
    }
    moei_list_free(&layer->allocator, &w.header.text, 1);
    return status;
}

#ifndef MOE_NO_STDIO

/* What moe_file_replace hands to its callback. */
typedef struct moei_publishing {
    const moe_layer *layer;
    const char *prefix, *family;
    int dtype;
    moe_error *error;
} moei_publishing;

static moe_status moei_publish(void *ctx, moe_stream *stream) {
    const moei_publishing *p = (const moei_publishing *)ctx;
    return moe_write_published(p->layer, stream, p->prefix, p->family, p->dtype, p->error);
}

moe_status moe_save_published(const moe_layer *layer, const char *path, const char *prefix, const char *family, int dtype, moe_error *error) {
    moei_publishing p;
    p.layer = layer, p.prefix = prefix, p.family = family, p.dtype = dtype, p.error = error;
    return moe_file_replace(path, moei_publish, &p, error);
}

#endif
#endif /* MOE_NO_TRAIN */

/* ==== checkpoints: files of trainers ========================================================================================== */

#ifndef MOE_NO_TRAIN

#define MOEI_CHECKPOINT_KEY "moe.trainer"
enum { MOEI_CHECKPOINT_FORMAT = 1, MOEI_CHECKPOINT_TEXT = 800 };

static const char *const moei_moment_names[] = {"trainer.first", "trainer.second"};

/* The text is that of all rows, "name number", with a space between. */
typedef struct moei_checkpoint_row {
    const char *name;
    size_t offset; /* of an uint64_t in moei_checkpoint */
    int of_fit;    /* moe_fit goes on only with the same */
} moei_checkpoint_row;

static const moei_checkpoint_row moei_checkpoint_rows[] = {
    {"format", offsetof(moei_checkpoint, format), 0},
    {"optimizer", offsetof(moei_checkpoint, optimizer), 0},
    {"steps", offsetof(moei_checkpoint, steps), 0},
    {"rng", offsetof(moei_checkpoint, rng), 0},
    {"rate", offsetof(moei_checkpoint, rate), 0}, /* the bits of a double */
    {"position0", offsetof(moei_checkpoint, position), 0},
    {"position1", offsetof(moei_checkpoint, position) + sizeof(uint64_t), 0},
    {"position2", offsetof(moei_checkpoint, position) + 2 * sizeof(uint64_t), 0},
    {"position3", offsetof(moei_checkpoint, position) + 3 * sizeof(uint64_t), 0},
    {"batch", offsetof(moei_checkpoint, batch), 1},
    {"accumulate", offsetof(moei_checkpoint, accumulate), 1},
    {"seed", offsetof(moei_checkpoint, seed), 1},
    {"n", offsetof(moei_checkpoint, n), 1},
    {"length", offsetof(moei_checkpoint, length), 1}};

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

/* ---- writing ---------------------------------------------------------------------------------------------------------------------- */

static void moei_checkpoint_put(const moei_checkpoint *c, char out[MOEI_CHECKPOINT_TEXT]) {
    moei_text t;
    int i;
    t.out = out, t.room = MOEI_CHECKPOINT_TEXT, t.length = 0;
    for (i = 0; i < MOEI_CHECKPOINT_ROWS; i++) {
        if (i > 0) moei_put(&t, " ", 1);
        moei_put(&t, moei_checkpoint_rows[i].name, moei_strlen(moei_checkpoint_rows[i].name));
        moei_put(&t, " ", 1);
        moei_put_unsigned(&t, moei_checkpoint_get(c, i));
    }
}

/* Moment i as a tensor. */
static void moei_moment(const moe_trainer *trainer, size_t i, moe_tensor *out) {
    memset(out, 0, sizeof *out);
    memcpy(out->name, moei_moment_names[i], moei_strlen(moei_moment_names[i]));
    out->n_dims = 1;
    out->shape[0] = out->count = moei_net_numbers(trainer->net);
    out->data = trainer->memory + i * out->count;
}

/* The file, with room for the list of its tensors. */
static moe_status moei_checkpoint_file(const moe_trainer *trainer, const moe_metadata metadata[2], moe_tensor *tensors, moe_stream *stream,
                                       moe_error *error) {
    const moe_net *net = trainer->net;
    size_t i;
    for (i = 0; i < net->n_tensors; i++) tensors[i] = net->tensors[i];
    for (i = 0; i < moei_moments(trainer); i++) moei_moment(trainer, i, &tensors[net->n_tensors + i]);
    return moe_file_write(stream, tensors, net->n_tensors + i, metadata, 2, &net->allocator, error);
}

/* The configuration of the net as text, terminated; moe_buffer_free. */
static moe_status moei_checkpoint_config(const moe_net *net, moei_config_text *text, moe_error *error) {
    memset(text, 0, sizeof *text);
    text->buffer.allocator = net->allocator;
    moei_config_put_net(text, net);
    if (text->status == MOE_OK) text->status = moei_buffer_write(&text->buffer, "", 1);
    if (text->status == MOE_OK) return MOE_OK;
    moe_buffer_free(&text->buffer);
    return moei_error(error, text->status, "the configuration's text: %s", moe_status_text(text->status));
}

static moe_status moei_checkpoint_write(const moe_trainer *trainer, const moei_checkpoint *c, moe_stream *stream, moe_error *error) {
    const moe_allocator *a = &trainer->net->allocator;
    char numbers[MOEI_CHECKPOINT_TEXT];
    moei_config_text text;
    moe_metadata metadata[2];
    moe_tensor *tensors;
    moe_status status = moei_checkpoint_config(trainer->net, &text, error);
    if (status != MOE_OK) return status;
    moei_checkpoint_put(c, numbers);
    metadata[0].key = MOEI_CONFIG_KEY, metadata[0].value = (const char *)text.buffer.data;
    metadata[1].key = MOEI_CHECKPOINT_KEY, metadata[1].value = numbers;
    tensors = (moe_tensor *)moei_alloc(a, trainer->net->n_tensors + 2, sizeof *tensors);
    if (tensors != NULL) status = moei_checkpoint_file(trainer, metadata, tensors, stream, error);
    else status = moei_error(error, MOE_ERR_MEMORY, "no memory for the list of %z tensors", trainer->net->n_tensors + 2);
    moei_free(a, tensors, (trainer->net->n_tensors + 2) * sizeof *tensors);
    moe_buffer_free(&text.buffer);
    return status;
}

static moe_status moei_trainer_between_steps(const moe_trainer *trainer, moe_error *error) {
    if (trainer == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "trainer must not be NULL");
    if (trainer->net == NULL) return moei_error(error, MOE_ERR_STATE, "the trainer is not made");
    if (trainer->n_accumulated > 0)
        return moei_error(error, MOE_ERR_STATE, "%d batches are accumulated: a checkpoint is written between steps", trainer->n_accumulated);
    return MOE_OK;
}

moe_status moe_trainer_write(const moe_trainer *trainer, moe_stream *stream, moe_error *error) {
    moei_checkpoint c;
    moe_status status = moei_trainer_between_steps(trainer, error);
    if (status != MOE_OK) return status;
    c = moei_checkpoint_of(trainer);
    return moei_checkpoint_write(trainer, &c, stream, error);
}

/* ---- reading ---------------------------------------------------------------------------------------------------------------------- */

/* Takes a word that must be there; 0 when it is not. */
static int moei_take_word(const char **p, const char *word) {
    size_t n = moei_strlen(word);
    if (strncmp(*p, word, n) != 0) return 0;
    *p += n;
    return 1;
}

/* Takes a whole number as the writer puts it: digits alone, no zero in front. */
static int moei_take_number(const char **p, uint64_t *value) {
    const char *from = *p;
    for (*value = 0; **p >= '0' && **p <= '9'; ++*p) {
        uint64_t digit = (uint64_t)(**p - '0');
        if (*value > (UINT64_MAX - digit) / 10) return 0;
        *value = *value * 10 + digit;
    }
    return *p > from && (*from != '0' || *p == from + 1);
}

static moe_status moei_checkpoint_parse(const char *text, moei_checkpoint *c, moe_error *error) {
    const char *p = text;
    double rate;
    int i, good;
    memset(c, 0, sizeof *c);
    for (i = 0, good = 1; i < MOEI_CHECKPOINT_ROWS; i++) {
        uint64_t value;
        good = (i == 0 || moei_take_word(&p, " ")) && moei_take_word(&p, moei_checkpoint_rows[i].name) && moei_take_word(&p, " ") &&
               moei_take_number(&p, &value);
        if (!good) break;
        memcpy((char *)c + moei_checkpoint_rows[i].offset, &value, sizeof value);
        if (c->format != MOEI_CHECKPOINT_FORMAT)
            return moei_error(error, MOE_ERR_UNSUPPORTED, "metadata " MOEI_CHECKPOINT_KEY ": this version reads format %d", (int)MOEI_CHECKPOINT_FORMAT);
    }
    if (!good || *p != '\0')
        return moei_error(error, MOE_ERR_FORMAT, "metadata " MOEI_CHECKPOINT_KEY ", byte %z: %s is expected", (size_t)(p - text),
                          good ? "the end" : moei_checkpoint_rows[i].name);
    memcpy(&rate, &c->rate, sizeof rate);
    if (!(fabs(rate) <= (MOE_REAL_IS_DOUBLE ? 1e308 : 3.4e38)) || c->steps >> 53 != 0)
        return moei_error(error, MOE_ERR_FORMAT, "metadata " MOEI_CHECKPOINT_KEY ": steps or rate is out of range");
    return MOE_OK;
}

#ifndef MOE_NO_STDIO

/* Names the first number that must be the same and is not. */
static moe_status moei_checkpoint_differs(const moei_checkpoint *has, const moei_checkpoint *wanted, moe_error *error) {
    char is[24], was[24];
    moei_text t;
    int i;
    for (i = 0; i < MOEI_CHECKPOINT_ROWS; i++) {
        if (!moei_checkpoint_rows[i].of_fit || moei_checkpoint_get(has, i) == moei_checkpoint_get(wanted, i)) continue;
        t.out = is, t.room = sizeof is, t.length = 0;
        moei_put_unsigned(&t, moei_checkpoint_get(wanted, i));
        t.out = was, t.room = sizeof was, t.length = 0;
        moei_put_unsigned(&t, moei_checkpoint_get(has, i));
        return moei_error(error, MOE_ERR_CONFIG, "%s = %s: the training of the checkpoint has %s", moei_checkpoint_rows[i].name, is, was);
    }
    return MOE_OK;
}

#endif

/* Whether the file's configuration is, letter by letter, what the trainer's net would write. */
static moe_status moei_checkpoint_same_net(const moe_net *net, const moe_file *file, moe_error *error) {
    moei_config_text text;
    char *found;
    size_t length = 0;
    int same;
    moe_status status = moe_file_metadata(file, MOEI_CONFIG_KEY, NULL, 0, &length);
    if (status == MOE_ERR_NOT_FOUND)
        return moei_error(error, MOE_ERR_FORMAT, "the file has no configuration: no metadata of the key '%s'", MOEI_CONFIG_KEY);
    status = moei_checkpoint_config(net, &text, error);
    if (status != MOE_OK) return status;
    same = length + 1 == text.buffer.size;
    found = same ? (char *)moei_alloc(&net->allocator, length + 1, 1) : NULL;
    if (same && found == NULL) status = moei_error(error, MOE_ERR_MEMORY, "no memory for %z bytes of configuration", length + 1);
    else same = same && moe_file_metadata(file, MOEI_CONFIG_KEY, found, length + 1, NULL) == MOE_OK && moei_memcmp(found, text.buffer.data, length) == 0;
    if (status == MOE_OK && !same) status = moei_error(error, MOE_ERR_CONFIG, "the checkpoint is that of a net of other modules");
    moei_free(&net->allocator, found, length + 1);
    moe_buffer_free(&text.buffer);
    return status;
}

/* Exactly the trainer's moments must be there. */
static moe_status moei_checkpoint_moments(const moe_trainer *trainer, moe_file *file, moe_error *error) {
    char have[80];
    moe_file_tensor found;
    size_t i, count = 0, numbers = moei_net_numbers(trainer->net);
    for (i = 0; i < moei_moments(trainer); i++) {
        if (moe_file_find(file, moei_moment_names[i], &found) != MOE_OK)
            return moei_error(error, MOE_ERR_NOT_FOUND, "tensor '%s': missing in the file", moei_moment_names[i]);
        if (found.n_dims != 1 || found.shape[0] != numbers)
            return moei_error(error, MOE_ERR_SHAPE, "tensor '%s': the shape must be [%z], the file has %s", moei_moment_names[i], numbers,
                              moei_shape_text(found.shape, found.n_dims, have));
    }
    for (moe_file_rewind(file); moe_file_next(file, &found) == MOE_OK;) count += (size_t)moei_is_of_trainer(&found);
    if (count == i) return MOE_OK;
    return moei_error(error, MOE_ERR_UNSUPPORTED, "the file has %z tensors of a trainer, %z are known", count, i);
}

/* Checks all of a checkpoint; changes nothing. */
static moe_status moei_checkpoint_open(const moe_trainer *trainer, const void *bytes, size_t size, moe_file *file, moei_checkpoint *c, moe_error *error) {
    char text[MOEI_CHECKPOINT_TEXT];
    moe_status status = moe_file_open(file, bytes, size, error);
    if (status != MOE_OK) return status;
    status = moe_file_metadata(file, MOEI_CHECKPOINT_KEY, text, sizeof text, NULL);
    if (status == MOE_ERR_NOT_FOUND)
        return moei_error(error, MOE_ERR_FORMAT, "the file is no checkpoint: no metadata of the key '" MOEI_CHECKPOINT_KEY "'");
    if (status != MOE_OK) return moei_error(error, MOE_ERR_FORMAT, "metadata " MOEI_CHECKPOINT_KEY ": the text is too long");
    status = moei_checkpoint_parse(text, c, error);
    if (status == MOE_OK) status = moei_checkpoint_same_net(trainer->net, file, error);
    if (status == MOE_OK && c->optimizer != (uint64_t)trainer->config.optimizer)
        status = moei_error(error, MOE_ERR_CONFIG, "optimizer = %s: the checkpoint is that of another", moei_optimizer_names[trainer->config.optimizer]);
    if (status == MOE_OK) status = moei_file_match(trainer->net, file, error);
    return status == MOE_OK ? moei_checkpoint_moments(trainer, file, error) : status;
}

/* After open: nothing can fail. */
static moe_status moei_checkpoint_apply(moe_trainer *trainer, moe_file *file, const moei_checkpoint *c, moe_error *error) {
    moe_file_tensor found;
    double rate;
    size_t i, numbers = moei_net_numbers(trainer->net);
    moe_status status = moei_file_fill(trainer->net, file, error);
    for (i = 0; i < moei_moments(trainer) && status == MOE_OK; i++) {
        status = moe_file_find(file, moei_moment_names[i], &found);
        if (status == MOE_OK) status = moe_file_values(&found, 0, numbers, trainer->memory + i * numbers);
    }
    for (i = 0; i < trainer->net->n_modules; i++) trainer->net->modules[i].layer.is_packed = 0;
    trainer->steps = c->steps;
    trainer->rng.state = c->rng;
    trainer->n_accumulated = 0;
    memcpy(&rate, &c->rate, sizeof rate);
    trainer->rate = (moe_real)rate;
    memcpy(trainer->position, c->position, sizeof trainer->position);
    moei_trainer_rate(trainer);
    return status;
}

moe_status moe_trainer_read(moe_trainer *trainer, const void *bytes, size_t size, moe_error *error) {
    moei_checkpoint c;
    moe_file file;
    moe_status status;
    if (trainer == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "trainer must not be NULL");
    if (trainer->net == NULL) return moei_error(error, MOE_ERR_STATE, "the trainer is not made");
    status = moei_checkpoint_open(trainer, bytes, size, &file, &c, error);
    return status == MOE_OK ? moei_checkpoint_apply(trainer, &file, &c, error) : status;
}

#ifndef MOE_NO_STDIO

/* What moe_file_replace hands to its callback. */
typedef struct moei_trainer_saved {
    const moe_trainer *trainer;
    moe_error *error;
} moei_trainer_saved;

static moe_status moei_trainer_save(void *ctx, moe_stream *stream) {
    const moei_trainer_saved *s = (const moei_trainer_saved *)ctx;
    return moe_trainer_write(s->trainer, stream, s->error);
}

moe_status moe_trainer_save(const moe_trainer *trainer, const char *path, moe_error *error) {
    moei_trainer_saved s;
    moe_status status = moei_trainer_between_steps(trainer, error);
    s.trainer = trainer, s.error = error;
    return status == MOE_OK ? moe_file_replace(path, moei_trainer_save, &s, error) : status;
}

moe_status moe_trainer_load(moe_trainer *trainer, const char *path, moe_error *error) {
    moe_buffer buffer;
    moe_status status;
    if (trainer == NULL || trainer->net == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "trainer must be one that init has made");
    status = moei_file_load(path, &trainer->net->allocator, &buffer, error);
    if (status == MOE_OK) status = moe_trainer_read(trainer, buffer.data, buffer.size, error);
    moe_buffer_free(&buffer);
    return status;
}

#endif
#endif /* MOE_NO_TRAIN */

#ifdef MOEI_OFF_THE_PATH
#pragma GCC pop_options
#endif

#endif /* MOE_NO_FLOAT */

/* ==== models for small machines: inference ==================================================================================== */

/* Scratch memory is laid out from a multiple of 4. */
enum { MOEI_INT_ALIGN = 4 };

MOEI_TOOL unsigned char *moei_int_scratch(void *scratch) {
    unsigned char *p = (unsigned char *)scratch;
    return p + (MOEI_INT_ALIGN - (uintptr_t)p % MOEI_INT_ALIGN) % MOEI_INT_ALIGN;
}

static int16_t *moei_int_vector(const moe_int_run *run, uint32_t at) { return run->vectors + at; }

static int32_t *moei_int_wide(const moe_int_run *run, uint32_t at) { return (int32_t *)(void *)(run->vectors + at); }

void moe_int_op_int8(const moe_int_op *op, moe_int_run *run) {
    moe_int8_product(&op->shape, run->base + op->at, moei_int_vector(run, op->in), moei_int_vector(run, op->out));
}

void moe_int_op_int4(const moe_int_op *op, moe_int_run *run) {
    moe_int4_product(&op->shape, run->base + op->at, moei_int_vector(run, op->in), moei_int_vector(run, op->out));
}

void moe_int_op_int8_add(const moe_int_op *op, moe_int_run *run) {
    moe_int8_product_add(&op->shape, run->base + op->at, moei_int_vector(run, op->in), run->weight, moei_int_wide(run, op->out));
}

void moe_int_op_int4_add(const moe_int_op *op, moe_int_run *run) {
    moe_int4_product_add(&op->shape, run->base + op->at, moei_int_vector(run, op->in), run->weight, moei_int_wide(run, op->out));
}

/* Curves are the same for all experts: they lie among the model's own constants. */
void moe_int_op_curve(const moe_int_op *op, moe_int_run *run) {
    moe_int_curve(&op->shape, run->model->weights + op->at, moei_int_vector(run, op->in), moei_int_vector(run, op->out));
}

void moe_int_op_multiply(const moe_int_op *op, moe_int_run *run) {
    moe_int_multiply(&op->shape, moei_int_vector(run, op->in), moei_int_vector(run, op->other), moei_int_vector(run, op->out));
}

void moe_int_op_add(const moe_int_op *op, moe_int_run *run) {
    moe_int_add(&op->shape, moei_int_vector(run, op->in), op->factor, moei_int_vector(run, op->other), op->factor2, moei_int_vector(run, op->out));
}

void moe_int_op_rescale(const moe_int_op *op, moe_int_run *run) {
    moe_int_add(&op->shape, moei_int_vector(run, op->in), op->factor, NULL, 0, moei_int_vector(run, op->out));
}

/* ---- sequences and norms ---- */

/* out_p = clamp(((((w_p << 15) * factor) >> 16) + round) >> shift) for n numbers, zeros behind them, where w_p and factor are those of output r of an
   int8 product with k outputs and n inputs (moe_kernels.h), which is how rows lie, so that a tied module may have the same. r is the token (index = 0) or
   its place (1). A row that is not there is MOE_ERR_ARGUMENT. */
void moe_int_op_row(const moe_int_op *op, moe_int_run *run) {
    const unsigned n = op->shape.n;
    const uint32_t r = op->index == 0 ? (uint32_t)run->token : run->place;
    const unsigned char *pair = run->base + op->at + (size_t)(r / 2) * moei_int8_pair_size(n), *w = pair + MOEI_INT_HEAD + r % 2;
    const int32_t round = moei_int_round(&op->shape);
    int16_t *y = moei_int_vector(run, op->out), factor;
    unsigned p;
    if (r >= op->shape.k) {
        run->status = MOE_ERR_ARGUMENT;
        return;
    }
    factor = moei_flash_16(pair + 8 + r % 2 * 2);
    for (p = 0; p < n; p++, w += 2) {
        const int32_t level = r % 2 == 0 ? (int32_t)moei_flash_8(w) - 128 : (signed char)moei_flash_8(w);
        y[p] = moei_int_clamp(&op->shape, (moei_int_scale(level * 32768, factor) + round) >> op->shape.shift);
    }
    moei_int_put_zeros(n, y);
}

/* 1 / sqrt(d): d = m 4^e with m in [2^30, 2^32), and the inverse is (2^30 - 1) / floor(sqrt(m)) * 2^-(30 + e), the quotient in 2^14..2^15 - 1. */
static int16_t moei_int_inverse_root(uint64_t d, int *e) {
    uint32_t m;
    for (*e = 0; d >> 32 != 0; d >>= 2) ++*e;
    for (m = (uint32_t)d; m < (uint32_t)1 << 30; m *= 4) --*e;
    return (int16_t)((((uint32_t)1 << 30) - 1) / moe_int_sqrt(m));
}

/* Both norms are the same but for a sum that one leaves out: with s = sum_p x_p for a layer norm (index = 1), 0 for a root mean square norm (index = 0),
     d = (n sum_p x_p^2 - s^2) 4^factor + eps    all of its bits; 0 counts as 1        v_p = n x_p - s
   a number in units of its spread is 2^factor v_p / sqrt(d): with m, e and quotient r as in moei_int_inverse_root (2^factor |v_p| < sqrt(n d), so nothing
   overflows)
     t_p = ((v_p * 2^(7 + factor - e)) * r) >> 16        in units of 2^-21; a negative power is a shift, rounding down
     out_p = clamp((((t_p sign_p * |gain_p|) >> 16) + bias_p + round) >> shift), zeros behind n; sign_p that of the gain
   Constants: eps uint32 low, uint32 high; gain int16 [n rounded up to 2]; layer norm: bias int32 [n]. n <= 32767, d < 2^62,
   factor, which gives a small eps its digits, within 0..8. */
void moe_int_op_norm(const moe_int_op *op, moe_int_run *run) {
    const unsigned n = op->shape.n;
    const unsigned char *eps = run->base + op->at, *gain = eps + 8, *bias = gain + (n + 1u) / 2 * 4;
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
        low += square & 0xffffu, high += square >> 16;
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
        y[p] = moei_int_clamp(&op->shape, (scaled + (op->index != 0 ? moei_flash_32(bias + 4 * p) : 0) + round) >> op->shape.shift);
    }
    moei_int_put_zeros(n, y);
}

/* Turns n / k heads of k numbers, (a, b) being numbers i and k/2 + i of one:
     c = (c1 c2 - s1 s2) >> 15, s = (s1 c2 + c1 s2) >> 15        a' = clamp((a c - b s + round) >> shift), b' = clamp((a s + b c + round) >> shift)
   where (c1, s1) are cosine and sine, in 1/32767, of angle i of place modulo 16, and (c2, s2) those of the rest of the place: so a table of
   16 + length/16 rows is enough. Constants: int16 c, s for each i of each row. Zeros behind n; in and out may be one vector; |a|, |b| <= MOEI_INT_TURNED. */
enum { MOEI_INT_TURNS = 16, MOEI_INT_TURNED = 23169 };

void moe_int_op_turn(const moe_int_op *op, moe_int_run *run) {
    const unsigned n = op->shape.n, half = op->shape.k / 2u;
    const unsigned char *near = run->base + op->at + (size_t)(run->place % MOEI_INT_TURNS) * half * 4;
    const unsigned char *far = run->base + op->at + (size_t)(MOEI_INT_TURNS + run->place / MOEI_INT_TURNS) * half * 4;
    const int32_t round = moei_int_round(&op->shape);
    const int16_t *x = moei_int_vector(run, op->in);
    int16_t *y = moei_int_vector(run, op->out);
    unsigned i, j;
    for (i = 0; i < half; i++, near += 4, far += 4) {
        const int32_t c1 = moei_flash_16(near), s1 = moei_flash_16(near + 2), c2 = moei_flash_16(far), s2 = moei_flash_16(far + 2);
        const int32_t c = (c1 * c2 - s1 * s2) >> 15, s = (s1 * c2 + c1 * s2) >> 15;
        for (j = i; j < n; j += 2 * half) {
            const int32_t a = x[j], b = x[j + half];
            y[j] = moei_int_clamp(&op->shape, (a * c - b * s + round) >> op->shape.shift);
            y[j + half] = moei_int_clamp(&op->shape, (a * s + b * c + round) >> op->shape.shift);
        }
    }
    moei_int_put_zeros(n, y);
}

/* Not inlined: where it would go too many registers are taken. */
#if defined(__GNUC__) || defined(__clang__)
#define MOEI_INT_CALLED __attribute__((__noinline__))
#else
#define MOEI_INT_CALLED
#endif

/* *a = sum_i u_i x_i and *b the same of the numbers `apart` from x; those of x are `step` apart. Both loops of attention, two results at a time; n > 0. */
static MOEI_INT_CALLED void moei_int_dots(unsigned n, const int16_t *u, const signed char *x, unsigned step, unsigned apart, int32_t *a, int32_t *b) {
    const int16_t *end = u + n;
    int32_t sum_a = 0, sum_b = 0;
    do {
        sum_a += (int32_t)*u * x[0];
        sum_b += (int32_t)*u * x[apart];
        u++, x += step;
    } while (u != end);
    *a = sum_a, *b = sum_b;
}

/* One head of attention over n tokens: q, keys, values and y are at its first number, rows of keys and values `width` apart. */
typedef struct moei_int_head {
    const moe_int_op *op;
    const int16_t *q;
    const signed char *keys, *values;
    int32_t *scores;  /* [n], and one more */
    int16_t *weights; /* [n] */
    int16_t *y;
    unsigned n, width, d_head, bits;
} moei_int_head;

/* Weights from scores, at most 32767 >> less; returns their sum. */
static uint32_t moei_int_weigh(const moei_int_head *h, unsigned less) {
    const signed char *key = h->keys;
    int32_t most = INT32_MIN, *score = h->scores;
    uint32_t total = 0;
    unsigned j;
    for (j = 0; j < h->n; j += 2, key += 2 * (size_t)h->width) moei_int_dots(h->d_head, h->q, key, 1, j + 1 < h->n ? h->width : 0, score + j, score + j + 1);
    for (j = 0; j < h->n; j++)
        if (score[j] > most) most = score[j];
    for (j = 0; j < h->n; j++) {
        uint32_t w = moe_int_exp2((uint32_t)moei_int_scale(most - score[j], h->op->factor), (int)h->bits) >> less;
        if (w > 32767) w = 32767;
        h->weights[j] = (int16_t)w;
        total += w;
    }
    return total;
}

static void moei_int_mix(const moei_int_head *h) {
    moe_int_shape shape = h->op->shape;
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

/* Attention of one token. in: q, wide; other: its key, attention.value: its value, both narrow, which are appended to those in the state first. With
   n = place + 1 tokens, less = the bits of place >> 9, and for each head
     s_j = sum_p q_p key_jp       w_j = the smaller of 32767 and moe_int_exp2(((max s - s_j) * factor) >> 16, bits) >> less       total = sum_j w_j
     down: the least with total >> down < 2^16            r = ((factor2 << 15) >> less) / (total >> down), rounded down
     out_p = clamp((((sum_j w_j value_jp >> down) * r >> 16) + round) >> (shift - less))            round is that of shift - less; zeros behind the heads
   The maker sees to |s_j| < 2^30; factor2 <= 32766; 7 <= shift; n <= 65535, so that total <= 2^24 and less <= 7. */
void moe_int_op_attention(const moe_int_op *op, moe_int_run *run) {
    const moe_int_attention *a = run->model->attentions + op->index;
    const unsigned width = (unsigned)a->heads * a->d_head;
    const int16_t *key = moei_int_vector(run, op->other), *value = moei_int_vector(run, a->value);
    signed char *keys = (signed char *)run->state + a->keys, *values = (signed char *)run->state + a->values;
    moei_int_head h;
    unsigned i;
    for (i = 0; i < width; i++) {
        keys[(size_t)run->place * width + i] = (signed char)key[i];
        values[(size_t)run->place * width + i] = (signed char)value[i];
    }
    h.op = op, h.scores = moei_int_wide(run, a->room), h.weights = moei_int_vector(run, a->room) + 2 * ((size_t)run->model->length + 1);
    h.n = (unsigned)run->place + 1, h.width = width, h.d_head = a->d_head, h.bits = a->bits;
    for (i = 0; i < width; i += a->d_head) {
        h.q = moei_int_vector(run, op->in) + i, h.y = moei_int_vector(run, op->out) + i;
        h.keys = keys + i, h.values = values + i;
        moei_int_mix(&h);
    }
    moei_int_put_zeros(width, moei_int_vector(run, op->out));
}

static void moei_int_ops(moe_int_run *run, uint32_t first, uint32_t n) {
    const moe_int_op *op = run->model->ops + first, *end = op + n;
    for (; op < end && run->status == MOE_OK; op++) op->run(op, run);
}

/* Where the constants of an expert are: in place, or the first size bytes of them fetched into scratch memory. */
static const unsigned char *moei_int_block(const moe_int_mixture *m, moe_int_run *run, uint32_t expert, uint32_t size) {
    const size_t at = (size_t)m->experts + (size_t)expert * (size_t)m->stride;
    void *block;
    if (m->block == MOE_INT_NONE) return run->model->experts + at;
    block = moei_int_vector(run, m->block);
    run->status = run->loader->fetch(run->loader->ctx, at, (size_t)size, block);
    return (const unsigned char *)block;
}

/* The choice with the lowest expert of those above `last`; -1: none. */
static int moei_int_next(const int16_t *experts, int count, int last) {
    int i, next = -1;
    for (i = 0; i < count; i++)
        if (experts[i] > last && (next < 0 || experts[i] < experts[next])) next = i;
    return next;
}

/* A loop, for memset of small C libraries writes bytes; the empty asm keeps gcc from calling it. */
static void moei_int_clear(int32_t *sum, const int32_t *end) {
    while (sum < end) {
        *sum++ = 0;
#if defined(__GNUC__) && !defined(__TINYC__)
        __asm__ volatile("");
#endif
    }
}

void moe_int_op_mixture(const moe_int_op *op, moe_int_run *run) {
    const moe_int_mixture *m = run->model->mixtures + op->index;
    const unsigned char *base = run->base;
    int16_t *choices = moei_int_vector(run, m->choices), *experts = choices + 1, *weights = experts + m->router.most;
    size_t count = 0;
    int i, last = -1;
    moei_int_ops(run, m->score, m->n_score);
    if (run->status == MOE_OK)
        run->status = moe_int_route(&m->router, run->model->weights, run->token, moei_int_vector(run, m->z), moei_int_wide(run, m->p), experts, weights, &count);
    choices[0] = (int16_t)count;
    moei_int_clear(moei_int_wide(run, m->sum), moei_int_wide(run, m->sum) + (op->shape.n + 1) / 2 * 2);
    while (run->status == MOE_OK && (i = moei_int_next(experts, (int)count, last)) >= 0) {
        last = experts[i];
        run->weight = weights[i];
        run->base = moei_int_block(m, run, (uint32_t)last, m->stride);
        moei_int_ops(run, m->expert, m->n_expert);
    }
    run->base = base;
    run->weight = 32767;
    moei_int_ops(run, m->shared, m->n_shared);
    moe_int_store(&op->shape, moei_int_wide(run, m->sum), moei_int_vector(run, op->out));
}

/* ---- operations of routers ---- */

/* also + sum x_i^2 = result * 2^*power, rounded down, with 2^30 <= result unless it is 0; *power is even. Exact in two halves of 16 and 32 bits. */
static uint32_t moei_int_squares(unsigned n, const int16_t *x, uint32_t also, int *power) {
    uint32_t high = also >> 16, low = also & 0xffffu;
    for (; n > 0; n--, x++) {
        const uint32_t square = (uint32_t)((int32_t)*x * *x);
        high += square >> 16;
        low += square & 0xffffu;
    }
    high += low >> 16, low &= 0xffffu;
    for (*power = 0; high > 0xffffu; high >>= 2, *power += 2) low = low >> 2 | (high & 3u) << 14;
    low |= high << 16;
    for (; low != 0 && low < (uint32_t)1 << 30; low <<= 2) *power -= 2;
    return low;
}

/* out = clamp((in * m + round) >> s): with r * 2^power = in . in + at as moei_int_squares gives it, root = floor(sqrt(r)), m = floor(factor * 2^15 / root)
   and s = 15 + shift + power / 2. All 0 where r is 0. */
void moe_int_op_unit(const moe_int_op *op, moe_int_run *run) {
    const int16_t *x = moei_int_vector(run, op->in);
    int16_t *y = moei_int_vector(run, op->out);
    moe_int_shape shape = op->shape;
    int power;
    const uint32_t square = moei_int_squares(shape.n, x, op->at, &power);
    const int32_t m = square > 0 ? (int32_t)(((uint32_t)op->factor << 15) / moe_int_sqrt(square)) : 0;
    int32_t round;
    unsigned i;
    shape.shift = (uint8_t)(15 + shape.shift + power / 2);
    round = moei_int_round(&shape);
    for (i = 0; i < shape.n; i++) y[i] = m > 0 ? moei_int_clamp(&shape, (x[i] * m + round) >> shape.shift) : 0;
    moei_int_put_zeros(i, y);
}

/* The choice that comes after choice `last` (-1: the first) by falling weight, of equal ones the one listed first; -1: none. */
static int moei_int_lighter(const int16_t *weights, int count, int last) {
    int i, next = -1;
    for (i = 0; i < count; i++) {
        if (last >= 0 && (weights[i] > weights[last] || (weights[i] == weights[last] && i <= last))) continue;
        if (next < 0 || weights[i] > weights[next]) next = i;
    }
    return next;
}

/* out = clamp((in * c + round) >> shift). The factor2 heaviest choices of mixture number `index`, whose choices are in other, have shares a_j =
   floor(w_j * 32767 / sum w), or 32767 for a single one, and c = sum_j (a_j * row_j + 2^14) >> 15 with the rows int16 [n rounded up to 4] at `at`, one
   per expert. c = factor where nobody was chosen, or the weights of several are all 0. */
void moe_int_op_cluster(const moe_int_op *op, moe_int_run *run) {
    const int16_t *choices = moei_int_vector(run, op->other), *experts = choices + 1, *weights, *x = moei_int_vector(run, op->in);
    const int32_t round = moei_int_round(&op->shape);
    const unsigned width = (op->shape.n + 3u) & ~3u;
    int16_t *y = moei_int_vector(run, op->out);
    int32_t sum = 0;
    int j, i;
    unsigned q;
    weights = experts + run->model->mixtures[op->index].router.most;
    for (i = 0, j = -1; i < op->factor2 && (j = moei_int_lighter(weights, choices[0], j)) >= 0; i++) sum += op->factor2 > 1 ? weights[j] : 1;
    for (q = 0; q < width; q++) y[q] = (int16_t)(sum > 0 ? 0 : op->factor);
    for (i = 0, j = -1; sum > 0 && i < op->factor2 && (j = moei_int_lighter(weights, choices[0], j)) >= 0; i++) {
        const unsigned char *row = run->model->weights + op->at + (size_t)experts[j] * width * 2;
        const int32_t a = op->factor2 > 1 ? weights[j] * (int32_t)32767 / sum : 32767;
        for (q = 0; q < width; q++) y[q] = (int16_t)(y[q] + ((a * moei_flash_16(row + 2 * q) + 16384) >> 15));
    }
    for (q = 0; q < op->shape.n; q++) y[q] = moei_int_clamp(&op->shape, ((int32_t)x[q] * y[q] + round) >> op->shape.shift);
    moei_int_put_zeros(q, y);
}

/* out_e = clamp((t + round) >> shift) with t = (measure * factor) >> 16, for each expert e of mixture number `index`: the next shape.k operations make
   `in` [shape.n] from the first `at` bytes of its block, measure makes one number of it. */
static void moei_int_each(const moe_int_op *op, moe_int_run *run, int32_t (*measure)(const moe_int_op *op, const int16_t *v, const int16_t *other)) {
    const moe_int_mixture *m = run->model->mixtures + op->index;
    const unsigned char *base = run->base;
    const int32_t round = moei_int_round(&op->shape);
    int16_t *z = moei_int_vector(run, op->out);
    unsigned e;
    for (e = 0; e < m->router.n_experts && run->status == MOE_OK; e++) {
        run->base = moei_int_block(m, run, e, op->at);
        moei_int_ops(run, (uint32_t)(op - run->model->ops) + 1, op->shape.k);
        z[e] = moei_int_clamp(&op->shape, (moei_int_scale(measure(op, moei_int_vector(run, op->in), moei_int_vector(run, op->other)), op->factor) + round) >>
                                              op->shape.shift);
    }
    moei_int_put_zeros(e, z);
    run->base = base;
}

/* Measures, in units of 2^-factor2 of a level. sum |v_i|; */
static int32_t moei_int_l1(const moe_int_op *op, const int16_t *v, const int16_t *other) {
    int32_t sum = 0;
    unsigned i;
    (void)other;
    for (i = 0; i < op->shape.n; i++) sum += v[i] < 0 ? -v[i] : v[i];
    return sum * ((int32_t)1 << op->factor2);
}

/* the largest |v_i|; */
static int32_t moei_int_linf(const moe_int_op *op, const int16_t *v, const int16_t *other) {
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
static int32_t moei_int_l2(const moe_int_op *op, const int16_t *v, const int16_t *other) {
    int power, up;
    const uint32_t root = moe_int_sqrt(moei_int_squares(op->shape.n, v, 0, &power));
    (void)other;
    up = power / 2 + op->factor2;
    return (int32_t)(up >= 0 ? root << up : up > -32 ? root >> -up : 0);
}

/* sum v_i other_i, both narrow. */
static int32_t moei_int_dot(const moe_int_op *op, const int16_t *v, const int16_t *other) {
    int32_t sum = 0;
    unsigned i;
    for (i = 0; i < op->shape.n; i++) sum += (int32_t)v[i] * other[i];
    return sum * ((int32_t)1 << op->factor2);
}

void moe_int_op_norm_l1(const moe_int_op *op, moe_int_run *run) { moei_int_each(op, run, moei_int_l1); }
void moe_int_op_norm_l2(const moe_int_op *op, moe_int_run *run) { moei_int_each(op, run, moei_int_l2); }
void moe_int_op_norm_linf(const moe_int_op *op, moe_int_run *run) { moei_int_each(op, run, moei_int_linf); }
void moe_int_op_match(const moe_int_op *op, moe_int_run *run) { moei_int_each(op, run, moei_int_dot); }

/* ---- operations on weights ---- */

/* out = clamp((in * m + round) >> shift), m = (weight * factor + 2^14) >> 15; then the weight is 32767. */
void moe_int_op_weigh(const moe_int_op *op, moe_int_run *run) {
    const int16_t *x = moei_int_vector(run, op->in);
    int16_t *y = moei_int_vector(run, op->out);
    const int32_t m = ((int32_t)run->weight * op->factor + 16384) >> 15, round = moei_int_round(&op->shape);
    unsigned i;
    for (i = 0; i < op->shape.n; i++) y[i] = moei_int_clamp(&op->shape, (x[i] * m + round) >> op->shape.shift);
    moei_int_put_zeros(i, y);
    run->weight = 32767;
}

void moe_int_op_weight(const moe_int_op *op, moe_int_run *run) { run->weight = *moei_int_vector(run, op->in); }

/* sum out_i += (in_i * weight + round) >> shift. */
void moe_int_op_accumulate(const moe_int_op *op, moe_int_run *run) {
    const int16_t *x = moei_int_vector(run, op->in);
    int32_t *sum = moei_int_wide(run, op->out);
    const int32_t round = moei_int_round(&op->shape), weight = run->weight;
    unsigned i;
    for (i = 0; i < op->shape.n; i++) sum[i] += (x[i] * weight + round) >> op->shape.shift;
}

/* sum out_i += (((in_i * factor + round) >> shift) * rest) >> 16 with rest = at - ((sum of the weights of choices, which are in other) >> factor2) within
   int16. */
void moe_int_op_rest(const moe_int_op *op, moe_int_run *run) {
    const int16_t *choices = moei_int_vector(run, op->other), *weights = choices + 1 + run->model->mixtures[op->index].router.most;
    const int16_t *x = moei_int_vector(run, op->in);
    const int32_t round = moei_int_round(&op->shape);
    int32_t *sum = moei_int_wide(run, op->out), taken = 0, rest;
    int i;
    unsigned q;
    for (i = 0; i < choices[0]; i++) taken += weights[i];
    rest = (int32_t)op->at - (taken >> op->factor2);
    rest = rest > 32767 ? 32767 : rest < -32767 ? -32767 : rest;
    for (q = 0; q < op->shape.n; q++) sum[q] += moei_int_scale(((int32_t)x[q] * op->factor + round) >> op->shape.shift, (int16_t)rest);
}

/* The input as a vector. */
static void moei_int_enter(int16_t *x, const signed char *input, size_t n) {
    const signed char *end = input + n / 4 * 4;
    for (; input < end; input += 4, x += 4) x[0] = input[0], x[1] = input[1], x[2] = input[2], x[3] = input[3];
    if (n % 4 == 0) return;
    for (end = input + n % 4; input < end;) *x++ = *input++;
    for (; n % 4 != 0; n++) *x++ = 0;
}

/* The run function of integer models. */
moe_status moe_int_model_run(const moe_model *model, const moe_loader *loader, const void *input, void *output, void *scratch) {
    unsigned char *memory = moei_int_scratch(scratch);
    const moe_int_op *last = model->ops + model->n_main - 1;
    moe_int_run run;
    run.model = model, run.loader = loader, run.base = model->weights, run.state = memory;
    run.vectors = (int16_t *)(void *)(memory + model->state_size);
    run.place = 0, run.weight = 32767, run.status = MOE_OK, run.token = 0;
    if (model->length > 0) {
        memcpy(&run.place, memory, sizeof run.place);
        if (run.place >= model->length) return MOE_ERR_STATE;
    }
    if (model->d_in == 0) run.token = *(const int32_t *)input;
    else moei_int_enter(run.vectors, (const signed char *)input, model->d_in);
    moei_int_ops(&run, 0, model->n_main);
    if (run.status != MOE_OK) return run.status;
    memcpy(output, moei_int_vector(&run, last->out), model->d_out * sizeof(int16_t));
    run.place++;
    if (model->length > 0) memcpy(memory, &run.place, sizeof run.place);
    return MOE_OK;
}

moe_status moe_infer_loading(const moe_model *model, const moe_loader *loader, const void *input, void *output, void *scratch, size_t scratch_size) {
    if (model == NULL || input == NULL || output == NULL || scratch == NULL) return MOE_ERR_ARGUMENT;
    if (model->version != MOE_MODEL_VERSION) return MOE_ERR_UNSUPPORTED;
    if (model->experts == NULL && model->n_mixtures > 0 && model->weights_are != MOE_WEIGHTS_FLOAT && (loader == NULL || loader->fetch == NULL))
        return MOE_ERR_UNSUPPORTED;
    if (scratch_size < model->scratch_size) return MOE_ERR_SPACE;
    return model->run(model, loader, input, output, scratch);
}

moe_status moe_infer(const moe_model *model, const void *input, void *output, void *scratch, size_t scratch_size) {
    return moe_infer_loading(model, NULL, input, output, scratch, scratch_size);
}

void moe_infer_restart(const moe_model *model, void *scratch, size_t scratch_size) {
    enum { BEGIN = 32 }; /* the number of tokens so far lies in these bytes, whatever the alignment */
    if (model == NULL || scratch == NULL || scratch_size < model->scratch_size || model->length == 0) return;
    memset(scratch, 0, scratch_size < BEGIN ? scratch_size : (size_t)BEGIN);
}

/* level * 2^bits, within int32; a configuration's scale makes bits large or small. */
static int32_t moei_choice_weight(int32_t level, int bits) {
    if (bits < 0) return level >> (bits < -31 ? 31 : -bits);
    if (bits <= 16 || level == 0) return level * ((int32_t)1 << (bits <= 16 ? bits : 0));
    return level > 0 ? INT32_MAX : -INT32_MAX;
}

moe_status moe_int_model_choices(const moe_model *model, size_t mixture, const void *scratch, moe_choice *choices, size_t room, size_t *count) {
    const moe_int_mixture *m;
    const int16_t *made;
    size_t i;
    if (mixture >= model->n_mixtures) return MOE_ERR_NOT_FOUND;
    m = model->mixtures + mixture;
    made = (const int16_t *)(const void *)(moei_int_scratch((void *)(uintptr_t)scratch) + model->state_size) + m->choices;
    *count = (size_t)made[0];
    for (i = 0; i < *count && i < room; i++) {
        choices[i].expert = made[1 + i];
        choices[i].weight = moei_choice_weight(made[1 + m->router.most + i], m->weight_bits);
    }
    return MOE_OK;
}

moe_status moe_infer_choices(const moe_model *model, size_t mixture, const void *scratch, moe_choice *choices, size_t room, size_t *count) {
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
        else levels[i] = (int8_t)(level >= 0 ? level + MOEI_R(0.5) : level < 0 ? level - MOEI_R(0.5) : MOEI_R(0.0));
    }
}

moe_status moe_float_model_run(const moe_model *model, const moe_loader *loader, const void *input, void *output, void *scratch) {
    (void)loader;
    return moei_float_infer(model->net, model->length, input, (moe_real *)output, scratch, model->scratch_size);
}

moe_status moe_float_model_choices(const moe_model *model, size_t mixture, const void *scratch, moe_choice *choices, size_t room, size_t *count) {
    const moe_routing *routing = moei_float_routing(model->net, model->length, mixture, (void *)(uintptr_t)scratch);
    size_t i;
    if (routing == NULL) return MOE_ERR_NOT_FOUND;
    *count = routing->n_choices != NULL ? (size_t)routing->n_choices[0] : 0; /* zeroed memory: no call so far */
    for (i = 0; i < *count && i < room; i++) {
        const moe_real weight = routing->weights[routing->choices[i]] * MOEI_R(32768.0);
        choices[i].expert = routing->choices[i];
        choices[i].weight = weight > MOEI_R(2e9) ? INT32_MAX : weight < MOEI_R(-2e9) ? -INT32_MAX : (int32_t)(weight + (weight < 0 ? MOEI_R(-0.5) : MOEI_R(0.5)));
    }
    return MOE_OK;
}
#endif

#ifdef MOEI_OFF_THE_PATH
#pragma GCC push_options
#pragma GCC optimize("O1")
#endif

#ifndef MOE_NO_TRAIN

/* ==== models for small machines: making one from a net ========================================================================

   moe_model_create looks at the calibration's numbers, then walks through the modules: each appends operations on vectors, which have numbers while the
   list grows. At the end every vector, known by then from its first to its last use, gets its place in scratch memory. */

#ifndef MOE_NO_QUANT

/* What calibration saw in one module: the largest size of a number. */
typedef struct moei_int_range {
    double y;                                          /* the module's output */
    double u, z;                                       /* mixture: the router's input and logits */
    double unit;                                       /* of the components of what the router makes a unit vector */
    double projected, hidden, hidden_act, key;         /* inside scores: cosine's projection, hidden layers, what attentive compares */
    double weighed, sigmoid;                           /* experts' inputs times their weights; the argument of the shared expert's sigmoid */
    double node[MOE_NODE_COUNT], shared[MOE_NODE_COUNT]; /* layers: activations of experts, of the shared expert */
    double q, k, v, mixed;                             /* attention */
    uint32_t turns;                                    /* and not seen, but kept here: where its table of turns is, MOE_INT_NONE: nowhere yet */
} moei_int_range;

/* A vector. */
typedef struct moei_int_value {
    size_t width;
    int wide32;      /* int32 instead of int16 */
    int limit;       /* levels are within +-limit: 127 is narrow */
    double scale;    /* a real number is level * scale */
    double range;    /* the largest number seen in calibration */
    uint32_t narrow; /* the same numbers in a narrow vector, MOE_INT_NONE: not made yet */
    uint32_t made, last; /* operations, by the clock: first and last use */
    uint32_t at;     /* its place */
} moei_int_value;

#define MOEI_INT_MAX_WIDTH 65532
/* No enumerators: C++20 does not want these in arithmetic with real numbers. */
#define MOEI_NARROW 127
#define MOEI_WIDE 32767

enum { MOEI_INT_PIECES = 16 };

typedef struct moei_maker {
    moe_built_model made;
    const moe_net *net;
    const moe_model_config *config;
    moe_error *error;
    moe_status status;      /* the first failure; after it nothing is appended */
    moei_int_range *ranges; /* [modules] */
    moei_int_value *values;
    moe_int_op *main_ops, *inner_ops; /* operations name vectors by number until all are placed */
    int inner;              /* appends to the inner operations: those of a mixture */
    int in_block;           /* constants are of experts: they go to the blocks */
    uint32_t clock;
    uint32_t *entering;     /* [modules + 1] the vector that enters each module */
    size_t module;          /* the one at work */
    int relu;               /* it makes the relu behind it as well */
    moe_buffer pieces;      /* constants of a mixture's experts: all experts' first product, then all their second, ... */
    size_t piece[MOEI_INT_PIECES], n_pieces; /* bytes of one expert's */
    size_t multiplications, counted; /* of the model; those of operations since `counted` was set to 0 */
    int weights;            /* MOE_WEIGHTS_ of the matrix at work */
    uint32_t rows;          /* constants of the embedding; what a row's scale is multiplied by to give its factor */
    double rows_unit;
} moei_maker;

static void moei_maker_fail(moei_maker *m, moe_status status) {
    if (m->status != MOE_OK) return;
    if (status == MOE_ERR_OVERFLOW)
        m->status = moei_error(m->error, status, "module %z: sizes or numbers too large, or too far apart, for integers; MOE_WEIGHTS_FLOAT may take it", m->module);
    else m->status = moei_error(m->error, status, "%s", moe_status_text(status));
}

#define MOEI_MAKER_REFUSE(m, code, ...) \
    do { \
        if ((m)->status == MOE_OK) (m)->status = moei_error((m)->error, code, __VA_ARGS__); \
    } while (0)

/* Appends to a list; the number of the new element, 0 after a failure. */
static uint32_t moei_maker_push(moei_maker *m, void *list, const void *element, size_t size) {
    unsigned char *elements;
    size_t n;
    memcpy(&elements, list, sizeof elements);
    n = moei_list_length(elements);
    if (m->status != MOE_OK) return 0;
    if (n >= UINT16_MAX || !moei_list_reserve(&m->made.allocator, list, size, n + 1)) {
        moei_maker_fail(m, n >= UINT16_MAX ? MOE_ERR_OVERFLOW : MOE_ERR_MEMORY);
        return 0;
    }
    memcpy(&elements, list, sizeof elements);
    memcpy(elements + n * size, element, size);
    moei_list_header(elements)->length++;
    return (uint32_t)n;
}

/* A new vector. scale 0 (nothing but zeros was seen) becomes 1. */
static uint32_t moei_value_new(moei_maker *m, size_t width, int limit, double scale, double range) {
    moei_int_value v;
    memset(&v, 0, sizeof v);
    v.width = width, v.limit = limit, v.scale = scale > 0 ? scale : 1, v.range = range;
    v.narrow = MOE_INT_NONE, v.made = v.last = m->clock;
    return moei_maker_push(m, &m->values, &v, sizeof v);
}

static uint32_t moei_value_wide32(moei_maker *m, size_t width) {
    uint32_t v = moei_value_new(m, width, MOEI_WIDE, 1, 0);
    if (m->status == MOE_OK) m->values[v].wide32 = 1;
    return v;
}

static void moei_value_use(moei_maker *m, uint32_t v) {
    if (m->status == MOE_OK && m->values[v].last < m->clock) m->values[v].last = m->clock;
}

static moe_int_op moei_op(void (*run)(const moe_int_op *op, moe_int_run *run), size_t n, size_t k, int low, int high, int shift) {
    moe_int_op op;
    memset(&op, 0, sizeof op);
    op.run = run;
    op.shape.n = (uint16_t)n, op.shape.k = (uint16_t)k;
    op.shape.low = (int16_t)low, op.shape.high = (int16_t)high, op.shape.shift = (uint8_t)shift;
    return op;
}

/* Appends an operation. in, other, out: vectors. */
static void moei_op_append(moei_maker *m, moe_int_op op, uint32_t in, uint32_t other, uint32_t out) {
    op.in = in, op.other = other, op.out = out;
    m->clock++;
    moei_value_use(m, in), moei_value_use(m, other), moei_value_use(m, out);
    (void)moei_maker_push(m, m->inner ? &m->inner_ops : &m->main_ops, &op, sizeof op);
}

/* Appends constants to a buffer, whose size stays a multiple of 4; where they begin. */
static uint32_t moei_constants(moei_maker *m, moe_buffer *buffer, const void *bytes, size_t size) {
    static const unsigned char zeros[4] = {0, 0, 0, 0};
    const size_t at = buffer->size;
    moe_status status = m->status;
    if (status == MOE_OK) status = moei_buffer_write(buffer, bytes, size);
    if (status == MOE_OK) status = moei_buffer_write(buffer, zeros, (4 - size % 4) % 4);
    if (status == MOE_OK && buffer->size > INT32_MAX) status = MOE_ERR_OVERFLOW;
    if (status != MOE_OK) moei_maker_fail(m, status);
    return (uint32_t)at;
}

static void moei_put_16_le(unsigned char *p, int32_t v) {
    p[0] = (unsigned char)((uint32_t)v & 255u), p[1] = (unsigned char)((uint32_t)v >> 8 & 255u);
}

static void moei_put_32_le(unsigned char *p, int32_t v) {
    moei_put_16_le(p, v), moei_put_16_le(p + 2, (int32_t)((uint32_t)v >> 16));
}

/* The nearest integer, within +-limit. */
static int32_t moei_nearest(double x, double limit) {
    if (!(x > -limit)) return (int32_t)-limit;
    return (int32_t)(x < limit ? floor(x + 0.5) : limit);
}

/* The largest shift up to `most` for which multiplier * 2^(bits + shift) still is a factor, -1: none. */
static int moei_shift_for(double multiplier, int bits, int most) {
    int shift = most;
    while (shift >= 0 && multiplier * ldexp(1.0, bits + shift) > 32767.0) shift--;
    return shift;
}

/* ---- vectors in other forms ---- */

/* y = x in another scale. */
static uint32_t moei_rescale(moei_maker *m, uint32_t x, int limit, double scale) {
    const moei_int_value *v;
    uint32_t y;
    double ratio;
    int shift;
    moe_int_op op;
    if (m->status != MOE_OK) return 0;
    v = &m->values[x];
    ratio = v->scale / (scale > 0 ? scale : 1);
    shift = moei_shift_for(ratio, 0, 22);
    if (shift < 0) {
        moei_maker_fail(m, MOE_ERR_OVERFLOW);
        return 0;
    }
    y = moei_value_new(m, v->width, limit, scale, v->range);
    op = moei_op(moe_int_op_rescale, m->values[x].width, 0, -limit, limit, shift);
    op.factor = (int16_t)moei_nearest(ratio * ldexp(1.0, shift), 32767);
    moei_op_append(m, op, x, x, y);
    return y;
}

/* The vector itself when it is narrow, else a narrow one of the same numbers. */
static uint32_t moei_narrowed(moei_maker *m, uint32_t x) {
    uint32_t y;
    if (m->status != MOE_OK || m->values[x].limit == MOEI_NARROW) return x;
    if (!m->inner && m->values[x].narrow != MOE_INT_NONE) return m->values[x].narrow;
    y = moei_rescale(m, x, MOEI_NARROW, m->values[x].range / MOEI_NARROW);
    if (m->status == MOE_OK && !m->inner) m->values[x].narrow = y;
    return y;
}

/* And a wide one, with finer levels. */
static uint32_t moei_widened(moei_maker *m, uint32_t x) {
    if (m->status != MOE_OK || m->values[x].limit == MOEI_WIDE) return x;
    return moei_rescale(m, x, MOEI_WIDE, m->values[x].scale / 128);
}

/* ---- products ---- */

/* Weights [count][n,k], biases [count][n] or NULL, to which offset is added; count matrices with one operation: experts. */
typedef struct moei_int_matrix {
    const moe_real *w, *bias;
    size_t count, n, k;
    double offset;
} moei_int_matrix;

static moei_int_matrix moei_int_matrix_of(const moe_real *w, const moe_real *bias, size_t count, size_t n, size_t k) {
    moei_int_matrix x;
    x.w = w, x.bias = bias, x.count = count, x.n = n, x.k = k, x.offset = 0;
    return x;
}

/* What row i adds to its sum. */
static double moei_int_bias(const moei_int_matrix *x, size_t i) { return (x->bias != NULL ? (double)x->bias[i] : 0) + x->offset; }

/* A matrix in integers; one row's real weight is level * (int4: block *) row. */
typedef struct moei_int_levels {
    double *row;           /* [count][n] */
    signed char *level;    /* [n][k] of one matrix */
    uint16_t *block;       /* [n][blocks], int4 */
    int32_t *bias;         /* [n] */
    int16_t *factor;       /* [n] */
    size_t blocks;
    double most;           /* the largest row scale */
} moei_int_levels;

/* int4: the scale with the least squared error over some candidates between 1/7 and 2/17 of the largest. */
static double moei_int4_scale(size_t n, const moe_real *w) {
    double most = 0, best = 0, least = -1;
    size_t i;
    int step;
    for (i = 0; i < n; i++)
        if (fabs((double)w[i]) > most) most = fabs((double)w[i]);
    if (!(most > 0)) return 0;
    for (step = 0; step <= 6; step++) {
        const double scale = most / (7.0 + 0.25 * step);
        double error = 0;
        for (i = 0; i < n; i++) {
            double level = floor((double)w[i] / scale + 0.5), off;
            if (level > 7) level = 7;
            if (level < -8) level = -8;
            off = level * scale - (double)w[i];
            error += off * off;
        }
        if (least < 0 || error < least) least = error, best = scale;
    }
    return best;
}

/* The largest multiplier of a block: sums of k terms stay below 2^29. */
static double moei_int4_most(size_t k) {
    const double most = 536870912.0 / (127.0 * 8.0 * (double)(k + 1));
    return most < 4095 ? floor(most) : 4095;
}

/* The scale of a row: what its largest weight needs, and enough for its bias to fit. */
static double moei_int_row(const moei_maker *m, const moe_real *w, size_t k, double bias, double in_scale) {
    double scale = 0, least = fabs(bias) / (in_scale * 268435456.0);
    size_t p;
    if (m->weights == MOE_WEIGHTS_INT8) scale = (double)moei_weight_scale(MOE_TYPE_Q8, k, w);
    else {
        for (p = 0; p < k; p += MOEI_INT_BLOCK) {
            const double block = moei_int4_scale(k - p < MOEI_INT_BLOCK ? k - p : (size_t)MOEI_INT_BLOCK, w + p);
            if (block > scale) scale = block;
        }
        scale /= moei_int4_most(k);
    }
    if (!(scale > 0)) scale = fabs(bias) / (in_scale * 65536.0);
    return scale > least ? scale : least;
}

static void moei_int_levels_free(moei_maker *m, const moei_int_matrix *x, moei_int_levels *l) {
    const moe_allocator *a = &m->made.allocator;
    moei_free(a, l->row, x->count * x->n * sizeof *l->row);
    moei_free(a, l->level, x->n * x->k);
    moei_free(a, l->block, x->n * l->blocks * sizeof *l->block);
    moei_free(a, l->bias, x->n * sizeof *l->bias);
    moei_free(a, l->factor, x->n * sizeof *l->factor);
}

/* The scales of all rows, and room for one matrix. */
static void moei_int_levels_begin(moei_maker *m, const moei_int_matrix *x, double in_scale, moei_int_levels *l) {
    const moe_allocator *a = &m->made.allocator;
    size_t i;
    memset(l, 0, sizeof *l);
    l->blocks = x->k / MOEI_INT_BLOCK + (x->k % MOEI_INT_BLOCK > 0);
    if (m->status != MOE_OK) return;
    if (x->n > MOEI_INT_MAX_WIDTH || x->k > MOEI_INT_MAX_WIDTH) {
        moei_maker_fail(m, MOE_ERR_OVERFLOW);
        return;
    }
    l->row = (double *)moei_alloc(a, x->count * x->n, sizeof *l->row);
    l->level = (signed char *)moei_alloc(a, x->n, x->k);
    l->block = (uint16_t *)moei_alloc(a, x->n, l->blocks * sizeof *l->block);
    l->bias = (int32_t *)moei_alloc(a, x->n, sizeof *l->bias);
    l->factor = (int16_t *)moei_alloc(a, x->n, sizeof *l->factor);
    if (l->row == NULL || l->level == NULL || l->block == NULL || l->bias == NULL || l->factor == NULL) {
        moei_maker_fail(m, MOE_ERR_MEMORY);
        return;
    }
    for (i = 0; i < x->count * x->n; i++) {
        l->row[i] = moei_int_row(m, x->w + i * x->k, x->k, moei_int_bias(x, i), in_scale);
        if (l->row[i] > l->most) l->most = l->row[i];
    }
}

/* Levels of one row; int4 also its blocks' multipliers. */
static void moei_int_row_levels(const moei_maker *m, const moei_int_matrix *x, const moe_real *w, double row, moei_int_levels *l, size_t j) {
    size_t p, b;
    for (b = 0; b < l->blocks; b++) {
        const size_t from = b * MOEI_INT_BLOCK, end = from + MOEI_INT_BLOCK < x->k ? from + MOEI_INT_BLOCK : x->k;
        double scale = row;
        if (m->weights == MOE_WEIGHTS_INT4) {
            l->block[j * l->blocks + b] = (uint16_t)moei_nearest(row > 0 ? moei_int4_scale(end - from, w + from) / row : 0, 65535);
            scale = row * l->block[j * l->blocks + b];
        }
        for (p = from; p < end; p++) {
            double level = scale > 0 ? (double)w[p] / scale : 0;
            if (m->weights == MOE_WEIGHTS_INT8) l->level[j * x->k + p] = (signed char)(scale > 0 ? moei_level_of(MOE_TYPE_Q8, w[p], (moe_real)scale) : 0);
            else l->level[j * x->k + p] = (signed char)(level < -8 ? -8 : moei_nearest(level < 7 ? level : 7, 8));
        }
    }
}

/* Packs all matrices into buffer, one after the other: sum * factor stands for real * unit, where unit is 2^bits / the result's scale. Returns where they
   begin, and *size the bytes of one. */
static uint32_t moei_matrix_pack(moei_maker *m, const moei_int_matrix *x, moei_int_levels *l, double in_scale, double unit, moe_buffer *buffer, size_t *size) {
    const int int8 = m->weights == MOE_WEIGHTS_INT8;
    const uint32_t at = (uint32_t)buffer->size;
    unsigned char *bytes;
    size_t e, j;
    *size = int8 ? moe_int8_size(x->n, x->k) : moe_int4_size(x->n, x->k);
    if (*size == 0) moei_maker_fail(m, MOE_ERR_OVERFLOW);
    if (m->status != MOE_OK) return 0;
    bytes = (unsigned char *)moei_alloc(&m->made.allocator, *size, 1);
    if (bytes == NULL) moei_maker_fail(m, MOE_ERR_MEMORY);
    for (e = 0; e < x->count && m->status == MOE_OK; e++) {
        moe_status status;
        for (j = 0; j < x->n; j++) {
            const size_t i = e * x->n + j;
            const double one = in_scale * l->row[i];
            moei_int_row_levels(m, x, x->w + i * x->k, l->row[i], l, j);
            l->bias[j] = one > 0 ? moei_nearest(moei_int_bias(x, i) / one, 536870911) : 0;
            l->factor[j] = (int16_t)moei_nearest(one * unit, 32767);
            if (l->factor[j] > 0) l->bias[j] += 32768 / l->factor[j]; /* what >> 16 drops is rounded, not cut off */
        }
        status = int8 ? moe_int8_pack(x->n, x->k, l->level, x->k, l->bias, l->factor, bytes)
                      : moe_int4_pack(x->n, x->k, l->level, x->k, l->bias, l->factor, l->block, bytes);
        if (status != MOE_OK) moei_maker_fail(m, status);
        (void)moei_constants(m, buffer, bytes, *size);
    }
    moei_free(&m->made.allocator, bytes, *size);
    return at;
}

/* Where a product's constants go: the model's, or for experts a new piece of their blocks. */
static uint32_t moei_product_constants(moei_maker *m, const moei_int_matrix *x, moei_int_levels *l, double in_scale, double unit) {
    size_t size, at = 0, i;
    m->counted += x->n * x->k;
    if (!m->in_block) return moei_matrix_pack(m, x, l, in_scale, unit, &m->made.weights, &size);
    (void)moei_matrix_pack(m, x, l, in_scale, unit, &m->pieces, &size);
    for (i = 0; i < m->n_pieces; i++) at += m->piece[i];
    m->piece[m->n_pieces++] = size;
    return (uint32_t)at;
}

/* y = max(low, min(W x + b, high)) of a narrow vector. range: the largest |y|; limit: of its levels; scale: that of y, 0: what range asks for. */
static uint32_t moei_product_within(moei_maker *m, const moei_int_matrix *x, uint32_t in, int limit, double low, double high, double range,
                                    double scale) {
    moei_int_levels l;
    moe_int_op op;
    uint32_t out;
    double in_scale;
    int shift;
    if (m->status != MOE_OK) return 0;
    in_scale = m->values[in].scale;
    moei_int_levels_begin(m, x, in_scale, &l);
    /* a wide vector has room above what calibration saw; its levels need not be finer than the sums */
    if (!(scale > 0)) {
        scale = limit == MOEI_NARROW ? range / limit : range * 1.25 / limit;
        if (scale < in_scale * l.most / 0.49) scale = in_scale * l.most / 0.49;
        if (!(scale > 1e-250)) scale = 1; /* 0, or so small that its inverse may not be finite */
    }
    shift = moei_shift_for(in_scale * l.most / scale, 16, 15);
    out = moei_value_new(m, x->n, limit, scale, range);
    op = moei_op(m->weights == MOE_WEIGHTS_INT8 ? moe_int_op_int8 : moe_int_op_int4, x->n, x->k, (int)moei_nearest(low / scale, limit),
                 (int)moei_nearest(high / scale, limit), shift < 0 ? 0 : shift);
    op.at = moei_product_constants(m, x, &l, in_scale, ldexp(1.0, 16 + op.shape.shift) / scale);
    moei_int_levels_free(m, x, &l);
    moei_op_append(m, op, in, in, out);
    return out;
}

/* y = W x + b, or with relu max(W x + b, 0). */
static uint32_t moei_product(moei_maker *m, const moei_int_matrix *x, uint32_t in, int limit, int relu, double range, double scale) {
    return moei_product_within(m, x, in, limit, relu ? 0 : -HUGE_VAL, HUGE_VAL, range, scale);
}

/* sum += weight (W x + b): the last product of an expert. A sum's unit is a level of the mixture's output over 2^shift; a weight's is 2^(bits - 15). */
static void moei_product_add(moei_maker *m, const moei_int_matrix *x, uint32_t in, int bits, double scale, int shift, uint32_t sum) {
    moei_int_levels l;
    moe_int_op op;
    if (m->status != MOE_OK) return;
    moei_int_levels_begin(m, x, m->values[in].scale, &l);
    op = moei_op(m->weights == MOE_WEIGHTS_INT8 ? moe_int_op_int8_add : moe_int_op_int4_add, x->n, x->k, 0, 0, 0);
    op.at = moei_product_constants(m, x, &l, m->values[in].scale, ldexp(1.0, 17 + bits + shift) / scale);
    moei_int_levels_free(m, x, &l);
    moei_op_append(m, op, in, in, sum);
}

/* The largest scale of a row of a matrix: what decides the units of a sum. */
static double moei_matrix_most(moei_maker *m, const moei_int_matrix *x, double in_scale) {
    double most = 0, row;
    size_t i;
    for (i = 0; i < x->count * x->n; i++) {
        row = moei_int_row(m, x->w + i * x->k, x->k, moei_int_bias(x, i), in_scale);
        if (row > most) most = row;
    }
    return most * in_scale;
}

/* ---- elementwise operations ---- */

enum { MOEI_SOFTPLUS = MOE_ACT_COUNT }; /* one more that curves can be */

/* y = act(alpha x) / alpha, x wide. The curve's points are y at 65 places. */
static uint32_t moei_curve_of(moei_maker *m, int act, double alpha, uint32_t in, int limit, double scale, double range) {
    const double fine = limit == MOEI_NARROW ? 256 : 1;
    unsigned char points[65 * 2];
    moe_int_op op;
    uint32_t out;
    int i;
    if (m->status != MOE_OK) return 0;
    for (i = 0; i <= 64; i++) {
        moe_real x = (moe_real)(((double)i * 1024 - 32768) * m->values[in].scale * alpha), y;
        if (act == MOEI_SOFTPLUS) y = moe_softplus(x);
        else moe_activate(NULL, act, 1, &x, &y);
        moei_put_16_le(points + 2 * i, moei_nearest((double)y / alpha / (scale > 0 ? scale : 1) * fine, 32767));
    }
    out = moei_value_new(m, m->values[in].width, limit, scale, range);
    op = moei_op(moe_int_op_curve, m->values[in].width, 0, -limit, limit, limit == MOEI_NARROW ? 8 : 0);
    op.at = moei_constants(m, &m->made.weights, points, sizeof points);
    moei_op_append(m, op, in, in, out);
    return out;
}

static uint32_t moei_curve(moei_maker *m, int act, uint32_t in, int limit, double scale, double range) {
    return moei_curve_of(m, act, 1, in, limit, scale, range);
}

/* y = act(alpha gate) / alpha * up, narrow. The curve's scale is free, and makes y's what it shall be. */
static uint32_t moei_gated_product(moei_maker *m, int act, double alpha, uint32_t gate, uint32_t up, double act_range, double range) {
    double scale = range / MOEI_NARROW, finest, fine;
    int shift = 0;
    uint32_t curved, out;
    if (m->status != MOE_OK) return 0;
    if (!(scale > 0)) scale = 1;
    finest = (act_range > 0 ? act_range : 1) * 1.1 / MOEI_WIDE * m->values[up].scale;
    while (shift < 30 && ldexp(finest, shift + 1) <= scale) shift++;
    fine = scale / ldexp(m->values[up].scale, shift);
    curved = moei_curve_of(m, act, alpha, gate, MOEI_WIDE, fine, act_range);
    if (m->status != MOE_OK) return 0;
    out = moei_value_new(m, m->values[up].width, MOEI_NARROW, scale, range);
    moei_op_append(m, moei_op(moe_int_op_multiply, m->values[up].width, 0, -MOEI_NARROW, MOEI_NARROW, shift), curved, up, out);
    return out;
}

/* y = a + b, wide. */
static uint32_t moei_added(moei_maker *m, uint32_t a, uint32_t b, double range) {
    double scale, most;
    uint32_t out;
    moe_int_op op;
    int shift = 14;
    a = moei_widened(m, a), b = moei_widened(m, b);
    if (m->status != MOE_OK) return 0;
    scale = range * 1.25 / MOEI_WIDE;
    most = m->values[a].scale > m->values[b].scale ? m->values[a].scale : m->values[b].scale;
    if (!(scale > most / 64)) scale = most / 64;
    while (shift > 0 && ldexp(most / scale, shift) > 16383) shift--;
    out = moei_value_new(m, m->values[a].width, MOEI_WIDE, scale, range);
    op = moei_op(moe_int_op_add, m->values[out].width, 0, -MOEI_WIDE, MOEI_WIDE, shift);
    op.factor = (int16_t)moei_nearest(ldexp(m->values[a].scale / scale, shift), 16383);
    op.factor2 = (int16_t)moei_nearest(ldexp(m->values[b].scale / scale, shift), 16383);
    moei_op_append(m, op, a, b, out);
    return out;
}

/* ---- experts ---- */

/* Where the last product of an expert goes: into a sum, or, with sum = MOE_INT_NONE, into a vector of its own. */
typedef struct moei_int_target {
    uint32_t sum;
    int finely; /* by way of a vector, whose levels are finer than what a product can add */
    int bits, shift, limit;
    double scale, range;
} moei_int_target;

/* What the last product of a kind of experts reads, and its matrix. */
static moei_int_matrix moei_last_matrix(const moei_chain *chain, size_t count) {
    const moei_step *step = &chain->expert->steps[chain->expert->n_steps - 1];
    return moei_int_matrix_of(chain->layer->tensors[step->weight], step->bias < 0 ? NULL : chain->layer->tensors[step->bias], count,
                              chain->width[MOE_NODE_OUTPUT], moei_from_width(chain, step->from));
}

/* Whether the activation of this product is relu and nothing else reads the product. */
static int moei_step_is_relu(const moei_chain *chain, const moei_step *step) {
    return chain->act == MOE_ACT_RELU && step[1].op == MOEI_STEP_ACT && step[1].from == step->to && step + 1 < chain->expert->steps + chain->expert->n_steps;
}

/* How large the gate of a shaped expert is taken to be: beyond its limit it does not matter, nor where silu is as good as 0. */
static double moei_gate_range(const moei_chain *chain, double range) {
    const double most = chain->shaped && (double)chain->limit < 16 / (double)chain->alpha ? 16 / (double)chain->alpha : (double)chain->limit;
    return chain->shaped && range > most ? most : range;
}

/* What a shaped gate reads: min(g, L), or max(-L, min(u, L)) + offset. Nothing else reads it. */
static uint32_t moei_shaped_product(moei_maker *m, const moei_chain *chain, int node, moei_int_matrix w, uint32_t in, double range) {
    const double limit = (double)chain->limit, offset = (double)chain->offset;
    if (node == MOE_NODE_GATE) return moei_product_within(m, &w, in, MOEI_WIDE, -HUGE_VAL, limit, moei_gate_range(chain, range), 0);
    w.offset = offset;
    return moei_product_within(m, &w, in, MOEI_WIDE, offset - limit, offset + limit, (range < limit ? range : limit) + fabs(offset), 0);
}

/* The operations of one kind of experts but the last; what that reads. x is narrow. node receives the vectors of all activations; chain->needed names
   those that must be there. */
static uint32_t moei_expert_hidden(moei_maker *m, const moei_chain *chain, size_t count, uint32_t x, const double *range, uint32_t *node) {
    const int fuses = moei_scored_node(&chain->layer->config) != MOE_NODE_GATE; /* the product itself is not looked at */
    const double alpha = chain->shaped ? (double)chain->alpha : 1;
    uint32_t from = x;
    int i, j;
    for (i = 0; i < MOE_NODE_COUNT; i++) node[i] = MOE_INT_NONE;
    for (i = 0; i < chain->expert->n_steps - 1; i++) {
        const moei_step *step = &chain->expert->steps[i];
        moei_int_matrix w;
        if (!(chain->needed >> step->to & 1u) || node[step->to] != MOE_INT_NONE) continue;
        from = step->from == MOEI_X ? x : node[step->from];
        if (step->op == MOEI_STEP_ACT)
            node[step->to] = moei_curve_of(m, chain->act, alpha, from, MOEI_NARROW, range[step->to] / MOEI_NARROW, range[step->to]);
        else if (step->op == MOEI_STEP_GATED)
            node[step->to] = moei_gated_product(m, chain->act, alpha, from, node[step->second], moei_gate_range(chain, range[step->from]),
                                                range[step->to]);
        else {
            w = moei_int_matrix_of(chain->layer->tensors[step->weight], step->bias < 0 ? NULL : chain->layer->tensors[step->bias], count,
                                   chain->width[step->to], moei_from_width(chain, step->from));
            if (fuses && moei_step_is_relu(chain, step)) node[step[1].to] = moei_product(m, &w, from, MOEI_NARROW, 1, range[step[1].to], 0);
            else if (chain->shaped) node[step->to] = moei_shaped_product(m, chain, step->to, w, from, range[step->to]);
            else node[step->to] = moei_product(m, &w, from, step->to == MOE_NODE_LOW ? MOEI_NARROW : MOEI_WIDE, 0, range[step->to], 0);
        }
    }
    j = chain->expert->steps[chain->expert->n_steps - 1].from;
    return j == MOEI_X ? x : node[j];
}

/* The least scale of a wide vector for W x + b with results up to range. */
static double moei_wide_scale(moei_maker *m, const moei_int_matrix *x, double in_scale, double range) {
    const double scale = range * 1.25 / MOEI_WIDE, finest = moei_matrix_most(m, x, in_scale) / 0.49;
    return scale > finest ? scale : finest > 0 ? finest : 1;
}

/* How far weight * level of a vector whose scale is at least `least` is shifted to be in the sum's units; negative: these are too fine. */
static int moei_sum_shift(const moei_int_target *to, int bits, double least) {
    const int shift = (int)floor(log(ldexp(to->scale, 15 - bits - to->shift) / least) / log(2.0));
    return shift < 30 ? shift : 30;
}

/* sum += weight (W x + b), by way of a wide vector, which is returned. */
static uint32_t moei_product_finely(moei_maker *m, const moei_int_matrix *x, uint32_t in, const moei_int_target *to, double range) {
    uint32_t y;
    int shift;
    if (m->status != MOE_OK) return 0;
    shift = moei_sum_shift(to, to->bits, moei_wide_scale(m, x, m->values[in].scale, range));
    if (shift < 0) {
        moei_maker_fail(m, MOE_ERR_OVERFLOW);
        return 0;
    }
    y = moei_product(m, x, in, MOEI_WIDE, 0, range, ldexp(to->scale, 15 - to->bits - to->shift - shift));
    moei_op_append(m, moei_op(moe_int_op_accumulate, x->n, 0, 0, 0, shift), y, y, to->sum);
    return y;
}

/* All operations of one kind of experts. range: of their outputs. */
static uint32_t moei_expert_ops(moei_maker *m, const moei_chain *chain, size_t count, uint32_t hidden, const moei_int_target *to, double range) {
    moei_int_matrix last = moei_last_matrix(chain, count);
    if (to->sum == MOE_INT_NONE) return moei_product(m, &last, hidden, to->limit, 0, to->range, 0);
    if (to->finely) return moei_product_finely(m, &last, hidden, to, range);
    moei_product_add(m, &last, hidden, to->bits, to->scale, to->shift, to->sum);
    return to->sum;
}

/* The largest number that a matrix can make of a narrow vector. */
static double moei_matrix_bound(const moei_int_matrix *x, double in_scale) {
    double most = 0;
    size_t i, p;
    for (i = 0; i < x->count * x->n; i++) {
        double sum = fabs(moei_int_bias(x, i));
        for (p = 0; p < x->k; p++) sum += 127.0 * in_scale * fabs((double)x->w[i * x->k + p]);
        if (sum > most) most = sum;
    }
    return most;
}

/* ---- mixtures ---- */

/* Whether a residual reads what enters module i. */
static int moei_is_around(const moe_net *net, size_t i) {
    size_t j;
    for (j = i; j < net->n_modules; j++)
        if (net->modules[j].kind == MOE_MODULE_RESIDUAL && j - (size_t)net->modules[j].span == i) return 1;
    return 0;
}

/* Whether a mixture reads more of its input than products do. */
static int moei_mixture_reads_wide(const moe_layer_config *c) {
    return c->router.input == MOE_INPUT_SCALED_RMS || c->router.input == MOE_INPUT_ADAPTIVE_CLUSTERING || c->router.grap_cosine ||
           (c->router.score == MOE_SCORE_COSINE && c->router.cosine_dim == 0 && !c->router.cosine_keep_length) || c->router.apply_to == MOE_APPLY_INPUT ||
           c->add_input;
}

/* Whether what enters module i is read as a narrow vector only: by products, and by no residual. */
static int moei_reads_narrow(const moe_net *net, size_t i) {
    int kind;
    if (i >= net->n_modules || moei_is_around(net, i)) return 0;
    kind = net->modules[i].kind;
    if (kind == MOE_MODULE_MIXTURE && moei_mixture_reads_wide(&net->modules[i].layer.config)) return 0;
    return kind == MOE_MODULE_LINEAR || kind == MOE_MODULE_MIXTURE || kind == MOE_MODULE_FEED_FORWARD || kind == MOE_MODULE_ATTENTION ||
           kind == MOE_MODULE_TIED;
}

/* The exponent of a power of two. */
static int moei_exponent(double power) {
    int exponent;
    (void)frexp(power, &exponent);
    return exponent - 1;
}

/* ---- scores ---- */

/* What scores are made of. */
typedef struct moei_scoring {
    const moe_layer *layer;
    moe_router_config now;      /* at the step of its state */
    const moei_int_range *range;
    moe_int_router_plan plan;
    uint32_t entering;          /* the module's input as it is, wide or narrow */
    uint32_t expert, n_expert;  /* scores that read experts: the operations of one, and its activations */
    uint32_t node[MOE_NODE_COUNT];
    double output_scale, output_unit; /* the last product's t: real = t * output_unit; what a wide vector of it wants */
    uint32_t begun;             /* the clock at the mixture's beginning */
    uint32_t n_list;            /* operations that follow the list: those that run for each expert */
} moei_scoring;

/* The router's configuration at the step of its state: K, temperatures and selection may have schedules. */
static moe_router_config moei_router_now(const moe_layer *layer, int *frozen) {
    const moe_router router = moei_layer_router(layer);
    moei_pass pass;
    memset(&pass, 0, sizeof pass);
    pass.router = &router, pass.c = &router.config;
    moei_schedule(&pass);
    if (frozen != NULL) *frozen = pass.frozen;
    return pass.effective;
}

/* A copy [n,k] of a matrix, its columns times gain (NULL: 1), for scores to work on; w NULL: zeros. NULL after a failure. */
static moe_real *moei_router_matrix(moei_maker *m, const moe_real *w, const moe_real *gain, size_t n, size_t k) {
    moe_real *copy;
    size_t i, p;
    if (m->status != MOE_OK) return NULL;
    copy = (moe_real *)moei_alloc(&m->made.allocator, n * k, sizeof *copy);
    if (copy == NULL) moei_maker_fail(m, MOE_ERR_MEMORY);
    for (i = 0; i < n && w != NULL && copy != NULL; i++)
        for (p = 0; p < k; p++) copy[i * k + p] = w[i * k + p] * (gain != NULL ? gain[p] : MOEI_R(1.0));
    return copy;
}

static void moei_router_matrix_free(moei_maker *m, moe_real *w, size_t n, size_t k) { moei_free(&m->made.allocator, w, n * k * sizeof *w); }

/* The plan of a router for logits up to `most`, its constants to table where that is not NULL; a refusal names the module. */
static void moei_router_plan(moei_maker *m, const moe_layer *layer, double most, unsigned char *table, moe_int_router_plan *plan) {
    moe_error why;
    moe_status status;
    if (m->status != MOE_OK) return;
    status = moe_int_router_plan_make(&layer->config.router, layer->tensors, (moe_real)most, table, table != NULL ? plan->table_size : 0, plan, &why);
    if (status != MOE_OK) MOEI_MAKER_REFUSE(m, status, "module %z: %s", m->module, why.message);
}

/* The router's plan for logits as large as calibration saw, in units of at least `finest`. */
static void moei_mixture_plan(moei_maker *m, moei_scoring *s, double finest) {
    double most = s->range->z > 0 ? s->range->z : 1;
    unsigned char *table;
    int tries;
    for (tries = 0; tries < 64 && m->status == MOE_OK; tries++, most *= 2) {
        moei_router_plan(m, s->layer, most, NULL, &s->plan);
        if ((double)s->plan.z_scale >= finest) break;
    }
    if (m->status == MOE_OK && (double)s->plan.z_scale < finest) moei_maker_fail(m, MOE_ERR_OVERFLOW);
    if (m->status != MOE_OK || s->plan.table_size == 0) return;
    table = (unsigned char *)moei_alloc(&m->made.allocator, s->plan.table_size, 1);
    if (table == NULL) moei_maker_fail(m, MOE_ERR_MEMORY);
    else moei_router_plan(m, s->layer, most, table, &s->plan);
    if (m->status == MOE_OK) moe_int_router_move(&s->plan.router, moei_constants(m, &m->made.weights, table, s->plan.table_size));
    moei_free(&m->made.allocator, table, s->plan.table_size);
}

/* z = W v + b in the units that the router wants; w [E,k]. */
static uint32_t moei_logits_product(moei_maker *m, moei_scoring *s, const moe_real *w, const moe_real *bias, size_t k, uint32_t in) {
    const moei_int_matrix x = moei_int_matrix_of(w, bias, 1, (size_t)s->now.n_experts, k);
    if (m->status != MOE_OK) return 0;
    moei_mixture_plan(m, s, moei_matrix_most(m, &x, m->values[in].scale) / 0.49);
    return moei_product(m, &x, in, MOEI_WIDE, 0, s->range->z, m->status == MOE_OK ? (double)s->plan.z_scale : 1);
}

/* y = x / sqrt(x . x + least), narrow; range: the largest component. x is made coarser where `least` would not fit its levels. */
static uint32_t moei_unit(moei_maker *m, uint32_t x, double least, double range) {
    double scale = (range > 0.01 && range < 0.9 ? range * 1.1 : range < 0.9 ? 0.01 : 1) / MOEI_NARROW;
    moe_int_op op;
    uint32_t y;
    int shift = 0;
    if (m->status == MOE_OK && least / 4e9 > m->values[x].scale * m->values[x].scale) x = moei_rescale(m, x, MOEI_WIDE, sqrt(least / 4e9));
    if (m->status != MOE_OK) return 0;
    while (ldexp(1 / scale, shift + 1) <= 32767) shift++;
    y = moei_value_new(m, m->values[x].width, MOEI_NARROW, scale, range);
    op = moei_op(moe_int_op_unit, m->values[x].width, 0, -MOEI_NARROW, MOEI_NARROW, shift);
    op.factor = (int16_t)moei_nearest(ldexp(1 / scale, shift), 32767);
    op.at = (uint32_t)floor(least / (m->values[x].scale * m->values[x].scale) + 0.5);
    moei_op_append(m, op, x, x, y);
    return y;
}

/* Rows of numbers as int16 of that unit, each padded to a multiple of 4; where they begin. */
static uint32_t moei_int16_rows(moei_maker *m, const moe_real *w, size_t n, size_t k, double unit) {
    const size_t width = (k + 3) / 4 * 4;
    unsigned char *bytes;
    uint32_t at;
    size_t i, p;
    if (m->status != MOE_OK) return 0;
    bytes = (unsigned char *)moei_alloc(&m->made.allocator, n, width * 2);
    if (bytes == NULL) moei_maker_fail(m, MOE_ERR_MEMORY);
    for (i = 0; i < n && bytes != NULL; i++)
        for (p = 0; p < k; p++) moei_put_16_le(bytes + (i * width + p) * 2, moei_nearest((double)w[i * k + p] / unit, 32000));
    at = moei_constants(m, &m->made.weights, bytes, n * width * 2);
    moei_free(&m->made.allocator, bytes, n * width * 2);
    return at;
}

/* u = m_k * x with the table of running (or random) weights, whose unit is free: it gives u the scale that u shall have. */
static uint32_t moei_clustered(moei_maker *m, const moei_scoring *s, int limit) {
    const size_t previous = moei_previous_mixture(m->net, m->module), d = (size_t)s->now.d_model, n = (size_t)s->now.n_experts;
    const moe_real *table = s->layer->tensors[MOE_ROUTER_AC_RUNNING];
    double scale = s->range->u / (limit == MOEI_NARROW ? limit : limit / 1.25), most = 1, unit, in_scale;
    size_t index = 0, i;
    uint32_t u;
    moe_int_op op = moei_op(moe_int_op_cluster, d, 0, -limit, limit, 0);
    if (m->status != MOE_OK) return 0;
    in_scale = m->values[s->entering].scale;
    for (i = 0; i < n * d; i++)
        if (fabs((double)table[i]) > most) most = fabs((double)table[i]);
    if (!(scale > in_scale * most / 32000)) scale = in_scale * most / 32000;
    while (op.shape.shift < 30 && scale / ldexp(in_scale, op.shape.shift + 1) >= most / 32000) op.shape.shift++;
    unit = scale / ldexp(in_scale, op.shape.shift);
    op.at = moei_int16_rows(m, table, n, d, unit);
    for (i = 0; i < previous; i++) index += m->net->modules[i].kind == MOE_MODULE_MIXTURE;
    u = moei_value_new(m, d, limit, scale, s->range->u);
    op.factor = (int16_t)moei_nearest(1 / unit, 32000), op.factor2 = (int16_t)s->now.ac_mix, op.index = (uint16_t)index;
    moei_op_append(m, op, s->entering, m->made.mixtures[index].choices, u);
    return u;
}

/* The router's input. It may lack a gain on each feature, which is then the next matrix's matter. limit WIDE: as fine as it is to be had. */
static uint32_t moei_router_input(moei_maker *m, const moei_scoring *s, int limit, const moe_real **gain) {
    *gain = NULL;
    if (s->now.input == MOE_INPUT_ADAPTIVE_CLUSTERING) return moei_clustered(m, s, limit);
    if (s->now.input == MOE_INPUT_SCALED_RMS) {
        *gain = s->layer->tensors[MOE_ROUTER_INPUT_SCALE];
        return moei_unit(m, s->entering, 1e-6 * (double)s->now.d_model, s->range->unit);
    }
    return limit == MOEI_NARROW ? moei_narrowed(m, s->entering) : s->entering;
}

/* linear, random */
static uint32_t moei_logits_linear(moei_maker *m, moei_scoring *s) {
    const size_t n = (size_t)s->now.n_experts, d = (size_t)s->now.d_model;
    const moe_real *gain;
    const uint32_t u = moei_router_input(m, s, MOEI_NARROW, &gain);
    moe_real *w = moei_router_matrix(m, s->layer->tensors[MOE_ROUTER_WEIGHT], gain, n, d);
    const uint32_t z = moei_logits_product(m, s, w, s->layer->tensors[MOE_ROUTER_BIAS], d, u);
    moei_router_matrix_free(m, w, n, d);
    return z;
}

/* act(W1 u + b1), narrow */
static uint32_t moei_router_hidden_ops(moei_maker *m, moei_scoring *s, size_t h) {
    const size_t d = (size_t)s->now.d_model;
    const int relu = s->now.router_act == MOE_ACT_RELU;
    const moe_real *gain;
    const uint32_t u = moei_router_input(m, s, MOEI_NARROW, &gain);
    moe_real *w = moei_router_matrix(m, s->layer->tensors[MOE_ROUTER_FC1_WEIGHT], gain, h, d);
    const moei_int_matrix x = moei_int_matrix_of(w, s->layer->tensors[MOE_ROUTER_FC1_BIAS], 1, h, d);
    uint32_t v = moei_product(m, &x, u, relu ? MOEI_NARROW : MOEI_WIDE, relu, relu ? s->range->hidden_act : s->range->hidden, 0);
    moei_router_matrix_free(m, w, h, d);
    if (!relu) v = moei_curve(m, s->now.router_act, v, MOEI_NARROW, s->range->hidden_act / MOEI_NARROW, s->range->hidden_act);
    return v;
}

static uint32_t moei_logits_mlp(moei_maker *m, moei_scoring *s) {
    const size_t h = moei_router_hidden(&s->now);
    const uint32_t v = moei_router_hidden_ops(m, s, h);
    return moei_logits_product(m, s, s->layer->tensors[MOE_ROUTER_FC2_WEIGHT], s->layer->tensors[MOE_ROUTER_FC2_BIAS], h, v);
}

/* What cosines compare: u, or its projection. */
static uint32_t moei_compared(moei_maker *m, const moei_scoring *s, int limit, size_t r) {
    const size_t d = (size_t)s->now.d_model;
    const int projects = s->now.score == MOE_SCORE_COSINE && s->now.cosine_dim > 0;
    const moe_real *gain;
    uint32_t u = moei_router_input(m, s, projects ? MOEI_NARROW : limit, &gain), v;
    moe_real *w;
    moei_int_matrix x;
    size_t q;
    if (!projects && gain == NULL) return u;
    w = moei_router_matrix(m, projects ? s->layer->tensors[MOE_ROUTER_PROJECTION] : NULL, gain, r, d);
    for (q = 0; q < d && !projects && w != NULL; q++) w[q * d + q] = gain[q];
    x = moei_int_matrix_of(w, NULL, 1, r, d);
    v = moei_product(m, &x, u, limit, 0, s->range->projected, 0);
    moei_router_matrix_free(m, w, r, d);
    return v;
}

static uint32_t moei_logits_cosine(moei_maker *m, moei_scoring *s) {
    const size_t n = (size_t)s->now.n_experts, r = (size_t)(s->now.cosine_dim > 0 ? s->now.cosine_dim : s->now.d_model);
    const double tau = (double)(s->now.cosine_learn_tau ? s->layer->tensors[MOE_ROUTER_TEMPERATURE][0] : s->now.cosine_tau);
    uint32_t v = moei_compared(m, s, s->now.cosine_keep_length ? MOEI_NARROW : MOEI_WIDE, r), z;
    moe_real *w;
    size_t e, q;
    if (!s->now.cosine_keep_length) v = moei_unit(m, v, 0, s->range->unit);
    w = moei_router_matrix(m, s->layer->tensors[MOE_ROUTER_WEIGHT], NULL, n, r);
    for (e = 0; e < n && w != NULL; e++) {
        const moe_real inverse = moei_inverse_length(s->layer->kernels, w + e * r, r);
        for (q = 0; q < r; q++) w[e * r + q] = (moe_real)((double)(w[e * r + q] * inverse) / tau);
    }
    z = moei_logits_product(m, s, w, NULL, r, v);
    moei_router_matrix_free(m, w, n, r);
    return z;
}

/* Sums of blocks, as a matrix. */
static uint32_t moei_logits_grap(moei_maker *m, moei_scoring *s) {
    const size_t n = (size_t)s->now.n_experts, d = (size_t)s->now.d_model, block = d / n;
    const moe_real *gain = NULL, share = (moe_real)(s->now.grap_cosine ? 1 / sqrt((double)block) : 1 / (double)block);
    uint32_t v = s->now.grap_cosine ? moei_compared(m, s, MOEI_WIDE, d) : moei_router_input(m, s, MOEI_NARROW, &gain), z;
    moe_real *w = moei_router_matrix(m, NULL, NULL, n, d);
    size_t q;
    if (s->now.grap_cosine) v = moei_unit(m, v, 0, s->range->unit);
    for (q = 0; q < d && w != NULL; q++) w[q / block * d + q] = share * (gain != NULL ? gain[q] : MOEI_R(1.0));
    z = moei_logits_product(m, s, w, NULL, d, v);
    moei_router_matrix_free(m, w, n, d);
    return z;
}

/* Appends a copy of operation i of the inner ones; it reads and makes the same vectors. */
static void moei_op_again(moei_maker *m, uint32_t i) {
    const moe_int_op op = m->inner_ops[i];
    moei_op_append(m, op, op.in, op.other, op.out);
}

/* Bytes of a block up to the end of this operation's constants, if it is a product. */
static size_t moei_op_end(const moei_maker *m, const moe_int_op *op) {
    if (op->run == moe_int_op_curve || op->run == moe_int_op_multiply) return 0;
    return op->at + (m->config->weights == MOE_WEIGHTS_INT8 ? moe_int8_size(op->shape.n, op->shape.k) : moe_int4_size(op->shape.n, op->shape.k));
}

/* The last product of an expert, whose constants are in the units of a sum, into a vector of its own. */
static uint32_t moei_output_again(moei_maker *m, const moei_scoring *s, uint32_t i) {
    moe_int_op op = m->inner_ops[i];
    uint32_t v;
    op.run = m->config->weights == MOE_WEIGHTS_INT8 ? moe_int_op_int8 : moe_int_op_int4;
    op.shape.low = -MOEI_WIDE, op.shape.high = MOEI_WIDE;
    while (op.shape.shift < 30 && ldexp(s->output_unit, op.shape.shift) < s->output_scale) op.shape.shift++;
    v = moei_value_new(m, op.shape.n, MOEI_WIDE, ldexp(s->output_unit, op.shape.shift), s->range->node[MOE_NODE_OUTPUT]);
    moei_op_append(m, op, op.in, op.in, v);
    return v;
}

/* The operations that make a scored activation, again behind the list; its vector. *bytes: how much of a block they read. */
static uint32_t moei_node_again(moei_maker *m, const moei_scoring *s, int scored, size_t *bytes) {
    const int output = s->node[scored] == MOE_INT_NONE;
    const uint32_t last = s->expert + s->n_expert - 1;
    uint32_t wanted[2 * MOEI_MAX_STEPS], n_wanted = 0, i, j, v = MOE_INT_NONE;
    unsigned run = 0;
    if (m->status != MOE_OK) return 0;
    wanted[n_wanted++] = output ? m->inner_ops[last].in : s->node[scored];
    for (i = last; i-- > s->expert;)
        for (j = 0; j < n_wanted; j++) {
            if (m->inner_ops[i].out != wanted[j] || (run >> (i - s->expert) & 1u)) continue;
            run |= 1u << (i - s->expert);
            wanted[n_wanted++] = m->inner_ops[i].in;
            if (m->inner_ops[i].run == moe_int_op_multiply) wanted[n_wanted++] = m->inner_ops[i].other;
        }
    for (i = s->expert; i < last && m->status == MOE_OK; i++) {
        if (!(run >> (i - s->expert) & 1u)) continue;
        if (moei_op_end(m, &m->inner_ops[i]) > *bytes) *bytes = moei_op_end(m, &m->inner_ops[i]);
        moei_op_again(m, i);
    }
    if (!output) return s->node[scored];
    if (m->status == MOE_OK && moei_op_end(m, &m->inner_ops[last]) > *bytes) *bytes = moei_op_end(m, &m->inner_ops[last]);
    v = m->status == MOE_OK ? moei_output_again(m, s, last) : 0;
    return v;
}

/* z_e = factor * measure of an activation of every expert. other: what match compares it with. */
static uint32_t moei_logits_measured(moei_maker *m, moei_scoring *s, void (*measure)(const moe_int_op *op, moe_int_run *run), double most_levels, double factor,
                                     uint32_t other) {
    const int scored = moei_scored_node(&s->layer->config);
    const uint32_t at = (uint32_t)moei_list_length(m->inner_ops);
    const uint32_t z = moei_value_new(m, (size_t)s->now.n_experts, MOEI_WIDE, (double)s->plan.z_scale, s->range->z);
    moe_int_op op = moei_op(measure, 0, 0, -MOEI_WIDE, MOEI_WIDE, 0), *made;
    size_t bytes = 0, i;
    uint32_t v;
    int shift;
    moei_op_append(m, op, z, z, z); /* what it reads is known further down */
    v = moei_node_again(m, s, scored, &bytes);
    if (s->now.score == MOE_SCORE_COMPETITION && m->status == MOE_OK) {
        const double most = (double)moe_softplus((moe_real)s->range->node[MOE_NODE_OUTPUT]);
        v = moei_curve(m, MOEI_SOFTPLUS, v, MOEI_WIDE, most * 1.1 / MOEI_WIDE, most);
    }
    if (m->status != MOE_OK) return 0;
    made = &m->inner_ops[at];
    made->in = v, made->other = other != MOE_INT_NONE ? other : v;
    moei_value_use(m, v), moei_value_use(m, made->other), moei_value_use(m, z);
    while (made->factor2 < 14 && ldexp(most_levels, made->factor2 + 1) < 2147483000.0) made->factor2++;
    factor *= ldexp(m->values[v].scale, -made->factor2) / (double)s->plan.z_scale;
    shift = moei_shift_for(factor, 16, 14);
    if (shift < 0) moei_maker_fail(m, MOE_ERR_OVERFLOW);
    made->factor = (int16_t)moei_nearest(ldexp(factor, 16 + shift), 32767);
    made->shape.n = (uint16_t)m->values[v].width, made->shape.shift = (uint8_t)(shift < 0 ? 0 : shift);
    s->n_list = (uint32_t)moei_list_length(m->inner_ops) - at - 1;
    for (i = at + 1; i < moei_list_length(m->inner_ops); i++)
        if (moei_op_end(m, &m->inner_ops[i]) > 0) m->counted += (size_t)s->now.n_experts * m->inner_ops[i].shape.n * m->inner_ops[i].shape.k;
    made->shape.k = (uint16_t)s->n_list, made->at = (uint32_t)bytes, made->index = (uint16_t)moei_list_length(m->made.mixtures);
    return z;
}

static uint32_t moei_logits_norm(moei_maker *m, moei_scoring *s) {
    const int scored = moei_scored_node(&s->layer->config);
    const double limit = m->status != MOE_OK || scored == MOE_NODE_OUTPUT ? MOEI_WIDE : m->values[s->node[scored]].limit;
    const double n = (double)(scored == MOE_NODE_OUTPUT ? s->layer->config.d_out : scored == MOE_NODE_LOW ? s->layer->config.d_low : s->layer->config.d_ff);
    if (s->now.norm_order == MOE_NORM_L1) return moei_logits_measured(m, s, moe_int_op_norm_l1, n * limit, 1, MOE_INT_NONE);
    if (s->now.norm_order == MOE_NORM_LINF) return moei_logits_measured(m, s, moe_int_op_norm_linf, limit, 1, MOE_INT_NONE);
    return moei_logits_measured(m, s, moe_int_op_norm_l2, sqrt(n) * limit, 1, MOE_INT_NONE);
}

static uint32_t moei_logits_competition(moei_maker *m, moei_scoring *s) {
    const double n = (double)s->layer->config.d_out;
    return moei_logits_measured(m, s, moe_int_op_norm_l1, n * MOEI_WIDE, 1 / n, MOE_INT_NONE);
}

/* (W_K^T W_Q h_g) . h_e / sqrt(h): the two matrices are one. */
static uint32_t moei_logits_attentive(moei_maker *m, moei_scoring *s) {
    const size_t h = moei_router_hidden(&s->now);
    const uint32_t v = moei_router_hidden_ops(m, s, h);
    moe_real *w = moei_router_matrix(m, NULL, NULL, h, h);
    moei_int_matrix x;
    uint32_t key;
    size_t i;
    if (w != NULL)
        moe_matmul(s->layer->kernels, MOE_MATMUL_TN, MOE_TYPE_REAL, h, h, h, s->layer->tensors[MOE_ROUTER_KEY], h, s->layer->tensors[MOE_ROUTER_QUERY], h, w, h, 0);
    for (i = 0; i < h * h && w != NULL; i++) w[i] = (moe_real)((double)w[i] / sqrt((double)h));
    x = moei_int_matrix_of(w, NULL, 1, h, h);
    key = moei_product(m, &x, v, MOEI_NARROW, 0, s->range->key, 0);
    moei_router_matrix_free(m, w, h, h);
    if (m->status != MOE_OK) return 0;
    return moei_logits_measured(m, s, moe_int_op_match, (double)h * MOEI_NARROW * MOEI_NARROW, m->values[key].scale, key);
}

/* By score: appends what makes the logits. NULL: it has no integer form. */
static uint32_t (*const moei_scores_ints[MOE_SCORE_COUNT])(moei_maker *m, moei_scoring *s) = {
    /* linear, random, mlp, cosine, norm */
    moei_logits_linear, moei_logits_linear, moei_logits_mlp, moei_logits_cosine, moei_logits_norm,
    /* grap, attentive, competition, dselect, custom */
    moei_logits_grap, moei_logits_attentive, moei_logits_competition, NULL, NULL};

/* Whether the score reads a vector that a shaped gate's limit or offset is already part of. */
static int moei_shape_is_scored(const moe_layer_config *c) {
    const int node = moei_scored_node(c), limited = c->swiglu_limit > MOEI_R(0.0);
    return (node == MOE_NODE_GATE && limited) || (node == MOE_NODE_UP && (limited || moei_is_set(c->swiglu_offset)));
}

/* What the integers cannot say; what the router refuses comes on top. */
static void moei_mixture_supported(moei_maker *m, const moe_layer_config *c, int frozen) {
    const size_t i = m->module;
    const moe_router_config *r = &c->router;
    static const char hint[] = "has no integer form; MOE_WEIGHTS_FLOAT takes it";
    if (moei_scores_ints[r->score] == NULL) MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: score = %s %s", i, moei_score_names[r->score], hint);
    if (moei_shape_is_scored(c))
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: %s with norm_node = %s %s", i,
                          c->swiglu_limit > MOEI_R(0.0) ? "swiglu_limit" : "swiglu_offset", moei_node_names[r->norm_node], hint);
    if (r->refine != MOE_REFINE_NONE) MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: refine = %s %s", i, moei_refine_names[r->refine], hint);
    if (r->apply_to == MOE_APPLY_INPUT && moei_scored_node(c) >= 0)
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: apply_to = input with score = %s %s", i, moei_score_names[r->score], hint);
    if (r->student && frozen)
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: student = 1, past freeze_at, %s", i, hint);
    if (r->input == MOE_INPUT_ADAPTIVE_CLUSTERING && r->ac_mix > 1) {
        const moe_router_config *previous = &m->net->modules[moei_previous_mixture(m->net, i)].layer.config.router;
        if (previous->gate == MOE_GATE_IDENTITY || previous->expert_scale || previous->scale < 0)
            MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: ac_mix = %d of weights that may be negative %s", i, r->ac_mix, hint);
    }
    if (m->net->d_in > 0 && r->select == MOE_SELECT_HASH)
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: select = hash: moe_infer knows ids only where the net reads them (d_in = 0)", i);
}

/* A vector that goes into the sum: the matrix that makes it of what, its largest number, and the power of two of its weight. */
typedef struct moei_int_part {
    moei_int_matrix w;
    double in_scale, range;
    int bits;
    size_t most; /* so many of it */
} moei_int_part;

/* The units of a sum of products, to which an input of scale rest_scale (0: none) is added with a weight up to 1: fine, but factors must fit 15 bits and
   the sum 32. */
static void moei_target_coarse(moei_maker *m, const moei_int_part *part, size_t n, double rest_scale, moei_int_target *to) {
    double factor = 2 * rest_scale, bound = rest_scale * MOEI_WIDE;
    size_t i;
    for (i = 0; i < n; i++) {
        const double one = ldexp(moei_matrix_most(m, &part[i].w, part[i].in_scale), 17 + part[i].bits);
        if (one > factor) factor = one;
        bound += ldexp(moei_matrix_bound(&part[i].w, part[i].in_scale), part[i].bits) * (double)part[i].most;
    }
    if (to->scale < factor / 32767) to->scale = factor / 32767;
    if (to->scale < bound / 5e8) to->scale = bound / 5e8;
    to->shift = 15;
    while (to->shift > 0 && (ldexp(factor / to->scale, to->shift) > 32767 || ldexp(bound / to->scale, to->shift) > 1e9)) to->shift--;
}

/* The units of a sum of wide vectors. */
static void moei_target_fine(moei_maker *m, const moei_int_part *part, size_t n, double rest_scale, moei_int_target *to) {
    double bound = rest_scale * MOEI_WIDE, least[2];
    size_t i;
    int fits = 0;
    for (i = 0; i < n; i++) {
        least[i] = moei_wide_scale(m, &part[i].w, part[i].in_scale, part[i].range);
        bound += ldexp(least[i] * 2 * MOEI_WIDE, part[i].bits) * (double)part[i].most;
    }
    if (to->scale < bound / 5e8) to->scale = bound / 5e8;
    for (to->shift = 16; to->shift > 0 && !fits;) {
        to->shift--;
        fits = ldexp(bound / to->scale, to->shift) <= 1e9 && ldexp(2 * rest_scale / to->scale, to->shift) <= 32767;
        for (i = 0; i < n; i++) fits &= moei_sum_shift(to, part[i].bits, least[i]) >= 0;
    }
    to->finely = fits;
}

enum { MOEI_SUM_LEVELS = 512 };

/* The units of a mixture's sum. Products add their results to it themselves unless it would have too few levels, the largest result being that many for
   each expert: all of them round down. */
static moei_int_target moei_mixture_target(moei_maker *m, const moei_int_part *part, size_t n, int limit, double range, double rest_scale) {
    moei_int_target to, fine;
    memset(&to, 0, sizeof to);
    to.bits = part->bits, to.limit = limit, to.range = range;
    to.scale = limit == MOEI_NARROW ? range / limit : range * 1.25 / limit;
    if (!(to.scale > 0)) to.scale = 1;
    fine = to;
    if (m->status != MOE_OK) return to;
    moei_target_coarse(m, part, n, rest_scale, &to);
    if (!(range > 0) || ldexp(range / to.scale, to.shift) >= (double)MOEI_SUM_LEVELS * (double)part->most) return to;
    moei_target_fine(m, part, n, rest_scale, &fine);
    return fine.finely ? fine : to;
}

/* The blocks of all experts, from the pieces. */
static void moei_mixture_blocks(moei_maker *m, moe_int_mixture *mixture, size_t experts) {
    size_t e, i, from, size;
    mixture->experts = (uint32_t)m->made.experts.size;
    for (e = 0; e < experts; e++)
        for (i = 0, from = 0; i < m->n_pieces && m->status == MOE_OK; i++) {
            size = m->piece[i];
            (void)moei_constants(m, &m->made.experts, m->pieces.data + from + e * size, size);
            from += size * experts;
        }
    if (m->made.experts.size > INT32_MAX) moei_maker_fail(m, MOE_ERR_OVERFLOW);
    for (i = 0, size = 0; i < m->n_pieces; i++) size += m->piece[i];
    mixture->stride = (uint32_t)size;
    m->n_pieces = 0, m->pieces.size = 0;
}

static uint32_t moei_ops_count(const moei_maker *m) { return (uint32_t)moei_list_length(m->inner_ops); }

/* w x for an expert's input, narrow. */
static uint32_t moei_weighed(moei_maker *m, uint32_t x, int bits, double range) {
    moe_int_op op;
    uint32_t y;
    double scale = range / MOEI_NARROW, ratio;
    int shift;
    if (m->status != MOE_OK) return 0;
    if (!(scale > ldexp(m->values[x].scale, bits) / 32767)) scale = ldexp(m->values[x].scale, bits) / 32767;
    ratio = m->values[x].scale / scale;
    shift = moei_shift_for(ratio, bits, 22);
    y = moei_value_new(m, m->values[x].width, MOEI_NARROW, scale, range);
    op = moei_op(moe_int_op_weigh, m->values[x].width, 0, -MOEI_NARROW, MOEI_NARROW, shift < 0 ? 0 : shift);
    op.factor = (int16_t)moei_nearest(ldexp(ratio, bits + op.shape.shift), 32767);
    moei_op_append(m, op, x, x, y);
    return y;
}

/* 2^bits bounds what add_input leaves for the input: |1 - sum w|. Beyond 31 bits the 1 is as good as nothing, as are weights that far below it. */
static int moei_rest_bits(const moe_int_mixture *mixture) {
    const double most = ldexp(mixture->router.most, mixture->weight_bits) - 1;
    int bits = mixture->weight_bits > 0 ? mixture->weight_bits : 0;
    while (ldexp(1.0, bits) < most) bits++;
    return bits;
}

/* sum += (1 - sum w) x. */
static void moei_rest(moei_maker *m, const moe_int_mixture *mixture, const moei_int_target *to, uint32_t x) {
    const int bits = moei_rest_bits(mixture);
    double ratio;
    int shift;
    moe_int_op op;
    if (m->status != MOE_OK) return;
    ratio = ldexp(m->values[x].scale, 1 + bits + to->shift) / to->scale;
    shift = moei_shift_for(ratio, 0, 30);
    op = moei_op(moe_int_op_rest, m->values[x].width, 0, 0, 0, shift < 0 ? 0 : shift);
    op.factor = (int16_t)moei_nearest(ldexp(ratio, op.shape.shift), 32767), op.factor2 = (int16_t)(bits - mixture->weight_bits < 31 ? bits - mixture->weight_bits : 31);
    op.at = bits < 32 ? (uint32_t)32768 >> bits : 0, op.index = (uint16_t)moei_list_length(m->made.mixtures);
    moei_op_append(m, op, x, mixture->choices, to->sum);
}

/* What follows is weighed by sigmoid(v . x). */
static void moei_shared_sigmoid(moei_maker *m, const moe_layer *layer, uint32_t x, double range) {
    const moei_int_matrix v = moei_int_matrix_of(layer->tensors[MOE_SHARED_SIGMOID], NULL, 1, 1, (size_t)layer->config.router.d_model);
    const uint32_t share = moei_curve(m, MOE_ACT_SIGMOID, moei_product(m, &v, x, MOEI_WIDE, 0, range, 0), MOEI_WIDE, 1.0 / 32768, 1);
    if (m->status == MOE_OK) moei_op_append(m, moei_op(moe_int_op_weight, 1, 0, 0, 0, 0), share, share, share);
}

/* The operations for the shared expert and for the input that add_input adds. */
static void moei_mixture_rest(moei_maker *m, const moei_scoring *s, const moei_chain *shared, uint32_t x, moei_int_target to, moe_int_mixture *mixture) {
    const moe_layer_config *c = &s->layer->config;
    uint32_t node[MOE_NODE_COUNT];
    mixture->shared = moei_ops_count(m);
    to.bits = 0;
    if (c->n_shared > 0) {
        const uint32_t hidden = moei_expert_hidden(m, shared, 1, x, s->range->shared, node);
        if (c->shared_sigmoid) moei_shared_sigmoid(m, s->layer, x, s->range->sigmoid);
        (void)moei_expert_ops(m, shared, 1, hidden, &to, s->range->shared[MOE_NODE_OUTPUT]);
    }
    if (c->add_input) moei_rest(m, mixture, &to, s->entering);
    mixture->n_shared = moei_ops_count(m) - mixture->shared;
}

/* The logits, and where their operations are; those that run for each expert are not counted. */
static void moei_mixture_logits(moei_maker *m, moei_scoring *s, moe_int_mixture *mixture) {
    mixture->score = moei_ops_count(m);
    mixture->z = moei_scores_ints[s->now.score](m, s);
    mixture->n_score = moei_ops_count(m) - mixture->score - s->n_list;
}

/* The router, and the vectors that it works on. They are there from the beginning: with some scores experts' operations come first in the list, but run
   again afterwards. */
static void moei_mixture_router(moei_maker *m, moei_scoring *s, moe_int_mixture *mixture) {
    mixture->router = s->plan.router;
    mixture->weight_bits = (int16_t)moei_exponent((double)s->plan.weight_scale);
    mixture->p = moei_value_wide32(m, mixture->router.scratch);
    mixture->sum = moei_value_wide32(m, (size_t)s->layer->config.d_out);
    mixture->choices = moei_value_new(m, 1 + 2 * (size_t)mixture->router.most, MOEI_WIDE, 1, 0);
    if (m->status != MOE_OK) return;
    m->values[mixture->choices].last = UINT32_MAX;
    m->values[mixture->p].made = m->values[mixture->sum].made = m->values[mixture->choices].made = s->begun;
}

/* The operations of one expert, and with a score that reads experts the router, which is planned between them. */
static moei_int_target moei_mixture_experts(moei_maker *m, moei_scoring *s, const moei_chain *shared, uint32_t x, int limit, moe_int_mixture *mixture) {
    const moe_layer_config *c = &s->layer->config;
    const int scored = moei_scored_node(c), inputs = c->router.apply_to == MOE_APPLY_INPUT;
    const size_t experts = (size_t)c->router.n_experts;
    moei_chain chain = moei_chain_begin(s->layer, c->expert);
    moei_int_part part[2];
    moei_int_target to;
    double rest = 0;
    uint32_t hidden, out;
    mixture->expert = s->expert = moei_ops_count(m);
    m->in_block = 1;
    chain.needed |= moei_ancestors(chain.expert, scored);
    hidden = moei_expert_hidden(m, &chain, experts, inputs ? moei_weighed(m, s->entering, mixture->weight_bits, s->range->weighed) : x, s->range->node, s->node);
    if (scored >= 0) {
        moei_mixture_plan(m, s, 0);
        moei_mixture_router(m, s, mixture);
    }
    memset(part, 0, sizeof part);
    part[0].w = moei_last_matrix(&chain, experts), part[0].range = s->range->node[MOE_NODE_OUTPUT];
    part[0].bits = inputs ? 0 : mixture->weight_bits, part[0].most = mixture->router.most;
    if (c->n_shared > 0) part[1].w = moei_last_matrix(shared, 1), part[1].range = s->range->shared[MOE_NODE_OUTPUT], part[1].most = 1;
    if (m->status == MOE_OK) part[0].in_scale = m->values[hidden].scale, rest = c->add_input ? ldexp(m->values[s->entering].scale, moei_rest_bits(mixture)) : 0;
    part[1].in_scale = s->range->shared[MOE_NODE_PRODUCT] / MOEI_NARROW;
    to = moei_mixture_target(m, part, c->n_shared > 0 ? 2 : 1, limit, s->range->y, rest);
    to.sum = mixture->sum;
    out = moei_expert_ops(m, &chain, experts, hidden, &to, part[0].range);
    if (to.finely) s->node[MOE_NODE_OUTPUT] = out;
    mixture->n_expert = s->n_expert = moei_ops_count(m) - mixture->expert;
    moei_mixture_blocks(m, mixture, experts);
    m->in_block = 0;
    s->output_unit = ldexp(to.scale, -(1 + to.bits + to.shift)), s->output_scale = s->range->node[MOE_NODE_OUTPUT] * 1.25 / MOEI_WIDE;
    return to;
}

static uint32_t moei_module_mixture(moei_maker *m, const moe_module *module, const moei_int_range *range, int limit) {
    const moe_layer_config *c = &module->layer.config;
    const int reads_experts = moei_scored_node(c) >= 0;
    moei_chain shared;
    moei_scoring s;
    moe_int_mixture mixture;
    moe_int_router_names names;
    moei_int_target to;
    moe_int_op op;
    uint32_t x = moei_narrowed(m, m->entering[m->module]), begun = m->clock, out, index;
    size_t expert;
    memset(&mixture, 0, sizeof mixture);
    memset(&s, 0, sizeof s);
    memset(&shared, 0, sizeof shared);
    s.begun = begun, s.layer = &module->layer, s.range = range, s.entering = m->entering[m->module];
    s.now = moei_router_now(s.layer, NULL);
    if (m->status != MOE_OK) return 0;
    if (c->n_shared > 0) shared = moei_chain_begin(s.layer, MOEI_SHARED);
    m->multiplications += m->counted;
    m->inner = 1, m->counted = 0;
    if (!reads_experts) {
        moei_mixture_logits(m, &s, &mixture);
        moei_mixture_router(m, &s, &mixture);
    }
    m->multiplications += m->counted, m->counted = 0;
    to = moei_mixture_experts(m, &s, &shared, x, limit, &mixture);
    expert = m->counted, m->counted = 0;
    if (reads_experts) moei_mixture_logits(m, &s, &mixture);
    moei_mixture_rest(m, &s, &shared, x, to, &mixture);
    m->multiplications += mixture.router.most * expert + m->counted;
    mixture.block = MOE_INT_NONE;
    if (m->config->loader) mixture.block = moei_value_new(m, mixture.stride / 2, MOEI_WIDE, 1, 0);
    m->inner = 0;
    out = moei_value_new(m, (size_t)c->d_out, limit, to.scale, range->y);
    m->clock++;
    moei_value_use(m, x), moei_value_use(m, s.entering), moei_value_use(m, mixture.z), moei_value_use(m, mixture.p), moei_value_use(m, mixture.sum);
    if (m->config->loader && m->status == MOE_OK) m->values[mixture.block].made = begun;
    index = moei_maker_push(m, &m->made.mixtures, &mixture, sizeof mixture);
    names.name[0] = s.plan.gate, names.name[1] = s.plan.select, names.name[2] = s.plan.values, names.name[3] = s.plan.weight, names.name[4] = s.plan.scale;
    (void)moei_maker_push(m, &m->made.router_names, &names, sizeof names);
    op = moei_op(moe_int_op_mixture, (size_t)c->d_out, 0, m->relu ? 0 : -limit, limit, to.shift);
    op.index = (uint16_t)index;
    m->counted = 0;
    moei_op_append(m, op, x, x, out);
    return out;
}

/* ---- modules: what each appends; the vector that it makes ---- */

static uint32_t moei_module_linear(moei_maker *m, const moe_module *module, const moei_int_range *range, int limit) {
    const moei_int_matrix w = moei_int_matrix_of(module->tensors[MOE_MODULE_WEIGHT], module->tensors[MOE_MODULE_BIAS], 1, (size_t)module->d_out,
                                                 (size_t)module->d_in);
    return moei_product(m, &w, moei_narrowed(m, m->entering[m->module]), limit, m->relu, range->y, 0);
}

static uint32_t moei_module_activation(moei_maker *m, const moe_module *module, const moei_int_range *range, int limit) {
    const double scale = limit == MOEI_NARROW ? range->y / limit : range->y * 1.1 / limit;
    return moei_curve(m, module->act, moei_widened(m, m->entering[m->module]), limit, scale, range->y);
}

static uint32_t moei_module_feed_forward(moei_maker *m, const moe_module *module, const moei_int_range *range, int limit) {
    const moei_chain chain = moei_chain_begin(&module->layer, module->layer.config.expert);
    moei_int_target to;
    uint32_t node[MOE_NODE_COUNT];
    memset(&to, 0, sizeof to);
    to.sum = MOE_INT_NONE, to.limit = limit, to.range = range->y;
    return moei_expert_ops(m, &chain, 1, moei_expert_hidden(m, &chain, 1, moei_narrowed(m, m->entering[m->module]), range->node, node), &to, 0);
}

static uint32_t moei_module_residual(moei_maker *m, const moe_module *module, const moei_int_range *range, int limit) {
    (void)limit;
    return moei_added(m, m->entering[m->module], m->entering[m->module - (size_t)module->span], range->y);
}

static uint32_t moei_module_dropout(moei_maker *m, const moe_module *module, const moei_int_range *range, int limit) {
    (void)module, (void)range, (void)limit;
    return m->entering[m->module];
}

/* An embedding's or positions' rows as constants of a product, in 8 bits whatever the weights are. No row's scale is far below the others', so that a tied
   module's biases find room beside every row. */
static uint32_t moei_rows_pack(moei_maker *m, const moei_int_matrix *x, double *unit) {
    const int weights = m->weights;
    moei_int_levels l;
    uint32_t at;
    size_t i, size;
    m->weights = MOE_WEIGHTS_INT8;
    moei_int_levels_begin(m, x, 1, &l);
    if (!(l.most > 0)) l.most = 1;
    for (i = 0; i < x->n && m->status == MOE_OK; i++)
        if (l.row[i] < l.most / 1024) l.row[i] = l.most / 1024;
    *unit = 32767 / l.most;
    at = moei_matrix_pack(m, x, &l, 1, *unit, &m->made.weights, &size);
    moei_int_levels_free(m, x, &l);
    m->weights = weights;
    return at;
}

/* Row number token (which = 0) or place (1) of the rows at `at`. The largest possible level is 127 * 32767 / 2 before the shift. */
static uint32_t moei_row(moei_maker *m, const moei_int_matrix *x, uint32_t at, double unit, int which, int limit) {
    const int shift = limit == MOEI_NARROW ? 14 : 6;
    const double scale = ldexp(2.0, shift) / unit;
    const uint32_t out = moei_value_new(m, x->k, limit, scale, scale * limit);
    moe_int_op op = moei_op(moe_int_op_row, x->k, x->n, -limit, limit, shift);
    op.at = at, op.index = (uint16_t)which;
    moei_op_append(m, op, out, out, out);
    return out;
}

static int moei_rows_fit(moei_maker *m, size_t n) {
    if (n > MOEI_INT_MAX_WIDTH)
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: more than %d rows have no integer form; MOE_WEIGHTS_FLOAT takes them", m->module, (int)MOEI_INT_MAX_WIDTH);
    return m->status == MOE_OK;
}

static uint32_t moei_module_embedding(moei_maker *m, const moe_module *module, const moei_int_range *range, int limit) {
    const moei_int_matrix x = moei_int_matrix_of(module->tensors[MOE_MODULE_WEIGHT], NULL, 1, (size_t)module->n_rows, (size_t)module->d_out);
    (void)range;
    if (!moei_rows_fit(m, x.n)) return 0;
    m->rows = moei_rows_pack(m, &x, &m->rows_unit);
    return moei_row(m, &x, m->rows, m->rows_unit, 0, limit);
}

static uint32_t moei_module_positions(moei_maker *m, const moe_module *module, const moei_int_range *range, int limit) {
    const moei_int_matrix x = moei_int_matrix_of(module->tensors[MOE_MODULE_WEIGHT], NULL, 1, m->made.model.length, (size_t)module->d_out);
    double unit;
    uint32_t at;
    (void)limit;
    if (!moei_rows_fit(m, x.n)) return 0;
    at = moei_rows_pack(m, &x, &unit);
    return moei_added(m, m->entering[m->module], moei_row(m, &x, at, unit, 1, MOEI_WIDE), range->y);
}

/* A tied module is a product with the rows of the embedding, which are there already: only its biases, which wait for the scale of what it reads, are put
   beside them. Its own scale is what the factors make it, and a power of two. A second tied module has weights of its own. */
static uint32_t moei_module_tied(moei_maker *m, const moe_module *module, const moei_int_range *range, int limit) {
    const size_t n = (size_t)module->d_out, k = (size_t)module->d_in, pair = moei_int8_pair_size(k);
    const uint32_t x = moei_narrowed(m, m->entering[m->module]);
    double scale;
    size_t j;
    uint32_t out;
    moe_int_op op;
    int shift = 0;
    if (m->status != MOE_OK) return 0;
    if (m->rows == MOE_INT_NONE) return moei_module_linear(m, module, range, limit);
    scale = ldexp(m->values[x].scale / m->rows_unit, 16);
    for (; shift < 30 && scale < range->y * 1.25 / MOEI_WIDE; shift++) scale *= 2;
    for (j = 0; j < n; j++) {
        unsigned char *head = m->made.weights.data + m->rows + j / 2 * pair;
        const double row = moei_flash_16(head + 8 + j % 2 * 2) / m->rows_unit;
        moei_put_32_le(head + j % 2 * 4, moei_nearest((double)module->tensors[MOE_MODULE_BIAS][j] / (row * m->values[x].scale), 536870911));
    }
    op = moei_op(moe_int_op_int8, n, k, -MOEI_WIDE, MOEI_WIDE, shift);
    op.at = m->rows, m->rows = MOE_INT_NONE;
    out = moei_value_new(m, n, MOEI_WIDE, scale, range->y);
    m->counted += n * k;
    moei_op_append(m, op, x, x, out);
    return out;
}

/* gain / scale * 2^bits in 16 bits, the spread's 2^-21 after a product's >> 16 make the shift bits + 5. eps lies in the units of d of moe_int_op_norm. */
static uint32_t moei_module_norm(moei_maker *m, const moe_module *module, const moei_int_range *range, int limit) {
    const size_t n = (size_t)module->d_in;
    const moe_real *gain = module->tensors[MOE_MODULE_WEIGHT], *bias = module->kind == MOE_MODULE_LAYER_NORM ? module->tensors[MOE_MODULE_BIAS] : NULL;
    uint32_t x = m->entering[m->module];
    double scale = limit == MOEI_NARROW ? range->y / limit : range->y * 1.25 / limit, most = 0, eps;
    unsigned char bytes[8];
    moe_int_op op;
    uint32_t out;
    size_t i;
    int bits, factor = 8;
    if (n > INT16_MAX)
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: norms wider than %d have no integer form; MOE_WEIGHTS_FLOAT takes them", m->module, (int)INT16_MAX);
    if (m->status != MOE_OK) return 0;
    for (i = 0; i < n; i++)
        if (fabs((double)gain[i]) > most) most = fabs((double)gain[i]);
    if (scale < most / 32000) scale = most / 32000;
    if (!(scale > 0)) scale = 1;
    bits = moei_shift_for(most / scale, 0, 25);
    while (ldexp((double)n * (double)n, 30 + 2 * factor) > ldexp(1, 60)) factor--;
    eps = ldexp((double)MOEI_NORM_EPS * (double)n * (double)n, 2 * factor);
    if (eps > ldexp(m->values[x].scale * m->values[x].scale, 60)) x = moei_rescale(m, x, MOEI_WIDE, ldexp(sqrt(eps), -30)); /* eps must fit its levels */
    if (m->status != MOE_OK) return 0;
    eps = eps / m->values[x].scale / m->values[x].scale;
    eps = eps < ldexp(1, 60) ? floor(eps + 0.5) : ldexp(1, 60);
    out = moei_value_new(m, n, limit, scale, range->y);
    op = moei_op(moe_int_op_norm, n, 0, -limit, limit, bits + 5);
    op.factor = (int16_t)factor;
    moei_put_32_le(bytes, (int32_t)(uint32_t)((uint64_t)eps & 0xffffffffu)), moei_put_32_le(bytes + 4, (int32_t)(uint32_t)((uint64_t)eps >> 32));
    op.at = moei_constants(m, &m->made.weights, bytes, 8);
    for (i = 0; i < n + n % 2; i += 2) {
        moei_put_16_le(bytes, moei_nearest(ldexp((double)gain[i] / scale, bits), 32767));
        moei_put_16_le(bytes + 2, i + 1 < n ? moei_nearest(ldexp((double)gain[i + 1] / scale, bits), 32767) : 0);
        (void)moei_constants(m, &m->made.weights, bytes, 4);
    }
    for (i = 0; bias != NULL && i < n; i++) {
        moei_put_32_le(bytes, moei_nearest(ldexp((double)bias[i] / scale, bits + 5), 1073741823));
        (void)moei_constants(m, &m->made.weights, bytes, 4);
    }
    op.index = bias != NULL;
    moei_op_append(m, op, x, x, out);
    return out;
}

/* ---- attention ---- */

/* The table of moe_int_op_turn. Attentions with the same angles have one. */
static uint32_t moei_turns(moei_maker *m, const moe_module *module) {
    const size_t half = (size_t)module->attention.d_head / 2, rows = MOEI_INT_TURNS + (m->made.model.length - 1) / MOEI_INT_TURNS + 1;
    uint32_t *at = &m->ranges[moei_turns_of(m->net, m->module)].turns;
    unsigned char bytes[4];
    size_t r, i;
    if (*at != MOE_INT_NONE) return *at;
    *at = (uint32_t)m->made.weights.size;
    for (r = 0; r < rows; r++)
        for (i = 0; i < half; i++) {
            const double place = (double)(r < MOEI_INT_TURNS ? r : (r - MOEI_INT_TURNS) * MOEI_INT_TURNS);
            const double angle = place * pow((double)module->attention.rotary_base, -(double)i / (double)half);
            moei_put_16_le(bytes, moei_nearest(32767 * cos(angle), 32767)), moei_put_16_le(bytes + 2, moei_nearest(32767 * sin(angle), 32767));
            (void)moei_constants(m, &m->made.weights, bytes, 4);
        }
    return *at;
}

/* A query or key of rotary attention: x, which has finer levels, by 2^shift, turned. */
static uint32_t moei_int_turned(moei_maker *m, const moe_module *module, uint32_t x, int limit, int shift) {
    uint32_t out;
    moe_int_op op;
    if (m->status != MOE_OK) return 0;
    out = moei_value_new(m, m->values[x].width, limit, ldexp(m->values[x].scale, shift), m->values[x].range);
    op = moei_op(moe_int_op_turn, m->values[out].width, (size_t)module->attention.d_head, -limit, limit, 15 + shift);
    op.at = moei_turns(m, module);
    moei_op_append(m, op, x, x, out);
    return out;
}

static moei_int_matrix moei_attention_matrix(const moe_module *module, int slot) {
    return moei_int_matrix_of(module->tensors[slot], NULL, 1, moei_attention_width(module), (size_t)module->d_in);
}

/* The query: as many levels as leave scores below 2^30. Turned numbers may be larger than what they were by sqrt 2. */
static uint32_t moei_query(moei_maker *m, const moe_module *module, uint32_t x, double range) {
    const moei_int_matrix w = moei_attention_matrix(module, MOE_MODULE_QUERY);
    const double most = 1073741823.0 / (127.0 * 1.4143 * (double)module->attention.d_head);
    const int limit = most < (int)MOEI_INT_TURNED ? (int)most : (int)MOEI_INT_TURNED;
    if (!module->attention.rotary) return moei_product(m, &w, x, limit, 0, range, 0);
    return moei_int_turned(m, module, moei_product(m, &w, x, limit, 0, range * 1.4143, 0), MOEI_WIDE, 0);
}

/* The key: narrow, and rounded only after its turn. */
static uint32_t moei_key(moei_maker *m, const moe_module *module, uint32_t x, double range) {
    const moei_int_matrix w = moei_attention_matrix(module, MOE_MODULE_KEY);
    double finest, scale = range > 0 ? range / MOEI_NARROW : 1;
    int shift = 7;
    if (!module->attention.rotary || m->status != MOE_OK) return moei_product(m, &w, x, MOEI_NARROW, 0, range, 0);
    finest = moei_matrix_most(m, &w, m->values[x].scale) / 0.49;
    while (shift > 0 && ldexp(scale, -shift) < finest) shift--;
    if (scale < finest) scale = finest;
    return moei_int_turned(m, module, moei_product(m, &w, x, MOEI_INT_TURNED, 0, range * 1.4143, ldexp(scale, -shift)), MOEI_NARROW, shift);
}

/* Room in the state: int8 [length, width]. */
static uint32_t moei_state(moei_maker *m, size_t width) {
    const size_t at = m->made.model.state_size;
    size_t bytes;
    if (!moei_mul(m->made.model.length, width, &bytes) || bytes > INT32_MAX / 2 || at > INT32_MAX / 2) moei_maker_fail(m, MOE_ERR_OVERFLOW);
    else m->made.model.state_size = at + (bytes + 3) / 4 * 4;
    return (uint32_t)at;
}

static uint32_t moei_module_attention(moei_maker *m, const moe_module *module, const moei_int_range *range, int limit) {
    const size_t width = moei_attention_width(module);
    const moei_int_matrix value = moei_attention_matrix(module, MOE_MODULE_VALUE);
    const moei_int_matrix output = moei_int_matrix_of(module->tensors[MOE_MODULE_OUTPUT], NULL, 1, (size_t)module->d_out, width);
    const uint32_t x = moei_narrowed(m, m->entering[m->module]);
    const uint32_t q = moei_query(m, module, x, range->q), k = moei_key(m, module, x, range->k);
    moe_int_attention a;
    moe_int_op op;
    uint32_t out;
    double octaves, scale;
    int bits;
    if (m->made.model.length > UINT16_MAX)
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: attention over a length of more than %d has no integer form", m->module, (int)UINT16_MAX);
    memset(&a, 0, sizeof a);
    a.heads = (uint16_t)module->attention.heads, a.d_head = (uint16_t)module->attention.d_head;
    a.value = moei_product(m, &value, x, MOEI_NARROW, 0, range->v, 0);
    a.keys = moei_state(m, width), a.values = moei_state(m, width);
    a.room = moei_value_wide32(m, m->made.model.length + 1 + (m->made.model.length + 1) / 2);
    if (m->status != MOE_OK) return 0;
    octaves = m->values[q].scale * m->values[k].scale * 1.4426950408889634 / sqrt((double)a.d_head);
    bits = moei_shift_for(octaves, 16, 31);
    a.bits = (uint16_t)(bits < 0 ? 0 : bits);
    /* values are averaged: their range is never larger after it, and 64 times smaller is as good as nothing */
    scale = range->mixed / MOEI_NARROW;
    if (scale > m->values[a.value].scale) scale = m->values[a.value].scale;
    if (scale < m->values[a.value].scale / 64) scale = m->values[a.value].scale / 64;
    out = moei_value_new(m, width, MOEI_NARROW, scale, scale * MOEI_NARROW);
    bits = moei_shift_for(m->values[a.value].scale / scale, 0, 14);
    op = moei_op(moe_int_op_attention, width, width, -MOEI_NARROW, MOEI_NARROW, bits - 1);
    op.factor = (int16_t)moei_nearest(ldexp(octaves, 16 + a.bits), 32767);
    op.factor2 = (int16_t)moei_nearest(ldexp(m->values[a.value].scale / scale, bits), 32766);
    op.index = (uint16_t)moei_maker_push(m, &m->made.attentions, &a, sizeof a);
    m->counted += 2 * width * m->made.model.length;
    moei_op_append(m, op, q, k, out);
    moei_value_use(m, a.value), moei_value_use(m, a.room);
    return moei_product(m, &output, out, limit, 0, range->y, 0);
}

/* By kind of module; NULL: it has no integer form. limit: what its result shall be. */
static uint32_t (*const moei_int_modules[MOE_MODULE_COUNT])(moei_maker *m, const moe_module *module, const moei_int_range *range, int limit) = {
    /* linear, activation, layer_norm, mixture, residual, embedding */
    moei_module_linear, moei_module_activation, moei_module_norm, moei_module_mixture, moei_module_residual, moei_module_embedding,
    /* positions, attention, rms_norm, dropout, feed_forward, tied */
    moei_module_positions, moei_module_attention, moei_module_norm, moei_module_dropout, moei_module_feed_forward, moei_module_tied};

/* ---- calibration ---- */

/* What is no number counts as infinite. */
static void moei_range_most(double *range, double x) {
    if (!(fabs(x) <= *range)) *range = fabs(x) < HUGE_VAL ? fabs(x) : HUGE_VAL;
}

static void moei_range_add(double *range, const moe_real *x, size_t rows, size_t width, size_t ld) {
    size_t i, j;
    for (i = 0; i < rows && x != NULL; i++)
        for (j = 0; j < width; j++) moei_range_most(range, (double)x[i * ld + j]);
}

static int moei_range_is_finite(const moei_int_range *r) {
    double sum = r->y + r->u + r->z + r->unit + r->projected + r->hidden + r->hidden_act + r->key + r->weighed + r->sigmoid + r->q + r->k + r->v + r->mixed;
    int node;
    for (node = 0; node < MOE_NODE_COUNT; node++) sum += r->node[node] + r->shared[node];
    return sum < HUGE_VAL;
}

static double moei_range_row(const moe_real *w, const moe_real *bias, size_t i, size_t k, const double *x) {
    double sum = bias != NULL ? (double)bias[i] : 0;
    size_t p;
    for (p = 0; p < k; p++) sum += (double)w[i * k + p] * x[p];
    return sum;
}

/* The largest component of v / sqrt(v . v + least). */
static void moei_range_unit(double *range, const double *v, size_t n, double least) {
    double sum = least;
    size_t i;
    for (i = 0; i < n; i++) sum += v[i] * v[i];
    for (i = 0; i < n && sum > 0; i++) moei_range_most(range, v[i] / sqrt(sum));
}

/* Inside the score of one token, of which a layer's pass keeps nothing; room: d + 2 times the widest vector. */
static void moei_range_score(const moe_layer *layer, const moe_router_config *c, const moe_real *x, const moe_real *u, double *room, moei_int_range *range) {
    const moe_real *const *t = (const moe_real *const *)layer->tensors;
    const size_t d = (size_t)c->d_model, h = moei_router_hidden(c), r = (size_t)c->cosine_dim;
    double *in = room, *act = room + d, *query = act + (h > r ? h : r);
    size_t i, p;
    for (i = 0; i < d; i++) in[i] = (double)x[i];
    if (c->input == MOE_INPUT_SCALED_RMS) moei_range_unit(&range->unit, in, d, 1e-6 * (double)d);
    for (i = 0; i < d; i++) in[i] = (double)u[i];
    if (c->score == MOE_SCORE_COSINE || c->score == MOE_SCORE_GRAP) {
        const int projects = c->score == MOE_SCORE_COSINE && r > 0;
        for (i = 0; i < r && projects; i++) moei_range_most(&range->projected, act[i] = moei_range_row(t[MOE_ROUTER_PROJECTION], NULL, i, d, in));
        for (i = 0; i < d && !projects; i++) moei_range_most(&range->projected, in[i]);
        moei_range_unit(&range->unit, projects ? act : in, projects ? r : d, 0);
    }
    if (c->score != MOE_SCORE_MLP && c->score != MOE_SCORE_ATTENTIVE) return;
    for (i = 0; i < h; i++) {
        moe_real v = (moe_real)moei_range_row(t[MOE_ROUTER_FC1_WEIGHT], t[MOE_ROUTER_FC1_BIAS], i, d, in);
        moei_range_most(&range->hidden, (double)v);
        moe_activate(NULL, c->router_act, 1, &v, &v);
        moei_range_most(&range->hidden_act, act[i] = (double)v);
    }
    if (c->score != MOE_SCORE_ATTENTIVE) return;
    for (i = 0; i < h; i++) query[i] = moei_range_row(t[MOE_ROUTER_QUERY], NULL, i, h, act) / sqrt((double)h);
    for (i = 0; i < h; i++) {
        double key = 0;
        for (p = 0; p < h; p++) key += query[p] * (double)t[MOE_ROUTER_KEY][p * h + i];
        moei_range_most(&range->key, key);
    }
}

/* What else a mixture computes of a token's numbers and weights. */
static void moei_range_weights(const moe_layer *layer, const moe_layer_pass *p, moei_int_range *range) {
    const moe_layer_config *c = &layer->config;
    const size_t d = (size_t)c->router.d_model, pairs = p->routing.plan.offsets[c->router.n_experts];
    size_t i, q;
    for (i = 0; i < pairs && c->router.apply_to == MOE_APPLY_INPUT; i++)
        for (q = 0; q < d; q++) {
            const moe_entry *entry = &p->routing.plan.entries[i];
            moei_range_most(&range->weighed, (double)(entry->weight_in * p->x[(size_t)entry->token * d + q]));
        }
    for (i = 0; i < p->call.n_tokens && c->shared_sigmoid; i++)
        moei_range_most(&range->sigmoid, (double)moe_dot(layer->kernels, d, layer->tensors[MOE_SHARED_SIGMOID], p->x + i * d));
}

/* What the router computes of each token. */
static moe_status moei_range_router(const moei_maker *m, const moe_layer *layer, const moe_layer_pass *p, moei_int_range *range) {
    const moe_router_config *c = &layer->config.router;
    const size_t d = (size_t)c->d_model, h = moei_router_hidden(c), r = (size_t)c->cosine_dim, numbers = d + 2 * (h > r ? h : r);
    double *room = (double *)moei_alloc(&m->made.allocator, numbers, sizeof *room);
    size_t i;
    if (room == NULL) return MOE_ERR_MEMORY;
    for (i = 0; i < p->call.n_tokens; i++) moei_range_score(layer, c, p->x + i * d, p->routing.u + i * d, room, range);
    moei_free(&m->made.allocator, room, numbers * sizeof *room);
    return MOE_OK;
}

static void moei_range_layer(const moe_layer *layer, const moe_layer_pass *p, moei_int_range *range) {
    const moei_chain chain = moei_chain_begin(layer, layer->config.expert);
    const size_t n = p->call.n_tokens, experts = (size_t)layer->config.router.n_experts;
    int node;
    for (node = 0; node < MOE_NODE_COUNT; node++) {
        if (chain.needed >> node & 1u)
            moei_range_add(&range->node[node], p->node[node], p->routing.plan.offsets[experts], chain.width[node], chain.ld[node]);
        moei_range_add(&range->node[node], p->all[node], n * experts, chain.width[node], chain.width[node]);
    }
    moei_range_add(&range->z, p->routing.logits, n, experts, experts);
    moei_range_add(&range->u, p->routing.u, n, (size_t)layer->config.router.d_model, (size_t)layer->config.router.d_model);
    if (layer->config.n_shared > 0) {
        const moei_chain shared = moei_chain_begin(layer, MOEI_SHARED);
        for (node = 0; node < MOE_NODE_COUNT; node++)
            if (shared.needed >> node & 1u) moei_range_add(&range->shared[node], p->shared[node], n, shared.width[node], shared.ld[node]);
    }
}

static moe_status moei_range_batch(const moei_maker *m, const moe_net_pass *pass, double *input) {
    size_t i, n = pass->n_tokens;
    moe_status status = MOE_OK;
    if (m->net->d_in > 0) moei_range_add(input, pass->call.x, n, (size_t)m->net->d_in, (size_t)m->net->d_in);
    for (i = 0; i < m->net->n_modules; i++) {
        const moe_module *module = &m->net->modules[i];
        const struct moe_module_pass *p = &pass->modules[i];
        moei_int_range *range = &m->ranges[i];
        moei_range_add(&range->y, p->y, n, (size_t)module->d_out, (size_t)module->d_out);
        if (moei_is_layer(module)) moei_range_layer(&module->layer, &p->layer, range);
        if (module->kind == MOE_MODULE_MIXTURE) {
            moei_range_weights(&module->layer, &p->layer, range);
            if (status == MOE_OK) status = moei_range_router(m, &module->layer, &p->layer, range);
        }
        if (module->kind != MOE_MODULE_ATTENTION) continue;
        moei_range_add(&range->q, p->q, n, moei_attention_width(module), moei_attention_width(module));
        moei_range_add(&range->k, p->k, n, moei_attention_width(module), moei_attention_width(module));
        moei_range_add(&range->v, p->v, n, moei_attention_width(module), moei_attention_width(module));
        moei_range_add(&range->mixed, p->mixed, n, moei_attention_width(module), moei_attention_width(module));
    }
    return status;
}

enum { MOEI_CALIBRATION_ROWS = 256 };

/* Runs the net over the calibration's rows, some at a time. */
static void moei_calibrate(moei_maker *m, double *input) {
    const moe_data *data = m->config->calibration;
    const size_t length = data->length > 0 ? data->length : 1;
    const size_t batch = length >= MOEI_CALIBRATION_ROWS ? length : MOEI_CALIBRATION_ROWS / length * length;
    int32_t starts[MOEI_CALIBRATION_ROWS + 1];
    moe_net_pass pass;
    moe_call call;
    void *work = NULL;
    size_t at, i, bytes = 0;
    moe_status status = moe_net_work_size(m->net, batch, 1, &bytes);
    if (status == MOE_OK && (work = moei_alloc(&m->made.allocator, bytes, 1)) == NULL) status = MOE_ERR_MEMORY;
    for (at = 0; at < data->n && status == MOE_OK; at += call.n_tokens) {
        memset(&call, 0, sizeof call);
        call.n_tokens = data->n - at < batch ? data->n - at : batch;
        call.keep = 1;
        if (m->net->d_in > 0) call.x = data->x + at * (size_t)m->net->d_in;
        if (data->token_ids != NULL) call.token_ids = data->token_ids + at;
        call.n_sequences = call.n_tokens / length;
        for (i = 0; i <= call.n_sequences && i <= MOEI_CALIBRATION_ROWS; i++) starts[i] = (int32_t)(i * length);
        call.sequences = starts;
        status = moe_net_forward(m->net, &call, work, bytes, &pass);
        if (status == MOE_OK) status = moei_range_batch(m, &pass, input);
    }
    moei_free(&m->made.allocator, work, bytes);
    if (status != MOE_OK) MOEI_MAKER_REFUSE(m, status, "calibration: %s", moe_status_text(status));
    for (i = 0; i < m->net->n_modules; i++)
        if (!moei_range_is_finite(&m->ranges[i]))
            MOEI_MAKER_REFUSE(m, MOE_ERR_NONFINITE, "calibration: module %z computes a number that is infinite or none", i);
}

/* ---- places in scratch memory ---- */

/* int16 of a vector: a multiple of 4. */
static size_t moei_value_room(const moei_int_value *v) { return ((v->wide32 ? 2 * v->width : v->width) + 3) / 4 * 4; }

/* The lowest place that no vector of an overlapping time has. */
static void moei_value_place(moei_maker *m, size_t i, size_t *most) {
    moei_int_value *v = &m->values[i];
    size_t at = 0, j;
    for (j = 0; j < i; j++) {
        const moei_int_value *w = &m->values[j];
        if (w->made > v->last || v->made > w->last) continue;
        if (w->at < at + moei_value_room(v) && at < w->at + moei_value_room(w)) at = w->at + moei_value_room(w), j = (size_t)-1;
    }
    if (at + moei_value_room(v) > INT32_MAX) moei_maker_fail(m, MOE_ERR_OVERFLOW);
    v->at = (uint32_t)at;
    if (at + moei_value_room(v) > *most) *most = at + moei_value_room(v);
}

static uint32_t moei_value_at(const moei_maker *m, uint32_t v) { return v == MOE_INT_NONE ? v : m->values[v].at; }

static void moei_ops_place(moei_maker *m, moe_int_op *ops) {
    size_t i;
    for (i = 0; i < moei_list_length(ops); i++) {
        ops[i].in = moei_value_at(m, ops[i].in);
        ops[i].other = moei_value_at(m, ops[i].other);
        ops[i].out = moei_value_at(m, ops[i].out);
    }
}

/* Vectors get their places, and the two lists become one. */
static void moei_maker_finish(moei_maker *m) {
    moe_model *model = &m->made.model;
    const size_t n_main = moei_list_length(m->main_ops);
    size_t i, most = 0;
    for (i = 0; i < moei_list_length(m->values) && m->status == MOE_OK; i++) moei_value_place(m, i, &most);
    if (m->status != MOE_OK) return;
    moei_ops_place(m, m->main_ops), moei_ops_place(m, m->inner_ops);
    for (i = 0; i < moei_list_length(m->made.mixtures); i++) {
        moe_int_mixture *x = &m->made.mixtures[i];
        x->score += (uint32_t)n_main, x->expert += (uint32_t)n_main, x->shared += (uint32_t)n_main;
        x->z = moei_value_at(m, x->z), x->p = moei_value_at(m, x->p), x->sum = moei_value_at(m, x->sum);
        x->choices = moei_value_at(m, x->choices), x->block = moei_value_at(m, x->block);
    }
    for (i = 0; i < moei_list_length(m->made.attentions); i++) {
        moe_int_attention *x = &m->made.attentions[i];
        x->value = moei_value_at(m, x->value), x->room = moei_value_at(m, x->room);
    }
    for (i = 0; i < moei_list_length(m->inner_ops); i++) (void)moei_maker_push(m, &m->main_ops, &m->inner_ops[i], sizeof *m->inner_ops);
    m->made.ops = m->main_ops, m->main_ops = NULL;
    model->n_main = (uint32_t)n_main, model->n_ops = (uint32_t)moei_list_length(m->made.ops);
    model->n_mixtures = (uint32_t)moei_list_length(m->made.mixtures);
    model->n_attentions = (uint32_t)moei_list_length(m->made.attentions);
    model->scratch_size = MOEI_INT_ALIGN - 1 + model->state_size + most * sizeof(int16_t);
}

/* ---- the model ---- */

/* Refuses what a mixture's router needs and integers cannot have, before calibration fails for want of it. */
static void moei_mixture_refuse(moei_maker *m, const moe_layer *layer) {
    moe_int_router_plan plan;
    int frozen;
    (void)moei_router_now(layer, &frozen);
    moei_mixture_supported(m, &layer->config, frozen);
    moei_router_plan(m, layer, 1, NULL, &plan);
}

/* The widths of all modules become those of 16 bits. */
static void moei_maker_check(moei_maker *m) {
    const moe_data *data = m->config->calibration;
    size_t i, j;
    if (data == NULL || data->n == 0)
        MOEI_MAKER_REFUSE(m, MOE_ERR_ARGUMENT, "calibration: integer weights need some rows of inputs, to see how large numbers become");
    else if (data->length > 0 && data->n % data->length != 0)
        MOEI_MAKER_REFUSE(m, MOE_ERR_ARGUMENT, "calibration: n = %z: must be a multiple of length = %z", data->n, data->length);
    else if (m->status == MOE_OK) m->status = moei_inputs_check(m->net, data, m->error);
    for (i = 0; i < m->net->n_tensors; i++)
        for (j = 0; j < m->net->tensors[i].count; j++)
            if (!moe_is_finite(m->net->tensors[i].data[j]))
                MOEI_MAKER_REFUSE(m, MOE_ERR_NONFINITE, "%s[%z] = %g: must be a finite number", m->net->tensors[i].name, j, (double)m->net->tensors[i].data[j]);
    for (m->module = 0; m->module < m->net->n_modules; m->module++)
        if (m->net->modules[m->module].kind == MOE_MODULE_MIXTURE) moei_mixture_refuse(m, &m->net->modules[m->module].layer);
    for (i = 0; i < m->net->n_modules; i++)
        if (m->net->modules[i].d_in > MOEI_INT_MAX_WIDTH || m->net->modules[i].d_out > MOEI_INT_MAX_WIDTH)
            MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: wider than %d has no integer form; MOE_WEIGHTS_FLOAT takes it", i, (int)MOEI_INT_MAX_WIDTH);
}

/* Whether a relu behind module i is part of what makes its output: it alone reads that. */
static int moei_takes_relu(const moe_net *net, size_t i) {
    const moe_module *m = &net->modules[i];
    return (m->kind == MOE_MODULE_LINEAR || m->kind == MOE_MODULE_MIXTURE) && i + 1 < net->n_modules && m[1].kind == MOE_MODULE_ACTIVATION &&
           m[1].act == MOE_ACT_RELU && !moei_is_around(net, i + 1);
}

static void moei_maker_modules(moei_maker *m) {
    size_t i;
    for (i = 0; i < m->net->n_modules && m->status == MOE_OK; i++) {
        const moe_module *module = &m->net->modules[i];
        moei_int_range range = m->ranges[i];
        m->module = i;
        m->relu = moei_takes_relu(m->net, i);
        if (m->relu) range.y = m->ranges[++i].y;
        m->entering[i + 1] = moei_int_modules[module->kind](m, module, &range, moei_reads_narrow(m->net, i + 1) ? MOEI_NARROW : MOEI_WIDE);
    }
}

/* Makes an integer model; what it took for the way is given back in any case. */
static void moei_maker_run(moei_maker *m) {
    const moe_allocator *a = &m->made.allocator;
    const size_t n = m->net->n_modules;
    moe_model *model = &m->made.model;
    double input = 0;
    uint32_t last = 0;
    size_t i;
    m->ranges = (moei_int_range *)moei_alloc(a, n, sizeof *m->ranges);
    m->entering = (uint32_t *)moei_alloc(a, n + 1, sizeof *m->entering);
    if (m->ranges == NULL || m->entering == NULL) moei_maker_fail(m, MOE_ERR_MEMORY);
    moei_maker_check(m);
    if (m->status == MOE_OK) {
        memset(m->ranges, 0, n * sizeof *m->ranges);
        for (i = 0; i < n; i++) m->ranges[i].turns = MOE_INT_NONE;
        m->weights = m->config->weights, m->rows = MOE_INT_NONE;
        moei_calibrate(m, &input);
    }
    if (m->status == MOE_OK) {
        m->entering[0] = model->d_in > 0 ? moei_value_new(m, model->d_in, MOEI_NARROW, input / MOEI_NARROW, input) : 0;
        moei_maker_modules(m);
    }
    if (m->status == MOE_OK) { /* the output is what the last operation makes, wide */
        last = moei_widened(m, m->entering[n]);
        if (m->status == MOE_OK && (moei_list_length(m->main_ops) == 0 || m->main_ops[moei_list_length(m->main_ops) - 1].out != last))
            last = moei_rescale(m, last, MOEI_WIDE, m->values[last].scale);
    }
    if (m->status == MOE_OK) {
        model->input_scale = model->d_in > 0 ? (float)m->values[0].scale : 1;
        model->output_scale = (float)m->values[last].scale;
        if (!(model->input_scale > 0) || !(model->output_scale > 0) || !moe_is_finite((moe_real)model->input_scale) ||
            !moe_is_finite((moe_real)model->output_scale))
            moei_maker_fail(m, MOE_ERR_OVERFLOW); /* a float cannot tell the scale */
    }
    if (m->status == MOE_OK) {
        m->multiplications += m->counted;
        model->multiplications = m->multiplications;
        moei_maker_finish(m);
    }
    moei_free(a, m->ranges, n * sizeof *m->ranges);
    moei_free(a, m->entering, (n + 1) * sizeof *m->entering);
    moei_list_free(a, &m->values, sizeof *m->values);
    moei_list_free(a, &m->main_ops, sizeof *m->main_ops);
    moei_list_free(a, &m->inner_ops, sizeof *m->inner_ops);
    moe_buffer_free(&m->pieces);
}
#endif /* MOE_NO_QUANT */

/* How long a sequence of this net may be; 0: no module looks at earlier tokens. */
static size_t moei_model_length(const moe_net *net, size_t wanted) {
    size_t i, length = 0;
    for (i = 0; i < net->n_modules; i++) {
        const moe_module *m = &net->modules[i];
        if (m->kind != MOE_MODULE_ATTENTION && m->kind != MOE_MODULE_POSITIONS && !moei_refines(m)) continue;
        if (length == 0) length = wanted > 0 ? wanted : 128;
        if (m->kind == MOE_MODULE_POSITIONS && length > (size_t)m->n_rows) length = (size_t)m->n_rows;
    }
    return length;
}

/* A copy of the net's list of modules with the plain C kernels that an exported model has. */
static moe_status moei_float_model(moe_built_model *made, const moe_net *net, moe_error *error) {
    moe_model *model = &made->model;
    moe_status status = moei_float_check(net, error);
    size_t i;
    if (status != MOE_OK) return status;
    made->net = *net;
    made->net.modules = (moe_module *)moei_alloc(&made->allocator, net->n_modules, sizeof *net->modules);
    if (made->net.modules == NULL) {
        made->net.n_modules = 0;
        return moei_error(error, MOE_ERR_MEMORY, "%s", moe_status_text(MOE_ERR_MEMORY));
    }
    memcpy(made->net.modules, net->modules, net->n_modules * sizeof *net->modules);
    for (i = 0; i < net->n_modules; i++) {
        made->net.modules[i].layer.kernels = made->net.modules[i].layer.router.kernels = NULL;
        made->net.modules[i].layer.is_packed = 0;
        made->net.modules[i].first_tensor = 0;
    }
    made->net.kernels = NULL, made->net.trainable = 0;
    made->net.tensors = NULL, made->net.n_tensors = 0, made->net.memory = NULL; /* the net's own */
    model->run = moe_float_model_run, model->choices = moe_float_model_choices;
    model->input_scale = model->output_scale = 1;
    model->weights_size = moe_net_parameters(net, &model->multiplications) * sizeof(moe_real);
    for (i = 0; i < net->n_modules; i++)
        if (net->modules[i].kind == MOE_MODULE_ATTENTION) model->multiplications += 2 * model->length * moei_attention_width(&net->modules[i]);
    status = moei_float_size(&made->net, model->length, &model->scratch_size, &model->state_size);
    return status == MOE_OK ? MOE_OK : moei_error(error, status, "the net: %s", moe_status_text(status));
}

static moe_status moei_model_config_check(const moe_net *net, const moe_model_config *config, moe_error *error) {
    if (net == NULL || !net->built) return moei_error(error, net == NULL ? MOE_ERR_ARGUMENT : MOE_ERR_STATE, "net: must be one that moe_net_build or moe_net_load has made");
    if (config->weights < 0 || config->weights >= MOE_WEIGHTS_COUNT)
        return moei_error(error, MOE_ERR_CONFIG, "weights = %d: must be one of MOE_WEIGHTS_", config->weights);
    if (config->loader != 0 && config->loader != 1) return moei_error(error, MOE_ERR_CONFIG, "loader = %d: must be 0 or 1", config->loader);
    if (config->loader && config->weights == MOE_WEIGHTS_FLOAT)
        return moei_error(error, MOE_ERR_UNSUPPORTED, "loader = 1: only integer models fetch experts");
    if (!moei_can_allocate(&config->allocator)) return moei_error(error, MOE_ERR_ARGUMENT, "allocator: missing, and MOE_NO_MALLOC leaves no other");
    return moe_net_check_decoding(net, error);
}

/* What points into the built model; again after it was moved. */
static void moei_model_link(moe_built_model *b) {
    if (b->model.weights_are == MOE_WEIGHTS_FLOAT) {
        b->model.net = &b->net;
        return;
    }
    b->model.weights = b->weights.data, b->model.weights_size = b->weights.size;
    b->model.experts = b->external ? NULL : b->experts.data, b->model.experts_size = b->experts.size;
    b->model.ops = b->ops;
    b->model.mixtures = b->mixtures;
    b->model.attentions = b->attentions;
}

moe_status moe_model_create(moe_built_model *built, const moe_net *net, const moe_model_config *config, moe_error *error) {
    const moe_model_config none = {MOE_WEIGHTS_FLOAT, NULL, 0, 0, {NULL, NULL}};
    moe_built_model made;
    moe_status status;
    if (built == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "built must not be NULL");
    if (config == NULL) config = &none;
    status = moei_model_config_check(net, config, error);
    if (status != MOE_OK) return status;
    memset(&made, 0, sizeof made);
    made.allocator = made.weights.allocator = made.experts.allocator = config->allocator;
    made.model.version = MOE_MODEL_VERSION, made.model.weights_are = config->weights;
    made.model.d_in = (size_t)net->d_in, made.model.d_out = (size_t)net->d_out;
    made.model.length = moei_model_length(net, config->length);
    made.external = config->loader;
    if (config->weights == MOE_WEIGHTS_FLOAT) status = moei_float_model(&made, net, error);
    else {
#ifndef MOE_NO_QUANT
        moei_maker m;
        memset(&m, 0, sizeof m);
        made.model.run = moe_int_model_run, made.model.choices = moe_int_model_choices;
        made.model.state_size = made.model.length > 0 ? sizeof(uint32_t) : 0;
        m.made = made, m.net = net, m.config = config, m.error = error;
        m.pieces.allocator = config->allocator;
        moei_maker_run(&m);
        made = m.made, status = m.status;
#else
        status = moei_error(error, MOE_ERR_UNSUPPORTED, "weights = %d: the build has MOE_NO_QUANT", config->weights);
#endif
    }
    if (status != MOE_OK) {
        moe_model_free(&made);
        return status;
    }
    *built = made;
    moei_model_link(built);
    return MOE_OK;
}

void moe_model_free(moe_built_model *built) {
    if (built == NULL) return;
    moe_buffer_free(&built->weights);
    moe_buffer_free(&built->experts);
    moei_list_free(&built->allocator, &built->ops, sizeof *built->ops);
    moei_list_free(&built->allocator, &built->mixtures, sizeof *built->mixtures);
    moei_list_free(&built->allocator, &built->router_names, sizeof *built->router_names);
    moei_list_free(&built->allocator, &built->attentions, sizeof *built->attentions);
    moei_free(&built->allocator, built->net.modules, built->net.n_modules * sizeof *built->net.modules);
    memset(built, 0, sizeof *built);
}

/* ---- printing ---- */

/* A text on its way to a stream; after a failure all else is ignored. */
typedef struct moei_printer {
    moe_stream *stream;
    const char *name;
    char capitals[MOE_NAME_SIZE]; /* the name in capitals */
    moe_status status;
} moei_printer;

static void moei_print(moei_printer *p, const char *format, ...) {
    char line[512];
    moei_text t;
    va_list arguments;
    t.out = line, t.room = sizeof line, t.length = 0;
    line[0] = '\0';
    va_start(arguments, format);
    moei_put_format(&t, format, arguments);
    va_end(arguments);
    if (p->status == MOE_OK) p->status = p->stream->write(p->stream->ctx, line, strlen(line));
}

static void moei_print_bytes(moei_printer *p, const char *what, const unsigned char *bytes, size_t n) {
    size_t i;
    if (n == 0) return;
    moei_print(p, "static const unsigned char %s_%s[%z] MOE_FLASH = {", p->name, what, n);
    for (i = 0; i < n; i++) moei_print(p, i % 24 == 0 ? "\n    %d%s" : "%d%s", (int)bytes[i], i + 1 < n ? "," : "");
    moei_print(p, "};\n\n");
}

static void moei_print_place(moei_printer *p, uint32_t at, const char *end) {
    if (at == MOE_INT_NONE) moei_print(p, "MOE_INT_NONE%s", end);
    else moei_print(p, "%z%s", (size_t)at, end);
}

/* The functions of operations by name. */
#define MOEI_OPS(X) X(int8) X(int4) X(int8_add) X(int4_add) X(curve) X(multiply) X(add) X(rescale) X(mixture) X(row) X(norm) \
    X(turn) X(attention) X(unit) X(cluster) X(norm_l1) X(norm_l2) X(norm_linf) X(match) X(weigh) X(weight) X(accumulate) X(rest)

static const struct moei_op_name {
    void (*run)(const moe_int_op *op, moe_int_run *run);
    const char *name;
} moei_op_names[] = {
#define MOEI_OP_NAME(name) {moe_int_op_##name, #name},
    MOEI_OPS(MOEI_OP_NAME)
#undef MOEI_OP_NAME
};

static void moei_print_ops(moei_printer *p, const moe_model *model) {
    size_t i, j;
    moei_print(p, "/* function, {width, width read, least, most, shift}, constants, in, other, out, factors, index */\n");
    moei_print(p, "static const moe_int_op %s_ops[%z] = {\n", p->name, (size_t)model->n_ops);
    for (i = 0; i < model->n_ops; i++) {
        const moe_int_op *op = &model->ops[i];
        for (j = 0; j < sizeof moei_op_names / sizeof *moei_op_names && moei_op_names[j].run != op->run;) j++;
        if (j == sizeof moei_op_names / sizeof *moei_op_names) { /* an operation without a row in MOEI_OPS */
            if (p->status == MOE_OK) p->status = MOE_ERR_STATE;
            return;
        }
        moei_print(p, "    {moe_int_op_%s, {%d, %d, %d, %d, %d}, %z, ", moei_op_names[j].name, (int)op->shape.n, (int)op->shape.k, (int)op->shape.low,
                   (int)op->shape.high, (int)op->shape.shift, (size_t)op->at);
        moei_print_place(p, op->in, ", "), moei_print_place(p, op->other, ", "), moei_print_place(p, op->out, ", ");
        moei_print(p, "%d, %d, %d}%s\n", (int)op->factor, (int)op->factor2, (int)op->index, i + 1 < model->n_ops ? "," : "};\n");
    }
}

static void moei_print_int_router(moei_printer *p, const moe_int_router *r, const moe_int_router_names *names) {
    size_t i;
    moei_print(p, "{");
    for (i = 0; i < sizeof names->name / sizeof *names->name; i++) moei_print(p, "%s, ", names->name[i] != NULL ? names->name[i] : "NULL");
    moei_print(p, "\n      %d, %d, %d, %d, %d, %d, %d, %d, %d, %d, %d, %d, ", (int)r->n_experts, (int)r->top_k, (int)r->most, (int)r->scratch, (int)r->groups,
               (int)r->groups_kept, (int)r->factor, (int)r->z_bits, (int)r->weight_shift, (int)r->flags, (int)r->threshold, (int)r->tokens);
    moei_print_place(p, r->bias, ", "), moei_print_place(p, r->thresholds, ", "), moei_print_place(p, r->scales, ", "), moei_print_place(p, r->table, "}");
}

static void moei_print_attentions(moei_printer *p, const moe_model *model) {
    size_t i;
    if (model->n_attentions == 0) return;
    moei_print(p, "static const moe_int_attention %s_attentions[%z] = {\n", p->name, (size_t)model->n_attentions);
    for (i = 0; i < model->n_attentions; i++) {
        const moe_int_attention *a = &model->attentions[i];
        moei_print(p, "    {%d, %d, %z, %z, %z, %z, %d}%s\n", (int)a->heads, (int)a->d_head, (size_t)a->keys, (size_t)a->values, (size_t)a->value, (size_t)a->room,
                   (int)a->bits, i + 1 < model->n_attentions ? "," : "};\n");
    }
}

static void moei_print_mixtures(moei_printer *p, const moe_built_model *built) {
    const moe_model *model = &built->model;
    size_t i;
    if (model->n_mixtures == 0) return;
    moei_print(p, "static const moe_int_mixture %s_mixtures[%z] = {\n", p->name, (size_t)model->n_mixtures);
    for (i = 0; i < model->n_mixtures; i++) {
        const moe_int_mixture *m = &model->mixtures[i];
        moei_print(p, "    {");
        moei_print_int_router(p, &m->router, &built->router_names[i]);
        moei_print(p, ",\n     %z, %z, %z, %z, %z, %z, ", (size_t)m->score, (size_t)m->n_score, (size_t)m->expert, (size_t)m->n_expert, (size_t)m->shared,
                   (size_t)m->n_shared);
        moei_print(p, "%z, %z, %z, %z, %z, %z, ", (size_t)m->experts, (size_t)m->stride, (size_t)m->z, (size_t)m->p, (size_t)m->sum, (size_t)m->choices);
        moei_print_place(p, m->block, ", ");
        moei_print(p, "%d}%s\n", (int)m->weight_bits, i + 1 < model->n_mixtures ? "," : "};\n");
    }
}

/* Whether experts come through a loader. */
static int moei_behind(const moe_model *model) { return model->experts == NULL && model->experts_size > 0; }

/* The structs of a model as they lie where pointers and sizes have 4 bytes: to tell what they take there. */
typedef struct moei_op_32 {
    uint32_t run;
    moe_int_shape shape;
    uint32_t at, in, other, out;
    int16_t factor, factor2;
    uint16_t index;
} moei_op_32;

typedef struct moei_mixture_32 {
    uint32_t functions[5];
    uint16_t counts[6];
    int16_t factor;
    uint8_t bits[3];
    int32_t threshold, tokens;
    uint32_t tables[4], places[13];
    int16_t weight_bits;
} moei_mixture_32;

enum { MOEI_MODEL_32 = 24 * 4 };

static size_t moei_tables_32(const moe_model *model) {
    return MOEI_MODEL_32 + model->n_ops * sizeof(moei_op_32) + model->n_mixtures * sizeof(moei_mixture_32) + model->n_attentions * sizeof(moe_int_attention);
}

/* The numbers of one expert of a float model's mixture. */
static size_t moei_float_expert(const moe_layer *layer) {
    moe_slot slot;
    size_t count = 0;
    int place;
    for (place = MOE_EXPERTS_GATE; place < MOE_SHARED_GATE; place++)
        if (moe_layer_slot(&layer->config, place, &slot) == MOE_OK) count += slot.count;
    return count / (size_t)layer->config.router.n_experts;
}

static void moei_print_float_mixtures(moei_printer *p, const moe_net *net) {
    size_t i, mixture = 0;
    for (i = 0; i < net->n_modules; i++) {
        const moe_layer *layer = &net->modules[i].layer;
        if (net->modules[i].kind != MOE_MODULE_MIXTURE) continue;
        moei_print(p, "     mixture %z   %d experts of %z bytes, at most %z for one input\n", mixture++, layer->config.router.n_experts,
                   moei_float_expert(layer) * sizeof(moe_real), moei_max_choices(&layer->config.router));
    }
}

/* What a reader of the header wants to know first. */
static void moei_print_comment(moei_printer *p, const moe_model *model) {
    static const char *const kinds[MOE_WEIGHTS_COUNT] = {"float", "int8", "int4"};
    size_t i;
    moei_print(p, "/* %s: a model for moe_infer, written by moe_export_c of moe %s. Weights: %s.\n\n", p->name, moe_version(), kinds[model->weights_are]);
    moei_print(p, "     constants   %z bytes of weights", model->weights_size + model->experts_size);
    if (model->experts_size > 0) moei_print(p, ", of which %z are experts'%s", model->experts_size, moei_behind(model) ? " and come through a loader" : "");
    if (model->net == NULL) moei_print(p, "\n     tables      %z bytes of flash more, where pointers have 4 bytes", moei_tables_32(model));
    moei_print(p, "\n     scratch     %z bytes\n     work        %z multiplications per call at most\n", model->scratch_size, model->multiplications);
    if (model->net != NULL) moei_print_float_mixtures(p, model->net);
    for (i = 0; i < model->n_mixtures; i++)
        moei_print(p, "     mixture %z   %d experts of %z bytes, at most %d for one input\n", i, (int)model->mixtures[i].router.n_experts,
                   (size_t)model->mixtures[i].stride, (int)model->mixtures[i].router.most);
    if (model->length > 0) moei_print(p, "     sequences   of up to %z tokens, one per call; %z bytes of scratch stay from call to call\n", model->length, model->state_size);
    moei_print(p, "\n   In ONE source file: #define MOE_IMPLEMENTATION before this header is included. MOE_NO_TRAIN leaves out all but inference%s.\n",
               model->weights_are == MOE_WEIGHTS_FLOAT ? "" : ",\n   MOE_NO_FLOAT all but models in integers");
    moei_print(p, "     static unsigned char scratch[%s_SCRATCH];\n     ", p->capitals);
    if (model->d_in == 0) moei_print(p, "int32_t input[1]; ");
    else moei_print(p, "%s input[%s_INPUTS]; ", model->weights_are == MOE_WEIGHTS_FLOAT ? "float" : "signed char", p->capitals);
    moei_print(p, "%s output[%s_OUTPUTS];\n", model->weights_are == MOE_WEIGHTS_FLOAT ? "float" : "int16_t", p->capitals);
    moei_print(p, "     moe_status status = moe_infer%s(&%s,%s input, output, scratch, sizeof scratch); */\n", moei_behind(model) ? "_loading" : "", p->name,
               moei_behind(model) ? " &loader," : "");
}

static void moei_print_model(moei_printer *p, const moe_model *model) {
    const char *big = p->capitals;
    moei_print(p, "#define %s_INPUTS %z\n#define %s_OUTPUTS %z\n#define %s_SCRATCH %z\n", big, model->d_in, big, model->d_out, big, model->scratch_size);
    if (model->length > 0) moei_print(p, "#define %s_LENGTH %z\n", big, model->length);
    moei_print(p, "#define %s_INPUT_SCALE ((float)%g)\n#define %s_OUTPUT_SCALE ((float)%g)\n\n", big, (double)model->input_scale, big, (double)model->output_scale);
}

static void moei_print_int_model(moei_printer *p, const moe_built_model *built) {
    const moe_model *model = &built->model;
    const char *name = p->name;
    moei_print_bytes(p, "weights", model->weights, model->weights_size);
    if (model->experts != NULL) moei_print_bytes(p, "experts", model->experts, model->experts_size);
    moei_print_ops(p, model);
    moei_print_mixtures(p, built);
    moei_print_attentions(p, model);
    moei_print(p, "static const moe_model %s = {MOE_MODEL_VERSION, %s, moe_int_model_run, moe_int_model_choices,\n    %z, %z, %z, %z, %z, (float)%g, (float)%g,\n    ", name,
               model->weights_are == MOE_WEIGHTS_INT8 ? "MOE_WEIGHTS_INT8" : "MOE_WEIGHTS_INT4", model->d_in, model->d_out, model->length, model->scratch_size,
               model->state_size, (double)model->input_scale, (double)model->output_scale);
    moei_print(p, "%s%s, %z, %s%s, %z, %s_ops, %z, %z,\n    ", name, "_weights", model->weights_size, model->experts != NULL ? name : "NULL",
               model->experts != NULL ? "_experts" : "", model->experts_size, name, (size_t)model->n_ops, (size_t)model->n_main);
    moei_print(p, "%s%s, %z, %s%s, %z, NULL, %z};\n\n", model->n_mixtures > 0 ? name : "NULL", model->n_mixtures > 0 ? "_mixtures" : "", (size_t)model->n_mixtures,
               model->n_attentions > 0 ? name : "NULL", model->n_attentions > 0 ? "_attentions" : "", (size_t)model->n_attentions, model->multiplications);
}

/* What the modules of a net use of the sets that MOE_KEEP_ masks cut down. */
typedef struct moei_masks {
    uint32_t acts, scores, gates, selects, weights, inputs, refines, modules, extras;
} moei_masks;

static uint32_t moei_mask_bit(int i) { return (uint32_t)1 << i; }

static void moei_mask_router(moei_masks *m, const moe_router_config *c) {
    m->scores |= moei_mask_bit(c->score), m->gates |= moei_mask_bit(c->gate), m->selects |= moei_mask_bit(c->select);
    m->weights |= moei_mask_bit(c->weight), m->inputs |= moei_mask_bit(c->input), m->refines |= moei_mask_bit(c->refine);
    if (c->switch_at > 0) m->selects |= moei_mask_bit(c->switch_from);
    if (c->student) m->selects |= moei_mask_bit(MOE_SELECT_TOP_K);
    if (c->score == MOE_SCORE_MLP || c->score == MOE_SCORE_ATTENTIVE) m->acts |= moei_mask_bit(c->router_act);
    if (c->gate == MOE_GATE_SIGMOID) m->acts |= moei_mask_bit(MOE_ACT_SIGMOID);
    if (c->schedule_steps > 0 || c->freeze_at > 0 || c->switch_at > 0 || c->l1_controller) m->extras |= moei_mask_bit(MOE_EXTRA_SCHEDULE);
    if (c->capacity_factor > MOEI_R(0.0) || c->capacity_factor_eval > MOEI_R(0.0) || c->drop_capacity > 0 || c->capacity_bound != MOE_BOUND_NONE ||
        c->drop_rule != MOE_DROP_RULE_NONE)
        m->extras |= moei_mask_bit(MOE_EXTRA_CAPACITY);
}

static moei_masks moei_masks_of(const moe_net *net) {
    moei_masks m;
    size_t i;
    memset(&m, 0, sizeof m);
    for (i = 0; i < net->n_modules; i++) {
        const moe_module *module = &net->modules[i];
        const moe_layer_config *c = &module->layer.config;
        m.modules |= moei_mask_bit(module->kind);
        if (module->kind == MOE_MODULE_ACTIVATION) m.acts |= moei_mask_bit(module->act);
        if (!moei_is_layer(module)) continue;
        moei_mask_router(&m, &c->router); /* a feed_forward has one too */
        if (c->expert == MOE_EXPERT_MLP) m.acts |= moei_mask_bit(c->act);
        if (moei_is_shaped(c)) m.extras |= moei_mask_bit(MOE_EXTRA_SHAPED);
        if (c->expert == MOE_EXPERT_SWIGLU || c->expert == MOE_EXPERT_FACTORISED || c->n_shared > 0) m.acts |= moei_mask_bit(MOE_ACT_SILU);
    }
    return m;
}

/* Where this header compiles an implementation for inference, it keeps what the model uses and nothing else. behind: 1 checks it, after moe.h. */
static void moei_print_masks(moei_printer *p, const moe_net *net, int behind) {
    static const char *const names[] = {"ACTS", "SCORES", "GATES", "SELECTS", "WEIGHTS", "INPUTS", "REFINES", "MODULES", "EXTRAS"};
    const moei_masks m = moei_masks_of(net);
    const uint32_t masks[] = {m.acts, m.scores, m.gates, m.selects, m.weights, m.inputs, m.refines, m.modules, m.extras};
    size_t i;
    moei_print(p, behind ? "#if defined(MOE_IMPLEMENTATION) && (0" :
                           "#if defined(MOE_IMPLEMENTATION) && defined(MOE_NO_TRAIN) && !defined(MOE_H) && !defined(MOE_KEEP_ALL)\n");
    for (i = 0; i < sizeof masks / sizeof *masks; i++)
        if (behind) moei_print(p, " || ((MOE_KEEP_%s) & %z) != %z", names[i], (size_t)masks[i], (size_t)masks[i]);
        else moei_print(p, "#define MOE_KEEP_%s %z\n", names[i], (size_t)masks[i]);
    if (behind) moei_print(p, ")\n#error \"%s needs what another model's header has left out: define MOE_KEEP_ALL before both\"\n", p->name);
    moei_print(p, "#endif\n\n");
}

static void moei_print_float_model(moei_printer *p, const moe_built_model *built, moe_error *error) {
    const moe_model *model = &built->model;
    char name[MOE_NAME_SIZE];
    moei_text t;
    t.out = name, t.room = sizeof name, t.length = 0;
    moei_put(&t, p->name, moei_strlen(p->name)), moei_put(&t, "_net", 4);
    moei_print(p, "#ifdef __AVR__\n#error \"%s: float models need a machine that reads constants in flash like memory\"\n#endif\n\n", p->name);
    if (p->status == MOE_OK) p->status = moei_print_net(p->stream, name, &built->net, error);
    moei_print(p, "static const moe_model %s = {MOE_MODEL_VERSION, MOE_WEIGHTS_FLOAT, moe_float_model_run, moe_float_model_choices,\n", p->name);
    moei_print(p, "    %z, %z, %z, %z, %z, 1, 1, NULL, %z, NULL, 0, NULL, 0, 0, NULL, 0, NULL, 0, &%s, %z};\n\n", model->d_in, model->d_out, model->length,
               model->scratch_size, model->state_size, model->weights_size, name, model->multiplications);
}

static int moei_is_identifier(const char *name) {
    static const char words[] = " auto break case char const continue default do double else enum extern float for goto if inline int long register restrict"
                                " return short signed sizeof static struct switch typedef union unsigned void volatile while bool catch class delete false"
                                " friend namespace new operator private protected public template this throw true try using virtual ";
    const char *at;
    size_t i;
    for (i = 0; name[i] != '\0'; i++)
        if (!(name[i] == '_' || (name[i] >= 'a' && name[i] <= 'z') || (name[i] >= 'A' && name[i] <= 'Z') || (i > 0 && name[i] >= '0' && name[i] <= '9'))) return 0;
    for (at = i > 0 ? strstr(words, name) : NULL; at != NULL; at = strstr(at + 1, name))
        if (at[-1] == ' ' && at[i] == ' ') return 0;
    return i > 0 && i < MOE_NAME_SIZE - 16;
}

static moe_status moei_printer_begin(moei_printer *p, const moe_built_model *built, const char *name, moe_stream *stream, moe_error *error) {
    size_t i;
    if (built == NULL || name == NULL || stream == NULL || stream->write == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "built, name and a stream that can be written must be there");
    if (built->model.version != MOE_MODEL_VERSION) return moei_error(error, MOE_ERR_ARGUMENT, "built: must be one that moe_model_create has made");
    if (!moei_is_identifier(name)) return moei_error(error, MOE_ERR_ARGUMENT, "name = \"%s\": must be a short identifier of C and C++", name);
    memset(p, 0, sizeof *p);
    p->stream = stream, p->name = name;
    for (i = 0; name[i] != '\0'; i++) p->capitals[i] = (char)(name[i] >= 'a' && name[i] <= 'z' ? name[i] - 'a' + 'A' : name[i]);
    return MOE_OK;
}

moe_status moe_export_c(const moe_built_model *built, const char *name, moe_stream *stream, moe_error *error) {
    moei_printer p;
    moe_built_model moved;
    moe_status status = moei_printer_begin(&p, built, name, stream, error);
    if (status != MOE_OK) return status;
    moved = *built;
    moei_model_link(&moved);
    moei_print_comment(&p, &moved.model);
    moei_print(&p, "#ifndef %s_MODEL_H\n#define %s_MODEL_H\n\n", p.capitals, p.capitals);
    if (moved.model.net != NULL) moei_print_masks(&p, moved.model.net, 0);
    moei_print(&p, "#include \"moe.h\"\n\n#if MOE_MODEL_VERSION != %d\n#error \"%s: export this model again with the moe.h at hand\"\n#endif\n\n", (int)MOE_MODEL_VERSION, name);
    moei_print_model(&p, &moved.model);
    if (moved.model.net != NULL) moei_print_masks(&p, moved.model.net, 1);
    if (moved.model.weights_are == MOE_WEIGHTS_FLOAT) moei_print_float_model(&p, &moved, error);
    else moei_print_int_model(&p, &moved);
    moei_print(&p, "#endif\n");
    return p.status == MOE_OK ? MOE_OK : moei_error(error, p.status, "the stream failed: %s", moe_status_text(p.status));
}

moe_status moe_export_experts(const moe_built_model *built, moe_stream *stream, moe_error *error) {
    moe_status status;
    if (built == NULL || stream == NULL || stream->write == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "built and a stream that can be written must be there");
    if (!built->external) return moei_error(error, MOE_ERR_STATE, "the experts are part of the model: it was not made with loader = 1");
    status = stream->write(stream->ctx, built->experts.data, built->experts.size);
    return status == MOE_OK ? MOE_OK : moei_error(error, status, "the stream failed: %s", moe_status_text(status));
}

/* ==== layouts of the public structs ====================================================================================== */

/* The members of each struct, in order; the list of structs. */
/* layouts: begin (written by sh tests/bindings.sh --write) */
#define MOEI_OF_moe_error(M, s) M(s, code) M(s, message)
#define MOEI_OF_moe_parallel(M, s) M(s, ctx) M(s, threads) M(s, always) M(s, run)
#define MOEI_OF_moe_adamw_step(M, s) M(s, scale) M(s, rate) M(s, beta1) M(s, beta2) M(s, epsilon) M(s, decay) M(s, over1) M(s, over2)
#define MOEI_OF_moe_kernels(M, s) M(s, name) M(s, id) M(s, matmul) M(s, dot) M(s, axpy) M(s, activate) M(s, activate_backward) M(s, softmax) \
    M(s, top_k) M(s, multiply) M(s, spread) M(s, log_posterior) M(s, exp_sum) M(s, entropy) M(s, panels) M(s, gated) M(s, gated_backward) \
    M(s, adamw) M(s, quant) M(s, quantise) M(s, widen)
#define MOEI_OF_moe_rng(M, s) M(s, state)
#define MOEI_OF_moe_int_shape(M, s) M(s, n) M(s, k) M(s, low) M(s, high) M(s, shift)
#define MOEI_OF_moe_field(M, s) M(s, name) M(s, kind) M(s, offset) M(s, min) M(s, max) M(s, choices) M(s, about)
#define MOEI_OF_moe_router_config(M, s) M(s, d_model) M(s, n_experts) M(s, top_k) M(s, input) M(s, jitter_eps) M(s, ac_mode) M(s, ac_spread) \
    M(s, ac_mix) M(s, ac_lambda) M(s, ac_rho) M(s, score) M(s, router_bias) M(s, cosine_dim) M(s, cosine_keep_length) M(s, cosine_learn_tau) \
    M(s, cosine_tau) M(s, norm_node) M(s, norm_order) M(s, router_hidden) M(s, router_act) M(s, grap_cosine) M(s, noise) M(s, noise_floor) \
    M(s, noise_sigma) M(s, gate) M(s, gate_temperature) M(s, refine) M(s, similarity_tau) M(s, similarity_scale) M(s, similarity_learned) \
    M(s, lower_entropy_only) M(s, causal) M(s, heads) M(s, attention_heads) M(s, attention_head) M(s, attention_sigma) M(s, attention_u) \
    M(s, select) M(s, selection_bias) M(s, groups) M(s, groups_kept) M(s, group_score) M(s, top_p) M(s, threshold) M(s, threshold_learned) \
    M(s, threshold_sigmoid) M(s, threshold_fallback) M(s, custom_batch) M(s, expert_choice_score) M(s, affinity_mass) M(s, affinity_sum) \
    M(s, capacity) M(s, table_size) M(s, slots) M(s, soft_normalise) M(s, soft_sequences) M(s, weight) M(s, weight_p) M(s, sparsemixer_eps) \
    M(s, expert_scale) M(s, scale) M(s, apply_to) M(s, capacity_factor) M(s, capacity_factor_eval) M(s, drop_capacity) M(s, capacity_min) \
    M(s, capacity_bound) M(s, capacity_rho) M(s, drop_order) M(s, drop_rule) M(s, renormalize) M(s, loss_balance) M(s, balance_over) \
    M(s, balance_scope) M(s, loss_z) M(s, loss_importance) M(s, importance_over) M(s, unbiased) M(s, loss_entropy) M(s, loss_usage_entropy) \
    M(s, loss_similarity_same) M(s, loss_similarity_diff) M(s, loss_locality) M(s, nodes) M(s, loss_l1) M(s, loss_load) M(s, loss_orthogonal) \
    M(s, loss_distill) M(s, distill) M(s, student) M(s, expert_temperature) M(s, bias_rate) M(s, l1_controller) M(s, schedule_steps) M(s, k_end) \
    M(s, tau_schedule) M(s, tau_end) M(s, freeze_at) M(s, switch_at) M(s, switch_from) M(s, untrained)
#define MOEI_OF_moe_preset(M, s) M(s, name) M(s, aliases) M(s, source) M(s, formula) M(s, router) M(s, layer)
#define MOEI_OF_moe_slot(M, s) M(s, name) M(s, n_dims) M(s, shape) M(s, count) M(s, flags) M(s, init_value) M(s, init_spread)
#define MOEI_OF_moe_batch(M, s) M(s, first) M(s, total) M(s, lead) M(s, ctx) M(s, gather)
#define MOEI_OF_moe_call(M, s) M(s, n_tokens) M(s, x) M(s, parallel) M(s, router_x) M(s, mask) M(s, sequences) M(s, n_sequences) M(s, given) \
    M(s, token_ids) M(s, noise) M(s, previous_input) M(s, previous_experts) M(s, previous_weights) M(s, n_previous) M(s, attention_weights) \
    M(s, attention_outputs) M(s, attention_output) M(s, d_attention_weights) M(s, d_attention_outputs) M(s, d_attention_output) M(s, jitter) \
    M(s, home) M(s, expert_node) M(s, teacher) M(s, distances) M(s, nodes) M(s, node_width) M(s, n_past) M(s, past_u) M(s, past_gate) \
    M(s, decoding) M(s, training) M(s, keep) M(s, rng) M(s, batch)
#define MOEI_OF_moe_entry(M, s) M(s, token) M(s, rank) M(s, weight_in) M(s, weight_out)
#define MOEI_OF_moe_plan(M, s) M(s, n_tokens) M(s, n_experts) M(s, offsets) M(s, entries) M(s, rows)
#define MOEI_OF_moe_routing(M, s) M(s, n_tokens) M(s, n_experts) M(s, first) M(s, n_real) M(s, u) M(s, logits) M(s, gate) M(s, probabilities) \
    M(s, choices) M(s, n_choices) M(s, kept) M(s, max_choices) M(s, section_weights) M(s, weights) M(s, selected) M(s, counts) M(s, first_counts) \
    M(s, n_dropped) M(s, capacity) M(s, capacity_bound) M(s, capacity_clamped) M(s, top_k) M(s, plan) M(s, loss) M(s, bound_now) M(s, d_weight_in) \
    M(s, d_weight_out) M(s, memory)
#define MOEI_OF_moe_custom(M, s) M(s, ctx) M(s, score) M(s, score_backward) M(s, select)
#define MOEI_OF_moe_router(M, s) M(s, config) M(s, custom) M(s, kernels) M(s, places) M(s, parts) M(s, tensors)
#define MOEI_OF_moe_metrics(M, s) M(s, n_experts) M(s, n_classes) M(s, n_calls) M(s, n_tokens) M(s, n_routed) M(s, n_pairs) M(s, n_dropped) \
    M(s, entropy) M(s, entropy_normalised) M(s, entropy_calls) M(s, n_classified) M(s, choices) M(s, choices_squared) M(s, load) M(s, first) \
    M(s, kept) M(s, importance) M(s, logits) M(s, classes) M(s, first_classes) M(s, mean_gate) M(s, mean_logit) M(s, row)
#define MOEI_OF_moe_report(M, s) M(s, n_experts) M(s, n_classes) M(s, n_calls) M(s, n_tokens) M(s, n_pairs) M(s, n_dropped) M(s, dropped_share) \
    M(s, experts_per_token) M(s, gate_entropy) M(s, usage_entropy) M(s, usage_entropy_calls) M(s, confidence_entropy) M(s, importance_cv2) \
    M(s, load_entropy) M(s, load_balance_score) M(s, load_cv2) M(s, load_max_over_mean) M(s, load_max_minus_min) M(s, capacity_use) \
    M(s, first_share_max) M(s, trivial_gate) M(s, n_classified) M(s, information) M(s, information_chance) M(s, information_first) \
    M(s, information_first_chance) M(s, classes) M(s, first_classes) M(s, load) M(s, first) M(s, kept) M(s, mean_gate) M(s, mean_logit)
#define MOEI_OF_moe_instability_report(M, s) M(s, instability) M(s, chance) M(s, q1) M(s, q2)
#define MOEI_OF_moe_error_shares(M, s) M(s, n_samples) M(s, error) M(s, gate_error) M(s, expert_error)
#define MOEI_OF_moe_int_router(M, s) M(s, gate) M(s, select) M(s, values) M(s, weight) M(s, scale) M(s, n_experts) M(s, top_k) M(s, most) \
    M(s, scratch) M(s, groups) M(s, groups_kept) M(s, factor) M(s, z_bits) M(s, weight_shift) M(s, flags) M(s, threshold) M(s, tokens) M(s, bias) \
    M(s, thresholds) M(s, scales) M(s, table)
#define MOEI_OF_moe_int_router_plan(M, s) M(s, router) M(s, gate) M(s, select) M(s, values) M(s, weight) M(s, scale) M(s, z_scale) \
    M(s, weight_scale) M(s, table_size) M(s, needs_logits)
#define MOEI_OF_moe_allocator(M, s) M(s, ctx) M(s, resize)
#define MOEI_OF_moe_arena(M, s) M(s, base) M(s, size) M(s, used)
#define MOEI_OF_moe_stream(M, s) M(s, ctx) M(s, read) M(s, write)
#define MOEI_OF_moe_buffer(M, s) M(s, allocator) M(s, data) M(s, size) M(s, capacity)
#define MOEI_OF_moe_tensor(M, s) M(s, name) M(s, n_dims) M(s, shape) M(s, count) M(s, flags) M(s, data) M(s, gradient)
#define MOEI_OF_moe_file_tensor(M, s) M(s, name) M(s, name_length) M(s, dtype) M(s, n_dims) M(s, shape) M(s, count) M(s, data) M(s, bytes)
#define MOEI_OF_moe_file(M, s) M(s, bytes) M(s, size) M(s, header_size) M(s, n_tensors) M(s, at) M(s, metadata_at) M(s, metadata_end) \
    M(s, of_header)
#define MOEI_OF_moe_metadata(M, s) M(s, key) M(s, value)
#define MOEI_OF_moe_layer_config(M, s) M(s, router) M(s, d_out) M(s, expert) M(s, d_ff) M(s, d_low) M(s, act) M(s, no_expert_bias) \
    M(s, swiglu_alpha) M(s, swiglu_limit) M(s, swiglu_offset) M(s, expert_bias) M(s, n_shared) M(s, d_shared) M(s, add_input) M(s, shared_sigmoid) \
    M(s, kernels) M(s, transport)
#define MOEI_OF_moe_layer(M, s) M(s, config) M(s, router) M(s, kernels) M(s, places) M(s, tensors) M(s, gradients) M(s, packed) M(s, packed_type) \
    M(s, is_packed) M(s, memory) M(s, memory_size) M(s, allocator)
#define MOEI_OF_moe_quant_error(M, s) M(s, rows) M(s, output)
#define MOEI_OF_moe_layer_pass(M, s) M(s, routing) M(s, call) M(s, x) M(s, node) M(s, all) M(s, quantised) M(s, quantised_size) M(s, rows) \
    M(s, d_rows) M(s, clean) M(s, d_node) M(s, d_all) M(s, shared) M(s, d_shared) M(s, shared_factor) M(s, route_memory) M(s, route_size) \
    M(s, ranks)
#define MOEI_OF_moe_exchange(M, s) M(s, row_bytes) M(s, send) M(s, send_counts) M(s, send_at) M(s, receive) M(s, receive_counts) M(s, receive_at) \
    M(s, slot)
#define MOEI_OF_moe_traffic(M, s) M(s, rows) M(s, bytes) M(s, tokens) M(s, pairs) M(s, pairs_away) M(s, pairs_far) M(s, exchanges) M(s, messages) \
    M(s, messages_far)
#define MOEI_OF_moe_transport(M, s) M(s, ctx) M(s, rank) M(s, n_ranks) M(s, ranks_per_node) M(s, two_level) M(s, chunks) M(s, counts) M(s, rows) \
    M(s, sum) M(s, traffic) M(s, allocator) M(s, ways) M(s, memory) M(s, memory_size)
#define MOEI_OF_moe_source(M, s) M(s, name) M(s, size) M(s, ctx) M(s, read_at)
#define MOEI_OF_moe_attention_config(M, s) M(s, heads) M(s, d_head) M(s, full) M(s, rotary) M(s, rotary_base)
#define MOEI_OF_moe_module(M, s) M(s, kind) M(s, d_in) M(s, d_out) M(s, act) M(s, span) M(s, n_rows) M(s, rate) M(s, attention) M(s, layer) \
    M(s, tensors) M(s, gradients) M(s, first_tensor)
#define MOEI_OF_moe_net(M, s) M(s, d_in) M(s, d_out) M(s, n_modules) M(s, modules) M(s, n_tensors) M(s, tensors) M(s, kernels_wanted) \
    M(s, kernels) M(s, allocator) M(s, memory) M(s, memory_size) M(s, built) M(s, trainable) M(s, error)
#define MOEI_OF_moe_net_pass(M, s) M(s, n_tokens) M(s, training) M(s, y) M(s, call) M(s, past) M(s, most) M(s, modules) M(s, scratch) M(s, d_x)
#define MOEI_OF_moe_cache(M, s) M(s, net) M(s, n_tokens) M(s, most) M(s, memory) M(s, size)
#define MOEI_OF_moe_sampling(M, s) M(s, greedy) M(s, temperature) M(s, top_k) M(s, top_p)
#define MOEI_OF_moe_data(M, s) M(s, n) M(s, x) M(s, labels) M(s, targets) M(s, call) M(s, token_ids) M(s, length)
#define MOEI_OF_moe_evaluation(M, s) M(s, n) M(s, loss) M(s, accuracy)
#define MOEI_OF_moe_progress(M, s) M(s, epoch) M(s, epochs) M(s, step) M(s, steps) M(s, loss) M(s, router_loss) M(s, gradient_norm) \
    M(s, epoch_ended) M(s, test) M(s, rate) M(s, total_step) M(s, total_steps) M(s, samples)
#define MOEI_OF_moe_param_group(M, s) M(s, pattern) M(s, rate) M(s, decay) M(s, frozen)
#define MOEI_OF_moe_train_config(M, s) M(s, criterion) M(s, optimizer) M(s, epochs) M(s, batch) M(s, rate) M(s, final_rate) M(s, momentum) \
    M(s, beta1) M(s, beta2) M(s, epsilon) M(s, decay) M(s, clip) M(s, seed) M(s, progress) M(s, progress_ctx) M(s, accumulate) M(s, schedule) \
    M(s, warmup) M(s, total_steps) M(s, groups) M(s, n_groups) M(s, evaluate_every) M(s, checkpoint) M(s, checkpoint_every) M(s, resume)
#define MOEI_OF_moe_trainer(M, s) M(s, net) M(s, config) M(s, steps) M(s, rng) M(s, rate) M(s, total_steps) M(s, n_accumulated) M(s, position) \
    M(s, memory) M(s, memory_size) M(s, factors) M(s, work) M(s, work_size)
#define MOEI_OF_moe_step(M, s) M(s, loss) M(s, router_loss) M(s, gradient_norm)
#define MOEI_OF_moe_modular(M, s) M(s, trainer) M(s, memory) M(s, memory_size) M(s, teacher) M(s, n_teacher) M(s, n_mixtures) M(s, candidate) \
    M(s, best) M(s, drawn) M(s, changed) M(s, sequences) M(s, net_work) M(s, net_size)
#define MOEI_OF_moe_modular_step_result(M, s) M(s, log_likelihood) M(s, changed) M(s, last)
#define MOEI_OF_moe_mixture(M, s) M(s, n) M(s, experts) M(s, width) M(s, p) M(s, expert_p) M(s, outputs) M(s, labels) M(s, targets) \
    M(s, temperature)
#define MOEI_OF_moe_hme_config(M, s) M(s, d_in) M(s, d_out) M(s, n_groups) M(s, n_experts) M(s, family) M(s, steps) M(s, variance) \
    M(s, min_variance)
#define MOEI_OF_moe_hme(M, s) M(s, config) M(s, gate) M(s, gates) M(s, experts) M(s, variances) M(s, parameters) M(s, n_parameters) M(s, kept) \
    M(s, best) M(s, gradient) M(s, normal) M(s, outputs) M(s, groups) M(s, row) M(s, width) M(s, in_group) M(s, all) M(s, memory) \
    M(s, memory_size) M(s, allocator)
#define MOEI_OF_moe_figure(M, s) M(s, kind) M(s, title) M(s, caption) M(s, rows) M(s, columns) M(s, stride) M(s, values) M(s, spread) \
    M(s, experts) M(s, cells) M(s, row_names) M(s, column_names) M(s, row_label) M(s, column_label) M(s, value_label) M(s, x) M(s, y) \
    M(s, n_experts) M(s, decimals) M(s, reference) M(s, reference_name)
#define MOEI_OF_moe_history(M, s) M(s, n) M(s, at) M(s, values) M(s, seen) M(s, every)
#define MOEI_OF_moe_loader(M, s) M(s, ctx) M(s, fetch)
#define MOEI_OF_moe_int_op(M, s) M(s, run) M(s, shape) M(s, at) M(s, in) M(s, other) M(s, out) M(s, factor) M(s, factor2) M(s, index)
#define MOEI_OF_moe_int_mixture(M, s) M(s, router) M(s, score) M(s, n_score) M(s, expert) M(s, n_expert) M(s, shared) M(s, n_shared) M(s, experts) \
    M(s, stride) M(s, z) M(s, p) M(s, sum) M(s, choices) M(s, block) M(s, weight_bits)
#define MOEI_OF_moe_int_attention(M, s) M(s, heads) M(s, d_head) M(s, keys) M(s, values) M(s, value) M(s, room) M(s, bits)
#define MOEI_OF_moe_model(M, s) M(s, version) M(s, weights_are) M(s, run) M(s, choices) M(s, d_in) M(s, d_out) M(s, length) M(s, scratch_size) \
    M(s, state_size) M(s, input_scale) M(s, output_scale) M(s, weights) M(s, weights_size) M(s, experts) M(s, experts_size) M(s, ops) M(s, n_ops) \
    M(s, n_main) M(s, mixtures) M(s, n_mixtures) M(s, attentions) M(s, n_attentions) M(s, net) M(s, multiplications)
#define MOEI_OF_moe_int_run(M, s) M(s, model) M(s, loader) M(s, base) M(s, vectors) M(s, state) M(s, token) M(s, place) M(s, weight) M(s, status)
#define MOEI_OF_moe_choice(M, s) M(s, expert) M(s, weight)
#define MOEI_OF_moe_model_config(M, s) M(s, weights) M(s, calibration) M(s, length) M(s, loader) M(s, allocator)
#define MOEI_OF_moe_int_router_names(M, s) M(s, name)
#define MOEI_OF_moe_built_model(M, s) M(s, model) M(s, weights) M(s, experts) M(s, ops) M(s, mixtures) M(s, router_names) M(s, attentions) \
    M(s, external) M(s, net) M(s, allocator)
#define MOEI_STRUCTS(S) S(moe_error) S(moe_parallel) S(moe_adamw_step) S(moe_kernels) S(moe_rng) S(moe_int_shape) S(moe_field) \
    S(moe_router_config) S(moe_preset) S(moe_slot) S(moe_batch) S(moe_call) S(moe_entry) S(moe_plan) S(moe_routing) S(moe_custom) S(moe_router) \
    S(moe_metrics) S(moe_report) S(moe_instability_report) S(moe_error_shares) S(moe_int_router) S(moe_int_router_plan) S(moe_allocator) \
    S(moe_arena) S(moe_stream) S(moe_buffer) S(moe_tensor) S(moe_file_tensor) S(moe_file) S(moe_metadata) S(moe_layer_config) S(moe_layer) \
    S(moe_quant_error) S(moe_layer_pass) S(moe_exchange) S(moe_traffic) S(moe_transport) S(moe_source) S(moe_attention_config) S(moe_module) \
    S(moe_net) S(moe_net_pass) S(moe_cache) S(moe_sampling) S(moe_data) S(moe_evaluation) S(moe_progress) S(moe_param_group) S(moe_train_config) \
    S(moe_trainer) S(moe_step) S(moe_modular) S(moe_modular_step_result) S(moe_mixture) S(moe_hme_config) S(moe_hme) S(moe_figure) S(moe_history) \
    S(moe_loader) S(moe_int_op) S(moe_int_mixture) S(moe_int_attention) S(moe_model) S(moe_int_run) S(moe_choice) S(moe_model_config) \
    S(moe_int_router_names) S(moe_built_model)
/* layouts: end */

#define MOEI_LAYOUT_WORD(s, member) " " #member
#define MOEI_LAYOUT_WORDS(s) #s MOEI_JOIN(MOEI_OF_, s)(MOEI_LAYOUT_WORD, s),
#define MOEI_LAYOUT_MEMBER(s, member) {(uint16_t)offsetof(s, member), (uint16_t)sizeof(((s *)NULL)->member)},
#define MOEI_LAYOUT_STRUCT(s) {0, (uint16_t)sizeof(s)}, MOEI_JOIN(MOEI_OF_, s)(MOEI_LAYOUT_MEMBER, s)

static const char *const moei_layout_names[] = {MOEI_STRUCTS(MOEI_LAYOUT_WORDS)};

/* One for each word of the names. */
static const struct {
    uint16_t offset, size;
} moei_layout_places[] = {MOEI_STRUCTS(MOEI_LAYOUT_STRUCT)};

const char *moe_struct_names(size_t i) {
    return i < sizeof moei_layout_names / sizeof *moei_layout_names ? moei_layout_names[i] : NULL;
}

/* Whether word, which a space or the end of the text ends, is name; *length is the word's. */
static int moei_is_word(const char *word, const char *name, size_t *length) {
    size_t n = 0;
    while (word[n] != ' ' && word[n] != '\0') n++;
    *length = n;
    return moei_strlen(name) == n && moei_memcmp(word, name, n) == 0;
}

moe_status moe_struct_place(const char *name, const char *member, size_t *offset, size_t *size) {
    size_t i, at = 0, length;
    if (name == NULL) return MOE_ERR_ARGUMENT;
    for (i = 0; i < sizeof moei_layout_names / sizeof *moei_layout_names; i++) {
        const char *word = moei_layout_names[i];
        int inside = moei_is_word(word, name, &length), found = inside && member == NULL;
        while (!found && word[length] != '\0') {
            word += length + 1;
            at++;
            found = moei_is_word(word, member != NULL ? member : "", &length) && inside;
        }
        if (found) {
            if (offset != NULL) *offset = moei_layout_places[at].offset;
            if (size != NULL) *size = moei_layout_places[at].size;
            return MOE_OK;
        }
        at++;
    }
    return MOE_ERR_NOT_FOUND;
}

#endif /* MOE_NO_TRAIN */

#if !defined(MOE_NO_TRAIN) && !defined(MOE_NO_REPORT)
/* ==== reports ================================================================================================================= */

/* ---- characters and numbers on their way to a stream --------------------------------------------------------------------------- */

/* What is written gathers in a room of its own; after a failure all else is ignored. */
typedef struct moei_pen {
    moe_stream *stream;
    moe_status status;
    int xml, colour; /* escapes; colours of terminals */
    size_t used;
    size_t blanks; /* of text: spaces that are written once something follows them on the line */
    char room[512];
} moei_pen;

static void moei_pen_flush(moei_pen *p) {
    if (p->status == MOE_OK && p->used > 0) p->status = p->stream->write(p->stream->ctx, p->room, p->used);
    p->used = 0;
}

static void moei_pen_byte(moei_pen *p, char c) {
    if (p->used == sizeof p->room) moei_pen_flush(p);
    p->room[p->used++] = c;
}

static void moei_pen_put(moei_pen *p, const char *s, size_t n) {
    for (; n > 0; s++, n--) {
        if (!p->xml && *s == ' ') {
            p->blanks++;
            continue;
        }
        if (*s == '\n') p->blanks = 0;
        for (; p->blanks > 0; p->blanks--) moei_pen_byte(p, ' ');
        moei_pen_byte(p, *s);
    }
}

static void moei_pen_repeat(moei_pen *p, const char *s, size_t times) {
    for (; times > 0; times--) moei_pen_put(p, s, moei_strlen(s));
}

/* The next character of a text as it may be shown: white space as a space, U+FFFD for what is no UTF-8, for control characters and for those that
   turn the direction of writing. */
static uint32_t moei_next_shown(const char **text) {
    uint32_t code;
    if (!moei_next_utf8(text, &code)) return 0xFFFDu;
    if (code == '\t' || code == '\n' || code == '\r' || code == 0x2028u || code == 0x2029u) return ' ';
    if (code < 0x20u || (code >= 0x7Fu && code < 0xA0u) || code == 0xFFFEu || code == 0xFFFFu) return 0xFFFDu;
    if (code == 0x61Cu || code == 0x200Eu || code == 0x200Fu || (code >= 0x202Au && code <= 0x202Eu) || (code >= 0x2066u && code <= 0x2069u)) return 0xFFFDu;
    return code;
}

/* How many columns a character takes: none if it is drawn over the one before, two in the scripts of East Asia and for pictures. */
static size_t moei_char_width(uint32_t c) {
    if ((c >= 0x300u && c < 0x370u) || (c >= 0x200Bu && c <= 0x200Du) || (c >= 0xFE00u && c <= 0xFE0Fu)) return 0;
    return (c >= 0x1100u && c < 0x1160u) || (c >= 0x2E80u && c < 0xA4D0u) || (c >= 0xAC00u && c < 0xD7A4u) || (c >= 0xF900u && c < 0xFB00u) ||
           (c >= 0xFE30u && c < 0xFE70u) || (c >= 0xFF00u && c < 0xFF61u) || (c >= 0x1F300u && c < 0x1FB00u) || (c >= 0x20000u && c < 0x40000u) ? 2 : 1;
}

static size_t moei_text_width(const char *s) {
    size_t width = 0;
    while (*s != '\0') width += moei_char_width(moei_next_shown(&s));
    return width;
}

static void moei_pen_char(moei_pen *p, uint32_t c) {
    char bytes[4];
    size_t n = c < 0x80u ? 1 : c < 0x800u ? 2 : c < 0x10000u ? 3 : 4, i;
    const char *escape = !p->xml ? NULL : c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '"' ? "&quot;" : c == '\'' ? "&#39;" : NULL;
    for (i = n - 1; i > 0; i--, c >>= 6) bytes[i] = (char)(unsigned char)(0x80u | (c & 63u));
    bytes[0] = (char)(unsigned char)(n == 1 ? c : (0xF00u >> n & 0xF0u) | c);
    if (escape != NULL) moei_pen_put(p, escape, moei_strlen(escape));
    else moei_pen_put(p, bytes, n);
}

/* A text cut down to `most` columns, the last of which then shows that it was; returns the columns taken. */
static size_t moei_pen_clip(moei_pen *p, const char *s, size_t most) {
    size_t width = 0, whole = moei_text_width(s);
    while (*s != '\0') {
        uint32_t c = moei_next_shown(&s);
        if (whole > most && width + moei_char_width(c) >= most) {
            moei_pen_char(p, p->xml ? 0x2026u : '~');
            return width + 1;
        }
        width += moei_char_width(c);
        moei_pen_char(p, c);
    }
    return width;
}

/* %s text of ours, %t text of the user's, %d int, %z size_t, %c a coordinate, rounded to tenths. */
static void moei_draw(moei_pen *p, const char *format, ...) {
    char digits[32];
    moei_text t;
    va_list arguments;
    va_start(arguments, format);
    for (; *format != '\0'; format++) {
        if (*format != '%') {
            moei_pen_put(p, format, 1);
            continue;
        }
        t.out = digits, t.room = sizeof digits, t.length = 0;
        format++;
        if (*format == 's') moei_pen_repeat(p, va_arg(arguments, const char *), 1);
        else if (*format == 't') (void)moei_pen_clip(p, va_arg(arguments, const char *), SIZE_MAX);
        else if (*format == 'd') moei_put_integer(&t, va_arg(arguments, int));
        else if (*format == 'z') moei_put_unsigned(&t, va_arg(arguments, size_t));
        else if (*format == 'c') {
            double tenths = va_arg(arguments, double) * 10.0;
            int64_t whole = (int64_t)(!(tenths > -1e9 && tenths < 1e9) ? 0.0 : tenths < 0.0 ? tenths - 0.5 : tenths + 0.5), size = whole < 0 ? -whole : whole;
            if (whole < 0) moei_put(&t, "-", 1);
            moei_put_integer(&t, size / 10);
            if (size % 10 > 0) moei_put(&t, ".", 1), moei_put_integer(&t, size % 10);
        } else moei_pen_put(p, "%", 1);
        moei_pen_put(p, digits, t.length);
    }
    va_end(arguments);
}

static int moei_is_number(double x) { return x >= -DBL_MAX && x <= DBL_MAX; }

/* The power of ten at or below x, for 1e-300 < x. */
static double moei_power_below(double x) {
    double power = 1.0;
    while (power > x) power /= 10.0;
    while (x / power >= 10.0) power *= 10.0;
    return power;
}

/* Digits behind the point that numbers up to `most` in size are told with; whole: none is broken. Below -1: so many significant digits, with exponents. */
static int moei_decimals_for(double most, int whole) {
    if (whole && most < 1e9) return 0;
    if (most >= 1e6 || (most > 0.0 && most < 1e-3)) return -4;
    return most >= 100.0 ? 1 : most >= 10.0 ? 2 : most >= 0.1 ? 3 : most >= 0.01 ? 4 : 5;
}

/* value as text: "-" for what is none. Returns room. */
static const char *moei_number(char room[48], double value, int decimals) {
    moei_text t;
    double size = value < 0.0 ? -value : value, power = 1.0;
    int i;
    t.out = room, t.room = 48, t.length = 0;
    for (i = 0; i < decimals; i++) power *= 10.0;
    if (!moei_is_number(value)) moei_put(&t, "-", 1);
    else if (!(size > 0.0)) decimals = decimals < 0 ? 0 : decimals, size = 0.0;
    if (t.length == 0 && (decimals < 0 || size >= 1e17 / power)) moei_put_digits(&t, value, decimals < -1 ? -decimals : 4);
    else if (t.length == 0) {
        double scaled = size * power;
        uint64_t whole = (uint64_t)scaled, unit = (uint64_t)power;
        if (scaled - (double)whole >= 0.5) whole++;
        if (value < 0.0 && whole > 0) moei_put(&t, "-", 1);
        moei_put_unsigned(&t, whole / unit);
        if (decimals > 0) moei_put(&t, ".", 1);
        for (i = 0; i < decimals; i++) moei_put_unsigned(&t, whole / (unit /= 10) % 10);
    }
    return room;
}

/* ---- what a figure holds ------------------------------------------------------------------------------------------------------------ */

/* A kind of figure as data. */
typedef struct moei_plot moei_plot;
typedef struct moei_figure_kind {
    const char *name, *row_label, *column_label;
    int turned;                      /* tables have a row per column */
    void (*plan)(moei_plot *);       /* finds width, height and what draw needs */
    void (*draw)(moei_plot *);
    void (*tell)(moei_plot *);       /* the message, in words */
    void (*text)(moei_plot *, size_t columns);
} moei_figure_kind;

/* One figure at work. */
struct moei_plot {
    const moe_figure *f;
    const moei_figure_kind *kind;
    moei_pen *p;
    size_t rows, columns, row_step, column_step; /* what is shown: each a mean of (MAP, tables: the first of) so many */
    size_t n_experts, number;    /* number: of the figure in its page */
    double low, high;            /* of the values */
    int any, decimals, numbers, turned; /* any: there is a value; numbers: they stand in the cells; turned: names of columns do */
    double left, top, width, height, cell_w, cell_h;
    size_t digits, names, heads; /* columns that the widest number, row's name and column's name take */
};

enum { MOEI_LEGEND_MOST = 64, MOEI_TINTS = 16, MOEI_LEVELS = 10, MOEI_TOKENS_MOST = 3000 };
static const double moei_char = 7.4, moei_line_height = 18.0, moei_phone = 340.0, moei_plot_height = 190.0; /* in pixels; phone: width of most figures */

static size_t moei_least(size_t a, size_t b) { return a < b ? a : b; }
static size_t moei_larger_size(size_t a, size_t b) { return a > b ? a : b; }
static double moei_larger(double a, double b) { return a > b ? a : b; }
static double moei_smaller(double a, double b) { return a < b ? a : b; }

static size_t moei_at(const moe_figure *f, size_t row, size_t column) { return row * (f->stride > 0 ? f->stride : f->columns) + column; }

static int moei_value(const moe_figure *f, size_t row, size_t column, double *value) {
    *value = f->values != NULL ? f->values[moei_at(f, row, column)] : (double)MOEI_INFINITY;
    return moei_is_number(*value);
}

static double moei_figure_spread(const moe_figure *f, size_t row, size_t column) {
    double s = f->spread != NULL ? f->spread[moei_at(f, row, column)] : -1.0;
    return moei_is_number(s) && s >= 0.0 ? s : -1.0;
}

/* The mean of a block of cells, of those that have a value. */
static int moei_mean(const moei_plot *q, size_t row, size_t column, double *mean) {
    const moe_figure *f = q->f;
    size_t r, c, n = 0;
    double value;
    *mean = 0.0;
    for (r = row * q->row_step; r < moei_least((row + 1) * q->row_step, f->rows); r++)
        for (c = column * q->column_step; c < moei_least((column + 1) * q->column_step, f->columns); c++)
            if (moei_value(f, r, c, &value)) n++, *mean += value / (double)n - *mean / (double)n;
    return n > 0;
}

static int32_t moei_figure_expert(const moei_plot *q, size_t row, size_t column) {
    int32_t e = q->f->experts[moei_at(q->f, row * q->row_step, column * q->column_step)];
    return e < 0 ? -1 : e;
}

static const char *moei_label(const char *label, const char *instead) { return label != NULL ? label : instead; }

/* names[i], else label and i, or i alone without a label. */
static const char *moei_name(const char *const *names, const char *label, size_t i, char room[48]) {
    moei_text t;
    if (names != NULL && names[i] != NULL) return names[i];
    t.out = room, t.room = 48, t.length = 0;
    if (label != NULL && moei_strlen(label) < 24) moei_put(&t, label, moei_strlen(label)), moei_put(&t, " ", 1);
    moei_put_unsigned(&t, i);
    return room;
}

static const char *moei_row_label(const moei_plot *q) { return moei_label(q->f->row_label, q->kind->row_label); }
static const char *moei_column_label(const moei_plot *q) { return moei_label(q->f->column_label, q->kind->column_label); }
static const char *moei_row_name(const moei_plot *q, size_t i, char room[48]) { return moei_name(q->f->row_names, moei_row_label(q), i, room); }

static const char *moei_column_name(const moei_plot *q, size_t i, char room[48]) {
    moei_text t;
    if (q->kind->turned && q->f->column_names == NULL && q->f->x != NULL && moei_is_number(q->f->x[i])) { /* steps are told by their number */
        t.out = room, t.room = 48, t.length = 0;
        if (q->f->x[i] < 0.0 || q->f->x[i] > 0.0) moei_put_digits(&t, q->f->x[i], 6);
        else moei_put(&t, "0", 1);
        return room;
    }
    return moei_name(q->f->column_names, moei_column_label(q), i, room);
}

/* At most so many rows and columns are shown. What is empty does not come here. */
static void moei_thin(moei_plot *q, size_t rows, size_t columns) {
    q->row_step = (q->f->rows - 1) / rows + 1, q->column_step = (q->f->columns - 1) / columns + 1;
    q->rows = (q->f->rows - 1) / q->row_step + 1, q->columns = (q->f->columns - 1) / q->column_step + 1;
}

static void moei_include(moei_plot *q, double value) {
    if (!moei_is_number(value)) return;
    q->low = !q->any || value < q->low ? value : q->low;
    q->high = !q->any || value > q->high ? value : q->high;
    q->any = 1;
}

static int moei_has_reference(const moei_plot *q) { return moei_is_number(q->f->reference) && (q->f->reference < 0.0 || q->f->reference > 0.0); }

/* The least and largest value, and how numbers are written; of column `only`, or of all (SIZE_MAX). */
static void moei_figure_measure(moei_plot *q, size_t only) {
    const moe_figure *f = q->f;
    size_t r, c;
    double value, most = 0.0;
    int whole = 1;
    q->any = 0, q->low = q->high = 0.0;
    for (r = 0; r < f->rows; r++)
        for (c = only < f->columns ? only : 0; c < (only < f->columns ? only + 1 : f->columns); c++) {
            double spread = moei_figure_spread(f, r, c);
            if (!moei_value(f, r, c, &value)) continue;
            moei_include(q, value);
            most = moei_larger(most, value < 0.0 ? -value : value);
            if (spread >= 0.0) most = moei_larger(most, spread), whole = 0;
            whole = whole && most < 1e15 && !((double)(int64_t)value < value) && !((double)(int64_t)value > value);
        }
    q->decimals = f->decimals > 0 ? f->decimals < 9 ? f->decimals : 9 : f->decimals < 0 ? 0 : moei_decimals_for(most, whole);
}

static double moei_plot_share(const moei_plot *q, double value) {
    double share = q->high > q->low ? (value * 0.5 - q->low * 0.5) / (q->high * 0.5 - q->low * 0.5) : 0.0;
    return !(share > 0.0) ? 0.0 : share > 1.0 ? 1.0 : share; /* halves of the least numbers there are make 0 / 0 */
}

/* Room for names and numbers; names are cut at `most` columns. */
static void moei_measure_names(moei_plot *q, size_t most) {
    char room[48];
    size_t i, r, c;
    double value;
    q->names = q->heads = q->digits = 0;
    for (i = 0; i < q->f->rows; i++) q->names = moei_larger_size(q->names, moei_text_width(moei_name(q->f->row_names, NULL, i, room)));
    for (i = 0; i < q->f->columns; i++) q->heads = moei_larger_size(q->heads, moei_text_width(moei_name(q->f->column_names, NULL, i, room)));
    for (r = 0; r < q->rows; r++)
        for (c = 0; c < q->columns; c++)
            if (moei_mean(q, r, c, &value)) q->digits = moei_larger_size(q->digits, moei_strlen(moei_number(room, value, q->decimals)));
    q->names = moei_least(q->names, most), q->heads = moei_least(q->heads, most);
}

/* ---- colours ------------------------------------------------------------------------------------------------------------------------- */

/* Of the light and the dark scheme, as hexadecimal RGB: 16 tints for experts and 10 levels of a value, with black or white text on them; 8 lines. The
   first eight tints and the lines keep apart for the colour-blind: hues as in Okabe, Ito 2008, Color universal design; numbers and dashes do the rest. */
static const char moei_tints[2][MOEI_TINTS * 6 + 1] = {
    "9ecbffffc28a98e0b0f7b6d9f6e27ad0d0d09be7eecdb8ff6fb0f0e8964a55bb82de80baccb133a3a3a346bcc9a78eea",
    "1f4e868a4b081c6b3f8a2c666b5c00555b630b6470553f9e163d6b6c3a06145030701f52524600434850074c55432f85"};
static const char moei_levels[2][MOEI_LEVELS * 6 + 1] = {"f1f6fbdeebf7c6dbefa5cbe67fb5da5a9dcc3b82bd2468a4124e8708306b",
                                                         "1d273320364c234766275a822f6f9f3f87ba5ba0d080b9e0abd2eed8ebf9"};
static const char moei_strokes[2][8 * 6 + 1] = {"0b62b8b8460b0a7a4ba3327f7a65004d556000788a6842c2", "6cb2ffff9a5c5fd39aff8ccfe3cb52b9c1cc58d3e0b9a1ff"};
static const unsigned char moei_dark_ink_from[2] = {0, 5}, moei_dark_ink_to[2] = {7, 10}; /* levels with black text */

static void moei_colours(moei_pen *p, int dark) {
    static const char *const ground[2] = {"fff", "171b21"}, *const ink[2] = {"1c2330", "e8ecf1"}, *const muted[2] = {"55606e", "a9b3c0"},
                      *const grid[2] = {"d5dbe3", "39424e"};
    int i;
    moei_draw(p, ".moe .bg{fill:#%s}.moe text,.moe .u{fill:#%s}.moe .m{fill:#%s}.moe .g{stroke:#%s}.moe .a{stroke:#%s}", ground[dark], ink[dark], muted[dark],
              grid[dark], muted[dark]);
    moei_draw(p, ".moe .e{fill:#%s;color:#%s}", dark ? "fff" : "000", dark ? "fff" : "000");
    for (i = 0; i < MOEI_TINTS; i++) {
        moei_draw(p, ".moe .c%d{fill:#", i), moei_pen_put(p, moei_tints[dark] + 6 * i, 6);
        moei_draw(p, ";background:#"), moei_pen_put(p, moei_tints[dark] + 6 * i, 6), moei_draw(p, "}");
    }
    for (i = 0; i < MOEI_LEVELS; i++) {
        moei_draw(p, ".moe .h%d{fill:#", i), moei_pen_put(p, moei_levels[dark] + 6 * i, 6);
        moei_draw(p, "}.moe .i%d{fill:#%s}", i, i >= moei_dark_ink_from[dark] && i < moei_dark_ink_to[dark] ? "000" : "fff");
    }
    for (i = 0; i < 8; i++) {
        moei_draw(p, ".moe .s%d{stroke:#", i), moei_pen_put(p, moei_strokes[dark] + 6 * i, 6);
        moei_draw(p, "}.moe .f%d{fill:#", i), moei_pen_put(p, moei_strokes[dark] + 6 * i, 6), moei_draw(p, "}");
    }
}

static void moei_style(moei_pen *p) {
    moei_draw(p, ".moe text{font:13px system-ui,-apple-system,\"Segoe UI\",Roboto,\"Noto Sans\",sans-serif;white-space:pre}.moe .b{font-size:16px;font-weight:600}"
                 ".moe .r{text-anchor:end}.moe .n{text-anchor:middle}.moe .k{font-family:ui-monospace,\"DejaVu Sans Mono\",Menlo,Consolas,monospace}"
                 ".moe .l{fill:none;stroke-width:2;stroke-linecap:round;stroke-linejoin:round}.moe .g,.moe .a{fill:none}.moe .z{shape-rendering:crispEdges}"
                 ".moe .d1{stroke-dasharray:7 4}.moe .d2{stroke-dasharray:2 4}.moe .d3{stroke-dasharray:9 4 2 4}");
    moei_colours(p, 0);
    moei_draw(p, "@media(prefers-color-scheme:dark){"), moei_colours(p, 1), moei_draw(p, "}");
}

/* ---- pieces of pictures -------------------------------------------------------------------------------------------------------------- */

static void moei_write_at(moei_plot *q, double x, double y, const char *class_name, const char *s, size_t most) {
    moei_draw(q->p, "<text x=\"%c\" y=\"%c\"%s%s%s>", x, y, *class_name != '\0' ? " class=\"" : "", class_name, *class_name != '\0' ? "\"" : "");
    (void)moei_pen_clip(q->p, s, most), moei_draw(q->p, "</text>\n");
}

static void moei_rect(moei_plot *q, double x, double y, double width, double height, const char *class_name, int number) {
    moei_draw(q->p, "<rect x=\"%c\" y=\"%c\" width=\"%c\" height=\"%c\" class=\"%s", x, y, width, height, class_name);
    if (number >= 0) moei_draw(q->p, "%d", number);
    moei_draw(q->p, "\"/>");
}

static void moei_line_at(moei_plot *q, double x1, double y1, double x2, double y2, const char *class_name) {
    moei_draw(q->p, "<path d=\"M%c %cL%c %c\" class=\"%s\"/>\n", x1, y1, x2, y2, class_name);
}

/* The end of the line of at most `width` columns, two or more, that begins at s and holds at least one character; *next: where the one after it begins. */
static const char *moei_wrap(const char *s, size_t width, const char **next) {
    const char *end = s, *space = NULL;
    size_t taken = 0;
    while (*end != '\0') {
        const char *at = end;
        uint32_t c = moei_next_shown(&end);
        taken += moei_char_width(c);
        if (c == ' ') space = at, *next = end;
        if (taken > width) {
            if (space == NULL || space == s) *next = space = at;
            return space;
        }
    }
    return *next = end;
}

/* Writes a paragraph from y on, if draw; returns the y after it. */
static double moei_paragraph(moei_plot *q, const char *s, double y, const char *class_name, size_t width, int draw) {
    while (s != NULL && *s != '\0') {
        const char *next, *end = moei_wrap(s, width, &next);
        y += moei_line_height + (*class_name == 'b' ? 3 : 0);
        if (draw) {
            moei_draw(q->p, "<text y=\"%c\" class=\"%s\">", y - 4.0, class_name);
            while (s < end) moei_pen_char(q->p, moei_next_shown(&s));
            moei_draw(q->p, "</text>\n");
        }
        s = next;
    }
    return y;
}

/* How experts are drawn that have no name: a tint with the number on it. */
static void moei_chip(moei_plot *q, double x, double y, double width, double height, int32_t e) {
    char room[48];
    if (e < 0) return;
    moei_rect(q, x, y, width, height, "c", (int)(e % MOEI_TINTS));
    moei_write_at(q, x + width / 2.0, y + height - 4.0, "e n", moei_number(room, (double)e, 0), 9);
}


/* The share of the cells of row `row` (SIZE_MAX: of all) that expert e has, of those with an expert. */
static double moei_expert_share(const moei_plot *q, size_t row, int32_t e) {
    size_t rows = (q->f->rows - 1) / q->row_step + 1, columns = (q->f->columns - 1) / q->column_step + 1, r, c, all = 0, its = 0;
    for (r = row < rows ? row : 0; r < (row < rows ? row + 1 : rows); r++)
        for (c = 0; c < columns; c++) {
            int32_t there = moei_figure_expert(q, r, c);
            all += there >= 0, its += there == e;
        }
    return all > 0 ? (double)its / (double)all : 0.0;
}

/* Experts and their shares, from y on, if draw; returns the height. */
static double moei_legend(moei_plot *q, double y, int draw) {
    char room[48];
    size_t e, shown = 0;
    for (e = 0; e < moei_least(q->n_experts, MOEI_LEGEND_MOST); e++) {
        const size_t line = shown / 4;
        double share = moei_expert_share(q, SIZE_MAX, (int32_t)e), x = (double)(shown - 4 * line) * 85.0, at = y + (double)line * 22.0;
        if (!(share > 0.0) && q->f->n_experts <= 0) continue;
        if (draw) {
            moei_chip(q, x, at, 28.0, 18.0, (int32_t)e);
            moei_draw(q->p, "<text x=\"%c\" y=\"%c\" class=\"m\">%s %%</text>\n", x + 33.0, at + 14.0, moei_number(room, 100.0 * share, 1));
        }
        shown++;
    }
    shown = (shown + 3) / 4;
    return (double)shown * 22.0 + 6.0;
}

/* How many digits the largest of n experts has. */
static size_t moei_digits_of(size_t n) {
    size_t digits = 1;
    for (; n > 10; n = (n + 9) / 10) digits++;
    return digits;
}

static void moei_count_experts(moei_plot *q) {
    size_t r, c;
    q->n_experts = q->f->n_experts > 0 ? (size_t)q->f->n_experts : 0;
    for (r = 0; r < q->f->rows && q->f->n_experts <= 0; r++)
        for (c = 0; c < q->f->columns; c++) {
            int32_t e = q->f->experts[moei_at(q->f, r, c)];
            if (e >= 0 && (size_t)e >= q->n_experts) q->n_experts = (size_t)e + 1;
        }
}

/* ---- tables coloured by value -------------------------------------------------------------------------------------------------------- */

/* Levels begin at 0 where that is not far. */
static void moei_from_zero(moei_plot *q) {
    if (q->low > 0.0 && q->low <= q->high * 0.5) q->low = 0.0;
}

static int moei_level(const moei_plot *q, double value) { return (int)moei_smaller(moei_plot_share(q, value) * 10.0, 9.0); }

static void moei_plan_heat(moei_plot *q) {
    size_t label;
    moei_thin(q, 128, 128);
    moei_figure_measure(q, SIZE_MAX);
    moei_from_zero(q);
    moei_measure_names(q, 16);
    q->numbers = q->column_step == 1 && q->row_step == 1 && q->columns <= 48 && q->digits <= 10;
    label = moei_text_width(moei_row_label(q));
    q->left = (double)moei_larger_size(q->names, moei_least(label, 10)) * moei_char + 8.0;
    q->cell_w = q->numbers ? (double)q->digits * moei_char + 6.0 : 12.0;
    q->cell_w = moei_larger(q->cell_w, moei_smaller((moei_phone - q->left) / (double)q->columns, 60.0));
    q->cell_h = q->numbers ? 24.0 : 14.0;
    q->turned = (double)q->heads * moei_char > q->cell_w - 2.0;
    q->top = moei_line_height + (q->turned ? (double)q->heads * moei_char + 10.0 : moei_line_height);
    q->width = moei_larger(moei_phone, q->left + (double)q->columns * q->cell_w);
    q->height = q->top + (double)q->rows * q->cell_h + 50.0;
}

/* Low and high of the colours. */
static void moei_draw_scale(moei_plot *q, double y) {
    char room[48];
    double x = q->left, low = (double)moei_strlen(moei_number(room, q->low, q->decimals)) * moei_char + 6.0;
    int i;
    if (!q->any) return;
    moei_write_at(q, x, y + 14.0, "m", room, 20);
    for (i = 0; i < MOEI_LEVELS; i++) moei_rect(q, x + low + 10.0 * i, y, 10.0, 18.0, "h", i);
    moei_draw(q->p, "\n<text x=\"%c\" y=\"%c\" class=\"m\">%s ", x + low + 106.0, y + 14.0, moei_number(room, q->high, q->decimals));
    (void)moei_pen_clip(q->p, moei_label(q->f->value_label, ""), 14), moei_draw(q->p, "</text>\n");
}

static void moei_draw_heat(moei_plot *q) {
    char room[48];
    size_t r, c, every = (size_t)((q->turned ? 14.0 : (double)q->heads * moei_char + 4.0) / q->cell_w) + 1;
    double value;
    moei_write_at(q, q->left, 14.0, "m", moei_column_label(q), 30);
    moei_write_at(q, 0.0, q->top - 5.0, "m", moei_row_label(q), 10);
    for (c = 0; c < q->columns; c += every) {
        double x = q->left + ((double)c + 0.5) * q->cell_w;
        const char *name = moei_name(q->f->column_names, NULL, c * q->column_step, room);
        if (!q->turned) moei_write_at(q, x, q->top - 5.0, "n", name, q->heads);
        else {
            moei_draw(q->p, "<text transform=\"translate(%c %c)rotate(-90)\">", x + 4.5, q->top - 5.0);
            (void)moei_pen_clip(q->p, name, q->heads), moei_draw(q->p, "</text>\n");
        }
    }
    for (r = 0; r < q->rows; r++) {
        double y = q->top + (double)r * q->cell_h;
        moei_write_at(q, q->left - 6.0, y + q->cell_h / 2.0 + 4.5, "r", moei_name(q->f->row_names, NULL, r * q->row_step, room), q->names);
        for (c = 0; c < q->columns; c++) {
            double x = q->left + (double)c * q->cell_w;
            int there = moei_mean(q, r, c, &value), level = there ? moei_level(q, value) : 0;
            if (there) moei_rect(q, x, y, q->cell_w - 1.0, q->cell_h - 1.0, "h", level);
            if (!q->numbers && there) continue;
            moei_draw(q->p, "<text x=\"%c\" y=\"%c\" class=\"n ", x + q->cell_w / 2.0 - 0.5, y + q->cell_h / 2.0 + 4.0);
            moei_draw(q->p, there ? "i%d\">" : "m\">", level), moei_draw(q->p, "%s</text>", there ? moei_number(room, value, q->decimals) : "-");
        }
        moei_draw(q->p, "\n");
    }
    moei_draw_scale(q, q->top + (double)q->rows * q->cell_h + 14.0);
}

/* Where the largest (sign 1) or smallest (-1) value stands. */
static void moei_tell_extreme(moei_plot *q, const char *what, double sign) {
    char room[48];
    size_t r, c, row = 0, column = 0;
    double value, best = 0.0;
    int any = 0;
    for (r = 0; r < q->f->rows; r++)
        for (c = 0; c < q->f->columns; c++)
            if (moei_value(q->f, r, c, &value) && (!any || value * sign > best * sign)) best = value, row = r, column = c, any = 1;
    moei_draw(q->p, "%s %s at ", what, moei_number(room, best, q->decimals));
    moei_draw(q->p, "%t", moei_row_name(q, row, room));
    if (q->f->columns > 1) moei_draw(q->p, ", %t", moei_column_name(q, column, room));
    moei_draw(q->p, ". ");
}

static void moei_tell_cells(moei_plot *q) {
    moei_draw(q->p, "%z x %z numbers", q->f->rows, q->f->columns);
    if (q->f->value_label != NULL) moei_draw(q->p, ", %t", q->f->value_label);
    moei_draw(q->p, ". ");
    moei_figure_measure(q, SIZE_MAX);
    if (!q->any) {
        moei_draw(q->p, "None has a value.");
        return;
    }
    moei_tell_extreme(q, "Largest:", 1.0), moei_tell_extreme(q, "Smallest:", -1.0);
}

/* ---- bars ---------------------------------------------------------------------------------------------------------------------------- */

static void moei_measure_bars(moei_plot *q) {
    size_t r, c;
    double value, spread;
    moei_figure_measure(q, SIZE_MAX);
    for (r = 0; r < q->f->rows; r++)
        for (c = 0; c < q->f->columns; c++)
            if ((spread = moei_figure_spread(q->f, r, c)) >= 0.0 && moei_value(q->f, r, c, &value)) moei_include(q, value - spread), moei_include(q, value + spread);
    if (moei_has_reference(q)) moei_include(q, q->f->reference);
    if (q->any) moei_include(q, 0.0);
}

/* A number, with its interval where it has one. */
static void moei_draw_value(moei_plot *q, double value, double spread) {
    char room[48];
    moei_draw(q->p, "%s", moei_number(room, value, q->decimals));
    if (spread >= 0.0) moei_draw(q->p, q->p->xml ? " \xC2\xB1 %s" : " +- %s", moei_number(room, spread, q->decimals));
}

static size_t moei_value_width(const moei_plot *q, double value, double spread) {
    char room[48];
    size_t width = moei_strlen(moei_number(room, value, q->decimals));
    return spread >= 0.0 ? width + (q->p->xml ? 3 : 4) + moei_strlen(moei_number(room, spread, q->decimals)) : width;
}

static void moei_measure_values(moei_plot *q) {
    size_t r, c;
    double value;
    for (r = 0; r < q->rows; r++)
        for (c = 0; c < q->columns; c++)
            if (moei_mean(q, r, c, &value))
                q->digits = moei_larger_size(q->digits, moei_value_width(q, value, q->row_step == 1 ? moei_figure_spread(q->f, r, c) : -1.0));
}

static void moei_plan_bars(moei_plot *q) {
    moei_thin(q, 256, SIZE_MAX);
    moei_measure_bars(q);
    moei_measure_names(q, 16);
    moei_measure_values(q);
    q->top = moei_line_height + 6.0;
    q->left = (double)moei_larger_size(q->names, q->f->row_names == NULL ? moei_least(moei_text_width(moei_row_label(q)), 10) : 0) * moei_char + 8.0;
    q->cell_h = q->columns > 1 ? (double)q->columns * 16.0 + 6.0 : 21.0;
    q->cell_w = moei_phone - q->left - (double)q->digits * moei_char - 8.0;
    if (q->cell_w < 80.0) q->cell_w = 80.0;
    q->width = q->left + q->cell_w + 8.0 + (double)q->digits * moei_char;
    q->height = q->top + (double)q->rows * q->cell_h + 6.0 + (moei_has_reference(q) ? moei_line_height : 0.0);
    q->height += (q->columns > 1 ? (double)q->columns * moei_line_height + 4.0 : 0.0);
}

static void moei_draw_bar(moei_plot *q, size_t row, size_t column, double y) {
    double value, zero = q->left + moei_plot_share(q, 0.0) * q->cell_w, spread = q->row_step == 1 ? moei_figure_spread(q->f, row, column) : -1.0, end, from, to;
    int there = moei_mean(q, row, column, &value);
    end = q->left + moei_plot_share(q, there ? value : 0.0) * q->cell_w;
    if (there) moei_rect(q, moei_smaller(zero, end), y, moei_larger(end > zero ? end - zero : zero - end, 1.0), 14.0, "f", (int)(column % 8));
    if (there && spread >= 0.0) {
        from = q->left + moei_plot_share(q, value - spread) * q->cell_w, to = q->left + moei_plot_share(q, value + spread) * q->cell_w;
        moei_draw(q->p, "<path d=\"M%c %cv6M%c %cv6M%c %cH%c\" class=\"a\"/>", from, y + 4.0, to, y + 4.0, from, y + 7.0, to);
    }
    moei_draw(q->p, "<text x=\"%c\" y=\"%c\" class=\"r\">", q->width, y + 11.5);
    if (there) moei_draw_value(q, value, spread);
    else moei_draw(q->p, "-");
    moei_draw(q->p, "</text>\n");
}

static void moei_draw_bars(moei_plot *q) {
    char room[48];
    size_t r, c;
    double bottom = q->top + (double)q->rows * q->cell_h, x;
    if (q->f->row_names == NULL) moei_write_at(q, 0.0, 14.0, "m", moei_row_label(q), 10);
    if (q->f->value_label != NULL) moei_write_at(q, q->width, 14.0, "m r", q->f->value_label, 30);
    for (r = 0; r < q->rows; r++) {
        double y = q->top + (double)r * q->cell_h;
        moei_write_at(q, q->left - 6.0, y + q->cell_h / 2.0 + 1.5, "r", moei_name(q->f->row_names, NULL, r * q->row_step, room), q->names);
        for (c = 0; c < q->columns; c++) moei_draw_bar(q, r, c, y + 16.0 * (double)c);
    }
    if (moei_has_reference(q)) {
        x = q->left + moei_plot_share(q, q->f->reference) * q->cell_w;
        moei_draw(q->p, "<path d=\"M%c %cV%c\" class=\"a d1\"/><text x=\"%c\" y=\"%c\" class=\"m%s\">", x, q->top - 2.0, bottom, x, bottom + 13.0,
                  x > moei_phone * 0.75 ? " r" : x > moei_phone * 0.35 ? " n" : "");
        (void)moei_pen_clip(q->p, moei_label(q->f->reference_name, "reference"), 24);
        moei_draw(q->p, " %s</text>\n", moei_number(room, q->f->reference, q->decimals)), bottom += moei_line_height;
    }
    for (c = 0; c < q->columns && q->columns > 1; c++) {
        moei_rect(q, q->left, bottom + 6.0 + moei_line_height * (double)c, 24.0, 12.0, "f", (int)(c % 8));
        moei_write_at(q, q->left + 30.0, bottom + 16.5 + moei_line_height * (double)c, "", moei_column_name(q, c, room), 24);
    }
}

/* ---- curves -------------------------------------------------------------------------------------------------------------------------- */

static double moei_x(const moe_figure *f, size_t column) { return f->x != NULL ? f->x[column] : (double)column + 1.0; }

/* A round step between marks, of which there are at most `most` or so over half * 2. */
static double moei_mark_step(double half, double most) {
    double raw = half / most * 2.0, power = moei_power_below(raw);
    raw *= 0.999999; /* of a span that is a whole number of steps */
    return raw > power * 5.0 ? power * 10.0 : raw > power * 2.0 ? power * 5.0 : raw > power ? power * 2.0 : power;
}

/* Makes low < high by more than rounding, so that marks can be told apart. */
static void moei_widen(moei_plot *q) {
    double size = moei_larger(q->high < 0.0 ? -q->high : q->high, q->low < 0.0 ? -q->low : q->low);
    if (!q->any) q->low = 0.0, q->high = 1.0;
    else if (q->high * 0.5 - q->low * 0.5 <= size * 1e-10 || size < 1e-290) {
        double more = size < 1e-290 ? 1.0 : size * 0.05;
        q->low -= q->low > -1e300 ? more : 0.0, q->high += q->high < 1e300 ? more : 0.0;
    }
}

static int64_t moei_whole_below(double x) { return (int64_t)x - ((double)(int64_t)x > x); }

/* Marks at round numbers from low to high: number i, or 0 behind the last. */
static int moei_plot_mark(const moei_plot *q, double most, int i, double *at) {
    double step = moei_mark_step(q->high * 0.5 - q->low * 0.5, most);
    *at = (double)(i - moei_whole_below(-q->low / step + 1e-6)) * step;
    return moei_is_number(*at) && *at <= q->high + step * 1e-6;
}

/* How the marks' numbers are written. */
static int moei_mark_decimals(const moei_plot *q, double most) {
    double step = moei_mark_step(q->high * 0.5 - q->low * 0.5, most), size = moei_larger(q->high, -q->low);
    int decimals = 0, significant = 1;
    if (size >= 1e6 || size < 1e-4) {
        for (; size > step * 1.5 && significant < 15; size /= 10.0) significant++;
        return significant > 1 ? -significant : -2;
    }
    for (; step < 0.99 && decimals < 9; step *= 10.0) decimals++;
    return decimals;
}

static void moei_measure_x(moei_plot *q) {
    size_t c;
    q->any = 0, q->low = q->high = 0.0;
    for (c = 0; c < q->f->columns; c++)
        if (moei_is_number(moei_x(q->f, c))) moei_include(q, moei_x(q->f, c));
    moei_widen(q);
}

static void moei_measure_y(moei_plot *q) {
    double step, low, high;
    moei_figure_measure(q, SIZE_MAX);
    if (moei_has_reference(q)) moei_include(q, q->f->reference);
    if (q->low > 0.0 && q->low < q->high * 0.3) q->low = 0.0;
    moei_widen(q);
    step = moei_mark_step(q->high * 0.5 - q->low * 0.5, 5.0); /* out to the next marks */
    low = (double)moei_whole_below(q->low / step) * step, high = -(double)moei_whole_below(-q->high / step) * step;
    if (moei_is_number(low) && moei_is_number(high)) q->low = low, q->high = high;
}

enum { MOEI_BUCKETS = 320, MOEI_NAMED_LINES = 32 };

static size_t moei_legend_lines(const moei_plot *q) { return q->f->rows == 1 && q->f->row_names == NULL ? 0 : moei_least(q->f->rows, MOEI_NAMED_LINES); }
static int moei_dash(size_t i) { return (int)((i + i / 8) % 4); }

static void moei_plan_lines(moei_plot *q) {
    char room[48];
    double at;
    int i, decimals;
    moei_measure_y(q);
    decimals = moei_mark_decimals(q, 5.0);
    for (i = 0; moei_plot_mark(q, 5.0, i, &at); i++) q->digits = moei_larger_size(q->digits, moei_strlen(moei_number(room, at, decimals)));
    q->left = (double)q->digits * moei_char + 8.0;
    q->top = q->f->value_label != NULL ? moei_line_height + 8.0 : 8.0;
    q->width = moei_phone;
    q->cell_w = q->width - q->left - 8.0;
    q->height = q->top + moei_plot_height + moei_line_height * 2.0 + 4.0;
    q->height += (double)(moei_legend_lines(q) + (q->f->rows > MOEI_NAMED_LINES) + (size_t)moei_has_reference(q)) * moei_line_height;
}

static double moei_y_of(const moei_plot *q, double value) { return q->top + (1.0 - moei_plot_share(q, value)) * moei_plot_height; }

/* One point of a curve; *on: the pen is down. */
static void moei_point(moei_plot *q, const moei_plot *x, size_t row, size_t column, int *on) {
    double value, at = moei_x(q->f, column);
    if (!moei_value(q->f, row, column, &value) || !moei_is_number(at)) return;
    moei_draw(q->p, *on ? "L%c %c" : "M%c %ch.1", q->left + moei_plot_share(x, at) * q->cell_w, moei_y_of(q, value)); /* h: a point alone is a dot */
    *on = 1;
}

/* Of many points the lowest and the highest of each bucket, in their order. */
static void moei_draw_curve(moei_plot *q, const moei_plot *x, size_t row) {
    size_t n = q->f->columns, step = n > 2 * MOEI_BUCKETS ? (n - 1) / MOEI_BUCKETS + 1 : 1, c, i;
    double value, low, high;
    int on = 0;
    moei_draw(q->p, "<path class=\"l s%d d%d\" d=\"", (int)(row % 8), moei_dash(row));
    for (c = 0; c < n; c += step) {
        size_t lowest = c, highest = c, any = 0;
        low = high = 0.0;
        for (i = c; i < moei_least(c + step, n); i++) {
            if (!moei_value(q->f, row, i, &value)) continue;
            if (!any || value < low) low = value, lowest = i;
            if (!any || value > high) high = value, highest = i;
            any = 1;
        }
        moei_point(q, x, row, lowest < highest ? lowest : highest, &on);
        if (lowest != highest) moei_point(q, x, row, lowest < highest ? highest : lowest, &on);
    }
    moei_draw(q->p, "\"/>\n");
}

static void moei_draw_axes(moei_plot *q, const moei_plot *x) {
    char room[48];
    double at, bottom = q->top + moei_plot_height, y;
    int i, decimals = moei_mark_decimals(q, 5.0), x_decimals = moei_mark_decimals(x, 4.0);
    if (q->f->value_label != NULL) moei_write_at(q, 0.0, 14.0, "m", q->f->value_label, 44);
    for (i = 0; moei_plot_mark(q, 5.0, i, &at); i++) {
        y = moei_y_of(q, at);
        moei_line_at(q, q->left, y, q->left + q->cell_w, y, "g");
        moei_write_at(q, q->left - 6.0, y + 4.5, "m r", moei_number(room, at, decimals), 20);
    }
    for (i = 0; moei_plot_mark(x, 4.0, i, &at); i++) {
        double where = q->left + moei_plot_share(x, at) * q->cell_w;
        moei_line_at(q, where, bottom, where, bottom + 4.0, "a");
        moei_write_at(q, where, bottom + 17.0, where > q->width - 30.0 ? "m r" : "m n", moei_number(room, at, x_decimals), 20);
    }
    moei_write_at(q, q->left + q->cell_w / 2.0, bottom + 34.0, "m n", moei_column_label(q), 40);
    moei_line_at(q, q->left, bottom, q->left + q->cell_w, bottom, "a");
}

static void moei_draw_lines(moei_plot *q) {
    char room[48];
    moei_plot x = *q;
    size_t r;
    double y = q->top + moei_plot_height + 40.0, at;
    moei_measure_x(&x);
    moei_draw_axes(q, &x);
    if (moei_has_reference(q)) {
        at = moei_y_of(q, q->f->reference);
        moei_line_at(q, q->left, at, q->left + q->cell_w, at, "a d1");
        moei_line_at(q, q->left, y + 7.5, q->left + 32.0, y + 7.5, "a d1");
        moei_draw(q->p, "<text x=\"%c\" y=\"%c\" class=\"m\">", q->left + 40.0, y + 12.0);
        (void)moei_pen_clip(q->p, moei_label(q->f->reference_name, "reference"), 24);
        moei_draw(q->p, ": %s</text>\n", moei_number(room, q->f->reference, moei_mark_decimals(q, 5.0) + 1)), y += moei_line_height;
    }
    for (r = 0; r < q->f->rows; r++) moei_draw_curve(q, &x, r);
    for (r = 0; r < moei_legend_lines(q); r++, y += moei_line_height) {
        moei_draw(q->p, "<path d=\"M%c %ch32\" class=\"l s%d d%d\"/>", q->left, y + 7.5, (int)(r % 8), moei_dash(r));
        moei_write_at(q, q->left + 40.0, y + 12.0, "", moei_row_name(q, r, room), 32);
    }
    if (q->f->rows > MOEI_NAMED_LINES) moei_draw(q->p, "<text x=\"%c\" y=\"%c\" class=\"m\">and %z more</text>\n", q->left, y + 12.0, q->f->rows - MOEI_NAMED_LINES);
}

/* From where to where each curve runs. */
static void moei_tell_lines(moei_plot *q) {
    char room[48];
    size_t r, c;
    double value;
    moei_figure_measure(q, SIZE_MAX);
    moei_draw(q->p, "%z series of %z points. ", q->f->rows, q->f->columns);
    for (r = 0; r < moei_least(q->f->rows, MOEI_NAMED_LINES); r++) {
        double first = 0.0, last = 0.0, least = 0.0, most = 0.0;
        int any = 0;
        for (c = 0; c < q->f->columns; c++) {
            if (!moei_value(q->f, r, c, &value)) continue;
            first = any ? first : value, last = value;
            least = !any || value < least ? value : least, most = !any || value > most ? value : most;
            any = 1;
        }
        moei_draw(q->p, "%t: ", moei_row_name(q, r, room));
        if (!any) moei_draw(q->p, "no values. ");
        else {
            moei_draw(q->p, "from %s ", moei_number(room, first, q->decimals));
            moei_draw(q->p, "to %s, ", moei_number(room, last, q->decimals));
            moei_draw(q->p, "least %s, ", moei_number(room, least, q->decimals));
            moei_draw(q->p, "most %s. ", moei_number(room, most, q->decimals));
        }
    }
}

/* ---- texts coloured by expert -------------------------------------------------------------------------------------------------------- */

/* The token's text; white space that would not be seen is a sign. */
static const char *moei_token_text(const moei_plot *q, size_t i, char room[48]) {
    const char *s = moei_name(q->f->column_names, NULL, i, room);
    if (*s == '\n' || *s == '\r') return "\\n";
    if (*s == '\t') return "\\t";
    if (*s == '\0' || (*s == ' ' && s[1] == '\0')) return "\xC2\xB7";
    return s;
}

static int moei_token_breaks(const moei_plot *q, size_t i) {
    const char *s = q->f->column_names != NULL && q->f->column_names[i] != NULL ? q->f->column_names[i] : "";
    while (*s != '\0' && *s != '\n') s++;
    return *s == '\n';
}

static double moei_token_width(const moei_plot *q, size_t i) {
    char room[48];
    size_t width = moei_least(moei_text_width(moei_token_text(q, i, room)), 36);
    return (double)moei_larger_size(width, moei_digits_of(q->n_experts)) * 8.0 + 8.0;
}

/* Tokens one after another as writing goes, each over a chip per layer; returns the height. */
static double moei_token_flow(moei_plot *q, int draw) {
    char room[48];
    double x = 0.0, y = 2.0, line = 22.0 + (double)q->rows * 20.0 + 6.0, value;
    size_t i, r;
    for (i = 0; i < q->columns; i++) {
        double width = moei_token_width(q, i);
        if (x > 0.0 && x + width > q->width) x = 0.0, y += line;
        if (draw) {
            moei_draw(q->p, "<text x=\"%c\" y=\"%c\" class=\"k\">", x + 4.0, y + 15.0);
            (void)moei_pen_clip(q->p, moei_token_text(q, i, room), 36), moei_draw(q->p, "</text>");
        }
        for (r = 0; draw && r < q->rows; r++) {
            double at = y + 20.0 + 20.0 * (double)r;
            moei_chip(q, x + 1.0, at, width - 2.0, 17.0, moei_figure_expert(q, r, i));
            if (moei_value(q->f, r, i, &value) && moei_figure_expert(q, r, i) >= 0)
                moei_rect(q, x + 1.0, at + 16.0, (width - 2.0) * (value < 0.0 ? 0.0 : value > 1.0 ? 1.0 : value), 2.5, "u", -1);
        }
        x += width;
        if (moei_token_breaks(q, i)) x = q->width;
    }
    return y + line;
}

static void moei_plan_tokens(moei_plot *q) {
    moei_count_experts(q);
    moei_thin(q, SIZE_MAX, SIZE_MAX);
    q->columns = moei_least(q->columns, MOEI_TOKENS_MOST), q->rows = moei_least(q->rows, 64);
    q->width = moei_phone;
    q->top = moei_token_flow(q, 0);
    q->height = q->top + moei_legend(q, 0.0, 0) + moei_line_height * 2.0;
}

/* What the strips under a token are. */
static void moei_tell_strips(moei_plot *q) {
    char room[48];
    if (q->f->rows == 1) moei_draw(q->p, "Under each token: its expert");
    else moei_draw(q->p, "Under each token: its expert in %t", moei_row_name(q, 0, room)), moei_draw(q->p, " to %t", moei_row_name(q, q->rows - 1, room));
    if (q->f->values != NULL) moei_draw(q->p, "; line: weight");
}

static void moei_draw_tokens(moei_plot *q) {
    (void)moei_token_flow(q, 1);
    (void)moei_legend(q, q->top, 1);
    moei_draw(q->p, "<text y=\"%c\" class=\"m\">", q->height - moei_line_height - 6.0), moei_tell_strips(q), moei_draw(q->p, "</text>\n");
    if (q->columns < q->f->columns) moei_draw(q->p, "<text y=\"%c\" class=\"m\">The first %z of %z tokens</text>\n", q->height - 4.0, q->columns, q->f->columns);
}

static void moei_tell_experts(moei_plot *q) {
    char room[48];
    size_t r, e, groups = q->kind->turned ? q->rows : moei_least(q->rows, 1);
    for (r = 0; r < groups; r++) {
        if (q->kind->turned) moei_draw(q->p, "%t: ", moei_row_name(q, r, room));
        for (e = 0; e < moei_least(q->n_experts, MOEI_LEGEND_MOST); e++) {
            double share = moei_expert_share(q, q->kind->turned ? r : SIZE_MAX, (int32_t)e);
            if (share > 0.0) moei_draw(q->p, "expert %z %s %%, ", e, moei_number(room, 100.0 * share, 1));
        }
        moei_draw(q->p, "no other. ");
    }
}

/* ---- tables -------------------------------------------------------------------------------------------------------------------------- */

enum { MOEI_CELL_MOST = 30, MOEI_HEAD_MOST = 24 };

static const char *moei_cell_text(const moei_plot *q, size_t row, size_t column) { return q->f->cells != NULL ? q->f->cells[moei_at(q->f, row, column)] : NULL; }

/* Whether a cell stands at the left: it is words, and no number. */
static int moei_is_words(const moei_plot *q, size_t row, size_t column) {
    const char *text = moei_cell_text(q, row, column);
    return text != NULL && *text != '\0' && moei_memchr("0123456789+-.<>", *text, 15) == NULL;
}

static void moei_draw_cell(moei_plot *q, size_t row, size_t column, size_t most) {
    const char *text = moei_cell_text(q, row, column);
    double value;
    if (text != NULL) (void)moei_pen_clip(q->p, text, most);
    else if (moei_value(q->f, row, column, &value)) moei_draw_value(q, value, moei_figure_spread(q->f, row, column));
    else moei_draw(q->p, "-");
}

static size_t moei_cell_width(const moei_plot *q, size_t row, size_t column) {
    const char *text = moei_cell_text(q, row, column);
    double value;
    if (text != NULL) return moei_least(moei_text_width(text), MOEI_CELL_MOST);
    return moei_value(q->f, row, column, &value) ? moei_value_width(q, value, moei_figure_spread(q->f, row, column)) : 1;
}

/* The width of a column with its name; sets how its numbers are written. *texts: one of its cells is a text. */
static size_t moei_column_width(moei_plot *q, size_t column, int *texts) {
    char room[48];
    size_t width = moei_least(moei_text_width(moei_name(q->f->column_names, q->f->column_label, column, room)), MOEI_HEAD_MOST), r;
    moei_figure_measure(q, column);
    *texts = 0;
    for (r = 0; r < q->rows; r++) {
        width = moei_larger_size(width, moei_cell_width(q, r, column));
        *texts = *texts || moei_is_words(q, r, column);
    }
    return width;
}

/* Column by column, so that each is measured once; returns the width. */
static double moei_columns(moei_plot *q, int draw) {
    char room[48];
    double x = q->left;
    size_t r, c;
    int texts;
    for (c = 0; c < q->columns; c++) {
        double width = (double)moei_column_width(q, c, &texts) * moei_char, at = texts ? x : x + width;
        if (draw) moei_write_at(q, at, 16.0, texts ? "m" : "m r", moei_name(q->f->column_names, q->f->column_label, c, room), MOEI_HEAD_MOST);
        for (r = 0; draw && r < q->rows; r++) {
            moei_draw(q->p, "<text x=\"%c\" y=\"%c\"%s>", at, (double)r * 24.0 + 41.0, texts ? "" : " class=\"r\"");
            moei_draw_cell(q, r, c, MOEI_CELL_MOST), moei_draw(q->p, "</text>\n");
        }
        x += width + 14.0;
    }
    return x - 14.0;
}

static void moei_plan_table(moei_plot *q) {
    moei_thin(q, SIZE_MAX, SIZE_MAX);
    q->rows = moei_least(q->rows, 256), q->columns = moei_least(q->columns, 64);
    moei_measure_names(q, MOEI_CELL_MOST);
    q->left = (double)moei_larger_size(q->names, moei_text_width(moei_label(q->f->row_label, ""))) * moei_char + 14.0;
    q->width = moei_larger(moei_columns(q, 0), moei_phone);
    q->height = (double)q->rows * 24.0 + 32.0 + (q->rows < q->f->rows || q->columns < q->f->columns ? moei_line_height : 0.0);
}

static void moei_draw_table(moei_plot *q) {
    char room[48];
    size_t r;
    moei_write_at(q, 0.0, 16.0, "m", moei_label(q->f->row_label, ""), MOEI_CELL_MOST);
    for (r = 0; r < q->rows; r++) {
        moei_line_at(q, 0.0, (double)r * 24.0 + 24.5, q->width, (double)r * 24.0 + 24.5, "g");
        moei_write_at(q, 0.0, (double)r * 24.0 + 41.0, "", moei_name(q->f->row_names, NULL, r, room), q->names);
    }
    (void)moei_columns(q, 1);
    if (q->rows < q->f->rows || q->columns < q->f->columns)
        moei_draw(q->p, "<text y=\"%c\" class=\"m\">The first %z of %z rows, %z of %z columns</text>\n", q->height - 4.0, q->rows,
                  q->f->rows, q->columns, q->f->columns);
}

/* ---- regions ------------------------------------------------------------------------------------------------------------------------- */

static void moei_plan_map(moei_plot *q) {
    moei_count_experts(q);
    moei_thin(q, 128, 128);
    q->left = q->f->y != NULL ? 48.0 : q->f->row_label != NULL ? 8.0 : 0.0;
    q->top = q->f->row_label != NULL ? moei_line_height + 4.0 : 2.0;
    q->width = moei_phone;
    q->cell_w = (q->width - q->left) / (double)q->columns;
    q->cell_h = moei_smaller(q->cell_w, 340.0 / (double)q->rows);
    q->height = q->top + (double)q->rows * q->cell_h + (q->f->x != NULL || q->f->column_label != NULL ? 2.0 * moei_line_height : 0.0) + 8.0 + moei_legend(q, 0.0, 0);
}

/* The end of the run of one expert that begins at a cell. */
static size_t moei_map_run(const moei_plot *q, size_t row, size_t column) {
    int32_t e = moei_figure_expert(q, row, column);
    size_t end = column + 1;
    while (end < q->columns && moei_figure_expert(q, row, end) == e) end++;
    return end;
}

/* An expert's number stands where it has most room: in the middle of the rows that its longest run is about as long in. */
static void moei_name_region(moei_plot *q, int32_t e) {
    char room[48];
    size_t r, c, end, length = 0, first = 0, from = 0, rows = 0;
    for (r = 0; r < q->rows; r++)
        for (c = 0; c < q->columns; c = end) {
            end = moei_map_run(q, r, c);
            if (moei_figure_expert(q, r, c) != e) continue;
            if (end - c > length + length / 8) length = end - c, from = c, first = r, rows = 1;
            else if (r == first + rows && c < from + length / 2 && end > from + length / 2 && end - c + length / 8 >= length) rows++;
        }
    if ((double)length * q->cell_w >= 10.0)
        moei_write_at(q, q->left + ((double)from + (double)length / 2.0) * q->cell_w, q->top + ((double)first + (double)rows / 2.0) * q->cell_h + 4.5, "e n",
                     moei_number(room, (double)e, 0), 9);
}

static void moei_draw_map_axes(moei_plot *q) {
    char room[48];
    moei_plot x = *q;
    double bottom = q->top + (double)q->rows * q->cell_h, low, high;
    int decimals;
    moei_write_at(q, 0.0, 14.0, "m", moei_label(q->f->row_label, ""), 44);
    moei_write_at(q, (q->left + q->width) / 2.0, bottom + 18.0, "m n", moei_label(q->f->column_label, ""), 24);
    if (q->f->x != NULL) {
        moei_measure_x(&x), decimals = moei_mark_decimals(&x, 5.0);
        moei_write_at(q, q->left, bottom + 18.0, "m", moei_number(room, q->f->x[0], decimals), 12);
        moei_write_at(q, q->width, bottom + 18.0, "m r", moei_number(room, q->f->x[q->f->columns - 1], decimals), 12);
    }
    if (q->f->y == NULL) return;
    low = q->f->y[q->f->rows - 1], high = q->f->y[0], x.any = 0;
    moei_include(&x, low), moei_include(&x, high), moei_widen(&x), decimals = moei_mark_decimals(&x, 5.0);
    moei_write_at(q, q->left - 6.0, q->top + 12.0, "m r", moei_number(room, high, decimals), 12);
    moei_write_at(q, q->left - 6.0, bottom, "m r", moei_number(room, low, decimals), 12);
}

static void moei_draw_map(moei_plot *q) {
    size_t r, c, end, e;
    if (q->n_experts > MOEI_TINTS) /* tints come again with stripes */
        moei_draw(q->p, "<pattern id=\"h%z\" width=\"7\" height=\"7\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">"
                        "<path d=\"M0 0V7\" class=\"a\"/></pattern>\n",
                  q->number);
    for (r = 0; r < q->rows; r++) {
        for (c = 0; c < q->columns; c = end) {
            int32_t there = moei_figure_expert(q, r, c);
            double x = q->left + (double)c * q->cell_w, y = q->top + (double)r * q->cell_h;
            end = moei_map_run(q, r, c);
            if (there >= 0) moei_rect(q, x, y, (double)(end - c) * q->cell_w + 0.2, q->cell_h + 0.2, "z c", (int)(there % MOEI_TINTS)); /* without gaps */
            if (there >= MOEI_TINTS)
                moei_draw(q->p, "<rect x=\"%c\" y=\"%c\" width=\"%c\" height=\"%c\" fill=\"url(#h%z)\"/>", x, y, (double)(end - c) * q->cell_w, q->cell_h, q->number);
        }
        moei_draw(q->p, "\n");
    }
    for (e = 0; e < moei_least(q->n_experts, MOEI_LEGEND_MOST); e++) moei_name_region(q, (int32_t)e);
    moei_draw_map_axes(q);
    (void)moei_legend(q, q->height - moei_legend(q, 0.0, 0) + 2.0, 1);
}

static void moei_tell_table(moei_plot *q) { moei_draw(q->p, "A table of %z rows and %z columns.", q->f->rows, q->f->columns); }

/* ---- text ---------------------------------------------------------------------------------------------------------------------------- */

/* A text in a field: right of the spaces, or left of them. */
static void moei_field_text(moei_plot *q, const char *s, size_t width, int right) {
    size_t taken = moei_least(moei_text_width(s), width);
    if (right) moei_pen_repeat(q->p, " ", width - taken);
    taken = right ? width : taken, (void)moei_pen_clip(q->p, s, width);
    moei_pen_repeat(q->p, " ", width - taken);
}

static void moei_text_paragraph(moei_plot *q, const char *s, size_t columns) {
    while (s != NULL && *s != '\0') {
        const char *next, *end = moei_wrap(s, columns, &next);
        while (s < end) moei_pen_char(q->p, moei_next_shown(&s));
        moei_draw(q->p, "\n");
        s = next;
    }
}

/* Colours of terminals behind black or white text; the end of them. */
static void moei_shade(moei_plot *q, int colour, int white) {
    if (q->p->colour) moei_draw(q->p, "\x1b[48;5;%d;38;5;%dm", colour, white ? 231 : 16);
}

static void moei_unshade(moei_plot *q) {
    if (q->p->colour) moei_draw(q->p, "\x1b[0m");
}

static const unsigned char moei_terminal_tints[MOEI_TINTS] = {153, 216, 157, 218, 228, 252, 159, 183, 75, 173, 78, 175, 178, 247, 80, 141};
static const unsigned char moei_terminal_levels[MOEI_LEVELS] = {255, 195, 153, 117, 81, 74, 68, 25, 24, 17};
static const char moei_shades[MOEI_LEVELS + 1] = " .:-=+*#%@";

static void moei_heat_cell(moei_plot *q, size_t r, size_t c, size_t cell) {
    char room[48];
    double value;
    int there = moei_mean(q, r, c, &value), level = there ? moei_level(q, value) : 0;
    if (there) moei_shade(q, moei_terminal_levels[level], level > 6);
    if (q->numbers) moei_field_text(q, there ? moei_number(room, value, q->decimals) : "-", cell, 1);
    else moei_pen_put(q->p, there ? moei_shades + (q->p->colour ? 0 : level) : "?", 1);
    if (there) moei_unshade(q);
}

static void moei_text_heat(moei_plot *q, size_t columns) {
    char room[48];
    size_t r, c, cell;
    moei_thin(q, 200, SIZE_MAX);
    moei_figure_measure(q, SIZE_MAX);
    moei_from_zero(q);
    moei_measure_names(q, 16);
    q->names = moei_larger_size(q->names, moei_least(moei_text_width(moei_row_label(q)), 16));
    cell = moei_larger_size(q->digits, moei_least(q->heads, 8)) + 2;
    q->numbers = q->row_step == 1 && q->f->columns <= (columns - q->names) / cell;
    if (!q->numbers) moei_thin(q, 200, columns - q->names - 2);
    moei_field_text(q, "", q->names + 2, 0), moei_draw(q->p, "%t\n", moei_column_label(q));
    moei_field_text(q, moei_row_label(q), q->names, 0);
    for (c = 0; q->numbers && c < q->columns; c++) moei_draw(q->p, "  "), moei_field_text(q, moei_name(q->f->column_names, NULL, c, room), cell - 2, 1);
    moei_draw(q->p, "\n");
    for (r = 0; r < q->rows; r++) {
        moei_field_text(q, moei_name(q->f->row_names, NULL, r * q->row_step, room), q->names, 1);
        if (!q->numbers) moei_draw(q->p, "  ");
        for (c = 0; c < q->columns; c++) moei_heat_cell(q, r, c, cell);
        moei_draw(q->p, "\n");
    }
    if (q->numbers || !q->any) return;
    moei_draw(q->p, "from %s ", moei_number(room, q->low, q->decimals));
    moei_draw(q->p, "(%s) to %s (%s)\n", q->p->colour ? "light" : "blank", moei_number(room, q->high, q->decimals), q->p->colour ? "dark" : "@");
}

static void moei_text_bar(moei_plot *q, size_t row, size_t column, size_t width) {
    double value, zero = moei_plot_share(q, 0.0) * (double)width, end, at;
    size_t i, last = 0, mark = moei_has_reference(q) ? (size_t)(moei_plot_share(q, q->f->reference) * ((double)width - 1.0) + 0.5) : width;
    int there = moei_mean(q, row, column, &value);
    end = there ? moei_plot_share(q, value) * (double)width : zero;
    for (i = 0; i < width; i++) {
        at = (double)i + 0.5;
        if (i == mark || (at > zero && at < end) || (at < zero && at > end))
            moei_pen_repeat(q->p, " ", i - last), moei_draw(q->p, i == mark ? "|" : "#"), last = i + 1;
    }
    moei_draw(q->p, "\n");
}

static void moei_text_bars(moei_plot *q, size_t columns) {
    char room[48];
    size_t r, c, width, heads;
    double value;
    moei_thin(q, 200, SIZE_MAX);
    moei_measure_bars(q);
    moei_measure_names(q, 20);
    moei_measure_values(q);
    q->names = moei_larger_size(q->names, moei_least(moei_text_width(moei_label(moei_row_label(q), "")), 20));
    heads = q->columns > 1 ? moei_least(q->heads, 12) + 2 : 0;
    q->digits = moei_least(q->digits, 24);
    width = columns > q->names + heads + q->digits + 12 ? columns - q->names - heads - q->digits - 4 : 8;
    moei_field_text(q, q->f->row_names == NULL ? moei_label(moei_row_label(q), "") : "", q->names, 0);
    moei_field_text(q, "", heads + 2, 0), moei_draw(q->p, "%t\n", moei_label(q->f->value_label, ""));
    for (r = 0; r < q->rows; r++)
        for (c = 0; c < q->columns; c++) {
            double spread = q->row_step == 1 ? moei_figure_spread(q->f, r, c) : -1.0;
            int there = moei_mean(q, r, c, &value);
            moei_field_text(q, c == 0 ? moei_name(q->f->row_names, NULL, r * q->row_step, room) : "", q->names, q->f->row_names == NULL);
            if (heads > 0) moei_draw(q->p, "  "), moei_field_text(q, moei_name(q->f->column_names, NULL, c, room), heads - 2, 0);
            moei_pen_repeat(q->p, " ", 2 + q->digits - moei_least(there ? moei_value_width(q, value, spread) : 1, q->digits));
            if (there) moei_draw_value(q, value, spread);
            else moei_draw(q->p, "-");
            moei_draw(q->p, "  "), moei_text_bar(q, r, c, width);
        }
    if (moei_has_reference(q)) moei_draw(q->p, "|: %t, %s\n", moei_label(q->f->reference_name, "reference"), moei_number(room, q->f->reference, q->decimals));
}

enum { MOEI_TEXT_HEIGHT = 15, MOEI_TEXT_WIDTH = 400 };
static const char moei_marks[] = "*+ox#@%&abcdefghijklmnpqrstuvwyz";

/* A curve into the picture of characters: straight lines between its points. */
static void moei_text_curve(const moei_plot *q, const moei_plot *x, size_t row, size_t width, char *picture) {
    double value, last_x = 0.0, last_y = 0.0;
    size_t c;
    int on = 0;
    for (c = 0; c < q->f->columns; c++) {
        double at = moei_x(q->f, c), px, py;
        size_t i, steps;
        if (!moei_value(q->f, row, c, &value) || !moei_is_number(at)) continue;
        px = moei_plot_share(x, at) * (double)(width - 1), py = (1.0 - moei_plot_share(q, value)) * (double)(MOEI_TEXT_HEIGHT - 1);
        steps = on ? (size_t)(px > last_x ? px - last_x : last_x - px) + 1 : 1;
        for (i = 1; i <= steps; i++) {
            double share = on ? (double)i / (double)steps : 1.0;
            size_t to_x = (size_t)(px * share + last_x * (1.0 - share) + 0.5), to_y = (size_t)(py * share + last_y * (1.0 - share) + 0.5);
            picture[to_y * MOEI_TEXT_WIDTH + to_x] = moei_marks[row % (sizeof moei_marks - 1)];
        }
        last_x = px, last_y = py, on = 1;
    }
}

static void moei_text_lines(moei_plot *q, size_t columns) {
    char picture[MOEI_TEXT_HEIGHT * MOEI_TEXT_WIDTH], room[48];
    moei_plot x = *q;
    size_t r, i, width;
    int decimals;
    moei_plan_lines(q);
    moei_measure_x(&x);
    decimals = moei_mark_decimals(q, 5.0);
    q->digits = moei_larger_size(moei_strlen(moei_number(room, q->low, decimals)), moei_strlen(moei_number(room, q->high, decimals)));
    width = columns - moei_least(q->digits, 20) - 2;
    memset(picture, ' ', sizeof picture);
    for (r = q->f->rows; r > 0; r--) moei_text_curve(q, &x, r - 1, width, picture); /* the first on top */
    if (q->f->value_label != NULL) moei_draw(q->p, "%t\n", q->f->value_label);
    for (i = 0; i < MOEI_TEXT_HEIGHT; i++) {
        double share = 1.0 - (double)i / (double)(MOEI_TEXT_HEIGHT - 1);
        size_t end = width;
        while (end > 0 && picture[i * MOEI_TEXT_WIDTH + end - 1] == ' ') end--;
        moei_field_text(q, i % 7 == 0 ? moei_number(room, q->low * (1.0 - share) + q->high * share, decimals) : "", q->digits, 1);
        moei_draw(q->p, end > 0 ? " |" : " |\n"), moei_pen_put(q->p, picture + i * MOEI_TEXT_WIDTH, end);
        if (end > 0) moei_draw(q->p, "\n");
    }
    decimals = moei_mark_decimals(&x, 4.0);
    moei_field_text(q, "", q->digits + 2, 0), moei_draw(q->p, "%t: from %s ", moei_column_label(q), moei_number(room, x.low, decimals));
    moei_draw(q->p, "to %s\n", moei_number(room, x.high, decimals));
    for (r = 0; r < moei_legend_lines(q); r++) {
        room[0] = moei_marks[r % (sizeof moei_marks - 1)], room[1] = '\0';
        moei_field_text(q, room, q->digits + 1, 1), moei_draw(q->p, " %t\n", moei_row_name(q, r, room));
    }
    if (moei_has_reference(q))
        moei_draw(q->p, "%t: %s\n", moei_label(q->f->reference_name, "reference"), moei_number(room, q->f->reference, moei_mark_decimals(q, 5.0) + 1));
}

static size_t moei_gloss_width(const moei_plot *q, size_t i) {
    char room[48];
    return moei_larger_size(moei_least(moei_text_width(moei_token_text(q, i, room)), 36), moei_digits_of(q->n_experts)) + 1;
}

/* Tokens, and under them the numbers of their experts. */
static void moei_text_tokens(moei_plot *q, size_t columns) {
    char room[48];
    size_t c, r, end, width;
    moei_plan_tokens(q);
    q->columns = q->f->columns, q->rows = q->f->rows;
    for (c = 0; c < q->columns; c = end) {
        for (end = c, width = 0; end < q->columns && (end == c || (width + moei_gloss_width(q, end) <= columns && !moei_token_breaks(q, end - 1))); end++)
            width += moei_gloss_width(q, end);
        for (r = 0; r <= q->rows; r++) {
            size_t i;
            for (i = c; i < end; i++) {
                int32_t e = r > 0 ? moei_figure_expert(q, r - 1, i) : moei_figure_expert(q, 0, i);
                if (e >= 0 && (r > 0 || q->rows == 1)) moei_shade(q, moei_terminal_tints[e % MOEI_TINTS], 0);
                if (r == 0) moei_field_text(q, moei_token_text(q, i, room), moei_gloss_width(q, i) - 1, 0);
                else moei_field_text(q, e >= 0 ? moei_number(room, (double)e, 0) : "-", moei_gloss_width(q, i) - 1, 0);
                if (e >= 0 && (r > 0 || q->rows == 1)) moei_unshade(q);
                moei_draw(q->p, i + 1 < end ? " " : "\n");
            }
        }
        moei_draw(q->p, "\n");
    }
    moei_tell_strips(q), moei_draw(q->p, "\n");
}

/* As many columns as there is room for, then the next ones. */
static void moei_text_table(moei_plot *q, size_t columns) {
    char room[48];
    size_t widths[64], from, c, r, end, width;
    int texts[64], decimals[64];
    moei_thin(q, SIZE_MAX, SIZE_MAX);
    q->columns = 0;
    moei_measure_names(q, MOEI_CELL_MOST);
    q->names = moei_larger_size(q->names, moei_least(moei_text_width(moei_label(q->f->row_label, "")), MOEI_CELL_MOST));
    for (from = 0; from < q->f->columns; from = end) {
        for (end = from, width = q->names; end < q->f->columns && end - from < 64; end++) {
            widths[end - from] = moei_column_width(q, end, &texts[end - from]), decimals[end - from] = q->decimals;
            if (end > from && width + widths[end - from] + 2 > columns) break;
            width += widths[end - from] + 2;
        }
        if (from > 0) moei_draw(q->p, "\n");
        moei_field_text(q, moei_label(q->f->row_label, ""), q->names, 0);
        for (c = from; c < end; c++)
            moei_draw(q->p, "  "), moei_field_text(q, moei_name(q->f->column_names, q->f->column_label, c, room), widths[c - from], !texts[c - from]);
        moei_draw(q->p, "\n"), moei_pen_repeat(q->p, "-", moei_least(width, columns)), moei_draw(q->p, "\n");
        for (r = 0; r < q->f->rows; r++) {
            moei_field_text(q, moei_name(q->f->row_names, NULL, r, room), q->names, 0);
            for (c = from; c < end; c++) {
                size_t blank = widths[c - from];
                q->decimals = decimals[c - from];
                blank -= moei_least(moei_cell_width(q, r, c), blank);
                moei_pen_repeat(q->p, " ", 2 + (texts[c - from] ? 0 : blank)), moei_draw_cell(q, r, c, widths[c - from]);
                if (texts[c - from]) moei_pen_repeat(q->p, " ", blank);
            }
            moei_draw(q->p, "\n");
        }
    }
}

static void moei_text_map(moei_plot *q, size_t columns) {
    static const char signs[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    size_t r, c;
    moei_thin(q, SIZE_MAX, columns);
    moei_thin(q, moei_least(moei_larger_size(q->f->rows / (2 * q->column_step), 1), columns), columns); /* characters are twice as high as wide */
    for (r = 0; r < q->rows; r++) {
        for (c = 0; c < q->columns; c++) {
            int32_t e = moei_figure_expert(q, r, c);
            if (e >= 0) moei_shade(q, moei_terminal_tints[e % MOEI_TINTS], 0);
            moei_pen_put(q->p, e < 0 ? " " : e < (int32_t)sizeof signs - 1 ? signs + e : "?", 1);
            if (e >= 0) moei_unshade(q);
        }
        moei_draw(q->p, "\n");
    }
    moei_count_experts(q);
    if (q->n_experts > 10) moei_draw(q->p, "a to z: 10 to 35, A to Z: 36 to 61, ?: others\n");
}

/* ---- the kinds ----------------------------------------------------------------------------------------------------------------------- */

static const moei_figure_kind moei_figure_kinds[MOE_FIGURE_COUNT] = {
    {"Values", "expert", "column", 0, moei_plan_heat, moei_draw_heat, moei_tell_cells, moei_text_heat},
    {"Bars", "expert", NULL, 0, moei_plan_bars, moei_draw_bars, moei_tell_cells, moei_text_bars},
    {"Curves", "series", "step", 1, moei_plan_lines, moei_draw_lines, moei_tell_lines, moei_text_lines},
    {"Tokens by expert", "layer", "token", 1, moei_plan_tokens, moei_draw_tokens, moei_tell_experts, moei_text_tokens},
    {"Table", NULL, NULL, 0, moei_plan_table, moei_draw_table, moei_tell_table, moei_text_table},
    {"Regions by expert", NULL, NULL, 0, moei_plan_map, moei_draw_map, moei_tell_experts, moei_text_map}};

/* Is the figure as moe_figure says? Its number in a page is told, or SIZE_MAX. */
static moe_status moei_figure_check(const moe_figure *f, size_t number, moe_error *error) {
    static const char *const wanted[] = {"values", "experts"};
    size_t stride = f->stride > 0 ? f->stride : f->columns, all;
    int lacks = -1, experts = f->kind == MOE_FIGURE_TOKENS || f->kind == MOE_FIGURE_MAP;
    if (f->kind < 0 || f->kind >= MOE_FIGURE_COUNT)
        return moei_error(error, MOE_ERR_ARGUMENT, "figure %z: kind = %d, must be one of MOE_FIGURE_, 0 to %d", number, f->kind, MOE_FIGURE_COUNT - 1);
    if (stride < f->columns) return moei_error(error, MOE_ERR_ARGUMENT, "figure %z: stride = %z, below columns = %z", number, stride, f->columns);
    if (!moei_mul(f->rows, stride, &all) || !moei_mul(all, sizeof(double), &all))
        return moei_error(error, MOE_ERR_OVERFLOW, "figure %z: %z rows of %z numbers are more than memory holds", number, f->rows, stride);
    if (f->rows == 0 || f->columns == 0) return MOE_OK;
    if (experts && f->experts == NULL) lacks = 1;
    if (!experts && f->values == NULL && (f->kind != MOE_FIGURE_TABLE || f->cells == NULL)) lacks = 0;
    if (lacks >= 0)
        return moei_error(error, MOE_ERR_ARGUMENT, "figure %z: %s is NULL, but there are %z rows and %z columns", number, wanted[lacks], f->rows, f->columns);
    if (f->kind == MOE_FIGURE_BARS && f->columns > 4) return moei_error(error, MOE_ERR_ARGUMENT, "figure %z: columns = %z, bars have 1 to 4", number, f->columns);
    return MOE_OK;
}

static moei_plot moei_plot_of(const moe_figure *f, moei_pen *p) {
    moei_plot q;
    memset(&q, 0, sizeof q);
    q.f = f, q.kind = &moei_figure_kinds[f->kind], q.p = p;
    q.rows = f->rows, q.columns = f->columns, q.row_step = q.column_step = 1;
    return q;
}

static int moei_is_empty(const moe_figure *f) { return f->rows == 0 || f->columns == 0; }
static const char *moei_title(const moe_figure *f) { return moei_label(f->title, moei_figure_kinds[f->kind].name); }

/* What a picture had to leave out. */
static void moei_tell_thinned(moei_plot *q) {
    if (q->row_step > 1 || q->column_step > 1) {
        moei_draw(q->p, q->f->kind == MOE_FIGURE_MAP ? "One of %z x %z cells is shown." : "Each is the mean of %z x %z.", q->row_step, q->column_step);
    } else if (q->f->kind == MOE_FIGURE_LINES && q->f->columns > 2 * MOEI_BUCKETS)
        moei_draw(q->p, "Lowest and highest of every %z points.", (q->f->columns - 1) / MOEI_BUCKETS + 1);
}

/* The picture: number SIZE_MAX alone, with its title, caption and style; else within a page. */
static void moei_picture(moei_plot *q, size_t number) {
    int alone = number == SIZE_MAX, thinned;
    double top, width;
    moei_plot tell;
    size_t columns;
    if (moei_is_empty(q->f)) q->width = moei_phone, q->height = 30.0;
    else q->kind->plan(q);
    tell = *q;
    columns = (size_t)(q->width / 6.9), width = q->width, q->number = number = alone ? 0 : number;
    thinned = q->row_step > 1 || q->column_step > 1 || (q->f->kind == MOE_FIGURE_LINES && q->f->columns > 2 * MOEI_BUCKETS);
    top = alone ? moei_paragraph(q, q->f->caption, moei_paragraph(q, moei_title(q->f), 0.0, "b", columns * 7 / 9, 0), "m", columns, 0) + 8.0 : 0.0;
    if (thinned) q->height += moei_line_height;
    moei_draw(q->p, "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"moe\" viewBox=\"%d %d %c %c\" ", alone ? -10 : 0, alone ? -6 : 0, width + (alone ? 20.0 : 0.0),
              top + q->height + (alone ? 12.0 : 0.0));
    if (alone) moei_draw(q->p, "width=\"%c\" height=\"%c\" ", width + 20.0, top + q->height + 12.0);
    moei_draw(q->p, "style=\"width:100%%;height:auto;max-width:%cpx;", width * 1.5);
    if (!alone && width > moei_phone + 1.0) moei_draw(q->p, "min-width:%cpx", width * 0.95);
    moei_draw(q->p, "\" role=\"img\" aria-labelledby=\"t%z d%z\"><title id=\"t%z\">%t</title><desc id=\"d%z\">", number, number, number, moei_title(q->f), number);
    if (moei_is_empty(q->f)) moei_draw(q->p, "There is nothing to show.");
    else q->kind->tell(&tell), moei_draw(q->p, " "), moei_tell_thinned(q);
    moei_draw(q->p, "</desc>\n");
    if (alone) {
        moei_draw(q->p, "<style>"), moei_style(q->p), moei_draw(q->p, "</style>\n");
        moei_rect(q, -10.0, -6.0, width + 20.0, top + q->height + 12.0, "bg", -1);
        (void)moei_paragraph(q, q->f->caption, moei_paragraph(q, moei_title(q->f), 0.0, "b", columns * 7 / 9, 1), "m", columns, 1);
    }
    moei_draw(q->p, "<g transform=\"translate(0 %c)\">\n", top);
    if (moei_is_empty(q->f)) moei_write_at(q, 0.0, 18.0, "m", "There is nothing to show.", 40);
    else q->kind->draw(q);
    if (thinned) moei_draw(q->p, "<text y=\"%c\" class=\"m\">", q->height - 4.0), moei_tell_thinned(q), moei_draw(q->p, "</text>");
    moei_draw(q->p, "</g></svg>\n");
}

/* ---- pages --------------------------------------------------------------------------------------------------------------------------- */

enum { MOEI_PAGE_ROWS = 1000, MOEI_PAGE_COLUMNS = 100 };

/* One cell of a table of numbers. */
static void moei_page_cell(moei_plot *q, size_t row, size_t column) {
    double value;
    int experts = q->f->kind == MOE_FIGURE_TOKENS || q->f->kind == MOE_FIGURE_MAP;
    if (!experts) moei_draw(q->p, moei_is_words(q, row, column) ? "<td class=\"q\">" : "<td>"), moei_draw_cell(q, row, column, SIZE_MAX);
    else {
        int32_t e = q->f->experts[moei_at(q->f, row, column)];
        char room[48];
        moei_draw(q->p, "<td>%s", e < 0 ? "-" : moei_number(room, (double)e, 0));
        if (e >= 0 && moei_value(q->f, row, column, &value)) moei_draw(q->p, " (%s)", moei_number(room, value, q->decimals));
    }
}

/* The figure's numbers; turned: a row per column. */
static void moei_page_table(moei_plot *q) {
    char room[48];
    int turned = q->kind->turned, table = q->f->kind == MOE_FIGURE_TABLE, map = q->f->kind == MOE_FIGURE_MAP;
    size_t rows = turned ? q->f->columns : q->f->rows, columns = turned ? q->f->rows : q->f->columns, r, c;
    size_t row_step = (rows - 1) / (map ? 32 : MOEI_PAGE_ROWS) + 1, column_step = (columns - 1) / (map ? 32 : MOEI_PAGE_COLUMNS) + 1;
    int decimals[MOEI_PAGE_COLUMNS] = {0};
    const char *corner;
    for (c = 0; c * column_step < columns; c++) moei_figure_measure(q, table ? c * column_step : SIZE_MAX), decimals[c] = q->decimals;
    moei_draw(q->p, "<table><caption class=\"v\">%t: numbers</caption><thead><tr>", moei_title(q->f));
    corner = moei_label(turned ? moei_column_label(q) : moei_row_label(q), "");
    moei_draw(q->p, *corner != '\0' ? "<th scope=\"col\">%t</th>" : "<td></td>", corner);
    for (c = 0; c < columns; c += column_step)
        moei_draw(q->p, table && moei_is_words(q, 0, c) ? "<th scope=\"col\" class=\"q\">%t</th>" : "<th scope=\"col\">%t</th>",
                                                           turned ? moei_row_name(q, c, room) : moei_column_name(q, c, room));
    moei_draw(q->p, "</tr></thead><tbody>\n");
    for (r = 0; r < rows; r += row_step) {
        moei_draw(q->p, "<tr><th scope=\"row\">%t</th>", turned ? moei_column_name(q, r, room) : moei_row_name(q, r, room));
        for (c = 0; c < columns; c += column_step) {
            q->decimals = decimals[c / column_step];
            moei_page_cell(q, turned ? c : r, turned ? r : c);
            moei_draw(q->p, "</td>");
        }
        moei_draw(q->p, "</tr>\n");
    }
    moei_draw(q->p, "</tbody></table>\n");
    if (row_step > 1) moei_draw(q->p, "<p>One of %z rows is shown.</p>\n", row_step);
    if (column_step > 1) moei_draw(q->p, "<p>One of %z columns is shown.</p>\n", column_step);
}

/* Tokens as text that flows with the page. */
static void moei_page_tokens(moei_plot *q) {
    char room[48];
    size_t i, r;
    double value;
    q->kind->plan(q);
    moei_draw(q->p, "<div class=\"k\" role=\"img\" aria-label=\""), moei_tell_experts(q), moei_draw(q->p, "\">");
    for (i = 0; i < q->columns; i++) {
        moei_draw(q->p, "<span class=\"t\"><b>%t</b>", moei_token_text(q, i, room));
        for (r = 0; r < q->rows; r++) {
            int32_t e = moei_figure_expert(q, r, i);
            if (e < 0) moei_draw(q->p, "<i>-");
            else moei_draw(q->p, "<i class=\"e c%d\">%d", (int)(e % MOEI_TINTS), (int)e);
            if (e >= 0 && moei_value(q->f, r, i, &value)) moei_draw(q->p, "<u style=\"width:%c%%\"></u>", 100.0 * (value < 0.0 ? 0.0 : value > 1.0 ? 1.0 : value));
            moei_draw(q->p, "</i>");
        }
        moei_draw(q->p, moei_token_breaks(q, i) ? "</span><br>\n" : "</span>\n");
    }
    moei_draw(q->p, "</div>\n<p>"), moei_tell_strips(q), moei_draw(q->p, ".");
    if (q->columns < q->f->columns) moei_draw(q->p, " The first %z of %z tokens.", q->columns, q->f->columns);
    moei_draw(q->p, " Shares of the experts:</p>\n<p>");
    for (i = 0; i < moei_least(q->n_experts, MOEI_LEGEND_MOST); i++) {
        value = 100.0 * moei_expert_share(q, SIZE_MAX, (int32_t)i);
        if (value > 0.0 || q->f->n_experts > 0)
            moei_draw(q->p, "<span class=\"y\"><i class=\"e c%d\">%z</i> %s %%</span>\n", (int)(i % MOEI_TINTS), i, moei_number(room, value, 1));
    }
    moei_draw(q->p, "</p>\n");
}

static void moei_page_style(moei_pen *p) {
    moei_style(p);
    moei_draw(p, "body{margin:0;background:#f3f5f8;color:#1c2330;"
                 "font:16px/1.5 system-ui,-apple-system,\"Segoe UI\",Roboto,\"Noto Sans\",sans-serif}"
                 "main{max-width:1340px;margin:auto;padding:8px;display:grid;gap:12px;align-items:start;grid-auto-flow:dense;"
                 "grid-template-columns:repeat(auto-fill,minmax(min(100%%,364px),1fr))}"
                 "h1{grid-column:1/-1;font-size:1.6rem;line-height:1.25;margin:.6rem .4rem .2rem}"
                 "h2{font-size:1.1rem;line-height:1.3;margin:0}p{margin:.3rem 0 .6rem;color:#55606e;font-size:.9rem}"
                 "h1,h2,p{overflow-wrap:anywhere}"
                 "figure{box-sizing:border-box;margin:0;padding:8px;min-width:0;background:#fff;border:1px solid #d5dbe3;border-radius:10px}"
                 ".w{grid-column:1/-1}.box{overflow:auto;position:relative}.box:focus-visible{outline:3px solid #0b62b8;outline-offset:1px}"
                 "svg{display:block}details{margin-top:.4rem;font-size:.9rem}summary{cursor:pointer;padding:.25rem 0}"
                 "details .box{max-height:22rem}table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}"
                 "th,td{padding:.2rem .6rem;border-bottom:1px solid #d5dbe3;text-align:right;white-space:nowrap}"
                 "th:first-child,.q{text-align:left}td{vertical-align:top}td.q{white-space:normal;min-width:9rem;max-width:26rem}"
                 "th:first-child{padding-left:0}"
                 ".v{position:absolute;clip-path:inset(50%%);width:1px;height:1px;overflow:hidden;white-space:nowrap}"
                 ".t{display:inline-block;vertical-align:top;margin:0 1px 7px;font-size:14px;line-height:20px;text-align:center;"
                 "unicode-bidi:isolate}.t b{display:block;font-weight:400;padding:0 3px;white-space:pre;text-align:left}"
                 ".y{display:inline-block;width:6.2rem}.y i{display:inline-block;min-width:28px;text-align:center;font-style:normal}"
                 ".t i{display:block;position:relative;font:12px/18px system-ui,sans-serif;margin-bottom:2px;min-width:18px}"
                 ".t u{position:absolute;left:0;bottom:0;height:2px;background:currentColor}@media(min-width:780px){.w{grid-column:span 2}"
                 ".x{grid-column:1/-1}main{padding:16px}figure{padding:14px}}@media(prefers-color-scheme:dark){"
                 "body{background:#0f1216;color:#e8ecf1}p{color:#a9b3c0}figure{background:#171b21;border-color:#39424e}"
                 "th,td{border-color:#39424e}.box:focus-visible{outline-color:#6cb2ff}}");
}

static void moei_page_figure(moei_plot *q, size_t number) {
    moei_plot table = *q, look = *q;
    int empty = moei_is_empty(q->f), is_table = q->f->kind == MOE_FIGURE_TABLE && !empty, tokens = q->f->kind == MOE_FIGURE_TOKENS && !empty;
    if (!empty) q->kind->plan(&look);
    if (is_table) look.width *= 1.25; /* its text is larger */
    moei_draw(q->p, "<figure%s aria-labelledby=\"f%z\"><figcaption><h2 id=\"f%z\">%t</h2>\n",
              tokens || look.width > 800.0 ? " class=\"w x\"" : look.width > 380.0 ? " class=\"w\"" : "",
              number, number, moei_title(q->f));
    if (q->f->caption != NULL && *q->f->caption != '\0') moei_draw(q->p, "<p>%t</p>", q->f->caption);
    moei_draw(q->p, "</figcaption>\n");
    if (tokens) moei_page_tokens(q);
    else {
        moei_draw(q->p,
                  look.width > moei_phone + 1.0 || is_table ? "<div class=\"box\" tabindex=\"0\" role=\"group\" aria-labelledby=\"f%z\">\n" : "<div class=\"box\">\n", number);
        if (is_table) moei_page_table(q);
        else moei_picture(q, number);
        moei_draw(q->p, "</div>\n");
    }
    if (!empty && !is_table) {
        moei_draw(q->p, "<details><summary>Numbers</summary><div class=\"box\" tabindex=\"0\" role=\"group\" aria-label=\"Numbers: %t\">\n", moei_title(q->f));
        moei_page_table(&table);
        moei_draw(q->p, "</div></details>\n");
    }
    moei_draw(q->p, "</figure>\n");
}

/* ---- calls --------------------------------------------------------------------------------------------------------------------------- */

static moe_status moei_report_begin(moei_pen *p, const moe_figure *figures, size_t n, moe_stream *stream, moe_error *error) {
    size_t i;
    moe_status status = MOE_OK;
    if ((figures == NULL && n > 0) || stream == NULL || stream->write == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "figures and a stream that can be written must be there");
    for (i = 0; i < n && status == MOE_OK; i++) status = moei_figure_check(&figures[i], i, error);
    memset(p, 0, sizeof *p);
    p->stream = stream;
    return status;
}

static moe_status moei_report_end(moei_pen *p, moe_error *error) {
    moei_pen_flush(p);
    return p->status == MOE_OK ? MOE_OK : moei_error(error, p->status, "the stream failed: %s", moe_status_text(p->status));
}

moe_status moe_report_svg(const moe_figure *figure, moe_stream *stream, moe_error *error) {
    moei_pen p;
    moei_plot q;
    moe_status status = moei_report_begin(&p, figure, 1, stream, error);
    if (status != MOE_OK) return status;
    p.xml = 1, q = moei_plot_of(figure, &p);
    moei_picture(&q, SIZE_MAX);
    return moei_report_end(&p, error);
}

moe_status moe_report_html(const char *title, const moe_figure *figures, size_t n, moe_stream *stream, moe_error *error) {
    moei_pen p;
    moei_plot q;
    size_t i;
    moe_status status = moei_report_begin(&p, figures, n, stream, error);
    if (status != MOE_OK) return status;
    p.xml = 1, title = moei_label(title, "Report");
    moei_draw(&p, "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">"
                  "<meta name=\"color-scheme\" content=\"light dark\"><title>%t</title>\n<style>", title);
    moei_page_style(&p);
    moei_draw(&p, "</style></head>\n<body class=\"moe\"><main><h1>%t</h1>\n", title);
    for (i = 0; i < n; i++) q = moei_plot_of(&figures[i], &p), moei_page_figure(&q, i);
    moei_draw(&p, "</main></body></html>\n");
    return moei_report_end(&p, error);
}

static void moei_report_plain(const moe_figure *figure, moei_pen *p, size_t columns) {
    moei_plot q = moei_plot_of(figure, p);
    moei_text_paragraph(&q, moei_title(figure), columns);
    moei_text_paragraph(&q, figure->caption, columns);
    moei_draw(p, "\n");
    if (moei_is_empty(figure)) moei_draw(p, "There is nothing to show.\n");
    else q.kind->text(&q, columns);
    if (!moei_is_empty(figure) && (q.row_step > 1 || q.column_step > 1)) moei_tell_thinned(&q), moei_draw(p, "\n");
}

moe_status moe_report_text(const moe_figure *figure, int columns, int colour, moe_stream *stream, moe_error *error) {
    moei_pen p;
    moe_status status = moei_report_begin(&p, figure, 1, stream, error);
    if (status != MOE_OK) return status;
    if (columns != 0 && (columns < 40 || columns > 400)) return moei_error(error, MOE_ERR_ARGUMENT, "columns = %d, must be 0 or 40 to 400", columns);
    p.colour = colour;
    moei_report_plain(figure, &p, columns == 0 ? 80 : (size_t)columns);
    return moei_report_end(&p, error);
}

#ifndef MOE_NO_STDIO
typedef struct moei_report_file {
    const char *path, *title;
    const moe_figure *figures;
    size_t n;
    moe_error *error;
} moei_report_file;

static int moei_name_ends(const char *s, const char *ending) {
    size_t n = moei_strlen(s), m = moei_strlen(ending);
    return n >= m && moei_strcmp(s + n - m, ending) == 0;
}

static moe_status moei_report_write(void *ctx, moe_stream *stream) {
    const moei_report_file *r = (const moei_report_file *)ctx;
    moe_status status = MOE_OK;
    size_t i;
    if (moei_name_ends(r->path, ".html") || moei_name_ends(r->path, ".htm")) return moe_report_html(r->title, r->figures, r->n, stream, r->error);
    if (moei_name_ends(r->path, ".svg")) return moe_report_svg(r->figures, stream, r->error);
    for (i = 0; i < r->n && status == MOE_OK; i++) {
        if (i > 0) status = stream->write(stream->ctx, "\n", 1);
        if (status == MOE_OK) status = moe_report_text(&r->figures[i], 0, 0, stream, r->error);
    }
    return status;
}

moe_status moe_report_save(const char *path, const char *title, const moe_figure *figures, size_t n, moe_error *error) {
    moei_report_file r;
    if (path == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "path is NULL");
    if (n == 0 && moei_name_ends(path, ".svg")) return moei_error(error, MOE_ERR_ARGUMENT, "%s: a picture shows one figure, and there is none", path);
    if (figures == NULL && n > 0) return moei_error(error, MOE_ERR_ARGUMENT, "figures is NULL, n = %z", n);
    r.path = path, r.title = title, r.figures = figures, r.n = n, r.error = error;
    return moe_file_replace(path, moei_report_write, &r, error);
}
#endif

/* ---- figures of what the library measures -------------------------------------------------------------------------------------------- */

moe_figure moe_figure_classes(const moe_report *report) {
    moe_figure f;
    memset(&f, 0, sizeof f);
    if (report == NULL || report->classes == NULL) return f;
    f.kind = MOE_FIGURE_HEAT, f.title = "Experts and classes", f.row_label = "expert", f.column_label = "class", f.value_label = "tokens";
    f.rows = report->n_experts, f.columns = report->n_classes, f.values = report->classes;
    return f;
}

moe_figure moe_figure_load(const moe_report *report) {
    moe_figure f;
    memset(&f, 0, sizeof f);
    if (report == NULL || report->load == NULL || report->n_experts == 0) return f;
    f.kind = MOE_FIGURE_BARS, f.title = "Load of the experts", f.row_label = "expert", f.value_label = "tokens";
    f.rows = report->n_experts, f.columns = 1, f.values = report->load;
    f.reference = report->n_pairs / (double)report->n_experts, f.reference_name = "even";
    return f;
}

moe_status moe_history_add(moe_history *history, double at, const double *values, size_t count) {
    moe_history *h = history;
    size_t i, s;
    if (h == NULL || (values == NULL && count > 0) || count > MOE_HISTORY_SERIES || h->n > MOE_HISTORY_POINTS) return MOE_ERR_ARGUMENT;
    if (h->every == 0) h->every = 1;
    if (h->n == MOE_HISTORY_POINTS && (h->seen - 1) % h->every == 0) { /* full: every other point goes */
        for (i = 0; i < MOE_HISTORY_POINTS; i += 2) {
            h->at[i / 2] = h->at[i];
            for (s = 0; s < MOE_HISTORY_SERIES; s++) h->values[s][i / 2] = h->values[s][i];
        }
        h->n = MOE_HISTORY_POINTS / 2 + 1, h->every *= 2;
    } else if (h->n == 0 || (h->seen - 1) % h->every == 0) h->n++; /* the newest point stands last; the next takes its place unless it is one to keep */
    h->at[h->n - 1] = at;
    for (s = 0; s < MOE_HISTORY_SERIES; s++) h->values[s][h->n - 1] = s < count ? values[s] : (double)MOEI_INFINITY;
    h->seen++;
    return MOE_OK;
}

moe_figure moe_figure_history(const moe_history *history, size_t first, size_t count, const char *const *names) {
    moe_figure f;
    memset(&f, 0, sizeof f);
    if (history == NULL || first >= MOE_HISTORY_SERIES || count > MOE_HISTORY_SERIES - first || history->n > MOE_HISTORY_POINTS) return f;
    f.kind = MOE_FIGURE_LINES, f.title = "Training", f.column_label = "step";
    f.rows = count, f.columns = history->n, f.stride = MOE_HISTORY_POINTS, f.values = history->values[first], f.x = history->at, f.row_names = names;
    return f;
}
#endif /* MOE_NO_TRAIN, MOE_NO_REPORT */

#ifdef MOEI_OFF_THE_PATH
#pragma GCC pop_options
#endif

#endif /* MOE_IMPLEMENTATION */
