"""The official format: AllenNLP's published fixture, there and back, and files that do not fit."""

import errno
import json
import os
from pathlib import Path
from unittest import mock

import h5py
import jax
import numpy as np
import pytest
from flax import nnx

from cope_jax.errors import ConfigError, StorageError
from cope_jax.exchange.elmo_files import load_elmo, save_elmo
from cope_jax.models.elmo import Elmo, ElmoConfig
from cope_jax.tokenizers.characters import batch_sentences, strip_marks
from tests.models.noisy import noisy, numbers
from tests.oracle import elmo as oracle

CONFIG = ElmoConfig(
    dropout=0.3,  # not in the files, like other options of training
    character_dim=2,
    filters=((1, 2), (2, 3)),
    num_highways=1,
    max_characters=7,
    cell_dim=3,
    projection_dim=2,
    cell_clip=0.5,
    projection_clip=0.4,
    vocab_size=5,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elmo")
    model = noisy(lambda: Elmo(CONFIG, rngs=nnx.Rngs(0)))
    save_elmo(model, folder / "options.json", folder / "weights.hdf5")
    return model, folder / "options.json", folder / "weights.hdf5"


def test_what_was_saved_is_loaded(files):
    model, options, weights = files
    loaded = load_elmo(options, weights)
    expected = {
        name: value for name, value in numbers(model).items() if not name.startswith("softmax")
    }
    # Of the padding word: of no use, and not in the file.
    expected["characters/embedding_KE"][0] = 0
    assert numbers(loaded).keys() == expected.keys()
    for name, value in numbers(loaded).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    for name in (
        "filters",
        "num_highways",
        "cell_clip",
        "projection_clip",
        "residual",
        "max_characters",
        "num_layers",
    ):
        assert getattr(loaded.config, name) == getattr(CONFIG, name)


def test_the_file_is_that_of_the_oracle(files):
    """The oracle's vectors, from datasets by their official names, shapes and order of gates."""
    model, _, weights = files
    with h5py.File(weights) as file:
        value = {}
        file.visititems(
            lambda name, item: (
                value.update({name: item[...]}) if isinstance(item, h5py.Dataset) else None
            )
        )
    table = np.concatenate([np.zeros((1, 2)), value["char_embed"]])
    filters = [(value[f"CNN/W_cnn_{k}"][0], value[f"CNN/b_cnn_{k}"]) for k in range(2)]
    highway = tuple(
        value[f"CNN_high_0/{name}"] for name in ("W_carry", "b_carry", "W_transform", "b_transform")
    )
    projection = value["CNN_proj/W_proj"], value["CNN_proj/b_proj"]

    def layer(direction, number):
        cell = f"RNN_{direction}/RNN/MultiRNNCell/Cell{number}/LSTMCell"
        order = np.arange(12).reshape(4, 3)[[0, 2, 1, 3]].ravel()  # i, j, f, o there
        w, b = value[f"{cell}/W_0"][:, order], value[f"{cell}/B"][order]
        return w[:2], w[2:], b, value[f"{cell}/W_P_0"]

    rows, lengths = batch_sentences([["ab", "c"]], 7)
    x = np.array([oracle.word(word, table, filters, [highway], projection) for word in rows[0]])
    stacks = [[layer(direction, number) for number in range(2)] for direction in range(2)]
    zeros = [[(np.zeros(3), np.zeros(2))] * 2] * 2
    expected, _ = oracle.bilm(x, *stacks, zeros, (0.5, 0.4))
    layers, _ = jax.jit(lambda rows: model.layers(rows, lengths))(rows)
    np.testing.assert_allclose(layers[:, 0], expected, atol=1e-6)


def test_allennlps_fixture():
    """Ten batches of three sentences with carried states: both directions of the top layer."""
    folder = Path(os.environ.get("COPE_JAX_DATA", "")) / "fixtures" / "elmo-allennlp"
    if "COPE_JAX_DATA" not in os.environ or not folder.is_dir():
        pytest.skip(
            "AllenNLP's ELMo fixture is not in fixtures/elmo-allennlp of the folder that COPE_JAX_DATA names"
        )
    model = load_elmo(folder / "options.json", folder / "lm_weights.hdf5")
    sentences = json.loads((folder / "sentences.json").read_text())
    run = jax.jit(lambda rows, lengths, carry: model.layers(rows, lengths, carry))
    carry = model.initial_carry(3)
    for number in range(10):
        rows, lengths = batch_sentences(
            [texts[number].split() for texts in sentences], 50, multiple=60
        )
        layers, carry = run(rows, lengths, carry)
        for row, vectors in enumerate(strip_marks(np.asarray(layers), lengths)):
            with h5py.File(folder / f"lm_embeddings_{row}.hdf5") as file:
                expected = np.concatenate(file[str(number)][...], axis=-1)
            # Both are float32 sums over 62 steps; AllenNLP's own test allows 1e-6.
            np.testing.assert_allclose(vectors[-1], expected, rtol=0, atol=2e-6)


def changed(path, target, *names, value=None):
    """A copy of the options with another value, or without it."""
    options = json.loads(path.read_text())
    section = options
    for name in names[:-1]:
        section = section[name]
    if value is None:
        del section[names[-1]]
    else:
        section[names[-1]] = value
    target.write_text(json.dumps(options))
    return target


@pytest.mark.parametrize(
    ("names", "value", "message"),
    [
        (("lstm", "dim"), None, r"options.json has no option 'lstm.dim'"),
        (("char_cnn",), None, r"has no option 'char_cnn.activation'"),
        (("char_cnn", "activation"), "tanh", r"char_cnn.activation is 'tanh', but must be 'relu'"),
        (("char_cnn", "n_characters"), 60, r"n_characters is 60, but must be 262"),
        (("char_cnn", "filters"), 3, r"options.json.filters must be tuple.*, got 3"),
        (("lstm", "dim"), "many", r"options.json.cell_dim must be int, got 'many'"),
        (("lstm", "dim"), 4, r"W_0 has shape \[4, 12\], but .* needs \[4, 16\]"),
        (("lstm", "n_layers"), 3, r"has no dataset 'RNN_0/RNN/MultiRNNCell/Cell2/LSTMCell/W_0'"),
        (
            ("lstm", "n_layers"),
            1,
            r"has the dataset 'RNN_0/RNN/MultiRNNCell/Cell1/LSTMCell/B', .*\(6 such datasets\)",
        ),
        (
            ("char_cnn", "n_highway"),
            0,
            r"has the dataset 'CNN_high_0/W_carry', .*\(4 such datasets\)",
        ),
        (("char_cnn", "filters"), [[1, 2**40]], "is too small for the .* numbers of"),
        (("char_cnn", "filters"), [[1, 2]], r"shape \[5, 5\], but .* needs \[2, 2\]"),
    ],
)
def test_options_that_do_not_fit(files, tmp_path, names, value, message):
    _, options, weights = files
    with pytest.raises(ConfigError, match=message) as error:
        load_elmo(changed(options, tmp_path / "options.json", *names, value=value), weights)
    assert "\n" not in str(error.value)


def test_files_that_are_none(files, tmp_path):
    model, options, weights = files
    for paths, message in (
        ((tmp_path / "no.json", weights), r"cannot read .*no.json \(.*No such file"),
        ((weights, weights), "weights.hdf5 is damaged"),
        ((options, options), r"cannot read the weights .*options.json \(it is not an HDF5 file"),
        ((options, tmp_path / "no.hdf5"), r"cannot read the weights .*no.hdf5 \(.*No such file"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            load_elmo(*paths)
        assert "\n" not in str(error.value)
    with h5py.File(tmp_path / "group.hdf5", "w") as file:
        file.create_group("char_embed")
    with pytest.raises(ConfigError, match="has no dataset 'char_embed'"):
        load_elmo(options, tmp_path / "group.hdf5")
    with pytest.raises(ConfigError, match=r"cannot write .*options.json"):
        save_elmo(model, tmp_path / "none" / "options.json", tmp_path / "weights.hdf5")
    with pytest.raises(ConfigError, match=r"cannot write .*weights.hdf5"):
        save_elmo(model, tmp_path / "options.json", tmp_path / "none" / "weights.hdf5")


def test_what_is_written_replaces_both_files_or_none(files, tmp_path):
    model, options, weights = files
    paths = [tmp_path / "options.json", tmp_path / "weights.hdf5"]
    for path, source in zip(paths, (options, weights), strict=True):
        path.write_bytes(source.read_bytes())
    full = OSError(errno.ENOSPC, "cannot write")
    with mock.patch.object(h5py, "File", side_effect=full), pytest.raises(StorageError):
        save_elmo(model, *paths)
    replace = Path.replace

    def fails(path, target):
        if target == paths[1]:
            raise full
        return replace(path, target)

    with mock.patch.object(Path, "replace", fails), pytest.raises(StorageError):
        save_elmo(model, *paths)
    assert [path.read_bytes() for path in paths] == [options.read_bytes(), weights.read_bytes()]
    save_elmo(model, *paths)
    assert {path.name for path in tmp_path.iterdir()} == {"options.json", "weights.hdf5"}
    load_elmo(*paths)


def replaced(weights, target, write):
    """A copy of the weights in which `write(file, former values)` makes `char_embed` again."""
    target.write_bytes(weights.read_bytes())
    with h5py.File(target, "r+") as file:
        values = file["char_embed"][...]
        del file["char_embed"]
        write(file, values)
    return target


def external(file, values):
    secret = Path(file.filename).with_name("secret")
    secret.write_bytes(values.tobytes())
    file.create_dataset(
        "char_embed", values.shape, values.dtype, external=[(str(secret), 0, values.nbytes)]
    )


def virtual(file, values):
    layout = h5py.VirtualLayout(values.shape, values.dtype)
    layout[...] = h5py.VirtualSource(str(file.filename) + ".other", "x", values.shape)
    file.create_virtual_dataset("char_embed", layout)


def linked(kind):
    def write(file, values):
        file["x"] = values
        path = str(file.filename) + ".other"
        with h5py.File(path, "w") as other:
            other["x"] = values
        file["char_embed"] = h5py.SoftLink("/x") if kind == "soft" else h5py.ExternalLink(path, "x")

    return write


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (external, "has the data of 'char_embed' in another file"),
        (virtual, "has the data of 'char_embed' in another file"),
        (linked("soft"), "has no dataset 'char_embed'"),
        (linked("external"), "has no dataset 'char_embed'"),
        (
            lambda file, values: file.create_dataset("char_embed", values.shape, complex),
            "is damaged",
        ),
        (
            lambda file, values: file.create_dataset(
                "char_embed", values.shape, h5py.string_dtype()
            ),
            "is damaged",
        ),
        (
            lambda file, values: file.create_dataset(
                "char_embed", dtype=h5py.Empty("f").dtype, shape=None
            ),
            "has shape",
        ),
    ],
    ids=["external", "virtual", "soft link", "external link", "complex", "text", "empty"],
)
def test_weights_that_are_elsewhere_or_no_numbers(files, tmp_path, write, message):
    _, options, weights = files
    with pytest.raises(ConfigError, match=message) as error:
        load_elmo(options, replaced(weights, tmp_path / "weights.hdf5", write))
    assert "\n" not in str(error.value)


def test_damaged_weights_are_one_line(files, tmp_path):
    """Bytes that are flipped in the structure of the file, which begins it."""
    _, options, weights = files
    content, rng = weights.read_bytes(), np.random.default_rng(0)
    damaged = 0
    for _ in range(12):
        changed_bytes = bytearray(content)
        for offset in rng.integers(len(content), size=40):
            changed_bytes[offset] ^= int(rng.integers(1, 256))
        (tmp_path / "weights.hdf5").write_bytes(changed_bytes)
        try:
            load_elmo(options, tmp_path / "weights.hdf5")
        except ConfigError as error:
            damaged += 1
            assert "\n" not in str(error)
    assert damaged > 6
