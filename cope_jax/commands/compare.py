r"""Compares encodings on one task, each with several seeds, and shows errors in a table and plots.

cope-jax compare --config=quick --encodings=cope,rope,relative,learned --seeds=1 \
    --workdir=runs/quick

Every finished cell (an encoding with a seed) is kept, and the others keep their newest checkpoint.
After an interruption, the same command resumes and gives the same numbers. You can add encodings
and seeds later. The table and plots show only the encodings and seeds that the command names.

Writes report.html, a page with all results, results.json, results.csv, table.md, table.tex and
plots into the workdir. The folder of a cell is cells/ENCODING/seed_N, or seeds_M-N for seeds that
are trained together. cope-jax evaluate and cope-jax inspect accept this folder in --model.
"""

import contextlib
import dataclasses
import functools
import re
from pathlib import Path

import jax
from absl import flags

from cope_jax import encodings
from cope_jax.cli import common_flags, config_flags, distributed, jobs, outputs
from cope_jax.cli.flag_values import read_names
from cope_jax.errors import Interrupted
from cope_jax.evaluation.report import comparison, grid_report, plots
from cope_jax.evaluation.report.table import console
from cope_jax.runs.experiment import Experiment
from cope_jax.runs.grid.cell import plan
from cope_jax.runs.grid.grid import Grid
from cope_jax.runs.workdir import Workdir
from cope_jax.storage.files import write_atomically
from cope_jax.storage.mirror import shown
from cope_jax.tasks import Task
from cope_jax.training import processes
from cope_jax.training.experiment_config import ExperimentConfig

_CONFIG = config_flags.DEFINE_config(
    "config", purpose="Config of the task, model and training (required). "
)
_ENCODINGS = flags.DEFINE_string(
    "encodings",
    "cope,rope,relative,learned",
    'Encodings to compare, separated by commas. Options go in parentheses, as in "cope(gate=value)"; "cope+rope" '
    "combines two encodings.",
)
_SEEDS = common_flags.DEFINE_count(
    "seeds", 3, "Number of seeds per encoding; N means the seeds 0 to N−1."
)
common_flags.DEFINE_encoding()
_WORKDIR = common_flags.DEFINE_workdir("Folder for results, plots and checkpoints (required).")
flags.mark_flag_as_required("config")
flags.adopt_module_key_flags(distributed)
flags.adopt_module_key_flags(jobs)

SAME_RECIPE = (
    r"evaluation\..*|job\..*|seeds_side_by_side|task\.options\.(data_dir|vocab)|training\.readers"
)
"""Config fields that do not change the recipe: places of files, execution, what is measured."""


def main() -> None:
    """Trains the cells that are not finished, then shows all results."""
    config, workdir = config_flags.read_config(_CONFIG.value), Path(_WORKDIR.value)
    known = functools.partial(encodings.EncodingConfig.parse, defaults=config.encodings)
    labels = read_names("encodings", _ENCODINGS.value, known)
    common_flags.check_files(labels, "encodings")
    configs = {label: dataclasses.replace(config, encoding=label) for label in labels}
    distributed.join()
    task = config.task.create()
    for of_label in configs.values():  # finds all mistakes in the config before training starts
        Experiment.check(of_label, task)
    # On a CPU, vmap over seeds is slower than one seed after the other.
    width = config.seeds_side_by_side or (1 if jax.default_backend() == "cpu" else _SEEDS.value)
    planned = functools.partial(plan, configs, _SEEDS.value, width, workdir)
    with contextlib.ExitStack() as stack:
        with processes.first_goes_ahead() as first:
            if first:
                stack.enter_context(Workdir(workdir).locked())
                Grid(workdir, planned()).state()  # before the workdir is taken for this config
                Workdir(workdir).open(config)
                if task.origin():
                    print(f"{task.name}: {task.origin()}")
        Workdir(workdir).follow_first()
        grid = Grid(workdir, planned())
        stopped = None
        try:
            grid.train(jobs.number(len(grid.cells)), finished=grid.write_results if first else None)
        except Interrupted as interrupted:
            stopped = interrupted
        if first and (finished := grid.state().finished):
            show(Grid(workdir, finished), config, task)
    if stopped is not None:
        raise stopped


def show(grid: Grid, config: ExperimentConfig, task: Task) -> None:
    """Writes the results, the tables and the plots of the grid, and prints the table."""
    labels = list(dict.fromkeys(cell.label for cell in grid.cells))
    records, paths = grid.records(), grid.write_results()
    paper = {} if is_changed() else config.paper
    text = comparison.markdown(task, records, labels, paper)
    paths.append(write_atomically(grid.workdir / "table.md", text))
    model, title = config.model.name, ", ".join(filter(None, (task.name, config.variant)))
    _, (page, latex) = grid_report.write(grid, grid.state(), {"": task}, title)
    curves = list(grid_report.curves(grid, grid.cells))
    drawn, skipped = plots.write_plots(grid.workdir, task, records, curves, labels, model)
    out = console()
    out.print(comparison.table(task, records, labels, paper=paper).rich())
    lines = [*map(shown, [*paths, latex, *drawn]), *skipped]
    out.print(*lines, sep="\n", soft_wrap=True, highlight=False)
    out.print(f"all results as a page: {shown(page)}", soft_wrap=True, highlight=False)
    displayed = {cell.folder(grid.workdir).parent.name for cell in grid.cells}
    if (
        others := {path.parts[-3] for path in grid.workdir.glob("cells/*/*/result.json")}
        - displayed
    ):
        line = f"but not shown: {', '.join(sorted(others))} (name them in --encodings too)"
        print(f"finished in {shown(grid.workdir)} {line}")
    outputs.name_next(grid.cells[0].folder(grid.workdir), grid.cells[0].config)


def is_changed() -> bool:
    """True if flags change the recipe: results are then not comparable with the paper's."""
    names = config_flags.overrides("config")
    return not all(re.fullmatch(SAME_RECIPE, name) for name in names)
