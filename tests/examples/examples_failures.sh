#!/bin/sh
# Tests what the examples do when files cannot be read or written: they say which file it is, end
# with status 1, and leave the old file as it was and nothing beside it. Also that options which
# make no sense are refused with status 2 and what to do, and that no file that is read, or was just
# written, is replaced. sh tests/examples/examples_failures.sh [-v] [WORD], as
# tests/port/headers.sh.

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

programs='quickstart microdigits export csv quantize text routers gallery lecture own_router threads'

prepare() {
    setup_stb_flag "$CC"
    # CC may hold several words.
    compiler="$CC -std=c99 -DMOE_NO_SIMD -I. ${stb_flag:+-I$stb_flag}"
    # shellcheck disable=SC2086
    echo '#include "tests/all.h"' | $compiler -O1 -DMOE_IMPLEMENTATION -x c -c - -o "$prepared/library.o" || return 1
    for program in $programs; do
        sed 's/^#define MOE_IMPLEMENTATION$//' "examples/$program.c" >"$prepared/$program.c"
        # shellcheck disable=SC2086
        $compiler -O1 -Iexamples "$prepared/$program.c" "$prepared/library.o" -o "$prepared/$program" -lm -pthread ||
            return 1
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
microdigits -    replaced --epochs 1 -o other --save another --report OUT
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

# Status, what is said with _ for spaces, the call: of the files, in, is digits, and text is a text.
wrong_calls() {
    cat <<'TEXT'
2 threads:_x:_there_are_no_options threads x
2 threads:_--fast:_there_are_no_options threads --fast
2 router:_--fast:_there_are_no_options own_router --fast
2 lecture:_--fast:_there_are_no_options lecture --fast
0 threads threads -h
0 a_custom_router own_router --help
0 lecture lecture -h
2 a_second_file quickstart in other
2 a_second_file microdigits in other
2 is_a_header_of_the_library microdigits -o moe.h in
1 more_than_5000_rows quickstart --epochs 1 more
1 more_than_5000_rows microdigits --epochs 1 more
2 a_report_is quickstart --report r.pdf
2 a_report_is microdigits --report r.pdf
2 a_report_is export NET --report r.pdf
2 a_report_is csv in --report r.pdf
2 a_report_is quantize --report r.pdf
2 a_report_is text --report r.pdf
2 a_report_is routers --report r.pdf
2 a_report_is gallery --report r.pdf
1 --steps:_a_million_passes text --width 8 --layers 1 --experts 2 --context 16 --batch 999 --steps 1000000000 text
1 in/x:_Not_a_directory text --steps 1 --width 8 --layers 1 --context 16 -o other --checkpoint in/x text
2 there_is_no_preset text --router nobody text
2 there_is_no_preset csv in --router nobody
2 --router:_its_value_is_missing text --router EMPTY text
2 -o:_its_value_is_missing text -o EMPTY text
2 --report:_no_such_option,_its_value_is_missing routers smoe --report
2 not_a_value routers smoe --token 18446744073709551615
2 without_a_name,_--show_or_--report routers --csv --report page.html
2 --steps:_is_for_training text --only-generate --steps 3
2 --words:_is_for_training text --words --only-generate
2 text:_is_for_training text --only-generate text
1 none:_cannot_be_opened text --test none text
1 export:_cannot_open_open:_No export open
1 none:_cannot_be_opened csv in --predict none
2 would_replace quickstart --epochs 1 -o ./in in
2 would_replace quickstart --epochs 1 -o link in
2 would_replace quickstart --epochs 1 -o new.txt --report new.txt in
2 would_replace microdigits --epochs 1 -o in in
2 would_replace microdigits --epochs 1 --save link in
2 would_replace microdigits --epochs 1 -o new --save ./new in
2 would_replace export NET --calibration link --divide 16 -o in
2 would_replace export NET --calibration in --divide 16 -o new.txt --report new.txt
2 would_replace csv in --epochs 1 --save ./in
2 would_replace csv in --epochs 1 --save link
2 would_replace csv in --epochs 1 --save new --firmware new
2 would_replace csv in --epochs 1 --save new.safetensors --firmware new.calibration.csv
2 would_replace csv in --epochs 1 --save new.safetensors --firmware new.h
2 would_replace csv in --epochs 1 --save new.txt --report new.txt
2 would_replace gallery --steps 1 -o . --report README.md
2 would_replace gallery --steps 1 -o . --preset smoe --report ./smoe.svg
2 would_replace text --steps 1 --width 8 --layers 1 --context 16 -o ./text text
2 would_replace text --steps 1 --width 8 --layers 1 --context 16 -o examples/../moe.h
2 would_replace text --steps 1 --width 8 --layers 1 --context 16 -o new.txt --report new.txt text
2 would_replace text --steps 1 --width 8 --layers 1 --context 16 --words -o new --checkpoint new.words text
2 would_replace text --steps 1 --width 8 --layers 1 --context 16 -o words words.words
TEXT
}

plan() {
    echo help_cut_off
    echo named_by_folder
    echo compiler_of_words
    echo kept_program
    echo own_router_keeps
    echo part_kept
    echo no_file
    echo short_check
    echo rows_5000
    echo byte_order_mark
    wrong_calls | sed 's/^/wrong /'
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
        EMPTY) word= ;;
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

# Refused, and the file is named, once.
names() { # file
    [ "$status" = 1 ] || [ "$status" = 2 ] || show_call 'another status' || return 1
    grep -qE -- "$1" said || show_call "$1 is not named" || return 1
    ! grep -q '^[a-z]*: \([^ ]*\): cannot [a-z ]*\1: ' said || show_call 'named twice'
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

wrong() { # status what call...
    expected=$1
    wanted=$(echo "$2" | tr _ ' ')
    program=$3 screen=shown limit=
    shift 3
    cp "$prepared/in.csv" in && ln -s in link && cp "$prepared/in.text" text && cp text words.words || return 1
    [ "$wanted" != 'more than 5000 rows' ] || awk '{ for (i = 0; i < 3; i++) print }' in | sed 5001q >more
    call "$program" - - "$@"
    [ "$status" = "$expected" ] || show_call "not status $expected" || return 1
    [ "$expected" = 2 ] && [ -s shown ] && show_call 'something was begun' && return 1
    [ "$expected" = 0 ] && cp shown said
    grep -qF -- "$wanted" said || show_call "it did not say: $wanted" || return 1
    cmp -s in "$prepared/in.csv" && cmp -s text "$prepared/in.text" && cmp -s words.words text && [ -L link ] ||
        show_call 'a file is lost' || return 1
    for file in new*; do
        [ ! -e "$file" ] || show_call "$file was written" || return 1
    done
}

# Help of which no more than the first line is read, or none can be written, is not followed by
# anything else.
help_cut_off() {
    { sh "$root/examples/run" -h 2>said; } | head -n 1 >shown
    empty 'said after its help:' "$(grep 'no example' said)" || return 1
    [ -c /dev/full ] || missing /dev/full
    for name in mcu web; do
        sh "$root/examples/run" "$name" -h >/dev/full 2>said
        status=$?
        [ "$status" = 1 ] && [ "$(grep -c . said)" = 1 ] || show_call "more than the help of $name" || return 1
    done
    for program in $programs; do
        "$prepared/$program" -h >/dev/full 2>said
        status=$?
        [ "$status" = 1 ] || show_call "the help of $program" || return 1
    done
    for name in bench/options bench/rivals fuzz/oracle fuzz/fuzz port/mpi quality/coverage; do # from any folder
        sh "$root/tests/$name.sh" -h >said 2>&1
        status=$?
        [ "$status" = 0 ] && grep -q "tests/$name\.sh" said && ! grep -q '^#\|^[0-9]* passed' said ||
            show_call "no help of $name" || return 1
    done
}

# A folder's name as shells complete it; that of all examples is none of them.
named_by_folder() {
    for name in mcu mcu/ examples/mcu/ "$root/examples/mcu/"; do
        sh "$root/examples/run" "$name" nothing >shown 2>said
        status=$?
        [ "$status" = 2 ] && grep -q 'nothing is not one of the processors' said || show_call "$name" || return 1
    done
    for name in examples/ "$root/examples/" . ./; do
        sh "$root/examples/run" "$name" nothing >shown 2>said
        status=$?
        [ "$status" = 2 ] && grep -q 'There is no example called [^n]' said || show_call "$name" || return 1
    done
}

compiler_of_words() {
    echo 'int main(void) { return 0; }' >firmware.c
    CC="$CC -O1" run sh "$root/examples/run" mcu host firmware.c >said 2>&1 || show_call 'it does not run'
}

# A kept program is made anew for another header, also for one that is older than the program.
kept_program() {
    mkdir -p 'a repository/examples' 'a repository/tests' || return 1
    cp "$root/examples/run" 'a repository/examples' && cp "$root/tests/setup.sh" 'a repository/tests' || return 1
    printf '#include <stdio.h>\n#include "../moe.h"\nint main(void) { return puts(WORD) < 0; }\n' \
        >'a repository/examples/word.c'
    for word in one two; do
        echo "#define WORD \"$word\"" >'a repository/moe.h' && touch -t 200101010000 'a repository/moe.h' || return 1
        sh 'a repository/examples/run' word >shown 2>said
        status=$?
        [ "$(cat shown)" = "$word" ] || show_call "it is not the program of $word" || return 1
    done
    sh 'a repository/examples/run' word 2>said >shown && empty 'compiled again:' "$(cat said)" || return 1
    CFLAGS=-DNOTHING sh 'a repository/examples/run' word >shown 2>said || show_call 'other flags' || return 1
    sh 'a repository/examples/run' word 2>said >shown && empty 'replaced by that of other flags:' "$(cat said)"
}

# What cannot be replaced is refused before anything is computed.
no_file() {
    screen=shown limit=
    cp "$prepared/in.csv" in && call microdigits - - --epochs 1 -o /dev/null in
    [ "$status" = 1 ] && [ ! -s shown ] && grep -qx 'microdigits: /dev/null: not a regular file' said ||
        show_call 'not refused at once'
}

# A refused call leaves the model that could not be renamed.
part_kept() {
    screen=shown limit=
    cp "$prepared/in.text" text && echo model >m.part && echo stopped >m.checkpoint || return 1
    call text - - -o m text
    [ "$status" = 1 ] && grep -q -- '--resume continues it' said && [ "$(cat m.part)" = model ] ||
        show_call 'it is lost'
}

# What own_router saves and removes is not a file that somebody has.
own_router_keeps() {
    screen=/dev/null limit=
    echo old >own_router.safetensors
    call own_router - -
    names 'own_router.safetensors is there' && run grep -qx old own_router.safetensors && rm own_router.safetensors ||
        return 1
    limit="trap '' XFSZ; ulimit -f 0"
    call own_router - -
    [ "$status" = 1 ] && grep -qx 'own_router: cannot write own_router.safetensors: .*[a-z]' said ||
        show_call 'why it fails is not said'
}

# As some programs begin a table.
byte_order_mark() {
    { printf '\357\273\277' && cat "$prepared/in.csv"; } >rows
    run "$prepared/quickstart" --epochs 1 rows >said && run "$prepared/microdigits" --epochs 1 rows >said
}

rows_5000() {
    awk '{ for (i = 0; i < 3; i++) print }' "$prepared/in.csv" | sed 5000q >rows
    run "$prepared/quickstart" --epochs 1 rows >said && grep -q 'on 1000 digits' said
}

# text checks itself on a text of which a tenth is held out, less than its own checks look at.
short_check() {
    head -c 24000 "$root/moe_routers.h" >short
    MOE_EXAMPLES=$root/examples "$prepared/text" --check short >said 2>&1
    passed_all said
}

run_checks "$@"
