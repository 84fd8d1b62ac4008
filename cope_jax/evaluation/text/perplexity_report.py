"""The perplexity of a text under decoders, as reported in papers: per token, word and byte, by position, by length."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from cope_jax.corpora.packing import TokenStream
from cope_jax.evaluation.report.plot_style import COLUMN_WIDTH, STYLE, band, colour, level_axis, line, plain_log
from cope_jax.evaluation.report.table import Table, mean_std, words
from cope_jax.evaluation.text import likelihood
from cope_jax.evaluation.text.likelihood import Losses, losses, sliding
from cope_jax.runs.records import Record, select
from cope_jax.tasks.stored import TextTask

FIGURES = ("perplexity", "token_perplexity", "bits_per_byte", "loss")


def read(
    model: Any, task: TextTask, split: str, length: int, stride: int, width: int, batch_size: int, label: str = "loss"
) -> Losses:
    """The loss of every token of a split, measured in sliding windows.

    Positions are 0, 1, … in each window, whatever training sampled. If documents are packed, windows do not cross them.
    Ends of documents that were added to the text do not count. Arguments and errors are those of `sliding` and
    `losses`.
    """
    nats, seen = [], []
    for entries in task.token_streams(split):
        windows = sliding(entries.tokens, length, stride, max(1, min(width, len(entries))), _bounds(task, entries))
        found = losses(model, windows, batch_size, label)
        nats.append(found.nats[entries.counted])
        seen.append(found.seen[entries.counted])
    return Losses(np.concatenate(nats), np.concatenate(seen))


def check_length(model: Any, task: TextTask, split: str, length: int) -> None:
    """Raises ConfigError if a table of the encoding is too short for the windows of this length that the texts have."""
    longest = max(int(np.diff(_bounds(task, entries)).max()) for entries in task.token_streams(split))
    likelihood.check_length(model, min(length, longest))


def _bounds(task: TextTask, entries: TokenStream) -> np.ndarray:
    """The bounds that no window crosses."""
    return entries.bounds[[0, -1]] if task.crosses_documents else entries.bounds


def record(task: TextTask, split: str, length: int, stride: int, found: Losses) -> Record:
    """The record of the losses of a split: its metrics, and the mean loss by the number of tokens seen.

    `known_tokens`, the mean number of tokens seen, is the amount of context behind these metrics.
    """
    counts = task.counts(split)
    seen, loss = found.by_seen(length)
    return {
        "split": split,
        "length": length,
        "stride": stride,
        **vars(counts),
        "known_tokens": float(found.seen.mean()),
        **counts.per_unit(float(found.nats.sum())),
        "by_seen": {"seen": seen.tolist(), "loss": loss.tolist()},
    }


def figures_table(records: Sequence[Record]) -> Table:
    """A row for each length, with mean ± standard deviation over seeds."""
    first = records[0]
    counts = f"{first['tokens']:,} tokens, {first['words']:,} words, {first['bytes']:,} bytes"
    figures = [name for name in FIGURES if name in first]  # some are missing if words are unknown
    rows = []
    for length in lengths(records):
        own = select(records, length=length)
        cells = [_cell([row[name] for row in own]) for name in figures]
        rows.append([str(length), str(own[0]["stride"]), f"{own[0]['known_tokens']:.1f}", *cells])
    headings = ["length", "stride", "tokens seen", *map(words, figures)]
    return Table(f"{first['split']}: {counts}", headings, rows)


def positions_table(records: Sequence[Record]) -> Table:
    """Mean loss by the number of tokens seen, of records of one length."""
    rows = [
        [f"{seen:g}", _cell([row["by_seen"]["loss"][place] for row in records])]
        for place, seen in enumerate(records[0]["by_seen"]["seen"])
    ]
    return Table(f"windows of {records[0]['length']}", ["tokens seen", "loss"], rows)


@rc_context(STYLE)
def loss_by_position(records: Sequence[Record]) -> Figure:
    """Mean loss by the number of tokens seen, one line per length; the band spans the seeds from best to worst."""
    figure = Figure(figsize=(COLUMN_WIDTH, 2.4), layout="constrained")
    axes = figure.subplots()
    for number, length in enumerate(lengths(records)):
        own = [row["by_seen"] for row in select(records, length=length)]
        by_place = list(zip(*(row["loss"] for row in own), strict=True))
        band(axes, own[0]["seen"], by_place, number, label=f"windows of {length}")
    axes.set_xscale("log")
    axes.set_xlabel("tokens seen")
    axes.set_ylabel("loss (nats per token)")
    figure.legend(loc="outside upper center", ncols=2)
    return figure


@rc_context(STYLE)
def by_length(records: Sequence[Record], metric: str, trained: int) -> Figure:
    """A metric against the length of the windows: the mean and single seeds; the training length is marked."""
    figure = Figure(figsize=(COLUMN_WIDTH, 2.4), layout="constrained")
    axes = figure.subplots()
    values = [[row[metric] for row in select(records, length=length)] for length in lengths(records)]
    axes.plot(lengths(records), [np.mean(own) for own in values], **line(0))
    for length, own in zip(lengths(records), values, strict=True):
        axes.scatter([length] * len(own), own, s=6, color=colour(0), alpha=0.5, linewidths=0)
    level_axis(axes, [(length, length == trained) for length in lengths(records)])
    axes.set_xlabel("length of the context")
    axes.set_ylabel(words(metric))
    flat = [value for own in values for value in own]
    if max(flat) > 4 * min(flat):
        plain_log(axes, flat)
    return figure


def lengths(records: Sequence[Record]) -> list[int]:
    """The lengths of the windows, ascending."""
    return sorted({row["length"] for row in records})


def _cell(values: Sequence[float]) -> str:
    """Mean ± standard deviation, to about four digits."""
    return mean_std(values, 2 if np.mean(values) >= 10 else 3)
