"""Mutation testing: the share of small faults in the numerical rooms (`faults.FOLDERS`) that the
fast suite catches.

    python -m tools.mutants --count=300 --seed=0 --jobs=2

Each test runs once and notes the lines that it executes. Then one fault at a time is put into a
copy of the checkout, and the tests of its line run until one fails, which must pass without the
fault: those of its own room, the nearest and fastest first, then of the other rooms, then the rest.
Other tests of the same file follow, for they may use what one of these has compiled. What is found
is kept in `--out`, by the content of the checkout: an interrupted run resumes.
"""

import argparse
import collections
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.mutants.faults import FOLDERS, Fault, draw
from tools.mutants.suite import CAUGHT, OUTCOMES, Suite
from tools.mutants.trees import Tree, digest

ROOT = Path(__file__).parents[2]
PRELOAD = """
hypothesis jax flax.nnx optax orbax.checkpoint.experimental.v1 grain ml_collections
matplotlib.pyplot rich.table gensim.models sklearn.linear_model sklearn.svm tensorflow_datasets
tensorboardX torch transformers
"""
OTHERS, REST = "others", "rest"  # tests of the other numerical rooms, and those of none


def parallel(
    jobs: int, tree: Callable[[int], Tree], function: Callable[..., None], tasks: Sequence[Any]
) -> None:
    """Calls function(tree, task) for all tasks, in `jobs` processes, each with its own tree."""
    context = multiprocessing.get_context("fork")
    taken = context.Value("i", 0)

    def work(job: int) -> None:
        tree_of_job = tree(job)
        while True:
            with taken.get_lock():
                index, taken.value = taken.value, taken.value + 1
            if index >= len(tasks):
                return
            function(tree_of_job, tasks[index])

    workers = [context.Process(target=work, args=(job,)) for job in range(min(jobs, len(tasks)))]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
            if worker.exitcode:
                sys.exit(worker.exitcode)
    finally:
        for worker in workers:
            worker.terminate()


def summary(drawn: Sequence[Fault], lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The counts of outcomes, and each fault that no test caught."""
    # Not before: the processes of the tests import the package of their own tree.
    from cope_jax.evaluation.contextual.probing import wilson_interval

    tried = [line for line in lines if "fault" in line]
    order = sorted((OUTCOMES.index(line["outcome"]), line["fault"]) for line in tried)
    best = {fault: OUTCOMES[outcome] for outcome, fault in order}
    outcomes = {fault: best[str(fault)] for fault in drawn if str(fault) in best}
    for title, key in (("kind", lambda fault: fault.kind), ("folder", _folder)):
        tally = collections.defaultdict[str, list[bool]](list)
        for fault, outcome in outcomes.items():
            tally[key(fault)].append(outcome == CAUGHT)
        for name, caught in sorted(tally.items()):
            yield f"{title:7} {name:14} {sum(caught):4} of {len(caught):4}"
    yield from (f"{outcome}: {fault}" for fault, outcome in outcomes.items() if outcome != CAUGHT)
    count, caught = len(outcomes), sum(outcome == CAUGHT for outcome in outcomes.values())
    low, high = wilson_interval(caught / count, count)
    cost = sum(line["cpu"] for line in tried) / count
    yield (
        f"{caught} of {count} caught: {caught / count:.1%}, 95 % interval {low:.1%} to {high:.1%}; "
        f"{cost:.1f} CPU seconds each"
    )


def _folder(fault: Fault) -> str:
    return fault.path.split("/")[1]


def main() -> None:
    """Draws faults, and tries those that were not tried before."""
    parser = argparse.ArgumentParser("python -m tools.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=30, help="Number of faults.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of their choice.")
    parser.add_argument("--jobs", type=int, default=1, help="Number of processes.")
    text = "Seconds of tests for a fault, in each of three parts of the suite; more look again."
    parser.add_argument("--seconds", type=float, default=60.0, help=text)
    parser.add_argument("--root", type=Path, default=ROOT, help="The checkout.")
    out = ROOT / "build" / "mutants"
    parser.add_argument("--out", type=Path, default=out, help="Folder for what is found.")
    args = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the tests that run are ended too
    os.environ |= {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "agg"}
    warnings.simplefilter("ignore")
    for module in PRELOAD.split():
        try:
            importlib.import_module(module)
        except ImportError:
            pass
    gc.freeze()  # pytest collects garbage before it ends: nothing of these
    out = args.out.absolute() / digest(args.root)
    suite, drawn = Suite(out), draw(args.root, args.count, args.seed)

    def tree(job: int) -> Tree:
        return Tree(args.root.absolute(), out / "trees" / str(job), out / "compiled")

    groups = suite.groups(tree(0))
    rooms = {group: Path(tests[0].split("::")[0]).parts[1] for group, tests in groups.items()}
    rooms = {group: room if room in FOLDERS else REST for group, room in rooms.items()}
    for room in (*FOLDERS, OTHERS, REST):
        faults = [fault for fault in drawn if room in (OTHERS, REST, _folder(fault))]
        faults = suite.open_faults(faults, room, args.seconds)
        if room == REST and not faults:
            break
        here = [group for group in groups if rooms[group] == room]
        new = [group for group in here if not suite.path(group).exists()]
        parallel(args.jobs, tree, lambda tree, group: suite.record(tree, group, groups[group]), new)
        suite.records |= {group: json.loads(suite.path(group).read_text()) for group in here}

        def attempt(tree: Tree, fault: Fault, room: str = room) -> None:
            chosen = {*FOLDERS} - {_folder(fault)} if room == OTHERS else {room}
            suite.attempt(
                tree,
                fault,
                room,
                [group for group in groups if rooms[group] in chosen],
                args.seconds,
            )

        parallel(args.jobs, tree, attempt, faults)
    print(*summary(drawn, suite.lines()), sep="\n")


if __name__ == "__main__":
    main()
