"""A stream: all that streaming attention reads, with the encoding as parameters and a structure."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array, PyTree
from cope_jax.attention.blocks import BlockSizes, KeyBlock, QueryBlock, along_sequence, pad_by
from cope_jax.attention.request import Request
from cope_jax.encodings import Carry, Encoding, Pairs
from cope_jax.ops.dropout import Dropout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """A request, and the encoding that scores its pairs block by block.

    Attributes:
      params: parameters of the encoding. They are separate from `graph`, because gradients need
        them separate.
      request: head-major; some queries and keys, or all.
      graph: the structure of the encoding.
      sizes: the sizes of blocks.
      one_block: whether all keys are one block, so that no later block reads the carry.
    """

    params: PyTree
    request: Request
    graph: Any = dataclasses.field(metadata={"static": True})
    sizes: BlockSizes = dataclasses.field(metadata={"static": True})
    one_block: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def queries(self) -> QueryBlock:
        return self.request.queries

    @property
    def keys(self) -> KeyBlock:
        return self.request.keys

    @property
    def drop(self) -> Dropout | None:
        return self.request.drop

    def part(self, queries: QueryBlock, keys: KeyBlock) -> "Stream":
        """Returns the same stream with other queries and keys."""
        return dataclasses.replace(
            self, request=dataclasses.replace(self.request, queries=queries, keys=keys)
        )

    def query_block(self, number: Array) -> "Stream":
        """Returns the stream of query block `number`."""
        size = self.sizes.queries
        return self.part(self.queries.block(number, size), self.keys.for_queries(number, size))

    def pairs(self, keys: KeyBlock, masked: bool) -> Pairs:
        """Returns the input of the encoding for one block of keys; see `Request.pairs`."""
        return dataclasses.replace(self.request, keys=keys).pairs(masked)

    def encoding(self, params: PyTree) -> Encoding:
        encoding: Encoding = nnx.merge(self.graph, params)
        return encoding

    def initial_carry(self) -> Carry:
        queries = self.queries
        return self.encoding(self.params).initial_carry(queries.q, queries.features)


def stream_of(
    encoding: Encoding, request: Request, sizes: BlockSizes, *, one_block: bool, padding: int
) -> Stream:
    """Creates the stream of all keys and all queries, plus `padding` copies of the last query."""
    graph, params = nnx.split(encoding)
    params, request = jax.tree.map(jnp.asarray, (params, request.head_major()))
    stream = Stream(params, request, graph, sizes, one_block)
    if not padding:
        return stream
    longer = pad_by(padding)
    return stream.part(along_sequence(longer, stream.queries), stream.keys.over_queries(longer))


def needs_one_block(encoding: Encoding, request: Request) -> bool:
    """Returns whether all keys must be one block: the encoding cannot split them, or has a `state`."""
    return not encoding.traits.splits_keys or bool(
        jax.tree.leaves(carry_of(encoding, request).state)
    )


def carry_of(encoding: Encoding, request: Request) -> Carry:
    """Returns the shapes of the encoding's carry."""

    def carry(request: Request) -> Carry:
        queries = request.head_major().queries
        return encoding.checked_carry(queries.q, queries.features)

    return jax.eval_shape(carry, request)


def cotangent(tree: PyTree) -> PyTree:
    """Converts gradients to the form that JAX expects: those of integers, stored as zeros, become
    float0.
    """

    def converted(x: Array) -> Any:
        return x if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)

    return jax.tree.map(converted, tree)


def add_cotangent(x: Array, dx: Any) -> Array:
    """Returns the sum x + dx in the type of x, or x itself if dx is the gradient of an integer."""
    return x if dx.dtype == jax.dtypes.float0 else x + dx.astype(x.dtype)
