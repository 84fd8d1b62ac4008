r"""Compares encodings on one task: trains each with several seeds, and shows errors in a table and plots.

python -m experiments.compare --config=experiments/configs/quick.py --encodings=cope,rope,relative,learned --seeds=1 \
    --workdir=runs/quick

Every finished cell (an encoding with its seeds) is kept, and so is the newest checkpoint of the one at work: after an
interruption the same command goes on, with the same numbers. Encodings and seeds may be added later; what is shown
are those that the command names.

Writes results.json, results.csv, table.md and plots into the workdir; each run is in cells/ENCODING/seed_N and can be
given to experiments.evaluate and experiments.inspect.
"""

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from ml_collections import config_flags
from rich.console import Console

from cope_jax import encodings, tasks
from cope_jax.errors import ConfigError
from cope_jax.evaluation import plots, records, tables
from cope_jax.training.config import ExperimentConfig
from cope_jax.training.metrics import read_metrics
from experiments import common, entry, processes
from experiments import workdir as workdirs

_CONFIG = config_flags.DEFINE_config_file("config", None, "A file of experiments/configs.")
_ENCODINGS = flags.DEFINE_string(
    "encodings", "cope,rope,relative,learned", 'Encodings, such as "cope,rope" or "cope(gate=value),cope+rope".'
)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds 0 … N−1 of each encoding.", lower_bound=1)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for results, plots and checkpoints.", required=True)
flags.mark_flag_as_required("config")
flags.adopt_module_key_flags(processes)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One encoding with the seeds that are trained side by side."""

    encoding: str
    seeds: tuple[int, ...]
    workdir: Path

    @property
    def result(self) -> Path:
        return self.workdir / "result.json"


def main() -> None:
    """Trains what is missing, then shows everything."""
    config = entry.read_config(_CONFIG.value)
    workdir = Path(_WORKDIR.value)
    labels = read_encodings(_ENCODINGS.value, config)
    processes.join()
    experiment = {label: dataclasses.replace(config, encoding=label) for label in labels}
    for label in labels:  # all mistakes in the config show before the first hour of training
        common.Experiment.check(experiment[label])
    with contextlib.ExitStack() as stack:
        with processes.first_goes_ahead() as first:
            if first:
                stack.enter_context(workdirs.locked(workdir))
                workdirs.open_workdir(workdir, config)
        cells = plan(labels, _SEEDS.value, side_by_side(config), workdir)
        train_missing(experiment, cells, workdir)
        if first:
            show(workdir, config, labels, cells, Console())


def train_missing(experiment: Mapping[str, ExperimentConfig], cells: Sequence[Cell], workdir: Path) -> None:
    """Trains the cells that have no result, with a program for all of an encoding's that are of one width."""
    environment = records.environment()  # now, since the checkout may change while this runs
    compiled: dict[tuple[str, int], common.Experiment] = {}
    for number, cell in enumerate(cells, start=1):
        if cell.result.exists():
            continue
        width = len(cell.seeds)
        if (cell.encoding, width) not in compiled:
            compiled = {(cell.encoding, width): common.Experiment(experiment[cell.encoding], width)}
        seeds = f"seed {cell.seeds[0]}" if width == 1 else f"seeds {cell.seeds[0]}–{cell.seeds[-1]}"
        label = f"[{number}/{len(cells)}] {cell.encoding}, {seeds}"
        train(cell, compiled[cell.encoding, width], label, environment)
        if processes.is_first():
            write_results(workdir, [cell for cell in cells if cell.result.exists()])


def read_encodings(text: str, config: ExperimentConfig) -> list[str]:
    """The encodings of the flag; ConfigError for an unknown or a repeated one."""
    labels = [label.strip() for label in encodings.split_outside_parentheses(text, ",")]
    for label in labels:
        encodings.EncodingConfig.parse(label, config.encodings)
        if labels.count(label) > 1:
            raise ConfigError(f"--encodings names {label!r} twice")
    return labels


def side_by_side(config: ExperimentConfig) -> int:
    """Seeds to train in one program: on a CPU vmap over seeds is slower than one after the other."""
    if config.seeds_side_by_side:
        return config.seeds_side_by_side
    return 1 if jax.default_backend() == "cpu" else _SEEDS.value


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


def train(cell: Cell, experiment: common.Experiment, label: str, environment: records.Record) -> None:
    """Trains one cell and keeps its result, with the environment in which it was trained."""
    with processes.first_goes_ahead() as first:
        if first:
            workdirs.open_workdir(cell.workdir, experiment.config, cell.seeds, environment)
    result = experiment.train(cell.seeds, cell.workdir, label)
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


def show(
    workdir: Path, config: ExperimentConfig, labels: Sequence[str], cells: Sequence[Cell], console: Console
) -> None:
    """Writes results, table and plots of all cells, and prints the table."""
    finished, paths = write_results(workdir, cells)
    task = tasks.create(config.task.name, **config.task.options)
    paper = {} if is_changed() else config.paper
    paths.append(records.write_atomically(workdir / "table.md", tables.markdown(task, finished, labels, paper)))
    drawn, skipped = plots.write_plots(workdir, task, finished, read_curves(cells), labels)
    console.print(tables.rich_table(task, finished, labels, paper=paper))
    console.print(*paths, *drawn, *skipped, sep="\n", soft_wrap=True, highlight=False)


def is_changed() -> bool:
    """Whether flags change the recipe of the config file, so that the paper's figures do not belong beside ours."""
    changed = config_flags.get_override_values(flags.FLAGS["config"])
    return any(not name.startswith(("evaluation.", "seeds_side_by_side")) for name in changed)


def read_curves(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The learning curves of all cells."""
    return [
        {"encoding": cell.encoding, **row}
        for cell in cells
        for row in read_metrics(cell.workdir / "metrics.jsonl")
        if "split" in row
    ]


if __name__ == "__main__":
    entry.run(main)
