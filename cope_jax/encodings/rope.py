"""Rotary position embeddings, their subsets of bands, and their forms for longer contexts."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Encoding, Traits
from cope_jax.encodings.rotations import even_head_dim, frequencies, rotate_pairs
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least, check_fields, check_unused


@dataclasses.dataclass(frozen=True)
class RoPEConfig:
    """The frequencies of RoPE. A band is a pair of features, with one frequency.

    At most one of `interpolation`, `ntk`, `yarn`, `longrope` and `llama3` may be given. They extend
    a model to texts longer than those of its training, and None means that the option is off.

    Attributes:
      base: the base of the frequencies θ = base^(−2c/R), at least 2. The longest wavelength is
        below 2π·base.
      fraction: share of the head width that is rotated, in (0, 1]. The number of rotated features
        is rounded down to an even number.
      bands: share of the bands that turn, the fastest first, in [0, 1] ("p-RoPE", arXiv
        2410.06205).
      longest: bands with a longer wavelength do not turn; with the length of training this is HoPE
        (ACL 2025). Wavelengths are those of `base`, before s changes anything. None means that all
        bands turn.
      clip: n: the frequency of the r-th of the n slowest bands, r = 0 … n−1, is multiplied by (1 +
        cos(πr/(n−1)))/2, so that the slowest does not turn ("Clipped RoPE", which its paper calls
        CoPE, arXiv 2602.05258; it has 20 of 64 bands). None means that none is multiplied.
      decay: with a number such as 512, queries also shrink and keys grow by the factor
        z_c^(position/decay), z_c = (2c + 0.4R)/(1.4R), so that far keys count less ("xPos", arXiv
        2212.10554). It is for causal attention. In float32, it overflows from position 70·decay.
        None means no decay.
      interpolation: s: positions are divided by s (arXiv 2306.15595).
      ntk: s: the base becomes base·s^(R/(R−2)), so that the slowest band is divided by s and the
        fastest stays. It needs two bands or more.
      yarn: (s, length) or (s, length, slow, fast): bands with fewer than `slow` = 1 turns in
        `length` tokens are divided by s, bands with more than `fast` = 32 stay, and others are
        between (arXiv 2309.00071).
      yarn_ramp: how `yarn` goes from one to the other: linearly in the number of turns, as the
        paper says ("turns"), or in the index of the band, as its released code and other libraries
        do ("bands").
      longrope: divisors of the frequencies, one for each band (arXiv 2402.13753). Published models
        also have the magnitude √(1 + ln s/ln L), for texts s times as long as L; it is not the
        default here.
      llama3: (s, low, high, length), the form of Llama 3.1 and later. Wavelengths above length/low
        become s times as long. Wavelengths below length/high do not change. Between them the change
        is gradual.
      magnitude: a factor for rotated queries and keys. None means 0.1 ln s + 1 with `yarn`, else 1.
    """

    base: float = 10_000.0
    fraction: float = 1.0
    bands: float = 1.0
    longest: float | None = None
    clip: int | None = None
    decay: float | None = None
    interpolation: float | None = None
    ntk: float | None = None
    yarn: tuple[float, ...] | None = None
    yarn_ramp: Literal["turns", "bands"] = "turns"
    longrope: tuple[float, ...] | None = None
    llama3: tuple[float, ...] | None = None
    magnitude: float | None = None

    def __post_init__(self):
        check_fields(self, "rope")
        if self.yarn is not None and len(self.yarn) == 2:
            object.__setattr__(self, "yarn", (*self.yarn, 1.0, 32.0))


@ENCODINGS.register("rope")
class RoPE(Encoding):
    """Rotates queries and keys by angles proportional to their positions, so that q·k depends only
    on the distance.

    With R = 2⌊fraction·K/2⌋ rotated features, feature c < R/2 is paired with feature c + R/2
    (half-split). At position i, this pair is rotated by the angle i θ, θ = base^(−2c/R). Su et al.
    (arXiv 2104.09864). Angles are float32 (float64 for float64 inputs). Positions that are not used
    as they are, are written as changes of θ.

    With `llama3` and `yarn`, θ becomes θ (w + (1 − w)/s), where w rises from 0 to 1 with the number
    of turns in `length` tokens, length·θ/2π.
    """

    Config = RoPEConfig

    def __init__(self, config: RoPEConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        self.traits = Traits(causal_only=config.decay is not None)
        check_at_least(2, "rope", base=config.base)
        check_at_least(
            1, "rope", decay=config.decay, interpolation=config.interpolation, ntk=config.ntk
        )
        if not 0 < config.fraction <= 1:
            raise ConfigError(f"rope.fraction must lie in (0, 1], got {config.fraction}")
        if not 0 <= config.bands <= 1:
            raise ConfigError(f"rope.bands must lie in [0, 1], got {config.bands}")
        if config.fraction == 1:
            even_head_dim("rope", shape.head_dim)
        if self._rotated() == 0:
            raise ConfigError(
                f"rope.fraction={config.fraction} of head_dim={shape.head_dim} is less than one pair of features: give "
                "a larger fraction or head_dim"
            )
        if config.ntk is not None and self._rotated() == 2:
            raise ConfigError(
                f"rope.ntk has no effect on one pair of features, fraction={config.fraction} of "
                f"head_dim={shape.head_dim}: give a larger fraction or head_dim"
            )
        if config.longest is not None and not config.longest > 2 * math.pi:
            raise ConfigError(
                f"rope.longest must be above 2π, the shortest wavelength, got {config.longest}"
            )
        if config.clip is not None and not 2 <= config.clip <= self._rotated() // 2:
            raise ConfigError(
                f"rope.clip must be from 2 to {self._rotated() // 2}, the number of bands, got {config.clip}"
            )
        if config.magnitude is not None and not 0 < config.magnitude <= 1000:
            raise ConfigError(f"rope.magnitude must lie in (0, 1000], got {config.magnitude}")
        forms = [
            name
            for name in ("interpolation", "ntk", "yarn", "longrope", "llama3")
            if getattr(config, name)
        ]
        if len(forms) > 1:
            raise ConfigError(f"rope: {' and '.join(forms)} exclude each other: give one of them")
        if config.yarn is None:
            check_unused(config, "rope", yarn_ramp="without yarn")
        else:
            factor, length, slow, fast = config.yarn if len(config.yarn) == 4 else (0.0,) * 4
            if not (factor >= 1 and length > 0 and 0 < slow < fast):
                raise ConfigError(
                    "rope.yarn must be (factor, length) or (factor, length, slow, fast) with factor ≥ 1, length > 0 "
                    f"and 0 < slow < fast, got {config.yarn}"
                )
        if config.longrope is not None:
            if len(config.longrope) != self._rotated() // 2 or not min(config.longrope) > 0:
                raise ConfigError(
                    f"rope.longrope must have {self._rotated() // 2} positive divisors, one for each pair of rotated "
                    f"features, got {config.longrope}"
                )
        if config.llama3 is not None:
            numbers = len(config.llama3) == 4 and config.llama3
            if not numbers or not (
                min(numbers) > 0 and numbers[0] >= 1 and numbers[1] < numbers[2]
            ):
                raise ConfigError(
                    f"rope.llama3 must be (factor, low, high, length) with factor ≥ 1 and 0 < low < high, got "
                    f"{config.llama3}"
                )

    def _rotated(self) -> int:
        return 2 * int(self.config.fraction * self.shape.head_dim / 2)

    def rotate(self, x_BLHK: Array, features: PyTree, positions_BL: Array) -> Array:
        return self._turn(x_BLHK, positions_BL, 1.0)

    def rotate_keys(self, k_BMGK: Array, features: PyTree, positions_BM: Array) -> Array:
        return self._turn(k_BMGK, positions_BM, -1.0)

    def _turn(self, x_BLHK: Array, positions_BL: Array, sign: float) -> Array:
        dtype, rotated = accumulator_dtype(x_BLHK.dtype), self._rotated()
        positions_BL11 = jnp.asarray(positions_BL)[:, :, None, None].astype(dtype)
        rates = jnp.asarray(_frequencies(self.config, rotated), dtype)[None, None, None]
        scale = jnp.asarray(_magnitude(self.config), dtype)
        if self.config.decay is not None:
            z = (np.arange(0, rotated, 2) + 0.4 * rotated) / (1.4 * rotated)
            log_z = jnp.asarray(np.log(z), dtype)[None, None, None]
            scale = scale * jnp.exp(sign / self.config.decay * positions_BL11 * log_z)
        return rotate_pairs(x_BLHK, positions_BL11 * rates, scale)


def _magnitude(config: RoPEConfig) -> float:
    if config.magnitude is not None:
        return config.magnitude
    return 0.1 * math.log(config.yarn[0]) + 1 if config.yarn is not None else 1.0


def _frequencies(config: RoPEConfig, rotated: int) -> np.ndarray:
    """Returns θ of each band, 0 where the band does not turn."""
    base = config.base * (config.ntk ** (rotated / (rotated - 2)) if config.ntk else 1.0)
    rates, bands = frequencies(base, rotated), rotated // 2
    wavelengths = 2 * np.pi / frequencies(config.base, rotated)
    still = np.zeros(bands, bool) if config.longest is None else wavelengths > config.longest
    if config.interpolation is not None:
        rates = rates / config.interpolation
    if config.longrope is not None:
        rates = rates / np.asarray(config.longrope)
    if config.llama3 is not None:
        factor, low, high, length = config.llama3
        rates = _between(rates, factor, (length * rates / (2 * np.pi) - low) / (high - low))
    if config.yarn is not None:
        factor, length, slow, fast = config.yarn
        kept = (length * rates / (2 * np.pi) - slow) / (fast - slow)
        if config.yarn_ramp == "bands":
            # The bands, rounded outward, that turn `fast` and `slow` times.
            first, last = (
                bands * math.log(length / (2 * math.pi * turns)) / math.log(base)
                for turns in (fast, slow)
            )
            first, last = max(math.floor(first), 0), min(math.ceil(last), rotated - 1)
            kept = 1 - (np.arange(bands) - first) / max(last - first, 1e-3)
        rates = _between(rates, factor, kept)
    if config.clip is not None:
        rates[-config.clip :] *= (1 + np.cos(np.linspace(0, np.pi, config.clip))) / 2
    return np.where((np.arange(bands) < config.bands * bands) & ~still, rates, 0.0)


def _between(rates: np.ndarray, factor: float, kept: np.ndarray) -> np.ndarray:
    """Returns θ where `kept` ≥ 1, θ/factor where it is ≤ 0, and a mixture between."""
    kept = np.clip(kept, 0, 1)
    return rates * (kept + (1 - kept) / factor)
