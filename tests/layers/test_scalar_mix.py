"""The mix of layers, from its equation."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax.layers.scalar_mix import ScalarMix
from tests.models.noisy import close, noisy

LAYERS = np.random.default_rng(0).normal(2.0, 3.0, size=(3, 2, 4, 5))
MASK = np.array([[1, 1, 1, 1], [1, 0, 0, 0]], np.float64)


@pytest.mark.newest
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_the_equation(layer_norm, masked, x64):
    mix = noisy(lambda: ScalarMix(3, layer_norm=layer_norm, rngs=nnx.Rngs(0)), np.float64)
    w, gamma = np.asarray(mix.weights_J[...]), float(mix.gamma[...])
    shares = np.exp(w) / np.exp(w).sum()
    expected = 0
    for share, layer in zip(shares, LAYERS, strict=True):
        if layer_norm:
            real = layer[MASK > 0] if masked else layer
            layer = (layer - real.mean()) / np.sqrt(real.var() + 1e-12)
        expected = expected + gamma * share * layer
    close(mix(jnp.asarray(LAYERS), jnp.asarray(MASK) if masked else None), expected, 1e-12)
    close(mix.shares(), shares, 1e-14)
    close(mix.penalty(0.25), 0.25 * (w**2).sum(), 1e-14)


def test_it_starts_as_the_mean():
    mix = ScalarMix(3, rngs=nnx.Rngs(0))
    close(mix(jnp.asarray(LAYERS, jnp.float32)), LAYERS.mean(axis=0), 1e-5)
    assert mix.penalty(1.0) == 0


def test_what_is_masked_does_not_matter_to_the_norm():
    mix = ScalarMix(3, layer_norm=True, rngs=nnx.Rngs(0))
    changed = np.where(MASK[None, :, :, None] > 0, LAYERS, 1e3).astype(np.float32)
    actual = mix(jnp.asarray(changed), jnp.asarray(MASK, jnp.float32))
    expected = mix(jnp.asarray(LAYERS, jnp.float32), jnp.asarray(MASK, jnp.float32))
    real = MASK[..., None] > 0
    close(jnp.where(real, actual, 0), jnp.where(real, expected, 0), 1e-6)
