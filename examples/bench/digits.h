/* digits.h - digits: not here yet. */
#ifndef BENCH_DIGITS_H
#define BENCH_DIGITS_H

static uint64_t digits_checksum(void) { return 0; }
static int digits_read(void) { return 0; }

static moe_status run_digits(const job *j, found *f, moe_error *error) {
    (void)error;
    return j != NULL && f != NULL ? MOE_ERR_UNSUPPORTED : MOE_ERR_ARGUMENT;
}

#endif
