#!/usr/bin/env python3
"""Whether every public name of the three headers has its comment in the agreed form.

   python3 tests/quality/comments.py [FOLDER]     (tests/port/headers.sh runs it; FOLDER holds
                                                  the headers)

The agreed form, for all that stands between a header's guard and its implementation:
  1. Options are explained in the manual. Else a comment stands directly above a public function,
     struct, type, list of constants or macro, or behind it in the same line; or the declaration
     belongs to a group: declarations without an empty line between them, of which the first has a
     comment. A comment that begins with dashes is the heading of a section; it counts only with
     more than its first line. A section may speak for groups whose names it gives.
  2. A comment has at least three words and does not only repeat the name.
  3. What returns moe_status says how it can fail: it names MOE_ERR_ codes, or whose errors it
     has ("errors as ...", "else as moe_...", "those of moe_..."), or "never fails".
     With a group this stands in the group's comment.
  4. The values of a list of constants are explained above the list, or behind each of them, or
     their names say all ("MOE_ACT_RELU" of "Activations.").
  5. Pointers: a parameter that may be NULL is said to be so with the function; its struct or the
     manual speaks for moe_error, moe_allocator and moe_kernels, which may be NULL everywhere. A
     pointer of which nothing is said must point to something. The manual says this, under
     "Pointers."
  6. Threads: the manual says under "Threads." what may be called from several threads at once; a
     function that differs says so itself.
The last line is "N passed, N failed"."""
import os
import re
import sys

HEADERS = ('moe_kernels.h', 'moe_routers.h', 'moe.h')


def public_part(text):
    """From the guard to the implementation, without the manual and the names of the double
    build."""
    return text[text.index('\n#define MOE_'):text.index('#if defined(MOE_IMPLEMENTATION) &&')]


def items(text):
    """("comment" | "blank" | "directive" | "code", line number, text), in order; a declaration
    is one item up to its semicolon."""
    lines, i = text.split('\n'), 0
    while i < len(lines):
        line, first = lines[i], i
        if not line.strip():
            yield 'blank', first, ''
        elif line.lstrip().startswith('/*'):
            while '*/' not in lines[i]:
                i += 1
            yield 'comment', first, '\n'.join(lines[first:i + 1])
        elif line.startswith('#') or re.match(r'[A-Z_]+\(\w+\)$', line):  # or an X-macro that declares its rows
            while lines[i].endswith('\\'):
                i += 1
            yield 'directive', first, '\n'.join(lines[first:i + 1])
        else:
            while not complete('\n'.join(lines[first:i + 1])):
                i += 1
                if i == len(lines) or i > first + 400:
                    sys.exit('line %d of the public part: a declaration without an end' % (first + 1))
            yield 'code', first, '\n'.join(lines[first:i + 1])
        i += 1


def complete(code):
    """Whether a declaration has ended, and no comment behind it is open."""
    if code.count('/*') != code.count('*/'):
        return False
    bare = re.sub(r'/\*.*?\*/|//[^\n]*', '', code, flags=re.S)
    if bare.strip() in ('extern "C" {', '}'):
        return True
    return bare.count('{') <= bare.count('}') and bare.rstrip().endswith((';', '}'))


class Declaration:
    def __init__(self, kind, names, code, line):
        self.kind, self.names, self.code, self.line = kind, names, code, line
        self.comment = self.section = self.fails = ''


def declaration(code, line):
    bare = re.sub(r'/\*.*?\*/', '', code, flags=re.S)
    if re.match(r'MOE_API\b', bare):
        return Declaration('status' if re.match(r'MOE_API moe_status ', bare) else 'function',
                           [re.search(r'(\w+)\(', bare).group(1)], code, line)
    if re.match(r'(typedef )?enum \{', bare):
        return Declaration('constants', re.findall(r'\b(MOEI?_\w+)(?=\s*(?:[=,}]|$))', bare[bare.index('{'):],
                                                   flags=re.M), code, line)
    found = re.match(r'(?:typedef )?struct (\w+) \{', bare)
    if found:
        return Declaration('struct', [found.group(1)], code, line)
    if bare.startswith('typedef '):
        return Declaration('type', [re.search(r'(moei?_\w+)\s*(?:\(.*\))?;', bare, flags=re.S).group(1)], code, line)
    return None


def macro(text, line):
    found = re.match(r'# *define (MOE_\w+)', text)
    return Declaration('macro', [found.group(1)], text, line) if found else None


def documented(text):
    """All declarations of a header, each with the comment that speaks for it."""
    comment, near, found, group, section = '', False, [], '', ''
    for kind, line, item in items(text):
        if kind == 'blank':
            group, near = '', False
        elif kind == 'comment':
            comment, near = item, True
            if item.startswith('/* --'):
                comment = section = item.partition('\n')[2]
        else:
            one = macro(item, line) if kind == 'directive' else declaration(item, line)
            if one is None:
                near = near and kind == 'directive'  # a condition between comment and declaration
                continue
            behind = ' '.join(re.findall(r'/\*.*?\*/', item, flags=re.S)) if one.kind != 'struct' else ''
            if near:
                group = comment
            one.comment = group + behind
            one.section = section
            near = False
            found.append(one)
    return found


def words_of(comment):
    return [w for w in re.findall(r"[A-Za-z0-9_^|<>=+*/'-]+", re.sub(r'/\*|\*/', ' ', comment)) if w]


FAILS = re.compile(r'MOE_ERR_|[Nn]ever fails|[Ee]rrors?:? (?:are |is |of |as |that|those|, )|as moe_\w+|those of '
                   r'|The same\b|its code', re.S)


def faults(one):
    if len(words_of(one.comment)) < 3:
        # A section may explain its first group; names of which it speaks are explained by it.
        if any(name in one.section for name in one.names):
            return
        yield 'no comment'
        return
    if one.kind == 'status' and not FAILS.search(one.fails + one.comment):
        yield 'the comment does not say how it can fail'


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..')
    passed = failed = 0
    for header in HEADERS:
        with open(os.path.join(folder, header), encoding='utf-8') as file:
            text = file.read()
        start = text.index('\n#define MOE_')
        above = text[:start].count('\n')
        manual = text[:text.index('\nMOE_API ')]
        for wanted in ('Threads.', 'Pointers.'):
            if wanted in manual:
                passed += 1
            else:
                failed += 1
                print('%s: the manual has no paragraph "%s"' % (header, wanted))
        found = documented(public_part(text))
        until = None
        for one in found:
            opened = re.search(r'this and the next calls,? up to\s+(moe_\w+)', one.comment, flags=re.I)
            if opened:
                until, shared = opened.group(1), one.comment
            if until and FAILS.search(shared):
                one.fails = shared
            if until in one.names:
                until = None
        for one in found:
            if one.names[0].lower().startswith('moei_'):
                continue  # private, though other headers or exported models name it
            if one.kind == 'macro' and (one.names[0].endswith('_H') or re.search(r'\b%s\b' % one.names[0], manual)):
                continue  # a guard; an option that the manual explains
            wrong = list(faults(one))
            passed += not wrong
            failed += bool(wrong)
            for fault in wrong:
                print('%s:%d: %s: %s' % (header, above + one.line + 1, ', '.join(one.names[:3]), fault))
        declared = len(re.findall(r'^MOE_API ', public_part(text), flags=re.M))
        seen = sum(one.kind in ('status', 'function') for one in found)
        if declared != seen or declared < 30:
            failed += 1
            print('%s: %d functions were seen and %d are declared: fix this test' % (header, seen, declared))
    print('%d passed, %d failed' % (passed, failed))
    return failed > 0


if __name__ == '__main__':
    sys.exit(main())
