"""Kernelised relative positions, logarithmic."""

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.encodings.base import ENCODINGS, AttentionShape, Encoding, NoOptions
from cope_jax.typing import Array, PyTree


@ENCODINGS.register("kerple")
class Kerple(Encoding):
    """A learned logarithmic penalty of the distance, with two positive numbers for each head.

    a_ij = softmax_j(q_i·k_j/√K − r1_h log(1 + r2_h |i−j|)), r = softplus(parameter) > 0. Chi et al. (arXiv 2205.09921),
    the logarithmic kernel. Initially r1 is uniform in (0, 2) and r2 in (0, 1).
    """

    def __init__(self, config: NoOptions, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        self.r1_H = nnx.Param(_inverse_softplus(2 * _unit(rngs.params(), shape.num_heads)))
        self.r2_H = nnx.Param(_inverse_softplus(_unit(rngs.params(), shape.num_heads)))

    def score(
        self,
        q_BLHK: Array,
        k_BMGK: Array,
        features: PyTree,
        logits_BHLM: Array,
        mask_B1LM: Array,
        q_positions_BL: Array,
        k_positions_BM: Array,
        carry: PyTree,
    ) -> tuple[Array, PyTree]:
        dtype = logits_BHLM.dtype
        r1, r2 = (jax.nn.softplus(r[...].astype(dtype))[None, :, None, None] for r in (self.r1_H, self.r2_H))
        distance_B1LM = jnp.abs(q_positions_BL[:, :, None] - k_positions_BM[:, None, :])[:, None].astype(dtype)
        return logits_BHLM - r1 * jnp.log1p(r2 * distance_B1LM), carry


def _unit(key: Array, num_heads: int) -> Array:
    return jax.random.uniform(key, (num_heads,), minval=0.01, maxval=1.0)


def _inverse_softplus(r: Array) -> Array:
    return jnp.log(jnp.expm1(r))
