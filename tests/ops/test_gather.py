"""Reading rows and adding to them, each the transpose of the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.ops import gather
from cope_jax.ops.gather import lookup, row_products, take_rows, take_tokens, take_windows

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
    y, dz = jax.jit(value_and_pull)(z, at, dy)
    np.testing.assert_array_equal(y, np.take_along_axis(z, at, -1))
    np.testing.assert_allclose(dz, added(at, dy), rtol=0, atol=1e-14)


@pytest.mark.parametrize("split", [False, True])
def test_windows_are_neighbouring_entries(split, monkeypatch):
    monkeypatch.setattr(gather, "_may_be_split", lambda: split)
    z, at, dy = problem((2, 3), 4)
    at = np.minimum(at, z.shape[-1] - 2)
    windows, pull = jax.vjp(lambda z: take_windows(z, jnp.asarray(at), 2), jnp.asarray(z))
    for step in (0, 1):
        np.testing.assert_array_equal(windows[..., step], np.take_along_axis(z, at + step, -1))
    dz = pull(jnp.stack([dy, 2 * dy], -1))[0]
    np.testing.assert_allclose(dz, added(at, dy) + added(at + 1, 2 * dy), rtol=0, atol=1e-14)


def test_forward_mode():
    z, at, _ = problem((2, 3), 4)
    y, dy = jax.jvp(lambda z: take_rows(z, at), (jnp.asarray(z),), (jnp.asarray(2 * z),))
    np.testing.assert_array_equal(dy, 2 * y)


@pytest.mark.parametrize("wrap", [jax.vmap, lambda f: jax.vmap(jax.vmap(f))], ids=["1", "2"])
def test_vmap_changes_nothing(wrap):
    z, at, dy = problem((2, 3), 7)
    y, dz = jax.jit(wrap(value_and_pull))(z, at, dy)
    np.testing.assert_array_equal(y, np.take_along_axis(z, at, -1))
    np.testing.assert_allclose(dz, added(at, dy), rtol=0, atol=1e-14)


def test_indices_carry_no_gradient():
    z, at, dy = problem((2,), 3)
    pull = jax.vjp(take_rows, jnp.asarray(z), jnp.asarray(at))[1]
    assert pull(jnp.asarray(dy))[1].dtype == jax.dtypes.float0


def products_and_pull(q, table, rows, seen, dy):
    y, pull = jax.vjp(lambda q, table: row_products(q, table, rows, seen), q, table)
    return y, *pull(jnp.where(seen[:, None], dy, 0))


@pytest.mark.parametrize(
    "stride, table_rows", [(1, 30), (1, 6), (1, 5), (3, 30)], ids=["window", "6", "5", "apart"]
)
def test_products_of_queries_with_rows(stride, table_rows):
    rng = np.random.default_rng(0)
    q, table = rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(table_rows, 5))
    distance = stride * (4 + np.arange(4)[:, None] - np.arange(3)[None])
    rows = np.clip(distance, 0, table_rows - 1)[None].astype(np.int32)
    seen, dy = np.ones(rows.shape, bool), rng.normal(size=(2, 3, 4, 3))
    # A pair that is not seen may be anywhere.
    rows[0, 1, 2], seen[0, 1, 2] = 0, False
    y, dq, dtable = jax.jit(products_and_pull)(q, table, rows, seen, dy)
    visible = np.where(seen[:, None], dy, 0)
    kept = np.broadcast_to(seen[:, None], y.shape)
    expected = np.einsum("bhlk,lmk->bhlm", q, table[rows[0]])
    np.testing.assert_allclose(y[kept], expected[kept], rtol=0, atol=1e-13)
    np.testing.assert_allclose(
        dq, np.einsum("bhlm,lmk->bhlk", visible, table[rows[0]]), rtol=0, atol=1e-13
    )
    by_row = np.zeros_like(table)
    np.add.at(by_row, rows[0], np.einsum("bhlm,bhlk->lmk", visible, q))
    np.testing.assert_allclose(dtable, by_row, rtol=0, atol=1e-13)


def test_products_leave_rows_out_that_no_pair_reads():
    """A product with the whole table would multiply the NaN of its other rows by 0."""
    q, table = jnp.ones((1, 1, 4, 5)), jnp.full((30, 5), jnp.nan).at[10:16].set(1.0)
    rows = jnp.asarray(10 + 2 + np.arange(4)[:, None] - np.arange(3)[None], jnp.int32)[None]
    y, dq, _ = products_and_pull(q, table, rows, rows > 0, jnp.ones((1, 1, 4, 3)))
    assert jnp.isfinite(y).all() and jnp.isfinite(dq).all()


TABLE = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(2, 3, 2)).astype(np.float32)


def test_right_numbers_are_rows_to_the_last_bit():
    numbers = np.array([[2, 0], [1, 1]], np.int32)
    places = np.array([[2, 0, 0, 1], [1, 1, 2, 0]], np.int32)
    np.testing.assert_array_equal(jax.jit(lookup)(TABLE, numbers), TABLE[numbers])
    np.testing.assert_array_equal(
        jax.jit(take_tokens)(X, places), np.stack([X[b][places[b]] for b in range(2)])
    )


@pytest.mark.parametrize("wrong", [-1, -3, -4, 3, 100])
def test_wrong_numbers_are_loud_and_alone(wrong):
    numbers = np.array([[0, wrong], [wrong, 2]], np.int32)
    for rows in (jax.jit(lookup)(TABLE, numbers), jax.jit(take_tokens)(X, numbers)):
        np.testing.assert_array_equal(np.isnan(rows).all(axis=-1), numbers == wrong)
        np.testing.assert_array_equal(np.isnan(rows).any(axis=-1), numbers == wrong)


def test_an_index_in_a_byte_is_no_other_row():
    """The number of rows, which stands for a wrong index, is 44 in a byte."""
    assert np.isnan(lookup(jnp.ones(300), jnp.array([-1, 1], jnp.int8))).tolist() == [True, False]


def test_the_gradient_of_a_table_is_the_sum_over_its_readers():
    numbers = np.array([0, 2, 2], np.int32)
    gradient = jax.grad(lambda table: jnp.sum(lookup(table, numbers)))(TABLE)
    np.testing.assert_array_equal(gradient, [[1, 1], [0, 0], [2, 2]])
