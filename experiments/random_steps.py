"""Angles that tokens add up, by steps that nobody trains: a control of encodings that learn them.

    cope-jax compare --config=shakespeare --encodings=rope,mapformer,experiments/random_steps.py

experiments/RESULTS.md has what followed: "Angles that tokens add up".
"""

import dataclasses

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array, PyTree
from cope_jax.encodings import ENCODINGS, Tokens
from cope_jax.encodings.common import project
from cope_jax.encodings.rotations import TurnedByTokens, TurnedConfig, even_head_dim, frequencies


@dataclasses.dataclass(frozen=True)
class RandomStepsConfig(TurnedConfig):
    """The options of random steps.

    Attributes:
      base: the base of the frequencies of RoPE.
      seed: the seed of the steps.
    """

    base: float = 10_000.0
    seed: int = 0


@ENCODINGS.register("random_steps")
class RandomSteps(TurnedByTokens):
    """RoPE in which the step from token to token is not 1 but a random number, of each token.

        angle of pair c at index t:  θ_c Σ_{l≤t} w_c·x_l / √D,   θ_c = base^(−2c/K),   w_c ~ N(0, I).

    x is the input of the layer, whose length is about √D. The w_c never change, the same in all
    layers, and no gradient passes the angles. "Random accumulated rotations" of arXiv 2606.24975
    are of this kind; how exactly that paper draws them is not known to us.

    Raises:
      ConfigError: `features` is called without x, or the head width is odd.
    """

    Config = RandomStepsConfig

    def steps(self, tokens: Tokens, state: PyTree) -> tuple[Array, PyTree]:
        pairs = even_head_dim("random_steps", self.shape.head_dim) // 2
        key = jax.random.key(self.config.seed)
        draws_DC = jax.random.normal(key, (self.shape.width, pairs)) / self.shape.width**0.5
        steps_BMC = project("random_steps", jax.lax.stop_gradient(tokens.x), draws_DC)
        rates = jnp.asarray(frequencies(self.config.base, 2 * pairs), steps_BMC.dtype)
        return (steps_BMC * rates[None, None])[:, :, None], ()
