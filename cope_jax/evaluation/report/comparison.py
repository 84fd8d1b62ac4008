"""Tables that compare encodings, for the terminal and as Markdown."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from cope_jax.evaluation.report.table import MISSING, Table, console, words
from cope_jax.runs.experiment import Experiment
from cope_jax.runs.records import Record, Summary, select, summarise
from cope_jax.tasks import Task
from cope_jax.training.metrics import unit_of

Paper = Mapping[str, Mapping[str, str]]
"""Results of the paper as text, by encoding and split, in the task's headline metric."""

MANY_SEEDS = 3  # from this number of seeds on, a cell also shows median, best and worst
_PAPER = "  the paper"


def table(
    task: Task,
    records: Sequence[Record],
    encodings: Sequence[str],
    metric: str | None = None,
    paper: Paper | None = None,
) -> Table:
    """The comparison as a table: a row for each encoding, a column for each evaluation split.

    A cell shows mean ± std over seeds, with errors in per cent. With three or more seeds it also shows median and
    [best, worst], because errors out of distribution vary strongly between seeds. The best cell of each column is bold.
    If `metric` is None, the table shows the task's headline metric. The paper's result of an encoding is in the row
    below the measured result.
    """
    metric, splits = metric or task.metric, task.evaluation_splits
    unit = unit_of(metric)
    summaries = {
        (encoding, split): summarise(
            unit.scale * record["value"] for record in select(records, encoding=encoding, split=split, metric=metric)
        )
        for encoding in encodings
        for split in splits
    }
    places = {
        split: unit.places(held.mean for encoding in encodings if (held := summaries[encoding, split]))
        for split in splits
    }
    rows: list[list[str]] = []
    bold = set()
    for encoding in encodings:
        for column, split in enumerate(splits, start=1):
            if _is_best(summaries[encoding, split], [summaries[other, split] for other in encodings]):
                bold.add((len(rows), column))
        runs = select(records, encoding=encoding)
        cells = ["\n".join(_cell(summaries[encoding, split], places[split])) for split in splits]
        rows.append([encoding, *cells, f"{runs[0]['parameters']:,}" if runs else MISSING, _time(runs)])
        if encoding in (paper or {}):
            rows.append([_PAPER, *((paper or {})[encoding].get(split, MISSING) for split in splits), "", ""])
    variant = "".join(f", {name}" for name in dict.fromkeys(record.get("variant") for record in records) if name)
    title = f"{task.name}{variant}: {words(metric)}{unit.suffix(', ')} (lower is better)"
    headings = ["encoding", *map(words, splits), "params", "time"]
    caption = _caption(records)
    if unit.scale == 100 and all(held and held.minimum == 100 for held in summaries.values()):
        caption += "; every error is 100 %, so look at the other metrics and the loss in results.csv"
    return Table(title, headings, rows, caption=caption, bold=bold)


def markdown(task: Task, records: Sequence[Record], encodings: Sequence[str], paper: Paper | None = None) -> str:
    """The comparison as GitHub Markdown: the `table` of the headline metric, then of each metric with other values."""
    values = [record["value"] for record in select(records, metric=task.metric)]
    parts = [_markdown_table(task, records, encodings, task.metric, paper)]
    for metric in task.other_metrics:
        own = [record["value"] for record in select(records, metric=metric)]
        # If each sequence has one token to predict, both errors are equal; for words, both perplexities are equal.
        if metric != task.metric and own and own != values:
            parts.append(_markdown_table(task, records, encodings, metric))
    return "\n\n".join([*parts, "Bold: the lowest mean of the column."]) + "\n"


def print_errors(experiment: Experiment, records: Sequence[Record]) -> None:
    """Prints a title and a table of metrics by seed and evaluation split (errors in %, losses in nats)."""
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
    out = console()
    out.print(title, markup=False, soft_wrap=True)  # not the table's own, which would be broken at its width
    out.print(Table("", headings, rows, text_columns=len(headings) - len(metrics)).rich())


def _column(records: Sequence[Record], metric: str, names: Sequence[tuple[int, str]]) -> list[str]:
    """Formats the value of a metric for each (seed, split) in `names`, all with the same number of decimals."""
    unit = unit_of(metric)
    values = {(r["seed"], r["split"]): unit.scale * r["value"] for r in select(records, metric=metric)}
    decimals = unit.places(values[name] for name in names if name in values)
    return [_cell(summarise([values[name]] if name in values else []), decimals)[0] for name in names]


def _size(experiment: Experiment) -> str:
    """Says in words how many examples of each split an experiment measures."""
    task, examples = experiment.task, experiment.config.evaluation.examples
    counts = {min(examples, task.size(split) or examples) for split in task.evaluation_splits}
    return f"{'up to ' if len(counts) > 1 else ''}{max(counts):,} examples a split"


def _markdown_table(
    task: Task, records: Sequence[Record], encodings: Sequence[str], metric: str, paper: Paper | None = None
) -> str:
    shown = table(task, records, encodings, metric, paper)
    rows = []
    for label, *cells in shown.rows:
        firsts = (cell.partition("\n") for cell in cells)
        label = f"*{label.strip()}*" if label == _PAPER else f"`{label}`"
        rows.append([label, *(first + line + rest.replace("\n", " ") for first, line, rest in firsts)])
    headings = [*shown.headings[:-2], "parameters", "time"]
    name = shown.title.partition(":")[0]
    title = f"**{name}**, {words(metric)}{unit_of(metric).suffix(' in ')}, lower is better. {shown.caption}."
    return f"{title}\n\n{dataclasses.replace(shown, title='', headings=headings, rows=rows).markdown()}"


def _is_best(summary: Summary | None, column: Sequence[Summary | None]) -> bool:
    """Whether a cell has the lowest mean of its column; if all means are equal, no cell is best."""
    means = [other.mean for other in column if other and not math.isnan(other.mean)]
    return summary is not None and summary.mean in means and summary.mean == min(means) < max(means)


def _cell(summary: Summary | None, decimals: int) -> list[str]:
    """The lines of one cell."""
    if summary is None:
        return [MISSING]
    if math.isnan(summary.mean):  # the value of at least one seed is NaN
        return ["not finite"]
    mean, median, low, high = (
        f"{value:,.{decimals}f}" for value in (summary.mean, summary.median, summary.minimum, summary.maximum)
    )
    lines = [mean if summary.std is None else f"{mean} ± {summary.std:,.{decimals}f}"]
    swings = summary.count >= MANY_SEEDS and summary.minimum < summary.maximum
    return [*lines, median, f"[{low}, {high}]"] if swings else lines


def _caption(records: Sequence[Record]) -> str:
    """The caption: steps, seeds, and the content of a cell."""
    steps, seeds = sorted({record["step"] for record in records}), {record["seed"] for record in records}
    if not records:
        return "Nothing measured yet"
    trained = f"{steps[0]:,} steps" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,} steps"
    if len(seeds) == 1:
        return f"{trained}, 1 seed"
    below = "; below: median [best, worst]" if len(seeds) >= MANY_SEEDS else ""
    return f"{trained}, {len(seeds)} seeds: mean ± standard deviation{below}"


def _time(runs: Sequence[Record]) -> str:
    """The mean training time of one seed."""
    summary = summarise({run["seed"]: run["wall_seconds"] for run in runs}.values())
    if summary is None:
        return MISSING
    seconds = summary.mean
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
