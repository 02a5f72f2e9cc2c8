/* eva.c - an entry for Frama-C's Eva: the file reader on every file of SIZE bytes.
   tests/quality/static.sh runs it; no program.

   Eva follows ranges of values, so one run stands for all contents and all header lengths. The
   bytes fill their array exactly: reading one byte beyond the file is an alarm. The header's
   functions are those of freestanding builds, so that none is an unknown function of a C
   library. */

#define MOE_NO_TRAIN
#define MOE_NO_QUANT
#define MOE_NO_SIMD
#define MOE_IMPLEMENTATION
#include "moe.h"
#include "__fc_builtin.h"

static unsigned char bytes[SIZE > 0 ? SIZE : 1];

int main(void) {
    moe_file file;
    size_t i;
    for (i = 0; i < SIZE; i++) bytes[i] = (unsigned char)Frama_C_interval(0, 255);
    return moe_file_open(&file, bytes, SIZE, NULL) == MOE_OK;
}
