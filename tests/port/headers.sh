#!/bin/sh
# Compiles, links and runs the headers in every way that a user may. sh tests/port/headers.sh [-v]
# [WORD]: only the checks that have WORD in their line; -v prints all lines; quick: some of each
# kind. A compiler that is missing is a skip (gcc: a failure). Ends with "N passed, N failed, N
# skipped".

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

# ---- the checks: a line is a function and its arguments ----

plan() {
    echo 'compile_time gcc' # the slowest
    for header in moe_kernels.h moe_routers.h moe.h; do
        for real in float double; do
            for compiler in gcc clang; do
                case $header.$compiler.$real in
                moe.h.gcc.float) ;; # compile_time
                moe.h.gcc.double) echo "strict $header $compiler -O2 $real" ;; # gcc warns of more when it optimizes
                *) echo "strict $header $compiler -O0 $real" ;;
                esac
                echo "declarations $header $compiler $real"
            done
            echo "plusplus $header g++ $real"
            echo "plusplus $header clang++ $real"
            echo "tiny $header tcc $real"
            echo "units $header tcc $real"
            echo "static_units $header tcc $real"
        done
        echo "units $header gcc float"
        echo "static_units $header gcc float"
        echo "units $header clang float"
        echo "static_units $header g++ float"
        echo "static_symbols $header gcc float"
        for standard in c++17 c++20; do
            echo "plusplus_later $header g++ $standard"
            echo "plusplus_later $header clang++ $standard"
        done
        echo "twice $header tcc"
        echo "twice $header g++"
        echo "later $header tcc"
        echo "later $header g++"
        echo "first_program $header gcc"
        echo "first_program $header g++"
        echo "names $header gcc"
    done
    # Extras: each alone, every two of them, and all, behind the three headers or the one that
    # amalgamate writes.
    for real in float double; do
        for library in headers amalgamated; do
            for one in $extras; do
                echo "extras tcc $real $library $one"
                for other in $extras; do
                    case $one.$other in
                    "$other.$one" | moe_layout.*) continue ;; # what describes structs comes last
                    esac
                    echo "extras tcc $real $library $one $other"
                done
            done
            for compiler in tcc clang; do echo "extras $compiler $real $library $extras"; done
        done
        for compiler in gcc g++ clang++; do
            echo "extras $compiler $real headers $extras"
            echo "extras_seen $compiler $real amalgamated $extras"
        done
    done
    for one in $extras; do
        echo "extras clang float headers $one"
        for compiler in gcc g++; do echo "extras_seen $compiler float headers $one"; done
        echo "first_program examples/extras/$one.h gcc"
        echo "first_program examples/extras/$one.h g++"
    done
    for options in -DMOE_NO_TRAIN -DMOE_NO_QUANT -DMOE_NO_STDIO '-DMOE_NO_MALLOC' '-DMOE_NO_TRAIN -DMOE_NO_QUANT' \
        '-DMOE_NO_TRAIN -DMOE_NO_FLOAT' -DMOE_NO_FLOAT -DMOE_STATIC; do
        for one in $extras; do echo "extras_options tcc $one $options"; done
        echo "extras_options tcc $extras $options"
        for compiler in gcc clang; do echo "extras_options_seen $compiler $extras $options"; done
    done
    echo 'entered 90'
    for order in 'moe_kernels.h moe_routers.h moe.h' 'moe_kernels.h moe.h moe_routers.h' \
        'moe_routers.h moe_kernels.h moe.h' \
        'moe_routers.h moe.h moe_kernels.h' 'moe.h moe_kernels.h moe_routers.h' 'moe.h moe_routers.h moe_kernels.h'; do
        echo "order tcc $order"
        echo "staggered tcc $order"
    done
    echo 'order gcc moe_kernels.h moe_routers.h moe.h'
    echo 'staggered gcc moe_kernels.h moe.h moe_routers.h'
    for real in float double; do
        echo "defined tcc $real"
        echo "alone exported gcc $real"
    done
    echo 'defined gcc float'
    echo 'c_from_cpp gcc g++'
    echo 'mixing gcc'
    for options in -O0 -O3 '-O2 -ffunction-sections -fdata-sections'; do echo "versions gcc $options"; done
    for compiler in clang g++ clang++; do echo "versions $compiler -O3 -ffunction-sections -fdata-sections"; done
    echo 'versions gcc -O2 -flto'
    echo 'versions gcc -O2 -DMOE_REAL=double'
    echo 'versions x86_64-w64-mingw32-gcc -O1'
    echo 'versions tcc'
    echo 'versions_of_headers gcc'
    echo 'two_implementations gcc'
    echo 'match_left_out gcc'
    for compiler in gcc clang g++; do echo "stb_is_asked_for $compiler"; done
    # Combinations of options: tests/port/portability.sh has every pair of them. These are what
    # people choose.
    echo 'options gcc -DMOE_NO_TRAIN'
    echo 'options clang -DMOE_NO_TRAIN -DMOE_STDIO'
    echo 'options clang -DMOE_NO_TRAIN -DMOE_MALLOC'
    echo "options gcc -DMOE_NO_TRAIN -DMOE_STDIO -DMOE_MALLOC $quick"
    echo 'options clang -DMOE_NO_TRAIN -DMOE_STATIC'
    echo 'options clang -DMOE_NO_QUANT -DMOE_NO_STDIO'
    echo 'options clang -DMOE_NO_QUANT -DMOE_NO_SIMD'
    echo 'options clang -DMOE_NO_QUANT -DMOE_REAL=double'
    echo 'options clang -DMOE_NO_AVX512'
    echo 'options clang -DMOE_NO_QUANT'
    echo 'options clang -DMOE_NO_AVX512 -DMOE_NO_TRAIN'
    echo 'options clang -DMOE_NO_TRAIN'
    echo 'options clang -DMOE_NO_STDIO -DMOE_NO_MALLOC -DMOE_NO_SIMD'
    echo 'options clang -DMOE_NO_TRAIN -DMOE_NO_SIMD -DMOE_STATIC'
    echo 'options clang -DMOE_NO_TRAIN -DMOE_REAL=double'
    echo 'refused gcc -DMOE_STDIO -DMOE_NO_STDIO'
    echo 'refused gcc -DMOE_MALLOC -DMOE_NO_MALLOC'
    echo 'refused gcc -DMOE_REAL=int'
    echo 'stb_not_linked gcc'
    echo 'stb_not_linked g++'
    echo 'stb_user gcc'
    echo 'stb_without_path gcc'
    echo 'inference gcc'
    echo "without clang -DMOE_NO_MALLOC $heap"
    echo "without clang -DMOE_NO_STDIO $stdio"
    echo "without clang -DMOE_NO_TRAIN $heap|$stdio"
    echo 'comments'
    echo 'comments_noticed'
}

# What sh tests/run without a KIND does of these. tcc takes a tenth of the time of others.
quick_plan() {
    main=gcc
    setup_tool gcc || main=clang
    fast=tcc
    setup_tool tcc || fast=$main
    for header in moe.h moe_kernels.h moe_routers.h; do
        echo "strict $header $main -O0 double"
        echo "declarations $header $main float"
        echo "units $header $fast float"
        echo "first_program $header $fast"
    done
    for one in $extras; do
        echo "extras $fast float headers $one"
        echo "first_program examples/extras/$one.h $fast"
    done
    echo "extras $fast double headers $extras"
    echo "extras $fast float amalgamated $extras"
    echo "extras $main float headers $extras"
    echo "extras_options $fast $extras -DMOE_NO_TRAIN"
    ! setup_tool g++ || echo "plusplus moe_kernels.h g++ float"
    echo "options $fast -DMOE_NO_TRAIN -DMOE_NO_SIMD"
    echo "options $fast -DMOE_NO_QUANT -DMOE_NO_STDIO -DMOE_NO_MALLOC"
    echo "refused $main -DMOE_STDIO -DMOE_NO_STDIO"
    echo "defined $fast float"
    echo "versions_of_headers $main"
    echo 'entered 90'
    echo 'comments'
}

# In the order in which tests/all.h has them; the transport for MPI has its own tests
# (tests/port/mpi.sh).
extras=$(sed -n 's|^#include "../examples/extras/\(.*\)\.h".*|\1|p' tests/all.h | tr '\n' ' ')

prepare() { mkdir "$prepared/one" && sh amalgamate >"$prepared/one/moe.h"; }

heap='malloc|calloc|realloc|free'
stdio='f(open|close|read|write|flush|seek|tell|printf|puts)|printf|puts|putchar'
stdio=$stdio'|rename|remove|unlink|perror|std(in|out|err)'

# ---- sources ----

# A program that does little, and a unit that only declares: both use a function of each header they
# include.
program() {
    printf '#define MOE_IMPLEMENTATION\n#include "%s"\nint main(void) { return moe_version()[0] == 0; }\n' "$1"
}
unit() {
    printf '#include "%s"\nint moe_unit(void);\nint moe_unit(void) {\n' "$1"
    printf '    return moe_version()[0] == 0 || moe_status_text(MOE_OK)[0] == 0;\n}\n'
}

# Where several units are the matter, the vector kernels stay out: they take most of the compile
# time.
quick=-DMOE_NO_SIMD

# The names of all public functions, from the declarations.
public_functions() {
    cat moe_kernels.h moe_routers.h moe.h | sed -n 's/^MOE_API .*[ *]\(moe_[a-z0-9_]*\)(.*/\1/p' | sort -u
}

# ---- check functions: 0 passed, 77 skipped, else failed ----

# What they print is shown when they fail.

# The vector kernels are compiled with moe.h, which has all of the others in it.
parts_of() { [ "$1" = moe.h ] || echo "$quick"; } # header

strict() { # header compiler optimization real
    needs "$2"
    program "$1" >a.c
    run "$2" $(strict_flags "$2") "$3" $(parts_of "$1") $(real_option "$4") -I"$root" -c a.c -o a.o || return
    keep_object "$1" "$2" "$4"
}

# For what looks at the symbols of the whole library.
keep_object() { # header compiler real
    [ "$1" != moe.h ] || mv a.o "$prepared/$2.$3.o"
}

declarations() { # header compiler real
    needs "$2"
    unit "$1" >a.c
    run "$2" $(strict_flags "$2") $(real_option "$3") -I"$root" -c a.c -o a.o
}

# In double the vector kernels are looked at without making code: strict makes it of them, in C.
plusplus() { # header compiler real
    needs "$2"
    program "$1" >a.cpp
    parts=$(parts_of "$1")
    if [ "$3" = double ]; then
        in_language "$2" "$root" $parts $(real_option "$3") -fsyntax-only a.cpp || return 1
        parts=$quick
    fi
    in_language "$2" "$root" $parts $(real_option "$3") a.cpp -o a -lm && run ./a
}

# A later standard, without making code.
plusplus_later() { # header compiler standard
    needs "$2"
    program "$1" >a.cpp
    run "$2" "-std=$3" -Wall -Wextra -Werror -fsyntax-only -I"$root" a.cpp
}

tiny() { # header compiler real
    needs "$2"
    program "$1" >a.c
    setup_stb_flag "$2"
    run "$2" -std=c99 -Wall -Werror $(real_option "$3") -I"$root" ${stb_flag:+-I"$stb_flag"} a.c -o a -lm && run ./a
}

units() { # header compiler real
    needs "$2"
    program "$1" | sed 's/return /int moe_unit(void); return moe_unit() || /' >a.c
    unit "$1" >b.c
    run "$2" $(strict_flags "$2") $quick $(real_option "$3") -I"$root" a.c b.c -o a -lm && run ./a
}

static_units() { # header compiler real
    needs "$2"
    { echo '#define MOE_STATIC' && program "$1" |
        sed -e 1d -e 's/int main/int moe_unit(void); int main/' -e 's/return /return moe_unit() || /'; } >a.c
    { echo '#define MOE_STATIC' && unit "$1"; } >b.c
    case $2 in
    *++) set -- "$1" "$2" "$3" -std=c++11 -x c++ ;;
    *) set -- "$1" "$2" "$3" $(strict_flags "$2") ;;
    esac
    compiler=$2 real=$3
    shift 3
    run "$compiler" "$@" $quick $(real_option "$real") -I"$root" a.c b.c -o a -lm && run ./a
}

# With MOE_STATIC nothing of the library or of stb_ds leaves the object.
static_symbols() { # header compiler real
    needs "$2"
    needs nm
    { echo '#define MOE_STATIC' && echo "#include \"$1\"" &&
        echo 'int main(void) { return moe_version()[0] == 0; }'; } >a.c
    run "$2" -std=c99 -O0 $(parts_of "$1") -I"$root" -c a.c -o a.o || return 1
    empty 'exported or undefined:' "$(nm -g a.o | grep -E ' (moe|moei|stb|stbds)_')"
}

# What is declared or defined twice in a file, the front end sees; tcc makes the programs.
one_file() { # compiler
    [ "$1" != g++ ] || {
        in_language g++ "$root" $quick -fsyntax-only a.c
        return
    }
    in_language "$1" "$root" $quick a.c -o a -lm && run ./a
}

twice() { # header compiler
    needs "$2"
    { program "$1" && printf '#include "%s"\n' "$1" && printf '#include "%s"\n' "$1"; } >a.c
    one_file "$2"
}

# Declarations on top, the implementation at the end of the same file.
later() { # header compiler
    needs "$2"
    { unit "$1" && printf '#define MOE_IMPLEMENTATION\n#include "%s"\nint main(void) { return moe_unit(); }\n' "$1"
    } >a.c
    one_file "$2"
}

order() { # compiler headers...
    needs "$1"
    compiler=$1
    shift
    {
        echo '#define MOE_IMPLEMENTATION'
        printf '#include "%s"\n' "$@"
        echo 'int main(void) { return moe_version()[0] == 0; }'
    } >a.c
    run "$compiler" $(strict_flags "$compiler") $quick -I"$root" a.c -o a -lm && run ./a
}

# Some headers with, others without the implementation, in the same file.
staggered() { # compiler headers...
    needs "$1"
    {
        printf '#include "%s"\n#define MOE_IMPLEMENTATION\n#include "%s"\n#undef MOE_IMPLEMENTATION\n' "$2" "$3"
        printf '#include "%s"\n#define MOE_IMPLEMENTATION\n#include "%s"\n#include "%s"\n#include "%s"\n' "$4" "$4" \
            "$2" "$3"
        echo 'int main(void) { return moe_version()[0] == 0; }'
    } >a.c
    run "$1" $(strict_flags "$1") $quick -I"$root" a.c -o a -lm && run ./a
}

# One token through the default layer enters at most so many functions; more are named.
entered() { # most
    needs gcc
    run gcc -std=c99 -O0 -w -no-pie -finstrument-functions -DMOE_NO_SIMD -I"$root" -I"$stb_folder" \
        "$root/tests/quality/entered.c" -o entered -lm &&
        ./entered >addresses || return 1
    echo "note: one token through the default layer enters $(wc -l <addresses) functions"
    [ "$(wc -l <addresses)" -le "$1" ] && return 0
    nm entered | sed 's/^0*/0x/' | awk 'NR == FNR { name[$1] = $3; next } { print name[$1] }' - addresses
    return 1
}

# An extra may lie beside moe.h.
first_program() { # header compiler
    needs "$2"
    first_program_of "$1" "$2" "$root" -I"$root/$(dirname "$1")"
}

# The preprocessor shows a user who includes the declarations only names of ours and of the standard
# headers.
names() { # header compiler
    needs "$2"
    printf '#include <stddef.h>\n#include <stdint.h>\n' >a.c
    printf '#include <stddef.h>\n#include <stdint.h>\n#include "%s"\n' "$1" >b.c
    run "$2" -std=c99 -I"$root" -E -dM a.c -o a.txt && run "$2" -std=c99 -I"$root" -E -dM b.c -o b.txt || return 1
    sort a.txt >a.sorted && sort b.txt >b.sorted
    empty 'foreign macros:' "$(comm -13 a.sorted b.sorted | grep -vE '^#define (MOE_|MOEI_|moe_|moei_)')"
}

include_extras() { # names...
    printf '#include "moe.h"\n'
    printf '#include "examples/extras/%s.h"\n' "$@"
}

# One unit has the implementation, another the declarations; a program calls every function by its
# address.
extras() { # compiler real library names...
    needs "$1"
    units_of_extras "$@" || return 1
    in_language "$compiler" "$folder" $quick $(real_option "$real") -Iextras -c a.c -o a.o &&
        in_language "$compiler" "$folder" $quick $(real_option "$real") -Iextras -c b.c -o b.o &&
        run "$compiler" a.o b.o -o a -lm && run ./a
}

# What the front end says of these units. Code of the same is made by clang, which also tells of
# what is unused, and of all extras in one unit by each compiler.
extras_seen() { # compiler real library names...
    needs "$1"
    units_of_extras "$@" &&
        in_language "$compiler" "$folder" $quick $(real_option "$real") -Iextras -fsyntax-only a.c b.c
}

# a.c and b.c; sets $compiler, $real and $folder.
units_of_extras() { # compiler real library names...
    compiler=$1 real=$2 folder=$root
    [ "$3" = headers ] || folder=$prepared/one
    shift 3
    for name in "$@"; do
        sed -n 's/^MOE_API .*[ *]\(moe_[a-z0-9_]*\)(.*/\1/p' "$root/examples/extras/$name.h" | sort -u >found
        [ -s found ] || { echo "$name.h declares nothing" && return 1; }
        cat found >>functions
    done
    mkdir extras
    cp -r "$root/examples" extras # not from the headers' own folder, where the other moe.h lies
    { echo '#define MOE_IMPLEMENTATION' && include_extras "$@"; } >a.c
    {
        include_extras "$@"
        printf '#include <stddef.h>\ntypedef void (*any)(void);\nint main(void) {\n    any all[] = {\n'
        sed 's/.*/        (any)&,/' functions
        printf '    };\n    size_t i;\n    for (i = 0; i < sizeof all / sizeof all[0]; i++)\n'
        printf '        if (all[i] == NULL) return 1;\n    return 0;\n}\n'
    } >b.c
}

# Where an option leaves out what an extra needs, it declares what is possible and never breaks the
# compile.
extras_options() { # compiler names... options...
    needs "$1"
    unit_with_options "$@" && in_language "$compiler" "$root" $quick $options a.c -o a -lm && run ./a
}

extras_options_seen() { # compiler names... options...
    needs "$1"
    unit_with_options "$@" && in_language "$compiler" "$root" $quick $options -fsyntax-only a.c
}

# a.c; sets $compiler and $options.
unit_with_options() { # compiler names... options...
    compiler=$1
    shift
    names=$(printf '%s\n' "$@" | grep -v '^-')
    options=$(printf '%s\n' "$@" | grep '^-')
    { echo '#define MOE_IMPLEMENTATION' && include_extras $names &&
        echo 'int main(void) { return moe_version()[0] == 0; }'; } >a.c
}

# Each declared function has a definition, with the type it was declared with.
defined() { # compiler real
    needs "$1"
    functions=$(cd "$root" && public_functions)
    count=$(printf '%s\n' "$functions" | grep -c .)
    if [ "$count" -lt 40 ]; then
        echo "only $count public functions were found in the headers"
        return 1
    fi
    {
        printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\ntypedef void (*any)(void);\n'
        printf 'int main(void) {\n    any all[] = {\n'
        printf '        (any)%s,\n' $functions
        printf '    };\n    size_t i;\n    for (i = 0; i < sizeof all / sizeof all[0]; i++)\n'
        printf '        if (all[i] == NULL) return 1;\n    return 0;\n}\n'
    } >a.c
    run "$1" -std=c99 $quick $(real_option "$2") -I"$root" -I"$stb_folder" a.c -o a -lm && run ./a &&
        echo "note: $count public functions, all defined ($2)"
}

# What the object exports is what the headers declare; with _f64 behind each name in the double
# build.
exported() { # compiler real
    needs "$1"
    needs nm
    object=$prepared/$1.$2.o # of strict or compile_time
    if [ ! -f "$object" ]; then
        program moe.h >a.c
        run "$1" -std=c99 -O0 $(real_option "$2") -I"$root" -c a.c -o "$object" || return 1
    fi
    printf '#include "moe.h"\n' >b.c
    run "$1" -std=c99 $(real_option "$2") -I"$root" -E -P b.c -o b.i || return 1
    {
        tr '\n;' ' \n' <b.i | sed -n 's/.*extern [^(]*[ *]\(moei\{0,1\}_[A-Za-z0-9_]*\)(.*/\1/p'
        # a list of functions of one type
        tr '\n;' ' \n' <b.i | sed -n 's/.*extern moei_[a-z_]* \(moei_[a-z0-9_, ]*\)$/\1/p' | tr -d ' ' | tr , '\n'
        sed -n 's/^#define MOE_VERSION "\(.*\)"$/moe_headers_are_of_version_\1/p' "$root/moe_kernels.h" | tr . _ |
            if [ "$2" = double ]; then sed 's/$/_f64/'; else cat; fi
    } | sort -u >declared
    nm -g --defined-only "$object" | awk '{ print $3 }' | grep -E '^moei?_' | sort >exported
    empty 'declared and not exported:' "$(comm -23 declared exported)" &&
        empty 'exported and not declared:' "$(comm -13 declared exported)"
}

c_from_cpp() { # C compiler, C++ compiler
    needs "$1"
    needs "$2"
    printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n' >a.c
    printf '#include "moe.h"\nint main() {\n    return moe_version()[0] == 0 || ' >b.cpp
    printf 'moe_router_fields() == NULL || moe_layer_fields() == NULL;\n}\n' >>b.cpp
    run "$1" -std=c99 $quick -I"$root" -c a.c -o a.o && run "$2" -std=c++11 -I"$root" b.cpp a.o -o a -lm && run ./a
}

# A float unit and a double unit do not link.
mixing() { # compiler
    needs "$1"
    printf '#define MOE_IMPLEMENTATION\n#include "moe_kernels.h"\n' >a.c
    printf '#include "moe.h"\nint main(void) { moe_real x[2] = {1, 2}; return moe_log_sum_exp(2, x) < 0; }\n' >b.c
    run "$1" -std=c99 $quick -I"$root" -c a.c -o a.o && run "$1" -std=c99 -DMOE_REAL=double -I"$root" -c b.c -o b.o ||
        return 1
    if "$1" a.o b.o -o a -lm >linker 2>&1; then
        echo 'a float and a double object were linked'
        return 1
    fi
    grep -q 'moe_log_sum_exp_f64' linker || {
        cat linker
        return 1
    }
}

# A unit with the headers of another version does not link, and the linker's message says why; one
# with those of the same version does. The older headers are the present ones under another number.
versions() { # compiler options...
    needs "$1"
    mkdir older newer
    for header in moe_kernels.h moe_routers.h moe.h; do
        cp "$root/$header" newer/$header
        sed -e 's/\(MOE_VERSION_MINOR\) [0-9]*$/\1 987/' -e 's/\(MOE_VERSION_MINOR !=\) [0-9]* /\1 987 /' \
            "$root/$header" >older/$header
    done
    version=$(sed -n 's/^#define MOE_VERSION "\([0-9]*\)\.[0-9]*\.\([0-9]*\)"$/\1_987_\2/p' older/moe_kernels.h)
    grep -q '^#define MOE_VERSION_MINOR 987$' older/moe_kernels.h && [ -n "$version" ] ||
        { echo 'the version was not changed: fix this test' && return 1; }
    printf '#define MOE_IMPLEMENTATION\n#include "moe_kernels.h"\n' >a.c
    # Nothing is called by name: the headers alone make the difference.
    printf '#include "moe.h"\nint main(void) { return MOE_OK; }\n' >b.c
    compiler=$1
    shift
    case $compiler in
    tcc) set -- -std=c99 -Wall -Werror "$@" ;;
    *++) set -- -std=c++11 -Wall -Wextra -Werror -x c++ "$@" ;;
    *) set -- $(strict_flags "$compiler") "$@" ;;
    esac
    run "$compiler" "$@" $quick -Inewer -c a.c -o a.o || return 1
    for folder in newer older; do run "$compiler" "$@" $quick -I$folder -c b.c -o $folder.o || return 1; done
    set -- $(printf '%s\n' "$@" | grep -vxE -e '-x|c\+\+')
    case " $* " in *-sections*) set -- "$@" -Wl,--gc-sections ;; esac
    run "$compiler" "$@" newer.o a.o -o a -lm || return 1
    case $compiler in
    *mingw*) ;;
    *) run ./a || return 1 ;;
    esac
    if "$compiler" "$@" older.o a.o -o a -lm >linker 2>&1; then
        echo 'headers of another version were linked'
        return 1
    fi
    suffix=
    case " $* " in *MOE_REAL=double*) suffix=_f64 ;; esac
    grep -qE "undefined .*moe_headers_are_of_version_$version$suffix'?\"?\$" linker && return 0
    cat linker
    return 1
}

# Three headers of which one is of another version stop the compiler.
versions_of_headers() { # compiler
    needs "$1"
    version=$(sed -n 's/^#define MOE_VERSION "\(.*\)"$/\1/p' "$root/moe_kernels.h")
    for header in moe_kernels.h moe_routers.h moe.h; do
        sed -n 1p "$root/$header" | grep -qF -- "- ${version} -" ||
            sed -n 1p "$root/$header" | grep -qF -- "- v${version} -" ||
            { echo "$header is not of version $version in its first line" && return 1; }
        [ $header = moe_kernels.h ] || grep -qF "this is $header of version $version, and" "$root/$header" ||
            { echo "$header speaks of another version" && return 1; }
    done
    for changed in moe_kernels.h moe_routers.h moe.h; do
        mkdir here
        for header in moe_kernels.h moe_routers.h moe.h; do cp "$root/$header" here/$header; done
        sed -e 's/\(MOE_VERSION_PATCH\) [0-9]*$/\1 987/' -e 's/\(MOE_VERSION_PATCH !=\) [0-9]*$/\1 987/' \
            "$root/$changed" >here/$changed
        cmp -s "$root/$changed" here/$changed && echo "no version stands in $changed" && return 1
        echo '#include "moe.h"' >a.c
        "$1" -std=c99 -Ihere -fsyntax-only a.c >messages 2>&1 && echo "$changed of another version was accepted" &&
            return 1
        grep -q '#error "moe: .*copy all headers of one version' messages || { cat messages && return 1; }
        rm -r here
    done
}

# Two files with an implementation, of the same version or not: the linker names what is there
# twice, and both files.
two_implementations() { # compiler
    needs "$1"
    mkdir older
    sed 's/\(MOE_VERSION_MINOR\) [0-9]*$/\1 987/' "$root/moe_kernels.h" >older/moe_kernels.h
    cmp -s "$root/moe_kernels.h" older/moe_kernels.h && echo 'the version was not changed' && return 1
    printf '#define MOE_IMPLEMENTATION\n#include "moe_kernels.h"\n' >first.c
    cp first.c again.c
    cp first.c other.c
    echo 'int main(void) { return 0; }' >>first.c
    for name in first again; do run "$1" -std=c99 $quick -I"$root" -c $name.c -o $name.o || return 1; done
    run "$1" -std=c99 $quick -Iolder -c other.c -o other.o || return 1
    for name in again other; do
        "$1" first.o $name.o -o a -lm >linker 2>&1 && echo "first.o and $name.o were linked" && return 1
        grep -q "$name.*multiple definition of .moe_version.*first" linker || { cat linker && return 1; }
    done
}

# Where the implementation is, and with MOE_NO_MATCH, nothing refers to the constant: a linker that
# removes what is unused removes it. Where stb_ds.h is missing there is one error, which says what
# to do.
stb_is_asked_for() { # compiler
    needs "$1"
    sed 's|"stb_ds.h"|"nowhere/stb_ds.h"|; s|<stb/stb_ds.h>|<nowhere/stb/stb_ds.h>|' "$root/moe.h" >moe.h
    cp "$root/moe_routers.h" "$root/moe_kernels.h" .
    unit moe.h >a.c
    ! "$1" $quick -DMOE_IMPLEMENTATION -fsyntax-only a.c >out 2>&1 && grep -q 'error.*apt-get install libstb-dev' out &&
        [ "$(grep -c 'error:' out)" -eq 1 ] && return 0
    cat out
    return 1
}

match_left_out() { # compiler
    needs "$1"
    needs nm
    program moe_kernels.h >a.c
    run "$1" -std=c99 $quick -ffunction-sections -fdata-sections -Wl,--gc-sections -I"$root" a.c -o a -lm &&
        nm a >symbols || return 1
    empty 'in the program:' "$(grep -i match symbols; grep moe_headers symbols)" || return 1
    unit moe.h >b.c
    run "$1" -std=c99 -DMOE_NO_MATCH -I"$root" -c b.c -o b.o && nm b.o >symbols || return 1
    empty 'with MOE_NO_MATCH:' "$(grep -i match symbols; grep moe_headers symbols)"
}

# The agreed form of comments: see tests/quality/comments.py.
comments() {
    needs python3
    python3 "$root/tests/quality/comments.py" "$root" >out 2>&1 && passed_all out && return 0
    cat out
    return 1
}

# Names without a comment, a call that does not say how it fails, a manual without a word on
# threads.
comments_noticed() {
    needs python3
    for change in 's/^MOE_API void moe_layer_free(.*/&\n\nMOE_API void moe_layer_undone(void);/' \
        's/^typedef struct moe_tensor {/typedef struct moe_more {\n    int a;\n} moe_more;\n\n&/' \
        's/^enum { MOE_MAX_DIMS = 4 };/&\n\nenum { MOE_MIN_DIMS = 0 };/' \
        's/MOE_ERR_NOT_FOUND after the last/Nothing after the last/' \
        's/^#define MOE_MODEL_VERSION .*/&\n\n#define MOE_MODEL_AGE 1/' \
        's/ Threads\. / Strings. /'; do
        mkdir changed
        for header in moe_kernels.h moe_routers.h moe.h; do sed "$change" "$root/$header" >changed/$header; done
        cat "$root"/moe_kernels.h "$root"/moe_routers.h "$root"/moe.h >before
        cat changed/moe_kernels.h changed/moe_routers.h changed/moe.h | cmp -s before - &&
            echo "nothing was changed: $change" && return 1
        python3 "$root/tests/quality/comments.py" changed >out 2>&1 && echo "not noticed: $change" && return 1
        tail -n 1 out | grep -qE '^[0-9]+ passed, [1-9][0-9]* failed$' || { cat out && return 1; }
        rm -r changed
    done
}

# clang tells of what is unused without making code, which takes most of the time; tcc then makes a
# program.
options() { # compiler options...
    needs "$1"
    compiler=$1
    shift
    printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\nint main(void) { return moe_version()[0] == 0; }\n' >a.c
    if [ "$compiler" = clang ]; then
        run "$compiler" $(strict_flags "$compiler") "$@" -I"$root" -fsyntax-only a.c || return 1
        setup_tool tcc || return 0
        compiler=tcc
    fi
    run "$compiler" $(strict_flags "$compiler") "$@" -I"$root" a.c -o a -lm && run ./a
}

# Options that contradict each other stop the compiler with a message of ours.
refused() { # compiler options...
    needs "$1"
    printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n' >a.c
    if "$@" -std=c99 -I"$root" -c a.c -o a.o >messages 2>&1; then
        echo "accepted: $*"
        return 1
    fi
    grep -q '#error.*moe: ' messages || {
        cat messages
        return 1
    }
}

# Of stb_ds only declarations are used: no function of it is in the object, neither made nor wanted.
stb_not_linked() { # compiler
    needs "$1"
    needs nm
    { printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n' && writing_program &&
        echo 'int main(void) { return !moe_written(); }'; } >a.c
    language=-std=c99
    case $1 in
    *++) language='-std=c++11 -x c++' ;;
    esac
    run "$1" $language $quick -I"$root" -c a.c -o a.o || return 1
    empty 'of stb_ds:' "$(nm a.o | grep -i stbds)" || return 1
    run "$1" a.o -o a -lm && run ./a
}

# A program that itself works with stb_ds, with its short names, beside the library.
stb_user() { # compiler
    needs "$1"
    {
        printf '#include "stb_ds.h"\n#define MOE_IMPLEMENTATION\n#include "moe.h"\n'
        writing_program
        cat <<'SOURCE'
int main(void) {
    int *list = NULL, good;
    struct { char *key; int value; } *map = NULL;
    arrput(list, 7);
    shput(map, "seven", 7);
    good = moe_written() && arrlen(list) == 1 && shget(map, "seven") == 7;
    arrfree(list);
    shfree(map);
    return !good;
}
SOURCE
    } >a.c
    printf '#define STB_DS_IMPLEMENTATION\n#include "stb_ds.h"\n' >b.c
    run "$1" -std=c99 $quick -I"$root" -I"$stb_folder" a.c b.c -o a -lm && run ./a
}

# An inference build needs no stb_ds.h; the preprocessor reports every file that it opens.
stb_without_path() { # compiler
    needs "$1"
    program moe.h >a.c
    run "$1" -std=c99 -DMOE_NO_TRAIN -I"$root" -M a.c -o a.txt || return 1
    empty 'opened:' "$(grep stb_ds a.txt)"
}

inference_object() { # compiler
    printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n' >a.c
    run "$1" -std=c99 -Os -DMOE_NO_TRAIN -DMOE_NO_SIMD -I"$root" -c a.c -o a.o
}

inference() { # compiler
    needs "$1"
    needs nm
    needs size
    inference_object "$1" || return 1
    nm -u a.o | awk '{ print $NF }' | sort >wanted
    memory='mem(cpy|set|move|cmp|chr)|str(len|n?cmp|chr)'
    mathematics='exp|log|log1p|expm1|pow|sqrt|fabs|tanh|erfc?|cos|sin|sincos|floor|ceil|fmax|fmin|ldexp|frexp'
    empty 'needs more than libm and memory functions:' "$(grep \
        -vxE "($memory|($mathematics)f?|_GLOBAL_OFFSET_TABLE_|__stack_chk_fail)" wanted)"  || return 1
    echo "note: the inference part needs: $(tr '\n' ' ' <wanted)"
    # Constants are counted as such though position-independent code relocates them. Nothing is
    # writable: there are no mutable globals.
    size -A a.o | awk -v machine="$("$1" -dumpmachine)" '
        $1 ~ /^\.text/ { code += $2 }
        $1 ~ /^\.(rodata|data\.rel\.ro)/ { constants += $2 }
        $1 ~ /^\.(data|bss)/ && $1 !~ /^\.data\.rel\.ro/ { writable += $2 }
        END {
            printf "note: inference part (MOE_NO_TRAIN, MOE_NO_SIMD, -Os, %s): ", machine
            printf "%d bytes, %d of code and %d of constants\n", code + constants, code, constants
            if (writable) print writable " bytes are writable"
            exit writable > 0
        }'
}

# Without an option's part the object asks for none of its functions.
without() { # compiler option pattern
    needs "$1"
    needs nm
    printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n' >a.c
    run "$1" -std=c99 $quick "$2" -I"$root" -c a.c -o a.o || return 1
    empty "needed with $2:" "$(nm -u a.o | awk '{ print $NF }' | grep -xE "$3")"
}

# What everybody compiles, without a warning.
compile_time() { # compiler
    needs "$1"
    program moe.h >a.c
    (run "$1" $(strict_flags "$1") -O2 -I"$root" -c a.c -o a.o && times >spent) || return 1
    keep_object moe.h "$1" float
    echo "note: a file with the implementation compiles in $(processor_seconds spent) processor seconds ($1 -O2)"
}

run_checks "$@"
