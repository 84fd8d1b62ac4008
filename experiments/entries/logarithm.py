"""The encoding of the README: a learned weight times the logarithm of the distance, for each head.

    a_ij = softmax_j(q_i·k_j/√K − w_h log(1 + |i − j|))

KERPLE (Chi et al., arXiv 2205.09921) with its logarithmic kernel, r1 log(1 + r2 |i − j|), has this
form where r2 is 1.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from cope_jax.encodings import ENCODINGS, Encoding


@dataclasses.dataclass(frozen=True)
class LogarithmConfig:
    weight: float = 1.0


@ENCODINGS.register("logarithm")
class Logarithm(Encoding):
    """The encoding with a learned weight w_h for each head h."""

    Config = LogarithmConfig

    def __init__(self, config, shape, *, rngs):
        super().__init__(config, shape, rngs=rngs)
        self.weight = nnx.Param(jnp.full(shape.num_heads, config.weight), axes=("heads",))

    def score(self, pairs, carry):
        distance = jnp.abs(pairs.distance).astype(pairs.logits.dtype)
        return pairs.logits - self.weight[...][None, :, None, None] * jnp.log1p(distance), carry
