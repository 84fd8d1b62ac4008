"""Tiny decoders with random parameters, and the oracle's view of them."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from flax import nnx

from cope_jax import testing
from cope_jax.encodings import EncodingConfig
from cope_jax.layers.block_config import BlockConfig
from cope_jax.models.decoder import Decoder, DecoderConfig
from tests.encodings.cases import rule_of
from tests.oracle.decoder import Choices, decoder
from tests.oracle.encodings import Rule, Sizes

VOCAB, LENGTH, LAYERS = 11, 7, 2
BLOCK = BlockConfig(model_dim=8, num_heads=2, mlp_dim=12)
# Norms, softmax and logits are float32 by contract, so float32 is what can be compared: a logit of
# size 1 is the end of a chain of about a hundred roundings of 6e-8, of either sign.
ROUNDING = 2e-6


def config(
    encoding: str = "cope(npos_max=4)", block: dict[str, Any] | None = None, **options: Any
) -> DecoderConfig:
    """A decoder of two layers and width 8; `block` replaces choices of every block."""
    defaults = {"vocab_size": VOCAB, "max_length": LENGTH, "num_layers": LAYERS}
    parsed = EncodingConfig.parse(encoding)
    return DecoderConfig(
        **defaults | options, encoding=parsed, block=dataclasses.replace(BLOCK, **block or {})
    )


def abstract(config: DecoderConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """Structure and shapes of a decoder, without a single number."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


def build(config: DecoderConfig, seed: int = 0) -> tuple[nnx.GraphDef, nnx.State]:
    """A decoder whose parameters all are random and matter: no bias is 0, no scale 1."""
    graphdef, state = abstract(config)
    rng = np.random.default_rng(seed)
    values = jax.tree.map(
        lambda a: rng.normal(scale=0.5, size=a.shape).astype(a.dtype), nnx.to_pure_dict(state)
    )
    nnx.replace_by_pure_dict(state, values)
    return graphdef, state


def model(config: DecoderConfig, seed: int = 0) -> Decoder:
    """The same as a module."""
    return nnx.merge(*build(config, seed))


def checker(graphdef: nnx.GraphDef, state: Any, length: int = LENGTH) -> Any:
    """`cope_jax.testing.check` of a decoder and its cache: add `laws` and `tolerance`."""

    @jax.jit
    def logits(state, tokens, positions, segments):
        model = nnx.merge(graphdef, state)
        return model(tokens, positions_BL=positions, segment_ids_BL=segments)

    def function(tokens, positions=None, segments=None):
        places = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        positions = places if positions is None else positions
        return logits(state, tokens, positions, 0 * tokens if segments is None else segments)

    @jax.jit
    def prefill(state, tokens, lengths):
        return nnx.merge(graphdef, state).prefill(tokens, length, lengths_B=lengths)

    @jax.jit
    def decode(state, tokens, cache):
        return nnx.merge(graphdef, state).decode(tokens, cache)

    def step(cache, tokens, real=None, **_):
        if cache is not None:
            return decode(state, tokens, cache)
        real = np.ones_like(tokens) if real is None else real
        return prefill(state, tokens, np.sum(real, axis=1, dtype=np.int32))

    keywords = {"segments": "segments", "positions": "positions", "padding": "real"}
    sizes = {"batch": 2, "length": length, "lengths": [length // 2 + 1]}
    inputs = testing.tokens(VOCAB)
    return functools.partial(testing.check, function, inputs, step=step, **keywords, **sizes)


def tokens(batch: int = 2, length: int = LENGTH, seed: int = 0) -> np.ndarray:
    """Random tokens, int32."""
    return np.random.default_rng(seed).integers(0, VOCAB, (batch, length), dtype=np.int32)


def named(state: nnx.State) -> dict[str, np.ndarray]:
    """The parameters by path."""
    return {
        "/".join(map(str, path)): np.asarray(leaf[...], np.float64)
        for path, leaf in nnx.to_flat_state(state)
    }


def expected(
    config: DecoderConfig,
    shared: str,
    per_layer: str,
    params: dict[str, np.ndarray],
    row: np.ndarray,
    positions: Any = None,
    segments: Any = None,
) -> np.ndarray:
    """The oracle's logits of one sequence.

    `shared` is the encoding of the model, and `per_layer` that of each layer.
    """
    shape, block = config.block.attention_shape(config.max_length), config.block
    sizes = Sizes(
        shape.num_heads, shape.kv_heads, shape.head_dim, block.model_dim, config.max_length
    )
    layers = [
        {
            path.removeprefix("blocks/"): value[layer]
            for path, value in params.items()
            if path.startswith("blocks/")
        }
        for layer in range(config.num_layers)
    ]

    def rule(spec, values):
        bare = {
            path.removeprefix("encoding/"): value
            for path, value in values.items()
            if path.startswith("encoding/")
        }
        return (
            rule_of(spec, {_plain(path): value for path, value in bare.items()}, sizes)
            if spec
            else Rule()
        )

    choices = Choices(
        shape.num_heads,
        shape.kv_heads,
        shape.head_dim,
        block.activation,
        block.norm,
        block.norm_position,
        bool(config.tape),
    )
    full = config.full_layers or ()
    layer_rules = [
        rule(config.full_encoding if number in full else per_layer, layer)
        for number, layer in enumerate(layers)
    ]
    return decoder(
        row, params, layers, choices, rule(shared, params), layer_rules, positions, segments
    )


def _plain(path: str) -> str:
    """A parameter's name without the letters of its shape."""
    head, _, letters = path.rpartition("_")
    return head if letters.isupper() and letters.isalpha() else path
