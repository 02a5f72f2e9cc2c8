/* moe_kernels.h - v0.2.0 - vector kernels for mixtures of experts - MIT or public domain

   Matrix products, activations, norms, softmax, top-k and AdamW for float or double, with plain C,
   AVX2, AVX-512, NEON and WebAssembly versions chosen at run time; 16-bit, int8 and int4 weights;
   random numbers; integer kernels for microcontrollers. C99 or C++11, one file, no dependencies.

   Contents: search for
     >>recipe   >>program   >>options   >>glossary   >>renames   >>manual   >>porting
     >>declarations   version, status codes, processor features, kernel tables, operations,
                      packed weights, random numbers, integer constants
     >>code           the implementation: private tools, plain C, AVX2, AVX-512, packed weights,
                      vectors of four (NEON, WebAssembly), the choice of a table, integers

   >>recipe
     In ONE source file:     #define MOE_IMPLEMENTATION
                             #include "moe_kernels.h"
     In all others:          #include "moe_kernels.h"
     Link with -lm. moe_routers.h and moe.h include this header themselves.

   >>program
 * --- first program ---
 * #define MOE_IMPLEMENTATION
 * #include "moe_kernels.h"
 * #include <stdio.h>
 *
 * int main(void) {
 *     const moe_kernels *k = moe_kernels_select(MOE_KERNELS_AUTO);
 *     const moe_real x[2] = {1, 2}; // one token of width 2
 *     const moe_real w[4][2] = {{1, 0}, {0, 1}, {1, 1}, {-1, 1}}; // four experts, one row each
 *     moe_real score[4], p[4];
 *     int32_t chosen[2];
 *     // score = x w^T
 *     moe_matmul(k, MOE_MATMUL_NT, MOE_TYPE_REAL, 1, 4, 2, x, 2, w, 2, score, 4, 0);
 *     moe_softmax(k, 4, score, 1, p);
 *     moe_top_k(4, p, 2, chosen);
 *     for (int i = 0; i < 2; i++)
 *         printf("%s: expert %d, %.3f\n", k->name, (int)chosen[i], (double)p[chosen[i]]);
 *     return 0;
 * }
 * --- end ---

   >>options: define them before the header is included. An option marked * must be the same in
   every file; otherwise the program does not link. The others are read by the implementation only.

     MOE_IMPLEMENTATION   compile the code here: in exactly one file
     MOE_STATIC           make everything private to this file; implies MOE_IMPLEMENTATION
     MOE_REAL *           the number type: float (default) or double. In the double build each
                          public symbol ends in _f64 and only the plain C kernels exist
     MOE_NO_MATCH         omit the symbol that prevents linking files of different versions
     MOE_NO_SIMD          plain C kernels only
     MOE_NO_AVX512        no AVX-512 kernels
     MOE_NO_QUANT *       no int8 and int4 weights
     MOE_NO_TRAIN *       no _backward functions, no training. Implies MOE_NO_STDIO and
                          MOE_NO_MALLOC unless MOE_STDIO or MOE_MALLOC is defined
     MOE_NO_FLOAT *       integer models only: no floating point, no libm; implies MOE_NO_TRAIN
     MOE_NO_DSP           integer kernels in plain C: no Arm DSP or Helium instructions, no
                          assembly for ARMv6-M and AVR
     MOE_NO_PROGMEM *     AVR: constants of integer models stay in RAM
     MOE_NO_STDIO *       moe.h: no files by path (MOE_STDIO: keep them)
     MOE_NO_MALLOC        moe.h: no heap (MOE_MALLOC: keep it)
     MOE_NO_LIBM          no <math.h>: small functions of this header instead, see >>manual. Needs
                          MOE_NO_TRAIN and float. MOE_NO_TRAIN implies it in freestanding builds
                          and on AVR, unless MOE_LIBM is defined
     MOE_NO_MESSAGES      errors have their code and an empty message: 25 kB less of firmware
     MOE_KEEP_...         compile only some activations, scores, ...: see >>manual

   Only MOE_REAL changes the layout of structs. This header uses neither heap nor files. Measured
   sizes and times of the options: sh tests/bench/options.sh; of small boards:
   sh tests/port/devices.sh.

   >>glossary

     kernel          a function that does the bulk of the arithmetic for one instruction set
     table           moe_kernels: a constant struct with a kernel for every operation
     row stride      elements from one row of a matrix to the next (lda, ldb, ldc)
     orientation     how the operands of a product lie in memory: NT (y = x W^T), NN (dx = dy W),
                     TN (dW = dy^T x)
     accumulate      add the product to C instead of overwriting it
     block of 256    the part of the inner dimension that is summed on its own, then added to C
     tile            the rows x columns of C that a kernel keeps in registers
     panel           16 columns of the right operand stored next to each other
     quad, line      four numbers along k; the 64 bytes that hold a quad of each of 16 outputs
     code            the integer that stands for a quantized number: number = code * scale
     feature         an ability of the processor, a bit of moe_cpu_features
*/
#ifndef MOE_KERNELS_H
#define MOE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* ---- version ---- */

/* The version of these headers, as numbers and as text; moe_version() is that of the compiled
   code. */
#define MOE_VERSION_MAJOR 0
#define MOE_VERSION_MINOR 2
#define MOE_VERSION_PATCH 0
#define MOE_VERSION "0.2.0"

/* ---- options that shape the declarations ---- */

#ifndef MOE_REAL
#define MOE_REAL float
#endif

#define MOEI_REAL_float 1
#define MOEI_REAL_double 2
#define MOEI_JOIN_(a, b) a##b
#define MOEI_JOIN(a, b) MOEI_JOIN_(a, b)
/* 1 in the double build, else 0. */
#if MOEI_JOIN(MOEI_REAL_, MOE_REAL) == 2
#define MOE_REAL_IS_DOUBLE 1
#elif MOEI_JOIN(MOEI_REAL_, MOE_REAL) == 1
#define MOE_REAL_IS_DOUBLE 0
#else
#error "moe: MOE_REAL must be float or double"
#endif

#if defined(MOE_NO_FLOAT) && !defined(MOE_NO_TRAIN)
#define MOE_NO_TRAIN
#endif
#if defined(MOE_NO_TRAIN) && !defined(MOE_STDIO) && !defined(MOE_NO_STDIO)
#define MOE_NO_STDIO
#endif
#if defined(MOE_NO_TRAIN) && !defined(MOE_MALLOC) && !defined(MOE_NO_MALLOC)
#define MOE_NO_MALLOC
#endif
#if defined(MOE_STDIO) && defined(MOE_NO_STDIO)
#error "moe: MOE_STDIO and MOE_NO_STDIO contradict each other"
#endif
#if defined(MOE_MALLOC) && defined(MOE_NO_MALLOC)
#error "moe: MOE_MALLOC and MOE_NO_MALLOC contradict each other"
#endif
#if defined(MOE_NO_TRAIN) && !MOE_REAL_IS_DOUBLE && !defined(MOE_LIBM) && !defined(MOE_NO_LIBM) && \
    (defined(__AVR__) || __STDC_HOSTED__ == 0)
#define MOE_NO_LIBM
#endif
#if defined(MOE_LIBM) && defined(MOE_NO_LIBM)
#error "moe: MOE_LIBM and MOE_NO_LIBM contradict each other"
#endif
#if defined(MOE_NO_LIBM) && (!defined(MOE_NO_TRAIN) || MOE_REAL_IS_DOUBLE)
#error "moe: MOE_NO_LIBM needs MOE_NO_TRAIN and MOE_REAL float"
#endif

/* Precedes every public function: static with MOE_STATIC, else extern. */
#if defined(MOE_STATIC)
#ifndef MOE_IMPLEMENTATION
#define MOE_IMPLEMENTATION
#endif
#if defined(__GNUC__) || defined(__TINYC__)
#define MOE_API static __attribute__((unused))
#else
#define MOE_API static
#endif
#else
#define MOE_API extern
#endif
/* The same for private functions that exported constants name. */
#define MOEI_API MOE_API

/* >>renames: in the double build every public function carries the suffix _f64, so that objects of
   the two builds cannot be linked by mistake. */
#if MOE_REAL_IS_DOUBLE
#define moe_version moe_version_f64
#define moe_status_text moe_status_text_f64
#define moe_is_finite moe_is_finite_f64
#define moe_cpu_features moe_cpu_features_f64
#define moe_kernels_select moe_kernels_select_f64
#define moe_kernels_name moe_kernels_name_f64
#define moe_matmul moe_matmul_f64
#define moe_matmul_packed moe_matmul_packed_f64
#define moe_panel_size moe_panel_size_f64
#define moe_pack moe_pack_f64
#define moe_unpack moe_unpack_f64
#define moe_quantized_row_size moe_quantized_row_size_f64
#define moe_rows_quantize moe_rows_quantize_f64
#define moe_matmul_quantized moe_matmul_quantized_f64
#define moe_external_work_size moe_external_work_size_f64
#define moe_matmul_external moe_matmul_external_f64
#define moe_dot moe_dot_f64
#define moe_axpy moe_axpy_f64
#define moe_activate moe_activate_f64
#define moe_activate_backward moe_activate_backward_f64
#define moe_softmax moe_softmax_f64
#define moe_softmax_backward moe_softmax_backward_f64
#define moe_log_sum_exp moe_log_sum_exp_f64
#define moe_sigmoid moe_sigmoid_f64
#define moe_layer_norm moe_layer_norm_f64
#define moe_layer_norm_backward moe_layer_norm_backward_f64
#define moe_rms_norm moe_rms_norm_f64
#define moe_rms_norm_backward moe_rms_norm_backward_f64
#define moe_gated moe_gated_f64
#define moe_gated_backward moe_gated_backward_f64
#define moe_adamw moe_adamw_f64
#define moe_top_k moe_top_k_f64
#define moe_rng_seed moe_rng_seed_f64
#define moe_rng_next moe_rng_next_f64
#define moe_rng_below moe_rng_below_f64
#define moe_rng_uniform moe_rng_uniform_f64
#define moe_rng_normal moe_rng_normal_f64
#endif

/* >>manual

   Choosing a table. moe_kernels_select(MOE_KERNELS_AUTO) queries the processor and the operating
   system (CPUID and XGETBV on x86) and returns the best table that is compiled in. Call it once,
   keep the pointer and pass it to every call. NULL stands for the plain C table, which is also the
   only one on machines without vector kernels. On x86 (gcc, clang, MSVC) no compiler switch is
   needed: the kernels carry their own target attributes. NEON and WebAssembly SIMD are compiled in
   when the compiler may use them (gcc and clang: always on 64-bit Arm, otherwise with -mfpu=neon or
   -msimd128); on 64-bit Linux the processor is queried for sdot and i8mm. moe_matmul does nothing
   when the orientation or the type is invalid; an invalid activation acts as the identity.

   Order of summation. c = accumulate ? c : 0; then, for each block of 256 along the inner dimension
   in ascending order, c += the block's sum, which starts from 0 and adds its terms in ascending
   order. Consequences, bitwise, for one build and one table:
     - a row of C depends neither on m nor on the other rows; an element depends neither on n nor on
       the orientation;
     - alignment, strides and the number of threads that share the rows do not change any bit.
   This assumes that the compiler keeps IEEE arithmetic in the type's own precision (no -ffast-math,
   no x87). Between tables, builds and machines, results agree within rounding: AVX2 and NEON of
   64-bit Arm fuse each multiplication with its addition, WebAssembly does not, and plain C and NEON
   of 32-bit Arm do so if the build target has an instruction for it. The order of moe_dot is fixed
   in plain C only. Random numbers are bit-identical everywhere.

   Accuracy. Activations have a relative error below 3 epsilon of the type, gelu below 4; in their
   negative tails that of gelu_tanh grows by up to 2 x^2, and that of gelu in plain C, where it uses
   libm's erfc, by up to x^2. NaN stays NaN; infinities give the limit of the function. A NaN or
   +inf in the input of softmax makes all of its outputs NaN. NEON of 32-bit Arm treats subnormal
   numbers as 0 in products, moe_dot, moe_axpy and moei_multiply; everything else is plain C there.

   Non-finite numbers. Every function accepts every number; nothing traps, hangs or depends on the
   payload of a NaN. Sums and products follow IEEE 754, so 0 times infinity is NaN. All tables give
   NaN, infinity and finite results in the same elements, except where a partial sum overflows. A
   non-finite input affects only what is computed from it: an element of A affects its row of C, an
   element of B its column, an element of an array that is processed elementwise its own result, and
   an element of a row to be quantized that row. tests/property/robust.c checks all of this. None of
   it holds under -ffast-math.

   Quantized weights. moe_pack re-orders weights once into panels of 16 outputs, as 16-bit floats,
   int8 or 4-bit integers (the bytes: see "packed weights" below). moe_rows_quantize quantizes
   activations to int8, once for all products that read the same rows, and moe_matmul_quantized
   multiplies:
       // bytes of one panel; W[n,k] has ceil(n / 16) of them
       moe_panel_size(MOE_TYPE_Q8_BLOCK, k, &bytes);
       moe_pack(t, MOE_TYPE_Q8_BLOCK, n, k, w, k, packed, 1);
       // rows: m times moe_quantized_row_size(MOE_TYPE_Q8_BLOCK, k) bytes
       moe_rows_quantize(t, MOE_TYPE_Q8_BLOCK, m, k, x, k, rows);
       moe_matmul_quantized(t, MOE_TYPE_Q8_BLOCK, m, n, k, rows, packed, 1, y, n);
   On normally distributed inputs the relative root-mean-square error of a product is 1.1 % (Q8),
   0.8 % (Q8_BLOCK) and 9.1 % (Q4). The integer part of a product is exact, so tables differ only in
   the final rounding steps. Kernels exist for AVX512-VNNI, AVX-VNNI, AVX2, NEON of 64-bit Arm (sdot
   or i8mm if the processor has it), WebAssembly and plain C.

   Alignment and memory. No pointer needs more alignment than its type, and nothing outside the rows
   is read or written. Nothing allocates. Stack with gcc -O2, without libm's: in plain C below 400
   bytes for products and 1.2 KiB for the rest; below 20 KiB for a product with AVX2, NEON or
   WebAssembly SIMD, most of it the panel of 256 x 16; below 36 KiB with AVX-512, which packs two
   panels, and everywhere for 16-bit weights, which are widened on the stack (with AVX2 and AVX-512,
   up to 48 rows use registers). Packed floats take less than 1 KiB, quantized weights up to 5
   KiB, and matrices in files up to 52 KiB. The double build takes up to twice as much.

   Packed weights. A product whose right operand does not change reads it fastest in panels of 16
   columns, in the order in which the tiles consume them: moe_pack makes the panels once, and
   moe_matmul_packed multiplies with the bits of moe_matmul. While a tile is computed, what is read
   next is prefetched; a left operand of up to 192 rows is processed in pieces that stay in the
   second-level cache (assumed to have at least 512 KiB). Few rows read several panels side by
   side, prefetched where a layer's call reads more than 32 MiB of weights (on AMD's Zen 3 and 4
   then one after the other).

   Pointers. k, a table of kernels, may be NULL everywhere: plain C. The description of a function
   says which other pointers may be NULL. Every other pointer points to as many elements as the
   function uses; it is not checked for NULL unless the description says so (MOE_ERR_ARGUMENT).

   Threads. There is no mutable global state: any number of threads may call any function at the
   same time as long as their outputs differ. A moe_rng belongs to one thread at a time. With
   moe_parallel a caller provides threads to the calls of moe.h.

   Names of kernels. moei_<type>_<operation or tile>_<instruction set>; "real" stands for the type
   of the build, "v4" for vectors of four (NEON, WebAssembly).

   Adding an instruction set. Write the kernels that gain from it, put them into another constant
   table whose other entries are plain C, give it a MOE_KERNELS_ number and a name, and let
   moe_kernels_select return it when moe_cpu_features reports the features it needs. Keep the order
   of summation: let vectors run along the columns of C. tests/unit/kernels.c tests every table that
   moe_kernels_select returns.

   >>porting
     Machine    8-bit bytes, two's complement, >> of a negative number rounds down, int8_t to
                int64_t, IEEE float (or double) without excess precision. int may have 16 bits
                (AVR), pointers and size_t 16 to 64; byte order and the signedness of char do not
                matter.
     Compiler   C99 without variable-length arrays, complex numbers and designated initializers, or
                C++11. Vectors and inline assembly are used with gcc, clang and MSVC; any other
                compiler gets plain C, as do all with MOE_NO_SIMD and MOE_NO_DSP. pcc compiles
                !(a > b) as a <= b, so the statements about NaN do not hold there. x87 rounds sums
                twice: results then agree within rounding.
     Library    exp, log, log1p, sqrt, tanh, erfc, fabs (and fma where it is an instruction) in the
                type of the build, in moe_routers.h and moe.h also pow, ceil, floor, sin and cos and
                some of them in double, or MOE_NO_LIBM; memcpy, memmove, memset and the rest of
                <string.h>. Files and heap can be left out; threads, locale and time are not used,
                errno only by files.
     Bare metal See "freestanding builds"; MOE_NO_FLOAT on processors without floating point.
                Constants stay in flash; there is no initialization at startup.
     Linker     Files of different versions do not link (see moe_version): through a reference that
                compilers keep, with MSVC through detect_mismatch.
     Testing    CC="compiler -options" sh tests/run kernels golden robust    runs the core tests;
                sh tests/port/portability.sh has one row per compiler and machine (also emulated);
                sh tests/port/devices.sh has boards without an operating system.
     Vectors    See "adding an instruction set" above; moe_cpu_features queries the processor.

   Leaving stages out. Small builds may keep only what their models use: each macro below is a mask
   with bit i for value i of an enumeration; by default all bits are set.
     MOE_KEEP_ACTS     MOE_ACT_       MOE_KEEP_SCORES   MOE_SCORE_     MOE_KEEP_GATES    MOE_GATE_
     MOE_KEEP_SELECTS  MOE_SELECT_    MOE_KEEP_WEIGHTS  MOE_WEIGHT_    MOE_KEEP_INPUTS   MOE_INPUT_
     MOE_KEEP_REFINES  MOE_REFINE_    MOE_KEEP_MODULES  MOE_MODULE_    MOE_KEEP_EXTRAS   MOE_EXTRA_
   Only the implementation reads them. A call that needs a stage that was left out fails with
   MOE_ERR_UNSUPPORTED, and moe_router_check names the stage; in plain C moe_activate and moe_gated
   take the identity for an activation that was left out. Headers written by moe_export_c set the
   masks for float models, and MOE_NO_MESSAGES with them.

   Freestanding builds (__STDC_HOSTED__ == 0, as with -ffreestanding) include only <stddef.h>,
   <stdint.h>, <float.h> and <stdarg.h> if MOE_NO_TRAIN is defined. They need memcpy, memmove and
   memset, which compilers require of every program, and the compiler's runtime library. On x86
   gcc's <immintrin.h> also needs <stdlib.h>: define MOE_NO_SIMD where there is none. The largest
   errors of the libm fallback (MOE_NO_LIBM), in units in the last place of float (checked by
   tests/unit/small.c): exp 1.5, log 1.5, log1p 2, tanh 3, erfc 8, sqrt 0.5, pow 1 (for bases >= 0).
   Subnormal results are rounded once more. */

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>declarations ==== */

/* The number type of the whole build: float, or double when MOE_REAL says so. */
typedef MOE_REAL moe_real;

/* Version of the compiled implementation, "major.minor.patch"; a constant string. Thread-safe. */
MOE_API const char *moe_version(void);

/* Files compiled with headers of different versions, or with different MOE_REAL, do not link: the
   file with the implementation defines a constant whose name contains version and type, and all
   other files refer to the constant of their own headers. "undefined reference to
   moe_headers_are_of_version_0_2_0" means that the implementation has another version or that no
   file has it. MOE_NO_MATCH removes the reference. It takes no memory if the linker removes unused
   data. */
#if !defined(MOE_STATIC)
#if defined(__AVR__) && defined(MOE_NO_PROGMEM)
#define MOEI_MATCH_PROGMEM _no_progmem
#else
#define MOEI_MATCH_PROGMEM
#endif
#if MOE_REAL_IS_DOUBLE
#define MOEI_MATCH_REAL _f64
#else
#define MOEI_MATCH_REAL
#endif
#define MOEI_MATCH_VERSION \
    MOEI_JOIN(MOEI_JOIN(MOE_VERSION_MAJOR, MOEI_JOIN(_, MOE_VERSION_MINOR)), MOEI_JOIN(_, MOE_VERSION_PATCH))
#define MOEI_MATCH \
    MOEI_JOIN(moe_headers_are_of_version_, \
              MOEI_JOIN(MOEI_MATCH_VERSION, MOEI_JOIN(MOEI_MATCH_PROGMEM, MOEI_MATCH_REAL)))
extern const unsigned char MOEI_MATCH;
#if !defined(MOE_NO_MATCH) && defined(_MSC_VER) /* the linker compares the values */
#if MOE_REAL_IS_DOUBLE
#pragma detect_mismatch("moe_headers_are_of_version", MOE_VERSION "_f64")
#else
#pragma detect_mismatch("moe_headers_are_of_version", MOE_VERSION)
#endif
#elif !defined(MOE_NO_MATCH) && !defined(MOE_IMPLEMENTATION)
#if defined(__has_attribute) && defined(__linux__) && defined(__ELF__)
#if __has_attribute(__retain__)
#define MOEI_MATCH_KEPT __attribute__((__used__, __retain__))
#endif
#endif
#if !defined(MOEI_MATCH_KEPT) && defined(__GNUC__)
#define MOEI_MATCH_KEPT __attribute__((__used__))
#elif !defined(MOEI_MATCH_KEPT)
#define MOEI_MATCH_KEPT
#endif
static const unsigned char *const moei_match MOEI_MATCH_KEPT = &MOEI_MATCH;
#endif
#endif

/* ---- status codes ---- */

/* Every call that can fail returns one of these; 0 is success, the rest are negative. */
typedef int moe_status;

/* The codes, their values and their texts. */
#define MOE_STATUS_LIST(X) \
    X(MOE_OK, 0, "success") \
    X(MOE_ERR_MEMORY, -1, "out of memory: the allocator returned NULL") \
    X(MOE_ERR_ARGUMENT, -2, "an argument is missing or out of range") \
    X(MOE_ERR_CONFIG, -3, "the configuration is not valid") \
    X(MOE_ERR_SHAPE, -4, "the shapes do not match") \
    X(MOE_ERR_SPACE, -5, "the memory provided by the caller is too small") \
    X(MOE_ERR_OVERFLOW, -6, "a size exceeds size_t of this machine") \
    X(MOE_ERR_NONFINITE, -7, "a number is infinite or NaN") \
    X(MOE_ERR_IO, -8, "reading or writing failed") \
    X(MOE_ERR_FORMAT, -9, "the file is malformed") \
    X(MOE_ERR_UNSUPPORTED, -10, "not supported by this version or on this machine") \
    X(MOE_ERR_NOT_FOUND, -11, "no item has that name") \
    X(MOE_ERR_STATE, -12, "the object is in the wrong state for this call") \
    X(MOE_ERR_STOPPED, -13, "a callback asked to stop") \
    X(MOE_ERR_PEER, -14, "another process of the group failed") \
    X(MOE_ERR_TRANSPORT, -15, "the transport between processes failed")

enum {
#define MOEI_STATUS_CODE(name, value, text) name = value,
    MOE_STATUS_LIST(MOEI_STATUS_CODE)
#undef MOEI_STATUS_CODE
        MOEI_STATUS_END = 1
};

/* One English sentence for a status; "unknown status" for an unknown number. Never NULL.
   Thread-safe. */
MOE_API const char *moe_status_text(moe_status status);

/* Filled in by calls that check a configuration or parse a file: the code and one line that names
   the field or the byte offset and the offending value. Optional everywhere: NULL is allowed.
   Unchanged on success. The text is always terminated; with MOE_NO_MESSAGES it is empty. */
typedef struct moe_error {
    moe_status code;
    char message[228];
} moe_error;

#ifndef MOE_NO_FLOAT
/* ---- the machine ---- */

/* Bits of moe_cpu_features. A bit is set only when the processor has the feature and the operating
   system saves its registers. */
enum {
    MOE_CPU_AVX2 = 1,
    MOE_CPU_FMA = 2,
    MOE_CPU_AVX512F = 4,
    MOE_CPU_AVX512VNNI = 8,
    MOE_CPU_AVXVNNI = 16,
    MOE_CPU_NEON = 32,
    MOE_CPU_DOTPROD = 64,
    MOE_CPU_WASM_SIMD = 128,
    MOE_CPU_F16C = 256,
    MOE_CPU_I8MM = 512
};

/* The features of this processor and operating system, as MOE_CPU_ bits; 0 if unknown. Queries the
   processor on every call (slow in virtual machines: keep the result). Thread-safe. */
MOE_API unsigned moe_cpu_features(void);

/* ---- threads ---- */

/* How the caller runs tasks on several threads; the library creates no threads of its own. {0}: one
   thread. */
typedef struct moe_parallel {
    void *ctx;
    /* largest number of tasks that run at once; below 2: the calling thread does everything */
    int threads;
    /* 1: use threads even when starting tasks costs more than it gains [0] */
    int always;
    /* Calls task(work, i) once for every i from 0 to count - 1, in any order and on any threads,
       and returns when all are done. */
    void (*run)(void *ctx, void (*task)(void *work, int index), void *work, int count);
} moe_parallel;

/* ---- kernel tables ---- */

/* Instruction sets that can have a table. 0 selects the best one that is compiled in and that the
   machine supports. */
enum {
    MOE_KERNELS_AUTO = 0,
    MOE_KERNELS_C = 1,
    MOE_KERNELS_AVX2 = 2,
    MOE_KERNELS_AVX512 = 3,
    MOE_KERNELS_NEON = 4,
    MOE_KERNELS_WASM = 5,
    MOE_KERNELS_COUNT = 6
};

/* How weights are stored: as moe_real; as 16-bit floats; as int8 with a scale per output or per
   block of 32; as 4-bit integers with a scale per block of 32. See "packed weights" below.
   moe_matmul accepts MOE_TYPE_REAL only. */
enum {
    MOE_TYPE_REAL = 0,
    MOE_TYPE_F16 = 1,
    MOE_TYPE_BF16 = 2,
    MOE_TYPE_Q8 = 3,
    MOE_TYPE_Q8_BLOCK = 4,
    MOE_TYPE_Q4 = 5,
    MOE_TYPE_COUNT = 6
};

/* Orientations of a product, by how the operands lie in memory (row-major, rows lda, ldb, ldc
   elements apart):
     NT  C[m,n] = A[m,k] . B[n,k]^T    forward:  y  = x W^T
     NN  C[m,n] = A[m,k] . B[k,n]      backward: dx = dy W
     TN  C[m,n] = A[k,m]^T . B[k,n]    backward: dW = dy^T x */
enum { MOE_MATMUL_NT = 0, MOE_MATMUL_NN = 1, MOE_MATMUL_TN = 2, MOE_MATMUL_COUNT = 3 };

/* C (+)= product. m, n, k may be 0 (k = 0 gives 0). accumulate = 0 overwrites C, 1 adds to it. A
   stride is at least the length of its row. C overlaps neither operand. No alignment is needed;
   nothing outside the rows is read or written. Every C[i,j] is summed over k in ascending order in
   blocks of 256; each block is summed on its own and then added, so for one table a row of C does
   not depend on m, bitwise. */
typedef void moe_matmul_fn(size_t m, size_t n, size_t k, const moe_real *a, size_t lda, const void *b, size_t ldb,
                           moe_real *c, size_t ldc, int accumulate);

/* C[m,n] (+)= A . W^T with the rows of W packed (moe_pack) in panels of 16; panel is the distance
   in elements from one panel to the next; element (i,p) of A is a[i * ra + p * ca]. Same order of
   summation and same bits as moe_matmul. */
typedef void moe_panels_fn(size_t m, size_t n, size_t k, const moe_real *a, size_t ra, size_t ca, const moe_real *b,
                           size_t panel, moe_real *c, size_t ldc, int accumulate);
/* C[m][16 panels] = the product of moe_matmul_quantized for whole panels, panel_stride bytes apart;
   rows are row_size bytes apart. inner > 0. All 16 columns of each panel are written. */
typedef void moe_quantized_fn(size_t m, size_t panels, size_t inner, const void *rows, size_t row_size,
                              const void *packed, size_t panel_stride, moe_real *c, size_t ldc);
/* moe_rows_quantize for a quantized type. */
typedef void moe_quantize_fn(int type, size_t m, size_t inner, const moe_real *x, size_t ldx, void *rows);
/* out[count][16] = the values of count steps [count][16] of a panel of MOE_TYPE_F16 or
   MOE_TYPE_BF16, exactly. packed needs no alignment. */
typedef void moe_widen_fn(int type, size_t count, const void *packed, moe_real *out);
/* One or two panels of weights that moe_matmul_external has unpacked to bytes, times quantized
   rows. */
struct moei_code_panels;
typedef void moei_unpacked_fn(const struct moei_code_panels *p);
/* Private: moe_matmul_packed of 16-bit weights for few rows. */
typedef void moei_half_fn(int type, size_t m, size_t n, size_t inner, const moe_real *a, size_t lda,
                          const unsigned char *packed, moe_real *c, size_t ldc);

/* Activations. Columns: private functions of one number: act(x), dy act'(x). */
#define MOE_ACTS(X) \
    X(MOE_ACT_RELU, "relu", moei_relu, moei_relu_backward)     /* max(x, 0) */ \
    X(MOE_ACT_SILU, "silu", moei_silu, moei_silu_backward)     /* x sigmoid(x) */ \
    X(MOE_ACT_GELU, "gelu", moei_gelu, moei_gelu_backward)     /* x Phi(x), exact */ \
    X(MOE_ACT_TANH, "tanh", MOEI_F(tanh), moei_tanh_backward) \
    X(MOE_ACT_SIGMOID, "sigmoid", moe_sigmoid, moei_sigmoid_backward) \
    X(MOE_ACT_IDENTITY, "identity", moei_same, moei_same_backward) \
    /* 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks, Gimpel 2016, Gaussian error \
       linear units) */ \
    X(MOE_ACT_GELU_TANH, "gelu_tanh", moei_gelu_tanh, moei_gelu_tanh_backward) \
    /* max(x, 0)^2 (So et al. 2021, Primer: searching for efficient transformers) */ \
    X(MOE_ACT_RELU2, "relu2", moei_relu2, moei_relu2_backward)
#define MOEI_VALUE4(value, name, f, g) value,
enum { MOE_ACTS(MOEI_VALUE4) MOE_ACT_COUNT };

/* The parameters of AdamW step n; see moe_adamw. */
typedef struct moe_adamw_step {
    moe_real scale; /* of the gradient */
    moe_real lr, beta1, beta2, epsilon, weight_decay;
    /* bias correction of the moments: 1 / (1 - beta1^n), 1 / (1 - beta2^n) */
    moe_real correction1, correction2;
} moe_adamw_step;

/* One constant, complete table per instruction set; an operation without a faster kernel has the
   plain C one. The functions below define what each entry computes. Tables never change and are
   shared by all threads. */
typedef struct moe_kernels {
    const char *name; /* "c", "avx2", ... */
    int id;           /* MOE_KERNELS_C, ... */
    moe_matmul_fn *matmul[MOE_MATMUL_COUNT][MOE_TYPE_COUNT];
    moe_real (*dot)(size_t n, const moe_real *a, const moe_real *b);
    void (*axpy)(size_t n, moe_real alpha, const moe_real *x, moe_real *y);
    /* axpy for each alpha[i] and row i of x, one after the other */
    void (*axpy_rows)(size_t count, size_t n, const moe_real *alpha, const moe_real *x, size_t ldx, moe_real *y);
    void (*activate)(int act, size_t n, const moe_real *x, moe_real *y);
    /* may be NULL with MOE_NO_TRAIN */
    void (*activate_backward)(int act, size_t n, const moe_real *x, const moe_real *dy, moe_real *dx);
    void (*softmax)(size_t n, const moe_real *x, moe_real temperature, moe_real *y);
    size_t (*top_k)(size_t n, const moe_real *score, size_t k, int32_t *index);
    void (*multiply)(size_t n, const moe_real *a, const moe_real *b, moe_real *y);
    void (*dispersion)(int squared, size_t count, const int32_t *rows, size_t n, const moe_real *x, size_t ldx,
                       const moe_real *mean, moe_real *y);
    moe_real (*log_posterior)(size_t n, moe_real scale, const moe_real *shift, const moe_real *prior, moe_real *y);
    moe_real (*exp_sum)(size_t n, moe_real max, moe_real *y);
    moe_real (*entropy)(size_t n, const moe_real *p);
    moe_panels_fn *panels;
    void (*gated)(int act, size_t m, size_t n, const moe_real *x, size_t ldx, const moe_real *times, size_t ldt,
                  moe_real *y, size_t ldy);
    void (*gated_backward)(int act, size_t n, const moe_real *x, const moe_real *times, const moe_real *dy,
                           moe_real *dx, moe_real *d_times); /* may be NULL with MOE_NO_TRAIN */
    /* may be NULL with MOE_NO_TRAIN */
    void (*adamw)(const moe_adamw_step *step, size_t n, const moe_real *gradient, moe_real *m, moe_real *v,
                  moe_real *w);
    /* the bits of panels, for weights that come from memory and not from a cache; may equal panels,
       not NULL */
    moe_panels_fn *streamed;
    /* NULL for types that are not quantized; with MOE_NO_QUANT these, quantize and unpacked are
       NULL */
    moe_quantized_fn *quantized[MOE_TYPE_COUNT];
    moe_quantize_fn *quantize;
    moe_widen_fn *widen;
    moei_half_fn *half; /* NULL: panels are widened in memory for few rows too */
    moei_unpacked_fn *unpacked;
} moe_kernels;

/* The table for want (MOE_KERNELS_...), or NULL if it is not compiled in or the machine cannot run
   it. MOE_KERNELS_AUTO and MOE_KERNELS_C never give NULL. Call it once and keep the result (it
   queries the processor). Thread-safe. */
MOE_API const moe_kernels *moe_kernels_select(int want);

/* The short name of an instruction set ("auto", "c", "avx2", "avx512", "neon", "wasm"), or NULL for
   an unknown number. */
MOE_API const char *moe_kernels_name(int id);

/* ---- operations: k is a table, NULL means plain C; n may be 0; thread-safe ---- */

/* C (+)= A . B in orientation op with B stored as type; see moe_matmul_fn. */
MOE_API void moe_matmul(const moe_kernels *k, int op, int type, size_t m, size_t n, size_t inner, const moe_real *a,
                        size_t lda, const void *b, size_t ldb, moe_real *c, size_t ldc, int accumulate);
/* C[m,n] = A . W^T, W [n,inner] packed with stride 1 as MOE_TYPE_REAL, F16 or BF16. Arithmetic and
   order of summation are those of moe_matmul: the same bits as with unpacked weights of that
   precision. Does nothing for other types: use moe_matmul_quantized. */
MOE_API void moe_matmul_packed(const moe_kernels *k, int type, size_t m, size_t n, size_t inner, const moe_real *a,
                               size_t lda, const void *packed, moe_real *c, size_t ldc);
/* sum_i a_i b_i; in the plain C table in ascending order in blocks of 256, in other tables within
   rounding. */
MOE_API moe_real moe_dot(const moe_kernels *k, size_t n, const moe_real *a, const moe_real *b);
/* y_i += alpha x_i. */
MOE_API void moe_axpy(const moe_kernels *k, size_t n, moe_real alpha, const moe_real *x, moe_real *y);
/* y_i = act(x_i), act one of MOE_ACT_; y may be x. */
MOE_API void moe_activate(const moe_kernels *k, int act, size_t n, const moe_real *x, moe_real *y);
#ifndef MOE_NO_TRAIN
/* dx_i = dy_i act'(x_i), x the input of the activation. The slopes of relu and relu2 at 0 are 0,
   relu'(NaN) = 1; where x_i <= 0 both give 0 whatever dy_i is, and relu does not multiply. dx may
   be dy. */
MOE_API void moe_activate_backward(const moe_kernels *k, int act, size_t n, const moe_real *x, const moe_real *dy,
                                   moe_real *dx);
#endif
/* y_i = exp(x_i/T - m) / sum_j exp(x_j/T - m), m the maximum; T = temperature > 0; y may be x. -inf
   gives exactly 0; all -inf gives all 0. */
MOE_API void moe_softmax(const moe_kernels *k, size_t n, const moe_real *x, moe_real temperature, moe_real *y);
#ifndef MOE_NO_TRAIN
/* dx_i += y_i (dy_i - sum_j y_j dy_j) / T, y the output of the softmax. If any dy_j is not finite,
   no dx_i is. */
MOE_API void moe_softmax_backward(size_t n, const moe_real *y, const moe_real *dy, moe_real temperature, moe_real *dx);
#endif
/* log sum_i exp(x_i), shifted by the maximum so that it cannot overflow; -inf if n = 0 or all x_i
   are -inf, NaN if any x_i is. */
MOE_API moe_real moe_log_sum_exp(size_t n, const moe_real *x);
/* 1 / (1 + exp(-x)), without overflow for any x; 0 and 1 for the infinities. */
MOE_API moe_real moe_sigmoid(moe_real x);
/* One row: y = (x - mean) * rstd * gain + bias, rstd = 1/sqrt(var + eps), population variance (Ba,
   Kiros, Hinton 2016, Layer normalization). gain, bias [n] or NULL (1, 0). mean, rstd receive the
   statistics for the backward pass; may be NULL. y may be x. Where the sum of (x - mean)^2
   overflows (3e38, 1e308 in the double build) rstd is 0 and y is bias. NaN or infinity in x or in
   its sum makes all of y NaN. */
MOE_API void moe_layer_norm(size_t n, const moe_real *x, const moe_real *gain, const moe_real *bias, moe_real eps,
                            moe_real *y, moe_real *mean, moe_real *rstd);
#ifndef MOE_NO_TRAIN
/* One row: dx += ..., dgain += dy * xhat, dbias += dy; gain, dgain, dbias may be NULL; dx may be
   NULL; dx must not be dy. */
MOE_API void moe_layer_norm_backward(size_t n, const moe_real *x, const moe_real *gain, moe_real mean, moe_real rstd,
                                     const moe_real *dy, moe_real *dx, moe_real *dgain, moe_real *dbias);
#endif
/* One row: y = x * rrms * gain, rrms = 1/sqrt(mean x^2 + eps) (Zhang, Sennrich 2019, Root mean
   square layer normalization). If the sum of squares overflows, or if an x is infinite, rrms and y
   are 0, except that the y of an infinite x is NaN. A NaN in x makes all of y NaN. */
MOE_API void moe_rms_norm(size_t n, const moe_real *x, const moe_real *gain, moe_real eps, moe_real *y, moe_real *rrms);
#ifndef MOE_NO_TRAIN
/* One row: dx += ..., dgain += dy * x * rrms; gain, dgain, dx may be NULL. */
MOE_API void moe_rms_norm_backward(size_t n, const moe_real *x, const moe_real *gain, moe_real rrms, const moe_real *dy,
                                   moe_real *dx, moe_real *dgain);
#endif
/* m rows: y = act(x) * times, elementwise, or act(x) where times is NULL; rows ldx, ldt, ldy apart.
   y may be x or times. */
MOE_API void moe_gated(const moe_kernels *k, int act, size_t m, size_t n, const moe_real *x, size_t ldx,
                       const moe_real *times, size_t ldt, moe_real *y, size_t ldy);
#ifndef MOE_NO_TRAIN
/* The backward pass of one row of moe_gated: dx = dy times act'(x), d_times = dy act(x). dx and
   d_times may be dy, but not each other. */
MOE_API void moe_gated_backward(const moe_kernels *k, int act, size_t n, const moe_real *x, const moe_real *times,
                                const moe_real *dy, moe_real *dx, moe_real *d_times);
/* One step of AdamW (Loshchilov, Hutter 2019, Decoupled weight decay regularization) on n weights w
   and their moments m, v, which start at 0:
       g = scale gradient_i
       m_i = beta1 m_i + (1 - beta1) g
       v_i = beta2 v_i + (1 - beta2) g^2
       w_i -= lr (m_i correction1 / (sqrt(v_i correction2) + epsilon) + weight_decay w_i)
   The bits of a weight depend neither on n nor on its index. |g| above 1e19 (1e154 in the double
   build) can make v infinite, and the weight then changes by its decay only; the trainer refuses
   such gradients beforehand. */
MOE_API void moe_adamw(const moe_kernels *k, const moe_adamw_step *step, size_t n, const moe_real *gradient,
                       moe_real *m, moe_real *v, moe_real *w);
#endif
/* The indices of the k largest of score[n], in descending order of score; of equal scores the lower
   index comes first. -inf and NaN are never selected. Returns the number of indices written, at
   most min(k, n). */
MOE_API size_t moe_top_k(size_t n, const moe_real *score, size_t k, int32_t *index);
/* 1 if x is neither infinite nor NaN. Tests the bits, so it also works under -ffast-math. */
MOE_API int moe_is_finite(moe_real x);

/* ---- packed weights ---- */

/* The weights W[n,k] of a linear map y = x W^T, re-ordered once so that a kernel reads them in one
   stream: in panels of 16 outputs (rows of W), the last one padded with zeros. Consecutive panels
   are stride panels apart (1: contiguous), so that two matrices can alternate in one buffer.
   Contents of a panel:
     MOE_TYPE_REAL             [k][16] moe_real
     MOE_TYPE_F16, _BF16       [k][16] 16-bit floats (IEEE binary16, or the upper half of binary32)
     MOE_TYPE_Q8               [k/4][16][4] bytes w + 128, then one float scale for each of the 16
                               outputs
     MOE_TYPE_Q8_BLOCK         the same bytes, then [k/32][16] scales in binary16: one per block of
                               32 along k
     MOE_TYPE_Q4               [k/32][4][16][4] bytes, then scales as in Q8_BLOCK; byte [b][g][j][t]
                               holds element 32 b + 4 g + t of output j in its low four bits and
                               element 32 b + 4 g + t + 16 in its high four bits, each as w + 8
   In the last three types k is rounded up to 32 with zero weights, a weight is w * scale with |w|
   <= 127 or -8 <= w <= 7, and the size is a multiple of 64 bytes. Elements wider than a byte have
   the machine's byte order. Without MOE_NO_QUANT all types work in every build; with it the last
   three give MOE_ERR_UNSUPPORTED. Only panels of MOE_TYPE_REAL need alignment (that of moe_real);
   panels are fastest when aligned to 64 bytes. */

/* *bytes = the size of one panel. inner is k, and may be 0. MOE_ERR_ARGUMENT: unknown type, or
   bytes is NULL; MOE_ERR_OVERFLOW. Thread-safe. */
MOE_API moe_status moe_panel_size(int type, size_t inner, size_t *bytes);
/* Packs w [n,inner], rows ldw apart, into ceil(n/16) panels. 16-bit floats are rounded to nearest
   even; NaN stays NaN; values out of range become infinite. The other types are quantized by the
   usual rules, but with the scale as it is stored, so that each code is the best one for that
   scale; programs that divide by the scale before rounding it may differ by one unit:
     Q8, Q8_BLOCK   scale = max |x| / 127 of a row or block
                    w = x / scale, rounded to nearest, ties away from 0
     Q4             scale = x of the largest |x| (the first) / -8
                    w = floor(x / scale + 8.5) - 8, at most 7
   A scale that underflows makes its weights 0. MOE_ERR_NONFINITE: a weight to be quantized is not
   finite; MOE_ERR_OVERFLOW: a scale is too large for its type (|x| above 8.3e6, in Q4 above
   524000), or a size overflows; MOE_ERR_ARGUMENT: unknown type, or stride = 0. On error packed is
   unchanged. k is a table or NULL. Thread-safe. */
MOE_API moe_status moe_pack(const moe_kernels *k, int type, size_t n, size_t inner, const moe_real *w, size_t ldw,
                            void *packed, size_t stride);
/* w [n,inner] = the weights in packed, converted to the type of the build. Errors as moe_pack.
   Thread-safe. */
MOE_API moe_status moe_unpack(int type, size_t n, size_t inner, const void *packed, size_t stride, moe_real *w,
                              size_t ldw);

#ifndef MOE_NO_QUANT
/* Bytes of one row of activations quantized for weights of type: int8 [inner rounded up to 32,
   padded with zeros], then the scales (moe_real; one, or one per block of 32 for types with
   blocks), then for each scale (Q8: for each 65536 of inner) an int32, the initial value of the
   sum, which cancels the offset of the weights: -128 times (Q4: -8 times) the sum of the int8
   values. The size is an odd number of cache lines of 64 bytes, so that neighboring rows do not map
   to the same cache sets. 0 for a type that is not quantized, or if the size overflows.
   Thread-safe. */
MOE_API size_t moe_quantized_row_size(int type, size_t inner);
/* Quantizes x [m,inner], rows ldx apart, into rows [m] of moe_quantized_row_size(type, inner) bytes
   each, of any alignment (64 is fastest):
     scale = max |x| / 127,   q = x * (127 / max |x|), rounded to nearest even
   over the row or each block of 32. A group whose largest |x| is below 64 times the smallest normal
   number becomes all zeros. A non-finite value makes the scale of its group NaN, and with it the
   row of the product. All tables give the same bits. Does nothing for a type that is not quantized.
   Thread-safe. */
MOE_API void moe_rows_quantize(const moe_kernels *k, int type, size_t m, size_t inner, const moe_real *x, size_t ldx,
                               void *rows);
/* C[m,n] = x W^T for m rows of moe_rows_quantize and W packed as type; C is overwritten; columns
   from n on are not written.
     c_ij = sum over groups g of (sum over p in g of q_ip w_jp) * (scale_jg * scale_ig)
   The inner sums are exact integers (Q8: in pieces of 65536). The outer sum is in the type of the
   build, in ascending order from 0, each product fused with its addition if the table's instruction
   set can, so tables agree within rounding. For one table the bits of a row depend neither on m nor
   on the other rows. inner = 0 gives 0. Does nothing for a type that is not quantized.
   Thread-safe. */
MOE_API void moe_matmul_quantized(const moe_kernels *k, int type, size_t m, size_t n, size_t inner, const void *rows,
                                  const void *packed, size_t stride, moe_real *c, size_t ldc);
#endif

/* ---- weights that lie in other programs' files ---- */

/* A matrix W [n,k] whose rows are blocks of another program's type, read where they lie: in a
   mapped file, at any alignment. Nothing is copied. The types are constants of an extra
   (moe_import.h has those of GGUF and of safetensors). */
typedef struct moe_external moe_external;

/* A type of blocks. */
typedef struct moe_external_type {
    const char *name;  /* "Q4_K" */
    int block, bytes;  /* numbers and bytes of a block; block divides 256 */
    /* values[count] = elements from .. from + count - 1 of a row, rounded once; both are multiples
       of block. k is a table, not NULL. */
    void (*unpack)(const moe_kernels *k, const moe_external *w, size_t row, size_t from, size_t count,
                   moe_real *values);
    /* numbers that share a scale, 32 or 16, for products with quantized activations; 0: there are
       none, and fill is NULL */
    int group;
    int minima; /* 1: a value is scale * code - minimum, 0: scale * code */
    /* The same elements of 16 rows, the last one again for those from row + rows on, as a panel:
         codes [count/4][16][4]             code + 128
         scales, minima [count/group][16]   minima: only if the type has them */
    void (*fill)(const moe_kernels *k, const moe_external *w, size_t row, size_t rows, size_t from, size_t count,
                 unsigned char *codes, moe_real *scales, moe_real *minima);
    /* Private: c[n] = the products of one quantized row of activations with rows of W as they lie,
       from `row` on: as many of the n as it returns. NULL: there is no such kernel for the type */
    size_t (*direct)(const moe_kernels *k, const moe_external *w, size_t row, size_t n, size_t inner,
                     const unsigned char *x, moe_real *c);
} moe_external_type;

/* Where a matrix lies; the bytes are the caller's and stay there. Element (j,p) is number
   p % block of the block at data + j * row + p / block * column, times the scale at
   scales + j / scale_rows * scale_row + p / scale_columns * (bytes of a scale) if the type keeps
   scales apart. So the strides also describe matrices whose rows alternate with others, and
   transposed ones (block = 1). */
struct moe_external {
    const moe_external_type *type; /* NULL: there is no matrix */
    const unsigned char *data;     /* the first block of row 0 */
    size_t row, column;            /* bytes from one block to the next: of the next row, of the same row */
    const unsigned char *scales;   /* of types that keep them apart */
    size_t scale_row;              /* bytes from one row of scales to the next */
    int scale_rows, scale_columns; /* rows and columns of W that share a scale; at least 1 if scales is set */
    int exact;                     /* 1: activations are not quantized */
};

/* Bytes of work that moe_matmul_external takes for m rows of x; 0: none, or the size overflows.
   Thread-safe. */
MOE_API size_t moe_external_work_size(const moe_external *w, size_t m, size_t inner);
/* C[m,n] = x W^T with rows first .. first + n - 1 of W; C is overwritten. work
   [moe_external_work_size(w, m, inner)] may be NULL where that is 0. With w->exact, and for types
   that have no kernels for quantized activations, the bits are those of moe_matmul with unpacked
   weights. For one table a row of C depends neither on m nor on the other rows nor on first.
   Thread-safe. */
MOE_API void moe_matmul_external(const moe_kernels *k, const moe_external *w, size_t first, size_t m, size_t n,
                                 size_t inner, const moe_real *x, size_t ldx, void *work, moe_real *c, size_t ldc);

/* ---- random numbers ---- */

/* splitmix64 (Steele, Lea, Flood 2014, Fast splittable pseudorandom number generators): 64 bits of
   explicit state, period 2^64, the same stream on every machine. Saving the struct saves the
   stream. One generator belongs to one thread at a time. {0} is a valid seed. */
typedef struct moe_rng {
    uint64_t state;
} moe_rng;

/* Starts a stream; every seed is valid. */
MOE_API void moe_rng_seed(moe_rng *rng, uint64_t seed);
/* 64 random bits. */
MOE_API uint64_t moe_rng_next(moe_rng *rng);
/* Uniform integer in [0, n), without bias; 0 for n = 0. */
MOE_API uint64_t moe_rng_below(moe_rng *rng, uint64_t n);
/* Uniform in [0, 1) on a grid of 2^-24 (float) or 2^-53 (double); one draw of the stream. */
MOE_API moe_real moe_rng_uniform(moe_rng *rng);
/* Standard normal, by Teichroew's polynomial on a sum of twelve uniforms (Abramowitz and Stegun
   1964, 26.8.6) in fixed-point arithmetic: no libm, the same bits on every machine; |x| < 8.7. Six
   draws of the stream. */
MOE_API moe_real moe_rng_normal(moe_rng *rng);
#endif /* MOE_NO_FLOAT */

/* ---- integer models without floating point ---- */

/* Everything here is exact: the same results on every machine. >> on a negative number rounds down
   (an arithmetic shift, as in every supported compiler), clamp(v) limits v to a shape's low and
   high, round = 1 << (shift - 1), or 0 for shift = 0.
     vector   int16_t[width rounded up to 4], aligned to 4 bytes, zeros after its width;
              value = code * scale; the caller keeps the scale
     narrow   codes within +-127: the input of a product;  wide: within +-32767
   Constants are bytes, little-endian on every machine, aligned to 4 bytes and declared with
   MOE_FLASH after the name:
       static const unsigned char weights[140] MOE_FLASH = {...};
   which keeps them in program memory on AVR (in its first 64 KiB). Unaligned vectors and constants
   fault on some Arm processors. All calls are thread-safe: they write only to their arguments, and
   use less than 250 bytes of stack. */
#if defined(__AVR__) && !defined(MOE_NO_PROGMEM)
#define MOE_FLASH __attribute__((__progmem__, __aligned__(4)))
#elif defined(__GNUC__) || defined(__clang__) || defined(__TINYC__)
#define MOE_FLASH __attribute__((__aligned__(4)))
#else
#define MOE_FLASH
#endif

/* The shape of a result: its width n; for a product also the number of inputs k. n and k are at
   most 65532, shift at most 30. */
typedef struct moei_int_shape {
    uint16_t n, k;
    int16_t low, high;
    uint8_t shift;
} moei_int_shape;

struct moe_model;
struct moe_loader;
struct moei_int_run;

/* One operation on vectors in scratch memory. A vector is int16 [width rounded up to 4], zero
   beyond its width; a value is code * scale, and only moe_model_create knows the scales. Operations
   name their function, so a linker drops those that no model uses. */
typedef struct moei_int_op {
    void (*run)(const struct moei_int_op *op, struct moei_int_run *run);
    /* widths of result and input; limits and shift of the result */
    moei_int_shape shape;
    /* its constants: offset in bytes from the base, which is the model's weights or, in an expert,
       its block */
    uint32_t at;
    uint32_t in, other, out; /* its vectors: int16 from the start of the vectors */
    /* mixture: how many terms of an expert and of the shared experts are rounded down; the sum
       starts at half of them */
    int16_t factor, factor2;
    /* mixture, attention: its number in the model; row: 0 by token, 1 by position; norm: 1
       subtracts the mean */
    uint16_t index;
} moei_int_op;

/* The state of one call of moe_infer, on its stack. */
typedef struct moei_int_run {
    const struct moe_model *model;
    const struct moe_loader *loader;
    const unsigned char *base; /* of the operations' constants */
    int16_t *vectors;
    unsigned char *state;
    int32_t token;             /* id, where the model reads ids */
    uint32_t place; /* the token's position in its sequence */
    int16_t weight;            /* of the current expert: 32767 stands for 1 */
#ifndef MOE_NO_FLOAT
    moe_real share;            /* the same of float models */
#endif
    moe_status status;
} moei_int_run;

#if !defined(MOE_NO_FLOAT) && !MOE_REAL_IS_DOUBLE
/* Private: the operations of float models, void moei_float_op_NAME(op, run), and one per
   activation: out = act(in). Vectors and constants c are floats. Choices, in other, are int16
   count, int16 [m], float weights [m] from an even place on, where m is shape.low. */
#define MOEI_FLOAT_OPS(X) \
    X(product)        /* out = W in + b; c: b [n], W [n,k] */ \
    X(product_add)    /* out += weight (W in + b) */ \
    X(multiply)       /* out = in * other */ \
    X(add)            /* out = in + other */ \
    X(layer_norm)     /* c: eps, gain [n], bias [n] */ \
    X(rms_norm)       /* the same */ \
    X(row)            /* out = a row of c [k,n]: of the token; index 1: of its position, 2: the first */ \
    X(apply_weight)   /* out = weight * in; then weight = 1 */ \
    X(set_weight)     /* weight = in_0 */ \
    X(add_rest)       /* out += (1 - the sum of the weights) * in */ \
    X(softmax)        /* out = softmax(in / c_0) */ \
    X(sqrt_softplus)  /* out = sqrt(softplus(in)) */ \
    X(weigh)          /* weights = in of the chosen */ \
    X(weigh_sum)      /* weights / their sum */ \
    X(weigh_softmax)  /* their softmax */ \
    X(weigh_scale)    /* weights * c [n] of the chosen */
#define MOEI_FLOAT_OP(name) MOEI_API void moei_float_op_##name(const moei_int_op *op, moei_int_run *run);
#define MOEI_FLOAT_ACT(value, name, act, backward) MOEI_FLOAT_OP(value)
MOEI_FLOAT_OPS(MOEI_FLOAT_OP)
MOE_ACTS(MOEI_FLOAT_ACT)
#undef MOEI_FLOAT_OP
#undef MOEI_FLOAT_ACT
#endif

#ifdef __cplusplus
}
#endif
#endif /* MOE_KERNELS_H */

#if defined(MOE_IMPLEMENTATION) && !defined(MOEI_KERNELS_IMPLEMENTED)
#define MOEI_KERNELS_IMPLEMENTED

/* ==== >>code: private tools of the implementation; moe_routers.h and moe.h use them too ======= */

#ifndef MOE_NO_FLOAT
#include <float.h>
#include <stdarg.h>
#ifndef MOE_NO_LIBM
#include <math.h>
#endif
#endif

/* A private function that is unused under some combinations of headers and options. */
#if defined(__GNUC__) || defined(__TINYC__)
#define MOEI_TOOL static __attribute__((unused))
#else
#define MOEI_TOOL static
#endif

#if defined(__ARM_NEON) && defined(__aarch64__) && !defined(__clang__) && __GNUC__ >= 8
/* gcc inlines a function only into those with all of its features: it gets the fewest. */
#define MOEI_INLINE static inline __attribute__((always_inline, target("+nothing+simd")))
#elif (defined(__GNUC__) && !defined(__PCC__)) || defined(__clang__)
#define MOEI_INLINE static inline __attribute__((always_inline))
#elif defined(_MSC_VER)
#define MOEI_INLINE static __forceinline
#else
#define MOEI_INLINE static inline
#endif

/* A freestanding compiler has no <string.h>. */
#if __STDC_HOSTED__ != 0 || !defined(MOE_NO_TRAIN)
#include <string.h>
#define moei_strlen strlen
#define moei_strcmp strcmp
#define moei_memchr memchr
#define moei_memcmp memcmp
#else
#ifdef __cplusplus
extern "C" {
#endif
void *memcpy(void *to, const void *from, size_t n);
void *memmove(void *to, const void *from, size_t n);
void *memset(void *to, int value, size_t n);
#ifdef __cplusplus
}
#endif

#ifndef MOE_NO_FLOAT
MOEI_TOOL size_t moei_strlen(const char *s) {
    size_t n = 0;
    while (s[n] != '\0') n++;
    return n;
}

MOEI_TOOL int moei_strcmp(const char *a, const char *b) {
    for (; *a == *b; a++, b++)
        if (*a == '\0') return 0;
    return (unsigned char)*a < (unsigned char)*b ? -1 : 1;
}

MOEI_TOOL int moei_memcmp(const void *a, const void *b, size_t n) {
    const unsigned char *p = (const unsigned char *)a, *q = (const unsigned char *)b;
    for (; n > 0; n--, p++, q++)
        if (*p != *q) return *p < *q ? -1 : 1;
    return 0;
}

MOEI_TOOL const void *moei_memchr(const void *s, int c, size_t n) {
    const unsigned char *p = (const unsigned char *)s;
    for (; n > 0; n--, p++)
        if (*p == (unsigned char)c) return p;
    return NULL;
}
#endif
#endif

MOEI_TOOL size_t moei_smaller(size_t a, size_t b) { return a < b ? a : b; }

/* ---- sizes: checked products and sums of sizes from a caller or a file; 0 on overflow ---- */

MOEI_TOOL int moei_mul(size_t a, size_t b, size_t *out) {
    /* no division if both fit in half the bits */
    if ((a | b) >> sizeof(size_t) * 4 != 0 && b != 0 && a > (size_t)-1 / b) return 0;
    *out = a * b;
    return 1;
}

#ifndef MOE_NO_FLOAT
MOEI_TOOL int moei_add(size_t a, size_t b, size_t *out) {
    if (a > (size_t)-1 - b) return 0;
    *out = a + b;
    return 1;
}

/* Whether a size fits in int32_t; no comparison where every size does. */
#if SIZE_MAX > 0x7fffffff
#define MOEI_FITS_INT32(n) ((n) <= INT32_MAX)
#else
#define MOEI_FITS_INT32(n) ((void)(n), 1)
#endif

/* Whether a + b is a valid number of tokens. */
MOEI_TOOL int moei_fit_int32(size_t a, size_t b) {
    size_t sum = 0;
    return moei_add(a, b, &sum) && MOEI_FITS_INT32(sum);
}

/* Stages that are compiled in: see the top of this file. */
#ifndef MOE_KEEP_ACTS
#define MOE_KEEP_ACTS 0xffffffff
#endif
#ifndef MOE_KEEP_SCORES
#define MOE_KEEP_SCORES 0xffffffff
#endif
#ifndef MOE_KEEP_GATES
#define MOE_KEEP_GATES 0xffffffff
#endif
#ifndef MOE_KEEP_SELECTS
#define MOE_KEEP_SELECTS 0xffffffff
#endif
#ifndef MOE_KEEP_WEIGHTS
#define MOE_KEEP_WEIGHTS 0xffffffff
#endif
#ifndef MOE_KEEP_INPUTS
#define MOE_KEEP_INPUTS 0xffffffff
#endif
#ifndef MOE_KEEP_REFINES
#define MOE_KEEP_REFINES 0xffffffff
#endif
#ifndef MOE_KEEP_MODULES
#define MOE_KEEP_MODULES 0xffffffff
#endif
#ifndef MOE_KEEP_EXTRAS
#define MOE_KEEP_EXTRAS 0xffffffff
#endif

/* 1 if value i of a set is compiled in: a constant expression. MOEI_IS: whether a field has the
   value, a constant 0 if it was left out. */
#define MOEI_KEPT(set, i) (((uint32_t)MOE_KEEP_##set >> (i) & 1u) != 0)
#define MOEI_KEEP(set, i, function) (MOEI_KEPT(set, i) ? (function) : NULL)
#define MOEI_IS(set, field, i) (MOEI_KEPT(set, i) && (field) == (i))

/* 1 in builds that leave nothing out. */
#define MOEI_KEEPS_ALL \
    (((uint32_t)MOE_KEEP_ACTS & MOE_KEEP_SCORES & MOE_KEEP_GATES & MOE_KEEP_SELECTS & MOE_KEEP_WEIGHTS & \
      MOE_KEEP_INPUTS & MOE_KEEP_REFINES & MOE_KEEP_EXTRAS) == 0xffffffff)

/* Literals and libm functions, in moe_real and in double. */
#if MOE_REAL_IS_DOUBLE
#define MOEI_R(x) x
#define MOEI_F(name) name
#define MOEI_D(name) name
#elif defined(MOE_NO_LIBM)
#define MOEI_R(x) x##f
#define MOEI_F(name) moei_fallback_##name
#define MOEI_D(name) moei_fallback64_##name
#else
#define MOEI_R(x) x##f
#define MOEI_F(name) name##f
#define MOEI_D(name) name
#endif

/* Infinity, without the warnings that INFINITY causes under -ffast-math. */
#if !defined(MOE_NO_LIBM)
#define MOEI_INFINITY ((moe_real)HUGE_VAL)
#define MOEI_HUGE HUGE_VAL
#elif defined(__GNUC__)
#define MOEI_INFINITY __builtin_inff()
#define MOEI_HUGE __builtin_inf()
#else
#define MOEI_INFINITY ((moe_real)(1e300 * 1e300))
#define MOEI_HUGE (1e300 * 1e300)
#endif

#ifdef MOE_NO_LIBM
/* used only if the compiler reports that fma is fast: see MOEI_ADD_TO */
#define moei_fallback_fma(a, b, c) __builtin_fmaf(a, b, c)
/* ---- libm fallback; accuracy: see the top of this file ---- */

MOEI_TOOL uint32_t moei_float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

MOEI_TOOL float moei_float_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* 1 if x is infinite or NaN; the sign is ignored. */
MOEI_TOOL int moei_float_is_huge(float x) { return (moei_float_bits(x) >> 23 & 255u) == 255u; }

MOEI_TOOL float moei_fallback_fabs(float x) { return moei_float_from_bits(moei_float_bits(x) & 0x7fffffffu); }

/* 2^n for n from -126 to 127. */
MOEI_TOOL float moei_power2(int n) { return moei_float_from_bits((uint32_t)(n + 127) << 23); }

/* x 2^n, n from -252 to 254, in two steps: the first is exact. */
MOEI_TOOL float moei_times_power2(float x, int n) { return x * moei_power2(n / 2) * moei_power2(n - n / 2); }

/* x = n log 2 + r with |r| <= log(2) / 2, |x| <= 106. Returns exp(r) - 1 with the kernels'
   polynomial. */
MOEI_TOOL float moei_fallback_exp_reduced(float x, int *n) {
    float r, q = 1.381432057e-03f, k;
    *n = (int)(x * 1.44269504089f + (x < 0.0f ? -0.5f : 0.5f));
    k = (float)*n;
    r = x - k * 0.693145751953125f; /* log 2 in two parts, the first with few bits */
    r -= k * 1.42860682e-06f;
    q = q * r + 8.368851071e-03f;
    q = q * r + 4.166840108e-02f;
    q = q * r + 1.666651952e-01f;
    q = q * r + 4.999999337e-01f;
    return r * r * q + r;
}

MOEI_TOOL float moei_fallback_exp(float x) {
    float e;
    int n;
    if (!(x > -104.0f)) return x < 0.0f ? 0.0f : x; /* NaN */
    if (x > 88.7228394f) return MOEI_INFINITY;
    e = moei_fallback_exp_reduced(x, &n);
    return moei_times_power2(1.0f + e, n);
}

/* ln x: x = 2^n m with m from sqrt(1/2) to sqrt(2), f = m - 1, ln m = f - f^2 / 2 + f^3 Q(f), Q the
   kernels' polynomial. */
MOEI_TOOL float moei_fallback_log(float x) {
    float f, q = -7.634419459e-02f, k = 0.0f;
    uint32_t bits = moei_float_bits(x), whole;
    if (!(x > 0.0f)) return x < 0.0f ? MOEI_INFINITY - MOEI_INFINITY : bits << 1 == 0 ? -MOEI_INFINITY : x;
    if (moei_float_is_huge(x)) return x;
    if (bits < 0x00800000u) { /* subnormal: scaled by 2^24 */
        bits = moei_float_bits(x * 16777216.0f);
        k = -24.0f;
    }
    whole = (bits + (0x3f800000u - 0x3f3504f3u)) >> 23; /* n + 127 */
    k += (float)((int)whole - 127);
    f = moei_float_from_bits(bits - (whole << 23) + 0x3f800000u) - 1.0f;
    q = q * f + 1.276155052e-01f;
    q = q * f - 1.316019287e-01f;
    q = q * f + 1.420176137e-01f;
    q = q * f - 1.662335736e-01f;
    q = q * f + 2.000122679e-01f;
    q = q * f - 2.500082099e-01f;
    q = q * f + 3.333333171e-01f;
    q = f * f * (q * f - 0.5f) + k * 1.42860682e-06f; /* log 2 in two parts, as in exp */
    return k * 0.693145751953125f + (f + q);
}

/* ln(1 + x): the rounding error of 1 + x is corrected to first order. */
MOEI_TOOL float moei_fallback_log1p(float x) {
    float u = 1.0f + x, lost;
    if (!(u > 0.0f) || moei_float_is_huge(u)) return moei_fallback_log(u);
    if (u - 1.0f >= x && u - 1.0f <= x) lost = 0.0f;
    else lost = x < 1.0f ? x - (u - 1.0f) : 1.0f - (u - x);
    if (x < 1e-4f && x > -1e-4f) return x - 0.5f * x * x + x * x * x * 0.333333333f;
    return moei_fallback_log(u) + lost / u;
}

/* tanh|x| = -q / (2 + q) with q = exp(-2|x|) - 1; above 10 it is 1. */
MOEI_TOOL float moei_fallback_tanh(float x) {
    float q, z = moei_fallback_fabs(x), power;
    int n;
    if (!(z <= 10.0f)) return x < 0.0f ? -1.0f : x > 0.0f ? 1.0f : x;
    q = moei_fallback_exp_reduced(-2.0f * z, &n);
    power = moei_power2(n);
    q = q * power + (power - 1.0f);
    return moei_float_from_bits((moei_float_bits(q / (2.0f + q)) & 0x7fffffffu) | (moei_float_bits(x) & 0x80000000u));
}

/* erfc|x| = 2 exp(-x^2) t Q(t), t = 1 / (1 + 0.3 sqrt(2) |x|), Q the polynomial of the kernels'
   normal distribution. */
MOEI_TOOL float moei_fallback_erfc(float x) {
    float z = moei_fallback_fabs(x), t, q = -2.062863988e-02f, high, square, lost;
    if (!(z <= 10.5f)) return x < 0.0f ? 2.0f : x > 0.0f ? 0.0f : x;
    t = 1.0f / (1.0f + 0.424264069f * z);
    q = q * t + 1.124646791e-01f;
    q = q * t - 2.282845255e-01f;
    q = q * t + 1.918829512e-01f;
    q = q * t - 7.950889292e-02f;
    q = q * t + 9.620478702e-02f;
    q = q * t + 7.837226539e-02f;
    q = q * t + 1.102393389e-01f;
    q = q * t + 1.195713183e-01f;
    q = q * t + 1.196867166e-01f;
    square = z * z;
    /* few bits, so that high * high is exact */
    high = moei_float_from_bits(moei_float_bits(z) & 0xfffff000u);
    lost = (high * high - square) + (z - high) * (z + high);
    q = (t * q - t * q * lost) * 2.0f * moei_fallback_exp(-square);
    return x < 0.0f ? 2.0f - q : q;
}

/* The correctly rounded square root, digit by digit in integers. */
MOEI_TOOL float moei_fallback_sqrt(float x) {
    uint32_t bits = moei_float_bits(x), rest = 0;
    uint32_t root = 0, m;
    int exponent, i;
    if (!(x > 0.0f)) return x < 0.0f ? MOEI_INFINITY - MOEI_INFINITY : x;
    if (moei_float_is_huge(x)) return x;
    if (bits < 0x00800000u) return moei_fallback_sqrt(x * 16777216.0f) * (1.0f / 4096.0f);
    exponent = (int)(bits >> 23) - 127;
    m = ((bits & 0x007fffffu) | 0x00800000u) << (exponent & 1); /* x = m 2^(2 half - 23) */
    for (i = 0; i < 25; i++) { /* 24 bits and a rounding bit, of m 2^25; two bits at a time */
        rest = rest << 2 | (i < 12 ? m >> (23 - 2 * i) & 3u : i == 12 ? (m & 1u) << 1 : 0u);
        root <<= 1;
        if (rest > root << 1) {
            rest -= root << 1 | 1u;
            root |= 1u;
        }
    }
    /* never a tie: the square of a root of 25 bits would have more bits than x */
    root = (root + 1u) >> 1;
    return moei_times_power2((float)root, ((exponent & 1) != 0 ? exponent - 1 : exponent) / 2 - 23);
}

/* The functions below work in double and expect arguments within the range of float. Where double
   is float, they have float's accuracy. */

MOEI_TOOL double moei_fallback64_fabs(double x) { return x < 0.0 ? -x : x; }

MOEI_TOOL double moei_fallback64_floor(double x) {
    double whole;
    /* already an integer, infinite or NaN */
    if (!(moei_fallback64_fabs(x) < 4503599627370496.0)) return x;
    whole = (double)(int64_t)x;
    return whole > x ? whole - 1.0 : whole;
}

MOEI_TOOL float moei_fallback_ceil(float x) { return -(float)moei_fallback64_floor(-(double)x); }

MOEI_TOOL double moei_fallback64_exp(double x) {
    double k, r, sum = 1.0;
    int n, i;
    if (!(x > -104.0)) return x < 0.0 ? 0.0 : x;
    if (x > 89.0) return MOEI_HUGE;
    n = (int)(x * 1.4426950408889634 + (x < 0.0 ? -0.5 : 0.5));
    k = (double)n;
    /* log 2 in two parts, the first with 33 bits */
    r = x - k * 0.693147180369123816490 - k * 1.90821492927058770002e-10;
    for (i = 14; i > 0; i--) sum = 1.0 + sum * r / (double)i;
    return sum * (double)moei_power2(n / 2) * (double)moei_power2(n - n / 2);
}

/* ln x = n log 2 + 2 artanh s, s = (m - 1) / (m + 1), as a series. */
MOEI_TOOL double moei_fallback64_log(double x) {
    float rough = (float)x;
    uint32_t whole;
    double s, square, sum = 0.0, k;
    int i;
    if (!(rough > 0.0f) || moei_float_is_huge(rough)) return (double)moei_fallback_log(rough);
    if (rough < 1.17549435e-38f) return moei_fallback64_log(x * 16777216.0) - 16.635532333438687;
    whole = (moei_float_bits(rough) + (0x3f800000u - 0x3f3504f3u)) >> 23;
    k = (double)((int)whole - 127);
    x *= (double)moei_power2((127 - (int)whole) / 2) * (double)moei_power2(127 - (int)whole - (127 - (int)whole) / 2);
    s = (x - 1.0) / (x + 1.0);
    square = s * s;
    for (i = 21; i > 1; i -= 2) sum = (sum + 1.0 / (double)i) * square;
    return k * 0.693147180369123816490 + (k * 1.90821492927058770002e-10 + 2.0 * s * (1.0 + sum));
}

/* x^y for x >= 0. */
MOEI_TOOL double moei_fallback64_pow(double x, double y) {
    if ((y <= 0.0 && y >= 0.0) || (x <= 1.0 && x >= 1.0)) return 1.0;
    return moei_fallback64_exp(y * moei_fallback64_log(x));
}

MOEI_TOOL float moei_fallback_pow(float x, float y) { return (float)moei_fallback64_pow((double)x, (double)y); }

MOEI_TOOL double moei_fallback64_sqrt(double x) {
    double root;
    int i;
    /* 2^100, 2^-50 */
    if (x > 0.0 && x < 1e-30) return moei_fallback64_sqrt(x * 1.2676506002282294e30) * 8.8817841970012523e-16;
    if (x > 1e30 && x < MOEI_HUGE) return moei_fallback64_sqrt(x * 7.8886090522101181e-31) * 1125899906842624.0;
    root = (double)moei_fallback_sqrt((float)x);
    if (!(root > 0.0) || moei_float_is_huge((float)root)) return root;
    for (i = 0; i < 2; i++) root = 0.5 * (root + x / root);
    return root;
}

/* sin (odd 1) or cos (odd 0) of |x| <= pi / 4, by the series. */
MOEI_TOOL double moei_fallback64_series(double x, int odd) {
    double sum = 1.0, square = x * x;
    int i;
    for (i = 18 + odd; i > 1 + odd; i -= 2) sum = 1.0 - sum * square / (double)(i * (i - 1));
    return odd ? sum * x : sum;
}

/* cos(x - quarter pi / 2) for |x| < 2^31: sin for quarter 1. */
MOEI_TOOL double moei_fallback64_cosine(double x, int quarter) {
    double turns = moei_fallback64_floor(x * 0.63661977236758134 + 0.5), value;
    int at = (int)((int64_t)turns & 3);
    /* pi / 2 in two parts, the first with 33 bits */
    x = x - turns * 1.57079632673412561417 - turns * 6.07710050650619224932e-11;
    at = (at + 4 - quarter) & 3; /* cos(x + at pi / 2) */
    value = moei_fallback64_series(x, at & 1);
    return at == 1 || at == 2 ? -value : value;
}

MOEI_TOOL double moei_fallback64_cos(double x) { return moei_fallback64_cosine(x, 0); }
MOEI_TOOL double moei_fallback64_sin(double x) { return moei_fallback64_cosine(x, 1); }
#endif /* MOE_NO_LIBM */

/* ---- layout: one function lays out an object's memory; with base NULL it only counts ---- */

enum { MOEI_ALIGN = 16 };

typedef struct moei_layout {
    unsigned char *base; /* NULL: count only */
    size_t used;         /* bytes so far, including the slack that aligns any base */
    int overflow;        /* a size did not fit size_t */
} moei_layout;

/* Starts a layout in the caller's memory (NULL: count only). base may have any alignment: the size
   includes the slack. */
MOEI_TOOL moei_layout moei_layout_begin(void *memory) {
    moei_layout l;
    unsigned char *base = (unsigned char *)memory;
    if (base != NULL) base += (MOEI_ALIGN - (uintptr_t)base % MOEI_ALIGN) % MOEI_ALIGN;
    l.base = base;
    l.used = MOEI_ALIGN - 1;
    l.overflow = 0;
    return l;
}

/* The next count elements of size bytes, aligned to 16; NULL while counting. */
MOEI_TOOL void *moei_take(moei_layout *l, size_t count, size_t size) {
    size_t bytes, at = l->used - (MOEI_ALIGN - 1);
    if (!moei_mul(count, size, &bytes) || !moei_add(bytes, MOEI_ALIGN - 1, &bytes) ||
        !moei_add(l->used, bytes - bytes % MOEI_ALIGN, &l->used))
        l->overflow = 1;
    return l->base != NULL && !l->overflow ? l->base + at : NULL;
}

MOEI_TOOL moe_real *moei_take_reals(moei_layout *l, size_t rows, size_t columns) {
    size_t count = 0;
    if (!moei_mul(rows, columns, &count)) l->overflow = 1;
    return (moe_real *)moei_take(l, count, sizeof(moe_real));
}

/* ---- text: messages and numbers without stdio and without the locale ---- */

typedef struct moei_text {
    char *out; /* always terminated when room > 0 */
    size_t room, length;
} moei_text;

MOEI_TOOL void moei_put(moei_text *t, const char *s, size_t n) {
    size_t i;
    for (i = 0; i < n && t->length + 1 < t->room; i++) t->out[t->length++] = s[i];
    if (t->room > 0) t->out[t->length] = '\0';
}

MOEI_TOOL void moei_put_unsigned(moei_text *t, uint64_t value) {
    char digits[24];
    size_t at = sizeof digits;
    do digits[--at] = (char)('0' + (int)(value % 10));
    while ((value /= 10) != 0);
    moei_put(t, digits + at, sizeof digits - at);
}

MOEI_TOOL void moei_put_integer(moei_text *t, int64_t value) {
    if (value < 0) moei_put(t, "-", 1);
    moei_put_unsigned(t, value < 0 ? (uint64_t)0 - (uint64_t)value : (uint64_t)value);
}

/* The constants of the decimal conversions for double, which has 32 bits on AVR: powers of ten with
   headroom, steps towards them, the digits that distinguish all moe_real values, the digits that
   are parsed, and how many of their bits go to the second number of a pair. */
#if DBL_MANT_DIG > 24
enum {
    MOEI_MAX_POWER10 = 290,
    MOEI_POWER10_STEP = 60,
    MOEI_FAR_POWER10 = 200,
    MOEI_DIGITS = 17,
    MOEI_DIGITS_READ = 18,
    MOEI_LOW_BITS = 11,
    MOEI_SLACK = 16
};
#define MOEI_SPLITTER 134217729.0
#define MOEI_SMALL 1e-270
#define MOEI_LARGE 1e230
#else
enum {
    MOEI_MAX_POWER10 = 30,
    MOEI_POWER10_STEP = 10,
    MOEI_FAR_POWER10 = 20,
    MOEI_DIGITS = 9,
    MOEI_DIGITS_READ = 14,
    MOEI_LOW_BITS = 24,
    MOEI_SLACK = 64
};
#define MOEI_SPLITTER 4097.0
#define MOEI_SMALL 1e-20
#define MOEI_LARGE 1e25
#endif

/* A sum of two doubles, hi + lo, with about 106 bits: intermediate results of decimal conversions
   must not round (Dekker 1971, A floating-point technique for extending the available
   precision). */
typedef struct moei_pair {
    double hi, lo;
} moei_pair;

MOEI_TOOL moei_pair moei_pair_make(double big, double little) {
    moei_pair p;
    p.hi = big + little;
    p.lo = little - (p.hi - big);
    return p;
}

MOEI_TOOL moei_pair moei_pair_product(moei_pair a, moei_pair b) {
    double splitter = MOEI_SPLITTER, a1, a2, b1, b2, product = a.hi * b.hi, rest;
    a1 = a.hi * splitter;
    a1 = a1 - (a1 - a.hi);
    a2 = a.hi - a1;
    b1 = b.hi * splitter;
    b1 = b1 - (b1 - b.hi);
    b2 = b.hi - b1;
    rest = ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2;
    return moei_pair_make(product, rest + (a.hi * b.lo + a.lo * b.hi));
}

/* x times 10^n, |n| <= MOEI_MAX_POWER10. */
MOEI_TOOL moei_pair moei_pair_times_power10(moei_pair x, int n) {
    moei_pair power = {1.0, 0.0}, base = {10.0, 0.0}, back;
    unsigned left = n < 0 ? (unsigned)-n : (unsigned)n;
    double quotient;
    for (; left > 0; left >>= 1) {
        if (left & 1u) power = moei_pair_product(power, base);
        if (left > 1) base = moei_pair_product(base, base);
    }
    if (n >= 0) return moei_pair_product(x, power);
    quotient = x.hi / power.hi;
    back = moei_pair_product(moei_pair_make(quotient, 0.0), power);
    return moei_pair_make(quotient, ((x.hi - back.hi) + (x.lo - back.lo)) / power.hi);
}

/* Parses a decimal number: sign, digits with a point, exponent. Returns 0 unless all n characters
   are one number, finite in moe_real. */
MOEI_TOOL int moei_parse_number(const char *s, size_t n, double *out) {
    size_t i = 0;
    int negative = 0, exponent = 0;
    int digits = 0, point = 0;
    int kept = 0;
    uint64_t mantissa = 0;
    moei_pair value;
    if (i < n && (s[i] == '-' || s[i] == '+')) negative = s[i++] == '-';
    for (; i < n && ((s[i] >= '0' && s[i] <= '9') || (s[i] == '.' && !point)); i++) {
        if (s[i] == '.') {
            point = 1;
            continue;
        }
        digits = 1;
        if (kept < MOEI_DIGITS_READ) {
            mantissa = mantissa * 10 + (uint64_t)(s[i] - '0');
            if (mantissa > 0) kept++;
            if (point && exponent > -1000) exponent--;
        } else if (!point && exponent < 1000)
            exponent++;
    }
    if (!digits) return 0;
    if (i < n && (s[i] == 'e' || s[i] == 'E')) {
        int sign = 1, e = 0;
        int any = 0;
        i++;
        if (i < n && (s[i] == '-' || s[i] == '+')) sign = s[i++] == '-' ? -1 : 1;
        for (; i < n && s[i] >= '0' && s[i] <= '9'; i++, any = 1)
            if (e < 1000) e = e * 10 + (s[i] - '0');
        if (!any) return 0;
        exponent += sign * e;
    }
    if (i != n) return 0;
    value = moei_pair_make((double)(mantissa >> MOEI_LOW_BITS << MOEI_LOW_BITS),
                           (double)(mantissa & (((uint64_t)1 << MOEI_LOW_BITS) - 1)));
    if (exponent < -MOEI_MAX_POWER10) { /* two steps keep the power of ten finite */
        value = moei_pair_times_power10(value, -MOEI_MAX_POWER10);
        exponent = exponent + MOEI_MAX_POWER10 < -MOEI_MAX_POWER10 ? -MOEI_MAX_POWER10 : exponent + MOEI_MAX_POWER10;
    }
    if (mantissa > 0 && exponent > DBL_MAX_10_EXP + 2) return 0;
    if (exponent > MOEI_FAR_POWER10) { /* the last step is in sixteenths, as in moei_put_digits */
        value = moei_pair_times_power10(value, exponent > DBL_MAX_10_EXP + 2 ? 0 : exponent - MOEI_POWER10_STEP);
        value = moei_pair_product(moei_pair_make(value.hi / 16.0, value.lo / 16.0),
                                  moei_pair_times_power10(moei_pair_make(1.0, 0.0), MOEI_POWER10_STEP));
        value.hi *= 16.0;
    } else value = moei_pair_times_power10(value, exponent);
    *out = negative ? -value.hi : value.hi;
    return moe_is_finite((moe_real)*out);
}

MOEI_TOOL int moei_parse_real(const char *s, size_t n, moe_real *out) {
    double number = 0;
    const int good = moei_parse_number(s, n, &number);
    *out = (moe_real)number;
    return good;
}

/* value with the given number of significant digits, at most MOEI_DIGITS, shortest form: 0.01, 12,
   1e-08. */
MOEI_TOOL void moei_put_digits(moei_text *t, double value, int significant) {
    char digits[20];
    int exponent = 0, shifted = 0, i;
    int count = significant;
    moei_pair exact;
    uint64_t whole;
    if (value < 0.0) {
        moei_put(t, "-", 1);
        value = -value;
    }
    exact = moei_pair_make(value, 0.0);
    while (value < MOEI_SMALL && value > 0.0) { /* powers of ten would leave the range */
        exact = moei_pair_times_power10(exact, MOEI_POWER10_STEP);
        value = exact.hi;
        shifted -= MOEI_POWER10_STEP;
    }
    if (value > MOEI_LARGE) { /* a sixteenth, so that no product overflows */
        exact = moei_pair_times_power10(moei_pair_make(value / 16.0, 0.0), -MOEI_POWER10_STEP);
        exact.hi *= 16.0;
        exact.lo *= 16.0;
        shifted += MOEI_POWER10_STEP;
    }
    while (exponent < MOEI_MAX_POWER10 && moei_pair_times_power10(exact, -exponent).hi >= 10.0) exponent++;
    while (value > 0.0 && exponent > -MOEI_MAX_POWER10 && moei_pair_times_power10(exact, -exponent).hi < 1.0)
        exponent--;
    exact = moei_pair_times_power10(exact, significant - 1 - exponent);
    /* 17 digits exceed 53 bits: |lo| reaches 8; 9 digits exceed 24 bits: |lo| reaches 32 */
    whole = (uint64_t)exact.hi - MOEI_SLACK;
    whole += (uint64_t)((exact.hi - (double)(whole + MOEI_SLACK)) + exact.lo + (double)MOEI_SLACK + 0.5);
    exponent += shifted;
    for (i = significant - 1; i >= 0; i--, whole /= 10) digits[i] = (char)('0' + (int)(whole % 10));
    if (whole > 0) { /* rounding carried into a new digit: 9.99 became 10.0 */
        for (i = significant - 1; i > 0; i--) digits[i] = digits[i - 1];
        digits[0] = '1';
        exponent++;
    }
    while (count > 1 && digits[count - 1] == '0') count--;
    if (exponent < -5 || exponent > 16) {
        moei_put(t, digits, 1);
        if (count > 1) {
            moei_put(t, ".", 1);
            moei_put(t, digits + 1, (size_t)(count - 1));
        }
        moei_put(t, "e", 1);
        moei_put_integer(t, exponent);
    } else {
        for (i = exponent < 0 ? exponent : 0; i < count || i <= exponent; i++) {
            moei_put(t, i < 0 || i >= count ? "0" : digits + i, 1);
            if (i == exponent && i + 1 < count) moei_put(t, ".", 1);
        }
    }
}

/* The shortest decimal text that moei_parse_real converts back to value; MOEI_DIGITS digits always
   suffice. */
MOEI_TOOL void moei_put_real(moei_text *t, moe_real value) {
    int significant;
    if (!moe_is_finite(value)) {
        if (value > 0) moei_put(t, "inf", 3);
        else if (value < 0) moei_put(t, "-inf", 4);
        else moei_put(t, "nan", 3);
        return;
    }
    for (significant = 1; significant <= MOEI_DIGITS; significant++) {
        char digits[48];
        moei_text trial;
        moe_real back;
        trial.out = digits;
        trial.room = sizeof digits;
        trial.length = 0;
        moei_put_digits(&trial, (double)value, significant);
        if (significant == MOEI_DIGITS ||
            (moei_parse_real(digits, trial.length, &back) && !(back < value) && !(back > value))) {
            moei_put(t, digits, trial.length);
            return;
        }
    }
}

/* A small printf: %s text (NULL prints nothing), %d int, %z size_t, %g double, %% itself. */
MOEI_TOOL void moei_put_format(moei_text *t, const char *format, va_list arguments) {
    const char *p = format;
    for (; *p != '\0'; p++) {
        if (*p != '%') {
            moei_put(t, p, 1);
            continue;
        }
        p++;
        if (*p == 's') {
            const char *s = va_arg(arguments, const char *);
            if (s != NULL) moei_put(t, s, moei_strlen(s));
        } else if (*p == 'd')
            moei_put_integer(t, va_arg(arguments, int));
        else if (*p == 'z')
            moei_put_unsigned(t, va_arg(arguments, size_t));
        else if (*p == 'g')
            moei_put_real(t, (moe_real)va_arg(arguments, double));
        else if (*p == '%')
            moei_put(t, "%", 1);
        else
            return;
    }
}

/* Appends to the message of error, which is terminated and stays one line, whatever text it
   quotes. */
MOEI_TOOL void moei_error_append(moe_error *error, const char *format, va_list arguments) {
#ifndef MOE_NO_MESSAGES
    moei_text t;
    t.out = error->message;
    t.room = sizeof error->message;
    t.length = moei_strlen(error->message);
    moei_put_format(&t, format, arguments);
    while (t.length-- > 0)
        if ((unsigned char)t.out[t.length] < ' ') t.out[t.length] = '?';
#else
    (void)error;
    (void)format;
    (void)arguments;
#endif
}

/* Fills in error (unless NULL) and returns code, so that a check reads: return moei_error(error,
   code, "field = %d: why", v). Without va_start compilers inline it, and drop the texts. */
MOEI_TOOL moe_status moei_error(moe_error *error, moe_status code, const char *format, ...) {
#ifndef MOE_NO_MESSAGES
    va_list arguments;
#endif
    (void)format;
    if (error == NULL) return code;
    error->code = code;
    error->message[0] = '\0';
#ifndef MOE_NO_MESSAGES
    va_start(arguments, format);
    moei_error_append(error, format, arguments);
    va_end(arguments);
#endif
    return code;
}

/* ==== features of the compiler and the machine ================================================ */

#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__)) && \
    !defined(__PCC__) && !defined(__TINYC__)
#define MOEI_X86_GNU 1
#include <cpuid.h>
#elif defined(_MSC_VER) && (defined(_M_X64) || (defined(_M_IX86) && !defined(__clang__)))
#define MOEI_X86_MSVC 1
#include <intrin.h>
#endif

#if (defined(MOEI_X86_GNU) || defined(MOEI_X86_MSVC)) && !defined(MOE_NO_SIMD) && !MOE_REAL_IS_DOUBLE
#define MOEI_HAVE_AVX2 1
#include <immintrin.h>
#ifndef MOE_NO_AVX512
#define MOEI_HAVE_AVX512 1
#endif
#endif

#if defined(__aarch64__) && defined(__linux__) && !defined(__TINYC__)
#include <sys/auxv.h>
#endif

/* Compilers and targets with vectors of four floats, known at compile time. */
#if (defined(__GNUC__) || defined(__clang__)) && !defined(__TINYC__) && !defined(MOE_NO_SIMD) && !MOE_REAL_IS_DOUBLE
#if defined(__ARM_NEON)
#define MOEI_HAVE_V4 1
#include <arm_neon.h>
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD) && defined(__clang__)
#define MOEI_DOTPROD
#define MOEI_ARCH
#elif defined(__aarch64__) && (defined(__ARM_FEATURE_DOTPROD) || defined(__linux__)) && \
    (defined(__clang__) ? __clang_major__ >= 16 : __GNUC__ >= 8)
#define MOEI_ARCH "arch=armv8.2-a+dotprod"
#define MOEI_DOTPROD __attribute__((target(MOEI_ARCH)))
#endif
#if defined(MOEI_DOTPROD) && defined(__ARM_FEATURE_MATMUL_INT8) && defined(__clang__)
#define MOEI_I8MM
#elif defined(MOEI_DOTPROD) && (defined(__ARM_FEATURE_MATMUL_INT8) || defined(__linux__)) && \
    (defined(__clang__) ? __clang_major__ >= 16 : __GNUC__ >= 10)
#define MOEI_I8MM __attribute__((target(MOEI_ARCH "+i8mm")))
#endif
#elif defined(__wasm_simd128__)
#define MOEI_HAVE_V4 1
#include <wasm_simd128.h>
#endif
#endif

/* NEON of 32-bit Arm flushes subnormal numbers and cannot divide: only products use vectors
   there. */
#if defined(MOEI_HAVE_V4) && (defined(__aarch64__) || defined(__wasm_simd128__))
#define MOEI_V4_IEEE 1
#endif

/* Placed in the loop of an ordered sum. gcc -O3 would vectorize such a loop along the sum and then
   add the lanes one by one, which is three times slower than the scalar loop; an empty asm prevents
   this and costs no instruction. */
#if defined(__GNUC__) && !defined(__TINYC__)
#define MOEI_KEEP_ORDER __asm__ volatile("")
#else
#define MOEI_KEEP_ORDER (void)0
#endif

/* s += a * b, fused if the target has an instruction for it. On its own, gcc fuses some of the
   tiles below and not others (-march=native outside -std=c99), and the bits of a row would then
   depend on the neighboring rows. */
#if (MOE_REAL_IS_DOUBLE && (defined(FP_FAST_FMA) || defined(__FP_FAST_FMA))) || \
    (!MOE_REAL_IS_DOUBLE && (defined(FP_FAST_FMAF) || defined(__FP_FAST_FMAF)))
#define MOEI_ADD_TO(s, a, b) s = MOEI_F(fma)(a, b, s)
#else
#define MOEI_ADD_TO(s, a, b) s += (a) * (b)
#endif
#endif /* MOE_NO_FLOAT */

/* How integer constants are read: as words if words have the byte order of the constants; on AVR
   with the instructions for program memory. */
#if defined(__AVR__) && !defined(MOE_NO_PROGMEM)
#define MOEI_FLASH_AVR 1
#include <avr/pgmspace.h>
#elif defined(__GNUC__) && !defined(__PCC__) && !defined(__TINYC__) && defined(__BYTE_ORDER__)
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define MOEI_FLASH_WORDS 1
#endif
#endif

/* gcc needs optimization to allocate the registers */
#if defined(__AVR_HAVE_MUL__) && defined(__OPTIMIZE__) && !defined(MOE_NO_DSP)
#define MOEI_INT_AVR 1
#endif

/* Arm's instructions for 16-bit integers: Helium (MVE), the DSP extension (Cortex-M4, M7, M33; also
   ARMv6 and ARMv7-A), or none. */
#if defined(__arm__) && defined(MOEI_FLASH_WORDS) && !defined(MOE_NO_DSP)
#if defined(__ARM_FEATURE_DSP) && defined(__ARM_FEATURE_SIMD32) && defined(__thumb2__)
#define MOEI_INT_DSP 1
#if defined(__ARM_FEATURE_MVE)
#define MOEI_INT_MVE 1
#endif
#endif
#if defined(__thumb__) && !defined(__thumb2__) && (defined(__ARM_ARCH_6M__) || defined(__ARM_ARCH_8M_BASE__))
#define MOEI_INT_THUMB1 1
#endif
#endif


#ifdef __cplusplus
extern "C" {
#endif

/* ==== version, status codes, bits ============================================================= */

#if !defined(MOE_STATIC)
const unsigned char MOEI_MATCH = 1;
#endif

const char *moe_version(void) {
    return MOE_VERSION;
}

const char *moe_status_text(moe_status status) {
    switch (status) {
#define MOEI_STATUS_TEXT(name, value, text) \
    case name: return text;
        MOE_STATUS_LIST(MOEI_STATUS_TEXT)
#undef MOEI_STATUS_TEXT
    default: return "unknown status";
    }
}

#ifndef MOE_NO_FLOAT
#if MOE_REAL_IS_DOUBLE
typedef uint64_t moei_bits;
#define MOEI_SIGN_BIT ((uint64_t)1 << 63)
#define MOEI_INFINITY_BITS ((uint64_t)0x7ff << 52)
#else
typedef uint32_t moei_bits;
#define MOEI_SIGN_BIT ((uint32_t)1 << 31)
#define MOEI_INFINITY_BITS ((uint32_t)0xff << 23)
#endif

static moei_bits moei_real_bits(moe_real x) {
    moei_bits bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

int moe_is_finite(moe_real x) {
    return (moei_real_bits(x) & MOEI_INFINITY_BITS) != MOEI_INFINITY_BITS;
}

/* 1 unless x is -inf or NaN. */
static int moei_can_be_selected(moe_real x) { return moe_is_finite(x) || moei_real_bits(x) == MOEI_INFINITY_BITS; }

static int moei_is_nan(moe_real x) {
    return (moei_real_bits(x) & ~MOEI_SIGN_BIT) > MOEI_INFINITY_BITS;
}

/* ==== plain C: the products ======================================================================

   One driver serves all orientations through strides: element (i, p) of the left operand is
   a[i * ra + p * ca], element (p, j) of the right one is b[p * rb + j * cb]. The tiles add the sum
   over one block of k to C. Each sum of a tile is accumulated separately in ascending order of p,
   so every tile gives an element the same bits. The tiles are inlined so that a stride of 1 is a
   constant in them. */

enum { MOEI_BLOCK_K = 256, MOEI_PANEL = 16 };

MOEI_INLINE void moei_tile_4x4_c(size_t k, const moe_real *a, size_t ra, size_t ca, const moe_real *b, size_t rb,
                                 size_t cb, moe_real *c, size_t ldc) {
    moe_real s00 = 0, s01 = 0;
    moe_real s02 = 0, s03 = 0;
    moe_real s10 = 0, s11 = 0;
    moe_real s12 = 0, s13 = 0;
    moe_real s20 = 0, s21 = 0;
    moe_real s22 = 0, s23 = 0;
    moe_real s30 = 0, s31 = 0;
    moe_real s32 = 0, s33 = 0;
    size_t p;
    for (p = 0; p < k; p++) {
        const moe_real *ap = a + p * ca, *bp = b + p * rb;
        const moe_real y0 = bp[0], y1 = bp[cb];
        const moe_real y2 = bp[2 * cb], y3 = bp[3 * cb];
        moe_real x = ap[0];
        MOEI_KEEP_ORDER;
        MOEI_ADD_TO(s00, x, y0);
        MOEI_ADD_TO(s01, x, y1);
        MOEI_ADD_TO(s02, x, y2);
        MOEI_ADD_TO(s03, x, y3);
        x = ap[ra];
        MOEI_ADD_TO(s10, x, y0);
        MOEI_ADD_TO(s11, x, y1);
        MOEI_ADD_TO(s12, x, y2);
        MOEI_ADD_TO(s13, x, y3);
        x = ap[2 * ra];
        MOEI_ADD_TO(s20, x, y0);
        MOEI_ADD_TO(s21, x, y1);
        MOEI_ADD_TO(s22, x, y2);
        MOEI_ADD_TO(s23, x, y3);
        x = ap[3 * ra];
        MOEI_ADD_TO(s30, x, y0);
        MOEI_ADD_TO(s31, x, y1);
        MOEI_ADD_TO(s32, x, y2);
        MOEI_ADD_TO(s33, x, y3);
    }
    c[0] += s00;
    c[1] += s01;
    c[2] += s02;
    c[3] += s03;
    c += ldc;
    c[0] += s10;
    c[1] += s11;
    c[2] += s12;
    c[3] += s13;
    c += ldc;
    c[0] += s20;
    c[1] += s21;
    c[2] += s22;
    c[3] += s23;
    c += ldc;
    c[0] += s30;
    c[1] += s31;
    c[2] += s32;
    c[3] += s33;
}

/* One row, for rows left over from tiles of four; eight sums hide the latency of the additions. */
MOEI_INLINE void moei_tile_1x8_c(size_t k, const moe_real *a, size_t ca, const moe_real *b, size_t rb, size_t cb,
                                 moe_real *c) {
    moe_real s0 = 0, s1 = 0;
    moe_real s2 = 0, s3 = 0;
    moe_real s4 = 0, s5 = 0;
    moe_real s6 = 0, s7 = 0;
    size_t p;
    for (p = 0; p < k; p++) {
        const moe_real *bp = b + p * rb, *bq = bp + 4 * cb;
        const moe_real x = a[p * ca];
        MOEI_KEEP_ORDER;
        MOEI_ADD_TO(s0, x, bp[0]);
        MOEI_ADD_TO(s1, x, bp[cb]);
        MOEI_ADD_TO(s2, x, bp[2 * cb]);
        MOEI_ADD_TO(s3, x, bp[3 * cb]);
        MOEI_ADD_TO(s4, x, bq[0]);
        MOEI_ADD_TO(s5, x, bq[cb]);
        MOEI_ADD_TO(s6, x, bq[2 * cb]);
        MOEI_ADD_TO(s7, x, bq[3 * cb]);
    }
    c[0] += s0;
    c[1] += s1;
    c[2] += s2;
    c[3] += s3;
    c[4] += s4;
    c[5] += s5;
    c[6] += s6;
    c[7] += s7;
}

/* One column of four rows, for columns left over from the tiles. */
MOEI_INLINE void moei_tile_4x1_c(size_t k, const moe_real *a, size_t ra, size_t ca, const moe_real *b, size_t rb,
                                 moe_real *c, size_t ldc) {
    moe_real s0 = 0, s1 = 0;
    moe_real s2 = 0, s3 = 0;
    size_t p;
    for (p = 0; p < k; p++) {
        const moe_real *ap = a + p * ca;
        const moe_real y = b[p * rb];
        MOEI_KEEP_ORDER;
        MOEI_ADD_TO(s0, ap[0], y);
        MOEI_ADD_TO(s1, ap[ra], y);
        MOEI_ADD_TO(s2, ap[2 * ra], y);
        MOEI_ADD_TO(s3, ap[3 * ra], y);
    }
    c[0] += s0;
    c[ldc] += s1;
    c[2 * ldc] += s2;
    c[3 * ldc] += s3;
}

MOEI_INLINE void moei_tile_1x1_c(size_t k, const moe_real *a, size_t ca, const moe_real *b, size_t rb, moe_real *c) {
    moe_real s = 0;
    size_t p;
    for (p = 0; p < k; p++) {
        MOEI_KEEP_ORDER;
        MOEI_ADD_TO(s, a[p * ca], b[p * rb]);
    }
    *c += s;
}

/* C += the sum over one block of k, four rows at a time, then the remaining rows one by one. */
MOEI_INLINE void moei_block_c(size_t m, size_t n, size_t k, const moe_real *a, size_t ra, size_t ca, const moe_real *b,
                              size_t rb, size_t cb, moe_real *c, size_t ldc) {
    const size_t m4 = m - m % 4, n4 = n - n % 4;
    const size_t n8 = n - n % 8;
    size_t i, j;
    for (j = 0; j < n4; j += 4)
        for (i = 0; i < m4; i += 4) moei_tile_4x4_c(k, a + i * ra, ra, ca, b + j * cb, rb, cb, c + i * ldc + j, ldc);
    for (j = n4; j < n; j++)
        for (i = 0; i < m4; i += 4) moei_tile_4x1_c(k, a + i * ra, ra, ca, b + j * cb, rb, c + i * ldc + j, ldc);
    for (i = m4; i < m; i++) {
        for (j = 0; j < n8; j += 8) moei_tile_1x8_c(k, a + i * ra, ca, b + j * cb, rb, cb, c + i * ldc + j);
        for (j = n8; j < n; j++) moei_tile_1x1_c(k, a + i * ra, ca, b + j * cb, rb, c + i * ldc + j);
    }
}

static void moei_zero_rows(size_t m, size_t n, moe_real *c, size_t ldc) {
    size_t i, j;
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) c[i * ldc + j] = 0;
}

MOEI_INLINE void moei_matmul_c(size_t m, size_t n, size_t k, const moe_real *a, size_t ra, size_t ca, const moe_real *b,
                               size_t rb, size_t cb, moe_real *c, size_t ldc, int accumulate) {
    size_t p;
    if (m == 0 || n == 0) return; /* the operands may be NULL */
    if (!accumulate) moei_zero_rows(m, n, c, ldc);
    for (p = 0; p < k; p += MOEI_BLOCK_K) {
        const size_t block = moei_smaller(k - p, MOEI_BLOCK_K);
        moei_block_c(m, n, block, a + p * ca, ra, ca, b + p * rb, rb, cb, c, ldc);
    }
}

static void moei_nt_c(size_t m, size_t n, size_t k, const moe_real *a, size_t lda, const void *b, size_t ldb,
                      moe_real *c, size_t ldc, int accumulate) {
    moei_matmul_c(m, n, k, a, lda, 1, (const moe_real *)b, 1, ldb, c, ldc, accumulate);
}

static void moei_nn_c(size_t m, size_t n, size_t k, const moe_real *a, size_t lda, const void *b, size_t ldb,
                      moe_real *c, size_t ldc, int accumulate) {
    moei_matmul_c(m, n, k, a, lda, 1, (const moe_real *)b, ldb, 1, c, ldc, accumulate);
}

static void moei_tn_c(size_t m, size_t n, size_t k, const moe_real *a, size_t lda, const void *b, size_t ldb,
                      moe_real *c, size_t ldc, int accumulate) {
    moei_matmul_c(m, n, k, a, 1, lda, (const moe_real *)b, ldb, 1, c, ldc, accumulate);
}

/* Panels of 16 columns, one block of k at a time, so that a panel's block stays in the first-level
   cache for all rows. */
static void moei_panels_c(size_t m, size_t n, size_t k, const moe_real *a, size_t ra, size_t ca, const moe_real *b,
                          size_t panel, moe_real *c, size_t ldc, int accumulate) {
    size_t j, p;
    if (!accumulate) moei_zero_rows(m, n, c, ldc);
    for (j = 0; j < n; j += MOEI_PANEL, b += panel)
        for (p = 0; p < k; p += MOEI_BLOCK_K)
            moei_block_c(m, moei_smaller(n - j, MOEI_PANEL), moei_smaller(k - p, MOEI_BLOCK_K), a + p * ca, ra, ca,
                         b + p * MOEI_PANEL, MOEI_PANEL, 1, c + j, ldc);
}

static moe_real moei_dot_c(size_t n, const moe_real *a, const moe_real *b) {
    moe_real sum = 0;
    size_t p;
    for (p = 0; p < n; p += MOEI_BLOCK_K)
        moei_tile_1x1_c(moei_smaller(n - p, MOEI_BLOCK_K), a + p, 1, b + p, 1, &sum);
    return sum;
}

static void moei_axpy_c(size_t n, moe_real alpha, const moe_real *x, moe_real *y) {
    size_t i;
    for (i = 0; i < n; i++) y[i] += alpha * x[i];
}

#define MOEI_AXPY_ROWS(isa) \
    static void moei_axpy_rows_##isa(size_t count, size_t n, const moe_real *alpha, const moe_real *x, size_t ldx, \
                                     moe_real *y) { \
        size_t i; \
        for (i = 0; i < count; i++) moei_axpy_##isa(n, alpha[i], x + i * ldx, y); \
    }
MOEI_AXPY_ROWS(c)

static void moei_multiply_c(size_t n, const moe_real *a, const moe_real *b, moe_real *y) {
    size_t i;
    for (i = 0; i < n; i++) y[i] = a[i] * b[i];
}

static void moei_dispersion_c(int squared, size_t count, const int32_t *rows, size_t n, const moe_real *x, size_t ldx,
                              const moe_real *mean, moe_real *y) {
    size_t i, j;
    for (j = 0; j < n; j++) {
        const moe_real center = mean[j];
        moe_real sum = 0;
        for (i = 0; i < count; i++) {
            const moe_real off = x[(size_t)rows[i] * ldx + j] - center;
            sum += squared ? off * off : MOEI_F(fabs)(off);
        }
        y[j] = sum / (moe_real)count;
    }
}

/* ==== plain C: activations ==================================================================== */

/* exp(-|x|) is at most 1 and never overflows; the functions below are based on it. */
static moe_real moei_exp_neg_abs(moe_real x) { return MOEI_F(exp)(x < 0 ? x : -x); }

moe_real moe_sigmoid(moe_real x) {
    const moe_real e = moei_exp_neg_abs(x);
    return (x < 0 ? e : MOEI_R(1.0)) / (MOEI_R(1.0) + e);
}

/* log(1 + exp(x)), without overflow and accurate to rounding for any x. */
MOEI_TOOL moe_real moei_softplus(moe_real x) {
    const moe_real tail = MOEI_F(log1p)(moei_exp_neg_abs(x));
    return x > 0 ? x + tail : tail;
}

/* For activations x f(x), f is exactly 0 or 1 beyond this limit, and x itself may be infinite. NaN
   is kept. */
static moe_real moei_clamp_1e4(moe_real x) {
    const moe_real limit = MOEI_R(1e4);
    return x < -limit ? -limit : x > limit ? limit : x;
}

static moe_real moei_silu(moe_real x) { return (x < 0 ? moei_clamp_1e4(x) : x) * moe_sigmoid(x); }

/* The standard normal distribution function, by erfc so that small values keep their digits. */
static moe_real moei_normal_cdf(moe_real x) { return MOEI_R(0.5) * MOEI_F(erfc)(x * MOEI_R(-0.70710678118654752440)); }

static moe_real moei_gelu(moe_real x) { return (x < 0 ? moei_clamp_1e4(x) : x) * moei_normal_cdf(x); }

/* x sigmoid(a), a = 2 sqrt(2/pi) (x + 0.044715 x^3): by 1 + tanh(a/2) = 2 sigmoid(a), without the
   cancellation. */
#define MOEI_GELU_TANH_1 MOEI_R(1.5957691216057307118)
#define MOEI_GELU_TANH_3 MOEI_R(0.071354816272600248776)

static moe_real moei_gelu_tanh_exponent(moe_real z) {
    return z * (MOEI_GELU_TANH_1 + MOEI_GELU_TANH_3 * z * z);
}

static moe_real moei_gelu_tanh(moe_real x) {
    return (x < 0 ? moei_clamp_1e4(x) : x) * moe_sigmoid(moei_gelu_tanh_exponent(moei_clamp_1e4(x)));
}

static moe_real moei_relu(moe_real x) { return x < 0 ? 0 : x; } /* written so that NaN stays NaN */
static moe_real moei_relu2(moe_real x) { return moei_relu(x) * moei_relu(x); }
static moe_real moei_same(moe_real x) { return x; }

static void moei_activate_c(int act, size_t n, const moe_real *x, moe_real *y) {
    size_t i;
    switch (act) {
    default: /* there are no others */
#define MOEI_ACT_CASE(value, name, f, g) \
    case value: \
        for (i = 0; i < n; i++) y[i] = MOEI_KEPT(ACTS, value) ? f(x[i]) : x[i]; \
        break;
        MOE_ACTS(MOEI_ACT_CASE)
#undef MOEI_ACT_CASE
    }
}

/* The activation of all rows, then the product; the second pass costs little time in plain C. */
static void moei_gated_c(int act, size_t m, size_t n, const moe_real *x, size_t ldx, const moe_real *times, size_t ldt,
                         moe_real *y, size_t ldy) {
    moe_real part[64];
    size_t i, j, done, count;
    for (i = 0; i < m; i++, x += ldx, y += ldy)
        for (done = 0; done < n; done += count) {
            count = n - done < 64 ? n - done : 64;
            moei_activate_c(act, count, x + done, part);
            for (j = 0; j < count; j++) y[done + j] = times != NULL ? part[j] * times[i * ldt + done + j] : part[j];
        }
}

#ifndef MOE_NO_TRAIN
static moe_real moei_sigmoid_slope(moe_real x) {
    const moe_real e = moei_exp_neg_abs(x), d = MOEI_R(1.0) + e;
    return e / (d * d);
}

/* The slope s (1 + x a' (1 - s)) of x s, s = sigmoid(a), with 1 - s computed as sigmoid(-a), which
   keeps its digits; slope is x a'. */
static moe_real moei_times_sigmoid_slope(moe_real a, moe_real slope) {
    const moe_real e = moei_exp_neg_abs(a), d = MOEI_R(1.0) + e;
    const moe_real s = (a < 0 ? e : MOEI_R(1.0)) / d, other = (a < 0 ? MOEI_R(1.0) : e) / d;
    return s * (MOEI_R(1.0) + slope * other);
}

static moe_real moei_relu_backward(moe_real x, moe_real dy) { return x <= 0 ? 0 : dy; }
static moe_real moei_relu2_backward(moe_real x, moe_real dy) { return x <= 0 ? 0 : dy * (x + x); }
static moe_real moei_same_backward(moe_real x, moe_real dy) {
    (void)x;
    return dy;
}

static moe_real moei_silu_backward(moe_real x, moe_real dy) {
    return dy * moei_times_sigmoid_slope(x, moei_clamp_1e4(x));
}

static moe_real moei_gelu_tanh_backward(moe_real x, moe_real dy) {
    const moe_real z = moei_clamp_1e4(x), cubic = MOEI_R(3.0) * MOEI_GELU_TANH_3 * z * z;
    return dy * moei_times_sigmoid_slope(moei_gelu_tanh_exponent(z), z * (MOEI_GELU_TANH_1 + cubic));
}

/* Phi(x) + x phi(x). */
static moe_real moei_gelu_backward(moe_real x, moe_real dy) {
    const moe_real z = moei_clamp_1e4(x);
    return dy * (moei_normal_cdf(x) + z * MOEI_R(0.39894228040143267794) * MOEI_F(exp)(MOEI_R(-0.5) * z * z));
}

static moe_real moei_sigmoid_backward(moe_real x, moe_real dy) { return dy * moei_sigmoid_slope(x); }

/* 1 - tanh(x)^2 as 4 e / (1 + e)^2 with e = exp(-2|x|), which does not cancel. */
static moe_real moei_tanh_backward(moe_real x, moe_real dy) {
    return dy * (MOEI_R(4.0) * moei_sigmoid_slope(x + x));
}

static void moei_activate_backward_c(int act, size_t n, const moe_real *x, const moe_real *dy, moe_real *dx) {
    size_t i;
    switch (act) {
    default: /* there are no others */
#define MOEI_ACT_CASE(value, name, f, g) \
    case value: \
        for (i = 0; i < n; i++) dx[i] = g(x[i], dy[i]); \
        break;
        MOE_ACTS(MOEI_ACT_CASE)
#undef MOEI_ACT_CASE
    }
}

static void moei_gated_backward_c(int act, size_t n, const moe_real *x, const moe_real *times, const moe_real *dy,
                                  moe_real *dx, moe_real *d_times) {
    moe_real value[64], slope[64];
    size_t done, count, j;
    for (done = 0; done < n; done += count) {
        count = n - done < 64 ? n - done : 64;
        for (j = 0; j < count; j++) slope[j] = dy[done + j] * times[done + j];
        moei_activate_backward_c(act, count, x + done, slope, slope);
        moei_activate_c(act, count, x + done, value);
        for (j = 0; j < count; j++) value[j] *= dy[done + j];
        memcpy(dx + done, slope, count * sizeof(moe_real));
        memcpy(d_times + done, value, count * sizeof(moe_real));
    }
}

static void moei_adamw_c(const moe_adamw_step *step, size_t n, const moe_real *gradient, moe_real *m, moe_real *v,
                         moe_real *w) {
    const moe_adamw_step s = *step;
    size_t i;
    for (i = 0; i < n; i++) {
        const moe_real g = s.scale * gradient[i];
        m[i] = s.beta1 * m[i] + (MOEI_R(1.0) - s.beta1) * g;
        v[i] = s.beta2 * v[i] + (MOEI_R(1.0) - s.beta2) * g * g;
        w[i] -=
            s.lr * (m[i] * s.correction1 / (MOEI_F(sqrt)(v[i] * s.correction2) + s.epsilon) + s.weight_decay * w[i]);
    }
}
#endif

/* ==== plain C: softmax and log-sum-exp ======================================================== */

/* The index of the first maximum of n > 0 numbers. A NaN at index 0 is returned; later ones are
   skipped, and show in the caller's sum. */
static size_t moei_max_index(size_t n, const moe_real *x) {
    size_t i, best = 0;
    for (i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

/* The maximum to subtract before exp; 0 if all x are -inf, so that exp gives 0 and not NaN. */
static moe_real moei_softmax_shift(moe_real max) {
    return moe_is_finite(max) || max > 0 || moei_is_nan(max) ? max : 0;
}

/* (x - max) / T equals the documented x / T - max / T without its overflow. */
static void moei_softmax_c(size_t n, const moe_real *x, moe_real temperature, moe_real *y) {
    moe_real shift, sum = 0;
    size_t i;
    if (n == 0) return;
    shift = moei_softmax_shift(x[moei_max_index(n, x)]);
    for (i = 0; i < n; i++) {
        y[i] = MOEI_F(exp)((x[i] - shift) / temperature);
        sum += y[i];
    }
    if (sum <= 0) return; /* all -inf: y is all 0 */
    for (i = 0; i < n; i++) y[i] /= sum;
}

static moe_real moei_log_posterior_c(size_t n, moe_real scale, const moe_real *shift, const moe_real *prior,
                                     moe_real *y) {
    moe_real max = -MOEI_INFINITY;
    size_t i;
    for (i = 0; i < n; i++) {
        moe_real value = scale * (shift != NULL ? y[i] - shift[i] : y[i]);
        if (prior != NULL) value = prior[i] > 0 ? value + MOEI_F(log)(prior[i]) : -MOEI_INFINITY;
        if (value > max) max = value;
        y[i] = value;
    }
    return max;
}

static moe_real moei_exp_sum_c(size_t n, moe_real max, moe_real *y) {
    moe_real sum = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        y[i] = MOEI_F(exp)(y[i] - max);
        sum += y[i];
    }
    return sum;
}

static moe_real moei_entropy_c(size_t n, const moe_real *p) {
    moe_real sum = 0;
    size_t i;
    for (i = 0; i < n; i++)
        if (p[i] > 0) sum -= p[i] * MOEI_F(log)(p[i]);
    return sum;
}

/* The maximum's own term is 1; the others go into log1p, so that a small remainder is not lost. */
moe_real moe_log_sum_exp(size_t n, const moe_real *x) {
    moe_real max, rest = 0;
    size_t i, best;
    if (n == 0) return -MOEI_INFINITY;
    best = moei_max_index(n, x);
    max = x[best];
    if (!moe_is_finite(max)) {
        for (i = 0; i < n; i++)
            if (moei_is_nan(x[i])) return x[i];
        return max;
    }
    for (i = 0; i < n; i++)
        if (i != best) rest += MOEI_F(exp)(x[i] - max);
    return max + MOEI_F(log1p)(rest);
}

#ifndef MOE_NO_TRAIN
void moe_softmax_backward(size_t n, const moe_real *y, const moe_real *dy, moe_real temperature, moe_real *dx) {
    moe_real most, mean = 0;
    size_t i;
    if (n == 0) return;
    most = dy[moei_max_index(n, y)]; /* subtracted first: with a confident softmax most of dy cancels */
    for (i = 0; i < n; i++) mean += y[i] * (dy[i] - most);
    for (i = 0; i < n; i++) dx[i] += y[i] * (dy[i] - most - mean) / temperature;
}
#endif

/* ==== norms =================================================================================== */

void moe_layer_norm(size_t n, const moe_real *x, const moe_real *gain, const moe_real *bias, moe_real eps, moe_real *y,
                    moe_real *mean, moe_real *rstd) {
    moe_real sum = 0, squares = 0;
    moe_real center = 0, scale = 0;
    size_t i;
    for (i = 0; i < n; i++) sum += x[i];
    if (n > 0) center = sum / (moe_real)n;
    for (i = 0; i < n; i++) squares += (x[i] - center) * (x[i] - center);
    if (n > 0) scale = MOEI_R(1.0) / MOEI_F(sqrt)(squares / (moe_real)n + eps);
    for (i = 0; i < n; i++) {
        const moe_real normal = (x[i] - center) * scale;
        y[i] = (gain != NULL ? normal * gain[i] : normal) + (bias != NULL ? bias[i] : 0);
    }
    if (mean != NULL) *mean = center;
    if (rstd != NULL) *rstd = scale;
}

#ifndef MOE_NO_TRAIN
/* With h = (x - mean) scale and g = dy gain: dx += scale (g - mean(g) - h mean(g h)). */
static void moei_layer_norm_input(size_t n, const moe_real *x, const moe_real *gain, moe_real mean, moe_real scale,
                                  const moe_real *dy, moe_real *dx) {
    moe_real sum_g = 0, sum_gh = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        const moe_real g = gain != NULL ? dy[i] * gain[i] : dy[i];
        sum_g += g;
        sum_gh += g * ((x[i] - mean) * scale);
    }
    if (n > 0) {
        sum_g /= (moe_real)n;
        sum_gh /= (moe_real)n;
    }
    for (i = 0; i < n; i++) {
        const moe_real g = gain != NULL ? dy[i] * gain[i] : dy[i];
        dx[i] += scale * (g - sum_g - (x[i] - mean) * scale * sum_gh);
    }
}

void moe_layer_norm_backward(size_t n, const moe_real *x, const moe_real *gain, moe_real mean, moe_real rstd,
                             const moe_real *dy, moe_real *dx, moe_real *dgain, moe_real *dbias) {
    size_t i;
    if (dx != NULL) moei_layer_norm_input(n, x, gain, mean, rstd, dy, dx);
    for (i = 0; i < n; i++) {
        if (dgain != NULL) dgain[i] += dy[i] * ((x[i] - mean) * rstd);
        if (dbias != NULL) dbias[i] += dy[i];
    }
}
#endif

/* ==== top-k =================================================================================== */

/* Small k: insertion sort. A new element moves only past smaller scores, so of equal scores the
   lower index stays first. */
static size_t moei_top_k_by_insertion(size_t n, const moe_real *score, size_t k, int32_t *index) {
    size_t i, taken = 0;
    for (i = 0; i < n; i++) {
        size_t at;
        if (taken == k && !(score[i] > score[index[k - 1]])) continue;
        if (!moei_can_be_selected(score[i])) continue;
        at = taken < k ? taken++ : k - 1;
        for (; at > 0 && score[i] > score[index[at - 1]]; at--) index[at] = index[at - 1];
        index[at] = (int32_t)i;
    }
    return taken;
}

/* Whether a comes after b. */
static int moei_sorts_after(const moe_real *score, int32_t a, int32_t b) {
    return score[a] < score[b] || (!(score[a] > score[b]) && a > b);
}

/* Puts item into the heap [n] at position `at` or below: no position comes before one of its two
   children, 2 at + 1 and 2 at + 2. */
static void moei_heap_sift_down(size_t n, const moe_real *score, int32_t *heap, size_t at, int32_t item) {
    size_t child;
    for (; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && moei_sorts_after(score, heap[child + 1], heap[child])) child++;
        if (!moei_sorts_after(score, heap[child], item)) break;
        heap[at] = heap[child];
    }
    heap[at] = item;
}

/* Large k: a heap whose root sorts last, then emptied from the back: O(n log k). */
static size_t moei_top_k_by_heap(size_t n, const moe_real *score, size_t k, int32_t *index) {
    size_t i, taken = 0, left;
    for (i = 0; i < n && taken < k; i++)
        if (moei_can_be_selected(score[i])) index[taken++] = (int32_t)i;
    for (left = taken / 2; left-- > 0;) moei_heap_sift_down(taken, score, index, left, index[left]);
    for (; i < n; i++)
        if (score[i] > score[index[0]]) moei_heap_sift_down(taken, score, index, 0, (int32_t)i);
    for (left = taken; left-- > 1;) {
        const int32_t item = index[left];
        index[left] = index[0];
        moei_heap_sift_down(left, score, index, 0, item);
    }
    return taken;
}

enum { MOEI_TOP_K_INSERTION = 12 };

size_t moe_top_k(size_t n, const moe_real *score, size_t k, int32_t *index) {
    if (k == 0) return 0;
    return k <= MOEI_TOP_K_INSERTION ? moei_top_k_by_insertion(n, score, k, index)
                                     : moei_top_k_by_heap(n, score, k, index);
}

/* ==== random numbers ========================================================================== */

void moe_rng_seed(moe_rng *rng, uint64_t seed) {
    rng->state = seed;
}

static uint64_t moei_mix_bits(uint64_t z) {
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

uint64_t moe_rng_next(moe_rng *rng) {
    return moei_mix_bits(rng->state += UINT64_C(0x9e3779b97f4a7c15));
}

/* Draws below 2^64 mod n are rejected; the number of the remaining values is a multiple of n. */
uint64_t moe_rng_below(moe_rng *rng, uint64_t n) {
    uint64_t draw;
    if (n == 0) return 0;
    do draw = moe_rng_next(rng);
    while (draw < (0 - n) % n);
    return draw % n;
}

moe_real moe_rng_uniform(moe_rng *rng) {
#if MOE_REAL_IS_DOUBLE
    return (moe_real)(moe_rng_next(rng) >> 11) * (1.0 / 9007199254740992.0);
#else
    return (moe_real)(moe_rng_next(rng) >> 40) * (1.0f / 16777216.0f);
#endif
}

/* Each draw gives two 32-bit uniforms u, read as (u + 1/2) / 2^32, so that the sum of twelve is
   symmetric about 6. |sum - 6| is in units of 2^-32; R = (sum - 6) / 4 and everything after it in
   units of 2^-30, rounded down:
       |R| <= 1.5,  R^2 <= 2.25,  the polynomial in R^2 is at most 5.78,  |x| = |R| times it is at
       most 8.67.
   Every product of two such numbers stays below 2^64. */
moe_real moe_rng_normal(moe_rng *rng) {
    /* times 2^30 */
    static const uint64_t coefficient[5] = {32104640, 8972152, 82187326, 271021868, 4241114997u};
    const uint64_t six = (uint64_t)6 << 32;
    uint64_t sum = 6, r, square, value; /* 6: the twelve halves */
    int64_t x;
    int i;
    for (i = 0; i < 6; i++) {
        const uint64_t draw = moe_rng_next(rng);
        sum += (draw >> 32) + (draw & 0xffffffffu);
    }
    r = (sum < six ? six - sum : sum - six) >> 4;
    square = r * r >> 30;
    value = coefficient[0];
    for (i = 1; i < 5; i++) value = coefficient[i] + (value * square >> 30);
    x = (int64_t)(r * value >> 30);
    return (moe_real)(sum < six ? -x : x) * (MOEI_R(1.0) / MOEI_R(1073741824.0));
}

/* ==== the plain C table ======================================================================= */

/* The last entries of a table; they are defined below, in "packed weights". */
static moe_widen_fn moei_widen_c;
#define moei_half_c NULL
#ifndef MOE_NO_QUANT
static moe_quantized_fn moei_q8_c, moei_q8_block_c, moei_q4_c;
static moe_quantize_fn moei_quantize_c;
static moei_unpacked_fn moei_unpacked_c;
#define MOEI_QUANT_ENTRIES(set, widen) \
    {NULL, NULL, NULL, moei_q8_##set, moei_q8_block_##set, moei_q4_##set}, moei_quantize_##set, \
    moei_widen_##widen, moei_half_##widen, \
        moei_unpacked_##set
#else
#define MOEI_QUANT_ENTRIES(set, widen) {NULL}, NULL, moei_widen_##widen, moei_half_##widen, NULL
#endif

/* A separate array: the linker keeps all strings of an array if one of them is used. */
static const char moei_name_c[] = "c";

/* One row per kernel, in the order of moe_kernels: the kernel that each instruction set uses.
   Kernels are named moei_<operation>_<instruction set>; T rows are for training only. */
#define MOEI_KERNEL_ROWS(K, T) \
    /* operation         C  AVX2  AVX-512  vectors of four */ \
    K(dot,               c, avx2, avx2,    v4) \
    K(axpy,              c, avx2, avx2,    v4) \
    K(axpy_rows,         c, avx2, avx2,    v4) \
    K(activate,          c, avx2, avx512,  v4) \
    T(activate_backward, c, avx2, avx512,  v4) \
    K(softmax,           c, avx2, avx512,  v4) \
    K(top_k,             c, avx2, avx2,    c) \
    K(multiply,          c, avx2, avx2,    v4) \
    K(dispersion,        c, avx2, avx2,    c) \
    K(log_posterior,     c, avx2, avx2,    c) \
    K(exp_sum,           c, avx2, avx2,    v4) \
    K(entropy,           c, avx2, avx2,    c) \
    K(panels,            c, avx2, avx512,  v4) \
    K(gated,             c, avx2, avx512,  v4) \
    T(gated_backward,    c, avx2, avx512,  v4) \
    T(adamw,             c, avx2, avx512,  v4)

#define MOEI_ROW_C(operation, c, avx2, avx512, v4) moei_##operation##_##c,
#define MOEI_ROW_AVX2(operation, c, avx2, avx512, v4) moei_##operation##_##avx2,
#define MOEI_ROW_AVX512(operation, c, avx2, avx512, v4) moei_##operation##_##avx512,
#define MOEI_ROW_V4(operation, c, avx2, avx512, v4) moei_##operation##_##v4,
#define MOEI_ROW_NULL(operation, c, avx2, avx512, v4) NULL,
#ifndef MOE_NO_TRAIN
#define MOEI_TABLE_ROWS(ROW) MOEI_KERNEL_ROWS(ROW, ROW)
#else
#define MOEI_TABLE_ROWS(ROW) MOEI_KERNEL_ROWS(ROW, MOEI_ROW_NULL)
#endif
#define moei_top_k_c moe_top_k

/* A table: its products, its column of the rows, and its entries for packed weights. */
#define MOEI_KERNEL_SET(name, id, set, ROW, streamed, quant_set, widen) \
    { name, id, {{moei_nt_##set}, {moei_nn_##set}, {moei_tn_##set}}, MOEI_TABLE_ROWS(ROW) \
      moei_panels_##streamed, MOEI_QUANT_ENTRIES(quant_set, widen) }

static const moe_kernels moei_kernels_c = MOEI_KERNEL_SET(moei_name_c, MOE_KERNELS_C, c, MOEI_ROW_C, c, c, c);

/* The product in all orientations for an instruction set: its moei_block_ takes block_m rows at a
   time and packs `panels` panels on the stack, aligned to a cache line. */
#define MOEI_MATMUL(isa, target, block_m, panels) \
    target static void moei_matmul_##isa(int op, size_t m, size_t n, size_t k, const float *a, size_t lda, \
                                         const float *b, size_t ldb, float *c, size_t ldc, int accumulate) { \
        const size_t ra = op == MOE_MATMUL_TN ? 1 : lda, ca = op == MOE_MATMUL_TN ? lda : 1; \
        const size_t rb = op == MOE_MATMUL_NT ? 1 : ldb; \
        float memory[(panels) * MOEI_BLOCK_K * MOEI_PANEL + 16]; \
        float *room = memory + (64 - (uintptr_t)memory % 64) % 64 / sizeof(float); \
        size_t i, p; \
        if (k == 0 && !accumulate) moei_zero_rows(m, n, c, ldc); \
        for (i = 0; i < m; i += (block_m)) { \
            const size_t rows = moei_smaller(m - i, block_m); \
            for (p = 0; p < k; p += MOEI_BLOCK_K) { \
                const size_t block = moei_smaller(k - p, MOEI_BLOCK_K); \
                moei_block_##isa(op, rows, n, block, a + i * ra + p * ca, ra, ca, b + p * rb, ldb, c + i * ldc, ldc, \
                                 accumulate || p > 0, room); \
            } \
        } \
    }

/* How many of the k steps (whole blocks) to take so that rows x steps of the left operand, at most
   cached numbers, stay in the second-level cache during all panels. */
MOEI_TOOL size_t moei_cached_steps(size_t cached, size_t rows, size_t k) {
    const size_t steps = cached / rows,
                 chunk = steps > MOEI_BLOCK_K ? steps - steps % MOEI_BLOCK_K : (size_t)MOEI_BLOCK_K;
    return k < chunk ? k : chunk;
}

/* The product with packed panels for an instruction set: its moei_columns_ computes up to block_m
   rows of the first remaining columns and returns how many columns it took. It may prefetch: b is
   at step `done` of the `chunk` steps that all columns read. */
#define MOEI_PANELS(isa, target, block_m, cached) \
    target static void moei_panels_##isa(size_t m, size_t n, size_t k, const float *a, size_t ra, size_t ca, \
                                         const float *b, size_t panel, float *c, size_t ldc, int accumulate) { \
        size_t i, j, p, from, rows, chunk, columns; \
        if (k == 0 && !accumulate) moei_zero_rows(m, n, c, ldc); \
        for (i = 0; i < m; i += rows) { \
            rows = moei_smaller(m - i, block_m); \
            for (from = 0; from < k; from += chunk) { \
                chunk = moei_cached_steps(cached, rows, k - from); \
                for (j = 0, columns = 0; j < n; j += columns) \
                    for (p = from; p < from + chunk; p += MOEI_BLOCK_K) \
                        columns = moei_columns_##isa(rows, n - j, moei_smaller(from + chunk - p, MOEI_BLOCK_K), \
                                                     a + i * ra + p * ca, ra, ca, \
                                                     b + j / MOEI_PANEL * panel + p * MOEI_PANEL, MOEI_PANEL, panel, \
                                                     c + i * ldc + j, ldc, accumulate || p > 0, p - from, chunk); \
            } \
        } \
    }

/* An entry of a table, computed by MOEI_MATMUL's product. */
#define MOEI_MATMUL_ENTRY(name, isa, op) \
    static void moei_##name##_##isa(size_t m, size_t n, size_t k, const float *a, size_t lda, const void *b, \
                                    size_t ldb, float *c, size_t ldc, int accumulate) { \
        moei_matmul_##isa(op, m, n, k, a, lda, (const float *)b, ldb, c, ldc, accumulate); \
    }

/* An instruction set's activations, given its exp, tanh, comparisons and limits for vectors. act is
   a constant after inlining; OP: its name of an operation. */
#define MOEI_ACTIVATIONS(set, target, VECTOR, OP) \
    target MOEI_INLINE VECTOR moei_sigmoid_##set(VECTOR x) { \
        const VECTOR one = OP(set1)(1.0f), e = moei_exp_##set(moei_neg_abs_##set(x)); \
        return OP(div)(moei_if_negative_##set(x, e, one), OP(add)(one, e)); \
    } \
    /* exp(-x^2 / 2), corrected for the rounding error of the square */ \
    target MOEI_INLINE VECTOR moei_gauss_##set(VECTOR x) { \
        const VECTOR half = OP(set1)(-0.5f), z = moei_at_least_##set(moei_neg_abs_##set(x), -15.0f); \
        const VECTOR square = OP(mul)(z, z), rest = moei_square_error_##set(z, square); \
        const VECTOR e = moei_exp_##set(OP(mul)(half, square)); \
        return OP(fmadd)(OP(mul)(half, rest), e, e); \
    } \
    /* Phi(-|x|) = exp(-x^2/2) t Q(t), t = 1 / (1 + 0.3 |x|), Q fitted to relative error 4e-9 */ \
    target MOEI_INLINE VECTOR moei_normal_tail_##set(VECTOR x, VECTOR bell) { \
        const VECTOR one = OP(set1)(1.0f), z = moei_at_least_##set(moei_neg_abs_##set(x), -15.0f); \
        const VECTOR t = OP(div)(one, OP(fmadd)(z, OP(set1)(-0.3f), one)); \
        VECTOR q = OP(set1)(-2.062863988e-02f); \
        q = OP(fmadd)(q, t, OP(set1)(1.124646791e-01f)); \
        q = OP(fmadd)(q, t, OP(set1)(-2.282845255e-01f)); \
        q = OP(fmadd)(q, t, OP(set1)(1.918829512e-01f)); \
        q = OP(fmadd)(q, t, OP(set1)(-7.950889292e-02f)); \
        q = OP(fmadd)(q, t, OP(set1)(9.620478702e-02f)); \
        q = OP(fmadd)(q, t, OP(set1)(7.837226539e-02f)); \
        q = OP(fmadd)(q, t, OP(set1)(1.102393389e-01f)); \
        q = OP(fmadd)(q, t, OP(set1)(1.195713183e-01f)); \
        q = OP(fmadd)(q, t, OP(set1)(1.196867166e-01f)); \
        return OP(mul)(OP(mul)(t, q), bell); \
    } \
    /* Phi(x), from the tail on x's own side so that small values keep their digits */ \
    target MOEI_INLINE VECTOR moei_normal_cdf_##set(VECTOR x, VECTOR bell) { \
        const VECTOR tail = moei_normal_tail_##set(x, bell); \
        return moei_if_negative_##set(x, tail, OP(sub)(OP(set1)(1.0f), tail)); \
    } \
    /* see moei_gelu_tanh_exponent; z is limited to 1e4 */ \
    target MOEI_INLINE VECTOR moei_gelu_tanh_factor_##set(VECTOR z, float cubic) { \
        return OP(fmadd)(OP(mul)(z, z), OP(set1)(cubic), OP(set1)(MOEI_GELU_TANH_1)); \
    } \
    target MOEI_INLINE VECTOR moei_gelu_tanh_exponent_##set(VECTOR z) { \
        return OP(mul)(z, moei_gelu_tanh_factor_##set(z, MOEI_GELU_TANH_3)); \
    } \
    target MOEI_INLINE VECTOR moei_act_##set(int act, VECTOR x) { \
        /* see moei_clamp_1e4 */ \
        const VECTOR low = moei_at_least_##set(x, -1e4f), positive = moei_at_least_##set(x, 0.0f); \
        switch (act) { \
        case MOE_ACT_RELU: return positive; \
        case MOE_ACT_SILU: return OP(mul)(low, moei_sigmoid_##set(x)); \
        case MOE_ACT_GELU: return OP(mul)(low, moei_normal_cdf_##set(x, moei_gauss_##set(x))); \
        case MOE_ACT_TANH: return moei_tanh_##set(x); \
        case MOE_ACT_SIGMOID: return moei_sigmoid_##set(x); \
        case MOE_ACT_GELU_TANH: \
            return OP(mul)(low, moei_sigmoid_##set(moei_gelu_tanh_exponent_##set(moei_clamp_1e4_##set(x)))); \
        case MOE_ACT_RELU2: return OP(mul)(positive, positive); \
        default: return x; \
        } \
    }

/* The entries of the table that apply them, to vectors of `width` numbers; times NULL: 1. */
#define MOEI_GATED_FORWARD(set, target, VECTOR, width, OP) \
    target MOEI_INLINE void moei_gated_rows_##set(int act, size_t m, size_t n, const float *x, size_t ldx, \
                                                  const float *times, size_t ldt, float *y, size_t ldy) { \
        size_t i, j; \
        for (i = 0; i < m; i++, x += ldx, y += ldy) \
            for (j = 0; j < n; j += (width)) { \
                VECTOR result = moei_act_##set(act, moei_load_part_##set(n - j, x + j)); \
                if (times != NULL) result = OP(mul)(result, moei_load_part_##set(n - j, times + i * ldt + j)); \
                moei_store_part_##set(n - j, y + j, result); \
            } \
    } \
    target static void moei_gated_##set(int act, size_t m, size_t n, const float *x, size_t ldx, const float *times, \
                                        size_t ldt, float *y, size_t ldy) { \
        switch (act) { MOE_ACTS(MOEI_GATED_CASE_##set) } \
    } \
    static void moei_activate_##set(int act, size_t n, const float *x, float *y) { \
        moei_gated_##set(act, 1, n, x, n, NULL, 0, y, n); \
    }
#define MOEI_GATED_CASE(set, value) \
    case value: \
        moei_gated_rows_##set(value, m, n, x, ldx, times, ldt, y, ldy); \
        break;

#ifndef MOE_NO_TRAIN
/* Derivatives of the activations: moei_slope_ is dy act'(x). */
#define MOEI_SLOPES(set, target, VECTOR, OP) \
    /* e / (1 + e)^2 with e = exp(z), z <= 0 */ \
    target MOEI_INLINE VECTOR moei_sigmoid_slope_##set(VECTOR z) { \
        const VECTOR e = moei_exp_##set(z), d = OP(add)(OP(set1)(1.0f), e); \
        return OP(div)(e, OP(mul)(d, d)); \
    } \
    /* see moei_times_sigmoid_slope */ \
    target MOEI_INLINE VECTOR moei_times_sigmoid_slope_##set(VECTOR a, VECTOR slope) { \
        const VECTOR one = OP(set1)(1.0f), e = moei_exp_##set(moei_neg_abs_##set(a)); \
        const VECTOR large = OP(div)(one, OP(add)(one, e)), less = OP(mul)(e, large); \
        const VECTOR s = moei_if_negative_##set(a, less, large), other = moei_if_negative_##set(a, large, less); \
        return OP(mul)(s, OP(fmadd)(slope, other, one)); \
    } \
    target MOEI_INLINE VECTOR moei_gelu_slope_##set(VECTOR x) { \
        const VECTOR bell = moei_gauss_##set(x), scaled = OP(mul)(OP(set1)(0.39894228040f), bell); \
        return OP(fmadd)(moei_clamp_1e4_##set(x), scaled, moei_normal_cdf_##set(x, bell)); \
    } \
    target MOEI_INLINE VECTOR moei_slope_##set(int act, VECTOR x, VECTOR dy) { \
        const VECTOR negative = moei_neg_abs_##set(x), z = moei_clamp_1e4_##set(x); \
        VECTOR slope; \
        switch (act) { \
        case MOE_ACT_RELU: return moei_unless_low_##set(x, dy); \
        case MOE_ACT_RELU2: return moei_unless_low_##set(x, OP(mul)(dy, OP(add)(x, x))); \
        case MOE_ACT_SILU: return OP(mul)(dy, moei_times_sigmoid_slope_##set(x, z)); \
        case MOE_ACT_GELU: return OP(mul)(dy, moei_gelu_slope_##set(x)); \
        case MOE_ACT_GELU_TANH: \
            slope = OP(mul)(z, moei_gelu_tanh_factor_##set(z, 3.0f * MOEI_GELU_TANH_3)); \
            return OP(mul)(dy, moei_times_sigmoid_slope_##set(moei_gelu_tanh_exponent_##set(z), slope)); \
        case MOE_ACT_TANH: \
            slope = moei_sigmoid_slope_##set(OP(add)(negative, negative)); \
            return OP(mul)(dy, OP(mul)(OP(set1)(4.0f), slope)); \
        case MOE_ACT_SIGMOID: return OP(mul)(dy, moei_sigmoid_slope_##set(negative)); \
        default: return dy; \
        } \
    }

/* The same, backward; times and d_times NULL: only dx = dy act'(x). */
#define MOEI_GATED_BACKWARD(set, target, VECTOR, width, OP) \
    target MOEI_INLINE void moei_gated_backward_act_##set(int act, size_t n, const float *x, const float *times, \
                                                          const float *dy, float *dx, float *d_times) { \
        size_t j; \
        for (j = 0; j < n; j += (width)) { \
            const VECTOR value = moei_load_part_##set(n - j, x + j), d = moei_load_part_##set(n - j, dy + j); \
            const VECTOR in = times != NULL ? OP(mul)(d, moei_load_part_##set(n - j, times + j)) : d; \
            moei_store_part_##set(n - j, dx + j, moei_slope_##set(act, value, in)); \
            if (d_times != NULL) \
                moei_store_part_##set(n - j, d_times + j, OP(mul)(d, moei_act_##set(act, value))); \
        } \
    } \
    target static void moei_gated_backward_##set(int act, size_t n, const float *x, const float *times, \
                                                 const float *dy, float *dx, float *d_times) { \
        switch (act) { MOE_ACTS(MOEI_BACKWARD_CASE_##set) } \
    } \
    static void moei_activate_backward_##set(int act, size_t n, const float *x, const float *dy, float *dx) { \
        moei_gated_backward_##set(act, n, x, NULL, dy, dx, NULL); \
    }
#define MOEI_BACKWARD_CASE(set, value) \
    case value: \
        moei_gated_backward_act_##set(value, n, x, times, dy, dx, d_times); \
        break;

/* moe_adamw for an instruction set. */
#define MOEI_ADAMW(set, target, VECTOR, width, OP) \
    target static void moei_adamw_##set(const moe_adamw_step *step, size_t n, const float *gradient, float *m, \
                                        float *v, float *w) { \
        const VECTOR scale = OP(set1)(step->scale), back = OP(set1)(-step->lr); \
        const VECTOR decay = OP(set1)(step->weight_decay); \
        const VECTOR keep1 = OP(set1)(step->beta1), take1 = OP(set1)(1.0f - step->beta1); \
        const VECTOR correction1 = OP(set1)(step->correction1); \
        const VECTOR keep2 = OP(set1)(step->beta2), take2 = OP(set1)(1.0f - step->beta2); \
        const VECTOR correction2 = OP(set1)(step->correction2); \
        const VECTOR epsilon = OP(set1)(step->epsilon); \
        size_t i; \
        for (i = 0; i < n; i += (width)) { \
            const VECTOR g = OP(mul)(scale, moei_load_part_##set(n - i, gradient + i)); \
            const VECTOR at = moei_load_part_##set(n - i, w + i); \
            const VECTOR first = OP(fmadd)(keep1, moei_load_part_##set(n - i, m + i), OP(mul)(take1, g)); \
            const VECTOR second = \
                OP(fmadd)(keep2, moei_load_part_##set(n - i, v + i), OP(mul)(OP(mul)(take2, g), g)); \
            const VECTOR divisor = OP(add)(OP(sqrt)(OP(mul)(second, correction2)), epsilon); \
            const VECTOR way = OP(fmadd)(decay, at, OP(div)(OP(mul)(first, correction1), divisor)); \
            moei_store_part_##set(n - i, m + i, first); \
            moei_store_part_##set(n - i, v + i, second); \
            moei_store_part_##set(n - i, w + i, OP(fmadd)(back, way, at)); \
        } \
    }
#endif

/* ==== AVX2 and FMA (float) =======================================================================

   Vectors run along the columns of C, one lane per element, so a lane accumulates over ascending p
   as in plain C, with each multiplication fused into the addition. Every code path below (tiles of
   any height, packed or not) therefore gives an element the same bits. The right operand is packed
   into panels of up to 256 x 16, [p][16], on the stack; the left one is read in place by
   broadcasts. */

#ifdef MOEI_HAVE_AVX2

#if defined(__GNUC__) || defined(__clang__)
#define MOEI_AVX2 __attribute__((target("avx2,fma")))
#define MOEI_LOADED(v) __asm__("" : "+v"(v)); /* gcc would load it again for every row */
#else
#define MOEI_AVX2
#define MOEI_LOADED(v)
#endif

enum {
    /* rows of a tile: 12 sums, 2 vectors of the panel and a broadcast fit in 16 registers */
    MOEI_TILE = 6,
    /* rows that are multiplied by all panels before the next rows: 192 x 256 numbers stay in the
       second-level cache */
    MOEI_BLOCK_M = 192,
    /* the same if each panel is packed for these rows alone: more rows, less packing */
    MOEI_PACKING_M = 384,
    /* elements of the left operand that stay in the second-level cache during all panels: half a
       MiB */
    MOEI_CACHED = 131072,
    /* up to this many columns, one row of an NT product is limited by the latency of its few sums,
       not by memory */
    MOEI_ROW_COLUMNS = 24,
    /* up to this many rows, packing an operand that could be read in place costs more than it
       gains */
    MOEI_UNPACKED_M = 8
};

/* A mask with the lanes below count (at most 8) set. */
MOEI_AVX2 MOEI_INLINE __m256i moei_mask_avx2(size_t count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), lane);
}

/* What to prefetch while tiles are computed: at every step one line at `at` and one `second` bytes
   further, from rows of `length` bytes that are `stride` bytes apart. Addresses, not pointers,
   because they may run past the end. */
typedef struct moei_prefetch {
    uintptr_t at, end;
    size_t step, length, stride, second;
} moei_prefetch;

static moei_prefetch moei_prefetch_begin(uintptr_t at, size_t length, size_t stride, size_t second) {
    const moei_prefetch next = {at, at + length, 64, length, stride, second};
    return next;
}

MOEI_AVX2 MOEI_INLINE void moei_prefetch_step(moei_prefetch *next, int two) {
    if (next->at >= next->end) {
        next->at += next->stride - next->length;
        next->end += next->stride;
    }
    _mm_prefetch((const char *)next->at, _MM_HINT_T1);
    if (two) _mm_prefetch((const char *)(next->at + next->second), _MM_HINT_T1);
    next->at += next->step;
}

/* A block ahead of b in the order in which tiles of so many panels read a chunk. */
static moei_prefetch moei_prefetch_panels(const float *b, size_t done, size_t chunk, size_t panel, size_t panels) {
    const uintptr_t start = (uintptr_t)b - done * 64;
    moei_prefetch next = moei_prefetch_begin(start, chunk * 64, panels * panel * sizeof(float), panel * sizeof(float));
    next.at += (done + moei_smaller(chunk, MOEI_BLOCK_K)) * 64;
    return next;
}

/* Prefetches a panel of weights from memory (cold), 24 lines ahead. */
#define MOEI_AHEAD(cold, b) \
    if (cold) _mm_prefetch((const char *)((uintptr_t)(b) + 24 * 64), _MM_HINT_T0);

/* Stores the first count numbers, at most eight, in pieces: masked stores are slow on some
   processors. */
MOEI_AVX2 MOEI_INLINE void moei_store_avx2(size_t count, float *y, __m256 value) {
    __m128 part = _mm256_castps256_ps128(value);
    if (count >= 8) {
        _mm256_storeu_ps(y, value);
        return;
    }
    if (count & 4) {
        _mm_storeu_ps(y, part);
        y += 4;
        part = _mm256_extractf128_ps(value, 1);
    }
    if (count & 2) {
        _mm_storel_pi((__m64 *)(void *)y, part);
        y += 2;
        part = _mm_movehl_ps(part, part);
    }
    if (count & 1) _mm_store_ss(y, part);
}

/* c = c where kept has all bits, else 0, + sum: a mask in place of a branch for every vector. */
MOEI_AVX2 MOEI_INLINE void moei_add_to_avx2(float *c, __m256i kept, __m256 sum) {
    _mm256_storeu_ps(c, _mm256_add_ps(_mm256_maskload_ps(c, kept), sum));
}

/* rows x 16 (wide) or rows x 8: C = (load ? C : 0) + the sum over one block of k. rows and wide are
   constants after inlining. b is a panel, or the operand itself. */
MOEI_AVX2 MOEI_INLINE void moei_tile_avx2(int rows, int wide, size_t k, const float *a, size_t ra, size_t ca,
                                          const float *b, size_t rb, float *c, size_t ldc, int load,
                                          moei_prefetch *ahead) {
    const float *a3 = a + (rows > 3 ? 3 * ra : 0);
    const __m256 zero = _mm256_setzero_ps();
    moei_prefetch next = *ahead;
    __m256 s00 = zero, s01 = zero;
    __m256 s10 = zero, s11 = zero;
    __m256 s20 = zero, s21 = zero;
    __m256 s30 = zero, s31 = zero;
    __m256 s40 = zero, s41 = zero;
    __m256 s50 = zero, s51 = zero;
    const __m256i kept = _mm256_set1_epi32(load ? -1 : 0);
    size_t p;
#define MOEI_STEP(row, at) \
    if (rows > row) { \
        const __m256 x = _mm256_broadcast_ss(at); \
        s##row##0 = _mm256_fmadd_ps(x, y0, s##row##0); \
        if (wide) s##row##1 = _mm256_fmadd_ps(x, y1, s##row##1); \
    }
#define MOEI_STORE(row) \
    if (rows > row) { \
        moei_add_to_avx2(c, kept, s##row##0); \
        if (wide) moei_add_to_avx2(c + 8, kept, s##row##1); \
        c += ldc; \
    }
    for (p = 0; p < (size_t)rows; p++) _mm_prefetch((const char *)(c + p * ldc), _MM_HINT_T0);
    for (p = 0; p < k; p++, a += ca, a3 += ca, b += rb) {
        const __m256 y0 = _mm256_loadu_ps(b), y1 = wide ? _mm256_loadu_ps(b + 8) : zero;
        moei_prefetch_step(&next, 0);
        MOEI_STEP(0, a)
        MOEI_STEP(1, a + ra)
        MOEI_STEP(2, a + 2 * ra)
        MOEI_STEP(3, a3)
        MOEI_STEP(4, a3 + ra)
        MOEI_STEP(5, a3 + 2 * ra)
    }
    *ahead = next;
    MOEI_STORE(0)
    MOEI_STORE(1)
    MOEI_STORE(2)
    MOEI_STORE(3)
    MOEI_STORE(4)
    MOEI_STORE(5)
#undef MOEI_STEP
#undef MOEI_STORE
}

/* m rows over one panel of 16 or 8 columns. The last seven to eleven rows are split into two even
   tiles: a tile of one or two rows would be limited by the latency of its few sums. */
MOEI_AVX2 static void moei_rows_avx2(int wide, size_t m, size_t k, const float *a, size_t ra, size_t ca, const float *b,
                                     size_t rb, float *c, size_t ldc, int load, moei_prefetch next) {
#define MOEI_CASE(rows) \
    case rows: \
        if (wide) moei_tile_avx2(rows, 1, k, a, ra, ca, b, rb, c, ldc, load, &next); \
        else moei_tile_avx2(rows, 0, k, a, ra, ca, b, rb, c, ldc, load, &next); \
        break;
    next.step = 64 / ((m + MOEI_TILE - 1) / MOEI_TILE); /* the lines are divided among the tiles */
    while (m > 0) {
        const size_t rows = m <= MOEI_TILE ? m : m < 2 * MOEI_TILE ? (m + 1) / 2 : (size_t)MOEI_TILE;
        switch (rows) {
            MOEI_CASE(1)
            MOEI_CASE(2)
            MOEI_CASE(3)
            MOEI_CASE(4)
            MOEI_CASE(5)
        default:
            MOEI_CASE(6)
        }
        m -= rows;
        a += rows * ra;
        c += rows * ldc;
    }
#undef MOEI_CASE
}

/* Columns that do not fill a vector are computed in a copy of C as wide as the panel, so that no
   tile accesses memory outside the rows. */
MOEI_AVX2 static void moei_edge_avx2(size_t columns, size_t m, size_t k, const float *a, size_t ra, size_t ca,
                                     const float *panel, float *c, size_t ldc, int load, moei_prefetch next) {
    float part[(int)MOEI_TILE * MOEI_PANEL] = {0};
    size_t i, done, rows;
    for (done = 0; done < m; done += rows) {
        rows = moei_smaller(m - done, MOEI_TILE);
        for (i = 0; load && i < rows; i++) memcpy(part + i * MOEI_PANEL, c + (done + i) * ldc, columns * sizeof(float));
        moei_rows_avx2(columns > 8, rows, k, a + done * ra, ra, ca, panel, MOEI_PANEL, part, MOEI_PANEL, load, next);
        for (i = 0; i < rows; i++) memcpy(c + (done + i) * ldc, part + i * MOEI_PANEL, columns * sizeof(float));
    }
}

#define MOEI_STEP(row, i, y) s##row##i = _mm256_fmadd_ps(x##row, y, s##row##i);
#define MOEI_COLUMNS(row) \
    if (rows > row) { \
        MOEI_STEP(row, 0, y0) MOEI_STEP(row, 1, y1) \
    } \
    if (rows > row && panels > 1) { \
        MOEI_STEP(row, 2, y2) MOEI_STEP(row, 3, y3) \
    }
#define MOEI_STORE(row, i) moei_add_to_avx2(c + 8 * i, kept, s##row##i);
#define MOEI_STORE_ROW(row) \
    if (rows > row) { \
        MOEI_STORE(row, 0) MOEI_STORE(row, 1) \
    } \
    if (rows > row && panels > 1) { \
        MOEI_STORE(row, 2) MOEI_STORE(row, 3) \
    }

/* Few rows over several panels at once: enough sums to hide their latency, and the panels are
   streamed side by side. rows x panels is 1 x 4, 1 x 2, 2 x 2 or 3 x 2, or 1 x 1 or 2 x 1 for
   weights from memory in one stream; cold: they come from memory and are prefetched. These are
   constants after inlining; otherwise as the tile above. */
MOEI_AVX2 MOEI_INLINE void moei_wide_tile_avx2(int rows, int panels, int cold, size_t k, const float *a, size_t ra,
                                               size_t ca, const float *b, size_t panel, float *c, size_t ldc,
                                               int load) {
    const float *b1 = panels > 1 ? b + panel : b, *b2 = panels > 2 ? b1 + panel : b;
    const float *b3 = panels > 2 ? b2 + panel : b;
    const __m256 zero = _mm256_setzero_ps();
    __m256 s00 = zero, s01 = zero;
    __m256 s02 = zero, s03 = zero;
    __m256 s04 = zero, s05 = zero;
    __m256 s06 = zero, s07 = zero;
    __m256 s10 = zero, s11 = zero;
    __m256 s12 = zero, s13 = zero;
    __m256 s20 = zero, s21 = zero;
    __m256 s22 = zero, s23 = zero;
    const __m256i kept = _mm256_set1_epi32(load ? -1 : 0);
    size_t p;
    for (p = 0; p < k; p++, a += ca, b += MOEI_PANEL, b1 += MOEI_PANEL, b2 += MOEI_PANEL, b3 += MOEI_PANEL) {
        const __m256 x0 = _mm256_broadcast_ss(a), x1 = rows > 1 ? _mm256_broadcast_ss(a + ra) : zero;
        const __m256 x2 = rows > 2 ? _mm256_broadcast_ss(a + 2 * ra) : zero;
        __m256 y0 = _mm256_loadu_ps(b), y1 = _mm256_loadu_ps(b + 8);
        __m256 y2 = _mm256_loadu_ps(b1), y3 = _mm256_loadu_ps(b1 + 8);
        if (rows == 2 && panels > 1 && !cold) {
            MOEI_LOADED(y0) MOEI_LOADED(y1) MOEI_LOADED(y2) MOEI_LOADED(y3)
        }
        MOEI_AHEAD(cold, b) MOEI_AHEAD(cold, b1)
        MOEI_AHEAD(cold && panels > 2, b2) MOEI_AHEAD(cold && panels > 2, b3)
        MOEI_COLUMNS(0)
        MOEI_COLUMNS(1)
        MOEI_COLUMNS(2)
        if (panels > 2) {
            MOEI_STEP(0, 4, _mm256_loadu_ps(b2)) MOEI_STEP(0, 5, _mm256_loadu_ps(b2 + 8))
            MOEI_STEP(0, 6, _mm256_loadu_ps(b3)) MOEI_STEP(0, 7, _mm256_loadu_ps(b3 + 8))
        }
    }
    MOEI_STORE_ROW(0)
    if (panels > 2) {
        MOEI_STORE(0, 4) MOEI_STORE(0, 5) MOEI_STORE(0, 6) MOEI_STORE(0, 7)
    }
    c += rows > 1 ? ldc : 0;
    MOEI_STORE_ROW(1)
    c += rows > 2 ? ldc : 0;
    MOEI_STORE_ROW(2)
}
#undef MOEI_STEP
#undef MOEI_COLUMNS
#undef MOEI_STORE
#undef MOEI_STORE_ROW

/* How many of the n columns are computed at once for up to three rows: 64, 32, or 0 if fewer remain
   or there are more rows. */
static size_t moei_wide_columns_avx2(size_t m, size_t n) {
    return m == 1 && n >= 64 ? 64 : m <= 3 && n >= 32 ? 32 : 0;
}

MOEI_AVX2 MOEI_INLINE void moei_wide_rows_avx2(size_t columns, int cold, size_t m, size_t k, const float *a, size_t ra,
                                               size_t ca, const float *b, size_t panel, float *c, size_t ldc,
                                               int load) {
    if (columns > 32) moei_wide_tile_avx2(1, 4, cold, k, a, ra, ca, b, panel, c, ldc, load);
    else if (m == 1) moei_wide_tile_avx2(1, 2, cold, k, a, ra, ca, b, panel, c, ldc, load);
    else if (m == 2) moei_wide_tile_avx2(2, 2, cold, k, a, ra, ca, b, panel, c, ldc, load);
    else moei_wide_tile_avx2(3, 2, cold, k, a, ra, ca, b, panel, c, ldc, load);
}

MOEI_AVX2 static size_t moei_columns_avx2(size_t m, size_t n, size_t k, const float *a, size_t ra, size_t ca,
                                          const float *b, size_t rb, size_t panel, float *c, size_t ldc, int load,
                                          size_t done, size_t chunk) {
    const size_t wide = moei_wide_columns_avx2(m, n), columns = wide > 0 ? wide : moei_smaller(n, MOEI_PANEL);
    const moei_prefetch next = moei_prefetch_panels(b, done, chunk, panel, 1);
    if (wide > 0) moei_wide_rows_avx2(wide, 0, m, k, a, ra, ca, b, panel, c, ldc, load);
    else if (columns % 8 == 0) moei_rows_avx2(columns > 8, m, k, a, ra, ca, b, rb, c, ldc, load, next);
    else moei_edge_avx2(columns, m, k, a, ra, ca, b, c, ldc, load, next);
    return columns;
}

MOEI_PANELS(avx2, MOEI_AVX2, MOEI_BLOCK_M, MOEI_CACHED)

/* Memory is read fastest in several prefetched streams or, by some processors, in one without
   prefetching; a cache in several without. */

MOEI_AVX2 static size_t moei_columns_streams_avx2(size_t m, size_t n, size_t k, const float *a, size_t ra, size_t ca,
                                                  const float *b, size_t rb, size_t panel, float *c, size_t ldc,
                                                  int load, size_t done, size_t chunk) {
    const size_t wide = moei_wide_columns_avx2(m, n);
    if (wide == 0) return moei_columns_avx2(m, n, k, a, ra, ca, b, rb, panel, c, ldc, load, done, chunk);
    moei_wide_rows_avx2(wide, 1, m, k, a, ra, ca, b, panel, c, ldc, load);
    return wide;
}

MOEI_PANELS(streams_avx2, MOEI_AVX2, MOEI_BLOCK_M, MOEI_CACHED)

/* One or two rows: panel by panel. */
MOEI_AVX2 static void moei_panels_stream_avx2(size_t m, size_t n, size_t k, const float *a, size_t ra, size_t ca,
                                              const float *b, size_t panel, float *c, size_t ldc, int accumulate) {
    size_t j = 0, p, block;
    for (; (m == 1 || m == 2) && k > 0 && n - j >= MOEI_PANEL; j += MOEI_PANEL, b += panel)
        for (p = 0; p < k; p += block) {
            const float *left = a + p * ca, *right = b + p * MOEI_PANEL;
            const int load = accumulate || p > 0;
            block = moei_smaller(k - p, MOEI_BLOCK_K);
            if (m == 1) moei_wide_tile_avx2(1, 1, 0, block, left, ra, ca, right, panel, c + j, ldc, load);
            else moei_wide_tile_avx2(2, 1, 0, block, left, ra, ca, right, panel, c + j, ldc, load);
        }
    moei_panels_avx2(m, n - j, k, a, ra, ca, b, panel, c + j, ldc, accumulate);
}

/* Transposes four steps of p in eight rows: y[s] holds step s of rows 0 to 7. Row i begins at b +
   at[i]. */
MOEI_AVX2 MOEI_INLINE void moei_transpose_rows_avx2(const float *b, const size_t at[8], __m256 y[4]) {
#define MOEI_PAIR(row) \
    _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(b + at[row])), _mm_loadu_ps(b + at[(row) + 4]), 1)
    const __m256 r0 = MOEI_PAIR(0), r1 = MOEI_PAIR(1);
    const __m256 r2 = MOEI_PAIR(2), r3 = MOEI_PAIR(3);
    const __m256 t0 = _mm256_unpacklo_ps(r0, r1), t1 = _mm256_unpackhi_ps(r0, r1);
    const __m256 t2 = _mm256_unpacklo_ps(r2, r3), t3 = _mm256_unpackhi_ps(r2, r3);
    y[0] = _mm256_shuffle_ps(t0, t2, 0x44);
    y[1] = _mm256_shuffle_ps(t0, t2, 0xee);
    y[2] = _mm256_shuffle_ps(t1, t3, 0x44);
    y[3] = _mm256_shuffle_ps(t1, t3, 0xee);
#undef MOEI_PAIR
}

/* The same, row i begins at b + i * ldb. */
MOEI_AVX2 MOEI_INLINE void moei_transpose_avx2(const float *b, size_t ldb, __m256 y[4]) {
    const size_t at[8] = {0, ldb, 2 * ldb, 3 * ldb, 4 * ldb, 5 * ldb, 6 * ldb, 7 * ldb};
    moei_transpose_rows_avx2(b, at, y);
}

/* The panel of rows b[0 .. columns) of an NT operand: panel[p][j] = b[j][p]; missing columns are
   0. */
MOEI_AVX2 static void moei_pack_transposed_avx2(size_t columns, size_t k, const float *b, size_t ldb, float *panel) {
    size_t j, p, i;
    for (j = 0; j < MOEI_PANEL; j += 8, panel += 8) {
        const size_t there = columns > j ? columns - j : 0;
        const float *bj = b + (there > 0 ? j * ldb : 0);
        p = 0;
        if (there >= 8)
            for (; p + 4 <= k; p += 4) {
                __m256 y[4];
                moei_transpose_avx2(bj + p, ldb, y);
                for (i = 0; i < 4; i++) _mm256_storeu_ps(panel + (p + i) * MOEI_PANEL, y[i]);
            }
        for (; p < k; p++)
            for (i = 0; i < 8; i++) panel[p * MOEI_PANEL + i] = i < there ? bj[i * ldb + p] : 0.0f;
    }
}

/* The panel of columns b[.][0 .. columns) of an NN or TN operand. */
MOEI_AVX2 static void moei_pack_avx2(size_t columns, size_t k, const float *b, size_t ldb, float *panel) {
    const __m256i low = moei_mask_avx2(columns < 8 ? columns : 8), high = moei_mask_avx2(columns > 8 ? columns - 8 : 0);
    size_t p;
    for (p = 0; p < k; p++, b += ldb, panel += MOEI_PANEL) {
        _mm256_storeu_ps(panel, _mm256_maskload_ps(b, low));
        _mm256_storeu_ps(panel + 8, columns > 8 ? _mm256_maskload_ps(b + 8, high) : _mm256_setzero_ps());
    }
}

/* One step of p in eight rows of b. */
MOEI_AVX2 MOEI_INLINE void moei_column_avx2(const float *b, size_t ldb, __m256 y[1]) {
    const float *b4 = b + 4 * ldb;
    y[0] = _mm256_setr_ps(b[0], b[ldb], b[2 * ldb], b[3 * ldb], b4[0], b4[ldb], b4[2 * ldb], b4[3 * ldb]);
}

#define MOEI_EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define MOEI_STEP(i, step) \
    if (i < rows * groups && i % groups == group) \
        s##i = _mm256_fmadd_ps(_mm256_broadcast_ss(a + (size_t)(i / groups) * lda + step), y[step], s##i);
#define MOEI_LAST(i) MOEI_STEP(i, 0)
#define MOEI_SUM(i) MOEI_STEP(i, 0) MOEI_STEP(i, 1) MOEI_STEP(i, 2) MOEI_STEP(i, 3)
#define MOEI_GROUP(number, LOAD, SUM) \
    if (number < groups) { \
        enum { group = number }; \
        __m256 y[4]; \
        LOAD(b + group * 8 * ldb, ldb, y); \
        MOEI_EACH(SUM) \
    }
#define MOEI_GROUPS(LOAD, SUM) \
    MOEI_GROUP(0, LOAD, SUM) MOEI_GROUP(1, LOAD, SUM) MOEI_GROUP(2, LOAD, SUM) MOEI_GROUP(3, LOAD, SUM)
#define MOEI_STORE(i) \
    if (i < rows * groups) moei_add_to_avx2(c + (size_t)(i / groups) * ldc + i % groups * 8, kept, s##i);

/* rows x (8 groups), at most eight vectors of sums, of one block of an NT product without packing:
   the right operand is transposed in registers. ahead: the same part of the next tile is prefetched
   into the second-level cache; processors do not follow so many rows. rows, groups and ahead are
   constants after inlining. */
MOEI_AVX2 MOEI_INLINE void moei_nt_tile_avx2(int rows, int groups, int ahead, size_t k, const float *a, size_t lda,
                                             const float *b, size_t ldb, float *c, size_t ldc, int load) {
    const __m256 zero = _mm256_setzero_ps();
    __m256 s0 = zero, s1 = zero;
    __m256 s2 = zero, s3 = zero;
    __m256 s4 = zero, s5 = zero;
    __m256 s6 = zero, s7 = zero;
    const __m256i kept = _mm256_set1_epi32(load ? -1 : 0);
    const size_t row = ldb * sizeof *b;
    int i;
    for (; k >= 4; k -= 4) {
        uintptr_t next = (uintptr_t)b + (8 + k / 2 % 8) * (size_t)groups * row;
        for (i = 0; ahead && i < 2 * groups; i++, next += row) _mm_prefetch((const char *)next, _MM_HINT_T1);
        MOEI_GROUPS(moei_transpose_avx2, MOEI_SUM)
        a += 4;
        b += 4;
    }
    for (; k > 0; k--) {
        MOEI_GROUPS(moei_column_avx2, MOEI_LAST)
        a++;
        b++;
    }
    MOEI_EACH(MOEI_STORE)
}
#undef MOEI_EACH
#undef MOEI_STEP
#undef MOEI_LAST
#undef MOEI_SUM
#undef MOEI_GROUP
#undef MOEI_GROUPS
#undef MOEI_STORE

/* The columns of one to eight rows that fill vectors; returns how many. Each row of b is read from
   its beginning to its end. How many are read at once depends on whether b is likely to be cached,
   and on strides: lines that are a multiple of 4 KB apart share a set of the first-level cache. */
MOEI_AVX2 static size_t moei_nt_unpacked_avx2(size_t m, size_t n, size_t k, const float *a, size_t lda, const float *b,
                                              size_t ldb, float *c, size_t ldc, int accumulate) {
    static const unsigned char widths[2][8] = {{4, 3, 2, 2, 1, 1, 1, 1}, {2, 3, 2, 1, 1, 1, 1, 1}};
    const size_t fit = ldb % 1024 == 0 || (ldb % 512 == 0 && m > 2) ? 1 : ldb % 512 == 0 ? 2 : 4;
    const size_t most = moei_smaller(fit, widths[n * ldb >= 32768][m - 1]); /* 128 KB */
    size_t j, p, groups;
    for (j = 0; j + 8 <= n; j += 8 * groups) {
        groups = moei_smaller(most, (n - j) / 8);
        for (p = 0; p < k; p += MOEI_BLOCK_K) {
            const size_t block = moei_smaller(k - p, MOEI_BLOCK_K);
            const float *bj = b + j * ldb + p;
#define MOEI_CASE(rows, groups, ahead) \
    case 8 * (rows) + (groups): \
        moei_nt_tile_avx2(rows, groups, ahead, block, a + p, lda, bj, ldb, c + j, ldc, accumulate || p > 0); \
        break;
            switch (8 * m + groups) {
                MOEI_CASE(1, 1, 1)
                MOEI_CASE(1, 2, 1)
                MOEI_CASE(1, 3, 1)
                MOEI_CASE(1, 4, 0)
                MOEI_CASE(2, 1, 1)
                MOEI_CASE(2, 2, 1)
                MOEI_CASE(2, 3, 1)
                MOEI_CASE(3, 1, 1)
                MOEI_CASE(3, 2, 1)
                MOEI_CASE(4, 1, 1)
                MOEI_CASE(4, 2, 0)
                MOEI_CASE(5, 1, 1)
                MOEI_CASE(6, 1, 1)
                MOEI_CASE(7, 1, 1)
            default: MOEI_CASE(8, 1, 1)
            }
#undef MOEI_CASE
        }
    }
    return j;
}

/* The sums of one row over one to four blocks of k, which are accumulated independently; at: the
   eight rows of b. blocks is a constant after inlining. */
MOEI_AVX2 MOEI_INLINE void moei_nt_blocks_avx2(int blocks, size_t k, const float *a, const float *b, const size_t at[8],
                                               __m256 s[4]) {
    size_t p;
    __m256 s0 = _mm256_setzero_ps(), s1 = s0;
    __m256 s2 = s0, s3 = s0;
#define MOEI_FOUR(block) \
    if (blocks > block) { \
        const float *x = a + (block)*MOEI_BLOCK_K + p; \
        __m256 y[4]; \
        moei_transpose_rows_avx2(b + (block)*MOEI_BLOCK_K + p, at, y); \
        s##block = _mm256_fmadd_ps(_mm256_broadcast_ss(x), y[0], s##block); \
        s##block = _mm256_fmadd_ps(_mm256_broadcast_ss(x + 1), y[1], s##block); \
        s##block = _mm256_fmadd_ps(_mm256_broadcast_ss(x + 2), y[2], s##block); \
        s##block = _mm256_fmadd_ps(_mm256_broadcast_ss(x + 3), y[3], s##block); \
    }
    for (p = 0; p + 4 <= k; p += 4) {
        MOEI_FOUR(0)
        MOEI_FOUR(1)
        MOEI_FOUR(2)
        MOEI_FOUR(3)
    }
#undef MOEI_FOUR
    /* only a block shorter than 256 has such steps, and then blocks is 1 */
    for (; blocks == 1 && p < k; p++) {
        const float *q = b + p;
        const __m256 y = _mm256_setr_ps(q[at[0]], q[at[1]], q[at[2]], q[at[3]], q[at[4]], q[at[5]], q[at[6]], q[at[7]]);
        s0 = _mm256_fmadd_ps(_mm256_broadcast_ss(a + p), y, s0);
    }
    s[0] = s0;
    s[1] = s1;
    s[2] = s2;
    s[3] = s3;
}

/* One row of an NT product with few columns: eight at a time, up to four blocks of k at once.
   Missing columns are copies of the last one, whose results are discarded. */
MOEI_AVX2 static void moei_nt_row_avx2(size_t n, size_t k, const float *a, const float *b, size_t ldb, float *c,
                                       int load) {
    size_t j, p, step;
    for (j = 0; j < n; j += 8) {
        const size_t columns = n - j < 8 ? n - j : 8;
#define MOEI_AT(i) (j + (i < columns ? i : columns - 1)) * ldb
        const size_t at[8] = {MOEI_AT(0), MOEI_AT(1), MOEI_AT(2), MOEI_AT(3),
                              MOEI_AT(4), MOEI_AT(5), MOEI_AT(6), MOEI_AT(7)};
#undef MOEI_AT
        __m256 sum = load ? _mm256_maskload_ps(c + j, moei_mask_avx2(columns)) : _mm256_setzero_ps(), s[4];
        for (p = 0; p < k; p += step) {
            const size_t blocks = (k - p) / MOEI_BLOCK_K;
            step = blocks > 4 ? 4 * (size_t)MOEI_BLOCK_K : blocks > 0 ? blocks * MOEI_BLOCK_K : k - p;
            if (blocks >= 4) moei_nt_blocks_avx2(4, MOEI_BLOCK_K, a + p, b + p, at, s);
            else if (blocks == 3) moei_nt_blocks_avx2(3, MOEI_BLOCK_K, a + p, b + p, at, s);
            else if (blocks == 2) moei_nt_blocks_avx2(2, MOEI_BLOCK_K, a + p, b + p, at, s);
            else moei_nt_blocks_avx2(1, step, a + p, b + p, at, s);
            sum = _mm256_add_ps(sum, s[0]);
            if (blocks > 1) sum = _mm256_add_ps(sum, s[1]);
            if (blocks > 2) sum = _mm256_add_ps(sum, s[2]);
            if (blocks > 3) sum = _mm256_add_ps(sum, s[3]);
        }
        moei_store_avx2(columns, c + j, sum);
    }
}

/* One block of k for up to MOEI_PACKING_M rows. panel holds 256 x 16 numbers. */
MOEI_AVX2 static void moei_block_avx2(int op, size_t m, size_t n, size_t k, const float *a, size_t ra, size_t ca,
                                      const float *b, size_t ldb, float *c, size_t ldc, int load, float *panel) {
    size_t j;
    for (j = 0; j < n; j += MOEI_PANEL) {
        const size_t columns = moei_smaller(n - j, MOEI_PANEL);
        const float *bj = op == MOE_MATMUL_NT ? b + j * ldb : b + j;
        const size_t row = ldb * sizeof(float);
        const moei_prefetch next =
            op == MOE_MATMUL_NT ? moei_prefetch_begin((uintptr_t)bj + MOEI_PANEL * row, k * sizeof(float), row, 0)
                                : moei_prefetch_begin((uintptr_t)bj + 64, 64, row, 0);
        if (op != MOE_MATMUL_NT && m <= MOEI_UNPACKED_M && columns % 8 == 0) {
            moei_rows_avx2(columns > 8, m, k, a, ra, ca, bj, ldb, c + j, ldc, load, next);
            continue;
        }
        if (op == MOE_MATMUL_NT) moei_pack_transposed_avx2(columns, k, bj, ldb, panel);
        else moei_pack_avx2(columns, k, bj, ldb, panel);
        if (columns % 8 == 0) moei_rows_avx2(columns > 8, m, k, a, ra, ca, panel, MOEI_PANEL, c + j, ldc, load, next);
        else moei_edge_avx2(columns, m, k, a, ra, ca, panel, c + j, ldc, load, next);
    }
}

MOEI_MATMUL(avx2, MOEI_AVX2, MOEI_PACKING_M, 1)

/* A product of one to eight rows. The columns that do not fill vectors, or are few, are computed
   row by row. Rows of a that are a multiple of 4 KB apart are copied first: they would evict lines
   of b. */
MOEI_AVX2 static void moei_nt_few_avx2(size_t m, size_t n, size_t k, const float *a, size_t lda, const float *b,
                                       size_t ldb, float *c, size_t ldc, int accumulate) {
    enum { APART = MOEI_BLOCK_K + 16 };
    float rows[8 * APART];
    size_t j = 0, i, p;
    if (k == 0 && !accumulate) moei_zero_rows(m, n, c, ldc);
    for (p = 0; m > 2 && n > 7 && lda % 1024 == 0 && p < k; p += MOEI_BLOCK_K) {
        const size_t block = moei_smaller(k - p, MOEI_BLOCK_K);
        for (i = 0; i < m; i++) memcpy(rows + i * APART, a + i * lda + p, block * sizeof *a);
        j = moei_nt_unpacked_avx2(m, n, block, rows, APART, b + p, ldb, c, ldc, accumulate || p > 0);
    }
    if (p == 0 && (m > 1 || n > MOEI_ROW_COLUMNS))
        j = moei_nt_unpacked_avx2(m, n, k, a, lda, b, ldb, c, ldc, accumulate);
    for (i = 0; k > 0 && j < n && i < m; i++)
        moei_nt_row_avx2(n - j, k, a + i * lda, b + j * ldb, ldb, c + i * ldc + j, accumulate);
}

/* If one to eight rows are left over, or up to 32 for eight columns, they are not packed. */
#define MOEI_NT_ENTRY(isa) \
    static void moei_nt_##isa(size_t m, size_t n, size_t k, const float *a, size_t lda, const void *b, size_t ldb, \
                              float *c, size_t ldc, int accumulate) { \
        const float *w = (const float *)b; \
        size_t few = m % MOEI_PACKING_M, i = m - few; \
        if (few > (n == 8 ? 32 : 8)) i = m; \
        if (i > 0) moei_matmul_##isa(MOE_MATMUL_NT, i, n, k, a, lda, w, ldb, c, ldc, accumulate); \
        for (; i < m; i += few) { \
            few = moei_smaller(m - i, 8); \
            moei_nt_few_avx2(few, n, k, a + i * lda, lda, w, ldb, c + i * ldc, ldc, accumulate); \
        } \
    }

MOEI_NT_ENTRY(avx2)
MOEI_MATMUL_ENTRY(nn, avx2, MOE_MATMUL_NN)
MOEI_MATMUL_ENTRY(tn, avx2, MOE_MATMUL_TN)

MOEI_AVX2 MOEI_INLINE float moei_lanes_sum_avx2(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

MOEI_AVX2 MOEI_INLINE float moei_lanes_max_avx2(__m256 v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}

MOEI_AVX2 static float moei_dot_avx2(size_t n, const float *a, const float *b) {
    __m256 s0 = _mm256_setzero_ps(), s1 = s0;
    __m256 s2 = s0, s3 = s0;
    for (; n >= 32; n -= 32, a += 32, b += 32) {
        s0 = _mm256_fmadd_ps(_mm256_loadu_ps(a), _mm256_loadu_ps(b), s0);
        s1 = _mm256_fmadd_ps(_mm256_loadu_ps(a + 8), _mm256_loadu_ps(b + 8), s1);
        s2 = _mm256_fmadd_ps(_mm256_loadu_ps(a + 16), _mm256_loadu_ps(b + 16), s2);
        s3 = _mm256_fmadd_ps(_mm256_loadu_ps(a + 24), _mm256_loadu_ps(b + 24), s3);
    }
    for (; n >= 8; n -= 8, a += 8, b += 8) s0 = _mm256_fmadd_ps(_mm256_loadu_ps(a), _mm256_loadu_ps(b), s0);
    if (n > 0)
        s1 = _mm256_fmadd_ps(_mm256_maskload_ps(a, moei_mask_avx2(n)), _mm256_maskload_ps(b, moei_mask_avx2(n)), s1);
    return moei_lanes_sum_avx2(_mm256_add_ps(_mm256_add_ps(s0, s1), _mm256_add_ps(s2, s3)));
}

MOEI_AVX2 static void moei_axpy_avx2(size_t n, float alpha, const float *x, float *y) {
    const __m256 factor = _mm256_set1_ps(alpha);
    for (; n >= 8; n -= 8, x += 8, y += 8)
        _mm256_storeu_ps(y, _mm256_fmadd_ps(factor, _mm256_loadu_ps(x), _mm256_loadu_ps(y)));
    if (n > 0) {
        const __m256i mask = moei_mask_avx2(n);
        _mm256_maskstore_ps(y, mask, _mm256_fmadd_ps(factor, _mm256_maskload_ps(x, mask), _mm256_maskload_ps(y, mask)));
    }
}

MOEI_AVX2 static void moei_axpy_rows_avx2(size_t count, size_t n, const float *alpha, const float *x, size_t ldx,
                                          float *y) {
    size_t i;
    for (; n >= 32; n -= 32, x += 32, y += 32) {
        __m256 y0 = _mm256_loadu_ps(y), y1 = _mm256_loadu_ps(y + 8);
        __m256 y2 = _mm256_loadu_ps(y + 16), y3 = _mm256_loadu_ps(y + 24);
        for (i = 0; i < count; i++) {
            const __m256 factor = _mm256_broadcast_ss(alpha + i);
            y0 = _mm256_fmadd_ps(factor, _mm256_loadu_ps(x + i * ldx), y0);
            y1 = _mm256_fmadd_ps(factor, _mm256_loadu_ps(x + i * ldx + 8), y1);
            y2 = _mm256_fmadd_ps(factor, _mm256_loadu_ps(x + i * ldx + 16), y2);
            y3 = _mm256_fmadd_ps(factor, _mm256_loadu_ps(x + i * ldx + 24), y3);
        }
        _mm256_storeu_ps(y, y0);
        _mm256_storeu_ps(y + 8, y1);
        _mm256_storeu_ps(y + 16, y2);
        _mm256_storeu_ps(y + 24, y3);
    }
    for (i = 0; n > 0 && i < count; i++) moei_axpy_avx2(n, alpha[i], x + i * ldx, y);
}

/* ---- exp and activations; their errors: see the manual (tests/unit/kernels.c) ---- */

/* x = n log 2 + r with |r| <= log(2) / 2. Returns exp(r) - 1 by a polynomial fitted to relative
   error 3e-9. */
MOEI_AVX2 MOEI_INLINE __m256 moei_exp_reduced_avx2(__m256 x, __m256 *n) {
    const __m256 half = _mm256_set1_ps(4.999999337e-01f);
    __m256 r, q = _mm256_set1_ps(1.381432057e-03f);
    *n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504089f)),
                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    /* log 2 in two parts; the first has few bits */
    r = _mm256_fnmadd_ps(*n, _mm256_set1_ps(0.693145751953125f), x);
    r = _mm256_fnmadd_ps(*n, _mm256_set1_ps(1.42860682e-06f), r);
    q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(8.368851071e-03f));
    q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(4.166840108e-02f));
    q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(1.666651952e-01f));
    q = _mm256_fmadd_ps(q, r, half);
    return _mm256_fmadd_ps(_mm256_mul_ps(r, r), q, r);
}

/* 2^n for integers n from -126 to 127. */
MOEI_AVX2 MOEI_INLINE __m256 moei_power2_avx2(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

/* exp(x) for x <= 0 and NaN: 0 below about -104, subnormal results rounded once. Clamping x limits
   n; max returns its second operand for NaN. */
MOEI_AVX2 MOEI_INLINE __m256 moei_exp_avx2(__m256 x) {
    __m256 n, e = moei_exp_reduced_avx2(_mm256_max_ps(_mm256_set1_ps(-106.0f), x), &n);
    const __m256i whole = _mm256_cvtps_epi32(n), first = _mm256_srai_epi32(whole, 1);
    /* in two steps: 2^n may be subnormal */
    e = _mm256_mul_ps(_mm256_add_ps(e, _mm256_set1_ps(1.0f)), moei_power2_avx2(first));
    return _mm256_mul_ps(e, moei_power2_avx2(_mm256_sub_epi32(whole, first)));
}

/* exp(x) for x <= 0 and NaN; results that would be subnormal are 0. */
MOEI_AVX2 MOEI_INLINE __m256 moei_exp_normal_avx2(__m256 x) {
    const __m256 least = _mm256_set1_ps(-87.3365f); /* exp of it is above 2^-126 */
    __m256 n, e = moei_exp_reduced_avx2(_mm256_max_ps(least, x), &n), power = moei_power2_avx2(_mm256_cvtps_epi32(n));
    return _mm256_and_ps(_mm256_fmadd_ps(e, power, power), _mm256_cmp_ps(x, least, _CMP_NLT_UQ));
}

/* exp(x) - 1 for -30 <= x <= 0 and NaN. */
MOEI_AVX2 MOEI_INLINE __m256 moei_expm1_avx2(__m256 x) {
    __m256 n, power;
    const __m256 e = moei_exp_reduced_avx2(x, &n);
    power = moei_power2_avx2(_mm256_cvtps_epi32(n));
    return _mm256_fmadd_ps(e, power, _mm256_sub_ps(power, _mm256_set1_ps(1.0f)));
}

MOEI_AVX2 MOEI_INLINE __m256 moei_neg_abs_avx2(__m256 x) { return _mm256_or_ps(x, _mm256_set1_ps(-0.0f)); }

/* The larger of the two; NaN when x is, as max returns its second operand for NaN. */
MOEI_AVX2 MOEI_INLINE __m256 moei_at_least_avx2(__m256 x, float limit) {
    return _mm256_max_ps(_mm256_set1_ps(limit), x);
}

/* See moei_clamp_1e4. */
MOEI_AVX2 MOEI_INLINE __m256 moei_clamp_1e4_avx2(__m256 x) {
    return moei_at_least_avx2(_mm256_min_ps(_mm256_set1_ps(1e4f), x), -1e4f);
}

MOEI_AVX2 MOEI_INLINE __m256 moei_if_negative_avx2(__m256 x, __m256 if_negative, __m256 otherwise) {
    return _mm256_blendv_ps(otherwise, if_negative, x);
}

/* tanh|x| = -q / (2 + q) with q = exp(-2|x|) - 1; beyond 10 it is 1. */
MOEI_AVX2 MOEI_INLINE __m256 moei_tanh_avx2(__m256 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f), z = moei_at_least_avx2(moei_neg_abs_avx2(x), -10.0f);
    const __m256 q = moei_expm1_avx2(_mm256_add_ps(z, z));
    const __m256 t = _mm256_div_ps(q, _mm256_add_ps(_mm256_set1_ps(2.0f), q));
    return _mm256_or_ps(_mm256_andnot_ps(sign, t), _mm256_and_ps(sign, x)); /* t of 0 is +0 */
}

/* Eight numbers, or count < 8 of them: missing ones are read as 0 and not written. */
MOEI_AVX2 MOEI_INLINE __m256 moei_load_part_avx2(size_t count, const float *x) {
    return count < 8 ? _mm256_maskload_ps(x, moei_mask_avx2(count)) : _mm256_loadu_ps(x);
}

MOEI_AVX2 MOEI_INLINE void moei_store_part_avx2(size_t count, float *y, __m256 value) {
    if (count < 8) _mm256_maskstore_ps(y, moei_mask_avx2(count), value);
    else _mm256_storeu_ps(y, value);
}

#define MOEI_OP_AVX2(op) _mm256_##op##_ps
#define MOEI_OP_AVX512(op) _mm512_##op##_ps
#define moei_square_error_avx2(z, square) _mm256_fmsub_ps(z, z, square)
MOEI_ACTIVATIONS(avx2, MOEI_AVX2, __m256, MOEI_OP_AVX2)
#define MOEI_GATED_CASE_avx2(value, ...) MOEI_GATED_CASE(avx2, value)
MOEI_GATED_FORWARD(avx2, MOEI_AVX2, __m256, 8, MOEI_OP_AVX2)

#ifndef MOE_NO_TRAIN
/* value, but 0 where x <= 0. */
MOEI_AVX2 MOEI_INLINE __m256 moei_unless_low_avx2(__m256 x, __m256 value) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LE_OQ), value);
}

MOEI_SLOPES(avx2, MOEI_AVX2, __m256, MOEI_OP_AVX2)
#define MOEI_BACKWARD_CASE_avx2(value, ...) MOEI_BACKWARD_CASE(avx2, value)
MOEI_GATED_BACKWARD(avx2, MOEI_AVX2, __m256, 8, MOEI_OP_AVX2)
MOEI_ADAMW(avx2, MOEI_AVX2, __m256, 8, MOEI_OP_AVX2)
#endif

/* Eight numbers, or count < 8 of them followed by -inf. */
MOEI_AVX2 MOEI_INLINE __m256 moei_load_padded_avx2(size_t count, const float *x) {
    const __m256i mask = moei_mask_avx2(count < 8 ? count : 8);
    return _mm256_blendv_ps(_mm256_set1_ps(-MOEI_INFINITY), _mm256_maskload_ps(x, mask), _mm256_castsi256_ps(mask));
}

/* count numbers, at most eight, padded with -inf. */
MOEI_AVX2 MOEI_INLINE __m256 moei_load_avx2(size_t count, const float *x) {
    /* no store-forwarding stall after a store of 16 bytes */
    if (count == 4) return _mm256_insertf128_ps(_mm256_set1_ps(-MOEI_INFINITY), _mm_loadu_ps(x), 0);
    return count >= 8 ? _mm256_loadu_ps(x) : moei_load_padded_avx2(count, x);
}

/* exp((x - shift) / T); skips the division if T is 1. */
MOEI_AVX2 MOEI_INLINE __m256 moei_exp_over_avx2(__m256 x, __m256 shift, float temperature) {
    const __m256 z = _mm256_sub_ps(x, shift);
    return moei_exp_avx2(temperature < 1.0f || temperature > 1.0f ? _mm256_div_ps(z, _mm256_set1_ps(temperature)) : z);
}

/* Up to eight numbers, in one register. Missing lanes enter exp as 0, because -inf would be slow
   (underflow). */
MOEI_AVX2 MOEI_INLINE void moei_softmax_8_avx2(size_t n, const float *x, float temperature, float *y) {
    const __m256 there = _mm256_castsi256_ps(moei_mask_avx2(n)), value = moei_load_avx2(n, x);
    const __m256 shift = _mm256_set1_ps(moei_softmax_shift(moei_lanes_max_avx2(value)));
    const __m256 e =
        _mm256_and_ps(moei_exp_over_avx2(_mm256_blendv_ps(shift, value, there), shift, temperature), there);
    const float sum = moei_lanes_sum_avx2(e);
    moei_store_avx2(n, y, sum <= 0 ? e : _mm256_div_ps(e, _mm256_set1_ps(sum)));
}

/* Missing lanes hold -inf and add 0. max may drop a NaN; the sum does not. */
MOEI_AVX2 static void moei_softmax_avx2(size_t n, const float *x, float temperature, float *y) {
    __m256 max, shift, sums = _mm256_setzero_ps();
    float sum;
    size_t i;
    if (n <= 8) {
        if (n > 0) moei_softmax_8_avx2(n, x, temperature, y);
        return;
    }
    max = _mm256_loadu_ps(x);
    for (i = 8; i < n; i += 8) max = _mm256_max_ps(max, moei_load_avx2(n - i, x + i));
    shift = _mm256_set1_ps(moei_softmax_shift(moei_lanes_max_avx2(max)));
    for (i = 0; i < n; i += 8) {
        const __m256 e = moei_exp_over_avx2(moei_load_avx2(n - i, x + i), shift, temperature);
        moei_store_avx2(n - i, y + i, e);
        sums = _mm256_add_ps(sums, e);
    }
    sum = moei_lanes_sum_avx2(sums);
    if (sum <= 0) return;
    for (i = 0; i + 8 <= n; i += 8) _mm256_storeu_ps(y + i, _mm256_div_ps(_mm256_loadu_ps(y + i), _mm256_set1_ps(sum)));
    for (; i < n; i++) y[i] /= sum;
}

/* The largest of the lanes, in all lanes. */
MOEI_AVX2 MOEI_INLINE __m256 moei_splat_max_avx2(__m256 v) {
    v = _mm256_max_ps(v, _mm256_permute2f128_ps(v, v, 1));
    v = _mm256_max_ps(v, _mm256_shuffle_ps(v, v, 0x4e));
    return _mm256_max_ps(v, _mm256_shuffle_ps(v, v, 0xb1));
}

/* The lowest lane in which v equals the value in all lanes of max. There is one. */
MOEI_AVX2 MOEI_INLINE int moei_find_lane_avx2(__m256 v, __m256 max) {
    const unsigned lanes = (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(v, max, _CMP_EQ_OQ));
#if defined(__GNUC__) || defined(__clang__)
    return __builtin_ctz(lanes | 256);
#else
    unsigned long at;
    _BitScanForward(&at, lanes | 256);
    return (int)at;
#endif
}

/* v with another value in one lane. */
MOEI_AVX2 MOEI_INLINE __m256 moei_set_lane_avx2(__m256 v, int lane, __m256 value) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_blendv_ps(v, value, _mm256_castsi256_ps(_mm256_cmpeq_epi32(lanes, _mm256_set1_epi32(lane))));
}

/* Up to 64 scores: repeatedly removes the largest. It is found among the maxima of groups of eight,
   then in its group: both times the lowest index of equal values. max returns its second operand
   for NaN. */
MOEI_AVX2 static size_t moei_top_k_avx2(size_t n, const float *score, size_t k, int32_t *index) {
    const __m256 none = _mm256_set1_ps(-MOEI_INFINITY);
    __m256 rest[8], largest = none, max;
    size_t i, taken;
    int eight = 0, lane;
    if (n > 64) return moe_top_k(n, score, k, index);
    if (n <= 8) {
        largest = _mm256_max_ps(moei_load_avx2(n, score), none);
        for (taken = 0; taken < k; taken++) {
            max = moei_splat_max_avx2(largest);
            if (!(_mm256_cvtss_f32(max) > -MOEI_INFINITY)) break;
            lane = moei_find_lane_avx2(largest, max);
            index[taken] = lane;
            largest = moei_set_lane_avx2(largest, lane, none);
        }
        return taken;
    }
    for (i = 0; i < n; i += 8) {
        rest[i / 8] = _mm256_max_ps(moei_load_avx2(n - i, score + i), none);
        largest = moei_set_lane_avx2(largest, (int)(i / 8), moei_splat_max_avx2(rest[i / 8]));
    }
    for (taken = 0; taken < k; taken++) {
        max = moei_splat_max_avx2(largest);
        if (!(_mm256_cvtss_f32(max) > -MOEI_INFINITY)) break;
        eight = moei_find_lane_avx2(largest, max);
        lane = moei_find_lane_avx2(rest[eight], max);
        index[taken] = 8 * eight + lane;
        rest[eight] = moei_set_lane_avx2(rest[eight], lane, none);
        largest = moei_set_lane_avx2(largest, eight, moei_splat_max_avx2(rest[eight]));
    }
    return taken;
}

/* ln x for normal x > 0: x = 2^n m with m from sqrt(1/2) to sqrt(2), f = m - 1, ln m = f - f^2 / 2
   + f^3 Q(f), Q fitted to relative error 6e-9. For other x some finite number. */
MOEI_AVX2 MOEI_INLINE __m256 moei_log_normal_avx2(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x),
                  whole = _mm256_srai_epi32(_mm256_sub_epi32(bits, _mm256_set1_epi32(0x3f3504f3)), 23);
    const __m256 f =
        _mm256_sub_ps(_mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(whole, 23))), _mm256_set1_ps(1.0f));
    const __m256 n = _mm256_cvtepi32_ps(whole);
    __m256 q = _mm256_set1_ps(-7.634419459e-02f);
    q = _mm256_fmadd_ps(q, f, _mm256_set1_ps(1.276155052e-01f));
    q = _mm256_fmadd_ps(q, f, _mm256_set1_ps(-1.316019287e-01f));
    q = _mm256_fmadd_ps(q, f, _mm256_set1_ps(1.420176137e-01f));
    q = _mm256_fmadd_ps(q, f, _mm256_set1_ps(-1.662335736e-01f));
    q = _mm256_fmadd_ps(q, f, _mm256_set1_ps(2.000122679e-01f));
    q = _mm256_fmadd_ps(q, f, _mm256_set1_ps(-2.500082099e-01f));
    q = _mm256_fmadd_ps(q, f, _mm256_set1_ps(3.333333171e-01f));
    q = _mm256_mul_ps(_mm256_mul_ps(f, f), _mm256_fmadd_ps(q, f, _mm256_set1_ps(-0.5f)));
    /* log 2 in two parts, as in exp */
    q = _mm256_add_ps(f, _mm256_fmadd_ps(n, _mm256_set1_ps(1.42860682e-06f), q));
    return _mm256_fmadd_ps(n, _mm256_set1_ps(0.693145751953125f), q);
}

/* ln x for x > 0. */
MOEI_AVX2 MOEI_INLINE __m256 moei_log_avx2(__m256 x) {
    /* subnormal: scaled by 2^24 */
    const __m256 tiny = _mm256_cmp_ps(x, _mm256_set1_ps(1.17549435e-38f), _CMP_LT_OQ);
    const __m256 value =
        moei_log_normal_avx2(_mm256_blendv_ps(x, _mm256_mul_ps(x, _mm256_set1_ps(16777216.0f)), tiny));
    const __m256 back = _mm256_sub_ps(value, _mm256_and_ps(tiny, _mm256_set1_ps(16.635532333f)));
    return _mm256_blendv_ps(back, x, _mm256_cmp_ps(x, _mm256_set1_ps(MOEI_INFINITY), _CMP_EQ_OQ));
}

MOEI_AVX2 static void moei_multiply_avx2(size_t n, const float *a, const float *b, float *y) {
    size_t i;
    for (i = 0; i < n; i += 8)
        moei_store_avx2(n - i, y + i, _mm256_mul_ps(moei_load_avx2(n - i, a + i), moei_load_avx2(n - i, b + i)));
}

/* Sixteen columns of all rows at a time; the sums stay in registers. */
MOEI_AVX2 static void moei_dispersion_avx2(int squared, size_t count, const int32_t *rows, size_t n, const float *x,
                                           size_t ldx, const float *mean, float *y) {
    const __m256 over = _mm256_set1_ps((float)count), sign = _mm256_set1_ps(-0.0f);
    size_t i, j;
    for (j = 0; j < n; j += 16) {
        const size_t low = n - j, high = low > 8 ? low - 8 : 0;
        const size_t next = j + (high > 0 ? 8 : 0);
        const __m256 mean0 = moei_load_avx2(low, mean + j), mean1 = moei_load_avx2(high, mean + next);
        __m256 sum0 = _mm256_setzero_ps(), sum1 = sum0;
        for (i = 0; i < count; i++) {
            const float *row = x + (size_t)rows[i] * ldx;
            const __m256 off0 = _mm256_sub_ps(moei_load_avx2(low, row + j), mean0);
            const __m256 off1 = _mm256_sub_ps(moei_load_avx2(high, row + next), mean1);
            sum0 = squared ? _mm256_fmadd_ps(off0, off0, sum0) : _mm256_add_ps(sum0, _mm256_andnot_ps(sign, off0));
            sum1 = squared ? _mm256_fmadd_ps(off1, off1, sum1) : _mm256_add_ps(sum1, _mm256_andnot_ps(sign, off1));
        }
        moei_store_avx2(low, y + j, _mm256_div_ps(sum0, over));
        moei_store_avx2(high, y + next, _mm256_div_ps(sum1, over));
    }
}

/* Missing lanes hold -inf or NaN; max returns its second operand for NaN. */
MOEI_AVX2 static float moei_log_posterior_avx2(size_t n, float scale, const float *shift, const float *prior,
                                               float *y) {
    const __m256 factor = _mm256_set1_ps(scale), none = _mm256_set1_ps(-MOEI_INFINITY);
    __m256 max = none;
    size_t i;
    for (i = 0; i < n; i += 8) {
        __m256 value = moei_load_avx2(n - i, y + i);
        if (shift != NULL) value = _mm256_sub_ps(value, moei_load_avx2(n - i, shift + i));
        value = _mm256_mul_ps(value, factor);
        if (prior != NULL) {
            const __m256 weight = moei_load_avx2(n - i, prior + i),
                         above = _mm256_cmp_ps(weight, _mm256_setzero_ps(), _CMP_GT_OQ);
            value = _mm256_blendv_ps(none, _mm256_add_ps(value, moei_log_avx2(weight)), above);
        }
        max = _mm256_max_ps(value, max);
        moei_store_avx2(n - i, y + i, value);
    }
    return moei_lanes_max_avx2(max);
}

MOEI_AVX2 static float moei_exp_sum_avx2(size_t n, float max, float *y) {
    const __m256 shift = _mm256_set1_ps(max);
    __m256 sums = _mm256_setzero_ps();
    size_t i;
    for (i = 0; i < n; i += 8) {
        const __m256 e = moei_exp_normal_avx2(_mm256_sub_ps(moei_load_avx2(n - i, y + i), shift));
        sums = _mm256_add_ps(sums, e);
        moei_store_avx2(n - i, y + i, e);
    }
    return moei_lanes_sum_avx2(sums);
}

/* Subnormal terms do not change the sum. */
MOEI_AVX2 static float moei_entropy_avx2(size_t n, const float *p) {
    __m256 sums = _mm256_setzero_ps();
    size_t i;
    for (i = 0; i < n; i += 8) {
        const __m256 x = moei_load_avx2(n - i, p + i), above = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GT_OQ);
        sums = _mm256_fnmadd_ps(_mm256_and_ps(x, above), _mm256_and_ps(moei_log_normal_avx2(x), above), sums);
    }
    return moei_lanes_sum_avx2(sums);
}

#endif /* MOEI_HAVE_AVX2 */

/* ==== AVX-512 (float) ============================================================================

   The same order of summation as in AVX2, in vectors of 16: every element has the same bits. Tiles
   are 14 rows x 2 panels or 7 x 4; the latter halves the loads for few rows, and streams four
   panels at once for one row. */

#ifdef MOEI_HAVE_AVX512

/* g++ warns about the undefined operands and all-lanes masks of its own intrinsics. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-conversion"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#if defined(__GNUC__) || defined(__clang__)
#define MOEI_AVX512 __attribute__((target("avx512f,avx2,fma")))
#else
#define MOEI_AVX512
#endif

enum { MOEI_TILE_512 = 14, MOEI_TILE_WIDE_512 = 7 };

/* X(row, address of its first element): at most five registers and two strides for 14 rows. */
#define MOEI_ROWS_7(X) X(0, a) X(1, a + ra) X(2, a + 2 * ra) X(3, a3) X(4, a3 + ra) X(5, a3 + 2 * ra) X(6, a6)
#define MOEI_ROWS_14(X) \
    MOEI_ROWS_7(X) X(7, a6 + ra) X(8, a6 + 2 * ra) X(9, a9) X(10, a9 + ra) X(11, a9 + 2 * ra) X(12, a12) X(13, a12 + ra)

/* A mask with the lanes below count set; all lanes if count >= 16. */
MOEI_INLINE __mmask16 moei_mask_512(size_t count) {
    return (__mmask16)(count >= 16 ? 0xffffu : (1u << count) - 1u);
}

MOEI_AVX512 MOEI_INLINE void moei_add_to_512(float *c, __mmask16 mask, __m512 sum, int load) {
    /* 0 is added too, as in AVX2: it makes a sum of -0, from an underflow, 0 */
    _mm512_mask_storeu_ps(c, mask, _mm512_add_ps(load ? _mm512_maskz_loadu_ps(mask, c) : _mm512_setzero_ps(), sum));
}

#define MOEI_SUMS(row, at) __m512 s##row##_0 = zero, s##row##_1 = zero;
#define MOEI_MORE_SUMS(row, at) __m512 s##row##_2 = zero, s##row##_3 = zero;
#define MOEI_STEP(row, at) \
    if (rows > row) { \
        const __m512 x = _mm512_set1_ps(*(at)); \
        s##row##_0 = _mm512_fmadd_ps(x, y0, s##row##_0); \
        s##row##_1 = _mm512_fmadd_ps(x, y1, s##row##_1); \
    }
#define MOEI_WIDE_STEP(row, at) \
    if (rows > row) { \
        const __m512 x = _mm512_set1_ps(*(at)); \
        s##row##_0 = _mm512_fmadd_ps(x, y0, s##row##_0); \
        s##row##_1 = _mm512_fmadd_ps(x, y1, s##row##_1); \
        s##row##_2 = _mm512_fmadd_ps(x, y2, s##row##_2); \
        s##row##_3 = _mm512_fmadd_ps(x, y3, s##row##_3); \
    }
#define MOEI_STORE(row, at) \
    if (rows > row) { \
        moei_add_to_512(c, 0xffff, s##row##_0, load); \
        moei_add_to_512(c + 16, mask, s##row##_1, load); \
        c += ldc; \
    }
#define MOEI_WIDE_STORE(row, at) \
    if (rows > row) { \
        moei_add_to_512(c, 0xffff, s##row##_0, load); \
        moei_add_to_512(c + 16, 0xffff, s##row##_1, load); \
        moei_add_to_512(c + 32, 0xffff, s##row##_2, load); \
        moei_add_to_512(c + 48, 0xffff, s##row##_3, load); \
        c += ldc; \
    }

/* rows x (16 panels): C = (load ? C : 0) + the sum over one block of k; rows (1 to 14, up to 7 with
   four panels), panels (2 or 4) and cold, as above, are constants after inlining. Rows of the right
   operand are rb apart; of two panels, columns from `columns` (17 to 32) on are not stored. */
MOEI_AVX512 MOEI_INLINE void moei_tile_avx512(int rows, int panels, int cold, size_t columns, size_t k, const float *a,
                                              size_t ra, size_t ca, const float *b, size_t rb, size_t panel, float *c,
                                              size_t ldc, int load, moei_prefetch *ahead) {
    const float *a3 = a + (rows > 3 ? 3 * ra : 0), *a6 = a3 + (rows > 6 ? 3 * ra : 0);
    const float *a9 = a6 + (rows > 9 ? 3 * ra : 0);
    const float *a12 = a9 + (rows > 12 ? 3 * ra : 0), *b1 = b + panel;
    const float *b2 = panels > 2 ? b1 + panel : b, *b3 = panels > 2 ? b2 + panel : b;
    const __m512 zero = _mm512_setzero_ps();
    const __mmask16 mask = moei_mask_512(columns - 16);
    moei_prefetch next = *ahead;
    size_t p;
    MOEI_ROWS_14(MOEI_SUMS)
    if (panels > 2) {
        MOEI_ROWS_7(MOEI_MORE_SUMS)
        for (p = 0; p < k; p++, a += ca, a3 += ca, a6 += ca, b += rb, b1 += rb, b2 += rb, b3 += rb) {
            const __m512 y0 = _mm512_loadu_ps(b), y1 = _mm512_loadu_ps(b1);
            const __m512 y2 = _mm512_loadu_ps(b2), y3 = _mm512_loadu_ps(b3);
            MOEI_AHEAD(cold, b) MOEI_AHEAD(cold, b1)
            MOEI_AHEAD(cold, b2) MOEI_AHEAD(cold, b3)
            MOEI_ROWS_7(MOEI_WIDE_STEP)
        }
        MOEI_ROWS_7(MOEI_WIDE_STORE)
    } else {
        for (p = 0; p < (size_t)rows; p++) {
            _mm_prefetch((const char *)(c + p * ldc), _MM_HINT_T0);
            _mm_prefetch((const char *)(c + p * ldc + 16), _MM_HINT_T0);
        }
        for (p = 0; p < k; p++, a += ca, a3 += ca, a6 += ca, a9 += ca, a12 += ca, b += rb, b1 += rb) {
            const __m512 y0 = _mm512_loadu_ps(b), y1 = _mm512_loadu_ps(b1);
            moei_prefetch_step(&next, 1);
            /* TN, rows far apart: prefetch a later tile's part of this row, and this tile's part of
               a later row */
            if (ca != 1) {
                _mm_prefetch((const char *)((uintptr_t)a + 2 * MOEI_TILE_512 * sizeof(float)), _MM_HINT_T1);
                _mm_prefetch((const char *)((uintptr_t)a + 8 * ca * sizeof(float)), _MM_HINT_T0);
            }
            MOEI_ROWS_14(MOEI_STEP)
        }
        *ahead = next;
        MOEI_ROWS_14(MOEI_STORE)
    }
}
#undef MOEI_SUMS
#undef MOEI_MORE_SUMS
#undef MOEI_STEP
#undef MOEI_WIDE_STEP
#undef MOEI_STORE
#undef MOEI_WIDE_STORE

/* m rows over the columns of two panels, or with wide over the 64 of four (then m is at most 7);
   wide: 2 prefetches four panels from memory. The rows are split evenly. */
MOEI_AVX512 static void moei_rows_avx512(int wide, size_t columns, size_t m, size_t k, const float *a, size_t ra,
                                         size_t ca, const float *b, size_t rb, size_t panel, float *c, size_t ldc,
                                         int load, moei_prefetch next) {
    size_t tiles = (m + MOEI_TILE_512 - 1) / MOEI_TILE_512, rows;
#define MOEI_CASE(rows, panels, cold) \
    case rows + 16 * ((panels > 2) + cold): \
        moei_tile_avx512(rows, panels, cold, columns, k, a, ra, ca, b, rb, panel, c, ldc, load, &next); \
        break;
#define MOEI_CASES(rows) MOEI_CASE(rows, 2, 0) MOEI_CASE(rows, 4, 0) MOEI_CASE(rows, 4, 1)
    next.step = 64 / (tiles > 0 ? tiles : 1); /* the lines are divided among the tiles */
    for (; m > 0; m -= rows, tiles--, a += rows * ra, c += rows * ldc) {
        rows = (m + tiles - 1) / tiles;
        switch (rows + 16 * (size_t)wide) {
            MOEI_CASES(1)
            MOEI_CASES(2)
            MOEI_CASES(3)
            MOEI_CASES(4)
            MOEI_CASES(5)
            MOEI_CASES(6)
            MOEI_CASES(7)
            MOEI_CASE(8, 2, 0)
            MOEI_CASE(9, 2, 0)
            MOEI_CASE(10, 2, 0)
            MOEI_CASE(11, 2, 0)
            MOEI_CASE(12, 2, 0)
            MOEI_CASE(13, 2, 0)
        default:
            MOEI_CASE(14, 2, 0)
        }
    }
#undef MOEI_CASE
#undef MOEI_CASES
}

MOEI_AVX512 static size_t moei_columns_avx512(size_t m, size_t n, size_t k, const float *a, size_t ra, size_t ca,
                                              const float *b, size_t rb, size_t panel, float *c, size_t ldc,
                                              int load, size_t done, size_t chunk) {
    const int wide = m <= MOEI_TILE_WIDE_512 && n >= 64;
    const size_t columns = wide ? 64 : n < 32 ? n : 32;
    const moei_prefetch next = moei_prefetch_panels(b, done, chunk, panel, 2);
    if (n <= 16 || (m <= 3 && !wide))
        return moei_columns_avx2(m, n, k, a, ra, ca, b, rb, panel, c, ldc, load, done, chunk);
    moei_rows_avx512(wide, columns, m, k, a, ra, ca, b, rb, panel, c, ldc, load, next);
    return columns;
}

MOEI_PANELS(avx512, MOEI_AVX512, MOEI_BLOCK_M, MOEI_CACHED)

MOEI_AVX512 static size_t moei_columns_streams_avx512(size_t m, size_t n, size_t k, const float *a, size_t ra,
                                                      size_t ca, const float *b, size_t rb, size_t panel, float *c,
                                                      size_t ldc, int load, size_t done, size_t chunk) {
    const moei_prefetch none = moei_prefetch_begin(0, 0, 0, 0);
    if (m > MOEI_TILE_WIDE_512 || n < 64)
        return moei_columns_avx512(m, n, k, a, ra, ca, b, rb, panel, c, ldc, load, done, chunk);
    moei_rows_avx512(2, 64, m, k, a, ra, ca, b, rb, panel, c, ldc, load, none);
    return 64;
}

MOEI_PANELS(streams_avx512, MOEI_AVX512, MOEI_BLOCK_M, MOEI_CACHED)

/* Up to two rows, and four to six of matrices below 6 MiB, take less time as with AVX2. */
static void moei_panels_stream_avx512(size_t m, size_t n, size_t k, const float *a, size_t ra, size_t ca,
                                      const float *b, size_t panel, float *c, size_t ldc, int accumulate) {
    const int narrow = m < 3 || (m > 3 && m < 7 && n * k < 1500000);
    moe_panels_fn *product = narrow ? moei_panels_stream_avx2 : moei_panels_avx512;
    product(m, n, k, a, ra, ca, b, panel, c, ldc, accumulate);
}

/* One block of k for up to MOEI_PACKING_M rows with an unpacked right operand: packs two panels at
   a time into room. */
MOEI_AVX512 static void moei_block_avx512(int op, size_t m, size_t n, size_t k, const float *a, size_t ra, size_t ca,
                                          const float *b, size_t ldb, float *c, size_t ldc, int load, float *room) {
    const size_t row = ldb * sizeof(float);
    const size_t step = op == MOE_MATMUL_NT ? ldb : 1;
    size_t j, half, columns;
    moei_prefetch next;
    for (j = 0; j + 16 < n; j += columns) {
        const float *bj = b + j * step;
        columns = n - j < 32 ? n - j : 32;
        next = op == MOE_MATMUL_NT
                   ? moei_prefetch_begin((uintptr_t)bj + 32 * row, k * sizeof(float), row, MOEI_PANEL * row)
                   : moei_prefetch_begin((uintptr_t)bj + 128, 64, row, 64);
        if (op != MOE_MATMUL_NT && m <= MOEI_UNPACKED_M && columns == 32) {
            moei_rows_avx512(0, columns, m, k, a, ra, ca, bj, ldb, MOEI_PANEL, c + j, ldc, load, next);
            continue;
        }
        for (half = 0; half < columns; half += MOEI_PANEL) {
            const size_t count = moei_smaller(columns - half, MOEI_PANEL);
            float *panel = room + half * MOEI_BLOCK_K;
            if (op == MOE_MATMUL_NT) moei_pack_transposed_avx2(count, k, bj + half * ldb, ldb, panel);
            else moei_pack_avx2(count, k, bj + half, ldb, panel);
        }
        moei_rows_avx512(0, columns, m, k, a, ra, ca, room, MOEI_PANEL, MOEI_BLOCK_K * MOEI_PANEL, c + j, ldc, load,
                         next);
    }
    if (j < n) moei_block_avx2(op, m, n - j, k, a, ra, ca, b + j * step, ldb, c + j, ldc, load, room);
}

MOEI_MATMUL(avx512, MOEI_AVX512, MOEI_PACKING_M, 2)

MOEI_NT_ENTRY(avx512)
MOEI_MATMUL_ENTRY(nn, avx512, MOE_MATMUL_NN)
MOEI_MATMUL_ENTRY(tn, avx512, MOE_MATMUL_TN)

/* ---- silu and softmax in vectors of 16; other activations use AVX2 ---- */

/* As moei_exp_avx2; scalef rounds subnormal results once. */
MOEI_AVX512 MOEI_INLINE __m512 moei_exp_512(__m512 x) {
    __m512 r, q = _mm512_set1_ps(1.381432057e-03f), n;
    x = _mm512_max_ps(_mm512_set1_ps(-106.0f), x);
    n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504089f)),
                             _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145751953125f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860682e-06f), r);
    q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(8.368851071e-03f));
    q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(4.166840108e-02f));
    q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(1.666651952e-01f));
    q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(4.999999337e-01f));
    q = _mm512_fmadd_ps(_mm512_mul_ps(r, r), q, r);
    return _mm512_scalef_ps(_mm512_add_ps(q, _mm512_set1_ps(1.0f)), n);
}

/* 1 / d for d from 1 to 2, to about one rounding. */
MOEI_AVX512 MOEI_INLINE __m512 moei_reciprocal_512(__m512 d) {
    const __m512 r = _mm512_rcp14_ps(d);
    return _mm512_fmadd_ps(_mm512_fnmadd_ps(d, r, _mm512_set1_ps(1.0f)), r, r);
}

/* sigmoid(x), and sigmoid(-x) in *other. */
MOEI_AVX512 MOEI_INLINE __m512 moei_sigmoid_512(__m512 x, __m512 *other) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 e =
        moei_exp_512(_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0x80000000u))));
    const __m512 large = moei_reciprocal_512(_mm512_add_ps(one, e)), less = _mm512_mul_ps(e, large);
    const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    *other = _mm512_mask_blend_ps(negative, less, large);
    return _mm512_mask_blend_ps(negative, large, less);
}

MOEI_AVX512 MOEI_INLINE __m512 moei_silu_512(__m512 x) {
    __m512 other;
    return _mm512_mul_ps(_mm512_max_ps(_mm512_set1_ps(-1e4f), x), moei_sigmoid_512(x, &other));
}

/* act is silu or relu, a constant after inlining; times NULL: 1. */
MOEI_AVX512 MOEI_INLINE void moei_gated_rows_512(int act, size_t m, size_t n, const float *x, size_t ldx,
                                                 const float *times, size_t ldt, float *y, size_t ldy) {
    size_t i, j;
    for (i = 0; i < m; i++, x += ldx, y += ldy)
        for (j = 0; j < n; j += 16) {
            const __mmask16 mask = moei_mask_512(n - j);
            const __m512 value = _mm512_maskz_loadu_ps(mask, x + j);
            __m512 result = act == MOE_ACT_SILU ? moei_silu_512(value) : _mm512_max_ps(_mm512_setzero_ps(), value);
            if (times != NULL) result = _mm512_mul_ps(result, _mm512_maskz_loadu_ps(mask, times + i * ldt + j));
            _mm512_mask_storeu_ps(y + j, mask, result);
        }
}

MOEI_AVX512 static void moei_gated_avx512(int act, size_t m, size_t n, const float *x, size_t ldx, const float *times,
                                          size_t ldt, float *y, size_t ldy) {
    if (act == MOE_ACT_SILU) moei_gated_rows_512(MOE_ACT_SILU, m, n, x, ldx, times, ldt, y, ldy);
    else if (act == MOE_ACT_RELU) moei_gated_rows_512(MOE_ACT_RELU, m, n, x, ldx, times, ldt, y, ldy);
    else moei_gated_avx2(act, m, n, x, ldx, times, ldt, y, ldy);
}

static void moei_activate_avx512(int act, size_t n, const float *x, float *y) {
    if (act == MOE_ACT_SILU) moei_gated_avx512(act, 1, n, x, n, NULL, 0, y, n);
    else moei_activate_avx2(act, n, x, y);
}

#ifndef MOE_NO_TRAIN
/* silu'(x) = s (1 + x (1 - s)), as in plain C. */
MOEI_AVX512 static void moei_silu_backward_avx512(size_t n, const float *x, const float *times, const float *dy,
                                                  float *dx, float *d_times) {
    const __m512 limit = _mm512_set1_ps(1e4f), least = _mm512_set1_ps(-1e4f);
    size_t j;
    for (j = 0; j < n; j += 16) {
        const __mmask16 mask = moei_mask_512(n - j);
        const __m512 value = _mm512_maskz_loadu_ps(mask, x + j), d = _mm512_maskz_loadu_ps(mask, dy + j);
        __m512 other, s = moei_sigmoid_512(value, &other), low = _mm512_max_ps(least, value);
        const __m512 slope = _mm512_mul_ps(s, _mm512_fmadd_ps(_mm512_min_ps(limit, low), other, _mm512_set1_ps(1.0f)));
        const __m512 in = times != NULL ? _mm512_mul_ps(d, _mm512_maskz_loadu_ps(mask, times + j)) : d;
        _mm512_mask_storeu_ps(dx + j, mask, _mm512_mul_ps(in, slope));
        if (d_times != NULL) _mm512_mask_storeu_ps(d_times + j, mask, _mm512_mul_ps(d, _mm512_mul_ps(low, s)));
    }
}

static void moei_gated_backward_avx512(int act, size_t n, const float *x, const float *times, const float *dy,
                                       float *dx, float *d_times) {
    if (act == MOE_ACT_SILU) moei_silu_backward_avx512(n, x, times, dy, dx, d_times);
    else moei_gated_backward_avx2(act, n, x, times, dy, dx, d_times);
}

static void moei_activate_backward_avx512(int act, size_t n, const float *x, const float *dy, float *dx) {
    if (act == MOE_ACT_SILU) moei_silu_backward_avx512(n, x, NULL, dy, dx, NULL);
    else moei_activate_backward_avx2(act, n, x, dy, dx);
}

#define moei_load_part_avx512(count, x) _mm512_maskz_loadu_ps(moei_mask_512(count), x)
#define moei_store_part_avx512(count, y, value) _mm512_mask_storeu_ps(y, moei_mask_512(count), value)
MOEI_ADAMW(avx512, MOEI_AVX512, __m512, 16, MOEI_OP_AVX512)
#endif

/* Missing lanes hold -inf, whose exp is 0. */
MOEI_AVX512 static void moei_softmax_avx512(size_t n, const float *x, float temperature, float *y) {
    const __m512 none = _mm512_set1_ps(-MOEI_INFINITY), over = _mm512_set1_ps(temperature);
    __m512 max = none, shift, sums = _mm512_setzero_ps(), part;
    float lane[16], sum;
    size_t i;
    if (n <= 16) {
        moei_softmax_avx2(n, x, temperature, y);
        return;
    }
    for (i = 0; i < n; i += 16) max = _mm512_max_ps(max, _mm512_mask_loadu_ps(none, moei_mask_512(n - i), x + i));
    _mm512_storeu_ps(lane, max);
    shift = _mm512_set1_ps(
        moei_softmax_shift(moei_lanes_max_avx2(_mm256_max_ps(_mm256_loadu_ps(lane), _mm256_loadu_ps(lane + 8)))));
    for (i = 0; i < n; i += 16) {
        const __mmask16 mask = moei_mask_512(n - i);
        __m512 e = _mm512_sub_ps(_mm512_mask_loadu_ps(none, mask, x + i), shift);
        if (temperature < 1.0f || temperature > 1.0f) e = _mm512_div_ps(e, over);
        e = moei_exp_512(e);
        _mm512_mask_storeu_ps(y + i, mask, e);
        sums = _mm512_add_ps(sums, e);
    }
    _mm512_storeu_ps(lane, sums);
    sum = moei_lanes_sum_avx2(_mm256_add_ps(_mm256_loadu_ps(lane), _mm256_loadu_ps(lane + 8)));
    if (sum <= 0) return;
    part = _mm512_set1_ps(1.0f / sum);
    for (i = 0; i < n; i += 16) {
        const __mmask16 mask = moei_mask_512(n - i);
        _mm512_mask_storeu_ps(y + i, mask, _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, y + i), part));
    }
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#endif /* MOEI_HAVE_AVX512 */

/* ==== packed weights =============================================================================

   Offsets into panels and rows are in bytes, and values there are read and written by memcpy,
   because a caller's buffer may have any alignment. Order: 16-bit floats and packing, which all
   builds have; then quantized weights: conversions, rows of activations, the product in plain C,
   which is the reference, and the vector kernels. */

enum {
    MOEI_GROUP = 32,          /* elements along k that share a scale in the types with blocks */
    /* bytes of a cache line, and of a line of weights: four along k for each of 16 outputs */
    MOEI_LINE = 64
};

/* This many terms of Q8 fit an int32 sum: 65536 * 128 * 127 < 2^31; longer rows are summed in
   pieces. With a 16-bit size_t no row is longer. */
#if SIZE_MAX > 65535
#define MOEI_SUM_LIMIT ((size_t)65536)
#else
#define MOEI_SUM_LIMIT ((size_t)32768)
#endif

static uint16_t moei_get_16(const unsigned char *p) {
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return bits;
}

static void moei_put_16(unsigned char *p, uint16_t bits) {
    memcpy(p, &bits, sizeof bits);
}

MOEI_INLINE float moei_get_float(const unsigned char *p) {
    float x;
    memcpy(&x, p, sizeof x);
    return x;
}

MOEI_TOOL void moei_put_float(unsigned char *p, float x) {
    memcpy(p, &x, sizeof x);
}

static moe_real moei_get_real(const unsigned char *p) {
    moe_real x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* ---- 16-bit floats ---- */

#if MOE_REAL_IS_DOUBLE
enum { MOEI_MANTISSA = 52, MOEI_BIAS = 1023 };
#else
enum { MOEI_MANTISSA = 23, MOEI_BIAS = 127 };
#endif

/* Rounds x to a sign and the given numbers of exponent and mantissa bits (5 and 10, or 8 and 7), to
   nearest even. */
static uint16_t moei_narrow(moe_real x, int exponent_bits, int mantissa_bits) {
    const moei_bits bits = moei_real_bits(x), size = bits & ~MOEI_SIGN_BIT;
    const moei_bits one = (moei_bits)1 << MOEI_MANTISSA;
    const uint32_t sign = bits != size ? 0x8000u : 0, infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
    int exponent = (int)(size >> MOEI_MANTISSA), drop = MOEI_MANTISSA - mantissa_bits;
    moei_bits mantissa = size & (one - 1), rest;
    uint32_t kept;
    if (size > MOEI_INFINITY_BITS)
        return (uint16_t)(sign | infinity | 1u << (mantissa_bits - 1) | (uint32_t)(mantissa >> drop));
    if (exponent > 0) mantissa |= one;
    else exponent = 1;
    exponent += (1 << (exponent_bits - 1)) - 1 - MOEI_BIAS;
    if (exponent < 1) drop += 1 - exponent; /* subnormal in the narrow type */
    if (drop > MOEI_MANTISSA + 1) return (uint16_t)sign;
    kept = (uint32_t)(mantissa >> drop);
    rest = mantissa & (((moei_bits)1 << drop) - 1);
    if (rest > (moei_bits)1 << (drop - 1) || (rest == (moei_bits)1 << (drop - 1) && (kept & 1u))) kept++;
    /* the leading bit increments the exponent */
    if (exponent > 1) kept += (uint32_t)(exponent - 1) << mantissa_bits;
    return (uint16_t)(sign | (kept < infinity ? kept : infinity));
}

MOEI_TOOL float moei_binary32(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static moe_real moei_from_f16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = half >> 10 & 31u;
    const uint32_t mantissa = half & 1023u;
    if (exponent == 0)
        return (moe_real)mantissa * (sign ? MOEI_R(-5.9604644775390625e-8) : MOEI_R(5.9604644775390625e-8));
    return (moe_real)moei_binary32(sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13);
}

static moe_real moei_from_bf16(uint16_t half) {
    return (moe_real)moei_binary32((uint32_t)half << 16);
}

static void moei_widen_c(int type, size_t count, const void *packed, moe_real *out) {
    const unsigned char *p = (const unsigned char *)packed;
    size_t i;
    for (i = 0; i < count * MOEI_PANEL; i++) {
        const uint16_t half = moei_get_16(p + 2 * i);
        out[i] = type == MOE_TYPE_F16 ? moei_from_f16(half) : moei_from_bf16(half);
    }
}

/* ---- panels ---- */

/* inner in groups of 32, rounded up. */
MOEI_TOOL size_t moei_groups(size_t inner) {
    return inner / MOEI_GROUP + (inner % MOEI_GROUP > 0);
}

static int moei_is_quantized(int type) {
    return type == MOE_TYPE_Q8 || type == MOE_TYPE_Q8_BLOCK || type == MOE_TYPE_Q4;
}

moe_status moe_panel_size(int type, size_t inner, size_t *bytes) {
    size_t count = inner, each, more = 0, size;
    if (type < 0 || type >= MOE_TYPE_COUNT || bytes == NULL) return MOE_ERR_ARGUMENT;
    if (type == MOE_TYPE_REAL) each = MOEI_PANEL * sizeof(moe_real);
    else if (!moei_is_quantized(type)) each = MOEI_PANEL * 2;
    else {
#ifdef MOE_NO_QUANT
        return MOE_ERR_UNSUPPORTED;
#else
        count = moei_groups(inner);
        each = MOEI_PANEL * (type == MOE_TYPE_Q8         ? MOEI_GROUP
                             : type == MOE_TYPE_Q8_BLOCK ? MOEI_GROUP + 2
                                                         : MOEI_GROUP / 2 + 2);
        more = MOEI_LINE - 1 + (type == MOE_TYPE_Q8 ? MOEI_PANEL * sizeof(float) : 0);
#endif
    }
    if (!moei_mul(count, each, &size) || !moei_add(size, more, &size)) return MOE_ERR_OVERFLOW;
    *bytes = more > 0 ? size - size % MOEI_LINE : size;
    return MOE_OK;
}

/* The argument checks of all calls on whole packed weights; *bytes = the distance between
   panels. */
static moe_status moei_check_panels(int type, size_t n, size_t inner, size_t stride, size_t *bytes) {
    size_t all, size;
    const moe_status status = moe_panel_size(type, inner, &size);
    if (status != MOE_OK) return status;
    if (stride == 0) return MOE_ERR_ARGUMENT;
    if (!moei_mul(size, stride, bytes) || !moei_mul(n / MOEI_PANEL + 1, *bytes, &all)) return MOE_ERR_OVERFLOW;
    return MOE_OK;
}

#ifndef MOE_NO_QUANT

/* The offset of a panel's scales. */
static size_t moei_panel_scales(int type, size_t inner) {
    return moei_groups(inner) * MOEI_PANEL * (type == MOE_TYPE_Q4 ? MOEI_GROUP / 2 : MOEI_GROUP);
}

/* The offset of the scale of an output's group: a block of 32, or in Q8 the whole row. */
static size_t moei_scale_at(int type, size_t inner, size_t group, size_t output) {
    const size_t index = group * MOEI_PANEL + output;
    return moei_panel_scales(type, inner) + (type == MOE_TYPE_Q8 ? sizeof(float) : 2) * index;
}

static moe_real moei_get_scale(int type, const unsigned char *scale) {
    return type == MOE_TYPE_Q8 ? (moe_real)moei_get_float(scale) : moei_from_f16(moei_get_16(scale));
}

/* The offset of element p of an output; in Q4 the byte that holds it, with p % 32 < 16 in its low
   four bits. */
static size_t moei_code_at(int type, size_t p, size_t output) {
    const size_t at = type == MOE_TYPE_Q4 ? p / MOEI_GROUP * (MOEI_GROUP / 2) + p % (MOEI_GROUP / 2) : p;
    return at / 4 * MOEI_LINE + output * 4 + at % 4;
}

/* A quantized weight's code. */
static int moei_get_code(int type, const unsigned char *panel, size_t p, size_t output) {
    const int byte = panel[moei_code_at(type, p, output)];
    if (type == MOE_TYPE_Q4) return (p % MOEI_GROUP < MOEI_GROUP / 2 ? byte & 15 : byte >> 4) - 8;
    return byte - 128;
}

static void moei_put_code(int type, unsigned char *panel, size_t p, size_t output, int code) {
    unsigned char *byte = panel + moei_code_at(type, p, output);
    if (type != MOE_TYPE_Q4) *byte = (unsigned char)(code + 128);
    else if (p % MOEI_GROUP < MOEI_GROUP / 2) *byte = (unsigned char)((*byte & 0xf0) | (code + 8));
    else *byte = (unsigned char)((*byte & 0x0f) | (code + 8) << 4);
}

/* A panel of zeros. */
static void moei_clear_panel(int type, size_t inner, size_t size, unsigned char *panel) {
    const size_t scales = moei_panel_scales(type, inner);
    memset(panel, type == MOE_TYPE_Q4 ? 0x88 : 0x80, scales);
    memset(panel + scales, 0, size - scales);
}

/* The number of elements that share a scale. */
static size_t moei_group_length(int type, size_t inner, size_t p) {
    return type == MOE_TYPE_Q8 ? inner - p : moei_smaller(inner - p, MOEI_GROUP);
}

/* The scale of n weights, as it is stored: infinite if the type of the scale cannot represent
   it. */
static moe_real moei_weight_scale(int type, size_t n, const moe_real *x) {
    moe_real most = 0;
    size_t i;
    for (i = 0; i < n; i++)
        if (MOEI_F(fabs)(x[i]) > MOEI_F(fabs)(most)) most = x[i];
    if (type == MOE_TYPE_Q4) return moei_from_f16(moei_narrow(most / -8, 5, 10)) + 0; /* never -0 */
    most = MOEI_F(fabs)(most) / 127;
    if (type == MOE_TYPE_Q8_BLOCK) return moei_from_f16(moei_narrow(most, 5, 10));
    return most > MOEI_R(3.4028234663852886e38) ? MOEI_INFINITY : (moe_real)(float)most;
}

/* x to the nearest integer, ties to even or away from 0. |x| below 2^14. */
static int moei_round(moe_real x, int to_even) {
    const int whole = (int)x;
    const moe_real rest = MOEI_F(fabs)(x - (moe_real)whole), half = MOEI_R(0.5);
    const int more = rest > half || (rest >= half && (!to_even || whole % 2 != 0));
    return x < 0 ? whole - more : whole + more;
}

static int moei_code_of(int type, moe_real x, moe_real scale) {
    const moe_real quotient = x / scale, limit = 128;
    const moe_real value = quotient > limit ? limit : quotient < -limit ? -limit : quotient;
    int code;
    if (type == MOE_TYPE_Q4) {
        code = (int)(value + MOEI_R(8.5)) - 8; /* truncation is floor above -8 */
        return code > 7 ? 7 : code < -8 ? -8 : code;
    }
    code = moei_round(value, 0);
    return code > 127 ? 127 : code < -127 ? -127 : code;
}

static void moei_quantize_panel(int type, size_t outputs, size_t inner, const moe_real *w, size_t ldw, size_t size,
                                unsigned char *panel) {
    size_t j, p, i, length;
    moei_clear_panel(type, inner, size, panel);
    for (j = 0; j < outputs; j++)
        for (p = 0; p < inner; p += length) {
            const moe_real *x = w + j * ldw + p;
            moe_real scale;
            unsigned char *at = panel + moei_scale_at(type, inner, type == MOE_TYPE_Q8 ? 0 : p / MOEI_GROUP, j);
            length = moei_group_length(type, inner, p);
            scale = moei_weight_scale(type, length, x);
            if (type == MOE_TYPE_Q8) moei_put_float(at, (float)scale);
            else moei_put_16(at, moei_narrow(scale, 5, 10));
            for (i = 0; i < length && (scale > 0 || scale < 0); i++)
                moei_put_code(type, panel, p + i, j, moei_code_of(type, x[i], scale));
        }
}

/* Whether weights can be quantized. */
static moe_status moei_check_weights(int type, size_t n, size_t inner, const moe_real *w, size_t ldw) {
    size_t j, p, length;
    for (j = 0; j < n; j++)
        for (p = 0; p < inner; p++)
            if (!moe_is_finite(w[j * ldw + p])) return MOE_ERR_NONFINITE;
    for (j = 0; j < n; j++)
        for (p = 0; p < inner; p += length) {
            length = moei_group_length(type, inner, p);
            if (!moe_is_finite(moei_weight_scale(type, length, w + j * ldw + p))) return MOE_ERR_OVERFLOW;
        }
    return MOE_OK;
}

#endif /* MOE_NO_QUANT */

/* The value of an element of a panel. */
static moe_real moei_panel_get(int type, size_t inner, const unsigned char *panel, size_t p, size_t output) {
    const size_t index = p * MOEI_PANEL + output;
    if (type == MOE_TYPE_REAL) return moei_get_real(panel + index * sizeof(moe_real));
    if (type == MOE_TYPE_F16) return moei_from_f16(moei_get_16(panel + 2 * index));
    if (type == MOE_TYPE_BF16) return moei_from_bf16(moei_get_16(panel + 2 * index));
#ifndef MOE_NO_QUANT
    return (moe_real)moei_get_code(type, panel, p, output) *
           moei_get_scale(type, panel + moei_scale_at(type, inner, type == MOE_TYPE_Q8 ? 0 : p / MOEI_GROUP, output));
#else
    (void)inner;
    return 0;
#endif
}

/* Fills a panel of a type that is not quantized. */
static void moei_fill_panel(int type, size_t outputs, size_t inner, const moe_real *w, size_t ldw,
                            unsigned char *panel) {
    size_t j, p;
    for (p = 0; p < inner; p++)
        for (j = 0; j < MOEI_PANEL; j++) {
            const moe_real x = j < outputs ? w[j * ldw + p] : 0;
            const size_t index = p * MOEI_PANEL + j;
            if (type == MOE_TYPE_REAL) memcpy(panel + index * sizeof x, &x, sizeof x);
            else moei_put_16(panel + 2 * index, type == MOE_TYPE_F16 ? moei_narrow(x, 5, 10) : moei_narrow(x, 8, 7));
        }
}

moe_status moe_pack(const moe_kernels *k, int type, size_t n, size_t inner, const moe_real *w, size_t ldw, void *packed,
                    size_t stride) {
    unsigned char *panel = (unsigned char *)packed;
    size_t j, step = 0;
    moe_status status = moei_check_panels(type, n, inner, stride, &step);
#ifndef MOE_NO_QUANT
    if (status == MOE_OK && moei_is_quantized(type)) status = moei_check_weights(type, n, inner, w, ldw);
#endif
    (void)k;
    for (j = 0; j < n && status == MOE_OK; j += MOEI_PANEL, panel += step) {
        const size_t outputs = moei_smaller(n - j, MOEI_PANEL);
        if (!moei_is_quantized(type)) moei_fill_panel(type, outputs, inner, w + j * ldw, ldw, panel);
#ifndef MOE_NO_QUANT
        else moei_quantize_panel(type, outputs, inner, w + j * ldw, ldw, step / stride, panel);
#endif
    }
    return status;
}

moe_status moe_unpack(int type, size_t n, size_t inner, const void *packed, size_t stride, moe_real *w, size_t ldw) {
    const unsigned char *panels = (const unsigned char *)packed;
    size_t j, p, step;
    const moe_status status = moei_check_panels(type, n, inner, stride, &step);
    for (j = 0; j < n && status == MOE_OK; j++)
        for (p = 0; p < inner; p++)
            w[j * ldw + p] = moei_panel_get(type, inner, panels + j / MOEI_PANEL * step, p, j % MOEI_PANEL);
    return status;
}

#ifndef MOE_NO_QUANT

/* ---- rows of activations ---- */

/* The offsets of the scales and of the initial sums in a row, and its size; 0 on overflow. */
typedef struct moei_row_shape {
    size_t codes, scales, starts, size;
} moei_row_shape;

static int moei_shape_row(int type, size_t inner, moei_row_shape *s) {
    const size_t groups = moei_groups(inner), scales = type == MOE_TYPE_Q8 ? 1 : groups;
    const size_t starts = type == MOE_TYPE_Q8 ? inner / MOEI_SUM_LIMIT + 1 : groups;
    size_t lines;
    /* within this limit the codes take at most half of size_t, scales and starts less than half as
       much: nothing below overflows */
    if (!moei_is_quantized(type) || inner > (size_t)-1 / 2 - MOEI_GROUP) return 0;
    s->codes = s->scales = groups * MOEI_GROUP;
    s->starts = s->scales + scales * sizeof(moe_real);
    /* an odd number of lines, with room to spare */
    lines = (s->starts + starts * 4) / MOEI_LINE + 1;
    s->size = (lines + (lines % 2 == 0)) * MOEI_LINE;
    return 1;
}

size_t moe_quantized_row_size(int type, size_t inner) {
    moei_row_shape shape;
    return moei_shape_row(type, inner, &shape) ? shape.size : 0;
}

/* The bits of the largest |x|: as integers they order like the numbers, infinity and NaN above all.
   n is a multiple of 32, as below. */
typedef moei_bits moei_max_magnitude_fn(size_t n, const moe_real *x);
/* code_i = x_i * factor rounded to nearest even; returns the sum of the codes. */
typedef int32_t moei_codes_fn(size_t n, const moe_real *x, moe_real factor, signed char *code);

/* Returns the scale of a group, and its inverse in *factor: both 0 if that could overflow. If
   largest is not finite: NaN and 0. */
static moe_real moei_row_scale(moei_bits largest, moe_real *factor) {
    const moei_bits least = (moei_bits)7 << MOEI_MANTISSA, nan = MOEI_INFINITY_BITS | MOEI_INFINITY_BITS >> 1;
    const moei_bits bits = largest < MOEI_INFINITY_BITS ? largest : nan;
    moe_real most;
    memcpy(&most, &bits, sizeof most);
    *factor = 0;
    if (largest < least) return 0;
    if (largest < MOEI_INFINITY_BITS) *factor = 127 / most;
    return most / 127;
}

/* Quantizes rows, given an instruction set's two loops. The last elements, which do not fill a
   group, are copied and padded first. */
MOEI_INLINE void moei_quantize(int type, size_t m, size_t inner, const moe_real *x, size_t ldx, unsigned char *row,
                               moei_max_magnitude_fn *largest, moei_codes_fn *codes) {
    const size_t whole = inner - inner % MOEI_GROUP;
    const int32_t offset = type == MOE_TYPE_Q4 ? -8 : -128;
    moei_row_shape shape;
    size_t i, p, run;
    if (!moei_shape_row(type, inner, &shape)) return;
    for (i = 0; i < m; i++, x += ldx, row += shape.size) {
        moe_real rest[MOEI_GROUP] = {0}, scale = 0;
        moe_real factor = 0;
        int32_t sum = 0;
        memcpy(rest, x + whole, (inner - whole) * sizeof *x);
        if (type == MOE_TYPE_Q8) {
            const moei_bits front = largest(whole, x), back = largest(MOEI_GROUP, rest);
            scale = moei_row_scale(front > back ? front : back, &factor);
            memcpy(row + shape.scales, &scale, sizeof scale);
        }
        for (p = 0; p < shape.codes; p += run) {
            const moe_real *from = p < whole ? x + p : rest;
            const size_t group = p / (type == MOE_TYPE_Q8 ? MOEI_SUM_LIMIT : (size_t)MOEI_GROUP),
                         left = MOEI_SUM_LIMIT - p % MOEI_SUM_LIMIT;
            int32_t start;
            run = type != MOE_TYPE_Q8 || p >= whole ? (size_t)MOEI_GROUP : whole - p < left ? whole - p : left;
            if (type != MOE_TYPE_Q8) {
                scale = moei_row_scale(largest(run, from), &factor);
                memcpy(row + shape.scales + group * sizeof scale, &scale, sizeof scale);
            }
            if (type != MOE_TYPE_Q8 || p % MOEI_SUM_LIMIT == 0) sum = 0;
            if (factor > 0) sum += codes(run, from, factor, (signed char *)row + p);
            else memset(row + p, 0, run);
            start = sum * offset;
            memcpy(row + shape.starts + group * 4, &start, sizeof start);
        }
    }
}

static moei_bits moei_max_magnitude_c(size_t n, const moe_real *x) {
    moei_bits most = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        const moei_bits size = moei_real_bits(x[i]) & ~MOEI_SIGN_BIT;
        if (size > most) most = size;
    }
    return most;
}

static int32_t moei_codes_c(size_t n, const moe_real *x, moe_real factor, signed char *code) {
    int32_t sum = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        code[i] = (signed char)moei_round(x[i] * factor, 1);
        sum += code[i];
    }
    return sum;
}

static void moei_quantize_c(int type, size_t m, size_t inner, const moe_real *x, size_t ldx, void *rows) {
    moei_quantize(type, m, inner, x, ldx, (unsigned char *)rows, moei_max_magnitude_c, moei_codes_c);
}

/* ---- the product in plain C ----

   A sum over int8 times the byte w + 128 (or the four bits w + 8) starts from the value that
   cancels the offset. Partial sums stay within MOEI_SUM_LIMIT * 128 * 127 too: terms already added
   have their offset cancelled, the others contribute -128 q. */

/* sum[j] += over count quads of the row; each quad multiplies a line of 16 x 4 bytes. */
MOEI_INLINE void moei_sum_c(int q4, size_t count, const signed char *code, const unsigned char *line, int32_t *sum) {
    size_t p, j;
    for (p = 0; p < count; p++, code += 4) {
        const int high = q4 && p % 8 >= 4;
        const unsigned char *w = line + (q4 ? p / 8 * 4 + p % 4 : p) * MOEI_LINE;
        for (j = 0; j < MOEI_PANEL; j++, w += 4) {
            if (!q4) sum[j] += (int32_t)code[0] * w[0] + code[1] * w[1] + code[2] * w[2] + code[3] * w[3];
            else if (high)
                sum[j] +=
                    code[0] * (w[0] >> 4) + code[1] * (w[1] >> 4) + code[2] * (w[2] >> 4) + code[3] * (w[3] >> 4);
            else
                sum[j] +=
                    code[0] * (w[0] & 15) + code[1] * (w[1] & 15) + code[2] * (w[2] & 15) + code[3] * (w[3] & 15);
        }
    }
}

/* One row over one panel. */
static void moei_quant_row_c(int type, size_t inner, const moei_row_shape *shape, const unsigned char *row,
                             const unsigned char *panel, moe_real *c) {
    const size_t most = type == MOE_TYPE_Q8 ? MOEI_SUM_LIMIT : (size_t)MOEI_GROUP;
    size_t p, j;
    for (j = 0; j < MOEI_PANEL; j++) c[j] = 0;
    for (p = 0; p < shape->codes; p += most) {
        const size_t count = shape->codes - p < most ? shape->codes - p : most, group = p / most;
        const size_t scaled = type == MOE_TYPE_Q8 ? 0 : group;
        const moe_real scale = moei_get_real(row + shape->scales + scaled * sizeof(moe_real));
        int32_t sum[MOEI_PANEL], start;
        memcpy(&start, row + shape->starts + group * 4, sizeof start);
        for (j = 0; j < MOEI_PANEL; j++) sum[j] = start;
        if (type == MOE_TYPE_Q4)
            moei_sum_c(1, count / 4, (const signed char *)row + p, panel + p * MOEI_PANEL / 2, sum);
        else moei_sum_c(0, count / 4, (const signed char *)row + p, panel + p * MOEI_PANEL, sum);
        for (j = 0; j < MOEI_PANEL; j++)
            MOEI_ADD_TO(c[j], (moe_real)sum[j],
                        moei_get_scale(type, panel + moei_scale_at(type, inner, scaled, j)) * scale);
    }
}

static void moei_quant_c(int type, size_t m, size_t panels, size_t inner, const void *rows, size_t row_size,
                         const void *packed, size_t panel_stride, moe_real *c, size_t ldc) {
    moei_row_shape shape;
    size_t i, j;
    if (!moei_shape_row(type, inner, &shape)) return;
    for (j = 0; j < panels; j++)
        for (i = 0; i < m; i++)
            moei_quant_row_c(type, inner, &shape, (const unsigned char *)rows + i * row_size,
                             (const unsigned char *)packed + j * panel_stride, c + i * ldc + j * MOEI_PANEL);
}

/* C[m][16 panels] = (load ? C : 0) + the sum over groups of (sum over the codes of a group) *
   (scale of the weights * scale of the row). A group has `lines` lines of 64 bytes, 4 or 8. */
typedef struct moei_code_panels {
    size_t m, panels, groups, lines, row_size, ldc;
    const unsigned char *rows, *scales, *starts; /* of the first row: int8, scales, initial sums */
    const unsigned char *codes[2];
    const moe_real *weight_scales[2]; /* [groups][16] */
    moe_real *c;
    int load;
} moei_code_panels;

static void moei_unpacked_c(const moei_code_panels *p) {
    size_t i, g, j, panel;
    for (panel = 0; panel < p->panels; panel++)
        for (i = 0; i < p->m; i++) {
            const unsigned char *row = p->rows + i * p->row_size, *line = p->codes[panel];
            moe_real *c = p->c + i * p->ldc + panel * MOEI_PANEL;
            for (j = 0; j < MOEI_PANEL && !p->load; j++) c[j] = 0;
            for (g = 0; g < p->groups; g++, row += 4 * p->lines, line += p->lines * MOEI_LINE) {
                const moe_real scale = moei_get_real(p->scales + i * p->row_size + g * sizeof scale);
                const moe_real *w_scale = p->weight_scales[panel] + g * MOEI_PANEL;
                int32_t sum[MOEI_PANEL], start;
                memcpy(&start, p->starts + i * p->row_size + g * 4, sizeof start);
                for (j = 0; j < MOEI_PANEL; j++) sum[j] = start;
                moei_sum_c(0, p->lines, (const signed char *)row, line, sum);
                for (j = 0; j < MOEI_PANEL; j++) MOEI_ADD_TO(c[j], (moe_real)sum[j], w_scale[j] * scale);
            }
        }
}

/* The three entries of a table, from an instruction set's function for all types. */
#define MOEI_QUANT_FUNCTION(name, set, target, type) \
    target static void moei_##name##_##set(size_t m, size_t panels, size_t inner, const void *rows, size_t row_size, \
                                           const void *packed, size_t panel_stride, moe_real *c, size_t ldc) { \
        moei_quant_##set(type, m, panels, inner, rows, row_size, packed, panel_stride, c, ldc); \
    }
#define MOEI_QUANT_FUNCTIONS(set, target) \
    MOEI_QUANT_FUNCTION(q8, set, target, MOE_TYPE_Q8) \
    MOEI_QUANT_FUNCTION(q8_block, set, target, MOE_TYPE_Q8_BLOCK) \
    MOEI_QUANT_FUNCTION(q4, set, target, MOE_TYPE_Q4)

MOEI_QUANT_FUNCTIONS(c, )

#endif /* MOE_NO_QUANT */

#if (defined(MOEI_HAVE_AVX2) || defined(MOEI_V4_IEEE)) && !defined(MOE_NO_QUANT)

/* ---- vector kernels: what they share ---- */

/* The input of a tile: some rows over one or two panels, over the groups of k that begin at a and
   w. */
typedef struct moei_quant_tile {
    const unsigned char *a, *scale, *start; /* of the first row: int8, scales and starts */
    /* of both panels; twice the same one if only one is left, */
    const unsigned char *w[2], *w_scale[2];
    /* in which case the second panel's outputs all go to one spare row */
    float *c[2];
    uintptr_t ahead; /* tiles of six rows prefetch the next panels, step bytes per line */
    size_t step;
    size_t row_size, ldc[2];
    size_t groups, lines; /* groups with a scale; lines of 64 bytes per group */
    size_t scale_size;    /* bytes of a weight's scale */
    int half;             /* the weights' scales are 16-bit floats, else float */
    int whole;            /* one group: the row */
    int load;             /* adds to C */
} moei_quant_tile;

typedef void moei_tile_fn(int q4, size_t rows, const moei_quant_tile *t);

/* All tiles of a product: wide panels of weights are multiplied by row after row while they are
   cached. most: rows of the highest tile; there are also tiles of 1 to 4 rows, of 5 to 7 if it is
   8. */
static void moei_quant_tiles(int type, size_t wide, size_t most, moei_tile_fn *tile, size_t m, size_t panels,
                             size_t inner, const void *rows, size_t row_size, const void *packed, size_t panel_stride,
                             float *c, size_t ldc) {
    const size_t piece = type == MOE_TYPE_Q8 ? (size_t)MOEI_SUM_LIMIT : inner;
    const int q4 = type == MOE_TYPE_Q4;
    float spare[MOEI_PANEL];
    moei_row_shape shape;
    moei_quant_tile t;
    size_t p, i, j, count, lines;
    if (!moei_shape_row(type, inner, &shape)) return;
    t.row_size = row_size;
    t.step = wide * MOEI_LINE / (m < 6 ? 1 : m / 6);
    t.ldc[0] = ldc;
    t.half = type != MOE_TYPE_Q8;
    t.whole = type == MOE_TYPE_Q8;
    t.scale_size = t.half ? 2 : sizeof(float);
    for (p = 0; p < inner; p += piece) { /* more than one piece only in Q8 beyond MOEI_SUM_LIMIT */
        const unsigned char *row = (const unsigned char *)rows, *panel = (const unsigned char *)packed;
        const size_t length = shape.codes - p < piece ? shape.codes - p : piece;
        t.groups = type == MOE_TYPE_Q8 ? 1 : shape.codes / MOEI_GROUP;
        t.lines = type == MOE_TYPE_Q8 ? length / 4 : q4 ? 4 : 8;
        t.load = p > 0;
        lines = t.groups * t.lines;
        for (j = 0; j < panels; j += wide, panel += wide * panel_stride) {
            const size_t next = wide > 1 && j + 1 < panels ? 1 : 0;
            t.ldc[1] = next * ldc;
            t.w[0] = panel + p * MOEI_PANEL;
            t.w[1] = t.w[0] + next * panel_stride;
            t.ahead = (uintptr_t)t.w[0] + wide * panel_stride;
            t.w_scale[0] = panel + moei_panel_scales(type, inner);
            t.w_scale[1] = t.w_scale[0] + next * panel_stride;
            t.c[0] = c + j * MOEI_PANEL;
            t.c[1] = next ? t.c[0] + MOEI_PANEL : spare;
            t.a = row + p;
            t.scale = row + shape.scales;
            t.start = row + shape.starts + p / MOEI_SUM_LIMIT * (type == MOE_TYPE_Q8 ? 4 : 0);
            for (i = m; i > 0; i -= count) {
                count = i >= most ? most : i > 4 && most != 8 ? (i + 1) / 2 : i;
                tile(q4, count, &t);
                t.a += count * row_size;
                t.scale += count * row_size;
                t.start += count * row_size;
                t.c[0] += count * ldc;
                t.c[1] += count * t.ldc[1];
                t.ahead += t.step * lines;
            }
        }
    }
}

/* The same for codes, whose rows come in pairs, one panel at a time. Panels that are added to start
   from C instead of zeros. */
static void moei_code_tiles(size_t most, moei_tile_fn *tile, const moei_code_panels *p) {
    float spare[MOEI_PANEL];
    moei_quant_tile t;
    size_t i, j, count;
    memset(&t, 0, sizeof t);
    t.row_size = p->row_size;
    t.ldc[0] = p->ldc;
    t.scale_size = sizeof(float);
    t.groups = p->groups;
    t.lines = p->lines;
    t.load = p->load;
    t.c[1] = spare;
    for (j = 0; j < p->panels; j++) {
        t.w[0] = t.w[1] = p->codes[j];
        t.ahead = (uintptr_t)t.w[0];
        t.w_scale[0] = t.w_scale[1] = (const unsigned char *)p->weight_scales[j];
        t.c[0] = p->c + j * MOEI_PANEL;
        t.a = p->rows;
        t.scale = p->scales;
        t.start = p->starts;
        for (i = p->m; i > 0; i -= count) {
            count = moei_smaller(i, most);
            tile(0, count, &t);
            t.a += count * p->row_size;
            t.scale += count * p->row_size;
            t.start += count * p->row_size;
            t.c[0] += count * p->ldc;
        }
    }
}

MOEI_INLINE int32_t moei_get_32(const unsigned char *p) {
    int32_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* The entries of an instruction set. */
#define MOEI_QUANT_SET(set, wide, most) \
    static void moei_quant_##set(int type, size_t m, size_t panels, size_t inner, const void *rows, size_t row_size, \
                                 const void *packed, size_t panel_stride, float *c, size_t ldc) { \
        moei_quant_tiles(type, wide, most, moei_quant_rows_##set, m, panels, inner, rows, row_size, packed, \
                         panel_stride, c, ldc); \
    } \
    MOEI_QUANT_FUNCTIONS(set, )

/* The same with tiles of 1 to 4 rows by half a panel. */
#define MOEI_SIDE_CASE(set, rows) \
    case rows: \
        q4 ? moei_quant_tile_##set(1, rows, side, t) : moei_quant_tile_##set(0, rows, side, t); \
        break;
#define MOEI_SIDES(set, rows) \
    for (side = 0; side < 2; side++) switch (rows) { \
        MOEI_SIDE_CASE(set, 1) MOEI_SIDE_CASE(set, 2) MOEI_SIDE_CASE(set, 3) MOEI_SIDE_CASE(set, 4) }
#define MOEI_SIDE_SET(set, target) \
    target static void moei_quant_rows_##set(int q4, size_t rows, const moei_quant_tile *t) { \
        size_t side; \
        MOEI_SIDES(set, rows) \
    } \
    static void moei_unpacked_##set(const moei_code_panels *p) { moei_code_tiles(4, moei_quant_rows_##set, p); } \
    MOEI_QUANT_SET(set, 1, 4)

#endif

#ifdef MOEI_HAVE_AVX2

#if defined(__GNUC__) || defined(__clang__)
#define MOEI_AVX2_F16C __attribute__((target("avx2,fma,f16c")))
#else
#define MOEI_AVX2_F16C
#endif

MOEI_AVX2_F16C MOEI_INLINE __m256 moei_half_load_avx2(int bf16, const unsigned char *p) {
    const __m128i half = _mm_loadu_si128((const __m128i *)(const void *)p);
    return bf16 ? _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)) : _mm256_cvtph_ps(half);
}

/* Few rows of activations times 16-bit weights, which are widened in registers: the memory of the
   weights is read once and nothing is written but C. */
typedef struct moei_half_tile {
    const float *a;
    const unsigned char *w[8]; /* of each vector of outputs; a repeated one if fewer are left */
    float *c;
    size_t lda, ldc, k, columns;
    int load; /* adds to C */
} moei_half_tile;

/* rows x 4 vectors of outputs, or with wide one row x 8. */
typedef void moei_half_tile_fn(int type, size_t rows, int wide, const moei_half_tile *t);

/* lanes: outputs of a vector; most: rows of the highest tile. */
static void moei_half_tiles(size_t lanes, size_t most, moei_half_tile_fn *tile, int type, size_t m, size_t n,
                            size_t inner, const float *a, size_t lda, const unsigned char *packed, float *c,
                            size_t ldc) {
    const size_t tiles = (m + most - 1) / most;
    moei_half_tile t;
    size_t i, j, p, left, rows;
    t.lda = lda;
    t.ldc = ldc;
    for (j = 0; j < n; j += t.columns) {
        const int wide = m == 1 && n - j > 4 * lanes; /* four sums would be limited by their latency */
        const size_t most_columns = (wide ? 8 : 4) * lanes;
        t.columns = n - j < most_columns ? n - j : most_columns;
        for (p = 0; p < inner; p += MOEI_BLOCK_K) {
            t.k = moei_smaller(inner - p, MOEI_BLOCK_K);
            t.load = p > 0;
            t.a = a + p;
            t.c = c + j;
            for (i = 0; i < 8; i++) {
                const size_t at = i * lanes < t.columns ? j + i * lanes : j;
                t.w[i] = packed + (at / MOEI_PANEL * inner + p) * (2 * MOEI_PANEL) + at % MOEI_PANEL * 2;
            }
            for (left = tiles, i = m; left > 0; left--, i -= rows, t.a += rows * lda, t.c += rows * ldc) {
                rows = (i + left - 1) / left;
                tile(type, rows, wide, &t);
            }
        }
    }
}

#define MOEI_HALF_SUMS(set, row) \
    s##row##0 = moei_half_zero_##set(), s##row##1 = s##row##0, s##row##2 = s##row##0, s##row##3 = s##row##0
#define MOEI_HALF_STEP(set, row, i) \
    if (rows > row) s##row##i = moei_half_fma_##set(x##row, y, s##row##i);
#define MOEI_HALF_VECTOR(set, i) \
    y = moei_half_load_##set(bf16, w##i + 2 * MOEI_PANEL * p); \
    MOEI_HALF_STEP(set, 0, i) \
    MOEI_HALF_STEP(set, 1, i) \
    MOEI_HALF_STEP(set, 2, i) \
    MOEI_HALF_STEP(set, 3, i)
/* The second row's sums of a wide tile are those of its vectors 4 to 7. */
#define MOEI_HALF_BESIDE(set, i, w) \
    y = moei_half_load_##set(bf16, w + 2 * MOEI_PANEL * p); \
    s1##i = moei_half_fma_##set(x0, y, s1##i);
#define MOEI_HALF_SPILL(row) \
    sums[4 * row] = s##row##0; \
    sums[4 * row + 1] = s##row##1; \
    sums[4 * row + 2] = s##row##2; \
    sums[4 * row + 3] = s##row##3;
#define MOEI_HALF_CASE(set, rows, wide) \
    case rows + 16 * wide: \
        if (type == MOE_TYPE_BF16) moei_half_tile_##set(1, rows, wide, t, sums); \
        else moei_half_tile_##set(0, rows, wide, t, sums); \
        break;
#define MOEI_HALF_CASES_3(set) \
    MOEI_HALF_CASE(set, 1, 1) \
    MOEI_HALF_CASE(set, 1, 0) \
    MOEI_HALF_CASE(set, 2, 0) \
    MOEI_HALF_CASE(set, 3, 0)
#define MOEI_HALF_CASES_4(set) MOEI_HALF_CASES_3(set) MOEI_HALF_CASE(set, 4, 0)

/* The sum over one block of k, in the order of the tiles for floats. */
#define MOEI_HALF_PRODUCT(set, target, VECTOR, lanes, most) \
    target MOEI_INLINE void moei_half_tile_##set(int bf16, size_t rows, int wide, const moei_half_tile *t, \
                                                 VECTOR *sums) { \
        const unsigned char *const w0 = t->w[0], *const w1 = t->w[1]; \
        const unsigned char *const w2 = t->w[2], *const w3 = t->w[3]; \
        const float *a = t->a; \
        VECTOR MOEI_HALF_SUMS(set, 0); \
        VECTOR MOEI_HALF_SUMS(set, 1); \
        VECTOR MOEI_HALF_SUMS(set, 2); \
        VECTOR MOEI_HALF_SUMS(set, 3); \
        size_t p; \
        for (p = 0; p < t->k; p++, a++) { \
            const VECTOR x0 = moei_half_splat_##set(a), x1 = moei_half_splat_##set(a + (rows > 1 ? t->lda : 0)); \
            const VECTOR x2 = moei_half_splat_##set(a + (rows > 2 ? 2 * t->lda : 0)); \
            const VECTOR x3 = moei_half_splat_##set(a + (rows > 3 ? 3 * t->lda : 0)); \
            VECTOR y; \
            MOEI_HALF_VECTOR(set, 0) \
            MOEI_HALF_VECTOR(set, 1) \
            MOEI_HALF_VECTOR(set, 2) \
            MOEI_HALF_VECTOR(set, 3) \
            if (wide) { \
                MOEI_HALF_BESIDE(set, 0, t->w[4]) \
                MOEI_HALF_BESIDE(set, 1, t->w[5]) \
                MOEI_HALF_BESIDE(set, 2, t->w[6]) \
                MOEI_HALF_BESIDE(set, 3, t->w[7]) \
            } \
        } \
        MOEI_HALF_SPILL(0) \
        if (wide || rows > 1) { \
            MOEI_HALF_SPILL(1) \
        } \
        if (rows > 2) { \
            MOEI_HALF_SPILL(2) \
        } \
        if (rows > 3) { \
            MOEI_HALF_SPILL(3) \
        } \
    } \
    target static void moei_half_rows_##set(int type, size_t rows, int wide, const moei_half_tile *t) { \
        const size_t columns = t->columns, ldc = t->ldc; \
        const int load = t->load; \
        float *c = t->c; \
        VECTOR sums[16], *sum = sums; \
        size_t j; \
        switch (rows + (wide ? 16 : 0)) { MOEI_HALF_CASES_##most(set) } \
        for (; rows > 0; rows--, c += ldc, sum += 4) \
            for (j = 0; j < columns; j += lanes) moei_half_store_##set(c + j, columns - j, sum[j / lanes], load); \
    } \
    static void moei_half_##set(int type, size_t m, size_t n, size_t inner, const float *a, size_t lda, \
                                const unsigned char *packed, float *c, size_t ldc) { \
        moei_half_tiles(lanes, most, moei_half_rows_##set, type, m, n, inner, a, lda, packed, c, ldc); \
    }

MOEI_AVX2_F16C MOEI_INLINE __m256 moei_half_zero_avx2(void) { return _mm256_setzero_ps(); }
MOEI_AVX2_F16C MOEI_INLINE __m256 moei_half_splat_avx2(const float *a) { return _mm256_broadcast_ss(a); }
MOEI_AVX2_F16C MOEI_INLINE __m256 moei_half_fma_avx2(__m256 x, __m256 y, __m256 sum) {
    return _mm256_fmadd_ps(x, y, sum);
}
MOEI_AVX2_F16C MOEI_INLINE void moei_half_store_avx2(float *c, size_t count, __m256 sum, int load) {
    const __m256 before = _mm256_maskload_ps(c, moei_mask_avx2(load == 0 ? 0 : count < 8 ? count : 8));
    moei_store_avx2(count, c, _mm256_add_ps(before, sum));
}
MOEI_HALF_PRODUCT(avx2, MOEI_AVX2_F16C, __m256, 8, 3)

#ifdef MOEI_HAVE_AVX512
MOEI_AVX512 MOEI_INLINE __m512 moei_half_zero_avx512(void) { return _mm512_setzero_ps(); }
MOEI_AVX512 MOEI_INLINE __m512 moei_half_splat_avx512(const float *a) { return _mm512_set1_ps(*a); }
MOEI_AVX512 MOEI_INLINE __m512 moei_half_fma_avx512(__m512 x, __m512 y, __m512 sum) {
    return _mm512_fmadd_ps(x, y, sum);
}
/* The masks have all lanes: without one gcc 12 reports an uninitialized operand. */
MOEI_AVX512 MOEI_INLINE __m512 moei_half_load_avx512(int bf16, const unsigned char *p) {
    const __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)p);
    const __mmask16 all = 0xffff;
    return bf16 ? _mm512_castsi512_ps(_mm512_maskz_slli_epi32(all, _mm512_maskz_cvtepu16_epi32(all, half), 16))
                : _mm512_maskz_cvtph_ps(all, half);
}
MOEI_AVX512 MOEI_INLINE void moei_half_store_avx512(float *c, size_t count, __m512 sum, int load) {
    moei_add_to_512(c, moei_mask_512(count), sum, load);
}
MOEI_HALF_PRODUCT(avx512, MOEI_AVX512, __m512, 16, 4)
#define moei_widen_avx512 moei_widen_avx2
#endif

MOEI_AVX2_F16C MOEI_INLINE void moei_widen_type_avx2(int bf16, size_t count, const unsigned char *p, float *out) {
    size_t i;
    for (i = 0; i < count; i++, p += 2 * MOEI_PANEL, out += MOEI_PANEL) {
        _mm256_storeu_ps(out, moei_half_load_avx2(bf16, p));
        _mm256_storeu_ps(out + 8, moei_half_load_avx2(bf16, p + MOEI_PANEL));
    }
}

MOEI_AVX2_F16C static void moei_widen_avx2(int type, size_t count, const void *packed, float *out) {
    if (type == MOE_TYPE_F16) moei_widen_type_avx2(0, count, (const unsigned char *)packed, out);
    else moei_widen_type_avx2(1, count, (const unsigned char *)packed, out);
}

#ifndef MOE_NO_QUANT

/* Loads of vectors through pointers of any alignment. */
#define MOEI_LOAD_256(p) _mm256_loadu_si256((const __m256i *)(const void *)(p))
#define MOEI_LOAD_512(p) _mm512_loadu_si512((const void *)(p))

/* Sums of int16 or int32, in the vector types of gcc's builtins: with __m256i gcc copies each sum
   twice. */
#if defined(__GNUC__) || defined(__clang__)
typedef uint16_t moei_uint16x16 __attribute__((vector_size(32)));
typedef int32_t moei_int32x8 __attribute__((vector_size(32)));
typedef int32_t moei_int32x16 __attribute__((vector_size(64)));
#define MOEI_AS(type, vector) ((type)(vector))
#else
typedef __m256i moei_uint16x16;
typedef __m256i moei_int32x8;
typedef __m512i moei_int32x16;
#define MOEI_AS(type, vector) (vector)
#endif

/* Rows 0 to 3 or 5 of a tile at a0, three rows per base pointer, because an address is a base plus
   one or two strides. */
#define MOEI_EACH_4(X, set) X(set, 0, a0) X(set, 1, a0 + row) X(set, 2, a0 + 2 * row) X(set, 3, a3)
#define MOEI_EACH_6(X, set) MOEI_EACH_4(X, set) X(set, 4, a3 + row) X(set, 5, a3 + 2 * row)

/* ---- AVX2 ----

   The product of unsigned and signed bytes (maddubs) saturates at 16 bits with 8-bit operands, but
   not with 4-bit ones: a byte w + 128 is split into its low and its high four bits, and 8 quads of
   2 * 15 * 127 each still fit the 16-bit sums. So int8 and int4 share one kernel: s0 and s1 are the
   sums of the low and of the high bits, which in int8 have weight 16 and in int4 are other
   elements. Each pass computes half of a panel, 8 outputs. */

MOEI_AVX2_F16C MOEI_INLINE __m256i moei_splat_avx2(const unsigned char *p) { return _mm256_set1_epi32(moei_get_32(p)); }

MOEI_AVX2_F16C MOEI_INLINE __m256 moei_w_scale_avx2(int half, const unsigned char *p) {
    if (half) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
    return _mm256_loadu_ps((const float *)(const void *)p);
}

MOEI_AVX2_F16C MOEI_INLINE moei_uint16x16 moei_nibble_sum_avx2(moei_uint16x16 sum, __m256i w, __m256i x) {
    return MOEI_AS(moei_uint16x16, _mm256_add_epi16(MOEI_AS(__m256i, sum), _mm256_maddubs_epi16(w, x)));
}

/* to = (keep ? to : 0) + sum * (w_scale * scale). */
MOEI_AVX2_F16C MOEI_INLINE void moei_finish_avx2(float *to, __m256i sum, __m256 w_scale, __m256i scale, int keep) {
    const __m256 product = _mm256_mul_ps(w_scale, _mm256_castsi256_ps(scale)),
                 before = _mm256_maskload_ps(to, _mm256_set1_epi32(-keep));
    _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), product, before));
}

#define MOEI_START(set, r, at) \
    if (rows > r) total##r = moei_splat_avx2(start + r * row);
#define MOEI_NIBBLES(set, r, at) \
    if (rows > r) { \
        const __m256i x0 = moei_splat_avx2(at), x1 = q4 ? moei_splat_avx2(at + 16) : x0; \
        s##r##0 = moei_nibble_sum_avx2(s##r##0, y0, x0); \
        s##r##1 = moei_nibble_sum_avx2(s##r##1, y1, x1); \
    }
#define MOEI_TOTAL(set, r, at) \
    if (rows > r) { \
        const __m256i v0 = MOEI_AS(__m256i, s##r##0), v1 = MOEI_AS(__m256i, s##r##1); \
        if (q4) total##r = _mm256_add_epi32(total##r, _mm256_madd_epi16(_mm256_add_epi16(v0, v1), one)); \
        else \
            total##r = _mm256_add_epi32(_mm256_add_epi32(total##r, _mm256_madd_epi16(v0, one)), \
                                        _mm256_madd_epi16(v1, sixteen)); \
    }
#define MOEI_FINISH(set, r, at) \
    if (rows > r) moei_finish_avx2(to + r * ld, total##r, w_scales, moei_splat_avx2(scale + r * row), keep);

/* rows (1 to 4) x 8. rows and q4 are constants after inlining. */
MOEI_AVX2_F16C MOEI_INLINE void moei_quant_tile_avx2(int q4, int rows, size_t side, const moei_quant_tile *t) {
    const __m256i one = _mm256_set1_epi16(1), sixteen = _mm256_set1_epi16(16);
    const __m256i mask = _mm256_set1_epi8(15);
    const moei_uint16x16 zero = MOEI_AS(moei_uint16x16, _mm256_setzero_si256());
    const unsigned char *a0 = t->a, *a3, *w = t->w[0] + 32 * side;
    const unsigned char *w_scale = t->w_scale[0] + (t->half ? 16 : 32) * side;
    const unsigned char *start = t->start, *scale = t->scale;
    const size_t row = t->row_size, ldc = t->ldc[0];
    const size_t groups = t->groups, blocks = t->whole ? t->lines / 8 : 1;
    const size_t ld = groups > 1 ? 8 : ldc, lines = t->whole ? 8 : t->lines;
    /* C until the last group, because the rows of C may map to few cache sets */
    float part[4 * 8], *c = t->c[0] + 8 * side, *to = groups > 1 ? part : c;
    const int half = t->half, whole = t->whole;
    size_t group, block, p;
    int keep = t->load, i;
    for (i = 0; i < rows && keep && groups > 1; i++)
        memcpy(to + (size_t)i * ld, c + (size_t)i * ldc, 8 * sizeof *c);
    for (group = 0; group < groups; group++, w_scale += t->scale_size * MOEI_PANEL, start += 4, scale += 4) {
        __m256 w_scales;
        __m256i total0 = moei_splat_avx2(start), total1 = total0;
        __m256i total2 = total0, total3 = total0;
        if (whole) {
            MOEI_EACH_4(MOEI_START, avx2)
        }
        for (block = 0; block < blocks; block++, a0 += q4 ? 16 : 0) {
            moei_uint16x16 s00 = zero, s01 = zero;
            moei_uint16x16 s10 = zero, s11 = zero;
            moei_uint16x16 s20 = zero, s21 = zero;
            moei_uint16x16 s30 = zero, s31 = zero;
            for (p = 0; p < (q4 ? 4 : lines); p++, a0 += 4, w += MOEI_LINE) {
                const __m256i v = MOEI_LOAD_256(w), y0 = _mm256_and_si256(v, mask);
                const __m256i y1 = _mm256_and_si256(_mm256_srli_epi16(v, 4), mask);
                a3 = a0 + 3 * row;
                MOEI_EACH_4(MOEI_NIBBLES, avx2)
            }
            if (!whole) {
                MOEI_EACH_4(MOEI_START, avx2)
            }
            MOEI_EACH_4(MOEI_TOTAL, avx2)
        }
        w_scales = moei_w_scale_avx2(half, w_scale);
        MOEI_EACH_4(MOEI_FINISH, avx2)
        keep = 1;
    }
    for (i = 0; i < rows && groups > 1; i++) memcpy(c + (size_t)i * ldc, to + (size_t)i * ld, 8 * sizeof *c);
}

MOEI_SIDE_SET(avx2, MOEI_AVX2_F16C)

MOEI_AVX2 MOEI_INLINE moei_bits moei_lanes_max_int_avx2(__m256i v) {
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return (moei_bits)_mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
}

MOEI_AVX2 MOEI_INLINE int32_t moei_lanes_sum_int_avx2(__m256i v) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

MOEI_AVX2 MOEI_INLINE moei_bits moei_max_magnitude_avx2(size_t n, const float *x) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256();
    size_t i;
    for (i = 0; i < n; i += 8)
        most = _mm256_max_epi32(most, _mm256_and_si256(mask, _mm256_castps_si256(_mm256_loadu_ps(x + i))));
    return moei_lanes_max_int_avx2(most);
}

MOEI_AVX2 MOEI_INLINE int32_t moei_codes_avx2(size_t n, const float *x, float factor, signed char *code) {
    const __m256 f = _mm256_set1_ps(factor);
    __m256i sums = _mm256_setzero_si256();
    size_t i;
#define MOEI_CODES(at) _mm256_cvtps_epi32(_mm256_mul_ps(f, _mm256_loadu_ps(x + i + (at))))
    for (i = 0; i < n; i += 32) {
        const __m256i i0 = MOEI_CODES(0), i1 = MOEI_CODES(8);
        const __m256i i2 = MOEI_CODES(16), i3 = MOEI_CODES(24);
        /* order of the groups of four: 0 2 4 6 1 3 5 7 */
        const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(i0, i1), _mm256_packs_epi32(i2, i3));
        sums = _mm256_add_epi32(sums, _mm256_add_epi32(_mm256_add_epi32(i0, i1), _mm256_add_epi32(i2, i3)));
        _mm256_storeu_si256((__m256i *)(void *)(code + i),
                            _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    }
#undef MOEI_CODES
    return moei_lanes_sum_int_avx2(sums);
}

MOEI_AVX2 static void moei_quantize_avx2(int type, size_t m, size_t inner, const float *x, size_t ldx, void *rows) {
    moei_quantize(type, m, inner, x, ldx, (unsigned char *)rows, moei_max_magnitude_avx2, moei_codes_avx2);
}

/* ---- VNNI ----

   One instruction (vpdpbusd) multiplies four unsigned bytes by four signed ones and adds the
   products to an int32 in each lane. One macro serves vectors of 8 and of 16 outputs: a line of a
   panel is two vectors of the first kind or one of the second, so a tile is one panel or two wide
   and has two sums per row, s0 and s1, and two vectors of C, c0 and c1. Tiles of one and two rows
   have a second pair of sums, u0 and u1, to hide the latency. Each set has small functions: splat
   (four bytes to all lanes), dot, low and high (four bits of each byte), finish (C). */

#define MOEI_DOT_SUMS(set, r, at) , s##r##0 = zero, s##r##1 = zero
#define MOEI_DOT_C(set, r, at) , c##r##0 = none, c##r##1 = none
#define MOEI_DOT_LOAD(OP, r, at) \
    if (rows > r) { \
        c##r##0 = OP(loadu)(to0 + r * ld0); \
        c##r##1 = OP(loadu)(to1 + r * ld1); \
    }
#define MOEI_DOT_STORE(OP, r, at) \
    if (rows > r) { \
        OP(storeu)(to0 + r * ld0, c##r##0); \
        OP(storeu)(to1 + r * ld1, c##r##1); \
    }
#define MOEI_DOT_START(set, r, at) \
    if (rows > r) s##r##0 = s##r##1 = moei_start_##set(start + r * row);
#define MOEI_DOT(set, sum, r, at) \
    if (rows > r) { \
        x = moei_splat_##set(at); \
        sum##r##0 = moei_dot_##set(sum##r##0, y0, x); \
        sum##r##1 = moei_dot_##set(sum##r##1, y1, x); \
    }
#define MOEI_DOT_S(set, r, at) MOEI_DOT(set, s, r, at)
#define MOEI_DOT_S16(set, r, at) MOEI_DOT(set, s, r, at + 16)
#define MOEI_DOT_U(set, beyond) MOEI_DOT(set, u, 0, a0 + beyond) MOEI_DOT(set, u, 1, a0 + row + beyond)
#define MOEI_DOT_FINISH(set, r, at) \
    if (rows > r) { \
        x = moei_splat_##set(scale + r * row); \
        c##r##0 = moei_finish_##set(c##r##0, s##r##0, scale0, x); \
        c##r##1 = moei_finish_##set(c##r##1, s##r##1, scale1, x); \
    }

/* Adds one line of each panel. */
#define MOEI_DOT_LINE(set, INTS, LOAD, beside) \
    INTS v0 = LOAD(w0), v1 = LOAD(w1); \
    MOEI_LOADED(v0) \
    MOEI_LOADED(v1) \
    if (rows > 4) { \
        _mm_prefetch((const char *)ahead, _MM_HINT_T1); \
        if (!beside) _mm_prefetch((const char *)(ahead + MOEI_LINE), _MM_HINT_T1); \
        ahead += step; \
    } \
    y0 = q4 ? moei_low_##set(v0) : v0; \
    y1 = q4 ? moei_low_##set(v1) : v1; \
    MOEI_EACH_6(MOEI_DOT_S, set) \
    if (q4) { \
        y0 = moei_high_##set(v0); \
        y1 = moei_high_##set(v1); \
        if (rows <= 2) { \
            MOEI_DOT_U(set, 16) \
        } else { \
            MOEI_EACH_6(MOEI_DOT_S16, set) \
        } \
    } else if (rows <= 2) { \
        y0 = LOAD(w0 + MOEI_LINE); \
        y1 = LOAD(w1 + MOEI_LINE); \
        MOEI_LOADED(y0) \
        MOEI_LOADED(y1) \
        MOEI_DOT_U(set, 4) \
        w0 += MOEI_LINE; \
        w1 += MOEI_LINE; \
        a0 += 4; \
        p++; \
    } \
    w0 += MOEI_LINE; \
    w1 += MOEI_LINE; \
    a0 += 4; \
    a3 += 4;

/* whole: one group; beside: the distance of the second vector's weights, scales and outputs from
   the first's, or 0 for the tile's second panel. */
#define MOEI_DOT_TILE(set, target, INTS, LOAD, SUMS, FLOATS, OP, W_SCALE, beside) \
    target MOEI_INLINE void moei_dot_tile_##set(int q4, int whole, int rows, const moei_quant_tile *t) { \
        const size_t row = t->row_size, groups = whole ? 1 : t->groups; \
        const size_t lines = t->lines, step = t->step; \
        const size_t ld0 = t->ldc[0], ld1 = t->ldc[beside ? 0 : 1]; \
        const unsigned char *a0 = t->a, *a3 = a0 + 3 * row; \
        const unsigned char *w0 = t->w[0], *w1 = beside ? w0 + 4 * beside : t->w[1]; \
        const unsigned char *scale = t->scale, *start = t->start; \
        const unsigned char *w_scale0 = t->w_scale[0]; \
        const unsigned char *w_scale1 = beside ? w_scale0 + beside * (t->half ? 2 : 4) : t->w_scale[1]; \
        float *to0 = t->c[0], *to1 = beside ? to0 + beside : t->c[1]; \
        const SUMS zero = moei_zero_##set(); \
        const FLOATS none = OP(setzero)(); \
        SUMS u00, u01, u10, u11 MOEI_EACH_6(MOEI_DOT_SUMS, set); \
        FLOATS scale0, scale1 MOEI_EACH_6(MOEI_DOT_C, set); \
        INTS x, y0, y1; \
        size_t group, p; \
        const int half = t->half, load = t->load; \
        uintptr_t ahead = t->ahead; \
        for (group = 0; group < groups; group++, scale += 4, start += 4) { \
            MOEI_EACH_6(MOEI_DOT_START, set) \
            u00 = u01 = u10 = u11 = zero; \
            for (p = 0; p < lines; p++) { \
                MOEI_DOT_LINE(set, INTS, LOAD, beside) \
            } \
            if (q4) { \
                a0 += 16; \
                a3 += 16; \
            } \
            if (rows <= 2) { \
                s00 = moei_sum_##set(s00, u00); \
                s01 = moei_sum_##set(s01, u01); \
                s10 = moei_sum_##set(s10, u10); \
                s11 = moei_sum_##set(s11, u11); \
            } \
            if (load && group == 0) { \
                MOEI_EACH_6(MOEI_DOT_LOAD, OP) \
            } \
            scale0 = W_SCALE(half, w_scale0); \
            scale1 = W_SCALE(half, w_scale1); \
            MOEI_EACH_6(MOEI_DOT_FINISH, set) \
            w_scale0 += t->scale_size * MOEI_PANEL; \
            w_scale1 += t->scale_size * MOEI_PANEL; \
        } \
        MOEI_EACH_6(MOEI_DOT_STORE, OP) \
    }

#define MOEI_CASE(set, rows) \
    case rows: \
        if (q4) moei_dot_tile_##set(1, 0, rows, t); \
        else if (t->whole) moei_dot_tile_##set(0, 1, rows, t); \
        else moei_dot_tile_##set(0, 0, rows, t); \
        break;

#define MOEI_DOT_PRODUCT(set, target, wide) \
    target static void moei_quant_rows_##set(int q4, size_t rows, const moei_quant_tile *t) { \
        switch (rows) { \
            MOEI_CASE(set, 1) MOEI_CASE(set, 2) MOEI_CASE(set, 3) MOEI_CASE(set, 4) MOEI_CASE(set, 6) } \
    } \
    MOEI_QUANT_SET(set, wide, 6)

/* The set for vectors of 8, given a target and its name of the instruction. */
#define MOEI_VNNI_256(set, target, DPBUSD) \
    target MOEI_INLINE __m256i moei_splat_##set(const unsigned char *p) { return _mm256_set1_epi32(moei_get_32(p)); } \
    target MOEI_INLINE __m256i moei_low_##set(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); } \
    target MOEI_INLINE __m256i moei_high_##set(__m256i v) { return moei_low_##set(_mm256_srli_epi32(v, 4)); } \
    target MOEI_INLINE moei_int32x8 moei_zero_##set(void) { return MOEI_AS(moei_int32x8, _mm256_setzero_si256()); } \
    target MOEI_INLINE moei_int32x8 moei_start_##set(const unsigned char *p) { \
        return MOEI_AS(moei_int32x8, moei_splat_##set(p)); \
    } \
    target MOEI_INLINE moei_int32x8 moei_dot_##set(moei_int32x8 sum, __m256i w, __m256i x) { \
        return MOEI_AS(moei_int32x8, DPBUSD(MOEI_AS(__m256i, sum), w, x)); \
    } \
    target MOEI_INLINE moei_int32x8 moei_sum_##set(moei_int32x8 a, moei_int32x8 b) { \
        return MOEI_AS(moei_int32x8, _mm256_add_epi32(MOEI_AS(__m256i, a), MOEI_AS(__m256i, b))); \
    } \
    target MOEI_INLINE __m256 moei_finish_##set(__m256 c, moei_int32x8 sum, __m256 w_scale, __m256i scale) { \
        const __m256 product = _mm256_mul_ps(w_scale, _mm256_castsi256_ps(scale)); \
        return _mm256_fmadd_ps(_mm256_cvtepi32_ps(MOEI_AS(__m256i, sum)), product, c); \
    } \
    MOEI_DOT_TILE(set, target, __m256i, MOEI_LOAD_256, moei_int32x8, __m256, MOEI_OP_AVX2, moei_w_scale_avx2, 8) \
    MOEI_DOT_PRODUCT(set, target, 1) \
    static void moei_unpacked_##set(const moei_code_panels *p) { moei_code_tiles(6, moei_quant_rows_##set, p); }

#if defined(__apple_build_version__)
#define MOEI_COMPILER_HAS_VNNI (__clang_major__ >= 13)
#elif defined(__clang__)
#define MOEI_COMPILER_HAS_VNNI (__clang_major__ >= 12)
#elif defined(__GNUC__)
#define MOEI_COMPILER_HAS_VNNI (__GNUC__ >= 11)
#else
#define MOEI_COMPILER_HAS_VNNI (_MSC_VER >= 1930)
#endif

#if MOEI_COMPILER_HAS_VNNI
#if defined(__GNUC__) || defined(__clang__)
#define MOEI_AVXVNNI __attribute__((target("avx2,fma,f16c,avxvnni")))
#define MOEI_VNNI512 __attribute__((target("avx2,fma,f16c,avx512f,avx512vnni")))
#else
#define MOEI_AVXVNNI
#define MOEI_VNNI512
#endif

MOEI_VNNI_256(avxvnni, MOEI_AVXVNNI, _mm256_dpbusd_avx_epi32)
#define moei_quantize_avxvnni moei_quantize_avx2

#ifndef MOE_NO_AVX512
/* Masks of all lanes: without a mask gcc 12 reports an uninitialized operand. */
#define MOEI_ALL_LANES ((__mmask16)0xffff)

MOEI_VNNI512 MOEI_INLINE __m512i moei_splat_vnni512(const unsigned char *p) {
    return _mm512_set1_epi32(moei_get_32(p));
}
MOEI_VNNI512 MOEI_INLINE __m512i moei_low_vnni512(__m512i v) {
    return _mm512_and_si512(v, _mm512_set1_epi32(0x0f0f0f0f));
}
MOEI_VNNI512 MOEI_INLINE __m512i moei_high_vnni512(__m512i v) {
    return moei_low_vnni512(_mm512_maskz_srli_epi32(MOEI_ALL_LANES, v, 4));
}
MOEI_VNNI512 MOEI_INLINE moei_int32x16 moei_zero_vnni512(void) {
    return MOEI_AS(moei_int32x16, _mm512_setzero_si512());
}
MOEI_VNNI512 MOEI_INLINE moei_int32x16 moei_start_vnni512(const unsigned char *p) {
    return MOEI_AS(moei_int32x16, moei_splat_vnni512(p));
}

MOEI_VNNI512 MOEI_INLINE moei_int32x16 moei_dot_vnni512(moei_int32x16 sum, __m512i w, __m512i x) {
    return MOEI_AS(moei_int32x16, _mm512_dpbusd_epi32(MOEI_AS(__m512i, sum), w, x));
}

MOEI_VNNI512 MOEI_INLINE moei_int32x16 moei_sum_vnni512(moei_int32x16 a, moei_int32x16 b) {
    return MOEI_AS(moei_int32x16, _mm512_add_epi32(MOEI_AS(__m512i, a), MOEI_AS(__m512i, b)));
}

MOEI_VNNI512 MOEI_INLINE __m512 moei_w_scale_512(int half, const unsigned char *p) {
    return half ? _mm512_maskz_cvtph_ps(MOEI_ALL_LANES, MOEI_LOAD_256(p)) : _mm512_loadu_ps((const void *)p);
}

MOEI_VNNI512 MOEI_INLINE __m512 moei_finish_vnni512(__m512 c, moei_int32x16 sum, __m512 w_scale, __m512i scale) {
    const __m512 product = _mm512_mul_ps(w_scale, _mm512_castsi512_ps(scale));
    return _mm512_fmadd_ps(_mm512_maskz_cvtepi32_ps(MOEI_ALL_LANES, MOEI_AS(__m512i, sum)), product, c);
}

MOEI_DOT_TILE(vnni512, MOEI_VNNI512, __m512i, MOEI_LOAD_512, moei_int32x16, __m512, MOEI_OP_AVX512, moei_w_scale_512, 0)
MOEI_DOT_PRODUCT(vnni512, MOEI_VNNI512, 2)

/* Pairs of rows of external products: the second row's codes stand for 1/256 of the first's, and
   the sums of both become one integer, which is exact. C stays in registers. */
#define MOEI_EACH_PAIR(X) X(0) X(1) X(2) X(3)
#define MOEI_PAIR_BEGIN(r) \
    __m512 c##r##0 = pairs > r && p->load ? _mm512_loadu_ps(c + 2 * r * p->ldc) : none, \
           c##r##1 = pairs > r && p->load && beside ? _mm512_loadu_ps(c + 2 * r * p->ldc + beside) : none; \
    const unsigned char *h##r = a + (pairs > r ? 2 * r * row : 0), *l##r = h##r + row;
#define MOEI_PAIR_START(r) \
    moei_int32x16 s##r##0, s##r##1, t##r##0, t##r##1; \
    if (pairs > r) { \
        s##r##0 = s##r##1 = moei_start_vnni512(start + 2 * r * row); \
        t##r##0 = t##r##1 = moei_start_vnni512(start + (2 * r + 1) * row); \
    }
#define MOEI_PAIR_DOT(r) \
    if (pairs > r) { \
        x = moei_splat_vnni512(h##r); \
        s##r##0 = moei_dot_vnni512(s##r##0, y0, x); \
        s##r##1 = moei_dot_vnni512(s##r##1, y1, x); \
        x = moei_splat_vnni512(l##r); \
        t##r##0 = moei_dot_vnni512(t##r##0, y0, x); \
        t##r##1 = moei_dot_vnni512(t##r##1, y1, x); \
        h##r += 4; \
        l##r += 4; \
    }
#define MOEI_PAIR_FINISH(r) \
    if (pairs > r) { \
        const __m512 scale = _mm512_castsi512_ps(moei_splat_vnni512(scales + (2 * r + 1) * row)); \
        c##r##0 = _mm512_fmadd_ps(moei_pair_total_vnni512(s##r##0, t##r##0), _mm512_mul_ps(w_scale0, scale), c##r##0); \
        c##r##1 = _mm512_fmadd_ps(moei_pair_total_vnni512(s##r##1, t##r##1), _mm512_mul_ps(w_scale1, scale), c##r##1); \
    }
#define MOEI_PAIR_END(r) \
    if (pairs > r) { \
        _mm512_storeu_ps(c + 2 * r * p->ldc, c##r##0); \
        if (beside) _mm512_storeu_ps(c + 2 * r * p->ldc + beside, c##r##1); \
        if (!p->load) { \
            _mm512_storeu_ps(c + (2 * r + 1) * p->ldc, none); \
            if (beside) _mm512_storeu_ps(c + (2 * r + 1) * p->ldc + beside, none); \
        } \
    }

MOEI_VNNI512 MOEI_INLINE __m512 moei_pair_total_vnni512(moei_int32x16 high, moei_int32x16 low) {
    const __m512i all = _mm512_add_epi32(_mm512_maskz_slli_epi32(MOEI_ALL_LANES, MOEI_AS(__m512i, high), 8),
                                         MOEI_AS(__m512i, low));
    return _mm512_maskz_cvtepi32_ps(MOEI_ALL_LANES, all);
}

/* pairs (1 to 4, a constant after inlining) of rows, from row `first` on, over one or two
   panels. */
MOEI_VNNI512 MOEI_INLINE void moei_pair_tile_vnni512(size_t pairs, const moei_code_panels *p, size_t first) {
    const size_t row = p->row_size, beside = p->panels > 1 ? (size_t)MOEI_PANEL : 0;
    const unsigned char *a = p->rows + first * row, *start = p->starts + first * row;
    const unsigned char *w0 = p->codes[0], *w1 = p->codes[beside > 0];
    const unsigned char *scales = p->scales + first * row;
    const float *w_scales0 = p->weight_scales[0], *w_scales1 = p->weight_scales[beside > 0];
    const __m512 none = _mm512_setzero_ps();
    float *c = p->c + first * p->ldc;
    size_t group, line;
    MOEI_EACH_PAIR(MOEI_PAIR_BEGIN)
    for (group = 0; group < p->groups; group++, start += 4, scales += 4) {
        const __m512 w_scale0 = _mm512_loadu_ps(w_scales0 + group * MOEI_PANEL);
        const __m512 w_scale1 = _mm512_loadu_ps(w_scales1 + group * MOEI_PANEL);
        __m512i x;
        MOEI_EACH_PAIR(MOEI_PAIR_START)
        for (line = 0; line < p->lines; line++, w0 += MOEI_LINE, w1 += MOEI_LINE) {
            const __m512i y0 = MOEI_LOAD_512(w0), y1 = MOEI_LOAD_512(w1);
            MOEI_EACH_PAIR(MOEI_PAIR_DOT)
        }
        MOEI_EACH_PAIR(MOEI_PAIR_FINISH)
    }
    MOEI_EACH_PAIR(MOEI_PAIR_END)
}

MOEI_VNNI512 static void moei_unpacked_vnni512(const moei_code_panels *p) {
    size_t i;
    for (i = 0; i < p->m; i += 8) {
        const size_t left = p->m - i;
        if (left == 2) moei_pair_tile_vnni512(1, p, i);
        else if (left == 4) moei_pair_tile_vnni512(2, p, i);
        else if (left == 6) moei_pair_tile_vnni512(3, p, i);
        else moei_pair_tile_vnni512(4, p, i);
    }
}

#define MOEI_EXTRACT_256(v, half) _mm512_maskz_extracti64x4_epi64((__mmask8)0xff, v, half)

MOEI_VNNI512 MOEI_INLINE moei_bits moei_max_magnitude_vnni512(size_t n, const float *x) {
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    __m512i most = _mm512_setzero_si512();
    size_t i;
    for (i = 0; i < n; i += 16)
        most = _mm512_maskz_max_epi32(MOEI_ALL_LANES, most, _mm512_and_si512(mask, MOEI_LOAD_512(x + i)));
    return moei_lanes_max_int_avx2(_mm256_max_epi32(MOEI_EXTRACT_256(most, 0), MOEI_EXTRACT_256(most, 1)));
}

MOEI_VNNI512 MOEI_INLINE int32_t moei_codes_vnni512(size_t n, const float *x, float factor, signed char *code) {
    const __m512 f = _mm512_set1_ps(factor);
    __m512i sum = _mm512_setzero_si512();
    size_t i;
    for (i = 0; i < n; i += 16) {
        const __m512i whole = _mm512_maskz_cvtps_epi32(MOEI_ALL_LANES, _mm512_mul_ps(f, _mm512_loadu_ps(x + i)));
        sum = _mm512_add_epi32(sum, whole);
        _mm_storeu_si128((__m128i *)(void *)(code + i), _mm512_maskz_cvtsepi32_epi8(MOEI_ALL_LANES, whole));
    }
    return moei_lanes_sum_int_avx2(_mm256_add_epi32(MOEI_EXTRACT_256(sum, 0), MOEI_EXTRACT_256(sum, 1)));
}

MOEI_VNNI512 static void moei_quantize_vnni512(int type, size_t m, size_t inner, const float *x, size_t ldx,
                                               void *rows) {
    moei_quantize(type, m, inner, x, ldx, (unsigned char *)rows, moei_max_magnitude_vnni512, moei_codes_vnni512);
}
#endif
#endif /* MOEI_COMPILER_HAS_VNNI */
#endif /* MOE_NO_QUANT */

/* ---- the tables with AVX2 ---- */

/* Two tables: for memory read in several streams, and in one. */
#define MOEI_X86_SETS(name, id, set, ROW, quant_set, widen) \
    { MOEI_KERNEL_SET(name, id, set, ROW, streams_##set, quant_set, widen), \
      MOEI_KERNEL_SET(name, id, set, ROW, stream_##set, quant_set, widen) }

/* Without F16C, which all known processors with AVX2 have, the last entries are plain C. */
static const moe_kernels moei_kernels_avx2_fma[2] =
    MOEI_X86_SETS("avx2", MOE_KERNELS_AVX2, avx2, MOEI_ROW_AVX2, c, c);
static const moe_kernels moei_kernels_avx2[2] =
    MOEI_X86_SETS("avx2", MOE_KERNELS_AVX2, avx2, MOEI_ROW_AVX2, avx2, avx2);
#ifdef MOEI_HAVE_AVX512
static const moe_kernels moei_kernels_avx512[2] =
    MOEI_X86_SETS("avx512", MOE_KERNELS_AVX512, avx512, MOEI_ROW_AVX512, avx2, avx512);
#endif
#ifdef MOEI_AVXVNNI
static const moe_kernels moei_kernels_avx2_vnni[2] =
    MOEI_X86_SETS("avx2", MOE_KERNELS_AVX2, avx2, MOEI_ROW_AVX2, avxvnni, avx2);
#ifndef MOE_NO_AVX512
static const moe_kernels moei_kernels_avx512_vnni[2] =
    MOEI_X86_SETS("avx512", MOE_KERNELS_AVX512, avx512, MOEI_ROW_AVX512, vnni512, avx512);
#endif
#endif

#endif /* MOEI_HAVE_AVX2 */


/* ==== vectors of four: NEON and WebAssembly SIMD (float) =========================================

   One source for both. The differences between the instruction sets are defined here: moei_v4 is
   four floats, moei_v4_mask the result of a comparison, moei_v4_int four 32-bit integers. As in
   AVX2, vectors run along the columns of C and every lane accumulates over ascending p. With 32
   registers a tile is 6 rows x 16 columns, with 16 it is 2 x 16. */

#ifdef MOEI_HAVE_V4

/* One instruction as a function. */
#define MOEI_V4_ONE(name, op) \
    MOEI_INLINE moei_v4 moei_v4_##name(moei_v4 x) { return op(x); }
#define MOEI_V4_TWO(name, op) \
    MOEI_INLINE moei_v4 moei_v4_##name(moei_v4 a, moei_v4 b) { return op(a, b); }

#if defined(__ARM_NEON)
#define MOEI_V4_NAME "neon"
#define MOEI_V4_ID MOE_KERNELS_NEON
#if defined(__aarch64__) || defined(__ARM_FEATURE_FMA)
#define MOEI_V4_FUSED 1
#else
#define MOEI_V4_FUSED 0
#endif

typedef float32x4_t moei_v4;
typedef uint32x4_t moei_v4_mask;
typedef int32x4_t moei_v4_int;

MOEI_INLINE moei_v4 moei_v4_load(const float *x) {
    return vld1q_f32(x);
}

MOEI_INLINE void moei_v4_store(float *y, moei_v4 v) {
    vst1q_f32(y, v);
}

MOEI_INLINE moei_v4 moei_v4_load_splat(const float *x) { return vld1q_dup_f32(x); }

MOEI_INLINE moei_v4 moei_v4_splat(float x) { return vdupq_n_f32(x); }

MOEI_V4_TWO(add, vaddq_f32)
MOEI_V4_TWO(sub, vsubq_f32)
MOEI_V4_TWO(mul, vmulq_f32)

/* a b + c. */
MOEI_INLINE moei_v4 moei_v4_mul_add(moei_v4 a, moei_v4 b, moei_v4 c) {
#if MOEI_V4_FUSED
    return vfmaq_f32(c, a, b);
#else
    return vaddq_f32(c, vmulq_f32(a, b));
#endif
}

MOEI_V4_ONE(abs, vabsq_f32)
MOEI_V4_TWO(min, vminq_f32)
MOEI_V4_TWO(max, vmaxq_f32)

/* Transposes four steps of p in four rows of b: y[s] holds step s of rows 0 to 3. */
MOEI_INLINE void moei_v4_transpose(const float *b, size_t ldb, moei_v4 y[4]) {
    const float32x4x2_t low = vtrnq_f32(vld1q_f32(b), vld1q_f32(b + ldb));
    const float32x4x2_t high = vtrnq_f32(vld1q_f32(b + 2 * ldb), vld1q_f32(b + 3 * ldb));
    y[0] = vcombine_f32(vget_low_f32(low.val[0]), vget_low_f32(high.val[0]));
    y[1] = vcombine_f32(vget_low_f32(low.val[1]), vget_low_f32(high.val[1]));
    y[2] = vcombine_f32(vget_high_f32(low.val[0]), vget_high_f32(high.val[0]));
    y[3] = vcombine_f32(vget_high_f32(low.val[1]), vget_high_f32(high.val[1]));
}

#if defined(__aarch64__)
MOEI_V4_TWO(div, vdivq_f32)
MOEI_V4_ONE(sqrt, vsqrtq_f32)

/* x <= 0; false for NaN. */
MOEI_INLINE moei_v4_mask moei_v4_not_above_0(moei_v4 x) {
    return vcleq_f32(x, vdupq_n_f32(0.0f));
}

/* Bitwise: yes where mask is set, elsewhere no. */
MOEI_INLINE moei_v4 moei_v4_select(moei_v4_mask mask, moei_v4 yes, moei_v4 no) {
    return vbslq_f32(mask, yes, no);
}

MOEI_INLINE moei_v4_mask moei_v4_sign_bits(void) {
    return vdupq_n_u32(0x80000000u);
}

/* The nearest integer, as a float and as an integer. */
MOEI_INLINE moei_v4 moei_v4_nearest(moei_v4 x, moei_v4_int *whole) {
    *whole = vcvtnq_s32_f32(x);
    return vcvtq_f32_s32(*whole);
}

MOEI_INLINE moei_v4_int moei_v4_int_half(moei_v4_int n) { return vshrq_n_s32(n, 1); }

MOEI_INLINE moei_v4_int moei_v4_int_sub(moei_v4_int a, moei_v4_int b) { return vsubq_s32(a, b); }

/* 2^n for integers n from -126 to 127. */
MOEI_INLINE moei_v4 moei_v4_power2(moei_v4_int n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
#endif

#else /* WebAssembly */
#define MOEI_V4_NAME "wasm"
#define MOEI_V4_ID MOE_KERNELS_WASM
#define MOEI_V4_FUSED 0

typedef v128_t moei_v4;
typedef v128_t moei_v4_mask;
typedef v128_t moei_v4_int;

MOEI_INLINE moei_v4 moei_v4_load(const float *x) {
    return wasm_v128_load(x);
}

MOEI_INLINE void moei_v4_store(float *y, moei_v4 v) {
    wasm_v128_store(y, v);
}

MOEI_INLINE moei_v4 moei_v4_load_splat(const float *x) { return wasm_v128_load32_splat(x); }

MOEI_INLINE moei_v4 moei_v4_splat(float x) { return wasm_f32x4_splat(x); }

MOEI_V4_TWO(add, wasm_f32x4_add)
MOEI_V4_TWO(sub, wasm_f32x4_sub)
MOEI_V4_TWO(mul, wasm_f32x4_mul)

MOEI_INLINE moei_v4 moei_v4_mul_add(moei_v4 a, moei_v4 b, moei_v4 c) {
    return wasm_f32x4_add(c, wasm_f32x4_mul(a, b));
}

MOEI_V4_ONE(abs, wasm_f32x4_abs)
/* these return their first operand when either is NaN */
MOEI_V4_TWO(min, wasm_f32x4_pmin)
MOEI_V4_TWO(max, wasm_f32x4_pmax)
MOEI_V4_TWO(div, wasm_f32x4_div)
MOEI_V4_ONE(sqrt, wasm_f32x4_sqrt)

MOEI_INLINE void moei_v4_transpose(const float *b, size_t ldb, moei_v4 y[4]) {
    const v128_t r0 = wasm_v128_load(b), r1 = wasm_v128_load(b + ldb);
    const v128_t r2 = wasm_v128_load(b + 2 * ldb), r3 = wasm_v128_load(b + 3 * ldb);
    const v128_t t0 = wasm_i32x4_shuffle(r0, r1, 0, 4, 1, 5), t1 = wasm_i32x4_shuffle(r0, r1, 2, 6, 3, 7);
    const v128_t t2 = wasm_i32x4_shuffle(r2, r3, 0, 4, 1, 5), t3 = wasm_i32x4_shuffle(r2, r3, 2, 6, 3, 7);
    y[0] = wasm_i32x4_shuffle(t0, t2, 0, 1, 4, 5);
    y[1] = wasm_i32x4_shuffle(t0, t2, 2, 3, 6, 7);
    y[2] = wasm_i32x4_shuffle(t1, t3, 0, 1, 4, 5);
    y[3] = wasm_i32x4_shuffle(t1, t3, 2, 3, 6, 7);
}

MOEI_INLINE moei_v4_mask moei_v4_not_above_0(moei_v4 x) {
    return wasm_f32x4_le(x, wasm_f32x4_splat(0.0f));
}

MOEI_INLINE moei_v4 moei_v4_select(moei_v4_mask mask, moei_v4 yes, moei_v4 no) {
    return wasm_v128_bitselect(yes, no, mask);
}

MOEI_INLINE moei_v4_mask moei_v4_sign_bits(void) {
    return wasm_f32x4_splat(-0.0f);
}

/* Adding 1.5 * 2^23 leaves a small integer in the low bits; conversions to integers are slow in
   Wasm engines. */
MOEI_INLINE moei_v4 moei_v4_nearest(moei_v4 x, moei_v4_int *whole) {
    const v128_t n = wasm_f32x4_nearest(x), large = wasm_f32x4_splat(12582912.0f);
    *whole = wasm_i32x4_sub(wasm_f32x4_add(n, large), large);
    return n;
}

MOEI_INLINE moei_v4_int moei_v4_int_half(moei_v4_int n) { return wasm_i32x4_shr(n, 1); }

MOEI_INLINE moei_v4_int moei_v4_int_sub(moei_v4_int a, moei_v4_int b) { return wasm_i32x4_sub(a, b); }

MOEI_INLINE moei_v4 moei_v4_power2(moei_v4_int n) {
    return wasm_i32x4_shl(wasm_i32x4_add(n, wasm_i32x4_splat(127)), 23);
}
#endif

#undef MOEI_V4_ONE
#undef MOEI_V4_TWO

/* The larger or smaller of the two; NaN when x is. */
MOEI_INLINE moei_v4 moei_v4_at_least(moei_v4 x, float limit) { return moei_v4_max(x, moei_v4_splat(limit)); }

MOEI_INLINE moei_v4 moei_v4_at_most(moei_v4 x, float limit) { return moei_v4_min(x, moei_v4_splat(limit)); }

/* Rows of a tile of 16 columns, rows of a tile of 8 columns, sums that fit in registers along with
   the operands. */
#if defined(__aarch64__)
enum { MOEI_TILE_V4 = 6, MOEI_TILE_HALF_V4 = 6, MOEI_SUMS_V4 = 24 };
#else
enum { MOEI_TILE_V4 = 2, MOEI_TILE_HALF_V4 = 4, MOEI_SUMS_V4 = 8 };
#endif

enum {
    MOEI_BLOCK_M_V4 = 120,   /* rows multiplied by all panels before the next rows */
    /* elements of the left operand that stay in the second-level cache during all panels */
    MOEI_CACHED_V4 = 32768,
    /* up to this many rows, packing an operand that could be read in place costs more than it
       gains */
    MOEI_UNPACKED_M_V4 = 8
};

/* count numbers, at most four, padded with fill. */
MOEI_INLINE moei_v4 moei_v4_load_part(size_t count, const float *x, float fill) {
    float part[4];
    size_t i;
    if (count >= 4) return moei_v4_load(x);
    for (i = 0; i < 4; i++) part[i] = i < count ? x[i] : fill;
    return moei_v4_load(part);
}

MOEI_INLINE void moei_v4_store_part(size_t count, float *y, moei_v4 v) {
    float part[4];
    size_t i;
    if (count >= 4) {
        moei_v4_store(y, v);
        return;
    }
    moei_v4_store(part, v);
    for (i = 0; i < count; i++) y[i] = part[i];
}

MOEI_INLINE float moei_v4_sum(moei_v4 v) {
    float lane[4];
    moei_v4_store(lane, v);
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

MOEI_INLINE void moei_v4_add_to(float *c, moei_v4 sum, int load) {
    moei_v4_store(c, load ? moei_v4_add(moei_v4_load(c), sum) : sum);
}

/* rows (1 to 6) x 16 columns, or with groups 2 instead of 4 x 8 columns: C = (load ? C : 0) + the
   sum over one block of k. rows and groups are constants after inlining. b is a panel, or the
   operand itself. MOEI_KEEP_ORDER keeps gcc from hoisting loads so far that sums are spilled. */
MOEI_INLINE void moei_tile_v4(int rows, int groups, size_t k, const float *a, size_t ra, size_t ca, const float *b,
                              size_t rb, float *c, size_t ldc, int load) {
    const float *a3 = a + (rows > 3 ? 3 * ra : 0);
    const moei_v4 zero = moei_v4_splat(0.0f);
    size_t p;
#define MOEI_SUMS(row) \
    moei_v4 s##row##0 = zero, s##row##1 = zero; \
    moei_v4 s##row##2 = zero, s##row##3 = zero;
#define MOEI_STEP(row, at) \
    if (rows > row) { \
        const moei_v4 x = moei_v4_load_splat(at); \
        s##row##0 = moei_v4_mul_add(x, y0, s##row##0); \
        s##row##1 = moei_v4_mul_add(x, y1, s##row##1); \
        if (groups > 2) { \
            s##row##2 = moei_v4_mul_add(x, y2, s##row##2); \
            s##row##3 = moei_v4_mul_add(x, y3, s##row##3); \
        } \
    }
#define MOEI_STORE(row) \
    if (rows > row) { \
        moei_v4_add_to(c, s##row##0, load); \
        moei_v4_add_to(c + 4, s##row##1, load); \
        if (groups > 2) { \
            moei_v4_add_to(c + 8, s##row##2, load); \
            moei_v4_add_to(c + 12, s##row##3, load); \
        } \
        c += ldc; \
    }
    MOEI_SUMS(0) MOEI_SUMS(1) MOEI_SUMS(2) MOEI_SUMS(3) MOEI_SUMS(4) MOEI_SUMS(5)
    for (p = 0; p < k; p++, a += ca, a3 += ca, b += rb) {
        const moei_v4 y0 = moei_v4_load(b), y1 = moei_v4_load(b + 4);
        const moei_v4 y2 = groups > 2 ? moei_v4_load(b + 8) : zero, y3 = groups > 2 ? moei_v4_load(b + 12) : zero;
        MOEI_STEP(0, a)
        MOEI_STEP(1, a + ra)
        MOEI_KEEP_ORDER;
        MOEI_STEP(2, a + 2 * ra)
        MOEI_STEP(3, a3)
        MOEI_KEEP_ORDER;
        MOEI_STEP(4, a3 + ra)
        MOEI_STEP(5, a3 + 2 * ra)
    }
    MOEI_STORE(0)
    MOEI_STORE(1)
    MOEI_STORE(2)
    MOEI_STORE(3)
    MOEI_STORE(4)
    MOEI_STORE(5)
#undef MOEI_SUMS
#undef MOEI_STEP
#undef MOEI_STORE
}

/* m rows over one panel of 16 columns, or over 8 columns. */
static void moei_rows_v4(int whole, size_t m, size_t k, const float *a, size_t ra, size_t ca, const float *b, size_t rb,
                         float *c, size_t ldc, int load) {
    const size_t most = whole ? MOEI_TILE_V4 : MOEI_TILE_HALF_V4;
#define MOEI_CASE(rows) \
    case rows: \
        if (whole && rows <= MOEI_TILE_V4) moei_tile_v4(rows, 4, k, a, ra, ca, b, rb, c, ldc, load); \
        else if (rows <= MOEI_TILE_HALF_V4) moei_tile_v4(rows, 2, k, a, ra, ca, b, rb, c, ldc, load); \
        break;
    while (m > 0) {
        const size_t rows = m <= most ? m : m < 2 * most ? (m + 1) / 2 : most;
        switch (rows) {
            MOEI_CASE(1)
            MOEI_CASE(2)
            MOEI_CASE(3)
            MOEI_CASE(4)
            MOEI_CASE(5)
        default:
            MOEI_CASE(6)
        }
        m -= rows;
        a += rows * ra;
        c += rows * ldc;
    }
#undef MOEI_CASE
}

/* Columns that do not fill half a panel are computed in a copy of C as wide as the panel, so that
   no tile accesses memory outside the rows. */
static void moei_edge_v4(size_t columns, size_t m, size_t k, const float *a, size_t ra, size_t ca, const float *panel,
                         float *c, size_t ldc, int load) {
    float part[(int)MOEI_TILE_HALF_V4 * MOEI_PANEL] = {0};
    size_t i, done, rows;
    for (done = 0; done < m; done += rows) {
        rows = moei_smaller(m - done, MOEI_TILE_HALF_V4);
        for (i = 0; load && i < rows; i++) memcpy(part + i * MOEI_PANEL, c + (done + i) * ldc, columns * sizeof(float));
        moei_rows_v4(columns > 8, rows, k, a + done * ra, ra, ca, panel, MOEI_PANEL, part, MOEI_PANEL, load);
        for (i = 0; i < rows; i++) memcpy(c + (done + i) * ldc, part + i * MOEI_PANEL, columns * sizeof(float));
    }
}

/* Few rows over several panels at once: enough sums to hide their latency. rows x panels is 1 x 4,
   1 x 2, 2 x 2 or 3 x 2, constants after inlining; otherwise as the tile above. */
MOEI_INLINE void moei_wide_tile_v4(int rows, int panels, size_t k, const float *a, size_t ra, size_t ca, const float *b,
                                   size_t rb, size_t panel, float *c, size_t ldc, int load) {
    const float *b1 = b + panel, *b2 = panels > 2 ? b1 + panel : b;
    const float *b3 = panels > 2 ? b2 + panel : b;
    const moei_v4 zero = moei_v4_splat(0.0f);
    size_t p;
#define MOEI_SUMS(row, i) \
    moei_v4 s##row##i##0 = zero, s##row##i##1 = zero; \
    moei_v4 s##row##i##2 = zero, s##row##i##3 = zero;
#define MOEI_STEP(row, i, at) \
    s##row##i##0 = moei_v4_mul_add(x##row, moei_v4_load(at), s##row##i##0); \
    s##row##i##1 = moei_v4_mul_add(x##row, moei_v4_load((at) + 4), s##row##i##1); \
    s##row##i##2 = moei_v4_mul_add(x##row, moei_v4_load((at) + 8), s##row##i##2); \
    s##row##i##3 = moei_v4_mul_add(x##row, moei_v4_load((at) + 12), s##row##i##3);
#define MOEI_STORE(row, i) \
    moei_v4_add_to(c + (row) * ldc + (i) * MOEI_PANEL, s##row##i##0, load); \
    moei_v4_add_to(c + (row) * ldc + (i) * MOEI_PANEL + 4, s##row##i##1, load); \
    moei_v4_add_to(c + (row) * ldc + (i) * MOEI_PANEL + 8, s##row##i##2, load); \
    moei_v4_add_to(c + (row) * ldc + (i) * MOEI_PANEL + 12, s##row##i##3, load);
#define MOEI_ALL(X) \
    X(0, 0, b) \
    if (rows > 1) { \
        X(1, 0, b) \
    } \
    if (rows > 2) { \
        X(2, 0, b) \
    } \
    MOEI_KEEP_ORDER; \
    X(0, 1, b1) \
    if (rows > 1) { \
        X(1, 1, b1) \
    } \
    if (rows > 2) { \
        X(2, 1, b1) \
    } \
    if (panels > 2) { \
        X(0, 2, b2) X(0, 3, b3) \
    }
    MOEI_SUMS(0, 0) MOEI_SUMS(0, 1) MOEI_SUMS(0, 2) MOEI_SUMS(0, 3)
    MOEI_SUMS(1, 0) MOEI_SUMS(1, 1) MOEI_SUMS(2, 0) MOEI_SUMS(2, 1)
    for (p = 0; p < k; p++, a += ca, b += rb, b1 += rb, b2 += rb, b3 += rb) {
        const moei_v4 x0 = moei_v4_load_splat(a), x1 = rows > 1 ? moei_v4_load_splat(a + ra) : zero;
        const moei_v4 x2 = rows > 2 ? moei_v4_load_splat(a + 2 * ra) : zero;
        MOEI_ALL(MOEI_STEP)
    }
#define MOEI_STORE_AT(row, i, at) MOEI_STORE(row, i)
    MOEI_ALL(MOEI_STORE_AT)
#undef MOEI_SUMS
#undef MOEI_STEP
#undef MOEI_STORE
#undef MOEI_STORE_AT
#undef MOEI_ALL
}

/* How many of the n columns are computed at once for few rows: 64, 32, or 0 if fewer remain or
   there are more rows. */
static size_t moei_wide_columns_v4(size_t m, size_t n) {
    if (m == 1 && n >= 64 && MOEI_SUMS_V4 >= 16) return 64;
    return m * 8 <= MOEI_SUMS_V4 && n >= 32 ? 32 : 0;
}

/* m rows over the first of n columns, as many as are computed at once; returns how many. b is
   panels, or with rb > 16 the operand itself, of which 8 columns, 16 or more are left. */
static size_t moei_columns_v4(size_t m, size_t n, size_t k, const float *a, size_t ra, size_t ca, const float *b,
                              size_t rb, size_t panel, float *c, size_t ldc, int load, size_t done, size_t chunk) {
    const size_t wide = moei_wide_columns_v4(m, n), columns = wide > 0 ? wide : moei_smaller(n, MOEI_PANEL);
    if (wide > 32) moei_wide_tile_v4(1, 4, k, a, ra, ca, b, rb, panel, c, ldc, load);
    else if (wide > 0 && m == 1) moei_wide_tile_v4(1, 2, k, a, ra, ca, b, rb, panel, c, ldc, load);
#if defined(__aarch64__)
    else if (wide > 0 && m == 2) moei_wide_tile_v4(2, 2, k, a, ra, ca, b, rb, panel, c, ldc, load);
    else if (wide > 0) moei_wide_tile_v4(3, 2, k, a, ra, ca, b, rb, panel, c, ldc, load);
#endif
    else if (columns % 8 == 0) moei_rows_v4(columns > 8, m, k, a, ra, ca, b, rb, c, ldc, load);
    else moei_edge_v4(columns, m, k, a, ra, ca, b, c, ldc, load);
    (void)done;
    (void)chunk;
    return columns;
}

MOEI_PANELS(v4, , MOEI_BLOCK_M_V4, MOEI_CACHED_V4)

/* The panel of rows b[0 .. columns) of an NT operand: panel[p][j] = b[j][p]; missing columns are
   0. */
static void moei_pack_transposed_v4(size_t columns, size_t k, const float *b, size_t ldb, float *panel) {
    size_t j, p, i;
    for (j = 0; j < MOEI_PANEL; j += 4, panel += 4) {
        const size_t there = columns > j ? columns - j : 0;
        const float *bj = b + (there > 0 ? j * ldb : 0);
        p = 0;
        if (there >= 4)
            for (; p + 4 <= k; p += 4) {
                moei_v4 y[4];
                moei_v4_transpose(bj + p, ldb, y);
                moei_v4_store(panel + p * MOEI_PANEL, y[0]);
                moei_v4_store(panel + (p + 1) * MOEI_PANEL, y[1]);
                moei_v4_store(panel + (p + 2) * MOEI_PANEL, y[2]);
                moei_v4_store(panel + (p + 3) * MOEI_PANEL, y[3]);
            }
        for (; p < k; p++)
            for (i = 0; i < 4; i++) panel[p * MOEI_PANEL + i] = i < there ? bj[i * ldb + p] : 0.0f;
    }
}

/* The panel of columns b[.][0 .. columns) of an NN or TN operand. */
static void moei_pack_v4(size_t columns, size_t k, const float *b, size_t ldb, float *panel) {
    size_t p, j;
    for (p = 0; p < k; p++, b += ldb, panel += MOEI_PANEL)
        for (j = 0; j < MOEI_PANEL; j += 4) {
            const size_t there = columns > j ? columns - j : 0;
            moei_v4_store(panel + j, moei_v4_load_part(there, b + (there > 0 ? j : 0), 0.0f));
        }
}

/* One block of k for up to MOEI_BLOCK_M_V4 rows. panel holds 256 x 16 numbers. */
static void moei_block_v4(int op, size_t m, size_t n, size_t k, const float *a, size_t ra, size_t ca, const float *b,
                          size_t ldb, float *c, size_t ldc, int load, float *panel) {
    size_t j = 0, columns;
    if (op != MOE_MATMUL_NT && m <= MOEI_UNPACKED_M_V4)
        while (j + 8 <= n) /* the remaining columns are packed into a panel */
            j += moei_columns_v4(m, n - j < MOEI_PANEL ? 8 : n - j, k, a, ra, ca, b + j, ldb, MOEI_PANEL, c + j, ldc,
                                 load, 0, k);
    for (; j < n; j += columns) {
        columns = moei_smaller(n - j, MOEI_PANEL);
        if (op == MOE_MATMUL_NT) moei_pack_transposed_v4(columns, k, b + j * ldb, ldb, panel);
        else moei_pack_v4(columns, k, b + j, ldb, panel);
        moei_columns_v4(m, columns, k, a, ra, ca, panel, MOEI_PANEL, 0, c + j, ldc, load, 0, k);
    }
}

MOEI_MATMUL(v4, , MOEI_BLOCK_M_V4, 1)

MOEI_MATMUL_ENTRY(nt, v4, MOE_MATMUL_NT)
MOEI_MATMUL_ENTRY(nn, v4, MOE_MATMUL_NN)
MOEI_MATMUL_ENTRY(tn, v4, MOE_MATMUL_TN)

static float moei_dot_v4(size_t n, const float *a, const float *b) {
    moei_v4 s0 = moei_v4_splat(0.0f), s1 = s0;
    moei_v4 s2 = s0, s3 = s0;
    size_t i;
    for (; n >= 16; n -= 16, a += 16, b += 16) {
        s0 = moei_v4_mul_add(moei_v4_load(a), moei_v4_load(b), s0);
        s1 = moei_v4_mul_add(moei_v4_load(a + 4), moei_v4_load(b + 4), s1);
        s2 = moei_v4_mul_add(moei_v4_load(a + 8), moei_v4_load(b + 8), s2);
        s3 = moei_v4_mul_add(moei_v4_load(a + 12), moei_v4_load(b + 12), s3);
    }
    for (i = 0; i < n; i += 4)
        s0 = moei_v4_mul_add(moei_v4_load_part(n - i, a + i, 0.0f), moei_v4_load_part(n - i, b + i, 0.0f), s0);
    return moei_v4_sum(moei_v4_add(moei_v4_add(s0, s1), moei_v4_add(s2, s3)));
}

static void moei_axpy_v4(size_t n, float alpha, const float *x, float *y) {
    const moei_v4 factor = moei_v4_splat(alpha);
    for (; n >= 4; n -= 4, x += 4, y += 4) moei_v4_store(y, moei_v4_mul_add(factor, moei_v4_load(x), moei_v4_load(y)));
    moei_v4_store_part(n, y, moei_v4_mul_add(factor, moei_v4_load_part(n, x, 0.0f), moei_v4_load_part(n, y, 0.0f)));
}
MOEI_AXPY_ROWS(v4)

static void moei_multiply_v4(size_t n, const float *a, const float *b, float *y) {
    for (; n >= 4; n -= 4, a += 4, b += 4, y += 4) moei_v4_store(y, moei_v4_mul(moei_v4_load(a), moei_v4_load(b)));
    moei_v4_store_part(n, y, moei_v4_mul(moei_v4_load_part(n, a, 0.0f), moei_v4_load_part(n, b, 0.0f)));
}

#ifdef MOEI_V4_IEEE

/* ---- exp and functions based on it; the formulas are AVX2's ---- */

/* x = n log 2 + r with |r| <= log(2) / 2. Returns exp(r) - 1. */
MOEI_INLINE moei_v4 moei_exp_reduced_v4(moei_v4 x, moei_v4_int *whole) {
    moei_v4 r, q = moei_v4_splat(1.381432057e-03f);
    const moei_v4 n = moei_v4_nearest(moei_v4_mul(x, moei_v4_splat(1.44269504089f)), whole);
    r = moei_v4_mul_add(n, moei_v4_splat(-0.693145751953125f), x);
    r = moei_v4_mul_add(n, moei_v4_splat(-1.42860682e-06f), r);
    q = moei_v4_mul_add(q, r, moei_v4_splat(8.368851071e-03f));
    q = moei_v4_mul_add(q, r, moei_v4_splat(4.166840108e-02f));
    q = moei_v4_mul_add(q, r, moei_v4_splat(1.666651952e-01f));
    q = moei_v4_mul_add(q, r, moei_v4_splat(4.999999337e-01f));
    return moei_v4_mul_add(moei_v4_mul(r, r), q, r);
}

/* exp(x) for x <= 0 and NaN: 0 below about -104, subnormal results rounded once. */
MOEI_INLINE moei_v4 moei_exp_v4(moei_v4 x) {
    moei_v4_int whole, first;
    const moei_v4 e = moei_exp_reduced_v4(moei_v4_at_least(x, -106.0f), &whole);
    first = moei_v4_int_half(whole);
    return moei_v4_mul(moei_v4_mul(moei_v4_add(e, moei_v4_splat(1.0f)), moei_v4_power2(first)),
                       moei_v4_power2(moei_v4_int_sub(whole, first)));
}

MOEI_INLINE moei_v4 moei_neg_abs_v4(moei_v4 x) { return moei_v4_sub(moei_v4_splat(0.0f), moei_v4_abs(x)); }

/* At 0 both agree within rounding. */
MOEI_INLINE moei_v4 moei_if_negative_v4(moei_v4 x, moei_v4 if_negative, moei_v4 otherwise) {
    return moei_v4_select(moei_v4_not_above_0(x), if_negative, otherwise);
}

/* tanh|x| = -q / (2 + q) with q = exp(-2|x|) - 1 = (exp(r) - 1) 2^n + (2^n - 1); above 10 it is
   1. */
MOEI_INLINE moei_v4 moei_tanh_v4(moei_v4 x) {
    const moei_v4 z = moei_v4_at_least(moei_neg_abs_v4(x), -10.0f);
    moei_v4_int whole;
    const moei_v4 e = moei_exp_reduced_v4(moei_v4_add(z, z), &whole), power = moei_v4_power2(whole);
    const moei_v4 q = moei_v4_mul_add(e, power, moei_v4_sub(power, moei_v4_splat(1.0f)));
    return moei_v4_select(moei_v4_sign_bits(), x, moei_v4_div(q, moei_v4_add(moei_v4_splat(2.0f), q)));
}

/* The rounding error of z z. */
MOEI_INLINE moei_v4 moei_square_error_v4(moei_v4 z, moei_v4 square) {
#if MOEI_V4_FUSED
    return moei_v4_mul_add(z, z, moei_v4_sub(moei_v4_splat(0.0f), square));
#else /* by halves of 12 bits with exact products (Dekker 1971) */
    const moei_v4 c = moei_v4_mul(z, moei_v4_splat(4097.0f)), high = moei_v4_sub(c, moei_v4_sub(c, z));
    const moei_v4 low = moei_v4_sub(z, high);
    const moei_v4 rest = moei_v4_sub(moei_v4_mul(high, high), square), cross = moei_v4_mul(high, low);
    return moei_v4_add(moei_v4_add(rest, moei_v4_add(cross, cross)), moei_v4_mul(low, low));
#endif
}

MOEI_INLINE moei_v4 moei_clamp_1e4_v4(moei_v4 x) { return moei_v4_at_most(moei_v4_at_least(x, -1e4f), 1e4f); }

#define MOEI_OP_V4(op) moei_v4_##op
#define moei_v4_set1 moei_v4_splat
#define moei_v4_fmadd moei_v4_mul_add
#define moei_load_part_v4(count, x) moei_v4_load_part(count, x, 0.0f)
#define moei_store_part_v4 moei_v4_store_part
#define moei_at_least_v4 moei_v4_at_least
MOEI_ACTIVATIONS(v4, , moei_v4, MOEI_OP_V4)
#define MOEI_GATED_CASE_v4(value, ...) MOEI_GATED_CASE(v4, value)
MOEI_GATED_FORWARD(v4, , moei_v4, 4, MOEI_OP_V4)

#ifndef MOE_NO_TRAIN
/* value, but 0 where x <= 0. */
MOEI_INLINE moei_v4 moei_unless_low_v4(moei_v4 x, moei_v4 value) {
    return moei_v4_select(moei_v4_not_above_0(x), moei_v4_splat(0.0f), value);
}

MOEI_SLOPES(v4, , moei_v4, MOEI_OP_V4)
#define MOEI_BACKWARD_CASE_v4(value, ...) MOEI_BACKWARD_CASE(v4, value)
MOEI_GATED_BACKWARD(v4, , moei_v4, 4, MOEI_OP_V4)
MOEI_ADAMW(v4, , moei_v4, 4, MOEI_OP_V4)
#endif

/* Missing lanes hold -inf and add 0. max may drop a NaN; the sum does not. */
static void moei_softmax_v4(size_t n, const float *x, float temperature, float *y) {
    const float low = -MOEI_INFINITY;
    const moei_v4 divisor = moei_v4_splat(temperature);
    moei_v4 shift, max, sums = moei_v4_splat(0.0f);
    float lane[4], sum;
    size_t i;
    if (n == 0) return;
    max = moei_v4_load_part(n, x, low);
    for (i = 4; i < n; i += 4) max = moei_v4_max(max, moei_v4_load_part(n - i, x + i, low));
    moei_v4_store(lane, max);
    shift = moei_v4_splat(moei_softmax_shift(lane[moei_max_index(4, lane)]));
    for (i = 0; i < n; i += 4) {
        const moei_v4 e = moei_exp_v4(moei_v4_div(moei_v4_sub(moei_v4_load_part(n - i, x + i, low), shift), divisor));
        moei_v4_store_part(n - i, y + i, e);
        sums = moei_v4_add(sums, e);
    }
    sum = moei_v4_sum(sums);
    if (sum <= 0) return;
    for (i = 0; i < n; i += 4)
        moei_v4_store_part(n - i, y + i, moei_v4_div(moei_v4_load_part(n - i, y + i, 0.0f), moei_v4_splat(sum)));
}

static float moei_exp_sum_v4(size_t n, float max, float *y) {
    const moei_v4 shift = moei_v4_splat(max);
    moei_v4 sums = moei_v4_splat(0.0f);
    size_t i;
    for (i = 0; i < n; i += 4) {
        const moei_v4 e = moei_exp_v4(moei_v4_sub(moei_v4_load_part(n - i, y + i, -MOEI_INFINITY), shift));
        moei_v4_store_part(n - i, y + i, e);
        sums = moei_v4_add(sums, e);
    }
    return moei_v4_sum(sums);
}

#else /* plain C: vectors would flush subnormal numbers */
#define moei_activate_v4 moei_activate_c
#define moei_activate_backward_v4 moei_activate_backward_c
#define moei_softmax_v4 moei_softmax_c
#define moei_exp_sum_v4 moei_exp_sum_c
#define moei_gated_v4 moei_gated_c
#define moei_gated_backward_v4 moei_gated_backward_c
#define moei_adamw_v4 moei_adamw_c
#endif

/* ---- packed weights in vectors of four ----

   Eight outputs at a time: a line is two vectors of four outputs each. With sdot the four products
   of an output are added to its 32-bit sum directly, else as two pairs, which are added at the end.
   Without i8mm the offset of int8 weights is removed when they are loaded, so sums start from 0. */

#if defined(MOEI_V4_IEEE)

#if defined(__aarch64__)
typedef int8x16_t moei_v16;

MOEI_INLINE moei_v16 moei_v16_load(const unsigned char *p) {
    return vreinterpretq_s8_u8(vld1q_u8(p));
}

/* The low or high four bits of each byte, and a byte w + 128 as w. */
MOEI_INLINE moei_v16 moei_v16_low(moei_v16 v) {
    return vandq_s8(v, vdupq_n_s8(15));
}

MOEI_INLINE moei_v16 moei_v16_high(moei_v16 v) {
    return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(v), 4));
}

MOEI_INLINE moei_v16 moei_v16_signed(moei_v16 v) {
    return veorq_s8(v, vreinterpretq_s8_u8(vdupq_n_u8(128)));
}

MOEI_INLINE moei_v4 moei_v4_as_floats(moei_v16 v) {
    return vreinterpretq_f32_s8(v);
}

MOEI_INLINE moei_v4 moei_v4_from_int(moei_v4_int n) { return vcvtq_f32_s32(n); }

MOEI_INLINE moei_v4_int moei_v4_int_splat(int32_t n) { return vdupq_n_s32(n); }

MOEI_INLINE moei_v4_int moei_v4_int_add(moei_v4_int a, moei_v4_int b) {
    return vaddq_s32(a, b);
}

/* The larger of each lane of most and of the bits of |x|. */
MOEI_INLINE moei_v4_int moei_v4_max_magnitude(moei_v4_int most, moei_v4 x) {
    return vmaxq_s32(most, vreinterpretq_s32_f32(vabsq_f32(x)));
}

MOEI_INLINE void moei_v4_int_store(int32_t *y, moei_v4_int n) {
    vst1q_s32(y, n);
}

/* Sixteen integers from -128 to 127 as bytes. */
MOEI_INLINE void moei_v4_store_bytes(signed char *y, moei_v4_int a, moei_v4_int b, moei_v4_int c, moei_v4_int d) {
    const int16x8_t low = vcombine_s16(vmovn_s32(a), vmovn_s32(b)), high = vcombine_s16(vmovn_s32(c), vmovn_s32(d));
    vst1q_s8(y, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

/* Converts four binary16 numbers, exactly. */
MOEI_INLINE moei_v4 moei_v4_from_f16(const unsigned char *p) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
}

MOEI_INLINE moei_v4 moei_v4_from_bf16(const unsigned char *p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
}

/* The sums of four outputs: low of the first two, in pairs, high of the other two. */
typedef struct moei_pair_sums {
    moei_v4_int low, high;
} moei_pair_sums;

MOEI_INLINE moei_pair_sums moei_dot_pair_sums(moei_pair_sums s, moei_v16 w, moei_v16 x) {
    s.low = vpadalq_s16(s.low, vmull_s8(vget_low_s8(w), vget_low_s8(x)));
    s.high = vpadalq_s16(s.high, vmull_s8(vget_high_s8(w), vget_low_s8(x)));
    return s;
}

MOEI_INLINE moei_v4_int moei_total_pair_sums(moei_pair_sums s) {
    return vpaddq_s32(s.low, s.high);
}

/* Quad i of 16 numbers in all lanes. */
#define MOEI_QUAD(x, i) vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), i))

#else /* WebAssembly */
typedef v128_t moei_v16;

MOEI_INLINE moei_v16 moei_v16_load(const unsigned char *p) {
    return wasm_v128_load(p);
}

MOEI_INLINE moei_v16 moei_v16_low(moei_v16 v) {
    return wasm_v128_and(v, wasm_i8x16_splat(15));
}

MOEI_INLINE moei_v16 moei_v16_high(moei_v16 v) {
    return wasm_v128_and(wasm_u16x8_shr(v, 4), wasm_i8x16_splat(15));
}

MOEI_INLINE moei_v16 moei_v16_signed(moei_v16 v) {
    return wasm_v128_xor(v, wasm_i8x16_splat(-128));
}

MOEI_INLINE moei_v4 moei_v4_as_floats(moei_v16 v) {
    return v;
}

MOEI_INLINE moei_v4 moei_v4_from_int(moei_v4_int n) { return wasm_f32x4_convert_i32x4(n); }

MOEI_INLINE moei_v4_int moei_v4_int_splat(int32_t n) { return wasm_i32x4_splat(n); }

MOEI_INLINE moei_v4_int moei_v4_int_add(moei_v4_int a, moei_v4_int b) {
    return wasm_i32x4_add(a, b);
}

MOEI_INLINE moei_v4_int moei_v4_max_magnitude(moei_v4_int most, moei_v4 x) {
    return wasm_i32x4_max(most, wasm_f32x4_abs(x));
}

MOEI_INLINE void moei_v4_int_store(int32_t *y, moei_v4_int n) {
    wasm_v128_store(y, n);
}

MOEI_INLINE void moei_v4_store_bytes(signed char *y, moei_v4_int a, moei_v4_int b, moei_v4_int c, moei_v4_int d) {
    wasm_v128_store(y, wasm_i8x16_narrow_i16x8(wasm_i16x8_narrow_i32x4(a, b), wasm_i16x8_narrow_i32x4(c, d)));
}

/* Shifted into a float's layout the value is 2^112 times too small, also if subnormal; infinity and
   NaN get their exponent. */
MOEI_INLINE moei_v4 moei_v4_from_f16(const unsigned char *p) {
    const v128_t bits = wasm_i32x4_extend_low_i16x8(wasm_v128_load64_zero(p)),
                 sign = wasm_v128_and(bits, wasm_f32x4_splat(-0.0f));
    const v128_t size = wasm_v128_and(wasm_i32x4_shl(bits, 13), wasm_i32x4_splat(0x0fffe000));
    const v128_t top = wasm_v128_and(wasm_i32x4_gt(size, wasm_i32x4_splat(0x0f7fffff)), wasm_i32x4_splat(0x7f800000));
    const v128_t value = wasm_f32x4_mul(size, wasm_f32x4_splat(5.192296858534828e+33f));
    return wasm_v128_or(value, wasm_v128_or(top, sign));
}

MOEI_INLINE moei_v4 moei_v4_from_bf16(const unsigned char *p) {
    return wasm_i32x4_shl(wasm_u32x4_extend_low_u16x8(wasm_v128_load64_zero(p)), 16);
}

typedef struct moei_pair_sums {
    moei_v4_int low, high;
} moei_pair_sums;

MOEI_INLINE moei_pair_sums moei_dot_pair_sums(moei_pair_sums s, moei_v16 w, moei_v16 x) {
    const v128_t quads = wasm_i16x8_extend_low_i8x16(x);
    s.low = wasm_i32x4_add(s.low, wasm_i32x4_dot_i16x8(wasm_i16x8_extend_low_i8x16(w), quads));
    s.high = wasm_i32x4_add(s.high, wasm_i32x4_dot_i16x8(wasm_i16x8_extend_high_i8x16(w), quads));
    return s;
}

MOEI_INLINE moei_v4_int moei_total_pair_sums(moei_pair_sums s) {
    return wasm_i32x4_add(wasm_i32x4_shuffle(s.low, s.high, 0, 2, 4, 6), wasm_i32x4_shuffle(s.low, s.high, 1, 3, 5, 7));
}

#define MOEI_QUAD(x, i) wasm_i32x4_shuffle(x, x, i, i, i, i)
#endif

#define moei_half_v4 NULL
static void moei_widen_v4(int type, size_t count, const void *packed, float *out) {
    const unsigned char *p = (const unsigned char *)packed;
    size_t i;
    for (i = 0; i < 4 * count; i++, p += 8, out += 4)
        moei_v4_store(out, type == MOE_TYPE_F16 ? moei_v4_from_f16(p) : moei_v4_from_bf16(p));
}

#ifndef MOE_NO_QUANT

MOEI_INLINE moei_pair_sums moei_zero_sums(void) {
    moei_pair_sums s;
    s.low = s.high = moei_v4_int_splat(0);
    return s;
}

MOEI_INLINE moei_v4 moei_w_scale_v4(int half, const unsigned char *p) {
    return half ? moei_v4_from_f16(p) : moei_v4_as_floats(moei_v16_load(p));
}

/* C = (keep ? C : 0) + sum * (w_scale * scale). */
MOEI_INLINE void moei_finish_v4(float *c, moei_v4_int sum, moei_v4 w_scale, const unsigned char *scale, int keep) {
    const moei_v4 product = moei_v4_mul(w_scale, moei_v4_splat(moei_get_float(scale)));
    moei_v4_store(c, moei_v4_mul_add(moei_v4_from_int(sum), product, keep ? moei_v4_load(c) : moei_v4_splat(0.0f)));
}

/* rows (1 to 4) x 8 outputs. rows and q4 are constants after inlining; DOT(sum, w, x, i) adds quad
   i of x times w. The group is processed 16 elements at a time, with four lines; in int4 the next
   16 are in the high bits of the same lines. */
#define MOEI_QUANT_ROWS(X) X(0) X(1) X(2) X(3)
#define MOEI_QUANT_LOAD(r) \
    if (rows > r) { \
        x##r = moei_v16_load(a + r * row); \
        z##r = q4 ? moei_v16_load(a + r * row + 16) : x##r; \
    }
#define MOEI_QUANT_STEP(DOT, r, i) \
    if (rows > r) { \
        s##r##0 = DOT(s##r##0, y0, x##r, i); \
        s##r##1 = DOT(s##r##1, y1, x##r, i); \
        if (q4) { \
            s##r##0 = DOT(s##r##0, h0, z##r, i); \
            s##r##1 = DOT(s##r##1, h1, z##r, i); \
        } \
    }
#define MOEI_QUANT_LINE(DOT, i) \
    { \
        const moei_v16 v0 = moei_v16_load(w + i * MOEI_LINE), v1 = moei_v16_load(w + i * MOEI_LINE + 16); \
        const moei_v16 y0 = q4 ? moei_v16_low(v0) : moei_v16_signed(v0), \
                       y1 = q4 ? moei_v16_low(v1) : moei_v16_signed(v1); \
        const moei_v16 h0 = moei_v16_high(v0), h1 = moei_v16_high(v1); \
        MOEI_QUANT_STEP(DOT, 0, i) MOEI_QUANT_STEP(DOT, 1, i) \
        MOEI_QUANT_STEP(DOT, 2, i) MOEI_QUANT_STEP(DOT, 3, i) \
    }
#define MOEI_QUANT_LINES(DOT) \
    moei_v16 x0 = moei_v16_load(a), x1 = x0; \
    moei_v16 x2 = x0, x3 = x0; \
    moei_v16 z0 = x0, z1 = x0; \
    moei_v16 z2 = x0, z3 = x0; \
    MOEI_QUANT_ROWS(MOEI_QUANT_LOAD) \
    MOEI_QUANT_LINE(DOT, 0) MOEI_QUANT_LINE(DOT, 1) \
    MOEI_QUANT_LINE(DOT, 2) MOEI_QUANT_LINE(DOT, 3)
#define MOEI_QUANT_START(SUMS, ZERO) \
    SUMS s00 = ZERO, s01 = s00; \
    SUMS s10 = s00, s11 = s00; \
    SUMS s20 = s00, s21 = s00; \
    SUMS s30 = s00, s31 = s00;
#define MOEI_QUANT_FINISH(TOTAL, r) \
    if (rows > r) { \
        const moei_v4_int from = moei_v4_int_splat(q4 ? moei_get_32(start + r * row) : 0); \
        moei_finish_v4(c + r * ldc, moei_v4_int_add(TOTAL(s##r##0), from), w_scale0, scale + r * row, keep); \
        moei_finish_v4(c + r * ldc + 4, moei_v4_int_add(TOTAL(s##r##1), from), w_scale1, scale + r * row, keep); \
    }
#define MOEI_QUANT_TILE_V4(set, target, START, LINES, FINISH) \
    MOEI_INLINE target void moei_quant_tile_##set(int q4, int rows, size_t side, const moei_quant_tile *t) { \
        const unsigned char *a = t->a, *w = t->w[0] + 32 * side; \
        const unsigned char *w_scale = t->w_scale[0] + (t->half ? 16 : 32) * side; \
        const unsigned char *start = t->start, *scale = t->scale; \
        const size_t row = t->row_size, ldc = t->ldc[0]; \
        float *c = t->c[0] + 8 * side; \
        size_t group, line; \
        int keep = t->load; \
        for (group = 0; group < t->groups; \
             group++, w_scale += t->scale_size * MOEI_PANEL, start += 4, scale += 4, keep = 1) { \
            const moei_v4 w_scale0 = moei_w_scale_v4(t->half, w_scale); \
            const moei_v4 w_scale1 = moei_w_scale_v4(t->half, w_scale + (t->half ? 8 : 16)); \
            START \
            for (line = 0; line < t->lines; line += 4, a += q4 ? 32 : 16, w += 4 * MOEI_LINE) { \
                LINES \
            } \
            MOEI_QUANT_ROWS(FINISH) \
        } \
    }

#define MOEI_DOT_PAIRS(sum, w, x, i) moei_dot_pair_sums(sum, w, MOEI_QUAD(x, i))
#define MOEI_FINISH_PAIRS(r) MOEI_QUANT_FINISH(moei_total_pair_sums, r)
MOEI_QUANT_TILE_V4(v4, , MOEI_QUANT_START(moei_pair_sums, moei_zero_sums()), MOEI_QUANT_LINES(MOEI_DOT_PAIRS),
                   MOEI_FINISH_PAIRS)
MOEI_SIDE_SET(v4, )

#ifdef MOEI_DOTPROD
#define MOEI_DOT_SDOT(sum, w, x, i) vdotq_laneq_s32(sum, w, x, i)
#define MOEI_FINISH_SDOT(r) MOEI_QUANT_FINISH(, r)
MOEI_QUANT_TILE_V4(v4_dot, MOEI_DOTPROD, MOEI_QUANT_START(int32x4_t, vdupq_n_s32(0)), MOEI_QUANT_LINES(MOEI_DOT_SDOT),
                   MOEI_FINISH_SDOT)
MOEI_SIDE_SET(v4_dot, MOEI_DOTPROD)
#endif

#ifdef MOEI_I8MM
/* Pairs of rows, counted by rows: usmmla adds eight products each of two outputs and two rows. Two
   lines, zipped, have eight elements of an output side by side. */
MOEI_INLINE int32x4_t moei_pair_start(const unsigned char *start, size_t row) {
    const int32x2_t both = vset_lane_s32(moei_get_32(start + row), vdup_n_s32(moei_get_32(start)), 1);
    return vcombine_s32(both, both);
}

#define MOEI_PAIR_START(r) \
    int32x4_t s##r##0 = rows > r ? moei_pair_start(start + 2 * r * row, row) : vdupq_n_s32(0), s##r##1 = s##r##0; \
    int32x4_t s##r##2 = s##r##0, s##r##3 = s##r##0;
#define MOEI_ZIP(n, bits, p, q) \
    vzip##n##q_s##bits(vreinterpretq_s##bits##_s8(moei_v16_load(p)), vreinterpretq_s##bits##_s8(moei_v16_load(q)))
#define MOEI_PAIR_STEP(n, r, at) \
    if (rows > r) { \
        const int8x16_t x = vreinterpretq_s8_s64(MOEI_ZIP(n, 64, a + 2 * r * row + at, a + (2 * r + 1) * row + at)); \
        s##r##0 = vusmmlaq_s32(s##r##0, y0, x); \
        s##r##1 = vusmmlaq_s32(s##r##1, y1, x); \
        s##r##2 = vusmmlaq_s32(s##r##2, y2, x); \
        s##r##3 = vusmmlaq_s32(s##r##3, y3, x); \
    }
#define MOEI_PAIR_STEPS(n, at) \
    MOEI_PAIR_STEP(n, 0, at) MOEI_PAIR_STEP(n, 1, at) MOEI_PAIR_STEP(n, 2, at) MOEI_PAIR_STEP(n, 3, at)
#define MOEI_PAIR_WEIGHTS(i, zip, p) \
    const uint8x16_t v##i = vreinterpretq_u8_s32(MOEI_ZIP(zip, 32, p, p + MOEI_LINE)); \
    uint8x16_t y##i = q4 ? vandq_u8(v##i, vdupq_n_u8(15)) : v##i;
/* Half n of 16 elements. */
#define MOEI_PAIR_LINES(n) \
    { \
        const unsigned char *two = w + (n - 1) * 2 * MOEI_LINE; \
        MOEI_PAIR_WEIGHTS(0, 1, two) MOEI_PAIR_WEIGHTS(1, 2, two) \
        MOEI_PAIR_WEIGHTS(2, 1, two + 16) MOEI_PAIR_WEIGHTS(3, 2, two + 16) \
        MOEI_PAIR_STEPS(n, 0) \
        if (q4) { \
            y0 = vshrq_n_u8(v0, 4); \
            y1 = vshrq_n_u8(v1, 4); \
            y2 = vshrq_n_u8(v2, 4); \
            y3 = vshrq_n_u8(v3, 4); \
            MOEI_PAIR_STEPS(n, 16) \
        } \
    }
#define MOEI_PAIR_ROW(n, i, r) \
    moei_finish_v4(c + i * ldc, vuzp##n##q_s32(s##r##0, s##r##1), w_scale0, scale + i * row, keep); \
    moei_finish_v4(c + i * ldc + 4, vuzp##n##q_s32(s##r##2, s##r##3), w_scale1, scale + i * row, keep);
#define MOEI_PAIR_FINISH(r) \
    if (rows > r) { \
        MOEI_PAIR_ROW(1, 2 * r, r) \
        MOEI_PAIR_ROW(2, (2 * r + 1), r) \
    }
MOEI_QUANT_TILE_V4(v4_mm, MOEI_I8MM, MOEI_QUANT_ROWS(MOEI_PAIR_START), MOEI_PAIR_LINES(1) MOEI_PAIR_LINES(2),
                   MOEI_PAIR_FINISH)

MOEI_I8MM static void moei_quant_rows_v4_mm(int q4, size_t rows, const moei_quant_tile *t) {
    const size_t skip = (rows - 1) * t->row_size;
    moei_quant_tile last;
    size_t side;
    if (rows == 1) {
        moei_quant_rows_v4_dot(q4, 1, t);
        return;
    }
    MOEI_SIDES(v4_mm, rows / 2)
    if (rows % 2 == 0) return;
    last = *t;
    last.a += skip;
    last.start += skip;
    last.scale += skip;
    last.c[0] += (rows - 1) * t->ldc[0];
    moei_quant_rows_v4_dot(q4, 1, &last);
}

static void moei_unpacked_v4_mm(const moei_code_panels *p) { moei_code_tiles(8, moei_quant_rows_v4_mm, p); }

MOEI_QUANT_SET(v4_mm, 1, 8)
#endif

MOEI_INLINE moei_bits moei_max_magnitude_v4(size_t n, const float *x) {
    moei_v4_int most = moei_v4_int_splat(0);
    int32_t lane[4], all = 0;
    size_t i;
    for (i = 0; i < n; i += 4) most = moei_v4_max_magnitude(most, moei_v4_load(x + i));
    moei_v4_int_store(lane, most);
    for (i = 0; i < 4; i++)
        if (lane[i] > all) all = lane[i];
    return (moei_bits)all;
}

MOEI_INLINE int32_t moei_codes_v4(size_t n, const float *x, float factor, signed char *code) {
    const moei_v4 f = moei_v4_splat(factor);
    moei_v4_int sum = moei_v4_int_splat(0), a, b, c, d;
    int32_t lane[4];
    size_t i;
    for (i = 0; i < n; i += 16) {
        (void)moei_v4_nearest(moei_v4_mul(f, moei_v4_load(x + i)), &a);
        (void)moei_v4_nearest(moei_v4_mul(f, moei_v4_load(x + i + 4)), &b);
        (void)moei_v4_nearest(moei_v4_mul(f, moei_v4_load(x + i + 8)), &c);
        (void)moei_v4_nearest(moei_v4_mul(f, moei_v4_load(x + i + 12)), &d);
        sum = moei_v4_int_add(sum, moei_v4_int_add(moei_v4_int_add(a, b), moei_v4_int_add(c, d)));
        moei_v4_store_bytes(code + i, a, b, c, d);
    }
    moei_v4_int_store(lane, sum);
    return lane[0] + lane[1] + lane[2] + lane[3];
}

static void moei_quantize_v4(int type, size_t m, size_t inner, const float *x, size_t ldx, void *rows) {
    moei_quantize(type, m, inner, x, ldx, (unsigned char *)rows, moei_max_magnitude_v4, moei_codes_v4);
}
#define moei_quantize_v4_dot moei_quantize_v4
#define moei_quantize_v4_mm moei_quantize_v4
#endif /* MOE_NO_QUANT */

#endif /* MOEI_V4_IEEE */

/* ---- the tables ---- */

#if defined(MOEI_V4_IEEE)
static const moe_kernels moei_kernels_v4 =
    MOEI_KERNEL_SET(MOEI_V4_NAME, MOEI_V4_ID, v4, MOEI_ROW_V4, v4, v4, v4);
#else
static const moe_kernels moei_kernels_v4 = MOEI_KERNEL_SET(MOEI_V4_NAME, MOEI_V4_ID, v4, MOEI_ROW_V4, v4, c, c);
#endif
#if defined(MOEI_DOTPROD) && !defined(MOE_NO_QUANT)
static const moe_kernels moei_kernels_v4_dot =
    MOEI_KERNEL_SET(MOEI_V4_NAME, MOEI_V4_ID, v4, MOEI_ROW_V4, v4, v4_dot, v4);
#ifdef MOEI_I8MM
static const moe_kernels moei_kernels_v4_mm =
    MOEI_KERNEL_SET(MOEI_V4_NAME, MOEI_V4_ID, v4, MOEI_ROW_V4, v4, v4_mm, v4);
#endif
#endif

#endif /* MOEI_HAVE_V4 */

/* ==== selection of a table ==================================================================== */

#if defined(MOEI_X86_GNU) || defined(MOEI_X86_MSVC)
/* eax, ebx, ecx, edx of one CPUID leaf; zeros if the processor does not have it. */
static void moei_cpuid(unsigned leaf, unsigned subleaf, unsigned r[4]) {
    r[0] = r[1] = r[2] = r[3] = 0;
#if defined(MOEI_X86_GNU)
    if ((unsigned)__get_cpuid_max(0, NULL) >= leaf) __cpuid_count(leaf, subleaf, r[0], r[1], r[2], r[3]);
#else
    {
        int out[4];
        __cpuid(out, 0);
        if ((unsigned)out[0] < leaf) return;
        __cpuidex(out, (int)leaf, (int)subleaf);
        memcpy(r, out, sizeof out);
    }
#endif
}

/* The registers that the operating system saves. Call it only if CPUID reports OSXSAVE. */
static unsigned moei_saved_registers(void) {
#if defined(MOEI_X86_GNU)
    unsigned low, high;
    /* xgetbv as bytes, for old assemblers */
    __asm__ volatile(".byte 0x0f, 0x01, 0xd0" : "=a"(low), "=d"(high) : "c"(0));
    (void)high;
    return low;
#else
    return (unsigned)_xgetbv(0);
#endif
}

unsigned moe_cpu_features(void) {
    unsigned r[4], basic, saved, features = 0;
    moei_cpuid(1, 0, r);
    basic = r[2];
    if ((basic >> 27 & 1) == 0 || (basic >> 28 & 1) == 0) return 0; /* OSXSAVE and AVX */
    saved = moei_saved_registers();
    if ((saved & 0x06) != 0x06) return 0; /* xmm and ymm */
    if (basic >> 12 & 1) features |= MOE_CPU_FMA;
    if (basic >> 29 & 1) features |= MOE_CPU_F16C;
    moei_cpuid(7, 0, r);
    if (r[1] >> 5 & 1) features |= MOE_CPU_AVX2;
    if ((saved & 0xe6) == 0xe6 && (r[1] >> 16 & 1)) { /* masks and zmm as well */
        features |= MOE_CPU_AVX512F;
        if (r[2] >> 11 & 1) features |= MOE_CPU_AVX512VNNI;
    }
    if (r[0] >= 1) { /* leaf 7 has a subleaf 1 */
        moei_cpuid(7, 1, r);
        if (r[0] >> 4 & 1) features |= MOE_CPU_AVXVNNI;
    }
    return features;
}
#else
unsigned moe_cpu_features(void) {
    unsigned features = 0;
#if defined(__ARM_NEON) || defined(_M_ARM64)
    features |= MOE_CPU_NEON;
#endif
#if defined(__ARM_FEATURE_DOTPROD)
    features |= MOE_CPU_DOTPROD;
#elif defined(__aarch64__) && defined(__linux__) && !defined(__TINYC__)
    if (getauxval(16) >> 20 & 1) features |= MOE_CPU_DOTPROD; /* AT_HWCAP, HWCAP_ASIMDDP */
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
    features |= MOE_CPU_I8MM;
#elif defined(__aarch64__) && defined(__linux__) && !defined(__TINYC__)
    if (getauxval(26) >> 13 & 1) features |= MOE_CPU_I8MM; /* AT_HWCAP2, HWCAP2_I8MM */
#endif
#if defined(__wasm_simd128__)
    features |= MOE_CPU_WASM_SIMD;
#endif
    return features;
}
#endif

#ifdef MOEI_HAVE_AVX2
static int moei_has_all(unsigned features, unsigned wanted) { return (features & wanted) == wanted; }

/* Whether it is of AMD's family 19h. Measured: a Zen 4, where it holds; a Zen 5 and a Xeon, not. */
static int moei_reads_one_stream(void) {
    unsigned r[4];
    moei_cpuid(1, 0, r);
    return (r[0] >> 20 & 255) == 10; /* the extended family, 10 with AMD alone */
}

/* The two AVX2 tables for these features, or NULL. */
static const moe_kernels *moei_select_avx2(unsigned features) {
    if (!moei_has_all(features, MOE_CPU_AVX2 | MOE_CPU_FMA)) return NULL;
    if (!moei_has_all(features, MOE_CPU_F16C)) return moei_kernels_avx2_fma;
#ifdef MOEI_AVXVNNI
    if (moei_has_all(features, MOE_CPU_AVXVNNI)) return moei_kernels_avx2_vnni;
#endif
    return moei_kernels_avx2;
}

/* The two AVX-512 tables for these features, or NULL. */
static const moe_kernels *moei_select_avx512(unsigned features) {
#ifdef MOEI_HAVE_AVX512
    const unsigned wanted = MOE_CPU_AVX2 | MOE_CPU_FMA | MOE_CPU_F16C | MOE_CPU_AVX512F;
#ifdef MOEI_VNNI512
    if (moei_has_all(features, wanted | MOE_CPU_AVX512VNNI)) return moei_kernels_avx512_vnni;
#endif
    if (moei_has_all(features, wanted)) return moei_kernels_avx512;
#endif
    (void)features;
    return NULL;
}
#endif

const moe_kernels *moe_kernels_select(int want) {
#ifdef MOEI_HAVE_AVX2
    if (want == MOE_KERNELS_AUTO || want == MOE_KERNELS_AVX2 || want == MOE_KERNELS_AVX512) {
        const unsigned features = moe_cpu_features();
        const moe_kernels *avx512 = want == MOE_KERNELS_AVX2 ? NULL : moei_select_avx512(features);
        const moe_kernels *avx2 = want == MOE_KERNELS_AVX512 ? NULL : moei_select_avx2(features);
        if (avx512 != NULL || avx2 != NULL) return (avx512 != NULL ? avx512 : avx2) + moei_reads_one_stream();
    }
#endif
#ifdef MOEI_HAVE_V4
    if (want == MOE_KERNELS_AUTO || want == MOEI_V4_ID) {
#if defined(MOEI_DOTPROD) && !defined(MOE_NO_QUANT)
        const unsigned features = moe_cpu_features();
#ifdef MOEI_I8MM
        if (features & MOE_CPU_I8MM) return &moei_kernels_v4_mm;
#endif
        if (features & MOE_CPU_DOTPROD) return &moei_kernels_v4_dot;
#endif
        return &moei_kernels_v4;
    }
#endif
    return want == MOE_KERNELS_AUTO || want == MOE_KERNELS_C ? &moei_kernels_c : NULL;
}

static const char *const moei_kernel_names[MOE_KERNELS_COUNT + 1] = {"auto", "c",    "avx2", "avx512",
                                                                     "neon", "wasm", NULL};

const char *moe_kernels_name(int id) {
    return id >= 0 && id < MOE_KERNELS_COUNT ? moei_kernel_names[id] : NULL;
}

/* ==== calls through a table =================================================================== */

static const moe_kernels *moei_table(const moe_kernels *k) {
    return k != NULL ? k : &moei_kernels_c;
}

/* Tables expect valid activations. */
#define MOEI_VALID_ACT(act) ((act) >= 0 && (act) < MOE_ACT_COUNT ? (act) : (int)MOE_ACT_IDENTITY)

/* y_i = a_i b_i; y may be a or b. */
MOEI_TOOL void moei_multiply(const moe_kernels *k, size_t n, const moe_real *a, const moe_real *b, moe_real *y) {
    moei_table(k)->multiply(n, a, b, y);
}

void moe_matmul(const moe_kernels *k, int op, int type, size_t m, size_t n, size_t inner, const moe_real *a, size_t lda,
                const void *b, size_t ldb, moe_real *c, size_t ldc, int accumulate) {
    if (op < 0 || op >= MOE_MATMUL_COUNT || type != MOE_TYPE_REAL) return;
    moei_table(k)->matmul[op][type](m, n, inner, a, lda, b, ldb, c, ldc, accumulate);
}

#ifndef MOE_NO_QUANT
void moe_rows_quantize(const moe_kernels *k, int type, size_t m, size_t inner, const moe_real *x, size_t ldx,
                       void *rows) {
    if (moei_is_quantized(type)) moei_table(k)->quantize(type, m, inner, x, ldx, rows);
}

/* The last outputs, which do not fill a panel, are computed in a copy as wide as a panel. */
void moe_matmul_quantized(const moe_kernels *k, int type, size_t m, size_t n, size_t inner, const void *rows,
                          const void *packed, size_t stride, moe_real *c, size_t ldc) {
    enum { ROWS = 28 };
    const size_t whole = n / MOEI_PANEL, rest = n % MOEI_PANEL;
    const size_t row_size = moe_quantized_row_size(type, inner);
    moe_real part[(int)ROWS * MOEI_PANEL];
    size_t i, j, step;
    moe_quantized_fn *product;
    if (!moei_is_quantized(type) || m == 0 || n == 0 || moe_panel_size(type, inner, &step) != MOE_OK) return;
    if (inner == 0) {
        moei_zero_rows(m, n, c, ldc);
        return;
    }
    step *= stride;
    product = moei_table(k)->quantized[type];
    if (whole > 0) product(m, whole, inner, rows, row_size, packed, step, c, ldc);
    for (i = 0; i < m && rest > 0; i += ROWS) {
        const size_t count = moei_smaller(m - i, ROWS);
        product(count, 1, inner, (const unsigned char *)rows + i * row_size, row_size,
                (const unsigned char *)packed + whole * step, step, part, MOEI_PANEL);
        for (j = 0; j < count; j++)
            memcpy(c + (i + j) * ldc + whole * MOEI_PANEL, part + j * MOEI_PANEL, rest * sizeof *c);
    }
}
#endif

/* Rows of activations for external weights of any type. Each row is two: codes of x, then codes of
   the remainder; together they have 15 bits. Each holds codes, scales and initial sums as a row for
   MOE_TYPE_Q8_BLOCK, then the sums for minima, then the same three for groups of 16. A sum is the
   scale times minus the sum of the codes. */
typedef struct moei_external_row {
    size_t scales[2], starts[2], sums[2], size; /* offsets, for groups of 32 and of 16 */
} moei_external_row;

/* 0: the size overflows. */
static int moei_external_shape_row(size_t inner, moei_external_row *r) {
    const size_t groups = moei_groups(inner);
    size_t i, at = groups * MOEI_GROUP;
    memset(r, 0, sizeof *r);
    /* a row has less than 8 bytes per number */
    if (inner > (size_t)-1 / 32) return 0;
    for (i = 0; i < 2; i++) {
        const size_t all = groups << i;
        r->scales[i] = at;
        r->starts[i] = at + all * sizeof(moe_real);
        r->sums[i] = r->starts[i] + (all + all % 2) * 4;
        at = r->sums[i] + all * sizeof(moe_real);
    }
    r->size = (at / MOEI_LINE | 1) * MOEI_LINE;
    if (r->size < at) r->size += 2 * MOEI_LINE;
    return 1;
}

/* Whether products quantize their activations. */
MOEI_TOOL int moei_external_quantizes(const moe_external *w) {
#ifdef MOE_NO_QUANT
    (void)w;
    return 0;
#else
    return w->type->group > 0 && !w->exact;
#endif
}

/* Bytes of a quantized row; 0: the size overflows. */
MOEI_TOOL size_t moei_external_row_size(size_t inner) {
    moei_external_row r;
    return moei_external_shape_row(inner, &r) ? 2 * r.size : 0;
}

size_t moe_external_work_size(const moe_external *w, size_t m, size_t inner) {
    size_t bytes = moei_external_row_size(inner);
    if (!moei_external_quantizes(w) || bytes == 0 || !moei_mul(bytes, m, &bytes) ||
        !moei_add(bytes, MOEI_LINE - 1, &bytes))
        return 0;
    return bytes;
}

#ifndef MOE_NO_QUANT
enum {
    MOEI_EXTERNAL_PIECE = 512, /* numbers of a row that are quantized or unpacked together */
    MOEI_EXTERNAL_M = 36       /* rows that share unpacked panels */
};

/* Writes the codes of a group of 32, with scales, initial sums and sums. */
static void moei_external_group(const moei_external_row *r, size_t group, const signed char *code, moe_real scale,
                                unsigned char *row) {
    int32_t start[3], first = 0, second = 0;
    size_t i;
    memcpy(row + group * MOEI_GROUP, code, MOEI_GROUP);
    for (i = 0; i < MOEI_GROUP / 2; i++) {
        first += code[i];
        second += code[i + MOEI_GROUP / 2];
    }
    start[0] = -128 * (first + second);
    start[1] = -128 * first;
    start[2] = -128 * second;
    for (i = 0; i < 3; i++) { /* of the 32, and of both halves */
        const size_t which = i > 0, at = i > 0 ? 2 * group + i - 1 : group;
        const moe_real sum = scale * (moe_real)start[i] * MOEI_R(0.0078125);
        memcpy(row + r->scales[which] + at * sizeof scale, &scale, sizeof scale);
        memcpy(row + r->starts[which] + at * 4, &start[i], 4);
        memcpy(row + r->sums[which] + at * sizeof sum, &sum, sizeof sum);
    }
}

/* Quantizes the groups of x [count] from number p of a row on; x is padded with zeros. The second
   row's scales are 1/256 of the first's. */
static void moei_external_quantize_piece(const moe_kernels *k, const moei_external_row *r, size_t p, size_t count,
                                         const moe_real *x, unsigned char *row) {
    enum { GROUPS = (int)MOEI_EXTERNAL_PIECE / MOEI_GROUP };
    unsigned char codes[MOEI_EXTERNAL_PIECE + (int)GROUPS * (4 + sizeof(moe_real)) + 2 * MOEI_LINE];
    const moe_real magic = MOE_REAL_IS_DOUBLE ? MOEI_R(6755399441055744.0) : MOEI_R(12582912.0);
    moei_row_shape shape;
    size_t g, i;
    (void)moei_shape_row(MOE_TYPE_Q8_BLOCK, count, &shape);
    k->quantize(MOE_TYPE_Q8_BLOCK, 1, count, x, count, codes);
    for (g = 0; g < shape.codes / MOEI_GROUP; g++, x += MOEI_GROUP) {
        const signed char *code = (const signed char *)codes + g * MOEI_GROUP;
        const moe_real scale = moei_get_real(codes + shape.scales + g * sizeof scale);
        const moe_real factor = scale > MOEI_R(1e-30) && scale < MOEI_R(1e30) ? 256 / scale : 0;
        signed char rest[MOEI_GROUP];
        for (i = 0; i < MOEI_GROUP && factor > 0; i++) { /* adding a large number rounds to an integer */
            const moe_real large = (x[i] - scale * (moe_real)code[i]) * factor + magic;
            const int whole = (int)(large - magic);
            rest[i] = (signed char)(whole > 127 ? 127 : whole < -127 ? -127 : whole);
        }
        if (!(factor > 0)) memset(rest, 0, sizeof rest);
        moei_external_group(r, p / MOEI_GROUP + g, code, scale, row);
        moei_external_group(r, p / MOEI_GROUP + g, rest, scale / 256, row + r->size);
    }
}

/* Quantizes rows of x; rows are aligned for moe_real. */
MOEI_TOOL void moei_external_quantize(const moe_kernels *k, size_t m, size_t inner, const moe_real *x, size_t ldx,
                                      unsigned char *rows) {
    moe_real piece[MOEI_EXTERNAL_PIECE];
    moei_external_row r;
    size_t p, count;
    if (!moei_external_shape_row(inner, &r)) return;
    for (; m > 0; m--, x += ldx, rows += 2 * r.size)
        for (p = 0; p < inner; p += count) {
            count = moei_smaller(inner - p, MOEI_EXTERNAL_PIECE);
            memset(piece, 0, sizeof piece);
            memcpy(piece, x + p, count * sizeof *x);
            moei_external_quantize_piece(moei_table(k), &r, p, count, piece, rows);
        }
}

/* part[2 m][32] = the products of m rows, each of which is two, with `outputs` rows of W, which
   fill one or two panels. */
static void moei_external_panels(const moe_kernels *k, const moe_external *w, size_t first, size_t m, size_t outputs,
                                 size_t inner, const unsigned char *rows, moe_real *part) {
    enum { CODES = (int)MOEI_EXTERNAL_PIECE * MOEI_PANEL, SCALES = (int)MOEI_EXTERNAL_PIECE / 16 * MOEI_PANEL };
    const size_t panels = outputs > MOEI_PANEL ? 2 : 1, group = (size_t)w->type->group;
    const int half = group == 16;
    unsigned char space[2 * (int)CODES + MOEI_LINE], *codes = space;
    moe_real scales[2 * (int)SCALES], minima[2 * (int)SCALES];
    moei_external_row r;
    moei_code_panels t;
    size_t p, i, length;
    codes += (MOEI_LINE - (uintptr_t)codes % MOEI_LINE) % MOEI_LINE;
    (void)moei_external_shape_row(inner, &r);
    t.m = 2 * m;
    t.panels = panels;
    t.lines = group / 4;
    t.row_size = r.size;
    t.ldc = 2 * MOEI_PANEL;
    t.c = part;
    for (i = 0; i < 2; i++) {
        t.codes[i] = codes + i * CODES;
        t.weight_scales[i] = scales + i * SCALES;
    }
    for (p = 0; p < inner; p += length) {
        length = moei_smaller(inner - p, MOEI_EXTERNAL_PIECE);
        for (i = 0; i < panels; i++) {
            const size_t left = outputs - i * MOEI_PANEL;
            w->type->fill(k, w, first + i * MOEI_PANEL, moei_smaller(left, MOEI_PANEL), p, length,
                          codes + i * CODES, scales + i * SCALES, minima + i * SCALES);
        }
        t.groups = length / group;
        t.rows = rows + p;
        t.scales = rows + r.scales[half] + p / group * sizeof(moe_real);
        t.starts = rows + r.starts[half] + p / group * 4;
        t.load = p > 0;
        k->unpacked(&t);
        if (w->type->minima)
            k->panels(2 * m, panels * MOEI_PANEL, t.groups,
                      (const moe_real *)(const void *)(rows + r.sums[half]) + p / group, r.size / sizeof(moe_real), 1,
                      minima, SCALES, part, 2 * MOEI_PANEL, 1);
    }
}

/* Rows first .. first + n - 1 of W, two panels at a time; one row without panels, if the type
   can. */
MOEI_TOOL void moei_external_product(const moe_kernels *k, const moe_external *w, size_t first, size_t m, size_t n,
                                     size_t inner, const unsigned char *rows, moe_real *c, size_t ldc) {
    enum { WIDE = 2 * MOEI_PANEL };
    const size_t row_size = moei_external_row_size(inner);
    moe_real part[2 * (int)MOEI_EXTERNAL_M * (int)WIDE];
    size_t i, j = 0, p, at, count, outputs;
    if (m == 1 && w->type->direct != NULL) j = w->type->direct(moei_table(k), w, first, n, inner, rows, c);
    for (; j < n; j += outputs) {
        outputs = moei_smaller(n - j, WIDE);
        for (i = 0; i < m; i += count) {
            count = moei_smaller(m - i, MOEI_EXTERNAL_M);
            moei_external_panels(moei_table(k), w, first + j, count, outputs, inner, rows + i * row_size, part);
            for (at = 0; at < count; at++)
                for (p = 0; p < outputs; p++)
                    c[(i + at) * ldc + j + p] = part[2 * at * WIDE + p] + part[(2 * at + 1) * WIDE + p];
        }
    }
}
#endif

enum { MOEI_EXTERNAL_ROWS = MOEI_PANEL, MOEI_EXTERNAL_COLUMNS = 256 };

/* Unpacks a few rows of one block of k at a time. */
static void moei_external_exact(const moe_kernels *k, const moe_external *w, size_t first, size_t m, size_t n,
                                size_t inner, const moe_real *x, size_t ldx, moe_real *c, size_t ldc) {
    moe_real rows[(int)MOEI_EXTERNAL_ROWS * MOEI_EXTERNAL_COLUMNS];
    size_t j, p, i, count, length;
    for (j = 0; j < n; j += count) {
        count = moei_smaller(n - j, MOEI_EXTERNAL_ROWS);
        for (p = 0; p < inner; p += length) {
            length = moei_smaller(inner - p, MOEI_EXTERNAL_COLUMNS);
            for (i = 0; i < count; i++)
                w->type->unpack(k, w, first + j + i, p, length, rows + i * MOEI_EXTERNAL_COLUMNS);
            k->matmul[MOE_MATMUL_NT][MOE_TYPE_REAL](m, count, length, x + p, ldx, rows, MOEI_EXTERNAL_COLUMNS, c + j,
                                                    ldc, p > 0);
        }
    }
}

/* C = x W^T, where rows are those of moei_external_quantize if products with w take such. */
MOEI_TOOL void moei_external_columns(const moe_kernels *k, const moe_external *w, size_t first, size_t m, size_t n,
                                     size_t inner, const moe_real *x, size_t ldx, const unsigned char *rows,
                                     moe_real *c, size_t ldc) {
    if (inner == 0) moei_zero_rows(m, n, c, ldc);
#ifndef MOE_NO_QUANT
    else if (moei_external_quantizes(w)) moei_external_product(k, w, first, m, n, inner, rows, c, ldc);
#endif
    else moei_external_exact(moei_table(k), w, first, m, n, inner, x, ldx, c, ldc);
    (void)rows;
}

/* Adds numbers first .. first + n - 1 of the first row of W to m rows of C. */
MOEI_TOOL void moei_external_add(const moe_kernels *k, const moe_external *w, size_t first, size_t m, size_t n,
                                 moe_real *c, size_t ldc) {
    moe_real part[MOEI_EXTERNAL_COLUMNS];
    size_t p, i, count;
    for (p = 0; p < n; p += count) {
        count = moei_smaller(n - p, MOEI_EXTERNAL_COLUMNS);
        w->type->unpack(moei_table(k), w, 0, first + p, count, part);
        for (i = 0; i < m; i++) moei_table(k)->axpy(count, MOEI_R(1.0), part, c + i * ldc + p);
    }
}

void moe_matmul_external(const moe_kernels *k, const moe_external *w, size_t first, size_t m, size_t n, size_t inner,
                         const moe_real *x, size_t ldx, void *work, moe_real *c, size_t ldc) {
    unsigned char *rows = (unsigned char *)work;
#ifndef MOE_NO_QUANT
    if (moei_external_quantizes(w)) {
        rows += (MOEI_LINE - (uintptr_t)rows % MOEI_LINE) % MOEI_LINE;
        moei_external_quantize(k, m, inner, x, ldx, rows);
    }
#endif
    moei_external_columns(k, w, first, m, n, inner, x, ldx, rows, c, ldc);
}

moe_real moe_dot(const moe_kernels *k, size_t n, const moe_real *a, const moe_real *b) {
    return moei_table(k)->dot(n, a, b);
}

void moe_axpy(const moe_kernels *k, size_t n, moe_real alpha, const moe_real *x, moe_real *y) {
    moei_table(k)->axpy(n, alpha, x, y);
}

void moe_activate(const moe_kernels *k, int act, size_t n, const moe_real *x, moe_real *y) {
    moei_table(k)->activate(MOEI_VALID_ACT(act), n, x, y);
}

void moe_softmax(const moe_kernels *k, size_t n, const moe_real *x, moe_real temperature, moe_real *y) {
    moei_table(k)->softmax(n, x, temperature, y);
}

/* A block of k for 16-bit weights. With a 16-bit size_t the stack cannot hold a whole one: sums
   longer than this are then rounded differently. */
enum { MOEI_HALF_K = SIZE_MAX > 65535 ? (int)MOEI_BLOCK_K : 16, MOEI_HALF_M = 48 };

/* 16-bit weights: for up to MOEI_HALF_M rows in registers; for more, widens two panels of one block
   of k at a time on the stack. */
static void moei_matmul_half(const moe_kernels *k, int type, size_t m, size_t n, size_t inner, const moe_real *a,
                             size_t lda, const unsigned char *packed, moe_real *c, size_t ldc) {
    moe_real memory[2 * MOEI_HALF_K * MOEI_PANEL + 64 / sizeof(moe_real)];
    moe_real *room = memory + (64 - (uintptr_t)memory % 64) % 64 / sizeof(moe_real); /* begins a cache line */
    size_t j, p, half, columns, block;
    if (inner == 0) moei_zero_rows(m, n, c, ldc);
    if (k->half != NULL && m <= MOEI_HALF_M) {
        k->half(type, m, n, inner, a, lda, packed, c, ldc);
        return;
    }
    for (j = 0; j < n; j += columns) {
        columns = n - j < 2 * MOEI_PANEL ? n - j : 2 * (size_t)MOEI_PANEL;
        for (p = 0; p < inner; p += block) {
            block = moei_smaller(inner - p, MOEI_HALF_K);
            for (half = 0; half < columns; half += MOEI_PANEL)
                k->widen(type, block, packed + ((j + half) * inner + p * MOEI_PANEL) * 2, room + half * MOEI_HALF_K);
            k->panels(m, columns, block, a + p, lda, 1, room, (size_t)MOEI_HALF_K * MOEI_PANEL, c + j, ldc, p > 0);
        }
    }
}

void moe_matmul_packed(const moe_kernels *k, int type, size_t m, size_t n, size_t inner, const moe_real *a, size_t lda,
                       const void *packed, moe_real *c, size_t ldc) {
    if (type == MOE_TYPE_REAL)
        moei_table(k)->panels(m, n, inner, a, lda, 1, (const moe_real *)packed, inner * MOEI_PANEL, c, ldc, 0);
    else if (type == MOE_TYPE_F16 || type == MOE_TYPE_BF16)
        moei_matmul_half(moei_table(k), type, m, n, inner, a, lda, (const unsigned char *)packed, c, ldc);
}

/* moe_rms_norm with the kernels of a table. */
static void moei_rms_norm_row(const moe_kernels *k, size_t n, const moe_real *x, const moe_real *gain, moe_real eps,
                              moe_real *y, moe_real *rrms) {
    moe_real scale = 0;
    size_t i;
    if (n > 0) scale = MOEI_R(1.0) / MOEI_F(sqrt)(moe_dot(k, n, x, x) / (moe_real)n + eps);
    for (i = 0; i < n; i++) y[i] = x[i] * scale;
    if (gain != NULL) moei_multiply(k, n, y, gain, y);
    if (rrms != NULL) *rrms = scale;
}

void moe_rms_norm(size_t n, const moe_real *x, const moe_real *gain, moe_real eps, moe_real *y, moe_real *rrms) {
    moei_rms_norm_row(NULL, n, x, gain, eps, y, rrms);
}

#ifndef MOE_NO_TRAIN
/* With h = x rrms and g = dy gain: dx += rrms (g - h mean(g h)), dgain += dy h. */
static void moei_rms_norm_row_backward(const moe_kernels *k, size_t n, const moe_real *x, const moe_real *gain,
                                       moe_real rrms, const moe_real *dy, moe_real *dx, moe_real *dgain) {
    enum { PART = 256 };
    moe_real room[PART], sum = 0;
    size_t from, count;
    for (from = 0; from < n; from += count) {
        const moe_real *g = dy + from;
        count = moei_smaller(n - from, PART);
        if (gain != NULL) {
            moei_multiply(k, count, g, gain + from, room);
            g = room;
        }
        if (dx != NULL) {
            sum += rrms * moe_dot(k, count, g, x + from);
            moe_axpy(k, count, rrms, g, dx + from);
        }
        if (dgain == NULL) continue;
        moei_multiply(k, count, dy + from, x + from, room);
        moe_axpy(k, count, rrms, room, dgain + from);
    }
    if (dx != NULL && n > 0) moe_axpy(k, n, -(rrms * rrms) * (sum / (moe_real)n), x, dx);
}

void moe_rms_norm_backward(size_t n, const moe_real *x, const moe_real *gain, moe_real rrms, const moe_real *dy,
                           moe_real *dx, moe_real *dgain) {
    moei_rms_norm_row_backward(NULL, n, x, gain, rrms, dy, dx, dgain);
}
#endif

void moe_gated(const moe_kernels *k, int act, size_t m, size_t n, const moe_real *x, size_t ldx, const moe_real *times,
               size_t ldt, moe_real *y, size_t ldy) {
    moei_table(k)->gated(MOEI_VALID_ACT(act), m, n, x, ldx, times, ldt, y, ldy);
}

#ifndef MOE_NO_TRAIN
void moe_gated_backward(const moe_kernels *k, int act, size_t n, const moe_real *x, const moe_real *times,
                        const moe_real *dy, moe_real *dx, moe_real *d_times) {
    moei_table(k)->gated_backward(MOEI_VALID_ACT(act), n, x, times, dy, dx, d_times);
}

void moe_adamw(const moe_kernels *k, const moe_adamw_step *step, size_t n, const moe_real *gradient, moe_real *m,
               moe_real *v, moe_real *w) {
    moei_table(k)->adamw(step, n, gradient, m, v, w);
}
#endif

/* y_j = sum over i of |x_ij - mean_j| / count, or with squared = 1 of (x_ij - mean_j)^2 / count;
   row i of x[.,n] starts at x + rows[i] * ldx, 0 <= i < count, count > 0. y may be mean. */
MOEI_TOOL void moei_dispersion(const moe_kernels *k, int squared, size_t count, const int32_t *rows, size_t n,
                               const moe_real *x, size_t ldx, const moe_real *mean, moe_real *y) {
    moei_table(k)->dispersion(squared, count, rows, n, x, ldx, mean, y);
}

/* The steps of a softmax over values that are not in one array:
   y_i = scale (y_i - shift_i) + ln prior_i, or -inf unless prior_i > 0 (also if NaN).
   scale > 0; shift and prior [n], or NULL for 0 and 1. Returns the largest y_i, -inf for n = 0; a
   NaN is skipped and shows in moei_exp_sum. */
MOEI_TOOL moe_real moei_log_posterior(const moe_kernels *k, size_t n, moe_real scale, const moe_real *shift,
                                      const moe_real *prior, moe_real *y) {
    return moei_table(k)->log_posterior(n, scale, shift, prior, y);
}

/* y_i = exp(y_i - max), max at least every y_i and above -inf; returns their sum. -inf gives
   exactly 0; a NaN is kept and shows in the sum; results below the smallest normal number may be
   0. */
MOEI_TOOL moe_real moei_exp_sum(const moe_kernels *k, size_t n, moe_real max, moe_real *y) {
    return moei_table(k)->exp_sum(n, max, y);
}

/* -sum_i p_i ln p_i over the p_i above 0; NaN is skipped, +inf gives -inf. */
MOEI_TOOL moe_real moei_row_entropy(const moe_kernels *k, size_t n, const moe_real *p) {
    return moei_table(k)->entropy(n, p);
}

#ifndef MOE_NO_TRAIN
void moe_activate_backward(const moe_kernels *k, int act, size_t n, const moe_real *x, const moe_real *dy,
                           moe_real *dx) {
    moei_table(k)->activate_backward(MOEI_VALID_ACT(act), n, x, dy, dx);
}
#endif

/* ==== packing many matrices into one memory =================================================== */

#ifdef MOE_NO_QUANT
#define MOEI_ROW_SIZE(type, inner) ((size_t)0)
#else
#define MOEI_ROW_SIZE(type, inner) moe_quantized_row_size(type, inner)
#endif

MOEI_TOOL size_t moei_panels(size_t n) { return n / MOEI_PANEL + (n % MOEI_PANEL > 0); }

enum { MOEI_PACK_ALIGN = 64 };

/* Matrices that are packed one after the other. */
typedef struct moei_packing {
    const moe_kernels *k;
    int type, writes;  /* writes 0: only addresses are set */
    unsigned char *at; /* NULL: bytes are counted */
    size_t used;
    moe_error *error;
} moei_packing;

/* memory NULL: counts. */
MOEI_TOOL moei_packing moei_packing_begin(const moe_kernels *k, int type, int writes, void *memory, moe_error *error) {
    moei_packing p;
    p.k = k;
    p.type = type;
    p.writes = writes;
    p.at = (unsigned char *)memory;
    if (memory != NULL) p.at += (MOEI_PACK_ALIGN - (uintptr_t)p.at % MOEI_PACK_ALIGN) % MOEI_PACK_ALIGN;
    p.used = memory != NULL ? 0 : MOEI_PACK_ALIGN - 1;
    p.error = error;
    return p;
}

/* Packs blocks of [n,k], and sets *packed. */
MOEI_TOOL moe_status moei_pack_matrix(moei_packing *p, const char *name, size_t blocks, size_t n, size_t k,
                                   const moe_real *w, const void **packed) {
    size_t panel, block = 0, all = 0, e;
    moe_status status = moe_panel_size(p->type, k, &panel);
    const int missing = w == NULL && p->at != NULL;
    if (status == MOE_OK && (!moei_mul(panel, moei_panels(n), &block) || !moei_mul(block, blocks, &all) ||
                             !moei_add(p->used, all, &all)))
        status = MOE_ERR_OVERFLOW;
    if (missing) status = MOE_ERR_ARGUMENT;
    for (e = 0; e < blocks && status == MOE_OK && p->at != NULL && p->writes; e++)
        status = moe_pack(p->k, p->type, n, k, w + e * n * k, k, p->at + p->used + e * block, 1);
    if (status != MOE_OK)
        return moei_error(p->error, status, missing ? "%s is not set" : "%s cannot be packed as type = %d: %s", name,
                          p->type, moe_status_text(status));
    *packed = p->at != NULL ? p->at + p->used : NULL;
    p->used = all;
    return MOE_OK;
}

/* Whether packed weights, used bytes from the first of them on, overlap the memory. */
MOEI_TOOL int moei_overlaps(const void *const packed[], int count, size_t used, const void *memory, size_t size) {
    int i = 0;
    while (i < count && packed[i] == NULL) i++;
    return i < count && ((uintptr_t)packed[i] - (uintptr_t)memory < size ||
                         (uintptr_t)memory - (uintptr_t)packed[i] < used);
}

/* Adds |y - exact|^2 and |exact|^2 to sums. */
MOEI_TOOL void moei_add_error(size_t n, const moe_real *exact, const moe_real *y, double sums[2]) {
    size_t i;
    for (i = 0; i < n; i++) {
        const double is = (double)exact[i], other = (double)y[i] - is;
        sums[0] += other * other;
        sums[1] += is * is;
    }
}

/* |y - exact| / |exact|; 0 where exact is 0. NaN stays. */
MOEI_TOOL moe_real moei_error_of(const double sums[2]) {
    return sums[1] <= 0.0 ? 0 : (moe_real)MOEI_D(sqrt)(sums[0] / sums[1]);
}

/* ==== text, bytes and checksums of files ====================================================== */

MOEI_TOOL int moei_hex_digit(int c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* u and four hexadecimal digits. */
MOEI_TOOL int moei_hex4(const unsigned char **at, const unsigned char *end, uint32_t *value) {
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

/* The bytes of an escape whose backslash is just before *at, into out[4]; their number, or 0 if it
   is malformed. U+0000 is malformed, as strings end there; so is half a surrogate pair. */
MOEI_TOOL int moei_unescape(const unsigned char **at, const unsigned char *end, unsigned char *out) {
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
        out[0] = (unsigned char)(0xC0u | code >> 6);
        out[1] = (unsigned char)(0x80u | (code & 63u));
        return 2;
    }
    if (code < 0x10000u) {
        out[0] = (unsigned char)(0xE0u | code >> 12);
        out[1] = (unsigned char)(0x80u | (code >> 6 & 63u));
        out[2] = (unsigned char)(0x80u | (code & 63u));
        return 3;
    }
    out[0] = (unsigned char)(0xF0u | code >> 18);
    out[1] = (unsigned char)(0x80u | (code >> 12 & 63u));
    out[2] = (unsigned char)(0x80u | (code >> 6 & 63u));
    out[3] = (unsigned char)(0x80u | (code & 63u));
    return 4;
}

/* The character at *text, which advances past it; 0 for invalid UTF-8: a stray or missing
   continuation, an overlong form, a surrogate, a value above U+10FFFF. *text then advances by a
   byte. end, beyond *text, may be NULL if the text is terminated. */
MOEI_TOOL int moei_next_utf8(const char **text, const char *end, uint32_t *code) {
    const unsigned char *p = (const unsigned char *)*text, *last = (const unsigned char *)end;
    uint32_t c = *p++, least = 0;
    int more = c < 0x80u                 ? 0
               : c >= 0xC0u && c < 0xE0u ? 1
               : c >= 0xE0u && c < 0xF0u ? 2
               : c >= 0xF0u && c < 0xF8u ? 3
                                         : -1,
        left = more;
    ++*text;
    if (more < 0) return 0;
    if (more > 0) {
        c &= 63u >> more;
        least = more == 1 ? 0x80u : more == 2 ? 0x800u : 0x10000u;
    }
    for (; left > 0; left--, c = c << 6 | (*p++ & 63u))
        if ((end != NULL && p >= last) || (*p & 0xC0u) != 0x80u) return 0;
    if (c < least || c > 0x10FFFFu || (c >= 0xD800u && c <= 0xDFFFu)) return 0;
    *text = (const char *)p;
    *code = c;
    return 1;
}

MOEI_TOOL uint64_t moei_load(const unsigned char *p, int bytes) {
    uint64_t v = 0;
    int i;
    for (i = 0; i < bytes; i++) v |= (uint64_t)p[i] << 8 * i;
    return v;
}

/* Two's complement of the given number of bytes, without implementation-defined conversions. */
MOEI_TOOL int64_t moei_load_signed(const unsigned char *p, int bytes) {
    uint64_t v = moei_load(p, bytes), sign = (uint64_t)1 << (8 * bytes - 1);
    return (v & sign) == 0 ? (int64_t)v : -(int64_t)(sign - 1 - (v & (sign - 1))) - 1;
}

/* The nearest moe_real. C leaves a double beyond the range of float undefined: it becomes
   infinite here, as in IEEE 754. */
MOEI_TOOL moe_real moei_real_of_bits(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
#if !MOE_REAL_IS_DOUBLE
    {
        uint64_t size = bits & UINT64_C(0x7fffffffffffffff), infinite = UINT64_C(0x7ff0000000000000);
        /* from the largest float on */
        if (size >= UINT64_C(0x47efffffe0000000) && size < infinite) {
            int round_up = size >= UINT64_C(0x47effffff0000000);
            return moei_binary32((uint32_t)(bits >> 63) << 31 | (round_up ? 0x7f800000u : 0x7f7fffffu));
        }
    }
#endif
    return (moe_real)x;
}

/* The CRC-32 of zlib. */
typedef struct moei_crc {
    uint32_t table[4][256], sum;
} moei_crc;

MOEI_TOOL void moei_crc_begin(moei_crc *c) {
    uint32_t i;
    int k;
    for (i = 0; i < 256; i++)
        for (c->table[0][i] = i, k = 0; k < 8; k++)
            c->table[0][i] = c->table[0][i] >> 1 ^ (UINT32_C(0xedb88320) & (0u - (c->table[0][i] & 1u)));
    for (i = 0; i < 256; i++)
        for (k = 1; k < 4; k++) c->table[k][i] = c->table[k - 1][i] >> 8 ^ c->table[0][c->table[k - 1][i] & 255u];
    c->sum = UINT32_C(0xffffffff);
}

MOEI_TOOL void moei_crc_add(moei_crc *c, const unsigned char *p, size_t n) {
    uint32_t x = c->sum;
    for (; n >= 4; p += 4, n -= 4) {
        x ^= (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        x = c->table[3][x & 255u] ^ c->table[2][x >> 8 & 255u] ^ c->table[1][x >> 16 & 255u] ^ c->table[0][x >> 24];
    }
    for (; n > 0; p++, n--) x = c->table[0][(x ^ *p) & 255u] ^ x >> 8;
    c->sum = x;
}

/* a b modulo the polynomial of the sum; bit 31 is the power 0. */
MOEI_TOOL uint32_t moei_crc_times(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    int i;
    for (i = 31; i >= 0; i--) {
        product ^= b & (0u - (a >> i & 1u));
        b = b >> 1 ^ (UINT32_C(0xedb88320) & (0u - (b & 1u)));
    }
    return product;
}

/* A sum after n more bytes that are 0. Sums are linear: that of a whole is the sum (by ^) of those
   of its parts, each with zeros in place of what follows. */
MOEI_TOOL uint32_t moei_crc_zeros(uint32_t sum, uint64_t n) {
    uint32_t power = UINT32_C(1) << 23; /* the 8th: one byte */
    for (; n > 0; n >>= 1) {
        if ((n & 1u) != 0) sum = moei_crc_times(sum, power);
        power = moei_crc_times(power, power);
    }
    return sum;
}

/* ---- JSON: of safetensors headers and of configurations ----
   Nothing relies on bytes that were checked before being unchanged: every step is bounded by the
   end it is given. */

/* Two pointers, always compared by <, and no length, so an analyzer that knows only the range of
   each variable can prove that reads stay inside (tests/quality/eva.c). */
typedef struct moei_span {
    const unsigned char *p, *end; /* inside the quotes, escapes not decoded */
} moei_span;

MOEI_TOOL moei_span moei_span_of(const char *p, size_t n) {
    moei_span s;
    s.p = (const unsigned char *)p;
    s.end = s.p + n;
    return s;
}

MOEI_TOOL size_t moei_span_length(moei_span s) { return (size_t)(s.end - s.p); }

typedef struct moei_json {
    const unsigned char *bytes;
    size_t at, end;
    moei_span name; /* the tensor being read, for messages; p NULL: none */
    moe_error *error;
    int any_dtype; /* 1: one that is unknown reads as MOE_DTYPE_COUNT */
    int of_python; /* 1: NaN, Infinity and -Infinity are values too */
} moei_json;

/* A copy of a span that is safe to print: ASCII, terminated, truncated with dots. Returns out. */
MOEI_TOOL const char *moei_span_text(moei_span s, char out[52]) {
    size_t i;
    for (i = 0; s.p < s.end && i < 48; i++, s.p++) out[i] = (char)(*s.p >= 0x20 && *s.p < 0x7f ? *s.p : '?');
    if (s.p < s.end) out[45] = out[46] = out[47] = '.';
    out[i] = '\0';
    return out;
}

/* Fills error with "tensor 'name', byte at: " and the rest; returns code. */
MOEI_TOOL moe_status moei_json_refuse(moei_json *j, size_t at, moe_status code, const char *format, ...) {
    char shown[52];
    va_list arguments;
    if (j->error == NULL) return code;
    (void)moei_error(j->error, code, j->name.p != NULL ? "tensor '%s', byte %z: " : "%sbyte %z: ",
                     j->name.p != NULL ? moei_span_text(j->name, shown) : "", at);
    va_start(arguments, format);
    moei_error_append(j->error, format, arguments);
    va_end(arguments);
    return code;
}

/* The next byte that is not white space, without consuming it; -1 at the end. */
MOEI_TOOL int moei_json_peek(moei_json *j) {
    while (j->at < j->end) {
        int c = j->bytes[j->at];
        if (c != ' ' && c != '\n' && c != '\r' && c != '\t') return c;
        j->at++;
    }
    return -1;
}

MOEI_TOOL moe_status moei_json_take(moei_json *j, char wanted) {
    char text[2];
    int c = moei_json_peek(j);
    if (c == (unsigned char)wanted) {
        j->at++;
        return MOE_OK;
    }
    text[0] = wanted;
    text[1] = '\0';
    return moei_json_refuse(j, j->at, MOE_ERR_FORMAT, c < 0 ? "the header ends where %s is expected" : "%s is expected",
                            text);
}

/* The unescaped bytes of a string, one after another. */
typedef struct moei_chars {
    const unsigned char *p, *end;
    unsigned char out[4];
    int used, have;
} moei_chars;

MOEI_TOOL moei_chars moei_chars_of(moei_span s) {
    moei_chars c;
    memset(&c, 0, sizeof c);
    c.p = s.p;
    c.end = s.end;
    return c;
}

MOEI_TOOL int moei_chars_next(moei_chars *c) {
    if (c->used < c->have) return c->out[c->used++];
    if (c->p >= c->end) return -1;
    if (*c->p != '\\') return *c->p++;
    c->p++;
    c->have = moei_unescape(&c->p, c->end, c->out);
    c->used = 1;
    return c->have > 0 ? c->out[0] : -1;
}

MOEI_TOOL int moei_span_is(moei_span s, const char *text) {
    moei_chars c = moei_chars_of(s);
    int x;
    while ((x = moei_chars_next(&c)) >= 0 && *text != '\0' && x == (unsigned char)*text) text++;
    return x < 0 && *text == '\0';
}

MOEI_TOOL int moei_span_same(moei_span s, moei_span t) {
    moei_chars a = moei_chars_of(s), b = moei_chars_of(t);
    int x, y;
    do {
        x = moei_chars_next(&a);
        y = moei_chars_next(&b);
    } while (x == y && x >= 0);
    return x == y;
}

MOEI_TOOL moe_status moei_json_string(moei_json *j, moei_span *s) {
    const unsigned char *p, *end = j->bytes + j->end;
    unsigned char out[4];
    uint32_t code;
    moe_status status = moei_json_take(j, '"');
    if (status != MOE_OK) return status;
    for (p = s->p = j->bytes + j->at; p < end && *p != '"';) {
        const char *text = (const char *)p;
        size_t at = (size_t)(p - j->bytes);
        if (*p < 0x20) return moei_json_refuse(j, at, MOE_ERR_FORMAT, "control character %d in a string", (int)*p);
        if (!moei_next_utf8(&text, (const char *)end, &code))
            return moei_json_refuse(j, at, MOE_ERR_FORMAT, "a string is not UTF-8");
        p = (const unsigned char *)text;
        if (code == '\\' && !moei_unescape(&p, end, out))
            return moei_json_refuse(j, at, MOE_ERR_FORMAT, "malformed escape in a string");
    }
    if (p >= end) return moei_json_refuse(j, j->at, MOE_ERR_FORMAT, "the string does not end");
    s->end = p;
    j->at = (size_t)(p - j->bytes) + 1;
    return MOE_OK;
}

/* Consumes the next key of an object and its colon; *more = 0: the end of the object instead, the
   key is empty. */
MOEI_TOOL moe_status moei_json_key(moei_json *j, int first, moei_span *key, int *more) {
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

MOEI_TOOL moe_status moei_json_size(moei_json *j, size_t *value) {
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
MOEI_TOOL moe_status moei_json_sizes(moei_json *j, size_t *values, int max, int *count) {
    moe_status status = moei_json_take(j, '[');
    *count = 0;
    if (status == MOE_OK && moei_json_peek(j) == ']') {
        j->at++;
        return MOE_OK;
    }
    for (; status == MOE_OK; status = moei_json_take(j, ',')) {
        if (*count == max)
            return moei_json_refuse(j, j->at, MOE_ERR_UNSUPPORTED, "the array has more than %d numbers", max);
        if ((status = moei_json_size(j, &values[*count])) != MOE_OK) return status;
        (*count)++;
        if (moei_json_peek(j) == ']') {
            j->at++;
            return MOE_OK;
        }
    }
    return status;
}

enum { MOEI_CONFIG_DEPTH = 16 };

MOEI_TOOL int moei_digits(const unsigned char *p, size_t n, size_t *at) {
    size_t from = *at;
    while (*at < n && p[*at] >= '0' && p[*at] <= '9') ++*at;
    return *at > from;
}

/* -?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)? */
MOEI_TOOL int moei_is_json_number(moei_span s) {
    const size_t n = moei_span_length(s);
    size_t i = 0, whole;
    if (i < n && s.p[i] == '-') i++;
    whole = i;
    if (!moei_digits(s.p, n, &i) || (s.p[whole] == '0' && i > whole + 1)) return 0;
    if (i < n && s.p[i] == '.') {
        i++;
        if (!moei_digits(s.p, n, &i)) return 0;
    }
    if (i < n && (s.p[i] == 'e' || s.p[i] == 'E')) {
        i++;
        if (i < n && (s.p[i] == '+' || s.p[i] == '-')) i++;
        if (!moei_digits(s.p, n, &i)) return 0;
    }
    return i == n;
}

/* The characters up to the next that cannot belong to a number or a word. */
MOEI_TOOL moei_span moei_config_word(moei_json *j) {
    moei_span s;
    (void)moei_json_peek(j);
    s.p = j->bytes + j->at;
    while (j->at < j->end) {
        int c = j->bytes[j->at];
        if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' || c == '+' ||
              c == '-'))
            break;
        j->at++;
    }
    s.end = j->bytes + j->at;
    return s;
}

MOEI_TOOL int moei_is_json_word(const moei_json *j, moei_span s) {
    return moei_is_json_number(s) || moei_span_is(s, "true") || moei_span_is(s, "false") || moei_span_is(s, "null") ||
           (j->of_python && (moei_span_is(s, "NaN") || moei_span_is(s, "Infinity") || moei_span_is(s, "-Infinity")));
}

/* Skips a value of any kind. */
MOEI_TOOL moe_status moei_config_skip(moei_json *j) {
    char open[MOEI_CONFIG_DEPTH];
    moei_span s;
    int depth = 0;
    for (;;) {
        int c = moei_json_peek(j), entered = c == '{' || c == '[';
        moe_status status = MOE_OK;
        if (entered) {
            if (depth == MOEI_CONFIG_DEPTH)
                return moei_json_refuse(j, j->at, MOE_ERR_UNSUPPORTED, "more than %d levels of nesting",
                                        (int)MOEI_CONFIG_DEPTH);
            open[depth++] = (char)(c == '{' ? '}' : ']');
            j->at++;
        } else if (c == '"') {
            status = moei_json_string(j, &s);
        } else {
            s = moei_config_word(j);
            if (!moei_is_json_word(j, s))
                return moei_json_refuse(j, (size_t)(s.p - j->bytes), MOE_ERR_FORMAT, "a value is expected");
        }
        while (status == MOE_OK && depth > 0 && moei_json_peek(j) == open[depth - 1]) {
            j->at++;
            depth--;
            entered = 0;
        }
        if (status != MOE_OK || depth == 0) return status;
        if (!entered) status = moei_json_take(j, ',');
        if (status == MOE_OK && open[depth - 1] == '}' && (status = moei_json_string(j, &s)) == MOE_OK)
            status = moei_json_take(j, ':');
        if (status != MOE_OK) return status;
    }
}

/* ==== the choice of a token among logits ====================================================== */

typedef struct moei_sample {
    int greedy;
    moe_real temperature, top_p;
    size_t top_k, n; /* top_k = n: all */
    const moe_real *logits;
    int32_t best;
    int32_t *order; /* [n] the tokens that are kept, unless all are */
} moei_sample;

/* The probability of a token up to a common factor: 1 for the best. */
static moe_real moei_sample_weight(const moei_sample *s, size_t token) {
    return MOEI_F(exp)((s->logits[token] - s->logits[s->best]) / s->temperature);
}

/* The number of first tokens in order, at most count, whose weights together reach enough. */
static size_t moei_sample_reach(const moei_sample *s, size_t count, double enough) {
    double sum = 0.0;
    size_t i;
    for (i = 0; i < count && sum < enough; i++) sum += (double)moei_sample_weight(s, (size_t)s->order[i]);
    return i;
}

/* The number of tokens that top_k and top_p keep; if fewer than n, they are sorted. Usually the
   first few reach top_p, so not all are sorted. */
static size_t moei_sample_stay(const moei_sample *s) {
    size_t most = s->top_k, i, sorted, stay;
    double sum = 0.0, enough;
    if (most < s->n) moe_top_k(s->n, s->logits, most, s->order);
    if (!(s->top_p < MOEI_R(1.0))) return most;
    for (i = 0; i < most; i++) sum += (double)moei_sample_weight(s, most < s->n ? (size_t)s->order[i] : i);
    enough = sum * (double)s->top_p;
    if (most < s->n) return moei_sample_reach(s, most, enough);
    for (sorted = 64; sorted < s->n / 8; sorted *= 8) {
        moe_top_k(s->n, s->logits, sorted, s->order);
        if ((stay = moei_sample_reach(s, sorted, enough)) < sorted) return stay;
    }
    moe_top_k(s->n, s->logits, s->n, s->order);
    return moei_sample_reach(s, s->n, enough);
}

/* Fills p and draws from it. Sums are double: a float would lose the small probabilities of a large
   vocabulary. */
MOEI_TOOL int32_t moei_sample_draw(const moei_sample *s, moe_rng *rng, moe_real *p) {
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
    /* if rounding leaves a remainder, the last possible token is taken */
    for (i = 0; i < s->n && left >= 0.0; i++) {
        if (p[i] > 0) token = (int32_t)i;
        left -= (double)p[i];
    }
    for (i = 0; i < s->n; i++) p[i] = (moe_real)((double)p[i] / sum);
    return token;
}

/* ==== attention ===============================================================================
   In blocks of queries; the backward pass recomputes A. */

/* Queries of a block; keys that are unpacked at once and summed as one block, see moe_matmul_fn. */
enum { MOEI_ATTENTION_ROWS = 64, MOEI_KEYS = 256 };
/* Sums over a window begin at a multiple of STEP; a window's cache takes at most PIECE tokens at
   once. */
enum { MOEI_WINDOW_STEP = 64, MOEI_WINDOW_PIECE = 256 };

/* The heads of an attention as scores and sums see them: those of MLA read the latent vectors. */
typedef struct moei_heads {
    size_t heads, kv, group; /* of queries; of keys; heads of queries per head of keys */
    size_t w, u;             /* widths of a head of keys and of values */
    /* widths of rows; MLA: values are the first u numbers of keys */
    size_t q, k, v, mixed;
} moei_heads;

/* Numbers and bytes of a key or value of `width` in a cache of a smaller type. */
MOEI_TOOL size_t moei_kept_width(size_t width) { return (width + 31) / 32 * 32; }

MOEI_TOOL size_t moei_kept_size(int type, size_t width) {
    return type == MOE_TYPE_Q8_BLOCK ? moei_kept_width(width) / 32 * 34 : moei_kept_width(width) * 2;
}

/* Attention of the queries of a call. */
typedef struct moei_attend {
    const moe_kernels *k;
    moei_heads s;
    size_t n, past;            /* tokens of the call, and before it */
    const unsigned char *mask; /* [n] 0: padding; NULL: none */
    int full;
    size_t window, chunk;
    moe_real root, cap;      /* scores are divided by root; cap 0: none */
    const moe_real *sinks;   /* [heads] or NULL */
    moe_real *q, *mixed;     /* [n,s.q], [n,s.mixed] */
    moe_real *keys, *values; /* rows s.k, s.v; the first is that of position `first` */
    size_t first;
    /* in a cache of a smaller type instead: [kv][capacity], moei_kept_size each */
    unsigned char *cells[2];
    size_t capacity;
    int type;
    moe_real *unpacked; /* [MOEI_KEYS,moei_kept_width] */
    moe_real *weights;  /* [heads,n,past + n], or NULL */
    moe_real *a;        /* [rows,keys + 1 for sinks] */
    /* of a block; tasks share blocks or, in training, heads of keys */
    size_t rows, task, n_tasks;
    /* backward */
    moe_real *d_a, *slopes; /* slopes: with a cap, else NULL */
    const moe_real *d_weights;
    moe_real *d_q, *d_keys, *d_values, *d_mixed, *d_sinks;
    size_t d_values_step;
} moei_attend;

static int moei_attends(const moei_attend *t, size_t token) { return t->mask == NULL || t->mask[token] != 0; }

/* Rows of a block: queries [at, at + rows) of one head, or (beside) one query of heads [head, head
   + rows), which read the same keys; and the keys that they may see, [from, from + span), counted
   from the first past one. What one row sums over, and in which order, depends on its position
   alone, so blocks do not change the bits. */
typedef struct moei_queries {
    size_t head, at, rows;
    int beside;
    size_t begin; /* the first key of the sequence */
    size_t from, span;
    moei_heads s;
} moei_queries;

static size_t moei_row_token(const moei_queries *b, size_t i) { return b->beside ? b->at : b->at + i; }

static size_t moei_row_head(const moei_queries *b, size_t i) { return b->beside ? b->head + i : b->head; }

/* How far rows of a block lie apart in an array [N,heads width]. */
static size_t moei_row_step(const moei_queries *b, size_t width) { return b->beside ? width : b->s.heads * width; }

/* Row i of a block in one. */
static moe_real *moei_row(const moei_queries *b, moe_real *rows, size_t width, size_t i) {
    return rows + (moei_row_token(b, i) * b->s.heads + moei_row_head(b, i)) * width;
}

/* The first key of its sequence that a query at a position sees or, rounded, the one that its sums
   begin at: the same for all queries of a block. */
static size_t moei_first_key(const moei_attend *t, size_t position, int rounded) {
    size_t first = t->window > 0 && position >= t->window ? position + 1 - t->window : 0;
    size_t of_chunk = t->chunk > 0 ? position - position % t->chunk : 0;
    if (rounded) first -= first % MOEI_WINDOW_STEP;
    return first > of_chunk ? first : of_chunk;
}

static size_t moei_row_position(const moei_attend *t, const moei_queries *b, size_t i) {
    return t->past + moei_row_token(b, i) - b->begin;
}

/* The keys of its block that row i sees are [skipped, seen). */
static size_t moei_block_skipped(const moei_attend *t, const moei_queries *b, size_t i) {
    return b->begin + moei_first_key(t, moei_row_position(t, b, i), 0) - b->from;
}

/* seen; 0 for padding. */
static size_t moei_block_seen(const moei_attend *t, const moei_queries *b, size_t i) {
    if (!moei_attends(t, moei_row_token(b, i))) return 0;
    return t->full ? b->span : t->past + moei_row_token(b, i) + 1 - b->from;
}

/* work(t, block) for the queries of tokens [at, at + count) that are in the sequence
   [begin, to). */
MOEI_TOOL void moei_attend_blocks(const moei_attend *t, size_t begin, size_t to, size_t at, size_t count,
                                  void (*work)(const moei_attend *t, const moei_queries *b)) {
    size_t first = begin > at ? begin : at, last = to < at + count ? to : at + count;
    moei_queries b;
    b.s = t->s;
    b.begin = begin;
    b.beside = count == 1;
    for (b.head = 0; b.head < b.s.heads; b.head += b.beside ? b.s.group : 1)
        for (b.at = first; b.at < last; b.at += b.beside ? 1 : b.rows) {
            size_t start = moei_first_key(t, t->past + b.at - begin, 1);
            for (b.rows = 1; b.rows < t->rows && b.at + b.rows < last &&
                             moei_first_key(t, t->past + b.at + b.rows - begin, 1) == start;)
                b.rows++;
            b.from = begin + start;
            b.span = t->past + (t->full ? to : b.at + b.rows) - b.from;
            if (b.beside) b.rows = b.s.group;
            if ((b.head / b.s.group + (t->d_q == NULL ? b.at / t->rows : 0)) % t->n_tasks == t->task) work(t, &b);
        }
}

/* One key or value [width] in a smaller type, filled up with zeros to moei_kept_width; a block of
   Q8_BLOCK has the scale, a 16-bit float, and 32 codes. */
MOEI_TOOL void moei_kept_store(int type, size_t width, const moe_real *x, unsigned char *cell) {
    size_t all = moei_kept_width(width), i, j;
    for (i = 0; i < all && type != MOE_TYPE_Q8_BLOCK; i++) {
        moe_real value = i < width ? x[i] : 0;
        moei_put_16(cell + 2 * i, type == MOE_TYPE_F16 ? moei_narrow(value, 5, 10) : moei_narrow(value, 8, 7));
    }
    for (i = 0; i < all && type == MOE_TYPE_Q8_BLOCK; i += 32, cell += 34) {
        moe_real most = 0, scale, code;
        for (j = i; j < width && j < i + 32; j++) /* a NaN stays the largest */
            if (!moei_is_nan(most) && !(MOEI_F(fabs)(x[j]) <= most)) most = MOEI_F(fabs)(x[j]);
        moei_put_16(cell, moei_narrow(most / MOEI_R(127.0), 5, 10));
        scale = moei_from_f16(moei_get_16(cell));
        for (j = 0; j < 32; j++) {
            code = i + j < width && scale > 0 ? x[i + j] / scale : 0;
            code = code > MOEI_R(127.0) ? MOEI_R(127.0) : code > MOEI_R(-127.0) ? code : MOEI_R(-127.0);
            cell[2 + j] = (unsigned char)(int)(code + (code < 0 ? MOEI_R(-0.5) : MOEI_R(0.5)));
        }
    }
}

/* out [count,moei_kept_width]: count of them unpacked. */
static void moei_kept_load(const moe_kernels *k, int type, size_t width, size_t count, const unsigned char *cells,
                           moe_real *out) {
    size_t blocks = count * (moei_kept_width(width) / 32), i, j;
    if (type != MOE_TYPE_Q8_BLOCK) {
        moei_table(k)->widen(type, blocks * 2, cells, out);
        return;
    }
    for (i = 0; i < blocks; i++, cells += 34, out += 32) {
        moe_real scale = moei_from_f16(moei_get_16(cells));
        for (j = 0; j < 32; j++) out[j] = scale * (moe_real)((int)(cells[2 + j] ^ 128u) - 128);
    }
}

/* Stores keys and values of tokens from `position` on. */
MOEI_TOOL void moei_keys_keep(const moei_attend *t, size_t position, size_t count, const moe_real *keys,
                              const moe_real *values) {
    size_t i, h;
    for (i = 0; i < count; i++)
        for (h = 0; h < t->s.kv; h++) {
            size_t cell = h * t->capacity + position - t->first + i;
            moei_kept_store(t->type, t->s.w, keys + i * t->s.k + h * t->s.w,
                            t->cells[0] + cell * moei_kept_size(t->type, t->s.w));
            if (t->cells[1] != NULL)
                moei_kept_store(t->type, t->s.u, values + i * t->s.v + h * t->s.u,
                                t->cells[1] + cell * moei_kept_size(t->type, t->s.u));
        }
}

/* Moves rows [from, from + count) of `bytes` to the beginning. */
static void moei_rows_move(void *rows, size_t from, size_t count, size_t bytes) {
    if (rows != NULL) memmove(rows, (unsigned char *)rows + from * bytes, count * bytes);
}

/* Moves a window's keys and values so that tokens [position, position + count) fit; 0 if keys that
   they see are gone. */
MOEI_TOOL int moei_keys_slide(moei_attend *t, size_t position, size_t count) {
    size_t needed = moei_first_key(t, position, 1), kept = position - needed, by, h;
    if (t->first > needed || position - t->first > t->capacity) return 0;
    if (position - t->first + count <= t->capacity) return 1;
    by = needed - t->first;
    t->first = needed;
    if (t->type == MOE_TYPE_REAL) {
        moei_rows_move(t->keys, by, kept, t->s.k * sizeof(moe_real));
        if (t->values != t->keys) moei_rows_move(t->values, by, kept, t->s.v * sizeof(moe_real));
        return 1;
    }
    for (h = 0; h < t->s.kv; h++) {
        size_t w = moei_kept_size(t->type, t->s.w), u = moei_kept_size(t->type, t->s.u);
        moei_rows_move(t->cells[0] + h * t->capacity * w, by, kept, w);
        if (t->cells[1] != NULL) moei_rows_move(t->cells[1] + h * t->capacity * u, by, kept, u);
    }
    return 1;
}

/* Keys [key, key + count) of the block's head; *step apart. A cache of a smaller type is unpacked
   into room. */
static const moe_real *moei_block_keys(const moei_attend *t, const moei_queries *b, size_t key, size_t count,
                                       int values, size_t *step) {
    size_t head = b->head / b->s.group, at = b->from + key - t->first;
    int of_keys = values && t->values == t->keys; /* MLA: values are the beginning of keys */
    size_t width = values && !of_keys ? b->s.u : b->s.w;
    if (t->cells[0] == NULL) {
        *step = b->s.kv * width;
        return (values ? t->values : t->keys) + at * *step + head * width;
    }
    *step = moei_kept_width(width);
    moei_kept_load(t->k, t->type, width, count,
                   t->cells[values && !of_keys] + (head * t->capacity + at) * moei_kept_size(t->type, width),
                   t->unpacked);
    return t->unpacked;
}

/* The end of the part of keys [key, end) that is one product: sums go by 256 keys from the block's
   first one. */
static size_t moei_block_part(const moei_attend *t, size_t key, size_t end) {
    size_t next = key - key % MOEI_KEYS + MOEI_KEYS;
    return (t->cells[0] != NULL || key % MOEI_KEYS != 0) && next < end ? next : end;
}

/* a [rows,span] = the scores of the block before scale and cap. */
static void moei_block_scores(const moei_attend *t, const moei_queries *b, moe_real *a) {
    size_t key, end, step, ld = b->span + (t->sinks != NULL);
    for (key = 0; key < b->span; key = end) {
        const moe_real *keys;
        end = moei_block_part(t, key, b->span);
        keys = moei_block_keys(t, b, key, end - key, 0, &step);
        moe_matmul(t->k, MOE_MATMUL_NT, MOE_TYPE_REAL, b->rows, end - key, b->s.w, moei_row(b, t->q, b->s.w, 0),
                   moei_row_step(b, b->s.w), keys, step, a + key, ld, 0);
    }
}

/* c tanh(s / (root c)); slope (or NULL) gets the derivative by s / root. */
static void moei_scores_cap(const moei_attend *t, size_t n, moe_real *a, moe_real *slope) {
    size_t i;
    for (i = 0; i < n; i++) {
        moe_real bent = MOEI_F(tanh)(a[i] / (t->root * t->cap));
        if (slope != NULL) slope[i] = MOEI_R(1.0) - bent * bent;
        a[i] = t->cap * bent;
    }
}

/* a [rows,span] = the block's part of A; with sinks [rows,span + 1], the sink's share at the end of
   a row. */
static void moei_block_weights(const moei_attend *t, const moei_queries *b, moe_real *a, moe_real *slopes) {
    size_t i, j, seen, skipped, sinks = t->sinks != NULL, ld = b->span + sinks;
    moe_real temperature = t->cap > 0 ? MOEI_R(1.0) : t->root;
    moei_block_scores(t, b, a);
    for (i = 0; i < b->rows; i++, a += ld) {
        seen = moei_block_seen(t, b, i);
        skipped = moei_block_skipped(t, b, i);
        if (t->cap > 0) moei_scores_cap(t, seen, a, slopes != NULL ? slopes + i * ld : NULL);
        for (j = 0; j < skipped && j < seen; j++) a[j] = -MOEI_INFINITY;
        /* with a mask there is no past: a key is a token of the call */
        for (; j < seen && t->mask != NULL; j++)
            if (!moei_attends(t, b->from + j)) a[j] = -MOEI_INFINITY;
        if (sinks && seen > 0) a[seen] = t->sinks[moei_row_head(b, i)] * temperature;
        moe_softmax(t->k, seen > 0 ? seen + sinks : 0, a, temperature, a);
        if (sinks) a[b->span] = seen > 0 ? a[seen] : 0;
        if (seen < b->span) memset(a + seen, 0, (b->span - seen) * sizeof(moe_real));
    }
}

/* Where row i of a block begins in weights, d_weights. */
static size_t moei_block_cell(const moei_attend *t, const moei_queries *b, size_t i) {
    return (moei_row_head(b, i) * t->n + moei_row_token(b, i)) * (t->past + t->n) + b->from;
}

/* mixed of the block's rows [row, row + rows), summed over keys [key, seen). */
static void moei_block_mix(const moei_attend *t, const moei_queries *b, const moe_real *a, size_t row, size_t rows,
                           size_t key, size_t seen) {
    size_t end, step, first = key, ld = b->span + (t->sinks != NULL);
    for (; key < seen; key = end) {
        const moe_real *values;
        end = moei_block_part(t, key, seen);
        values = moei_block_keys(t, b, key, end - key, 1, &step);
        moe_matmul(t->k, MOE_MATMUL_NN, MOE_TYPE_REAL, rows, b->s.u, end - key, a + row * ld + key, ld, values, step,
                   moei_row(b, t->mixed, b->s.u, row), moei_row_step(b, b->s.u), key > first);
    }
}

/* A row may see fewer keys than its block, and 0 times what is not finite is not 0. The block's
   first row shows whether the other keys are finite: if not, each row sums over its own keys
   only. */
MOEI_TOOL void moei_block_forward(const moei_attend *t, const moei_queries *b) {
    size_t i, ld = b->span + (t->sinks != NULL);
    moe_real *a = t->a;
    moei_block_weights(t, b, a, NULL);
    for (i = 0; i < b->rows && t->weights != NULL; i++)
        memcpy(t->weights + moei_block_cell(t, b, i), a + i * ld, b->span * sizeof(moe_real));
    moei_block_mix(t, b, a, 0, b->rows, 0, b->span);
    for (i = 0; i < b->s.u && moe_is_finite(moei_row(b, t->mixed, b->s.u, 0)[i]);) i++;
    if (t->full || i == b->s.u) return;
    for (i = 0; i < b->rows; i++) {
        memset(moei_row(b, t->mixed, b->s.u, i), 0, b->s.u * sizeof(moe_real));
        moei_block_mix(t, b, a, i, 1, moei_block_skipped(t, b, i), moei_block_seen(t, b, i));
    }
}

#ifndef MOE_NO_TRAIN
/* With d_a = d_mixed v^T, and what routers add: d_v += A^T d_mixed,  d_score = A d_a - A sum A d_a,
   d_q = d_score k,  d_k += d_score^T q, where d_q and d_k lack the factor of scores. A sink has no
   value, so its d_a is 0. */
MOEI_TOOL void moei_block_backward(const moei_attend *t, const moei_queries *b) {
    const moe_kernels *k = t->k;
    size_t i, step, values_step, ld = b->span + (t->sinks != NULL), head = b->head / b->s.group;
    size_t d_step = t->d_values_step;
    const moe_real *keys = moei_block_keys(t, b, 0, b->span, 0, &step);
    const moe_real *values = moei_block_keys(t, b, 0, b->span, 1, &values_step);
    moe_real *d_mixed = moei_row(b, t->d_mixed, b->s.u, 0);
    moei_block_weights(t, b, t->a, t->slopes);
    moe_matmul(k, MOE_MATMUL_NT, MOE_TYPE_REAL, b->rows, b->span, b->s.u, d_mixed, moei_row_step(b, b->s.u), values,
               values_step, t->d_a, ld, 0);
    moe_matmul(k, MOE_MATMUL_TN, MOE_TYPE_REAL, b->span, b->s.u, b->rows, t->a, ld, d_mixed, moei_row_step(b, b->s.u),
               t->d_values + b->from * d_step + head * b->s.u, d_step, 1);
    for (i = 0; i < b->rows; i++) {
        const moe_real *a = t->a + i * ld;
        moe_real *d_a = t->d_a + i * ld, along;
        if (t->d_weights != NULL) moe_axpy(k, b->span, MOEI_R(1.0), t->d_weights + moei_block_cell(t, b, i), d_a);
        along = moe_dot(k, b->span, a, d_a);
        moei_multiply(k, b->span, a, d_a, d_a);
        moe_axpy(k, b->span, -along, a, d_a);
        if (t->sinks != NULL) t->d_sinks[moei_row_head(b, i)] -= a[b->span] * along;
        if (t->slopes != NULL) moei_multiply(k, moei_block_seen(t, b, i), t->slopes + i * ld, d_a, d_a);
    }
    moe_matmul(k, MOE_MATMUL_NN, MOE_TYPE_REAL, b->rows, b->s.w, b->span, t->d_a, ld, keys, step,
               moei_row(b, t->d_q, b->s.w, 0), moei_row_step(b, b->s.w), 0);
    moe_matmul(k, MOE_MATMUL_TN, MOE_TYPE_REAL, b->span, b->s.w, b->rows, t->d_a, ld, moei_row(b, t->q, b->s.w, 0),
               moei_row_step(b, b->s.w), t->d_keys + b->from * b->s.k + head * b->s.w, b->s.k, 1);
}
#endif

/* (a, b) -> (a cos - b sin, a sin + b cos) for pairs of row [2 half], neighbours or of its halves;
   way = -1 is the backward pass. */
MOEI_TOOL void moei_rotate_row(size_t half, int neighbours, const moe_real *rotations, moe_real way, moe_real *row) {
    size_t step = neighbours ? 2 : 1, i;
    moe_real *other = row + (neighbours ? 1 : half);
    for (i = 0; i < half; i++) {
        moe_real a = row[i * step], b = other[i * step];
        moe_real c = rotations[i], s = way * rotations[half + i];
        row[i * step] = a * c - b * s;
        other[i * step] = a * s + b * c;
    }
}

/* Queries or keys of a token: the heads of a row, and how they are finished after their product. */
typedef struct moei_row_kind {
    const moe_kernels *k;
    size_t heads, width;   /* of the row */
    size_t rotated, pairs; /* where the rotated dimensions of a head begin, and half of them */
    int neighbours;
    int normed;   /* 1: before, 2: after the rotation */
    size_t norms; /* in how many parts: 1, or the heads */
    moe_real eps, clamp;
    double growth;
    size_t floor;
    const moe_real *gain;
    moe_real *d_gain;
    moe_real *room; /* backward: two rows */
} moei_row_kind;

static void moei_row_rotate(const moei_row_kind *kind, const moe_real *rotation, moe_real way, moe_real *row) {
    size_t h;
    for (h = 0; h < kind->heads && kind->pairs > 0; h++)
        moei_rotate_row(kind->pairs, kind->neighbours, rotation, way, row + h * kind->width + kind->rotated);
}

static void moei_row_norm(const moei_row_kind *kind, moe_real *row) {
    size_t width = kind->heads * kind->width / kind->norms, h;
    for (h = 0; h < kind->norms; h++, row += width)
        moei_rms_norm_row(kind->k, width, row, kind->gain, kind->eps, row, NULL);
}

MOEI_TOOL void moei_row_clamp(moe_real most, size_t n, moe_real *row) {
    size_t i;
    for (i = 0; i < n && most > 0; i++) row[i] = row[i] > most ? most : row[i] < -most ? -most : row[i];
}

/* Multiplies a query by the factor of its position. */
static void moei_row_grow(const moei_row_kind *kind, size_t position, moe_real *row) {
    size_t steps = kind->floor > 0 ? (position + 1) / kind->floor : 0, i;
    moe_real factor;
    if (steps == 0) return;
    factor = (moe_real)(1.0 + kind->growth * MOEI_D(log)((double)steps + 1.0));
    for (i = 0; i < kind->heads * kind->width; i++) row[i] *= factor;
}

/* Finishes a row after its product. */
MOEI_TOOL void moei_row_finish(const moei_row_kind *kind, const moe_real *rotation, size_t position, moe_real *row) {
    if (kind->normed == 1) moei_row_norm(kind, row);
    moei_row_clamp(kind->clamp, kind->heads * kind->width, row);
    moei_row_rotate(kind, rotation, MOEI_R(1.0), row);
    if (kind->normed == 2) moei_row_norm(kind, row);
    moei_row_grow(kind, position, row);
}

#ifndef MOE_NO_TRAIN
/* d := the gradient of x, the input of a norm [n], from that of its output. */
MOEI_TOOL void moei_norm_gradient(const moe_kernels *k, size_t n, const moe_real *x, const moe_real *gain, moe_real eps,
                                  moe_real *d, moe_real *d_gain, moe_real *room) {
    moe_real rrms;
    moei_rms_norm_row(k, n, x, NULL, eps, room, &rrms);
    memset(room, 0, n * sizeof(moe_real));
    moei_rms_norm_row_backward(k, n, x, gain, rrms, d, room, d_gain);
    memcpy(d, room, n * sizeof(moe_real));
}

static void moei_row_norm_backward(const moei_row_kind *kind, const moe_real *x, moe_real *d) {
    size_t width = kind->heads * kind->width / kind->norms, h;
    for (h = 0; h < kind->norms; h++)
        moei_norm_gradient(kind->k, width, x + h * width, kind->gain, kind->eps, d + h * width, kind->d_gain,
                           kind->room);
}

/* The backward pass of moei_row_finish: d becomes the gradient of raw, from which what each step
   read is recomputed. */
MOEI_TOOL void moei_row_finish_backward(const moei_row_kind *kind, const moe_real *rotation, size_t position,
                                        const moe_real *raw, moe_real *d) {
    size_t n = kind->heads * kind->width, i;
    moei_row_grow(kind, position, d);
    if (kind->normed == 2) {
        moe_real *row = kind->room + n;
        memcpy(row, raw, n * sizeof(moe_real));
        moei_row_clamp(kind->clamp, n, row);
        moei_row_rotate(kind, rotation, MOEI_R(1.0), row);
        moei_row_norm_backward(kind, row, d);
    }
    moei_row_rotate(kind, rotation, MOEI_R(-1.0), d);
    if (kind->clamp > 0) {
        moe_real *row = kind->room + n;
        memcpy(row, raw, n * sizeof(moe_real));
        if (kind->normed == 1) moei_row_norm(kind, row);
        for (i = 0; i < n; i++)
            if (row[i] > kind->clamp || row[i] < -kind->clamp) d[i] = 0;
    }
    if (kind->normed == 1) moei_row_norm_backward(kind, raw, d);
}
#endif

/* ==== convolution ============================================================================= */

/* Rows parts [n,3 d], B, C and X, of tokens in a sequence whose past is in state [length - 1,d],
   which is u of the tokens before (NULL: there are none). */
typedef struct moei_convolve {
    size_t d, length, past;
    const moe_real *taps, *parts, *state; /* taps [d,length] */
} moei_convolve;

/* u = B X of a channel, `back` tokens before token t; 0 before the sequence. */
static moe_real moei_convolve_input(const moei_convolve *v, size_t t, size_t back, size_t channel) {
    if (back <= t) {
        const moe_real *part = v->parts + (t - back) * 3 * v->d + channel;
        return part[0] * part[2 * v->d];
    }
    if (v->state == NULL || back > t + v->past) return 0;
    return v->state[(v->length - 1 + t - back) * v->d + channel];
}

/* z */
static moe_real moei_convolve_sum(const moei_convolve *v, size_t t, size_t channel) {
    moe_real sum = 0;
    size_t i;
    for (i = 0; i < v->length; i++)
        sum += v->taps[channel * v->length + i] * moei_convolve_input(v, t, v->length - 1 - i, channel);
    return sum;
}

/* mixed [n,d] = C z */
MOEI_TOOL void moei_convolve_forward(const moei_convolve *v, size_t n, moe_real *mixed) {
    size_t t, c;
    for (t = 0; t < n; t++)
        for (c = 0; c < v->d; c++) mixed[t * v->d + c] = v->parts[(3 * t + 1) * v->d + c] * moei_convolve_sum(v, t, c);
}

/* next := the state after n tokens. */
MOEI_TOOL void moei_convolve_state(const moei_convolve *v, size_t n, moe_real *next) {
    size_t i, c;
    for (i = 0; i + 1 < v->length; i++)
        for (c = 0; c < v->d; c++) next[i * v->d + c] = moei_convolve_input(v, n, v->length - 1 - i, c);
}

#ifndef MOE_NO_TRAIN
/* d_parts [n,3 d], zeros, receives the gradients of the parts (B has that of u at first), d_taps is
   added to. */
MOEI_TOOL void moei_convolve_backward(const moei_convolve *v, size_t n, const moe_real *d_mixed, moe_real *d_parts,
                                      moe_real *d_taps) {
    size_t t, c, i, d = v->d;
    for (t = 0; t < n; t++)
        for (c = 0; c < d; c++) {
            moe_real d_z = d_mixed[t * d + c] * v->parts[(3 * t + 1) * d + c];
            d_parts[(3 * t + 1) * d + c] = d_mixed[t * d + c] * moei_convolve_sum(v, t, c);
            for (i = 0; i < v->length && i <= t; i++) {
                size_t tap = c * v->length + v->length - 1 - i;
                d_parts[3 * (t - i) * d + c] += v->taps[tap] * d_z;
                d_taps[tap] += d_z * moei_convolve_input(v, t, i, c);
            }
        }
    for (t = 0; t < n; t++, d_parts += 3 * d)
        for (c = 0; c < d; c++) {
            d_parts[2 * d + c] = d_parts[c] * v->parts[3 * t * d + c];
            d_parts[c] *= v->parts[(3 * t + 2) * d + c];
        }
}
#endif

#endif /* MOE_NO_FLOAT */

/* ==== integers ===================================================================================
   These three read constants; 16-bit and 32-bit values are aligned to 2 and 4. */

#if defined(MOEI_FLASH_AVR)
MOEI_INLINE unsigned moei_flash_8(const unsigned char *at) {
    return pgm_read_byte(at);
}
MOEI_INLINE int16_t moei_flash_16(const unsigned char *at) {
    return (int16_t)pgm_read_word(at);
}
MOEI_INLINE int32_t moei_flash_32(const unsigned char *at) {
    return (int32_t)pgm_read_dword(at);
}
#elif defined(MOEI_FLASH_WORDS)
typedef int16_t __attribute__((__may_alias__)) moei_flash_half;
typedef int32_t __attribute__((__may_alias__)) moei_flash_word;
MOEI_INLINE unsigned moei_flash_8(const unsigned char *at) {
    return *at;
}
MOEI_INLINE int16_t moei_flash_16(const unsigned char *at) {
    return *(const moei_flash_half *)(const void *)at;
}
MOEI_INLINE int32_t moei_flash_32(const unsigned char *at) {
    return *(const moei_flash_word *)(const void *)at;
}
#else
MOEI_INLINE unsigned moei_flash_8(const unsigned char *at) {
    return *at;
}
MOEI_INLINE int16_t moei_flash_16(const unsigned char *at) {
    return (int16_t)(at[0] | (unsigned)at[1] << 8);
}
MOEI_INLINE int32_t moei_flash_32(const unsigned char *at) {
    return (int32_t)(at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24);
}
#endif
/* The code of a weight. gcc 12 takes a cast moei_flash_8 for unsigned in dot products of its own
   (vpdpbusd, usdot). */
MOEI_INLINE int moei_flash_code(const unsigned char *at) {
#if defined(MOEI_FLASH_AVR)
    return (signed char)moei_flash_8(at);
#else
    return *(const signed char *)at;
#endif
}

/* The constants of a product (of outputs that are missing all are 0), k4 = k rounded up to 4:
     int8   for each pair of outputs a, b
              int32 bias_a, int32 bias_b, int16 factor_a, int16 factor_b,
              k4 times: int16 256 w_b + w_a;     |w| <= 127
            for a last output alone
              int32 bias, int16 factor, int16 0, for each four inputs: int8 w_0, w_2, w_1, w_3
     int4   for each four outputs a to d
              int32 bias_a to bias_d, then for each block of 32 inputs, the last one shorter,
                for each input: int16 4096 w_d + 256 (w_c + 8) + 16 (w_b + 8) + w_a + 8;
                -8 <= w <= 7
                int16 block_a to block_d,
              int16 factor_a to factor_d
   Arm's DSP instructions multiply halfwords, and one extracts the even bytes of a word.
   Below, block_jp is the block scale of output j at input p, and 1 for int8. */

/* Bytes of a product's constants, a multiple of 4. 0: n or k is above 65532, or the size
   overflows. */
MOEI_TOOL size_t moei_int8_size(size_t n, size_t k);
MOEI_TOOL size_t moei_int4_size(size_t n, size_t k);
/* With sum_j = bias_j + sum_p w_jp block_jp x_p and t_j = (sum_j * factor_j) >> 16 (all bits of the
   product), x narrow [k]:
     product       y_j = clamp((t_j + round) >> shift), zeros after n
     product_add   y_j += (t_j * weight) >> 16, 32767 being a weight of 1; y [n rounded up to 4],
                   any value after n; the caller ensures |y_j| < 2^31; low, high and shift are
                   ignored
     int4_sums     sums [ceil(k/32)] = -8 times the sum of each block of x, which int4 products need
   y overlaps neither x, sums nor data. n = 0 or k = 0 is allowed. */
MOEI_TOOL void moei_int8_product(const moei_int_shape *shape, const unsigned char *data, const int16_t *x, int16_t *y);
MOEI_TOOL void moei_int8_product_add(const moei_int_shape *shape, const unsigned char *data, const int16_t *x,
                                     int16_t weight, int32_t *y);
MOEI_TOOL void moei_int4_sums(unsigned k, const int16_t *x, int16_t *sums);
MOEI_TOOL void moei_int4_product(const moei_int_shape *shape, const unsigned char *data, const int16_t *x,
                                 const int16_t *sums, int16_t *y);
MOEI_TOOL void moei_int4_product_add(const moei_int_shape *shape, const unsigned char *data, const int16_t *x,
                                     const int16_t *sums, int16_t weight, int32_t *y);

/* The following functions process vectors of n, each with zeros after n in y; y may be x, a or
   b. */

/* y_j = clamp(sum_j >> shift), sum [n rounded up to 4]; |sum_j| <= 2^30. y does not overlap sum. */
MOEI_TOOL void moei_int_store(const moei_int_shape *shape, const int32_t *sum, int16_t *y);
/* Linear interpolation between 65 points c_0..c_64 (int16, constants as above) over wide x: with u
   = x + 32768, i = u >> 10, f = u & 1023 y = clamp((c_i + (((c_{i+1} - c_i) * f) >> 10) + round) >>
   shift). */
MOEI_TOOL void moei_int_curve(const moei_int_shape *shape, const unsigned char *points, const int16_t *x, int16_t *y);
/* y = clamp((a * b + round) >> shift), a and b wide. */
MOEI_TOOL void moei_int_multiply(const moei_int_shape *shape, const int16_t *a, const int16_t *b, int16_t *y);
/* y = clamp((a * factor + b * factor2 + round) >> shift), a and b wide, factors within 0..16383; b
   may be NULL (0), and then factor may be up to 32767. */
MOEI_TOOL void moei_int_add(const moei_int_shape *shape, const int16_t *a, int16_t factor, const int16_t *b,
                            int16_t factor2, int16_t *y);

/* 2^(-d / 2^bits) in units of 1/32768, bits within 0..31: exactly 32768 for d = 0, non-increasing
   in d; the error is below one unit (1.9 units where bits is above 14: the rest of d keeps 14), and
   below 2^-12 relative for results above 4096. */
MOEI_TOOL uint32_t moei_int_exp2(uint32_t d, int bits);
/* The square root, rounded down. */
MOEI_TOOL uint32_t moei_int_sqrt(uint32_t x);
/* e_i = moei_int_exp2(max z - z_i, bits): the numerators of a softmax whose logits z have 2^bits
   units per octave. Returns their sum. n <= 65532. */
MOEI_TOOL uint32_t moei_int_softmax(size_t n, const int16_t *z, int bits, uint16_t *e);
/* The indices of the k largest of key[n] in descending order; of equal keys the lower index comes
   first. n <= 32767. Returns min(k, n). */
MOEI_TOOL size_t moei_int_top_k(size_t n, const int32_t *key, size_t k, int16_t *index);

/* ---- sizes ---- */

enum { MOEI_INT_HEADER = 12, MOEI_INT_BLOCK = 32 };
#define MOEI_INT_WIDEST 65532u

/* Bytes of one pair or of four outputs. */
MOEI_TOOL size_t moei_int8_pair_size(size_t k) { return MOEI_INT_HEADER + 2 * ((k + 3) & ~(size_t)3); }

MOEI_TOOL size_t moei_int4_four_size(size_t k) {
    return 2 * MOEI_INT_HEADER + 2 * ((k + 3) & ~(size_t)3) + (k + MOEI_INT_BLOCK - 1) / MOEI_INT_BLOCK * 8;
}

/* With a size_t of 32 bits or more, the size of a group of outputs cannot overflow; with 16 bits it
   can. */
MOEI_TOOL size_t moei_int_size(size_t groups, size_t k, size_t group) {
    size_t bytes;
    if (k > MOEI_INT_WIDEST || k > ((size_t)-1 - 64) / 3) return 0;
    return moei_mul(groups, group, &bytes) ? bytes : 0;
}

static size_t moei_int8_size(size_t n, size_t k) {
    const size_t pair = moei_int8_pair_size(k),
                 size = n > MOEI_INT_WIDEST ? 0 : moei_int_size((n + 1) / 2, k, pair);
    return size == 0 ? 0 : size - n % 2 * (pair / 2 - 2);
}

/* The side of output j in its pair: 0, 1, or 2 for a last output alone. */
MOEI_TOOL unsigned moei_int8_side(size_t n, size_t j) { return j % 2 == 0 && j + 1 == n ? 2 : j % 2; }
/* The offset of its factor in the pair. */
MOEI_TOOL size_t moei_int8_factor_at(unsigned side) { return side == 2 ? 4 : 8 + 2 * side; }
/* The byte of input p among the weights of a last output alone. */
MOEI_TOOL size_t moei_int8_place(size_t p) { return (p + 1) & 2 ? p ^ 3 : p; }
/* The weight of input p. */
MOEI_TOOL int moei_int8_weight(const unsigned char *pair, unsigned side, size_t p) {
    const unsigned char *at = side == 2 ? pair + 8 + moei_int8_place(p) : pair + MOEI_INT_HEADER + 2 * p;
    const int a = moei_flash_code(at);
    return side == 1 ? (int)((int32_t)moei_flash_16(at) - a) >> 8 : a;
}

static size_t moei_int4_size(size_t n, size_t k) {
    return n > MOEI_INT_WIDEST ? 0 : moei_int_size((n + 3) / 4, k, moei_int4_four_size(k));
}

/* Not inlined: where it would go, too many registers are in use, and the stack would grow. */
#if defined(__GNUC__) || defined(__clang__)
#define MOEI_INT_CALLED __attribute__((__noinline__))
#else
#define MOEI_INT_CALLED
#endif

/* ---- results ---- */

/* (sum * factor) >> 16. Where a 64-bit product is a library call, two 32-bit products replace
   it. */
MOEI_INLINE int32_t moei_int_scale(int32_t sum, int32_t factor) {
#if defined(__AVR__)
    return (int32_t)(int16_t)(sum >> 16) * (int16_t)factor + ((int32_t)(uint16_t)sum * (int16_t)factor >> 16);
#elif defined(MOEI_INT_THUMB1)
    return (sum >> 16) * factor + ((sum & 0xffff) * factor >> 16);
#else
    sum = (int32_t)((int64_t)sum * factor >> 16);
#if defined(__arm__) && defined(__GNUC__)
    /* otherwise gcc keeps 64 bits, and a second product then takes four instructions */
    __asm__("" : "+r"(sum));
#endif
    return sum;
#endif
}

MOEI_INLINE int32_t moei_int_round(const moei_int_shape *shape) {
    return (int32_t)((uint32_t)1 << shape->shift >> 1);
}

MOEI_INLINE int16_t moei_int_clamp_to(int32_t low, int32_t high, int32_t value) {
    return (int16_t)(value < low ? low : value > high ? high : value);
}

MOEI_INLINE int16_t moei_int_clamp(const moei_int_shape *shape, int32_t value) {
    return moei_int_clamp_to(shape->low, shape->high, value);
}

MOEI_INLINE void moei_int_put_zeros(unsigned n, int16_t *y) {
    for (; (n & 3u) != 0; n++) y[n] = 0;
}

/* Passed as the weight: outputs are stored, not added. Both variants share the code, which is most
   of what an integer model needs. */
#define MOEI_INT_NO_WEIGHT ((int32_t)1 << 16)

/* Finishes the sums a and b of a pair of outputs; returns the position for the next pair. */
MOEI_INLINE void *moei_int_finish_pair(const moei_int_shape *shape, int32_t weight, const unsigned char *factors,
                                       int32_t a, int32_t b, void *at) {
    int32_t *sum = (int32_t *)at;
    int16_t *y = (int16_t *)at;
    a = moei_int_scale(a, moei_flash_16(factors));
    b = moei_int_scale(b, moei_flash_16(factors + 2));
    if (weight != MOEI_INT_NO_WEIGHT) {
        sum[0] += moei_int_scale(a, weight);
        sum[1] += moei_int_scale(b, weight);
        return sum + 2;
    }
    a = moei_int_clamp(shape, (a + moei_int_round(shape)) >> shape->shift);
    b = moei_int_clamp(shape, (b + moei_int_round(shape)) >> shape->shift);
    y[0] = (int16_t)a;
    y[1] = (int16_t)b;
    return y + 2;
}

/* ---- inner products of a pair of outputs: k is a multiple of 4 ---- */

#if defined(MOEI_INT_DSP)
MOEI_TOOL int32_t moei_int_sum(unsigned k, const int16_t *x) {
    int32_t sum = 0;
    __asm__ volatile(
        ".syntax unified\nsubs %1,#8\nblt 2f\n"
        "1:\tldm %2!,{r3,r4,r5,r6}\nsmlad %0,r3,%3,%0\nsmlad %0,r4,%3,%0\n"
        "smlad %0,r5,%3,%0\nsmlad %0,r6,%3,%0\nsubs %1,#8\nbge 1b\n"
        "2:\tadds %1,#8\nbeq 3f\nldm %2!,{r3,r4}\nsmlad %0,r3,%3,%0\nsmlad %0,r4,%3,%0\n3:"
        : "+r"(sum), "+r"(k), "+r"(x)
        : "r"(0x10001)
        : "r3", "r4", "r5", "r6", "cc", "memory");
    return sum;
}
#elif defined(MOEI_FLASH_WORDS)
/* Two inputs at a time: the lower half of the sum of words is the sum of their lower halves as long
   as that fits in 16 bits, which holds for 256 inputs. */
MOEI_TOOL int32_t moei_int_sum(unsigned k, const int16_t *x) {
    int32_t sum = 0;
    unsigned count;
    for (; k > 0; k -= count) {
        const int16_t *end;
        uint32_t words = 0;
        count = k < 512 ? k : 512;
        for (end = x + count; x != end; x += 4) {
            const int32_t first = ((const moei_flash_word *)(const void *)x)[0],
                          second = ((const moei_flash_word *)(const void *)x)[1];
            words += (uint32_t)first + (uint32_t)second;
            sum += (first >> 16) + (second >> 16);
        }
        sum += (int16_t)(words & 0xffffu);
    }
    return sum;
}
#else
MOEI_TOOL int32_t moei_int_sum(unsigned k, const int16_t *x) {
    int32_t sum = 0;
    for (; k > 0; k--) sum += *x++;
    return sum;
}
#endif

#if defined(MOEI_INT_THUMB1)
/* *a += w_a . x and *both += (256 w_b + w_a) . x from x to end > x. The sums are
   moved to upper registers, which support only additions; this frees the lower registers. */
MOEI_INLINE const int16_t *moei_int8_dot_part(const unsigned char **w, const int16_t *x, const int16_t *end,
                                              uint32_t *a, uint32_t *both) {
#define MOEI_WORD(w) \
    "ldm %1!,{%2}\nsxth %3,%2\nsxtb %4," #w "\nmuls %4,%3,%4\nadd r8,%4\nsxth %4," #w \
    "\nmuls %4,%3,%4\n" \
    "add r9,%4\nasrs %2,%2,#16\nasrs " #w "," #w ",#16\nsxtb %4," #w \
    "\nmuls %4,%2,%4\nadd r8,%4\n" \
    "muls " #w ", %2, " #w "\nadd r9," #w "\n"
    __asm__ volatile(".syntax unified\nmov r8,%2\nmov r9,%3\nmov r10,%4\n"
                     "1:\tldm %0!,{r4,r5}\n" MOEI_WORD(r4)
                         MOEI_WORD(r5) "cmp %1,r10\nbne 1b\nmov %2,r8\nmov %3,r9"
                     : "+l"(*w), "+l"(x), "+l"(*a), "+l"(*both), "+l"(end)
                     :
                     : "r4", "r5", "r8", "r9", "r10", "cc", "memory");
#undef MOEI_WORD
    return x;
}
#endif

#if defined(MOEI_INT_AVR)
#if defined(MOEI_FLASH_AVR)
#define MOEI_LOAD "lpm"
#else
#define MOEI_LOAD "ld"
#endif
/* *a += (w_a + 128) . x, *b += (w_b + 128) . x: all weights are positive, so a product has the sign
   of x, and the upper byte of x extends it to the upper bytes of the sum. */
MOEI_INLINE const unsigned char *moei_int8_dot(unsigned k, const unsigned char *w, const int16_t *x, int32_t *a,
                                               int32_t *b) {
#define MOEI_INPUT \
    MOEI_LOAD " %5,Z+\n" MOEI_LOAD " %6,Z+\nld %7,X+\nld %8,X+\nsubi %5,128\nsbci %6,127\n" \
    "mulsu %7,%5\nadd %A2,r0\nadc %B2,r1\nadc %C2,%8\nadc %D2,%8\n" \
    "mulsu %7,%6\nadd %A3,r0\nadc %B3,r1\nadc %C3,%8\nadc %D3,%8\n"
    int32_t sum_a = *a, sum_b = *b;
    unsigned count = k / 4;
    unsigned char byte_a, byte_b, code, sign;
    if (k == 0) return w;
    __asm__ volatile("1:\t" MOEI_INPUT MOEI_INPUT MOEI_INPUT MOEI_INPUT
                     "sbiw %4,1\nbreq 2f\nrjmp 1b\n2:\tclr __zero_reg__"
                     : "+z"(w), "+x"(x), "+r"(sum_a), "+r"(sum_b), "+w"(count), "=&a"(byte_a), "=&a"(byte_b),
                       "=&a"(code), "=&r"(sign)
                     :
                     : "memory");
#undef MOEI_INPUT
    *a = sum_a;
    *b = sum_b;
    return w;
}
#else
/* *a += w_a . x, *b += w_b . x; returns the end of the weights. */
#if defined(MOEI_INT_THUMB1)
/* both - a = 256 w_b . x, which fits in 32 bits for up to 512 inputs. */
MOEI_INLINE const unsigned char *moei_int8_dot(unsigned k, const unsigned char *w, const int16_t *x, int32_t *a,
                                               int32_t *b) {
    const int16_t *end = x + k;
    uint32_t sum_a = (uint32_t)*a;
    int32_t sum_b = *b;
    while (x != end) {
        uint32_t both = sum_a;
        x = moei_int8_dot_part(&w, x, end - x > 512 ? x + 512 : end, &sum_a, &both);
        sum_b += (int32_t)(both - sum_a) >> 8;
    }
    *a = (int32_t)sum_a;
    *b = sum_b;
    return w;
}
#else
/* |both| < 2^30 + 256 * 127 * 127 * 256. */
MOEI_INT_CALLED MOEI_TOOL const unsigned char *moei_int8_dot(unsigned k, const unsigned char *w, const int16_t *x,
                                                            int32_t *a, int32_t *b) {
    int32_t sum_a = *a, both;
#define MOEI_INPUT(i) \
    both += (int32_t)moei_flash_16(w + 2 * (i)) * x[i]; \
    sum_a += (int32_t)moei_flash_code(w + 2 * (i)) * x[i];
    while (k > 0) {
        const int16_t *end = x + (k < 256 ? k : 256);
        k -= (unsigned)(end - x);
        both = sum_a;
        do {
            MOEI_INPUT(0)
            MOEI_INPUT(1)
            MOEI_INPUT(2)
            MOEI_INPUT(3)
            w += 8;
            x += 4;
        } while (x != end);
        *b += (both - sum_a) >> 8;
    }
#undef MOEI_INPUT
    *a = sum_a;
    return w;
}
#endif
#endif

/* Adds a block of k > 0 inputs to the four sums; offset: from moei_int4_sums. Returns its end. */
#if defined(MOEI_INT_AVR)
/* The block's sum fits in 16 bits (8 * 127 * 32 < 32768), so its partial sums may wrap. */
MOEI_INLINE const unsigned char *moei_int4_dot(unsigned k, const unsigned char *w, const int16_t *x, int32_t offset,
                                               int32_t *sum) {
#define MOEI_TERM(code, sum) "andi " code ",15\nmulsu r20," code "\nadd %A" sum ",r0\nadc %B" sum ",r1\n"
#define MOEI_INPUT \
    MOEI_LOAD " r18,Z+\n" MOEI_LOAD " r19,Z+\nld r20,X+\nadiw r26,1\nmov r21,r18\n" \
    MOEI_TERM("r21", "2") "swap r18\n" MOEI_TERM("r18", "3") "mov r21,r19\n" MOEI_TERM("r21", "4") \
    "subi r19,128\nswap r19\n" MOEI_TERM("r19", "5")
    uint16_t a = (uint16_t)offset, b = a;
    uint16_t c = a, d = a;
    unsigned char count = (unsigned char)(k / 4);
    __asm__ volatile("1:\t" MOEI_INPUT MOEI_INPUT MOEI_INPUT MOEI_INPUT
                     "dec %6\nbreq 2f\nrjmp 1b\n2:\tclr __zero_reg__"
                     : "+z"(w), "+x"(x), "+r"(a), "+r"(b), "+r"(c), "+r"(d), "+r"(count)
                     :
                     : "r18", "r19", "r20", "r21", "memory");
#undef MOEI_INPUT
#undef MOEI_TERM
    sum[0] += (int32_t)(int16_t)a * moei_flash_16(w);
    sum[1] += (int32_t)(int16_t)b * moei_flash_16(w + 2);
    sum[2] += (int32_t)(int16_t)c * moei_flash_16(w + 4);
    sum[3] += (int32_t)(int16_t)d * moei_flash_16(w + 6);
    return w + 8;
}
#undef MOEI_LOAD
#elif !defined(MOEI_INT_DSP)
/* The sums of the codes, shifted by 0, 4, 8 and 12 bits: each contains 16 times the next one. */
MOEI_INLINE const unsigned char *moei_int4_dot(unsigned k, const unsigned char *w, const int16_t *x, int32_t offset,
                                               int32_t *sum) {
    const int16_t *end = x + k;
    int32_t a = 0, b = 0;
    int32_t c = 0, d = 0;
#if defined(MOEI_INT_THUMB1)
#define MOEI_INPUT \
    "asrs %3,%2,#4\nmuls %3,%4,%3\nadd r9,%3\nasrs %3,%2,#8\nmuls %3,%4,%3\nadd r10,%3\n" \
    "asrs %3,%2,#12\nmuls %3,%4,%3\nadd r11,%3\nmuls %2,%4,%2\nadd r8,%2\n"
    int32_t inputs;
    __asm__ volatile(".syntax unified\nmov r8,%2\nmov r9,%2\nmov r10,%2\nmov r11,%2\n"
                     "1:\tldm %0!,{%5}\nldm %1!,{%6}\nsxth %2,%5\nsxth %4,%6\n" MOEI_INPUT
                     "asrs %2,%5,#16\nasrs %4,%6,#16\n" MOEI_INPUT
                     "cmp %1,%7\nbne 1b\nmov %2,r8\nmov %3,r9\nmov %4,r10\nmov %5,r11"
                     : "+l"(w), "+l"(x), "+l"(a), "=&l"(b), "=&l"(c), "=&l"(d), "=&l"(inputs)
                     : "h"(end)
                     : "r8", "r9", "r10", "r11", "cc", "memory");
#undef MOEI_INPUT
#else
#define MOEI_INPUT(i) \
    v = moei_flash_16(w + 2 * (i)); \
    a += v * x[i]; \
    b += (v >> 4) * x[i]; \
    c += (v >> 8) * x[i]; \
    d += (v >> 12) * x[i];
    do {
        int32_t v;
        MOEI_INPUT(0)
        MOEI_INPUT(1)
        MOEI_INPUT(2)
        MOEI_INPUT(3)
        x += 4;
        w += 8;
    } while (x != end);
#undef MOEI_INPUT
#endif
    sum[0] += (int32_t)(int16_t)(a - 16 * b + offset) * moei_flash_16(w);
    sum[1] += (int32_t)(int16_t)(b - 16 * c + offset) * moei_flash_16(w + 2);
    sum[2] += (int32_t)(int16_t)(c - 16 * d + offset) * moei_flash_16(w + 4);
    sum[3] += d * moei_flash_16(w + 6);
    return w + 8;
}
#endif

/* ---- products ---- */

static void moei_int4_sums(unsigned k, const int16_t *x, int16_t *sums) {
    unsigned count;
    for (k = (k + 3u) & ~3u; k > 0; k -= count, x += count) {
        count = k < MOEI_INT_BLOCK ? k : (unsigned)MOEI_INT_BLOCK;
        *sums++ = (int16_t)(-8 * moei_int_sum(count, x));
    }
}

#if defined(MOEI_INT_DSP)
/* The data of the loops over pairs, in the order in which they load it. */
typedef struct moei_int_work {
#if defined(MOEI_INT_MVE)
    int32_t room[4];
#endif
    void *y;
    int32_t round, shift, low, high; /* low and high in both halves; if adding: the weight, -1 */
    const unsigned char *data_end;
    const int16_t *x;
} moei_int_work;

/* The caller knows whether there is a weight; the loop sets data_end. */
MOEI_INLINE void moei_int_work_begin(moei_int_work *w, const moei_int_shape *shape, const int16_t *x, int32_t weight,
                                     void *y) {
    w->round = weight;
    w->shift = -1;
    w->y = y;
    w->x = x;
    if (weight != MOEI_INT_NO_WEIGHT) return;
    w->round = moei_int_round(shape);
    w->shift = shape->shift;
    w->low = (int32_t)(0x10001u * (uint16_t)shape->low);
    w->high = (int32_t)(0x10001u * (uint16_t)shape->high);
}

/* The end of four outputs: `work` is at x in moei_int_work, f and g the factors. */
#if defined(MOEI_INT_MVE)
/* Stores four sums from q0. */
#define MOEI_CLAMP(y, shift, low, high) \
    "vshl.s32 q0," #shift "\nvqmovnb.s32 q0,q0\nvdup.16 q1," #low "\nvmax.s16 q0,q0,q1\nvdup.16 q1," #high \
    "\nvmin.s16 q0,q0,q1\nvstrh.32 q0,[" #y "],#8\n"
#define MOEI_STORE_FOUR(y, sum, shift, low, high) "vldrw.u32 q0,[" #sum "],#16\n" MOEI_CLAMP(y, shift, low, high)
#define MOEI_DOWN (-1)
#define MOEI_VECTORS "q0", "q1", "q2", "q3",
#define MOEI_FINISH_FOUR(work, y, round, shift, low, high, a, b, c, d, f, g) \
    "sub " #y "," #work ",#40\nstrd " #f "," #g ",[" #y "]\nvldrh.s32 q1,[" #y "]\nstm " #y ",{" #a "," #b "," #c \
    "," #d "}\nvldrw.u32 q0,[" #y "]\nldmdb " #work ",{" #y "," #round "," #shift "," #low "," #high ",lr}\n" \
    "vshl.i32 q1,q1,#16\nvmulh.s32 q0,q0,q1\n" \
    "rsbs " #shift "," #shift ",#0\nbgt 6f\nvadd.i32 q0,q0," #round "\n" MOEI_CLAMP(y, shift, low, high) "b 7f\n" \
    "6:\tlsl " #round "," #round ",#16\nvdup.32 q1," #round "\nvmulh.s32 q0,q0,q1\nvldrw.u32 q1,[" #y "]\n" \
    "vadd.i32 q0,q0,q1\nvstrw.32 q0,[" #y "],#16\n7:\tstr " #y ",[" #work ",#-24]\n"
#else
/* Clamps a and b at once, to low and high in both halves of a register; b is free afterwards. */
#define MOEI_CLAMP(a, b, shift, low, high) \
    "asr " #a "," #a "," #shift "\nasr " #b "," #b "," #shift "\nssat " #a ", #16, " #a "\nssat " #b \
    ", #16, " #b "\npkhbt " #a "," #a "," #b ",lsl #16\nssub16 " #b "," #a "," #low "\nsel " #a "," #a \
    ", " #low "\nssub16 " #b "," #high "," #a "\nsel " #a "," #a "," #high "\n"
#define MOEI_STORE_FOUR(y, sum, shift, low, high) \
    "ldm " #sum "!,{r8,r9,r10,r11}\n" MOEI_CLAMP(r8, r9, shift, low, high) MOEI_CLAMP(r10, r11, shift, low, high) \
    "stm " #y "!,{r8,r10}\n"
#define MOEI_DOWN 1
#define MOEI_VECTORS
#define MOEI_STORE(a, b, factors, round, shift, low, high) \
    "smlawb " #a "," #a "," #factors "," #round "\nsmlawt " #b "," #b "," #factors "," #round \
    "\n" MOEI_CLAMP(a, b, shift, low, high)
#define MOEI_FINISH_FOUR(work, y, round, shift, low, high, a, b, c, d, f, g) \
    "ldmdb " #work ",{" #y "," #round "," #shift "," #low "," #high ",lr}\ncmp " #shift ",#0\nblt 6f\n" \
    MOEI_STORE(a, b, f, round, shift, low, high) MOEI_STORE(c, d, g, round, shift, low, high) \
    "stm " #y "!,{" #a "," #c "}\nb 7f\n" \
    "6:\tsmulwb " #a "," #a "," #f "\nsmulwt " #b "," #b "," #f "\nsmulwb " #c "," #c "," #g "\nsmulwt " #d "," #d \
    "," #g "\nldm " #y ",{" #shift "," #low "," #f "," #high "}\nsmlawb " #shift "," #a "," #round "," #shift \
    "\nsmlawb " #low "," #b "," #round "," #low "\nsmlawb " #f "," #c "," #round "," #f "\nsmlawb " #high "," #d \
    "," #round "," #high "\nstm " #y "!,{" #shift "," #low "," #f "," #high "}\n7:\tstr " #y ",[" #work ",#-24]\n"
#endif

typedef struct moei_int8_work {
    moei_int_work ends; /* data_end is the end of the fours less the number of outputs that are left */
    size_t pair;
#if defined(MOEI_INT_MVE)
    uint32_t steps, last_steps; /* of 16 and of 4 inputs */
#else
    uint32_t entry;     /* into the loop */
    uintptr_t end;      /* of the first part, or 1 less if more follow */
#endif
} moei_int8_work;

/* Adds to sum the product of four weights of an output alone with x and x2. */
#define MOEI_ALONE(w, x, x2, sum) \
    "sxtb16 r12," #w "\nsmlad " #sum ",r12," #x "," #sum "\nsxtb16 " #w "," #w ",ror #8\nsmlad " #sum "," #w "," #x2 \
    "," #sum "\n"
#if defined(MOEI_INT_MVE)
/* Two pairs share the codes of x in q2; the last pair may be both (pair is 0). The loads separate
   even and odd bytes: w_a in q0, w_b in q1, or one less where w_a is negative. Of an output alone
   the bytes of x are put in the order of its weights. */
#define MOEI_16_INPUTS(w, a, b) \
    "vld20.8 {q0,q1},[" #w "]\nvld21.8 {q0,q1},[" #w "]!\nvshr.u8 q3,q0,#7\nvadd.i8 q1,q1,q3\n" \
    "vmladava.s8 " #a ",q0,q2\nvmladava.s8 " #b ",q1,q2\n"
#define MOEI_4_INPUTS(w, a, b) \
    "vldrh.u32 q0,[" #w "],#8\nvmovlb.s8 q1,q0\nvmovlt.s8 q0,q0\nvshr.u16 q3,q1,#15\nvadd.i16 q0,q0,q3\n" \
    "vmladava.s16 " #a ",q1,q2\nvmladava.s16 " #b ",q0,q2\n"
#define MOEI_16_ALONE(w, a) \
    "vld20.32 {q2,q3},[r2]\nvld21.32 {q2,q3},[r2]\nvmovnt.i16 q2,q3\nvldrb.u8 q0,[" #w "],#16\n" \
    "vmladava.s8 " #a ",q0,q2\n"
#define MOEI_4_ALONE(w, a) \
    "ldrd r5,r7,[r2]\nldr r10,[" #w "],#4\n" MOEI_ALONE(r10, r5, r7, a)
#define MOEI_LOOP \
    "subs r5,r1,r2\nbhs 8f\n" \
    "0:\tldm r0,{r2,r3,r5,r12}\nadd r3,r1\nldm r1!,{r4,r6,r9}\nldm r3!,{r8,r10,r11}\nwls lr,r5,2f\n" \
    "1:\tvld20.8 {q2,q3},[r2]\nvld21.8 {q2,q3},[r2]!\n" MOEI_16_INPUTS(r1, r4, r6) MOEI_16_INPUTS(r3, r8, r10) \
    "le lr,1b\n2:\twls lr,r12,4f\n" \
    "3:\tvldrh.s32 q2,[r2],#8\n" MOEI_4_INPUTS(r1, r4, r6) MOEI_4_INPUTS(r3, r8, r10) "le lr,3b\n" \
    "4:\t" MOEI_FINISH_FOUR(r0, r1, r2, r5, r7, r12, r4, r6, r8, r10, r9, r11) \
    "mov r1,r3\nsubs r5,r1,lr\nblo 0b\nbeq 9f\n" \
    "8:\tcmp r5,#3\nbhi 9f\nmov r4,#0\nbeq 10f\ncmp r5,#2\nbne 12f\nstr r4,[r0,#4]\nb 0b\n" \
    "10:\tldm r0,{r2,r3,r5,r12}\nadd r3,r1\nldm r1!,{r4,r6,r9}\nldm r3!,{r8,r11}\nwls lr,r5,14f\n" \
    "11:\t" MOEI_16_ALONE(r3, r8) "vld20.8 {q2,q3},[r2]\nvld21.8 {q2,q3},[r2]!\n" MOEI_16_INPUTS(r1, r4, r6) \
    "le lr,11b\n14:\twls lr,r12,16f\n" \
    "15:\t" MOEI_4_ALONE(r3, r8) "vldrh.s32 q2,[r2],#8\n" MOEI_4_INPUTS(r1, r4, r6) "le lr,15b\n16:\tb 4b\n" \
    "12:\tldm r0,{r2,r3,r5,r8}\nldm r1!,{r4,r9}\nmov r3,r1\nwls lr,r5,14f\n" \
    "13:\t" MOEI_16_ALONE(r3, r4) "adds r2,#32\nle lr,13b\n14:\twls lr,r8,16f\n" \
    "15:\t" MOEI_4_ALONE(r3, r4) "adds r2,#8\nle lr,15b\n16:\tb 4b\n"
#else
/* Two pairs a, b and c, d share the loads of x. a = sum w_a x in r3 and both = sum (256 w_b + w_a)
   x in r4, so that both - a = 256 w_b . x, which fits in 32 bits for up to 520 inputs; c and d in
   r5 and r6. Parts of x: k % 512 inputs, and then each 512; of the first, steps of 8, which have
   116 bytes of code, come first, and 4 more at the end. What is left after the fours, a pair, an
   output or both, has a loop of its own and ends as two pairs. */
#define MOEI_WORD(w, x, a, both) \
    "smlad " #both "," #w "," #x "," #both "\nsxtb16 " #w "," #w "\nsmlad " #a "," #w "," #x "," #a "\n"
#define MOEI_WORDS(from, x, x2, a, both) \
    "ldm " #from "!,{r7,r12}\n" MOEI_WORD(r7, x, a, both) MOEI_WORD(r12, x2, a, both)
#define MOEI_4_INPUTS(x, x2) MOEI_WORDS(r1, x, x2, r3, r4) MOEI_WORDS(r2, x, x2, r5, r6)
#define MOEI_4_AND_ALONE(x, x2) MOEI_WORDS(r1, x, x2, r3, r4) "ldr r7,[r2],#4\n" MOEI_ALONE(r7, x, x2, r5)
#define MOEI_PARTS \
    "pop {r7,r8,r9,r10,r11}\nsub r4,r4,r3\nadd r8,r8,r4,asr #8\nsub r6,r6,r5\nadd r10,r10,r6,asr #8\n"
#define MOEI_8_INPUTS "ldm r0!,{r8,r9,r10,r11}\n" MOEI_4_INPUTS(r8, r9) MOEI_4_INPUTS(r10, r11)
#define MOEI_LOOP \
    "mov r7,r0\nsubs r3,r1,r2\nbhs 8f\n" \
    "0:\tldm r7,{r0,r2,r12,lr}\nadd r2,r1\nldm r1!,{r3,r8,r9}\nldm r2!,{r5,r10,r11}\n" \
    "push {r7,r8,r9,r10,r11}\nmov r4,r3\nmov r6,r5\nadd pc,r12\nnop\n" \
    "2:\t.rept 4\n" MOEI_8_INPUTS ".endr\ncmp r0,lr\nblo 2b\nbhi 5f\n" \
    "1:\t" MOEI_PARTS \
    "10:\t" MOEI_FINISH_FOUR(r7, r0, r1, r4, r6, r12, r3, r8, r5, r10, r9, r11) \
    "mov r1,r2\nsubs r3,r1,lr\nblo 0b\nbeq 9f\n" \
    "8:\tcmp r3,#3\nbhi 9f\nldm r7,{r0,r2,r12,lr}\nbeq 11f\ncmp r3,#2\nbne 14f\n" \
    "ldm r1!,{r3,r8,r9}\npush {r7,r8,r9,r10,r11}\nmov r4,r3\nb 4f\n" \
    "3:\tldm r0!,{r8,r9,r10,r11}\n" MOEI_WORDS(r1, r8, r9, r3, r4) MOEI_WORDS(r1, r10, r11, r3, r4) \
    "4:\tcmp r0,lr\nblo 3b\nmov r2,r1\nbls 1b\n" \
    "5:\tldr r7,[sp]\nldm r7,{r7,r12}\nadd r12,r7\nsubs r12,r0\ncmp r12,#20\nbne 6f\n" \
    "ldm r0!,{r8,r9}\n" MOEI_4_INPUTS(r8, r9) "b 1b\n" \
    "6:\tcmp r12,#12\nbeq 1b\n" MOEI_PARTS "push {r7,r8,r9,r10,r11}\nmov r4,r3\nmov r6,r5\nadd lr,r0,#1020\nb 2b\n" \
    "11:\tsub lr,r2,#12\nadd lr,r0\nadd r2,r1\nldm r1!,{r3,r8,r9}\nldm r2!,{r5,r11}\n" \
    "12:\tpush {r7,r8,r9,r10,r11}\nmov r4,r3\nadd r6,r0,#1024\ncmp r6,lr\nit hi\nmovhi r6,lr\n" \
    "sub r12,lr,r0\nlsls r12,r12,#28\nbpl 13f\nldm r0!,{r8,r9}\n" MOEI_4_AND_ALONE(r8, r9) "b 13f\n" \
    "3:\tldm r0!,{r8,r9,r10,r11}\n" MOEI_4_AND_ALONE(r8, r9) MOEI_4_AND_ALONE(r10, r11) \
    "13:\tcmp r0,r6\nblo 3b\nmov r6,r5\ncmp r0,lr\nbeq 1b\n" MOEI_PARTS "b 12b\n" \
    "14:\tsub lr,r2,#12\nldm r1!,{r3,r9}\nlsls r2,lr,#28\nmov r2,r1\nadd lr,r0\nbpl 13f\n" \
    "ldm r0!,{r4,r5}\nldr r6,[r2],#4\n" MOEI_ALONE(r6, r4, r5, r3) "b 13f\n" \
    "3:\tldm r0!,{r4,r5,r6,r8}\nldm r2!,{r10,r11}\n" MOEI_ALONE(r10, r4, r5, r3) MOEI_ALONE(r11, r6, r8, r3) \
    "13:\tcmp r0,lr\nblo 3b\nb 10b\n"
#endif

MOEI_TOOL MOEI_INT_CALLED void moei_int8_loop(moei_int8_work *work, const unsigned char *data,
                                              const moei_int_shape *shape) {
    const unsigned k = (shape->k + 3u) & ~3u;
    register const int16_t **at __asm__("r0");
    register const unsigned char *w __asm__("r1");
    register const unsigned char *last __asm__("r2");
    if (shape->n == 0) return;
    work->pair = MOEI_INT_HEADER + 2 * k;
    work->ends.data_end = data + shape->n / 4u * 2 * work->pair - shape->n % 4u;
#if defined(MOEI_INT_MVE)
    work->steps = k / 16;
    work->last_steps = k % 16 / 4;
#else
    const unsigned part = k & 504u, steps = part == 0 ? 4 : (0u - part) / 8 % 4;
    work->entry = 116 * steps;
    work->end = (uintptr_t)(work->ends.x + part) - ((part - k) >> 31);
#endif
    /* without optimization these registers do not survive other statements */
    last = work->ends.data_end;
    w = data;
    at = &work->ends.x;
    __asm__ volatile(".syntax unified\npush {r7}\n" MOEI_LOOP "9:\tpop {r7}"
                     : "+r"(at), "+r"(w), "+r"(last)
                     :
                     : "r3", "r4", "r5", "r6", "r8", "r9", "r10", "r11", "r12", "lr", MOEI_VECTORS "cc", "memory");
}
#undef MOEI_LOOP
#undef MOEI_8_INPUTS
#undef MOEI_PARTS
#undef MOEI_4_INPUTS
#undef MOEI_16_INPUTS
#undef MOEI_16_ALONE
#undef MOEI_4_ALONE
#undef MOEI_4_AND_ALONE
#undef MOEI_ALONE
#undef MOEI_WORDS
#undef MOEI_WORD

typedef struct moei_int4_work {
    moei_int_work ends;
    const int16_t *sums;
    uint32_t k;
} moei_int4_work;

/* The sums of codes times inputs in r10, without w_d in r8, of the lower byte in r6, of w_a in r4.
   A step has 8 inputs. */
#if defined(MOEI_INT_MVE)
#define MOEI_STEPS \
    "mov r5,#32\n2:\tadd r2,r1,r5,lsl #1\ndlstp.16 lr,r5\n3:\tvldrh.u16 q0,[r1],#16\nvldrh.u16 q1,[r0],#16\n" \
    "vmladava.s16 r10,q0,q1\nvbic.i16 q0,#0xf000\nvmladava.s16 r8,q0,q1\nvmovlb.u8 q0,q0\n" \
    "vmladava.s16 r6,q0,q1\nvbic.i16 q0,#0xf0\n" \
    "vmladava.s16 r4,q0,q1\nletp lr,3b\nmov r1,r2\n"
#define MOEI_SOME "mov r5,r3\nb 2b\n"
#else
#define MOEI_WORD(w, x) \
    "smlad r10," #w "," #x ",r10\nbic " #w "," #w ",#0xf000f000\nsmlad r8," #w "," #x ",r8\nuxtb16 " #w "," #w \
    "\nsmlad r6," #w "," #x ",r6\nand " #w "," #w ",#0x000f000f\nsmlad r4," #w "," #x ",r4\n"
#define MOEI_STEPS \
    "2:\t.rept 4\nldm.n r0!,{r2,r3,r5,r7}\nldm r1!,{r9,r11,r12,lr}\n" MOEI_WORD(r9, r2) MOEI_WORD(r11, r3) \
    MOEI_WORD(r12, r5) MOEI_WORD(lr, r7) ".endr\n"
/* Four inputs first, if k is not a multiple of 8; then the steps, which have 118 bytes each. */
#define MOEI_SOME \
    "tst r3,#4\nbeq 3f\nldm r0!,{r2,r5}\nldm r1!,{r9,r11}\n" MOEI_WORD(r9, r2) MOEI_WORD(r11, r5) \
    "3:\tlsr r3,r3,#3\nrsb r3,r3,#4\nmov r2,#118\nmul r3,r3,r2\nadr.w r2,2b\nadd r2,r3\nadd r2,#1\nbx r2\n"
#endif

MOEI_TOOL MOEI_INT_CALLED void moei_int4_loop(moei_int4_work *work, const unsigned char *data,
                                              const moei_int_shape *shape) {
    const unsigned k = (shape->k + 3u) & ~3u;
    register const int16_t **at __asm__("r0");
    register const unsigned char *w __asm__("r1");
    if (shape->n == 0) return;
    work->ends.data_end = data + (shape->n + 3u) / 4 * moei_int4_four_size(k);
    work->k = k;
    w = data;
    at = &work->ends.x;
    /* on the stack: the sums of the outputs, the next of x, the number of inputs left */
    __asm__ volatile(
        ".syntax unified\npush {r0,r7}\nsub sp,#24\n"
        "0:\tldr r0,[sp,#24]\nldm r1!,{r7,r9,r11,r12}\nldm r0,{r0,r2,r3}\n"
        "1:\tldrsh r4,[r2],#2\nstm sp,{r7,r9,r11,r12}\nadd r6,r4,r4,lsl #4\nadd r8,r6,r4,lsl #8\nmov r10,r8\n"
        "subs r3,#32\nstrd r2,r3,[sp,#16]\nblt 5f\n" MOEI_STEPS
        "ldm r1!,{r2,r3}\nldm sp,{r7,r9,r11,r12}\nsub r10,r10,r8\nsub r8,r8,r6\nsubs r6,r6,r4\nasr r10,r10,#12\n"
        "asr r8,r8,#8\nasrs r6,r6,#4\nsmlabb r7,r4,r2,r7\nsmlabt r9,r6,r2,r9\nsmlabb r11,r8,r3,r11\n"
        "smlabt r12,r10,r3,r12\nldrd r2,r3,[sp,#16]\ncmp r3,#0\nbgt 1b\n"
        "4:\tldm r1!,{r6,r8}\nldr r0,[sp,#24]\n" MOEI_FINISH_FOUR(r0, r2, r3, r4, r5, r10, r7, r9, r11, r12, r6, r8)
        "cmp r1,lr\nbne 0b\nb 9f\n.p2align 2\n" /* adr must know where words begin */
        "5:\tadds r3,#32\nbeq 4b\n" MOEI_SOME
        "9:\tadd sp,#24\npop {r0,r7}"
        : "+r"(at), "+r"(w)
        :
        : "r2", "r3", "r4", "r5", "r6", "r8", "r9", "r10", "r11", "r12", "lr", MOEI_VECTORS "cc", "memory");
}
#undef MOEI_SOME
#undef MOEI_STEPS
#undef MOEI_WORD
#undef MOEI_FINISH_FOUR
#undef MOEI_STORE

MOEI_INLINE void moei_int8_pairs(const moei_int_shape *shape, const unsigned char *data, const int16_t *x,
                                 int32_t weight, void *y) {
    moei_int8_work work;
    moei_int_work_begin(&work.ends, shape, x, weight, y);
    moei_int8_loop(&work, data, shape);
}

MOEI_INLINE void moei_int4_fours(const moei_int_shape *shape, const unsigned char *data, const int16_t *x,
                                 const int16_t *sums, int32_t weight, void *y) {
    moei_int4_work work;
    moei_int_work_begin(&work.ends, shape, x, weight, y);
    work.sums = sums;
    moei_int4_loop(&work, data, shape);
}
#else
MOEI_TOOL void moei_int8_pairs(const moei_int_shape *shape, const unsigned char *data, const int16_t *x, int32_t weight,
                               void *y) {
    const unsigned k = (shape->k + 3u) & ~3u;
#if defined(MOEI_INT_AVR)
    const int32_t offset = 128 * moei_int_sum(k, x);
#endif
    int left = shape->n - 1;
    for (; left >= 0; left -= 2) {
        const unsigned char *factors = data + 8;
        int32_t a = moei_flash_32(data), b = moei_flash_32(data + 4);
        if (left == 0) {
            const unsigned char *w = factors, *end = w + k;
            factors = data + 4;
            for (; w != end; w += 4, x += 4) {
#define MOEI_INPUT(i, p) a += moei_flash_code(w + (i)) * (signed char)x[p];
                MOEI_INPUT(0, 0)
                MOEI_INPUT(1, 2)
                MOEI_INPUT(2, 1)
                MOEI_INPUT(3, 3)
#undef MOEI_INPUT
            }
        } else {
#if defined(MOEI_INT_AVR)
            a -= offset;
            b -= offset;
#endif
            data = moei_int8_dot(k, data + MOEI_INT_HEADER, x, &a, &b);
        }
        y = moei_int_finish_pair(shape, weight, factors, a, b, y);
    }
}

MOEI_TOOL void moei_int4_fours(const moei_int_shape *shape, const unsigned char *data, const int16_t *x,
                               const int16_t *sums, int32_t weight, void *y) {
    const unsigned k = (shape->k + 3u) & ~3u;
    unsigned left = (shape->n + 3u) / 4, i;
    for (; left > 0; left--, data += 8) {
        const int16_t *at = x, *offset = sums;
        int32_t sum[4];
        unsigned rest, count;
        sum[0] = moei_flash_32(data);
        sum[1] = moei_flash_32(data + 4);
        sum[2] = moei_flash_32(data + 8);
        sum[3] = moei_flash_32(data + 12);
        data += 16;
        for (rest = k; rest > 0; rest -= count, at += count) {
            count = rest < MOEI_INT_BLOCK ? rest : (unsigned)MOEI_INT_BLOCK;
            data = moei_int4_dot(count, data, at, *offset++, sum);
        }
        for (i = 0; i < 4; i += 2) y = moei_int_finish_pair(shape, weight, data + 2 * i, sum[i], sum[i + 1], y);
    }
}
#endif

static void moei_int8_product(const moei_int_shape *shape, const unsigned char *data, const int16_t *x, int16_t *y) {
    moei_int8_pairs(shape, data, x, MOEI_INT_NO_WEIGHT, y);
    moei_int_put_zeros(shape->n, y);
}

static void moei_int8_product_add(const moei_int_shape *shape, const unsigned char *data, const int16_t *x,
                                  int16_t weight, int32_t *y) {
    moei_int8_pairs(shape, data, x, weight, y);
}

static void moei_int4_product(const moei_int_shape *shape, const unsigned char *data, const int16_t *x,
                              const int16_t *sums, int16_t *y) {
    moei_int4_fours(shape, data, x, sums, MOEI_INT_NO_WEIGHT, y);
    moei_int_put_zeros(shape->n, y);
}

static void moei_int4_product_add(const moei_int_shape *shape, const unsigned char *data, const int16_t *x,
                                  const int16_t *sums, int16_t weight, int32_t *y) {
    moei_int4_fours(shape, data, x, sums, weight, y);
}

/* ---- elementwise operations ---- */

/* Copied from a shape, because the compiler would reload the shape for every element: stores might
   alias it. */
typedef struct moei_int_range {
    int32_t round, low, high;
    unsigned shift;
} moei_int_range;

MOEI_INLINE moei_int_range moei_int_range_of(const moei_int_shape *shape) {
    moei_int_range l;
    l.round = moei_int_round(shape);
    l.low = shape->low;
    l.high = shape->high;
    l.shift = shape->shift;
    return l;
}

MOEI_INLINE int16_t moei_int_rescale(moei_int_range l, int32_t value) {
    return moei_int_clamp_to(l.low, l.high, (value + l.round) >> l.shift);
}

static void moei_int_store(const moei_int_shape *shape, const int32_t *sum, int16_t *y) {
    int16_t *at = y, *end = y + shape->n;
#if defined(MOEI_INT_DSP)
    const uint32_t low = 0x10001u * (uint16_t)shape->low, high = 0x10001u * (uint16_t)shape->high;
    if (at != end)
        __asm__ volatile("1:\t" MOEI_STORE_FOUR(%0, %1, %2, %3, %4) "cmp %0,%5\nblo 1b"
                         : "+l"(at), "+r"(sum)
                         : "r"(MOEI_DOWN * shape->shift), "r"(low), "r"(high), "r"(end)
                         : "r8", "r9", "r10", "r11", MOEI_VECTORS "cc", "memory");
#else
    moei_int_range l = moei_int_range_of(shape);
    l.round = 0;
    while (at != end) *at++ = moei_int_rescale(l, *sum++);
#endif
    moei_int_put_zeros(shape->n, y);
}

static void moei_int_curve(const moei_int_shape *shape, const unsigned char *points, const int16_t *x, int16_t *y) {
    const moei_int_range l = moei_int_range_of(shape);
    const int16_t *end = y + shape->n;
    while (y != end) {
        const unsigned u = (uint16_t)*x++ ^ 0x8000u;
        const unsigned char *c = points + (u >> 10) * 2;
        const int32_t from = moei_flash_16(c), rise = moei_flash_16(c + 2) - from;
        *y++ = moei_int_rescale(l, from + (rise * (int32_t)(u & 1023u) >> 10));
    }
    moei_int_put_zeros(shape->n, y - shape->n);
}

static void moei_int_multiply(const moei_int_shape *shape, const int16_t *a, const int16_t *b, int16_t *y) {
    const moei_int_range l = moei_int_range_of(shape);
    const int16_t *end = y + shape->n;
    while (y != end) *y++ = moei_int_rescale(l, (int32_t)*a++ * *b++);
    moei_int_put_zeros(shape->n, y - shape->n);
}

static void moei_int_add(const moei_int_shape *shape, const int16_t *a, int16_t factor, const int16_t *b,
                         int16_t factor2, int16_t *y) {
    const moei_int_range l = moei_int_range_of(shape);
    const int16_t *end = y + shape->n;
    if (b == NULL) {
        b = a;
        factor2 = 0;
    }
    while (y != end) *y++ = moei_int_rescale(l, (int32_t)*a++ * factor + (int32_t)*b++ * factor2);
    moei_int_put_zeros(shape->n, y - shape->n);
}

/* ---- scalar functions, softmax and top-k ---- */

/* 2^-t = 1 - t p(t) for t in [0, 1), p the cubic that interpolates at four Chebyshev nodes. t has
   14 fractional bits, p 17, so t p has 31: no product exceeds 32 bits, and the rounding error of p
   (a unit times t < 2^14) stays below the decrease per step of t (0.34 * 2^17), so the result is
   non-increasing. */
static uint32_t moei_int_exp2(uint32_t d, int bits) {
    const uint32_t whole = d >> bits, rest = d & (((uint32_t)1 << bits) - 1);
    const uint32_t t = bits <= 14 ? rest << (14 - bits) : rest >> (bits - 14);
    uint32_t p;
    if (whole > 16) return 0;
    p = 7097 - (961 * t >> 14);
    p = 31452 - (p * t >> 14);
    p = 90851 - (p * t >> 14);
    return (((((uint32_t)1 << 31) - p * t) >> 15 >> whole) + 1) >> 1;
}

/* Digit by digit in base 2: each step subtracts 2 root bit + bit^2 if possible. */
static uint32_t moei_int_sqrt(uint32_t x) {
    uint32_t root = 0, bit = (uint32_t)1 << 30;
    for (; bit != 0; bit >>= 2) {
        const uint32_t trial = root + bit;
        root >>= 1;
        if (x >= trial) {
            x -= trial;
            root += bit;
        }
    }
    return root;
}

static uint32_t moei_int_softmax(size_t n, const int16_t *z, int bits, uint16_t *e) {
    int16_t max = INT16_MIN;
    uint32_t sum = 0;
    size_t i;
    for (i = 0; i < n; i++)
        if (z[i] > max) max = z[i];
    for (i = 0; i < n; i++) {
        e[i] = (uint16_t)moei_int_exp2((uint32_t)((int32_t)max - z[i]), bits);
        sum += e[i];
    }
    return sum;
}

/* An insertion sort. A new element moves up only past smaller keys, so of equal keys the lower
   index stays in front. */
static size_t moei_int_top_k(size_t n, const int32_t *key, size_t k, int16_t *index) {
    size_t i, taken = 0;
    for (i = 0; i < n && k > 0; i++) {
        size_t at;
        if (taken == k && key[i] <= key[index[k - 1]]) continue;
        at = taken < k ? taken++ : k - 1;
        for (; at > 0 && key[i] > key[index[at - 1]]; at--) index[at] = index[at - 1];
        index[at] = (int16_t)i;
    }
    return taken;
}

#if !defined(MOE_NO_FLOAT) && !MOE_REAL_IS_DOUBLE
/* ---- operations of float models ---- */

MOEI_TOOL float *moei_float_weights(int16_t *choices, int most) {
    return (float *)(void *)(choices + (most + 2) / 2 * 2);
}

/* What an operation works on. */
typedef struct moei_float_view {
    const float *x, *z, *c;
    float *y, *w; /* w: weights of the choices */
    int16_t *choices;
    int n, k;
} moei_float_view;

MOEI_INLINE moei_float_view moei_float_see(const moei_int_op *op, const moei_int_run *run) {
    moei_float_view v;
    v.x = (const float *)(const void *)(run->vectors + op->in);
    v.c = (const float *)(const void *)(run->base + op->at);
    v.choices = run->vectors + op->other;
    v.z = (const float *)(const void *)v.choices;
    v.w = moei_float_weights(v.choices, op->shape.low);
    v.y = (float *)(void *)(run->vectors + op->out);
    v.n = op->shape.n;
    v.k = op->shape.k;
    return v;
}

/* y = W x + b, or y += *share (W x + b). Four rows read x together. */
static void moei_float_product(const moei_int_op *op, const moei_int_run *run, const float *share) {
    const moei_float_view v = moei_float_see(op, run);
    const float *const end = v.x + v.k;
    const float *b = v.c, *w = v.c + v.n;
    float *y = v.y, sum[4];
    int n, rows, i;
    for (n = v.n; n > 0; n -= rows) {
        const float *x = v.x, *w1 = w + v.k;
        sum[0] = b[0];
        rows = n < 4 ? 1 : 4;
        if (rows == 4) {
            const float *w2 = w1 + v.k, *w3 = w2 + v.k;
            float s0 = b[0], s1 = b[1];
            float s2 = b[2], s3 = b[3];
            while (x != end) {
                const float a = *x++;
                s0 += *w++ * a;
                s1 += *w1++ * a;
                s2 += *w2++ * a;
                s3 += *w3++ * a;
            }
            sum[0] = s0;
            sum[1] = s1;
            sum[2] = s2;
            sum[3] = s3;
            w = w3;
        } else
            while (x != end) sum[0] += *w++ * *x++;
        for (i = 0; i < rows; i++, b++, y++) *y = share != NULL ? *y + *share * sum[i] : sum[i];
    }
}

void moei_float_op_product(const moei_int_op *op, moei_int_run *run) { moei_float_product(op, run, NULL); }
void moei_float_op_product_add(const moei_int_op *op, moei_int_run *run) { moei_float_product(op, run, &run->share); }

static void moei_float_each(const moei_int_op *op, moei_int_run *run, float (*f)(float x)) {
    const moei_float_view v = moei_float_see(op, run);
    int i;
    for (i = 0; i < v.n; i++) v.y[i] = f(v.x[i]);
}

#define MOEI_FLOAT_ACT(value, name, act, backward) \
    void moei_float_op_##value(const moei_int_op *op, moei_int_run *run) { moei_float_each(op, run, act); }
MOE_ACTS(MOEI_FLOAT_ACT)
#undef MOEI_FLOAT_ACT

static float moei_sqrt_softplus(float x) { return MOEI_F(sqrt)(moei_softplus(x)); }
void moei_float_op_sqrt_softplus(const moei_int_op *op, moei_int_run *run) {
    moei_float_each(op, run, moei_sqrt_softplus);
}

#define MOEI_FLOAT_LOOP(name, count, out, value) \
    void moei_float_op_##name(const moei_int_op *op, moei_int_run *run) { \
        const moei_float_view v = moei_float_see(op, run); \
        int i; \
        for (i = 0; i < (count); i++) (out)[i] = value; \
    }
MOEI_FLOAT_LOOP(multiply, v.n, v.y, v.x[i] * v.z[i])
MOEI_FLOAT_LOOP(add, v.n, v.y, v.x[i] + v.z[i])
MOEI_FLOAT_LOOP(weigh, v.choices[0], v.w, v.x[v.choices[1 + i]])
MOEI_FLOAT_LOOP(weigh_scale, v.choices[0], v.w, v.w[i] * v.c[v.choices[1 + i]])
#undef MOEI_FLOAT_LOOP

void moei_float_op_layer_norm(const moei_int_op *op, moei_int_run *run) {
    const moei_float_view v = moei_float_see(op, run);
    moe_layer_norm((size_t)v.n, v.x, v.c + 1, v.c + 1 + v.n, v.c[0], v.y, NULL, NULL);
}

void moei_float_op_rms_norm(const moei_int_op *op, moei_int_run *run) {
    const moei_float_view v = moei_float_see(op, run);
    float scale = 0;
    int i;
    for (i = 0; i < v.n; i++) scale += v.x[i] * v.x[i];
    scale = 1 / MOEI_F(sqrt)(scale / (float)v.n + v.c[0]);
    for (i = 0; i < v.n; i++) v.y[i] = v.x[i] * scale * v.c[1 + i] + v.c[1 + v.n + i];
}

void moei_float_op_row(const moei_int_op *op, moei_int_run *run) {
    const moei_float_view v = moei_float_see(op, run);
    const uint32_t r = op->index == 0 ? (uint32_t)run->token : op->index == 1 ? run->place : 0;
    if (r >= op->shape.k) run->status = MOE_ERR_ARGUMENT;
    else memcpy(v.y, v.c + (size_t)r * op->shape.n, op->shape.n * sizeof(float));
}

void moei_float_op_apply_weight(const moei_int_op *op, moei_int_run *run) {
    const moei_float_view v = moei_float_see(op, run);
    int i;
    for (i = 0; i < v.n; i++) v.y[i] = run->share * v.x[i];
    run->share = 1;
}

void moei_float_op_set_weight(const moei_int_op *op, moei_int_run *run) { run->share = *moei_float_see(op, run).x; }

void moei_float_op_add_rest(const moei_int_op *op, moei_int_run *run) {
    const moei_float_view v = moei_float_see(op, run);
    float rest = 1;
    int i;
    for (i = 0; i < v.choices[0]; i++) rest -= v.w[i];
    for (i = 0; i < v.n; i++) v.y[i] += rest * v.x[i];
}

void moei_float_op_softmax(const moei_int_op *op, moei_int_run *run) {
    const moei_float_view v = moei_float_see(op, run);
    moei_softmax_c((size_t)v.n, v.x, v.c[0], v.y);
}

void moei_float_op_weigh_sum(const moei_int_op *op, moei_int_run *run) {
    const moei_float_view v = moei_float_see(op, run);
    float sum = 0;
    int i;
    for (i = 0; i < v.choices[0]; i++) sum += v.w[i];
    for (i = 0; i < v.choices[0]; i++) v.w[i] = sum < 0 || sum > 0 ? v.w[i] / sum : 0;
}

void moei_float_op_weigh_softmax(const moei_int_op *op, moei_int_run *run) {
    const moei_float_view v = moei_float_see(op, run);
    moei_softmax_c((size_t)v.choices[0], v.w, 1, v.w);
}
#endif

#ifdef __cplusplus
}
#endif

#endif /* MOE_IMPLEMENTATION */
