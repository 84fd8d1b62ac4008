"""Plots of contextual representations: scores by layer, mix weights, and learning curves."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from cope_jax.evaluation.report.plot_style import (
    CHARACTER,
    COLUMN_WIDTH,
    STYLE,
    TEXT_WIDTH,
    NothingToPlot,
    band,
    dashed,
    legend,
    line,
    over_seeds,
    plain_log,
)
from cope_jax.runs.records import Record, select, summarise

Values = Sequence[float | None]


@rc_context(STYLE)
def scores_by_layer(
    layers: Sequence[str],
    scores: Mapping[str, Sequence[Values]],
    baselines: Mapping[str, float] | None = None,
    intervals: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    *,
    label: str = "accuracy (%)",
    title: str = "",
    caption: str = "",
) -> Figure:
    """Plots scores against layers, a line for each name, and baselines as horizontal lines.

    `scores` maps the name of a line to a list of runs, one for each seed. A run has a share in [0,
    1] for each layer, the lowest layer first, or None for a layer that was not measured. A line
    shows the mean over runs. Error bars show the standard deviation over runs or, for a name in
    `intervals`, the given (low, high) of each layer. A baseline is a share in [0, 1]. Lines are a
    little apart, so that equal lines stay visible.
    """
    if not scores or not layers:
        raise NothingToPlot(
            "there are no scores by layer to plot: give at least one score and one layer"
        )
    width = COLUMN_WIDTH + 0.25 * max(0, len(layers) - 5)
    figure = Figure(figsize=(width, 2.6), layout="constrained")
    axes = figure.subplots()
    for number, (name, runs) in enumerate(scores.items()):
        places = np.arange(len(layers)) + 0.06 * (number - (len(scores) - 1) / 2)
        means, stds = _moments(runs)
        bars = np.array([stds, stds])
        if name in (intervals or {}):
            low, high = 100 * np.array((intervals or {})[name]).T
            bars = np.maximum([means - low, high - means], 0)
        axes.plot(places, means, label=name, zorder=3, **dashed(number))
        if np.nansum(bars):
            look = {"color": line(number)["color"], "elinewidth": 0.9, "capsize": 2}
            axes.errorbar(places, means, yerr=bars, fmt="none", **look)
    axes.set_xlim(-0.3, len(layers) - 0.7)
    _baselines(axes, baselines or {})
    _layer_axis(axes, layers, figure.get_size_inches()[0] - 1.2)
    axes.set_ylabel(label)
    legend(figure, axes, title, caption)
    return figure


@rc_context(STYLE)
def mix_weights(
    layers: Sequence[str],
    weights: Mapping[str, Sequence[Values]],
    *,
    title: str = "",
    caption: str = "",
) -> Figure:
    """Plots the share of each layer in the mix, with bars by task, and a line at equal weights.

    Bars show the mean and standard deviation over seeds, with the mean as a number above if there
    is room. `weights` maps each task to a list of runs, one for each seed. A run has the softmax
    weights of the layers, the lowest layer first.
    """
    if not weights:
        raise NothingToPlot(
            "there are no layer weights to plot, because no model has a mix: give a task with a mix"
        )
    # A number above a bar takes 0.3 inches; the axis and the name of the horizontal line are next
    # to the bars.
    needed = 0.3 * len(layers) * len(weights) + 0.7 + CHARACTER * len("equal")
    figure = Figure(figsize=(min(max(COLUMN_WIDTH, needed), TEXT_WIDTH), 2.6), layout="constrained")
    axes = figure.subplots()
    width = 0.84 / len(weights)
    for number, (name, runs) in enumerate(weights.items()):
        places = np.arange(len(layers)) + (number - (len(weights) - 1) / 2) * width
        means, stds = _moments(runs)
        ends = [np.minimum(stds, means), stds] if stds.any() else None
        look = {"color": line(number)["color"], "ecolor": "0.25", "capsize": 2}
        look["error_kw"] = {"elinewidth": 0.9}
        bars = axes.bar(places, means, 0.9 * width, yerr=ends, label=name, alpha=0.75, **look)
        if needed <= TEXT_WIDTH:
            # Keeps numbers readable on the line of equal shares.
            halo = [withStroke(linewidth=2, foreground="white")]
            texts = [f"{mean:.1f}" for mean in means]
            axes.bar_label(bars, texts, padding=2, fontsize=6, path_effects=halo)
    axes.set_ylim(0, None)
    axes.margins(y=0.1)
    _baselines(axes, {"equal": 1 / len(layers)})
    _layer_axis(axes, layers, figure.get_size_inches()[0] - 1.2)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("share of the mix (%)")
    seeds = max(map(len, weights.values()))
    spread = f"mean of {seeds} seeds; bars: standard deviation" if seeds > 1 else "1 seed"
    caption = caption or spread
    legend(figure, axes, title, caption)
    return figure


@rc_context(STYLE)
def language_model_curves(curves: Sequence[Record]) -> Figure:
    """Plots perplexity of language models against steps and seconds of training, in log-log panels.

    Rows have `model`, `seed`, `step`, `seconds` and `perplexity`. Bands span the lowest to the
    highest seed. In the panel of seconds, each step is at its mean number of seconds over seeds.
    """
    if not curves:
        raise NothingToPlot("there are no learning curves to plot: give at least one row")
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
            band(axes, x, values, dashed(number), label=model, markevery=max(1, len(x) // 8))
    for axes, name in zip(panels, ("steps", "seconds of training"), strict=True):
        axes.set_xscale("log")
        axes.set_xlabel(name)
    plain_log(panels[0], [row["perplexity"] for row in curves])
    panels[0].set_ylabel("perplexity")
    caption = over_seeds(curves, "bands: lowest to highest seed", "model")
    legend(figure, panels[0], "perplexity on validation", caption)
    return figure


def plot_path(folder: Path, kind: str, model: str) -> Path:
    """The path of a plot of a model.

    >>> plot_path(Path("runs"), "mix", "BERT runs/a b").name
    'mix_BERT_runs_a_b.png'
    """
    return folder / f"{kind}_{re.sub(r'[^a-zA-Z0-9.-]+', '_', model)}.png"


def _moments(runs: Sequence[Values]) -> tuple[np.ndarray, np.ndarray]:
    """Computes the mean and standard deviation over runs for each layer, in per cent.

    If a layer was not measured, its mean is NaN and its standard deviation 0.
    """
    means, stds = [], []
    for values in zip(*runs, strict=True):
        summary = summarise(100 * value for value in values if value is not None)
        means.append(summary.mean if summary else np.nan)
        stds.append((summary.std if summary else None) or 0.0)
    return np.array(means), np.array(stds)


def _baselines(axes: Axes, baselines: Mapping[str, float]) -> None:
    """Draws a line for each baseline, joined to its name at the right; names do not overlap."""
    axes.margins(y=0.12)
    lowest, highest = axes.get_ylim()
    if baselines:
        lowest = min(lowest, *(100 * value - 3 for value in baselines.values())) if lowest else 0.0
        highest = max(highest, *(103 * value for value in baselines.values()))
        axes.set_ylim(lowest, highest)
    nearest = 0.075 * (highest - lowest)
    last = -np.inf
    for name, value in sorted(baselines.items(), key=lambda item: item[1]):
        axes.axhline(100 * value, color="0.55", linestyle=":", linewidth=0.9, zorder=1)
        last = max(100 * value, last + nearest)
        joined = {"arrowstyle": "-", "color": "0.55", "linewidth": 0.6}
        joined |= {"shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)}
        beside: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "annotation_clip": False}
        beside |= {"fontsize": 6.5, "color": "0.35", "ha": "left", "va": "center"}
        beside["arrowprops"] = joined
        axes.annotate(name, (1, 100 * value), (1.05, last), **beside)


def _layer_axis(axes: Axes, layers: Sequence[str], room: float) -> None:
    """Labels the axis with names of layers; rotates names that do not fit into `room` inches."""
    fit = 1.2 * CHARACTER * len(layers) * max(map(len, layers)) <= room
    turned: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    aslant = {} if fit else turned
    axes.set_xticks(range(len(layers)), list(layers), **aslant)
    axes.set_xlabel("layer")
