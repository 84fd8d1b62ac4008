"""Gemma 2, Gemma 3 and ModernBERT: some layers see all tokens, and the others a window.

Published configs name the kind of each layer, or the distance between two layers of one kind.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from cope_jax.encodings import EncodingConfig
from cope_jax.encodings.rope import RoPEConfig
from cope_jax.errors import ConfigError
from cope_jax.exchange import llama, tensor_map
from cope_jax.exchange.llama import LLAMA, read_decoder, read_rope
from cope_jax.exchange.llama_relatives import GROUPS
from cope_jax.exchange.safetensors_io import typed_value
from cope_jax.models.bert import Bert, BertConfig
from cope_jax.models.decoder import DecoderConfig
from cope_jax.models.encoder import bert_block
from cope_jax.models.model import MOST_LAYERS
from cope_jax.registry import check_at_least

FULL, WINDOW = "full_attention", "sliding_attention"
_Rope = Mapping[str, Any]


def _layers(
    fields: Mapping[str, Any],
    values: Mapping[str, Any],
    path: str,
    period: str,
    default: int,
    last: bool,
) -> tuple[int, ...]:
    """The layers that see all tokens; without `layer_types`, one of each `period` layers.

    It is the `last` or the first of them.
    """
    step = typed_value(period, default, values, path)
    if step < 1:
        raise ConfigError(f"{path}: {period} must be at least 1, got {step}")
    number = fields["num_layers"]
    check_at_least(1, path, MOST_LAYERS, num_hidden_layers=number)
    regular = {layer for layer in range(number) if (layer + last) % step == 0}
    kinds = [FULL if layer in regular else WINDOW for layer in range(number)]
    types = kinds if values.get("layer_types") is None else values["layer_types"]
    if (
        not isinstance(types, list)
        or len(types) != number
        or not {*map(str, types)} <= {FULL, WINDOW}
    ):
        raise ConfigError(
            f"{path}: layer_types must be {number} names, {FULL!r} or {WINDOW!r}, one for each layer, got {types!r}"
        )
    if period in values and types != kinds:
        raise ConfigError(f"{path}: layer_types and {period} differ: remove the wrong one")
    return tuple(layer for layer in range(number) if types[layer] == FULL)


def _ropes(
    values: Mapping[str, Any], path: str, bases: tuple[tuple[str, float], tuple[str, float]]
) -> tuple[_Rope, _Rope]:
    """RoPE's options of the layers that see all tokens, and of the others.

    `bases` are the names of their bases in files before transformers 5, with the defaults.
    """
    nested = {} if values.get("rope_parameters") is None else values["rope_parameters"]
    if not isinstance(nested, dict) or not nested.keys() <= {FULL, WINDOW}:
        raise ConfigError(
            f"{path}: rope_parameters must have {FULL!r} and {WINDOW!r}, each with its options, got {nested!r}"
        )
    options = []
    for kind, (old, default) in zip((FULL, WINDOW), bases, strict=True):
        given = {} if nested.get(kind) is None else nested[kind]
        if not isinstance(given, dict):
            raise ConfigError(f"{path}: rope_parameters.{kind} must be a dict, got {given!r}")
        base = typed_value(old, default, values, path)
        if base < 2:  # as `rope.base` says, without the file
            raise ConfigError(f"{path}: {old} must be at least 2, got {base}")
        if old in values and given.get("rope_theta", base) != base:
            raise ConfigError(f"{path}: {old} and rope_parameters differ: remove the wrong one")
        scaling = values.get("rope_scaling") if kind == FULL else None
        if not isinstance(scaling, dict | None):
            raise ConfigError(f"{path}: rope_scaling must be a dict, got {scaling!r}")
        if scaling and given:
            raise ConfigError(f"{path} has rope_scaling and rope_parameters: remove one of them")
        given = {"rope_theta": base, **given}
        chosen = {"rope_scaling": scaling, "rope_theta": base} if scaling else given
        options.append(read_rope(chosen if scaling else {"rope_parameters": given}, path))
    return options[0], options[1]


def _arrange(layers: tuple[int, ...], ropes: tuple[_Rope, _Rope], number: int) -> dict[str, Any]:
    """The options of our config: encoding, full_layers and full_encoding."""
    full, others = (EncodingConfig((("rope", dict(rope)),)) for rope in ropes)
    if len(layers) == number:
        return {"encoding": full}
    differ = bool(layers) and full.options() != others.options()
    return {
        "encoding": others,
        "full_layers": layers or None,
        "full_encoding": full.text() if differ else "",
    }


def _arranged(config: Any) -> tuple[list[str], RoPEConfig, RoPEConfig]:
    """(layer_types, RoPE's options of the layers that see all tokens, and those of the others)."""
    full = config.full_layers or (range(config.num_layers) if config.block.window is None else ())
    types = [FULL if layer in full else WINDOW for layer in range(config.num_layers)]
    others = config.encoding.options().get("rope", RoPEConfig())
    of_full = EncodingConfig.parse(config.full_encoding).options() if config.full_encoding else {}
    return types, of_full.get("rope", others), others


def _gemma_block(
    fields: Mapping[str, Any], block: Mapping[str, Any], values: Mapping[str, Any], path: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of our config and those of its block."""
    number = typed_value("query_pre_attn_scalar", 256, values, path)
    if number < 1:
        raise ConfigError(f"{path}: query_pre_attn_scalar must be at least 1, got {number}")
    same = number == block["head_dim"]
    chosen = {
        "activation": "geglu",
        "norm_position": "both",
        "use_bias": False,
        "attention_scale": None if same else number**-0.5,
    }
    return {**fields, "embedding_scale": block["model_dim"] ** 0.5}, {**block, **chosen}


def _with_layers(
    fields: dict[str, Any], block: dict[str, Any], layers: tuple[int, ...], ropes: Any
) -> DecoderConfig:
    number = fields["num_layers"]
    block = block | ({"window": None} if len(layers) == number else {})
    arranged = _arrange(layers if block["window"] else tuple(range(number)), ropes, number)
    encoding = arranged.pop("encoding")
    return read_decoder(fields | arranged, block, dict(encoding.parts)["rope"])


def _read_gemma2(
    fields: dict[str, Any], block: dict[str, Any], values: Mapping[str, Any], path: str
) -> DecoderConfig:
    fields, block = _gemma_block(fields, block, values, path)
    layers = _layers(fields, values, path, "sliding_window_pattern", 2, True)
    rope = read_rope(values, path)
    return _with_layers(fields, block, layers, (rope, rope))


_BASES_3 = (("rope_theta", 1_000_000.0), ("rope_local_base_freq", 10_000.0))


def _read_gemma3(
    fields: dict[str, Any], block: dict[str, Any], values: Mapping[str, Any], path: str
) -> DecoderConfig:
    fields, block = _gemma_block(fields, block, values, path)
    layers = _layers(fields, values, path, "sliding_window_pattern", 6, True)
    block |= {"qk_norm": True, "qk_norm_shared": True}
    return _with_layers(fields, block, layers, _ropes(values, path, _BASES_3))


def _write_gemma(config: DecoderConfig) -> dict[str, Any]:
    block, head_dim = config.block, config.block.attention_shape(None).head_dim
    types, full, _ = _arranged(config)
    scale = block.attention_scale
    return llama.write(config) | {
        **llama.write_rope(full),
        **dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh"),
        "sliding_window": block.window or 4096,  # transformers needs a number, even without use
        "query_pre_attn_scalar": head_dim if scale is None else round(scale**-2),
        "layer_types": types,
    }


def _write_gemma3(config: DecoderConfig) -> dict[str, Any]:
    return _write_gemma(config) | {"rope_local_base_freq": _arranged(config)[2].base}


def _gemma(kind: str, architecture: str, **changes: Any) -> tensor_map.Format:
    values = {
        **{name: value for name, value in GROUPS.items() if name != "tie_word_embeddings"},
        "head_dim": ("block.head_dim", int, 256),
        "tie_word_embeddings": ("tie_embeddings", bool, True),
        "sliding_window": ("block.window", int | None, 4096),
    }
    layer = "model.layers.{}."
    modules = {
        **LLAMA.modules,
        f"{layer}post_attention_layernorm": "blocks/attention_output_norm/norm",
        f"{layer}pre_feedforward_layernorm": "blocks/mlp_norm/norm",
        f"{layer}post_feedforward_layernorm": "blocks/mlp_output_norm/norm",
    }
    required = {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "use_bidirectional_attention": (None, False),
        "is_causal": (True,),
        "attention_chunk_size": (None,),
    }
    cap, logits = ("block.attention_cap", float | None), ("logit_cap", float | None)
    caps = changes.pop("caps")
    return dataclasses.replace(
        LLAMA,
        kind=kind,
        architecture=architecture,
        values=values
        | {"attn_logit_softcapping": (*cap, caps[0])}
        | {"final_logit_softcapping": (*logits, caps[1])},
        modules=modules | changes.pop("modules", {}),
        required=required | changes.pop("required", {}),
        lessened=r".*norm\.weight",
        **changes,
    )


GEMMA2 = _gemma(
    "gemma2",
    "Gemma2ForCausalLM",
    caps=(50.0, 30.0),
    required={"sliding_window_pattern": (2,)},
    read=_read_gemma2,
    write=_write_gemma,
)
GEMMA3 = _gemma(
    "gemma3_text",
    "Gemma3ForCausalLM",
    caps=(None, None),
    modules={
        "model.layers.{}.self_attn.q_norm": "blocks/attention/options/q_scale",
        "model.layers.{}.self_attn.k_norm": "blocks/attention/options/k_scale",
    },
    read=_read_gemma3,
    write=_write_gemma3,
)
_BASES_BERT = (("global_rope_theta", 160_000.0), ("local_rope_theta", 10_000.0))


def _read_modernbert(
    fields: dict[str, Any], block: dict[str, Any], values: Mapping[str, Any], path: str
) -> BertConfig:
    number = fields["num_layers"]
    layers = _layers(fields, values, path, "global_attn_every_n_layers", 3, False)
    width = typed_value("local_attention", 128, values, path)
    window = None if len(layers) == number else width // 2 + 1
    arranged = _arrange(layers, _ropes(values, path, _BASES_BERT), number)
    chosen = {"activation": "geglu_erf", "norm_position": "pre", "norm_bias": False}
    ours = bert_block(**{**block, **chosen, "window": window})
    return BertConfig(**fields, **arranged, type_vocab_size=0, first_norm=False, block=ours)


def _write_modernbert(config: BertConfig) -> dict[str, Any]:
    types, full, others = _arranged(config)
    return {
        "intermediate_size": config.block.mlp_dim or 4 * config.block.model_dim,
        **dict.fromkeys(("attention_dropout", "embedding_dropout"), config.block.dropout),
        "layer_types": types,
        "local_attention": 128 if config.block.window is None else 2 * (config.block.window - 1),
        "global_rope_theta": full.base,
        "local_rope_theta": others.base,
        "pad_token_id": 0,
    }


MODERNBERT = tensor_map.Format(
    kind="modernbert",
    architecture="ModernBertForMaskedLM",
    model=Bert,
    values={
        **tensor_map.SIZES,
        "norm_eps": ("block.norm_epsilon", float, 1e-5),
        "attention_bias": ("block.use_bias", bool, False),
        "mlp_bias": ("block.use_bias", bool, False),
        "classifier_bias": ("block.use_bias", bool, False),
        # Also used for attention and embeddings; their rates are not read.
        "mlp_dropout": ("block.dropout", float, 0.0),
        "initializer_range": ("block.initial_stddev", float, 0.02),
    },
    modules={
        "model.embeddings.tok_embeddings": "encoder/words",
        "model.embeddings.norm": "encoder/norm/norm",
        "model.layers.{}.attn_norm": "encoder/blocks/attention_norm/norm",
        "model.layers.{}.attn.Wqkv": "encoder/blocks/attention/query encoder/blocks/attention/key "
        "encoder/blocks/attention/value",
        "model.layers.{}.attn.Wo": "encoder/blocks/attention/out",
        "model.layers.{}.mlp_norm": "encoder/blocks/mlp_norm/norm",
        "model.layers.{}.mlp.Wi": "encoder/blocks/mlp/gate encoder/blocks/mlp/inner",
        "model.layers.{}.mlp.Wo": "encoder/blocks/mlp/outer",
        "model.final_norm": "encoder/last_norm/norm",
        "head.dense": "transform",
        "head.norm": "transform_norm/norm",
        "decoder": "",
    },
    prefixes=("model.", "head.", "decoder."),
    ignored=r"-",
    tied={"decoder.weight": "encoder/words/embedding"},
    required={
        "hidden_activation": ("gelu",),
        "classifier_activation": ("gelu",),
        "norm_bias": (False,),
        "decoder_bias": (True,),
        "tie_word_embeddings": (True,),
        "rope_scaling": (None,),
    },
    free=frozenset({"encoding_sharing"}),
    read=_read_modernbert,
    write=_write_modernbert,
    optional=("head.", "decoder."),
    unused=("model.layers.0.attn_norm.weight",),
)
