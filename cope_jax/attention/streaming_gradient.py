"""The backward pass for a block of queries: it visits the keys again, near to far, and recomputes the logits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.attention.streaming_softmax import over_blocks, own_values
from cope_jax.attention.tiles import KeyBlock, QueryBlock, Stream, add_cotangent, cotangent
from cope_jax.encodings import Carry, Pairs
from cope_jax.ops.grouped_matmul import content_logits, group, q_times_weights, weights_times_v

NONE: Any = None  # the cotangent of integers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residuals:
    """Results of the forward pass for some queries, with the cotangent of the output.

    Attributes:
      dout: the cotangent of the output, `[B, H, L, K]`.
      delta: Σ dout·out, D_BHL.
      logsumexp: the logsumexp of the logits, `[B, H, L]`.
      dcarry: for each running sum in the carry, R_BHL = Σ dout·∂out/∂sum. R is the gradient of the loss with respect to
        the sum before the first block. Empty if all keys are one block.
    """

    dout: Array
    delta: Array
    logsumexp: Array
    dcarry: tuple[Array, ...]

    @classmethod
    def of(cls, dout: Array, out: Array, logsumexp: Array, dout_dcarry: tuple[Array, ...]) -> "Residuals":
        """Creates the residuals from the results of `streaming_softmax.finish`."""
        wide = dout.astype(logsumexp.dtype)
        dcarry = tuple((wide * one).sum(axis=-1) for one in dout_dcarry)
        return cls(dout, (wide * out.astype(wide.dtype)).sum(axis=-1), logsumexp, dcarry)

    def block(self, number: Array, size: int) -> "Residuals":
        """Returns the residuals of block `number`; each block has `size` queries."""
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, number * size, size, axis=2), self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QueryGradients:
    """Gradients of a `QueryBlock`, in the accumulator type."""

    q: Array
    rotated_q: Array
    v: Array | None
    features: PyTree

    @classmethod
    def zeros(cls, queries: QueryBlock) -> "QueryGradients":
        return jax.tree.map(_zeros, cls(queries.q, queries.rotated_q, queries.v, queries.features))

    def of(self, queries: QueryBlock) -> Any:
        """Converts to the cotangent of `queries`, in the types of `queries`."""
        like = QueryGradients(queries.q, queries.rotated_q, queries.v, queries.features)
        cast = jax.tree.map(lambda x, y: x.astype(y.dtype), self, like)
        features = cotangent(cast.features)
        own = {"q": cast.q, "rotated_q": cast.rotated_q, "v": cast.v, "features": features}
        return dataclasses.replace(queries, **own, positions=NONE, indices=NONE, segment_ids=NONE)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyGradients:
    """Gradients of a `KeyBlock`, in the accumulator type; the keys are the last axis of k and v, `[B, G, K, M]`."""

    k: Array
    v: Array
    features: PyTree

    @classmethod
    def zeros(cls, keys: KeyBlock) -> "KeyGradients":
        return jax.tree.map(_zeros, cls(jnp.swapaxes(keys.k, 2, 3), jnp.swapaxes(keys.v, 2, 3), keys.features))

    def of(self, keys: KeyBlock) -> Any:
        """Converts to the cotangent of `keys`, in the types of `keys`."""
        k, v = jnp.swapaxes(self.k, 2, 3).astype(keys.k.dtype), jnp.swapaxes(self.v, 2, 3).astype(keys.v.dtype)
        features = cotangent(jax.tree.map(lambda x, y: x.astype(y.dtype), self.features, keys.features))
        none = {"positions": NONE, "indices": NONE, "segment_ids": NONE, "given": NONE}
        return dataclasses.replace(keys, k=k, v=v, features=features, **none)

    def add(self, end: Array | int, k: Array, v: Array, features: PyTree) -> "KeyGradients":
        """Adds the gradients `k`, `v` and `features` of the block of keys before `end` (see `KeyBlock.block`)."""
        start = jnp.maximum(end - k.shape[-1], 0)

        def add(axis: int, whole: Array, part: Array) -> Array:
            if part.dtype == jax.dtypes.float0:
                return whole
            old = jax.lax.dynamic_slice_in_dim(whole, start, part.shape[axis], axis)
            return jax.lax.dynamic_update_slice_in_dim(whole, old + part.astype(whole.dtype), start, axis)

        own = jax.tree.map(lambda whole, part: add(2, whole, part), self.features, features)
        return KeyGradients(add(3, self.k, k), add(3, self.v, v), own)


def _zeros(x: Array) -> Array:
    return jnp.zeros(x.shape, accumulator_dtype(x.dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradients:
    """The gradients accumulated so far.

    Attributes:
      carry: the encoding's carry, as in the forward pass.
      dsums: for each running sum, the gradient from the keys not yet visited.
      drest: the gradient of the carry's constants and state.
      queries: the gradients of this block of queries.
      params: the gradients of the encoding's parameters.
      keys: the gradients of all keys.
    """

    carry: Carry
    dsums: tuple[Array, ...]
    drest: Carry
    queries: QueryGradients
    params: PyTree
    keys: KeyGradients

    def add(self, end: Array | int, own: "Gradients") -> "Gradients":
        """Adds the contribution of the block of keys before `end`, from `block_gradients`."""
        drest, dparams = jax.tree.map(add_cotangent, (self.drest, self.params), (own.drest, own.params))
        dkeys = self.keys.add(end, own.keys.k, own.keys.v, own.keys.features)
        return Gradients(own.carry, own.dsums, drest, _add(self.queries, own.queries), dparams, dkeys)


def start(stream: Stream, residuals: Residuals, keys: KeyGradients) -> Gradients:
    """Returns the state before the first block; `keys` has the gradients from earlier blocks of queries."""
    carry = stream.initial_carry()
    drest = jax.tree.map(jnp.zeros_like, carry if stream.one_block else carry._replace(sums=()))
    zeros = jax.tree.map(jnp.zeros_like, stream.params)
    return Gradients(carry, residuals.dcarry, drest, QueryGradients.zeros(stream.queries), zeros, keys)


def backward(stream: Stream, residuals: Residuals, state: Gradients) -> Gradients:
    """Computes the gradient of `streaming_softmax.accumulate`, over the same blocks in the same order.

    Let A be the attention weights, S the logits, and D and R as in `Residuals`. Then dS = A (dout·v − D). The value of
    a running sum after a block affects only the blocks that follow. The gradient of this value is R − Σ dS·∂S/∂sum,
    summed over the blocks visited so far, including this block. So the VJP of `score` for one block receives dS and
    this gradient, and needs nothing from farther blocks.
    """

    def step(end: Array, state: Gradients, *, size: int, masked: bool, saturated: bool) -> Gradients:
        block, so_far = stream.keys.block(end, size), (state.carry, state.dsums)
        return state.add(end, block_gradients(stream, residuals, block, *so_far, masked=masked, saturated=saturated))

    return over_blocks(stream, state, step)


def block_gradients(
    stream: Stream,
    residuals: Residuals,
    block: KeyBlock,
    carry: Carry,
    dsums: tuple[Array, ...],
    *,
    masked: bool,
    saturated: bool,
) -> Gradients:
    """Computes what one block of keys contributes to the gradients, and the carry and `dsums` after the block."""
    queries, drop, before, dq_v = stream.queries, stream.drop, carry, None
    pairs = stream.pairs(block, masked)
    scored_BHLM, carry, vjp = _score(stream, pairs, carry, saturated)
    weights_BHLM = jnp.where(pairs.mask, jnp.exp(scored_BHLM - residuals.logsumexp[..., None]), 0)
    dweights_BHLM = content_logits(residuals.dout.astype(block.v.dtype), block.v, scale=1.0)
    kept_BHLM = weights_BHLM
    if drop is not None:
        scale_BHLM = drop(queries.indices, block.indices, weights_BHLM.dtype)
        kept_BHLM, dweights_BHLM = weights_BHLM * scale_BHLM, dweights_BHLM * scale_BHLM
    dscored_BHLM = weights_BHLM * (dweights_BHLM - residuals.delta[..., None])
    if saturated:
        dparams, dpairs, dcarry = vjp(dscored_BHLM)
    elif stream.one_block:
        sink_BHL: Any = carry  # `_score` returns the sink in place of the carry
        dsink_BHL, dq_v = _sink_gradients(queries, residuals, sink_BHL)
        dparams, dpairs, dcarry = vjp((dscored_BHLM, dsink_BHL))
        carry = before
    else:
        none = jax.tree.map(jnp.zeros_like, carry)
        if dsums:
            own = jax.tree.leaves(vjp((dscored_BHLM, cotangent(none)))[-1].sums)
            dsums = tuple(rest - one for rest, one in zip(dsums, own, strict=True))
        farther = jax.tree.unflatten(jax.tree.structure(carry.sums), dsums)
        dparams, dpairs, dcarry = vjp((dscored_BHLM, cotangent(none._replace(sums=farther))))
    dlogits = (dpairs.logits / queries.rotated_q.shape[-1] ** 0.5).astype(block.k.dtype)
    dcarry = dcarry if stream.one_block else dcarry._replace(sums=())
    dqueries = QueryGradients(dpairs.q, weights_times_v(dlogits, block.k), dq_v, dpairs.q_features)
    groups = block.k.shape[1]
    dk = q_times_weights(queries.rotated_q, dlogits, groups)
    dk = jnp.swapaxes(dpairs.k, 2, 3).astype(dk.dtype) + dk
    dv = q_times_weights(residuals.dout.astype(block.v.dtype), kept_BHLM.astype(block.v.dtype), groups)
    dv = jnp.swapaxes(dpairs.v, 2, 3).astype(dv.dtype) + dv
    return Gradients(carry, dsums, dcarry, dqueries, dparams, KeyGradients(dk, dv, dpairs.k_features))


def finish(stream: Stream, residuals: Residuals, state: Gradients) -> tuple[PyTree, QueryGradients]:
    """Adds what the sink and the initial carry contribute.

    Returns:
      (gradients of the parameters, gradients of the queries).
    """
    params, queries = stream.params, stream.queries
    dparams, dqueries, dcarry = state.params, state.queries, state.drest
    if not stream.one_block:
        dsums = [before - after for before, after in zip(residuals.dcarry, state.dsums, strict=True)]
        dcarry = dcarry._replace(sums=jax.tree.unflatten(jax.tree.structure(state.carry.sums), dsums))
        sink_BHL, vjp = jax.vjp(lambda params, carry: stream.encoding(params).sink(carry), params, state.carry)
        if sink_BHL is not None:
            dsink_BHL, dq_v = _sink_gradients(queries, residuals, sink_BHL)
            more, own = vjp(dsink_BHL)
            dparams, dcarry = jax.tree.map(add_cotangent, (dparams, dcarry), (more, own))
            dqueries = _add(dqueries, dataclasses.replace(jax.tree.map(jnp.zeros_like, dqueries), v=dq_v))

    def initial_carry(params: PyTree, q: Array, features: PyTree) -> Carry:
        return stream.encoding(params).initial_carry(q, features)

    vjp = jax.vjp(initial_carry, params, queries.q, queries.features)[1]
    more, dq, dfeatures = vjp(cotangent(dcarry))
    none = jnp.zeros_like(dqueries.rotated_q)
    dqueries = _add(dqueries, QueryGradients(dq, none, None, dfeatures))
    return jax.tree.map(add_cotangent, dparams, more), dqueries


def of(stream: Stream, dparams: PyTree, dqueries: Any, dkeys: Any) -> Any:
    """Returns the cotangent of a stream, built from the cotangents of its parts."""
    return dataclasses.replace(stream, params=cotangent(dparams), queries=dqueries, keys=dkeys, drop=NONE)


def _score(stream: Stream, pairs: Pairs, carry: Carry, saturated: bool) -> tuple[Array, Any, Any]:
    """Returns (logits of a block, carry after the block, their VJP).

    If all keys are one block, the sink replaces the carry.
    """

    def tail(params: PyTree, pairs: Pairs, carry: Carry) -> Array:
        return stream.encoding(params).tail(pairs, carry)

    def score(params: PyTree, pairs: Pairs, carry: Carry) -> Any:
        encoding = stream.encoding(params)
        logits_BHLM, carry = encoding.score(pairs, carry)
        return logits_BHLM, encoding.sink(carry) if stream.one_block else carry

    if saturated:
        logits_BHLM, vjp = jax.vjp(tail, stream.params, pairs, carry)
        return logits_BHLM, carry, vjp
    (logits_BHLM, after), vjp = jax.vjp(score, stream.params, pairs, carry)
    return logits_BHLM, after, vjp


def _sink_gradients(
    queries: QueryBlock, residuals: Residuals, sink_BHL: Array | None
) -> tuple[Array | None, Array | None]:
    """Returns (gradient of the sink's logit, gradient of the queries' own values).

    A gradient is None if the encoding does not use the sink or these values.
    """
    if sink_BHL is None:
        return None, None
    weight_BHL, v_BHLK = jnp.exp(sink_BHL - residuals.logsumexp), own_values(queries)
    if v_BHLK is None or queries.v is None:
        return -weight_BHL * residuals.delta, None
    dout = residuals.dout.astype(weight_BHL.dtype)
    dweight_BHL = (dout * v_BHLK.astype(dout.dtype)).sum(axis=-1)
    dv_BGLK = group(weight_BHL[..., None] * dout, queries.v.shape[1]).sum(axis=2)
    return weight_BHL * (dweight_BHL - residuals.delta), dv_BGLK


def _add(gradients: QueryGradients, more: QueryGradients) -> QueryGradients:
    """Adds `more` to `gradients`; a `v` of None adds nothing."""
    v = gradients.v if more.v is None or gradients.v is None else gradients.v + more.v
    rest = jax.tree.map(add_cotangent, dataclasses.replace(gradients, v=None), dataclasses.replace(more, v=None))
    return dataclasses.replace(rest, v=v)
