#!/usr/bin/env python3
"""Writes tests/TRIED.md, the page of what was tried on the promises of the README, how long, what
was found, and what no test covers.

    .ci/run >ci.log 2>&1; python3 tests/quality/tried.py ci.log [LOG...] >tests/TRIED.md

LOG: the output of .ci/run or of tests/run; of a row that is in several (a longer run of the
fuzzers), all count. What is not covered comes from the lists of tests/quality, with their
reasons."""

import collections
import os
import re
import subprocess
import sys
import textwrap

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))

# The promises of the README, and the kinds of tests that try them.
PROMISES = [
    ('Bounds', 'robust fuzz_config fuzz sanitize static portability devices'),
    ('No side effects', 'failures ranks ranks_nets headers'),
    ('Untrusted files', 'fuzz fuzz_file files published'),
    ('Power', 'power histories'),
    ('Determinism', 'baseline saved_by_0_1 threads parallel state inference integers int_sequences ranks histories'),
    ('Numbers', 'robust gradients theory kernels quant'),
    ('The contract of the routers', 'golden oracle routers'),
    ('Tests that notice', 'coverage mutation faults'),
]
LISTS = [
    ('uncovered.txt', 'Lines that no test reaches', lambda line: int(line.split()[-1])),
    ('unreached.txt', 'Checks that no run reaches', lambda line: int(line.split()[-1])),
    ('mutants.txt', 'Changes of one place that no test notices, looked at', lambda line: 1),
]
NEVER = [
    'MSVC, and Windows outside of Wine; macOS; 64-bit big-endian machines outside of emulators',
    'NEON, RISC-V and WebAssembly on real processors: they were emulated, so their speed is unknown',
    'microcontrollers as boards: they were emulated, with instructions counted',
    'several machines with a network between them: ranks ran on one machine',
    'more than 2 processors at once, and more memory than 24 GiB',
]
ROW = re.compile(r'^(\S+) +(\S+) +(\d+) +(\d+) +(\d+) +(\d+\.\d)(?: +\d+ of \d+.*)?$')


class Kind:
    def __init__(self):
        self.builds, self.passed, self.failed, self.skipped, self.seconds, self.notes = [], 0, 0, 0, 0.0, []


def read_logs(paths):
    """{kind: what its rows say}. A build of two words, as gcc,float, is one under sanitizers."""
    kinds = collections.OrderedDict()
    for path in paths:
        kind = None
        with open(path, errors='replace') as log:
            for line in log:
                row = ROW.match(line.rstrip())
                if row:
                    name, build, passed, failed, skipped, seconds = row.groups()
                    kind = kinds.setdefault('sanitize' if ',' in build else name, Kind())
                    if build not in kind.builds and build != '-':
                        kind.builds.append(build)
                    kind.passed += int(passed)
                    kind.failed += int(failed)
                    kind.skipped += int(skipped)
                    kind.seconds += float(seconds)
                elif kind and line.startswith('    note: '):
                    kind.notes.append(line[len('    note: '):].strip())
                elif not line.startswith('    '):
                    kind = None
    return kinds


def total(kinds):
    return (sum(k.passed + k.failed for k in kinds), sum(k.failed for k in kinds), sum(k.skipped for k in kinds),
            sum(k.seconds for k in kinds))


def print_item(text):
    print(textwrap.fill('- ' + text, 100, subsequent_indent='  ', break_long_words=False, break_on_hyphens=False))


def print_promises(kinds):
    print('| promise | tests | cases | failures | processor minutes |\n|---|---|---:|---:|---:|')
    for promise, names in PROMISES:
        found = [name for name in names.split() if name in kinds]
        cases, failures, _, seconds = total([kinds[name] for name in found])
        missing = ['%s (not run)' % name for name in names.split() if name not in kinds]
        print('| %s | %s | %d | %d | %.1f |' % (promise, ', '.join(found + missing), cases, failures, seconds / 60))


def print_kinds(kinds):
    print('| kind | builds | cases | failures | skipped | processor seconds |\n|---|---|---:|---:|---:|---:|')
    for name in sorted(kinds):
        k = kinds[name]
        print('| %s | %s | %d | %d | %d | %.0f |' %
              (name, ', '.join(k.builds), k.passed + k.failed, k.failed, k.skipped, k.seconds))


def print_notes(kinds):
    for name in sorted(kinds):
        notes = [note for note in kinds[name].notes if not re.match(r'-?\d+ processor seconds$', note)]
        if not notes:
            continue
        print('\n**%s**\n' % name)
        for note in notes:
            for line in textwrap.wrap(re.sub(' +', ' ', note), 96, subsequent_indent='  '):
                print('    ' + line)


def reasons(name, count):
    """[(reason, how many)] of a list: paragraphs of a reason and what stands under it."""
    with open(os.path.join(HERE, name)) as f:
        paragraphs = f.read().strip().split('\n\n')
    found = []
    for paragraph in paragraphs:
        lines = paragraph.split('\n')
        is_row = [bool(re.match(r'\s|(\w+ )?\w+ \d+$', line)) for line in lines]
        rows = [line for line, row in zip(lines, is_row) if row and line.strip()]
        if rows:
            text = ' '.join(line for line, row in zip(lines, is_row) if not row)
            found.append((text, sum(count(row) for row in rows)))
    return found


def print_lists():
    for name, title, count in LISTS:
        found = reasons(name, count)
        print('\n**%s** ([%s](quality/%s)): %d\n' % (title, name, name, sum(n for _, n in found)))
        for text, n in sorted(found, key=lambda row: -row[1]):
            print_item('%d: %s' % (n, text.rstrip('.:')))


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith('-'):
        print(__doc__)
        return 0 if '-h' in sys.argv else 2
    kinds = read_logs(sys.argv[1:])
    if not kinds:
        sys.exit('tried.py: no rows of tests in %s' % ' '.join(sys.argv[1:]))
    commit = subprocess.run(['git', '-C', ROOT, 'log', '-1', '--format=%h, %cs'], stdout=subprocess.PIPE,
                            universal_newlines=True).stdout.strip()
    cases, failures, skipped, seconds = total(kinds.values())
    print('''# What was tried, and what was not

Written by [tests/quality/tried.py](quality/tried.py) from the output of `.ci/run` on commit
%s: %d cases, %d failures, %d skipped, %.0f processor minutes on x86-64.
A case is a function of a test program, a golden case, a planted fault, a compile or a run; most
make many checks.

## The promises of the README
''' % (commit, cases, failures, skipped, seconds / 60))
    print_promises(kinds)
    print('\n## Every kind of test\n')
    print_kinds(kinds)
    print('\n## What they printed')
    print_notes(kinds)
    print('\n## What is not covered\n\nNever tried:\n')
    for line in NEVER:
        print_item(line)
    print_lists()
    return 0


if __name__ == '__main__':
    sys.exit(main())
