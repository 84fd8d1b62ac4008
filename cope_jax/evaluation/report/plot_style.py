"""The common style of all plots: colours, markers, sizes, legends and axes."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

# Okabe and Ito's palette, which colour-blind readers can distinguish.
# Nine markers and eight colours distinguish 72 encodings.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "p")
COLUMN_WIDTH, TEXT_WIDTH = 3.5, 7.0  # inches, of a two-column paper
CHARACTER = 0.055  # mean width in inches of a character in a legend
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
}


class NothingToPlot(Exception):
    """The data of a plot are missing; the message says which."""


def legend(figure: Figure, axes: Axes, title: str = "") -> None:
    """Adds a title and a legend above the panels; the figure grows by the lines that both need."""
    handles, labels = axes.get_legend_handles_labels()
    width, height = figure.get_size_inches()
    title = textwrap.fill(title, int(width / (1.3 * CHARACTER)))
    columns = min(len(labels), max(1, int(width / (0.33 + CHARACTER * max(map(len, labels), default=0)))))
    lines = -(-len(labels) // columns)
    figure.set_size_inches(width, height + 0.14 * (lines - 1 + len(title.splitlines())))
    # The title belongs to the legend, because a title of the figure would overlap a legend outside the axes.
    options: dict[str, Any] = {"title": title, "title_fontsize": 8} if title else {}
    options |= {"columnspacing": 1.0, "handletextpad": 0.4, "handlelength": 1.5, "borderaxespad": 0.2}
    figure.legend(handles, labels, loc="outside upper center", ncols=-(-len(labels) // lines), **options)


def is_doubling(values: np.ndarray) -> bool:
    """Whether some ascending values belong on a logarithmic axis.

    >>> is_doubling(np.array([128, 256, 512])), is_doubling(np.array([16, 24, 48]))
    (True, False)
    """
    return len(values) > 2 and bool(np.all(values[1:] >= 2 * values[:-1]))


def level_axis(axes: Axes, levels: Sequence[tuple[float, bool]]) -> None:
    """Sets up a horizontal axis with ticks at ascending levels; those of training (True) get a vertical line."""
    values = np.array([value for value, _ in levels], np.float64)
    if is_doubling(values):
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(values, [f"{value:g}" for value in values])
    for value in (value for value, as_trained in levels if as_trained):
        axes.axvline(value, color="0.6", linestyle=":", linewidth=0.9, zorder=0)
        above = axes.get_xaxis_transform()
        axes.text(value, 1.03, "training", fontsize=7, color="0.4", ha="center", transform=above)


def plain_log(axes: Axes, values: Sequence[float]) -> None:
    """Makes the vertical axis logarithmic with plain numbers as tick labels, even within one decade."""
    axes.set_yscale("log")
    wide = max(values) > 8 * min(values)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if wide else MaxNLocator(6))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure as PNG, including what is outside the axes. Returns `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    return path


def colour(number: int) -> str:
    """The colour of line `number`."""
    return COLOURS[number % len(COLOURS)]


def line(number: int) -> dict[str, Any]:
    """The colour and the marker of line `number`, as `Axes.plot` takes them."""
    return {"color": colour(number), "marker": MARKERS[number % len(MARKERS)]}


def band(axes: Axes, x: Sequence[float], values: Sequence[Sequence[float]], number: int, **options: Any) -> None:
    """Draws line `number` through the mean of the values at each x, and the band from the lowest to the highest."""
    lowest, highest, means = ([float(f(own)) for own in values] for f in (np.min, np.max, np.mean))
    axes.fill_between(x, lowest, highest, color=colour(number), alpha=0.15, linewidth=0)
    axes.plot(x, means, zorder=3, **line(number), **options)
