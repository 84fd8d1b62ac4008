"""The short convolution equals its sum, whatever the calls that the tokens are split into."""

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
