"""Damaged, incomplete and foreign files of GPT-2 and Llama: one clear line for each mistake."""

import copy
import itertools
import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cope_jax.errors import ConfigError
from cope_jax.exchange import formats
from tests.exchange.exchange_cases import (
    GPT2,
    JUNK,
    LLAMA,
    SCALING,
    shard,
    tensors,
    write,
)

pytestmark = pytest.mark.xdist_group("decoder_mistakes")


def reconfigure(**values):
    def change(folder):
        path = folder / "config.json"
        content = json.loads(path.read_text()) | values
        path.write_text(
            json.dumps({name: value for name, value in content.items() if value is not ...})
        )

    return change


def rewrite(**changes):
    """Replaces tensors whose names end so; ... leaves them out."""

    def change(folder):
        arrays = load_file(folder / "model.safetensors")
        for suffix, array in changes.items():
            for name in [name for name in arrays if name.endswith(suffix)] or [suffix]:
                arrays[name] = array
        kept = {name: array for name, array in arrays.items() if array is not ...}
        save_file(kept, folder / "model.safetensors")

    return change


def unshard(folder):
    (shard(folder) / "model-1.safetensors").unlink()


def doubled(folder):
    save_file(
        {**load_file(folder / "model.safetensors"), "ln_f.weight": np.ones(8)},
        folder / "model.safetensors",
    )


def unlisted(folder):
    path = shard(folder) / "model-0.safetensors"
    save_file({**load_file(path), "more": np.zeros(1)}, path)


def misplaced(folder):
    path = shard(folder) / "model.safetensors.index.json"
    path.write_text(
        json.dumps(
            {
                "weight_map": json.loads(path.read_text())["weight_map"]
                | {"x": "model-0.safetensors"}
            }
        )
    )


def placed(file):
    def change(folder):
        path = shard(folder) / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": {"x": file}}))

    return change


def pipe(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


MISTAKES = {
    "no config": (LLAMA, lambda f: (f / "config.json").unlink(), r"cannot read .*config\.json"),
    "another architecture": (
        LLAMA,
        reconfigure(model_type="falcon"),
        "the model_type 'falcon', which is not supported",
    ),
    "a size is missing": (GPT2, reconfigure(n_embd=...), r"config\.json lacks 'n_embd'"),
    "a size of text": (
        GPT2,
        reconfigure(n_layer="2"),
        r"config\.json\.n_layer must be int, got '2' of type str",
    ),
    "no size": (
        GPT2,
        reconfigure(vocab_size=None),
        r"\.vocab_size must be int, got None of type NoneType",
    ),
    "half a layer": (
        GPT2,
        reconfigure(n_layer=1.5),
        r"\.n_layer must be int, got 1\.5 of type float",
    ),
    "a size with a point": (
        LLAMA,
        reconfigure(vocab_size=300.0),
        r"\.vocab_size must be int, got 300\.0 of type float",
    ),
    "several architectures": (
        GPT2,
        reconfigure(model_type=["gpt2"]),
        r"the model_type \['gpt2'\], which",
    ),
    "a base of text": (
        LLAMA,
        reconfigure(rope_theta="x"),
        r"\.rope_theta must be float, got 'x' of type str",
    ),
    "a later base of text": (
        LLAMA,
        reconfigure(rope_theta=..., rope_parameters={"rope_theta": "x"}),
        r"\.rope_theta must be",
    ),
    "a stretching of text": (
        LLAMA,
        reconfigure(rope_scaling="llama3"),
        r"\.rope_scaling must be dict or None, got",
    ),
    "a factor of text": (
        LLAMA,
        reconfigure(rope_scaling=SCALING | {"factor": "x"}),
        r"\.factor must be float, got 'x'",
    ),
    "half the rotation": (
        LLAMA,
        reconfigure(partial_rotary_factor=0.5),
        r"partial_rotary_factor=0\.5 is not supported; choose a model with 1\.0",
    ),
    "half the later rotation": (
        LLAMA,
        reconfigure(rope_parameters={"partial_rotary_factor": 0.5}),
        r"partial_rotary_factor=0\.5 is not supported",
    ),
    "quantised, by config": (
        LLAMA,
        reconfigure(quantization_config={"bits": 4}),
        r"quantization_config=\{'bits': 4\} is not supported; choose a model with None",
    ),
    "another vocabulary": (
        GPT2,
        reconfigure(vocab_size=14),
        r"wte.weight has shape \[13, 8\], but config.json needs \[14, 8\]",
    ),
    "fewer heads": (
        LLAMA,
        reconfigure(num_key_value_heads=1),
        r"k_proj.weight has shape \[8, 8\], .* \[4, 8\]",
    ),
    "another depth": (LLAMA, reconfigure(num_hidden_layers=3), r"lacks model\.layers\.2\."),
    "fewer layers": (
        GPT2,
        reconfigure(n_layer=1),
        r"'transformer\.h\.1\.\S+' is not a tensor of this model \(12 such",
    ),
    "an activation": (
        GPT2,
        reconfigure(activation_function="silu"),
        "activation_function='silu' is not supported",
    ),
    "other scales": (
        GPT2,
        reconfigure(scale_attn_by_inverse_layer_idx=True),
        "scale_attn_by_inverse_layer_idx=True is",
    ),
    "half the biases": (
        LLAMA,
        reconfigure(attention_bias=True),
        "attention_bias and mlp_bias differ",
    ),
    "another stretching": (
        LLAMA,
        reconfigure(rope_scaling={"type": "dynamic", "factor": 2.0}),
        "rope_type='dynamic' is not supported; choose a model with 'default' or 'linear' or 'yarn' or 'llama3'",
    ),
    "a value of another stretching": (
        LLAMA,
        reconfigure(rope_scaling=SCALING | {"attention_factor": 2.0}),
        "unknown value of the rope_type 'llama3' in .*config.json 'attention_factor'",
    ),
    "two stretchings": (
        LLAMA,
        reconfigure(
            rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_theta": 5e5}
        ),
        "rope_scaling and rope_parameters differ: remove the wrong one",
    ),
    "two bases": (
        LLAMA,
        reconfigure(rope_parameters={"rope_theta": 5e5}),
        r"has rope_theta=100\.0 and rope_theta=500000\.0: remove the wrong one",
    ),
    "a negative base": (
        LLAMA,
        reconfigure(rope_theta=-1.0),
        r"config\.json: rope\.base must be at least 2, got -1\.0",
    ),
    "a size in a stretching": (
        LLAMA,
        reconfigure(rope_parameters={"hidden_size": 16}),
        "unknown value of the rope_type 'default' in .*config.json 'hidden_size'",
    ),
    "a width of no heads": (
        LLAMA,
        reconfigure(num_attention_heads=3),
        "hidden_size=8 is not a multiple of num_attention_heads=3",
    ),
    "another name of the heads": (
        GPT2,
        reconfigure(num_attention_heads=2),
        "num_attention_heads=2 is not supported",
    ),
    "only another name": (
        GPT2,
        reconfigure(n_embd=..., hidden_size=8),
        r"config\.json lacks 'n_embd'",
    ),
    "code of its own": (
        LLAMA,
        reconfigure(auto_map={"AutoModel": "x.X"}),
        "auto_map=.* is not supported",
    ),
    "a window": (
        LLAMA,
        reconfigure(sliding_window=4),
        "sliding_window=4 is not supported; choose a model with None",
    ),
    "half a stretching": (
        LLAMA,
        reconfigure(rope_scaling={"rope_type": "llama3"}),
        "lacks 'factor'",
    ),
    "no weights": (
        GPT2,
        lambda f: (f / "model.safetensors").unlink(),
        r"contains no model: put config\.json and model",
    ),
    "damaged weights": (
        GPT2,
        lambda f: (f / "model.safetensors").write_bytes(b"x" * 99),
        r"cannot read .*model\.safe",
    ),
    "cut weights": (
        GPT2,
        lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:-9]
        ),
        "cannot",
    ),
    "a missing tensor": (
        GPT2,
        rewrite(**{"1.ln_1.bias": ...}),
        r"lacks transformer\.h\.1\.ln_1\.bias",
    ),
    "a surplus tensor": (
        GPT2,
        rewrite(score=np.zeros(2)),
        "'transformer.score' is not a tensor of this model",
    ),
    "quantised": (
        LLAMA,
        rewrite(**{"0.mlp.up_proj.weight": np.zeros((12, 8), np.int8)}),
        "has type int8, but quantised",
    ),
    "untied": (
        GPT2,
        rewrite(**{"lm_head.weight": np.zeros((13, 8))}),
        r"lm_head\.weight differs from embedding/embedding",
    ),
    "an adapter": (
        LLAMA,
        lambda f: (f / "adapter_config.json").write_text("{}"),
        r"has an adapter \(adapter_config\.json\): merge it into the weights",
    ),
    "numbers of 8 bits": (
        LLAMA,
        rewrite(**{"0.mlp.up_proj.weight": np.zeros((12, 8), ml_dtypes.float8_e4m3fn)}),
        r"cannot read .*model\.safetensors \(.*float8_e4m3fn",
    ),
    "two names of a tensor": (
        GPT2,
        doubled,
        r"has the tensor 'transformer\.ln_f\.weight' under two names",
    ),
    "no size of heads": (
        LLAMA,
        reconfigure(num_attention_heads=0),
        r"config\.json: block\.num_heads must be at least 1",
    ),
    "very many heads": (
        LLAMA,
        reconfigure(num_key_value_heads=None, num_attention_heads=8 << 20, hidden_size=8 << 20),
        r"config\.json: block\.model_dim must be at most 1,048,576, got 8,388,608",
    ),
    "a tensor outside of the index": (
        LLAMA,
        unlisted,
        r"model-0\.safetensors has more, which .* does not list",
    ),
    "a file is missing": (LLAMA, unshard, r"cannot read .*model-1\.safetensors"),
    "a tensor is elsewhere": (LLAMA, misplaced, r"model-0\.safetensors lacks x, which"),
    "a file outside": (
        LLAMA,
        placed("../model.safetensors"),
        "has no weight_map from tensors to files in the same ",
    ),
    "the folder above": (LLAMA, placed(".."), "'..' cannot name a file in"),
    "a path of Windows": (LLAMA, placed("..\\model.safetensors"), "cannot name a file in"),
    "no text": (LLAMA, placed(3), "has no weight_map"),
    "a pipe": (LLAMA, pipe, "it is no regular file"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_clear_line(name, tmp_path):
    case, spoil, message = MISTAKES[name]
    spoil(write(tmp_path, case, tensors(case)))
    with pytest.raises(ConfigError, match=message) as error:
        formats.load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "case",
    [GPT2, LLAMA | {"rope_scaling": SCALING, "attention_bias": False}],
    ids=["gpt2", "llama"],
)
def test_whatever_stands_in_a_config_is_known_or_one_line(case, tmp_path):
    folder = write(tmp_path, case, tensors(case))
    places = [(name,) for name in case] + [
        ("rope_scaling", name) for name in case.get("rope_scaling", ())
    ]
    for (*outer, name), junk in itertools.product(places, JUNK):
        spoilt = copy.deepcopy(case)
        (spoilt[outer[0]] if outer else spoilt)[name] = junk
        (folder / "config.json").write_text(json.dumps(spoilt))
        try:
            formats.load(folder)
        except ConfigError as error:
            assert "\n" not in str(error)
