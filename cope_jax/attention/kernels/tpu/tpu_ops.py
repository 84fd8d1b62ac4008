"""Forms of the operations of `cope_jax.ops` that a TPU runs on one tile: matrix products, gathers
within registers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array
from cope_jax.attention.kernels.tile.tile_values import NotATile
from cope_jax.ops import tile

LANES = 128  # a register has 128 columns; one instruction gathers within them
MOST_COLUMNS = 1024  # of a table; beyond, gathers from all its registers take too long


def running_sum(x: Array, *, suffix: bool) -> Array:
    """Sums along the columns: a product with a triangle of ones.

    The matrix unit multiplies bfloat16. Ones are exact, and x is the sum of three bfloat16 arrays,
    so three products give a float32 result; `Precision.HIGHEST` would take six.
    """
    size = x.shape[1]
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    triangle = (row >= column if suffix else row <= column).astype(jnp.float32)
    if x.dtype == jnp.float64:  # only where kernels are interpreted
        return jnp.dot(x, triangle.astype(x.dtype))
    triangle = triangle.astype(jnp.bfloat16)
    high = x.astype(jnp.bfloat16)
    rest = x - high.astype(x.dtype)
    middle = rest.astype(jnp.bfloat16)
    low = (rest - middle.astype(x.dtype)).astype(jnp.bfloat16)
    high, middle, low = (
        jnp.dot(term, triangle, preferred_element_type=jnp.float32) for term in (high, middle, low)
    )
    return high + (middle + low)


def look_up(z: Array, p: Array, *, descending: bool) -> tuple[Array, Array]:
    """The interpolated entries of z at p, and their slopes by p."""
    del descending
    size = z.shape[1]
    column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
    steps = jnp.where(column < size - 1, jnp.roll(z, -1, axis=1) - z, 0.0)
    floor = jnp.floor(p)
    indices, w = floor.astype(jnp.int32), p - floor
    slope = take_rows(indices, steps)
    return take_rows(indices, z) + w * slope, jnp.where(w > 0, slope, 0.0)


def take_rows(indices: Array, z: Array) -> Array:
    """y[l, m] = z[l, indices[l, m]], by gathers within registers."""
    size = z.shape[1]
    if size > MOST_COLUMNS and size > indices.shape[1]:
        raise NotATile(f"a table has {size} columns, more than {MOST_COLUMNS}")
    z = _padded(z, -size % LANES)
    parts = []
    for first in range(0, indices.shape[1], LANES):
        index = indices[:, first : first + LANES]
        missing = LANES - index.shape[1]
        index = _padded(index, missing)  # a gather has as many columns as a register
        values = _take_lanes(index & (LANES - 1) if size > LANES else index, z[:, :LANES])
        for lane in range(LANES, size, LANES):
            values = jnp.where(
                index >= lane, _take_lanes(index & (LANES - 1), z[:, lane : lane + LANES]), values
            )
        parts.append(values[:, : LANES - missing])
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def count_below(z: Array, x: Array) -> Array:
    """The number of entries of each row of z, which ascend, below x, by a binary search."""
    size = z.shape[1]
    count = jnp.zeros(x.shape, jnp.int32)
    step = 1 << (size.bit_length() - 1)
    while step:
        more = count + step
        below = (more <= size) & (take_rows(jnp.minimum(more, size) - 1, z) < x)
        count = jnp.where(below, more, count)
        step //= 2
    return count


def _take_lanes(indices: Array, x: Array) -> Array:
    """`jnp.take_along_axis` without its care for negative indices, which costs as much as the
    gather.
    """
    dimensions = jax.lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(1,),
        start_index_map=(1,),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )
    return jax.lax.gather(x, indices[..., None], dimensions, (1, 1), mode="promise_in_bounds")


def gather_up(p: Array, dy: Array, *, size: int, descending: bool) -> Array:
    """dz[l, n] = Σ_m dy[l, m] max(0, 1 − |p[l, m] − n|), without a scatter; fastest if each row of
    p descends.
    """
    fast, slow = functools.partial(_gather_neighbours, size), functools.partial(_gather_each, size)
    if descending:
        return fast(p, dy)
    before = jnp.concatenate([p[:, :1], p[:, :-1]], axis=1)
    return jax.lax.cond(jnp.min((before >= p).astype(jnp.float32)) > 0.5, fast, slow, p, dy)


def add_rows(indices: Array, dy: Array, *, size: int) -> Array:
    """The transpose of `take_rows` by z."""
    return gather_up(indices.astype(dy.dtype), dy, size=size, descending=False)


def _gather_neighbours(size: int, p: Array, dy: Array) -> Array:
    """`gather_up` where p descends along each row, so that the keys with ⌊p⌋ = n are neighbours.

    A binary search finds where p passes each n, and differences of running sums give the sums in
    between.
    """
    keys = p.shape[1]
    upper = dy * (p - jnp.floor(p))
    lower = dy - upper
    width = -(-size // LANES) * LANES
    target = jax.lax.broadcasted_iota(jnp.int32, (p.shape[0], width), 1).astype(p.dtype)
    # The number of keys with p ≥ n, as if the last key had p < 0; its index is at most `keys` − 1.
    count = jnp.zeros(target.shape, jnp.int32)
    step = 1 << ((keys - 1).bit_length() - 1)
    while step:
        more = count + step
        if keys & (keys - 1):  # the search may pass the end
            reached = (more < keys) & (take_rows(jnp.minimum(more, keys) - 1, p) >= target)
        else:
            reached = take_rows(more - 1, p) >= target
        count = jnp.where(reached, more, count)
        step //= 2
    beyond = p[:, -1:] >= target  # all keys are before n
    sums = []
    for terms in (lower, upper):
        suffix = running_sum(terms, suffix=True)
        after = jnp.where(beyond, 0.0, take_rows(count, suffix))
        before = jnp.concatenate([after[:, 1:], suffix[:, :1]], axis=1)
        sums.append(before - after)  # of the keys with ⌊p⌋ = n
    from_below = jnp.concatenate([jnp.zeros((len(p), 1), p.dtype), sums[1][:, :-1]], axis=1)
    return (sums[0] + from_below)[:, :size]


def _gather_each(size: int, p: Array, dy: Array) -> Array:
    """`gather_up` for any p, one column of the result at a time."""
    column = jax.lax.broadcasted_iota(jnp.int32, (p.shape[0], size), 1)

    def add(n: Array, total: Array) -> Array:
        weights = jnp.maximum(1 - jnp.abs(p - n.astype(p.dtype)), 0.0)
        return jnp.where(column == n, (dy * weights).sum(axis=1, keepdims=True), total)

    return jax.lax.fori_loop(0, size, add, jnp.zeros(column.shape, dy.dtype))


def take_table(indices: Array, table: Array) -> Array:
    """y[l, m] = table[0, indices[l, m]]."""
    return take_rows(indices, jnp.broadcast_to(table, (indices.shape[0], table.shape[1])))


def add_table(indices: Array, dy: Array, *, size: int) -> Array:
    """The transpose of `take_table` by the table, `[1, size]`."""
    column = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
    total = jnp.zeros((1, size), dy.dtype)
    for n in range(size):
        entry = (
            jnp.where(indices == n, dy, 0.0).sum(axis=0, keepdims=True).sum(axis=1, keepdims=True)
        )
        total = jnp.where(column == n, entry, total)
    return total


def _padded(x: Array, columns: int) -> Array:
    return jnp.concatenate([x, jnp.zeros((x.shape[0], columns), x.dtype)], axis=1) if columns else x


FORMS: dict[Any, Callable[..., Any]] = {
    tile.running_sum_p: running_sum,
    tile.add_table_p: add_table,
}
"""Forms that every TPU can run."""
GATHERS: dict[Any, Callable[..., Any]] = {
    tile.look_up_p: look_up,
    tile.gather_up_p: gather_up,
    tile.count_below_p: count_below,
    tile.take_rows_p: take_rows,
    tile.add_rows_p: add_rows,
    tile.take_table_p: take_table,
}
"""Forms that need a gather within registers."""
