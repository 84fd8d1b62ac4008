"""Measures context-free baselines for the task of a run, on its evaluation splits, next to its own figures.

python -m experiments.floors --model=runs/bert_small

Words, in one direction or both: the perplexity of a unigram, p(w) = (count of w in training + 1)/(words + kinds).
Masked words: the accuracy of always predicting the most frequent piece. Next sentences: the accuracy of a bag of words,
which knows what A and B share, on the run's own examples. Parts of speech: the accuracy of each word's most frequent
tag. The run does not have to be finished; it has figures from its first evaluation on.

Writes floors.json and floors.md into the folder of the run.
"""

from pathlib import Path

from absl import flags

from cope_jax import tasks
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import task_baselines
from cope_jax.evaluation.report.table import console
from cope_jax.runs import workdir as workdirs
from cope_jax.training.experiment_config import ExperimentConfig
from experiments.cli import entry, outputs

_MODEL = flags.DEFINE_string("model", None, "Folder of a training run.", required=True)
_EXAMPLES = flags.DEFINE_integer(
    "examples", 20_000, "Training examples that the bag of words learns from.", lower_bound=2
)
entry.renamed("workdir", "model")


def main() -> None:
    """Measures, writes and prints the baselines."""
    workdir = Path(_MODEL.value)
    if not (workdir / "config.json").exists():
        raise ConfigError(f"{workdir} holds no training run: give the --workdir of experiments.train")
    config = ExperimentConfig.from_mapping(workdirs.read_settings(workdir)["config"])
    if config.task.name not in task_baselines.known():
        known = ", ".join(task_baselines.known())
        raise ConfigError(f"{workdir} is a run on {config.task.name}: baselines exist for {known}")
    # What the run has learned, such as a vocabulary, does not have to be learned again.
    options = tasks.TASKS.get(config.task.name).with_saved_files(config.task.options, workdir)
    task = tasks.create(config.task.name, **options)
    run, source = task_baselines.run_figures(workdir)
    found = task_baselines.measure(task, config, run, _EXAMPLES.value)
    table = task_baselines.table(found, f"{config.task.name}, the run's own figures from {source or 'nowhere so far'}")
    console().print(table.rich())
    content = {"floors": [one.record() for one in found], "run": source}
    outputs.list_files(outputs.write(workdir, "floors", content, table.markdown()))


if __name__ == "__main__":
    entry.run(main)
