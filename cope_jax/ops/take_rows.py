"""Reading a row of numbers at several places, with a fast gradient."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from cope_jax.typing import Array


@jax.custom_vjp
def take_rows(z: Array, places: Array) -> Array:
    """Entries of each row of `z`, y[..., m] = z[..., places[..., m]].

    `jnp.take_along_axis(z, places, -1)` with another gradient: one flat scatter-add instead of a batched one, several
    times faster on a CPU.

    Args:
      z: `[..., N]`.
      places: `[..., M]`, int32, with the same leading axes; within [0, N−1], which the caller sees to.

    >>> take_rows(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[1, 1, 0], [0, 1, 0]])).tolist()
    [[2.0, 2.0, 1.0], [3.0, 4.0, 3.0]]
    """
    return jnp.take_along_axis(z, places, -1)


def add_to_rows(size: int, *additions: tuple[Array, Array]) -> Array:
    """The transpose of `take_rows`: rows of `size` zeros, to which each (places, values) of shape `[..., M]` is added.

    One flat scatter, which is fast; but where the compiler may split the rows over devices, one for each row, for it
    cannot split a flat one.

    >>> add_to_rows(3, (jnp.array([0, 2, 2]), jnp.array([1.0, 2.0, 3.0]))).tolist()
    [1.0, 0.0, 5.0]
    """
    lead = additions[0][0].shape[:-1]
    if _may_be_split():
        zeros = jnp.zeros((*lead, size), additions[0][1].dtype)
        return functools.reduce(_add_row_by_row, additions, zeros)
    rows = math.prod(lead)
    if rows * size > np.iinfo(np.int32).max:
        raise ValueError(f"{rows} rows of {size} entries are too many for 32-bit places: use a smaller batch")
    starts = (size * jnp.arange(rows, dtype=jnp.int32)).reshape(*lead, 1)
    flat = jnp.zeros(rows * size, additions[0][1].dtype)
    for places, values in additions:
        flat = flat.at[(starts + places).ravel()].add(values.ravel(), mode="promise_in_bounds")
    return flat.reshape(*lead, size)


def _may_be_split() -> bool:
    """Whether there is a mesh with an axis of several devices that is left to the compiler."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    return any(size > 1 and kind == AxisType.Auto for kind, size in axes)


def _add_row_by_row(rows: Array, addition: tuple[Array, Array]) -> Array:
    def add(row: Array, places: Array, values: Array) -> Array:
        return row.at[places].add(values, mode="promise_in_bounds")

    for _ in rows.shape[:-1]:
        add = jax.vmap(add)
    return add(rows, *addition)


def _forward(z: Array, places: Array) -> tuple[Array, tuple[Array, int]]:
    return take_rows(z, places), (places, z.shape[-1])


def _backward(residuals: tuple[Array, int], dy: Array) -> tuple[Array, np.ndarray]:
    places, size = residuals
    return add_to_rows(size, (places, dy)), np.zeros(places.shape, jax.dtypes.float0)


take_rows.defvjp(_forward, _backward)
