#!/bin/sh
# Measures which lines and branches of the headers and extras the tests reach: sh
# tests/quality/coverage.sh [-v] [WORD], as tests/port/headers.sh. Needs gcc and python3; kernels of
# aarch64 are taken in with gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user. Every line
# that no program reaches must be counted with its function in tests/quality/uncovered.txt, under
# the reason, and the bars at the end of this file must hold. COVERAGE=file keeps all that was
# counted: python3 tests/quality/coverage.py show FILE prints the lines of which something was not
# reached. The checks of the test programs that these runs do not reach are counted too, and listed
# in tests/quality/unreached.txt (tests/quality/checks.py).
#
# -Og, with nothing put into others but what the headers say must be: the kernels are copies of one
# another whose sizes are constants, and a branch that a constant decides is none in the copy.
# Programs of public names share one object of the library, which has all that is counted. The
# others have inside what they use of it (MOE_STATIC); failures and the kernels of aarch64 have all.

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

options='-std=c99 -Og -fno-inline-small-functions --coverage'
headers="moe_kernels.h moe_routers.h moe.h $(sed -n 's|^#include "../examples/extras/\(.*\)".*|\1|p' tests/all.h)"

# The programs that add something, the slowest first: how, build, name, for `inside` an option or -,
# arguments. What plain C needs alone has no vectors. Of ranks, which are threads, other counts than
# atomic ones lose passes, and what gcov derives from them can become 0.
plan() {
    cat <<'PLAN'
linked float classic
linked float routers
linked float fuzz_config 500 7
linked float histories quick
inside float small -DMOE_NO_SIMD
inside float failures -DMOE_NO_SIMD
inside float int_sequences -DMOE_NO_SIMD
crossed kernels quick
crossed quant quick
linked float parallel
linked float state
linked float training
linked float attention
linked double attention
linked float forms
linked double forms
inside float robust -DMOE_NO_SIMD quick steps=200
inside float ranks_nets -fprofile-update=atomic quick
inside float ranks -fprofile-update=atomic quick
linked float layer
inside float kernels - quick
inside float int_scores -DMOE_NO_SIMD quick
inside float float_lists -DMOE_NO_SIMD
inside float inference -DMOE_NO_SIMD quick
inside float profile -DMOE_NO_SIMD
inside float quant - quick
inside float tokens -DMOE_NO_SIMD
inside float imported -DMOE_NO_SIMD
inside double imported -DMOE_NO_SIMD
inside float models -DMOE_NO_SIMD tests/golden/models tests/golden/shapes.py
inside float tokenizers -DMOE_NO_SIMD
inside float files -DMOE_NO_SIMD
inside double files -DMOE_NO_SIMD
inside float left_out -
inside float kept -
inside float internals -
printed
linked float edges
linked double edges
linked float net
linked float presets
linked float golden tests/golden
linked float checked quick
linked float metrics
linked float published
linked double published hands
linked float smooth
linked float report
inside float int_routers -DMOE_NO_SIMD quick
inside float integers -DMOE_NO_SIMD
linked float theory
linked float threads
alone gathered
alone listed
checks_seen
alone checks_reached
PLAN
    for header in $headers; do echo "alone high_enough $header"; done
}

# Kernels of AVX-512 where no processor runs them are left out of the count.
prepare() {
    CC=gcc
    setup_wants python3
    setup_stb_flag "$CC"
    vectors=
    grep -q avx512_vnni /proc/cpuinfo 2>/dev/null || vectors=-DMOE_NO_AVX512
    [ -z "$vectors" ] || echo 'note: no AVX-512 here: its kernels are not counted'
    mkdir "$prepared/objects" "$prepared/copies" || return
    printf '#define MOE_IMPLEMENTATION\n#include "tests/all.h"\n' >"$prepared/library.c"
    instrumented "$prepared/library.c" "$prepared/objects/library.float.o" &&
        instrumented "$prepared/library.c" "$prepared/objects/library.double.o" -DMOE_REAL=double
}

instrumented() { # source object options...
    source=$1 object=$2
    shift 2
    # shellcheck disable=SC2086
    run gcc $options $vectors -I"$root" ${stb_flag:+-I"$stb_flag"} "$@" -c "$source" -o "$object"
}

source_of() (cd "$root" && echo "$root/$(setup_source "$1")") # name

# Sets $copy to a copy of a program in which every check begins a line, and $folder to that of the
# program.
split() { # name
    folder=$(source_of "$1")
    copy=$prepared/copies/$1.c
    python3 "$root/tests/quality/checks.py" split "$folder" "$copy" || return
    folder=${folder%/*}
}

# What a program counts goes into $prepared/objects when it ends. It may find tests/ and the headers
# here, as from tests/run.
counted() { # runner-or-nothing arguments...
    ln -s "$root/tests" "$root/examples" .
    runner=$1
    shift
    # shellcheck disable=SC2086
    setup_limit "${TEST_SECONDS:-900}" $runner ./program "$@" >out 2>err &&
        tail -n 1 out | grep -q '^[1-9][0-9]* passed, 0 failed' && return 0
    tail -n 20 out
    cat err
    return 1
}

linked() { # build name arguments...
    build=$1 name=$2
    shift 2
    object=$prepared/objects/$name.$build.o
    split "$name" || return
    # shellcheck disable=SC2046
    run gcc -std=c99 -O0 --coverage -DTEST_LINKED $(real_option "$build") -iquote "$folder" -I"$root" \
        ${stb_flag:+-I"$stb_flag"} -c "$copy" -o "$object" &&
        run gcc "$object" "$prepared/objects/library.$build.o" --coverage -o program -lm && counted '' "$@"
}

used_of() { # name
    case $1 in
    failures | kernels) ;;
    *) echo -DMOE_STATIC ;;
    esac
}

inside() { # build name option-or-- arguments...
    build=$1 name=$2 option=$3
    shift 3
    [ "$option" != - ] || option=
    split "$name" || return
    # shellcheck disable=SC2046,SC2086
    instrumented "$copy" "$prepared/objects/$name.$build.o" -iquote "$folder" $option $(real_option "$build") \
        $(used_of "$name") &&
        run gcc "$prepared/objects/$name.$build.o" --coverage -o program -lm && counted '' "$@"
}

# Nets as constants: a program that prints them, and one that compares them
# (tests/port/export_float.sh).
printed() {
    instrumented "$root/tests/port/export_float.c" "$prepared/objects/print.o" -DMOE_NO_SIMD -DMOE_STATIC &&
        run gcc "$prepared/objects/print.o" --coverage -o print -lm &&
        ./print quick >nets.h &&
        instrumented "$root/tests/port/export_float.c" "$prepared/objects/nets.o" -DMOE_NO_SIMD -DMOE_STATIC -DQUICK \
        "-DNETS=\"$PWD/nets.h\"" &&
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
    # shellcheck disable=SC2046,SC2086
    run aarch64-linux-gnu-gcc $options -I"$root" ${stb_flag:+-I"$stb_flag"} $(used_of "$name") -c \
        "$(source_of "$name")" -o "$prepared/crossed/$name.o" &&
        run aarch64-linux-gnu-gcc "$prepared/crossed/$name.o" --coverage -static -o program -lm &&
        counted 'qemu-aarch64 -cpu max' "$@"
}

# ---- what was counted ----

# Only moe_kernels.h has code for aarch64. In the others that compiler puts some branches on another
# line of their statement than the native one, where they would be counted as branches of their own.
gathered() {
    set -- "gcov=$prepared/objects"
    [ ! -d "$prepared/crossed" ] || set -- "$@" "aarch64-linux-gnu-gcov=$prepared/crossed=moe_kernels.h"
    run python3 "$root/tests/quality/coverage.py" gather "$prepared/counts" "$@" || return
    [ -z "${COVERAGE:-}" ] || (cd -- "$caller" && cp "$prepared/counts" "$COVERAGE")
}

# shellcheck disable=SC2086
high_enough() { python3 "$root/tests/quality/coverage.py" judge "$prepared/counts" "$1" $bars; } # header

# A check that is never reached passes whatever the library does.
checks_seen() { python3 "$root/tests/quality/checks.py" self && python3 "$root/tests/quality/checks.py" same; }

checks_reached() {
    run python3 "$root/tests/quality/checks.py" reached "$prepared/objects" "$root/tests/quality/unreached.txt"
}

listed() { python3 "$root/tests/quality/coverage.py" listed "$prepared/counts" "$root/tests/quality/uncovered.txt"; }

bars='99 95' # percent of lines and branches that each header must reach

run_checks "$@"
