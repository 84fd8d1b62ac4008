"""Streaming softmax: one strip of queries over the keys, block by block from the nearest to the farthest.

The one algorithm under blockwise and ring attention, forward here and its gradient in `online_gradient`. Nothing larger
than a strip by a block is ever held. Rabe & Staats (arXiv 2112.05682), Dao et al. (arXiv 2205.14135); the carry of an
encoding goes along with the softmax.

Arrays are head-major here, q_BHLK and k_BGMK, because that is how matrix products want them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.attention.mask import Mask
from cope_jax.encodings import Encoding
from cope_jax.ops.dropout import Dropout
from cope_jax.typing import Array, PyTree, accumulator_dtype

T = TypeVar("T", bound="HasCarry")


class HasCarry(Protocol):
    """A state of the pass over the keys."""

    @property
    def carry(self) -> PyTree: ...


class Step(Protocol[T]):
    """One block of the pass."""

    def __call__(self, end: Array, state: T, *, size: int, masked: bool, settled: bool) -> T: ...


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
        """A tree like the carry of these sums and constants; None: zeros for constants."""
        of_sums = iter(sums)
        of_constants = iter(map(jnp.zeros_like, self.constants(carry)) if constants is None else constants)
        leaves = [next(of_sums) if is_sum else next(of_constants) for is_sum in self.is_sum]
        return jax.tree.unflatten(jax.tree.structure(carry), leaves)

    def hook(self, name: str, queries: Queries, keys: Keys) -> Any:
        """`score`, `settled_score` or `slopes` as a function (params, q, k, features, logits, mask, carry)."""

        def call(
            params: PyTree, q: Array, k: Array, features: PyTree, logits: Array, mask: Array, carry: PyTree
        ) -> Any:
            return getattr(self.encoding(params), name)(
                _swap(q), _swap(k), features, logits, mask, queries.positions, keys.positions, carry
            )

        return call


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The softmax of a strip over the keys seen so far.

    Attributes:
      carry: the encoding's.
      highest: the largest logit, m_BHL.
      total: Σ exp(logit − m), l_BHL.
      weighted: Σ exp(logit − m) v, BHLK.
      slope_total, slope_weighted: the same two sums with each term times its ∂logit/∂carry, one for each running sum in
        the carry; empty where no gradient is wanted.
    """

    carry: PyTree
    highest: Array
    total: Array
    weighted: Array
    slope_total: tuple[Array, ...]
    slope_weighted: tuple[Array, ...]


def start(rules: Rules, params: PyTree, queries: Queries, v_width: int, gradient: bool) -> State:
    """The state before the first block; for a `gradient` the slopes of the running sums are followed."""
    dtype = accumulator_dtype(queries.q.dtype)
    rows = queries.q.shape[:3]
    zeros, wide = jnp.zeros(rows, dtype), jnp.zeros((*rows, v_width), dtype)
    lowest = jnp.full(rows, jnp.finfo(dtype).min, dtype)
    sums = sum(rules.is_sum) if gradient and not rules.one_block else 0
    return State(rules.initial_carry(params, queries.q), lowest, zeros, wide, (zeros,) * sums, (wide,) * sums)


def over_blocks(rules: Rules, params: PyTree, queries: Queries, keys: Keys, state: T, step: Step[T]) -> T:
    """Goes over the blocks that hold pairs, from near to far, with a state that has the carry.

    The blocks are aligned with the last key that the strip sees. Near blocks need a mask and the carry. Once all rows
    have settled, or all keys of a block are seen by all, blocks are wider and their steps cheaper.
    """
    if rules.one_block:
        size = rules.blocks.near
        return step(jnp.asarray(size, jnp.int32), state, size=size, masked=True, settled=False)
    first, end, full, full_end = rules.mask(queries, keys).span()
    settles = rules.encoding(params).settled(state.carry) is not None

    def inside(end: Array) -> Array:
        return (end <= full_end) & (end - rules.blocks.far >= full)

    def near(loop: tuple[Array, T]) -> Array:
        end, state = loop
        return (end > first) & ~(rules.all_settled(params, state.carry) if settles else inside(end))

    def body(size: int, masked: bool, settled: bool) -> Callable[[tuple[Array, T]], tuple[Array, T]]:
        return lambda loop: (loop[0] - size, step(*loop, size=size, masked=masked, settled=settled))

    loop = jax.lax.while_loop(near, body(rules.blocks.near, True, False), (end, state))
    loop = jax.lax.while_loop(lambda loop: inside(loop[0]), body(rules.blocks.far, False, settles), loop)
    return jax.lax.while_loop(lambda loop: loop[0] > first, body(rules.blocks.far, True, settles), loop)[1]


def accumulate(rules: Rules, params: PyTree, queries: Queries, keys: Keys, state: State, drop: Dropout | None) -> State:
    """Lets a strip of queries see the keys, all of which are farther than those it has seen."""

    def step(end: Array, state: State, *, size: int, masked: bool, settled: bool) -> State:
        block = keys.block(end, size)
        mask_B1LM = rules.block_mask(queries, block, masked)
        hook = functools.partial(rules.hook, queries=queries, keys=block)
        logits_BHLM = scaled_products(queries.rotated_q, block.k)
        arguments = (params, queries.q, block.k, block.features, logits_BHLM, mask_B1LM, state.carry)
        slopes: list[Array | None] = [None] * len(state.slope_total)
        if settled:
            carry, logits_BHLM = state.carry, hook("settled_score")(*arguments)
        else:
            logits_BHLM, carry = hook("score")(*arguments)
            if slopes:
                slopes = rules.sums(state.carry, hook("slopes")(*arguments))
        lowest = jnp.finfo(logits_BHLM.dtype).min
        logits_BHLM = jnp.where(mask_B1LM, logits_BHLM, lowest)
        highest_BHL = jnp.maximum(state.highest, logits_BHLM.max(axis=-1))
        # While a row has seen no key, its powers must be 0, not exp(lowest − lowest) = 1.
        shift_BHL = jnp.where(highest_BHL == lowest, 0, highest_BHL)
        fade_BHL = jnp.exp(state.highest - shift_BHL)
        powers_BHLM = jnp.exp(logits_BHLM - shift_BHL[..., None])
        scale_BHLM = None if drop is None else drop(queries.places, block.places, powers_BHLM.dtype)

        def add(total: Array, weighted: Array, slope: Array | None = None) -> tuple[Array, Array]:
            terms = powers_BHLM if slope is None else powers_BHLM * slope
            kept = terms if scale_BHLM is None else terms * scale_BHLM
            total = total * fade_BHL + terms.sum(axis=-1)
            return total, weighted * fade_BHL[..., None] + over_keys(kept.astype(block.v.dtype), block.v)

        def add_slope(total: Array, weighted: Array, slope: Array | None) -> tuple[Array, Array]:
            faded = total * fade_BHL, weighted * fade_BHL[..., None]
            return faded if slope is None else add(total, weighted, slope)

        followed = [add_slope(*sums) for sums in zip(state.slope_total, state.slope_weighted, slopes, strict=True)]
        slope_total, slope_weighted = zip(*followed, strict=True) if followed else ((), ())
        return State(carry, highest_BHL, *add(state.total, state.weighted), slope_total, slope_weighted)

    return over_blocks(rules, params, queries, keys, state, step)


def finish(state: State) -> tuple[Array, Array, tuple[Array, ...]]:
    """What the softmax comes to.

    Returns:
      out_BHLK; logsumexp_BHL of the logits; and ∂out/∂carry, `[B, H, L, K]` for each running sum: U/l − (w/l)·out. All
      are 0 for a row that has seen no key.
    """
    some_BHL = state.total > 0
    total_BHL = jnp.where(some_BHL, state.total, 1)
    out_BHLK = state.weighted / total_BHL[..., None]
    logsumexp_BHL = jnp.where(some_BHL, state.highest + jnp.log(total_BHL), 0)
    sensitivities = tuple(
        (weighted - total[..., None] * out_BHLK) / total_BHL[..., None]
        for total, weighted in zip(state.slope_total, state.slope_weighted, strict=True)
    )
    return out_BHLK, logsumexp_BHL, sensitivities


def leaves_up_to(tree: PyTree, like: PyTree) -> list[Any]:
    """The subtrees of `like` at the leaves of `tree`: None counts as one."""
    found: list[Any] = []
    jax.tree.map(lambda _, entry: found.append(entry), tree, like)
    return found


def scaled_products(q_BHLK: Array, k_BGMK: Array, scale: float | None = None) -> Array:
    """q·k times `scale` (None: 1/√K) for every pair, `[B, H, L, M]`, in the accumulator type."""
    q_BGRLK = grouped(q_BHLK, k_BGMK.shape[1])
    dtype = accumulator_dtype(q_BHLK.dtype)
    logits = jnp.einsum("BGRLK,BGMK->BGRLM", q_BGRLK, k_BGMK, preferred_element_type=dtype)
    return ungrouped(logits) * (q_BHLK.shape[-1] ** -0.5 if scale is None else scale)


def over_keys(weights_BHLM: Array, v_BGMK: Array) -> Array:
    """Σ_m weights v, `[B, H, L, K]`, in the accumulator type."""
    dtype = accumulator_dtype(v_BGMK.dtype)
    weights = grouped(weights_BHLM, v_BGMK.shape[1])
    return ungrouped(jnp.einsum("BGRLM,BGMK->BGRLK", weights, v_BGMK, preferred_element_type=dtype))


def over_queries(q_BHLK: Array, weights_BHLM: Array, groups: int) -> Array:
    """Σ over queries and the heads of a group, q weights, `[B, G, K, M]`, in the accumulator type.

    The result has the keys last: the product then needs no transposed copy of the weights, which on a CPU takes longer
    than the product.
    """
    dtype = accumulator_dtype(q_BHLK.dtype)
    q, weights = grouped(q_BHLK, groups), grouped(weights_BHLM, groups)
    return jnp.einsum("BGRLK,BGRLM->BGKM", q, weights, preferred_element_type=dtype)


def grouped(x: Array, groups: int) -> Array:
    """[B, H, ...] as [B, G, R, ...]: query head h belongs to key head ⌊h·G/H⌋."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def ungrouped(x: Array) -> Array:
    """The inverse of `grouped`."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def _swap(x: Array) -> Array:
    return jnp.swapaxes(x, 1, 2)
