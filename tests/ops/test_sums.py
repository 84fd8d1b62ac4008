"""Sums from each place to the end, of any length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.ops.sums import prefix_sum, suffix_sum, sum_of_turns
from tests.ops.jaxprs import equations


def reverse_cumsum(x):
    return np.flip(np.cumsum(np.flip(x, -1), axis=-1), -1)


def value_and_pull(x, dy):
    y, pull = jax.vjp(suffix_sum, x)
    return y, pull(dy)[0]


compiled = jax.jit(value_and_pull)


@pytest.mark.parametrize("length", [0, 1, 2, 33, 127, 128, 129, 160, 200, 1025])
def test_whole_numbers_are_summed_exactly(length, rng, x64):
    """The gradient is the sum from the start."""
    x, dy = (rng.integers(-1000, 1000, (2, 3, length)).astype(np.float64) for _ in range(2))
    y, dx = compiled(x, dy)
    assert y.dtype == jnp.float64
    np.testing.assert_array_equal(y, reverse_cumsum(x))
    np.testing.assert_array_equal(dx, np.cumsum(dy, axis=-1))


@pytest.mark.parametrize("length", [0, 1, 33, 128, 160, 1025])
def test_sums_from_the_start(length, rng, x64):
    x = rng.integers(-1000, 1000, (2, 3, length)).astype(np.float64)
    np.testing.assert_array_equal(jax.jit(prefix_sum)(x), np.cumsum(x, axis=-1))


@pytest.mark.parametrize("block", [7, 256])
def test_the_block_changes_nothing(block, rng, x64):
    x = rng.integers(-1000, 1000, (300,)).astype(np.float64)
    np.testing.assert_array_equal(jax.jit(lambda x: suffix_sum(x, block))(x), reverse_cumsum(x))


def test_long_sums_of_gates_keep_their_last_bits():
    """4096 gates near 1 in float32: a product in bfloat16 would read another row of the table."""
    rng, sums = np.random.default_rng(0), jax.jit(suffix_sum)
    gates = rng.integers(900, 1025, (3, 4096)) / 1024  # exact in float32, as are all of their sums
    np.testing.assert_array_equal(sums(gates.astype(np.float32)), reverse_cumsum(gates))
    gates = rng.uniform(0.9, 1, (3, 4096)).astype(np.float32)
    # At most 32 + 128 additions stand behind an entry, and each rounds by 2⁻²⁴ of it.
    np.testing.assert_allclose(
        sums(gates), reverse_cumsum(gates.astype(np.float64)), rtol=160 * 2.0**-24
    )


@pytest.mark.parametrize("length", [8, 200])
def test_products_are_asked_for_in_full_precision(length):
    """An accelerator would round the inputs of a product to fewer bits unless asked not to."""
    x = np.ones(length, np.float32)
    products = [e for e in equations(value_and_pull, x, x) if e.primitive.name == "dot_general"]
    assert len(products) >= 2
    assert {e.params["precision"] for e in products} == {(jax.lax.Precision.HIGHEST,) * 2}


@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((5,), jnp.float32),
        ((2, 3, 4, 150), jnp.bfloat16),
        ((0, 7), jnp.float32),
        ((2, 0), jnp.float32),
    ],
)
def test_shape_and_type_are_kept(shape, dtype):
    y = jax.eval_shape(suffix_sum, jax.ShapeDtypeStruct(shape, dtype))
    assert y.shape == shape and y.dtype == dtype


def test_angles_keep_their_precision_over_100000_tokens():
    """In float32 to 1e-5 turns, over 30,000 turns; the plain sum is off by more than 1e-3."""
    rng = np.random.default_rng(0)
    steps = rng.uniform(0.1, 0.5, (1, 100_000)).astype(np.float32)
    exact = np.cumsum(steps.astype(np.float64), axis=1)
    turns = np.asarray(jax.jit(sum_of_turns)(steps), np.float64)
    assert np.abs(turns).max() <= 0.5 + 1e-6
    error = turns - exact
    assert np.abs(error - np.round(error)).max() < 1e-5
    plain = np.cumsum(steps, axis=1).astype(np.float64) - exact
    assert np.abs(plain).max() > 1e-3, "the test says nothing"


@pytest.mark.parametrize("cuts", [(9,), (1, 8), (4, 1, 4)])
def test_sums_of_angles_start_again_with_a_segment(cuts, rng, x64):
    """And continue from call to call; the gradient of a sum is 1 for each step in it."""
    turns = rng.normal(size=(2, 9, 3))
    starts = np.array([[0, 0, 1, 0, 0, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0, 0, 0, 0]], bool)
    before, sums, first = None, [], 0
    run = jax.jit(sum_of_turns)
    for size in cuts:
        here = slice(first, first + size)
        sums.append(run(turns[:, here], starts[:, here], before))
        before, first = sums[-1][:, -1], first + size
    exact = np.zeros_like(turns)
    for b in range(2):
        for t in range(9):
            last = 0 if t == 0 or starts[b, t] else exact[b, t - 1]
            exact[b, t] = last + turns[b, t]
    difference = np.concatenate(sums, axis=1) - exact
    np.testing.assert_allclose(difference, np.round(difference), rtol=0, atol=1e-12)
    gradient = jax.jit(
        jax.grad(lambda turns: sum_of_turns(turns, jnp.asarray(starts))[:, 8].sum())
    )(turns)
    assert gradient[0, :, 0].tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1] and np.all(gradient[1] == 1)
