"""Trains a grid of runs: several configs, each with several seeds. Finished runs are not trained again."""

import dataclasses
import hashlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cope_jax import tasks
from cope_jax.runs import records, workers
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.experiment import Experiment
from cope_jax.storage.files import inside
from cope_jax.storage.mirror import shown
from cope_jax.tasks import Task
from cope_jax.training import processes
from cope_jax.training.experiment_config import ExperimentConfig
from cope_jax.training.preemption import Interrupted


@dataclasses.dataclass(frozen=True)
class GridRun:
    """One run of a grid: the label of its config, the seeds trained side by side, and its workdir."""

    label: str
    seeds: tuple[int, ...]
    workdir: Path

    @property
    def result(self) -> Path:
        return self.workdir / "result.json"


def train_missing(
    configs: Mapping[str, ExperimentConfig], runs: Sequence[GridRun], workdir: Path, jobs: int = 1
) -> None:
    """Trains the runs that have no result, at most `jobs` at a time, each in its own process (see `workers`).

    If `jobs` is 1, this process trains them, and consecutive runs with the same label and number of seeds share a
    program. `configs` maps labels to configs, and `runs` is from `plan`. The results of finished runs are written to
    results.json and results.csv in `workdir`. After an interruption, a line on stderr says how many runs are finished.
    """
    try:
        _train_missing(configs, runs, workdir, jobs)
    except (Interrupted, KeyboardInterrupt):
        if processes.is_first():
            finished = sum(run.result.exists() for run in runs)
            print(f"{finished} of {len(runs)} runs in {shown(workdir)} are finished", file=sys.stderr)
        raise


def check_finished(configs: Mapping[str, ExperimentConfig], runs: Sequence[GridRun]) -> None:
    """Raises ConfigError if a finished run has another config; its result must not pass for one of this config."""
    for run in runs:
        if run.result.exists():
            workdirs.Workdir(run.workdir).open(configs[run.label], run.seeds)


def _train_missing(configs: Mapping[str, ExperimentConfig], runs: Sequence[GridRun], workdir: Path, jobs: int) -> None:
    environment = records.environment()  # now, since the checkout may change while this runs
    if processes.is_first():
        check_finished(configs, runs)
    works = []
    for number, run in enumerate(runs, start=1):
        seeds = f"seed {run.seeds[0]}" if len(run.seeds) == 1 else f"seeds {run.seeds[0]}–{run.seeds[-1]}"
        name = f"{run.label}, {seeds}"
        fields = {} if run.label == configs[run.label].encoding else {"system": run.label}
        label = f"[{number}/{len(runs)}] {name}"
        if not run.result.exists():
            works.append(workers.Work(configs[run.label], run.seeds, run.workdir, name, label, fields, environment))

    def finished() -> None:
        if processes.is_first():
            write_results(workdir, [run for run in runs if run.result.exists()])

    if works and processes.is_first():
        left = f"{len(works)} of {len(runs)} runs to train, {min(jobs, len(works))} at a time"
        print(f"{left}; the first lines come after JAX has started and compiled", file=sys.stderr)
    if works and jobs > 1:
        workers.train(works, jobs, finished)
    else:
        _train_here(works, finished)


def _train_here(works: Sequence[workers.Work], finished: Callable[[], None]) -> None:
    compiled: dict[tuple[str, int], Experiment] = {}
    made: dict[str, Task] = {}  # only the last, kept because reading and cutting up a long text takes minutes
    for number, work in enumerate(works):
        config, key = work.config, (repr(work.config), len(work.seeds))
        if key not in compiled:
            if repr(config.task) not in made:
                made = {repr(config.task): tasks.create(config.task.name, **config.task.options)}
            compiled = {key: Experiment(config, made[repr(config.task)])}
        # The peak of memory includes that of all earlier runs of this process, so only the first run has one.
        fields = {**work.fields, "memory_gib": None} if number else work.fields
        compiled[key].train(work.workdir, work.seeds, label=work.label, fields=fields, environment=work.environment)
        finished()


def plan(labels: Sequence[str], seeds: int, width: int, workdir: Path) -> list[GridRun]:
    """Lists the runs of each label; the runs of one label together have the seeds from 0 to `seeds` − 1.

    The list has the runs that are already in the workdir, and new runs of at most `width` seeds for all other seeds.
    """
    runs = []
    for label in labels:
        folder = inside(workdir / "cells", folder_name(label), links=True)
        groups = [group for group in (seeds_of(path) for path in folder.glob("seed*")) if group and group[-1] < seeds]
        held = {seed for group in groups for seed in group}
        new: list[tuple[int, ...]] = []
        for seed in (seed for seed in range(seeds) if seed not in held):
            follows = new and seed == new[-1][-1] + 1 and len(new[-1]) < width
            new[-1:] = [(*new[-1], seed)] if follows else [*new[-1:], (seed,)]
        groups += new
        for group in sorted(groups):
            name = f"seed_{group[0]}" if len(group) == 1 else f"seeds_{group[0]}-{group[-1]}"
            runs.append(GridRun(label, group, folder / name))
    return runs


def folder_name(label: str) -> str:
    """The name of a folder for any text; "" if no letter, digit or sign of the text can be in it.

    >>> folder_name("cope(gate=value)")
    'cope_gate=value'
    >>> folder_name("../..")
    '.._..'
    >>> folder_name("..")
    ''
    """
    name = re.sub(r"[^\w=.+-]+", "_", label).strip("_")
    if len(name.encode()) > 255:  # more than file systems allow
        name = f"{name[:50]}-{hashlib.sha256(repr(label).encode()).hexdigest()[:16]}"
    return name if name.strip(".") else ""


def seeds_of(folder: Path) -> tuple[int, ...]:
    """The seeds in the name of a run's folder; () for any other name.

    >>> seeds_of(Path("cells/cope/seeds_3-5"))
    (3, 4, 5)
    """
    match = re.fullmatch(r"seeds?_(\d+)(?:-(\d+))?", folder.name)
    return tuple(range(int(match[1]), int(match[2] or match[1]) + 1)) if match else ()


def write_results(workdir: Path, runs: Sequence[GridRun]) -> tuple[list[records.Record], list[Path]]:
    """Writes results.json and results.csv of finished runs. Returns the records and the paths."""
    finished = [record for run in runs for record in workdirs.read_records(run.result)]
    return finished, records.write_results(workdir, finished, environment([run.result for run in runs]))


def environment(results: Sequence[Path]) -> records.Record:
    """The environment of the first result; `others` has those of runs trained elsewhere or at another commit."""
    found = [workdirs.read_json(result, environment=dict)["environment"] for result in results]
    different = [other for n, other in enumerate(found) if other not in found[:n]]
    return {**different[0], **({"others": different[1:]} if different[1:] else {})}
