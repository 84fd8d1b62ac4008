"""Samplers of positions: in range, in order, and as random as they say."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax import encodings
from cope_jax.errors import ConfigError
from cope_jax.positions import SAMPLERS, consecutive, floats, offset, per_segment, randomised

MANY = 4096
every_sampler = pytest.mark.parametrize("name", [n for n in SAMPLERS.names() if n != "floats"])


@functools.cache
def sample(name, length, limit, seed=0, batch=MANY):
    sampler = SAMPLERS.get(name)
    return np.asarray(jax.jit(lambda key: sampler(key, batch, length, limit))(jax.random.key(seed)))


def near(counts, probability, draws):
    """Each count is within five standard errors of its expectation."""
    return np.all(
        np.abs(counts - probability * draws) < 5 * (probability * (1 - probability) * draws) ** 0.5
    )


def test_the_names():
    assert SAMPLERS.names() == ("consecutive", "floats", "offset", "randomised")


@every_sampler
@pytest.mark.parametrize("length, limit", [(1, 1), (1, 5), (4, 4), (4, 5), (4, 9)])
def test_positions_are_below_the_limit_and_grow(name, length, limit):
    drawn = sample(name, length, limit)
    assert drawn.dtype == np.int32 and drawn.shape in [(MANY, length), (1, length)]
    assert (drawn >= 0).all() and (drawn < limit).all() and (np.diff(drawn, axis=1) > 0).all()
    if length == limit:
        np.testing.assert_array_equal(drawn, np.broadcast_to(np.arange(length), drawn.shape))


@every_sampler
def test_too_long_a_sequence_is_an_error(name):
    with pytest.raises(
        ConfigError, match="6 tokens does not fit below max_position=5: raise max_position"
    ):
        jax.eval_shape(lambda key: SAMPLERS.get(name)(key, 2, 6, 5), jax.random.key(0))


def test_consecutive_positions_are_known_while_tracing():
    """NumPy, whatever the key: a table too short for them is an error rather than NaN."""
    drawn = jax.eval_shape(lambda key: assert_numpy(consecutive(key, 3, 4, 9)), jax.random.key(0))
    assert drawn.shape == (1, 4)


def assert_numpy(drawn):
    assert isinstance(drawn, np.ndarray) and drawn.tolist() == [[0, 1, 2, 3]]
    return drawn


def test_every_start_that_fits_is_as_likely():
    drawn = sample("offset", 4, 9)
    np.testing.assert_array_equal(drawn - drawn[:, :1], np.broadcast_to(np.arange(4), drawn.shape))
    assert near(np.bincount(drawn[:, 0], minlength=6), 1 / 6, MANY)


def test_every_subset_is_as_likely():
    drawn = sample("randomised", 2, 5)
    subsets = list(itertools.combinations(range(5), 2))
    counts = np.array([(drawn == subset).all(axis=1).sum() for subset in subsets])
    assert counts.sum() == MANY and near(counts, 1 / len(subsets), MANY)


def test_floats_are_uniform_sorted_and_any_number_of_them_fits():
    drawn = np.asarray(jax.jit(lambda key: floats(key, MANY, 12, 8))(jax.random.key(0)))
    assert drawn.dtype == np.float32 and (np.diff(drawn, axis=1) >= 0).all()
    assert near(np.bincount(drawn.astype(int).ravel(), minlength=8), 1 / 8, drawn.size)
    # The smallest of 12 uniform numbers is below 8 x with probability 1 − (1 − x)¹².
    assert near((drawn[:, 0] < 1).sum(), 1 - (7 / 8) ** 12, MANY)


@pytest.mark.parametrize("name", ["offset", "randomised"])
def test_rows_are_drawn_independently_and_from_the_key(name):
    drawn, other = sample(name, 4, 9), sample(name, 4, 9, seed=1)
    np.testing.assert_array_equal(
        drawn, np.asarray(SAMPLERS.get(name)(jax.random.key(0), MANY, 4, 9))
    )
    assert (drawn != other).any()
    # Two rows agree as often as two draws do: one in six starts, one in 126 subsets of four of
    # nine.
    agree = (drawn[::2] == drawn[1::2]).all(axis=1).sum()
    assert near(agree, {"offset": 1 / 6, "randomised": 1 / 126}[name], MANY // 2)


@pytest.mark.parametrize("sampler", [offset, randomised])
def test_a_learned_table_of_the_limit_knows_every_position(sampler):
    """And one that is shorter shows NaN."""
    sizes = {"num_heads": 1, "head_dim": 4, "rngs": nnx.Rngs(0)}
    whole, short = (encodings.create("learned", max_length=rows, **sizes) for rows in (9, 5))

    @jax.jit
    def embed(key):
        places = sampler(key, 64, 4, 9)
        x = jnp.zeros((64, 4, 4))
        return places, whole.embed(x, places), short.embed(x, places)

    places, embedded, beyond = embed(jax.random.key(0))
    np.testing.assert_array_equal(embedded, whole.table[...][places])
    np.testing.assert_array_equal(np.isnan(beyond).all(axis=-1), places >= 5)
    assert (places >= 5).any()


def test_positions_restart_with_each_document():
    rng = np.random.default_rng(0)
    # Ids need not grow.
    segments = np.sort(rng.integers(0, 5, (6, 12)), axis=1)[:, ::-1].astype(np.int32)
    segments[0] = [1, 1, 2, 2, 1, 1, 1, 3, 0, 0, 0, 0]  # one comes again
    segments[1] = 7
    expected = np.zeros_like(segments)
    for row, at in np.ndindex(segments.shape):
        if at and segments[row, at] == segments[row, at - 1]:
            expected[row, at] = expected[row, at - 1] + 1
    actual = jax.jit(per_segment)(segments)
    assert actual.dtype == jnp.int32
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(per_segment(segments[:, :1]), expected[:, :1])
