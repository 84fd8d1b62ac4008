"""Group representational position encoding, multiplicative and contextual."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array, PyTree
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Tokens
from cope_jax.encodings.common import inverse_softplus, project
from cope_jax.encodings.rotations import TurnedByTokens, TurnedConfig, even_head_dim, frequencies
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least


@dataclasses.dataclass(frozen=True)
class GRAPEConfig(TurnedConfig):
    """The options of contextual GRAPE.

    Attributes:
      base: the base of the initial frequencies θ_c = base^(−2c/K).
      step: the initial step of every token; at 1, the model starts as RoPE.
      per_head: whether each key/value head has steps of its own.
    """

    base: float = 10_000.0
    step: float = 1e-3
    per_head: bool = False


@ENCODINGS.register("grape")
class GRAPE(TurnedByTokens):
    """RoPE that counts steps of the tokens instead of positions, with learned frequencies.

        angle of pair c at index t:  θ_c Σ_{l<t} ω_l,   ω_l = softplus(w·x_l + b) ≥ 0,   θ_c learned.

    Zhang et al. (arXiv 2512.07805), the contextual multiplicative form ("GRAPE-M-ctx"). x is the
    input of the layer, and positions are not used. w starts at 0, so every token starts with the
    same step. Released code differs from this and from each other: one version takes σ((w·x +
    b)/16) in place of softplus, another initialises w again with a normal distribution; both
    normalise q and k after the rotation. `grape_additive` has the gated additive form.

    Raises:
      ConfigError: `features` is called without x, the head width is odd, or `step` or `base` is out
        of range.
    """

    Config = GRAPEConfig
    own_step_turns = False

    def __init__(self, config: GRAPEConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(2, "grape", base=config.base)
        if not 0 < config.step <= 100:
            raise ConfigError(f"grape.step must lie in (0, 100], got {config.step}")
        steps, axis = (shape.kv_heads, "kv_heads") if config.per_head else (1, None)
        self.kernel = nnx.Param(jnp.zeros((shape.width, steps)), axes=("embed", axis))
        self.bias = nnx.Param(jnp.full((steps,), inverse_softplus(config.step)), axes=(axis,))
        rates = frequencies(config.base, even_head_dim("grape", shape.head_dim))
        self.log_frequencies = nnx.Param(jnp.asarray(np.log(rates), jnp.float32))

    def steps(self, tokens: Tokens, state: PyTree) -> tuple[Array, PyTree]:
        steps = jax.nn.softplus(project("grape", tokens.x, self.kernel[...], self.bias[...]))
        return steps[..., None] * jnp.exp(self.log_frequencies[...].astype(steps.dtype))[
            None, None, None
        ], ()
