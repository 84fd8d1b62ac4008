"""ELMo against the oracle and PyTorch, its sizes, and what it is trained on."""

import dataclasses
import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax.errors import ConfigError
from cope_jax.layout import WHOLE
from cope_jax.models.elmo import Elmo, ElmoConfig, ElmoOptions
from cope_jax.tokenizers.characters import batch_sentences, characters
from tests.models.noisy import close, noisy, numbers
from tests.oracle import elmo as oracle
from tests.oracle.recurrent import cross_entropy

VOCAB, BATCH, LENGTH, SIZE = 9, 2, 5, 6
CLIPS = 0.3, 0.1  # so tight that cells and outputs meet them
CONFIG = ElmoConfig(
    character_dim=3,
    filters=((1, 2), (3, 3)),
    num_highways=1,
    max_characters=SIZE,
    cell_dim=4,
    projection_dim=3,
    cell_clip=CLIPS[0],
    projection_clip=CLIPS[1],
    dropout=0.0,
    vocab_size=VOCAB,
)
SENTENCES = [["a", "cat", "sat"], ["no"]]
PARTS = ("carry/kernel", "carry/bias", "transform/kernel", "transform/bias")
LSTM = ("inner_DG", "state_PG", "bias_G", "outer_NP")


@functools.cache
def model(dtype=np.float32, **options):
    return noisy(lambda: Elmo(dataclasses.replace(CONFIG, **options), rngs=nnx.Rngs(0)), dtype)


def random_words(rng, *shape):
    letters = [list("abcdefghé")[k] for k in rng.integers(0, 9, np.prod(shape))]
    return characters(
        [a + b for a, b in zip(letters, reversed(letters), strict=True)], SIZE
    ).reshape(*shape, SIZE)


def batch(length=LENGTH, dtype=np.float32):
    rng = np.random.default_rng(0)
    fields = {}
    for prefix in ("", "backward_"):
        fields[f"{prefix}inputs"] = random_words(rng, BATCH, length)
        fields[f"{prefix}targets"] = rng.integers(0, VOCAB, (BATCH, length), dtype=np.int32)
        fields[f"{prefix}weights"] = (rng.random((BATCH, length)) < 0.8).astype(dtype)
    return fields


def vectors(params, words):
    filters = [
        (params[f"characters/filters/{k}"], params[f"characters/biases/{k}"]) for k in range(2)
    ]
    highways = [tuple(params[f"characters/highways/0/{name}"] for name in PARTS)]
    projection = params["characters/projection/kernel"], params["characters/projection/bias"]
    return np.array(
        [
            oracle.word(w, params["characters/embedding_KE"], filters, highways, projection)
            for w in words
        ]
    )


def stack(params, direction):
    return [
        tuple(params[f"directions/{direction}/{layer}/{name}"] for name in LSTM)
        for layer in range(2)
    ]


def row_of(carry, row):
    return [
        [tuple(np.asarray(state[row], np.float64) for state in layer) for layer in side]
        for side in carry
    ]


@pytest.mark.newest
@pytest.mark.parametrize("residual", [True, False])
def test_layers_of_ragged_sentences_are_the_oracles_with_carried_states(residual, x64):
    tested = model(np.float64, residual=residual)
    params = numbers(tested)
    rows, lengths = batch_sentences(SENTENCES, SIZE)
    run = jax.jit(lambda rows, lengths, carry: tested.layers(rows, lengths, carry))
    carry = tested.initial_carry(BATCH)
    for _ in range(2):  # again, from where the first time ended
        layers, after = run(rows, lengths, carry)
        assert layers.shape == (3, BATCH, LENGTH, 6)
        for row, length in enumerate(lengths):
            x = vectors(params, rows[row, :length])
            before = row_of(carry, row)
            expected, last = oracle.bilm(
                x, stack(params, 0), stack(params, 1), before, CLIPS, residual
            )
            close(layers[:, row, :length], expected, 1e-12)
            assert not np.asarray(layers[:, row, length:]).any()
            jax.tree.map(
                lambda a, b: close(a, b, 1e-12), row_of(after, row), [list(side) for side in last]
            )
        carry = after
    cells = np.abs(np.concatenate([np.ravel(layer[0]) for side in carry for layer in side]))
    outputs = np.abs(np.concatenate([np.ravel(layer[1]) for side in carry for layer in side]))
    assert 0 < (cells == CLIPS[0]).mean() < 1
    assert 0 < (outputs == np.float64(CLIPS[1])).mean() < 1


def test_words_behind_the_end_are_zeros_in_every_layer():
    """Whatever stands there, not only padding words."""
    rows, lengths = batch_sentences(SENTENCES, SIZE)
    other = np.where((np.arange(LENGTH) < lengths[:, None])[..., None], rows, np.int32(98))
    run = jax.jit(lambda rows: model().layers(rows, lengths))
    assert (other != rows).any()
    chex.assert_trees_all_equal(run(other), run(rows))


@pytest.mark.newest
def test_measures_are_the_oracles(x64):
    tested, fields = model(np.float64), batch(dtype=np.float64)
    params = numbers(tested)
    metrics, _ = jax.jit(lambda fields: tested.metrics(fields))(fields)
    zeros = [(np.zeros(4), np.zeros(3))] * 2
    losses, wrong, weight = [], [], []
    for direction, prefix in enumerate(("", "backward_")):
        losses.append(0.0), wrong.append(0.0), weight.append(fields[f"{prefix}weights"].sum())
        for row in range(BATCH):
            x = vectors(params, fields[f"{prefix}inputs"][row])
            top = oracle.direction(x, stack(params, direction), zeros, CLIPS)[0][-1]
            logits = top @ params["softmax/table_VD"].T + params["softmax/bias_V"]
            for index, target in enumerate(fields[f"{prefix}targets"][row]):
                counts = fields[f"{prefix}weights"][row, index]
                losses[-1] += counts * cross_entropy(logits[index], target)
                wrong[-1] += counts * (logits[index].argmax() != target)
    close(metrics["forward_loss"], (losses[0], weight[0]), 1e-12)
    close(metrics["backward_loss"], (losses[1], weight[1]), 1e-12)
    close(metrics["loss"], (sum(losses), sum(weight)), 1e-12)
    close(metrics["token_error"], (sum(wrong), sum(weight)), 1e-12)


def test_the_gradient_is_pytorchs(x64):
    """Of both directions' loss to every parameter, without clips, which PyTorch's LSTM lacks."""
    torch = pytest.importorskip("torch", reason="PyTorch, the reference here, is not installed")
    tested = model(np.float64, cell_clip=None, projection_clip=None)
    fields = batch(dtype=np.float64)
    graphdef, state = nnx.split(tested)
    total = lambda state: nnx.merge(graphdef, state).metrics(fields)[0]["loss"][0]  # noqa: E731
    value, gradient = jax.jit(jax.value_and_grad(total))(state)
    p = {name: torch.tensor(number, requires_grad=True) for name, number in numbers(tested).items()}
    loss = torch.zeros((), dtype=torch.float64)
    for direction, prefix in enumerate(("", "backward_")):
        e = (
            p["characters/embedding_KE"][torch.tensor(fields[f"{prefix}inputs"]).long()]
            .flatten(0, 1)
            .transpose(1, 2)
        )
        maxima = []
        for k in range(2):
            w, b = p[f"characters/filters/{k}"], p[f"characters/biases/{k}"]
            maxima.append(torch.nn.functional.conv1d(e, w.permute(2, 1, 0), b).max(dim=2)[0])
        x = torch.relu(torch.cat(maxima, dim=1))
        w_carry, b_carry, w_transform, b_transform = (
            p[f"characters/highways/0/{key}"] for key in PARTS
        )
        gate = torch.sigmoid(x @ w_carry + b_carry)
        x = gate * torch.relu(x @ w_transform + b_transform) + (1 - gate) * x
        x = (x @ p["characters/projection/kernel"] + p["characters/projection/bias"]).reshape(
            BATCH, LENGTH, -1
        )
        for layer in range(2):
            lstm = torch.nn.LSTM(3, 4, proj_size=3, batch_first=True, dtype=torch.float64)
            inner, inside, bias, outer = (
                p[f"directions/{direction}/{layer}/{key}"] for key in LSTM
            )
            forget = torch.zeros_like(bias)
            forget[4:8] = 1  # is added when it runs
            named = {
                "weight_ih_l0": inner.T,
                "weight_hh_l0": inside.T,
                "bias_ih_l0": bias,
                "bias_hh_l0": forget,
            }
            y = torch.func.functional_call(lstm, named | {"weight_hr_l0": outer.T}, x)[0]
            x = y + x if layer else y
        logits = x @ p["softmax/table_VD"].T + p["softmax/bias_V"]
        targets = torch.tensor(fields[f"{prefix}targets"]).long()
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), targets, reduction="none"
        )
        loss = loss + (losses * torch.tensor(fields[f"{prefix}weights"])).sum()
    loss.backward()
    close(value, loss.detach(), 1e-12)
    for name, number in numbers(gradient).items():
        close(number, p[name].grad, 1e-10)


@pytest.mark.parametrize(
    ("size", "count"), [("small", 13_593_312), ("medium", 28_027_744), ("original", 93_600_864)]
)
def test_the_encoders_have_the_published_sizes(size, count):
    config = ElmoConfig(**dataclasses.asdict(ElmoOptions.preset(size)), vocab_size=0)
    state = nnx.state(nnx.eval_shape(lambda: Elmo(config, rngs=nnx.Rngs(0))))
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == count


def test_two_batches_with_the_state_are_one_twice_as_long_and_reset_begins_anew():
    run = jax.jit(lambda fields, carry: model().metrics(fields, carry))
    fields = batch(2 * LENGTH) | {"reset": np.zeros(BATCH, np.float32)}
    fresh = model().initial_carry(BATCH)
    halves = [
        {k: v[:, columns] if v.ndim > 1 else v for k, v in fields.items()}
        for columns in (slice(None, LENGTH), slice(LENGTH, None))
    ]
    whole, last = run(fields, fresh)
    first, carry = run(halves[0], fresh)
    second, end = run(halves[1], carry)
    for name in ("loss", "forward_loss", "backward_loss"):
        close(first[name][0] + second[name][0], whole[name][0], 1e-5)
    jax.tree.map(lambda a, b: close(a, b, 1e-5), end, last)
    again, _ = run(halves[0] | {"reset": np.ones(BATCH, np.float32)}, carry)
    close(again["loss"], first["loss"], 1e-6)
    assert abs(float(second["loss"][0]) - float(run(halves[1], fresh)[0]["loss"][0])) > 1e-3


def test_dropout_is_on_what_layers_read_and_on_the_top():
    tested = model(dropout=0.5)
    loss = jax.jit(lambda key: tested.metrics(batch(), (), key)[0]["loss"][0])
    assert loss(jax.random.key(0)) != loss(jax.random.key(1))
    x, carry = jnp.ones((BATCH, LENGTH, 3)), tested.initial_carry(BATCH)
    states = jax.jit(lambda key: tested._read(0, x, carry[0], key=key)[0])(jax.random.key(2))
    for dropped in states:
        assert 0.2 < (np.asarray(dropped) == 0).mean() < 0.8
    calm = np.asarray(jax.jit(lambda x: tested.directions[0][0](x)[0])(states[0]))
    kept = np.asarray(states[1]) != 0
    close(np.asarray(states[1])[kept], 2 * calm[kept], 1e-6)


def test_a_residual_adds_what_the_layer_has_read_with_dropout():
    """The second layer outputs 0: the top is its input, dropped from again and doubled."""
    tested = noisy(lambda: Elmo(dataclasses.replace(CONFIG, dropout=0.5), rngs=nnx.Rngs(0)))
    tested.directions[0][1].outer_NP[...] = jnp.zeros((4, 3))
    x, carry = jnp.ones((BATCH, 40, 3)), tested.initial_carry(BATCH)
    _, below, top = map(
        np.asarray, jax.jit(lambda key: tested._read(0, x, carry[0], key=key)[0])(jax.random.key(2))
    )
    kept = top != 0
    assert 0.15 < kept.mean() < 0.35
    close(top[kept], 2 * below[kept], 1e-6)


def test_all_words_sampled_are_the_full_softmax():
    sampled = jax.jit(lambda key: model(num_sampled=VOCAB).metrics(batch(), (), key)[0])(
        jax.random.key(0)
    )
    expected = jax.jit(lambda: model().metrics(batch())[0])()
    close(sampled["loss"], expected["loss"], 1e-5)
    assert "token_error" not in sampled
    assert model(num_sampled=3).config.stochastic and not CONFIG.stochastic


def test_options_are_completed_by_the_task():
    config = ElmoOptions.preset("small", dropout=0.2).complete(
        types.SimpleNamespace(vocab_size=9), None, 10, WHOLE
    )
    assert isinstance(config, ElmoConfig)
    assert (config.vocab_size, config.cell_dim, config.dropout) == (9, 1024, 0.2)


def test_flops_are_those_of_the_matrices_and_filters():
    """Filters of width w stand at C − w + 1 places."""
    filters = 3 * (6 * 1 * 2 + 4 * 3 * 3)
    encoder = filters + 2 * 5 * 5 + 5 * 3
    lstm = 2 * (16 * (3 + 3) + 4 * 3)
    assert CONFIG.flops_per_token(LENGTH) == 2 * 6 * (encoder + lstm + 3 * VOCAB)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ElmoOptions.preset("tiny"), "unknown size of elmo 'tiny'"),
        (lambda: ElmoOptions(max_characters=6), r"elmo.max_characters must be at least 7, got 6"),
        (lambda: ElmoOptions(dropout=1.5), r"elmo.dropout must lie in \[0, 1\)"),
        (lambda: ElmoOptions(num_layers=0), "elmo.num_layers must be at least 1"),
        (lambda: ElmoOptions(projection_dim=0), "elmo.projection_dim must be at least 1, got 0"),
        (lambda: ElmoOptions(cell_clip=-1.0), "elmo.cell_clip must be at least 0"),
        (
            lambda: dataclasses.replace(CONFIG, projection_dim=0),
            "elmo.projection_dim must be at least 1, got 0",
        ),
        (lambda: ElmoOptions(filters=((1, 2, 3),)), "characters.filters must be pairs"),
        (
            lambda: model(vocab_size=0).metrics(batch()),
            "vocab_size=0 has no output layer and cannot be trained",
        ),
        (
            lambda: model().metrics({"inputs": 0, "targets": 0, "weights": 0}),
            "needs 'backward_inputs' in its batches",
        ),
    ],
)
def test_wrong_input(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
