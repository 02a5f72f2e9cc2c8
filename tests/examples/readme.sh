#!/bin/sh
# Tests the README files: every block between fences is compiled and run, links and images exist,
# and the gallery is what examples/gallery.c makes. sh tests/examples/readme.sh [-v] [WORD], as
# tests/port/headers.sh.
#
# What a block is follows from its language, and from tests/examples/readme.txt, where an entry "==
# PAGE | A LINE OF THE BLOCK" may say more:
#   ```c with a main     a program: the first is compiled as it stands, all are run
#   ```c, "around"       a piece of C: the lines behind the first, with the block in place of the
#                        line "...", are the body of a main
#   ```sh                commands, run from the repository's folder in a copy of it. "with SCRIPT":
#                        after sed has made them shorter; "needs TOOL...": skipped where a tool is
#                        missing. Both: needs TOOL...; with SCRIPT
#   ```text              what the block before prints, words and layout; numbers may differ, and a
#                        line "..." stands for any lines
#   "file NAME"          a file that later blocks read; one in C is compiled
# Any other block is a failure. The library is compiled once and linked to all that includes it,
# also to the examples that commands run.

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

pages='README.md examples/README.md examples/bench/README.md examples/mcu/README.md examples/mpi/README.md
tests/bench/README.md'

# Cuts the blocks out, each into files of its own whose names are numbers in the order of the pages:
# text, language, what readme.txt says of it, where it is.
cut_blocks() {
    # shellcheck disable=SC2086
    awk -v folder="$prepared" '
        function put(kind, text) { printf "%s", text >(block kind); close(block kind) }
        function end_block(    i, lines, n, marker) {
            marker = language == "text" ? "output" : ""
            n = split(text, lines, "\n")
            for (i = 1; i <= n; i++) {
                row = FILENAME " | " lines[i]
                if (row in says) { marker = says[row]; used[row] = 1 }
            }
            put(".text", text)
            put(".marker", marker "\n")
            put(".before", last "\n")
            if (marker !~ /^output/) last = number
            fenced = 0
        }
        FILENAME ~ /readme\.txt$/ {
            if (sub(/^== /, "")) key = $0
            else if (key != "" && $0 != "") says[key] = says[key] (says[key] == "" ? "" : "\n") $0
            next
        }
        FNR == 1 { page++ }
        fenced && /^```[ \t]*$/ { end_block(); next }
        fenced { text = text $0 "\n"; next }
        /^```/ {
            number = page * 10000 + FNR
            block = folder "/block" number
            language = substr($0, 4)
            put(".language", language "\n")
            put(".where", FILENAME ":" FNR "\n")
            text = ""
            fenced = 1
            next
        }
        /^    [^ ]/ && blank && !list { print FILENAME ":" FNR >(folder "/indented") }
        { list = /^[-*0-9]/ || (list && !/^[^ ]/); blank = /^[ \t]*$/ }
        END {
            for (key in says) if (!(key in used)) print "no such block: " key >(folder "/lost")
            if (fenced) print "a block does not end" >(folder "/lost")
        }' tests/examples/readme.txt $pages
}

# A compiler that takes a program with the library in it as one that is linked with it, unless it
# reads private names or needs MPI, which the library has not.
make_compiler() {
    # By its path: the folder of the script comes first in PATH where commands run, and the script
    # is called cc.
    real=$(command -v "${CC%% *}")
    case $CC in *' '*) real="$real ${CC#* }" ;; esac
    cat >"$prepared/cc" <<SCRIPT
#!/bin/sh
source=
for word in "\$@"; do case \$word in *.c) source=\$word ;; -c) exec $real "\$@" ;; esac; done
if [ -z "\$source" ] || ! grep -qx '#define MOE_IMPLEMENTATION' "\$source" ||
    grep -q -e '^#define MOE_NO_FLOAT' -e 'moei_' -e 'moe_mpi\.h' "\$source"; then exec $real "\$@"; fi
copy=\${TMPDIR:-/tmp}/linked.\$\$.c
sed 's/^#define MOE_IMPLEMENTATION\$//' "\$source" >"\$copy"
left=\$#
while [ "\$left" -gt 0 ]; do
    word=\$1
    shift
    [ "\$word" != "\$source" ] || { set -- "\$@" "\$copy" && word=$prepared/library.o; }
    set -- "\$@" "\$word"
    left=\$((left - 1))
done
$real -I"\$(dirname -- "\$source")" "\$@"
status=\$?
rm -f "\$copy"
exit \$status
SCRIPT
    chmod +x "$prepared/cc"
}

# The repository without what tests are made of.
make_copy() {
    mkdir "$prepared/copy" "$prepared/copy/tests" &&
        cp -R moe.h moe_routers.h moe_kernels.h README.md LICENSE amalgamate examples "$prepared/copy" &&
        cp -R tests/*.sh tests/run tests/bench "$prepared/copy/tests"
}

prepare() {
    [ -f README.md ] || {
        echo 'README.md is not there'
        return 1
    }
    setup_stb_flag "$CC"
    include=${stb_flag:+-I"$stb_flag"}
    cut_blocks && make_compiler && make_copy || return 1
    # CC may hold several words.
    # shellcheck disable=SC2086
    echo '#include "tests/all.h"' | $CC -std=c99 -O1 -DMOE_NO_SIMD -DMOE_IMPLEMENTATION -I. $include -x c -c - -o \
        "$prepared/library.o"
}

plan() {
    first=1
    commands=0
    for block in $(ls "$prepared" | sed -n 's/^block\([0-9]*\)\.text$/\1/p' | sort -n); do
        language=$(cat "$prepared/block$block.language")
        marker=$(sed -n 1p "$prepared/block$block.marker")
        case $language:$marker in
        text:output) ;; # belongs to the block before it
        sh:*) commands=1 ;;
        text:file* | c:file*) commands=1 ;;
        c:around) echo "piece $block" ;;
        c:)
            echo "program $block $first"
            first=0
            ;;
        *) echo "unknown $block" ;;
        esac
    done
    [ "$commands" = 0 ] || echo 'commands'
    echo layout
    for page in $pages examples/gallery/README.md; do echo "paths $page"; done
    echo gallery
}

unknown() { # line
    echo "$(cat "$prepared/block$1.where"): a block of the language \"$(cat \
        "$prepared/block$1.language")\" which is \"$(cat \
        "$prepared/block$1.marker")\": tests/examples/readme.sh says what there may be"
    return 1
}

# The block of output behind a block, or nothing.
output_of() { # line
    set +f
    for before in "$prepared"/block*.before; do
        block=${before%.before}
        [ "$(cat "$before")" = "$1" ] && [ "$(sed -n 1p "$block.marker")" = output ] && echo "$block.text"
    done
}

# Words and layout of two texts; a line "..." in the first stands for any lines, so each piece
# between such lines must occur, one behind the other.
same_output() { # shown printed
    for file in "$1" "$2"; do
        sed -e 's/[-+]\{0,1\}[0-9][0-9.,:]*/N/g' -e 's/[ 	][ 	]*/ /g' -e 's/^ //' -e 's/ $//' "$file" >"$(basename \
            "$file").words"
    done
    awk '
        NR == FNR { line[++n] = $0; next }
        $0 == "..." { open = 1; next }
        {
            start = at + 0
            do at++; while (open && at <= n && line[at] != $0)
            if (at > n || line[at] != $0) {
                print "shown, but not printed (behind line " start "): " $0
                bad = 1
                exit 1
            }
            open = 0
        }
        END { if (!bad && !open && at < n) { print "printed, but not shown: " line[at + 1]; exit 1 } }' "$(basename \
            "$2").words" "$(basename "$1").words" || {
        cat "$2"
        return 1
    }
}

check_output() { # line printed
    shown=$(output_of "$1")
    [ -z "$shown" ] || same_output "$shown" "$2"
}

headers_here() { cp "$root"/moe.h "$root"/moe_routers.h "$root"/moe_kernels.h .; }

program() { # line whether-to-compile-as-it-stands
    cp "$prepared/block$1.text" program.c
    warnings='-std=c99 -pedantic -Wall -Wextra -Werror -O1'
    ! grep -q 'pthread\.h' program.c || warnings="$warnings -D_POSIX_C_SOURCE=200809L -pthread"
    if [ "$2" = 1 ]; then
        headers_here
        # shellcheck disable=SC2086
        run $CC $warnings $include program.c -o program -lm || return 1
    else
        # shellcheck disable=SC2086
        run "$prepared/cc" $warnings -I"$root" $include program.c -o program -lm || return 1
    fi
    run ./program >printed && check_output "$1" printed
}

# Compiled as C99 with all warnings; what the reader does not see stands in the comment.
piece() { # line
    {
        printf '#include "tests/all.h"\n#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n'
        printf 'int main(void) {\n'
        awk -v block="$prepared/block$1.text" \
            'NR == 1 { next } $0 == "..." { print "#line 1"; while ((getline line < block) > 0) print line; next }
             { print }' "$prepared/block$1.marker"
        printf 'return 0;\n}\n'
    } >piece.c
    # shellcheck disable=SC2086
    run $CC -std=c99 -pedantic -Wall -Wextra -Werror -O1 -I"$root" $include piece.c "$prepared/library.o" -o piece \
        -lm && (piece=$PWD/piece && cd "$root" && run "$piece") >printed && check_output "$1" printed
}

# The blocks of commands one after another, in one copy of the repository, as a reader would type
# them.
commands() {
    PATH=$prepared:$PATH CC=$prepared/cc OMPI_CC=$prepared/cc STB_DS=${STB_DS:-}
    [ -n "$STB_DS" ] || unset STB_DS
    export CC OMPI_CC PATH
    failures=0
    top=$PWD
    for block in $(ls "$prepared" | sed -n 's/^block\([0-9]*\)\.text$/\1/p' | sort -n); do
        marker=$(sed -n 1p "$prepared/block$block.marker")
        case $(cat "$prepared/block$block.language"):$marker in
        text:file*) cp "$prepared/block$block.text" "$prepared/copy/${marker#file }" ;;
        c:file*)
            cp "$prepared/block$block.text" "$prepared/copy/${marker#file }"
            grep -q 'mpi\.h' "$prepared/block$block.text" || # compiled by the commands that follow
                # shellcheck disable=SC2086
                (cd "$prepared/copy" && run $CC -std=c99 -pedantic -Wall -Wextra -Werror -DMOE_NO_SIMD -I. $include \
                    -c "${marker#file }" -o file.o) || failures=$((failures + 1))
            ;;
        sh:*) one_block "$block" "$marker" || failures=$((failures + 1)) ;;
        esac
    done
    [ "$failures" = 0 ]
}

one_block() { # line marker
    script=
    case $2 in *with\ *) script=${2#*with } ;; esac
    case $2 in needs\ *)
        tools=${2#needs }
        for tool in ${tools%%;*}; do
            setup_tool "$tool" && continue
            [ "${REQUIRE_TOOLS:-0}" != 1 ] || return 1
            echo "note: $(cat "$prepared/block$1.where") is not run: $tool is not there"
            return 0
        done
        ;;
    esac
    sed -e "$script" "$prepared/block$1.text" >commands.sh
    (cd "$prepared/copy" && setup_limit 300 sh -e "$top/commands.sh") >printed 2>said </dev/null || {
        echo "$(cat "$prepared/block$1.where"):"
        cat commands.sh printed said
        return 1
    }
    grep -v '^compiling ' said >>printed # emulators say there what the program prints
    check_output "$1" printed || {
        echo "$(cat "$prepared/block$1.where") shows something else than its commands print"
        return 1
    }
}

layout() {
    empty 'blocks of code stand between fences; indented ones are not tested:' "$(cat "$prepared/indented" \
        2>/dev/null)" &&
        empty 'tests/examples/readme.txt:' "$(cat "$prepared/lost" 2>/dev/null)"
}

# Files of tests and examples, links and pictures, places in the page, and examples that a command
# names.
paths() { # page
    folder=$root/$(dirname "$1")
    {
        tr -c 'A-Za-z0-9_./-' '\n' <"$root/$1" | grep -E '^(tests|examples|\.ci)/[a-z]' |
            sed -e 's/[.]*$//' -e "s|^|$root/|"
        sed -e 's/](/]\
link=(/g' -e 's/\(src\|href\|name\)="/\
\1="/g' "$root/$1" | sed -n -e 's/^link=(\([^):#]*\)[#)].*/\1/p' -e 's/^src="\([^":]*\)".*/\1/p' | grep . |
sed "s|^|$folder/|"
        sed -n 's/.*examples\/run \([a-z_0-9]\{1,\}\).*/examples\/\1.c/p' "$root/$1" | sed "s|^|$root/|"
    } | sort -u | while read -r path; do
        [ -e "$path" ] || [ -e "$path.c" ] || [ -e "${path%.c}/run" ] || echo "${path#"$root/"}"
    done >absent
    empty "$1 names, and there is not:" "$(cat absent)" && places "$1"
}

# Links to places in the same page: headings as code hosts name them, and names.
places() { # page
    sed -n -e 's/^#\{1,\} //p' "$root/$1" | tr 'A-Z' 'a-z' | sed -e 's/[^a-z0-9 _-]//g' -e 's/ /-/g' >there
    sed 's/<a name="/\
<a name="/g' "$root/$1" | sed -n 's/^<a name="\([^"]*\)".*/\1/p' >>there
    sed 's/](#/\
](#/g' "$root/$1" | sed -n 's/^](#\([^)]*\)).*/\1/p' | sort -u | while read -r place; do grep -qxF -- "$place" there ||
echo "#$place"; done >absent
    empty "$1 links to places that are not in it:" "$(cat absent)"
}

# Pictures may differ in the last bits of a border; their words, their kinds of shapes and the page
# may not.
gallery() {
    set +f
    mkdir made
    # shellcheck disable=SC2086
    run "$prepared/cc" -std=c99 -O1 -I"$root" $include "$root/examples/gallery.c" -o program -lm &&
        run ./program --kernels c -o made >said || return 1
    cmp made/README.md "$root/examples/gallery/README.md" || {
        echo 'the page is not what the program makes: sh examples/run gallery'
        return 1
    }
    (cd made && ls) >new
    (cd "$root/examples/gallery" && ls) >old
    cmp new old || return 1
    for picture in made/*.svg; do
        name=$(basename "$picture")
        for file in "$picture" "$root/examples/gallery/$name"; do
            sed -e 's/;.*<\/desc>//' -e '/^<path class="e/d' -e '/^<text/d' -e 's/[0-9][0-9.]*/N/g' "$file"
            tail -n 1 "$file" | grep -qx '</svg>' && [ "$(wc -c <"$file")" -le 12288 ] &&
                [ "$(grep -c '^<path class="e' "$file")" -ge 2 ] || echo "$file: cut, too large, or of one color" >>bad
        done | sort | uniq -c | awk '$1 % 2 { print }' >differ
        [ ! -s differ ] || { echo "$name differs:" && cat differ && return 1; }
    done
    empty 'pictures:' "$(cat bad 2>/dev/null)" || return 1
    # Every preset is on the page, and has its picture or the library's reason.
    printf '#include "moe.h"\n#include <stdio.h>\nint main(void) {\n    const moe_preset *p;\n' >names.c
    printf '    for (p = moe_presets(); p->name != NULL; p++) puts(p->name);\n    return 0;\n}\n' >>names.c
    # shellcheck disable=SC2086
    run $CC -std=c99 -I"$root" $include names.c "$prepared/library.o" -o names -lm && ./names >names.txt || return 1
    [ "$(wc -l <names.txt)" -gt 50 ] || return 1
    while read -r name; do
        row=$(grep -F "<a name=\"$name\">" made/README.md)
        case $row in
        *"src=\"$name.svg\""*) [ -s "made/$name.svg" ] || echo "$name has no picture" ;;
        *'| no picture: '*)
            grep "^$name " said | grep -q 'drawn$' && echo "$name: drawn, and the page says not"
            ;;
        *) echo "$name is not on the page" ;;
        esac
    done <names.txt >absent
    grep -q "one of $(($(wc -l <names.txt))) named configurations" "$root/README.md" ||
        echo "README.md counts other presets than $(wc -l <names.txt)" >>absent
    empty 'presets:' "$(cat absent)"
}

run_checks "$@"
