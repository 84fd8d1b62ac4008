"""Computes the vectors of sentences, and of given occurrences of words, with any embedder."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from cope_jax.errors import ConfigError
from cope_jax.models.embedder import Embedder, Sentence


def embed(
    embedder: Embedder, sentences: Sequence[Sentence], *, chunk: int = 256, label: str | None = None
) -> Iterator[np.ndarray]:
    """The vectors `[J, words, D]` of each sentence, computed for `chunk` sentences at a time to limit memory.

    With a label, a progress bar shows it.
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

    A sentence that occurs several times is embedded once. `label`: see `embed`.
    """
    for number, (sentence, place) in enumerate(zip(sentences, places, strict=True)):
        if not 0 <= place < len(sentence):
            raise ConfigError(
                f"occurrence {number} names word {place}, but its sentence has only {len(sentence)} words"
            )
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
