"""Selective rotary position embeddings."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.encodings.base import ENCODINGS, AttentionShape, PerHead, Tokens
from cope_jax.encodings.common import layer_input, project
from cope_jax.encodings.rotations import TurnedByTokens, TurnedConfig, even_head_dim, frequencies
from cope_jax.errors import ConfigError
from cope_jax.ops.convolution import causal_convolution
from cope_jax.registry import check_at_least


@dataclasses.dataclass(frozen=True)
class SelectiveRoPEConfig(TurnedConfig):
    """The options of selective RoPE.

    Attributes:
      rank: r, the rank of the projection from tokens to steps. With 0, each head multiplies its
        slice of x̂ by a matrix of its own instead, whose columns all have one learned length.
      width: the number of tokens in the convolution over steps; 0 means no convolution, and the
        difference of a step and the step before it.
      silu: whether SiLU follows the convolution.
      bias: whether a learned positive number, 1 at the start, is added to each step; the model then
        starts near RoPE.
      gate: whether each token multiplies its steps by a gate σ(w·x + b) for each head.
      temperature: "powers" means θ_c = largest·theta^(−2c/K). "rfa" means √((1 − cos a)/(1 + cos
        a)) with a equally spaced from 0 to theta·π, scaled so that the last is `largest`.
      theta: see `temperature`; at least 1 for "powers", and in (0, 1) for "rfa".
      largest: the largest θ_c.
    """

    rank: int = 16
    width: int = 4
    silu: bool = False
    bias: bool = False
    gate: bool = False
    temperature: Literal["powers", "rfa"] = "powers"
    theta: float = 500_000.0
    largest: float = 1.0


@ENCODINGS.register("selective_rope")
class SelectiveRoPE(TurnedByTokens):
    """Rotates by signed steps that the last few tokens choose, a step for each pair of features.

        angle of pair c at index t:  θ_c Σ_{l≤t} φ_lc,   φ = conv(W_2 W_1 x̂) [+ e^b] [· σ(w·x̂ + b)].

    arXiv 2511.17388 and its released code. x̂ is the input of the layer, with each of its H slices
    divided by its norm. conv is a causal convolution of each channel. Positions are not used. With
    grouped heads, there are steps for each key/value head; with `rank=0` these read the slices of
    their query heads.

    Raises:
      ConfigError: `features` is called without x, the head width is odd, or an option is out of
        range.
    """

    Config = SelectiveRoPEConfig

    def __init__(self, config: SelectiveRoPEConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(0, "selective_rope", rank=config.rank, width=config.width)
        if not config.largest > 0:
            raise ConfigError(f"selective_rope.largest must be positive, got {config.largest}")
        if config.temperature == "rfa" and shape.head_dim < 4:
            raise ConfigError(
                f"selective_rope.temperature=rfa needs two pairs, got head_dim={shape.head_dim}"
            )
        if not (config.theta >= 1 if config.temperature == "powers" else 0 < config.theta < 1):
            raise ConfigError(
                f"selective_rope.theta={config.theta} must be at least 1 with temperature=powers, in (0, 1) with rfa"
            )
        if shape.width % shape.num_heads:
            raise ConfigError(
                f"selective_rope normalises a slice of x for each head: model_dim={shape.width} must be a multiple of "
                f"num_heads={shape.num_heads}"
            )
        self.slices = shape.num_heads
        pairs, initial = (
            even_head_dim("selective_rope", shape.head_dim) // 2,
            jax.nn.initializers.lecun_normal(),
        )
        if config.rank:
            self.into = nnx.Param(initial(rngs.params(), (shape.width, config.rank)))
            out = initial(rngs.params(), (config.rank, shape.kv_heads * pairs))
            out = out.reshape(-1, shape.kv_heads, pairs)
            self.out = nnx.Param(out, axes=(None, "kv_heads", None))
        else:
            size = (shape.kv_heads, shape.width // shape.kv_heads, pairs)
            out = initial(rngs.params(), size)
            self.out = nnx.Param(out, axes=("kv_heads", None, None))
            self.out_scale = nnx.Param(jnp.ones(shape.kv_heads), axes=("kv_heads",))
            group = shape.num_heads // shape.kv_heads
            self.groups = PerHead(tuple(h // group for h in range(shape.num_heads)))
        if config.width:
            bound = config.width**-0.5
            size = (config.width, shape.kv_heads, pairs)
            convolution = jax.random.uniform(rngs.params(), size, minval=-bound, maxval=bound)
            self.convolution = nnx.Param(convolution, axes=(None, "kv_heads", None))
        if config.bias:
            self.log_bias = nnx.Param(jnp.zeros((shape.kv_heads, pairs)), axes=("kv_heads", None))
        if config.gate:
            gate_kernel = initial(rngs.params(), (shape.width, shape.kv_heads))
            self.gate_kernel = nnx.Param(gate_kernel, axes=("embed", "kv_heads"))
            self.gate_bias = nnx.Param(jnp.zeros((shape.kv_heads,)), axes=("kv_heads",))

    def steps(self, tokens: Tokens, state: PyTree) -> tuple[Array, PyTree]:
        x_BMD = _normalised(layer_input("selective_rope", tokens.x, self.shape.width), self.slices)
        phi_BMGC = self._projected(x_BMD)
        size, dtype = phi_BMGC.shape, phi_BMGC.dtype
        kernel = (
            self.convolution[...].astype(dtype)
            if self.config.width
            else _difference(size[2:], dtype)
        )
        phi, state = causal_convolution(
            phi_BMGC.reshape(*size[:2], -1),
            kernel.reshape(len(kernel), -1),
            tokens.segment_ids,
            state,
        )
        phi_BMGC = phi.reshape(size)
        if self.config.silu:
            phi_BMGC = jax.nn.silu(phi_BMGC)
        if self.config.bias:
            phi_BMGC = phi_BMGC + jnp.exp(self.log_bias[...].astype(dtype))[None, None]
        if self.config.gate:
            gates = jax.nn.sigmoid(
                project("selective_rope", x_BMD, self.gate_kernel[...], self.gate_bias[...])
            )
            phi_BMGC = phi_BMGC * gates[..., None]
        return phi_BMGC * jnp.asarray(self._temperatures(), dtype)[None, None, None], state

    def _projected(self, x_BMD: Array) -> Array:
        if self.config.rank:
            coordinates = project("selective_rope", x_BMD, self.into[...])
            return project("selective_rope", coordinates, self.out[...])
        kernel_GIC = self.out[...].astype(x_BMD.dtype)
        roots_GC = jax.lax.rsqrt(jnp.sum(kernel_GIC**2, axis=1) + 1e-12)
        lengths_GC = self.out_scale[...].astype(x_BMD.dtype)[:, None] * roots_GC
        groups = np.array(self.groups.values, int)[:: self.shape.num_heads // self.shape.kv_heads]
        x_BMGI = x_BMD.reshape(*x_BMD.shape[:2], -1, kernel_GIC.shape[1])[:, :, groups]
        return jnp.einsum(
            "BMGI,GIC->BMGC",
            x_BMGI,
            kernel_GIC * lengths_GC[:, None],
            precision=jax.lax.Precision.HIGHEST,
        )

    def _temperatures(self) -> np.ndarray:
        config, pairs = self.config, self.shape.head_dim // 2
        if config.temperature == "powers":
            return config.largest * frequencies(config.theta, self.shape.head_dim)
        # tan(a/2), which keeps small a.
        raw = np.tan(np.linspace(0.0, config.theta * math.pi / 2, pairs))
        return config.largest * raw / raw[-1]


def _normalised(x_BMD: Array, number: int) -> Array:
    slices = x_BMD.astype(accumulator_dtype(x_BMD.dtype)).reshape(*x_BMD.shape[:2], number, -1)
    return (slices * jax.lax.rsqrt(jnp.sum(slices**2, axis=-1, keepdims=True) + 1e-6)).reshape(
        x_BMD.shape
    )


def _difference(size: Any, dtype: Any) -> Array:
    return jnp.broadcast_to(jnp.asarray([-1.0, 1.0], dtype)[:, None, None], (2, *size))
