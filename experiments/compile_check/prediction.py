"""Calculates how a training step scales, as in docs/scaling.md.

C is the seconds that a device computes, C₀ the least C of all programs, S the bytes that a device sends, and W the
bandwidth of a ring. M = S / W; a step takes between max(C, M) and C + M; efficiency is C₀ / step. Figures for n devices
without a compiled program follow from the nearest N with one: C (on one device C₀), S · ((n−1)/n) / ((N−1)/N),
state · N/n.
"""

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from cope_jax.errors import ConfigError
from cope_jax.evaluation.report.plot_style import COLUMN_WIDTH, STYLE, line
from cope_jax.evaluation.report.table import Table
from experiments.compile_check.figures import Figures, between, seconds, size

HEADINGS = ("chip", "devices", "", "memory", "compute", "sent", "messages", "tokens/s a device", "MFU", "efficiency")


@dataclasses.dataclass(frozen=True)
class Point:
    """A step on n devices: compiled for them, or calculated from one that was compiled for another number."""

    devices: int  # n
    compiled: bool  # whether the figures are those of a compiled program
    memory: float  # bytes of a device
    compute: float  # C
    sent: float  # S
    messages: float  # M
    steps: tuple[float, float]  # with (nothing hidden, everything hidden)
    efficiency: tuple[float, float]  # the same
    figures: Figures

    @classmethod
    def of(cls, figures: Figures, devices: int, least: float) -> "Point":
        """From the figures of a compiled step and C₀."""
        compiled = figures["devices"]
        share = (1 - 1 / devices) / (1 - 1 / compiled)
        memory = figures["bytes"]["peak"] + figures["bytes"]["arguments"] * (compiled / devices - 1)
        sent = share * sum(collective["sent_bytes"] for collective in figures["collectives"])
        compute, messages = figures["compute_seconds"] if devices > 1 else least, sent / figures["ring_bandwidth"]
        steps = compute + messages, max(compute, messages)
        efficiency = least / steps[0], least / steps[1]
        return cls(devices, devices == compiled, memory, compute, sent, messages, steps, efficiency, figures)

    def cells(self) -> list[str]:
        """The row of a table; figures from the formula are rounded to two digits."""
        shown, found = str if self.compiled else rough, self.figures
        tokens = found["batch_size"] * found["length"] / found["devices"]
        flops = found["model_flops"] / found["devices"] / found["peak_flops"]
        return [
            chip_of(found),
            str(self.devices),
            "compiled" if self.compiled else "formula",
            shown(size(self.memory)) + (": does not fit" if self.memory > found["hbm_bytes"] else ""),
            shown(seconds(self.compute)),
            shown(size(self.sent)),
            shown(seconds(self.messages)),
            between(*(shown(f"{tokens / step:,.0f}") for step in self.steps)),
            between(*(shown(f"{flops / step:.1%}") for step in self.steps)),
            between(*(shown(f"{share:.0%}") for share in self.efficiency)),
        ]


def chip_of(figures: Figures) -> str:
    """The kind of chip, such as "v5e"."""
    return figures["topology"].partition(":")[0]


def read(folder: Path) -> dict[str, list[Figures]]:
    """The figures on several devices in a folder's `*.json`, by chip; ConfigError for no figures, or another file."""
    found: dict[str, list[Figures]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            figures = json.loads(path.read_text())
            if "bytes" in figures and figures["devices"] > 1:
                Point.of(figures, figures["devices"], 1.0).cells()  # so that missing figures show now
                found.setdefault(chip_of(figures), []).append(figures)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} was not written by experiments.compile_check --json: remove it") from error
    if not found:
        raise ConfigError(f"{folder} has no step on several devices: write one with experiments.compile_check --json")
    return dict(sorted(found.items()))


def fill(compiled: Sequence[Figures], counts: Sequence[int]) -> list[Point]:
    """The points of one chip: the compiled ones, and those for `counts` devices, from the nearest compiled one."""
    least = min(figures["compute_seconds"] for figures in compiled)
    points = []
    for count in sorted({*counts, *(figures["devices"] for figures in compiled)}):
        nearest = min(compiled, key=lambda figures: (abs(math.log(figures["devices"] / count)), figures["devices"]))
        points.append(Point.of(nearest, count, least))
    return points


def markdown(points: dict[str, list[Point]]) -> str:
    """The table."""
    return Table("", HEADINGS, [point.cells() for own in points.values() for point in own]).markdown() + "\n"


def rough(text: str) -> str:
    """A text with its number rounded to two digits.

    >>> rough("3,152"), rough("44.6 ms"), rough("100%")
    ('3,200', '45 ms', '100%')
    """

    def two_digits(number: re.Match[str]) -> str:
        return f"{float(format(float(number[0].replace(',', '')), '.2g')):,.12g}"

    return re.sub(r"[\d,]+(?:\.\d+)?", two_digits, text, count=1)


@rc_context(STYLE)
def plot(points: dict[str, list[Point]]) -> Figure:
    """Plots efficiency against devices, two lines for each chip; markers show where a program was compiled."""
    figure = Figure(figsize=(COLUMN_WIDTH, 2.4), layout="constrained")
    axes = figure.subplots()
    for number, (chip, own) in enumerate(points.items()):
        style = line(number) | {"markevery": [place for place, point in enumerate(own) if point.compiled]}
        low, high = ([100 * share for share in shares] for shares in zip(*(p.efficiency for p in own), strict=True))
        devices = [point.devices for point in own]
        axes.plot(devices, low, label=f"{chip}, no message hidden", **style)
        axes.plot(devices, high, label=f"{chip}, messages hidden", linestyle="--", **style)
    counts = sorted({point.devices for own in points.values() for point in own})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(0, 105)
    axes.set_xlabel("devices")
    axes.set_ylabel("predicted efficiency (%)")
    axes.grid(which="major", color="0.9", linewidth=0.6)
    axes.legend(loc="lower right")
    return figure
