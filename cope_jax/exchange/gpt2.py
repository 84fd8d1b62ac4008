"""GPT-2 in the format of transformers: a decoder with learned positions and LayerNorm."""

from collections.abc import Mapping
from typing import Any

from cope_jax.encodings import EncodingConfig
from cope_jax.exchange import tensor_map
from cope_jax.exchange.safetensors_io import ACTIVATIONS, TOKENS, require
from cope_jax.layers.block_config import BlockConfig
from cope_jax.models.decoder import Decoder, DecoderConfig

_ALIASES = ("hidden_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers")
"""Second names that transformers accepts, and then prefers."""


def _read(
    fields: dict[str, Any], block: dict[str, Any], values: Mapping[str, Any], path: str
) -> DecoderConfig:
    sizes = (block["model_dim"], fields["max_length"], block["num_heads"], fields["num_layers"])
    require(values, path, **{name: (size,) for name, size in zip(_ALIASES, sizes, strict=True)})
    encoding = EncodingConfig((("learned", {}),))
    return DecoderConfig(**fields, encoding=encoding, logit_scale=1.0, block=BlockConfig(**block))


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "n_positions": tensor_map.table_length(config),
        **dict.fromkeys(("embd_pdrop", "attn_pdrop"), config.block.dropout),
        **dict.fromkeys(TOKENS),  # transformers would replace absent tokens with its defaults
    }


GPT2 = tensor_map.Format(
    kind="gpt2",
    architecture="GPT2LMHeadModel",
    model=Decoder,
    values={
        "vocab_size": ("vocab_size", int),
        "n_positions": ("max_length", int),
        "n_embd": ("block.model_dim", int),
        "n_layer": ("num_layers", int),
        "n_head": ("block.num_heads", int),
        "n_inner": ("block.mlp_dim", int | None, None),
        "activation_function": ("block.activation", str, "gelu_new"),
        "layer_norm_epsilon": ("block.norm_epsilon", float, 1e-5),
        # Also used for embeddings and attention; their rates are not read.
        "resid_pdrop": ("block.dropout", float, 0.1),
        "tie_word_embeddings": ("tie_embeddings", bool, True),
    },
    modules={
        "transformer.wte": "embedding",
        "transformer.wpe": "encoding/learned",
        "transformer.h.{}.ln_1": "blocks/attention_norm/norm",
        "transformer.h.{}.attn.c_attn": "blocks/attention/query blocks/attention/key blocks/attention/value",
        "transformer.h.{}.attn.c_proj": "blocks/attention/out",
        "transformer.h.{}.ln_2": "blocks/mlp_norm/norm",
        "transformer.h.{}.mlp.c_fc": "blocks/mlp/inner",
        "transformer.h.{}.mlp.c_proj": "blocks/mlp/outer",
        "transformer.ln_f": "norm/norm",
        "lm_head": "out",
    },
    prefixes=("transformer.", "lm_head."),
    ignored=r".*\.attn\.(bias|masked_bias)",
    tied=tensor_map.TIED_HEAD,
    required={
        "activation_function": ("gelu_new", *(name for name in ACTIVATIONS if name != "gelu_new")),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        **tensor_map.DECODER,
    },
    free=frozenset({"logit_scale", "encoding_sharing", "learned.max_length", "learned.stddev"}),
    read=_read,
    write=_write,
    adapt=tensor_map.with_scaled_norm,
    plain=("transformer.",),
)
