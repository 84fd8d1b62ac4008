"""Attention that holds the whole matrix of pairs: the readable reference."""

import jax
import jax.numpy as jnp

from cope_jax.attention.inputs import Inputs
from cope_jax.encodings import Encoding
from cope_jax.ops.logits import content_logits
from cope_jax.typing import Array


def full_attention(encoding: Encoding, inputs: Inputs) -> Array:
    """Materialises all L·M pairs as one single block of keys.

    out_i = Σ_j a_ij v_j,  a_ij = softmax_j(score(q_i·k_j/√K)) over the pairs of the mask; 0 for a query without any
    key.

    Returns:
      out_BLHK, in the type of the values.
    """
    weights_BHLM = attention_weights(encoding, inputs)
    batch, heads, length, keys = weights_BHLM.shape
    if inputs.drop is not None:
        weights_BHLM = weights_BHLM * inputs.drop(inputs.mask.q_places_L, inputs.mask.k_places_M, weights_BHLM.dtype)
    groups = inputs.v.shape[2]
    weights_BGRLM = weights_BHLM.astype(inputs.v.dtype).reshape(batch, groups, heads // groups, length, keys)
    out_BLGRK = jnp.einsum("BGRLM,BMGK->BLGRK", weights_BGRLM, inputs.v)
    return out_BLGRK.reshape(batch, length, heads, inputs.v.shape[-1])


def attention_weights(encoding: Encoding, inputs: Inputs) -> Array:
    """The attention a_BHLM of each query over all keys, in float32 (float64 under float64 inputs)."""
    mask_B1LM = inputs.mask.dense()
    logits_BHLM, _ = encoding.score(
        inputs.q,
        inputs.rotated_k,
        inputs.features,
        content_logits(inputs.rotated_q, inputs.rotated_k),
        mask_B1LM,
        inputs.q_positions,
        inputs.k_positions,
        encoding.initial_carry(inputs.q),
    )
    return softmax_over(logits_BHLM, mask_B1LM)


def softmax_over(logits_BHLM: Array, mask_B1LM: Array) -> Array:
    """The softmax over the pairs of the mask; 0 for the others, and in a row without any."""
    # A finite stand-in for −∞, so that a row without any key has weights and gradients of 0 rather than NaN.
    lowest = jnp.asarray(jnp.finfo(logits_BHLM.dtype).min, logits_BHLM.dtype)
    weights_BHLM = jax.nn.softmax(jnp.where(mask_B1LM, logits_BHLM, lowest), axis=-1)
    return jnp.where(mask_B1LM, weights_BHLM, jnp.zeros((), weights_BHLM.dtype))
