"""Rotary position embeddings."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Encoding
from cope_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class RoPEConfig:
    """The frequencies of RoPE.

    Attributes:
      base: the base of the frequencies θ = base^(−2c/R). The longest wavelength is below 2π·base.
      fraction: share of the head width that is rotated, in (0, 1]. The number of rotated features is rounded down to an
        even number.
      llama3: (factor, low, high, length), the scaling with which Llama 3.1 and later read texts longer than `length`,
        the length of earlier training. Wavelengths above length/low become `factor` times as long. Wavelengths below
        length/high do not change. Between them the change is gradual. None means no scaling.
    """

    base: float = 10_000.0
    fraction: float = 1.0
    llama3: tuple[float, ...] | None = None


@ENCODINGS.register("rope")
class RoPE(Encoding):
    """Rotates queries and keys by angles proportional to their positions, so that q·k depends only on the distance.

    With R = 2⌊fraction·K/2⌋ rotated features, feature c < R/2 is paired with feature c + R/2 (half-split). At position
    i, this pair is rotated by the angle i θ, θ = base^(−2c/R). Su et al. (arXiv 2104.09864). Angles are float32
    (float64 for float64 inputs).

    With `llama3`, the angle i θ becomes i θ (s + (1 − s)/factor), with s = (length·θ/2π − low)/(high − low), clipped to
    [0, 1].
    """

    Config = RoPEConfig

    def __init__(self, config: RoPEConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        if not 0 < config.base < math.inf:
            raise ConfigError(f"rope.base must be positive and finite, got {config.base}")
        if not 0 < config.fraction <= 1:
            raise ConfigError(f"rope.fraction must lie in (0, 1], got {config.fraction}")
        if self._rotated() == 0:
            raise ConfigError(
                f"rope.fraction={config.fraction} of head_dim={shape.head_dim} is less than one pair of features: give "
                "a larger fraction or head_dim"
            )

        if config.llama3 is not None:
            numbers = len(config.llama3) == 4 and config.llama3
            if not numbers or not (min(numbers) > 0 and numbers[0] >= 1 and numbers[1] < numbers[2]):
                raise ConfigError(
                    f"rope.llama3 must be (factor, low, high, length) with factor ≥ 1 and 0 < low < high, got "
                    f"{config.llama3}"
                )

    def _rotated(self) -> int:
        return 2 * int(self.config.fraction * self.shape.head_dim / 2)

    def rotate(
        self,
        q_BLHK: Array,
        k_BMGK: Array,
        q_features: PyTree,
        k_features: PyTree,
        q_positions_BL: Array,
        k_positions_BM: Array,
    ) -> tuple[Array, Array]:
        return self._turn(q_BLHK, q_positions_BL), self._turn(k_BMGK, k_positions_BM)

    def _turn(self, x_BLHK: Array, positions_BL: Array) -> Array:
        dtype, rotated = accumulator_dtype(x_BLHK.dtype), self._rotated()
        frequencies = np.power(self.config.base, -np.arange(0, rotated, 2) / rotated)
        if self.config.llama3 is not None:
            factor, low, high, length = self.config.llama3
            kept = np.clip((length * frequencies / (2 * np.pi) - low) / (high - low), 0, 1)
            frequencies = frequencies * (kept + (1 - kept) / factor)
        angles_BL1C = positions_BL[:, :, None, None].astype(dtype) * jnp.asarray(frequencies, dtype)[None, None, None]
        sin, cos = jnp.sin(angles_BL1C), jnp.cos(angles_BL1C)
        x = x_BLHK[..., :rotated].astype(dtype)
        first, second = x[..., : rotated // 2], x[..., rotated // 2 :]
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return jnp.concatenate([turned.astype(x_BLHK.dtype), x_BLHK[..., rotated:]], axis=-1)
