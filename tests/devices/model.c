/* The exported model in the firmware (tests/device.c), or nothing with DEVICE_NO_MODEL. */
#include "device.h"

#ifdef DEVICE_NO_MODEL

void device_pixel(unsigned place, unsigned value) {
    (void)place;
    (void)value;
}
int device_infer(void) {
#if defined(DEVICE_hang)
    static volatile int forever = 1;
    while (forever) {
    }
#elif defined(DEVICE_fault)
    __builtin_trap();
#endif
    return 0;
}
void device_read(device_answer *answer) {
    answer->best = answer->chosen = 0;
    answer->width = 4;
}
unsigned long device_products(void) { return 0; }

#else

#include DEVICE_MODEL

#if DEVICE_FLOAT
typedef float level;
typedef float value;
#else
typedef int8_t level;
typedef int16_t value;
#endif

static level input[DEVICE_PIXELS];
static value output[DEVICE_OUTPUTS];
static uint32_t scratch[(digits_scratch + 3) / 4];

void device_pixel(unsigned place, unsigned pixel) { input[place] = (level)(pixel * 7); }

int device_infer(void) { return moe_infer(&digits, input, output, scratch, sizeof scratch); }

void device_read(device_answer *answer) {
    unsigned i;
    answer->best = 0;
    answer->width = 2 * sizeof(value);
    answer->chosen = 2;
    for (i = 0; i < DEVICE_OUTPUTS; i++) {
#if DEVICE_FLOAT
        __builtin_memcpy(&answer->outputs[i], &output[i], 4);
#else
        answer->outputs[i] = (uint16_t)output[i];
#endif
        if (output[i] > output[answer->best]) answer->best = (uint8_t)i;
    }
    for (i = 0; i < 2; i++) {
        answer->experts[i] = (uint8_t)standin_experts[i];
        answer->weights[i] = standin_weights[i];
    }
}

unsigned long device_products(void) { return digits_products; }

#endif
