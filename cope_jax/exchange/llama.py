"""Llama in the format of Hugging Face's transformers: a decoder with RoPE, RMSNorm and SwiGLU."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import nnx

from cope_jax.encodings import EncodingConfig
from cope_jax.encodings.rope import RoPEConfig
from cope_jax.errors import ConfigError
from cope_jax.exchange import tensor_map
from cope_jax.exchange.safetensors_io import TOKENS, require, typed, typed_value
from cope_jax.layers.block_config import BlockConfig
from cope_jax.models.decoder import Decoder, DecoderConfig
from cope_jax.registry import unknown

_LENGTH = "original_max_position_embeddings"
_SCALINGS: dict[str, tuple[str, list[Any]]] = {
    "linear": ("interpolation", [("factor", float)]),
    "yarn": (
        "yarn",
        [
            ("factor", float),
            (_LENGTH, float),
            ("beta_slow", float, 1.0),
            ("beta_fast", float, 32.0),
        ],
    ),
    "llama3": (
        "llama3",
        [
            ("factor", float),
            ("low_freq_factor", float),
            ("high_freq_factor", float),
            (_LENGTH, float),
        ],
    ),
}
"""`rope_type` → (option of `RoPEConfig`, its values in config.json with type and default)."""
_OUTSIDE = ("rope_theta", "partial_rotary_factor", _LENGTH)
"""Values of RoPE that may also stand outside of `rope_scaling` and `rope_parameters`."""


def read_rope(
    values: Mapping[str, Any], path: str, fraction: float | None = None
) -> dict[str, Any]:
    """The options of our RoPE. ConfigError: values on which versions of transformers differ.

    `fraction` is the default share of the rotated features; if None, all must be rotated.
    """
    scaling, parameters = (  # the second, with the base in it, since transformers 5
        typed_value(name, None, values, path, dict[str, Any] | None)
        for name in ("rope_scaling", "rope_parameters")
    )
    if scaling and parameters and scaling != parameters:
        raise ConfigError(f"{path}: rope_scaling and rope_parameters differ: remove the wrong one")
    rope: dict[str, Any] = dict(scaling or parameters or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    require({"rope_type": kind}, path, rope_type=("default", *_SCALINGS))
    option, form = _SCALINGS.get(kind, ("", []))
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    known |= {name for name, *_ in form}
    known |= {"attention_factor", "truncate"} if kind == "yarn" else set()
    if strange := sorted(
        name for name, value in rope.items() if value is not None and name not in known
    ):
        raise unknown(f"value of the rope_type {kind!r} in {path}", strange[0], known)
    for name in _OUTSIDE:
        if name in values and rope.setdefault(name, values[name]) != values[name]:
            raise ConfigError(
                f"{path} has {name}={values[name]} and {name}={rope[name]}: remove the wrong one"
            )
    require(rope, path, truncate=(True,))
    options: dict[str, Any] = {"base": typed_value("rope_theta", 10000.0, rope, path)}
    if fraction is None:
        require(rope, path, partial_rotary_factor=(1.0, None))
    else:
        options["fraction"] = typed_value("partial_rotary_factor", fraction, rope, path)
    if option:
        numbers = dataclasses.astuple(typed(dataclasses.make_dataclass(kind, form), rope, path))
        options[option] = numbers if len(numbers) > 1 else numbers[0]
    return options | (
        {"yarn_ramp": "bands", "magnitude": rope.get("attention_factor")} if kind == "yarn" else {}
    )


def write_rope(rope: RoPEConfig) -> dict[str, Any]:
    """The values of config.json for the options of our RoPE."""
    scaling: dict[str, Any] | None = None
    for kind, (option, form) in _SCALINGS.items():
        if (value := getattr(rope, option)) is not None:
            numbers = value if isinstance(value, tuple) else (value,)
            names = zip(form, numbers, strict=False)
            scaling = {"rope_type": kind, **{name: number for (name, *_), number in names}}
    if scaling and _LENGTH in scaling:
        scaling[_LENGTH] = int(scaling[_LENGTH])
    if rope.yarn is not None and rope.magnitude is not None:
        scaling = {**(scaling or {}), "attention_factor": rope.magnitude}
    return {"rope_theta": rope.base, "rope_scaling": scaling}


def _read(
    fields: dict[str, Any], block: dict[str, Any], values: Mapping[str, Any], path: str
) -> DecoderConfig:
    if block["model_dim"] % max(1, block["num_heads"]):
        raise ConfigError(
            f"{path}: hidden_size={block['model_dim']} is not a multiple of "
            f"num_attention_heads={block['num_heads']}, as transformers demands: choose another model"
        )
    return read_decoder(fields, block, read_rope(values, path))


def read_decoder(
    fields: Mapping[str, Any], block: Mapping[str, Any], rope: Mapping[str, Any]
) -> DecoderConfig:
    """The config of a decoder with these options of RoPE, and by default with Llama's block."""
    ours = BlockConfig(**{"activation": "swiglu", "norm": "rms", **block})
    encoding = EncodingConfig((("rope", dict(rope)),))
    # Checks the options.
    encoding.build(ours.attention_shape(fields["max_length"]), rngs=nnx.Rngs(0))
    return DecoderConfig(**fields, encoding=encoding, logit_scale=1.0, block=ours)


def write(config: DecoderConfig) -> dict[str, Any]:
    """The values of config.json that Llama and its relatives have."""
    block, shape = config.block, config.block.attention_shape(None)
    return {
        "intermediate_size": block.mlp_dim or 4 * block.model_dim,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        **dict.fromkeys(TOKENS),  # transformers would replace absent tokens with its defaults
        **write_rope(config.encoding.options().get("rope", RoPEConfig())),
    }


LLAMA = tensor_map.Format(
    kind="llama",
    architecture="LlamaForCausalLM",
    model=Decoder,
    values={
        **tensor_map.SIZES,
        "rms_norm_eps": ("block.norm_epsilon", float),
        "num_key_value_heads": ("block.num_kv_heads", int | None, None),
        "head_dim": ("block.head_dim", int | None, None),
        "tie_word_embeddings": ("tie_embeddings", bool, False),
        "attention_bias": ("block.use_bias", bool, False),
        "attention_dropout": ("block.dropout", float, 0.0),
        "mlp_bias": ("block.use_bias", bool, False),
    },
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
    required={"hidden_act": ("silu", "swish"), **tensor_map.DECODER},
    free=frozenset({"logit_scale", "encoding_sharing"}),
    read=_read,
    write=write,
    adapt=tensor_map.with_scaled_norm,
)
