"""Gadgets, of which the recipes are made: the keys that a head can attend to with an encoding.

A gadget sets the queries and keys of one head, and the parameters of the encoding in its layer; the
recipe moves values. A layer without a gadget has no position, except with `alibi`. An encoding that
lacks a gadget cannot, or we do not know how.
"""

import math
from collections.abc import Iterable

import numpy as np

from experiments.by_hand.weights import Weights

NATS = 40.0
"""The logit of the right key is above all others by this much; e^−40 times 4,096 keys is nothing."""
SLOPE = 20.0
"""A logit falls by this much from a token to the one before it, where the nearest key must win."""
FARTHEST = 6144
"""The longest distance in the sequences."""
NEAR = 256
"""The longest distance to the nearest match: a match outweighs this number of steps of SLOPE."""
Form = np.ndarray


class Gadgets:
    """The gadgets of an encoding that adds nothing to q·k: `none`, and the others where they are off.

    Attributes:
      second_latest: whether `match` has back=2.
      signed_latest: whether `match` has back=1 for codes of ±1.
      reads_prefix: keys are recalled by their share of the prefix, without a `previous`.
      sees_before: whether `since` gives equal weights, or each key takes this share of the stick.
      far_match: the width of a head that matches codes at 64 times the trained length; None means
        that any width does.
    """

    reads_prefix = False
    taken: float | None = None
    far_match: int | None = None
    second_latest = False
    signed_latest = True

    def __init__(self, weights: Weights):
        self.w, self.width = weights, weights.shape.head_dim
        self.e = weights.encoding

    def match(
        self, layer: int, head: int, query: Form, key: Form, *, signed: bool, back: int = 0
    ) -> None:
        """Attends to the keys with the query's code; back=1 to the nearest of them, 2 to the next.

        Codes are rows of ±1 if signed, else of one 1; a key of zeros does not match.
        """
        if back:
            raise NotImplementedError
        self.w.compare(layer, head, NATS * query, key, self.dims(layer, head))

    def dims(self, layer: int, head: int) -> Iterable[int]:
        """The dims of a head where q·k does not depend on positions."""
        return range(self.width)

    def average(self) -> None:
        """Attends equally to all tokens, as a head without a gadget does."""

    def previous(self, layer: int, head: int, source: Form, target: Form) -> None:
        """Moves a form from the previous token; the first token attends to itself."""
        raise NotImplementedError

    def previous_unless(
        self, layer: int, head: int, source: Form, target: Form, unless: Form
    ) -> None:
        """Moves a form from the previous token, to the first token and tokens with unless=1 nothing."""
        raise NotImplementedError

    def since(self, layer: int, head: int, mark: Form, kind: Form) -> None:
        """Attends equally to the last token with mark=1 and to all tokens of a kind after it."""
        raise NotImplementedError

    def first_since(self, layer: int, head: int, write: Form, read: Form, bit: Form) -> None:
        """Attends from a read to the first bit after the last write, or after a later read."""
        raise NotImplementedError

    def balanced(self, layer: int, head: int, up: Form, down: Form, kind: Form) -> None:
        """Attends to the tokens of a kind after which there are as many ups as downs."""
        raise NotImplementedError

    def top(self, layer: int, head: int, up: Form, down: Form) -> None:
        """Attends to the last up that has no down."""
        raise NotImplementedError

    def _threshold(self, query: Form, key: Form, signed: bool) -> tuple[Form, Form]:
        """Forms whose product is NATS for a match, and at most −NATS for any other key."""
        gap, full = (2, query.shape[1]) if signed else (1, 1)
        scale = 2 * NATS / gap
        bias = -(full - gap / 2) * self.w.one
        return scale * np.hstack([query, self.w.one]), np.hstack([key, bias])


class ALiBi(Gadgets):
    """The slopes are 1/16 and 1/256, so a head forgets; content is scaled to be above its slope."""

    reads_prefix = True

    def average(self) -> None:
        raise NotImplementedError


class NoPE(Gadgets):
    """Order is in the shares of the prefix alone."""

    reads_prefix = True


class CoPE(Gadgets):
    """Gates are 1 or 0, so positions are whole counts, and the table selects one of them."""

    second_latest = True

    def match(
        self, layer: int, head: int, query: Form, key: Form, *, signed: bool, back: int = 0
    ) -> None:
        query, key = self._threshold(query, key, signed)
        self.w.compare(layer, head, query, key, range(query.shape[1]))
        if back:
            self._table(layer, head, {back: 2 * NATS})

    def previous(self, layer: int, head: int, source: Form, target: Form) -> None:
        self.w.compare(layer, head, NATS * self.w.one, self.w.one, [0])
        self._table(layer, head, {2: NATS})
        self.w.move(layer, head, source, target)

    def since(self, layer: int, head: int, mark: Form, kind: Form) -> None:
        self.w.compare(layer, head, NATS * self.w.one, 2 * mark - self.w.one, [0])
        self._table(layer, head, {1: -2 * NATS}, rest=-20 * NATS)

    # Between marks, positions rise by EPSILON a key: the farthest key is nearest to 1.
    GATE, EPSILON, STRENGTH = 0.7, 0.25 / 4096, 5e5

    def first_since(self, layer: int, head: int, write: Form, read: Form, bit: Form) -> None:
        key = self._logit(self.GATE) * (write + read) + self._logit(self.EPSILON) * bit
        key = key + self._off * (self.w.one - write - read - bit)
        self.w.compare(layer, head, self.w.one, key, [0])
        self._table(layer, head, {0: -self.STRENGTH, 1: 0.0}, rest=-self.STRENGTH)

    _off = -NATS

    def _logit(self, gate: float) -> float:
        return math.log(gate / (1 - gate))

    def _row(self, position: int) -> int:
        return position

    def _table(self, layer: int, head: int, rows: dict[int, float], rest: float = 0.0) -> None:
        """Sets what a position adds to the logits, by the last dim of the head."""
        table, dim = self.e["table"], self.width - 1 - head
        table[layer, self._row(0) + 1 :, dim] = rest
        for position, value in rows.items():
            table[layer, self._row(position), dim] = value
        query = self.w.params["blocks"]["attention"]["query"]["kernel"]
        query[layer, :, head * self.width + dim] = self.w.one[:, 0]


class CoPESigned(CoPE):
    """Gates are 1, 0 or −1; a key of logit 0 has the gate 0."""

    signed_latest = False

    def match(
        self, layer: int, head: int, query: Form, key: Form, *, signed: bool, back: int = 0
    ) -> None:
        if signed and back:
            raise NotImplementedError  # other codes would step backward
        self.w.compare(layer, head, NATS * query, key, range(query.shape[1]))
        if back:
            self._table(layer, head, {back: 2 * NATS})

    def since(self, layer: int, head: int, mark: Form, kind: Form) -> None:
        self.w.compare(layer, head, NATS * self.w.one, mark, [0])
        self._table(layer, head, {1: -NATS}, rest=-20 * NATS)

    # Gates are small enough that a step has hardly more weight than an object.
    def balanced(self, layer: int, head: int, up: Form, down: Form, kind: Form) -> None:
        self.w.compare(layer, head, self._logit(0.7) * self.w.one, up - down, [0])
        self._table(layer, head, {0: 3 * NATS})

    # A down is a little more than an up, so that earlier ups of the same level are below 0.9.
    def top(self, layer: int, head: int, up: Form, down: Form) -> None:
        level, more = 0.9, 4e-4
        key = self._logit(level) * up + self._logit(-level * (1 + more)) * down
        self.w.compare(layer, head, self.w.one, key, [0])
        self._table(layer, head, {0: -1e5, 1: 0.0}, rest=-1e5)
        self.e["table"][layer, : self._row(0), self.width - 1 - head] = -1e5

    _off = 0.0

    def _logit(self, gate: float) -> float:
        return 2 * math.atanh(gate)

    def _row(self, position: int) -> int:
        return position + len(self.e["table"][0]) // 2


class FoX(Gadgets):
    """Gates of all tokens forget, or those of marks alone."""

    signed_latest = False

    def __init__(self, weights: Weights):
        super().__init__(weights)
        self.e["bias"][...] = 30

    def match(
        self, layer: int, head: int, query: Form, key: Form, *, signed: bool, back: int = 0
    ) -> None:
        if back > 1 or (signed and back):
            raise NotImplementedError  # errors of codes would be larger than a step of SLOPE
        scale = 2 * SLOPE * NEAR if back else NATS
        self.w.compare(layer, head, scale * query, key, range(query.shape[1]))
        if back:
            self._forget(layer, head, SLOPE)

    def previous(self, layer: int, head: int, source: Form, target: Form) -> None:
        """One head has weights 1, e^−7, e^−14, …, the next only the token itself: the difference."""
        decay = 7.0
        self._forget(layer, head, decay)
        self._forget(layer, head + 1, 2 * NATS)
        self.w.move(layer, head, source, target * math.exp(decay) / (1 - math.exp(-decay)))
        self.w.move(layer, head + 1, source, -target * math.exp(decay))

    def since(self, layer: int, head: int, mark: Form, kind: Form) -> None:
        self.e["kernel"][layer, :, head] = -90 * mark[:, 0]

    def _forget(self, layer: int, head: int, nats: float) -> None:
        self.e["bias"][layer, head] = -nats - math.log(-math.expm1(-nats))


class PaTH(Gadgets):
    """A token multiplies the query's part along w by 1 − β: by −1/2, or by 0."""

    second_latest = True
    signed_latest = False

    def __init__(self, weights: Weights):
        super().__init__(weights)
        self.e["beta_bias"][...] = -30
        self.e["convolution"][:, -1] = 1

    def match(
        self, layer: int, head: int, query: Form, key: Form, *, signed: bool, back: int = 0
    ) -> None:
        if signed and back:
            raise NotImplementedError  # the directions must be orthogonal
        scale = {0: NATS, 1: NATS, 2: -4 * NATS}[back]
        self.w.compare(layer, head, scale * query, key, range(query.shape[1]))
        if back:
            matched = key.sum(axis=1, keepdims=True)
            self._reflect(layer, head, key, matched, {1: 1.0, 2: 1.5}[back])

    def previous(self, layer: int, head: int, source: Form, target: Form) -> None:
        self.w.compare(layer, head, -4 * NATS * self.w.one, self.w.one, [0])
        self._reflect(layer, head, self.w.one, self.w.one, 1.5)
        self.w.move(layer, head, source, target)

    def since(self, layer: int, head: int, mark: Form, kind: Form) -> None:
        self.w.compare(layer, head, NATS * self.w.one, self.w.one, [0])
        self._reflect(layer, head, mark, mark, 1.0)

    # Each bit shrinks a negative logit, so the farthest wins; a write ends the positive logit.
    def first_since(self, layer: int, head: int, write: Form, read: Form, bit: Form) -> None:
        strength, bits = 3 * SLOPE * FARTHEST / 2, FARTHEST // 2
        query = np.hstack([-strength * self.w.one, 2 * strength * self.w.one])
        self.w.compare(layer, head, query, np.hstack([bit, bit]), range(2))
        self._reflect(layer, head, np.hstack([bit, write]), write, 1.0)
        self._reflect(layer, head, np.hstack([bit, write]), bit, 1 / bits)

    def _reflect(self, layer: int, head: int, w: Form, where: Form, beta: float) -> None:
        """Gives tokens with where=1 the factor 1 − β along w, by dims from 0 on."""
        ranks = self.e["into"].shape[-1] // self.w.shape.num_heads
        for dim in range(w.shape[1]):
            self.e["into"][layer, :, head * ranks + dim] = w[:, dim]
            self.e["out"][layer, head * ranks + dim, head, dim] = 1000
        self.e["beta_kernel"][layer, :, head] += (30 + math.log(beta / (2 - beta))) * where[:, 0]


class StickBreaking(Gadgets):
    """The nearest key that matches takes the whole stick; a query does not see its own token."""

    taken = 0.1

    def average(self) -> None:
        raise NotImplementedError

    def match(
        self, layer: int, head: int, query: Form, key: Form, *, signed: bool, back: int = 0
    ) -> None:
        if back > 1:
            raise NotImplementedError
        query, key = self._threshold(query, key, signed)
        self.w.compare(layer, head, query, key, range(query.shape[1]))

    def previous(self, layer: int, head: int, source: Form, target: Form) -> None:
        self.previous_unless(layer, head, source, target, 0 * self.w.one)

    def previous_unless(
        self, layer: int, head: int, source: Form, target: Form, unless: Form
    ) -> None:
        self.w.compare(layer, head, NATS * (self.w.one - 2 * unless), self.w.one, [0])
        self.w.move(layer, head, source, target)

    def since(self, layer: int, head: int, mark: Form, kind: Form) -> None:
        share = math.log(self.taken / (1 - self.taken))
        key = NATS * mark + share * kind - NATS * (self.w.one - mark - kind)
        self.w.compare(layer, head, self.w.one, key, [0])
