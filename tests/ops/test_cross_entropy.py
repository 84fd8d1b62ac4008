"""The loss of next-token prediction, token by token."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.ops.losses import cross_entropy, token_measures


def problem(rng):
    return rng.normal(scale=3, size=(2, 3, 5)), rng.integers(0, 5, (2, 3), dtype=np.int32)


def test_values_equal_the_logarithm_of_the_probability(rng, x64):
    logits, targets = problem(rng)
    losses = cross_entropy(jnp.asarray(logits), targets)
    for at in np.ndindex(targets.shape):
        powers = [math.exp(logit) for logit in logits[at]]
        assert abs(losses[at] + math.log(powers[targets[at]] / sum(powers))) < 1e-13


def test_gradient_is_the_probability_less_the_target(rng, x64):
    logits, targets = problem(rng)
    gradient = jax.grad(lambda z: jnp.sum(cross_entropy(z, targets)))(jnp.asarray(logits))
    powers = np.exp(logits)
    probability = powers / powers.sum(-1, keepdims=True)
    np.testing.assert_allclose(gradient, probability - np.eye(5)[targets], rtol=0, atol=1e-14)


def test_large_logits_stay_finite():
    logits = jnp.array([[[1e4, 0.0, -1e4]] * 3])
    losses, pull = jax.vjp(lambda z: cross_entropy(z, np.array([[0, 1, 2]], np.int32)), logits)
    np.testing.assert_array_equal(losses, [[0, 1e4, 2e4]])
    assert np.isfinite(pull(losses)[0]).all()


def test_a_target_beyond_the_vocabulary_is_loud():
    assert np.isnan(cross_entropy(jnp.zeros((1, 2, 5)), np.array([[5, -1]], np.int32))).all()


def test_without_a_most_probable_token_every_target_is_wrong():
    """The largest of numbers that are not finite is at index 0."""
    logits_BLV = jnp.array([[[0.0, jnp.nan], [jnp.nan, 0.0], [jnp.nan, jnp.nan], [1.0, 0.0]]])
    measures = token_measures(logits_BLV, jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4)))
    assert (measures["token_error"][0], measures["sequence_error"][0]) == (3, 1)


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.int16, jnp.int32, jnp.uint32])
def test_targets_may_be_integers_of_any_type(dtype):
    """Token 260 is not token 4, though it is in a byte."""
    logits_BLV = jnp.zeros((1, 2, 300)).at[0, 0, 260].set(9.0).at[0, 1, 5].set(9.0)
    measures = token_measures(logits_BLV, jnp.array([[4, 5]], dtype), jnp.ones((1, 2)))
    assert measures["token_error"][0] == 1
    known = cross_entropy(logits_BLV, jnp.array([[4, 5]], dtype))
    np.testing.assert_allclose(
        known, jax.nn.logsumexp(logits_BLV, axis=-1) - jnp.array([[0.0, 9.0]]), rtol=1e-6
    )


def test_the_probability_and_the_share_of_valid_tokens(rng):
    """By token: the probability of invalid tokens, and valid ones of at most that probability."""
    logits, targets = problem(rng)
    valid = (rng.random(logits.shape) < 0.5).astype(np.float32)
    weights = np.array([[1, 0, 2], [1, 1, 0]], np.float32)
    measures = token_measures(jnp.asarray(logits, jnp.float32), targets, weights, valid)
    mass = below = count = 0.0
    for at in np.ndindex(targets.shape):
        powers = [math.exp(logit) for logit in logits[at]]
        invalid = sum(power for power, ok in zip(powers, valid[at], strict=True) if not ok)
        mass += weights[at] * invalid / sum(powers)
        for power, ok in zip(powers, valid[at], strict=True):
            count += weights[at] * ok
            below += weights[at] * ok * (power <= invalid)
    np.testing.assert_allclose(measures["invalid_error"], (mass, 5), rtol=1e-6)
    np.testing.assert_allclose(measures["valid_error"], (below, count), rtol=1e-6)
    assert 0 < below < count
    assert "valid_error" not in token_measures(jnp.asarray(logits, jnp.float32), targets, weights)
