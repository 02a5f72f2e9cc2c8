/* Runs a program for the ATmega2560 in libsimavr: avr PROGRAM FROM TO. What its UART 0 sends goes
   to standard output; the program ends by sleeping with interrupts off, GPIOR0 is then the exit
   status (100 and more: it crashed). FROM and TO are the addresses of two functions: standard error
   gets "count runs N sum N worst N cycles N" as from count.c, with the cycles of all runs.
     gcc -O2 avr.c -o avr -lsimavr -l:libelf.so.1 */

#include <simavr/avr_uart.h>
#include <simavr/sim_avr.h>
#include <simavr/sim_elf.h>
#include <simavr/sim_io.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GPIOR0 = 0x3e }; /* its place in the data memory */

/* The simulator's own messages would lie between the program's lines. */
static void silent(avr_t *avr, const int level, const char *format, va_list arguments) {
    (void)avr;
    if (level == LOG_ERROR) vfprintf(stderr, format, arguments);
}

static void sent(struct avr_irq_t *irq, uint32_t value, void *data) {
    (void)irq;
    (void)data;
    putchar((int)value);
}

static void connect(avr_t *avr) {
    uint32_t flags = 0;
    avr_ioctl(avr, AVR_IOCTL_UART_GET_FLAGS('0'), &flags);
    flags &= ~(uint32_t)AVR_UART_FLAG_STDIO; /* else the simulator prints it too, in colors */
    avr_ioctl(avr, AVR_IOCTL_UART_SET_FLAGS('0'), &flags);
    avr_irq_register_notify(avr_io_getirq(avr, AVR_IOCTL_UART_GETIRQ('0'), UART_IRQ_OUTPUT), sent, NULL);
}

static avr_t *load(const char *path) {
    static elf_firmware_t firmware;
    avr_t *avr;
    avr_global_logger_set(silent);
    if (elf_read_firmware(path, &firmware) != 0) return NULL;
    strcpy(firmware.mmcu, "atmega2560");
    firmware.frequency = 16000000;
    avr = avr_make_mcu_by_name(firmware.mmcu);
    if (avr == NULL) return NULL;
    avr_init(avr);
    avr_load_firmware(avr, &firmware);
    connect(avr);
    return avr;
}

int main(int argc, char **argv) {
    avr_t *avr = argc == 4 ? load(argv[1]) : NULL;
    unsigned long long total = 0, start = 0;
    unsigned long long cycle = 0, runs = 0;
    unsigned long long sum = 0, worst = 0;
    unsigned long long cycles = 0;
    avr_flashaddr_t from, to;
    int state = cpu_Running, inside = 0;
    if (avr == NULL) return 99;
    from = (avr_flashaddr_t)strtoul(argv[2], NULL, 0);
    to = (avr_flashaddr_t)strtoul(argv[3], NULL, 0);
    while (state != cpu_Done && state != cpu_Crashed) {
        if (avr->pc == from) {
            inside = 1;
            start = total;
            cycle = avr->cycle;
        }
        if (avr->pc == to && inside) {
            inside = 0;
            runs++;
            sum += total - start;
            cycles += avr->cycle - cycle;
            if (total - start > worst) worst = total - start;
        }
        state = avr_run(avr); /* one instruction */
        total++;
    }
    fprintf(stderr, "count runs %llu sum %llu worst %llu cycles %llu\n", runs, sum, worst, cycles);
    return state == cpu_Done ? avr->data[GPIOR0] : 100;
}
