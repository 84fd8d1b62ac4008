"""What streaming attention works on: strips of queries, blocks of keys, and the rules of a call.

Arrays are head-major here, q_BHLK and k_BGMK, because that is how matrix products want them.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.attention.mask import Mask
from cope_jax.encodings import Encoding
from cope_jax.typing import Array, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Queries:
    """Queries: q before rotation, rotated_q after it, [B, H, L, K]; positions [B, L]; places [L]; segments [B, L]."""

    q: Array
    rotated_q: Array
    positions: Array
    places: Array
    segment_ids: Array | None

    def strip(self, number: Array, size: int) -> "Queries":
        """The strip of `size` queries with this number."""
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=number * size, slice_size=size)
        return Queries(
            cut(self.q, axis=2),
            cut(self.rotated_q, axis=2),
            cut(self.positions, axis=1),
            cut(self.places, axis=0),
            None if self.segment_ids is None else cut(self.segment_ids, axis=1),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Keys:
    """Keys as a cache holds them, and values, [B, G, M, K]; features [B, M, ...]; positions, places and segments."""

    k: Array
    v: Array
    features: PyTree
    positions: Array
    places: Array
    segment_ids: Array | None

    def block(self, end: Array, size: int) -> "Keys":
        """The `size` keys before `end`. Where there are fewer, the rest are keys from `end` on, marked as empty."""
        start = jnp.maximum(end - size, 0)
        block = self._cut(start, size)
        fresh_M = start + jnp.arange(size, dtype=jnp.int32) < end
        return dataclasses.replace(block, places=jnp.where(fresh_M, block.places, -1))

    def range(self, first: int, end: int) -> "Keys":
        """The keys from `first` to `end`."""
        return self._cut(first, end - first)

    def _cut(self, start: Array | int, size: int) -> "Keys":
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        return Keys(
            cut(self.k, axis=2),
            cut(self.v, axis=2),
            jax.tree.map(lambda feature: cut(feature, axis=1), self.features),
            cut(self.positions, axis=1),
            cut(self.places, axis=0),
            None if self.segment_ids is None else cut(self.segment_ids, axis=1),
        )


class Blocks(NamedTuple):
    """Sizes: queries in a strip; keys in a block, near the queries and farther away."""

    queries: int
    near: int
    far: int

    def within(self, length: int, keys: int) -> "Blocks":
        """No larger than there are queries and keys."""
        return Blocks(min(self.queries, length), min(self.near, keys), min(self.far, keys))


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is known while tracing.

    Attributes:
      graph: the structure of the encoding; its parameters come apart from it, as gradients need them.
      blocks: sizes.
      causal, window: see `Mask`.
      is_sum: for each leaf of the encoding's carry, whether it is a running sum or constant; see `Encoding.slopes`.
      one_block: all keys are one block: nothing is farther, and what the carry accumulates ends there.
    """

    graph: Any
    blocks: Blocks
    causal: bool
    window: int | None
    is_sum: tuple[bool, ...]
    one_block: bool = False

    def mask(self, queries: Queries, keys: Keys) -> Mask:
        return Mask(queries.places, keys.places, queries.segment_ids, keys.segment_ids, self.causal, self.window)

    def block_mask(self, queries: Queries, block: Keys, masked: bool) -> Array:
        """mask_B1LM of one block; all True where the block is known to need no mask."""
        if masked:
            return self.mask(queries, block).dense()
        return jnp.ones((1, 1, len(queries.places), len(block.places)), bool)

    def encoding(self, params: PyTree) -> Encoding:
        return nnx.merge(self.graph, params)

    def initial_carry(self, params: PyTree, q_BHLK: Array) -> PyTree:
        return self.encoding(params).initial_carry(_swap(q_BHLK))

    def all_settled(self, params: PyTree, carry: PyTree) -> Array:
        """Whether no row's logits depend on the carry's sums any more; False for an encoding that never settles."""
        settled = self.encoding(params).settled(carry)
        return jnp.asarray(False) if settled is None else settled.all()

    def sums(self, carry: PyTree, like: PyTree) -> list[Any]:
        """The entries of `like`, a tree over the carry's, at the leaves that are running sums."""
        entries = leaves_up_to(carry, like)
        return [entry for entry, is_sum in zip(entries, self.is_sum, strict=True) if is_sum]

    def constants(self, carry: PyTree) -> list[Array]:
        """The leaves of the carry, or of its gradient, that are constant."""
        return [leaf for leaf, is_sum in zip(jax.tree.leaves(carry), self.is_sum, strict=True) if not is_sum]

    def join(self, carry: PyTree, sums: Any, constants: Any = None) -> PyTree:
        """The cotangent of a carry from those of its sums and constants; None: zeros for constants."""
        of_sums = iter(sums)
        of_constants = iter(map(jnp.zeros_like, self.constants(carry)) if constants is None else constants)
        leaves = [next(of_sums) if is_sum else next(of_constants) for is_sum in self.is_sum]
        return cotangent(jax.tree.unflatten(jax.tree.structure(carry), leaves))

    def hook(self, name: str, queries: Queries, keys: Keys) -> Any:
        """`score`, `settled_score` or `slopes` as a function (params, q, k, features, logits, mask, carry)."""

        def call(
            params: PyTree, q: Array, k: Array, features: PyTree, logits: Array, mask: Array, carry: PyTree
        ) -> Any:
            return getattr(self.encoding(params), name)(
                _swap(q), _swap(k), features, logits, mask, queries.positions, keys.positions, carry
            )

        return call


def cotangent(tree: PyTree) -> PyTree:
    """Gradients as JAX wants them: those of integers, which are held as zeros, get its type for nothing."""

    def one(x: Array) -> Any:
        return x if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)

    return jax.tree.map(one, tree)


def add_cotangent(x: Array, dx: Any) -> Array:
    """The sum x + dx; x itself where dx is the gradient of an integer."""
    return x if dx.dtype == jax.dtypes.float0 else x + dx


def leaves_up_to(tree: PyTree, like: PyTree) -> list[Any]:
    """The subtrees of `like` at the leaves of `tree`: None counts as one."""
    found: list[Any] = []
    jax.tree.map(lambda _, entry: found.append(entry), tree, like)
    return found


def _swap(x: Array) -> Array:
    return jnp.swapaxes(x, 1, 2)
