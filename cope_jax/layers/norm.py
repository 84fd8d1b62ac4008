"""Normalisation by name."""

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array, accumulator_dtype
from cope_jax.layers.block_config import BlockConfig

NORMS = {"layer": nnx.LayerNorm, "rms": nnx.RMSNorm}
# E[x²] − E[x]² is off by some 1e-7 E[x²]: an epsilon that is smaller does not cover that where rows hardly vary.
_LEAST_EPSILON_OF_DIFFERENCES = 1e-6


class Norm(nnx.Module):
    """LayerNorm (Ba et al., arXiv 1607.06450) or RMSNorm (Zhang and Sennrich, arXiv 1910.07467) over the last axis.

    Computed in float32 whatever the input's type (float64 where the compute type is), which the output keeps.
    """

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        self.dtype = accumulator_dtype(config.dtype)
        self.norm = NORMS[config.norm](
            config.model_dim,
            epsilon=config.norm_epsilon,
            dtype=self.dtype,
            use_fast_variance=config.norm_epsilon >= _LEAST_EPSILON_OF_DIFFERENCES,
            rngs=rngs,
        )

    def __call__(self, x_BLD: Array) -> Array:
        wide_BLD = x_BLD.astype(self.dtype)
        if self.dtype != jnp.float64:
            return self.norm(wide_BLD).astype(x_BLD.dtype)
        with jax.numpy_dtype_promotion("standard"):  # Flax asks what float64 and float32 make together
            return self.norm(wide_BLD)
