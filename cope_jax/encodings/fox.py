"""Forgetting attention."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Carry, Encoding, Pairs
from cope_jax.errors import ConfigError
from cope_jax.ops.sums import suffix_sum


@dataclasses.dataclass(frozen=True)
class FoXConfig:
    """The initial values of the forget gates.

    Attributes:
      bias: initial b. Gates start near σ(b). With b = 0, as published, each token halves the weights of the keys before
        the token. With b = 5, each token multiplies these weights by 149/150.
      stddev: standard deviation of the initial w.
    """

    bias: float = 0.0
    stddev: float = 0.02


@ENCODINGS.register("fox")
class FoX(Encoding):
    """Each token has a forget gate for each head, which reduces the weights of all keys before the token.

        f_jh = σ(w_h·x_j + b_h),   a_ij = softmax_j(q_i·k_j/√K + Σ_{l=j+1..i} log f_lh).

    Lin et al., "Forgetting Transformer" (arXiv 2503.02130); x is the input of the layer. FoX is for causal attention.

    The carry is the sum of log f over the nearer keys, including the query's own token. A masked key adds nothing.

    Raises:
      ConfigError: `features` is called without x.
    """

    Config = FoXConfig

    def __init__(self, config: FoXConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        heads = shape.num_heads
        self.kernel = nnx.Param(config.stddev * jax.random.normal(rngs.params(), (shape.width, heads)))
        self.bias = nnx.Param(jnp.full((heads,), config.bias))

    def features(
        self, x_BMD: Array | None, q_BMHK: Array, k_BMGK: Array, v_BMGK: Array, state: PyTree
    ) -> tuple[PyTree, PyTree]:
        if x_BMD is None:
            raise ConfigError("fox needs features: pass features=encoding.features(x, q, k, v, None)[0] to attend")
        dtype = accumulator_dtype(x_BMD.dtype)
        logits_BMH = jnp.einsum("BMD,DH->BMH", x_BMD.astype(dtype), self.kernel[...].astype(dtype))
        return jax.nn.log_sigmoid(logits_BMH + self.bias[...].astype(dtype)[None, None]), ()

    def initial_carry(self, q_BHLK: Array, q_features: PyTree) -> Carry:
        return Carry(sums=jnp.zeros(q_BHLK.shape[:3], accumulator_dtype(q_BHLK.dtype)))

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        zero = jnp.zeros((), pairs.logits.dtype)
        log_f_BHLM = jnp.where(pairs.mask, pairs.k_features[:, :, None], zero)
        sums_BHLM = carry.sums[..., None] + suffix_sum(log_f_BHLM)
        return pairs.logits + (sums_BHLM - log_f_BHLM), carry._replace(sums=sums_BHLM[..., 0])

    def of_head(self, head: int) -> "FoX":
        own = self.kernel[...][:, head : head + 1], self.bias[...][head : head + 1]
        return self._one_head(kernel=nnx.Param(own[0]), bias=nnx.Param(own[1]))
