/* The smallest complete firmware: classifies one handwritten digit with an MoE network in flash.
   sh examples/mcu/run does all of this:
     sh examples/run microdigits -o digits.h
     arm-none-eabi-gcc -std=c99 -Os -mthumb -mcpu=cortex-m4 -ffunction-sections -fdata-sections \
         -I. --specs=picolibc.specs --crt0=hosted --oslib=semihost -Wl,--gc-sections \
         -Wl,-z,noexecstack -Wl,--defsym=__flash=0 -Wl,--defsym=__flash_size=0x40000 \
         -Wl,--defsym=__ram=0x20000000 -Wl,--defsym=__ram_size=0x4000 \
         examples/mcu/firmware.c -o firmware.elf
     qemu-system-arm -M mps2-an386 -nographic -monitor none -serial none \
         -semihosting-config enable=on,target=native -kernel firmware.elf

   The first line trains the network, quantizes it and writes it as a C header: digits.h.

   On your own board: remove the options with "semihost", pass your linker script, and rewrite
   show(), which prints a character.

   Memory. digits_weights and digits_experts are constants in flash. scratch is all the memory that
   the model uses, in RAM. Nothing is allocated; the stack needs a few hundred bytes (sh
   tests/port/devices.sh prints how many on each processor). On AVR constants stay in program memory
   and are read from there.

   Experts in external flash. moe_model_config.loader = 1 leaves the experts out of the header;
   moe_export_experts writes them as bytes, for the external flash from address 0 on. Then call
       static moe_status fetch(void *ctx, size_t at, size_t size, void *to) {
           return spi_flash_read(at, to, size) ? MOE_OK : MOE_ERR_IO;
       }
       static const moe_loader loader = {NULL, fetch};
       moe_infer(&digits, &loader, input, output, scratch, sizeof scratch);
   Only the chosen experts are fetched, one at a time, into a block of scratch that DIGITS_SCRATCH
   includes. */

#define MOE_IMPLEMENTATION
#define MOE_NO_FLOAT /* of moe.h only the integer models */
#include "digits.h"

/* A handwritten 9: 8 x 8 gray values from 0 to 16, a row of examples/data/digits.csv. */
#define INK(gray) ((int8_t)((gray) / (16 * DIGITS_INPUT_SCALE) + 0.5f))
#define ROW(a, b, c, d, e, f, g, h) INK(a), INK(b), INK(c), INK(d), INK(e), INK(f), INK(g), INK(h)
static const int8_t picture[DIGITS_INPUTS] = {
    ROW(0, 0, 2, 10, 7, 0, 0, 0),
    ROW(0, 0, 14, 16, 16, 15, 1, 0),
    ROW(0, 4, 16, 7, 3, 16, 7, 0),
    ROW(0, 5, 16, 10, 7, 16, 4, 0),
    ROW(0, 0, 5, 14, 14, 16, 4, 0),
    ROW(0, 0, 0, 0, 0, 16, 2, 0),
    ROW(0, 0, 4, 7, 7, 16, 2, 0),
    ROW(0, 0, 5, 12, 16, 12, 0, 0),
};

/* Writes one character to the debugger (semihosting), or to standard output on a host. */
#if defined(__arm__) && defined(__thumb__) && !defined(__linux__)
static void show(char c) {
    register int operation __asm__("r0") = 3; /* SYS_WRITEC */
    register const char *character __asm__("r1") = &c;
    __asm__ volatile("bkpt 0xab" : "+r"(operation) : "r"(character) : "memory");
}
#else
#include <stdio.h>
static void show(char c) { putchar(c); }
#endif

static void say(const char *text) {
    while (*text != '\0') show(*text++);
}

static void say_number(unsigned n) {
    if (n > 9) say_number(n / 10);
    show((char)('0' + n % 10));
}

int main(void) {
    static unsigned char scratch[DIGITS_SCRATCH];
    int16_t output[DIGITS_OUTPUTS];
    moe_choice choices[8];
    size_t count = 0, i, best = 0;
    if (moe_infer(&digits, NULL, picture, output, scratch, sizeof scratch) != MOE_OK) {
        say("the model cannot run\n");
        return 1;
    }
    for (i = 0; i < DIGITS_INPUTS; i++) {
        show(picture[i] > 80 ? '#' : picture[i] > 30 ? '+' : picture[i] > 0 ? '.' : ' ');
        if (i % 8 == 7) show('\n');
    }
    for (i = 0; i < DIGITS_OUTPUTS; i++)
        if (output[i] > output[best]) best = i;
    say("is a ");
    say_number((unsigned)best);
    say(", as read by");
    if (moe_infer_choices(&digits, 0, scratch, choices, 8, &count) != MOE_OK) return 1;
    for (i = 0; i < count && i < 8; i++) {
        say(i > 0 ? " and expert " : " expert ");
        say_number((unsigned)choices[i].expert);
        say(" (");
        say_number((unsigned)(choices[i].weight * 100 / 32768));
        say(" %)");
    }
    say("\n");
    return 0;
}
