"""A cache of the keys, values and features of the tokens read so far, for generation token by
token.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.attention import checks
from cope_jax.attention.blocks import head_major
from cope_jax.attention.cache_entries import (
    CacheEntry,
    check_fit,
    check_heads,
    check_queries,
    checked_layer,
    checked_type,
    entry_shapes,
    out_of_range,
    rows_of,
)
from cope_jax.encodings import Encoding, Tokens
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least, checked


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The tokens read so far, in C slots, for one attention layer or for all N layers of a model.

    Slots are filled in order, so a token's slot is its index in the sequence, and causality hides
    the empty slots. The number of filled slots is data, so one compiled step serves every length of
    the context.

    Attributes:
      entries: a `CacheEntry` of rows, each array `[B·heads, C, width]`. Rows are read without a
        copy and written in place. In a cache for N layers, arrays of `entries` and `state` have N
        as their first axis.
      state: the state that `Encoding.features` returned for the tokens entered last, a tree of
        arrays `[B, ...]`.
      positions_BC: the position of each token, int32, or float32 once such positions were entered.
      segment_ids_BC: int32; a token sees only tokens of its own segment. Padding is a separate
        segment.
      filled: int32 scalar, the number of slots in use.
      windows: what layers keep of the last tokens besides, such as the inputs of short
        convolutions: a tree of arrays `[B, ...]`, in a cache for N layers `[N, B, ...]`.
    """

    entries: CacheEntry
    state: PyTree
    positions_BC: Array
    segment_ids_BC: Array
    filled: Array
    windows: PyTree = dataclasses.field(default_factory=dict)

    @property
    def capacity(self) -> int:
        return self.positions_BC.shape[1]

    @property
    def num_layers(self) -> int | None:
        """N, or None if the cache is for one layer."""
        return len(self.entries.k) if self.entries.k.ndim == 4 else None

    def enter(self, positions_BL: Any, segment_ids_BL: Any = None) -> "Cache":
        """Reserves the next L slots for new tokens; each layer must then `append` the keys of these
        tokens.

        Args:
          positions_BL: integers or real numbers, `[B, L]` or `[1, L]`. The first real numbers
            change the type of the cache, so enter them before a compiled loop.
          segment_ids_BL: integers, `[B, L]` or `[1, L]`. If None, all new tokens are in segment 0.

        Raises:
          ConfigError: positions or segments have another shape or type, or do not fit into 32 bits;
            or there are more tokens than free slots. For tokens without a slot, attention in a
            compiled program gives NaN instead.
        """
        positions_BC, dtype = self.positions_BC, accumulator_dtype(self.entries.k.dtype)
        batch, positions_BL = len(positions_BC), checks.as_array("positions_BL", positions_BL)
        length = positions_BL.shape[-1] if positions_BL.ndim else 1
        positions_BL = checks.checked_positions("positions_BL", positions_BL, batch, length, dtype)
        segment_ids_BL = checks.checked_integers("segment_ids_BL", segment_ids_BL, batch, length)
        start = 0 if isinstance(self.filled, jax.core.Tracer) else int(self.filled)
        if start + length > self.capacity:
            raise ConfigError(
                f"a cache of capacity {self.capacity} cannot hold {start + length} tokens: create a larger cache"
            )

        if positions_BL.dtype != positions_BC.dtype:
            positions_BL = checks.as_real("positions_BL", positions_BL, dtype)
            positions_BC = positions_BC.astype(dtype)

        def write(slots_BC: Array, new_BL: Any) -> Array:
            new_BL = jnp.broadcast_to(jnp.asarray(new_BL, slots_BC.dtype), (batch, length))
            return jax.lax.dynamic_update_slice_in_dim(slots_BC, new_BL, self.filled, axis=1)

        if segment_ids_BL is None:
            segment_ids_BL = np.zeros((1, length), np.int32)
        return dataclasses.replace(
            self,
            positions_BC=write(positions_BC, positions_BL),
            segment_ids_BC=write(self.segment_ids_BC, segment_ids_BL),
            filled=self.filled + length,
        )

    def append(
        self,
        q_BLHK: Array,
        k_BLGK: Array,
        v_BLGK: Array,
        *,
        encoding: Encoding,
        x_BLD: Array | None = None,
        layer: int | Array | None = None,
    ) -> "Cache":
        """Writes one layer's keys, values and encoding features of the L tokens that were entered
        last.

        Args:
          q_BLHK: queries before rotation.
          k_BLGK: keys before rotation.
          v_BLGK: values.
          encoding: the position encoding.
          x_BLD: the layer's input, for an encoding whose features need it.
          layer: index of the layer, from 0 to N−1, or None if the cache is for one layer.

        Raises:
          ConfigError: the arrays, the encoding or the layer do not fit the cache, or the tokens
            were not entered. For tokens that were not entered, and for a layer that JAX traces,
            attention in a compiled program gives NaN instead.
        """
        layer = checked_layer_of(self, encoding, layer)
        check_heads(queries=q_BLHK, keys=k_BLGK, values=v_BLGK)
        length = k_BLGK.shape[1]
        batch, dtype, shape = len(self.positions_BC), self.entries.k.dtype, encoding.shape
        shapes, _ = entry_shapes(encoding, batch, length, dtype, self.entries.v)
        before_rotation = jax.ShapeDtypeStruct(
            (batch, length, shape.kv_heads, shape.head_dim), dtype
        )
        check_fit("keys", k_BLGK, before_rotation)
        check_fit("values", v_BLGK, jax.eval_shape(head_major, shapes.v))
        check_queries(q_BLHK, encoding, batch, length)
        x_BLD = checks.checked_input(x_BLD, batch, length, "x_BLD", "these tokens")
        positions_BL, segment_ids_BL = self.latest(length)
        before = self._of_layer(self.state, layer)
        tokens = Tokens(x_BLD, q_BLHK, k_BLGK, v_BLGK, positions_BL, segment_ids_BL)
        features, state = encoding.checked_features(tokens, before)
        rotated_BLGK = encoding.rotate_keys(k_BLGK, features, positions_BL)
        v_BLGK = checks.turned(encoding, "rotate_values", v_BLGK, features, positions_BL)
        # Out of bounds, the write would silently go to slots of other tokens: NaN there reaches
        # every query.
        out_of_bounds = (self.filled > self.capacity) | (self.filled < length)
        out_of_bounds |= out_of_range(layer, self.num_layers)
        v_BLGK = jnp.where(out_of_bounds, jnp.full((), jnp.nan, v_BLGK.dtype), v_BLGK)

        def write(slots: Array, new: Array) -> Array:
            start = (jnp.zeros((), jnp.int32), self.filled - length, jnp.zeros((), jnp.int32))
            if layer is None:
                return jax.lax.dynamic_update_slice(slots, new, start)
            return jax.lax.dynamic_update_slice(
                slots, new[None], (jnp.asarray(layer, jnp.int32), *start)
            )

        new = jax.tree.map(
            lambda x: rows_of(head_major(x)), CacheEntry(rotated_BLGK, v_BLGK, features)
        )
        entries = jax.tree.map(write, self.entries, new)
        return dataclasses.replace(
            self, entries=entries, state=jax.tree.map(_keeper(layer), self.state, state)
        )

    def entries_of(
        self, encoding: Encoding, layer: int | Array | None, length: int
    ) -> tuple["CacheEntry", "CacheEntry"]:
        """Returns (entries of all slots, entries of the `length` tokens entered last) of one layer,
        head-major.
        """
        rows, batch = self._of_layer(self.entries, layer), len(self.positions_BC)
        last = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, self.filled - length, length, axis=1), rows
        )

        def shaped(rows: CacheEntry, tokens: int) -> CacheEntry:
            shapes, _ = entry_shapes(encoding, batch, tokens, rows.k.dtype, rows.v)
            return jax.tree.map(lambda x, like: x.reshape(like.shape), rows, shapes)

        return shaped(rows, self.capacity), shaped(last, length)

    def windows_of(self, layer: int | Array | None) -> PyTree:
        """Returns the windows of one layer."""
        return self._of_layer(self.windows, checked_layer(layer, self.num_layers))

    def with_windows(self, windows: PyTree, layer: int | Array | None) -> "Cache":
        """Returns the cache with the windows of a layer after the tokens entered last."""
        keep = _keeper(checked_layer(layer, self.num_layers))
        return dataclasses.replace(self, windows=jax.tree.map(keep, self.windows, windows))

    def _of_layer(self, tree: PyTree, layer: int | Array | None) -> PyTree:
        if layer is None:
            return tree
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), tree)

    def latest(self, length: int) -> tuple[Array, Array]:
        """Returns (positions_BL, segment_ids_BL) of the L tokens entered last; ConfigError if fewer
        were entered, or there are fewer slots.
        """
        if length > self.capacity:
            raise ConfigError(
                f"a cache of capacity {self.capacity} cannot hold {length} tokens: create a larger cache"
            )
        if not isinstance(self.filled, jax.core.Tracer) and self.filled < length:
            raise ConfigError(
                f"the cache has {self.filled} tokens, but {length} are needed: enter the missing tokens first"
            )
        start = self.filled - length
        return (
            jax.lax.dynamic_slice_in_dim(self.positions_BC, start, length, axis=1),
            jax.lax.dynamic_slice_in_dim(self.segment_ids_BC, start, length, axis=1),
        )


def _keeper(layer: int | Array | None) -> Callable[[Array, Array], Array]:
    """Returns the function that writes what one layer keeps."""

    def keep(kept: Array, new: Array) -> Array:
        new = new.astype(kept.dtype)
        return new if layer is None else jax.lax.dynamic_update_index_in_dim(kept, new, layer, 0)

    return keep


def create_cache(
    encoding: Encoding,
    *,
    batch: int,
    capacity: int,
    num_layers: int | None = None,
    dtype: Any = jnp.float32,
    value: Any = None,
    windows: PyTree = None,
) -> Cache:
    """Creates an empty cache for keys and values of type `dtype`, and for the encoding's features.

    Args:
      encoding: the position encoding; its `shape` has the numbers of heads and the head width.
      batch: B, the number of sequences.
      capacity: C, the maximum number of tokens in a sequence.
      num_layers: N, the number of layers. If None, the cache is for one layer, and its arrays have
        no layer axis.
      dtype: the compute type.
      value: the width and type of one head's value, as an array or `jax.ShapeDtypeStruct`; None if
        they are those of a key.
      windows: the windows of one layer, as shapes and types. None means that there are none.

    Raises:
      ConfigError: a size is not an integer of at least 1, the type is not a floating-point type, or
        there is no encoding.
    """
    checks.check_is_encoding(encoding)
    batch, capacity = checked(batch, int, "cache.batch"), checked(capacity, int, "cache.capacity")
    num_layers = checked(num_layers, int | None, "cache.num_layers")
    check_at_least(1, "cache", batch=batch, capacity=capacity, num_layers=num_layers)
    dtype = checked_type("cache.dtype", dtype)

    def empty(x: Any) -> Array:
        return jnp.zeros((*(() if num_layers is None else (num_layers,)), *x.shape), x.dtype)

    shapes, state = entry_shapes(encoding, batch, capacity, dtype, value)
    rows = jax.eval_shape(lambda shapes: jax.tree.map(rows_of, shapes), shapes)
    entries, state, windows = jax.tree.map(empty, (rows, state, {} if windows is None else windows))
    # Two arrays, because one buffer in two places cannot be donated.
    positions_BC, segment_ids_BC = (jnp.zeros((batch, capacity), jnp.int32) for _ in range(2))
    return Cache(entries, state, positions_BC, segment_ids_BC, jnp.zeros((), jnp.int32), windows)


def checked_layer_of(cache: Cache, encoding: Encoding, layer: Any) -> Any:
    """Returns the layer as `checked_layer`; ConfigError if the encoding does not fit this cache."""
    checks.check_is_encoding(encoding)
    layer = checked_layer(layer, cache.num_layers)
    shapes, _ = entry_shapes(
        encoding, len(cache.positions_BC), cache.capacity, cache.entries.k.dtype, cache.entries.v
    )
    slots = jax.tree.map(
        lambda slots: jax.ShapeDtypeStruct(slots.shape[-3:], slots.dtype), cache.entries
    )
    check_fit(
        "entries of this encoding",
        jax.eval_shape(lambda shapes: jax.tree.map(rows_of, shapes), shapes),
        slots,
    )
    return layer
