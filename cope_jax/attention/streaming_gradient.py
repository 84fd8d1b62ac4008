"""The backward pass for a block of queries: it visits the keys again, near to far, and recomputes
the logits.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.attention.blocks import KeyBlock, QueryBlock
from cope_jax.attention.stream import Stream, add_cotangent, cotangent
from cope_jax.attention.streaming_softmax import over_blocks, own_values
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
      dcarry: for each running sum in the carry, R_BHL = Σ dout·∂out/∂sum. R is the gradient of the
        loss with respect to the sum before the first block. Empty if all keys are one block.
    """

    dout: Array
    delta: Array
    logsumexp: Array
    dcarry: tuple[Array, ...]

    @classmethod
    def of(
        cls, dout: Array, out: Array, logsumexp: Array, dout_dcarry: tuple[Array, ...]
    ) -> "Residuals":
        """Creates the residuals from the results of `streaming_softmax.finish`."""
        wide = dout.astype(logsumexp.dtype)
        dcarry = tuple((wide * slope).sum(axis=-1) for slope in dout_dcarry)
        return cls(dout, (wide * out.astype(wide.dtype)).sum(axis=-1), logsumexp, dcarry)

    def block(self, number: Array, size: int) -> "Residuals":
        """Returns the residuals of block `number`; each block has `size` queries."""
        return jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, number * size, size, axis=2), self
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QueryGradients:
    """Gradients of a `QueryBlock`, in the accumulator type, and of the bias of its pairs,
    `[B, H, L, M]`; complete ones, to which nothing is added, may have the type of the queries.
    """

    q: Array
    rotated_q: Array | None
    v: Array | None
    features: PyTree
    bias: Array | None = None

    @classmethod
    def zeros(cls, queries: QueryBlock, bias: Array | None) -> "QueryGradients":
        return jax.tree.map(
            _zeros, cls(queries.q, queries.rotated_q, queries.v, queries.features, bias)
        )

    def of(self, queries: QueryBlock) -> Any:
        """Converts to the cotangent of `queries`, in the types of `queries`."""
        return _cotangent_of(
            queries, q=self.q, rotated_q=self.rotated_q, v=self.v, features=self.features
        )

    def among(self, first: int, keys: int) -> "QueryGradients":
        """Returns the gradients for `keys` keys, if those of the bias are for some keys from
        `first` on.
        """
        if self.bias is None:
            return self
        after = keys - first - self.bias.shape[3]
        return dataclasses.replace(
            self, bias=jnp.pad(self.bias, [(0, 0), (0, 0), (0, 0), (first, after)])
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyGradients:
    """Gradients of a `KeyBlock`, in the accumulator type; the keys are the last axis of k and v,
    `[B, G, K, M]`. Complete ones, to which nothing is added, may have the type of the keys.
    """

    k: Array
    v: Array
    features: PyTree

    @classmethod
    def zeros(cls, keys: KeyBlock) -> "KeyGradients":
        return jax.tree.map(
            _zeros, cls(jnp.swapaxes(keys.k, 2, 3), jnp.swapaxes(keys.v, 2, 3), keys.features)
        )

    def of(self, keys: KeyBlock, bias: Array | None = None) -> Any:
        """Converts to the cotangent of `keys`, in the types of `keys`; `bias` is the gradient of
        the bias.
        """
        k, v = jnp.swapaxes(self.k, 2, 3), jnp.swapaxes(self.v, 2, 3)
        dkeys = _cotangent_of(keys, k=k, v=v, features=self.features, bias=bias)
        return dataclasses.replace(dkeys, given=NONE)

    def add(self, end: Array | int, k: Array, v: Array, features: PyTree) -> "KeyGradients":
        """Adds the gradients `k`, `v` and `features` of the block of keys before `end` (see
        `KeyBlock.block`).
        """
        start = jnp.maximum(end - k.shape[-1], 0)
        features = jax.tree.map(
            lambda whole, x: _add_at(2, start, whole, x), self.features, features
        )
        return KeyGradients(_add_at(3, start, self.k, k), _add_at(3, start, self.v, v), features)


def _add_at(axis: int, start: Array, whole: Array, x: Array) -> Array:
    """Adds x to the entries of `whole` from `start` on; what is no gradient adds nothing."""
    if x.dtype == jax.dtypes.float0:
        return whole
    old = jax.lax.dynamic_slice_in_dim(whole, start, x.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(whole, old + x.astype(whole.dtype), start, axis)


def _cotangent_of(block: Any, **gradients: PyTree) -> Any:
    """Returns the cotangent of a block, in its types. Positions are data: their cotangent is 0 if
    they are real numbers.
    """
    cast = {
        name: cotangent(jax.tree.map(lambda x, y: x.astype(y.dtype), dx, getattr(block, name)))
        for name, dx in gradients.items()
    }
    real = jnp.issubdtype(block.positions.dtype, jnp.inexact)
    cast["positions"] = jnp.zeros_like(block.positions) if real else NONE
    return dataclasses.replace(block, **cast, indices=NONE, segment_ids=NONE)


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

    def add(self, end: Array | int, block: "Gradients") -> "Gradients":
        """Adds the contribution of the block of keys before `end`, from `block_gradients`."""
        drest, dparams = jax.tree.map(
            add_cotangent, (self.drest, self.params), (block.drest, block.params)
        )
        dkeys = self.keys.add(end, block.keys.k, block.keys.v, block.keys.features)
        dqueries, dbias = _add(self.queries, block.queries), block.queries.bias
        if self.queries.bias is not None and dbias is not None:
            start = jnp.maximum(end - dbias.shape[3], 0)
            dqueries = dataclasses.replace(
                dqueries, bias=_add_at(3, start, self.queries.bias, dbias)
            )
        return Gradients(block.carry, block.dsums, drest, dqueries, dparams, dkeys)


def start(stream: Stream, residuals: Residuals, keys: KeyGradients) -> Gradients:
    """Returns the state before the first block; `keys` has the gradients from earlier blocks of
    queries.
    """
    carry = stream.initial_carry()
    drest = jax.tree.map(jnp.zeros_like, carry if stream.one_block else carry._replace(sums=()))
    zeros = jax.tree.map(jnp.zeros_like, stream.params)
    dqueries = QueryGradients.zeros(stream.queries, stream.keys.bias)
    return Gradients(carry, residuals.dcarry, drest, dqueries, zeros, keys)


def backward(stream: Stream, residuals: Residuals, state: Gradients) -> Gradients:
    """Computes the gradient of `streaming_softmax.accumulate`, over the same blocks in the same
    order.

    Let A be the attention weights, S the logits, and D and R as in `Residuals`. Then dS = A (dout·v
    − D). The value of a running sum after a block affects only the blocks that follow. The gradient
    of this value is R − Σ dS·∂S/∂sum, summed over the blocks visited so far, including this block.
    So the VJP of `score` for one block receives dS and this gradient, and needs nothing from
    farther blocks.
    """

    def step(
        end: Array, state: Gradients, *, size: int, masked: bool, saturated: bool
    ) -> Gradients:
        block, so_far = stream.keys.block(end, size), (state.carry, state.dsums)
        return state.add(
            end,
            block_gradients(stream, residuals, block, *so_far, masked=masked, saturated=saturated),
        )

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
    """Computes what one block of keys contributes to the gradients, and the carry and `dsums` after
    the block: both stay if all rows are saturated, or if no block follows.
    """
    pairs, farther = stream.pairs(block, masked), not (saturated or stream.one_block)

    # Farther blocks read the carry; the sink follows the only block at once.
    def score(params: PyTree, pairs: Pairs, carry: Carry) -> tuple[Array, Array | None, Any]:
        encoding = stream.encoding(params)
        if saturated:
            return encoding.tail(pairs, carry), None, None
        logits_BHLM, after = encoding.checked_score(pairs, carry)
        sink_BHL = None if farther else encoding.sink(after)
        return logits_BHLM, sink_BHL, after if farther else None

    (logits_BHLM, sink_BHL, after), vjp = jax.vjp(score, stream.params, pairs, carry)
    kept_BHLM, dlogits_BHLM = _softmax_gradients(stream, residuals, block, pairs, logits_BHLM)
    dsink_BHL, dq_v = _sink_gradients(stream.queries, residuals, sink_BHL)
    dafter = jax.tree.map(jnp.zeros_like, after)
    if farther and dsums:
        nearer = jax.tree.leaves(vjp((dlogits_BHLM, None, cotangent(dafter)))[-1].sums)
        dsums = tuple(rest - dsum for rest, dsum in zip(dsums, nearer, strict=True))
        dafter = dafter._replace(sums=jax.tree.unflatten(jax.tree.structure(after.sums), dsums))
    dparams, dpairs, dcarry = vjp((dlogits_BHLM, dsink_BHL, cotangent(dafter)))
    dqueries, dkeys = _product_gradients(stream, residuals, block, pairs, dpairs, kept_BHLM)
    dqueries = dataclasses.replace(dqueries, v=dq_v)
    drest = dcarry if stream.one_block else dcarry._replace(sums=())
    return Gradients(after if farther else carry, dsums, drest, dqueries, dparams, dkeys)


def _softmax_gradients(
    stream: Stream, residuals: Residuals, block: KeyBlock, pairs: Pairs, logits_BHLM: Array
) -> tuple[Array, Array]:
    """Returns (the weights that multiplied the values, ∂loss/∂logits), both `[B, H, L, M]`."""
    weights_BHLM = jnp.where(pairs.mask, jnp.exp(logits_BHLM - residuals.logsumexp[..., None]), 0)
    dweights_BHLM = content_logits(residuals.dout.astype(block.v.dtype), block.v, scale=1.0)
    kept_BHLM = weights_BHLM
    if stream.drop is not None:
        scale_BHLM = stream.drop(stream.queries.indices, block.indices, weights_BHLM.dtype)
        kept_BHLM, dweights_BHLM = weights_BHLM * scale_BHLM, dweights_BHLM * scale_BHLM
    return kept_BHLM, weights_BHLM * (dweights_BHLM - residuals.delta[..., None])


def _product_gradients(
    stream: Stream,
    residuals: Residuals,
    block: KeyBlock,
    pairs: Pairs,
    dpairs: Pairs,
    kept_BHLM: Array,
) -> tuple[QueryGradients, KeyGradients]:
    """Returns the gradients of queries and keys, from those of the pairs, `dpairs`, and of weights
    times values.
    """
    queries, groups = stream.queries, block.k.shape[1]
    dlogits, dbias = stream.request.content_gradients(pairs.logits, dpairs.logits)
    dlogits = dlogits.astype(block.k.dtype)
    dq, dcontent_q = dpairs.q, weights_times_v(dlogits, block.k)
    if queries.rotated_q is None:
        dq = dq.astype(dcontent_q.dtype) + dcontent_q
    drotated_q = None if queries.rotated_q is None else dcontent_q
    dqueries = QueryGradients(dq, drotated_q, None, dpairs.q_features, dbias)
    dk = q_times_weights(queries.content_q, dlogits, groups)
    dk = jnp.swapaxes(dpairs.k, 2, 3).astype(dk.dtype) + dk
    dv = q_times_weights(
        residuals.dout.astype(block.v.dtype), kept_BHLM.astype(block.v.dtype), groups
    )
    dv = jnp.swapaxes(dpairs.v, 2, 3).astype(dv.dtype) + dv
    return dqueries, KeyGradients(dk, dv, dpairs.k_features)


def finish(stream: Stream, residuals: Residuals, state: Gradients) -> tuple[PyTree, QueryGradients]:
    """Adds what the sink and the initial carry contribute.

    Returns:
      (gradients of the parameters, gradients of the queries).
    """
    params, queries = stream.params, stream.queries
    dparams, dqueries, dcarry = state.params, state.queries, state.drest
    if not stream.one_block:
        dsums = [
            before - after for before, after in zip(residuals.dcarry, state.dsums, strict=True)
        ]
        dcarry = dcarry._replace(
            sums=jax.tree.unflatten(jax.tree.structure(state.carry.sums), dsums)
        )
        sink_BHL, vjp = jax.vjp(
            lambda params, carry: stream.encoding(params).sink(carry), params, state.carry
        )
        if sink_BHL is not None:
            dsink_BHL, dq_v = _sink_gradients(queries, residuals, sink_BHL)
            more, dsink_carry = vjp(dsink_BHL)
            dparams, dcarry = jax.tree.map(add_cotangent, (dparams, dcarry), (more, dsink_carry))
            if dqueries.v is not None and dq_v is not None:
                dqueries = dataclasses.replace(dqueries, v=dqueries.v + dq_v)

    def initial_carry(params: PyTree, q: Array, features: PyTree) -> Carry:
        return stream.encoding(params).initial_carry(q, features)

    vjp = jax.vjp(initial_carry, params, queries.q, queries.features)[1]
    more, dq, dfeatures = vjp(cotangent(dcarry))
    none = jax.tree.map(jnp.zeros_like, dqueries.rotated_q)
    dqueries = _add(dqueries, QueryGradients(dq, none, None, dfeatures))
    return jax.tree.map(add_cotangent, dparams, more), dqueries


def of(stream: Stream, dparams: PyTree, dqueries: Any, dkeys: Any) -> Any:
    """Returns the cotangent of a stream, built from the cotangents of its parts."""
    request = dataclasses.replace(stream.request, queries=dqueries, keys=dkeys, drop=NONE)
    return dataclasses.replace(stream, params=cotangent(dparams), request=request)


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
    """Adds `more` to `gradients`, except to the bias; a `v` of None adds nothing."""
    v = gradients.v if more.v is None or gradients.v is None else gradients.v + more.v
    none: Any = {"v": None, "bias": None}
    rest = jax.tree.map(
        add_cotangent, dataclasses.replace(gradients, **none), dataclasses.replace(more, **none)
    )
    return dataclasses.replace(rest, v=v, bias=gradients.bias)
