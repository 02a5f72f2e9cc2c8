#!/bin/sh
# Tests README.md: a C block (```c) with a main is compiled with warnings as errors and run, in a folder that holds copies of the three
# headers and of the files in examples/data; a C block without main is a piece for reading. Paths that the text names must exist.
# sh tests/readme.sh [-v] [WORD], as tests/headers.sh.

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

# Cuts the blocks out, each into a file of its own with the README's line number in its name.
prepare() {
    [ -f README.md ] || {
        echo 'README.md is not there'
        return 1
    }
    awk -v folder="$prepared" '
        inside && /^[ \t]*```/ { close(file); inside = 0; next }
        inside { print > file; next }
        /^[ \t]*```c[ \t]*$/ { file = sprintf("%s/block%d.c", folder, NR); inside = 1; next }
        /^[ \t]*```/ { file = "/dev/null"; inside = 1 }' README.md
}

plan() {
    for block in "$prepared"/block*.c; do
        [ -f "$block" ] || continue
        grep -qE '(^|[^a-z_])main *\(' "$block" || continue
        number=${block##*/block}
        echo "c_block ${number%.c} ${CC%% *}"
    done
    echo 'paths'
}

c_block() { # line-number compiler
    cp "$root"/moe.h "$root"/moe_routers.h "$root"/moe_kernels.h .
    cp "$root"/examples/data/* . 2>/dev/null
    cp "$prepared/block$1.c" program.c
    setup_stb_flag "$2"
    run "$2" -std=c99 -pedantic -Wall -Wextra -Werror -O2 ${stb_flag:+-I"$stb_flag"} program.c -o program -lm && run ./program
}

# Files of tests and examples, links to files, and examples that a command names.
paths() {
    {
        tr -c 'A-Za-z0-9_./-' '\n' <"$root/README.md" | grep -E '^(tests|examples|\.ci)/[a-z]' | sed 's/[.]*$//'
        sed -n 's/.*](\([^):#]*\)).*/\1/p' "$root/README.md"
        sed -n 's/.*examples\/run \([a-z_0-9]\{1,\}\).*/examples\/\1.c/p' "$root/README.md"
    } | sort -u | while read -r path; do
        [ -e "$root/$path" ] || [ -e "$root/$path.c" ] || [ -e "$root/${path%.c}/run" ] || echo "$path"
    done >absent
    empty 'README.md names, and there is not:' "$(cat absent)"
}

run_checks "$@"
