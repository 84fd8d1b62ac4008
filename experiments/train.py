"""Trains one model on one task, going on from what is in the workdir.

python -m experiments.train --config=experiments/configs/quick.py --config.encoding=cope --workdir=runs/cope

On several hosts the same command runs on each, see docs/training.md.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import jax
from absl import flags
from ml_collections import config_flags

from cope_jax import tasks
from cope_jax.errors import ConfigError
from cope_jax.evaluation.report.comparison import print_errors
from cope_jax.files import write_atomically
from cope_jax.models.base import attends
from cope_jax.runs import warm_start
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.load import check_alike, keep_files
from cope_jax.runs.records import environment
from cope_jax.training import distributed as processes
from cope_jax.training.experiment import Experiment
from cope_jax.training.profiling import Profile
from cope_jax.typing import PyTree
from experiments.cli import distributed, entry

_CONFIG = config_flags.DEFINE_config_file("config", None, "A file of experiments/configs.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for checkpoints, metrics and results.", required=True)
_SEED = flags.DEFINE_integer(
    "seed", 0, "Decides initial parameters, order of data and dropout.", lower_bound=0, upper_bound=2**31 - 1
)
_PROFILE = flags.DEFINE_string("profile_steps", None, "FIRST:LAST, the steps of an XLA profile in WORKDIR/profile.")
flags.mark_flag_as_required("config")
flags.adopt_module_key_flags(distributed)


def main() -> None:
    """Trains, measures, and prints the errors."""
    config = entry.read_config(_CONFIG.value)
    workdir, seeds = Path(_WORKDIR.value), [_SEED.value]
    profile = Profile.parse(_PROFILE.value, workdir / "profile")
    if profile.last and profile.first >= config.training.steps:
        raise ConfigError(f"--profile_steps={_PROFILE.value}: the run ends at step {config.training.steps}")
    distributed.join()
    task = tasks.create(config.task.name, **config.task.options)
    Experiment.check(config, task)
    check_alike(task)
    experiment = Experiment(config, task=task)
    start: Callable[[], PyTree] = dict
    if not (workdir / "checkpoints").exists():  # before anything is written, for it may not fit
        start = functools.partial(dict, warm_start.start_of(config, experiment))
    with contextlib.ExitStack() as stack:
        with processes.first_goes_ahead() as first:
            if first:
                stack.enter_context(workdirs.locked(workdir))
                job = {"job": dataclasses.asdict(config.job)}
                workdirs.open_workdir(workdir, config, seeds, environment() | job)
                keep_files(experiment.task, workdir)
                write_atomically(workdir / "summary.txt", experiment.summary() + "\n")
                print(experiment.summary())
                unused = jax.device_count() - experiment.program.mesh.size
                if unused:
                    print(f"warning: job.mesh leaves {unused} of {jax.device_count()} devices unused", file=sys.stderr)
        # One process is like the others, and several on a host would write the same file.
        label = f"{config.model.name}, {config.encoding}" if attends(config.model) else config.model.name
        records = experiment.train(seeds, workdir, label, profile if first else None, start)
        if first:
            workdirs.write_json(workdir / "result.json", {"records": records, "environment": environment()})
            print_errors(experiment.task, records)


if __name__ == "__main__":
    entry.run(main)
