"""Tables read by numbers, right and wrong ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.ops.lookup import take, take_places
from tests.encodings.cases import jit

TABLE = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(2, 3, 2)).astype(np.float32)


def test_right_numbers_are_rows_to_the_last_bit():
    numbers, places = np.array([[2, 0], [1, 1]], np.int32), np.array([[2, 0, 0, 1], [1, 1, 2, 0]], np.int32)
    np.testing.assert_array_equal(jit(take)(TABLE, numbers), TABLE[numbers])
    np.testing.assert_array_equal(jit(take_places)(X, places), np.stack([X[b][places[b]] for b in range(2)]))


@pytest.mark.parametrize("wrong", [-1, -3, -4, 3, 100])
def test_wrong_numbers_are_loud_and_alone(wrong):
    numbers = np.array([[0, wrong], [wrong, 2]], np.int32)
    for found in (jit(take)(TABLE, numbers), jit(take_places)(X, numbers)):
        np.testing.assert_array_equal(np.isnan(found).all(axis=-1), numbers == wrong)
        np.testing.assert_array_equal(np.isnan(found).any(axis=-1), numbers == wrong)


def test_the_gradient_of_a_table_is_the_sum_over_its_readers():
    numbers = np.array([0, 2, 2], np.int32)
    gradient = jax.grad(lambda table: jnp.sum(take(table, numbers)))(TABLE)
    np.testing.assert_array_equal(gradient, [[1, 1], [0, 0], [2, 2]])
