"""Vectors of words in their sentences, by layer: the interface, and what the embedders of all models share.

Every embedder maps sentences to one array `[J, words, D]` each, the lowest of its J layers first. What looks for
neighbours, tells senses apart or probes layers knows this interface and no model.
"""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import jax
import numpy as np
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.errors import ConfigError
from cope_jax.models.sentence_windows import Window, pool
from cope_jax.registry import check_at_least

Sentence = Sequence[str]
LENGTHS = (16, 32, 64, 128, 256)


class Embedder(Protocol):
    """What gives each word of a sentence its vectors.

    Attributes:
      name: for tables and legends.
      layers: names of the J layers, the lowest first.
    """

    name: str
    layers: tuple[str, ...]

    def __call__(self, sentences: Sequence[Sentence]) -> list[np.ndarray]:
        """Per sentence float32 `[J, words, D]`."""


class ModelEmbedder(abc.ABC):
    """Base of embedders that run a model: windows of similar length go through it together.

    The vector of a word is the mean over the places of its span. Rows are padded to one of a few lengths and batches
    to a power of two, so that few programs are compiled; a vector does not depend on what shares its batch.

    Args:
      name: see `Embedder`; None: `title`.
      layers: see `Embedder`.
      tokens: bound on the places of a batch, padding included; a longer row goes alone.
      lengths: what rows are padded to, ascending; beyond the last, multiples of it.

    Attributes:
      title: of embedders of this kind.
    """

    title: ClassVar[str]

    def __init__(
        self, name: str | None, layers: Sequence[str], *, tokens: int = 4096, lengths: Sequence[int] = LENGTHS
    ):
        name = name or self.title
        check_at_least(1, name, tokens=tokens, lengths=min(lengths, default=0))
        self.name, self.layers = name, tuple(layers)
        self._tokens, self._lengths = tokens, sorted(lengths)

    @abc.abstractmethod
    def windows(self, sentence: Sentence) -> list[Window]:
        """The windows of a sentence, in which each word occurs exactly once among all `words`."""

    @abc.abstractmethod
    def forward(self, rows_BL: np.ndarray, lengths_B: np.ndarray) -> Array:
        """`[J, B, L, D]`: all layers. Rows may have further axes; places from `lengths_B` on are padding, of 0."""

    def __call__(self, sentences: Sequence[Sentence]) -> list[np.ndarray]:
        check_sentences(sentences)
        windows = [(number, window) for number, words in enumerate(sentences) for window in self.windows(words)]
        buckets: dict[int, list[tuple[int, Window]]] = {}
        for number, window in windows:
            buckets.setdefault(self._padded(len(window.row)), []).append((number, window))
        results: list[Any] = [None] * len(sentences)
        for length, members in sorted(buckets.items()):
            most = _power_of_two_below(max(1, self._tokens // length))
            for start in range(0, len(members), most):
                self._run(members[start : start + most], length, sentences, results)
        return results

    def _run(
        self, members: Sequence[tuple[int, Window]], length: int, sentences: Sequence[Sentence], results: list[Any]
    ) -> None:
        first = members[0][1].row
        rows = np.zeros((_power_of_two_above(len(members)), length, *first.shape[1:]), first.dtype)
        lengths = np.ones(len(rows), np.int32)  # of the rows that only fill the batch: none may be empty
        for place, (_, window) in enumerate(members):
            rows[place, : len(window.row)] = window.row
            lengths[place] = len(window.row)
        layers_JBLD = np.asarray(self.forward(rows, lengths), np.float32)
        for place, (number, window) in enumerate(members):
            if results[number] is None:
                shape = (len(layers_JBLD), len(sentences[number]), layers_JBLD.shape[-1])
                results[number] = np.zeros(shape, np.float32)
            results[number][:, window.words] = pool(layers_JBLD[:, place], window.spans)

    def _padded(self, length: int) -> int:
        longest = self._lengths[-1]
        return next((padded for padded in self._lengths if length <= padded), -(-length // longest) * longest)


def jitted(model: nnx.Module, function: Any) -> Any:
    """The compiled `function(model, *arrays)` as a function of the arrays; parameters are arguments, not constants."""
    graph, state = nnx.split(model)
    compiled = jax.jit(lambda state, *arrays: function(nnx.merge(graph, state), *arrays))
    return lambda *arrays: compiled(state, *arrays)


def check_sentences(sentences: Sequence[Sentence]) -> None:
    """Raises ConfigError for a sentence without words, and for text in place of a list of words."""
    for number, sentence in enumerate(sentences):
        if isinstance(sentence, str):
            raise ConfigError(f"sentence {number} is text, {sentence[:20]!r}: split it into words")
        if not sentence:
            raise ConfigError(f"sentence {number} is empty: leave it out")


def numbered(layers: int) -> tuple[str, ...]:
    """Names of layers that are counted from 1."""
    return tuple(f"layer {number}" for number in range(1, layers + 1))


def _power_of_two_above(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _power_of_two_below(size: int) -> int:
    return 1 << (size.bit_length() - 1)
