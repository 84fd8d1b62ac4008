"""What a tokenizer of running text is."""

from typing import Protocol

import numpy as np


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
