#!/bin/sh
# Texts that the examples read: the seeds in tests/fuzz/corpus/texts and mutations of them, without
# a fuzzer. See tests/fuzz/fuzz.sh.
FUZZ_TARGETS=texts exec sh "$(dirname -- "$0")/fuzz.sh" corpus
