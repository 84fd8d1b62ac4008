"""Checks of the arguments of attention: what is wrong is one line that says what to do."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.encodings import Encoding
from cope_jax.errors import ConfigError
from cope_jax.registry import abridged, checked


def is_array(x: Any) -> bool:
    """Returns whether x is an array of JAX, also while it is traced, or of NumPy."""
    return isinstance(x, jax.Array | np.ndarray)


def check_arrays(q_BLHK: Array, k_BMGK: Array, v_BMGK: Array) -> None:
    """Raises ConfigError unless queries, keys and values fit each other."""
    arrays = {"q": q_BLHK, "k": k_BMGK, "v": v_BMGK}
    for name, x in arrays.items():
        if not is_array(x):
            torch = type(x).__module__ == "torch"
            raise ConfigError(
                f"{name} must be an array, got {abridged(x)} of type {type(x).__name__}"
                + torch * ": use cope_jax.torch.attend"
            )
    shapes = f"got q {list(q_BLHK.shape)}, k {list(k_BMGK.shape)}, v {list(v_BMGK.shape)}"
    if not q_BLHK.ndim == k_BMGK.ndim == v_BMGK.ndim == 4:
        raise ConfigError(
            f"attend needs 4 axes each, q [B, L, H, K] and k, v [B, M, G, K], but {shapes}"
        )
    for name, x in arrays.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ConfigError(
                f"attend needs floating-point numbers, but {name} has {x.dtype}: convert {name}"
            )
    same_keys = k_BMGK.shape[:3] == v_BMGK.shape[:3]
    if q_BLHK.shape[0] != k_BMGK.shape[0] or q_BLHK.shape[3] != k_BMGK.shape[3] or not same_keys:
        raise ConfigError(
            "q and k must have the same batch size and head width, and k and v must have the same batch size, number "
            f"of keys and number of heads, but {shapes}"
        )
    if not k_BMGK.shape[2]:
        raise ConfigError(f"attend needs at least one head, but {shapes}: give keys with heads")
    if q_BLHK.shape[2] % k_BMGK.shape[2]:
        raise ConfigError(
            f"the number of query heads must be a multiple of the number of key/value heads, but {shapes}"
        )


def check_is_encoding(encoding: Any) -> None:
    """Raises ConfigError unless this is an encoding: its name, for example, is not."""
    if not isinstance(encoding, Encoding):
        raise ConfigError(
            f"encoding must be an encoding of cope_jax.encodings.create, got {abridged(encoding)}"
        )


def check_encoding(encoding: Encoding, q_BLHK: Array, k_BMGK: Array, embedded: bool) -> None:
    """Raises ConfigError unless this is an encoding for the heads of q and k; see also
    `check_embedded`.
    """
    check_is_encoding(encoding)
    shape = encoding.shape
    built, given = (
        (shape.num_heads, shape.kv_heads, shape.head_dim),
        (q_BLHK.shape[2], *k_BMGK.shape[2:]),
    )
    if built != given:
        swapped = q_BLHK.shape[1] == shape.num_heads
        raise ConfigError(
            f"the encoding was built for num_heads, num_kv_heads, head_dim = {built}, but q and k have {given}: "
            + (
                "swap two axes, attend takes [B, L, H, K]"
                if swapped
                else "create it with the sizes of q and k"
            )
        )
    wide = {str(x.dtype) for x in jax.tree.leaves(nnx.state(encoding)) if _is_wide(x)}
    if wide and not jax.config.read("jax_enable_x64"):
        raise ConfigError(
            f"the encoding has parameters of type {', '.join(sorted(wide))}, which needs 64-bit JAX: "
            "set JAX_ENABLE_X64=1, or convert them to float32"
        )
    check_embedded(encoding, embedded)


def _is_wide(x: Any) -> bool:
    """Returns whether x is an array of JAX with 64 bits, which 32-bit JAX reads as 32."""
    return isinstance(x, jax.Array) and x.dtype in (jnp.float64, jnp.int64, jnp.uint64)


def check_embedded(encoding: Encoding, embedded: bool) -> None:
    """Raises ConfigError if the encoding acts on the input embeddings and `embedded` is False."""
    embedded = checked(embedded, bool, "embedded")
    if encoding.traits.embeds_input and not embedded:
        raise ConfigError(
            "this encoding acts on the input embeddings, which attention does not see: call encoding.embed(x, "
            "positions) before the first layer, and pass embedded=True"
        )


def turned(encoding: Encoding, hook: str, x: Any, features: Any, positions: Any) -> Any:
    """Returns what a hook makes of an array [B, L, heads, K], such as rotated queries.

    ConfigError: the result has other axes; only the width of queries and keys may change.
    """
    out: Any = getattr(encoding, hook)(x, features, positions)
    axes = 3 if hook in ("rotate", "rotate_keys") else 4
    shape: Any = getattr(out, "shape", ())
    if len(shape) != 4 or shape[:axes] != x.shape[:axes]:
        raise ConfigError(
            f"{hook} of {type(encoding).__name__} must keep {'all' if axes == 4 else 'the first three'} axes of "
            f"{list(x.shape)}, got {list(shape)}"
        )
    return out


def rotated(encoding: Encoding, q_BLHK: Array, features: Any, positions: Any) -> Any:
    """Returns the rotated queries; None if the encoding leaves them as they are."""
    rotated_BLHK = turned(encoding, "rotate", q_BLHK, features, positions)
    return None if rotated_BLHK is q_BLHK else rotated_BLHK


def sink_of(encoding: Encoding, carry: Any, shape_BHL: tuple[int, ...]) -> Any:
    """Returns the logit of the sink, None without one. ConfigError: queries lack one."""
    logit: Any = encoding.sink(carry)
    if logit is not None and jnp.shape(logit) != tuple(shape_BHL):
        raise ConfigError(
            f"sink of {type(encoding).__name__} must return logits {list(shape_BHL)}, got {list(jnp.shape(logit))}"
        )
    return logit


def check_tokens(encoding: Encoding, features: Any, length: int, keys: int) -> None:
    """Raises ConfigError if the encoding needs tokens that are not there."""
    if length > keys and (jax.tree.leaves(features) or encoding.traits.sink_value == "own"):
        raise ConfigError(
            f"this encoding needs at least as many keys as queries, got {length} queries and {keys} keys: give the "
            "keys of the queries' own tokens"
        )
    if length != keys and not encoding.traits.splits_queries:
        raise ConfigError(
            f"this encoding couples the queries, got {length} queries and {keys} keys: give the queries of all keys"
        )


def check_features(encoding: Encoding, features: Any, k_BMGK: Array, heads: int) -> None:
    """Raises ConfigError unless features are arrays `[B, M, heads, ...]` with H, G or 1 heads."""
    batch, keys, groups = k_BMGK.shape[:3]
    for leaf in jax.tree.leaves(features):
        shape = tuple(jnp.shape(leaf))
        known = len(shape) >= 3 and shape[0] in (1, batch) and shape[2] in (1, groups, heads)
        if not known or shape[1] != keys:
            raise ConfigError(
                f"features of {type(encoding).__name__} must be arrays [{batch}, {keys}, heads, …] with "
                f"{heads}, {groups} or 1 heads, got {list(shape)}"
            )


def checked_input(x: Any, batch: int, keys: int, name: str = "x", of: str = "keys") -> Any:
    """Returns the layer's input x_BMD; None stays."""
    if x is not None and (not is_array(x) or x.ndim != 3 or x.shape[:2] != (batch, keys)):
        shape = list(x.shape) if is_array(x) else abridged(x)
        raise ConfigError(
            f"{name} must be the input of the layer for all {of}, [{batch}, {keys}, D], got {shape}"
        )
    return x


def checked_positions(name: str, positions: Any, batch: int, length: int, dtype: Any) -> Any:
    """Returns integers as `checked_integers`, and floating-point numbers in `dtype`.

    Positions are data, so they have no gradient.
    """
    positions = as_array(name, positions)
    if not jnp.issubdtype(positions.dtype, jnp.floating):
        if not jnp.issubdtype(positions.dtype, jnp.integer):
            raise ConfigError(f"{name} must be integers or real numbers, got {positions.dtype}")
        return checked_integers(name, positions, batch, length)
    _check_shape(name, positions, batch, length)
    if not isinstance(positions, jax.core.Tracer) and not np.isfinite(positions).all():
        raise ConfigError(f"{name} must be finite numbers, got NaN or infinity")
    return jax.lax.stop_gradient(positions.astype(dtype))


def as_real(name: str, positions: Any, dtype: Any) -> Any:
    """Returns positions in a floating-point type, next to which there are real numbers."""
    largest = 2**24 if dtype == jnp.float32 else 2**53
    known = positions.size and not isinstance(positions, jax.core.Tracer)
    if known and np.issubdtype(positions.dtype, np.integer) and abs(positions).max() > largest:
        raise ConfigError(
            f"{name} must be at most {largest:,} next to real numbers, which {jnp.dtype(dtype)} holds exactly, "
            f"got {abs(positions).max():,}"
        )
    return positions.astype(dtype)


def checked_integers(name: str, ids: Any, batch: int, length: int) -> Any:
    """Returns int32 `[B, L]` or `[1, L]`: differences of unsigned or shorter integers would
    overflow; None stays.
    """
    if ids is None:
        return None
    ids = as_array(name, ids)
    _check_shape(name, ids, batch, length)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ConfigError(f"{name} must be integers, got {ids.dtype}")
    _check_32_bits(name, ids)
    return ids.astype(np.int32)


def _check_32_bits(name: str, ids: Any) -> None:
    """Raises ConfigError for integers outside of int32, unless JAX traces them."""
    known = not isinstance(ids, jax.core.Tracer) and getattr(ids, "is_fully_addressable", True)
    if not known or not ids.size or np.can_cast(ids.dtype, np.int32):
        return
    ids = np.asarray(ids)  # a program that is traced would trace the minimum of JAX's arrays
    if not -(2**31) <= int(ids.min()) <= int(ids.max()) < 2**31:
        raise ConfigError(f"{name} must fit into 32 bits, got {ids.min()} to {ids.max()}")


def _check_shape(name: str, ids: Any, batch: int, length: int) -> None:
    if ids.ndim != 2 or ids.shape[0] not in (1, batch) or ids.shape[1] != length:
        shapes = " or ".join(str([size, length]) for size in dict.fromkeys((batch, 1)))
        raise ConfigError(f"{name} must have shape {shapes}, got {list(ids.shape)}")


def checked_mask(mask: Any, shape: tuple[int, int, int, int]) -> Array | None:
    """Returns the mask with its last axis whole; other axes of size 1 stay, which saves memory;
    None stays.
    """
    if mask is None:
        return None
    mask = as_array("mask", mask)
    if mask.dtype != bool:
        fix = "numbers to add are a bias"
        if jnp.issubdtype(mask.dtype, jnp.integer):
            fix = "convert it to booleans"
        raise ConfigError(
            f"mask must be boolean, True where a query may see a key, got {mask.dtype}; {fix}"
        )
    if mask.ndim != 4 or any(
        size not in (1, whole) for size, whole in zip(mask.shape, shape, strict=True)
    ):
        raise ConfigError(
            f"mask must have shape {list(shape)}, where any axis may have size 1, got {list(mask.shape)}: for one of "
            "[L, M] give mask[None, None], of [B, M] mask[:, None, None]; heads share it, but not a bias"
        )
    return jnp.broadcast_to(mask, (*mask.shape[:3], shape[3]))


def checked_bias(bias: Any, shape: tuple[int, int, int, int]) -> Any:
    """Returns bias_BHLM; B and H may be 1; None stays."""
    if bias is None:
        return None
    bias = as_array("bias", bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ConfigError(
            f"bias must be floating-point numbers, got {bias.dtype}: to hide keys, give mask"
        )
    rows = zip(bias.shape[:2], shape[:2], strict=True) if bias.ndim == 4 else ()
    if (
        bias.ndim != 4
        or bias.shape[2:] != shape[2:]
        or any(size not in (1, whole) for size, whole in rows)
    ):
        raise ConfigError(
            f"bias must have shape {list(shape)}, where the first two axes may have size 1, got {list(bias.shape)}"
        )
    return bias


def checked_rate(rate: Any, key: Any) -> float:
    """Returns the rate of dropout; ConfigError if the rate or the random key is not one."""
    rate = checked(rate, float, "dropout_rate")
    if not 0 <= rate < 1 - 2**-32:  # a weight is dropped by 32 random bits
        raise ConfigError(f"dropout_rate must be at least 0 and less than 1 - 2**-32, got {rate}")
    if key is not None and not is_key(key):
        raise ConfigError(f"dropout_key must be a key from jax.random.key, got {abridged(key)}")
    return rate


def is_key(x: Any) -> bool:
    """Returns whether x is one random key, of `jax.random.key` or `jax.random.PRNGKey`."""
    if not isinstance(x, jax.Array):
        return False
    return (
        x.shape == ()
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        else (x.shape, x.dtype) == ((2,), jnp.uint32)
    )


def checked_window(window: Any) -> int | None:
    """Returns the window, at most the largest int32, beyond which no key is; None stays."""
    window = checked(window, int | None, "window")
    if window is not None and window < 1:
        raise ConfigError(f"window must be an integer of at least 1, got {window}")
    return None if window is None else min(window, 2**31 - 1)


def checked_logits(
    encoding: Encoding, bias: Any, scale: Any, soft_cap: Any, shape: tuple[int, int, int, int]
) -> tuple[Any, float | None, float | None]:
    """Returns the bias, the scale and the soft cap of the content logits; None stays."""
    given = {"bias": bias, "scale": scale, "logits_soft_cap": soft_cap}
    for name, value in given.items():
        if value is not None and not encoding.traits.reads_logits:
            raise ConfigError(
                f"this encoding computes its own logits, so {name} would do nothing: leave {name} out"
            )
    cap = checked_positive("logits_soft_cap", soft_cap)
    return checked_bias(bias, shape), checked_positive("scale", scale), cap


def checked_positive(name: str, number: Any) -> float | None:
    """Returns a number above 0; None stays."""
    number = checked(number, float | None, name)
    if number is not None and not 0 < number < float("inf"):
        raise ConfigError(f"{name} must be a number above 0, got {number}")
    return number


def as_array(name: str, x: Any) -> Any:
    """Returns an array, or a list as an array; ConfigError: x is neither."""
    if isinstance(x, list | tuple):
        with contextlib.suppress(ValueError):  # lists of different lengths
            x = np.asarray(x)
    if not is_array(x):
        raise ConfigError(f"{name} must be an array, got {abridged(x)} of type {type(x).__name__}")
    return x
