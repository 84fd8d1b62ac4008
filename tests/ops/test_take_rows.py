"""Reading rows and adding to them, each the transpose of the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.ops.take_rows import add_to_rows, take_rows
from tests.encodings.cases import jit

SIZE = 5


@pytest.fixture(autouse=True)
def float64(x64):
    """All comparisons of this file are to the last digits."""


def problem(lead, places, seed=0):
    """Values of rows, places with repetitions, and values at the places."""
    rng = np.random.default_rng(seed)
    at = rng.integers(0, SIZE, (*lead, places), dtype=np.int32)
    return rng.normal(size=(*lead, SIZE)), at, rng.normal(size=(*lead, places))


def added(places, values):
    rows = np.zeros((*places.shape[:-1], SIZE))
    for lead in np.ndindex(places.shape[:-1]):
        np.add.at(rows[lead], places[lead], values[lead])
    return rows


def value_and_pull(z, at, dy):
    y, pull = jax.vjp(lambda z: take_rows(z, at), z)
    return y, pull(dy)[0]


@pytest.mark.parametrize("lead, places", [((), 7), ((3,), 7), ((2, 1, 3), 9), ((2,), 0), ((0,), 4)])
def test_values_and_gradient(lead, places):
    z, at, dy = problem(lead, places)
    y, dz = jit(value_and_pull)(z, at, dy)
    np.testing.assert_array_equal(y, np.take_along_axis(z, at, -1))
    np.testing.assert_allclose(dz, added(at, dy), rtol=0, atol=1e-14)


def test_several_additions_go_to_the_same_rows():
    (_, first, a), (_, second, b) = problem((2, 3), 4), problem((2, 3), 6, seed=1)
    rows = jit(lambda a, b: add_to_rows(SIZE, (first, a), (second, b)))(a, b)
    np.testing.assert_allclose(rows, added(first, a) + added(second, b), rtol=0, atol=1e-14)


@pytest.mark.parametrize("wrap", [jax.vmap, lambda f: jax.vmap(jax.vmap(f))], ids=["1", "2"])
def test_vmap_changes_nothing(wrap):
    z, at, dy = problem((2, 3), 7)
    y, dz = jit(wrap(value_and_pull))(z, at, dy)
    np.testing.assert_array_equal(y, np.take_along_axis(z, at, -1))
    np.testing.assert_allclose(dz, added(at, dy), rtol=0, atol=1e-14)


def test_places_carry_no_gradient():
    z, at, dy = problem((2,), 3)
    pull = jax.vjp(take_rows, jnp.asarray(z), jnp.asarray(at))[1]
    assert pull(jnp.asarray(dy))[1].dtype == jax.dtypes.float0
