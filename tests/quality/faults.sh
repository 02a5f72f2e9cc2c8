#!/bin/sh
# Faults that a maintainer makes (tests/quality/faults.py): sh tests/quality/faults.sh [OPTION of
# faults.py...]. Without options twelve of them, drawn by the commit (FAULTS_SEED is another seed),
# so that a run can be repeated. All of them are caught: any draw passes until a test is lost.
cd -- "$(dirname -- "$0")/../.." || exit 1
for tool in python3 tcc; do
    command -v "$tool" >/dev/null 2>&1 && continue
    echo "skip: $tool is not there"
    [ "${REQUIRE_TOOLS:-0}" = 1 ] && echo '0 passed, 1 failed' && exit 1
    echo '0 passed, 0 failed, 1 skipped'
    exit 0
done
. tests/setup.sh
setup_scratch
setup_stb
[ $# -gt 0 ] || set -- -n 12 -s "${FAULTS_SEED:-$(git rev-parse HEAD 2>/dev/null || cksum <tests/quality/faults.txt)}"
STB_DS=$stb_folder python3 tests/quality/faults.py "$@"
