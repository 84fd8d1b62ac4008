"""The choices of a transformer block."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from cope_jax.encodings import AttentionShape
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least, check_choices

Activation = Literal["relu", "gelu", "swiglu"]
Norm = Literal["layer", "rms"]
NormPosition = Literal["pre", "post"]
ComputeType = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """The sizes and choices of one transformer block.

    Attributes:
      model_dim: D.
      num_heads: H.
      num_kv_heads: G, divides H; None means H (G < H is grouped-query attention).
      head_dim: K; None means D/H.
      mlp_dim: hidden width of the feed-forward layer; None means 4·D.
      activation: "relu", "gelu" (tanh form), or "swiglu" (gated, with a third matrix).
      norm: "layer" (LayerNorm) or "rms" (RMSNorm).
      norm_position: "pre", x + f(norm(x)), or "post", norm(x + f(x)).
      use_bias: biases in the linear layers.
      dropout: rate for attention weights and for what each sublayer adds.
      compute_dtype: type of the matrix products; parameters, positions, logits and softmax are float32 in any case.
      attention: implementation, as `cope_jax.attention.attend` takes it.
      attention_blocks: its sizes of blocks, as `attend` takes them.
    """

    model_dim: int = 64
    num_heads: int = 2
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_dim: int | None = None
    activation: Activation = "gelu"
    norm: Norm = "layer"
    norm_position: NormPosition = "pre"
    use_bias: bool = True
    dropout: float = 0.0
    compute_dtype: ComputeType = "float32"
    attention: str = "auto"
    attention_blocks: tuple[int, ...] | None = None

    def __post_init__(self):
        check_choices(self, "block")
        check_at_least(1, "block", model_dim=self.model_dim, num_heads=self.num_heads, mlp_dim=self.mlp_dim)
        check_at_least(1, "block", num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        if self.head_dim is None and self.model_dim % self.num_heads:
            raise ConfigError(
                f"model_dim={self.model_dim} is not a multiple of num_heads={self.num_heads}: give head_dim"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must lie in [0, 1), got {self.dropout}")

    def attention_shape(self, max_length: int | None) -> AttentionShape:
        """The sizes that an encoding of this block is built for."""
        head_dim = self.head_dim or self.model_dim // self.num_heads
        return AttentionShape(self.num_heads, head_dim, self.num_kv_heads, self.model_dim, max_length)

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.compute_dtype)
