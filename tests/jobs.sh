# Sourced after tests/setup.sh by tests/run, tests/checks.sh and .ci/run: work that the processors share. POSIX sh.
#
#   jobs_run FILE    for each line of FILE: job_work NUMBER LINE on one of $JOBS lanes, and then, in the order of the lines and as soon as
#                    all before it have ended, job_show NUMBER LINE in the calling shell. LINE is one word.
#   JOBS             a number [that of the processors]
#
# The caller brings both functions. job_work leaves what job_show wants in files $jobs/NUMBER.*, and has a folder $scratch of its lane's own;
# what it prints is lost. NUMBER.ended is there when it came to its end: job_show is called for all lines, also when a lane was killed.

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
        job_work "$jobs_number" "$jobs_line" >/dev/null 2>&1 </dev/null
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

# The lanes write a line for each job that ended; when the last lane has ended, so does what is read.
jobs_run() { # file
    jobs=$scratch/jobs
    rm -rf "$jobs"
    mkdir "$jobs" && mkfifo "$jobs/ended" || setup_die "cannot make a pipe in $scratch"
    jobs_lanes "$1" >"$jobs/ended" &
    jobs_shown=0
    while read -r _ <&3; do jobs_show "$1"; done 3<"$jobs/ended"
    wait
    jobs_total=$(awk 'END { print NR }' "$1")
    while [ "$jobs_shown" -lt "$jobs_total" ]; do jobs_next "$1"; done
}

# All that can be shown by now.
jobs_show() { # file
    while [ -e "$jobs/$((jobs_shown + 1)).ended" ]; do jobs_next "$1"; done
}

jobs_next() { # file
    jobs_shown=$((jobs_shown + 1))
    job_show "$jobs_shown" "$(sed -n "${jobs_shown}p" "$1")"
}
