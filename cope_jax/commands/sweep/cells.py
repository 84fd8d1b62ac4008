"""The cells of a grid: what each one trains, where it is on disk, and how far it is."""

import dataclasses
import functools
import json
import runpy
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cope_jax import tasks
from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.grid import folder_name
from cope_jax.runs.records import Record
from cope_jax.training import config_files
from cope_jax.training.experiment_config import ExperimentConfig
from cope_jax.training.from_config import create_learner


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a grid: a config with changes, an encoding and a seed.

    >>> cell = Cell("quick", "rope", seed=1, changes={"training": {"steps": 200}})
    >>> cell.flags()
    ['--config=quick', '--config.training.steps=200', '--config.encoding=rope', '--seed=1']
    >>> print(cell.folder(Path("runs")))
    runs/quick_steps=200/cells/rope/seed_1

    Attributes:
      config: name or path of a config file; the text after a colon is the argument of its `get_config`.
      encoding: the position encoding, as text.
      seed: the random seed of the run.
      changes: fields of the config that differ from the file, as nested dicts.
      setting: what the cells of one table share, which names its folder. If empty, the config and its changes.
      search: values to try for some fields, by their dotted paths, such as {"optimizer.learning_rate": (1e-3, 3e-3)}.
        Before the cells of a setting and encoding train, one trial run for each combination decides: see
        `cope_jax.commands.sweep.search`.
    """

    config: str
    encoding: str
    seed: int = 0
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    setting: str = ""
    search: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def table(self) -> str:
        """The name of the setting."""
        last = (f"{path.rpartition('.')[2]}={value}" for path, value in leaves_of(self.changes))
        return self.setting or folder_name(" ".join((self.config, *last)))

    @property
    def name(self) -> str:
        return f"{self.table}, {self.encoding}, seed {self.seed}"

    def folder(self, workdir: Path) -> Path:
        """The workdir of the run."""
        return workdir / folder_name(self.table) / "cells" / folder_name(self.encoding) / f"seed_{self.seed}"

    def flags(self) -> list[str]:
        """The flags of `cope-jax train` for this cell, without its workdir."""
        changes = [f"--config.{path}={value}" for path, value in leaves_of(self.changes)]
        return [f"--config={self.config}", *changes, f"--config.encoding={self.encoding}", f"--seed={self.seed}"]

    def experiment(self) -> ExperimentConfig:
        """The config of the run. ConfigError: the config, a field or the encoding is wrong."""
        return _experiment(self.config, self.encoding, json.dumps(self.changes))


def read(path: str) -> list[Cell]:
    """The cells that `get_cells()` of a grid file yields, unchecked. ConfigError: the file is not a grid."""
    if Path(path).is_fifo():
        raise ConfigError(f"the grid {path} is a pipe, which may never end: give a file")
    try:
        get_cells = runpy.run_path(path).get("get_cells")
        found = get_cells() if callable(get_cells) else None
        if callable(get_cells) and not isinstance(found, Iterable):
            raise ConfigError(f"{path} has no cells: get_cells() must yield or return them, not return {found!r}")
        cells = None if found is None else list(found)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"--grid needs a Python file whose get_cells() yields cells, not {path} ({_reason(error)})"
        ) from error
    if cells is None:
        raise ConfigError(f"--grid needs a Python file whose get_cells() yields cells, not {path} (it has none)")
    if not cells:
        raise ConfigError(f"{path} has no cells: get_cells() must yield at least one")
    for cell in cells:
        if not isinstance(cell, Cell):
            raise ConfigError(f"{path}: get_cells() must yield cells of cope_jax.commands.sweep.cells, not {cell!r}")
    return cells


def check(cells: Iterable[Cell]) -> None:
    """Checks every cell. ConfigError: a cell is wrong, two have the same folder, or one table has several tasks."""
    seen: dict[Path, Cell] = {}
    settings: dict[str, Any] = {}
    recipes: dict[tuple[str, str], Any] = {}
    for cell in cells:
        try:
            task, recipe = cell.experiment().task, _checked(cell.config, cell.encoding, _without_seed(cell.changes))
            if not isinstance(cell.seed, int) or cell.seed < 0:
                raise ConfigError(f"seed must be an integer of at least 0, not {cell.seed!r}")
            if nothing := [path for path, value in leaves_of(cell.changes) if value is None]:
                raise ConfigError(f"changes cannot set {nothing[0]} to None: write a config file that does")
            if not folder_name(cell.table):
                raise ConfigError("setting needs letters or digits")
        except ConfigError as error:
            raise ConfigError(f"cell {cell.name}: {error}") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"cell {cell.config!r}, {cell.encoding!r}, seed {cell.seed!r}: {error}") from error
        if seen.setdefault(cell.folder(Path()), cell) is not cell:
            raise ConfigError(
                f"two cells have the same setting, encoding and seed ({cell.name}): give one of them another setting="
            )
        if settings.setdefault(cell.table, task) != task:
            raise ConfigError(f"the cells of {cell.table!r} have different tasks: give each task its own setting=...")
        recipe = {**recipe, "search": {field: repr(values) for field, values in cell.search.items()}}
        other = recipes.setdefault((cell.table, cell.encoding), recipe)
        if other is not recipe and (found := workdirs.difference(other, recipe)):
            raise ConfigError(
                f"the cells of {cell.table!r} with {cell.encoding} differ in more than the seed, {found}: "
                f"give one of them another setting=..."
            )


def _reason(error: Exception) -> str:
    """What went wrong, in one line, and where in the grid file."""
    found = getattr(error, "strerror", None) or f"{type(error).__name__}: {' '.join(str(error).split())}"
    lines = [str(frame.lineno) for frame in traceback.extract_tb(error.__traceback__) if frame.name == "get_cells"]
    return f"line {lines[-1]}: {found}" if lines else str(found)


@dataclasses.dataclass
class State:
    """Which cells are finished, have failed, or are left; read from disk.

    Attributes:
      finished: cells with a result.
      failed: the last line of each cell that failed.
      left: cells that have neither.
    """

    finished: list[Cell]
    failed: dict[Cell, str]
    left: list[Cell]


def state(cells: Sequence[Cell], workdir: Path) -> State:
    """Reads the state of cells. ConfigError: the folder of a finished cell belongs to other settings."""
    found = State([], {}, [])
    for cell in cells:
        folder = cell.folder(workdir)
        if (folder / "result.json").exists():
            workdirs.Workdir(folder).open(cell.experiment(), [cell.seed])
            found.finished.append(cell)
        elif (folder / FAILED).exists():
            found.failed[cell] = str(workdirs.read_json(folder / FAILED, line=str)["line"])
        else:
            found.left.append(cell)
    return found


FAILED = "failed.json"
"""The file in the folder of a cell that failed, with the last line that it printed and its exit status."""


def records(cells: Iterable[Cell], workdir: Path) -> list[Record]:
    """The records of finished cells, each with the field `setting`."""
    return [
        {"setting": cell.table, **record}
        for cell in cells
        for record in workdirs.read_records(cell.folder(workdir) / "result.json")
    ]


def seconds_left(waiting: Iterable[Cell], finished: Iterable[Cell], workdir: Path) -> float | None:
    """The estimated training time of cells, one after the other, from the time of the finished ones.

    A cell takes as long as finished cells of its setting and encoding, or else of its setting, or else as all finished
    cells on average. None: no cell is finished.
    """
    times: dict[tuple[str, ...], list[float]] = {}
    for cell in finished:
        taken = next(iter(workdirs.read_records(cell.folder(workdir) / "result.json")))["wall_seconds"]
        for key in ((), (cell.table,), (cell.table, cell.encoding)):
            times.setdefault(key, []).append(taken)
    if not times:
        return None
    means = {key: sum(values) / len(values) for key, values in times.items()}
    return sum(means.get((c.table, c.encoding), means.get((c.table,), means[()])) for c in waiting)


def _without_seed(changes: Mapping[str, Any]) -> str:
    """The changes without the seed of the data, which may follow the seed of the cell."""
    training = {name: value for name, value in changes.get("training", {}).items() if name != "data_seed"}
    return json.dumps({**changes, "training": training})


@functools.cache
def _checked(config: str, encoding: str, changes: str) -> dict[str, Any]:
    """The recipe of cells, after their task and model are checked. ConfigError: they do not fit."""
    experiment = _experiment(config, encoding, changes)
    create_learner(experiment, _task(experiment.task.name, json.dumps(experiment.task.options)))
    return experiment.recipe()


@functools.cache
def _task(name: str, options: str) -> tasks.Task:
    return tasks.create(name, **json.loads(options))


@functools.cache
def _experiment(config: str, encoding: str, changes: str) -> ExperimentConfig:
    found = config_files.config(config, **json.loads(changes), encoding=encoding)
    EncodingConfig.parse(encoding, found.encodings)
    return found


def leaves_of(changes: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted path, value) of each leaf of nested dicts."""
    found = []
    for name, value in changes.items():
        nested = isinstance(value, Mapping)
        found += leaves_of(value, f"{prefix}{name}.") if nested else [(f"{prefix}{name}", value)]
    return found
