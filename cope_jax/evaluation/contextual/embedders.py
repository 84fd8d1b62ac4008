"""Vectors of words without a context, and the vectors of given occurrences from any embedder."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
        self.name, self.layers = name, ("static",)
        self.vectors = vectors
        self._zeros = np.zeros_like(next(iter(vectors.values())), np.float32)

    def __call__(self, sentences: Sequence[Sentence]) -> list[np.ndarray]:
        check_sentences(sentences)
        return [np.stack([self._vector(word) for word in sentence]).astype(np.float32)[None] for sentence in sentences]

    def _vector(self, word: str) -> np.ndarray:
        return self.vectors[word] if word in self.vectors else self.vectors.get(word.lower(), self._zeros)


def occurrence_vectors(
    embedder: Embedder,
    sentences: Sequence[Sentence],
    places: Sequence[int],
    *,
    dtype: Any = np.float32,
    chunk: int = 512,
) -> np.ndarray:
    """The vectors `[N, J, D]` of one word in each of N sentences.

    A sentence that comes several times is embedded once, and only `chunk` sentences are held whole at a time.
    """
    for number, (sentence, place) in enumerate(zip(sentences, places, strict=True)):
        if not 0 <= place < len(sentence):
            raise ConfigError(f"occurrence {number} is word {place} of a sentence of {len(sentence)} words")
    wanted: dict[tuple[str, ...], list[int]] = {}
    for number, sentence in enumerate(sentences):
        wanted.setdefault(tuple(sentence), []).append(number)
    found, distinct = np.zeros((len(sentences), 0, 0), dtype), list(wanted)
    for start in range(0, len(distinct), chunk):
        for sentence, layers_JLD in zip(
            distinct[start : start + chunk], embedder(distinct[start : start + chunk]), strict=True
        ):
            if not found.size:
                found = np.zeros((len(sentences), len(layers_JLD), layers_JLD.shape[-1]), dtype)
            for number in wanted[sentence]:
                found[number] = layers_JLD[:, places[number]]
    return found
