/* Between the firmware (tests/port/device.c) and the model that it runs
   (tests/port/devices/model.c): two units, so that a firmware linked without the model shows what
   the model, the library and what they need of the compiler's own library take of flash and RAM. */

#ifndef DEVICE_H
#define DEVICE_H

#include <stdint.h>

#ifdef __AVR__
#include <avr/pgmspace.h>
#define DEVICE_FLASH PROGMEM
#define DEVICE_FLASH_BYTE(place) pgm_read_byte(place)
#else
#define DEVICE_FLASH
#define DEVICE_FLASH_BYTE(place) (*(place))
#endif

enum { DEVICE_DIGITS = 50, DEVICE_PIXELS = 64, DEVICE_OUTPUTS = 10, DEVICE_MOST_CHOSEN = 8 };

/* What one inference gave. The bits of an output are those of an int16_t (4 hexadecimal digits) or
   of a float (8). */
typedef struct device_answer {
    uint8_t best;   /* the class with the largest output */
    uint8_t width;  /* hexadecimal digits of an output */
    uint8_t chosen; /* experts */
    uint8_t experts[DEVICE_MOST_CHOSEN];
    uint16_t weights[DEVICE_MOST_CHOSEN]; /* theirs, 32767 is 1 */
    uint32_t outputs[DEVICE_OUTPUTS];
} device_answer;

#ifdef __cplusplus
extern "C" {
#endif

/* One pixel of the next input: 0 to 16. */
void device_pixel(unsigned place, unsigned value);

/* The call that is measured: a moe_status. */
int device_infer(void);

void device_read(device_answer *answer);

/* Multiply-accumulates of one inference. */
unsigned long device_products(void);

#ifdef __cplusplus
}
#endif

#endif
