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
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.mutants.faults import FOLDERS, Fault, draw
from tools.mutants.trees import Tree, files

ROOT = Path(__file__).parents[2]
PRELOAD = (
    "hypothesis",
    "jax",
    "flax.nnx",
    "optax",
    "orbax.checkpoint.experimental.v1",
    "grain",
    "ml_collections",
)
PRELOAD += (
    "matplotlib.pyplot",
    "rich.table",
    "gensim.models",
    "sklearn.linear_model",
    "sklearn.svm",
    "tensorflow_datasets",
)
PRELOAD += ("tensorboardX", "torch", "transformers")
OUTCOMES = NOT_EXECUTED, SURVIVED, CAUGHT = ("not executed", "survived", "caught")
OTHERS, REST = "others", "rest"  # tests of the other numerical rooms, and those of none
LONGEST = 900.0  # seconds that a test may take when its lines are noted


class Suite:
    """Records of tests: in `folder`, a file for each group, and a growing one for the faults."""

    def __init__(self, folder: Path):
        self.folder, self.results = folder, folder / "results.jsonl"
        self.records: dict[str, dict[str, Any]] = {}
        (folder / "tests").mkdir(parents=True, exist_ok=True)
        self.results.touch()

    def groups(self, tree: Tree) -> dict[str, list[str]]:
        """The tests, by file or `xdist_group`: what may share compiled functions."""
        path = self.folder / "groups.json"
        if not path.exists():
            reports = tree.test(["--collect-only"], None, lambda _: LONGEST, note=True)[2]
            groups = collections.defaultdict(list)
            for test, group in next(
                report["groups"] for report in reports if "groups" in report
            ).items():
                groups[group].append(test)
            path.write_text(json.dumps(groups))
        return json.loads(path.read_text())

    def record(self, tree: Tree, group: str, tests: Sequence[str]) -> None:
        """Runs a group of tests, twice where one fails, and notes what they execute."""
        for _ in range(2):
            reports = tree.test(_files_of(tests), tests, lambda _: LONGEST, note=True)[2]
            done = {report["test"]: report for report in reports if report.get("test")}
            if done.keys() == set(tests) and not any(report["failed"] for report in done.values()):
                break
        shared = collections.defaultdict(set)
        for report in reports:
            for path, numbers in (
                report.get("lines", {}).items() if report.get("test") == "" else ()
            ):
                shared[path].update(numbers)
        record = {
            "tests": done,
            "lines": {path: sorted(numbers) for path, numbers in shared.items()},
        }
        self._path(group).write_text(json.dumps(record))
        bad = [test for test in tests if test not in done or done[test]["failed"]]
        print(
            f"{group}: {sum(ended['seconds'] for ended in done.values()):.0f} s"
            + "".join(f"\n  left out: {t}" for t in bad)
        )

    def load(self, groups: Sequence[str]) -> None:
        for group in groups:
            record = self.records[group] = json.loads(self._path(group).read_text())
            record["tests"] = {
                name: test for name, test in record["tests"].items() if not test["failed"]
            }

    def _path(self, group: str) -> Path:
        return self.folder / "tests" / (group.replace("/", "-") + ".json")

    def recorded(self, group: str) -> bool:
        return self._path(group).exists()

    def log(self, **line: Any) -> None:
        with self.results.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.results.read_text().splitlines()]

    def choose(self, fault: Fault, groups: Sequence[str], seconds: float) -> list[str]:
        """The tests to run: those that execute the line, then the others of their group, within
        this time.
        """
        candidates = []
        for group in groups:
            record, cases = self.records[group], collections.Counter[str]()
            direct = {
                name for name, test in record["tests"].items() if _executes(test["lines"], fault)
            }
            if direct or _executes(record["lines"], fault):
                for test in sorted(record["tests"].values(), key=lambda test: test["seconds"]):
                    name, cost = test["test"], test["seconds"]
                    function = name.split("[")[0]
                    candidates.append(
                        (name not in direct, _distance(fault, name) + cases[function], cost, name)
                    )
                    cases[function] += 1
        chosen, total = [], 0.0
        for _, _, cost, name in sorted(candidates):
            if not chosen or total + cost <= seconds:
                chosen, total = [*chosen, name], total + cost
        return chosen

    def attempt(
        self, tree: Tree, fault: Fault, room: str, groups: Sequence[str], seconds: float
    ) -> None:
        """Looks whether a test catches the fault."""
        known = {
            test: record
            for group in groups
            for test, record in self.records[group]["tests"].items()
        }
        tests, spent, by, how = self.choose(fault, groups, seconds), 0.0, None, ""

        def patience(test: str) -> float:
            return 60.0 + 10.0 * known[test]["seconds"]

        while tests and by is None:
            tree.change(fault.path, fault)
            # What hangs must do so twice: a process may have been stopped meanwhile.
            for _ in range(2):
                status, cost, reports = tree.test(_files_of(tests), tests, patience)
                spent += cost
                if status != -signal.SIGALRM:
                    break
            tree.change(fault.path, None)
            if status in (0, 5):
                break
            started = [report["started"] for report in reports if "started" in report]
            again, how = started[-1:], " (hangs)" if status == -signal.SIGALRM else ""
            by = "".join(again) or "the import of a test"
            if not any(line.get("sound") == by for line in self.lines()):
                status, cost, _ = tree.test(_files_of(again or tests), again, patience)
                spent += cost
                if status == (0 if again else 5):
                    self.log(sound=by)
                elif again:
                    print(f"  not counted, for it fails without a fault too: {by}")
                    tests, by = [test for test in tests if test != by], None
                else:
                    raise RuntimeError(f"pytest ended with {status}: see {tree.folder / 'output'}")
        outcome = CAUGHT if by else SURVIVED if tests else NOT_EXECUTED
        self.log(
            fault=str(fault),
            part=room,
            outcome=outcome,
            by=by and by + how,
            tests=len(tests),
            budget=seconds,
            cpu=round(spent, 1),
        )
        print(f"{outcome:12} {spent:5.1f} s  {fault}" + (f"  by {by}{how}" if by else ""))

    def open_faults(self, drawn: Sequence[Fault], room: str, seconds: float) -> list[Fault]:
        """Those that are not caught and have not been looked at with as many seconds."""
        done = {
            line["fault"]
            for line in self.lines()
            if "fault" in line
            and (line["outcome"] == CAUGHT or (line["part"] == room and line["budget"] >= seconds))
        }
        return [fault for fault in drawn if str(fault) not in done]


def _files_of(tests: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(test.split("::")[0] for test in tests))


def _executes(lines: dict[str, list[int]], fault: Fault) -> bool:
    return any(fault.first <= line <= fault.last for line in lines.get(fault.path, ()))


def _folder(path: str) -> str:
    return Path(path.split("::")[0]).parts[1]


def _distance(fault: Fault, test: str) -> int:
    """0 for tests named like the module, 1 for those in the folder named like its own, 2 for all
    others.
    """
    path, module = Path(test.split("::")[0]), Path(fault.path)
    return 0 if module.stem in path.stem else 1 if module.parts[1] == path.parts[1] else 2


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


def interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's interval of 95 %.

    >>> "{:.2f} {:.2f}".format(*interval(0.9, 300))
    '0.86 0.93'
    """
    z = 1.96
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - half) / (1 + z * z / count), (middle + half) / (1 + z * z / count)


def summary(drawn: Sequence[Fault], lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The counts of outcomes, and each fault that no test caught."""
    tried = [(OUTCOMES.index(line["outcome"]), line["fault"]) for line in lines if "fault" in line]
    outcomes = {fault: OUTCOMES[best] for best, fault in sorted(tried)}
    looked = [fault for fault in drawn if str(fault) in outcomes]
    for title, key in (
        ("kind", lambda fault: fault.kind),
        ("folder", lambda fault: fault.path.split("/")[1]),
    ):
        tally = collections.Counter(
            (key(fault), outcomes[str(fault)] == CAUGHT) for fault in looked
        )
        for name in sorted({name for name, _ in tally}):
            yield f"{title:7} {name:14} {tally[name, True]:4} of {tally[name, True] + tally[name, False]:4}"
    yield from (
        f"{outcomes[str(fault)]}: {fault}" for fault in looked if outcomes[str(fault)] != CAUGHT
    )
    caught = sum(outcomes[str(fault)] == CAUGHT for fault in looked)
    low, high = interval(caught / len(looked), len(looked))
    cost = sum(line["cpu"] for line in lines if "fault" in line) / len(looked)
    yield (
        f"{caught} of {len(looked)} caught: {caught / len(looked):.1%}, 95 % interval {low:.1%} to {high:.1%}; "
        f"{cost:.1f} CPU seconds each"
    )


def main() -> None:
    """Draws faults, and tries those that were not tried before."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=30, help="faults")
    parser.add_argument("--seed", type=int, default=0, help="of their choice")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="of tests for a fault, in each of three parts of the suite; more look again",
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "mutants", help="where results are kept"
    )
    args = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the tests that run are ended too
    os.environ |= {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "agg"}
    warnings.simplefilter("ignore")
    for module in PRELOAD:
        try:
            importlib.import_module(module)
        except ImportError:
            pass
    gc.freeze()  # pytest collects garbage before it ends: nothing of these
    content = hashlib.sha256()
    for name in files(args.root):
        if name.endswith(".py") and not name.startswith("tools/mutants/"):
            content.update(name.encode() + (args.root / name).read_bytes())
    out = args.out.absolute() / content.hexdigest()[:10]
    suite, drawn = Suite(out), draw(args.root, args.count, args.seed)

    def tree(job: int) -> Tree:
        return Tree(args.root.absolute(), out / "trees" / str(job), out / "compiled")

    groups = suite.groups(tree(0))
    room = {
        group: folder if (folder := _folder(tests[0])) in FOLDERS else REST
        for group, tests in groups.items()
    }
    for room_name in (*FOLDERS, OTHERS, REST):
        faults = [fault for fault in drawn if room_name in (OTHERS, REST, _folder(fault.path))]
        faults = suite.open_faults(faults, room_name, args.seconds)
        if room_name == REST and not faults:
            break
        new = [group for group in groups if room[group] == room_name and not suite.recorded(group)]
        parallel(args.jobs, tree, lambda tree, group: suite.record(tree, group, groups[group]), new)
        suite.load([group for group in groups if room[group] == room_name])

        def attempt(tree: Tree, fault: Fault, room_name: str = room_name) -> None:
            rooms = {*FOLDERS} - {_folder(fault.path)} if room_name == OTHERS else {room_name}
            suite.attempt(
                tree,
                fault,
                room_name,
                [group for group in groups if room[group] in rooms],
                args.seconds,
            )

        parallel(args.jobs, tree, attempt, faults)
    print(*summary(drawn, suite.lines()), sep="\n")


if __name__ == "__main__":
    main()
