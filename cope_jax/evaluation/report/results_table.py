"""The tables of a grid, encodings by settings, as Markdown and as LaTeX."""

from collections.abc import Mapping, Sequence

from cope_jax.evaluation.report.grid_cells import Cell, Tables, legend
from cope_jax.evaluation.report.table import MISSING, Table, escaped, words


def markdown(tables: Tables) -> str:
    """The tables of errors as GitHub Markdown, with a legend."""
    views = tables.cells.items()
    parts = [results_table(view, tables.encodings, cells, "`").markdown() for view, cells in views]
    metrics = escaped(_metrics(tables))
    return "\n\n".join([*parts, f"{legend(tables, 'Bold')} {metrics}"]) + "\n"


def latex(tables: Tables) -> str:
    """The tables of errors for LaTeX's package booktabs, each with a caption."""
    parts = ["% needs \\usepackage{booktabs}"]
    for view, columns in tables.cells.items():
        table = results_table(view, tables.encodings, columns)
        caption = _latex(f"Errors, {table.title}. {legend(tables, 'Bold')} {_metrics(tables)}")
        lines = [r"\begin{table}", r"\centering", rf"\caption{{{caption}}}"]
        lines += [rf"\begin{{tabular}}{{l{'r' * (len(table.headings) - 1)}}}", r"\toprule"]
        lines += [" & ".join(map(_latex, table.headings)) + r" \\", r"\midrule"]
        for row_index, (name, *texts) in enumerate(table.rows):
            shown = (
                rf"\textbf{{{_latex(text)}}}" if (row_index, column) in table.bold else _latex(text)
                for column, text in enumerate(texts, start=1)
            )
            lines.append(" & ".join([rf"\texttt{{{_latex(name)}}}", *shown]) + r" \\")
        parts.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]))
    return "\n\n".join(parts) + "\n"


def _metrics(tables: Tables) -> str:
    """Says which error the numbers of each setting are."""
    settings: dict[str, list[str]] = {}
    for setting, task in tables.tasks.items():
        settings.setdefault(words(task.metric), []).append(setting)
    named = (f"{metric}: {', '.join(names)}" for metric, names in settings.items())
    return f"The errors are {'; '.join(named)}."


def results_table(
    title: str, rows: Sequence[str], columns: Mapping[str, Mapping[str, Cell]], quote: str = ""
) -> Table:
    """A row for each name, with `quote` around it, and a column of cells for each heading."""
    cells = [[column.get(name) for column in columns.values()] for name in rows]
    pairs = zip(rows, cells, strict=True)
    texts = [[f"{quote}{name}{quote}", *map(cell_text, row)] for name, row in pairs]
    bold = {
        (n, m)
        for n, row in enumerate(cells)
        for m, cell in enumerate(row, start=1)
        if cell and cell.best
    }
    return Table(title, ["encoding", *columns], texts, bold=bold)


def _latex(text: str) -> str:
    r"""Text for LaTeX.

    >>> print(_latex("0.5 ± 0.1 % of cope_signed"))
    0.5 $\pm$ 0.1 \% of cope\_signed
    """
    return text.translate(_LATEX)


_LATEX = str.maketrans(
    {
        "±": r"$\pm$",
        "–": "--",
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
    }
    | {sign: f"\\{sign}" for sign in "&%$#_{}"}
)


def cell_text(cell: Cell | None) -> str:
    """The text of a cell, which may be missing."""
    return MISSING if cell is None else cell.text
