"""What a tokenizer of running text is, and what a model that generates needs of one."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from cope_jax.errors import ConfigError
from cope_jax.tokenizers.word_level import UNKNOWN


class Tokenizer(Protocol):
    """Running text to numbers and back.

    Attributes:
      end: the token that stands before a text and between texts.
      file: the name under which `text` is kept with a run.
    """

    end: int
    file: str

    def __len__(self) -> int:
        """V, the number of tokens."""

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """int32 `[n]` of each text, with nothing before or after; what a text spells like `end` is ordinary text."""

    def decode(self, tokens: np.ndarray) -> str:
        """Tokens as text; `encode` of it gives them again wherever they came from `encode`."""

    def unknown(self, text: str) -> int:
        """How many tokens of a text stand for what the vocabulary has not, so that they tell less than the text."""

    @property
    def text(self) -> str:
        """The content of a file from which `load` makes the tokenizer again."""


class Codec(NamedTuple):
    """Text to tokens and back, as a model that generates needs it.

    Attributes:
      encode: the int32 tokens of a text.
      decode: tokens as text.
      begin: the tokens that stand before a text.
    """

    encode: Callable[[str], np.ndarray]
    decode: Callable[[np.ndarray], str]
    begin: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer, begin: int | None = None) -> "Codec":
        """The codec of a tokenizer; `begin` stands before a text, by default the tokenizer's `end`."""
        start = tokenizer.end if begin is None else begin
        return cls(lambda text: tokenizer.encode([text])[0], tokenizer.decode, (start,))

    def read(self, prompt: str, name: str) -> np.ndarray:
        """The tokens of a prompt, without `begin`, which errors call `name`.

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
