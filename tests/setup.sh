# Sourced by examples/run, tests/run, amalgamate and the scripts of this folder: finds what they
# need and installs what is missing where it may (root and apt-get), else says what to install.
# POSIX sh. Nothing happens until a function is called.
#
#   setup_scratch          makes a folder $scratch that is gone when the script ends
#   setup_compiler         sets $CC, a C compiler that makes programs that run;
#                          setup_compiler_quietly: if there is one
#   setup_stb              sets $stb_folder, where stb_ds.h lies; STB_DS=folder or STB_DS=file names
#                          it
#   setup_stb_flag CC      sets $stb_flag: empty when that compiler finds stb_ds.h by itself, else
#                          the folder for its -I
#   setup_tool NAME        whether a program is there; no installing
#   setup_wants TOOL...    ends a script that counts tests as a skip where a tool is missing
#   setup_source NAME      prints the path of the test program NAME.c
#   setup_limit N COMMAND... runs a command of which no process may take more than N seconds of a
#   processor: status 152
#   setup_program NAME COMMAND...  sets $program to a compiled example, kept from call to call
#   setup_ask WHAT PACKAGES...     names what to install, and ends the script
#   setup_help             prints the opening comment of the script in tests/ that runs
#   setup_joined           prints a table whose rows may go on in lines that begin with a space
#   find_compile_line FILE prints the compile line in a program's first comment

# Package names of Debian and Ubuntu.
setup_packages_compiler='gcc libc6-dev'
setup_packages_stb='libstb-dev'

setup_say() { printf '%s\n' "$*" >&2; }

setup_die() {
    setup_say "$*"
    exit 1
}

# Ends a script whose command line cannot be understood.
setup_usage() {
    setup_say "$*"
    exit 2
}

setup_help() { sed -n -e 1d -e '/^#/!q' -e 's/^# \{0,1\}//p' tests/*/"${0##*/}"; }

setup_tool() { command -v "$1" >/dev/null 2>&1; }

setup_wants() { # tool...
    for setup_name in "$@"; do
        setup_tool "$setup_name" && continue
        echo "skip: $setup_name is not there"
        [ "${REQUIRE_TOOLS:-0}" = 1 ] && echo '0 passed, 1 failed' && exit 1
        echo '0 passed, 0 failed, 1 skipped'
        exit 0
    done
}

# Puts a text between the lines "<!-- NAME -->" and "<!-- end -->" of a file.
setup_write_between() { # name text file
    [ -s "$2" ] || setup_die "$3: there are no rows $1 to write"
    awk -v name="<!-- $1 -->" '
        FNR == NR { text = text $0 "\n"; next }
        inside && $0 == "<!-- end -->" { inside = 0 }
        !inside { print }
        $0 == name { inside = 1; printf "\n%s\n", text }
    ' "$2" "$3" >"$3.new" && mv "$3.new" "$3"
}

# The clock does not matter: a busy machine fails nothing. A process that sleeps forever is ended
# after an hour.
setup_limit() ( # processor seconds, command...
    ulimit -S -t "$1" 2>/dev/null
    shift
    ! setup_tool timeout || exec timeout 3600 "$@"
    exec "$@"
)

setup_scratch() {
    scratch=${TMPDIR:-/tmp}
    case $scratch in
    /*) ;;
    *) scratch=${caller:-$PWD}/$scratch ;; # the scripts change folders
    esac
    scratch=$(mktemp -d "$scratch/moe.XXXXXX") || setup_die "cannot make a temporary folder in ${TMPDIR:-/tmp}"
    trap 'rm -rf "$scratch"' EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 141' PIPE
    trap 'exit 143' TERM
}

# A table: what begins with a space belongs to the line before.
setup_joined() { sed -e ':a' -e '$!N' -e 's/|\n  */|/' -e 's/\n  */ /' -e ta -e P -e D; }

# Installs packages. The package lists are fetched only when installing without them fails. 1 when
# that is not allowed or failed.
setup_install() {
    setup_tool apt-get && [ "$(id -u)" = 0 ] || return 1
    setup_say "installing with apt-get: $*"
    setup_log=$scratch/apt.log
    setup_apt install "$@" && return 0
    setup_apt_update && setup_apt install "$@" && return 0
    cat "$setup_log" >&2
    return 1
}

setup_apt_update() { DEBIAN_FRONTEND=noninteractive apt-get update >>"$setup_log" 2>&1 </dev/null; }

setup_apt() { DEBIAN_FRONTEND=noninteractive apt-get -y --no-install-recommends "$@" >>"$setup_log" 2>&1 </dev/null; }

# Says how to install packages ($2...) for something ($1) that only some want, and ends the script.
setup_ask() {
    setup_what=$1
    shift
    setup_die "$setup_what is missing. On Debian or Ubuntu, as root:  apt-get install $*"
}

# Installs packages ($2...) for something that is missing ($1), or ends the script with what the
# user can do.
setup_need() {
    setup_what=$1
    shift
    setup_install "$@" && return 0
    setup_die "$setup_what is missing. On Debian or Ubuntu, as root:  apt-get install $*"
}

# ---- the compiler ----

setup_compiler() {
    if [ -n "${CC:-}" ]; then
        setup_compiler_works "$CC" && return
        setup_compiler_made
        setup_die "CC=$CC does not make a C program that runs. Set CC to another compiler, or unset it."
    fi
    setup_compiler_found && return
    setup_compiler_made
    # One call for all that is missing: the second download of package lists would take longer than
    # the package.
    setup_file_found || setup_packages_compiler="$setup_packages_compiler $setup_packages_stb"
    # shellcheck disable=SC2086
    setup_need 'A C compiler' $setup_packages_compiler
    setup_compiler_found || setup_die 'A C compiler was installed and still does not make a program that runs.'
}

setup_compiler_found() {
    for CC in cc gcc clang; do
        setup_tool $CC && setup_compiler_works $CC && return 0
    done
    CC=
    return 1
}

# For scripts that can do without: sets $CC if there is one.
setup_compiler_quietly() { [ -n "${CC:-}" ] || setup_compiler_found || :; }

# Headers, libm and linking must work too. The name may hold options: CC="gcc -m32".
setup_compiler_works() {
    printf '%s\n' '#include <math.h>' '#include <stdio.h>' 'int main(int n, char **v) {' \
        '    return v[0] == NULL || sqrt((double)n) < 0.5;' '}' >"$scratch/works.c" || return
    $1 "$scratch/works.c" -o "$scratch/works" -lm >/dev/null 2>&1 </dev/null && "$scratch/works" 2>/dev/null
}

# Ends the script when it was not for lack of a compiler: a folder can be full, or closed to
# programs.
setup_compiler_made() {
    [ -s "$scratch/works.c" ] || setup_die "${TMPDIR:-/tmp}: cannot be written; TMPDIR names another folder."
    echo '#!/bin/sh' >"$scratch/script" && chmod +x "$scratch/script"
    "$scratch/script" 2>/dev/null ||
        setup_die "${TMPDIR:-/tmp}: programs do not run there; TMPDIR names another folder."
}

# ---- stb_ds.h ----

setup_stb() {
    if [ -n "${STB_DS:-}" ]; then
        setup_named "$STB_DS" || setup_die "STB_DS=$STB_DS is neither stb_ds.h nor a folder that holds it."
        return
    fi
    setup_file_found && return
    # shellcheck disable=SC2086
    setup_need 'stb_ds.h' $setup_packages_stb
    setup_file_found || setup_die 'stb_ds.h was installed and is still not found. Name its folder: STB_DS=folder'
}

# Paths are made absolute: the scripts change folders.
setup_named() {
    case $1 in
    /*) setup_path=$1 ;;
    *) setup_path=${caller:-$PWD}/$1 ;;
    esac
    case $setup_path in
    */stb_ds.h) [ -f "$setup_path" ] && stb_folder=${setup_path%/*} && return 0 ;;
    esac
    for stb_folder in "$setup_path" "$setup_path/stb"; do
        [ -f "$stb_folder/stb_ds.h" ] && return 0
    done
    return 1
}

# Where the compiler looks, else where packages put it.
setup_file_found() {
    if [ -n "${CC:-}" ]; then
        for setup_name in stb_ds.h stb/stb_ds.h; do
            setup_path=$(echo "#include <$setup_name>" | $CC -E -x c - 2>/dev/null |
                sed -n 's/^#.* "\(.*stb_ds\.h\)".*/\1/p' | sed -n 1p)
            [ -f "$setup_path" ] && stb_folder=${setup_path%/*} && return 0
        done
    fi
    for stb_folder in /usr/local/include /usr/local/include/stb /usr/include /usr/include/stb; do
        [ -f "$stb_folder/stb_ds.h" ] && return 0
    done
    stb_folder=
    return 1
}

# The same steps by which moe.h looks for it.
setup_stb_flag() {
    stb_flag=$stb_folder
    [ -z "${STB_DS:-}" ] || return 0
    cat >"$scratch/finds.c" <<'PROBE'
#if !defined(__has_include)
#include "stb_ds.h"
#elif __has_include("stb_ds.h")
#include "stb_ds.h"
#else
#include <stb/stb_ds.h>
#endif
PROBE
    $1 -E "$scratch/finds.c" >/dev/null 2>&1 </dev/null && stb_flag=
    return 0
}

# ---- programs that are kept ----

# Sets $program to the compiled examples/$1.c, by a command ($2...) that lacks only "-o FILE". It is
# kept in build/examples under a name that ends in a sum of the command and of its source and all
# headers, so that calls with other flags or headers, at the same time too, do not share it. What
# nobody has run for a day is removed. Where the checkout cannot be written it is made in $scratch.
setup_program() { # name command...
    setup_name=$1
    shift
    setup_kept=$root/build/examples
    { mkdir -p "$setup_kept" && [ -w "$setup_kept" ]; } 2>/dev/null || setup_kept=$scratch
    setup_sum=$(echo "$* $(setup_sum_of_sources)" | cksum)
    program=$setup_kept/$setup_name.${setup_sum%% *}
    touch -c "$program"
    [ ! -x "$program" ] || return 0
    setup_say "compiling $setup_name, about $(cat "$setup_kept/seconds" 2>/dev/null || echo 10) s"
    setup_began=$(date +%s)
    "$@" -o "$program.$$" || return 1
    mv "$program.$$" "$program" || return 1
    echo $(($(date +%s) - setup_began + 1)) >"$setup_kept/seconds"
    find "$setup_kept" -name "$setup_name.*" -mtime +0 -exec rm -f {} +
}

setup_sum_of_sources() {
    find "$root"/moe*.h "$root/examples" \( -name '*.h' -o -name "$setup_name*.c" \) -exec cat {} + | cksum
}

# ---- the programs of the tests ----

setup_source() ( # name, from the repository's folder
    set +f
    for path in tests/*/"$1".c; do
        [ ! -f "$path" ] || echo "$path"
    done
)

# ---- the compile line of a program ----

# The first line of the first comment that starts with a compiler's name and has a C file on it; the
# comment is cut off at && ; ` or two spaces, a backslash at the end continues it.
find_compile_line() {
    awk '
        { ended = index($0, "*/") > 0; sub(/\*\/.*/, ""); sub(/^[ \t]*\/\*+/, ""); sub(/^[ \t]*\*?[ \t]*(\$ +)?/, "") }
        more { line = line " " $0 }
        !more && match($0, /(^|[ `(])(cc|gcc|clang|c99) -/) {
            line = substr($0, RSTART)
            sub(/^[ `(]/, "", line)
            found = 1
        }
        found { more = sub(/[ \t]*\\$/, "", line) }
        found && !more && line !~ /\.c( |$)/ { found = 0 }
        found && !more { sub(/[ \t]*(&&|;|`|\)|  |\t).*/, "", line); print line; exit }
        ended { exit }' "$1"
}
