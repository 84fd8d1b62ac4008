"""The comparison of encodings as a table: on the terminal and as Markdown."""

import dataclasses
from collections.abc import Mapping, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from cope_jax.evaluation.report.units import SHARE, Unit, unit_of
from cope_jax.runs.records import Record, Summary, select, summarise
from cope_jax.tasks import Task

Paper = Mapping[str, Mapping[str, str]]
"""Figures of the paper as text, by encoding and split, in the task's headline metric."""

MANY_SEEDS = 3  # from here on a cell also shows median, best and worst
MISSING = "–"


@dataclasses.dataclass(frozen=True)
class _Row:
    """One row of a table; `cells` are those of the splits: mean ± std, then median and [best, worst] where shown."""

    label: str
    cells: list[list[str]]
    best: list[bool]
    parameters: str = ""
    time: str = ""
    is_paper: bool = False


def rich_table(
    task: Task,
    records: Sequence[Record],
    encodings: Sequence[str],
    metric: str | None = None,
    paper: Paper | None = None,
) -> Table:
    """The comparison for the terminal: a row for each encoding, a column for each evaluation split.

    Cells are mean ± std over seeds, errors in per cent; from three seeds on median and [best, worst] stand below, since
    errors out of distribution swing from seed to seed. The best of each column is bold.

    Args:
      task: names the splits, their order and the headline metric.
      records: as `cope_jax.runs.records` describes them.
      encodings: the rows, in this order.
      metric: None is the task's headline metric.
      paper: figures to show below ours.
    """
    metric = metric or task.metric
    title = f"{task.name}: {_words(metric)}{unit_of(metric).behind(', ')} (lower is better)"
    table = Table(
        title=title,
        caption=escape(_caption(records)),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("encoding", overflow="fold", min_width=len("  the paper"))
    for heading in (*map(_words, task.evaluation_splits), "params", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in _rows(task, records, encodings, metric, paper or {}):
        cells = [
            "\n".join([f"[bold]{cell[0]}[/bold]" if best else cell[0], *(f"[dim]{line}[/dim]" for line in cell[1:])])
            for cell, best in zip(row.cells, row.best, strict=True)
        ]
        table.add_row(escape(row.label), *cells, row.parameters, row.time, style="dim" if row.is_paper else None)
    return table


def markdown(task: Task, records: Sequence[Record], encodings: Sequence[str], paper: Paper | None = None) -> str:
    """The comparison as GitHub Markdown: the table of the headline metric, and below it those of the task's others.

    Args are those of `rich_table`.
    """
    values = [record["value"] for record in select(records, metric=task.metric)]
    parts = [_markdown_table(task, records, encodings, task.metric, paper or {})]
    for metric in task.other_metrics:
        own = [record["value"] for record in select(records, metric=metric)]
        # With one token to predict in each sequence both errors are the same, and so are perplexities of words.
        if metric != task.metric and own and own != values:
            parts.append(_markdown_table(task, records, encodings, metric, {}))
    return "\n\n".join(parts) + "\n"


def _markdown_table(task: Task, records: Sequence[Record], encodings: Sequence[str], metric: str, paper: Paper) -> str:
    headings = ["encoding", *map(_words, task.evaluation_splits), "parameters", "time"]
    lines = [
        f"**{task.name}**, {_words(metric)}{unit_of(metric).behind(' in ')}, lower is better. {_caption(records)}.",
        "",
        _line(headings),
        _line(["---", *["---:"] * (len(headings) - 1)]),
    ]
    for row in _rows(task, records, encodings, metric, paper):
        cells = [
            "<br>".join([f"**{cell[0]}**" if best else cell[0], *([" ".join(cell[1:])] if cell[1:] else [])])
            for cell, best in zip(row.cells, row.best, strict=True)
        ]
        label = f"*{row.label.strip()}*" if row.is_paper else f"`{row.label}`"
        lines.append(_line([label, *cells, row.parameters, row.time]))
    return "\n".join(lines)


def _rows(task: Task, records: Sequence[Record], encodings: Sequence[str], metric: str, paper: Paper) -> list[_Row]:
    splits = task.evaluation_splits
    summaries = {
        (encoding, split): summarise(
            unit_of(metric).scale * record["value"]
            for record in select(records, encoding=encoding, split=split, metric=metric)
        )
        for encoding in encodings
        for split in splits
    }
    rows = []
    for encoding in encodings:
        own = [summaries[encoding, split] for split in splits]
        columns = [[summaries[other, split] for other in encodings] for split in splits]
        best = [_is_best(summary, column) for summary, column in zip(own, columns, strict=True)]
        runs = select(records, encoding=encoding)
        rows.append(
            _Row(encoding, [_cell(summary, unit_of(metric)) for summary in own], best, _parameters(runs), _time(runs))
        )
        if encoding in paper:
            figures = [[paper[encoding].get(split, MISSING)] for split in splits]
            rows.append(_Row("  the paper", figures, [False] * len(splits), is_paper=True))
    return rows


def _is_best(summary: Summary | None, column: Sequence[Summary | None]) -> bool:
    """Whether no mean of the column is lower; where all are the same, none is best."""
    means = [other.mean for other in column if other]
    return summary is not None and summary.mean == min(means) < max(means)


def _cell(summary: Summary | None, unit: Unit = SHARE) -> list[str]:
    """The lines of one cell.

    >>> _cell(summarise([0.0, 1.0, 5.0, 6.0, 8.0]))
    ['4.0 ± 3.4', '5.0', '[0.0, 8.0]']
    >>> _cell(summarise([100.0] * 5))
    ['100.0 ± 0.0']
    """
    if summary is None:
        return [MISSING]
    decimals = unit.decimals + (0 if summary.mean == 0 or summary.mean >= 1 else 1 if summary.mean >= 0.01 else 2)
    mean, median, low, high = (
        f"{value:.{decimals}f}" for value in (summary.mean, summary.median, summary.minimum, summary.maximum)
    )
    lines = [mean if summary.std is None else f"{mean} ± {summary.std:.{decimals}f}"]
    swings = summary.count >= MANY_SEEDS and summary.minimum < summary.maximum
    return [*lines, median, f"[{low}, {high}]"] if swings else lines


def _caption(records: Sequence[Record]) -> str:
    """Steps, seeds, and what a cell shows."""
    steps, seeds = sorted({record["step"] for record in records}), {record["seed"] for record in records}
    if not records:
        return "Nothing measured yet"
    trained = f"{steps[0]:,} steps" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,} steps"
    if len(seeds) == 1:
        return f"{trained}, 1 seed"
    below = "; below: median [best, worst]" if len(seeds) >= MANY_SEEDS else ""
    return f"{trained}, {len(seeds)} seeds: mean ± standard deviation{below}"


def _parameters(runs: Sequence[Record]) -> str:
    return f"{runs[0]['parameters']:,}" if runs else MISSING


def _time(runs: Sequence[Record]) -> str:
    """Mean time of training one seed."""
    summary = summarise({run["seed"]: run["wall_seconds"] for run in runs}.values())
    if summary is None:
        return MISSING
    seconds = summary.mean
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
