"""Attention in memory linear in the length: strips of queries over blocks of keys."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.attention import online, online_gradient
from cope_jax.attention.inputs import Inputs
from cope_jax.attention.online import Blocks, Keys, Queries, Rules, leaves_up_to
from cope_jax.attention.online_gradient import KeyGradients, Outcome
from cope_jax.encodings import Encoding
from cope_jax.ops.dropout import Dropout
from cope_jax.ops.logits import content_logits
from cope_jax.typing import Array, PyTree

BLOCKS = Blocks(128, 128, 128)


def blockwise_attention(encoding: Encoding, inputs: Inputs, blocks: Blocks = BLOCKS) -> Array:
    """The same as `full_attention`, without ever holding the pairs of more than one strip and one block.

    Args:
      encoding: the position encoding.
      inputs: from `prepare`.
      blocks: sizes.

    Returns:
      out_BLHK, in the type of the values.
    """
    graph, params = nnx.split(encoding)
    params = jax.tree.map(jnp.asarray, params)
    length = inputs.q.shape[1]
    blocks = blocks.within(length, inputs.v.shape[1])
    queries = queries_of(inputs, -length % blocks.queries)
    keys = keys_of(inputs)
    drop = Dropout.create(inputs.dropout_key, inputs.dropout_rate, *queries.q.shape[:2])
    rules = Rules(graph, blocks, inputs.mask.causal, inputs.mask.window, running_sums(encoding, inputs))
    out_BHLK = _attend(rules, params, queries, keys, drop)
    return jnp.swapaxes(out_BHLK[:, :, :length], 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(rules: Rules, params: PyTree, queries: Queries, keys: Keys, drop: Dropout | None) -> Array:
    return _forward_strips(rules, params, queries, keys, drop, gradient=False)[0]


def _forward_strips(
    rules: Rules, params: PyTree, queries: Queries, keys: Keys, drop: Dropout | None, gradient: bool
) -> tuple[Array, Array, tuple[Array, ...]]:
    def strip(number: Array) -> Any:
        own = queries.strip(number, rules.blocks.queries)
        state = online.start(rules, params, own, keys.v.shape[-1], gradient)
        out, *rest = online.finish(online.accumulate(rules, params, own, keys, state, drop))
        return out.astype(keys.v.dtype), *rest

    return _over_strips(strip, queries, rules.blocks.queries)


def _forward(rules: Rules, params: PyTree, queries: Queries, keys: Keys, drop: Dropout | None) -> tuple[Array, Any]:
    out, logsumexp, sensitivities = _forward_strips(rules, params, queries, keys, drop, gradient=True)
    return out, (params, queries, keys, drop, out, logsumexp, sensitivities)


def _backward(rules: Rules, residuals: Any, dout_BHLK: Array) -> tuple[PyTree, Queries, Keys, None]:
    params, queries, keys, drop, out, logsumexp, sensitivities = residuals
    outcome = Outcome.of(dout_BHLK, out, logsumexp, sensitivities)

    def strip(gathered: tuple[PyTree, KeyGradients], number: Array) -> Any:
        dparams, dkeys = gathered
        own, own_outcome = queries.strip(number, rules.blocks.queries), outcome.strip(number, rules.blocks.queries)
        state = online_gradient.start(rules, params, own, own_outcome, dkeys)
        state = online_gradient.pull(rules, params, own, keys, own_outcome, state, drop)
        more, dq = online_gradient.finish(rules, params, own, own_outcome, state)
        return (jax.tree.map(jnp.add, dparams, more), state.keys), (dq, state.rotated_q)

    start = (jax.tree.map(jnp.zeros_like, params), KeyGradients.zeros(keys))
    numbers = jnp.arange(queries.q.shape[2] // rules.blocks.queries, dtype=jnp.int32)
    if len(numbers) == 1:
        gathered, dqueries = strip(start, numbers[0])
    else:
        gathered, dqueries = jax.lax.scan(strip, start, numbers)
        dqueries = jax.tree.map(_join, dqueries)
    dq, drotated_q = (d.astype(queries.q.dtype) for d in dqueries)
    return (
        gathered[0],
        dataclasses.replace(queries, q=dq, rotated_q=drotated_q, positions=None, places=None, segment_ids=None),
        gathered[1].of(keys),
        None,
    )


def running_sums(encoding: Encoding, inputs: Inputs) -> tuple[bool, ...]:
    """For each leaf of the encoding's carry, whether it is a running sum (or constant): see `Encoding.slopes`."""

    def slopes() -> tuple[PyTree, PyTree]:
        carry = encoding.initial_carry(inputs.q)
        logits = content_logits(inputs.rotated_q, inputs.rotated_k)
        return carry, encoding.slopes(
            inputs.q,
            inputs.rotated_k,
            inputs.features,
            logits,
            jnp.ones((1, 1, *logits.shape[2:]), bool),
            inputs.q_positions,
            inputs.k_positions,
            carry,
        )

    carry, found = jax.eval_shape(slopes)
    return tuple(entry is not None for entry in leaves_up_to(carry, found))


_attend.defvjp(_forward, _backward)


def _over_strips(strip: Any, queries: Queries, q_block: int) -> Any:
    numbers = jnp.arange(queries.q.shape[2] // q_block, dtype=jnp.int32)
    if len(numbers) == 1:
        return strip(numbers[0])
    return jax.tree.map(_join, jax.lax.map(strip, numbers))


def _join(x: Array) -> Array:
    """[strips, B, H, L, ...] as [B, H, strips·L, ...]."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])


def queries_of(inputs: Inputs, padding: int) -> Queries:
    """The queries of `inputs`, head-major, with `padding` more that stand where the last one does."""
    mask = inputs.mask
    return Queries(
        _pad(jnp.swapaxes(inputs.q, 1, 2), 2, padding),
        _pad(jnp.swapaxes(inputs.rotated_q, 1, 2), 2, padding),
        _pad(inputs.q_positions, 1, padding, "edge"),
        _pad(mask.q_places_L, 0, padding, "edge"),
        None if mask.q_segment_ids_BL is None else _pad(mask.q_segment_ids_BL, 1, padding, "edge"),
    )


def keys_of(inputs: Inputs) -> Keys:
    """The keys of `inputs`, head-major."""
    mask = inputs.mask
    return Keys(
        jnp.swapaxes(inputs.rotated_k, 1, 2),
        jnp.swapaxes(inputs.v, 1, 2),
        inputs.features,
        jnp.asarray(inputs.k_positions),
        jnp.asarray(mask.k_places_M),
        None if mask.k_segment_ids_BM is None else jnp.asarray(mask.k_segment_ids_BM),
    )


def _pad(x: Any, axis: int, padding: int, mode: str = "constant") -> Array:
    x = jnp.asarray(x)
    return jnp.pad(x, [(0, padding if a == axis else 0) for a in range(x.ndim)], mode) if padding else x
