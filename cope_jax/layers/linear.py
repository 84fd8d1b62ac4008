"""The linear layers of a block."""

import jax
from flax import nnx

from cope_jax.layers.config import BlockConfig


def create_linear(
    config: BlockConfig, inputs: int, outputs: int, *, stddev: float | None = None, rngs: nnx.Rngs
) -> nnx.Linear:
    """Y = W x + b in the block's compute type; W starts normal with `stddev` (None: the config's), b at 0."""
    initial = jax.nn.initializers.normal(config.init_stddev if stddev is None else stddev)
    return nnx.Linear(inputs, outputs, use_bias=config.use_bias, dtype=config.dtype, kernel_init=initial, rngs=rngs)
