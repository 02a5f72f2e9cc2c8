#!/bin/sh
# Tables of times: sh tests/run bench [NAME...] [OPTION...], on a machine that has nothing else to
# do. `bench -h` explains the options. OpenBLAS, oneDNN, libxsmm and PyTorch are measured beside
# where they are installed (Debian: libopenblas-dev, libdnnl-dev, libxsmm-dev, python3-torch
# libopenblas0-pthread). `bench compile [REVISION]` measures what compiling takes
# (tests/bench/compile.sh).
#   bench --write [OPTION...]   measures everything but the routers, then writes the rows
#                               (tests/bench/results/*.csv) and the tables of tests/bench/README.md;
#                               nothing is written where a part fails
#   bench --verify              whether those tables come from those rows (tests/bench/tables.py)

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
. tests/setup.sh

# Whether a program with a library's header and functions links and runs.
peer_works() { # header statement libraries...
    printf '#include <%s>\nint main(void) {\n    %s;\n    return 0;\n}\n' "$1" "$2" >"$scratch/peer.c"
    shift 2
    # shellcheck disable=SC2086
    $CC ${CFLAGS:-} "$scratch/peer.c" -o "$scratch/peer" "$@" >/dev/null 2>&1 </dev/null &&
        "$scratch/peer" >/dev/null 2>&1 </dev/null
}

# Sets $peer_flags and $libraries for the libraries that are here. libxsmm wants a BLAS of whatever
# kind behind it.
find_peers() {
    peer_flags=
    libraries=
    blas=-lxsmmnoblas
    if peer_works cblas.h '(void)cblas_sdot(0, 0, 1, 0, 1); (void)openblas_get_corename()' -lopenblas; then
        peer_flags="$peer_flags -DBENCH_OPENBLAS"
        blas=-lopenblas
        libraries=-lopenblas
    fi
    if peer_works dnnl.h '(void)dnnl_version()' -ldnnl; then
        peer_flags="$peer_flags -DBENCH_ONEDNN"
        libraries="-ldnnl $libraries"
    fi
    if peer_works libxsmm.h 'libxsmm_init()' -lxsmm $blas -lpthread -ldl -lrt -lm; then
        peer_flags="$peer_flags -DBENCH_LIBXSMM"
        libraries="-lxsmm $blas $libraries -lpthread -ldl -lrt -lm"
    fi
}

# Sets $BENCH_PYTHON to a Python that has PyTorch, or to nothing. The first one found need not be
# the system's, for which Debian packs it.
find_torch() {
    for python in "${BENCH_PYTHON:-}" python3 /usr/bin/python3; do
        BENCH_PYTHON=$python
        [ -z "$python" ] || ! "$python" -c 'import torch' >/dev/null 2>&1 </dev/null || break
        BENCH_PYTHON=
    done
    export BENCH_PYTHON
}

# ---- the rows and the page ----

results=tests/bench/results
measured='moe.h moe_routers.h moe_kernels.h tests/bench/bench.c tests/bench/bench.h tests/bench/bench_peers.c'

# Sets $commit, and says whether what is measured differs from it.
find_commit() {
    commit=$(git rev-parse --short=12 HEAD 2>/dev/null) || commit=unknown
    # shellcheck disable=SC2086
    [ "$commit" = unknown ] || git diff --quiet HEAD -- $measured || commit="$commit + changes"
}

processor_of() {
    name=$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo 2>/dev/null | sed 1q)
    echo "${name:-$(uname -m)}"
}

fact() { printf '%s,"%s"\n' "$1" "$2" >>"$rows/machine.csv"; }

# Rows of one bench, each behind the run's name. What it says besides is left in $scratch/NAME.said.
measure() { # name of the rows, bench, options...
    name=$1
    shift
    printf '%5d s  %s' $(($(date +%s) - began)) "$name" >&2
    start=$(date +%s)
    "$scratch/bench" "$@" --csv >"$scratch/rows" 2>"$scratch/$name.said" || {
        echo >&2
        cat "$scratch/$name.said" >&2
        tail -n 1 "$scratch/rows" >&2
        setup_die "$name failed; nothing is written"
    }
    sed '$d' "$scratch/rows" | awk -F , -v run="$run" -v bench="$1" '
        NR > 1 && $1 != bench { exit 1 }
        { print (NR == 1 ? "run" : run) "," $0 }' >"$rows/$name.csv" || setup_die 'bench: --write takes no NAME'
    echo ": $(($(date +%s) - start)) s" >&2
}

said() { sed -n "s/^$2: //p" "$scratch/$1.said" | sed 1q; } # name of the rows, what

write_facts() {
    fact run "$run"
    fact version "$(sed -n '1s/.* v\([0-9.]*\) .*/\1/p' moe.h)"
    fact commit "$commit"
    fact compiler "$($CC --version 2>/dev/null </dev/null | sed 1q), -std=c99 -O2${CFLAGS:+ $CFLAGS}"
    fact processor "$(processor_of)"
    fact processors "$(getconf _NPROCESSORS_ONLN 2>/dev/null)"
    fact cache_2 "$(getconf LEVEL2_CACHE_SIZE 2>/dev/null)"
    fact options "$*"
    fact libraries "$(said layers 'Other libraries')"
    [ ! -f "$rows/layers_avx2.csv" ] || fact libraries_avx2 "$(said layers_avx2 'Other libraries')"
    way=$(said text PyTorch)
    [ -z "$way" ] || fact pytorch "$("$BENCH_PYTHON" -c 'import torch; print(torch.__version__)' </dev/null), $way"
}

# The bench is compiled.
write_all() { # options...
    rows=$scratch/results
    mkdir "$rows" || exit 1
    began=$(date +%s)
    run=$(date -u +%Y-%m-%dT%H:%M:%SZ)
    measure layers layers "$@"
    if grep -q ',avx512,' "$rows/layers.csv"; then measure layers_avx2 layers "$@" --kernels avx2; fi
    measure layers_thin layers "$@" --shapes 64/16,352/16,768/16 --tokens 1,8,64,512 --experts relu
    for name in training tiny quant threads text; do measure "$name" "$name" "$@"; done
    write_facts "$@"
    python3 tests/bench/tables.py "$rows" >"$scratch/page" || setup_die 'the tables failed; nothing is written'
    mkdir -p "$results" && rm -f "$results"/*.csv && cp "$rows"/*.csv "$results" &&
        cp "$scratch/page" tests/bench/README.md || exit 1
    printf '%5d s  written: %s/*.csv, tests/bench/README.md\n' $(($(date +%s) - began)) "$results" >&2
}

wanted='' speed=-O2
for word in "$@"; do
    shift
    case $word in
    -h | --help) speed='-O0 -DMOE_NO_SIMD' && set -- "$@" -h ;;
    --write | --verify) wanted=$word ;;
    *) set -- "$@" "$word" ;;
    esac
done
[ "$speed" = -O2 ] || wanted='' # what only explains is compiled fast
[ -z "$wanted" ] || setup_tool python3 || setup_ask Python python3
case $wanted.${1:-} in
--verify.) exec python3 tests/bench/tables.py --verify ;;
--verify.* | --write.[!-]*) setup_usage "bench: $wanted does not go with $1; -h explains" ;;
esac

if [ "${1:-}" = compile ]; then
    shift
    exec sh tests/bench/compile.sh "$@"
fi
setup_scratch
setup_compiler
setup_stb
setup_stb_flag "$CC"
peer_flags='' libraries=''
if [ "$speed" = -O2 ]; then find_peers && find_torch && find_commit; fi
# shellcheck disable=SC2086
$CC -std=c99 $speed -I. -pthread $peer_flags ${stb_flag:+-I"$stb_flag"} ${CFLAGS:-} tests/bench/bench.c \
    tests/bench/bench_peers.c \
    -o "$scratch/bench" $libraries -lm || setup_die 'bench does not compile'
if [ "$wanted" = --write ]; then write_all "$@"; else "$scratch/bench" "$@"; fi
