"""The text of a row while its tokens are drawn."""

from collections.abc import Callable, Sequence

import numpy as np

TORN = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are no whole character."""


class Continuation:
    r"""What follows a prompt, in pieces that are settled: no character is torn, and no stop text begun.

    Args:
      decode: tokens as text, where more tokens only add to the text.
      prompt: the tokens of the prompt, whose text is left out.
      stop: texts, each of which ends the continuation and is no part of it.

    Attributes:
      text: all pieces so far.
      ended: whether a stop text came.

    >>> row = Continuation(lambda tokens: bytes(tokens.tolist()).decode(errors="replace"), [65], stop=["\n\n"])
    >>> row.add([66, 195]), row.add([169, 10]), row.add([67, 10]), row.add([10, 68]), row.ended
    ('B', 'é', '\nC', '', True)
    """

    def __init__(self, decode: Callable[[np.ndarray], str], prompt: Sequence[int], stop: Sequence[str] = ()):
        self.text = ""
        self.ended = False
        self._decode = decode
        self._tokens = [int(token) for token in prompt]
        self._stop = tuple(stop)
        self._start = len(self._written())

    def add(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text that is settled now and was not before; none behind a stop text."""
        if self.ended or not len(tokens):
            return ""
        self._tokens += [int(token) for token in tokens]
        text = self._written()[self._start :]
        return self._settle(text.removesuffix(TORN), self._begun)

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        return "" if self.ended else self._settle(self._written()[self._start :], lambda text: 0)

    def _written(self) -> str:
        return self._decode(np.array(self._tokens, np.int32))

    def _settle(self, text: str, held: Callable[[str], int]) -> str:
        found = [place for stop in self._stop if (place := text.find(stop, len(self.text))) >= 0]
        self.ended = bool(found)
        settled = text[: min(found)] if found else text[: len(text) - held(text)]
        new = settled[len(self.text) :]
        self.text += new
        return new

    def _begun(self, text: str) -> int:
        """How many letters at the end may turn out to be the beginning of a stop text."""
        sizes = (size for stop in self._stop for size in range(len(stop) - 1, 0, -1) if text.endswith(stop[:size]))
        return max(sizes, default=0)
