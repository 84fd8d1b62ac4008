"""The linear layers of a block."""

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array, accumulator_dtype
from cope_jax.layers.block_config import BlockConfig
from cope_jax.ops.product import dot_general


def create_linear(
    config: BlockConfig,
    inputs: int,
    outputs: int,
    axes: tuple[str | None, ...],
    *,
    scale: float = 1.0,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """A layer y = W x + b in the compute type; b starts at 0.

    W starts normal with standard deviation scale/√inputs; or, where the config has an `initial_stddev`, with that one,
    whatever the scale, and cut at two of them.

    `axes` are the logical axes of W, as `cope_jax.training.sharding` lists them; b has the second.
    """
    if config.initial_stddev is None:
        initial = jax.nn.initializers.normal(scale / inputs**0.5)
    else:
        initial = jax.nn.initializers.truncated_normal(config.initial_stddev)
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


def logits(layer: nnx.Linear, x: Array) -> Array:
    """W x + b of a last layer, of x's type multiplied but summed and returned in float32 (float64 where x is).

    >>> layer = nnx.Linear(2, 3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    >>> logits(layer, jnp.ones((1, 2), jnp.bfloat16)).dtype.name
    'float32'
    """
    wide = accumulator_dtype(x.dtype)
    y = jnp.einsum("...D,DC->...C", x, layer.kernel[...].astype(x.dtype), preferred_element_type=wide)
    return y if layer.bias is None else y + layer.bias[...].astype(wide).reshape((1,) * (x.ndim - 1) + (-1,))
