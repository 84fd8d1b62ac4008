"""Shared code of encodings: the layer's input, sums over keys, segments, and ALiBi's slopes."""

import math

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array, accumulator_dtype
from cope_jax.encodings.base import Pairs
from cope_jax.errors import ConfigError
from cope_jax.ops.sums import suffix_sum


def layer_input(name: str, x_BMD: Array | None, width: int) -> Array:
    """Returns x.

    Raises:
      ConfigError: `Encoding.features` of the encoding `name` was called without x, or x has not
        this width.
    """
    if x_BMD is None:
        raise ConfigError(f"{name} needs the input of the layer: pass x to attend")
    if x_BMD.shape[-1] != width:
        raise ConfigError(
            f"{name} was built for model_dim={width}, but x has width {x_BMD.shape[-1]}: create it with "
            f"model_dim={x_BMD.shape[-1]}"
        )
    return x_BMD


def project(name: str, x_BMD: Array | None, kernel: Array, bias: Array | None = None) -> Array:
    """Returns x W + b for each token, `[B, M, ...]`, in the accumulator type; W is `[D, ...]` and b
    is `[...]`.

    The product has full precision, because sums over the tokens add up its errors.

    Raises:
      ConfigError: as `layer_input`.
    """
    x_BMD = layer_input(name, x_BMD, len(kernel))
    dtype = accumulator_dtype(x_BMD.dtype)
    y = jnp.tensordot(
        x_BMD.astype(dtype), kernel.astype(dtype), 1, precision=jax.lax.Precision.HIGHEST
    )
    return y if bias is None else y + bias.astype(dtype).reshape(1, 1, *bias.shape)


def whole_numbers(name: str, positions: Array) -> Array:
    """Returns positions or distances; ConfigError: they are not integers, which the encoding `name`
    needs for the rows of a table.
    """
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ConfigError(
            f"{name} has a table with a row for each whole number, but positions are {positions.dtype}: choose an "
            "encoding that computes with positions, such as rope or alibi, or whole positions"
        )
    return positions


def blocks_of(x: Array, axis: int, size: int) -> Array:
    """Cuts the keys, axis `axis`, into blocks: `[..., blocks, size, ...]`, with zeros before the
    first key.
    """
    padding = -x.shape[axis] % size
    x = jnp.pad(x, [(padding if a == axis else 0, 0) for a in range(x.ndim)])
    return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def sum_over_nearer(steps: Array, pairs: Pairs, sums_BHL: Array) -> tuple[Array, Array]:
    """Sums what tokens say over the tokens between key and query: the key's own is out, the query's
    own is in.

    Args:
      steps: what each key adds, `[B, H, M]`, or what each pair adds, `[B, H, L, M]`. A masked key
        adds nothing.
      pairs: the block of pairs.
      sums_BHL: the sums over all nearer keys.

    Returns:
      (sums_BHLM, the sums after the block).
    """
    steps = steps[:, :, None] if steps.ndim == 3 else steps
    steps_BHLM = jnp.where(pairs.mask, steps, jnp.zeros((), steps.dtype))
    after_BHLM = sums_BHL[..., None] + suffix_sum(steps_BHLM)
    return after_BHLM - steps_BHLM, after_BHLM[..., 0]


def token_indices(k_BMGK: Array, state: Array | None) -> tuple[Array, Array]:
    """Returns (the index of each token in the sequence as a feature, `[B, M, 1]`, the number of
    tokens so far, `[B]`).

    Positions do not tell whether a key is the query's own token, because several tokens may have
    the same position.
    """
    batch, length = k_BMGK.shape[:2]
    start_B = jnp.zeros((batch,), jnp.int32) if state is None else state
    indices_BM = start_B[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    # Float32 has all integers up to 2²⁴. Tokens 2²⁴ apart get the same index; no context is that
    # long.
    return (indices_BM % 2**24).astype(accumulator_dtype(k_BMGK.dtype))[..., None], start_B + length


def is_own_token(q_indices_B1L: Array, k_indices_B1M: Array) -> Array:
    """Returns own_B1LM, True where the key is the query's own token; the arguments are features of
    `token_indices`.
    """
    return q_indices_B1L[..., None] == k_indices_B1M[..., None, :]


def segment_starts(segment_ids_BM: Array | None, last_B: Array | None) -> Array | None:
    """Returns starts_BM, True where the segment differs from that of the token before; None if
    there are no segments.

    `last_B` is the segment of the token before the first; None means that the first token starts no
    new segment. A segment starts again after a hole in it:

    >>> segment_starts(jnp.array([[1, 1, 2, 1, 1]], jnp.int32), None).tolist()
    [[False, False, True, True, False]]
    """
    if segment_ids_BM is None:
        return None
    ids_BM = jnp.asarray(segment_ids_BM)
    if last_B is None:
        return ids_BM != jnp.concatenate([ids_BM[:, :1], ids_BM[:, :-1]], axis=1)
    ids_BM = jnp.broadcast_to(ids_BM, (len(last_B), ids_BM.shape[1]))
    return ids_BM != jnp.concatenate([last_B[:, None], ids_BM[:, :-1]], axis=1)


def last_segment(segment_ids_BM: Array | None, batch: int) -> Array:
    """Returns the segment of the last token, `[B]`, for the state of an encoding; 0 if there are no
    segments.
    """
    if segment_ids_BM is None:
        return jnp.zeros((batch,), jnp.int32)
    return jnp.broadcast_to(jnp.asarray(segment_ids_BM)[:, -1], (batch,)).astype(jnp.int32)


def inverse_softplus(y: float) -> float:
    """Returns the x with log(1 + e^x) = y.

    >>> round(inverse_softplus(math.log(2)), 6)
    0.0
    """
    return math.log(math.expm1(y))


def default_slopes(num_heads: int) -> tuple[float, ...]:
    """Returns the slopes of ALiBi (arXiv 2108.12409), one for each head.

    If the number of heads is a power of two, the slopes form a geometric sequence. Otherwise the
    slopes for the next lower power of two come first, followed by the first, third, fifth, … slopes
    for the next higher power of two.

    >>> default_slopes(4)
    (0.25, 0.0625, 0.015625, 0.00390625)
    >>> default_slopes(3)
    (0.0625, 0.00390625, 0.25)
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    between = [2.0 ** (-8.0 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return tuple(slopes + between[: num_heads - power])
