"""Blocks of queries and of keys, and how they are cut along the sequence."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array, PyTree

AXES = dict(
    q=2, rotated_q=2, k=2, v=2, features=2, positions=1, indices=0, segment_ids=1, given=3, bias=3
)
T = TypeVar("T", "QueryBlock", "KeyBlock")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QueryBlock:
    """Some queries, or all.

    Shapes are head-major, because matrix products use that order. In a request that is not yet
    `head_major`, the axes of tokens and heads are the other way round, as callers have them.

    Attributes:
      q: queries before rotation, `[B, H, L, K]`.
      rotated_q: queries after rotation, `[B, H, L, K]`; None if the encoding does not rotate them.
      v: the values of the queries' own tokens, `[B, G, L, K]`; None if no sink needs them.
      features: the encoding's features, `[B, heads, L, ...]`.
      positions: positions of the tokens, `[B, L]`; B may be 1.
      indices: indices in the sequence, `[L]`.
      segment_ids: `[B, L]`, or None.
    """

    q: Array
    rotated_q: Array | None
    v: Array | None
    features: PyTree
    positions: Any
    indices: Any
    segment_ids: Array | None = None

    @property
    def content_q(self) -> Array:
        """The queries of the content logits."""
        return self.q if self.rotated_q is None else self.rotated_q

    def block(self, number: Array, size: int) -> "QueryBlock":
        """Returns block `number` of these queries; each block has `size` queries."""
        return _cut(self, number * size, size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyBlock:
    """Some keys and values, or all; attributes that are not listed are as in `QueryBlock`, for
    keys.

    Attributes:
      k: keys after rotation, `[B, G, M, K]`.
      v: values, `[B, G, M, K]`.
      indices: `[M]`; a key with index −1 is empty.
      given: `[B, 1, L, M]` or `[B, 1, 1, M]`, True where a query may see a key. If None, no mask is
        given.
      bias: what is added to the content logits, `[B, H, L, M]`; B and H may be 1. If None, nothing.
    """

    k: Array
    v: Array
    features: PyTree
    positions: Any
    indices: Any
    segment_ids: Array | None = None
    given: Array | None = None
    bias: Array | None = None

    def block(self, end: Array, size: int) -> "KeyBlock":
        """Returns the `size` keys before `end`; if `end` < `size`, empty later keys fill the block."""
        start = jnp.maximum(end - size, 0)
        block = _cut(self, start, size)
        fresh_M = start + jnp.arange(size, dtype=jnp.int32) < end
        return dataclasses.replace(block, indices=jnp.where(fresh_M, block.indices, -1))

    def range(self, first: int, end: int) -> "KeyBlock":
        """Returns the keys from `first` to `end`, exclusive."""
        return _cut(self, first, end - first)

    def for_queries(self, number: Array, size: int) -> "KeyBlock":
        """Returns the same keys with the pairs of query block `number`, which has `size` queries."""
        return self.over_queries(
            lambda x, axis: jax.lax.dynamic_slice_in_dim(x, number * size, size, axis)
        )

    def over_queries(self, change: Callable[[Array, int], Array]) -> "KeyBlock":
        """Replaces the arrays of pairs by `change(array, axis)`, where `axis` is that of queries."""

        def changed(x: Array | None) -> Array | None:
            return x if x is None or x.shape[2] == 1 else change(x, 2)

        return dataclasses.replace(self, given=changed(self.given), bias=changed(self.bias))


def head_major(x: Array) -> Array:
    """Swaps tokens and heads: [B, M, heads, ...] becomes [B, heads, M, ...], or the reverse."""
    return jnp.swapaxes(x, 1, 2)


def swap_heads(block: T) -> T:
    """Returns a block of the caller's arrays as head-major, or the reverse."""
    names = {"q", "rotated_q", "k", "v", "features"} & {f.name for f in dataclasses.fields(block)}
    return dataclasses.replace(
        block, **{name: jax.tree.map(head_major, getattr(block, name)) for name in names}
    )


def along_sequence(change: Callable[[Array, int], Array], block: T) -> T:
    """Replaces each array of a block by `change(array, axis)`, with its sequence axis."""

    def along(name: str) -> Any:
        return jax.tree.map(lambda x: change(x, AXES[name]), getattr(block, name))

    fields = dataclasses.fields(block)
    return dataclasses.replace(block, **{field.name: along(field.name) for field in fields})


def _cut(block: T, start: Array | int, size: int) -> T:
    return along_sequence(lambda x, axis: jax.lax.dynamic_slice_in_dim(x, start, size, axis), block)


def pad_by(padding: int) -> Callable[[Array, int], Array]:
    """Returns a function that lengthens an axis by `padding` copies of its last entry."""
    return lambda x, axis: jnp.pad(
        x, [(0, padding if a == axis else 0) for a in range(x.ndim)], "edge"
    )


class BlockSizes(NamedTuple):
    """The sizes of a block of queries, of keys near the queries, and of keys farther away."""

    queries: int
    near: int
    far: int

    def within(self, length: int, keys: int) -> "BlockSizes":
        """Returns the sizes, limited to the numbers of queries and keys."""
        return BlockSizes(min(self.queries, length), min(self.near, keys), min(self.far, keys))
