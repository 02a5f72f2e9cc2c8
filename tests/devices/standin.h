#include <stdint.h>
#include <stddef.h>
#ifdef __AVR__
#include <avr/pgmspace.h>
#define MOE_FLASH __attribute__((progmem, aligned(4)))
#define BYTE(p) ((signed char)pgm_read_byte(p))
#else
#define MOE_FLASH __attribute__((aligned(4)))
#define BYTE(p) (*(p))
#endif
#if DEVICE_FLOAT
typedef float word; typedef float sum;
typedef struct moe_model { const float *weights; } moe_model;
typedef float in_;
#undef BYTE
#define BYTE(p) (*(p))
#else
typedef int16_t word; typedef int32_t sum; typedef int8_t in_;
typedef struct moe_model { const signed char *weights; } moe_model;
#endif
static unsigned standin_experts[2]; static uint16_t standin_weights[2];
static int moe_infer(const moe_model *m, const void *input, void *output, void *scratch, size_t size) {
    const in_ *x = (const in_ *)input; word *y = (word *)output; unsigned e, j, p;
    (void)scratch; if (size < 64) return 1;
    for (j = 0; j < 10; j++) y[j] = 0;
    standin_experts[0] = (unsigned)((int)x[20] & 7); standin_experts[1] = 7 - standin_experts[0];
    standin_weights[0] = 0x4000; standin_weights[1] = 0x3fff;
    for (e = 0; e < 2; e++) for (j = 0; j < 10; j++) {
        sum s = 0;
        for (p = 0; p < 64; p++) s += (sum)x[p] * (sum)BYTE(&m->weights[(standin_experts[e] * 10 + j) * 64 + p]);
        y[j] = (word)(y[j] + (word)(s / 128));
    }
    return 0;
}
