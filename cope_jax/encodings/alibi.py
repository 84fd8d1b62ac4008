"""Attention with linear biases."""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Carry, Encoding, Pairs, PerHead
from cope_jax.encodings.common import default_slopes
from cope_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ALiBiConfig:
    """The slopes of ALiBi.

    Attributes:
      slopes: m_h, one for each head. If None, `default_slopes` gives the slopes.
    """

    slopes: tuple[float, ...] | None = None


@ENCODINGS.register("alibi")
class ALiBi(Encoding):
    """Subtracts a penalty from each logit: the distance times a fixed slope for each head.

    a_ij = softmax_j(q_i·k_j/√K − m_h |i−j|), m_h = 2^(−8(h+1)/H) if H is a power of two, else as in
    `default_slopes`. Press et al. (arXiv 2108.12409).
    """

    Config = ALiBiConfig

    def __init__(self, config: ALiBiConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        if config.slopes is not None and len(config.slopes) != shape.num_heads:
            raise ConfigError(
                f"alibi.slopes has {len(config.slopes)} entries for {shape.num_heads} heads: give one for each head"
            )
        self.slopes = PerHead(
            default_slopes(shape.num_heads) if config.slopes is None else config.slopes
        )

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        dtype = pairs.logits.dtype
        slopes_1H11 = jnp.asarray(self.slopes.values, dtype)[None, :, None, None]
        return pairs.logits - slopes_1H11 * jnp.abs(pairs.distance).astype(dtype), carry
