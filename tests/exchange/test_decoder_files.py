"""The files of GPT-2 and Llama: content against a NumPy oracle, what is written, and mistakes."""

import dataclasses
import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from cope_jax.errors import ConfigError
from cope_jax.exchange import formats, safetensors_io
from cope_jax.models.decoder import Decoder
from tests.exchange.exchange_cases import (
    CASES,
    GPT2,
    LENGTH,
    LLAMA,
    VOCAB,
    shard,
    tensors,
    tokens,
    write,
)
from tests.models.cases import config
from tests.oracle import pretrained

pytestmark = pytest.mark.xdist_group("decoder_files")
ORACLES = {"gpt2": pretrained.gpt2, "llama": pretrained.llama}


def decoder(config, params, dtype="float64"):
    """Structure and state of a decoder with these parameters."""
    config = dataclasses.replace(
        config, block=dataclasses.replace(config.block, compute_dtype=dtype)
    )
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, jax.tree.map(lambda array: np.asarray(array, dtype), params))
    return graphdef, state


def logits(config, params):
    graphdef, state = decoder(config, params)
    return np.asarray(jax.jit(lambda state: nnx.merge(graphdef, state)(tokens()))(state))


@pytest.mark.newest
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_oracle(name, tmp_path, x64):
    case, arrays = CASES[name], tensors(CASES[name])
    actual = logits(*formats.load(write(tmp_path, case, arrays)))
    exact = np.stack([ORACLES[case["model_type"]](row, arrays, case) for row in tokens()])
    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, exact, rtol=0, atol=1e-10 * np.abs(exact).max())


@pytest.mark.parametrize("name", CASES)
def test_what_is_saved_is_the_same_files(name, tmp_path):
    case, arrays = CASES[name], tensors(CASES[name], np.float32)
    config, params = formats.load(write(tmp_path / "theirs", case, arrays))
    assert {array.dtype for array in jax.tree.leaves(params)} == {np.dtype("float32")}
    ids = safetensors_io.read_tokens(tmp_path / "theirs")
    formats.save(tmp_path / "ours", config, params, case["model_type"], ids)
    again = load_file(tmp_path / "ours" / "model.safetensors")
    assert again.keys() == arrays.keys()
    for tensor, array in arrays.items():
        np.testing.assert_array_equal(again[tensor], array, err_msg=tensor)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written | case == written | {
        name: value for name, value in case.items() if value is None
    }
    assert formats.load(tmp_path / "ours")[0] == config


def test_without_tokens_of_its_own_a_model_has_none_of_the_defaults_of_transformers(tmp_path):
    config, params = formats.load(write(tmp_path, GPT2, tensors(GPT2)))
    formats.save(tmp_path / "ours", config, params, "gpt2")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (None, None)


def test_several_files_with_an_index(tmp_path):
    config, params = formats.load(write(tmp_path / "one", LLAMA, tensors(LLAMA)))
    folder = shard(write(tmp_path / "several", LLAMA, tensors(LLAMA)))
    again, loaded = formats.load(folder)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.parametrize(
    "case, buffer",
    [(GPT2, "h.0.attn.bias"), (LLAMA, "layers.0.self_attn.rotary_emb.inv_freq")],
    ids=["gpt2", "llama"],
)
def test_names_without_prefix_buffers_tied_tensors_and_half_precision(case, buffer, tmp_path):
    """As published files have them."""
    case = case | {"tie_word_embeddings": True}
    arrays = tensors(case, ml_dtypes.bfloat16)
    config, params = formats.load(write(tmp_path / "whole", case, arrays))
    bare = {re.sub(r"^(transformer|model)\.", "", name): array for name, array in arrays.items()}
    words = next(
        array for name, array in bare.items() if name in ("wte.weight", "embed_tokens.weight")
    )
    folder = write(
        tmp_path / "bare",
        case,
        bare | {buffer: np.ones((1, 1, 3, 3), bool), "lm_head.weight": words},
    )
    again, loaded = formats.load(folder)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert {array.dtype for array in jax.tree.leaves(loaded)} == {np.dtype("float32")}


TOKENS = {"vocab_size": VOCAB, "max_length": LENGTH}
ROPE_BLOCK = {"norm": "rms", "activation": "swiglu", "use_bias": False}


@pytest.mark.parametrize(
    "architecture, choices",
    [
        ("gpt2", config("learned", tie_embeddings=True, **TOKENS)),
        (
            "gpt2",
            config("learned(max_length=20)", {"activation": "gelu_erf"}, logit_scale=2.0, **TOKENS),
        ),
        ("llama", config("rope", ROPE_BLOCK, tie_embeddings=True, **TOKENS)),
    ],
    ids=["gpt2", "gpt2 of another scale", "llama"],
)
def test_a_scale_of_the_logits_goes_into_the_last_norm(architecture, choices, tmp_path, x64):
    """The function is the same, though the formats have no such scale."""
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Decoder(choices, rngs=nnx.Rngs(0)))))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), shapes)
    formats.save(tmp_path, choices, params, architecture)
    read, loaded = formats.load(tmp_path)
    assert read.logit_scale == 1 != choices.logit_scale
    np.testing.assert_allclose(
        logits(read, loaded), logits(choices, params), rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize(
    "architecture, choices, message",
    [
        ("gpt2", config("learned+cope"), r"gpt2 cannot represent encoding='learned\+cope':"),
        ("llama", config("rope", ROPE_BLOCK, tape=3), r"llama cannot represent tape=3:"),
        (
            "gpt2",
            config("learned", {"use_bias": False, "num_kv_heads": 1}),
            r"block\.num_kv_heads=1, block\.use_bias=False:",
        ),
        ("gpt2", config("learned", {"head_dim": 3}), r"block\.head_dim=3"),
        ("gpt2", config("learned", {"norm_position": "post"}), r"block\.norm_position='post'"),
        (
            "llama",
            config("rope(fraction=0.5)", ROPE_BLOCK),
            r"llama cannot represent rope\.fraction=0\.5:",
        ),
        (
            "llama",
            config("none"),
            r"encoding='none', block\.activation='gelu', block\.norm='layer':",
        ),
        (
            "llama",
            config("rope", ROPE_BLOCK | {"num_heads": 3, "head_dim": 4}),
            "not a multiple of num_attention_heads=3",
        ),
    ],
)
def test_what_the_formats_cannot_say(architecture, choices, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        formats.save(tmp_path, choices, {}, architecture)
    assert not list(tmp_path.iterdir())
