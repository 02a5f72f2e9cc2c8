#!/bin/sh
# Compiles and runs one program that touches everything (tests/port/portable.c) with every compiler,
# for other machines, and with a covering set of the headers' option macros: each pair of them
# stands in some row.
#   sh tests/port/portability.sh [-v] [WORD]    only the checks that have WORD in their line; -v
#                                               prints all lines
#   sh tests/port/portability.sh --set          prints that covering set, a build in each line
#   sh tests/port/portability.sh --sums         prints tests/port/portable_sums.h anew
# A tool that is missing is a skip, with REQUIRE_TOOLS=1 a failure. The last line is "N passed, N
# failed, N skipped".

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

plain=-DMOE_NO_SIMD # where vectors are not the matter: they take most of the compile time

# Compilers and machines beside those of the covering set, in which clang and tcc without options
# are: the three headers or the amalgamated one, what compiles | what runs it. Warnings are those of
# flags().
rows() {
    cat <<TABLE
three gcc -O0 -std=c2x -funsigned-char $plain                     |
three gcc -O1 $plain                                              |
three gcc -O3 $plain                                              |
three gcc -Os $plain                                              |
three clang -O2 $plain                                            |
three clang-19 -O1 $plain                                         |
three clang-19 -O0 -std=c23 -funsigned-char                       |
three g++ -O0 -std=c++11 $plain                                   |
one g++ -O0 -std=c++14 $plain                                     |
three g++ -O0 -std=c++17 $plain                                   |
one g++ -O0 -std=c++20 $plain                                     |
three clang++ -O0 -std=c++11 $plain                               |
one clang++ -O0 -std=c++14 $plain                                 |
three clang++ -O0 -std=c++17 $plain                               |
three clang++ -O0 -std=c++20 $plain                               |
one clang++-19 -O0 -std=c++23 $plain                              |
one tcc -DMOE_REAL=double                                         |
one pcc                                                           |
three pcc -DMOE_REAL=double                                       |
three musl-gcc -O0 -static $plain                                 |
one musl-gcc -O0 -static $plain -DMOE_REAL=double                 |
one gcc -O0 $plain                                                |
one clang-19 -O0 $plain                                           |
three gcc-12 $x87 -O1 $plain                                      | qemu-i386
three gcc-12 $x87 -O0 $plain -DMOE_REAL=double                    | qemu-i386
three gcc-12 $x87 -O2 -std=gnu17 $plain                           | qemu-i386
three gcc-12 -m32 $i386 -O0                                       | qemu-i386
three aarch64-linux-gnu-gcc -O0 -static                           | qemu-aarch64
three arm-linux-gnueabihf-gcc -O0 -static -mfpu=neon              | qemu-arm
three riscv64-linux-gnu-gcc -O0 -static                           | qemu-riscv64
three s390x-linux-gnu-gcc $wide -O0 -static                       | qemu-s390x
one s390x-linux-gnu-gcc $wide -O0 -static -DMOE_REAL=double       | qemu-s390x
TABLE
}

# s390x and x87 compute floats in double in ISO C, and say so.
wide=-Wno-double-promotion
# gcc-multilib, which has a link to the kernel's headers, cannot be installed beside cross
# compilers.
i386='-idirafter /usr/include/x86_64-linux-gnu -Wno-double-promotion'
x87="-m32 -mno-sse -mfpmath=387 $i386"

# ---- the covering set of options ----

# The compilers, and an option in each line with what it can be: off.NAME is when it is not given.
# Masks leave one value of an enumeration out, and tests/port/portable.c knows what then is refused.
factors() {
    cat <<'TABLE'
clang tcc g++ arm-linux-gnueabihf-gcc
off.MOE_STATIC -DMOE_STATIC
off.MOE_REAL -DMOE_REAL=float -DMOE_REAL=double
off.MOE_NO_SIMD -DMOE_NO_SIMD
off.MOE_NO_AVX512 -DMOE_NO_AVX512
off.MOE_NO_QUANT -DMOE_NO_QUANT
off.MOE_NO_TRAIN -DMOE_NO_TRAIN
off.MOE_NO_FLOAT -DMOE_NO_FLOAT
off.MOE_NO_DSP -DMOE_NO_DSP
off.MOE_NO_PROGMEM -DMOE_NO_PROGMEM
off.MOE_NO_STDIO -DMOE_NO_STDIO
off.MOE_NO_MATCH -DMOE_NO_MATCH
off.MOE_NO_MESSAGES -DMOE_NO_MESSAGES
off.MOE_STDIO -DMOE_STDIO
off.MOE_NO_MALLOC -DMOE_NO_MALLOC
off.MOE_MALLOC -DMOE_MALLOC
off.MOE_NO_LIBM -DMOE_NO_LIBM
off.MOE_LIBM -DMOE_LIBM
off.MOE_STB_DS_PATH -DMOE_STB_DS_PATH=STB
off.MOE_KEEP_ACTS -DMOE_KEEP_ACTS=0x37
off.MOE_KEEP_SCORES -DMOE_KEEP_SCORES=0xfffffff7
off.MOE_KEEP_GATES -DMOE_KEEP_GATES=0xfffffffd
off.MOE_KEEP_SELECTS -DMOE_KEEP_SELECTS=0xffffff7f
off.MOE_KEEP_WEIGHTS -DMOE_KEEP_WEIGHTS=0xfffffffb
off.MOE_KEEP_INPUTS -DMOE_KEEP_INPUTS=0xfffffffb
off.MOE_KEEP_REFINES -DMOE_KEEP_REFINES=0xfffffffd
off.MOE_KEEP_MODULES -DMOE_KEEP_MODULES=0xffffffbf
off.MOE_KEEP_EXTRAS -DMOE_KEEP_EXTRAS=0xfffffffe -DMOE_KEEP_EXTRAS=0x3
TABLE
}

# Pairs that the headers refuse by name, which the check "refused" proves.
excluded() {
    cat <<'TABLE'
-DMOE_STDIO -DMOE_NO_STDIO
-DMOE_MALLOC -DMOE_NO_MALLOC
-DMOE_LIBM -DMOE_NO_LIBM
-DMOE_NO_LIBM off.MOE_NO_TRAIN
-DMOE_NO_LIBM -DMOE_REAL=double
TABLE
}

# Macros in conditions of the headers that are no options of theirs.
others() {
    cat <<'TABLE'
MOE_IMPLEMENTATION tests/port/portable.c defines it, and the check linked does without
MOE_KERNELS_H a guard
MOE_ROUTERS_H a guard
MOE_H a guard
MOE_REAL_IS_DOUBLE defined by moe_kernels.h
MOE_VERSION_MAJOR defined by moe_kernels.h, compared by the others
MOE_VERSION_MINOR likewise
MOE_VERSION_PATCH likewise
TABLE
}

# Greedy: of some candidates the build with the most pairs that no build before has. Integers alone
# (MOE_NO_FLOAT) leave most of the program out, so only pairs with that option count there.
covering_set() {
    { factors && echo excluded && excluded; } | awk '
        function random(n) { seed = (seed * 16807) % 2147483647; return seed % n }
        function allowed(f, v,   g) {
            for (g = 1; g <= factors; g++)
                if (chosen[g] > 0 && (value[f, v], value[g, chosen[g]]) in never) return 0
            return 1
        }
        function counts(f, g, integers) { return f == no_float || g == no_float || !integers }
        function gain(f, v,   g, sum, integers) {
            integers = (f == no_float ? v : chosen[no_float]) == 2
            for (g = 1; g <= factors; g++)
                if (g != f && chosen[g] > 0 && ((f, v, g, chosen[g]) in open) && counts(f, g, integers)) sum++
            return sum + 0
        }
        # A pair that no build has yet begins a candidate; 0: there is none.
        function begin(   i, f, v, g, w) {
            for (f = 1; f <= factors; f++) chosen[f] = 0
            for (i = random(factors); i < 2 * factors; i++)
                for (v = 1; v <= values[f = i % factors + 1]; v++)
                    for (g = 1; g <= factors; g++) for (w = 1; w <= values[g]; w++)
                    if ((f, v, g, w) in open) {
                        chosen[f] = v; chosen[g] = w
                        if (!chosen[no_float]) chosen[no_float] = 1
                        return 1
                    }
            return 0
        }
        function candidate(   i, j, f, v, best, most, g) {
            if (!begin()) return 0
            for (i = 1; i <= factors; i++) order[i] = i
            for (i = factors; i > 1; i--) { j = random(i) + 1; f = order[i]; order[i] = order[j]; order[j] = f }
            for (i = 1; i <= factors; i++) {
                f = order[i]; most = -1
                if (chosen[f]) continue
                for (v = 1; v <= values[f]; v++)
                    if (allowed(f, v) && (g = gain(f, v)) > most) { most = g; best = v }
                chosen[f] = best
            }
            most = 0
            for (i = 1; i <= factors; i++) most += gain(i, chosen[i])
            return most / 2
        }
        $1 == "excluded" { excluding = 1; next }
        excluding { never[$1, $2] = never[$2, $1] = 1; next }
        {
            factors++
            values[factors] = NF
            for (i = 1; i <= NF; i++) value[factors, i] = $i
            if ($1 == "off.MOE_NO_FLOAT") no_float = factors
        }
        END {
            seed = 7
            for (f = 1; f <= factors; f++) for (v = 1; v <= values[f]; v++)
                for (g = 1; g <= factors; g++) for (w = 1; w <= values[g]; w++)
                if (f != g && !((value[f, v], value[g, w]) in never)) open[f, v, g, w] = 1
            while (1) {
                most = 0
                for (t = 0; t < 30; t++)
                    if ((score = candidate()) > most) {
                        most = score
                        for (f = 1; f <= factors; f++) kept[f] = chosen[f]
                    }
                if (most == 0) break
                line = ""
                integers = kept[no_float] == 2
                for (f = 1; f <= factors; f++) {
                    line = line value[f, kept[f]] " "
                    for (g = 1; g <= factors; g++) if (counts(f, g, integers)) delete open[f, kept[f], g, kept[g]]
                }
                print line
            }
        }'
}

# Proves a set: each line has one value of each option and no excluded pair; each pair of values
# that is not excluded stands in a line, one without MOE_NO_FLOAT unless this is of the pair.
prove_set() { # file
    { factors && echo excluded && excluded && echo builds && cat "$1"; } | awk '
        $1 == "excluded" || $1 == "builds" { part = $1; next }
        part == "" { n++; for (i = 1; i <= NF; i++) { of[$i] = n; names[++all] = $i }; next }
        part == "excluded" { never[$1, $2] = never[$2, $1] = 1; next }
        {
            builds++
            if (NF != n) print "a build of " NF " values: " $0
            integers = / -DMOE_NO_FLOAT /
            for (i = 1; i <= NF; i++) {
                if (of[$i] != i) print $i " at place " i ": " $0
                for (j = 1; j < i; j++) {
                    if (($i, $j) in never) print $i " and " $j " exclude each other: " $0
                    if (!integers || $i ~ /MOE_NO_FLOAT$/ || $j ~ /MOE_NO_FLOAT$/) seen[$i, $j] = seen[$j, $i] = 1
                }
            }
        }
        END {
            for (i = 1; i <= all; i++) for (j = 1; j < i; j++)
                if (of[names[i]] != of[names[j]] && !((names[i], names[j]) in never)) {
                    pairs++
                    if (!((names[i], names[j]) in seen)) print "no build has " names[i] " and " names[j]
                }
            if (builds == 0 || pairs < 1000) print builds + 0 " builds for " pairs + 0 " pairs"
        }'
}

# A build of the set as a row of the table above.
as_row() {
    sed -e 's/off\.[A-Z0-9_]* *//g' -e "s|=STB |=<$stb_folder/stb_ds.h> |" -e 's/^/three /' \
        -e 's/\(.*gnueabihf-gcc\) \(.*\)/\1 -static \2/' \
        -e 's/^three \(g++\|clang\|gcc\|arm[^ ]*\) /&-O0 /' -e '/gnueabihf/!s/$/|/' -e '/gnueabihf/s/$/| qemu-arm/'
}

# ---- the checks: a line is a function and its arguments ----

plan() {
    echo 'options'
    echo 'covering'
    excluded | sed -e 's/^/refused gcc /' -e 's/ off\.[A-Z0-9_]*//'
    for machine in native 'hidden avx512' 'hidden avx2' 'emulated Nehalem' 'emulated Haswell' \
        'emulated EPYC' 'emulated EPYC-Milan'; do
        echo "dispatch $machine"
    done
    rows | sed -e 's/^/program /' -e 's/  */ /g'
    as_row <"$prepared/set" | sed 's/^/program /'
    echo 'linked gcc -std=c99 / gcc -std=c99'
    echo 'linked clang -std=c99 / g++ -std=c++11 -x c++'
    echo 'linked g++ -std=c++11 -x c++ / gcc -std=c99'
    echo 'copies gcc -DMOE_STATIC / -DMOE_STATIC -DMOE_REAL=double'
    echo 'copies clang -DMOE_STATIC / -DMOE_STATIC'
    echo 'copies clang / -DMOE_REAL=double'
    echo 'copies tcc -DMOE_STATIC / -DMOE_REAL=double'
    echo 'bare gcc -Os'
    echo 'bare clang -O0'
    echo 'windows'
    echo 'controls'
}

# The models that all builds are compared with come from this machine, without vectors; the program
# for dispatch is compiled beside.
prepare() {
    mkdir "$prepared/one" "$prepared/models"
    sh amalgamate classic export >"$prepared/one/moe.h" || return 1
    covering_set >"$prepared/set"
    setup_stb_flag "$CC"
    vectors >"$prepared/vectors.log" 2>&1 &
    $CC -std=c99 -O0 $plain -I. ${stb_flag:+-I"$stb_flag"} tests/port/portable.c -o "$prepared/write" -lm &&
        "$prepared/write" write "$prepared/models"
    prepared_status=$?
    wait
    return "$prepared_status"
}

vectors() {
    [ "${word:-dispatch}" = dispatch ] || return 0
    gcc -O1 -Wall -Wextra -c tests/port/devices/hide.c -o "$prepared/hide.o" &&
        gcc -std=c99 -O1 -static -I. ${stb_flag:+-I"$stb_flag"} tests/port/portable.c "$prepared/hide.o" -o \
        "$prepared/vectors" -lm
}

# The strictest that a compiler understands; options that follow are stronger.
flags() { # compiler
    case $1 in
    g++* | clang++*) echo '-std=c++11 -Wall -Wextra -Werror' ;;
    tcc) echo '-std=c99 -Wall -Werror' ;;
    pcc) echo '-std=c99' ;;
    *) strict_flags "$1" ;;
    esac
}

language() { # compiler
    case $1 in
    g++* | clang++*) echo '-x c++' ;;
    esac
}

# Compiles the words before the bar, and runs the program by those behind it.
program() { # three|one compiler options... | runner...
    headers=$1
    shift
    command=
    while [ "$1" != '|' ]; do
        command="$command $1"
        shift
    done
    shift
    # shellcheck disable=SC2086
    build_and_run "$headers" "$*" $command
}

build_and_run() { # three|one runner compiler options...
    folder=$root
    [ "$1" != one ] || folder=$prepared/one
    runner=$2
    shift 2
    runs_with $runner
    compiler=$1
    shift
    case $compiler in
    *-linux-gnu*gcc | gcc-12) needs_to_link "$compiler" $(only_target "$@") ;;
    *) needs "$compiler" ;;
    esac
    setup_stb_flag "$compiler"
    [ "$folder" = "$root" ] || stb_flag=
    compiled "$@" || shifted "$@" || {
        cat log
        return 1
    }
    # pcc's ld warns of a stack that may be executed.
    [ "$compiler" = pcc ] || empty 'warnings:' "$(cat log)" || return 1
    run_portable "$runner" ./program.exe
}

compiled() { # options...; $compiler, $folder and $stb_flag are set
    run "$compiler" $(flags "$compiler") "$@" -I"$folder" ${stb_flag:+-I"$stb_flag"} -DPORTABLE_MODELS \
        -I"$prepared/models" \
        $(language "$compiler") "$root/tests/port/portable.c" -o program.exe -lm >log 2>&1
}

# pcc's preprocessor misses a directive at some positions of a file: puts comments of several
# lengths before copies of the headers.
shifted() { # options...
    [ "$compiler" = pcc ] || return 1
    from=$folder folder=$PWD/shifted comment=
    mkdir shifted
    for more in 1 2 3 4 5 6 7 8; do
        comment="$comment-----$more"
        for header in moe.h moe_routers.h moe_kernels.h; do
            [ ! -f "$from/$header" ] || { echo "/*$comment*/" && cat "$from/$header"; } >"shifted/$header"
        done
        ! compiled "$@" || return 0
    done
    return 1
}

only_target() { # options
    for option in "$@"; do
        case $option in
        -m* | -static | -idirafter | /usr/*) echo "$option" ;;
        esac
    done
}

runs_with() { # runner...
    [ $# -eq 0 ] || needs "$1"
}

# Leaves what it says in lines.
run_portable() { # runner program
    setup_limit 60 $1 "$2" >lines || {
        echo "exit status $?: $1 $2"
        tail -n 20 lines
        return 1
    }
    passed_all lines
}

# ---- check functions ----

# The options in the headers' conditions, and those that their comments describe, are all in the
# lists above, and the other way round.
options() {
    { factors | tr ' ' '\n' | sed -n 's/^off\.//p' && others | sed 's/ .*//'; } | sort >known
    (cd "$root" && sed -n -e '/^ *# *\(if\|ifdef\|ifndef\|elif\)/p' \
        -e '/#if defined(MOE_IMPLEMENTATION)/p' moe_kernels.h moe_routers.h moe.h) |
        grep -owE 'MOE_[A-Z0-9_]+' | grep -vE '^MOE_(MODEL_VERSION|KEEP_)$' | sort -u >found
    (cd "$root" && sed '/^\*\/$/q' moe_kernels.h && sed '/^\*\/$/q' moe.h) |
        sed -n -e 's/^     \(MOE_[A-Z0-9_]*\)  .*\(must\|yes\|no\|[a-z]\).*/\1/p' \
        -e 's/.*(\(MOE_[A-Z]*\): keep .*/\1/p' | sort -u >described
    empty 'in the headers and not in the lists:' "$(comm -13 known found)" &&
        empty 'in the lists and not in the headers:' "$(comm -23 known found)" &&
        empty 'described and not in the lists:' "$(comm -13 known described)" &&
        run test "$(grep -c . described)" -ge 12
}

covering() {
    empty 'not covering:' "$(prove_set "$prepared/set")" &&
        echo "note: $(grep -c . "$prepared/set") builds cover all pairs of $(factors | grep -c .) options"
}

# What is excluded is refused by the headers, with a message of ours.
refused() { # compiler options...
    needs "$1"
    printf '#include "moe.h"\n' >a.c
    if "$@" -std=c99 -DMOE_IMPLEMENTATION -I"$root" -E a.c >/dev/null 2>messages; then
        echo "accepted: $*"
        return 1
    fi
    run grep -q '#error.*moe: ' messages
}

# All tables of kernels that a processor has are used, and no others: hidden from the program at
# full speed, or emulated without them, where an instruction of theirs would end it.
dispatch() { # native | hidden NAME | emulated NAME
    [ "$(uname -m)" = x86_64 ] || missing 'an x86-64 processor'
    [ -x "$prepared/vectors" ] || {
        cat "$prepared/vectors.log"
        return 1
    }
    run_portable '' "$prepared/vectors" || return 1
    tables=$(grep '^tables ' lines)
    case $1 in
    hidden)
        HIDE=$2 "$prepared/vectors" >lines
        [ $? -ne 77 ] || missing 'CPUID faulting, by which a processor hides its features,'
        passed_all lines || return 1
        ;;
    emulated)
        needs qemu-x86_64
        run_portable "qemu-x86_64 -cpu $2" "$prepared/vectors" 2>warnings || return 1
        ;;
    esac
    case $* in
    native) ;;
    'hidden avx512') tables=$(echo "$tables" | sed 's/ avx512//') ;;
    'hidden avx2' | 'emulated Nehalem') tables='tables c' ;;
    'emulated Haswell' | 'emulated EPYC') tables='tables c avx2' ;;
    'emulated EPYC-Milan') tables='tables c avx2-one-stream' ;; # how a Zen 3 reads memory
    esac
    run grep -qx "$tables" lines && echo "note: $*: $tables"
}

# The library as one object, the program as another.
linked() { # compiler options... / compiler options...
    library=
    while [ "$1" != / ]; do
        library="$library $1"
        shift
    done
    shift
    set -f
    printf '#define MOE_IMPLEMENTATION\n#include "tests/all.h"\n' >library.c
    # shellcheck disable=SC2086
    object library.o $library library.c &&
        object program.o "$@" -DTEST_LINKED -DPORTABLE_MODELS -I"$prepared/models" "$root/tests/port/portable.c" &&
        run "$(linker ${library%% -*} "$1")" program.o library.o -o program.exe -lm && run_portable '' ./program.exe
}

# Objects of C++ are linked by its compiler.
linker() { # compiler compiler
    case $1 in
    *++) echo "$1" ;;
    *) echo "$2" ;;
    esac
}

object() { # output compiler options... file
    output=$1
    shift
    needs "$1"
    setup_stb_flag "$1"
    run "$@" -O0 $plain -I"$root" ${stb_flag:+-I"$stb_flag"} -c -o "$output"
}

# Two copies of the library in one program.
copies() { # compiler options... / options...
    needs "$1"
    compiler=$1
    shift
    options=
    while [ "$1" != / ]; do
        options="$options $1"
        shift
    done
    shift
    printf 'int portable_a(int, char **);\nint portable_b(int, char **);\n' >main.c
    printf 'int main(int n, char **v) { return portable_a(n, v) + portable_b(n, v); }\n' >>main.c
    # shellcheck disable=SC2086
    object a.o "$compiler" -std=c99 $options -DPORTABLE_MAIN=portable_a "$root/tests/port/portable.c" &&
        object b.o "$compiler" -std=c99 "$@" -DPORTABLE_MAIN=portable_b "$root/tests/port/portable.c" &&
        run "$compiler" main.c a.o b.o -o program.exe -lm && run_portable '' ./program.exe &&
        run test "$(grep -c ' passed, 0 failed' lines)" -eq 2
}

# Without a C library: neither headers of one nor functions.
bare() { # compiler optimization
    needs "$1"
    needs nm
    [ "$(uname -sm)" = 'Linux x86_64' ] || missing 'Linux on an x86-64 processor'
    include=$("$1" -print-file-name=include)
    [ -f "$include/stddef.h" ] || include=$("$1" -print-resource-dir)/include
    set -- "$1" "$2" -ffreestanding -fno-stack-protector -nostdinc -isystem "$include"
    run "$@" $(strict_flags "$1") $plain -DMOE_NO_TRAIN -I"$root" -DPORTABLE_MODELS -I"$prepared/models" \
        -c "$root/tests/port/portable.c" -o program.o || return 1
    empty 'wanted:' "$(nm -u program.o | awk '{ print $NF }' |
        grep -vxE 'memcpy|memmove|memset|bare_say|_GLOBAL_OFFSET_TABLE_')" &&
        run "$@" -O0 -Wall -Wextra -Werror -c "$root/tests/port/devices/bare.c" -o bare.o &&
        run "$1" -nostdlib -static program.o bare.o -o program.exe && run_portable '' ./program.exe
}

windows() {
    needs_to_link x86_64-w64-mingw32-gcc
    # After <windows.h>, where near and far are macros, in Microsoft's small too.
    setup_stb_flag x86_64-w64-mingw32-gcc
    printf '#%s\n' 'define small char' 'include <windows.h>' 'define MOE_IMPLEMENTATION' \
        'include "tests/all.h"' >after.c
    run x86_64-w64-mingw32-gcc -std=c99 -fsyntax-only -I"$root" ${stb_flag:+-I"$stb_flag"} after.c || return 1
    find_wine
    failures=0
    for options in 'three -O0' 'three -O0 -DMOE_REAL=double' "one -O0 $plain"; do
        program ${options%% *} x86_64-w64-mingw32-gcc ${options#* } '|' "$wine" || failures=$((failures + 1))
    done
    end_wine
    [ "$failures" -eq 0 ]
}

# What must fail does.
controls() {
    sed '$d' "$prepared/set" >fewer && run grep -q . fewer || return 1
    for wrong in fewer excluded other; do
        case $wrong in
        excluded) sed 's/off.MOE_STDIO/-DMOE_STDIO/' "$prepared/set" >$wrong ;;
        other) sed 's/-DMOE_NO_DSP/off.MOE_NO_DSP/' "$prepared/set" >$wrong ;;
        esac
        [ -n "$(prove_set $wrong)" ] || {
            echo "the set is proved though it is wrong: $wrong"
            return 1
        }
    done
    echo '5 passed, 1 failed' >lines
    ! passed_all lines >said || return 1
    # A program whose models say other than those of this machine.
    mkdir models
    sed 's/_HASH \([0-9]*\)[0-9]u/_HASH \1u/' "$prepared/models/portable_models.h" >models/portable_models.h
    prepared_models=$prepared/models
    needs gcc
    run gcc -std=c99 -O0 -DMOE_NO_FLOAT -I"$root" -DPORTABLE_MODELS -Imodels -I"$prepared_models" \
        "$root/tests/port/portable.c" -o program.exe || return 1
    ! run_portable '' ./program.exe >said || {
        echo 'wrong models have passed'
        return 1
    }
    run grep -q 'portable_dense' said
}

case ${1:-} in
--set)
    covering_set
    exit
    ;;
--sums)
    setup_scratch
    setup_compiler
    setup_stb
    setup_stb_flag "$CC"
    $CC -std=c99 -O0 $plain -DMOE_REAL=double -I. ${stb_flag:+-I"$stb_flag"} tests/port/portable.c -o "$scratch/sums" \
        -lm && "$scratch/sums" sums | grep '^    {'
    exit
    ;;
esac
run_checks "$@"
