"""GPT-2 in the format of transformers: a decoder with learned positions and LayerNorm."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from cope_jax.encodings import EncodingConfig
from cope_jax.exchange import tensor_map
from cope_jax.exchange.safetensors_io import ACTIVATIONS, THEIR_ACTIVATIONS, require, typed
from cope_jax.layers.block_config import BlockConfig
from cope_jax.models.decoder import Decoder, DecoderConfig


@dataclasses.dataclass(frozen=True)
class _Values:
    """The values read from config.json, with the defaults of transformers."""

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    resid_pdrop: float = 0.1  # also used for embeddings and attention; their rates are not read
    tie_word_embeddings: bool = True


_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""Second names that transformers accepts, and then prefers."""


def _read(values: Mapping[str, Any], path: str) -> DecoderConfig:
    read = typed(_Values, values, path)
    require(values, path, **{alias: (getattr(read, name),) for alias, name in _ALIASES.items()})
    return DecoderConfig(
        vocab_size=read.vocab_size,
        max_length=read.n_positions,
        num_layers=read.n_layer,
        encoding=EncodingConfig((("learned", {}),)),
        tie_embeddings=read.tie_word_embeddings,
        logit_scale=1.0,
        block=BlockConfig(
            model_dim=read.n_embd,
            num_heads=read.n_head,
            mlp_dim=read.n_inner,
            activation=ACTIVATIONS[read.activation_function],  # type: ignore[arg-type]  # a name
            norm_epsilon=read.layer_norm_epsilon,
            dropout=read.resid_pdrop,
        ),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    block = config.block
    return tensor_map.decoder_values(config) | {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_positions": dict(config.encoding.parts).get("learned", {}).get("max_length")
        or config.max_length,
        "n_embd": block.model_dim,
        "n_layer": config.num_layers,
        "n_head": block.num_heads,
        "n_inner": block.mlp_dim,
        "activation_function": THEIR_ACTIVATIONS.get(block.activation, "gelu"),
        "layer_norm_epsilon": block.norm_epsilon,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), block.dropout),
    }


GPT2 = tensor_map.Format(
    kind="gpt2",
    model=Decoder,
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
