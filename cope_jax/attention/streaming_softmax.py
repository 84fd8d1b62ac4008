"""The streaming softmax of one block of queries, over blocks of keys from the nearest to the
farthest.

Blockwise and ring attention share this algorithm: the forward pass is here, the gradient in
`streaming_gradient`. The algorithm stores the pairs of only one block of queries and one block of
keys at a time. It follows Rabe & Staats (arXiv 2112.05682) and Dao et al. (arXiv 2205.14135), and
updates the encoding's carry together with the softmax.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array, accumulator_dtype
from cope_jax.attention.blocks import KeyBlock, QueryBlock
from cope_jax.attention.checks import sink_of
from cope_jax.attention.linear_tangent import never_reversed
from cope_jax.attention.stream import Stream
from cope_jax.encodings import Carry
from cope_jax.ops.grouped_matmul import weights_times_v

T = TypeVar("T", bound="HasCarry")
Slopes = Sequence[Array | None]


class HasCarry(Protocol):
    """Any state of the pass over the keys that has the encoding's carry."""

    @property
    def carry(self) -> Carry: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The softmax of a block of queries over the keys seen so far.

    Attributes:
      carry: the encoding's carry.
      row_max: the largest logit, m_BHL.
      total: Σ exp(logit − m), l_BHL.
      weighted: Σ exp(logit − m) v, `[B, H, L, K]`.
      slope_total, slope_weighted: `total` and `weighted` with each term multiplied by its
        ∂logit/∂sum. There is one entry for each running sum in the carry, and no entry if no
        gradient is needed.
    """

    carry: Carry
    row_max: Array
    total: Array
    weighted: Array
    slope_total: tuple[Array, ...]
    slope_weighted: tuple[Array, ...]

    def add(
        self,
        carry: Carry,
        logits_BHLM: Array,
        slopes: Slopes,
        times_v: Callable[[Array, bool], Array],
    ) -> "State":
        """Adds keys, given their logits and slopes ∂logit/∂sum; a slope of None means 0.

        `times_v(terms, wide)` returns Σ terms·v. The factors have the accumulator type if `wide`,
        else the type of v.
        """
        lowest = jnp.finfo(logits_BHLM.dtype).min
        highest_BHL = jax.lax.stop_gradient(logits_BHLM).max(axis=-1)
        row_max_BHL = jnp.maximum(self.row_max, highest_BHL)
        # While a row has seen no key, its exponentials must be 0, not exp(lowest − lowest) = 1.
        shift_BHL = jnp.where(row_max_BHL == lowest, 0, row_max_BHL)
        correction_BHL = jnp.exp(self.row_max - shift_BHL)
        exp_logits_BHLM = jnp.exp(logits_BHLM - shift_BHL[..., None])

        def add(total: Array, weighted: Array, slope: Array | None = None) -> tuple[Array, Array]:
            terms = exp_logits_BHLM if slope is None else exp_logits_BHLM * slope
            # Slopes stay in the accumulator type: an error in the gradients of sums would reach
            # every farther gate.
            product_BHLK = times_v(terms, slope is not None)
            return total * correction_BHL + terms.sum(axis=-1), weighted * correction_BHL[
                ..., None
            ] + product_BHLK

        def add_slope(total: Array, weighted: Array, slope: Array | None) -> tuple[Array, Array]:
            corrected = total * correction_BHL, weighted * correction_BHL[..., None]
            return corrected if slope is None else add(total, weighted, slope)

        followed = [
            add_slope(*sums)
            for sums in zip(self.slope_total, self.slope_weighted, slopes, strict=True)
        ]
        slope_total, slope_weighted = zip(*followed, strict=True) if followed else ((), ())
        return State(
            carry, row_max_BHL, *add(self.total, self.weighted), slope_total, slope_weighted
        )


def start(stream: Stream, gradient: bool) -> State:
    """Returns the state before the first block, with slopes of the running sums if `gradient` is
    True.
    """
    dtype, rows = accumulator_dtype(stream.queries.q.dtype), stream.queries.q.shape[:3]
    zeros, wide = jnp.zeros(rows, dtype), jnp.zeros((*rows, stream.keys.v.shape[-1]), dtype)
    lowest = jnp.full(rows, jnp.finfo(dtype).min, dtype)
    carry = stream.initial_carry()
    sums = len(jax.tree.leaves(carry.sums)) if gradient and not stream.one_block else 0
    return State(carry, lowest, zeros, wide, (zeros,) * sums, (wide,) * sums)


def over_blocks(stream: Stream, state: T, step: Callable[..., T]) -> T:
    """Calls `step(end, state, size=…, masked=…, saturated=…)` for each block of keys, from near to
    far.

    A block is the `size` keys before `end`. The first block ends at the last key that any of the
    queries sees. Near blocks need a mask and the carry. Wider blocks, in which each step is
    cheaper, follow once all rows are saturated. If the encoding does not saturate, they follow once
    all queries see all keys of a block. The last block contains the first key that any of the
    queries sees. Once all rows are done, the remaining blocks are skipped.
    """
    sizes = stream.sizes
    if stream.one_block:
        return step(
            jnp.asarray(sizes.near, jnp.int32), state, size=sizes.near, masked=True, saturated=False
        )
    first, end, full, full_end = stream.request.mask.span()
    encoding = stream.encoding(stream.params)
    saturates = encoding.saturated(state.carry) is not None

    def interior(end: Array) -> Array:
        return (end <= full_end) & (end - sizes.far >= full)

    def more(loop: tuple[Array, T]) -> Array:
        return (loop[0] > first) & ~all_rows(encoding.done(loop[1].carry))

    def near(loop: tuple[Array, T]) -> Array:
        end, state = loop
        return more(loop) & ~(
            all_rows(encoding.saturated(state.carry)) if saturates else interior(end)
        )

    def body(
        size: int, masked: bool, saturated: bool
    ) -> Callable[[tuple[Array, T]], tuple[Array, T]]:
        return lambda loop: (
            loop[0] - size,
            step(*loop, size=size, masked=masked, saturated=saturated),
        )

    # Named to tell the loops apart in the compiled program, because their numbers of iterations
    # depend on the data.
    with jax.named_scope("diagonal"):
        loop = jax.lax.while_loop(near, body(sizes.near, True, False), (end, state))
    with jax.named_scope("interior"):
        inside = body(sizes.far, False, saturates)
        loop = jax.lax.while_loop(lambda loop: interior(loop[0]) & more(loop), inside, loop)
    with jax.named_scope("boundary"):
        state = jax.lax.while_loop(more, body(sizes.far, True, saturates), loop)[1]
    return never_reversed(state)


def all_rows(rows_BHL: Array | None) -> Array:
    """Returns whether all rows are True; None means False."""
    return jnp.asarray(False) if rows_BHL is None else rows_BHL.all()


def accumulate(stream: Stream, state: State) -> State:
    """Adds the stream's keys to the state of the stream's queries; keys added earlier must all be
    nearer.
    """

    def step(end: Array, state: State, *, size: int, masked: bool, saturated: bool) -> State:
        return add_block(
            stream, stream.keys.block(end, size), state, masked=masked, saturated=saturated
        )

    return over_blocks(stream, state, step)


def add_block(
    stream: Stream, block: KeyBlock, state: State, *, masked: bool, saturated: bool
) -> State:
    """Adds one block of keys to the state.

    `masked`: it may have hidden pairs; `saturated`: all rows are saturated.
    """
    encoding, drop = stream.encoding(stream.params), stream.drop
    pairs, carry = stream.pairs(block, masked), state.carry
    slopes: Slopes = [None] * len(state.slope_total)
    if saturated:
        logits_BHLM = encoding.tail(pairs, carry)
    elif slopes:
        logits_BHLM, slopes, carry = _with_slopes(
            lambda carry: encoding.checked_score(pairs, carry), carry
        )
    else:
        logits_BHLM, carry = encoding.checked_score(pairs, carry)
    logits_BHLM = jnp.where(pairs.mask, logits_BHLM, jnp.finfo(logits_BHLM.dtype).min)
    scale_BHLM = (
        None if drop is None else drop(stream.queries.indices, block.indices, logits_BHLM.dtype)
    )

    def times_v(terms_BHLM: Array, wide: bool) -> Array:
        kept = terms_BHLM if scale_BHLM is None else terms_BHLM * scale_BHLM
        dtype = kept.dtype if wide else block.v.dtype
        return weights_times_v(kept.astype(dtype), block.v.astype(dtype))

    return state.add(carry, logits_BHLM, slopes, times_v)


def finish(stream: Stream, state: State) -> tuple[Array, Array, tuple[Array, ...]]:
    """Computes the result of the softmax, including the encoding's sink.

    Returns:
      (out_BHLK in the type of the values, logsumexp_BHL of the logits, ∂out/∂sum `[B, H, L, K]` for
      each running sum). The derivative is U/l − (w/l)·out, where U is slope_weighted, w is
      slope_total, l is total and out is rounded. The gradient uses the rounded out too. All results
      are 0 for a row without any key or sink.
    """
    state = _add_sink(stream, state)
    some_BHL = state.total != 0  # NaN stays
    total_BHL = jnp.where(some_BHL, state.total, 1)
    out_BHLK = (state.weighted / total_BHL[..., None]).astype(stream.keys.v.dtype)
    logsumexp_BHL = jnp.where(some_BHL, state.row_max + jnp.log(total_BHL), 0)
    dout_dcarry = tuple(
        (weighted - total[..., None] * out_BHLK.astype(total.dtype)) / total_BHL[..., None]
        for total, weighted in zip(state.slope_total, state.slope_weighted, strict=True)
    )
    return out_BHLK, logsumexp_BHL, dout_dcarry


def _add_sink(stream: Stream, state: State) -> State:
    encoding = stream.encoding(stream.params)
    logit = sink_of(encoding, state.carry, state.row_max.shape)
    if logit is None:
        return state
    slopes: Slopes = []
    if state.slope_total:
        logit, slopes, _ = _with_slopes(lambda carry: (encoding.sink(carry), ()), state.carry)

    def times_v(terms_BHL1: Array, wide: bool) -> Array:
        v_BHLK = own_values(stream.queries)
        return (
            jnp.zeros_like(state.weighted)
            if v_BHLK is None
            else terms_BHL1 * v_BHLK.astype(terms_BHL1.dtype)
        )

    return state.add(
        state.carry,
        logit[..., None],
        [None if s is None else s[..., None] for s in slopes],
        times_v,
    )


def own_values(queries: QueryBlock) -> Array | None:
    """Returns the value that a sink weighs for each query head, v_BHLK; None if it is 0."""
    if queries.v is None:
        return None
    return jnp.repeat(queries.v, queries.q.shape[1] // queries.v.shape[1], axis=1)


def _with_slopes(
    function: Callable[[Carry], tuple[Any, Any]], carry: Carry
) -> tuple[Array, list[Array], Any]:
    """Returns (logits, ∂logits/∂sum for each running sum, the second result of `function`), by
    forward mode.

    Only the logits of row i depend on row i of the carry, so one derivative in the direction of
    ones gives all slopes.
    """
    leaves, tree = jax.tree.flatten(carry.sums)
    slopes = []
    for number, leaf in enumerate(leaves):

        def by_leaf(leaf: Array, number: int = number) -> tuple[Any, Any]:
            sums = [*leaves[:number], leaf, *leaves[number + 1 :]]
            return function(carry._replace(sums=jax.tree.unflatten(tree, sums)))

        logits, slope, rest = jax.jvp(by_leaf, (leaf,), (jnp.ones_like(leaf),), has_aux=True)
        slopes.append(slope)
    return logits, slopes, rest
