#!/bin/sh
# What tools say about the headers without running them, and what the thread and memory sanitizers
# see when programs run. sh tests/quality/static.sh [--all] [-v] [WORD]: only the checks that have
# WORD in their line; -v prints all lines; --all (or STATIC_ALL=1): the slow ones too. Tools: gcc,
# clang, clang-tidy, cppcheck, frama-c, nm; a missing one is a skip, with REQUIRE_TOOLS=1 a failure.
# Ends with "N passed, N failed, N skipped".

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

all=${STATIC_ALL:-0}
if [ "${1:-}" = --all ]; then
    all=1
    shift
fi

# ---- the checks: a line is a function and its arguments ----

headers='moe_kernels.h moe_routers.h moe.h'

plan() {
    for tool in gcc clang cppcheck tidy eva eva_infer eva_norm eva_layer eva_route thread memory; do
        echo "planted $tool"
    done
    echo exclusions
    echo 'no_state'
    echo 'no_state -DMOE_NO_FLOAT'
    echo bench_compiles
    echo 'gcc_analyzer moe_routers.h'
    echo 'gcc_analyzer moe_kernels.h'
    echo 'clang_analyzer moe_kernels.h'
    for header in $headers; do
        for options in '' -DMOE_REAL=double -DMOE_NO_FLOAT; do echo "tidy $header $options"; done
    done
    for platform in unix64 avr8; do echo "cppcheck_on $platform moe.h"; done # with the others, which it includes
    echo 'eva_reader 24'
    for op in rescale multiply curve apply_weight set_weight row; do echo "eva_infer $op 32767"; done
    echo 'eva_infer add 16383'
    echo 'eva_infer attention 32767 -DLENGTH=2'
    for op in int8 int16; do echo "eva_infer $op 32767 -DGROUP=2"; done
    echo 'eva_infer int4 32767 -DGROUP=4'
    echo 'eva_infer unit 32767 -DUNIT'
    echo 'eva_infer rotate 32767 -DHEADS=18'
    echo 'eva_infer norm 32767 -DNORM'
    echo 'eva_norm'
    echo 'eva_infer row 32767 -DTOKENS'
    echo 'eva_layer accumulate -DSHARED'
    echo 'eva_layer add_rest -DSHARED'
    for select in logits top_p 'top_k -DROOTS=2' 'hash -DTOKENS=1' 'grouped -DGROUPS' \
        'top_k -DWEIGHT=moei_int_weight_norm' 'logits -DWEIGHT=moei_int_weight_sparsemixer' \
        'logits -DEXPERTS=3 -DWEIGHT=moei_int_weight_over -DOVER=moei_int_weight_sum'; do
        echo "eva_layer mixture -DROUTER=moei_int_select_$select"
    done
    echo 'eva_layer int8_add -DGROUP=2 -DTAKEN=1'
    echo 'eva_layer int16_add -DGROUP=2 -DTAKEN=1 -DWIDEST=2'
    echo 'eva_layer int4_add -DGROUP=4 -DTAKEN=1'
    echo 'eva_layer cluster -DAFTER -DVALUES=moei_int_gate_relu'
    for op in norm_l1 'norm_l2 -DEXPERTS=2' norm_linf match; do echo "eva_layer $op -DSCORE -DTAKEN=1"; done
    echo 'eva_route -DTOKENS=2 -DEXPERTS=2 -DCHOICES=2'
    echo 'eva_route -DTOKENS=2 -DEXPERTS=2 -DCHOICES=2 -DCAPACITY=1'
    echo 'eva_route -DTOKENS=1 -DEXPERTS=2 -DCHOICES=2 -DWHOLE'
    for tokens in 1 2; do echo "eva_route -DTOKENS=$tokens -DEXPERTS=4 -DCHOICES=2 -DEXACTLY"; done
    echo 'thread_sanitizer threads gcc'
    echo 'thread_sanitizer parallel gcc'
    for program in golden layer; do echo "memory_sanitizer $program"; done
    [ "$all" = 1 ] || return 0
    echo 'gcc_analyzer moe.h'
    for platform in unix32 win64; do echo "cppcheck_on $platform moe.h"; done
    echo 'cppcheck_on unix64 moe.h -DMOE_REAL=double'
    echo 'cppcheck_on avr8 moe.h -DMOE_NO_FLOAT'
    for options in -DMOE_REAL=double -DMOE_NO_FLOAT -DMOE_NO_TRAIN; do
        for header in $headers; do
            echo "gcc_analyzer $header $options"
            echo "clang_analyzer $header $options"
        done
    done
    for header in moe_routers.h moe.h; do echo "clang_analyzer $header"; done
    echo 'eva_reader_sizes 0 32'
    for offset in in at; do echo "eva_infer curve 32767 -DVARY=$offset"; done
    for select in each threshold 'hash -DTOKENS=2' 'logits -DWEIGHT=moei_int_weight_over -DOVER=moei_int_weight_sum' \
        'logits -DEXPERTS=2 -DTAKEN=2 -DWEIGHT=moei_int_weight_over -DOVER=moei_int_weight_norm'; do
        echo "eva_layer mixture -DROUTER=moei_int_select_$select"
    done
    for size in '2 -DEXPERTS=3 -DCHOICES=2' '3 -DEXPERTS=2 -DCHOICES=2' '1 -DEXPERTS=4 -DCHOICES=3'; do
        echo "eva_route -DTOKENS=$size"
    done
    for size in '2 -DEXPERTS=4 -DCHOICES=1' '2 -DEXPERTS=4 -DCHOICES=3' '3 -DEXPERTS=4 -DCHOICES=1' \
        '3 -DEXPERTS=4 -DCHOICES=2'; do
        echo "eva_route -DTOKENS=$size -DEXACTLY"
    done
    echo 'eva_infer multiply 32767 -DVARY=other'
    echo 'eva_infer rescale 32767 -DVARY=out'
    echo 'thread_sanitizer threads clang'
    echo 'thread_sanitizer ranks gcc'
    echo 'thread_sanitizer net gcc'
    for program in files net training attention state metrics inference integers int_routers int_scores int_sequences \
        small; do echo "memory_sanitizer $program"; done
}

# ---- what is known to be no fault ----

# Findings that are not shown: tool | check | header | text of the line that it points to | why it
# is wrong there.
known() {
    setup_joined <<'KNOWN'
gcc|-Wanalyzer-null-dereference|moe_routers.h|if (field->kind == MOE_FIELD_REAL) {|
    moei_needs asks for names that are in the table: moe_field_find does not answer NULL
gcc|-Wanalyzer-use-of-uninitialized-value|moe_kernels.h|const unsigned u = (uint16_t)*x++ ^ 0x8000u;|
    its callers fill as many of x as the shape has
gcc|-Wanalyzer-use-of-uninitialized-value|moe_kernels.h|if (taken == k && key[i] <= key[index[k - 1]]) continue;|
    the first taken of index are filled, and taken is k
gcc|-Wanalyzer-use-of-uninitialized-value|moe_routers.h|value[g] = own[best[0]];|
    moei_int_top_k of at least one number fills best[0]
gcc|-Wanalyzer-use-of-uninitialized-value|moe_routers.h|if (found > 1) value[g] += own[best[1]];|
    it fills as many of best as it answers
gcc|uninitialized value '*m.batch_|moe_routers.h|m->batch_|moei_gather_call fills what moei_batch_call reads
gcc|uninitialized value '*s.m.clusters'|moe_routers.h|moe_real *m = s->m.clusters, rho = s->c->ac_rho;|
    moei_scratch_of sets all pointers of the scratch memory
clang|core.CallAndMessage|moe_routers.h|if (moei_needs_others(c->select) && !c->predictor)|
    it does not look into functions of variable arguments: moei_error returns the code that it is given, so c is
    set when the status is MOE_OK
cppcheck|arrayIndexThenCheck|moe_routers.h|if (p[e] < p[other] || (p[e] == p[other] && e > other)) break;|
    the index is below the count by the loop around it; the comparison breaks ties
cppcheck|arrayIndexThenCheck|moe.h|if (last >= 0 &&
    (weights[i] > weights[last] || (weights[i] == weights[last] && i <= last))) continue;|
    as above
cppcheck|uninitvar|moe_kernels.h|if (i < n && (s[i] == '-' || s[i] == '+')) negative = s[i++] == '-';|
    s is what moei_put_digits has written
cppcheck|uninitvar|moe_kernels.h|for (; at > 0 && key[i] > key[index[at - 1]]; at--) index[at] = index[at - 1];|
    index is filled below at
cppcheck|uninitvar|moe.h|struct moe_module_pass *p = modules != NULL ? &modules[i] : &uncounted;|
    the address is taken to write there
cppcheck|legacyUninitvar|moe.h|moe_real *part = d != NULL ? d + from : room;|the address is taken; memcpy fills it
cppcheck|uninitStructMember|moe.h|if (error != NULL && status == MOE_OK) *error = before;|
    before is set where error is not NULL
cppcheck|ctuuninitvar|moe.h|why->message[0] != '\0' ? why->message : moe_status_text(status));|
    its callers empty the message first
cppcheck|shiftTooManyBitsSigned|moe.h|if (bits < 0) return level >> (bits < -31 ? 31 : -bits);|
    the headers want >> of a negative number to be arithmetic, as it is everywhere they compile; 31 is meant
tidy|bugprone-macro-parentheses|moe_kernels.h|#define MOEI_STATUS_CODE(name, value, text) name = value,|
    makes lines of an enumeration
tidy|bugprone-macro-parentheses|moe_routers.h|#define MOEI_VALUE_BIT(value, bit, name) value = (bit),|
    makes lines of an enumeration
tidy|bugprone-macro-parentheses|moe_routers.h|#define MOEI_SUPPLIED_ANY(bit, value, member) (value) +|the terms of a sum
tidy|bugprone-macro-parentheses|moe_kernels.h|#define MOEI_ADD_TO(s, a, b) s += (a) * (b)|a statement
tidy|bugprone-macro-parentheses|moe_kernels.h|target static void moei_gated|an attribute of the function
eva|division by zero|moe.h|factor = (int16_t)(((uint32_t)h->op->factor2 << 15 >> less) / (total >> down));|
    the token with the largest score has the weight 32767 >> less, and `down` leaves 16 bits
eva|signed overflow|moe.h|y[q] = (int16_t)(y[q] + ((a * moei_flash_16(row + 2 * q) + 16384) >> 15));|
    a is at most 32767: the check refuses weights that may be negative, so none is above their sum
tidy|bugprone-narrowing-conversions|moe.h|y[i] = m > 0 ? moei_int_clamp(|the clamp is within int16
KNOWN
}

# Checks of clang-tidy that are off: check | why.
tidy_off() {
    setup_joined <<'OFF'
bugprone-easily-swappable-parameters|matrices have rows, columns and strides of one type; the order is that of BLAS
bugprone-implicit-widening-of-multiplication-result|
    the factors are constants, or numbers below 65536 of a checked configuration
bugprone-signed-char-misuse|int8_t holds levels here, which are numbers and no characters
cert-str34-c|the same check
cert-flp30-c|these loops count in integers too, or end by halving
OFF
}

# Finding by finding, "file:line:column: kind: text [check]": those that are not known. Fails if any
# is left.
judge() { # tool, what it printed
    known >known
    awk -v tool="$1" '
        FNR == NR { split($0, k, "|"); if (k[1] == tool) { check[++n] = k[2]; header[n] = k[3]; text[n] = k[4] } next }
        /^[^:]+:[0-9]+:[0-9]+: (fatal )?(warning|error|style|performance|portability): / {
            split($0, f, ":")
            for (line = at = ""; at < f[2] && (getline line < f[1]) > 0; at++) {}
            close(f[1])
            name = f[1]
            sub(/.*\//, "", name)
            for (i = 1; i <= n; i++) if (header[i] == name && index($0, check[i]) && index(line, text[i])) next
            print $0
            print "    " line
            left++
        }
        END { exit left > 0 }' known "$2"
}

# ---- check functions: 0 passed, 77 skipped, else failed ----

# No row of known has outlived its line.
exclusions() {
    known | while IFS='|' read -r tool check header text why; do
        [ -n "$why" ] || echo "no reason: $tool $check"
        grep -qF -- "$text" "$root/$header" || echo "$header: there is no line any more with: $text"
    done >stale
    tidy_off | grep -v '|.' >>stale
    empty 'rows:' "$(cat stale)"
}

# No variable that could change: what the object has is code and constants. Without
# position-independent code, tables of pointers are constants too.
no_state() { # options...
    needs gcc
    needs nm
    program moe.h >a.c
    run gcc -std=c99 -O0 -fno-pic -w "$@" -I"$root" -c a.c -o a.o || return 1
    [ "$(nm a.o | grep -c ' [tT] ')" -gt 100 ] || { echo 'nm sees no functions'; return 1; }
    empty 'variables:' "$(nm a.o | grep -i ' [bdcs] ')"
}

# What no test runs: the tables of times, with all libraries that stand beside.
bench_compiles() {
    needs gcc
    for header in cblas.h dnnl.h libxsmm.h; do
        echo "#include <$header>" | gcc -fsyntax-only -x c - 2>/dev/null && continue
        [ "${REQUIRE_TOOLS:-0}" = 1 ] || missing "$header"
        echo "$header is not there"
        return 1
    done
    cd "$root" || return 1
    run gcc -std=c99 -I"$stb_folder" -I. -DBENCH_OPENBLAS -DBENCH_ONEDNN -DBENCH_LIBXSMM -Wall -Wextra -Werror \
        -fsyntax-only tests/bench/bench.c tests/bench/bench_peers.c
}

quick=-DMOE_NO_SIMD

# Paths that contradict themselves count too: to find out which do takes five times as long as all
# else.
gcc_analyzer() { # header options...
    needs gcc
    program "$1" >a.c
    shift
    run gcc -std=c99 -O0 -fanalyzer -fanalyzer-verbosity=0 -fno-analyzer-feasibility $quick "$@" -I"$root" \
        -c a.c -o a.o 2>found || { cat found; return 1; }
    judge gcc found
}

# The header is the main file: what is included is looked at only where it is called.
clang_analyzer() { # header options...
    needs clang
    header=$1
    shift
    run clang --analyze -Xclang -analyzer-output=text -std=c99 -DMOE_IMPLEMENTATION $quick "$@" -x c "$root/$header" \
        -o a.plist 2>found || { cat found; return 1; }
    judge clang found
}

# Not the checks of clang's analyzer, which has rows of its own.
tidy() { # header options...
    needs clang-tidy
    header=$1
    shift
    off=$(tidy_off | sed 's/|.*//; s/^/,-/' | tr -d '\n')
    run clang-tidy --quiet "-checks=-*,bugprone-*,cert-*$off" "$root/$header" -- -x c -std=c99 \
        -DMOE_IMPLEMENTATION $quick "$@" >found 2>errors || { cat found errors; return 1; }
    judge tidy found
}

cppcheck_on() { # platform header options...
    needs cppcheck
    platform=$1
    header=$2
    shift 2
    # With options given, only that configuration is looked at: the compiler's macros must be among
    # them. stb_ds.h is only declarations.
    run cppcheck --quiet --language=c --std=c99 "--platform=$platform" --enable=warning,performance,portability \
        --inconclusive \
        '--template={file}:{line}:{column}: {severity}: {message} [{id}]' -DMOE_IMPLEMENTATION $quick -D__GNUC__=12 \
        -I"$stb_folder" "$@" "$root/$header" 2>found || { cat found; return 1; }
    judge cppcheck found
}

# Which functions say by what they return what else they leave: so many states follow their calls.
# Loops step byte by byte, up to so many.
eva_split='moei_json_peek:-1,moei_json_take:0,moei_json_string:0,moei_json_key:0,moei_hex4:0'
eva_split=$eva_split,'moei_unescape:0:1:2:3:4,moei_names_string:0,moei_names_next:0'
eva_split=$eva_split,'moei_names_seek:0,moei_json_sizes:0,moei_json_size:0,moei_file_fields:0'
eva_split=$eva_split,'moei_file_entry:0,moei_file_offsets:0,moei_file_dtype:0'
eva_split=$eva_split,'moei_chars_next:-1,moei_file_header:0,moei_file_entries:0,moei_tiles_check:0'
eva_split=$eva_split,'moei_names_problem:0,moei_file_metadata_object:0,moei_next_utf8:0,moei_file_next:0'
eva_states='moei_put_unsigned:100,moei_hex4:40,moei_unescape:40,moei_next_utf8:100,moei_json_string:1000'
eva_states=$eva_states,moei_file_next:400
eva_states=$eva_states,'moei_json_key:400,moei_json_take:100,moei_json_sizes:2000'
eva_states=$eva_states,'moei_json_size:2000,moei_file_fields:2000,moei_file_entry:2000,moei_file_dtype:2000'
eva_states=$eva_states,'moei_file_metadata_object:2000'
eva_states=$eva_states,'moei_file_entries:2000,moei_names_next:400,moei_names_string:100'

eva() { # folder of the headers, bytes: fills alarms; fails if the analysis did not come to its end
    run frama-c -cpp-extra-args="-I$1 -DSIZE=$2 -ffreestanding -U__x86_64__ -U__i386__ -U__GNUC__" -eva \
        -eva-msg-key=-initial-state -eva-domains cvalue \
        -eva-split-return-function "$eva_split" -eva-slevel 10 -eva-auto-loop-unroll 12 \
        -eva-widening-delay $(($2 + 80)) \
        -eva-slevel-function "$eva_states" "$root/tests/quality/eva.c" >log 2>&1 || { tail -20 log; return 1; }
    grep -q '^\[eva\] done for function main' log && grep -q 'moe_file_open' log ||
        { echo 'the analysis did not reach the reader'; return 1; }
    grep -A 2 'eva:alarm' log >alarms || :
}

# No alarm for any file of so many bytes.
eva_reader() { # bytes
    needs frama-c
    eva "$root" "$1" || return 1
    empty 'alarms:' "$(cat alarms)"
}

eva_reader_sizes() { # from to
    needs frama-c
    size=$1
    while [ "$size" -le "$2" ]; do
        eva_reader "$size" || { echo "a file of $size bytes"; return 1; }
        size=$((size + 1))
    done
}

# Models of one operation that moe_model_check (of the folder) accepts: fills alarms. Each function
# of the check tells by its status what it has found, so the states that follow are kept apart.
entry=eva_infer
eva_states_model=moei_int_select_logits:200,moei_int_next:0,moei_int_op_mixture:4,moei_int_route:0
eva_states_model=$eva_states_model,moei_int_weight_raw:0,moei_int_scale_weights:0,moei_ir_clip:0
eva_states_model=$eva_states_model,moei_int_l1:0,moei_int_linf:0,moei_int_sqrt:0,moei_int_op_norm:0,main:6000
eva_split_model=moei_int_squares:0,moei_check_half_power:0:1,moei_ir_keeps:0
# Eva does not see that a square is never negative, but where the sign is known, nor what a shift
# leaves, but where it knows which side of a bound a number is on: comments, put into copies of the
# headers, keep the cases apart. What it takes for granted (admit) eva_norm proves.
norm_bound='v <= (int64_t)1 << (40 + e) >> 15 \&\& v >= -((int64_t)1 << (40 + e) >> 15)'
eva_hints='/ moei_int_squares(unsigned n/,/^}/ {
    s|const uint32_t square|/*@ split *x >= 0; */ &|; s|low += square.*|& /*@ merge *x >= 0; */|; }
/^void moei_int_op_norm(/,/^}/ {
    s|const int32_t v = |/*@ split e; */ &|; s|const int16_t g = |/*@ merge e; */ &|
    s|const int32_t t = |/*@ admit '"$norm_bound"'; */ &|; }
/ moei_int_inverse_root(uint64_t d/,/^}/ s|for ([*]e = 0|/*@ dynamic_split d >= 0x100000000; */ &|
/^void moei_int_weight_norm(/,/^}/ s|for (; sum != 0|/*@ dynamic_split sum >= 0x40000000; */ &|'
eva_model() { # folder of moe_check.h, operation, factors within +- this, options...
    check=$1 op=$2 factors=$3
    shift 3
    split=$(sed '/^#ifndef MOE_NO_FLOAT/,/^#endif/d' "$check/moe_check.h" |
        sed -n 's/^\(static \)\{0,1\}moe_status \(moei\{0,1\}_[a-z0-9_]*\)(.*/\2:0/p' | sort -u | tr '\n' ',')
    for header in moe.h moe_routers.h; do sed "$eva_hints" "$root/$header" >"$header"; done
    [ "$(cat moe.h moe_routers.h | grep -c '/[*]@ [adsm]')" = 7 ] || { echo 'a line of the hints is gone'; return 1; }
    options="-I$PWD -I$root -I$check -DOP=moei_int_op_$op -DFACTORS=$factors $*"
    run frama-c -cpp-extra-args="$options -ffreestanding -U__x86_64__ -U__i386__ -U__GNUC__" -eva \
        -eva-msg-key=-initial-state -eva-domains cvalue -eva-use-spec moei_int_scratch -eva-slevel 2000 \
        -eva-auto-loop-unroll 300 -eva-split-return-function "$split$eva_split_model" -eva-unroll-recursive-calls 4 \
        -warn-invalid-pointer -eva-min-loop-unroll 17 -eva-slevel-function "$eva_states_model" \
        "$root/tests/quality/$entry.c" \
        >log 2>&1 || { tail -20 log; return 1; }
    grep -q '^\[eva\] done for function main' log && grep -q "at end of function moei_int_op_$op:" log ||
        { echo 'the analysis did not reach the operation'; return 1; }
    grep -A 2 'eva:alarm' log >alarms || :
}

# No alarm for models of one operation, up to 8 wide: see tests/quality/eva_infer.c.
eva_infer() { # operation factors options...
    needs frama-c
    eva_model "$root/examples/extras" "$@" || return 1
    # What is wrong stands behind the place, or where that leaves no room on the next line.
    awk '/eva:alarm/ {
        place = $2
        sub(/.*: Warning: */, "")
        if ($0 == "") getline
        sub(/^ */, "")
        print place "1: warning: " $0 " [eva]"
    }' alarms >found
    [ "$(grep -c 'eva:alarm' alarms)" = "$(grep -c ': warning: [a-z]' found)" ] || { cat alarms; return 1; }
    judge eva found
}

# What the proof of the norms takes for granted: see tests/quality/eva_norm.c.
eva_norm() {
    needs gcc
    sed "/^void moei_int_op_norm(/,/^}/ s|const int32_t t = |bound($norm_bound); &|" "$root/moe.h" >moe.h
    grep -q ' bound(' moe.h || { echo 'the line of the bound is gone'; return 1; }
    run gcc $(strict_flags gcc) -O2 -I. -I"$root" "$root/tests/quality/eva_norm.c" -o norm && run ./norm
}

# The same for operations that need an MoE layer: see tests/quality/eva_layer.c.
eva_layer() { # operation options...
    needs frama-c
    entry=eva_layer
    op=$1
    shift
    eva_infer "$op" 32767 "$@"
}

# Routers of floats: see tests/quality/eva_route.c. How many choices a token has, and which, is what
# the functions of the selection leave; what follows is looked at case by case.
eva_cases=moei_top_k_by_insertion:full,moe_top_k:full,moei_select_top_k:full,moei_route_select:full
eva_cases=$eva_cases,moei_route_assignments:full,moei_route_stages:full,moe_route:full,moei_route_tokens:0
eva_router() { # folder of the headers, options...: fills alarms
    headers_of=$1
    shift
    sed '/^static size_t moei_top_k_by_insertion/,/^}/ s/score\[i\] > \(score[^]]*\]\]\)/eva_above(score[i], \1)/' \
        "$headers_of/moe_kernels.h" >moe_kernels.h
    [ "$(grep -c eva_above moe_kernels.h)" = 2 ] || { echo 'a comparison of the selection is gone'; return 1; }
    case " $* " in
    *' -DWHOLE '*) cp "$headers_of/moe_routers.h" moe_routers.h ;;
    *)
        sed 's/^    r->kept = r->selected + cells;/& EVA_APART/' "$headers_of/moe_routers.h" >moe_routers.h
        grep -q EVA_APART moe_routers.h || { echo 'a line of the layout is gone'; return 1; }
        ;;
    esac
    run frama-c -cpp-extra-args="-I$PWD $* -ffreestanding -U__x86_64__ -U__i386__ -U__GNUC__" -eva \
        -eva-msg-key=-initial-state -eva-domains cvalue -warn-special-float none -eva-slevel 100000 \
        -eva-auto-loop-unroll 100 -eva-alloc-builtin fresh -eva-no-alloc-returns-null -eva-use-spec moei_layout_begin \
        -eva-split-return-function "moe_router_init:0,$eva_cases" \
        "$root/tests/quality/eva_route.c" >log 2>&1 || { tail -20 log; return 1; }
    grep -q '^\[eva\] done for function main' log && grep -q 'Frama_C_show_each_last: ' log ||
        { echo 'the analysis did not reach the last choice'; return 1; }
    grep -A 2 'eva:alarm' log >alarms || :
}

eva_route() { # options...
    needs frama-c
    eva_router "$root" "$@" || return 1
    empty 'alarms:' "$(cat alarms)"
}

# The library for programs that are linked with it, compiled when it is first wanted.
sanitized_library() { # sanitizer compiler
    [ ! -f "$prepared/$1.$2.o" ] || return 0
    printf '#define MOE_IMPLEMENTATION\n#include "tests/all.h"\n' >library.c
    run "$2" -std=c99 -g -O1 -fno-omit-frame-pointer "-fsanitize=$1" $quick -I"$root" -c library.c -o library.o &&
        mv library.o "$prepared/$1.$2.o"
}

# Compiles tests/NAME.c and runs it where tests/ and examples/ are found. clang takes six times as
# long to optimize what it watches memory in; these programs run for seconds.
under() { # sanitizer compiler name arguments...
    sanitizer=$1
    compiler=$2
    name=$3
    source=$root/$(cd "$root" && setup_source "$name")
    shift 3
    speed=-O1
    [ "$sanitizer" = thread ] || speed=-O0
    library=-DMOE_STATIC # what the program uses of it: the rest need not be compiled
    if [ "$sanitizer" = thread ] && grep -qx '#ifndef TEST_LINKED' "$source"; then
        sanitized_library "$sanitizer" "$compiler" || return 1
        library="-DTEST_LINKED $prepared/$sanitizer.$compiler.o"
    fi
    # shellcheck disable=SC2086
    run "$compiler" -std=c99 -g $speed -fno-omit-frame-pointer "-fsanitize=$sanitizer" \
        -fno-sanitize-recover=all $quick -I"$root" "$source" \
        $library -o program -pthread -lm || return 1
    ln -s "$root/tests" "$root/examples" .
    TSAN_OPTIONS=halt_on_error=1:exitcode=66 MSAN_OPTIONS=exitcode=66 ./program "$@" >out 2>err
    status=$?
    tail -n 1 out | grep -qE '^[1-9][0-9]* passed, 0 failed' && return $status
    { tail -n 5 out; head -n 40 err; }
    return 1
}

thread_sanitizer() { # program compiler
    needs "$2"
    case $1 in
    ranks) under thread "$2" "$1" quick ;;
    *) under thread "$2" "$1" ;;
    esac
}

memory_sanitizer() { # program
    needs clang
    case $1 in
    golden) under memory clang "$1" tests/golden ;;
    files) under memory clang "$1" ;;
    inference | int_*) under memory clang "$1" quick ;;
    *) under memory clang "$1" ;;
    esac
}

# Each tool must see a fault that was made for it.
planted() { # tool
    case $1 in
    gcc | clang | cppcheck | tidy)
        cat >bad.h <<'BAD'
#include <stdlib.h>
int moe_bad(int n);
int moe_bad(int n) {
    int *p = (int *)malloc(10 * sizeof *p), i, sum;
    if (p == NULL) return 0;
    for (i = 0; i < n; i++) sum += i;
    free(p);
    if (sum > 3) { fopen("a", "r"); }
    return p[10] + sum;
}
BAD
        sed -i '1a #include <stdio.h>' bad.h
        mkdir 'a b' && mv bad.h 'a b' && root="$PWD/a b"
        ;;
    esac
    case $1 in
    gcc)
        echo '#include "bad.h"' >a.c
        program() { echo '#include "bad.h"'; }
        ! gcc_analyzer bad.h >left || return 1
        ;;
    clang) ! clang_analyzer bad.h >left || return 1 ;;
    cppcheck) # also in a header that is included
        echo '#include "bad.h"' >"$root/over.h"
        ! cppcheck_on unix64 bad.h >left && ! cppcheck_on unix64 over.h >more && run cmp left more || return 1
        ;;
    tidy) ! tidy bad.h >left || return 1 ;;
    eva)
        needs frama-c
        mkdir h
        sed 's/if (end - \*at < 5 /if (end - *at < 4 /' "$root/moe_kernels.h" >h/moe_kernels.h
        cp "$root/moe.h" "$root/moe_routers.h" h
        ! cmp -s h/moe_kernels.h "$root/moe_kernels.h" || { echo 'the line to change is gone'; return 1; }
        eva "$PWD/h" 16 || return 1
        cp alarms left
        ;;
    eva_infer)
        needs frama-c
        mkdir h
        sed 's/op->shape.shift <= 30,/op->shape.shift <= 40,/' "$root/examples/extras/moe_check.h" >h/moe_check.h
        ! cmp -s h/moe_check.h "$root/examples/extras/moe_check.h" || { echo 'the line to change is gone'; return 1; }
        eva_model "$PWD/h" rescale 32767 || return 1
        cp alarms left
        ;;
    eva_norm) # in what it tries, in what it needs of the exponent, and in the check of biases
        needs frama-c
        mkdir h
        cp -r "$root/tests" h
        cp "$root/moe_kernels.h" "$root/moe_routers.h" h
        sed '/^void moei_int_op_norm/,/^}/ s/<< 2 [*] op->factor/<< op->factor/' "$root/moe.h" >h/moe.h
        ! cmp -s h/moe.h "$root/moe.h" || { echo 'the line to change is gone'; return 1; }
        (root=$PWD/h && ! eva_norm) >left || return 1
        grep -q ' [1-9][0-9]* beyond' left || { cat left; return 1; }
        sed '/ moei_int_inverse_root(uint64_t d/,/^}/ s/)1 << 30; m/)1 << 29; m/' "$root/moe.h" >h/moe.h
        checks=$root/examples/extras/moe_check.h
        sed '/moei_check_norm(/,/^}/ s/round < (int64_t)3/round < (int64_t)4/' "$checks" >h/moe_check.h
        ! cmp -s h/moe.h "$root/moe.h" && ! cmp -s h/moe_check.h "$checks" ||
            { echo 'a line to change is gone'; return 1; }
        root=$PWD/h
        eva_model "$PWD/h" norm 32767 -DNORM -DWIDEST=1 || return 1
        tr -d '\n' <alarms >left
        for alarm in 'assertion got status unknown' 'scaled + tmp'; do
            grep -qF "$alarm" left || { echo "not seen: $alarm"; cat alarms; return 1; }
        done
        return
        ;;
    eva_layer) # in a copy of a header with hints, where places are short
        needs frama-c
        mkdir -p h/examples h/tests
        sed 's/uint32_t sum = 32768;/uint32_t sum = 0;/' "$root/moe_routers.h" >h/moe_routers.h
        ! cmp -s h/moe_routers.h "$root/moe_routers.h" || { echo 'the line to change is gone'; return 1; }
        cp "$root/moe.h" "$root/moe_kernels.h" h
        cp -r "$root/examples/extras" h/examples
        cp -r "$root/tests/quality" h/tests
        root=$PWD/h
        ! eva_layer mixture -DROUTER=moei_int_select_logits -DWEIGHT=moei_int_weight_sparsemixer >left || return 1
        grep -q 'moe_routers.h:.*division by zero' left || { cat left; false; }
        return
        ;;
    eva_route) # a fault in each of six functions, only where a number is large: Eva goes on with the others
        needs frama-c
        mkdir h
        sed '/^static size_t moei_top_k_by_insertion/,/^}/ s/i < n; i++) {/i < n + (score[0] > 5); i++) {/
            /^static void moei_softmax_c/,/^}/ s/i < n; i++) y/i < n + (x[0] > 5); i++) y/' \
            "$root/moe_kernels.h" >h/moe_kernels.h
        sed '/^static moe_status moei_route_select/,/^}/ s/i < n; i++) s->/i < n + (s->r->logits[0] > 4); i++) s->/
            /^static int moei_route_capacity/,/^}/ s/ memset(r->kept, 1/ if (r->logits[0] < 3)&/
            /^static void moei_plan_rows/,/^}/ s/sum += count/& \/ (size_t)(r->logits[0] < 2)/
            /^static void moei_route_plan(/,/^}/ s/(int32_t)i/& << (r->logits[0] > 1 ? 40 : 0)/' \
            "$root/moe_routers.h" >h/moe_routers.h
        changed=$(cat h/moe_kernels.h h/moe_routers.h | grep -c '\[0\] [<>] [1-5]\>')
        [ "$changed" = 6 ] || { echo 'a line to change is gone'; return 1; }
        eva_router "$PWD/h" -DTOKENS=1 -DEXPERTS=2 -DCHOICES=2 || return 1
        tr -d '\n' <alarms >left
        for alarm in 'valid_read(score + i)' 'valid(y + i)' 'valid_read(choice + i)' 'initialized(kept + i)' \
            'division by zero' 'for shift'; do
            grep -qF "$alarm" left || { echo "not seen: $alarm"; cat alarms; return 1; }
        done
        return
        ;;
    thread)
        needs gcc
        ! under thread gcc threads race >left 2>&1 || return 1
        grep -q "data race" left || { cat left; false; }
        return
        ;;
    memory)
        needs clang
        mkdir -p tests/unit examples
        sed 's/memset(p, 0, bytes);/(void)0;/' "$root/moe.h" >moe.h
        ! cmp -s moe.h "$root/moe.h" || { echo 'the line to change is gone'; return 1; }
        cp "$root/moe_kernels.h" "$root/moe_routers.h" .
        cp "$root/tests/unit/threads.c" tests/unit
        cp "$root/tests/all.h" "$root/tests/test.h" tests
        cp -r "$root/examples/extras" examples
        root=$PWD
        ! under memory clang threads >left 2>&1 || return 1
        grep -q 'use-of-uninitialized-value' left
        return
        ;;
    esac
    grep -qE '\[[a-zA-Z0-9.,:-]+\]' left || { echo 'nothing was seen'; cat left; return 1; }
}

program() { printf '#define MOE_IMPLEMENTATION\n#include "%s"\n' "$1"; }

prepare() { :; }

run_checks "$@"
