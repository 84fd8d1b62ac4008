"""Scaled products of queries and keys, with grouped key heads."""

import jax.numpy as jnp

from cope_jax.typing import Array, accumulator_dtype


def content_logits(q_BLHK: Array, k_BMGK: Array) -> Array:
    """q·k/√K for every pair, in the accumulator type (float32, or float64 under float64 inputs).

    Query head h meets key head ⌊h·G/H⌋.

    Returns:
      logits_BHLM.
    """
    batch, length, heads, width = q_BLHK.shape
    groups = k_BMGK.shape[2]
    q_BLGRK = q_BLHK.reshape(batch, length, groups, heads // groups, width)
    dtype = accumulator_dtype(q_BLHK.dtype)
    logits = jnp.einsum("BLGRK,BMGK->BGRLM", q_BLGRK, k_BMGK, preferred_element_type=dtype)
    return logits.reshape(batch, heads, length, k_BMGK.shape[1]) / width**0.5
