"""Attention that stores the full matrix of pairs: the readable reference."""

from typing import Any

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array
from cope_jax.attention.blocks import head_major
from cope_jax.attention.checks import sink_of
from cope_jax.attention.request import Plan, Request, prepare
from cope_jax.encodings import Encoding
from cope_jax.ops.grouped_matmul import group, ungroup


def plan(encoding: Encoding, request: Request) -> Plan:
    """Returns the plan to run `full_attention`, which runs every request."""
    if not request.keys.v.shape[1] and encoding.traits.splits_queries:
        return Plan("full", request.zeros)  # the hooks of encodings may need a key
    return Plan("full", lambda: full_attention(encoding, request))


def full_attention(encoding: Encoding, request: Request) -> Array:
    """Computes attention with all L·M pairs in memory, as one block of keys.

    out_i = Σ_j a_ij v_j,  a_ij = softmax_j(score(q_i·k_j/√K)). The softmax is over the keys that
    the query may see, and over the sink if the encoding has one. A query without any key or sink
    gets 0.

    Returns:
      out_BLHK, in the type of the values.
    """
    request = request.head_major()
    weights_BHLM, sink_BHL = weights_of(encoding, request)
    queries, keys = request.queries, request.keys
    if request.drop is not None:
        weights_BHLM = weights_BHLM * request.drop(
            queries.indices, keys.indices, weights_BHLM.dtype
        )
    return head_major(weigh(weights_BHLM, sink_BHL, keys.v, queries.v))


def attention_weights(
    q_BLHK: Array, k_BMGK: Array, v_BMGK: Array, *, encoding: Encoding, **arguments: Any
) -> Array:
    """Returns the weights a_BHLM that `attend` gives to the keys, before dropout; the arguments are
    those of `attend`.

    The weights are float32 (float64 for float64 inputs). A row sums to 1 without the weight of a
    sink, and is 0 if the query sees no key. All L·M pairs are in memory.

    >>> import jax
    >>> from flax import nnx
    >>> from cope_jax import encodings
    >>> encoding = encodings.create("alibi", num_heads=2, head_dim=8, rngs=nnx.Rngs(0))
    >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 5, 2, 8))
    >>> attention_weights(q, k, v, encoding=encoding).sum(axis=-1).round(4).min().item()
    1.0
    """
    return weights_of(encoding, prepare(q_BLHK, k_BMGK, v_BMGK, encoding=encoding, **arguments))[0]


def weights_of(encoding: Encoding, request: Request) -> tuple[Array, Array | None]:
    """Returns (the weights a_BHLM, the weight of the sink or None)."""
    pairs = request.pairs()
    if not pairs.k.shape[2]:
        return jnp.zeros_like(pairs.logits), None
    logits_BHLM, carry = encoding.checked_score(
        pairs, encoding.checked_carry(pairs.q, pairs.q_features)
    )
    return softmax_over(logits_BHLM, pairs.mask, sink_of(encoding, carry, logits_BHLM.shape[:-1]))


def softmax_over(
    logits_BHLM: Array, mask_B1LM: Array, sink_BHL: Array | None
) -> tuple[Array, Array | None]:
    """Returns (the softmax over the pairs of the mask, the weight of the sink).

    All other pairs have weight 0, and so have those with a logit of −∞, or of the lowest number. If
    there is no sink, its weight is None.
    """
    # A finite stand-in for −∞, so that a row without any key has weights and gradients of 0 rather
    # than NaN.
    lowest, zero = (
        jnp.asarray(jnp.finfo(logits_BHLM.dtype).min, logits_BHLM.dtype),
        jnp.zeros((), logits_BHLM.dtype),
    )
    seen_BHLM = mask_B1LM & ~(logits_BHLM <= lowest)  # NaN stays
    logits_BHLM = jnp.where(seen_BHLM, logits_BHLM, lowest)
    if sink_BHL is None:
        return jnp.where(seen_BHLM, jax.nn.softmax(logits_BHLM, axis=-1), zero), None
    weights = jax.nn.softmax(jnp.concatenate([logits_BHLM, sink_BHL[..., None]], axis=-1), axis=-1)
    return jnp.where(seen_BHLM, weights[..., :-1], zero), weights[..., -1]


def weigh(
    weights_BHLM: Array, sink_BHL: Array | None, v_BGMK: Array, q_v_BGLK: Array | None
) -> Array:
    """Returns out_BHLK, Σ_m weights v plus the weighted value of the sink, in the type of the
    values.
    """
    groups, dtype = v_BGMK.shape[1], v_BGMK.dtype
    out_BGRLK = jnp.einsum("BGRLM,BGMK->BGRLK", group(weights_BHLM.astype(dtype), groups), v_BGMK)
    if sink_BHL is not None and q_v_BGLK is not None:
        out_BGRLK += group(sink_BHL.astype(dtype), groups)[..., None] * q_v_BGLK[:, :, None]
    return ungroup(out_BGRLK)
