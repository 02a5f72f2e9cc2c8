#!/bin/sh
# Whether the table of Unicode classes in examples/extras/moe_import.h agrees with Python's.

cd -- "$(dirname -- "$0")/../.." && exec python3 tests/quality/unicode.py
