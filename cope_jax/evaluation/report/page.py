"""Writes the results of many runs as one offline HTML page: tables, curves, costs, commands."""

import dataclasses
import functools
import html
import importlib.resources
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import vl_convert

from cope_jax.evaluation.report import page_charts, significance
from cope_jax.evaluation.report.grid_cells import Tables, legend
from cope_jax.evaluation.report.table import words
from cope_jax.runs.records import Record, finite
from cope_jax.storage.files import write_atomically


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
      commit: the commit that trained it; "" if that is not known.
      config: the fields of its config, by dotted paths.
    """

    setting: str
    encoding: str
    seed: int
    command: str
    folder: str
    state: str
    commit: str = ""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def write(
    path: Path,
    title: str,
    tables: Tables,
    curves: Iterable[Record],
    runs: Sequence[PageRun],
    facts: str,
    costs: Mapping[str, Mapping[str, float]] | None = None,
) -> Path:
    """Writes the page and returns its path.

    Args:
      path: the HTML file.
      title: the heading.
      tables: the tables of the records of finished runs.
      curves: points of learning curves: rows with `setting`, `encoding`, `seed`, `step`, `split`
        and metrics.
      runs: all runs, also those that failed.
      facts: one line about the runs, such as versions and the commit.
      costs: further costs of encodings, by their names.
    """
    levels = page_charts.level_points(tables.rows, tables.tasks)
    shares, curves = bool(tables.unit.symbol), list(curves)
    metrics = {setting: task.metric for setting, task in tables.tasks.items()}
    errors: dict[tuple[str, str, int], dict[str, float]] = {}
    for row in tables.fixed:
        of_run = errors.setdefault((row["setting"], row["encoding"], row["seed"]), {})
        of_run[words(row["split"])] = row["value"]
    shared = shared_fields(runs)
    content = {
        "facts": facts,
        "legend": f"{legend(tables, 'Underlined')} {LEGEND}",
        "encodings": tables.encodings,
        "views": tables.cells,
        "shares": shares,
        "metrics": {setting: words(metric) for setting, metric in metrics.items()},
        "conditions": tables.conditions,
        "levels": page_charts.level_axes(levels, tables.tasks),
        "curves": page_charts.bands(
            page_charts.learning_points(curves, metrics),
            ("setting", "encoding", "split", "step"),
        ),
        "sweep": page_charts.bands(levels, ("setting", "encoding", "level")),
        "cost": page_charts.cost_points(
            tables.fixed,
            page_charts.steps_to_solve(curves, tables.tasks) if shares else {},
            costs or {},
        ),
        "titles": page_charts.COSTS,
        "charts": {
            "curves": page_charts.line_chart("step", "step", shares, row="split"),
            "sweep": page_charts.line_chart("level", "level", shares),
            "cost": page_charts.scatter_chart(shares),
        },
        "shared": shared,
        "runs": [
            {
                **dataclasses.asdict(run),
                "config": {n: x for n, x in run.config.items() if n not in shared[run.setting]},
                "errors": errors.get((run.setting, run.encoding, run.seed), {}),
            }
            for run in runs
        ],
    }
    text = json.dumps(
        finite(content), allow_nan=False, separators=(",", ":"), default=dataclasses.asdict
    )
    data = text.replace("<", "\\u003c")
    text = (importlib.resources.files(__package__) / "page.html").read_text(encoding="utf-8")
    for name, value in (("TITLE", html.escape(title)), ("DATA", data), ("LIBRARY", library())):
        text = text.replace(f"@@{name}@@", value)
    return write_atomically(path, text)


def shared_fields(runs: Iterable[PageRun]) -> dict[str, dict[str, Any]]:
    """The fields of configs that all runs of a setting share.

    >>> runs = [PageRun("copy", "cope", n, "", "", "", config={"steps": 9, "data_seed": n}) for n in (0, 1)]
    >>> shared_fields(runs)
    {'copy': {'steps': 9}}
    """
    shared: dict[str, dict[str, Any]] = {}
    for run in runs:
        known = shared.setdefault(run.setting, dict(run.config))
        for name in [name for name, value in known.items() if run.config.get(name, ()) != value]:
            del known[name]
    return shared


@functools.cache
def library() -> str:
    """The library of charts, as text of a script."""
    script = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
    return script.replace("</script", "<\\/script")


LEGEND = (
    "A difference must also be larger than the choice of test examples or of the text explains; seeds with the same "
    "test examples count as one choice of them. Fewer than "
    f"{significance.LEAST} seeds show none. Solved: error below 1 %, with the exact binomial interval. The mean rank "
    "is over all columns; it has the encodings that every column has. Hover over a cell, or reach it with Tab, for its "
    "seeds."
)


def versions(environment: Record) -> str:
    """The commit, the version of JAX and the device of runs, in one line."""
    environments = [environment, *environment.get("others", [])]
    parts = [
        ("commit", {(run["commit"] or "unknown")[:12] for run in environments}),
        ("jax", {run["jax"] for run in environments}),
        ("on", {run["device_kind"] for run in environments}),
    ]
    return ", ".join(f"{name} {' and '.join(sorted(values))}" for name, values in parts)
