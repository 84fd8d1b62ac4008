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

    A TPU, slow with single numbers, sums over the whole row instead: y = Σ_n z[n] max(0, 1 − |p − n|).

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
    return jax.lax.platform_dependent(z, p, tpu=_sum_over_row, default=_look_up)


def _look_up(z: Array, p: Array) -> tuple[Array, Array]:
    take = functools.partial(jnp.take_along_axis, z, axis=-1, mode="promise_in_bounds")
    floor, ceil, w = _cells(p)
    low = take(floor)
    # XLA would gather anew for each of the slope's readers.
    slope = jax.lax.optimization_barrier(take(ceil) - low)
    return low + w * slope, slope


def _sum_over_row(z: Array, p: Array) -> tuple[Array, Array]:
    # Fused into the sums: the distances of all places to all entries are never held.
    d = _distances(p, z.shape[-1])
    sign = jnp.where((d > -1) & (d < 0), 1, 0) - jnp.where((d > 0) & (d < 1), 1, 0)
    return jnp.sum(z[..., None] * _hat(d), axis=-2), jnp.sum(z[..., None] * sign.astype(z.dtype), axis=-2)


def _distances(p: Array, size: int) -> Array:
    return p[..., None, :] - jnp.arange(size, dtype=p.dtype)[(None,) * (p.ndim - 1) + (slice(None), None)]


def _hat(d: Array) -> Array:
    return jnp.maximum(jnp.zeros((), d.dtype), 1 - jnp.abs(d))


def _cells(p: Array) -> tuple[Array, Array, Array]:
    return jnp.floor(p).astype(jnp.int32), jnp.ceil(p).astype(jnp.int32), p - jnp.floor(p)


def _forward(z: Array, p: Array) -> tuple[Array, tuple[int, Array, Array]]:
    y, slope = _interpolate(z, p)
    return y, (z.shape[-1], p, slope)


def _backward(residuals: tuple[int, Array, Array], dy: Array) -> tuple[Array, Array]:
    size, p, slope = residuals

    def add_up(p: Array, dy: Array) -> Array:
        floor, ceil, w = _cells(p)
        return add_to_rows(size, (floor, dy * (1 - w)), (ceil, dy * w))

    def sum_over_places(p: Array, dy: Array) -> Array:
        return jnp.sum(dy[..., None, :] * _hat(_distances(p, size)), axis=-1)

    return jax.lax.platform_dependent(p, dy, tpu=sum_over_places, default=add_up), dy * slope


interpolate.defvjp(_forward, _backward)
