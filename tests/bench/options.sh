#!/bin/sh
# What each option costs or saves: bytes of the object with all of moe.h (text of `size`, -O2), and
# the time of one forward pass of a layer, both beside those without the option. The tables of
# options in the headers have their numbers from here.
#   sh tests/bench/options.sh [WORD]      WORD: only the options that have it in their line
# CC, CFLAGS: compiler and more options. Takes some minutes; times mean something on a machine that
# has nothing else to do.

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh
case ${1:-} in -h | --help) setup_help && exit ;; esac
setup_scratch
setup_compiler
setup_stb
setup_stb_flag "$CC"
cd "$scratch" || exit 1

options() {
    cat <<'LIST'
none
-DMOE_REAL=double
-DMOE_NO_SIMD
-DMOE_NO_AVX512
-DMOE_NO_QUANT
-DMOE_NO_STDIO
-DMOE_NO_MALLOC
-DMOE_NO_TRAIN
-DMOE_NO_TRAIN -DMOE_NO_SIMD
-DMOE_NO_TRAIN -DMOE_NO_SIMD -DMOE_NO_LIBM
-DMOE_NO_FLOAT
LIST
}

# A layer of 8 swiglu experts, 2 per token, width 256, hidden width 512, 32 tokens: microseconds of
# a call, the least of many.
cat >time.c <<'SOURCE'
#define MOE_IMPLEMENTATION
#include "moe.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int main(void) {
    enum { D = 256, N = 32 };
    static moe_real x[N * D], y[N * D];
    moe_layer_config config = {0};
    moe_layer layer;
    moe_layer_pass pass;
    moe_call call = {0};
    moe_parameter slot;
    moe_rng rng = {1};
    size_t bytes, i;
    int place, round;
    double best = 1e9;
    void *work;
    config.router.d_model = D;
    config.d_ff = 2 * D;
    if (moe_layer_init(&layer, &config, NULL) != MOE_OK) return 1;
    for (place = 0; place < MOE_LAYER_PARAMETER_COUNT; place++) {
        moe_real *w;
        if (moe_layer_parameter(&layer.config, place, &slot) != MOE_OK) continue;
        w = (moe_real *)malloc(slot.count * sizeof *w);
        for (i = 0; i < slot.count; i++) w[i] = moe_rng_normal(&rng) / 16;
        layer.tensors[place] = w;
    }
    for (i = 0; i < N * D; i++) x[i] = moe_rng_normal(&rng);
    if (moe_layer_work_size(&layer, N, 0, &bytes) != MOE_OK) return 1;
    work = malloc(bytes);
    call.n_tokens = N, call.x = x;
    for (round = 0; round < 300; round++) {
        clock_t start = clock();
        double spent;
        if (moe_layer_forward(&layer, &call, y, work, bytes, &pass) != MOE_OK) return 1;
        spent = (double)(clock() - start) * 1e6 / (double)CLOCKS_PER_SEC;
        if (spent < best) best = spent;
    }
    printf("%.0f\n", best);
    return 0;
}
SOURCE
for header in moe moe_routers moe_kernels; do printf '#define MOE_IMPLEMENTATION\n#include "%s.h"\n' $header \
    >$header.c; done

# shellcheck disable=SC2086
compile() { $CC -std=c99 -O2 ${CFLAGS:-} -I"$root" ${stb_flag:+-I"$stb_flag"} "$@"; }

echo "$($CC --version | sed -n 1p), -O2, $(uname -m)"
printf '%-46s %9s %9s %9s %6s\n' options text change 'us/call' ratio
options | awk -v word="${1:-}" 'NR == 1 || index($0, word)' | while read -r line; do
    set -- $line
    [ "$1" != none ] || set --
    compile "$@" -c moe.c -o moe.o || exit 1
    text=$(size moe.o | awk 'NR == 2 { print $1 }')
    spent=-
    case $line in
    *NO_FLOAT*) ;;
    *) compile "$@" time.c -o time -lm && spent=$(./time) ;;
    esac
    [ "$line" != none ] || { whole=$text && fast=$spent; }
    printf '%-46s %9d %+9d %9s %6s\n' "$line" "$text" $((text - whole)) "$spent" "$(awk -v a="$spent" \
        -v b="$fast" 'BEGIN { if (a == "-") print a; else printf "%.2f", a / b }')"
done
for header in moe_routers moe_kernels; do
    compile -c $header.c -o $header.o &&
        printf '%-46s %9d\n' "$header.h alone" "$(size $header.o | awk 'NR == 2 { print $1 }')"
done
