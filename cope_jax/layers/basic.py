"""The linear layers, the norm and the feed-forward layer of a block."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array, accumulator_dtype
from cope_jax.layers.block_config import GATED, BlockConfig
from cope_jax.layout import WHOLE, Layout
from cope_jax.ops.gelu import gelu, gelu_erf
from cope_jax.ops.product import dot_general

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": gelu,
    "gelu_erf": gelu_erf,
    "swiglu": jax.nn.silu,
    "geglu": gelu,
    "geglu_erf": gelu_erf,
}
NORMS = {"layer": nnx.LayerNorm, "rms": nnx.RMSNorm}
# E[x²] − E[x]² has an error of about 1e-7 E[x²]. In rows that hardly vary, a smaller epsilon does
# not cover the error.
_LEAST_EPSILON_OF_DIFFERENCES = 1e-6


def create_linear(
    config: BlockConfig,
    inputs: int,
    outputs: int,
    axes: tuple[str | None, ...],
    *,
    scale: float = 1.0,
    use_bias: bool | None = None,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """Creates a layer y = W x + b in the compute type; b is initialised to 0.

    W is initialised from a normal distribution with standard deviation scale/√inputs. If
    `config.initial_stddev` is not None, it is the standard deviation for any `scale`, and the
    distribution is truncated at two standard deviations.

    `use_bias` says whether there is b; None means `config.use_bias`.
    `axes` are the logical axes of W, as `cope_jax.training.sharding` lists them; b has the second
    axis.
    """
    if config.initial_stddev is None:
        initial = jax.nn.initializers.normal(scale / inputs**0.5)
    else:
        initial = jax.nn.initializers.truncated_normal(config.initial_stddev)
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=config.use_bias if use_bias is None else use_bias,
        dtype=config.dtype,
        kernel_init=initial,
        dot_general=dot_general,
        kernel_metadata={"axes": axes},
        bias_metadata={"axes": axes[1:]},
        rngs=rngs,
    )


def logits(layer: nnx.Linear, x: Array) -> Array:
    """Computes W x + b of an output layer.

    The products are in the type of x. The sums and the result are in float32, or in float64 if x is
    in float64.

    >>> layer = nnx.Linear(2, 3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    >>> logits(layer, jnp.ones((1, 2), jnp.bfloat16)).dtype.name
    'float32'
    """
    wide = accumulator_dtype(x.dtype)
    y = jnp.einsum(
        "...D,DC->...C", x, layer.kernel[...].astype(x.dtype), preferred_element_type=wide
    )
    return (
        y
        if layer.bias is None
        else y + layer.bias[...].astype(wide).reshape((1,) * (x.ndim - 1) + (-1,))
    )


class Norm(nnx.Module):
    """LayerNorm (Ba et al., 1607.06450) or RMSNorm (Zhang and Sennrich, 1910.07467), last axis.

    It computes in float32 and returns the type of its input. With compute type float64, it computes
    in float64 and returns float64.
    """

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        self.dtype = accumulator_dtype(config.dtype)
        bias = {} if config.norm == "rms" else {"use_bias": config.norm_bias}
        self.norm = NORMS[config.norm](
            config.model_dim,
            epsilon=config.norm_epsilon,
            dtype=self.dtype,
            use_fast_variance=config.norm_epsilon >= _LEAST_EPSILON_OF_DIFFERENCES,
            **bias,
            rngs=rngs,
        )

    def __call__(self, x_BLD: Array) -> Array:
        wide_BLD = x_BLD.astype(self.dtype)
        if self.dtype != jnp.float64:
            return self.norm(wide_BLD).astype(x_BLD.dtype)
        with jax.numpy_dtype_promotion("standard"):  # Flax promotes float64 and float32
            return self.norm(wide_BLD)


class MLP(nnx.Module):
    """Two linear layers around an activation, y = W_out f(W_in x).

    SwiGLU has a third layer, the gate: y = W_out (silu(W_gate x) · W_in x), and GeGLU has GELU in
    place of silu. Shazeer (arXiv 2002.05202).
    """

    def __init__(self, config: BlockConfig, residual_scale: float, *, rngs: nnx.Rngs):
        width, hidden = config.model_dim, config.mlp_dim or 4 * config.model_dim
        self.activation = config.activation
        inward, outward = ("embed", "mlp"), ("mlp", "embed")
        self.inner = create_linear(config, width, hidden, inward, rngs=rngs)
        self.gate = (
            create_linear(config, width, hidden, inward, rngs=rngs)
            if config.activation in GATED
            else None
        )
        self.outer = create_linear(config, hidden, width, outward, scale=residual_scale, rngs=rngs)

    def __call__(self, x_BLD: Array, layout: Layout = WHOLE) -> Array:
        inner = self.inner(x_BLD)
        activate = ACTIVATIONS[self.activation]
        hidden = activate(inner) if self.gate is None else activate(self.gate(x_BLD)) * inner
        return self.outer(layout.constrain(hidden, "batch", "length", "width"))
