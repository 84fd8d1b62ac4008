"""Blockwise attention: blocks of queries visit blocks of keys, with memory linear in the length."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from cope_jax.array_types import Array, PyTree
from cope_jax.attention import derivative, streaming_gradient, streaming_softmax
from cope_jax.attention.blocks import BlockSizes, head_major
from cope_jax.attention.derivative import RESIDUALS, Passes
from cope_jax.attention.mask import Mask
from cope_jax.attention.request import Plan, Reason, Request
from cope_jax.attention.stream import Stream, add_cotangent, needs_one_block, stream_of
from cope_jax.attention.streaming_gradient import KeyGradients, QueryGradients, Residuals
from cope_jax.encodings import Encoding

# Measured on CPUs, see docs/attention.md: wider blocks spill out of the cache.
SIZES = BlockSizes(128, 128, 128)
# Up to ONE_BLOCK keys are one block. Blocks of up to SHORT_BLOCK queries then see different, known
# numbers of keys.
ONE_BLOCK, SHORT_BLOCK = 256, 48
# Each span of keys is compiled by itself: few blocks of queries have a span each, many share FEW.
MOST_SPANS, FEW_SPANS = 8, 4
# A number of blocks of queries, and the first key and the end of the keys that these queries see.
Span = tuple[int, int, int]
COUPLED = Reason("it splits the queries, but this encoding couples them", "choose 'full'")


def plan(encoding: Encoding, request: Request) -> Plan | Reason:
    """Returns the plan to run `blockwise_attention`, or the reason why it cannot run."""
    if not encoding.traits.splits_queries:
        return COUPLED
    return Plan("blockwise", lambda: blockwise_attention(encoding, request))


def choose_sizes(length: int, keys: int) -> BlockSizes:
    """Returns the default block sizes of `blockwise_attention` for `length` queries and `keys`
    keys.
    """
    if keys > ONE_BLOCK:
        return SIZES._replace(queries=64) if length <= 2048 else SIZES  # fewer masked pairs
    blocks = max(1, -(-length // SHORT_BLOCK))
    return BlockSizes(-(-length // blocks), keys, keys)


def blockwise_attention(encoding: Encoding, request: Request) -> Array:
    """Computes the result of `full_attention`, storing the pairs of one block of queries and one of
    keys at a time.

    Each block of queries visits blocks of keys from the nearest to the farthest, with an online
    softmax and the encoding's carry. The gradient is written by hand and recomputes the pairs. For
    each block of queries, attention skips the keys before the first and after the last key that
    causality, window, segments and the mask let any of these queries see. It also skips all farther
    keys once the encoding says that all rows are `done`.

    Memory is linear in the length. If the encoding does not split the keys, or its carry has a
    `state`, all keys are one block. Memory is then larger, but still linear. If the request has no
    `blocks`, `choose_sizes` chooses them.

    Returns:
      out_BLHK, in the type of the values.
    """
    length, keys = request.length, len(request.keys.indices)
    if 0 in (length, keys):
        return request.zeros()
    sizes = (request.blocks or choose_sizes(length, keys)).within(length, keys)
    if needs_one_block(encoding, request):
        sizes = sizes._replace(near=keys)
    padding = -length % sizes.queries
    stream = stream_of(encoding, request, sizes, one_block=sizes.near == keys, padding=padding)
    spans = static_spans(request.mask, sizes.queries) if stream.one_block else None
    return head_major(derivative.attend(passes(spans or ()), stream)[:, :, :length])


def passes(spans: tuple[Span, ...] = ()) -> Passes:
    """Returns the passes over a stream; if it has no `spans`, all queries share one."""
    return Passes(functools.partial(_forward, spans), functools.partial(_backward, spans))


def _forward(
    spans: tuple[Span, ...], stream: Stream, gradient: bool
) -> tuple[Array, Array, tuple[Array, ...]]:
    def of_strip(stream: Stream, number: Array) -> Any:
        strip = stream.query_block(number)
        state = streaming_softmax.start(strip, gradient)
        return streaming_softmax.finish(strip, streaming_softmax.accumulate(strip, state))

    result = _concatenate(
        [
            _join(jax.lax.map(functools.partial(of_strip, narrow), numbers))
            for numbers, narrow, _ in _parts(spans, stream)
        ]
    )
    return checkpoint_name(result, RESIDUALS)


def _backward(spans: tuple[Span, ...], kept: Any, dout_BHLK: Array) -> Any:
    stream, *result = kept
    residuals = Residuals.of(dout_BHLK, *result)

    def of_strip(stream: Stream, gathered: tuple[PyTree, KeyGradients], number: Array) -> Any:
        dparams, dkeys = gathered
        strip, residuals_of_strip = (
            stream.query_block(number),
            residuals.block(number, stream.sizes.queries),
        )
        state = streaming_gradient.start(strip, residuals_of_strip, dkeys)
        state = streaming_gradient.backward(strip, residuals_of_strip, state)
        more, dqueries = streaming_gradient.finish(strip, residuals_of_strip, state)
        return (jax.tree.map(add_cotangent, dparams, more), state.keys), dqueries

    dparams, dkeys = jax.tree.map(jnp.zeros_like, stream.params), KeyGradients.zeros(stream.keys)
    blocks = []
    for numbers, narrow, (_, first, end) in _parts(spans, stream):
        (dparams, dkey), stacked = jax.lax.scan(
            functools.partial(of_strip, narrow),
            (dparams, KeyGradients.zeros(narrow.keys)),
            numbers,
        )
        dkeys = dkeys.add(end, dkey.k, dkey.v, dkey.features) if len(spans) > 1 else dkey
        blocks.append(_join(stacked).among(first, len(stream.keys.indices)))
    dqueries: QueryGradients = _concatenate(blocks)
    cotangents = dqueries.of(stream.queries), dkeys.of(stream.keys, dqueries.bias)
    return streaming_gradient.of(stream, dparams, *cotangents)


def _parts(spans: tuple[Span, ...], stream: Stream) -> Iterator[tuple[Array, Stream, Span]]:
    """Yields for each span (the numbers of its blocks of queries, a stream with its keys only, the
    span).
    """
    start, blocks = 0, stream.queries.q.shape[2] // stream.sizes.queries
    for span in spans or ((blocks, 0, len(stream.keys.indices)),):
        blocks, first, end = span
        narrow = stream
        if len(spans) > 1:
            sizes = stream.sizes._replace(near=end - first)
            narrow = dataclasses.replace(
                stream.part(stream.queries, stream.keys.range(first, end)), sizes=sizes
            )
        yield jnp.arange(start, start + blocks, dtype=jnp.int32), narrow, span
        start += blocks


def _join(stacked: Any) -> Any:
    """Reshapes arrays [blocks, B, H, L, ...] to [B, H, blocks·L, ...]."""

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])

    return jax.tree.map(join, stacked)


def _concatenate(blocks: list[Any]) -> Any:
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=2), *blocks)


def static_spans(mask: Mask, size: int) -> tuple[Span, ...] | None:
    """Returns the spans of keys that causality and window let the blocks of `size` queries see.

    Consecutive blocks share a span if there are more than `MOST_SPANS`. The result is None if the
    indices are unknown while tracing.
    """
    q_indices, k_indices = mask.q_indices_L, mask.k_indices_M
    if not isinstance(q_indices, np.ndarray) or not isinstance(k_indices, np.ndarray):
        return None
    blocks = -(-len(q_indices) // size)
    together = 1 if blocks <= MOST_SPANS else -(-blocks // FEW_SPANS)
    spans = []
    for start in range(0, blocks, together):
        end = min(start + together, blocks)
        rule = Mask(
            q_indices[start * size : end * size],
            k_indices,
            causal=mask.causal,
            window=mask.window,
        )
        seen = np.flatnonzero(rule.allowed().any(axis=0))
        keys = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 1)
        spans.append((end - start, *keys))
    return tuple(spans)
