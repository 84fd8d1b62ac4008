"""A grid: many runs in one folder, which shows what is finished."""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError, Interrupted, StorageError, storage_reason
from cope_jax.runs import checkout
from cope_jax.runs import records as recording
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.experiment import Experiment
from cope_jax.runs.grid.cell import Cell
from cope_jax.runs.grid.cell_process import FAILED, Job
from cope_jax.runs.grid.engines import Engine, Local
from cope_jax.runs.grid.schedule import Failure, drive
from cope_jax.runs.grid.worker import STATUS
from cope_jax.storage.mirror import shown
from cope_jax.tasks import Task
from cope_jax.training import processes
from cope_jax.training.from_config import create_learner


@dataclasses.dataclass
class State:
    """The cells of a grid by how far they are; read from disk.

    Attributes:
      finished: cells with a result.
      failed: the last line of each cell that failed.
      left: all other cells.
    """

    finished: list[Cell]
    failed: dict[Cell, str]
    left: list[Cell]


class Grid:
    """Many runs in one folder, each in its own process, or one after the other in this process.

    >>> import cope_jax as cj
    >>> from cope_jax.runs.grid.cell import Cell
    >>> configs = [cj.config("quick", encoding=name) for name in ("cope", "rope")]
    >>> grid = cj.Grid("runs/grid", [Cell(config, (seed,)) for config in configs for seed in range(3)])
    >>> print(f"{len(grid.state().left)} cells to train, such as {grid.cells[-1].name}")
    6 cells to train, such as rope, seed 2

    `grid.train(jobs=2)` then trains two cells at a time, and `grid.records()` returns what they
    measured. After an interruption, the same call resumes, also with another engine, and gives the
    same numbers.

    Args:
      workdir: the folder of all cells.
      cells: what to train, in this order.

    Raises:
      ConfigError: two cells have the same folder.
    """

    def __init__(self, workdir: str | os.PathLike[str], cells: Iterable[Cell]):
        self.workdir, self.cells = Path(workdir), list(cells)
        seen: dict[Path, Cell] = {}
        for cell in self.cells:
            if seen.setdefault(cell.folder(self.workdir), cell) is not cell:
                raise ConfigError(
                    f"two cells have the same setting, label and seeds ({cell.name}): give one of them another setting="
                )

    def check(self) -> None:
        """Checks every cell.

        ConfigError: one is wrong, or those of a setting do not fit together.
        """
        settings: dict[str, Any] = {}
        recipes: dict[tuple[str, str], Any] = {}
        made: dict[str, Task] = {}
        for cell in self.cells:
            try:
                # The seed of the data may follow the seed of the cell.
                training = dataclasses.replace(cell.config.training, data_seed=0)
                recipe = dataclasses.replace(cell.config, training=training).recipe()
                recipe["search"] = {field: repr(values) for field, values in cell.search.items()}
                other = recipes.setdefault((cell.setting, cell.label), recipe)
                if other is recipe:
                    EncodingConfig.parse(cell.config.encoding, cell.config.encodings)
                    options = json.dumps(recipe["task"])
                    if options not in made:
                        made[options] = cell.config.task.create()
                    create_learner(cell.config, made[options])
                    cell.config.training.check_bound()
            except ConfigError as error:
                raise ConfigError(f"cell {cell.name}: {error}") from error
            if settings.setdefault(cell.setting, cell.config.task) != cell.config.task:
                raise ConfigError(
                    f"the cells of {cell.setting!r} have different tasks: give each task its own setting=..."
                )
            if difference := workdirs.difference(other, recipe):
                raise ConfigError(
                    f"the cells of {cell.setting!r} with {cell.label} differ in more than the seed, {difference}: "
                    "give one of them another setting=..."
                )

    def state(self) -> State:
        """Reads how far cells are, and writes nothing.

        ConfigError: a finished cell has other settings, or no config.json, which has them.
        """
        state = State([], {}, [])
        for cell in self.cells:
            folder = cell.folder(self.workdir)
            if (folder / "result.json").exists():
                if not (folder / "config.json").exists():
                    raise ConfigError(
                        f"{folder} has result.json but not config.json: restore config.json, or delete the "
                        "folder to train the cell again"
                    )
                workdirs.Workdir(folder).check(cell.config, cell.seeds)
                state.finished.append(cell)
            elif (folder / FAILED).exists():
                state.failed[cell] = str(workdirs.read_json(folder / FAILED, line=str)["line"])
            else:
                state.left.append(cell)
        return state

    def train(
        self,
        jobs: int = 1,
        *,
        engine: Engine | None = None,
        cells: Sequence[Cell] | None = None,
        time_limit: float | None = None,
        stop_at_failure: bool = True,
        finished: Callable[[], object] | None = None,
    ) -> None:
        """Trains the cells that have no result.

        Args:
          jobs: the number of cells at a time, each in its own process with an equal share of the
            cores. If it is 1, this process trains them, and consecutive cells that differ only in
            their seeds share a program.
          engine: where to train; it replaces `jobs`.
          cells: what to train; None means all cells that have no result.
          time_limit: seconds after which an engine stops a cell, which then counts as failed; None
            means no limit.
          stop_at_failure: whether the first failure of an engine stops the other cells, and is
            raised.
          finished: called after each cell that has finished.

        Raises:
          Interrupted: Ctrl-C or SIGTERM stopped the cells, which have saved checkpoints.
          ConfigError, NonFiniteError, StorageError, RuntimeError: the error of the first cell that
            failed.
        """
        if cells is None:
            if processes.is_first():
                self.state()  # a result of another config must not pass for one of this config
            cells = [cell for cell in self.cells if not self._result(cell).exists()]
            if cells and processes.is_first():
                slots = min(jobs if engine is None else engine.slots, len(cells))
                line = f"{len(cells)} of {len(self.cells)} cells to train, {slots} at a time"
                print(line, file=sys.stderr)
        if not cells:
            return
        finished = finished or (lambda: None)
        try:
            if engine is None and jobs == 1:
                self._train_here(cells, finished)
            else:
                self._train_on(engine or Local(jobs), cells, time_limit, stop_at_failure, finished)
        except (Interrupted, KeyboardInterrupt):
            if processes.is_first():
                count = sum(self._result(cell).exists() for cell in self.cells)
                line = f"{count} of {len(self.cells)} cells in {shown(self.workdir)} are finished"
                print(line, file=sys.stderr)
            raise

    def _train_here(self, cells: Sequence[Cell], finished: Callable[[], object]) -> None:
        environment = recording.environment()  # now, since the checkout may change while this runs
        experiments: dict[str, Experiment] = {}  # only the last, with its compiled programs
        made: dict[str, Task] = {}  # only the last, kept because reading a long text takes minutes
        for number, cell in enumerate(cells):
            config, key = cell.config, repr(cell.config)
            if key not in experiments:
                if repr(config.task) not in made:
                    made = {repr(config.task): config.task.create()}
                experiments = {key: Experiment(config, made[repr(config.task)])}
            # The peak of memory includes that of all earlier runs of this process, so only the
            # first run has one.
            fields = {**cell.fields, **({"memory_gib": None} if number else {})}
            label = f"[{self.cells.index(cell) + 1}/{len(self.cells)}] {cell.name}"
            folder = cell.folder(self.workdir)
            experiments[key].train(
                folder, cell.seeds, label=label, fields=fields, environment=environment
            )
            finished()

    def _train_on(
        self,
        engine: Engine,
        cells: Sequence[Cell],
        time_limit: float | None,
        stop_at_failure: bool,
        finished: Callable[[], object],
    ) -> None:
        commit, folder, cwd = checkout.commit() or "", self.workdir.resolve(), Path.cwd()
        needs = (engine.cores, engine.devices, time_limit)
        jobs = [
            (cell, Job(cell.folder(folder), cell.to_json(), cwd, commit, *needs)) for cell in cells
        ]
        number, failure = drive(jobs, engine, stop_at_failure=stop_at_failure, finished=finished)
        if failure and stop_at_failure:
            self._raise(failure)
        if number is not None:
            raise Interrupted("stopped; rerun the same command to resume", number)

    def _raise(self, failure: Failure) -> None:
        """Raises the error that a cell ended with, in its own process."""
        folder = failure.cell.folder(self.workdir)
        line = f"{failure.cell.name}: {failure.line.removeprefix('error: ')}"
        if failure.error is not None:
            reason = storage_reason(failure.error)
            raise StorageError.of(folder, reason) if reason else RuntimeError(line)
        if not (folder / FAILED).exists():
            # A signal to all processes may reach the cell first, or another process trains it.
            hint = "" if "rerun" in line else "; rerun the same command to resume"
            raise Interrupted(f"{line}{hint}", signal.SIGTERM)
        status = workdirs.read_json(folder / FAILED, status=int)["status"]
        for kind, number in STATUS.items():
            if status == number:
                raise kind(line)
        raise RuntimeError(f"{line}; log.txt in {folder} has its output: rerun with --jobs=1")

    def _result(self, cell: Cell) -> Path:
        return cell.folder(self.workdir) / "result.json"

    def records(self, cells: Iterable[Cell] | None = None) -> list[recording.Record]:
        """The records of finished cells, each with its `setting` if it has one."""
        return [
            {**({"setting": cell.setting} if cell.setting else {}), **record}
            for cell in (self.cells if cells is None else cells)
            for record in self._records(cell)
        ]

    def _records(self, cell: Cell) -> list[recording.Record]:
        result = self._result(cell)
        return workdirs.run_records(result) if result.exists() else []

    def environment(self, cells: Iterable[Cell] | None = None) -> recording.Record:
        """The environment of the first result, {} without one; `others` has those that differ."""
        results = [self._result(cell) for cell in (self.cells if cells is None else cells)]
        known: list[recording.Record] = []
        for result in filter(Path.exists, results):
            environment = workdirs.run_environment(result)
            known += [] if environment in known else [environment]
        first, *others = known or [{}]
        return {**first, **({"others": others} if others else {})}

    def write_results(self) -> list[Path]:
        """Writes results.json and results.csv of finished cells, and returns their paths."""
        return recording.write_results(self.workdir, self.records(), self.environment())

    def seconds(self, cell: Cell) -> float:
        """The training time of a finished cell; its records have that of a single seed."""
        return self._records(cell)[0]["wall_seconds"] * len(cell.seeds)

    def seconds_left(self, waiting: Iterable[Cell], finished: Iterable[Cell]) -> float | None:
        """The estimated training time of cells, one after the other.

        A cell takes as long as finished cells of its setting and label, or else of its setting, or
        else as all finished cells on average. None: no cell is finished.
        """
        times: dict[tuple[str, ...], list[float]] = {}
        for cell in finished:
            seconds = self.seconds(cell)
            for key in ((), (cell.setting,), (cell.setting, cell.label)):
                times.setdefault(key, []).append(seconds)
        if not times:
            return None
        means = {key: sum(values) / len(values) for key, values in times.items()}
        known = (means.get((c.setting, c.label), means.get((c.setting,))) for c in waiting)
        return sum(means[()] if mean is None else mean for mean in known)
