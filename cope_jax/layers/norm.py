"""Normalisation by name."""

import jax.numpy as jnp
from flax import nnx

from cope_jax.layers.config import BlockConfig
from cope_jax.typing import Array

NORMS = {"layer": nnx.LayerNorm, "rms": nnx.RMSNorm}


class Norm(nnx.Module):
    """LayerNorm (Ba et al., arXiv 1607.06450) or RMSNorm (Zhang and Sennrich, arXiv 1910.07467) over the last axis.

    Computed in float32 whatever the input's type, which the output keeps.
    """

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        self.norm = NORMS[config.norm](config.model_dim, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x_BLD: Array) -> Array:
        return self.norm(x_BLD.astype(jnp.float32)).astype(x_BLD.dtype)
