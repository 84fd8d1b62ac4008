"""Reads tables and rows by index, with fast gradients; functions differ in wrong indices."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from cope_jax.array_types import Array
from cope_jax.errors import ConfigError
from cope_jax.ops import tile


def lookup(table_ND: Array, indices: Array) -> Array:
    """Returns rows of a table, y[…] = table[indices[…]], NaN for an index outside of [0, N−1].

    `jnp.take` by itself counts negative indices from the end, so a wrong index would silently read
    another row.

    Args:
      table_ND: `[N, …]`, of a floating type.
      indices: integers of any shape.

    >>> lookup(jnp.array([1.0, 2.0]), jnp.array([1, 2, -1])).tolist()
    [2.0, nan, nan]
    """
    return jnp.take(table_ND, checked_indices(indices, len(table_ND)), axis=0, mode="fill")


def take_tokens(x_BLD: Array, indices_BP: Array) -> Array:
    """Returns vectors of tokens, y_BPD = x[b, indices[b, p]], NaN for an index outside of [0, L−1].

    >>> take_tokens(jnp.array([[[1.0], [2.0]]]), jnp.array([[1, 2, -1]])).tolist()
    [[[2.0], [nan], [nan]]]
    """
    indices_BP1 = checked_indices(indices_BP, x_BLD.shape[1])[..., None]
    return jnp.take_along_axis(x_BLD, indices_BP1, axis=1, mode="fill")


def take_from_table(table: Array, indices: Array) -> Array:
    """Returns entries of a short table that all pairs share, y[…] = table[indices[…]].

    Args:
      table: `[N, …]`.
      indices: integers of any shape. The caller must ensure that they are within [0, N−1].

    >>> take_from_table(jnp.array([1.0, 2.0]), jnp.array([[1, 0]])).tolist()
    [[2.0, 1.0]]
    """
    if tile.is_tracing():
        columns = jnp.asarray(table).reshape(len(table), -1).T
        entries = [tile.take_table_p.bind(indices, column)[..., None] for column in columns]
        return jnp.concatenate(entries, axis=-1).reshape(*indices.shape, *table.shape[1:])
    return jnp.asarray(table).at[indices].get(mode="promise_in_bounds")


@jax.custom_jvp
def take_rows(z: Array, indices: Array) -> Array:
    """Returns entries of each row of `z`, y[..., m] = z[..., indices[..., m]].

    This is `jnp.take_along_axis(z, indices, -1)` with another gradient. The gradient is one flat
    scatter-add, which is several times faster on a CPU than a batched scatter-add.

    Args:
      z: `[..., N]`.
      indices: int32, `[..., M]` with the leading axes of `z`. The caller must ensure that they are
        within [0, N−1].

    >>> take_rows(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[1, 1, 0], [0, 1, 0]])).tolist()
    [[2.0, 2.0, 1.0], [3.0, 4.0, 3.0]]
    """
    return (
        tile.take_rows_p.bind(indices, z)
        if tile.is_tracing()
        else jnp.take_along_axis(z, indices, -1)
    )


def _take_rows_of_tangent(dz: Array, y: Array, z: Array, indices: Array) -> Array:
    del y, z
    return (
        tile.take_rows_p.bind(indices, dz)
        if tile.is_tracing()
        else take_windows(dz, indices, 1)[..., 0]
    )


take_rows.defjvps(_take_rows_of_tangent, None)


def row_products(q_BHLK: Array, table_NK: Array, rows_BLM: Array, seen_BLM: Array) -> Array:
    """Returns products of queries with rows of a table, y_BHLM = q_l·table[rows_lm].

    If the rows of all pairs that are seen fit into a window of L + M − 1 rows, as those of
    distances do, only these rows are multiplied.

    Args:
      q_BHLK: queries.
      table_NK: the table, shared by all heads.
      rows_BLM: int32, `[B, L, M]` or `[1, L, M]`. The caller must ensure that they are within
        [0, N−1].
      seen_BLM: the pairs whose products matter; the others are finite.

    >>> q, table = jnp.ones((1, 1, 2, 1)), jnp.arange(9.0)[:, None]
    >>> rows = jnp.array([[[5, 4], [6, 0]]])
    >>> row_products(q, table, rows, rows > 0)[0, 0, :, 0].tolist()
    [5.0, 6.0]
    """
    length, keys = rows_BLM.shape[1:]
    window, last = length + keys - 1, len(table_NK) - 1

    def read(table_NK: Array, rows_BLM: Array) -> Array:
        z_BHLN = jnp.einsum("BHLK,NK->BHLN", q_BHLK, table_NK)
        shape = (*q_BHLK.shape[:3], keys)
        return take_rows(z_BHLN, jnp.broadcast_to(rows_BLM[:, None], shape))

    if tile.is_tracing() or window > last:
        return read(table_NK, rows_BLM)
    first = jnp.minimum(jnp.where(seen_BLM, rows_BLM, last).min(), last + 1 - window)

    def read_window() -> Array:
        near = jax.lax.dynamic_slice_in_dim(table_NK, first, window)
        return read(near, jnp.clip(rows_BLM - first, 0, window - 1))

    fits = jnp.where(seen_BLM, rows_BLM, 0).max() < first + window
    return jax.lax.cond(fits, read_window, lambda: read(table_NK, rows_BLM))


def take_windows(z: Array, starts: Array, size: int) -> Array:
    """Returns neighbours in rows of `z`, y[..., m, s] = z[..., starts[..., m] + s], s < size.

    The forward pass is one flat gather, which is slower than the gather of `take_rows`. However,
    autodiff transposes it to one flat scatter-add. If the compiler may split the rows over devices,
    the gather is batched over the rows, because a flat gather cannot be split.

    Args:
      z: `[..., N]`.
      starts: int32, `[..., M]` with the leading axes of `z`. The caller must ensure that they are
        within [0, N−size].
      size: number of entries of a window.

    Returns:
      `[..., M, size]`.

    >>> take_windows(jnp.array([[1.0, 2.0, 3.0]]), jnp.array([[1, 0]]), 2).tolist()
    [[[2.0, 3.0], [1.0, 2.0]]]
    """
    *lead, row_size = z.shape
    if not z.size:
        return jnp.zeros((*starts.shape, size), z.dtype)
    if not _may_be_split():
        rows = math.prod(lead)
        if rows * row_size > np.iinfo(np.int32).max:
            raise ConfigError(
                f"{rows} rows of {row_size} entries are too many for 32-bit indices: use a smaller batch"
            )
        firsts = (row_size * jnp.arange(rows, dtype=jnp.int32)).reshape(*lead, 1)
        return _gather(z.ravel(), (firsts + starts).ravel(), size).reshape(*starts.shape, size)
    return _gather(z, starts, size)


def _gather(z: Array, starts: Array, size: int) -> Array:
    lead = tuple(range(z.ndim - 1))
    dimensions = jax.lax.GatherDimensionNumbers(
        offset_dims=(z.ndim,),
        collapsed_slice_dims=(),
        start_index_map=(z.ndim - 1,),
        operand_batching_dims=lead,
        start_indices_batching_dims=lead,
    )
    sizes = (*(1 for _ in lead), size)
    return jax.lax.gather(z, starts[..., None], dimensions, sizes, mode="promise_in_bounds")


def _may_be_split() -> bool:
    """True if the mesh has an Auto axis of several devices, which may split arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    return any(size > 1 and kind == AxisType.Auto for kind, size in axes)


def checked_indices(indices: Array, size: int) -> Array:
    """Replaces negative indices, which would count from the end, by `size`, which is out of range.

    The result is int32 or wider: in bytes, a size of 300 would be 44.
    """
    indices = jnp.asarray(indices)
    indices = indices if indices.dtype.itemsize >= 4 else indices.astype(jnp.int32)
    return jnp.where(indices < 0, size, indices)
