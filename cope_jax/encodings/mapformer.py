"""The rotations of MapFormer, which integrate signed steps."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array, PyTree
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Tokens
from cope_jax.encodings.common import project
from cope_jax.encodings.rotations import TurnedByTokens, TurnedConfig, even_head_dim
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least


@dataclasses.dataclass(frozen=True)
class MapFormerConfig(TurnedConfig):
    """The options of MapFormer's rotations.

    Attributes:
      rank: r, the number of coordinates of a step, such as the dimensions of the world.
      world: the number of places along one dimension of the world. The slowest pair turns about
        once in it if fastest = 2π and there are many pairs.
      fastest: ω_max, the largest initial frequency, above 1 and at most 2π.
    """

    rank: int = 2
    world: float = 64.0
    fastest: float = 2 * math.pi


@ENCODINGS.register("mapformer")
class MapFormer(TurnedByTokens):
    """Each token is a signed step on a map; queries and keys are rotated by the place that the
    steps have reached.

        angle of pair c at index t:  ω_c Σ_{l≤t} Δ_lc,   Δ_l = W_out W_in x_l,   ω_c learned,
        ω_c starts at ω_max (2π / (world·ω_max))^(2c/K).

    "MapFormer-WM" of arXiv 2511.19279. An action and its inverse cancel, which the gates of CoPE,
    all positive, cannot do. W_in is `[D, r]`, W_out `[r, K/2]`, shared by the heads. The paper
    takes x from the token embeddings once, before all layers. Here x is the input of each layer,
    which is the normalised embedding in the first layer only. So deeper models differ from the
    paper.

    Raises:
      ConfigError: `features` is called without x, the head width is odd, or `fastest` is not in (1,
        2π].
    """

    Config = MapFormerConfig

    def __init__(self, config: MapFormerConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(1, "mapformer", rank=config.rank, world=config.world)
        if not 1 < config.fastest <= 2 * math.pi:
            raise ConfigError(
                f"mapformer.fastest must be above 1 and at most 2π, got {config.fastest}"
            )
        pairs = even_head_dim("mapformer", shape.head_dim) // 2
        initial = jax.nn.initializers.lecun_normal()
        self.into = nnx.Param(initial(rngs.params(), (shape.width, config.rank)))
        self.out = nnx.Param(initial(rngs.params(), (config.rank, pairs)))
        slowest = 2 * math.pi / (config.world * config.fastest)
        rates = config.fastest * slowest ** (np.arange(pairs) / pairs)
        self.frequencies = nnx.Param(jnp.asarray(rates, jnp.float32))

    def steps(self, tokens: Tokens, state: PyTree) -> tuple[Array, PyTree]:
        coordinates = project("mapformer", tokens.x, self.into[...])
        steps_BMC = project("mapformer", coordinates, self.out[...])
        return (steps_BMC * self.frequencies[...].astype(steps_BMC.dtype)[None, None])[
            :, :, None
        ], ()
