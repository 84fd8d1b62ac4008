"""Chooses a value, such as the learning rate, for each setting and encoding before its cells train."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cope_jax.commands.sweep.cells import FAILED, Cell, State, leaves_of
from cope_jax.errors import ConfigError
from cope_jax.models.model import overlay
from cope_jax.runs import workdir as workdirs

NOT_FINITE = 3
"""The exit status of a run whose loss is not finite."""

SEED = 1_000_000
"""The seed of trial cells and of their data, which no other cell should have."""


def trials(cells: Iterable[Cell]) -> list[Cell]:
    """The trial cells of all cells that have a `search`: one for each combination of values, setting and encoding.

    A trial has a seed and data of its own, so what is chosen has not seen the evaluation of the other cells.

    >>> cell = Cell("quick", "rope", 3, search={"optimizer.learning_rate": (1e-3, 3e-3)})
    >>> [trial.name for trial in trials([cell, dataclasses.replace(cell, seed=4)])]
    ['quick search learning_rate=0.001, rope, seed 1000000', 'quick search learning_rate=0.003, rope, seed 1000000']
    """
    found: dict[str, Cell] = {}
    for cell in cells:
        for values in _combinations(cell):
            named = " ".join(f"{field.rpartition('.')[2]}={value}" for field, value in values.items())
            changes = overlay(_with(cell, values).changes, _nested("training.data_seed", SEED))
            trial = Cell(cell.config, cell.encoding, SEED, changes, f"{cell.table} search {named}")
            found.setdefault(trial.name, trial)
    return list(found.values())


def chosen(cell: Cell, workdir: Path) -> Cell:
    """The cell with the values whose trial has the lowest loss in distribution.

    A cell without `search`, or whose trials have all diverged, stays as it is. A trial that failed is never chosen.
    """
    losses = {}
    for trial, values in zip(trials([cell]), _combinations(cell), strict=True):
        records = workdirs.read_records(trial.folder(workdir) / "result.json")
        found = [row["value"] for row in records if row["metric"] == "loss" and row["kind"] == "split"][:1]
        losses[tuple(values.items())] = found[0] if found and math.isfinite(found[0]) else math.inf
    best = min(losses, key=lambda values: losses[values], default=())
    return _with(cell, dict(best)) if losses.get(best, math.inf) < math.inf else cell


def diverged(trial: Cell, workdir: Path) -> bool:
    """Whether a trial ended because its loss was not finite, which is a result and not a failure."""
    file = trial.folder(workdir) / FAILED
    return file.exists() and workdirs.read_json(file, status=int)["status"] == NOT_FINITE


def missing(cell: Cell, state: State, workdir: Path) -> str | None:
    """Why a value cannot be chosen: the first trial that has failed or not ended; None if all have ended."""
    failed = {trial.name: line for trial, line in state.failed.items()}
    left = {trial.name for trial in state.left}
    for trial in trials([cell]):
        if trial.name in left or (trial.name in failed and not diverged(trial, workdir)):
            return f"trial {trial.name}: {failed.get(trial.name, 'not trained yet')}"
    return None


def budget(cells: Sequence[Cell]) -> str:
    """How much was searched, in words; "" if nothing."""
    searched = [cell for cell in cells if cell.search]
    if not searched:
        return ""
    counts = {len(_combinations(cell)) for cell in searched}
    fields = sorted({field.rpartition(".")[2] for cell in searched for field in cell.search})
    whole = len(searched) == len(cells)
    where = "" if whole else f" of {', '.join(dict.fromkeys(cell.table for cell in searched))}"
    number = " to ".join(map(str, sorted(counts)))
    return f"{' and '.join(fields)}{where} chosen for each encoding from {number} trials"


def choices(cells: Iterable[Cell], grid: Iterable[Cell]) -> list[str]:
    """A line for each setting and encoding whose cells had trials: the values that won, or that none did."""
    searched = {(cell.table, cell.encoding): list(cell.search) for cell in grid if cell.search}
    found = {}
    for cell in cells:
        if fields := searched.get((cell.table, cell.encoding)):
            leaves = dict(leaves_of(cell.changes))
            told = [f"{field.rpartition('.')[2]}={leaves[field]}" for field in fields if not cell.search]
            found[cell.table, cell.encoding] = (
                f"{cell.table}, {cell.encoding}: {' '.join(told) or 'all trials diverged'}"
            )
    return list(found.values())


def _combinations(cell: Cell) -> list[dict[str, Any]]:
    if not cell.search:
        return []
    for field, values in cell.search.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"search of {cell.name}: {field} needs a tuple of values, not {values!r}")
        if any(value in values[:place] for place, value in enumerate(values)):
            raise ConfigError(f"search of {cell.name}: {field} has a value twice, {values!r}")
    return [dict(zip(cell.search, values, strict=True)) for values in itertools.product(*cell.search.values())]


def _with(cell: Cell, values: dict[str, Any]) -> Cell:
    changes = cell.changes
    for field, value in values.items():
        changes = overlay(changes, _nested(field, value))
    return dataclasses.replace(cell, changes=changes, setting=cell.table, search={})


def _nested(field: str, value: Any) -> dict[str, Any]:
    for name in reversed(field.split(".")):
        value = {name: value}
    return dict(value)
