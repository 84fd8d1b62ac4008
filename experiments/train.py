"""Trains one model on one task, and resumes from what is in the workdir.

python -m experiments.train --config=experiments/configs/quick.py --config.encoding=cope --workdir=runs/cope

On several hosts the same command runs on each, see docs/training.md.
"""

from pathlib import Path

from absl import flags

from cope_jax.errors import ConfigError
from cope_jax.evaluation.report.comparison import print_errors
from cope_jax.runs.experiment import Experiment
from cope_jax.training import processes
from cope_jax.training.profiling import Profile
from experiments.cli import distributed, entry

_CONFIG = entry.DEFINE_config("config")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for checkpoints, metrics and results.", required=True)
_SEED = flags.DEFINE_integer(
    "seed", 0, "Seed of initial parameters, order of data and dropout.", lower_bound=0, upper_bound=2**31 - 1
)
_PROFILE = flags.DEFINE_string("profile_steps", None, "FIRST:LAST, the steps to profile with XLA, in WORKDIR/profile.")
flags.mark_flag_as_required("config")
flags.adopt_module_key_flags(distributed)


def main() -> None:
    """Trains, measures, and prints the errors."""
    config = entry.read_config(_CONFIG.value)
    workdir = Path(_WORKDIR.value)
    profile = Profile.parse(_PROFILE.value, workdir / "profile")
    if profile.last and profile.first >= config.training.steps:
        raise ConfigError(f"--profile_steps={_PROFILE.value}: the run ends at step {config.training.steps}")
    distributed.join()
    experiment = Experiment(config)
    records = experiment.train(workdir, [_SEED.value], profile=profile, verbose=True)
    if processes.is_first():
        print_errors(experiment.task, records)


if __name__ == "__main__":
    entry.run(main)
