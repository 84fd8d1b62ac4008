"""Plots of contextual representations: figures by layer, mix weights, and learning curves against steps and time."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cope_jax.evaluation.report.axes import plain_log
from cope_jax.evaluation.report.plots import COLOURS, COLUMN_WIDTH, MARKERS, STYLE, TEXT_WIDTH, NothingToPlot
from cope_jax.runs.records import Record, summarise

Values = Sequence[float | None]
DPI = 200
CHARACTER = 0.055  # inches that a character of a legend takes, on average


@rc_context(STYLE)
def scores_by_layer(
    layers: Sequence[str],
    scores: Mapping[str, Sequence[Values]],
    floors: Mapping[str, float] | None = None,
    *,
    label: str = "accuracy (%)",
    title: str = "",
) -> Figure:
    """Lines over the layers with one marker for each, and floors as level lines with their names at the right.

    Args:
      layers: names, the lowest first.
      scores: for each line its runs (seeds), and of each run a share in [0, 1] for each layer, None where there is
        none. Mean and standard deviation over runs are shown.
      floors: name → a share in [0, 1].
      label: of the upright axis.
      title: above all.
    """
    if not scores or not layers:
        raise NothingToPlot("there are no scores by layer")
    figure = Figure(figsize=(COLUMN_WIDTH + 0.25 * max(0, len(layers) - 5), 2.6), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(layers))
    for number, (name, runs) in enumerate(scores.items()):
        means, stds = _moments(runs)
        axes.plot(places, means, label=name, color=_colour(number), marker=MARKERS[number % len(MARKERS)], zorder=3)
        if np.nansum(stds):
            axes.errorbar(places, means, yerr=stds, fmt="none", color=_colour(number), elinewidth=0.9, capsize=2)
    axes.set_xlim(-0.3, len(layers) - 0.7)
    _floors(axes, floors or {})
    _layer_axis(axes, layers, figure.get_size_inches()[0] - 1.2)
    axes.set_ylabel(label)
    _legend(figure, axes, title)
    return figure


@rc_context(STYLE)
def bars_by_layer(
    layers: Sequence[str],
    values: Mapping[str, Values],
    floors: Mapping[str, float] | None = None,
    intervals: Mapping[str, Sequence[tuple[float, float] | None]] | None = None,
    *,
    label: str = "accuracy (%)",
    title: str = "",
) -> Figure:
    """Groups of bars, one group for each layer and one colour for each name, each with its value above.

    Args:
      layers: names, the lowest first.
      values: for each colour a share in [0, 1] for each layer; None leaves the bar out.
      floors: name → a share in [0, 1].
      intervals: for a colour (low, high) of each bar, shares in [0, 1].
      label: of the upright axis.
      title: above all.
    """
    if not values or not layers:
        raise NothingToPlot("there are no values by layer")
    # A figure above a bar takes 0.3 inches; beside the bars stand the axis and the names of floors.
    needed = 0.3 * len(layers) * len(values) + 0.7 + CHARACTER * max(map(len, floors or {}), default=0)
    figure = Figure(figsize=(min(max(COLUMN_WIDTH, needed), TEXT_WIDTH), 2.6), layout="constrained")
    axes = figure.subplots()
    width = 0.84 / len(values)
    for number, (name, own) in enumerate(values.items()):
        places = np.arange(len(layers)) + (number - (len(values) - 1) / 2) * width
        heights = np.array([np.nan if value is None else 100 * value for value in own])
        axes.bar(places, heights, 0.9 * width, label=name, color=_colour(number), alpha=0.75)
        spans = (intervals or {}).get(name) or [None] * len(layers)
        for place, height, span in zip(places, heights, spans, strict=True):
            if np.isnan(height):
                continue
            low, high = (height, height) if span is None else (100 * span[0], 100 * span[1])
            if span is not None:
                ends = [[max(0.0, height - low)], [max(0.0, high - height)]]
                axes.errorbar([place], [height], yerr=ends, fmt="none", color="0.25", elinewidth=0.9, capsize=2)
            if needed <= TEXT_WIDTH:
                above: dict[str, Any] = {
                    "xytext": (0, 2),
                    "textcoords": "offset points",
                    "ha": "center",
                    "va": "bottom",
                }
                axes.annotate(f"{height:.1f}", (place, high), fontsize=6, **above)
    axes.set_ylim(0, None)
    axes.margins(y=0.1)
    _floors(axes, floors or {})
    _layer_axis(axes, layers, figure.get_size_inches()[0] - 1.2)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(label)
    _legend(figure, axes, title)
    return figure


@rc_context(STYLE)
def mix_weights(layers: Sequence[str], weights: Mapping[str, Sequence[Values]], *, title: str = "") -> Figure:
    """What share of the mix each layer has, by task: mean over seeds, its deviation, and the level of equal shares.

    Args:
      layers: names, the lowest first.
      weights: for each task its runs, and of each the softmax weights of the layers.
      title: above all.
    """
    if not weights:
        raise NothingToPlot("no task has weights of layers; a model without a mix has none")
    means: dict[str, Values] = {}
    spans: dict[str, list[tuple[float, float] | None]] = {}
    for name, runs in weights.items():
        mean, std = (values / 100 for values in _moments(runs))
        means[name] = [float(value) for value in mean]
        spans[name] = [(m - s, m + s) if s else None for m, s in zip(mean, std, strict=True)]
    equal = {"equal": 1 / len(layers)}
    return bars_by_layer(layers, means, equal, spans, label="share of the mix (%)", title=title)


@rc_context(STYLE)
def language_model_curves(
    curves: Sequence[Record], *, measure: str = "perplexity", models: Sequence[str] | None = None, title: str = ""
) -> Figure:
    """A measure of language models against steps, and against seconds of training, side by side; both axes log.

    Args:
      curves: rows with `model`, `seed`, `step`, `seconds` and the measure. The band reaches from the best seed to the
        worst; against time, steps stand at their mean seconds.
      measure: the field to show.
      models: which, in the order that decides their colours; None takes all.
      title: above all.
    """
    rows = [row for row in curves if row.get(measure) is not None]
    shown = list(dict.fromkeys(row["model"] for row in rows)) if models is None else list(models)
    rows = [row for row in rows if row["model"] in shown]
    if not rows:
        raise NothingToPlot(f"there are no learning curves with {measure!r}")
    figure = Figure(figsize=(TEXT_WIDTH, 2.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for number, model in enumerate(shown):
        by_step: dict[int, list[Record]] = {}
        for row in rows:
            if row["model"] == model:
                by_step.setdefault(row["step"], []).append(row)
        steps = sorted(step for step in by_step if step > 0)  # a log axis has no 0
        values = [[row[measure] for row in by_step[step]] for step in steps]
        seconds = [float(np.mean([row["seconds"] for row in by_step[step]])) for step in steps]
        for axes, x in ((panels[0], [float(step) for step in steps]), (panels[1], seconds)):
            colour, marker = _colour(number), MARKERS[number % len(MARKERS)]
            means, lowest, highest = ([float(f(own)) for own in values] for f in (np.mean, np.min, np.max))
            axes.plot(x, means, label=model, color=colour, marker=marker, markevery=max(1, len(x) // 8))
            axes.fill_between(x, lowest, highest, color=colour, alpha=0.2, linewidth=0)
    for axes, name in zip(panels, ("steps", "seconds of training"), strict=True):
        axes.set_xscale("log")
        axes.set_xlabel(name)
    plain_log(panels[0], [row[measure] for row in rows])
    panels[0].set_ylabel(measure.replace("_", " "))
    _legend(figure, panels[0], title)
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure as PNG, whole: what stands outside the axes is not cut. Returns `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    return path


def _moments(runs: Sequence[Values]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation over runs in per cent for each layer; NaN and 0 where nothing was measured."""
    means, stds = [], []
    for values in zip(*runs, strict=True):
        summary = summarise(100 * value for value in values if value is not None)
        means.append(summary.mean if summary else np.nan)
        stds.append((summary.std if summary else None) or 0.0)
    return np.array(means), np.array(stds)


def _floors(axes: Axes, floors: Mapping[str, float]) -> None:
    """Level lines, whose names stand at the right, apart from each other."""
    axes.margins(y=0.12)
    lowest, highest = axes.get_ylim()
    if floors:
        lowest = min(lowest, *(100 * value - 3 for value in floors.values())) if lowest else 0.0
        highest = max(highest, *(103 * value for value in floors.values()))
        axes.set_ylim(lowest, highest)
    nearest = 0.075 * (highest - lowest)
    last = -np.inf
    for name, value in sorted(floors.items(), key=lambda floor: floor[1]):
        axes.axhline(100 * value, color="0.55", linestyle="--", linewidth=0.9, zorder=1)
        last = max(100 * value, last + nearest)
        beside = axes.get_yaxis_transform()
        axes.text(1.01, last, name, fontsize=6.5, color="0.35", ha="left", va="center", transform=beside)


def _layer_axis(axes: Axes, layers: Sequence[str], room: float) -> None:
    """The names of layers, aslant where they do not fit side by side into some inches."""
    if 1.2 * CHARACTER * len(layers) * max(map(len, layers)) > room:
        axes.set_xticks(range(len(layers)), list(layers), rotation=35, ha="right", rotation_mode="anchor")
    else:
        axes.set_xticks(range(len(layers)), list(layers))


def _legend(figure: Figure, axes: Axes, title: str) -> None:
    """The title, and below it the legend; the figure grows by the lines that both need."""
    handles, labels = axes.get_legend_handles_labels()
    width, height = figure.get_size_inches()
    title = textwrap.fill(title, int(width / (1.3 * CHARACTER)))
    columns = min(len(labels), max(1, int(width / (0.33 + CHARACTER * max(map(len, labels), default=0)))))
    lines = -(-len(labels) // columns)
    figure.set_size_inches(width, height + 0.14 * (lines - 1 + len(title.splitlines())))
    # As the title of the legend it moves with it; a figure's own would lie on top of a legend outside of the axes.
    options: dict[str, Any] = {"title": title, "title_fontsize": 8} if title else {}
    options |= {"columnspacing": 1.0, "handletextpad": 0.4, "handlelength": 1.5, "borderaxespad": 0.2}
    figure.legend(handles, labels, loc="outside upper center", ncols=-(-len(labels) // lines), **options)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
