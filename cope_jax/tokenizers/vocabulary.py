"""Words as numbers, the frequent ones first."""

import collections
from collections.abc import Iterable, Sequence

import numpy as np
from etils import epath

from cope_jax.errors import ConfigError

UNKNOWN = "<unk>"


class Vocabulary:
    """Numbers of words, where a word that it has not is `<unk>`.

    Attributes:
      words: a word's number is its place.

    >>> vocabulary = Vocabulary.build("b a b c".split())
    >>> vocabulary.words
    ('<unk>', 'b', 'a', 'c')
    >>> vocabulary.encode(["c", "d"])
    array([3, 0], dtype=int32)
    """

    def __init__(self, words: Iterable[str]):
        self.words = tuple(words)
        self._numbers = {word: number for number, word in enumerate(self.words)}
        if UNKNOWN not in self._numbers or len(self._numbers) < len(self.words):
            raise ConfigError(f"a vocabulary must have {UNKNOWN!r} and each word once: build it from a text")
        self.unknown = self._numbers[UNKNOWN]

    @classmethod
    def build(
        cls, text: Iterable[str], size: int | None = None, *, reserved: Sequence[str] = (UNKNOWN,), min_count: int = 1
    ) -> "Vocabulary":
        """The words of a text by falling count, as log-uniform sampling needs them, and equal counts by the alphabet.

        At most `size`, or all where that is None; `reserved` ones stand first, whether the text has them or not, and
        those rarer than `min_count` are left out. ConfigError: `size` has no room for a word of the text.
        """
        if size is not None and size <= len(reserved):
            raise ConfigError(f"a vocabulary of {size} has no room beside {', '.join(reserved)}: set a larger size")
        counts = collections.Counter(text)
        for word in reserved:
            counts.pop(word, None)
        kept = (word for word, count in counts.items() if count >= min_count)
        ordered = sorted(kept, key=lambda word: (-counts[word], word))
        return cls([*reserved, *ordered][:size])

    @classmethod
    def load(cls, path: epath.PathLike) -> "Vocabulary":
        """The vocabulary that a file holds as `text`. ConfigError: no such file, or no vocabulary."""
        file = epath.Path(path)
        if not file.is_file():
            raise ConfigError(f"no vocabulary at {path}: give the path of a file with a word in each line")
        try:
            text = file.read_text(encoding="utf-8").removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is no text in UTF-8 ({error}): give a file with a word in each line") from error
        return cls(text.removesuffix("\n").split("\n"))

    @property
    def text(self) -> str:
        """A word in each line."""
        return "".join(f"{word}\n" for word in self.words)

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._numbers

    def number(self, word: str) -> int:
        """The number of a word, or of `<unk>`."""
        return self._numbers.get(word, self.unknown)

    def encode(self, words: Iterable[str]) -> np.ndarray:
        """int32 `[n]`."""
        return np.fromiter((self.number(word) for word in words), np.int32)

    def decode(self, numbers: Iterable[int]) -> str:
        """The words, separated by spaces."""
        return " ".join(self.words[number] for number in numbers)
