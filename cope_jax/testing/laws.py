"""The laws of values: each is a function of the subject, and says what it measures.

f is the function under test, x_j the j-th token of its input (of all arrays), f(x)_i the i-th
output.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.testing.arrangements import (
    alternating,
    documents,
    left_mask,
    packed,
    padded,
    shifted,
    starts,
)
from cope_jax.testing.leaks import broadcast, leak
from cope_jax.testing.measures import Measure, Unchecked, law
from cope_jax.testing.results import Array, distance
from cope_jax.testing.subject import Subject


@law("causality", "causal")
def causality(subject: Subject) -> Measure:
    """No output depends on a later token: ∂f(x)_i/∂x_j = 0 for j > i."""
    return leak(subject, np.triu(np.ones((subject.length, subject.length), bool), 1))


@law("examples")
def examples(subject: Subject) -> Measure:
    """No example depends on another one of the batch: f(x, y) = (f(x), f(y))."""
    first, other = subject.draws
    worst = Measure(0.0, subject.leak_bound)
    for example in range(subject.batch):
        mixed = [a.copy() for a in first]
        for array, replacement in zip(mixed, other, strict=True):
            array[example] = replacement[example]
        apart = distance(subject.call(mixed), subject.out)
        apart[example] = 0
        if apart.max() > worst.error:
            text = f"example {example} changes example {int(apart.max(axis=1).argmax())}"
            worst = Measure(float(apart.max()), subject.leak_bound, text)
    return worst


@law("packed documents", "segments")
def packed_documents(subject: Subject) -> Measure:
    """Documents in one row are read as if each were alone: f(x, y) = (f(x), f(y)).

    No output depends on a token of another document, positions start again, and each document has
    the outputs that it has at the start of a row.
    """
    ids = documents(subject)[0]
    data = packed(subject)
    measure = leak(subject, ids[:, None] != ids[None], lambda j: f" (document {ids[j]})", **data)
    if measure.error > measure.bound:
        return measure
    base = [np.repeat(array[:1], subject.batch, 0) for array in subject.draws[0]]
    order, turned = one_document_first(subject)
    together = subject.call(base, **data)[:1]
    alone = subject.call([array[0][order] for array in base], **turned)
    for row, start in zip(alone, starts(ids), strict=False):
        size = int((ids == ids[start]).sum())
        apart = distance(row[None, :size], together[:, start : start + size])[0]
        if apart.max() > measure.error:
            token = int((apart > subject.bound).argmax())
            text = (
                f"output {start + token}, number {token} of document {ids[start]}, is not that of "
                "the document at the start of a row: do positions start again?"
            )
            measure = Measure(float(apart.max()), subject.bound, text)
    return measure


@law("right padding", "padding")
def right_padding(subject: Subject) -> Measure:
    """Padding after an example changes nothing: f(x, padding) = f(x) at the tokens of x."""
    length = subject.length - max(1, subject.length // 4)
    mask = np.arange(subject.length)[None] < length
    measure = leak(subject, mask[0][:, None] & ~mask, lambda j: _mark(mask[0], j), **padded(mask))
    arrays = subject.draws[0]
    out = subject.call(arrays, **broadcast(subject, padded(mask)))[:, :length]
    plain = subject.out if subject.causal else subject.call([a[:, :length] for a in arrays])
    return worse(measure, subject, out, plain[:, :length], "the same tokens without padding")


@law("left padding", "padding")
def left_padding(subject: Subject) -> Measure:
    """Padding before an example changes nothing: f(padding, x) = f(x) at the tokens of x.

    Examples of one batch have padding of different lengths, and positions count from the first
    token.
    """
    mask = left_mask(subject, subject.length // 2)
    last = mask[-1]
    forbidden = last[:, None] & ~last
    measure = leak(subject, forbidden, lambda j: _mark(last, j), **padded(last[None]))
    arrays = [shifted(array, mask) for array in subject.draws[0]]
    return aligned(measure, subject, subject.call(arrays, **padded(mask)), mask)


@law("mask", "mask")
def mask(subject: Subject) -> Measure:
    """No output depends on a token that its mask hides: even tokens see even ones, odd see odd.

    So in several layers too, no token passes on what another must not see.
    """
    see = alternating(subject)
    return leak(subject, ~see, mask=see[None, None])


@law("shift", "positions", "shift")
def shift(subject: Subject) -> Measure:
    """Only distances of positions matter: f(x, p + s) = f(x, p)."""
    positions = np.arange(subject.length, dtype=np.int32)[None]
    near, far = (
        subject.call(subject.draws[0], **broadcast(subject, {"positions": positions + offset}))
        for offset in (0, subject.shift or 0)
    )
    words = f"that at positions without {subject.shift} more"
    return worse(Measure(0.0, subject.bound), subject, far, near, words)


@law("length", "causal")
def length(subject: Subject) -> Measure:
    """The first outputs are those of a shorter input: f(x_1 … x_n) = f(x)_1 … f(x)_n."""
    worst = Measure(0.0, subject.bound)
    lengths = (1, subject.length // 2 + 1) if subject.lengths is None else subject.lengths
    for size in lengths:
        short = subject.call([array[:, :size] for array in subject.draws[0]])
        words = f"the same with {subject.length} tokens instead of {size}"
        worst = worse(worst, subject, short, subject.out[:, :size], words)
    return worst


@law("head groups")
def head_groups(subject: Subject) -> Measure:
    """Query head h reads only key/value head ⌊h·G/H⌋: neighbours share a key head."""
    if subject.inputs.heads is None or len(set(subject.inputs.heads)) == 1:
        raise Unchecked("pass inputs qkv(4, 2) if heads may share keys")
    heads, groups = subject.inputs.heads
    first, other = subject.draws
    worst = Measure(0.0, subject.leak_bound)
    for group in range(groups):
        k, v = first[1].copy(), first[2].copy()
        k[:, :, group], v[:, :, group] = other[1][:, :, group], other[2][:, :, group]
        out = subject.call([first[0], k, v, *first[3:]])
        by_head = (a.reshape(*a.shape[:2], heads, -1).swapaxes(1, 2) for a in (out, subject.out))
        change = distance(*by_head).max(axis=0)
        change[group * heads // groups : (group + 1) * heads // groups] = 0
        if change.max() > worst.error:
            head = int((change > subject.leak_bound).argmax())
            text = (
                f"query head {head} reads key head {group}, not {head * groups // heads}: repeat "
                "each key head, do not tile them"
            )
            worst = Measure(float(change.max()), subject.leak_bound, text)
    return worst


@law("bfloat16", "bfloat16")
def bfloat16(subject: Subject) -> Measure:
    """Inputs in bfloat16 give what the same numbers give in float64, to bfloat16's 8 bits.

    The error is the root of the mean square relative to that of float64, or a fifth of the largest
    error relative to the largest output, if this is more. Positions are large, if only distances
    matter.
    """
    data: dict[str, Any] = {}
    if subject.positions is not None:
        start = 0 if subject.shift is None else 1001  # no whole numbers of bfloat16
        data = {"positions": np.arange(start, start + subject.length, dtype=np.int32)[None]}
    data = broadcast(subject, data)
    short = [_cast(array, jnp.bfloat16) for array in subject.draws[0]]
    rough = subject.call(short, **data).astype(np.float64)
    with (
        jax.enable_x64(True) if isinstance(subject.result, jax.Array) else contextlib.nullcontext()
    ):
        exact = subject.call([_cast(array, np.float64) for array in short], **data)
    apart = np.abs(rough - exact)
    mean = float(np.sqrt(np.mean(apart**2) / np.mean(exact**2)))
    largest = float(apart.max() / np.abs(exact).max()) / 5
    worst = np.unravel_index(int(apart.argmax()), apart.shape)
    text = f"output {worst[1]} differs by {apart.max():.2g} of {np.abs(exact).max():.2g}"
    error = max(mean, largest)
    return Measure(error if np.isfinite(error) else np.inf, 0.01, text)


def one_document_first(subject: Subject) -> tuple[Array, dict[str, Any]]:
    """Returns the order of tokens in which another document is first in each example, and data."""
    first = starts(documents(subject)[0])
    rows = [np.roll(np.arange(subject.length), -start) for start in first]
    order = np.stack([rows[number % len(rows)] for number in range(subject.batch)])
    return order, {name: array[0][order] for name, array in packed(subject).items()}


def unpadded(subject: Subject, mask: Array) -> Array:
    """Returns the outputs of the same tokens at the start of the row."""
    arrays = subject.draws[0]
    if subject.causal:
        return subject.out
    return subject.call(arrays, **padded(mask[:, ::-1]))


def aligned(measure: Measure, subject: Subject, outs: Array, mask: Array) -> Measure:
    """Compares outputs of inputs with left padding with those of the same tokens without."""
    real = mask[:, ::-1].reshape(*mask.shape, *[1] * (outs.ndim - 2))
    back, plain = (
        np.where(real, o, 0) for o in (shifted(outs, mask, back=True), unpadded(subject, mask))
    )
    return worse(measure, subject, back, plain, "the same tokens without padding")


def worse(measure: Measure, subject: Subject, out: Array, expected: Array, words: str) -> Measure:
    """Returns the worse of a measure and the distance between two arrays `[B, L, …]`."""
    apart = distance(out, expected)
    if measure.error > measure.bound or apart.max() <= measure.error:
        return measure
    text = ""
    if apart.max() > subject.bound:
        example, token = np.argwhere(apart > subject.bound)[0]
        change = f"{apart[example, token]:.2g}"
        text = f"output {token} of example {example} differs by {change} from {words}"
    return Measure(float(apart.max()), subject.bound, text)


def _mark(mask: Array, token: int) -> str:
    return "" if mask[token] else " (padding)"


def _cast(array: Array, dtype: Any) -> Array:
    return array if np.issubdtype(array.dtype, np.integer) else array.astype(dtype)
