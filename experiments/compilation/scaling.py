"""How a training step scales, on paper: from what was compiled for each number of devices.

Every device has the same share of the batch, so the batch grows with the devices. For n devices, with C the seconds
that a device computes and S_k the bytes that it sends in collectives of kind k (by the ring algorithm: see
`Collective`) over rings of bandwidth W,

    M = Σ_k S_k / W,    step = C + M where no message hides behind computing,  max(C, M) where all that can do,
    efficiency = C₁ / step,

C₁ being C on the fewest devices that compiled. Of a parameter sharded over n devices each pass sends (n−1)/n of its
bytes: the messages of fsdp soon stop growing with n, and so does the loss. Left out: latencies, which grow with n;
congestion of links that rings share; the network between slices; input and host.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from cope_jax.errors import ConfigError
from cope_jax.evaluation.plots import COLOURS, COLUMN_WIDTH, MARKERS, STYLE
from experiments.compilation.report import between, seconds, size


@dataclasses.dataclass(frozen=True)
class Point:
    """A step on so many devices.

    Attributes:
      chip: kind, as "v5e".
      topology: as "v5e:4x4".
      devices: n.
      fits: whether it compiled into the memory; if not, the rest is 0.
      batch_size: sequences a step.
      peak_bytes: memory of a device.
      sent_bytes: by a device, in all collectives.
      compute_seconds, message_seconds: C and M.
      tokens_per_second, mfu: (nothing hidden, everything hidden).
    """

    chip: str
    topology: str
    devices: int
    fits: bool
    batch_size: int
    peak_bytes: float = 0
    sent_bytes: float = 0
    compute_seconds: float = 0
    message_seconds: float = 0
    tokens_per_second: tuple[float, float] = (0, 0)
    mfu: tuple[float, float] = (0, 0)

    @classmethod
    def of(cls, figures: dict[str, Any]) -> "Point":
        """From what `experiments.compile_check --json` wrote."""
        topology = figures["topology"]
        common = topology.partition(":")[0], topology, figures["devices"], figures["fits"], figures["batch_size"]
        if not figures["fits"]:
            return cls(*common)
        return cls(
            *common,
            figures["bytes"]["peak"],
            sum(collective["sent_bytes"] for collective in figures["collectives"]),
            figures["compute_seconds"],
            figures["collective_seconds"],
            _from_slow(figures["tokens_per_second"]),
            _from_slow(figures["mfu"]),
        )

    def efficiency(self, alone: float) -> tuple[float, float]:
        """(nothing hidden, everything hidden), with `alone` the seconds of computing without messages."""
        shown, hidden = self.compute_seconds + self.message_seconds, max(self.compute_seconds, self.message_seconds)
        return alone / shown, alone / hidden


def _from_slow(pair: Sequence[float]) -> tuple[float, float]:
    low, high = sorted(pair)
    return low, high


def read(folder: Path) -> dict[str, list[Point]]:
    """The points of all files `*.json` in a folder, by chip, from the fewest devices on.

    Raises:
      ConfigError: no such file, or one that is something else.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ConfigError(
            f"{folder} holds no *.json: write some with experiments.compile_check --json={folder}/NAME.json"
        )
    found: dict[str, list[Point]] = {}
    for path in paths:
        try:
            point = Point.of(json.loads(path.read_text()))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is not what experiments.compile_check --json writes") from error
        found.setdefault(point.chip, []).append(point)
    return {chip: sorted(points, key=lambda point: point.devices) for chip, points in sorted(found.items())}


def alone(points: Sequence[Point]) -> float:
    """Seconds of computing on the fewest devices that the step fits.

    Raises:
      ConfigError: it fits none.
    """
    fitting = [point.compute_seconds for point in points if point.fits]
    if not fitting:
        raise ConfigError(f"on {points[0].chip} the step fits no number of devices: compile for more")
    return fitting[0]


def markdown(points: dict[str, list[Point]]) -> str:
    """The table."""
    headings = ["topology", "devices", "sequences", "memory a device", "compute", "sent a device", "messages"]
    headings += ["tokens/s", "MFU", "efficiency"]
    lines = [f"| {' | '.join(headings)} |", "| --- |" + " ---: |" * (len(headings) - 1)]
    for own in points.values():
        for point in own:
            start = [point.topology, f"{point.devices}", f"{point.batch_size:,}"]
            if not point.fits:
                lines.append(f"| {' | '.join([*start, 'does not fit', *['–'] * 6])} |")
                continue
            cells = [
                *start,
                size(point.peak_bytes),
                seconds(point.compute_seconds),
                size(point.sent_bytes),
                seconds(point.message_seconds) if point.message_seconds else "0",
                between(*(f"{rate:,.0f}" for rate in point.tokens_per_second)),
                between(*(f"{share:.1%}" for share in point.mfu)),
                between(*(f"{share:.0%}" for share in point.efficiency(alone(own)))),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@rc_context(STYLE)
def plot(points: dict[str, list[Point]]) -> Figure:
    """Efficiency against devices: a band for each chip, from nothing hidden to everything hidden."""
    figure = Figure(figsize=(COLUMN_WIDTH, 2.4), layout="constrained")
    axes = figure.subplots()
    for number, (chip, own) in enumerate(points.items()):
        fitting = [point for point in own if point.fits]
        devices = [point.devices for point in fitting]
        low, high = zip(*(point.efficiency(alone(own)) for point in fitting), strict=True)
        style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
        axes.plot(devices, [100 * share for share in low], label=f"{chip}, no message hidden", **style)
        axes.plot(devices, [100 * share for share in high], label=f"{chip}, messages hidden", linestyle="--", **style)
    counts = sorted({point.devices for own in points.values() for point in own})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("devices")
    axes.set_ylabel("predicted efficiency (%)")
    axes.grid(which="major", color="0.9", linewidth=0.6)
    axes.legend()
    return figure
