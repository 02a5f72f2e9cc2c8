/* texts.h - natural text: not here yet. */
#ifndef BENCH_TEXTS_H
#define BENCH_TEXTS_H

static uint64_t texts_checksum(int words) { return (uint64_t)(words < 0); }
static int texts_read(int words, const char *train, const char *test) { return words < 0 && train == test; }

static moe_status run_text(const job *j, found *f, moe_error *error) {
    (void)error;
    return j != NULL && f != NULL ? MOE_ERR_UNSUPPORTED : MOE_ERR_ARGUMENT;
}

static void texts_free(void) {}

#endif
