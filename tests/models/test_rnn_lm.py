"""The recurrent language model against oracle and PyTorch, and its state from batch to batch."""

import dataclasses
import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from cope_jax.errors import ConfigError
from cope_jax.generation.decoding import generate, generate_stream
from cope_jax.generation.sampling import row_keys
from cope_jax.layout import WHOLE
from cope_jax.models.rnn_lm import RNNLM, RNNLMConfig, RNNLMOptions
from cope_jax.runs.experiment import Experiment
from cope_jax.training.experiment_config import ExperimentConfig, TaskConfig
from tests.models.noisy import close, noisy, numbers
from tests.oracle import recurrent as oracle

VOCAB, BATCH, LENGTH = 11, 3, 6
SMALL = {"vocab_size": VOCAB, "embed_dim": 4, "hidden_dim": 4}
LENGTHS = np.array([6, 4, 1], np.int32)
CONFIGS = {
    "tanh": RNNLMConfig(**SMALL, cell="tanh"),
    "lstm": RNNLMConfig(**SMALL | {"hidden_dim": 3}, forget_bias=0.0),
    "tied": RNNLMConfig(**SMALL, num_layers=1, tie_embeddings=True, forget_bias=0.0),
    "both": RNNLMConfig(**SMALL | {"embed_dim": 3}, bidirectional=True),
}


def stream(seed=0, length=LENGTH):
    """A batch of a text and, on its own, of the reversed text."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, VOCAB, (2, BATCH, length + 1), dtype=np.int32)
    weights = (rng.random((2, BATCH, length)) < 0.8).astype(np.float32)
    fields = {"inputs": rows[0, :, :-1], "targets": rows[0, :, 1:], "weights": weights[0]}
    return fields | {
        "backward_inputs": rows[1, :, :-1],
        "backward_targets": rows[1, :, 1:],
        "backward_weights": weights[1],
    }


@functools.cache
def model(name, dtype=np.float32):
    return noisy(lambda: RNNLM(CONFIGS[name], rngs=nnx.Rngs(0)), dtype)


@functools.cache
def metrics(name):
    graphdef, _ = nnx.split(model(name))
    return jax.jit(lambda state, batch, carry: nnx.merge(graphdef, state).metrics(batch, carry))


def run(name, batch, carry=None, dtype=np.float32):
    tested = model(name, dtype)
    carry = tested.initial_carry(BATCH) if carry is None else carry
    return metrics(name)(
        nnx.state(tested),
        {k: v if v.dtype == np.int32 else v.astype(dtype) for k, v in batch.items()},
        carry,
    )


def by_oracle(config, params, tokens, lengths, direction):
    """States of all layers, the embedding first, and the logits of the forward model."""
    x = params["embedding_VD"][tokens]
    states = [x]
    for number in range(config.num_layers):
        prefix = f"directions/{direction}/{number}/"
        w = [params[prefix + name] for name in ("inner_DG", "state_PG", "bias_G")]
        carry = (np.zeros((len(x), config.hidden_dim)),) * (1 if config.cell == "tanh" else 2)
        layer, options = oracle.tanh_layer, {}
        if config.cell == "lstm":
            layer, options = oracle.lstm_layer, {"forget_bias": config.forget_bias}
        x, _ = oracle.batch(
            lambda row, *state, w=w, layer=layer, options=options: layer(
                row, *w, *state, **options
            ),
            x,
            lengths,
            carry,
            reverse=direction == 1 and lengths is LENGTHS,
        )
        states.append(x)
    table = params["embedding_VD"] if config.tie_embeddings else params["softmax/table_VD"]
    return states, x @ table.T + params["softmax/bias_V"]


@pytest.mark.newest
@pytest.mark.parametrize("name", CONFIGS)
def test_measures_are_the_oracles(name, x64):
    config, params, batch = CONFIGS[name], numbers(model(name, np.float64)), stream()
    metrics, _ = run(name, batch, dtype=np.float64)
    losses, wrong, weight = [], [], []
    for direction, prefix in enumerate(("", "backward_")[: 2 if config.bidirectional else 1]):
        whole = np.full(BATCH, LENGTH)
        _, logits = by_oracle(config, params, batch[f"{prefix}inputs"], whole, direction)
        indices = list(np.ndindex(BATCH, LENGTH))
        targets, weights = batch[f"{prefix}targets"], batch[f"{prefix}weights"].astype(np.float64)
        losses.append(
            sum(weights[at] * oracle.cross_entropy(logits[at], targets[at]) for at in indices)
        )
        wrong.append(sum(weights[at] * (logits[at].argmax() != targets[at]) for at in indices))
        weight.append(weights.sum())
    close(metrics["loss"], (sum(losses), sum(weight)), 1e-12)
    close(metrics["token_error"], (sum(wrong), sum(weight)), 1e-12)
    if config.bidirectional:
        close(metrics["forward_loss"], (losses[0], weight[0]), 1e-12)
        close(metrics["backward_loss"], (losses[1], weight[1]), 1e-12)


@pytest.mark.parametrize("name", ["lstm", "both"])
def test_a_call_gives_the_logits_of_the_forward_model(name, x64):
    config, tested, tokens = CONFIGS[name], model(name, np.float64), stream()["inputs"]
    logits = jax.jit(lambda tokens: tested(tokens)[0])(tokens)
    close(logits, by_oracle(config, numbers(tested), tokens, np.full(BATCH, LENGTH), 0)[1], 1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_states_of_ragged_rows_are_the_oracles(name, x64):
    """The narrower embedding is filled up with zeros, and what is behind the end is 0."""
    config, tested, tokens = CONFIGS[name], model(name, np.float64), stream()["inputs"]
    states = np.asarray(jax.jit(lambda tokens: tested.states(tokens, lengths_B=LENGTHS))(tokens))
    runs = [
        by_oracle(config, numbers(tested), tokens, LENGTHS, d)[0]
        for d in range(2 if config.bidirectional else 1)
    ]
    real = np.arange(LENGTH) < LENGTHS[:, None]
    for layer, parts in enumerate(zip(*runs, strict=True)):
        expected = np.concatenate(parts, axis=-1) * real[..., None]
        close(states[layer, :, :, : expected.shape[-1]], expected, 1e-12)
        assert not states[layer, :, :, expected.shape[-1] :].any()


@pytest.mark.parametrize("name", ["tanh", "lstm"])
def test_it_is_pytorchs(name, x64):
    """States of every layer, loss, and all gradients."""
    torch = pytest.importorskip("torch", reason="PyTorch, the reference here, is not installed")
    config, tested, batch = CONFIGS[name], model(name, np.float64), stream()
    params = {
        key: torch.tensor(value, requires_grad=True) for key, value in numbers(tested).items()
    }
    x = torch.nn.functional.embedding(torch.tensor(batch["inputs"]), params["embedding_VD"])
    states = [x]
    for number in range(config.num_layers):
        kind = torch.nn.RNN if name == "tanh" else torch.nn.LSTM
        layer = kind(x.shape[-1], config.hidden_dim, batch_first=True, dtype=torch.float64)
        w = [params[f"directions/0/{number}/{key}"] for key in ("inner_DG", "state_PG", "bias_G")]
        named = {
            "weight_ih_l0": w[0].T,
            "weight_hh_l0": w[1].T,
            "bias_ih_l0": w[2],
            "bias_hh_l0": torch.zeros_like(w[2]),
        }
        x, _ = torch.func.functional_call(layer, named, x)
        states.append(x)
    logits = x @ params["softmax/table_VD"].T + params["softmax/bias_V"]
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), torch.tensor(batch["targets"]).long(), reduction="none"
    )
    loss = (losses * torch.tensor(batch["weights"], dtype=torch.float64)).sum()
    loss.backward()

    graphdef, state = nnx.split(tested)
    weights = batch | {"weights": batch["weights"].astype(np.float64)}
    value, gradient = jax.jit(
        jax.value_and_grad(lambda state: nnx.merge(graphdef, state).metrics(weights)[0]["loss"][0])
    )(state)
    close(value, loss.detach(), 1e-12)
    ours = jax.jit(lambda: tested.states(batch["inputs"]))()
    for layer, expected in enumerate(states):
        close(ours[layer, :, :, : expected.shape[-1]], expected.detach(), 1e-12)
    for key, value in numbers(gradient).items():
        close(value, params[key].grad, 1e-10)


@pytest.mark.parametrize("name", ["lstm", "both"])
def test_two_batches_with_the_state_are_one_twice_as_long(name):
    batch = stream(length=2 * LENGTH)
    halves = [
        {k: v[:, columns] for k, v in batch.items()}
        for columns in (slice(None, LENGTH), slice(LENGTH, None))
    ]
    whole, last = run(name, batch)
    first, carry = run(name, halves[0])
    second, end = run(name, halves[1], carry)
    close(first["loss"][0] + second["loss"][0], whole["loss"][0], 1e-6)
    jax.tree.map(lambda a, b: close(a, b, 1e-6), end, last)


def test_reset_clears_the_state_of_its_rows():
    batch = stream()
    _, carry = run("lstm", batch)
    fresh, kept, mixed = (
        run("lstm", batch | {"reset": np.array(reset, np.float32)}, carry)[1]
        for reset in ([1] * 3, [0] * 3, [1, 0, 0])
    )
    chex.assert_trees_all_equal(fresh, run("lstm", batch)[1])
    chex.assert_trees_all_equal(kept, run("lstm", batch, carry)[1])
    for state, new, old in zip(*map(jax.tree.leaves, (mixed, fresh, kept)), strict=True):
        np.testing.assert_array_equal(state[0], new[0])
        np.testing.assert_array_equal(state[1:], old[1:])
        assert (np.asarray(new) != np.asarray(old)).any()


def test_no_gradient_goes_through_the_state():
    graphdef, state = nnx.split(model("lstm"))

    @jax.jit
    def gradient(carry):
        def loss(carry):
            measured, last = nnx.merge(graphdef, state).metrics(stream(), carry)
            return measured["loss"][0] + sum(leaf.sum() for leaf in jax.tree.leaves(last))

        return jax.grad(loss)(carry)

    carry = jax.tree.map(lambda leaf: leaf + 0.3, model("lstm").initial_carry(BATCH))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient(carry)))


def test_a_model_that_carries_nothing_starts_every_sequence_anew():
    first, second = stream(), stream(seed=1)
    config = dataclasses.replace(CONFIGS["lstm"], carries=False)
    tested = noisy(lambda: RNNLM(config, rngs=nnx.Rngs(0)), np.float32)
    assert tested.initial_carry(BATCH) == ()
    _, carry = tested.metrics(first)
    assert carry == ()
    expected, _ = run("lstm", second)
    chex.assert_trees_all_close(tested.metrics(second, carry)[0], expected, rtol=1e-6)
    task = TaskConfig("flip_flop", {"length": 8})
    Experiment.check(
        ExperimentConfig(model=RNNLMOptions(carries=False), encoding="none", task=task)
    )


@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_a_word_that_is_none_is_loud(wrong):
    tokens = stream()["inputs"].copy()
    tokens[0, 2] = wrong
    logits = np.asarray(jax.jit(lambda tokens: model("lstm")(tokens)[0])(tokens))
    assert np.isnan(logits[0, 2:]).all()
    assert np.isfinite(logits[0, :2]).all() and np.isfinite(logits[1:]).all()


@functools.cache
def dropping():
    return noisy(lambda: RNNLM(dataclasses.replace(CONFIGS["both"], dropout=0.5), rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("direction", [0, 1])
def test_dropout_is_on_the_embedding_between_layers_and_on_the_top(direction):
    """Kept values are twice the layer's output for dropped inputs, and the next one's input."""
    tested, tokens = dropping(), stream(length=20)["inputs"]
    carry = tested.initial_carry(BATCH)[direction]

    @jax.jit
    def run(key):
        states, _ = tested._read(direction, tested._embed(tokens), carry, key=key)
        layers = zip(tested.directions[direction], states[:-1], strict=True)
        return states, [tested.embedding_VD[...][tokens], *(layer(x)[0] for layer, x in layers)]

    kept = []
    for dropped, calm in zip(
        *map(lambda arrays: [*map(np.asarray, arrays)], run(jax.random.key(0))), strict=True
    ):
        kept.append(dropped != 0)
        assert 0.35 < kept[-1].mean() < 0.65
        close(dropped, np.where(kept[-1], 2 * calm, 0), 1e-6)
    assert (kept[1] != kept[2]).any(), "layers have keys of their own"


def test_training_drops_and_samples():
    tested = dropping()
    loss = jax.jit(lambda key: tested.metrics(stream(), (), key)[0]["loss"][0])
    plain = run("both", stream())[0]
    first, second = loss(jax.random.key(0)), loss(jax.random.key(1))
    assert first != second != plain["loss"][0]
    sampled = noisy(
        lambda: RNNLM(dataclasses.replace(CONFIGS["both"], num_sampled=VOCAB), rngs=nnx.Rngs(0))
    )
    metrics = jax.jit(lambda key: sampled.metrics(stream(), (), key)[0])(jax.random.key(0))
    close(metrics["loss"], plain["loss"], 1e-6)
    assert "token_error" not in metrics
    assert tested.config.stochastic and sampled.config.stochastic and not CONFIGS["both"].stochastic


def test_it_learns_a_text_with_a_memory():
    """0 1 0 2 0 1 0 2 …: what follows a 0 is known from two words before."""
    text = np.tile(np.array([0, 1, 0, 2], np.int32), 20)[None]
    batch = {
        "inputs": text[:, :-1],
        "targets": text[:, 1:],
        "weights": np.ones((1, 79), np.float32),
    }
    graphdef, state = nnx.split(
        RNNLM(RNNLMConfig(vocab_size=3, embed_dim=8, hidden_dim=8, num_layers=1), rngs=nnx.Rngs(0))
    )
    optimizer = optax.adam(0.05)

    @jax.jit
    def train(state):
        def step(loop, _):
            state, moments = loop
            mean = lambda state: jnp.divide(*nnx.merge(graphdef, state).metrics(batch)[0]["loss"])  # noqa: E731
            loss, gradient = jax.value_and_grad(mean)(state)
            updates, moments = optimizer.update(gradient, moments, state)
            return (optax.apply_updates(state, updates), moments), loss

        return jax.lax.scan(step, (state, optimizer.init(state)), length=60)[1]

    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer
        losses = train(state)
    assert losses[0] > 1.0
    assert losses[-1] < 0.1


PROMPTS = [[1, 2, 3], [4]]


@pytest.mark.newest
@pytest.mark.parametrize("name", CONFIGS)
def test_generation_takes_the_most_probable_words_one_after_the_other(name):
    tested = model(name)
    generated = generate(tested, PROMPTS, 4, key=jax.random.key(0), temperature=0)
    logits = jax.jit(lambda tokens: tested(tokens)[0])
    for row, prompt in zip(generated, PROMPTS, strict=True):
        text = np.array([prompt + row.tolist()])
        best = np.asarray(logits(text)).argmax(-1)[0]
        assert row.tolist() == best[len(prompt) - 1 : -1].tolist()


def test_a_row_is_drawn_by_its_key_up_to_a_stop_word():
    tested, keys = model("both"), row_keys(jax.random.key(0), range(2))
    options = dict(top_p=0.9, stop_token=[5, 6])
    drawn = [row.tolist() for row in generate(tested, PROMPTS, 9, key=keys, **options)]
    other = generate(tested, PROMPTS, 9, key=jax.random.key(1), **options)
    assert drawn != [row.tolist() for row in other]
    ends = [[word in (5, 6) for word in row] for row in drawn]
    assert all(row.index(True) == len(row) - 1 if any(row) else len(row) == 9 for row in ends)
    assert any(map(any, ends))
    (alone,) = generate(tested, PROMPTS[1:], 9, key=keys[1:], padded=6, **options)
    assert alone.tolist() == drawn[1]
    parts = zip(*generate_stream(tested, PROMPTS, 9, key=keys, chunk=2, **options), strict=True)
    assert [np.concatenate(row).tolist() for row in parts] == drawn


def test_options_are_completed_by_the_task():
    config = RNNLMOptions(hidden_dim=8).complete(
        types.SimpleNamespace(vocab_size=9), None, 10, WHOLE
    )
    assert isinstance(config, RNNLMConfig)
    assert (config.vocab_size, config.hidden_dim) == (9, 8)


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_are_six_for_each_number_of_a_matrix(name):
    config = CONFIGS[name]
    sizes = {key: value.size for key, value in numbers(model(name)).items() if value.ndim == 2}
    recurrent = sum(size for key, size in sizes.items() if key.startswith("directions"))
    softmax = VOCAB * config.hidden_dim * (2 if config.bidirectional else 1)
    assert config.flops_per_token(LENGTH) == 6 * (recurrent + softmax)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cell": "gru"}, "unknown rnn_lm.cell 'gru'"),
        ({"hidden_dim": 0}, "rnn_lm.hidden_dim must be at least 1"),
        ({"dropout": 1.0}, r"rnn_lm.dropout must lie in \[0, 1\), got 1.0"),
        ({"dropout": -0.1}, r"rnn_lm.dropout must lie in \[0, 1\), got -0.1"),
        (
            {"tie_embeddings": True, "hidden_dim": 5},
            "embed_dim=256 and hidden_dim=5: make them equal",
        ),
        ({"num_sampled": -1}, "rnn_lm.num_sampled must be at least 0"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        RNNLMOptions(**options)


def test_both_directions_need_the_reversed_text():
    with pytest.raises(ConfigError, match="needs 'backward_inputs' in its batches"):
        model("both").metrics(
            {name: value for name, value in stream().items() if "backward" not in name}
        )
    with pytest.raises(ConfigError, match=r"generate\.temperature"):
        generate(model("lstm"), [[1]], 2, key=jax.random.key(0), temperature=-1)
