"""Recurrent layers against the NumPy oracle and PyTorch; gradients also against differences."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax.errors import ConfigError
from cope_jax.layers.recurrent import Bidirectional, Cell, Recurrent, clear
from tests.models.noisy import close, noisy, numbers
from tests.oracle import recurrent as oracle
from tests.oracle.differences import slopes

INPUTS, LENGTH, LENGTHS = 2, 5, np.array([5, 3, 1], np.int32)
CELLS = {
    "tanh": Cell("tanh", width=3),
    "lstm": Cell("lstm", width=3, forget_bias=1.0),
    "projection": Cell("lstm", width=3, projection=2),
    # So tight that both are met, and not everywhere.
    "clips": Cell(
        "lstm", width=3, projection=2, cell_clip=0.4, projection_clip=0.1, forget_bias=1.0
    ),
}
WEIGHTS = np.random.default_rng(3).normal(size=(3, LENGTH, 3))


def problem(cell, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(3, LENGTH, INPUTS))
    return x, tuple(rng.normal(scale=0.3, size=state.shape) for state in cell.initial_carry(3))


def by_oracle(cell, params, x, carry, reverse):
    arguments = [params[name] for name in ("inner_DG", "state_PG", "bias_G")]
    layer = functools.partial(oracle.tanh_layer)
    options = {}
    if cell.name == "lstm":
        layer = functools.partial(oracle.lstm_layer)
        options = {
            "w_p": params.get("outer_NP"),
            "cell_clip": cell.cell_clip or np.inf,
            "projection_clip": cell.projection_clip or np.inf,
            "forget_bias": cell.forget_bias,
        }
    return oracle.batch(
        lambda row, *state: layer(row, *arguments, *state, **options),
        x,
        LENGTHS,
        carry,
        reverse=reverse,
    )


def total(outputs):
    """A number that depends on every output and on the last state, each in its own way."""
    y, carry = outputs
    weights = WEIGHTS.astype(y.dtype)[:, :, : y.shape[-1]]
    return (y * weights).sum() + sum((0.5 + k) * (state**2).sum() for k, state in enumerate(carry))


@pytest.mark.parametrize(
    "reverse",
    [False, pytest.param(True, marks=pytest.mark.newest)],
    ids=["forward", "reverse"],
)
@pytest.mark.parametrize("name", CELLS)
def test_values_and_gradients_are_the_oracles(name, reverse, x64):
    cell = CELLS[name]
    graphdef, state = nnx.split(
        noisy(lambda: Recurrent(cell, INPUTS, rngs=nnx.Rngs(0)), np.float64)
    )
    x, carry = problem(cell)

    @jax.jit
    def run(state, x, carry):
        def forward(state, x, carry):
            outputs = nnx.merge(graphdef, state)(x, carry, lengths_B=LENGTHS, reverse=reverse)
            return total(outputs), outputs

        return jax.value_and_grad(forward, argnums=(0, 1, 2), has_aux=True)(state, x, carry)

    (_, (y, last)), (dstate, dx, dcarry) = run(state, x, carry)
    params = numbers(state)
    expected, expected_last = by_oracle(cell, params, x, carry, reverse)
    close(y, expected, 1e-13)
    for actual, wanted in zip(last, expected_last, strict=True):
        close(actual, wanted, 1e-13)

    named = params | {"x": x} | {f"carry{k}": value for k, value in enumerate(carry)}

    def value(named):
        states = tuple(named[f"carry{k}"] for k in range(len(carry)))
        return total(by_oracle(cell, named, named["x"], states, reverse))

    actual = numbers(dstate) | {"x": dx} | {f"carry{k}": value for k, value in enumerate(dcarry)}
    assert actual.keys() == named.keys()
    for _, slope, difference in slopes(value, named, actual):
        close(slope, difference, 2e-9)  # differences of step 1e-5: their own error


def test_the_clips_of_that_test_are_met(x64):
    """And not by all entries, or a bound in the wrong place would not be seen."""
    cell = CELLS["clips"]
    params = numbers(noisy(lambda: Recurrent(cell, INPUTS, rngs=nnx.Rngs(0)), np.float64))
    x, carry = problem(cell)
    y, (c, _) = by_oracle(cell, params, x, carry, False)
    y = y[0]
    assert 0 < (np.abs(y) == 0.1).mean() < 1
    assert 0 < (np.abs(c) == 0.4).mean() < 1


@pytest.mark.parametrize("name", CELLS)
def test_two_halves_with_the_state_are_the_whole(name):
    cell = CELLS[name]
    layer = noisy(lambda: Recurrent(cell, INPUTS, rngs=nnx.Rngs(0)))
    x = problem(cell)[0].astype(np.float32)
    run = jax.jit(lambda x, carry: layer(x, carry))
    whole, last = run(x, layer.initial_carry(3))
    first, carry = run(x[:, :2], layer.initial_carry(3))
    second, end = run(x[:, 2:], carry)
    close(jnp.concatenate([first, second], axis=1), whole, 1e-6)
    jax.tree.map(lambda a, b: close(a, b, 1e-6), end, last)


def torch_layer(torch, kind, bidirectional, **options):
    torch.manual_seed(0)
    layer = kind(
        INPUTS, 3, batch_first=True, bidirectional=bidirectional, dtype=torch.float64, **options
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    return layer


def from_torch(direction, layer, suffix):
    """Takes over a direction's parameters, with both of its biases in one."""
    value = {name: p.detach().numpy() for name, p in layer.named_parameters()}
    direction.inner_DG[...] = jnp.asarray(value[f"weight_ih_l0{suffix}"].T)
    direction.state_PG[...] = jnp.asarray(value[f"weight_hh_l0{suffix}"].T)
    direction.bias_G[...] = jnp.asarray(value[f"bias_ih_l0{suffix}"] + value[f"bias_hh_l0{suffix}"])
    if direction.outer_NP is not None:
        direction.outer_NP[...] = jnp.asarray(value[f"weight_hr_l0{suffix}"].T)


@pytest.mark.parametrize("name", ["tanh", "lstm", "projection"])
def test_both_directions_are_those_of_pytorch(name, x64):
    """Ragged rows are packed there; gradients of parameters and inputs are compared, too."""
    torch = pytest.importorskip("torch", reason="PyTorch, the reference here, is not installed")
    cell = {
        "tanh": Cell("tanh", 3),
        "lstm": Cell(width=3),
        "projection": Cell(width=3, projection=2),
    }[name]
    options = {"proj_size": 2} if name == "projection" else {}
    reference = torch_layer(
        torch, torch.nn.RNN if name == "tanh" else torch.nn.LSTM, True, **options
    )
    layer = noisy(lambda: Bidirectional(cell, INPUTS, rngs=nnx.Rngs(0)), np.float64)
    from_torch(layer.forward, reference, "")
    from_torch(layer.backward, reference, "_reverse")
    graphdef, state = nnx.split(layer)
    x, _ = problem(cell)
    weights = np.random.default_rng(5).normal(size=(3, LENGTH, 2 * cell.outputs))

    @jax.jit
    def run(state, x):
        def forward(state, x):
            y, carry = nnx.merge(graphdef, state)(x, lengths_B=LENGTHS)
            return (y * weights).sum(), (y, carry)

        return jax.value_and_grad(forward, argnums=(0, 1), has_aux=True)(state, x)

    (_, (y, carry)), (dstate, dx) = run(state, x)
    x_torch = torch.tensor(x, requires_grad=True)
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        x_torch, torch.tensor(LENGTHS), batch_first=True
    )
    packed, last = reference(packed)
    expected, _ = torch.nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
    (expected * torch.tensor(weights)).sum().backward()
    close(y, expected.detach(), 1e-12)
    hidden = last if name == "tanh" else last[0]
    for actual, wanted in zip(carry, hidden, strict=True):
        close(actual[-1], wanted.detach(), 1e-12)
    close(dx, x_torch.grad, 1e-12)
    actual = numbers(dstate)
    for suffix, side in (("", "forward"), ("_reverse", "backward")):
        close(actual[f"{side}/inner_DG"], getattr(reference, f"weight_ih_l0{suffix}").grad.T, 1e-12)
        close(actual[f"{side}/state_PG"], getattr(reference, f"weight_hh_l0{suffix}").grad.T, 1e-12)
        close(actual[f"{side}/bias_G"], getattr(reference, f"bias_hh_l0{suffix}").grad, 1e-12)
        if name == "projection":
            close(
                actual[f"{side}/outer_NP"],
                getattr(reference, f"weight_hr_l0{suffix}").grad.T,
                1e-12,
            )


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_what_stands_behind_the_end_is_not_read(reverse):
    """Not even a NaN: neither in what comes out nor in any gradient."""
    graphdef, state = nnx.split(
        noisy(lambda: Recurrent(CELLS["projection"], INPUTS, rngs=nnx.Rngs(0)))
    )
    x = problem(CELLS["projection"])[0].astype(np.float32)
    real = (np.arange(LENGTH) < LENGTHS[:, None])[..., None]

    @jax.jit
    def run(state, x):
        def outputs(state, x):
            return total(nnx.merge(graphdef, state)(x, lengths_B=LENGTHS, reverse=reverse))

        return jax.value_and_grad(outputs, argnums=(0, 1))(state, x)

    expected = run(state, np.where(real, x, np.float32(0)))
    assert np.isfinite(expected[0])
    chex.assert_trees_all_equal(run(state, np.where(real, x, np.float32(np.nan))), expected)
    assert not np.asarray(expected[1][1])[~real[..., 0]].any()


def test_the_matrices_are_counted():
    for cell in CELLS.values():
        layer = nnx.eval_shape(lambda cell=cell: Recurrent(cell, INPUTS, rngs=nnx.Rngs(0)))
        sizes = [leaf.size for leaf in jax.tree.leaves(nnx.state(layer)) if leaf.ndim == 2]
        assert sum(sizes) == cell.matrices(INPUTS)


def test_clear_keeps_the_rows_that_are_not_reset():
    carry = ((jnp.full((3, 2), jnp.inf), jnp.ones((3, 4))),)
    ((c, h),) = clear(carry, jnp.array([0.0, 1.0, 0.0]))
    assert c[1].tolist() == [0, 0]
    assert h[:, 0].tolist() == [1, 0, 1]
    assert clear(carry, None) is carry


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "gru"}, r"unknown cell.name 'gru'"),
        ({"width": 0}, r"cell.width must be at least 1, got 0"),
        ({"cell_clip": -1.0}, r"cell.cell_clip must be at least 0, got -1.0"),
        ({"name": "tanh", "projection": 2}, r"a tanh cell has no projection"),
        (
            {"projection_clip": 0.1},
            r"cell.projection_clip=0.1 needs a projection: set cell.projection",
        ),
    ],
)
def test_wrong_cells(options, message):
    with pytest.raises(ConfigError, match=message):
        Cell(**options)
