"""Linear interpolation between the integer entries of a row of numbers, with a fast gradient."""

import functools

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
    return _interpolate(z, p)[0]


def interpolation_slope(z: Array, p: Array) -> Array:
    """The derivative of `interpolate` by p as its gradient has it: z[⌈p⌉] − z[⌊p⌋], 0 at integers.

    >>> interpolation_slope(jnp.array([0.0, 10.0, 40.0]), jnp.array([0.5, 1.0, 1.75])).tolist()
    [10.0, 0.0, 30.0]
    """
    return _interpolate(z, p)[1]


def _interpolate(z: Array, p: Array) -> tuple[Array, Array]:
    take = functools.partial(jnp.take_along_axis, z, axis=-1, mode="promise_in_bounds")
    floor, ceil, w = _cells(p)
    low = take(floor)
    # XLA would gather anew for each of the slope's readers.
    slope = jax.lax.optimization_barrier(take(ceil) - low)
    return low + w * slope, slope


def _cells(p: Array) -> tuple[Array, Array, Array]:
    return jnp.floor(p).astype(jnp.int32), jnp.ceil(p).astype(jnp.int32), p - jnp.floor(p)


def _forward(z: Array, p: Array) -> tuple[Array, tuple[int, Array, Array]]:
    y, slope = _interpolate(z, p)
    return y, (z.shape[-1], p, slope)


def _backward(residuals: tuple[int, Array, Array], dy: Array) -> tuple[Array, Array]:
    size, p, slope = residuals
    floor, ceil, w = _cells(p)
    return add_to_rows(size, (floor, dy * (1 - w)), (ceil, dy * w)), dy * slope


interpolate.defvjp(_forward, _backward)
