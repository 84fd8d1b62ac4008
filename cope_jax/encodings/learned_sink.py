"""Learned attention sinks."""

import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Carry, Encoding, NoOptions


@ENCODINGS.register("learned_sink")
class LearnedSink(Encoding):
    """One more logit in each softmax, learned for each head, whose value is 0: a place for weight
    that no key deserves.

        a_ij = exp(s_ij) / (exp(b_h) + Σ_j exp(s_ij)),   s_ij = q_i·k_j/√K and what other encodings add.

    Without it, weight that has no use goes to the first tokens (arXiv 2309.17453); GPT-OSS learns
    b, `[H]`. Here b starts at 0, which is the "softmax plus one". It is no position encoding;
    compose it with one, such as `learned_sink+rope`.
    """

    def __init__(self, config: NoOptions, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        self.logits = nnx.Param(jnp.zeros((shape.num_heads,)), axes=("heads",))

    def initial_carry(self, q_BHLK: Array, q_features: PyTree) -> Carry:
        logits_H = self.logits[...].astype(accumulator_dtype(q_BHLK.dtype))
        return Carry(constants=jnp.broadcast_to(logits_H[None, :, None], q_BHLK.shape[:3]))

    def sink(self, carry: Carry) -> Array:
        return carry.constants
