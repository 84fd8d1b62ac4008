"""Rules of an encoding's oracle: changes of tokens, terms of logits, and weights from logits."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Vector = np.ndarray
Params = dict[str, np.ndarray]


class Sizes(NamedTuple):
    """The sizes an encoding is built for."""

    heads: int
    kv_heads: int
    head_dim: int
    model_dim: int
    max_length: int


class Token(NamedTuple):
    """The token of a query or key: position, inputs of the layer up to it, and key head."""

    position: float
    x: Sequence[Vector]
    group: int
    is_key: bool


class Key(NamedTuple):
    """One key that a query may see: its content logit, its position, and the vectors a gate may
    look at.

    `logits` are those of all heads; `x` are the layer's inputs up to the key's own; `own`: whether
    it is the query's.
    """

    logit: float
    position: float
    value: Vector
    x: Sequence[Vector]
    k: Vector
    logits: Sequence[float]
    index: int
    own: bool


def same(vector: Vector, where: object) -> Vector:
    """Leaves a vector as it is."""
    del where
    return vector


def nothing(head: int, q: Vector, token: Token, keys: Sequence[Key]) -> list[float]:
    """Adds nothing to the logits of one query."""
    del head, q, token
    return [0.0] * len(keys)


class Rule(NamedTuple):
    """An encoding: what it does to an embedding, to a query or key, and what it adds to the logits
    of one query.

    `added(head, q, token, keys)` gets the unrotated query and the keys that it sees, the nearest
    last. `hidden(rows)` gets the logits of the first head, by key, of all queries; all heads
    subtract its result. `weights(head, logits, keys)` gives the weights of the keys; with
    `rest_to_own_value` the rest is that of v_i. `carried(value, key, query)` is what the query
    gets of a key's value.
    """

    embed: Callable[[Vector, float], Vector] = same
    rotate: Callable[[Vector, Token], Vector] = same
    added: Callable[[int, Vector, Token, Sequence[Key]], list[float]] = nothing
    hidden: Callable[[Sequence[dict[int, float]]], list[dict[int, float]]] | None = None
    weights: Callable[[int, Sequence[float], Sequence[Key]], list[float]] | None = None
    rest_to_own_value: bool = False
    carried: Callable[[Vector, Token, Token], Vector] | None = None


def compose(rules: Sequence[Rule]) -> Rule:
    """Embeddings and rotations one after the other; terms of the content logits are summed."""

    def chain(steps):
        def run(vector, where):
            for step in steps:
                vector = step(vector, where)
            return vector

        return run

    def added(head, q, token, keys):
        return [
            sum(terms)
            for terms in zip(*(rule.added(head, q, token, keys) for rule in rules), strict=True)
        ]

    def only(name):
        return next((getattr(rule, name) for rule in rules if getattr(rule, name)), None)

    embed, rotate = chain([rule.embed for rule in rules]), chain([rule.rotate for rule in rules])
    return Rule(
        embed,
        rotate,
        added,
        only("hidden"),
        only("weights"),
        bool(only("rest_to_own_value")),
        only("carried"),
    )


def sigmoid(x: float) -> float:
    """1 / (1 + e^-x), without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def softplus(x: float) -> float:
    """log(1 + e^x), without overflow."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def log_sigmoid(x: float) -> float:
    """log σ(x)."""
    return -softplus(-x)


def softmax(logits: Sequence[float]) -> list[float]:
    """exp(logit) over their sum, shifted by the largest."""
    powers = [math.exp(logit - max(logits)) for logit in logits]
    return [power / sum(powers) for power in powers]


def turned(vector: Vector, angles: Sequence[float], scale: float | Sequence[float] = 1.0) -> Vector:
    """The pair of features (c, c + C) turned by angle c of C, times `scale`; others stay."""
    out, count = np.array(vector), len(angles)
    for c, angle in enumerate(angles):
        first, second = vector[c], vector[c + count]
        factor = scale if isinstance(scale, float) else scale[c]
        out[c] = factor * (first * math.cos(angle) - second * math.sin(angle))
        out[c + count] = factor * (first * math.sin(angle) + second * math.cos(angle))
    return out
