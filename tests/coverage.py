"""What gcov counted in the three headers, merged over all objects: see tests/coverage.sh.

  coverage.py gather OUT ROOT TOOL=FOLDER...   runs gcov TOOL on every .gcda in FOLDER and writes the merged counts to OUT
  coverage.py judge OUT HEADER LINES BRANCHES  prints a header's figures; status 1 where one is below its percentage
  coverage.py listed OUT UNCOVERED             compares the lines that nothing reached with the file UNCOVERED
  coverage.py show OUT [HEADER]                prints every line of which something was not reached: its branches (. taken, 0 not), its text

A header's branches are counted like its lines: a line that several objects have is reached where one of them reaches it, and so is its n-th branch.
(gcovr 5.2 does the same but gives up where a function stands on another line in another build.)"""

import collections
import glob
import gzip
import json
import os
import subprocess
import sys
import tempfile

HEADERS = ("moe_kernels.h", "moe_routers.h", "moe.h")


def beyond_this_machine():
    """Beginnings of lines that only a processor with AVX-VNNI runs, where there is none: tests/quant.c has their text for another instruction."""
    try:
        with open("/proc/cpuinfo") as file:
            return () if " avx_vnni" in file.read() else ("MOEI_VNNI_256(avxvnni,",)
    except OSError:
        return ()


def counts(tool, gcda):
    """header -> line -> [count, [branches]] of one object."""
    found = {header: {} for header in HEADERS}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([tool, "-b", "-c", "-j", os.path.abspath(gcda)], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        report = json.load(gzip.open(glob.glob(folder + "/*.json.gz")[0]))
    for file in report["files"]:
        header = os.path.basename(file["file"])
        for line in file["lines"] if header in HEADERS else ():
            add(found[header], line["line_number"], line["count"], [branch["count"] for branch in line["branches"]])
    return found


def add(lines, number, count, branches):
    have = lines.setdefault(number, [0, []])
    have[0] += count
    have[1] += [0] * (len(branches) - len(have[1]))
    for i, taken in enumerate(branches):
        have[1][i] += taken


def gather(out, root, *folders):
    merged = {header: {} for header in HEADERS}
    for tool, folder in (pair.split("=", 1) for pair in folders):
        for gcda in sorted(glob.glob(folder + "/*.gcda")):
            for header, lines in counts(tool, gcda).items():
                for number, (count, branches) in lines.items():
                    add(merged[header], number, count, branches)
    for header in HEADERS:
        with open(os.path.join(root, header)) as file:
            texts = file.read().split("\n")
        merged[header] = [(number, count, branches, texts[number - 1].strip()) for number, (count, branches) in sorted(merged[header].items())
                          if not texts[number - 1].startswith(beyond_this_machine())]
    with open(out, "w") as file:
        json.dump(merged, file)
    return 0


def judge(out, header, *bars):
    lines = load(out)[header]
    parts = [line[1] for line in lines], [taken for line in lines for taken in line[2]]
    shares = [100.0 * sum(count > 0 for count in part) / max(1, len(part)) for part in parts]
    print("note: %-14s %6d lines, %4d not reached, %6.2f %%   %6d branches, %4d not taken, %6.2f %%" % (
        header, len(parts[0]), sum(count == 0 for count in parts[0]), shares[0], len(parts[1]), sum(count == 0 for count in parts[1]), shares[1]))
    return any(share < float(bar) for share, bar in zip(shares, bars)) or not lines


def listed(out, uncovered):
    """A line is named by its header and text, once for each such line. One that stands there and is reached is a note only: another processor may not reach it."""
    known = collections.Counter()
    with open(uncovered) as file:
        for row in file:
            if row.startswith("moe"):
                known[tuple(row.rstrip("\n").split(": ", 1))] += 1
    left = 0
    for header, lines in load(out).items():
        for number, count, _, text in lines:
            if count > 0:
                continue
            if known[header, text] > 0:
                known[header, text] -= 1
            else:
                left += 1
                print("%s:%d: %s" % (header, number, text))
    for (header, text), count in known.items():
        if count > 0:
            print("note: reached, though tests/uncovered.txt lists it: %s: %s" % (header, text))
    return left > 0


def show(out, only=None):
    for header, lines in load(out).items():
        for number, count, branches, text in lines:
            if only in (None, header) and (count == 0 or 0 in branches):
                print("%s:%d: %s[%s] %s" % (header, number, "" if count else "LINE ", "".join("." if taken else "0" for taken in branches), text))
    return 0


def load(out):
    with open(out) as file:
        return json.load(file)


if __name__ == "__main__":
    sys.exit(int({"gather": gather, "judge": judge, "listed": listed, "show": show}[sys.argv[1]](*sys.argv[2:])))
