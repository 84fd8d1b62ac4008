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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.attention.entries import Entries, check_fit, entry_shapes, from_rows, rows_of
from cope_jax.attention.full import softmax_over
from cope_jax.attention.inputs import Inputs
from cope_jax.attention.mask import Mask
from cope_jax.attention.nearest_first import logits_over_slots
from cope_jax.encodings import Encoding
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least
from cope_jax.typing import Array, PyTree


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

        Raises:
          ConfigError: arrays, an encoding or a layer that do not fit the cache, or tokens that were not entered. A
            compiled program, which cannot know the latter, turns what is attended to into NaN instead.
        """
        _shapes_of(self, encoding, layer)
        length = jnp.shape(k_BLGK)[1]
        shapes = entry_shapes(encoding, len(self.positions_BC), length, self.entries.k.dtype)
        check_fit("keys", k_BLGK, shapes.k)
        check_fit("values", v_BLGK, shapes.v)
        features = encoding.key_features(None, k_BLGK, v_BLGK) if features is None else features
        check_fit("features", features, shapes.features)
        positions_BL, _ = self.latest(length)
        _, rotated_BLGK = encoding.rotate(k_BLGK, k_BLGK, positions_BL, positions_BL)
        # Without slots of its own the write would silently hit the last ones: NaN there reaches every query.
        astray = (self.filled > self.capacity) | (self.filled < length)
        v_BLGK = jnp.where(astray, jnp.full((), jnp.nan, v_BLGK.dtype), v_BLGK)

        def write(slots: Array, new: Array) -> Array:
            rows, zero = rows_of(new), jnp.zeros((), jnp.int32)
            where = (zero, self.filled - length, zero)
            if layer is None:
                return jax.lax.dynamic_update_slice(slots, rows, where)
            return jax.lax.dynamic_update_slice(slots, rows[None], (jnp.asarray(layer, jnp.int32), *where))

        new = Entries(rotated_BLGK, v_BLGK, features)
        return dataclasses.replace(self, entries=jax.tree.map(write, self.entries, new))

    def latest(self, length: int) -> tuple[Array, Array]:
        """(positions_BL, segment_ids_BL) of the L tokens that were entered last; ConfigError: fewer were."""
        if not isinstance(self.filled, jax.core.Tracer) and self.filled < length:
            raise ConfigError(f"{length} tokens are used of a cache with {self.filled}: enter them first")
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
        return jnp.zeros((*layers, *jax.eval_shape(rows_of, entry).shape), entry.dtype)

    entries = jax.tree.map(empty, entry_shapes(encoding, batch, capacity, dtype))
    # Two arrays, for a buffer that is there twice cannot be donated.
    positions_BC, segment_ids_BC = (jnp.zeros((batch, capacity), jnp.int32) for _ in range(2))
    return Cache(entries, positions_BC, segment_ids_BC, jnp.zeros((), jnp.int32))


def attend_cached(
    q_BLHK: Array, cache: Cache, *, encoding: Encoding, layer: int | Array | None = None, window: int | None = None
) -> Array:
    """Causal attention of the L tokens that were entered last to all tokens in the cache.

    The last L rows of what `cope_jax.attention.attend` gives for the whole sequence. For encodings that settle a loop
    of unknown length finds them, so there is no reverse-mode gradient: train with `attend`.

    Args:
      q_BLHK: queries before rotation; the keys of the same tokens are in the cache.
      cache: keys and values.
      encoding: the position encoding.
      layer: which of the N; None: the cache is of one layer.
      window: keys that are `window` or more places away are hidden; None: none is.

    Returns:
      out_BLHK, in the type of the values; NaN where more tokens were entered than there are slots.

    Raises:
      ConfigError: queries, an encoding or a layer that do not fit the cache, or fewer tokens in it than queries.
    """
    shapes = _shapes_of(cache, encoding, layer)
    batch, length, heads, _ = q_BLHK.shape
    wanted = (len(cache.positions_BC), length, encoding.shape.num_heads, encoding.shape.head_dim)
    check_fit("queries", q_BLHK, jax.ShapeDtypeStruct(wanted, q_BLHK.dtype))
    positions_BL, segment_ids_BL = cache.latest(length)
    rotated_BLHK, _ = encoding.rotate(q_BLHK, q_BLHK, positions_BL, positions_BL)
    rows = cache.entries
    if layer is not None:
        rows = jax.tree.map(lambda slots: jax.lax.dynamic_index_in_dim(slots, layer, keepdims=False), rows)
    entries = jax.tree.map(lambda rows, entry: from_rows(rows, entry.shape), rows, shapes)
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
        drop=None,
    )
    weights_BHLC = softmax_over(logits_over_slots(encoding, inputs, cache.filled), mask.dense())
    # The product in the form of the rows: any other would copy all values at every step.
    weights = weights_BHLC.astype(rows.v.dtype).reshape(rows.v.shape[0], -1, cache.capacity)
    return jnp.swapaxes(jnp.matmul(weights, rows.v).reshape(batch, heads, length, -1), 1, 2)


def _shapes_of(cache: Cache, encoding: Encoding, layer: int | Array | None) -> Entries:
    """The shapes of all entries of one layer; ConfigError if it or the encoding is none of this cache."""
    num_layers = len(cache.entries.k) if cache.entries.k.ndim == 4 else None
    if num_layers is None and layer is not None:
        raise ConfigError(f"layer={layer} of a cache of one layer: leave it out, or create the cache with num_layers")
    if num_layers is not None and (layer is None or (isinstance(layer, int) and not 0 <= layer < num_layers)):
        raise ConfigError(f"layer={layer} of a cache of {num_layers} layers: give one from 0 to {num_layers - 1}")
    shapes = entry_shapes(encoding, len(cache.positions_BC), cache.capacity, cache.entries.k.dtype)
    slots = jax.tree.map(lambda slots: jax.ShapeDtypeStruct(slots.shape[-3:], slots.dtype), cache.entries)
    check_fit("what this encoding keeps", jax.eval_shape(lambda shapes: jax.tree.map(rows_of, shapes), shapes), slots)
    return shapes
