"""Forward mode of every implementation of attention, and second derivatives, against full attention
in float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax.attention import full_attention, prepare
from cope_jax.errors import ConfigError
from tests.attention.problems import (
    DOCUMENTS,
    arrays_of,
    in_blocks,
    inputs_of,
    interpreted,
    plain,
    segment_ids,
    value_and_gradients,
)
from tests.attention.test_generated import generated
from tests.attention.test_generated import native as native
from tests.attention.test_ring import around, mesh_of
from tests.encodings.cases import BATCH, CASES, build, every, goes_around, splits_queries
from tests.oracle.encodings import Sizes

LENGTH, KEYS = 7, 11
BLOCKS = in_blocks((3, 2, 3))
STREAMED = [spec for spec in CASES if splits_queries(spec)]
FEW = {"relative(max_distance=3,beyond=clip)", "cope(npos_max=4)+rope", "fox", "stick_breaking"}


def direction(tree, seed=0):
    """Random tangents of a tree; those of integers are JAX's zeros."""
    rng = np.random.default_rng(seed)

    def random(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return np.zeros(x.shape, jax.dtypes.float0)
        return np.asarray(rng.normal(size=x.shape), x.dtype)

    return jax.tree.map(random, tree)


def output(attention, graphdef, data, **static):
    """The output as a function of the parameters and of x, q, k and v."""

    def out(state, inputs):
        encoding = nnx.merge(graphdef, state)
        return attention(encoding, inputs_of(encoding, inputs, data, **static))

    return out


def slopes(attention, graphdef, state, arrays, data, second=True, **static):
    """The tangents of the output, and of its gradients."""
    inputs = {name: arrays[name] for name in "xqkv"}
    out = output(attention, graphdef, data, **static)
    point = (state, inputs)
    value, tangent = jax.jvp(out, point, direction(point))
    if not second:
        return value, tangent, ()

    def gradients(state, inputs):
        values = inputs | {"dout": arrays["dout"]}
        return value_and_gradients(attention, graphdef, state, values, data, **static)[1]

    return value, tangent, jax.jvp(gradients, point, direction(point))[1]


def assert_close(computed, exact, atol=1e-10):
    """Every array, relative to its largest entry."""
    computed, exact = jax.tree.leaves(computed), jax.tree.leaves(exact)
    for x, y in zip(computed, exact, strict=True):
        if y.dtype != jax.dtypes.float0:
            scale = max(1.0, np.abs(y).max(initial=0))
            np.testing.assert_allclose(x, y, rtol=0, atol=atol * scale)


def assert_slopes(attention, spec, data, *, length=LENGTH, keys=KEYS, **static):
    """Those of an implementation and of full attention."""
    graphdef, state = build(spec)
    arrays = arrays_of(length, keys)

    def both(state, arrays):
        each = (full_attention, attention)
        return [slopes(how, graphdef, state, arrays, data, **static) for how in each]

    exact, computed = jax.jit(both)(state, arrays)
    assert_close(computed, exact)
    assert all(np.abs(x).max() > 1e-3 for x in exact[:2]), "nothing moves"


@every(STREAMED, few=FEW)
def test_every_encoding(spec, x64):
    """The tangent by parameters, x, q, k and v; in two documents."""
    ids = segment_ids(DOCUMENTS, KEYS)
    data = plain(LENGTH, KEYS)._replace(k_segments=ids, q_segments=ids[:, KEYS - LENGTH :])
    assert_slopes(BLOCKS, spec, data, second=False)


@every(STREAMED, few={"cope(npos_max=4)+rope"})
def test_forward_mode_of_gradients(spec, x64):
    """Products of the Hessian of (out · dout) with a vector, in blocks."""
    assert_slopes(BLOCKS, spec, plain(LENGTH, KEYS))


def test_dropout_window_soft_cap_and_scale(x64):
    data = plain(LENGTH, KEYS)._replace(dropout_key=jax.random.key(3))
    options = {"dropout_rate": 0.3, "window": 5, "logits_soft_cap": 1.5, "scale": 0.7}
    assert_slopes(BLOCKS, "cope(npos_max=3)", data, second=False, **options)


def test_bias_and_mask(x64):
    """The bias too; and a query that the mask hides from every key."""
    graphdef, state = build("cope(npos_max=3)")
    arrays = arrays_of(LENGTH, KEYS)
    rng = np.random.default_rng(0)
    mask = rng.random((BATCH, 1, LENGTH, KEYS)) < 0.7
    mask[:, :, 3] = False

    def run(attention, q, bias):
        encoding = nnx.merge(graphdef, state)
        options = dict(encoding=encoding, bias=bias, mask=mask, embedded=True)
        return attention(encoding, prepare(q, arrays["k"], arrays["v"], **options))

    point = arrays["q"], rng.normal(size=(1, 4, LENGTH, KEYS))
    exact, computed = (
        jax.jit(lambda point, d, how=how: jax.jvp(functools.partial(run, how), point, d))(
            point, direction(point)
        )
        for how in (full_attention, BLOCKS)
    )
    assert_close(computed, exact)


@pytest.mark.parametrize("derivative", ["jvp", "grad"])
def test_reverse_mode_of_a_derivative_is_an_error(derivative, x64):
    graphdef, state = build("none")
    arrays = arrays_of(5, 5)
    inputs = {name: arrays[name] for name in "xkv"}

    def out(q):
        return output(in_blocks((3, 2, 2)), graphdef, plain(5, 5))(state, inputs | {"q": q})

    def slope(q):
        if derivative == "grad":
            return jnp.sum(jax.grad(lambda q: jnp.sum(out(q) ** 2))(q))
        return jnp.sum(jax.jvp(out, (q,), (q,))[1])

    with pytest.raises(ConfigError, match=r"take jax\.jvp of jax\.grad, or choose"):
        jax.eval_shape(jax.grad(slope), arrays["q"])


@pytest.mark.parametrize(
    "devices, spec, options",
    [
        (8, "cope(npos_max=3)", {"second": False}),
        pytest.param(2, "fox", {"dropout_rate": 0.3}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.xdist_group("ring")
def test_ring(devices, spec, options, x64):
    data = plain(37, 37)
    if "dropout_rate" in options:
        data = data._replace(dropout_key=jax.random.key(0))
    with jax.set_mesh(mesh_of(devices)):
        assert_slopes(around(2, 1, 2), spec, data, length=37, keys=37, **options)


@pytest.mark.slow
@pytest.mark.xdist_group("ring")
def test_a_ring_with_kernels(x64):
    kernels = around(2, 2, 4, resident=2, interpret=True)
    with jax.set_mesh(mesh_of(2)):
        assert_slopes(kernels, "fox", plain(13, 13), length=13, keys=13, second=False)


@pytest.mark.slow
@pytest.mark.xdist_group("ring")
@pytest.mark.parametrize("spec", [spec for spec in STREAMED if goes_around(spec)])
def test_every_encoding_in_a_ring(spec, x64):
    with jax.set_mesh(mesh_of(4)):
        assert_slopes(around(2, 1, 2), spec, plain(11, 11), length=11, keys=11, second=False)


@pytest.mark.slow
def test_kernels(native):
    """Generated and interpreted, in float32; value, tangent, and the tangent of gradients."""
    sizes = Sizes(heads=4, kv_heads=2, head_dim=16, model_dim=8, max_length=200)
    arrays = arrays_of(100, 100, sizes=sizes, dtype=np.float32)
    for attention, spec, second in (
        (generated, "cope(npos_max=3)", True),
        (interpreted((16, 128, 128)), "fox", False),
    ):
        graphdef, state = build(spec, sizes=sizes, dtype=np.float32)
        data = plain(100, 100)._replace(q_indices=None, k_indices=None)
        exact, computed = (
            jax.jit(functools.partial(slopes, how, graphdef, data=data, second=second))(
                state, arrays=arrays
            )
            for how in (full_attention, attention)
        )
        assert_close(computed, exact, atol=1e-4)


@pytest.mark.slow
def test_memory_of_32768_tokens():
    """Below 1 GiB in addition to the inputs, with the results."""
    sizes = Sizes(heads=8, kv_heads=8, head_dim=64, model_dim=8, max_length=64)
    graphdef, state = build("cope(npos_max=64)", sizes=sizes, dtype=np.float32)
    encoding = nnx.merge(graphdef, state)

    def out(q, k, v):
        return in_blocks(None)(encoding, prepare(q, k, v, encoding=encoding))

    point = (jax.ShapeDtypeStruct((1, 32_768, 8, 64), jnp.float32),) * 3
    pushed = jax.jit(lambda point, moved: jax.jvp(out, point, moved))
    memory = pushed.lower(point, point).compile().memory_analysis()
    assert 2**27 < memory.temp_size_in_bytes + memory.output_size_in_bytes < 2**30
