#!/bin/sh
# Tests examples/chat.c on a small model with a vocabulary, and without: replies, options, the
# report, Ctrl-C, and what is wrong with arguments and files is said. sh
# tests/examples/examples_chat.sh [-v] [WORD], as tests/port/headers.sh.

LC_ALL=C
export LC_ALL
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
root=$PWD
. tests/setup.sh
. tests/checks.sh

prepare() {
    # CC may hold several words.
    # shellcheck disable=SC2046,SC2086
    $CC $(strict_flags "$CC") -O1 -DMOE_NO_SIMD -I"$root" examples/chat.c -o "$prepared/chat" -lm -pthread || return 1
    python3 tests/examples/chat_model.py "$prepared/model.gguf" || return 1
    python3 tests/examples/chat_model.py "$prepared/plain.gguf" --no-words || return 1
    python3 tests/examples/chat_model.py "$prepared/lacks_z.gguf" --lacks-z || return 1
    python3 tests/examples/chat_model.py "$prepared/long" --longrope || return 1
    head -c 30000 "$prepared/model.gguf" >"$prepared/short.gguf"
    mkdir -p "$prepared/empty"
}

plan() {
    cat <<'TEXT'
prompt
repeats
conversation
cannot_be_read
full_screen
numbers
context
report
fewer
interrupt
controls
help
refused 2 -h_lists --fast
refused 2 needs_a_value model.gguf --seed
refused 2 must_be model.gguf --top-p 2
refused 2 which_model
refused 2 a_second_model model.gguf model.gguf
refused 2 name_its_folder folder/model.safetensors.index.json --prompt x
refused 1 cannot_open none.gguf --prompt x
refused 1 short.gguf short.gguf --prompt x
refused 1 cannot_open empty --prompt x
refused 1 write_token_ids plain.gguf --prompt words
refused 1 has_no_token_ids plain.gguf --prompt ,
refused 1 context_is_full model.gguf --prompt abcdefghijkl --context 8
refused 1 needs_a_model_with_a_vocabulary plain.gguf --prompt 1 --system words
refused 2 leave_out_--system model.gguf --plain --system words
refused 2 a_report_is model.gguf --report page.pdf
refused 2 --kernels model.gguf --kernels fast
TEXT
}

chat() { "$prepared/chat" "$@"; }

prompt() {
    run chat "$prepared/model.gguf" --prompt hello --tokens 12 --system kind >said || return 1
    grep -q 'llama, 2 blocks, 261 tokens of vocabulary' said && grep -q '^\[read .* wrote .* memory .*\]$' said
}

# The same seed writes the same, another one does not; threads change no bit.
repeats() {
    for way in '--seed 5' '--seed 5 --threads 3' '--seed 6' '--greedy' '--greedy --seed 6'; do
        # shellcheck disable=SC2086
        run chat "$prepared/model.gguf" --prompt hello --tokens 20 $way | sed '/^\[read/d' >said || return 1
        cksum <said >>sums
    done
    awk '{ sum[NR] = $1 } END { exit !(sum[1] == sum[2] && sum[1] != sum[3] && sum[4] == sum[5]) }' sums
}

# A second message continues; a full context starts over.
conversation() {
    printf 'hello\n\nand more\nagain\nonce more\n' >lines
    run chat "$prepared/model.gguf" --tokens 30 --context 120 --seed 3 <lines >said || return 1
    [ "$(grep -c '^\[read' said)" -eq 4 ] && grep -q 'starts over' said
}

# A message that cannot be read changes nothing, whether it is the first, whose conversation begins
# with the system message, or a later one, which begins with what closes the reply before; nor does
# one that is longer than the context.
cannot_be_read() {
    printf 'hello\nmore\n' >good
    printf 'hz\nhello\nz\nmore\n' >unreadable
    { head -c 400 /dev/zero | tr '\0' x && echo && cat good; } >long
    { sed 1q good && sed 1q long && sed 1d good; } >long_later
    { head -c 70000 /dev/zero | tr '\0' x && echo && cat good; } >longer
    for lines in good unreadable long long_later longer; do
        run chat "$prepared/lacks_z.gguf" --tokens 5 --greedy --system kind <$lines >said 2>errors || return 1
        sed -n 's/^\[read \([0-9]*\) tokens.*context \([0-9]* of [0-9]*\).*/\1 \2/p' said >>counts
        case $lines in good) continue ;; unreadable) words='has tokens that the model lacks' ;;
        longer) words='longer than 65535' ;; *) words='the context is full' ;; esac
        grep -q "$words" errors || return 1
    done
    [ "$(wc -l <counts)" -eq 10 ] && [ "$(sed -n 'p;n' counts | sort -u | wc -l)" -eq 1 ] &&
        [ "$(sed -n 'n;p' counts | sort -u | wc -l)" -eq 1 ] && return 0
    cat counts errors
    return 1
}

full_screen() {
    [ -c /dev/full ] || missing /dev/full
    ! chat "$prepared/model.gguf" --prompt hi --tokens 3 >/dev/full 2>said && grep -q 'chat: the output' said
}

numbers() {
    run chat "$prepared/plain.gguf" --prompt '1, 2 260' --tokens 5 --greedy >said || return 1
    grep -q 'no vocabulary' said && grep -qx '[0-9]* [0-9]* [0-9]* [0-9]* [0-9]*' said
}

# A model of a long context is told how long the conversation may be.
context() {
    for way in '' '--context 4096' '--context 9000'; do
        # shellcheck disable=SC2086
        run chat "$prepared/long.gguf" --prompt '1 2 3 4 5 6 7 8' --tokens 12 --greedy $way >said || return 1
        grep '^[0-9]' said >numbers && cksum <numbers >>sums || return 1
    done
    awk '{ sum[NR] = $1 } END { exit !(sum[1] == sum[2] && sum[1] != sum[3]) }' sums
}

report() {
    run chat "$prepared/model.gguf" --prompt 'hello there' --tokens 12 --report page.html >said || return 1
    for part in 'The text by expert' 'Entropies of every layer' 'Load by layer and expert' 'Layer 2: load'; do
        grep -q "$part" page.html || return 1
    done
}

fewer() {
    run chat "$prepared/model.gguf" --prompt hello --tokens 4 --experts 1 --exact --report - >said || return 1
    grep -q '^layer 2 *4.000 *1.000' said || grep -q 'layer 2.* 1.000' said
}

# The first interrupt ends the reply, the next message still gets one.
interrupt() {
    mkfifo lines
    "$prepared/chat" "$prepared/model.gguf" --tokens 200 --context 2000 --seed 3 <lines >said 2>&1 &
    pid=$!
    exec 3>lines
    echo first >&3
    until grep -q '^\[read' said; do sleep 0.1; done
    kill -INT $pid
    sleep 0.2
    kill -0 $pid || return 1
    echo second >&3
    exec 3>&-
    wait $pid && [ "$(grep -c '^\[read' said)" -eq 2 ] && return 0
    cat said
    return 1
}

# A random reply in which bytes make up U+0080 to U+009F, which some terminals obey.
controls() {
    run chat "$prepared/model.gguf" --prompt hello --tokens 400 --context 900 --temperature 100 --top-k 0 --top-p 1 \
        --seed 19 >said || return 1
    tr '\302' '<' <said | tr '\200-\237' '[>*]' >marked
    ! grep -q '<>' marked
}

help() { run chat --greedy -h >said && grep -q 'Ctrl-C ends a reply' said && grep -q -- '--experts' said; }

refused() { # status, what it says, with _ for spaces; arguments, files of which lie among those prepared
    expected=$1
    wanted=$(echo "$2" | tr _ ' ')
    shift 2
    here=$PWD
    (cd "$prepared" && ./chat "$@" >"$here/out" 2>&1 </dev/null)
    status=$?
    [ "$status" -eq "$expected" ] && grep -q -- "$wanted" out && return 0
    echo "status $status"
    cat out
    return 1
}

run_checks "$@"
