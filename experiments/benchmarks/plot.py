"""Time against length, both logarithmic."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from cope_jax.evaluation.report.plot_style import COLOURS, MARKERS, STYLE, TEXT_WIDTH
from cope_jax.runs.records import Record, select
from experiments.benchmarks.contenders import BACKWARD, FORWARD


def write(workdir: Path, records: Sequence[Record]) -> list[Path]:
    """Writes `attention_npos_max_N.png` for each N measured. Returns the paths."""
    attention = select(records, section="attention")
    paths = []
    for npos_max in dict.fromkeys(record["npos_max"] for record in attention):
        path = workdir / f"attention_npos_max_{npos_max}.png"
        time_by_length(select(attention, npos_max=npos_max)).savefig(path, dpi=200)
        paths.append(path)
    return paths


@rc_context(STYLE)
def time_by_length(records: Sequence[Record]) -> Figure:
    """Median times of the attention's records, a panel for forward and one for forward with backward."""
    figure = Figure(figsize=(TEXT_WIDTH, 3.0), layout="constrained")
    names = list(dict.fromkeys(record["contender"] for record in records))
    lengths = sorted({record["length"] for record in records})
    panels = figure.subplots(1, 2, sharey=True)
    for axes, what in zip(panels, (FORWARD, BACKWARD), strict=True):
        for number, name in enumerate(names):
            own = sorted(select(records, contender=name, what=what), key=lambda record: record["length"])
            axes.plot(
                [record["length"] for record in own],
                [1000 * record["median_seconds"] for record in own],
                label=name,
                color=COLOURS[number % len(COLOURS)],
                marker=MARKERS[number % len(MARKERS)],
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set_title(what)
        axes.set_xlabel("length")
        axes.grid(which="major", color="0.9", linewidth=0.6)
    panels[0].set_ylabel("time (ms)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    return figure
