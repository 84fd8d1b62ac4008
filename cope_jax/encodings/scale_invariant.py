"""Scale-invariant attention."""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Carry, Encoding, Pairs, Traits
from cope_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ScaleInvariantConfig:
    """The options of scale-invariant attention.

    Attributes:
      tau: τ > 0, the distance below which logits change little.
    """

    tau: float = 10.0


@ENCODINGS.register("scale_invariant")
class ScaleInvariant(Encoding):
    """Stretches and lowers the logits of far keys, so that near and far keys both keep a share of
    attention at any length.

        a_ij = softmax_j(α q_i·k_j/√K + 1 − α²),   α² = 1 + 2 log(1 + |i − j|/τ).

    Anson et al. (arXiv 2505.17083). If q·k/√K is normal with mean 0 and variance 1, e^logit has the
    mean √e/(1 + t/τ) at distance t. For large t, its sum from t to a multiple of t depends on the
    multiple only. No parameters. The paper combines it with RoPE without its slow bands, such as
    `rope(bands=0.5)+scale_invariant`. It cannot be combined with an encoding that changes logits.
    """

    Config = ScaleInvariantConfig
    traits = Traits(excludes=("score",))

    def __init__(self, config: ScaleInvariantConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        if not config.tau > 0:
            raise ConfigError(f"scale_invariant.tau must be above 0, got {config.tau}")

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        distance_B1LM = jnp.abs(pairs.distance).astype(pairs.logits.dtype)
        growth_B1LM = 2 * jnp.log1p(distance_B1LM / self.config.tau)
        return pairs.logits * jnp.sqrt(1 + growth_B1LM) - growth_B1LM, carry
