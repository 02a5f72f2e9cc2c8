/* The firmware of the device targets (tests/port/devices.sh): runs a model
   (tests/port/devices/model.c) on held-out digits and writes what it answered, one line per digit,
   which the script compares with the host's lines:

     digit 07 is 3 answer 3 outputs 0012 ffee ... experts 2:5b1f 6:24e0

   then "stack N", the bytes of stack that an inference took at most, "products N" and "end". It
   writes without the standard library, so that nothing of that is in the code that is measured: by
   semihosting (Cortex-M and RISC-V in QEMU), by the UART (AVR in simavr). Everywhere else it is an
   ordinary program. The instructions between device_begin and device_end are counted from
   outside. */

#include "devices/device.h"
#include "device_digits.h" /* made by tests/port/devices/export.c: device_pixels and device_labels, in flash */

/* ---- the board: board_write, board_end, and where the stack can be measured board_stack ---- */

#if defined(__ARM_ARCH_PROFILE) && __ARM_ARCH_PROFILE == 'M'
#define BOARD_SEMIHOSTING

static int semihost(int operation, const void *argument) {
    register int r0 __asm__("r0") = operation;
    register const void *r1 __asm__("r1") = argument;
    __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
    return r0;
}

static uintptr_t board_stack(void) {
    uintptr_t sp;
    __asm__ volatile("mov %0, sp" : "=r"(sp));
    return sp;
}

#ifdef DEVICE_ALIGNED
/* Configuration and control register: an access that is not aligned is a fault from now on. */
#define BOARD_BEGIN() (*(volatile uint32_t *)0xe000ed14u |= 1u << 3)
#endif

/* picolibc's vector table leads here; without it a fault would be a hang. */
void arm_hardfault_isr(void);

#elif defined(__riscv) && __riscv_xlen == 32
#define BOARD_SEMIHOSTING

static int semihost(int operation, const void *argument) {
    register int a0 __asm__("a0") = operation;
    register const void *a1 __asm__("a1") = argument;
    /* These three together are the call: see tests/port/devices/rv32.c, which starts the
       program. */
    __asm__ volatile(".option push\n"
                     ".option norvc\n"
                     ".balign 16\n"
                     "slli x0, x0, 0x1f\n"
                     "ebreak\n"
                     "srai x0, x0, 7\n"
                     ".option pop"
                     : "+r"(a0)
                     : "r"(a1)
                     : "memory");
    return a0;
}

static uintptr_t board_stack(void) {
    uintptr_t sp;
    __asm__ volatile("mv %0, sp" : "=r"(sp));
    return sp;
}

#elif defined(__AVR__)
#include <avr/interrupt.h>
#include <avr/io.h>
#include <avr/sleep.h>

static void board_write(const char *text) {
    UCSR0B = 1 << TXEN0;
    for (; *text != 0; text++) {
        while ((UCSR0A & (1 << UDRE0)) == 0) {
        }
        UDR0 = (uint8_t)*text;
    }
}

/* Asleep with interrupts off is what ends the simulator, which takes its exit status from this
   register. */
static void board_end(int status) {
    GPIOR0 = (uint8_t)status;
    cli();
    sleep_mode();
}

static uintptr_t board_stack(void) { return SP + 1u; }

#else
#include <stdio.h>
#include <stdlib.h>
#define BOARD_HOSTED

static void board_write(const char *text) { fputs(text, stdout); }
static void board_end(int status) { exit(status); }
#endif

#ifdef BOARD_SEMIHOSTING
enum { SYS_WRITE0 = 0x04, SYS_EXIT = 0x18, EXIT_GOOD = 0x20026, EXIT_BAD = 0x20023 };

static void board_write(const char *text) { semihost(SYS_WRITE0, text); }

/* The second argument of this call is a number. */
static void board_end(int status) {
    for (;;) semihost(SYS_EXIT, (const void *)(uintptr_t)(status == 0 ? EXIT_GOOD : EXIT_BAD));
}

#ifdef __arm__
void arm_hardfault_isr(void) {
    board_write("fault\n");
    board_end(1);
}
#endif
#endif

/* ---- text ---- */

static char line[240];
static unsigned length;

static void put(const char *text) {
    while (*text != 0) line[length++] = *text++;
}

static void put_hex(uint32_t value, unsigned digits) {
    while (digits-- > 0) line[length++] = "0123456789abcdef"[value >> (4 * digits) & 15];
}

/* By subtraction: a division would bring in a function that the model may need as well. */
static void put_decimal(uint32_t value, unsigned least) {
    static const uint32_t powers[] = {100000, 10000, 1000, 100, 10, 1};
    unsigned i, started = 0;
    for (i = 0; i < 6; i++) {
        char c = '0';
        for (; value >= powers[i]; value -= powers[i]) c++;
        started |= (unsigned)(c > '0') | (unsigned)(6 - i <= least);
        if (started) line[length++] = c;
    }
}

static void put_line(void) {
    put("\n");
    line[length] = 0;
    board_write(line);
    length = 0;
}

/* ---- what is measured ---- */

#ifdef BOARD_HOSTED
static unsigned stack_peak;

static int measured(void) { return device_infer(); }
#else
/* AVR's and microbit's RAM have room for no more. */
enum { PAINTED = DEVICE_FLOAT ? 8192 : 3072, PAINT = 0xa5 };

static unsigned stack_peak;

void device_begin(void);
void device_end(void);

void __attribute__((noinline, used)) device_begin(void) { __asm__ volatile("" ::: "memory"); }
void __attribute__((noinline, used)) device_end(void) { __asm__ volatile("" ::: "memory"); }

/* Paints the unused stack; what is no longer painted afterwards was used. No interrupt is on, so
   nothing else is below the stack pointer. */
static int __attribute__((noinline)) measured(void) {
    volatile unsigned char *const top = (volatile unsigned char *)board_stack();
    volatile unsigned char *const bottom = top - PAINTED;
    volatile unsigned char *p;
    unsigned used;
    int status;
    for (p = bottom; p < top; p++) *p = PAINT;
    device_begin();
    status = device_infer();
    device_end();
    for (p = bottom; p < top && *p == PAINT; p++) {
    }
    used = (unsigned)(top - p);
    if (used == PAINTED) {
        board_write("the stack is deeper than what was painted\n");
        board_end(1);
    }
    if (used > stack_peak) stack_peak = used;
    return status;
}
#endif

/* ---- the digits ---- */

static void load(unsigned digit) {
    unsigned i;
    for (i = 0; i < DEVICE_PIXELS; i++) device_pixel(i, DEVICE_FLASH_BYTE(&device_pixels[digit][i]));
}

static void put_answer(unsigned digit) {
    device_answer answer;
    unsigned i;
    device_read(&answer);
    put("digit ");
    put_decimal(digit, 2);
    put(" is ");
    put_decimal(DEVICE_FLASH_BYTE(&device_labels[digit]), 1);
    put(" answer ");
    put_decimal(answer.best, 1);
    put(" outputs");
    for (i = 0; i < DEVICE_OUTPUTS; i++) {
        put(" ");
        put_hex(answer.outputs[i], answer.width);
    }
    put(" experts");
    for (i = 0; i < answer.chosen; i++) {
        put(" ");
        put_decimal(answer.experts[i], 1);
        put(":");
        put_hex(answer.weights[i], 4);
    }
    put_line();
}

static void put_number(const char *name, unsigned long value) {
    put(name);
    put_decimal((uint32_t)value, 1);
    put_line();
}

int main(void) {
    unsigned digit;
#ifdef BOARD_BEGIN
    BOARD_BEGIN();
#endif
    for (digit = 0; digit < DEVICE_DIGITS; digit++) {
        int status;
        load(digit);
        status = measured();
        if (status != 0) {
            put_number("status ", (unsigned long)status);
            board_end(1);
        }
        put_answer(digit);
    }
    put_number("stack ", stack_peak);
    put_number("products ", device_products());
    board_write("end\n");
    board_end(0);
    return 0;
}
