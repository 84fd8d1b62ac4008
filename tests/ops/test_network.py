"""The straight pieces of a small network are the network."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.attention.kernels.tpu import tpu_ops
from cope_jax.ops.network import Network, evaluate, pieces

# For each unit. Knots at 1/2, twice; at 0, rising and falling; two flat units; two knots far away.
KERNEL = [1.5, -0.5, 0.0, 2.0, -3.0, 0.0, 1.5, 1e-30, -1e-37]
BIAS = [-0.75, 0.25, 0.3, 0.0, 0.0, -0.3, -0.75, 0.1, 50.0]
FIRST, SECOND = [1, 0.5, 1, -1, 2, 5, 1, 0.2, 0.1], [-2, 1, 1, 3, -1, 5, 0.5, 0.1, 0.1]
NUMBERS = [-2.0, -1e-3, 0.0, 1e-3, 0.2, 0.5, 0.51, 0.9, 3.0]


def network(dtype):
    return Network(
        *(jnp.asarray(x, dtype) for x in (KERNEL, BIAS, [*zip(FIRST, SECOND, strict=True)]))
    )


def by_pieces(x, weights):
    knots, slopes, offsets = pieces(weights)
    number = (knots[None] < x[:, None]).sum(1)
    return (slopes[:, number] * x[None] + offsets[:, number]).T


def by_loops(x):
    return [
        [
            sum(max(0.0, n * k + b) * out for k, b, out in zip(KERNEL, BIAS, of_head, strict=True))
            for of_head in (FIRST, SECOND)
        ]
        for n in x
    ]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_the_pieces_and_the_layer_equal_loops(dtype, x64):
    weights, x = network(dtype), jnp.asarray(NUMBERS, dtype)
    atol = 1e-5 if dtype == jnp.float32 else 1e-14
    np.testing.assert_allclose(by_pieces(x, weights), by_loops(NUMBERS), rtol=0, atol=atol)
    layer = evaluate(x[None, None], weights, pieces(weights))[0, :, 0].T
    np.testing.assert_allclose(layer, by_loops(NUMBERS), rtol=0, atol=atol)


def test_a_unit_at_its_own_knot_has_no_gradient(x64):
    x, dy = jnp.asarray(NUMBERS), jnp.arange(18.0).reshape(9, 2) - 5

    def layer(x, weights):
        return evaluate(x[None, None], weights, pieces(weights))[0, :, 0].T

    gradients = [
        jax.grad(lambda x, w, f=f: (f(x, w) * dy).sum(), (0, 1))(x, network(jnp.float64))
        for f in (by_pieces, layer)
    ]
    for given, wanted in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(given, wanted, rtol=0, atol=1e-12)


def test_a_network_with_nan_gives_nan():
    weights = network(jnp.float32)
    for name in ("kernel_F", "bias_F", "out_FH"):
        wrong = weights._replace(**{name: getattr(weights, name).at[1].set(jnp.nan)})
        assert np.isnan(by_pieces(jnp.asarray(NUMBERS), wrong)).all()


@pytest.mark.parametrize("size", [1, 2, 7, 32, 130])
def test_a_binary_search_counts_what_is_below(size):
    z = np.sort(np.random.default_rng(0).integers(0, 9, (3, size)), axis=1).astype(np.float32)
    x = np.array([[-1.0, 0, 4, 4.5, 8, 9, np.nan]] * 3, np.float32)
    wanted = (z[:, :, None] < x[:, None]).sum(1)
    np.testing.assert_array_equal(tpu_ops.count_below(jnp.asarray(z), jnp.asarray(x)), wanted)
