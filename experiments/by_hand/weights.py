"""The parameters of a decoder, written by hand: named registers of the residual stream, heads that
compare and move them, and units of the feed-forward layers.

A *form* is a matrix `[D, n]`: n numbers, each a linear combination of the residual stream.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from cope_jax.models.decoder import DecoderConfig

ANCHOR = 2000.0
"""The size of two constant coordinates. They are much larger than everything else, so a norm
divides all tokens by the same number."""
STEEP = 1e5
"""GELU(STEEP·z)/STEEP is relu(z) unless |z| is below a few 1/STEEP."""


class Weights:
    """Parameters that start as zeros, and registers by name.

    Three coordinates are reserved: ANCHOR, −ANCHOR and the negative sum of all registers, which
    makes every mean 0. So all norms return what they read, up to about |x|²/ANCHOR². The register
    "one" is always 1.

    Args:
      config: the decoder's config, with LayerNorm and GELU.
      shapes: its parameters, as a tree of arrays or shapes.
      registers: the width of each register by name.
    """

    def __init__(self, config: DecoderConfig, shapes: Any, registers: Mapping[str, int]):
        self.config, self.shape = config, config.block.attention_shape(config.max_length)
        self.params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
        self.places: dict[str, slice] = {}
        start = 3
        for name, width in {"one": 1, **registers}.items():
            self.places[name] = slice(start, start + width)
            start += width
        width = self.config.block.model_dim
        if start > width:
            raise ValueError(f"registers need a model_dim of {start}, not {width}")
        blocks = self.params["blocks"]
        for norm in (blocks["attention_norm"], blocks["mlp_norm"], self.params["norm"]):
            norm["norm"]["scale"][...] = ANCHOR * (2 / width) ** 0.5
        self.embedding = self.params["embedding"]["embedding"]
        self.embedding[:, :2] = ANCHOR, -ANCHOR
        self.embedding[:, self.places["one"]] = 1
        self.encoding = next(iter(blocks.get("encoding", {}).values()), {})
        self._dims: dict[tuple[str, int, int], int] = {}

    def pick(self, name: str) -> np.ndarray:
        """The form of all numbers of a register."""
        return np.eye(self.config.block.model_dim, dtype=np.float32)[:, self.places[name]]

    @property
    def one(self) -> np.ndarray:
        """The form of the number 1."""
        return self.pick("one")

    def embed(self, name: str, values: Mapping[int, Any]) -> None:
        """Sets a register of the embeddings of some tokens."""
        for token, value in values.items():
            self.embedding[token, self.places[name]] = value

    def compare(
        self, layer: int, head: int, query: np.ndarray, key: np.ndarray, dims: Iterable[int]
    ) -> None:
        """Adds Σ query·key to the logits of a head, by these dims of the head."""
        attention, width = self.params["blocks"]["attention"], self.shape.head_dim
        for dim, of_query, of_key in zip(dims, query.T, key.T, strict=False):
            column = head * width + dim
            attention["query"]["kernel"][layer, :, column] += of_query * width**0.5
            attention["key"]["kernel"][layer, :, column] += of_key

    def move(self, layer: int, head: int, source: np.ndarray, target: np.ndarray) -> None:
        """Adds the head's mean of a form to other registers: `target` is a form of as many numbers."""
        attention, width = self.params["blocks"]["attention"], self.shape.head_dim
        start = self._take("value", layer, head, source.shape[1], width)
        columns = slice(head * width + start, head * width + start + source.shape[1])
        attention["value"]["kernel"][layer, :, columns] = source
        attention["out"]["kernel"][layer, columns] = target.T

    def relu(self, layer: int, z: np.ndarray, target: np.ndarray) -> None:
        """Adds Σ target·max(z, 0) to the residual stream, with a hidden unit for each number of z."""
        mlp = self.params["blocks"]["mlp"]
        start = self._take("hidden", layer, 0, z.shape[1], mlp["inner"]["bias"].shape[1])
        units = slice(start, start + z.shape[1])
        mlp["inner"]["kernel"][layer, :, units] = STEEP * z
        mlp["outer"]["kernel"][layer, units] = target.T / STEEP

    def step(self, layer: int, z: np.ndarray, target: np.ndarray, sharpness: float = 2.0) -> None:
        """Adds target where z ≥ 1/sharpness, nothing where z ≤ 0, and a share of it between."""
        self.relu(layer, sharpness * z, target)
        self.relu(layer, sharpness * z - self.one, -target)

    def answers(self, forms: Mapping[int, np.ndarray]) -> None:
        """Sets the logits of some tokens, each a form of one number; all others are never chosen."""
        out = self.params["out"]["kernel"]
        out[...] = -1000 * self.one
        for token, form in forms.items():
            out[:, token] = form[:, 0]

    def spell(self, name: str, codes: Mapping[int, np.ndarray]) -> None:
        """Answers with the token whose code of ±1 is in a register, at any scale."""
        self.answers({token: self.pick(name) @ code[:, None] for token, code in codes.items()})

    def finish(self) -> Any:
        """The parameters, with the coordinate that makes every mean 0."""
        blocks = self.params["blocks"]
        for writes in (
            self.embedding,
            blocks["attention"]["out"]["kernel"],
            blocks["mlp"]["outer"]["kernel"],
        ):
            writes[..., 2] = -writes[..., 3:].sum(axis=-1)
        return self.params

    def _take(self, kind: str, layer: int, head: int, count: int, most: int) -> int:
        start = self._dims.get((kind, layer, head), 0)
        self._dims[kind, layer, head] = start + count
        if start + count > most:
            raise ValueError(f"layer {layer} has room for {most} of {kind}, not {start + count}")
        return start


def codes(count: int) -> np.ndarray:
    """A row of ±1 for each of `count` things, with as few columns as possible."""
    bits = max(1, (count - 1).bit_length())
    return 2.0 * (np.arange(count)[:, None] >> np.arange(bits) & 1) - 1
