"""A tokenizer of words between spaces, and its vocabulary. As in WikiText, `<eos>` ends lines."""

import collections
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from etils import epath

from cope_jax.errors import ConfigError
from cope_jax.registry import abridged, check_tokens
from cope_jax.storage.files import read_text
from cope_jax.tokenizers.characters import encodable

UNKNOWN, EOS = "<unk>", "<eos>"
_OTHER_SPACE = re.compile(r"[^\S \n]|  ")
_OUTER_SPACE = re.compile(r"^ | $", re.MULTILINE)
_BARE_END = re.compile(r"(?<! )\n|\n(?=[^ ])")


class Vocabulary:
    """Numbers words by their places in `words`. Any other word is `<unk>`.

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
            raise ConfigError(
                f"a vocabulary must have {UNKNOWN!r} and each word once: build it from a text"
            )
        self.unknown = self._numbers[UNKNOWN]

    @classmethod
    def build(
        cls,
        text: Iterable[str],
        size: int | None = None,
        *,
        reserved: Sequence[str] = (UNKNOWN,),
        min_count: int = 1,
    ) -> "Vocabulary":
        """Makes a vocabulary of a text's words, sorted by falling count for log-uniform sampling.

        Words of equal count are in alphabetical order. The vocabulary has at most `size` words; if
        `size` is None, it has all words. The words in `reserved` come first, even if the text does
        not have them. Words that occur fewer than `min_count` times are left out. ConfigError:
        `size` has no room for a word of the text.
        """
        if size is not None and size <= len(reserved):
            raise ConfigError(
                f"a vocabulary of {size} has no room beyond {', '.join(reserved)}: set a larger size"
            )
        counts = collections.Counter(text)
        words = (word for word, count in counts.items() if count >= min_count)
        kept = (word for word in words if word not in reserved)
        ordered = sorted(kept, key=lambda word: (-counts[word], word))
        return cls([*reserved, *ordered][:size])

    @classmethod
    def load(cls, path: epath.PathLike) -> "Vocabulary":
        """Reads a vocabulary from a file with its `text`. ConfigError: missing or not one."""
        return cls(read_text(path).removesuffix("\n").split("\n"))

    @property
    def text(self) -> str:
        """The words, one per line."""
        return "".join(f"{word}\n" for word in self.words)

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._numbers

    def number(self, word: str) -> int:
        """Returns the number of a word. An unknown word has the number of `<unk>`."""
        return self._numbers.get(word, self.unknown)

    def encode(self, words: Iterable[str]) -> np.ndarray:
        """Returns the numbers of words, int32 `[n]`. ConfigError: a text in place of words."""
        if isinstance(words, str):
            raise ConfigError(
                f"words must be a list of words, got the text {abridged(words)}: split it"
            )
        return np.fromiter((self.number(word) for word in words), np.int32)

    def decode(self, numbers: Iterable[int]) -> str:
        """Returns the words, separated by spaces. ConfigError: a number has no word."""
        tokens = check_tokens("words", numbers, len(self))
        return " ".join(self.words[token] for token in tokens)


class Words:
    r"""A tokenizer of words. Its vocabulary has `<eos>`, and `<unk>` for all other words.

    `decode` always puts one space between words.

    Attributes:
      vocabulary: the words.
      end: the number of `<eos>`. The last token of a text that ends with a newline is `<eos>`.

    >>> words = Words.train(["a b\na c\n"])
    >>> words.encode(["a d\n"])[0].tolist()
    [2, 0, 1]
    >>> words.decode(np.array([2, 3, 1, 2]))
    'a b\na'
    """

    file = "words.txt"
    divides = True

    def __init__(self, vocabulary: Vocabulary):
        if EOS not in vocabulary:
            raise ConfigError(
                f"the vocabulary lacks {EOS!r} for the ends of lines: build it from lines of text"
            )
        self.vocabulary = vocabulary
        self.end = vocabulary.number(EOS)

    @classmethod
    def train(cls, texts: Iterable[str], size: int | None = None) -> "Words":
        """Learns a vocabulary of the most frequent words of texts.

        The vocabulary has at most `size` words, including `<unk>` and `<eos>`. If `size` is None,
        it has all words. ConfigError: `size` has no room for a word.
        """
        if size is not None and size < 3:
            raise ConfigError(
                f"a vocabulary of {size} has no room beyond <unk> and {EOS}: set a larger size"
            )
        words = (word for text in texts for word in split(encodable(text)))
        vocabulary = Vocabulary.build(words, size)
        if EOS not in vocabulary:  # a text of one line without a newline, or a tiny vocabulary
            vocabulary = Vocabulary([*vocabulary.words[: None if size is None else size - 1], EOS])
        return cls(vocabulary)

    @classmethod
    def load(cls, path: epath.PathLike) -> "Words":
        """Reads words from a file, one per line. ConfigError: missing or not a vocabulary."""
        try:
            return cls(Vocabulary.load(path))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def __len__(self) -> int:
        return len(self.vocabulary)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [self.vocabulary.encode(split(text)) for text in texts]

    def decode(self, tokens: np.ndarray) -> str:
        numbers = check_tokens("words", tokens, len(self))
        words = (self.vocabulary.words[number] for number in numbers.tolist())
        return (
            " ".join("\n" if word == EOS else word for word in words)
            .replace(" \n", "\n")
            .replace("\n ", "\n")
        )

    def lost(self, text: str, tokens: np.ndarray) -> tuple[int, int]:
        r"""The number of words that become `<unk>`, without those that are `<unk>` in the text.

        Bytes come back if there is one space between words, and lines either begin and end without
        spaces or, as in WikiText, with one at both sides of each line end.

        >>> words = Words.train(["a b\na <unk>\n"])
        >>> words.lost("a c <unk>", np.array([])), words.lost("a  b\n", np.array([]))
        ((1, 1), (0, 1))
        """
        del tokens
        known = self.vocabulary
        words = (word for word in text.split() if word != UNKNOWN)
        unknown = sum(word == EOS or word not in known for word in words)
        changed = bool(_OTHER_SPACE.search(text) or not _plain_or_as_wikitext(text))
        return unknown, int(unknown > 0 or changed)

    @property
    def text(self) -> str:
        return self.vocabulary.text


def _plain_or_as_wikitext(text: str) -> bool:
    r"""True if no line begins or ends with a space, or all line ends are between spaces.

    >>> [_plain_or_as_wikitext(text) for text in ("a\nb", " a \n b \n", " a", " a\nb")]
    [True, True, False, False]
    """
    spaced = "\n" in text and not _BARE_END.search(text)
    return spaced or not _OUTER_SPACE.search(text)


def split(text: str) -> Iterator[str]:
    r"""Yields the words of a text, and `<eos>` for each newline, so also for blank lines.

    The word `<eos>` in the text itself does not end a line: this word becomes `<unk>`.

    >>> list(split("a b\n\nc"))
    ['a', 'b', '<eos>', '<eos>', 'c']
    >>> list(split("a <eos> b"))
    ['a', '<unk>', 'b']
    """
    for number, line in enumerate(text.split("\n")):
        if number:
            yield EOS
        yield from (UNKNOWN if word == EOS else word for word in line.split())
