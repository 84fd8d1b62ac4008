"""Labels of words without their context: the most frequent one. The baseline of every tagger."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any


def majority_label(labels: Sequence[Any]) -> Any:
    """The most frequent label; the first in order where counts are equal.

    >>> majority_label(["NOUN", "VERB", "ADJ", "VERB", "ADJ"])
    'ADJ'
    """
    return _first(Counter(labels))


def majority_by_word(words: Sequence[str], labels: Sequence[Any], tests: Sequence[str]) -> list[Any]:
    """Each test word's most frequent label in training, and the most frequent of all labels for unknown words.

    Args:
      words: of training.
      labels: of these.
      tests: whose labels to guess.

    >>> majority_by_word(["play", "play", "run"], ["NOUN", "NOUN", "VERB"], ["run", "play", "Kaunas"])
    ['VERB', 'NOUN', 'NOUN']
    """
    counts: dict[str, Counter[Any]] = defaultdict(Counter)
    for word, label in zip(words, labels, strict=True):
        counts[word][label] += 1
    own, other = {word: _first(count) for word, count in counts.items()}, majority_label(labels)
    return [own.get(word, other) for word in tests]


def _first(count: Counter[Any]) -> Any:
    return min(count, key=lambda label: (-count[label], label))
