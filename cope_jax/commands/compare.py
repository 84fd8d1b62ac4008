r"""Compares encodings on one task: trains each with several seeds, and shows errors in a table and plots.

cope-jax compare --config=quick --encodings=cope,rope,relative,learned --seeds=1 \
    --workdir=runs/quick

Every finished run is kept, and the current run keeps its newest checkpoint. After an interruption, the same command
resumes and gives the same numbers. You can add encodings and seeds later. The table and plots show only the encodings
and seeds that the command names.

Writes report.html, a page with all results, results.json, results.csv, table.md, table.tex and plots into the workdir.
The folder of a run is cells/ENCODING/seed_N, or seeds_M-N for seeds that are trained together. cope-jax evaluate and
cope-jax inspect accept this folder in --model.
"""

import contextlib
import dataclasses
import functools
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from ml_collections import config_flags

from cope_jax import encodings, tasks
from cope_jax.cli import distributed, entry, jobs, outputs
from cope_jax.cli.flag_values import read_names
from cope_jax.evaluation.report import comparison, grid_cells, grid_table, page, plots
from cope_jax.evaluation.report.grid_cells import Tables
from cope_jax.evaluation.report.page import PageRun
from cope_jax.evaluation.report.table import console
from cope_jax.runs import grid
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.experiment import Experiment
from cope_jax.runs.grid import GridRun
from cope_jax.runs.records import Record
from cope_jax.storage.files import write_atomically
from cope_jax.storage.mirror import shown
from cope_jax.tasks import Task
from cope_jax.training import metrics, processes
from cope_jax.training.experiment_config import ExperimentConfig

_CONFIG = entry.DEFINE_config("config", what="Config of the task, model and training (required). ")
_ENCODINGS = flags.DEFINE_string(
    "encodings",
    "cope,rope,relative,learned",
    'Encodings to compare, separated by commas. Options go in parentheses, as in "cope(gate=value)"; "cope+rope" '
    "combines two encodings.",
)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Number of seeds per encoding; N means the seeds 0 to N−1.", lower_bound=1)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for results, plots and checkpoints (required).", required=True)
flags.mark_flag_as_required("config")
flags.adopt_module_key_flags(distributed)
flags.adopt_module_key_flags(jobs)

SAME_RECIPE = r"evaluation\..*|job\..*|seeds_side_by_side|task\.options\.(data_dir|vocab)|training\.readers"
"""Config fields that do not change the recipe: where files are, how runs are executed, and how much is measured."""


def main() -> None:
    """Trains the runs that are not finished, then shows all results."""
    config = entry.read_config(_CONFIG.value)
    workdir = Path(_WORKDIR.value)
    known = functools.partial(encodings.EncodingConfig.parse, defaults=config.encodings)
    labels = read_names("encodings", _ENCODINGS.value, known)
    distributed.join()
    experiment = {label: dataclasses.replace(config, encoding=label) for label in labels}
    task = tasks.create(config.task.name, **config.task.options)
    for label in labels:  # finds all mistakes in the config before training starts
        Experiment.check(experiment[label], task)
    plan = functools.partial(grid.plan, labels, _SEEDS.value, side_by_side(config), workdir)
    with contextlib.ExitStack() as stack:
        with processes.first_goes_ahead() as first:
            if first:
                stack.enter_context(workdirs.Workdir(workdir).locked())
                grid.check_finished(experiment, plan())  # before the workdir is taken for this config
                workdirs.Workdir(workdir).open(config)
                if task.origin():
                    print(f"{task.name}: {task.origin()}")
        workdirs.Workdir(workdir).follow_first()
        planned = plan()
        grid.train_missing(experiment, planned, workdir, jobs.number(len(planned)))
        if first:
            show(workdir, config, task, labels, planned)


def side_by_side(config: ExperimentConfig) -> int:
    """The number of seeds to train in one program. Default: 1 on a CPU, where vmap over seeds is slower, else all."""
    return config.seeds_side_by_side or (1 if jax.default_backend() == "cpu" else _SEEDS.value)


def show(
    workdir: Path, config: ExperimentConfig, task: Task, labels: Sequence[str], planned: Sequence[GridRun]
) -> None:
    """Writes the results, the table and the plots of all cells, and prints the table."""
    finished, paths = grid.write_results(workdir, planned)
    paper = {} if is_changed() else config.paper
    paths.append(write_atomically(workdir / "table.md", comparison.markdown(task, finished, labels, paper)))
    tables = grid_cells.create([{"setting": task.name, **record} for record in finished], {task.name: task})
    paths.append(write_atomically(workdir / "table.tex", grid_table.latex(tables)))
    curves = curves_of_cells(planned)
    written = write_page(workdir, config, tables, curves, planned)
    drawn, skipped = plots.write_plots(workdir, task, finished, curves, labels, config.model.name)
    out = console()
    out.print(comparison.table(task, finished, labels, paper=paper).rich())
    out.print(*map(shown, paths), *map(shown, drawn), *skipped, sep="\n", soft_wrap=True, highlight=False)
    out.print(f"all results as a page: {shown(written)}", soft_wrap=True, highlight=False)
    displayed = {run.workdir.parent.name for run in planned}
    if others := {path.parts[-3] for path in workdir.glob("cells/*/*/result.json")} - displayed:
        print(f"finished in {shown(workdir)} but not shown: {', '.join(sorted(others))} (name them in --encodings too)")
    outputs.name_next(planned[0].workdir, config.model.name)


def write_page(
    workdir: Path, config: ExperimentConfig, tables: Tables, curves: Sequence[Record], planned: Sequence[GridRun]
) -> Path:
    """Writes report.html."""
    name = config.task.name
    runs = [
        PageRun(name, run.label, seed, command(run), run.workdir.relative_to(workdir).as_posix(), "finished")
        for run in planned
        for seed in run.seeds
    ]
    rows = ({"setting": name, **row} for row in curves)
    facts = page.versions(grid.environment([run.result for run in planned]))
    return page.write(
        workdir / "report.html", ", ".join(filter(None, (name, config.variant))), tables, rows, runs, facts
    )


def command(run: GridRun) -> str:
    """The command that trains a run. Seeds that trained side by side need this command."""
    if len(run.seeds) > 1:
        return shlex.join(["python", "-m", "cope_jax", "compare", *sys.argv[1:]])
    changed = config_flags.get_override_values(flags.FLAGS["config"])
    fields = [f"--config.{name}={value}" for name, value in changed.items()]
    given = [
        f"--config={config_flags.get_config_filename(flags.FLAGS['config'])}",
        *fields,
        f"--config.encoding={run.label}",
        f"--seed={run.seeds[0]}",
    ]
    return shlex.join(["python", "-m", "cope_jax", "train", *given, f"--workdir={run.workdir}"])


def is_changed() -> bool:
    """Whether flags change the recipe of the config file. If so, results are not comparable with the paper's."""
    changed = config_flags.get_override_values(flags.FLAGS["config"])
    return not all(re.fullmatch(SAME_RECIPE, name) for name in changed)


def curves_of_cells(planned: Sequence[GridRun]) -> list[dict[str, Any]]:
    """Reads the learning curves of all cells."""
    return [
        {"encoding": cell.label, **row}
        for cell in planned
        for row in metrics.read_curves(cell.workdir / "metrics.jsonl")
    ]
