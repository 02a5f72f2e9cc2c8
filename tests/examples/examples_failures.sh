#!/bin/sh
# Tests what the examples do when files cannot be read or written: they say which file it is, end
# with status 1, and leave the old file as it was and nothing beside it. sh
# tests/examples/examples_failures.sh [-v] [WORD], as tests/port/headers.sh.

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

programs='quickstart microdigits export csv quantize text routers'

prepare() {
    setup_stb_flag "$CC"
    # CC may hold several words.
    compiler="$CC -std=c99 -DMOE_NO_SIMD -I$root ${stb_flag:+-I$stb_flag}"
    # shellcheck disable=SC2086
    echo '#include "tests/all.h"' | $compiler -O1 -DMOE_IMPLEMENTATION -x c -c - -o "$prepared/library.o" || return 1
    for program in $programs; do
        sed 's/^#define MOE_IMPLEMENTATION$//' "examples/$program.c" >"$prepared/$program.c"
        # shellcheck disable=SC2086
        $compiler -O1 -Iexamples "$prepared/$program.c" "$prepared/library.o" -o "$prepared/$program" -lm || return 1
    done
    conditions >"$prepared/conditions"
    cp examples/data/digits.csv "$prepared/in.csv"
    cp moe_routers.h "$prepared/in.text"
    "$prepared/microdigits" --epochs 1 -o "$prepared/header" --save "$prepared/in.net" "$prepared/in.csv" >/dev/null
}

# How a program is called, quickly: the kind of its input IN, whose ending it is (- none); the kind
# of what it writes to OUT (replaced, added, or -); the call.
calls() {
    setup_joined <<'TEXT'
quickstart  csv  replaced --epochs 1 -o OUT IN
microdigits csv  replaced --epochs 1 -o OUT --save other IN
microdigits csv  replaced --epochs 1 -o other --save OUT IN
export      csv  replaced NET --calibration IN --divide 16 --rows 1000 -o OUT
export      net  replaced IN --weights float -o OUT
csv         csv  replaced IN --epochs 1 --save OUT
csv         csv  replaced IN --epochs 1 --save other --firmware OUT
csv         csv  replaced IN --epochs 1 --report OUT
csv         net  -        --load IN --predict IN
quantize    -    -        --epochs 1
text        text replaced --steps 1 --width 8 --layers 1 --experts 2 --context 16 --batch 2 --generate 5 -o OUT IN
text        text added --steps 1 --width 8 --layers 1 --experts 2 --context 16 --batch 2 --generate 5
    -o other --checkpoint OUT IN
quickstart  -    replaced --epochs 1 -o other --report OUT
microdigits -    replaced --epochs 1 -o other --save other --report OUT
export      -    replaced NET --calibration examples/data/digits.csv --divide 16 --rows 300 -o other --report OUT
quantize    -    replaced --epochs 1 --report OUT
text        text replaced --steps 1 --width 8 --layers 1 --experts 2 --context 16 --batch 2 --generate 5
    -o other --report OUT IN
routers     -    replaced smoe --report OUT
TEXT
}

# What can be wrong. That of a text is seldom wrong by what is in it.
conditions() {
    cat <<'TEXT'
csv|net|text     input missing
csv|net|text     input folder
csv|net|text     input empty
csv|net          input cut
csv|net          input zeros
csv              input long
replaced|added   output missing
replaced|added   output folder
replaced|added   output limited
TEXT
}

plan() {
    echo short_check
    calls | awk '
        NR == FNR { wanted[++n] = $1; condition[n] = $2 " " $3; next }
        {
            call = $0
            for (i = 1; i <= n; i++)
                if ($2 ~ "^(" wanted[i] ")$" || $3 ~ "^(" wanted[i] ")$") print condition[i], call
            # a net of no table stops before
            if ($4 != "--load") print "output full_screen", call
        }' "$prepared/conditions" -
}

show_call() { # what
    echo "$1"
    echo "status $status: $*"
    cat said
    return 1
}

# Runs the call with IN and OUT, its standard output to $screen, after the commands in $limit;
# leaves $status and what it said.
call() { # program input-kind output-kind words...
    program=$1
    shift 3
    for word in "$@"; do
        shift
        case $word in
        IN) word=in ;;
        OUT) word=$out ;;
        NET) word=$prepared/in.net ;;
        esac
        set -- "$@" "$word"
    done
    {
        (
            eval "$limit"
            exec "$prepared/$program" "$@" 2>&1 >"$screen"
        )
        echo "$?" >status
    } | cat >said
    status=$(cat status)
}

# Refused, and the file is named.
names() { # file
    [ "$status" = 1 ] || [ "$status" = 2 ] || show_call 'another status' || return 1
    grep -qE -- "$1" said || show_call "$1 is not named"
}

input() { # condition call...
    condition=$1
    shift
    out=out screen=/dev/null limit=
    whole=$prepared/in.$2
    case $condition in
    missing) ;;
    folder) mkdir in ;;
    empty) : >in ;;
    cut) head -c $(($(wc -c <"$whole") / 2 + 1)) "$whole" >in ;;
    zeros) head -c 100000 /dev/zero >in ;;
    long) { head -n 5 "$whole" && tr -d '\n' <"$whole"; } >in ;;
    esac
    call "$@"
    names in || return 1
    [ ! -e out ] || show_call 'something was written'
}

output() { # condition call...
    condition=$1
    shift
    out=out screen=/dev/null limit=
    if [ "$2" = - ]; then
        mkdir -p examples/data && cp "$prepared/in.csv" examples/data/digits.csv
    else
        cp "$prepared/in.$2" in
    fi
    [ "$3" = added ] || echo old >out
    case $condition in
    missing) out=none/out ;;
    folder) rm -f out && mkdir out ;;
    limited) limit="trap '' XFSZ; ulimit -f 0" ;;
    full_screen)
        [ -c /dev/full ] || missing /dev/full
        screen=/dev/full
        ;;
    esac
    call "$@"
    if [ "$condition" = full_screen ]; then
        names "$1: the output"
        return
    fi
    names 'out|other' || return 1
    [ "$condition" = folder ] || [ "$3" = added ] || [ "$(cat out)" = old ] || show_call 'the old file has changed' ||
        return 1
    for file in out.*; do
        [ ! -e "$file" ] || grep -qF "$file" said || show_call "$file is left" || return 1
    done
}

# text checks itself on a text of which a tenth is held out, less than its own checks look at.
short_check() {
    head -c 24000 "$root/moe_routers.h" >short
    MOE_EXAMPLES=$root/examples "$prepared/text" --check short >said 2>&1
    passed_all said
}

run_checks "$@"
