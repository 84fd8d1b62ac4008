"""Dropout whose random key is an argument."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jax.typing import ArrayLike

from cope_jax.array_types import Array


def dropout(x_BLD: Array, rate: float, key: Array | None) -> Array:
    """Sets entries to 0 with probability `rate`, scales others by 1/(1−rate); only with a key.

    The mask of the first tokens does not depend on how many tokens follow, so sequences may be
    padded.

    >>> dropout(jnp.ones((1, 1, 2)), 0.5, None).tolist()
    [[[1.0, 1.0]]]
    """
    if key is None or rate == 0:
        return x_BLD
    batch, length, width = x_BLD.shape
    keep_LBD = jax.random.bernoulli(key, 1 - rate, (length, batch, width))
    return jnp.where(jnp.swapaxes(keep_LBD, 0, 1), x_BLD / (1 - rate), jnp.zeros((), x_BLD.dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout of attention weights by blocks, with the same mask as for all pairs together.

    Each example and head has a Threefry key. The random bits of a pair are the cipher of (index of
    the query, index of the key) under this key, so they do not depend on the size, the order or the
    device of blocks. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

    Attributes:
      keys_2BH: the Threefry keys.
      rate: share of the attention weights that is dropped.
    """

    keys_2BH: Array
    rate: float = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(cls, key: Array | None, rate: float, batch: int, heads: int) -> "Dropout | None":
        """Dropout of `[B, H, ...]` attention weights; None without a key or at rate 0."""
        if key is None or rate == 0:
            return None
        return cls(jax.random.bits(key, (2, batch, heads), jnp.uint32), rate)

    def __call__(self, q_places_L: ArrayLike, k_places_M: ArrayLike, dtype: Any) -> Array:
        """Returns scale_BHLM, the factor of each pair: 0 or 1/(1−rate).

        >>> drop = Dropout.create(jax.random.key(0), 0.5, 1, 1)
        >>> whole = drop(jnp.arange(4), jnp.arange(6), jnp.float32)
        >>> bool((drop(jnp.arange(2, 4), jnp.arange(3, 5), jnp.float32) == whole[..., 2:4, 3:5]).all())
        True
        """
        row = jnp.asarray(q_places_L, jnp.uint32)[None, None, :, None]
        column = jnp.asarray(k_places_M, jnp.uint32)[None, None, None, :]
        shape = (*self.keys_2BH.shape[1:], row.shape[2], column.shape[3])
        key = [jnp.broadcast_to(half[:, :, None, None], shape) for half in self.keys_2BH]
        bits, _ = threefry2x32_p.bind(
            *key, *(jnp.broadcast_to(index, shape) for index in (row, column))
        )
        keep = bits >= jnp.uint32(round(self.rate * 2**32))
        return jnp.where(keep, jnp.asarray(1 / (1 - self.rate), dtype), jnp.zeros((), dtype))
