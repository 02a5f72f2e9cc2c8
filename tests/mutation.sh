#!/bin/sh
# Mutation testing (tests/mutate.py): sh tests/mutation.sh [OPTION of mutate.py...]. Without options a sample small enough for every submission: 12
# mutants of the day's seed (MUTATION_SEED names another), quick programs only, so the bar is much lower: luck alone must not fail. The sample to judge the tests by, some minutes on an idle core:
#     sh tests/mutation.sh -n 500 -s 1 -v
cd -- "$(dirname -- "$0")/.." || exit 1
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
[ $# -gt 0 ] || set -- -n 12 -s "${MUTATION_SEED:-$(date -u +%Y%m%d)}" --quick 2 --bar 40
STB_DS=$stb_folder python3 tests/mutate.py "$@"
