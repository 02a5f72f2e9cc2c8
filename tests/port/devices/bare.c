/* What tests/port/portable.c has where there is no C library: x86-64 Linux, linked with -nostdlib
   -static (tests/port/portability.sh). It starts the program, writes its text and ends with its
   result; and it brings the three functions that compilers want of any program. */

#include <stddef.h>

void *memcpy(void *to, const void *from, size_t size);
void *memmove(void *to, const void *from, size_t size);
void *memset(void *to, int byte, size_t size);
void bare_say(const char *text);
int bare_main(void);
void bare_begin(void);

void *memcpy(void *to, const void *from, size_t size) { return memmove(to, from, size); }

void *memmove(void *to, const void *from, size_t size) {
    /* volatile: else compilers make a call of this function of the loop */
    volatile unsigned char *p = (volatile unsigned char *)to;
    const unsigned char *q = (const unsigned char *)from;
    size_t i;
    if ((size_t)to - (size_t)from >= size)
        for (i = 0; i < size; i++) p[i] = q[i];
    else
        while (size-- > 0) p[size] = q[size];
    return to;
}

void *memset(void *to, int byte, size_t size) {
    volatile unsigned char *p = (volatile unsigned char *)to;
    while (size-- > 0) *p++ = (unsigned char)byte;
    return to;
}

static long system_call(long number, long a, long b, long c) {
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return result;
}

enum { SYSTEM_WRITE = 1, SYSTEM_EXIT = 60 };

void bare_say(const char *text) {
    size_t length = 0;
    while (text[length] != '\0') length++;
    (void)system_call(SYSTEM_WRITE, 1, (long)(size_t)text, (long)length);
}

void bare_begin(void) {
    for (;;) (void)system_call(SYSTEM_EXIT, bare_main(), 0, 0);
}

__asm__(".globl _start\n"
        "_start:\n"
        "    xorl %ebp, %ebp\n"
        "    andq $-16, %rsp\n"
        "    call bare_begin\n");
