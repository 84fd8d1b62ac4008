"""The charts of the page of results, in Vega-Lite, and their points."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median_high
from typing import Any

import numpy as np

from cope_jax.evaluation.report import significance
from cope_jax.evaluation.report.plot_style import is_doubling
from cope_jax.evaluation.report.table import words
from cope_jax.runs.records import Record
from cope_jax.tasks import Task


def learning_points(curves: Iterable[Record], metrics: Mapping[str, str]) -> Iterator[Record]:
    """The points of learning curves, with the headline metric of their setting as `value`."""
    for row in curves:
        if (metric := metrics[row["setting"]]) in row:
            point = {name: row[name] for name in ("setting", "encoding", "step")}
            yield {**point, "split": words(row["split"]), "value": row[metric]}


def level_points(rows: Iterable[Record], tasks: Mapping[str, Task]) -> list[Record]:
    """The points of the sweeps, with the value that the task's sweep gives their split."""
    levels = {setting: task.sweep_levels for setting, task in tasks.items()}
    return [
        {**{name: row[name] for name in ("setting", "encoding", "value")}, "level": level}
        for row in rows
        if row.get("kind") == "sweep"
        and (level := levels[row["setting"]].get(row["split"])) is not None
    ]


def level_axes(points: Iterable[Record], tasks: Mapping[str, Task]) -> dict[str, Any]:
    """The horizontal axis of each setting's sweep: a title, and a tick at each level."""
    levels: dict[str, set[float]] = {}
    for point in points:
        levels.setdefault(point["setting"], set()).add(point["level"])
    return {
        setting: {
            "title": tasks[setting].sweep_label,
            "axis": {"values": sorted(values)},
            "scale": {"type": "log"} if is_doubling(np.array(sorted(values))) else {"zero": False},
        }
        for setting, values in levels.items()
    }


def bands(rows: Iterable[Record], keys: Sequence[str]) -> list[Record]:
    """The mean, the lowest and the highest value over seeds, in rows that are equal in `keys`."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row["value"])
    return [
        {
            **dict(zip(keys, group, strict=True)),
            "mean": fmean(values),
            # Not finite wherever a value is; `min` and `max` would depend on the order.
            "low": float(np.min(values)),
            "high": float(np.max(values)),
        }
        for group, values in groups.items()
    ]


def steps_to_solve(
    curves: Iterable[Record], tasks: Mapping[str, Task]
) -> dict[tuple[str, str], float]:
    """The step from which on the error in distribution is below 1 %, by setting and encoding: the
    upper median over seeds, infinite unless more than half of them get there.
    """
    errors: dict[tuple[str, str], dict[int, dict[int, float]]] = {}
    for row in curves:
        task = tasks[row["setting"]]
        if row["split"] == task.evaluation_splits[0] and task.metric in row:
            seeds = errors.setdefault((row["setting"], row["encoding"]), {})
            seeds.setdefault(row["seed"], {})[row["step"]] = row[task.metric]

    def first(curve: Mapping[int, float]) -> float:
        unsolved = [step for step, error in curve.items() if not error < significance.SOLVED]
        last = max(unsolved, default=-1)
        return min((step for step in curve if step > last), default=math.inf)

    return {key: median_high(map(first, seeds.values())) for key, seeds in errors.items()}


COSTS = {
    "error": "mean error over splits",
    "seconds": "training time of a seed in s",
    "GiB": "peak memory in GiB",
}
"""Titles of fields of costs; the others are their names."""


def cost_points(
    rows: Iterable[Record],
    solved: Mapping[tuple[str, str], float],
    costs: Mapping[str, Mapping[str, float]],
) -> list[Record]:
    """Mean error, training time, number of parameters, memory and steps to solve, by setting and
    encoding; `solved` has the last, and `costs` further costs of an encoding by their names.
    """
    groups: dict[tuple[str, str], list[Record]] = {}
    for row in rows:
        groups.setdefault((row["setting"], row["encoding"]), []).append(row)
    return [
        {
            "setting": setting,
            "encoding": encoding,
            "error": fmean(row["value"] for row in group),
            "seconds": fmean(row["wall_seconds"] for row in group),
            "parameters": group[0]["parameters"],
            "GiB": max(
                (row["memory_gib"] for row in group if row.get("memory_gib") is not None),
                default=None,
            ),
            **_solved(solved.get((setting, encoding))),
            **costs.get(encoding, {}),
        }
        for (setting, encoding), group in groups.items()
    ]


def _solved(step: float | None) -> dict[str, Any]:
    """The field of a point for its `steps_to_solve`; none without a curve."""
    if step is None:
        return {}
    return {"steps to solve": step if math.isfinite(step) else "not solved"}


def line_chart(field: str, title: str, shares: bool, row: str | None = None) -> dict[str, Any]:
    """The Vega-Lite chart of errors with a band over seeds."""
    x = {"field": field, "type": "quantitative", "title": title}
    colour = {"field": "encoding", "type": "nominal", "sort": None, "legend": {"symbolOpacity": 1}}
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
            "params": [
                {
                    "name": "picked",
                    "select": {"type": "point", "fields": ["encoding"]},
                    "bind": "legend",
                }
            ],
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
    # The page sets the width.
    return {"facet": {"row": rows}, "spec": {"layer": layers, "height": 170}}


def _axis(shares: bool) -> dict[str, Any]:
    return {"axis": {"format": ".0%"}} if shares else {}


def scatter_chart(shares: bool) -> dict[str, Any]:
    """The Vega-Lite chart of errors against a cost, which the page chooses."""
    return {
        "height": 300,
        "mark": {"type": "point", "filled": True},
        "encoding": {
            "x": {"type": "quantitative", "scale": {"zero": False}},
            "y": {
                "field": "error",
                "type": "quantitative",
                "title": COSTS["error"],
                **_axis(shares),
            },
            "size": {
                "field": "parameters",
                "type": "quantitative",
                "scale": {"zero": False, "range": [60, 300]},
            },
            "color": {"field": "encoding", "type": "nominal", "sort": None},
        },
    }
