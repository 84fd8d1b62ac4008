"""Llama in the files of Hugging Face's transformers: a decoder with RoPE, RMSNorm and SwiGLU."""

from collections.abc import Mapping
from typing import Any

from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.layers.config import BlockConfig
from cope_jax.models.decoder import DecoderConfig
from cope_jax.models.decoder_entry_files import (
    LM_HEAD,
    Entry,
    Format,
    common_values,
    linear_entries,
    norm_entries,
    require,
    strange_choices,
)


def _read(values: Mapping[str, Any], path: str) -> DecoderConfig:
    bias = values.get("attention_bias", False)
    require(values, path, hidden_act=("silu", "swish"))
    if values.get("mlp_bias", False) != bias:
        raise ConfigError(f"{path}: attention_bias and mlp_bias differ, and a block has biases everywhere or nowhere")
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    options: dict[str, Any] = {"base": float(scaling.get("rope_theta", values.get("rope_theta", 10000.0)))}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    require({"rope_type": kind}, path, rope_type=("default", "llama3"))
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        options["llama3"] = tuple(float(scaling[name]) for name in names)
    return DecoderConfig(
        vocab_size=values["vocab_size"],
        max_length=values["max_position_embeddings"],
        num_layers=values["num_hidden_layers"],
        encoding=EncodingConfig((("rope", options),)),
        tie_embeddings=values.get("tie_word_embeddings", False),
        logit_scale=1.0,
        block=BlockConfig(
            model_dim=values["hidden_size"],
            num_heads=values["num_attention_heads"],
            num_kv_heads=values.get("num_key_value_heads"),
            head_dim=values.get("head_dim"),
            mlp_dim=values["intermediate_size"],
            activation="swiglu",
            norm="rms",
            norm_epsilon=values["rms_norm_eps"],
            use_bias=bias,
            dropout=values.get("attention_dropout", 0.0),
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
