"""The linear layers of a block."""

import jax
from flax import nnx

from cope_jax.layers.config import BlockConfig
from cope_jax.ops.linear import dot_general


def create_linear(config: BlockConfig, inputs: int, outputs: int, *, scale: float = 1.0, rngs: nnx.Rngs) -> nnx.Linear:
    """A layer y = W x + b in the compute type; W starts normal with standard deviation scale/√inputs, b at 0."""
    initial = jax.nn.initializers.normal(scale / inputs**0.5)
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=config.use_bias,
        dtype=config.dtype,
        kernel_init=initial,
        dot_general=dot_general,
        rngs=rngs,
    )
