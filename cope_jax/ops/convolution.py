"""Short convolutions over the tokens of a sequence."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cope_jax.array_types import Array

# The inputs of the last tokens, [B, W−1, C], and their segments, [B, W−1].
Window = tuple[Array, Array]


def causal_convolution(
    x_BMC: Array,
    kernel_WC: Array,
    segment_ids_BM: Array | None = None,
    before: Window | None = None,
) -> tuple[Array, Window]:
    """Convolves channels over W tokens, y_t = Σ_w kernel[w] x[t − W + 1 + w], within segments.

    Args:
      x_BMC: the inputs, `[B, M, C]`.
      kernel_WC: the weights; the last row is that of the token itself.
      segment_ids_BM: `[B, M]` or `[1, M]`; None means one segment.
      before: what the call for the previous tokens returned as the window. None means that there
        are none.

    Returns:
      (y_BMC, the window after the last token).

    >>> x = jnp.array([[[1.0], [2.0], [4.0]]])
    >>> causal_convolution(x, jnp.array([[10.0], [1.0]]))[0][0, :, 0].tolist()
    [1.0, 12.0, 24.0]
    """
    (batch, length, channels), lags = x_BMC.shape, len(kernel_WC) - 1
    ids_BM = (
        jnp.zeros((batch, length), jnp.int32)
        if segment_ids_BM is None
        else jnp.asarray(segment_ids_BM)
    )
    ids_BM = jnp.broadcast_to(ids_BM, (batch, length)).astype(jnp.int32)
    if before is None:
        before = (
            jnp.zeros((batch, lags, channels), x_BMC.dtype),
            jnp.zeros((batch, lags), jnp.int32),
        )
    whole = jnp.concatenate([before[0].astype(x_BMC.dtype), x_BMC], axis=1)
    ids = jnp.concatenate([before[1], ids_BM], axis=1)
    y_BMC = _weighted(whole[:, lags:], kernel_WC[-1:])
    same_BM = jnp.ones((batch, length), bool)
    for lag in range(1, lags + 1):
        start = lags - lag
        same_BM = same_BM & (
            ids[:, start : start + length] == ids[:, start + 1 : start + 1 + length]
        )
        x_of_lag = jnp.where(
            same_BM[..., None], whole[:, start : start + length], jnp.zeros((), x_BMC.dtype)
        )
        y_BMC = y_BMC + _weighted(x_of_lag, kernel_WC[start : start + 1])
    return y_BMC, (whole[:, length:], ids[:, length:])


@jax.custom_jvp
def _weighted(x_BMC: Array, weights_1C: Array) -> Array:
    return x_BMC * weights_1C[None]


@_weighted.defjvp
def _weighted_tangent(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> Any:
    (x_BMC, weights_1C), (dx_BMC, dweights_1C) = primals, tangents
    dweights = lax.platform_dependent(
        dweights_1C,
        cpu=lambda dweights_1C: _copied(dweights_1C, x_BMC.shape),
        default=lambda dweights_1C: jnp.broadcast_to(dweights_1C[None], x_BMC.shape),
    )
    return _weighted(x_BMC, weights_1C), dx_BMC * weights_1C[None] + x_BMC * dweights


def _copied(weights_1C: Array, shape: tuple[int, ...]) -> Array:
    """Copies weights to all tokens by a product of matrices, whose gradient is one too: for a long
    sequence XLA for CPUs takes several times as long for a sum over tokens of products.
    """
    batch, length, channels = shape
    tokens_BM1 = jnp.ones((batch, length, 1), weights_1C.dtype)
    weights_B1C = jnp.broadcast_to(weights_1C[None], (batch, 1, channels))
    return jnp.matmul(tokens_BM1, weights_B1C, precision="highest")
