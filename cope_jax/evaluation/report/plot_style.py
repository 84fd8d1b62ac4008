"""The common style of all plots: colours, markers, sizes, legends and axes."""

import hashlib
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

# Okabe and Ito's palette, which colour-blind readers can distinguish, and four more colours. Each has its own marker.
# fmt: off
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999", "#332288", "#882255",
           "#999933", "#8C510A")
# fmt: on
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "1", "<", ">", "d")
# The hash of a name decides its colour. This salt gives the usual encodings different colours, and
# the first four to CoPE, RoPE, relative and learned positions, as in the pictures of docs/.
SALT = b"2730642"
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
    "svg.hashsalt": "cope-jax",  # equal figures are equal files
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
}


class NothingToPlot(Exception):
    """The exception for a plot whose data are missing; its message says which data."""


def legend(figure: Figure, axes: Axes, title: str = "", caption: str = "") -> None:
    """Adds a title and a legend above the panels, a caption below, and the space for them."""
    handles, labels = axes.get_legend_handles_labels()
    width, height = figure.get_size_inches()
    title = textwrap.fill(title, int(width / (1.3 * CHARACTER)))
    widest = CHARACTER * max(map(len, labels), default=0)
    columns = min(len(labels), max(1, int(width / (0.36 + widest))))
    lines = -(-len(labels) // max(1, columns))
    figure.set_size_inches(width, height + 0.14 * (max(0, lines - 1) + len(title.splitlines())))
    # The title belongs to the legend, because a title of the figure would overlap a legend outside
    # the axes.
    options: dict[str, Any] = {"title": title, "title_fontsize": 8} if title else {}
    options |= {
        "columnspacing": 1.0,
        "handletextpad": 0.4,
        "handlelength": 1.8,
        "borderaxespad": 0.2,
    }
    ncols = -(-len(labels) // max(1, lines))
    figure.legend(handles, labels, loc="outside upper center", ncols=ncols, **options)
    add_caption(figure, caption)


def add_caption(figure: Figure, caption: str) -> None:
    """Adds small text below the panels; the figure grows to make room for it."""
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(caption, int(width / (0.85 * CHARACTER)))
    figure.set_size_inches(width, height + 0.11 * len(lines))
    if lines:
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=6, color="0.35")


def is_doubling(values: np.ndarray) -> bool:
    """True if ascending values belong on a logarithmic axis.

    They do if there are at least three values, all positive, and each value is at least twice the
    previous one.

    >>> is_doubling(np.array([128, 256, 512])), is_doubling(np.array([16, 24, 48]))
    (True, False)
    """
    return len(values) > 2 and values[0] > 0 and bool(np.all(values[1:] >= 2 * values[:-1]))


def level_axis(axes: Axes, levels: Sequence[tuple[float, bool]]) -> None:
    """Sets up a horizontal axis with ticks at levels, and a vertical line at those of training.

    `levels` has (length or level, whether training used it), in ascending order.
    """
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
    """Makes the vertical axis logarithmic, with plain tick labels, even within one decade."""
    axes.set_yscale("log")
    wide = max(values) > 8 * min(values)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if wide else MaxNLocator(6))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())


def show_five_percent(axes: Axes, values: Sequence[float]) -> None:
    """Widens the vertical axis to at least ±5 % of the mean, to show small differences as small."""
    lowest, highest = axes.get_ylim()
    mean = float(np.mean(values))
    axes.set_ylim(min(lowest, 0.95 * mean), max(highest, 1.05 * mean))


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure to `path` as PNG, and next to it as SVG for papers. Returns `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=300)
    figure.set_layout_engine("none")  # it is done
    with rc_context(STYLE):
        figure.savefig(path.with_suffix(".svg"), dpi=300, metadata={"Date": None})
    return path


def line(number: int) -> dict[str, Any]:
    """The colour and the marker of line `number`, as arguments of `Axes.plot`."""
    count = len(COLOURS)
    return {"color": COLOURS[number % count], "marker": MARKERS[(number + number // count) % count]}


def looks(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The colour, marker and line style of each encoding, as arguments of `Axes.plot`.

    The text of an encoding decides its look, which is usually the same in all plots. An encoding
    with options, or several encodings joined by `+`, has the colour of the first name, another
    marker, and dashes. If two encodings of a plot would have the same colour and marker, the later
    one gets the next marker. Here single encodings without options come before all others, and each
    of these two groups is in alphabetical order.

    >>> both = looks(["rope", "cope", "cope+rope"])
    >>> both["cope"] == looks(["cope"])["cope"], both["cope"]["color"] == both["cope+rope"]["color"]
    (True, True)
    """
    count = len(COLOURS)
    names = {label: re.split(r"[^\w-]", label)[0] for label in labels}
    look_of: dict[str, dict[str, Any]] = {}
    taken: set[tuple[int, int]] = set()
    # Single names come first.
    for label, name in sorted(names.items(), key=lambda pair: (pair[0] != pair[1], pair[0])):
        colour, marker = _hash(name), _hash(label[len(name) :] or name)
        pairs = (
            ((colour + step // count) % count, (marker + step) % count) for step in range(count**2)
        )
        pair = next((pair for pair in pairs if pair not in taken), (colour, marker))
        taken.add(pair)
        style = "-" if label == name else (0, (4, 1))
        look_of[label] = {"color": COLOURS[pair[0]], "marker": MARKERS[pair[1]], "linestyle": style}
    return {label: look_of[label] for label in labels}


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=4, salt=SALT).digest()
    return int.from_bytes(digest, "big") % len(COLOURS)


def band(
    axes: Axes,
    x: Sequence[float],
    values: Sequence[Sequence[float]],
    look: Mapping[str, Any],
    **options: Any,
) -> None:
    """Draws a line through the means at each x, in a band from the lowest to the highest value."""
    lowest, highest, means = ([float(f(at)) for at in values] for f in (np.min, np.max, np.mean))
    axes.fill_between(x, lowest, highest, color=look["color"], alpha=0.15, linewidth=0)
    axes.plot(x, means, zorder=3, **look, **options)


def dashed(number: int) -> dict[str, Any]:
    """The style of line `number`; four neighbours have different gaps, to show equal lines."""
    gap = 2.0 * (number % 4)
    return line(number) | {"linestyle": (0, (3, gap)) if gap else "-"}


def over_seeds(rows: Sequence[Mapping[str, Any]], marks: str, by: str = "encoding") -> str:
    """Writes a caption with the number of steps and of seeds of some records.

    `by` is the field that has the name of a record's line in the plot. If there are several seeds,
    the caption also has `marks`, which says what the bars, bands or dots of the plot show.

    >>> over_seeds([{"encoding": "cope", "step": 4000, "seed": seed} for seed in (0, 1)], "bars: standard deviation")
    '4,000 steps; mean of 2 seeds; bars: standard deviation'
    """
    names = {row.get(by): 0 for row in rows}
    groups = [[row for row in rows if row.get(by) == name] for name in names]
    steps = [max(row["step"] for row in group) for group in groups]
    seeds = [len({row["seed"] for row in group}) for group in groups]
    ends = (sorted({min(counts), max(counts)}) for counts in (steps, seeds))
    trained, number = (" to ".join(f"{count:,}" for count in counts) for counts in ends)
    mean = f"mean of {number} seeds; {marks}" if max(seeds) > 1 else "1 seed"
    return f"{trained} steps; {mean}"
