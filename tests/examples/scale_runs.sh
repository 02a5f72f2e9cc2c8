#!/bin/sh
# Tests examples/mpi/scale.c as a program, and against real runs: examples/mpi.c trains on 1, 2 and
# 4 ranks of this machine, and what it measures is compared with what is predicted. Bytes must
# agree, times are shown. sh tests/examples/scale_runs.sh [-v] [WORD] MEASURE: more options for
# examples/mpi.c.

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

measured=$root/examples/mpi/scale_measured.txt

prepare() {
    # CC may hold several words.
    # shellcheck disable=SC2046,SC2086
    $CC $(strict_flags "$CC") -O2 examples/mpi/scale.c -o "$prepared/scale" -lm
}

plan() {
    cat <<'TEXT'
helps
tables
options
markdown
readme
refused is_missing
refused no_such_option --ring none.txt two.txt
refused no_such_option --rings none.txt
refused its_value_is_missing none.txt --tokens
refused not_a_value_from_1_to none.txt --tokens 0
refused not_a_value_from_1_to none.txt --chunks 1.5
refused not_a_value_from_1e-12 none.txt --far-latency nan
refused no_such_network none.txt --network ib1000
refused a_power_of_2 none.txt --ranks-per-machine 6
refused cannot_be_opened none.txt
refused larger_than_1_MB large.txt
refused line_2:_coers:_no_such_key wrong.txt
within
full
alone runs
alone hops
alone local_routing
TEXT
}

helps() {
    run "$prepared/scale" -h >out || return 1
    for word in --network --within imbalance_at_R near_latency assignments_remote; do
        grep -qF -- "$word" out || {
            echo "-h does not explain $word"
            return 1
        }
    done
}

# One line for each number of ranks and method; a step is the sum of its parts, as printed.
tables() {
    run "$prepared/scale" "$measured" >out || return 1
    awk '
        /^ranks|^ +ranks +experts/ { inside = 1; next }
        inside && /^ +[0-9]+ +[0-9]+ +[0-9.e+]+ / {
            sum = 0
            for (i = 4; i <= 12; i++) sum += $i
            if (sum < 0.98 * $3 || sum > 1.02 * $3) { print "the parts are not the step: " $0; bad = 1 }
            lines++
        }
        inside && /cannot have that many experts/ { lines++ }
        /^$/ { inside = 0 }
        END { if (lines != 33) print lines " lines of ranks"; exit bad || lines != 33 }' out
}

# A slower network and more tokens take longer; options do what they say.
options() {
    step() { "$prepared/scale" "$measured" "$@" | awk '$1 == 64 { print $3; exit }'; }
    usual=$(step)
    awk -v usual="$usual" -v slow="$(step --network tcp1)" -v same="$(step --far-latency 1.2e-6 \
        --far-bandwidth 12.3e9)" -v long="$(step --tokens 4096)" \
        -v few="$(step --cores 2)" -v two="$(step --two-level --chunks 4 --ring)" -v near="$(step --near-latency 1 \
        --near-bandwidth 1e3)" 'BEGIN {
            if (!(slow > usual && same == usual && long > 3 * usual && few > 3 * usual &&
                  two != usual && near > 2 * usual)) {
                print usual, slow, same, long, few, two, near
                exit 1
            }
        }' || return 1
    [ "$("$prepared/scale" "$measured" --most 4 --ranks-per-machine 2 | grep -cE '^ +[0-9]+ +[0-9]')" = 9 ]
}

markdown() {
    run "$prepared/scale" "$measured" --markdown >out || return 1
    awk -F'|' 'NR == 1 { n = NF } NF != n { print "columns differ: " $0; bad = 1 } END { exit bad || NR != 13 }' out
}

# The table in examples/mpi/README.md is the one that is printed.
readme() {
    grep -q 'scale_measured.txt' "$root/examples/mpi/README.md" 2>/dev/null ||
        missing 'the table in examples/mpi/README.md'
    "$prepared/scale" "$measured" --markdown >out || return 1
    while IFS= read -r line; do
        grep -qxF -- "$line" "$root/examples/mpi/README.md" || {
            echo "examples/mpi/README.md has not this line: $line"
            return 1
        }
    done <out
}

refused() { # what-it-says-with-_-for-spaces arguments...
    said=$(echo "$1" | tr _ ' ')
    shift
    printf 'moe-scale 1\ncoers 2\n' >wrong.txt
    awk 'BEGIN {
        print "moe-scale 1"
        for (i = 0; i < 21000; i++) print "# something long enough to make one megabyte of it"
    }' >large.txt
    if [ $# -eq 0 ]; then set -- --ring; fi
    "$prepared/scale" "$@" >out 2>&1
    status=$?
    [ "$status" -eq 2 ] && grep -qF -- "$said" out && return 0
    echo "status $status; it should say: $said"
    cat out
    return 1
}

# --within and --bytes-within judge.
within() {
    run "$prepared/scale" "$measured" --within 2 --bytes-within 1 >out || return 1
    sed 's/^bytes_sent .*/bytes_sent 1000/' "$measured" >bytes.txt
    ! "$prepared/scale" bytes.txt --bytes-within 50 >out 2>&1 && grep -q 'bytes of a step are off' out || return 1
    awk '/^run/ { r = $2 } /^step/ && r > 1 { $2 *= 10 } { print }' "$measured" >times.txt
    ! "$prepared/scale" times.txt --within 3 >out 2>&1 && grep -q 'off by a factor' out &&
        run "$prepared/scale" times.txt --bytes-within 1 >out
}

# What cannot be written is a failure.
full() {
    [ -e /dev/full ] || missing /dev/full
    for word in "$measured" -h; do
        ! "$prepared/scale" "$word" >/dev/full 2>said && grep -q 'cannot be written' said || return 1
    done
}

# ---- real runs ----

has_mpi() {
    needs mpirun
    needs mpicc
    grep -q -- '"--measure"' "$root/examples/mpi.c" 2>/dev/null || missing '--measure in examples/mpi.c'
    [ -n "${MPI_PROGRAM:-}" ] || MPI_PROGRAM=$prepared/mpi
    export MPI_PROGRAM
    setup_stb_flag "$CC"
    # shellcheck disable=SC2086
    [ -x "$MPI_PROGRAM" ] || OMPI_CC=$CC run mpicc -std=c99 -O2 -I"$root" ${stb_flag:+-I"$stb_flag"} ${CFLAGS:-} \
        "$root/examples/mpi.c" -o "$MPI_PROGRAM" -lm -pthread
}

measure() { # ranks options...
    ranks=$1
    shift
    # shellcheck disable=SC2086
    run sh "$root/examples/run" mpi -n "$ranks" --measure "$PWD/measured.txt" --seed 1 --steps 40 ${MEASURE:-} "$@" \
        >log 2>&1 && return 0
    cat log
    return 1
}

# Bytes must agree; seconds are shown.
runs() {
    has_mpi || return 1
    for ranks in 1 2 4; do measure "$ranks" || return 1; done
    run "$prepared/scale" measured.txt --bytes-within 0.3 >out || return 1
    [ "$(grep -cE '^[a-z_0-9]+ +[124] +[0-9]+ ' out)" -ge 9 ] || { # three methods, three numbers of ranks
        cat out
        return 1
    }
    awk '/^Runs on/ { shown = 1 } shown { print "note: " $0 }' out
}

# With two levels the mean rank passes rows on: what really passes depends on which tokens like
# which experts.
hops() {
    has_mpi || return 1
    measure 1 && measure 4 --ranks-per-machine 2 --two-level --chunks 2 &&
        run "$prepared/scale" measured.txt --bytes-within 10 >out
}

# Every rank for its own tokens.
local_routing() {
    grep -q -- '"--local-routing"' "$root/examples/mpi.c" 2>/dev/null || missing '--local-routing in examples/mpi.c'
    has_mpi || return 1
    measure 1 && measure 4 --local-routing && grep -qx 'local_routing 1' measured.txt &&
        run "$prepared/scale" measured.txt --bytes-within 0.3 >out
}

run_checks "$@"
