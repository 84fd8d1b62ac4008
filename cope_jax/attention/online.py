"""Streaming softmax: one strip of queries over the keys, block by block from the nearest to the farthest.

The one algorithm under blockwise and ring attention, forward here and its gradient in `online_gradient`. Nothing larger
than a strip by a block is ever held. Rabe & Staats (arXiv 2112.05682), Dao et al. (arXiv 2205.14135); the carry of an
encoding goes along with the softmax.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

from cope_jax.attention.products import over_keys, scaled_products
from cope_jax.attention.strips import Keys, Queries, Rules
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

    # Named, for their turns depend on the data: whoever reads the compiled program must know which is which.
    with jax.named_scope("near"):
        loop = jax.lax.while_loop(near, body(rules.blocks.near, True, False), (end, state))
    with jax.named_scope("inside"):
        loop = jax.lax.while_loop(lambda loop: inside(loop[0]), body(rules.blocks.far, False, settles), loop)
    with jax.named_scope("edge"):
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
            # What carries gradients of sums stays wide: its error would pull on every farther gate.
            dtype = block.v.dtype if slope is None else kept.dtype
            product_BHLK = over_keys(kept.astype(dtype), block.v.astype(dtype))
            return total * fade_BHL + terms.sum(axis=-1), weighted * fade_BHL[..., None] + product_BHLK

        def add_slope(total: Array, weighted: Array, slope: Array | None) -> tuple[Array, Array]:
            faded = total * fade_BHL, weighted * fade_BHL[..., None]
            return faded if slope is None else add(total, weighted, slope)

        followed = [add_slope(*sums) for sums in zip(state.slope_total, state.slope_weighted, slopes, strict=True)]
        slope_total, slope_weighted = zip(*followed, strict=True) if followed else ((), ())
        return State(carry, highest_BHL, *add(state.total, state.weighted), slope_total, slope_weighted)

    return over_blocks(rules, params, queries, keys, state, step)


def finish(state: State, dtype: Any) -> tuple[Array, Array, tuple[Array, ...]]:
    """What the softmax comes to, with the output in its type `dtype`.

    Returns:
      out_BHLK; logsumexp_BHL of the logits; and ∂out/∂carry, `[B, H, L, K]` for each running sum: U/l − (w/l)·out, with
      out as rounded, as its gradient will know it. All are 0 for a row that has seen no key.
    """
    some_BHL = state.total > 0
    total_BHL = jnp.where(some_BHL, state.total, 1)
    out_BHLK = (state.weighted / total_BHL[..., None]).astype(dtype)
    logsumexp_BHL = jnp.where(some_BHL, state.highest + jnp.log(total_BHL), 0)
    sensitivities = tuple(
        (weighted - total[..., None] * out_BHLK.astype(total.dtype)) / total_BHL[..., None]
        for total, weighted in zip(state.slope_total, state.slope_weighted, strict=True)
    )
    return out_BHLK, logsumexp_BHL, sensitivities
