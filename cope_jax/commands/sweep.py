r"""Trains all cells of a grid, on this machine or on many, and shows all results.

cope-jax sweep --grid=abilities --workdir=runs/abilities --dry_run
cope-jax sweep --grid=experiments/grids/abilities.py --workdir=runs/abilities

A grid file yields cells: a config and a seed each. A cell trains in a process of its own, in the folder
SETTING/cells/ENCODING/seed_N. These folders show what is finished, so you can interrupt the command at any time and
rerun it, also with another engine. A cell that fails does not stop the others; --only_failed trains such cells again.
More is in docs/grids.md.
"""

import contextlib
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from absl import flags
from tqdm import tqdm

import cope_jax
from cope_jax import tasks
from cope_jax.cli import jobs, outputs
from cope_jax.errors import ConfigError
from cope_jax.evaluation.report import grid_report, results_table
from cope_jax.evaluation.report.plot_style import save
from cope_jax.registry import unknown
from cope_jax.runs.grid import engines, grid_file, search
from cope_jax.runs.grid.cell import Cell
from cope_jax.runs.grid.grid import Grid, State
from cope_jax.runs.workdir import Workdir
from cope_jax.storage.files import write_atomically
from cope_jax.storage.mirror import shown
from cope_jax.training.preemption import Interrupted

_GRID = flags.DEFINE_string(
    "grid", None, "Name of a grid in experiments/grids, or path of a grid file (required).", required=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for all cells and the results (required).", required=True)
_ENGINE = flags.DEFINE_enum("engine", "local", ["local", "ray", "slurm"], "Where cells run.")
_CORES = flags.DEFINE_integer(
    "cores",
    1,
    "Number of CPU cores of a cell. It decides the rounding, so all cells of a grid must have the same number.",
    lower_bound=1,
)
_GPUS = flags.DEFINE_integer("gpus", 0, "Number of GPUs of a cell.", lower_bound=0)
_RESOURCES = flags.DEFINE_list(
    "resources", [], "What else a cell needs of Ray, such as TPU=4, or options of Slurm, such as slurm_partition=gpu."
)
_ADDRESS = flags.DEFINE_string(
    "address", None, "Address of a Ray cluster, such as auto; without this flag, Ray starts on this machine."
)
_TIME_LIMIT = flags.DEFINE_float(
    "time_limit", None, "Seconds after which a cell is stopped and counts as failed.", lower_bound=1.0
)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Only count the cells, and estimate the time from finished ones.")
_ONLY_FAILED = flags.DEFINE_bool("only_failed", False, "Train only cells that failed before.")
flags.adopt_module_key_flags(jobs)


def main() -> None:
    """Trains the trials that are left, then the other cells, and writes all results."""
    cells, workdir = grid_file.read(find(_GRID.value)), Path(_WORKDIR.value)
    Grid(workdir, cells).check()
    trials = Grid(workdir, search.trials(cells))
    trials.check()
    needs = (_CORES.value, _GPUS.value, _RESOURCES.value, _ADDRESS.value)
    engine = engines.choose(_ENGINE.value, workdir, *needs)
    with contextlib.nullcontext() if _DRY_RUN.value else Workdir(workdir).locked():
        stopped, missing = None, search.left(trials, _ONLY_FAILED.value)
        if missing:
            line = f"{len(trials.state().finished)} finished, {len(missing)} to train before the other cells"
            print(f"{len(trials.cells)} trials ({search.budget(cells)}): {line}", file=sys.stderr)
            stopped = train(trials, missing, engine)
        tried = trials.state()
        blocked = {} if _DRY_RUN.value else search.blocked(cells, tried, workdir)
        free = [cell for cell in cells if cell not in blocked]
        for line in search.choices(free, workdir) if not missing else ():
            print(line, file=sys.stderr)
        grid = Grid(workdir, [search.choose(cell, workdir)[0] for cell in free])
        state = grid.state()
        todo = [cell for cell in grid.cells if cell in state.failed or (cell in state.left and not _ONLY_FAILED.value)]
        announce(len(cells), grid, state, todo)
        if _DRY_RUN.value:
            return
        stopped = stopped or train(grid, todo, engine)
        state = grid.state()
        if stopped is None:
            state.failed |= blocked
        else:
            state.left += blocked
        show(grid, state, search.budget(cells))
    if stopped is not None:
        raise stopped
    if state.failed or state.left:
        again = "rerun without --only_failed" if _ONLY_FAILED.value and state.left else "rerun the same command"
        counts = ((len(state.failed), "failed"), (len(state.left), "not trained yet"))
        parts = [f"{count} cell{'s' * (count > 1)} {what}" for count, what in counts if count]
        print(
            f"{', '.join(parts)}: {again} to train them; log.txt in the folder of a cell has its output",
            file=sys.stderr,
        )
        sys.exit(1)


def find(name: str) -> str:
    """The path of a grid that is given by name or path."""
    known = {
        file.stem: str(file) for file in (Path(cope_jax.__file__).parents[1] / "experiments" / "grids").glob("*.py")
    }
    if name not in known and not Path(name).is_file() and "/" not in name and not name.endswith(".py"):
        raise ConfigError(f"{unknown('grid', name, known)}; or give the path of a grid file, such as ./{name}.py")
    return known.get(name, name)


def slots(cells: int) -> int:
    """The number of cells to train at the same time, at most `cells`."""
    if (given := jobs.given()) is not None:
        return given
    return max(1, min(cells, engines.default_slots(_CORES.value, _GPUS.value) if _ENGINE.value == "local" else 1000))


def train(grid: Grid, cells: list[Cell], start: Callable[[int], engines.Engine]) -> Interrupted | None:
    """Trains cells on the engine that `start` starts; returns the signal that stopped them, or None."""
    try:
        if cells and not _DRY_RUN.value:
            engine = start(slots(len(cells)))
            grid.train(engine=engine, cells=cells, time_limit=_TIME_LIMIT.value, stop_at_failure=False)
    except Interrupted as stopped:
        return stopped
    return None


def announce(total: int, grid: Grid, state: State, todo: list[Cell]) -> None:
    """Prints how many cells are finished, and how long the others will take."""
    at_a_time = slots(len(todo))
    counts = [f"{total} cells", f"{len(state.finished)} finished", f"{len(state.failed)} failed"]
    line = f"{', '.join(counts)}, {len(todo)} to train, {at_a_time} at a time"
    seconds = grid.seconds_left(todo, state.finished)
    if todo:
        time = "unknown until a cell is finished" if seconds is None else tqdm.format_interval(seconds / at_a_time)
        line += f"; estimated time of training: {time}"
    print(line, file=sys.stderr)


def show(grid: Grid, state: State, budget: str) -> None:
    """Writes the results of all finished cells, and names the others; `budget` says what was searched."""
    for cell, line in state.failed.items():
        print(f"failed: {cell.name}: {line}", file=sys.stderr)
    if not state.finished:
        print("no cell is finished, so there are no results", file=sys.stderr)
        return
    settings = {cell.setting: cell.config.task for cell in state.finished}
    made = {setting: tasks.create(task.name, **task.options) for setting, task in settings.items()}
    total = len(state.finished) + len(state.failed) + len(state.left)
    facts = (f"{len(state.finished)} of {total} cells finished, {len(state.failed)} failed", budget)
    title = grid.workdir.resolve().name
    command = shlex.join(["python", "-m", "cope_jax", "sweep", *sys.argv[1:]])
    tables, (page, *paths) = grid_report.write(grid, state, made, lambda _: command, title, facts)
    paths += grid.write_results()
    paths.append(write_atomically(grid.workdir / "table.md", results_table.markdown(tables)))
    paths.append(save(results_table.picture(tables, title), grid.workdir / "table.png"))
    outputs.list_files(paths)
    print(f"all results as a page: {shown(page)}")
