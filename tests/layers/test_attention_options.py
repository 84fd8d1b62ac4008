"""Options around attention, each against loops, in packed documents, and token by token."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax.encodings import EncodingConfig
from cope_jax.layers.attention_options import AttentionOptions
from cope_jax.layers.block_config import BlockConfig
from cope_jax.models.decoder import Decoder, DecoderConfig
from tests.models.cases import checker

SIZES = {
    "model_dim": 8,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 3,
    "compute_dtype": "float64",
}
OPTIONS = {
    "qk_norm": True,
    "output_norm": True,
    "output_gate": True,
    "kv_shift": True,
    "convolution": 3,
}
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1], [3, 3, 3, 3, 3, 3, 5]], np.int32)
BATCH, LENGTH = SEGMENTS.shape


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def create(**options):
    """The options, with random parameters."""
    module = AttentionOptions(BlockConfig(**SIZES, **options), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    graph, state = nnx.split(module)
    return nnx.merge(
        graph, jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), state)
    )


def arrays():
    rng = np.random.default_rng(1)
    shapes = [(BATCH, LENGTH, 8), *((BATCH, LENGTH, heads, 3) for heads in (4, 2, 2, 4))]
    return [rng.normal(size=shape) for shape in shapes]


def earlier(b, t, lag):
    """The token `lag` before, or None if it is of another document."""
    return t - lag if t >= lag and (SEGMENTS[b, t - lag : t + 1] == SEGMENTS[b, t]).all() else None


def over(x, step):
    """One vector for each example, token and head."""
    out = np.zeros_like(x)
    for b in range(BATCH):
        for t in range(LENGTH):
            for head in range(x.shape[2]):
                out[b, t, head] = step(b, t, head)
    return out


def shifted(x_BLD, x, kernel):
    def step(b, t, head):
        share, before = sigmoid(float(x_BLD[b, t] @ kernel[:, head])), earlier(b, t, 1)
        return (1 - share) * x[b, t, head] + (0 if before is None else share * x[b, before, head])

    return over(x, step)


def convolved(x, kernel):
    def step(b, t, head):
        lags = [lag for lag in range(len(kernel)) if earlier(b, t, lag) is not None]
        return sum(kernel[len(kernel) - 1 - lag, head] * x[b, t - lag, head] for lag in lags)

    return over(x, step)


def normed(x, scale):
    return over(
        x,
        lambda b, t, head: (
            x[b, t, head] / math.sqrt((x[b, t, head] ** 2).mean() + 1e-6) * scale[head]
        ),
    )


def test_before_attention(x64):
    module = create(**OPTIONS)
    x, q, k, v, _ = arrays()
    parameters = {
        name: np.asarray(leaf) for (name, *_), leaf in nnx.to_flat_state(nnx.state(module))
    }
    arrays_after = jax.jit(lambda *arrays: module.before(*arrays, SEGMENTS)[:3])(x, q, k, v)
    k, v = shifted(x, k, parameters["key_shift"]), shifted(x, v, parameters["value_shift"])
    q, k, v = (
        convolved(actual, parameters[f"{name}_convolution"])
        for name, actual in zip("qkv", (q, k, v), strict=True)
    )
    exact = normed(q, parameters["q_scale"]), normed(k, parameters["k_scale"]), v
    for actual, expected in zip(arrays_after, exact, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


def test_after_attention(x64):
    module = create(output_norm=True, output_gate=True)
    x, *_, out = arrays()
    kernel, bias = (np.asarray(leaf[...]) for leaf in (module.gate.kernel, module.gate.bias))
    gates = over(
        out, lambda b, t, head: [sigmoid(g) for g in (x[b, t] @ kernel + bias).reshape(4, 3)[head]]
    )
    exact = normed(out, np.asarray(module.output_scale[...])) * gates
    np.testing.assert_allclose(
        module.after(jnp.asarray(x), jnp.asarray(out)), exact, rtol=0, atol=1e-12
    )


def decoder(encoding, **options):
    block = BlockConfig(**SIZES, **options)
    config = DecoderConfig(
        vocab_size=11,
        max_length=16,
        encoding=EncodingConfig.parse(encoding),
        block=block,
        num_layers=2,
    )
    model = nnx.jit(lambda: Decoder(config, rngs=nnx.Rngs(0)))()
    graph, state = nnx.split(model)
    rng = np.random.default_rng(2)
    return graph, jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float64) + 0.3 * rng.normal(size=leaf.shape), state
    )


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["cope(npos_max=4)", "path+fox"])
def test_decoding_gives_what_the_whole_gives(encoding, x64):
    laws = ["decoding", "left padding and cache"]
    checker(*decoder(encoding, **OPTIONS))(laws=laws, tolerance=1e-11).raise_if_broken()


def test_packed_documents_do_not_leak(x64):
    check = checker(*decoder("learned", **OPTIONS))
    check(laws=["packed documents"], tolerance=1e-11).raise_if_broken()


def test_a_new_convolution_and_an_option_that_is_off_change_nothing(x64):
    plain, options = BlockConfig(**SIZES), BlockConfig(**SIZES, convolution=4)
    assert not plain.attention_options and options.attention_options == {"convolution": 4}
    x, q, k, v, _ = map(jnp.asarray, arrays())
    module = AttentionOptions(options, rngs=nnx.Rngs(0))
    for actual, expected in zip(module.before(x, q, k, v, None)[:3], (q, k, v), strict=True):
        np.testing.assert_array_equal(actual, expected)
    gated = dataclasses.replace(plain, output_gate=True)
    assert gated.matrix_parameters()[0] - plain.matrix_parameters()[0] == 8 * 12
