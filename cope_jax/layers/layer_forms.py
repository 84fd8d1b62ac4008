"""Layers of a stack that differ from the others in what has no parameters."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from flax import nnx

from cope_jax.encodings import AttentionShape, Composed, EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.layers.block import Block

Form = Callable[[Block], Block]


def check_layers(options: Any, name: str) -> None:
    """ConfigError unless the layers without a window exist and differ from the others."""
    layers = options.full_layers or ()
    if any(not 0 <= layer < options.num_layers for layer in layers) or len(set(layers)) < len(
        layers
    ):
        raise ConfigError(
            f"{name}.full_layers must be different numbers from 0 to {options.num_layers - 1}, got {layers}"
        )
    if layers and options.block.window is None and not options.full_encoding:
        raise ConfigError(
            f"{name}.full_layers has no effect without block.window or full_encoding: give one of them"
        )
    if options.full_encoding:
        EncodingConfig.parse(options.full_encoding)  # checks it
    if options.full_encoding and not layers:
        raise ConfigError(f"{name}.full_encoding has no effect without full_layers: give them")


def full_encoding(options: Any, shape: AttentionShape, *, rngs: nnx.Rngs) -> Composed | None:
    """The encoding of the layers without a window, unless it is that of the others.

    Raises:
      ConfigError: it has parameters or other parts than the encoding of the others, so that one
        stack and one cache cannot be for all layers.
    """
    if not options.full_encoding:
        return None
    config = EncodingConfig.parse(options.full_encoding)
    encoding = config.build(shape, rngs=rngs)
    if encoding.traits.embeds_input:
        raise ConfigError(
            f"full_encoding={options.full_encoding} has no effect, as it acts on the embeddings, which all layers "
            "share: leave it out"
        )
    parts, others = encoding.names, [name for name, _ in options.encoding.parts]
    if list(parts) != others or nnx.to_flat_state(nnx.state(encoding, nnx.Param)):
        raise ConfigError(
            f"full_encoding={options.full_encoding} must have the parts {'+'.join(others) or 'none'} with other "
            "options, and no parameters, as rope does"
        )
    return encoding


def layer_forms(options: Any, encoding: Composed | None) -> list[Form] | None:
    """Functions that change the block of each layer, in order; None if all layers are equal.

    `encoding` is that of the layers in `options.full_layers`, if not None.
    """
    full, bare = set(options.full_layers or ()), not getattr(options, "first_norm", True)
    if not full and not bare:
        return None

    def form(layer: int) -> Form:
        def change(block: Block) -> Block:
            block = copy.copy(block)
            block.normed = block.normed and not (bare and layer == 0)
            if layer in full:
                block.attention = copy.copy(block.attention)
                block.attention.config = dataclasses.replace(block.config, window=None)
                block.encoding = block.encoding if encoding is None else encoding
            return block

        return change

    return [form(layer) for layer in range(options.num_layers)]
