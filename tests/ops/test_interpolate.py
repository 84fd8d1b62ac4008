"""Interpolation against its formula, differences, and what autodiff makes of the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.ops.interpolate import _look_up, _sum_over_row, interpolate
from tests.oracle.differences import gradients as differences

LEAD, SIZE, PLACES = (2, 3), 5, 9


@pytest.fixture(autouse=True)
def float64(x64):
    """All comparisons of this file are to the last digits."""


def hat(z, p):
    """Σ_n z[n] max(0, 1 − |p − n|), place by place."""
    y = np.zeros(p.shape)
    for at in np.ndindex(p.shape):
        for n in range(z.shape[-1]):
            y[at] += z[at[:-1]][n] * max(0.0, 1 - abs(p[at] - n))
    return y


def problem(seed=0):
    """Values, places away from the whole numbers, and a cotangent."""
    rng = np.random.default_rng(seed)
    p = rng.integers(0, SIZE - 1, (*LEAD, PLACES)) + rng.uniform(0.1, 0.9, (*LEAD, PLACES))
    return rng.normal(size=(*LEAD, SIZE)), p, rng.normal(size=p.shape)


def value_and_pull(z, p, dy):
    y, pull = jax.vjp(interpolate, z, p)
    return y, *pull(dy)


compiled = jax.jit(value_and_pull)


def equal(actual, expected, atol=1e-14):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def test_values_and_gradients():
    """The weighted neighbours, and differences of them."""
    z, p, dy = problem()
    y, dz, dp = compiled(z, p, dy)
    equal(y, hat(z, p))
    expected = differences(lambda at: float(np.sum(dy * hat(at["z"], at["p"]))), {"z": z, "p": p})
    equal(dz, expected["z"], atol=1e-9)
    equal(dp, expected["p"], atol=1e-9)


def test_tables_in_one_row():
    """A table that begins at `first`, with its ends, gives what it gives alone."""
    z, p, dy = problem()
    p[..., :2] = 0, SIZE - 1
    row = np.concatenate([np.full_like(z, 7), z, np.full_like(z, 9)], axis=-1)
    first = np.full(p.shape, SIZE, np.int32)
    y, pull = jax.vjp(lambda row, p: interpolate(row, p, first=jnp.asarray(first)), row, p)
    (drow, dp), expected = pull(dy), compiled(z, p, dy)
    equal(y, expected[0])
    equal(drow, np.pad(expected[1], [(0, 0)] * (z.ndim - 1) + [(SIZE, SIZE)]))
    equal(dp, expected[2])
    equal(jax.jit(_sum_over_row)(row, p, first)[0], expected[0])


def test_whole_places_read_one_entry():
    """With 0 and N−1, the ends of the table, where weight and gradient of the neighbour are 0."""
    z, _, _ = problem()
    p = np.broadcast_to(np.arange(PLACES, dtype=np.float64) % SIZE, (*LEAD, PLACES))
    dy = np.random.default_rng(1).normal(size=p.shape)
    y, dz, dp = compiled(z, p, dy)
    np.testing.assert_array_equal(y, z[..., np.arange(PLACES) % SIZE])
    again = np.pad(dy, [(0, 0), (0, 0), (0, 2 * SIZE - PLACES)])
    np.testing.assert_array_equal(dz, again[..., :SIZE] + again[..., SIZE:])
    np.testing.assert_array_equal(dp, np.zeros(p.shape))


def test_the_slope_is_what_forward_mode_has():
    """Between the integers and at them, where it is 0; to the last bit what the gradient has."""
    z, p, _ = problem()
    p[..., ::3] = np.round(p[..., ::3])
    slope = jax.jit(lambda p: jax.jvp(lambda p: interpolate(z, p), (p,), (jnp.ones_like(p),))[1])(p)
    np.testing.assert_array_equal(slope, compiled(z, p, np.ones(p.shape))[2])
    for at in np.ndindex(p.shape):
        row, position = z[at[:-1]], p[at]
        equal(slope[at], row[int(np.ceil(position))] - row[int(np.floor(position))], atol=0)
    assert np.all(slope[..., ::3] == 0) and np.all(slope[..., 1::3] != 0)


def test_just_inside_the_ends():
    z, p = np.array([1.0, 3.0, -4.0]), np.array([1e-12, 2 - 1e-12])
    y, dz, dp = compiled(z, p, np.ones(2))
    equal(y, [1, -4], atol=1e-10)
    equal(dz, [1, 0, 1], atol=1e-10)
    equal(dp, [2, -7])


def test_a_table_of_one_entry():
    y, dz, dp = compiled(np.array([[2.5]]), np.zeros((1, 3)), np.ones((1, 3)))
    assert (y.tolist(), dz.tolist(), dp.tolist()) == ([[2.5] * 3], [[3.0]], [[0.0] * 3])


def test_autodiff_of_the_formula_agrees():
    """The hand-written gradient is that of the paper's listing, where floor and ceil carry none."""

    def listing(z, p):
        floor, ceil = (jax.lax.stop_gradient(f(p)).astype(jnp.int32) for f in (jnp.floor, jnp.ceil))
        w = p - jax.lax.stop_gradient(jnp.floor(p))
        return jnp.take_along_axis(z, ceil, -1) * w + jnp.take_along_axis(z, floor, -1) * (1 - w)

    z, p, dy = problem(1)
    p[..., :3] = np.round(p[..., :3])
    expected = jax.jit(lambda z, p, dy: jax.vjp(listing, z, p)[1](dy))(z, p, dy)
    for gradient, other in zip(compiled(z, p, dy)[1:], expected, strict=True):
        equal(gradient, other)


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.vmap, lambda f: jax.vmap(jax.vmap(f))], ids=["eager", "1", "2"]
)
def test_vmap_and_jit_change_nothing(wrap):
    arrays = [jnp.asarray(a) for a in problem()]
    wrapped = wrap(value_and_pull)
    results = wrapped(*arrays) if wrapped is value_and_pull else jax.jit(wrapped)(*arrays)
    for result, whole in zip(results, compiled(*arrays), strict=True):
        equal(result, whole)


def test_one_row_of_values_for_many_places():
    """vmap over the places alone, where all share the values: the gradients add up."""
    z, p, dy = problem()
    z, p, dy = z[0, 0], p[:, 0], dy[:, 0]

    @jax.jit
    def run(z, p, dy):
        y, pull = jax.vjp(lambda z: jax.vmap(interpolate, in_axes=(None, 0))(z, p), z)
        return y, pull(dy)[0]

    y, dz = run(z, p, dy)
    equal(y, hat(np.stack([z, z]), p))
    equal(
        dz,
        differences(lambda at: float(np.sum(dy * hat(np.stack([at["z"]] * 2), p))), {"z": z})["z"],
        atol=1e-9,
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_types_are_kept(dtype):
    arrays = [jax.ShapeDtypeStruct(a.shape, dtype) for a in problem()]
    assert [a.dtype for a in jax.eval_shape(value_and_pull, *arrays)] == [dtype] * 3


def everywhere(dtype):
    """Values and places of a type: between integers, at them, at both ends, clipped to the last."""
    z, p, dy = (a.astype(dtype) for a in problem(2))
    p[..., :4] = np.round(p[..., :4])
    p[..., 4], p[..., 5] = 0, SIZE - 1
    p[..., 6] = np.minimum(p[..., 6] + SIZE, SIZE - 1)
    p[0, 0, 7] = np.nextafter(dtype(2), dtype(0))
    assert p.min() == 0 and p.max() == SIZE - 1
    return z, p, dy


TOLERANCES = {np.float32: 1e-6, np.float64: 1e-14}


@pytest.mark.newest
@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: dtype.__name__)
def test_sums_over_rows_are_what_is_looked_up(dtype):
    z, p, _ = everywhere(dtype)
    for summed, expected in zip(jax.jit(_sum_over_row)(z, p), jax.jit(_look_up)(z, p), strict=True):
        assert summed.dtype == expected.dtype == dtype
        equal(summed, expected, atol=TOLERANCES[dtype])
    slope = jax.jit(_sum_over_row)(z, p)[1]
    whole = p == np.round(p)
    assert (slope[whole] == 0).all() and (slope[~whole] != 0).all()


@pytest.fixture
def on_tpu(monkeypatch):
    """Traces what a TPU would run."""
    jax.clear_caches()  # what was traced before is for a CPU, and what is traced now for none
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *arguments, tpu, default: tpu(*arguments)
    )
    yield
    jax.clear_caches()


@pytest.mark.newest
@pytest.mark.parametrize("dtype", [np.float64, pytest.param(np.float32, marks=pytest.mark.slow)])
def test_a_tpu_has_the_same_values_and_gradients(dtype, request):
    arrays = everywhere(dtype)
    expected = jax.jit(lambda *arrays: value_and_pull(*arrays))(*arrays)
    request.getfixturevalue("on_tpu")
    program = jax.jit(lambda *arrays: value_and_pull(*arrays))
    text = str(jax.make_jaxpr(value_and_pull)(*arrays))
    assert "gather" not in text and "scatter" not in text
    for actual, exact in zip(program(*arrays), expected, strict=True):
        assert actual.dtype == dtype
        equal(actual, exact, atol=4 * TOLERANCES[dtype])
    # A table of one entry.
    y, dz, dp = program(*(np.asarray(a, dtype) for a in ([[2.5]], [[0.0] * 3], [[1.0] * 3])))
    assert (y.tolist(), dz.tolist(), dp.tolist()) == ([[2.5] * 3], [[3.0]], [[0.0] * 3])


def test_second_derivatives_are_those_of_the_formula():
    """Hessian-vector products, forward over reverse, against differences of the gradient."""
    z, p, dy = problem()

    @jax.jit
    def gradient(z, p):
        return jax.grad(lambda z, p: jnp.sum(dy * interpolate(z, p) ** 2), argnums=(0, 1))(z, p)

    tangents = tuple(np.random.default_rng(2).normal(size=a.shape) for a in (z, p))
    exact = jax.jit(lambda z, p: jax.jvp(gradient, (z, p), tangents)[1])(z, p)
    step = 1e-6
    more, less = (
        gradient(*(a + sign * step * t for a, t in zip((z, p), tangents, strict=True)))
        for sign in (1, -1)
    )
    for product, above, below in zip(exact, more, less, strict=True):
        equal(product, (above - below) / (2 * step), atol=1e-7)
