"""Head-major matrix products of attention with grouped key heads: head h of q uses ⌊h·G/H⌋ of k."""

import jax.numpy as jnp

from cope_jax.array_types import Array, accumulator_dtype


def content_logits(q_BHLK: Array, k_BGMK: Array, scale: float | None = None) -> Array:
    """Returns logits_BHLM = `scale` q·k in the accumulator type; by default `scale` is 1/√K."""
    q_BGRLK = group(q_BHLK, k_BGMK.shape[1])
    dtype = accumulator_dtype(q_BHLK.dtype)
    logits = jnp.einsum("BGRLK,BGMK->BGRLM", q_BGRLK, k_BGMK, preferred_element_type=dtype)
    return ungroup(logits) * (q_BHLK.shape[-1] ** -0.5 if scale is None else scale)


def weights_times_v(weights_BHLM: Array, v_BGMK: Array) -> Array:
    """Returns weighted sums of values, Σ_m weights v, `[B, H, L, K]`, in the accumulator type."""
    dtype = accumulator_dtype(v_BGMK.dtype)
    weights = group(weights_BHLM, v_BGMK.shape[1])
    return ungroup(jnp.einsum("BGRLM,BGMK->BGRLK", weights, v_BGMK, preferred_element_type=dtype))


def q_times_weights(q_BHLK: Array, weights_BHLM: Array, groups: int) -> Array:
    """Returns weighted sums of queries over all queries and heads of a group, `[B, G, K, M]`.

    The result has the accumulator type. Its last axis is the keys, so that the product needs no
    transposed copy of the weights. On a CPU this copy would take longer than the product.
    """
    dtype = accumulator_dtype(q_BHLK.dtype)
    q, weights = group(q_BHLK, groups), group(weights_BHLM, groups)
    return jnp.einsum("BGRLK,BGRLM->BGKM", q, weights, preferred_element_type=dtype)


def group(x: Array, groups: int) -> Array:
    """Reshapes [B, H, ...] to [B, G, R, ...], R = H/G: query head h belongs to key head ⌊h·G/H⌋."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def ungroup(x: Array) -> Array:
    """The inverse of `group`."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])
