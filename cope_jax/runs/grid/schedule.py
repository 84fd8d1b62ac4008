"""Runs cells on an engine until none is left, and shows how far they are."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from cope_jax.progress import Progress
from cope_jax.runs.grid.cell import Cell
from cope_jax.runs.grid.cell_process import FAILED, LOG, Job, last_line
from cope_jax.runs.grid.claims import WAITS
from cope_jax.runs.grid.engines import Engine, Waiting
from cope_jax.training.preemption import GracefulStop

SECONDS = 1.0
"""The longest time until the bar advances."""
POLL = 0.05
"""Seconds between two looks for cells that have ended."""
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Seconds to the next try, after each refusal in a row."""


class Failure(NamedTuple):
    """A failed cell with its last line, or a refused or lost one with the error."""

    cell: Cell
    line: str
    error: BaseException | None


def drive(
    jobs: Sequence[tuple[Cell, Job]],
    engine: Engine,
    *,
    stop_at_failure: bool = False,
    finished: Callable[[], object] = lambda: None,
) -> tuple[int | None, Failure | None]:
    """Runs cells, at most `engine.slots` at a time.

    A cell that the engine refuses is tried again later, because a limit on submitted jobs may lift.
    If the engine refuses again and again while none runs, the cells that are left are not trained.

    After Ctrl-C or SIGTERM no cell starts, and those that run save a checkpoint. After a second
    Ctrl-C, KeyboardInterrupt.

    Args:
      jobs: the cells, in their order.
      engine: where they run.
      stop_at_failure: whether the first failure stops the other cells, as a signal does.
      finished: called after each cell that has finished.

    Returns:
      The signal that stopped the cells, and the first failure; None each if there was none.
    """
    cells, asked = _Cells(jobs, engine), False
    failure: Failure | None = None
    try:
        with GracefulStop() as stop, _View(jobs) as view:
            while True:
                if not asked and (refusal := cells.start()):
                    view.write(refusal.line)
                    return None, failure or refusal
                if not cells.running and (asked or not cells.waiting):
                    return stop.number, failure
                for ended, (cell, job, began) in cells.ended():
                    line, lost = _outcome(ended)
                    failed = (job.folder / FAILED).exists()
                    if line is None or failed or not asked:  # else it resumes later
                        view.end(cell, line, failed, time.monotonic() - began)
                    if line is None:
                        finished()
                    elif failed or (not asked and stop.number is None):
                        failure = failure or Failure(cell, line, lost)
                view.show([job.folder for _, job, _ in cells.running.values()])
                if not asked and (stop.number is not None or (stop_at_failure and failure)):
                    asked = True
                    engine.stop()
    finally:
        if cells.running:  # after a second Ctrl-C
            engine.stop()
        engine.close()


class _Cells:
    """Cells that wait, the next one last, and those that run, with the time when they began."""

    def __init__(self, jobs: Sequence[tuple[Cell, Job]], engine: Engine):
        self.waiting = list(reversed(jobs))
        self.running: dict[Waiting, tuple[Cell, Job, float]] = {}
        self._engine = engine
        self._refusals, self._next_try = 0, 0.0

    def start(self) -> Failure | None:
        """Fills the slots of the engine; returns its last refusal if it is not to be tried again."""
        free = self._engine.slots - len(self.running)
        while free and self.waiting and time.monotonic() >= self._next_try:
            cell, job = self.waiting[-1]
            try:
                self.running[self._engine.start(job)] = (cell, job, time.monotonic())
            except Exception as error:  # such as a limit on the number of submitted jobs
                self._refusals += 1
                if self._refusals > len(PAUSES) and not self.running:
                    others = f"the engine refuses the other {len(self.waiting)} cells"
                    return Failure(cell, f"{others}: {_in_one_line(error)}", error)
                pause = PAUSES[min(self._refusals, len(PAUSES)) - 1]
                self._next_try = time.monotonic() + pause
            else:
                self.waiting.pop()
                self._refusals, free = 0, free - 1
        return None

    def ended(self) -> Iterator[tuple[Waiting, tuple[Cell, Job, float]]]:
        """Waits until a cell has ended, at most until the next try or look; removes those ended."""
        end = time.monotonic() + SECONDS
        end = end if self.running else min(end, self._next_try)
        while time.monotonic() < end and not any(future.done() for future in self.running):
            time.sleep(POLL)
        for future in [future for future in self.running if future.done()]:
            self._refusals, self._next_try = 0, 0.0  # what it used is free
            yield future, self.running.pop(future)


def _outcome(ended: Waiting) -> tuple[str | None, BaseException | None]:
    """None if the cell is finished, else why not in one line; and the error of the engine."""
    try:
        return ended.result(), None
    except BaseException as error:  # the engine lost it; it is neither finished nor failed
        return f"lost ({_in_one_line(error)})", error


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[-1] if str(error) else ''}"


class _View:
    """A bar over the steps of all cells, and a line for each cell that has ended."""

    def __init__(self, jobs: Sequence[tuple[Cell, Job]]):
        self._steps = {job.folder: _step(job.folder) for _, job in jobs}
        self._before = dict(self._steps)
        self._total = len(jobs)
        self._ended = self._finished = self._failed = 0
        self._first, self._began = sum(self._steps.values()), 0.0
        self._compiling = True
        steps = sum(cell.config.training.steps for cell, _ in jobs)
        self._bar = Progress(steps, "step", label=self._label(), done=self._first)

    def __enter__(self) -> "_View":
        self._bar.__enter__()
        self._bar.compiling()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.__exit__(*exception)

    def end(self, cell: Cell, line: str | None, failed: bool, seconds: float) -> None:
        """Counts a cell that has ended; `line` says why it is not finished, None if it is."""
        self._ended += 1
        self._finished += line is None
        self._failed += failed
        self.write(
            f"[{self._ended}/{self._total}] {cell.name}: {line or 'finished'}, {tqdm.format_interval(seconds)}"
        )

    def write(self, line: str) -> None:
        self._bar.write(line)

    def show(self, running: Sequence[Path]) -> None:
        """Advances the bar to the steps that the cells have done; its clock starts with the first.

        `running` are the folders of the cells that train.
        """
        steps = {folder: max(step, _step(folder)) for folder, step in self._steps.items()}
        self._bar.label = self._label()
        done = sum(steps.values())
        more = done - sum(self._steps.values())
        if not self._compiling:
            rate = (done - self._first) / max(time.monotonic() - self._began, SECONDS)
            no_step = running and all(steps[cell] == self._before[cell] for cell in running)
            self._bar.advance(more, _before_steps(running) if no_step else f"{rate:,.3g} steps/s")
        elif more:
            self._compiling, self._first, self._began = False, done, time.monotonic()
            self._bar.start_clock(more)
        else:
            self._bar.advance(0, _before_steps(running))
        self._steps = steps

    def _label(self) -> str:
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{self._finished} of {self._total} cells{failed}"


def _before_steps(running: Sequence[Path]) -> str:
    """Says why no cell has done a step."""
    logs = [folder / LOG for folder in running]
    waits = logs and all(log.exists() and last_line(log) == WAITS for log in logs)
    return WAITS if waits else "compiling"


def _step(folder: Path) -> int:
    """The newest step of a cell, from its metrics, which every engine shows."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            return int(json.loads(file.read().splitlines()[-1])["step"])
    except (OSError, IndexError, ValueError, KeyError, TypeError):  # none, or being written
        return 0
