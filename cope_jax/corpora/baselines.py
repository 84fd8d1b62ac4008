"""Labels of words without their context: the most frequent one. The baseline of every tagger."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any


def majority_label(labels: Sequence[Any]) -> Any:
    """The most frequent label; the first in order where counts are equal.

    >>> majority_label(["NOUN", "VERB", "ADJ", "VERB", "ADJ"])
    'ADJ'
    """
    count = Counter(labels)
    return min(count, key=lambda label: (-count[label], label))


def majority_by_word(words: Sequence[str], labels: Sequence[Any], tests: Sequence[str]) -> list[Any]:
    """Each test word's most frequent label in training, and the most frequent of all labels for unknown words.

    >>> majority_by_word(["play", "play", "run"], ["NOUN", "NOUN", "VERB"], ["run", "play", "Kaunas"])
    ['VERB', 'NOUN', 'NOUN']
    """
    held: dict[str, list[Any]] = defaultdict(list)
    for word, label in zip(words, labels, strict=True):
        held[word].append(label)
    own, other = {word: majority_label(mine) for word, mine in held.items()}, majority_label(labels)
    return [own.get(word, other) for word in tests]
