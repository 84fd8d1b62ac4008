"""The tagger: what it reads, its values by the oracle, and that padding does not matter."""

import functools
import types

import jax
import numpy as np
import pytest
from flax import nnx

from cope_jax.errors import ConfigError
from cope_jax.layout import WHOLE
from cope_jax.models.tagger import Tagger, TaggerConfig, TaggerOptions
from cope_jax.tokenizers.characters import characters
from tests.models.noisy import close, noisy, numbers
from tests.oracle import elmo, recurrent

TAGS, VOCAB, LENGTHS = 4, 7, (4, 2)
SIZES = {"num_tags": TAGS, "vocab_size": VOCAB, "dropout": 0.0}
CONFIGS = {
    "words": TaggerConfig(**SIZES, word_dim=3, recurrent=(2,)),
    "all": TaggerConfig(
        **SIZES,
        word_dim=3,
        characters=2,
        vectors=True,
        vector_shape=(3, 2),
        recurrent=(2, 3),
        penalty=0.1,
    ),
    "probe": TaggerConfig(
        **SIZES, word_dim=0, vectors=True, vector_shape=(3, 2), layer=-2, recurrent=()
    ),
    "normed": TaggerConfig(
        **SIZES, word_dim=0, vectors=True, vector_shape=(3, 2), layer_norm=True, recurrent=()
    ),
}


def batch(dtype=np.float32):
    rng = np.random.default_rng(0)
    real = np.arange(4) < np.array(LENGTHS)[:, None]
    words = (
        characters(["ab", "é", "c", "long", "x", "y", "", ""], 6).reshape(2, 4, 6) * real[..., None]
    )
    return {
        "inputs": rng.integers(0, VOCAB, (2, 4), dtype=np.int32),
        "characters": words.astype(np.int32),
        "targets": rng.integers(0, TAGS, (2, 4), dtype=np.int32),
        "weights": real.astype(dtype),
        "vectors": rng.normal(1, 2, (2, 4, 3, 2)).astype(dtype),
    }


@functools.cache
def model(name, dtype=np.float32):
    return noisy(lambda: Tagger(CONFIGS[name], rngs=nnx.Rngs(0)), dtype)


@functools.cache
def metrics(name):
    graphdef, _ = nnx.split(model(name))
    return jax.jit(
        lambda state, fields: (
            nnx.merge(graphdef, state)(fields),
            nnx.merge(graphdef, state).metrics(fields)[0],
        )
    )


def by_oracle(config, params, fields):
    """The logits of the real words, row by row."""
    logits = []
    real = fields["weights"] > 0
    for row, length in enumerate(LENGTHS):
        parts = []
        if config.word_dim:
            parts.append(params["embedding_VD"][fields["inputs"][row, :length]])
        if config.characters:
            filters = [(params["characters/filters/0"], params["characters/biases/0"])]
            table, words = params["characters/embedding_KE"], fields["characters"][row, :length]
            parts.append(np.array([elmo.word(word, table, filters, [], None) for word in words]))
        if config.vectors and config.layer is not None:
            parts.append(fields["vectors"][row, :length, config.layer])
        elif config.vectors:
            shares, mixed = recurrent.softmax(params["mix/weights_J"]), 0
            for layer, share in enumerate(shares):
                x = fields["vectors"][row, :length, layer]
                if config.layer_norm:
                    every = fields["vectors"][:, :, layer][real]
                    x = (x - every.mean()) / np.sqrt(every.var() + 1e-12)
                mixed = mixed + params["mix/gamma"] * share * x
            parts.append(mixed)
        x = np.concatenate(parts, axis=1)
        for number, width in enumerate(config.recurrent):
            sides = []
            for side, step in (("forward", 1), ("backward", -1)):
                w = [
                    params[f"recurrent/{number}/{side}/{key}"]
                    for key in ("inner_DG", "state_PG", "bias_G")
                ]
                y, _ = recurrent.lstm_layer(
                    x[::step], *w, np.zeros(width), np.zeros(width), forget_bias=1.0
                )
                sides.append(y[::step])
            x = np.concatenate(sides, axis=1)
        logits.append(x @ params["out/kernel"] + params["out/bias"])
    return logits


@pytest.mark.newest
@pytest.mark.parametrize("name", CONFIGS)
def test_values_are_the_oracles(name, x64):
    fields, params = batch(np.float64), numbers(model(name, np.float64))
    logits, measures = metrics(name)(nnx.state(model(name, np.float64)), fields)
    expected = by_oracle(CONFIGS[name], params, fields)
    loss, wrong = [], []
    for row, length in enumerate(LENGTHS):
        close(logits[row, :length], expected[row], 1e-12)
        targets = fields["targets"][row, :length]
        loss += [
            recurrent.cross_entropy(z, target)
            for z, target in zip(expected[row], targets, strict=True)
        ]
        wrong.append(expected[row].argmax(-1) != targets)
    close(measures["tag_loss"], (sum(loss), sum(LENGTHS)), 1e-12)
    close(measures["token_error"], (sum(map(sum, wrong)), sum(LENGTHS)), 1e-12)
    close(measures["sequence_error"], (sum(map(any, wrong)), 2), 1e-12)
    penalty = (
        CONFIGS[name].penalty * (params["mix/weights_J"] ** 2).sum() if CONFIGS[name].penalty else 0
    )
    close(measures["penalty"], (penalty * sum(LENGTHS), sum(LENGTHS)), 1e-12)
    assert set(measures) == {*Tagger.losses, "token_error", "sequence_error"}


@pytest.mark.parametrize("name", ["all", "normed"])
def test_what_stands_behind_the_words_does_not_matter(name):
    fields = batch()
    real = fields["weights"] > 0
    other = dict(fields, vectors=np.where(real[..., None, None], fields["vectors"], np.float32(50)))
    other["inputs"] = np.where(real, fields["inputs"], np.int32(5))
    actual, expected = (
        metrics(name)(nnx.state(model(name)), variant)[1] for variant in (other, fields)
    )
    jax.tree.map(lambda a, b: close(a, b, 1e-6), actual, expected)


@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_a_word_that_is_none_is_loud(wrong):
    fields = batch()
    fields["inputs"][0, 2] = wrong
    logits = np.asarray(metrics("words")(nnx.state(model("words")), fields)[0])
    assert np.isnan(logits[0, :4]).all() and np.isfinite(logits[1, :2]).all()


def test_a_word_without_a_tag_is_read():
    fields = batch()
    fields["weights"][0, 1] = 0
    other = dict(fields, inputs=fields["inputs"].copy())
    other["inputs"][0, 1] = (other["inputs"][0, 1] + 1) % VOCAB
    actual, expected = (
        np.asarray(metrics("words")(nnx.state(model("words")), variant)[0])
        for variant in (other, fields)
    )
    assert (np.abs(actual - expected)[0] > 1e-6).any(axis=-1).all()


def test_the_mix_tells_its_weights():
    weights = numbers(model("all"))["mix/weights_J"]
    close(model("all").mix_weights(), recurrent.softmax(weights), 1e-6)
    assert model("probe").mix_weights().tolist() == [0, 1, 0]
    with pytest.raises(ConfigError, match="this tagger reads no vectors"):
        model("words").mix_weights()


DROPPED = TaggerConfig(**SIZES | {"dropout": 0.5}, word_dim=3, characters=2, recurrent=(2, 3))


@pytest.mark.parametrize("dropped", range(3), ids=["input", "between", "top"])
def test_dropout_is_on_the_input_between_the_layers_and_on_the_top(dropped, monkeypatch):
    """Each is a place of its own, with a key of its own, through which all of the tagger goes."""
    tested, calls = noisy(lambda: Tagger(DROPPED, rngs=nnx.Rngs(0))), []

    def drop_all(x_BLD, rate, key):
        calls.append((x_BLD.shape[-1], rate, tuple(jax.random.key_data(key).tolist())))
        return x_BLD * 0 if len(calls) == dropped + 1 else x_BLD

    monkeypatch.setattr("cope_jax.models.tagger.dropout", drop_all)
    logits = np.asarray(tested(batch(), jax.random.key(0)))
    assert [call[:2] for call in calls] == [(5, 0.5), (4, 0.5), (6, 0.5)]
    assert len({key for _, _, key in calls}) == 3
    fields = batch()
    changed = fields | {
        "inputs": (fields["inputs"] + 1) % VOCAB,
        "characters": fields["characters"][::-1],
    }
    calls.clear()
    np.testing.assert_array_equal(logits, tested(changed, jax.random.key(0)))
    if dropped == 2:
        np.testing.assert_array_equal(logits, np.broadcast_to(tested.out.bias[...], logits.shape))


def test_dropout_is_drawn_in_training():
    tested = noisy(lambda: Tagger(DROPPED, rngs=nnx.Rngs(0)))
    loss = jax.jit(lambda key: tested.metrics(batch(), (), key)[0]["tag_loss"][0])
    assert loss(jax.random.key(0)) != loss(jax.random.key(1))
    assert DROPPED.stochastic and not CONFIGS["all"].stochastic


def test_options_are_completed_by_the_task():
    task = types.SimpleNamespace(num_tags=4, vocab_size=9, vector_shape=(3, 8))
    config = TaggerOptions(vectors=True).complete(task, None, 10, WHOLE)
    assert (config.num_tags, config.vocab_size, config.vector_shape) == (4, 9, (3, 8))
    assert TaggerOptions().complete(task, None, 10, WHOLE).vector_shape is None
    with pytest.raises(ConfigError, match="needs vectors, which the task does not have"):
        TaggerOptions(vectors=True).complete(
            types.SimpleNamespace(num_tags=4, vocab_size=9), None, 10, WHOLE
        )


def test_flops_are_six_for_each_number_of_a_matrix():
    for name in ("words", "probe"):
        sizes = {key: value.size for key, value in numbers(model(name)).items() if value.ndim == 2}
        assert CONFIGS[name].flops_per_token(4) == 6 * sum(
            n for key, n in sizes.items() if "embedding" not in key
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "taggers"}, "unknown tagger.name 'taggers': did you mean 'tagger'"),
        ({"word_dim": 0}, "tagger reads nothing"),
        ({"layer": 1}, "need vectors: set tagger.vectors"),
        (
            {"vectors": True, "layer": 1, "penalty": 0.1},
            "need the mix of all layers: leave out tagger.layer",
        ),
        (
            {"vectors": True, "layer": 0, "layer_norm": True},
            "need the mix of all layers: leave out tagger.layer",
        ),
        ({"recurrent": (3, 0)}, "tagger.recurrent must be at least 1, got 0"),
        ({"dropout": 1.0}, r"tagger.dropout must lie in \[0, 1\)"),
        (
            {"vectors": True, "vector_shape": (3, 2), "layer": 3},
            "tagger.layer=3 is out of range: give -3 to 2",
        ),
        ({"vectors": True}, r"tagger.vector_shape must be \(layers, width\), got None"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        TaggerConfig(**{"num_tags": 2, "vocab_size": 3} | options)


def test_vectors_of_words_start_with_a_deviation_of_a_tenth():
    config = TaggerConfig(num_tags=2, vocab_size=200, word_dim=40, recurrent=(2,))
    table = jax.jit(lambda: Tagger(config, rngs=nnx.Rngs(0)).embedding_VD[...])()
    assert abs(table.std() / 0.1 - 1) < 0.05


def test_batches_that_do_not_fit():
    fields = batch()
    with pytest.raises(ConfigError, match="tagger needs 'characters' in its batches"):
        model("all")({name: value for name, value in fields.items() if name != "characters"})
    with pytest.raises(ConfigError, match=r"vectors have \(layers, width\) \[2, 2\], not \(3, 2\)"):
        model("probe")(fields | {"vectors": fields["vectors"][:, :, :2]})
