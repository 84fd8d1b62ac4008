"""Trains one model on one task, or resumes from the newest checkpoint in the workdir.

cope-jax train --config=quick --config.encoding=cope --workdir=runs/cope

To train on several hosts, run the same command on each host; see docs/training.md.
"""

from pathlib import Path

from absl import flags

from cope_jax.cli import common_flags, config_flags, distributed, outputs
from cope_jax.errors import ConfigError
from cope_jax.evaluation.report.comparison import print_errors
from cope_jax.runs.experiment import Experiment
from cope_jax.runs.load import load
from cope_jax.runs.workdir import Workdir
from cope_jax.training import processes
from cope_jax.training.profiling import Profile

_CONFIG = config_flags.DEFINE_config(
    "config", purpose="Config of the task, model and training (required). "
)
common_flags.DEFINE_encoding()
_WORKDIR = common_flags.DEFINE_workdir(
    "Folder for checkpoints, metrics and results (required). A run resumes from it."
)
_SEED = flags.DEFINE_integer(
    "seed",
    0,
    "Random seed for the initial parameters, the order of the data, and dropout.",
    lower_bound=0,
    upper_bound=2**31 - 1,
)
_PROFILE = common_flags.DEFINE_text(
    "profile_steps",
    "Steps to profile with XLA, as FIRST:LAST, such as 100:110. Profiles are in WORKDIR/profile. Without this flag, no "
    "step is profiled.",
)
flags.mark_flag_as_required("config")
flags.adopt_module_key_flags(distributed)


def main() -> None:
    """Trains and evaluates the model, then prints the errors and the paths of the results."""
    config = config_flags.read_config(_CONFIG.value)
    config_flags.warn_of_unused("config", config)
    common_flags.check_files([config.encoding], "config.encoding")
    workdir = Path(_WORKDIR.value)
    profile = Profile.parse(_PROFILE.value, workdir / "profile")
    if profile.last and profile.first >= config.training.steps:
        raise ConfigError(
            f"--profile_steps={_PROFILE.value} is not before step {config.training.steps}, the end of the run: choose "
            "earlier steps"
        )
    if config.training.start and not Workdir(workdir).has_checkpoints():
        load(config.training.start)  # no arrays: a wrong folder is known before anything compiles
    distributed.join()
    experiment = Experiment(config, task=Workdir(workdir).create_task(config))
    records = experiment.train(workdir, [_SEED.value], profile=profile, verbose=True)
    if processes.is_first():
        print_errors(experiment, records)
        files = ("result.json", "metrics.jsonl", "TensorBoard")
        outputs.list_run(workdir, files, workdir, config)
