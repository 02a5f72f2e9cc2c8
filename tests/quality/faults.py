#!/usr/bin/env python3
"""Plants the faults of faults.txt and looks whether the test program named there notices each.

    python3 tests/quality/faults.py [-n COUNT] [-s SEED] [-v] [FUNCTION...]

    -n COUNT     so many of the faults, drawn by -s SEED, a text (all)
    FUNCTION...  only the faults in these functions
    -v           a line for each fault that is caught too

mutate.py changes single operators; these are what a maintainer gets wrong. A fault in faults.txt:

    FUNCTION, PROGRAM [BUILD]: what goes wrong
        - text of the function, or of a macro or a table
        + what stands there instead

The text must occur once in the function; white space does not count, so that a fault survives
edits around it. There may be several pairs of - and +. Programs and builds are those of mutate.py,
without BUILD the program's first row that makes no second program. A program must pass without the
fault. It catches the fault if it fails, crashes, or takes ten times as long. The last line is "N
passed, N failed": faults that are caught; faults that are missed, do not compile, or whose text is
not found."""

import argparse
import os
import random
import re
import resource
import sys
import tempfile

import mutate


class Fault:
    def __init__(self, line, number):
        head = re.match(r'(\w+), (\w+)(?: (\w+))?: (.+)', line)
        if not head:
            sys.exit('faults.txt:%d: not "FUNCTION, PROGRAM [BUILD]: what goes wrong"' % number)
        self.function, self.program, self.build, self.what = head.groups()
        self.edits = []  # [text, replacement]

    def planted(self, headers):
        """{name of a header: its text with the fault}, or None if a text is not there once."""
        changed = {}
        for text, replacement in self.edits:
            pattern = re.compile(r'\s*'.join(re.escape(t.text) for t in mutate.tokens_of(text, 0, len(text))))
            found = [(h, m) for h in headers for m in pattern.finditer(changed.get(h.name, h.text))
                     if name_of(h, m.start(), changed) == self.function]
            if len(found) != 1:
                return None
            h, m = found[0]
            before = changed.get(h.name, h.text)
            changed[h.name] = before[:m.start()] + replacement + before[m.end():]
        return changed or None


def name_of(header, offset, changed):
    """The function around a place in a text of which later parts may have moved."""
    moved = len(changed.get(header.name, header.text)) - len(header.text)
    name = header.name_of(offset)
    return name if not moved or name == header.name_of(offset - moved) else '-'


def read_faults():
    faults = []
    with open(os.path.join(mutate.ROOT, 'tests', 'quality', 'faults.txt')) as file:
        for number, line in enumerate(file, 1):
            word = line.strip()[:1]
            if line[:1].strip() and word != '#':
                faults.append(Fault(line.strip(), number))
            elif word == '-':
                faults[-1].edits.append([line.strip()[1:].strip(), ''])
            elif word == '+':
                faults[-1].edits[-1][1] = line.strip()[1:].strip()
    return faults


def row_of(fault):
    rows = [words.split() for words in mutate.ROWS.strip().split('\n')]
    found = [r for r in rows if r[0] == fault.program and fault.build in (None, r[1]) and ' '.join(r[::2][:2])
             not in mutate.SECOND]
    return mutate.Row(found[0]) if found else None


def compiles(place, row):
    """The library, if the program is linked with it, and the program."""
    if row.linked and not (place.compile(row.build, '-c', 'library.c', '-o', 'library.o') and
                           place.compile(row.build, '-DTEST_LINKED', '-c', mutate.SOURCES[row.name], '-o', row.object)):
        return False
    return place.compile(row.build, *row.sources(place, 'library.o'), '-lm', '-o', 'program')


def seconds_used():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def judge(fault, place, headers, usual):
    """"caught", or what is wrong. usual: seconds of the programs that pass without a fault."""
    row, changed = row_of(fault), fault.planted(headers)
    if row is None:
        return 'mutate.py has no such program'
    if changed is None:
        return 'its text is not there once'
    if row.version not in usual:
        before = seconds_used()
        good = compiles(place, row) and not row.run(place, 1000)
        usual[row.version] = seconds_used() - before if good else None
    if usual[row.version] is None:
        return 'the program does not pass without it'
    for name, text in changed.items():
        place.write(name, text)
    try:
        if not compiles(place, row):
            return 'does not compile'
        return 'caught' if row.run(place, int(10 * usual[row.version]) + 5) else 'missed'
    finally:
        for header in headers:
            if header.name in changed:
                place.write(header.name, header.text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('-n', type=int)
    parser.add_argument('-s', default='1')
    parser.add_argument('-v', action='store_true')
    parser.add_argument('functions', nargs='*')
    options = parser.parse_args()
    headers = [mutate.Header(mutate.ROOT, name) for name in mutate.HEADERS]
    faults = [f for f in read_faults() if not options.functions or f.function in options.functions]
    if options.n is not None:
        faults = random.Random(options.s).sample(faults, min(options.n, len(faults)))
    usual, caught = {}, 0
    with tempfile.TemporaryDirectory(prefix='moe.faults.') as folder:
        place = mutate.Place(os.path.join(folder, 'place'))
        for fault in faults:
            verdict = judge(fault, place, headers, usual)
            caught += verdict == 'caught'
            if options.v or verdict != 'caught':
                print('%s: %s (%s): %s' % (verdict, fault.function, fault.program, fault.what), flush=True)
    print('%d passed, %d failed' % (caught, len(faults) - caught))
    return caught < len(faults) or not faults


if __name__ == '__main__':
    sys.exit(main())
