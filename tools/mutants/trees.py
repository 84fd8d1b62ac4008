"""Copies of the checkout in which tests run, each time in a process that is forked from one that
has imported JAX.
"""

import collections
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tools.mutants import lines
from tools.mutants.faults import PACKAGE, Fault


class Tree:
    """A copy of the files that git knows, in `folder`.

    Args:
      cache: a folder for compiled programs. They are written where lines are noted and else only
        read, so that no fault leaves anything to another.
    """

    def __init__(self, root: Path, folder: Path, cache: Path):
        self.root, self.folder, self.cache, self.changes = root, folder, cache, 0
        shutil.rmtree(folder, ignore_errors=True)
        for name in files(root):
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / "tree" / name)
        (folder / "site").mkdir()
        start = f"import runpy; runpy.run_path({lines.__file__!r})['note_lines_of_a_child']()"
        (folder / "site" / "sitecustomize.py").write_text(start)

    def change(self, path: str, fault: Fault | None) -> None:
        """Puts a fault into a file; None takes it out."""
        source, self.changes = (self.root / path).read_bytes(), self.changes + 1
        (self.folder / "tree" / path).write_bytes(fault.apply(source) if fault else source)
        # Python compiles again what has a new time.
        os.utime(self.folder / "tree" / path, (self.changes, self.changes))

    def test(
        self,
        paths: Iterable[str],
        order: Sequence[str] | None,
        seconds: Callable[[str], float],
        note: bool = False,
    ) -> tuple[int, float, list[dict[str, Any]]]:
        """Runs tests of some files until one fails; where lines are noted, all of them.

        Args:
          paths: the files of tests.
          order: the tests to run; None: all.
          seconds: after which a test is said to hang.
          note: whether to note the lines that each test executes.

        Returns:
          How pytest ended (minus the signal that killed it), its CPU seconds, and the reports of
          `_Reporter`.
        """
        report, notes = self.folder / "report.jsonl", self.folder / "notes"
        report.write_text("")
        for path in (notes, self.folder / "tree" / ".hypothesis"):
            shutil.rmtree(path, ignore_errors=True)
        notes.mkdir()
        pid = os.fork()
        if not pid:
            try:
                reporter = _Reporter(report, order, seconds, self._by_file)
                arguments = [*paths] if note else [*paths, "-x"]
                os._exit(self._run(arguments, reporter, notes if note else None))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(99)
        try:
            status, usage = os.wait4(pid, 0)[1:]
        finally:
            try:
                os.killpg(pid, signal.SIGKILL)  # with all that the tests have started
            except ProcessLookupError:
                pass
        reports = [json.loads(line) for line in report.read_text().splitlines()]
        noted = {line for file in notes.iterdir() for line in file.read_text().splitlines()}
        reports.append({"test": "", "lines": self._by_file(line.rsplit(":", 1) for line in noted)})
        return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, reports

    def _run(self, arguments: Sequence[str], reporter: "_Reporter", notes: Path | None) -> int:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        output = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        os.chdir(self.folder / "tree")
        sys.path[0] = str(self.folder / "tree")
        for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[name]
        import jax

        jax.config.update("jax_compilation_cache_dir", str(self.cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0 if notes else 1e9)
        if notes:
            package = f"{self.folder / 'tree' / PACKAGE}{os.sep}"
            os.environ |= {lines.FOLDER: str(notes), lines.PREFIX: package}
            os.environ["PYTHONPATH"] = str(self.folder / "site")
            lines.note_lines(package, lambda path, line: reporter.lines.add((path, line)))
        where = ("--rootdir=.", f"--basetemp={self.folder / 'tmp'}", "-p", "no:cacheprovider", "-q")
        # Of the plugins that are already imported.
        where += ("-W", "ignore::pytest.PytestAssertRewriteWarning")
        return int(pytest.main([*where, *arguments], plugins=[reporter]))

    def _by_file(self, lines: Iterable[Sequence[Any]]) -> dict[str, list[int]]:
        """Line numbers by the path within the tree."""
        lines_of = collections.defaultdict(list)
        for path, line in sorted(lines):
            lines_of[os.path.relpath(path, self.folder / "tree")].append(int(line))
        return lines_of


class _Reporter:
    """A plugin that runs the chosen tests in their order, under an alarm, and reports each as a
    line of JSON.
    """

    def __init__(
        self, report: Path, order: Sequence[str] | None, seconds: Callable[[str], float], by_file
    ):
        self.report, self.seconds, self.by_file = report, seconds, by_file
        self.lines = set[tuple[str, int]]()
        self.order = order and {name: index for index, name in enumerate(order)}

    def write(self, **report: Any) -> None:
        with self.report.open("a") as file:
            file.write(json.dumps(report) + "\n")

    def pytest_collection_modifyitems(self, items):
        if self.order is not None:
            chosen = [item for item in items if item.nodeid in self.order]
            items[:] = sorted(chosen, key=lambda item: self.order[item.nodeid])

    def pytest_collection_finish(self, session):
        groups = {}
        for item in session.items:
            mark = item.get_closest_marker("xdist_group")
            groups[item.nodeid] = mark.args[0] if mark else item.nodeid.split("::")[0]
        self.write(groups=groups)
        self.write(test="", lines=self.by_file(self.lines))
        self.lines.clear()

    def pytest_runtest_logstart(self, nodeid):
        self.write(started=nodeid)
        self.outcome = {"test": nodeid, "seconds": 0.0, "failed": False}
        signal.alarm(math.ceil(self.seconds(nodeid)))

    def pytest_runtest_logreport(self, report):
        self.outcome["seconds"] += report.duration
        self.outcome["failed"] |= report.failed

    def pytest_runtest_logfinish(self, nodeid):
        signal.alarm(0)
        self.write(**self.outcome, lines=self.by_file(self.lines))
        self.lines.clear()


def digest(root: Path) -> str:
    """A name for the code of a checkout, without this tool."""
    content = hashlib.sha256()
    for name in files(root):
        if name.endswith((".py", ".h", ".cc")) and not name.startswith("tools/mutants/"):
            content.update(name.encode() + (root / name).read_bytes())
    return content.hexdigest()[:10]


def files(root: Path) -> list[str]:
    """Files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=root, text=True).split("\0")
    return sorted({name for name in names if name and (root / name).is_file()})
