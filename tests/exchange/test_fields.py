"""Fields of Hugging Face's files: docs/exchange.md, the code and transformers agree on them."""

import collections
import copy
import dataclasses
import json
import random
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from cope_jax.encodings import rope
from cope_jax.errors import ConfigError
from cope_jax.exchange import (
    bert_files,
    encoder_files,
    gpt2,
    gpt_neox,
    layered,
    llama,
    llama_relatives,
    opt,
    tensor_map,
)
from cope_jax.generation.decoding import generate
from cope_jax.runs.load import load
from cope_jax.tokenizers.byte_level import Bytes
from tests.exchange.exchange_cases import GPT2, LLAMA, tensors, write

torch = pytest.importorskip("torch", reason="PyTorch is an extra of the tests")
transformers = pytest.importorskip("transformers", reason="transformers is an extra of the tests")
pytestmark = pytest.mark.filterwarnings("ignore")

PLAIN = LLAMA | {"bos_token_id": 1, "eos_token_id": 2}
BERT = {
    "model_type": "bert",
    "vocab_size": 13,
    "max_position_embeddings": 9,
    "num_hidden_layers": 1,
    "hidden_size": 8,
}
BERT |= {
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
}
LONGER = BERT | {"max_position_embeddings": 12, "pad_token_id": 1}
NARROW = {name: PLAIN[name] for name in PLAIN if "rope" not in name} | {"num_hidden_layers": 1}
BASES = {
    "llama": PLAIN,
    "gpt2": GPT2 | {"bos_token_id": 1, "eos_token_id": 2},
    "bert": BERT,
    "roberta": LONGER,
    "mpnet": LONGER,
    "electra": BERT | {"embedding_size": 6},
    "distilbert": {"vocab_size": 13, "max_position_embeddings": 9, "n_layers": 1, "n_heads": 2}
    | {"dim": 8, "hidden_dim": 12, "activation": "gelu"},
    "modernbert": BERT | {"pad_token_id": 0, "num_hidden_layers": 2, "local_attention": 4},
    "qwen2": NARROW,
    "qwen3": NARROW,
    "mistral": NARROW | {"sliding_window": 3},
    "gemma2": NARROW | {"pad_token_id": 0, "sliding_window": 3},
    "gemma3_text": NARROW | {"pad_token_id": 0, "sliding_window": 3},
    "gpt_neox": NARROW
    | {"layer_norm_eps": 1e-5, "hidden_act": "gelu", "rotary_pct": 1.0, "hidden_size": 16},
    "opt": NARROW | {"ffn_dim": 12, "word_embed_proj_dim": 8, "pad_token_id": 0, "dropout": 0.0},
}
FORMATS = {
    form.kind: form
    for form in (
        *(llama.LLAMA, gpt2.GPT2, bert_files.BERT),
        *(form for form in encoder_files.ENCODERS if form.kind != "xlm-roberta"),
        *(layered.MODERNBERT, *llama_relatives.RELATIVES, layered.GEMMA2, layered.GEMMA3),
        *(gpt_neox.GPT_NEOX, opt.OPT),
    )
}
BASES = {kind: base | {"model_type": kind} for kind, base in BASES.items()}
ROPE = {*llama._OUTSIDE, "rope_scaling", "rope_parameters"}
BOTH = {"layer_types", "rope_parameters"}
FURTHER = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral"), ROPE),
    "gpt_neox": ROPE | gpt_neox.NAMES.keys(),
    "gemma2": ROPE | {"layer_types", "query_pre_attn_scalar"},
    "gemma3_text": BOTH
    | {"query_pre_attn_scalar", "sliding_window_pattern", "rope_scaling"}
    | {"rope_theta", "rope_local_base_freq"},
    "modernbert": BOTH
    | {"global_attn_every_n_layers", "local_attention"}
    | {"global_rope_theta", "local_rope_theta"},
    "roberta": {"pad_token_id"},
}
"""Fields that are read besides those of `Format.values`."""
ALIASES = {
    "gpt2": dict.fromkeys(gpt2._ALIASES, ("",)),
    "distilbert": dict.fromkeys(encoder_files.ALIASES, ("",)),
    "opt": {"word_embed_proj_dim": ("",)},
    **{kind: {"layer_types": (None,)} for kind in ("qwen2", "qwen3")},
}
"""Further fields that are refused unless they have the value that others imply."""
BEYOND = {
    "num_labels",
    "output_attentions",
    "torch_dtype",
    "per_layer_config",
    "quantization_config",
}
"""Names that transformers reads from config.json besides the fields of its classes."""


def table(kind):
    """The rows of the table for an architecture: how a field is treated → the fields."""
    text = (Path(__file__).parents[2] / "docs" / "exchange.md").read_text(encoding="utf-8")
    section = text.split("## Fields of Hugging Face's files")[1].split("| other file |")[0]
    fields = collections.defaultdict(set)
    for kinds, names, treatment in re.findall(
        r"^\| ([a-z0-9_, -]+) \| (`.*?) \| (.*) \|$", section, re.MULTILINE
    ):
        if kinds == "all" or kind in kinds.split(", "):
            fields[re.match("[a-z]+", treatment)[0]] |= set(re.findall("`([a-z0-9_]+)`", names))
    return fields


def required(kind):
    return {
        **tensor_map.REQUIRED,
        **FORMATS[kind].required,
        **ALIASES.get(kind, {}),
    }


@pytest.mark.parametrize("kind", FORMATS)
def test_the_table_is_that_of_the_code_and_of_transformers(kind):
    rows = table(kind)
    config = type(transformers.AutoConfig.for_model(kind))
    theirs = (
        {field.name for field in dataclasses.fields(config)} | config.attribute_map.keys() | BEYOND
    )
    assert theirs - set().union(*rows.values()) == set(), (
        "these fields of transformers are not in the table"
    )
    assert rows["refused"] == required(kind).keys()
    read = FORMATS[kind].values.keys() - rows["refused"]
    further = FURTHER.get(kind, set())
    assert rows["read"] == read | further | {"model_type", "bos_token_id", "eos_token_id"}
    assert not rows["ignored"] & (rows["read"] | rows["refused"])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_field_with_a_value_that_changes_the_numbers_is_refused(kind):
    for name in required(kind):
        values = [None, {"x": 1}, "x", 10**6] + [
            not choice for choice in required(kind)[name] if choice in (True, False)
        ]
        for value in (value for value in values if value not in required(kind)[name]):
            with pytest.raises(ConfigError, match=name):
                FORMATS[kind]._read(BASES[kind] | {name: value}, "config.json")


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("gemma3_text", {"rope_theta": -1.0}),
        ("gemma3_text", {"rope_local_base_freq": 0.0}),
        ("modernbert", {"global_rope_theta": 1.0}),
        ("modernbert", {"local_rope_theta": 0.0}),
        *(
            ("gemma3_text", {name: value})
            for name in ("rope_parameters", "layer_types", "rope_scaling")
            for value in (0, "", False, [])
        ),
    ],
)
def test_a_base_that_is_too_small_and_what_is_no_dict_are_named(kind, values):
    (name,) = values
    with pytest.raises(ConfigError, match=f"^config.json: {name} must "):
        FORMATS[kind]._read(BASES[kind] | values, "config.json")


def theirs(kind, values, state=None):
    """(The output of transformers' model for a config, its parameters)."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**copy.deepcopy(values))
    model = getattr(transformers, FORMATS[kind].architecture)(config).eval()
    if state is not None:
        model.load_state_dict(state)
    with torch.no_grad():
        return model(torch.arange(8)[None], return_dict=True)[0].numpy(), model.state_dict()


@pytest.mark.parametrize("kind", FORMATS)
def test_an_ignored_field_changes_nothing_here_or_in_transformers(kind):
    base, config = BASES[kind], FORMATS[kind]._read(BASES[kind], "config.json")
    expected, state = theirs(kind, base)
    default = transformers.AutoConfig.for_model(kind)
    other = {
        bool: lambda value: not value,
        int: lambda value: value + 3,
        float: lambda value: value / 2 + 0.1,
    }
    given = {
        "architectures": ["X"],
        "problem_type": "regression",
        "transformers_version": "1",
        "id2label": {"0": "x"},
    }
    given |= {
        "chunk_size_feed_forward": 4,
        "label2id": {"x": 0},
        "dtype": "float32",
        "torch_dtype": "float32",
        "summary_activation": "tanh",
    }
    given |= {
        "classifier_dropout": 0.5,
        "pad_token_id": 3,
        "num_labels": 5,
        "summary_type": "mean",
        "pretraining_tp": 2,
    }
    given |= {"classifier_pooling": "mean", "sliding_window": 3, "use_cache": False}
    for name in table(kind)["ignored"] - {"return_dict"}:
        value = (
            given[name]
            if name in given
            else other[type(getattr(default, name))](getattr(default, name))
        )
        assert FORMATS[kind]._read(base | {name: value}, "config.json") == config
        again = theirs(kind, base | {name: value}, state)[0]
        np.testing.assert_allclose(again, expected, rtol=1e-6, err_msg=name)


def scalings(draw):
    """A random way to write RoPE's frequencies into config.json."""
    kind = draw.choice(["linear", "yarn", "llama3", "dynamic", "default"])
    scaling = {draw.choice(["type", "rope_type"]): kind}
    scaling |= {"factor": draw.choice([1.0, 2, 4.5])} if kind != "default" else {}
    if kind in ("yarn", "llama3"):
        scaling["original_max_position_embeddings"] = draw.choice([16, 40])
    if kind == "llama3":
        scaling |= {
            "low_freq_factor": draw.choice([1.0, 2]),
            "high_freq_factor": draw.choice([4.0, 3]),
        }
    if kind == "yarn":
        extra = {
            "beta_fast": 16,
            "beta_slow": 2.0,
            "attention_factor": 1.5,
            "mscale": 2.0,
            "truncate": draw.random() < 0.5,
        }
        scaling |= {name: value for name, value in extra.items() if draw.random() < 0.25}
    values = {} if draw.random() < 0.3 else {"rope_theta": draw.choice([100.0, 5000])}
    values[draw.choice(["rope_scaling", "rope_parameters"])] = scaling
    if draw.random() < 0.4:
        scaling["rope_theta"] = draw.choice([100.0, 700.0])
    if draw.random() < 0.1:
        values |= {"rope_scaling": {"type": "linear", "factor": 3.0}}
    return values


def test_frequencies_are_those_of_transformers_or_refused():
    draw, outcomes = random.Random(0), collections.Counter()
    base = {name: value for name, value in PLAIN.items() if name != "rope_theta"} | {"head_dim": 16}
    for _ in range(200):
        values = base | scalings(draw)
        try:
            config = llama.LLAMA._read(values, "config.json")
        except ConfigError:
            outcomes["refused"] += 1
            continue
        options = config.encoding.options()["rope"]
        module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
            transformers.LlamaConfig(**copy.deepcopy(values))
        )
        frequencies = rope._frequencies(options, 16)
        np.testing.assert_allclose(
            frequencies, module.inv_freq.numpy(), rtol=2e-6, err_msg=str(values)
        )
        np.testing.assert_allclose(rope._magnitude(options), module.attention_scaling, rtol=1e-6)
        outcomes[module.rope_type] += 1
    assert min(outcomes[kind] for kind in ("refused", "linear", "yarn", "llama3", "default")) >= 10
    assert not outcomes["dynamic"]


def test_generation_ends_where_that_of_transformers_does(tmp_path):
    """With one or several end tokens, in either file or in both."""
    size, prompts = len(Bytes()), [[5, 6], [7, 8]]
    config = PLAIN | {"vocab_size": size, "num_hidden_layers": 1}
    arrays = {
        name: array for name, array in tensors(config, np.float32).items() if "layers.1" not in name
    }
    drawn = np.random.default_rng(0).normal(size=(2, size, 8)).astype(np.float32)
    arrays |= dict(zip(("model.embed_tokens.weight", "lm_head.weight"), drawn, strict=True))
    write(tmp_path, config, arrays)
    (tmp_path / "tokenizer.json").write_text(Bytes().text)
    model, key = load(tmp_path).model(), jax.random.key(0)
    whole = np.stack(generate(model, prompts, 12, key=key, temperature=0.0, stop_token=[256, 256]))
    first, second = int(whole[0, 3]), int(whole[1, 6])
    for ends, beside in [
        (first, None),
        ([second, first], None),
        (first, [second, 256]),
        ([first, 256], [first, second]),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": ends}))
        (tmp_path / "generation_config.json").unlink(missing_ok=True)
        if beside is not None:
            (tmp_path / "generation_config.json").write_text(
                json.dumps({"eos_token_id": beside, "pad_token_id": 0})
            )
        stops = load(tmp_path).codec.ends
        generated = generate(
            model, prompts, 12, key=key, temperature=0.0, stop_token=[*stops, stops[0]][:2]
        )
        other = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        for prompt, row in zip(prompts, generated, strict=True):
            expected = other.generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0
            )
            assert row.tolist() == expected[0, len(prompt) :].tolist(), (ends, beside)


@pytest.mark.parametrize("period, full", [(1, (0, 1, 2, 3)), (2, (1, 3)), (5, ())])
def test_a_period_says_which_layers_see_all_tokens(period, full):
    name, fields = "sliding_window_pattern", {"num_layers": 4}
    assert layered._layers(fields, {name: period}, "config.json", name, 6, last=True) == full
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
        layered._layers(fields, {name: 0}, "config.json", name, 6, last=True)
