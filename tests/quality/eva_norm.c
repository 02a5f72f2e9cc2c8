/* eva_norm.c - proves by trying the one thing that eva_infer.c takes for granted: that
   |v_p| <= 2^(25 + e) in moei_int_op_norm, where e is already less by 7 + factor, for up to 8 codes
   within +-127. tests/quality/static.sh compiles it with a copy of moe.h that calls bound() for
   each v_p.

   v_p depends on x_p and on the sum of the other codes. e never falls when d grows (eva_infer.c
   proves it), and d grows with eps and with the squares of the others. So for each place, code and
   sum of the others one input stands for all: the others' squares sum to the least that they can,
   found number by number, and eps is 0. */

#include <stdio.h>

static unsigned long cases, beyond;

static void bound(int holds) {
    cases++;
    beyond += !holds;
}

#define MOE_NO_FLOAT
#define MOE_IMPLEMENTATION
#include "moe.h"

enum { D = 8, MOST = 127, SUM = MOST * (D - 1), NEVER = 1 << 30 };

/* The least sum of squares of k codes with the sum s - SUM; the last of these codes. */
static int least[D][2 * SUM + 1], last[D][2 * SUM + 1];

static void least_squares(void) {
    int k, s, x;
    for (s = 0; s <= 2 * SUM; s++) least[0][s] = s == SUM ? 0 : NEVER;
    for (k = 1; k < D; k++)
        for (s = 0; s <= 2 * SUM; s++) {
            least[k][s] = NEVER;
            for (x = -MOST; x <= MOST; x++) {
                if (s - x < 0 || s - x > 2 * SUM || least[k - 1][s - x] + x * x >= least[k][s]) continue;
                least[k][s] = least[k - 1][s - x] + x * x;
                last[k][s] = x;
            }
        }
}

/* All codes at place p beside others of the sum s - SUM, and all factors. Where no sum is
   subtracted, only their squares count: the least have the sum 0. */
static void norms(moei_int_op *op, moei_int_run *run, int p, int s) {
    const int norm = s == SUM ? 0 : 1;
    int16_t *x = run->vectors;
    int i, k, code;
    for (i = 0, k = op->shape.n - 1; i < op->shape.n; i++) {
        if (i == p) continue;
        x[i] = (int16_t)last[k--][s];
        s -= x[i];
    }
    for (code = -MOST; code <= MOST; code++)
        for (op->factor = 0; op->factor <= 8; op->factor++) {
            x[p] = (int16_t)code;
            for (i = norm; i < 2; i++) {
                op->index = (uint16_t)i;
                moei_int_op_norm(op, run);
            }
        }
}

int main(void) {
    static const unsigned char constants[8 + 2 * D + 4 * D];
    int16_t vectors[2 * D];
    moei_int_op op = {0};
    moei_int_run run = {0};
    int n, p, s;
    run.base = constants;
    run.vectors = vectors;
    op.out = D;
    least_squares();
    for (n = 1; n <= D && beyond == 0; n++) {
        op.shape.n = (uint16_t)n;
        for (p = 0; p < n; p++)
            for (s = SUM - MOST * (n - 1); s <= SUM + MOST * (n - 1); s++) norms(&op, &run, p, s);
    }
    printf("%lu numbers, %lu beyond the bound\n", cases, beyond);
    return cases == 0 || beyond > 0;
}
