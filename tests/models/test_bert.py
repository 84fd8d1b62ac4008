"""BERT against the oracle, what padding and dropout may do, and where it starts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax.errors import ConfigError
from cope_jax.layers.basic import Norm
from cope_jax.layers.self_attention import Context
from cope_jax.models.bert import Bert, BertConfig, BertOptions, bert_block
from cope_jax.models.bert_heads import BertClassifierConfig, BertTaggerConfig
from cope_jax.models.encoder import SIZES
from tests.models.bert_cases import (
    LAYERS,
    LENGTH,
    LENGTHS,
    VOCAB,
    WIDTH,
    batch,
    build,
    config,
    expected_measures,
    expected_states,
    named,
)
from tests.oracle.differences import gradients as finite_differences

REAL = batch()["mask"] == 1


def row_of(fields, number):
    return {name: value[number] for name, value in fields.items()}


def summed(metrics, names):
    return sum(metrics[name][0] / metrics[name][1] for name in names)


@pytest.mark.parametrize(
    "encoding",
    [
        pytest.param("learned", marks=pytest.mark.newest),
        pytest.param("cope_two_sided(npos_max=3)", marks=pytest.mark.slow),
    ],
)
def test_every_layer_and_every_measure_equal_the_oracle(encoding, x64):
    """In float64, on ragged rows of two segments; and the gradient, along one random direction."""
    choices = config(encoding, "float64")
    graphdef, state = build(choices)
    fields, params = batch(dtype=np.float64), named(state)

    @jax.jit
    def run(state):
        model = nnx.merge(graphdef, state)
        states = model.layers(fields["inputs"], fields["segments"], fields["mask"])
        return states, model.metrics(fields)[0], jax.grad(loss)(state)

    def loss(state):
        return summed(nnx.merge(graphdef, state).metrics(fields)[0], Bert.losses)

    states_JBLD, metrics, gradient = run(state)
    assert states_JBLD.shape[0] == LAYERS + 1
    for number, length in enumerate(LENGTHS):
        for states, layer in zip(
            states_JBLD[:, number, :length],
            expected_states(choices, params, row_of(fields, number)),
            strict=True,
        ):
            np.testing.assert_allclose(states, layer, rtol=0, atol=1e-11)
    exact = expected_measures(choices, params, fields)
    for name, value in exact.items():
        np.testing.assert_allclose(metrics[name], value, rtol=0, atol=1e-10, err_msg=name)
    rng = np.random.default_rng(2)
    direction = {path: rng.normal(size=value.shape) for path, value in params.items()}

    def along(step):
        moved = {path: value + step["t"] * direction[path] for path, value in params.items()}
        return summed(expected_measures(choices, moved, fields), Bert.losses)

    slope = finite_differences(along, {"t": np.zeros(())}, step=1e-6)["t"]
    product = sum((value * direction[path]).sum() for path, value in named(gradient).items())
    np.testing.assert_allclose(product, slope, rtol=1e-6)


@functools.cache
def compiled():
    """(graphdef, state, run) of BERT with dropout; run(state, fields, key) → (states, mlm, nsp)."""
    graphdef, state = build(config(dropout=0.3), dtype=np.float32)

    @jax.jit
    def run(state, fields, key):
        model = nnx.merge(graphdef, state)
        inputs = fields["inputs"], fields["segments"], fields["mask"]
        return model.encoder.layers(*inputs, dropout_key=key), *model(*inputs, dropout_key=key)

    return graphdef, state, run


def outputs(fields, key=None):
    _, state, run = compiled()
    return [np.asarray(array) for array in run(state, fields, key)]


def test_padding_is_not_seen():
    """Whatever stands there; and a shorter batch gives the same."""
    fields = batch()
    other = fields | {
        "inputs": np.where(REAL, fields["inputs"], (fields["inputs"] + 1) % VOCAB),
        "segments": np.where(REAL, fields["segments"], 1 - fields["segments"]),
    }
    for actual, exact in zip(outputs(other), outputs(fields), strict=True):
        if actual.ndim == 2:
            np.testing.assert_array_equal(actual, exact)
        else:
            np.testing.assert_array_equal(actual[..., REAL, :], exact[..., REAL, :])
    without = fields | {"mask": np.ones_like(fields["mask"])}
    assert np.abs(outputs(without)[2] - outputs(fields)[2])[1:].max() > 1e-3, (
        "the test would not see padding"
    )


def test_every_token_sees_every_other():
    fields = batch()
    for index in (0, LENGTH - 1):
        changed = fields["inputs"].copy()
        changed[0, index] = (changed[0, index] + 1) % VOCAB
        moved = np.abs(outputs(fields | {"inputs": changed})[0] - outputs(fields)[0])[-1].max(
            axis=-1
        )
        assert moved[0].min() > 1e-5 and moved[1:].max() == 0


def test_dropout_is_on_the_embeddings_and_in_every_block():
    """Each layer equals its output without dropout for the same dropped states below it."""
    assert config(dropout=0.3).stochastic and not config().stochastic
    graphdef, state, _ = compiled()
    fields = batch()
    context = Context(np.arange(LENGTH, dtype=np.int32)[None], fields["mask"], causal=False)

    @jax.jit
    def without(state, states_JBLD):
        encoder = nnx.merge(graphdef, state).encoder
        graph, stacked = nnx.split(encoder.blocks)
        blocks = [
            nnx.merge(graph, jax.tree.map(lambda leaf, k=k: leaf[k], stacked))
            for k in range(LAYERS)
        ]
        return [
            block(x, encoder.encoding, context)
            for block, x in zip(blocks, states_JBLD[:-1], strict=True)
        ]

    plain, dropped = (outputs(fields, key)[0] for key in (None, jax.random.key(0)))
    kept = dropped[0] != 0
    assert 0.6 < kept.mean() < 0.8
    np.testing.assert_allclose(dropped[0][kept], plain[0][kept] / 0.7, rtol=1e-6)
    for states, differs in ((plain, False), (dropped, True)):
        for state_BLD, calm in zip(states[1:], without(state, states), strict=True):
            away = np.abs(state_BLD - calm).max(axis=-1)[REAL]
            assert away.min() > 1e-4 if differs else away.max() < 1e-5


def test_dropout_depends_on_the_key_alone():
    fields = batch()
    plain, first, again, other = (
        outputs(fields, key)[0][1:] for key in (None, *map(jax.random.key, (0, 0, 1)))
    )
    np.testing.assert_array_equal(first, again)
    for left, right in [(plain, first), (first, other)]:
        assert np.abs(left - right).max(axis=-1)[:, REAL].min() > 1e-4


@pytest.mark.parametrize("predictions", [3, LENGTH + 1])
def test_predicting_at_some_places_is_the_same(predictions):
    """With as many places as the fullest row has."""
    fields = batch()
    everywhere, some = (measured(fields, number) for number in (None, predictions))
    for name, value in everywhere.items():
        np.testing.assert_allclose(some[name], value, rtol=2e-6, err_msg=name)


def test_too_many_predictions_are_loud():
    assert np.isnan(measured(batch(), 2)["mlm_loss"][0])
    assert np.isfinite(measured(batch(), 2)["nsp_loss"][0])


@functools.cache
def measuring(predictions):
    graphdef, state = build(config(predictions=predictions), dtype=np.float32)
    return jax.jit(lambda state, fields: nnx.merge(graphdef, state).metrics(fields)), state


def measured(fields, predictions):
    run, state = measuring(predictions)
    metrics, carry = run(state, fields)
    assert carry == ()
    return {name: np.asarray(value) for name, value in metrics.items()}


def test_empty_rows_count_for_nothing():
    """As the last batch of an evaluation has them."""
    fields = batch()
    empty = {
        name: np.concatenate([value, np.zeros_like(value[:2])]) for name, value in fields.items()
    }
    for name, value in measured(fields, 3).items():
        np.testing.assert_allclose(measured(empty, 3)[name], value, rtol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    "size, encoder, whole",
    [("base", 109_482_240, 110_106_428), ("large", 335_141_888, 336_226_108)],
)
def test_parameter_counts_are_the_published_ones(size, encoder, whole):
    choices = BertConfig(**BertOptions.of_size(size).fields(), vocab_size=30522)
    model = nnx.eval_shape(lambda: Bert(choices, rngs=nnx.Rngs(0)))
    counts = [
        sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module)))
        for module in (model.encoder, model)
    ]
    assert counts == [encoder, whole]


def test_sizes_are_the_published_ones():
    assert bert_block().norm_epsilon == 1e-12
    assert SIZES["tiny"] == (2, 128, 2) and SIZES["mini"] == (4, 256, 4)
    for size, (layers, width, heads) in SIZES.items():
        options = BertOptions.of_size(size, predictions=7)
        assert (options.num_layers, options.block.model_dim, options.block.num_heads) == (
            layers,
            width,
            heads,
        )
        assert options.predictions == 7 and options.block.attention_shape(None).head_dim == 64
    with pytest.raises(ConfigError, match="unknown size of BERT 'bass': did you mean 'base'"):
        BertOptions.of_size("bass")


def test_flops_of_the_heads_are_shared_by_the_tokens():
    choices = config(predictions=3)
    # Pieces; the pooler, the next sentence.
    heads = 3 * (WIDTH * WIDTH + WIDTH * VOCAB) + WIDTH * WIDTH + 2 * WIDTH
    assert choices.flops_per_token(9) == pytest.approx(choices.encoder_flops(9) + 6 * heads / 9)


def test_initial_parameters():
    """Matrices have stddev 0.02, cut at two; biases are 0, scales 1; the loss is chance's."""
    choices = BertConfig(vocab_size=500, max_length=50, num_layers=2, block=bert_block(32, 2))
    fields = {
        name: np.tile(value, (10, 1) if value.ndim == 2 else 10) for name, value in batch().items()
    }

    @jax.jit
    def run():
        model = Bert(choices, rngs=nnx.Rngs(0))
        return nnx.state(model), model.metrics(fields)[0]

    state, metrics = run()
    cut = 0.02 * 0.8796  # what is left of a normal distribution's deviation that is cut at two
    for path, value in named(state).items():
        if path.endswith(("bias", "bias_V")):
            assert not value.any(), path
        elif path.endswith("scale"):
            assert (value == 1).all(), path
        elif path.endswith("encoding/learned/table"):
            assert abs(value.std() / 0.02 - 1) < 0.1, path
        else:
            assert (
                np.abs(value).max() <= 0.04
                and abs(value.std() / cut - 1) < 5 / (2 * value.size) ** 0.5
            ), path
    assert abs(metrics["mlm_loss"][0] / metrics["mlm_loss"][1] - np.log(500)) < 0.1
    assert abs(metrics["nsp_loss"][0] / metrics["nsp_loss"][1] - np.log(2)) < 0.1


@pytest.mark.parametrize("encoding", ["relative", "rope+fox"])
def test_encodings_for_causal_attention_are_refused(encoding):
    with pytest.raises(
        ConfigError,
        match="the encoding is for causal attention, and this model sees tokens on both",
    ):
        graphdef, state = build(config(encoding))
        jax.eval_shape(lambda: nnx.merge(graphdef, state).metrics(batch()))


def test_a_small_epsilon_is_safe():
    """Rows that hardly vary: a variance by a difference of squares would be off by over 1e-12."""
    norm = Norm(bert_block(64, 2), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    x = (100 + 0.01 * rng.normal(size=(3, 64))).astype(np.float32)
    wide = x.astype(np.float64)
    exact = (wide - wide.mean(-1, keepdims=True)) / wide.std(-1, keepdims=True)
    # The mean of float32 numbers near 100 is off by some 4e-6, of a deviation of 0.01.
    np.testing.assert_allclose(norm(jnp.asarray(x)), exact, rtol=0, atol=2e-3)


def test_float64_needs_64_bit_jax():
    with pytest.raises(ConfigError, match="JAX_ENABLE_X64=1"):
        nnx.eval_shape(lambda: Bert(config(dtype="float64"), rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    "field, wrong", [("inputs", -1), ("inputs", VOCAB), ("segments", -2), ("segments", 2)]
)
def test_a_token_or_segment_that_is_none_is_loud(field, wrong):
    fields = batch()
    changed = fields[field].copy()
    changed[0, 3] = wrong
    states = outputs(fields | {field: changed})[0]
    assert np.isnan(states[0, 0, 3]).all() and np.isnan(states[-1, 0]).all()
    assert np.isfinite(states[0, 0, :3]).all() and np.isfinite(states[:, 1:]).all()


@pytest.mark.parametrize(
    "create, message",
    [
        (lambda: config(num_layers=0), "bert.num_layers must be at least 1, got 0"),
        (lambda: config(predictions=0), "bert.predictions must be at least 1, got 0"),
        (lambda: config(type_vocab_size=-1), "bert.type_vocab_size must be at least 0"),
        (
            lambda: config(embedding_dim=4, encoding_sharing="model"),
            "bert.embedding_dim needs encoding_sharing='layer'",
        ),
        (
            lambda: config(first_norm=False),
            "bert.first_norm=False has no effect with block.norm_position=post: set pre",
        ),
        (
            lambda: config(full_layers=(1,)),
            "bert.full_layers has no effect without block.window or full_encoding",
        ),
        (
            lambda: config(full_layers=(2,), block=bert_block(8, 2, window=3)),
            r"bert.full_layers must be different numbers from 0 to 1, got \(2,\)",
        ),
        (
            lambda: config(full_encoding="rope"),
            "bert.full_encoding has no effect without full_layers",
        ),
        (lambda: config(remat="ful"), "unknown bert.remat 'ful': did you mean 'full'"),
        (
            lambda: BertTaggerConfig(vocab_size=2, num_classes=2, layers="mixed"),
            "bert_tagger.layers 'mixed'",
        ),
        (
            lambda: BertTaggerConfig(vocab_size=2, num_classes=0),
            "bert_tagger.num_classes must be at least 1",
        ),
        (
            lambda: BertClassifierConfig(vocab_size=2, num_classes=2, head_dropout=1.0),
            "head_dropout must lie in",
        ),
        (lambda: bert_block(8, 2, norm_epsilon=0.0), r"norm_epsilon must lie in \(0, 1\)"),
    ],
)
def test_mistakes_are_one_clear_line(create, message):
    with pytest.raises(ConfigError, match=message) as error:
        create()
    assert "\n" not in str(error.value)


def test_tables_start_at_one_over_the_root_of_the_width_unless_told():
    choices = BertConfig(
        vocab_size=500, max_length=4, num_layers=1, block=bert_block(32, 2, initial_stddev=None)
    )
    table = jax.jit(lambda: Bert(choices, rngs=nnx.Rngs(0)).encoder.words.embedding[...])()
    assert abs(table.std() * 32**0.5 / 0.8796 - 1) < 0.03  # what cutting at two deviations leaves


def test_fields_of_other_shapes_are_one_clear_line():
    model = nnx.eval_shape(lambda: Bert(config(), rngs=nnx.Rngs(0)))
    with pytest.raises(
        ConfigError, match=r"tokens \(2, 5\), mask \(2, 4\) must have the same 2 axes$"
    ):
        model.encoder(np.zeros((2, 5), np.int32), mask_BL=np.ones((2, 4), np.int32))


def test_too_long_a_sequence_is_an_error():
    graphdef, state = build(config(), dtype=np.float32)
    with pytest.raises(ConfigError, match="position 11 is outside of the learned table of 11 rows"):
        nnx.merge(graphdef, state)(np.zeros((1, 12), np.int32))
