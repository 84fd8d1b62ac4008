"""Compares encodings on one task: trains each with several seeds, and shows errors in a table and plots.

python -m experiments.compare --config=experiments/configs/quick.py --encodings=cope,rope,relative,learned --seeds=1
--workdir=runs/quick

Every finished cell (an encoding with its seeds) is kept, and so is the newest checkpoint of the one at work: after an
interruption the same command goes on, with the same numbers. Encodings and seeds may be added later.

Writes results.json, results.csv, table.md and plots into the workdir; each run is in cells/ENCODING/seed_N and can be
given to experiments.evaluate and experiments.inspect.
"""

import dataclasses
import re
from collections.abc import Sequence
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
from experiments import common

_CONFIG = config_flags.DEFINE_config_file("config", None, "A file of experiments/configs.")
_ENCODINGS = flags.DEFINE_string(
    "encodings", "cope,rope,relative,learned", 'Encodings, such as "cope,rope" or "cope(gate=value),cope+rope".'
)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds 0 … N−1 of each encoding.", lower_bound=1)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for results, plots and checkpoints.", required=True)
flags.mark_flag_as_required("config")


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
    config = common.read_config(_CONFIG.value)
    workdir, console = Path(_WORKDIR.value), Console()
    labels = read_encodings(_ENCODINGS.value, config)
    experiment = {label: dataclasses.replace(config, encoding=label) for label in labels}
    for label in labels:  # all mistakes in the config show before the first hour of training
        common.Experiment.check(experiment[label])
    settings = config.to_dict()
    del settings["encoding"]
    common.open_workdir(workdir, {"config": settings})
    cells = plan(labels, _SEEDS.value, side_by_side(config), workdir)
    done = 0
    for label in labels:
        compiled: dict[int, common.Experiment] = {}
        for cell in [cell for cell in cells if cell.encoding == label]:
            done += 1
            if cell.result.exists():
                continue
            width = len(cell.seeds)
            compiled[width] = compiled.get(width) or common.Experiment(experiment[label], width)
            seeds = f"seed {cell.seeds[0]}" if width == 1 else f"seeds {cell.seeds[0]}–{cell.seeds[-1]}"
            train(cell, compiled[width], f"[{done}/{len(cells)}] {label}, {seeds}")
            show(workdir, config, labels, [cell for cell in cells if cell.result.exists()], None)
    show(workdir, config, labels, cells, console)


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
    """All cells, each encoding's seeds in groups of `width`."""
    cells = []
    for label in labels:
        folder = workdir / "cells" / re.sub(r"[^\w=.+-]+", "_", label).strip("_")
        for first in range(0, seeds, width):
            group = tuple(range(first, min(first + width, seeds)))
            name = f"seed_{first}" if len(group) == 1 else f"seeds_{first}-{group[-1]}"
            cells.append(Cell(label, group, folder / name))
    return cells


def train(cell: Cell, experiment: common.Experiment, label: str) -> None:
    """Trains one cell and keeps its result."""
    common.open_workdir(cell.workdir, {"config": experiment.config.to_dict(), "seeds": list(cell.seeds)})
    result = experiment.train(cell.seeds, cell.workdir, label)
    common.write_json(cell.result, {"records": result, "environment": records.environment()})


def show(
    workdir: Path, config: ExperimentConfig, labels: Sequence[str], cells: Sequence[Cell], console: Console | None
) -> None:
    """Writes results of the finished cells; with a console, also table and plots, and prints."""
    finished = [record for cell in cells for record in common.read_json(cell.result, "records")["records"]]
    paths = records.write_results(workdir, finished, records.environment())
    if console is None:
        return
    task = tasks.create(config.task.name, **config.task.options)
    paths.append(records.write_atomically(workdir / "table.md", tables.markdown(task, finished, labels, config.paper)))
    drawn, skipped = plots.write_plots(workdir, task, finished, read_curves(cells), labels)
    console.print(tables.rich_table(task, finished, labels, paper=config.paper))
    console.print(*paths, *drawn, *skipped, sep="\n", soft_wrap=True, highlight=False)


def read_curves(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The learning curves of all cells."""
    return [
        {"encoding": cell.encoding, **row}
        for cell in cells
        for row in read_metrics(cell.workdir / "metrics.jsonl")
        if "split" in row
    ]


if __name__ == "__main__":
    common.run(main)
