/* moe_export.h - inference models from trained networks, and C for firmware

   An extra of moe.h. It turns a network into an inference model, in floats or in integers only, and
   prints it as a C header of constants. A device runs such a model without heap and without
   initialization. MIT or public domain, as moe.h.

   Contents (search for the tag)
     >>create       moe_model_create, moe_model_free
     >>profile      moe_model_profile, moe_profile_free
     >>print        moe_export_c, moe_export_experts
     >>private      the implementation, in the order of the data:
       >>making       the state of a model under construction
       >>calibration  the ranges of every module
       >>operations   vectors, products, elementwise operations, experts
       >>routers      a router's settings as an integer router; its logits
       >>modules      MoE layers, the other modules, attention
       >>scratch      vectors get their offsets
       >>models       integer models, float models
       >>profiles     every operation compared with the same in float
       >>header       the C header

   Recipe
     1. Copy moe_export.h into your project, beside moe.h.
     2. Include it after moe.h. Where MOE_IMPLEMENTATION is defined, it adds its implementation.
     It needs no option and no other extra. The device needs the three headers of the core and the
     exported header.

   First program: a network learns |a - b|, becomes an int8 model, is printed as C and run.
 * --- first program ---
 * #define MOE_IMPLEMENTATION
 * #include "moe.h"
 * #include "moe_export.h"
 * #include <stdio.h>
 *
 * int main(void) {
 *     static moe_real x[512 * 2], y[512];
 *     static unsigned char scratch[4096];
 *     static moe_layer_config layer; // zeros: 8 experts, 2 per token
 *     static moe_train_config training;
 *     static moe_model_config config;
 *     static moe_built_model built;
 *     static moe_buffer text;
 *     static moe_data data;
 *     static moe_net net;
 *     moe_stream stream = moe_buffer_stream(&text);
 *     moe_error error;
 *     moe_rng rng = {1};
 *     int8_t input[2];
 *     int16_t output[1];
 *     int i;
 *     for (i = 0; i < 512; i++) {
 *         x[2 * i] = moe_rng_uniform(&rng);
 *         x[2 * i + 1] = moe_rng_uniform(&rng);
 *         y[i] = x[2 * i] > x[2 * i + 1] ? x[2 * i] - x[2 * i + 1] : x[2 * i + 1] - x[2 * i];
 *     }
 *     data.n = 512;
 *     data.x = x;
 *     data.targets = y;
 *     layer.d_out = 1;
 *     layer.expert = MOE_EXPERT_MLP;
 *     training.criterion = MOE_CRITERION_SQUARED_ERROR;
 *     training.epochs = 200;
 *     config.weights = MOE_WEIGHTS_INT8;
 *     config.calibration = &data;
 *     moe_net_init(&net, 2, MOE_KERNELS_AUTO, NULL);
 *     moe_net_mixture(&net, &layer);
 *     if (moe_net_build(&net, 1, 42, &error) || moe_fit(&net, &data, NULL, &training, &error) ||
 *         moe_model_create(&built, &net, &config, &error) ||
 *         moe_export_c(&built, "difference", &stream, &error))
 *         return printf("%s\n", error.message);
 *     moe_infer_levels(&built.model, x, input);
 *     if (moe_infer(&built.model, NULL, input, output, scratch, sizeof scratch)) return 1;
 *     printf("|%.2f - %.2f| = %.2f; %d bytes of C\n", (double)x[0], (double)x[1],
 *            output[0] * (double)built.model.output_scale, (int)text.size);
 *     moe_buffer_free(&text);
 *     moe_model_free(&built);
 *     moe_net_free(&net);
 *     return 0;
 * }
 * --- end ---

   Options: those of moe.h.
     MOE_NO_TRAIN, MOE_NO_FLOAT  leave out everything.
     MOE_NO_QUANT                leaves out integer models: moe_model_create returns
                                 MOE_ERR_UNSUPPORTED for weights other than MOE_WEIGHTS_FLOAT.
     MOE_REAL=double             refuses float models; integer models work. Public names have the
                                 suffix _f64, as in moe.h.
   An exported header has options of its own, for the file that defines MOE_IMPLEMENTATION:
     MOE_NO_TRAIN                leaves out all of moe.h but inference.
     MOE_NO_FLOAT                leaves out all but integer models.
     MOE_FLASH_EXPERTS           integer models: the attributes of the array of experts, which keep
                                 it aligned to 4 and may place it in other memory, such as
                                 memory-mapped serial flash [MOE_FLASH]:
                                 __attribute__((section(".qspi"), aligned(4)))
     MOE_KEEP_ALL                float models: keeps all activations, scores and so on, and the
                                 error messages. Without it, only what the model uses is kept
                                 (MOE_KEEP_ masks and MOE_NO_MESSAGES, see moe_kernels.h). Define
                                 it when there are several float models.

   Manual
     From network to firmware.   Create, test and print the model on the machine that trains:
       moe_model_config config = {0};
       config.weights = MOE_WEIGHTS_INT8;
       config.calibration = &rows;                 a few hundred representative inputs
       moe_model_create(&built, &net, &config, &error);
       moe_infer(&built.model, NULL, input, output, scratch, built.model.scratch_size);
       stream = moe_buffer_stream(&buffer);        or a stream of your own
       moe_export_c(&built, "digits", &stream, &error);
     The device computes exactly the same bits as moe_infer here. On the device:
       #define MOE_IMPLEMENTATION
       #define MOE_NO_FLOAT                        a float model takes MOE_NO_TRAIN instead
       #include "digits.h"                         includes moe.h
       static unsigned char scratch[DIGITS_SCRATCH];
       status = moe_infer(&digits, NULL, input, output, scratch, sizeof scratch);
     Files without MOE_IMPLEMENTATION may include the header too, after the same options.

     The header.   The model is `static const moe_model NAME`. Macros, in capitals: NAME_INPUTS,
     NAME_OUTPUTS, NAME_SCRATCH (bytes), NAME_INPUT_SCALE, NAME_OUTPUT_SCALE, and for sequences
     NAME_LENGTH. Its first comment states the bytes of weights, tables and scratch, and the
     multiplications of a call. Constants carry MOE_FLASH: on AVR they stay in program memory, all
     of them in its first 64 KiB. Names that begin with moei_ are private. A header is made for one
     MOE_MODEL_VERSION and is an #error under another.

     Profiles.   Which operation loses accuracy, wastes range, takes time or memory:
       moe_model_profile(&profile, &net, &config, NULL, &error);    runs on config.calibration
       built.profile = &profile;                   the first comment of the header shows it
     snr measures the error of one operation, given its inputs; net_snr the error accumulated up to
     a module's output. Saturated outputs call for more calibration data; a range that is hardly
     used, for data without outliers. The map has a line for each vector, also where vectors share
     memory at different times. Instructions are estimated for gcc -Os without wait states, from
     constants per function, fitted to an emulator's counts; for the digits of examples/mcu the
     estimate is within 10 % of the longest run. Float models that are not lists of operations have
     no profile.

     Integer models.   Everything is an integer, from the input to the output, so every machine
     computes the same bits. A float is code * scale: scale the input to int8 codes with
     moe_infer_levels or NAME_INPUT_SCALE, and multiply the int16 outputs by NAME_OUTPUT_SCALE.
     Weights have one scale per output (int4: also a factor per 32 inputs). A vector that a product
     reads has 8-bit codes; sums of residuals, logits and what norms read have 16. With int8 weights
     a product reads 16-bit codes where 8 would lose more than 1 % (products of gates, relu2,
     heavy tails); it then takes two multiplications for each weight. Activations are curves of
     65 points, gates are powers of two in fixed point. Where a linker drops unused functions
     (--gc-sections), only those that the model names stay.

     Float models.   Most are lists of operations, as integer models are: a few kilobytes of code,
     and the network's results up to rounding. The others run the network's own code
     (moe_net_forward, moe_net_decode), which is twenty times as large, and compute the same bits as
     the network with plain C kernels (with other kernels sample_at = always may draw other experts,
     as it draws by the bits of the logits); the header says so, and why: attention, scores other
     than linear, random and mlp, grouped selections, shaped experts, MOE_NO_QUANT, and most of what
     integer models do not support. same_bits = 1 requests that form.

     Calibration.   The network runs on the calibration data in float. The largest magnitude of each
     vector sets its scale; values beyond it saturate (16-bit codes have room for four times as
     much). Use data like the device's, without outliers. If an int8 model loses accuracy, try more
     calibration data first. int4 halves the weights and loses more.

     Supported networks.   Every network that decodes token by token (moe_net_decode_size), except
     those with weights in files (imported models), the caller's own scores or selections, forced
     routing (select = given), or hashes of ids that the network does not read. Integer models do
     not support scale and convolution, attention with other settings than heads, d_head, rotary and
     rotary_base, rms_norm with bias, layer_norm and tied with no_bias, score = dselect, refined
     gates, more than 256 experts in a layer, widths above 65532, and some combinations. The error
     names them.

     Sequences.   With attention, positions or convolution a call takes one token; scratch keeps the
     sequence. config.length bounds it. See moe_infer.

     Experts in external flash.   With config.loader = 1 the header has no expert weights.
     moe_export_experts writes them as bytes; on the device a moe_loader fetches the blocks of the
     chosen experts into scratch: the second argument of moe_infer. moe_blocks.h caches the blocks
     used last.

     Memory.   A built model owns its memory, from config.allocator. A list of operations does not
     point to the network; a float model without a list points to the network's parameters, which
     must outlive it.
     Threads.   There are no globals. Threads may share a model if each has its own scratch memory.
     Errors, NULL and promises are as in moe.h.

   Glossary (besides that of moe.h)
     inference model   a network converted for moe_infer: constants only.
     code              the quantized value: the integer that stands for a float = code * scale.
     narrow, wide      codes within +-127, and within +-32767. Both are stored as int16.
     calibration       representative inputs; they determine the ranges of activations.
     scratch           the memory in which moe_infer works.
     operation         one step of an integer model: a function, its vectors, its constants.
     block             the constants of one expert.

   Sources
     Jacob et al. 2018, Quantization and training of neural networks for efficient
       integer-arithmetic-only inference.
*/
#ifndef MOE_H
#error "moe_export.h: include moe.h before it"
#endif

#ifndef MOE_EXPORT_H
#define MOE_EXPORT_H

#if MOE_REAL_IS_DOUBLE
#define moe_model_create moe_model_create_f64
#define moe_model_free moe_model_free_f64
#define moe_export_c moe_export_c_f64
#define moe_export_experts moe_export_experts_f64
#define moe_model_profile moe_model_profile_f64
#define moe_profile_free moe_profile_free_f64
#endif

#ifdef __cplusplus
extern "C" {
#endif

#ifndef MOE_NO_TRAIN

/* ---- >>create: an inference model of a network ---- */

/* How a network becomes a model. {0} is a valid default: a float model. */
typedef struct moe_model_config {
    int weights;                 /* MOE_WEIGHTS_ [float] */
    const moe_data *calibration; /* integers: n, x or token_ids, and length are read [NULL] */
    size_t length;               /* longest sequence, where modules read earlier tokens [128] */
    int loader;                  /* integers: 1: expert weights come through a moe_loader [0] */
    moe_allocator allocator;     /* {0}: the standard heap */
    int same_bits;               /* float: 1: never a list of operations, see Float models [0] */
} moe_model_config;

/* A model and the memory that it owns. model points into this struct: do not move or copy it.
   Pass &built.model to moe_infer. All other fields but profile are private. */
typedef struct moe_built_model {
    moe_model model;
    moe_buffer weights, experts;
    moei_int_op *ops;
    moei_int_mixture *mixtures;
    moei_int_attention *attentions;
    int external; /* 1: experts come through a loader */
    moe_net net;  /* float models without a list: the network's modules with plain C kernels */
    const char *obstacle; /* why there is no list */
    moe_allocator allocator;
    /* the caller's: moe_model_profile of this model, for the comment of its header [NULL: none] */
    const struct moe_profile *profile;
} moe_built_model;

/* Makes an inference model of a built network, which stays the caller's. A float model without a
   list of operations points to the network's parameters; all others copy what they need. config
   NULL: {0}.
   Integers: each vector gets one scale, from the largest magnitude that calibration finds in it;
   each matrix gets one scale per output (int4: and one factor per 32 inputs).
   Errors; error (may be NULL) names the module, setting or parameter:
     MOE_ERR_ARGUMENT     NULL; no calibration data; no allocator
     MOE_ERR_STATE        the network is not built
     MOE_ERR_CONFIG       a setting of config is out of range
     MOE_ERR_UNSUPPORTED  a module or setting that such a model does not support; double build: a
                          float model
     MOE_ERR_NONFINITE    a parameter, or a number that calibration computes, is infinite or NaN
     MOE_ERR_OVERFLOW     sizes are too large, or scales too far apart, for integers
     MOE_ERR_MEMORY
   On failure *built is untouched. */
MOE_API moe_status moe_model_create(moe_built_model *built, const moe_net *net, const moe_model_config *config,
                                    moe_error *error);
/* Frees what built owns and zeroes it. NULL and {0} are allowed. */
MOE_API void moe_model_free(moe_built_model *built);

/* ---- >>profile: what each operation costs and loses ---- */

/* An operation of a model, or with the name "route" the router of an MoE layer. */
typedef struct moe_profile_row {
    const char *name;       /* of its function: "int8", "curve", "mixture", ...; add: it adds to a sum */
    size_t op;              /* its index in model.ops; route: that of its MoE layer in model.mixtures */
    size_t module;          /* of the network */
    size_t outputs, inputs; /* its shape; route: the most choices, the experts */
    /* the most calls in one inference: of experts top_k; 0: experts without matrices, since those
       with matrices cost more */
    size_t calls;
    size_t multiplications; /* multiply-accumulates of all these calls */
    size_t weight_bytes;    /* its constants, of all experts; 0: counted in another row */
    double instructions;    /* of all calls on a Cortex-M4, see Profiles; 0: not known */
    /* compared with the operation in float on the same (dequantized) inputs: how many numbers, 0:
       none; the signal-to-noise ratio in dB, HUGE_VAL: no difference, -HUGE_VAL: a difference
       from a signal of zeros, NaN: samples not finite */
    size_t compared;
    double snr;
    /* the same for a module's output, or the routing weights, compared with the network's */
    size_t net_compared;
    double net_snr;
    double saturated; /* share of outputs clamped because their codes have no more range */
    double used;      /* the largest code as a share of that range; float: 0 */
    double same;      /* route: share of inputs for which the network chose the same experts */
} moe_profile_row;

/* A vector in scratch memory, from the first operation that writes it to the last that uses it. The
   state of a sequence lives from the first row to the last. */
typedef struct moe_profile_vector {
    size_t at, size;    /* in bytes; at counts from the first address that is a multiple of 4 */
    size_t first, last; /* rows */
} moe_profile_vector;

typedef struct moe_profile {
    moe_profile_row *rows;       /* in the order of vectors' lifetimes */
    size_t n_rows;
    moe_profile_vector *vectors; /* by offset */
    size_t n_vectors;
    double instructions;         /* of the whole call; 0: not known */
    moe_allocator allocator;
} moe_profile;

/* Profiles the model that moe_model_create makes of net and config (NULL: {0}): runs it on samples
   (NULL: config->calibration; without both nothing is compared), each operation compared with the
   same in float. Errors as moe_model_create, and MOE_ERR_UNSUPPORTED: the model is not a list of
   operations (see Float models); MOE_ERR_STATE: a sequence is longer than config->length. On
   failure *profile is untouched. */
MOE_API moe_status moe_model_profile(moe_profile *profile, const moe_net *net, const moe_model_config *config,
                                     const moe_data *samples, moe_error *error);
/* Frees what profile owns and zeroes it. NULL and {0} are allowed. */
MOE_API void moe_profile_free(moe_profile *profile);

/* ---- >>print: the model as C ---- */

/* Writes a C header (C99, C++11) that holds the model as constants. name is a C identifier of at
   most MOE_NAME_SIZE - 17 characters, not reserved (_A, __a), no keyword of C or C++, and neither
   moe nor moei nor one that begins with moe_ or moei_, in any case: NAME_INPUTS is a macro.
   MOE_ERR_ARGUMENT: NULL, another name, or a model that moe_model_create did not make; else what
   the stream returns. Thread-safe. */
MOE_API moe_status moe_export_c(const moe_built_model *built, const char *name, moe_stream *stream, moe_error *error);
/* Writes the blocks of all experts as bytes: what a moe_loader reads, from offset 0 on.
   MOE_ERR_ARGUMENT: NULL; MOE_ERR_STATE: the model was not made with loader = 1; else what the
   stream returns. Thread-safe. */
MOE_API moe_status moe_export_experts(const moe_built_model *built, moe_stream *stream, moe_error *error);

#endif /* MOE_NO_TRAIN */

#ifdef __cplusplus
}
#endif
#endif /* MOE_EXPORT_H */

/* ==== >>private ============================================================================== */

#if defined(MOE_IMPLEMENTATION) && !defined(MOEI_EXPORT_IMPLEMENTED)
#define MOEI_EXPORT_IMPLEMENTED

#ifdef __cplusplus
extern "C" {
#endif

#ifndef MOE_NO_TRAIN

#ifndef MOE_NO_QUANT

/* ---- >>making: a model under construction ---- */

/* Statistics of some numbers in calibration. */
typedef struct moei_range {
    double most;           /* the largest magnitude */
    double squares, count; /* the sum of their squares; how many are not 0 */
} moei_range;

/* The ranges in one module. */
typedef struct moei_ranges {
    moei_range y;                      /* the module's output */
    moei_range u, z;                   /* MoE layer: the router's input and logits */
    moei_range unit;                   /* components of the vector that the router normalizes */
    moei_range projected;              /* score cosine: the projection */
    moei_range hidden, hidden_act;     /* hidden layers of scores */
    moei_range key;                    /* score attentive: the keys */
    moei_range weighted_input;         /* inputs of experts times their weights */
    moei_range latent, latent_sum;     /* d_latent: W_in x, and the sum that W_out reads */
    moei_range sigmoid;                /* the argument of the shared expert's sigmoid */
    moei_range node[MOE_NODE_COUNT];   /* activations of experts */
    moei_range shared[MOE_NODE_COUNT]; /* activations of the shared expert */
    moei_range q, k, v, mixed;         /* attention */
    uint32_t rotation_table;           /* not a range: the offset of the table of angles, or MOEI_INT_NONE */
} moei_ranges;

/* A vector of an integer model. */
typedef struct moei_vector {
    size_t width;
    int is_int32;                 /* int32 instead of int16 */
    int limit;                    /* codes are within +-limit: MOEI_NARROW or less is narrow */
    double scale;                 /* float = code * scale */
    double range;                 /* the largest magnitude seen in calibration */
    uint32_t narrow;              /* a narrow copy; MOEI_INT_NONE: not made yet */
    uint32_t sums;                /* its moei_int4_sums; the same */
    int branch;                   /* in which narrow and sums were made */
    int keeps_16;                 /* 1: products read all 16 bits */
    uint32_t first_use, last_use; /* times of the clock */
    int kept;                     /* 1: its memory is its own, behind that of the others */
    uint32_t offset;              /* in scratch, in int16 */
} moei_vector;

#define MOEI_INT_MAX_WIDTH 65532
/* Not enumerators: C++20 deprecates their arithmetic with floating-point numbers. */
#define MOEI_NARROW 127
#define MOEI_WIDE 32767
#define MOEI_HEADROOM 4.0 /* of 16-bit codes beyond the calibrated range */

enum { MOEI_INT_PIECES = 16 };

/* What a profile needs of an operation besides its fields. */
typedef struct moei_op_note {
    uint32_t in, other, out; /* indices of vectors */
    uint32_t clock, module;
    uint32_t mixture;        /* of an inner operation: its MoE layer */
    uint32_t output_of;      /* 1 + the module whose output it makes; 0: none */
    /* product: index in floats of weights [n,k] and biases [n] of each matrix; attention: the
       vector of values */
    uint32_t reference;
    int in_block;            /* its constants are in the block of an expert */
    int act, rest;           /* curve: as moei_points */
    int clamps;              /* 1: its limits are intended: the curve that follows ends there */
    double alpha;            /* curve: the same; a factor of others */
} moei_op_note;

/* The operations, vectors and floats of a model under construction, kept for a profile. */
typedef struct moei_trace {
    moei_op_note *notes, *inner; /* of the main and the inner operations; in the end, notes has both */
    moei_vector *vectors;
    moe_buffer floats;
} moei_trace;

typedef struct moei_maker {
    moe_built_model made;
    const moe_net *net;
    const moe_model_config *config;
    moe_error *error;
    moe_status status;   /* the first failure; after it nothing is appended */
    moei_ranges *ranges; /* [modules] */
    moei_range *input;
    moei_vector *vectors;
    moei_int_op *main_ops, *inner_ops; /* refer to vectors by index until these have offsets */
    int inner;                         /* 1: appends to the inner operations, those of MoE layers */
    int branch;                        /* 0: these operations run in every call; 1 and more: those of
                                          a layer's experts; -1: others, or before experts run */
    int in_block;                      /* 1: constants belong to experts and go to the blocks */
    moei_int_op *last_op;              /* appended last */
    uint32_t clock;
    uint32_t *entering;                      /* [modules + 1] the vector that enters each module */
    size_t module;                           /* the current one */
    int relu;                                /* 1: it also applies the relu that follows it */
    moe_buffer pieces;                       /* constants of experts: all first products, then all second ones, ... */
    size_t piece[MOEI_INT_PIECES], n_pieces; /* bytes of one expert's */
    size_t multiplications, counted;         /* of the model; of the operations since counted was reset */
    int weights;                             /* MOE_WEIGHTS_ of the current matrix */
    uint32_t rows; /* constants of the embedding; rows_unit: factor of a row = its scale * rows_unit */
    double rows_unit;
    moei_trace *trace;        /* NULL: no profile is made */
    moei_op_note *note;       /* of the last operation, or the spare one */
    moei_op_note spare;
    uint32_t reference;       /* of the next operation */
} moei_maker;

static void moei_maker_fail(moei_maker *m, moe_status status) {
    if (m->status != MOE_OK) return;
    if (status == MOE_ERR_OVERFLOW)
        m->status = moei_error(
            m->error, status,
            "module %z: sizes or magnitudes out of the range of integer models; MOE_WEIGHTS_FLOAT may work",
            m->module);
    else m->status = moei_error(m->error, status, "%s", moe_status_text(status));
}

#define MOEI_MAKER_REFUSE(m, code, ...) \
    do { \
        if ((m)->status == MOE_OK) (m)->status = moei_error((m)->error, code, __VA_ARGS__); \
    } while (0)

/* Appends to a growing array; returns the index of the new element, 0 after a failure. */
static uint32_t moei_maker_push(moei_maker *m, void *list, const void *element, size_t size) {
    unsigned char *elements;
    size_t n;
    memcpy(&elements, list, sizeof elements);
    n = moei_array_length(elements);
    if (m->status != MOE_OK) return 0;
    if (n >= UINT16_MAX || !moei_array_reserve(&m->made.allocator, list, size, n + 1)) {
        moei_maker_fail(m, n >= UINT16_MAX ? MOE_ERR_OVERFLOW : MOE_ERR_MEMORY);
        return 0;
    }
    memcpy(&elements, list, sizeof elements);
    memcpy(elements + n * size, element, size);
    moei_array_header(elements)->length++;
    return (uint32_t)n;
}

/* A new vector. scale 0 (calibration found only zeros) becomes 1. */
static uint32_t moei_vector_new(moei_maker *m, size_t width, int limit, double scale, double range) {
    moei_vector v;
    memset(&v, 0, sizeof v);
    v.width = width;
    v.limit = limit;
    v.scale = scale > 0 ? scale : 1;
    v.range = range;
    v.narrow = v.sums = MOEI_INT_NONE;
    v.first_use = v.last_use = m->clock;
    return moei_maker_push(m, &m->vectors, &v, sizeof v);
}

static uint32_t moei_vector_int32(moei_maker *m, size_t width) {
    uint32_t v = moei_vector_new(m, width, MOEI_WIDE, 1, 0);
    if (m->status == MOE_OK) m->vectors[v].is_int32 = 1;
    return v;
}

/* Extends the lifetime of a vector and of its sums to the current clock. */
static void moei_vector_use(moei_maker *m, uint32_t v) {
    for (; m->status == MOE_OK && v != MOEI_INT_NONE; v = m->vectors[v].sums)
        if (m->vectors[v].last_use < m->clock) m->vectors[v].last_use = m->clock;
}

static moei_int_op moei_op(void (*run)(const moei_int_op *op, moei_int_run *run), size_t n, size_t k, int low, int high,
                           int shift) {
    moei_int_op op;
    memset(&op, 0, sizeof op);
    op.run = run;
    op.shape.n = (uint16_t)n;
    op.shape.k = (uint16_t)k;
    op.shape.low = (int16_t)low;
    op.shape.high = (int16_t)high;
    op.shape.shift = (uint8_t)shift;
    return op;
}

static void moei_note_append(moei_maker *m, uint32_t in, uint32_t other, uint32_t out) {
    moei_op_note note, **list = m->inner ? &m->trace->inner : &m->trace->notes;
    memset(&note, 0, sizeof note);
    note.in = in;
    note.other = other;
    note.out = out;
    note.clock = m->clock;
    note.module = (uint32_t)m->module;
    note.mixture = (uint32_t)moei_array_length(m->made.mixtures);
    note.reference = m->reference;
    note.in_block = m->in_block;
    note.alpha = 1;
    (void)moei_maker_push(m, list, &note, sizeof note);
    if (m->status == MOE_OK) m->note = &(*list)[moei_array_length(*list) - 1];
    m->reference = MOEI_INT_NONE;
}

/* Notes that the operation that wrote vector v last makes the output of a module. */
static void moei_note_output(moei_maker *m, size_t module, uint32_t v) {
    size_t i = m->trace != NULL ? moei_array_length(m->trace->notes) : 0;
    while (i > 0 && m->trace->notes[i - 1].out != v) i--;
    if (i > 0) m->trace->notes[i - 1].output_of = (uint32_t)module + 1;
}

/* Appends an operation. in, other, out: vectors. */
static void moei_op_append(moei_maker *m, moei_int_op op, uint32_t in, uint32_t other, uint32_t out) {
    op.in = in;
    op.other = other;
    op.out = out;
    m->clock++;
    moei_vector_use(m, in);
    moei_vector_use(m, other);
    moei_vector_use(m, out);
    if (m->trace != NULL) moei_note_append(m, in, other, out);
    (void)moei_maker_push(m, m->inner ? &m->inner_ops : &m->main_ops, &op, sizeof op);
    m->last_op = m->status != MOE_OK ? NULL
                 : m->inner          ? &m->inner_ops[moei_array_length(m->inner_ops) - 1]
                                     : &m->main_ops[moei_array_length(m->main_ops) - 1];
}

/* Appends constants to a buffer, whose size stays a multiple of 4; returns their offset. */
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
    p[0] = (unsigned char)((uint32_t)v & 255u);
    p[1] = (unsigned char)((uint32_t)v >> 8 & 255u);
}

static void moei_put_32_le(unsigned char *p, int32_t v) {
    moei_put_16_le(p, v);
    moei_put_16_le(p + 2, (int32_t)((uint32_t)v >> 16));
}

/* The nearest integer, within +-limit. */
static int32_t moei_nearest(double x, double limit) {
    if (!(x > -limit)) return (int32_t)-limit;
    return (int32_t)(x < limit ? floor(x + 0.5) : limit);
}

/* The largest shift up to `most` for which multiplier * 2^(bits + shift) fits a factor, or -1. */
static int moei_shift_for(double multiplier, int bits, int most) {
    int shift = most;
    while (shift >= 0 && multiplier * ldexp(1.0, bits + shift) > 32767.0) shift--;
    return shift;
}

/* ---- >>calibration: ranges of activations ---- */

/* NaN counts as infinite. */
static void moei_range_include(moei_range *range, double x) {
    if (!(fabs(x) <= range->most)) range->most = fabs(x) < HUGE_VAL ? fabs(x) : HUGE_VAL;
    range->squares += x * x;
    range->count += fabs(x) > 0;
}

static void moei_range_rows(moei_range *range, const moe_real *x, size_t rows, size_t width, size_t ld) {
    size_t i, j;
    for (i = 0; i < rows && x != NULL; i++)
        for (j = 0; j < width; j++) moei_range_include(range, (double)x[i * ld + j]);
}

static int moei_ranges_are_finite(const moei_ranges *r) {
    double sum = r->y.most + r->u.most + r->z.most + r->unit.most + r->projected.most + r->hidden.most +
                 r->hidden_act.most + r->key.most + r->weighted_input.most + r->latent.most + r->latent_sum.most +
                 r->sigmoid.most + r->q.most + r->k.most + r->v.most + r->mixed.most;
    int node;
    for (node = 0; node < MOE_NODE_COUNT; node++) sum += r->node[node].most + r->shared[node].most;
    return sum < HUGE_VAL;
}

static double moei_ranges_dot(const moe_real *w, const moe_real *bias, size_t i, size_t k, const double *x) {
    double sum = bias != NULL ? (double)bias[i] : 0;
    size_t p;
    for (p = 0; p < k; p++) sum += (double)w[i * k + p] * x[p];
    return sum;
}

/* The largest component of v / sqrt(v . v + least). */
static void moei_ranges_unit(moei_range *range, const double *v, size_t n, double least) {
    double sum = least;
    size_t i;
    for (i = 0; i < n; i++) sum += v[i] * v[i];
    for (i = 0; i < n && sum > 0; i++) moei_range_include(range, v[i] / sqrt(sum));
}

/* Ranges inside the score of one token, which a pass does not store. room: d + 2 times the widest
   vector. */
static void moei_ranges_score(const moe_layer *layer, const moe_router_config *c, const moe_real *x, const moe_real *u,
                              double *room, moei_ranges *range) {
    const moe_real *const *t = (const moe_real *const *)layer->tensors;
    const size_t d = (size_t)c->d_model;
    const size_t h = moei_router_hidden(c);
    const size_t r = (size_t)c->cosine_dim;
    double *in = room;
    double *act = room + d;
    double *query = act + (h > r ? h : r);
    size_t i, p;
    for (i = 0; i < d; i++) in[i] = (double)x[i];
    if (c->input == MOE_INPUT_SCALED_RMS) moei_ranges_unit(&range->unit, in, d, 1e-6 * (double)d);
    for (i = 0; i < d; i++) in[i] = (double)u[i];
    if (c->score == MOE_SCORE_COSINE || c->score == MOE_SCORE_GRAP) {
        const int projects = c->score == MOE_SCORE_COSINE && r > 0;
        for (i = 0; i < r && projects; i++)
            moei_range_include(&range->projected, act[i] = moei_ranges_dot(t[MOE_ROUTER_PROJECTION], NULL, i, d, in));
        for (i = 0; i < d && !projects; i++) moei_range_include(&range->projected, in[i]);
        moei_ranges_unit(&range->unit, projects ? act : in, projects ? r : d, 0);
    }
    if (c->score != MOE_SCORE_MLP && c->score != MOE_SCORE_ATTENTIVE) return;
    for (i = 0; i < h; i++) {
        moe_real v = (moe_real)moei_ranges_dot(t[MOE_ROUTER_FC1_WEIGHT], t[MOE_ROUTER_FC1_BIAS], i, d, in);
        moei_range_include(&range->hidden, (double)v);
        moe_activate(NULL, c->router_act, 1, &v, &v);
        moei_range_include(&range->hidden_act, act[i] = (double)v);
    }
    if (c->score != MOE_SCORE_ATTENTIVE) return;
    for (i = 0; i < h; i++) query[i] = moei_ranges_dot(t[MOE_ROUTER_QUERY], NULL, i, h, act) / sqrt((double)h);
    for (i = 0; i < h; i++) {
        double key = 0;
        for (p = 0; p < h; p++) key += query[p] * (double)t[MOE_ROUTER_KEY][p * h + i];
        moei_range_include(&range->key, key);
    }
}

/* Ranges of the weighted inputs of experts and of the argument of the shared expert's sigmoid. */
static void moei_ranges_weights(const moe_layer *layer, const moe_layer_pass *p, moei_ranges *range) {
    const moe_layer_config *c = &layer->config;
    const size_t d = (size_t)c->router.d_model, pairs = p->routing.plan.offsets[c->router.n_experts];
    const size_t width = (size_t)moei_activation_width(c, c->expert, MOEI_X);
    size_t i, q;
    for (i = 0; i < pairs && c->router.apply_to == MOE_APPLY_INPUT; i++)
        for (q = 0; q < width; q++) {
            const moe_assignment *entry = &p->routing.plan.assignments[i];
            const moe_real *x = p->inputs + (size_t)entry->token * width;
            moei_range_include(&range->weighted_input, (double)(entry->weight_in * x[q]));
        }
    for (i = 0; i < p->call.n_tokens && c->shared_sigmoid; i++)
        moei_range_include(&range->sigmoid,
                           (double)moe_dot(layer->kernels, d, layer->tensors[MOE_SHARED_SIGMOID], p->x + i * d));
}

/* Ranges of the router's vectors, over all tokens. */
static moe_status moei_ranges_router(const moei_maker *m, const moe_layer *layer, const moe_layer_pass *p,
                                     moei_ranges *range) {
    const moe_router_config *c = &layer->config.router;
    const size_t d = (size_t)c->d_model;
    const size_t h = moei_router_hidden(c);
    const size_t r = (size_t)c->cosine_dim;
    const size_t numbers = d + 2 * (h > r ? h : r);
    double *room = (double *)moei_alloc(&m->made.allocator, numbers, sizeof *room);
    size_t i;
    if (room == NULL) return MOE_ERR_MEMORY;
    for (i = 0; i < p->call.n_tokens; i++) moei_ranges_score(layer, c, p->x + i * d, p->routing.u + i * d, room, range);
    moei_free(&m->made.allocator, room, numbers * sizeof *room);
    return MOE_OK;
}

/* The range of an activation in a pass that keeps its rows; those of the output are contiguous. */
static void moei_range_node(const moei_expert_run *run, int node, const moe_real *x, size_t rows, moei_range *range) {
    const size_t ld = node == MOE_NODE_OUTPUT ? run->width[node] : run->ld[node];
    if (run->needed >> node & 1u) moei_range_rows(range, x, rows, run->width[node], ld);
}

static void moei_ranges_layer(const moe_layer *layer, const moe_layer_pass *p, moei_ranges *range) {
    const moei_expert_run run = moei_expert_run_begin(layer, layer->config.expert, 0);
    const size_t n = p->call.n_tokens, experts = (size_t)layer->config.router.n_experts;
    const size_t latent = (size_t)layer->config.d_latent;
    int node;
    for (node = 0; node < MOE_NODE_COUNT; node++) {
        moei_range_node(&run, node, p->node[node], p->routing.plan.offsets[p->routing.real_experts],
                        &range->node[node]);
        moei_range_rows(&range->node[node], p->all[node], n * experts, run.width[node], run.width[node]);
    }
    moei_range_rows(&range->z, p->routing.logits, n, experts, experts);
    moei_range_rows(&range->u, p->routing.u, n, (size_t)layer->config.router.d_model,
                    (size_t)layer->config.router.d_model);
    moei_range_rows(&range->latent, latent > 0 ? p->latent[1] : NULL, n, latent, latent);
    moei_range_rows(&range->latent_sum, latent > 0 ? p->latent[2] : NULL, n, latent, latent);
    if (layer->config.n_shared > 0) {
        const moei_expert_run shared = moei_expert_run_begin(layer, MOEI_SHARED, 0);
        for (node = 0; node < MOE_NODE_COUNT; node++)
            moei_range_node(&shared, node, p->shared[node], n, &range->shared[node]);
    }
}

/* Queries or keys; a pair of numbers that RoPE rotates counts as its length. */
static void moei_range_heads(moei_range *range, const moe_module *module, const moe_real *x, size_t rows) {
    const size_t width = moei_heads_of(module).q;
    const size_t d = (size_t)module->attention.d_head, half = d / 2;
    size_t i, j;
    if (!module->attention.rotary) moei_range_rows(range, x, rows, width, width);
    else
        for (i = 0; i < rows * width; i += d)
            for (j = i; j < i + half; j++)
                moei_range_include(range,
                                   sqrt((double)x[j] * (double)x[j] + (double)x[j + half] * (double)x[j + half]));
}

static moe_status moei_ranges_batch(void *maker, const moe_net_pass *pass) {
    const moei_maker *m = (const moei_maker *)maker;
    size_t i, n = pass->n_tokens;
    moe_status status = MOE_OK;
    if (m->net->d_in > 0) moei_range_rows(m->input, pass->call.x, n, (size_t)m->net->d_in, (size_t)m->net->d_in);
    for (i = 0; i < m->net->n_modules; i++) {
        const moe_module *module = &m->net->modules[i];
        const struct moe_module_pass *p = &pass->modules[i];
        moei_ranges *range = &m->ranges[i];
        moei_range_rows(&range->y, p->y, n, (size_t)module->d_out, (size_t)module->d_out);
        if (moei_is_layer(module)) moei_ranges_layer(&module->layer, p->layer, range);
        if (module->kind == MOE_MODULE_MIXTURE) {
            moei_ranges_weights(&module->layer, p->layer, range);
            if (status == MOE_OK) status = moei_ranges_router(m, &module->layer, p->layer, range);
        }
        if (module->kind != MOE_MODULE_ATTENTION) continue;
        moei_range_heads(&range->q, module, p->t.q, n);
        moei_range_heads(&range->k, module, p->t.keys, n);
        moei_range_rows(&range->v, p->t.values, n, moei_heads_of(module).q, moei_heads_of(module).q);
        moei_range_rows(&range->mixed, p->t.mixed, n, moei_heads_of(module).q, moei_heads_of(module).q);
    }
    return status;
}

enum { MOEI_CALIBRATION_ROWS = 256 };

/* Runs a network over data, in batches, and calls `use` after each. */
static moe_status moei_each_batch(const moe_net *net, const moe_data *data, const moe_allocator *allocator,
                                  moe_status (*use)(void *ctx, const moe_net_pass *pass), void *ctx) {
    const size_t length = data->length > 0 ? data->length : 1;
    const size_t batch = length >= MOEI_CALIBRATION_ROWS ? length : MOEI_CALIBRATION_ROWS / length * length;
    int32_t starts[MOEI_CALIBRATION_ROWS + 1];
    moe_net_pass pass;
    moe_call call;
    void *work = NULL;
    size_t at, i, bytes = 0;
    moe_status status = moe_net_work_size(net, batch, 1, &bytes);
    if (status == MOE_OK && (work = moei_alloc(allocator, bytes, 1)) == NULL) status = MOE_ERR_MEMORY;
    for (at = 0; at < data->n && status == MOE_OK; at += call.n_tokens) {
        memset(&call, 0, sizeof call);
        call.n_tokens = data->n - at < batch ? data->n - at : batch;
        call.keep = 1;
        if (net->d_in > 0) call.x = data->x + at * (size_t)net->d_in;
        if (data->token_ids != NULL) call.token_ids = data->token_ids + at;
        call.n_sequences = call.n_tokens / length;
        for (i = 0; i <= call.n_sequences; i++) starts[i] = (int32_t)(i * length);
        call.sequences = starts;
        status = moe_net_forward(net, &call, work, bytes, &pass);
        if (status == MOE_OK) status = use(ctx, &pass);
    }
    moei_free(allocator, work, bytes);
    return status;
}

static void moei_calibrate(moei_maker *m) {
    const moe_status status =
        moei_each_batch(m->net, m->config->calibration, &m->made.allocator, moei_ranges_batch, m);
    size_t i;
    if (status != MOE_OK) m->status = moei_error(m->error, status, "calibration: %s", moe_status_text(status));
    for (i = 0; i < m->net->n_modules; i++)
        if (!moei_ranges_are_finite(&m->ranges[i]))
            MOEI_MAKER_REFUSE(m, MOE_ERR_NONFINITE, "calibration: module %z computes an infinite number or NaN",
                              i);
}

/* ---- >>operations: vectors at other scales ---- */

/* The limit of the codes of a vector that a product reads: 8 bits where rounding to them costs at
   most 1 % of the root mean square, that is range / 127 / sqrt(12), else 16. Zeros are exact.
   4-bit weights lose more than that themselves. */
static int moei_limit_for(const moei_maker *m, const moei_range *range) {
    return m->config->weights == MOE_WEIGHTS_INT8 && range->most * range->most * range->count > 20.0 * range->squares
               ? MOEI_WIDE
               : MOEI_NARROW;
}

/* The scale of such a vector. */
static double moei_hidden_scale(int limit, double range) {
    return limit == MOEI_NARROW ? range / limit : range * MOEI_HEADROOM / limit;
}

/* y = x at another scale. */
static uint32_t moei_rescale(moei_maker *m, uint32_t x, int limit, double scale) {
    const moei_vector *v;
    uint32_t y;
    double ratio;
    int shift;
    moei_int_op op;
    if (m->status != MOE_OK) return 0;
    v = &m->vectors[x];
    ratio = v->scale / (scale > 0 ? scale : 1);
    shift = moei_shift_for(ratio, 0, 22);
    if (shift < 0) {
        moei_maker_fail(m, MOE_ERR_OVERFLOW);
        return 0;
    }
    y = moei_vector_new(m, v->width, limit, scale, v->range);
    op = moei_op(moei_int_op_rescale, m->vectors[x].width, 0, -limit, limit, shift);
    op.factor = (int16_t)moei_nearest(ratio * ldexp(1.0, shift), 32767);
    moei_op_append(m, op, x, x, y);
    return y;
}

/* The vector itself if it is narrow, else a narrow copy. */
static uint32_t moei_narrow_copy(moei_maker *m, uint32_t x) {
    uint32_t y;
    if (m->status != MOE_OK || m->vectors[x].limit == MOEI_NARROW) return x;
    if (!m->inner && m->vectors[x].narrow != MOEI_INT_NONE) return m->vectors[x].narrow;
    y = moei_rescale(m, x, MOEI_NARROW, m->vectors[x].range / MOEI_NARROW);
    if (m->status == MOE_OK && !m->inner) m->vectors[x].narrow = y;
    return y;
}

/* What a product reads of a vector: the vector itself if it is narrow or would lose too much as
   such, else a narrow copy. */
static uint32_t moei_narrowed(moei_maker *m, uint32_t x) {
    if (m->status == MOE_OK && m->vectors[x].keeps_16) return x;
    return moei_narrow_copy(m, x);
}
/* The vector itself if it is wide, else a wide copy with finer codes. */
static uint32_t moei_widened(moei_maker *m, uint32_t x) {
    if (m->status != MOE_OK || m->vectors[x].limit == MOEI_WIDE) return x;
    return moei_rescale(m, x, MOEI_WIDE, m->vectors[x].scale / 128);
}

/* ---- products ---- */

/* Weights [count][n,k] and biases [count][n] or NULL; offset is added to each bias. count > 1: the
   matrices of experts, which share one operation. */
typedef struct moei_matrix {
    const moe_real *w, *bias;
    size_t count, n, k;
    double offset;
} moei_matrix;

static moei_matrix moei_matrix_of(const moe_real *w, const moe_real *bias, size_t count, size_t n, size_t k) {
    moei_matrix x;
    x.w = w;
    x.bias = bias;
    x.count = count;
    x.n = n;
    x.k = k;
    x.offset = 0;
    return x;
}

static double moei_matrix_bias(const moei_matrix *x, size_t i) {
    return (x->bias != NULL ? (double)x->bias[i] : 0) + x->offset;
}

/* A quantized matrix: weight = code * scale of the row (int4: * factor of the block). */
typedef struct moei_codes {
    double *scale;     /* [count][n] */
    signed char *code; /* [n][k] of one matrix */
    uint16_t *block;   /* [n][blocks], int4 */
    int32_t *bias;     /* [n] */
    int16_t *factor;   /* [n] */
    size_t blocks;
    int wide;         /* 1: inputs have 16 bits, and biases are added for each byte of them */
    double max_scale; /* the largest row scale */
} moei_codes;

/* int4: the scale with the least squared error among candidates from 1/7 to 2/17 of the largest
   magnitude. */
static double moei_int4_scale(size_t n, const moe_real *w) {
    double most = 0;
    double best = 0;
    double least = -1;
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
        if (least < 0 || error < least) {
            least = error;
            best = scale;
        }
    }
    return best;
}

/* The largest factor of a block for which sums of k terms stay below 2^29. */
static double moei_int4_max_factor(size_t k) {
    const double most = 536870912.0 / (127.0 * 8.0 * (double)(k + 1));
    return most < 4095 ? floor(most) : 4095;
}

/* The scale of a row, for which its largest weight and its bias fit. */
static double moei_codes_row_scale(const moei_maker *m, const moe_real *w, size_t k, double bias, double in_scale) {
    double scale = 0, least = fabs(bias) / (in_scale * 268435456.0);
    size_t p;
    if (m->weights == MOE_WEIGHTS_INT8) scale = (double)moei_weight_scale(MOE_TYPE_Q8, k, w);
    else {
        for (p = 0; p < k; p += MOEI_INT_BLOCK) {
            const double block = moei_int4_scale(k - p < MOEI_INT_BLOCK ? k - p : (size_t)MOEI_INT_BLOCK, w + p);
            if (block > scale) scale = block;
        }
        scale /= moei_int4_max_factor(k);
    }
    if (!(scale > 0)) scale = fabs(bias) / (in_scale * 65536.0);
    return scale > least ? scale : least;
}

static void moei_codes_free(moei_maker *m, const moei_matrix *x, moei_codes *l) {
    const moe_allocator *a = &m->made.allocator;
    moei_free(a, l->scale, x->count * x->n * sizeof *l->scale);
    moei_free(a, l->code, x->n * x->k);
    moei_free(a, l->block, x->n * l->blocks * sizeof *l->block);
    moei_free(a, l->bias, x->n * sizeof *l->bias);
    moei_free(a, l->factor, x->n * sizeof *l->factor);
}

/* Computes the scales of all rows and allocates the codes of one matrix. */
static void moei_codes_begin(moei_maker *m, const moei_matrix *x, double in_scale, moei_codes *l) {
    const moe_allocator *a = &m->made.allocator;
    size_t i;
    memset(l, 0, sizeof *l);
    l->blocks = x->k / MOEI_INT_BLOCK + (x->k % MOEI_INT_BLOCK > 0);
    if (m->status != MOE_OK) return;
    if (x->n > MOEI_INT_MAX_WIDTH || x->k > MOEI_INT_MAX_WIDTH) {
        moei_maker_fail(m, MOE_ERR_OVERFLOW);
        return;
    }
    l->scale = (double *)moei_alloc(a, x->count * x->n, sizeof *l->scale);
    l->code = (signed char *)moei_alloc(a, x->n, x->k);
    l->block = (uint16_t *)moei_alloc(a, x->n, l->blocks * sizeof *l->block);
    l->bias = (int32_t *)moei_alloc(a, x->n, sizeof *l->bias);
    l->factor = (int16_t *)moei_alloc(a, x->n, sizeof *l->factor);
    if (l->scale == NULL || l->code == NULL || l->block == NULL || l->bias == NULL || l->factor == NULL) {
        moei_maker_fail(m, MOE_ERR_MEMORY);
        return;
    }
    for (i = 0; i < x->count * x->n; i++) {
        l->scale[i] = moei_codes_row_scale(m, x->w + i * x->k, x->k, moei_matrix_bias(x, i), in_scale);
        if (l->scale[i] > l->max_scale) l->max_scale = l->scale[i];
    }
}

/* Quantizes one row; for int4 also computes its blocks' factors. */
static void moei_codes_row(const moei_maker *m, const moei_matrix *x, const moe_real *w, double row, moei_codes *l,
                           size_t j) {
    size_t p, b;
    for (b = 0; b < l->blocks; b++) {
        const size_t from = b * MOEI_INT_BLOCK, end = from + MOEI_INT_BLOCK < x->k ? from + MOEI_INT_BLOCK : x->k;
        double scale = row;
        if (m->weights == MOE_WEIGHTS_INT4) {
            l->block[j * l->blocks + b] =
                (uint16_t)moei_nearest(row > 0 ? moei_int4_scale(end - from, w + from) / row : 0, 65535);
            scale = row * l->block[j * l->blocks + b];
        }
        for (p = from; p < end; p++) {
            const double level = scale > 0 ? (double)w[p] / scale : 0;
            const moe_real rounded = (moe_real)scale; /* underflows to 0 in rows with only a tiny bias */
            if (m->weights == MOE_WEIGHTS_INT8)
                l->code[j * x->k + p] = (signed char)(rounded > 0 ? moei_code_of(MOE_TYPE_Q8, w[p], rounded) : 0);
            else l->code[j * x->k + p] = (signed char)(level < -8 ? -8 : moei_nearest(level < 7 ? level : 7, 8));
        }
    }
}

/* ---- packing of products ---- */

/* The source of a packed product. */
typedef struct moei_int_source {
    size_t n, k, ld;
    const signed char *codes;
    const int32_t *bias;
    const int16_t *factor;
    const uint16_t *block; /* NULL: int8 */
} moei_int_source;

static uint64_t moei_int_block_scale(const moei_int_source *s, size_t j, size_t p) {
    return s->block != NULL ? s->block[j * ((s->k + MOEI_INT_BLOCK - 1) / MOEI_INT_BLOCK) + p / MOEI_INT_BLOCK] : 1;
}

static moe_status moei_int_check(const moei_int_source *s) {
    const int lowest = s->block != NULL ? -8 : -127, highest = s->block != NULL ? 7 : 127;
    size_t j, p;
    if (s->n > 0 && (s->factor == NULL || (s->k > 0 && s->codes == NULL) || s->ld < s->k)) return MOE_ERR_ARGUMENT;
    for (j = 0; j < s->n; j++) {
        const int64_t bias = s->bias != NULL ? s->bias[j] : 0;
        uint64_t bound = (uint64_t)(bias < 0 ? -bias : bias);
        if (s->factor[j] < 0) return MOE_ERR_ARGUMENT;
        for (p = 0; p < s->k; p++) {
            const int w = s->codes[j * s->ld + p];
            if (w < lowest || w > highest || moei_int_block_scale(s, j, p) > 32767) return MOE_ERR_ARGUMENT;
            bound += 127 * (uint64_t)(w < 0 ? -w : w) * moei_int_block_scale(s, j, p);
        }
        if (bound >= (uint64_t)1 << 30) return MOE_ERR_OVERFLOW;
    }
    return MOE_OK;
}

static unsigned char *moei_int_put(unsigned char *out, uint32_t value, int bytes) {
    for (; bytes > 0; bytes--, value >>= 8) *out++ = (unsigned char)(value & 255u);
    return out;
}

/* The code of output j at input p, 0 outside the matrix. */
static int moei_int_code(const moei_int_source *s, size_t j, size_t p) {
    return j < s->n && p < s->k ? s->codes[j * s->ld + p] : 0;
}

/* The biases of `count` outputs from j. */
static unsigned char *moei_int_put_biases(const moei_int_source *s, size_t j, size_t count, unsigned char *out) {
    const size_t end = j + count;
    for (; j < end; j++) out = moei_int_put(out, j < s->n && s->bias != NULL ? (uint32_t)s->bias[j] : 0, 4);
    return out;
}

static unsigned char *moei_int_put_factors(const moei_int_source *s, size_t j, size_t count, unsigned char *out) {
    const size_t end = j + count;
    for (; j < end; j++) out = moei_int_put(out, j < s->n ? (uint32_t)s->factor[j] : 0, 2);
    return out;
}

static unsigned char *moei_int8_put_inputs(const moei_int_source *s, size_t j, unsigned char *out) {
    size_t p;
    for (p = 0; p < ((s->k + 3) & ~(size_t)3); p++) {
        const int32_t b = moei_int_code(s, j + 1, p);
        if (j + 1 == s->n) out = moei_int_put(out, (uint32_t)moei_int_code(s, j, moei_int8_place(p)), 1);
        else out = moei_int_put(out, (uint32_t)(256 * b + moei_int_code(s, j, p)), 2);
    }
    return out;
}

static unsigned char *moei_int4_put_inputs(const moei_int_source *s, size_t j, unsigned char *out) {
    const size_t k4 = (s->k + 3) & ~(size_t)3;
    size_t p, i;
    for (p = 0; p < k4; p++) {
        int32_t codes = 0x888;
        for (i = 0; i < 4; i++) codes += moei_int_code(s, j + i, p) * ((int32_t)1 << 4 * i);
        out = moei_int_put(out, (uint32_t)codes, 2);
        if ((p + 1) % MOEI_INT_BLOCK != 0 && p + 1 < k4) continue;
        for (i = 0; i < 4; i++)
            out = moei_int_put(out, j + i < s->n ? (uint32_t)moei_int_block_scale(s, j + i, p - p % 4) : 0, 2);
    }
    return out;
}

static moe_status moei_int_pack(const moei_int_source *s, size_t size, unsigned char *out) {
    const size_t group = s->block != NULL ? 4 : 2;
    size_t j;
    moe_status status;
    if (s->n == 0) return MOE_OK;
    if (size == 0) return MOE_ERR_OVERFLOW;
    if (out == NULL) return MOE_ERR_ARGUMENT;
    status = moei_int_check(s);
    if (status != MOE_OK) return status;
    for (j = 0; j < s->n; j += group) {
        out = moei_int_put_biases(s, j, group == 2 && j + 1 == s->n ? 1 : group, out);
        if (group == 2) out = moei_int8_put_inputs(s, j, moei_int_put_factors(s, j, 2, out));
        else out = moei_int_put_factors(s, j, 4, moei_int4_put_inputs(s, j, out));
    }
    return MOE_OK;
}

/* Packs codes [n,k], rows ld apart, bias [n], factor [n] and (int4) block [n][ceil(k/32)], both
   within 0..32767, into out [moei_int8_size or moei_int4_size bytes]. bias NULL: 0.
   MOE_ERR_ARGUMENT: a code, factor or block is out of range, a pointer is missing, or ld < k.
   MOE_ERR_OVERFLOW: the size overflows, or |bias_j| + 127 sum_p |w_jp| block_jp reaches 2^30. On
   error out is unchanged. */
static moe_status moei_int8_pack(size_t n, size_t k, const signed char *codes, size_t ld, const int32_t *bias,
                                 const int16_t *factor, unsigned char *out) {
    const moei_int_source s = {n, k, ld, codes, bias, factor, NULL};
    return moei_int_pack(&s, moei_int8_size(n, k), out);
}

static moe_status moei_int4_pack(size_t n, size_t k, const signed char *codes, size_t ld, const int32_t *bias,
                                 const int16_t *factor, const uint16_t *block, unsigned char *out) {
    const moei_int_source s = {n, k, ld, codes, bias, factor, block};
    if (block == NULL) return MOE_ERR_ARGUMENT;
    return moei_int_pack(&s, moei_int4_size(n, k), out);
}

/* Packs the matrices into buffer, one after the other: sum * factor = float * unit, where unit is
   2^bits / the scale of the result. Returns their offset; *size: the bytes of one. */
static uint32_t moei_matrix_pack(moei_maker *m, const moei_matrix *x, moei_codes *l, double in_scale, double unit,
                                 moe_buffer *buffer, size_t *size) {
    const int int8 = m->weights == MOE_WEIGHTS_INT8;
    const uint32_t at = (uint32_t)buffer->size;
    const size_t table = l->wide ? (x->n + 1) / 2 * 8 : 0;
    unsigned char *bytes;
    size_t e, j;
    *size = int8 ? moei_int8_size(x->n, x->k) : moei_int4_size(x->n, x->k);
    if (*size == 0) moei_maker_fail(m, MOE_ERR_OVERFLOW);
    if (m->status != MOE_OK) return 0;
    bytes = (unsigned char *)moei_alloc(&m->made.allocator, *size, 1);
    if (bytes == NULL) moei_maker_fail(m, MOE_ERR_MEMORY);
    for (e = 0; e < x->count && m->status == MOE_OK; e++) {
        moe_status status;
        for (j = 0; j < x->n; j++) {
            const size_t i = e * x->n + j;
            const double one = in_scale * l->scale[i];
            moei_codes_row(m, x, x->w + i * x->k, l->scale[i], l, j);
            l->bias[j] = one > 0 && !l->wide ? moei_nearest(moei_matrix_bias(x, i) / one, 536870911) : 0;
            l->factor[j] = (int16_t)moei_nearest(one * unit, 32767);
            if (l->factor[j] > 0) l->bias[j] += 32768 / l->factor[j]; /* makes >> 16 round to nearest */
        }
        status = int8 ? moei_int8_pack(x->n, x->k, l->code, x->k, l->bias, l->factor, bytes)
                      : moei_int4_pack(x->n, x->k, l->code, x->k, l->bias, l->factor, l->block, bytes);
        if (status != MOE_OK) moei_maker_fail(m, status);
        (void)moei_constants(m, buffer, bytes, *size);
        for (j = 0; j < table / 4; j++) {
            const double bias = j < x->n ? ldexp(moei_matrix_bias(x, e * x->n + j) * unit, MOEI_INT_GUARD - 16) : 0;
            moei_put_32_le(bytes, moei_nearest(bias, 536870911));
            (void)moei_constants(m, buffer, bytes, 4);
        }
    }
    moei_free(&m->made.allocator, bytes, *size);
    *size += table;
    return at;
}

/* The scale of the codes that products multiply: those of a wide vector are its upper bytes. */
static double moei_input_scale(const moei_maker *m, uint32_t in) {
    if (m->status != MOE_OK) return 1;
    return m->vectors[in].limit == MOEI_WIDE ? m->vectors[in].scale * 256 : m->vectors[in].scale;
}

/* Keeps the floats of a product's matrices. */
static void moei_note_matrix(moei_maker *m, const moei_matrix *x) {
    moe_buffer *to = &m->trace->floats;
    size_t e, j;
    moe_status status = m->status;
    m->reference = (uint32_t)(to->size / sizeof *x->w);
    for (e = 0; e < x->count && status == MOE_OK; e++) {
        status = moei_buffer_write(to, x->w + e * x->n * x->k, x->n * x->k * sizeof *x->w);
        for (j = 0; j < x->n && status == MOE_OK; j++) {
            const moe_real bias = (moe_real)moei_matrix_bias(x, e * x->n + j);
            status = moei_buffer_write(to, &bias, sizeof bias);
        }
    }
    if (status != MOE_OK) moei_maker_fail(m, status);
}

/* Packs the constants of a product into those of the model or, for experts, into a new piece of
   their blocks. */
static uint32_t moei_product_constants(moei_maker *m, const moei_matrix *x, moei_codes *l, uint32_t in, double unit) {
    const double in_scale = moei_input_scale(m, in);
    size_t size, at = 0, i;
    if (m->status != MOE_OK) return 0;
    l->wide = m->vectors[in].limit == MOEI_WIDE;
    m->counted += (size_t)(1 + l->wide) * x->n * x->k;
    if (m->trace != NULL) moei_note_matrix(m, x);
    if (!m->in_block) return moei_matrix_pack(m, x, l, in_scale, unit, &m->made.weights, &size);
    (void)moei_matrix_pack(m, x, l, in_scale, unit, &m->pieces, &size);
    for (i = 0; i < m->n_pieces; i++) at += m->piece[i];
    m->piece[m->n_pieces++] = size;
    return (uint32_t)at;
}

/* The vector of an int4 product's input sums: that of an earlier product that surely has run, or a
   new one. */
static uint32_t moei_product_sums(moei_maker *m, uint32_t in, moei_int_op *op) {
    const moei_vector v = m->vectors[in];
    uint32_t sums;
    op->index = v.sums != MOEI_INT_NONE && (v.branch == 0 || (v.branch > 0 && v.branch == m->branch));
    if (op->index == 1) return v.sums;
    sums = moei_vector_new(m, (op->shape.k + MOEI_INT_BLOCK - 1u) / MOEI_INT_BLOCK, MOEI_WIDE, 1, 0);
    if (m->status != MOE_OK) return in;
    m->vectors[sums].first_use = m->clock + 1;
    m->vectors[in].sums = sums;
    m->vectors[in].branch = m->branch;
    return sums;
}

/* Appends a product, out or sum += W x + b, of codes of 8 or 16 bits. */
static void moei_product_append(moei_maker *m, moei_int_op op, int adding, uint32_t in, uint32_t out) {
    const size_t k = (size_t)(op.shape.k + 3) / 4 * 4;
    uint32_t room = in;
    if (m->status != MOE_OK) return;
    if (m->vectors[in].limit == MOEI_WIDE) {
        op.run = adding ? moei_int_op_int16_add : moei_int_op_int16;
        room = moei_vector_new(m, 2 * k + 2 * ((size_t)(op.shape.n + 3) / 4 * 4), MOEI_WIDE, 1, 0);
        if (m->status == MOE_OK) m->vectors[room].first_use = m->clock + 1;
    } else if (m->weights == MOE_WEIGHTS_INT8) op.run = adding ? moei_int_op_int8_add : moei_int_op_int8;
    else {
        op.run = adding ? moei_int_op_int4_add : moei_int_op_int4;
        room = moei_product_sums(m, in, &op);
    }
    moei_op_append(m, op, in, room, out);
}

/* The inverse of what the sums of a product are multiplied by besides its factors; see
   moei_int_op_int16. */
static double moei_product_unit(const moei_maker *m, uint32_t in) {
    if (m->status != MOE_OK || m->vectors[in].limit != MOEI_WIDE) return 1;
    return ldexp(65536.0 / (double)MOEI_INT_UPPER, -MOEI_INT_GUARD);
}

/* The largest magnitude of a matrix times a narrow vector, or 4 times that of a bias if this is
   more: moei_int_op_int16 stores a bias in half units, below 2^29. */
static double moei_matrix_bound(const moei_matrix *x, double in_scale) {
    double most = 0;
    size_t i, p;
    for (i = 0; i < x->count * x->n; i++) {
        const double bias = fabs(moei_matrix_bias(x, i));
        double sum = bias;
        for (p = 0; p < x->k; p++) sum += 127.0 * in_scale * fabs((double)x->w[i * x->k + p]);
        if (sum > most) most = sum;
        if (4 * bias > most) most = 4 * bias;
    }
    return most;
}

/* y = max(low, min(W x + b, high)) of a vector. range: the largest |y|; limit: of its codes;
   scale: that of y, or 0 to derive it from range. */
static uint32_t moei_product_within(moei_maker *m, const moei_matrix *x, uint32_t in, int limit, double low,
                                    double high, double range, double scale) {
    moei_codes l;
    moei_int_op op;
    uint32_t out;
    double in_scale, unit;
    int shift;
    if (m->status != MOE_OK) return 0;
    in_scale = moei_input_scale(m, in);
    moei_codes_begin(m, x, in_scale, &l);
    /* a wide vector has headroom above the calibrated range; its codes need not be finer than the
       sums */
    if (!(scale > 0)) {
        scale = limit == MOEI_NARROW ? range / limit : range * MOEI_HEADROOM / limit;
        if (scale < in_scale * l.max_scale * moei_product_unit(m, in) / 0.49)
            scale = in_scale * l.max_scale * moei_product_unit(m, in) / 0.49;
        if (!(scale > 1e-250)) scale = 1; /* 0, or so small that its inverse may be infinite */
    }
    unit = moei_product_unit(m, in) / scale;
    shift = moei_shift_for(in_scale * l.max_scale * unit, 16, 15);
    while (shift > 0 && ldexp(moei_matrix_bound(x, in_scale) / scale, shift) > 1e9) shift--;
    out = moei_vector_new(m, x->n, limit, scale, range);
    op = moei_op(NULL, x->n, x->k, (int)moei_nearest(low / scale, limit), (int)moei_nearest(high / scale, limit),
                 shift < 0 ? 0 : shift);
    op.at = moei_product_constants(m, x, &l, in, ldexp(unit, 16 + op.shape.shift));
    moei_codes_free(m, x, &l);
    moei_product_append(m, op, 0, in, out);
    return out;
}

/* y = W x + b, or with relu max(W x + b, 0). */
static uint32_t moei_product(moei_maker *m, const moei_matrix *x, uint32_t in, int limit, int relu, double range,
                             double scale) {
    return moei_product_within(m, x, in, limit, relu ? 0 : -HUGE_VAL, HUGE_VAL, range, scale);
}

/* sum += weight (W x + b): the last product of an expert. The unit of a sum is scale / 2^shift,
   that of a weight 2^(bits - 15). */
static void moei_product_add(moei_maker *m, const moei_matrix *x, uint32_t in, int bits, double scale, int shift,
                             uint32_t sum) {
    moei_codes l;
    moei_int_op op;
    if (m->status != MOE_OK) return;
    moei_codes_begin(m, x, moei_input_scale(m, in), &l);
    op = moei_op(NULL, x->n, x->k, 0, 0, 0);
    op.at = moei_product_constants(
        m, x, &l, in, ldexp(m->vectors[in].limit == MOEI_WIDE ? 1.0 / 64 : 1.0, 17 + bits + shift) / scale);
    moei_codes_free(m, x, &l);
    moei_product_append(m, op, 1, in, sum);
    m->note->alpha = ldexp(1, bits);
}

/* The largest row scale of a matrix, which determines the units of a sum. */
static double moei_matrix_max_scale(moei_maker *m, const moei_matrix *x, double in_scale) {
    double most = 0, row;
    size_t i;
    for (i = 0; i < x->count * x->n; i++) {
        row = moei_codes_row_scale(m, x->w + i * x->k, x->k, moei_matrix_bias(x, i), in_scale);
        if (row > most) most = row;
    }
    return most * in_scale;
}

/* ---- elementwise operations ---- */

enum { MOEI_SOFTPLUS = MOE_ACT_COUNT }; /* an additional function of curves */

/* The |x| beyond which an activation of alpha x differs from max(x, 0), -1, 0 or 1 by at most 5e-4
   of x; 0: there is none. */
static double moei_curve_end(int act, double alpha) {
    switch (act) {
    case MOE_ACT_GELU:
    case MOE_ACT_GELU_TANH: return 4 / alpha;
    case MOE_ACT_TANH: return 5 / alpha;
    case MOE_ACT_SILU: return 8 / alpha;
    case MOE_ACT_SIGMOID: return 10 / alpha;
    default: return 0;
    }
}

/* The magnitude that the input of a curve is expected to reach. */
static double moei_curve_reach(const moei_maker *m, uint32_t in) {
    const moei_vector *v = &m->vectors[in];
    const double reach = v->range * 2, most = v->scale * v->limit;
    return v->range > 0 && reach < most ? reach : most;
}

/* y = max(x, 0), wide, at another scale. */
static uint32_t moei_positive(moei_maker *m, uint32_t in, int limit, double scale) {
    const uint32_t y = moei_rescale(m, in, limit, scale);
    if (m->status == MOE_OK) m->last_op->shape.low = 0;
    return y;
}

/* y = f(alpha x) / alpha, x wide; f is the activation or, with rest, its difference from max(alpha
   x, 0). The curve has y at 65 points over all codes of its input. x is rescaled to finer codes
   first if data reach less than three quarters of its codes, as sums of few inputs do, or if f ends
   there. */
static uint32_t moei_points(moei_maker *m, int act, int rest, double alpha, uint32_t in, int limit, double scale,
                            double range) {
    const double fine = limit == MOEI_NARROW ? 256 : 1, end = moei_curve_end(act, alpha);
    unsigned char points[65 * 2];
    moei_int_op op;
    uint32_t out;
    double reach;
    int i, ends;
    if (m->status != MOE_OK) return 0;
    reach = moei_curve_reach(m, in);
    ends = end > 0 && (rest || act == MOE_ACT_TANH || act == MOE_ACT_SIGMOID) && reach > end;
    if (ends) reach = end;
    if (reach < m->vectors[in].scale * 4) reach = m->vectors[in].scale * 4;
    if (act != MOE_ACT_RELU && act != MOE_ACT_IDENTITY && reach * 1.33 < m->vectors[in].scale * MOEI_WIDE) {
        in = moei_rescale(m, in, MOEI_WIDE, reach / MOEI_WIDE);
        m->note->clamps = ends;
    }
    if (m->status != MOE_OK) return 0;
    for (i = 0; i <= 64; i++) {
        moe_real x = (moe_real)(((double)i * 1024 - 32768) * m->vectors[in].scale * alpha), y;
        if (act == MOEI_SOFTPLUS) y = moei_softplus(x);
        else moe_activate(NULL, act, 1, &x, &y);
        if (rest && x > 0) y -= x;
        moei_put_16_le(points + 2 * i, moei_nearest((double)y / alpha / (scale > 0 ? scale : 1) * fine, 32767));
    }
    out = moei_vector_new(m, m->vectors[in].width, limit, scale, range);
    op = moei_op(moei_int_op_curve, m->vectors[in].width, 0, -limit, limit, limit == MOEI_NARROW ? 8 : 0);
    op.at = moei_constants(m, &m->made.weights, points, sizeof points);
    moei_op_append(m, op, in, in, out);
    m->note->act = act;
    m->note->rest = rest;
    m->note->alpha = alpha;
    return out;
}

/* y = act(alpha x) / alpha, x wide: a curve, except where its points would be too far apart: relu2
   is a product; silu and gelu are max(x, 0) plus a curve of the rest. */
static uint32_t moei_curve_of(moei_maker *m, int act, double alpha, uint32_t in, int limit, double scale,
                              double range) {
    const double end = moei_curve_end(act, alpha);
    uint32_t a, b, out;
    double reach, fine;
    moei_int_op op;
    int shift = 0;
    if (m->status != MOE_OK) return 0;
    if (!(scale > 0)) scale = 1;
    reach = moei_curve_reach(m, in);
    if (act == MOE_ACT_RELU2) {
        while (shift < 30 && ldexp(reach * reach, shift + 1) <= scale * 1e9) shift++;
        a = moei_positive(m, in, MOEI_WIDE, sqrt(ldexp(scale, -shift)));
        out = moei_vector_new(m, m->status == MOE_OK ? m->vectors[a].width : 0, limit, scale, range);
        moei_op_append(m, moei_op(moei_int_op_multiply, m->vectors[in].width, 0, 0, limit, shift), a, a, out);
        return out;
    }
    if (!(end > 0) || act == MOE_ACT_TANH || act == MOE_ACT_SIGMOID || reach <= 1.25 * end)
        return moei_points(m, act, 0, alpha, in, limit, scale, range);
    fine = limit == MOEI_NARROW ? scale / 128 : scale;
    a = moei_positive(m, in, MOEI_WIDE, fine);
    b = moei_points(m, act, 1, alpha, in, MOEI_WIDE, fine, range);
    if (m->status != MOE_OK) return 0;
    out = moei_vector_new(m, m->vectors[in].width, limit, scale, range);
    op = moei_op(moei_int_op_add, m->vectors[in].width, 0, -limit, limit, limit == MOEI_NARROW ? 7 : 0);
    op.factor = op.factor2 = 1;
    moei_op_append(m, op, a, b, out);
    return out;
}

static uint32_t moei_curve(moei_maker *m, int act, uint32_t in, int limit, double scale, double range) {
    return moei_curve_of(m, act, 1, in, limit, scale, range);
}

/* y = act(alpha gate) / alpha * up. The scale of the curve is chosen to give y its scale.
   act_range: of the gate; the activation may exceed it. */
static uint32_t moei_gated_product(moei_maker *m, int act, double alpha, uint32_t gate, uint32_t up, double act_range,
                                   int limit, double range) {
    double scale = moei_hidden_scale(limit, range), finest, fine;
    moe_real most = (moe_real)(act_range * alpha);
    int shift = 0;
    uint32_t curved, out;
    if (m->status != MOE_OK) return 0;
    if (!(scale > 0)) scale = 1;
    moe_activate(NULL, act, 1, &most, &most); /* relu2 and sigmoid may exceed the gate */
    if ((double)most / alpha > act_range) act_range = (double)most / alpha;
    finest = (act_range > 0 ? act_range : 1) * MOEI_HEADROOM / MOEI_WIDE * m->vectors[up].scale;
    while (shift < 30 && ldexp(finest, shift + 1) <= scale) shift++;
    fine = scale / ldexp(m->vectors[up].scale, shift);
    curved = moei_curve_of(m, act, alpha, gate, MOEI_WIDE, fine, act_range);
    if (m->status != MOE_OK) return 0;
    out = moei_vector_new(m, m->vectors[up].width, limit, scale, range);
    moei_op_append(m, moei_op(moei_int_op_multiply, m->vectors[up].width, 0, -limit, limit, shift), curved, up, out);
    return out;
}

/* y = a + b, wide; scale: that of y, or 0 to derive it from range. */
static uint32_t moei_added_at(moei_maker *m, uint32_t a, uint32_t b, double range, double scale) {
    double most;
    uint32_t out;
    moei_int_op op;
    int shift = 14;
    a = moei_widened(m, a);
    b = moei_widened(m, b);
    if (m->status != MOE_OK) return 0;
    if (!(scale > 0)) scale = range * 1.25 / MOEI_WIDE;
    /* the scale of a vector of zeros says nothing */
    most = m->vectors[a].range > 0 || !(m->vectors[b].range > 0) ? m->vectors[a].scale : 0;
    if (m->vectors[b].range > 0 && m->vectors[b].scale > most) most = m->vectors[b].scale;
    if (!(scale > most / 64)) scale = most / 64;
    while (shift > 0 && ldexp(most / scale, shift) > 16383) shift--;
    out = moei_vector_new(m, m->vectors[a].width, MOEI_WIDE, scale, range);
    op = moei_op(moei_int_op_add, m->vectors[out].width, 0, -MOEI_WIDE, MOEI_WIDE, shift);
    op.factor = (int16_t)moei_nearest(ldexp(m->vectors[a].scale / scale, shift), 16383);
    op.factor2 = (int16_t)moei_nearest(ldexp(m->vectors[b].scale / scale, shift), 16383);
    moei_op_append(m, op, a, b, out);
    return out;
}

static uint32_t moei_added(moei_maker *m, uint32_t a, uint32_t b, double range) {
    return moei_added_at(m, a, b, range, 0);
}

/* ---- experts ---- */

/* The destination of the last product of an expert: a sum, or, with sum = MOEI_INT_NONE, a vector
   of its own. */
typedef struct moei_sum_units {
    uint32_t sum;
    int via_vector; /* 1: through a vector, whose codes are finer */
    int bits, shift, limit;
    double scale, range;
} moei_sum_units;

/* The matrix of the last product of an expert run. */
static moei_matrix moei_last_matrix(const moei_expert_run *run, size_t count) {
    const moei_step *step = &run->kind->steps[run->kind->n_steps - 1];
    return moei_matrix_of(run->layer->tensors[step->weight], step->bias < 0 ? NULL : run->layer->tensors[step->bias],
                          count, run->width[MOE_NODE_OUTPUT], run->width[step->from]);
}

/* Whether the activation of this product is relu and nothing else reads the product: such an expert
   has no linear branch. */
static int moei_step_is_relu(const moei_expert_run *run, const moei_step *step) {
    return run->act == MOE_ACT_RELU && run->kind->up_is != MOE_NODE_UP &&
           step + 1 < run->kind->steps + run->kind->n_steps && step[1].op == MOEI_STEP_ACT && step[1].from == step->to;
}

/* The range of a shaped expert's gate that matters: up to its limit, and down to where silu is
   practically 0. */
static double moei_gate_range(const moei_expert_run *run, double range) {
    const double most =
        run->shaped && (double)run->limit < 16 / (double)run->alpha ? 16 / (double)run->alpha : (double)run->limit;
    return run->shaped && range > most ? most : range;
}

/* The input of a shaped gate: min(g, L), or max(-L, min(u, L)) + offset. Nothing else reads it. */
static uint32_t moei_shaped_product(moei_maker *m, const moei_expert_run *run, int node, moei_matrix w, uint32_t in,
                                    double range) {
    const double limit = (double)run->limit, offset = (double)run->offset;
    if (node == MOE_NODE_GATE)
        return moei_product_within(m, &w, in, MOEI_WIDE, -HUGE_VAL, limit, moei_gate_range(run, range), 0);
    w.offset = offset;
    return moei_product_within(m, &w, in, MOEI_WIDE, offset - limit, offset + limit,
                               (range < limit ? range : limit) + fabs(offset), 0);
}

/* The limit of an activation's codes. Score attentive compares one of them with an 8-bit key; with
   int8 weights LOW is wide, since three more products follow it. */
static int moei_node_limit(const moei_maker *m, const moei_expert_run *run, int node, const moei_range *range) {
    if (run->layer->config.router.score == MOE_SCORE_ATTENTIVE && run->scored == node) return MOEI_NARROW;
    if (node == MOE_NODE_LOW && m->config->weights == MOE_WEIGHTS_INT8) return MOEI_WIDE;
    return moei_limit_for(m, &range[node]);
}

/* Appends all operations of an expert run but the last; returns the input of the last. x is narrow.
   node receives the vectors of all activations; run->needed names those that are required. */
static uint32_t moei_expert_hidden(moei_maker *m, const moei_expert_run *run, size_t count, uint32_t x,
                                   const moei_range *range, uint32_t *node) {
    const int fuses = moei_scored_activation(&run->layer->config) != MOE_NODE_GATE; /* the product itself is not read */
    const double alpha = run->shaped ? (double)run->alpha : 1;
    uint32_t from = x;
    int i, j;
    for (i = 0; i < MOE_NODE_COUNT; i++) node[i] = MOEI_INT_NONE;
    for (i = 0; i < run->kind->n_steps - 1; i++) {
        const moei_step *step = &run->kind->steps[i];
        const int limit = moei_node_limit(m, run, step->to, range);
        moei_matrix w;
        if (!(run->needed >> step->to & 1u) || node[step->to] != MOEI_INT_NONE) continue;
        from = step->from == MOEI_X ? x : node[step->from];
        if (step->op == MOEI_STEP_ACT)
            node[step->to] = moei_curve_of(m, run->act, alpha, from, limit,
                                           moei_hidden_scale(limit, range[step->to].most), range[step->to].most);
        else if (step->op == MOEI_STEP_GATED)
            node[step->to] =
                moei_gated_product(m, run->act, alpha, from, node[step->second],
                                   moei_gate_range(run, range[step->from].most), limit, range[step->to].most);
        else {
            w = moei_matrix_of(run->layer->tensors[step->weight],
                               step->bias < 0 ? NULL : run->layer->tensors[step->bias], count, run->width[step->to],
                               run->width[step->from]);
            if (fuses && moei_step_is_relu(run, step))
                node[step[1].to] =
                    moei_product(m, &w, from, moei_node_limit(m, run, step[1].to, range), 1, range[step[1].to].most, 0);
            else if (run->shaped) node[step->to] = moei_shaped_product(m, run, step->to, w, from, range[step->to].most);
            else
                node[step->to] =
                    moei_product(m, &w, from, step->to == MOE_NODE_LOW ? limit : MOEI_WIDE, 0, range[step->to].most, 0);
        }
    }
    j = run->kind->steps[run->kind->n_steps - 1].from;
    return j == MOEI_X ? x : node[j];
}

/* The least scale of a wide vector for W x + b with results up to range. */
static double moei_wide_scale(moei_maker *m, const moei_matrix *x, double in_scale, double range) {
    const double scale = range * MOEI_HEADROOM / MOEI_WIDE, finest = moei_matrix_max_scale(m, x, in_scale) / 0.49;
    return scale > finest ? scale : finest > 0 ? finest : 1;
}

/* The shift that converts weight * code of a vector with a scale of at least `least` to the units
   of the sum. Negative: these units are too fine. */
static int moei_sum_shift(const moei_sum_units *to, int bits, double least) {
    const int shift = (int)floor(log(ldexp(to->scale, 15 - bits - to->shift) / least) / log(2.0));
    return shift < 30 ? shift : 30;
}

/* sum += weight (W x + b), through a wide vector, which is returned. */
static uint32_t moei_product_accumulate(moei_maker *m, const moei_matrix *x, uint32_t in, const moei_sum_units *to,
                                        double range) {
    uint32_t y;
    int shift;
    if (m->status != MOE_OK) return 0;
    shift =
        moei_sum_shift(to, to->bits, moei_wide_scale(m, x, moei_input_scale(m, in) * moei_product_unit(m, in), range));
    if (shift < 0) {
        moei_maker_fail(m, MOE_ERR_OVERFLOW);
        return 0;
    }
    y = moei_product(m, x, in, MOEI_WIDE, 0, range, ldexp(to->scale, 15 - to->bits - to->shift - shift));
    moei_op_append(m, moei_op(moei_int_op_accumulate, x->n, 0, 0, 0, shift), y, y, to->sum);
    m->note->alpha = ldexp(1, to->bits);
    return y;
}

/* Appends the last product of an expert run. range: of its output. */
static uint32_t moei_expert_ops(moei_maker *m, const moei_expert_run *run, size_t count, uint32_t hidden,
                                const moei_sum_units *to, double range) {
    moei_matrix last = moei_last_matrix(run, count);
    if (to->sum == MOEI_INT_NONE) return moei_product(m, &last, hidden, to->limit, 0, to->range, 0);
    if (to->via_vector) return moei_product_accumulate(m, &last, hidden, to, range);
    moei_product_add(m, &last, hidden, to->bits, to->scale, to->shift, to->sum);
    return to->sum;
}

/* ---- >>routers: a configuration as an integer router ---- */

typedef struct moei_int_router_plan {
    moei_int_router router; /* its offsets are relative to the start of the table */
    moe_real z_scale;       /* logit = z * z_scale, within +-32767 */
    moe_real weight_scale;  /* weight = code / 32768 * weight_scale, a power of two */
    size_t table_size;      /* bytes of the table, a multiple of 4; 0: none */
    int needs_logits;       /* 0: no stage reads z */
} moei_int_router_plan;

typedef struct moei_ir_gate_row {
    int value; /* MOE_GATE_ */
    moei_int_gate *gate;
    moei_int_gate *share; /* for quotients */
} moei_ir_gate_row;

typedef struct moei_ir_select_row {
    int value; /* MOE_SELECT_ */
    moei_int_select *select;
    int takes_all; /* 1: up to E experts, else K */
} moei_ir_select_row;

typedef struct moei_ir_weight_row {
    int value; /* MOE_WEIGHT_ */
    moei_int_weight *weight;
    int reads; /* 0 nothing, 1 z only, 2 values of the gate, 3 their quotients */
} moei_ir_weight_row;

/* The integer form of each gate. */
static const moei_ir_gate_row moei_ir_gates[] = {
    {MOE_GATE_SOFTMAX, moei_int_gate_softmax, moei_int_share_softmax},
    {MOE_GATE_SIGMOID, moei_int_gate_sigmoid, moei_int_share_sigmoid},
    {MOE_GATE_SQRT_SOFTPLUS, moei_int_gate_sqrt_softplus, moei_int_share_sqrt_softplus},
    {MOE_GATE_RELU, moei_int_gate_relu, moei_int_gate_relu},
    {MOE_GATE_IDENTITY, moei_int_gate_logits, moei_int_gate_logits}};

/* The integer form of each selection that has one, for one token outside training; the last row
   stands for all others. */
static const moei_ir_select_row moei_ir_selects[] = {{MOE_SELECT_TOP_K, moei_int_select_top_k, 0},
                                                     {MOE_SELECT_DENSE, moei_int_select_top_k, 1},
                                                     {MOE_SELECT_GROUPED_TOP_K, moei_int_select_grouped, 0},
                                                     {MOE_SELECT_TOP_P, moei_int_select_top_p, 1},
                                                     {MOE_SELECT_THRESHOLD, moei_int_select_threshold, 1},
                                                     {MOE_SELECT_POSITIVE, moei_int_select_threshold, 1},
                                                     {MOE_SELECT_HASH, moei_int_select_hash, 0},
                                                     {MOE_SELECT_SINKHORN, moei_int_select_top_k, 0},
                                                     {MOE_SELECT_SAMPLE, moei_int_select_top_k, 0},
                                                     {MOE_SELECT_BALANCED, moei_int_select_top_k, 0},
                                                     {MOE_SELECT_GROUPED_EACH, moei_int_select_each, 0},
                                                     {MOE_SELECT_EXPERT_THRESHOLD, moei_int_select_threshold, 1},
                                                     /* only with a predictor */
                                                     {MOE_SELECT_EXPERT_CHOICE, moei_int_select_threshold, 1},
                                                     {-1, NULL, 0}};

static const moei_ir_weight_row moei_ir_weights[] = {{MOE_WEIGHT_SUM, moei_int_weight_sum, 3},
                                                     {MOE_WEIGHT_SOFTMAX, moei_int_weight_sum, 1},
                                                     {MOE_WEIGHT_RAW, moei_int_weight_raw, 2},
                                                     {MOE_WEIGHT_P_NORM, moei_int_weight_norm, 3},
                                                     {MOE_WEIGHT_UNIFORM, moei_int_weight_uniform, 0},
                                                     {MOE_WEIGHT_ONE, moei_int_weight_one, 0},
                                                     {MOE_WEIGHT_SPARSEMIXER, moei_int_weight_sparsemixer, 1}};

/* Every gate and every kind of weights has a row. */
typedef char moei_ir_rows_are_all[sizeof moei_ir_gates / sizeof *moei_ir_gates == MOE_GATE_COUNT &&
                                          sizeof moei_ir_weights / sizeof *moei_ir_weights == MOE_WEIGHT_COUNT
                                      ? 1
                                      : -1];

static const moei_ir_gate_row *moei_ir_gate_of(int value) {
    const moei_ir_gate_row *row = moei_ir_gates;
    while (row->value != value) row++;
    return row;
}

static const moei_ir_select_row *moei_ir_select_of(int value) {
    const moei_ir_select_row *row = moei_ir_selects;
    while (row->value >= 0 && row->value != value) row++;
    return row;
}

static const moei_ir_weight_row *moei_ir_weight_row_of(int value) {
    const moei_ir_weight_row *row = moei_ir_weights;
    while (row->value != value) row++;
    return row;
}

/* A plan under construction. */
typedef struct moei_ir_planner {
    const moe_router_config *c; /* at the current step */
    const moe_real *const *tensors;
    moe_error *error;
    moei_int_router_plan made;
    unsigned char *table; /* NULL: only counted */
    int weight;           /* MOE_WEIGHT_ of a single token */
    int by_logits;        /* selection reads z */
    int biased;
    int most;              /* experts that a token may take */
    double z_unit, p_unit; /* float value of a unit of z, and of what selection reads */
} moei_ir_planner;

static moe_status moei_ir_refuse(const moei_ir_planner *s, const char *name, const char *why) {
    char value[40];
    moe_field_text(moe_field_find(moei_router_fields, name), s->c, value, sizeof value);
    return moei_error(s->error, MOE_ERR_UNSUPPORTED, "%s = %s has no integer form%s; use weights = float",
                      name, value, why);
}

static int moei_ir_is(moe_real a, double b) { return !((double)a < b) && !((double)a > b); }

static moe_status moei_ir_supported(const moei_ir_planner *s, int frozen) {
    const moe_router_config *c = s->c;
    if (c->n_experts > MOEI_INT_EXPERTS) return moei_ir_refuse(s, "n_experts", ": at most 256");
    if (moei_ir_select_of(c->select)->select == NULL || (c->select == MOE_SELECT_EXPERT_CHOICE && !c->predictor))
        return moei_ir_refuse(s, "select", "");
    if (c->predictor && !(moei_score_flags[c->score] & MOEI_SCORE_WEIGHT && c->score != MOE_SCORE_COSINE))
        return moei_ir_refuse(s, "predictor", " with this score");
    if (c->refine != MOE_REFINE_NONE) return moei_ir_refuse(s, "refine", "");
    if (c->select == MOE_SELECT_EXPERT_THRESHOLD && c->gate == MOE_GATE_RELU)
        return moei_ir_refuse(s, "gate", " with select = expert_threshold");
    if (c->weight_over != MOE_WEIGHT_OVER_ALL && c->gate != MOE_GATE_SOFTMAX && c->gate != MOE_GATE_SIGMOID)
        return moei_ir_refuse(s, "weight_over", ": p of other gates than softmax and sigmoid may exceed 1");
    if (c->weight_over != MOE_WEIGHT_OVER_ALL && c->weight == MOE_WEIGHT_SOFTMAX && !moei_ir_is(c->gate_temperature, 1))
        return moei_ir_refuse(s, "gate_temperature", " with weight = softmax and weight_over: z would need two scales");
    if (c->student && frozen) return moei_ir_refuse(s, "student", "");
    if (c->select == MOE_SELECT_SAMPLE && c->sample_at == MOE_SAMPLE_ALWAYS)
        return moei_ir_refuse(s, "sample_at", "");
    if (c->weight == MOE_WEIGHT_P_NORM && !moei_ir_is(c->weight_p, 1.0) && !moei_ir_is(c->weight_p, 2.0))
        return moei_ir_refuse(s, "weight_p", ": only 1 and 2 have");
    if (c->renormalize == MOE_RENORMALIZE_AFTER &&
        (c->expert_scale || c->weight == MOE_WEIGHT_SPARSEMIXER || c->weight_over != MOE_WEIGHT_OVER_ALL))
        return moei_ir_refuse(s, "renormalize", " with these weights");
    return MOE_OK;
}

/* The weight stage of a single token. Capacity drops nothing of it, so renormalize = after divides
   by the sum of all its weights. */
static int moei_ir_weight_of(const moe_router_config *c) {
    int after = c->renormalize == MOE_RENORMALIZE_AFTER;
    if (c->weight == MOE_WEIGHT_P_NORM && (after || moei_ir_is(c->weight_p, 1.0))) return MOE_WEIGHT_SUM;
    if (c->weight == MOE_WEIGHT_RAW && after) return MOE_WEIGHT_SUM;
    if (c->weight == MOE_WEIGHT_ONE && after) return MOE_WEIGHT_UNIFORM;
    return c->weight;
}

/* Whether selection can read z, which orders the experts as p does, and more finely. Sums of p, the
   softmax against a threshold, and a bias need p. */
static int moei_ir_selects_by_logits(const moei_ir_planner *s) {
    const moe_router_config *c = s->c;
    if (c->weight == MOE_WEIGHT_SPARSEMIXER || c->select == MOE_SELECT_SINKHORN || c->select == MOE_SELECT_BALANCED ||
        c->select == MOE_SELECT_EXPERT_THRESHOLD)
        return 1;
    if (s->biased) return 0;
    if (c->gate == MOE_GATE_IDENTITY) return 1;
    if (!(moei_gate_flags[c->gate] & MOEI_GATE_RISES) || c->select == MOE_SELECT_TOP_P) return 0;
    if (c->select == MOE_SELECT_GROUPED_TOP_K) return c->group_score == MOE_GROUP_MAX;
    return c->select != MOE_SELECT_THRESHOLD || c->gate != MOE_GATE_SOFTMAX;
}

/* The temperature of the octaves that a stage with this gate needs; 0: any scale works. */
static double moei_ir_temperature(const moe_router_config *c, int gate) {
    if (gate == MOE_GATE_SQRT_SOFTPLUS) return 1.0;
    return gate == MOE_GATE_SOFTMAX || gate == MOE_GATE_SIGMOID ? (double)c->gate_temperature : 0.0;
}

/* Sets z_unit and z_bits as fine as 5/4 of the largest logit allows. */
static moe_status moei_ir_scale_z(moei_ir_planner *s, double logit_most) {
    const moe_router_config *c = s->c;
    const int reads = moei_ir_weight_row_of(s->weight)->reads;
    double keys = s->by_logits || s->made.router.gate == NULL ? 0.0 : moei_ir_temperature(c, c->gate), octaves;
    double weights = reads == 0   ? 0.0
                     : reads == 1 ? 1.0
                                  : moei_ir_temperature(c, c->gate),
           room = 32767.0 / (1.25 * (logit_most > 0.0 ? logit_most : 1.0));
    int bits = 0, most = c->gate == MOE_GATE_SQRT_SOFTPLUS ? 14 : 27;
    if (keys > 0.0 && weights > 0.0 && (keys < weights || keys > weights))
        return moei_ir_refuse(s, "gate_temperature",
                              " with weights that read logits without it: z would need two scales");
    octaves = (keys > 0.0 ? keys : weights) * 0.69314718055994531;
    if (octaves > 0.0) {
        if (room * octaves < 1.0 && c->gate_temperature < MOEI_R(1.0))
            return moei_error(s->error, MOE_ERR_UNSUPPORTED,
                              "gate_temperature = %g: logits up to %g have no integer form; use weights = float",
                              (double)c->gate_temperature, logit_most);
        if (room * octaves < 1.0)
            return moei_error(s->error, MOE_ERR_UNSUPPORTED,
                              "logits up to %g have no integer form: scale your inputs to mean 0 and variance 1",
                              logit_most);
        while (bits < most && ldexp(1.0, bits + 1) <= room * octaves) bits++;
        if (c->gate == MOE_GATE_SQRT_SOFTPLUS) bits -= bits % 2;
        s->made.router.z_bits = (uint8_t)bits;
        s->z_unit = ldexp(octaves, -bits);
        return MOE_OK;
    }
    for (bits = -100; bits < 100 && ldexp(1.0, bits + 1) <= room; bits++) {
    }
    s->z_unit = ldexp(1.0, -bits);
    return MOE_OK;
}

/* The float value of a unit of p. */
static double moei_ir_unit(const moei_ir_planner *s, int gate) {
    switch (gate) {
    case MOE_GATE_SOFTMAX:
    case MOE_GATE_SIGMOID: return ldexp(1.0, -20);
    case MOE_GATE_SQRT_SOFTPLUS: return ldexp(0.83255461115769776, -(8 + s->made.router.z_bits / 2)); /* sqrt(ln 2) */
    default: return s->z_unit / 256.0;
    }
}

/* The logit at which a gate has the value p. */
static double moei_ir_inverse(const moe_router_config *c, double p) {
    switch (c->gate) {
    case MOE_GATE_SIGMOID:
        return p <= 0.0 ? -1e300 : p >= 1.0 ? 1e300 : log(p / (1.0 - p)) * (double)c->gate_temperature;
    case MOE_GATE_SQRT_SOFTPLUS: return p < 0.0 ? -1e300 : p > 6.0 ? p * p : log(exp(p * p) - 1.0);
    default: return p;
    }
}

static int32_t moei_ir_floor(double v) {
    const double most = 1073741823.0;
    return (int32_t)(v > most ? most : v > -most ? floor(v) : -most);
}

/* A new piece of the table; NULL while sizes are only counted. */
static unsigned char *moei_ir_piece(moei_ir_planner *s, size_t bytes, uint32_t *offset) {
    *offset = (uint32_t)s->made.table_size;
    s->made.table_size += (bytes + 3) & ~(size_t)3;
    return s->table != NULL ? s->table + *offset : NULL;
}

static moe_status moei_ir_missing(const moei_ir_planner *s, const char *name) {
    return moei_error(s->error, MOE_ERR_ARGUMENT, "%s is missing or not finite", name);
}

static int moei_ir_has(const moei_ir_planner *s, int slot, size_t count) {
    size_t i;
    for (i = 0; i < count && s->tensors[slot] != NULL; i++)
        if (!moe_is_finite(s->tensors[slot][i])) return 0;
    return s->tensors[slot] != NULL;
}

static moe_status moei_ir_put_bias(moei_ir_planner *s) {
    const size_t n = (size_t)s->c->n_experts;
    const moe_real *bias = s->tensors[MOE_ROUTER_SELECTION_BIAS];
    unsigned char *to;
    size_t e;
    if (!s->biased) return MOE_OK;
    if (!moei_ir_has(s, MOE_ROUTER_SELECTION_BIAS, n)) return moei_ir_missing(s, "router.selection_bias");
    to = moei_ir_piece(s, 4 * n, &s->made.router.bias);
    for (e = 0; e < n; e++) {
        const double v = floor((double)bias[e] / s->p_unit + 0.5);
        if (fabs(v) > 268435456.0) /* 2^28: sums fit in 32 bits and stay above the marker of excluded experts */
            return moei_error(s->error, MOE_ERR_UNSUPPORTED,
                              "selection_bias = 1: router.selection_bias[%d] = %g is too large for integers; "
                              "use weights = float",
                              (int)e, (double)bias[e]);
        if (to != NULL) (void)moei_int_put(to + 4 * e, (uint32_t)(int32_t)v, 4);
    }
    return MOE_OK;
}

/* theta of expert e in units of what selection reads. */
static int32_t moei_ir_theta(const moei_ir_planner *s, size_t e) {
    const moe_router_config *c = s->c;
    const double raw = c->threshold_learned ? (double)s->tensors[MOE_ROUTER_THRESHOLD][e] : (double)c->threshold;
    if (c->select == MOE_SELECT_EXPERT_THRESHOLD) { /* a value at the cutoff is above theta */
        const moe_real a = s->tensors[MOE_ROUTER_CUTOFF][e], updates = s->tensors[MOE_ROUTER_CUTOFF_UPDATES][0];
        return -1 - moei_ir_floor(-(double)moei_cutoff(c, a, updates) / s->p_unit);
    }
    if (s->by_logits && c->threshold_sigmoid && c->gate == MOE_GATE_SIGMOID)
        return moei_ir_floor(raw * (double)c->gate_temperature / s->p_unit);
    if (s->by_logits)
        return moei_ir_floor(moei_ir_inverse(c, c->threshold_sigmoid ? 1.0 / (1.0 + exp(-raw)) : raw) / s->p_unit);
    return moei_ir_floor((c->threshold_sigmoid ? 1.0 / (1.0 + exp(-raw)) : raw) / s->p_unit);
}

static void moei_ir_put_thetas(moei_ir_planner *s) {
    const size_t n = (size_t)s->c->n_experts;
    unsigned char *to = moei_ir_piece(s, 4 * n, &s->made.router.thresholds);
    size_t e;
    for (e = 0; e < n && to != NULL; e++) (void)moei_int_put(to + 4 * e, (uint32_t)moei_ir_theta(s, e), 4);
}

static moe_status moei_ir_put_thresholds(moei_ir_planner *s) {
    const moe_router_config *c = s->c;
    moei_int_router *r = &s->made.router;
    const size_t n = (size_t)c->n_experts;
    if (c->select == MOE_SELECT_TOP_P) r->threshold = moei_ir_floor((double)c->top_p / s->p_unit);
    if (s->weight == MOE_WEIGHT_SPARSEMIXER)
        r->threshold =
            moei_ir_floor((double)c->sparsemixer_eps < 1.0 ? (double)c->sparsemixer_eps * 131072.0 + 0.5 : 131072.0);
    if (c->select == MOE_SELECT_EXPERT_THRESHOLD) {
        if (!moei_ir_has(s, MOE_ROUTER_CUTOFF, n)) return moei_ir_missing(s, "router.cutoff");
        if (!moei_ir_has(s, MOE_ROUTER_CUTOFF_UPDATES, 1)) return moei_ir_missing(s, "router.cutoff_updates");
        moei_ir_put_thetas(s);
    }
    if (c->select != MOE_SELECT_THRESHOLD) return MOE_OK;
    if (c->threshold_fallback != MOE_FALLBACK_NEVER) r->flags |= (uint8_t)MOEI_INT_FALLBACK;
    if (!c->threshold_learned) {
        r->threshold = moei_ir_theta(s, 0);
        return MOE_OK;
    }
    if (!moei_ir_has(s, MOE_ROUTER_THRESHOLD, n)) return moei_ir_missing(s, "router.threshold");
    moei_ir_put_thetas(s);
    return MOE_OK;
}

/* Sets weight_scale and the factors of moei_int_scale_weights: a weight of 32768 means unit, which
   with the configuration's factors is unit * scale * expert_scale. */
static moe_status moei_ir_put_scales(moei_ir_planner *s, double unit) {
    const moe_router_config *c = s->c;
    moei_int_router *r = &s->made.router;
    const size_t n = c->expert_scale ? (size_t)c->n_experts : 1;
    const moe_real *own = s->tensors[MOE_ROUTER_EXPERT_SCALE];
    unsigned char *to = NULL;
    double most = 0.0, factor;
    int power;
    size_t e;
    if (c->expert_scale && !moei_ir_has(s, MOE_ROUTER_EXPERT_SCALE, n))
        return moei_ir_missing(s, "router.expert_scale");
    unit *= (double)c->scale;
    for (e = 0; e < n; e++) {
        factor = fabs(c->expert_scale ? unit * (double)own[e] : unit);
        if (factor > most) most = factor;
    }
    factor = frexp(most, &power); /* in [1/2, 1), or 0 */
    if (factor <= 0.5) power--;
    if (power > 126)
        return moei_error(s->error, MOE_ERR_ARGUMENT,
                          "scale and router.expert_scale: weights up to %g are too large for integers", most);
    if (power < -126) power = -126; /* so small that all of them may be 0 */
    s->made.weight_scale = (moe_real)ldexp(1.0, most > 0.0 ? power : 0);
    if (!c->expert_scale && unit > 0.0 && factor <= 0.5) return MOE_OK;
    r->scale = moei_int_scale_weights;
    if (c->expert_scale) to = moei_ir_piece(s, 2 * n, &r->scales);
    for (e = 0; e < n; e++) {
        const double v =
            floor((c->expert_scale ? unit * (double)own[e] : unit) / (double)s->made.weight_scale * 32768.0 + 0.5);
        const int32_t level = (int32_t)(v > 32767.0 ? 32767.0 : v < -32767.0 ? -32767.0 : v);
        if (!c->expert_scale) r->factor = (int16_t)level;
        else if (to != NULL) (void)moei_int_put(to + 2 * e, (uint32_t)level, 2);
    }
    return MOE_OK;
}

/* Checks that the count entries of a table of rows of k are experts, each at most once in a row. */
static moe_status moei_check_table(const moe_real *table, size_t count, size_t k, int n_experts, moe_error *error) {
    size_t i, other;
    for (i = 0; i < count; i++) {
        int good = table[i] >= 0 && table[i] < (moe_real)n_experts &&
                   moei_ir_is(table[i], floor((double)table[i]));
        for (other = i - i % k; other < i && good; other++) good = !moei_ir_is(table[i], (double)table[other]);
        if (!good)
            return moei_error(error, MOE_ERR_ARGUMENT, "router.table[%z] = %g: not an expert, or a duplicate", i,
                              (double)table[i]);
    }
    return MOE_OK;
}

static moe_status moei_ir_put_hash(moei_ir_planner *s) {
    const moe_router_config *c = s->c;
    const moe_real *table = s->tensors[MOE_ROUTER_TABLE];
    const size_t k = (size_t)c->top_k;
    unsigned char *to;
    moe_status status;
    size_t i, count = 0;
    if (c->select != MOE_SELECT_HASH) return MOE_OK;
    if (!moei_mul((size_t)c->table_size, k, &count) || count > INT32_MAX / 2)
        return moei_error(s->error, MOE_ERR_OVERFLOW,
                          "table_size = %d: a table of %d experts for each token id is too large", c->table_size,
                          c->top_k);
    if (!moei_ir_has(s, MOE_ROUTER_TABLE, count)) return moei_ir_missing(s, "router.table");
    status = moei_check_table(table, count, k, c->n_experts, s->error);
    if (status != MOE_OK) return status;
    s->made.router.tokens = c->table_size;
    to = moei_ir_piece(s, count, &s->made.router.table);
    for (i = 0; i < count && to != NULL; i++) (void)moei_int_put(to + i, (uint32_t)table[i], 1);
    return MOE_OK;
}

static void moei_ir_plan_select(moei_ir_planner *s) {
    const moe_router_config *c = s->c;
    const moei_ir_select_row *row = moei_ir_select_of(c->select);
    const moei_ir_gate_row *gate = moei_ir_gate_of(s->by_logits ? (int)MOE_GATE_IDENTITY : c->gate);
    const int monotone = (moei_gate_flags[c->gate] & MOEI_GATE_RISES) != 0;
    moei_int_router *r = &s->made.router;
    if (c->select == MOE_SELECT_POSITIVE && monotone)
        row = moei_ir_select_of(MOE_SELECT_DENSE); /* these gates are always positive */
    r->gate = gate->gate;
    r->select = row->select;
    s->most = row->takes_all ? c->n_experts : c->top_k;
    r->top_k = (uint16_t)s->most;
    if (r->select == moei_int_select_top_k && s->by_logits) {
        r->select = moei_int_select_logits;
        r->gate = NULL;
    }
    if (c->select == MOE_SELECT_HASH && c->top_k == 1 && moei_ir_weight_row_of(s->weight)->reads == 0)
        r->gate = NULL; /* there is nothing to sort */
    if (c->predictor) r->gate = moei_int_gate_predicted; /* above 0 */
    if (c->select == MOE_SELECT_GROUPED_EACH) r->groups = (uint16_t)c->groups;
    if (c->select == MOE_SELECT_GROUPED_TOP_K) {
        r->groups = (uint16_t)c->groups;
        r->groups_kept = (uint16_t)c->groups_kept;
        if (c->group_score == MOE_GROUP_TOP2_SUM) r->flags |= (uint8_t)MOEI_INT_TOP2_SUM;
        if (c->groups_kept > s->most) s->most = c->groups_kept;
    }
}

/* Choices that weight_over leaves out keep p. */
static void moei_ir_plan_over(moei_ir_planner *s) {
    const moe_router_config *c = s->c;
    moei_int_router *r = &s->made.router;
    if (c->weight_over == MOE_WEIGHT_OVER_ALL) return;
    r->over = r->weight;
    r->weight = moei_int_weight_over;
    r->kept = moei_ir_gate_of(c->gate)->gate;
    r->kept_from = (uint16_t)MOEI_REAL_EXPERTS(c);
    r->kept_end = (uint16_t)(c->weight_over == MOE_WEIGHT_OVER_REAL ? c->n_experts : r->kept_from + c->n_zero);
}

/* Plans the weight stage; returns the value of a weight of 32768. */
static double moei_ir_plan_weight(moei_ir_planner *s) {
    const moe_router_config *c = s->c;
    const moei_ir_weight_row *row = moei_ir_weight_row_of(s->weight);
    const moei_ir_gate_row *gate = moei_ir_gate_of(s->weight == MOE_WEIGHT_SOFTMAX ? (int)MOE_GATE_SOFTMAX : c->gate);
    moei_int_router *r = &s->made.router;
    r->weight = row->weight;
    if (s->weight == MOE_WEIGHT_RAW && c->gate == MOE_GATE_SOFTMAX) {
        r->weight = moei_int_weight_softmax;
        return 1.0;
    }
    if (s->weight == MOE_WEIGHT_SPARSEMIXER || row->reads == 0) return 1.0;
    r->values = row->reads == 2 ? gate->gate : gate->share;
    if (row->reads != 2) {
        moei_ir_plan_over(s);
        return 1.0;
    }
    if (c->gate == MOE_GATE_SIGMOID) r->weight_shift = 5;
    if (c->gate == MOE_GATE_SQRT_SOFTPLUS) r->weight_shift = 1;
    if (c->gate == MOE_GATE_RELU || c->gate == MOE_GATE_IDENTITY) r->weight_shift = 8;
    return ldexp(moei_ir_unit(s, c->gate), 15 + r->weight_shift);
}

/* Whether weights are divided by a sum of p of both signs, which can be near 0, so that they are
   unbounded. */
static int moei_ir_signs_mix(const moei_ir_planner *s) {
    const moe_router_config *c = s->c;
    size_t e;
    if (c->gate != MOE_GATE_IDENTITY || s->weight != MOE_WEIGHT_SUM || c->select == MOE_SELECT_POSITIVE) return 0;
    if (c->score == MOE_SCORE_NORM || c->score == MOE_SCORE_COMPETITION || c->score == MOE_SCORE_DSELECT) return 0;
    if (c->select != MOE_SELECT_THRESHOLD) return s->made.router.top_k > 1;
    for (e = 0; e < (size_t)c->n_experts && c->threshold_learned && !c->threshold_sigmoid &&
                s->tensors[MOE_ROUTER_THRESHOLD] != NULL;
         e++)
        if (s->tensors[MOE_ROUTER_THRESHOLD][e] < 0) return 1;
    return !c->threshold_learned && c->threshold < 0;
}

static void moei_ir_plan_room(moei_ir_planner *s) {
    moei_int_router *r = &s->made.router;
    int all = r->gate != NULL || r->weight == moei_int_weight_softmax || r->weight == moei_int_weight_over;
    r->most = (uint16_t)s->most;
    r->scratch = (uint16_t)(all ? s->c->n_experts + r->groups : r->values != NULL ? s->most : 0);
    s->made.needs_logits =
        all || r->values != NULL || r->weight == moei_int_weight_sparsemixer || r->select == moei_int_select_logits;
}

static moe_status moei_ir_plan_stages(moei_ir_planner *s, double logit_most) {
    const int select = s->c->select;
    double unit;
    moe_status status;
    s->weight = moei_ir_weight_of(s->c);
    s->biased = s->c->selection_bias && select != MOE_SELECT_SINKHORN && select != MOE_SELECT_BALANCED &&
                select != MOE_SELECT_SAMPLE;
    s->by_logits = moei_ir_selects_by_logits(s);
    moei_ir_plan_select(s);
    if (s->made.router.gate == NULL) s->biased = 0;
    if (moei_ir_signs_mix(s)) return moei_ir_refuse(s, "gate", " with weights divided by a sum of terms of both signs");
    status = moei_ir_scale_z(s, logit_most);
    if (status != MOE_OK) return status;
    unit = moei_ir_plan_weight(s);
    s->p_unit = moei_ir_unit(s, s->by_logits ? (int)MOE_GATE_IDENTITY : s->c->gate);
    moei_ir_plan_room(s);
    status = moei_ir_put_bias(s);
    if (status == MOE_OK) status = moei_ir_put_thresholds(s);
    if (status == MOE_OK) status = moei_ir_put_scales(s, unit);
    if (status == MOE_OK) status = moei_ir_put_hash(s);
    s->made.z_scale = (moe_real)s->z_unit;
    return status;
}

/* Makes the plan from the start; called a second time with s->table, when the size is known. */
static moe_status moei_ir_plan(moei_ir_planner *s, double logit_most) {
    memset(&s->made, 0, sizeof s->made);
    s->made.router.n_experts = (uint16_t)s->c->n_experts;
    s->made.router.bias = s->made.router.thresholds = s->made.router.scales = s->made.router.table = MOEI_INT_NONE;
    return moei_ir_plan_stages(s, logit_most);
}

static moe_status moei_int_router_plan_make(const moe_router_config *config, const moe_real *const *tensors,
                                            moe_real logit_most, unsigned char *table, size_t room,
                                            moei_int_router_plan *plan, moe_error *error) {
    moei_ir_planner s;
    moe_router router;
    moei_pass pass;
    moe_status status = moe_router_check_decoding(config, error);
    if (status != MOE_OK) return status;
    if (tensors == NULL || plan == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "tensors and plan must not be NULL");
    if (!moe_is_finite(logit_most) || logit_most < 0)
        return moei_error(error, MOE_ERR_ARGUMENT, "logit_most = %g: must be finite and not negative",
                          (double)logit_most);
    memset(&router, 0, sizeof router);
    memset(&pass, 0, sizeof pass);
    memset(&s, 0, sizeof s);
    (void)moe_router_check(config, &router.config, NULL);
    memcpy(router.tensors, tensors, sizeof router.tensors);
    pass.router = &router;
    moei_schedule(&pass);
    s.c = &pass.effective;
    s.tensors = tensors;
    s.error = error;
    status = moei_ir_supported(&s, pass.frozen);
    if (status == MOE_OK) status = moei_ir_plan(&s, (double)logit_most);
    if (status == MOE_OK && table != NULL) {
        if (room < s.made.table_size)
            return moei_error(error, MOE_ERR_SPACE, "room = %z: the table needs %z bytes", room, s.made.table_size);
        s.table = table;
        memset(table, 0, s.made.table_size);
        status = moei_ir_plan(&s, (double)logit_most);
    }
    if (status == MOE_OK) *plan = s.made;
    return status;
}

static void moei_int_router_move(moei_int_router *router, uint32_t by) {
    uint32_t *offset[4];
    int i;
    offset[0] = &router->bias;
    offset[1] = &router->thresholds;
    offset[2] = &router->scales;
    offset[3] = &router->table;
    for (i = 0; i < 4; i++)
        if (*offset[i] != MOEI_INT_NONE) *offset[i] += by;
}

/* ---- the logits of a router ---- */

/* The state of appending the operations of a score. */
typedef struct moei_scoring {
    const moe_layer *layer;
    moe_router_config now; /* at the step in its state */
    const moei_ranges *range;
    moei_int_router_plan plan;
    uint32_t entering;         /* the module's input, wide or narrow */
    uint32_t latent;           /* with d_latent what the experts read, else entering */
    uint32_t expert, n_expert; /* scores that read experts: operations of one, its activations */
    uint32_t node[MOE_NODE_COUNT];
    double output_scale, output_unit; /* the last product: scale of a wide vector of it; float = t * output_unit */
    uint32_t begun;                   /* the clock at the start of the MoE layer */
    uint32_t n_list;                  /* operations that run for each expert, which follow the others */
} moei_scoring;

/* The router's configuration at the step in its state, which applies schedules to K, temperatures
   and the selection. */
static moe_router_config moei_router_now(const moe_layer *layer, int *frozen) {
    moe_router router;
    moei_pass pass;
    moei_layer_router(layer, &router);
    memset(&pass, 0, sizeof pass);
    pass.router = &router;
    pass.c = &router.config;
    moei_schedule(&pass);
    if (frozen != NULL) *frozen = pass.frozen;
    return pass.effective;
}

/* A copy [n,k] of a matrix, its columns times gain (NULL: 1); w NULL: zeros. NULL after a
   failure. */
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

static void moei_router_matrix_free(moei_maker *m, moe_real *w, size_t n, size_t k) {
    moei_free(&m->made.allocator, w, n * k * sizeof *w);
}

/* Plans a router for logits up to `most`; table, if not NULL, receives its constants. An error
   names the module. */
static void moei_router_plan(moei_maker *m, const moe_layer *layer, double most, unsigned char *table,
                             moei_int_router_plan *plan) {
    moe_error why;
    moe_status status;
    if (m->status != MOE_OK) return;
    status = moei_int_router_plan_make(&layer->config.router, layer->tensors, (moe_real)most, table,
                                       table != NULL ? plan->table_size : 0, plan, &why);
    if (status != MOE_OK) m->status = moei_error(m->error, status, "module %z: %s", m->module, why.message);
}

/* Plans the router for logits in the calibrated range, in units of at least `finest`. */
static void moei_mixture_plan(moei_maker *m, moei_scoring *s, double finest) {
    double most = s->range->z.most > 0 ? s->range->z.most : 1;
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
    if (m->status == MOE_OK)
        moei_int_router_move(&s->plan.router, moei_constants(m, &m->made.weights, table, s->plan.table_size));
    moei_free(&m->made.allocator, table, s->plan.table_size);
}

/* W_g times the logits of the previous MoE layer, for router_residual; n rows, those beyond W_g are
   0. The logits have 16 bits, so the matrix has 8. *most bounds the result. */
static uint32_t moei_logits_previous(moei_maker *m, const moei_scoring *s, size_t n, double *most) {
    const size_t previous = moei_previous_mixture(m->net, m->module), experts = (size_t)s->now.n_experts;
    const moe_real *residual = s->layer->tensors[MOE_ROUTER_RESIDUAL];
    moe_real *w = moei_router_matrix(m, NULL, NULL, n, experts);
    const moei_matrix x = moei_matrix_of(w, NULL, 1, n, experts);
    const int weights = m->weights;
    size_t i, q;
    uint32_t z;
    *most = 0;
    if (w != NULL) memcpy(w, residual, experts * experts * sizeof *w);
    for (i = 0; i < experts; i++) {
        double sum = 0;
        for (q = 0; q < experts; q++) sum += fabs((double)residual[i * experts + q]);
        if (sum * m->ranges[previous].z.most > *most) *most = sum * m->ranges[previous].z.most;
    }
    m->weights = MOE_WEIGHTS_INT8;
    z = moei_product(m, &x, m->made.mixtures[moei_array_length(m->made.mixtures) - 1].z, MOEI_WIDE, 0, *most, 0);
    m->weights = weights;
    moei_router_matrix_free(m, w, n, experts);
    return z;
}

/* The logit that the cap maps to z; beyond 5 caps tanh is 1. */
static double moei_before_cap(double cap, double z) {
    return z < 0.999 * cap ? cap * 0.5 * log((cap + z) / (cap - z)) : 5 * cap;
}

/* z = cap tanh((W v + b + W_g z') / cap), each part only where the router has it. */
static uint32_t moei_logits_more(moei_maker *m, moei_scoring *s, const moei_matrix *x, uint32_t in, int follows) {
    const double cap = (double)s->now.logit_cap, z = s->range->z.most;
    const double range = cap > 0 ? moei_before_cap(cap, z) : z;
    double most = 0, finest = 0;
    uint32_t more = follows ? moei_logits_previous(m, s, x->n, &most) : 0;
    uint32_t v = moei_product(m, x, in, MOEI_WIDE, 0, range + most, 0);
    if (m->status != MOE_OK) return 0;
    if (follows && !(cap > 0)) finest = fmax(m->vectors[more].scale, m->vectors[v].scale);
    moei_mixture_plan(m, s, finest / 64);
    if (m->status != MOE_OK) return 0;
    if (follows) v = moei_added_at(m, v, more, range, cap > 0 ? 0 : (double)s->plan.z_scale);
    if (cap > 0) v = moei_curve_of(m, MOE_ACT_TANH, 1 / cap, v, MOEI_WIDE, (double)s->plan.z_scale, z);
    return v;
}

/* z = W v + b in the units of the router; w [n,k]. */
static uint32_t moei_logits_product(moei_maker *m, moei_scoring *s, const moe_real *w, const moe_real *bias, size_t n,
                                    size_t k, uint32_t in) {
    const moei_matrix x = moei_matrix_of(w, bias, 1, n, k);
    const int follows = s->now.router_residual && moei_array_length(m->made.mixtures) > 0;
    if (m->status != MOE_OK) return 0;
    if (follows || s->now.logit_cap > 0) return moei_logits_more(m, s, &x, in, follows);
    moei_mixture_plan(m, s, moei_matrix_max_scale(m, &x, moei_input_scale(m, in)) * moei_product_unit(m, in) / 0.49);
    return moei_product(m, &x, in, MOEI_WIDE, 0, s->range->z.most, m->status == MOE_OK ? (double)s->plan.z_scale : 1);
}

/* y = x / sqrt(x . x + least), narrow; range: the largest component. x gets a coarser scale if
   `least` would not fit its codes. */
static uint32_t moei_unit(moei_maker *m, uint32_t x, double least, double range) {
    double scale = (range > 0.01 && range < 0.9 ? range * 1.1 : range < 0.9 ? 0.01 : 1) / MOEI_NARROW;
    moei_int_op op;
    uint32_t y;
    int shift = 0;
    if (m->status == MOE_OK && least / 4e9 > m->vectors[x].scale * m->vectors[x].scale)
        x = moei_rescale(m, x, MOEI_WIDE, sqrt(least / 4e9));
    if (m->status != MOE_OK) return 0;
    while (ldexp(1 / scale, shift + 1) <= 32767) shift++;
    y = moei_vector_new(m, m->vectors[x].width, MOEI_NARROW, scale, range);
    op = moei_op(moei_int_op_unit, m->vectors[x].width, 0, -MOEI_NARROW, MOEI_NARROW, shift);
    op.factor = (int16_t)moei_nearest(ldexp(1 / scale, shift), 32767);
    op.at = (uint32_t)floor(least / (m->vectors[x].scale * m->vectors[x].scale) + 0.5);
    moei_op_append(m, op, x, x, y);
    m->note->alpha = least;
    return y;
}

/* Stores rows as int16 in the given unit, each padded to a multiple of 4; returns their offset. */
static uint32_t moei_rows_int16(moei_maker *m, const moe_real *w, size_t n, size_t k, double unit) {
    const size_t width = (k + 3) / 4 * 4;
    unsigned char *bytes;
    uint32_t at;
    size_t i, p;
    if (m->status != MOE_OK) return 0;
    bytes = (unsigned char *)moei_alloc(&m->made.allocator, n, width * 2);
    if (bytes == NULL) moei_maker_fail(m, MOE_ERR_MEMORY);
    for (i = 0; i < n && bytes != NULL; i++)
        for (p = 0; p < k; p++)
            moei_put_16_le(bytes + (i * width + p) * 2, moei_nearest((double)w[i * k + p] / unit, 32000));
    at = moei_constants(m, &m->made.weights, bytes, n * width * 2);
    moei_free(&m->made.allocator, bytes, n * width * 2);
    return at;
}

/* u = m_k * x, with the table of running (or random) weights. The unit of the table is chosen to
   give u its scale. */
static uint32_t moei_cluster_scaled(moei_maker *m, const moei_scoring *s, int limit) {
    const size_t previous = moei_previous_mixture(m->net, m->module);
    const size_t d = (size_t)s->now.d_model;
    const size_t n = (size_t)s->now.n_experts;
    const moe_real *table = s->layer->tensors[MOE_ROUTER_AC_RUNNING];
    double scale = s->range->u.most / (limit == MOEI_NARROW ? limit : limit / 1.25), most = 1, unit, in_scale;
    size_t index = 0, i;
    uint32_t u;
    moei_int_op op = moei_op(moei_int_op_cluster, d, 0, -limit, limit, 0);
    if (m->status != MOE_OK) return 0;
    in_scale = m->vectors[s->entering].scale;
    for (i = 0; i < n * d; i++)
        if (fabs((double)table[i]) > most) most = fabs((double)table[i]);
    if (!(scale > in_scale * most / 32000)) scale = in_scale * most / 32000;
    while (op.shape.shift < 30 && scale / ldexp(in_scale, op.shape.shift + 1) >= most / 32000) op.shape.shift++;
    unit = scale / ldexp(in_scale, op.shape.shift);
    op.at = moei_rows_int16(m, table, n, d, unit);
    for (i = 0; i < previous; i++) index += m->net->modules[i].kind == MOE_MODULE_MIXTURE;
    u = moei_vector_new(m, d, limit, scale, s->range->u.most);
    op.factor = (int16_t)moei_nearest(1 / unit, 32000);
    op.factor2 = (int16_t)s->now.ac_mix;
    op.index = (uint16_t)index;
    moei_op_append(m, op, s->entering, m->made.mixtures[index].choices, u);
    return u;
}

/* The router's input. *gain, if not NULL, is a factor per feature that the next matrix must apply.
   limit MOEI_WIDE: as fine as possible. */
static uint32_t moei_router_input(moei_maker *m, const moei_scoring *s, int limit, const moe_real **gain) {
    *gain = NULL;
    if (s->now.input == MOE_INPUT_ADAPTIVE_CLUSTERING) return moei_cluster_scaled(m, s, limit);
    if (s->now.input == MOE_INPUT_SCALED_RMS) {
        *gain = s->layer->tensors[MOE_ROUTER_INPUT_SCALE];
        return moei_unit(m, s->entering, 1e-6 * (double)s->now.d_model, s->range->unit.most);
    }
    return limit == MOEI_NARROW ? moei_narrowed(m, s->entering) : s->entering;
}

/* The rows of the predictor, scaled to the magnitude of the score's; only the signs of its outputs
   count. */
static void moei_predictor_rows(const moei_scoring *s, const moe_real *w, const moe_real *gain, moe_real *to) {
    const size_t n = (size_t)s->now.n_experts, d = (size_t)s->now.d_model;
    const moe_real *from = s->layer->tensors[MOE_ROUTER_PREDICTOR];
    moe_real most = 0, own;
    size_t e, q;
    for (q = 0; q < n * d; q++) most = MOEI_F(fabs)(w[q]) > most ? MOEI_F(fabs)(w[q]) : most;
    for (e = 0; e < n; e++) {
        for (q = 0, own = 0; q < d; q++) {
            to[e * d + q] = from[e * d + q] * (gain != NULL ? gain[q] : MOEI_R(1.0));
            own = MOEI_F(fabs)(to[e * d + q]) > own ? MOEI_F(fabs)(to[e * d + q]) : own;
        }
        for (q = 0; q < d && own > 0 && most > 0; q++) to[e * d + q] *= most / own;
    }
}

/* Scores linear and random. A predictor's outputs follow the logits. */
static uint32_t moei_logits_linear(moei_maker *m, moei_scoring *s) {
    const size_t n = (size_t)s->now.n_experts, d = (size_t)s->now.d_model;
    const size_t rows = s->now.predictor ? 2 * n : n;
    const moe_real *gain, *weight = s->layer->tensors[MOE_ROUTER_WEIGHT];
    const moe_real *bias = s->layer->tensors[MOE_ROUTER_BIAS];
    const uint32_t u = moei_router_input(m, s, MOEI_NARROW, &gain);
    moe_real *w = moei_router_matrix(m, NULL, NULL, rows, d), *biases = moei_router_matrix(m, NULL, NULL, rows, 1);
    uint32_t z;
    size_t i;
    for (i = 0; i < n * d && w != NULL; i++) w[i] = weight[i] * (gain != NULL ? gain[i % d] : MOEI_R(1.0));
    if (rows > n && w != NULL) moei_predictor_rows(s, w, gain, w + n * d);
    for (i = 0; i < rows && biases != NULL; i++) biases[i] = bias != NULL && i < n ? bias[i] : 0;
    z = moei_logits_product(m, s, w, bias != NULL ? biases : NULL, rows, d, u);
    moei_router_matrix_free(m, w, rows, d);
    moei_router_matrix_free(m, biases, rows, 1);
    return z;
}

/* act(W1 u + b1), narrow */
static uint32_t moei_router_hidden_ops(moei_maker *m, moei_scoring *s, size_t h) {
    const size_t d = (size_t)s->now.d_model;
    const int relu = s->now.router_act == MOE_ACT_RELU;
    const moe_real *gain;
    const uint32_t u = moei_router_input(m, s, MOEI_NARROW, &gain);
    moe_real *w = moei_router_matrix(m, s->layer->tensors[MOE_ROUTER_FC1_WEIGHT], gain, h, d);
    const moei_matrix x = moei_matrix_of(w, s->layer->tensors[MOE_ROUTER_FC1_BIAS], 1, h, d);
    const int limit = moei_limit_for(m, &s->range->hidden_act);
    const double range = s->range->hidden_act.most;
    uint32_t v = moei_product(m, &x, u, relu ? limit : MOEI_WIDE, relu, relu ? range : s->range->hidden.most, 0);
    moei_router_matrix_free(m, w, h, d);
    if (!relu) v = moei_curve(m, s->now.router_act, v, limit, moei_hidden_scale(limit, range), range);
    return v;
}

static uint32_t moei_logits_mlp(moei_maker *m, moei_scoring *s) {
    const size_t h = moei_router_hidden(&s->now);
    const uint32_t v = moei_router_hidden_ops(m, s, h);
    return moei_logits_product(m, s, s->layer->tensors[MOE_ROUTER_FC2_WEIGHT], s->layer->tensors[MOE_ROUTER_FC2_BIAS],
                               (size_t)s->now.n_experts, h, v);
}

/* The input of cosines: u, or its projection. */
static uint32_t moei_cosine_input(moei_maker *m, const moei_scoring *s, int limit, size_t r) {
    const size_t d = (size_t)s->now.d_model;
    const int projects = s->now.score == MOE_SCORE_COSINE && s->now.cosine_dim > 0;
    const moe_real *gain;
    uint32_t u = moei_router_input(m, s, projects ? MOEI_NARROW : limit, &gain), v;
    moe_real *w;
    moei_matrix x;
    size_t q;
    if (!projects && gain == NULL) return u;
    w = moei_router_matrix(m, projects ? s->layer->tensors[MOE_ROUTER_PROJECTION] : NULL, gain, r, d);
    for (q = 0; q < d && !projects && w != NULL; q++) w[q * d + q] = gain[q];
    x = moei_matrix_of(w, NULL, 1, r, d);
    v = moei_product(m, &x, u, limit, 0, s->range->projected.most, 0);
    moei_router_matrix_free(m, w, r, d);
    return v;
}

static uint32_t moei_logits_cosine(moei_maker *m, moei_scoring *s) {
    const size_t n = (size_t)s->now.n_experts, r = (size_t)(s->now.cosine_dim > 0 ? s->now.cosine_dim : s->now.d_model);
    const double tau =
        (double)(s->now.cosine_learn_tau ? s->layer->tensors[MOE_ROUTER_TEMPERATURE][0] : s->now.cosine_tau);
    uint32_t v = moei_cosine_input(m, s, s->now.cosine_keep_length ? MOEI_NARROW : MOEI_WIDE, r), z;
    moe_real *w;
    size_t e, q;
    if (!s->now.cosine_keep_length) v = moei_unit(m, v, 0, s->range->unit.most);
    w = moei_router_matrix(m, s->layer->tensors[MOE_ROUTER_WEIGHT], NULL, n, r);
    for (e = 0; e < n && w != NULL; e++) {
        const moe_real inverse = moei_inverse_length(s->layer->kernels, w + e * r, r);
        for (q = 0; q < r; q++) w[e * r + q] = (moe_real)((double)(w[e * r + q] * inverse) / tau);
    }
    z = moei_logits_product(m, s, w, NULL, n, r, v);
    moei_router_matrix_free(m, w, n, r);
    return z;
}

/* grap: sums of blocks, as a matrix. */
static uint32_t moei_logits_grap(moei_maker *m, moei_scoring *s) {
    const size_t n = (size_t)s->now.n_experts;
    const size_t d = (size_t)s->now.d_model;
    const size_t block = d / n;
    const moe_real *gain = NULL, share = (moe_real)(s->now.grap_cosine ? 1 / sqrt((double)block) : 1 / (double)block);
    uint32_t v = s->now.grap_cosine ? moei_cosine_input(m, s, MOEI_WIDE, d)
                                    : moei_router_input(m, s, MOEI_NARROW, &gain),
             z;
    moe_real *w = moei_router_matrix(m, NULL, NULL, n, d);
    size_t q;
    if (s->now.grap_cosine) v = moei_unit(m, v, 0, s->range->unit.most);
    for (q = 0; q < d && w != NULL; q++) w[q / block * d + q] = share * (gain != NULL ? gain[q] : MOEI_R(1.0));
    z = moei_logits_product(m, s, w, NULL, n, d, v);
    moei_router_matrix_free(m, w, n, d);
    return z;
}

/* Copies the note of inner operation i to that of the last operation. */
static void moei_note_copy(moei_maker *m, uint32_t i) {
    const moei_op_note *from;
    if (m->trace == NULL || m->status != MOE_OK) return;
    from = &m->trace->inner[i];
    m->note->reference = from->reference;
    m->note->in_block = from->in_block;
    m->note->act = from->act;
    m->note->clamps = from->clamps;
    m->note->rest = from->rest;
    m->note->alpha = from->alpha;
}

/* Appends a copy of inner operation i, which reads and writes the same vectors. */
static void moei_op_copy(moei_maker *m, uint32_t i) {
    moei_int_op op = m->inner_ops[i];
    op.index = 0; /* its input may have no sums yet */
    moei_op_append(m, op, op.in, op.other, op.out);
    moei_note_copy(m, i);
}

/* Bytes of a block up to the end of this operation's constants, if it is a product. */
static size_t moei_op_constants_end(const moei_maker *m, const moei_int_op *op) {
    if (op->run == moei_int_op_curve || op->run == moei_int_op_multiply || op->run == moei_int_op_rescale ||
        op->run == moei_int_op_add)
        return 0;
    if (op->run == moei_int_op_int16 || op->run == moei_int_op_int16_add)
        return op->at + moei_int8_size(op->shape.n, op->shape.k) + (op->shape.n + 1u) / 2 * 8;
    return op->at + (m->config->weights == MOE_WEIGHTS_INT8 ? moei_int8_size(op->shape.n, op->shape.k)
                                                            : moei_int4_size(op->shape.n, op->shape.k));
}

/* A copy of the last product of an expert, whose constants are in the units of a sum, that writes
   to a vector of its own. */
static uint32_t moei_output_copy(moei_maker *m, const moei_scoring *s, uint32_t i) {
    moei_int_op op = m->inner_ops[i];
    uint32_t v;
    const double unit = s->output_unit * (m->vectors[op.in].limit == MOEI_WIDE ? 65536.0 / (double)MOEI_INT_UPPER : 1);
    op.shape.low = -MOEI_WIDE;
    op.shape.high = MOEI_WIDE;
    while (op.shape.shift < 30 && ldexp(unit, op.shape.shift) < s->output_scale) op.shape.shift++;
    v = moei_vector_new(m, op.shape.n, MOEI_WIDE, ldexp(unit, op.shape.shift), s->range->node[MOE_NODE_OUTPUT].most);
    moei_product_append(m, op, 0, op.in, v);
    moei_note_copy(m, i);
    return v;
}

/* Copies the operations that compute a scored activation; returns its vector. *bytes: the part of a
   block that they read. */
static uint32_t moei_activation_copy(moei_maker *m, const moei_scoring *s, int scored, size_t *bytes) {
    const int output = s->node[scored] == MOEI_INT_NONE;
    const uint32_t last = s->expert + s->n_expert - 1;
    uint32_t wanted[4 * MOEI_MAX_STEPS], n_wanted = 0, i, j, v = MOEI_INT_NONE;
    unsigned run = 0;
    if (m->status != MOE_OK) return 0;
    wanted[n_wanted++] = output ? m->inner_ops[last].in : s->node[scored];
    for (i = last; i-- > s->expert;)
        for (j = 0; j < n_wanted; j++) {
            if (m->inner_ops[i].out != wanted[j] || (run >> (i - s->expert) & 1u)) continue;
            run |= 1u << (i - s->expert);
            wanted[n_wanted++] = m->inner_ops[i].in;
            if (m->inner_ops[i].run == moei_int_op_multiply || m->inner_ops[i].run == moei_int_op_add)
                wanted[n_wanted++] = m->inner_ops[i].other;
        }
    for (i = s->expert; i < last && m->status == MOE_OK; i++) {
        if (!(run >> (i - s->expert) & 1u)) continue;
        if (moei_op_constants_end(m, &m->inner_ops[i]) > *bytes) *bytes = moei_op_constants_end(m, &m->inner_ops[i]);
        moei_op_copy(m, i);
    }
    if (!output) return s->node[scored];
    if (m->status == MOE_OK && moei_op_constants_end(m, &m->inner_ops[last]) > *bytes)
        *bytes = moei_op_constants_end(m, &m->inner_ops[last]);
    v = m->status == MOE_OK ? moei_output_copy(m, s, last) : 0;
    return v;
}

/* z_e = factor * measure of an activation of every expert. other: the vector that moei_int_op_match
   compares it with. */
static uint32_t moei_logits_of_experts(moei_maker *m, moei_scoring *s,
                                       void (*measure)(const moei_int_op *op, moei_int_run *run), double most_levels,
                                       double factor, uint32_t other) {
    const int scored = moei_scored_activation(&s->layer->config);
    const uint32_t at = (uint32_t)moei_array_length(m->inner_ops);
    const uint32_t z =
        moei_vector_new(m, (size_t)s->now.n_experts, MOEI_WIDE, (double)s->plan.z_scale, s->range->z.most);
    moei_int_op op = moei_op(measure, 0, 0, -MOEI_WIDE, MOEI_WIDE, 0), *made;
    size_t bytes = 0, i;
    uint32_t v;
    int shift;
    moei_op_append(m, op, z, z, z); /* its input is set below */
    v = moei_activation_copy(m, s, scored, &bytes);
    if (s->now.score == MOE_SCORE_COMPETITION && m->status == MOE_OK) {
        const double most = (double)moei_softplus((moe_real)s->range->node[MOE_NODE_OUTPUT].most);
        v = moei_curve(m, MOEI_SOFTPLUS, v, MOEI_WIDE, most * 1.1 / MOEI_WIDE, most);
    }
    if (m->status != MOE_OK) return 0;
    made = &m->inner_ops[at];
    made->in = v;
    made->other = other != MOEI_INT_NONE ? other : v;
    if (m->trace != NULL) {
        m->trace->inner[at].in = made->in;
        m->trace->inner[at].other = made->other;
        m->trace->inner[at].alpha = other != MOEI_INT_NONE ? 1 : factor;
    }
    moei_vector_use(m, v);
    moei_vector_use(m, made->other);
    moei_vector_use(m, z);
    while (made->factor2 < 14 && ldexp(most_levels, made->factor2 + 1) < 2147483000.0) made->factor2++;
    factor *= ldexp(m->vectors[v].scale, -made->factor2) / (double)s->plan.z_scale;
    shift = moei_shift_for(factor, 16, 14);
    if (shift < 0) moei_maker_fail(m, MOE_ERR_OVERFLOW);
    made->factor = (int16_t)moei_nearest(ldexp(factor, 16 + shift), 32767);
    made->shape.n = (uint16_t)m->vectors[v].width;
    made->shape.shift = (uint8_t)(shift < 0 ? 0 : shift);
    s->n_list = (uint32_t)moei_array_length(m->inner_ops) - at - 1;
    for (i = at + 1; i < moei_array_length(m->inner_ops); i++) {
        const moei_int_op *product = &m->inner_ops[i];
        const size_t each = product->run == moei_int_op_int16 ? 2 : moei_op_constants_end(m, product) > 0;
        m->counted += (size_t)s->now.n_experts * each * product->shape.n * product->shape.k;
    }
    made->shape.k = (uint16_t)s->n_list;
    made->at = (uint32_t)bytes;
    made->index = (uint16_t)moei_array_length(m->made.mixtures);
    return z;
}

static uint32_t moei_logits_norm(moei_maker *m, moei_scoring *s) {
    const int scored = moei_scored_activation(&s->layer->config);
    const double limit =
        m->status != MOE_OK || scored == MOE_NODE_OUTPUT ? MOEI_WIDE : m->vectors[s->node[scored]].limit;
    const double n = (double)moei_activation_width(&s->layer->config, s->layer->config.expert, scored);
    if (s->now.norm_order == MOE_NORM_L1)
        return moei_logits_of_experts(m, s, moei_int_op_norm_l1, n * limit, 1, MOEI_INT_NONE);
    if (s->now.norm_order == MOE_NORM_LINF)
        return moei_logits_of_experts(m, s, moei_int_op_norm_linf, limit, 1, MOEI_INT_NONE);
    return moei_logits_of_experts(m, s, moei_int_op_norm_l2, sqrt(n) * limit, 1, MOEI_INT_NONE);
}

static uint32_t moei_logits_competition(moei_maker *m, moei_scoring *s) {
    const double n = (double)moei_activation_width(&s->layer->config, s->layer->config.expert, MOE_NODE_OUTPUT);
    return moei_logits_of_experts(m, s, moei_int_op_norm_l1, n * MOEI_WIDE, 1 / n, MOEI_INT_NONE);
}

/* attentive: (W_K^T W_Q h_g) . h_e / sqrt(h); the two matrices are multiplied beforehand. */
static uint32_t moei_logits_attentive(moei_maker *m, moei_scoring *s) {
    const size_t h = moei_router_hidden(&s->now);
    const uint32_t v = moei_router_hidden_ops(m, s, h);
    moe_real *w = moei_router_matrix(m, NULL, NULL, h, h);
    moei_matrix x;
    uint32_t key;
    size_t i;
    if (w != NULL)
        moe_matmul(s->layer->kernels, MOE_MATMUL_TN, MOE_TYPE_REAL, h, h, h, s->layer->tensors[MOE_ROUTER_KEY], h,
                   s->layer->tensors[MOE_ROUTER_QUERY], h, w, h, 0);
    for (i = 0; i < h * h && w != NULL; i++) w[i] = (moe_real)((double)w[i] / sqrt((double)h));
    x = moei_matrix_of(w, NULL, 1, h, h);
    key = moei_product(m, &x, v, MOEI_NARROW, 0, s->range->key.most, 0);
    moei_router_matrix_free(m, w, h, h);
    if (m->status != MOE_OK) return 0;
    return moei_logits_of_experts(m, s, moei_int_op_match, (double)h * MOEI_NARROW * MOEI_NARROW, m->vectors[key].scale,
                                  key);
}

/* The function that appends the operations of a score. */
static const struct moei_score_maker {
    int score; /* MOE_SCORE_ */
    uint32_t (*make)(moei_maker *m, moei_scoring *s);
} moei_score_makers[] = {
    {MOE_SCORE_LINEAR, moei_logits_linear},
    {MOE_SCORE_RANDOM, moei_logits_linear},
    {MOE_SCORE_MLP, moei_logits_mlp},
    {MOE_SCORE_COSINE, moei_logits_cosine},
    {MOE_SCORE_NORM, moei_logits_norm},
    {MOE_SCORE_GRAP, moei_logits_grap},
    {MOE_SCORE_ATTENTIVE, moei_logits_attentive},
    {MOE_SCORE_COMPETITION, moei_logits_competition},
};

/* NULL: the score has no integer form. */
static const struct moei_score_maker *moei_score_maker_of(int score) {
    size_t i;
    for (i = 0; i < sizeof moei_score_makers / sizeof *moei_score_makers; i++)
        if (moei_score_makers[i].score == score) return &moei_score_makers[i];
    return NULL;
}

/* Whether a finite setting is not 0. */
static int moei_is_set(moe_real value) { return value < 0 || value > 0; }

/* Whether the score reads a vector to which the limit or offset of a shaped gate has been
   applied. */
static int moei_scores_shaped(const moe_layer_config *c) {
    const int node = moei_scored_activation(c), limited = c->swiglu_limit > 0;
    return (node == MOE_NODE_GATE && limited) || (node == MOE_NODE_UP && (limited || moei_is_set(c->swiglu_offset)));
}

/* Whether weights of experts may be negative. */
static int moei_weights_have_signs(const moe_router_config *c) {
    return c->gate == MOE_GATE_IDENTITY || c->expert_scale || c->scale < 0;
}

/* Refuses settings of the layer without an integer form. */
static void moei_mixture_supported(moei_maker *m, const moe_layer_config *c, int frozen) {
    const size_t i = m->module;
    const moe_router_config *r = &c->router;
    static const char hint[] = "has no integer form; use MOE_WEIGHTS_FLOAT";
    if (r->score == MOE_SCORE_CUSTOM || r->select == MOE_SELECT_CUSTOM || r->select == MOE_SELECT_GIVEN)
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: no model can have %s = %s", i,
                          r->score == MOE_SCORE_CUSTOM ? "score" : "select",
                          r->score == MOE_SCORE_CUSTOM ? "custom" : moei_select_names[r->select]);
    if (moei_score_maker_of(r->score) == NULL)
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: score = %s %s", i, moei_score_names[r->score], hint);
    if (moei_scores_shaped(c))
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: %s with norm_node = %s %s", i,
                          c->swiglu_limit > 0 ? "swiglu_limit" : "swiglu_offset",
                          moei_node_names[r->norm_node], hint);
    if (c->d_latent > 0 && c->add_input)
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: add_input = 1 with d_latent = %d %s", i, c->d_latent,
                          hint);
    if (r->refine != MOE_REFINE_NONE)
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: refine = %s %s", i, moei_refine_names[r->refine], hint);
    if (moei_scored_activation(c) >= 0 && (r->logit_cap > 0 || r->router_residual))
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: %s with score = %s %s", i,
                          r->router_residual ? "router_residual = 1" : "logit_cap", moei_score_names[r->score], hint);
    if (r->apply_to == MOE_APPLY_INPUT && moei_scored_activation(c) >= 0)
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: apply_to = input with score = %s %s", i,
                          moei_score_names[r->score], hint);
    if (r->student && frozen)
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: student = 1, past freeze_at, %s", i, hint);
    if (moei_first_norm(m->net, i) < i)
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: raw_input = 1 %s", i, hint);
    if (r->input == MOE_INPUT_ADAPTIVE_CLUSTERING && r->ac_mix > 1) {
        const moe_router_config *previous = &m->net->modules[moei_previous_mixture(m->net, i)].layer.config.router;
        if (moei_weights_have_signs(previous))
            MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: ac_mix = %d of weights that may be negative %s", i,
                              r->ac_mix, hint);
    }
    if (m->net->d_in > 0 && r->select == MOE_SELECT_HASH)
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED,
                          "module %z: select = hash: moe_infer gets token ids only if d_in = 0", i);
}

/* ---- >>modules: MoE layers ---- */

/* The exponent of a power of two. */
static int moei_exponent(double power) {
    int exponent;
    (void)frexp(power, &exponent);
    return exponent - 1;
}

/* A summand: its matrix, the scale of its input, its largest magnitude, and the power of two of its
   weight. */
typedef struct moei_summand {
    moei_matrix w;
    double in_scale, range;
    double code_scale; /* of the codes that are multiplied, for bounds */
    int bits;
    size_t most; /* number of such summands */
} moei_summand;

/* The units of a sum to which products add directly, as does an input of scale rest_scale (0: none)
   with a weight up to 1. As fine as possible: factors must fit in 15 bits, the sum in 32. */
static void moei_sum_units_direct(moei_maker *m, const moei_summand *part, size_t n, double rest_scale,
                                  moei_sum_units *to) {
    double factor = 2 * rest_scale, bound = rest_scale * MOEI_WIDE;
    size_t i;
    for (i = 0; i < n; i++) {
        const double one = ldexp(moei_matrix_max_scale(m, &part[i].w, part[i].in_scale), 17 + part[i].bits);
        if (one > factor) factor = one;
        bound += ldexp(moei_matrix_bound(&part[i].w, part[i].code_scale), part[i].bits) * (double)part[i].most;
    }
    if (to->scale < factor / 32767) to->scale = factor / 32767;
    if (to->scale < bound / 5e8) to->scale = bound / 5e8;
    to->shift = 15;
    while (to->shift > 0 && (ldexp(factor / to->scale, to->shift) > 32767 || ldexp(bound / to->scale, to->shift) > 1e9))
        to->shift--;
}

/* The units of a sum of wide vectors. */
static void moei_sum_units_by_vectors(moei_maker *m, const moei_summand *part, size_t n, double rest_scale,
                                      moei_sum_units *to) {
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
    to->via_vector = fits;
}

enum { MOEI_SUM_STEPS = 1024 };

/* The units of the sum of an MoE layer. Products add to it directly, unless the largest result
   would have too few units per expert: every addition rounds down. */
static moei_sum_units moei_sum_units_of(moei_maker *m, const moei_summand *part, size_t n, int limit, double range,
                                        double rest_scale) {
    moei_sum_units to, fine;
    memset(&to, 0, sizeof to);
    to.bits = part->bits;
    to.scale = moei_hidden_scale(limit, range);
    if (!(to.scale > 0)) to.scale = 1;
    fine = to;
    if (m->status != MOE_OK) return to;
    moei_sum_units_direct(m, part, n, rest_scale, &to);
    for (; !(range > 0) && to.shift < 15 && ldexp(1, to.shift) < 8.0 * (double)part->most; to.shift++)
        to.scale *= 2; /* what additions round must not become a code */
    if (!(range > 0) || ldexp(range / to.scale, to.shift) >= (double)MOEI_SUM_STEPS * (double)part->most) return to;
    moei_sum_units_by_vectors(m, part, n, rest_scale, &fine);
    return fine.via_vector ? fine : to;
}

/* Assembles the blocks of all experts from the pieces. */
static void moei_mixture_blocks(moei_maker *m, moei_int_mixture *mixture, size_t experts) {
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
    m->n_pieces = 0;
    m->pieces.size = 0;
}

static uint32_t moei_ops_count(const moei_maker *m) { return (uint32_t)moei_array_length(m->inner_ops); }

/* w x. */
static uint32_t moei_weighted(moei_maker *m, uint32_t x, int bits, int limit, const moei_range *range) {
    double scale = moei_hidden_scale(limit, range->most), ratio;
    moei_int_op op;
    uint32_t y;
    int shift;
    if (m->status != MOE_OK) return 0;
    if (!(scale > ldexp(m->vectors[x].scale, bits) / 32767)) scale = ldexp(m->vectors[x].scale, bits) / 32767;
    ratio = m->vectors[x].scale / scale;
    shift = moei_shift_for(ratio, bits, 22);
    y = moei_vector_new(m, m->vectors[x].width, limit, scale, range->most);
    op = moei_op(moei_int_op_apply_weight, m->vectors[x].width, 0, -limit, limit, shift < 0 ? 0 : shift);
    op.factor = (int16_t)moei_nearest(ldexp(ratio, bits + op.shape.shift), 32767);
    moei_op_append(m, op, x, x, y);
    m->note->alpha = ldexp(1, bits);
    return y;
}

static uint32_t moei_weighted_input(moei_maker *m, const moei_scoring *s, const moei_int_mixture *mixture) {
    const moei_range *range = &s->range->weighted_input;
    return moei_weighted(m, s->latent, mixture->weight_bits, moei_limit_for(m, range), range);
}

/* 2^bits bounds |1 - sum w|, the weight of the input under add_input. Above 31 bits the 1 is
   negligible. */
static int moei_rest_bits(const moei_int_mixture *mixture, const moe_router_config *c) {
    const double most = ldexp(mixture->router.most, mixture->weight_bits) + (moei_weights_have_signs(c) ? 1 : -1);
    int bits = mixture->weight_bits > 0 ? mixture->weight_bits : 0;
    while (ldexp(1.0, bits) < most) bits++;
    return bits;
}

/* sum += (1 - sum w) x. */
static void moei_add_rest(moei_maker *m, const moei_scoring *s, const moei_int_mixture *mixture,
                          const moei_sum_units *to) {
    const int bits = moei_rest_bits(mixture, &s->now);
    const uint32_t x = s->entering;
    double ratio;
    int shift;
    moei_int_op op;
    if (m->status != MOE_OK) return;
    ratio = ldexp(m->vectors[x].scale, 1 + bits + to->shift) / to->scale;
    shift = moei_shift_for(ratio, 0, 30);
    op = moei_op(moei_int_op_add_rest, m->vectors[x].width, 0, 0, 0, shift < 0 ? 0 : shift);
    op.factor = (int16_t)moei_nearest(ldexp(ratio, op.shape.shift), 32767);
    op.factor2 = (int16_t)(bits - mixture->weight_bits < 31 ? bits - mixture->weight_bits : 31);
    op.at = bits < 32 ? (uint32_t)32768 >> bits : 0;
    op.index = (uint16_t)moei_array_length(m->made.mixtures);
    moei_op_append(m, op, x, mixture->choices, to->sum);
    m->note->alpha = ldexp(1, mixture->weight_bits);
}

/* Sets the weight of the operations that follow to in_k. */
static void moei_set_weight(moei_maker *m, uint32_t in, size_t k) {
    if (m->status == MOE_OK) moei_op_append(m, moei_op(moei_int_op_set_weight, 1, k, 0, 0, 0), in, in, in);
}

/* Sets the weight of the operations that follow to sigmoid(v . x). */
static void moei_shared_sigmoid(moei_maker *m, const moe_layer *layer, uint32_t x, double range) {
    const moei_matrix v =
        moei_matrix_of(layer->tensors[MOE_SHARED_SIGMOID], NULL, 1, 1, (size_t)layer->config.router.d_model);
    const uint32_t share =
        moei_curve(m, MOE_ACT_SIGMOID, moei_product(m, &v, x, MOEI_WIDE, 0, range, 0), MOEI_WIDE, 1.0 / 32768, 1);
    moei_set_weight(m, share, 0);
}

/* 1/32767 of a bound on what experts without matrices add to the sum. */
static double moei_without_scale(const moei_maker *m, const moei_scoring *s, const moei_int_mixture *mixture) {
    const moe_router_config *c = &s->layer->config.router;
    const size_t count = (size_t)c->n_constant * (size_t)c->d_model;
    const size_t many = (size_t)(c->n_copy + c->n_constant);
    double most;
    size_t i;
    if (many == 0 || m->status != MOE_OK) return 0;
    most = m->vectors[s->entering].scale * m->vectors[s->entering].limit;
    if (s->range->weighted_input.most * MOEI_HEADROOM > most) most = s->range->weighted_input.most * MOEI_HEADROOM;
    for (i = 0; i < count; i++) {
        const double v = MOEI_HEADROOM * fabs((double)s->layer->tensors[MOE_EXPERTS_CONSTANT][i]);
        if (v > most) most = v;
    }
    return ldexp(most, mixture->weight_bits > 0 ? mixture->weight_bits : 0) *
           (double)(many < mixture->router.most ? many : mixture->router.most) / MOEI_WIDE;
}

/* sum += weight x. */
static void moei_accumulate(moei_maker *m, uint32_t x, const moei_sum_units *to) {
    int shift;
    if (m->status != MOE_OK) return;
    shift = moei_sum_shift(to, to->bits, m->vectors[x].scale * m->vectors[x].limit / MOEI_WIDE);
    if (shift < 0) {
        moei_maker_fail(m, MOE_ERR_OVERFLOW);
        return;
    }
    x = moei_rescale(m, x, MOEI_WIDE, ldexp(to->scale, 15 - to->bits - to->shift - shift));
    if (m->status == MOE_OK)
        moei_op_append(m, moei_op(moei_int_op_accumulate, m->vectors[x].width, 0, 0, 0, shift), x, x, to->sum);
    m->note->alpha = ldexp(1, to->bits);
}

/* [a, 1 - a] for constant expert i: a = sigmoid((gate_0 - gate_1) . x), times the weight of the
   expert unless x has it. */
static uint32_t moei_constant_shares(moei_maker *m, const moei_scoring *s, size_t i, uint32_t x, int weighs) {
    const size_t d = (size_t)s->now.d_model;
    const moe_real *gate = s->layer->tensors[MOE_EXPERTS_CONSTANT_GATE] + 2 * i * d;
    moe_real *w = moei_router_matrix(m, NULL, NULL, 2, d);
    const moei_matrix ahead = moei_matrix_of(w, NULL, 1, 2, d);
    moei_int_op op = moei_op(moei_int_op_apply_weight, 2, 0, -MOEI_WIDE, MOEI_WIDE, 15);
    double range = 0;
    uint32_t shares, out;
    size_t q;
    for (q = 0; q < d && w != NULL; q++) {
        w[q] = gate[q] - gate[d + q];
        w[d + q] = -w[q];
        range += fabs((double)w[q]) * m->vectors[x].range;
    }
    shares = moei_curve(m, MOE_ACT_SIGMOID, moei_product(m, &ahead, moei_narrow_copy(m, x), MOEI_WIDE, 0, range, 0),
                        MOEI_WIDE, 1.0 / 32768, 1);
    moei_router_matrix_free(m, w, 2, d);
    if (m->status != MOE_OK || !weighs) return shares;
    out = moei_vector_new(m, 2, MOEI_WIDE, 1.0 / 32768, 1);
    op.factor = 32767;
    moei_op_append(m, op, shares, shares, out);
    return out;
}

/* sum += weight (a x + (1 - a) v_i). */
static void moei_constant_ops(moei_maker *m, const moei_scoring *s, size_t i, const moei_int_mixture *mixture,
                              moei_sum_units to) {
    const size_t d = (size_t)s->now.d_model;
    const moe_real *v = s->layer->tensors[MOE_EXPERTS_CONSTANT] + i * d;
    const int inputs = s->now.apply_to == MOE_APPLY_INPUT;
    moe_real *zeros = moei_router_matrix(m, NULL, NULL, d, 1); /* v is a bias */
    const moei_matrix constant = moei_matrix_of(zeros, v, 1, d, 1);
    uint32_t x = s->entering, shares;
    double most = 0;
    size_t q;
    for (q = 0; q < d; q++)
        if (fabs((double)v[q]) > most) most = fabs((double)v[q]);
    if (inputs) x = moei_weighted_input(m, s, mixture);
    if (inputs) to.bits = 0; /* x has the weight */
    shares = m->status == MOE_OK ? moei_constant_shares(m, s, i, x, !inputs) : 0;
    moei_set_weight(m, shares, 0);
    moei_accumulate(m, x, &to);
    moei_set_weight(m, shares, 1);
    (void)moei_product_accumulate(m, &constant, moei_narrow_copy(m, x), &to, most);
    moei_router_matrix_free(m, zeros, d, 1);
}

/* The operations of experts without matrices. A copy applies the weight to its output, whatever
   apply_to says. */
static void moei_mixture_without(moei_maker *m, const moei_scoring *s, moei_int_mixture *mixture, moei_sum_units to) {
    const moe_router_config *c = &s->layer->config.router;
    const size_t counted = m->counted;
    size_t i;
    mixture->zeros = (uint16_t)MOEI_REAL_EXPERTS(c);
    mixture->copies = (uint16_t)(mixture->zeros + c->n_zero);
    mixture->constants = (uint16_t)(mixture->copies + c->n_copy);
    mixture->copy = moei_ops_count(m);
    to.bits = mixture->weight_bits;
    if (c->n_copy > 0) moei_accumulate(m, s->entering, &to);
    mixture->n_copy = moei_ops_count(m) - mixture->copy;
    mixture->constant = moei_ops_count(m);
    for (i = 0; i < (size_t)c->n_constant; i++) moei_constant_ops(m, s, i, mixture, to);
    if (i > 0) mixture->n_constant = (moei_ops_count(m) - mixture->constant) / (uint32_t)i;
    m->counted = counted; /* an expert with matrices multiplies more */
}

/* The operations for the shared expert and for the input that add_input adds. */
static void moei_mixture_rest(moei_maker *m, const moei_scoring *s, const moei_expert_run *shared, uint32_t x,
                              moei_sum_units to, moei_int_mixture *mixture) {
    const moe_layer_config *c = &s->layer->config;
    uint32_t node[MOE_NODE_COUNT];
    mixture->shared = moei_ops_count(m);
    to.bits = 0;
    if (c->n_shared > 0 && c->d_latent == 0) {
        const uint32_t hidden = moei_expert_hidden(m, shared, 1, x, s->range->shared, node);
        if (c->shared_sigmoid) moei_shared_sigmoid(m, s->layer, x, s->range->sigmoid.most);
        (void)moei_expert_ops(m, shared, 1, hidden, &to, s->range->shared[MOE_NODE_OUTPUT].most);
    }
    if (c->add_input) moei_add_rest(m, s, mixture, &to);
    mixture->n_shared = moei_ops_count(m) - mixture->shared;
}

/* Appends the operations of the logits and records their positions; operations that run for each
   expert are not counted. */
static void moei_mixture_logits(moei_maker *m, moei_scoring *s, moei_int_mixture *mixture) {
    mixture->score = moei_ops_count(m);
    mixture->z = moei_score_maker_of(s->now.score)->make(m, s);
    mixture->n_score = moei_ops_count(m) - mixture->score - s->n_list;
    if (m->status == MOE_OK && s->n_list > 0) /* the next layer may read z, and experts run before that */
        m->vectors[mixture->z].first_use = s->begun;
}

/* The width of the sum of the experts. */
static size_t moei_sum_width(const moe_layer *layer) {
    return (size_t)moei_activation_width(&layer->config, layer->config.expert, MOE_NODE_OUTPUT);
}

/* Whether a layer looks up token ids in a table, which may have fewer rows than there are ids. */
static int moei_has_hash(const moe_net *net) {
    size_t i;
    for (i = 0; i < net->n_modules; i++)
        if (net->modules[i].kind == MOE_MODULE_MIXTURE && net->modules[i].layer.config.router.select == MOE_SELECT_HASH)
            return 1;
    return 0;
}

/* Choices remain until the next call that reaches their layer. fails: an earlier layer may end a
   call, so no other vector may have their memory. */
static void moei_keep_choices(moei_maker *m, uint32_t choices, int fails) {
    m->vectors[choices].last_use = UINT32_MAX;
    m->vectors[choices].kept = fails && moei_array_length(m->made.mixtures) > 0;
}

/* Adds the router and its vectors. They are live from the start of the layer: with some scores the
   operations of experts come first, but run again later. */
static void moei_mixture_router(moei_maker *m, moei_scoring *s, moei_int_mixture *mixture) {
    mixture->router = s->plan.router;
    mixture->weight_bits = (int16_t)moei_exponent((double)s->plan.weight_scale);
    mixture->p = moei_vector_int32(m, mixture->router.scratch);
    mixture->sum = moei_vector_int32(m, moei_sum_width(s->layer));
    mixture->choices = moei_vector_new(m, 1 + 2 * (size_t)mixture->router.most, MOEI_WIDE, 1, 0);
    if (m->status != MOE_OK) return;
    m->vectors[mixture->p].first_use = m->vectors[mixture->sum].first_use = m->vectors[mixture->choices].first_use =
        s->begun;
    moei_keep_choices(m, mixture->choices, m->config->loader || moei_has_hash(m->net));
}

/* Appends the operations of one expert. With a score that reads experts the router is planned here,
   too. */
static moei_sum_units moei_mixture_experts(moei_maker *m, moei_scoring *s, const moei_expert_run *shared, uint32_t x,
                                           int limit, moei_int_mixture *mixture) {
    const moe_layer_config *c = &s->layer->config;
    const int scored = moei_scored_activation(c), inputs = c->router.apply_to == MOE_APPLY_INPUT;
    const size_t experts = (size_t)MOEI_REAL_EXPERTS(&c->router);
    const moei_range *product = &s->range->shared[MOE_NODE_PRODUCT];
    const int wide = moei_limit_for(m, product) == MOEI_WIDE;
    const int sums = c->n_shared > 0 && c->d_latent == 0 ? 2 : 1;
    moei_expert_run run = moei_expert_run_begin(s->layer, c->expert, 0);
    moei_summand part[2];
    moei_sum_units to;
    double rest = 0;
    uint32_t hidden, out;
    mixture->expert = s->expert = moei_ops_count(m);
    m->in_block = 1;
    m->branch = (int)m->module + 1;
    run.needed |= moei_ancestors(run.kind, scored);
    hidden = moei_expert_hidden(
        m, &run, experts,
        inputs ? moei_weighted_input(m, s, mixture) : x, s->range->node, s->node);
    if (scored >= 0) {
        moei_mixture_plan(m, s, 0);
        moei_mixture_router(m, s, mixture);
    }
    memset(part, 0, sizeof part);
    part[0].w = moei_last_matrix(&run, experts);
    part[0].range = s->range->node[MOE_NODE_OUTPUT].most;
    part[0].bits = inputs ? 0 : mixture->weight_bits;
    part[0].most = mixture->router.most;
    if (sums > 1) {
        part[1].w = moei_last_matrix(shared, 1);
        part[1].range = s->range->shared[MOE_NODE_OUTPUT].most;
        part[1].most = 1;
    }
    if (m->status == MOE_OK) {
        part[0].code_scale = moei_input_scale(m, hidden);
        part[0].in_scale = part[0].code_scale * moei_product_unit(m, hidden);
        rest = c->add_input ? ldexp(m->vectors[s->entering].scale, moei_rest_bits(mixture, &s->now)) : 0;
        rest += moei_without_scale(m, s, mixture);
    }
    part[1].code_scale = moei_hidden_scale(wide ? MOEI_WIDE : MOEI_NARROW, product->most) * (wide ? 256 : 1);
    part[1].in_scale =
        wide ? ldexp(part[1].code_scale * 65536.0 / (double)MOEI_INT_UPPER, -MOEI_INT_GUARD) : part[1].code_scale;
    to = moei_sum_units_of(m, part, (size_t)sums, limit, c->d_latent > 0 ? s->range->latent_sum.most : s->range->y.most,
                           rest);
    to.sum = mixture->sum;
    out = moei_expert_ops(m, &run, experts, hidden, &to, part[0].range);
    if (to.via_vector) s->node[MOE_NODE_OUTPUT] = out;
    mixture->n_expert = s->n_expert = moei_ops_count(m) - mixture->expert;
    moei_mixture_blocks(m, mixture, experts);
    m->in_block = 0;
    m->branch = -1;
    moei_mixture_without(m, s, mixture, to);
    m->branch = 0;
    s->output_unit = ldexp(to.scale, -(1 + to.bits + to.shift));
    s->output_scale = s->range->node[MOE_NODE_OUTPUT].most * MOEI_HEADROOM / MOEI_WIDE;
    return to;
}

/* How many times these operations round a summand of the layer's sum down. */
static int moei_additions(const moei_maker *m, uint32_t first, uint32_t n) {
    const moei_int_op *op;
    int count = 0;
    if (m->status != MOE_OK) return 0;
    for (op = m->inner_ops + first; n > 0; op++, n--)
        count += op->run == moei_int_op_int8_add || op->run == moei_int_op_int4_add || op->run == moei_int_op_add_rest;
    return count;
}

/* W_in x, which experts read instead of x; with fine codes if experts multiply it by a weight. */
static uint32_t moei_latent_input(moei_maker *m, const moe_layer *layer, uint32_t x, const moei_range *range) {
    const moe_layer_config *c = &layer->config;
    const moei_matrix in =
        moei_matrix_of(layer->tensors[MOE_LATENT_IN], NULL, 1, (size_t)c->d_latent, (size_t)c->router.d_model);
    const int limit = c->router.apply_to == MOE_APPLY_INPUT ? MOEI_WIDE : moei_limit_for(m, range);
    return moei_product(m, &in, x, limit, 0, range->most, 0);
}

/* y = W_out sum + the shared expert of x, in operations outside the layer's. */
static uint32_t moei_latent_output(moei_maker *m, const moei_scoring *s, const moei_expert_run *shared, uint32_t x,
                                   uint32_t sum, int limit) {
    const moe_layer_config *c = &s->layer->config;
    const moei_matrix w =
        moei_matrix_of(s->layer->tensors[MOE_LATENT_OUT], NULL, 1, (size_t)c->d_out, (size_t)c->d_latent);
    const moei_range *most = &s->range->shared[MOE_NODE_OUTPUT];
    uint32_t node[MOE_NODE_COUNT], more;
    moei_sum_units to;
    if (c->n_shared == 0) return moei_product(m, &w, sum, limit, 0, s->range->y.most, 0);
    memset(&to, 0, sizeof to);
    to.sum = MOEI_INT_NONE;
    to.limit = MOEI_WIDE;
    to.range = most->most;
    more = moei_expert_ops(m, shared, 1, moei_expert_hidden(m, shared, 1, x, s->range->shared, node), &to, 0);
    if (c->shared_sigmoid) {
        moei_shared_sigmoid(m, s->layer, x, s->range->sigmoid.most);
        more = moei_weighted(m, more, 0, MOEI_WIDE, most);
    }
    return moei_added(m, moei_product(m, &w, sum, MOEI_WIDE, 0, s->range->y.most + most->most, 0), more,
                      s->range->y.most);
}

/* Keeps what the layer reads and writes alive to its end. */
static void moei_mixture_use(moei_maker *m, const moei_scoring *s, const moei_int_mixture *mixture) {
    moei_vector_use(m, s->latent);
    moei_vector_use(m, s->entering);
    moei_vector_use(m, mixture->z);
    moei_vector_use(m, mixture->p);
    moei_vector_use(m, mixture->sum);
}

static uint32_t moei_module_mixture(moei_maker *m, const moe_module *module, const moei_ranges *range, int limit) {
    const moe_layer_config *c = &module->layer.config;
    const int reads_experts = moei_scored_activation(c) >= 0;
    const int latent = c->d_latent > 0, sum_limit = latent ? moei_limit_for(m, &range->latent_sum) : limit;
    moei_expert_run shared;
    moei_scoring s;
    moei_int_mixture mixture;
    moei_sum_units to;
    moei_int_op op;
    uint32_t x = moei_narrowed(m, m->entering[m->module]), begun, out, index;
    size_t expert;
    memset(&mixture, 0, sizeof mixture);
    memset(&s, 0, sizeof s);
    memset(&shared, 0, sizeof shared);
    s.layer = &module->layer;
    s.range = range;
    s.entering = s.latent = m->entering[m->module];
    s.now = moei_router_now(s.layer, NULL);
    if (latent) s.latent = moei_latent_input(m, s.layer, x, &range->latent);
    s.begun = begun = m->clock;
    if (m->status != MOE_OK) return 0;
    if (c->n_shared > 0) shared = moei_expert_run_begin(s.layer, MOEI_SHARED, 0);
    m->multiplications += m->counted;
    m->inner = 1;
    m->counted = 0;
    if (!reads_experts) {
        moei_mixture_logits(m, &s, &mixture);
        moei_mixture_router(m, &s, &mixture);
    }
    m->multiplications += m->counted;
    m->counted = 0;
    to = moei_mixture_experts(m, &s, &shared, latent ? s.latent : x, sum_limit, &mixture);
    expert = m->counted;
    m->counted = 0;
    if (reads_experts) {
        m->branch = -1; /* experts run between these operations and what follows */
        moei_mixture_logits(m, &s, &mixture);
        m->branch = 0;
    }
    moei_mixture_rest(m, &s, &shared, x, to, &mixture);
    m->multiplications += mixture.router.most * expert + m->counted;
    mixture.block = MOEI_INT_NONE;
    if (m->config->loader) mixture.block = moei_vector_new(m, mixture.stride / 2, MOEI_WIDE, 1, 0);
    m->inner = 0;
    out = moei_vector_new(m, moei_sum_width(s.layer), sum_limit, to.scale,
                          latent ? range->latent_sum.most : range->y.most);
    m->clock++;
    moei_vector_use(m, x);
    moei_mixture_use(m, &s, &mixture);
    if (m->config->loader && m->status == MOE_OK) m->vectors[mixture.block].first_use = begun;
    index = moei_maker_push(m, &m->made.mixtures, &mixture, sizeof mixture);
    op = moei_op(moei_int_op_mixture, moei_sum_width(s.layer), 0, m->relu ? 0 : -sum_limit, sum_limit, to.shift);
    op.index = (uint16_t)index;
    op.factor = (int16_t)moei_additions(m, mixture.expert, mixture.n_expert);
    op.factor2 = (int16_t)moei_additions(m, mixture.shared, mixture.n_shared);
    m->counted = 0;
    moei_op_append(m, op, x, x, out);
    if (m->status == MOE_OK) m->vectors[mixture.sum].scale = ldexp(to.scale, -to.shift);
    return latent ? moei_latent_output(m, &s, &shared, x, out, limit) : out;
}

/* ---- the other modules ---- */

static uint32_t moei_module_linear(moei_maker *m, const moe_module *module, const moei_ranges *range, int limit) {
    const moei_matrix w = moei_matrix_of(module->tensors[MOE_MODULE_WEIGHT], module->tensors[MOE_MODULE_BIAS], 1,
                                         (size_t)module->d_out, (size_t)module->d_in);
    return moei_product(m, &w, moei_narrowed(m, m->entering[m->module]), limit, m->relu, range->y.most, 0);
}

static uint32_t moei_module_activation(moei_maker *m, const moe_module *module, const moei_ranges *range, int limit) {
    const double scale = moei_hidden_scale(limit, range->y.most);
    return moei_curve(m, module->act, moei_widened(m, m->entering[m->module]), limit, scale, range->y.most);
}

static uint32_t moei_module_feed_forward(moei_maker *m, const moe_module *module, const moei_ranges *range, int limit) {
    const moei_expert_run run = moei_expert_run_begin(&module->layer, module->layer.config.expert, 0);
    moei_sum_units to;
    uint32_t node[MOE_NODE_COUNT];
    memset(&to, 0, sizeof to);
    to.sum = MOEI_INT_NONE;
    to.limit = limit;
    to.range = range->y.most;
    return moei_expert_ops(m, &run, 1,
                           moei_expert_hidden(m, &run, 1, moei_narrowed(m, m->entering[m->module]), range->node, node),
                           &to, 0);
}

static uint32_t moei_module_residual(moei_maker *m, const moe_module *module, const moei_ranges *range, int limit) {
    (void)limit;
    return moei_added(m, m->entering[m->module], m->entering[m->module - (size_t)module->span], range->y.most);
}

static uint32_t moei_module_dropout(moei_maker *m, const moe_module *module, const moei_ranges *range, int limit) {
    (void)module;
    (void)range;
    (void)limit;
    return m->entering[m->module];
}

/* Packs the rows of an embedding or of positions as the constants of a product, always in 8 bits.
   Very small row scales are raised, so that the biases of a tied module fit most rows. */
static uint32_t moei_rows_pack(moei_maker *m, const moei_matrix *x, double *unit) {
    const int weights = m->weights;
    moei_codes l;
    uint32_t at;
    size_t i, size;
    m->weights = MOE_WEIGHTS_INT8;
    moei_codes_begin(m, x, 1, &l);
    if (!(l.max_scale > 0)) l.max_scale = 1;
    for (i = 0; i < x->n && m->status == MOE_OK; i++)
        if (l.scale[i] < l.max_scale / 1024) l.scale[i] = l.max_scale / 1024;
    *unit = 32767 / l.max_scale;
    at = moei_matrix_pack(m, x, &l, 1, *unit, &m->made.weights, &size);
    moei_codes_free(m, x, &l);
    m->weights = weights;
    return at;
}

/* Appends the lookup of the row of the token (which = 0) or of its position (1). The largest code
   before the shift is 127 * 32767 / 2. */
static uint32_t moei_row_op(moei_maker *m, const moei_matrix *x, uint32_t at, double unit, int which, int limit) {
    const int shift = limit == MOEI_NARROW ? 14 : 6;
    const double scale = ldexp(2.0, shift) / unit;
    const uint32_t out = moei_vector_new(m, x->k, limit, scale, scale * limit);
    moei_int_op op = moei_op(moei_int_op_row, x->k, x->n, -limit, limit, shift);
    op.at = at;
    op.index = (uint16_t)which;
    moei_op_append(m, op, out, out, out);
    return out;
}

static int moei_rows_fit(moei_maker *m, size_t n) {
    if (n > MOEI_INT_MAX_WIDTH)
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED,
                          "module %z: more than %d rows have no integer form; use MOE_WEIGHTS_FLOAT", m->module,
                          (int)MOEI_INT_MAX_WIDTH);
    return m->status == MOE_OK;
}

static uint32_t moei_module_embedding(moei_maker *m, const moe_module *module, const moei_ranges *range, int limit) {
    const moei_matrix x =
        moei_matrix_of(module->tensors[MOE_MODULE_WEIGHT], NULL, 1, (size_t)module->n_rows, (size_t)module->d_out);
    (void)range;
    if (!moei_rows_fit(m, x.n)) return 0;
    m->rows = moei_rows_pack(m, &x, &m->rows_unit);
    return moei_row_op(m, &x, m->rows, m->rows_unit, 0, limit);
}

static uint32_t moei_module_positions(moei_maker *m, const moe_module *module, const moei_ranges *range, int limit) {
    const moei_matrix x =
        moei_matrix_of(module->tensors[MOE_MODULE_WEIGHT], NULL, 1, m->made.model.length, (size_t)module->d_out);
    double unit;
    uint32_t at;
    (void)limit;
    if (!moei_rows_fit(m, x.n)) return 0;
    at = moei_rows_pack(m, &x, &unit);
    return moei_added(m, m->entering[m->module], moei_row_op(m, &x, at, unit, 1, MOEI_WIDE), range->y.most);
}

/* The bias of output j of a tied module that reads x, in codes of row j of the embedding. */
static double moei_tied_bias(const moei_maker *m, const moe_module *module, uint32_t x, size_t j) {
    const size_t pair = moei_int8_pair_size((size_t)module->d_in);
    const unsigned char *head = m->made.weights.data + m->rows + j / 2 * pair;
    const double row = moei_flash_16(head + moei_int8_factor_at(moei_int8_side((size_t)module->d_out, j)));
    return (double)module->tensors[MOE_MODULE_BIAS][j] / (row / m->rows_unit * m->vectors[x].scale);
}

static int moei_tied_fits(const moei_maker *m, const moe_module *module, uint32_t x) {
    size_t j;
    for (j = 0; j < (size_t)module->d_out; j++)
        if (!(fabs(moei_tied_bias(m, module, x, j)) < 536870912.0)) return 0;
    return 1;
}

/* A tied module is a product with the packed rows of the embedding. Only its biases are added to
   them, once the scale of its input is known. A second tied module has its own copy, and so has one
   with a bias too large for the codes of its row. */
static uint32_t moei_module_tied(moei_maker *m, const moe_module *module, const moei_ranges *range, int limit) {
    const size_t n = (size_t)module->d_out;
    const size_t k = (size_t)module->d_in;
    const size_t pair = moei_int8_pair_size(k);
    const uint32_t x = moei_narrow_copy(m, m->entering[m->module]);
    double scale;
    size_t j;
    uint32_t out;
    moei_int_op op;
    int shift = 0;
    if (m->status != MOE_OK) return 0;
    if (m->rows == MOEI_INT_NONE || !moei_tied_fits(m, module, x)) return moei_module_linear(m, module, range, limit);
    scale = ldexp(m->vectors[x].scale / m->rows_unit, 16);
    for (; shift < 30 && scale < range->y.most * 1.25 / MOEI_WIDE; shift++) scale *= 2;
    for (j = 0; j < n; j++)
        moei_put_32_le(m->made.weights.data + m->rows + j / 2 * pair + j % 2 * 4,
                       moei_nearest(moei_tied_bias(m, module, x, j), 536870911));
    op = moei_op(NULL, n, k, -MOEI_WIDE, MOEI_WIDE, shift);
    op.at = m->rows;
    m->rows = MOEI_INT_NONE;
    out = moei_vector_new(m, n, MOEI_WIDE, scale, range->y.most);
    m->counted += n * k;
    if (m->trace != NULL) {
        const moei_matrix w = moei_matrix_of(module->tensors[MOE_MODULE_WEIGHT], module->tensors[MOE_MODULE_BIAS], 1,
                                             n, k);
        moei_note_matrix(m, &w);
    }
    m->weights = MOE_WEIGHTS_INT8; /* rows always are */
    moei_product_append(m, op, 0, x, out);
    m->weights = m->config->weights;
    return out;
}

/* The gain is stored as gain / scale * 2^bits in 16 bits; the unit 2^-21 and a product's >> 16 make
   the shift bits + 5. eps is in the units of d of moei_int_op_norm. */
static uint32_t moei_module_norm(moei_maker *m, const moe_module *module, const moei_ranges *range, int limit) {
    const size_t n = (size_t)module->d_in;
    const moe_real *gain = module->tensors[MOE_MODULE_WEIGHT],
                   *bias = module->kind == MOE_MODULE_LAYER_NORM ? module->tensors[MOE_MODULE_BIAS] : NULL;
    uint32_t x = m->entering[m->module];
    double scale = limit == MOEI_NARROW ? range->y.most / limit : range->y.most * 2 / limit, most = 0, eps;
    unsigned char bytes[8];
    moei_int_op op;
    uint32_t out;
    size_t i;
    int bits, factor = 8;
    if (n > INT16_MAX)
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED,
                          "module %z: norms wider than %d have no integer form; use MOE_WEIGHTS_FLOAT",
                          m->module, (int)INT16_MAX);
    if (m->status != MOE_OK) return 0;
    for (i = 0; i < n; i++)
        if (fabs((double)gain[i]) > most) most = fabs((double)gain[i]);
    if (scale < most / 32000) scale = most / 32000;
    if (!(scale > 0)) scale = 1;
    bits = moei_shift_for(most / scale, 0, 25);
    for (i = 0; bias != NULL && i < n; i++)
        while (bits > 0 && fabs(ldexp((double)bias[i] / scale, bits + 5)) > 1073741823) bits--;
    while (ldexp((double)n * (double)n, 30 + 2 * factor) > ldexp(1, 60)) factor--;
    eps = ldexp((double)moei_eps_of(module->eps) * (double)n * (double)n, 2 * factor);
    if (eps > ldexp(m->vectors[x].scale * m->vectors[x].scale, 60))
        x = moei_rescale(m, x, MOEI_WIDE, ldexp(sqrt(eps), -30)); /* eps must fit in its codes */
    if (m->status != MOE_OK) return 0;
    eps = eps / m->vectors[x].scale / m->vectors[x].scale;
    eps = eps < ldexp(1, 60) ? floor(eps + 0.5) : ldexp(1, 60);
    out = moei_vector_new(m, n, limit, scale, range->y.most);
    op = moei_op(moei_int_op_norm, n, 0, -limit, limit, bits + 5);
    op.factor = (int16_t)factor;
    moei_put_32_le(bytes, (int32_t)(uint32_t)((uint64_t)eps & 0xffffffffu));
    moei_put_32_le(bytes + 4, (int32_t)(uint32_t)((uint64_t)eps >> 32));
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

/* The table of moei_int_op_rotate, shared by attention modules with the same angles. */
static uint32_t moei_rotation_table(moei_maker *m, const moe_module *module) {
    const size_t half = (size_t)module->attention.d_head / 2,
                 rows = MOEI_INT_ANGLES + (m->made.model.length - 1) / MOEI_INT_ANGLES + 1;
    uint32_t *at = &m->ranges[moei_rotation_of(m->net, m->module)].rotation_table;
    unsigned char bytes[4];
    size_t r, i;
    if (*at != MOEI_INT_NONE) return *at;
    *at = (uint32_t)m->made.weights.size;
    for (r = 0; r < rows; r++)
        for (i = 0; i < half; i++) {
            const double position = (double)(r < MOEI_INT_ANGLES ? r : (r - MOEI_INT_ANGLES) * MOEI_INT_ANGLES);
            const double angle = position * pow((double)module->attention.rotary_base, -(double)i / (double)half);
            moei_put_16_le(bytes, moei_nearest(32767 * cos(angle), 32767));
            moei_put_16_le(bytes + 2, moei_nearest(32767 * sin(angle), 32767));
            (void)moei_constants(m, &m->made.weights, bytes, 4);
        }
    return *at;
}

/* A query or key of rotary attention: x, whose codes are finer by 2^shift, rotated. */
static uint32_t moei_rotated(moei_maker *m, const moe_module *module, uint32_t x, int limit, int shift) {
    uint32_t out;
    moei_int_op op;
    if (m->status != MOE_OK) return 0;
    out = moei_vector_new(m, m->vectors[x].width, limit, ldexp(m->vectors[x].scale, shift), m->vectors[x].range);
    op =
        moei_op(moei_int_op_rotate, m->vectors[out].width, (size_t)module->attention.d_head, -limit, limit, 15 + shift);
    op.at = moei_rotation_table(m, module);
    moei_op_append(m, op, x, x, out);
    return out;
}

static moei_matrix moei_attention_matrix(const moe_module *module, int slot) {
    return moei_matrix_of(module->tensors[slot], NULL, 1, moei_heads_of(module).q, (size_t)module->d_in);
}

/* The query, with the finest codes that keep scores below 2^30. */
static uint32_t moei_query_ops(moei_maker *m, const moe_module *module, uint32_t x, double range) {
    const moei_matrix w = moei_attention_matrix(module, MOE_MODULE_QUERY);
    const double most = 1073741823.0 / (127.0 * 1.4143 * (double)module->attention.d_head);
    const int limit = most < (int)MOEI_INT_ROTATED ? (int)most : (int)MOEI_INT_ROTATED;
    if (!module->attention.rotary) return moei_product(m, &w, x, limit, 0, range, 0);
    return moei_rotated(m, module, moei_product(m, &w, x, limit, 0, range, 0), MOEI_WIDE, 0);
}

/* The key: narrow, rounded only after its rotation. */
static uint32_t moei_key_ops(moei_maker *m, const moe_module *module, uint32_t x, double range) {
    const moei_matrix w = moei_attention_matrix(module, MOE_MODULE_KEY);
    double finest, scale = range > 0 ? range / MOEI_NARROW : 1;
    int shift = 7;
    if (!module->attention.rotary || m->status != MOE_OK) return moei_product(m, &w, x, MOEI_NARROW, 0, range, 0);
    finest = moei_matrix_max_scale(m, &w, moei_input_scale(m, x)) * moei_product_unit(m, x) / 0.49;
    while (shift > 0 && ldexp(scale, -shift) < finest) shift--;
    if (scale < finest) scale = finest;
    return moei_rotated(m, module, moei_product(m, &w, x, MOEI_INT_ROTATED, 0, range, ldexp(scale, -shift)),
                        MOEI_NARROW, shift);
}

/* Reserves int8 [length, width] in the state; returns the offset. */
static uint32_t moei_state_new(moei_maker *m, size_t width) {
    const size_t at = m->made.model.state_size;
    size_t bytes;
    if (!moei_mul(m->made.model.length, width, &bytes) || bytes > INT32_MAX / 2 || at > INT32_MAX / 2)
        moei_maker_fail(m, MOE_ERR_OVERFLOW);
    else m->made.model.state_size = at + (bytes + 3) / 4 * 4;
    return (uint32_t)at;
}

static uint32_t moei_module_attention(moei_maker *m, const moe_module *module, const moei_ranges *range, int limit) {
    const size_t width = moei_heads_of(module).q;
    const moei_matrix value = moei_attention_matrix(module, MOE_MODULE_VALUE);
    const moei_matrix output =
        moei_matrix_of(module->tensors[MOE_MODULE_OUTPUT], NULL, 1, (size_t)module->d_out, width);
    moei_int_attention a;
    moei_int_op op;
    uint32_t x, q, k, out;
    double octaves, scale;
    int bits, mixed;
    if (m->made.model.length > UINT16_MAX) { /* before a table of as many angles */
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED,
                          "module %z: attention over a length of more than %d has no integer form", m->module,
                          (int)UINT16_MAX);
        return 0;
    }
    x = moei_narrowed(m, m->entering[m->module]);
    q = moei_query_ops(m, module, x, range->q.most);
    k = moei_key_ops(m, module, x, range->k.most);
    memset(&a, 0, sizeof a);
    a.heads = (uint16_t)module->attention.heads;
    a.d_head = (uint16_t)module->attention.d_head;
    a.value = moei_product(m, &value, x, MOEI_NARROW, 0, range->v.most, 0);
    a.keys = moei_state_new(m, width);
    a.values = moei_state_new(m, width);
    a.room = moei_vector_int32(m, m->made.model.length + 1 + (m->made.model.length + 1) / 2);
    if (m->status != MOE_OK) return 0;
    octaves = m->vectors[q].scale * m->vectors[k].scale * 1.4426950408889634 / sqrt((double)a.d_head);
    bits = moei_shift_for(octaves, 16, 31);
    a.bits = (uint16_t)(bits < 0 ? 0 : bits);
    /* an average never exceeds its values in magnitude; below 1/64 of them it is practically 0 */
    mixed = m->weights == MOE_WEIGHTS_INT8 ? MOEI_WIDE : MOEI_NARROW;
    scale = mixed == MOEI_WIDE ? 0 : range->mixed.most / MOEI_NARROW;
    if (scale > m->vectors[a.value].scale) scale = m->vectors[a.value].scale;
    if (scale < m->vectors[a.value].scale / 64) scale = m->vectors[a.value].scale / 64;
    out = moei_vector_new(m, width, mixed, scale, m->vectors[a.value].scale * MOEI_NARROW);
    bits = moei_shift_for(m->vectors[a.value].scale / scale, 0, 14);
    op = moei_op(moei_int_op_attention, width, width, -mixed, mixed, bits - 1);
    op.factor = (int16_t)moei_nearest(ldexp(octaves, 16 + a.bits), 32767);
    op.factor2 = (int16_t)moei_nearest(ldexp(m->vectors[a.value].scale / scale, bits), 32766);
    op.index = (uint16_t)moei_maker_push(m, &m->made.attentions, &a, sizeof a);
    m->counted += 2 * width * m->made.model.length;
    m->reference = a.value;
    moei_op_append(m, op, q, k, out);
    moei_vector_use(m, a.value);
    moei_vector_use(m, a.room);
    return moei_product(m, &output, out, limit, 0, range->y.most, 0);
}

/* The function that appends the operations of a module and returns its output. limit: of the
   output's codes. */
static const struct moei_module_maker {
    int kind; /* MOE_MODULE_ */
    uint32_t (*make)(moei_maker *m, const moe_module *module, const moei_ranges *range, int limit);
} moei_module_makers[] = {
    {MOE_MODULE_LINEAR, moei_module_linear},
    {MOE_MODULE_ACTIVATION, moei_module_activation},
    {MOE_MODULE_LAYER_NORM, moei_module_norm},
    {MOE_MODULE_MIXTURE, moei_module_mixture},
    {MOE_MODULE_RESIDUAL, moei_module_residual},
    {MOE_MODULE_EMBEDDING, moei_module_embedding},
    {MOE_MODULE_POSITIONS, moei_module_positions},
    {MOE_MODULE_ATTENTION, moei_module_attention},
    {MOE_MODULE_RMS_NORM, moei_module_norm},
    {MOE_MODULE_DROPOUT, moei_module_dropout},
    {MOE_MODULE_FEED_FORWARD, moei_module_feed_forward},
    {MOE_MODULE_TIED, moei_module_tied},
};

/* A setting of a module that has no integer form, or NULL. */
static const char *moei_integer_obstacle(const moe_module *m) {
    moe_attention_config a = m->attention;
    const moe_field *field;
    if (m->kind == MOE_MODULE_SCALE || m->kind == MOE_MODULE_CONVOLUTION) return moei_module_names[m->kind];
    if (m->kind == MOE_MODULE_RMS_NORM && m->bias) return "bias";
    if ((m->kind == MOE_MODULE_LAYER_NORM || m->kind == MOE_MODULE_TIED) && m->no_bias) return "no_bias";
    if (m->kind != MOE_MODULE_ATTENTION) return NULL;
    /* what 0 means; only fields that are refused below read eps */
    if (a.kv_heads == a.heads) a.kv_heads = 0;
    if (a.d_value == a.d_head) a.d_value = 0;
    if (a.rotary_dims == a.d_head) a.rotary_dims = 0;
    a.eps = 0;
    for (field = moe_field_find(moei_attention_fields, "kv_heads"); field->name != NULL; field++)
        if (!moei_field_is_zero(field, &a)) return field->name;
    return NULL;
}

static uint32_t moei_module_make(moei_maker *m, const moe_module *module, const moei_ranges *range, int limit) {
    const char *obstacle = moei_integer_obstacle(module);
    size_t i;
    if (obstacle != NULL) {
        MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED, "module %z: %s has no integer form; use MOE_WEIGHTS_FLOAT",
                          m->module, obstacle);
        return 0;
    }
    for (i = 0; i < sizeof moei_module_makers / sizeof *moei_module_makers; i++)
        if (moei_module_makers[i].kind == module->kind) return moei_module_makers[i].make(m, module, range, limit);
    moei_maker_fail(m, MOE_ERR_UNSUPPORTED);
    return 0;
}

/* ---- >>scratch: vectors get their offsets ---- */

/* The int16 elements of a vector, a multiple of 4. */
static size_t moei_vector_room(const moei_vector *v) { return (v->width + 3) / 4 * (v->is_int32 ? 8 : 4); }

/* Gives vector i the lowest offset at which no other vector is live at the same time, and kept ones
   what follows. */
static void moei_vector_assign(moei_maker *m, size_t i, size_t *most) {
    moei_vector *v = &m->vectors[i];
    size_t at = v->kept ? *most : 0, j;
    for (j = 0; j < i && !v->kept; j++) {
        const moei_vector *w = &m->vectors[j];
        if (w->kept || w->first_use > v->last_use || v->first_use > w->last_use) continue;
        if (w->offset < at + moei_vector_room(v) && at < w->offset + moei_vector_room(w)) {
            at = w->offset + moei_vector_room(w);
            j = (size_t)-1;
        }
    }
    if (at + moei_vector_room(v) > INT32_MAX) moei_maker_fail(m, MOE_ERR_OVERFLOW);
    v->offset = (uint32_t)at;
    if (at + moei_vector_room(v) > *most) *most = at + moei_vector_room(v);
}

static uint32_t moei_vector_offset(const moei_maker *m, uint32_t v) {
    return v == MOEI_INT_NONE ? v : m->vectors[v].offset;
}

static void moei_ops_resolve(moei_maker *m, moei_int_op *ops) {
    size_t i;
    for (i = 0; i < moei_array_length(ops); i++) {
        ops[i].in = moei_vector_offset(m, ops[i].in);
        ops[i].other = moei_vector_offset(m, ops[i].other);
        ops[i].out = moei_vector_offset(m, ops[i].out);
    }
}

/* Assigns offsets to vectors and joins the two arrays of operations. */
static void moei_maker_finish(moei_maker *m) {
    moe_model *model = &m->made.model;
    const size_t n_main = moei_array_length(m->main_ops);
    size_t i, most = 0;
    int kept;
    for (kept = 0; kept <= 1; kept++)
        for (i = 0; i < moei_array_length(m->vectors) && m->status == MOE_OK; i++)
            if (m->vectors[i].kept == kept) moei_vector_assign(m, i, &most);
    if (m->status != MOE_OK) return;
    moei_ops_resolve(m, m->main_ops);
    moei_ops_resolve(m, m->inner_ops);
    for (i = 0; i < moei_array_length(m->made.mixtures); i++) {
        moei_int_mixture *x = &m->made.mixtures[i];
        x->score += (uint32_t)n_main;
        x->expert += (uint32_t)n_main;
        x->shared += (uint32_t)n_main;
        x->copy += (uint32_t)n_main;
        x->constant += (uint32_t)n_main;
        x->z = moei_vector_offset(m, x->z);
        x->p = moei_vector_offset(m, x->p);
        x->sum = moei_vector_offset(m, x->sum);
        x->choices = moei_vector_offset(m, x->choices);
        x->block = moei_vector_offset(m, x->block);
    }
    for (i = 0; i < moei_array_length(m->made.attentions); i++) {
        moei_int_attention *x = &m->made.attentions[i];
        x->value = moei_vector_offset(m, x->value);
        x->room = moei_vector_offset(m, x->room);
    }
    for (i = 0; i < moei_array_length(m->inner_ops); i++)
        (void)moei_maker_push(m, &m->main_ops, &m->inner_ops[i], sizeof *m->inner_ops);
    for (i = 0; m->trace != NULL && i < moei_array_length(m->trace->inner); i++)
        (void)moei_maker_push(m, &m->trace->notes, &m->trace->inner[i], sizeof *m->trace->inner);
    m->made.ops = m->main_ops;
    m->main_ops = NULL;
    model->n_main = (uint32_t)n_main;
    model->n_ops = (uint32_t)moei_array_length(m->made.ops);
    model->n_mixtures = (uint32_t)moei_array_length(m->made.mixtures);
    model->n_attentions = (uint32_t)moei_array_length(m->made.attentions);
    model->scratch_size = MOEI_INT_ALIGN - 1 + model->state_size + most * sizeof(int16_t);
}

#endif /* MOE_NO_QUANT */

/* ---- >>lists: float models as lists of operations ---- */

#if !MOE_REAL_IS_DOUBLE && !defined(MOE_NO_QUANT)
typedef void moei_op_function(const moei_int_op *op, moei_int_run *run);

#define MOEI_FLOAT_ACT(value, name, act, backward) moei_float_op_##value,
static moei_op_function *const moei_list_acts[] = {MOE_ACTS(MOEI_FLOAT_ACT)};
#undef MOEI_FLOAT_ACT

/* The MoE layer whose operations are being appended, and its router's current configuration. */
typedef struct moei_list_router {
    const moe_layer *layer;
    moe_router_config now;
    moei_int_mixture mixture;
    size_t index;
} moei_list_router;

static const char *moei_list_weight_obstacle(const moe_router_config *c) {
    const int weight = moei_ir_weight_of(c);
    const int by_logits = c->select == MOE_SELECT_SINKHORN || c->select == MOE_SELECT_BALANCED;
    if (weight == MOE_WEIGHT_SPARSEMIXER) return "weight = sparsemixer";
    if (weight == MOE_WEIGHT_P_NORM) return "weight_p";
    if (c->renormalize == MOE_RENORMALIZE_AFTER && c->expert_scale) return "renormalize with expert_scale";
    if (c->selection_bias &&
        c->select != MOE_SELECT_TOP_K && c->select != MOE_SELECT_DENSE && c->select != MOE_SELECT_HASH)
        return "selection_bias with this selection";
    if (by_logits && c->gate == MOE_GATE_RELU) return "the selection with this gate";
    return NULL;
}

static const char *moei_list_router_obstacle(const moe_router_config *c, int frozen) {
    static const int selects[] = {MOE_SELECT_TOP_K,    MOE_SELECT_DENSE, MOE_SELECT_THRESHOLD, MOE_SELECT_POSITIVE,
                                  MOE_SELECT_TOP_P,    MOE_SELECT_HASH,  MOE_SELECT_SAMPLE,    MOE_SELECT_SINKHORN,
                                  MOE_SELECT_BALANCED, -1};
    size_t i = 0;
    while (selects[i] >= 0 && selects[i] != c->select) i++;
    if (selects[i] < 0) return "select";
    if (c->select == MOE_SELECT_SAMPLE && c->sample_at == MOE_SAMPLE_ALWAYS) return "sample_at = always";
    if (c->select == MOE_SELECT_HASH && c->table_size > UINT16_MAX) return "table_size";
    if (c->score != MOE_SCORE_LINEAR && c->score != MOE_SCORE_RANDOM && c->score != MOE_SCORE_MLP) return "score";
    if (c->input == MOE_INPUT_ADAPTIVE_CLUSTERING) return "input";
    if (c->refine != MOE_REFINE_NONE) return "refine";
    if (c->student && frozen) return "student";
    if (c->logit_cap > 0) return "logit_cap";
    if (c->router_residual) return "router_residual";
    if (c->n_zero + c->n_copy + c->n_constant > 0) return "experts without matrices";
    return moei_list_weight_obstacle(c);
}

/* An operation has 16 bits for a width. */
static const char moei_list_too_wide[] = "a width above 65535";

/* Whether an operation of these experts would be too wide. */
static int moei_list_is_wide(const moei_expert_run *run) {
    int i;
    for (i = 0; i < MOEI_ACTIVATIONS; i++)
        if ((i == MOEI_X || (run->needed >> i & 1u)) && run->width[i] > UINT16_MAX) return 1;
    return 0;
}

static const char *moei_list_layer_obstacle(const moe_module *module) {
    const moe_layer_config *c = &module->layer.config;
    const moei_expert_run run = moei_expert_run_begin(&module->layer, c->expert, 0);
    moei_expert_run shared = run;
    moe_router_config now;
    int frozen;
    if (c->n_shared > 0) shared = moei_expert_run_begin(&module->layer, MOEI_SHARED, 0);
    if (run.shaped) return "a shaped gate";
    if (run.in_file) return "weights in a file";
    if (moei_list_is_wide(&run) || moei_list_is_wide(&shared)) return moei_list_too_wide;
    if (module->kind == MOE_MODULE_FEED_FORWARD) return NULL;
    now = moei_router_now(&module->layer, &frozen);
    if (now.n_experts > INT16_MAX) return "n_experts";
    if (now.score == MOE_SCORE_MLP && moei_router_hidden(&now) > UINT16_MAX) return moei_list_too_wide;
    return moei_list_router_obstacle(&now, frozen);
}
#endif

/* Why a float model is not a list of operations; NULL if it is one. */
static const char *moei_list_obstacle(const moe_net *net, size_t length) {
#if !MOE_REAL_IS_DOUBLE && !defined(MOE_NO_QUANT)
    size_t i, works = 0;
    if (length > UINT16_MAX) return "the length";
    if (net->external) return "weights in a file";
    for (i = 0; i < net->n_modules; i++) {
        const moe_module *m = &net->modules[i];
        const char *obstacle = moei_is_layer(m) ? moei_list_layer_obstacle(m) : NULL;
        if (obstacle != NULL) return obstacle;
        if (m->d_in > UINT16_MAX || m->d_out > UINT16_MAX || m->n_rows > UINT16_MAX) return moei_list_too_wide;
        if (m->kind != MOE_MODULE_DROPOUT) works = 1;
        if (m->kind == MOE_MODULE_ATTENTION) return "attention";
        if (m->kind > MOE_MODULE_TIED) return moei_module_names[m->kind];
    }
    return works ? NULL : "there is nothing to compute";
#else
    (void)net;
    (void)length;
    return "MOE_NO_QUANT";
#endif
}

#if !MOE_REAL_IS_DOUBLE && !defined(MOE_NO_QUANT)
/* Constants of the model; values NULL: zeros. */
static uint32_t moei_list_constants(moei_maker *m, moe_buffer *to, const moe_real *values, size_t count) {
    const moe_real zero = 0;
    const uint32_t at = (uint32_t)to->size;
    if (values != NULL) (void)moei_constants(m, to, values, count * sizeof *values);
    for (; values == NULL && count > 0 && m->status == MOE_OK; count--)
        (void)moei_constants(m, to, &zero, sizeof zero);
    return at;
}

/* Appends an operation with a result of its own; in MOEI_INT_NONE: it reads no vector. */
static uint32_t moei_list_op(moei_maker *m, moei_op_function *run, size_t n, size_t k, uint32_t at, uint32_t in,
                             uint32_t other) {
    const uint32_t out = moei_vector_int32(m, n);
    moei_int_op op = moei_op(run, n, k, 0, 0, 0);
    op.at = at;
    moei_op_append(m, op, in == MOEI_INT_NONE ? out : in, in == MOEI_INT_NONE ? out : other, out);
    return out;
}

/* A row of the constants at `at`; which: see moei_float_op_row. */
static uint32_t moei_list_row(moei_maker *m, size_t n, size_t k, uint32_t at, int which) {
    const uint32_t out = moei_list_op(m, moei_float_op_row, n, k, at, MOEI_INT_NONE, 0);
    if (m->status == MOE_OK) m->last_op->index = (uint16_t)which;
    return out;
}

/* W in + b of `count` experts, or of one; sum: what it adds to, MOEI_INT_NONE: a new vector. */
static uint32_t moei_list_product(moei_maker *m, const moe_real *w, const moe_real *bias, size_t count, size_t n,
                                  size_t k, uint32_t in, uint32_t sum) {
    moe_buffer *to = m->in_block ? &m->pieces : &m->made.weights;
    uint32_t at = (uint32_t)to->size;
    moei_int_op op;
    size_t e, i;
    for (e = 0; e < count; e++) {
        (void)moei_list_constants(m, to, bias == NULL ? NULL : bias + e * n, n);
        (void)moei_list_constants(m, to, w + e * n * k, n * k);
    }
    if (m->in_block) {
        for (i = 0, at = 0; i < m->n_pieces; i++) at += (uint32_t)m->piece[i];
        m->piece[m->n_pieces++] = n * (k + 1) * sizeof *w;
    }
    m->counted += n * k;
    if (sum == MOEI_INT_NONE) return moei_list_op(m, moei_float_op_product, n, k, at, in, in);
    op = moei_op(moei_float_op_product_add, n, k, 0, 0, 0);
    op.at = at;
    moei_op_append(m, op, in, in, sum);
    return sum;
}

/* A vector of equal constants. */
static uint32_t moei_list_equal(moei_maker *m, moe_real value, size_t n) {
    const uint32_t at = (uint32_t)m->made.weights.size;
    size_t i;
    for (i = 0; i < n; i++) (void)moei_list_constants(m, &m->made.weights, &value, 1);
    return moei_list_row(m, n, 1, at, 2);
}

static uint32_t moei_list_norm(moei_maker *m, moei_op_function *run, const moe_real *gain, const moe_real *bias,
                               moe_real eps, size_t n, uint32_t in) {
    const uint32_t at = moei_list_constants(m, &m->made.weights, &eps, 1);
    (void)moei_list_constants(m, &m->made.weights, gain, n);
    (void)moei_list_constants(m, &m->made.weights, bias, n);
    return moei_list_op(m, run, n, n, at, in, in);
}

/* The steps of experts, or of one; the last product adds to sum, or (MOEI_INT_NONE) makes a
   vector. */
static uint32_t moei_list_expert(moei_maker *m, const moei_expert_run *run, size_t count, uint32_t x, uint32_t sum) {
    uint32_t node[MOE_NODE_COUNT], made = x;
    int i;
    for (i = 0; i < run->kind->n_steps; i++) {
        const moei_step *step = &run->kind->steps[i];
        const uint32_t from = step->from == MOEI_X ? x : node[step->from];
        const size_t n = run->width[step->to];
        if (!(run->needed >> step->to & 1u)) continue;
        if (step->op == MOEI_STEP_MATMUL)
            made = moei_list_product(m, run->layer->tensors[step->weight],
                                     step->bias < 0 ? NULL : run->layer->tensors[step->bias], count, n,
                                     run->width[step->from], from, i + 1 < run->kind->n_steps ? MOEI_INT_NONE : sum);
        else made = moei_list_op(m, moei_list_acts[run->act], n, n, 0, from, from);
        if (step->op == MOEI_STEP_GATED)
            made = moei_list_op(m, moei_float_op_multiply, n, n, 0, made, node[step->second]);
        node[step->to] = made;
    }
    return made;
}

/* u, then z. */
static uint32_t moei_list_logits(moei_maker *m, const moei_list_router *r, uint32_t u) {
    const size_t n = (size_t)r->now.n_experts, d = (size_t)r->now.d_model;
    const size_t h = moei_router_hidden(&r->now);
    const moe_real *const *t = r->layer->tensors;
    const moe_real shrink = MOEI_R(1.0) / MOEI_F(sqrt)((moe_real)d);
    if (r->now.input == MOE_INPUT_SCALED_RMS) {
        u = moei_list_norm(m, moei_float_op_rms_norm, t[MOE_ROUTER_INPUT_SCALE], NULL, MOEI_R(1e-6), d, u);
        u = moei_list_op(m, moei_float_op_multiply, d, d, 0, u, moei_list_equal(m, shrink, d));
    }
    if (r->now.score != MOE_SCORE_MLP)
        return moei_list_product(m, t[MOE_ROUTER_WEIGHT], t[MOE_ROUTER_BIAS], 1, n, d, u, MOEI_INT_NONE);
    u = moei_list_product(m, t[MOE_ROUTER_FC1_WEIGHT], t[MOE_ROUTER_FC1_BIAS], 1, h, d, u, MOEI_INT_NONE);
    u = moei_list_op(m, moei_list_acts[r->now.router_act], h, h, 0, u, u);
    return moei_list_product(m, t[MOE_ROUTER_FC2_WEIGHT], t[MOE_ROUTER_FC2_BIAS], 1, n, h, u, MOEI_INT_NONE);
}

/* p of z. */
static uint32_t moei_list_gate(moei_maker *m, const moei_list_router *r, uint32_t z) {
    const size_t n = (size_t)r->now.n_experts;
    const moe_real t = r->now.gate_temperature;
    if (r->now.gate == MOE_GATE_SOFTMAX)
        return moei_list_op(m, moei_float_op_softmax, n, n, moei_list_constants(m, &m->made.weights, &t, 1), z, z);
    if (r->now.gate == MOE_GATE_SQRT_SOFTPLUS) return moei_list_op(m, moei_float_op_sqrt_softplus, n, n, 0, z, z);
    if (r->now.gate == MOE_GATE_RELU) return moei_list_op(m, moei_list_acts[MOE_ACT_RELU], n, n, 0, z, z);
    if (r->now.gate == MOE_GATE_IDENTITY) return z;
    if (!moei_ir_is(t, 1.0))
        z = moei_list_op(m, moei_float_op_multiply, n, n, 0, z, moei_list_equal(m, MOEI_R(1.0) / t, n));
    return moei_list_op(m, moei_list_acts[MOE_ACT_SIGMOID], n, n, 0, z, z);
}

/* An operation on the choices. */
static void moei_list_choices(moei_maker *m, const moei_list_router *r, moei_op_function *run, size_t k, uint32_t at,
                              uint32_t in, uint32_t z) {
    moei_int_op op = moei_op(run, (size_t)r->now.n_experts, k, r->mixture.router.most, 0, 0);
    op.at = at;
    moei_op_append(m, op, in, r->mixture.choices, z);
}

/* Chooses the experts above their thresholds, with the fallback if there are none. */
static void moei_list_above(moei_maker *m, const moei_list_router *r, uint32_t p, uint32_t z) {
    const uint32_t at = (uint32_t)m->made.weights.size;
    moe_router router;
    moei_pass pass;
    size_t e;
    moei_layer_router(r->layer, &router);
    memset(&pass, 0, sizeof pass);
    pass.router = &router;
    pass.c = &r->now;
    for (e = 0; e < (size_t)r->now.n_experts; e++) {
        const moe_real theta = moei_threshold(&pass, e);
        (void)moei_list_constants(m, &m->made.weights, &theta, 1);
    }
    moei_list_choices(m, r, moei_float_op_choose_above, 0, at, p, z);
    if (m->status != MOE_OK) return;
    m->last_op->factor = r->now.select == MOE_SELECT_THRESHOLD && r->now.threshold_fallback != MOE_FALLBACK_NEVER;
    m->last_op->factor2 = (moei_gate_flags[r->now.gate] & MOEI_GATE_RISES) != 0;
}

static void moei_list_select(moei_maker *m, const moei_list_router *r, uint32_t p, uint32_t z) {
    const moe_router_config *c = &r->now;
    const size_t n = (size_t)c->n_experts;
    const int rises = (moei_gate_flags[c->gate] & MOEI_GATE_RISES) != 0;
    uint32_t key = rises ? z : p, at;
    if (c->select == MOE_SELECT_TOP_P) {
        at = moei_list_constants(m, &m->made.weights, &c->top_p, 1);
        moei_list_choices(m, r, moei_float_op_choose_sum, n, at, p, z);
        return;
    }
    if (c->select == MOE_SELECT_THRESHOLD || c->select == MOE_SELECT_POSITIVE) {
        moei_list_above(m, r, p, z);
        return;
    }
    if (c->selection_bias) {
        at = moei_list_constants(m, &m->made.weights, r->layer->tensors[MOE_ROUTER_SELECTION_BIAS], n);
        key = moei_list_op(m, moei_float_op_add, n, n, 0, p, moei_list_row(m, n, 1, at, 2));
    }
    if (c->select == MOE_SELECT_HASH) {
        const moe_real *table = r->layer->tensors[MOE_ROUTER_TABLE];
        const size_t count = (size_t)c->table_size * (size_t)c->top_k;
        if (m->status == MOE_OK) m->status = moei_check_table(table, count, (size_t)c->top_k, c->n_experts, m->error);
        at = moei_list_constants(m, &m->made.weights, table, count);
        moei_list_choices(m, r, moei_float_op_choose_listed, (size_t)c->top_k, at, key, z);
        if (m->status == MOE_OK) m->last_op->index = (uint16_t)c->table_size;
    } else moei_list_choices(m, r, moei_float_op_choose,
                           c->select == MOE_SELECT_DENSE ? n : (size_t)c->top_k, 0, key, z);
}

static void moei_list_weights(moei_maker *m, const moei_list_router *r, uint32_t p, uint32_t z) {
    const moe_router_config *c = &r->now;
    const moe_real *own = c->expert_scale ? r->layer->tensors[MOE_ROUTER_EXPERT_SCALE] : NULL;
    const int weight = moei_ir_weight_of(c);
    const int ones = weight == MOE_WEIGHT_UNIFORM || weight == MOE_WEIGHT_ONE;
    const size_t n = (size_t)c->n_experts;
    const uint32_t from = ones ? moei_list_equal(m, MOEI_R(1.0), n) : weight == MOE_WEIGHT_SOFTMAX ? z : p;
    uint32_t at;
    size_t e;
    moei_list_choices(m, r, moei_float_op_weigh, 0, 0, from, z);
    if (weight == MOE_WEIGHT_SUM || weight == MOE_WEIGHT_UNIFORM)
        moei_list_choices(m, r, moei_float_op_weigh_sum, 0, 0, from, z);
    if (weight == MOE_WEIGHT_SOFTMAX) moei_list_choices(m, r, moei_float_op_weigh_softmax, 0, 0, from, z);
    if (own == NULL && moei_ir_is(c->scale, 1.0)) return;
    at = (uint32_t)m->made.weights.size;
    for (e = 0; e < n; e++) {
        const moe_real factor = c->scale * (own != NULL ? own[e] : MOEI_R(1.0));
        (void)moei_list_constants(m, &m->made.weights, &factor, 1);
    }
    moei_list_choices(m, r, moei_float_op_weigh_scale, 0, at, from, z);
}

/* What a layer adds to its experts: the input and the shared expert. */
static void moei_list_rest(moei_maker *m, const moei_list_router *r, uint32_t x, uint32_t y) {
    const moe_layer *layer = r->layer;
    const moei_expert_run run = moei_expert_run_begin(layer, MOEI_SHARED, 0);
    const size_t d = (size_t)layer->config.router.d_model;
    uint32_t share;
    moei_int_op op;
    if (layer->config.add_input) {
        op = moei_op(moei_float_op_add_rest, d, 0, r->mixture.router.most, 0, 0);
        moei_op_append(m, op, x, r->mixture.choices, y);
    }
    if (layer->config.n_shared == 0) return;
    if (layer->config.shared_sigmoid) {
        share = moei_list_product(m, layer->tensors[MOE_SHARED_SIGMOID], NULL, 1, 1, d, x, MOEI_INT_NONE);
        share = moei_list_op(m, moei_list_acts[MOE_ACT_SIGMOID], 1, 1, 0, share, share);
        moei_op_append(m, moei_op(moei_float_op_set_weight, 1, 0, 0, 0, 0), share, share, share);
    }
    (void)moei_list_expert(m, &run, 1, x, y);
}

static void moei_list_router_ops(moei_maker *m, moei_list_router *r, uint32_t u) {
    moei_int_mixture *x = &r->mixture;
    const size_t n = (size_t)r->now.n_experts;
    const size_t most = moei_ir_select_of(r->now.select)->takes_all ? n : (size_t)r->now.top_k;
    uint32_t z, p;
    x->router.n_experts = (uint16_t)n;
    x->router.most = (uint16_t)most;
    x->router.bias = x->router.thresholds = x->router.scales = x->router.table = MOEI_INT_NONE;
    x->choices = moei_vector_new(m, (most + 2) / 2 * 2 + 2 * most, MOEI_WIDE, 1, 0);
    if (m->status == MOE_OK) moei_keep_choices(m, x->choices, 1); /* logits may be infinite */
    x->score = moei_ops_count(m);
    z = moei_list_logits(m, r, u);
    p = moei_list_gate(m, r, z);
    moei_list_select(m, r, p, z);
    moei_list_weights(m, r, p, z);
    x->n_score = moei_ops_count(m) - x->score;
    x->z = z;
    x->p = p;
}

static uint32_t moei_list_mixture(moei_maker *m, const moe_module *module) {
    const moe_layer_config *c = &module->layer.config;
    const moei_expert_run run = moei_expert_run_begin(&module->layer, c->expert, 0);
    const size_t experts = (size_t)c->router.n_experts;
    const uint32_t x = m->entering[m->module], u = m->entering[moei_first_norm(m->net, m->module)];
    const size_t width = run.width[MOE_NODE_OUTPUT];
    const uint32_t sum = moei_vector_int32(m, width);
    moei_list_router r;
    moei_int_op op;
    size_t before;
    uint32_t in = x, latent, y;
    memset(&r, 0, sizeof r);
    r.layer = &module->layer;
    r.now = moei_router_now(r.layer, NULL);
    if (c->d_latent > 0)
        in = moei_list_product(m, r.layer->tensors[MOE_LATENT_IN], NULL, 1, run.width[MOEI_X], (size_t)module->d_in, x,
                               MOEI_INT_NONE);
    latent = in;
    m->inner = 1;
    moei_list_router_ops(m, &r, u);
    r.mixture.expert = moei_ops_count(m);
    before = m->counted;
    m->in_block = 1;
    if (c->router.apply_to == MOE_APPLY_INPUT)
        in = moei_list_op(m, moei_float_op_apply_weight, run.width[MOEI_X], 0, 0, in, in);
    (void)moei_list_expert(m, &run, experts, in, sum);
    moei_mixture_blocks(m, &r.mixture, experts);
    m->in_block = 0;
    m->counted += (m->counted - before) * (size_t)(r.mixture.router.most - 1);
    r.mixture.n_expert = moei_ops_count(m) - r.mixture.expert;
    r.mixture.shared = moei_ops_count(m);
    if (c->d_latent == 0) moei_list_rest(m, &r, x, sum);
    r.mixture.n_shared = moei_ops_count(m) - r.mixture.shared;
    m->inner = 0;
    r.mixture.sum = sum;
    r.mixture.block = MOEI_INT_NONE;
    m->clock++;
    moei_vector_use(m, u);
    moei_vector_use(m, latent);
    op = moei_op(moei_float_op_mixture, width, 0, 0, 0, 0);
    op.index = (uint16_t)moei_maker_push(m, &m->made.mixtures, &r.mixture, sizeof r.mixture);
    moei_op_append(m, op, x, x, sum); /* all are alive until here */
    if (c->d_latent == 0) return sum;
    y = moei_list_product(m, r.layer->tensors[MOE_LATENT_OUT], NULL, 1, (size_t)module->d_out, width, sum,
                          MOEI_INT_NONE);
    moei_list_rest(m, &r, x, y);
    return y;
}

/* The rows of an embedding, after the biases of the module that is tied to them. */
static uint32_t moei_list_embedding(moei_maker *m, const moe_module *module) {
    const size_t n = (size_t)module->n_rows, k = (size_t)module->d_out;
    const moe_real *bias = NULL;
    size_t i;
    for (i = m->net->n_modules; i-- > 0;)
        if (m->net->modules[i].kind == MOE_MODULE_TIED) bias = m->net->modules[i].tensors[MOE_MODULE_BIAS];
    m->rows = moei_list_constants(m, &m->made.weights, bias, n);
    return moei_list_row(m, k, n,
                         moei_list_constants(m, &m->made.weights, module->tensors[MOE_MODULE_WEIGHT], n * k), 0);
}

/* The first tied module uses the rows, others have copies. */
static uint32_t moei_list_tied(moei_maker *m, const moe_module *module) {
    const size_t n = (size_t)module->d_out, k = (size_t)module->d_in;
    const uint32_t in = m->entering[m->module], at = m->rows;
    m->rows = MOEI_INT_NONE;
    if (at == MOEI_INT_NONE)
        return moei_list_product(m, module->tensors[MOE_MODULE_WEIGHT], module->tensors[MOE_MODULE_BIAS], 1, n, k, in,
                                 MOEI_INT_NONE);
    m->counted += n * k;
    return moei_list_op(m, moei_float_op_product, n, k, at, in, in);
}

static uint32_t moei_list_module(moei_maker *m, const moe_module *module) {
    const size_t n = (size_t)module->d_out, k = (size_t)module->d_in;
    const moe_real *w = module->tensors[MOE_MODULE_WEIGHT], *bias = module->tensors[MOE_MODULE_BIAS];
    const uint32_t x = m->entering[m->module];
    moei_expert_run run;
    uint32_t y;
    switch (module->kind) {
    case MOE_MODULE_LINEAR: return moei_list_product(m, w, bias, 1, n, k, x, MOEI_INT_NONE);
    case MOE_MODULE_ACTIVATION: return moei_list_op(m, moei_list_acts[module->act], n, n, 0, x, x);
    case MOE_MODULE_LAYER_NORM:
        return moei_list_norm(m, moei_float_op_layer_norm, w, bias, moei_eps_of(module->eps), n, x);
    case MOE_MODULE_RMS_NORM:
        return moei_list_norm(m, moei_float_op_rms_norm, w, module->bias ? bias : NULL, moei_eps_of(module->eps), n, x);
    case MOE_MODULE_RESIDUAL:
        return moei_list_op(m, moei_float_op_add, n, n, 0, x, m->entering[m->module - (size_t)module->span]);
    case MOE_MODULE_MIXTURE: return moei_list_mixture(m, module);
    case MOE_MODULE_FEED_FORWARD:
        run = moei_expert_run_begin(&module->layer, module->layer.config.expert, 0);
        return moei_list_expert(m, &run, 1, x, MOEI_INT_NONE);
    case MOE_MODULE_EMBEDDING: return moei_list_embedding(m, module);
    case MOE_MODULE_POSITIONS:
        y = moei_list_row(m, n, (size_t)module->n_rows,
                          moei_list_constants(m, &m->made.weights, w, (size_t)module->n_rows * n), 1);
        return moei_list_op(m, moei_float_op_add, n, n, 0, x, y);
    case MOE_MODULE_TIED: return moei_list_tied(m, module);
    default: return x; /* dropout */
    }
}

static void moei_list_modules(moei_maker *m) {
    moe_model *model = &m->made.model;
    model->run = moei_float_ops_run;
    model->choices = moei_float_ops_choices;
    model->input_scale = model->output_scale = 1;
    m->rows = MOEI_INT_NONE;
    if (m->status == MOE_OK && model->d_in > 0) m->entering[0] = moei_vector_int32(m, model->d_in);
    for (m->module = 0; m->module < m->net->n_modules && m->status == MOE_OK; m->module++) {
        m->entering[m->module + 1] = moei_list_module(m, &m->net->modules[m->module]);
        moei_note_output(m, m->module, m->entering[m->module + 1]);
    }
}
#endif

/* The values of parameter `index` of module i; NULL: not set. */
static const moe_real *moei_float_values(const moe_net *net, size_t i, int index) {
    const moe_module *m = &net->modules[i];
    return moei_is_layer(m) ? m->layer.tensors[index] : m->tensors[index];
}

/* Whether all parameters are in memory and finite. */
static moe_status moei_parameters_check(const moe_net *net, moe_error *error) {
    moe_parameter parameter;
    size_t i, j;
    int index;
    for (i = 0; i < net->n_modules; i++)
        for (index = 0; index < MOE_LAYER_PARAMETER_COUNT; index++) {
            const moe_module *m = &net->modules[i];
            const moe_real *values;
            if (moei_module_parameter(net, i, index, &parameter) != MOE_OK) continue;
            values = moei_float_values(net, i, index);
            if (values == NULL && (moei_is_layer(m) ? m->layer.external[index] : moei_external_of(m, index)) != NULL)
                return moei_error(error, MOE_ERR_UNSUPPORTED,
                                  "module %z: tensor %s lies in a file: a model needs it as floats in memory", i,
                                  parameter.name);
            if (values == NULL)
                return moei_error(error, MOE_ERR_ARGUMENT, "module %z: tensor %s is not set", i, parameter.name);
            for (j = 0; j < parameter.count; j++)
                if (!moe_is_finite(values[j]))
                    return moei_error(error, MOE_ERR_NONFINITE, "%z.%s[%z] = %g: must be a finite number", i,
                                      parameter.name, j, (double)values[j]);
        }
    return MOE_OK;
}

/* The longest sequence; 0: no module reads earlier tokens. */
static size_t moei_model_length(const moe_net *net, size_t wanted) {
    size_t i, length = 0;
    for (i = 0; i < net->n_modules; i++) {
        const moe_module *m = &net->modules[i];
        if (m->kind != MOE_MODULE_ATTENTION && m->kind != MOE_MODULE_POSITIONS && m->kind != MOE_MODULE_CONVOLUTION &&
            !moei_refines(m)) continue;
        if (length == 0) length = wanted > 0 ? wanted : 128;
        if (m->kind == MOE_MODULE_POSITIONS && length > (size_t)m->n_rows) length = (size_t)m->n_rows;
    }
    return length;
}

#ifndef MOE_NO_QUANT
/* ---- >>models: integer models ---- */

/* Refuses routers without an integer form before calibration runs. */
static void moei_mixture_has_form(moei_maker *m, const moe_layer *layer) {
    moei_int_router_plan plan;
    int frozen;
    (void)moei_router_now(layer, &frozen);
    moei_mixture_supported(m, &layer->config, frozen);
    moei_router_plan(m, layer, 1, NULL, &plan);
}

/* Checks data, parameters, routers and widths. */
static void moei_maker_check(moei_maker *m) {
    const moe_data *data = m->config->calibration;
    size_t i;
    if (m->status != MOE_OK) return;
    if (data == NULL || data->n == 0)
        m->status = moei_error(m->error, MOE_ERR_ARGUMENT, "calibration: integer weights need some rows of inputs "
                                                           "to determine the ranges of activations");
    else if (data->length > 0 && data->n % data->length != 0)
        m->status = moei_error(m->error, MOE_ERR_ARGUMENT, "calibration: n = %z: must be a multiple of length = %z",
                               data->n, data->length);
    else if (moei_model_length(m->net, 0) > 0 && moei_model_length(m->net, data->length) < data->length)
        m->status = moei_error(m->error, MOE_ERR_ARGUMENT, "calibration: length = %z: the network has %z positions",
                               data->length, moei_model_length(m->net, data->length));
    else m->status = moei_inputs_check(m->net, data, m->error);
    if (m->status == MOE_OK) m->status = moei_parameters_check(m->net, m->error);
    for (m->module = 0; m->module < m->net->n_modules; m->module++)
        if (m->net->modules[m->module].kind == MOE_MODULE_MIXTURE)
            moei_mixture_has_form(m, &m->net->modules[m->module].layer);
    for (i = 0; i < m->net->n_modules; i++)
        if (m->net->modules[i].d_in > MOEI_INT_MAX_WIDTH || m->net->modules[i].d_out > MOEI_INT_MAX_WIDTH)
            MOEI_MAKER_REFUSE(m, MOE_ERR_UNSUPPORTED,
                              "module %z: widths above %d have no integer form; use MOE_WEIGHTS_FLOAT", i,
                              (int)MOEI_INT_MAX_WIDTH);
}

/* Whether a residual reads the input of module i. */
static int moei_residual_reads(const moe_net *net, size_t i) {
    size_t j;
    for (j = i; j < net->n_modules; j++)
        if (net->modules[j].kind == MOE_MODULE_RESIDUAL && j - (size_t)net->modules[j].span == i) return 1;
    return 0;
}

static int moei_mixture_reads_wide(const moe_layer_config *c) {
    return c->router.input == MOE_INPUT_SCALED_RMS || c->router.input == MOE_INPUT_ADAPTIVE_CLUSTERING ||
           c->router.grap_cosine ||
           (c->router.score == MOE_SCORE_COSINE && c->router.cosine_dim == 0 && !c->router.cosine_keep_length) ||
           c->router.apply_to == MOE_APPLY_INPUT || c->add_input || c->router.n_copy + c->router.n_constant > 0;
}

/* Whether the input of module i is read as a narrow vector only: by products, and by no
   residual. */
static int moei_reads_narrow(const moe_net *net, size_t i) {
    int kind;
    if (i >= net->n_modules || moei_residual_reads(net, i)) return 0;
    kind = net->modules[i].kind;
    if (kind == MOE_MODULE_MIXTURE && moei_mixture_reads_wide(&net->modules[i].layer.config)) return 0;
    return kind == MOE_MODULE_LINEAR || kind == MOE_MODULE_MIXTURE || kind == MOE_MODULE_FEED_FORWARD ||
           kind == MOE_MODULE_ATTENTION || kind == MOE_MODULE_TIED;
}

/* Whether module i can apply the relu that follows it, because nothing else reads its output. */
static int moei_fuses_relu(const moe_net *net, size_t i) {
    const moe_module *m = &net->modules[i];
    if (m->kind != MOE_MODULE_LINEAR && (m->kind != MOE_MODULE_MIXTURE || m->layer.config.d_latent > 0)) return 0;
    return i + 1 < net->n_modules && m[1].kind == MOE_MODULE_ACTIVATION && m[1].act == MOE_ACT_RELU &&
           !moei_residual_reads(net, i + 1);
}

static void moei_maker_modules(moei_maker *m) {
    size_t i;
    for (i = 0; i < m->net->n_modules && m->status == MOE_OK; i++) {
        const moe_module *module = &m->net->modules[i];
        moei_ranges range = m->ranges[i];
        int limit;
        m->module = i;
        m->relu = moei_fuses_relu(m->net, i);
        if (m->relu) range.y = m->ranges[++i].y;
        limit = moei_reads_narrow(m->net, i + 1) ? moei_limit_for(m, &range.y) : MOEI_WIDE;
        m->entering[i + 1] = moei_module_make(m, module, &range, limit);
        moei_note_output(m, i, m->entering[i + 1]);
        if (m->status == MOE_OK && moei_limit_for(m, &range.y) == MOEI_WIDE)
            m->vectors[m->entering[i + 1]].keeps_16 = 1;
    }
}

/* The operations of an integer model. */
static void moei_maker_integers(moei_maker *m) {
    const size_t n = m->net->n_modules;
    moe_model *model = &m->made.model;
    moei_range input;
    uint32_t last = 0;
    size_t i;
    moei_maker_check(m);
    if (m->status == MOE_OK) {
        memset(m->ranges, 0, n * sizeof *m->ranges);
        memset(&input, 0, sizeof input);
        for (i = 0; i < n; i++) m->ranges[i].rotation_table = MOEI_INT_NONE;
        m->weights = m->config->weights;
        m->rows = MOEI_INT_NONE;
        m->input = &input;
        moei_calibrate(m);
    }
    if (m->status == MOE_OK) {
        m->entering[0] =
            model->d_in > 0 ? moei_vector_new(m, model->d_in, MOEI_NARROW, input.most / MOEI_NARROW, input.most) : 0;
        moei_maker_modules(m);
    }
    if (m->status == MOE_OK) { /* the output is the result of the last operation, wide */
        last = moei_widened(m, m->entering[n]);
        if (m->status == MOE_OK &&
            (moei_array_length(m->main_ops) == 0 || m->main_ops[moei_array_length(m->main_ops) - 1].out != last))
            last = moei_rescale(m, last, MOEI_WIDE, m->vectors[last].scale);
        moei_note_output(m, n - 1, last);
    }
    if (m->status == MOE_OK) {
        model->input_scale = model->d_in > 0 ? (float)m->vectors[0].scale : 1;
        model->output_scale = (float)m->vectors[last].scale;
        if (!(model->input_scale > 0) || !(model->output_scale > 0) || !moe_is_finite((moe_real)model->input_scale) ||
            !moe_is_finite((moe_real)model->output_scale))
            moei_maker_fail(m, MOE_ERR_OVERFLOW); /* the scale exceeds float */
    }
}

/* Makes a list of operations; temporary memory is always freed. */
static void moei_maker_run(moei_maker *m) {
    const moe_allocator *a = &m->made.allocator;
    const size_t n = m->net->n_modules;
    m->ranges = (moei_ranges *)moei_alloc(a, n, sizeof *m->ranges);
    m->entering = (uint32_t *)moei_alloc(a, n + 1, sizeof *m->entering);
    if (m->ranges == NULL || m->entering == NULL) moei_maker_fail(m, MOE_ERR_MEMORY);
#if !MOE_REAL_IS_DOUBLE
    if (m->config->weights == MOE_WEIGHTS_FLOAT) moei_list_modules(m);
    else
#endif
        moei_maker_integers(m);
    if (m->status == MOE_OK) {
        m->made.model.multiplications = m->multiplications + m->counted;
        moei_maker_finish(m);
    }
    moei_free(a, m->ranges, n * sizeof *m->ranges);
    moei_free(a, m->entering, (n + 1) * sizeof *m->entering);
    if (m->trace != NULL) m->trace->vectors = m->vectors;
    else moei_array_free(a, &m->vectors, sizeof *m->vectors);
    moei_array_free(a, &m->main_ops, sizeof *m->main_ops);
    moei_array_free(a, &m->inner_ops, sizeof *m->inner_ops);
    moe_buffer_free(&m->pieces);
}
#endif /* MOE_NO_QUANT */

/* ---- float models ---- */

/* Why an MoE layer cannot be part of a float model; NULL if it can. */
static const char *moei_float_obstacle(const moe_net *net, size_t i) {
    const moe_router_config *c = &net->modules[i].layer.config.router;
    int switches = moei_switches(c);
    if (c->score == MOE_SCORE_CUSTOM) return "score = custom: a model cannot hold functions of the caller";
    if (c->select == MOE_SELECT_CUSTOM || (switches && c->switch_from == MOE_SELECT_CUSTOM))
        return "select = custom: a model cannot hold functions of the caller";
    if (c->select == MOE_SELECT_GIVEN) return "select = given: a model receives no recorded choices";
    if (net->d_in > 0 && (c->select == MOE_SELECT_HASH || (switches && c->switch_from == MOE_SELECT_HASH)))
        return "select = hash: a model with d_in > 0 receives no token ids";
    if (net->d_in > 0 && c->student_dim > 0) return "student_dim: a model with d_in > 0 receives no token ids";
    if (c->refine == MOE_REFINE_ATTENTION && moei_attention_read(net, i) == i)
        return "refine = attention: there is no attention before it in the network";
    return NULL;
}

/* Whether a network that decodes can be a float model. */
static moe_status moei_float_check(const moe_net *net, moe_error *error) {
    size_t i;
    if (MOE_REAL_IS_DOUBLE)
        return moei_error(error, MOE_ERR_UNSUPPORTED, "MOE_REAL is double, but float models need float");
    for (i = 0; i < net->n_modules; i++) {
        const char *obstacle = net->modules[i].kind == MOE_MODULE_MIXTURE ? moei_float_obstacle(net, i) : NULL;
        if (obstacle != NULL) return moei_error(error, MOE_ERR_UNSUPPORTED, "module %z (mixture): %s", i, obstacle);
    }
    return moei_parameters_check(net, error);
}

/* Copies the modules, with plain C kernels as in an exported model. */
static moe_status moei_float_model(moe_built_model *made, const moe_net *net, moe_error *error) {
    moe_model *model = &made->model;
    moe_status status;
    size_t i;
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
    made->net.kernels = NULL;
    made->net.trainable = 0;
    made->net.tensors = NULL;
    made->net.n_tensors = 0;
    made->net.memory = NULL; /* the network's own */
    model->run = moei_float_model_run;
    model->choices = moei_float_model_choices;
    model->input_scale = model->output_scale = 1;
    model->weights_size = moe_net_parameter_count(net, &model->multiplications) * sizeof(moe_real);
    for (i = 0; i < net->n_modules; i++)
        if (net->modules[i].kind == MOE_MODULE_ATTENTION)
            model->multiplications += 2 * model->length * moei_heads_of(&net->modules[i]).q;
    status = moei_float_size(&made->net, model->length, &model->scratch_size, &model->state_size);
    return status == MOE_OK ? MOE_OK : moei_error(error, status, "the network: %s", moe_status_text(status));
}

/* Refuses a router that compares inputs: models take one input per call, classifiers too. */
static moe_status moei_mixture_alone(const moe_net *net, size_t i, moe_error *error) {
    moe_router_config c;
    moei_obstacle o;
    char value[40];
    if (net->modules[i].kind != MOE_MODULE_MIXTURE) return MOE_OK;
    if (moe_router_check(&net->modules[i].layer.config.router, &c, NULL) != MOE_OK) return MOE_OK; /* refused below */
    o = moei_decoding_obstacle(&c);
    if (o.field == NULL) return MOE_OK;
    moe_field_text(moe_field_find(moei_router_fields, o.field), &c, value, sizeof value);
    return moei_error(error, MOE_ERR_UNSUPPORTED,
                      "module %z (mixture): %s = %s compares inputs, and an inference model takes one input per "
                      "call; %s works",
                      i, o.field, value, o.remedy);
}

static moe_status moei_model_config_check(const moe_net *net, const moe_model_config *config, moe_error *error) {
    size_t i;
    if (net == NULL || !net->built)
        return moei_error(error, net == NULL ? MOE_ERR_ARGUMENT : MOE_ERR_STATE,
                          "net: must come from moe_net_build or moe_net_load");
    if (config->weights < 0 || config->weights >= MOE_WEIGHTS_COUNT)
        return moei_error(error, MOE_ERR_CONFIG, "weights = %d: must be one of MOE_WEIGHTS_", config->weights);
    if (config->loader != 0 && config->loader != 1)
        return moei_error(error, MOE_ERR_CONFIG, "loader = %d: must be 0 or 1", config->loader);
    if (config->same_bits != 0 && config->same_bits != 1)
        return moei_error(error, MOE_ERR_CONFIG, "same_bits = %d: must be 0 or 1", config->same_bits);
    if (config->loader && config->weights == MOE_WEIGHTS_FLOAT)
        return moei_error(error, MOE_ERR_UNSUPPORTED, "loader = 1: only integer models fetch experts");
    if (!moei_can_allocate(&config->allocator))
        return moei_error(error, MOE_ERR_ARGUMENT, "allocator: required with MOE_NO_MALLOC");
    if (net->transport != NULL)
        return moei_error(error, MOE_ERR_UNSUPPORTED,
                          "net.transport: a model needs a network in one process; load its file without transport");
    for (i = 0; i < net->n_modules; i++) {
        const moe_status status = moei_mixture_alone(net, i, error);
        if (status != MOE_OK) return status;
    }
    return moe_net_decode_size(net, 1, 1, NULL, NULL, error);
}

/* Sets the pointers of the model into the struct that owns it. */
static void moei_model_link(moe_built_model *b) {
    if (b->ops == NULL) {
        b->model.net = &b->net;
        return;
    }
    b->model.weights = b->weights.data;
    b->model.weights_size = b->weights.size;
    b->model.experts = b->external ? NULL : b->experts.data;
    b->model.experts_size = b->experts.size;
    b->model.ops = b->ops;
    b->model.mixtures = b->mixtures;
    b->model.attentions = b->attentions;
}

struct moei_trace; /* defined only without MOE_NO_QUANT */

static moe_status moei_listed(moe_built_model *made, const moe_net *net, const moe_model_config *config,
                              struct moei_trace *trace, moe_error *error) {
#ifndef MOE_NO_QUANT
    moei_maker m;
    memset(&m, 0, sizeof m);
    made->model.run = moei_int_model_run;
    made->model.choices = moei_int_model_choices;
    made->model.state_size = made->model.length > 0 ? sizeof(uint32_t) : 0;
    m.made = *made;
    m.net = net;
    m.config = config;
    m.error = error;
    m.pieces.allocator = config->allocator;
    m.trace = trace;
    m.note = &m.spare;
    moei_maker_run(&m);
    *made = m.made;
    return m.status;
#else
    (void)made;
    (void)net;
    (void)trace;
    return moei_error(error, MOE_ERR_UNSUPPORTED, "weights = %d: the build has MOE_NO_QUANT", config->weights);
#endif
}

/* trace: NULL, or what a list of operations fills for a profile. */
static moe_status moei_model_create(moe_built_model *built, const moe_net *net, const moe_model_config *config,
                                    struct moei_trace *trace, moe_error *error) {
    const moe_model_config none = {MOE_WEIGHTS_FLOAT, NULL, 0, 0, {NULL, NULL}, 0};
    moe_built_model made;
    moe_status status;
    if (built == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "built must not be NULL");
    if (config == NULL) config = &none;
    status = moei_model_config_check(net, config, error);
    if (status != MOE_OK) return status;
    memset(&made, 0, sizeof made);
    made.allocator = made.weights.allocator = made.experts.allocator = config->allocator;
    made.model.version = MOE_MODEL_VERSION;
    made.model.weights_are = config->weights;
    made.model.d_in = (size_t)net->d_in;
    made.model.d_out = (size_t)net->d_out;
    made.model.length = moei_model_length(net, config->length);
    made.external = config->loader;
    if (config->weights == MOE_WEIGHTS_FLOAT) {
        status = moei_float_check(net, error);
        made.obstacle = config->same_bits ? "same_bits = 1" : moei_list_obstacle(net, made.model.length);
        if (status == MOE_OK && made.obstacle == NULL) status = moei_listed(&made, net, config, trace, error);
        else if (status == MOE_OK) status = moei_float_model(&made, net, error);
    } else status = moei_listed(&made, net, config, trace, error);
    if (status != MOE_OK) {
        moe_model_free(&made);
        return status;
    }
    *built = made;
    moei_model_link(built);
    return MOE_OK;
}

moe_status moe_model_create(moe_built_model *built, const moe_net *net, const moe_model_config *config,
                            moe_error *error) {
    return moei_model_create(built, net, config, NULL, error);
}

void moe_model_free(moe_built_model *built) {
    if (built == NULL) return;
    moe_buffer_free(&built->weights);
    moe_buffer_free(&built->experts);
    moei_array_free(&built->allocator, &built->ops, sizeof *built->ops);
    moei_array_free(&built->allocator, &built->mixtures, sizeof *built->mixtures);
    moei_array_free(&built->allocator, &built->attentions, sizeof *built->attentions);
    moei_free(&built->allocator, built->net.modules, built->net.n_modules * sizeof *built->net.modules);
    memset(built, 0, sizeof *built);
}

typedef void (*moei_any_function)(void);

/* Names of the functions that constants refer to. */
static const struct moei_named_function {
    moei_any_function function;
    const char *name;
} moei_function_names[] = {
#define MOEI_FUNCTION_NAME(function) {(moei_any_function)(function), #function},
#define MOEI_OP_NAME(name) MOEI_FUNCTION_NAME(moei_int_op_##name)
#if !MOE_REAL_IS_DOUBLE
#define MOEI_FLOAT_NAME(name) MOEI_FUNCTION_NAME(moei_float_op_##name)
#define MOEI_FLOAT_ACT(value, name, act, backward) MOEI_FLOAT_NAME(value)
    MOEI_FLOAT_OPS(MOEI_FLOAT_NAME) MOEI_MODEL_OPS(MOEI_FLOAT_NAME) MOE_ACTS(MOEI_FLOAT_ACT)
#undef MOEI_FLOAT_NAME
#undef MOEI_FLOAT_ACT
#endif
    MOEI_INT_OPS(MOEI_OP_NAME) MOEI_FUNCTION_NAME(moei_int_gate_logits) MOEI_FUNCTION_NAME(moei_int_gate_relu)
    MOEI_FUNCTION_NAME(moei_int_gate_predicted)
        MOEI_FUNCTION_NAME(moei_int_gate_softmax) MOEI_FUNCTION_NAME(moei_int_gate_sigmoid)
            MOEI_FUNCTION_NAME(moei_int_gate_sqrt_softplus) MOEI_FUNCTION_NAME(moei_int_share_softmax)
                MOEI_FUNCTION_NAME(moei_int_share_sigmoid) MOEI_FUNCTION_NAME(moei_int_share_sqrt_softplus)
                    MOEI_FUNCTION_NAME(moei_int_select_logits) MOEI_FUNCTION_NAME(moei_int_select_top_k)
                        MOEI_FUNCTION_NAME(moei_int_select_grouped) MOEI_FUNCTION_NAME(moei_int_select_each)
                        MOEI_FUNCTION_NAME(moei_int_select_top_p)
                            MOEI_FUNCTION_NAME(moei_int_select_threshold) MOEI_FUNCTION_NAME(moei_int_select_hash)
                                MOEI_FUNCTION_NAME(moei_int_weight_raw) MOEI_FUNCTION_NAME(moei_int_weight_sum)
                                    MOEI_FUNCTION_NAME(moei_int_weight_norm) MOEI_FUNCTION_NAME(moei_int_weight_softmax)
                                        MOEI_FUNCTION_NAME(moei_int_weight_over)
                                        MOEI_FUNCTION_NAME(moei_int_weight_uniform)
                                            MOEI_FUNCTION_NAME(moei_int_weight_one)
                                                MOEI_FUNCTION_NAME(moei_int_weight_sparsemixer)
                                                    MOEI_FUNCTION_NAME(moei_int_scale_weights)
#undef MOEI_OP_NAME
#undef MOEI_FUNCTION_NAME
};

static const char *moei_function_name(moei_any_function function) {
    size_t i;
    for (i = 0; i < sizeof moei_function_names / sizeof *moei_function_names; i++)
        if (moei_function_names[i].function == function) return moei_function_names[i].name;
    return NULL;
}

/* ---- >>profiles: every operation compared with the same in float ---- */

#ifndef MOE_NO_QUANT
/* Sums over all calls of an operation. */
typedef struct moei_tally {
    double signal, noise, net_signal, net_noise, saturated, most, same;
    size_t compared, net_compared, inputs;
} moei_tally;

typedef struct moei_profiler {
    moe_model model; /* first, since moei_profile_op, which every operation calls, casts run->model to this */
    moe_built_model built;
    const moe_net *net;
    const moe_data *data;
    moei_trace trace;
    moei_int_op *ops;
    moei_tally *tally;                            /* [operations, then routers] */
    double *in, *other, *wanted, *each, *before;  /* [the widest vector] */
    unsigned char *memory; /* scratch, input, output */
    const moei_int_op *measured; /* the score for which operations of experts run; NULL: none */
    const moe_net_pass *pass;    /* of the network, and the row in it */
    size_t row, place;
    size_t fetched; /* the offset of the block that was fetched last */
} moei_profiler;

static int moei_profile_is_float(const moei_profiler *p) { return p->model.weights_are == MOE_WEIGHTS_FLOAT; }

static double moei_profile_code(const moei_profiler *p, const moei_int_run *run, uint32_t vector, uint32_t at,
                                size_t j) {
    float real;
    int32_t wide;
    if (moei_profile_is_float(p)) {
        memcpy(&real, run->vectors + at + 2 * j, sizeof real);
        return (double)real;
    }
    if (!p->trace.vectors[vector].is_int32) return run->vectors[at + j];
    memcpy(&wide, run->vectors + at + 2 * j, sizeof wide);
    return wide;
}

static double moei_profile_scale(const moei_profiler *p, uint32_t vector) {
    return moei_profile_is_float(p) ? 1 : p->trace.vectors[vector].scale;
}

/* A vector as floats. */
static const double *moei_profile_load(const moei_profiler *p, const moei_int_run *run, uint32_t vector, uint32_t at,
                                       size_t n, double *to) {
    size_t j;
    for (j = 0; j < n; j++) to[j] = moei_profile_code(p, run, vector, at, j) * moei_profile_scale(p, vector);
    return to;
}

static double moei_profile_weight(const moei_profiler *p, const moei_op_note *note, const moei_int_run *run) {
    if (moei_profile_is_float(p)) return (double)run->share;
    return run->weight == 32767 ? note->alpha : run->weight / 32768.0 * note->alpha;
}

/* The index of the expert whose block is read. */
static size_t moei_profile_expert(const moei_profiler *p, const moei_op_note *note, const moei_int_run *run) {
    const moei_int_mixture *m;
    size_t at;
    if (!note->in_block) return 0;
    m = &p->model.mixtures[note->mixture];
    at = run->loader != NULL ? p->fetched : (size_t)(run->base - p->model.experts);
    return m->stride > 0 ? (at - m->experts) / m->stride : 0;
}

/* References store what the operation would write in float in p->wanted, and return its length. */
#define MOEI_REFERENCE_ARGUMENTS \
    const moei_profiler *p, const moei_int_op *op, const moei_op_note *note, const moei_int_run *run
typedef size_t moei_reference_function(MOEI_REFERENCE_ARGUMENTS);
#define MOEI_LOAD(what, n) moei_profile_load(p, run, note->what, op->what, n, p->what)

static size_t moei_reference_product(MOEI_REFERENCE_ARGUMENTS) {
    const size_t n = op->shape.n, k = op->shape.k;
    const double *x = MOEI_LOAD(in, k);
    const moe_real *w = (const moe_real *)(const void *)p->trace.floats.data, *bias;
    size_t j, q;
    if (moei_profile_is_float(p)) {
        bias = (const moe_real *)(const void *)(run->base + op->at);
        w = bias + n;
    } else {
        w += note->reference + moei_profile_expert(p, note, run) * n * (k + 1);
        bias = w + n * k;
    }
    for (j = 0; j < n; j++) {
        p->wanted[j] = (double)bias[j];
        for (q = 0; q < k; q++) p->wanted[j] += (double)w[j * k + q] * x[q];
    }
    return n;
}

static size_t moei_reference_product_add(MOEI_REFERENCE_ARGUMENTS) {
    const double weight = moei_profile_weight(p, note, run);
    const size_t n = moei_reference_product(p, op, note, run);
    size_t j;
    for (j = 0; j < n; j++) p->wanted[j] *= weight;
    return n;
}

static size_t moei_reference_curve(MOEI_REFERENCE_ARGUMENTS) {
    const double *v = MOEI_LOAD(in, op->shape.n);
    size_t j;
    for (j = 0; j < op->shape.n; j++) {
        moe_real x = (moe_real)(v[j] * note->alpha), y;
        if (note->act == MOEI_SOFTPLUS) y = moei_softplus(x);
        else moe_activate(NULL, note->act, 1, &x, &y);
        if (note->rest && x > 0) y -= x;
        p->wanted[j] = (double)y / note->alpha;
    }
    return op->shape.n;
}

static size_t moei_reference_multiply(MOEI_REFERENCE_ARGUMENTS) {
    const double *a = MOEI_LOAD(in, op->shape.n), *b = MOEI_LOAD(other, op->shape.n);
    size_t j;
    for (j = 0; j < op->shape.n; j++) p->wanted[j] = a[j] * b[j];
    return op->shape.n;
}

static size_t moei_reference_add(MOEI_REFERENCE_ARGUMENTS) {
    const double *a = MOEI_LOAD(in, op->shape.n), *b = MOEI_LOAD(other, op->shape.n);
    size_t j;
    for (j = 0; j < op->shape.n; j++) p->wanted[j] = a[j] + b[j];
    return op->shape.n;
}

static size_t moei_reference_rescale(MOEI_REFERENCE_ARGUMENTS) {
    (void)moei_profile_load(p, run, note->in, op->in, op->shape.n, p->wanted);
    return op->shape.n;
}

/* apply_weight, accumulate */
static size_t moei_reference_weighted(MOEI_REFERENCE_ARGUMENTS) {
    const double weight = moei_profile_weight(p, note, run);
    const size_t n = moei_reference_rescale(p, op, note, run);
    size_t j;
    for (j = 0; j < n; j++) p->wanted[j] *= weight;
    return n;
}

static size_t moei_reference_add_rest(MOEI_REFERENCE_ARGUMENTS) {
    const int16_t *choices = run->vectors + op->other;
    const size_t n = moei_reference_rescale(p, op, note, run);
    double rest = 1;
    size_t j;
    for (j = 0; j < (size_t)choices[0]; j++)
        rest -= choices[1 + p->model.mixtures[op->index].router.most + j] / 32768.0 * note->alpha;
    for (j = 0; j < n; j++) p->wanted[j] *= rest;
    return n;
}

static size_t moei_reference_unit(MOEI_REFERENCE_ARGUMENTS) {
    const size_t n = moei_reference_rescale(p, op, note, run);
    double square = note->alpha;
    size_t j;
    for (j = 0; j < n; j++) square += p->wanted[j] * p->wanted[j];
    for (j = 0; j < n && square > 0; j++) p->wanted[j] /= sqrt(square);
    return n;
}

static size_t moei_reference_cluster(MOEI_REFERENCE_ARGUMENTS) {
    const int16_t *choices = run->vectors + op->other, *experts = choices + 1;
    const int16_t *weights = experts + p->model.mixtures[op->index].router.most;
    const moe_real *table = p->net->modules[note->module].layer.tensors[MOE_ROUTER_AC_RUNNING];
    const size_t n = op->shape.n;
    const double *x = MOEI_LOAD(in, n);
    double sum = 0;
    size_t q;
    int i, j;
    for (i = 0, j = -1; i < op->factor2 && (j = moei_int_lighter(weights, choices[0], j)) >= 0; i++)
        sum += op->factor2 > 1 ? weights[j] : 1;
    for (q = 0; q < n; q++) p->wanted[q] = sum > 0 ? 0 : x[q];
    for (i = 0, j = -1; sum > 0 && i < op->factor2 && (j = moei_int_lighter(weights, choices[0], j)) >= 0; i++)
        for (q = 0; q < n; q++)
            p->wanted[q] += (op->factor2 > 1 ? weights[j] : 1) / sum * (double)table[(size_t)experts[j] * n + q] * x[q];
    return n;
}

/* Both norms; in float lists eps, gain and bias are constants of the operation. */
static size_t moei_reference_norm(MOEI_REFERENCE_ARGUMENTS) {
    const moe_module *module = &p->net->modules[note->module];
    const moe_real *gain = module->tensors[MOE_MODULE_WEIGHT], *bias = module->tensors[MOE_MODULE_BIAS];
    const size_t n = op->shape.n;
    const double *x = MOEI_LOAD(in, n);
    double eps = (double)moei_eps_of(module->eps);
    double mean = 0, square = 0;
    int centers = op->index != 0;
    size_t j;
#if !MOE_REAL_IS_DOUBLE
    if (moei_profile_is_float(p)) {
        const moe_real *c = (const moe_real *)(const void *)(run->base + op->at);
        centers = p->built.ops[op - p->ops].run == moei_float_op_layer_norm;
        eps = (double)c[0];
        gain = c + 1;
        bias = gain + n;
    }
#endif
    for (j = 0; j < n && centers; j++) mean += x[j] / (double)n;
    for (j = 0; j < n; j++) square += (x[j] - mean) * (x[j] - mean) / (double)n;
    for (j = 0; j < n; j++) {
        p->wanted[j] = (x[j] - mean) / sqrt(square + eps) * (double)gain[j];
        if (centers || moei_profile_is_float(p)) p->wanted[j] += (double)bias[j];
    }
    return n;
}

static size_t moei_reference_row(MOEI_REFERENCE_ARGUMENTS) {
    const moe_real *row = p->net->modules[note->module].tensors[MOE_MODULE_WEIGHT];
    const size_t r = op->index == 0 ? (size_t)run->token : (size_t)run->place, n = op->shape.n;
    size_t j;
    for (j = 0; j < n && r < op->shape.k; j++) p->wanted[j] = (double)row[r * n + j];
    return j;
}

static size_t moei_reference_rotate(MOEI_REFERENCE_ARGUMENTS) {
    const size_t n = op->shape.n, half = op->shape.k / 2u;
    const double base = (double)p->net->modules[note->module].attention.rotary_base;
    const double *x = MOEI_LOAD(in, n);
    size_t i, j;
    for (i = 0; i < half; i++) {
        const double angle = (double)run->place * pow(base, -(double)i / (double)half);
        for (j = i; j < n; j += 2 * half) {
            p->wanted[j] = x[j] * cos(angle) - x[j + half] * sin(angle);
            p->wanted[j + half] = x[j] * sin(angle) + x[j + half] * cos(angle);
        }
    }
    return n;
}

static size_t moei_reference_attention(MOEI_REFERENCE_ARGUMENTS) {
    const moei_int_attention *a = &p->model.attentions[op->index];
    const signed char *keys = (const signed char *)run->state + a->keys;
    const signed char *values = (const signed char *)run->state + a->values;
    const size_t width = op->shape.n, d = a->d_head;
    const size_t n = (size_t)run->place + 1;
    const double *q = MOEI_LOAD(in, width);
    const double by = moei_profile_scale(p, note->other) / sqrt((double)d);
    double most, total, *score = p->other;
    size_t h, i, j;
    for (h = 0; h < width; h += d) {
        for (most = -HUGE_VAL, j = 0; j < n; j++) {
            for (score[j] = 0, i = h; i < h + d; i++)
                score[j] += q[i] * by * (j + 1 < n ? keys[j * width + i] : run->vectors[op->other + i]);
            if (score[j] > most) most = score[j];
        }
        for (total = 0, j = 0; j < n; j++) total += score[j] = exp(score[j] - most);
        for (i = h; i < h + d; i++)
            for (p->wanted[i] = 0, j = 0; j < n; j++)
                p->wanted[i] += score[j] / total * moei_profile_scale(p, note->reference) *
                                (j + 1 < n ? values[j * width + i] : run->vectors[a->value + i]);
    }
    return width;
}

/* The sum still has the term that makes its shift round to nearest. */
static size_t moei_reference_mixture(MOEI_REFERENCE_ARGUMENTS) {
    const moei_int_mixture *m = &p->model.mixtures[op->index];
    const double scale = ldexp(moei_profile_scale(p, note->out), -op->shape.shift);
    size_t j;
    if (moei_profile_is_float(p)) return 0;
    for (j = 0; j < op->shape.n; j++) {
        int32_t sum;
        memcpy(&sum, run->vectors + m->sum + 2 * j, sizeof sum);
        p->wanted[j] = ((double)sum - moei_int_round(&op->shape)) * scale;
    }
    return op->shape.n;
}

/* The reference and the flags of each function. */
enum {
    MOEI_HAS_CONSTANTS = 1, /* at op->at */
    MOEI_MULTIPLIES = 2,    /* each constant with an input; twice: MOEI_TWICE */
    MOEI_TWICE = 4,
    MOEI_ADDS = 8,          /* to a sum */
    MOEI_MEASURES = 16,     /* experts, for a score */
    MOEI_NESTS = 32         /* an MoE layer */
};

static const struct moei_profile_kind {
    void (*run)(const moei_int_op *op, moei_int_run *run);
    moei_reference_function *reference;
    int flags;
} moei_profile_kinds[] = {
    {moei_int_op_int8, moei_reference_product, MOEI_HAS_CONSTANTS | MOEI_MULTIPLIES},
    {moei_int_op_int4, moei_reference_product, MOEI_HAS_CONSTANTS | MOEI_MULTIPLIES},
    {moei_int_op_int16, moei_reference_product, MOEI_HAS_CONSTANTS | MOEI_MULTIPLIES | MOEI_TWICE},
    {moei_int_op_int8_add, moei_reference_product_add, MOEI_HAS_CONSTANTS | MOEI_MULTIPLIES | MOEI_ADDS},
    {moei_int_op_int4_add, moei_reference_product_add, MOEI_HAS_CONSTANTS | MOEI_MULTIPLIES | MOEI_ADDS},
    {moei_int_op_int16_add, moei_reference_product_add, MOEI_HAS_CONSTANTS | MOEI_MULTIPLIES | MOEI_TWICE | MOEI_ADDS},
    {moei_int_op_curve, moei_reference_curve, MOEI_HAS_CONSTANTS},
    {moei_int_op_multiply, moei_reference_multiply, 0},
    {moei_int_op_add, moei_reference_add, 0},
    {moei_int_op_rescale, moei_reference_rescale, 0},
    {moei_int_op_mixture, moei_reference_mixture, MOEI_NESTS},
    {moei_int_op_row, moei_reference_row, MOEI_HAS_CONSTANTS},
    {moei_int_op_norm, moei_reference_norm, MOEI_HAS_CONSTANTS},
    {moei_int_op_rotate, moei_reference_rotate, MOEI_HAS_CONSTANTS},
    {moei_int_op_attention, moei_reference_attention, 0},
    {moei_int_op_unit, moei_reference_unit, 0},
    {moei_int_op_cluster, moei_reference_cluster, MOEI_HAS_CONSTANTS},
    {moei_int_op_norm_l1, NULL, MOEI_MEASURES},
    {moei_int_op_norm_l2, NULL, MOEI_MEASURES},
    {moei_int_op_norm_linf, NULL, MOEI_MEASURES},
    {moei_int_op_match, NULL, MOEI_MEASURES},
    {moei_int_op_apply_weight, moei_reference_weighted, 0},
    {moei_int_op_accumulate, moei_reference_weighted, MOEI_ADDS},
    {moei_int_op_add_rest, moei_reference_add_rest, MOEI_ADDS},
#if !MOE_REAL_IS_DOUBLE
    {moei_float_op_product, moei_reference_product, MOEI_HAS_CONSTANTS | MOEI_MULTIPLIES},
    {moei_float_op_product_add, moei_reference_product_add, MOEI_HAS_CONSTANTS | MOEI_MULTIPLIES | MOEI_ADDS},
    {moei_float_op_multiply, moei_reference_multiply, 0},
    {moei_float_op_add, moei_reference_add, 0},
    {moei_float_op_layer_norm, moei_reference_norm, MOEI_HAS_CONSTANTS},
    {moei_float_op_rms_norm, moei_reference_norm, MOEI_HAS_CONSTANTS},
    {moei_float_op_row, NULL, MOEI_HAS_CONSTANTS},
    {moei_float_op_softmax, NULL, MOEI_HAS_CONSTANTS},
    {moei_float_op_choose_above, NULL, MOEI_HAS_CONSTANTS},
    {moei_float_op_choose_sum, NULL, MOEI_HAS_CONSTANTS},
    {moei_float_op_choose_listed, NULL, MOEI_HAS_CONSTANTS},
    {moei_float_op_weigh_scale, NULL, MOEI_HAS_CONSTANTS},
    {moei_float_op_mixture, NULL, MOEI_NESTS},
#endif
    {NULL, NULL, 0}, /* all others */
};

static const struct moei_profile_kind *moei_profile_kind_of(const moei_int_op *op) {
    const struct moei_profile_kind *kind = moei_profile_kinds;
    while (kind->run != NULL && kind->run != op->run) kind++;
    return kind;
}

static void moei_tally_net(moei_tally *t, double got, double wanted) {
    t->net_signal += wanted * wanted;
    t->net_noise += (got - wanted) * (got - wanted);
    t->net_compared++;
}

/* Compares n outputs of operation i with `wanted`, and with the network's. */
static void moei_profile_compare(moei_profiler *p, size_t i, size_t n, const double *wanted, const moei_int_run *run) {
    const moei_int_op *op = &p->ops[i];
    const moei_op_note *note = &p->trace.notes[i];
    const moei_vector *v = &p->trace.vectors[note->out];
    const double scale = moei_profile_scale(p, note->out), limit = v->is_int32 ? 2147483647.0 : v->limit;
    const int adds = moei_profile_kind_of(&p->built.ops[i])->flags & MOEI_ADDS;
    moei_tally *t = &p->tally[i];
    size_t j;
    for (j = 0; j < n; j++) {
        const double code = moei_profile_code(p, run, note->out, op->out, j);
        const double got = code * scale;
        double y = adds ? p->before[j] * scale + wanted[j] : wanted[j];
        if (fabs(code) > t->most * limit) t->most = fabs(code) / limit;
        if (!moei_profile_is_float(p) && !adds) {
            t->saturated += !note->clamps && fabs(code) >= limit && fabs(y) > (limit + 0.5) * scale;
            if ((note->clamps || op->shape.low > -v->limit) && y < op->shape.low * scale) y = op->shape.low * scale;
            if ((note->clamps || op->shape.high < v->limit) && y > op->shape.high * scale) y = op->shape.high * scale;
        }
        t->signal += y * y;
        t->noise += (got - y) * (got - y);
    }
    t->compared += n;
    if (note->output_of == 0) return;
    n = (size_t)p->net->modules[note->output_of - 1].d_out;
    for (j = 0; j < n; j++)
        moei_tally_net(t, moei_profile_code(p, run, note->out, op->out, j) * scale,
                       (double)p->pass->modules[note->output_of - 1].y[p->row * n + j]);
}

/* The measure of the current expert, in float. */
static void moei_profile_measure(moei_profiler *p, const moei_int_run *run) {
    const moei_int_op *op = p->measured;
    const moei_op_note *note = &p->trace.notes[op - p->ops];
    void (*const is)(const moei_int_op *op, moei_int_run *run) = p->built.ops[op - p->ops].run;
    const double *v = MOEI_LOAD(in, op->shape.n), *other = MOEI_LOAD(other, op->shape.n);
    double sum = 0;
    size_t j;
    moei_op_note block = *note;
    block.in_block = 1;
    for (j = 0; j < op->shape.n; j++) {
        if (is == moei_int_op_norm_l1) sum += fabs(v[j]);
        else if (is == moei_int_op_norm_l2) sum += v[j] * v[j];
        else if (is == moei_int_op_match) sum += v[j] * other[j];
        else if (fabs(v[j]) > sum) sum = fabs(v[j]);
    }
    p->each[moei_profile_expert(p, &block, run)] = note->alpha * (is == moei_int_op_norm_l2 ? sqrt(sum) : sum);
}

/* Compares the routing weights with the network's. */
static void moei_profile_route(moei_profiler *p, const moei_int_op *op, size_t module, const moei_int_run *run) {
    const moei_int_mixture *m = &p->model.mixtures[op->index];
    const moe_routing *routing = &p->pass->modules[module].layer->routing;
    const moe_real *wanted = routing->weights + p->row * routing->n_experts;
    int16_t *choices = run->vectors + m->choices;
    moei_tally *t = &p->tally[p->model.n_ops + op->index];
    int i, same = choices[0] == routing->n_choices[p->row];
    size_t e;
    for (e = 0; e < routing->n_experts; e++) p->wanted[e] = 0;
    for (i = 0; i < choices[0]; i++) {
        double *w = &p->wanted[choices[1 + i]];
        *w = ldexp(choices[1 + m->router.most + i], m->weight_bits - 15);
#if !MOE_REAL_IS_DOUBLE
        if (moei_profile_is_float(p)) *w = (double)moei_float_weights(choices, m->router.most)[i];
#endif
        e = (size_t)choices[1 + i];
        same = same && routing->selected[p->row * routing->n_experts + e];
    }
    for (e = 0; e < routing->n_experts; e++) moei_tally_net(t, p->wanted[e], (double)wanted[e]);
    t->inputs++;
    t->same += same;
}

/* The function of every operation while a profile is made. */
static void moei_profile_op(const moei_int_op *op, moei_int_run *run) {
    moei_profiler *p = (moei_profiler *)(void *)(uintptr_t)run->model;
    const size_t i = (size_t)(op - p->ops);
    const moei_op_note *note = &p->trace.notes[i];
    const struct moei_profile_kind *kind = moei_profile_kind_of(&p->built.ops[i]);
    size_t n = 0, j;
    if (kind->reference != NULL && !(kind->flags & MOEI_NESTS)) n = kind->reference(p, op, note, run);
    for (j = 0; j < n && kind->flags & MOEI_ADDS; j++)
        p->before[j] = moei_profile_code(p, run, note->out, op->out, j);
    if (kind->flags & MOEI_MEASURES) p->measured = op;
    p->built.ops[i].run(op, run);
    if (run->status != MOE_OK) return;
    if (p->measured != NULL && op == p->measured + p->measured->shape.k) moei_profile_measure(p, run);
    if (kind->flags & MOEI_NESTS) {
        moei_profile_route(p, op, note->module, run);
        n = kind->reference != NULL ? kind->reference(p, op, note, run) : 0;
    }
    if (kind->flags & MOEI_MEASURES) {
        n = p->model.mixtures[op->index].router.n_experts;
        p->measured = NULL;
    }
    moei_profile_compare(p, i, n, kind->flags & MOEI_MEASURES ? p->each : p->wanted, run);
}

static moe_status moei_profile_fetch(void *ctx, size_t at, size_t size, void *to) {
    moei_profiler *p = (moei_profiler *)ctx;
    p->fetched = at;
    memcpy(to, p->built.experts.data + at, size);
    return MOE_OK;
}

static moe_status moei_profile_batch(void *ctx, const moe_net_pass *pass) {
    moei_profiler *p = (moei_profiler *)ctx;
    const moe_model *model = &p->model;
    unsigned char *input = p->memory + (model->scratch_size + 7) / 8 * 8; /* aligned as the memory is */
    unsigned char *output = input + (model->d_in + 1) * sizeof(moe_real);
    moe_loader loader;
    moe_status status = MOE_OK;
    loader.ctx = p;
    loader.fetch = moei_profile_fetch;
    p->pass = pass;
    for (p->row = 0; p->row < pass->n_tokens && status == MOE_OK; p->row++) {
        const moe_real *x = model->d_in > 0 ? pass->call.x + p->row * model->d_in : NULL;
        if (p->place++ % (p->data->length > 0 ? p->data->length : 1) == 0) memset(p->memory, 0, model->scratch_size);
        if (x == NULL) memcpy(input, pass->call.token_ids + p->row, sizeof(int32_t));
        else if (moei_profile_is_float(p)) memcpy(input, x, model->d_in * sizeof *x);
        else moe_infer_levels(model, x, (int8_t *)input);
        status = moe_infer(model, p->built.external ? &loader : NULL, input, output, p->memory, model->scratch_size);
    }
    return status;
}

/* ---- rows ---- */

/* Instructions of a call on a Cortex-M4 (see Profiles), with features a, b, c of the operation:
   factor[0] + factor[1] a + factor[2] b + factor[3] c. tests/port/devices.sh --write-costs writes
   the rows between the marks. */
typedef struct moei_cost {
    moei_any_function function;
    double factor[4];
} moei_cost;

static const moei_cost moei_costs[] = {
    /* costs */
    {(moei_any_function)moei_int_op_int8, {86.33, 12.83, 0.12, 0.88}},
    {(moei_any_function)moei_int_op_int4, {106.97, 17.06, 1.33, 1}},
    {(moei_any_function)moei_int_op_int16, {283.11, 44.39, 32.24, 1.75}},
    {(moei_any_function)moei_int_op_int8_add, {74.14, 9.41, 0.14, 0.87}},
    {(moei_any_function)moei_int_op_int4_add, {94.97, 13.62, 1.34, 1}},
    {(moei_any_function)moei_int_op_int16_add, {265.28, 45.87, 32.22, 1.75}},
    {(moei_any_function)moei_int_op_curve, {49, 22, 0, 0}},
    {(moei_any_function)moei_int_op_multiply, {43, 14, 0, 0}},
    {(moei_any_function)moei_int_op_add, {55, 16, 0, 0}},
    {(moei_any_function)moei_int_op_rescale, {56, 16, 0, 0}},
    {(moei_any_function)moei_int_op_norm, {345, 52, 0, 0}},
    {(moei_any_function)moei_int_op_rotate, {111, 21, 0, 0}},
    {(moei_any_function)moei_int_op_unit, {289.74, 19.72, 0, 0}},
    {(moei_any_function)moei_int_op_apply_weight, {44, 17, 0, 0}},
    {(moei_any_function)moei_int_op_set_weight, {26, 0, 0, 0}},
    {(moei_any_function)moei_int_op_accumulate, {35, 10, 0, 0}},
    {(moei_any_function)moei_int_op_add_rest, {76, 14, 0, 0}},
    {(moei_any_function)moei_int_op_cluster, {183, 37, 0, 0}},
    {(moei_any_function)moei_int_op_row, {71, 32, 0, 0}},
    {(moei_any_function)moei_int_op_norm_l1, {62.21, 69.61, 0.01, 9}},
    {(moei_any_function)moei_int_op_norm_l2, {62.52, 311.63, 0.01, 6.75}},
    {(moei_any_function)moei_int_op_norm_linf, {62.27, 69.6, 0.01, 12}},
    {(moei_any_function)moei_int_op_match, {62.17, 69.62, 0.01, 7}},
    {(moei_any_function)moei_int_op_attention, {84.97, 51.88, 205.12, 0}},
    {(moei_any_function)moei_int_gate_logits, {9, 7, 0, 0}},
    {(moei_any_function)moei_int_gate_relu, {9, 10, 0, 0}},
    {(moei_any_function)moei_int_gate_softmax, {14.14, 74.97, 0, 0}},
    {(moei_any_function)moei_int_gate_sigmoid, {70.87, 73.28, 0, 0}},
    {(moei_any_function)moei_int_gate_sqrt_softplus, {-86.51, 231, 0, 0}},
    {(moei_any_function)moei_int_share_softmax, {-21, 61, 0, 0}},
    {(moei_any_function)moei_int_share_sigmoid, {39.67, 84.38, 0, 0}},
    {(moei_any_function)moei_int_share_sqrt_softplus, {-120.29, 242.96, 0, 0}},
    {(moei_any_function)moei_int_select_logits, {40.76, 4.53, 6.36, 3.67}},
    {(moei_any_function)moei_int_select_top_k, {54.26, 6.7, -0.01, 2.86}},
    {(moei_any_function)moei_int_select_top_p, {16.36, 48.89, -34.67, 4.06}},
    {(moei_any_function)moei_int_weight_sum, {42.03, -0.02, 17.02, 0.01}},
    {(moei_any_function)moei_int_weight_raw, {21.15, -0.03, 12.57, 0.01}},
    {(moei_any_function)moei_int_weight_softmax, {34.89, 75.08, 14.81, -0.07}},
    {(moei_any_function)moei_int_weight_uniform, {22.11, 0.01, 4.46, -0.01}},
    {(moei_any_function)moei_int_weight_one, {7, 0, 4, 0}},
    {(moei_any_function)moei_int_scale_weights, {18, 0, 17, 0}},
    {(moei_any_function)moei_int_op_mixture, {113.81, 6.76, 47.52, 8.86}},
    {(moei_any_function)moei_int_model_run, {93.6, 1.56, 4, 0}},
#if !MOE_REAL_IS_DOUBLE
    {(moei_any_function)moei_float_op_product, {39, 12, 0, 3}},
    {(moei_any_function)moei_float_op_product_add, {39, 16, 0, 3}},
    {(moei_any_function)moei_float_op_multiply, {32, 8, 0, 0}},
    {(moei_any_function)moei_float_op_add, {32, 8, 0, 0}},
    {(moei_any_function)moei_float_op_layer_norm, {75, 26, 0, 0}},
    {(moei_any_function)moei_float_op_rms_norm, {48, 14, 0, 0}},
    {(moei_any_function)moei_float_op_row, {42, 16, 0, 0}},
    {(moei_any_function)moei_float_op_apply_weight, {32, 8, 0, 0}},
    {(moei_any_function)moei_float_op_set_weight, {25, 0, 0, 0}},
    {(moei_any_function)moei_float_op_add_rest, {50, 8, 0, 0}},
    {(moei_any_function)moei_float_op_softmax, {30.71, 78.59, 0, 0}},
    {(moei_any_function)moei_float_op_sqrt_softplus, {26.69, 156.86, 0, 0}},
    {(moei_any_function)moei_float_op_MOE_ACT_RELU, {33, 12, 0, 0}},
    {(moei_any_function)moei_float_op_MOE_ACT_SILU, {35.81, 97.59, 0, 0}},
    {(moei_any_function)moei_float_op_MOE_ACT_GELU, {34.73, 69.47, 0, 0}},
    {(moei_any_function)moei_float_op_MOE_ACT_TANH, {42.57, 97.19, 0, 0}},
    {(moei_any_function)moei_float_op_MOE_ACT_SIGMOID, {34.65, 82.49, 0, 0}},
    {(moei_any_function)moei_float_op_MOE_ACT_IDENTITY, {33, 8, 0, 0}},
    {(moei_any_function)moei_float_op_MOE_ACT_GELU_TANH, {53.96, 115.98, 0, 0}},
    {(moei_any_function)moei_float_op_MOE_ACT_RELU2, {33, 13, 0, 0}},
    {(moei_any_function)moei_float_op_choose, {82.15, 23.7, -9.18, 2.36}},
    {(moei_any_function)moei_float_op_weigh, {36, 0, 9, 0}},
    {(moei_any_function)moei_float_op_weigh_sum, {39.92, -0.03, 16.39, 0.02}},
    {(moei_any_function)moei_float_op_weigh_softmax, {34.02, -0.12, 65.94, 0.11}},
    {(moei_any_function)moei_float_op_weigh_scale, {36, 0, 11, 0}},
    {(moei_any_function)moei_float_op_mixture, {72, 16, 0, 0}},
    {(moei_any_function)moei_float_ops_run, {92, 16, 16, 0}},
#endif
    /* end */
    {NULL, {0, 0, 0, 0}},
};

/* 0: not known. */
static double moei_cost_of(moei_any_function function, double a, double b, double c) {
    const moei_cost *cost = moei_costs;
    double sum;
    while (cost->function != NULL && cost->function != function) cost++;
    sum = cost->factor[0] + cost->factor[1] * a + cost->factor[2] * b + cost->factor[3] * c;
    return cost->function != NULL && sum < 1 ? 1 : sum;
}

/* The most calls of operation i in one inference. */
static size_t moei_profile_calls(const moei_profiler *p, size_t i) {
    const moei_int_mixture *m;
    if (i < p->model.n_main) return 1;
    m = &p->model.mixtures[p->trace.notes[i].mixture];
    if (i - m->expert < m->n_expert) return m->router.most;
    if (i - m->score < m->n_score || i - m->shared < m->n_shared) return 1;
    if (i - m->copy < m->n_copy) return 0;
    if (i - m->constant < m->n_constant * (size_t)(m->router.n_experts - m->constants)) return 0;
    return m->router.n_experts;
}

/* Whether operation i has constants, and whether those are in the blocks of experts. */
static int moei_profile_has(const moei_profiler *p, size_t i, int *in_block) {
    const int flags = moei_profile_kind_of(&p->built.ops[i])->flags;
    *in_block = flags & MOEI_MULTIPLIES && p->trace.notes[i].in_block;
    return flags & MOEI_HAS_CONSTANTS;
}

/* The offset of the first constants at or after `at`, or the end of all. mixture: within its
   blocks; MOEI_INT_NONE: within the constants of the model. */
static size_t moei_profile_next(const moei_profiler *p, size_t at, uint32_t mixture) {
    const int blocks = mixture != MOEI_INT_NONE;
    size_t end = blocks ? p->model.mixtures[mixture].stride : p->model.weights_size, i, j;
    int in_block;
    for (i = 0; i < p->model.n_ops; i++)
        if (moei_profile_has(p, i, &in_block) && blocks == in_block &&
            (!blocks || p->trace.notes[i].mixture == mixture) && p->ops[i].at >= at && p->ops[i].at < end)
            end = p->ops[i].at;
    for (i = 0; !blocks && i < p->model.n_mixtures; i++) {
        const moei_int_router *r = &p->model.mixtures[i].router;
        const uint32_t table[4] = {r->bias, r->thresholds, r->scales, r->table};
        for (j = 0; j < 4; j++)
            if (table[j] >= at && table[j] < end) end = table[j];
    }
    return end;
}

static size_t moei_profile_bytes(const moei_profiler *p, size_t i) {
    const moei_op_note *note = &p->trace.notes[i];
    const moei_int_mixture *m;
    size_t at = p->ops[i].at, j, experts = 1, end;
    int in_block, other;
    if (!moei_profile_has(p, i, &in_block)) return 0;
    for (j = 0; j < i; j++)
        if (moei_profile_has(p, j, &other) && other == in_block && p->ops[j].at == p->ops[i].at &&
            (!in_block || p->trace.notes[j].mixture == note->mixture))
            return 0;
    if (in_block) {
        m = &p->model.mixtures[note->mixture];
        experts = m->zeros > 0 ? m->zeros : m->router.n_experts;
    }
    end = moei_profile_next(p, at + 1, in_block ? note->mixture : MOEI_INT_NONE);
    if (moei_profile_next(p, 0, in_block ? note->mixture : MOEI_INT_NONE) == at) at = 0; /* plus what no op reads */
    return experts * (end - at);
}

static void moei_profile_sums(const moei_tally *t, moe_profile_row *row) {
    row->compared = t->compared;
    row->net_compared = t->net_compared;
    row->snr = t->noise <= 0 ? HUGE_VAL : 10 * log10(t->signal / t->noise);
    row->net_snr = t->net_noise <= 0 ? HUGE_VAL : 10 * log10(t->net_signal / t->net_noise);
    row->saturated = t->compared > 0 ? t->saturated / (double)t->compared : 0;
    row->used = t->most;
    row->same = t->inputs > 0 ? t->same / (double)t->inputs : 0;
}

static moe_profile_row moei_profile_row(const moei_profiler *p, size_t i) {
    const moei_int_op *op = &p->built.ops[i];
    const struct moei_profile_kind *kind = moei_profile_kind_of(op);
    const int chooses = moei_profile_is_float(p) && op->shape.low > 0; /* then low is the most choices */
    const double n = op->shape.n, k = chooses ? op->shape.low : op->shape.k;
    moe_profile_row row;
    memset(&row, 0, sizeof row);
    moei_profile_sums(&p->tally[i], &row);
    row.name = strstr(moei_function_name((moei_any_function)op->run), "_op_") + 4;
    row.op = i;
    row.module = p->trace.notes[i].module;
    row.outputs = row.inputs = op->shape.n;
    row.calls = moei_profile_calls(p, i);
    row.weight_bytes = moei_profile_bytes(p, i);
    row.instructions = moei_cost_of((moei_any_function)op->run, n, k, n * k);
    if (kind->flags & MOEI_MULTIPLIES) {
        const double rows = ceil(n / 2) * 2, columns = ceil(k / 4) * 4;
        row.inputs = op->shape.k;
        row.multiplications = (kind->flags & MOEI_TWICE ? 2 : 1) * row.calls * row.outputs * row.inputs;
        row.instructions = moei_cost_of((moei_any_function)op->run, rows, columns, rows * columns);
    } else if (op->run == moei_int_op_attention) {
        const double length = (double)p->model.length, heads = p->model.attentions[op->index].heads;
        row.multiplications = 2 * row.outputs * p->model.length;
        row.instructions = moei_cost_of((moei_any_function)op->run, n, heads * length, n * length);
    } else if (kind->flags & MOEI_NESTS) {
        const double most = p->model.mixtures[op->index].router.most;
        row.instructions = moei_cost_of((moei_any_function)op->run, n, most, most * most);
    } else if (kind->flags & MOEI_MEASURES) {
        row.outputs = p->model.mixtures[op->index].router.n_experts;
        row.instructions =
            moei_cost_of((moei_any_function)op->run, (double)row.outputs, n, n * (double)row.outputs);
    }
    row.instructions *= (double)row.calls;
    return row;
}

/* The row of an MoE layer's router; routers of float lists are operations with their own rows. */
static moe_profile_row moei_profile_router(const moei_profiler *p, size_t mixture, size_t module) {
    const moei_int_router *r = &p->model.mixtures[mixture].router;
    const double n = r->n_experts, most = r->most;
    const uint32_t table[4] = {r->bias, r->thresholds, r->scales, r->table};
    moe_profile_row row;
    int j;
    memset(&row, 0, sizeof row);
    moei_profile_sums(&p->tally[p->model.n_ops + mixture], &row);
    row.name = "route";
    row.op = mixture;
    row.module = module;
    row.outputs = r->most;
    row.inputs = r->n_experts;
    row.calls = 1;
    for (j = 0; j < 4; j++)
        if (table[j] != MOEI_INT_NONE) row.weight_bytes += moei_profile_next(p, table[j] + 1, MOEI_INT_NONE) - table[j];
    if (moei_profile_is_float(p)) return row;
    if (r->gate != NULL) row.instructions += moei_cost_of((moei_any_function)r->gate, n, 0, 0);
    row.instructions += moei_cost_of((moei_any_function)r->select, n, most, n * most);
    if (r->values != NULL) row.instructions += moei_cost_of((moei_any_function)r->values, most, 0, 0);
    row.instructions += moei_cost_of((moei_any_function)r->weight, n, most, n * most);
    if (r->scale != NULL) row.instructions += moei_cost_of((moei_any_function)r->scale, n, most, n * most);
    return row;
}

/* The inner operations of an MoE layer precede its row; its router follows its last score. */
static void moei_profile_rows(const moei_profiler *p, moe_profile *profile) {
    size_t i, inner = p->model.n_main, n = 0;
    for (i = 0; i < p->model.n_main; i++) {
        const moei_int_op *op = &p->built.ops[i];
        const size_t index = op->index;
        if (moei_profile_kind_of(op)->flags & MOEI_NESTS) {
            const moei_int_mixture *m = &p->model.mixtures[index];
            size_t last = m->score + m->n_score;
            if (m->n_score > 0 && moei_profile_kind_of(&p->built.ops[last - 1])->flags & MOEI_MEASURES)
                last += p->built.ops[last - 1].shape.k;
            for (; inner < p->model.n_ops && p->trace.notes[inner].mixture == index; inner++) {
                if (inner == last) profile->rows[n++] = moei_profile_router(p, index, p->trace.notes[i].module);
                profile->rows[n++] = moei_profile_row(p, inner);
            }
            if (inner == last) profile->rows[n++] = moei_profile_router(p, index, p->trace.notes[i].module);
        }
        profile->rows[n++] = moei_profile_row(p, i);
    }
    profile->n_rows = n;
}

/* Inserts a vector, in the order of offsets. */
static void moei_profile_vector(moe_profile *profile, size_t at, size_t size, size_t first, size_t last) {
    moe_profile_vector *v = profile->vectors, one;
    size_t i = profile->n_vectors++;
    one.at = at;
    one.size = size;
    one.first = first;
    one.last = last;
    for (; i > 0 && (v[i - 1].at > at || (v[i - 1].at == at && v[i - 1].first > first)); i--) v[i] = v[i - 1];
    v[i] = one;
}

/* A vector is live from the operation after the one that created it, except vectors that two
   operations share and an operation's own workspace. */
static void moei_profile_vectors(const moei_profiler *p, moe_profile *profile) {
    size_t i, r;
    if (p->model.state_size > 0) moei_profile_vector(profile, 0, p->model.state_size, 0, profile->n_rows - 1);
    for (i = 0; i < moei_array_length(p->trace.vectors); i++) {
        const moei_vector *v = &p->trace.vectors[i];
        const uint32_t from = v->first_use < v->last_use ? v->first_use + 1 : v->last_use;
        size_t first = SIZE_MAX, last = 0;
        for (r = 0; r < profile->n_rows; r++) {
            const moe_profile_row *row = &profile->rows[r];
            const moei_op_note *note = &p->trace.notes[row->op];
            const int router = strcmp(row->name, "route") == 0;
            const int own = note->other == i && note->clock == v->first_use;
            if (router || (note->clock < from && !own) || note->clock > v->last_use) continue;
            if (first == SIZE_MAX) first = r;
            last = r;
        }
        if (first != SIZE_MAX)
            moei_profile_vector(profile, p->model.state_size + 2 * (size_t)v->offset, 2 * moei_vector_room(v), first,
                                last);
    }
}

/* The whole call, unless the cost of a part is not known. */
static void moei_profile_total(const moei_profiler *p, moe_profile *profile) {
    const int is_float = moei_profile_is_float(p);
    size_t r;
    profile->instructions = moei_cost_of((moei_any_function)p->built.model.run, (double)p->model.d_in,
                                         (double)p->model.d_out, 0);
    for (r = 0; r < profile->n_rows && profile->instructions > 0; r++) {
        const moe_profile_row *row = &profile->rows[r];
        const int known = row->instructions > 0 || row->calls == 0 || (is_float && strcmp(row->name, "route") == 0);
        profile->instructions = known ? profile->instructions + row->instructions : 0;
    }
}

/* Allocates what the run needs and hooks the operations. */
static moe_status moei_profile_begin(moei_profiler *p, moe_profile *profile) {
    const moe_allocator *a = &p->built.allocator;
    const moe_model *model = &p->built.model;
    const size_t n = model->n_ops, all = n + model->n_mixtures;
    const size_t vectors = moei_array_length(p->trace.vectors);
    size_t i, widest = model->length + 1;
    for (i = 0; i < vectors; i++)
        if (p->trace.vectors[i].width > widest) widest = p->trace.vectors[i].width;
    for (i = 0; i < model->n_mixtures; i++)
        if (model->mixtures[i].router.n_experts > widest) widest = model->mixtures[i].router.n_experts;
    if (!moei_array_reserve(a, &p->ops, sizeof *p->ops, n) ||
        !moei_array_reserve(a, &p->tally, sizeof *p->tally, all) ||
        !moei_array_reserve(a, &p->in, sizeof *p->in, 5 * widest) ||
        !moei_array_reserve(a, &p->memory, 1,
                            model->scratch_size + (model->d_in + model->d_out + 3) * sizeof(moe_real)) ||
        !moei_array_reserve(a, &profile->rows, sizeof *profile->rows, all) ||
        !moei_array_reserve(a, &profile->vectors, sizeof *profile->vectors, vectors + 1))
        return MOE_ERR_MEMORY;
    memset(p->tally, 0, all * sizeof *p->tally);
    p->other = p->in + widest;
    p->wanted = p->other + widest;
    p->each = p->wanted + widest;
    p->before = p->each + widest;
    memcpy(p->ops, p->built.ops, n * sizeof *p->ops);
    for (i = 0; i < n; i++) p->ops[i].run = moei_profile_op;
    p->model = *model;
    p->model.ops = p->ops;
    return MOE_OK;
}

static moe_status moei_profile_check(const moe_net *net, const moe_data *data, moe_error *error) {
    if (data == NULL || data->n == 0) return MOE_OK;
    if (data->length > 0 && data->n % data->length != 0)
        return moei_error(error, MOE_ERR_ARGUMENT, "samples: n = %z: must be a multiple of length = %z", data->n,
                          data->length);
    return moei_inputs_check(net, data, error);
}

/* Makes the profile of p->built and p->trace. */
static moe_status moei_profile_make(moei_profiler *p, moe_profile *profile, moe_error *error) {
    moe_status status;
    if (p->built.ops == NULL)
        return moei_error(error, MOE_ERR_UNSUPPORTED, "the model is not a list of operations: %s", p->built.obstacle);
    status = moei_profile_check(p->net, p->data, error);
    if (status != MOE_OK) return status;
    status = moei_profile_begin(p, profile);
    if (status == MOE_OK && p->data != NULL)
        status = moei_each_batch(p->net, p->data, &p->built.allocator, moei_profile_batch, p);
    if (status != MOE_OK) return moei_error(error, status, "profile: %s", moe_status_text(status));
    moei_profile_rows(p, profile);
    moei_profile_vectors(p, profile);
    moei_profile_total(p, profile);
    return MOE_OK;
}

moe_status moe_model_profile(moe_profile *profile, const moe_net *net, const moe_model_config *config,
                             const moe_data *samples, moe_error *error) {
    moei_profiler p;
    moe_profile made;
    moe_allocator a;
    moe_status status;
    if (profile == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "profile must not be NULL");
    memset(&p, 0, sizeof p);
    memset(&made, 0, sizeof made);
    memset(&a, 0, sizeof a);
    if (config != NULL) a = config->allocator;
    p.trace.floats.allocator = made.allocator = a;
    p.net = net;
    p.data = samples == NULL && config != NULL ? config->calibration : samples;
    status = moei_model_create(&p.built, net, config, &p.trace, error);
    if (status == MOE_OK) {
        moei_model_link(&p.built); /* it has moved */
        status = moei_profile_make(&p, &made, error);
    }
    if (status == MOE_OK) *profile = made;
    else moe_profile_free(&made);
    moei_array_free(&a, &p.ops, sizeof *p.ops);
    moei_array_free(&a, &p.tally, sizeof *p.tally);
    moei_array_free(&a, &p.in, sizeof *p.in);
    moei_array_free(&a, &p.memory, 1);
    moei_array_free(&a, &p.trace.notes, sizeof *p.trace.notes);
    moei_array_free(&a, &p.trace.inner, sizeof *p.trace.inner);
    moei_array_free(&a, &p.trace.vectors, sizeof *p.trace.vectors);
    moe_buffer_free(&p.trace.floats);
    moe_model_free(&p.built);
    return status;
}
#else
moe_status moe_model_profile(moe_profile *profile, const moe_net *net, const moe_model_config *config,
                             const moe_data *samples, moe_error *error) {
    (void)profile;
    (void)net;
    (void)config;
    (void)samples;
    return moei_error(error, MOE_ERR_UNSUPPORTED, "the build has MOE_NO_QUANT");
}
#endif /* MOE_NO_QUANT */

void moe_profile_free(moe_profile *profile) {
    if (profile == NULL) return;
    moei_array_free(&profile->allocator, &profile->rows, sizeof *profile->rows);
    moei_array_free(&profile->allocator, &profile->vectors, sizeof *profile->vectors);
    memset(profile, 0, sizeof *profile);
}

/* ---- >>header: the model as C ---- */

/* Text that is being written to a stream. After a failure the rest is dropped. */
typedef struct moei_printer {
    moe_stream *stream;
    moe_status status;
    const char *name;             /* of the model */
    char capitals[MOE_NAME_SIZE]; /* the name in capitals */
    moei_text text;               /* not yet written, in room */
    char room[1024];
    size_t column; /* characters of the current line of a list */
} moei_printer;

static void moei_print_flush(moei_printer *p) {
    if (p->status == MOE_OK && p->text.length > 0)
        p->status = p->stream->write(p->stream->ctx, p->room, p->text.length);
    p->text.length = 0;
}

/* Prints up to 512 characters. */
static void moei_print_arguments(moei_printer *p, const char *format, va_list arguments) {
    if (p->text.length + 512 > sizeof p->room) moei_print_flush(p);
    moei_put_format(&p->text, format, arguments);
}

static void moei_print(moei_printer *p, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    moei_print_arguments(p, format, arguments);
    va_end(arguments);
}

static void moei_print_line_end(moei_printer *p) {
    moei_print(p, "\n");
    p->column = 0;
}

/* An item of a list. The line ends after it if it is long enough. */
static void moei_print_item(moei_printer *p, const char *format, ...) {
    size_t before;
    va_list arguments;
    if (p->text.length + 512 > sizeof p->room) moei_print_flush(p);
    before = p->text.length;
    va_start(arguments, format);
    moei_print_arguments(p, format, arguments);
    va_end(arguments);
    p->column += p->text.length - before;
    if (p->column > 110) moei_print_line_end(p);
}

/* 9 digits distinguish all floats. */
static void moei_print_real(moei_printer *p, moe_real value, const char *end) {
    char digits[40];
    moei_text t;
    size_t i;
    int is_integer = 1;
    t.out = digits;
    t.room = sizeof digits;
    t.length = 0;
    if (moei_real_bits(value) == MOEI_SIGN_BIT) moei_put(&t, "-0", 2);
    else moei_put_digits(&t, (double)value, 9);
    for (i = 0; i < t.length; i++) is_integer = is_integer && digits[i] != '.' && digits[i] != 'e';
    moei_print_item(p, "%s%sf%s", digits, is_integer ? "." : "", end);
}

/* ---- models that are lists of operations ---- */

/* The bytes of constants; of a float model the floats. */
static void moei_print_bytes(moei_printer *p, const moe_model *model, const char *what, const unsigned char *bytes,
                             size_t n) {
    const int is_float = model->weights_are == MOE_WEIGHTS_FLOAT;
    const size_t size = is_float ? sizeof(moe_real) : 1;
    size_t i;
    if (n == 0) return;
    moei_print(p, "static const %s %s_%s[%z] MOE_FLASH%s = {", is_float ? "float" : "unsigned char", p->name, what,
               n / size, strcmp(what, "experts") == 0 ? "_EXPERTS" : "");
    if (is_float) moei_print_line_end(p);
    for (i = 0; i < n; i += size) {
        moe_real value;
        const char *end = i + size < n ? "," : "";
        if (is_float) {
            memcpy(&value, bytes + i, sizeof value);
            moei_print_real(p, value, end);
        } else moei_print(p, i % 24 == 0 ? "\n    %d%s" : "%d%s", (int)bytes[i], end);
    }
    moei_print(p, "};\n\n");
}

static void moei_print_offset(moei_printer *p, uint32_t at, const char *end) {
    if (at == MOEI_INT_NONE) moei_print(p, "MOEI_INT_NONE%s", end);
    else moei_print(p, "%z%s", (size_t)at, end);
}

static void moei_print_function(moei_printer *p, moei_any_function function) {
    const char *name = function != NULL ? moei_function_name(function) : "NULL";
    if (name != NULL) moei_print(p, "%s, ", name);
    else if (p->status == MOE_OK) p->status = MOE_ERR_STATE; /* a function without a row */
}

static void moei_print_ops(moei_printer *p, const moe_model *model) {
    size_t i;
    moei_print(p, "/* function, {outputs, inputs, minimum, maximum, shift}, offset of its constants, in, other, out,\n"
                  "   factor, factor2, index */\n");
    moei_print(p, "static const moei_int_op %s_ops[%z] = {\n", p->name, (size_t)model->n_ops);
    for (i = 0; i < model->n_ops; i++) {
        const moei_int_op *op = &model->ops[i];
        moei_print(p, "    {");
        moei_print_function(p, (moei_any_function)op->run);
        moei_print(p, "{%d, %d, %d, %d, %d}, %z, ", (int)op->shape.n, (int)op->shape.k, (int)op->shape.low,
                   (int)op->shape.high, (int)op->shape.shift, (size_t)op->at);
        moei_print_offset(p, op->in, ", ");
        moei_print_offset(p, op->other, ", ");
        moei_print_offset(p, op->out, ", ");
        moei_print(p, "%d, %d, %d}%s\n", (int)op->factor, (int)op->factor2, (int)op->index,
                   i + 1 < model->n_ops ? "," : "};\n");
    }
}

static void moei_print_int_router(moei_printer *p, const moei_int_router *r) {
    moei_print(p, "{");
    moei_print_function(p, (moei_any_function)r->gate);
    moei_print_function(p, (moei_any_function)r->select);
    moei_print_function(p, (moei_any_function)r->values);
    moei_print_function(p, (moei_any_function)r->weight);
    moei_print_function(p, (moei_any_function)r->scale);
    moei_print(p, "\n      %d, %d, %d, %d, %d, %d, %d, %d, %d, %d, %d, %d, ", (int)r->n_experts, (int)r->top_k,
               (int)r->most, (int)r->scratch, (int)r->groups, (int)r->groups_kept, (int)r->factor, (int)r->z_bits,
               (int)r->weight_shift, (int)r->flags, (int)r->threshold, (int)r->tokens);
    moei_print_offset(p, r->bias, ", ");
    moei_print_offset(p, r->thresholds, ", ");
    moei_print_offset(p, r->scales, ", ");
    moei_print_offset(p, r->table, ", ");
    moei_print_function(p, (moei_any_function)r->over);
    moei_print_function(p, (moei_any_function)r->kept);
    moei_print(p, "%d, %d}", (int)r->kept_from, (int)r->kept_end);
}

static void moei_print_mixtures(moei_printer *p, const moe_model *model) {
    size_t i;
    if (model->n_mixtures == 0) return;
    moei_print(p, "/* MoE layers: the router; operations; offsets */\n");
    moei_print(p, "static const moei_int_mixture %s_mixtures[%z] = {\n", p->name, (size_t)model->n_mixtures);
    for (i = 0; i < model->n_mixtures; i++) {
        const moei_int_mixture *m = &model->mixtures[i];
        moei_print(p, "    {");
        moei_print_int_router(p, &m->router);
        moei_print(p, ",\n     %z, %z, %z, %z, %z, %z, ", (size_t)m->score, (size_t)m->n_score, (size_t)m->expert,
                   (size_t)m->n_expert, (size_t)m->shared, (size_t)m->n_shared);
        moei_print(p, "%z, %z, %z, %z, %z, %z, ", (size_t)m->experts, (size_t)m->stride, (size_t)m->z, (size_t)m->p,
                   (size_t)m->sum, (size_t)m->choices);
        moei_print_offset(p, m->block, ", ");
        moei_print(p, "%d, %d, %d, %d, %z, %z, %z, %z}%s\n", (int)m->weight_bits, (int)m->zeros, (int)m->copies,
                   (int)m->constants, (size_t)m->copy, (size_t)m->n_copy, (size_t)m->constant, (size_t)m->n_constant,
                   i + 1 < model->n_mixtures ? "," : "};\n");
    }
}

static void moei_print_attentions(moei_printer *p, const moe_model *model) {
    size_t i;
    if (model->n_attentions == 0) return;
    moei_print(p, "static const moei_int_attention %s_attentions[%z] = {\n", p->name, (size_t)model->n_attentions);
    for (i = 0; i < model->n_attentions; i++) {
        const moei_int_attention *a = &model->attentions[i];
        moei_print(p, "    {%d, %d, %z, %z, %z, %z, %d}%s\n", (int)a->heads, (int)a->d_head, (size_t)a->keys,
                   (size_t)a->values, (size_t)a->value, (size_t)a->room, (int)a->bits,
                   i + 1 < model->n_attentions ? "," : "};\n");
    }
}

/* Prints "NAME_part, " if the model has the array, else "NULL, ". */
static void moei_print_array(moei_printer *p, const char *part, int is_there) {
    if (is_there) moei_print(p, "%s_%s, ", p->name, part);
    else moei_print(p, "NULL, ");
}

static void moei_print_constants(moei_printer *p, const moe_model *model, const char *part, int is_there) {
    if (is_there && model->weights_are == MOE_WEIGHTS_FLOAT)
        moei_print(p, "(const unsigned char *)(const void *)");
    moei_print_array(p, part, is_there);
}

static void moei_print_list_model(moei_printer *p, const moe_model *model) {
    static const char *const kinds[MOE_WEIGHTS_COUNT] = {
        "FLOAT, moei_float_ops_run, moei_float_ops_choices", "INT8, moei_int_model_run, moei_int_model_choices",
        "INT4, moei_int_model_run, moei_int_model_choices"};
    moei_print_bytes(p, model, "weights", model->weights, model->weights_size);
    if (model->experts != NULL) moei_print_bytes(p, model, "experts", model->experts, model->experts_size);
    moei_print_ops(p, model);
    moei_print_mixtures(p, model);
    moei_print_attentions(p, model);
    moei_print(p,
               "static const moe_model %s = {MOE_MODEL_VERSION, MOE_WEIGHTS_%s,\n"
               "    %z, %z, %z, %z, %z, (float)%g, (float)%g,\n    ",
               p->name, kinds[model->weights_are], model->d_in, model->d_out, model->length, model->scratch_size,
               model->state_size, (double)model->input_scale, (double)model->output_scale);
    moei_print_constants(p, model, "weights", model->weights_size > 0);
    moei_print(p, model->weights_are == MOE_WEIGHTS_FLOAT ? "%z,\n    " : "%z, ", model->weights_size);
    moei_print_constants(p, model, "experts", model->experts != NULL && model->experts_size > 0);
    moei_print(p, "%z, ", model->experts_size);
    moei_print_array(p, "ops", 1);
    moei_print(p, "%z, %z,\n    ", (size_t)model->n_ops, (size_t)model->n_main);
    moei_print_array(p, "mixtures", model->n_mixtures > 0);
    moei_print(p, "%z, ", (size_t)model->n_mixtures);
    moei_print_array(p, "attentions", model->n_attentions > 0);
    moei_print(p, "%z, NULL, %z};\n\n", (size_t)model->n_attentions, model->multiplications);
}

/* ---- float models: the network as a constant ----
   Initializers list the members in their order. Configurations are printed by tables of fields; a
   member without a row is an error. */

/* An item of a list: "NAME_module_part", dots replaced; without a part "NAME". */
static void moei_print_name(moei_printer *p, const char *part, size_t module) {
    size_t i, from;
    if (p->text.length + 512 > sizeof p->room) moei_print_flush(p);
    from = p->text.length;
    if (part == NULL) moei_print(p, "%s_net", p->name);
    else moei_print(p, "%s_net_%z_%s", p->name, module, part);
    for (i = from; i < p->text.length; i++)
        if (p->room[i] == '.') p->room[i] = '_';
    p->column = 0; /* a list of names has one name per line, or a few */
}

static void moei_print_bits(moei_printer *p, uint64_t bits) {
    char digits[24];
    moei_text t;
    t.out = digits;
    t.room = sizeof digits;
    t.length = 0;
    moei_put_unsigned(&t, bits);
    moei_print_item(p, "%su%s", digits, bits >> 32 != 0 ? "ll" : "");
}

static void moei_print_parameter(moei_printer *p, const char *part, size_t module, size_t count,
                                 const moe_real *values) {
    size_t i;
    moei_print_item(p, "static const float ");
    moei_print_name(p, part, module);
    moei_print_item(p, "[%z] MOE_FLASH = {", count);
    moei_print_line_end(p);
    for (i = 0; i < count; i++) moei_print_real(p, values[i], i + 1 < count ? "," : "};");
    moei_print_line_end(p);
}

/* The private member of a router's configuration, which has no row. */
static const moe_field moei_no_preset = {"preset", MOE_FIELD_INT, offsetof(moe_router_config, preset), 0, 0, 0, NULL,
                                         ""};

/* The members of config from byte `from` to `to`, without braces. */
static void moei_print_fields(moei_printer *p, const moe_field *fields, const void *config, size_t from, size_t to) {
    while (from < to) {
        const moe_field *field = fields;
        const unsigned char *at = (const unsigned char *)config + from;
        const char *end;
        while (field->name != NULL && field->offset != from) field++;
        if (field->name == NULL && from == offsetof(moe_router_config, preset)) field = &moei_no_preset;
        if (field->name == NULL) {
            if (p->status == MOE_OK) p->status = MOE_ERR_STATE;
            return;
        }
        from += field->kind == MOE_FIELD_REAL ? sizeof(moe_real) : sizeof(int);
        end = from < to ? ", " : "";
        if (field->kind == MOE_FIELD_REAL) {
            moe_real value;
            memcpy(&value, at, sizeof value);
            moei_print_real(p, value, end);
        } else {
            int value;
            memcpy(&value, at, sizeof value);
            moei_print_item(p, "%d%s", value, end);
        }
    }
}

static void moei_print_router_config(moei_printer *p, const moe_router_config *config) {
    moei_print_item(p, "{");
    moei_print_fields(p, moe_router_fields(), config, 0, sizeof *config);
    moei_print_item(p, "}");
}

/* The first n parameters of module i; NULL for those that it does not have. The weight of a tied
   module is the embedding's. The cast is for members to which training writes. */
static void moei_print_parameters(moei_printer *p, const moe_net *net, size_t i, int n, const char *cast) {
    moe_parameter parameter;
    int index;
    moei_print_item(p, "{");
    for (index = 0; index < n; index++) {
        const int tied = net->modules[i].kind == MOE_MODULE_TIED && index == MOE_MODULE_WEIGHT;
        const size_t owner = tied ? 0 : i;
        if (index > 0) moei_print_item(p, ", ");
        if (moei_module_parameter(net, owner, index, &parameter) == MOE_OK) {
            moei_print_item(p, "%s", cast);
            moei_print_name(p, parameter.name, owner);
        } else moei_print_item(p, "NULL");
    }
    moei_print_item(p, "}");
}

/* The members of a moe_layer. The parameters of its router are the layer's. */
static void moei_print_layer(moei_printer *p, const moe_net *net, size_t i) {
    const moe_layer *layer = &net->modules[i].layer;
    moei_print_item(p, "{{");
    moei_print_router_config(p, &layer->config.router);
    moei_print_item(p, ", ");
    moei_print_fields(p, moe_layer_fields(), &layer->config, sizeof layer->config.router,
                      offsetof(moe_layer_config, kernels) + sizeof(int));
    moei_print_item(p, ", NULL}, {"); /* no transport */
    moei_print_router_config(p, &layer->router.config);
    moei_print_item(p, ", {NULL, NULL, NULL, NULL, 0}, NULL, ");
    moei_print_bits(p, layer->router.present);
    moei_print_item(p, ", ");
    moei_print_bits(p, layer->router.parts);
    moei_print_item(p, ", NULL, {NULL}}, NULL, ");
    moei_print_bits(p, layer->present);
    moei_print_item(p, ", ");
    if (moei_is_layer(&net->modules[i])) moei_print_parameters(p, net, i, MOE_LAYER_PARAMETER_COUNT, "");
    else moei_print_item(p, "{NULL}");
    moei_print_item(p, ", {NULL}, {NULL}, 0, {NULL}, 0, NULL, 0, {NULL, NULL}}");
}

/* The members of a moe_module. */
static void moei_print_module(moei_printer *p, const moe_net *net, size_t i) {
    const moe_module *m = &net->modules[i];
    moei_print_item(p, "{%d, %d, %d, %d, %d, %d, ", m->kind, m->d_in, m->d_out, m->act, m->span, m->n_rows);
    moei_print_item(p, "%d, %d, %d, ", m->length, m->no_bias, m->bias);
    moei_print_real(p, m->eps, ", ");
    moei_print_real(p, m->scale, ", ");
    moei_print_real(p, m->cap, ", ");
    moei_print_real(p, m->rate, ", {");
    moei_print_fields(p, moei_attention_fields, &m->attention, 0, sizeof m->attention);
    moei_print_item(p, "}, ");
    moei_print_layer(p, net, i);
    moei_print_item(p, ", ");
    if (moei_is_layer(m)) moei_print_item(p, "{NULL}");
    else moei_print_parameters(p, net, i, MOE_MODULE_SLOTS, "(moe_real *)");
    moei_print_item(p, ", {NULL}, NULL, 0}%s", i + 1 < net->n_modules ? "," : "};");
    moei_print_line_end(p);
}

/* static const moe_net NAME_net and what it points to: a network with plain C kernels for
   moe_net_forward and moe_net_decode, without the list of named parameters. */
static void moei_print_net(moei_printer *p, const moe_net *net) {
    moe_parameter parameter;
    size_t i;
    int index;
    for (i = 0; i < net->n_modules; i++)
        for (index = 0; index < MOE_LAYER_PARAMETER_COUNT; index++)
            if (moei_module_parameter(net, i, index, &parameter) == MOE_OK)
                moei_print_parameter(p, parameter.name, i, parameter.count, moei_float_values(net, i, index));
    moei_print_item(p, "static const moe_module ");
    moei_print_name(p, NULL, 0);
    moei_print_item(p, "_modules[%z] = {", net->n_modules);
    moei_print_line_end(p);
    for (i = 0; i < net->n_modules; i++) moei_print_module(p, net, i);
    moei_print_item(p, "static const moe_net ");
    moei_print_name(p, NULL, 0);
    moei_print_item(p, " = {%d, %d, %z, (moe_module *)", net->d_in, net->d_out, net->n_modules);
    moei_print_name(p, NULL, 0);
    moei_print_item(p, "_modules, 0, NULL, MOE_KERNELS_C, NULL, NULL, NULL, 0, %d, %d, ", net->cache_type,
                    net->last_only);
    moei_print_item(p, "{NULL, NULL}, NULL, 0, 1, 0, {MOE_OK, \"\"}};");
    moei_print_line_end(p);
}

static void moei_print_float_check(moei_printer *p) {
    moei_print(p,
               "#if defined(__AVR__) || MOE_REAL_IS_DOUBLE\n"
               "#error \"%s: float models need MOE_REAL = float and a machine that reads constants in flash like "
               "memory\"\n"
               "#endif\n\n",
               p->name);
}

static void moei_print_float_model(moei_printer *p, const moe_model *model) {
    moei_print_net(p, model->net);
    moei_print(p,
               "static const moe_model %s = {MOE_MODEL_VERSION, MOE_WEIGHTS_FLOAT, moei_float_model_run, "
               "moei_float_model_choices,\n",
               p->name);
    moei_print(p, "    %z, %z, %z, %z, %z, 1, 1, NULL, %z, NULL, 0, NULL, 0, 0, NULL, 0, NULL, 0, &%s_net, %z};\n\n",
               model->d_in, model->d_out, model->length, model->scratch_size, model->state_size, model->weights_size,
               p->name, model->multiplications);
}

/* ---- float models: what the MOE_KEEP_ masks must keep ---- */

#define MOEI_KEPT_SETS(X) X(ACTS) X(SCORES) X(GATES) X(SELECTS) X(WEIGHTS) X(INPUTS) X(REFINES) X(MODULES) X(EXTRAS)

enum {
#define MOEI_KEPT_SET(name) MOEI_KEPT_##name,
    MOEI_KEPT_SETS(MOEI_KEPT_SET)
#undef MOEI_KEPT_SET
        MOEI_KEPT_COUNT
};

static const char *const moei_kept_names[MOEI_KEPT_COUNT] = {
#define MOEI_KEPT_NAME(name) #name,
    MOEI_KEPT_SETS(MOEI_KEPT_NAME)
#undef MOEI_KEPT_NAME
};

static void moei_keep(uint32_t *masks, int set, int value) { masks[set] |= (uint32_t)1 << value; }

static void moei_keep_router(uint32_t *masks, const moe_router_config *c) {
    const int hidden = c->score == MOE_SCORE_MLP || c->score == MOE_SCORE_ATTENTIVE;
    const int changes = moei_has_schedule(c) || c->freeze_at > 0 || c->switch_at > 0 || c->l1_controller;
    moei_keep(masks, MOEI_KEPT_SCORES, c->score);
    moei_keep(masks, MOEI_KEPT_GATES, c->gate);
    moei_keep(masks, MOEI_KEPT_SELECTS, c->select);
    moei_keep(masks, MOEI_KEPT_WEIGHTS, c->weight);
    moei_keep(masks, MOEI_KEPT_INPUTS, c->input);
    moei_keep(masks, MOEI_KEPT_REFINES, c->refine);
    if (moei_switches(c)) moei_keep(masks, MOEI_KEPT_SELECTS, c->switch_from);
    if (c->student) moei_keep(masks, MOEI_KEPT_SELECTS, MOE_SELECT_TOP_K);
    if (hidden) moei_keep(masks, MOEI_KEPT_ACTS, c->router_act);
    if (c->gate == MOE_GATE_SIGMOID) moei_keep(masks, MOEI_KEPT_ACTS, MOE_ACT_SIGMOID);
    if (changes) moei_keep(masks, MOEI_KEPT_EXTRAS, MOE_EXTRA_SCHEDULE);
    if (c->capacity_factor > 0 || c->capacity_factor_eval > 0 || c->drop_capacity > 0 ||
        c->capacity_bound != MOE_BOUND_NONE || c->drop_rule != MOE_DROP_RULE_NONE)
        moei_keep(masks, MOEI_KEPT_EXTRAS, MOE_EXTRA_CAPACITY);
}

static void moei_keep_module(uint32_t *masks, const moe_module *module) {
    const moe_layer_config *c = &module->layer.config;
    moei_expert_run run;
    moei_keep(masks, MOEI_KEPT_MODULES, module->kind);
    if (module->kind == MOE_MODULE_ACTIVATION) moei_keep(masks, MOEI_KEPT_ACTS, module->act);
    if (!moei_is_layer(module)) return;
    moei_keep_router(masks, &c->router); /* a feed_forward module has one, too */
    run = moei_expert_run_begin(&module->layer, c->expert, 0);
    if (run.kind->n_steps > 1) moei_keep(masks, MOEI_KEPT_ACTS, run.act);
    if (run.shaped) moei_keep(masks, MOEI_KEPT_EXTRAS, MOE_EXTRA_SHAPED);
    if (c->n_shared > 0) moei_keep(masks, MOEI_KEPT_ACTS, moei_expert_run_begin(&module->layer, MOEI_SHARED, 0).act);
}

/* Before moe.h, in a file that compiles inference only: the masks that the model needs, and no
   messages. After moe.h: an error if another model's header has set smaller masks. */
static void moei_print_masks(moei_printer *p, const moe_net *net, int after) {
    uint32_t masks[MOEI_KEPT_COUNT];
    size_t i;
    memset(masks, 0, sizeof masks);
    for (i = 0; i < net->n_modules; i++) moei_keep_module(masks, &net->modules[i]);
    if (after) moei_print(p, "#if defined(MOE_IMPLEMENTATION) && (0");
    else
        moei_print(p, "#if defined(MOE_IMPLEMENTATION) && defined(MOE_NO_TRAIN) && !defined(MOE_H) && "
                      "!defined(MOE_KEEP_ALL)\n");
    for (i = 0; i < MOEI_KEPT_COUNT; i++) {
        const size_t mask = masks[i];
        if (after) moei_print(p, " || ((MOE_KEEP_%s) & %z) != %z", moei_kept_names[i], mask, mask);
        else moei_print(p, "#define MOE_KEEP_%s %z\n", moei_kept_names[i], mask);
    }
    if (after)
        moei_print(p,
                   ")\n#error \"%s needs what another model's header has left out: define MOE_KEEP_ALL before both\"\n",
                   p->name);
    /* messages take flash, and a device has no one to read them */
    if (!after) moei_print(p, "#ifndef MOE_NO_MESSAGES\n#define MOE_NO_MESSAGES\n#endif\n");
    moei_print(p, "#endif\n\n");
}

/* ---- the comment on top, the macros ---- */

static int moei_has_loader(const moe_model *model) { return model->experts == NULL && model->experts_size > 0; }

/* The structs of a model as on machines whose pointers and sizes have 4 bytes, for their size. */
typedef struct moei_op_32 {
    uint32_t run;
    moei_int_shape shape;
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
    uint32_t tables[4], weight_over[3], places[13];
    int16_t weight_bits;
    uint16_t zeros, copies, constants;
    uint32_t without[4];
} moei_mixture_32;

enum { MOEI_MODEL_32 = 24 * 4 };

static size_t moei_tables_32(const moe_model *model) {
    return MOEI_MODEL_32 + model->n_ops * sizeof(moei_op_32) + model->n_mixtures * sizeof(moei_mixture_32) +
           model->n_attentions * sizeof(moei_int_attention);
}

static size_t moei_expert_parameters(const moe_layer *layer) {
    moe_parameter parameter;
    size_t count = 0;
    int index;
    for (index = MOE_EXPERTS_GATE; index < MOE_SHARED_GATE; index++)
        if (moe_layer_parameter(&layer->config, index, &parameter) == MOE_OK) count += parameter.count;
    return count / (size_t)MOEI_REAL_EXPERTS(&layer->config.router);
}

static void moei_print_layer_line(moei_printer *p, size_t index, size_t experts, size_t bytes, size_t most) {
    moei_print(p, "     MoE layer %z %z experts of %z bytes, at most %z per token\n", index, experts, bytes, most);
}

static void moei_print_layer_lines(moei_printer *p, const moe_model *model) {
    size_t i, index = 0;
    for (i = 0; i < model->n_mixtures; i++) {
        const moei_int_mixture *m = &model->mixtures[i];
        moei_print_layer_line(p, i, m->router.n_experts, m->stride, m->router.most);
    }
    for (i = 0; model->net != NULL && i < model->net->n_modules; i++) {
        const moe_layer *layer = &model->net->modules[i].layer;
        if (model->net->modules[i].kind != MOE_MODULE_MIXTURE) continue;
        moei_print_layer_line(p, index++, (size_t)layer->config.router.n_experts,
                              moei_expert_parameters(layer) * sizeof(moe_real),
                              moei_max_choices(&layer->config.router));
    }
}

/* Prints an example call of the model for the comment. */
static void moei_print_call(moei_printer *p, const moe_model *model) {
    const int is_float = model->weights_are == MOE_WEIGHTS_FLOAT, loads = moei_has_loader(model);
    moei_print(p, "     static unsigned char scratch[%s_SCRATCH];\n     ", p->capitals);
    if (model->d_in == 0) moei_print(p, "int32_t input[1]; ");
    else moei_print(p, "%s input[%s_INPUTS]; ", is_float ? "float" : "signed char", p->capitals);
    moei_print(p, "%s output[%s_OUTPUTS];\n", is_float ? "float" : "int16_t", p->capitals);
    moei_print(p, "     moe_status status = moe_infer(&%s, %s, input, output, scratch, sizeof scratch); */\n", p->name,
               loads ? "&loader" : "NULL");
}

/* ---- the profile in the comment ---- */

/* A number with `digits` digits, or a dash, padded with spaces in front to the width. */
static void moei_print_cell(moei_printer *p, size_t width, int is_there, double value, int digits) {
    char room[40];
    moei_text t;
    t.out = room;
    t.room = sizeof room;
    t.length = 0;
    if (is_there && value != value) moei_put(&t, "nan", 3);
    else if (is_there && !(fabs(value) > 0)) moei_put(&t, "0", 1);
    else if (is_there && fabs(value) < HUGE_VAL) moei_put_digits(&t, value, digits);
    else if (!is_there) moei_put(&t, "-", 1);
    else moei_put(&t, value > 0 ? "exact" : "-inf", value > 0 ? 5 : 4);
    room[t.length < sizeof room ? t.length : sizeof room - 1] = '\0';
    for (; width > t.length; width--) moei_print(p, " ");
    moei_print(p, "%s", room);
}

/* Rounded to tenths, as decibels and percentages are printed. */
static double moei_tenths(double value) { return fabs(value) < 1e9 ? floor(value * 10 + 0.5) / 10 : value; }

static void moei_print_profile_row(moei_printer *p, const moe_profile_row *row, size_t number) {
    size_t i, length = strlen(row->name);
    moei_print(p, "\n     ");
    moei_print_cell(p, 4, 1, (double)number, 9);
    moei_print(p, "  %s", row->name);
    for (i = length; i < 16; i++) moei_print(p, " ");
    moei_print_cell(p, 4, 1, (double)row->module, 9);
    moei_print_cell(p, 6, 1, (double)row->outputs, 9);
    moei_print_cell(p, 6, 1, (double)row->inputs, 9);
    moei_print_cell(p, 6, 1, (double)row->calls, 9);
    moei_print_cell(p, 9, row->multiplications > 0, (double)row->multiplications, 12);
    moei_print_cell(p, 9, row->weight_bytes > 0, (double)row->weight_bytes, 12);
    moei_print_cell(p, 7, row->compared > 0, moei_tenths(row->snr), 4);
    moei_print_cell(p, 7, row->net_compared > 0, moei_tenths(row->net_snr), 4);
    moei_print_cell(p, 7, row->used > 0, moei_tenths(100 * row->saturated), 4);
    moei_print_cell(p, 6, row->used > 0, moei_tenths(100 * row->used), 4);
    moei_print_cell(p, 9, row->instructions > 0, floor(row->instructions + 0.5), 12);
}

/* A line for each vector: a character for each operation, or for several if there are many. */
static void moei_print_profile_map(moei_printer *p, const moe_profile *profile) {
    const size_t each = (profile->n_rows + 79) / 80;
    size_t i, r;
    moei_print(p, "\n\n   Scratch memory: offset, bytes, and the operations that need it");
    if (each > 1) moei_print(p, ", %z for each sign", each);
    for (i = 0; i < profile->n_vectors; i++) {
        const moe_profile_vector *v = &profile->vectors[i];
        moei_print(p, "\n     ");
        moei_print_cell(p, 6, 1, (double)v->at, 12);
        moei_print_cell(p, 7, 1, (double)v->size, 12);
        moei_print(p, "  ");
        for (r = 0; r < profile->n_rows; r += each) moei_print(p, r + each > v->first && r <= v->last ? "#" : ".");
        moei_print(p, "  %z-%z", v->first, v->last);
    }
}

static void moei_print_profile(moei_printer *p, const moe_profile *profile) {
    size_t i;
    moei_print(p,
               "\n   Operations: module; outputs, inputs; the most calls, multiply-accumulates and instructions of a\n"
               "   Cortex-M4 for all of them; bytes of constants; SNR in dB of the operation against float on\n"
               "   the same inputs, and of the module's output (route: weights) against the network; outputs that are\n"
               "   clamped, and the part of the codes' range that is used, in %%\n"
               "        #  operation        mod  outs   ins calls     MACs    bytes    SNR    net  clamp  used"
               "   instr.");
    for (i = 0; i < profile->n_rows; i++) moei_print_profile_row(p, &profile->rows[i], i);
    if (profile->instructions > 0) {
        moei_print(p, "\n   A call takes about ");
        moei_print_cell(p, 0, 1, floor(profile->instructions + 0.5), 12);
        moei_print(p, " instructions, by an estimate.");
    }
    moei_print_profile_map(p, profile);
    moei_print(p, "\n");
}

static void moei_print_comment(moei_printer *p, const moe_model *model, const char *obstacle,
                               const moe_profile *profile) {
    const int is_float = model->weights_are == MOE_WEIGHTS_FLOAT;
    const char *kind = is_float ? "float" : model->weights_are == MOE_WEIGHTS_INT8 ? "int8" : "int4";
    moei_print(p, "/* %s: an inference model for moe_infer, printed by moe_export_c of moe %s. Weights: %s.\n\n",
               p->name, moe_version(), kind);
    if (model->net != NULL)
        moei_print(p, "     code        the network's own, as it is not a list of operations: %s\n", obstacle);
    moei_print(p, "     constants   %z bytes of weights", model->weights_size + model->experts_size);
    if (model->experts_size > 0)
        moei_print(p, ", of which %z are experts'%s", model->experts_size,
                   moei_has_loader(model) ? " and come through a loader" : "");
    if (model->net == NULL)
        moei_print(p, "\n     tables      %z more bytes of flash, where pointers have 4 bytes", moei_tables_32(model));
    moei_print(p, "\n     scratch     %z bytes\n     work        %z multiplications per call at most\n",
               model->scratch_size, model->multiplications);
    moei_print_layer_lines(p, model);
    if (model->length > 0)
        moei_print(p, "     sequences   of up to %z tokens, one per call; %z bytes of scratch persist between calls\n",
                   model->length, model->state_size);
    if (profile != NULL) moei_print_profile(p, profile);
    moei_print(p,
               "\n   Define MOE_IMPLEMENTATION in ONE source file before it includes this header, and MOE_NO_TRAIN to\n"
               "   leave out all but inference%s.\n",
               is_float ? "" : ", or MOE_NO_FLOAT to leave out all but integer models");
    moei_print_call(p, model);
}

static void moei_print_macros(moei_printer *p, const moe_model *model) {
    const char *capitals = p->capitals;
    moei_print(p, "#define %s_INPUTS %z\n#define %s_OUTPUTS %z\n#define %s_SCRATCH %z\n", capitals, model->d_in,
               capitals, model->d_out, capitals, model->scratch_size);
    if (model->length > 0) moei_print(p, "#define %s_LENGTH %z\n", capitals, model->length);
    moei_print(p, "#define %s_INPUT_SCALE ((float)%g)\n#define %s_OUTPUT_SCALE ((float)%g)\n\n", capitals,
               (double)model->input_scale, capitals, (double)model->output_scale);
}

/* ---- the header ---- */

/* Whether name is a short identifier and neither reserved (_A, __a), nor a keyword of C or C++, nor
   one that may be the library's. */
static int moei_is_identifier(const char *name) {
    static const char words[] =
        " auto break case char const continue default do double else enum extern float for goto if inline int long "
        "register restrict return short signed sizeof static struct switch typedef union unsigned void volatile while "
        "alignas alignof and and_eq asm bitand bitor bool catch char16_t char32_t class compl const_cast constexpr "
        "decltype delete dynamic_cast explicit export false friend mutable namespace new noexcept not not_eq nullptr "
        "operator or or_eq private protected public reinterpret_cast static_assert static_cast template this "
        "thread_local throw true try typeid typename using virtual wchar_t xor xor_eq "
        "char8_t co_await co_return co_yield concept consteval constinit requires typeof typeof_unqual ";
    const char *at;
    size_t i;
    for (i = 0; name[i] != '\0'; i++) {
        const char c = name[i];
        const int letter = c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        if (!letter && !(i > 0 && c >= '0' && c <= '9')) return 0;
    }
    for (at = i > 0 ? strstr(words, name) : NULL; at != NULL; at = strstr(at + 1, name))
        if (at[-1] == ' ' && at[i] == ' ') return 0;
    if (name[0] == '_' && (name[1] == '_' || (name[1] >= 'A' && name[1] <= 'Z'))) return 0;
    if ((name[0] | 32) == 'm' && (name[1] | 32) == 'o' && (name[2] | 32) == 'e') {
        const char *behind = name + ((name[3] | 32) == 'i' ? 4 : 3);
        if (*behind == '\0' || *behind == '_') return 0;
    }
    return i > 0 && i < MOE_NAME_SIZE - 16;
}

static moe_status moei_printer_begin(moei_printer *p, const moe_built_model *built, const char *name,
                                     moe_stream *stream, moe_error *error) {
    size_t i;
    if (built == NULL || name == NULL || stream == NULL || stream->write == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "built, name, stream and stream->write must not be NULL");
    if (built->model.version != MOE_MODEL_VERSION)
        return moei_error(error, MOE_ERR_ARGUMENT, "built: must come from moe_model_create");
    if (!moei_is_identifier(name))
        return moei_error(error, MOE_ERR_ARGUMENT,
                          "name = \"%s\": must be a short identifier of C and C++, not one of moe.h", name);
    memset(p, 0, sizeof *p);
    p->stream = stream;
    p->name = name;
    p->text.out = p->room;
    p->text.room = sizeof p->room;
    for (i = 0; name[i] != '\0'; i++)
        p->capitals[i] = (char)(name[i] >= 'a' && name[i] <= 'z' ? name[i] - 'a' + 'A' : name[i]);
    return MOE_OK;
}

static moe_status moei_stream_error(moe_error *error, moe_status status) {
    return status == MOE_OK ? MOE_OK : moei_error(error, status, "the stream failed: %s", moe_status_text(status));
}

moe_status moe_export_c(const moe_built_model *built, const char *name, moe_stream *stream, moe_error *error) {
    moei_printer p;
    moe_built_model copy;
    const moe_model *model = &copy.model;
    moe_status status = moei_printer_begin(&p, built, name, stream, error);
    if (status != MOE_OK) return status;
    copy = *built;
    moei_model_link(&copy);
    moei_print_comment(&p, model, copy.obstacle, copy.profile);
    moei_print(&p, "#ifndef %s_MODEL_H\n#define %s_MODEL_H\n\n", p.capitals, p.capitals);
    if (model->net != NULL) moei_print_masks(&p, model->net, 0);
    moei_print(&p,
               "#include \"moe.h\"\n\n"
               "#ifndef MOE_FLASH_EXPERTS\n"
               "#define MOE_FLASH_EXPERTS MOE_FLASH\n"
               "#endif\n"
               "#if MOE_MODEL_VERSION != %d\n"
               "#error \"%s: export this model again with this version of moe.h\"\n"
               "#endif\n\n",
               (int)MOE_MODEL_VERSION, name);
    moei_print_macros(&p, model);
    if (model->net != NULL) moei_print_masks(&p, model->net, 1);
    if (model->weights_are == MOE_WEIGHTS_FLOAT) moei_print_float_check(&p);
    if (model->net != NULL) moei_print_float_model(&p, model);
    else moei_print_list_model(&p, model);
    moei_print(&p, "#endif\n");
    moei_print_flush(&p);
    return moei_stream_error(error, p.status);
}

moe_status moe_export_experts(const moe_built_model *built, moe_stream *stream, moe_error *error) {
    if (built == NULL || stream == NULL || stream->write == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "built, stream and stream->write must not be NULL");
    if (!built->external)
        return moei_error(error, MOE_ERR_STATE, "the header has the experts: the model was made without loader = 1");
    return moei_stream_error(error, stream->write(stream->ctx, built->experts.data, built->experts.size));
}

#endif /* MOE_NO_TRAIN */

#ifdef __cplusplus
}
#endif
#endif /* MOE_IMPLEMENTATION */
