"""The cells of tables of a grid: errors of encodings by settings, and what seeds can show."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import numpy as np

from cope_jax.evaluation.report import significance
from cope_jax.evaluation.report.table import words
from cope_jax.runs.records import Record
from cope_jax.tasks import Task
from cope_jax.tasks.stored import StoredTask
from cope_jax.training.metrics import PLAIN, SHARE, Unit, unit_of

Errors = dict[str, dict[int, float]]
"""Errors by encoding and seed."""


class Column(NamedTuple):
    """A column of a table.

    Attributes:
      errors: the errors of each encoding.
      examples: the number of test examples of a seed; None if errors are no shares, or if it is not
        recorded.
      blocks: for each encoding the loss and the weight of each block of text, means over seeds
        `[N, 2]`; None if they are not recorded. A perplexity has those of the loss.
      sets: the number of test sets of each encoding, as of `significance.test_sets`.
    """

    errors: Errors
    examples: float | None
    blocks: Mapping[str, np.ndarray] | None = None
    sets: Mapping[str, float] | None = None

    @property
    def covered(self) -> bool:
        """True if the test of its differences covers the choice of the test examples or the text."""
        return self.examples is not None or self.blocks is not None


FIRST = "in_distribution"
"""The first split of a task that also measures errors out of distribution."""

IN, OUT = words(FIRST), "out of distribution"

MANY_SEEDS = 3
"""From this number of seeds on, a comparison also shows median, best and worst."""

RANK = "mean rank"
"""The heading of the column of mean ranks."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a table: an encoding in a column.

    Attributes:
      mean: its mean error or rank; None if an error is not finite.
      text: the text of the cell.
      tip: more about its seeds, or about the rank.
      best: whether no other encoding is shown to be better, in a column that shows any difference.
      few: whether it has too few seeds to show a difference.
    """

    mean: float | None
    text: str
    tip: str
    best: bool = False
    few: bool = False


@dataclasses.dataclass(frozen=True)
class Tables:
    """The tables of a grid.

    Attributes:
      tasks: the task of each setting.
      encodings: all encodings, in order.
      rows: the records of the headline metric of each setting.
      fixed: those of fixed splits.
      unit: of all errors; plain numbers unless all headline metrics are in %.
      cells: what each table shows, by its name, column and encoding; see `cells_of`.
      conditions: the unit of each table, and the numbers of steps and seeds of its cells.
      uncovered: a sentence on the columns whose differences do not cover the choice of the test
        examples or the text, for the legend; "" if all cover it.
    """

    tasks: Mapping[str, Task]
    encodings: Sequence[str]
    rows: Sequence[Record]
    fixed: Sequence[Record]
    unit: Unit
    cells: Mapping[str, Mapping[str, Mapping[str, Cell]]]
    conditions: Mapping[str, str]
    uncovered: str = ""


def create(records: Sequence[Record], tasks: Mapping[str, Task]) -> Tables:
    """The tables of records, each with its `setting`; `tasks` has the task of each setting.

    Records have the `data_seed` of their run, which chose its test examples. All seeds without it
    count as one test set.
    """
    rows = headlines(records, tasks)
    fixed = [row for row in rows if row.get("kind", "split") == "split"]
    scales = {unit_of(task.metric).scale for task in tasks.values()}
    unit = SHARE if scales == {SHARE.scale} else PLAIN
    views = views_of(fixed)
    return Tables(
        tasks,
        list(dict.fromkeys(row["encoding"] for row in rows)),
        rows,
        fixed,
        unit,
        {view: cells_of(columns, unit) | _ranks(columns) for view, columns in views.items()},
        {view: _conditions(columns, fixed, unit) for view, columns in views.items()},
        _uncovered(views),
    )


def headlines(records: Sequence[Record], tasks: Mapping[str, Task]) -> list[Record]:
    """The records of the headline metric of each setting.

    Those of a stored task have no `data_seed`, because its test examples are the same for all seeds.
    Perplexities have the blocks of their losses, which are in the same order.
    """
    blocks = {
        _measured(row): {"blocks": row["blocks"]}
        for row in records
        if row["metric"] == "loss" and "blocks" in row
    }
    rows = [
        row | (blocks.get(_measured(row), {}) if row["metric"].endswith("perplexity") else {})
        for row in records
        if row["metric"] == tasks[row["setting"]].metric
    ]
    stored = {setting for setting, task in tasks.items() if isinstance(task, StoredTask)}
    return [row | {"data_seed": None} if row["setting"] in stored else row for row in rows]


def _measured(row: Record) -> tuple[Any, ...]:
    """The run and the split of a record."""
    return tuple(row[name] for name in ("setting", "encoding", "seed", "split"))


def views_of(rows: Sequence[Record]) -> dict[str, dict[str, Column]]:
    """The tables by name, each with its columns; of one setting, a table with its splits.

    Settings whose first split is not in distribution have a column in a table for each split.
    """
    splits: dict[str, list[str]] = {}
    for row in rows:
        known = splits.setdefault(row["setting"], [])
        known += [] if row["split"] in known else [row["split"]]
    if len(splits) == 1:
        (names,) = splits.values()
        return {"all splits": {words(name): column_of(rows, [name]) for name in names}}
    views: dict[str, dict[str, Column]] = {}
    for setting, names in splits.items():
        selected = [row for row in rows if row["setting"] == setting]
        groups = {IN: names[:1], OUT: names[1:]}
        if names[0] != FIRST:  # such as validation and test of a text
            groups = {words(name): [name] for name in names}
        for view, chosen in groups.items():
            if chosen:
                views.setdefault(view, {})[setting] = column_of(selected, chosen)
    return views


def column_of(rows: Sequence[Record], splits: Sequence[str]) -> Column:
    """The mean error over splits, of each encoding and seed."""
    values_of: dict[str, dict[int, list[float]]] = {}
    data_seeds: dict[str, dict[int, Any]] = {}
    examples: dict[str, list[int]] = {}
    blocks: dict[str, list[Any]] = {}
    for row in rows:
        if row["split"] in splits:
            seeds = values_of.setdefault(row["encoding"], {})
            seeds.setdefault(row["seed"], []).append(row["value"])
            data_seeds.setdefault(row["encoding"], {})[row["seed"]] = row.get("data_seed")
            examples.setdefault(row["split"], []).append(row.get("examples", 0))
            if len(splits) == 1 and "blocks" in row:
                blocks.setdefault(row["encoding"], []).append(np.array(row["blocks"], float))
    errors = {
        name: {seed: fmean(values) for seed, values in seeds.items()}
        for name, seeds in values_of.items()
    }
    bounded = all(unit_of(row["metric"]).highest is not None for row in rows)
    fewest = [min(counts) for counts in examples.values()]
    # A mean over k splits of nᵢ examples varies like one of k²/Σ 1/nᵢ examples.
    known = bounded and fewest and all(fewest)
    total = len(fewest) ** 2 / sum(1 / n for n in fewest) if known else None
    whole = _means(blocks) if blocks.keys() == errors.keys() else None
    sets = {name: significance.test_sets(seeds.values()) for name, seeds in data_seeds.items()}
    return Column(errors, total, whole, sets)


def _means(blocks: Mapping[str, Sequence[np.ndarray]]) -> dict[str, np.ndarray] | None:
    """The means over seeds of blocks; None if they are not of the same text."""
    every = [of_seed for of_encoding in blocks.values() for of_seed in of_encoding]
    if any(not np.array_equal(of_seed[:, 1], every[0][:, 1]) for of_seed in every):
        return None
    return {name: np.mean(of_encoding, axis=0) for name, of_encoding in blocks.items()}


def best_shown(column: Column) -> set[str]:
    """The encodings that no other is shown to be better than, in a column with any difference."""
    return significance.indistinguishable(**column._asdict())


def lowest(column: Column) -> set[str]:
    """The encodings with the lowest mean, in a column with any difference."""
    means = {name: fmean(seeds.values()) for name, seeds in column.errors.items()}
    known = [mean for mean in means.values() if not math.isnan(mean)]
    return {name for name, mean in means.items() if known and mean == min(known) < max(known)}


def cells_of(
    columns: Mapping[str, Column],
    unit: Unit,
    best: Callable[[Column], set[str]] = best_shown,
    spread: bool = False,
) -> dict[str, dict[str, Cell]]:
    """The cell of each column and encoding.

    Args:
      columns: the columns, by heading.
      unit: of all errors.
      best: returns the best encodings of a column.
      spread: whether cells of at least `MANY_SEEDS` seeds also show median, best and worst.
    """
    cells = {}
    for heading, column in columns.items():
        marked = best(column)
        means = (unit.scale * fmean(seeds.values()) for seeds in column.errors.values())
        decimals = unit.places(means)
        cells[heading] = {
            name: _cell(seeds, name in marked, unit, decimals, spread)
            for name, seeds in column.errors.items()
        }
    return cells


def _ranks(columns: Mapping[str, Column]) -> dict[str, dict[str, Cell]]:
    """The column of mean ranks, of the encodings that all columns have; {} for a single column."""
    common = set.intersection(*(set(column.errors) for column in columns.values()))
    means = {
        heading: {
            name: fmean(seeds.values()) for name, seeds in column.errors.items() if name in common
        }
        for heading, column in columns.items()
    }
    if len(columns) < 2 or len(common) < 2:
        return {}
    return {
        RANK: {
            name: Cell(
                rank.mean,
                f"{rank.mean:.1f}",
                f"mean rank {rank.mean:.2f} of {len(common)} over {len(columns)} columns\n"
                f"95 % interval over columns: {rank.low:.1f} to {rank.high:.1f}",
            )
            for name, rank in significance.ranks(means).items()
        }
    }


def _cell(seeds: Mapping[int, float], best: bool, unit: Unit, decimals: int, spread: bool) -> Cell:
    values = [seeds[seed] for seed in sorted(seeds)]
    mean = fmean(values)
    if not math.isfinite(mean):
        return Cell(None, "not finite", "A loss was not finite.", few=True)

    def figure(value: float) -> str:
        return f"{unit.scale * value:,.{decimals}f}"

    symbol = unit.suffix(" ")
    lines = [
        f"mean {unit.scale * mean:.3g}{symbol}, median {unit.scale * median(values):.3g}{symbol}"
    ]
    lines.append(
        f"worst {unit.scale * max(values):.3g}{symbol}, best {unit.scale * min(values):.3g}{symbol}"
    )
    if unit is SHARE:
        share = significance.solved(values)
        lines.append(
            f"solved by {share.solved} of {share.count} seeds "
            f"(95 % interval: {100 * share.low:.0f} to {100 * share.high:.0f} %)"
        )
    lines.append("seeds: " + ", ".join(f"{unit.scale * value:.3g}" for value in values[:25]))
    text = " ± ".join(map(figure, [mean, stdev(values)] if len(values) > 1 else [mean]))
    if spread and len(values) >= MANY_SEEDS and min(values) < max(values):
        text += f"\n{figure(median(values))}\n[{figure(min(values))}, {figure(max(values))}]"
    return Cell(mean, text, "\n".join(lines), best, len(seeds) < significance.LEAST)


def _conditions(columns: Mapping[str, Column], rows: Sequence[Record], unit: Unit) -> str:
    """The unit of a table, and the numbers of steps and seeds of its cells."""
    steps = {row["step"] for row in rows}
    seeds = {len(values) for column in columns.values() for values in column.errors.values()}
    ranges = [(steps, "step"), (seeds, "seed")]
    texts = [
        f"{' to '.join(f'{end:,}' for end in sorted({min(counts), max(counts)}))} {name}{'s' * (max(counts) > 1)}"
        for counts, name in ranges
    ]
    return f"{unit.suffix(' in ')}, {', '.join(texts)}"


def _uncovered(views: Mapping[str, Mapping[str, Column]]) -> str:
    """The sentence `Tables.uncovered`."""
    names = {
        f"{view} ({heading})" if len(views) > 1 else heading: column.covered
        for view, columns in views.items()
        for heading, column in columns.items()
    }
    lacking = [name for name, covered in names.items() if not covered]
    where = "all columns" if len(lacking) == len(names) else ", ".join(lacking)
    return (
        f"The choice of the test examples or of the text is not covered in {where}."
        if lacking
        else ""
    )


def legend(tables: Tables, mark: str) -> str:
    """Legend of the tables; `mark` names the look of the best cells."""
    over = f"; {OUT} is the mean over all splits but the first" if OUT in tables.cells else ""
    text = (
        f"Mean ± standard deviation over seeds{tables.unit.suffix(', in ')}{over}. {mark}: no other encoding is "
        f"shown to be better ({significance.TEST}), in a column that shows any difference."
    )
    return f"{text} {tables.uncovered}" if tables.uncovered else text
