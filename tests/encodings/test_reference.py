"""The plain functions of `encodings.reference` give what the encodings give, in value and gradient."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.encodings import reference
from tests.encodings.cases import BATCH, SIZES, build, parameters, problem, run

PAGE = Path(__file__).parents[2] / "docs" / "encodings.md"
GROUP = SIZES.heads // SIZES.kv_heads
FUNCTIONS = [reference.cope, reference.rope, reference.fox, reference.path]


def cope(q, k, v, x, head, params):
    return reference.cope(q, k, v, params["table"])


def rope(q, k, v, x, head, params):
    return reference.rope(q, k, v)


def fox(q, k, v, x, head, params):
    return reference.fox(q, k, v, x, params["kernel"][:, head], params["bias"][head])


def path(q, k, v, x, head, params):
    """With w and β as in the paper: a convolution, SiLU, and vectors of length 1."""
    group, size = head // GROUP, len(params["convolution"])
    raw = x @ params["into"] @ params["out"][:, group]
    earlier = jnp.pad(raw, ((size - 1, 0), (0, 0)))
    mixed = sum(
        params["convolution"][t, group][None] * earlier[t : t + len(raw)] for t in range(size)
    )
    w = jax.nn.silu(mixed)
    w = w / jnp.sqrt(jnp.sum(w**2, axis=1, keepdims=True) + 1e-6)
    beta = 2 * jax.nn.sigmoid(x @ params["beta_kernel"][:, group] + params["beta_bias"][group])
    return reference.path(q, k, v, w, beta)


@pytest.mark.parametrize(
    "spec, one_head",
    [("cope(npos_max=3)", cope), ("cope", cope), ("rope", rope), ("fox", fox), ("path", path)],
)
def test_it_equals_the_encoding(spec, one_head, x64):
    _, state = build(spec)
    arrays = problem()
    arrays["dembedded"][:] = 0

    def attention(arrays, params):
        outs = [
            jax.vmap(one_head, in_axes=(0, 0, 0, 0, None, None))(
                arrays["q"][:, :, head],
                arrays["k"][:, :, head // GROUP],
                arrays["v"][:, :, head // GROUP],
                arrays["x"],
                head,
                params,
            )
            for head in range(SIZES.heads)
        ]
        return jnp.stack(outs, axis=2)

    @jax.jit
    def value_and_gradients(arrays, params):
        out, pull = jax.vjp(attention, {name: arrays[name] for name in "xqkv"}, params)
        return out, pull(arrays["dout"])

    out, gradients = value_and_gradients(*jax.tree.map(jnp.asarray, (arrays, parameters(state))))
    result = run(spec, state, arrays)
    assert len(out) == BATCH
    np.testing.assert_allclose(out, result.out, rtol=0, atol=1e-12)
    for name, gradient in (gradients[0] | gradients[1]).items():
        np.testing.assert_allclose(
            gradient, result.gradients[name], rtol=0, atol=1e-11, err_msg=name
        )


@pytest.mark.parametrize("function", FUNCTIONS, ids=[function.__name__ for function in FUNCTIONS])
def test_it_is_short_and_the_page_shows_it(function):
    source = inspect.getsource(function)
    assert len(source.splitlines()) <= 40
    assert source in PAGE.read_text()
