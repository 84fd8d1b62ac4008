"""The contract of a task: what to learn, drawn from numpy Generators, and the registry of all tasks.

Every task varies one number between its splits (the share of `ignore`s, the number of blanks, the weight of `pass`):
its *level*. A split is a name for a level; `"blanks=24"` names any level directly, which is what sweeps use.
"""

import abc
import dataclasses
import math
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from cope_jax.errors import ConfigError
from cope_jax.registry import Registry, unknown

Batch = dict[str, np.ndarray]
"""n sequences of length L, for predicting each next token:

- `"inputs"`, int32 `[n, L]`;
- `"targets"`, int32 `[n, L]`, the token that follows each input;
- `"weights"`, float32 `[n, L]`, 1 where loss and metric count and 0 elsewhere.
"""


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The config of a task without options."""


class Task(abc.ABC):
    """Base class: a task states its vocabulary and levels in `__init__`, and how to generate at a level.

    A subclass names its options in a frozen dataclass, `Config`, and takes `(config)`. Its `__init__` hands on:

      vocabulary: the tokens as text; a token's number is its place.
      levels: split name -> level, "train" first.
      sweep: (value to plot, level), growing.

    Attributes:
      metric: the headline figure of the task: "token_error" (share of weighted tokens mispredicted) or "sequence_error"
        (share of sequences with any weighted token mispredicted).
      axis: what a level is called in a split name.
      sweep_label: the title of the sweep's horizontal axis.
    """

    Config: ClassVar[type] = NoOptions
    metric: ClassVar[Literal["token_error", "sequence_error"]] = "token_error"
    axis: ClassVar[str]
    sweep_label: ClassVar[str]

    def __init__(
        self,
        config: Any,
        *,
        vocabulary: Iterable[str],
        levels: Mapping[str, float],
        sweep: Iterable[tuple[int, float]],
    ):
        self.config = config
        self.vocabulary = tuple(vocabulary)
        self.sweep = tuple((value, f"{self.axis}={level:g}") for value, level in sweep)
        self._levels = dict(levels)
        self._numbers = {token: number for number, token in enumerate(self.vocabulary)}

    @property
    def name(self) -> str:
        """The name under which the task is registered, or else of its class."""
        return next((name for name in TASKS if TASKS.get(name) is type(self)), type(self).__name__)

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    @property
    def splits(self) -> tuple[str, ...]:
        """The fixed splits, "train" first."""
        return tuple(self._levels)

    @property
    def evaluation_splits(self) -> tuple[str, ...]:
        return self.splits[1:]

    @property
    def max_length(self) -> int:
        """The longest `length` over all fixed and sweep splits."""
        return max(self.length(split) for split in (*self.splits, *(split for _, split in self.sweep)))

    def length(self, split: str) -> int:
        """L, the padded number of inputs of a sequence of `split`."""
        return self._length(self.level(split))

    def level(self, split: str) -> float:
        """The level that `split` names: a fixed split, or `"<axis>=<number>"`. ConfigError for any other."""
        if split in self._levels:
            return self._levels[split]
        axis, _, text = split.partition("=")
        if axis != self.axis or not text:
            raise unknown(f"split of {self.name}", split, (*self.splits, f"{self.axis}=<number>"))
        try:
            level = float(text)
        except ValueError:
            level = math.nan
        if not (math.isfinite(level) and self._valid(level)):
            raise ConfigError(f"split {split!r} of {self.name} has no valid level: use one like {self.sweep[-1][1]!r}")
        return level

    def sample(self, rng: np.random.Generator, n: int, split: str = "train") -> Batch:
        """Draws n sequences of `split` from `rng`.

        Raises:
          ConfigError: `split` is unknown or n is negative.
        """
        if n < 0:
            raise ConfigError(f"the number of sequences must be at least 0, got {n}")
        return self._generate(rng, n, self.level(split))

    def dataset(self, split: str, n: int, seed: int = 0) -> Batch:
        """The fixed n sequences of `split`: the same on every machine, and each split from a stream of its own."""
        if seed < 0:
            raise ConfigError(f"a data seed must be at least 0, got {seed}")
        return self.sample(np.random.default_rng([seed, zlib.crc32(split.encode())]), n, split)

    def decode(self, tokens: Iterable[int]) -> str:
        """Tokens as text, separated by spaces."""
        return " ".join(self.vocabulary[token] for token in tokens)

    def encode(self, text: str) -> np.ndarray:
        """The int32 tokens of a text as `decode` writes it. ConfigError for a word outside the vocabulary."""
        for word in text.split():
            if word not in self._numbers:
                raise unknown(f"token of {self.name}", word, self.vocabulary)
        return np.array([self._numbers[word] for word in text.split()], np.int32)

    @abc.abstractmethod
    def _length(self, level: float) -> int:
        """L at a level."""

    @abc.abstractmethod
    def _valid(self, level: float) -> bool:
        """Whether a (finite) level makes sense."""

    @abc.abstractmethod
    def _generate(self, rng: np.random.Generator, n: int, level: float) -> Batch:
        """Draws n sequences at a level."""


def next_token_batch(tokens: np.ndarray, weights: np.ndarray) -> Batch:
    """The batch that predicts `tokens[:, 1:]` from `tokens[:, :-1]`; `weights` belong to the predicted tokens.

    >>> next_token_batch(np.array([[5, 6, 7]]), np.array([[False, True]]))["targets"]
    array([[6, 7]], dtype=int32)
    """
    tokens = tokens.astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights.astype(np.float32)}


def check(condition: bool, message: str) -> None:
    """Raises ConfigError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


TASKS: Registry[type[Task]] = Registry("task")
