"""Trains one encoding on one task, going on from what is in the workdir.

python -m experiments.train --config=experiments/configs/quick.py --config.encoding=cope --workdir=runs/cope
"""

from pathlib import Path

from absl import flags
from ml_collections import config_flags

from cope_jax.evaluation.records import environment
from experiments import common, entry
from experiments import workdir as workdirs

_CONFIG = config_flags.DEFINE_config_file("config", None, "A file of experiments/configs.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for checkpoints, metrics and results.", required=True)
_SEED = flags.DEFINE_integer(
    "seed", 0, "Decides initial parameters, order of data and dropout.", lower_bound=0, upper_bound=2**31 - 1
)
flags.mark_flag_as_required("config")


def main() -> None:
    """Trains, measures, and prints the errors."""
    config = entry.read_config(_CONFIG.value)
    workdir = Path(_WORKDIR.value)
    common.Experiment.check(config)
    experiment = common.Experiment(config)
    workdirs.open_workdir(workdir, config, [_SEED.value])
    records = experiment.train([_SEED.value], workdir, config.encoding)
    workdirs.write_json(workdir / "result.json", {"records": records, "environment": environment()})
    common.print_errors(experiment.task, records)


if __name__ == "__main__":
    entry.run(main)
