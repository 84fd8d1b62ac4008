r"""Trains all cells of a grid, on this machine or on many, and shows all results.

cope-jax sweep --grid=abilities --workdir=runs/abilities --dry_run
cope-jax sweep --grid=my_grid.py --workdir=runs/abilities

A grid file yields cells: a config and a seed each. A cell trains in a process of its own, in the
folder SETTING/cells/ENCODING/seed_N. These folders show what is finished, so you can interrupt the
command at any time and rerun it, also with another engine. A cell that fails does not stop the
others; --only_failed trains such cells again. More is in docs/grids.md.

--encoding=mine.py trains an encoding of your own in the settings and seeds of the grid, and only
it: the results show it among the cells of the grid that are finished. When all its cells are
finished, their records are in NAME.tar.xz too.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import flags
from tqdm import tqdm

from cope_jax import encodings
from cope_jax.cli import common_flags, engine_flags, jobs, outputs
from cope_jax.errors import ConfigError, Interrupted
from cope_jax.evaluation.report import grid_report
from cope_jax.evaluation.report.grid_cells import RANK
from cope_jax.runs.grid import archive, grid_file, search
from cope_jax.runs.grid.cell import Cell, entries
from cope_jax.runs.grid.engines import Engine
from cope_jax.runs.grid.grid import Grid, State
from cope_jax.runs.workdir import Workdir
from cope_jax.storage.mirror import shown

_GRID = flags.DEFINE_string(
    "grid",
    None,
    "Name of a grid in cope_jax/grids, or path of a grid file (required).",
    required=True,
)
_ENCODING = common_flags.DEFINE_encoding()
_WORKDIR = common_flags.DEFINE_workdir("Folder for all cells and the results (required).")
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Only count the cells, and estimate the time from finished ones."
)
_ONLY_FAILED = flags.DEFINE_bool("only_failed", False, "Train only cells that failed before.")
flags.adopt_module_key_flags(engine_flags)
flags.adopt_module_key_flags(jobs)
FEW = 100  # cells, which are checked in a second


def main() -> None:
    """Trains the trials that are left, then the other cells, and writes all results."""
    cells, workdir = grid_file.read(grid_file.find(_GRID.value)), Path(_WORKDIR.value)
    entered = [name for file in _ENCODING.value for name in encodings.load(file)]
    if entered:
        cells = [cell for cell in cells if cell.label not in entered]
        if not cells:
            raise ConfigError(
                f"all cells of {_GRID.value} are of --encoding: load the file in the grid, with "
                "cj.encodings.load, or add cells of another encoding"
            )
        finished = [cell for cell in cells if (cell.folder(workdir) / "result.json").exists()]
        known = [search.recorded(cell, workdir) for cell in finished]
        cells = [*known, *entries(cells, entered)]
    if len(cells) > FEW:
        print(f"checking {len(cells):,} cells", file=sys.stderr)
    Grid(workdir, cells).check()
    trials = Grid(workdir, search.trials(cells))
    trials.check()
    engine = engine_flags.choose(workdir)
    with contextlib.nullcontext() if _DRY_RUN.value else Workdir(workdir).locked():
        stopped, missing = None, search.left(trials, _ONLY_FAILED.value)
        if missing:
            line = f"{len(trials.state().finished)} finished, {len(missing)} to train before the other cells"
            print(f"{len(trials.cells)} trials ({search.budget(cells)}): {line}", file=sys.stderr)
            stopped = train(trials, missing, engine)
        tried = State([], {}, []) if _DRY_RUN.value else trials.state()
        blocked = search.blocked(cells, tried, workdir)
        waiting = {*blocked.failed, *blocked.left}
        free = [cell for cell in cells if cell not in waiting]
        for line in () if search.left(trials) else search.choices(free, workdir):
            print(line, file=sys.stderr)
        grid = Grid(workdir, [search.choose(cell, workdir)[0] for cell in free])
        state = grid.state()
        todo = [
            cell
            for cell in grid.cells
            if cell in state.failed or (cell in state.left and not _ONLY_FAILED.value)
        ]
        announce(len(cells), grid, state, todo, missing if _DRY_RUN.value else [])
        if _DRY_RUN.value:
            return
        stopped = stopped or train(grid, todo, engine)
        state = grid.state()
        state.failed |= blocked.failed
        state.left += blocked.left
        show(grid, state, search.budget(cells), entered)
    if stopped is not None:
        raise stopped
    if state.failed or state.left:
        again = "rerun the same command"
        if _ONLY_FAILED.value and state.left:
            again = "rerun without --only_failed"
        counts = ((len(state.failed), "failed"), (len(state.left), "not trained yet"))
        parts = [f"{count} cell{'s' * (count > 1)} {outcome}" for count, outcome in counts if count]
        hint = "log.txt in the folder of a cell has its output"
        print(f"{', '.join(parts)}: {again} to train them; {hint}", file=sys.stderr)
        sys.exit(1)


def train(grid: Grid, cells: list[Cell], start: Callable[[int], Engine]) -> Interrupted | None:
    """Trains cells on the engine that `start` starts; returns the signal that stopped them."""
    try:
        if cells and not _DRY_RUN.value:
            engine = start(engine_flags.slots(len(cells)))
            limit = engine_flags.TIME_LIMIT.value
            grid.train(engine=engine, cells=cells, time_limit=limit, stop_at_failure=False)
    except Interrupted as stopped:
        return stopped
    return None


def announce(total: int, grid: Grid, state: State, todo: list[Cell], trials: list[Cell]) -> None:
    """Prints how many cells are finished, and how long the others and the trials will take."""
    at_a_time = engine_flags.slots(len(todo))
    counts = [f"{total} cells", f"{len(state.finished)} finished", f"{len(state.failed)} failed"]
    line = f"{', '.join(counts)}, {len(todo)} to train, {at_a_time} at a time"
    seconds = grid.seconds_left([*todo, *trials], state.finished)
    if todo:
        time = "unknown until a cell is finished"
        if seconds is not None:
            time = tqdm.format_interval(seconds / at_a_time)
        line += f"; estimated time of training: {time}"
    print(line, file=sys.stderr)


def show(grid: Grid, state: State, budget: str, entered: Sequence[str]) -> None:
    """Writes the results of finished cells, names the others, and prints the ranks of the encodings
    `entered`; `budget` is of the search.
    """
    for cell, line in state.failed.items():
        print(f"failed: {cell.name}: {line}", file=sys.stderr)
    if not state.finished:
        print("no cell is finished, so there are no results", file=sys.stderr)
        return
    tables, (page, *paths) = grid_report.write_all(grid, state, budget)
    for view, columns in tables.cells.items():
        for name in (name for name in entered if name in columns.get(RANK, ())):
            print(f"{name}, {view}: {', '.join(columns[RANK][name].tip.splitlines())}")
    waiting = {cell.label for cell in (*state.failed, *state.left)}
    for name in (name for name in entered if name not in waiting):
        cells = [cell for cell in state.finished if cell.label == name]
        path = grid.workdir / f"{name}.tar.xz"
        paths.append(archive.pack(grid.workdir, cells, path, Path(_GRID.value).stem))
    outputs.list_files(paths)
    print(f"all results as a page: {shown(page)}")
