"""Sums along the last axis, from its start or to its end."""

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array

# Up to this length, a sum that blocks do not divide is one product: padding it would cost more in copies.
_ONE_PRODUCT = 128


def suffix_sum(x: Array, block: int = 32) -> Array:
    """Sums of the last axis from each index to its end, y[..., j] = Σ_{j'≥j} x[..., j'].

    Triangular matrix products in full precision, within blocks and over their totals: several times faster than a
    reversed `cumsum` on a CPU, and well suited to TPUs and GPUs.

    Args:
      x: `[..., M]`, a floating type; any M, 0 included.
      block: length of the inner sums if M is long.

    >>> suffix_sum(jnp.array([1.0, 2.0, 3.0])).tolist()
    [6.0, 5.0, 3.0]
    """
    return _sum(x, block, suffix=True)


def prefix_sum(x: Array, block: int = 32) -> Array:
    """Sums of the last axis from its start to each index, y[..., j] = Σ_{j'≤j} x[..., j'], computed as in `suffix_sum`.

    >>> prefix_sum(jnp.array([1.0, 2.0, 3.0])).tolist()
    [1.0, 3.0, 6.0]
    """
    return _sum(x, block, suffix=False)


def _sum(x: Array, block: int, suffix: bool) -> Array:
    *lead, m = x.shape
    if m <= block or (m <= _ONE_PRODUCT and m % block):
        return _triangular(x, suffix)
    blocks = -(-m // block)
    if m % block:
        x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, blocks * block - m)])
    inner = _triangular(x.reshape(*lead, blocks, block), suffix)
    totals = inner[..., 0 if suffix else -1]
    others = _sum(totals, block, suffix) - totals
    return (inner + others[..., None]).reshape(*lead, blocks * block)[..., :m]


def _triangular(x: Array, suffix: bool) -> Array:
    m = x.shape[-1]
    ones = jnp.ones((m, m), x.dtype)
    return jnp.matmul(x, jnp.tril(ones) if suffix else jnp.triu(ones), precision=jax.lax.Precision.HIGHEST)
