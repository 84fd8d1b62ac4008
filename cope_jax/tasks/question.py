"""The base class of tasks that ask a question, of which only the answer counts."""

import abc
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from cope_jax.tasks.synthetic import SyntheticTask
from cope_jax.tasks.task import Batch, next_token_batch

EQUALS, PAD = "=", "<pad>"


class QuestionTask(SyntheticTask):
    """Base class of tasks whose sequences are a question, `=`, its answer, and padding.

    The level is the largest size of a question, such as its number of symbols. At the level of
    training, sizes are uniform from `smallest` to the level. At any other level they are uniform
    from half of the level, exclusive, to the level, but a level above that of training has no size
    of training. Only the answer counts.

    A subclass implements `_question` and `_tokens`, sets `axis` and `sweep_label`, and passes to
    `__init__`:

      symbols: the text of each token, without `=` and padding.
      size: the level of training and of "in_distribution".
      times: how many times as large the level of "longer" is, and perhaps that of "longest".
      smallest, largest: the smallest and the largest size of a question.
    """

    def __init__(
        self,
        config: Any,
        *,
        symbols: Iterable[str],
        size: int,
        times: Sequence[int] = (2,),
        smallest: int = 1,
        largest: float = math.inf,
    ):
        self._smallest, self._largest, self._trained = smallest, largest, size
        sizes = {"train": size, "in_distribution": size}
        for split, factor in zip(("longer", "longest"), times, strict=False):
            sizes[split] = int(min(factor * size, largest))
        longest = max(sizes.values())
        points = np.unique(np.linspace(self._trained, longest, 5).round().astype(int)).tolist()
        super().__init__(
            config,
            vocabulary=(*symbols, EQUALS, PAD),
            levels=sizes,
            sweep=[(point, point) for point in sorted({*points, *sizes.values()})],
        )

    @abc.abstractmethod
    def _question(self, rng: np.random.Generator, size: int) -> tuple[Iterable[str], Iterable[str]]:
        """The symbols of a question of a size, and those of its answer."""

    @abc.abstractmethod
    def _tokens(self, size: int) -> int:
        """The largest number of symbols of a question and its answer, up to a size."""

    def _length(self, level: float) -> int:
        return self._tokens(int(level))  # `=` is one token more, and the last token is no input

    def _valid(self, level: float) -> bool:
        return self._smallest <= level <= self._largest and level == int(level)

    def _sizes(self, level: float) -> range:
        """The sizes of the questions of a level."""
        largest = int(level)
        least = self._smallest
        if largest != self._trained:
            least = max(least, largest // 2 + 1)
        if largest > self._trained:
            least = max(least, self._trained + 1)
        return range(least, largest + 1)

    def _generate(self, rng: np.random.Generator, n: int, level: float) -> Batch:
        sizes = self._sizes(level)
        tokens = np.full((n, self._length(level) + 1), len(self.vocabulary) - 1, np.int32)
        weights = np.zeros(tokens.shape, bool)
        for row, size in enumerate(rng.integers(sizes.start, sizes.stop, size=n).tolist()):
            texts = self._question(rng, size)
            question, answer = ([self._numbers[symbol] for symbol in text] for text in texts)
            begin, end = len(question) + 1, len(question) + 1 + len(answer)
            tokens[row, :end] = [*question, self._numbers[EQUALS], *answer]
            weights[row, begin:end] = True
        return next_token_batch(tokens, weights[:, 1:])
