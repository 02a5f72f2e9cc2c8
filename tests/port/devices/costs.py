"""Fits the constants of moei_costs (examples/extras/moe_export.h) to the instructions that count.c
counted of the runs of costs.c.
    python3 costs.py LINES COUNTED [HEADER]     prints the rows of the table, or writes them there
Least squares of the relative error over 1 and the features that vary."""
import sys

BEGIN = '    /* costs */\n'

def solve(rows):
    """rows: (features, value). Weighted normal equations, by elimination with the largest pivot."""
    n = len(rows[0][0])
    a = [[sum(f[i] * f[j] / v**2 for f, v in rows) for j in range(n)] + [sum(f[i] / v for f, v in rows)]
         for i in range(n)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(a[r][i]))
        a[i], a[pivot] = a[pivot], a[i]
        for r in range(n):
            if r != i:
                by = a[r][i] / a[i][i]
                a[r] = [x - by * y for x, y in zip(a[r], a[i])]
    return [a[i][n] / a[i][i] for i in range(n)]


def independent(samples):
    """The features that are no combination of those before them."""
    kept, basis = [], []
    for i in range(4):
        v = [float(f[i]) for f, _ in samples]
        size = sum(x * x for x in v)
        for b in basis:
            dot = sum(x * y for x, y in zip(v, b))
            v = [x - dot * y for x, y in zip(v, b)]
        rest = sum(x * x for x in v)
        if rest > 1e-9 * size and size > 0:
            basis.append([x / rest**0.5 for x in v])
            kept.append(i)
    return kept


def main():
    lines = [line.split() for line in open(sys.argv[1]) if line.strip() not in ('', 'end')]
    counts = [int(line.split()[1]) for line in open(sys.argv[2]) if line.startswith('run ')]
    overhead = counts.pop(0)
    assert lines.pop(0)[0] == 'nothing' and len(counts) == sum(w[0] != 'minus' for w in lines)
    groups, minus = {}, []
    for words in lines:
        if words[0] == 'minus':
            minus.append((words[1], [1] + [int(w) for w in words[2:]]))
            continue
        groups.setdefault(words[0], []).append(([1] + [int(w) for w in words[1:]], counts.pop(0), minus))
        minus = []
    fits = {}
    for name in sorted(groups, key=lambda name: any(m for _, _, m in groups[name])):
        samples = [(f, max(1, count - overhead - sum(sum(x * y for x, y in zip(fits[other], g)) for other, g in m)))
                   for f, count, m in groups[name]]
        kept = independent(samples)
        fits[name] = [0.0] * 4
        for i, x in zip(kept, solve([([f[i] for i in kept], v) for f, v in samples])):
            fits[name][i] = round(x, 2) + 0.0
    rows = ['    {(moei_any_function)%s, {%s}},' % (name, ', '.join('%g' % x for x in fits[name])) for name in fits]
    reals = [row for row in rows if 'moei_float' in row]
    rows = [row for row in rows if row not in reals] + ['#if !MOE_REAL_IS_DOUBLE'] + reals + ['#endif']
    if len(sys.argv) < 4:
        print('\n'.join(rows))
        return
    text = open(sys.argv[3]).read()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index('    /* end */\n')
    open(sys.argv[3], 'w').write(text[:begin] + '\n'.join(rows) + '\n' + text[end:])


main()
