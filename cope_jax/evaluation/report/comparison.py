"""Tables that compare encodings, for the terminal and as Markdown."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from cope_jax.evaluation.report.table import MISSING, SHARE, Table, Unit, console, figure, unit_of, words
from cope_jax.runs.records import Record, Summary, select, summarise
from cope_jax.tasks import Task

Paper = Mapping[str, Mapping[str, str]]
"""Results of the paper as text, by encoding and split, in the task's headline metric."""

MANY_SEEDS = 3  # with at least this many seeds a cell also shows median, best and worst
_PAPER = "  the paper"


def table(
    task: Task,
    records: Sequence[Record],
    encodings: Sequence[str],
    metric: str | None = None,
    paper: Paper | None = None,
) -> Table:
    """The comparison for the terminal: a row for each encoding, a column for each evaluation split.

    Cells are mean ± std over seeds, errors in per cent. With three or more seeds, median and [best, worst] are below,
    because errors out of distribution vary strongly between seeds. The best of each column is bold. The default metric
    is the task's headline metric. The paper's results are below this project's.
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
    rows: list[list[str]] = []
    bold = set()
    for encoding in encodings:
        for column, split in enumerate(splits, start=1):
            if _is_best(summaries[encoding, split], [summaries[other, split] for other in encodings]):
                bold.add((len(rows), column))
        runs = select(records, encoding=encoding)
        cells = ["\n".join(_cell(summaries[encoding, split], unit)) for split in splits]
        rows.append([encoding, *cells, f"{runs[0]['parameters']:,}" if runs else MISSING, _time(runs)])
        if encoding in (paper or {}):
            rows.append([_PAPER, *((paper or {})[encoding].get(split, MISSING) for split in splits), "", ""])
    title = f"{task.name}: {words(metric)}{unit.suffix(', ')} (lower is better)"
    headings = ["encoding", *map(words, splits), "params", "time"]
    return Table(title, headings, rows, caption=_caption(records), bold=bold)


def markdown(task: Task, records: Sequence[Record], encodings: Sequence[str], paper: Paper | None = None) -> str:
    """The comparison as GitHub Markdown: the `table` of the headline metric, then those of the task's other metrics."""
    values = [record["value"] for record in select(records, metric=task.metric)]
    parts = [_markdown_table(task, records, encodings, task.metric, paper)]
    for metric in task.other_metrics:
        own = [record["value"] for record in select(records, metric=metric)]
        # If each sequence has one token to predict, both errors are equal; so are the perplexities of words.
        if metric != task.metric and own and own != values:
            parts.append(_markdown_table(task, records, encodings, metric))
    return "\n\n".join(parts) + "\n"


def print_errors(task: Task, records: Sequence[Record]) -> None:
    """Prints the metrics of each seed on the fixed splits: errors in per cent, losses in nats."""
    metrics = list(dict.fromkeys(record["metric"] for record in records))
    metrics.sort(key=lambda metric: not metric.endswith("error"))
    rows = []
    for seed in dict.fromkeys(record["seed"] for record in records):
        for split in task.evaluation_splits:
            values = {r["metric"]: r["value"] for r in select(records, split=split, seed=seed)}
            figures = (figure(values[m], 2 if m.endswith("error") else 4, unit_of(m).scale) for m in metrics)
            rows.append([str(seed), split, *figures])
    headings = ["seed", "split", *(words(m) + unit_of(m).suffix(" ") for m in metrics)]
    console().print(Table("", headings, rows, text_columns=2).rich())


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
    title = f"**{task.name}**, {words(metric)}{unit_of(metric).suffix(' in ')}, lower is better. {shown.caption}."
    return f"{title}\n\n{dataclasses.replace(shown, title='', headings=headings, rows=rows).markdown()}"


def _is_best(summary: Summary | None, column: Sequence[Summary | None]) -> bool:
    """Whether no mean of the column is lower; if all are equal, none is best."""
    means = [other.mean for other in column if other and not math.isnan(other.mean)]
    return summary is not None and summary.mean in means and summary.mean == min(means) < max(means)


def _cell(summary: Summary | None, unit: Unit = SHARE) -> list[str]:
    """The lines of one cell."""
    if summary is None:
        return [MISSING]
    if math.isnan(summary.mean):  # the value of at least one seed is NaN
        return ["not finite"]
    decimals = unit.decimals + (0 if summary.mean == 0 or summary.mean >= 1 else 1 if summary.mean >= 0.01 else 2)
    mean, median, low, high = (
        f"{value:.{decimals}f}" for value in (summary.mean, summary.median, summary.minimum, summary.maximum)
    )
    lines = [mean if summary.std is None else f"{mean} ± {summary.std:.{decimals}f}"]
    swings = summary.count >= MANY_SEEDS and summary.minimum < summary.maximum
    return [*lines, median, f"[{low}, {high}]"] if swings else lines


def _caption(records: Sequence[Record]) -> str:
    """The caption: steps, seeds, and what a cell shows."""
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
