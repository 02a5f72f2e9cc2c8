#!/bin/sh
# Where a mixture wins: 8 operating conditions, each with a rule of its own
# (tests/bench/conditions.c documents the task, the budget and the claims). A mixture, one expert
# per input, against dense nets of depth 1 to 3: the widest of as many products, bytes of flash, or
# cycles of Cortex-M4; and the null case of one condition. Prints a table in Markdown: sizes, bytes
# of constants read per inference, instructions and cycles on M4 (QEMU, gcc -Os,
# tests/port/devices/cortex_m4.txt), accuracy.
#   sh tests/bench/conditions.sh [SEEDS [FIRST]]    (10 seeds from 1 on; some minutes)
# examples/mcu/README.md has the table between the lines "<!-- conditions -->" and "<!-- end -->";
# with WRITE=1 the script puts it there. Seeds 1001 and 1002 are for tuning, no seeds of the table.

LC_ALL=C
export LC_ALL
unset CDPATH
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh

case ${1:-10}.${2:-1} in
-h.* | --help.*) setup_help && exit ;;
*[!0-9.]* | 0* | 1.* | *.0* | *.*.*)
    setup_die "SEEDS is a number from 2: sh tests/bench/conditions.sh -h"
    ;;
esac
seeds=${1:-10} first=${2:-1}
[ "$seeds" -le 100 ] && { [ "$first" -gt 1002 ] || [ $((first + seeds)) -le 1001 ]; } ||
    setup_die 'at most 100 seeds, without 1001 and 1002'

setup_scratch
setup_compiler
setup_stb
setup_stb_flag "$CC"
for tool in arm-none-eabi-gcc qemu-system-arm gcc; do
    setup_tool "$tool" || setup_die \
        "$tool is not there. On Debian or Ubuntu: apt-get install" \
        "gcc-arm-none-eabi picolibc-arm-none-eabi qemu-system-arm gcc"
done

cross() {
    arm-none-eabi-gcc --specs=picolibc.specs --crt0=semihost --oslib=semihost -mthumb -mcpu=cortex-m4 \
        -mfloat-abi=hard -mfpu=fpv4-sp-d16 -std=c99 -Os -ffunction-sections -fdata-sections -Wl,--gc-sections \
        -Wl,-z,noexecstack -Wl,--defsym=__flash=0 -Wl,--defsym=__flash_size=0x40000 \
        -Wl,--defsym=__ram=0x20000000 -Wl,--defsym=__ram_size=0x4000 -I"$root" "$@"
}

printf '#define MOE_IMPLEMENTATION\n#define MOE_NO_FLOAT\n#include "moe.h"\n' >"$scratch/library.c"
# CC may hold several words.
# shellcheck disable=SC2086
$CC -std=c99 -O2 -I"$root" ${stb_flag:+-I"$stb_flag"} tests/bench/conditions.c -o "$scratch/conditions" -lm &&
    gcc -O2 -shared -fPIC tests/port/devices/count.c -o "$scratch/count.so" &&
    cross -c "$scratch/library.c" -o "$scratch/library.o" || setup_die 'preparing failed'

address() { arm-none-eabi-nm "$scratch/firmware.elf" | awk -v name="$1" '$3 == name { print "0x" $1 }'; }

# Instructions and cycles of one inference.
count() { # header
    cross -DDEVICE_MODEL="\"$1\"" tests/bench/conditions.c "$scratch/library.o" -o "$scratch/firmware.elf" ||
        setup_die "$1 does not compile"
    set -- "$1" "from=$(address device_begin),to=$(address device_end)"
    setup_limit 60 qemu-system-arm -M mps2-an386 -nographic -monitor none -serial none \
        -semihosting-config enable=on,target=native -d plugin \
        -plugin "$scratch/count.so,$2,cycles=$root/tests/port/devices/cortex_m4.txt" \
        -kernel "$scratch/firmware.elf" 2>"$scratch/counted" || setup_die "$1 does not run"
    awk '$1 == "count" && $3 == 20 { print $5 / $3, $9 / $3; found = 1 } END { exit !found }' "$scratch/counted" ||
        setup_die 'nothing was counted'
}

cycles() { # form depth width
    "$scratch/conditions" size "$@" "$scratch/size.h" && count "$scratch/size.h" | awk '{ printf "%d\n", $2 }'
}

# The widest dense net, in steps of 2, that takes no more cycles than the mixture.
widths=
for form in 0 1; do
    limit=$(cycles $form 0 0) || exit 1
    for depth in 1 2 3; do
        low=1 high=128
        while [ $((high - low)) -gt 1 ]; do
            middle=$(((low + high) / 2))
            taken=$(cycles $form $depth $((2 * middle))) || exit 1
            if [ "$taken" -le "$limit" ]; then low=$middle; else high=$middle; fi
        done
        widths="$widths $((2 * low))"
    done
done

# shellcheck disable=SC2086
"$scratch/conditions" rows "$scratch" "$seeds" "$first" $widths >"$scratch/rows" || exit 1
for header in "$scratch"/[0-2]_*_*.h; do # of a form, row and seed
    counted=$(count "$header") || exit 1
    name=${header##*/}
    echo "$name $counted"
done | sed 's/_/ /g' >"$scratch/counts"

awk -v seeds="$seeds" -v first="$first" '
    function thousands(n,   text) {
        n = int(n + 0.5)
        for (text = ""; n >= 1000; n = int(n / 1000)) text = sprintf(",%03d", n % 1000) text
        return n text
    }
    FNR == NR { instructions[$1, $2] += $4 / seeds; cycles[$1, $2] += $5 / seeds; next }
    FNR == 1 {
        split("8 conditions|8, and one-hot|one condition", forms, "|")
        print "Means of " seeds " seeds from " first " on.\n"
        print "| conditions | network | products | bytes | read | read, 1 block cached | M4 | M4 cycles | " \
            "rate, epochs | float | int8 | more |"
        print "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    }
    {
        name = $4 == 0 ? "**mixture**, 1 of 8 experts" : "equal " $3 ": dense, " $4 " x " $5
        printf "| %s | %s | %s | %s | %s | %s | %s | %s | %s, %s | %s %% | %s %% | %s |\n", forms[$1 + 1], name,
            thousands($6), thousands($7), thousands($8), thousands($9), thousands(instructions[$1, $2]),
            thousands(cycles[$1, $2]), $10, $11, $12, $13, $4 == 0 ? "" : $14 " (" $15 " to " $16 ")"
    }' "$scratch/counts" "$scratch/rows" >"$scratch/table" || exit 1
cat "$scratch/table"
[ "${WRITE:-0}" != 1 ] || setup_write_between conditions "$scratch/table" examples/mcu/README.md
