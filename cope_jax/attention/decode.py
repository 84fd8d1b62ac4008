"""Attention over a cache of the keys and values of earlier tokens, as generation reads one token after the other.

>>> import jax
>>> from flax import nnx
>>> from cope_jax import encodings
>>> encoding = encodings.create("cope", num_heads=2, head_dim=8, rngs=nnx.Rngs(0))
>>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 8))
>>> @jax.jit
... def step(cache, q, k, v):
...     cache = cache.enter(cache.filled[None, None]).append(k, v, encoding=encoding)
...     return cache, attend_cached(q, cache, encoding=encoding)
>>> cache = create_cache(encoding, batch=1, capacity=8)
>>> for now in range(5):
...     cache, out = step(cache, *(x[:, now : now + 1] for x in (q, k, v)))
>>> out.shape  # what `attend` over all five tokens says of the last
(1, 1, 2, 8)
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.attention.full import softmax_over
from cope_jax.attention.inputs import Inputs
from cope_jax.attention.mask import Mask
from cope_jax.encodings import Encoding
from cope_jax.errors import ConfigError
from cope_jax.ops.logits import content_logits
from cope_jax.registry import check_at_least
from cope_jax.typing import Array, PyTree

# Slots that are scored together: enough for CoPE with the paper's table of 64 to settle where gates are about ½.
BLOCK = 256


class Entries(NamedTuple):
    """What is kept of tokens: k_BMGK after rotation, v_BMGK, and the encoding's features, a tree of `[B, M, ...]`."""

    k: Any
    v: Any
    features: PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The tokens read so far, in a fixed number C of slots, as one attention layer or all N of a model keep them.

    Slots are filled in order, so a token's slot is its place in the sequence, and causality hides the empty ones. The
    number of filled slots is data: one compiled step serves every length of the context.

    Attributes:
      entries: `Entries` as rows, each array `[B·G, C, K]` or `[N, B·G, C, K]`, for these are read without a copy and
        written in place.
      positions_BC: int32.
      segment_ids_BC: int32; tokens meet only within one segment. Padding is a segment of its own.
      filled: int32 scalar, how many slots are in use.
    """

    entries: Entries
    positions_BC: Array
    segment_ids_BC: Array
    filled: Array

    @property
    def capacity(self) -> int:
        return self.positions_BC.shape[1]

    def enter(self, positions_BL: Any, segment_ids_BL: Any = None) -> "Cache":
        """Takes the next L slots for new tokens, whose keys each layer has to `append`.

        Args:
          positions_BL: int32, `[B, L]` or `[1, L]`.
          segment_ids_BL: the same; None: segment 0.

        Raises:
          ConfigError: more tokens than slots. A compiled program, which cannot know, turns what it attends to into NaN
            instead.
        """
        length = positions_BL.shape[1]
        start = 0 if isinstance(self.filled, jax.core.Tracer) else int(self.filled)
        if start + length > self.capacity:
            raise ConfigError(f"a cache of capacity {self.capacity} cannot hold {start + length} tokens: enlarge it")

        def write(slots_BC: Array, new_BL: Any) -> Array:
            new_BL = jnp.broadcast_to(jnp.asarray(new_BL, jnp.int32), (slots_BC.shape[0], length))
            return jax.lax.dynamic_update_slice_in_dim(slots_BC, new_BL, self.filled, axis=1)

        return dataclasses.replace(
            self,
            positions_BC=write(self.positions_BC, positions_BL),
            segment_ids_BC=write(
                self.segment_ids_BC, np.zeros((1, length)) if segment_ids_BL is None else segment_ids_BL
            ),
            filled=self.filled + length,
        )

    def append(
        self,
        k_BLGK: Array,
        v_BLGK: Array,
        *,
        encoding: Encoding,
        features: PyTree | None = None,
        layer: int | Array | None = None,
    ) -> "Cache":
        """Writes one layer's keys and values of the L tokens that were entered last.

        Args:
          k_BLGK: keys before rotation.
          v_BLGK: values.
          encoding: the position encoding.
          features: the encoding's key features; None calls `encoding.key_features(None, k, v)`.
          layer: which of the N; None: the cache is of one layer.
        """
        features = encoding.key_features(None, k_BLGK, v_BLGK) if features is None else features
        positions_BL, _ = self.latest(k_BLGK.shape[1])
        _, rotated_BLGK = encoding.rotate(k_BLGK, k_BLGK, positions_BL, positions_BL)
        # Without a slot left the write would silently hit the last ones: NaN there reaches every query.
        v_BLGK = jnp.where(self.filled > self.capacity, jnp.full((), jnp.nan, v_BLGK.dtype), v_BLGK)

        def write(slots: Array, new: Array) -> Array:
            rows, zero = _rows(new), jnp.zeros((), jnp.int32)
            where = (zero, self.filled - k_BLGK.shape[1], zero)
            if layer is None:
                return jax.lax.dynamic_update_slice(slots, rows, where)
            return jax.lax.dynamic_update_slice(slots, rows[None], (jnp.asarray(layer, jnp.int32), *where))

        new = Entries(rotated_BLGK, v_BLGK, features)
        return dataclasses.replace(self, entries=jax.tree.map(write, self.entries, new))

    def latest(self, length: int) -> tuple[Array, Array]:
        """(positions_BL, segment_ids_BL) of the L tokens that were entered last."""
        start = self.filled - length
        return (
            jax.lax.dynamic_slice_in_dim(self.positions_BC, start, length, axis=1),
            jax.lax.dynamic_slice_in_dim(self.segment_ids_BC, start, length, axis=1),
        )


def create_cache(
    encoding: Encoding, *, batch: int, capacity: int, num_layers: int | None = None, dtype: Any = jnp.float32
) -> Cache:
    """An empty cache for keys and values of type `dtype`, and the features that `encoding` makes of them.

    Args:
      encoding: the position encoding, which also says how many heads there are.
      batch: B.
      capacity: C, the most tokens that a sequence may have.
      num_layers: N; None: one layer, without an axis for it.
      dtype: the compute type.

    Raises:
      ConfigError: a size below 1.
    """
    check_at_least(1, "cache", batch=batch, capacity=capacity, num_layers=num_layers)

    def empty(entry: Any) -> Array:
        layers = () if num_layers is None else (num_layers,)
        return jnp.zeros((*layers, *jax.eval_shape(_rows, entry).shape), entry.dtype)

    slots_BC = jnp.zeros((batch, capacity), jnp.int32)
    entries = jax.tree.map(empty, _shapes(encoding, batch, capacity, dtype))
    return Cache(entries, slots_BC, slots_BC, jnp.zeros((), jnp.int32))


def attend_cached(
    q_BLHK: Array, cache: Cache, *, encoding: Encoding, layer: int | Array | None = None, window: int | None = None
) -> Array:
    """Causal attention of the L tokens that were entered last to all tokens in the cache.

    The last L rows of what `cope_jax.attention.attend` gives for the whole sequence.

    Args:
      q_BLHK: queries before rotation; the keys of the same tokens are in the cache.
      cache: keys and values.
      encoding: the position encoding.
      layer: which of the N; None: the cache is of one layer.
      window: keys that are `window` or more places away are hidden; None: none is.

    Returns:
      out_BLHK, in the type of the values; NaN where more tokens were entered than there are slots.
    """
    batch, length, heads, _ = q_BLHK.shape
    positions_BL, segment_ids_BL = cache.latest(length)
    rotated_BLHK, _ = encoding.rotate(q_BLHK, q_BLHK, positions_BL, positions_BL)
    rows = cache.entries
    if layer is not None:
        rows = jax.tree.map(lambda slots: jax.lax.dynamic_index_in_dim(slots, layer, keepdims=False), rows)
    shapes = _shapes(encoding, batch, cache.capacity, rows.k.dtype)
    entries = jax.tree.map(lambda rows, entry: _from_rows(rows, entry.shape), rows, shapes)
    places_C = jnp.arange(cache.capacity, dtype=jnp.int32)
    places_L = cache.filled - length + jnp.arange(length, dtype=jnp.int32)
    mask = Mask(places_L, places_C, segment_ids_BL, cache.segment_ids_BC, causal=True, window=window)
    inputs = Inputs(
        q=q_BLHK,
        rotated_q=rotated_BLHK,
        rotated_k=entries.k,
        v=entries.v,
        features=entries.features,
        q_positions=positions_BL,
        k_positions=cache.positions_BC,
        mask=mask,
        dropout_rate=0.0,
        dropout_key=None,
    )
    weights_BHLC = softmax_over(_logits(encoding, inputs, cache.filled), mask.dense())
    # The product in the form of the rows: any other would copy all values at every step.
    weights = weights_BHLC.astype(rows.v.dtype).reshape(rows.v.shape[0], -1, cache.capacity)
    return jnp.swapaxes(jnp.matmul(weights, rows.v).reshape(batch, heads, length, -1), 1, 2)


def _logits(encoding: Encoding, inputs: Inputs, filled: Array) -> Array:
    """The logits over all slots, logits_BHLC.

    For an encoding that settles all slots are first scored as if all rows had; then block after block, from the nearest
    on, is scored over until they have. So CoPE sums the gates of a few hundred keys, and not of all C.
    """
    carry, capacity = encoding.initial_carry(inputs.q), inputs.rotated_k.shape[1]
    content_BHLC, mask_B1LC = content_logits(inputs.rotated_q, inputs.rotated_k), inputs.mask.dense()
    size = min(BLOCK, capacity)

    def on(hook: Callable[..., Any], carry: PyTree, fresh: Array | None = None, start: Array | None = None) -> Any:
        def cut(x: Array, axis: int) -> Array:
            return x if start is None else jax.lax.dynamic_slice_in_dim(x, start, size, axis)

        mask_B1LM = cut(mask_B1LC, 3)
        features = jax.tree.map(lambda feature: cut(feature, 1), inputs.features)
        k, content, positions = cut(inputs.rotated_k, 1), cut(content_BHLC, 3), cut(inputs.k_positions, 1)
        mask_B1LM = mask_B1LM if fresh is None else mask_B1LM & fresh
        return hook(inputs.q, k, features, content, mask_B1LM, inputs.q_positions, positions, carry)

    if encoding.settled(carry) is None:
        return on(encoding.score, carry)[0]

    def unsettled(loop: tuple[Array, Array, PyTree]) -> Array:
        end, _, carry = loop
        return (end > 0) & ~jnp.all(jnp.asarray(encoding.settled(carry)))

    def score(loop: tuple[Array, Array, PyTree]) -> tuple[Array, Array, PyTree]:
        end, logits_BHLC, carry = loop
        start = jnp.maximum(end - size, 0)
        fresh_111M = (start + jnp.arange(size, dtype=jnp.int32) < end)[None, None, None]
        scored_BHLM, carry = on(encoding.score, carry, fresh_111M, start)
        old_BHLM = jax.lax.dynamic_slice_in_dim(logits_BHLC, start, size, axis=3)
        scored_BHLM = jnp.where(fresh_111M, scored_BHLM, old_BHLM)
        return start, jax.lax.dynamic_update_slice_in_dim(logits_BHLC, scored_BHLM, start, axis=3), carry

    last = jnp.minimum(filled, capacity)
    return jax.lax.while_loop(unsettled, score, (last, on(encoding.settled_score, carry), carry))[1]


def _shapes(encoding: Encoding, batch: int, length: int, dtype: Any) -> Entries:
    """The shapes and types of the entries of L tokens."""
    shape = encoding.shape
    x_BLD = jax.ShapeDtypeStruct((batch, length, shape.width), dtype)
    k_BLGK = jax.ShapeDtypeStruct((batch, length, shape.kv_heads, shape.head_dim), dtype)
    features = jax.eval_shape(lambda x_BLD, k_BLGK: encoding.key_features(x_BLD, k_BLGK, k_BLGK), x_BLD, k_BLGK)
    return Entries(k_BLGK, k_BLGK, features)


def _rows(x: Array) -> Array:
    """`[B, M, ..., K]` as `[B·…, M, K]`."""
    *rest, width = x.shape[2:] or (1,)
    x = x.reshape(*x.shape[:2], math.prod(rest), width)
    return jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], width)


def _from_rows(rows: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `_rows`."""
    batch, length, width = shape[0], shape[1], rows.shape[-1]
    return jnp.swapaxes(rows.reshape(batch, -1, length, width), 1, 2).reshape(shape)
