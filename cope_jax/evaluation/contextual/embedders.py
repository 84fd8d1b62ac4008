"""Embedders of words by vectors without a context, and the vectors of sentences and occurrences from any embedder."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from cope_jax.errors import ConfigError
from cope_jax.models.embedder import Embedder, Sentence, check_sentences


class ContextFree:
    """A word has the same vector in every sentence: v(w | sentence) = E[w].

    A word without a vector has that of its lower-case form, or else zeros, whose cosine with anything counts as 0.

    >>> ContextFree({"play": np.array([3.0, 4.0])})([["Play", "on"]])[0].tolist()
    [[[3.0, 4.0], [0.0, 0.0]]]
    """

    def __init__(self, vectors: Mapping[str, np.ndarray], name: str = "context-free"):
        if not vectors:
            raise ConfigError(f"{name} has no vectors: train them on text with more words, or lower the minimum count")
        self.name = name
        self.layers: tuple[str, ...] = ("static",)
        self.vectors = vectors
        self._zeros = np.zeros_like(next(iter(vectors.values())), np.float32)

    def __call__(self, sentences: Sequence[Sentence]) -> list[np.ndarray]:
        check_sentences(sentences)
        return [np.stack([self._vector(word) for word in sentence]).astype(np.float32)[None] for sentence in sentences]

    def _vector(self, word: str) -> np.ndarray:
        return self.vectors[word] if word in self.vectors else self.vectors.get(word.lower(), self._zeros)


class ContextMean:
    """A word has the mean of its neighbours' static vectors, without its own: v(w_i) = mean_{j≠i} E[w_j].

    It knows which words are around, and neither their order nor the word. Words without a vector count for nothing.

    >>> vectors = {"a": np.array([1.0, 0.0]), "b": np.array([0.0, 1.0]), "c": np.array([0.0, 3.0])}
    >>> ContextMean(vectors)([["a", "b", "c"]])[0][0, 0].tolist()
    [0.0, 2.0]
    """

    def __init__(self, vectors: Mapping[str, np.ndarray], name: str = "mean of the context"):
        self.name = name
        self.layers: tuple[str, ...] = ("static",)
        self._vectors = ContextFree(vectors, name)

    def __call__(self, sentences: Sequence[Sentence]) -> list[np.ndarray]:
        check_sentences(sentences)
        found = []
        for vectors_1LD in self._vectors(sentences):
            has_vector_1L1 = vectors_1LD.any(axis=-1, keepdims=True).astype(np.float32)
            count_1L1 = has_vector_1L1.sum(axis=1, keepdims=True) - has_vector_1L1
            others_1LD = vectors_1LD.sum(axis=1, keepdims=True) - vectors_1LD
            # Of a word alone the difference may leave rounding behind, which is no direction.
            found.append(np.where(count_1L1 > 0, others_1LD / np.maximum(count_1L1, 1), 0).astype(np.float32))
        return found


def embed(
    embedder: Embedder, sentences: Sequence[Sentence], *, chunk: int = 256, label: str | None = None
) -> Iterator[np.ndarray]:
    """The vectors `[J, words, D]` of each sentence, of which only `chunk` are held at a time.

    Args:
      embedder: gives the vectors.
      sentences: words of each.
      chunk: sentences that are embedded together.
      label: stands before a progress bar; None: there is none.
    """
    options = {"unit": "sentence", "dynamic_ncols": True, "disable": label is None}
    with tqdm(total=len(sentences), desc=f"{embedder.name}: {label}", **options) as bar:
        for start in range(0, len(sentences), chunk):
            found = embedder(sentences[start : start + chunk])
            yield from found
            bar.update(len(found))


def occurrence_vectors(
    embedder: Embedder,
    sentences: Sequence[Sentence],
    places: Sequence[int],
    *,
    dtype: Any = np.float32,
    label: str | None = None,
) -> np.ndarray:
    """The vectors `[N, J, D]` of one word in each of N sentences.

    A sentence that comes several times is embedded once; `label` is that of `embed`.
    """
    for number, (sentence, place) in enumerate(zip(sentences, places, strict=True)):
        if not 0 <= place < len(sentence):
            raise ConfigError(f"occurrence {number} is word {place} of a sentence of {len(sentence)} words")
    numbers: dict[tuple[str, ...], list[int]] = {}
    for number, sentence in enumerate(sentences):
        numbers.setdefault(tuple(sentence), []).append(number)
    found = np.zeros((len(sentences), 0, 0), dtype)
    for own, layers_JLD in zip(numbers.values(), embed(embedder, list(numbers), label=label), strict=True):
        if not found.size:
            found = np.zeros((len(sentences), len(layers_JLD), layers_JLD.shape[-1]), dtype)
        for number in own:
            found[number] = layers_JLD[:, places[number]]
    return found
