#!/bin/sh
# The mixture of examples/microdigits.c beside a linear classifier and dense nets with the same
# training: one with as many weights, one with as many active weights, and the widest whose
# inference takes no more instructions on Cortex-M4. Prints a table in Markdown: accuracy in float
# and int8 over several seeds, bytes, and instructions that QEMU counts on Cortex-M4, M55 and M0
# (gcc -Os), and cycles of M4 by tests/port/devices/cortex_m4.txt.
#   sh tests/bench/rivals.sh [SEEDS]    (10; some minutes)
# examples/mcu/README.md has the table between the lines "<!-- rivals -->" and "<!-- end -->"; with
# WRITE=1 the script puts it there.

LC_ALL=C
export LC_ALL
unset CDPATH
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh

case ${1:-10} in
-h | --help) setup_help && exit ;;
*[!0-9]* | 0 | 1) setup_die "SEEDS is a number from 2: sh tests/bench/rivals.sh -h" ;;
esac
seeds=${1:-10}
same_total=148 same_active=44 # hidden units: 75 h + 10 weights are the mixture's 11,130 in all, 74 h products its 3,272

# Name, QEMU's machine, options of the compiler.
devices() {
    cat <<'TABLE'
m4   mps2-an386  -mcpu=cortex-m4 -mfloat-abi=hard -mfpu=fpv4-sp-d16
m55  mps3-an547  -mcpu=cortex-m55 -mfloat-abi=hard
m0   microbit    -mcpu=cortex-m0
TABLE
}

setup_scratch
setup_compiler
for tool in arm-none-eabi-gcc qemu-system-arm gcc; do
    setup_tool "$tool" || setup_die \
        "$tool is not there. On Debian or Ubuntu: apt-get install" \
        "gcc-arm-none-eabi picolibc-arm-none-eabi qemu-system-arm gcc"
done
# CC may hold several words.
# shellcheck disable=SC2086
$CC -std=c99 -O2 -I"$root" tests/port/devices/rivals.c -o "$scratch/rivals" -lm &&
    $CC -std=c99 -O1 -I"$root" -I"$root/examples" tests/port/devices/export.c -o "$scratch/export" -lm &&
    "$scratch/export" examples/data/digits.csv "$scratch" &&
    gcc -O2 -shared -fPIC tests/port/devices/count.c -o "$scratch/count.so" ||
    setup_die 'preparing failed'

address() { arm-none-eabi-nm "$scratch/firmware.elf" | awk -v name="$1" '$3 == name { print "0x" $1 }'; }

# Instructions of one inference of a model and, on Cortex-M4, "/" and cycles, the mean of 50 digits.
instructions() { # device header
    # shellcheck disable=SC2046
    set -- "$2" $(devices | awk -v name="$1" '$1 == name')
    header=$1 machine=$3 cycles=
    [ "$2" != m4 ] || cycles=",cycles=$root/tests/port/devices/cortex_m4.txt"
    shift 3
    arm-none-eabi-gcc --specs=picolibc.specs --crt0=minimal -mthumb "$@" -std=c99 -Os -ffunction-sections \
        -fdata-sections -Wl,--gc-sections -Wl,-z,noexecstack \
        -Wl,--defsym=__flash=0 -Wl,--defsym=__flash_size=0x40000 -Wl,--defsym=__ram=0x20000000 \
        -Wl,--defsym=__ram_size=0x4000 -DDEVICE_FLOAT=0 \
        -DDEVICE_MODEL="\"$header\"" -I"$root" -I"$root/tests/port" -I"$root/tests/port/devices" \
        -I"$scratch" tests/port/device.c tests/port/devices/model.c \
        -o "$scratch/firmware.elf" || setup_die "$header does not compile"
    setup_limit 60 qemu-system-arm -M "$machine" -nographic -monitor none -serial none -chardev stdio,id=lines \
        -semihosting-config enable=on,target=native,chardev=lines -d plugin \
        -plugin "$scratch/count.so,from=$(address device_begin),to=$(address device_end)$cycles" \
        -kernel "$scratch/firmware.elf" \
        >"$scratch/lines" 2>"$scratch/counted" || setup_die "$header does not run on $machine"
    tail -n 1 "$scratch/lines" | grep -q '^end' || setup_die "$header does not end on $machine"
    awk '$1 == "count" && $3 == 50 {
            printf("%d", $5 / $3)
            if (NF > 8) printf("/%d", $9 / $3)
            print ""
            found = 1
        }
        END { exit !found }' "$scratch/counted" ||
        setup_die 'nothing was counted'
}

size() { # hidden
    "$scratch/rivals" examples/data/digits.csv size "$scratch/size.h" "$1" &&
        instructions m4 "$scratch/size.h" | sed 's,/.*,,'
}

# The widest dense net, in steps of 2, that takes no more instructions than the mixture.
limit=$(size 0) || exit 1
low=2 high=400
while [ $((high - low)) -gt 2 ]; do
    middle=$(((low + high) / 4 * 2))
    taken=$(size "$middle") || exit 1
    if [ "$taken" -le "$limit" ]; then low=$middle; else high=$middle; fi
done

"$scratch/rivals" examples/data/digits.csv table "$scratch" "$seeds" 0 -1 "$same_active" "$low" "$same_total" \
    >"$scratch/rows" || exit 1
for hidden in 0 -1 "$same_active" "$low" "$same_total"; do
    line=$hidden
    for device in $(devices | awk '{ print $1 }'); do
        counted=$(instructions "$device" "$scratch/net_$hidden.h") || exit 1
        line="$line $counted"
    done
    echo "$line"
done >"$scratch/instructions"

awk -v active="$same_active" -v equal="$low" -v total="$same_total" -v seeds="$seeds" '
    function name(hidden) {
        if (hidden == 0) return "**mixture**, 2 of 8 experts"
        if (hidden < 0) return "linear"
        if (hidden == active) return "dense " hidden ": as many active weights"
        return "dense " hidden ": as many " (hidden == total ? "weights" : "instructions")
    }
    function thousands(n,   text) {
        for (text = ""; n >= 1000; n = int(n / 1000)) text = sprintf(",%03d", n % 1000) text
        return n text
    }
    FNR == NR { split($2, both, "/"); m4[$1] = both[1]; cycles[$1] = both[2]; m55[$1] = $3; m0[$1] = $4; next }
    FNR == 1 {
        print "Means of " seeds " seeds.\n"
        print "| digits | network | products | bytes | M4 | M4 cycles | M55 | M0 | float | int8 (worst seed) | more |"
        print "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    }
    { printf "| %s | %s | %s | %s | %s | %s | %s | %s | %s %% | %s %% (%s) | %s |\n",
          $1, name($2), thousands($3), thousands($4), thousands(m4[$2]), thousands(cycles[$2]), thousands(m55[$2]),
          thousands(m0[$2]), $5, $6, $7, $2 == 0 ? "" : $8 " (" $9 " to " $10 ")" }
' "$scratch/instructions" "$scratch/rows" >"$scratch/table" || exit 1
cat "$scratch/table"
[ "${WRITE:-0}" != 1 ] || setup_write_between rivals "$scratch/table" examples/mcu/README.md
