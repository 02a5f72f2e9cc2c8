#!/bin/sh
# Tests nets that are printed as constants (tests/port/export_float.c): prints them once, then
# compiles them in several ways and compares every member and every bit of the results with the nets
# that they came from. sh tests/port/export_float.sh [-v] [WORD], as tests/port/headers.sh.

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

plan() {
    echo 'strict gcc -O1'
    echo 'inference gcc -Os'
    echo 'inference gcc -O0'
    echo 'inference g++ -O1'
    echo 'inference clang -O1'
    echo 'tiny tcc'
    echo 'without_libm gcc'
    for net in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 30 40 50 60 70 80; do echo "pruned $net tcc"; done
    echo 'constant gcc'
    echo 'constant g++'
    echo 'cortex_m4 arm-none-eabi-gcc'
}

# With static functions a compiler drops what is not used before it optimizes; strict compiles all.
used=-DMOE_STATIC

# All nets, and those of the first rows alone for machines with little memory.
prepare() {
    setup_stb_flag "$CC"
    # CC may hold several words.
    # shellcheck disable=SC2086
    $CC -std=c99 -O1 -DMOE_NO_SIMD $used -I. ${stb_flag:+-I"$stb_flag"} tests/port/export_float.c \
        -o "$prepared/print" -lm &&
        "$prepared/print" >"$prepared/nets.h" 2>"$prepared/log" &&
        "$prepared/print" quick >"$prepared/quick.h" 2>>"$prepared/log" && return 0
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
    in_language "$built" "$root" -ffp-contract=off -DMOE_NO_SIMD "-DNETS=\"$prepared/nets.h\"" "$@" \
        "$root/tests/port/export_float.c" -o a -lm
}

strict() { # compiler optimization
    needs "$1"
    setup_stb_flag "$1"
    build "$1" "$2" ${stb_flag:+-I"$stb_flag"} && counted ./a
}

inference() { # compiler optimization
    needs "$1"
    build "$1" "$2" $used -DMOE_NO_TRAIN -DMOE_MALLOC && counted ./a
}

tiny() { # compiler
    needs "$1"
    run "$1" -std=c99 -Wall -Werror -DMOE_NO_TRAIN -DMOE_MALLOC "-DNETS=\"$prepared/nets.h\"" -I"$root" \
        "$root/tests/port/export_float.c" -o a -lm && counted ./a
}

without_libm() { # compiler
    needs "$1"
    build "$1" -O1 $used -DMOE_NO_TRAIN -DMOE_MALLOC -DMOE_NO_LIBM && counted ./a
}

# A header that compiles the implementation keeps what its model needs, and gives the bits of a
# whole build; another model is refused, not crashed into.
pruned() { # net compiler
    needs "$2"
    "$prepared/print" one "$1" >one.h 2>log || { cat log; return 1; }
    [ -s one.h ] || return 0 # a preset that is no model
    cat >a.c <<SOURCE
#define MOE_IMPLEMENTATION
#define MOE_NO_TRAIN
#include "one.h"
#include <stdio.h>
static union { float x[300]; int32_t id; } input;
static float output[300];
static unsigned char scratch[NET_$1_SCRATCH];
int main(void) {
    int t, i;
    unsigned bits;
    moe_module other = net_$1_net_modules[0];
    moe_net wrong = net_$1_net;
    moe_model model = net_$1;
    for (t = 0; t < 5; t++) {
        moe_status status;
        for (i = 0; i < NET_$1_INPUTS; i++) input.x[i] = (float)((i * 7 + t * 5) % 11) * 0.25f - 1.0f;
        if (NET_$1_INPUTS == 0) input.id = t * 3;
        status = moe_infer(&net_$1, NULL, &input, output, scratch, sizeof scratch);
        printf("%d", status);
        for (i = 0; i < NET_$1_OUTPUTS; i++) memcpy(&bits, output + i, sizeof bits), printf(" %x", bits);
        printf("\n");
        if (status != MOE_OK) return 1;
    }
    other.kind = MOE_MODULE_ACTIVATION;
    other.act = MOE_ACT_GELU;
    wrong.modules = &other;
    wrong.n_modules = 1;
    model.net = &wrong;
    model.length = 0;
    fprintf(stderr, "%d\n", moe_infer(&model, NULL, &input, output, scratch, sizeof scratch));
    return 0;
}
SOURCE
    run "$2" -I"$root" a.c -o pruned -lm && run "$2" -DMOE_KEEP_ALL -I"$root" a.c -o whole -lm || return 1
    ./pruned >out1 2>err && ./whole >out2 2>/dev/null && cmp out1 out2 || { cat out1; return 1; }
    [ "$1" != 2 ] || grep -q '^-10$' err # this net has no gelu: MOE_ERR_UNSUPPORTED
}

# No initialization before main, nothing in memory that can be written.
constant() { # compiler
    needs "$1"
    needs nm
    { echo '#include "moe.h"' && cat "$prepared/quick.h" &&
        echo 'extern const moe_model *const *all; const moe_model *const *all = printed;'; } >a.c
    in_language "$1" "$root" -fno-pie -c a.c -o a.o || return 1
    empty 'not constant:' "$(nm a.o | grep -i ' [bcdgs] ' | grep -v ' all$')"
}

cortex_m4() { # compiler
    needs "$1"
    needs qemu-system-arm
    run "$1" --specs=picolibc.specs --crt0=semihost --oslib=semihost -mthumb -mcpu=cortex-m4 -mfloat-abi=hard \
        -mfpu=fpv4-sp-d16 -O1 -std=c99 \
        -ffunction-sections -fdata-sections -Wl,--gc-sections -Wl,-z,noexecstack -Wl,--defsym=__flash=0 \
        -Wl,--defsym=__flash_size=0x400000 \
        -Wl,--defsym=__ram=0x20000000 -Wl,--defsym=__ram_size=0x400000 $used -DMOE_NO_TRAIN -DMOE_MALLOC -DQUICK \
        "-DNETS=\"$prepared/quick.h\"" -I"$root" \
        "$root/tests/port/export_float.c" -o a.elf -lm || return 1
    setup_limit 120 qemu-system-arm -M mps2-an386 -nographic -monitor none -serial none -chardev stdio,id=c0 \
        -semihosting-config enable=on,target=native,chardev=c0 -kernel a.elf >out 2>err
    grep -q '^[1-9][0-9]* passed, 0 failed' out && return 0
    cat out err
    return 1
}

run_checks "$@"
