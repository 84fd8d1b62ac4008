"""Chooses a value, such as the learning rate, for each setting and label before its cells train."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cope_jax.errors import ConfigError, NonFiniteError
from cope_jax.models.model import overlay
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.grid.cell import Cell
from cope_jax.runs.grid.cell_process import FAILED
from cope_jax.runs.grid.grid import Grid, State
from cope_jax.runs.grid.worker import STATUS
from cope_jax.training.experiment_config import ExperimentConfig

SEED = 1_000_000
"""The seed of trial cells and of their data, which no other cell should have."""


def trials(cells: Iterable[Cell]) -> list[Cell]:
    """The trials of all cells with a `search`: one for each combination, setting and label.

    A trial has a seed and data of its own, so what is chosen has not seen the evaluation of the
    other cells.

    >>> import cope_jax as cj
    >>> rates = {"optimizer.learning_rate": (1e-3, 3e-3)}
    >>> cells = [Cell(cj.config("quick", encoding="rope"), (seed,), "copy", search=rates) for seed in range(3)]
    >>> [trial.name for trial in trials(cells)]
    ['copy search learning_rate=0.001, rope, seed 1000000', 'copy search learning_rate=0.003, rope,
    seed 1000000']
    """
    known: dict[str, Cell] = {}
    for cell in cells:
        for values in _combinations(cell):
            setting = f"{cell.setting} search {_named(values)}".strip()
            data = {"training.data_seed": SEED}
            trial = _with(cell, {**values, **data})
            trial = dataclasses.replace(trial, seeds=(SEED,), setting=setting)
            known.setdefault(trial.name, trial)
    return list(known.values())


def choose(cell: Cell, workdir: Path) -> tuple[Cell, dict[str, Any]]:
    """The cell with the values whose trial has the lowest loss on the first split, and these values.

    A cell without `search`, or whose trials have all diverged, stays as it is. A trial that failed
    is never chosen.
    """
    losses = {}
    for trial, values in zip(trials([cell]), _combinations(cell), strict=True):
        path = trial.folder(workdir) / "result.json"
        records = workdirs.run_records(path) if path.exists() else []
        rows = (row for row in records if row["metric"] == "loss" and row.get("kind") == "split")
        loss = next((row["value"] for row in rows), math.inf)
        losses[tuple(values.items())] = loss if math.isfinite(loss) else math.inf
    best = min(losses, key=lambda values: losses[values], default=())
    if losses.get(best, math.inf) < math.inf:
        return _with(cell, dict(best)), dict(best)
    return cell, {}


def recorded(cell: Cell, workdir: Path) -> Cell:
    """A cell that has begun with the values that it trains with; its trials need not be there."""
    path = cell.folder(workdir) / "config.json"
    if cell.search and path.exists():
        known = workdirs.read_json(path, config=dict)["config"]
        recipe = ExperimentConfig.from_mapping(known).recipe()
        for values in _combinations(cell):
            chosen = _with(cell, values)
            if workdirs.difference(recipe, chosen.config.recipe()) is None:
                return chosen
    return cell


def ended(trials: Grid) -> list[Cell]:
    """The trials that need not train: finished, or with a loss that is not finite."""
    state = trials.state()
    return [*state.finished, *(t for t in state.failed if _diverged(t, trials.workdir))]


def left(trials: Grid, only_failed: bool = False) -> list[Cell]:
    """The trials to train: those that failed, and all that have not ended unless `only_failed`."""
    state = trials.state()
    failed = [trial for trial in state.failed if not _diverged(trial, trials.workdir)]
    return failed + ([] if only_failed else state.left)


def _diverged(trial: Cell, workdir: Path) -> bool:
    """True if the loss of a trial was not finite, which is a result and not a failure."""
    file = trial.folder(workdir) / FAILED
    diverged = STATUS[NonFiniteError]
    return file.exists() and workdirs.read_json(file, status=int)["status"] == diverged


def blocked(cells: Iterable[Cell], tried: State, workdir: Path) -> State:
    """The cells that wait for trials: failed if a trial has failed, else left."""
    failed = tried.failed.items()
    lines = {trial.name: line for trial, line in failed if not _diverged(trial, workdir)}
    left = {trial.name for trial in tried.left}
    waiting = State([], {}, [])
    for cell in cells:
        names = [trial.name for trial in trials([cell])]
        if name := next((name for name in names if name in lines), None):
            waiting.failed[cell] = f"trial {name}: {lines[name]}"
        elif not left.isdisjoint(names):
            waiting.left.append(cell)
    return waiting


def budget(cells: Sequence[Cell]) -> str:
    """The extent of the search, as text; "" without one."""
    searched = [cell for cell in cells if cell.search]
    if not searched:
        return ""
    counts = {len(_combinations(cell)) for cell in searched}
    fields = sorted({field.rpartition(".")[2] for cell in searched for field in cell.search})
    whole = len(searched) == len(cells)
    where = "" if whole else f" of {', '.join(dict.fromkeys(cell.setting for cell in searched))}"
    number = " to ".join(map(str, sorted(counts)))
    return f"{' and '.join(fields)}{where} chosen for each encoding from {number} trials"


def choices(cells: Iterable[Cell], workdir: Path) -> list[str]:
    """A line for each setting and label that had trials: the values that won, or that none did."""
    searched = {(cell.setting, cell.label): cell for cell in cells if cell.search}
    won = {names: _named(choose(cell, workdir)[1]) for names, cell in searched.items()}
    lines = ((", ".join(filter(None, names)), text) for names, text in won.items())
    return [f"{names}: {text or 'all trials diverged'}" for names, text in lines]


def _combinations(cell: Cell) -> list[dict[str, Any]]:
    if not cell.search:
        return []
    for field, values in cell.search.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(
                f"search of {cell.name}: {field} needs a tuple of values, not {values!r}"
            )
        if any(value in values[:index] for index, value in enumerate(values)):
            raise ConfigError(f"search of {cell.name}: {field} has a value twice, {values!r}")
    combinations = itertools.product(*cell.search.values())
    return [dict(zip(cell.search, values, strict=True)) for values in combinations]


def _with(cell: Cell, values: Mapping[str, Any]) -> Cell:
    config = cell.config.to_dict()
    for field, value in values.items():
        for name in reversed(field.split(".")):
            value = {name: value}
        config = overlay(config, value)
    return dataclasses.replace(cell, config=ExperimentConfig.from_mapping(config), search={})


def _named(values: Mapping[str, Any]) -> str:
    return " ".join(f"{field.rpartition('.')[2]}={value}" for field, value in values.items())
