"""Scaled products of queries and keys."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.ops.grouped_matmul import content_logits


@pytest.mark.parametrize("heads, groups", [(1, 1), (4, 4), (4, 1), (6, 2), (6, 3)])
def test_values_of_each_pair(heads, groups, rng, x64):
    """Query head h meets key head ⌊h·G/H⌋, and the product is divided by √K."""
    q, k = rng.normal(size=(2, heads, 3, 5)), rng.normal(size=(2, groups, 4, 5))
    logits = content_logits(jnp.asarray(q), jnp.asarray(k))
    assert logits.shape == (2, heads, 3, 4) and logits.dtype == jnp.float64
    for b, h, i, j in np.ndindex(logits.shape):
        pair = sum(q[b, h, i, c] * k[b, h * groups // heads, j, c] for c in range(5))
        assert abs(logits[b, h, i, j] - pair / math.sqrt(5)) < 1e-14


def test_low_precision_inputs_are_summed_in_float32(rng):
    q, k = (jnp.asarray(rng.normal(size=(1, 2, 3, 64)), jnp.bfloat16) for _ in range(2))
    logits = content_logits(q, k)
    assert logits.dtype == jnp.float32
    exact = np.einsum("BHLK,BHMK->BHLM", np.asarray(q, np.float64), np.asarray(k, np.float64)) / 8
    # Products of bfloat16 numbers are exact in float32: what remains is the rounding of 64
    # additions.
    np.testing.assert_allclose(logits, exact, rtol=0, atol=64 * 2.0**-24 * np.abs(exact).max())


def test_heads_that_do_not_share_keys_evenly_are_refused():
    with pytest.raises((TypeError, ValueError)):
        jax.eval_shape(content_logits, jnp.zeros((1, 4, 2, 3)), jnp.zeros((1, 3, 2, 3)))
