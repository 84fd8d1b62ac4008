"""Trains a random share of the cells of a grid again, and compares what they measure with records.

    python -m tools.retrain --records=experiments/results/abilities.tar.xz --grid=abilities \
      --share=0.01 --workdir=runs/retrained

Times and memory are not compared. Other machines and versions round sums in other orders, and
training may then end elsewhere: `--tolerance` is the largest difference of an error that is
accepted. The command ends with status 1 if a cell differs by more, or fails.
"""

import argparse
import math
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cope_jax import encodings
from cope_jax.runs.grid import archive, grid_file
from cope_jax.runs.grid.cell import entries
from cope_jax.runs.grid.engines import Local
from cope_jax.runs.grid.grid import Grid
from cope_jax.runs.records import Record

OF_THE_LOAD = {"wall_seconds", "memory_gib"}


def main() -> None:
    """Trains the chosen cells, and prints a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, required=True, help="archive of a grid's folder")
    parser.add_argument("--grid", required=True, help="name or file of the grid")
    parser.add_argument("--encoding", help="file of an encoding that entered the grid")
    parser.add_argument("--share", type=float, default=0.01, help="share of the cells to train")
    parser.add_argument("--seed", type=int, default=0, help="chooses the cells")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, a core each")
    parser.add_argument("--tolerance", type=float, default=0.0, help="largest difference of errors")
    parser.add_argument("--workdir", type=Path, required=True, help="new folder of the cells")
    given = parser.parse_args()
    if given.workdir.exists():
        sys.exit(f"{given.workdir} exists: give a new folder")
    cells = grid_file.read(grid_file.find(given.grid))
    if given.encoding:
        cells = entries(cells, encodings.load(given.encoding))
    with tempfile.TemporaryDirectory() as folder:
        archive.unpack(given.records, Path(folder))
        (unpacked,) = Path(folder).iterdir()
        recorded = Grid(unpacked, cells)
        finished = recorded.state().finished
        if given.encoding and len(finished) < len(cells):
            sys.exit(
                f"{given.records} has {len(finished)} of the {len(cells)} cells: train the others"
            )
        chosen = random.Random(given.seed).sample(finished, math.ceil(given.share * len(finished)))
        print(f"{len(chosen)} of {len(finished)} cells", flush=True)
        again = Grid(given.workdir, chosen)
        again.train(engine=Local(given.jobs, cores=1), stop_at_failure=False)
        state = again.state()
        pairs = {cell: (recorded.records([cell]), again.records([cell])) for cell in state.finished}
    wrong = bool(state.failed)
    for cell, (old, new) in pairs.items():
        larger = difference(old, new, cell.config.task.create().metric)
        same = plain(old) == plain(new)
        print(f"{cell.name}: " + ("the same bits" if same else f"errors differ by {larger:.3g}"))
        wrong |= not larger <= given.tolerance
    for cell, line in state.failed.items():
        print(f"{cell.name}: failed: {line}")
    if wrong:
        sys.exit(1)


def plain(rows: Sequence[Record]) -> list[Record]:
    """The records without what depends on the machine's load."""
    return [{name: x for name, x in row.items() if name not in OF_THE_LOAD} for row in rows]


def difference(old: Sequence[Record], new: Sequence[Record], metric: str) -> float:
    """The largest difference of `metric` in a split; infinity if a split has no pair.

    >>> row = {"split": "dense", "metric": "error", "value": 0.25}
    >>> difference([row], [row | {"value": 0.5}], "error")
    0.25
    >>> difference([row], [row | {"metric": "loss"}], "error")
    inf
    """

    def values(rows: Sequence[Record]) -> dict[tuple[str, int], float]:
        return {
            (row["split"], row.get("seed", 0)): row["value"]
            for row in rows
            if row["metric"] == metric
        }

    before, after = values(old), values(new)
    if not before or before.keys() != after.keys():
        return math.inf
    return max(abs(before[key] - after[key]) for key in before)


if __name__ == "__main__":
    main()
