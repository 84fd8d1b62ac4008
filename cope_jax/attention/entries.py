"""What a cache keeps of each token, and the form in which its slots hold it."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cope_jax.encodings import Encoding
from cope_jax.errors import ConfigError
from cope_jax.typing import Array, PyTree


class Entries(NamedTuple):
    """What is kept of tokens: k_BMGK after rotation, v_BMGK, and the encoding's features, a tree of `[B, M, ...]`."""

    k: Any
    v: Any
    features: PyTree


def entry_shapes(encoding: Encoding, batch: int, length: int, dtype: Any) -> Entries:
    """The shapes and types of the entries of L tokens."""
    shape = encoding.shape
    x_BLD = jax.ShapeDtypeStruct((batch, length, shape.width), dtype)
    k_BLGK = jax.ShapeDtypeStruct((batch, length, shape.kv_heads, shape.head_dim), dtype)
    features = jax.eval_shape(lambda x_BLD, k_BLGK: encoding.key_features(x_BLD, k_BLGK, k_BLGK), x_BLD, k_BLGK)
    return Entries(k_BLGK, k_BLGK, features)


def rows_of(x: Array) -> Array:
    """`[B, M, ..., K]` as `[B·…, M, K]`."""
    *rest, width = x.shape[2:] or (1,)
    x = x.reshape(*x.shape[:2], math.prod(rest), width)
    return jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], width)


def from_rows(rows: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `rows_of`."""
    batch, length, width = shape[0], shape[1], rows.shape[-1]
    return jnp.swapaxes(rows.reshape(batch, -1, length, width), 1, 2).reshape(shape)


def check_fit(what: str, new: PyTree, slots: PyTree) -> None:
    """Raises ConfigError unless two trees of arrays have one structure, and each pair of leaves one shape and type.

    >>> check_fit("keys", jnp.zeros((1, 2)), jax.ShapeDtypeStruct((1, 3), jnp.float32))
    Traceback (most recent call last):
    ...
    cope_jax.errors.ConfigError: keys must be float32[1, 3] to fit the cache, got float32[1, 2]
    """

    def described(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", tree)

    found, wanted = described(new), described(slots)
    if found != wanted:
        raise ConfigError(f"{what} must be {wanted} to fit the cache, got {found}".replace("'", ""))
