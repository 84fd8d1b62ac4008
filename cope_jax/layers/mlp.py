"""The feed-forward layer."""

from collections.abc import Callable

import jax
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.layers.block_config import BlockConfig
from cope_jax.layers.linear import create_linear
from cope_jax.layout import WHOLE, Layout
from cope_jax.ops.gelu import gelu, gelu_erf

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": gelu,
    "gelu_erf": gelu_erf,
    "swiglu": jax.nn.silu,
}


class MLP(nnx.Module):
    """Two linear layers around an activation, y = W_out f(W_in x); gated for SwiGLU, y = W_out (silu(W_gate x) · W_in
    x).

    Shazeer (arXiv 2002.05202) for SwiGLU.
    """

    def __init__(self, config: BlockConfig, residual_scale: float, *, rngs: nnx.Rngs):
        width, hidden = config.model_dim, config.mlp_dim or 4 * config.model_dim
        self.activation = config.activation
        inward, outward = ("embed", "mlp"), ("mlp", "embed")
        self.inner = create_linear(config, width, hidden, inward, rngs=rngs)
        self.gate = create_linear(config, width, hidden, inward, rngs=rngs) if config.activation == "swiglu" else None
        self.outer = create_linear(config, hidden, width, outward, scale=residual_scale, rngs=rngs)

    def __call__(self, x_BLD: Array, layout: Layout = WHOLE) -> Array:
        inner = self.inner(x_BLD)
        activate = ACTIVATIONS[self.activation]
        hidden = activate(inner) if self.gate is None else activate(self.gate(x_BLD)) * inner
        return self.outer(layout.constrain(hidden, "batch", "length", "width"))
