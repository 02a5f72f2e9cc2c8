# Sourced after tests/setup.sh by tests/run, tests/checks.sh and .ci/run: work that the processors
# share. POSIX sh.
#
#   jobs_run FILE    for each line of FILE: job_work NUMBER LINE on one of $JOBS lanes, and when it
#                    has ended job_show NUMBER LINE in the calling shell. LINE is one word.
#   jobs_seconds NUMBER   prints how many seconds of a processor a job took
#   JOBS             a number [that of the processors]
#
# The caller brings both functions. job_work leaves what job_show wants in files $jobs/NUMBER.*, and
# has a folder $scratch of its lane's own; what it prints is lost. NUMBER.ended is there when it
# came to its end: job_show is called for all lines, also when a lane was killed. $jobs_shown of
# $jobs_total have been shown, this one included.

jobs_count() {
    case ${JOBS:-} in
    '' | *[!0-9]* | 0*) getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2 ;;
    *) echo "$JOBS" ;;
    esac
}

# Takes the next line that no other lane has taken: a folder can be made once only.
jobs_lane() { # file
    jobs_number=0
    while read -r jobs_line; do
        jobs_number=$((jobs_number + 1))
        mkdir "$jobs/$jobs_number.taken" 2>/dev/null || continue
        (
            job_work "$jobs_number" "$jobs_line" >/dev/null 2>&1 </dev/null
            times >"$jobs/$jobs_number.times"
        )
        : >"$jobs/$jobs_number.ended"
        echo "$jobs_number"
    done <"$1"
}

jobs_lanes() { # file
    jobs_started=0
    jobs_most=$(jobs_count)
    while [ "$jobs_started" -lt "$jobs_most" ]; do
        jobs_started=$((jobs_started + 1))
        (
            scratch=$scratch/lane$jobs_started
            mkdir -p "$scratch"
            jobs_lane "$1"
        ) &
    done
    wait
}

# ^C, which goes to all of a terminal's group, is ignored by what a shell runs in the background: it
# would go on after its folder is gone.
jobs_interrupted() {
    trap '' TERM
    kill -s TERM 0
    exit 130
}

# The lanes write the number of each job that ended; when the last lane has ended, so does what is
# read.
jobs_run() { # file
    jobs=$scratch/jobs
    rm -rf "$jobs"
    mkdir "$jobs" && mkfifo "$jobs/ended" || setup_die "cannot make a pipe in $scratch"
    jobs_total=$(awk 'END { print NR }' "$1")
    jobs_shown=0
    trap jobs_interrupted INT
    jobs_lanes "$1" >"$jobs/ended" &
    while read -r jobs_number <&3; do jobs_show "$jobs_number" "$1"; done 3<"$jobs/ended"
    wait
    jobs_number=0
    while [ "$jobs_number" -lt "$jobs_total" ]; do
        jobs_number=$((jobs_number + 1))
        [ -e "$jobs/$jobs_number.shown" ] || jobs_show "$jobs_number" "$1"
    done
    trap 'exit 130' INT
}

jobs_show() { # number file
    : >"$jobs/$1.shown"
    jobs_shown=$((jobs_shown + 1))
    job_show "$1" "$(sed -n "${1}p" "$2")"
}

# The shell's own line and that of its children, as times writes them: 0m1.25s 0m0.10s.
jobs_seconds() { # number
    awk '
        { for (i = 1; i <= 2; i++) { split($i, part, /[ms]/); all += part[1] * 60 + part[2] } }
        END { printf "%.1f", all }' \
        "$jobs/$1.times" 2>/dev/null || echo 0
}
