"""The text of a row while its tokens are drawn."""

from collections.abc import Callable, Sequence

import numpy as np

TORN = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are no whole character."""


class Continuation:
    r"""What follows a prompt, in pieces that are settled: no character is torn, and no stop text begun.

    Only new tokens are decoded, with those of the last whole text before them, for a decoder may write the first of a
    text otherwise, such as without its space.

    Args:
      decode: tokens as text, where more tokens only add to the text, but for a character that was torn at its end.
      prompt: the tokens of the prompt, whose text is left out.
      stop: texts that end the continuation before them: the one that is whole first, of those the longest.

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
        self._stop = tuple(stop)
        self._before = [int(token) for token in prompt]
        self._tokens: list[int] = []  # behind those, of which the last may be half a character
        self._held = ""  # the text before these tokens that was held back
        self._shown = 0  # letters of what was held back, and of the text of these tokens, that have been given

    def add(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text that is settled now and was not before; none behind a stop text."""
        if self.ended or not len(tokens):
            return ""
        self._tokens += [int(token) for token in tokens]
        more = self._written()
        text = self._held + more
        new = self._settle(text.rstrip(TORN), self._begun)
        if more and not more.endswith(TORN):
            self._before, self._tokens = self._tokens, []
            self._held, self._shown = text[self._shown :], 0
        return new

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        return "" if self.ended else self._settle(self._held + self._written(), lambda text: 0)

    def _written(self) -> str:
        """The text of the last tokens."""
        before = self._decode(np.array(self._before, np.int32))
        return self._decode(np.array(self._before + self._tokens, np.int32))[len(before) :]

    def _settle(self, text: str, held: Callable[[str], int]) -> str:
        # By where they end, so that it does not matter how much of the text is there already.
        found = [(place + len(stop), place) for stop in self._stop if (place := text.find(stop, self._shown)) >= 0]
        self.ended = bool(found)
        settled = text[: min(found)[1]] if found else text[: len(text) - held(text)]
        new = settled[self._shown :]
        self._shown += len(new)
        self.text += new
        return new

    def _begun(self, text: str) -> int:
        """How many letters at the end may turn out to be the beginning of a stop text."""
        sizes = (size for stop in self._stop for size in range(len(stop) - 1, 0, -1) if text.endswith(stop[:size]))
        return max(sizes, default=0)
