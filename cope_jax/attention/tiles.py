"""The data of streaming attention: blocks of queries and of keys, and the stream that contains both.

Arrays are head-major here, q_BHLK and k_BGMK, because matrix products use that order.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array, PyTree
from cope_jax.attention.inputs import Inputs
from cope_jax.attention.mask import Mask
from cope_jax.encodings import Carry, Encoding, Pairs
from cope_jax.ops.dropout import Dropout
from cope_jax.ops.grouped_matmul import content_logits

_AXES = {"q": 2, "rotated_q": 2, "k": 2, "v": 2, "features": 2, "positions": 1, "indices": 0, "segment_ids": 1}
T = TypeVar("T", "QueryBlock", "KeyBlock")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QueryBlock:
    """Queries: q before rotation, rotated_q after it, [B, H, L, K]; the values of their own tokens if a sink needs
    them; features [B, heads, L, ...]; positions [B, L]; indices [L]; segments [B, L].
    """

    q: Array
    rotated_q: Array
    v: Array | None
    features: PyTree
    positions: Array
    indices: Array
    segment_ids: Array | None

    @classmethod
    def of(cls, inputs: Inputs, padding: int) -> "QueryBlock":
        """All queries, plus `padding` copies of the last one."""
        mask = inputs.mask
        ids, indices = mask.q_segment_ids_BL, jnp.asarray(mask.q_indices_L)
        own = inputs.q_features, jnp.asarray(inputs.q_positions), indices, None if ids is None else jnp.asarray(ids)
        whole = cls(inputs.q, inputs.rotated_q, inputs.q_v, *own)
        return along_sequence(pad_by(padding), whole) if padding else whole

    def block(self, number: Array, size: int) -> "QueryBlock":
        """The block of `size` queries with this number."""
        return _cut(self, number * size, size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyBlock:
    """Keys as a cache holds them, and values, [B, G, M, K]; the rest as for queries. A key of index −1 is empty."""

    k: Array
    v: Array
    features: PyTree
    positions: Array
    indices: Array
    segment_ids: Array | None

    @classmethod
    def of(cls, inputs: Inputs) -> "KeyBlock":
        """All keys."""
        mask = inputs.mask
        ids, indices = mask.k_segment_ids_BM, jnp.asarray(mask.k_indices_M)
        own = jnp.asarray(inputs.k_positions), indices, None if ids is None else jnp.asarray(ids)
        return cls(inputs.rotated_k, inputs.v, inputs.k_features, *own)

    def block(self, end: Array, size: int) -> "KeyBlock":
        """The `size` keys before `end`. If there are fewer, the rest are keys from `end` on, marked as empty."""
        start = jnp.maximum(end - size, 0)
        block = _cut(self, start, size)
        fresh_M = start + jnp.arange(size, dtype=jnp.int32) < end
        return dataclasses.replace(block, indices=jnp.where(fresh_M, block.indices, -1))

    def range(self, first: int, end: int) -> "KeyBlock":
        """The keys from `first` to `end`."""
        return _cut(self, first, end - first)


def along_sequence(change: Callable[[Array, int], Array], block: T) -> T:
    """Applies `change` to each array and the number of its sequence axis."""

    def along(name: str) -> Any:
        return jax.tree.map(lambda x: change(x, _AXES[name]), getattr(block, name))

    return dataclasses.replace(block, **{field.name: along(field.name) for field in dataclasses.fields(block)})


def _cut(block: T, start: Array | int, size: int) -> T:
    return along_sequence(lambda x, axis: jax.lax.dynamic_slice_in_dim(x, start, size, axis), block)


def pad_by(padding: int) -> Callable[[Array, int], Array]:
    """Lengthens an axis by copies of its last entry."""
    return lambda x, axis: jnp.pad(x, [(0, padding if a == axis else 0) for a in range(x.ndim)], "edge")


class BlockSizes(NamedTuple):
    """The number of queries in a block, and of keys in a block near the queries and in one farther away."""

    queries: int
    near: int
    far: int

    def within(self, length: int, keys: int) -> "BlockSizes":
        """The sizes, limited to the numbers of queries and keys."""
        return BlockSizes(min(self.queries, length), min(self.near, keys), min(self.far, keys))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """Queries, the keys that they see in blocks, and the encoding between them.

    Attributes:
      params: parameters of the encoding, separate from its structure because gradients need that.
      queries: some, or all.
      keys: some, or all.
      drop: dropout on the attention weights, or None.
      graph: the structure of the encoding.
      sizes: of blocks.
      causal, window: see `Mask`.
      one_block: all keys are one block, so no later block reads the carry.
    """

    params: PyTree
    queries: QueryBlock
    keys: KeyBlock
    drop: Dropout | None
    graph: Any = dataclasses.field(metadata={"static": True})
    sizes: BlockSizes = dataclasses.field(metadata={"static": True})
    causal: bool = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(metadata={"static": True})
    one_block: bool = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, encoding: Encoding, inputs: Inputs, sizes: BlockSizes, *, one_block: bool, padding: int) -> "Stream":
        """All queries, plus `padding` copies of the last one, and all keys."""
        graph, params = nnx.split(encoding)
        arrays = jax.tree.map(jnp.asarray, params), QueryBlock.of(inputs, padding), KeyBlock.of(inputs), inputs.drop
        return cls(*arrays, graph, sizes, inputs.mask.causal, inputs.mask.window, one_block)

    def part(self, queries: QueryBlock, keys: KeyBlock) -> "Stream":
        """The same with other queries and keys."""
        return dataclasses.replace(self, queries=queries, keys=keys)

    def mask(self, keys: KeyBlock) -> Mask:
        own = self.queries
        return Mask(own.indices, keys.indices, own.segment_ids, keys.segment_ids, self.causal, self.window)

    def pairs(self, keys: KeyBlock, masked: bool) -> Pairs:
        """The input of the encoding for one block of keys; its mask is all True if not `masked`."""
        queries = self.queries
        shape = (1, 1, len(queries.indices), len(keys.indices))
        return Pairs(
            q=queries.q,
            k=keys.k,
            v=keys.v,
            q_features=queries.features,
            k_features=keys.features,
            logits=content_logits(queries.rotated_q, keys.k),
            mask=self.mask(keys).dense() if masked else jnp.ones(shape, bool),
            q_positions=queries.positions,
            k_positions=keys.positions,
        )

    def encoding(self, params: PyTree) -> Encoding:
        encoding: Encoding = nnx.merge(self.graph, params)
        return encoding

    def initial_carry(self) -> Carry:
        return self.encoding(self.params).initial_carry(self.queries.q, self.queries.features)


def needs_one_block(encoding: Encoding, inputs: Inputs) -> bool:
    """Whether all keys must be one block: the law of blocks does not hold, or the carry has a `state`."""
    carry = jax.eval_shape(encoding.initial_carry, inputs.q, inputs.q_features)
    return not encoding.splits_keys or bool(jax.tree.leaves(carry.state))


def cotangent(tree: PyTree) -> PyTree:
    """Gradients in the form that JAX expects: those of integers, kept as zeros, become float0."""

    def one(x: Array) -> Any:
        return x if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)

    return jax.tree.map(one, tree)


def add_cotangent(x: Array, dx: Any) -> Array:
    """The sum x + dx in the type of x; x itself if dx is the gradient of an integer."""
    return x if dx.dtype == jax.dtypes.float0 else x + dx.astype(x.dtype)
