"""Forgetting attention."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.encodings.base import (
    ENCODINGS,
    AttentionShape,
    Carry,
    Encoding,
    Pairs,
    Tokens,
    Traits,
)
from cope_jax.encodings.common import inverse_softplus, project, sum_over_nearer
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least, check_unused


@dataclasses.dataclass(frozen=True)
class FoXConfig:
    """The options of FoX.

    Attributes:
      gate: what a forget gate depends on. "token" means the token, f = σ(w·x + b). "head" means
        nothing, f = σ(b): the paper's data-independent gate.
      bias: initial b if gate="token". Gates start near σ(b). With b = 0, as published, each token
        halves the weights of the keys before the token. With b = 5, each token multiplies these
        weights by 149/150.
      stddev: standard deviation of the initial w.
      longest: if gate="head", log f = −1/T at the start, and T is a geometric sequence over the
        heads from 2 to this number of tokens.
      prune: skip all keys farther than a key whose logit the gates lower by more than this number,
        in all rows. Each weight that is skipped is below e^(2U − prune), where U is the largest
        |q·k|/√K. None means that no key is skipped.
    """

    gate: Literal["token", "head"] = "token"
    bias: float = 0.0
    stddev: float = 0.02
    longest: float = 1024.0
    prune: float | None = None


@ENCODINGS.register("fox")
class FoX(Encoding):
    """Each token has a forget gate for each head, which reduces the weights of all keys before the
    token.

        f_jh = σ(w_h·x_j + b_h),   a_ij = softmax_j(q_i·k_j/√K + Σ_{l=j+1..i} log f_lh).

    Lin et al., "Forgetting Transformer" (arXiv 2503.02130); x is the input of the layer. FoX is for
    causal attention. Skipping keys follows "Adaptive Computation Pruning" (arXiv 2504.06949), with
    a fixed bound.

    The carry is the sum of log f over the nearer keys, including the query's own token. A masked
    key adds nothing.

    Raises:
      ConfigError: `features` is called without x.
    """

    Config = FoXConfig
    traits = Traits(causal_only=True)

    def __init__(self, config: FoXConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        heads = shape.num_heads
        check_at_least(2, "fox", longest=config.longest)
        check_at_least(0, "fox", stddev=config.stddev)
        if config.prune is not None and not config.prune > 0:
            raise ConfigError(f"fox.prune must be positive, got {config.prune}")
        if config.gate == "token":
            check_unused(config, "fox", longest="without gate=head")
            kernel = config.stddev * jax.random.normal(rngs.params(), (shape.width, heads))
            self.kernel = nnx.Param(kernel, axes=("embed", "heads"))
            bias = jnp.full((heads,), config.bias)
        else:
            check_unused(config, "fox", bias="with gate=head", stddev="with gate=head")
            # log σ(b) = −softplus(−b) = −1/T.
            tokens = np.geomspace(2.0, config.longest, heads)
            bias = jnp.asarray([-inverse_softplus(1 / token) for token in tokens])
        self.bias = nnx.Param(bias, axes=("heads",))

    def features(self, tokens: Tokens, state: PyTree) -> tuple[PyTree, PyTree]:
        if self.config.gate == "token":
            return jax.nn.log_sigmoid(
                project("fox", tokens.x, self.kernel[...], self.bias[...])
            ), ()
        log_f_H = jax.nn.log_sigmoid(self.bias[...].astype(accumulator_dtype(tokens.k.dtype)))
        return jnp.broadcast_to(log_f_H[None, None], (*tokens.k.shape[:2], len(log_f_H))), ()

    def initial_carry(self, q_BHLK: Array, q_features: PyTree) -> Carry:
        return Carry(sums=jnp.zeros(q_BHLK.shape[:3], accumulator_dtype(q_BHLK.dtype)))

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        sums_BHLM, after_BHL = sum_over_nearer(pairs.k_features, pairs, carry.sums)
        return pairs.logits + sums_BHLM, carry._replace(sums=after_BHL)

    def done(self, carry: Carry) -> Array | None:
        return None if self.config.prune is None else carry.sums < -self.config.prune
