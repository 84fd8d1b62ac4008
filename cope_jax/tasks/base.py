"""The contract of a task: what to learn, drawn from numpy Generators or read from files; and the registry of all tasks.

Synthetic tasks vary one number between their splits (the share of `ignore`s, the number of blanks, the weight of
`pass`): their *level*, see `LevelTask`.
"""

import abc
import dataclasses
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from etils import epath

from cope_jax.errors import ConfigError
from cope_jax.files import read_text
from cope_jax.registry import Registry, unknown

Batch = dict[str, np.ndarray]
"""n sequences of length L. For predicting each next token:

- `"inputs"`, int32 `[n, L]`;
- `"targets"`, int32 `[n, L]`, the token that follows each input;
- `"weights"`, float32 `[n, L]`, 1 where loss and metric count and 0 elsewhere.

Tasks of another kind say in their docstrings what their fields are. All have `inputs` `[n, L, ...]`, rows first in
every field, and rows of zeros count for nothing.
"""


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The config of a task without options."""


class Task(abc.ABC):
    """Base class of what can be learned.

    A subclass names its options in a frozen dataclass, `Config`, and takes `(config)`. Its `__init__` hands on:

      vocab_size: the number of tokens that there are to predict.
      lengths: split -> L, the padded number of inputs of a sequence; "train" first.

    Attributes:
      metric: the headline figure of the task, among what `figures` gives; shares such as "token_error" (of
        weighted tokens mispredicted) and "sequence_error" (of sequences with any weighted token mispredicted) are shown
        in per cent.
      other_metrics: what has a table below that of the headline figure, where it differs.
      side_by_side: whether rows may stand one behind the other in a longer one, where `segments` keep them apart: then
        all lengths but that of training take one program without padding. A model must know segments for documents,
        and what it measures of whole sequences is of longer ones.
      sweep: (value to plot, split), growing: the splits of the plot of error by length; here none.
      sweep_label: the title of that plot's horizontal axis.
    """

    Config: ClassVar[type] = NoOptions
    metric: str = "token_error"
    other_metrics: ClassVar[tuple[str, ...]] = ("sequence_error", "token_error")
    sweep_label: ClassVar[str] = ""
    side_by_side: ClassVar[bool] = False

    def __init__(self, config: Any, *, vocab_size: int, lengths: Mapping[str, int]):
        self.config = config
        self.vocab_size = vocab_size
        self.sweep: tuple[tuple[int, str], ...] = ()
        self._lengths = dict(lengths)

    @property
    def name(self) -> str:
        """The name under which the task is registered, or else of its class."""
        return next((name for name in TASKS if TASKS.get(name) is type(self)), type(self).__name__)

    @property
    def splits(self) -> tuple[str, ...]:
        """The fixed splits, "train" first."""
        return tuple(self._lengths)

    @property
    def evaluation_splits(self) -> tuple[str, ...]:
        return self.splits[1:]

    @property
    def max_length(self) -> int:
        """The longest `length` over all fixed and sweep splits."""
        return max(self.length(split) for split in (*self.splits, *(split for _, split in self.sweep)))

    def length(self, split: str) -> int:
        """L, the padded number of inputs of a sequence of `split`. ConfigError for a split that there is not."""
        if split not in self._lengths:
            raise unknown(f"split of {self.name}", split, self.splits)
        return self._lengths[split]

    def as_trained(self, split: str) -> bool:
        """Whether a split of the sweep is as long, or as hard, as training."""
        self.length(split)
        return False

    def sweep_examples(self, n: int) -> dict[str, int]:
        """How many examples of each split of the sweep to measure, where `n` are asked for."""
        return {split: n for _, split in self.sweep}

    def size(self, split: str) -> int | None:
        """How many examples `split` has; None: as many as one asks for, for they are drawn."""
        self.length(split)
        return None

    def stream(self, split: str, batch_size: int) -> Sequence[Batch] | None:
        """The batches of `split` in an order that means something: row r of batch i + 1 goes on where that of i ends.

        Batch 0 has `reset`, float32 `[B]`, at 1, where all others have 0: what a model carries begins anew. None: the
        examples are independent.
        """
        self.length(split)
        return None

    def mixture(self, split: str) -> tuple[tuple[float, range], ...]:
        """The parts of a split with a `size` from which training draws: of each a weight, and places. (): all alike."""
        self.length(split)
        return ()

    @abc.abstractmethod
    def sample(self, rng: np.random.Generator, n: int, split: str = "train") -> Batch:
        """Draws n sequences of `split` from `rng`.

        Raises:
          ConfigError: `split` is unknown or n is negative.
        """

    def dataset(self, split: str, n: int, seed: int = 0) -> Batch:
        """The fixed n sequences of `split`: the same on every machine, and each split from a stream of its own.

        A split with a `size` gives its first n in the order of its file, whatever the seed.
        """
        if seed < 0:
            raise ConfigError(f"a data seed must be at least 0, got {seed}")
        return self.sample(np.random.default_rng([seed, zlib.crc32(split.encode())]), n, split)

    def take(self, split: str, places: np.ndarray) -> Batch:
        """The examples of a split with a `size` at `places` in its file; here cut out of all of them."""
        size = self.size(split)
        assert size is not None
        return {name: field[places] for name, field in self.dataset(split, size).items()}

    def figures(self, split: str, measures: Mapping[str, float]) -> dict[str, float]:
        """What is shown of the means of a model's measures on `split`, or on some of its examples; here the same."""
        del split
        return dict(measures)

    def artifacts(self) -> dict[str, str]:
        """Files that a run must keep to be of use, such as a vocabulary: content by name. Default: none."""
        return {}

    def same_artifacts(self, folder: epath.PathLike) -> bool | None:
        """Whether the artifacts in a folder, such as a vocabulary, mean what the task's do; None: it has none."""
        there = {name: file for name in self.artifacts() if (file := epath.Path(folder) / name).exists()}
        if not there:
            return None
        return all(read_text(file).splitlines() == self.artifacts()[name].splitlines() for name, file in there.items())

    def sources(self) -> dict[str, str]:
        """Files that tell the data of the task from others: content by name. Default: none.

        A run keeps them and goes on with the same data only. To read it back, the data need not be there.
        """
        return {}

    def same_sources(self, folder: epath.PathLike, splits: Iterable[str]) -> bool | None:
        """Whether the data of some splits are those of which the sources in a folder tell; None: it has none."""
        del splits
        there = {name: file for name in self.sources() if (file := epath.Path(folder) / name).exists()}
        return all(read_text(file) == self.sources()[name] for name, file in there.items()) if there else None

    def example_options(self) -> dict[str, Any]:
        """The options that examples depend on beside the content of `artifacts` and `sources`. Default: all."""
        return dataclasses.asdict(self.config)

    @classmethod
    def with_artifacts(cls, options: Mapping[str, Any], folder: epath.PathLike) -> dict[str, Any]:
        """The options by which the task takes the artifacts of a run from its folder, instead of learning them anew."""
        del folder
        return dict(options)


class LevelTask(Task):
    """Base class of synthetic tasks: a subclass states its vocabulary and levels, and how to generate at a level.

    A split is a name for a level; `"blanks=24"` names any level directly, which is what sweeps use. The `__init__` of a
    subclass hands on:

      vocabulary: the tokens as text; a token's number is its place.
      levels: split name -> level, "train" first.
      sweep: (value to plot, level), growing.

    Attributes:
      metric: "token_error" or "sequence_error".
      axis: what a level is called in a split name.
    """

    axis: ClassVar[str]

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
        self._levels = dict(levels)
        super().__init__(
            config,
            vocab_size=len(self.vocabulary),
            lengths={split: self._length(level) for split, level in self._levels.items()},
        )
        self.sweep = tuple((value, f"{self.axis}={level:g}") for value, level in sweep)
        self._numbers = {token: number for number, token in enumerate(self.vocabulary)}

    def length(self, split: str) -> int:
        return self._length(self.level(split))

    def as_trained(self, split: str) -> bool:
        return self.level(split) == self.level("train")

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
        if n < 0:
            raise ConfigError(f"the number of sequences must be at least 0, got {n}")
        return self._generate(rng, n, self.level(split))

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
