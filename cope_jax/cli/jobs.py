"""Defines the flag --jobs of commands that train several cells."""

from cope_jax.cli import common_flags
from cope_jax.errors import ConfigError
from cope_jax.runs.grid import claims

_JOBS = common_flags.DEFINE_count(
    "jobs",
    None,
    "Number of cells to train at the same time on a CPU, each in a process of its own with its share of the cores. "
    "Without this flag: in compare the number of cores, but at most one per cell; in sweep, what the machine or "
    "the cluster can run; in other commands, and on a GPU or TPU, 1. Except in sweep it sets the number of threads of "
    "each cell, and so the rounding: resume with the same number.",
)


def given() -> int | None:
    """The value of the flag; None without the flag."""
    return _JOBS.value


def number(cells: int, default: int | None = None) -> int:
    """The number of `cells` cells that train at a time; `default` replaces the number of cores.

    The shares of the cores depend only on the command and the machine, so a resumed cell has as
    many threads.

    Raises:
      ConfigError: more than one job on an accelerator, or in one of several processes.
    """
    import jax  # here, because --help does not need it

    alone = jax.default_backend() == "cpu" and jax.process_count() == 1
    if _JOBS.value is not None:
        if _JOBS.value > 1 and not alone:
            raise ConfigError(f"--jobs={_JOBS.value} is only for one process on a CPU: omit --jobs")
        return _JOBS.value
    return min(default or claims.cores(), cells) if alone else 1
