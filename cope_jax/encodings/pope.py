"""Polar coordinate position embeddings."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Encoding, Traits
from cope_jax.encodings.rotations import cos_sin
from cope_jax.registry import check_at_least


@dataclasses.dataclass(frozen=True)
class PoPEConfig:
    """The options of PoPE.

    Attributes:
      base: the base of the frequencies θ_c = base^(−c/K), one for each feature.
      phase: the initial phases δ. "zero" means 0, which the paper uses for longer texts. "uniform"
        means uniform in (−2π, 0), which the paper uses for indirect indexing.
    """

    base: float = 10_000.0
    phase: Literal["zero", "uniform"] = "zero"


@ENCODINGS.register("pope")
class PoPE(Encoding):
    """Content is the length and position the angle of a vector in the plane, for each feature of a
    head.

        q_i·k_j/√K is replaced by  Σ_c softplus(q_ic) softplus(k_jc) cos((j − i) θ_c + δ_c) / √K,   θ_c = base^(−c/K).

    arXiv 2509.10534. In RoPE, features of query and key also rotate the angle, so content and
    position mix; here they do not. δ is learned, `[G, K]`, one for each key/value head, and clipped
    to [−2π, 0]. Rotated queries and keys have 2K features, so attention and caches of keys need
    more memory.

    Raises:
      ConfigError: the base is below 2.
    """

    Config = PoPEConfig
    traits = Traits(excludes=("rotate",))

    def __init__(self, config: PoPEConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(2, "pope", base=config.base)
        size = (shape.kv_heads, shape.head_dim)
        uniform = jax.random.uniform(rngs.params(), size, minval=-2 * math.pi, maxval=0.0)
        phase = uniform if config.phase == "uniform" else jnp.zeros(size)
        self.phase = nnx.Param(phase, axes=("kv_heads", None))

    def rotate(self, x_BLHK: Array, features: PyTree, positions_BL: Array) -> Array:
        zero = jnp.zeros((), accumulator_dtype(x_BLHK.dtype))
        return self._polar(x_BLHK, positions_BL, zero).astype(x_BLHK.dtype)

    def rotate_keys(self, k_BMGK: Array, features: PyTree, positions_BM: Array) -> Array:
        phase_GK = _clipped(self.phase[...].astype(accumulator_dtype(k_BMGK.dtype)))
        return self._polar(k_BMGK, positions_BM, phase_GK[None, None]).astype(k_BMGK.dtype)

    def _polar(self, x_BLHK: Array, positions_BL: Array, phase: Array) -> Array:
        dtype, width = phase.dtype, self.shape.head_dim
        rates = jnp.asarray(np.power(self.config.base, -np.arange(width) / width), dtype)
        angles = (
            jnp.asarray(positions_BL).astype(dtype)[:, :, None, None] * rates[None, None, None]
            + phase
        )
        length = jax.nn.softplus(x_BLHK.astype(dtype))
        cos, sin = cos_sin(angles)
        return jnp.concatenate([length * cos, length * sin], axis=-1)


def _clipped(phase: Array) -> Array:
    """The phase within [−2π, 0]; at the bounds, where it starts, it has its full gradient."""
    return jnp.where(phase > 0, 0.0, jnp.where(phase < -2 * math.pi, -2 * math.pi, phase))
