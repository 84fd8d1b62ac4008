"""Which queries and keys may meet: a rule that any part of the pairs can be asked of, not an array of all of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """A query and a key meet if causality, window and segments allow it: by their places, never by their positions.

    Attributes:
      q_places_L: int32, the place of each query in the sequence.
      k_places_M: of each key; a negative place is empty: no query sees it.
      q_segment_ids_BL: tokens meet only within one segment; None: one segment.
      k_segment_ids_BM: of the keys.
      causal: whether keys at later places are hidden.
      window: keys that are `window` or more places away are hidden; None: none is.

    >>> mask = Mask(np.array([1, 2]), np.array([0, 1, 2]), window=2)
    >>> mask.dense()[0, 0].astype(int).tolist()
    [[1, 1, 0], [0, 1, 1]]
    """

    q_places_L: Array | np.ndarray
    k_places_M: Array | np.ndarray
    q_segment_ids_BL: Array | None = None
    k_segment_ids_BM: Array | None = None
    causal: bool = dataclasses.field(default=True, metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})

    def dense(self) -> Array:
        """The pairs as one array, mask_B1LM, with 1 for B where there are no segments."""
        distance_LM = self.q_places_L[:, None] - self.k_places_M[None, :]
        allowed_LM = (self.k_places_M >= 0)[None, :]
        if self.causal:
            allowed_LM = allowed_LM & (distance_LM >= 0)
        if self.window is not None:
            allowed_LM = allowed_LM & (abs(distance_LM) < self.window)
        mask_B1LM = jnp.broadcast_to(jnp.asarray(allowed_LM), distance_LM.shape)[None, None]
        if self.q_segment_ids_BL is not None and self.k_segment_ids_BM is not None:
            mask_B1LM &= (self.q_segment_ids_BL[:, :, None] == self.k_segment_ids_BM[:, None, :])[:, None]
        return mask_B1LM

    def visible_blocks(self, block: int) -> tuple[Array, Array]:
        """The blocks of keys that hold all pairs, (first, end): those outside need not be computed.

        Args:
          block: length of the blocks of keys; it divides M.
        """
        places_JM = self.k_places_M.reshape(-1, block)
        farthest = jnp.iinfo(places_JM.dtype).max
        low_J = jnp.where(places_JM >= 0, places_JM, farthest).min(axis=1)
        high_J = places_JM.max(axis=1)
        first_query, last_query = self.q_places_L.min(), self.q_places_L.max()
        visible_J = high_J >= 0
        if self.causal:
            visible_J &= low_J <= last_query
        if self.window is not None:
            visible_J &= (first_query - high_J < self.window) & (low_J - last_query < self.window)
        if self.q_segment_ids_BL is not None and self.k_segment_ids_BM is not None:
            ids_BJM = self.k_segment_ids_BM.reshape(self.k_segment_ids_BM.shape[0], -1, block)
            low_BJ, high_BJ = ids_BJM.min(axis=2), ids_BJM.max(axis=2)
            low_B1, high_B1 = (f(self.q_segment_ids_BL, axis=1, keepdims=True) for f in (jnp.min, jnp.max))
            visible_J &= ((low_BJ <= high_B1) & (high_BJ >= low_B1)).any(axis=0)
        numbers_J = jnp.arange(len(low_J), dtype=jnp.int32)
        first = jnp.where(visible_J, numbers_J, len(low_J)).min()
        end = jnp.where(visible_J, numbers_J + 1, 0).max()
        return first, end
