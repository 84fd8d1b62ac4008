"""The laws of gradients.

g = ∂ Σ dout·f(x) / ∂x, for random dout.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from cope_jax.testing.arrangements import alternating, documents, packed, padded, starts
from cope_jax.testing.laws import one_document_first
from cope_jax.testing.leaks import broadcast, places
from cope_jax.testing.measures import Measure, Unchecked, law
from cope_jax.testing.results import Array, distance
from cope_jax.testing.subject import Gradient, Subject

MOST_GROUPS = 16
PASS_GRADIENTS = "pass gradients=function (arrays, dout) -> gradients, or a function of JAX"


@law("gradients")
def gradients(subject: Subject) -> Measure:
    """Gradients are finite, and are slopes: g·u = (Σ dout·f(x + εu) − Σ dout·f(x − εu)) / 2ε.

    Each u is random in some tokens of one array and 0 elsewhere, so every entry must be right. The
    error is relative to the largest slope of its array, or to a fiftieth of the largest of all, if
    that is more. A kink of f at one side of x is no fault: the best of two ε counts, and with the
    shorter the slopes from x − εu to x and from there to x + εu do too.
    """
    return _slopes_of(subject)


@law("gradients under a mask", "mask")
def gradients_under_a_mask(subject: Subject) -> Measure:
    """Gradients are finite, and are slopes, where even tokens see even ones, and odd see odd."""
    return _slopes_of(subject, **broadcast(subject, {"mask": alternating(subject)[None, None]}))


def _slopes_of(subject: Subject, **data: Any) -> Measure:
    arrays, dout = _one_example(subject)
    every = _pull(subject, arrays, dout, **data)
    if broken := _not_finite(every):
        return broken
    if subject.short or any(array.dtype.itemsize == 2 for array in arrays):
        raise Unchecked("inputs or results have 16 bits, too few for slopes: check it in float32")
    groups = np.array_split(np.arange(subject.length), min(MOST_GROUPS, subject.length))
    pairs = [(gradient, tokens) for gradient in _by_inputs(every) for tokens in groups]
    bound, apart, words = _against_slopes(subject, arrays, dout, pairs, data)
    wrong = pairs[int((apart > bound).argmax())]
    if apart.max() > bound and len(wrong[1]) > 1:  # which token of the first wrong group is it?
        pairs = [(wrong[0], wrong[1][n : n + 1]) for n in range(len(wrong[1]))]
        _, fine, words = _against_slopes(subject, arrays, dout, pairs, data)
        return Measure(float(apart.max()), bound, words[int((fine > bound).argmax())])
    return Measure(float(apart.max()), bound, words[int((apart > bound).argmax())])


@law("gradient leaks")
def gradient_leaks(subject: Subject) -> Measure:
    """The backward pass is causal, and reads no hidden token: ∂f(x)_i/∂x_j is 0 where it must.

    For j > i, and for a token j of another document, that the mask hides from i, or of the padding
    at the left, if `segments`, `mask` or `padding` is given.
    """
    hidden = list(_hidden(subject))
    if not hidden:
        raise Unchecked("the function is not causal, and has no documents, mask or padding")
    measures = [_gradient_leak(subject, forbidden_LL, data) for data, forbidden_LL in hidden]
    return max(measures, key=lambda measure: measure.error - measure.bound)


def _hidden(subject: Subject) -> Iterator[tuple[dict[str, Any], Array]]:
    """Data for adapters, each with the pairs [i, j] in which output i must not read token j."""
    later = np.triu(np.full((subject.length, subject.length), bool(subject.causal)), 1)
    if subject.segments is not None:
        ids = documents(subject)[0]
        yield packed(subject), later | (ids[:, None] != ids)
    elif subject.causal:
        yield {}, later
    if subject.mask is not None:
        see = alternating(subject)
        yield broadcast(subject, {"mask": see[None, None]}), later | ~see
    if subject.padding is not None:
        real = np.arange(subject.length) >= subject.length // 2
        yield broadcast(subject, padded(real[None])), later | (real[:, None] & ~real)


def _gradient_leak(subject: Subject, forbidden_LL: Array, data: dict[str, Any]) -> Measure:
    arrays, dout = _one_example(subject)
    worst, largest = Measure(0.0, 0.0), np.zeros(1)
    outputs = places(subject.length)
    for start in range(0, len(outputs), subject.batch):
        some = np.resize(outputs[start : start + subject.batch], subject.batch)
        chosen = np.where(
            (np.arange(subject.length) == some[:, None]).reshape(
                subject.batch, subject.length, *[1] * (dout.ndim - 2)
            ),
            dout[:1],
            0,
        )
        for gradient in _by_inputs(_pull(subject, arrays, chosen, **data)):
            sizes = distance(gradient.values, 0 * gradient.values)
            largest = np.maximum(largest, sizes[np.isfinite(sizes)].max(initial=0))
            apart = np.where(forbidden_LL[some], sizes, 0)
            if apart.max() > worst.error:
                row, token = (int(n) for n in np.unravel_index(int(apart.argmax()), apart.shape))
                text = (
                    f"output {some[row]} has the gradient {apart.max():.2g} at token {token} of "
                    f"{gradient.name}"
                )
                worst = Measure(float(apart.max()), 0.0, text, (token, int(some[row])))
    return worst._replace(bound=subject.gradient_bound(largest, leak=True))


@law("gradients of documents", "segments")
def gradients_of_documents(subject: Subject) -> Measure:
    """Documents in one row have the gradients that each has at the start of a row."""
    arrays, dout = _one_example(subject)
    ids = documents(subject)[0]
    order, turned = one_document_first(subject)
    apart = np.zeros_like(dout)
    sizes = {start: int((ids == ids[start]).sum()) for start in starts(ids)}
    for row, (start, size) in enumerate(sizes.items()):
        apart[row, :size] = dout[0, start : start + size]
    packed_up = _pull(subject, arrays, dout, **packed(subject))
    alone = _pull(subject, [array[0][order] for array in arrays], apart, **turned)
    worst = Measure(0.0, subject.bound)
    for one_row, rows in zip(packed_up, alone, strict=True):
        expected = one_row.values
        if one_row.input is not None:
            parts = [rows.values[row, :size] for row, size in enumerate(sizes.values())]
            values, expected = np.concatenate(parts), one_row.values[0]
        else:
            values = rows.values
        change = distance(values[None], expected[None])[0] / unit_of(subject, one_row.values)
        if change.max() > worst.error:
            token = int(change.argmax())
            at = f" at token {token}" if one_row.input is not None else ""
            text = f"the gradient of {one_row.name}{at} is not that of the documents alone"
            worst = Measure(float(change.max()), subject.bound, text)
    return worst


@law("empty rows", "mask")
def empty_rows(subject: Subject) -> Measure:
    """An output that may see no token is finite, and so are all gradients."""
    mask = np.ones((1, 1, subject.length, subject.length), bool)
    mask[:, :, subject.length // 2] = False
    data = broadcast(subject, {"mask": mask})
    out = subject.call(subject.draws[0], **data)
    if not np.isfinite(out).all():
        token = int(np.argwhere(~np.isfinite(out))[0][1])
        return Measure(np.inf, subject.bound, f"output {token} is not finite")
    if subject.differentiable():
        pulled = subject.pull(subject.draws[0], np.ones(out.shape, out.dtype), **data)
        if broken := _not_finite(pulled):
            return broken
    return Measure(0.0, subject.bound)


def _one_example(subject: Subject) -> tuple[list[Array], Array]:
    """Returns one example as often as a batch has examples, and a cotangent of the first."""
    dout = random_like(subject, subject.out)
    dout[1:] = 0
    return [np.repeat(array[:1], subject.batch, 0) for array in subject.draws[0]], dout


def unit_of(subject: Subject, gradient: Array) -> float:
    """Returns how many errors of an output an error of a gradient may have."""
    return max(subject.gradient_bound(gradient) / subject.bound, 1.0) if subject.bound else 1.0


def random_like(subject: Subject, like: Array) -> Array:
    """Returns random numbers of the shape and type of an array."""
    rng = np.random.default_rng(subject.seed + 1)
    return np.asarray(rng.normal(size=like.shape), like.dtype)


def _pull(subject: Subject, arrays: list[Array], dout: Array, **data: Any) -> list[Gradient]:
    if not subject.differentiable():
        raise Unchecked(PASS_GRADIENTS)
    return subject.pull(arrays, dout, **data)


def _by_inputs(pulled: list[Gradient]) -> list[Gradient]:
    """Returns the gradients of inputs, without those of parameters."""
    if by_inputs := [gradient for gradient in pulled if gradient.input is not None]:
        return by_inputs
    raise Unchecked("inputs are integers: check a layer, with inputs vectors(width)")


def _not_finite(pulled: list[Gradient]) -> Measure | None:
    for gradient in pulled:
        if not np.isfinite(gradient.values).all():
            token = np.argwhere(~np.isfinite(gradient.values))[0]
            at = f" at token {token[1]}" if gradient.input is not None else ""
            return Measure(np.inf, 0.0, f"the gradient of {gradient.name}{at} is not finite")
    return None


def _against_slopes(
    subject: Subject,
    arrays: list[Array],
    dout: Array,
    pairs: list[tuple[Gradient, Array]],
    data: dict[str, Any],
) -> tuple[float, Array, list[str]]:
    """Returns the bound, relative errors of gradients at tokens, and words for each."""
    wide = subject.rounding < 1e-10
    long, short, bound = (1e-4, 1e-5, 1e-6) if wide else (1e-2, 1e-3, 2e-2)
    rng = np.random.default_rng(1)
    directions = []
    for gradient, tokens in pairs:
        direction = [np.zeros((1, *array.shape[1:])) for array in arrays]
        values, x = direction[gradient.input], arrays[gradient.input]  # type: ignore[index]
        size = max(1.0, float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))))
        values[:, tokens] = size * rng.normal(size=values[:, tokens].shape)
        directions.append(direction)
    # At one side of x a long step is too rough.
    slopes = np.concatenate(
        [
            _slopes(subject, arrays, dout, directions, long, data)[:1],
            _slopes(subject, arrays, dout, directions, short, data),
        ]
    )
    exact = np.array(
        [
            float((gradient.values[:1] * direction[gradient.input]).sum())  # type: ignore[index]
            for (gradient, _), direction in zip(pairs, directions, strict=True)
        ]
    )
    errors = np.nan_to_num(np.abs(slopes - exact), nan=np.inf, posinf=np.inf)
    numeric = slopes[errors.argmin(0), np.arange(len(pairs))]
    words = [
        f"the gradient of {gradient.name} at token {tokens[0]} gives slope {a:.3g}, but the values "
        f"{b:.3g}"
        for (gradient, tokens), a, b in zip(pairs, exact, numeric, strict=True)
    ]
    inputs, sizes = np.array([gradient.input for gradient, _ in pairs]), np.abs(numeric)
    largest = np.array([sizes[inputs == index].max() for index in inputs])
    units = np.maximum(largest, 0.02 * sizes.max()).clip(1e-30)
    return bound, errors.min(0) / units, words


def _slopes(
    subject: Subject,
    arrays: list[Array],
    dout: Array,
    directions: list[list[Array]],
    step: float,
    data: dict[str, Any],
) -> Array:
    """Returns three slopes of Σ dout·f in each direction, over both sides of x, before it and after
    it, two examples of a call for each direction.
    """

    def totals(inputs: list[Array]) -> Array:
        out = subject.call(inputs, **data).astype(np.float64)
        return (out * dout[:1]).reshape(subject.batch, -1).sum(axis=1)

    here, slopes, pairs = totals(arrays)[0], [], subject.batch // 2
    for start in range(0, len(directions), pairs):
        some = directions[start : start + pairs]
        padded = some + some[:1] * (pairs - len(some))
        moved = []
        for index, array in enumerate(arrays):
            rows = [array[:1] + sign * step * u[index] for u in padded for sign in (1, -1)]
            moved.append(np.concatenate(rows + rows[:1] * (subject.batch % 2)).astype(array.dtype))
        sums = totals(moved)
        for after, before in sums[: 2 * len(some)].reshape(-1, 2):
            slopes.append([(after - before) / 2, here - before, after - here])
    return np.array(slopes).T / step
