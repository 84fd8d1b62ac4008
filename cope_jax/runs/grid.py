"""Cells: the runs of a command that trains several configs with several seeds, each finished once and kept."""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from cope_jax import tasks
from cope_jax.runs import records, warm_start
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.load import check_alike, keep_files
from cope_jax.tasks import Task
from cope_jax.training import distributed
from cope_jax.training.config import ExperimentConfig
from cope_jax.training.experiment import Experiment


@dataclasses.dataclass(frozen=True)
class Cell:
    """One config, by its label, with the seeds that are trained side by side."""

    label: str
    seeds: tuple[int, ...]
    workdir: Path

    @property
    def result(self) -> Path:
        return self.workdir / "result.json"


def train_missing(configs: Mapping[str, ExperimentConfig], cells: Sequence[Cell], workdir: Path) -> None:
    """Trains the cells that have no result, with a program for all of a label's that are of one width.

    Args:
      configs: by label.
      cells: from `plan`.
      workdir: where results.json and results.csv of all that is finished are kept.
    """
    environment = records.environment()  # now, since the checkout may change while this runs
    compiled: dict[tuple[str, int], Experiment] = {}
    made: dict[str, Task] = {}  # the last, for reading and cutting up a long text takes minutes
    for cell in cells:  # what is kept must be of the same config, or old figures would pass for new ones
        if cell.result.exists() and distributed.is_first():
            workdirs.open_workdir(cell.workdir, configs[cell.label], cell.seeds)
    for number, cell in enumerate(cells, start=1):
        if cell.result.exists():
            continue
        width = len(cell.seeds)
        if (cell.label, width) not in compiled:
            config = configs[cell.label]
            if repr(config.task) not in made:
                made = {repr(config.task): tasks.create(config.task.name, **config.task.options)}
                check_alike(made[repr(config.task)])
            compiled = {(cell.label, width): Experiment(config, width, made[repr(config.task)])}
        seeds = f"seed {cell.seeds[0]}" if width == 1 else f"seeds {cell.seeds[0]}–{cell.seeds[-1]}"
        label = f"[{number}/{len(cells)}] {cell.label}, {seeds}"
        train(cell, compiled[cell.label, width], label, environment)
        if distributed.is_first():
            write_results(workdir, [cell for cell in cells if cell.result.exists()])


def plan(labels: Sequence[str], seeds: int, width: int, workdir: Path) -> list[Cell]:
    """All cells: those that stand in the workdir, and the seeds that are missing in groups of `width`."""
    cells = []
    for label in labels:
        folder = workdir / "cells" / re.sub(r"[^\w=.+-]+", "_", label).strip("_")
        groups = [group for group in (seeds_of(path) for path in folder.glob("seed*")) if group and group[-1] < seeds]
        held = {seed for group in groups for seed in group}
        new: list[tuple[int, ...]] = []
        for seed in (seed for seed in range(seeds) if seed not in held):
            follows = new and seed == new[-1][-1] + 1 and len(new[-1]) < width
            new[-1:] = [(*new[-1], seed)] if follows else [*new[-1:], (seed,)]
        groups += new
        for group in sorted(groups):
            name = f"seed_{group[0]}" if len(group) == 1 else f"seeds_{group[0]}-{group[-1]}"
            cells.append(Cell(label, group, folder / name))
    return cells


def seeds_of(folder: Path) -> tuple[int, ...]:
    """The seeds in the name of a cell's folder.

    >>> seeds_of(Path("cells/cope/seeds_3-5"))
    (3, 4, 5)
    """
    match = re.fullmatch(r"seeds?_(\d+)(?:-(\d+))?", folder.name)
    return tuple(range(int(match[1]), int(match[2] or match[1]) + 1)) if match else ()


def train(cell: Cell, experiment: Experiment, label: str, environment: records.Record) -> None:
    """Trains one cell and keeps its result, with the environment in which it was trained."""
    with distributed.first_goes_ahead() as first:
        if first:
            workdirs.open_workdir(cell.workdir, experiment.config, cell.seeds, environment)
            keep_files(experiment.task, cell.workdir)
    start = functools.partial(warm_start.start_of, experiment.config, experiment)
    result = experiment.train(cell.seeds, cell.workdir, label, start=start)
    if cell.label != experiment.config.encoding:
        result = [{"system": cell.label, **record} for record in result]
    if first:
        workdirs.write_json(cell.result, {"records": result, "environment": environment})


def write_results(workdir: Path, cells: Sequence[Cell]) -> tuple[list[records.Record], list[Path]]:
    """Writes results.json and results.csv of finished cells. Returns the records and the paths."""
    results = [workdirs.read_json(cell.result, "records", "environment") for cell in cells]
    finished = [record for result in results for record in result["records"]]
    environments = [result["environment"] for result in results]
    different = [other for n, other in enumerate(environments) if other not in environments[:n]]
    # Cells that were trained elsewhere, or at another commit, keep their own environment on record.
    others = {"others": different[1:]} if different[1:] else {}
    return finished, records.write_results(workdir, finished, {**different[0], **others})
