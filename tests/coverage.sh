#!/bin/sh
# Measures which lines and branches of the three headers the tests reach: sh tests/coverage.sh [-v] [WORD], as tests/headers.sh. Needs gcc and
# python3; kernels of aarch64 are taken in with gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user.
# Every line that no program reaches must stand in tests/uncovered.txt with a reason, and the bars at the end of this file must hold.
# COVERAGE=file keeps all that was counted: python3 tests/coverage.py show FILE prints the lines of which something was not reached.
#
# -Og, with nothing put into others but what the headers say must be: the kernels are copies of one another whose sizes are constants, and a branch that
# a constant decides is none in the copy. Programs of public names share one object of the library; the others have it inside.

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

options='-std=c99 -Og -fno-inline-small-functions --coverage'
headers='moe_kernels.h moe_routers.h moe.h'

# The programs that add something: the slowest first. What plain C needs alone is compiled without vectors.
plan() {
    cat <<'PLAN'
linked fuzz_config 40 7
linked classic
linked routers
linked int_sequences
inside failures -DMOE_NO_SIMD
crossed kernels few
crossed quant slow
linked parallel
linked state
linked training
linked attention
linked robust few steps=200
linked layer
inside small -DMOE_NO_SIMD
inside kernels - few
inside int_scores -DMOE_NO_SIMD few
inside models -DMOE_NO_SIMD few
inside quant - slow
inside files -DMOE_NO_SIMD slow
inside internals -
printed
linked net
linked golden tests/golden
linked metrics
linked int_routers few
linked integers
alone gathered
alone listed
PLAN
    for header in $headers; do echo "alone high_enough $header"; done
}

# Kernels of AVX-512 where no processor runs them are left out of the count.
prepare() {
    CC=gcc
    setup_stb_flag "$CC"
    vectors=
    grep -q avx512_vnni /proc/cpuinfo 2>/dev/null || vectors=-DMOE_NO_AVX512
    [ -z "$vectors" ] || echo 'note: no AVX-512 here: its kernels are not counted'
    mkdir "$prepared/objects" || return
    printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n' >"$prepared/library.c"
    instrumented "$prepared/library.c" "$prepared/objects/library.o"
}

instrumented() { # source object options...
    source=$1 object=$2
    shift 2
    # shellcheck disable=SC2086
    run gcc $options $vectors -I"$root" ${stb_flag:+-I"$stb_flag"} "$@" -c "$source" -o "$object"
}

# What a program counts goes into $prepared/objects when it ends. It may find tests/ and the headers here, as from tests/run.
counted() { # runner-or-nothing arguments...
    ln -s "$root/tests" "$root/examples" .
    runner=$1
    shift
    # shellcheck disable=SC2086
    timeout "${TEST_SECONDS:-900}" $runner ./program "$@" >out 2>err && tail -n 1 out | grep -q '^[1-9][0-9]* passed, 0 failed' && return 0
    tail -n 20 out
    cat err
    return 1
}

linked() { # name arguments...
    name=$1
    shift
    # shellcheck disable=SC2086
    run gcc -std=c99 -O1 -DTEST_LINKED -I"$root" ${stb_flag:+-I"$stb_flag"} -c "$root/tests/$name.c" -o program.o &&
        run gcc program.o "$prepared/objects/library.o" --coverage -o program -lm && counted '' "$@"
}

inside() { # name option-or-- arguments...
    name=$1 option=$2
    shift 2
    [ "$option" != - ] || option=
    # shellcheck disable=SC2086
    instrumented "$root/tests/$name.c" "$prepared/objects/$name.o" $option && run gcc "$prepared/objects/$name.o" --coverage -o program -lm && counted '' "$@"
}

# Nets as constants: a program that prints them, and one that compares them (tests/export_float.sh).
printed() {
    instrumented "$root/tests/export_float.c" "$prepared/objects/print.o" -DMOE_NO_SIMD && run gcc "$prepared/objects/print.o" --coverage -o print -lm &&
        ./print few >nets.h &&
        instrumented "$root/tests/export_float.c" "$prepared/objects/nets.o" -DMOE_NO_SIMD -DFEW "-DNETS=\"$PWD/nets.h\"" &&
        run gcc "$prepared/objects/nets.o" --coverage -o program -lm && counted ''
}

crossed() { # name arguments...
    name=$1
    shift
    needs aarch64-linux-gnu-gcc
    needs aarch64-linux-gnu-gcov
    needs qemu-aarch64
    needs_to_link aarch64-linux-gnu-gcc
    mkdir -p "$prepared/crossed"
    # shellcheck disable=SC2086
    run aarch64-linux-gnu-gcc $options -I"$root" ${stb_flag:+-I"$stb_flag"} -c "$root/tests/$name.c" -o "$prepared/crossed/$name.o" &&
        run aarch64-linux-gnu-gcc "$prepared/crossed/$name.o" --coverage -static -o program -lm && counted 'qemu-aarch64 -cpu max' "$@"
}

# ---- what was counted ----

gathered() {
    set -- "gcov=$prepared/objects"
    [ ! -d "$prepared/crossed" ] || set -- "$@" "aarch64-linux-gnu-gcov=$prepared/crossed"
    run python3 "$root/tests/coverage.py" gather "$prepared/counts" "$root" "$@" || return
    [ -z "${COVERAGE:-}" ] || (cd "$caller" && cp "$prepared/counts" "$COVERAGE")
}

high_enough() { python3 "$root/tests/coverage.py" judge "$prepared/counts" "$1" $bars; } # header

listed() { python3 "$root/tests/coverage.py" listed "$prepared/counts" "$root/tests/uncovered.txt"; }

bars='99 95' # percent of lines and branches that each header must reach

run_checks "$@"
