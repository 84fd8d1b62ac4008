"""Measures context-free baselines for the task of a training run, and shows them next to the run's
results.

cope-jax floors --model=runs/bert_small

- words, predicted in one or both directions: the perplexity of a unigram model, p(w) = (n_w + 1)/(N
  + V), where w occurs n_w times among N training words, and the vocabulary has V words
- masked words: the accuracy of always predicting the most frequent piece
- next sentences: the accuracy of a bag of words, which predicts whether B follows A from the words
  that texts A and B share, on the run's own examples
- parts of speech: the accuracy of each word's most frequent tag

The most frequent piece and tag are measured on the whole split, the other baselines on the run's
own examples.

The run need not be finished: it has results after its first evaluation. Writes floors.json and
floors.md into the run's folder.
"""

from absl import flags

from cope_jax.cli import common_flags, outputs
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import task_baselines
from cope_jax.evaluation.report.table import console
from cope_jax.runs.load import load_run

common_flags.DEFINE_encoding()
_MODEL = common_flags.DEFINE_model(
    "Folder of the training run to compute baselines for (required)."
)
_EXAMPLES = flags.DEFINE_integer(
    "examples",
    20_000,
    "Maximum number of training examples for the bag-of-words baseline.",
    lower_bound=2,
)


def main() -> None:
    """Measures, writes and prints the baselines."""
    run = load_run(_MODEL.value)
    config = run.experiment
    if config.task.name not in task_baselines.known():
        known = ", ".join(task_baselines.known())
        raise ConfigError(
            f"{run.folder} is a run on {config.task.name}: choose a run on a task with baselines: {known}"
        )
    figures, source = task_baselines.run_figures(run.folder)
    baselines = task_baselines.measure(run.task, config, figures, _EXAMPLES.value)
    table = task_baselines.table(
        baselines, f"{config.task.name}, results of the run: {source or 'not evaluated yet'}"
    )
    console().print(table.rich())
    content = {"floors": [baseline.record() for baseline in baselines], "run": source}
    outputs.list_files(outputs.write(run.output, "floors", content, table.markdown()))
