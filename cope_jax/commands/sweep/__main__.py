r"""Trains all cells of a grid, on this machine or on many, and shows all results.

cope-jax sweep --grid=abilities --workdir=runs/abilities --dry_run
cope-jax sweep --grid=experiments/grids/abilities.py --workdir=runs/abilities

A grid file yields cells: a config, an encoding and a seed each. A cell is a run of cope-jax train in a process of
its own, in the folder SETTING/cells/ENCODING/seed_N. What is finished is known from these folders, so you can interrupt
the command at any time and rerun it, also with another engine. A cell that fails does not stop the others;
--only_failed trains such cells again. More is in docs/grids.md.
"""

import contextlib
import re
import sys
from pathlib import Path

from absl import flags
from tqdm import tqdm

import cope_jax
from cope_jax.cli import jobs, outputs
from cope_jax.commands.sweep import cells as reading
from cope_jax.commands.sweep import engines, report, search
from cope_jax.commands.sweep.drive import drive, jobs_of
from cope_jax.errors import ConfigError
from cope_jax.registry import unknown
from cope_jax.runs import grid as grids
from cope_jax.runs import records as recording
from cope_jax.runs import workdir as workdirs
from cope_jax.runs import workers
from cope_jax.storage.mirror import Mirror, shown
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
    """Trains the cells that are left, then writes all results."""
    grid, workdir = reading.read(find(_GRID.value)), Path(_WORKDIR.value)
    reading.check(grid)
    trial_cells = search.trials(grid)
    reading.check(trial_cells)
    options = check_engine()
    with contextlib.nullcontext() if _DRY_RUN.value else workdirs.Workdir(workdir).locked():
        trials = reading.state(trial_cells, workdir)
        missing = [trial for trial in trials.failed if not search.diverged(trial, workdir)]
        missing += [] if _ONLY_FAILED.value else trials.left
        number = None
        if missing:
            trained = f"{len(trials.finished)} finished, {len(missing)} to train before the other cells"
            print(f"{len(trial_cells)} trials ({search.budget(grid)}): {trained}", file=sys.stderr)
            if not _DRY_RUN.value:
                number = train(missing, trials, options, workdir)
                trials = reading.state(trial_cells, workdir)
        held = {} if _DRY_RUN.value else {cell: search.missing(cell, trials, workdir) for cell in grid}
        blocked = {cell: line for cell, line in held.items() if line}
        cells = [search.chosen(cell, workdir) for cell in grid if cell not in blocked]
        if not missing:
            for line in search.choices(cells, grid):
                print(line, file=sys.stderr)
        state = reading.state(cells, workdir)
        todo = list(state.failed) if _ONLY_FAILED.value else [c for c in cells if c in state.failed or c in state.left]
        slots = slots_of_engine(len(todo))
        announce(grid, state, todo, slots, workdir)
        if _DRY_RUN.value:
            return
        if todo and number is None:
            number = train(todo, state, options, workdir)
            state = reading.state(cells, workdir)
        if number is None:
            state.failed |= blocked
        else:
            state.left += blocked
        show(state, workdir, search.budget(grid))
    if number is not None:
        raise Interrupted(
            f"stopped; {len(state.finished)} of {len(grid)} cells are finished; rerun the same command to resume",
            number,
        )
    if state.failed or state.left:
        again = "rerun without --only_failed" if _ONLY_FAILED.value and state.left else "rerun the same command"
        hint = f": {again} to train them; log.txt in the folder of a cell has its output"
        counts = ((len(state.failed), "failed"), (len(state.left), "not trained yet"))
        told = [f"{count} cell{'s' * (count > 1)} {what}" for count, what in counts if count]
        print(f"{', '.join(told)}{hint}", file=sys.stderr)
        sys.exit(1)


def find(name: str) -> str:
    """The path of a grid that is given by name or path."""
    known = {
        file.stem: str(file) for file in (Path(cope_jax.__file__).parents[1] / "experiments" / "grids").glob("*.py")
    }
    if name not in known and not Path(name).is_file() and "/" not in name and not name.endswith(".py"):
        raise ConfigError(f"{unknown('grid', name, known)}; or give the path of a grid file, such as ./{name}.py")
    return known.get(name, name)


def slots_of_engine(todo: int) -> int:
    """The number of cells at the same time."""
    if (given := jobs.given()) is not None:
        return given
    here = _ENGINE.value == "local"
    return max(1, min(todo, engines.default_slots(_CORES.value, _GPUS.value) if here else 1000))


def announce(
    cells: list[reading.Cell], state: reading.State, todo: list[reading.Cell], slots: int, workdir: Path
) -> None:
    """Prints how many cells are finished, and how long the others will take."""
    parts = [f"{len(cells)} cells", f"{len(state.finished)} finished", f"{len(state.failed)} failed"]
    line = f"{', '.join(parts)}, {len(todo)} to train, {slots} at a time"
    seconds = reading.seconds_left(todo, state.finished, workdir)
    if todo:
        time = "unknown until a cell is finished" if seconds is None else tqdm.format_interval(seconds / slots)
        line += f"; estimated time of training: {time}"
    print(line, file=sys.stderr)


def train(todo: list[reading.Cell], state: reading.State, options: dict[str, float | str], workdir: Path) -> int | None:
    """Trains cells; returns the signal that stopped them, or None."""
    local = _ENGINE.value == "local"
    needs = {"cores": _CORES.value, "devices": _GPUS.value if local else 0, "time_limit": _TIME_LIMIT.value}
    expected = {
        cell: seconds
        for cell in todo
        if state.finished and (seconds := reading.seconds_left([cell], state.finished, workdir)) is not None
    }
    return drive(list(jobs_of(todo, workdir, **needs)), engine(slots_of_engine(len(todo)), options, workdir), expected)


def check_engine() -> dict[str, float | str]:
    """Checks the flags of the engine, and returns --resources."""
    options = read_resources(_RESOURCES.value)
    if _ENGINE.value == "local" and (options or _ADDRESS.value):
        raise ConfigError("--resources and --address are for --engine=ray and --engine=slurm: omit them")
    if _ENGINE.value == "local" and _CORES.value > workers.cores():
        raise ConfigError(f"a cell needs {_CORES.value} cores, but this machine shows {workers.cores()}: lower --cores")
    if _ENGINE.value == "local":
        engines.default_slots(_CORES.value, _GPUS.value)  # the machine may have too few GPUs
    if _ENGINE.value != "local" and (mirror := Mirror.of(Path(_WORKDIR.value))):
        raise ConfigError(
            f"{mirror.bucket.url} is in a bucket: use --engine=local, or a folder that all machines share"
        )
    if _ENGINE.value == "ray" and (wrong := [name for name, value in options.items() if isinstance(value, str)]):
        raise ConfigError(f"--resources={wrong[0]}=… must be a number for Ray")
    return options


def engine(slots: int, options: dict[str, float | str], workdir: Path) -> engines.Engine:
    """The engine of the flags."""
    if _ENGINE.value == "local":
        return engines.Local(slots)
    if _ENGINE.value == "ray":
        resources = {name: float(value) for name, value in options.items()}
        return engines.Ray(slots, _ADDRESS.value, _CORES.value, _GPUS.value, resources)
    own = {name: value for name, value in options.items() if name != "cluster"}
    cluster = str(options.get("cluster", "slurm"))
    return engines.Slurm(slots, workdir / "slurm", _CORES.value, _GPUS.value, own, cluster)


def read_resources(texts: list[str]) -> dict[str, float | str]:
    """Reads NAME=VALUE of --resources.

    >>> read_resources(["TPU=4", "disk=0.5", "slurm_partition=gpu"])
    {'TPU': 4, 'disk': 0.5, 'slurm_partition': 'gpu'}
    """
    found: dict[str, float | str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise ConfigError(f"--resources takes NAME=VALUE, not {text!r}")
        found[name] = (
            int(value) if value.isdecimal() else float(value) if re.fullmatch(r"-?[0-9]*\.?[0-9]+", value) else value
        )
    return found


def show(state: reading.State, workdir: Path, budget: str) -> None:
    """Writes the results of all finished cells, and names the others; `budget` says what was searched."""
    for cell, line in state.failed.items():
        print(f"failed: {cell.name}: {line}", file=sys.stderr)
    if not state.finished:
        print("no cell is finished, so there are no results", file=sys.stderr)
        return
    records = reading.records(state.finished, workdir)
    environment = grids.environment([cell.folder(workdir) / "result.json" for cell in state.finished])
    paths = recording.write_results(workdir, records, environment)
    page, *tables = report.write(state, records, environment, workdir, budget)
    outputs.list_files([*paths, *tables])
    print(f"all results as a page: {shown(page)}")
