"""Defines the flags of `sweep` that choose where the cells of a grid run."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from cope_jax.cli import common_flags, jobs

if TYPE_CHECKING:
    from cope_jax.runs.grid.engines import Engine

_ENGINE = flags.DEFINE_enum("engine", "local", ["local", "ray", "slurm"], "Where cells run.")
_CORES = common_flags.DEFINE_count(
    "cores",
    1,
    "Number of CPU cores of a cell. It decides the rounding, so all cells of a grid must have the same number.",
)
_GPUS = flags.DEFINE_integer("gpus", 0, "Number of GPUs of a cell.", lower_bound=0)
_RESOURCES = flags.DEFINE_list(
    "resources",
    [],
    "What else a cell needs of Ray, such as TPU=4, or options of Slurm, such as slurm_partition=gpu.",
)
_ADDRESS = common_flags.DEFINE_text(
    "address",
    "Address of a Ray cluster, such as auto; without this flag, Ray starts on this machine.",
)
TIME_LIMIT = flags.DEFINE_float(
    "time_limit",
    None,
    "Seconds after which a cell is stopped and counts as failed.",
    lower_bound=1.0,
)


def choose(workdir: Path) -> "Callable[[int], Engine]":
    """Checks the flags, and returns a function that starts the engine with a number of slots."""
    from cope_jax.runs.grid import engines  # here, because --help does not need JAX

    return engines.choose(
        _ENGINE.value, workdir, _CORES.value, _GPUS.value, _RESOURCES.value, _ADDRESS.value
    )


def slots(cells: int) -> int:
    """The number of cells to train at the same time, at most `cells`."""
    from cope_jax.runs.grid import engines

    if (given := jobs.given()) is not None:
        return given
    here = _ENGINE.value == "local"
    return max(1, min(cells, engines.default_slots(_CORES.value, _GPUS.value) if here else 1000))
