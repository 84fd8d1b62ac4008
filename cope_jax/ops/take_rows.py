"""Reading a row of numbers at several places, with a fast gradient."""

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.typing import Array


@jax.custom_vjp
def take_rows(z: Array, places: Array) -> Array:
    """Entries of each row of `z`, y[..., m] = z[..., places[..., m]].

    `jnp.take_along_axis(z, places, -1)` with another gradient: one flat scatter-add instead of a batched one, several times
    faster on a CPU.

    Args:
      z: `[..., N]`.
      places: `[..., M]`, int32, with the same leading axes; within [0, N−1], which the caller sees to.

    >>> take_rows(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[1, 1, 0], [0, 1, 0]])).tolist()
    [[2.0, 2.0, 1.0], [3.0, 4.0, 3.0]]
    """
    return jnp.take_along_axis(z, places, -1)


def _forward(z: Array, places: Array) -> tuple[Array, tuple[Array, tuple[int, ...]]]:
    return take_rows(z, places), (places, z.shape)


def _backward(residuals: tuple[Array, tuple[int, ...]], dy: Array) -> tuple[Array, np.ndarray]:
    places, shape = residuals
    starts = shape[-1] * jnp.arange(places.size // places.shape[-1], dtype=places.dtype)
    flat = (starts.reshape(*places.shape[:-1], 1) + places).ravel()
    dz = jnp.zeros(int(np.prod(shape)), dy.dtype).at[flat].add(dy.ravel(), mode="promise_in_bounds")
    return dz.reshape(shape), np.zeros(places.shape, jax.dtypes.float0)


take_rows.defvjp(_forward, _backward)
