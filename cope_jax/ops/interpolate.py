"""Linear interpolation between the integer entries of a row of numbers."""

import jax.numpy as jnp

from cope_jax.ops.take_rows import take_rows
from cope_jax.typing import Array


def interpolate(z: Array, p: Array) -> Array:
    """Values of each row of `z` at the fractional places `p` of that row, y = (1 − w) z[⌊p⌋] + w z[⌈p⌉], w = p − ⌊p⌋.

    Golovneva et al. (arXiv 2405.18719), Eq 5 and 9. As in the paper's listing the gradient reaches `p` through w alone, so it
    is z[⌈p⌉] − z[⌊p⌋], which is 0 at integers.

    Args:
      z: `[..., N]`, values at the integers 0 … N−1.
      p: `[..., M]` with the same leading axes, places within [0, N−1]; the caller clips.

    Returns:
      `[..., M]`.

    >>> interpolate(jnp.array([0.0, 10.0, 40.0]), jnp.array([0.0, 0.5, 1.75])).tolist()
    [0.0, 5.0, 32.5]
    """
    low = take_rows(z, jnp.floor(p).astype(jnp.int32))
    high = take_rows(z, jnp.ceil(p).astype(jnp.int32))
    return low + (p - jnp.floor(p)) * (high - low)
