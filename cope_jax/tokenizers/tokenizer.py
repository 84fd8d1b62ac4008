"""The interface of tokenizers of running text, and the part of it that generation needs."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from cope_jax.errors import ConfigError
from cope_jax.tokenizers.word_level import UNKNOWN


class Tokenizer(Protocol):
    """Running text to numbers and back.

    Attributes:
      end: the token before a text and between texts.
      file: the name of the file in which a run stores `text`.
    """

    end: int
    file: str

    def __len__(self) -> int:
        """V, the number of tokens."""

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """int32 `[n]` of each text, with nothing before or after; `end` spelled out in a text is ordinary text."""

    def decode(self, tokens: np.ndarray) -> str:
        """Tokens as text; if they came from `encode`, encoding this text gives them again."""

    def unknown(self, text: str) -> int:
        """The number of tokens of a text that stand for what the vocabulary does not have, and so lose information."""

    @property
    def text(self) -> str:
        """The content of a file from which `load` restores the tokenizer."""


class Codec(NamedTuple):
    """Text to tokens and back, for a model that generates.

    Attributes:
      encode: the int32 tokens of a text.
      decode: tokens as text.
      begin: the tokens before a text.
    """

    encode: Callable[[str], np.ndarray]
    decode: Callable[[np.ndarray], str]
    begin: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer, begin: int | None = None) -> "Codec":
        """The codec of a tokenizer; `begin` is the token before a text, by default the tokenizer's `end`."""
        start = tokenizer.end if begin is None else begin
        return cls(lambda text: tokenizer.encode([text])[0], tokenizer.decode, (start,))

    def read(self, prompt: str, name: str) -> np.ndarray:
        """The tokens of a prompt, without `begin`; errors call the prompt `name`.

        Raises:
          ConfigError: the prompt is empty, or has a word that the vocabulary does not have.
        """
        tokens = self.encode(prompt)
        if not len(tokens):
            raise ConfigError(f"{name} is empty: write the beginning of a text")
        for word, read in zip(prompt.split(), self.decode(tokens).split(), strict=False):
            if read == UNKNOWN != word:
                raise ConfigError(f"{name} has the unknown word {word!r}: write words of the vocabulary, or {UNKNOWN}")
        return tokens
