"""Every registered model comes back the same from a folder; mistakes are one line."""

import copy
import dataclasses
import errno
import itertools
import json
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from cope_jax import models
from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError, StorageError
from cope_jax.exchange import formats, safetensors_io
from cope_jax.models.bert import BertConfig
from cope_jax.models.bert_heads import BertClassifierConfig, BertTaggerConfig
from cope_jax.models.elmo import ElmoConfig
from cope_jax.models.encoder import bert_block
from cope_jax.models.rnn_lm import RNNLMConfig
from cope_jax.models.tagger import TaggerConfig
from tests.exchange.exchange_cases import GPT2, JUNK, LLAMA, tensors, write
from tests.models.cases import config, tokens

ENCODER = {
    "vocab_size": 17,
    "max_length": 11,
    "num_layers": 2,
    "block": bert_block(8, 2, mlp_dim=12),
    "encoding": EncodingConfig.parse("learned+relative(signed=True)"),
}
DECODER = config(
    "cope(npos_max=4,gate=separate_key)+rope(base=50.0,llama3=(8.0,1.0,4.0,20.0))+learned",
    {"norm": "rms", "num_heads": 4, "num_kv_heads": 2, "attention_blocks": (4, 4, 4)},
    logit_scale=0.5,
)
CONFIGS = {
    "decoder": DECODER,
    "bert": BertConfig(**ENCODER, predictions=3),
    "bert_classifier": BertClassifierConfig(**ENCODER, num_classes=3),
    "bert_tagger": BertTaggerConfig(**ENCODER, num_classes=3, layers="mix"),
    "rnn_lm": RNNLMConfig(vocab_size=9, embed_dim=4, hidden_dim=4, bidirectional=True),
    "elmo": ElmoConfig(
        filters=((1, 3), (2, 4)), cell_dim=6, projection_dim=4, vocab_size=7, cell_clip=None
    ),
    "tagger": TaggerConfig(
        num_tags=5, vocab_size=9, word_dim=4, characters=3, recurrent=(4,), vector_shape=(2, 3)
    ),
}


def noise(choices):
    """Random parameters for a config, and the structure that they are of."""
    kind = models.MODELS.get(choices.name)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: kind(choices, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    shapes = nnx.to_pure_dict(state)
    return graphdef, jax.tree.map(
        lambda leaf: rng.normal(scale=0.5, size=leaf.shape).astype(leaf.dtype), shapes
    )


@pytest.mark.newest
@pytest.mark.parametrize("name", models.names())
def test_every_model_reloads_the_same(name, tmp_path):
    assert name in CONFIGS, f"write a small config of {name} in CONFIGS of this file"
    choices = CONFIGS[name]
    _, params = noise(choices)
    formats.save(tmp_path / "new", choices, params)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    read, loaded = formats.load(tmp_path / "new")
    assert read == choices
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    state = nnx.state(formats.build(read, loaded))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(state), params)


def test_a_decoder_gives_the_same_logits(tmp_path):
    graphdef, params = noise(DECODER)
    formats.save(tmp_path, DECODER, params)
    state = nnx.state(formats.build(*formats.load(tmp_path)))

    @jax.jit
    def logits(state):
        return nnx.merge(graphdef, state)(tokens())

    before = nnx.state(nnx.merge(graphdef, state))
    nnx.replace_by_pure_dict(before, params)
    np.testing.assert_array_equal(logits(state), logits(before))


def reconfigure(**values):
    def change(folder):
        path = folder / "config.json"
        content = json.loads(path.read_text())
        content["model"] |= values
        content["model"] = {
            name: value for name, value in content["model"].items() if value is not ...
        }
        path.write_text(json.dumps(content))

    return change


def rewrite(change):
    def spoil(folder):
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path)

    return spoil


def cast(tensors):
    return tensors | {"norm.norm.scale": tensors["norm.norm.scale"].astype(np.float16)}


MISTAKES = {
    "no config": (lambda f: (f / "config.json").unlink(), r"cannot read .*config\.json"),
    "another kind": (
        lambda f: (f / "config.json").write_text('{"model_type": "gpt_neo"}'),
        "the model_type 'gpt_neo', which is not supported: choose a model of bert, cope_jax, ",
    ),
    "another kind of an old version": (
        lambda f: (f / "config.json").write_text(
            '{"architectures": ["RobertaModel"], "hidden_size": 8}'
        ),
        "the model_type None, which is not supported",
    ),
    "a number of an old version": (
        lambda f: (f / "config.json").write_text('{"architectures": 5}'),
        "the model_type None, which is not supported",
    ),
    "a list": (
        lambda f: (f / "config.json").write_text("[]"),
        "must contain a JSON object, not a list",
    ),
    "a newer version": (
        lambda f: (f / "config.json").write_text(
            '{"model_type": "cope_jax", "version": 2, "model": {}}'
        ),
        "is not version 1",
    ),
    "several kinds": (
        lambda f: (f / "config.json").write_text('{"model_type": ["cope_jax"]}'),
        r"the model_type \['cope_jax'\], which is not supported",
    ),
    "several models": (reconfigure(name=["decoder"]), r"unknown model \['decoder'\]"),
    "another model": (reconfigure(name="decode"), "unknown model 'decode'"),
    "an unknown field": (reconfigure(widht=3), r"unknown option of .*config\.json 'widht'"),
    "a missing field": (reconfigure(vocab_size=...), r"has an incomplete config \(.*vocab_size"),
    "a wrong type": (reconfigure(num_layers="2"), "num_layers must be int, got '2'"),
    "no encoding": (
        reconfigure(encoding=[]),
        r"config\.json\.encoding must be text, such as 'cope\+rope', got \[\]",
    ),
    "an unknown encoding": (reconfigure(encoding="cop"), "unknown encoding 'cop'"),
    "another size": (
        reconfigure(vocab_size=12),
        r"embedding\.embedding in \S+ is float32\[11, 8\], but the config needs float32\[12, 8\]",
    ),
    "another encoding": (
        reconfigure(encoding="rope"),
        r"is not a parameter of the decoder in config\.json",
    ),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        "contains no model: put config.json and model",
    ),
    "damaged weights": (
        lambda f: (f / "model.safetensors").write_bytes(b"x" * 99),
        r"cannot read .*model\.safetensors",
    ),
    "a missing tensor": (
        rewrite(lambda t: {n: v for n, v in t.items() if n != "out.kernel"}),
        "out.kernel is missing",
    ),
    "a surplus tensor": (
        rewrite(lambda t: t | {"more": np.zeros(1)}),
        "'more' is not a parameter of the decoder",
    ),
    "no number": (
        rewrite(lambda t: t | {"out.kernel": t["out.kernel"] * np.float32("nan")}),
        "the parameter out.kernel is NaN or infinite in places: use intact weights",
    ),
    "an infinite number": (
        rewrite(lambda t: t | {"out.kernel": t["out.kernel"] + np.float32("inf")}),
        "the parameter out.kernel is NaN or infinite in places: use intact weights",
    ),
    "another type": (
        rewrite(cast),
        r"norm\.norm\.scale in \S+ is float16\[8\], but the config needs float32\[8\]",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    formats.save(folder, DECODER, noise(DECODER)[1])
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_clear_line(name, saved, tmp_path):
    for file, content in saved.items():
        (tmp_path / file).write_bytes(content)
    spoil, message = MISTAKES[name]
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=message) as error:
        formats.load(tmp_path)
    assert "\n" not in str(error.value)


def test_whatever_stands_in_a_config_is_known_or_one_line(saved, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(saved["model.safetensors"])
    content = json.loads(saved["config.json"])
    places = [("model", name) for name in content["model"]]
    places += [("model", "block", name) for name in content["model"]["block"]] + [
        (name,) for name in content
    ]
    for (*outer, name), junk in itertools.product(places, JUNK):
        spoilt = inner = copy.deepcopy(content)
        for key in outer:
            inner = inner[key]
        inner[name] = junk
        (tmp_path / "config.json").write_text(json.dumps(spoilt))
        try:
            formats.load(tmp_path)
        except ConfigError as error:
            assert "\n" not in str(error)


@pytest.mark.newest
@pytest.mark.parametrize("form", ["cope_jax", "gpt2", "llama", "bert"])
def test_first_and_last_token_are_kept(form, tmp_path):
    case_of = {"cope_jax": GPT2, "gpt2": GPT2, "llama": LLAMA}
    if form == "bert":
        config = BertConfig(**ENCODER | {"encoding": EncodingConfig.parse("learned")})
        params = noise(config)[1]
    else:
        config, params = formats.load(
            write(tmp_path / "theirs", case_of[form], tensors(case_of[form], np.float32))
        )
    ids = {"bos_token_id": 3, "eos_token_id": [4, 5]}
    formats.save(tmp_path / "kept", config, params, form, ids)
    assert safetensors_io.read_tokens(tmp_path / "kept") == ids
    formats.load(tmp_path / "kept")


def test_first_and_last_token_of_what_is_generated_with(tmp_path):
    def put(file, **values):
        (tmp_path / file).write_text(json.dumps(values))

    assert safetensors_io.read_tokens(tmp_path) == {}
    put("config.json", bos_token_id=None, eos_token_id=7)
    put("generation_config.json", bos_token_id=5, eos_token_id=6)
    assert safetensors_io.read_tokens(tmp_path) == {"bos_token_id": 5, "eos_token_id": 6}
    put("generation_config.json", bos_token_id=5, eos_token_id=None)
    assert safetensors_io.read_tokens(tmp_path) == {"bos_token_id": 5, "eos_token_id": 7}
    for junk in ("x", 1.5, True, [1, "x"], {}):
        put("generation_config.json", bos_token_id=junk)
        with pytest.raises(
            ConfigError,
            match=r"generation_config\.json: bos_token_id must be the number of a token",
        ):
            safetensors_io.read_tokens(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(
        ConfigError,
        match=r"generation_config\.json is damaged \(it must contain a JSON object, not a list\): fetch it again",
    ):
        safetensors_io.read_tokens(tmp_path)


def test_a_value_that_would_not_be_read_back_is_refused(tmp_path):
    choices = dataclasses.replace(
        DECODER, encoding=EncodingConfig((("rope", {"base": np.float64(50.0)}),))
    )
    with pytest.raises(
        ConfigError, match=r"the format cope_jax cannot represent this config \(.*base"
    ) as error:
        formats.save(tmp_path, choices, noise(choices)[1])
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_parameters_of_other_shapes_are_no_model():
    params = noise(DECODER)[1]
    params["embedding"]["embedding"] = params["embedding"]["embedding"][:-1]
    with pytest.raises(
        ConfigError,
        match=r"embedding\.embedding has shape \[10, 8\], but the config needs \[11, 8\]",
    ):
        formats.build(DECODER, params)


def test_what_a_format_has_no_place_for(tmp_path):
    with pytest.raises(
        ConfigError,
        match="the format gpt2 is for a decoder, but this is a rnn_lm: choose the format",
    ):
        formats.save(tmp_path, CONFIGS["rnn_lm"], {}, "gpt2")
    with pytest.raises(ConfigError, match="unknown format 'gpt3': did you mean 'gpt2'"):
        formats.save(tmp_path, DECODER, {}, "gpt3")
    with pytest.raises(
        ConfigError, match=r"cannot represent encoding='cope\+rope\+learned', .*block.norm='rms'"
    ):
        formats.save(tmp_path, DECODER, {}, "gpt2")
    with pytest.raises(ConfigError, match=r"\S+ is missing from the parameters"):
        formats.save(tmp_path, DECODER, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fails", ["config.json", "model.safetensors"])
def test_a_model_is_replaced_as_a_whole_or_not_at_all(fails, tmp_path, monkeypatch):
    other = dataclasses.replace(DECODER, encoding=EncodingConfig.parse("alibi"))
    formats.save(tmp_path, DECODER, noise(DECODER)[1])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="No space left"):
        failure = OSError(errno.ENOSPC, "cannot write")
        patch.setattr(Path, "write_text", mock.Mock(side_effect=failure))
        formats.save(tmp_path, other, noise(other)[1])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    replace = Path.replace

    def full(path, target):
        if target.name == fails:
            raise OSError(errno.ENOSPC, "cannot write")
        replace(path, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StorageError, match=fails):
        formats.save(tmp_path, other, noise(other)[1])
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    if fails == "model.safetensors":
        assert left == before
        return
    assert left.keys() == {"model.safetensors"}
    with pytest.raises(ConfigError, match=r"config\.json \(No such file"):
        formats.load(tmp_path)


def test_weights_that_are_not_finite_are_not_written(tmp_path):
    params = noise(DECODER)[1]
    params["embedding"]["embedding"][2, 1] = np.nan
    for form in (formats.OWN, "llama"):
        with pytest.raises(
            ConfigError, match=r"^cannot write .*: the parameter embedding.embedding"
        ):
            formats.save(tmp_path / "new", DECODER, params, form)
    assert not (tmp_path / "new").exists()


def test_saving_checks_sizes(tmp_path):
    choices, params = formats.load(write(tmp_path, GPT2, tensors(GPT2)))
    params["embedding"]["embedding"] = np.zeros((3, 8))
    with pytest.raises(
        ConfigError, match=r"embedding/embedding has shape \[3, 8\], but the config needs \[13, 8\]"
    ):
        formats.save(tmp_path / "new", choices, params, "gpt2")
