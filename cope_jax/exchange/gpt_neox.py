"""GPT-NeoX and Pythia in the format of transformers: a decoder with partial RoPE and two norms."""

from collections.abc import Mapping
from typing import Any

from cope_jax.encodings.rope import RoPEConfig
from cope_jax.errors import ConfigError
from cope_jax.exchange import tensor_map
from cope_jax.exchange.llama import read_decoder, read_rope, write_rope
from cope_jax.exchange.safetensors_io import ACTIVATIONS, TOKENS
from cope_jax.models.decoder import Decoder, DecoderConfig

NAMES = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
"""Names in files before transformers 5 → later names, which are also Llama's."""
_QKV = "gpt_neox.layers.{}.attention.query_key_value"


def _read(
    fields: dict[str, Any], block: dict[str, Any], values: Mapping[str, Any], path: str
) -> DecoderConfig:
    values = dict(values)
    for old, new in NAMES.items():
        if old in values and values.setdefault(new, values[old]) != values[old]:
            raise ConfigError(f"{path}: {old} and {new} differ: remove the wrong one")
    rope = read_rope(values, path, fraction=0.25)
    config = read_decoder(fields, block | {"norm": "layer"}, rope)
    head_dim = config.block.attention_shape(None).head_dim
    if int(head_dim * rope["fraction"]) % 2:
        raise ConfigError(
            f"{path}: {int(head_dim * rope['fraction'])} features of each head turn, but features turn in pairs: "
            "choose another model"
        )
    return config


def _write(config: DecoderConfig) -> dict[str, Any]:
    rope = config.encoding.options().get("rope", RoPEConfig())
    later = write_rope(rope) | {"partial_rotary_factor": rope.fraction}
    return {
        "intermediate_size": config.block.mlp_dim or 4 * config.block.model_dim,
        **dict.fromkeys(("attention_dropout",), config.block.dropout),
        **dict.fromkeys(TOKENS),  # transformers would replace absent tokens with its defaults
        "rope_scaling": later["rope_scaling"],
        **{old: later[new] for old, new in NAMES.items()},
    }


GPT_NEOX = tensor_map.Format(
    kind="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    model=Decoder,
    values={
        **tensor_map.SIZES,
        "hidden_act": ("block.activation", str),
        "layer_norm_eps": ("block.norm_epsilon", float),
        "use_parallel_residual": ("block.parallel", bool, True),
        # Also used for attention; its rate is not read.
        "hidden_dropout": ("block.dropout", float, 0.0),
        "tie_word_embeddings": ("tie_embeddings", bool, False),
    },
    modules={
        "gpt_neox.embed_in": "embedding",
        "gpt_neox.layers.{}.input_layernorm": "blocks/attention_norm/norm",
        _QKV: "blocks/attention/query blocks/attention/key blocks/attention/value",
        "gpt_neox.layers.{}.attention.dense": "blocks/attention/out",
        "gpt_neox.layers.{}.post_attention_layernorm": "blocks/mlp_norm/norm",
        "gpt_neox.layers.{}.mlp.dense_h_to_4h": "blocks/mlp/inner",
        "gpt_neox.layers.{}.mlp.dense_4h_to_h": "blocks/mlp/outer",
        "gpt_neox.final_layer_norm": "norm/norm",
        "embed_out": "out",
    },
    prefixes=("gpt_neox.", "embed_out."),
    ignored=r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    tied={"embed_out.weight": "embedding/embedding"},
    required={
        "hidden_act": tuple(ACTIVATIONS),
        "attention_bias": (True,),
        **tensor_map.DECODER,
    },
    free=frozenset({"logit_scale", "encoding_sharing"}),
    read=_read,
    write=_write,
    adapt=tensor_map.with_scaled_norm,
    interleaved=_QKV,
)
