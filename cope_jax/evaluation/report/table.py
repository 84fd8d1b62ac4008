"""A table of text cells, for the terminal and for Markdown, and functions that format numbers."""

import dataclasses
import math
import os
import sys
from collections.abc import Collection, Iterable, Sequence

import rich.box
import rich.console
import rich.table
from rich.markup import escape
from rich.text import Text

from cope_jax.runs.records import summarise

MISSING = "–"
FIRM = "\N{NO-BREAK SPACE}"  # between a number and its unit, so that no line break separates them


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text cells.

    >>> print(Table("Times", ["length", "512"], [["cope", "1.02 ms"]]).markdown())
    **Times**
    <BLANKLINE>
    | length | 512 |
    | --- | ---: |
    | cope | 1.02 ms |
    """

    title: str  # what the cells are; "" shows no title
    # One heading per column; the first column names the row. If all are empty, `rich` shows no row
    # of headings.
    headings: Sequence[str]
    # Cells, one per heading in each row; a cell may have several lines.
    rows: Sequence[Sequence[str]]
    # Number of text columns at the left; the other columns have numbers, aligned to the right.
    text_columns: int = 1
    caption: str = ""  # text below the table in the terminal
    bold: Collection[tuple[int, int]] = ()  # (row, column) of cells whose first line is bold

    def rich(self) -> rich.table.Table:
        """The table for the terminal; a narrow terminal may break words, but not numbers."""
        shown = rich.table.Table(
            title=escape(self.title) or None,
            caption=escape(self.caption) or None,
            title_justify="left",
            caption_justify="left",
            box=rich.box.SIMPLE_HEAD,
            pad_edge=False,
            show_header=any(self.headings),
        )
        for number, heading in enumerate(self.headings):
            lines = (line for row in self.rows for line in row[number].split("\n"))
            longest = max(map(len, lines), default=0)
            shown.add_column(
                escape(heading),
                justify="left" if number < self.text_columns else "right",
                overflow="fold",
                min_width=min(longest, 11),
                no_wrap=number >= self.text_columns and any(self.headings),
            )
        for row_number, row in enumerate(self.rows):
            shown.add_row(
                *(
                    self._shown(cell, (row_number, number) in self.bold)
                    for number, cell in enumerate(row)
                )
            )
        return shown

    def markdown(self) -> str:
        """The table as Markdown, under its title."""
        marks = ["---"] * self.text_columns + ["---:"] * (len(self.headings) - self.text_columns)
        rows = [
            [
                self._written(cell, (row_number, number) in self.bold)
                for number, cell in enumerate(row)
            ]
            for row_number, row in enumerate(self.rows)
        ]
        title = [f"**{self.title}**", ""] if self.title else []
        lines = (map(escaped, self.headings), marks, *rows)
        return "\n".join([*title, *(f"| {' | '.join(line)} |" for line in lines)])

    @staticmethod
    def _shown(cell: str, is_bold: bool) -> Text:
        first, line, rest = cell.partition("\n")
        return Text.assemble((first, "bold" if is_bold else ""), line + rest)

    @staticmethod
    def _written(cell: str, is_bold: bool) -> str:
        first, *rest = escaped(cell).split("\n")
        return "<br>".join([f"**{first}**" if is_bold else first, *rest])


def escaped(text: str) -> str:
    """Text for a cell of a table in Markdown."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def figure(value: float | None, decimals: int = 2, scale: float = 1.0) -> str:
    """Formats a number with `decimals` decimals; None and NaN are shown as missing.

    >>> figure(0.25), figure(0.25, 1, scale=100), figure(None)
    ('0.25', '25.0', '–')
    """
    return MISSING if value is None or math.isnan(value) else f"{scale * value:.{decimals}f}"


def share(value: float | None, interval: Sequence[float] = ()) -> str:
    """Formats a share in per cent, and its interval if there is one.

    >>> share(0.5), share(0.5, (0.4, 0.6))
    ('50.0', '50.0 [40.0, 60.0]')
    """
    ends = ", ".join(figure(end, 1, 100) for end in interval)
    return figure(value, 1, 100) + (f" [{ends}]" if interval else "")


def mean_std(values: Iterable[float], decimals: int = 2, scale: float = 1.0) -> str:
    """Formats mean ± sample standard deviation; NaN values are ignored.

    >>> mean_std([0.5, 0.6], scale=100), mean_std([0.25]), mean_std([])
    ('55.00 ± 7.07', '0.25', '–')
    """
    summary = summarise(scale * value for value in values if not math.isnan(value))
    if summary is None:
        return MISSING
    std = "" if summary.std is None else f" ± {summary.std:.{decimals}f}"
    return figure(summary.mean, decimals) + std


def words(name: str) -> str:
    """Turns a name in the code into readable words.

    >>> words("token_error")
    'token error'
    """
    return name.replace("_", " ")


def console() -> rich.console.Console:
    """Returns a console, wide if the width is unknown as in a file: numbers are never cut."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return rich.console.Console(width=None if known else 160, highlight=False)


def has_colours(console: rich.console.Console) -> bool:
    """True if the console shows colours: a terminal that has them, without NO_COLOR."""
    return console.color_system is not None and not console.no_color
