"""Which queries and keys may meet: a rule that can be evaluated for any part of the pairs, not an array of them all."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.array_types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """A query and a key meet if causality, window and segments allow it: by index in the sequence, never by position.

    Attributes:
      q_indices_L: int32, the index of each query in the sequence.
      k_indices_M: of each key; a negative index is empty: no query sees it.
      q_segment_ids_BL: tokens meet only within one segment; None: one segment.
      k_segment_ids_BM: of the keys.
      causal: whether keys at later indices are hidden.
      window: keys that are `window` or more indices away are hidden; None: none are.

    >>> mask = Mask(np.array([1, 2]), np.array([0, 1, 2]), window=2)
    >>> mask.dense()[0, 0].astype(int).tolist()
    [[1, 1, 0], [0, 1, 1]]
    """

    q_indices_L: Array | np.ndarray
    k_indices_M: Array | np.ndarray
    q_segment_ids_BL: Array | None = None
    k_segment_ids_BM: Array | None = None
    causal: bool = dataclasses.field(default=True, metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})

    def allowed(self) -> Array | np.ndarray:
        """What causality, window and empty keys allow, allowed_LM: a NumPy array if the indices are NumPy arrays."""
        distance_LM = self.q_indices_L[:, None] - self.k_indices_M[None, :]
        allowed_LM = (self.k_indices_M >= 0)[None, :]
        if self.causal:
            allowed_LM = allowed_LM & (distance_LM >= 0)
        if self.window is not None:
            allowed_LM = allowed_LM & (abs(distance_LM) < self.window)
        return allowed_LM

    def dense(self) -> Array:
        """The pairs as one array, mask_B1LM, with 1 for B if there are no segments."""
        shape = (len(self.q_indices_L), len(self.k_indices_M))
        mask_B1LM = jnp.broadcast_to(jnp.asarray(self.allowed()), shape)[None, None]
        if self.q_segment_ids_BL is not None and self.k_segment_ids_BM is not None:
            mask_B1LM &= (self.q_segment_ids_BL[:, :, None] == self.k_segment_ids_BM[:, None, :])[:, None]
        return mask_B1LM

    def span(self) -> tuple[Array, Array, Array, Array]:
        """The range of keys with all allowed pairs, and one where all pairs are allowed: (first, end, full, full_end).

        Keys outside the first range need not be computed, and blocks within the second need no mask. Both are safe for
        any order of indices and segments, and tight if these ascend.
        """
        index_M, low, high = self.k_indices_M, self.q_indices_L.min(), self.q_indices_L.max()
        some_M = all_M = jnp.asarray(index_M >= 0)
        if self.causal:
            some_M, all_M = some_M & (index_M <= high), all_M & (index_M <= low)
        if self.window is not None:
            some_M = some_M & (low - index_M < self.window) & (index_M - high < self.window)
            all_M = all_M & (high - index_M < self.window) & (index_M - low < self.window)
        if self.q_segment_ids_BL is not None and self.k_segment_ids_BM is not None:
            low_B1, high_B1 = (f(self.q_segment_ids_BL, axis=1, keepdims=True) for f in (jnp.min, jnp.max))
            ids_BM = self.k_segment_ids_BM
            some_M = some_M & ((ids_BM >= low_B1) & (ids_BM <= high_B1)).any(axis=0)
            all_M = all_M & ((ids_BM == low_B1) & (ids_BM == high_B1)).all(axis=0)
        first, end = _range(some_M)
        full, full_end = _range(all_M)
        return first, end, jnp.where(all_M.sum(dtype=jnp.int32) == full_end - full, full, full_end), full_end


def _range(chosen_M: Array) -> tuple[Array, Array]:
    numbers_M = jnp.arange(len(chosen_M), dtype=jnp.int32)
    return jnp.where(chosen_M, numbers_M, len(chosen_M)).min(), jnp.where(chosen_M, numbers_M + 1, 0).max()
