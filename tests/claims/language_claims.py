"""Sentences on the grid `language`, and conditions on its records for them to be true."""

import functools
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from cope_jax.evaluation.report import grid_cells
from tests.claims.records import Claim, Records, shown_pairs
from tools import publish

LANGUAGE = "Language"
STICK, FOX, LOSING = ["stick_breaking"], ["fox"], ["rope", "pope", "mapformer"]
KEEPING = ["cope", "fox", "path", "alibi", "stick_breaking"]
NEARLY = ["cope", "rope", "fox", "pope"]


@functools.cache
def texts() -> list[dict[str, Any]]:
    """The records of Shakespeare."""
    _, finished, _ = publish.archived("language")
    return [row for row in publish.rows_of(finished) if row["setting"] == "shakespeare"]


@functools.cache
def lower(table: int) -> set[tuple[str, str]]:
    """The pairs of encodings of which the first is shown to have a lower loss on Shakespeare."""
    view = [*publish.VIEWS["language"].values()][table]
    rows = [row for row in texts() if (row["metric"], row["split"]) == view]
    column = grid_cells.column_of(rows, [view[1]])
    assert column.blocks is not None and len(column.blocks) == len(column.errors) == 10
    return shown_pairs(column)


def all_lower(table: int, names: Sequence[str], others: Sequence[str]) -> bool:
    """True if each of these encodings is shown to have a lower loss than each of the others."""
    return {(name, other) for name in names for other in others} <= lower(table)


def loss(r: Records, table: int, *names: str) -> list[float]:
    """The losses on Shakespeare of encodings."""
    return [r.first(LANGUAGE, name, "shakespeare", table) for name in names]


def span(r: Records, table: int, but: Sequence[str] = ()) -> list[float]:
    """The least and the largest loss on Shakespeare of all encodings but some."""
    losses = loss(r, table, *(r.tables[LANGUAGE][table].keys() - {*but}))
    return [min(losses), max(losses)]


def keeps(*names: str) -> bool:
    """True if losses in windows of 8 times the length of training are at most 0.01 away, rounded."""

    def mean(name: str, split: str) -> float:
        wanted = ("loss", name, split)
        rows = (row for row in texts() if (row["metric"], row["encoding"], row["split"]) == wanted)
        return fmean(row["value"] for row in rows)

    return all(abs(round(mean(n, "length=1024") - mean(n, "test"), 2)) <= 0.01 for n in names)


def minutes(*names: str) -> list[float]:
    """The minutes of training of each seed of encodings, or of all, on Shakespeare."""
    rows = [row for row in texts() if (row["metric"], row["split"]) == ("loss", "test")]
    return [row["wall_seconds"] / 60 for row in rows if row["encoding"] in names or not names]


def deviation(r: Records, table: int, *names: str) -> list[float]:
    """The standard deviations over seeds of losses on Shakespeare."""
    return [r.cell(LANGUAGE, name, "shakespeare", table)[1] for name in names]


CLAIMS = [
    Claim(
        "stick-breaking has a loss of {:.2f} nats per token and is shown to be better than all others ({:.2f} to "
        "{:.2f}). In windows of 8 times the length of training RoPE's loss rises from {:.2f} to {:.2f}, PoPE's from "
        "{:.2f} to {:.2f}, MapFormer's from {:.2f} to {:.2f}, and those of CoPE, FoX, PaTH, ALiBi and stick-breaking, "
        "which are shown to be lower than these three, change by at most 0.01.",
        lambda r: [
            *loss(r, 0, *STICK),
            *span(r, 0, STICK),
            *(value for name in LOSING for table in (0, 1) for value in loss(r, table, name)),
        ],
        lambda r: (
            all_lower(0, STICK, [*(r.tables[LANGUAGE][0].keys() - {*STICK})])
            and all_lower(1, KEEPING, LOSING)
            and keeps(*KEEPING)
        ),
    ),
    Claim(
        "stick-breaking ({:.2f}) is shown to be better than all others ({:.2f} to {:.2f}). CoPE, RoPE, FoX and PoPE "
        "are shown to be better than ALiBi ({:.2f}), `cope_signed` ({:.2f}), MapFormer ({:.2f}) and `none` ({:.2f}). "
        "FoX ({:.2f}) is shown to be better than RoPE ({:.2f}) and PaTH ({:.2f}), CoPE ({:.2f}) better than neither.",
        lambda r: [
            *loss(r, 0, *STICK),
            *span(r, 0, STICK),
            *loss(r, 0, "alibi", "cope_signed", "mapformer", "none", "fox", "rope", "path", "cope"),
        ],
        lambda r: (
            all_lower(0, NEARLY, ["alibi", "cope_signed", "mapformer", "none"])
            and all_lower(0, FOX, ["rope", "path"])
            and not {("cope", "rope"), ("cope", "path")} & lower(0)
        ),
    ),
    Claim(
        "RoPE's loss rises to {:.2f}, PoPE's to {:.2f}, MapFormer's to {:.2f} and that of `none` to {:.2f}; the six "
        "others change by at most 0.01. CoPE, FoX, PaTH, stick-breaking and ALiBi are shown to be better than these "
        "four, and among the five no difference is shown.",
        lambda r: loss(r, 1, *LOSING, "none"),
        lambda r: (
            keeps(*KEEPING, "cope_signed")
            and all_lower(1, KEEPING, [*LOSING, "none"])
            and not {(a, b) for a in KEEPING for b in KEEPING} & lower(1)
        ),
    ),
    Claim(
        "each model has a higher loss on repeated pairs ({:.2f} to {:.2f}) than on other tokens ({:.2f} to {:.2f}); "
        "these pairs are rare. Between encodings nothing is shown:",
        lambda r: [*span(r, 2), *span(r, 3)],
        lambda r: span(r, 2)[0] > span(r, 3)[1] and not lower(2),
    ),
    Claim(
        "at the length of training the standard deviation is {:.2f} to {:.2f}, of MapFormer {:.2f} and of "
        "`cope_signed` {:.2f}; in the longest windows RoPE has {:.2f}, PoPE {:.2f} and MapFormer {:.2f}.",
        lambda r: [
            *(end(deviation(r, 0, *NEARLY, *KEEPING, "none")) for end in (min, max)),
            *deviation(r, 0, "mapformer", "cope_signed"),
            *deviation(r, 1, *LOSING),
        ],
    ),
]

TIMES = [
    Claim(
        "half of the cells trained for at most {:.1f} minutes, on one core each, those of PaTH for {:.1f} to {:.1f}.",
        lambda _: [np.median(minutes()), min(minutes("path")), max(minutes("path"))],
    )
]
"""Sentences that depend on no errors."""
