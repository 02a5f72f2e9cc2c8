/* The exported model in the firmware (tests/port/device.c): DEVICE_MODEL is the header,
   DEVICE_FLOAT 1 for a model with float weights. With DEVICE_NO_MODEL nothing of the library, with
   DEVICE_hang or DEVICE_fault what must be noticed. DEVICE_WHOLE: all that the library has for
   inference is compiled, as a firmware with several kinds of models would. */

#include "device.h"

#ifdef DEVICE_NO_MODEL

void device_pixel(unsigned place, unsigned gray) {
    (void)place;
    (void)gray;
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

#define MOE_IMPLEMENTATION
#if DEVICE_FLOAT || defined(DEVICE_WHOLE)
#define MOE_NO_TRAIN
#define MOE_NO_STDIO
#define MOE_NO_MALLOC
#else
#define MOE_NO_FLOAT
#endif
#include DEVICE_MODEL

#if DEVICE_FLOAT
typedef float device_level;
typedef float device_value;
#define GRAY(value) ((value) / 16.0f)
#else
typedef int8_t device_level;
typedef int16_t device_value;
/* DIGITS_INPUT_SCALE is 1 / 127, as white is 1. Division by it would be rounded in the precision
   that a machine has: not everywhere the same. */
#define GRAY(value) ((127 * (value) + 8) / 16)
#endif

/* They can be constants. */
extern const float device_scales[2];
const float device_scales[2] = {DIGITS_INPUT_SCALE, DIGITS_OUTPUT_SCALE};

static const device_level levels[17] = {GRAY(0),  GRAY(1),  GRAY(2),  GRAY(3),  GRAY(4),  GRAY(5),
                                        GRAY(6),  GRAY(7),  GRAY(8),  GRAY(9),  GRAY(10), GRAY(11),
                                        GRAY(12), GRAY(13), GRAY(14), GRAY(15), GRAY(16)};
static device_level input[DIGITS_INPUTS];
static device_value output[DIGITS_OUTPUTS];
static unsigned char scratch[DIGITS_SCRATCH];

void device_pixel(unsigned place, unsigned gray) { input[place] = levels[gray]; }

int device_infer(void) { return (int)moe_infer(&digits, NULL, input, output, scratch, sizeof scratch); }

static uint32_t bits(device_value value) {
#if DEVICE_FLOAT
    uint32_t all;
    memcpy(&all, &value, sizeof all);
    return all;
#else
    return (uint16_t)value;
#endif
}

void device_read(device_answer *answer) {
    moe_choice choices[DEVICE_MOST_CHOSEN];
    size_t i, count = 0;
    answer->best = 0;
    answer->width = 2 * sizeof(device_value);
    for (i = 0; i < DEVICE_OUTPUTS; i++) {
        answer->outputs[i] = bits(output[i]);
        if (output[i] > output[answer->best]) answer->best = (uint8_t)i;
    }
    if (moe_infer_choices(&digits, 0, scratch, choices, DEVICE_MOST_CHOSEN, &count) != MOE_OK) count = 0;
    answer->chosen = (uint8_t)count;
    for (i = 0; i < count && i < DEVICE_MOST_CHOSEN; i++) {
        answer->experts[i] = (uint8_t)choices[i].expert;
        answer->weights[i] = (uint16_t)choices[i].weight;
    }
}

unsigned long device_products(void) { return (unsigned long)digits.multiplications; }

#endif
