#!/bin/sh
# Runs exported models (tests/port/devices/export.c makes them) on devices in emulators and on other
# processors, compares what they answer with this machine's answer, and measures flash, RAM, stack
# and instructions on the devices.
#   sh tests/port/devices.sh [-v] [WORD]        only the checks that have WORD in their line; -v
#                                               prints all lines
#   sh tests/port/devices.sh --write            measures and writes tests/port/devices/figures.txt
#                                               and the table of examples/mcu/README.md; later
#                                               runs must have the same figures
#   sh tests/port/devices.sh --write-costs      measures and writes moei_costs of moe_export.h
# A tool that is missing is a skip, with REQUIRE_TOOLS=1 a failure. The figures are printed as a
# table; the last line is "N passed, N failed, N skipped".

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

# Where firmware runs: name, kind, QEMU's machine, begin of flash and of RAM, options of the
# compiler.
devices() {
    cat <<'TABLE'
m0       arm   microbit    0x00000000  0x20000000  -mcpu=cortex-m0
m3       arm   mps2-an385  0x00000000  0x20000000  -mcpu=cortex-m3
m4       arm   mps2-an386  0x00000000  0x20000000  -mcpu=cortex-m4 -mfloat-abi=hard -mfpu=fpv4-sp-d16
m7       arm   mps2-an500  0x00000000  0x20000000  -mcpu=cortex-m7 -mfloat-abi=hard -mfpu=fpv5-d16
m33      arm   mps2-an505  0x10000000  0x38000000  -mcpu=cortex-m33 -mfloat-abi=hard -mfpu=fpv5-sp-d16
m33nofp  arm   mps2-an521  0x10000000  0x38000000  -mcpu=cortex-m33+nodsp+nofp -mfloat-abi=soft
m55      arm   mps3-an547  0x00000000  0x20000000  -mcpu=cortex-m55 -mfloat-abi=hard
rv32     rv32  virt        -           -           -march=rv32imac -mabi=ilp32
avr      avr   atmega2560  -           -           -mmcu=atmega2560
TABLE
}

# Where ordinary programs run: name, compiler | what runs them.
hosts() {
    cat <<'TABLE'
clang    clang                                 |
i386     gcc-12 -m32                           | qemu-i386
aarch64  aarch64-linux-gnu-gcc -static         | qemu-aarch64
armv7    arm-linux-gnueabihf-gcc -static       | qemu-arm
riscv64  riscv64-linux-gnu-gcc -static         | qemu-riscv64
s390x    s390x-linux-gnu-gcc -static           | qemu-s390x
wasm     clang --target=wasm32-wasi            | node --no-warnings tests/port/wasi.mjs
TABLE
}

# The models, and test programs that say as "hash ..." what they computed.
things='int8 int4 float'
for thing in integers int_routers int_sequences; do [ -z "$(setup_source $thing)" ] || things="$things $thing"; done

is_model() {
    case $1 in
    int8 | int4 | float) ;;
    *) return 1 ;;
    esac
}

# What is promised, whatever was written: device, model, less than so many bytes of weights, of
# code, of RAM and of stack, at most so many instructions and cycles per multiply-accumulate, all of
# an inference counted (-: not promised).
promises() {
    cat <<'TABLE'
m4  int8   24576  6144  2048  512  1.5  2.6
m7  int8   24576  6144  2048  512  1.5  -
m0  int8   24576  6144  2048  512  7    -
m4  float  49152  6144  2048  512  4.5  10
m7  float  49152  6144  2048  512  4.5  -
TABLE
}

# ---- the checks: a line is a function and its arguments ----

plan() {
    for thing in $things; do echo "reference $thing"; done
    for device in $(devices | awk '{ print $1 }'); do
        for model in int8 int4; do echo "figures $device $model"; done
    done
    echo 'figures m4 float'
    echo 'figures m7 float'
    echo 'costs m4'
    echo 'estimated'
    echo 'whole m4 int8'
    for device in m0 m4; do
        for level in -O0 -O2 -O3; do echo "same $device int8 $level"; done
    done
    for device in m4 m55; do echo "same $device int4 -O0"; done
    echo 'same m55 int8 -O0'
    for device in m0 m3 m4; do
        for model in int8 int4; do echo "traps $device $model"; done
    done
    for device in m3 m4 m55; do
        for model in int8 int4; do echo "aligned $device $model"; done
    done
    echo 'by_clang m4 int8'
    echo 'by_clang m0 int8'
    echo 'by_cpp m4 int8'
    for check in by_clang by_cpp traps aligned; do echo "$check m4 float"; done
    echo "windows $things"
    for host in $(hosts | awk '{ print $1 }'); do
        for thing in $things; do echo "hosted $host $thing"; done
    done
    for device in $(devices | awk '{ print $1 }'); do
        for thing in $things; do
            case $device.$thing in
            *.int[48] | *.float) ;;
            # Constants that a program makes when it runs cannot lie in AVR's program memory.
            avr.*) printf '%s\n' "program $device $thing -DMOE_NO_PROGMEM" "passing $device $thing" ;;
            *) echo "program $device $thing" ;;
            esac
        done
    done
    for device in m3 rv32 avr; do
        echo "control $device wrong"
        echo "control $device hang"
    done
    echo 'control m0 fault'
    echo 'control m3 fault'
    echo 'control rv32 fault'
    echo 'controls_of_lines'
    echo 'controls_of_figures'
    echo 'published'
}

prepare() {
    mkdir -p "$prepared/figures" "$prepared/gnu"
    : >"$prepared/gnu/stubs-ilp32.h" # all that glibc's headers lack for 32-bit RISC-V
    (
        $CC -std=c99 -O0 -DMOE_NO_SIMD -I"$root" -I"$root/examples" tests/port/devices/export.c -o "$prepared/export" \
            -lm &&
            "$prepared/export" examples/data/digits.csv "$prepared" >"$prepared/estimates" &&
            for thing in $things; do
                $CC -std=c99 -O2 $(sources "$thing") -o "$prepared/$thing" -lm || exit 1
                "$prepared/$thing" >"$prepared/$thing.lines" || echo "exit status $?" >>"$prepared/$thing.lines"
            done
    ) >"$prepared/log" 2>&1 || {
        head -n 20 "$prepared/log"
        return 1
    }
    # What cannot be made is found to be missing where it is wanted.
    $CC -O2 -shared -fPIC tests/port/devices/count.c -o "$prepared/count.so" >"$prepared/log" 2>&1
    $CC -O2 tests/port/devices/avr.c -o "$prepared/avr" -lsimavr -l:libelf.so.1 >"$prepared/log" 2>&1
    return 0
}

# An ordinary program's sources and their options.
sources() { # thing
    if [ "$1" = float ]; then
        # a second instead of ten, and the model uses plain C
        echo "-O0 -DMOE_NO_SIMD $(model_options float) $root/tests/port/device.c $root/tests/port/devices/model.c"
    elif is_model "$1"; then
        echo "$(model_options "$1") $root/tests/port/device.c $root/tests/port/devices/model.c"
    else
        echo "$program_options $root/tests/unit/$1.c"
    fi
}

program_options="-DMOE_TEST_SMALL -DMOE_NO_FLOAT -I$root"

model_options() { # model
    case $1 in
    float) float=1 ;;
    *) float=0 ;;
    esac
    echo "-DDEVICE_MODEL=\"model_$1.h\" -DDEVICE_FLOAT=$float" \
        "-I$root -I$root/tests/port -I$root/tests/port/devices -I$prepared"
}

# ---- firmware: compiling ----

# Sets what a row says, and $cross and $options to how its firmware is compiled and linked.
device() { # name
    # shellcheck disable=SC2046
    set -- $(devices | awk -v name="$1" '$1 == name')
    kind=$2 machine=$3 flash=$4 ram=$5 cycles=
    [ "$1" != m4 ] || cycles=",cycles=$root/tests/port/devices/cortex_m4.txt"
    shift 5
    options="$* -ffunction-sections -fdata-sections"
    linking=-Wl,--gc-sections
    case $kind in
    arm)
        cross=arm-none-eabi-
        needs qemu-system-arm
        needs "${cross}gcc"
        needs_file picolibc-arm-none-eabi "$(${cross}gcc -print-file-name=picolibc.specs)"
        options="--specs=picolibc.specs -mthumb $options"
        linking="$linking --crt0=minimal $(memory)"
        ;;
    rv32)
        cross=riscv64-linux-gnu-
        needs qemu-system-riscv32
        needs "${cross}gcc"
        options="$options -ffreestanding -fno-pic -I$prepared"
        linking="$linking -nostdlib -static -Wl,--no-warn-rwx-segments -Wl,--build-id=none"
        linking="$linking -T $root/tests/port/devices/rv32.ld rv32.o"
        run "${cross}gcc" $options -Os -std=c99 -Wall -Wextra -Werror -c "$root/tests/port/devices/rv32.c" -o rv32.o ||
            exit 1
        ;;
    avr)
        cross=avr-
        needs "${cross}gcc"
        needs_file libsimavr-dev "$prepared/avr"
        ;;
    esac
}

memory() {
    echo "-Wl,-z,noexecstack -Wl,--defsym=__flash=$flash -Wl,--defsym=__flash_size=0x40000" \
        "-Wl,--defsym=__ram=$ram -Wl,--defsym=__ram_size=$([ "$machine" = microbit ] && echo 0x4000 || echo 0x10000)"
}

needs_file() { # package file
    [ -e "$2" ] || needs "$1"
}

# Makes firmware.elf with the options given for the model's unit.
firmware() { # model options...
    model=$1
    shift
    object_of_device "$model" && object_of_model "$model" "$@" && link_firmware firmware.elf model.o
}

object_of_device() { # model
    run "${cross}gcc" $options -Os -std=c99 -Wall -Wextra -Werror $(model_options "$1") -c \
        "$root/tests/port/device.c" -o device.o
}

object_of_model() { # model options...
    object_model=$1
    shift
    run "${cross}gcc" $options "$@" $(model_options "$object_model") -c "$root/tests/port/devices/model.c" -o model.o
}

link_firmware() { # output objects...
    linked=$1
    shift
    run "${cross}gcc" $options $linking device.o "$@" -o "$linked" -lm
}

# ---- firmware: running ----

# Runs firmware.elf: its lines in lines, what the counter says in counted.
run_firmware() { # [processor seconds]
    case $kind in
    arm) set -- "${1:-20}" qemu-system-arm -M "$machine" ;;
    rv32) set -- "${1:-20}" qemu-system-riscv32 -M "$machine" -bios none ;;
    avr) set -- "${1:-20}" "$prepared/avr" firmware.elf "$(address device_begin)" "$(address device_end)" ;;
    esac
    [ "$kind" = avr ] || set -- "$@" -nographic -monitor none -serial none -chardev stdio,id=lines -semihosting-config \
        enable=on,target=native,chardev=lines -d plugin \
        -plugin "$prepared/count.so,from=$(address device_begin),to=$(address device_end)$cycles" \
        -kernel firmware.elf
    setup_limit "$@" >lines 2>counted
    status=$?
    [ "$status" -eq 0 ] && return 0
    [ "$status" -ne 152 ] || echo "it did not end in $1 seconds of a processor"
    echo "exit status $status: firmware.elf"
    tail -n 3 lines counted
    return 1
}

address() { # function in firmware.elf
    "${cross}nm" firmware.elf | awk -v name="$1" '$3 == name { print "0x" $1 }'
}

# ---- what it answered ----

# The lines are those of this machine.
same_lines() { # thing lines
    if is_model "$1"; then same_answers "$@"; else same_hashes "$@"; fi
}

# A test program has failed nothing and computed the same.
same_hashes() { # program lines
    passed_all "$2" || return 1
    grep 'hash ' "$prepared/$1.lines" >expected
    tr -d '\r' <"$2" | grep 'hash ' >found
    run test -s expected && run diff expected found
}

# All but the bytes of stack.
same_answers() { # model lines
    if [ "$(tail -n 1 "$2" | tr -d '\r')" != end ]; then
        echo 'the last line is not "end"'
        tail -n 2 "$2"
        return 1
    fi
    grep -v '^stack ' "$prepared/$1.lines" >expected
    tr -d '\r' <"$2" | grep -v '^stack ' >found
    if [ "$1" = float ]; then
        near_lines expected found
    else
        run diff expected found
    fi
}

# Floats may differ by 1e-4 of the largest of their line, weights of experts by 4 of 32767; all else
# is the same.
near_lines() { # expected found
    paste -d '#' "$1" "$2" | awk '
        function hex(text,   i, value) {
            value = 0
            for (i = 1; i <= length(text); i++) value = 16 * value + index("0123456789abcdef", substr(text, i, 1)) - 1
            return value
        }
        function real(text,   bits, sign, exponent) {
            bits = hex(text)
            sign = bits >= 2147483648 ? -1 : 1
            if (sign < 0) bits -= 2147483648
            exponent = int(bits / 8388608)
            if (exponent == 255) return "nan"
            return exponent == 0 ? sign * bits * 2 ^ -149 : sign * (bits % 8388608 + 8388608) * 2 ^ (exponent - 150)
        }
        function abs(x) { return x < 0 ? -x : x }
        function wrong(why) { print why ": " $0; failed = 1 }
        {
            if (split($0, both, "#") != 2) { wrong("not two lines"); next }
            n = split(both[1], a, " ")
            if (split(both[2], b, " ") != n) { wrong("another number of words"); next }
            largest = 0
            for (i = 1; i <= n; i++)
                if (length(a[i]) == 8 && a[1] == "digit" && abs(real(a[i])) > largest) largest = abs(real(a[i]))
            for (i = 1; i <= n; i++) {
                if (a[i] == b[i]) continue
                if (a[1] == "digit" && length(a[i]) == 8 && length(b[i]) == 8 && real(b[i]) != "nan" &&
                    abs(real(a[i]) - real(b[i])) <= 1e-4 * largest) continue
                if (split(a[i], expert, ":") == 2 && split(b[i], other, ":") == 2 && expert[1] == other[1] &&
                    abs(hex(expert[2]) - hex(other[2])) <= 4) continue
                wrong(a[i] " is not " b[i])
            }
        }
        END { exit failed }'
}

# ---- what it takes ----

# Bytes of flash and of RAM, from a firmware's sections.
flash_and_ram() { # file
    "${cross}size" "$1" | awk 'NR == 2 { print $1 + $2, $2 + $3 }'
}

# Bytes of the exported arrays of constants.
weights() {
    "${cross}nm" -S -t d firmware.elf |
        awk '$4 ~ /^digits_(weights|experts|net_[0-9].*)$/ { sum += $2 } END { print sum + 0 }'
}

# The line of figures of firmware.elf after its run: what it has more than a firmware without a
# model.
measure() { # device model
    run "${cross}gcc" $options -Os -DDEVICE_NO_MODEL $(model_options "$2") -c "$root/tests/port/devices/model.c" \
        -o none.o && link_firmware none.elf none.o || return 1
    # shellcheck disable=SC2046
    set -- "$1" "$2" $(flash_and_ram firmware.elf) $(flash_and_ram none.elf) "$(weights)" "$(sed \
        -n 's/^stack //p' lines | tr -d '\r')" \
        "$(sed -n 's/^products //p' lines | tr -d '\r')" $(sed -n 's/^count //p' counted)
    echo "$@" | awk '
        NF < 15 || $11 != 50 || $9 == 0 { print "no figures: " $0; exit 1 }
        { printf "%s %s %d %d %d %d %d %.0f %d %.2f %s %s\n", $1, $2, $3 - $5, $7, $3 - $5 - $7, $4 - $6,
            $8, $13 / $11, $15, $13 / $11 / $9, (NF > 16 ? int($17 / $11) : "-"),
            (NF > 16 ? sprintf("%.2f", $17 / $11 / $9) : "-") }'
}

# A line of figures is the one that was written. Another compiler makes other code.
as_written() { # figures written
    version=$(compiler_version)
    if ! grep -qx "# $version" "$2"; then
        echo "note: there are no figures of $version; sh tests/port/devices.sh --write"
        [ "${REQUIRE_TOOLS:-0}" != 1 ]
        return
    fi
    grep -qx "$(cat "$1")" "$2" && return
    echo 'measured, and written:'
    cat "$1"
    grep "^$(cut -d ' ' -f 1,2 "$1") " "$2"
    return 1
}

as_promised() { # figures
    promises | awk '
        BEGIN { split("weights code RAM stack instructions-per-product cycles-per-product", name, " ") }
        FNR == NR { device = $1; model = $2; split($4 " " $5 " " $6 " " $7 " " $10 " " $12, value, " "); next }
        $1 == device && $2 == model {
            for (i = 1; i <= 6; i++)
                if ($(i + 2) != "-" && (i < 5 ? value[i] >= $(i + 2) : value[i] > $(i + 2))) {
                    print name[i] " " value[i] ": the promise is " $(i + 2)
                    failed = 1
                }
        }
        END { exit failed }' "$1" -
}

compiler_version() { echo "${cross}gcc $("${cross}gcc" -dumpversion)"; }

# What a firmware that calls moe_infer does not need.
forbidden='malloc|calloc|realloc|free|_?sbrk(_r)?|_?v?[fs]?n?i?printf(_r)?|_?f?puts(_r)?|putchar|fopen|fwrite|fread'

# ---- check functions: 0 passed, 77 skipped, else failed ----

# What they print is shown when they fail.

# This machine's own answers are worth comparing with.
reference() { # thing
    is_model "$1" || {
        same_hashes "$1" "$prepared/$1.lines"
        return
    }
    same_answers "$1" "$prepared/$1.lines" && awk '
        $1 == "digit" { n++; right += $4 == $6; for (i = 19; i <= NF; i++) used[substr($i, 1, 1)]++ }
        END {
            for (e in used) experts++
            print "digits " n ", right " right ", experts " experts
            exit !(n == 50 && right >= DEVICE_RIGHT && experts >= 4)
        }' DEVICE_RIGHT="${DEVICE_RIGHT:-45}" "$prepared/$1.lines"
}

figures() { # device model
    device "$1"
    firmware "$2" -Os $(strict_of_model) && run_firmware && same_lines "$2" lines || return 1
    empty 'not for firmware:' "$("${cross}nm" firmware.elf | grep -wE "$forbidden")" || return 1
    empty 'double arithmetic:' "$("${cross}nm" firmware.elf | grep -wE '__aeabi_(d|f2d|i2d|ui2d).*')" || return 1
    measure "$1" "$2" >figures || {
        cat figures
        return 1
    }
    cp figures "$prepared/figures/$1.$2"
    compiler_version >"$prepared/version.$kind"
    as_promised figures && { [ "$writing" = 1 ] || as_written figures "$root/tests/port/devices/figures.txt"; }
}

strict_of_model() {
    case $kind in
    avr) echo '-std=c99 -pedantic -Wall -Wextra -Werror' ;;
    *) strict_flags "${cross}gcc" ;;
    esac
}

# The same answers under other options of the compiler.
same() { # device model options...
    device "$1"
    shift
    firmware "$@" -std=c99 && run_firmware && same_lines "$1" lines
}

# The instructions of every operation (moei_costs in moe_export.h) are those that were written.
costs() { # device
    device "$1"
    needs python3
    linking=$(echo "$linking" | sed 's/--crt0=minimal/--crt0=semihost --oslib=semihost/')
    cycles=,each=on
    run "${cross}gcc" $options $linking -Os -std=c99 -I"$root" "$root/tests/port/devices/costs.c" -o firmware.elf -lm &&
        run_firmware 60 || return 1
    if [ "$writing" = 1 ]; then
        run python3 "$root/tests/port/devices/costs.py" lines counted "$root/examples/extras/moe_export.h"
        return
    fi
    grep -qx "# $(compiler_version)" "$root/tests/port/devices/figures.txt" || return 0 # other code
    python3 "$root/tests/port/devices/costs.py" lines counted >rows &&
        awk '/^    \/\* end \*\/$/ { inside = 0 } inside { print } /^    \/\* costs \*\/$/ { inside = 1 }' \
            "$root/examples/extras/moe_export.h" >written && run diff rows written
}

# What a profile says of the digits models is within 10 % of the emulator's longest run.
estimated() {
    sed -n 's/^estimate model_\(.*\)\.h/\1/p' "$prepared/estimates" | awk '
        FNR == NR { if ($1 == "m4") most[$2] = $9; next }
        {
            print $1 ": estimated " $2 ", counted " most[$1]
            if (most[$1] == "" || $2 > 1.1 * most[$1] || $2 < 0.9 * most[$1]) failed = 1
            n++
        }
        END { exit failed || n != 3 }' "$root/tests/port/devices/figures.txt" -
}

# With all that an inference build has, of which the linker leaves out what is not called.
whole() { # device model
    device "$1"
    firmware "$2" -Os -std=c99 -DDEVICE_WHOLE && run_firmware && same_lines "$2" lines && measure "$1" "$2" >figures ||
        {
        cat figures
        return 1
    }
    [ "$writing" = 1 ] || as_written figures "$root/tests/port/devices/figures.txt"
}

# Undefined behavior is a fault.
traps() { same "$1" "$2" -O1 -fsanitize=undefined -fsanitize-undefined-trap-on-error; }

# An access to memory that is not aligned is a fault, as it always is on Cortex-M0.
aligned() { # device model
    device "$1"
    options="$options -DDEVICE_ALIGNED -mno-unaligned-access"
    firmware "$2" -Os -std=c99 && run_firmware && same_lines "$2" lines
}

by_clang() { # device model
    device "$1"
    needs clang
    object_of_device "$2" || return 1
    # shellcheck disable=SC2046
    set -- "$2" $(devices | awk -v name="$1" '$1 == name { for (i = 6; i <= NF; i++) print $i }')
    model=$1
    shift
    run clang --target=arm-none-eabi -mthumb "$@" -ffunction-sections -fdata-sections -Os \
        -fshort-enums $(strict_flags clang) $(model_options "$model") \
        -isystem "$(include_folder)" -c "$root/tests/port/devices/model.c" -o model.o &&
        link_firmware firmware.elf model.o && run_firmware && same_lines "$model" lines
}

# Where the C library's headers are: the first folder that gcc looks into.
include_folder() {
    "${cross}gcc" $options -E -v -x c /dev/null 2>&1 | awk 'found { print $1; exit } /^#include <...>/ { found = 1 }'
}

by_cpp() { # device model
    device "$1"
    needs "${cross}g++"
    object_of_device "$2" &&
        run "${cross}g++" $options -Os -std=c++11 -fno-exceptions -fno-rtti -Wall -Wextra -Werror $(model_options \
        "$2") -x c++ \
            -c "$root/tests/port/devices/model.c" -o model.o && link_firmware firmware.elf model.o && run_firmware &&
            same_lines "$2" lines
}

# An ordinary program on another processor.
hosted() { # host thing
    thing=$2
    row=$(hosts | awk -v name="$1" '$1 == name { $1 = ""; print }')
    runner=${row#*|}
    # shellcheck disable=SC2086
    set -- ${row%%|*}
    needs_to_link "$@"
    # shellcheck disable=SC2086
    [ -z "$runner" ] || needs ${runner%% -*}
    run "$@" -std=c99 -O2 $(sources "$thing") -o program.exe -lm && run_program "$thing" "$runner"
}

run_program() { # thing runner
    here=$PWD
    # shellcheck disable=SC2086
    (cd "$root" && setup_limit 60 $2 "$here/program.exe") >lines || {
        echo "exit status $?: $2 program"
        return 1
    }
    same_lines "$1" lines
}

windows() { # things...
    needs_to_link x86_64-w64-mingw32-gcc
    find_wine
    failures=0
    for thing in "$@"; do
        run x86_64-w64-mingw32-gcc -std=c99 -O2 $(sources "$thing") -o program.exe -lm &&
            run_program "$thing" "$wine" || failures=$((failures + 1))
    done
    end_wine
    [ "$failures" -eq 0 ]
}

# A test program on a device computes the same.
program() { # device program options...
    run_test "$@" && same_lines "$2" lines
}

# All that it tests there is as it should be.
passing() { # device program options...
    run_test "$@" && passed_all lines
}

# Makes and runs a test program. Under picolibc its standard output goes the same way as the
# firmware's.
run_test() { # device program options...
    device "$1"
    program=$2
    shift 2
    case $kind in
    rv32) set -- "$@" -std=c99 "$root/tests/unit/$program.c" ;;
    avr) set -- "$@" -std=gnu99 "-DPROGRAM=\"$program.c\"" -I"$root/tests/unit" "$root/tests/port/devices/avr_main.c" ;;
    arm)
        linking=$(echo "$linking" | sed 's/--crt0=minimal/--crt0=semihost --oslib=semihost/')
        set -- "$@" -std=c99 "$root/tests/unit/$program.c"
        ;;
    esac
    run "${cross}gcc" $options $linking -Os $program_options "$@" -o firmware.elf && run_firmware 60
}

# ---- controls: what must fail does ----

# A firmware without a model answers nonsense, never ends, or does what the processor has no
# instruction for.
control() { # device wrong|hang|fault
    device "$1"
    object_of_device int8 && object_of_model int8 -Os -DDEVICE_NO_MODEL "-DDEVICE_$2" &&
        link_firmware firmware.elf model.o || return 1
    if run_firmware 2 >said && same_lines int8 lines >said; then
        echo "passed: $2"
        return 1
    fi
    case $2 in
    hang) run grep 'did not end' said ;;
    fault) run grep -x fault lines ;;
    wrong) run grep '^> digit 00' said ;;
    esac
}

must_fail() { # command...
    "$@" >said 2>&1 || return 0
    echo "passed: $*"
    return 1
}

controls_of_lines() {
    for model in int8 float; do
        cp "$prepared/$model.lines" lines
        run same_lines "$model" lines || return 1
        sed 7d lines >changed && must_fail same_lines "$model" changed || return 1
        sed '$d' lines >changed && must_fail same_lines "$model" changed || return 1
        sed '7{p;}' lines >changed && must_fail same_lines "$model" changed || return 1
        sed '7s/ experts ./ experts x/' lines >changed && must_fail same_lines "$model" changed || return 1
        awk 'NR == 9 { $8 = substr($8, 1, 1) == "3" ? "7" substr($8, 2) : "3" substr($8, 2) } { print }' lines \
            >changed && must_fail same_lines "$model" changed || return 1
        : >changed
        must_fail same_lines "$model" changed || return 1
    done
}

controls_of_figures() {
    cross=
    echo 'x int8 1000 800 200 100 100 900 1000 1.5 - -' >figures
    { echo "# $(compiler_version)" && cat figures; } >written
    run as_written figures written || return 1
    sed 's/int8/int4/' written >other && must_fail as_written figures other || return 1
    echo 'm4 int8 30000 24575 6143 2047 511 900 1000 1.50 9000 2.60' >kept && run as_promised kept || return 1
    for place in 4 5 6 7 10 12; do
        awk -v place=$place '{ $place = $place * 1.006; print }' kept >broken && must_fail as_promised broken ||
            return 1
    done
    for place in 3 6 7 9; do
        awk -v place=$place '{ $place++; print }' figures >more && must_fail as_written more written || return 1
    done
    published_table written >table
    for place in 3 5 6 7 8 10; do
        awk -v place=$place '{ $place++; print }' figures >more && published_table more >other &&
            must_fail cmp table other || return 1
    done
}

# The table of examples/mcu/README.md is that of the figures.
published() {
    awk '/^<!-- devices -->$/ { inside = 1; next } /^<!-- end -->$/ { inside = 0 } inside && NF' \
        "$root/examples/mcu/README.md" >found
    published_table "$root/tests/port/devices/figures.txt" >expected
    run diff expected found
}

published_table() { # figures
    awk '
        BEGIN {
            split("m0 m3 m4 m7 m33 m33nofp m55 rv32 avr", device, " ")
            split("Cortex-M0,Cortex-M3,Cortex-M4,Cortex-M7,Cortex-M33,Cortex-M33 without DSP and FPU," \
                "Cortex-M55 (Helium),RISC-V rv32imac,AVR ATmega2560", text, ",")
            for (i in device) name[device[i]] = text[i]
            print "| processor | weights | flash | of it code | RAM | stack | instructions | per multiplication" \
                " | cycles | per multiplication |"
            print "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
        }
        function thousands(n,   text) {
            if (n == "-") return ""
            for (text = ""; n >= 1000; n = int(n / 1000)) text = sprintf(",%03d", n % 1000) text
            return n text
        }
        !/^#/ {
            printf "| %s | %s | %s | %s | %s | %s | %s | %s | %s | %s |\n", name[$1], $2, thousands($3),
                thousands($5), thousands($6), thousands($7), thousands($8), $10, thousands($11),
                $12 == "-" ? "" : $12
        }' "$1"
}

# ---- after the checks ----

all_figures() {
    devices | while read -r name _; do
        for model in int8 int4 float; do
            [ ! -f "$prepared/figures/$name.$model" ] || cat "$prepared/figures/$name.$model"
        done
    done
}

closing() {
    all_figures | awk '
        BEGIN { format = "| %-8s %-6s %8s %8s %6s %6s %6s %13s %13s %12s %9s %12s\n" }
        NR == 1 {
            printf format, "device", "model", "flash", "weights", "code", "RAM", "stack", "instructions", "most",
                "per product", "cycles", "per product"
        }
        { printf format, $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12 }'
}

write_figures() {
    {
        echo '# What the digits models take, written by sh tests/port/devices.sh --write: device, model; bytes of'
        echo '# flash (weights, library and glue), of weights, of the rest of flash, of RAM and of stack;'
        echo '# instructions of an inference, mean and most of 50, mean per multiplication; cycles, and per'
        echo '# multiplication (m4: by cortex_m4.txt; avr: by simavr). Compilers:'
        sed 's/^/# /' "$prepared"/version.*
        all_figures
    } >tests/port/devices/figures.txt
    published_table tests/port/devices/figures.txt >"$prepared/table"
    setup_write_between devices "$prepared/table" examples/mcu/README.md
    echo 'tests/port/devices/figures.txt and the table of examples/mcu/README.md are written'
}

writing=0
case ${1:-} in
--write)
    writing=1
    REQUIRE_TOOLS=1
    set -- figures
    ;;
--write-costs)
    writing=1
    REQUIRE_TOOLS=1
    set -- costs
    ;;
esac
run_checks "$@"
status=$?
[ "$writing" = 0 ] || [ "$status" -ne 0 ] || [ "$1" = costs ] || write_figures
exit "$status"
