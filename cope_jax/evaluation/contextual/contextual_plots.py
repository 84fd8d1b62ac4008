"""Plots of contextual representations: scores by layer, mix weights, and learning curves against steps and time."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cope_jax.evaluation.report.plot_style import (
    CHARACTER,
    COLUMN_WIDTH,
    STYLE,
    TEXT_WIDTH,
    NothingToPlot,
    band,
    colour,
    legend,
    line,
    plain_log,
)
from cope_jax.runs.records import Record, select, summarise

Values = Sequence[float | None]


@rc_context(STYLE)
def scores_by_layer(
    layers: Sequence[str],
    scores: Mapping[str, Sequence[Values]],
    baselines: Mapping[str, float] | None = None,
    *,
    label: str = "accuracy (%)",
    title: str = "",
) -> Figure:
    """Lines over the layers with a marker for each, and baselines as horizontal lines with their names at the right.

    Each line has its runs (seeds), and each run a share in [0, 1] for each layer, the lowest first, or None; mean and
    standard deviation over runs are shown. A baseline is a share in [0, 1].
    """
    if not scores or not layers:
        raise NothingToPlot("there are no scores by layer")
    figure = Figure(figsize=(COLUMN_WIDTH + 0.25 * max(0, len(layers) - 5), 2.6), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(layers))
    for number, (name, runs) in enumerate(scores.items()):
        means, stds = _moments(runs)
        axes.plot(places, means, label=name, zorder=3, **line(number))
        if np.nansum(stds):
            axes.errorbar(places, means, yerr=stds, fmt="none", color=colour(number), elinewidth=0.9, capsize=2)
    axes.set_xlim(-0.3, len(layers) - 0.7)
    _baselines(axes, baselines or {})
    _layer_axis(axes, layers, figure.get_size_inches()[0] - 1.2)
    axes.set_ylabel(label)
    legend(figure, axes, title)
    return figure


@rc_context(STYLE)
def mix_weights(layers: Sequence[str], weights: Mapping[str, Sequence[Values]], *, title: str = "") -> Figure:
    """The share of each layer in the mix, by task: mean and standard deviation over seeds, and the equal share.

    Each bar has its number above it, if there is room. Each task has its runs, and each run the softmax weights of the
    layers, the lowest first.
    """
    if not weights:
        raise NothingToPlot("no task has weights of layers; a model without a mix has none")
    # A number above a bar takes 0.3 inches; the axis and the name of the horizontal line are next to the bars.
    needed = 0.3 * len(layers) * len(weights) + 0.7 + CHARACTER * len("equal")
    figure = Figure(figsize=(min(max(COLUMN_WIDTH, needed), TEXT_WIDTH), 2.6), layout="constrained")
    axes = figure.subplots()
    width = 0.84 / len(weights)
    for number, (name, runs) in enumerate(weights.items()):
        places = np.arange(len(layers)) + (number - (len(weights) - 1) / 2) * width
        means, stds = _moments(runs)
        bars = axes.bar(places, means, 0.9 * width, label=name, color=colour(number), alpha=0.75)
        if stds.any():
            ends = [np.minimum(stds, means), stds]
            axes.errorbar(places, means, yerr=ends, fmt="none", color="0.25", elinewidth=0.9, capsize=2)
        if needed <= TEXT_WIDTH:
            axes.bar_label(bars, [f"{mean:.1f}" for mean in means], padding=2, fontsize=6)
    axes.set_ylim(0, None)
    axes.margins(y=0.1)
    _baselines(axes, {"equal": 1 / len(layers)})
    _layer_axis(axes, layers, figure.get_size_inches()[0] - 1.2)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("share of the mix (%)")
    legend(figure, axes, title)
    return figure


@rc_context(STYLE)
def language_model_curves(curves: Sequence[Record]) -> Figure:
    """Perplexity of language models against steps, and against seconds of training, in two panels with log axes.

    Rows have `model`, `seed`, `step`, `seconds` and `perplexity`. The band spans the seeds from best to worst; in the
    panel of time, a step is at its mean seconds.
    """
    if not curves:
        raise NothingToPlot("there are no learning curves")
    figure = Figure(figsize=(TEXT_WIDTH, 2.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for number, model in enumerate(dict.fromkeys(row["model"] for row in curves)):
        by_step: dict[int, list[Record]] = {}
        for row in select(curves, model=model):
            by_step.setdefault(row["step"], []).append(row)
        steps = sorted(step for step in by_step if step > 0)  # a log axis has no 0
        values = [[row["perplexity"] for row in by_step[step]] for step in steps]
        seconds = [float(np.mean([row["seconds"] for row in by_step[step]])) for step in steps]
        both: list[Sequence[float]] = [steps, seconds]
        for axes, x in zip(panels, both, strict=True):
            band(axes, x, values, number, label=model, markevery=max(1, len(x) // 8))
    for axes, name in zip(panels, ("steps", "seconds of training"), strict=True):
        axes.set_xscale("log")
        axes.set_xlabel(name)
    plain_log(panels[0], [row["perplexity"] for row in curves])
    panels[0].set_ylabel("perplexity")
    legend(figure, panels[0])
    return figure


def plot_path(folder: Path, kind: str, model: str) -> Path:
    """The path of a plot of a model.

    >>> plot_path(Path("runs"), "mix", "BERT runs/a b").name
    'mix_BERT_runs_a_b.png'
    """
    return folder / f"{kind}_{re.sub(r'[^a-zA-Z0-9.-]+', '_', model)}.png"


def _moments(runs: Sequence[Values]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation over runs in per cent for each layer; NaN and 0 if nothing was measured."""
    means, stds = [], []
    for values in zip(*runs, strict=True):
        summary = summarise(100 * value for value in values if value is not None)
        means.append(summary.mean if summary else np.nan)
        stds.append((summary.std if summary else None) or 0.0)
    return np.array(means), np.array(stds)


def _baselines(axes: Axes, baselines: Mapping[str, float]) -> None:
    """Draws horizontal lines with their names at the right, spaced so that names do not overlap."""
    axes.margins(y=0.12)
    lowest, highest = axes.get_ylim()
    if baselines:
        lowest = min(lowest, *(100 * value - 3 for value in baselines.values())) if lowest else 0.0
        highest = max(highest, *(103 * value for value in baselines.values()))
        axes.set_ylim(lowest, highest)
    nearest = 0.075 * (highest - lowest)
    last = -np.inf
    for name, value in sorted(baselines.items(), key=lambda item: item[1]):
        axes.axhline(100 * value, color="0.55", linestyle="--", linewidth=0.9, zorder=1)
        last = max(100 * value, last + nearest)
        beside = axes.get_yaxis_transform()
        axes.text(1.01, last, name, fontsize=6.5, color="0.35", ha="left", va="center", transform=beside)


def _layer_axis(axes: Axes, layers: Sequence[str], room: float) -> None:
    """Labels the axis with the names of layers, rotated if they do not fit side by side into `room` inches."""
    fit = 1.2 * CHARACTER * len(layers) * max(map(len, layers)) <= room
    aslant: dict[str, Any] = {} if fit else {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(layers)), list(layers), **aslant)
