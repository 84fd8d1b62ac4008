"""Shows the results as tables, in the terminal and in Markdown."""

from collections.abc import Sequence

from cope_jax.evaluation.report.table import FIRM, MISSING, Table
from cope_jax.runs.records import Record, select

_SIZES = "B{batch} H{heads} K{head_dim}, {dtype}, npos_max {npos_max}, {on}"
_TIMES = "time, and ratio to {reference}"
_SECTIONS = {
    "attention": ("length", f"Attention, {{what}}, causal, {_SIZES}: {_TIMES}"),
    "memory": (
        "length",
        f"Memory of {{what}}, {_SIZES}: memory of the process beyond its inputs, and temporaries of "
        "XLA",
    ),
    "decode": ("context", f"Decoding, {{what}}, {_SIZES}: {_TIMES}"),
    "train": ("recipe", f"Training, {{what}}, {{on}}: {_TIMES}"),
}
"""By section: the field whose values are the columns, and the title, with fields of a record."""


def tables(records: Sequence[Record]) -> list[Table]:
    """One table for each title, with a row for each contender."""
    built = []
    for section, (across, title) in _SECTIONS.items():
        by_title: dict[str, list[Record]] = {}
        for record in select(records, section=section):
            devices = record["devices"]
            on = f"JAX on {devices} device{'s' * (devices > 1)}"
            by_title.setdefault(title.format(**record, on=on), []).append(record)
        for text, of_table in by_title.items():
            columns = list(dict.fromkeys(record[across] for record in of_table))
            rows: dict[str, dict[object, str]] = {}
            for record in of_table:
                rows.setdefault(record["contender"], {})[record[across]] = cell(record)
            cells = [
                [name, *(row.get(at, MISSING) for at in columns)] for name, row in rows.items()
            ]
            built.append(Table(text, [across, *map(str, columns)], cells))
    return built


def markdown(records: Sequence[Record], reasons: Sequence[str], environment: Record) -> str:
    """The complete report in Markdown."""
    facts = [f"{name.replace('_', ' ')}: {value}" for name, value in environment.items()]
    parts = ["# Benchmark", *(table.markdown() for table in tables(records))]
    for heading, lines in (("Left out", reasons), ("Measured with", facts)):
        if lines:
            parts.append(f"{heading}:\n\n" + "\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def cell(record: Record) -> str:
    """The time of a record and its ratio, or its memory and the temporaries of XLA."""
    if record["section"] == "memory":
        taken, temporary = record["peak_bytes"] - record["start_bytes"], record["temp_bytes"]
        return f"{mebibytes(taken)}  {MISSING if temporary is None else mebibytes(temporary)}"
    ratio = record["ratio"]
    times = MISSING if ratio is None else f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.0f}×"
    return f"{milliseconds(record['median_seconds'])}  {times}"


def milliseconds(seconds: float) -> str:
    r"""A time in milliseconds, with at least three digits.

    >>> [milliseconds(seconds) for seconds in (0.00034567, 0.0123, 1.2345)]
    ['0.346\xa0ms', '12.3\xa0ms', '1234\xa0ms']
    """
    value = 1000 * seconds
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f}{FIRM}ms"


def mebibytes(count: int) -> str:
    r"""A number of bytes, in MiB or GiB.

    >>> mebibytes(3 * 2**20), mebibytes(3 * 2**30)
    ('3\xa0MiB', '3.0\xa0GiB')
    """
    return f"{count / 2**20:.0f}{FIRM}MiB" if count < 2**30 else f"{count / 2**30:.1f}{FIRM}GiB"
