#!/bin/sh
# Mutation testing (tests/quality/mutate.py): sh tests/quality/mutation.sh [OPTION of mutate.py...].
# Without options a sample small enough for every submission, about 250 processor seconds: of 36
# mutants of the day's seed (MUTATION_SEED names another) half must be killed by the programs that
# fit them. In 12 seconds for each, 35 of 57 were in two samples: luck may fail a good tree. The
# sample to judge the tests by takes an hour of an idle core:
#     sh tests/quality/mutation.sh -n 500 -s 1 -v
unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
. tests/setup.sh
setup_wants python3 tcc
setup_scratch
setup_stb
[ $# -gt 0 ] || set -- -n 36 -s "${MUTATION_SEED:-$(date -u +%Y%m%d)}" --sample --each 12 --bar 50
STB_DS=$stb_folder python3 tests/quality/mutate.py "$@"
