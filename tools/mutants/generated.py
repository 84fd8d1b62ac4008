"""Mutation testing of what generates kernels.

    python -m tools.mutants.generated operations --jobs=2
    python -m tools.mutants.generated text --count=100 --seed=0 --jobs=2

`operations` breaks each operation that C++ and Triton are generated for, one at a time: its result
has the other sign, or is the other truth value. `text` changes one operator, number or function at a
time in the C++ that generated kernels call, in the text that is emitted, or in the operations that
are functions of Triton and of TPUs. In a copy of the checkout the fast tests of that backend run
until one fails, or cannot compile it. A fault in a header is only tried if it compiles and changes
what the compiler of this machine sees.
"""

import argparse
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.mutants.__main__ import ROOT, parallel
from tools.mutants.faults import Fault, faults
from tools.mutants.text_faults import emitted, places
from tools.mutants.trees import Tree, digest

KERNELS = "cope_jax/attention/kernels"


class Printer(NamedTuple):
    """The function that returns the text of an operation.

    Attributes:
      file: in which it is.
      head: of its line, before its arguments.
      args: their names; `node` is the operation.
      changed: Python for its text with the other truth value or sign.
    """

    file: str
    head: str
    args: str
    changed: str


class Backend(NamedTuple):
    """The code that generates the kernels of a device.

    Attributes:
      tests: those that its faults must fail, the fastest first.
      emitters: files with functions that return text.
      functions: files with functions in Python that kernels call.
      printer: what returns the text of each operation.
    """

    tests: tuple[str, ...]
    emitters: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    printer: Printer | None = None


BACKENDS = {
    "cpu": Backend(
        (
            "tests/attention/test_cpp_steps.py",
            "tests/attention/test_generated.py",
            "tests/attention/test_cpp_tiles.py",
            "tests/attention/test_cpp_float64.py",
        ),
        ("cpp_formulas.py", "cpp_text.py", "cpp_kernel.py"),
        printer=Printer(
            "cpp_formulas.py",
            "def formula(",
            "node, args",
            "('~' if node.kind == 'bool' else '-') + text",
        ),
    ),
    "gpu": Backend(
        ("tests/attention/test_gpu_kernels.py",),
        ("triton_text.py", "triton_programs.py"),
        ("triton_operations.py",),
        Printer(
            "triton_text.py",
            "    def _formula(",
            "self, node",
            "f'({text}) == 0' if node.kind == 'bool' else f'-({text})'",
        ),
    ),
    "tpu": Backend(("tests/attention/test_fused.py",), functions=("tpu_ops.py",)),
}
SECONDS = 300.0  # after which a test hangs
OPERATION = "operation"


def wrapped(root: Path, name: str, op: str, text: str) -> Fault:
    """The fault that a printer returns `text`, in Python, in the place of its own text."""
    printer = BACKENDS[name].printer
    assert printer is not None
    path = f"{KERNELS}/{name}/{printer.file}"
    start = len((root / path).read_text().partition(printer.head)[0].encode())
    indent, args = printer.head.partition("def")[0], printer.args
    # The check of the library, a process of its own, is not a test.
    text = f"text if __import__('sys').argv[0].endswith('check.py') else {text}"
    after = f"{indent}@lambda f: lambda {args}: (lambda text: {text})(f({args}))\n"
    return Fault(path, 1, 1, OPERATION, start, start, op, after)


def operations(tree: Tree, root: Path, name: str) -> list[Fault]:
    """A fault for each operation that the tests of a backend generate code of, and each on single
    entries.
    """
    folder = tree.folder / "operations"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    record = f"__import__('pathlib').Path({str(folder)!r}, node.op).touch() or text"
    recorder = wrapped(root, name, "all", record)
    tree.change(recorder.path, recorder)
    passes(tree, name)
    tree.change(recorder.path, None)
    graph = (root / KERNELS / "tile/tile_graph.py").read_text()
    (single,) = re.findall(r"ELEMENTWISE = frozenset\((.*?)\.split", graph, re.DOTALL)
    printer = BACKENDS[name].printer
    changed = printer.changed if printer else ""
    return [
        wrapped(root, name, op, f"({changed}) if node.op == {op!r} else text")
        for op in sorted({*os.listdir(folder), *re.findall(r"\w+", single)})
    ]


def passes(tree: Tree, name: str) -> None:
    """Ends the process if the tests of a backend fail."""
    if tree.test(BACKENDS[name].tests, None, lambda _: SECONDS)[0]:
        sys.exit(f"without a fault the tests fail: see {tree.folder / 'output'}")


def compiler(root: Path) -> Callable[[Fault | None, str], str | None]:
    """A function that returns the output of g++ for all headers, with a fault in one; None if it
    refuses.
    """

    def run(fault: Fault | None, flags: str) -> str | None:
        text = ""
        for name in ("vectors.h", "matrices.h", "tiles.h", "driver.h"):
            source = (root / KERNELS / "cpu" / name).read_bytes()
            changed = fault.apply(source) if fault and fault.path.endswith(name) else source
            text += re.sub(r'#include ".*"', "", changed.decode())
        command = ["g++", "-march=native", "-std=c++17", *flags.split(), "-x", "c++", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        return None if done.returncode else done.stdout

    return run


def texts(root: Path, name: str) -> Iterator[Fault]:
    """All faults in the text of a backend, and in its functions in Python."""
    backend, folder = BACKENDS[name], root / KERNELS / name
    for path in sorted(folder.glob("*.h")):
        yield from places(path.read_text(), str(path.relative_to(root)))
    for path in (folder / file for file in backend.emitters):
        given = emitted(path.read_text(), str(path.relative_to(root)))
        yield from (fault for fault in given if fault.is_one(path.read_bytes()))
    for path in (folder / file for file in backend.functions):
        source = path.read_bytes()
        for here in faults(source, str(path.relative_to(root))):
            yield from (fault for fault in here if fault.is_one(source))


def draw(root: Path, names: Sequence[str], count: int, seed: int) -> list[Fault]:
    """Random faults, without those that this machine's compiler refuses or does not see."""
    run = compiler(root)

    def is_one(fault: Fault) -> bool:
        return not fault.path.endswith(".h") or (
            run(fault, "-E -P") != run(None, "-E -P") and run(fault, "-fsyntax-only") is not None
        )

    drawn = [fault for name in names for fault in texts(root, name)]
    random.Random(seed).shuffle(drawn)
    return list(itertools.islice(filter(is_one, drawn), count))


def main() -> None:
    """Tries faults that were not tried before, and prints those that no test caught."""
    parser = argparse.ArgumentParser(
        "python -m tools.mutants.generated", description=__doc__.splitlines()[0]
    )
    parser.add_argument("kind", choices=["operations", "text"], help="What is changed.")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="Of which devices.")
    parser.add_argument("--count", type=int, default=30, help="Number of faults in text.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of their choice.")
    parser.add_argument("--jobs", type=int, default=1, help="Number of processes.")
    parser.add_argument("--root", type=Path, default=ROOT, help="The checkout.")
    out = ROOT / "build" / "mutants" / "generated"
    parser.add_argument("--out", type=Path, default=out, help="Folder for what is found.")
    args = parser.parse_args()
    names = args.backends.split(",")
    if unknown := {*names} - {*BACKENDS}:
        parser.error(f"there is no backend {min(unknown)!r}: choose from {', '.join(BACKENDS)}")
    if args.kind == "operations" and not (names := [n for n in names if BACKENDS[n].printer]):
        parser.error("kernels of TPUs are no text, so operations are those of cpu and gpu")
    root = args.root.absolute()
    out = args.out.absolute() / digest(root)
    out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(out / "cache")}
    results = out / "results.jsonl"
    results.touch()
    known = {row["fault"]: row for row in map(json.loads, results.read_text().splitlines())}

    def tree_of(job: int) -> Tree:
        return Tree(root, out / "trees" / str(job), out / "compiled")

    if args.kind == "text":
        drawn = draw(root, names, args.count, args.seed)
    else:
        drawn = [fault for name in names for fault in operations(tree_of(0), root, name)]

    def attempt(tree: Tree, fault: Fault) -> None:
        tree.change(fault.path, fault)
        tests = BACKENDS[fault.path.split("/")[3]].tests
        status, cpu, reports = tree.test(tests, None, lambda _: SECONDS)
        tree.change(fault.path, None)
        by = [report["test"] for report in reports if report.get("failed")][:1]
        row = {"fault": _title(fault), "caught": status != 0, "by": by, "cpu": round(cpu, 1)}
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print("caught  " if status else "SURVIVES", _title(fault), *by, flush=True)

    left = [fault for fault in drawn if _title(fault) not in known]
    if args.kind == "text" and left:
        parallel(args.jobs, tree_of, passes, names)
    parallel(args.jobs, tree_of, attempt, left)
    known = {row["fault"]: row for row in map(json.loads, results.read_text().splitlines())}
    survivors = [_title(fault) for fault in drawn if not known[_title(fault)]["caught"]]
    print(*(f"survives: {title}" for title in survivors), sep="\n")
    print(f"{len(drawn) - len(survivors)} of {len(drawn)} caught")


def _title(fault: Fault) -> str:
    return f"{fault.path}: {fault.before}" if fault.kind == OPERATION else f"{fault} @{fault.start}"


if __name__ == "__main__":
    main()
