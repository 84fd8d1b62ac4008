"""The base class of synthetic tasks. The splits of such a task differ in one number, the *level*.

The level is the share of `ignore`s in flip_flop, the number of blanks in selective_copy, the weight
of `pass` in counting, and the exponent of the frequencies in zipf.
"""

import abc
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from cope_jax.corpora.streams import check_request
from cope_jax.errors import ConfigError
from cope_jax.registry import checked, unknown
from cope_jax.tasks import held_out
from cope_jax.tasks.task import Batch, Task, check
from cope_jax.tokenizers.tokenizer import Codec


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Options of every synthetic task.

    Attributes:
      held_out: share of all sequences that only evaluation samples. A hash of a sequence's inputs
        decides, not a seed and not the length of training. With 0, test examples may be in the
        training data.
    """

    held_out: float = 0.0


class SyntheticTask(Task):
    """Base class of synthetic tasks, which define a vocabulary and levels, and generate examples.

    A split is a name for a level. A name such as `"blanks=24"`, which sweeps use, gives any level
    directly. A subclass passes to `__init__`:

      vocabulary: the text of each token; a token in a batch is an index into `vocabulary`.
      levels: a dict from split name to level, "train" first.
      sweep: pairs (value to plot, level), in ascending order.

    Attributes:
      axis: name of the level in a split name.
      continues: whether each target is the next input, so that a model can continue a text of the
        task.
    """

    axis: ClassVar[str]
    continues: ClassVar[bool] = True

    def __init__(
        self,
        config: Any,
        *,
        vocabulary: Iterable[str],
        levels: Mapping[str, float],
        sweep: Iterable[tuple[int, float]],
    ):
        self.config = config
        self._held_out = getattr(config, "held_out", 0.0)
        check(
            0 <= self._held_out < 1,
            f"{self.name}.held_out must be at least 0 and below 1, got {self._held_out}",
        )
        self.vocabulary = tuple(vocabulary)
        self._levels = dict(levels)
        lengths = {split: self._length(level) for split, level in levels.items()}
        super().__init__(config, vocab_size=len(self.vocabulary), lengths=lengths)
        self.sweep = tuple((value, f"{self.axis}={level:g}") for value, level in sweep)
        self._numbers = {token: number for number, token in enumerate(self.vocabulary)}

    def length(self, split: str) -> int:
        return self._length(self.level(split))

    def as_trained(self, split: str) -> bool:
        return self.level(split) == self.level("train")

    def level(self, split: str) -> float:
        """The level of a fixed split or of `"<axis>=<number>"`. ConfigError for any other."""
        if checked(split, str, f"the split of {self.name}") in self._levels:
            return self._levels[split]
        axis, _, text = split.partition("=")
        if axis != self.axis or not text:
            raise unknown(f"split of {self.name}", split, (*self.splits, f"{self.axis}=<number>"))
        try:
            level = float(text)
        except ValueError:
            level = math.nan
        if not (math.isfinite(level) and self._valid(level)):
            raise ConfigError(
                f"split {split!r} of {self.name} has no valid level: use one like {self.sweep[-1][1]!r}"
            )
        return level

    def sample(self, rng: np.random.Generator, n: int, split: str = "train") -> Batch:
        check_request(rng, n)
        level = self.level(split)
        if not self._held_out:
            return self._generate(rng, n, level)
        return held_out.draw(
            lambda rows: self._generate(rng, rows, level), n, self._held_out, split != "train"
        )

    def decode(self, tokens: Iterable[int]) -> str:
        """Tokens as text, separated by spaces."""
        return " ".join(self.vocabulary[token] for token in tokens)

    def show(self, batch: Batch, row: int = 0) -> str:
        """One sequence of a batch as text: inputs, each with `→` and its target if that counts.

        >>> from cope_jax import tasks
        >>> task = tasks.create("mqrar", back=1, keys=2, values=3, assignments=4)
        >>> task.show(task.dataset("train", 1))
        'k0 2 k0→2 0 k0→0 1 k0→1 0'
        """
        rows = (batch[name][row].tolist() for name in ("inputs", "targets", "weights"))
        columns = zip(*rows, strict=True)
        texts = self.vocabulary
        return " ".join(
            texts[token] + f"→{texts[target]}" * (weight > 0) for token, target, weight in columns
        )

    def codec(self) -> Codec:
        return Codec(self.encode, self.decode) if self.continues else super().codec()

    def encode(self, text: str) -> np.ndarray:
        """The int32 tokens of a text as `decode` writes it. ConfigError for an unknown word."""
        for word in text.split():
            if word not in self._numbers:
                raise unknown(f"token of {self.name}", word, self.vocabulary)
        return np.array([self._numbers[word] for word in text.split()], np.int32)

    @abc.abstractmethod
    def _length(self, level: float) -> int:
        """L, the number of inputs of a sequence, at a level."""

    def _valid(self, level: float) -> bool:
        """True if a finite level is valid."""
        return level >= 0

    @abc.abstractmethod
    def _generate(self, rng: np.random.Generator, n: int, level: float) -> Batch:
        """Generates n sequences at a level."""
