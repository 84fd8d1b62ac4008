"""Measures context-free baselines of a task: unigrams, majority labels, and shared words."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cope_jax.data import pipeline
from cope_jax.evaluation.report.table import Table, figure
from cope_jax.runs import workdir as workdirs
from cope_jax.tasks import TASKS, Task
from cope_jax.tasks.task import Baseline
from cope_jax.training.experiment_config import ExperimentConfig
from cope_jax.training.metrics import read_curves


class BesideRun(NamedTuple):
    """A baseline, and the result of a run in the same measure.

    `run` is the mean over the seeds of the run, or None if the run was not measured.
    """

    baseline: Baseline
    run: float | None

    def record(self) -> dict[str, Any]:
        """The fields for JSON."""
        fields = self.baseline._asdict()
        del fields["metric"]
        return {**fields, "run": self.run}


def run_figures(workdir: Path) -> tuple[dict[tuple[str, str], float], str | None]:
    """Reads the results of a run.

    The results are in result.json or, if the run has not ended, in the last evaluation of
    metrics.jsonl.

    Returns:
      A dict from (split, metric) to the mean over seeds, and the name of the file. If there are no
      results, the dict is empty and the name is None.
    """
    if (workdir / "result.json").exists():
        records, source = workdirs.read_records(workdir / "result.json"), "result.json"
        triples = [(r["split"], r["metric"], r["value"]) for r in records]
    else:
        rows, source = list(read_curves(workdir / "metrics.jsonl")), "metrics.jsonl"
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
    means = {key: statistics.mean(of_seeds) for key, of_seeds in values.items()}
    return means, source if values else None


def measure(
    task: Task, config: ExperimentConfig, results: Mapping[tuple[str, str], float], examples: int
) -> list[BesideRun]:
    """Measures all baselines of a task on its evaluation splits.

    Baselines are measured on the examples on which `config` measures the run, except the most
    frequent piece and the most frequent tag of a word, on the whole split. `results` are those
    of the run, from `run_figures`. A baseline may learn from at most `examples` examples.
    """

    def run(baseline: Baseline) -> float | None:
        value = results.get((baseline.split, baseline.metric))
        if value is None:
            return None
        return float(np.exp(value)) if baseline.measure == "perplexity" else 1 - value

    seed = config.training.data_seed
    baselines = task.baselines(lambda split: _batches(task, split, config), examples, seed)
    return [BesideRun(baseline, run(baseline)) for baseline in baselines]


def known() -> list[str]:
    """The names of the tasks that have baselines."""
    return [name for name in TASKS if TASKS.get(name).baselines is not Task.baselines]


def table(baselines: Sequence[BesideRun], title: str) -> Table:
    """Makes a table with a row for each split and baseline.

    >>> table([BesideRun(Baseline("test", "perplexity", "unigram", 823.456, "loss"), None)], "words").rows[0][2:]
    ['unigram', '823.46', '–']
    """
    rows = []
    for baseline, run in baselines:
        is_share = baseline.measure != "perplexity"
        figures = (figure(value, 2, 100 if is_share else 1) for value in (baseline.value, run))
        measure = f"{baseline.measure} (%)" if is_share else baseline.measure
        rows.append([baseline.split, measure, baseline.name, *figures])
    headings = ("split", "measure", "without context", "baseline", "run")
    return Table(title, headings, rows, text_columns=3)


def _batches(task: Task, split: str, config: ExperimentConfig) -> list[dict[str, np.ndarray]]:
    """The examples on which `config` measures a run, in batches; all examples of training."""
    examples = task.size(split) if split == "train" else config.evaluation.examples
    assert examples is not None
    size, seed = config.evaluation.batch_size, config.training.data_seed
    return pipeline.evaluation_batches(task, split, examples=examples, batch_size=size, seed=seed)
