r"""Predicts how a training step scales to n devices, from the files of
`tools.compile_check --json` for several topologies, as in docs/scaling.md.

python -m tools.compile_check --config=lm:1b_noise --topology=v5e:4x4 \
    --config.training.batch_size=32 --config.evaluation.batch_size=16 --json=runs/scaling/v5e-4x4.json
python -m tools.scaling --figures=runs/scaling --plot=docs/scaling.png

Prints a table in Markdown. C is the compute time of a device, C₀ the lowest C of all compiled
programs, S the bytes that a device sends to other devices, W the bandwidth of a ring, and M = S / W
the communication time, which the table calls messages. A step takes between max(C, M) and C + M.
The efficiency of a step is C₀ divided by the time of the step.

If no program was compiled for n devices, the numbers come from the program for the nearest number
of devices N. C stays the same, except that it is C₀ on one device. S is multiplied by ((n−1)/n) /
((N−1)/N), and the state by N/n.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from matplotlib import rc_context
from matplotlib.figure import Figure

from cope_jax.cli.flag_values import read_numbers
from cope_jax.cli.run import run
from cope_jax.errors import ConfigError
from cope_jax.evaluation.report.plot_style import COLUMN_WIDTH, STYLE, add_caption, line
from cope_jax.evaluation.report.table import Table
from cope_jax.storage.files import read_object
from tools.compile_check.figures import Figures, between, seconds, size

_FIGURES = flags.DEFINE_string(
    "figures",
    None,
    "Folder with the files that tools.compile_check --json wrote (required).",
    required=True,
)
_PLOT = flags.DEFINE_string(
    "plot",
    None,
    "Image file for a plot of efficiency against the number of devices; without this flag, nothing is plotted.",
)
_DEVICES = flags.DEFINE_list(
    "devices",
    "1,2,4,8,16,32,64,128,256",
    "Numbers of devices to predict times for. The table also shows the numbers of devices of the files in --figures.",
)
HEADINGS = "chip|devices||memory|compute|sent|messages|tokens/s per device|MFU|efficiency"


@dataclasses.dataclass(frozen=True)
class Point:
    """A step on n devices: compiled for n devices, or calculated from a step on another number of
    devices.
    """

    devices: int  # n
    compiled: bool  # whether the step was compiled for n devices
    memory: float  # bytes of a device
    compute: float  # C, seconds of computing
    sent: float  # S, bytes that a device sends
    messages: float  # M, seconds of messages
    steps: tuple[float, float]  # seconds of a step with (no message hidden, all messages hidden)
    efficiency: tuple[float, float]  # C₀ divided by each of these times
    figures: Figures

    @classmethod
    def of(cls, figures: Figures, devices: int, least: float) -> "Point":
        """Calculates the point from the figures of a compiled step and `least`, C₀."""
        compiled = figures["devices"]
        share = (1 - 1 / devices) / (1 - 1 / compiled)
        memory = figures["bytes"]["peak"] + figures["bytes"]["arguments"] * (compiled / devices - 1)
        sent = share * sum(collective["sent_bytes"] for collective in figures["collectives"])
        compute = figures["compute_seconds"] if devices > 1 else least
        messages = sent / figures["ring_bandwidth"]
        steps = compute + messages, max(compute, messages)
        efficiency = least / steps[0], least / steps[1]
        times = (compute, sent, messages, steps, efficiency)
        return cls(devices, devices == compiled, memory, *times, figures)

    def cells(self) -> list[str]:
        """The row of the table. Numbers from the formula are rounded to two digits."""
        shown, figures = str if self.compiled else rough, self.figures
        tokens = figures["batch_size"] * figures["length"] / figures["devices"]
        flops = figures["model_flops"] / figures["devices"] / figures["peak_flops"]
        large = ": does not fit" if self.memory > figures["hbm_bytes"] else ""
        return [
            chip_of(figures),
            str(self.devices),
            "compiled" if self.compiled else "formula",
            shown(size(self.memory)) + large,
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
    """Reads the figures of steps on several devices from `*.json`, by chip.

    Raises:
      ConfigError: there are no figures, or a file has other JSON.
    """
    figures_of: dict[str, list[Figures]] = {}
    for path in sorted(folder.glob("*.json")):
        figures = read_object(path, "remove it")
        try:
            if "bytes" in figures and figures["devices"] > 1:
                # So that missing figures raise an error now.
                Point.of(figures, figures["devices"], 1.0).cells()
                figures_of.setdefault(chip_of(figures), []).append(figures)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path} was not written by tools.compile_check --json: remove it"
            ) from error
    if not figures_of:
        raise ConfigError(
            f"{folder} has no step on several devices: write one with tools.compile_check --json"
        )
    return dict(sorted(figures_of.items()))


def fill(compiled: Sequence[Figures], counts: Sequence[int]) -> list[Point]:
    """The points of one chip: all compiled points, and points for other `counts`, from the nearest
    compiled step.
    """
    least = min(figures["compute_seconds"] for figures in compiled)
    points = []
    for count in sorted({*counts, *(figures["devices"] for figures in compiled)}):
        ordered = sorted(compiled, key=lambda figures: figures["devices"])
        nearest = min(ordered, key=lambda figures: abs(math.log(figures["devices"] / count)))
        points.append(Point.of(nearest, count, least))
    return points


def markdown(points: dict[str, list[Point]]) -> str:
    """The table of all points in Markdown."""
    rows = [point.cells() for points_of_chip in points.values() for point in points_of_chip]
    return Table("", HEADINGS.split("|"), rows).markdown() + "\n"


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
    """Plots two lines for each chip, the efficiency with no message and with all messages hidden,
    by number of devices.

    Markers show the numbers of devices that programs were compiled for.
    """
    figure = Figure(figsize=(COLUMN_WIDTH, 2.4), layout="constrained")
    axes = figure.subplots()
    for number, (chip, points_of_chip) in enumerate(points.items()):
        compiled = [index for index, point in enumerate(points_of_chip) if point.compiled]
        devices = [point.devices for point in points_of_chip]
        for end, (label, style) in enumerate(
            (("no message hidden", "-"), ("messages hidden", "--"))
        ):
            shares = [100 * point.efficiency[end] for point in points_of_chip]
            look = line(number) | {"markevery": compiled, "linestyle": style}
            axes.plot(devices, shares, label=f"{chip}, {label}", **look)
    counts = sorted({point.devices for chip in points.values() for point in chip})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(0, 105)
    axes.set_xlabel("devices")
    axes.set_ylabel("predicted efficiency (%)")
    axes.grid(which="major", color="0.9", linewidth=0.6)
    axes.legend(loc="lower right")
    add_caption(figure, "markers: compiled for this number of devices; between them: formula")
    return figure


def main() -> None:
    """Prints the table, and writes the plot."""
    counts = read_numbers("devices", _DEVICES.value)
    points = {
        chip: fill(figures_of_chip, counts)
        for chip, figures_of_chip in read(Path(_FIGURES.value)).items()
    }
    print(markdown(points), end="")
    if _PLOT.value is not None:
        try:
            plot(points).savefig(_PLOT.value, dpi=200)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot write --plot={_PLOT.value} ({error}): choose another file"
            ) from error


if __name__ == "__main__":
    run(main)
