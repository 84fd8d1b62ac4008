"""Dropout is a function of its key; of attention weights, also of the places of query and key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.ops.dropout import Dropout, dropout

ONES = jnp.ones((4, 50, 100))


def test_without_key_or_rate_it_is_the_identity():
    assert dropout(ONES, 0.5, None) is ONES
    assert dropout(ONES, 0.0, jax.random.key(0)) is ONES


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_and_the_mean(rate):
    """Entries are 0 or 1/(1−rate), the share of zeros within five standard errors of the rate."""
    y = np.asarray(dropout(ONES, rate, jax.random.key(0)))
    np.testing.assert_allclose(np.unique(y), [0, 1 / (1 - rate)], rtol=1e-6)
    assert abs((y == 0).mean() - rate) < 5 * (rate * (1 - rate) / y.size) ** 0.5


def test_the_key_decides():
    first, again, other = (dropout(ONES, 0.5, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert 0.4 < np.mean(first != other) < 0.6


def test_entries_are_dropped_one_by_one():
    y = np.asarray(dropout(ONES, 0.5, jax.random.key(0)))
    for axes in [(0, 1), (0, 2), (1, 2)]:
        assert np.all((y.mean(axes) > 0.2) & (y.mean(axes) < 1.8)), (
            "whole rows or columns share their fate"
        )


def test_padding_does_not_change_what_is_drawn_for_the_first_tokens():
    key = jax.random.key(2)
    padded = dropout(jnp.pad(ONES, ((0, 0), (0, 3), (0, 0))), 0.5, key)
    np.testing.assert_array_equal(padded[:, :50], dropout(ONES, 0.5, key))


def test_the_gradient_takes_the_same_entries():
    y, pull = jax.vjp(lambda x: dropout(x, 0.25, jax.random.key(3)), ONES)
    np.testing.assert_array_equal(pull(ONES)[0], y)


def test_infinities_do_not_leak():
    y = dropout(jnp.full((1, 10, 100), jnp.inf), 0.5, jax.random.key(0))
    assert set(np.unique(y).tolist()) == {0.0, np.inf}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_type_is_kept(dtype):
    assert (
        jax.eval_shape(
            lambda x: dropout(x, 0.5, jax.random.key(0)), jnp.ones((1, 1, 3), dtype)
        ).dtype
        == dtype
    )


def drawn(seed=0, rate=0.5, batch=2, heads=3, q=range(40), k=range(50)):
    """scale_BHLM of all pairs of places."""
    drop = Dropout.create(jax.random.key(seed), rate, batch, heads)
    places = (np.asarray(places, np.int32) for places in (q, k))
    return np.asarray(jax.jit(lambda drop, q, k: drop(q, k, jnp.float32))(drop, *places))


def test_no_key_or_nothing_to_drop_is_no_dropout():
    assert (
        Dropout.create(None, 0.5, 1, 1) is None
        and Dropout.create(jax.random.key(0), 0.0, 1, 1) is None
    )


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_pairs_are_dropped_at_the_rate(rate):
    scale = drawn(rate=rate)
    assert scale.shape == (2, 3, 40, 50) and scale.dtype == np.float32
    np.testing.assert_allclose(np.unique(scale), [0, 1 / (1 - rate)], rtol=1e-6)
    assert abs((scale == 0).mean() - rate) < 5 * (rate * (1 - rate) / scale.size) ** 0.5


def test_a_pair_is_drawn_by_its_places_alone():
    """So any blocks, in any order and with gaps, draw what all pairs at once do."""
    whole = drawn()
    for q, k in [([3], [7]), (np.arange(8, 21), np.arange(33, 36)), ([30, 2, 9], [49, 0, 1, 1])]:
        np.testing.assert_array_equal(
            drawn(q=q, k=k), whole[:, :, np.asarray(q)[:, None], np.asarray(k)]
        )


def test_pairs_heads_examples_and_keys_are_independent():
    """Two masks agree on half of the entries, to five standard errors; so do mirrored pairs."""
    scale = drawn(k=range(40))
    others = {
        "seeds": drawn(seed=1, k=range(40)),
        "examples": scale[::-1],
        "heads": np.roll(scale, 1, axis=1),
        "queries": np.roll(scale, 1, axis=2),
        "keys": np.roll(scale, 1, axis=3),
        "diagonals": np.roll(scale, (1, 1), axis=(2, 3)),
    }
    for name, other in others.items():
        assert abs((scale == other).mean() - 0.5) < 2.5 / scale.size**0.5 * 2**0.5, name
    mirrored = np.tril(scale == scale.swapaxes(2, 3), -1).sum() / (scale.size * 39 / 80)
    assert abs(mirrored - 0.5) < 2.5 / (scale.size / 2) ** 0.5
    for axis in (2, 3):
        assert np.all(np.abs(scale.mean(axis) - 1) < 5 / 40**0.5), (
            "whole rows or columns share their fate"
        )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_scale_has_the_type_asked_for(dtype):
    drop = Dropout.create(jax.random.key(0), 0.5, 1, 1)
    assert drop(np.arange(2), np.arange(3), dtype).dtype == dtype
