"""Writes the results of many runs as one HTML page, which needs no network: tables, curves, costs and commands."""

import dataclasses
import html
import importlib.resources
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import vl_convert

from cope_jax.evaluation.report import page_charts, significance
from cope_jax.evaluation.report.table import words
from cope_jax.files import write_atomically
from cope_jax.runs.records import Record, finite
from cope_jax.tasks import Task
from cope_jax.training.metrics import unit_of

Errors = dict[str, dict[int, float]]
"""Errors by encoding and seed."""


class Column(NamedTuple):
    """A column of a table: its errors, and the number of test examples of a seed; None if they are not shares."""

    errors: Errors
    examples: int | None


IN, OUT = "in distribution", "out of distribution"


@dataclasses.dataclass(frozen=True)
class PageRun:
    """One run, as the page lists it.

    Attributes:
      setting: what it was trained on.
      encoding: its encoding.
      seed: its seed.
      command: the command that trains it.
      folder: its folder, relative to the page.
      state: how it ended, such as "42 s" or the line of an error.
    """

    setting: str
    encoding: str
    seed: int
    command: str
    folder: str
    state: str


def write(
    path: Path,
    title: str,
    records: Sequence[Record],
    curves: Iterable[Record],
    runs: Sequence[PageRun],
    tasks: Mapping[str, Task],
    facts: str,
) -> Path:
    """Writes the page and returns its path.

    Args:
      path: the HTML file.
      title: the heading.
      records: records of finished runs, each with `setting`: see `cope_jax.runs.records`.
      curves: points of learning curves: rows with `setting`, `encoding`, `seed`, `step`, `split` and metrics.
      runs: all runs, also those that failed.
      tasks: the task of each setting that has records.
      facts: one line about the runs, such as versions and the commit.
    """
    main = _headlines(records, tasks)
    fixed = [row for row in main if row.get("kind", "split") == "split"]
    shares = _are_shares(tasks)
    views = _views(fixed, shares)
    content = {
        "facts": facts,
        "legend": LEGEND,
        "encodings": list(dict.fromkeys(row["encoding"] for row in main)),
        "views": {name: _cells(columns, shares) for name, columns in views.items()},
        "metrics": {setting: words(task.metric) for setting, task in tasks.items()},
        "conditions": {name: _conditions(columns, fixed, shares) for name, columns in views.items()},
        "levels": {setting: task.sweep_label for setting, task in tasks.items()},
        "curves": page_charts.bands(
            page_charts.learning_points(curves, _metrics(tasks)), ("setting", "encoding", "split", "step")
        ),
        "sweep": page_charts.bands(page_charts.level_points(main), ("setting", "encoding", "level")),
        "cost": page_charts.cost_points(fixed),
        "charts": {
            "curves": page_charts.line_chart("step", "step", shares, row="split"),
            "sweep": page_charts.line_chart("level", "level", shares),
            "cost": page_charts.scatter_chart(shares),
        },
        "runs": [dataclasses.asdict(run) for run in runs],
    }
    data = json.dumps(finite(content), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    library = vl_convert.javascript_bundle(LIBRARY).replace("</script", "<\\/script")
    text = (importlib.resources.files(__package__) / "page.html").read_text(encoding="utf-8")
    for name, value in (("TITLE", html.escape(title)), ("DATA", data), ("LIBRARY", library)):
        text = text.replace(f"@@{name}@@", value)
    return write_atomically(path, text)


def markdown(records: Sequence[Record], tasks: Mapping[str, Task]) -> str:
    """The tables of errors as GitHub Markdown, with a legend."""
    main = _headlines(records, tasks)
    shares = _are_shares(tasks)
    names = list(dict.fromkeys(row["encoding"] for row in main))
    parts = []
    for view, columns in _views([row for row in main if row.get("kind", "split") == "split"], shares).items():
        cells = _cells(columns, shares)
        headings = [re.sub(r"([|<\\\\])", r"\\\1", column) for column in cells]
        lines = [f"**{view}**", "", f"| encoding | {' | '.join(headings)} |", f"| --- {'| ---: ' * len(cells)}|"]
        for name in names:
            seeds = {column: held.errors.get(name) for column, held in columns.items()}
            shown = (_plain(cells[column].get(name), seeds.get(column), shares) for column in cells)
            lines.append(f"| `{name}` | {' | '.join(shown)} |")
        parts.append("\n".join(lines))
    named = "; ".join(f"{words(metric)}: {', '.join(names)}" for metric, names in _settings(tasks).items())
    unit = ", in %" if shares else ""
    parts.append(
        f"Mean over seeds and, in brackets, the worst seed{unit}. Out of distribution is the mean over all splits but "
        f"the first. Bold: no other encoding is shown to be better, in a column that shows any difference. The errors "
        f"are {named}."
    )
    return "\n\n".join(parts) + "\n"


def _settings(tasks: Mapping[str, Task]) -> dict[str, list[str]]:
    """The settings of each metric."""
    found: dict[str, list[str]] = {}
    for setting, task in tasks.items():
        found.setdefault(task.metric, []).append(setting)
    return found


def _conditions(columns: Mapping[str, Column], rows: Sequence[Record], shares: bool) -> str:
    """The unit of a table, and how many steps and seeds its cells have, in words."""
    steps = {row["step"] for row in rows}
    seeds = {len(values) for held in columns.values() for values in held.errors.values()}
    ranges = [(steps, "step"), (seeds, "seed")]
    told = [
        f"{' to '.join(f'{end:,}' for end in sorted({min(found), max(found)}))} {name}{'s' * (max(found) > 1)}"
        for found, name in ranges
    ]
    return ", ".join([*(["in %"] if shares else []), *told])


def _plain(cell: Mapping[str, Any] | None, seeds: Mapping[int, float] | None, shares: bool) -> str:
    if cell is None:
        return "–"
    text = f"**{cell['text']}**" if cell["best"] else str(cell["text"])
    if not seeds or len(seeds) < 2 or cell["mean"] is None:
        return text
    worst = max(seeds.values())
    return f"{text} ({100 * worst:.1f})" if shares else f"{text} ({worst:.3g})"


def _metrics(tasks: Mapping[str, Task]) -> dict[str, str]:
    return {setting: task.metric for setting, task in tasks.items()}


def _headlines(records: Sequence[Record], tasks: Mapping[str, Task]) -> list[Record]:
    return [row for row in records if row["metric"] == tasks[row["setting"]].metric]


def _are_shares(tasks: Mapping[str, Task]) -> bool:
    return all(unit_of(task.metric).scale == 100 for task in tasks.values())


LIBRARY = "window.vegaEmbed = vegaEmbed;"
"""What the page needs of the library of charts."""

LEGEND = (
    "Errors are means over seeds; lower is better. Out of distribution is the mean over all splits but the first. "
    "Underlined: no other encoding is shown to be better, by Student's t "
    "of the differences between equal seeds, which vary at least as much as the choice of test examples makes them "
    "vary, corrected for all pairs of a column (false discovery rate 5 %). Fewer than three seeds cannot show any. "
    "Solved: error below 1 %, with the exact binomial interval. The mean rank "
    "is over all columns; it has the encodings that every column has. Hover over a cell, or "
    "reach it with the Tab key, for its seeds."
)


def versions(environment: Record) -> str:
    """The commit, the version of JAX and the device of runs, in one line."""
    found = [environment, *environment.get("others", [])]
    parts = [
        ("commit", {(one["commit"] or "unknown")[:12] for one in found}),
        ("jax", {one["jax"] for one in found}),
        ("on", {one["device_kind"] for one in found}),
    ]
    return ", ".join(f"{name} {' and '.join(sorted(values))}" for name, values in parts)


def _views(rows: Sequence[Record], shares: bool) -> dict[str, dict[str, Column]]:
    """The tables: views, each with columns of errors."""
    splits: dict[str, list[str]] = {}
    for row in rows:
        known = splits.setdefault(row["setting"], [])
        known += [] if row["split"] in known else [row["split"]]
    if len(splits) == 1:
        (names,) = splits.values()
        return {"all splits": {words(name): _column(rows, [name], shares) for name in names}}
    views: dict[str, dict[str, Column]] = {IN: {}, OUT: {}}
    for setting, names in splits.items():
        own = [row for row in rows if row["setting"] == setting]
        views[IN][setting] = _column(own, names[:1], shares)
        views[OUT][setting] = _column(own, names[1:] or names, shares)
    return views


def _column(rows: Sequence[Record], splits: Sequence[str], shares: bool) -> Column:
    """The mean error over splits, of each encoding and seed."""
    found: dict[str, dict[int, list[float]]] = {}
    examples: dict[str, int] = {}
    for row in rows:
        if row["split"] in splits:
            found.setdefault(row["encoding"], {}).setdefault(row["seed"], []).append(row["value"])
            examples[row["split"]] = row["examples"]
    errors = {name: {seed: fmean(values) for seed, values in seeds.items()} for name, seeds in found.items()}
    return Column(errors, sum(examples.values()) if shares else None)


def _cells(columns: Mapping[str, Column], shares: bool) -> dict[str, Any]:
    """What each column shows of each encoding, and the column of mean ranks."""
    cells = {}
    for column, (errors, examples) in columns.items():
        best = significance.indistinguishable(errors, examples)
        cells[column] = {name: _cell(seeds, name in best, shares) for name, seeds in errors.items()}
    return cells | _ranks({column: held.errors for column, held in columns.items()})


def _ranks(columns: Mapping[str, Errors]) -> dict[str, Any]:
    """The column of mean ranks, of the encodings that all columns have; {} for a single column."""
    common = set.intersection(*(set(errors) for errors in columns.values()))
    means = {
        column: {name: fmean(errors[name].values()) for name in errors if name in common}
        for column, errors in columns.items()
    }
    if len(columns) < 2 or len(common) < 2:
        return {}
    return {
        "mean rank": {
            name: {
                "mean": rank.mean,
                "share": None,
                "text": f"{rank.mean:.1f}",
                "best": False,
                "tip": f"mean rank {rank.mean:.2f} of {len(common)} over {len(columns)} columns\n"
                f"95 % interval over columns: {rank.low:.1f} to {rank.high:.1f}",
            }
            for name, rank in significance.ranks(means).items()
        }
    }


def _cell(seeds: Mapping[int, float], best: bool, shares: bool) -> dict[str, Any]:
    scale, unit = (100.0, " %") if shares else (1.0, "")
    values = [seeds[seed] for seed in sorted(seeds)]
    mean = fmean(values)
    if math.isnan(mean):
        return {
            "mean": None,
            "share": None,
            "text": "not finite",
            "best": False,
            "few": True,
            "tip": "A loss was not finite.",
        }
    told = [f"mean {scale * mean:.3g}{unit}, median {scale * median(values):.3g}{unit}"]
    told.append(f"worst {scale * max(values):.3g}{unit}, best {scale * min(values):.3g}{unit}")
    if shares:
        share = significance.solved(values)
        told.append(
            f"solved by {share.solved} of {share.count} seeds "
            f"(95 % interval: {100 * share.low:.0f} to {100 * share.high:.0f} %)"
        )
    told.append("seeds: " + ", ".join(f"{scale * value:.3g}" for value in values[:25]))
    return {
        "mean": mean,
        "share": mean if shares else None,
        "text": f"{scale * mean:.1f}" if shares else f"{mean:.3g}",
        "best": best,
        "few": len(seeds) < significance.LEAST,
        "tip": "\n".join(told),
    }
