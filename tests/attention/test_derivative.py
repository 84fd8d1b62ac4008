"""Derivatives in both modes under every transformation of JAX, of a function as small as possible."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from cope_jax.attention import derivative, linear_tangent
from cope_jax.attention.derivative import RESIDUALS, Passes
from cope_jax.errors import ConfigError

FACTOR = 3
X = np.linspace(-1.0, 1.0, 4)
W = np.linspace(0.5, 2.0, 4)
DX, DW, DOUT = (np.random.default_rng(n).normal(size=4) for n in range(3))


def forward(arguments, gradient):
    """out = w tanh(x) n; tanh(x) is a residual."""
    x, w, n = arguments
    squashed = jnp.tanh(x)
    result = w * squashed * n.astype(w.dtype), *([squashed] if gradient else [])
    return checkpoint_name(result, RESIDUALS)


def backward(kept, dout):
    """The gradient of w is marked by a factor, which no other mode has."""
    (_, w, n), out, squashed = kept
    n = n.astype(w.dtype)
    return dout * (w * n - out * squashed), FACTOR * dout * squashed * n, None


def attend(x, w):
    return derivative.attend(Passes(forward, backward), (x, w, jnp.int32(2)))


def exact(x, w):
    return w * jnp.tanh(x) * 2


def pulled(x=X, w=W, dout=DOUT):
    dx, dw = jax.vjp(exact, x, w)[1](dout)
    return dx, FACTOR * dw


def close(computed, expected):
    for x, y in zip(jax.tree.leaves(computed), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-13)


@pytest.mark.newest
@pytest.mark.parametrize("compiled", [jax.jit, lambda function: function])
def test_forward_mode(compiled, x64):
    pair = jax.jvp(exact, (X, W), (DX, DW))
    close(compiled(lambda *d: jax.jvp(attend, (X, W), d))(DX, DW), pair)
    close(compiled(lambda *d: jax.linearize(attend, X, W)[1](*d))(DX, DW), pair[1])
    alone = jax.jvp(lambda x: exact(x, W), (X,), (DX,))
    close(compiled(lambda d: jax.jvp(lambda x: attend(x, W), (X,), (d,)))(DX), alone)


@pytest.mark.newest
@pytest.mark.parametrize("compiled", [jax.jit, lambda function: function])
def test_reverse_mode_is_the_backward_pass(compiled, x64):
    close(compiled(lambda x, w: jax.vjp(attend, x, w)[1](DOUT))(X, W), pulled())
    close(compiled(lambda x: jax.vjp(lambda w: attend(x, w), W)[1](DOUT))(X)[0], pulled()[1])
    push = functools.partial(jax.jvp, attend, (X, W))
    close(compiled(jax.linear_transpose(lambda *d: push(d)[1], X, W))(DOUT), pulled())
    close(compiled(jax.grad(lambda d: jnp.sum(push(d)[1] * DOUT)))((DX, DW)), pulled())
    close(compiled(jax.grad(lambda d: jnp.sum(push((d, DW))[1] * DOUT)))(DX), pulled()[0])


@pytest.mark.newest
@pytest.mark.parametrize("saved", [True, False])
def test_rematerialisation_and_scan(saved, x64):
    """Residuals are kept or computed again, in a scan too; the forward mode is the same."""
    policy = jax.checkpoint_policies.save_only_these_names(*([RESIDUALS] if saved else []))
    run = jax.checkpoint(attend, policy=policy)

    def layers(x, w, attention):
        return jax.lax.scan(lambda x, _: (attention(x, w), None), x, None, length=3)[0]

    for function, plain in (
        (run, attend),
        (functools.partial(layers, attention=run), functools.partial(layers, attention=attend)),
    ):
        close(
            jax.jit(lambda x, w, f=function: jax.vjp(f, x, w)[1](DOUT))(X, W),
            jax.vjp(plain, X, W)[1](DOUT),
        )
        close(
            jax.jit(lambda *d, f=function: jax.jvp(f, (X, W), d))(DX, DW),
            jax.jvp(plain, (X, W), (DX, DW)),
        )
    program = str(jax.make_jaxpr(lambda x, w: jax.vjp(run, x, w)[1](DOUT))(X, W))
    assert program.count(" tanh ") == (1 if saved else 2)


@pytest.mark.newest
def test_vmap(x64):
    both = np.stack([DX, DW]), np.stack([DW, DX])
    points = np.stack([X, W]), np.stack([W, X])
    push = functools.partial(jax.jvp, attend, (X, W))
    exact_push = functools.partial(jax.jvp, exact, (X, W))
    close(
        jax.vmap(lambda *d: push(d), out_axes=(None, 0))(*both),
        jax.vmap(lambda *d: exact_push(d), out_axes=(None, 0))(*both),
    )
    close(
        jax.vmap(lambda p, d: jax.jvp(attend, p, d))(points, both),
        jax.vmap(lambda p, d: jax.jvp(exact, p, d))(points, both),
    )
    linear, exact_linear = (jax.linearize(f, X, W)[1] for f in (attend, exact))
    close(jax.vmap(linear, (None, 0))(DX, both[1]), jax.vmap(exact_linear, (None, 0))(DX, both[1]))
    close(
        jax.vmap(lambda x, w: jax.vjp(attend, x, w)[1](DOUT), (0, None))(points[0], W),
        jax.vmap(pulled, (0, None))(points[0], W),
    )
    close(
        jax.vmap(lambda d: jax.vjp(attend, X, W)[1](d))(both[0]),
        jax.vmap(lambda d: pulled(dout=d))(both[0]),
    )
    close(jax.jit(jax.jacfwd(attend))(X, W), jax.jacfwd(exact)(X, W))
    close(jax.jacrev(attend)(X, W), jax.jacrev(exact)(X, W))


@pytest.mark.newest
def test_second_derivatives(x64):
    def loss(function):
        return lambda x: jnp.sum(function(x, W) ** 2)

    for second in (
        lambda f: jax.jvp(jax.grad(f), (X,), (DX,))[1],
        lambda f: jax.jit(lambda x: jax.jvp(jax.grad(f), (x,), (DX,))[1])(X),
        lambda f: jax.jvp(lambda x: jax.jvp(f, (x,), (DW,))[1], (X,), (DX,)),
        lambda f: jax.hessian(f)(X),
        lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) * DX))(X),
        lambda f: jax.linearize(jax.grad(f), X)[1](DX),
    ):
        close(second(loss(attend)), second(loss(exact)))


@pytest.mark.newest
def test_a_kernel_has_the_forward_mode_of_xla(x64):
    run = derivative.by_xla(lambda *_: jnp.zeros(()), exact)
    close(jax.jvp(run, (X, W), (DX, DW)), jax.jvp(exact, (X, W), (DX, DW)))
    assert run(X, W) == 0


@pytest.mark.newest
def test_what_is_never_reversed(x64):
    def once(x):
        return jnp.sum(linear_tangent.never_reversed({"x": x, "n": jnp.int32(1)})["x"] ** 2)

    close(
        jax.jit(lambda x: jax.jvp(once, (x,), (DX,)))(X),
        jax.jvp(lambda x: jnp.sum(x**2), (X,), (DX,)),
    )
    with pytest.raises(ConfigError, match=r"take jax\.jvp of jax\.grad, or choose"):
        jax.grad(once)(X)
