"""Shows the results as tables (in the terminal and in Markdown) and as plots of time against
length.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from cope_jax.evaluation.report.plot_style import STYLE, TEXT_WIDTH, add_caption, looks, save
from cope_jax.evaluation.report.table import FIRM, MISSING, Table
from cope_jax.runs.records import Record, select
from tools.benchmark.workloads import BACKWARD, FORWARD

_SIZES = "B{batch} H{heads} K{head_dim}, {dtype}, npos_max {npos_max}, {devices}"
_TIMES = "time, and ratio to {reference}"
_BYTES = "memory of the process beyond its inputs, and temporaries of XLA"


def tables(records: Sequence[Record]) -> list[Table]:
    """One table for each combination of a section, a measurement and a size of CoPE's table."""
    return [
        *_tables(
            records,
            "attention",
            "length",
            f"Attention, {{what}}, causal, {_SIZES}: {_TIMES}",
            _time,
        ),
        *_tables(records, "memory", "length", f"Memory of {{what}}, {_SIZES}: {_BYTES}", _memory),
        *_tables(records, "decode", "context", f"Decoding, {{what}}, {_SIZES}: {_TIMES}", _time),
        *_tables(records, "train", "recipe", f"Training, {{what}}, {{devices}}: {_TIMES}", _time),
    ]


def markdown(
    records: Sequence[Record], reasons: Sequence[str], notes: Sequence[str], environment: Record
) -> str:
    """The complete report in Markdown."""
    facts = [f"{name.replace('_', ' ')}: {value}" for name, value in environment.items()]
    parts = ["# Benchmark", *(table.markdown() for table in tables(records))]
    for heading, lines in (("Left out", reasons), ("Notes", notes), ("Measured with", facts)):
        if lines:
            parts.append(f"{heading}:\n\n" + "\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def _tables(
    records: Sequence[Record], section: str, across: str, title: str, cell: Callable[[Record], str]
) -> list[Table]:
    """The tables of a section: one for each measurement and size of CoPE's table.

    Columns are values of `across`.
    """
    built, section_records = [], select(records, section=section)
    for npos_max, measured in {
        (record.get("npos_max"), record["what"]): None for record in section_records
    }:
        of_table = select(section_records, npos_max=npos_max, what=measured)
        columns = list(dict.fromkeys(record[across] for record in of_table))
        rows = []
        for contender in dict.fromkeys(record["contender"] for record in of_table):
            cells = [
                select(of_table, **{"contender": contender, across: column}) for column in columns
            ]
            rows.append(
                [
                    contender,
                    *(
                        cell(records_of_cell[0]) if records_of_cell else MISSING
                        for records_of_cell in cells
                    ),
                ]
            )
        built.append(Table(_filled(title, of_table[0]), [across, *map(str, columns)], rows))
    return built


def _filled(title: str, record: Record) -> str:
    """Fills the sizes of a record into a title."""
    devices = record["devices"]
    return title.format(**record | {"devices": f"JAX on {devices} device{'s' * (devices > 1)}"})


def _time(record: Record) -> str:
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


def _memory(record: Record) -> str:
    taken = mebibytes(record["peak_bytes"] - record["start_bytes"])
    return (
        f"{taken}  {MISSING if record['temp_bytes'] is None else mebibytes(record['temp_bytes'])}"
    )


def mebibytes(count: int) -> str:
    r"""A number of bytes, in MiB or GiB.

    >>> mebibytes(3 * 2**20), mebibytes(3 * 2**30)
    ('3\xa0MiB', '3.0\xa0GiB')
    """
    return f"{count / 2**20:.0f}{FIRM}MiB" if count < 2**30 else f"{count / 2**30:.1f}{FIRM}GiB"


def write_plots(workdir: Path, records: Sequence[Record]) -> list[Path]:
    """Writes `attention_npos_max_N.png` for each measured size N of CoPE's table.

    Returns the paths.
    """
    attention = select(records, section="attention")
    return [
        save(
            time_by_length(select(attention, npos_max=npos_max)),
            workdir / f"attention_npos_max_{npos_max}.png",
        )
        for npos_max in dict.fromkeys(record["npos_max"] for record in attention)
    ]


@rc_context(STYLE)
def time_by_length(records: Sequence[Record]) -> Figure:
    """Plots the median times of attention.

    One panel shows forward, the other forward and backward.
    """
    figure = Figure(figsize=(TEXT_WIDTH, 3.0), layout="constrained")
    lengths = sorted({record["length"] for record in records})
    panels = figure.subplots(1, 2, sharey=True)
    for axes, measured in zip(panels, (FORWARD, BACKWARD), strict=True):
        for name, look in looks(
            list(dict.fromkeys(record["contender"] for record in records))
        ).items():
            of_line = sorted(
                select(records, contender=name, what=measured), key=lambda record: record["length"]
            )
            times = [1000 * record["median_seconds"] for record in of_line]
            axes.plot(
                [record["length"] for record in of_line],
                times,
                label=name,
                **look | {"linestyle": "-"},
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set_title(measured)
        axes.set_xlabel("length")
        axes.grid(which="major", color="0.9", linewidth=0.6)
    panels[0].set_ylabel("time (ms)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    figure.suptitle(_filled(f"time of causal attention, {_SIZES}", records[0]), fontsize=8)
    add_caption(
        figure,
        "medians over rounds; one colour for each encoding, one marker for each implementation",
    )
    return figure
