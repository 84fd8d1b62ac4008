"""The frozen version 2 of the benchmark `abilities`: no test example is in the training data, and
every encoding has the same small search of its learning rate.

Command: cope-jax sweep --grid=abilities_v2 --workdir=runs/abilities_v2
Hardware: any. Wall time: about half a minute of one CPU core for each cell and trial.
experiments/RESULTS.md says which were run.

Frozen are the settings, 1,500 steps of 32 sequences, the seeds, the rates, and the data, whose
digests are below: records of different times and people can stand in one table. Further encodings
join at the end of the list, or by --encoding=FILE. A change of anything else is a version 3.
"""

from collections.abc import Iterator

from cope_jax.grids import abilities
from cope_jax.runs.grid.cell import Cell

THIRD = (*abilities.THIRD, "repo", "scale_invariant", "ssmax")
"""The encodings after the first ten."""

SEARCH = {"optimizer.learning_rate": (1e-3, 2e-3, 4e-3)}
"""Each encoding trains once with each rate in each setting, with a seed and data that no cell has;
the cells take the rate with the lowest loss.
"""

DATA = {
    "ignore": 785583662,
    "count": 3619255289,
    "recall": 2354973399,
    "occurrence": 2554019832,
    "steps": 2385376401,
    "state": 191538277,
    "parity": 1976972933,
    "index": 3601468803,
    "stack": 2002231955,
    "copy": 63770972,
    "arithmetic": 1387404655,
}
"""For each ability the CRC-32 of its first 64 examples of each split with data seed 0."""


def get_cells() -> Iterator[Cell]:
    """Yields the cells in the order in which they train."""
    return abilities.get_cells("_v2", THIRD, SEARCH)
