"""Dropout is a function of its key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.ops.dropout import dropout

ONES = jnp.ones((100, 200))


def test_without_key_or_rate_it_is_the_identity():
    assert dropout(ONES, 0.5, None) is ONES
    assert dropout(ONES, 0.0, jax.random.key(0)) is ONES


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_and_the_mean(rate):
    """Entries are 0 or 1/(1−rate), and the share of zeros is within five standard errors of the rate: the mean is 1."""
    y = np.asarray(dropout(ONES, rate, jax.random.key(0)))
    np.testing.assert_allclose(np.unique(y), [0, 1 / (1 - rate)], rtol=1e-6)
    assert abs((y == 0).mean() - rate) < 5 * (rate * (1 - rate) / y.size) ** 0.5


def test_the_key_decides():
    first, again, other = (dropout(ONES, 0.5, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert 0.4 < np.mean(first != other) < 0.6


def test_entries_are_dropped_one_by_one():
    y = np.asarray(dropout(ONES, 0.5, jax.random.key(0)))
    for axis in (0, 1):
        assert np.all((y.mean(axis) > 0.2) & (y.mean(axis) < 1.8)), "whole rows or columns share their fate"


def test_the_gradient_takes_the_same_entries():
    y, pull = jax.vjp(lambda x: dropout(x, 0.25, jax.random.key(3)), ONES)
    np.testing.assert_array_equal(pull(ONES)[0], y)


def test_infinities_do_not_leak():
    y = dropout(jnp.full((1000,), jnp.inf), 0.5, jax.random.key(0))
    assert set(np.unique(y).tolist()) == {0.0, np.inf}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_type_is_kept(dtype):
    assert jax.eval_shape(lambda x: dropout(x, 0.5, jax.random.key(0)), jnp.ones(3, dtype)).dtype == dtype
