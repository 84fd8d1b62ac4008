"""Axes of plots: marks at levels, and logarithmic scales with plain numbers."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter


def is_doubling(values: np.ndarray) -> bool:
    """Whether some growing values belong on a logarithmic axis.

    >>> is_doubling(np.array([128, 256, 512])), is_doubling(np.array([16, 24, 48]))
    (True, False)
    """
    return len(values) > 2 and bool(np.all(values[1:] >= 2 * values[:-1]))


def level_axis(axes: Axes, values: np.ndarray) -> None:
    """A horizontal axis with marks at some growing values."""
    if is_doubling(values):
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(values, [f"{value:g}" for value in values])


def plain_log(axes: Axes, values: Sequence[float]) -> None:
    """A log axis whose marks are plain numbers, also where it covers less than a decade."""
    axes.set_yscale("log")
    wide = max(values) > 8 * min(values)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if wide else MaxNLocator(6))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
