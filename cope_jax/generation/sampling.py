"""Samples the next token of each row from logits."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.array_types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Arguments of sampling. Each row has a random key: its tokens depend on no other row.

    Only the first `size` tokens and those of `stop_S` are sampled; None means all.
    """

    keys_B: Array
    temperature: Any
    top_p: Any
    stop_S: Any
    top_k: int | None = dataclasses.field(metadata={"static": True})
    size: int | None = dataclasses.field(default=None, metadata={"static": True})


def row_keys(key: Array, rows: Sequence[int]) -> Array:
    """Derives one random key for each row, `[B]`, from `key` and the number of the row.

    >>> bool(row_keys(jax.random.key(0), [3, 4])[1] == row_keys(jax.random.key(0), [4])[0])
    True
    """
    return jax.vmap(jax.random.fold_in, (None, 0))(key, np.array(rows, np.uint32))


def draw(params: SamplingParams, step: Array, logits_BV: Array) -> Array:
    """Samples the next token of each row, which already has `step` new tokens."""

    def row(logits_V: Array, key: Array) -> Array:
        key = jax.random.fold_in(key, step)
        return sample(logits_V[None], key, params.temperature, params.top_k, params.top_p)[0]

    if params.size is not None:
        tokens_V = jnp.arange(logits_BV.shape[-1])
        allowed_V = (tokens_V < params.size) | jnp.isin(tokens_V, params.stop_S)
        logits_BV = jnp.where(allowed_V[None], logits_BV, -jnp.inf)
    return jax.vmap(row)(logits_BV, params.keys_B)


def sample(
    logits_BV: Array, key: Array, temperature: Array, top_k: int | None, top_p: Array | None
) -> Array:
    """Samples an int32 token for each row. Temperature 0 takes the first of the highest logits.

    A row whose highest logit is not finite has the token −1.
    """
    # Some processors treat numbers below the smallest normal number as 0. With this line all
    # processors do so.
    drawn_at_all = temperature >= jnp.finfo(jnp.float32).tiny
    # Logits are taken relative to their maximum, so that no quotient is +∞ at any temperature.
    highest_B1 = logits_BV.max(axis=-1, keepdims=True)
    below_BV = logits_BV - highest_B1
    scaled_BV = below_BV / jnp.where(drawn_at_all, temperature, 1)
    if top_k is not None:
        scaled_BV = keep_top_k(scaled_BV, top_k)
    if top_p is not None:
        scaled_BV = keep_top_p(scaled_BV, top_p)
    drawn_B = jax.random.categorical(key, scaled_BV)
    token_B = jnp.where(drawn_at_all, drawn_B, jnp.argmax(logits_BV, axis=-1))
    return jnp.where(jnp.isfinite(highest_B1[:, 0]), token_B, -1).astype(jnp.int32)


def keep_top_k(logits_BV: Array, k: int) -> Array:
    """Keeps the k highest logits of each row, the first among equals, and sets the others to −∞.

    >>> keep_top_k(jnp.array([[1.0, 3.0, 2.0]]), 2).tolist()
    [[-inf, 3.0, 2.0]]
    """
    _, places_BK = jax.lax.top_k(logits_BV, k)
    return _keep(logits_BV, places_BK, jnp.ones(places_BK.shape, bool))


def keep_top_p(logits_BV: Array, p: Array | float) -> Array:
    """Keeps the fewest logits of each row with probabilities of sum ≥ p; sets the others to −∞.

    This is the nucleus of Holtzman et al. (arXiv 1904.09751). At least one logit is kept, and p = 1
    keeps all. Of equal logits, the first are kept.

    >>> keep_top_p(jnp.log(jnp.array([[0.2, 0.5, 0.3]])), 0.75).tolist()
    [[-inf, -0.6..., -1.2...]]
    """
    order_BV = jnp.argsort(-logits_BV, axis=-1)
    sorted_BV = jax.nn.softmax(jnp.take_along_axis(logits_BV, order_BV, axis=-1), axis=-1)
    # The −1 keeps the first token even if p is rounded to 0.
    before_BV = jnp.pad(
        jnp.cumsum(sorted_BV, axis=-1)[:, :-1], ((0, 0), (1, 0)), constant_values=-1
    )
    return _keep(logits_BV, order_BV, (before_BV < p) | (p >= 1))


def _keep(logits_BV: Array, places_BK: Array, keep_BK: Array) -> Array:
    rows_B1 = jnp.arange(len(logits_BV), dtype=jnp.int32)[:, None]
    keep_BV = jnp.zeros(logits_BV.shape, bool).at[rows_B1, places_BK].set(keep_BK)
    return jnp.where(keep_BV, logits_BV, -jnp.inf)
