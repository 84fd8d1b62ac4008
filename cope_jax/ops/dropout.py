"""Dropout as a function of its key."""

import jax
import jax.numpy as jnp

from cope_jax.typing import Array


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Zeroes a share `rate` of the entries and scales the rest by 1/(1−rate); the identity where there is no key.

    >>> dropout(jnp.ones(2), 0.5, None).tolist()
    [1.0, 1.0]
    """
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype))
