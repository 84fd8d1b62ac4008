"""Characters of words, and the vectors that a CNN makes of them, against NumPy and PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax.errors import ConfigError
from cope_jax.layers.char_cnn import NUM_CHARACTERS, CharCNN, CharCNNConfig, Highway
from cope_jax.tokenizers import characters as numbering
from tests.models.noisy import close, noisy, numbers
from tests.oracle import elmo as oracle

WORDS = ["a", "naïve", "unbelievably", "", "日本"]
CONFIGS = {
    "elmo": CharCNNConfig(
        embed_dim=3, filters=((1, 2), (2, 3), (4, 2)), num_highways=2, projection=4
    ),
    "small": CharCNNConfig(embed_dim=3, filters=((3, 5),), num_highways=0, projection=None),
}


def inputs():
    """`[2, 3, 8]`: five words, one cut, and a padding word."""
    rows = numbering.characters(WORDS, 8)
    return np.concatenate([rows, np.zeros((1, 8), np.int32)]).reshape(2, 3, 8)


def by_oracle(params, config, characters):
    filters = [(params[f"filters/{k}"], params[f"biases/{k}"]) for k in range(len(config.filters))]
    parts = ("carry/kernel", "carry/bias", "transform/kernel", "transform/bias")
    highways = [
        tuple(params[f"highways/{k}/{name}"] for name in parts) for k in range(config.num_highways)
    ]
    projection = (
        (params["projection/kernel"], params["projection/bias"]) if config.projection else None
    )
    return oracle.word(characters, params["embedding_KE"], filters, highways, projection)


@pytest.mark.newest
@pytest.mark.parametrize("name", CONFIGS)
def test_vectors_are_the_oracles(name, x64):
    config = CONFIGS[name]
    layer = noisy(lambda: CharCNN(config, rngs=nnx.Rngs(0)), np.float64)
    vectors = np.asarray(jax.jit(lambda x: layer(x))(inputs()))
    assert vectors.shape == (2, 3, config.projection or config.num_filters)
    expected = [by_oracle(numbers(layer), config, word) for word in inputs().reshape(6, 8)]
    close(vectors.reshape(6, -1), expected, 1e-12)
    assert not vectors[1, 2].any(), "a padding word is 0"


def test_filters_are_pytorchs_convolutions(x64):
    """In value and in the gradients of all parameters."""
    torch = pytest.importorskip("torch", reason="PyTorch, the reference here, is not installed")
    config = CharCNNConfig(embed_dim=3, filters=((1, 2), (3, 4)), num_highways=0, projection=None)
    graphdef, state = nnx.split(noisy(lambda: CharCNN(config, rngs=nnx.Rngs(0)), np.float64))
    weights = np.random.default_rng(4).normal(size=(1, 5, 6))
    characters = numbering.characters(WORDS, 8)[None]

    def total(state):
        y = nnx.merge(graphdef, state)(characters)
        return (y * weights).sum(), y

    (_, vectors), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(state)
    values = {
        name: torch.tensor(value, requires_grad=True) for name, value in numbers(state).items()
    }
    e = values["embedding_KE"][torch.tensor(characters[0], dtype=torch.long)].transpose(1, 2)
    maxima = [
        torch.nn.functional.conv1d(
            e, values[f"filters/{k}"].permute(2, 1, 0), values[f"biases/{k}"]
        ).max(dim=2)[0]
        for k in range(2)
    ]
    expected = torch.relu(torch.cat(maxima, dim=1))
    (expected * torch.tensor(weights[0])).sum().backward()
    close(vectors[0], expected.detach(), 1e-12)
    for name, value in numbers(gradient).items():
        close(value, values[name].grad, 1e-12)


@pytest.mark.parametrize("wrong", [-1, NUM_CHARACTERS, 1000])
def test_characters_that_are_none_are_loud(wrong):
    """In a word and in a padding word; the other words' vectors are as they were."""
    layer = noisy(lambda: CharCNN(CONFIGS["elmo"], rngs=nnx.Rngs(0)))
    run, rows = jax.jit(lambda x: layer(x)), inputs()
    rows[0, 1, 2], rows[1, 2, 0] = wrong, wrong
    broken, right = np.asarray(run(rows)), np.asarray(run(inputs()))
    words = np.array([[False, True, False], [False, False, True]])
    np.testing.assert_array_equal(np.isnan(broken).all(axis=-1), words)
    np.testing.assert_array_equal(broken[~words], right[~words])


def test_a_highway_starts_by_carrying():
    highway = Highway(3, rngs=nnx.Rngs(0))
    assert highway.carry.bias[...].tolist() == [-2, -2, -2]
    assert highway.transform.bias[...].tolist() == [0, 0, 0]


def test_words_become_bytes():
    rows = numbering.characters(["né", "x" * 60, ""], 50)
    assert rows.shape == (3, 50)
    assert rows.dtype == np.int32
    # bilm's numbers and 1: begin, n, two bytes of é, end, padding.
    assert rows[0, :6].tolist() == [259, ord("n") + 1, 0xC3 + 1, 0xA9 + 1, 260, 261]
    assert rows[1].tolist() == [259, *[ord("x") + 1] * 48, 260]
    assert rows[2, :3].tolist() == [259, 260, 261]
    assert 0 < rows.min() <= rows.max() < NUM_CHARACTERS == numbering.NUM_CHARACTERS


def test_half_a_character_is_left_out():
    assert numbering.characters(["a\ud83d"], 6)[0].tolist() == [259, 98, 260, 261, 261, 261]


def test_sentences_get_marks_and_lose_them():
    rows, lengths = numbering.batch_sentences([["a", "b"], ["c"]], 6, multiple=8)
    assert rows.shape == (2, 8, 6)
    assert lengths.tolist() == [4, 3]
    assert rows[0, 0].tolist() == [259, 257, 260, 261, 261, 261]
    assert rows[1, 2].tolist() == [259, 258, 260, 261, 261, 261]
    assert not rows[1, 3:].any()
    vectors = np.arange(16.0).reshape(1, 2, 8, 1)
    assert [sentence[0, :, 0].tolist() for sentence in numbering.strip_marks(vectors, lengths)] == [
        [1, 2],
        [9],
    ]
    assert numbering.batch_sentences([], 6)[0].shape == (0, 2, 6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: numbering.characters(["a"], 2), "max_characters must be at least 3"),
        (lambda: numbering.characters("a text"), "words must be a list of str"),
        (lambda: CharCNNConfig(filters=()), r"characters.filters must be pairs"),
        (lambda: CharCNNConfig(filters=((1, 0),)), r"characters.filters must be pairs"),
        (lambda: CharCNNConfig(embed_dim=0), r"characters.embed_dim must be at least 1"),
        (
            lambda: nnx.eval_shape(
                lambda: CharCNN(CONFIGS["small"], rngs=nnx.Rngs(0))(jnp.ones((1, 1, 2), jnp.int32))
            ),
            "words of 2 characters are shorter than a filter of 3",
        ),
    ],
)
def test_wrong_input(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
