"""Rotary position embeddings whose slow bands turn by the token's own coordinate."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array, PyTree
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Encoding, Tokens
from cope_jax.encodings.common import project
from cope_jax.encodings.rotations import even_head_dim, frequencies, outer, rotate_pairs
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least

_LARGEST_LOGIT = math.log(1e6 - 1)  # of 1 − 10⁻⁶


@dataclasses.dataclass(frozen=True)
class DaRoPEConfig:
    """The options of DaRoPE.

    Attributes:
      base: the base of the frequencies θ_c = base^(−2c/K).
      length: L, the length of training. None means the model's maximum length.
      alpha: the initial α.
      stddev: standard deviation of the initial w.
    """

    base: float = 500_000.0
    length: int | None = None
    alpha: float = 0.5
    stddev: float = 0.1


@ENCODINGS.register("darope")
class DaRoPE(Encoding):
    """RoPE in which the token chooses where it stands in the slow bands, those that turn less than
    once in L tokens.

        angle of pair c at position m:  m θ_c                    if θ_c ≥ 2π/L,
                                        L σ(w_h·x_m + α_h logit((m + ½)/L)) θ_c   otherwise.

    arXiv 2609.34556; (m + ½)/L is clipped to [10⁻⁶, 1 − 10⁻⁶]. With w = 0 and α = 1 this is RoPE
    with slow bands shifted by ½. x is the input of the layer. w `[D, G]` and α `[G]` are learned in
    each layer. With grouped heads, there is one coordinate for each key/value head.

    Raises:
      ConfigError: `features` is called without x, the head width is odd, or neither `length` nor
        the maximum length of the model is known.
    """

    Config = DaRoPEConfig

    def __init__(self, config: DaRoPEConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        even_head_dim("darope", shape.head_dim)
        length = shape.max_length if config.length is None else config.length
        if length is None:
            raise ConfigError("darope needs the length of training: give length or max_length")
        check_at_least(1, "darope", length=length)
        check_at_least(2, "darope", base=config.base)
        check_at_least(0, "darope", stddev=config.stddev)
        self.length = length
        kernel = config.stddev * jax.random.normal(rngs.params(), (shape.width, shape.kv_heads))
        self.kernel = nnx.Param(kernel, axes=("embed", "kv_heads"))
        self.alpha = nnx.Param(jnp.full((shape.kv_heads,), config.alpha), axes=("kv_heads",))

    def features(self, tokens: Tokens, state: PyTree) -> tuple[PyTree, PyTree]:
        return project("darope", tokens.x, self.kernel[...]), ()

    def rotate(self, x_BLHK: Array, features: PyTree, positions_BL: Array) -> Array:
        return rotate_pairs(x_BLHK, self._angles(features, positions_BL))

    def _angles(self, content_BMG: Array, positions_BM: Array) -> Array:
        dtype = content_BMG.dtype
        rates = frequencies(self.config.base, self.shape.head_dim)
        fast = int(np.sum(rates >= 2 * math.pi / self.length))
        integers_BM1 = jnp.asarray(positions_BM)[:, :, None]
        positions_BM1 = integers_BM1.astype(dtype)
        # logit((m + ½)/L) = log((m + ½)/(L − m − ½)): float32 does not have 1 − 10⁻⁶, nor 1 −
        # 1/(2L) to many digits.
        behind, ahead = positions_BM1 + 0.5, (self.length - integers_BM1).astype(dtype) - 0.5
        logit = jnp.log(jnp.maximum(behind, 0) / jnp.maximum(ahead, 0)).clip(
            -_LARGEST_LOGIT, _LARGEST_LOGIT
        )
        alpha_11G = self.alpha[...].astype(dtype)[None, None]
        slow = self.length * jax.nn.sigmoid(content_BMG + alpha_11G * logit)
        near = jnp.broadcast_to(positions_BM1, content_BMG.shape)
        return jnp.concatenate([outer(near, rates[:fast]), outer(slow, rates[fast:])], axis=-1)
