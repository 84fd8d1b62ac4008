"""Reports a decoder's perplexity on a text: per token, word and byte, by position and length."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from cope_jax.corpora.packing import TokenStream
from cope_jax.corpora.text_units import Counts
from cope_jax.evaluation.report.plot_style import (
    COLUMN_WIDTH,
    STYLE,
    band,
    dashed,
    legend,
    level_axis,
    line,
    over_seeds,
    plain_log,
    show_five_percent,
)
from cope_jax.evaluation.report.table import Table, mean_std, words
from cope_jax.evaluation.text import likelihood
from cope_jax.evaluation.text.likelihood import Losses, losses, sliding
from cope_jax.runs.records import Record, select
from cope_jax.tasks.stored import TextTask

FIGURES = ("perplexity", "token_perplexity", "bits_per_byte", "loss")


def read(
    model: Any,
    task: TextTask,
    split: str,
    length: int,
    stride: int,
    width: int,
    batch_size: int,
    label: str = "loss",
) -> Losses:
    """Measures the loss of every token of a split, in sliding windows.

    Positions are 0, 1, … in each window, even if training sampled other positions. If the task
    packs documents, no window crosses from one document into the next. End-of-document tokens that
    were added to the text do not count. For the other arguments and for errors, see `sliding` and
    `losses`.
    """
    nats, seen = [], []
    for entries in task.token_streams(split):
        row = max(1, min(width, len(entries)))
        windows = sliding(entries.tokens, length, stride, row, _bounds(task, entries))
        measured = losses(model, windows, batch_size, label)
        nats.append(measured.nats[entries.counted])
        seen.append(measured.seen[entries.counted])
    return Losses(np.concatenate(nats), np.concatenate(seen))


def check_length(model: Any, task: TextTask, split: str, length: int) -> None:
    """ConfigError if a table of the encoding is too short for windows of `length` tokens."""
    bounds = (_bounds(task, entries) for entries in task.token_streams(split))
    longest = max(int(np.diff(ends).max()) for ends in bounds)
    likelihood.check_length(model, min(length, longest))


def _bounds(task: TextTask, entries: TokenStream) -> np.ndarray:
    """The bounds that no window crosses: of documents if the task packs them, else of the text."""
    return entries.bounds[[0, -1]] if task.crosses_documents else entries.bounds


def record(task: TextTask, split: str, length: int, stride: int, measured: Losses) -> Record:
    """The record of a split: its metrics, and its mean loss by number of earlier tokens seen.

    `known_tokens` is the mean number of earlier tokens that a prediction sees.
    """
    counts = task.counts(split)
    seen, loss = measured.by_seen(length)
    return {
        "split": split,
        "length": length,
        "stride": stride,
        **vars(counts),
        "known_tokens": float(measured.seen.mean()),
        **counts.per_unit(float(measured.nats.sum())),
        "by_seen": {"seen": seen.tolist(), "loss": loss.tolist()},
    }


def figures_table(records: Sequence[Record]) -> Table:
    """Makes a table with a row for each length; cells show mean ± standard deviation over seeds."""
    first = records[0]
    counts = f"{first['tokens']:,} tokens, {first['words']:,} words, {first['bytes']:,} bytes"
    # Some are missing if words or bytes are lost.
    figures = [name for name in FIGURES if name in first]
    rows = []
    for length in lengths(records):
        selected = select(records, length=length)
        cells = [_cell([row[name] for row in selected]) for name in figures]
        stride, seen = selected[0]["stride"], selected[0]["known_tokens"]
        rows.append([str(length), str(stride), f"{seen:.1f}", *cells])
    headings = ["length", "stride", "tokens seen", *map(words, figures)]
    names = (field.name for field in dataclasses.fields(Counts))
    left_out = Counts(**{name: first.get(name, 0) for name in names}).left_out
    caption = "; ".join(filter(None, (whole_text_note(records), left_out)))
    return Table(f"{first['split']}: {counts}", headings, rows, caption=caption)


def whole_text_note(records: Sequence[Record]) -> str:
    """Writes a note that names the windows longer than the text, whose results are all the same.

    If no window is longer than the text, the note is "".

    >>> whole_text_note([{"length": length, "tokens": 140} for length in (128, 256, 512)])
    'windows of 256 and 512 are longer than the text (140 tokens): they read it whole'
    """
    tokens = records[0]["tokens"]
    longer = [str(length) for length in lengths(records) if length > tokens]
    note = f"windows of {' and '.join(longer)} are longer than the text ({tokens:,} tokens): they read it whole"
    return note if longer else ""


def positions_table(records: Sequence[Record]) -> Table:
    """Makes a table of mean loss by number of tokens seen; all records have the same length."""
    rows = [
        [f"{seen:g}", _cell([row["by_seen"]["loss"][number] for row in records])]
        for number, seen in enumerate(records[0]["by_seen"]["seen"])
    ]
    return Table(f"windows of {records[0]['length']}", ["tokens seen", "loss"], rows)


@rc_context(STYLE)
def loss_by_position(records: Sequence[Record], model: str = "") -> Figure:
    """Plots mean loss against the number of tokens seen, by length; bands span all seeds."""
    figure = Figure(figsize=(COLUMN_WIDTH, 2.4), layout="constrained")
    axes = figure.subplots()
    for number, length in enumerate(lengths(records)):
        curves = [row["by_seen"] for row in select(records, length=length)]
        by_place = list(zip(*(row["loss"] for row in curves), strict=True))
        band(axes, curves[0]["seen"], by_place, dashed(number), label=f"windows of {length}")
    show_five_percent(axes, [loss for row in records for loss in row["by_seen"]["loss"]])
    axes.set_xscale("log")
    axes.set_xlabel("tokens seen")
    axes.set_ylabel("loss (nats per token)")
    caption = _caption(records, "bands: lowest to highest seed")
    legend(figure, axes, f"loss on {records[0]['split']}, {model}", caption)
    return figure


@rc_context(STYLE)
def by_length(records: Sequence[Record], metric: str, trained: int, model: str = "") -> Figure:
    """Plots a metric against the length of windows, and marks `trained`, the length of training.

    The line shows the mean over seeds, and dots show single seeds.
    """
    figure = Figure(figsize=(COLUMN_WIDTH, 2.4), layout="constrained")
    axes = figure.subplots()
    values = [
        [row[metric] for row in select(records, length=length)] for length in lengths(records)
    ]
    axes.plot(lengths(records), [np.mean(seed_values) for seed_values in values], **line(0))
    for length, seed_values in zip(lengths(records), values, strict=True):
        dots = {"s": 6, "color": line(0)["color"], "alpha": 0.5, "linewidths": 0}
        axes.scatter([length] * len(seed_values), seed_values, **dots)
    level_axis(axes, [(length, length == trained) for length in lengths(records)])
    axes.set_xlabel("length of the context")
    axes.set_ylabel(words(metric))
    flat = [value for seed_values in values for value in seed_values]
    if max(flat) > 4 * min(flat):
        plain_log(axes, flat)
    else:
        show_five_percent(axes, flat)
    title = f"{words(metric)} on {records[0]['split']}, {model}"
    legend(figure, axes, title, _caption(records, "dots: single seeds"))
    return figure


def _caption(records: Sequence[Record], marks: str) -> str:
    note = whole_text_note(records)
    return over_seeds(records, marks) + (f"; {note}" if note else "")


def lengths(records: Sequence[Record]) -> list[int]:
    """The lengths of the windows, ascending."""
    return sorted({row["length"] for row in records})


def _cell(values: Sequence[float]) -> str:
    """Formats mean ± standard deviation, with about four digits."""
    return mean_std(values, 2 if np.mean(values) >= 10 else 3)
