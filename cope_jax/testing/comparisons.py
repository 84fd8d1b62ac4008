"""The laws that compare with other functions: other blocks, several devices, a reference."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from cope_jax.testing.arrangements import packed
from cope_jax.testing.gradient_laws import random_like, unit_of
from cope_jax.testing.measures import Measure, law
from cope_jax.testing.results import distance
from cope_jax.testing.subject import Gradient, Subject


@law("blocks", "blocks")
def blocks(subject: Subject) -> Measure:
    """Other sizes of blocks give the same values and gradients: f_b(x) = f(x)."""
    return _same(subject, list(subject.blocks or ()))


@law("devices", "devices")
def devices(subject: Subject) -> Measure:
    """Several devices give the values and gradients that one gives: f_sharded(x) = f(x)."""
    return _same(subject, [subject.devices])


@law("reference", "reference")
def reference(subject: Subject) -> Measure:
    """A trusted function of the same arguments gives the same values and gradients: f_r(x) = f(x)."""
    return _same(subject, [subject.reference])


def _same(subject: Subject, others: Iterable[Any]) -> Measure:
    """Compares values and gradients with other functions, or with other keywords.

    With documents, if `segments` is given.
    """
    worst = Measure(0.0, subject.bound)
    arrays = subject.draws[0]
    data: dict[str, Any] = {} if subject.segments is None else packed(subject)
    out = subject.call(arrays, **data)
    dout = random_like(subject, out)
    exact = subject.pull(arrays, dout, **data) if subject.differentiable() else []
    for other in others:
        more = other if isinstance(other, Mapping) else {}
        function = None if isinstance(other, Mapping) else other
        words = f" with {dict(more)}" if more else ""
        results = [("the outputs", subject.call(arrays, function, more, **data), out, 1.0)]
        if exact and subject.differentiable(function, more, **data):
            pulled = subject.pull(arrays, dout, function, more, **data)
            results += [
                (f"the gradient of {a.name}", b.values, a.values, unit_of(subject, a.values))
                for a, b in _pairs(exact, pulled)
            ]
        for name, values, expected, unit in results:
            apart = distance(values, expected) / unit
            if apart.max() > worst.error:
                example, token = np.unravel_index(int(apart.argmax()), apart.shape)
                text = (
                    f"{name}{words} differ at token {token} of example {example} by "
                    f"{apart.max() * unit:.2g}"
                )
                worst = Measure(float(apart.max()), subject.bound, text)
    return worst


def _pairs(exact: list[Gradient], pulled: list[Gradient]) -> list[tuple[Gradient, Gradient]]:
    """Returns gradients of the same inputs; of parameters if both functions have the same."""
    others = {(gradient.name, gradient.values.shape): gradient for gradient in pulled}
    pairs = [(a, others.get((a.name, a.values.shape))) for a in exact]
    same = len(exact) == len(pulled) and all(b is not None for _, b in pairs)
    return [(a, b) for a, b in pairs if b is not None and (same or a.input is not None)]
