"""The data of streaming attention: blocks of queries, blocks of keys, and the stream that contains both.

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

AXES = dict(q=2, rotated_q=2, k=2, v=2, features=2, positions=1, indices=0, segment_ids=1, given=3)
T = TypeVar("T", "QueryBlock", "KeyBlock")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QueryBlock:
    """A block of queries.

    Attributes:
      q: queries before rotation, `[B, H, L, K]`.
      rotated_q: queries after rotation, `[B, H, L, K]`.
      v: the values of the queries' own tokens, `[B, G, L, K]`; None if no sink needs them.
      features: the encoding's features, `[B, heads, L, ...]`.
      positions: positions of the tokens, `[B, L]`.
      indices: indices in the sequence, `[L]`.
      segment_ids: `[B, L]`, or None.
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
        """Creates the block of all queries, plus `padding` copies of the last query."""
        mask = inputs.mask
        ids, indices = mask.q_segment_ids_BL, jnp.asarray(mask.q_indices_L)
        own = inputs.q_features, jnp.asarray(inputs.q_positions), indices, None if ids is None else jnp.asarray(ids)
        whole = cls(inputs.q, inputs.rotated_q, inputs.q_v, *own)
        return along_sequence(pad_by(padding), whole) if padding else whole

    def block(self, number: Array, size: int) -> "QueryBlock":
        """Returns block `number` of these queries; each block has `size` queries."""
        return _cut(self, number * size, size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyBlock:
    """A block of keys and values; attributes that are not listed are as in `QueryBlock`, for keys.

    Attributes:
      k: keys after rotation, `[B, G, M, K]`.
      v: values, `[B, G, M, K]`.
      indices: `[M]`; a key with index −1 is empty.
      given: `[B, 1, L, M]` or `[B, 1, 1, M]`, True where a query may see a key. If None, no mask is given.
    """

    k: Array
    v: Array
    features: PyTree
    positions: Array
    indices: Array
    segment_ids: Array | None
    given: Array | None

    @classmethod
    def of(cls, inputs: Inputs, padding: int) -> "KeyBlock":
        """Creates the block of all keys; the given mask has all queries, plus `padding` copies of the last query."""
        mask = inputs.mask
        given = mask.given_B1LM
        if given is not None and given.shape[2] > 1:
            given = pad_by(padding)(given, 2)
        ids, indices = mask.k_segment_ids_BM, jnp.asarray(mask.k_indices_M)
        own = jnp.asarray(inputs.k_positions), indices, None if ids is None else jnp.asarray(ids)
        return cls(inputs.rotated_k, inputs.v, inputs.k_features, *own, given)

    def block(self, end: Array, size: int) -> "KeyBlock":
        """Returns the `size` keys before `end`; if `end` < `size`, later keys, marked as empty, fill the block."""
        start = jnp.maximum(end - size, 0)
        block = _cut(self, start, size)
        fresh_M = start + jnp.arange(size, dtype=jnp.int32) < end
        return dataclasses.replace(block, indices=jnp.where(fresh_M, block.indices, -1))

    def range(self, first: int, end: int) -> "KeyBlock":
        """Returns the keys from `first` to `end`, exclusive."""
        return _cut(self, first, end - first)

    def for_queries(self, number: Array, size: int) -> "KeyBlock":
        """Returns the same keys, with the given mask cut to query block `number`; each block has `size` queries."""
        if self.given is None or self.given.shape[2] == 1:
            return self
        return dataclasses.replace(self, given=jax.lax.dynamic_slice_in_dim(self.given, number * size, size, axis=2))


def along_sequence(change: Callable[[Array, int], Array], block: T) -> T:
    """Replaces each array of a block by `change(array, axis)`, where `axis` is its sequence axis."""

    def along(name: str) -> Any:
        return jax.tree.map(lambda x: change(x, AXES[name]), getattr(block, name))

    return dataclasses.replace(block, **{field.name: along(field.name) for field in dataclasses.fields(block)})


def _cut(block: T, start: Array | int, size: int) -> T:
    return along_sequence(lambda x, axis: jax.lax.dynamic_slice_in_dim(x, start, size, axis), block)


def pad_by(padding: int) -> Callable[[Array, int], Array]:
    """Returns a function that lengthens an axis by `padding` copies of its last entry."""
    return lambda x, axis: jnp.pad(x, [(0, padding if a == axis else 0) for a in range(x.ndim)], "edge")


class BlockSizes(NamedTuple):
    """The sizes of a block of queries, of a block of keys near the queries, and of a block of keys farther away."""

    queries: int
    near: int
    far: int

    def within(self, length: int, keys: int) -> "BlockSizes":
        """Returns the sizes, limited to the numbers of queries and keys."""
        return BlockSizes(min(self.queries, length), min(self.near, keys), min(self.far, keys))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """Queries, keys, and the encoding that scores their pairs block by block.

    Attributes:
      params: parameters of the encoding. They are separate from `graph`, because gradients need them separate.
      queries: some queries, or all.
      keys: some keys, or all.
      drop: dropout on the attention weights, or None.
      graph: the structure of the encoding.
      sizes: the sizes of blocks.
      causal, window: see `Mask`.
      one_block: whether all keys are one block, so that no later block reads the carry.
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
        """Creates the stream of all queries, plus `padding` copies of the last query, and all keys."""
        graph, params = nnx.split(encoding)
        params, rule = jax.tree.map(jnp.asarray, params), inputs.mask
        queries, keys = QueryBlock.of(inputs, padding), KeyBlock.of(inputs, padding)
        return cls(params, queries, keys, inputs.drop, graph, sizes, rule.causal, rule.window, one_block)

    def part(self, queries: QueryBlock, keys: KeyBlock) -> "Stream":
        """Returns the same stream with other queries and keys."""
        return dataclasses.replace(self, queries=queries, keys=keys)

    def query_block(self, number: Array) -> "Stream":
        """Returns the stream of query block `number`."""
        size = self.sizes.queries
        return self.part(self.queries.block(number, size), self.keys.for_queries(number, size))

    def mask(self, keys: KeyBlock) -> Mask:
        ids = self.queries.segment_ids, keys.segment_ids
        return Mask(self.queries.indices, keys.indices, *ids, keys.given, self.causal, self.window)

    def pairs(self, keys: KeyBlock, masked: bool) -> Pairs:
        """Returns the input of the encoding for one block of keys; if not `masked`, its mask is True everywhere."""
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
    """Returns whether all keys must be one block: the encoding cannot split them, or its carry has a `state`."""
    carry = jax.eval_shape(encoding.initial_carry, inputs.q, inputs.q_features)
    return not encoding.traits.splits_keys or bool(jax.tree.leaves(carry.state))


def cotangent(tree: PyTree) -> PyTree:
    """Converts gradients to the form that JAX expects: gradients of integers, stored as zeros, become float0."""

    def one(x: Array) -> Any:
        return x if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)

    return jax.tree.map(one, tree)


def add_cotangent(x: Array, dx: Any) -> Array:
    """Returns the sum x + dx in the type of x, or x itself if dx is the gradient of an integer."""
    return x if dx.dtype == jax.dtypes.float0 else x + dx.astype(x.dtype)
