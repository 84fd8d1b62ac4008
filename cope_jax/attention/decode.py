"""Attention over a cache of the keys and values of earlier tokens, for generation token by token.

>>> import jax
>>> from flax import nnx
>>> from cope_jax import encodings
>>> from cope_jax.attention import create_cache
>>> encoding = encodings.create("cope", num_heads=2, head_dim=8, rngs=nnx.Rngs(0))
>>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 8))
>>> @jax.jit
... def step(cache, q, k, v):
...     cache = cache.enter(cache.filled[None, None]).append(q, k, v, encoding=encoding)
...     return cache, attend_cached(q, cache, encoding=encoding)
>>> cache = create_cache(encoding, batch=1, capacity=8)
>>> for now in range(5):
...     cache, out = step(cache, *(x[:, now : now + 1] for x in (q, k, v)))
>>> out.shape  # the last row of `attend` over all five tokens
(1, 1, 2, 8)
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array
from cope_jax.attention.blocks import KeyBlock, QueryBlock, head_major
from cope_jax.attention.cache import Cache, checked_layer_of
from cope_jax.attention.cache_entries import check_heads, check_queries, out_of_range
from cope_jax.attention.checks import (
    check_embedded,
    check_is_encoding,
    checked_logits,
    checked_window,
    rotated,
    sink_of,
    turned,
)
from cope_jax.attention.full import softmax_over, weigh
from cope_jax.attention.request import Request
from cope_jax.attention.streaming_softmax import all_rows
from cope_jax.encodings import Carry, Encoding, Pairs
from cope_jax.errors import ConfigError

# Slots that are scored together. With gates of about ½, CoPE with the paper's table of 64 saturates
# in one block.
BLOCK = 256


def attend_cached(
    q_BLHK: Array,
    cache: Cache,
    *,
    encoding: Encoding,
    embedded: bool = False,
    layer: int | Array | None = None,
    window: int | None = None,
    bias: Any = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
) -> Array:
    """Computes causal attention from the L tokens that were entered last to all tokens in the
    cache.

    The result is the last L rows of `cope_jax.attention.attend` over all tokens in the cache. An
    encoding with `saturated` or `done` has no reverse-mode gradient here, because the loop over
    keys then has no fixed length. To train, use `attend`.

    Args:
      q_BLHK: queries before rotation. The keys of the same tokens must be in the cache.
      cache: the cached keys, values and features.
      encoding: the position encoding.
      embedded: see `attend`.
      layer: index of the layer, from 0 to N−1, or None if the cache is for one layer.
      window: hide the keys that are `window` or more indices away from the query. If None, there is
        no window.
      bias: see `attend`; the last axis has an entry for each slot of the cache, `[B, H, L, C]`.
      scale: see `attend`.
      logits_soft_cap: see `attend`.

    Returns:
      out_BLHK, in the type of the values. It is NaN if more tokens were entered than there are
      slots, or if a layer that JAX traces is out of range.

    Raises:
      ConfigError: the queries, the encoding or the layer do not fit the cache, the encoding couples
        the queries, or the cache has fewer tokens than there are queries.
    """
    check_is_encoding(encoding)
    check_embedded(encoding, embedded)
    layer = checked_layer_of(cache, encoding, layer)
    if not encoding.traits.splits_queries:
        raise ConfigError(
            "decoding with a cache splits the queries, but this encoding couples them: call attend with the complete "
            "sequence"
        )
    check_heads(queries=q_BLHK)
    length = q_BLHK.shape[1]
    check_queries(q_BLHK, encoding, len(cache.positions_BC), length)
    shape = len(q_BLHK), q_BLHK.shape[2], length, cache.capacity
    bias, scale, cap = checked_logits(encoding, bias, scale, logits_soft_cap, shape)
    positions_BL, segment_ids_BL = cache.latest(length)
    keys, newest = cache.entries_of(encoding, layer, length)
    features = jax.tree.map(head_major, newest.features)
    rotated_BLHK = rotated(encoding, q_BLHK, features, positions_BL)
    indices_C = jnp.arange(cache.capacity, dtype=jnp.int32)
    indices_L = cache.filled - length + jnp.arange(length, dtype=jnp.int32)
    queries = QueryBlock(
        q=head_major(q_BLHK),
        rotated_q=None if rotated_BLHK is None else head_major(rotated_BLHK),
        v=newest.v if encoding.traits.sink_value == "own" else None,
        features=newest.features,
        positions=positions_BL,
        indices=indices_L,
        segment_ids=segment_ids_BL,
    )
    slots = KeyBlock(
        k=keys.k,
        v=keys.v,
        features=keys.features,
        positions=cache.positions_BC,
        indices=indices_C,
        segment_ids=cache.segment_ids_BC,
        bias=bias,
    )
    request = Request(
        queries,
        slots,
        window=checked_window(window),
        scale=scale,
        soft_cap=cap,
        by_head=True,
    )
    pairs = request.pairs()
    logits_BHLC, carry = _cached_logits(encoding, pairs, jnp.minimum(cache.filled, cache.capacity))
    weights_BHLC, sink_BHL = softmax_over(
        logits_BHLC, pairs.mask, sink_of(encoding, carry, logits_BHLC.shape[:-1])
    )
    out_BLHK = head_major(weigh(weights_BHLC, sink_BHL, slots.v, queries.v))
    out_BLHK = turned(encoding, "rotate_back", out_BLHK, features, positions_BL)
    missing = out_of_range(layer, cache.num_layers)
    return out_BLHK if missing is False else jnp.where(missing, jnp.nan, out_BLHK)


def _cached_logits(encoding: Encoding, pairs: Pairs, filled: Array) -> tuple[Array, Carry]:
    """Returns (logits_BHLC over all slots, the carry after the last scored block).

    For an encoding that saturates, this function first scores all slots as if all rows were
    saturated. Then it scores blocks again, from the nearest to the farthest, until all rows are
    saturated or all are done. So CoPE sums the gates of a few hundred keys instead of all C keys.
    """
    carry, capacity = encoding.initial_carry(pairs.q, pairs.q_features), pairs.k.shape[2]
    size = min(BLOCK, capacity)
    saturates = encoding.saturated(carry) is not None
    if not saturates and encoding.done(carry) is None:
        return encoding.checked_score(pairs, carry)

    def more(loop: tuple[Array, Array, Carry]) -> Array:
        end, _, carry = loop
        return (end > 0) & ~all_rows(encoding.saturated(carry)) & ~all_rows(encoding.done(carry))

    def score(loop: tuple[Array, Array, Carry]) -> tuple[Array, Array, Carry]:
        end, logits_BHLC, carry = loop
        start = jnp.maximum(end - size, 0)

        def cut(x: Any, axis: int) -> Any:
            return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis), x)

        fresh_111M = (start + jnp.arange(size, dtype=jnp.int32) < end)[None, None, None]
        block = dataclasses.replace(
            pairs,
            k=cut(pairs.k, 2),
            v=cut(pairs.v, 2),
            k_features=cut(pairs.k_features, 2),
            logits=cut(pairs.logits, 3),
            mask=cut(pairs.mask, 3) & fresh_111M,
            k_positions=cut(pairs.k_positions, 1),
        )
        scored_BHLM, carry = encoding.checked_score(block, carry)
        scored_BHLM = jnp.where(fresh_111M, scored_BHLM, cut(logits_BHLC, 3))
        return (
            start,
            jax.lax.dynamic_update_slice_in_dim(logits_BHLC, scored_BHLM, start, axis=3),
            carry,
        )

    lowest = jnp.finfo(pairs.logits.dtype).min
    far_BHLC = encoding.tail(pairs, carry) if saturates else jnp.full_like(pairs.logits, lowest)
    _, logits_BHLC, carry = jax.lax.while_loop(more, score, (filled, far_BHLC, carry))
    return logits_BHLC, carry
