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

# The programs that add something, the slowest first: how, build, name, for `inside` an option or -, arguments. What plain C needs alone has no vectors.
plan() {
    cat <<'PLAN'
linked float classic
linked float routers
linked float fuzz_config 300 7
inside float small -DMOE_NO_SIMD
inside float failures -DMOE_NO_SIMD
linked float int_sequences
crossed kernels few
crossed quant slow
linked float parallel
linked float state
linked float training
linked float attention
linked double attention
linked float robust few steps=200
linked float ranks_nets few
linked float ranks few
linked float layer
inside float kernels - few
inside float int_scores -DMOE_NO_SIMD few
inside float models -DMOE_NO_SIMD few
inside float quant - slow
inside float files -DMOE_NO_SIMD slow
inside double files -DMOE_NO_SIMD slow
inside float left_out -
inside float internals -
printed
linked float edges
linked double edges
linked float net
linked float golden tests/golden
linked float metrics
linked float published
linked double published
linked float report
linked float int_routers few
linked float integers
alone gathered
alone listed
PLAN
    for header in $headers; do echo "alone high_enough $header"; done
}

# Kernels of AVX-512 where no processor runs them are left out of the count.
prepare() {
    CC=gcc
    needs python3
    setup_stb_flag "$CC"
    vectors=
    grep -q avx512_vnni /proc/cpuinfo 2>/dev/null || vectors=-DMOE_NO_AVX512
    [ -z "$vectors" ] || echo 'note: no AVX-512 here: its kernels are not counted'
    mkdir "$prepared/objects" || return
    printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n' >"$prepared/library.c"
    instrumented "$prepared/library.c" "$prepared/objects/library.float.o" &&
        instrumented "$prepared/library.c" "$prepared/objects/library.double.o" -DMOE_REAL=double
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

linked() { # build name arguments...
    build=$1 name=$2
    shift 2
    # shellcheck disable=SC2046
    run gcc -std=c99 -O1 -DTEST_LINKED $(real_option "$build") -I"$root" ${stb_flag:+-I"$stb_flag"} -c "$root/tests/$name.c" -o program.o &&
        run gcc program.o "$prepared/objects/library.$build.o" --coverage -o program -lm && counted '' "$@"
}

inside() { # build name option-or-- arguments...
    build=$1 name=$2 option=$3
    shift 3
    [ "$option" != - ] || option=
    # shellcheck disable=SC2046,SC2086
    instrumented "$root/tests/$name.c" "$prepared/objects/$name.$build.o" $option $(real_option "$build") &&
        run gcc "$prepared/objects/$name.$build.o" --coverage -o program -lm && counted '' "$@"
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
    [ -z "${COVERAGE:-}" ] || (cd -- "$caller" && cp "$prepared/counts" "$COVERAGE")
}

high_enough() { python3 "$root/tests/coverage.py" judge "$prepared/counts" "$1" $bars; } # header

listed() { python3 "$root/tests/coverage.py" listed "$prepared/counts" "$root/tests/uncovered.txt"; }

bars='99 95' # percent of lines and branches that each header must reach

run_checks "$@"
