"""Functional interpolation of relative positions."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Carry, Encoding, Pairs, Traits
from cope_jax.errors import ConfigError
from cope_jax.ops.network import Network, Pieces, evaluate, pieces
from cope_jax.registry import check_at_least


@dataclasses.dataclass(frozen=True)
class FIREConfig:
    """The options of FIRE.

    Attributes:
      hidden: width of the network f_θ.
      c: initial value of c, the scale in the logarithm.
      threshold: L₀. At positions up to |m|·L₀, the divisor is ψ(|m|·L₀) instead of ψ(i). m is
        learned and starts at 1.
    """

    hidden: int = 32
    c: float = 0.1
    threshold: float = 512.0


@ENCODINGS.register("fire")
class FIRE(Encoding):
    """A small network turns the distance, divided by the query's position, into a bias for each
    head.

    a_ij = softmax_j(q_i·k_j/√K + f_θ(ψ(|i−j|) / ψ(max(|m| L₀, i, j)))_h), ψ(x) = log(1 + |c| x).
    f_θ is an MLP 1 → hidden → H with ReLU. c, m and θ are learned. Li et al. (arXiv 2310.04418). In
    the paper i ≥ j. Here the maximum also includes j, so that the quotient is at most 1 without a
    causal mask too.
    """

    Config = FIREConfig
    traits = Traits(heavy_score=True)

    def __init__(self, config: FIREConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(1, "fire", hidden=config.hidden, threshold=config.threshold)
        if not config.c > 0:
            raise ConfigError(f"fire.c must be positive, got {config.c}")
        hidden, heads = config.hidden, shape.num_heads
        self.hidden_kernel = nnx.Param(jax.random.normal(rngs.params(), (hidden,)))
        self.hidden_bias = nnx.Param(jnp.zeros((hidden,)))
        out_kernel = jax.random.normal(rngs.params(), (hidden, heads)) / hidden**0.5
        self.out_kernel = nnx.Param(out_kernel, axes=(None, "heads"))
        self.out_bias = nnx.Param(jnp.zeros((heads,)), axes=("heads",))
        self.c = nnx.Param(jnp.full((), config.c))
        self.threshold_scale = nnx.Param(jnp.ones(()))

    def initial_carry(self, q_BHLK: Array, q_features: PyTree) -> Carry:
        """The pieces of the network for each query, which kernels read."""
        del q_features
        knots_F, *of_heads = pieces(self._network(accumulator_dtype(q_BHLK.dtype)))
        rows = (z[None, :, None] for z in (knots_F[None], *of_heads))
        shapes = ((*q_BHLK.shape[:3], z.shape[-1]) for z in (knots_F, *of_heads))
        return Carry(constants=Pieces(*map(jnp.broadcast_to, rows, shapes)))

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        dtype = pairs.logits.dtype
        c, scale = (jnp.abs(p[...].astype(dtype)) for p in (self.c, self.threshold_scale))
        distance_BLM = jnp.abs(pairs.distance[:, 0]).astype(dtype)
        # A logarithm for each row and each column, then the maximum: one for each pair costs as
        # much as the numerator.
        q_BL1, k_B1M = (
            jnp.log1p(c * jnp.maximum(scale * self.config.threshold, positions.astype(dtype)))
            for positions in (pairs.q_positions[:, :, None], pairs.k_positions[:, None, :])
        )
        progress_BLM = jnp.log1p(c * distance_BLM) / jnp.maximum(q_BL1, k_B1M)
        bias_BHLM = evaluate(progress_BLM, self._network(dtype), carry.constants)
        bias_BHLM += self.out_bias[...].astype(dtype)[None, :, None, None]
        return pairs.logits + bias_BHLM, carry

    def _network(self, dtype: Any) -> Network:
        weights = (self.hidden_kernel, self.hidden_bias, self.out_kernel)
        return Network(*(w[...].astype(dtype) for w in weights))
