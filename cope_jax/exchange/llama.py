"""Llama in the format of Hugging Face's transformers: a decoder with RoPE, RMSNorm and SwiGLU."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.exchange import tensor_map
from cope_jax.exchange.safetensors_io import require, typed
from cope_jax.layers.block_config import BlockConfig
from cope_jax.models.decoder import Decoder, DecoderConfig


@dataclasses.dataclass(frozen=True)
class _Values:
    """The values read from config.json, with the defaults of transformers."""

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
    """Further values of RoPE in config.json.

    Older files have `rope_scaling`. Since transformers 5, files have `rope_parameters`, which include the base.
    """

    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class _Llama3:
    """Llama 3's scaling of RoPE, in the order of `RoPEConfig.llama3`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float


def _read(values: Mapping[str, Any], path: str) -> DecoderConfig:
    rope = typed(_Rope, values, path)
    values = {**values, **(rope.rope_parameters or rope.rope_scaling or {})}
    kind = values.get("rope_type", values.get("type", "default"))
    require({"rope_type": kind}, path, rope_type=("default", "llama3"))
    known = {"hidden_act": ("silu", "swish"), "partial_rotary_factor": (1.0, None), "quantization_config": (None,)}
    require(values, path, **known)
    held = typed(_Values, values, path)
    if held.mlp_bias != held.attention_bias:
        raise ConfigError(f"{path}: attention_bias and mlp_bias differ, but must be equal; choose another model")
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
    strange = tensor_map.strange_choices(config, "rope", norm_position=("pre",), norm=("rms",), activation=("swiglu",))
    rope = dict(config.encoding.parts).get("rope", {})
    if rope.get("fraction", 1.0) != 1:
        strange.append(f"rope.fraction={rope['fraction']}")
    if block.model_dim % block.num_heads:
        strange.append(f"model_dim={block.model_dim}, which is not a multiple of num_heads={block.num_heads}")
    scaling = None
    if rope.get("llama3") is not None:
        factor, low, high, length = rope["llama3"]
        scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
        scaling |= {"original_max_position_embeddings": int(length)}
    return strange, tensor_map.decoder_values(config) | {
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


LLAMA = tensor_map.Format(
    kind="llama",
    model=Decoder,
    modules={
        "model.embed_tokens": "embedding",
        "model.layers.{}.input_layernorm": "blocks/attention_norm/norm",
        "model.layers.{}.self_attn.q_proj": "blocks/attention/query",
        "model.layers.{}.self_attn.k_proj": "blocks/attention/key",
        "model.layers.{}.self_attn.v_proj": "blocks/attention/value",
        "model.layers.{}.self_attn.o_proj": "blocks/attention/out",
        "model.layers.{}.post_attention_layernorm": "blocks/mlp_norm/norm",
        "model.layers.{}.mlp.gate_proj": "blocks/mlp/gate",
        "model.layers.{}.mlp.up_proj": "blocks/mlp/inner",
        "model.layers.{}.mlp.down_proj": "blocks/mlp/outer",
        "model.norm": "norm/norm",
        "lm_head": "out",
    },
    prefixes=("model.", "lm_head."),
    ignored=r".*\.rotary_emb\.inv_freq",
    tied=tensor_map.TIED_HEAD,
    read=_read,
    write=_write,
    adapt=tensor_map.with_scaled_norm,
)
