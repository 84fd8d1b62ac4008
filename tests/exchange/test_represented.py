"""A format writes every option of a config, or refuses it: every option of every part varies."""

import collections
import dataclasses
import functools
import json
from typing import Literal, get_args, get_origin

import jax
import numpy as np
import pytest
from flax import nnx

from cope_jax.encodings import ENCODINGS, EncodingConfig
from cope_jax.encodings.rope import RoPEConfig
from cope_jax.errors import ConfigError
from cope_jax.exchange import formats
from cope_jax.exchange.bert_files import BERT
from cope_jax.exchange.encoder_files import DISTILBERT, ELECTRA, MPNET, ROBERTA
from cope_jax.exchange.gpt2 import GPT2
from cope_jax.exchange.gpt_neox import GPT_NEOX
from cope_jax.exchange.layered import GEMMA2, GEMMA3, MODERNBERT
from cope_jax.exchange.llama import LLAMA
from cope_jax.exchange.llama_relatives import MISTRAL, QWEN2, QWEN3
from cope_jax.exchange.opt import OPT
from cope_jax.layers.block_config import BlockConfig
from cope_jax.models.bert import BertConfig
from cope_jax.models.decoder import DecoderConfig
from cope_jax.models.encoder import bert_block
from cope_jax.models.model import OF_TRAINING, deciding_options
from tests.exchange.test_formats import noise

SIZES = {"vocab_size": 11, "max_length": 12, "num_layers": 1}
ROPE, LEARNED = EncodingConfig.parse("rope"), EncodingConfig.parse("learned")
SMALL = {"model_dim": 8, "num_heads": 2, "mlp_dim": 12}
BASES = {
    "llama": DecoderConfig(
        **SIZES, encoding=ROPE, block=BlockConfig(**SMALL, norm="rms", activation="swiglu")
    ),
    "gpt2": DecoderConfig(**SIZES, encoding=LEARNED, block=BlockConfig(**SMALL)),
    "bert": BertConfig(**SIZES, encoding=LEARNED, block=bert_block(8, 2, mlp_dim=12)),
}
ENCODERS = (ROBERTA, DISTILBERT, MPNET, ELECTRA, MODERNBERT)
DECODERS = (QWEN2, QWEN3, MISTRAL, GEMMA2, GEMMA3, GPT_NEOX, OPT)
FORMATS = {form.kind: form for form in (LLAMA, GPT2, BERT, *ENCODERS, *DECODERS)}
LOCAL = {"window": 3, "norm_position": "both", "activation": "geglu"}
NORMS = {"qk_norm": True, "qk_norm_shared": True}
GEMMA = {"num_layers": 3, "full_layers": (1,), "embedding_scale": 8**0.5, "logit_scale": 1.0}


def _with(base, block, **options):
    return dataclasses.replace(
        BASES[base], block=dataclasses.replace(BASES[base].block, **block), **options
    )


BASES |= {
    "roberta": BASES["bert"],
    "distilbert": _with("bert", {}, type_vocab_size=0),
    "mpnet": _with(
        "bert",
        {},
        type_vocab_size=0,
        encoding_sharing="model",
        encoding=EncodingConfig.parse("learned+t5(bidirectional=True)"),
    ),
    "electra": _with("bert", {}, embedding_dim=6),
    "modernbert": _with(
        "bert",
        {"window": 3, "norm_position": "pre", "activation": "geglu_erf", "norm_bias": False}
        | {"use_bias": False},
        num_layers=3,
        encoding=EncodingConfig.parse("rope(base=50.0)"),
        full_encoding="rope(base=90.0)",
        full_layers=(1,),
        type_vocab_size=0,
        first_norm=False,
    ),
    "qwen2": _with("llama", {"use_bias": False, "qkv_bias": True}),
    "qwen3": _with("llama", {"use_bias": False} | NORMS),
    "mistral": _with("llama", {"use_bias": False, "window": 3}),
    "gemma2": _with("llama", {"use_bias": False} | LOCAL, **GEMMA),
    "gemma3_text": _with(
        "llama", {"use_bias": False} | LOCAL | NORMS, **GEMMA, full_encoding="rope(base=90.0)"
    ),
    "gpt_neox": _with("gpt2", {"parallel": True}, encoding=EncodingConfig.parse("rope")),
    "opt": _with("gpt2", {"activation": "relu", "norm_epsilon": 1e-5}),
}
TUPLES = {
    "yarn": [(2.0, 6.0), (2.0, 6.0, 1.0, 16.0)],
    "longrope": [(1.0, 3.0)],
    "llama3": [(2.0, 1.0, 4.0, 6.0), (2.0, 1.0, 4.0, 6.5)],
    "attention_blocks": [(4, 4)],
    "full_layers": [(0,), (0, 2)],
}
"""Values of options that are tuples, for heads of four features."""


def others(name, kind, value):
    """Other values of an option of a type, most of them valid."""
    if get_origin(kind) is Literal:
        return [choice for choice in get_args(kind) if choice != value]
    if name in TUPLES:
        return TUPLES[name]
    if isinstance(value, bool):
        return [not value]
    kinds = get_args(kind) or (kind,)
    if bool in kinds:
        return [True, False]
    if int in kinds:
        return [2 * value, value + 1] if value else [1, 2, 4]
    if float in kinds:
        return [value / 2, value + 1, 0.5] if value else [0.5, 2.0, 8.0]
    return ["full"] if kind is str else []


def changed(config, **values):
    """A config with other values, as a list of one; the empty list if they are not valid."""
    try:
        return [dataclasses.replace(config, **values)]
    except ConfigError:
        return []


def varied(config):
    """Configs that differ from a config in one option: (the name of the option, the config)."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for name, block in varied(value) if field.name == "block" else ():
            yield from ((f"block.{name}", other) for other in changed(config, block=block))
        for other in others(field.name, field.type, value):
            yield from ((field.name, valid) for valid in changed(config, **{field.name: other}))


def encodings(base):
    """Configs with every encoding, by default and with another value of each option."""
    for name in ENCODINGS:
        yield name, dataclasses.replace(base, encoding=EncodingConfig(((name, {}),)))
        for field in dataclasses.fields(ENCODINGS.get(name).Config):
            for other in others(field.name, field.type, field.default):
                encoding = EncodingConfig(((name, {field.name: other}),))
                if name == "rope":  # the format could represent it, so only valid options count
                    try:
                        encoding.build(base.block.attention_shape(12), rngs=nnx.Rngs(0))
                    except ConfigError:
                        continue
                yield f"{name}.{field.name}", dataclasses.replace(base, encoding=encoding)


def written(form, config):
    """The config that a format reads back after writing one; None if it refuses the config."""
    try:
        return FORMATS[form]._read(
            json.loads(json.dumps(FORMATS[form]._written(config))), "config.json"
        )
    except ConfigError as error:
        assert "cannot represent" in str(error) and "\n" not in str(error)
        return None


def test_rope_is_written_with_all_its_options_or_refused():
    said = collections.defaultdict(set)
    for name, config in encodings(BASES["llama"]):
        read = written("llama", config)
        assert read is None or read.encoding.options() == config.encoding.options(), (
            config.encoding.text()
        )
        said[name].add(read is not None)
    accepted = {name for name, verdicts in said.items() if True in verdicts}
    assert accepted == {"rope", "rope.base", "rope.interpolation", "rope.llama3"}
    alone = {f"rope.{field.name}" for field in dataclasses.fields(RoPEConfig)} - {"rope.yarn_ramp"}
    assert alone <= said.keys(), "each option varies"
    for yarn in ("(2.0,6.0)", "(2.0,6.0,1.0,16.0),magnitude=1.5"):
        encoding = EncodingConfig.parse(f"rope(yarn={yarn},yarn_ramp=bands)")
        read = written("llama", dataclasses.replace(BASES["llama"], encoding=encoding))
        assert read.encoding.options() == encoding.options()


@pytest.mark.parametrize("form", ["gpt2", "bert"])
def test_no_encoding_but_learned_is_written(form):
    accepted = {
        name for name, config in encodings(BASES[form]) if written(form, config) is not None
    }
    assert accepted == {"learned", "learned.max_length", "learned.stddev"}


@pytest.mark.parametrize("form", FORMATS)
def test_every_option_of_a_model_is_written_or_refused(form):
    base, names = BASES[form], set()
    assert written(form, base) is not None
    for name, config in varied(base):
        names.add(name)
        read = written(form, config)
        if read is not None and name.removeprefix("block.") not in OF_TRAINING | FORMATS[form].free:
            assert function(read)[name] == function(config)[name], name
    if form not in ("llama", "gpt2", "bert"):  # their other options exclude some values
        return
    needs_another = {"block.negative_eigenvalues", "block.qk_norm_shared"}
    needs_another |= {"full_layers", "full_encoding"}
    needs_another |= {"block.parallel", "first_norm"} if form == "bert" else set()
    needs_another |= {"block.norm_bias"} if form == "llama" else set()
    assert function(base).keys() - names == {"name", "layout"} | needs_another, "each option varies"


def function(config):
    """All options of a model except its encoding's, by name, with sizes for those that are None."""
    flat = {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if f.name not in ("block", "encoding")
    }
    return (
        flat
        | {f"block.{name}": value for name, value in vars(config.block).items()}
        | deciding_options(config)
    )


def outputs(config, params):
    """The logits of a decoder, or of both heads of a BERT."""
    graph, state = nnx.split(formats.build(config, params))
    tokens = np.random.default_rng(0).integers(0, 11, (2, 7), np.int32)
    return jax.tree.map(np.asarray, jax.jit(lambda state: nnx.merge(graph, state)(tokens))(state))


@pytest.mark.parametrize("form", ["llama", "gpt2", "bert"])
def test_what_a_format_need_not_represent_computes_the_same(form, tmp_path):
    """A scale of the logits is in test_decoder_files.py."""
    encoding = "rope" if form == "llama" else "learned(max_length=9,stddev=0.5)"
    free = {"encoding_sharing": "model", "encoding": EncodingConfig.parse(encoding)}
    free |= {} if form == "bert" else {"logit_scale": 1.0}
    config = dataclasses.replace(BASES[form], **free)
    names = {f"{name}.{option}" for name, options in config.encoding.parts for option in options}
    assert FORMATS[form].free == names | free.keys() - {"encoding"}
    params = noise(config)[1]
    formats.save(tmp_path, config, params, form)
    read = outputs(*formats.load(tmp_path))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-6), read, outputs(config, params)
    )
