/* A test program on the ATmega2560: standard output is UART 0. -DPROGRAM='"integers.c"' */

#define main program_main
#include PROGRAM
#undef main

#include <avr/interrupt.h>
#include <avr/io.h>
#include <avr/sleep.h>
#include <stdio.h>

static int send(char c, FILE *file) {
    (void)file;
    while ((UCSR0A & (1 << UDRE0)) == 0) {
    }
    UDR0 = (uint8_t)c;
    return 0;
}

static FILE uart = FDEV_SETUP_STREAM(send, NULL, _FDEV_SETUP_WRITE);

int main(void) {
    UCSR0B = 1 << TXEN0;
    stdout = stderr = &uart;
    /* With arguments or without: they are passed in registers. */
    GPIOR0 = (uint8_t)((int (*)(int, char **))program_main)(0, NULL);
    cli();
    sleep_mode();
    return 0;
}
