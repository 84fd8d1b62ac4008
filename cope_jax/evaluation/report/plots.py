"""Plots that compare encodings: errors by split and by length, and learning curves."""

from collections.abc import Callable, Sequence
from pathlib import Path

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
    colour,
    is_doubling,
    legend,
    level_axis,
    line,
    plain_log,
    save,
)
from cope_jax.evaluation.report.table import unit_of, words
from cope_jax.runs.records import Record, select, summarise
from cope_jax.tasks import Task


def write_plots(
    workdir: Path, task: Task, records: Sequence[Record], curves: Sequence[Record], encodings: Sequence[str]
) -> tuple[list[Path], list[str]]:
    """Writes `error_by_split.png`, `learning_curves.png` and `error_by_length.png` into `workdir`.

    All show the headline metric of the task. Records, see `cope_jax.runs.records`, are of fixed and of sweep splits;
    curves are rows with `encoding`, `seed`, `step`, `split`, and a field for each metric. The order of the encodings
    decides their colours and markers. Returns the paths, and for each plot left out a one-line reason.
    """
    plots: dict[str, Callable[[], Figure]] = {
        "error_by_split.png": lambda: error_by_split(task, records, encodings),
        "learning_curves.png": lambda: learning_curves(task, curves, encodings),
        "error_by_length.png": lambda: error_by_length(task, records, encodings),
    }
    paths, skipped = [], []
    for name, plot in plots.items():
        try:
            paths.append(save(plot(), workdir / name))
        except NothingToPlot as reason:
            skipped.append(f"{name}: {reason}")
    return paths, skipped


@rc_context(STYLE)
def error_by_split(task: Task, records: Sequence[Record], encodings: Sequence[str]) -> Figure:
    """Mean error on each fixed split; error bars are the standard deviation over seeds, faint dots single seeds."""
    errors = _errors(task, records, encodings, task.evaluation_splits)
    splits = list(dict.fromkeys(split for _, split in errors))
    if not splits:
        raise NothingToPlot(f"no record has the metric {task.metric!r} on a fixed split")
    figure = Figure(figsize=(COLUMN_WIDTH, 2.2), layout="constrained")
    axes = figure.subplots()
    width, highest = 0.8 / len(encodings), unit_of(task.metric).highest
    for number, encoding in enumerate(encodings):
        places = np.arange(len(splits)) + (number - (len(encodings) - 1) / 2) * width
        own = [errors.get((encoding, split), []) for split in splits]
        means = [float(np.mean(errors)) if errors else np.nan for errors in own]
        axes.bar(places, means, 0.86 * width, color=colour(number), alpha=0.3)
        _points(axes, places, own, number, encoding, linestyle="none", spread=0.6 * width, highest=highest)
    axes.set_xticks(range(len(splits)), [words(split) for split in splits])
    axes.tick_params(axis="x", length=0)
    _error_axis(axes, task, [0.0, *(value for own in errors.values() for value in own)])  # bars begin at 0
    legend(figure, axes)
    return figure


@rc_context(STYLE)
def error_by_length(task: Task, records: Sequence[Record], encodings: Sequence[str]) -> Figure:
    """Mean error along the task's sweep, with the standard deviation over seeds; the level of training is marked.

    The horizontal axis is logarithmic if each value of the sweep is at least twice the previous one.
    """
    errors = _errors(task, records, encodings, [split for _, split in task.sweep])
    points = [(value, split) for value, split in task.sweep if any((e, split) in errors for e in encodings)]
    if not points:
        raise NothingToPlot("no sweep split was measured; evaluation.sweep_examples=0 turns them off")
    figure = Figure(figsize=(COLUMN_WIDTH, 2.4), layout="constrained")
    axes = figure.subplots()
    values = np.array([value for value, _ in points], np.float64)
    highest = unit_of(task.metric).highest
    doubling = is_doubling(values)
    for number, encoding in enumerate(encodings):
        aside = 0.008 * (number - (len(encodings) - 1) / 2)  # because many errors are exactly 0 or 100 %
        places = values * (values[-1] / values[0]) ** aside if doubling else values + aside * np.ptp(values)
        own = [errors.get((encoding, split), []) for _, split in points]
        _points(axes, places, own, number, encoding, linestyle="-", spread=0.0, highest=highest)
    level_axis(axes, [(value, task.as_trained(split)) for value, split in points])
    axes.set_xlabel(task.sweep_label)
    _error_axis(axes, task, [value for own in errors.values() for value in own])
    legend(figure, axes)
    return figure


@rc_context(STYLE)
def learning_curves(task: Task, curves: Sequence[Record], encodings: Sequence[str]) -> Figure:
    """Mean error against training steps, one panel per split; the band spans the seeds from best to worst."""
    rows = [row for row in curves if row["encoding"] in encodings and row.get(task.metric) is not None]
    splits = [split for split in task.splits if select(rows, split=split)]
    if not splits:
        raise NothingToPlot(f"no learning curve has {task.metric}; training.evaluate_every=0 turns evaluations off")
    columns = min(len(splits), 3)
    lines = -(-len(splits) // columns)
    figure = Figure(figsize=(max(COLUMN_WIDTH, TEXT_WIDTH * columns / 3), 0.4 + 1.8 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat
    for split, axes in zip(splits, panels, strict=False):
        for number, encoding in enumerate(encodings):
            _curve(axes, select(rows, split=split, encoding=encoding), task, number, encoding)
        axes.set_title(words(split))
        axes.set_xlabel("steps")
    for axes in list(panels)[len(splits) :]:
        axes.set_axis_off()
    first = figure.axes[0]
    _error_axis(first, task, [unit_of(task.metric).scale * row[task.metric] for row in rows])
    legend(figure, first)
    return figure


def _errors(
    task: Task, records: Sequence[Record], encodings: Sequence[str], splits: Sequence[str]
) -> dict[tuple[str, str], list[float]]:
    """(encoding, split) → the headline error of each seed in its unit; pairs that were not measured are left out."""
    errors: dict[tuple[str, str], list[float]] = {}
    for split in splits:
        for encoding in encodings:
            rows = select(records, encoding=encoding, split=split, metric=task.metric)
            if rows:
                errors[encoding, split] = [unit_of(task.metric).scale * row["value"] for row in rows]
    return errors


def _points(
    axes: Axes,
    places: np.ndarray,
    errors: Sequence[Sequence[float]],
    number: int,
    label: str,
    *,
    linestyle: str,
    spread: float,
    highest: float | None,
) -> None:
    """Draws mean and standard deviation at each place, and the seeds as faint dots spread over a width."""
    shown = [(place, own, summary) for place, own in zip(places, errors, strict=True) if (summary := summarise(own))]
    means = np.array([summary.mean for _, _, summary in shown])
    stds = np.array([summary.std or 0.0 for _, _, summary in shown])
    at = [place for place, _, _ in shown]
    axes.plot(at, means, label=label, linestyle=linestyle, clip_on=False, zorder=3, **line(number))
    if stds.any():
        bars = [np.minimum(stds, means), np.minimum(stds, np.inf if highest is None else highest - means)]
        axes.errorbar(at, means, yerr=bars, fmt="none", color=colour(number), elinewidth=0.9, capsize=2, clip_on=False)
    for place, own, _ in shown:
        if len(own) > 1:
            seeds = place + np.linspace(-spread / 2, spread / 2, len(own))
            axes.scatter(seeds, own, s=6, color=colour(number), alpha=0.5, linewidths=0, clip_on=False)


def _curve(axes: Axes, rows: Sequence[Record], task: Task, number: int, label: str) -> None:
    """Draws the mean over seeds at each step, and the band from the lowest to the highest."""
    by_step: dict[int, list[float]] = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        by_step.setdefault(row["step"], []).append(unit_of(task.metric).scale * row[task.metric])
    if not by_step:
        return
    marks = {"markevery": max(1, len(by_step) // 6), "clip_on": False}
    band(axes, list(by_step), list(by_step.values()), number, label=label, **marks)


def _error_axis(axes: Axes, task: Task, values: Sequence[float]) -> None:
    """Sets up the vertical axis: from 0 for shares; fitted for unbounded metrics, logarithmic if they differ much."""
    unit, values = unit_of(task.metric), [value for value in values if np.isfinite(value)] or [0.0]
    lowest, highest = min(values), max(values)
    if unit.highest is None and lowest > 0:
        axes.margins(y=0.08)
        if highest > 4 * lowest:
            plain_log(axes, values)
    else:
        axes.set_ylim(0, 100.0 if unit.highest and highest > 50 else max(1.1 * highest, 0.1))
    axes.set_ylabel(words(task.metric) + (f" ({unit.symbol})" if unit.symbol else ""))
