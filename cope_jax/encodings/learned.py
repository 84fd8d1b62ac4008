"""Learned absolute position embeddings."""

import dataclasses

import jax
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Encoding, Traits
from cope_jax.encodings.common import whole_numbers
from cope_jax.errors import ConfigError
from cope_jax.ops.gather import lookup
from cope_jax.registry import check_at_least


@dataclasses.dataclass(frozen=True)
class LearnedConfig:
    """The table of learned position embeddings.

    Attributes:
      max_length: N, the number of rows of the table. If None, N is the model's `max_length`.
      stddev: standard deviation of the initial rows.
    """

    max_length: int | None = None
    stddev: float = 0.02


@ENCODINGS.register("learned")
class Learned(Encoding):
    """Adds a learned vector for each absolute position to the token embedding.

    x_i ← x_i + P[i], P of shape `[N, D]`. Gehring et al. (arXiv 1705.03122). The CoPE paper calls
    this "Absolute".

    A position outside the table raises ConfigError if positions are known while tracing, as
    consecutive positions are. Under `jit`, a position that is known only at run time gives NaN.
    """

    Config = LearnedConfig
    traits = Traits(embeds_input=True)

    def __init__(self, config: LearnedConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(1, "learned", max_length=config.max_length)
        check_at_least(0, "learned", stddev=config.stddev)
        rows = shape.max_length if config.max_length is None else config.max_length
        if rows is None:
            raise ConfigError("encoding 'learned' has a table of fixed length: give max_length")
        self.table = nnx.Param(
            config.stddev * jax.random.normal(rngs.params(), (rows, shape.width))
        )

    def embed(self, x_BLD: Array, positions_BL: Array) -> Array:
        rows, positions_BL = self.table.shape[0], whole_numbers("learned", positions_BL)
        if not isinstance(positions_BL, jax.core.Tracer) and positions_BL.size:
            low, high = int(positions_BL.min()), int(positions_BL.max())
            if low < 0 or high >= rows:
                far = f"position {high if high >= rows else low} is outside of the learned table of {rows} rows"
                raise ConfigError(f"{far}: give a larger max_length")
        return x_BLD + lookup(self.table[...], positions_BL).astype(x_BLD.dtype)
