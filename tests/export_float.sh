#!/bin/sh
# Tests nets that are printed as constants (tests/export_float.c): prints them once, then compiles them in several ways and compares every member and
# every bit of the results with the nets that they came from. sh tests/export_float.sh [-v] [WORD], as tests/headers.sh.

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

plan() {
    echo 'strict gcc -O2'
    echo 'inference gcc -Os'
    echo 'inference gcc -O0'
    echo 'inference g++ -O1'
    echo 'inference clang -O2'
    echo 'tiny tcc'
    echo 'without_libm gcc'
    echo 'constant gcc'
    echo 'constant g++'
    echo 'cortex_m4 arm-none-eabi-gcc'
}

# All nets, and those of the first rows alone for machines with little memory.
prepare() {
    setup_stb_flag "$CC"
    "$CC" -std=c99 -O1 -DMOE_NO_SIMD -I. ${stb_flag:+-I"$stb_flag"} tests/export_float.c -o "$prepared/print" -lm &&
        "$prepared/print" >"$prepared/nets.h" 2>"$prepared/log" && "$prepared/print" few >"$prepared/few.h" 2>>"$prepared/log" && return 0
    cat "$prepared/log"
    return 1
}

counted() { # program...
    "$@" >out 2>err && grep -q '^[1-9][0-9]* passed, 0 failed$' out && return 0
    cat out err
    return 1
}

build() { # compiler flags...
    built=$1
    shift
    in_language "$built" "$root" -ffp-contract=off -DMOE_NO_SIMD "-DNETS=\"$prepared/nets.h\"" "$@" "$root/tests/export_float.c" -o a -lm
}

strict() { # compiler optimisation
    needs "$1"
    setup_stb_flag "$1"
    build "$1" "$2" ${stb_flag:+-I"$stb_flag"} && counted ./a
}

inference() { # compiler optimisation
    needs "$1"
    build "$1" "$2" -DMOE_NO_TRAIN -DMOE_MALLOC && counted ./a
}

tiny() { # compiler
    needs "$1"
    run "$1" -std=c99 -Wall -Werror -DMOE_NO_TRAIN -DMOE_MALLOC "-DNETS=\"$prepared/nets.h\"" -I"$root" "$root/tests/export_float.c" -o a -lm && counted ./a
}

without_libm() { # compiler
    needs "$1"
    build "$1" -O1 -DMOE_NO_TRAIN -DMOE_MALLOC -DMOE_NO_LIBM && counted ./a
}

# No initialisation before main, nothing in memory that can be written.
constant() { # compiler
    needs "$1"
    needs nm
    { echo '#include "moe.h"' && cat "$prepared/few.h" && echo 'extern const moe_model *const *all; const moe_model *const *all = printed;'; } >a.c
    in_language "$1" "$root" -fno-pie -c a.c -o a.o || return 1
    empty 'not constant:' "$(nm a.o | grep -i ' [bcdgs] ' | grep -v ' all$')"
}

cortex_m4() { # compiler
    needs "$1"
    needs qemu-system-arm
    run "$1" --specs=picolibc.specs --crt0=semihost --oslib=semihost -mthumb -mcpu=cortex-m4 -mfloat-abi=hard -mfpu=fpv4-sp-d16 -O1 -std=c99 \
        -ffunction-sections -fdata-sections -Wl,--gc-sections -Wl,-z,noexecstack -Wl,--defsym=__flash=0 -Wl,--defsym=__flash_size=0x400000 \
        -Wl,--defsym=__ram=0x20000000 -Wl,--defsym=__ram_size=0x400000 -DMOE_NO_TRAIN -DMOE_MALLOC -DFEW "-DNETS=\"$prepared/few.h\"" -I"$root" \
        "$root/tests/export_float.c" -o a.elf -lm || return 1
    timeout 120 qemu-system-arm -M mps2-an386 -nographic -monitor none -serial none -chardev stdio,id=c0 \
        -semihosting-config enable=on,target=native,chardev=c0 -kernel a.elf >out 2>err
    grep -q '^[1-9][0-9]* passed, 0 failed' out && return 0
    cat out err
    return 1
}

run_checks "$@"
