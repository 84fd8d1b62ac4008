"""Linear interpolation between the entries of a row, with a fast gradient."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from cope_jax.array_types import Array
from cope_jax.ops import tile
from cope_jax.ops.gather import take_windows


def table_logits(q_BHLK: Array, table_NK: Array) -> Array:
    """Returns products of queries with rows of a table, z_i[n] = q_i·e[n], z_BHLN.

    >>> table_logits(jnp.ones((1, 1, 1, 2)), jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[[[3.0, 7.0]]]]
    """
    # Without the barrier, XLA gathers from a transposed z, which is slow.
    return jax.lax.optimization_barrier(jnp.einsum("BHLK,NK->BHLN", q_BHLK, table_NK))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def interpolate(z: Array, p: Array, descending: bool = False, first: ArrayLike = 0) -> Array:
    """Interpolates rows of `z` at fractional `p`, y = (1 − w) z[⌊p⌋] + w z[⌈p⌉], w = p − ⌊p⌋.

    Golovneva et al. (arXiv 2405.18719), Eq 5 and 9. As in the paper's listing, the gradient reaches
    `p` only through w: dy/dp is z[⌈p⌉] − z[⌊p⌋], which is 0 at integers. The derivatives are
    written by hand, because on a CPU autodiff's transpose of the two gathers takes five times as
    long.

    TPUs gather single numbers slowly. On TPUs, y is therefore a sum over the entire row: Σ_n z[n]
    max(0, 1 − |p − n|).

    Args:
      z: `[..., N]`, values at the integers 0 … N−1.
      p: `[..., M]` with the leading axes of `z`. The caller must clip `p` to [0, N−1].
      descending: whether p nowhere ascends along its last axis. Kernels then compute the gradient
        of z faster.
      first: int32, the entry of z that p = 0 reads, for a row of several tables; it broadcasts to
        the shape of p. Kernels have no form for it.

    Returns:
      `[..., M]`.

    >>> interpolate(jnp.array([0.0, 10.0, 40.0]), jnp.array([0.0, 0.5, 1.75])).tolist()
    [0.0, 5.0, 32.5]
    """
    return _interpolate(z, p, descending, first)[0]


def _interpolate(z: Array, p: Array, descending: bool, first: ArrayLike) -> tuple[Array, Array]:
    if tile.is_tracing():
        y, slope = tile.look_up_p.bind(z, p, descending=descending)
        return y, slope
    first = jnp.asarray(first, jnp.int32)
    return jax.lax.platform_dependent(z, p, first, tpu=_sum_over_row, default=_look_up)


def _look_up(z: Array, p: Array, first: ArrayLike = 0) -> tuple[Array, Array]:
    take = functools.partial(jnp.take_along_axis, z, axis=-1, mode="promise_in_bounds")
    floor, ceil, w = _cells(p)
    floor, ceil = floor + first, ceil + first
    low = take(floor)
    # Without the barrier, XLA would gather again for each use of the slope.
    slope = jax.lax.optimization_barrier(take(ceil) - low)
    return low + w * slope, slope


def _sum_over_row(z: Array, p: Array, first: ArrayLike = 0) -> tuple[Array, Array]:
    # The distances of all indices to all entries are fused into the sums, and never stored.
    d = _distances(p, z.shape[-1], first)
    sign = jnp.where((d > -1) & (d < 0), 1, 0) - jnp.where((d > 0) & (d < 1), 1, 0)
    return jnp.sum(z[..., None] * _hat(d), axis=-2), jnp.sum(
        z[..., None] * sign.astype(z.dtype), axis=-2
    )


def _distances(p: Array, size: int, first: ArrayLike) -> Array:
    entries = jnp.arange(size, dtype=jnp.int32)[(None,) * (p.ndim - 1) + (slice(None), None)]
    starts = jnp.broadcast_to(jnp.asarray(first, jnp.int32), p.shape)
    return p[..., None, :] - (entries - starts[..., None, :]).astype(p.dtype)


def _hat(d: Array) -> Array:
    return jnp.maximum(jnp.zeros((), d.dtype), 1 - jnp.abs(d))


def _cells(p: Array) -> tuple[Array, Array, Array]:
    return jnp.floor(p).astype(jnp.int32), jnp.ceil(p).astype(jnp.int32), p - jnp.floor(p)


def _spread(p: Array, dz: Array, descending: bool, first: ArrayLike) -> Array:
    """The part of the derivative that is linear in dz; its transpose is the gradient of z."""

    def look_up(p: Array, dz: Array, first: Array) -> Array:
        # Both entries are read as one window, because the transpose of this is one scatter-add.
        size = min(2, dz.shape[-1])
        offset = first.astype(p.dtype)
        start = jnp.minimum(jnp.floor(p) + offset, dz.shape[-1] - size)
        w = p - (start - offset)
        window = take_windows(dz, start.astype(jnp.int32), size)
        at_start = (1 - w) * window[..., 0]
        return at_start + w * window[..., 1] if size == 2 else at_start

    def sum_over_row(p: Array, dz: Array, first: Array) -> Array:
        return jnp.sum(dz[..., None] * _hat(_distances(p, dz.shape[-1], first)), axis=-2)

    if tile.is_tracing():
        spread: Array = tile.spread_p.bind(p, dz, descending=descending)
        return spread
    first = jnp.asarray(first, jnp.int32)
    return jax.lax.platform_dependent(p, dz, first, tpu=sum_over_row, default=look_up)


@functools.partial(interpolate.defjvp, symbolic_zeros=True)
def _derivative(
    descending: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Array, Array]:
    (z, p, first), (dz, dp, _) = primals, tangents
    y, slope = _interpolate(z, p, descending, first)
    # A tangent that is known to be 0 costs nothing: streaming attention asks only for the slope.
    if isinstance(dz, SymbolicZero):
        return y, slope * dp
    along_z = _spread(p, dz, descending, first)
    return y, along_z if isinstance(dp, SymbolicZero) else along_z + slope * dp
