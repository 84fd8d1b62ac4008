"""The interface of tokenizers of running text, and `Codec`, the part that generation needs."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from cope_jax.errors import ConfigError
from cope_jax.tokenizers.word_level import UNKNOWN


class Tokenizer(Protocol):
    """Turns running text into numbers and back.

    Attributes:
      end: the token before a text and between texts.
      file: the name of the file in which a run stores `text`.
      divides: whether a text that is cut at single line ends, or before single spaces, has the
        tokens of its parts.
    """

    end: int
    file: str

    @property
    def divides(self) -> bool: ...

    def __len__(self) -> int:
        """V, the number of tokens."""

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The tokens of each text, int32 `[n]`, without `end`; its name in a text is plain text."""

    def decode(self, tokens: np.ndarray) -> str:
        """Returns tokens as text. The text of tokens from `encode` has the same tokens again."""

    def lost(self, text: str, tokens: np.ndarray) -> tuple[int, int]:
        """The loss of decoding: (lost words, or 1 for all; 1 if any byte differs, else 0)."""

    @property
    def text(self) -> str:
        """The content of a file from which `load` restores the tokenizer."""


class Codec(NamedTuple):
    """Turns text into tokens and back, for a model that generates.

    Attributes:
      encode: maps a text to its int32 tokens.
      decode: maps tokens to their text.
      begin: the tokens before a text.
      ends: the tokens that end a text. Generation stops at each of them.
      lost: see `Tokenizer.lost`; by default nothing is lost.
      size: the number of tokens that have a text, the first ones; None means all of a model.
    """

    encode: Callable[[str], np.ndarray]
    decode: Callable[[np.ndarray], str]
    begin: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    lost: Callable[[str, np.ndarray], tuple[int, int]] = lambda text, tokens: (0, 0)
    size: int | None = None

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, begin: int | None = None, ends: tuple[int, ...] = ()
    ) -> "Codec":
        """Returns the codec of a tokenizer; `begin`, by default its `end`, precedes a text."""
        start = tokenizer.end if begin is None else begin
        return cls(
            lambda text: tokenizer.encode([text])[0],
            tokenizer.decode,
            (start,),
            ends,
            tokenizer.lost,
            len(tokenizer),
        )

    def read(self, prompt: str, name: str) -> np.ndarray:
        """Returns the tokens of a prompt, without `begin`. Error messages call the prompt `name`.

        Raises:
          ConfigError: the prompt is empty, or has a word that is not in the vocabulary.
        """
        tokens = self.encode(prompt)
        if not len(tokens):
            raise ConfigError(f"{name} is empty: write the beginning of a text")
        for word, read in zip(prompt.split(), self.decode(tokens).split(), strict=False):
            if read == UNKNOWN != word:
                raise ConfigError(
                    f"{name} has the unknown word {word!r}: write words of the vocabulary, or {UNKNOWN}"
                )
        return tokens
