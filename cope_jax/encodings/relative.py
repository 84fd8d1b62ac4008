"""Learned key-side embeddings of the distance."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Carry, Encoding, Pairs, Traits
from cope_jax.encodings.common import whole_numbers
from cope_jax.errors import ConfigError
from cope_jax.ops.gather import row_products
from cope_jax.registry import check_at_least


@dataclasses.dataclass(frozen=True)
class RelativeConfig:
    """The table of the relative encoding.

    Attributes:
      max_distance: N, the number of rows of the table, for the distances 0 … N−1. If None, N is the
        model's `max_length`.
      beyond: what a distance ≥ N uses. "clip" means the last row (the CoPE paper's
        "relative-capped"), and "nothing" means no position term.
      signed: whether the table has 2N−1 rows, for the distances −(N−1) … N−1, so that keys after
        the query have rows.
      scale_position_logits: divide q·P by √K, as Shaw et al. do. Listing 1 of the CoPE paper does
        not divide.
      stddev: standard deviation of the initial rows.
    """

    max_distance: int | None = None
    beyond: Literal["clip", "nothing"] = "clip"
    signed: bool = False
    scale_position_logits: bool = False
    stddev: float = 0.02


@ENCODINGS.register("relative")
class Relative(Encoding):
    """Adds q·P to each logit, where P is a learned vector for the distance and is shared by all
    heads.

    a_ij = softmax_j(q_i·k_j/√K + q_i·P[i−j]), P of shape `[N, K]`. Shaw et al. (arXiv 1803.02155),
    key side only; Golovneva et al. (arXiv 2405.18719), Eq 2.

    By default this encoding is for causal attention: a visible key *after* the query has no row and
    gives NaN. With `signed`, it is for attention to both sides: P has shape `[2N−1, K]` and begins
    with the distance −(N−1).
    """

    Config = RelativeConfig

    def __init__(self, config: RelativeConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(1, "relative", max_distance=config.max_distance)
        check_at_least(0, "relative", stddev=config.stddev)
        rows = shape.max_length if config.max_distance is None else config.max_distance
        if rows is None:
            raise ConfigError(
                "encoding 'relative' has a table of fixed length: give max_distance or max_length"
            )
        self.traits = Traits(causal_only=not config.signed)
        self.first, self.end = 1 - rows if config.signed else 0, rows
        self.table = nnx.Param(
            config.stddev * jax.random.normal(rngs.params(), (rows - self.first, shape.head_dim))
        )

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        first, end, dtype = self.first, self.end, pairs.logits.dtype
        distance_B1LM = whole_numbers("relative", pairs.distance)
        row_BLM = jnp.clip(distance_B1LM[:, 0], first, end - 1) - first
        bias_BHLM = row_products(
            pairs.q.astype(dtype), self.table[...].astype(dtype), row_BLM, pairs.mask[:, 0]
        )
        if self.config.scale_position_logits:
            bias_BHLM = bias_BHLM / self.shape.head_dim**0.5
        if self.config.beyond == "nothing":
            bias_BHLM = jnp.where(jnp.abs(distance_B1LM) < end, bias_BHLM, jnp.zeros((), dtype))
        if not self.config.signed:
            bias_BHLM = jnp.where(
                pairs.mask & (distance_B1LM < 0), jnp.full((), jnp.nan, dtype), bias_BHLM
            )
        return pairs.logits + bias_BHLM, carry
