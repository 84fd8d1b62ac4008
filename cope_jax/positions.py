"""Position samplers, which choose the positions of tokens for any encoding.

A sampler accepts (key, batch, length, limit) and returns positions below `limit`, `[B, L]` or
`[1, L]`, increasing along L. They are int32 and differ, unless the sampler says otherwise.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.array_types import Array
from cope_jax.errors import ConfigError
from cope_jax.registry import Registry

Sampler = Callable[[Array, int, int, int], Any]
SAMPLERS: Registry[Sampler] = Registry("position sampler")


@SAMPLERS.register("consecutive")
def consecutive(key: Array, batch: int, length: int, limit: int) -> np.ndarray:
    """Returns 0, 1, …, L−1 in NumPy: an encoding can check its table while tracing.

    >>> consecutive(jax.random.key(0), 1, 3, 3).tolist()
    [[0, 1, 2]]
    """
    del key, batch
    _check(length, limit)
    return np.arange(length, dtype=np.int32)[None]


@SAMPLERS.register("offset")
def offset(key: Array, batch: int, length: int, limit: int) -> Array:
    """Returns s, s+1, …, s+L−1 in each row, s uniform among the starts that fit below `limit`.

    Kiyono et al., "SHAPE: Shifted Absolute Position Embedding" (arXiv 2109.05644).
    """
    _check(length, limit)
    start_B1 = jax.random.randint(key, (batch, 1), 0, limit - length + 1, jnp.int32)
    return start_B1 + jnp.arange(length, dtype=jnp.int32)[None]


@SAMPLERS.register("randomised")
def randomised(key: Array, batch: int, length: int, limit: int) -> Array:
    """Returns a random ascending subset of 0 … limit−1 for each row, without replacement.

    Ruoss et al., "Randomized positional encodings boost length generalization" (arXiv 2305.16843).
    """
    _check(length, limit)
    rows = jnp.broadcast_to(jnp.arange(limit, dtype=jnp.int32), (batch, limit))
    return jnp.sort(jax.random.permutation(key, rows, axis=1, independent=True)[:, :length], axis=1)


@SAMPLERS.register("floats")
def floats(key: Array, batch: int, length: int, limit: int) -> Array:
    """Returns ascending float32 numbers, uniform from 0 to `limit`, drawn for each row.

    Any number of tokens fits below the limit. Two numbers can be equal by rounding. Shimizu et al.,
    "Position Encoding with Random Float Sampling" (arXiv 2602.14050).
    """
    return jnp.sort(jax.random.uniform(key, (batch, length), jnp.float32, maxval=limit), axis=1)


def per_segment(segment_ids_BL: Array) -> Array:
    """Returns positions that restart at 0 wherever the segment id changes along a row.

    >>> per_segment(jnp.array([[1, 1, 2, 2, 2]])).tolist()
    [[0, 1, 0, 1, 2]]
    """
    place_BL = jnp.broadcast_to(
        jnp.arange(segment_ids_BL.shape[1], dtype=jnp.int32), segment_ids_BL.shape
    )
    changed_BL = jnp.pad(segment_ids_BL[:, 1:] != segment_ids_BL[:, :-1], ((0, 0), (1, 0)))
    start_BL = jax.lax.cummax(jnp.where(changed_BL, place_BL, 0), axis=1)
    return place_BL - start_BL


def _check(length: int, limit: int) -> None:
    if length > limit:
        raise ConfigError(
            f"a sequence of {length} tokens does not fit below max_position={limit}: raise max_position"
        )
