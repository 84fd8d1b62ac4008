"""Computes the vectors of sentences, and of given occurrences of words, with any embedder."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cope_jax.errors import ConfigError
from cope_jax.models.embedder import Embedder, Sentence
from cope_jax.progress import Progress


def embed(
    embedder: Embedder, sentences: Sequence[Sentence], *, chunk: int = 256, label: str | None = None
) -> Iterator[np.ndarray]:
    """Yields the vectors `[J, words, D]` of each sentence in J layers.

    To limit memory, it embeds `chunk` sentences at a time. If `label` is None, there is no progress
    bar. Otherwise, a progress bar shows the label.
    """
    title = f"{embedder.name}: {label}"
    with Progress(len(sentences), "sentence", label=title, active=label is not None) as progress:
        for start in range(0, len(sentences), chunk):
            vectors = embedder(sentences[start : start + chunk])
            yield from vectors
            progress.advance(len(vectors))


def occurrence_vectors(
    embedder: Embedder,
    sentences: Sequence[Sentence],
    places: Sequence[int],
    *,
    dtype: Any = np.float32,
    label: str | None = None,
) -> np.ndarray:
    """The vectors `[N, J, D]` of a word in each of N sentences; `places` has their indices.

    A sentence that occurs several times is embedded only once. For `label`, see `embed`.
    """
    for number, (sentence, index) in enumerate(zip(sentences, places, strict=True)):
        if not 0 <= index < len(sentence):
            raise ConfigError(
                f"occurrence {number} refers to word number {index}, but its sentence has only {len(sentence)} words: "
                "count from 0"
            )
    numbers: dict[tuple[str, ...], list[int]] = {}
    for number, sentence in enumerate(sentences):
        numbers.setdefault(tuple(sentence), []).append(number)
    vectors = np.zeros((len(sentences), 0, 0), dtype)
    for occurrences, layers_JLD in zip(
        numbers.values(), embed(embedder, list(numbers), label=label), strict=True
    ):
        if not vectors.size:
            vectors = np.zeros((len(sentences), len(layers_JLD), layers_JLD.shape[-1]), dtype)
        for number in occurrences:
            vectors[number] = layers_JLD[:, places[number]]
    return vectors
