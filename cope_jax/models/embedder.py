"""Contextual vectors of words, by layer: the interface, and what the embedders of all models share.

Every embedder maps each sentence to an array `[J, words, D]`, the lowest of its J layers first. Neighbours, word senses
and probes use only this interface, and no model.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import jax
import numpy as np
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least

Sentence = Sequence[str]
LENGTHS = (16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Window:
    """One input of a model, a sentence or a part of one, and the words that have their vectors from it.

    Attributes:
      row: `[P, ...]`, the model's input at P places.
      words: `[W]`, places of the words in their sentence.
      spans: `[W, 2]`, the first place of each word in the row, and the place after its last.
    """

    row: np.ndarray
    words: np.ndarray
    spans: np.ndarray


class Embedder(Protocol):
    """Gives each word of a sentence its vectors.

    Attributes:
      name: for tables and legends.
      layers: names of the J layers, the lowest first.
    """

    name: str
    layers: tuple[str, ...]

    def __call__(self, sentences: Sequence[Sentence]) -> list[np.ndarray]:
        """Per sentence float32 `[J, words, D]`."""


class ModelEmbedder(abc.ABC):
    """Base class of embedders that run a model, on batches of windows of similar length.

    The vector of a word is the mean over the places of its span. Rows are padded to one of a few lengths and batches
    to a power of two, so that few programs are compiled. A vector does not depend on the rest of its batch.

    Args:
      name: see `Embedder`. None means `title`.
      layers: see `Embedder`.
      tokens: maximum number of tokens of a batch, including padding; a longer row is a batch of its own.
      lengths: lengths to which rows are padded, ascending; longer rows are padded to a multiple of the last.

    Attributes:
      title: the default name of this kind of embedder.
      forward: (rows_BL, lengths_B) to `[J, B, L, D]`, all layers. Rows may have further axes. Behind
        its first `lengths_B` entries a row is padded with zeros.
    """

    title: ClassVar[str]
    forward: Callable[[np.ndarray, np.ndarray], Array]

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

    def __call__(self, sentences: Sequence[Sentence]) -> list[np.ndarray]:
        check_sentences(sentences)
        buckets: dict[int, list[tuple[int, Window]]] = {}
        for number, words in enumerate(sentences):
            for window in self.windows(words):
                buckets.setdefault(self._padded(len(window.row)), []).append((number, window))
        results: list[Any] = [None] * len(sentences)
        for length, members in sorted(buckets.items()):
            most = 1 << max(1, self._tokens // length).bit_length() - 1
            for start in range(0, len(members), most):
                self._run(members[start : start + most], length, sentences, results)
        return results

    def _run(
        self, members: Sequence[tuple[int, Window]], length: int, sentences: Sequence[Sentence], results: list[Any]
    ) -> None:
        first = members[0][1].row
        rows = np.zeros((1 << (len(members) - 1).bit_length(), length, *first.shape[1:]), first.dtype)
        lengths = np.ones(len(rows), np.int32)  # 1 for rows that only fill the batch, because none may be empty
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


def whole(row: np.ndarray, begin: int = 0, end: int = 0) -> Window:
    """The window of a row with one place for each word, after `begin` and before `end` places of marks."""
    indices = np.arange(len(row) - begin - end)
    return Window(row, indices, np.stack([begin + indices, begin + indices + 1], axis=1))


def overlapping(sizes: Sequence[int], room: int) -> list[tuple[range, list[int]]]:
    """Cuts words of some sizes into windows that overlap by half.

    Each word is owned by the window in which it is farthest from a cut; the ends of the sentence are not cuts.

    Args:
      sizes: pieces of each word, from 1 to `room`.
      room: pieces of a window.

    Returns:
      The words of each window, and the words that it owns, possibly none.

    >>> overlapping([1, 1, 1, 1, 1, 1], 4)
    [(range(0, 4), [0, 1, 2]), (range(2, 6), [3, 4, 5])]
    """
    ends = np.cumsum([0, *sizes])
    ranges, start = [], 0
    while True:
        stop = int(np.searchsorted(ends, ends[start] + room, side="right")) - 1
        ranges.append(range(start, stop))
        if stop == len(sizes):
            break
        half = int(np.searchsorted(ends, (ends[start] + ends[stop]) / 2))
        start = min(max(half, start + 1), stop)
    best = [(-1.0, -1)] * len(sizes)
    for number, words in enumerate(ranges):
        for word in words:
            left = np.inf if words.start == 0 else ends[word] - ends[words.start]
            right = np.inf if words.stop == len(sizes) else ends[words.stop] - ends[word + 1]
            if min(left, right) > best[word][0]:
                best[word] = (min(left, right), number)
    return [(words, [word for word in words if best[word][1] == number]) for number, words in enumerate(ranges)]


def pool(layers_JLD: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """The mean over the places of each span, `[J, W, D]`."""
    starts, stops = spans.T
    if np.all(stops - starts == 1):
        return layers_JLD[:, starts]
    sums = np.cumsum(layers_JLD, axis=1, dtype=np.float64)
    sums = np.pad(sums, ((0, 0), (1, 0), (0, 0)))
    return (sums[:, stops] - sums[:, starts]) / (stops - starts)[:, None]
