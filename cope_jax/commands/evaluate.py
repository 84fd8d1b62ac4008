"""Evaluates a trained model again, on the requested number of examples.

cope-jax evaluate --model=runs/cope --examples=10000

Writes evaluation.json into the run's folder or, for a trained model of the package, into
runs/trained/NAME.
"""

import dataclasses

from cope_jax.cli import common_flags, outputs
from cope_jax.evaluation.report.comparison import print_errors
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.experiment import Experiment
from cope_jax.runs.load import load_run

common_flags.DEFINE_encoding()
_MODEL = common_flags.DEFINE_model(
    "Folder of the training run to evaluate, or name of a trained model of the package, such as counting (required)."
)
_EXAMPLES = common_flags.DEFINE_count(
    "examples",
    None,
    "Number of examples per split; without this flag, the number in the run's config.",
)


def main() -> None:
    """Prints the errors on all splits and writes evaluation.json into the run's folder."""
    run = load_run(_MODEL.value)
    workdirs.Workdir(run.folder).check_sources(run.task, run.task.evaluation_splits)
    config = run.experiment
    if _EXAMPLES.value is not None:
        evaluation = dataclasses.replace(config.evaluation, examples=_EXAMPLES.value)
        config = dataclasses.replace(config, evaluation=evaluation)
    experiment = Experiment(config, run.task)
    with workdirs.Workdir(run.output).locked(workdirs.MEASURING):
        records = experiment.evaluate(run)
        workdirs.write_json(run.output / "evaluation.json", {"records": records})
    print_errors(experiment, records)
    outputs.list_run(run.output, ["evaluation.json"], _MODEL.value, config)
