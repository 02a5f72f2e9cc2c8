#!/bin/sh
# Whether the table of Unicode classes in examples/extras/moe_import.h agrees with Python's.

unset CDPATH
caller=$PWD
cd -- "$(dirname -- "$0")/../.." || exit 1
. tests/setup.sh
setup_wants python3
exec python3 tests/quality/unicode.py
