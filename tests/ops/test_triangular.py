"""The inverse of a unit lower triangular matrix, also where a power series loses all digits."""

import jax
import numpy as np
import pytest
from jax.test_util import check_grads

from cope_jax.ops.triangular import inverse_of_unit_lower


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_it_is_the_inverse(size, rng, x64):
    strict = np.tril(rng.normal(size=(2, 3, size, size)), -1) / size**0.5
    inverse = jax.jit(inverse_of_unit_lower)(strict)
    np.testing.assert_allclose(inverse, np.linalg.inv(np.eye(size) + strict), rtol=1e-9, atol=1e-9)


def test_reflections_at_equal_tokens_keep_their_digits(rng):
    """64 equal tokens with β = 2: powers of the matrix exceed 10^20, and its inverse is ±2."""
    strict = np.tril(np.full((64, 64), 2.0, np.float32), -1)
    exact = np.linalg.inv(np.eye(64) + strict.astype(np.float64))
    np.testing.assert_allclose(jax.jit(inverse_of_unit_lower)(strict), exact, rtol=0, atol=1e-4)


def test_its_derivatives_both_ways_are_those_of_small_changes(rng, x64):
    """Numbers on and above the diagonal are not read, so they change nothing."""
    numbers = rng.normal(size=(2, 5, 5)) / 2
    check_grads(inverse_of_unit_lower, (numbers,), order=2, modes=("fwd", "rev"), rtol=1e-6)
