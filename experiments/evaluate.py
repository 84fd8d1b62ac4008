"""Measures a trained model again, on the requested number of examples.

python -m experiments.evaluate --model=runs/cope --examples=10000
"""

import dataclasses
from pathlib import Path

from absl import flags

from cope_jax.evaluation.report.comparison import print_errors
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.experiment import Experiment
from cope_jax.runs.load import load_run
from experiments.cli import entry

_MODEL = flags.DEFINE_string("model", None, "Folder of a training run.", required=True)
_EXAMPLES = flags.DEFINE_integer(
    "examples", None, "Number of examples of each split; without it, as in the run's config.", lower_bound=1
)
entry.renamed("workdir", "model")


def main() -> None:
    """Prints the errors on all splits and writes evaluation.json into the folder of the run."""
    workdir = Path(_MODEL.value)
    run = load_run(workdir)
    workdirs.check_sources(run.task, workdir, run.task.evaluation_splits)
    config = run.experiment
    if _EXAMPLES.value is not None:
        evaluation = dataclasses.replace(config.evaluation, examples=_EXAMPLES.value)
        config = dataclasses.replace(config, evaluation=evaluation)
    experiment = Experiment(config, len(run.seeds), run.task)
    with workdirs.locked(workdir, workdirs.MEASURING):
        records = experiment.evaluate(run)
        print_errors(run.task, records)
        workdirs.write_json(workdir / "evaluation.json", {"records": records})


if __name__ == "__main__":
    entry.run(main)
