"""Kernelised relative positions, logarithmic."""

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Carry, Encoding, NoOptions, Pairs


@ENCODINGS.register("kerple")
class Kerple(Encoding):
    """Subtracts a learned penalty, logarithmic in the distance, with two positive parameters for
    each head.

    a_ij = softmax_j(q_i·k_j/√K − r1_h log(1 + r2_h |i−j|)), r = softplus(parameter) > 0. Chi et al.
    (arXiv 2205.09921), the logarithmic kernel. Initially r1 is uniform in (0.02, 2) and r2 in
    (0.01, 1).
    """

    def __init__(self, config: NoOptions, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        r1_H, r2_H = (
            jax.random.uniform(rngs.params(), (shape.num_heads,), minval=0.01, maxval=1.0)
            for _ in range(2)
        )
        # The inverse of softplus.
        self.r1, self.r2 = (
            nnx.Param(jnp.log(jnp.expm1(r_H)), axes=("heads",)) for r_H in (2 * r1_H, r2_H)
        )

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        dtype = pairs.logits.dtype
        r1_1H11, r2_1H11 = (
            jax.nn.softplus(r[...].astype(dtype))[None, :, None, None] for r in (self.r1, self.r2)
        )
        distance_B1LM = jnp.abs(pairs.distance).astype(dtype)
        return pairs.logits - r1_1H11 * jnp.log1p(r2_1H11 * distance_B1LM), carry
