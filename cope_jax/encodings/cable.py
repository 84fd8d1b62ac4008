"""Context-aware biases for length extrapolation."""

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
    Tokens,
    Traits,
)
from cope_jax.encodings.common import project, sum_over_nearer
from cope_jax.registry import check_at_least


@dataclasses.dataclass(frozen=True)
class CABLEConfig:
    """The options of CABLE.

    Attributes:
      form: "paper" means the equations of the paper; "code" those of the authors' code: steps
        softplus(w_c·x + β), with β = 0 at the start, and no slopes.
      stddev: standard deviation of the initial w_c and w_s. The paper does not state it; the code
        has 0.02.
    """

    form: Literal["paper", "code"] = "paper"
    stddev: float = 0.02


@ENCODINGS.register("cable")
class CABLE(Encoding):
    """The distance of a key is the sum of steps that the tokens between key and query choose.

        a_ij = softmax_j(q_i·k_j/√K − g_ih (S_ih − S_jh)),   S_ih = Σ_{l≤i} relu(w_ch·x_l),   g_ih = softplus(w_sh·x_i).

    Veisi et al., "Context-aware Biases for Length Extrapolation" (arXiv 2503.08067); x is the input
    of the layer. The paper adds the bias, and its text leaves the sign of the steps open. Here the
    bias lowers the logit, so that constant steps and slopes give ALiBi, as the paper says. With
    form="code", S_ih = Σ_{l≤i} softplus(w_ch·x_l + β_h) and g = 1, as in github.com/axiomlab/Cable.
    That code also leaves out the division by √K, which is not here. CABLE is for causal attention.

    The carry is S_i − S_j, the sum of the steps after the key up to the query.

    Raises:
      ConfigError: `features` is called without x.
    """

    Config = CABLEConfig
    traits = Traits(causal_only=True)

    def __init__(self, config: CABLEConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(0, "cable", stddev=config.stddev)

        def kernel() -> nnx.Param[Array]:
            normal = jax.random.normal(rngs.params(), (shape.width, shape.num_heads))
            return nnx.Param(config.stddev * normal, axes=("embed", "heads"))

        self.step_kernel = kernel()
        if config.form == "code":
            self.step_bias = nnx.Param(jnp.zeros((shape.num_heads,)), axes=("heads",))
        else:
            self.slope_kernel = kernel()

    def features(self, tokens: Tokens, state: PyTree) -> tuple[PyTree, PyTree]:
        if self.config.form == "code":
            return (
                jax.nn.softplus(
                    project("cable", tokens.x, self.step_kernel[...], self.step_bias[...])
                ),
            ), ()
        steps_BMH = jax.nn.relu(project("cable", tokens.x, self.step_kernel[...]))
        return (steps_BMH, jax.nn.softplus(project("cable", tokens.x, self.slope_kernel[...]))), ()

    def initial_carry(self, q_BHLK: Array, q_features: PyTree) -> Carry:
        return Carry(sums=jnp.zeros(q_BHLK.shape[:3], accumulator_dtype(q_BHLK.dtype)))

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        sums_BHLM, after_BHL = sum_over_nearer(pairs.k_features[0], pairs, carry.sums)
        if self.config.form == "paper":
            sums_BHLM = pairs.q_features[1][..., None] * sums_BHLM
        return pairs.logits - sums_BHLM, carry._replace(sums=after_BHL)
