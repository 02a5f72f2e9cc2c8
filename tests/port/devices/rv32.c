/* What a program on bare 32-bit RISC-V needs where there is no C library for it: the start, the
   memory functions that compilers call, and as much of printf as the test programs use. Text goes
   out by semihosting. The linker leaves out what is not called. */

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

void exit(int status);
void device_fault(void);
int printf(const char *format, ...);
int puts(const char *text);
int putchar(int c);
void *memcpy(void *to, const void *from, size_t size);
void *memmove(void *to, const void *from, size_t size);
void *memset(void *to, int value, size_t size);
int memcmp(const void *a, const void *b, size_t size);
int strcmp(const char *a, const char *b);
size_t strlen(const char *text);
int64_t __ashldi3(int64_t value, int bits);
int64_t __ashrdi3(int64_t value, int bits);
uint64_t __lshrdi3(uint64_t value, int bits);
uint64_t __udivdi3(uint64_t a, uint64_t b);
uint64_t __umoddi3(uint64_t a, uint64_t b);
int64_t __divdi3(int64_t a, int64_t b);
int64_t __moddi3(int64_t a, int64_t b);

/* QEMU has loaded data and cleared the rest. */
__asm__(".section .text.start, \"ax\", @progbits\n"
        ".globl _start\n"
        "_start:\n"
        ".option push\n"
        ".option norelax\n"
        "    la gp, __global_pointer$\n"
        ".option pop\n"
        ".option arch, +zicsr\n"
        "    la sp, device_stack\n"
        "    la t0, device_fault\n"
        "    csrw mtvec, t0\n"
        "    li a0, 0\n"
        "    li a1, 0\n"
        "    call main\n"
        "    call exit\n"
        ".previous\n");

/* These three instructions together are the call: none of them may be compressed or lie on another
   page. */
static int semihost(int operation, const void *argument) {
    register int a0 __asm__("a0") = operation;
    register const void *a1 __asm__("a1") = argument;
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

enum { SYS_WRITEC = 0x03, SYS_WRITE0 = 0x04, SYS_EXIT = 0x18, EXIT_GOOD = 0x20026, EXIT_BAD = 0x20023 };

void exit(int status) {
    for (;;) semihost(SYS_EXIT, (const void *)(uintptr_t)(status == 0 ? EXIT_GOOD : EXIT_BAD));
}

void __attribute__((aligned(4))) device_fault(void) {
    semihost(SYS_WRITE0, "fault\n");
    exit(1);
}

/* ---- memory: an empty statement in each loop, or the compiler sees the function in it and calls
   it ---- */

#define KEEP_LOOP __asm__ volatile("")

void *memcpy(void *to, const void *from, size_t size) {
    unsigned char *t = (unsigned char *)to;
    const unsigned char *f = (const unsigned char *)from;
    for (; size > 0; size--) {
        *t++ = *f++;
        KEEP_LOOP;
    }
    return to;
}

void *memmove(void *to, const void *from, size_t size) {
    unsigned char *t = (unsigned char *)to;
    const unsigned char *f = (const unsigned char *)from;
    if (t < f) return memcpy(to, from, size);
    while (size-- > 0) {
        t[size] = f[size];
        KEEP_LOOP;
    }
    return to;
}

void *memset(void *to, int value, size_t size) {
    unsigned char *t = (unsigned char *)to;
    for (; size > 0; size--) {
        *t++ = (unsigned char)value;
        KEEP_LOOP;
    }
    return to;
}

int memcmp(const void *a, const void *b, size_t size) {
    const unsigned char *x = (const unsigned char *)a, *y = (const unsigned char *)b;
    for (; size > 0; size--, x++, y++)
        if (*x != *y) return *x - *y;
    return 0;
}

int strcmp(const char *a, const char *b) {
    for (; *a != 0 && *a == *b; a++, b++) KEEP_LOOP;
    return (unsigned char)*a - (unsigned char)*b;
}

size_t strlen(const char *text) {
    size_t n = 0;
    for (; text[n] != 0; n++) KEEP_LOOP;
    return n;
}

/* ---- 64 bits: what gcc calls, as its own library here is for 64-bit processors ---- */

typedef union whole {
    uint64_t value;
    struct {
        uint32_t low, high;
    } half;
} whole;

int64_t __ashldi3(int64_t value, int bits) {
    whole x;
    x.value = (uint64_t)value;
    if (bits >= 32) {
        x.half.high = x.half.low << (bits - 32);
        x.half.low = 0;
    } else if (bits > 0) {
        x.half.high = x.half.high << bits | x.half.low >> (32 - bits);
        x.half.low <<= bits;
    }
    return (int64_t)x.value;
}

uint64_t __lshrdi3(uint64_t value, int bits) {
    whole x;
    x.value = value;
    if (bits >= 32) {
        x.half.low = x.half.high >> (bits - 32);
        x.half.high = 0;
    } else if (bits > 0) {
        x.half.low = x.half.low >> bits | x.half.high << (32 - bits);
        x.half.high >>= bits;
    }
    return x.value;
}

int64_t __ashrdi3(int64_t value, int bits) {
    return value < 0 ? (int64_t)~__lshrdi3(~(uint64_t)value, bits) : (int64_t)__lshrdi3((uint64_t)value, bits);
}

/* Bit by bit. */
static uint64_t divide(uint64_t a, uint64_t b, uint64_t *rest) {
    uint64_t quotient = 0, r = 0;
    int i;
    for (i = 0; i < 64; i++) {
        r = r << 1 | a >> 63;
        a <<= 1;
        quotient <<= 1;
        if (r >= b) {
            r -= b;
            quotient |= 1;
        }
    }
    *rest = r;
    return quotient;
}

uint64_t __udivdi3(uint64_t a, uint64_t b) {
    uint64_t rest;
    return divide(a, b, &rest);
}

uint64_t __umoddi3(uint64_t a, uint64_t b) {
    uint64_t rest;
    divide(a, b, &rest);
    return rest;
}

static uint64_t size_of(int64_t value) { return value < 0 ? 0 - (uint64_t)value : (uint64_t)value; }

int64_t __divdi3(int64_t a, int64_t b) {
    const uint64_t quotient = __udivdi3(size_of(a), size_of(b));
    return (int64_t)((a < 0) != (b < 0) ? 0 - quotient : quotient);
}

int64_t __moddi3(int64_t a, int64_t b) {
    const uint64_t rest = __umoddi3(size_of(a), size_of(b));
    return (int64_t)(a < 0 ? 0 - rest : rest);
}

/* ---- text ---- */

int putchar(int c) {
    const char byte = (char)c;
    semihost(SYS_WRITEC, &byte);
    return c;
}

static int put(const char *text) {
    semihost(SYS_WRITE0, text);
    return (int)strlen(text);
}

int puts(const char *text) { return put(text) + put("\n"); }

static int put_number(unsigned long value, unsigned base, int negative, int width, char fill) {
    char text[40], *p = text + sizeof text;
    *--p = 0;
    do *--p = "0123456789abcdef"[value % base];
    while ((value /= base) > 0);
    if (negative) *--p = '-';
    while (width > 30) width = 30;
    while (text + sizeof text - 1 - p < width) *--p = fill;
    return put(p);
}

/* %d %u %x, also of long and size_t, with a width that may begin with 0; %s %c %%. On this machine
   int and long are the same. */
int printf(const char *format, ...) {
    va_list arguments;
    int written = 0;
    va_start(arguments, format);
    for (; *format != 0; format++) {
        char fill = ' ';
        int width = 0;
        if (*format != '%') {
            putchar(*format);
            written++;
            continue;
        }
        format++;
        if (*format == '0') fill = *format++;
        while (*format >= '0' && *format <= '9') width = 10 * width + *format++ - '0';
        while (*format == 'l' || *format == 'z') format++;
        switch (*format) {
        case 'd': {
            const long value = va_arg(arguments, long);
            written +=
                put_number(value < 0 ? 0ul - (unsigned long)value : (unsigned long)value, 10, value < 0, width, fill);
            break;
        }
        case 'u':
            written += put_number(va_arg(arguments, unsigned long), 10, 0, width, fill);
            break;
        case 'x':
            written += put_number(va_arg(arguments, unsigned long), 16, 0, width, fill);
            break;
        case 's':
            written += put(va_arg(arguments, const char *));
            break;
        case 'c':
            putchar(va_arg(arguments, int));
            written++;
            break;
        case '%':
            putchar('%');
            written++;
            break;
        default: device_fault(); /* there is no more of printf */
        }
    }
    va_end(arguments);
    return written;
}
