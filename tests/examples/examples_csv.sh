#!/bin/sh
# Tests examples/csv.c: tables in every form that it reads are learned, what it saves predicts,
# exports and runs, and what is wrong with a table is said with its line and what to do; also what
# examples/gallery.c refuses. sh tests/examples/examples_csv.sh [-v] [WORD], as
# tests/port/headers.sh.

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

prepare() {
    setup_stb_flag "$CC"
    # CC may hold several words.
    compiler="$CC -std=c99 -O1 -DMOE_NO_SIMD -I. ${stb_flag:+-I$stb_flag}"
    # shellcheck disable=SC2086
    echo '#include "tests/all.h"' | $compiler -DMOE_IMPLEMENTATION -x c -c - -o "$prepared/library.o" || return 1
    for program in csv export gallery; do
        sed 's/^#define MOE_IMPLEMENTATION$//' "examples/$program.c" >"$prepared/$program.c"
        # shellcheck disable=SC2086
        $compiler $(strict_flags "$CC") -Iexamples "$prepared/$program.c" "$prepared/library.o" -o \
            "$prepared/$program" -lm || return 1
    done
    # Two numbers decide: three kinds in three corners of a plane.
    awk 'BEGIN {
        print "length,width,\"what, it is\""
        for (i = 0; i < 90; i++) {
            k = i % 3
            label = k == 0 ? "\"small one\"" : k == 1 ? "long" : "wide"
            print k % 2 * 10 + i % 7 / 7 "," int(k / 2) * 4 + i % 5 / 5 "," label
        }
    }' >"$prepared/plain.csv"
}

plan() {
    cat <<'TEXT'
learns
without_matrices
presets
no_expert
alike
other_lines 2 expert_choice
other_lines 0 mixtral
forms semicolons s/,/;/g
forms tabs s/,/\t/g
forms carriage s/$/\r/
forms blanks s/"what,_it_is"/what/;s/small_one/small/;s/,/___/g
forms empty_lines s/$/\n/
forms byte_order_mark 1s/^/\xef\xbb\xbf/
forms no_names 1d
label
dropped
predicts
words_are_one_hot
quoted_names
quoted_labels
by_place
repeated_names
numbers_for_names
whole_characters
constant_column
held_out_lines
firmware
firmware_refused
firmware_names
keeps_table
links
reports
refused line_3_has_2_cells 3s/,.*,/,/
refused a_quote_is_not_closed 4s/$/"x/;4s/"//g;4s/,/,"/2
refused 5:_column_2_(width)_has_no_value 5s/,[^,]*,/,,/
refused fill_it_in,_or_leave_such_lines_out_with_--drop 5s/,[^,]*,/,NA,/
refused 6:_column_1_(length)_is_"ten",_which_is_not_a_number 6s/^[^,]*/ten/
refused 6:_column_1_(length)_is_"t???n",_which_is_not_a_number 6s/^[^,]*/t\xc2\x9b\x7fn/
refused 6:_column_1_(length)_is_inf:_numbers_must_be_finite 6s/^[^,]*/inf/
refused 6:_column_1_(length)_is_1e31:_numbers_must_be_finite,_at_most_1e30 6s/^[^,]*/1e31/
refused write_numbers_with_a_point s/,/;/g;7s/^[^;]*/3,5/
refused 8:_the_label_(column_3)_is_missing_("None") 8s/[^,]*$/None/
refused at_least_10 9,$d
refused all_lines_have_the_same_label 2,$s/[^,]*$/same/
refused is_it_the_label? s/[^,]*$/&/;=
refused is_zero,_so_this_is_not_text 3s/,/\x00/
refused it_is_empty d
refused line_4_has_a_character_that_is_not_UTF-8 4s/long\|wide\|small/caf\xe9/
refused one_column_only s/,.*//
told no_column_color --label color
told no_column_7 --skip length,7
told no_column_is_left --skip length,width
told leaves_out_the_column_to_predict --skip 3
told not_a_value --experts 0
told not_a_value --header maybe
told no_such_option --what 1
told there_is_no_preset --router nobody
told add_--save --firmware x.c
told only_one_of_them --load m.safetensors
told a_second_table plain.csv
load_only_predicts
load_advice
names_alone
gallery_refuses
TEXT
}

# Words of a check with _ for blanks; a pattern's own blanks are _ too.
words() { printf "%s\n" "$1" | tr _ " "; }

right() { # least percentage, file
    awk -v least="$1" '/^held-out accuracy/ { found = 1; exit !($3 >= least) } END { if (!found) exit 1 }' "$2" &&
        return 0
    cat "$2"
    return 1
}

learns() {
    run "$prepared/csv" "$prepared/plain.csv" >said || return 1
    right 95 said && grep -q '90 lines, 2 numbers each, 3 labels in column 3 (what, it is)' said &&
        grep -q '^  small one ' said && grep -q '^ *3 .*%$' said
}

# Of three experts per line those with matrices are told apart.
without_matrices() {
    run "$prepared/csv" "$prepared/plain.csv" --router adamoe --experts 18 --top-k 3 --epochs 1 >said &&
        grep -q '(a line goes to 3, of which [0-2][.0-9]* have matrices):$' said
}

# Presets that tell how many experts have no matrices, or form how many groups, with four experts.
presets() {
    for preset in adamoe moe_pp longcat_flash moge deepseek_v3 base; do
        run "$prepared/csv" "$prepared/plain.csv" --router "$preset" --epochs 1 --save m.safetensors >said || return 1
        grep -q '^held-out' said || return 1
        run "$prepared/csv" --load m.safetensors --predict "$prepared/plain.csv" >answers || return 1
    done
}

# Lines that the router sends to no expert are not those of expert 0.
no_expert() {
    run "$prepared/csv" "$prepared/plain.csv" --router remoe --top-k 1 --epochs 8 --save m.safetensors >said || return 1
    run "$prepared/csv" --load m.safetensors --predict "$prepared/plain.csv" >answers || return 1
    none=$(grep -c ',-1$' answers)
    [ "$none" -gt 0 ] && grep -q "^    none *$none lines: " said
}

# Of columns that are equally far from the mean each is named.
alike() {
    awk -F, '{ print (NR == 1 ? "twin" : $1) "," $0 }' "$prepared/plain.csv" >alike.csv
    run "$prepared/csv" alike.csv --epochs 1 >said && grep -q 'twin \([-+][0-9.]*\).*; length \1' said
}

# Training and prediction tell when a line's answer depends on the other lines.
other_lines() { # how often preset
    run "$prepared/csv" "$prepared/plain.csv" --router "$2" --epochs 1 --save m.safetensors >said 2>told || return 1
    run "$prepared/csv" --load m.safetensors --predict "$prepared/plain.csv" >answers 2>>told || return 1
    [ "$(grep -c '^note: .* depends on the lines before and after it: module 0 .*select = expert_choice' told)" = "$1" ]
}

# sed's scripts write a table in another form; what is learned stays the same to the last digit.
forms() { # name script
    script=$(words "$2")
    [ "$1" = no_names ] && names=no || names=yes
    sed "$script" "$prepared/plain.csv" >form.csv
    run "$prepared/csv" form.csv --header "$names" >said || return 1
    run "$prepared/csv" form.csv >guessed && cmp said guessed || return 1
    run "$prepared/csv" "$prepared/plain.csv" >plain || return 1
    right 95 said && for file in said plain; do grep -E '^(epoch|held|I\(E)' $file >$file.numbers; done &&
        cmp said.numbers plain.numbers
}

label() {
    awk -F, 'NR == 1 { print "kind,a,b"; next } { print $3 "," $1 "," $2 }' "$prepared/plain.csv" >first.csv
    run "$prepared/csv" first.csv --label kind >name && run "$prepared/csv" first.csv --label 1 >number &&
        cmp name number && right 95 name || return 1
    run "$prepared/csv" first.csv --label kind --skip b >said && grep -q '1 numbers each' said
}

dropped() {
    sed '5s/,[^,]*,/,,/; 9s/[^,]*$/?/' "$prepared/plain.csv" >gaps.csv
    run "$prepared/csv" gaps.csv --drop >said && grep -q '88 lines (2 with missing values left out)' said &&
        right 95 said
}

# A saved classifier says of every line what the table says, nearly always, whatever the order of
# the columns.
predicts() {
    run "$prepared/csv" "$prepared/plain.csv" --save m.safetensors >said || return 1
    awk -F, '{ print $2 ",?," $1 }' "$prepared/plain.csv" >other.csv
    run "$prepared/csv" --load m.safetensors --predict other.csv >answers || return 1
    awk -F, -v table="$prepared/plain.csv" '
        BEGIN {
            while ((getline line < table) > 0) {
                n = split(line, cell, ",")
                gsub(/"/, "", cell[n])
                label[++rows] = cell[n]
            }
        }
        NR > 1 { right += label[$1] == $2; if ($3 < 0.3 || $3 > 1 || $4 < 0 || $4 > 3) bad = 1 }
        END { exit bad || NR != 91 || right < 86 }' answers && return 0
    cat answers
    return 1
}

# A column of words is one input per word, whatever number each is given; an unknown word is none of
# them; one wrong number is still an error.
words_are_one_hot() {
    awk 'BEGIN { print "color,size,kind"; split("red green blue", c, " ")
        for (i = 0; i < 90; i++) print c[i % 3 + 1] "," i % 7 "," (i % 3 == 1 ? "b" : "a") }' >words.csv
    run "$prepared/csv" words.csv --save m.safetensors >said && grep -q ' 4 numbers each' said && right 100 said ||
        return 1
    grep -q 'color = green' said || { cat said && return 1; }
    sed 1d words.csv | cut -d, -f1,2 >bare.csv
    run "$prepared/csv" --load m.safetensors --predict bare.csv >answers &&
        awk -F, 'NR > 1 && $2 != (NR % 3 == 0 ? "b" : "a") { bad = 1 } END { exit bad || NR != 91 }' answers ||
        { cat answers && return 1; }
    run "$prepared/csv" words.csv --label size --skip kind >said && grep -q ' 3 numbers each' said || return 1
    awk 'BEGIN { for (i = 0; i < 90; i++) print "w" i ",1," i % 2 }' >many.csv
    ! "$prepared/csv" many.csv >out 2>&1 && grep -q 'more than 64 different words' out
}

# Separators and doubled quotes in the quoted names of the first line, and a quote within a name.
quoted_names() {
    sed '1s/.*/"length ""mm"", rounded",width,what/' "$prepared/plain.csv" >names.csv
    run "$prepared/csv" names.csv --epochs 1 >said && grep -q '90 lines, 2 numbers each, 3 labels' said || return 1
    sed '1s/.*/15",width,what/' "$prepared/plain.csv" >inches.csv
    run "$prepared/csv" inches.csv --epochs 1 >said && grep -q '90 lines, 2 numbers each, 3 labels' said || return 1
    sed '1s/.*/"length in mm" width what/; s/"small one"/small/; s/,/ /g' "$prepared/plain.csv" >blanks.csv
    run "$prepared/csv" blanks.csv --epochs 1 >said && grep -q '90 lines, 2 numbers each, 3 labels' said
}

# A label with a separator and quotes, longer than messages show, comes out as it went in.
quoted_labels() {
    label='"it is wide, ""wider"" than long, and wider than all others of its kind"'
    sed "s/,wide\$/,$label/" "$prepared/plain.csv" >labels.csv
    run "$prepared/csv" labels.csv --save m.safetensors >said || return 1
    run "$prepared/csv" --load m.safetensors --predict labels.csv >answers || return 1
    grep -qE "^[0-9]+,$label,[0-9.]+,[0-3]$" answers && grep -qE '^[0-9]+,small one,[0-9.]+,[0-3]$' answers &&
        return 0
    head -n 5 answers
    return 1
}

# Without names columns go by their place, with or without the label.
by_place() {
    sed 1d "$prepared/plain.csv" >rows.csv
    sed 's/,[^,]*$//' rows.csv >bare.csv
    run "$prepared/csv" rows.csv --save m.safetensors >said &&
        run "$prepared/csv" --load m.safetensors --predict bare.csv >bare &&
        run "$prepared/csv" --load m.safetensors --predict rows.csv >whole 2>right && cmp bare whole &&
        grep -q '^[89][0-9] of the 90 lines' right || return 1
    run "$prepared/csv" --load m.safetensors --predict "$prepared/plain.csv" >named 2>right &&
        grep -q '^[89][0-9] of the 90 lines' right && [ "$(cut -d, -f2- named)" = "$(cut -d, -f2- whole)" ] || return 1
    cut -d, -f1 rows.csv | sed 's/$/,/' | sed 's/,$//' >narrow.csv
    ! "$prepared/csv" --load m.safetensors --predict narrow.csv >out 2>&1 &&
        grep -q 'there is no column 2; it has 1 columns, the training table had 3' out
}

# Columns of one name are told apart by their places.
repeated_names() {
    awk 'BEGIN { print "x,x,kind"; for (i = 0; i < 60; i++)
        print i * 7 % 11 "," i % 2 * 10 + i % 5 / 5 "," (i % 2 ? "a" : "b") }' >twice.csv
    run "$prepared/csv" twice.csv --epochs 20 --save m.safetensors >said && right 100 said &&
        run "$prepared/csv" --load m.safetensors --predict twice.csv >answers 2>right &&
        grep -q '^60 of the 60 lines' right || return 1
    awk -F, '{ print $3 "," $1 "," $2 }' twice.csv >moved.csv
    "$prepared/csv" --load m.safetensors --predict moved.csv >out 2>&1
    status=$?
    said_all several_columns_x
}

# A column of another name is not the one at its place, nor is a number that names a column its
# place in a table that lacks this column.
numbers_for_names() {
    sed '1s/.*/1,2,what/' "$prepared/plain.csv" >named.csv
    run "$prepared/csv" named.csv --header yes --epochs 1 --save m.safetensors >said || return 1
    cut -d, -f2- named.csv >narrow.csv
    "$prepared/csv" --load m.safetensors --predict narrow.csv --header yes >out 2>&1
    status=$?
    said_all there_is_no_column_1 || return 1
    sed '1s/.*/2,3,what/' named.csv >renamed.csv
    "$prepared/csv" --load m.safetensors --predict renamed.csv --header yes >out 2>&1
    status=$?
    said_all there_is_no_column_1
}

# Names that are too long for their place are cut between characters, and nothing fills the gap.
whole_characters() {
    long=xääääääääääääääääääääääääääääää
    sed "1s/length/$long/; s/wide\$/$long/" "$prepared/plain.csv" >long.csv
    run "$prepared/csv" long.csv --epochs 1 >said && grep -q 'xää.*ä\.\.\. [-+]' said || return 1
    "$prepared/csv" said >out 2>&1 # it tells what is not UTF-8
    ! grep 'not UTF-8' out
}

# A column that is constant, though not its rounded mean, has no deviation to be scaled by.
constant_column() {
    awk -F, 'NR == 1 { print "a,b,kind"; next } { print $1 ",0.1," ($1 < 5 ? "low" : "high") }' \
        "$prepared/plain.csv" >constant.csv
    run "$prepared/csv" constant.csv --save m.safetensors >said && right 95 said || return 1
    sed 's/,0.1,/,0.2,/' constant.csv >other.csv
    run "$prepared/csv" --load m.safetensors --predict other.csv >answers 2>right &&
        grep -q '^\(8[5-9]\|90\) of the 90 lines' right || { cat right answers && return 1; }
}

# Held-out lines do not change what is saved, scales included; lines to learn from do. A number of
# theirs that a float cannot hold after scaling is an error that names it.
held_out_lines() {
    seq 0 39 | awk 'BEGIN { print "a,b,kind" } { print $1 % 7 "," $1 % 5 * 1e-12 "," ($1 % 2 ? "u" : "v") }' >all.csv
    run "$prepared/csv" all.csv --epochs 1 --save m.safetensors || return 1
    same=0
    named=0
    for line in 3 8 13 18 23 28 33 38 41; do
        awk -F, -v line=$line 'NR == line { $1 = 99; $2 = 1e30 } { print $1 "," $2 "," $3 }' all.csv >one.csv
        "$prepared/csv" one.csv --epochs 1 --save n.safetensors >out 2>&1 || {
            run grep -q "one.csv:$line: column 2 (b) is too far from the training lines" out || return 1
            named=$((named + 1))
        }
        awk -F, -v line=$line 'NR == line { $1 = 99 } { print $1 "," $2 "," $3 }' all.csv >one.csv
        run "$prepared/csv" one.csv --epochs 1 --save n.safetensors >out || return 1
        cmp -s m.safetensors n.safetensors && same=$((same + 1))
    done
    [ "$same" -gt 0 ] && [ "$same" -lt 9 ] && [ "$named" = "$same" ] && return 0
    echo "$same alike, $named named"
    return 1
}

# Options that need training are not ignored.
load_only_predicts() {
    for option in '--report r.txt' '--save n.safetensors' '--firmware x.c' '--label kind' '--skip width' '--experts 2' \
        '--top-k 1' '--width 3' '--router smoe' '--epochs 3' '--seed 2'; do
        # shellcheck disable=SC2086
        "$prepared/csv" --load m.safetensors --predict "$prepared/plain.csv" $option >out 2>&1
        status=$?
        said_all "${option% *}:_a_saved_classifier_only_predicts" && [ "$status" = 2 ] || return 1
    done
    for option in '--drop' '--header yes' '--kernels c'; do # these are for predictions too
        # shellcheck disable=SC2086
        "$prepared/csv" --load none --predict "$prepared/plain.csv" $option >out 2>&1
        status=$?
        said_all cannot_open_none || return 1
    done
}

# What is wrong with a cell is told without options that only training has.
load_advice() {
    run "$prepared/csv" "$prepared/plain.csv" --epochs 1 --save m.safetensors >said || return 1
    for change in '5s/,[^,]*,/,,/' '6s/^[^,]*/ten/' '6s/^[^,]*/inf/' '2,$d'; do
        sed "$change" "$prepared/plain.csv" >in.csv
        "$prepared/csv" --load m.safetensors --predict in.csv >out 2>&1
        status=$?
        said_all in.csv && ! grep -q -- --skip out || return 1
        "$prepared/csv" "$prepared/plain.csv" --epochs 1 --predict in.csv >out 2>&1
        status=$?
        said_all in.csv && ! grep -q -- '--skip\|most of this column' out || return 1
    done
    sed '5s/[^,]*$/unknown/' "$prepared/plain.csv" >in.csv
    run "$prepared/csv" --load m.safetensors --predict in.csv >out 2>right &&
        grep -q ' 89 lines with a known label' right
}

names_alone() {
    sed 1q "$prepared/plain.csv" >in.csv
    "$prepared/csv" in.csv --header yes >out 2>&1
    status=$?
    said_all in.csv:_there_are_no_lines_below_the_names
}

# From the table to a program of integers, in a folder, by the command that is printed.
firmware() {
    mkdir -p 'a device' || return 1
    run "$prepared/csv" "$prepared/plain.csv" --save 'kinds of.2.safetensors' --firmware 'a device/device.c' >said ||
        return 1
    eval "run \"\$prepared/export\" $(sed -n 's|^as C: *sh examples/run export ||p' said)" >exported || return 1
    run "$CC" $(strict_flags "$CC") -Wno-double-promotion -Os -I"$root" 'a device/device.c' -o device || return 1
    ./device >out
    [ "$(wc -l <out)" -eq 11 ] && grep -q '^\(9\|10\) of 10 right$' out &&
        grep -q 'it is small one; expert [0-3]$' out && return 0
    cat out
    return 1
}

# Before training: nothing is saved.
firmware_refused() {
    "$prepared/csv" "$prepared/plain.csv" --epochs 1 --save m.safetensors --firmware none/x.c >out 2>&1
    status=$?
    said_all none/x.c:_No_such_file && [ ! -e m.safetensors ]
}

# Names that the program or the library has for something else: every word of the program but C's.
firmware_names() {
    run "$prepared/csv" "$prepared/plain.csv" --epochs 1 --save kinds.safetensors --firmware device.c >said || return 1
    sed 's/"[^"]*"//g; s/\.expert//; s/^ *\/\*.*//; /^   examples/d; /^#/d; s/[0-9][ef][-+0-9f]*//g' device.c |
        grep -oE '[A-Za-z_][A-Za-z0-9_]*' |
        grep -vxE '(moe|MOE|KINDS|kinds)(_[A-Za-z_]*)?|(size|int8|int16)_t|NULL|char|float|int|unsigned|void' |
        grep -vxE 'static|const|enum|sizeof|for|if|return' | sort -u >names
    printf '%s\n' moe double catch index fopen sinf moe_net >>names
    [ "$(wc -l <names)" -gt 20 ] || return 1
    while read -r name; do
        "$prepared/csv" "$prepared/plain.csv" --epochs 1 --save "$name.safetensors" --firmware x.c >out 2>&1
        status=$?
        said_all save_it_as_another && [ ! -e "$name.safetensors" ] || { echo "$name" && return 1; }
    done <names
    "$prepared/csv" "$prepared/plain.csv" --epochs 1 --save moe.safetensors >out 2>&1
    status=$?
    said_all save_it_as_another || return 1
    run "$prepared/csv" "$prepared/plain.csv" --epochs 1 --save rows.safetensors >said
}

# A table is not replaced by what is learned from it.
keeps_table() {
    cp "$prepared/plain.csv" . && cp plain.csv m.csv && cp m.csv m.calibration.csv || return 1
    for call in 'm.csv --save m.csv' 'm.csv --save n.safetensors --firmware m.csv' \
        'm.calibration.csv --save m.safetensors' 'plain.csv --predict m.csv --save m.csv'; do
        # shellcheck disable=SC2086
        "$prepared/csv" $call --epochs 1 >out 2>&1
        status=$?
        said_all would_replace_what_is_read || return 1
    done
    cmp m.csv "$prepared/plain.csv" && cmp m.calibration.csv "$prepared/plain.csv"
}

# The check before training keeps a link that leads nowhere yet.
links() {
    ln -s there.safetensors link.safetensors || return 1
    run "$prepared/csv" "$prepared/plain.csv" --epochs 1 --save link.safetensors >said || return 1
    [ -L link.safetensors ] && [ -s there.safetensors ] && [ "$(ls *.try 2>/dev/null)" = '' ]
}

reports() {
    for kind in html svg txt; do run "$prepared/csv" "$prepared/plain.csv" --report "r.$kind" >said &&
        [ -s "r.$kind" ] && grep -q "^report     r.$kind$" said || return 1; done
    run "$prepared/csv" "$prepared/plain.csv" --report - >said && [ ! -e ./- ] &&
        grep -q 'Experts and labels' said || return 1
    grep -q '</html>' r.html && grep -q '</svg>' r.svg && grep -q 'Experts and labels' r.txt &&
        grep -q 'small one' r.html && [ "$(grep -c '<svg' r.html)" -ge 1 ]
}

said_all() { # what it should say
    wanted=$(words "$1")
    case $status in 1 | 2) true ;; *) false ;; esac && grep -qF -- "$wanted" out && return 0
    echo "status $status; it did not say: $wanted"
    cat out
    return 1
}

refused() { # what-it-says script-that-spoils-the-table
    sed "$2" "$prepared/plain.csv" >in.csv
    case $2 in *=) awk -F, 'NR > 1 { print $1 "," $2 "," NR "x" }' "$prepared/plain.csv" >in.csv ;; esac
    "$prepared/csv" in.csv --save m.safetensors >out 2>&1
    status=$?
    [ ! -e m.safetensors ] || { echo 'something was written' && return 1; }
    grep -q 'in.csv' out || { cat out && return 1; }
    said_all "$1"
}

told() { # what-it-says options...
    what=$1
    shift
    [ "$what" != only_one_of_them ] || what='a_saved_classifier_is_not_trained_again'
    "$prepared/csv" "$prepared/plain.csv" "$@" >out 2>&1
    status=$?
    case $what in no_column_color) what='there_is_no_column_color' ;; no_column_7) \
        what='--skip:_there_is_no_column_7' ;; esac
    said_all "$what"
}

gallery_refuses() {
    for call in '-o|none|none/' '--preset|nobody|there is no preset of this name' '--steps|0|not a value' \
        '--seed|99999999999999999999|not a value' '--seed|-1|not a value' \
        '--kernels|mmx|not a value' '--what|1|no such option'; do
        option=${call%%|*} rest=${call#*|}
        "$prepared/gallery" "$option" "${rest%%|*}" >out 2>&1
        status=$?
        said_all "$(echo "${rest#*|}")" || return 1
    done
    mkdir kept && echo old >kept/smoe.svg || return 1
    "$prepared/gallery" -o kept --preset smoe --kernels wasm >out 2>&1
    status=$?
    said_all this_machine_cannot_run_them && [ -s kept/smoe.svg ] || return 1
    mkdir all && run "$prepared/gallery" -o all --steps 1 --report all.html >said || return 1
    [ "$(grep -c '<figure' all.html)" -eq "$(ls all | grep -c 'svg$')" ] ||
        { echo 'the page lacks pictures' && return 1; }
    mkdir one && run "$prepared/gallery" -o one --preset smoe --steps 20 >said && [ "$(ls one)" = smoe.svg ] &&
        grep -q '^1 of 1 presets drawn' said
}

run_checks "$@"
