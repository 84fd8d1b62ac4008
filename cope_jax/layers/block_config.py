"""The config of a transformer block."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from cope_jax.encodings import AttentionShape
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least, check_fields

Activation = Literal["relu", "gelu", "gelu_erf", "swiglu", "geglu", "geglu_erf"]
GATED = ("swiglu", "geglu", "geglu_erf")
"""Activations of a feed-forward layer with a third matrix, the gate."""
Norm = Literal["layer", "rms"]
NormPosition = Literal["pre", "post", "both"]
Mixer = Literal["attention", "linear", "gla", "delta", "gated_delta", "kda"]
ComputeType = Literal["float32", "bfloat16", "float64"]

_OF_ATTENTION = ("window", "attention_scale", "attention_cap", "qkv_bias")
MOST_WIDTH = 2**20
"""The largest size of a block. A larger one is a typing error and would fill the memory."""


class Kind(NamedTuple):
    """The properties of a mixer.

    Attributes:
      decay: whether the state decays: not at all, by channel of the keys, or by head.
      delta: whether a token first removes from the state what its key recalls.
    """

    decay: Literal["channel", "head"] | None
    delta: bool


KINDS = {
    "linear": Kind(None, False),
    "gla": Kind("channel", False),
    "delta": Kind(None, True),
    "gated_delta": Kind("head", True),
    "kda": Kind("channel", True),
}
"""The mixers without attention."""


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
      activation: "relu", "gelu" (tanh form), "gelu_erf" (exact GELU), or gated with a third matrix:
        "swiglu", "geglu" (tanh form) or "geglu_erf".
      norm: "layer" (LayerNorm) or "rms" (RMSNorm).
      norm_epsilon: number in (0, 1) that is added to the variance.
      norm_bias: whether a LayerNorm has a bias.
      norm_position: "pre", x + f(norm(x)), "post", norm(x + f(x)), or "both", x + norm(f(norm(x))).
      parallel: attention and the feed-forward layer read the same x: x + attention(norm(x)) +
        mlp(norm(x)), each with a norm of its own. Not with "post".
      use_bias: whether the linear layers have biases.
      qkv_bias: whether those of queries, keys and values have biases; None means `use_bias`.
      dropout: dropout rate of the attention weights, and of what each sublayer adds to the residual
        stream.
      initial_stddev: standard deviation of the initial matrices, which are normal and truncated at
        two standard deviations. If None, it is 1/√inputs without truncation, and less for a layer
        that adds to the residual stream.
      compute_dtype: type of the matrix products. Parameters, positions, logits and softmax are
        float32. "float64" is for comparisons: it computes everything in float64, and needs
        `jax_enable_x64`.
      mixer: what mixes tokens: attention, or a recurrence: "linear" attention, "gla", "delta",
        "gated_delta" or "kda"; see `cope_jax.layers.recurrent_mixer`.
      negative_eigenvalues: β is in (0, 2) instead of (0, 1), for the mixers with the delta rule.
      window: each token sees only the tokens less than `window` away; None means all.
      attention_scale: what multiplies q·k; None means 1/√K.
      attention_cap: c: a logit s of attention becomes c·tanh(s/c); None means that it stays.
      qk_norm: normalise queries and keys of each head; see `cope_jax.layers.attention_options` for
        this and the next four.
      qk_norm_shared: all heads have the same scales of `qk_norm`.
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
    norm_bias: bool = True
    norm_position: NormPosition = "pre"
    parallel: bool = False
    use_bias: bool = True
    qkv_bias: bool | None = None
    dropout: float = 0.0
    initial_stddev: float | None = None
    compute_dtype: ComputeType = "float32"
    mixer: Mixer = "attention"
    negative_eigenvalues: bool = False
    window: int | None = None
    attention_scale: float | None = None
    attention_cap: float | None = None
    qk_norm: bool = False
    qk_norm_shared: bool = False
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
        erasing = [name for name, kind in KINDS.items() if kind.delta]
        if self.negative_eigenvalues and self.mixer not in erasing:
            raise ConfigError(
                f"block.negative_eigenvalues has no effect with mixer={self.mixer}: "
                f"choose it from {', '.join(erasing)}"
            )
        if self.parallel and self.norm_position == "post":
            raise ConfigError("block.parallel needs norm_position=pre or both, got post")
        if self.norm == "rms" and not self.norm_bias:
            raise ConfigError(
                "block.norm_bias=False has no effect with norm=rms, which has no bias: leave it out"
            )
        if self.qk_norm_shared and not self.qk_norm:
            raise ConfigError(
                "block.qk_norm_shared has no effect without qk_norm: set qk_norm=True"
            )
        unused = [name for name in _OF_ATTENTION if getattr(self, name) is not None]
        if self.mixer != "attention" and unused:
            raise ConfigError(
                f"block.{unused[0]} has no effect with mixer={self.mixer}: use mixer=attention"
            )
        check_at_least(1, "block", window=self.window)
        for name in ("attention_scale", "attention_cap"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"block.{name} must be above 0, got {value}")
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
            (3 if self.activation in GATED else 2)
            * self.model_dim
            * (self.mlp_dim or 4 * self.model_dim)
        )
        recurrent = self.mixer != "attention"
        gate = self.model_dim * heads if self.output_gate or recurrent else 0
        return 2 * self.model_dim * (heads + kv_heads) + gate + mlp, 0 if recurrent else heads

    @property
    def attention_options(self) -> dict[str, bool | int]:
        """The options around attention that are set, by name."""
        names = (
            "qk_norm",
            "qk_norm_shared",
            "output_norm",
            "output_gate",
            "kv_shift",
            "convolution",
        )
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    @property
    def norms_input(self) -> bool:
        """True if attention and the feed-forward layer read a normalised x."""
        return self.norm_position != "post"

    def variant(self) -> dict[str, Any]:
        """The mixer, unless it is attention, and the options of attention that are set, by name."""
        mixer = {} if self.mixer == "attention" else {"mixer": self.mixer}
        changed = {name: getattr(self, name) for name in _OF_ATTENTION}
        return (
            mixer
            | {name: value for name, value in changed.items() if value is not None}
            | ({"parallel": True} if self.parallel else {})
            | ({} if self.norm_bias else {"norm_bias": False})
            | ({"norm_position": "both"} if self.norm_position == "both" else {})
            | ({"negative_eigenvalues": True} if self.negative_eigenvalues else {})
            | self.attention_options
        )

    @property
    def dtype(self) -> Any:
        if self.compute_dtype == "float64" and not jax.config.read("jax_enable_x64"):
            raise ConfigError("compute_dtype=float64 needs 64-bit JAX: set JAX_ENABLE_X64=1")
        return jnp.dtype(self.compute_dtype)
