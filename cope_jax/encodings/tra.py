"""Threshold relative attention."""

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.encodings.base import (
    ENCODINGS,
    AttentionShape,
    Carry,
    Encoding,
    NoOptions,
    Pairs,
    Tokens,
    Traits,
)
from cope_jax.encodings.common import project
from cope_jax.ops.sums import suffix_sum

# The logit of the sink: above that of the keys that are left out, below that of every other key.
_SINK = -1e20


@ENCODINGS.register("tra")
class TRA(Encoding):
    """Leaves out the keys that do not match, and counts distance over the keys that do: CoPE with
    hard gates.

        a_ij = softmax_j(s_ij + δ_i Σ_{l=j..i} [s_il > 0])  over the keys with s_ij > 0,   s_ij = q_i·k_j/√K,

    where δ_ih = log σ(w_h·x_i + b_h) < 0 is the price of one matching key for query i, and x is the
    input of the layer. A query that matches no key has the output 0. Opper et al. (arXiv
    2503.23174), with the equations and the initial w and b of the authors' notebook, uniform within
    ±1/√D. It normalises q and k, without scales: `block.qk_norm=True`, which has scales, is the
    nearest here. No gradient passes through the threshold.

    The carry is the number of nearer matching keys. It is for causal attention.

    Raises:
      ConfigError: `features` is called without x.
    """

    traits = Traits(causal_only=True, excludes=("score",))

    def __init__(self, config: NoOptions, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        bound, heads = shape.width**-0.5, shape.num_heads
        kernel = jax.random.uniform(
            rngs.params(), (shape.width, heads), minval=-bound, maxval=bound
        )
        self.kernel = nnx.Param(kernel, axes=("embed", "heads"))
        bias = jax.random.uniform(rngs.params(), (heads,), minval=-bound, maxval=bound)
        self.bias = nnx.Param(bias, axes=("heads",))

    def features(self, tokens: Tokens, state: PyTree) -> tuple[PyTree, PyTree]:
        return jax.nn.log_sigmoid(project("tra", tokens.x, self.kernel[...], self.bias[...])), ()

    def initial_carry(self, q_BHLK: Array, q_features: PyTree) -> Carry:
        return Carry(sums=jnp.zeros(q_BHLK.shape[:3], accumulator_dtype(q_BHLK.dtype)))

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        zero = jnp.zeros((), pairs.logits.dtype)
        matches_BHLM = pairs.mask & (pairs.logits > zero)
        counts_BHLM = carry.sums[..., None] + suffix_sum(jnp.where(matches_BHLM, zero + 1, zero))
        left_out = jnp.full((), jnp.finfo(zero.dtype).min, zero.dtype)
        logits_BHLM = jnp.where(
            matches_BHLM, pairs.logits + pairs.q_features[..., None] * counts_BHLM, left_out
        )
        return logits_BHLM, carry._replace(sums=counts_BHLM[..., 0])

    def sink(self, carry: Carry) -> Array:
        return jnp.full_like(carry.sums, _SINK)
