"""Llama in the files of Hugging Face's transformers: a decoder with RoPE, RMSNorm and SwiGLU."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.exchange.safetensors_io import require, typed
from cope_jax.exchange.tensor_map import (
    LM_HEAD,
    Entry,
    Format,
    common_values,
    linear_entries,
    norm_entries,
    strange_choices,
)
from cope_jax.layers.block_config import BlockConfig
from cope_jax.models.decoder import DecoderConfig


@dataclasses.dataclass(frozen=True)
class _Values:
    """What is read of config.json, with the defaults of transformers."""

    vocab_size: int
    max_position_embeddings: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    rms_norm_eps: float
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: float = 0.0
    mlp_bias: bool = False
    rope_theta: float = 10000.0


@dataclasses.dataclass(frozen=True)
class _Rope:
    """Where else values of RoPE lie: in the one of old, and in the other of transformers 5, which has the base too."""

    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class _Llama3:
    """How RoPE is stretched, in the order of `RoPEConfig.llama3`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float


def _read(values: Mapping[str, Any], path: str) -> DecoderConfig:
    rope = typed(_Rope, values, path)
    values = {**values, **(rope.rope_parameters or rope.rope_scaling or {})}
    kind = values.get("rope_type", values.get("type", "default"))
    require({"rope_type": kind}, path, rope_type=("default", "llama3"))
    require(
        values,
        path,
        hidden_act=("silu", "swish"),
        partial_rotary_factor=(1.0, None),
        quantization_config=(None,),
    )
    held = typed(_Values, values, path)
    if held.mlp_bias != held.attention_bias:
        raise ConfigError(f"{path}: attention_bias and mlp_bias differ, and a block has biases everywhere or nowhere")
    options: dict[str, Any] = {"base": held.rope_theta}
    if kind == "llama3":
        options["llama3"] = dataclasses.astuple(typed(_Llama3, values, path))
    return DecoderConfig(
        vocab_size=held.vocab_size,
        max_length=held.max_position_embeddings,
        num_layers=held.num_hidden_layers,
        encoding=EncodingConfig((("rope", options),)),
        tie_embeddings=held.tie_word_embeddings,
        logit_scale=1.0,
        block=BlockConfig(
            model_dim=held.hidden_size,
            num_heads=held.num_attention_heads,
            num_kv_heads=held.num_key_value_heads,
            head_dim=held.head_dim,
            mlp_dim=held.intermediate_size,
            activation="swiglu",
            norm="rms",
            norm_epsilon=held.rms_norm_eps,
            use_bias=held.attention_bias,
            dropout=held.attention_dropout,
        ),
    )


def _write(config: DecoderConfig) -> tuple[list[str], dict[str, Any]]:
    block, shape = config.block, config.block.attention_shape(None)
    strange = strange_choices(config, "rope", norm=("rms",), activation=("swiglu",))
    rope = dict(config.encoding.parts).get("rope", {})
    if rope.get("fraction", 1.0) != 1:
        strange.append(f"rope.fraction={rope['fraction']}")
    if block.model_dim % block.num_heads:
        strange.append(f"model_dim={block.model_dim}, no multiple of num_heads={block.num_heads}")
    scaling = None
    if rope.get("llama3") is not None:
        factor, low, high, length = rope["llama3"]
        scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
        scaling |= {"original_max_position_embeddings": int(length)}
    return strange, common_values(config) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": config.max_length,
        "hidden_size": block.model_dim,
        "intermediate_size": block.mlp_dim or 4 * block.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": block.norm_epsilon,
        "attention_bias": block.use_bias,
        "mlp_bias": block.use_bias,
        "attention_dropout": block.dropout,
        "rope_theta": rope.get("base", 10000.0),
        "rope_scaling": scaling,
    }


_LINEAR = {
    "self_attn.q_proj": "attention/query",
    "self_attn.k_proj": "attention/key",
    "self_attn.v_proj": "attention/value",
    "self_attn.o_proj": "attention/out",
    "mlp.gate_proj": "mlp/gate",
    "mlp.up_proj": "mlp/inner",
    "mlp.down_proj": "mlp/outer",
}
_ENTRIES = (
    Entry("model.embed_tokens.weight", ("embedding/embedding",)),
    *norm_entries("model.layers.{}.input_layernorm", "blocks/attention_norm"),
    *norm_entries("model.layers.{}.post_attention_layernorm", "blocks/mlp_norm"),
    *(
        entry
        for theirs, ours in _LINEAR.items()
        for entry in linear_entries(f"model.layers.{{}}.{theirs}", f"blocks/{ours}", transposed=True)
    ),
    *norm_entries("model.norm", "norm"),
    Entry(LM_HEAD, ("out/kernel",), transposed=True),
)
LLAMA = Format(_ENTRIES, "model.", r".*\.rotary_emb\.inv_freq", _read, _write)
