#!/bin/sh
# compile.sh [REVISION] [RUNS]: processor seconds to compile the core (moe.h with its
# implementation), gcc -O2 and, in plain C, -O1, against the headers of a revision (b43e510) without
# its "#pragma GCC optimize". The least of RUNS (5) runs, which alternate. Prints a table; nothing
# is judged.
case ${1:-} in
-h | --help) sed -n '2,5s/^# //p' "$0" && exit ;;
esac
revision=${1:-b43e510} runs=${2:-5} cc=${CC:-gcc}
root=$(cd "$(dirname "$0")/../.." && pwd) || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
mkdir old new || exit 1
for header in moe.h moe_routers.h moe_kernels.h; do
    git -C "$root" show "$revision:$header" >"old/$header" || exit 1
    cp "$root/$header" "new/$header" || exit 1
done
sed -i '/#pragma GCC optimize/d' old/*.h new/*.h
printf '#define MOE_IMPLEMENTATION\n#include "moe.h"\n' >core.c

# seconds FOLDER FLAGS: user and system time of one compilation
seconds() {
    folder=$1
    shift
    (sh -c "$cc -std=c99 -w $* -I$folder -I/usr/include/stb -c core.c -o core.o && times" || exit 1) |
        tail -n 1 | awk '{ split($1, u, /[ms]/); split($2, s, /[ms]/);
            printf "%.2f", 60 * (u[1] + s[1]) + u[2] + s[2] }'
}

printf '%-24s %10s %10s %8s\n' flags "$revision" now ratio
for flags in '-O2' '-O1 -DMOE_NO_SIMD'; do
    i=0
    : >times
    while [ $i -lt "$runs" ]; do
        echo "$(seconds old $flags) $(seconds new $flags)" >>times
        i=$((i + 1))
    done
    awk -v flags="$flags" 'NR == 1 || $1 < a { a = $1 } NR == 1 || $2 < b { b = $2 }
        END { printf "%-24s %10.2f %10.2f %7.0f%%\n", flags, a, b, 100 * b / a }' times
done
