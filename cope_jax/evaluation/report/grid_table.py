"""The tables of a grid, encodings by settings, with what seeds can show: as cells, Markdown, LaTeX and a picture."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from cope_jax.evaluation.report import significance
from cope_jax.evaluation.report.plot_style import STYLE, add_caption
from cope_jax.evaluation.report.table import MISSING, words
from cope_jax.runs.records import Record
from cope_jax.tasks import Task
from cope_jax.training.metrics import PLAIN, SHARE, unit_of

Errors = dict[str, dict[int, float]]
"""Errors by encoding and seed."""


class Column(NamedTuple):
    """A column of a table: its errors, and the number of test examples of a seed; None if they are not shares."""

    errors: Errors
    examples: int | None


IN, OUT = "in distribution", "out of distribution"


def markdown(records: Sequence[Record], tasks: Mapping[str, Task]) -> str:
    """The tables of errors as GitHub Markdown, with a legend."""
    parts = []
    for view, headings, rows in _tables(records, tasks):
        lines = [f"**{view}**", "", f"| encoding | {' | '.join(map(_escaped, headings))} |"]
        lines.append(f"| --- {'| ---: ' * len(headings)}|")
        for name, cells in rows:
            shown = (f"**{cell['text']}**" if cell and cell["best"] else _text(cell) for cell in cells)
            lines.append(f"| `{name}` | {' | '.join(shown)} |")
        parts.append("\n".join(lines))
    named = (f"{words(metric)}: {', '.join(map(_escaped, names))}" for metric, names in _settings(tasks).items())
    parts.append(f"{_legend(tasks)} The errors are {'; '.join(named)}.")
    return "\n\n".join(parts) + "\n"


def latex(records: Sequence[Record], tasks: Mapping[str, Task]) -> str:
    """The tables of errors for LaTeX's package booktabs, each with a caption."""
    parts = ["% needs \\usepackage{booktabs}"]
    for view, headings, rows in _tables(records, tasks):
        lines = [r"\begin{table}", r"\centering", rf"\caption{{Errors {_latex(view)}. {_latex(_legend(tasks))}}}"]
        lines += [rf"\begin{{tabular}}{{l{'r' * len(headings)}}}", r"\toprule"]
        lines += [" & ".join(["encoding", *map(_latex, headings)]) + r" \\", r"\midrule"]
        for name, cells in rows:
            shown = (
                rf"\textbf{{{_latex(_text(cell))}}}" if cell and cell["best"] else _latex(_text(cell)) for cell in cells
            )
            lines.append(" & ".join([rf"\texttt{{{_latex(name)}}}", *shown]) + r" \\")
        parts.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]))
    return "\n\n".join(parts) + "\n"


def _tables(
    records: Sequence[Record], tasks: Mapping[str, Task]
) -> Iterator[tuple[str, list[str], list[tuple[str, list[dict[str, Any] | None]]]]]:
    """The name, the headings and the rows of each table; a row is an encoding and its cells."""
    main = headlines(records, tasks)
    names = list(dict.fromkeys(row["encoding"] for row in main))
    for view, columns in views_of([row for row in main if row.get("kind", "split") == "split"]).items():
        cells = cells_of(columns, are_shares(tasks))
        yield view, list(cells), [(name, [column.get(name) for column in cells.values()]) for name in names]


def _legend(tasks: Mapping[str, Task]) -> str:
    return (
        f"Mean ± standard deviation over seeds{', in %' * are_shares(tasks)}; out of distribution is the mean over all "
        f"splits but the first. Bold: no other encoding is shown to be better ({significance.TEST}), in a column that "
        f"shows any difference."
    )


@rc_context(STYLE)
def picture(records: Sequence[Record], tasks: Mapping[str, Task], title: str) -> Figure:
    """The tables as a picture, one next to the other; the colour of a cell is its error."""
    tables, shares = list(_tables(records, tasks)), are_shares(tasks)
    widest, height = max(len(headings) for _, headings, _ in tables), len(tables[0][2])
    figure = Figure(figsize=(1.2 + 0.42 * widest * len(tables), 1.0 + 0.25 * height), layout="constrained")
    figure.suptitle(title, fontsize=9)
    panels = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axes, (view, headings, rows) in zip(panels, tables, strict=True):
        columns = [number for number, heading in enumerate(headings) if heading != RANK]
        shown = [[cells[number] for number in columns] for _, cells in rows]
        values = [[math.nan if cell is None or cell["mean"] is None else cell["mean"] for cell in row] for row in shown]
        axes.imshow(np.array(values), COLOURS, vmin=0, vmax=1 if shares else None, aspect="auto")
        axes.set_title(view)
        axes.set_xticks(range(len(columns)), [headings[number] for number in columns], rotation=90)
        axes.set_yticks(range(height), [name for name, _ in rows])
        axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
        axes.spines[:].set_visible(False)
        for row, cells in enumerate(shown):
            for column, cell in enumerate(cells):
                weight = "bold" if cell and cell["best"] else "normal"
                text = _text(cell).replace(" ± ", "\n± ")
                axes.text(column, row, text, ha="center", va="center", fontsize=5, weight=weight)
    add_caption(figure, _legend(tasks))
    return figure


RANK = "mean rank"
"""The heading of the column of mean ranks."""

COLOURS = LinearSegmentedColormap.from_list("errors", ["#66b0f2", "#f7fafc", "#f2a468"])
"""From blue to orange, which most colour-blind people tell apart."""


def _escaped(text: str) -> str:
    return re.sub(r"([|<\\])", r"\\\1", text)


def _latex(text: str) -> str:
    r"""Text for LaTeX.

    >>> print(_latex("0.5 ± 0.1 % of cope_signed"))
    0.5 $\pm$ 0.1 \% of cope\_signed
    """
    return text.translate(_LATEX)


_LATEX = str.maketrans(
    {"±": r"$\pm$", "–": "--", "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {sign: f"\\{sign}" for sign in "&%$#_{}"}
)


def _text(cell: Mapping[str, Any] | None) -> str:
    return MISSING if cell is None else str(cell["text"])


def _settings(tasks: Mapping[str, Task]) -> dict[str, list[str]]:
    """The settings of each metric."""
    found: dict[str, list[str]] = {}
    for setting, task in tasks.items():
        found.setdefault(task.metric, []).append(setting)
    return found


def conditions(columns: Mapping[str, Column], rows: Sequence[Record], shares: bool) -> str:
    """The unit of a table, and how many steps and seeds its cells have, in words."""
    steps = {row["step"] for row in rows}
    seeds = {len(values) for held in columns.values() for values in held.errors.values()}
    ranges = [(steps, "step"), (seeds, "seed")]
    told = [
        f"{' to '.join(f'{end:,}' for end in sorted({min(found), max(found)}))} {name}{'s' * (max(found) > 1)}"
        for found, name in ranges
    ]
    return " in %, " * shares + ", " * (not shares) + ", ".join(told)


def headlines(records: Sequence[Record], tasks: Mapping[str, Task]) -> list[Record]:
    """The records of the headline metric of each setting."""
    return [row for row in records if row["metric"] == tasks[row["setting"]].metric]


def are_shares(tasks: Mapping[str, Task]) -> bool:
    """Whether all headline metrics are shares in [0, 1]."""
    return all(unit_of(task.metric).scale == 100 for task in tasks.values())


def views_of(rows: Sequence[Record]) -> dict[str, dict[str, Column]]:
    """The tables, by name, each with its columns; with one setting, one table with a column for each split."""
    splits: dict[str, list[str]] = {}
    for row in rows:
        known = splits.setdefault(row["setting"], [])
        known += [] if row["split"] in known else [row["split"]]
    if len(splits) == 1:
        (names,) = splits.values()
        return {"all splits": {words(name): _column(rows, [name]) for name in names}}
    views: dict[str, dict[str, Column]] = {IN: {}, OUT: {}}
    for setting, names in splits.items():
        own = [row for row in rows if row["setting"] == setting]
        views[IN][setting] = _column(own, names[:1])
        views[OUT][setting] = _column(own, names[1:] or names)
    return views


def _column(rows: Sequence[Record], splits: Sequence[str]) -> Column:
    """The mean error over splits, of each encoding and seed."""
    found: dict[str, dict[int, list[float]]] = {}
    examples: dict[str, int] = {}
    for row in rows:
        if row["split"] in splits:
            found.setdefault(row["encoding"], {}).setdefault(row["seed"], []).append(row["value"])
            examples[row["split"]] = row["examples"]
    errors = {name: {seed: fmean(values) for seed, values in seeds.items()} for name, seeds in found.items()}
    shares = all(unit_of(row["metric"]).highest is not None for row in rows)
    return Column(errors, sum(examples.values()) if shares else None)


def cells_of(columns: Mapping[str, Column], shares: bool) -> dict[str, Any]:
    """What each column shows of each encoding, and the column of mean ranks."""
    cells = {}
    for column, (errors, examples) in columns.items():
        best = significance.indistinguishable(errors, examples)
        unit = SHARE if shares else PLAIN
        decimals = unit.places(unit.scale * fmean(seeds.values()) for seeds in errors.values())
        cells[column] = {name: _cell(seeds, name in best, shares, decimals) for name, seeds in errors.items()}
    return cells | _ranks({column: held.errors for column, held in columns.items()})


def _ranks(columns: Mapping[str, Errors]) -> dict[str, Any]:
    """The column of mean ranks, of the encodings that all columns have; {} for a single column."""
    common = set.intersection(*(set(errors) for errors in columns.values()))
    means = {
        column: {name: fmean(errors[name].values()) for name in errors if name in common}
        for column, errors in columns.items()
    }
    if len(columns) < 2 or len(common) < 2:
        return {}
    return {
        RANK: {
            name: {
                "mean": rank.mean,
                "share": None,
                "text": f"{rank.mean:.1f}",
                "best": False,
                "tip": f"mean rank {rank.mean:.2f} of {len(common)} over {len(columns)} columns\n"
                f"95 % interval over columns: {rank.low:.1f} to {rank.high:.1f}",
            }
            for name, rank in significance.ranks(means).items()
        }
    }


def _cell(seeds: Mapping[int, float], best: bool, shares: bool, decimals: int) -> dict[str, Any]:
    scale, unit = (100.0, " %") if shares else (1.0, "")
    values = [seeds[seed] for seed in sorted(seeds)]
    mean = fmean(values)
    if math.isnan(mean):
        return {
            "mean": None,
            "share": None,
            "text": "not finite",
            "best": False,
            "few": True,
            "tip": "A loss was not finite.",
        }
    shown = [mean, stdev(values)] if len(values) > 1 else [mean]
    told = [f"mean {scale * mean:.3g}{unit}, median {scale * median(values):.3g}{unit}"]
    told.append(f"worst {scale * max(values):.3g}{unit}, best {scale * min(values):.3g}{unit}")
    if shares:
        share = significance.solved(values)
        told.append(
            f"solved by {share.solved} of {share.count} seeds "
            f"(95 % interval: {100 * share.low:.0f} to {100 * share.high:.0f} %)"
        )
    told.append("seeds: " + ", ".join(f"{scale * value:.3g}" for value in values[:25]))
    return {
        "mean": mean,
        "share": mean if shares else None,
        "text": " ± ".join(f"{scale * value:,.{decimals}f}" for value in shown),
        "best": best,
        "few": len(seeds) < significance.LEAST,
        "tip": "\n".join(told),
    }
