"""Corpora drawn from together, with weights."""

from collections.abc import Iterator, Sequence
from typing import Any

from cope_jax.corpora.raw_text import (
    READERS,
    SAME_TESTS,
    STANDARD_PLACES,
    WITH_GLOBS,
    WITHOUT_WORDS,
    fingerprint,
    reader,
)
from cope_jax.errors import ConfigError


def parse(corpus: str) -> tuple[tuple[float, str], ...]:
    """Weights and names of the corpora in a text; a corpus without a weight has 1.

    Raises:
      ConfigError: an unknown corpus, one named twice, two with the same test, a weight that is no positive number.

    >>> parse("3*wikitext-2 + code")
    ((3.0, 'wikitext-2'), (1.0, 'code'))
    """
    parts = []
    for part in corpus.split("+"):
        weight, star, name = part.rpartition("*")
        READERS.get(name.strip())
        try:
            number = float(weight) if star else 1.0
        except ValueError:
            number = 0.0
        if not 0 < number < float("inf"):
            raise ConfigError(f"text.corpus={corpus!r} has a weight that is no positive number: {weight!r}")
        parts.append((number, name.strip()))
    names = [name for _, name in parts]
    if len(set(names)) < len(names):
        raise ConfigError(f"text.corpus={corpus!r} names a corpus twice: give it one weight")
    same = [name for name in names if name in SAME_TESTS]
    if len(same) > 1:
        raise ConfigError(f"text.corpus={corpus!r}: {' and '.join(same)} have the same validation and test: take one")
    return tuple(parts)


class Mixture:
    """The texts of one corpus or of several, which are looked for when they are asked for.

    Takes what `documents` does, but the corpora are a text for `parse`, of which one may take globs.

    Attributes:
      weights: of each corpus.
      has_words: whether perplexities by words compare.
      place: where the texts come from, in words.

    Raises:
      ConfigError: as `parse` does; globs, and no corpus takes them, or two.

    >>> [len(texts) for texts in Mixture("files+wikitext-2").texts("train")]
    [3, 5]
    """

    def __init__(self, corpus: str, data_dir: str | None = None, globs: Sequence[str] = ()):
        parts = parse(corpus)
        names = [name for _, name in parts]
        taking = [name for name in names if name in WITH_GLOBS]
        if globs and len(taking) != 1:
            raise ConfigError(
                f"text.globs choose files of one of {' and '.join(sorted(WITH_GLOBS))}, and text.corpus={corpus!r} has "
                f"{' and '.join(taking) or 'neither'}: leave globs out"
            )
        self.weights = tuple(weight for weight, _ in parts)
        self.has_words = WITHOUT_WORDS.isdisjoint(names)
        indices = {STANDARD_PLACES.get(name, "the small built-in sample") for name in names}
        self.place = " and ".join(sorted(indices)) if data_dir is None else str(data_dir)
        self._readers = [reader(name, data_dir, globs) for name in names]
        self._fingerprints: dict[str, dict[str, Any]] = {}

    def texts(self, split: str) -> list[list[str]]:
        """The documents of a split, of each corpus."""
        return [read(split) for read in self._readers]

    def documents(self, split: str) -> Iterator[str]:
        """The documents of a split, one corpus after the other, which are read when the first is asked for."""
        for read in self._readers:
            yield from read(split)

    def fingerprint(self, split: str) -> dict[str, Any]:
        """`fingerprint` of the documents of a split."""
        if split not in self._fingerprints:
            self._fingerprints[split] = fingerprint(self.documents(split))
        return self._fingerprints[split]
