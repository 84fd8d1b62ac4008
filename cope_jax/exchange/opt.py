"""OPT in the format of transformers: a decoder with learned positions, LayerNorm and ReLU."""

from collections.abc import Mapping
from typing import Any

from cope_jax.encodings import EncodingConfig
from cope_jax.exchange import tensor_map
from cope_jax.exchange.safetensors_io import ACTIVATIONS, TOKENS, require
from cope_jax.layers.block_config import BlockConfig
from cope_jax.models.decoder import Decoder, DecoderConfig

_EPSILON = 1e-5  # PyTorch's, because the config has none


def _read(
    fields: dict[str, Any], block: dict[str, Any], values: Mapping[str, Any], path: str
) -> DecoderConfig:
    require(values, path, word_embed_proj_dim=(block["model_dim"],))
    encoding = EncodingConfig((("learned", {}),))
    ours = BlockConfig(**block, norm_epsilon=_EPSILON)
    return DecoderConfig(**fields, encoding=encoding, logit_scale=1.0, block=ours)


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "max_position_embeddings": tensor_map.table_length(config),
        "ffn_dim": config.block.mlp_dim or 4 * config.block.model_dim,
        "word_embed_proj_dim": config.block.model_dim,
        "attention_dropout": config.block.dropout,
        **dict.fromkeys(TOKENS),  # transformers would replace absent tokens with its defaults
    }


OPT = tensor_map.Format(
    kind="opt",
    architecture="OPTForCausalLM",
    model=Decoder,
    values={
        "vocab_size": ("vocab_size", int),
        "max_position_embeddings": ("max_length", int),
        "hidden_size": ("block.model_dim", int),
        "ffn_dim": ("block.mlp_dim", int),
        "num_hidden_layers": ("num_layers", int),
        "num_attention_heads": ("block.num_heads", int),
        "activation_function": ("block.activation", str, "relu"),
        # Also used for attention; its rate is not read.
        "dropout": ("block.dropout", float, 0.1),
        "enable_bias": ("block.use_bias", bool, True),
        "tie_word_embeddings": ("tie_embeddings", bool, True),
    },
    modules={
        "model.decoder.embed_tokens": "embedding",
        "model.decoder.embed_positions": "encoding/learned",
        "model.decoder.layers.{}.self_attn_layer_norm": "blocks/attention_norm/norm",
        "model.decoder.layers.{}.self_attn.q_proj": "blocks/attention/query",
        "model.decoder.layers.{}.self_attn.k_proj": "blocks/attention/key",
        "model.decoder.layers.{}.self_attn.v_proj": "blocks/attention/value",
        "model.decoder.layers.{}.self_attn.out_proj": "blocks/attention/out",
        "model.decoder.layers.{}.final_layer_norm": "blocks/mlp_norm/norm",
        "model.decoder.layers.{}.fc1": "blocks/mlp/inner",
        "model.decoder.layers.{}.fc2": "blocks/mlp/outer",
        "model.decoder.final_layer_norm": "norm/norm",
        "lm_head": "out",
    },
    prefixes=("model.", "lm_head."),
    ignored=r"-",
    tied=tensor_map.TIED_HEAD,
    required={
        "activation_function": ("relu", *(name for name in ACTIVATIONS if name != "relu")),
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "layer_norm_elementwise_affine": (True,),
        **tensor_map.DECODER,
    },
    free=frozenset({"logit_scale", "encoding_sharing", "learned.max_length", "learned.stddev"}),
    read=_read,
    write=_write,
    adapt=tensor_map.with_scaled_norm,
    positions="model.decoder.embed_positions.weight",
    first_row=lambda values: 2,
)
