"""Mutation testing of the C++ that generated kernels call.

    python -m tools.mutants.cpp --count=100 --seed=0 --jobs=2

One operator, number or function at a time is changed in the headers of `attention/kernels/cpu`, in a
copy of the checkout. There the tests of generated code run until one fails. A fault is only tried if
it compiles and changes what the compiler of this machine sees.
"""

import argparse
import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.mutants.__main__ import ROOT, parallel
from tools.mutants.faults import Fault
from tools.mutants.trees import Tree

SOURCES = "cope_jax/attention/kernels/cpu"
TESTS = (
    "tests/attention/test_cpp_steps.py",
    "tests/attention/test_generated.py",
    "tests/attention/test_cpp_tiles.py",
    "tests/attention/test_cpp_float64.py",
)
SECONDS = 300.0  # after which a test hangs
PAIRS = (
    "+/- *// </>= >/<= ==/!= &/| &&/|| <</>> +=/-= ++/-- std::min/std::max low/high 0/1 false/true"
)
SWAPS = {
    before: after
    for pair in PAIRS.split()
    for names in [re.split("(?<=.)/(?=.)", pair, maxsplit=1)]
    for before, after in (names, names[::-1])
}
"""The replacements of operators, names and numbers. Other numbers are doubled."""
TOKEN = re.compile(r'"(?:\\.|[^"])*"|//.*|\d[\w.]*(?:e[-+]\d+f?)?|[\w:]+|[-+*/<>=!&|]+', re.ASCII)


def places(source: str, path: str) -> Iterator[Fault]:
    """The faults that a header can have, in its order."""
    start = 0
    for number, line in enumerate(source.splitlines(keepends=True), 1):
        code = not line.lstrip().startswith(("#", "//", "template", "typedef", "alignas"))
        for match in TOKEN.finditer(line) if code else ():
            before = match[0]
            after = SWAPS.get(before) or _doubled(before)
            spaced = line[match.start() - 1 : match.start()] == " " == line[match.end() :][:1]
            if after and (spaced or before[0].isalnum() or before in ("++", "--")):
                at = start + len(line[: match.start()].encode())
                stop = at + len(before.encode())
                yield Fault(path, number, number, line.strip(), at, stop, before, after)
        start += len(line.encode())


def _doubled(token: str) -> str | None:
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e[-+]?\d+)?)(f?)", token)
    if match is None:
        return None
    number = match[1]
    twice = (
        str(2 * int(number))
        if number.isdigit() and not match[2]
        else repr(2 * float(number) or 1.0)
    )
    return twice + match[2]


def draw(root: Path, count: int, seed: int) -> list[Fault]:
    """Random faults that compile and that this machine's compiler sees."""
    headers = sorted((root / SOURCES).glob("*.h"))
    drawn = [
        fault for path in headers for fault in places(path.read_text(), f"{SOURCES}/{path.name}")
    ]
    random.Random(seed).shuffle(drawn)

    def compiled(*flags: str, fault: Fault | None = None) -> str | None:
        """The output of the compiler for all headers; None if it refuses."""
        text = ""
        for name in ("vectors.h", "matrices.h", "tiles.h", "driver.h"):
            source = (root / SOURCES / name).read_bytes()
            changed = fault.apply(source) if fault and fault.path.endswith(name) else source
            text += re.sub(r'#include ".*"', "", changed.decode())
        command = ["g++", "-march=native", "-std=c++17", *flags, "-x", "c++", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        return None if done.returncode else done.stdout

    preprocessed = compiled("-E", "-P")

    def is_one(fault: Fault) -> bool:
        seen = compiled("-E", "-P", fault=fault)
        return seen != preprocessed and compiled("-fsyntax-only", fault=fault) is not None

    return list(itertools.islice(filter(is_one, drawn), count))


def main() -> None:
    """Tries faults that were not tried before, and prints those that no test caught."""
    parser = argparse.ArgumentParser(
        "python -m tools.mutants.cpp", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--count", type=int, default=30, help="Number of faults.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of their choice.")
    parser.add_argument("--jobs", type=int, default=1, help="Number of processes.")
    parser.add_argument("--root", type=Path, default=ROOT, help="The checkout.")
    out = ROOT / "build" / "mutants" / "cpp"
    parser.add_argument("--out", type=Path, default=out, help="Folder for what is found.")
    args = parser.parse_args()
    out, root = args.out.absolute(), args.root.absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(out / "cache")}
    results = out / "results.jsonl"
    results.touch()
    known = {row["fault"]: row for row in map(json.loads, results.read_text().splitlines())}
    drawn = draw(root, args.count, args.seed)

    def attempt(tree: Tree, fault: Fault | None) -> None:
        if fault:
            tree.change(fault.path, fault)
        status, cpu, reports = tree.test(TESTS, None, lambda _: SECONDS)
        if fault is None:
            if status:
                sys.exit(f"without a fault the tests fail: see {tree.folder / 'output'}")
            return
        tree.change(fault.path, None)
        tests = [report["test"] for report in reports if report.get("failed")]
        row = {"fault": str(fault), "caught": status != 0, "by": tests[:1], "cpu": round(cpu, 1)}
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print("caught  " if status else "SURVIVES", fault, *tests[:1], flush=True)

    left = [fault for fault in drawn if str(fault) not in known]

    def tree_of(job: int) -> Tree:
        return Tree(root, out / "trees" / str(job), out / "compiled")

    parallel(1, tree_of, attempt, [None] if left else [])
    parallel(args.jobs, tree_of, attempt, left)
    known = {row["fault"]: row for row in map(json.loads, results.read_text().splitlines())}
    survivors = [fault for fault in drawn if not known[str(fault)]["caught"]]
    print(*(f"survives: {fault}" for fault in survivors), sep="\n")
    print(f"{len(drawn) - len(survivors)} of {len(drawn)} caught")


if __name__ == "__main__":
    main()
