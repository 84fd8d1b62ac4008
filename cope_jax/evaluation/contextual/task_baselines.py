"""What no context gives for a task: unigrams, majorities, and the words that two texts share."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from cope_jax.data import pipeline
from cope_jax.evaluation.contextual.bag_of_words import BagOfWords
from cope_jax.evaluation.report.table import Table, figure
from cope_jax.runs import workdir as workdirs
from cope_jax.tasks import Task
from cope_jax.tasks.masked_lm import MaskedLM
from cope_jax.tasks.tagging import Tagging
from cope_jax.training.config import ExperimentConfig
from cope_jax.training.metrics import read_metrics

TASKS = ("words", "bilm", "masked_lm", "tagging")
ROWS = 1024
"""Of a batch of training text that is counted."""


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A figure that needs no context.

    Attributes:
      split: where it is measured.
      measure: "perplexity", or what is told right: "masked words", "next sentences" or "tags", a share in [0, 1].
      name: of what reaches it.
      value: of the measure.
      run: the same of the run, the mean over its seeds; None where the run has not been measured.
    """

    split: str
    measure: str
    name: str
    value: float
    run: float | None


def run_figures(workdir: Path) -> tuple[dict[tuple[str, str], float], str | None]:
    """What is known of the run itself: (split, measure) → mean over seeds, and the name of the file.

    That is result.json or, of a run that has not ended, the last evaluation in metrics.jsonl.
    """
    if (workdir / "result.json").exists():
        records, source = workdirs.read_json(workdir / "result.json", "records")["records"], "result.json"
        triples = [(r["split"], r["metric"], r["value"]) for r in records]
    else:
        rows, source = [row for row in read_metrics(workdir / "metrics.jsonl") if "split" in row], "metrics.jsonl"
        last = max((row["step"] for row in rows), default=0)
        triples = [
            (row["split"], name, value)
            for row in rows
            if row["step"] == last
            for name, value in row.items()
            if name.endswith(("loss", "error"))
        ]
    values: dict[tuple[str, str], list[float]] = {}
    for split, metric, value in triples:
        if value is not None:
            values.setdefault((split, metric), []).append(value)
    return {key: statistics.mean(own) for key, own in values.items()}, source if values else None


def measure(
    task: Task, config: ExperimentConfig, own: Mapping[tuple[str, str], float], examples: int
) -> list[Baseline]:
    """All baselines of a task on its evaluation splits.

    Args:
      task: one of `TASKS`.
      config: of the run, which says on which examples it is measured.
      own: of the run, from `run_figures`.
      examples: that the bag of words learns from.
    """

    def accuracy(split: str, error: str) -> float | None:
        return None if (split, error) not in own else 1 - own[split, error]

    found = []
    if isinstance(task, MaskedLM):
        special = [task.wordpiece.pad, task.wordpiece.cls, task.wordpiece.sep, task.wordpiece.mask]
        train = task.dataset("train", examples, config.training.data_seed)
        classifier = BagOfWords(task.vocab_size, special).fit(train)
        for split in task.evaluation_splits:
            test = _joined(_batches(task, split, config))
            mlm, nsp = accuracy(split, "mlm_error"), accuracy(split, "nsp_error")
            likely = float(np.mean(test["next"] == np.bincount(train["next"]).argmax()))
            piece = task.baselines(split)["mlm_accuracy"]
            found.append(Baseline(split, "masked words", "most frequent piece", piece, mlm))
            found.append(Baseline(split, "next sentences", "more frequent answer", likely, nsp))
            found.append(Baseline(split, "next sentences", "bag of words", classifier.accuracy(test), nsp))
    elif isinstance(task, Tagging):
        tags = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in _batches(task, "train", config)])
        most = np.bincount(tags).argmax()
        for split in task.evaluation_splits:
            batches = _batches(task, split, config)
            right = np.concatenate([(batch["targets"] == most)[batch["weights"] > 0] for batch in batches])
            tag = accuracy(split, "token_error")
            found.append(Baseline(split, "tags", "most frequent tag", float(right.mean()), tag))
            found.append(Baseline(split, "tags", "most frequent of the word", task.majority(split), tag))
    else:
        probabilities = unigrams(task)
        for split in task.evaluation_splits:
            loss = own.get((split, "loss"))
            entropy = cross_entropy(probabilities, _batches(task, split, config))
            run = None if loss is None else float(np.exp(loss))
            found.append(Baseline(split, "perplexity", "unigram", float(np.exp(entropy)), run))
    return found


def unigrams(task: Task) -> dict[str, np.ndarray]:
    """How probable each word is where nothing is known, from the training text: prefix of a direction → `[V]`.

    p(w) = (n_w + 1)/(N + V): none of the words of the vocabulary is impossible.
    """
    stream = task.stream("train", ROWS)
    assert stream is not None
    counts: dict[str, np.ndarray] = {}
    for place in tqdm(range(len(stream)), desc="words of train", dynamic_ncols=True):
        batch = stream[place]
        for prefix in _directions(batch):
            targets = batch[f"{prefix}targets"][batch[f"{prefix}weights"] > 0]
            own = np.bincount(targets, minlength=task.vocab_size)
            counts[prefix] = counts.get(prefix, np.ones(task.vocab_size)) + own
    return {prefix: own / own.sum() for prefix, own in counts.items()}


def cross_entropy(probabilities: Mapping[str, np.ndarray], batches: Sequence[Mapping[str, np.ndarray]]) -> float:
    """−mean log p(w) over the words of all directions, in nats."""
    total = count = 0.0
    for batch in batches:
        for prefix, own in probabilities.items():
            total -= float(batch[f"{prefix}weights"].ravel() @ np.log(own)[batch[f"{prefix}targets"].ravel()])
            count += float(batch[f"{prefix}weights"].sum())
    return total / count


def table(baselines: Sequence[Baseline], title: str) -> Table:
    """A row for each split and baseline.

    >>> table([Baseline("test", "perplexity", "unigram", 823.456, None)], "words").rows[0][2:]
    ['unigram', '823.46', '–']
    """
    rows = []
    for own in baselines:
        is_share = own.measure != "perplexity"
        figures = (figure(value, 2, 100 if is_share else 1) for value in (own.value, own.run))
        rows.append([own.split, f"{own.measure} (%)" if is_share else own.measure, own.name, *figures])
    return Table(title, ("split", "measure", "without context", "baseline", "run"), rows, text_columns=3)


def _batches(task: Task, split: str, config: ExperimentConfig) -> list[dict[str, np.ndarray]]:
    """The examples that the run is measured on; of training, for which it has none, all."""
    evaluation, size = config.evaluation, task.size(split)
    examples = evaluation.examples
    if split == "train":
        assert size is not None
        examples = size
    return pipeline.evaluation_batches(
        task, split, examples=examples, batch_size=evaluation.batch_size, seed=config.training.data_seed
    )


def _joined(batches: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """All rows but those that only fill up the last batch, which have no piece."""
    fields = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    real = fields["mask"].any(axis=1)
    return {name: field[real] for name, field in fields.items()}


def _directions(batch: Mapping[str, Any]) -> list[str]:
    return [prefix for prefix in ("", "backward_") if f"{prefix}targets" in batch]
