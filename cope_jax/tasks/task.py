"""The base class of tasks, whose examples are sampled or read from files; and the registry of all tasks."""

import abc
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cope_jax.errors import ConfigError
from cope_jax.registry import Registry, unknown
from cope_jax.tasks.persistence import Persistent
from cope_jax.tokenizers.tokenizer import Codec

Batch = dict[str, np.ndarray]
"""n sequences of length L. For predicting each next token:

- `"inputs"`, int32 `[n, L]`;
- `"targets"`, int32 `[n, L]`, the token that follows each input;
- `"weights"`, float32 `[n, L]`, 1 where loss and metric count and 0 elsewhere.

Other kinds of tasks list their fields in their docstrings. All have `inputs` `[n, L, ...]`. Rows are the first axis of
every field, and rows of zeros do not count.
"""


class Baseline(NamedTuple):
    """A result that is reached without context.

    Attributes:
      split: where it is measured.
      measure: "perplexity", or what is predicted correctly, such as "tags": a share in [0, 1].
      name: name of the method.
      value: value of the measure.
      metric: the metric of a model to compare with: a loss for "perplexity", an error for a share.
    """

    split: str
    measure: str
    name: str
    value: float
    metric: str


class Task(Persistent, abc.ABC):
    """Base class of tasks.

    A subclass has its options in a frozen dataclass, `Config`, accepts `(config)`, and implements `sample`. This is
    enough if examples are sampled, as in a `SyntheticTask`. Other tasks also override:

    - for examples in files: the methods of `StoredTask`, `mixture`, and what a run keeps of them, see `Persistent`;
    - for batches whose order matters: `stream`;
    - for what is reported: `metric`, `reported_metrics`, `sweep`;
    - for models that generate: `codec`; for results that need no model: `baselines`.

    A subclass passes to `__init__`:

      vocab_size: the number of different tokens to predict.
      lengths: split -> L, the padded number of inputs of a sequence; "train" first.

    Attributes:
      other_metrics: metrics with a table of their own below the headline metric, if their values differ.
      packable: whether several rows may be packed into a longer one, separated by `segments`. Then one program without
        padding serves all lengths except that of training. The model must treat segments as documents, and its metrics
        of entire sequences are those of the longer rows.
      sweep: (value to plot, split), ascending: the splits of the plot of error by length; none by default.
      sweep_label: label of that plot's horizontal axis.
    """

    Config: ClassVar[type]
    other_metrics: ClassVar[tuple[str, ...]] = ("sequence_error", "token_error")
    sweep_label: ClassVar[str] = ""
    packable: ClassVar[bool] = False

    def __init__(self, config: Any, *, vocab_size: int, lengths: Mapping[str, int]):
        self.config = config
        self.vocab_size = vocab_size
        self.sweep: tuple[tuple[int, str], ...] = ()
        self._lengths = dict(lengths)

    @property
    def name(self) -> str:
        """The name under which the task is registered, or else the name of its class."""
        return next((name for name in TASKS if TASKS.get(name) is type(self)), type(self).__name__)

    @property
    def metric(self) -> str:
        """The headline metric of the task, one of those that `reported_metrics` returns.

        Shares are shown in per cent, such as "token_error" (mispredicted tokens, by weight) and "sequence_error"
        (sequences with any mispredicted token that has weight).
        """
        return "token_error"

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
        """L, the padded number of inputs of a sequence of `split`. ConfigError for an unknown split."""
        if split not in self._lengths:
            raise unknown(f"split of {self.name}", split, self.splits)
        return self._lengths[split]

    def as_trained(self, split: str) -> bool:
        """Whether a split of the sweep has the length, or the level, of training."""
        self.length(split)
        return False

    def sweep_examples(self, n: int) -> dict[str, int]:
        """How many examples of each split of the sweep to measure if `n` are requested."""
        return {split: n for _, split in self.sweep}

    def size(self, split: str) -> int | None:
        """How many examples `split` has; None: any number, because they are sampled."""
        self.length(split)
        return None

    def stream(self, split: str, batch_size: int) -> Sequence[Batch] | None:
        """The batches of `split` in order: row r of batch i + 1 continues row r of batch i.

        `reset`, float32 `[B]`, is 1 in batch 0, where the state of a model starts afresh, and 0 in all others. None:
        the examples are independent.
        """
        self.length(split)
        return None

    def mixture(self, split: str) -> tuple[tuple[float, range], ...]:
        """The parts that training samples from, each a (weight, indices), of a split with a `size`. (): no parts."""
        self.length(split)
        return ()

    @abc.abstractmethod
    def sample(self, rng: np.random.Generator, n: int, split: str = "train") -> Batch:
        """Samples n sequences of `split` with `rng`. ConfigError: `split` is unknown or n is negative."""

    def dataset(self, split: str, n: int, seed: int = 0) -> Batch:
        """The n fixed sequences of `split`, the same on every machine; each split has its own random stream.

        A `StoredTask` gives its first n sequences in the order of its file, whatever the seed.
        """
        if seed < 0:
            raise ConfigError(f"a data seed must be at least 0, got {seed}")
        return self.sample(np.random.default_rng([seed, zlib.crc32(split.encode())]), n, split)

    def reported_metrics(self, split: str, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics to report, from the means of a model's metrics on `split` or a part of it. Default: the same."""
        del split
        return dict(metrics)

    def codec(self) -> Codec:
        """How the task reads and writes its tokens, for a model that generates.

        Raises:
          ConfigError: its tokens are not text that can be continued.
        """
        raise ConfigError(
            f"the task {self.name} has no text to continue: give a run on text, words or a synthetic task"
        )

    def baselines(self, batches: Callable[[str], Sequence[Batch]], examples: int, seed: int) -> list[Baseline]:
        """What is reached on the evaluation splits without any context. Default: no baselines.

        Args:
          batches: from a split to its examples: those that a run is measured on, or all of "train".
          examples: number of training examples that a baseline may sample to learn from.
          seed: seed of these examples.
        """
        del batches, examples, seed
        return []


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
