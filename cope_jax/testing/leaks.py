"""Dependence of outputs on tokens: which output may not depend on which token, but does."""

from collections.abc import Callable
from typing import Any

import numpy as np

from cope_jax.testing.measures import Measure
from cope_jax.testing.results import Array, distance
from cope_jax.testing.subject import Subject

MOST = 64
"""The number of places of a longer row that are tried."""


def places(length: int) -> Array:
    """Places of a row: all, or both sides of the borders of blocks and evenly spaced ones.

    >>> places(256)[-6:].tolist()
    [238, 239, 240, 247, 254, 255]
    """
    if length <= MOST:
        return np.arange(length)
    block = 16
    while length // block > MOST // 4:
        block *= 2
    borders = np.arange(block, length, block)
    chosen = np.union1d([0, length - 1], [borders - 1, borders])
    others = np.setdiff1d(np.arange(length), chosen)
    evenly = np.linspace(0, len(others) - 1, MOST - len(chosen)).round().astype(int)
    return np.union1d(chosen, others[evenly])


def leak(
    subject: Subject,
    forbidden_LL: Array,
    label: Callable[[int], str] = lambda token: "",
    **data: Any,
) -> Measure:
    """Replaces tokens, and looks for outputs that must not change.

    Args:
      subject: the function.
      forbidden_LL: bool, True at [i, j] if output i must not depend on token j.
      label: words that follow the number of a token, such as " (document 1)".
      **data: arrays `[1, …]` for adapters.

    Returns:
      the largest change. A broken law names two tokens: bisection divides the replaced tokens until
      one is left that changes the first wrong output.
    """
    sets = np.unique(forbidden_LL, axis=0)
    if len(sets) > MOST:
        sets = np.unique(forbidden_LL[places(subject.length)], axis=0)
    sets = sets[sets.any(axis=1)]
    wrong = [(forbidden_LL | ~tokens).all(axis=1) for tokens in sets]
    apart = np.where(wrong, changes(subject, sets, **data), 0)
    worst = float(apart.max(initial=0))
    if worst <= subject.leak_bound:
        return Measure(worst, subject.leak_bound)
    output = int((apart > subject.leak_bound).any(axis=0).argmax())
    sources = _smallest(subject, np.flatnonzero(sets[apart[:, output].argmax()]), output, **data)
    change = changes(subject, [_among(subject, sources)], **data)[0, output]
    names = " and ".join(f"{token}{label(token)}" for token in sources[:4])
    return Measure(
        worst,
        subject.leak_bound,
        f"token {names} changes output {output}{label(output)} by {change:.2g}",
        (int(sources[-1]), output),
    )


def changes(subject: Subject, sets: Any, **data: Any) -> Array:
    """Returns by how much each output changes if the tokens of a set are replaced, `[sets, L]`.

    The first example of each call is unchanged, and the others replace a set each.
    """
    base, other = ([array[:1] for array in arrays] for arrays in subject.draws)
    rows = []
    for start in range(0, len(sets), subject.batch - 1):
        some = sets[start : start + subject.batch - 1]
        replaced = np.zeros((subject.batch, subject.length), bool)
        replaced[1 : len(some) + 1] = some
        arrays = [
            np.where(replaced.reshape(replaced.shape + (1,) * (a.ndim - 2)), b, a)
            for a, b in zip(base, other, strict=True)
        ]
        out = subject.call(arrays, **broadcast(subject, data))
        rows.append(distance(out[1 : len(some) + 1], out[:1]))
    return np.concatenate(rows)


def broadcast(subject: Subject, data: dict[str, Any]) -> dict[str, Any]:
    """Returns data for adapters with the batch of the subject."""
    return {
        name: np.broadcast_to(array, (subject.batch, *array.shape[1:])).copy()
        for name, array in data.items()
    }


def _smallest(subject: Subject, sources: Array, output: int, **data: Any) -> Array:
    """Halves a set of tokens as long as a half still changes the output."""
    while len(sources) > 1:
        halves = np.array_split(sources, 2)
        sets = [_among(subject, half) for half in halves]
        change = changes(subject, sets, **data)[:, output]
        if change.max() <= subject.leak_bound:
            break  # only together
        sources = halves[int(change.argmax())]
    return sources


def _among(subject: Subject, tokens: Array) -> Array:
    return np.isin(np.arange(subject.length), tokens)
