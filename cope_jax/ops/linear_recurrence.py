"""Recurrences with a matrix as state, S_t = decay S_{t−1} + k_t v_tᵀ, by chunks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array, accumulator_dtype
from cope_jax.ops.triangular import inverse_of_unit_lower

CHUNK = 64  # tokens whose pairs are computed at once
VECTOR_CHUNK = 16  # with a decay for each channel, which needs an array of [chunk, chunk, K]


class State(NamedTuple):
    """State of a recurrence after some tokens: S_BHKV, and the segment of the last token, `[B]`."""

    matrix: Array
    segment: Array


def linear_recurrence(
    q_BLHK: Array,
    k_BLHK: Array,
    v_BLHV: Array,
    *,
    log_decay: Array | None = None,
    beta_BLH: Array | None = None,
    segment_ids_BL: Array | None = None,
    state: State | None = None,
) -> tuple[Array, State]:
    """Computes out_t = S_tᵀ q_t/√K, where each segment starts with S = 0.

        without beta:  S_t = e^{g_t} S_{t−1} + k_t v_tᵀ
        with beta:     S' = e^{g_t} S_{t−1},   S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ   (the delta rule)

    Linear attention (arXiv 2006.16236) has neither decay nor beta; gated linear attention (arXiv
    2312.06635) has a decay for each channel; DeltaNet (arXiv 2406.06484) has beta; gated DeltaNet
    (arXiv 2412.06464) has beta and one decay for each head; Kimi Delta Attention (arXiv 2510.26692)
    has beta and a decay for each channel. Chunks of tokens are computed by matrix products, and a
    scan over the chunks carries S, so memory is linear in the length; the backward pass computes
    each chunk again. Everything is in float32, products in full precision (float64 for float64
    inputs).

    Args:
      q_BLHK: queries.
      k_BLHK: keys.
      v_BLHV: values.
      log_decay: g ≤ 0, `[B, L, H, 1]` or `[B, L, H, K]`; None means 0.
      beta_BLH: β; None means no delta rule.
      segment_ids_BL: `[B, L]` or `[1, L]`; None means one segment.
      state: what the call for the previous tokens returned; None means that there are none.

    Returns:
      (out_BLHV, in the type of the values; the state after the last token).
    """
    (batch, length, heads, width), dtype = q_BLHK.shape, accumulator_dtype(q_BLHK.dtype)
    ids_BL = (
        jnp.zeros((1, 1), jnp.int32)
        if segment_ids_BL is None
        else jnp.asarray(segment_ids_BL, jnp.int32)
    )
    ids_BL = jnp.broadcast_to(ids_BL, (batch, length))
    if state is None:
        state = State(jnp.zeros((batch, heads, width, v_BLHV.shape[-1]), dtype), ids_BL[:, 0])
    decay = (
        jnp.zeros((batch, length, heads, 1), dtype)
        if log_decay is None
        else log_decay.astype(dtype)
    )
    size = min(length, VECTOR_CHUNK if decay.shape[-1] > 1 else CHUNK)
    padding = -length % size

    def chunks(x: Array, edge: bool = False) -> Array:
        """Cuts tokens into chunks `[chunks, B, size, ...]`; the last one is filled up."""
        x = jnp.pad(
            x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), mode="edge" if edge else "constant"
        )
        return jnp.moveaxis(x.reshape(batch, -1, size, *x.shape[2:]), 1, 0)

    arrays = [chunks(x.astype(dtype)) for x in (q_BLHK * width**-0.5, k_BLHK, v_BLHV)]
    beta = None if beta_BLH is None else chunks(beta_BLH.astype(dtype))
    # Accelerators would round products to bfloat16 or TF32.
    with jax.default_matmul_precision("highest"):
        (matrix, segment), out = jax.lax.scan(
            jax.checkpoint(_chunk), state, (*arrays, chunks(decay), beta, chunks(ids_BL, edge=True))
        )
    out_BLHV = jnp.moveaxis(out, 0, 1).reshape(batch, length + padding, heads, -1)[:, :length]
    return out_BLHV.astype(v_BLHV.dtype), State(matrix, segment)


def _chunk(state: State, chunk: tuple[Any, ...]) -> tuple[State, Array]:
    q, k, v, decay, beta, ids = chunk  # [B, C, H, ...], and ids [B, C]
    size, dtype = q.shape[1], q.dtype
    # Σ g from the first token of the chunk to each, itself included.
    passed = jnp.cumsum(decay, axis=1)
    # Tokens and the state act only within their segment, which is an unbroken run of tokens.
    first = ids[:, :1] == state.segment[:, None]
    runs = jnp.cumsum(
        jnp.concatenate([jnp.zeros_like(first), ids[:, 1:] != ids[:, :-1]], axis=1), axis=1
    )
    same = runs[:, :, None] == runs[:, None]
    from_state = (runs == 0) & first
    to_state = runs == runs[:, -1:]
    zero = jnp.zeros((), dtype)

    def where(mask: Array, x: Array) -> Array:
        return jnp.where(mask, x, zero)

    lower = jnp.tril(jnp.ones((size, size), bool))[None]
    # Σ g over the tokens after s up to t, summed for each pair: differences of sums would lose
    # digits to strong decays.
    later = jnp.tril(jnp.ones((size, size), bool), -1)[None, ..., None, None]
    between = jnp.exp(jnp.cumsum(where(later, decay[:, :, None]), axis=1))  # [B, t, s, H, 1 or K]

    def products(x: Array) -> Array:
        """x_t·(e^{Σ g} k_s), `[B, t, s, H]`."""
        if decay.shape[-1] == 1:
            return jnp.einsum("BTHK,BSHK->BTSH", x, k) * between[..., 0]
        return jnp.einsum("BTHK,BSHK,BTSHK->BTSH", x, k, between)

    weights = where((same & lower)[..., None], products(q))
    grown = jnp.exp(passed)
    into_q, into_k = (where(from_state[..., None, None], x * grown) for x in (q, k))
    if beta is not None:
        before = (same & lower & ~jnp.eye(size, dtype=bool)[None])[..., None]
        recalled = beta[:, :, None] * where(before, products(k))
        inverse = inverse_of_unit_lower(jnp.moveaxis(recalled, 3, 1))
        wanted = beta[..., None] * (v - jnp.einsum("BTHK,BHKV->BTHV", into_k, state.matrix))
        v = jnp.einsum("BHTS,BSHV->BTHV", inverse, wanted)
    out = jnp.einsum("BTSH,BSHV->BTHV", weights, v) + jnp.einsum(
        "BTHK,BHKV->BTHV", into_q, state.matrix
    )
    left = where(to_state[..., None, None], k * between[:, -1])
    kept = where(from_state[:, -1][:, None, None, None], grown[:, -1][..., None] * state.matrix)
    return State(kept + jnp.einsum("BTHK,BTHV->BHKV", left, v), ids[:, -1]), out
