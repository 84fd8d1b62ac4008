"""Attention in memory linear in the length: blocks of queries over blocks of keys."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from cope_jax.array_types import Array, PyTree
from cope_jax.attention import streaming_gradient, streaming_softmax
from cope_jax.attention.inputs import Inputs, head_major
from cope_jax.attention.mask import Mask
from cope_jax.attention.streaming_gradient import KeyGradients, QueryGradients, Residuals
from cope_jax.attention.tiles import (
    BlockSizes,
    KeyBlock,
    QueryBlock,
    StreamSpec,
    add_cotangent,
    cotangent,
    needs_one_block,
)
from cope_jax.encodings import Encoding
from cope_jax.ops.dropout import Dropout

# Measured on CPUs, see docs/attention.md: wider blocks spill out of the cache.
SIZES = BlockSizes(128, 128, 128)
# Up to so many keys, all are one block; blocks of so many queries then see different, known numbers of them.
ONE_BLOCK, SHORT_BLOCK = 256, 48
MOST_SPANS = 8  # blocks of queries that are traced one by one
RESIDUALS = "attention"  # the name of what the backward pass needs of the forward pass, for rematerialisation
Spans = tuple[tuple[int, int], ...] | None


def choose_sizes(length: int, keys: int) -> BlockSizes:
    """The sizes that `blockwise_attention` takes by itself."""
    if keys > ONE_BLOCK:
        return SIZES._replace(queries=64) if length <= 2048 else SIZES  # a long diagonal has its price
    blocks = max(1, -(-length // SHORT_BLOCK))
    return BlockSizes(-(-length // blocks), keys, keys)


def blockwise_attention(encoding: Encoding, inputs: Inputs, blocks: BlockSizes | None = None) -> Array:
    """The same as `full_attention`, without ever holding the pairs of more than one block of queries and of keys.

    Each block of queries sees blocks of keys from the nearest to the farthest, with an online softmax and the
    encoding's carry; the gradient is written by hand, and computes the pairs anew. Blocks that causality, window or
    segments rule out are skipped, and those that the encoding says are `done`. Memory is linear in the length. An
    encoding that does not split the keys, or has a carry of other than sums, has all keys in one block: linear still,
    but larger.

    Args:
      encoding: the position encoding.
      inputs: from `prepare`.
      blocks: sizes; None takes `choose_sizes`.

    Returns:
      out_BLHK, in the type of the values.
    """
    length, keys = inputs.q.shape[2], inputs.v.shape[2]
    if 0 in (length, keys):
        return jnp.zeros((len(inputs.q), length, inputs.q.shape[1], inputs.v.shape[-1]), inputs.v.dtype)
    graph, params = nnx.split(encoding)
    params = jax.tree.map(jnp.asarray, params)
    sizes = (blocks or choose_sizes(length, keys)).within(length, keys)
    if needs_one_block(encoding, inputs):
        sizes = sizes._replace(near=keys)
    queries = QueryBlock.of(inputs, -length % sizes.queries)
    mask = inputs.mask
    spec = StreamSpec(graph, sizes, mask.causal, mask.window, one_block=sizes.near == keys)
    few = queries.q.shape[2] <= MOST_SPANS * sizes.queries
    spans = static_spans(mask, sizes.queries) if spec.one_block and few else None
    return head_major(_attend(spec, spans, params, queries, KeyBlock.of(inputs), inputs.drop)[:, :, :length])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    spec: StreamSpec, spans: Spans, params: PyTree, queries: QueryBlock, keys: KeyBlock, drop: Dropout | None
) -> Array:
    return _forward_blocks(spec, spans, params, queries, keys, drop, gradient=False)[0]


def _forward_blocks(
    spec: StreamSpec,
    spans: Spans,
    params: PyTree,
    queries: QueryBlock,
    keys: KeyBlock,
    drop: Dropout | None,
    gradient: bool,
) -> tuple[Array, Array, tuple[Array, ...]]:
    def one(spec: StreamSpec, keys: KeyBlock, number: Array) -> Any:
        own = queries.block(number, spec.sizes.queries)
        state = streaming_softmax.start(spec, params, own, keys.v.shape[-1], gradient)
        state = streaming_softmax.accumulate(spec, params, own, keys, state, drop)
        return streaming_softmax.finish(spec, params, own, state, keys.v.dtype)

    if spans is not None:
        return _concatenate([one(*_narrow(spec, keys, span), jnp.int32(n)) for n, span in enumerate(spans)])
    return _join(jax.lax.map(functools.partial(one, spec, keys), _numbers(spec, queries)))


def _forward(
    spec: StreamSpec, spans: Spans, params: PyTree, queries: QueryBlock, keys: KeyBlock, drop: Dropout | None
) -> tuple[Array, Any]:
    result = _forward_blocks(spec, spans, params, queries, keys, drop, gradient=True)
    out, logsumexp, dout_dcarry = checkpoint_name(result, RESIDUALS)
    return out, (params, queries, keys, drop, out, logsumexp, dout_dcarry)


def _backward(spec: StreamSpec, spans: Spans, kept: Any, dout_BHLK: Array) -> tuple[PyTree, QueryBlock, KeyBlock, None]:
    params, queries, keys, drop, *result = kept
    residuals = Residuals.of(dout_BHLK, *result)

    def one(spec: StreamSpec, keys: KeyBlock, gathered: tuple[PyTree, KeyGradients], number: Array) -> Any:
        dparams, dkeys = gathered
        size = spec.sizes.queries
        own, own_residuals = queries.block(number, size), residuals.block(number, size)
        state = streaming_gradient.start(spec, params, own, own_residuals, dkeys)
        state = streaming_gradient.backward(spec, params, own, keys, own_residuals, state, drop)
        more, dqueries = streaming_gradient.finish(spec, params, own, own_residuals, state)
        return (jax.tree.map(add_cotangent, dparams, more), state.keys), dqueries

    dparams, dkeys = jax.tree.map(jnp.zeros_like, params), KeyGradients.zeros(keys)
    dqueries: QueryGradients
    if spans is not None:
        found = []
        for n, (first, end) in enumerate(spans):
            narrow, some = _narrow(spec, keys, (first, end))
            (dparams, own), dquery = one(narrow, some, (dparams, KeyGradients.zeros(some)), jnp.int32(n))
            dkeys = dkeys.add(end, own.k, own.v, own.features)
            found.append(dquery)
        dqueries = _concatenate(found)
    else:
        (dparams, dkeys), stacked = jax.lax.scan(
            functools.partial(one, spec, keys), (dparams, dkeys), _numbers(spec, queries)
        )
        dqueries = _join(stacked)
    return cotangent(dparams), dqueries.of(queries), dkeys.of(keys), None


_attend.defvjp(_forward, _backward)


def _numbers(spec: StreamSpec, queries: QueryBlock) -> Array:
    return jnp.arange(queries.q.shape[2] // spec.sizes.queries, dtype=jnp.int32)


def _narrow(spec: StreamSpec, keys: KeyBlock, span: tuple[int, int]) -> tuple[StreamSpec, KeyBlock]:
    """The spec and keys of queries that see only the keys of a span, as one block."""
    sizes = spec.sizes._replace(near=span[1] - span[0])
    return dataclasses.replace(spec, sizes=sizes), keys.range(*span)


def _join(stacked: Any) -> Any:
    """Arrays [blocks, B, H, L, ...] as [B, H, blocks·L, ...]."""

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])

    return jax.tree.map(join, stacked)


def _concatenate(blocks: list[Any]) -> Any:
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=2), *blocks)


def static_spans(mask: Mask, size: int) -> Spans:
    """For each block of queries the keys (first, end) that it sees, where that is known while tracing; else None."""
    q_indices, k_indices = mask.q_indices_L, mask.k_indices_M
    if not isinstance(q_indices, np.ndarray) or not isinstance(k_indices, np.ndarray):
        return None
    spans = []
    for start in range(0, len(q_indices), size):
        own = Mask(q_indices[start : start + size], k_indices, causal=mask.causal, window=mask.window)
        seen = np.flatnonzero(own.allowed().any(axis=0))
        spans.append((int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 1))
    return tuple(spans)
