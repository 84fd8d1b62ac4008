"""The config of a transformer block."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from cope_jax.encodings import AttentionShape
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least, check_fields

Activation = Literal["relu", "gelu", "gelu_erf", "swiglu"]
Norm = Literal["layer", "rms"]
NormPosition = Literal["pre", "post"]
Mixer = Literal["attention", "linear", "gla", "delta", "gated_delta"]
ComputeType = Literal["float32", "bfloat16", "float64"]

MOST_WIDTH = 2**20
"""The largest size of a block. A larger one is a typing error and would fill the memory."""


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """The sizes and choices of one transformer block.

    Attributes:
      model_dim: D, the width of the residual stream.
      num_heads: H, the number of query heads.
      num_kv_heads: G, the number of key/value heads; G divides H. None means G = H. G < H is
        grouped-query attention.
      head_dim: K, the width of a head; None means D/H.
      mlp_dim: hidden width of the feed-forward layer; None means 4·D.
      activation: "relu", "gelu" (tanh form), "gelu_erf" (exact GELU), or "swiglu" (gated, with a
        third matrix).
      norm: "layer" (LayerNorm) or "rms" (RMSNorm).
      norm_epsilon: number in (0, 1) that is added to the variance.
      norm_position: "pre", x + f(norm(x)), or "post", norm(x + f(x)).
      use_bias: whether the linear layers have biases.
      dropout: dropout rate of the attention weights, and of what each sublayer adds to the residual
        stream.
      initial_stddev: standard deviation of the initial matrices, which are normal and truncated at
        two standard deviations. If None, it is 1/√inputs without truncation, and less for a layer
        that adds to the residual stream.
      compute_dtype: type of the matrix products. Parameters, positions, logits and softmax are
        float32. "float64" is for comparisons: it computes everything in float64, and needs
        `jax_enable_x64`.
      mixer: what mixes tokens: attention, or a recurrence: "linear" attention, "gla", "delta" or
        "gated_delta"; see `cope_jax.layers.recurrent_mixer`.
      negative_eigenvalues: β is in (0, 2) instead of (0, 1), for the mixers with the delta rule.
      qk_norm: normalise queries and keys of each head; see `cope_jax.layers.attention_options` for
        this and the next four.
      output_norm: normalise the output of each head.
      output_gate: multiply the output of attention by σ(W_g x).
      kv_shift: mix each key and value with those of the token before.
      convolution: the number of tokens of a short convolution on queries, keys and values; 0 means
        none.
      attention: the implementation of attention, as in `cope_jax.attention.attend`.
      attention_blocks: block sizes of this implementation, as `blocks` in `attend`.
    """

    model_dim: int = 64
    num_heads: int = 2
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_dim: int | None = None
    activation: Activation = "gelu"
    norm: Norm = "layer"
    norm_epsilon: float = 1e-6
    norm_position: NormPosition = "pre"
    use_bias: bool = True
    dropout: float = 0.0
    initial_stddev: float | None = None
    compute_dtype: ComputeType = "float32"
    mixer: Mixer = "attention"
    negative_eigenvalues: bool = False
    qk_norm: bool = False
    output_norm: bool = False
    output_gate: bool = False
    kv_shift: bool = False
    convolution: int = 0
    attention: str = "auto"
    attention_blocks: tuple[int, ...] | None = None

    def __post_init__(self):
        check_fields(self, "block")
        heads = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
        }
        check_at_least(
            1, "block", MOST_WIDTH, model_dim=self.model_dim, mlp_dim=self.mlp_dim, **heads
        )
        if self.head_dim is None and self.model_dim % self.num_heads:
            raise ConfigError(
                f"model_dim={self.model_dim} is not a multiple of num_heads={self.num_heads}: give head_dim"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must lie in [0, 1), got {self.dropout}")
        if not 0 < self.norm_epsilon < 1:
            raise ConfigError(f"norm_epsilon must lie in (0, 1), got {self.norm_epsilon}")
        if self.negative_eigenvalues and "delta" not in self.mixer:
            raise ConfigError(
                f"block.negative_eigenvalues has no effect with mixer={self.mixer}: use a delta rule"
            )
        check_at_least(0, "block", initial_stddev=self.initial_stddev, convolution=self.convolution)

    def attention_shape(self, max_length: int | None) -> AttentionShape:
        """The sizes that an encoding of this block is built for."""
        head_dim = self.head_dim or self.model_dim // self.num_heads
        return AttentionShape(
            self.num_heads, head_dim, self.num_kv_heads, self.model_dim, max_length
        )

    def matrix_parameters(self) -> tuple[int, int]:
        """Returns (number of parameters in a block's matrices, which every token uses; H·K).

        A recurrence has no pairs of tokens, so it has 0 in place of H·K.
        """
        shape = self.attention_shape(None)
        heads, kv_heads = shape.num_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        mlp = (
            (3 if self.activation == "swiglu" else 2)
            * self.model_dim
            * (self.mlp_dim or 4 * self.model_dim)
        )
        recurrent = self.mixer != "attention"
        gate = self.model_dim * heads if self.output_gate or recurrent else 0
        return 2 * self.model_dim * (heads + kv_heads) + gate + mlp, 0 if recurrent else heads

    @property
    def attention_options(self) -> dict[str, bool | int]:
        """The options around attention that are set, by name."""
        names = ("qk_norm", "output_norm", "output_gate", "kv_shift", "convolution")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    def variant(self) -> dict[str, Any]:
        """The mixer, unless it is attention, and the options around attention, by name."""
        mixer = {} if self.mixer == "attention" else {"mixer": self.mixer}
        return (
            mixer
            | ({"negative_eigenvalues": True} if self.negative_eigenvalues else {})
            | self.attention_options
        )

    @property
    def dtype(self) -> Any:
        if self.compute_dtype == "float64" and not jax.config.read("jax_enable_x64"):
            raise ConfigError("compute_dtype=float64 needs 64-bit JAX: set JAX_ENABLE_X64=1")
        return jnp.dtype(self.compute_dtype)
