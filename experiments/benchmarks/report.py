"""What was measured as tables, in the terminal and in Markdown."""

import dataclasses
from collections.abc import Callable, Sequence

import rich.table

from cope_jax.runs.records import Record, select

MISSING = "–"
FIRM = "\N{NO-BREAK SPACE}"  # between a number and its unit, where a narrow terminal would break a line


@dataclasses.dataclass(frozen=True)
class Table:
    """A table as text.

    Attributes:
      title: what its cells are.
      headings: of the columns; the first column names the row.
      rows: cells.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def rich(self) -> rich.table.Table:
        table = rich.table.Table(title=self.title, title_justify="left")
        for number, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [self.headings, ["---", *["---:"] * (len(self.headings) - 1)], *self.rows]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(line)} |" for line in lines)])


def tables(records: Sequence[Record]) -> list[Table]:
    """A table for each section, what was timed in it, and size of CoPE's table."""
    return [
        *_tables(select(records, section="attention"), ("npos_max", "what"), "length", _attention_title, _time),
        *_tables(select(records, section="memory"), ("npos_max",), "length", _memory_title, _memory),
        *_tables(select(records, section="decode"), ("npos_max", "what"), "context", _decode_title, _time),
        *_tables(select(records, section="train"), ("what",), "recipe", _train_title, _time),
    ]


def markdown(records: Sequence[Record], reasons: Sequence[str], environment: Record, notes: Sequence[str] = ()) -> str:
    """The whole report."""
    facts = [f"{name.replace('_', ' ')}: {value}" for name, value in environment.items()]
    parts = ["# Benchmark", *(table.markdown() for table in tables(records))]
    for heading, lines in (("Left out", reasons), ("Notes", notes), ("Measured with", facts)):
        if lines:
            parts.append(f"{heading}:\n\n" + "\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def _tables(
    records: Sequence[Record],
    by: Sequence[str],
    across: str,
    title: Callable[[Record], str],
    cell: Callable[[Record], str],
) -> list[Table]:
    """One table for each group of records that agree in the fields of `by`; its columns are the values of `across`."""
    built = []
    for group in {tuple(record[name] for name in by): None for record in records}:
        own = select(records, **dict(zip(by, group, strict=True)))
        columns = list(dict.fromkeys(record[across] for record in own))
        rows = []
        for contender in dict.fromkeys(record["contender"] for record in own):
            found = [select(own, **{"contender": contender, across: column}) for column in columns]
            rows.append([contender, *(cell(one[0]) if one else MISSING for one in found)])
        built.append(Table(title(own[0]), [across, *map(str, columns)], rows))
    return built


def _time(record: Record) -> str:
    return f"{milliseconds(record['median_seconds'])}  {times(record['ratio'])}"


def milliseconds(seconds: float) -> str:
    r"""A time to three digits.

    >>> [milliseconds(seconds) for seconds in (0.00034567, 0.0123, 1.2345)]
    ['0.346\xa0ms', '12.3\xa0ms', '1234\xa0ms']
    """
    value = 1000 * seconds
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f}{FIRM}ms"


def times(ratio: float | None) -> str:
    """A ratio, as text.

    >>> times(2.0)
    '2.00×'
    """
    return MISSING if ratio is None else f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.0f}×"


def _memory(record: Record) -> str:
    taken = mebibytes(record["peak_bytes"] - record["start_bytes"])
    return f"{taken}  {MISSING if record['temp_bytes'] is None else mebibytes(record['temp_bytes'])}"


def mebibytes(count: int) -> str:
    r"""Bytes, as text.

    >>> mebibytes(3 * 2**20), mebibytes(3 * 2**30)
    ('3\xa0MiB', '3.0\xa0GiB')
    """
    return f"{count / 2**20:.0f}{FIRM}MiB" if count < 2**30 else f"{count / 2**30:.1f}{FIRM}GiB"


def _attention_title(record: Record) -> str:
    return f"Attention, {record['what']}, causal, {_sizes(record)}: time, and times that of {record['reference']}"


def _memory_title(record: Record) -> str:
    return f"Memory of {record['what']}, {_sizes(record)}: of the process beyond its inputs, and XLA's temporaries"


def _decode_title(record: Record) -> str:
    return f"Decoding, {record['what']}, {_sizes(record)}: time, and times that of {record['reference']}"


def _train_title(record: Record) -> str:
    return f"Training, {record['what']}, {_devices(record)}: time, and times that of {record['reference']}"


def _sizes(record: Record) -> str:
    sizes = f"B{record['batch']} H{record['heads']} K{record['head_dim']}, {record['dtype']}"
    return f"{sizes}, npos_max {record['npos_max']}, {_devices(record)}"


def _devices(record: Record) -> str:
    return f"JAX on {record['devices']} device{'s' * (record['devices'] > 1)}"
