"""Words between spaces as tokens, in the convention of WikiText: `<eos>` ends each line."""

from collections.abc import Iterable, Iterator

import numpy as np
from etils import epath

from cope_jax.errors import ConfigError
from cope_jax.tokenizers.vocabulary import UNKNOWN, Vocabulary

EOS = "<eos>"


class Words:
    r"""Words of a vocabulary, which has `<eos>` and, for all words that it has not, `<unk>`.

    `decode` puts one space between words, whatever stood there.

    Attributes:
      vocabulary: the words.
      end: the number of `<eos>`, which also ends a text that ends a line.

    >>> words = Words.train(["a b\na c\n"])
    >>> words.encode(["a d\n"])[0].tolist()
    [2, 0, 1]
    >>> words.decode(np.array([2, 3, 1, 2]))
    'a b\na'
    """

    file = "words.txt"

    def __init__(self, vocabulary: Vocabulary):
        if EOS not in vocabulary:
            raise ConfigError(f"a vocabulary of running text must have {EOS!r}: build it from lines of text")
        self.vocabulary = vocabulary
        self.end = vocabulary.number(EOS)

    @classmethod
    def train(cls, texts: Iterable[str], size: int | None = None) -> "Words":
        """The words of texts by falling count, at most `size`; None: all. ConfigError: no room for a word."""
        if size is not None and size < 3:
            raise ConfigError(f"a vocabulary of {size} has no room beside <unk> and {EOS}: set a larger size")
        vocabulary = Vocabulary.build((word for text in texts for word in split(text)), size)
        if EOS not in vocabulary:  # a text of one line without an end, or a tiny vocabulary
            vocabulary = Vocabulary([*vocabulary.words[: None if size is None else size - 1], EOS])
        return cls(vocabulary)

    @classmethod
    def load(cls, path: epath.PathLike) -> "Words":
        """The words of a file with one in each line. ConfigError: no such file, or no such vocabulary."""
        try:
            return cls(Vocabulary.load(path))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def __len__(self) -> int:
        return len(self.vocabulary)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [self.vocabulary.encode(split(text)) for text in texts]

    def decode(self, tokens: np.ndarray) -> str:
        words = (self.vocabulary.words[number] for number in np.asarray(tokens).tolist())
        return " ".join("\n" if word == EOS else word for word in words).replace(" \n", "\n").replace("\n ", "\n")

    def unknown(self, text: str) -> int:
        r"""The words that are `<unk>` without being written so, as they are in WikiText.

        >>> Words.train(["a b\na <unk>\n"]).unknown("a c <unk>")
        1
        """
        return sum(word != UNKNOWN and word not in self.vocabulary for word in split(text))

    @property
    def text(self) -> str:
        return self.vocabulary.text


def split(text: str) -> Iterator[str]:
    r"""The words of a text, where `<eos>` ends every line, blank ones too.

    A word that is spelled so ends no line: it is one that no vocabulary has, `<unk>`.

    >>> list(split("a b\n\nc"))
    ['a', 'b', '<eos>', '<eos>', 'c']
    >>> list(split("a <eos> b"))
    ['a', '<unk>', 'b']
    """
    for number, line in enumerate(text.split("\n")):
        if number:
            yield EOS
        yield from (UNKNOWN if word == EOS else word for word in line.split())
