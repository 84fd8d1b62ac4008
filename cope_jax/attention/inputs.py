"""Prepares the inputs of every attention implementation: checks shapes, rotates, and adds positions and a mask."""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.array_types import Array, PyTree
from cope_jax.attention.mask import Mask
from cope_jax.encodings import Encoding, Pairs, Tokens
from cope_jax.errors import ConfigError
from cope_jax.ops.dropout import Dropout
from cope_jax.ops.grouped_matmul import content_logits
from cope_jax.registry import abridged, checked


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The prepared arguments of `attend`, with positions filled in, queries and keys rotated, and arrays head-major.

    Attributes:
      q: q_BHLK before rotation.
      rotated_q: q_BHLK after rotation.
      rotated_k: k_BGMK after rotation.
      v: v_BGMK.
      q_v: the values v_BGLK of the queries' own tokens if the encoding's sink uses them; else None.
      q_features: the encoding's features of the queries' tokens, `[B, heads, L, ...]`.
      k_features: the encoding's features of the keys' tokens, `[B, heads, M, ...]`.
      q_positions, k_positions: `[B, L]` and `[B, M]`; B may be 1.
      mask: which keys each query may see.
      drop: dropout on the attention weights, or None.
    """

    q: Array
    rotated_q: Array
    rotated_k: Array
    v: Array
    q_v: Array | None
    q_features: PyTree
    k_features: PyTree
    q_positions: Array
    k_positions: Array
    mask: Mask
    drop: Dropout | None

    def pairs(self) -> Pairs:
        """Returns all pairs as one block."""
        return Pairs(
            q=self.q,
            k=self.rotated_k,
            v=self.v,
            q_features=self.q_features,
            k_features=self.k_features,
            logits=content_logits(self.rotated_q, self.rotated_k),
            mask=self.mask.dense(),
            q_positions=self.q_positions,
            k_positions=self.k_positions,
        )


def prepare(
    q_BLHK: Array,
    k_BMGK: Array,
    v_BMGK: Array,
    *,
    encoding: Encoding,
    features: PyTree | None = None,
    embedded: bool = False,
    q_positions: Any = None,
    k_positions: Any = None,
    q_segment_ids: Array | None = None,
    k_segment_ids: Array | None = None,
    mask: Any = None,
    causal: bool = True,
    window: int | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
) -> Inputs:
    """Checks the arguments of `attend`, and calls the encoding's `rotate`.

    If no features are given, it also calls the encoding's `features`.
    """
    _check_shapes(q_BLHK, k_BMGK, v_BMGK)
    if not isinstance(encoding, Encoding):
        raise ConfigError(f"encoding={abridged(encoding)} is no encoding: create one with cope_jax.encodings.create")
    _check_encoding(encoding, q_BLHK, k_BMGK)
    check_embedded(encoding, checked(embedded, bool, "embedded"))
    length, keys = q_BLHK.shape[1], k_BMGK.shape[1]
    q_indices, k_indices = np.arange(keys - length, keys, dtype=np.int32), np.arange(keys, dtype=np.int32)
    q_positions = q_indices[None] if q_positions is None else q_positions
    k_positions = k_indices[None] if k_positions is None else k_positions
    if (q_segment_ids is None) != (k_segment_ids is None):
        raise ConfigError("q_segment_ids and k_segment_ids belong together: give both, or neither")
    q_positions, q_segment_ids, k_positions, k_segment_ids = (
        None if ids is None else _integers(name, ids, (len(q_BLHK), size))
        for name, ids, size in [
            ("q_positions", q_positions, length),
            ("q_segment_ids", q_segment_ids, length),
            ("k_positions", k_positions, keys),
            ("k_segment_ids", k_segment_ids, keys),
        ]
    )
    given = None if mask is None else _check_mask(mask, (len(q_BLHK), 1, length, keys))
    if given is not None and not encoding.traits.takes_masks:
        raise ConfigError("this encoding needs an unbroken run of keys: leave mask out, or choose another encoding")
    dropout_rate = checked(dropout_rate, float, "dropout_rate")
    if not 0 <= dropout_rate < 1 - 2**-32:  # a weight is dropped by 32 random bits
        raise ConfigError(f"dropout_rate must be at least 0 and less than 1 - 2**-32, got {dropout_rate}")
    if dropout_key is not None and not is_key(dropout_key):
        raise ConfigError(f"dropout_key must be a key from jax.random.key, got {abridged(dropout_key)}")
    window = checked(window, int | None, "window")
    if window is not None and window < 1:
        raise ConfigError(f"window must be an integer of at least 1, got {window}")
    if any(not is_array(f) or f.ndim < 3 or f.shape[1] != keys for f in jax.tree.leaves(features)):
        raise ConfigError(f"features must be arrays [B, {keys}, heads, ...], the first result of encoding.features")
    if features is None:
        tokens = Tokens(None, q_BLHK, k_BMGK, v_BMGK, k_positions, k_segment_ids)
        features = encoding.features(tokens, None)[0]
    if length > keys and (jax.tree.leaves(features) or encoding.traits.sink_value == "own"):
        raise ConfigError(
            f"this encoding needs at least as many keys as queries, got {length} queries and {keys} keys: give the "
            "keys of the queries' own tokens"
        )
    if length != keys and not encoding.traits.splits_queries:
        raise ConfigError(
            f"this encoding couples the queries, got {length} queries and {keys} keys: give the queries of all keys"
        )
    q_features = jax.tree.map(lambda feature: feature[:, keys - length :], features)
    rotated_q = encoding.rotate(q_BLHK, q_features, q_positions)
    rotated_k = encoding.rotate_keys(k_BMGK, features, k_positions)
    q, rotated_q, rotated_k, v = map(head_major, (q_BLHK, rotated_q, rotated_k, v_BMGK))
    q_v = v[:, :, keys - length :] if encoding.traits.sink_value == "own" else None
    causal = checked(causal, bool, "causal")
    visible = Mask(q_indices, k_indices, q_segment_ids, k_segment_ids, given, causal, window)
    drop = Dropout.create(dropout_key, dropout_rate, q_BLHK.shape[0], q_BLHK.shape[2])
    q_features, k_features = jax.tree.map(head_major, (q_features, features))
    return Inputs(q, rotated_q, rotated_k, v, q_v, q_features, k_features, q_positions, k_positions, visible, drop)


def is_array(x: Any) -> bool:
    """Whether x is an array of JAX, also while it is traced, or of NumPy."""
    return isinstance(x, jax.Array | np.ndarray)


def is_key(x: Any) -> bool:
    """Whether x is one random key, of `jax.random.key` or `jax.random.PRNGKey`."""
    if not isinstance(x, jax.Array):
        return False
    return x.shape == () if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else (x.shape, x.dtype) == ((2,), jnp.uint32)


def _array(name: str, x: Any) -> Any:
    """Returns an array, or a list as an array; ConfigError: x is neither."""
    if isinstance(x, list | tuple):
        with contextlib.suppress(ValueError):  # lists of different lengths
            x = np.asarray(x)
    if not is_array(x):
        raise ConfigError(f"{name} must be an array, got {abridged(x)} of type {type(x).__name__}")
    return x


def _integers(name: str, ids: Any, shape: tuple[int, int]) -> Any:
    """Returns int32 `[B, L]` or `[1, L]`: differences of unsigned or shorter integers would overflow."""
    ids = _array(name, ids)
    if ids.ndim != 2 or ids.shape[0] not in (1, shape[0]) or ids.shape[1] != shape[1]:
        raise ConfigError(f"{name} must have shape {list(shape)}, got {list(ids.shape)}")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ConfigError(f"{name} must be integers, got {ids.dtype}")
    if isinstance(ids, np.ndarray) and ids.size and not -(2**31) <= int(ids.min()) <= int(ids.max()) < 2**31:
        raise ConfigError(f"{name} must fit into 32 bits, got {ids.min()} to {ids.max()}")
    return ids.astype(np.int32)


def head_major(x: Array) -> Array:
    """Swaps the axes of tokens and heads: [B, M, heads, ...] becomes [B, heads, M, ...], or the reverse."""
    return jnp.swapaxes(x, 1, 2)


def check_embedded(encoding: Encoding, embedded: bool) -> None:
    """Raises ConfigError if the encoding acts on the input embeddings and `embedded` is False."""
    if encoding.traits.embeds_input and not embedded:
        raise ConfigError(
            "this encoding acts on the input embeddings, which attention does not see: call encoding.embed(x, "
            "positions) before the first layer, and pass embedded=True"
        )


def _check_mask(mask: Any, shape: tuple[int, int, int, int]) -> Array:
    """Checks the mask and broadcasts its last axis; other axes of size 1 stay, because they save memory."""
    mask = _array("mask", mask)
    if mask.dtype != bool:
        raise ConfigError(f"mask must be boolean, True where a query may see a key, got {mask.dtype}")
    if mask.ndim != 4 or any(size not in (1, whole) for size, whole in zip(mask.shape, shape, strict=True)):
        raise ConfigError(
            f"mask must have shape {list(shape)}, where any axis may have size 1, got {list(mask.shape)}: for one of "
            "[L, M] give mask[None, None]"
        )
    return jnp.broadcast_to(mask, (*mask.shape[:3], shape[3]))


def _check_shapes(q_BLHK: Array, k_BMGK: Array, v_BMGK: Array) -> None:
    for name, x in (("q", q_BLHK), ("k", k_BMGK), ("v", v_BMGK)):
        if not is_array(x):
            raise ConfigError(f"{name} must be an array, got {abridged(x)} of type {type(x).__name__}")
    shapes = f"got q {list(q_BLHK.shape)}, k {list(k_BMGK.shape)}, v {list(v_BMGK.shape)}"
    if not q_BLHK.ndim == k_BMGK.ndim == v_BMGK.ndim == 4:
        raise ConfigError(f"attend needs 4 axes each, q [B, L, H, K] and k, v [B, M, G, K], but {shapes}")
    for name, array in (("q", q_BLHK), ("k", k_BMGK), ("v", v_BMGK)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ConfigError(f"attend needs floating-point numbers, but {name} has {array.dtype}: convert {name}")
    same_keys = k_BMGK.shape[:3] == v_BMGK.shape[:3]
    if q_BLHK.shape[0] != k_BMGK.shape[0] or q_BLHK.shape[3] != k_BMGK.shape[3] or not same_keys:
        raise ConfigError(
            "q and k must have the same batch size and head width, and k and v must have the same batch size, number "
            f"of keys and number of heads, but {shapes}"
        )
    if q_BLHK.shape[2] % k_BMGK.shape[2]:
        raise ConfigError(
            f"the number of query heads must be a multiple of the number of key/value heads, but {shapes}"
        )


def _check_encoding(encoding: Encoding, q_BLHK: Array, k_BMGK: Array) -> None:
    shape = encoding.shape
    built, given = (shape.num_heads, shape.kv_heads, shape.head_dim), (q_BLHK.shape[2], *k_BMGK.shape[2:])
    if built != given:
        swapped = q_BLHK.shape[1] == shape.num_heads
        raise ConfigError(
            f"the encoding was built for num_heads, num_kv_heads, head_dim = {built}, but q and k have {given}: "
            + ("swap two axes, attend takes [B, L, H, K]" if swapped else "create it with the sizes of q and k")
        )
