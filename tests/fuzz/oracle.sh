#!/bin/sh
# Random layers against a second interpreter: tests/fuzz/oracle.py draws compositions of all stages
# of a router, computes them by the formulas alone, and tests/golden/golden.c compares the library,
# in float and in double, with every table of kernels of this processor.
#   sh tests/fuzz/oracle.sh                the interpreter on the golden cases, then seeds 0 to 199
#   sh tests/fuzz/oracle.sh FIRST COUNT    so many seeds from FIRST on
# GOLDEN (../shared/golden): a folder of more golden cases. CC, CFLAGS, STB_DS as for tests/run.
# Cases that failed are kept in build/oracle. The last line is "N passed, N failed".

LC_ALL=C
export LC_ALL
unset CDPATH
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh

passed=0
failed=0
kept=build/oracle

# Debian packs numpy for its own Python, which need not be the first one.
find_numpy() {
    for python in python3 /usr/bin/python3; do
        "$python" -c 'import numpy' >/dev/null 2>&1 && return 0
    done
    [ "${REQUIRE_TOOLS:-0}" = 1 ] && echo 'numpy is not there' && echo '0 passed, 1 failed' && exit 1
    echo 'skip: numpy (python3-numpy) is not there'
    echo '0 passed, 0 failed, 1 skipped'
    exit 0
}

# Adds what a program has counted in its last line; one that says nothing has failed.
count() { # log
    counts=$(tail -n 1 "$1" | sed -n 's/^\([0-9][0-9]*\) passed, \([0-9][0-9]*\) failed.*/\1 \2/p')
    # shellcheck disable=SC2086
    set -- ${counts:-0 1} "$1"
    passed=$((passed + $1))
    failed=$((failed + $2))
    [ "$2" -eq 0 ] || grep -v '  *ok  *' "$3" | tail -n 60 | sed 's/^/    /'
}

build() { # name options
    name=$1
    shift
    # shellcheck disable=SC2086
    $CC -std=c99 "$@" -I. ${stb_flag:+-I"$stb_flag"} ${CFLAGS:-} tests/golden/golden.c -o "$scratch/$name" -lm \
        >"$scratch/log" 2>&1 && return 0
    tail -n 60 "$scratch/log"
    echo "failed: $name does not compile"
    failed=$((failed + 1))
}

# Draws a piece, runs it in both types, keeps what fails.
piece() { # first count
    rm -rf "$scratch/cases"
    if ! "$python" tests/fuzz/oracle.py draw "$scratch/cases" "$1" "$2" >"$scratch/log" 2>&1; then
        cat "$scratch/log"
        echo "failed: drawing seeds from $1 on"
        failed=$((failed + 1))
        return
    fi
    echo "seeds from $1 on: $(tail -n 1 "$scratch/log")"
    for name in float double; do
        [ -x "$scratch/$name" ] || continue
        "$scratch/$name" "$scratch/cases" >"$scratch/log" 2>&1
        count "$scratch/log"
        sed -n 's/^\(case_[0-9]*\) .*FAILED.*/\1/p' "$scratch/log" | while read -r case; do
            mkdir -p "$kept" && cp "$scratch/cases/$case.safetensors" "$kept"
            echo "failed ($name): $root/$kept/$case.safetensors"
        done
        skipped=$(tail -n 1 "$scratch/log" | sed -n 's/.* \([0-9]*\) skipped$/\1/p')
        [ "${skipped:-0}" -eq 0 ] || echo "$skipped skipped: golden.c does not know what they name"
    done
}

case $#:${1:-0}${2:-0} in
0:* | 2:*[0-9]) ;;
*) setup_usage "$(sed -n '2,/^$/p' "$0")" ;;
esac
setup_scratch
find_numpy
setup_compiler
setup_stb
setup_stb_flag "$CC"
level=-O1
[ $# -gt 0 ] || level=-O0 # few cases take less time than the compiler
build float -O1
build double $level -DMOE_REAL=double
first=${1:-0}
end=$((first + ${2:-200}))
if [ $# -eq 0 ]; then
    for folder in tests/golden "${GOLDEN:-../shared/golden}"; do
        [ -d "$folder" ] || continue
        "$python" tests/fuzz/oracle.py check "$folder" >"$scratch/log" 2>&1
        count "$scratch/log"
        echo "the interpreter on $folder: $(tail -n 1 "$scratch/log")"
    done
fi
while [ "$first" -lt "$end" ]; do
    size=$((end - first < 500 ? end - first : 500))
    piece "$first" "$size"
    first=$((first + size))
done
times >"$scratch/times"
awk '{ for (i = 1; i <= 2; i++) { split($i, part, /[ms]/); all += part[1] * 60 + part[2] } }
    END { printf "%.0f seconds of a processor\n", all }' "$scratch/times"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
