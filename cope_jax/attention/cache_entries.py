"""The entries of a cache: keys, values and features of tokens, and checks that arrays fit them."""

import contextlib
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array, PyTree
from cope_jax.attention.blocks import head_major
from cope_jax.attention.checks import is_array, turned
from cope_jax.encodings import Encoding, Tokens
from cope_jax.errors import ConfigError
from cope_jax.registry import abridged


class CacheEntry(NamedTuple):
    """The cached keys (after rotation), values and features, as `[B, heads, M, ...]` or as rows
    (see `rows_of`).
    """

    k: Any
    v: Any
    features: PyTree


def entry_shapes(
    encoding: Encoding, batch: int, length: int, dtype: Any, value: Any = None
) -> tuple[CacheEntry, PyTree]:
    """Returns (the head-major entries of L tokens, the encoding's state after these tokens), as
    shapes and types.

    The last axis of `value` is the width of a value.
    """
    shape = encoding.shape
    x_BLD = jax.ShapeDtypeStruct((batch, length, shape.width), dtype)
    q_BLHK = jax.ShapeDtypeStruct((batch, length, shape.num_heads, shape.head_dim), dtype)
    k_BLGK = jax.ShapeDtypeStruct((batch, length, shape.kv_heads, shape.head_dim), dtype)

    v_BLGK = (
        k_BLGK
        if value is None
        else jax.ShapeDtypeStruct((*k_BLGK.shape[:3], value.shape[-1]), value.dtype)
    )

    def entries(tokens: Tokens) -> tuple[CacheEntry, PyTree]:
        features, state = encoding.checked_features(tokens, None)
        rotated_BLGK = turned(encoding, "rotate_keys", tokens.k, features, tokens.positions)
        return jax.tree.map(head_major, CacheEntry(rotated_BLGK, tokens.v, features)), state

    positions_1L = jax.ShapeDtypeStruct((1, length), jnp.int32)
    arrays: list[Any] = [x_BLD, q_BLHK, k_BLGK, v_BLGK, positions_1L]
    shapes: tuple[CacheEntry, PyTree] = jax.eval_shape(entries, Tokens(*arrays))
    return shapes


def rows_of(x: Array) -> Array:
    """Reshapes `[B, heads, M, ...]` to rows `[B·heads, M, width]`."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2], math.prod(x.shape[3:]))


def checked_layer(layer: Any, num_layers: int | None) -> Any:
    """Returns the index of a layer, as an int or traced int32; None stays in a cache of one layer.

    Raises:
      ConfigError: the index is not an integer from 0 to N−1, or None belongs there. The range of an
        index that JAX traces is not known: see `out_of_range`.
    """
    if num_layers is None and layer is not None:
        raise ConfigError(
            f"layer={abridged(layer)} does not fit a cache of one layer: "
            "omit layer, or create the cache with num_layers"
        )
    index = _index(layer)
    known = index is None or isinstance(index, int)
    if num_layers is not None and known and (index is None or not 0 <= index < num_layers):
        raise ConfigError(
            f"layer={abridged(layer if index is None else index)} does not fit a cache of {num_layers} layers: "
            f"give a layer from 0 to {num_layers - 1}"
        )
    return index


def _index(layer: Any) -> Any:
    """Returns an integer as an int, or as int32 if JAX traces it; None if it is not an integer."""
    if isinstance(layer, bool):
        return None
    if not isinstance(layer, jax.core.Tracer):
        with contextlib.suppress(TypeError):
            return operator.index(layer)
        return None
    if layer.shape or not jnp.issubdtype(layer.dtype, jnp.integer):
        return None
    index = layer.astype(jnp.int32)
    wraps = jnp.iinfo(layer.dtype).max > jnp.iinfo(jnp.int32).max
    return jnp.where(index.astype(layer.dtype) == layer, index, -1) if wraps else index


def out_of_range(layer: Any, num_layers: int | None) -> Any:
    """Returns whether a layer that JAX traces is out of range; False where this is known already."""
    if num_layers is None or isinstance(layer, int):
        return False
    return (layer < 0) | (layer >= num_layers)


def checked_type(name: str, dtype: Any) -> Any:
    """Returns a floating-point type."""
    known = None
    with contextlib.suppress(TypeError, ValueError):
        known = None if dtype is None else jnp.dtype(dtype)
    if known is None or not jnp.issubdtype(known, jnp.floating):
        given = abridged(dtype) if known is None else known
        raise ConfigError(f"{name} must be a floating-point type, such as 'float32', got {given}")
    return known


def check_heads(**arrays: Any) -> None:
    """Raises ConfigError unless all are arrays of floating-point numbers, [B, L, heads, width]."""
    for name, x in arrays.items():
        if not is_array(x):
            raise ConfigError(
                f"{name} must be an array, got {abridged(x)} of type {type(x).__name__}"
            )
        if x.ndim != 4:
            raise ConfigError(f"{name} must have 4 axes, [B, L, heads, width], got {list(x.shape)}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ConfigError(f"{name} must be floating-point numbers, got {x.dtype}: convert them")


def check_queries(q_BLHK: Array, encoding: Encoding, batch: int, length: int) -> None:
    """Raises ConfigError unless there is a query of each head for each of L tokens."""
    shape = (batch, length, encoding.shape.num_heads, encoding.shape.head_dim)
    check_fit("queries", q_BLHK, jax.ShapeDtypeStruct(shape, q_BLHK.dtype))


def check_fit(name: str, new: PyTree, slots: PyTree) -> None:
    """Raises ConfigError unless two trees of arrays have the same structure, shapes and types.

    >>> check_fit("keys", jnp.zeros((1, 2)), jax.ShapeDtypeStruct((1, 3), jnp.float32))
    Traceback (most recent call last):
    ...
    cope_jax.errors.ConfigError: keys must be float32[1, 3] to fit the cache, got float32[1, 2]
    """

    def described(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", tree)

    given, wanted = described(new), described(slots)
    if given != wanted:
        raise ConfigError(f"{name} must be {wanted} to fit the cache, got {given}".replace("'", ""))
