#!/bin/sh
# Tests examples/mpi.c and its transport examples/extras/moe_mpi.h on 1 to 4 processes: exchanges,
# the same losses with any number of them, checkpoints from any to any other, and that a process
# that dies, stands still or is set otherwise ends all. sh tests/port/mpi.sh [-v] [WORD], as
# tests/port/headers.sh. Open MPI must be there.

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

JOBS=1 # processes wait for each other: what runs beside them takes their time
export JOBS
OMPI_ALLOW_RUN_AS_ROOT=1
OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM

small='--width 16 --layers 2 --experts 4 --context 16 --batch 7 --steps 8 --warmup 2 --kernels c --timeout 600'

# One program for all checks; the library takes tcc a fraction of a second.
prepare() {
    setup_tool mpirun && setup_tool mpicc || return 0
    setup_stb_flag "$CC"
    compiler="$CC -O1"
    ! setup_tool tcc || compiler="tcc -I$stb_folder"
    # Nothing twice in a row: behind causal attention a run of one token is the same token over and
    # over, but for rounding, and by that would be chosen.
    awk 'BEGIN {
        n = split("the experts of this layer are small and a router sends each token to " \
            "two or three of them where it is heard", word, " ")
        for (x = 1; size < 60000; size += length(word[w]) + 1) {
            x = (x * 1103 + 12345) % 65536
            k = x / 65536
            w = 1 + int(n * k * k * k)
            printf "%s%s", word[w], x % 7 ? " " : ".\n"
        }
    }' | tr -s '\n -~' >"$prepared/text"
    for real in float double; do
        # shellcheck disable=SC2046,SC2086
        $compiler -std=c99 -DMOE_NO_SIMD -DMOE_REAL=$real -I. ${stb_flag:+-I"$stb_flag"} $(mpicc \
            --showme:compile) examples/mpi.c -o "$prepared/mpi_$real" \
            $(mpicc --showme:link) -lm -lpthread || return 1
    done
}

plan() {
    cat <<'PLAN'
compiles gcc float
compiles gcc double
compiles clang float
compiles_alone g++
compiles_alone gcc
first_program 1
first_program 3
transport 1 float
transport 2 float
transport 3 float
transport 4 float
transport 3 double
equal
equal --router gshard
equal --router locmoe --machines 2
equal --router locmoe_plus
equal --router expert_choice
equal --experts 5 --chunks 2 --set n_shared=1
equal --words --vocabulary 300 --set router_bias=1
equal_machines
equal_double
local_routing
checkpoint
dies
hangs
differs --seed 2
differs --d-ff 40
differs --chunks 2
differs --context 17
refuses_ranks
refuses_options
unfinished
launcher
apart
apart_options
apart_page
PLAN
}

needs_mpi() {
    needs mpirun
    needs mpicc
}

# mpirun with $1 processes.
mpi() { # processes program arguments...
    mpi_ranks=$1
    shift
    setup_limit 300 mpirun --oversubscribe --bind-to none -n "$mpi_ranks" "$@" </dev/null
}

compiles() { # compiler real
    needs_mpi
    needs "$1"
    setup_stb_flag "$1"
    # shellcheck disable=SC2046
    run "$1" $(strict_flags "$1") -DMOE_REAL="$2" -I"$root" -I"$root/examples" ${stb_flag:+-I"$stb_flag"} $(mpicc \
        --showme:compile) -DMOE_NO_SIMD -c "$root/examples/mpi.c" -o mpi.o
}

# The transport in a program of its own, in C and C++.
compiles_alone() { # compiler
    needs_mpi
    needs "$1"
    printf '#include "moe.h"\n#include "extras/moe_ranks.h"\n#include "extras/moe_mpi.h"\n' >alone.c
    printf 'int main(void) {\n    moe_mpi m;\n    return moe_mpi_open(&m, MPI_COMM_WORLD, 1) != MOE_OK;\n}\n' >>alone.c
    # shellcheck disable=SC2046
    in_language "$1" "$root" -DOMPI_SKIP_MPICXX -I"$root/examples" $(mpicc --showme:compile) -c alone.c -o alone.o
}

# The program in the header's opening comment.
first_program() { # processes
    needs_mpi
    setup_stb_flag "$CC"
    cut_first_program examples/extras/moe_mpi.h >first.c || return 1
    # shellcheck disable=SC2046,SC2086
    run $CC -std=c99 -Wall -Wextra -Werror -DMOE_NO_SIMD -I"$root" ${stb_flag:+-I"$stb_flag"} $(mpicc \
        --showme:compile) first.c -o first \
        $(mpicc --showme:link) -lm &&
        run mpirun --oversubscribe -n "$1" ./first >out && [ "$(grep -c 'loss 0.00' out)" = "$1" ]
}

transport() { # processes real
    needs_mpi
    run mpi "$1" "$prepared/mpi_$2" --check >out && passed_all out
}

# Trains with so many processes; leaves the losses that it shows in losses.N, and out.N.
losses() { # processes arguments...
    # shellcheck disable=SC2086
    run mpi "$1" "$prepared/mpi_float" $small "$prepared/text" $2 >"out.$1" 2>"err.$1" || {
        cat "out.$1" "err.$1"
        return 1
    }
    sed -n -e 's/^step .*: loss \([0-9.]*\),.*/\1/p' -e 's/^held out: loss \([0-9.]*\),.*/\1/p' "out.$1" >"losses.$1"
    [ "$(wc -l <"losses.$1")" -ge 8 ] || { cat "out.$1"; return 1; }
}

# Numbers line by line, equal to so many parts of one.
near() { # file file part
    paste "$1" "$2" | awk -v part="$3" '
        NF != 2 { print "line " NR ": " $0; bad = 1 }
        {
            d = $1 - $2
            if (d < 0) d = -d
            if (!(d <= part * $1 + 1e-12)) { print "line " NR ": " $1 " and " $2; bad = 1 }
        }
        END { exit bad || NR == 0 }'
}

equal() { # options...
    needs_mpi
    losses 1 "$*" || return 1
    # Something was learned.
    awk 'NR == 1 { first = $1 } { last = $1 } END { exit !(last < first - 0.05) }' losses.1 || { cat out.1; return 1; }
    for processes in 2 3 4; do
        losses $processes "$*" && near losses.1 losses.$processes 2e-5 || { echo "$processes processes"; return 1; }
    done
    grep -q 'moves 0 rows' out.1 && ! grep -q 'moves 0 rows' out.4
}

# Two machines of two ranks, with and without the two levels, and a locality loss that knows of
# them.
equal_machines() {
    needs_mpi
    options='--router locmoe --locality 0.5 --batch 8'
    losses 1 "$options --machines 2" && losses 2 "$options --ranks-per-machine 1" && near losses.1 losses.2 2e-5 &&
        losses 4 "$options --ranks-per-machine 2" && near losses.1 losses.4 2e-5 || return 1
    grep 'moves' out.4 >one
    losses 4 "$options --ranks-per-machine 2 --two-level --chunks 2" && near losses.1 losses.4 2e-5 &&
        ! cmp -s one out.4
}

equal_double() {
    needs_mpi
    for processes in 1 3; do
        # shellcheck disable=SC2086
        run mpi $processes "$prepared/mpi_double" $small "$prepared/text" >out &&
            sed -n 's/^held out: loss \([0-9.]*\),.*/\1/p' out >double.$processes || return 1
    done
    near double.1 double.3 1e-8
}

# Ranks that decide by themselves gather less, and learn as well.
local_routing() {
    needs_mpi
    losses 3 '--router locmoe_plus' && sed -n 's/^and moves .*, \([0-9.]*\) kB, and .*/\1/p' out.3 >together &&
        cp losses.3 want && losses 3 '--router locmoe_plus --local-routing' || return 1
    sed -n 's/^and moves .*, \([0-9.]*\) kB, and .*/\1/p' out.3 >alone
    paste together alone | awk 'NF != 2 || !($2 < $1) { bad = 1 } END { exit bad || NR != 1 }' ||
        { cat together alone; return 1; }
    near want losses.3 0.02 && ! cmp -s want losses.3
}

# Of any number of processes for any other; the saved models are files of one process.
checkpoint() {
    needs_mpi
    losses 1 '--save whole.safetensors' || return 1
    tail -n 1 losses.1 >want
    for to in 1 3; do
        run mpi $to "$prepared/mpi_float" --context 16 --kernels c --steps 0 --load whole.safetensors \
            "$prepared/text" >out || return 1
        sed -n 's/^held out: loss \([0-9.]*\),.*/\1/p' out >got
        near want got 2e-5 || { echo "the model on $to"; return 1; }
    done
    while read -r processes others; do
        rm -f c.safetensors
        # it shows too few losses
        losses "$processes" '--checkpoint c.safetensors --stop-after 4' >log 2>&1 && echo 'it does not stop' && return 1
        [ -s c.safetensors ] || { cat log; return 1; }
        for to in $others; do
            cp c.safetensors d.safetensors
            # shellcheck disable=SC2086
            run mpi "$to" "$prepared/mpi_float" $small "$prepared/text" --checkpoint d.safetensors --resume \
                --save from.safetensors >out || return 1
            sed -n 's/^held out: loss \([0-9.]*\),.*/\1/p' out >got
            near want got 2e-5 || { echo "from $processes to $to"; return 1; }
            [ "$(wc -c <from.safetensors)" = "$(wc -c <whole.safetensors)" ] || { ls -l ./*.safetensors; return 1; }
        done
    done <<'PAIRS'
3 1 2 4
1 3
4 2
2 4
PAIRS
}

# Ends by itself with status not 0; what it said is in said.
ends() { # processes arguments...
    # shellcheck disable=SC2086
    ! mpi "$1" "$prepared/mpi_float" $small "$prepared/text" --checkpoint c.safetensors --checkpoint-every 2 $2 >said \
        2>&1 || { cat said; return 1; }
}

# After the fault: the checkpoint is whole, and leads to where training would have come without it.
goes_on() {
    losses 1 '' && tail -n 1 losses.1 >want || return 1
    # shellcheck disable=SC2086
    run mpi 2 "$prepared/mpi_float" $small "$prepared/text" --checkpoint c.safetensors --resume >out || return 1
    grep -q 'continues after step 4 of 8' out || { cat out; return 1; }
    grep -q 'goes to 2.00 experts in the first half of the steps, 2.00 in the second' out || { cat out; return 1; }
    sed -n 's/^held out: loss \([0-9.]*\),.*/\1/p' out >got
    near want got 2e-5
}

dies() {
    needs_mpi
    ends 3 '--die 1,6' && run grep -q 'rank 1 .*signal 9' said && goes_on
}

hangs() {
    needs_mpi
    ends 3 '--timeout 30 --hang 2,5' && run grep -qE 'rank 2 does not answer' said &&
        run grep -q 'c.safetensors holds step 4' said && goes_on
}

# Found before the first step.
differs() { # option value
    needs_mpi
    ends 3 "--mismatch 1,$1,$2" && run grep -qE 'rank [0-2] ' said || return 1
    ! grep -q '^step' said && [ ! -e c.safetensors ] || { cat said; return 1; }
    grep -q 'another\|must have the same' said || { cat said; return 1; }
}

refuses_ranks() {
    needs_mpi
    ends 4 '--experts 3' && run grep -q 'every rank needs at least one expert' said
}

refuses_options() {
    needs_mpi
    for wrong in '--foo' '--steps' '--steps x' '--resume' 'text text' '--kernels none' '--mismatch 1' '--router none' \
        '--set none=1' '--report none/out.html' '--save none/out' \
        '--load none' '--mismatch 1,--seed,x'; do
        # shellcheck disable=SC2086
        mpi 2 "$prepared/mpi_float" --steps 1 $wrong >said 2>&1 && { cat said; echo "$wrong is taken"; return 1; }
        # Once, by one rank.
        [ "$(grep -c '^mpi: ' said)" = 1 ] || { cat said; echo "$wrong"; return 1; }
    done
    cp "$prepared/text" text || return 1
    for wrong in 'text --save ./text' '--domains none,text --save text' 'text --save s.txt --report s.txt'; do
        # shellcheck disable=SC2086
        mpi 2 "$prepared/mpi_float" --steps 0 $wrong >said 2>&1 && { cat said; echo "$wrong is taken"; return 1; }
        run grep -q 'would replace' said && cmp "$prepared/text" text || return 1
    done
    mpi 2 "$prepared/mpi_float" none >said 2>&1 && return 1
    run grep -q none said
}

# Training that was stopped is not overwritten.
unfinished() {
    needs_mpi
    echo something >c.safetensors
    mpi 2 "$prepared/mpi_float" --checkpoint c.safetensors >said 2>&1 && return 1
    run grep -q 'c.safetensors: holds training' said && [ "$(cat c.safetensors)" = something ] || return 1
    # Missing on one rank.
    mpi 2 "$prepared/mpi_float" --checkpoint c.safetensors --resume --mismatch 1,--checkpoint,none >said 2>&1 &&
        return 1
    run grep -q '^mpi: none: does not exist.*rank 1' said
}

# As a user calls it, from a folder of the user's.
launcher() {
    needs_mpi
    MPI_PROGRAM=$prepared/mpi_float
    export MPI_PROGRAM
    cp "$prepared/text" mine.txt
    run sh "$root/examples/run" mpi -h >said && run grep -q '^mpi ' said || return 1
    # shellcheck disable=SC2086
    run sh "$root/examples/run" mpi -n 3 $small mine.txt --threads-too --save mine.safetensors --report mine.html \
        >said || return 1
    [ -s mine.safetensors ] && run grep -q '<svg' mine.html && run grep -q '3 ranks on' said &&
        run grep -q '^One process on this machine' said || return 1
    # shellcheck disable=SC2086
    sh "$root/examples/run" mpi -n 2 $small mine.txt --die 1,3 >said 2>&1 && { cat said; return 1; }
    run grep -q 'process rank 1 .*signal 9' said || return 1
    sh "$root/examples/run" mpi -n 2 --foo >said 2>&1 && return 1
    [ "$(wc -l <said)" = 1 ] || { cat said; return 1; }
    # shellcheck disable=SC2086
    run sh "$root/examples/run" mpi -n 2 $small --steps 3 --seeds 2 --compare mine.txt >said &&
        run grep -q '^LocMoE+ against baseline, 1 expert: ' said
}

# On hosts that are apart, a few steps; then one of them is cut off.
apart() {
    needs_mpi
    MPI_PROGRAM=$prepared/mpi_float
    export MPI_PROGRAM
    sh "$root/examples/mpi/hosts" --links '1000:0.1' --steps 10 --options "--width 16 --experts 4 --context 16" \
        --batch 4 --domains "$prepared/text,$root/README.md" --faults cut --timeout 3 --patience 1 --rows rows.csv \
        >said 2>&1 &
    wait $! || { cat said; return 1; }
    ! grep -q '^skipped: ' said || missing "what examples/mpi/hosts needs ($(sed -n 's/^skipped: //p' said))"
    awk -F, '
        NR == 1 { columns = NF }
        NF != columns { print "columns differ: " $0; bad = 1 }
        $1 == "run" && !($9 > 0 && $10 > 0 && $14 > 0 && $18 > 0) { print; bad = 1 }
        { n[$1]++ }
        END { exit bad || n["run"] != 3 || n["cut"] != 1 }' rows.csv || { cat rows.csv said; return 1; }
    empty 'left behind:' "$(ip netns list | grep "^moe$!\.")" # named by the process
}

apart_options() {
    sh "$root/examples/mpi/hosts" -h >said && run grep -q -- --domains said || return 1
    for wrong in --foo --links '--hosts 1' '--hosts x' '--steps 0'; do
        # shellcheck disable=SC2086
        sh "$root/examples/mpi/hosts" $wrong >said 2>&1
        [ $? = 2 ] && [ "$(wc -l <said)" = 1 ] || { cat said; echo "$wrong"; return 1; }
    done
    mkdir none && ln -s "$(command -v sh)" none/sh
    for tool in dirname awk sed id mktemp rm cat grep git tr head seq; do ln -s "$(command -v $tool)" "none/$tool"; done
    PATH=$PWD/none run sh "$root/examples/mpi/hosts" --rows rows.csv >said && run grep -q '^skipped: ' said &&
        run grep -q '^skipped,' rows.csv
}

# The tables in examples/mpi/README.md are those of the rows.
apart_page() { run sh "$root/examples/mpi/hosts" --verify >said || { cat said; return 1; }; }

run_checks "$@"
