"""The loss of next-token prediction, token by token."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.ops.losses import cross_entropy


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
