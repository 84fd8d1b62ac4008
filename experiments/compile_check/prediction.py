"""How a training step scales, on paper: from programs that were compiled for some numbers of devices.

Every device has the same share of the batch, so the batch grows with the devices. With C the seconds that a device
computes, C₀ the least C of all programs, S the bytes that it sends and W the bandwidth of a ring,

    M = S / W,    step = C + M where no message hides behind computing,  max(C, M) where all that can do,
    efficiency = C₀ / step.

For n devices for which nothing was compiled, from the nearest number N for which something was: C of N, on one device
C₀; S(n) = S(N) · ((n−1)/n) / ((N−1)/N); and the state takes N/n of its memory. docs/scaling.md says why, and what is
left out.
"""

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from cope_jax.errors import ConfigError
from cope_jax.evaluation.report.plots import COLOURS, COLUMN_WIDTH, MARKERS, STYLE
from cope_jax.evaluation.report.table import Table
from experiments.compile_check.figures import Figures, between, seconds, size

HEADINGS = ("chip", "devices", "", "memory", "compute", "sent", "messages", "tokens/s a device", "MFU", "efficiency")


@dataclasses.dataclass(frozen=True)
class Point:
    """A step on so many devices: compiled, or following from one that was.

    Attributes:
      devices: n.
      figures: of the compiled step, as `experiments.compile_check --json` writes them.
      least: C₀.
    """

    devices: int
    figures: Figures
    least: float

    @classmethod
    def of(cls, figures: Figures) -> "Point":
        """The point of a step that compiled; KeyError where a figure is missing."""
        return cls(figures["devices"], figures, figures["compute_seconds"])

    @property
    def compiled(self) -> bool:
        return self.devices == self.figures["devices"]

    @property
    def memory(self) -> float:
        """Bytes of a device."""
        memory = self.figures["bytes"]
        return memory["peak"] + memory["arguments"] * (self.figures["devices"] / self.devices - 1)

    @property
    def sent(self) -> float:
        """S."""
        share = (1 - 1 / self.devices) / (1 - 1 / self.figures["devices"])
        return share * sum(collective["sent_bytes"] for collective in self.figures["collectives"])

    @property
    def compute(self) -> float:
        """C."""
        return self.figures["compute_seconds"] if self.devices > 1 else self.least

    @property
    def messages(self) -> float:
        """M."""
        return self.sent / self.figures["ring_bandwidth"]

    @property
    def steps(self) -> tuple[float, float]:
        """Seconds with (nothing hidden, everything hidden)."""
        return self.compute + self.messages, max(self.compute, self.messages)

    @property
    def efficiency(self) -> tuple[float, float]:
        """With (nothing hidden, everything hidden)."""
        shown, hidden = self.steps
        return self.least / shown, self.least / hidden

    @property
    def fits(self) -> bool:
        return self.memory <= self.figures["hbm_bytes"]

    def cells(self) -> list[str]:
        """The row of a table; what follows by the formula is rounded to two digits."""
        shown, found = str if self.compiled else rough, self.figures
        tokens = found["batch_size"] * found["length"] / found["devices"]
        flops = found["model_flops"] / found["devices"] / found["peak_flops"]
        return [
            chip_of(found),
            str(self.devices),
            "compiled" if self.compiled else "formula",
            shown(size(self.memory)) + ("" if self.fits else ": does not fit"),
            shown(seconds(self.compute)),
            shown(size(self.sent)),
            shown(seconds(self.messages)),
            between(*(shown(f"{tokens / step:,.0f}") for step in self.steps)),
            between(*(shown(f"{flops / step:.1%}") for step in self.steps)),
            between(*(shown(f"{share:.0%}") for share in self.efficiency)),
        ]


def chip_of(figures: Figures) -> str:
    """The kind of chip, as "v5e"."""
    return figures["topology"].partition(":")[0]


def read(folder: Path) -> dict[str, list[Point]]:
    """The points of all files `*.json` in a folder whose steps compiled for several devices, by chip.

    Raises:
      ConfigError: no such file, or one that is something else.
    """
    found: dict[str, list[Point]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            figures = json.loads(path.read_text())
            if "bytes" in figures and figures["devices"] > 1:
                point = Point.of(figures)
                point.cells()  # so that what is missing shows now
                found.setdefault(chip_of(figures), []).append(point)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is not what experiments.compile_check --json writes") from error
    if not found:
        raise ConfigError(f"{folder} holds no step on several devices: write one with experiments.compile_check --json")
    return {chip: sorted(points, key=lambda point: point.devices) for chip, points in sorted(found.items())}


def fill(points: Sequence[Point], counts: Sequence[int]) -> list[Point]:
    """The points of one chip, and those of the numbers of devices between, from the nearest that was compiled."""
    least = min(point.compute for point in points)
    known = {point.devices: dataclasses.replace(point, least=least) for point in points}

    def nearest(count: int) -> Point:
        point = min(known.values(), key=lambda point: abs(math.log(point.devices / count)))
        return dataclasses.replace(point, devices=count)

    return [known.get(count) or nearest(count) for count in sorted({*counts, *known})]


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
    """Efficiency against devices, two lines for each chip; markers stand where a program was compiled."""
    figure = Figure(figsize=(COLUMN_WIDTH, 2.4), layout="constrained")
    axes = figure.subplots()
    for number, (chip, own) in enumerate(points.items()):
        style: dict[str, Any] = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
            "markevery": [place for place, point in enumerate(own) if point.compiled],
        }
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
