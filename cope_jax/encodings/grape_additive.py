"""Group representational position encoding, additive and gated by content."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.encodings.base import (
    ENCODINGS,
    AttentionShape,
    Carry,
    Encoding,
    Pairs,
    PerHead,
    Tokens,
)
from cope_jax.encodings.common import default_slopes, inverse_softplus


@dataclasses.dataclass(frozen=True)
class GRAPEAdditiveConfig:
    """The options of additive GRAPE.

    Attributes:
      gate: what decides how much a token of distance costs, the "key" or the "query".
    """

    gate: Literal["key", "query"] = "key"


@ENCODINGS.register("grape_additive")
class GRAPEAdditive(Encoding):
    """ALiBi whose slope the key, or the query, chooses.

        a_ij = softmax_j(q_i·k_j/√K − m_h softplus(ω_h) γ |i−j|),   γ = softplus(u_h·k_j/√K / |u_h|)  or of q_i,

    with ALiBi's slopes m_h. Zhang et al. (arXiv 2512.07805), the gated additive forms ("GRAPE-A"),
    as in the released code of the key's gate; q and k are those before rotation. softplus(ω) starts
    at 1, and u is normal. The released code normalises q and k: `block.qk_norm`. The paper's forms
    with both gates, and with path integrals ("GRAPE-AP"), are not here, because their equations
    could not be checked.
    """

    Config = GRAPEAdditiveConfig

    def __init__(self, config: GRAPEAdditiveConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        self.slopes = PerHead(default_slopes(shape.num_heads))
        direction = jax.random.normal(rngs.params(), (shape.num_heads, shape.head_dim))
        self.direction = nnx.Param(direction, axes=("heads", None))
        self.rate = nnx.Param(jnp.full((shape.num_heads,), inverse_softplus(1.0)), axes=("heads",))

    def features(self, tokens: Tokens, state: PyTree) -> tuple[PyTree, PyTree]:
        vectors = tokens.q if self.config.gate == "query" else tokens.k
        dtype, heads = accumulator_dtype(vectors.dtype), self.shape.num_heads
        u_HK = self.direction[...].astype(dtype)
        u_HK /= jnp.linalg.norm(u_HK, axis=-1, keepdims=True) * self.shape.head_dim**0.5
        vectors_BMHK = jnp.repeat(vectors.astype(dtype), heads // vectors.shape[2], axis=2)
        rates_H = jnp.asarray(self.slopes.values, dtype) * jax.nn.softplus(
            self.rate[...].astype(dtype)
        )
        return rates_H[None, None] * jax.nn.softplus(
            jnp.sum(vectors_BMHK * u_HK[None, None], axis=-1)
        ), ()

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        by_query = self.config.gate == "query"
        rates = pairs.q_features[..., None] if by_query else pairs.k_features[:, :, None]
        return pairs.logits - rates * jnp.abs(pairs.distance).astype(pairs.logits.dtype), carry
