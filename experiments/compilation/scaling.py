"""How a training step scales, on paper: from programs that were compiled for some numbers of devices.

Every device has the same share of the batch, so the batch grows with the devices. For n devices, with C the seconds
that a device computes and S the bytes that it sends, over rings of bandwidth W,

    M = S / W,    step = C + M where no message hides behind computing,  max(C, M) where all that can do,
    efficiency = C₀ / step,

where C₀ is the least C of all programs, so that what computing takes longer because products are cut into pieces counts
as lost too. C is the compiler's estimate: see `experiments.compilation.step`. S is counted in the compiled program, by
the ring algorithm: see `experiments.compilation.counts.Collective`. For numbers of devices for which nothing was
compiled, C is that of the nearest number N for which something was, on one device C₀, and S follows from that N, since
in a ring each array of fsdp, whatever its size, is sent but for a device's own share of it; the state is split further
or less far:

    S(n) = S(N) · ((n−1)/n) / ((N−1)/N),    memory(n) = state(N) · N/n + the rest.

Left out: latencies, which grow with n; congestion of links that rings share; the network between slices; input.
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
from cope_jax.evaluation.report.plot_style import COLOURS, COLUMN_WIDTH, MARKERS, STYLE
from experiments.compilation.report import between, seconds, size


@dataclasses.dataclass(frozen=True)
class Point:
    """A step on so many devices; all figures but the first three are of one device.

    Attributes:
      chip: kind, as "v5e".
      devices: n.
      compiled: whether these figures are of a compiled program; otherwise they follow from one.
      state_bytes: parameters and optimizer.
      other_bytes: the rest of what it holds at once.
      hbm_bytes: its memory.
      tokens, model_flops: of a step.
      peak_flops: FLOP/s.
      sent_bytes: in all collectives.
      ring_bandwidth: W.
      compute_seconds: C.
      least_seconds: C₀.
    """

    chip: str
    devices: int
    compiled: bool
    state_bytes: float
    other_bytes: float
    hbm_bytes: float
    tokens: float
    model_flops: float
    peak_flops: float
    sent_bytes: float
    ring_bandwidth: float
    compute_seconds: float
    least_seconds: float

    @classmethod
    def of(cls, figures: dict[str, Any]) -> "Point":
        """From what `experiments.compile_check --json` wrote of a step that compiled."""
        devices, memory = figures["devices"], figures["bytes"]
        sent = sum(collective["sent_bytes"] for collective in figures["collectives"])
        return cls(
            chip=figures["topology"].partition(":")[0],
            devices=devices,
            compiled=True,
            state_bytes=memory["arguments"],
            other_bytes=memory["peak"] - memory["arguments"],
            hbm_bytes=figures["hbm_bytes"],
            tokens=figures["batch_size"] * figures["length"] / devices,
            model_flops=figures["model_flops"] / devices,
            peak_flops=figures["peak_flops"],
            sent_bytes=sent,
            ring_bandwidth=figures["ring_bandwidth"],
            compute_seconds=figures["compute_seconds"],
            least_seconds=figures["compute_seconds"],
        )

    def at(self, devices: int) -> "Point":
        """The same step on another number of devices, by the formulas above."""
        share = (1 - 1 / devices) / (1 - 1 / self.devices)
        return dataclasses.replace(
            self,
            devices=devices,
            compiled=False,
            state_bytes=self.state_bytes * self.devices / devices,
            sent_bytes=self.sent_bytes * share,
            compute_seconds=self.compute_seconds if devices > 1 else self.least_seconds,
        )

    @property
    def fits(self) -> bool:
        """Whether its memory is enough."""
        return self.state_bytes + self.other_bytes <= self.hbm_bytes

    @property
    def message_seconds(self) -> float:
        """M."""
        return self.sent_bytes / self.ring_bandwidth

    @property
    def step_seconds(self) -> tuple[float, float]:
        """(nothing hidden, everything hidden)."""
        compute, messages = self.compute_seconds, self.message_seconds
        return compute + messages, max(compute, messages)

    @property
    def efficiency(self) -> tuple[float, float]:
        """(nothing hidden, everything hidden)."""
        shown, hidden = self.step_seconds
        return self.least_seconds / shown, self.least_seconds / hidden


def read(folder: Path) -> dict[str, list[Point]]:
    """The points of all files `*.json` in a folder whose steps compiled for several devices, by chip.

    Raises:
      ConfigError: no such file, or one that is something else.
    """
    found: dict[str, list[Point]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            figures = json.loads(path.read_text())
            point = Point.of(figures) if "bytes" in figures and figures["devices"] > 1 else None
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is not what experiments.compile_check --json writes") from error
        if point is not None:
            found.setdefault(point.chip, []).append(point)
    if not found:
        raise ConfigError(f"{folder} holds no step on several devices: write one with experiments.compile_check --json")
    return {chip: sorted(points, key=lambda point: point.devices) for chip, points in sorted(found.items())}


def fill(points: Sequence[Point], counts: Sequence[int]) -> list[Point]:
    """The points of one chip, and those of the numbers of devices between, from the nearest that was compiled."""
    least = min(point.compute_seconds for point in points)
    known = {point.devices: dataclasses.replace(point, least_seconds=least) for point in points}

    def nearest(count: int) -> Point:
        return min(known.values(), key=lambda point: abs(math.log(point.devices / count)))

    return [known.get(count) or nearest(count).at(count) for count in sorted({*counts, *known})]


def markdown(points: dict[str, list[Point]]) -> str:
    """The table; what follows by the formula is rounded to two digits."""
    headings = ["chip", "devices", "", "memory", "compute", "sent", "messages", "tokens/s a device", "MFU"]
    headings.append("efficiency")
    lines = [f"| {' | '.join(headings)} |", "| --- |" + " ---: |" * (len(headings) - 1)]
    for point in (point for own in points.values() for point in own):
        shown = str if point.compiled else rough
        cells = [
            point.chip,
            str(point.devices),
            "compiled" if point.compiled else "formula",
            shown(size(point.state_bytes + point.other_bytes)) + ("" if point.fits else ": does not fit"),
            shown(seconds(point.compute_seconds)),
            shown(size(point.sent_bytes)),
            shown(seconds(point.message_seconds)),
            between(*(shown(f"{point.tokens / step:,.0f}") for step in point.step_seconds)),
            between(*(shown(f"{point.model_flops / step / point.peak_flops:.1%}") for step in point.step_seconds)),
            between(*(shown(f"{share:.0%}") for share in point.efficiency)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


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
        devices = [point.devices for point in own]
        marked = [place for place, point in enumerate(own) if point.compiled]
        style: dict[str, Any] = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
            "markevery": marked,
        }
        low, high = ([100 * share for share in shares] for shares in zip(*(p.efficiency for p in own), strict=True))
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
