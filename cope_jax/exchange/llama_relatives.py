"""Qwen2, Qwen3 and Mistral in the format of transformers: Llama with other options of its block."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from cope_jax.exchange import tensor_map
from cope_jax.exchange.llama import LLAMA, read_decoder, read_rope
from cope_jax.exchange.safetensors_io import require
from cope_jax.models.decoder import DecoderConfig
from cope_jax.models.model import MOST_LAYERS
from cope_jax.registry import check_at_least

_LAYER = "model.layers.{}.self_attn."
_OTHER = ("attention_bias", "mlp_bias", "num_key_value_heads")
# The heads have no default: those of transformers differ from one model to the next.
GROUPS: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": ("block.num_kv_heads", int | None),
    **{name: value for name, value in LLAMA.values.items() if name not in _OTHER},
}
_COMMON = {name: LLAMA.required[name] for name in ("hidden_act", "is_causal")}
_COMMON |= {"attention_chunk_size": (None,)}


def _all_full(fields: Mapping[str, Any], values: Mapping[str, Any], path: str) -> None:
    number = fields["num_layers"]
    check_at_least(1, path, MOST_LAYERS, num_hidden_layers=number)
    require(values, path, layer_types=(None, ["full_attention"] * number))


def _read_qwen2(
    fields: dict[str, Any], block: dict[str, Any], values: Mapping[str, Any], path: str
) -> DecoderConfig:
    _all_full(fields, values, path)
    biases = {"use_bias": False, "qkv_bias": True}
    return read_decoder(fields, block | biases, read_rope(values, path))


def _read_qwen3(
    fields: dict[str, Any], block: dict[str, Any], values: Mapping[str, Any], path: str
) -> DecoderConfig:
    _all_full(fields, values, path)
    norms = {"use_bias": False, "qk_norm": True, "qk_norm_shared": True}
    return read_decoder(fields, block | norms, read_rope(values, path))


def _read_mistral(
    fields: dict[str, Any], block: dict[str, Any], values: Mapping[str, Any], path: str
) -> DecoderConfig:
    return read_decoder(fields, block | {"use_bias": False}, read_rope(values, path))


def _relative(kind: str, architecture: str, **changes: Any) -> tensor_map.Format:
    return dataclasses.replace(LLAMA, kind=kind, architecture=architecture, **changes)


QWEN2 = _relative(
    "qwen2",
    "Qwen2ForCausalLM",
    values=GROUPS,
    required=_COMMON | {"use_sliding_window": (False,)},
    read=_read_qwen2,
)
QWEN3 = _relative(
    "qwen3",
    "Qwen3ForCausalLM",
    values=GROUPS | {"head_dim": ("block.head_dim", int, 128)},
    modules={
        **LLAMA.modules,
        f"{_LAYER}q_norm": "blocks/attention/options/q_scale",
        f"{_LAYER}k_norm": "blocks/attention/options/k_scale",
    },
    required=_COMMON | {"use_sliding_window": (False,), "attention_bias": (False,)},
    read=_read_qwen3,
)
MISTRAL = _relative(
    "mistral",
    "MistralForCausalLM",
    values=GROUPS | {"sliding_window": ("block.window", int | None, 4096)},
    required=_COMMON | {"layer_types": (None,)},
    read=_read_mistral,
)
RELATIVES = (QWEN2, QWEN3, MISTRAL)
"""The formats of this module."""
