#!/usr/bin/env python3
"""The rules of form, checked by script.

    python3 tests/style.py [OPTION...] [FILE|FOLDER...]     without one: all files of the repository

    --rule NAME[,NAME]   only these rules
    --totals             no offences, only how many there are of each rule
    --report             counts no failures and ends with status 0 whatever is found
    --words              the rule "word" too: prose for which terms.md has a plainer word

Each offence is a line "file:line: rule: text"; then the totals. The last line is
"N passed, N failed", counted in files.

For C:
  prose        a line of comment has at most 100 columns (a link may be longer)
  code         a line of code has at most 120 columns
  statement    one statement per line; what follows "if (...)" or "case X:" on its line may be one
  comma        no comma operator outside "for (...)"
  initialized  at most two variables with a value in one declaration
  function     a function has at most 60 lines; constant tables inside it do not count
  macro        nor has a macro with statements in it
  parallel     no two tables of the same length in a header: one row per thing has all of it
  pragma       no "#pragma GCC optimize"
  vacuous      no check that cannot fail: of a constant, of an assignment, of a thing against itself
For shell, Python and JavaScript: prose (comments, docstrings) and code. For Markdown: prose,
except tables, links and blocks of code. For headers besides:
  version      the first line is "/* NAME - vX.Y.Z - ..." with the version of moe_kernels.h; an
               extra names no version
  size         moe_kernels.h 420 kB, moe_routers.h 460 kB, moe.h 640 kB; README.md 450 lines
  public       the core has at most 160 public functions (MOE_API); a private one (moei_) is
               exported (MOEI_API) only if a header that moe_export.h prints may name it"""

import collections
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CORE = ['moe_kernels.h', 'moe_routers.h', 'moe.h']
SIZES = {'moe_kernels.h': 420000, 'moe_routers.h': 460000, 'moe.h': 640000}
PROSE, CODE, FUNCTION_LINES, PUBLIC, README_LINES = 100, 120, 60, 160, 450
WORDS = {
    r'the (way|road) back|walks? the road': 'backward pass, data flow',
    r'at home|home rank': 'local experts, owning rank',
    r'work memory': 'workspace',
    r'whole numbers?': 'integer',
    r'real numbers?': 'float',
    r'own mathematics': 'libm fallback',
    r'in size\b': 'in magnitude',
    r'nobody looks|does not look at': 'is not checked',
    r'mend(ed|s)?\b': 'fix',
    r'is a good one': 'is a valid default',
    r'hear[sd]?\b|quietly': 'all-gather of status, broadcast',
    r'decide together|decide apart': 'global, local routing',
    r'numbers in all tensors': 'parameter count',
}

# ---- C: what is comment, what is text, what is code ----

PIECES = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
TOKENS = re.compile(r'\w+|->|\+\+|--|<<=?|>>=?|&&|\|\||[-+*/%&|^<>=!]=|""|\n|\S')
NAME = re.compile(r'[A-Za-z_]\w*$')
LIST = re.compile(r'=|&&|\|\||[!?(+<>-]|return|==')  # a parenthesis behind these holds no arguments
DIRECTIVE = re.compile(r'^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', re.M)
TYPES = set('auto char const double enum extern float inline int long register restrict short signed static struct '
            'typedef union unsigned void volatile'.split())


def keep_lines(text, filler):
    return re.sub(r'[^\n]', filler, text)


def bare(text):
    """The text with comments blanked and strings emptied; every line and column stays."""
    def piece(m):
        found = m.group()
        return keep_lines(found, ' ') if found[0] == '/' else found[0] + '_' * (len(found) - 2) + found[0]
    return PIECES.sub(piece, text)


def tokens_of(code, line):
    found = []
    for m in TOKENS.finditer(re.sub(r'"_*"', '""', code).replace('\\\n', '\n')):
        if m.group() == '\n':
            line += 1
        else:
            found.append((m.group(), line))
    return found


class Reader:
    """Walks over the tokens of a file, or of a macro: statements, declarations, functions."""

    def __init__(self, tell):
        self.tell, self.braces, self.starts, self.head = tell, [], collections.Counter(), []
        self.statement, self.parens, self.saved, self.table_lines = [], [], [], 0

    def state(self):
        return list(self.braces), list(self.statement), list(self.parens), list(self.head), self.table_lines

    def directive(self, text):
        """The branches of a condition begin alike, so that braces stay even."""
        word = re.match(r'\s*#\s*(\w*)', text).group(1)
        if word.startswith('if'):
            self.saved.append(self.state())
        elif word.startswith('el') and self.saved:
            braces, statement, parens, head, self.table_lines = self.saved[-1]
            self.braces, self.statement = list(braces), list(statement)
            self.parens, self.head = list(parens), list(head)
        elif word == 'endif' and self.saved:
            self.saved.pop()

    def read(self, tokens):
        for i, (word, line) in enumerate(tokens):
            self.take(word, line)

    def inside(self, *kinds):
        return bool(self.braces) and self.braces[-1][0] in kinds

    def take(self, word, line):
        words = [w for w, _ in self.statement]
        if word in '([':
            self.parens.append(len(self.statement))
        elif word in ')]' and self.parens:
            begin = self.parens.pop()
            self.statement.append((word, line))
            if not self.parens and not self.inside('data') and self.control([w for w, _ in self.statement[:begin]]):
                self.condition(self.statement[begin:], words[0])
                self.statement = []
            return
        elif word == '{':
            return self.open(words, line)
        elif word == '}':
            return self.close(line)
        elif word == ';' and not self.parens and not self.inside('data'):
            return self.finish()
        elif word == ':' and not self.parens and not self.inside('data') and \
                (words[:1] in (['case'], ['default']) or len(words) == 1):
            self.statement = []
            return
        elif word in ('else', 'do') and not words:
            return
        self.statement.append((word, line))

    @staticmethod
    def control(words):
        return words[:1] in (['if'], ['for'], ['while'], ['switch']) and len(words) == 1

    def condition(self, tokens, word):
        if word != 'for' and any(w == ',' and d == 1 for w, d, _ in depths(tokens)):
            self.tell(tokens[0][1], 'comma', 'a comma operator in the condition of "%s"' % word)
        self.inner_commas(tokens)

    def open(self, words, line):
        top = [w for w, d, _ in depths(self.statement) if d == 0]
        if words[:1] == ['extern'] and len(words) == 2:
            self.statement = []
            self.braces.append(('linkage', line, []))
            return
        if self.parens or self.inside('data') or '=' in top or words[:1] == ['return'] or \
                'enum' in top and '(' not in words:
            kind = 'data'
        elif ('struct' in top or 'union' in top) and (not words or words[-1] != ')'):
            kind = 'struct'
        elif self.inside('struct'):
            kind = 'data'
        else:
            kind = 'block'
        self.statement.append(('{', line))
        if kind == 'block':
            if not [b for b in self.braces if b[0] == 'block'] and words and words[-1] == ')':
                self.head, self.table_lines = [self.statement[0][1], self.name(words)], 0
            self.braces.append((kind, line, []))
            self.statement = []
        else:
            self.braces.append((kind, line, self.parens))
            self.parens = []

    @staticmethod
    def name(words):
        return words[words.index('(') - 1] if '(' in words else '?'

    def close(self, line):
        if not self.braces:
            return
        kind, begin, parens = self.braces.pop()
        if kind in ('block', 'linkage'):
            self.statement = []
            if self.head and not [b for b in self.braces if b[0] == 'block' and b[1] >= self.head[0]]:
                first, name = self.head
                length = line - first + 1 - self.table_lines
                if length > FUNCTION_LINES:
                    self.tell(first, 'function', '%s has %d lines' % (name, length))
                self.head = []
        else:
            self.parens = parens
            self.statement.append(('}', line))

    def finish(self):
        """A statement or a declaration has ended."""
        if self.inside('struct'):
            return
        statement, self.statement = self.statement, []
        if not statement:
            return
        words, line = [w for w, _ in statement], statement[0][1]
        self.starts[line] += 1
        if self.starts[line] == 2:
            self.tell(line, 'statement', 'more than one statement')
        flat = [(w, l) for w, d, l in depths(statement) if d == 0]
        if declares(words):
            values = sum(1 for w, _ in flat if w == '=')
            if values > 2:
                self.tell(line, 'initialized', '%d variables with a value in one declaration' % values)
            if words[0] == 'static' and 'const' in words and '{' in words and self.head:
                self.table_lines += statement[-1][1] - line + 1
        elif any(w == ',' for w, _ in flat):
            self.tell(line, 'comma', 'a comma operator')
        self.inner_commas(statement)

    def inner_commas(self, statement):
        """(a, b) that is no list of arguments."""
        before, stack = '', []
        for word, line in statement:
            if word == '(':
                stack.append(LIST.fullmatch(before) is not None)
            elif word == ')' and stack:
                stack.pop()
            elif word == ',' and stack and stack[-1]:
                self.tell(line, 'comma', 'a comma operator in parentheses')
                stack[-1] = False
            before = word


def depths(statement):
    depth, found = 0, []
    for word, line in statement:
        if word in ')]}':
            depth -= 1
        found.append((word, depth, line))
        if word in '([{':
            depth += 1
    return found


def declares(words):
    if words[0] in ('return', 'goto', 'break', 'continue'):
        return False
    if words[0] in TYPES or len(words) > 1 and NAME.match(words[0]) and NAME.match(words[1]):
        return True
    name = [w for w in words[1:] if w != '*']
    behind = (name[1:2] or [';'])[0]
    return NAME.match(words[0]) is not None and words[1:2] == ['*'] and behind in ('=', ',', ';', '[', '(')


def check_c(text, tell):
    code = bare(text)
    check_vacuous(text, code, tell)
    for number, (line, rest) in enumerate(zip(text.split('\n'), code.split('\n')), 1):
        check_width(number, line, not rest.strip(' \\'), tell)
    reader = Reader(tell)
    at = 0
    for m in list(DIRECTIVE.finditer(code)) + [None]:
        end = m.start() if m else len(code)
        reader.read(tokens_of(code[at:end], code.count('\n', 0, at) + 1))
        if m is None:
            break
        reader.directive(m.group())
        line = code.count('\n', 0, m.start()) + 1
        if re.match(r'\s*#\s*pragma\s+GCC\s+optimize', m.group()):
            tell(line, 'pragma', m.group().strip())
        define = re.match(r'\s*#\s*define\s+\w+(\([^)]*\))?', m.group())
        if define:
            inner = Reader(tell)
            inner.braces.append(('block', 0, []))
            inner.starts = reader.starts
            inner.read(tokens_of(m.group()[define.end():], line))
            length = m.group().count('\n') + 1
            if length > FUNCTION_LINES and ';' in m.group():
                tell(line, 'macro', '%s has %d lines' % (define.group().split()[1].split('(')[0], length))
        at = m.end()


# ---- checks that cannot fail ----

CHECKS = re.compile(r'\b(CHECK\w*|check\w*|want\w*|expect\w*|AGREES?|IS|NEAR|NEARLY|STATUS|WORKS)\(')
CONDITION = re.compile(r'(CHECK(_AT|_OF|_SAYS|F)?|AGREES|check|want|WORKS)$')  # those of one condition
PAIR = re.compile(r'\b(same\w*|\w*cmp|near\w*|CHECK_(?:NEAR|CLOSE|STATUS)|AGREES|IS|NEAR|NEARLY|STATUS)\(')
PLACES = {'f', 'line', '__LINE__'}  # what may stand before the condition
OPERAND_ENDS = {'&&', '||', '?', ':', ',', '!', '='}
WORDS_OF_C = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|' + TOKENS.pattern.replace('|""|\\n', ''))


def arguments_of(code, at):
    """The spans of the arguments of a call, from behind its parenthesis on."""
    depth, begin, found = 0, at, []
    for i in range(at, len(code)):
        depth += (code[i] in '([{') - (code[i] in ')]}')
        if depth < 0 or code[i] == ',' and depth == 0:
            found.append((begin, i))
            begin = i + 1
        if depth < 0:
            break
    return found


def operand(words, i, step):
    """The operand before (step -1) or behind (1) the operator at i."""
    depth, found, i = 0, [], i + step
    while 0 <= i < len(words) and not (depth == 0 and words[i] in OPERAND_ENDS):
        depth += step * ((words[i] in '([{') - (words[i] in ')]}'))
        if depth < 0:
            break
        found.append(words[i])
        i += step
    return found[::step]


def compares_itself(words):
    """x != x is left: it asks for a NaN."""
    return any(word in ('==', '<=', '>=', '<', '>') and operand(words, i, -1) == operand(words, i, 1)
               for i, word in enumerate(words))


def always_holds(words):
    depth, parts, assigns = 0, [[]], False
    for word in words:
        depth += (word in '([{') - (word in ')]}')
        if depth == 0 and word == '||':
            parts.append([])
        else:
            parts[-1].append(word)
        assigns |= depth == 0 and word == '='
    literal = [''.join(part).strip('()') for part in parts]
    return assigns or any(re.fullmatch(r'0*[1-9]\d*|!0|"[^"]*"', word) for word in literal)


def check_vacuous(text, code, tell):
    def words_of(span):
        return WORDS_OF_C.findall(text[span[0]:span[1]])
    for m in CHECKS.finditer(code):
        spans = arguments_of(code, m.end())
        line = code.count('\n', 0, m.start()) + 1
        if any(compares_itself(words_of(span)) for span in spans):
            tell(line, 'vacuous', '%s compares a thing with itself' % m.group(1))
        while len(spans) > 1 and text[spans[0][0]:spans[0][1]].strip() in PLACES:
            spans = spans[1:]
        if spans and CONDITION.match(m.group(1)) and always_holds(words_of(spans[0])):
            tell(line, 'vacuous', '%s of what always holds' % m.group(1))
    for m in PAIR.finditer(code):
        spans = arguments_of(code, m.end())
        if len(spans) > 1 and words_of(spans[0]) == words_of(spans[1]) != []:
            tell(code.count('\n', 0, m.start()) + 1, 'vacuous', '%s of a thing and itself' % m.group(1))


PLANTED = {  # what the rule must see, and what it must not
    True: ['CHECK(1);', 'CHECK(!0, "text");', 'CHECK("text");', 'CHECK(a > 2 || 1);', 'CHECK(f, 1, "text");',
           'CHECK(n = 3);', 'CHECK(f(x) == f(x), "text");', 'CHECK(a && b[1] <= b[1]);', 'check(x >= x, "text");',
           'CHECK(same_reals(a, a, n));', 'CHECK_NEAR(r.x, r.x, 0.0);', 'CHECK_STATUS(MOE_OK, MOE_OK, "text");'],
    False: ['CHECK(0);', 'CHECK(x != x);', 'CHECK((n = f()) > 0);', 'CHECK(f("a") == f("b"));', 'CHECK(x[1] == x[2]);',
            'CHECK_NEAR(x, 1, 0.0);', 'CHECK(a - b == c - b);', 'CHECK(a->x == b->x && b->y == c->y, "text");',
            'CHECK(strcmp("a", "b") != 0);', 'CHECK_AT(line, a < b || b < a, "text");']}


def missed_planted():
    """The planted lines that the rule takes for the other kind."""
    missed = []
    for wanted, lines in PLANTED.items():
        for line in lines:
            seen = []
            check_vacuous(line, bare(line), lambda number, rule, text: seen.append(text))
            missed += [line] if bool(seen) != wanted else []
    return missed


TABLE = re.compile(r'^[ \t]*static const ([^;={}()]*?)(\w+)\[([A-Z][A-Z0-9_]*)\](?:\[\w+\])? = \{', re.M)


def check_tables(code, tell):
    tables = collections.defaultdict(list)
    for m in TABLE.finditer(code):
        tables[m.group(3)].append((code.count('\n', 0, m.start()) + 1, m.group(2)))
    for bound, found in tables.items():
        for line, name in found[1:]:
            tell(line, 'parallel', '%s[%s] beside %s' % (name, bound, found[0][1]))


def check_width(number, line, is_prose, tell):
    if is_prose and len(line) > PROSE and (len(line.split()) > 2 or '://' not in line):
        tell(number, 'prose', '%d columns' % len(line))
    elif not is_prose and len(line) > CODE:
        tell(number, 'code', '%d columns' % len(line))


# ---- other files ----

def check_script(text, tell):
    quoted = False
    for number, line in enumerate(text.split('\n'), 1):
        quotes = line.count('"""')
        is_prose = quoted or line.lstrip().startswith(('#', '//', '/*', '*', '"""'))
        check_width(number, line, is_prose, tell)
        quoted ^= quotes % 2 == 1


LINK = re.compile(r'\s*(- )?!?\[[^]]*\]\([^)]*\)\W*$')


def check_markdown(text, tell):
    fenced = False
    for number, line in enumerate(text.split('\n'), 1):
        if line.startswith('```'):
            fenced = not fenced
        elif not line.startswith(('|', '<', '[')) and not LINK.match(line):
            check_width(number, line, not fenced, tell)


def declared(text, macro):
    """The functions that a header declares with MOE_API or MOEI_API; a macro's name##_x is name."""
    return set(re.findall(r'^(?:#define \w+\(\w+\) )?%s [^;]*?[ *](moei?_\w+)(?:##\w+)?\(' % macro, text, re.M))


def check_header(path, name, text, tell):
    if name in SIZES and len(text.encode()) > SIZES[name]:
        tell(1, 'size', '%d bytes, at most %d' % (len(text.encode()), SIZES[name]))
    with open(os.path.join(ROOT, 'moe_kernels.h'), encoding='utf-8') as file:
        version = re.search(r'^#define MOE_VERSION "(.*)"', file.read(), re.M).group(1)
    first = '/* %s - ' % name + ('v%s - ' % version if name in CORE else '')
    if not text.startswith(first):
        tell(1, 'version', 'the first line does not begin with "%s"' % first)
    if name == 'moe.h' and os.path.dirname(os.path.abspath(path)) == ROOT:
        count = 0
        for core in CORE:
            with open(os.path.join(ROOT, core), encoding='utf-8') as file:
                count += len(declared(file.read(), 'MOE_API'))
        if count > PUBLIC:
            tell(1, 'public', 'the core has %d public functions, at most %d' % (count, PUBLIC))
    if name in CORE or name.startswith('moe_'):
        with open(os.path.join(ROOT, 'examples', 'extras', 'moe_export.h'), encoding='utf-8') as file:
            export = file.read()
        table = re.search(r'^} moei_function_names\[\] = \{.*?^\};', export, re.M | re.S).group()
        printed = set(re.findall(r'moei_\w+', table + ''.join(re.findall(r'"[^"\n]*"', export))))
        for function in declared(text, 'MOEI_API') - printed:
            tell(1, 'public', '%s is declared MOEI_API, and no exported model names it' % function)
        for function in declared(text, 'MOE_API'):
            if not function.startswith('moe_'):
                tell(1, 'public', '%s is declared MOE_API' % function)


def check_words(text, tell):
    for number, line in enumerate(text.split('\n'), 1):
        for pattern, plain in WORDS.items():
            for m in re.finditer(r'\b(?:%s)' % pattern, line):
                tell(number, 'word', '"%s": %s' % (m.group(), plain))


FUNCTION = re.compile(r'^(?!#|typedef|struct|enum|union)[^\n;={}]*?\b(moei?_\w+)\([^;{}]*\) '
                      r'(\{\n.*?^\}|\{[^\n]*\})$', re.M | re.S)
HEADING = re.compile(r'^/\* ==== (.*?)[ =*/]*$', re.M)


def sections(paths):
    """Which section calls which, {from: {to: (function, called)}}."""
    home, calls = {}, []
    for path in paths:
        with open(path, encoding='utf-8') as file:
            text = file.read()
        headings = [(m.start(), '%s: %s' % (os.path.basename(path), m.group(1))) for m in HEADING.finditer(text)]
        for m in FUNCTION.finditer(bare(text)):
            home[m.group(1)] = ([name for at, name in headings if at < m.start()] or [path])[-1]
            calls.append((m.group(1), set(re.findall(r'\b(moei?_\w+) ?\(', m.group(2)))))
    graph = collections.defaultdict(dict)
    for function, called in calls:
        for name in called:
            if home.get(name, home[function]) != home[function]:
                graph[home[function]][home[name]] = (function, name)
    return graph


def check_cycles(paths):
    """Takes away what calls nothing that is left, and what nothing that is left calls; what
    stays lies on cycles."""
    graph = sections(paths)
    left, before = set(graph), None
    while left != before:
        before = left
        left = {a for a in left if any(b in left for b in graph[a]) and any(a in graph[b] for b in left)}
    return ['%s calls %s: %s calls %s' % ((a, b) + graph[a][b]) for a in sorted(left) for b in graph[a] if b in left]


def check(path, words):
    offences = []

    def tell(line, rule, text):
        offences.append((line, rule, text))
    name = os.path.basename(path)
    try:
        with open(path, encoding='utf-8') as file:
            text = file.read()
    except UnicodeDecodeError:
        return offences
    if name.endswith(('.c', '.h', '.cpp')):
        check_c(text, tell)
        if re.match(r'moe\w*\.h$', name):
            check_tables(bare(text), tell)
            check_header(path, name, text, tell)
    elif name.endswith('.md'):
        check_markdown(text, tell)
        if name == 'README.md' and os.path.dirname(os.path.abspath(path)) == ROOT and text.count('\n') > README_LINES:
            tell(1, 'size', '%d lines, at most %d' % (text.count('\n'), README_LINES))
    elif name.endswith(('.sh', '.py', '.mjs')) or text.startswith('#!'):
        check_script(text, tell)
    if words:
        check_words(text, tell)
    return sorted(set(offences))


def repository(folder):
    """The files of a folder to which rules apply."""
    listed = subprocess.run(['git', 'ls-files', '--cached', '--others', '--exclude-standard'], cwd=folder,
                            stdout=subprocess.PIPE, universal_newlines=True).stdout.split('\n')
    wanted = re.compile(r'\.(c|h|cpp|sh|py|mjs|md)$|(^|/)(run|amalgamate)$')
    paths = [os.path.join(folder, name) for name in listed if wanted.search(name) and '/corpus/' not in name]
    return [path for path in paths if os.path.isfile(path)]


def main():
    options, files, rules = set(), [], None
    words = sys.argv[1:]
    while words:
        word = words.pop(0)
        if word in ('-h', '--help'):
            print(__doc__)
            return 0
        if word == '--rule' and words:
            rules = words.pop(0).split(',')
        elif word in ('--report', '--totals', '--words'):
            options.add(word)
        elif word.startswith('-'):
            print('style.py: no such option: %s (-h explains)' % word, file=sys.stderr)
            return 2
        else:
            files += repository(word) if os.path.isdir(word) else [word]
    passed = failed = 0
    totals = collections.Counter()
    about_words = '--words' in options or rules is not None and 'word' in rules
    for path in files or repository(ROOT):
        found = [o for o in check(path, about_words) if rules is None or o[1] in rules]
        for line, rule, text in found:
            totals[rule] += 1
            if '--totals' not in options:
                print('%s:%d: %s: %s' % (os.path.relpath(path), line, rule, text))
        passed, failed = passed + (not found), failed + bool(found)
    if not files and (rules is None or 'cycle' in rules):
        headers = [path for path in repository(ROOT) if re.match(r'moe\w*\.h$', os.path.basename(path))]
        found = check_cycles(headers)
        totals.update({'cycle': len(found)} if found else {})
        for text in found:
            print('cycle: %s' % text)
        passed, failed = passed + (not found), failed + bool(found)
    if not files and (rules is None or 'vacuous' in rules):
        found = missed_planted()
        totals.update({'vacuous': len(found)} if found else {})
        for text in found:
            print('vacuous: the rule is wrong about %s' % text)
        passed, failed = passed + (not found), failed + bool(found)
    for rule, count in totals.most_common():
        print('%-12s %6d' % (rule, count))
    if '--report' in options and failed:
        print('note: %d files would fail' % failed)
        failed = 0
    print('%d passed, %d failed' % (passed, failed))
    return failed > 0


if __name__ == '__main__':
    sys.exit(main())
