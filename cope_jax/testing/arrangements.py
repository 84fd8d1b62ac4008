"""Arrangements of tokens: documents in one row, and padding."""

from typing import Any

import numpy as np

from cope_jax.testing.leaks import broadcast
from cope_jax.testing.results import Array
from cope_jax.testing.subject import Subject


def documents(subject: Subject) -> Array:
    """Returns document ids `[1, L]`: a third of the row, a single token, and the rest."""
    third = max(1, subject.length // 3)
    sizes = [third, 1, subject.length - third - 1]
    if subject.batch < len(sizes):  # each is the first of an example
        sizes = [third, subject.length - third]
    return np.repeat(np.arange(len(sizes), dtype=np.int32) + 1, sizes)[None]


def starts(ids: Array) -> list[int]:
    """Returns the index of the first token of each document of a row."""
    return [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist()]


def packed(subject: Subject) -> dict[str, Any]:
    """Returns ids of documents, and positions that start again, for adapters."""
    ids = documents(subject)
    first = np.array(starts(ids[0]))[ids[0] - 1]
    positions = (np.arange(subject.length) - first).astype(np.int32)[None]
    return broadcast(subject, {"segments": ids, "positions": positions})


def alternating(subject: Subject) -> Array:
    """Returns a mask `[L, L]`: even tokens see even ones, odd see odd."""
    odd = np.arange(subject.length) % 2
    return odd[:, None] == odd


def left_mask(subject: Subject, most: int) -> Array:
    """Returns a mask `[B, L]`, True at tokens: up to `most` tokens of padding at the left."""
    amounts = np.linspace(0, most, subject.batch).round().astype(int)
    return np.arange(subject.length)[None] >= amounts[:, None]


def padded(mask: Array) -> dict[str, Any]:
    """Returns the mask of padding, and positions that count from the first token."""
    return {"padding": mask, "positions": np.maximum(mask.cumsum(axis=1) - 1, 0).astype(np.int32)}


def shifted(array: Array, mask: Array, back: bool = False) -> Array:
    """Moves each example behind its padding; what does not fit comes first."""
    amounts = (~mask).sum(axis=1) * (-1 if back else 1)
    return np.stack([np.roll(row, int(n), axis=0) for row, n in zip(array, amounts, strict=True)])
