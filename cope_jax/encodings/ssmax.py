"""Scalable softmax: queries that grow with the logarithm of the number of keys."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Encoding, Tokens, Traits
from cope_jax.encodings.common import last_segment, segment_starts
from cope_jax.registry import check_at_least


@dataclasses.dataclass(frozen=True)
class SSMaxConfig:
    """The options of scalable softmax.

    Attributes:
      scale: the initial s. With 0.168, the mean of s log n over the first 1,024 tokens is 1.
    """

    scale: float = 0.168


@ENCODINGS.register("ssmax")
class SSMax(Encoding):
    """Multiplies the content logits by a learned multiple of log n, so that attention stays sharp
    over many keys.

        a_ij = softmax_j(s_h log n_i · q_i·k_j/√K),   n_i: the tokens of the document up to i.

    "SSMax" or "log-n scale", Nakanishi (arXiv 2501.19399), without its bias. n counts tokens, so it
    does not depend on their positions, and a window or a mask does not change it. s is `[H]`. It
    says nothing about the order of the keys; compose it with an encoding that does, such as
    `rope+ssmax`.
    """

    Config = SSMaxConfig
    traits = Traits(causal_only=True)

    def __init__(self, config: SSMaxConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(0, "ssmax", scale=config.scale)
        self.scale = nnx.Param(jnp.full((shape.num_heads,), config.scale), axes=("heads",))

    def features(self, tokens: Tokens, state: PyTree) -> tuple[PyTree, PyTree]:
        batch, length = tokens.k.shape[:2]
        before_B, last_B = (jnp.zeros((batch,), jnp.int32), None) if state is None else state
        index_1M = jnp.arange(length, dtype=jnp.int32)[None]
        count_BM = before_B[:, None] + index_1M + 1
        starts_BM = segment_starts(tokens.segment_ids, last_B)
        if starts_BM is not None:
            first_BM = jax.lax.cummax(jnp.where(starts_BM, index_1M, -1), axis=1)
            count_BM = jnp.where(first_BM < 0, count_BM, index_1M - first_BM + 1)
        log_BM = jnp.log(count_BM.astype(accumulator_dtype(tokens.k.dtype)))
        return log_BM[..., None], (count_BM[:, -1], last_segment(tokens.segment_ids, batch))

    def rotate(self, x_BLHK: Array, features: PyTree, positions_BL: Array) -> Array:
        factors_BLH = features * self.scale[...].astype(features.dtype)[None, None]
        return (x_BLHK.astype(features.dtype) * factors_BLH[..., None]).astype(x_BLHK.dtype)

    def rotate_keys(self, k_BMGK: Array, features: PyTree, positions_BM: Array) -> Array:
        return k_BMGK
