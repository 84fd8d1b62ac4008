"""Decodes the text of a row while its tokens are generated."""

from collections.abc import Callable, Sequence

import numpy as np

TORN = "\N{REPLACEMENT CHARACTER}"
"""The sign that a decoder writes for bytes that are not a complete character."""


class Continuation:
    r"""The text after a prompt, in pieces that later tokens do not change.

    No piece ends within a character or within a possible stop text. A decoder may write the first
    token of a text differently, for example without its space. So new tokens are decoded together
    with the tokens of the last complete text before them.

    Args:
      decode: maps tokens to text. More tokens may complete a character at the end of the text, and
        otherwise must only append text.
      prompt: the tokens of the prompt. The pieces do not include the text of the prompt.
      stop: stop texts. The continuation ends before the first stop text that is complete. If
        several stop texts end at the same character, the continuation ends before the longest of
        these.

    Attributes:
      text: all pieces so far.
      ended: whether a stop text was found.

    >>> row = Continuation(lambda tokens: bytes(tokens.tolist()).decode(errors="replace"), [65], stop=["\n\n"])
    >>> row.add([66, 195]), row.add([169, 10]), row.add([67, 10]), row.add([10, 68]), row.ended
    ('B', 'é', '\nC', '', True)
    """

    def __init__(
        self, decode: Callable[[np.ndarray], str], prompt: Sequence[int], stop: Sequence[str] = ()
    ):
        self.text = ""
        self.ended = False
        self._decode = decode
        self._stop = tuple(stop)
        self._before = [int(token) for token in prompt]
        # The tokens after `_before`; the last may be an incomplete character.
        self._tokens: list[int] = []
        self._held = ""  # the text before `_tokens` that was held back
        # The number of returned characters of the held text and of the text of `_tokens`.
        self._shown = 0

    def add(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Adds tokens and returns the new text that is final; "" after a stop text."""
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
        """Returns the text that was held back. Call this method when no more tokens come."""
        return "" if self.ended else self._settle(self._held + self._written(), lambda text: 0)

    def _written(self) -> str:
        """Returns the text of `_tokens`."""
        before = self._decode(np.array(self._before, np.int32))
        return self._decode(np.array(self._before + self._tokens, np.int32))[len(before) :]

    def _settle(self, text: str, withheld: Callable[[str], int]) -> str:
        # Stop texts are ordered by their ends, so that the result does not depend on how much text
        # there is already.
        stops = [
            (start + len(stop), start)
            for stop in self._stop
            if (start := text.find(stop, self._shown)) >= 0
        ]
        self.ended = bool(stops)
        settled = text[: min(stops)[1]] if stops else text[: len(text) - withheld(text)]
        new = settled[self._shown :]
        self._shown += len(new)
        self.text += new
        return new

    def _begun(self, text: str) -> int:
        """Returns the number of characters at the end that may begin a stop text."""
        sizes = (
            size
            for stop in self._stop
            for size in range(len(stop) - 1, 0, -1)
            if text.endswith(stop[:size])
        )
        return max(sizes, default=0)
