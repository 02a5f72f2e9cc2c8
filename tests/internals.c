/* Tests private functions that no public call shows by themselves.
       cc -std=c99 -O2 -I. tests/internals.c -o internals -lm && ./internals
   All other programs may be linked with the library compiled elsewhere; this one has it inside. */

#define MOE_NO_SIMD
#define MOE_IMPLEMENTATION
#include "moe.h"

#include <math.h>
#include <stdio.h>

static long passed, failed;

#define CHECK(condition, what) check((condition) != 0, __LINE__, what)

static int check(int good, int line, const char *what) {
    if (good) passed++;
    else if (++failed <= 40) printf("internals.c:%d: %s\n", line, what);
    return good;
}

/* Names of tensors against patterns of groups. */
static void test_patterns(void) {
    static const struct {
        const char *pattern, *name;
        int fits;
    } cases[] = {{"0.weight", "0.weight", 1},   {"0.weight", "10.weight", 0}, {"*.weight", "10.weight", 1},   {"*", "x", 1},
                 {"*", "", 1},                  {"", "", 1},                  {"", "x", 0},                   {"**", "x", 1},
                 {"*.router.*", "2.router.weight", 1}, {"*.router.*", "2.routers", 0}, {"2.*", "2.", 1},      {"2.*", "12.bias", 0},
                 {"*ab*ab", "abxabab", 1},      {"*ab*ab", "ab", 0},          {"*a*b*c*", "xxaxxbxxcxx", 1},  {"*aab", "aaab", 1},
                 {"a*", "ba", 0},               {"a?b", "axb", 0}};
    size_t i;
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) CHECK(moei_fits_pattern(cases[i].pattern, cases[i].name) == cases[i].fits, cases[i].pattern);
}

/* The points of the integer form of softplus, g(t) = sqrt(log2(1 + t) / t), as the formula has them. */
static void test_points(void) {
    int i;
    for (i = 0; i <= 64; i++) {
        double t = i / 64.0, g = i == 0 ? sqrt(1 / log(2.0)) : sqrt(log(1 + t) / log(2.0) / t);
        CHECK(moei_flash_16(moei_ir_softplus + 2 * i) == (int)floor(16384 * g + 0.5), "a point of g");
    }
}

int main(void) {
    test_patterns();
    test_points();
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed > 0;
}
