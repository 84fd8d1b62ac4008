"""Linear interpolation between the integer entries of a row of numbers, with a fast gradient."""

import jax
import jax.numpy as jnp

from cope_jax.ops.take_rows import add_to_rows
from cope_jax.typing import Array


@jax.custom_vjp
def interpolate(z: Array, p: Array) -> Array:
    """Values of each row of `z` at the fractional places `p` of that row, y = (1 − w) z[⌊p⌋] + w z[⌈p⌉], w = p − ⌊p⌋.

    Golovneva et al. (arXiv 2405.18719), Eq 5 and 9. As in the paper's listing the gradient reaches `p` through w alone,
    so it is z[⌈p⌉] − z[⌊p⌋], which is 0 at integers. It is written by hand because the transpose of the gathers that
    autodiff makes takes five times as long on a CPU.

    Args:
      z: `[..., N]`, values at the integers 0 … N−1.
      p: `[..., M]` with the same leading axes, places within [0, N−1]; the caller clips.

    Returns:
      `[..., M]`.

    >>> interpolate(jnp.array([0.0, 10.0, 40.0]), jnp.array([0.0, 0.5, 1.75])).tolist()
    [0.0, 5.0, 32.5]
    """
    floor, ceil, w = _cells(p)
    low, high = _values(z, floor, ceil)
    return low + w * (high - low)


def _cells(p: Array) -> tuple[Array, Array, Array]:
    return jnp.floor(p).astype(jnp.int32), jnp.ceil(p).astype(jnp.int32), p - jnp.floor(p)


def _values(z: Array, floor: Array, ceil: Array) -> tuple[Array, Array]:
    return jnp.take_along_axis(z, floor, -1), jnp.take_along_axis(z, ceil, -1)


def _forward(z: Array, p: Array) -> tuple[Array, tuple[Array, Array]]:
    return interpolate(z, p), (z, p)


def _backward(residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    z, p = residuals
    floor, ceil, w = _cells(p)
    low, high = _values(z, floor, ceil)
    return add_to_rows(z.shape[-1], (floor, dy * (1 - w)), (ceil, dy * w)), dy * (high - low)


interpolate.defvjp(_forward, _backward)
