"""`gelu` equals JAX's, its gradient too, and differs in what it keeps."""

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.ops.gelu import gelu

X = np.concatenate([np.linspace(-6, 6, 41), [-30.0, 30.0]])


def test_value_and_gradient_equal_those_of_jax(x64):
    x = jnp.asarray(X)
    np.testing.assert_allclose(gelu(x), jax.nn.gelu(x), rtol=0, atol=1e-15)
    ours, theirs = (jax.vmap(jax.grad(f))(x) for f in (gelu, jax.nn.gelu))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-14)
    _, tangent = jax.jvp(gelu, (x,), (2 * x,))
    np.testing.assert_allclose(tangent, 2 * x * theirs, rtol=0, atol=1e-13)


def test_types_stay():
    x = jnp.asarray(X, jnp.bfloat16)
    assert gelu(x).dtype == jax.grad(lambda x: gelu(x).sum())(x).dtype == jnp.bfloat16


def test_one_number_is_kept_for_each_input():
    _, pull = jax.vjp(gelu, jnp.asarray(X, jnp.float32))
    assert sum(leaf.size for leaf in jax.tree.leaves(pull) if leaf.ndim) == X.size
