#!/bin/sh
# Tests examples/microdigits.c and examples/export.c: the headers that they write compile with all
# warnings, what they print is there, and what is wrong with arguments and files is said. sh
# tests/examples/examples_export.sh [-v] [WORD], as tests/port/headers.sh.

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

digits=$root/examples/data/digits.csv

prepare() {
    for program in microdigits export; do
        # CC may hold several words.
        # shellcheck disable=SC2086
        $CC $(strict_flags "$CC") -O1 -I"$root" "examples/$program.c" -o "$prepared/$program" -lm || return 1
    done
    "$prepared/microdigits" --epochs 5 -o "$prepared/digits.h" --save "$prepared/digits.safetensors" "$digits" \
        >"$prepared/said"
    echo '1,2,3' >"$prepared/short.csv"
    echo 'a,b' >"$prepared/words.csv"
    sed 's/[0-9]*$/11/' "$digits" >"$prepared/labels.csv"
    sed 's/[0-9]*$/&.5/' "$digits" >"$prepared/fractions.csv"
    sed 9q "$digits" >"$prepared/digits.csv"
}

plan() {
    cat <<'TEXT'
trained
header int8 -DMOE_NO_FLOAT
header int4 -DMOE_NO_FLOAT
header float -DMOE_NO_TRAIN
refused add_--calibration
refused a_column_is_not_a_number --calibration words.csv
refused fewer_numbers --calibration short.csv
refused not_a_label --calibration labels.csv
refused cannot_open --calibration none.csv
refused cannot_be_the_name --calibration short.csv --name 1x
refused is_too_long --calibration short.csv --name a_name_of_more_than_forty_characters_is_too_long
refused explicit:_is_a_name_of_C --calibration digits.csv --name explicit
refused a_letter_first --calibration digits.csv --name _under
refused this_network_reads_numbers --calibration digits.csv --tokens words.csv
refused not_a_label --calibration fractions.csv
refused not_a_value --weights int9
refused not_a_value --divide 0
refused not_a_value --divide inf
refused a_second_network other.safetensors
keeps_library
names_of_c
positions
no_expert
firmware
TEXT
}

# After five epochs more than nine of ten digits are classified correctly, in integers as well.
trained() {
    awk '/held-out accuracy/ { found = 1; exit !($3 > 90 && $7 > 90) } END { if (!found) exit 1 }' "$prepared/said" &&
        test -s "$prepared/digits.h" && return 0
    cat "$prepared/said"
    return 1
}

# The header compiles, and integers answer nearly always as the net does.
header() { # weights option
    MOE_EXAMPLES=$root/examples run "$prepared/export" "$prepared/digits.safetensors" --calibration "$digits" \
        --divide 16 --rows 500 --weights "$1" --name net -o 'a net.h' >said || return 1
    # the compile line that it prints, in a folder without moe.h
    sed -n 's/^ *cc \(-std=c99 .*\)/\1/p' said >options && [ -s options ] || return 1
    eval "run \"\$CC\" $(cat options)" || return 1
    printf '#define MOE_IMPLEMENTATION\n#define %s\n#include "a net.h"\n' "${2#-D}" >unit.c
    printf 'extern const moe_model *it;\nconst moe_model *it = &net;\n' >>unit.c
    run "$CC" $(strict_flags "$CC") -I"$root" -c unit.c -o unit.o || return 1
    [ "$1" = float ] || awk -v most="$([ "$1" = int8 ] && echo 6 || echo 25)" '
        /of the answers are the same/ { same = $(NF - 7); sub(/.*differ by /, ""); differ = $1 }
        /^accuracy/ { right = $6 }
        END { exit !(same > 97 && differ > 0 && differ < most && right > 90) }' said || {
        cat said
        return 1
    }
}

refused() { # what-it-says-with-_-for-spaces options...
    said=$(echo "$1" | tr _ ' ')
    shift
    for file in short words labels fractions digits; do cp "$prepared/$file.csv" .; done
    if "$prepared/export" "$prepared/digits.safetensors" "$@" -o refused.h >out 2>&1; then
        echo 'it was not refused'
        return 1
    fi
    [ ! -e refused.h ] && grep -qF -- "$said" out || {
        echo "it did not say: $said"
        cat out
        return 1
    }
}

# A model called moe does not replace moe.h.
keeps_library() {
    cp "$prepared/digits.safetensors" net.safetensors && cp "$prepared/digits.csv" . || return 1
    echo mine >moe.h
    ! "$prepared/export" net.safetensors --calibration digits.csv -o moe.h >out 2>&1 && [ "$(cat moe.h)" = mine ] &&
        grep -q 'moe.h: is a header of the library' out || { cat out && return 1; }
    ! "$prepared/export" net.safetensors --calibration digits.csv -o ./moe_kernels.h >out 2>&1 &&
        [ ! -e moe_kernels.h ] || return 1
    ! "$prepared/export" net.safetensors --calibration digits.csv -o net.safetensors >out 2>&1 &&
        cmp net.safetensors "$prepared/digits.safetensors" || return 1
    run "$prepared/export" net.safetensors --calibration digits.csv -o model.h >out
}

# No model is called as what the headers declare that its own may include: it would not compile.
names_of_c() {
    needs gcc
    cp "$prepared/digits.safetensors" . || return 1
    for header in ctype float limits math stdarg stddef stdint stdio stdlib string; do
        echo "#include <$header.h>"
    done >c.c
    for standard in c99 gnu17; do
        run gcc -std=$standard -aux-info all -c c.c -o c.o || return 1
        sed -n 's/.*[ *]\([A-Za-z][A-Za-z0-9_]*\) (.*/\1/p' all
    done | sort -u >names
    [ "$(wc -l <names)" -gt 250 ] || return 1
    printf '%s\n' main double typeof FILE NULL errno size_t moe moe_net moe_infer >>names
    while read -r name; do
        "$prepared/export" digits.safetensors --weights float --name "$name" -o refused.h >out 2>&1
        [ $? = 2 ] && grep -q "^export: $name: is a name of C" out || { echo "$name" && return 1; }
    done <names
    [ ! -e refused.h ] || return 1
    cp digits.safetensors main.safetensors && ! "$prepared/export" main.safetensors --weights float >out 2>&1 &&
        grep -q -- '--name gives another' out || return 1
    for name in mains digits logs x; do
        run "$prepared/export" digits.safetensors --weights float --name "$name" -o x.h >out || return 1
    done
}

# Sequences are as long as the network has positions.
positions() {
    cat >net.c <<'TEXT'
#define MOE_IMPLEMENTATION
#include "moe.h"
int main(void) {
    moe_net net;
    moe_net_init(&net, 0, MOE_KERNELS_C, NULL);
    moe_net_embedding(&net, 256, 8);
    moe_net_positions(&net, 16);
    moe_net_tied(&net);
    return moe_net_build(&net, 0, 1, NULL) || moe_net_save(&net, "net.safetensors", NULL);
}
TEXT
    run "$CC" $(strict_flags "$CC") -I"$root" net.c -o net -lm && ./net || return 1
    run "$prepared/export" net.safetensors --tokens net.c -o net.h >said || return 1
    grep -q ' 16 tokens at most$' said || {
        cat said
        return 1
    }
}

# Inputs that no expert takes are not expert 0's, and float and integers agree on them.
no_expert() {
    cat >net.c <<'TEXT'
#define MOE_IMPLEMENTATION
#include "moe.h"
int main(void) {
    moe_layer_config layer = {.router = {.n_experts = 2, .gate = MOE_GATE_RELU, .select = MOE_SELECT_POSITIVE,
                                         .weight = MOE_WEIGHT_RAW}, .expert = MOE_EXPERT_LINEAR};
    moe_tensor weight;
    moe_net net;
    moe_net_init(&net, 1, MOE_KERNELS_C, NULL);
    moe_net_mixture(&net, &layer);
    if (moe_net_build(&net, 0, 1, NULL) || moe_layer_find(&net.modules[0].layer, "router.weight", &weight)) return 1;
    weight.data[0] = 1;
    weight.data[1] = 2;
    return moe_net_save(&net, "net.safetensors", NULL);
}
TEXT
    run "$CC" $(strict_flags "$CC") -I"$root" net.c -o net -lm && ./net || return 1
    printf '1\n-1\n-1\n-1\n' >rows.csv
    run "$prepared/export" net.safetensors --calibration rows.csv -o net.h >said || return 1
    grep -q 'first choice is the same for 100' said && grep -q ' no expert:  *75.0 %' said &&
        ! grep -q 'expert  0 first' said || {
        cat said
        return 1
    }
}

# The firmware as a program for this machine: it shows the digit and reads it, and names the two
# experts.
firmware() {
    # The directory of moe.h comes last: a digits.h of the user's may lie there.
    # shellcheck disable=SC2046
    run "$CC" $(strict_flags "$CC") -Os -I"$prepared" -I"$root" "$root/examples/mcu/firmware.c" -o firmware || return 1
    ./firmware >out || return 1
    [ "$(wc -l <out)" -eq 9 ] && tail -n 1 out |
        grep -q '^is a 9, as read by expert [0-7] ([0-9]* %) and expert [0-7] ([0-9]* %)$' || {
        cat out
        return 1
    }
}

run_checks "$@"
