"""The tables of a grid, encodings by settings, as Markdown, as LaTeX and as a picture."""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from cope_jax.evaluation.report import significance
from cope_jax.evaluation.report.grid_cells import RANK, Tables
from cope_jax.evaluation.report.plot_style import STYLE, add_caption
from cope_jax.evaluation.report.table import MISSING, words
from cope_jax.tasks import Task


def markdown(tables: Tables) -> str:
    """The tables of errors as GitHub Markdown, with a legend."""
    parts = []
    for view, columns in tables.cells.items():
        headings = [_escaped(column) for column in columns]
        lines = [f"**{view}**", "", f"| encoding | {' | '.join(headings)} |"]
        lines.append(f"| --- {'| ---: ' * len(headings)}|")
        for name in tables.encodings:
            cells = (column.get(name) for column in columns.values())
            shown = (f"**{cell['text']}**" if cell and cell["best"] else _text(cell) for cell in cells)
            lines.append(f"| `{name}` | {' | '.join(shown)} |")
        parts.append("\n".join(lines))
    named = (f"{words(metric)}: {', '.join(map(_escaped, names))}" for metric, names in _settings(tables.tasks).items())
    parts.append(f"{_legend(tables)} The errors are {'; '.join(named)}.")
    return "\n\n".join(parts) + "\n"


def latex(tables: Tables) -> str:
    """The tables of errors for LaTeX's package booktabs, each with a caption."""
    parts = ["% needs \\usepackage{booktabs}"]
    for view, columns in tables.cells.items():
        lines = [r"\begin{table}", r"\centering", rf"\caption{{Errors {_latex(view)}. {_latex(_legend(tables))}}}"]
        lines += [rf"\begin{{tabular}}{{l{'r' * len(columns)}}}", r"\toprule"]
        lines += [" & ".join(["encoding", *map(_latex, columns)]) + r" \\", r"\midrule"]
        for name in tables.encodings:
            cells = [column.get(name) for column in columns.values()]
            shown = [
                rf"\textbf{{{_latex(_text(cell))}}}" if cell and cell["best"] else _latex(_text(cell)) for cell in cells
            ]
            lines.append(" & ".join([rf"\texttt{{{_latex(name)}}}", *shown]) + r" \\")
        parts.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]))
    return "\n\n".join(parts) + "\n"


def _legend(tables: Tables) -> str:
    return (
        f"Mean ± standard deviation over seeds{', in %' * tables.shares}; out of distribution is the mean over all "
        f"splits but the first. Bold: no other encoding is shown to be better ({significance.TEST}), in a column that "
        f"shows any difference."
    )


@rc_context(STYLE)
def picture(tables: Tables, title: str) -> Figure:
    """The tables as a picture, one next to the other; the colour of a cell is its error."""
    names, views = tables.encodings, len(tables.cells)
    widest = max(map(len, tables.cells.values()))
    figure = Figure(figsize=(1.2 + 0.42 * widest * views, 1.0 + 0.25 * len(names)), layout="constrained")
    figure.suptitle(title, fontsize=9)
    panels = figure.subplots(1, views, sharey=True, squeeze=False)[0]
    for axes, (view, columns) in zip(panels, tables.cells.items(), strict=True):
        headings = [heading for heading in columns if heading != RANK]
        shown = [[columns[heading].get(name) for heading in headings] for name in names]
        values = [[math.nan if cell is None or cell["mean"] is None else cell["mean"] for cell in row] for row in shown]
        axes.imshow(np.array(values), COLOURS, vmin=0, vmax=1 if tables.shares else None, aspect="auto")
        axes.set_title(view)
        axes.set_xticks(range(len(headings)), headings, rotation=90)
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
        axes.spines[:].set_visible(False)
        for row, cells in enumerate(shown):
            for column, cell in enumerate(cells):
                weight = "bold" if cell and cell["best"] else "normal"
                text = _text(cell).replace(" ± ", "\n± ")
                axes.text(column, row, text, ha="center", va="center", fontsize=5, weight=weight)
    add_caption(figure, _legend(tables))
    return figure


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
