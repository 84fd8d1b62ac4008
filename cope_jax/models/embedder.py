"""The interface of embedders, which compute contextual vectors of words, and their base class.

Every embedder maps each sentence to an array `[J, words, D]` of J layers, the lowest layer first.
Neighbours, word senses and probes use only this interface, not the models.
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
    """One input of a model, and the words whose vectors come from this input.

    The input is a sentence or a part of a sentence.

    Attributes:
      row: `[P, ...]`, P tokens that the model reads.
      words: `[W]`, the indices of these words in the sentence.
      spans: `[W, 2]`, the index of each word's first token in the row, and the index after the
        word's last token.
    """

    row: np.ndarray
    words: np.ndarray
    spans: np.ndarray


class Embedder(Protocol):
    """Maps each word of a sentence to vectors, one vector for each layer of a model.

    Attributes:
      name: the name of the embedder in tables and legends.
      layers: names of the J layers, the lowest first.
    """

    name: str
    layers: tuple[str, ...]

    def __call__(self, sentences: Sequence[Sentence]) -> list[np.ndarray]:
        """Returns float32 vectors `[J, words, D]` for each sentence."""


class ModelEmbedder(abc.ABC):
    """Base class of embedders that run a model on batches of windows of similar length.

    The vector of a word is the mean over the tokens of its span. Rows are padded to one of a few
    lengths, and the number of rows of a batch to a power of two, so that JAX compiles few programs.
    The vectors of a row do not depend on the other rows of its batch.

    Args:
      name: see `Embedder`. None means `title`.
      layers: see `Embedder`.
      tokens: maximum number of tokens of a batch, including padding. A row with more tokens is a
        separate batch.
      lengths: lengths to which rows are padded. Rows longer than all of these are padded to a
        multiple of the longest.

    Attributes:
      title: the default name of this kind of embedder.
      forward: maps (rows_BL, lengths_B) to the vectors of all layers, `[J, B, L, D]`. Rows may have
        further axes. After its first `lengths_B` entries, a row is padded with zeros.
    """

    title: ClassVar[str]
    forward: Callable[[np.ndarray, np.ndarray], Array]

    def __init__(
        self,
        name: str | None,
        layers: Sequence[str],
        *,
        tokens: int = 4096,
        lengths: Sequence[int] = LENGTHS,
    ):
        name = name or self.title
        check_at_least(1, name, tokens=tokens, lengths=min(lengths, default=0))
        self.name, self.layers = name, tuple(layers)
        self._tokens, self._lengths = tokens, sorted(lengths)

    @abc.abstractmethod
    def windows(self, sentence: Sentence) -> list[Window]:
        """Returns the windows of a sentence; each word is in `words` of exactly one window."""

    def __call__(self, sentences: Sequence[Sentence]) -> list[np.ndarray]:
        return self.vectors(sentences, self.windows)

    def vectors(
        self, sentences: Sequence[Sentence], windows: Callable[[Sentence], list[Window]]
    ) -> list[np.ndarray]:
        """Returns vectors `[J, words, D]` for each sentence, whose windows are `windows(sentence)`."""
        check_sentences(sentences)
        buckets: dict[int, list[tuple[int, Window]]] = {}
        for number, words in enumerate(sentences):
            for window in windows(words):
                buckets.setdefault(self._padded(len(window.row)), []).append((number, window))
        results: list[Any] = [None] * len(sentences)
        for length, members in sorted(buckets.items()):
            most = 1 << max(1, self._tokens // length).bit_length() - 1
            for start in range(0, len(members), most):
                self._run(members[start : start + most], length, sentences, results)
        return results

    def _run(
        self,
        members: Sequence[tuple[int, Window]],
        length: int,
        sentences: Sequence[Sentence],
        results: list[Any],
    ) -> None:
        first = members[0][1].row
        rows = np.zeros(
            (1 << (len(members) - 1).bit_length(), length, *first.shape[1:]), first.dtype
        )
        # 1 for rows that only fill the batch, because none may be empty.
        lengths = np.ones(len(rows), np.int32)
        for row, (_, window) in enumerate(members):
            rows[row, : len(window.row)] = window.row
            lengths[row] = len(window.row)
        layers_JBLD = np.asarray(self.forward(rows, lengths), np.float32)
        for row, (number, window) in enumerate(members):
            if results[number] is None:
                shape = (len(layers_JBLD), len(sentences[number]), layers_JBLD.shape[-1])
                results[number] = np.zeros(shape, np.float32)
            results[number][:, window.words] = pool(layers_JBLD[:, row], window.spans)

    def _padded(self, length: int) -> int:
        longest = self._lengths[-1]
        return next(
            (padded for padded in self._lengths if length <= padded),
            -(-length // longest) * longest,
        )


def jitted(model: nnx.Module, function: Any) -> Any:
    """Compiles `function(model, *arrays)`, with parameters as arguments, not as constants."""
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
    """The window of a sentence: a row of `begin` marks, a token for each word, `end` marks."""
    indices = np.arange(len(row) - begin - end)
    return Window(row, indices, np.stack([begin + indices, begin + indices + 1], axis=1))


def overlapping(sizes: Sequence[int], room: int) -> list[tuple[range, list[int]]]:
    """Cuts a sentence into windows that overlap by half.

    Each word belongs to the window in which the word is farthest from a cut. The ends of the
    sentence are not cuts.

    Args:
      sizes: the number of pieces of each word, from 1 to `room`.
      room: maximum number of pieces of a window.

    Returns:
      For each window, (the range of all words in the window, the words that belong to the window).
      The second part may be empty.

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
        start = int(np.searchsorted(ends, (ends[start] + ends[stop]) / 2))
    best = [(-1.0, -1)] * len(sizes)
    for number, words in enumerate(ranges):
        for word in words:
            left = np.inf if words.start == 0 else ends[word] - ends[words.start]
            right = np.inf if words.stop == len(sizes) else ends[words.stop] - ends[word + 1]
            if min(left, right) > best[word][0]:
                best[word] = (min(left, right), number)
    return [
        (words, [word for word in words if best[word][1] == number])
        for number, words in enumerate(ranges)
    ]


def pool(layers_JLD: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Returns the mean over the tokens of each span, `[J, W, D]`."""
    starts, stops = spans.T
    if np.all(stops - starts == 1):
        return layers_JLD[:, starts]
    sums = np.cumsum(layers_JLD, axis=1, dtype=np.float64)
    sums = np.pad(sums, ((0, 0), (1, 0), (0, 0)))
    return (sums[:, stops] - sums[:, starts]) / (stops - starts)[:, None]
