"""The gadgets of encodings that turn queries and keys: RoPE, PoPE and MapFormer.

A peak is a sum of cosines of the distance, over many bands; recency is the sine of a slow band.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from cope_jax.encodings.rotations import frequencies
from experiments.by_hand.gadgets import FARTHEST, NATS, NEAR, SLOPE, Form, Gadgets
from experiments.by_hand.weights import Weights


class RoPE(Gadgets):
    """Content is in the slowest bands, one number a band, which turn least."""

    far_match = 128

    def __init__(self, weights: Weights):
        super().__init__(weights)
        self.rates = frequencies(10_000.0, self.width)

    def match(
        self, layer: int, head: int, query: Form, key: Form, *, signed: bool, back: int = 0
    ) -> None:
        if back > 1:
            raise NotImplementedError
        bands = range(len(self.rates) - 1, -1, -1)
        scale = NATS
        if back:
            self._recency(layer, head, bands[0])
            scale, bands = 2 * SLOPE * NEAR, bands[1:]
        self._content(layer, head, scale, query, key, bands, signed)

    def previous(self, layer: int, head: int, source: Form, target: Form) -> None:
        others = np.delete(np.arange(-1, FARTHEST), 1)  # distances without 1, minus 1
        gap = (1 - np.cos(others[:, None] * self.rates)).sum(axis=1).min()
        for band, rate in enumerate(self.rates):
            self._cosine(layer, head, band, -rate, 2 * NATS / gap)
        self.w.move(layer, head, source, target)

    def _recency(self, layer: int, head: int, band: int) -> None:
        """Adds −A sin(θ·distance), which falls by SLOPE a token."""
        rate = self.rates[band]
        self._cosine(layer, head, band, np.pi / 2, SLOPE / rate / np.cos(rate * NEAR))

    def _cosine(
        self, layer: int, head: int, band: int, angle: float, size: float, key: Form | None = None
    ) -> None:
        """Adds size·cos(θ·distance + angle), for keys of a kind."""
        dims, unit = (band, band + len(self.rates)), self.w.one
        query = size * np.hstack([np.cos(angle) * unit, np.sin(angle) * unit])
        key = unit if key is None else key
        self.w.compare(layer, head, query, np.hstack([key, 0 * key]), dims)

    def _content(
        self,
        layer: int,
        head: int,
        scale: float,
        query: Form,
        key: Form,
        bands: Sequence[int],
        signed: bool,
    ) -> None:
        self.w.compare(layer, head, scale * query, key, bands[: query.shape[1]])


class PoPE(RoPE):
    """Only lengths of features are content, so a number ±1 becomes two, of which one is 0."""

    far_match = 256
    OFF = 1e4  # softplus(−OFF) = 0

    def __init__(self, weights: Weights):
        super().__init__(weights)
        self.rates = np.power(10_000.0, -np.arange(self.width) / self.width)
        for name in ("query", "key"):
            weights.params["blocks"]["attention"][name]["bias"][...] = -self.OFF

    def _cosine(
        self, layer: int, head: int, band: int, angle: float, size: float, key: Form | None = None
    ) -> None:
        self._lengths(layer, head, size, self.w.one, self.w.one if key is None else key, [band])
        self.e["phase"][layer, head, band] = -angle - 2 * np.pi * (angle < 0)

    def _content(
        self,
        layer: int,
        head: int,
        scale: float,
        query: Form,
        key: Form,
        bands: Sequence[int],
        signed: bool,
    ) -> None:
        if signed:
            query, key = (
                np.hstack([(self.w.one + form) / 2, (self.w.one - form) / 2])
                for form in (query, key)
            )
        self._lengths(layer, head, scale, query, key, bands[: query.shape[1]])

    def _lengths(
        self, layer: int, head: int, size: float, query: Form, key: Form, dims: Iterable[int]
    ) -> None:
        """Features of length √size where query and key are 1, and 0 where they are 0."""
        length = (size * self.width**0.5) ** 0.5
        for name, form in (("query", query), ("key", key)):
            kernel = self.w.params["blocks"]["attention"][name]["kernel"]
            for index, dim in enumerate(dims):
                kernel[layer, :, head * self.width + dim] = (self.OFF + length) * form[:, index]


class MapFormer(RoPE):
    """Angles add up steps that the layer chooses, with frequencies that it learns: sums are exact
    up to a power of 2, or a band does not turn at all and is for content.
    """

    far_match = None
    BANDS = 13
    """Bands of a peak: Σ cos(2π s/2^c) for c = 1, 2, … falls by 2 from s = 0 to any |s| < 2^13."""

    def __init__(self, weights: Weights):
        super().__init__(weights)
        self.rates = 0 * self.rates

    def match(
        self, layer: int, head: int, query: Form, key: Form, *, signed: bool, back: int = 0
    ) -> None:
        if back > 1:
            raise NotImplementedError
        scale = NATS
        if back:
            self._slope(layer, head, -1)
            self._turn(layer, 1, self.w.one)
            scale = 2 * SLOPE * NEAR
        # Bands that never turn come first; the others turn only in layers that need them.
        bands = np.roll(np.arange(len(self.rates)), -self.BANDS - 1)
        dims = [dim for band in bands for dim in (band, band + len(self.rates))]
        self.w.compare(layer, head, scale * query, key, dims)

    def previous(self, layer: int, head: int, source: Form, target: Form) -> None:
        self._turn(layer, 0, self.w.one)
        self._peak(layer, head, 1, NATS, self.w.one)
        self.w.move(layer, head, source, target)

    def since(self, layer: int, head: int, mark: Form, kind: Form) -> None:
        self._turn(layer, 0, mark)
        self._peak(layer, head, 0, NATS, self.w.one)

    def first_since(self, layer: int, head: int, write: Form, read: Form, bit: Form) -> None:
        self._turn(layer, 0, write)
        self._turn(layer, 1, bit)
        self._peak(layer, head, 0, self._slope(layer, head, 1, bit), bit)

    def balanced(self, layer: int, head: int, up: Form, down: Form, kind: Form) -> None:
        self._turn(layer, 0, up - down)
        self._peak(layer, head, 0, NATS, kind)

    def top(self, layer: int, head: int, up: Form, down: Form) -> None:
        self._turn(layer, 0, up - down)
        self._turn(layer, 1, self.w.one)
        self._peak(layer, head, 0, self._slope(layer, head, -1, up), up)

    def _turn(self, layer: int, coordinate: int, step: Form) -> None:
        """Coordinate 0 turns the bands of peaks, coordinate 1 the band of recency."""
        self.e["into"][layer, :, coordinate] = step[:, 0]
        bands = slice(self.BANDS) if coordinate == 0 else [self.BANDS]
        self.e["out"][layer, coordinate, bands] = 1
        rates = 2 * np.pi * 0.5 ** np.arange(1, self.BANDS + 1)
        self.e["frequencies"][layer, bands] = rates if coordinate == 0 else 1 / FARTHEST

    def _peak(self, layer: int, head: int, at: int, size: float, key: Form) -> None:
        for band in range(self.BANDS):
            angle = -at * 2 * np.pi * 0.5 ** (band + 1)
            self._cosine(layer, head, band, angle, size, key)

    def _slope(self, layer: int, head: int, sign: int, key: Form | None = None) -> float:
        size = SLOPE * FARTHEST / np.cos(1.0)
        self._cosine(layer, head, self.BANDS, -sign * np.pi / 2, size, key)
        return float(size)
