"""What is guessed of a word without its context: the label that it has most often. The floor of every tagger."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any


def of_all(labels: Sequence[Any]) -> Any:
    """The most frequent label; the first in order where counts are equal.

    >>> of_all(["NOUN", "VERB", "ADJ", "VERB", "ADJ"])
    'ADJ'
    """
    return _first(Counter(labels))


def of_words(words: Sequence[str], labels: Sequence[Any], tests: Sequence[str]) -> list[Any]:
    """Each test word's most frequent label in training, and the most frequent of all labels for unknown words.

    Args:
      words: of training.
      labels: of these.
      tests: whose labels to guess.

    >>> of_words(["play", "play", "run"], ["NOUN", "NOUN", "VERB"], ["run", "play", "Kaunas"])
    ['VERB', 'NOUN', 'NOUN']
    """
    counts: dict[str, Counter[Any]] = defaultdict(Counter)
    for word, label in zip(words, labels, strict=True):
        counts[word][label] += 1
    own, other = {word: _first(count) for word, count in counts.items()}, of_all(labels)
    return [own.get(word, other) for word in tests]


def _first(count: Counter[Any]) -> Any:
    return min(count, key=lambda label: (-count[label], label))
