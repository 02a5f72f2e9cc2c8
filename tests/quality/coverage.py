"""What gcov counted in the headers and extras, merged over all objects: see coverage.sh.

  coverage.py gather OUT TOOL=FOLDER[=HEADER]...  runs gcov TOOL on each .gcda of FOLDER, merges to
                                               OUT; of HEADER alone
  coverage.py judge OUT HEADER LINES BRANCHES  a header's figures; status 1 where one is too low
  coverage.py listed OUT UNCOVERED             compares what nothing reached with the file UNCOVERED
  coverage.py show OUT [HEADER]                every line of which something was not reached:
                                               branches (. taken, 0 not), text

A header's branches are counted like its lines: a line that several objects have is reached where
one of them reaches it, and so is its n-th branch. (gcovr 5.2 does the same but gives up where a
function stands on another line in another build.)"""

import collections
import glob
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
with open(os.path.join(ROOT, "tests", "all.h")) as all_headers:
    EXTRAS = re.findall(r'^#include "../examples/extras/(.*)"', all_headers.read(), re.M)
HEADERS = ["moe_kernels.h", "moe_routers.h", "moe.h"] + EXTRAS


def beyond_this_machine():
    """Beginnings of lines that only a processor with AVX-VNNI runs, where there is none:
    tests/unit/quant.c has their text for another instruction."""
    try:
        with open("/proc/cpuinfo") as file:
            return () if " avx_vnni" in file.read() else ("MOEI_VNNI_256(avxvnni,",)
    except OSError:
        return ()


def counts(tool, gcda):
    """header -> line -> [count, [branches], function] of one object."""
    found = {header: {} for header in HEADERS}
    with tempfile.TemporaryDirectory() as folder:
        command = [tool, "-b", "-c", "-j", os.path.abspath(gcda)]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        report = json.load(gzip.open(glob.glob(folder + "/*.json.gz")[0]))
    for file in report["files"]:
        header = os.path.basename(file["file"])
        for line in file["lines"] if header in HEADERS else ():
            function = re.sub("_f64$", "", line.get("function_name", "-"))
            branches = [branch["count"] for branch in line["branches"]]
            add(found[header], line["line_number"], line["count"], branches, function)
    return found


def add(lines, number, count, branches, function):
    have = lines.setdefault(number, [0, [], function])
    have[0] += count
    have[1] += [0] * (len(branches) - len(have[1]))
    for i, taken in enumerate(branches):
        have[1][i] += taken


def texts_of(header):
    """A header's lines."""
    with open(os.path.join(ROOT, "examples/extras" if header in EXTRAS else "", header)) as file:
        return file.read().split("\n")


def gather(out, *folders):
    merged = {header: {} for header in HEADERS}
    for tool, folder, *only in (words.split("=") for words in folders):
        for gcda in sorted(glob.glob(folder + "/*.gcda")):
            for header, lines in counts(tool, gcda).items():
                for number, (count, branches, function) in lines.items() if header in (only or HEADERS) else ():
                    add(merged[header], number, count, branches, function)
    for header in HEADERS:
        texts = texts_of(header)
        merged[header] = [(number, count, branches, function, texts[number - 1].strip())
                          for number, (count, branches, function) in sorted(merged[header].items())
                          if not texts[number - 1].startswith(beyond_this_machine())]
    with open(out, "w") as file:
        json.dump(merged, file)
    return 0


def judge(out, header, *bars):
    lines = load(out)[header]
    parts = [line[1] for line in lines], [taken for line in lines for taken in line[2]]
    shares = [100.0 * sum(count > 0 for count in part) / max(1, len(part)) for part in parts]
    missed = [sum(count == 0 for count in part) for part in parts]
    print("note: %-14s %6d lines, %4d not reached, %6.2f %%   %6d branches, %4d not taken, %6.2f %%" % (
        header, len(parts[0]), missed[0], shares[0], len(parts[1]), missed[1], shares[1]))
    return any(share < float(bar) for share, bar in zip(shares, bars)) or not lines


def listed(out, uncovered):
    """A function may have as many lines that nothing reaches as stand there. Fewer are a note only:
    another processor may not reach them. One that no header has is a row that was forgotten."""
    known = {}
    with open(uncovered) as file:
        for row in file:
            if re.match(r"moe\w* \d+$", row):
                known[row.split()[0]] = int(row.split()[1])
    missed = collections.defaultdict(list)
    for header, lines in load(out).items():
        for number, count, _, function, text in lines:
            if count == 0:
                missed[function].append("%s:%d: %s" % (header, number, text))
    words = set(re.findall(r"\bmoe\w*", "\n".join(line for header in HEADERS for line in texts_of(header))))
    forgotten = [function for function in known if function not in words]
    for function in forgotten:
        print("tests/quality/uncovered.txt: no header has %s" % function)
    bad = [function for function in missed if len(missed[function]) > known.get(function, 0)]
    for function in bad:
        print("%s: %d lines are not reached, listed are %d" % (function, len(missed[function]), known.get(function, 0)))
        print("\n".join("    " + line for line in missed[function]))
    for function, count in known.items():
        if len(missed[function]) < count:
            print("note: of the %d lines of %s in tests/quality/uncovered.txt %d are not reached" % (
                count, function, len(missed[function])))
    return bad != [] or forgotten != []


def show(out, only=None):
    for header, lines in load(out).items():
        for number, count, branches, _, text in lines:
            if only in (None, header) and (count == 0 or 0 in branches):
                taken = "".join("." if branch else "0" for branch in branches)
                print("%s:%d: %s[%s] %s" % (header, number, "" if count else "LINE ", taken, text))
    return 0


def load(out):
    with open(out) as file:
        return json.load(file)


if __name__ == "__main__":
    sys.exit(int({"gather": gather, "judge": judge, "listed": listed, "show": show}[sys.argv[1]](*sys.argv[2:])))
