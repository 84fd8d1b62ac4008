"""Kills a small training run again and again, and shows that it ends with the same bits as one left in peace.

JAX_PLATFORMS=cpu python -m experiments.torture --workdir=runs/torture --kills=50

SIGKILL and SIGTERM strike at random moments from the start of the process on, and with purpose while a checkpoint is
written, right after the first step, and during evaluation. Parameters, optimizer, random key, place in the data and
metrics are compared. With JAX_PLATFORMS=cpu the devices are fake ones, as many as a mesh needs; else those that are
there. The same command goes on where it was interrupted. Exit status: 0 all is equal, 1 it is not, 2 wrong input.
"""

import collections
import signal
import sys
import types
from pathlib import Path
from typing import Any

import jax
from absl import flags
from rich.console import Console
from rich.table import Column, Table
from tqdm import tqdm

from cope_jax.errors import ConfigError
from cope_jax.runs import workdir as workdirs
from cope_jax.training.preemption import Interrupted
from experiments.cli import entry
from experiments.tortures.ordeal import Ordeal
from experiments.tortures.victim import parse_mesh

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for all runs.", required=True)
_KILLS = flags.DEFINE_integer("kills", 50, "How many, shared among the meshes.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Decides moments and signals.", lower_bound=0)
_MESHES = flags.DEFINE_list(
    "meshes",
    ["data=4", "fsdp=4", "tensor=4", "data=2+fsdp=2+tensor=2"],
    "Devices along the axes of each mesh: data, fsdp, tensor, sequence; 1 where nothing is said.",
)
_JSON = flags.DEFINE_string("json", None, "A file to write the figures to.")

PLACES = {
    "start": "before the first step",
    "checkpoint": "while a checkpoint was written",
    "evaluation": "during evaluation",
    "steps": "between",
}


def main() -> None:
    """Kills, compares, and prints a table."""
    jax.config.update("jax_platforms", "cpu")  # the devices are for the runs, which are processes of their own
    stop = _Stop()
    folder = Path(_WORKDIR.value).resolve()
    path = None if _JSON.value is None else Path(_JSON.value)
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"--json={path}: there is no folder {path.parent}")
    meshes = list(dict.fromkeys(_MESHES.value))
    for mesh in meshes:
        parse_mesh(mesh)
    if not meshes:
        raise ConfigError("--meshes is empty: give at least one, as in fsdp=2+tensor=2")
    with workdirs.locked(folder):
        shares = [(_KILLS.value + number) // len(meshes) for number in range(len(meshes))]
        ordeals = [
            Ordeal(folder / mesh, mesh, share, _SEED.value, folder / "compiled")
            for mesh, share in zip(meshes, shares, strict=True)
        ]
        figures = []
        with tqdm(total=_KILLS.value, unit="kill", dynamic_ncols=True) as bar:
            bar.update(sum(len(ordeal.struck()) for ordeal in ordeals))
            for ordeal in ordeals:
                bar.set_description(ordeal.mesh)
                figures.append(_figures(ordeal, ordeal.run(bar.update, stop.check)))
    _print(figures)
    if path is not None:
        workdirs.write_json(path, {"meshes": figures})
    if any(mesh["wrong"] for mesh in figures):
        sys.exit(1)


class _Stop:
    """Ctrl-C and SIGTERM only ask, so that no run is left behind that nobody knows of."""

    def __init__(self) -> None:
        self._number: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: types.FrameType | None) -> None:
        self._number = number

    def check(self) -> None:
        """Raises Interrupted if it was asked."""
        if self._number is not None:
            raise Interrupted("stopped; the same command goes on from there", self._number)


def _figures(ordeal: Ordeal, wrong: list[str]) -> dict[str, Any]:
    struck = ordeal.struck()
    signals = collections.Counter(start.signal for start in struck)
    places = collections.Counter(str(start.where) for start in struck)
    return {
        "mesh": ordeal.mesh,
        "kills": len(struck),
        "signals": {name: signals[name] for name in ("SIGKILL", "SIGTERM")},
        "places": {place: places[place] for place in PLACES},
        "starts": len(ordeal.starts),
        "runs": sum(start.status == 0 for start in ordeal.starts) - 1,
        "seconds": sum(start.seconds for start in ordeal.starts),
        "wrong": wrong,
    }


def _print(figures: list[dict[str, Any]]) -> None:
    names = "kills", "SIGKILL", "SIGTERM", *PLACES.values(), "runs", "starts", "seconds", "verdict"
    table = Table(Column("mesh", no_wrap=True), *names)
    for mesh in figures:
        counts = (mesh["kills"], *mesh["signals"].values(), *mesh["places"].values(), mesh["runs"], mesh["starts"])
        verdict = "different" if mesh["wrong"] else "identical"
        table.add_row(mesh["mesh"], *map(str, counts), f"{mesh['seconds']:.0f}", verdict)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(table)
    for mesh in figures:
        for line in mesh["wrong"]:
            console.print(f"{mesh['mesh']}: {line}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    entry.run(main)
