#!/bin/sh
# Tests the single file that amalgamate writes. sh tests/amalgamated.sh [-v] [WORD], as tests/headers.sh.

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

plan() {
    echo 'same_bytes'
    for tools in mawk gawk original-awk busybox; do echo "same_bytes_by $tools"; done
    echo 'revisions'
    echo 'licences'
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
    echo 'static_units g++ float'
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
    echo 'examples gcc'
    echo 'examples g++'
}

# Each check starts in an empty folder. This puts the file there; nothing else of the repository is in reach of the compiler.
bring() { cp "$prepared/one/moe.h" moe.h; }

quick=-DMOE_NO_SIMD # where the vector kernels are not the matter: they take most of the compile time

prepare() { mkdir "$prepared/one" && sh "$root/amalgamate" >"$prepared/one/moe.h"; }

# Once more, from another folder, with another locale, time zone and mask of permissions.
same_bytes() {
    (cd / && umask 077 && LC_ALL=C.UTF-8 TZ=Asia/Tokyo sh "$root/amalgamate") >again.h && run cmp again.h "$prepared/one/moe.h"
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
    PATH=$PWD/tools:$PATH sh "$root/amalgamate" >again.h && run cmp again.h "$prepared/one/moe.h"
}

# What it says of the revision: in a repository, in whole and shallow clones of it, which give the same bytes, in an archive, in a folder that is no
# repository, after a change.
revisions() {
    needs git
    mkdir -p plain/tests
    for file in amalgamate LICENSE moe_kernels.h moe_routers.h moe.h tests/setup.sh .gitattributes; do cp "$root/$file" plain/$file || return 1; done
    cp -R plain first
    GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
    GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@a GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@a
    export GIT_CONFIG_NOSYSTEM GIT_CONFIG_GLOBAL GIT_AUTHOR_NAME GIT_AUTHOR_EMAIL GIT_COMMITTER_NAME GIT_COMMITTER_EMAIL
    (cd first && git init -q . && git add . && git commit -q -m one && git commit -q --allow-empty -m two) || return 1
    run git clone -q first second && run git clone -q --depth 1 "file://$PWD/first" third && [ -f third/.git/shallow ] || return 1
    mkdir archive
    (cd first && git archive HEAD) | tar -xf - -C archive || return 1
    for folder in plain first second third archive; do sh $folder/amalgamate >$folder.h || return 1; done
    commit=$(cd first && git rev-parse HEAD)
    run cmp first.h second.h && run cmp first.h third.h || return 1
    said first "revision $commit," && said archive "an archive of revision $commit," && said plain 'an unknown revision,' || return 1
    for folder in plain archive; do
        sed 3d $folder.h >one && sed 3d first.h >other && run cmp one other || return 1
    done
    said first "$(cksum <first/moe.h | awk '{ printf "%10s %7s  moe.h", $1, $2 }')" && said first " $(sed -n 's/^#define MOE_VERSION "\(.*\)"$/\1/p' first/moe_kernels.h) " || return 1
    echo '/* changed */' >>first/moe_routers.h
    sh first/amalgamate >first.h && said first "revision $commit, modified," && said first "$(cksum <first/moe_routers.h | awk '{ printf "%10s %7s  moe_routers.h", $1, $2 }')"
}

said() { # file words
    sed -n 1,8p "$1.h" | grep -qF "$2" && return 0
    echo "$1 does not say '$2':"
    sed -n 1,8p "$1.h"
    return 1
}

licences() {
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
    empty 'left:' "$(run "$1" -std=c99 -fpreprocessed -dD -E -P moe.h | grep -niE '(^|[^A-Za-z0-9_])(stb|include_stb)' | grep -v '#error')"
}

# What is defined after the implementation: our own names, and what the standard headers define that it includes.
macros() { # compiler
    needs "$1"
    bring
    {
        printf '#include <%s>\n' assert.h ctype.h errno.h float.h limits.h math.h stdarg.h stddef.h stdint.h stdio.h stdlib.h string.h
        printf '#if defined(__x86_64__) || defined(__i386__)\n#include <cpuid.h>\n#endif\n'
    } >a.c
    printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n' >b.c
    for file in a b; do
        run "$1" -std=c99 -DMOE_NO_SIMD -I. -E -dM $file.c -o $file.txt || return 1
        sed 's/^#define \([A-Za-z0-9_]*\).*/\1/' $file.txt | sort -u >$file.sorted
    done
    empty 'foreign macros:' "$(comm -13 a.sorted b.sorted | grep -vE '^(MOE_|MOEI_|moe_|moei_|_)')"
}

# Exported are the public functions, as from the three headers; nothing private and nothing of stb_ds.
symbols() { # compiler
    needs "$1"
    needs nm
    bring
    printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n' >a.c
    run "$1" -std=c99 -I. -c a.c -o a.o || return 1
    rm moe.h
    run "$1" -std=c99 -I"$root" -I"$stb_folder" -c a.c -o b.o || return 1
    nm -g --defined-only a.o | awk '{ print $3 }' | sort >a.txt
    nm -g --defined-only b.o | awk '$3 ~ /^moe_/ { print $3 }' | sort >b.txt
    empty 'exported, other than from the headers:' "$(diff a.txt b.txt)"
}

strict() { # compiler optimisation real
    needs "$1"
    bring
    printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\nint main(void) { return moe_version()[0] == 0; }\n' >a.c
    run "$1" $(strict_flags "$1") "$2" $(vectors_of "$1" "$3") $(real_option "$3") -I. a.c -o a -lm && run ./a
}

# They are the same as in the header, where tests/headers.sh compiles them: once here will do.
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
    printf '%s\n#include "moe.h"\nint moe_unit(void);\nint main(void) { return moe_unit() || moe_version()[0] == 0; }\n' "$1" >a.c
    printf '%s\n#include "moe.h"\nint moe_unit(void);\nint moe_unit(void) { return moe_status_text(MOE_OK)[0] == 0; }\n' "$2" >b.c
}

units() { # compiler real
    needs "$1"
    bring
    two_sources '#define MOE_IMPLEMENTATION' ''
    in_language "$1" . $quick $(real_option "$2") a.c b.c -o a -lm && run ./a
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
    cut_first_program moe.h >a.c || return 1
    in_language "$1" . $quick -Wno-missing-field-initializers a.c -o a -lm && run ./a
}

# The user's own stb_ds.h, with its own implementation and short names, does not meet ours.
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
    run "$1" $language $quick -I. -I"$stb_folder" a.c b.c -o a -lm && run ./a
}

# Macros that steer stb_ds.h or the choice of it do not reach the copy inside.
stb_options() { # compiler
    needs "$1"
    bring
    {
        printf '#define STBDS_REALLOC(c, p, n) no_such_function(c, p, n)\n#define STBDS_FREE(c, p) no_such_function(c, p, 0)\n'
        printf '#define STBDS_SIPHASH_2_4\n#define STB_DS_IMPLEMENTATION\n#define STBDS_UNIT_TESTS\n#define MOE_IMPLEMENTATION\n#include "moe.h"\n'
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
    sed 's|"\.\./moe\.h"|"moe.h"|' "$root/tests/golden.c" >golden.c
    run "$1" -std=c99 $quick -I. golden.c -o a -lm && run ./a "$root/tests/golden"
}

# All examples, in a folder that holds the file and the examples' own sources: nothing else is opened but what the system brings, and that is not stb_ds.
# The implementation is compiled once. In C++ they use what g++ and clang++ take over from C99: designated initialisers and compound literals.
examples() { # compiler
    needs "$1"
    bring
    set +f
    language=-std=c99
    case $1 in
    *++) language='-std=gnu++11 -x c++' ;;
    esac
    printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n' >moe.c
    run "$1" $language $quick -O1 -I. -c moe.c -o moe.o || return 1
    cp "$root"/examples/*.h "$root/examples/data/digits.csv" . || return 1
    for name in quickstart digits text compare studies quantise routers export microdigits; do
        [ -f "$root/examples/$name.c" ] || { echo "there is no example $name" && return 1; }
    done
    for file in "$root"/examples/*.c; do
        name=${file##*/}
        name=${name%.c}
        [ "$name" != mpi ] || continue # wants another library; tests/mpi.sh compiles it
        grep -v '^#define MOE_IMPLEMENTATION$' "$file" >"$name.c"
        run "$1" $language $quick -O0 -I. -MD -MF "$name.d" -c "$name.c" -o "$name.o" && run "$1" "$name.o" moe.o -o "$name" -lm || return 1
        empty "$name opened:" "$(tr ' \\' '\n\n' <"$name.d" | grep -E '^\.\./|stb|moe_|^/' | grep -vE '^/(usr|lib|opt)/' ; grep stb "$name.d")" || return 1
        ./"$name" -h >"$name.help" || { echo "$name -h fails" && return 1; }
        run grep -q "^$name\|^ *$name" "$name.help" || return 1
    done
    run ./quickstart --epochs 2 digits.csv >out && run ./routers >out && run ./routers mixtral --show >out &&
        run ./microdigits --epochs 2 -o digits.h --save digits.safetensors digits.csv >out &&
        run ./export digits.safetensors --calibration digits.csv --divide 16 --rows 100 --name net -o net.h >out && [ -s net.h ]
}

run_checks "$@"
