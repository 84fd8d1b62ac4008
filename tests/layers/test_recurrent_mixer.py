"""Recurrent mixers against loops, in packed documents, token by token, and what they refuse."""

import math

import jax
import numpy as np
import pytest
from flax import nnx

from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.layers.block_config import BlockConfig
from cope_jax.layers.recurrent_mixer import KINDS, RecurrentMixer
from cope_jax.models.decoder import Decoder, DecoderConfig
from tests.models.cases import checker
from tests.oracle.mixers import recurrence
from tests.oracle.rules import log_sigmoid, sigmoid, softplus

SIZES = {"model_dim": 8, "num_heads": 2, "head_dim": 3, "compute_dtype": "float64"}
DELTAS = [kind for kind, of_kind in KINDS.items() if of_kind.delta]
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1]], np.int32)


def randomised(module, seed=2):
    graph, state = nnx.split(module)
    rng = np.random.default_rng(seed)
    return graph, jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float64) + 0.3 * rng.normal(size=leaf.shape), state
    )


def by_loops(layer, x_LD):
    """The output of the layer for one example."""
    length, heads, kind = len(x_LD), 2, layer.kind

    def projected(name):
        linear = getattr(layer, name)
        kernel = np.asarray(getattr(layer, f"{name}_convolution")[...])
        rows = x_LD @ np.asarray(linear.kernel[...]) + np.asarray(linear.bias[...])
        out = np.zeros_like(rows)
        for t in range(length):
            for lag in range(min(4, t + 1)):
                if (SEGMENTS[0, t - lag : t + 1] == SEGMENTS[0, t]).all():
                    out[t] += kernel[3 - lag] * rows[t - lag]
            out[t] = [y * sigmoid(y) for y in out[t]]
        return out.reshape(length, heads, -1)

    def unit(rows):
        return np.array([[row / math.sqrt(row @ row + 1e-6) for row in token] for token in rows])

    decay = beta = None
    if kind.delta:
        most = 2 if layer.config.negative_eigenvalues else 1
        beta = np.array(
            [[most * sigmoid(y) for y in row] for row in x_LD @ np.asarray(layer.beta[...])]
        )
    if kind.decay is not None:
        names = ("decay",) if kind.decay == "head" else ("decay_in", "decay_out")
        logits = x_LD
        for name in names:
            logits = logits @ np.asarray(getattr(layer, name)[...])
        logits = (logits + np.asarray(layer.decay_bias[...])).reshape(length, heads, -1)
        decay = np.zeros_like(logits)
        for t, h, c in np.ndindex(logits.shape):
            if kind.delta:
                decay[t, h, c] = -math.exp(layer.log_rate[h]) * softplus(logits[t, h, c])
            else:
                decay[t, h, c] = log_sigmoid(logits[t, h, c]) / 16
    out = recurrence(
        unit(projected("query")),
        unit(projected("key")),
        projected("value"),
        decay,
        beta,
        SEGMENTS[0],
    )
    scale, gate = (
        np.asarray(layer.scale[...]),
        x_LD @ np.asarray(layer.gate.kernel[...]) + np.asarray(layer.gate.bias[...]),
    )
    normed = [
        [head / math.sqrt((head**2).mean() + 1e-6) * scale[h] for h, head in enumerate(token)]
        for token in out
    ]
    gated = np.array(normed).reshape(length, -1) * np.array(
        [[y * sigmoid(y) for y in row] for row in gate]
    )
    return gated @ np.asarray(layer.out.kernel[...]) + np.asarray(layer.out.bias[...])


@pytest.mark.parametrize(
    "kind, more",
    [*((kind, {}) for kind in KINDS), *((d, {"negative_eigenvalues": True}) for d in DELTAS)],
)
def test_the_layer_equals_its_loops(kind, more, x64):
    graph, state = randomised(
        RecurrentMixer(BlockConfig(**SIZES, mixer=kind, **more), 1.0, rngs=nnx.Rngs(0))
    )
    layer, x = nnx.merge(graph, state), np.random.default_rng(0).normal(size=(1, 7, 8))
    mixed = jax.jit(lambda x: layer._mix(x, SEGMENTS, None)[0])(x)
    np.testing.assert_allclose(mixed[0], by_loops(layer, x[0]), rtol=0, atol=1e-12)


def decoder(kind, encoding="learned"):
    config = DecoderConfig(
        vocab_size=11,
        max_length=16,
        encoding=EncodingConfig.parse(encoding),
        block=BlockConfig(**SIZES, mixer=kind),
        num_layers=2,
    )
    return randomised(nnx.jit(lambda: Decoder(config, rngs=nnx.Rngs(0)))())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gated_delta", "gla", "kda", "linear"])
def test_decoding_and_packed_documents_give_what_the_whole_gives(kind, x64):
    laws = ["decoding", "left padding and cache", "packed documents"]
    checker(*decoder(kind))(laws=laws, tolerance=1e-11).raise_if_broken()


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [
        {"mixer": "gated_delta"},
        {
            "qk_norm": True,
            "output_norm": True,
            "output_gate": True,
            "kv_shift": True,
            "convolution": 3,
        },
    ],
    ids=["gated_delta", "options around attention"],
)
def test_decoding_in_bfloat16_gives_what_the_whole_gives(block):
    """Nearly: the logits have a standard deviation of about 1."""
    config = DecoderConfig(
        vocab_size=11,
        max_length=16,
        encoding=EncodingConfig.parse("none"),
        block=BlockConfig(**SIZES | {"compute_dtype": "bfloat16"}, **block),
    )
    model = Decoder(config, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(3).integers(0, 11, (2, 8)).astype(np.int32)
    exact = np.asarray(model(tokens), np.float32)
    logits, cache = model.prefill(tokens[:, :5], 10)
    for now in range(5, 9):
        np.testing.assert_allclose(
            np.asarray(logits, np.float32), exact[:, now - 1], rtol=0, atol=0.05
        )
        if now < 8:
            logits, cache = model.decode(tokens[:, now : now + 1], cache)


def test_what_has_no_effect_is_refused_in_one_line(x64):
    tokens = np.zeros((1, 4), np.int32)
    with pytest.raises(ConfigError, match=r"'fox' has no effect with block.mixer=gla: choose"):
        nnx.merge(*decoder("gla", "learned+fox"))(tokens)
    with pytest.raises(ConfigError, match=r"block\.mixer=gla has no attention weights"):
        nnx.merge(*decoder("gla")).maps(tokens)
    for options in ({"num_kv_heads": 1}, {"qk_norm": True}):
        with pytest.raises(
            ConfigError, match=r"block.mixer=linear has no grouped heads and no options around"
        ):
            RecurrentMixer(BlockConfig(**SIZES, mixer="linear", **options), 1.0, rngs=nnx.Rngs(0))
    with pytest.raises(
        ConfigError,
        match="no effect with mixer=gla: choose it from delta, gated_delta, kda",
    ):
        BlockConfig(**SIZES, mixer="gla", negative_eigenvalues=True)
