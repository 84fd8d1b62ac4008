"""What the formats of GPT-2 and Llama are made of: tables of tensors, and what their configs can say."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cope_jax.exchange.safetensors_io import TOKENS
from cope_jax.models.decoder import DecoderConfig

LM_HEAD = "lm_head.weight"


class Entry(NamedTuple):
    """One tensor of a file; in the name of one that every layer has, {} stands for the layer.

    Attributes:
      name: theirs.
      paths: ours; several lie side by side along the last axis.
      transposed: it lies there as [outputs, inputs].
    """

    name: str
    paths: tuple[str, ...]
    transposed: bool = False


class Format(NamedTuple):
    """An architecture: its tensors, the prefix that its body's may lack, names without meaning, and its config."""

    entries: tuple[Entry, ...]
    prefix: str
    ignored: str
    read: Callable[[Mapping[str, Any], str], DecoderConfig]
    write: Callable[[DecoderConfig], tuple[list[str], dict[str, Any]]]


def strange_choices(config: DecoderConfig, encoding: str, **told: tuple[Any, ...]) -> list[str]:
    """The choices that a format cannot say; `told` are those of the block that it can."""
    block = config.block
    names = [name for name, _ in config.encoding.parts]
    found = [] if names == [encoding] else [f"encoding {'+'.join(names) or 'none'}"]
    return found + [
        f"block.{name}={getattr(block, name)!r}"
        for name, known in {"norm_position": ("pre",), **told}.items()
        if getattr(block, name) not in known
    ]


def common_values(config: DecoderConfig) -> dict[str, Any]:
    """What both architectures say in the same words."""
    return {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": 0.02 if config.block.initial_stddev is None else config.block.initial_stddev,
        **dict.fromkeys(TOKENS),  # without these, transformers takes those of its defaults
    }


def norm_entries(theirs: str, ours: str) -> tuple[Entry, ...]:
    """The tensors of a norm; one without a bias has only the first."""
    return Entry(f"{theirs}.weight", (f"{ours}/norm/scale",)), Entry(f"{theirs}.bias", (f"{ours}/norm/bias",))


def linear_entries(theirs: str, *ours: str, transposed: bool = False) -> tuple[Entry, ...]:
    """The tensors of a linear layer, which may be several of ours side by side."""
    return (
        Entry(f"{theirs}.weight", tuple(f"{path}/kernel" for path in ours), transposed),
        Entry(f"{theirs}.bias", tuple(f"{path}/bias" for path in ours)),
    )
