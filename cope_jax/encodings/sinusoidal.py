"""Fixed sinusoidal position embeddings."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array, accumulator_dtype
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Encoding, Traits
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least


@dataclasses.dataclass(frozen=True)
class SinusoidalConfig:
    """The frequencies of the sinusoidal encoding.

    Attributes:
      base: the base of the frequencies base^(−2c/D). All wavelengths are below 2π·base.
    """

    base: float = 10_000.0


@ENCODINGS.register("sinusoidal")
class Sinusoidal(Encoding):
    """Adds sines and cosines of the absolute position, in alternating features, to the token
    embedding.

    x_i[2c] ← x_i[2c] + sin(i / base^(2c/D)),  x_i[2c+1] ← x_i[2c+1] + cos(i / base^(2c/D)).
    Vaswani et al. (arXiv 1706.03762), section 3.5. The model width D must be even.
    """

    Config = SinusoidalConfig
    traits = Traits(embeds_input=True)

    def __init__(self, config: SinusoidalConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(2, "sinusoidal", base=config.base)
        if shape.width % 2:
            raise ConfigError(f"encoding 'sinusoidal' needs an even model width, got {shape.width}")

    def embed(self, x_BLD: Array, positions_BL: Array) -> Array:
        dtype = accumulator_dtype(x_BLD.dtype)
        width = x_BLD.shape[-1]
        frequencies = np.power(self.config.base, -np.arange(0, width, 2) / width)
        angles = positions_BL[..., None].astype(dtype) * jnp.asarray(frequencies, dtype)[None, None]
        waves = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(
            *positions_BL.shape, width
        )
        return (x_BLD.astype(dtype) + waves).astype(x_BLD.dtype)
