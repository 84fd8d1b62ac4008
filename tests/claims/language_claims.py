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
TEXTS = SHAKESPEARE, WIKITEXT, CODE = "shakespeare", "wikitext-2", "code"
STICK, LOSING = ["stick_breaking"], ["rope", "pope", "mapformer"]
KEEPING = ["cope", "fox", "path", "alibi", "stick_breaking"]
WORST = ["alibi", "cope_signed", "mapformer", "none"]
"""On Shakespeare, at the length of training."""


@functools.cache
def rows_of(text: str) -> list[dict[str, Any]]:
    """The records of a text."""
    _, finished, _ = publish.archived("language")
    return [row for row in publish.rows_of(finished) if row["setting"] == text]


@functools.cache
def lower(text: str, table: int) -> set[tuple[str, str]]:
    """The pairs of encodings of which the first is shown to have a lower loss."""
    view = [*publish.VIEWS["language"].values()][table]
    rows = [row for row in rows_of(text) if (row["metric"], row["split"]) == view]
    column = grid_cells.column_of(rows, [view[1]])
    assert column.blocks is not None and len(column.blocks) == len(column.errors) == 10
    return shown_pairs(column)


def all_lower(text: str, table: int, names: Sequence[str], others: Sequence[str]) -> bool:
    """True if each of these encodings is shown to have a lower loss than each of the others."""
    return {(name, other) for name in names for other in others} <= lower(text, table)


def loss(r: Records, text: str, table: int, *names: str) -> list[float]:
    """The losses of encodings."""
    return [r.first(LANGUAGE, name, text, table) for name in names]


def span(r: Records, text: str, table: int, but: Sequence[str] = ()) -> list[float]:
    """The least and the largest loss of all encodings but some."""
    losses = loss(r, text, table, *(r.tables[LANGUAGE][table].keys() - {*but}))
    return [min(losses), max(losses)]


def mean(text: str, metric: str, name: str, split: str = "test") -> float:
    """The mean over the seeds of an encoding, not rounded."""
    wanted = (metric, name, split)
    rows = (r for r in rows_of(text) if (r["metric"], r["encoding"], r["split"]) == wanted)
    return fmean(row["value"] for row in rows)


def keeps(text: str, *names: str) -> bool:
    """True if losses in windows of 8 times the length of training are at most 0.02 away, rounded."""
    pairs = [(mean(text, "loss", n, "length=1024"), mean(text, "loss", n)) for n in names]
    return all(abs(round(longest - shortest, 2)) <= 0.02 for longest, shortest in pairs)


def order(text: str, metric: str) -> list[str]:
    """The encodings but ALiBi, RoPE and PaTH, that of the least loss first."""
    names = {row["encoding"] for row in rows_of(text)} - {"alibi", "rope", "path"}
    return sorted(names, key=lambda name: mean(text, metric, name))


def repeated(text: str) -> int:
    """The number of targets whose pair with the token before occurred earlier in the window."""
    wanted = ("repeated_loss", "test")
    rows = (row for row in rows_of(text) if (row["metric"], row["split"]) == wanted)
    return int(sum(weight for _, weight in next(rows)["blocks"]))


def minutes(*names: str) -> list[float]:
    """The minutes of training of each seed of encodings, or of all."""
    rows = [row for text in TEXTS for row in rows_of(text)]
    rows = [row for row in rows if (row["metric"], row["split"]) == ("loss", "test")]
    return [row["wall_seconds"] / 60 for row in rows if row["encoding"] in names or not names]


def deviations(r: Records, table: int, *names: str) -> list[float]:
    """The standard deviation over seeds of each encoding, on each text."""
    return [r.cell(LANGUAGE, name, text, table)[1] for name in names for text in TEXTS]


def ends(r: Records, text: str) -> list[float]:
    """The least and the largest deviation at the length of training, without two encodings."""
    names = r.tables[LANGUAGE][0].keys() - {"mapformer", "cope_signed"}
    known = [r.cell(LANGUAGE, name, text, 0)[1] for name in names]
    return [min(known), max(known)]


CLAIMS = [
    Claim(
        "stick-breaking is shown to be better than all others, with a loss of {:.2f} nats per token on Shakespeare "
        "(others {:.2f} to {:.2f}), {:.2f} on WikiText-2 ({:.2f} to {:.2f}) and {:.2f} on code ({:.2f} to {:.2f}). "
        "CoPE is shown to be better than RoPE on WikiText-2 ({:.2f} and {:.2f}), RoPE better than CoPE on code "
        "({:.2f} and {:.2f}), and neither on Shakespeare.",
        lambda r: [
            *(x for text in TEXTS for x in (*loss(r, text, 0, *STICK), *span(r, text, 0, STICK))),
            *loss(r, WIKITEXT, 0, "cope", "rope"),
            *loss(r, CODE, 0, "rope", "cope"),
        ],
        lambda r: (
            all(all_lower(t, 0, STICK, [*(r.tables[LANGUAGE][0].keys() - {*STICK})]) for t in TEXTS)
            and ("cope", "rope") in lower(WIKITEXT, 0)
            and ("rope", "cope") in lower(CODE, 0)
            and not {("cope", "rope"), ("rope", "cope")} & lower(SHAKESPEARE, 0)
        ),
    ),
    Claim(
        "In windows of 8 times the length of training RoPE's loss is {:.2f}, {:.2f} and {:.2f} ({:.2f}, {:.2f} and "
        "{:.2f} at the length of training), PoPE's {:.2f}, {:.2f} and {:.2f} ({:.2f}, {:.2f} and {:.2f}), "
        "MapFormer's {:.2f}, {:.2f} and {:.2f} ({:.2f}, {:.2f} and {:.2f}); those of CoPE, FoX, PaTH, ALiBi and "
        "stick-breaking, which are shown to be lower than these three, change by at most 0.02.",
        lambda r: [
            x
            for name in LOSING
            for table in (1, 0)
            for text in TEXTS
            for x in loss(r, text, table, name)
        ],
        lambda r: all(all_lower(t, 1, KEEPING, LOSING) and keeps(t, *KEEPING) for t in TEXTS),
    ),
    Claim(
        "stick-breaking is shown to be better than all others on each text (Shakespeare {:.2f}, others {:.2f} to "
        "{:.2f}; WikiText-2 {:.2f}, others {:.2f} to {:.2f}; code {:.2f}, others {:.2f} to {:.2f}).",
        lambda r: [x for t in TEXTS for x in (*loss(r, t, 0, *STICK), *span(r, t, 0, STICK))],
        lambda r: all(
            all_lower(t, 0, STICK, [*(r.tables[LANGUAGE][0].keys() - {*STICK})]) for t in TEXTS
        ),
    ),
    Claim(
        "On Shakespeare CoPE, RoPE, FoX and PoPE are shown to be better than ALiBi ({:.2f}), `cope_signed` "
        "({:.2f}), MapFormer ({:.2f}) and `none` ({:.2f}); FoX ({:.2f}) is shown to be better than RoPE ({:.2f}) "
        "and PaTH ({:.2f}), CoPE ({:.2f}) better than neither.",
        lambda r: loss(r, SHAKESPEARE, 0, *WORST, "fox", "rope", "path", "cope"),
        lambda r: (
            all_lower(SHAKESPEARE, 0, ["cope", "rope", "fox", "pope"], WORST)
            and all_lower(SHAKESPEARE, 0, ["fox"], ["rope", "path"])
            and not {("cope", "rope"), ("cope", "path")} & lower(SHAKESPEARE, 0)
        ),
    ),
    Claim(
        "On WikiText-2 FoX ({:.2f}) and PoPE ({:.2f}) are shown to be better than RoPE ({:.2f}), PaTH ({:.2f}) and "
        "ALiBi ({:.2f}), CoPE ({:.2f}) better than RoPE and ALiBi, and all six better than `cope_signed` ({:.2f}), "
        "`none` ({:.2f}) and MapFormer ({:.2f}). FoX is shown to be better than PoPE, but not than CoPE.",
        lambda r: loss(
            *(r, WIKITEXT, 0, "fox", "pope", "rope", "path", "alibi"),
            *("cope", "cope_signed", "none", "mapformer"),
        ),
        lambda r: (
            all_lower(WIKITEXT, 0, ["fox", "pope"], ["rope", "path", "alibi"])
            and all_lower(WIKITEXT, 0, ["cope"], ["rope", "alibi"])
            and all_lower(WIKITEXT, 0, ["fox", "pope", "rope", "path", "alibi", "cope"], WORST[1:])
            and ("fox", "pope") in lower(WIKITEXT, 0)
            and ("fox", "cope") not in lower(WIKITEXT, 0)
        ),
    ),
    Claim(
        "On code FoX ({:.2f}) is shown to be better than all others but stick-breaking, RoPE ({:.2f}) better than "
        "CoPE ({:.2f}), and RoPE, PoPE ({:.2f}), PaTH ({:.2f}) and CoPE better than ALiBi ({:.2f}); all of these "
        "are shown to be better than `none` ({:.2f}), `cope_signed` ({:.2f}) and MapFormer ({:.2f}).",
        lambda r: loss(
            *(r, CODE, 0, "fox", "rope", "cope", "pope", "path"),
            *("alibi", "none", "cope_signed", "mapformer"),
        ),
        lambda r: (
            all_lower(CODE, 0, ["fox"], [*(r.tables[LANGUAGE][0].keys() - {*STICK, "fox"})])
            and ("rope", "cope") in lower(CODE, 0)
            and all_lower(CODE, 0, ["rope", "pope", "path", "cope"], WORST)
            and all_lower(CODE, 0, [*KEEPING, "rope", "pope"], WORST[1:])
        ),
    ),
    Claim(
        "RoPE's loss rises to {:.2f} on Shakespeare, {:.2f} on WikiText-2 and {:.2f} on code, PoPE's to {:.2f}, "
        "{:.2f} and {:.2f}, MapFormer's to {:.2f}, {:.2f} and {:.2f} and that of `none` to {:.2f}, {:.2f} and "
        "{:.2f}; the six others change by at most 0.02. CoPE, FoX, PaTH, stick-breaking and ALiBi are shown to be "
        "better than these four. Among the five no difference is shown on Shakespeare; on the other texts "
        "stick-breaking is shown to be better than the others, on WikiText-2 CoPE and FoX better than PaTH and "
        "ALiBi, and on code FoX better than CoPE and ALiBi.",
        lambda r: [x for n in (*LOSING, "none") for t in TEXTS for x in loss(r, t, 1, n)],
        lambda r: (
            all(keeps(t, *KEEPING, "cope_signed") for t in TEXTS)
            and all(all_lower(t, 1, KEEPING, [*LOSING, "none"]) for t in TEXTS)
            and not {(a, b) for a in KEEPING for b in KEEPING} & lower(SHAKESPEARE, 1)
            and all(all_lower(t, 1, STICK, KEEPING[:-1]) for t in TEXTS[1:])
            and all_lower(WIKITEXT, 1, ["cope", "fox"], ["path", "alibi"])
            and all_lower(CODE, 1, ["fox"], ["cope", "alibi"])
        ),
    ),
    Claim(
        "each model has a higher loss on repeated pairs (Shakespeare {:.2f} to {:.2f}, WikiText-2 {:.2f} to "
        "{:.2f}, code {:.2f} to {:.2f}) than on other tokens ({:.2f} to {:.2f}, {:.2f} to {:.2f}, {:.2f} to "
        "{:.2f}); these pairs are rare, {:,}, {:,} and {:,} targets.",
        lambda r: [
            *(x for table in (2, 3) for text in TEXTS for x in span(r, text, table)),
            *map(repeated, TEXTS),
        ],
        lambda r: all(span(r, t, 2)[0] > span(r, t, 3)[1] for t in TEXTS),
    ),
    Claim(
        "On Shakespeare and code nothing is shown between encodings. On WikiText-2 stick-breaking ({:.2f}) and FoX "
        "({:.2f}) are shown to be better than PaTH ({:.2f}) and RoPE ({:.2f}), and these four, PoPE, CoPE and "
        "ALiBi better than `cope_signed` ({:.2f}), `none` ({:.2f}) and MapFormer ({:.2f}). Without ALiBi, RoPE and "
        "PaTH the order there is that on other tokens, so the probe says little of recall itself.",
        lambda r: loss(
            *(r, WIKITEXT, 2, *STICK, "fox", "path", "rope", "cope_signed", "none", "mapformer")
        ),
        lambda r: (
            not lower(SHAKESPEARE, 2)
            and not lower(CODE, 2)
            and all_lower(WIKITEXT, 2, [*STICK, "fox"], ["path", "rope"])
            and all_lower(WIKITEXT, 2, [*KEEPING, "pope", "rope"], WORST[1:])
            and order(WIKITEXT, "repeated_loss") == order(WIKITEXT, "other_loss")
        ),
    ),
    Claim(
        "at the length of training the standard deviation is {:.2f} to {:.2f} on Shakespeare, {:.2f} to {:.2f} on "
        "WikiText-2 and {:.2f} to {:.2f} on code, but of MapFormer {:.2f}, {:.2f} and {:.2f} and of `cope_signed` "
        "{:.2f}, {:.2f} and {:.2f}; in the longest windows RoPE has {:.2f}, {:.2f} and {:.2f}, PoPE {:.2f}, {:.2f} "
        "and {:.2f}, and MapFormer {:.2f}, {:.2f} and {:.2f}.",
        lambda r: [
            *(x for text in TEXTS for x in ends(r, text)),
            *deviations(r, 0, "mapformer", "cope_signed"),
            *deviations(r, 1, *LOSING),
        ],
    ),
]

TIMES = [
    Claim(
        "half of the cells trained for at most {:.1f} minutes, on one core each, those of PaTH for {:.1f} to "
        "{:.1f}.",
        lambda _: [np.median(minutes()), min(minutes("path")), max(minutes("path"))],
    )
]
"""Sentences that depend on no errors."""
