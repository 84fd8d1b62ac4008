"""Context-aware rotary position embeddings."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array, PyTree
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Tokens
from cope_jax.encodings.common import project
from cope_jax.encodings.rotations import TurnedByTokens, TurnedConfig, even_head_dim
from cope_jax.registry import check_at_least


@dataclasses.dataclass(frozen=True)
class CARoPEConfig(TurnedConfig):
    """The options of CARoPE.

    Attributes:
      stddev: standard deviation of the initial W. With W near 0, f is near 0.59. The paper says
        that the encoding starts as RoPE, but not how; this start is ours.
    """

    stddev: float = 0.02


@ENCODINGS.register("carope")
class CARoPE(TurnedByTokens):
    """RoPE whose base frequency each token chooses for each head.

        angle of pair c at index t:  Σ_{l≤t} f_h(x_l)^c,  c = 1 … K/2,   f_h(x) = 1 / (1 + softplus(w_h·x)).

    Veisi et al., "Context-aware Rotary Position Embedding" (arXiv 2507.23083). With f = base^(−2/K)
    for every token, the rates are those of RoPE from its second pair on, and one slower rate.
    Features c − 1 and c − 1 + K/2 are a pair. x is the input of the layer, and positions are not
    used. All steps are positive, so no token can turn back what another has turned.

    Raises:
      ConfigError: `features` is called without x, or the head width is odd.
    """

    Config = CARoPEConfig

    def __init__(self, config: CARoPEConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(0, "carope", stddev=config.stddev)
        even_head_dim("carope", shape.head_dim)
        kernel = config.stddev * jax.random.normal(rngs.params(), (shape.width, shape.kv_heads))
        self.kernel = nnx.Param(kernel, axes=("embed", "kv_heads"))

    def steps(self, tokens: Tokens, state: PyTree) -> tuple[Array, PyTree]:
        f_BMG = 1 / (1 + jax.nn.softplus(project("carope", tokens.x, self.kernel[...])))
        powers_C = jnp.arange(1, self.shape.head_dim // 2 + 1, dtype=f_BMG.dtype)
        return f_BMG[..., None] ** powers_C[None, None, None], ()
