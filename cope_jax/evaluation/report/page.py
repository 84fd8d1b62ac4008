"""Writes the results of many runs as one HTML page, which needs no network: tables, curves, costs and commands."""

import dataclasses
import html
import importlib.resources
import json
import math
import statistics as plain
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import vl_convert

from cope_jax.evaluation.report import significance
from cope_jax.evaluation.report.table import words
from cope_jax.files import write_atomically
from cope_jax.runs.records import Record, environment, finite
from cope_jax.training.metrics import unit_of

Errors = dict[str, dict[int, float]]
"""The errors of one column, by encoding and seed."""

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
    metrics: Mapping[str, str],
    facts: str,
) -> Path:
    """Writes the page and returns its path.

    Args:
      path: the HTML file.
      title: the heading.
      records: records of finished runs, each with `setting`: see `cope_jax.runs.records`.
      curves: points of learning curves: rows with `setting`, `encoding`, `seed`, `step`, `split` and metrics.
      runs: all runs, also those that failed.
      metrics: the headline metric of each setting.
      facts: one line about the runs, such as versions and the commit.
    """
    main = [row for row in records if row["metric"] == metrics[row["setting"]]]
    fixed = [row for row in main if row.get("kind", "split") == "split"]
    shares = all(unit_of(metric).scale == 100 for metric in metrics.values())
    content = {
        "facts": facts,
        "legend": LEGEND,
        "percent": shares,
        "encodings": list(dict.fromkeys(row["encoding"] for row in main)),
        "views": {
            name: {column: _cells(errors, shares) for column, errors in columns.items()} | _ranks(columns)
            for name, columns in _views(fixed).items()
        },
        "curves": _bands(_learning(curves, metrics), ("setting", "encoding", "split", "step")),
        "sweep": _bands(_levels(main), ("setting", "encoding", "level")),
        "cost": _costs(fixed),
        "charts": {
            "curves": _lines("step", "step", shares, row="split"),
            "sweep": _lines("level", "length or level", shares),
            "cost": _scatter(shares),
        },
        "runs": [dataclasses.asdict(run) for run in runs],
    }
    data = json.dumps(finite(content), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    library = vl_convert.javascript_bundle(LIBRARY).replace("</script", "<\\/script")
    text = (importlib.resources.files(__package__) / "page.html").read_text(encoding="utf-8")
    for name, value in (("TITLE", html.escape(title)), ("DATA", data), ("LIBRARY", library)):
        text = text.replace(f"@@{name}@@", value)
    return write_atomically(path, text)


LIBRARY = "window.vegaEmbed = vegaEmbed;"
"""What the page needs of the library of charts."""

LEGEND = (
    "Errors are means over seeds; lower is better. Underlined: no other encoding is shown to be better, by Student's t "
    "of the differences between equal seeds, corrected for all pairs of a column (false discovery rate 5 %). One seed "
    "shows no difference, and two hardly any. Solved: error below 1 %, with the exact binomial interval. The mean rank "
    "is over all columns, of the encodings that every column has, with a bootstrap interval. Hover over a cell, or "
    "reach it with the Tab key, for its seeds."
)


def versions() -> str:
    """The commit, the version of JAX and the device, in one line."""
    facts = environment()
    return f"commit {(facts['commit'] or 'unknown')[:12]}, jax {facts['jax']}, {facts['device_kind']}"


def _views(rows: Sequence[Record]) -> dict[str, dict[str, Errors]]:
    """The tables: views, each with columns of errors."""
    splits: dict[str, list[str]] = {}
    for row in rows:
        known = splits.setdefault(row["setting"], [])
        known += [] if row["split"] in known else [row["split"]]
    if len(splits) == 1:
        (names,) = splits.values()
        return {"all splits": {words(name): _errors(rows, [name]) for name in names}}
    views: dict[str, dict[str, Errors]] = {IN: {}, OUT: {}}
    for setting, names in splits.items():
        own = [row for row in rows if row["setting"] == setting]
        views[IN][setting] = _errors(own, names[:1])
        views[OUT][setting] = _errors(own, names[1:] or names)
    return views


def _errors(rows: Sequence[Record], splits: Sequence[str]) -> Errors:
    """The mean error over splits, of each encoding and seed."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row["split"] in splits:
            found.setdefault(row["encoding"], {}).setdefault(row["seed"], []).append(row["value"])
    return {name: {seed: plain.fmean(values) for seed, values in seeds.items()} for name, seeds in found.items()}


def _cells(errors: Errors, shares: bool) -> dict[str, Any]:
    """What a column shows of each encoding."""
    best = significance.indistinguishable(errors)
    if len(best) == len(errors):  # no difference is shown
        best = set()
    return {name: _cell(seeds, name in best, shares) for name, seeds in errors.items()}


def _ranks(columns: Mapping[str, Errors]) -> dict[str, Any]:
    """The column of mean ranks, of the encodings that all columns have; {} for a single column."""
    common = set.intersection(*(set(errors) for errors in columns.values()))
    means = {
        column: {name: plain.fmean(errors[name].values()) for name in errors if name in common}
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
    mean = plain.fmean(values)
    if math.isnan(mean):
        return {"mean": None, "share": None, "text": "not finite", "best": False, "tip": "A loss was not finite."}
    told = [f"mean {scale * mean:.3g}{unit}, median {scale * plain.median(values):.3g}{unit}"]
    told.append(f"worst {scale * max(values):.3g}{unit}, best {scale * min(values):.3g}{unit}")
    if shares:
        share = significance.solved(values)
        told.append(
            f"solved by {share.solved} of {share.count} seeds ({100 * share.low:.0f} to {100 * share.high:.0f} %)"
        )
    told.append("seeds: " + ", ".join(f"{scale * value:.3g}" for value in values[:25]))
    return {
        "mean": mean,
        "share": mean if shares else None,
        "text": f"{scale * mean:.1f}" if shares else f"{mean:.3g}",
        "best": best,
        "tip": "\n".join(told),
    }


def _learning(curves: Iterable[Record], metrics: Mapping[str, str]) -> list[Record]:
    return [
        {**{name: row[name] for name in ("setting", "encoding", "split", "step")}, "value": row[metric]}
        for row in curves
        if (metric := metrics[row["setting"]]) in row
    ]


def _levels(rows: Iterable[Record]) -> list[Record]:
    """The points of the sweeps, by the number in the names of their splits."""
    return [
        {
            "setting": row["setting"],
            "encoding": row["encoding"],
            "level": float(row["split"].rpartition("=")[2]),
            "value": row["value"],
        }
        for row in rows
        if row.get("kind") == "sweep" and "=" in row["split"]
    ]


def _bands(rows: Iterable[Record], keys: Sequence[str]) -> list[Record]:
    """The mean, the lowest and the highest value over seeds, in rows that are equal in `keys`."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row["value"])
    return [
        {**dict(zip(keys, group, strict=True)), "mean": plain.fmean(values), "low": min(values), "high": max(values)}
        for group, values in groups.items()
    ]


def _costs(rows: Iterable[Record]) -> list[Record]:
    """For each setting and encoding: the mean error over splits, the training time and the number of parameters."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for row in rows:
        groups.setdefault((row["setting"], row["encoding"]), []).append(row)
    return [
        {
            "setting": setting,
            "encoding": encoding,
            "error": plain.fmean(row["value"] for row in held),
            "seconds": plain.fmean(row["wall_seconds"] for row in held),
            "parameters": held[0]["parameters"],
        }
        for (setting, encoding), held in groups.items()
    ]


def _lines(field: str, title: str, shares: bool, row: str | None = None) -> dict[str, Any]:
    """The Vega-Lite chart of errors with a band over seeds."""
    x = {"field": field, "type": "quantitative", "title": title}
    colour = {"field": "encoding", "type": "nominal", "sort": None}
    picked = {"param": "picked", "empty": True}
    layers = [
        {
            "mark": {"type": "area", "opacity": 0.15},
            "encoding": {
                "x": x,
                "y": {"field": "low", "type": "quantitative"},
                "y2": {"field": "high"},
                "color": colour,
                "opacity": {"condition": {**picked, "value": 0.2}, "value": 0.02},
            },
        },
        {
            "params": [{"name": "picked", "select": {"type": "point", "fields": ["encoding"]}, "bind": "legend"}],
            "mark": {"type": "line", "point": True},
            "encoding": {
                "x": x,
                "y": {"field": "mean", "type": "quantitative", "title": "error", **_axis(shares)},
                "color": colour,
                "opacity": {"condition": {**picked, "value": 1}, "value": 0.08},
                "tooltip": [{"field": name} for name in ("encoding", field, "mean", "low", "high")],
            },
        },
    ]
    if row is None:
        return {"layer": layers, "height": 300}
    rows = {"field": row, "type": "nominal", "title": None, "sort": None}
    # The width of facets cannot follow the page.
    return {"facet": {"row": rows}, "spec": {"layer": layers, "width": 560, "height": 170}}


def _axis(shares: bool) -> dict[str, Any]:
    return {"axis": {"format": ".0%"}} if shares else {}


def _scatter(shares: bool) -> dict[str, Any]:
    """The Vega-Lite chart of errors against training time."""
    number = {"type": "quantitative", "scale": {"zero": False}}
    return {
        "height": 300,
        "mark": {"type": "point", "filled": True},
        "encoding": {
            "x": {"field": "seconds", "title": "training time of a seed in s", **number},
            "y": {"field": "error", "type": "quantitative", "title": "mean error over splits", **_axis(shares)},
            "size": {"field": "parameters", "type": "quantitative", "scale": {"zero": False, "range": [60, 300]}},
            "color": {"field": "encoding", "type": "nominal", "sort": None},
            "tooltip": [{"field": name} for name in ("encoding", "seconds", "error", "parameters")],
        },
    }
