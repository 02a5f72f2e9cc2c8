#!/usr/bin/env python3
"""Writes the tables of tests/bench/README.md from the rows of one run of the bench.

    python3 tests/bench/tables.py FOLDER      prints the page with the tables of FOLDER's rows
    python3 tests/bench/tables.py --verify    whether the page has the tables of results/*.csv

`sh tests/run bench --write` makes the rows, machine.csv and NAME.csv, and then the page. Tables
stand between the lines "<!-- rows: NAME -->" and "<!-- end -->"; every sentence with a count of
rows does too."""

import csv
import os
import re
import sys
import textwrap

HERE = os.path.dirname(os.path.abspath(__file__))
PAGE = os.path.join(HERE, 'README.md')
RESULTS = os.path.join(HERE, 'results')
NAMES = ['layers', 'layers_thin', 'training', 'tiny', 'quant', 'threads', 'text']
NOISE = 1.03  # a library that is ahead by less may be so by chance
# columns of the rows; * has packed the weights beforehand
LIBRARIES = [('OpenBLAS', 'openblas', False), ('oneDNN', 'onednn', False), ('oneDNN*', 'onednn_packed', True),
             ('libxsmm*', 'libxsmm_packed', True)]


class Refused(Exception):
    pass


# ---- rows ----

def read_rows(folder, name):
    with open(os.path.join(folder, name + '.csv'), newline='') as file:
        return list(csv.DictReader(file))


def read_run(folder):
    """(facts, {name: rows}) of a folder; all of them must be of one run."""
    try:
        with open(os.path.join(folder, 'machine.csv'), newline='') as file:
            facts = dict(csv.reader(file))
        names = NAMES + ['layers_avx2'] * os.path.exists(os.path.join(folder, 'layers_avx2.csv'))
        rows = {name: read_rows(folder, name) for name in names}
    except (OSError, ValueError) as e:
        raise Refused(e)
    for name in names:
        if not rows[name]:
            raise Refused('%s.csv has no rows' % name)
        for row in rows[name]:
            if row['run'] != facts['run']:
                raise Refused('%s.csv has a row of another run: %s, not %s' % (name, row['run'], facts['run']))
            kernels = 'avx2' if name == 'layers_avx2' else rows['layers'][0]['kernels']
            if (row['bench'], row['kernels']) != (name.split('_')[0], kernels):
                raise Refused('%s.csv has a row of %s, kernels %s' % (name, row['bench'], row['kernels']))
    return facts, rows


def number(row, column):
    return float(row[column]) if row[column] else None


def is_faster(value):
    """By the two digits that are shown: sentences count what a reader sees."""
    return round(value, 2) > 1


def is_slower(value):
    return value * NOISE < 1


def weights_bytes(row):
    """Of the experts that have tokens."""
    return 4 * int(row['experts_used']) * (3 if row['expert'] == 'swiglu' else 2) * int(row['d']) * int(row['d_ff'])


def is_missed(row):
    return row['holds'] == '0'


# ---- cells ----

def layer_of(row):
    return '%s %s/%s, %s of %s' % (row['expert'], row['d'], row['d_ff'], row['top_k'], row['experts'])


def time_text(us):
    return '%.2f' % us if us < 10 else '%.1f' % us if us < 100 else '%.0f' % us


def ratio_text(value):
    """Bold where the other library is faster."""
    return '-' if value is None else '**%.2f**' % value if round(value, 2) < 1 else '%.2f' % value


def bound_text(row, form='%.0f'):
    if row['bound'] == '':
        return '-'
    return form % float(row['bound']) + (' **missed**' if is_missed(row) else '')


def percent_text(value):
    return '-' if value is None else '%.0f %%' % value


def table(heading, sides, lines):
    """sides: l or r for each column."""
    rule = ['---:' if side == 'r' else '---' for side in sides]
    return '\n'.join(['| %s |' % ' | '.join(heading), '|%s|' % '|'.join(rule)] +
                     ['| %s |' % ' | '.join(cells) for cells in lines])


def prose(text, first='', others=''):
    """A number keeps its percent sign."""
    lines = textwrap.fill(first + text.replace(' %', '\0%'), 100, subsequent_indent=others, break_long_words=False,
                          break_on_hyphens=False)
    return lines.replace('\0', ' ')


def bullets(texts):
    return '\n'.join(prose(text, '- ', '  ') for text in texts)


# ---- who is faster ----

def installed(rows):
    return [(name, column, packs) for name, column, packs in LIBRARIES
            if any(row[column + '_ratio'] for row in rows)]


def rivals(rows, weights):
    """Packed weights meet all libraries, weights as they are those that take them so."""
    return [library for library in installed(rows) if weights == 'packed' or not library[2]]


def least(row, libraries):
    """(ratio, library) of the fastest one, or None."""
    found = [(number(row, column + '_ratio'), name) for name, column, _ in libraries if row[column + '_ratio']]
    return min(found) if found else None


def place_of(row, value, library):
    tokens = int(row['tokens'])
    return '%.2f (%s, %s, %d token%s)' % (value, library, layer_of(row), tokens, 's' * (tokens > 1))


def judged(rows, weights):
    """[(ratio, library, row)] of the cells that some library was in."""
    libraries = rivals(rows, weights)
    found = [(least(row, libraries), row) for row in rows if row['weights'] == weights]
    return [best + (row,) for best, row in found if best]


def standing(rows, weights):
    """(cells, faster than every library, behind by more than noise, the worst cell)"""
    cells = judged(rows, weights)
    worst = min(cells, key=lambda cell: cell[0]) if cells else None
    return (len(cells), sum(is_faster(value) for value, _, _ in cells), sum(is_slower(value) for value, _, _ in cells),
            place_of(worst[2], worst[0], worst[1]) if worst else '-')


def claim(rows, weights):
    cells, ahead, late, worst = standing(rows, weights)
    if cells == 0:
        return 'no other library was installed'
    against = 'every library' if weights == 'packed' else 'every library that takes weights as they are'
    return 'faster than %s in %d of %d cells, behind one by more than 3 %% in %d; the least ratio is %s' % (
        against, ahead, cells, late, worst)


def sentence(text):
    return text[0].upper() + text[1:] + '.'


def layers(rows, weights):
    libraries = installed(rows)
    lines = []
    for row in rows:
        if row['weights'] != weights:
            continue
        limit = percent_text(number(row, 'percent_of_roofline'))
        lines.append([layer_of(row), row['tokens'], time_text(number(row, 'us')),
                      '%s %s' % (limit, row['limit']) if row['limit'] else limit, bound_text(row, '%.0f %%')] +
                     [ratio_text(number(row, column + '_ratio')) for _, column, _ in libraries])
    heading = ['layer', 'tokens', 'us', 'of the limit', 'at least'] + [name for name, _, _ in libraries]
    return prose(sentence(claim(rows, weights))) + '\n\n' + table(heading, 'l' + 'r' * (len(heading) - 1), lines)


def layers_avx2(rows):
    if 'layers_avx2' not in rows:
        return 'Measured only where the widest kernels are those of AVX-512.'
    return '\n\n'.join('%s\n\n%s' % (title, layers(rows['layers_avx2'], weights)) for title, weights in
                       [('### Packed weights', 'packed'), ('### Weights as they are', 'plain')])


def behind(rows):
    """How often, by numbers of tokens."""
    lines = []
    for name in ['layers', 'layers_avx2', 'tiny']:
        for weights in ['packed', 'plain']:
            for tokens in sorted({int(row['tokens']) for row in rows.get(name, [])}):
                cells = [row for row in rows[name] if int(row['tokens']) == tokens]
                count, ahead, late, worst = standing(cells, weights)
                lines.append([rows[name][0]['kernels'], weights, '1, tiny' if name == 'tiny' else str(tokens),
                              str(count), str(ahead), str(late), worst])
    return table(['kernels', 'weights', 'tokens', 'cells', 'faster than every library', 'behind by more than 3 %',
                  'least ratio'], 'llrrrrl', lines)


def thin(rows):
    """What is left where products take next to nothing: layers whose experts are 16 wide."""
    lines = []
    for row in rows['layers_thin']:
        ours, theirs = number(row, 'us'), number(row, 'libxsmm_packed_us')
        if row['weights'] == 'packed' and theirs is not None:
            lines.append([layer_of(row), row['tokens'], time_text(ours), time_text(theirs), time_text(ours - theirs)])
    if not lines:
        return 'libxsmm was not installed.'
    return table(['layer', 'tokens', 'us', 'libxsmm*, us', 'difference, us'], 'lrrrr', lines)


def few(rows):
    """Few tokens, weights as they are: by the size of the weights in use."""
    lines = []
    cells = [cell for cell in judged(rows['layers'], 'plain') if int(cell[2]['tokens']) <= 8]
    for title, low, high in [('up to 1 MiB', 0, 1), ('1 to 4 MiB', 1, 4), ('4 to 16 MiB', 4, 16),
                             ('more than 16 MiB', 16, 1 << 40)]:
        values = [value for value, _, row in cells if low << 20 < weights_bytes(row) <= high << 20]
        if values:
            lines.append([title, str(len(values)), str(sum(is_faster(value) for value in values)), '%.2f' % min(values),
                          '%.2f' % max(values)])
    return table(['weights in use', 'cells', 'faster than every library', 'least ratio', 'largest'], 'lrrrr', lines)


# ---- the other tables ----

def training(rows):
    lines = [[layer_of(row), row['tokens'], '%.2f' % (number(row, 'us') / 1000),
              percent_text(number(row, 'percent_of_peak')), bound_text(row, '%.0f %%')] for row in rows['training']]
    return table(['layer', 'tokens', 'ms', 'of the peak', 'at least'], 'lrrrr', lines)


def tiny(rows):
    libraries = installed(rows['tiny'])
    lines = [[layer_of(row), row['weights'], time_text(number(row, 'us')), '%.2f' % number(row, 'ratio'),
              bound_text(row, '%.1f')] + [ratio_text(number(row, column + '_ratio')) for _, column, _ in libraries]
             for row in rows['tiny']]
    heading = ['layer', 'weights', 'us', 'times as long as loops', 'at most']
    return table(heading + [name for name, _, _ in libraries], 'll' + 'r' * (len(libraries) + 3), lines)


def speed_missed(row):
    return is_missed(row) and row['bound'] != '' and number(row, 'ratio') < number(row, 'bound')


def error_missed(row):
    return row['rms_bound'] != '' and number(row, 'relative_rms') > number(row, 'rms_bound')


def quant_cell(row):
    return ratio_text(number(row, 'ratio')) + (' (missed: %s)' % row['bound'] if speed_missed(row) else '')


def quant(rows):
    types, cells = [], {}
    for row in rows['quant']:
        if row['weights'] not in types:
            types.append(row['weights'])
        cells.setdefault((layer_of(row), row['tokens']), {})[row['weights']] = row
    lines = []
    for (layer, tokens), cell in cells.items():
        lines.append([layer, tokens] + [quant_cell(cell[name]) if name in cell else '-' for name in types])
    errors = []
    for name in types:
        for expert in sorted({row['expert'] for row in rows['quant']}, reverse=True):
            some = [row for row in rows['quant'] if row['weights'] == name and row['expert'] == expert]
            if not some:
                continue
            values = [100 * number(row, 'relative_rms') for row in some]
            errors.append([name, expert, '%.2g %%' % min(values), '%.2g %%' % max(values),
                           '-' if not some[0]['rms_bound'] else '%.1f %%' % (100 * number(some[0], 'rms_bound')) +
                           ' **missed**' * any(error_missed(row) for row in some)])
    return '%s\n\n%s' % (table(['layer', 'tokens'] + types, 'lr' + 'r' * len(types), lines),
                         table(['weights', 'experts', 'least error', 'largest error', 'at most'], 'llrrr', errors))


def threads(rows):
    lines = [[layer_of(row), row['weights'], row['tokens'], time_text(number(row, 'us')),
              ratio_text(number(row, 'ratio')), bound_text(row, '%.1f')] for row in rows['threads']]
    heading = ['layer', 'weights', 'tokens', 'us', 'times as fast as one', 'at least']
    return '%s threads, by the clock on the wall.\n\n%s' % (rows['threads'][0]['threads'],
                                                            table(heading, 'llrrrr', lines))


def text(facts, rows):
    row = rows['text'][0]
    us = number(row, 'us')
    line = ['%.1f' % (us / 1000), '%.0f' % (1e6 * int(row['tokens']) / us),
            percent_text(number(row, 'percent_of_peak')), ratio_text(number(row, 'ratio')), bound_text(row, '%.1f')]
    about = 'PyTorch %s.' % facts['pytorch'] if 'pytorch' in facts else 'PyTorch was not installed.'
    heading = ['ms for a step', 'tokens/s', 'of the peak', 'PyTorch', 'at least']
    return '%s\n\n%s' % (prose(about), table(heading, 'rrrrr', [line]))


def bounds(rows):
    """(missed, all, a table of them)"""
    lines = []

    def add(what, misses):
        misses = list(misses)
        if misses:
            lines.append([what, str(len(misses)), str(sum(misses))])
    for name, title in [('layers', 'layers'), ('layers_avx2', 'layers, AVX2')]:
        add(title + ': of the limit', (is_missed(row) for row in rows.get(name, []) if row['holds']))
    add('layers: libxsmm* is not faster by more than 3 % (AVX-512)',
        (is_slower(number(row, 'libxsmm_packed_ratio')) for row in rows['layers']
         if row['libxsmm_packed_ratio'] and row['kernels'] == 'avx512'))
    add('training: of the peak', (is_missed(row) for row in rows['training'] if row['holds']))
    add('tiny: against loops', (is_missed(row) for row in rows['tiny'] if row['holds']))
    add('quantized: against floats', (speed_missed(row) for row in rows['quant'] if row['bound']))
    add('quantized: error', (error_missed(row) for row in rows['quant'] if row['rms_bound']))
    add('threads: against one', (is_missed(row) for row in rows['threads'] if row['holds']))
    add('language model: against PyTorch', (is_missed(row) for row in rows['text'] if row['holds']))
    total, missed = (sum(int(line[i]) for line in lines) for i in (1, 2))
    return missed, total, table(['bound', 'rows', 'missed'], 'lrr', lines)


def machine(facts, rows):
    spreads = sorted(number(row, 'us_p90') / number(row, 'us_p10') for name in rows for row in rows[name])
    counts = [int(row['rounds']) for name in rows for row in rows[name]]
    cache = facts['cache_2']
    texts = ['moe %s, commit %s, measured %s' % (facts['version'], facts['commit'], facts['run'][:10]),
             '%s, %s processor%s%s, kernels %s' % (
                 facts['processor'], facts['processors'] or '?', 's' * (facts['processors'] != '1'),
                 ', %d KiB of second-level cache' % (int(cache) // 1024) if cache.isdigit() else '',
                 rows['layers'][0]['kernels']),
             facts['compiler'], facts['libraries'] or 'no other libraries']
    if facts.get('libraries_avx2'):
        texts.append('held to AVX2: ' + facts['libraries_avx2'])
    if 'pytorch' in facts:
        texts.append('PyTorch ' + facts['pytorch'])
    if facts['options']:
        texts.append('measured with `%s`: not the whole bench' % facts['options'])
    texts.append('%d to %d rounds; p90/p10 of our times is %.2f in the median row, %.2f at most' % (
        min(counts), max(counts), spreads[len(spreads) // 2], spreads[-1]))
    return bullets(texts)


# ---- the page ----

def summary(rows, missed, total):
    texts = ['%s, kernels %s: %s' % (title, rows[name][0]['kernels'], claim(rows[name], weights))
             for name in ['layers', 'layers_avx2'] if name in rows
             for title, weights in [('packed weights', 'packed'), ('weights as they are', 'plain')]]
    texts.append('a tiny layer, one token: ' + claim(rows['tiny'], 'packed'))
    torch = number(rows['text'][0], 'ratio')
    if torch is not None:
        texts.append('training a small language model: PyTorch takes %.2f times as long' % torch)
    texts.append('%d of %d [bounds](#bounds) are missed' % (missed, total))
    return bullets(sentence(text) for text in texts)


def sections(folder):
    facts, rows = read_run(folder)
    missed, total, of_bounds = bounds(rows)
    return {
        'machine': machine(facts, rows),
        'summary': summary(rows, missed, total),
        'packed': layers(rows['layers'], 'packed'),
        'plain': layers(rows['layers'], 'plain'),
        'avx2': layers_avx2(rows),
        'training': training(rows),
        'text': text(facts, rows),
        'tiny': tiny(rows),
        'quant': quant(rows),
        'threads': threads(rows),
        'behind': behind(rows),
        'thin': thin(rows),
        'few': few(rows),
        'bounds': of_bounds,
    }


def make_page(page, folder):
    made = sections(folder)
    there = re.findall(r'^<!-- rows: (\w+) -->$', page, re.M)
    if sorted(there) != sorted(made):
        raise Refused('the page has places for the tables %s, and there are %s' % (sorted(there), sorted(made)))
    return re.sub(r'^<!-- rows: (\w+) -->\n.*?^<!-- end -->$',
                  lambda m: '<!-- rows: %s -->\n\n%s\n\n<!-- end -->' % (m.group(1), made[m.group(1)]), page,
                  flags=re.M | re.S)


def main():
    if len(sys.argv) != 2 or sys.argv[1] in ('-h', '--help'):
        print(__doc__)
        return 0 if '-h' in sys.argv or '--help' in sys.argv else 2
    verify = sys.argv[1] == '--verify'
    with open(PAGE, encoding='utf-8') as file:
        page = file.read()
    try:
        made = make_page(page, RESULTS if verify else sys.argv[1])
    except Refused as e:
        sys.exit('tables.py: %s' % e)
    if not verify:
        sys.stdout.write(made)
        return 0
    for number_of, (is_there, should_be) in enumerate(zip(page.split('\n'), made.split('\n')), 1):
        if is_there != should_be:
            sys.exit('tests/bench/README.md:%d: not what the rows say:\n%s\n%s' % (number_of, is_there, should_be))
    if page != made:
        sys.exit('tests/bench/README.md: more or less than the rows say')
    print('tests/bench/README.md has the tables of tests/bench/results/*.csv')
    return 0


if __name__ == '__main__':
    sys.exit(main())
