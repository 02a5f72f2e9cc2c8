#!/bin/sh
# Fuzzes what strangers bring: tests/fuzz/fuzz_file.c (files), tests/fuzz/fuzz_text.c (texts,
# options and settings), tests/property/fuzz_config.c (configurations and data).
#   sh tests/fuzz/fuzz.sh                  each with libFuzzer, from the seeds in tests/fuzz/corpus:
#                                          a fixed number of inputs (runs_of below) of a fixed
#                                          seed; or for FUZZ_SECONDS, if that is set
#   sh tests/fuzz/fuzz.sh corpus           any compiler: the seeds, each taken as its name says, and
#                                          3000 (FUZZ_MUTATIONS) mutations of them
#   sh tests/fuzz/fuzz.sh afl [SECONDS]    each with AFL++ for so many seconds (600)
#   sh tests/fuzz/fuzz.sh coverage FOLDER  how many lines of the library and the examples the inputs
#                                          of FOLDER/files and FOLDER/texts reach (clang)
#   sh tests/fuzz/fuzz.sh seeds FOLDER     adds few small files of FOLDER, which libFuzzer has
#                                          filled, to tests/fuzz/corpus/files: they reach as much
# FUZZ_TARGETS: some of "files texts configs". FUZZ_CORPUS: a folder that keeps new inputs
# (FUZZ_CORPUS/files, FUZZ_CORPUS/texts) from run to run,
# for long fuzzing at night:  FUZZ_CORPUS=~/moe-corpus FUZZ_SECONDS=3600 FUZZ_SEED=$(date +%s) sh
#                             tests/fuzz/fuzz.sh
# FUZZ_SEED (1). CC, CFLAGS, STB_DS as for tests/run. What is found is kept in build/. The last line
# is "N passed, N failed, N skipped".

LC_ALL=C
export LC_ALL
unset CDPATH
cd -- "$(dirname -- "$0")/../.." || exit 1
. tests/setup.sh
. tests/jobs.sh

readers='QUICKSTART QUANTIZE MICRODIGITS EXPORT CSV BENCH TEXT LANGUAGE ROUTERS'
targets=${FUZZ_TARGETS:-files texts configs}
case ${1:-} in corpus) [ -n "${FUZZ_TARGETS:-}" ] || targets='files texts' ;; esac # fuzz_config is a program of its own
passed=0
failed=0
skipped=0

pass() { passed=$((passed + ${2:-1})) && echo "ok: $1"; }

fail() { # what log
    failed=$((failed + 1))
    echo "failed: $1"
    [ ! -s "$2" ] || tail -n 60 "$2" | sed 's/^/    /'
}

skip() {
    if [ "${REQUIRE_TOOLS:-0}" = 1 ]; then
        fail "$1 is not there" /dev/null
    else
        skipped=$((skipped + 1))
        echo "skip: $1 is not there"
    fi
}

# Vector kernels are left out: they take minutes to compile, and no byte of a file reaches them
# alone.
flags='-std=c99 -g -O1 -DMOE_NO_SIMD -I.'
private=-DMOE_STATIC # of targets of one file: what they do not use is not compiled

# One target as a program: flags of the compiler for objects, and more of them for the program
# itself.
build() { # target program compiler flags program-flags
    setup_stb_flag "$3"
    # shellcheck disable=SC2086
    set -- "$1" "$2" "$3" "$flags ${CFLAGS:-} ${stb_flag:+-I$stb_flag} $4" "$5"
    # shellcheck disable=SC2086
    case $1 in
    files) $3 $4 $private $5 tests/fuzz/fuzz_file.c -o "$2" -lm ;;
    configs) $3 $4 $private $5 -DFUZZ_TARGET tests/property/fuzz_config.c -o "$2" -lm ;;
    *)
        # These take microseconds: to optimize them takes longer than it saves.
        for reader in $readers; do $3 $4 -O0 "-DREAD_$reader" -c tests/fuzz/fuzz_text.c -o "$2.$reader.o" ||
            return 1; done
        $3 $4 -O0 $5 tests/fuzz/fuzz_text.c "$2".*.o -o "$2" -lm
        ;;
    esac
}

sanitizers='-fsanitize=address,undefined -fno-sanitize-recover=all'

# ---- libFuzzer ----

has_libfuzzer() {
    setup_tool clang && echo 'int LLVMFuzzerTestOneInput(const char *p, unsigned long n) { return p && n > 9; }' |
        clang -fsanitize=fuzzer -x c - -o "$scratch/probe" >/dev/null 2>&1
}

# Only texts gain by being shown every comparison. The mutator of files knows what they are made of,
# and configurations are choices: it would make them slower, files by half, and what is tried depend
# on addresses.
build_libfuzzer() { # target program
    seen=
    [ "$1" = texts ] || seen=-fno-sanitize-coverage=trace-cmp
    build "$1" "$2" clang "$sanitizers -fsanitize=fuzzer-no-link $seen" '-DFUZZ_ENGINE -fsanitize=fuzzer'
}

# Bytes of an input; for configurations these are choices, and more of them than seeds of the
# program have.
longest() {
    case $1 in
    files) echo 8192 ;;
    texts) echo 16384 ;;
    configs) echo 600 ;;
    esac
}

# How many inputs, seeds included: about 60 seconds of a processor.
runs_of() {
    case $1 in
    files) echo 25000 ;;
    texts) echo 50000 ;;
    configs) echo 4200 ;;
    esac
}

# The seeds in the order of their names: that of a folder is another on each machine.
fuzz() { # target
    new=$scratch/$1.new
    [ -z "${FUZZ_CORPUS:-}" ] || new=$FUZZ_CORPUS/$1
    mkdir -p "$new" build
    if ! build_libfuzzer "$1" "$scratch/$1" >"$scratch/$1.log" 2>&1; then
        fail "$1: compiling" "$scratch/$1.log"
        return
    fi
    ls -d tests/fuzz/corpus/"$1"/* | tr '\n' ',' | sed 's/,$//' >"$scratch/$1.seeds"
    limit=-runs=$(runs_of "$1")
    [ -z "$seconds" ] || limit=-max_total_time=$seconds
    # Addresses that are drawn anew would be compared with others, and so change what is tried.
    fixed='setarch -R'
    $fixed true 2>"$scratch/$1.log" || fixed=
    $fixed "$scratch/$1" -seed="${FUZZ_SEED:-1}" -entropic=0 -len_control=0 -max_len="$(longest "$1")" "$limit" \
        -timeout=3600 -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix=build/ \
        -reload=0 -seed_inputs=@"$scratch/$1.seeds" "$new" >"$scratch/$1.log" 2>&1 </dev/null
    status=$?
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$scratch/$1.log")
    reached=$(sed -n 's/.*cov: \([0-9]*\) ft: \([0-9]*\).*/\1 edges, \2 features/p' "$scratch/$1.log" | tail -n 1)
    if [ "$status" -eq 0 ] && [ "${runs:-0}" -gt 0 ]; then
        pass "$1"
        echo "note: $1: $runs inputs${seconds:+ in $seconds seconds}, $reached, nothing found"
    else
        fail "$1: status $status" "$scratch/$1.log"
    fi
}

# All targets at a time: where processors are fewer, each is given so much longer that it has its
# seconds of one. JOBS: so many at a time.
fuzz_all() {
    # shellcheck disable=SC2086
    printf '%s\n' $targets >"$scratch/targets"
    lanes=$(awk 'END { print NR }' "$scratch/targets")
    cores=$(jobs_count)
    seconds=${FUZZ_SECONDS:-}
    [ -n "${JOBS:-}" ] || [ "$cores" -ge "$lanes" ] || seconds=${seconds:+$(((seconds * lanes + cores - 1) / cores))}
    JOBS=${JOBS:-$lanes}
    jobs_run "$scratch/targets"
}

job_work() { # number target
    fuzz "$2" >"$jobs/$1.said" 2>&1
}

job_show() { # number target
    said=$jobs/$1.said
    [ -s "$said" ] || echo "failed: $2: nothing was said" >"$said"
    cat "$said"
    passed=$((passed + $(grep -c '^ok: ' "$said")))
    failed=$((failed + $(grep -c '^failed: ' "$said")))
}

# ---- without a fuzzer ----

corpus() { # target
    if ! build "$1" "$scratch/$1" "$CC" "${FUZZ_FLAGS:-}" '' >"$scratch/$1.log" 2>&1; then
        fail "$1: compiling" "$scratch/$1.log"
        return
    fi
    for arguments in '' "-n ${FUZZ_MUTATIONS:-3000} ${FUZZ_SEED:-1}"; do
        # shellcheck disable=SC2086
        "$scratch/$1" ${arguments:-tests/fuzz/corpus/$1} >"$scratch/$1.log" 2>&1
        status=$?
        count=$(sed -n '$s/^\([0-9]*\) passed, 0 failed$/\1/p' "$scratch/$1.log")
        if [ "$status" -eq 0 ] && [ "${count:-0}" -gt 0 ]; then
            pass "$1: $count inputs (${arguments:-seeds})" "$count"
        else
            fail "$1: ${arguments:-seeds}: status $status" "$scratch/$1.log"
        fi
    done
}

# ---- AFL++: another search, from the same seeds ----

afl() { # target seconds
    export AFL_SKIP_CPUFREQ=1 AFL_I_DONT_CARE_ABOUT_MISSING_CRASHES=1 AFL_NO_AFFINITY=1 AFL_NO_UI=1 AFL_QUIET=1
    if ! build "$1" "$scratch/$1" afl-clang-fast '-fsanitize=undefined -fno-sanitize-recover=all' \
        '-DFUZZ_ENGINE -fsanitize=fuzzer' \
        >"$scratch/$1.log" 2>&1; then
        fail "$1: compiling" "$scratch/$1.log"
        return
    fi
    found=build/afl_$1
    rm -rf "$found"
    mkdir -p "$found"
    afl-fuzz -V "$2" -t 2000 -m none -i "tests/fuzz/corpus/$1" -o "$found" "$scratch/$1" >"$scratch/$1.log" 2>&1 \
        </dev/null
    stats=$found/default/fuzzer_stats
    runs=$(sed -n 's/^execs_done *: //p' "$stats" 2>/dev/null)
    crashes=$(find "$found/default/crashes" "$found/default/hangs" -name 'id*' 2>/dev/null | wc -l)
    if [ "${runs:-0}" -gt 0 ] && [ "$crashes" -eq 0 ]; then
        pass "$1"
        echo "note: $1: $runs inputs in $2 seconds, $(sed -n 's/^bitmap_cvg *: //p' \
            "$stats") of the edges, nothing found"
    else
        fail "$1: $crashes crashes or hangs in $found" "$scratch/$1.log"
    fi
}

# ---- reports, and the seeds ----

# Inputs run one by one, without sanitizers; lines reached by file.
coverage() { # folder
    inputs=$1
    set --
    for target in $targets; do
        build "$target" "$scratch/$target" clang '-fprofile-instr-generate -fcoverage-mapping' \
            '-DFUZZ_ENGINE -fsanitize=fuzzer' || return 1
        LLVM_PROFILE_FILE="$scratch/$target.profraw" "$scratch/$target" -runs=0 "$inputs/$target" \
            "tests/fuzz/corpus/$target" >"$scratch/log" 2>&1 || return 1
        set -- "$@" -object "$scratch/$target"
    done
    tool=$(dirname "$(readlink -f "$(command -v clang)")")
    "$tool/llvm-profdata" merge -o "$scratch/profile" "$scratch"/*.profraw || return 1
    "$tool/llvm-cov" report -instr-profile="$scratch/profile" "$@" --show-region-summary=0 \
        --ignore-filename-regex='stb_ds|tests/'
}

# A cover by few and small inputs; each is named by what becomes of it and by its bytes.
seeds() { # folder
    build_libfuzzer files "$scratch/files" && mkdir -p "$scratch/cover" || return 1
    "$scratch/files" -max_len=800 -use_counters=0 -set_cover_merge=1 "$scratch/cover" "$1" >"$scratch/log" 2>&1 ||
        return 1
    build files "$scratch/plain" "$CC" '' '' || return 1
    for file in "$scratch"/cover/*; do
        outcome=$("$scratch/plain" "$file" | sed -n "s/^failed: .* is '\(.*\)'\$/\1/p")
        cp "$file" "tests/fuzz/corpus/files/$outcome-$(basename "$file" | cut -c1-8).safetensors"
    done
}

setup_scratch
setup_stb
case ${1:-} in
'')
    if has_libfuzzer; then fuzz_all
    else for target in $targets; do skip "libFuzzer (on Debian: clang libclang-rt-14-dev)"; done; fi
    ;;
corpus)
    setup_compiler
    for target in $targets; do corpus "$target"; done
    ;;
afl)
    for target in $targets; do
        if setup_tool afl-fuzz && setup_tool afl-clang-fast; then afl "$target" "${2:-600}"
        else skip 'AFL++ (on Debian: afl++)'; fi
    done
    ;;
coverage)
    coverage "$2"
    exit
    ;;
seeds)
    setup_compiler
    seeds "$2"
    exit
    ;;
-h | --help) setup_help && exit ;;
*) setup_usage "fuzz.sh: $1: no such word; see -h" ;;
esac
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
