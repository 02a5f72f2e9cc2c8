/* Linked with a program on x86-64 Linux: with HIDE=avx512 or HIDE=avx2 in the environment CPUID
   answers as a processor does that lacks AVX-512, or AVX2 and FMA as well, while the program runs
   at full speed. The processor faults on CPUID (arch_prctl, Linux 4.12), and the handler answers in
   its place. Where the processor or a virtual machine cannot do that, the program ends with status
   77. */

#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { SET_CPUID = 0x1012 }; /* ARCH_SET_CPUID */

static int hides_avx2;

static long cpuid_works(unsigned long on) { return syscall(SYS_arch_prctl, SET_CPUID, on); }

static unsigned bits(unsigned a, unsigned b, unsigned c, unsigned d, unsigned e) {
    return 1u << a | 1u << b | 1u << c | 1u << d | 1u << e;
}

/* r: eax, ebx, ecx, edx of a leaf; Intel's manual, volume 2, CPUID. */
static void hide(unsigned leaf, unsigned part, unsigned *r) {
    if (leaf == 1 && hides_avx2) r[2] &= ~(1u << 12); /* FMA */
    if (leaf != 7) return;
    if (part == 0) {
        r[1] &= ~(bits(16, 17, 21, 26, 27) | bits(28, 30, 31, 31, 31)); /* F DQ IFMA PF ER, CD BW VL */
        r[2] &= ~(bits(1, 6, 11, 12, 14));                              /* VBMI VBMI2 VNNI BITALG VPOPCNTDQ */
        r[3] &= ~(bits(2, 3, 8, 23, 23));                               /* 4VNNIW 4FMAPS VP2INTERSECT FP16 */
        if (hides_avx2) r[1] &= ~(1u << 5);
    }
    if (part == 1) r[0] &= ~(hides_avx2 ? bits(4, 5, 5, 5, 5) : 1u << 5); /* AVX-VNNI, AVX512_BF16 */
}

static void answer(int signal_number, siginfo_t *info, void *context) {
    greg_t *g = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *code = (const unsigned char *)(size_t)g[REG_RIP];
    const unsigned leaf = (unsigned)g[REG_RAX], part = (unsigned)g[REG_RCX];
    unsigned r[4];
    (void)info;
    if (code[0] != 0x0f || code[1] != 0xa2) { /* no CPUID: a fault of the program, which comes again */
        signal(signal_number, SIG_DFL);
        return;
    }
    cpuid_works(1);
    __asm__ volatile("cpuid" : "=a"(r[0]), "=b"(r[1]), "=c"(r[2]), "=d"(r[3]) : "a"(leaf), "c"(part));
    cpuid_works(0);
    hide(leaf, part, r);
    g[REG_RAX] = r[0];
    g[REG_RBX] = r[1];
    g[REG_RCX] = r[2];
    g[REG_RDX] = r[3];
    g[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void) {
    const char *what = getenv("HIDE");
    struct sigaction action;
    if (what == NULL) return;
    hides_avx2 = strcmp(what, "avx2") == 0;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = answer;
    action.sa_flags = SA_SIGINFO;
    if (sigaction(SIGSEGV, &action, NULL) != 0 || cpuid_works(0) != 0) _exit(77);
}
