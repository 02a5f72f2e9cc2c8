#!/bin/sh
# Uses the library from Python (ctypes), C++ and, where there is a compiler, Rust, by a shared
# library and without a wrapper; reads the files that it writes with numpy. sh
# tests/port/bindings.sh [-v] [WORD], as tests/port/headers.sh.
#   sh tests/port/bindings.sh --write     writes the list of public structs and their members into
#                                         examples/extras/moe_layout.h anew, after a struct has
#                                         changed

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

declarations() { # options...
    # shellcheck disable=SC2086
    sed -n 's|^#include "\.\./\(.*\)".*|#include "\1"|p' "$root/tests/all.h" | $CC -std=c99 -E -P "$@" -I"$root" -x c -
}

plan() {
    for real in float double; do
        echo "same_lines python $real"
        echo "same_lines c++ $real"
        echo "offsets $real"
        echo "nulls $real"
        echo "files $real"
    done
    echo 'same_lines rust float'
    echo 'offsets_noticed'
    echo 'files_noticed'
    echo 'plain'
}

# The library as a shared one, the declarations, what the program says in C, files with what is in
# them.
prepare() {
    setup_tool python3 || return 0
    for real in float double; do
        mkdir "$prepared/$real" "$prepared/$real/files" || return 1
        (
            cd "$prepared/$real" || exit 1
            printf '#define MOE_IMPLEMENTATION\n#include "tests/all.h"\n' >moe.c
            setup_stb_flag "$CC"
            # shellcheck disable=SC2086
            $CC -std=c99 -O1 -DMOE_NO_SIMD $(real_option $real) -fPIC -shared \
                -I"$root" ${stb_flag:+-I"$stb_flag"} moe.c -o libmoe.so -lm &&
                declarations $(real_option $real) >moe.i &&
                built bindings "$CC" -std=c99 -x c && ./bindings . >said &&
                built python_files "$CC" -std=c99 -x c && ./python_files files >files.txt
        ) || return 1
    done
}

# A program of tests/, linked with the shared library of this folder.
built() { # name compiler options...
    built_name=$1
    shift
    # CC may hold several words.
    # shellcheck disable=SC2086
    $* $(real_option $real) -I"$root" -c "$root/tests/port/$built_name.cpp" -o "$built_name.o" &&
        ${1} "$built_name.o" -o "$built_name" ./libmoe.so -lm
}

# What another language computes, prints and saves is what C does, to the bit.
same_lines() { # language real
    needs python3
    real=$2
    cp "$prepared/$2/libmoe.so" .
    case $1 in
    python) run python3 "$root/tests/port/bindings.py" ./libmoe.so "$prepared/$2/moe.i" . >all || { cat all &&
        return 1; } ;;
    c++)
        needs g++
        run built bindings g++ -std=c++11 -pedantic -Wall -Wextra -Werror && run ./bindings . >all || return 1
        ;;
    rust)
        rustc --version >version 2>&1 || missing rustc
        run rustc -O "$root/tests/port/bindings.rs" -L . -l moe -o bindings_rust &&
            LD_LIBRARY_PATH=. run ./bindings_rust >all || return 1
        grep -E '^(version|learned) ' "$prepared/$2/said" >expected
        run cmp expected all && [ "$(wc -l <all)" -eq 2 ]
        return
        ;;
    esac
    sed -n 's/^# /note: /p' all
    grep -v '^# ' all >said
    [ "$(grep -c . said)" -ge 15 ] && run diff "$prepared/$2/said" said &&
        run cmp layer.safetensors "$prepared/$2/layer.safetensors" &&
        run cmp net.safetensors "$prepared/$2/net.safetensors"
}

# Where members lie: as the compiler has it, as the test in Python laid them out (which compares
# with what the library says).
offsets() { # real
    needs python3
    python3 "$root/tests/port/bindings.py" --offsets-program "$prepared/$1/moe.i" >offsets.c || return 1
    # shellcheck disable=SC2086
    run $CC -std=c99 -DMOE_NO_MATCH $(real_option "$1") -I"$root" offsets.c -o offsets && ./offsets >by_compiler ||
        return 1
    python3 "$root/tests/port/bindings.py" --offsets "$prepared/$1/moe.i" >by_python || return 1
    [ "$(grep -c . by_compiler)" -ge 500 ] && run diff by_compiler by_python
}

# What the headers say of pointers that are NULL.
nulls() { # real
    needs python3
    python3 "$root/tests/port/bindings.py" --nulls "$prepared/$1/moe.i" "$prepared/$1/libmoe.so" >out 2>&1 &&
        sed -n 's/^# /note: /p' out && return 0
    cat out
    return 1
}

# A struct that gains a member, or whose members change places, is noticed.
offsets_noticed() {
    needs python3
    sed 's/moe_status code;/int more; moe_status code;/' "$prepared/float/moe.i" >moe.i
    cmp -s moe.i "$prepared/float/moe.i" && echo 'nothing was changed' && return 1
    python3 "$root/tests/port/bindings.py" "$prepared/float/libmoe.so" moe.i . >out 2>&1 && echo 'not noticed' &&
        return 1
    grep -q 'moe_error' out || { cat out && return 1; }
}

# Debian packs numpy for its own Python, which need not be the first one.
find_numpy() {
    for python in python3 /usr/bin/python3; do
        "$python" -c 'import numpy' >/dev/null 2>&1 && return 0
    done
    [ "${REQUIRE_TOOLS:-0}" = 1 ] && echo 'numpy is not there' && exit 1
    missing 'numpy (python3-numpy)'
}

files() { # real
    find_numpy
    [ "$1" = float ] && option= || option=f64
    # shellcheck disable=SC2086
    "$python" "$root/tests/port/python_files.py" "$prepared/$1/files" "$prepared/$1/files.txt" $option >out 2>&1 &&
        passed_all out && return 0
    tail -n 20 out
    return 1
}

# A bit, a name and a setting that are not as printed are noticed.
files_noticed() {
    find_numpy
    for change in bit name setting; do
        rm -rf files
        cp -R "$prepared/float/files" files
        cp "$prepared/float/files.txt" list
        case $change in
        bit) sed '/^tensor/{s/0$/1/;s/[2-9]$/1/;}' list >changed ;;
        name) sed 's/^tensor 61/tensor 62/' list >changed ;;
        setting) sed 's/^field top_k 2$/field top_k 3/' list >changed ;;
        esac
        cmp -s list changed && echo "$change: nothing was changed" && return 1
        "$python" "$root/tests/port/python_files.py" files changed >out 2>&1 && echo "$change: not noticed" && return 1
        grep -q '^failed: ' out || { cat out && return 1; }
    done
}

# No function that only the preprocessor or a compiler can reach, and none but moe_file_replace that
# cannot go without a function of the caller's.
plain() {
    needs python3
    tr '\n' ' ' <"$prepared/float/moe.i" | sed 's/;/;\n/g' >declared
    empty 'inline, or with varargs:' "$(grep 'moe_' declared | grep -E '\.\.\.|(^| )inline |^ *static ' |
        grep -v moei_match)" || return 1
    empty 'wants a function of the caller:' "$(grep -E '^ *extern .*moe_[a-z0-9_]*\(.*\(\*' declared |
        grep -v 'moe_file_replace(')" || return 1
    empty 'functions as macros:' "$(sed \
        -n '/^#if defined(MOE_IMPLEMENTATION)/q;s/^ *# *define *\(moe_[a-z0-9_]*(.*\)/\1/p' "$root/moe_kernels.h" \
        "$root/moe_routers.h" "$root/moe.h" "$root"/examples/extras/moe_[!m]*.h)"
}

if [ "${1:-}" = --write ]; then
    layout=examples/extras/moe_layout.h
    setup_scratch
    setup_compiler
    declarations >"$scratch/moe.i" && python3 tests/port/bindings.py --rows "$scratch/moe.i" >"$scratch/rows" &&
        grep -q MOEI_STRUCTS "$scratch/rows" || exit 1
    awk -v rows="$scratch/rows" '
        /^\/\* layouts: begin / { print; while ((getline line < rows) > 0) print line; inside = 1 }
        /^\/\* layouts: end / { inside = 0 }
        !inside { print }' $layout >"$scratch/layout.h" && [ "$(grep -c MOEI_STRUCTS "$scratch/layout.h")" -ge 3 ] &&
            cat "$scratch/layout.h" >$layout
    exit
fi
run_checks "$@"
