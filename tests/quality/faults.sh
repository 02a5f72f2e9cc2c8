#!/bin/sh
# Faults that a maintainer makes (tests/quality/faults.py): sh tests/quality/faults.sh [OPTION of
# faults.py...]. Without options twelve of them, drawn by the commit (FAULTS_SEED is another seed),
# so that a run can be repeated. All of them are caught: any draw passes until a test is lost.
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
. tests/setup.sh
setup_wants python3 tcc
setup_scratch
setup_stb
[ $# -gt 0 ] || set -- -n 12 -s "${FAULTS_SEED:-$(git rev-parse HEAD 2>/dev/null || cksum <tests/quality/faults.txt)}"
STB_DS=$stb_folder python3 tests/quality/faults.py "$@"
