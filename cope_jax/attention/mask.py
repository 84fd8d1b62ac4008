"""The attention mask: which keys each query may see, by causality, window, segments and an optional
given mask.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.array_types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """The attention mask: a query sees a key if causality, window, segments and the given mask all
    allow it.

    Causality and window refer to the index in the sequence, never to the position.

    Attributes:
      q_indices_L: int32, the index of each query in the sequence.
      k_indices_M: int32, the index of each key; a key with a negative index is empty, and no query
        sees it.
      q_segment_ids_BL: the segment of each query. A query sees only keys of its own segment. If
        None, there is one segment.
      k_segment_ids_BM: the segment of each key.
      given_B1LM: bool, True where a query may see a key. B is 1 if the mask is the same for all
        examples, L is 1 if it is the same for all queries. If None, no mask is given.
      causal: whether keys at later indices are hidden.
      window: keys that are `window` or more indices away from the query are hidden. If None, there
        is no window.

    >>> mask = Mask(np.array([1, 2]), np.array([0, 1, 2]), window=2)
    >>> mask.dense()[0, 0].astype(int).tolist()
    [[1, 1, 0], [0, 1, 1]]
    """

    q_indices_L: Array | np.ndarray
    k_indices_M: Array | np.ndarray
    q_segment_ids_BL: Array | None = None
    k_segment_ids_BM: Array | None = None
    given_B1LM: Array | None = None
    causal: bool = dataclasses.field(default=True, metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})

    def allowed(self) -> Array | np.ndarray:
        """Returns allowed_LM: whether causality and window allow a pair and its key is not empty.

        The result is a NumPy array if the indices are NumPy arrays.
        """
        distance_LM = self.q_indices_L[:, None] - self.k_indices_M[None, :]
        allowed_LM = (self.k_indices_M >= 0)[None, :]
        if self.causal:
            allowed_LM = allowed_LM & (distance_LM >= 0)
        if self.window is not None:
            allowed_LM = allowed_LM & (abs(distance_LM) < self.window)
        return allowed_LM

    def dense(self) -> Array:
        """Returns the complete mask as one array, mask_B1LM; B is 1 if the mask is the same for all
        examples.
        """
        shape = (len(self.q_indices_L), len(self.k_indices_M))
        mask_B1LM = jnp.broadcast_to(jnp.asarray(self.allowed()), shape)[None, None]
        if self.q_segment_ids_BL is not None and self.k_segment_ids_BM is not None:
            mask_B1LM &= (self.q_segment_ids_BL[:, :, None] == self.k_segment_ids_BM[:, None, :])[
                :, None
            ]
        return mask_B1LM if self.given_B1LM is None else mask_B1LM & self.given_B1LM

    def span(self) -> tuple[Array, Array, Array, Array]:
        """Returns two ranges of keys, (first, end, full, full_end), where `end` and `full_end` are
        exclusive.

        Every allowed pair has its key in first … end, so keys outside this range need not be
        computed. Every pair with a key in full … full_end is allowed, so blocks within this range
        need no mask. Both statements are true for any order of indices and segments, and for any
        given mask. If indices and segments ascend and there is no given mask, the first range is as
        short and the second as long as possible.
        """
        index_M, low, high = self.k_indices_M, self.q_indices_L.min(), self.q_indices_L.max()
        some_M = all_M = jnp.asarray(index_M >= 0)
        if self.causal:
            some_M, all_M = some_M & (index_M <= high), all_M & (index_M <= low)
        if self.window is not None:
            some_M = some_M & (low - index_M < self.window) & (index_M - high < self.window)
            all_M = all_M & (high - index_M < self.window) & (index_M - low < self.window)
        if self.q_segment_ids_BL is not None and self.k_segment_ids_BM is not None:
            low_B1, high_B1 = (
                f(self.q_segment_ids_BL, axis=1, keepdims=True) for f in (jnp.min, jnp.max)
            )
            ids_BM = self.k_segment_ids_BM
            some_M = some_M & ((ids_BM >= low_B1) & (ids_BM <= high_B1)).any(axis=0)
            all_M = all_M & ((ids_BM == low_B1) & (ids_BM == high_B1)).all(axis=0)
        if self.given_B1LM is not None:
            some_M = some_M & self.given_B1LM.any(axis=(0, 1, 2))
            all_M = all_M & self.given_B1LM.all(axis=(0, 1, 2))
        first, end = _range(some_M)
        full, full_end = _range(all_M)
        return (
            first,
            end,
            jnp.where(all_M.sum(dtype=jnp.int32) == full_end - full, full, full_end),
            full_end,
        )


def _range(chosen_M: Array) -> tuple[Array, Array]:
    numbers_M = jnp.arange(len(chosen_M), dtype=jnp.int32)
    return jnp.where(chosen_M, numbers_M, len(chosen_M)).min(), jnp.where(
        chosen_M, numbers_M + 1, 0
    ).max()
