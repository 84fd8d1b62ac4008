"""Reading of tables by numbers that may be wrong: what has no row is NaN, whichever side it is on."""

import jax.numpy as jnp

from cope_jax.typing import Array


def take(table_ND: Array, numbers: Array) -> Array:
    """The rows of a table, y[…] = table[numbers[…]], NaN where a number is not within [0, N−1].

    `jnp.take` by itself counts negative numbers from the end, so that a wrong one would read some other row in silence.

    Args:
      table_ND: of a floating type, `[N, …]`.
      numbers: integers of any shape.

    >>> take(jnp.array([1.0, 2.0]), jnp.array([1, 2, -1])).tolist()
    [2.0, nan, nan]
    """
    return jnp.take(table_ND, _loud(numbers, len(table_ND)), axis=0, mode="fill")


def take_places(x_BLD: Array, places_BP: Array) -> Array:
    """The vectors at some places of each sequence, y_BPD = x[b, places[b, p]], NaN where a place is not in [0, L−1].

    >>> take_places(jnp.array([[[1.0], [2.0]]]), jnp.array([[1, 2, -1]])).tolist()
    [[[2.0], [nan], [nan]]]
    """
    return jnp.take_along_axis(x_BLD, _loud(places_BP, x_BLD.shape[1])[..., None], axis=1, mode="fill")


def _loud(numbers: Array, size: int) -> Array:
    """Negative numbers moved behind the end, which they would be counted from."""
    return jnp.where(numbers < 0, size, numbers)
