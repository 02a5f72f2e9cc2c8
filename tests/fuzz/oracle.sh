#!/bin/sh
# Random layers and networks against a second interpreter: tests/fuzz/oracle.py draws compositions
# of all stages of a router, computes them by the formulas alone, and tests/golden/golden.c compares
# the library, in float and in double, with every table of kernels of this processor. For every
# fourth seed tests/fuzz/nets.py draws a network, and tests/fuzz/nets.c compares; integers.py runs
# the networks' inference models in integers.
#   sh tests/fuzz/oracle.sh                the interpreter on the golden cases, then seeds 0 to 199
#   sh tests/fuzz/oracle.sh FIRST COUNT    so many seeds from FIRST on
# GOLDEN (../shared/golden:../shared/golden_new): folders of more golden cases, with : between them.
# CC, CFLAGS, STB_DS as for tests/run.
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

build() { # name source options
    name=$1
    source=$2
    shift 2
    # shellcheck disable=SC2086
    $CC -std=c99 "$@" -I. ${stb_flag:+-I"$stb_flag"} ${CFLAGS:-} "tests/$source" -o "$scratch/$name" -lm \
        >"$scratch/log" 2>&1 && return 0
    tail -n 60 "$scratch/log"
    echo "failed: $name does not compile"
    failed=$((failed + 1))
}

draw() { # program first count
    rm -rf "$scratch/cases"
    if "$python" "tests/fuzz/$1" draw "$scratch/cases" "$2" "$3" >"$scratch/log" 2>&1; then
        echo "seeds from $2 on: $(tail -n 1 "$scratch/log")"
        return 0
    fi
    cat "$scratch/log"
    echo "failed: $1, drawing seeds from $2 on"
    failed=$((failed + 1))
    return 1
}

keep() { # file...
    mkdir -p "$kept" && cp "$@" "$kept"
    echo "kept in $root/$kept: $(basename "$1")"
}

# Draws a piece of layers, runs it in both types, keeps what fails.
layers() { # first count
    draw oracle.py "$1" "$2" || return
    for name in float double; do
        [ -x "$scratch/$name" ] || continue
        "$scratch/$name" "$scratch/cases" >"$scratch/log" 2>&1
        count "$scratch/log"
        sed -n 's/^\(case_[0-9]*\) .*FAILED.*/\1/p' "$scratch/log" | while read -r case; do
            keep "$scratch/cases/$case.safetensors"
        done
        skipped=$(tail -n 1 "$scratch/log" | sed -n 's/.* \([0-9]*\) skipped$/\1/p')
        [ "${skipped:-0}" -eq 0 ] || echo "$skipped skipped: golden.c does not know what they name"
    done
}

# The same of networks.
nets() { # first count
    draw nets.py "$1" "$2" || return
    for name in nets nets64; do
        [ -x "$scratch/$name" ] || continue
        "$scratch/$name" "$scratch/cases" "$1" "$2" >"$scratch/log" 2>&1
        count "$scratch/log"
        sed -n 's/^FAILED.*(seed \([0-9]*\))$/\1/p' "$scratch/log" | sort -u | while read -r seed; do
            keep "$scratch/cases/"*_"$(printf %06d "$seed")".*
        done
    done
    "$python" tests/fuzz/nets.py check "$scratch/cases" >"$scratch/log" 2>&1
    count "$scratch/log"
    sed -n 's/^[a-z0-9]*_\([0-9]*\)\..* FAILED.*/\1/p' "$scratch/log" | sort -u | while read -r seed; do
        keep "$scratch/cases/"*_"$seed".*
    done
}

case $#:${1:-0}${2:-0} in
0:* | 2:*[0-9]) ;;
1:-h* | 1:--help*) setup_help && exit ;;
*) setup_usage "$(setup_help)" ;;
esac
setup_scratch
find_numpy
setup_compiler
setup_stb
setup_stb_flag "$CC"
level=-O1
[ $# -gt 0 ] || level=-O0 # few cases take less time than the compiler
build float golden/golden.c -O1
build double golden/golden.c $level -DMOE_REAL=double
build nets fuzz/nets.c $level
build nets64 fuzz/nets.c $level -DMOE_REAL=double
first=${1:-0}
end=$((first + ${2:-200}))
if [ $# -eq 0 ]; then
    folders=tests/golden:${GOLDEN:-../shared/golden:../shared/golden_new}:
    while [ -n "$folders" ]; do
        folder=${folders%%:*}
        folders=${folders#*:}
        [ -d "$folder" ] || continue
        "$python" tests/fuzz/oracle.py check "$folder" >"$scratch/log" 2>&1
        count "$scratch/log"
        echo "the interpreter on $folder: $(tail -n 1 "$scratch/log")"
    done
    # A NaN is not right.
    PYTHONPATH=tests/fuzz PYTHONDONTWRITEBYTECODE=1 "$python" -c 'import case, sys
settings, tensors = case.read_case("tests/golden/smoe.safetensors")
tensors["want.y"] = tensors["want.y"] * float("nan")
case.write_case(sys.argv[1], settings, tensors)' "$scratch/nan.safetensors" &&
        "$python" tests/fuzz/oracle.py check "$scratch/nan.safetensors" >"$scratch/log"
    if grep -q '^0 passed, 1 failed' "$scratch/log"; then
        passed=$((passed + 1))
    else
        echo 'failed: the interpreter takes a NaN for right'
        failed=$((failed + 1))
    fi
fi
while [ "$first" -lt "$end" ]; do
    size=$((end - first < 500 ? end - first : 500))
    layers "$first" "$size"
    nets "$first" $(((size + 3) / 4))
    first=$((first + size))
done
times >"$scratch/times"
awk '{ for (i = 1; i <= 2; i++) { split($i, part, /[ms]/); all += part[1] * 60 + part[2] } }
    END { printf "%.0f seconds of a processor\n", all }' "$scratch/times"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
