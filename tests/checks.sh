# Sourced by tests/port/headers.sh, tests/port/amalgamated.sh, tests/port/portability.sh,
# tests/port/devices.sh and others after tests/setup.sh: runs a list of checks on all processors and
# counts them. The script brings prepare(), called once, which may put files into $prepared, and
# plan(), which prints one check per line: a function's name and its arguments. It may bring
# closing(), which prints what is to be shown before the last line. Each check runs in an empty
# folder of its own, its standard output and error are shown when it fails.

strict_flags() { # compiler
    case $1 in
    tcc) # knows few warnings, and has to be told where stb_ds.h is; it takes a tenth of the time of others
        echo "-std=c99 -Wall -Werror -I$stb_folder"
        return
        ;;
    *clang*) align=-Wcast-align ;;
    *) align=-Wcast-align=strict ;;
    esac
    echo "-std=c99 -pedantic -Wall -Wextra -Wconversion -Wsign-conversion -Wshadow -Wdouble-promotion $align" \
        "-Wundef -Wvla -Werror"
}

# ---- for check functions ----

# Prints the command when it fails.
run() {
    "$@" && return 0
    run_status=$?
    echo "status $run_status: $*"
    return 1
}

missing() { # what
    echo "skip: $1 is not there"
    exit 77
}

needs() { # tool
    setup_tool "$1" && return 0
    [ "$1" != gcc ] && [ "${REQUIRE_TOOLS:-0}" != 1 ] && missing "$1"
    echo "$1 is not there"
    exit 1
}

# A compiler that lacks what it needs to make a program is missing too.
needs_to_link() { # compiler options...
    needs "$1"
    printf '#include <stdio.h>\nint main(void) { return puts("") < 0; }\n' >empty.c
    "$@" empty.c -o empty >empty.log 2>&1 && return 0
    [ "${REQUIRE_TOOLS:-0}" = 1 ] || missing "what $* needs to make a program"
    cat empty.log
    exit 1
}

# Sets $wine, what runs programs for Windows. Its folder takes 700 MB and five seconds, so that one
# check must do for all programs.
find_wine() {
    wine=$(dpkg -L wine64 2>/dev/null | grep '/wine64$' | sed -n 1p)
    wine=${wine:-$(command -v wine64)}
    needs "${wine:-wine64}"
    WINEPREFIX=$PWD/wine WINEDEBUG=-all WINEDLLOVERRIDES='mscoree,mshtml='
    export WINEPREFIX WINEDEBUG WINEDLLOVERRIDES
    unset DISPLAY
}

end_wine() { timeout 600 "${wine%/*}/wineserver" -k -w; }

empty() { # heading text
    [ -z "$2" ] && return 0
    printf '%s\n%s\n' "$1" "$2"
    return 1
}

# A test program's last line.
passed_all() { # lines
    tail -n 1 "$1" | tr -d '\r' | grep -qE '^[1-9][0-9]* passed, 0 failed$' && return 0
    tail -n 20 "$1"
    return 1
}

# C with all strict warnings, or C++11 by the compiler's name.
in_language() { # compiler folder-of-headers arguments...
    language_compiler=$1
    language_folder=$2
    shift 2
    case $language_compiler in
    *++)
        run "$language_compiler" -std=c++11 -Wall -Wextra -Werror -I"$language_folder" -x c++ "$@"
        ;;
    *) run "$language_compiler" $(strict_flags "$language_compiler") -I"$language_folder" "$@" ;;
    esac
}

real_option() { [ "$1" = float ] || echo "-DMOE_REAL=$1"; }

# Writes a file with the allocating writer, which is where stb_ds works, and opens it again.
writing_program() {
    cat <<'SOURCE'
#include <string.h>
int moe_written(void);
int moe_written(void) {
    moe_real numbers[3];
    moe_tensor tensor;
    moe_metadata entry;
    moe_buffer buffer;
    moe_stream stream;
    moe_file file;
    int good;
    memset(numbers, 0, sizeof numbers);
    memset(&tensor, 0, sizeof tensor);
    memset(&buffer, 0, sizeof buffer);
    memcpy(tensor.name, "w", 2);
    tensor.n_dims = 1;
    tensor.shape[0] = tensor.count = 3;
    tensor.data = numbers;
    entry.key = "key";
    entry.value = "value";
    stream = moe_buffer_stream(&buffer);
    good = moe_file_write(&stream, &tensor, 1, &entry, 1, NULL, NULL) == MOE_OK;
    good = good && moe_file_open(&file, buffer.data, buffer.size, NULL) == MOE_OK && file.n_tensors == 1;
    moe_buffer_free(&buffer);
    return good;
}
SOURCE
}

# The program in a header's opening comment.
cut_first_program() { # header
    sed -n '/^\( \*\)\{0,1\} *--- first program ---$/,/^\( \*\)\{0,1\} *--- end ---$/{s/^ \* \{0,1\}//;/^ *--- /!p;}' \
        "$root/$1" | grep . && return 0
    echo "$1: no lines between '--- first program ---' and '--- end ---'" >&2
    return 1
}

# Of the children, from what times has written.
processor_seconds() { # file
    awk 'NR == 2 {
        for (i = 1; i <= 2; i++) { split($i, part, /[ms]/); sum += part[1] * 60 + part[2] }
        printf "%.2f", sum
    }' "$1"
}

# That program works as it stands there. gcc and g++ look at it only; what runs for gcc, tcc makes.
first_program_of() { # header compiler folder-of-headers options...
    cut_first_program "$1" >a.c || return 1
    shift
    set -- "$@" -DMOE_NO_SIMD -Wno-missing-field-initializers a.c
    case $1 in
    gcc | g++) in_language "$@" -fsyntax-only || return 1 ;;
    esac
    [ "$1" != g++ ] || return 0
    if [ "$1" = gcc ] && setup_tool tcc; then
        shift
        set -- tcc "$@"
    fi
    in_language "$@" -o a -lm && run ./a
}

# ---- running them ----

. tests/jobs.sh

# A check that looks at what the others have left waits until they have ended.
alone() { "$@"; }

# Check functions take their words as they come from the line; set -f keeps the shell from expanding
# patterns.
job_work() { # number, line: a function and its arguments
    set -f
    mkdir "$jobs/$1.folder"
    # shellcheck disable=SC2086
    (cd "$jobs/$1.folder" && set -- $2 && "$@") >"$jobs/$1.out" 2>&1 </dev/null
    echo $? >"$jobs/$1.status"
    rm -rf "$jobs/$1.folder"
}

job_show() { # number line
    case $(cat "$jobs/$1.status" 2>/dev/null) in
    0)
        passed=$((passed + 1))
        [ "$verbose" = 0 ] || echo "ok: $2 ($(jobs_seconds "$1") s)"
        grep '^note: ' "$jobs/$1.out"
        ;;
    77)
        skipped=$((skipped + 1))
        [ "$verbose" = 0 ] || echo "skipped: $2"
        cat "$jobs/$1.out" >>"$scratch/skips"
        ;;
    *)
        failed=$((failed + 1))
        echo "failed: $2"
        awk -v most="${word:-20}" -v again="sh $0 '$2'" '
            NR <= most || most !~ /^[0-9]+$/ { print "    " $0 }
            END { if (NR > most && most ~ /^[0-9]+$/) print "    ... all " NR " lines: " again }' "$jobs/$1.out"
        ;;
    esac
}

closing() { :; }

run_checks() { # [-v] [word]
    case ${1:-} in -h | --help) setup_help && exit ;; esac
    verbose=0
    if [ "${1:-}" = -v ]; then
        verbose=1
        shift
    fi
    word=${1:-}
    setup_scratch
    setup_compiler
    setup_stb
    prepared=$scratch # checks have a $scratch of their own
    if ! prepare; then # once, not with every check that wants what is not there
        echo 'failed: preparing the checks'
        echo '0 passed, 1 failed'
        return 1
    fi
    if [ "$word" = quick ]; then
        word=
        quick_plan >"$scratch/plan"
    else
        plan | awk -v word="$word" 'word == "" || index($0, word)' >"$scratch/plan"
    fi
    grep -v '^alone ' "$scratch/plan" >"$scratch/together"
    grep '^alone ' "$scratch/plan" >"$scratch/alone"
    passed=0
    failed=0
    skipped=0
    jobs_run "$scratch/together"
    JOBS=1
    jobs_run "$scratch/alone"
    [ ! -f "$scratch/skips" ] || sort "$scratch/skips" | uniq -c | sed 's/^ *\([0-9]*\) \(.*\)/\2 (checks skipped: \1)/'
    closing
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ] && [ $((passed + skipped)) -gt 0 ]
}
