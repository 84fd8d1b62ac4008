"""What no context gives for a task: unigrams, majorities, and the words that two texts share."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from cope_jax.data import pipeline
from cope_jax.runs import workdir as workdirs
from cope_jax.tasks import TASKS, Task
from cope_jax.tasks.task import Baseline
from cope_jax.training.config import ExperimentConfig
from cope_jax.training.metrics import read_metrics


@dataclasses.dataclass(frozen=True)
class Floor:
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


def measured(workdir: Path) -> tuple[dict[tuple[str, str], float], str | None]:
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


def find(task: Task, config: ExperimentConfig, own: Mapping[tuple[str, str], float], examples: int) -> list[Floor]:
    """All floors of a task on its evaluation splits.

    Args:
      task: one of `known()`.
      config: of the run, which says on which examples it is measured.
      own: of the run, from `measured`.
      examples: that a floor may learn from.
    """

    def run(floor: Baseline) -> float | None:
        value = own.get((floor.split, floor.metric))
        if value is None:
            return None
        return float(np.exp(value)) if floor.measure == "perplexity" else 1 - value

    found = task.baselines(lambda split: _batches(task, split, config), examples, config.training.data_seed)
    return [Floor(floor.split, floor.measure, floor.name, floor.value, run(floor)) for floor in found]


def known() -> list[str]:
    """The tasks of which there are floors."""
    return [name for name in TASKS if TASKS.get(name).baselines is not Task.baselines]


def rich_table(floors: Sequence[Floor], title: str) -> Table:
    """The floors for a terminal."""
    table = Table(*_HEADINGS[:3], title=title, title_justify="left")
    for heading in _HEADINGS[3:]:
        table.add_column(heading, justify="right")
    for floor in floors:
        table.add_row(*_cells(floor))
    return table


def markdown(floors: Sequence[Floor]) -> str:
    """The same for a document.

    >>> print(markdown([Floor("test", "perplexity", "unigram", 823.456, None)]).splitlines()[-1])
    | test | perplexity | unigram | 823.46 | – |
    """
    rows = [_HEADINGS, ("---", "---", "---", "---:", "---:"), *map(_cells, floors)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


_HEADINGS = ("split", "measure", "without context", "floor", "run")


def _cells(floor: Floor) -> tuple[str, ...]:
    shares = floor.measure != "perplexity"
    values = ("–" if value is None else f"{100 * value if shares else value:.2f}" for value in (floor.value, floor.run))
    return (floor.split, f"{floor.measure} (%)" if shares else floor.measure, floor.name, *values)


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
