"""Plots that compare encodings: errors by split and by length, and learning curves."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cope_jax.evaluation.report.plot_style import (
    COLUMN_WIDTH,
    STYLE,
    TEXT_WIDTH,
    NothingToPlot,
    band,
    is_doubling,
    legend,
    level_axis,
    looks,
    over_seeds,
    plain_log,
    save,
    show_five_percent,
)
from cope_jax.evaluation.report.table import words
from cope_jax.runs.records import Record, select, summarise
from cope_jax.tasks import Task
from cope_jax.training.metrics import unit_of


def write_plots(
    workdir: Path,
    task: Task,
    records: Sequence[Record],
    curves: Sequence[Record],
    encodings: Sequence[str],
    model: str = "",
) -> tuple[list[Path], list[str]]:
    """Writes `error_by_split`, `learning_curves` and `error_by_length` as PNG and SVG.

    All plots show the headline metric of the task. If it is not an error, its name replaces "error"
    in the names of the files, as in `perplexity_by_length.png`. `records`, see
    `cope_jax.runs.records`, are of the fixed splits and of the splits of the sweep. `curves` are
    rows with `encoding`, `seed`, `step`, `split`, and a field for each metric. `model` is the name
    of the model in titles. Returns the paths of the PNGs, and a one-line reason for each plot that
    was left out.
    """
    measure = "error" if task.metric.endswith("error") else task.metric
    plots: dict[str, Callable[[], Figure]] = {
        f"{measure}_by_split.png": lambda: error_by_split(task, records, encodings, model),
        "learning_curves.png": lambda: learning_curves(task, curves, encodings, model),
        f"{measure}_by_length.png": lambda: error_by_length(task, records, encodings, model),
    }
    paths, skipped = [], []
    for name, plot in plots.items():
        try:
            paths.append(save(plot(), workdir / name))
        except NothingToPlot as reason:
            skipped.append(f"{name}: {reason}")
    return paths, skipped


@rc_context(STYLE)
def error_by_split(
    task: Task, records: Sequence[Record], encodings: Sequence[str], model: str = ""
) -> Figure:
    """Plots the mean error on each fixed split.

    Error bars show the standard deviation over seeds, and dots show single seeds.
    """
    errors = _errors(task, records, encodings, task.evaluation_splits)
    splits = list(dict.fromkeys(split for _, split in errors))
    if not splits:
        raise NothingToPlot(
            f"no record has the metric {task.metric!r} on a fixed split: evaluate the model first"
        )
    figure = Figure(figsize=(COLUMN_WIDTH, 2.2), layout="constrained")
    axes = figure.subplots()
    width, highest = 0.8 / len(encodings), unit_of(task.metric).highest
    for number, (encoding, look) in enumerate(looks(encodings).items()):
        places = np.arange(len(splits)) + (number - (len(encodings) - 1) / 2) * width
        seed_errors = [errors.get((encoding, split), []) for split in splits]
        means = [float(np.mean(errors)) if errors else np.nan for errors in seed_errors]
        axes.bar(places, means, 0.86 * width, color=look["color"], alpha=0.3)
        bare = look | {"linestyle": "none"}
        spread = 0.6 * width
        _points(axes, places, seed_errors, bare, encoding, spread=spread, highest=highest)
    axes.set_xticks(range(len(splits)), [words(split) for split in splits])
    axes.tick_params(axis="x", length=0)
    # Bars begin at 0.
    values = [value for seed_errors in errors.values() for value in seed_errors]
    _error_axis(axes, task, [0.0, *values])
    legend(figure, axes, _title(task, model), _caption(task, records, encodings, splits))
    return figure


@rc_context(STYLE)
def error_by_length(
    task: Task, records: Sequence[Record], encodings: Sequence[str], model: str = ""
) -> Figure:
    """Plots the mean error against the sweep's length or level, and marks that of training.

    Error bars show the standard deviation over seeds, and dots show single seeds. The horizontal
    axis is logarithmic if there are at least three lengths or levels, and each is at least twice
    the previous one.
    """
    errors = _errors(task, records, encodings, [split for _, split in task.sweep])
    measured = {split for _, split in errors}
    points = [(value, split) for value, split in task.sweep if split in measured]
    if not points:
        raise NothingToPlot(
            "no split of the task's sweep was measured: set evaluation.sweep_examples above 0"
        )
    figure = Figure(figsize=(COLUMN_WIDTH, 2.4), layout="constrained")
    axes = figure.subplots()
    values = np.array([value for value, _ in points], np.float64)
    highest = unit_of(task.metric).highest
    doubling = is_doubling(values)
    for number, (encoding, look) in enumerate(looks(encodings).items()):
        # Set aside, because many errors are exactly 0 or 100 %.
        aside = 0.008 * (number - (len(encodings) - 1) / 2)
        if doubling:
            places = values * (values[-1] / values[0]) ** aside
        else:
            places = values + aside * np.ptp(values)
        seed_errors = [errors.get((encoding, split), []) for _, split in points]
        _points(axes, places, seed_errors, look, encoding, spread=0.0, highest=highest)
    level_axis(axes, [(value, task.as_trained(split)) for value, split in points])
    axes.set_xlabel(task.sweep_label)
    _error_axis(axes, task, [value for seed_errors in errors.values() for value in seed_errors])
    caption = _caption(task, records, encodings, [split for _, split in points])
    legend(figure, axes, _title(task, model), caption)
    return figure


@rc_context(STYLE)
def learning_curves(
    task: Task, curves: Sequence[Record], encodings: Sequence[str], model: str = ""
) -> Figure:
    """Plots the mean error against training steps, by split; bands span all seeds."""
    rows = [row for row in curves if row["encoding"] in encodings]
    rows = [row for row in rows if row.get(task.metric) is not None]
    splits = [split for split in task.splits if select(rows, split=split)]
    if not splits:
        raise NothingToPlot(
            f"no learning curve has {task.metric}: set training.evaluate_every above 0"
        )
    columns = min(len(splits), 3)
    lines = -(-len(splits) // columns)
    size = (max(COLUMN_WIDTH, TEXT_WIDTH * columns / 3), 0.4 + 1.8 * lines)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat
    for split, axes in zip(splits, panels, strict=False):
        for encoding, look in looks(encodings).items():
            _curve(axes, select(rows, split=split, encoding=encoding), task, look, encoding)
        axes.set_title(words(split))
        axes.set_xlabel("steps")
    for axes in list(panels)[len(splits) :]:
        axes.set_axis_off()
    first = figure.axes[0]
    _error_axis(first, task, [unit_of(task.metric).scale * row[task.metric] for row in rows])
    legend(figure, first, _title(task, model), over_seeds(rows, "bands: lowest to highest seed"))
    return figure


def _title(task: Task, model: str) -> str:
    """The metric, the task and the model."""
    return f"{words(task.metric)} on {words(task.name)}" + (f", {words(model)}" if model else "")


def _caption(
    task: Task, records: Sequence[Record], encodings: Sequence[str], splits: Sequence[str]
) -> str:
    rows = [row for row in select(records, metric=task.metric) if row["encoding"] in encodings]
    rows = [row for row in rows if row["split"] in splits]
    return over_seeds(rows, "bars: standard deviation; dots: single seeds")


def _errors(
    task: Task, records: Sequence[Record], encodings: Sequence[str], splits: Sequence[str]
) -> dict[tuple[str, str], list[float]]:
    """Maps (encoding, split) to the headline metric of each seed, in the unit of the metric.

    Pairs that were not measured are left out.
    """
    errors: dict[tuple[str, str], list[float]] = {}
    for split in splits:
        for encoding in encodings:
            rows = select(records, encoding=encoding, split=split, metric=task.metric)
            if rows:
                scale = unit_of(task.metric).scale
                errors[encoding, split] = [scale * row["value"] for row in rows]
    return errors


def _points(
    axes: Axes,
    places: np.ndarray,
    errors: Sequence[Sequence[float]],
    look: Mapping[str, Any],
    label: str,
    *,
    spread: float,
    highest: float | None,
) -> None:
    """Draws mean and standard deviation, and seeds as faint dots over a width of `spread`.

    `highest` is the highest possible value, or None if values are unbounded. Error bars stop at 0
    and at `highest`.
    """
    summaries = zip(places, errors, map(summarise, errors), strict=True)
    shown = [(x, seed_errors, summary) for x, seed_errors, summary in summaries if summary]
    means = np.array([summary.mean for _, _, summary in shown])
    stds = np.array([summary.std or 0.0 for _, _, summary in shown])
    at = [x for x, _, _ in shown]
    axes.plot(at, means, label=label, clip_on=False, zorder=3, **look)
    if stds.any():
        above = np.inf if highest is None else highest - means
        bars = [np.minimum(stds, means), np.minimum(stds, above)]
        thin: dict[str, Any] = {"elinewidth": 0.9, "capsize": 2, "clip_on": False}
        axes.errorbar(at, means, yerr=bars, fmt="none", color=look["color"], **thin)
    for x, seed_errors, _ in shown:
        if len(seed_errors) > 1:
            seeds = x + np.linspace(-spread / 2, spread / 2, len(seed_errors))
            dots = {"s": 6, "color": look["color"], "alpha": 0.5, "linewidths": 0}
            axes.scatter(seeds, seed_errors, clip_on=False, **dots)


def _curve(
    axes: Axes, rows: Sequence[Record], task: Task, look: Mapping[str, Any], label: str
) -> None:
    """Draws the mean over seeds at each step, and a band from the lowest to the highest seed."""
    by_step: dict[int, list[float]] = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        by_step.setdefault(row["step"], []).append(unit_of(task.metric).scale * row[task.metric])
    if not by_step:
        return
    marks = {"markevery": max(1, len(by_step) // 6), "clip_on": False}
    band(axes, list(by_step), list(by_step.values()), look, label=label, **marks)


def _error_axis(axes: Axes, task: Task, values: Sequence[float]) -> None:
    """Sets up the vertical axis.

    The axis of a share, or of values that include 0, starts at 0. Any other axis fits the values,
    and is logarithmic if the highest value is more than four times the lowest.
    """
    unit = unit_of(task.metric)
    values = [value for value in values if np.isfinite(value)] or [0.0]
    lowest, highest = min(values), max(values)
    if unit.highest is None and lowest > 0:
        axes.margins(y=0.08)
        if highest > 4 * lowest:
            plain_log(axes, values)
        else:
            show_five_percent(axes, values)
    else:
        axes.set_ylim(0, 100.0 if unit.highest and highest > 50 else max(1.1 * highest, 0.1))
    axes.set_ylabel(words(task.metric) + (f" ({unit.symbol})" if unit.symbol else ""))
