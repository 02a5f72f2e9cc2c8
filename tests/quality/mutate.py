#!/usr/bin/env python3
"""Mutation testing: changes one place of a header or an extra at a time and looks which changes
the test programs notice.

    python3 tests/quality/mutate.py [-n COUNT] [-s SEED] [--part I/N] [--header NAME]
        [--bar PERCENT] [--journal FILE] [--retry] [--list] [-v]

A line of the implementation is drawn at random, then one of its mutants; no line is drawn twice.
A mutant is killed when a test program fails, crashes, or takes ten times as long as usual (a
slow one: ten seconds and three times as long). tcc compiles the library in a tenth of a second,
so that every mutant is compiled anew, in float, in double and as small builds have it; lines
that only vector builds have are compiled by gcc and run by the processor's own kernels. Programs
that do not reach the mutant's statement are left out: probes before statements tell. The others
run in the order of kills per second that this run has seen. Lines that no build of this machine
has (NEON, WebAssembly, AVR, MSVC) are not drawn; their number is printed.

tests/quality/mutants.txt lists survivors that were looked at: equivalent ones, and others with
the reason why no test is wanted. A mutant is named by its function (macro, table), what it
changes, and the tokens around, so that neither its header nor the form of its lines matters:
    moei_store_panel: < to <= [1] for ( i = 0 ; i ~ n ; i
[1] counts those of a function that are named alike.

    -n COUNT        mutants (500)                       -s SEED   seed of the draw (1)
    --part I/N      the I-th of N parts of the sample, for processors side by side; their
                    journals put together judge the whole
    --bar PERCENT   fails when fewer of those that are not equivalent are killed (92)
    --header NAME   only this header, as moe.h or examples/extras/moe_report.h
    --journal FILE  results are kept in it, and a run that is repeated goes on from there;
                    --retry: survivors run again, with the programs that are new or have changed
    --each S        a mutant's programs take at most about S seconds together, the first however
                    long it takes
    --sample        for few mutants: only the programs that the table names for a mutant's
                    header, with no run beforehand that tells which places a program reaches;
                    ends when the bar is reached
    --rows A,B      only these programs
    --list          prints the mutants and runs none       -v  a line for each mutant
The last line is "N passed, N failed": killed mutants, and how many more the bar asks for, with
those listed of functions that no header has."""

import argparse
import bisect
import glob
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zlib

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SOURCES = {os.path.basename(p)[:-2]: os.path.relpath(p, ROOT)
           for p in glob.glob(os.path.join(ROOT, 'tests', '*', '*.c'))}
with open(os.path.join(ROOT, 'tests', 'all.h')) as all_headers:
    HEADERS = ['moe_kernels.h', 'moe_routers.h', 'moe.h'] + re.findall(r'^#include "../(examples/.*)"',
        all_headers.read(), re.M)

# Compilers and options. A build that is dear is used only for lines that no other build has.
# strict: what a compiler warns of needs no test. lines: options that the programs of a build define
# themselves.
BUILDS = {
    'float': dict(compiler='tcc', strict='-Wall -Werror', options='', dear=False),
    'double': dict(compiler='tcc', strict='-Wall -Werror', options='-DMOE_REAL=double', dear=False),
    'small': dict(compiler='tcc', strict='-Wall -Werror', options='', lines='-DMOE_NO_TRAIN -DMOE_NO_LIBM', dear=False),
    'vector': dict(compiler='gcc -O0', strict='', options='', dear=True),
}

# Programs of tests/: build, arguments (with commas between them), about how many seconds they and
# gcc take, for the first order, and the headers that a sample tries them on: those of which they
# reach much for their time, or what no other program reaches.
ROWS = '''
internals     float   -             0.01  kernels routers moe
saved_by_0_1  float   -             0.01  kernels routers moe
left_out      float   -             0.01  kernels routers moe import
kept          float   -             0.01  routers
baseline      float   -             0.04  kernels routers moe export
metrics       float   -             0.05  kernels routers
inference     float   write         0.1   kernels moe export
int_routers   float   quick         0.08  kernels routers
threads       float   -             0.08
golden        double  tests/golden  0.08  kernels routers
golden        float   tests/golden  0.08  kernels routers moe
integers      float   quick         0.1   kernels
net           float   -             0.5   kernels routers moe
export_float  float   quick         0.5   kernels export
small         small   quick         0.4   kernels
quant         float   quick         0.6   kernels
training      float   -             0.9   moe
fuzz_config   float   quick         0.8
histories     float   quick         0.8   moe
layer         float   -             1.1   routers moe
presets       float   -             0.3   routers moe
smooth        float   -             1     smooth
tokenizers    float   -             0.05  import
models        float   tests/golden/models 0.2 import
float_lists   float   -             0.3   export
inference     float   quick         1.2   moe export
profile       float   quick         2     export
checked       float   quick         1.5   check
theory        float   -             1.2   routers
kernels       float   quick         1.3   kernels
attention     float   -             1.5   moe
edges         float   -             1.6   kernels routers moe classic export layout
files         float   -             1.8   kernels moe
power         float   -             1     moe
tokens        float   -             2     import
imported      float   -             3     import
published     float   hands         0.7   import
published     float   -             15
classic       float   -             2.4   classic
ranks         float   quick         2.8   routers ranks
state         float   quick         2.5   routers moe
attention     double  -             3
int_scores    float   quick         3.3   export
fuzz_file     float   -             4
parallel      float   -             3.4
ranks_nets    float   -             4.5   ranks
failures      float   -             5
gradients     double  quick         5     kernels routers
report        float   -             6     report
forms         double  -             6
routers       float   quick         6     routers
int_sequences float   quick         8     kernels
models        float   tests/golden/models,tests/golden/shapes.py 6
int_errors    float   quick         8
profile       double  -             8
robust        float   quick         10
models        vector  tests/golden/models,tests/golden/shapes.py 8
quant         vector  quick         8     kernels
kernels       vector  quick         4     kernels
kernels       vector  -             14
'''


# Rows whose programs make C: what they print goes to a file, then a second program is compiled from
# what they made.
MODELS = 'dense dense4 sparse rich rich4 behind'.split()
SECOND = {
    'export_float quick': dict(prints='nets.h', compile=['-DNETS="nets.h"', '-DQUICK', 'tests/port/export_float.c']),
    'inference write': dict(folder='models', compile=['-DMOE_NO_TRAIN', '-DMOE_NO_FLOAT', '-Imodels', 'written.c'],
                         source='written.c', text=
                         '#define MOE_IMPLEMENTATION\n' + ''.join('#include "%s.h"\n#include "%s_cases.h"\n' % (m, m)
                                                                  for m in MODELS) +
                         '#include <stdio.h>\nstatic unsigned char room[1 << 16];\nint main(void) {\n    int wrong = ' +
                         ' + '.join('%s_wrong(room)' % m for m in MODELS) +
                         ';\n    printf("%d passed, %d failed\\n", wrong == 0, wrong);\n    return wrong != 0;\n}\n'),
}


# ---- text of a header: what is code, and the statements in it ----

TOKEN = re.compile(r'''(?P<space>\s+)
  | (?P<number>0[xX][0-9a-fA-F]+[uUlL]*|(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?[fFuUlL]*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<sign><<=|>>=|\.\.\.|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\#\#|.)''', re.X | re.S)

BLANKED = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)

TYPES = set('''const static register volatile struct enum union unsigned signed char short int long float double void
    size_t moe_real
    int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t typedef extern goto'''.split())


def blank(text, only_comments=False):
    """The same length and lines, without comments, and without what stands in strings."""
    def cover(match):
        word = match.group()
        if word[0] in '"\'':
            return word if only_comments else word[0] + '$' * (len(word) - 2) + word[-1]
        return re.sub(r'[^\n]', ' ', word)
    return BLANKED.sub(cover, text)


TABLE = r'^(?:static )?const [^;{}()=]*?(\w+)(?:\[[^=]*)? *= *\{'


class Token:
    __slots__ = 'kind text start end'.split()

    def __init__(self, kind, text, start, end):
        self.kind, self.text, self.start, self.end = kind, text, start, end


def tokens_of(text, start, end):
    return [Token(m.lastgroup, m.group(), m.start(), m.end()) for m in TOKEN.finditer(text, start, end)
            if m.lastgroup != 'space']


class Header:
    def __init__(self, folder, name):
        self.name = name
        with open(os.path.join(folder, name)) as f:
            self.text = f.read()
        self.code = blank(self.text)
        self.starts = [0] + [m.end() for m in re.finditer('\n', self.text)]
        self.begin = self.text.index('#if defined(MOE_IMPLEMENTATION) && !defined(MOEI_')
        self.directives = self.find_directives()
        self.functions = self.find_functions()  # (offset behind the brace, end)
        self.probes = self.find_probes()  # (offset, end of the block that it stands in)
        self.tables = [(m.end(), m.group(1)) for m in re.finditer(TABLE, self.code, re.M)]
        tokens = tokens_of(re.sub(r'"[^"\n]*"', lambda m: '"'.ljust(len(m.group())), self.code), 0, len(self.code))
        self.words, self.token_starts = [t.text for t in tokens], [t.start for t in tokens]

    def line_of(self, offset):
        return bisect.bisect_right(self.starts, offset) - 1

    def line_text(self, line):
        end = self.starts[line + 1] - 1 if line + 1 < len(self.starts) else len(self.text)
        return self.text[self.starts[line]:end]

    def find_directives(self):
        """The lines of each directive: {line: (first line, word)}."""
        found, lines, i = {}, self.code.split('\n'), 0
        while i < len(lines):
            word = re.match(r'\s*#\s*(\w+)', lines[i])
            first = i
            while word and lines[i].rstrip().endswith('\\'):
                i += 1
            if word:
                for k in range(first, i + 1):
                    found[k] = (first, word.group(1))
            i += 1
        return found

    def find_functions(self):
        """Definitions begin in the first column and have a brace at the end of the line with the
        last parenthesis, or a body on that line. Macros that make functions may stand before one,
        with no sign in between: MOEI_MATMUL(...) static void moei_nt_avx2(...) {"""
        found, self.names = [], []
        for m in re.finditer(r'^[A-Za-z_][^;{}#=]*\)\s*\{', self.code, re.M):
            if m.start() < self.begin or self.line_of(m.end()) in self.directives:
                continue
            depth, i = 1, m.end()
            while depth and i < len(self.code):
                depth += {'{': 1, '}': -1}.get(self.code[i], 0)
                i += 1
            found.append((m.end(), i))
            self.names.append((re.findall(r'\b(moe\w+)\(', m.group()) or ['-'])[0])
        return found

    def find_probes(self):
        """Where a probe can stand: at the beginning of a function and before statements of
        blocks."""
        found = []
        for start, end in self.functions:
            found.append([start, end])
            tokens = [t for t in tokens_of(self.code, start, end) if self.line_of(t.start) not in self.directives]
            blocks = [[0]]
            for what, i, _ in statements(tokens):
                if what == 'begin':
                    blocks[-1].append(len(found))
                    found.append([tokens[i].start, end])
                elif what == 'block':
                    blocks.append([])
                elif what == 'end' and len(blocks) > 1:
                    for k in blocks.pop():
                        found[k][1] = tokens[i].end
        return found

    def name_of(self, offset):
        """The function around a place, or the macro or the table."""
        function = self.function_of(offset)
        if function is not None:
            return self.names[function]
        first, word = self.directives.get(self.line_of(offset), (0, ''))
        if word == 'define':
            return re.match(r'\s*#\s*define\s+(\w+)', self.line_text(first)).group(1)
        before = bisect.bisect_right(self.tables, (offset, '')) - 1
        return self.tables[before][1] if before >= 0 else '-'

    def function_of(self, offset):
        """The number of the function around a place, or None."""
        k = bisect.bisect_right(self.functions, (offset, len(self.code))) - 1
        return k if k >= 0 and offset < self.functions[k][1] else None

    def is_inside(self, offset):
        return self.function_of(offset) is not None

    def words_around(self, start, end):
        """Tokens before, inside and behind a place; a string is one sign."""
        first, last = bisect.bisect_left(self.token_starts, start), bisect.bisect_left(self.token_starts, end)
        return self.words[max(0, first - 5):first], self.words[first:last], self.words[last:last + 5]

    def probe_of(self, offset):
        """The last probe that is passed whenever the place is reached."""
        around = [k for k, (start, end) in enumerate(self.probes) if start <= offset < end]
        return around[-1] if around else None


# ---- mutants ----

class Mutant:
    def __init__(self, header, start, end, new, label):
        self.header, self.start, self.end, self.new, self.label = header, start, end, new, label
        self.line = header.line_of(start)
        self.builds = []

    def key(self):
        return '%s: %s [%d] %s' % (self.header.name_of(self.start), self.label, self.turn, self.around())

    def around(self):
        """Five tokens before, ~ for what is changed, five behind; what ends a statement looks
        the same as what parts its expressions."""
        before, inside, behind = self.header.words_around(self.start, self.end)
        inside = inside if len(inside) < 9 else inside[:4] + ['...'] + inside[-4:]
        words = before + ['~'] + (inside if self.label in ('drop', 'swap arguments', 'return 0') or '(' in self.label
                                  else []) + ['~'] + behind
        return re.sub(r' ~ ~ ', ' ~ ', ' '.join(';' if w in (',', '{', '}') else w for w in words if w != '\\'))

    def mutated(self):
        return self.header.text[:self.start] + self.new + self.header.text[self.end:]

    def shown(self):
        h = self.header
        end = h.starts[self.line + 1] - 1
        return (h.text[h.starts[self.line]:self.start] + '>>' + self.new + '<<'
                + h.text[self.end:max(end, self.end)]).strip()


# Signs with spaces around them are those of two operands; the others belong to pointers or are
# signs of numbers.
PAIRS = {'<': ['<=', '>='], '>': ['>=', '<='], '<=': ['<', '>'], '>=': ['>', '<'], '==': ['!='], '!=': ['=='],
         '&&': ['||'], '||': ['&&'], '+': ['-'], '-': ['+'], '*': ['+', '/'], '/': ['*'], '%': ['*'],
         '<<': ['>>'], '>>': ['<<'], '&': ['|'], '|': ['&'], '^': ['|'],
         '+=': ['-=', '='], '-=': ['+=', '='], '*=': ['/=', '='], '/=': ['*='], '|=': ['&='], '&=': ['|='],
         '<<=': ['>>='], '>>=': ['<<='], '^=': ['|=']}


def numbers_near(word):
    """What a number becomes: its neighbors; a constant of many digits a value one hundredth
    away, another twice itself."""
    value = re.match(r'(0[xX][0-9a-fA-F]+|\d+)([uUlL]*)$', word)
    if value:
        digits, suffix = value.groups()
        n = int(digits, 8 if digits.isdigit() and digits[0] == '0' else 0)
        return ['%d%s' % (k, suffix) for k in ([n + 1, n - 1] if n > 0 else [1])]
    digits = len(re.sub(r'[eE].*|[^0-9]', '', word))
    return ['1.0'] if float(word.rstrip('fFlL')) == 0 else ['(%s * %s)' % (word, '1.01f' if digits >= 5 else '2')]


def spaced(code, token):
    return code[token.start - 1] in ' \n' and code[token.end] in ' \n'


def small_mutants(h, tokens):
    """One token changed."""
    for i, t in enumerate(tokens):
        before = tokens[i - 1] if i else None
        if t.kind == 'sign' and t.text in PAIRS and (spaced(h.code, t) or t.text in ('->', )):
            for new in PAIRS[t.text]:
                yield Mutant(h, t.start, t.end, new, '%s to %s' % (t.text, new))
        elif t.text in ('++', '--'):
            yield Mutant(h, t.start, t.end, '--' if t.text == '++' else '++',
                         '%s to %s' % (t.text, '--' if t.text == '++' else '++'))
        elif t.text in ('-', '!') and before and (before.kind == 'sign' and before.text not in (')', ']')
                                                  or before.text == 'return'):
            yield Mutant(h, t.start, t.end, '', 'no %s' % t.text)
        elif t.text == '?' and spaced(h.code, t):
            yield Mutant(h, t.start, t.end, '&& 0 ?', '? never')
            yield Mutant(h, t.start, t.end, '|| 1 ?', '? always')
        elif t.kind == 'number' and not (before and before.text in ('case', '##')) and not is_length(h, tokens, i):
            for new in numbers_near(t.text):
                yield Mutant(h, t.start, t.end, new, '%s to %s' % (t.text, new))


def is_length(h, tokens, i):
    """In int name[3]: how long an array is shows nowhere until it is too short, which is a
    sanitizer's matter."""
    if tokens[i - 1].text != '[' or i < 3:
        return False
    line = h.line_of(tokens[i].start)
    first = next((t for t in tokens[max(0, i - 40):i] if h.line_of(t.start) == line), None)
    typed = first is not None and (first.text in TYPES or first.text.startswith('moe'))
    return typed and tokens[i - 2].kind == 'name' and ' = ' not in h.code[h.starts[line]:tokens[i].start]


def closing(tokens, i):
    """The index of the parenthesis that closes the one at i."""
    depth = 0
    while i < len(tokens):
        depth += {'(': 1, ')': -1}.get(tokens[i].text, 0)
        if depth == 0:
            return i
        i += 1
    return None


def ends_loop(tokens, i):
    """The while of a do."""
    end = closing(tokens, i + 1) if tokens[i].text == 'while' else None
    return end is not None and end + 1 < len(tokens) and tokens[end + 1].text == ';'


def statements(tokens):
    """('statement', first, last) of each simple statement, last being its semicolon; ('if' or
    'while', open, close) of conditions; ('begin', at, at) where another statement could stand in
    front; ('block', at, at) and ('end', at, at) of braces around statements."""
    i, starts, behind_switch = 0, True, None
    while i < len(tokens):
        word = tokens[i].text
        before = tokens[i - 1].text if i else '{'
        if starts and before in ('{', '}', ';', ':') and word not in ('{', '}', ';', 'else', 'case', 'default') and \
                not ends_loop(tokens, i) and i != behind_switch:  # nothing in front of the first case is ever reached
            yield 'begin', i, i
        if word in ('{', '}'):
            yield ('block' if word == '{' else 'end'), i, i
        if word in ('if', 'while', 'for', 'switch') and i + 1 < len(tokens) and tokens[i + 1].text == '(':
            end = closing(tokens, i + 1)
            if end is None:
                return
            if word in ('if', 'while'):
                yield word, i + 1, end
            if word == 'switch':
                behind_switch = end + 2
            i, starts = end + 1, True
        elif word in ('{', '}', ';', 'else', 'do') or (word == ':' and i > 1
                                                       and tokens[i - 2].text in ('case', '{', ';', '}')):
            i, starts = i + 1, True
        elif starts:
            depth, k = 0, i
            while k < len(tokens) and not (tokens[k].text == ';' and depth == 0):
                depth += {'(': 1, '{': 1, '[': 1, ')': -1, '}': -1, ']': -1}.get(tokens[k].text, 0)
                if depth < 0:
                    break
                k += 1
            good = k < len(tokens) and depth == 0
            if good:
                yield 'statement', i, k
            i, starts = k if good else i + 1, False
        else:
            i += 1


def is_declaration(h, tokens, first):
    a, b = tokens[first], tokens[first + 1]
    star = b.text == '*' and h.code[b.start - 1] == ' ' and h.code[b.end] != ' '
    return a.text in TYPES or b.kind == 'name' or star


def large_mutants(h, tokens):
    """Statements dropped, conditions that hold always or never, results that are lost, arguments
    that are swapped."""
    for what, first, last in statements(tokens):
        a, z = tokens[first], tokens[last]
        if what in ('begin', 'block', 'end'):
            continue
        if what in ('if', 'while'):
            yield Mutant(h, a.start, z.end, '(0)', '%s (0)' % what) \
                if re.search(r'\|\||\?', h.code[a.end:z.start]) else \
                Mutant(h, a.end, a.end, '0 && ', '%s (0)' % what)
            if what == 'if':
                yield Mutant(h, a.start, z.end, '(1)', 'if (1)')
        elif a.text == 'return':
            if last - first > 1 and h.code[a.end:z.start].strip() not in ('0', 'MOE_OK', 'NULL'):
                yield Mutant(h, a.end, z.start, ' 0', 'return 0')
        elif a.text in ('break', 'continue'):
            yield Mutant(h, a.start, z.start, '', 'no %s' % a.text)
        elif last - first > 1 and a.text not in ('(', 'case', 'default') and not is_declaration(h, tokens, first):
            yield Mutant(h, a.start, z.start, '', 'drop')
    for i in range(len(tokens) - 1):
        if tokens[i].kind == 'name' and tokens[i + 1].text == '(' and tokens[i].text not in ('if', 'for', 'while',
            'switch', 'return', 'sizeof'):
            swap = swapped(h, tokens, i + 1)
            if swap:
                yield swap


def swapped(h, tokens, opening):
    """Two neighboring arguments of a call in each other's place; which two depends on the text."""
    end = closing(tokens, opening)
    if end is None:
        return None
    depth, cuts = 0, [tokens[opening].end]
    for t in tokens[opening + 1:end]:
        depth += {'(': 1, '[': 1, '{': 1, ')': -1, ']': -1, '}': -1}.get(t.text, 0)
        if t.text == ',' and depth == 0:
            cuts += [t.start, t.end]
    cuts.append(tokens[end].start)
    parts = [(cuts[k], cuts[k + 1]) for k in range(0, len(cuts), 2)]
    pairs = [(p, q) for p, q in zip(parts, parts[1:]) if h.text[p[0]:p[1]].strip() != h.text[q[0]:q[1]].strip()]
    if not pairs:
        return None
    p, q = pairs[zlib.crc32(re.sub(r'[\s$]', '', h.code[cuts[0]:cuts[-1]]).encode()) % len(pairs)]
    first, second = h.text[p[0]:p[1]].strip(), h.text[q[0]:q[1]].strip()
    return Mutant(h, p[0], q[1], '%s, %s' % (second, first), 'swap arguments')


def mutants_of(h):
    """All mutants of a header's implementation: functions, tables of constants, bodies of
    macros."""
    found = []
    for start, end in h.functions:
        inside = tokens_of(h.code, start, end)
        inside = [t for t in inside if h.line_of(t.start) not in h.directives]
        found += list(small_mutants(h, inside)) + list(large_mutants(h, inside))
    for m in re.finditer(r'^(?:static )?const [^;{}()]*= *\{', h.code, re.M):
        if m.start() > h.begin and not h.is_inside(m.start()):
            end = h.code.index(';', m.end())
            found += list(small_mutants(h, tokens_of(h.code, m.end(), end)))
    for line, (first, word) in h.directives.items():
        if word == 'define' and h.starts[line] > h.begin:
            body = h.starts[line]
            if line == first:
                body = re.compile(r'\s*#\s*define\s+\w+(\([^)]*\))?').match(h.code, body).end()
            end = h.starts[line + 1] - 1
            found += list(small_mutants(h, tokens_of(h.code, body, end)))
    seen, turns, unique = set(), {}, []
    for m in sorted(found, key=lambda m: (m.start, m.label)):
        if (m.start, m.end, m.new) in seen:
            continue
        seen.add((m.start, m.end, m.new))
        name = h.name_of(m.start), m.label, m.around()
        turns[name] = m.turn = turns.get(name, 0) + 1
        unique.append(m)
    return unique


# ---- which lines a build has ----

def active_lines(build, folder, headers):
    """The preprocessor reads the headers with a word in place of every line that is no
    directive; the words that are left are lines of the build."""
    with tempfile.TemporaryDirectory() as scratch:
        for number, h in enumerate(headers):
            code, lines = blank(h.text, only_comments=True).split('\n'), []
            for k, text in enumerate(code):
                first, word = h.directives.get(k, (k, ''))
                if word == 'define' and first == k:
                    lines.append('moei_line_%d_%d' % (number, k))
                lines.append(text if word else 'moei_line_%d_%d' % (number, k))
            os.makedirs(os.path.dirname(os.path.join(scratch, h.name)), exist_ok=True)
            with open(os.path.join(scratch, h.name), 'w') as f:
                f.write('\n'.join(lines))
        with open(os.path.join(scratch, 'all.c'), 'w') as f:
            f.write('#define MOE_IMPLEMENTATION\n' + ''.join('#include "%s"\n' % h.name for h in headers
                                                             if h.name not in HEADERS[:2]))
        words = build['compiler'].split() + build['options'].split() + build.get('lines', '').split() + ['-E', '-I.',
            'all.c'] + STB
        out = subprocess.run(words, cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                             universal_newlines=True).stdout
    lines = {(int(a), int(b)) for a, b in re.findall(r'moei_line_(\d+)_(\d+)', out)}
    for number, h in enumerate(headers):
        lines |= {(number, k) for k, (first, word) in h.directives.items() if (number, first) in lines}
    return lines


# ---- programs ----

FAILURE = re.compile(r'(FAILED: |\S+\.c:\d+: |line \d+: )')


def find_stb():
    for folder in (os.environ.get('STB_DS') or '', '/usr/include', '/usr/include/stb', '/usr/local/include'):
        folder = os.path.dirname(folder) if folder.endswith('.h') else folder
        if folder and os.path.exists(os.path.join(folder, 'stb_ds.h')):
            return ['-I' + folder]
    return ['-I/usr/include/stb']


STB = find_stb()

PROBES = '''#include <stdio.h>
#include <stdlib.h>
char moei_probes_hit[1 << 16];
void moei_probe_hit(int n) {
    FILE *f;
    moei_probes_hit[n] = 1;
    f = fopen(getenv("MOE_PROBES"), "a");
    if (f) fprintf(f, "%d\\n", n), fclose(f);
}
'''


def limits(seconds):
    def apply():
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return apply


class Place:
    """A folder with a copy of the headers and tests, in which mutants are compiled and run."""

    def __init__(self, folder):
        self.folder = folder
        shutil.copytree(os.path.join(ROOT, 'tests'), os.path.join(folder, 'tests'))
        shutil.copytree(os.path.join(ROOT, 'examples'), os.path.join(folder, 'examples'),
                        ignore=shutil.ignore_patterns('build'))
        for name in HEADERS:
            shutil.copy(os.path.join(ROOT, name), folder)
        with open(os.path.join(folder, 'library.c'), 'w') as f:
            f.write('#define MOE_IMPLEMENTATION\n#include "tests/all.h"\n')
        with open(os.path.join(folder, 'probes.c'), 'w') as f:
            f.write(PROBES)

    def write(self, name, text):
        with open(os.path.join(self.folder, name), 'w') as f:
            f.write(text)

    def compile(self, build, *words):
        strict = [] if '-DTEST_LINKED' in words else build['strict'].split()
        command = build['compiler'].split() + strict + ['-std=c99',
                                                        '-I.'] + STB + build['options'].split() + list(words)
        return subprocess.run(command, cwd=self.folder, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL).returncode == 0

    def run(self, program, arguments, seconds, stop=True, probes=None, prints=None):
        """0 when the program passes. With stop, the first line that tells of a failure ends it.
        prints: a file for its lines, whose last counts nothing."""
        words = (['stdbuf', '-oL'] if shutil.which('stdbuf') else []) + [os.path.join(self.folder, program)] + arguments
        environment = dict(os.environ, MOE_PROBES=probes or '/dev/null')
        child = subprocess.Popen(words, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.DEVNULL, env=environment,
                                 preexec_fn=limits(seconds), errors='replace', universal_newlines=True)
        guard = threading.Timer(3600, child.kill)  # one that sleeps
        guard.start()
        last, lines = '', []
        try:
            for line in child.stdout:
                last = line
                if prints:
                    lines.append(line)
                if stop and FAILURE.match(line):
                    child.kill()
                    break
            child.stdout.close()
            status = child.wait()
        finally:
            guard.cancel()
        if prints:
            self.write(prints, ''.join(lines))
            return status
        return status or not re.match(r'[1-9]\d* passed, 0 failed', last)


class Row:
    """A test program in a build: how long it takes and which functions it reaches."""

    def __init__(self, words):
        self.name, self.build_name, arguments, seconds = words[:4]
        self.headers = words[4:]
        self.build = BUILDS[self.build_name]
        self.arguments = [] if arguments == '-' else arguments.split(',')
        self.second = SECOND.get('%s %s' % (self.name, arguments))
        self.seconds, self.runs, self.kills = float(seconds), {}, {}
        self.prepared, self.passes, self.reached = False, False, None
        with open(os.path.join(ROOT, SOURCES[self.name])) as f:
            text = f.read()
        self.linked = '#ifndef TEST_LINKED\n' in text
        self.version = '%s %s %s %08x' % (self.name, self.build_name, arguments, zlib.crc32(text.encode()))
        self.object = 'program.%s.%s.%s.o' % (self.name, self.build_name, arguments.replace('/', '.'))

    def worth(self, header):
        """Kills per second to expect of mutants of a header: as with that header's so far, or
        else as with all; fewer of a program that the table does not name for it."""
        chance = (sum(self.kills.values()) + 1.0) / (sum(self.runs.values()) + 2.0) / (1 if self.is_for(header) else 5)
        return (self.kills.get(header, 0) + 2 * chance) / (self.runs.get(header, 0) + 2.0) / (self.seconds + 0.1)

    def is_for(self, header):
        return re.sub(r'.*moe_|\.h', '', header) in self.headers

    def count(self, header, killed):
        self.runs[header] = self.runs.get(header, 0) + 1
        self.kills[header] = self.kills.get(header, 0) + killed

    def sources(self, place, library):
        """What is compiled and linked into the program; library: the object of this build."""
        return ([self.object, library] if self.linked else [SOURCES[self.name]])

    def run(self, place, seconds, stop=True, probes=None):
        if not self.second:
            return place.run('program', self.arguments, seconds, stop, probes)
        folder = self.second.get('folder')
        if folder:
            os.makedirs(os.path.join(place.folder, folder), exist_ok=True)
            place.write(self.second['source'], self.second['text'])
        return place.run('program', self.arguments + ([folder] if folder else []), seconds, stop, probes,
                         self.second.get('prints')) or \
            not place.compile(self.build, *self.second['compile'], *(['probes.o'] if probes else []), '-lm', '-o',
                              'second') or \
            place.run('second', [], seconds, stop, probes)

    def prepare(self, place, headers, journal, sampling):
        """Runs the program once with probes; a sample does without."""
        start = 0
        self.prepared = True
        if self.linked and not place.compile(self.build, '-DTEST_LINKED', '-c', SOURCES[self.name], '-o', self.object):
            sys.exit('%s does not compile' % SOURCES[self.name])
        if sampling:
            return
        known = journal.known.get(self.version)
        total = sum(len(h.probes) for h in headers)
        if known and known.get('probes') == total:
            self.seconds, self.reached = known['seconds'], set(known['reached'])
            return
        for h in headers:
            pieces, at = [h.text[:h.begin], 'void moei_probe_hit(int);\nextern char moei_probes_hit[];\n'], h.begin
            for k, (offset, _) in enumerate(h.probes):
                probe = ' if (!moei_probes_hit[%d]) moei_probe_hit(%d); ' % (start + k, start + k)
                pieces += [h.text[at:offset], probe]
                at = offset
            place.write(h.name, ''.join(pieces) + h.text[at:])
            start += len(h.probes)
        good = place.compile(self.build, '-c', 'probes.c', '-o', 'probes.o')
        if self.linked:
            good = good and place.compile(self.build, '-c', 'library.c', '-o', 'library.probes.o')
        good = good and place.compile(self.build, *self.sources(place, 'library.probes.o'), 'probes.o', '-lm', '-o',
                                      'program')
        probes = os.path.join(place.folder, 'probes.' + self.name)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        if not good or self.run(place, 1000, False, probes):
            sys.exit('%s (%s) does not pass without a mutant' % (SOURCES[self.name], self.build_name))
        for h in headers:
            place.write(h.name, h.text)
        self.passes = True
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        with open(probes) as f:
            self.reached = {int(word) for word in f}
        journal.put(self.version, seconds=self.seconds, probes=total, reached=sorted(self.reached))

    def limit(self):
        """The processor seconds that a mutant has."""
        return int(min(10 * self.seconds + 1, 3 * self.seconds + 10))

    def must_pass(self, place):
        """What fails without a mutant kills none. Whether it takes longer than was known, so that a
        mutant has more time."""
        if self.passes:
            return False
        allowed = self.limit()
        self.passes = (not self.linked or place.compile(self.build, '-c', 'library.c', '-o',
                                                        'library.good.o')) and \
            place.compile(self.build, *self.sources(place, 'library.good.o'), '-lm', '-o', 'program')
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        if not self.passes or self.run(place, 1000):
            sys.exit('%s (%s) does not pass without a mutant' % (SOURCES[self.name], self.build_name))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.seconds = max(self.seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return self.limit() > allowed

    def may_reach(self, header, probe):
        """Whether it may reach a header's probe; without probes, what the table says of the
        header."""
        if self.reached is None:
            return self.is_for(header)
        return probe is None or probe in self.reached


# ---- one mutant ----

class Trial:
    def __init__(self, place, headers, rows, journal, sampling, seconds):
        self.place, self.headers, self.rows, self.journal = place, headers, rows, journal
        self.sampling, self.seconds = sampling, seconds
        self.first = {}
        total = 0
        for h in headers:
            self.first[h.name] = total
            total += len(h.probes)

    def judge(self, mutant, passed):
        """(verdict, row that killed it or None, how many programs ran). passed: versions of
        programs that it is known to pass, which this adds to."""
        name, spent = mutant.header.name, 0
        inside = mutant.header.probe_of(mutant.start)
        probe = None if inside is None else self.first[name] + inside
        rows = [r for r in self.rows if r.build_name in mutant.builds and r.version not in passed]
        libraries, ran = {}, len(passed)
        try:
            while rows:
                row = max(rows, key=lambda r: r.worth(name))
                if spent and spent + row.seconds > self.seconds:
                    rows.remove(row)
                    continue
                if not row.prepared:
                    row.prepare(self.place, self.headers, self.journal, self.sampling)
                    continue
                rows.remove(row)
                if not row.may_reach(name, probe):
                    continue
                self.place.write(name, mutant.mutated())
                library = 'library.%s.o' % row.build_name
                if row.linked and row.build_name not in libraries:
                    libraries[row.build_name] = self.place.compile(row.build, '-c', 'library.c', '-o', library)
                if row.linked and not libraries[row.build_name]:
                    return 'not compiled', None, ran
                if not self.place.compile(row.build, *row.sources(self.place, library), '-lm', '-o', 'program'):
                    return 'not compiled', None, ran
                ran += 1
                spent += row.seconds
                killed = row.run(self.place, row.limit())
                self.place.write(name, mutant.header.text)
                if killed and row.must_pass(self.place):
                    rows.append(row)
                    continue
                row.count(name, bool(killed))
                if killed:
                    return 'killed', row, ran
                row.passes = True
                passed.append(row.version)
            if not ran:
                self.place.write(name, mutant.mutated())
                if not self.place.compile(BUILDS[mutant.builds[0]], '-c', 'library.c', '-o', 'library.o'):
                    return 'not compiled', None, ran
        finally:
            self.place.write(name, mutant.header.text)
        return ('survived' if ran else 'not reached'), None, ran


# ---- the draw, the list of survivors that were looked at, the report ----

def listed_mutants():
    """{key: reason}. A line without indentation is a reason for the mutants that stand indented
    below it."""
    found, reason = {}, ''
    path = os.path.join(ROOT, 'tests', 'quality', 'mutants.txt')
    if os.path.exists(path):
        with open(path) as f:
            for line in f:
                if line.startswith(' '):
                    found[' '.join(line.split())] = reason
                elif line.strip() and not line.startswith('#'):
                    reason = line.strip()
    return found


def draw(headers, count, seed):
    """Mutants of distinct lines in a random order, how many lines some build has and how many
    none, and the keys of all mutants."""
    rows_builds = list(BUILDS)
    active = {name: active_lines(BUILDS[name], ROOT, headers) for name in rows_builds
              if shutil.which(BUILDS[name]['compiler'].split()[0])}
    lines, foreign, keys = {}, set(), set()
    for number, h in enumerate(headers):
        for m in mutants_of(h):
            keys.add(m.key())
            m.builds = [name for name in active if (number, m.line) in active[name]]
            cheap = [name for name in m.builds if not BUILDS[name]['dear']]
            m.builds = cheap or m.builds
            if m.builds:
                lines.setdefault((number, m.line), []).append(m)
            else:
                foreign.add((number, m.line))
    chance = random.Random(seed)
    order = sorted(lines)
    chance.shuffle(order)
    drawn = [chance.choice(lines[line]) for line in order]
    return drawn[:count], len(order), len(foreign), keys


class Journal:
    """Verdicts that are kept in a file, so that a long run may be interrupted."""

    def __init__(self, path):
        self.path, self.known = path, {}
        if path and os.path.exists(path):
            with open(path) as f:
                for line in f:
                    entry = json.loads(line)
                    self.known[entry['key']] = entry

    def put(self, key, **what):
        self.known[key] = entry = dict(key=key, **what)
        if self.path:
            with open(self.path, 'a') as f:
                f.write(json.dumps(entry) + '\n')


def table(results, headers):
    columns = ['mutants', 'not compiled', 'equivalent', 'killed', 'explained', 'survived', 'killed %']
    print('| header | ' + ' | '.join(columns) + ' |')
    for name in [h.name for h in headers] + ['all']:
        verdicts = [v for m, v in results if name in (m.header.name, 'all')]
        counts = {word: verdicts.count(word) for word in columns[1:-1]}
        base = len(verdicts) - counts['not compiled'] - counts['equivalent']
        print('| %s | %d | %s | %s |' % (name, len(verdicts), ' | '.join(str(counts[w]) for w in columns[1:-1]),
                                         '%.1f' % (100.0 * counts['killed'] / base) if base else '-'))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('-n', type=int, default=500)
    parser.add_argument('-s', type=int, default=1)
    parser.add_argument('--bar', type=float, default=92)
    parser.add_argument('--part', default='1/1')
    parser.add_argument('--header')
    parser.add_argument('--journal')
    parser.add_argument('--retry', action='store_true')
    parser.add_argument('--each', type=float, default=1e9)
    parser.add_argument('--sample', action='store_true')
    parser.add_argument('--rows')
    parser.add_argument('--list', action='store_true')
    parser.add_argument('-v', action='store_true')
    options = parser.parse_args()

    started = time.time()
    headers = [Header(ROOT, name) for name in HEADERS]
    drawn, lines, foreign, keys = draw(headers, 10 ** 9, options.s)
    part, parts = (int(word) for word in options.part.split('/'))
    drawn = [m for m in drawn if options.header in (None, m.header.name)][:options.n][part - 1::parts]
    print('%d mutants of %d, on %d lines that builds of this machine have (%d lines are for others), seed %d' %
          (len(drawn), len(keys), lines, foreign, options.s))
    if options.list:
        for m in drawn:
            print('%s\n    %s:%d (%s): %s' % (m.key(), m.header.name, m.line + 1, ' '.join(m.builds), m.shown()))
        return 0

    listed, journal, results = listed_mutants(), Journal(options.journal), []
    functions = {key.split(':')[0] for key in keys}
    stale = sorted(key for key in set(listed) - keys if key.split(':')[0] not in functions)
    for key in sorted(set(listed) - keys):
        print('%stests/quality/mutants.txt: the headers have no such %s: %s' %
              (('', 'function', key) if key in stale else ('note: ', 'mutant', key)))
    rows = [Row(words.split()) for words in ROWS.strip().split('\n')]
    rows = [r for r in rows if (options.rows is None or r.name in options.rows.split(','))
            and shutil.which(r.build['compiler'].split()[0])]
    with tempfile.TemporaryDirectory(prefix='moe.mutants.') as folder:
        trial = Trial(Place(os.path.join(folder, 'place')), headers, rows, journal, options.sample, options.each)
        for m in drawn:
            key = m.key()
            known = journal.known.get(key)
            if listed.get(key, '').startswith('equivalent'):
                verdict = 'equivalent'
            elif known and not (options.retry and known['verdict'] in ('survived', 'not reached')):
                verdict = known['verdict']
            else:
                passed = known['passed'] if known else []
                verdict, row, ran = trial.judge(m, passed)
                journal.put(key, verdict=verdict, row=row and '%s %s' % (row.name, row.build_name), passed=passed)
                if options.v:
                    print('%-13s %-32s line %5d: %s (%s, %d programs, %.0f s)' % (verdict, m.header.name, m.line + 1,
                        m.label, row and row.name, ran,
                                                                           time.time() - started), flush=True)
            if verdict in ('survived', 'not reached'):
                if key in listed:
                    verdict = 'explained'
                else:
                    print('%s: %s\n    %s:%d (%s): %s' % (verdict, key, m.header.name, m.line + 1, ' '.join(m.builds),
                                                          m.shown()), flush=True)
                    verdict = 'survived'
            results.append((m, verdict))
            if options.sample and 100 * sum(v == 'killed' for _, v in results) >= options.bar * len(drawn):
                break
    table(results, headers)
    if options.v:
        for r in rows:
            print('note: %-13s %-7s %6.2f s, %4d runs, %4d kills' % (r.name, r.build_name, r.seconds,
                                                                     sum(r.runs.values()), sum(r.kills.values())))
    killed = sum(v == 'killed' for _, v in results)
    base = sum(v not in ('not compiled', 'equivalent') for _, v in results)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print('note: %.0f processor seconds' % sum(u.ru_utime + u.ru_stime for u in used))
    missing = max(0, -int(-options.bar * base // 100) - killed) + len(stale)
    print('%d passed, %d failed' % (killed, missing))
    return missing > 0


if __name__ == '__main__':
    sys.exit(main())
