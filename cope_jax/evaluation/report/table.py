"""A table of text cells, for the terminal and for Markdown."""

import dataclasses
from collections.abc import Sequence

import rich.table


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text cells.

    >>> print(Table("Times", ["length", "512"], [["cope", "1.02 ms"]]).markdown())
    **Times**
    <BLANKLINE>
    | length | 512 |
    | --- | ---: |
    | cope | 1.02 ms |

    Attributes:
      title: what the cells are; none if it is empty.
      headings: of the columns; the first column names the row. Without headings `rich` shows no line for them.
      rows: cells, as many in each as there are headings.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def rich(self) -> rich.table.Table:
        """The table for the terminal."""
        shown = rich.table.Table(title=self.title or None, title_justify="left", show_header=any(self.headings))
        for number, heading in enumerate(self.headings):
            shown.add_column(heading, justify="right" if number else "left", no_wrap=not number)
        for row in self.rows:
            shown.add_row(*row)
        return shown

    def markdown(self) -> str:
        """The table as Markdown, under its title."""
        lines = [self.headings, ["---", *["---:"] * (len(self.headings) - 1)], *self.rows]
        title = [f"**{self.title}**", ""] if self.title else []
        return "\n".join([*title, *(f"| {' | '.join(line)} |" for line in lines)])
