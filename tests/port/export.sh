#!/bin/sh
# Tests headers that moe_export_c writes: tests/unit/inference.c writes some with what their models
# must answer, then they are compiled in every way that a user may, run and measured. sh
# tests/port/export.sh [-v] [WORD], as tests/port/headers.sh.

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

models='dense dense4 sparse rich rich4 behind'
inference='-DMOE_NO_TRAIN -DMOE_NO_STDIO -DMOE_NO_MALLOC'
integers='-DMOE_NO_TRAIN -DMOE_NO_FLOAT'
all="$inference -DMOE_NO_FLOAT -DMOE_NO_SIMD"

plan() {
    for model in $models; do
        echo "one gcc $model $integers"
        echo "example gcc $model"
        echo "comment gcc $model"
        echo "sanitized gcc $model"
    done
    for compiler in gcc clang g++ clang++; do
        echo "two $compiler -O2 $integers"
        echo "two $compiler -O0 $all"
        echo "units $compiler $integers"
    done
    echo "two clang -O1 $inference"
    echo "two g++ -O1 $inference -DMOE_NO_SIMD"
    echo 'two gcc -O1 -DMOE_NO_SIMD'
    echo "two gcc -O1 -DMOE_REAL=double $inference"
    echo "two gcc -Os -DMOE_STATIC $integers"
    echo "two gcc -O2 -ffreestanding $integers"
    echo "tiny tcc $integers"
    echo "tiny tcc $inference"
    echo 'symbols gcc -O2'
    echo 'symbols clang -Os'
    echo 'dropped gcc'
    echo 'dropped clang'
    echo 'threads gcc'
    echo 'threads clang'
    echo 'placed gcc'
    echo 'placed clang'
    echo 'refused gcc version'
    echo 'compile_time gcc'
}

# The models of tests/unit/inference.c.
prepare() {
    setup_stb_flag "$CC"
    mkdir "$prepared/models"
    # CC may hold several words.
    # shellcheck disable=SC2086
    $CC -std=c99 -O0 -DMOE_NO_SIMD -I. ${stb_flag:+-I"$stb_flag"} tests/unit/inference.c -o "$prepared/write" -lm &&
        "$prepared/write" write "$prepared/models" >"$prepared/log" && return 0
    cat "$prepared/log"
    return 1
}

# ---- programs ----

capitals() { echo "$1" | tr a-z A-Z; }

# A program that runs these models' cases with scratch memory at every alignment, and with guards
# around it.
cases() { # model...
    for name in "$@"; do printf '#include "%s.h"\n#include "%s_cases.h"\n' "$name" "$name"; done
    printf '#include <stdio.h>\n'
    for name in "$@"; do
        cat <<SOURCE
static int ${name}_checked(void) {
    static unsigned char room[$(capitals "$name")_SCRATCH + 64];
    int wrong = 0;
    unsigned i, shift;
    for (shift = 0; shift < 8; shift++) {
        for (i = 0; i < sizeof room; i++) room[i] = 0xa5;
        wrong += ${name}_wrong(room + 32 + shift);
        for (i = 0; i < 32 + shift; i++) wrong += room[i] != 0xa5;
        for (i = 32 + shift + $(capitals "$name")_SCRATCH; i < sizeof room; i++) wrong += room[i] != 0xa5;
    }
    if (wrong > 0) printf("$name: %d wrong\n", wrong);
    return wrong;
}
SOURCE
    done
    printf 'int main(void) {\n    return '
    for name in "$@"; do printf '%s_checked() + ' "$name"; done
    printf '0 > 0;\n}\n'
}

# The only source file of a program.
whole() { # model...
    echo '#define MOE_IMPLEMENTATION'
    cases "$@"
}

build() { # compiler arguments...
    built=$1
    shift
    setup_stb_flag "$built"
    case " $* " in
    *' -c '*) ;;
    *) set -- "$@" -lm ;;
    esac
    in_language "$built" "$root" -I"$prepared/models" ${stb_flag:+-I"$stb_flag"} "$@"
}

# ---- check functions: 0 passed, 77 skipped, else failed ----

one() { # compiler model options
    needs "$1"
    whole "$2" >a.c
    compiler=$1
    shift 2
    build "$compiler" -O2 "$@" a.c -o a && run ./a
}

two() { # compiler options
    needs "$1"
    whole $models >a.c
    compiler=$1
    shift
    build "$compiler" "$@" a.c -o a && run ./a
}

tiny() { # compiler options
    needs "$1"
    whole $models >a.c
    compiler=$1
    shift
    run "$compiler" -std=c99 -Wall -Werror "$@" -I"$root" -I"$prepared/models" a.c -o a -lm && run ./a
}

# The implementation in another source file than the models, which two files have.
units() { # compiler options
    needs "$1"
    cases $models | sed 's/return dense_checked/int other(void); return other() + dense_checked/' >a.c
    printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n' >b.c
    cases rich | sed 's/^int main(void)/int other(void);\nint other(void)/' >c.c
    compiler=$1
    shift
    build "$compiler" -O1 "$@" a.c b.c c.c -o a && run ./a
}

# What the header's comment says to write, as it stands there.
example() { # compiler model
    needs "$1"
    {
        printf '#define MOE_IMPLEMENTATION\n#include "%s.h"\n#include "%s_cases.h"\nint main(void) {\n' "$2" "$2"
        [ "$2" != behind ] || echo 'const moe_loader loader = behind_loader;'
        sed -n '/^     static unsigned char scratch/,/\*\/$/{s/ \*\/$//;p;}' "$prepared/models/$2.h" |
            sed "s/input\[$(capitals "$2")_INPUTS\]/input[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9}/"
        printf 'return status != MOE_OK || output[0] == 32767 || %s_wrong(scratch) > 0;\n}\n' "$2"
    } >a.c
    grep -q moe_infer a.c || {
        echo 'the comment has no example'
        return 1
    }
    build "$1" -O1 $integers a.c -o a && run ./a
}

equal() { # what got wanted
    [ -n "$3" ] && [ "$2" = "$3" ] && return 0
    echo "$1: $2, must be $3"
    return 1
}

# The numbers of the comment against the arrays in an object file, the interpreter's count and the
# model itself.
comment() { # compiler model
    needs "$1"
    needs nm
    header=$prepared/models/$2.h
    whole "$2" >a.c
    build "$1" -O0 $integers -c a.c -o a.o || return 1
    bytes=0
    for array in weights experts; do
        size=$(nm -S a.o | awk -v name="${2}_$array" '$NF == name { print $2 }')
        bytes=$((bytes + 0x${size:-0}))
    done
    # shellcheck disable=SC2046
    set -- "$2" $(sed -n -e '1s/.*weights \([0-9]*\) experts \([0-9]*\) scratch \([0-9]*\) /\1 \2 \3 /' \
        -e '1s/multiplications \([0-9]*\).*/\1/p' "$prepared/models/$2_cases.h")
    [ "$1" != behind ] || bytes=$((bytes + $3))
    equal 'bytes of arrays' "$bytes" "$(sed -n 's/^ *constants *\([0-9]*\) bytes.*/\1/p' "$header")" &&
        equal 'bytes of the model' "$(($2 + $3))" "$bytes" &&
        equal scratch "$4" "$(sed -n 's/^ *scratch *\([0-9]*\) bytes/\1/p' "$header")" &&
        equal SCRATCH "$4" "$(sed -n "s/^#define $(capitals "$1")_SCRATCH //p" "$header")" &&
        equal multiplications "$5" "$(sed -n 's/^ *work *\([0-9]*\) multiplications.*/\1/p' "$header")" &&
        equal "experts' bytes" "$3" "$(sed -n 's/^ *constants .*of which \([0-9]*\) are.*/\1/p' "$header" | grep . ||
        echo 0)"
}

# Scratch memory of exactly its size on the heap, at every alignment.
sanitized() { # compiler model
    needs "$1"
    big=$(capitals "$2")
    cat >a.c <<SOURCE
#define MOE_IMPLEMENTATION
#include "$2.h"
#include "$2_cases.h"
#include <stdlib.h>
int main(void) {
    int wrong = 0;
    unsigned shift;
    for (shift = 0; shift < 8; shift++) {
        unsigned char *room = (unsigned char *)malloc(shift + ${big}_SCRATCH);
        if (room == NULL) return 2;
        wrong += $2_wrong(room + shift);
        free(room);
    }
    return wrong > 0;
}
SOURCE
    build "$1" -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all $integers a.c -o a && run ./a
}

undefined() { nm -u "$1" | awk '{ print $NF }' | grep -vE '^(_GLOBAL_OFFSET_TABLE_|__stack_chk_fail)$' | sort; }

# An integer model and its runtime need nothing but memcpy and memset.
symbols() { # compiler optimization
    needs "$1"
    needs nm
    { echo '#define MOE_IMPLEMENTATION' && for name in $models; do echo "#include \"$name.h\""; done &&
        echo 'const moe_model *all(int i); const moe_model *all(int i) { const moe_model *m[] = {'
        for name in $models; do echo "&$name,"; done; echo 'NULL}; return m[i]; }'; } >a.c
    build "$1" "$2" $all -fno-stack-protector -c a.c -o a.o || return 1
    empty 'an integer model needs:' "$(undefined a.o | grep -vxE 'memcpy|memset')" || return 1
    build "$1" "$2" $inference -fno-stack-protector -c a.c -o a.o || return 1
    empty 'inference needs:' "$(undefined a.o |
        grep -xE '.*(malloc|calloc|realloc|free)|f?printf|sprintf|puts|f(open|close|read|write)|exit|abort')"
}

# The linker drops what a model does not use.
dropped() { # compiler
    needs "$1"
    needs nm
    for name in dense sparse dense4; do
        whole "$name" >a.c
        build "$1" -Os -ffunction-sections -fdata-sections -Wl,--gc-sections $integers a.c -o "$name" &&
            run "./$name" || return 1
        nm "$name" | awk '{ print $NF }' | grep -E '^moei_int' >"$name.names"
    done
    for absent in 'dense mixture' 'dense int4' 'dense attention' 'dense norm' 'dense multiply' 'dense4 int8' \
        'dense4 mixture' 'sparse int4' 'sparse attention'; do
        empty "$absent is not used and stays:" "$(grep -x "moei_int_op_${absent#* }" "${absent%% *}.names")" || return 1
    done
    empty 'the router stays without a mixture:' "$(grep -E 'moei_int_(route|top_k|select.*|weight.*|gate.*)$' \
        dense.names)" || return 1
    grep -qx moei_int_op_mixture sparse.names && grep -qx moei_int_op_int4 dense4.names && return 0
    echo 'what is used is not there either'
    return 1
}

# One constant model at work in two threads.
threads() { # compiler
    needs "$1"
    {
        whole rich | sed 's/^int main(void) {/int plain(void);\nint plain(void) {/'
        cat <<'SOURCE'
#include <pthread.h>
static unsigned char rooms[2][RICH_SCRATCH];
static void *work(void *room) {
    static const int few = 20;
    int i, wrong = 0;
    for (i = 0; i < few; i++) wrong += rich_wrong((unsigned char *)room);
    return wrong > 0 ? room : NULL;
}
int main(void) {
    pthread_t thread;
    void *other;
    int wrong = pthread_create(&thread, NULL, work, rooms[0]) != 0;
    wrong += work(rooms[1]) != NULL;
    wrong += pthread_join(thread, &other) != 0 || other != NULL;
    return wrong > 0 || plain() > 0;
}
SOURCE
    } >a.c
    echo 'int main(void) { return 0; }' >probe.c
    "$1" -fsanitize=thread probe.c -o probe >/dev/null 2>&1 && ./probe || missing "-fsanitize=thread of $1"
    build "$1" -g -O1 -fsanitize=thread $integers a.c -o a -lpthread && run ./a
}

# MOE_FLASH_EXPERTS puts the experts, and nothing else, into a section of their own, from which they
# are read in place.
placed() { # compiler
    needs "$1"
    needs objdump
    whole rich >a.c
    build "$1" -O1 $integers '-DMOE_FLASH_EXPERTS=__attribute__((section("outside")))' a.c -o a && run ./a || return 1
    objdump -t a | awk '$4 == "outside" || $3 == "outside" { print $NF }' | grep '^rich_' >found
    equal 'in the section' "$(tr '\n' ' ' <found)" 'rich_experts ' || return 1
    build "$1" -O1 $integers a.c -o a && [ -z "$(objdump -t a | grep outside)" ]
}

# A header of another version does not compile, and says why.
refused() { # compiler version
    needs "$1"
    whole dense | sed '1i #include "moe.h"\n#undef MOE_MODEL_VERSION\n#define MOE_MODEL_VERSION 99' >a.c
    build "$1" $integers -c a.c -o a.o >log 2>&1 && echo 'it compiles' && return 1
    grep -q 'export this model again' log && return 0
    cat log
    return 1
}

compile_time() { # compiler
    needs "$1"
    whole rich >a.c
    (run "$1" -std=c99 -Os $integers -I"$root" -I"$prepared/models" -c a.c -o a.o && times >spent) || return 1
    echo "note: a file with an integer model and its runtime compiles in $(processor_seconds \
        spent) processor seconds ($1 -Os)"
}

run_checks "$@"
