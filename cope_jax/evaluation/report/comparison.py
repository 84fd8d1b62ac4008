"""Tables that compare encodings, for the terminal and as Markdown."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from cope_jax.evaluation.report.grid_cells import MANY_SEEDS, cells_of, column_of, lowest
from cope_jax.evaluation.report.results_table import results_table
from cope_jax.evaluation.report.table import MISSING, Table, console, words
from cope_jax.runs.experiment import Experiment
from cope_jax.runs.records import Record, select, summarise
from cope_jax.tasks import Task
from cope_jax.training.metrics import unit_of

Paper = Mapping[str, Mapping[str, str]]
"""Results of the paper as text, by encoding and split, in the task's headline metric."""

_PAPER = "  the paper"


def table(
    task: Task,
    records: Sequence[Record],
    encodings: Sequence[str],
    metric: str | None = None,
    paper: Paper | None = None,
) -> Table:
    """The comparison as a table: a row for each encoding, a column for each evaluation split.

    A cell shows mean ± std over seeds, with errors in per cent. With three or more seeds it also
    shows median and [best, worst], because errors out of distribution vary strongly between seeds.
    The best cell of each column is bold. If `metric` is None, the table shows the task's headline
    metric. The paper's result of an encoding is in the row below the measured result.
    """
    metric, paper = metric or task.metric, paper or {}
    unit, splits = unit_of(metric), task.evaluation_splits
    measured = [row for row in select(records, metric=metric) if row["encoding"] in encodings]
    columns = {words(split): column_of(measured, [split]) for split in splits}
    names = [
        name
        for encoding in encodings
        for name in ([encoding, _PAPER] if encoding in paper else [encoding])
    ]
    shown = results_table("", names, cells_of(columns, unit, lowest, spread=True))
    rows = []
    for above, (name, *texts) in zip(["", *names], shown.rows, strict=False):
        runs = select(records, encoding=name)
        costs = [f"{runs[0]['parameters']:,}" if runs else MISSING, _time(runs)]
        if name == _PAPER:
            texts, costs = [paper[above].get(split, MISSING) for split in splits], ["", ""]
        rows.append([name, *texts, *costs])
    variants = dict.fromkeys(record.get("variant") for record in records)
    variant = "".join(f", {name}" for name in variants if name)
    title = f"{task.name}{variant}: {words(metric)}{unit.suffix(', ')} (lower is better)"
    caption = _caption(records)
    errors = [
        column.errors.get(encoding, {0: math.nan})
        for column in columns.values()
        for encoding in encodings
    ]
    if unit.scale == 100 and all(value == 1 for seeds in errors for value in seeds.values()):
        caption += (
            "; every error is 100 %, so look at the other metrics and the loss in results.csv"
        )
    headings = [*shown.headings, "params", "time"]
    return dataclasses.replace(shown, title=title, headings=headings, rows=rows, caption=caption)


def markdown(
    task: Task, records: Sequence[Record], encodings: Sequence[str], paper: Paper | None = None
) -> str:
    """The comparison as Markdown: the `table` of the headline metric, then of other metrics."""
    values = [record["value"] for record in select(records, metric=task.metric)]
    parts = [_markdown_table(task, records, encodings, task.metric, paper)]
    for metric in task.other_metrics:
        other_values = [record["value"] for record in select(records, metric=metric)]
        # If each sequence has one token to predict, both errors are equal; for words, both
        # perplexities are equal.
        if metric != task.metric and other_values and other_values != values:
            parts.append(_markdown_table(task, records, encodings, metric))
    return "\n\n".join([*parts, "Bold: the lowest mean of the column."]) + "\n"


def print_errors(experiment: Experiment, records: Sequence[Record]) -> None:
    """Prints a table of metrics by seed and evaluation split (errors in %, losses in nats)."""
    metrics = list(dict.fromkeys(record["metric"] for record in records))
    metrics.sort(key=lambda metric: not metric.endswith("error"))
    seeds = list(dict.fromkeys(record["seed"] for record in records))
    splits = experiment.task.evaluation_splits
    names = [(seed, split) for seed in seeds for split in splits]
    columns = [_column(records, metric, names) for metric in metrics]
    headings = ["split", *(words(m) + unit_of(m).suffix(", ") for m in metrics)]
    rows = [[split, *cells] for (_, split), *cells in zip(names, *columns, strict=True)]
    title = f"{experiment.task.name}, {experiment.label}, {_size(experiment)}"
    if len(seeds) == 1:
        title += f", seed {seeds[0]}"
    else:
        headings = ["seed", *headings]
        rows = [[str(seed), *row] for (seed, _), row in zip(names, rows, strict=True)]
    if (step := records[0]["step"]) < (steps := experiment.config.training.steps):
        title += f", step {step:,} of {steps:,}"
    out = console()
    out.print(title, markup=False, soft_wrap=True)  # the table's own would be broken
    out.print(Table("", headings, rows, text_columns=len(headings) - len(metrics)).rich())


def _column(records: Sequence[Record], metric: str, names: Sequence[tuple[int, str]]) -> list[str]:
    """Formats a metric for each (seed, split) in `names`, all with the same number of decimals."""
    unit = unit_of(metric)
    rows = select(records, metric=metric)
    values = {(row["seed"], row["split"]): unit.scale * row["value"] for row in rows}
    decimals = unit.places(values[name] for name in names if name in values)
    shown = {
        name: "not finite" if math.isnan(value) else f"{value:,.{decimals}f}"
        for name, value in values.items()
    }
    return [shown.get(name, MISSING) for name in names]


def _size(experiment: Experiment) -> str:
    """Says in words how many examples of each split an experiment measures."""
    task, examples = experiment.task, experiment.config.evaluation.examples
    counts = {min(examples, task.size(split) or examples) for split in task.evaluation_splits}
    examples_of = f"{max(counts):,} example{'s' * (max(counts) != 1)}"
    return f"{'up to ' if len(counts) > 1 else ''}{examples_of} a split"


def _markdown_table(
    task: Task,
    records: Sequence[Record],
    encodings: Sequence[str],
    metric: str,
    paper: Paper | None = None,
) -> str:
    shown = table(task, records, encodings, metric, paper)
    rows = []
    for label, *cells in shown.rows:
        firsts = (cell.partition("\n") for cell in cells)
        label = f"*{label.strip()}*" if label == _PAPER else f"`{label}`"
        lines = (first + line + rest.replace("\n", " ") for first, line, rest in firsts)
        rows.append([label, *lines])
    headings = [*shown.headings[:-2], "parameters", "time"]
    name = shown.title.partition(":")[0]
    title = f"**{name}**, {words(metric)}{unit_of(metric).suffix(' in ')}, lower is better. {shown.caption}."
    return f"{title}\n\n{dataclasses.replace(shown, title='', headings=headings, rows=rows).markdown()}"


def _caption(records: Sequence[Record]) -> str:
    """The caption: steps, seeds, and the content of a cell."""
    steps = sorted({record["step"] for record in records})
    seeds: dict[str, set[int]] = {}
    for record in records:
        seeds.setdefault(record["encoding"], set()).add(record["seed"])
    if not records:
        return "Nothing measured yet"
    trained = f"{steps[0]:,} steps" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,} steps"
    counts = sorted({len(of_encoding) for of_encoding in seeds.values()})
    if counts == [1]:
        return f"{trained}, 1 seed"
    below = "; below: median [best, worst]" if counts[-1] >= MANY_SEEDS else ""
    number = " to ".join(str(count) for count in sorted({counts[0], counts[-1]}))
    return f"{trained}, {number} seeds: mean ± standard deviation{below}"


def _time(runs: Sequence[Record]) -> str:
    """The mean training time of one seed."""
    summary = summarise({run["seed"]: run["wall_seconds"] for run in runs}.values())
    if summary is None:
        return MISSING
    seconds = summary.mean
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
