"""Attention in memory linear in the length: strips of queries over blocks of keys."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from cope_jax.attention import online, online_gradient
from cope_jax.attention.inputs import Inputs
from cope_jax.attention.mask import Mask
from cope_jax.attention.online_gradient import KeyGradients, Outcome
from cope_jax.attention.strips import Blocks, Keys, Queries, Rules, add_cotangent, cotangent, leaves_up_to
from cope_jax.encodings import Encoding
from cope_jax.ops.dropout import Dropout
from cope_jax.ops.logits import content_logits
from cope_jax.typing import Array, PyTree

# Measured on CPUs, see docs/attention.md: wider blocks spill out of the cache.
BLOCKS = Blocks(128, 128, 128)
# Up to so many keys, all are one block; strips of so many queries then see different, known numbers of them.
ONE_BLOCK, SHORT_STRIP = 256, 48
MOST_SPANS = 8  # strips that are traced one by one
OUTCOME = "attention"  # the name of what the backward pass needs of the forward pass, for rematerialisation


def choose_blocks(length: int, keys: int) -> Blocks:
    """The sizes that `blockwise_attention` takes by itself."""
    if keys > ONE_BLOCK:
        return BLOCKS._replace(queries=64) if length <= 2048 else BLOCKS  # a long diagonal has its price
    strips = max(1, -(-length // SHORT_STRIP))
    return Blocks(-(-length // strips), keys, keys)


def blockwise_attention(encoding: Encoding, inputs: Inputs, blocks: Blocks | None = None) -> Array:
    """The same as `full_attention`, without ever holding the pairs of more than one strip and one block.

    Strips of queries see blocks of keys from the nearest to the farthest, with an online softmax and the encoding's
    carry; the gradient is written by hand, and computes the pairs anew. Blocks that causality, window or segments rule
    out are skipped. Memory is linear in the length. An encoding that says nothing of its carry (`Encoding.slopes`) has
    all keys in one block: linear still, but larger.

    Args:
      encoding: the position encoding.
      inputs: from `prepare`.
      blocks: sizes; None takes `choose_blocks`.

    Returns:
      out_BLHK, in the type of the values.
    """
    length, keys_length = inputs.q.shape[1], inputs.v.shape[1]
    if 0 in (length, keys_length):
        return jnp.zeros((*inputs.q.shape[:3], inputs.v.shape[-1]), inputs.v.dtype)
    graph, params = nnx.split(encoding)
    params = jax.tree.map(jnp.asarray, params)
    blocks = (blocks or choose_blocks(length, keys_length)).within(length, keys_length)
    is_sum = running_sums(encoding, inputs)
    if is_sum is None:
        blocks, is_sum = (
            blocks._replace(near=keys_length),
            (False,) * len(jax.tree.leaves(jax.eval_shape(encoding.initial_carry, inputs.q))),
        )
    queries = queries_of(inputs, -length % blocks.queries)
    mask = inputs.mask
    rules = Rules(graph, blocks, mask.causal, mask.window, is_sum, one_block=blocks.near == keys_length)
    few = queries.q.shape[2] <= MOST_SPANS * blocks.queries
    spans = static_spans(mask, blocks.queries) if rules.one_block and few else None
    out_BHLK = _attend(rules, spans, params, queries, keys_of(inputs), inputs.drop)
    return jnp.swapaxes(out_BHLK[:, :, :length], 1, 2)


Spans = tuple[tuple[int, int], ...] | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(rules: Rules, spans: Spans, params: PyTree, queries: Queries, keys: Keys, drop: Dropout | None) -> Array:
    return _forward_strips(rules, spans, params, queries, keys, drop, gradient=False)[0]


def _forward_strips(
    rules: Rules, spans: Spans, params: PyTree, queries: Queries, keys: Keys, drop: Dropout | None, gradient: bool
) -> tuple[Array, Array, tuple[Array, ...]]:
    def strip(rules: Rules, keys: Keys, number: Array) -> Any:
        own = queries.strip(number, rules.blocks.queries)
        state = online.start(rules, params, own, keys.v.shape[-1], gradient)
        return online.finish(online.accumulate(rules, params, own, keys, state, drop), keys.v.dtype)

    if spans is not None:
        return _concatenate([strip(*_narrow(rules, keys, span), jnp.int32(n)) for n, span in enumerate(spans)])
    return _join(jax.lax.map(functools.partial(strip, rules, keys), _numbers(rules, queries)))


def _forward(
    rules: Rules, spans: Spans, params: PyTree, queries: Queries, keys: Keys, drop: Dropout | None
) -> tuple[Array, Any]:
    outcome = _forward_strips(rules, spans, params, queries, keys, drop, gradient=True)
    out, logsumexp, sensitivities = checkpoint_name(outcome, OUTCOME)
    return out, (params, queries, keys, drop, out, logsumexp, sensitivities)


def _backward(rules: Rules, spans: Spans, residuals: Any, dout_BHLK: Array) -> tuple[PyTree, Queries, Keys, None]:
    params, queries, keys, drop, out, logsumexp, sensitivities = residuals
    outcome = Outcome.of(dout_BHLK, out, logsumexp, sensitivities)
    if rules.one_block:  # nothing farther pulls on the sums
        outcome = dataclasses.replace(outcome, pulls=(jnp.zeros_like(logsumexp),) * sum(rules.is_sum))

    def strip(rules: Rules, keys: Keys, gathered: tuple[PyTree, KeyGradients], number: Array) -> Any:
        dparams, dkeys = gathered
        own, own_outcome = queries.strip(number, rules.blocks.queries), outcome.strip(number, rules.blocks.queries)
        state = online_gradient.start(rules, params, own, own_outcome, dkeys)
        state = online_gradient.pull(rules, params, own, keys, own_outcome, state, drop)
        more, dq = online_gradient.finish(rules, params, own, own_outcome, state)
        return (jax.tree.map(add_cotangent, dparams, more), state.keys), (dq, state.rotated_q)

    dparams, dkeys = jax.tree.map(jnp.zeros_like, params), KeyGradients.zeros(keys)
    if spans is not None:
        found = []
        for n, (first, end) in enumerate(spans):
            narrow, some = _narrow(rules, keys, (first, end))
            (dparams, own), dquery = strip(narrow, some, (dparams, KeyGradients.zeros(some)), jnp.int32(n))
            dkeys = dkeys.add(end, own.k, own.v, own.features)
            found.append(dquery)
        dqueries = _concatenate(found)
    else:
        (dparams, dkeys), found = jax.lax.scan(
            functools.partial(strip, rules, keys), (dparams, dkeys), _numbers(rules, queries)
        )
        dqueries = _join(found)
    dq, drotated_q = (d.astype(queries.q.dtype) for d in dqueries)
    none: Any = None  # integers have no cotangent
    return (
        cotangent(dparams),
        dataclasses.replace(queries, q=dq, rotated_q=drotated_q, positions=none, places=none, segment_ids=none),
        dkeys.of(keys),
        None,
    )


_attend.defvjp(_forward, _backward)


def _numbers(rules: Rules, queries: Queries) -> Array:
    return jnp.arange(queries.q.shape[2] // rules.blocks.queries, dtype=jnp.int32)


def _narrow(rules: Rules, keys: Keys, span: tuple[int, int]) -> tuple[Rules, Keys]:
    """The rules and keys of a strip that sees only the keys of a span, as one block."""
    blocks = rules.blocks._replace(near=span[1] - span[0])
    return dataclasses.replace(rules, blocks=blocks), keys.range(*span)


def _join(stacked: Any) -> Any:
    """Arrays [strips, B, H, L, ...] as [B, H, strips·L, ...]."""

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])

    return jax.tree.map(join, stacked)


def _concatenate(strips: list[Any]) -> Any:
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=2), *strips)


def static_spans(mask: Mask, strip: int) -> Spans:
    """For each strip the keys (first, end) that it sees, where that is known while tracing; else None."""
    q_places, k_places = mask.q_places_L, mask.k_places_M
    if not isinstance(q_places, np.ndarray) or not isinstance(k_places, np.ndarray):
        return None
    spans = []
    for start in range(0, len(q_places), strip):
        own = Mask(q_places[start : start + strip], k_places, causal=mask.causal, window=mask.window)
        seen = np.flatnonzero(own.allowed().any(axis=0))
        spans.append((int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 1))
    return tuple(spans)


def running_sums(encoding: Encoding, inputs: Inputs) -> tuple[bool, ...] | None:
    """For each leaf of the encoding's carry, whether it is a running sum or constant; None where nothing is known.

    See `Encoding.slopes`.
    """

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
    return None if found is None else tuple(entry is not None for entry in leaves_up_to(carry, found))


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
