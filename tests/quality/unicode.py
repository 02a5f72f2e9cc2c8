#!/usr/bin/env python3
"""The classes of Unicode code points in examples/extras/moe_import.h.

    python3 tests/quality/unicode.py            checks the table in the header
    python3 tests/quality/unicode.py --write    replaces it; Python must know Unicode 14

The facts come from Python's unicodedata. If that knows another version of Unicode, only code points
whose category it gives as Unicode 3.2 did (unicodedata.ucd_3_2_0), are compared: these do not
change. The last line is "N passed, N failed"."""

import os
import re
import sys
import unicodedata

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HEADER = os.path.join(ROOT, 'examples', 'extras', 'moe_import.h')
VERSION = '14.0.0'
SPACES = {*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}
OTHER, UPPER, LOWER, LETTER, NUMBER, MARK, PUNCTUATION, SYMBOL, SPACE, EVEN, ODD = range(11)
CLASSES = {'Lu': UPPER, 'Lt': UPPER, 'Ll': LOWER, 'Lm': LETTER, 'Lo': LETTER,
           'N': NUMBER, 'M': MARK, 'P': PUNCTUATION, 'S': SYMBOL}
TABLE = re.compile(r'(static const uint32_t moei_rune_changes\[\] = \{\n)(.*?)(\};)', re.S)


def category(code, source):
    name = source.category(chr(code))
    return SPACE if code in SPACES else CLASSES.get(name, CLASSES.get(name[0], OTHER))


def changes():
    """(first code point, class) wherever the class changes. EVEN: even ones UPPER, odd ones LOWER;
    ODD: the reverse."""
    classes = [category(code, unicodedata) for code in range(0x110000)]
    found, code = [], 0
    while code < len(classes):
        end = code + 1
        while end < len(classes) and classes[end] == classes[code]:
            end += 1
        if end == code + 1 and classes[code] in (UPPER, LOWER):
            while end < len(classes) and {classes[end - 1], classes[end]} == {UPPER, LOWER}:
                end += 1
            end -= end < len(classes) and classes[end - 1] == classes[end]
        kind = classes[code]
        if end > code + 2 and classes[code + 1] != kind:
            kind = EVEN if (kind == UPPER) == (code % 2 == 0) else ODD
        elif end > code + 1 and classes[code + 1] != kind:
            end = code + 1
        found.append((code, kind))
        code = end
    return found


def printed(rows):
    lines = ['   ']
    for code, kind in rows:
        word = ' %s,' % hex(code << 4 | kind)
        if len(lines[-1]) + len(word) > 120:
            lines.append('   ')
        lines[-1] += word
    return ''.join(line + '\n' for line in lines)


def expanded(rows):
    classes = []
    for (code, kind), (end, _) in zip(rows, rows[1:] + [(0x110000, 0)]):
        if kind in (EVEN, ODD):
            classes += [UPPER if (c % 2 == 0) == (kind == EVEN) else LOWER for c in range(code, end)]
        else:
            classes += [kind] * (end - code)
    return classes


def main():
    with open(HEADER, encoding='utf-8') as file:
        text = file.read()
    if sys.argv[1:] == ['--write']:
        if unicodedata.unidata_version != VERSION:
            sys.exit('unicode.py: Python knows Unicode %s, not %s' % (unicodedata.unidata_version, VERSION))
        text = TABLE.sub(lambda m: m.group(1) + printed(changes()) + m.group(3), text)
        with open(HEADER, 'w', encoding='utf-8') as file:
            file.write(text)
    numbers = [int(word, 16) for word in re.findall(r'0x[0-9a-f]+', TABLE.search(text).group(2))]
    classes = expanded([(number >> 4, number & 15) for number in numbers])
    same = unicodedata.unidata_version == VERSION
    failed = len(classes) != 0x110000
    for code in range(len(classes)):
        now = category(code, unicodedata)
        if same or (now != OTHER and now == category(code, unicodedata.ucd_3_2_0)):
            if now != classes[code] and not failed:
                print('U+%04X: class %d, must be %d' % (code, classes[code], now))
                failed = True
    print('%d changes of class; Python knows Unicode %s' % (len(numbers), unicodedata.unidata_version))
    print('%d passed, %d failed' % (not failed, failed))
    return failed


if __name__ == '__main__':
    sys.exit(main())
