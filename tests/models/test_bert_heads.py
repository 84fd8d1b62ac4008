"""Heads on BERT: the states they read, their types, and a frozen encoder."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.layers.basic import logits as last_logits
from cope_jax.layout import WHOLE
from cope_jax.models.bert import Bert, bert_block
from cope_jax.models.bert_heads import BertClassifier, BertClassifierConfig, BertTagger
from tests.models.bert_cases import LAYERS, LENGTH, VOCAB, batch, build, config, named, random_state

TASK = types.SimpleNamespace(vocab_size=VOCAB, num_classes=3, num_tags=3)


def head(cls, **options):
    choices = cls.Options(num_layers=LAYERS, block=config().block, **options)
    completed = choices.complete(TASK, EncodingConfig.parse("learned"), 11, WHOLE)
    return completed, *random_state(lambda: cls(completed, rngs=nnx.Rngs(0)), dtype=np.float32)


def head_batch(cls):
    fields = batch()
    common = {name: fields[name] for name in ("inputs", "segments", "mask")}
    if cls is BertClassifier:
        return common | {
            "targets": np.array([2, 0, 1], np.int32),
            "weights": np.array([1, 1, 0], np.float32),
        }
    starts = np.array([[1, 2, 5], [1, 3, 0], [2, 4, 5]], np.int32)
    weights = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1]], np.float32)
    return (
        common
        | {"starts": starts, "targets": np.array([[0, 1, 2], [2, 1, 0], [0, 0, 1]], np.int32)}
        | {"weights": weights}
    )


def test_fields_of_other_shapes_are_one_clear_line():
    _, graphdef, state = head(BertTagger)
    with pytest.raises(
        ConfigError,
        match=r"^bert_tagger: starts \(3, 3\), targets \(3, 2\), weights \(3, 3\) must have",
    ):
        nnx.merge(graphdef, state).metrics(
            head_batch(BertTagger) | {"targets": np.zeros((3, 2), np.int32)}
        )


@pytest.mark.parametrize("frozen", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "cls, options",
    [
        (BertClassifier, {}),
        pytest.param(BertTagger, {}, marks=pytest.mark.slow),
        (BertTagger, {"layers": "mix"}),
    ],
)
def test_heads_read_the_encoder(cls, options, frozen):
    """Logits follow from the states; a frozen encoder has neither gradient nor dropout."""
    choices, graphdef, state = head(cls, frozen=frozen, **options)
    fields = head_batch(cls)
    assert choices.frozen_modules == (("encoder",) if frozen else ())
    assert choices.stochastic

    @jax.jit
    def run(state):
        def loss(state):
            total, weight = nnx.merge(graphdef, state).metrics(fields)[0]["loss"]
            return total / weight

        model = nnx.merge(graphdef, state)
        inputs = fields["inputs"], fields["segments"], fields["mask"]
        return model.encoder.layers(*inputs), model.metrics(fields)[0], jax.grad(loss)(state)

    states_JBLD, metrics, gradient = run(state)
    params, states = named(state), np.asarray(states_JBLD, np.float64)
    if cls is BertClassifier:
        dense = params["encoder/pooler/kernel"], params["encoder/pooler/bias"]
        x_BLD = np.tanh(states[-1][:, 0] @ dense[0] + dense[1])[:, None]
        targets, weights = fields["targets"][:, None], fields["weights"][:, None]
    else:
        targets, weights = fields["targets"], fields["weights"]
        if choices.layers == "mix":
            shares = np.exp(params["mix/weights_J"]) / np.exp(params["mix/weights_J"]).sum()
            x = params["mix/gamma"] * np.tensordot(shares, states, 1)
        else:
            x = states[-1]
        x_BLD = np.stack([row[starts] for row, starts in zip(x, fields["starts"], strict=True)])
    logits = x_BLD @ params["out/kernel"] + params["out/bias"]
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    wrong = (logits.argmax(-1) != targets) * weights
    loss = -np.log(np.take_along_axis(chances, targets[..., None], -1)[..., 0])
    np.testing.assert_allclose(metrics["loss"], ((loss * weights).sum(), weights.sum()), rtol=1e-5)
    np.testing.assert_allclose(metrics["token_error"], (wrong.sum(), weights.sum()))
    for path, value in named(gradient).items():
        unused = path.startswith("encoder/pooler") and cls is BertTagger
        # Adds the same to all keys' logits.
        unused |= path in ("encoder/blocks/attention/key/bias",)
        if not unused:
            assert np.any(np.abs(value) > 1e-7) != (frozen and path.startswith("encoder")), path


@pytest.mark.parametrize("wrong", [-1, pytest.param(LENGTH, marks=pytest.mark.slow)])
def test_a_place_outside_of_the_sequence_is_loud(wrong):
    """Of a prediction, and of a word's first piece."""
    graphdef, state = build(config(), dtype=np.float32)
    fields, indices = batch(), np.array([[1, wrong], [2, 0], [0, 1]], np.int32)
    inputs = fields["segments"], fields["mask"]
    predict = jax.jit(
        lambda state: nnx.merge(graphdef, state)(fields["inputs"], *inputs, indices_BP=indices)[0]
    )
    tagger, state_of_tagger = head(BertTagger)[1:]
    tag = jax.jit(lambda state: nnx.merge(tagger, state)(fields["inputs"], indices, *inputs))
    for logits in (predict(state), tag(state_of_tagger)):
        np.testing.assert_array_equal(np.isnan(logits).all(axis=-1), indices == wrong)
        np.testing.assert_array_equal(np.isnan(logits).any(axis=-1), indices == wrong)


def test_logits_of_bfloat16_states_are_float32():
    """Numbers that bfloat16 has, whose sum it has not."""
    layer = nnx.Linear(3, 2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    layer.bias[...] = jnp.array([256.0, 1.0])
    logits = last_logits(layer, jnp.array([[1.0, 0.0078125, 5.0]], jnp.bfloat16))
    assert logits.dtype == jnp.float32 and logits.tolist() == [[257.0, 1.0078125]]
    assert last_logits(layer, jnp.ones((1, 2, 3), jnp.bfloat16)).shape == (1, 2, 2)


@pytest.mark.parametrize("cls", [Bert, BertClassifier])
def test_heads_of_bfloat16_models_compute_float32_logits(cls):
    """As a whole they are no numbers that bfloat16 has."""
    block = bert_block(8, 2, mlp_dim=12, compute_dtype="bfloat16")
    sizes = {"vocab_size": VOCAB, "max_length": 11, "num_layers": 1, "block": block}
    choices = cls.Config(**sizes, **({} if cls is Bert else {"num_classes": 2}))
    graphdef, state = random_state(lambda: cls(choices, rngs=nnx.Rngs(0)), dtype=np.float32)
    if cls is Bert:
        logits = jax.jit(lambda state: nnx.merge(graphdef, state)(batch()["inputs"])[1])(state)
    else:  # not under jit, where XLA leaves roundings out
        x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 8)), jnp.bfloat16)
        logits = nnx.merge(graphdef, jax.tree.map(jnp.asarray, state))._logits(x, None)
    assert logits.dtype == jnp.float32
    assert (logits != logits.astype(jnp.bfloat16).astype(jnp.float32)).any()


def test_dropout_of_heads():
    """A frozen encoder is a function: what is dropped is of its output alone."""
    fields = head_batch(BertClassifier)
    for frozen in (True, False):
        block = bert_block(8, 2, mlp_dim=12, dropout=0.5)
        choices = BertClassifierConfig(
            vocab_size=VOCAB,
            num_classes=3,
            num_layers=1,
            block=block,
            head_dropout=0.0,
            frozen=frozen,
            max_length=9,
        )
        assert choices.stochastic != frozen
        graphdef, state = random_state(
            lambda c=choices: BertClassifier(c, rngs=nnx.Rngs(0)), dtype=np.float32
        )

        @jax.jit
        def run(state, key, graphdef=graphdef):
            model = nnx.merge(graphdef, state)
            return [model(fields["inputs"], dropout_key=k) for k in (None, key)]

        plain, dropped = run(state, jax.random.key(0))
        assert bool((plain == dropped).all()) == frozen
