#!/bin/sh
# Tables of times: sh tests/run bench [NAME...] [OPTION...], on a machine that has nothing else to
# do. `bench -h` explains the options. OpenBLAS, oneDNN, libxsmm and PyTorch are measured beside
# where they are installed (Debian: libopenblas-dev, libdnnl-dev, libxsmm-dev, python3-torch
# libopenblas0-pthread). `bench compile [REVISION]` measures what compiling takes
# (tests/bench/compile.sh).

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

if [ "${1:-}" = compile ]; then
    shift
    exec sh tests/bench/compile.sh "$@"
fi
setup_scratch
setup_compiler
setup_stb
setup_stb_flag "$CC"
find_peers
find_torch
# shellcheck disable=SC2086
$CC -std=c99 -O2 -I. -pthread $peer_flags ${stb_flag:+-I"$stb_flag"} ${CFLAGS:-} tests/bench/bench.c \
    tests/bench/bench_peers.c \
    -o "$scratch/bench" $libraries -lm || setup_die 'bench does not compile'
"$scratch/bench" "$@"
