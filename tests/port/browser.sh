#!/bin/sh
# Looks at pages in Chromium: narrow and wide, light and dark; no error, no network, no scrolling
# sideways, accessible by axe-core, every picture in words.
# sh tests/port/browser.sh [-v] [-o FOLDER] [WORD]     the control pages and those that the examples
#                                                     make; -o keeps the screenshots
# sh tests/port/browser.sh [-v] [-o FOLDER] PAGE...    these .html and .svg files
# playwright-core and axe-core come from npm into a folder of the user's cache (MOE_BROWSER names
# another). CHROMIUM: the browser's program.

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

CHROMIUM=${CHROMIUM:-$(command -v chromium || echo /usr/bin/chromium)}
export CHROMIUM
# playwright-core 1.60 runs with node 18, Debian's.
packages='playwright-core@1.60.0 axe-core@4.14.1'
modules=${MOE_BROWSER:-${XDG_CACHE_HOME:-$HOME/.cache}/moe-browser}/$(echo "$packages" | tr ' ' '+')

# ---- what is called with ----

absolute() { # path
    case $1 in
    /*) echo "$1" ;;
    *) echo "$caller/$1" ;;
    esac
}

verbosely=
word=
shots=
pages=
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help) setup_help && exit ;;
    -v) verbosely=-v ;;
    -o)
        [ -n "${2:-}" ] || setup_usage 'browser.sh: -o needs a folder; see -h'
        shots=$(absolute "$2")
        mkdir -p "$shots" || setup_die "$shots: cannot be made"
        shift
        ;;
    *.html | *.svg)
        pages="$pages
$(absolute "$1")"
        [ -f "$(absolute "$1")" ] || setup_die "$1: there is no such file"
        ;;
    *) word=$1 ;;
    esac
    shift
done

# ---- pages with one fault each ----

# Rule, width, scheme, and what makes the fault; at the other width or in the other scheme, where
# that is given, there is none.
faults() {
    setup_joined <<'TABLE'
color-contrast   360  light  <p style="color: #999; background: #fff">too faint</p>
color-contrast   360  dark   <p class="night">too faint at night</p>
svg-contrast     1280 light  <svg role="img" aria-label="a word" width="200" height="40">
    <rect width="200" height="40" fill="#fff"/><text x="9" y="20" fill="#aaa">too faint</text></svg>
svg-contrast     1280 dark   <svg role="img" aria-label="a word" width="200" height="40">
    <text x="9" y="20" fill="#000">black on black</text></svg>
text-alternative 360  light  <canvas width="20" height="20"></canvas>
text-alternative 1280 light  <svg width="20" height="20"><rect width="20" height="20"/></svg>
text-alternative 1280 dark   <img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=" width="20" height="20">
image-alt        1280 light  <img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=" width="20" height="20">
overflow         360  light  <div style="width: 600px">wide</div>
label            360  light  <input type="text">
button-name      360  light  <button></button>
console          1280 light  <script>throw new Error('planted')</script>
console          1280 dark   <script>console.error('planted')</script>
network          1280 light  <img alt="a picture" src="http://127.0.0.1:9/x.png">
shows-words      360  light  <script>document.body.replaceChildren()</script>
TABLE
}

control_page() { # what is on it
    cat <<TEXT
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>A page</title>
<style>
:root { color-scheme: light dark; background: #fff; color: #111 }
@media (prefers-color-scheme: dark) { :root { background: #111; color: #eee } }
@media (prefers-color-scheme: dark) { .night { color: #333; background: #222 } }
</style>
<main>
<h1>A page</h1>
<p class="night">Words that can be read.</p>
$1
</main>
</html>
TEXT
}

# ---- checks: a line is a function and its arguments ----

prepare() {
    shots=${shots:-$prepared/shots}
    mkdir -p "$shots" "$prepared/pages"
    [ -n "$pages" ] || make_reports >"$prepared/reports.log" 2>&1
    [ -n "$pages" ] || sh examples/run web -o "$prepared/web.html" >"$prepared/web.log" 2>&1
    [ -d "$modules/node_modules/playwright-core" ] && [ -d "$modules/node_modules/axe-core" ] && return 0
    setup_tool npm || return 0 # the checks say what is missing
    new=$modules.$$
    mkdir -p "$new" || return 1
    # shellcheck disable=SC2086
    if npm install --prefix "$new" --no-save --no-audit --no-fund --ignore-scripts $packages >"$prepared/npm.log" \
        2>&1 && rm -rf "$modules" && mv "$new" "$modules"; then
        return 0
    fi
    rm -rf "$new"
    cat "$prepared/npm.log" >&2
}

plan() {
    if [ -n "$pages" ]; then
        echo "$pages" | grep . | while read -r page; do everywhere "page $page"; done
        return
    fi
    everywhere control
    everywhere web
    for report in $reports; do everywhere "report $report"; done
    echo 'clean_c'
    echo 'refuses 1 a_folder -o .'
    echo 'refuses 1 missing/page.html -o missing/page.html'
    echo 'refuses 2 --what --what'
    number=0
    faults | while read -r rule width scheme _; do
        number=$((number + 1))
        echo "finds $number $rule $width $scheme"
    done
    echo 'only_narrow overflow'
    echo 'only_dark color-contrast'
}

# The reports that are looked at: figures of all kinds, and what examples write. NAME.html and
# NAME-picture.svg are made of each.
reports='kinds quickstart routers quantize'

# By tcc where it is there: others take longer to compile than the programs take to run.
make_reports() {
    setup_compiler_quietly
    setup_stb
    maker=$CC
    ! setup_tool tcc || maker=tcc
    setup_stb_flag "$maker"
    for report in $reports; do
        program=examples/$report.c
        [ "$report" != kinds ] || program=tests/unit/report.c
        # shellcheck disable=SC2086
        $maker -std=c99 -O0 -DMOE_NO_SIMD -I"$root" ${stb_flag:+-I"$stb_flag"} "$program" -o "$prepared/$report" -lm ||
            return 1
        for ending in html svg; do
            case $report in
            kinds) set -- page ;;
            quickstart) set -- --epochs 3 -o "$prepared/net" --report ;;
            quantize) set -- --epochs 1 --report ;;
            routers) set -- smoe --report ;;
            esac
            [ "$ending" = html ] || set -- "$@" "$prepared/$report-picture.svg"
            [ "$ending" = svg ] || set -- "$@" "$prepared/$report.html"
            "$prepared/$report" "$@" || return 1
        done
    done
}

# A report as a page, and its picture alone.
report() { # name width scheme
    needs_browser
    if ! [ -f "$prepared/$1.html" ] || ! [ -f "$prepared/$1-picture.svg" ]; then
        cat "$prepared/reports.log"
        return 1
    fi
    page "$prepared/$1.html" "$2" "$3" && page "$prepared/$1-picture.svg" "$2" "$3"
}

everywhere() { # function and its arguments
    for width in 360 1280; do
        for scheme in light dark; do echo "$1 $width $scheme"; done
    done
}

needs_browser() {
    needs node
    needs "$CHROMIUM"
    [ -d "$modules/node_modules/axe-core" ] && return 0
    [ "${REQUIRE_TOOLS:-0}" = 1 ] || missing "what npm installs ($packages)"
    echo "npm, which installs $packages, is not there or has failed"
    exit 1
}

look() { # page width scheme [scenario]
    node "$root/tests/port/browser.mjs" "$modules" "$shots" "$@" >looked 2>&1
}

page() { # file width scheme [scenario]
    needs_browser
    look "$@" && passed_all looked && return 0
    grep -v '^ok: ' looked
    return 1
}

# The page of examples/web, worked by tests/port/web.mjs.
web() { # width scheme
    needs_browser
    if ! [ -f "$prepared/web.html" ]; then
        [ "${REQUIRE_TOOLS:-0}" = 1 ] || ! grep -q ' is missing\.' "$prepared/web.log" ||
            missing 'a compiler for WebAssembly'
        cat "$prepared/web.log"
        return 1
    fi
    page "$prepared/web.html" "$@" "$root/tests/port/web.mjs"
}

# The status (2: no such option), the name of what is wrong, and nothing written.
refuses() { # status name arguments...
    wanted=$1
    name=$2
    shift 2
    [ "$name" = a_folder ] && name='is a folder'
    sh "$root/examples/run" web "$@" >said 2>&1
    [ $? = "$wanted" ] && grep -qF -- "${name%/page.html}" said && [ "$(ls)" = said ] && return 0
    cat said
    return 1
}

# The page's program has no warning, and its constants are those of the page.
clean_c() {
    setup_stb_flag "$CC"
    # shellcheck disable=SC2046
    run ${CC%% *} $(strict_flags "$CC") -DMOE_NO_SIMD -I"$root" ${stb_flag:+-I"$stb_flag"} -fsyntax-only \
        "$root/examples/web/web.c" || return 1
    # Each enumeration in a line of its own, whatever lines it has in the file.
    tr -s ' \n' '  ' <"$root/examples/web/web.c" | sed 's/enum {/\n&/g' >enumerations
    {
        sed -n 's/^enum { \(STEPS, .*, LOADS\),.*/\1/p' enumerations | tr -d ' ' | tr ',' '\n' |
            awk '{ print $1 " = " NR - 1 }'
        sed -n 's/^enum { \(MAX_POINTS = [^}]*\) };.*/\1/p' enumerations | tr ',' '\n' | sed 's/^ //'
    } >program
    sed -n '/^const STEPS = /,/^$/p' "$root/examples/web/page.html" | grep -oE '[A-Z_]+ = [0-9]+' >page
    [ "$(wc -l <page)" -ge 15 ] && empty 'page.html has other numbers than web.c:' "$(grep -vxF -f program page)"
}

control() { # width scheme
    control_page '' | grep -v night >control.html
    page "$PWD/control.html" "$@"
}

fault_page() { # number
    control_page "$(faults | sed -n "$1p" | sed 's/^[^<]*//')" >fault.html
}

# Found, by that rule, and nothing else that has no part in it.
finds() { # number rule width scheme
    needs_browser
    fault_page "$1"
    [ "$2.$4" = color-contrast.dark ] || sed '/night/d' fault.html >kept && mv kept fault.html
    look fault.html "$3" "$4" && echo 'no fault was found' && return 1
    grep -q "^failed: fault.html $3 $4 $2" looked && return 0
    cat looked
    return 1
}

# What is wrong at one width is found there alone: the width and the scheme are the ones asked for.
only_narrow() { # rule
    needs_browser
    fault_page "$(faults | awk -v rule="$1" '$1 == rule { print NR; exit }')"
    sed '/night/d' fault.html >wide.html
    page "$PWD/wide.html" 1280 light
}

only_dark() { # rule
    needs_browser
    control_page '' >night.html
    page "$PWD/night.html" 360 light || return 1
    look night.html 360 dark && echo 'no fault was found' && return 1
    grep -q "^failed: night.html 360 dark $1" looked
}

run_checks ${verbosely:+-v} "$word"
