"""Dropout in a block, the types it keeps, and attention both ways; see the decoder for more."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from cope_jax import encodings
from cope_jax.encodings import EncodingConfig
from cope_jax.layers.basic import Norm
from cope_jax.layers.block import Block
from cope_jax.layers.block_config import BlockConfig
from cope_jax.layers.self_attention import Context, SelfAttention
from cope_jax.layers.stack import create_stack, scan_stack

RATE, LENGTH, WIDTH, BATCH = 0.25, 6, 8, 64
CONFIG = BlockConfig(model_dim=WIDTH, num_heads=2, dropout=RATE)
PLACES = np.arange(LENGTH, dtype=np.int32)[None]
KEPT = 1 / (1 - RATE)


def near(share, probability, count):
    """Within five standard errors."""
    return abs(share - probability) < 5 * (probability * (1 - probability) / count) ** 0.5


def none():
    return encodings.EncodingConfig().build(encodings.AttentionShape(2, 4), rngs=nnx.Rngs(0))


@functools.cache
def constant_block(attention, mlp):
    """added(key): what a block adds whose two sublayers add these numbers, whatever comes in."""
    block = Block(CONFIG, EncodingConfig(), CONFIG.attention_shape(None), 1, rngs=nnx.Rngs(0))
    for linear, value in ((block.attention.out, attention), (block.mlp.outer, mlp)):
        constant(linear, value)
    return runner(block, jnp.zeros((BATCH, LENGTH, WIDTH)))


def constant(linear, value):
    """Makes a linear layer say the same whatever comes in."""
    linear.kernel[...] = jnp.zeros_like(linear.kernel[...])
    linear.bias[...] = jnp.full_like(linear.bias[...], value)


def runner(layer, x):
    """layer(x) as a compiled function of the dropout key."""
    graphdef, state = nnx.split(layer)
    compiled = jax.jit(lambda key: nnx.merge(graphdef, state)(x, none(), Context(PLACES), key))
    return lambda key: np.asarray(compiled(key))


@pytest.mark.parametrize("sublayers", [(1.0, 0.0), (0.0, 1.0)], ids=["attention", "mlp"])
def test_what_a_sublayer_adds_is_dropped_at_the_rate(sublayers):
    added = constant_block(*sublayers)(jax.random.key(0))
    np.testing.assert_allclose(np.unique(added), [0, KEPT], rtol=1e-6)
    assert near((added == 0).mean(), RATE, added.size)
    np.testing.assert_array_equal(constant_block(*sublayers)(None), np.ones_like(added))


def test_the_sublayers_are_dropped_independently():
    added = constant_block(1.0, 10.0)(jax.random.key(0))
    shares = [np.isclose(added, value).mean() for value in (0, KEPT, 10 * KEPT, 11 * KEPT)]
    expected = [RATE**2, (1 - RATE) * RATE, RATE * (1 - RATE), (1 - RATE) ** 2]
    assert sum(shares) == 1
    assert all(
        near(share, chance, added.size) for share, chance in zip(shares, expected, strict=True)
    ), shares


def test_attention_weights_are_dropped():
    """With values 1, the output is the sum of a row's weights: 1, or 1 in the mean with dropout."""
    layer = SelfAttention(CONFIG, 1.0, rngs=nnx.Rngs(0))
    constant(layer.value, 1)
    layer.out.kernel[...] = jnp.eye(WIDTH)
    x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, WIDTH))
    run = runner(layer, x)
    np.testing.assert_allclose(run(None), np.ones(x.shape), rtol=1e-6)
    sums = run(jax.random.key(0))
    assert near(
        (np.isclose(sums[:, 0], 0)).mean(), RATE, BATCH * 2
    )  # the first token has one key, in each of two heads
    assert (np.ptp(sums, axis=(1, 2)) > 0).all()
    # The variance of a row's sum is r/(1−r) Σ a² ≤ r/(1−r); the features of a head are one sample.
    assert abs(sums.mean() - 1) < 5 * (RATE / (1 - RATE) / (BATCH * LENGTH * 2)) ** 0.5


def test_a_block_drops_attention_weights_too():
    """Then what attention adds is not the one number that the values have, or 0, but many."""
    block = Block(CONFIG, EncodingConfig(), CONFIG.attention_shape(None), 1, rngs=nnx.Rngs(0))
    constant(block.attention.value, 1)
    block.attention.out.kernel[...] = jnp.eye(WIDTH)
    constant(block.mlp.outer, 0)
    added = runner(block, jnp.zeros((BATCH, LENGTH, WIDTH)))(jax.random.key(0))
    # The second token weighs its two keys alike: it adds 0, 1 or 2 halves, each KEPT times KEPT.
    np.testing.assert_allclose(
        np.unique(added[:, 1].round(4)), [0, KEPT**2 / 2, KEPT**2], rtol=1e-4
    )


@pytest.mark.parametrize("causal", [True, False])
def test_attention_may_look_both_ways(causal):
    layer = SelfAttention(BlockConfig(model_dim=WIDTH), 1.0, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(layer)

    @jax.jit
    def run(x):
        return nnx.merge(graphdef, state)(x, none(), Context(PLACES, causal=causal))

    x = np.random.default_rng(0).normal(size=(1, LENGTH, WIDTH)).astype(np.float32)
    other = x.copy()
    other[:, -1] += 1
    changed = np.abs(np.asarray(run(x) - run(other))).max(axis=(0, 2)) > 0
    np.testing.assert_array_equal(changed, [not causal] * (LENGTH - 1) + [True])


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_of_bfloat16_are_computed_in_float32(kind):
    """The result is right to the last of eight bits, where bfloat16 would lose the mean."""
    norm = Norm(BlockConfig(model_dim=64, norm=kind), rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(20, 1, (5, 64)), jnp.bfloat16)
    y = norm(x)
    assert y.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float64)
    exact = exact - exact.mean(-1, keepdims=True) if kind == "layer" else exact
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6)
    # Half a unit of bfloat16's last place, and float32's rounding of E[x²] − E[x]² = 401 − 400.
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_the_residual_stream_keeps_the_compute_type(activation):
    config = BlockConfig(model_dim=WIDTH, activation=activation, compute_dtype="bfloat16")
    block = nnx.eval_shape(
        lambda: Block(config, EncodingConfig(), config.attention_shape(None), 1, rngs=nnx.Rngs(0))
    )
    graphdef, state = nnx.split(block)
    x = jax.ShapeDtypeStruct((1, LENGTH, WIDTH), jnp.bfloat16)
    out = jax.eval_shape(
        lambda state, x: nnx.merge(graphdef, state)(x, none(), Context(PLACES)), state, x
    )
    assert out.dtype == jnp.bfloat16 and out.shape == x.shape


@pytest.mark.parametrize("layers, devices, loops", [(2, 1, False), (2, 2, False), (3, 1, True)])
def test_more_than_two_layers_make_a_loop(layers, devices, loops):
    stack = create_stack(lambda rngs: nnx.Linear(3, 3, rngs=rngs), layers, rngs=nnx.Rngs(0))
    graph, state = nnx.split(stack)

    def run(state, x):
        return scan_stack(nnx.merge(graph, state), lambda layer, x, _: (layer(x), x[0]), x, None)

    x = jnp.ones((2, 3))
    last, inputs = run(state, x)
    for number in range(layers):
        np.testing.assert_allclose(inputs[number], x[0], rtol=1e-5, atol=1e-6)
        x = x @ stack.kernel[number]
    np.testing.assert_allclose(last, x, rtol=1e-5, atol=1e-6)
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert ("while" in jax.jit(run).lower(state, x).as_text()) == loops
