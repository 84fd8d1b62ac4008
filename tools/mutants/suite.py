"""The tests of a checkout, with the lines that they execute, and which of them catch a fault."""

import collections
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.mutants.faults import Fault
from tools.mutants.trees import Tree

OUTCOMES = NOT_EXECUTED, SURVIVED, CAUGHT = ("not executed", "survived", "caught")
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
            group_of = next(report["groups"] for report in reports if "groups" in report)
            for test, group in group_of.items():
                groups[group].append(test)
            path.write_text(json.dumps(groups))
        return json.loads(path.read_text())

    def path(self, group: str) -> Path:
        """The record of a group."""
        return self.folder / "tests" / (group.replace("/", "-") + ".json")

    def record(self, tree: Tree, group: str, tests: Sequence[str]) -> None:
        """Runs a group of tests, twice where one fails, and notes what they execute."""
        for _ in range(2):
            reports = tree.test(_files_of(tests), tests, lambda _: LONGEST, note=True)[2]
            done = {report["test"]: report for report in reports if report.get("test")}
            bad = [test for test in tests if test not in done or done[test]["failed"]]
            if not bad:
                break
        shared = collections.defaultdict(set)
        for report in reports:
            if report.get("test") == "":
                for path, numbers in report.get("lines", {}).items():
                    shared[path].update(numbers)
        lines = {path: sorted(numbers) for path, numbers in shared.items()}
        good = {name: test for name, test in done.items() if not test["failed"]}
        self.path(group).write_text(json.dumps({"tests": good, "lines": lines}))
        print(f"{group}: {sum(test['seconds'] for test in done.values()):.0f} s")
        print("".join(f"  left out: {test}\n" for test in bad), end="")

    def log(self, **line: Any) -> None:
        """Adds a line to the results."""
        with self.results.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """The results."""
        return [json.loads(line) for line in self.results.read_text().splitlines()]

    def choose(self, fault: Fault, groups: Sequence[str], seconds: float) -> list[str]:
        """The tests to run: those that execute the line, then the others of their group, within
        this time.
        """
        candidates = []
        for group in groups:
            record, cases = self.records[group], collections.Counter[str]()
            tests = record["tests"].items()
            direct = {name for name, test in tests if _executes(test["lines"], fault)}
            if direct or _executes(record["lines"], fault):
                for name, test in sorted(tests, key=lambda named: named[1]["seconds"]):
                    function = name.split("[")[0]
                    near = _distance(fault, name) + cases[function]
                    candidates.append((name not in direct, near, test["seconds"], name))
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
        tests, spent, by, how = self.choose(fault, groups, seconds), 0.0, None, ""
        known = collections.ChainMap(*(self.records[group]["tests"] for group in groups))

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
        result = {"part": room, "outcome": outcome, "by": by and by + how, "tests": len(tests)}
        self.log(fault=str(fault), **result, budget=seconds, cpu=round(spent, 1))
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


def _distance(fault: Fault, test: str) -> int:
    """0 for tests named like the module, 1 for those in the folder named like its own, else 2."""
    path, module = Path(test.split("::")[0]), Path(fault.path)
    return 0 if module.stem in path.stem else 1 if module.parts[1] == path.parts[1] else 2
