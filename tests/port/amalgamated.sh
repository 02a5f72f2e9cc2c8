#!/bin/sh
# Tests the files that amalgamate writes: the core, with extras, and with less inside. sh
# tests/port/amalgamated.sh [-v] [WORD], as tests/port/headers.sh.

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

plan() {
    echo 'same_bytes'
    for tools in mawk gawk original-awk busybox; do echo "same_bytes_by $tools"; done
    echo 'stb_copies'
    echo 'revisions'
    echo 'unwritten'
    echo 'closed'
    echo 'licenses'
    echo 'opened gcc'
    echo 'stb_names gcc'
    echo 'macros gcc'
    echo 'symbols gcc'
    for real in float double; do
        for compiler in gcc clang; do
            echo "strict $compiler -O0 $real"
        done
        for compiler in g++ clang++; do
            echo "plusplus $compiler $real"
        done
        echo "tiny tcc $real"
        echo "units tcc $real"
        echo "static_units tcc $real"
    done
    echo 'units gcc float'
    echo 'static_units gcc float'
    echo 'static_units clang++ float'
    echo 'static_seen g++ float'
    echo 'later tcc'
    echo 'first_program gcc'
    echo 'first_program g++'
    for compiler in tcc g++; do
        echo "user_stb $compiler before"
        echo "user_stb $compiler after"
        echo "user_stb $compiler around"
        echo "user_stb $compiler elsewhere"
    done
    echo 'stb_options gcc'
    echo 'no_heap gcc'
    echo 'golden gcc'
    echo 'examples gcc g++'
    # More and less inside.
    echo 'words'
    echo 'options_known'
    for name in $extras; do
        [ "$name" = mpi ] || echo "with tcc float $name"
    done
    for real in float double; do echo "with tcc $real all"; done
    for compiler in gcc clang g++ clang++; do echo "with $compiler float all"; done
    echo 'with_mpi'
    for words in inference integers '--without quant'; do
        echo "same_code $words"
        echo "by_unifdef $words"
    done
    for words in inference integers; do
        echo "no_stb $words"
        for compiler in gcc clang g++ clang++ tcc; do echo "less $compiler $words"; done
        echo "less tcc $words --without $options"
        echo "first_lines $words"
    done
    echo 'less tcc inference report import export classic ranks layout'
    for name in $options; do echo "less tcc --without $name"; done
    for name in quant stdio malloc double; do
        echo "less clang --without $name"
        echo "less_seen gcc --without $name"
    done
    echo 'refused gcc'
    echo 'inference_runs tcc'
    echo 'inference_runs g++'
    echo 'size_of_integers'
    echo 'firmware gcc tcc'
}

extras=$(ls examples/extras | sed -n 's/^moe_\([a-z]*\)\.h$/\1/p' | tr '\n' ' ')
# As the script names them when it does not know one.
options=$(sh amalgamate --without unheard 2>&1 | sed -n 's/.*There are: //p')

# Each check starts in an empty folder. This puts the file there; nothing else of the repository is
# in reach of the compiler.
bring() { cp "$prepared/one/moe.h" moe.h; }

quick=-DMOE_NO_SIMD # where the vector kernels are not the matter: they take most of the compile time

prepare() {
    for words in '' all inference integers; do
        mkdir "$prepared/${words:-one}" && sh "$root/amalgamate" $words >"$prepared/${words:-one}/moe.h" || return 1
    done
}

# Once more, from another folder, with another locale, time zone, mask of permissions and folder for
# temporary files.
same_bytes() {
    here=$PWD
    mkdir 'a \b' || return 1
    (cd / && umask 077 && TMPDIR=$here/'a \b' LC_ALL=C.UTF-8 TZ=Asia/Tokyo sh "$root/amalgamate") >again.h &&
        run cmp again.h "$prepared/one/moe.h"
}

# With another awk, or with all of busybox's programs.
same_bytes_by() { # awk or busybox
    # Continuous integration goes without gawk: its package makes it the awk of all scripts.
    [ "$1" = gawk ] && ! setup_tool gawk && missing gawk
    needs "$1"
    mkdir tools
    case $1 in
    busybox)
        for name in awk sed tr cksum cat dirname grep; do
            busybox --list | grep -qx $name && ln -s "$(command -v busybox)" tools/$name
        done
        ;;
    *) ln -s "$(command -v "$1")" tools/awk ;;
    esac
    PATH=$PWD/tools:$PATH
    for words in '' all inference integers; do
        sh "$root/amalgamate" $words >again.h && run cmp again.h "$prepared/${words:-one}/moe.h" || return 1
    done
}

# Where files may not grow as far as its own must, it does not end well with half of the headers:
# whichever awk there is. The sizes are 50 and 700 KB, or twice these: shells count in other units.
unwritten() {
    mkdir tools
    ! setup_tool busybox || ln -s "$(command -v busybox)" tools/awk
    for path in "$PATH" "$PWD/tools:$PATH"; do
        for size in 100 1400; do
            { PATH=$path sh -c 'trap "" XFSZ; ulimit -f "$1"; exec sh "$2"' sh "$size" "$root/amalgamate" 2>said
                echo $? >status; } | cat >written
            [ "$(cat status)" = 1 ] && [ ! -s written ] && grep -q '^amalgamate: .* cannot be written' said && continue
            echo "files of at most $size: status $(cat status), $(wc -c <written) bytes"
            cat said
            return 1
        done
    done
}

# One who reads no further ends it, and nothing is left.
closed() {
    mkdir temporary
    { TMPDIR=$PWD/temporary sh "$root/amalgamate" inference 2>/dev/null; } | head -n 1 >first
    run grep -q '^/\* moe.h' first && empty 'this is left:' "$(find temporary -name 'moe.*')"
}

# A copy of stb_ds.h with carriage returns makes no difference; one that does not say its version is
# refused.
stb_copies() {
    mkdir dos other
    sed "s/\$/$(printf '\r')/" "$stb_folder/stb_ds.h" >dos/stb_ds.h
    sed 1d "$stb_folder/stb_ds.h" >other/stb_ds.h
    STB_DS=$PWD/dos sh "$root/amalgamate" >again.h && run cmp again.h "$prepared/one/moe.h" || return 1
    STB_DS=$PWD/other sh "$root/amalgamate" >again.h 2>said
    [ $? -eq 1 ] && [ ! -s again.h ] && run grep -q 'no version' said
}

# What it says of the revision: in a repository, in whole and shallow clones of it, which give the
# same bytes, in an archive, in a folder that is no repository, after a change.
revisions() {
    needs git
    mkdir -p plain/tests plain/examples
    cp -R "$root/examples/extras" plain/examples || return 1
    for file in amalgamate LICENSE moe_kernels.h moe_routers.h moe.h tests/setup.sh .gitattributes; do
        cp "$root/$file" plain/$file || return 1
    done
    cp -R plain first
    GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
    GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@a GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@a
    export GIT_CONFIG_NOSYSTEM GIT_CONFIG_GLOBAL GIT_AUTHOR_NAME GIT_AUTHOR_EMAIL GIT_COMMITTER_NAME GIT_COMMITTER_EMAIL
    (cd first && git init -q . && git add . && git commit -q -m one && git commit -q --allow-empty -m two) || return 1
    run git clone -q first second && run git clone -q --depth 1 "file://$PWD/first" third &&
        [ -f third/.git/shallow ] || return 1
    mkdir archive
    (cd first && git archive HEAD) | tar -xf - -C archive || return 1
    for folder in plain first second third archive; do sh $folder/amalgamate >$folder.h || return 1; done
    commit=$(cd first && git rev-parse HEAD)
    run cmp first.h second.h && run cmp first.h third.h || return 1
    GIT_DIR=$PWD/second/.git sh plain/amalgamate >third.h && run cmp third.h plain.h || return 1
    said first "revision $commit." && said archive "an archive of revision $commit." &&
        said plain 'an unknown revision.' || return 1
    for folder in plain archive; do
        sed 3d $folder.h >one && sed 3d first.h >other && run cmp one other || return 1
    done
    said first "$(cksum <first/moe.h | awk '{ printf "%10s %7s  moe.h", $1, $2 }')" &&
        said first " v$(sed -n 's/^#define MOE_VERSION "\(.*\)"$/\1/p' first/moe_kernels.h) " || return 1
    echo '/* changed */' >>first/moe_routers.h
    sh first/amalgamate >first.h && said first "revision $commit, modified." &&
        said first "$(cksum <first/moe_routers.h | awk '{ printf "%10s %7s  moe_routers.h", $1, $2 }')"
}

said() { # file words
    sed -n 1,20p "$1.h" | grep -qF "$2" && return 0
    echo "$1 does not say '$2':"
    sed -n 1,20p "$1.h"
    return 1
}

licenses() {
    bring
    run grep -q 'Copyright (c) 2026 the moe authors' moe.h && run grep -q 'Copyright (c) 2019 Sean Barrett' moe.h
}

opened() { # compiler
    needs "$1"
    bring
    echo '#include "moe.h"' >a.c
    run "$1" -std=c99 -DMOE_IMPLEMENTATION -I. -M a.c -o a.txt || return 1
    empty 'opened:' "$(tr ' ' '\n' <a.txt | grep -E 'stb|moe_')"
}

# Outside comments no name of stb_ds is left, whether the preprocessor or the compiler would see it.
stb_names() { # compiler
    needs "$1"
    bring
    run "$1" -std=c99 -fpreprocessed -dD -E -P moe.h >bare.h || return 1
    empty 'left:' "$(grep -niE '(^|[^A-Za-z0-9_])(stb|include_stb)' bare.h | grep -v '#error')"
}

# What is defined after the implementation: our own names, and what the standard headers define that
# it includes.
macros() { # compiler
    needs "$1"
    bring
    {
        printf '#include <%s>\n' assert.h ctype.h errno.h float.h limits.h math.h stdarg.h stddef.h stdint.h
        printf '#include <%s>\n' stdio.h stdlib.h string.h
        printf '#if defined(__x86_64__) || defined(__i386__)\n#include <cpuid.h>\n#endif\n'
        printf '#if defined(__unix__) || defined(__APPLE__)\n'
        printf '#include <%s>\n' fcntl.h sys/file.h sys/stat.h sys/types.h unistd.h
        printf '#endif\n#ifdef __linux__\n#include <sys/mman.h>\n#endif\n'
    } >a.c
    printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n' >b.c
    for file in a b; do
        run "$1" -std=c99 -DMOE_NO_SIMD -I. -E -dM $file.c -o $file.txt || return 1
        sed 's/^#define \([A-Za-z0-9_]*\).*/\1/' $file.txt | sort -u >$file.sorted
    done
    empty 'foreign macros:' "$(comm -13 a.sorted b.sorted | grep -vE '^(MOE_|MOEI_|moe_|moei_|_)')"
}

# Exported is what the three headers export; nothing of stb_ds.
symbols() { # compiler
    needs "$1"
    needs nm
    bring
    printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n' >a.c
    run "$1" -std=c99 -I. -c a.c -o a.o || return 1
    rm moe.h
    run "$1" -std=c99 -I"$root" -I"$stb_folder" -c a.c -o b.o || return 1
    nm -g --defined-only a.o | awk '{ print $3 }' | sort >a.txt
    nm -g --defined-only b.o | awk '$3 ~ /^moei?_/ { print $3 }' | sort >b.txt
    empty 'exported, other than from the headers:' "$(diff a.txt b.txt)"
}

strict() { # compiler optimization real
    needs "$1"
    bring
    printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\nint main(void) { return moe_version()[0] == 0; }\n' >a.c
    run "$1" $(strict_flags "$1") "$2" $(vectors_of "$1" "$3") $(real_option "$3") -I. a.c -o a -lm && run ./a
}

# They are the same as in the header, where tests/port/headers.sh compiles them: once here will do.
vectors_of() { [ "$1.$2" = gcc.float ] || echo "$quick"; } # compiler real

plusplus() { # compiler real
    needs "$1"
    bring
    printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\nint main() { return moe_version()[0] == 0; }\n' >a.cpp
    in_language "$1" . $quick $(real_option "$2") a.cpp -o a -lm && run ./a
}

tiny() { # compiler real
    needs "$1"
    bring
    printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\nint main(void) { return moe_version()[0] == 0; }\n' >a.c
    run "$1" -std=c99 -Wall -Werror $(real_option "$2") -I. a.c -o a -lm && run ./a
}

two_sources() { # line that stands first in both
    printf '%s\n#include "moe.h"\nint moe_unit(void);\n' "$1" >a.c
    echo 'int main(void) { return moe_unit() || moe_version()[0] == 0; }' >>a.c
    printf '%s\n#include "moe.h"\nint moe_unit(void);\n' "$2" >b.c
    echo 'int moe_unit(void) { return moe_status_text(MOE_OK)[0] == 0; }' >>b.c
}

units() { # compiler real
    needs "$1"
    bring
    two_sources '#define MOE_IMPLEMENTATION' ''
    in_language "$1" . $quick $(real_option "$2") a.c b.c -o a -lm && run ./a
}

# What the front end says of these units.
static_seen() { # compiler real
    needs "$1"
    bring
    two_sources '#define MOE_STATIC' '#define MOE_STATIC'
    in_language "$1" . $quick $(real_option "$2") -fsyntax-only a.c b.c
}

static_units() { # compiler real
    needs "$1"
    bring
    two_sources '#define MOE_STATIC' '#define MOE_STATIC'
    in_language "$1" . $quick $(real_option "$2") a.c b.c -o a -lm && run ./a || return 1
    needs nm
    empty 'exported:' "$(nm -g a | grep -E ' (moe|moei|stb|stbds)_' | grep -v ' moe_unit')"
}

later() { # compiler
    needs "$1"
    bring
    {
        printf '#include "moe.h"\n#include "moe.h"\nint main(void) { return moe_version()[0] == 0; }\n'
        printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n#include "moe.h"\n'
    } >a.c
    in_language "$1" . $quick a.c -o a -lm && run ./a
}

first_program() { # compiler
    needs "$1"
    bring
    first_program_of moe.h "$1" .
}

# The user's own stb_ds.h, with its own implementation and short names, does not meet ours. In one
# file the front end of C++ sees that; tcc makes programs of the same.
user_stb() { # compiler place
    needs "$1"
    bring
    own='#define STB_DS_IMPLEMENTATION
#include "stb_ds.h"'
    moe='#define MOE_IMPLEMENTATION
#include "moe.h"'
    echo 'int moe_unit(void); int moe_unit(void) { return 0; }' >b.c
    {
        case $2 in
        before) printf '%s\n%s\n' "$own" "$moe" ;;
        after) printf '%s\n%s\n' "$moe" "$own" ;;
        around) printf '#include "stb_ds.h"\n%s\n%s\n' "$moe" "$own" ;;
        elsewhere)
            printf '#include "stb_ds.h"\n%s\n' "$moe"
            printf '%s\n' "$own" >b.c
            ;;
        esac
        writing_program
        cat <<'SOURCE'
struct entry { char *key; int value; };
int main(void) {
    int *list = NULL, good;
    struct entry *map = NULL;
    arrput(list, 7);
    shput(map, "seven", 7);
    good = moe_written() && arrlen(list) == 1 && shget(map, "seven") == 7;
    arrfree(list);
    shfree(map);
    return !good;
}
SOURCE
    } >a.c
    language=-std=c99
    case $1 in
    *++) language='-std=c++11 -w -x c++' ;;
    esac
    case $1.$2 in
    g++.elsewhere | tcc.*) run "$1" $language $quick -I. -I"$stb_folder" a.c b.c -o a -lm && run ./a ;;
    *) run "$1" $language $quick -I. -I"$stb_folder" -fsyntax-only a.c ;;
    esac
}

# Macros that steer stb_ds.h or the choice of it do not reach the copy inside.
stb_options() { # compiler
    needs "$1"
    bring
    {
        echo '#define STBDS_REALLOC(c, p, n) no_such_function(c, p, n)'
        echo '#define STBDS_FREE(c, p) no_such_function(c, p, 0)'
        printf '#define %s\n' STBDS_SIPHASH_2_4 STB_DS_IMPLEMENTATION STBDS_UNIT_TESTS MOE_IMPLEMENTATION
        echo '#include "moe.h"'
        writing_program
        echo 'int main(void) { return !moe_written(); }'
        printf '#ifndef STB_DS_IMPLEMENTATION\n#error "moe.h took the name away"\n#endif\n'
    } >a.c
    run "$1" -std=c99 $quick -I. a.c -o a -lm && run ./a
}

# The copy inside goes without the standard heap when the library does.
no_heap() { # compiler
    needs "$1"
    needs nm
    bring
    printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n' >a.c
    run "$1" $(strict_flags "$1") $quick -DMOE_NO_MALLOC -I. -c a.c -o a.o || return 1
    empty 'needed:' "$(nm -u a.o | grep -E ' (malloc|calloc|realloc|free)$')"
}

# The golden cases, by the single file.
golden() { # compiler
    needs "$1"
    bring
    sed 's|"\.\./\.\./moe\.h"|"moe.h"|' "$root/tests/golden/golden.c" >golden.c
    cp "$root/tests/golden/state.h" .
    run "$1" -std=c99 $quick -I. golden.c -o a -lm && run ./a "$root/tests/golden"
}

# All examples, in a folder that holds the file and the examples' own sources: nothing else is
# opened but what the system brings, and that is not stb_ds. The implementation is compiled once, in
# C. In C++ they use what g++ and clang++ take over from C99: designated initializers and compound
# literals.
examples() { # compiler of C, compiler of C++
    needs "$1"
    needs "$2"
    bring
    set +f
    printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n' >moe.c
    cp -R "$root"/examples/*.h "$root/examples/extras" "$root/examples/data/digits.csv" . || return 1
    for extra in extras/moe_[!m]*.h; do echo "#include \"$extra\""; done >>moe.c
    run "$1" -std=c99 $quick -O1 -I. -c moe.c -o moe.o || return 1
    for name in quickstart lecture text quantize routers export microdigits; do
        [ -f "$root/examples/$name.c" ] || { echo "there is no example $name" && return 1; }
    done
    examples_by "$1" -std=c99 && examples_by "$2" -std=gnu++11 -x c++
}

examples_by() { # compiler options...
    compiler=$1
    shift
    for file in "$root"/examples/*.c; do
        name=${file##*/}
        name=${name%.c}
        [ "$name" != mpi ] || continue # wants another library; tests/port/mpi.sh compiles it
        grep -v '^#define MOE_IMPLEMENTATION$' "$file" >"$name.c"
        run "$compiler" "$@" $quick -O0 -I. -MD -MF "$name.d" -c "$name.c" -o "$name.o" &&
            run "$compiler" "$name.o" moe.o -o "$name" -lm || return 1
        tr ' \\' '\n\n' <"$name.d" | grep -E '^\.\./|stb|moe_|^/' | grep -vE '^(extras|/usr|/lib|/opt)/' >opened
        empty "$name opened:" "$(cat opened && grep stb "$name.d")" || return 1
        ./"$name" -h >"$name.help" || { echo "$name -h fails" && return 1; }
        run grep -q "^$name\|^ *$name" "$name.help" || return 1
    done
    run ./quickstart --epochs 2 digits.csv >out && run ./routers >out && run ./routers mixtral --show >out &&
        run ./microdigits --epochs 2 -o digits.h --save digits.safetensors digits.csv >out &&
        run ./export digits.safetensors --calibration digits.csv --divide 16 --rows 100 --name net -o net.h >out &&
            [ -s net.h ]
}

# ---- with extras, and with less ----

# Words in any order, once or twice; help; what it does not know ends it with status 2, and it says
# what there is.
words() {
    for unheard in nothing moe_report 'report nothing' --without 'report --without' '--without report' \
        '--without train nothing' '--nothing'; do
        # shellcheck disable=SC2086
        sh "$root/amalgamate" $unheard >out 2>messages
        status=$?
        [ "$status" -eq 2 ] && [ ! -s out ] && grep -q '^amalgamate: .*There are: ' messages && continue
        echo "$unheard: status $status" && cat messages
        return 1
    done
    sh "$root/amalgamate" nothing 2>messages
    for known in $extras all inference integers; do run grep -qw "$known" messages || return 1; done
    sh "$root/amalgamate" -h >help || return 1
    for known in all inference integers --without $options; do run grep -qw -e "$known" help || return 1; done
    sh "$root/amalgamate" report classic >one.h && sh "$root/amalgamate" classic report classic >other.h &&
        run cmp one.h other.h || return 1
    sh "$root/amalgamate" inference >one.h && sh "$root/amalgamate" --without stdio train stdio >other.h &&
        run cmp one.h other.h
}

# The script knows the headers' options: all that leave something out.
options_known() {
    # By find, because no names are expanded here.
    find "$root/moe_kernels.h" "$root/moe_routers.h" "$root/moe.h" "$root/examples/extras" -name '*.h' -exec cat {} + |
        grep -E '^#(if|elif)' | grep -oE 'MOE_NO_[A-Z0-9]+' | sed 's/^MOE_NO_//' | tr '[:upper:]' '[:lower:]' |
        sort -u >in_headers
    printf '%s\n' $options | grep -vx double | sort >in_script
    run diff in_headers in_script
}

# Every public function of the core and of the extras inside is defined.
with() { # compiler real words...
    needs "$1"
    compiler=$1 real=$2
    shift 2
    sh "$root/amalgamate" "$@" >moe.h || return 1
    for name in $extras; do
        case " $* " in
        *' all '* | *" $name "*) [ "$name" = mpi ] || echo "$root/examples/extras/moe_$name.h" ;;
        esac
    done >inside
    first_lines_say "$(sed 's|.*/||' inside)" || return 1
    functions=$({ cat "$root/moe.h" && tr '\n' '\0' <inside | xargs -0 -r cat; } |
        sed -n 's/^MOE_API .*[ *]\(moe_[a-z0-9_]*\)(.*/\1/p' | sort -u)
    {
        printf '#include "moe.h"\n#define MOE_IMPLEMENTATION\n#include "moe.h"\n#include "moe.h"\n'
        printf 'typedef void (*any)(void);\nint main(void) {\n    any all[] = {\n'
        printf '        (any)%s,\n' $functions
        printf '    };\n    size_t i;\n    for (i = 0; i < sizeof all / sizeof all[0]; i++)\n'
        printf '        if (all[i] == NULL) return 1;\n    return 0;\n}\n'
    } >a.c
    in_language "$compiler" . $quick $(real_option "$real") -Wno-cast-function-type a.c -o a -lm && run ./a
}

first_lines_say() { # names of headers
    for name in $1; do
        sed -n '/Inside: /p' moe.h | grep -qw "$name" && sed -n 1,30p moe.h |
            grep -q " [0-9][0-9]* *[0-9][0-9]*  .*$name\$" && continue
        echo "the first lines do not name $name"
        return 1
    done
}

first_lines() { # words
    cp "$prepared/$1/moe.h" moe.h
    first_lines_say 'moe_kernels.h moe_routers.h moe.h' &&
        run grep -qx '     MOE_NO_TRAIN' moe.h && run grep -qx '     MOE_NO_STDIO' moe.h
}

# The transport comes with the ranks that it is for.
with_mpi() {
    needs mpicc
    sh "$root/amalgamate" mpi >moe.h || return 1
    printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n' >a.c
    echo 'int main(void) { moe_mpi m; return moe_mpi_open(&m, MPI_COMM_WORLD, 1) != MOE_OK; }' >>a.c
    run mpicc -std=c99 $quick -I. -c a.c -o a.o
}

# The macros that a file without them was written for.
macros_of() { # words
    case $* in
    inference) echo -DMOE_NO_TRAIN -DMOE_NO_STDIO ;;
    integers) printf -- '-DMOE_NO_%s ' FLOAT TRAIN STDIO MALLOC QUANT SIMD AVX512 LIBM ;;
    '--without quant') echo -DMOE_NO_QUANT ;;
    esac
}

# The compiler sees the same as in the whole file with these options, and no condition is left that
# they decide.
same_code() { # words
    sh "$root/amalgamate" "$@" >moe.h || return 1
    mkdir avr && : >avr/pgmspace.h || return 1
    for more in '' -DMOE_IMPLEMENTATION -DMOE_STATIC '-DMOE_STATIC -D__STDC_HOSTED__=0 -D__AVR__ -U__x86_64__'; do
        for real in float double; do
            [ "$*.$real" != integers.double ] || continue # it has none
            echo '#include "moe.h"' >a.c
            # shellcheck disable=SC2086
            ${CC%% *} -w -std=c99 -E -P $more $(real_option $real) $(macros_of "$@") -I"$prepared/one" -I. a.c >whole.i
            # shellcheck disable=SC2086
            ${CC%% *} -w -std=c99 -E -P $more $(real_option $real) -I. a.c >less.i
            [ "$(grep -c . less.i)" -ge 100 ] && run cmp whole.i less.i || return 1
        done
    done
    macros_of "$@" | tr ' ' '\n' | sed 's/-D//' >decided
    sed '1,/^#define MOE_KERNELS_H/d' moe.h | ${CC%% *} -w -fpreprocessed -dD -E -P -x c - | grep -E '^ *#' |
        grep -v '#error' | grep -wf decided >left
    empty 'conditions that are decided:' "$(cat left)"
}

# unifdef leaves the same lines of code.
by_unifdef() { # words
    needs unifdef
    sh "$root/amalgamate" "$@" >less.h || return 1
    real=-DMOE_REAL_IS_DOUBLE=0
    [ "$*" = integers ] || real=
    # shellcheck disable=SC2046
    unifdef $(macros_of "$@") $real "$prepared/one/moe.h" >whole.h
    for file in less whole; do
        sed -e ':more' -e '/\\$/{N' -e 's/\\\n//' -e 'b more' -e '}' $file.h >joined.h
        ${CC%% *} -w -fpreprocessed -dD -E -P joined.h | grep -v '^ *#' | sed 's/[ 	][ 	]*/ /g' | grep . >$file.lines
    done
    [ "$(grep -c . less.lines)" -ge 1000 ] && run diff whole.lines less.lines
}

# What trains and writes files needs stb_ds.h; without it there is none inside, and none is looked
# for.
no_stb() { # words
    STB_DS=$PWD/nowhere sh "$root/amalgamate" "$@" >moe.h && run cmp moe.h "$prepared/$1/moe.h" &&
        empty 'of stb_ds:' "$(grep -iE 'stbds|moei_ds|^ *#.*stb' moe.h)"
}

# Compiles strictly, and runs; also twice in a file, and as declarations.
less() { # compiler words...
    needs "$1"
    two_of_less "$@" && in_language "$compiler" . $simd a.c b.c -o a -lm && run ./a
}

less_seen() { # compiler words...
    needs "$1"
    two_of_less "$@" && in_language "$compiler" . $simd -fsyntax-only a.c b.c
}

two_of_less() { # compiler words...
    compiler=$1
    shift
    sh "$root/amalgamate" "$@" >moe.h || return 1
    two_sources "$(printf '#include "moe.h"\n#define MOE_IMPLEMENTATION\n#include "moe.h"')" ''
    simd=$quick
    case " $* " in *simd*) simd= ;; esac
}

# What was left out cannot be asked back: the compiler says so.
refused() { # compiler
    needs "$1"
    for pair in 'inference MOE_STDIO' 'integers MOE_REAL=double' '--without=malloc MOE_MALLOC'; do
        words=${pair% *}
        # shellcheck disable=SC2046
        sh "$root/amalgamate" $(echo "$words" | tr = ' ') >moe.h || return 1
        "$1" -std=c99 -I. "-D${pair#* }" -x c -fsyntax-only moe.h 2>messages && echo "$pair is accepted" && return 1
        run grep -q '#error.*moe: ' messages || return 1
    done
}

# A net that the whole library writes answers the same from memory in the file for inference.
inference_runs() { # compiler
    needs "$1"
    cat >net.c <<'SOURCE'
#define MOE_IMPLEMENTATION
#include "moe.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int n, char **arguments) {
    static moe_real x[5 * 8], y[5 * 8];
    moe_rng rng;
    moe_net net;
    moe_call call;
    moe_net_pass pass;
    moe_error error;
    size_t size, i;
    void *work;
    memset(&rng, 0, sizeof rng);
    memset(&call, 0, sizeof call);
#ifdef WRITES
    {
        moe_layer_config config;
        memset(&config, 0, sizeof config);
        moe_net_init(&net, 8, MOE_KERNELS_C, NULL);
        moe_net_linear(&net, 16);
        moe_net_mixture(&net, &config);
        moe_net_linear(&net, 8);
        if (moe_net_build(&net, 1, 42, &error)) return puts(error.message);
        if (moe_net_save(&net, arguments[n - 1], &error)) return puts(error.message);
    }
#else
    {
        static unsigned char bytes[1 << 18];
        FILE *file = fopen(arguments[n - 1], "rb");
        if (file == NULL) return 1;
        size = fread(bytes, 1, sizeof bytes, file);
        fclose(file);
        if (moe_net_read(&net, bytes, size, 0, MOE_KERNELS_C, NULL, &error)) return puts(error.message);
    }
#endif
    for (i = 0; i < 5 * 8; i++) x[i] = moe_rng_normal(&rng);
    call.n_tokens = 5;
    call.x = x;
    if (moe_net_work_size(&net, 5, 0, &size)) return 1;
    work = malloc(size);
    if (moe_net_forward(&net, &call, work, size, &pass)) return 1;
    memcpy(y, pass.y, sizeof y);
    for (i = 0; i < 5 * 8; i++) printf("%.9g\n", (double)y[i]);
    free(work);
    moe_net_free(&net);
    return 0;
}
SOURCE
    in_language "$1" "$prepared/one" $quick -DWRITES net.c -o writes -lm && run ./writes net.safetensors >written ||
        return 1
    in_language "$1" "$prepared/inference" $quick -DMOE_MALLOC net.c -o reads -lm &&
        run ./reads net.safetensors >read || return 1
    [ "$(grep -c . written)" -eq 40 ] && run cmp written read
}

# At most 3000 lines, and what README says of them, to the hundred.
size_of_integers() {
    for words in one all inference integers; do
        echo "note: $words: $(wc -l <"$prepared/$words/moe.h") lines, $(wc -c <"$prepared/$words/moe.h") bytes"
    done
    lines=$(wc -l <"$prepared/integers/moe.h")
    said=$(sed -n 's/.* \([0-9]*\),\([0-9]*\) lines for firmware.*/\1\2/p' "$root/README.md")
    [ "$lines" -le 3000 ] || return 1
    [ $(((lines + 50) / 100 * 100)) -eq "${said:-0}" ] || { echo "README says ${said:-nothing} of $lines"; return 1; }
}

# The smallest firmware (examples/mcu) with the file for integers, as a program for this machine.
firmware() { # compilers
    for compiler in "$@"; do needs "$compiler"; done
    cp -R "$root"/examples/*.h "$root/examples/extras" "$root/examples/data/digits.csv" .
    # shellcheck disable=SC2086
    run $CC -std=c99 -O1 $quick -I"$prepared/one" -I. "$root/examples/microdigits.c" -o microdigits -lm || return 1
    run ./microdigits --epochs 5 -o digits.h --save digits.safetensors digits.csv >said || return 1
    mkdir device && cp digits.h "$prepared/integers/moe.h" "$root/examples/mcu/firmware.c" device || return 1
    cd device || return 1
    for compiler in "$@"; do
        run "$compiler" $(strict_flags "$compiler") -I. firmware.c -o firmware && ./firmware >out || return 1
        tail -n 1 out | grep -q '^is a 9, as read by expert [0-7] ([0-9]* %) and expert [0-7] ([0-9]* %)$' && continue
        cat out
        return 1
    done
}

run_checks "$@"
