/* check.h - bench --check. */
#ifndef BENCH_CHECK_H
#define BENCH_CHECK_H

static int check_all(void) { return 0; }

#endif
