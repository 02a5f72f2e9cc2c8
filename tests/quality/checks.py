"""Which checks of the test programs no run has reached: see coverage.sh.

  checks.py split SOURCE OUT           writes a copy of a program in which every check begins a line
  checks.py reached FOLDER UNREACHED   runs gcov on each .gcda of FOLDER that is of such a copy, and
                                       compares the checks that nothing reached with UNREACHED
  checks.py same                       comparisons of a thing with itself and checks that assign, in
                                       all test programs
  checks.py self                       whether an empty loop, a case that is not called and a branch
                                       that is not taken are seen

A check is a call of CHECK..., of a macro that has one, or of a function of the program that makes
one. A loop that runs zero times, a case that is not in main, or a branch that no data takes leaves
its checks unreached: it passes whatever the library does. A check is reached if it is in one of the
builds and calls of a program."""

import collections
import glob
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..')
PIECES = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
DIRECTIVE = re.compile(r'^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', re.M)
FUNCTION = re.compile(r'^[A-Za-z_][^;{}#=]*?(\w+)\([^;{}#=]*\)\s*\{', re.M)
MACRO = re.compile(r'#\s*define\s+(\w+)')


def bare(text):
    """The text without comments and without what stands in strings, of the same length."""
    def cover(m):
        return re.sub(r'[^\n]', ' ', m.group())
    return PIECES.sub(cover, text)


def functions_of(code):
    """[(name, offset behind the brace, end)]"""
    found = []
    for m in FUNCTION.finditer(code):
        end = code.find('\n}', m.end() - 1)
        line = code.find('\n', m.end())
        if code[m.end():line].rstrip().endswith('}'):
            end = line
        found.append((m.group(1), m.end(), end if end >= 0 else len(code)))
    return found


def calls_of(names, code):
    return re.finditer(r'\b(?:%s)\(' % '|'.join(sorted(names)), code)


def checkers(code, bodies):
    """The names of all that checks: macros and functions that call one of them."""
    names = {'CHECK', 'CHECKF', 'CHECK_AT', 'CHECK_STATUS', 'CHECK_STATUS_AT', 'CHECK_NEAR', 'CHECK_NEAR_AT'}
    bodies = bodies + [(MACRO.match(m.group().strip()).group(1), m.start() + len(m.group().split('(')[0]), m.end())
                       for m in DIRECTIVE.finditer(code) if MACRO.match(m.group().strip())]
    while True:
        more = {name for name, start, end in bodies
                if name not in names and next(calls_of(names, code[start:end]), None)}
        if not more:
            return names
        names |= more


def sites_of(text):
    """The offsets of all checks and their functions. Not those of macros, which count where the
    macros are used, nor of arguments of other checks, nor the calls that only say that a check
    elsewhere has failed: CHECK(0)."""
    code = bare(text)
    code = DIRECTIVE.sub(lambda m: re.sub(r'[^\n]', ' ', m.group()), code)
    bodies = functions_of(code)
    names = checkers(bare(text), bodies)
    found, behind = [], 0
    for function, start, end in bodies:
        for m in calls_of(names, code[start:end]):
            at = start + m.start()
            if at < behind:
                continue
            behind = end_of_call(code, start + m.end())
            if not FAILS.match(text, start + m.end()):
                found.append((at, function))
    return found


FAILS = re.compile(r'(?:f, |line, )?(?:0[,)]|!")')


def end_of_call(code, at):
    depth = 1
    while depth > 0 and at < len(code):
        depth += (code[at] == '(') - (code[at] == ')')
        at += 1
    return at


def split(source, out):
    with open(source) as file:
        text = file.read()
    pieces, lines, at, line = [], [], 0, 1
    for offset, function in sites_of(text):
        pieces.append(text[at:offset])
        line += text.count('\n', at, offset)
        if text[text.rfind('\n', 0, offset) + 1:offset].strip():
            pieces.append('\n')
            line += 1
        lines.append((line, text.count('\n', 0, offset) + 1, function))
        at = offset
    with open(out, 'w') as file:
        file.write(''.join(pieces) + text[at:])
    with open(out + '.json', 'w') as file:
        json.dump({'source': os.path.relpath(source, ROOT), 'lines': lines}, file)
    return 0


def counts_of(gcda):
    """The path of the copy and its lines' counts, if the object is one of a copy."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(['gcov', '-j', os.path.abspath(gcda)], cwd=folder, check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)
        report = json.load(gzip.open(glob.glob(folder + '/*.json.gz')[0]))
    for file in report['files']:
        path = os.path.join(report['current_working_directory'], file['file'])
        if os.path.exists(path + '.json'):
            counts = collections.Counter()
            for line in file['lines']:
                counts[line['line_number']] += line['count']
            return path, counts
    return None, None


def missed_of(folder):
    """{source: [(line, function)]} and how many checks there are."""
    reached, all_sites = set(), {}
    for gcda in sorted(glob.glob(folder + '/*.gcda')):
        path, counts = counts_of(gcda)
        if path is None:
            continue
        with open(path + '.json') as file:
            copy = json.load(file)
        for number, line, function in copy['lines']:
            if number in counts:
                site = (copy['source'], number, line, function)
                all_sites[site] = True
                if counts[number] > 0:
                    reached.add(site)
    missed = collections.defaultdict(list)
    for source, _, line, function in sorted(set(all_sites) - reached):
        missed[source].append((line, function))
    return missed, len(all_sites)


def reached(folder, unreached):
    """A function may have as many unreached checks as its row says; fewer are a note only. A row of
    a function that its program has not is an offence too."""
    known = {}
    with open(unreached) as file:
        for row in file:
            words = row.split()
            if re.match(r'\w+ \w+ \d+$', row.strip()):
                known[words[0], words[1]] = int(words[2])
    missed, count = missed_of(folder)
    found = collections.defaultdict(list)
    for source, places in missed.items():
        for line, function in places:
            with open(os.path.join(ROOT, source)) as file:
                text = file.read().split('\n')[line - 1].strip()
            found[os.path.basename(source)[:-2], function].append('%s:%d: %s' % (source, line, text))
    bad = 0
    for key in sorted(set(found) | set(known)):
        source = glob.glob(os.path.join(ROOT, 'tests', '*', key[0] + '.c'))
        forgotten = not source or not re.search(r'\b%s\(' % key[1], open(source[0]).read())
        more = len(found[key]) > known.get(key, 0)
        bad += more or forgotten
        if forgotten or len(found[key]) != known.get(key, 0):
            print('%s%s, %s: %d checks are not reached, listed are %d' % (
                '' if more or forgotten else 'note: ', *key, len(found[key]), known.get(key, 0)))
        if more:
            print('\n'.join('    ' + text for text in found[key]))
    print('note: %d checks, %d not reached' % (count, sum(map(len, found.values()))))
    return bad > 0 or count < 2000


SAME = re.compile(r'\b(?:memcmp|strn?cmp|CHECK_NEAR\w*|CHECK_STATUS\w*)\(\s*([\w&*(][^,;]*?)\s*,\s*\1\s*[,)]'
                  r'|\bCHECK\w*\(\s*\w+ = ')


def same():
    found = []
    for source in sorted(glob.glob(os.path.join(ROOT, 'tests', '*', '*.c'))):
        with open(source) as file:
            code = bare(file.read())
        found += ['%s:%d: %s' % (os.path.relpath(source, ROOT), code.count('\n', 0, m.start()) + 1, m.group())
                  for m in SAME.finditer(code)]
    print('\n'.join(found))
    planted = ['memcmp(a, a, 3)', 'CHECK_NEAR(x[i], x[i], 1)', 'CHECK(a = 1)']
    return found != [] or not all(SAME.match(text) for text in planted) or SAME.match('memcmp(a, b, 3)') is not None


PLANTED = '''#include <stdio.h>
static int CHECK(int good) { return good; }
static int check_all(const int *v, int n) {
    int i, good = 1;
    for (i = 0; i < n; i++) good &= CHECK(v[i] > 0);
    return good;
}
static void test_loop(int n) {
    int i, v[1] = {1};
    for (i = 0; i < n; i++) check_all(v, 1);
    if (n > 0) CHECK(n == 1);
    check_all(v, 1);
}
static void test_forgotten(void) {
    CHECK(1 > 0);
}
int main(int count, char **words) {
    (void)words;
    test_loop(count - 1);
    if (count > 1) test_forgotten();
    return 0;
}
'''


def self():
    with tempfile.TemporaryDirectory() as folder:
        source, copy = os.path.join(folder, 'a.c'), os.path.join(folder, 'copy.c')
        with open(source, 'w') as file:
            file.write(PLANTED)
        split(source, copy)
        subprocess.run(['gcc', '-O0', '--coverage', 'copy.c', '-o', 'a'], cwd=folder, check=True)
        subprocess.run(['./a'], cwd=folder, check=True)
        missed, _ = missed_of(folder)
    lines = sorted(line for places in missed.values() for line, _ in places)
    print('the planted checks that are not reached: lines %s' % lines)
    return lines != [10, 11, 15, 20]


if __name__ == '__main__':
    sys.exit(int({'split': split, 'reached': reached, 'same': same, 'self': self}[sys.argv[1]](*sys.argv[2:])))
