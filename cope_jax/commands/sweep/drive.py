"""Runs the cells of a grid that are left on an engine, and shows how far they are."""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from cope_jax.commands.sweep.cells import FAILED, Cell
from cope_jax.commands.sweep.engines import Engine, Waiting
from cope_jax.commands.sweep.run import LOG, Job, last_line
from cope_jax.training.preemption import GracefulStop

SECONDS = 1.0
"""The time between two looks at the cells that run."""
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Seconds to the next try, after each refusal in a row."""


def drive(jobs: Sequence[tuple[Cell, Job]], engine: Engine, expected: dict[Cell, float]) -> int | None:
    """Runs cells, at most `engine.slots` at a time, and returns the signal that stopped them, or None.

    A cell that the engine refuses is tried again later, because a limit on submitted jobs may lift. If the engine
    refuses again and again while none runs, the cells that are left are not trained.

    A cell that fails does not stop the others. After Ctrl-C or SIGTERM no cell starts, and those that run save a
    checkpoint. After a second Ctrl-C, KeyboardInterrupt.

    Args:
      jobs: the cells, in their order.
      engine: where they run.
      expected: the estimated seconds of each cell; {} if they are not known.
    """
    waiting = list(reversed(jobs))
    running: dict[Waiting, tuple[Cell, Job, float]] = {}
    view = _View(len(jobs), expected, engine.slots)
    asked, refusals, next_try = False, 0, 0.0
    try:
        with GracefulStop() as stop, view:
            while True:
                while waiting and len(running) < engine.slots and not asked and time.monotonic() >= next_try:
                    cell, job = waiting[-1]
                    try:
                        running[engine.start(job)] = (cell, job, time.monotonic())
                    except Exception as error:  # such as a limit on the number of submitted jobs
                        refusals += 1
                        if refusals > len(PAUSES) and not running:
                            view.give_up(_in_one_line(error), len(waiting))
                            return None
                        next_try = time.monotonic() + PAUSES[min(refusals, len(PAUSES)) - 1]
                    else:
                        waiting.pop()
                        refusals = 0
                if not running and (asked or not waiting):
                    return stop.number
                if running:
                    engine.wait(running, SECONDS)
                else:
                    time.sleep(min(SECONDS, max(0.0, next_try - time.monotonic())))
                for ended in [one for one in running if one.done()]:
                    cell, job, began = running.pop(ended)
                    refusals, next_try = 0, 0.0  # what it held is free
                    outcome, failed = _outcome(ended), (job.folder / FAILED).exists()
                    if outcome is None or failed or not asked:  # else it resumes later
                        view.end(cell, outcome, failed, time.monotonic() - began)
                view.show(running.values())
                if stop.number is not None and not asked:
                    asked = True
                    engine.stop()
    finally:
        if running:  # after a second Ctrl-C
            engine.stop()
        engine.close()


def _outcome(ended: Waiting) -> str | None:
    """None if the cell is finished, else why not."""
    try:
        return ended.result()
    except BaseException as error:  # the machine or the engine lost it; it is neither finished nor failed
        return f"lost ({_in_one_line(error)})"


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[-1] if str(error) else ''}"


class _View:
    """A table of the cells that run, on a terminal; a line for each cell that has ended, anywhere else."""

    def __init__(self, total: int, expected: dict[Cell, float], slots: int):
        self._total, self._expected, self._slots = total, dict(expected), slots
        self._ended = self._done = self._failed = 0
        self._began = time.monotonic()
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, refresh_per_second=2) if sys.stderr.isatty() else None

    def __enter__(self) -> "_View":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.update("")
            self._live.stop()

    def end(self, cell: Cell, why: str | None, failed: bool, seconds: float) -> None:
        """Counts a cell that has ended, and says so; `why` says why it is not finished, None if it is."""
        self._expected.pop(cell, None)
        self._ended += 1
        self._done += why is None
        self._failed += failed
        line = f"{cell.name}: {'finished' if why is None else why}, {tqdm.format_interval(seconds)}"
        self._console.print(f"[{self._ended}/{self._total}] {line}", markup=False, soft_wrap=True)

    def give_up(self, why: str, cells: int) -> None:
        """Says that the engine takes no more cells."""
        line = f"the engine refuses the other {cells} cells: {why}"
        self._console.print(line, markup=False, soft_wrap=True)

    def show(self, running: Any) -> None:
        """Refreshes the table."""
        if self._live:
            self._live.update(self._table(list(running)))

    def _table(self, running: list[tuple[Cell, Job, float]]) -> Table:
        title = f"{self._done} of {self._total} finished, {self._failed} failed{self._left(running)}"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        rows = [("cell", "seed", "time", "last line")]
        for cell, job, began in running:
            passed = tqdm.format_interval(time.monotonic() - began)
            rows.append((f"{cell.table}, {cell.encoding}", str(cell.seed), passed, _now(job)))
        name, seed, interval, _ = (max(map(len, column)) + 2 for column in zip(*rows, strict=True))
        room = self._console.width - seed - interval
        name = max(8, min(name, room - 20))  # so that the last line is what is shortened
        for heading, width in zip(rows[0], (name, seed, interval, max(8, room - name)), strict=True):
            table.add_column(heading, width=width - 2, no_wrap=True, overflow="ellipsis")
        for row in rows[1:]:
            table.add_row(*map(escape, row))
        return table

    def _left(self, running: Sequence[tuple[Cell, Job, float]]) -> str:
        """The remaining time, in words."""
        ended, passed = self._ended, time.monotonic() - self._began
        if self._expected:
            seconds = sum(self._expected.values()) / self._slots
        elif ended:
            under_way = sum(time.monotonic() - began for *_, began in running)
            each = (passed * self._slots - under_way) / ended
            seconds = (each * (self._total - ended) - under_way) / self._slots
        else:
            return ""
        return f", {tqdm.format_interval(max(0, seconds))} left"


def _now(job: Job) -> str:
    """What a cell does: the last line of its log, until it prints its results."""
    if (job.folder / "result.json").exists():
        return "finished"
    log = job.folder / LOG
    return last_line(log).replace(f"{Path.cwd()}/", "") if log.exists() else ""


def jobs_of(cells: Sequence[Cell], workdir: Path, **needs: Any) -> Iterator[tuple[Cell, Job]]:
    """Yields each cell with what an engine runs."""
    for cell in cells:
        yield cell, Job(cell.folder(workdir.resolve()), tuple(cell.flags()), Path.cwd(), **needs)
