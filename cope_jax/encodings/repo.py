"""Rotary position embeddings at positions that each token chooses."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Encoding, Tokens
from cope_jax.encodings.common import project
from cope_jax.encodings.rotations import even_head_dim, frequencies, outer, rotate_pairs
from cope_jax.registry import check_at_least, check_unused


@dataclasses.dataclass(frozen=True)
class RePoConfig:
    """The options of RePo.

    Attributes:
      base: the base of the frequencies, at least 2.
      hidden: the width of r. None means D/8, rounded down, but at least 1.
      stddev: standard deviation of the initial matrices, which are normal and cut at three standard
        deviations. With the default, all positions start near 0, so that the model starts as
        without an encoding.
      position: "chosen" by the token, or "given": z is the position of the token, as in RoPE, and
        there are no parameters. The released models have it in their lowest layers, as a model has
        with `full_encoding`.
    """

    base: float = 500_000.0
    hidden: int | None = None
    stddev: float = 0.02
    position: Literal["chosen", "given"] = "chosen"


@ENCODINGS.register("repo")
class RePo(Encoding):
    """RoPE in which each token chooses its position, a real number, for each head.

        angle of pair c:  z base^(−2c/K),   z = W_z r,   r = SiLU(W_g x) ⊙ (W_c x).

    "Context re-positioning" (arXiv 2512.14391) and its released code. x is the input of the layer.
    Positions are not sums over the tokens, have no bounds, and do not depend on the order of the
    tokens. They are float32 (float64 for float64 inputs). With grouped heads, there is one position
    for each key/value head; the released code needs as many key heads as query heads.

    Raises:
      ConfigError: `features` is called without x, the head width is odd, or an option is out of
        range.
    """

    Config = RePoConfig

    def __init__(self, config: RePoConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(2, "repo", base=config.base)
        check_at_least(1, "repo", hidden=config.hidden)
        check_at_least(0, "repo", stddev=config.stddev)
        even_head_dim("repo", shape.head_dim)
        if config.position == "given":
            given = "with position=given"
            check_unused(config, "repo", hidden=given, stddev=given)
            return

        def initial(*size: int) -> Array:
            return config.stddev * jax.random.truncated_normal(rngs.params(), -3.0, 3.0, size)

        hidden = config.hidden or max(shape.width // 8, 1)
        self.gate = nnx.Param(initial(shape.width, hidden), axes=("embed", None))
        self.content = nnx.Param(initial(shape.width, hidden), axes=("embed", None))
        self.out = nnx.Param(initial(hidden, shape.kv_heads), axes=(None, "kv_heads"))

    def features(self, tokens: Tokens, state: PyTree) -> tuple[PyTree, PyTree]:
        if self.config.position == "given":
            positions = jnp.asarray(tokens.positions).astype(accumulator_dtype(tokens.k.dtype))
            return jnp.broadcast_to(positions[..., None], tokens.k.shape[:3]), ()
        gates_BMR = project("repo", tokens.x, self.gate[...])
        r_BMR = jax.nn.silu(gates_BMR) * project("repo", tokens.x, self.content[...])
        return project("repo", r_BMR, self.out[...]), ()

    def rotate(self, x_BLHK: Array, features: PyTree, positions_BL: Array) -> Array:
        rates = frequencies(self.config.base, self.shape.head_dim)
        return rotate_pairs(x_BLHK, outer(features, rates))
