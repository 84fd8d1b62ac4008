"""`linear` equals the plain product, its gradients too, whichever of the widths is the smaller."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.ops.product import dot_general, linear


@pytest.mark.parametrize("shape", [(2, 5, 3), (4, 3)], ids=str)
@pytest.mark.parametrize("inputs, outputs", [(3, 7), (3, 2), (3, 3)])
def test_values_and_gradients(shape, inputs, outputs, rng, x64):
    x, w = rng.normal(size=shape), rng.normal(size=(inputs, outputs))
    y, pull = jax.vjp(linear, x, w)
    np.testing.assert_allclose(y, x @ w, rtol=0, atol=1e-14)
    dy = rng.normal(size=y.shape)
    dx, dw = pull(jnp.asarray(dy))
    np.testing.assert_allclose(dx, dy @ w.T, rtol=0, atol=1e-13)
    exact = sum(
        np.outer(row, drow)
        for row, drow in zip(x.reshape(-1, 3), dy.reshape(-1, outputs), strict=True)
    )
    np.testing.assert_allclose(dw, exact, rtol=0, atol=1e-13)


def test_forward_mode_and_vmap(rng, x64):
    x, w, dx, dw = (jnp.asarray(rng.normal(size=shape)) for shape in ((4, 3), (3, 5)) * 2)
    np.testing.assert_allclose(
        jax.jvp(linear, (x, w), (dx, dw))[1], dx @ w + x @ dw, rtol=0, atol=1e-14
    )
    xs, ws = jnp.stack([x, dx], axis=1), jnp.stack([w, dw])
    np.testing.assert_allclose(
        jax.vmap(linear, (1, None))(xs, w), [x @ w, dx @ w], rtol=0, atol=1e-14
    )
    np.testing.assert_allclose(
        jax.vmap(linear, (None, 0))(x, ws), [x @ w, x @ dw], rtol=0, atol=1e-14
    )
    np.testing.assert_allclose(
        jax.vmap(linear, (1, 0))(xs, ws), [x @ w, dx @ dw], rtol=0, atol=1e-14
    )


def test_types_stay():
    x, w = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 2), jnp.bfloat16)
    y, pull = jax.vjp(linear, x, w)
    assert {y.dtype, *(d.dtype for d in pull(y))} == {jnp.dtype(jnp.bfloat16)}


def test_an_option_is_not_ignored_in_silence():
    x = jnp.ones((1, 1))
    assert dot_general(x, x, (((1,), (0,)), ((), ())), precision=None).shape == (1, 1)
    with pytest.raises(ValueError, match="precision"):
        dot_general(x, x, (((1,), (0,)), ((), ())), precision="highest")
