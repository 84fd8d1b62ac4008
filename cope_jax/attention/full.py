"""Attention that stores the full matrix of pairs: the readable reference."""

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array
from cope_jax.attention.inputs import Inputs, head_major
from cope_jax.encodings import Encoding
from cope_jax.ops.grouped_matmul import group, ungroup


def full_attention(encoding: Encoding, inputs: Inputs) -> Array:
    """Computes attention with all L·M pairs in memory, as one block of keys.

    out_i = Σ_j a_ij v_j,  a_ij = softmax_j(score(q_i·k_j/√K)). The softmax is over the keys that the query may see, and
    over the sink if the encoding has one. A query without any key or sink gets 0.

    Returns:
      out_BLHK, in the type of the values.
    """
    weights_BHLM, sink_BHL = _weights(encoding, inputs)
    if inputs.drop is not None:
        mask = inputs.mask
        weights_BHLM = weights_BHLM * inputs.drop(mask.q_indices_L, mask.k_indices_M, weights_BHLM.dtype)
    return head_major(weigh(weights_BHLM, sink_BHL, inputs.v, inputs.q_v))


def attention_weights(encoding: Encoding, inputs: Inputs) -> Array:
    """Returns the attention weights a_BHLM of each query over all keys, in float32 (float64 for float64 inputs)."""
    return _weights(encoding, inputs)[0]


def _weights(encoding: Encoding, inputs: Inputs) -> tuple[Array, Array | None]:
    pairs = inputs.pairs()
    logits_BHLM, carry = encoding.score(pairs, encoding.initial_carry(inputs.q, inputs.q_features))
    return softmax_over(logits_BHLM, pairs.mask, encoding.sink(carry))


def softmax_over(logits_BHLM: Array, mask_B1LM: Array, sink_BHL: Array | None) -> tuple[Array, Array | None]:
    """Returns (the softmax over the pairs of the mask, the weight of the sink).

    All other pairs have weight 0. If there is no sink, its weight is None.
    """
    # A finite stand-in for −∞, so that a row without any key has weights and gradients of 0 rather than NaN.
    lowest, zero = jnp.asarray(jnp.finfo(logits_BHLM.dtype).min, logits_BHLM.dtype), jnp.zeros((), logits_BHLM.dtype)
    logits_BHLM = jnp.where(mask_B1LM, logits_BHLM, lowest)
    if sink_BHL is None:
        return jnp.where(mask_B1LM, jax.nn.softmax(logits_BHLM, axis=-1), zero), None
    weights = jax.nn.softmax(jnp.concatenate([logits_BHLM, sink_BHL[..., None]], axis=-1), axis=-1)
    return jnp.where(mask_B1LM, weights[..., :-1], zero), weights[..., -1]


def weigh(weights_BHLM: Array, sink_BHL: Array | None, v_BGMK: Array, q_v_BGLK: Array | None) -> Array:
    """Returns out_BHLK, Σ_m weights v plus the weighted value of the sink, in the type of the values."""
    groups, dtype = v_BGMK.shape[1], v_BGMK.dtype
    out_BGRLK = jnp.einsum("BGRLM,BGMK->BGRLK", group(weights_BHLM.astype(dtype), groups), v_BGMK)
    if sink_BHL is not None and q_v_BGLK is not None:
        out_BGRLK += group(sink_BHL.astype(dtype), groups)[..., None] * q_v_BGLK[:, :, None]
    return ungroup(out_BGRLK)
