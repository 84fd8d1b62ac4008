"""The linear layers of a block."""

import jax
from flax import nnx

from cope_jax.layers.config import BlockConfig
from cope_jax.ops.linear import dot_general


def create_linear(
    config: BlockConfig,
    inputs: int,
    outputs: int,
    axes: tuple[str, str],
    *,
    scale: float = 1.0,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """A layer y = W x + b in the compute type; W starts normal with standard deviation scale/√inputs, b at 0.

    `axes` are the logical axes of W, as `cope_jax.training.sharding` lists them; b has the second.
    """
    initial = jax.nn.initializers.normal(scale / inputs**0.5)
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=config.use_bias,
        dtype=config.dtype,
        kernel_init=initial,
        dot_general=dot_general,
        kernel_metadata={"axes": axes},
        bias_metadata={"axes": axes[1:]},
        rngs=rngs,
    )
