"""The short convolution equals its sum, whatever the calls that the tokens are split into."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.ops.convolution import causal_convolution


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("cuts", [(7,), (1,) * 7, (3, 4)], ids=str)
def test_it_is_the_sum_over_the_last_tokens_of_the_segment(width, cuts, rng, x64):
    x, kernel = rng.normal(size=(2, 7, 3)), rng.normal(size=(width, 3))
    segments = np.array([[0, 0, 0, 1, 1, 1, 1], [5, 6, 6, 6, 6, 0, 0]], np.int32)
    exact = np.zeros_like(x)
    for b in range(2):
        for t in range(7):
            for lag in range(min(width, t + 1)):
                if (segments[b, t - lag : t + 1] == segments[b, t]).all():
                    exact[b, t] += kernel[width - 1 - lag] * x[b, t - lag]
    before, outputs, first = None, [], 0
    for size in cuts:
        here = slice(first, first + size)
        y, before = causal_convolution(
            jnp.asarray(x[:, here]), jnp.asarray(kernel), segments[:, here], before
        )
        outputs.append(y)
        first += size
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), exact, rtol=0, atol=1e-14)
    assert before[0].shape == (2, width - 1, 3)


def test_gradients_are_sums_over_the_tokens(rng, x64):
    x, kernel, weights = (jnp.asarray(rng.normal(size=s)) for s in ((2, 7, 3), (2, 3), (2, 7, 3)))

    def total(x, kernel):
        return jnp.sum(causal_convolution(x, kernel)[0] * weights)

    dx, dkernel = jax.grad(total, (0, 1))(x, kernel)
    exact_x, exact_kernel = np.zeros((2, 7, 3)), np.zeros((2, 3))
    for b, t, lag in np.ndindex(2, 7, 2):
        if t >= lag:
            exact_x[b, t - lag] += weights[b, t] * kernel[1 - lag]
            exact_kernel[1 - lag] += weights[b, t] * x[b, t - lag]
    np.testing.assert_allclose(dx, exact_x, rtol=0, atol=1e-13)
    np.testing.assert_allclose(dkernel, exact_kernel, rtol=0, atol=1e-13)


def test_split_tokens_are_not_gathered():
    """Their weights' gradients are summed over the devices; only tokens of the lag move."""
    mesh = jax.make_mesh((2, 2), ("batch", "tokens"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split, whole = (
        jax.NamedSharding(mesh, jax.P("batch", "tokens")),
        jax.NamedSharding(mesh, jax.P()),
    )
    step = jax.jit(
        jax.grad(lambda x, kernel: jnp.sum(causal_convolution(x, kernel)[0] ** 3), (0, 1)),
        in_shardings=(split, whole),
        out_shardings=(split, whole),
    )
    text = step.lower(jnp.ones((4, 128, 32)), jnp.ones((4, 32))).compile().as_text()
    assert "all-reduce" in text and "all-gather" not in text
