"""The base class of tasks, whose examples are sampled or stored; the registry of tasks."""

import abc
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cope_jax.errors import ConfigError
from cope_jax.registry import Registry, checked, unknown
from cope_jax.tasks.persistence import Persistent
from cope_jax.tokenizers.tokenizer import Codec

Batch = dict[str, np.ndarray]
"""The fields of n sequences of length L, by name. Of a task that predicts each next token:

- `"inputs"`, int32 `[n, L]`;
- `"targets"`, int32 `[n, L]`, the token that follows each input;
- `"weights"`, float32 `[n, L]`, 1 for targets that count in loss and metric, and 0 for others.

Other kinds of tasks list their fields in their docstrings. All tasks have `inputs` `[n, L, ...]`.
The first axis of every field numbers the sequences. A sequence whose fields are all zeros does not
count.
"""


ABILITIES: Mapping[str, str] = {
    "ignore": "let only some tokens count, however many others there are",
    "count": "count the tokens of one kind",
    "recall": "recall what followed an earlier token",
    "occurrence": "find the n-th last token of a kind",
    "steps": "add up steps that can cancel each other",
    "state": "follow a state whose changes do not commute",
    "index": "find a place by its content, and go a number of tokens from there",
    "stack": "match brackets, or follow a stack",
    "copy": "repeat or reorder a sequence",
    "arithmetic": "compute with numbers",
}
"""Abilities that synthetic tasks measure: with the ability of this name, a model can ..."""


class Baseline(NamedTuple):
    """A result of a method that uses no context.

    Attributes:
      split: the split on which the result is measured.
      measure: "perplexity", or the name of what is predicted, such as "tags".
      name: name of the method.
      value: the perplexity, or the share of correct predictions in [0, 1].
      metric: name of the model's metric to compare with `value`. This is a loss for "perplexity",
        otherwise an error.
    """

    split: str
    measure: str
    name: str
    value: float
    metric: str


class Task(Persistent, abc.ABC):
    """Base class of tasks.

    A subclass declares its options in a frozen dataclass `Config`, takes a `Config` in its
    constructor, and implements `sample`. This is enough if examples are sampled, as in a
    `SyntheticTask`. Other tasks also override:

    - if examples are in files: `mixture`, and methods of `StoredTask` and `Persistent`;
    - if the order of batches matters: `stream`;
    - to change what is reported: `metric`, `reported_metrics` and `sweep`;
    - if models can generate text of the task: `codec`;
    - if the task has results that need no model: `baselines`.

    A subclass passes to `__init__`:

      vocab_size: the number of different tokens to predict.
      lengths: maps each split, "train" first, to L, the number of inputs of a padded sequence.

    Attributes:
      abilities: what the task measures, names in `ABILITIES`; empty for tasks of real data.
      other_metrics: more metrics to show, each in a table below the table of the headline metric. A
        metric with the same values as the headline metric is left out.
      packable: whether several sequences may be packed into one longer sequence, in which
        `segments` separates them. One program without padding then serves all lengths except the
        training length. The model must treat segments as documents. Metrics of entire sequences are
        then metrics of the longer sequences.
      sweep: the points of the plot of error by length or level, as pairs (value to plot, split) in
        ascending order; empty by default.
      sweep_label: label of the horizontal axis of this plot.
    """

    Config: ClassVar[type]
    abilities: ClassVar[tuple[str, ...]] = ()
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
        """The headline metric of the task, one of the metrics that `reported_metrics` returns.

        Metrics that are shares are shown in per cent. For example, "token_error" is the share of
        mispredicted tokens, by weight, and "sequence_error" is the share of sequences with a
        mispredicted token that has weight.
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
        splits = (*self.splits, *(split for _, split in self.sweep))
        return max(self.length(split) for split in splits)

    def length(self, split: str) -> int:
        """L, the number of inputs of a sequence of `split`. ConfigError for an unknown split."""
        if checked(split, str, f"the split of {self.name}") not in self._lengths:
            raise unknown(f"split of {self.name}", split, self.splits)
        return self._lengths[split]

    @property
    def sweep_levels(self) -> dict[str, int]:
        """The value to plot of each split of the sweep."""
        return {split: value for value, split in self.sweep}

    def as_trained(self, split: str) -> bool:
        """True if a split of the sweep has the length, or the level, of training."""
        self.length(split)
        return False

    def sweep_examples(self, n: int) -> dict[str, int]:
        """The number of examples of each split of the sweep, if `n` examples are requested."""
        return {split: n for _, split in self.sweep}

    def size(self, split: str) -> int | None:
        """The number of examples of `split`; None if the task samples any number of examples."""
        self.length(split)
        return None

    def stream(self, split: str, batch_size: int) -> Sequence[Batch] | None:
        """The batches of `split` in order: row r of batch i + 1 continues row r of batch i.

        The field `reset`, float32 `[B]`, is 1 in batch 0, where a model clears its state, and 0 in
        all other batches. None means that the examples are independent.
        """
        self.length(split)
        return None

    def mixture(self, split: str) -> tuple[tuple[float, range], ...]:
        """The parts of a split that training samples from, as pairs (weight, indices of examples).

        The result () means that the split is not divided: all examples have the same weight.
        """
        self.length(split)
        return ()

    @abc.abstractmethod
    def sample(self, rng: np.random.Generator, n: int, split: str = "train") -> Batch:
        """Samples n sequences of `split`. ConfigError: an unknown split or a negative n."""

    def dataset(self, split: str, n: int, seed: int = 0) -> Batch:
        """Samples n fixed sequences of `split`, the same on every machine, from its random stream.

        A `StoredTask` gives its first n sequences in the order of its file, for any seed.
        """
        self.length(split)
        if checked(seed, int, "a data seed") < 0:
            raise ConfigError(f"a data seed must be at least 0, got {seed}")
        return self.sample(np.random.default_rng([seed, zlib.crc32(split.encode())]), n, split)

    def reported_metrics(self, split: str, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics to report, from mean metrics on (a part of) `split`. Default: the same."""
        del split
        return dict(metrics)

    def codec(self) -> Codec:
        """The codec that encodes and decodes text of this task, for a model that generates.

        Raises:
          ConfigError: the tokens of the task are not text that can be continued.
        """
        raise ConfigError(
            f"the task {self.name} has no text to continue: choose a run on text, words or a synthetic task"
        )

    def baselines(
        self, batches: Callable[[str], Sequence[Batch]], examples: int, seed: int
    ) -> list[Baseline]:
        """Measures methods without context on the evaluation splits. Default: no results.

        Args:
          batches: maps a split to its batches. The batches of "train" have all examples. The
            batches of another split have the examples that a run is measured on.
          examples: number of training examples that a baseline may sample to learn from.
          seed: seed of these examples.
        """
        del batches, examples, seed
        return []


def next_token_batch(tokens: np.ndarray, weights: np.ndarray) -> Batch:
    """The batch that predicts `tokens[:, 1:]` from `tokens[:, :-1]`, with `weights` of the targets.

    >>> next_token_batch(np.array([[5, 6, 7]]), np.array([[False, True]]))["targets"]
    array([[6, 7]], dtype=int32)
    """
    return batch_of(tokens[:, :-1], tokens[:, 1:], weights)


def batch_of(inputs: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> Batch:
    """The batch with these fields, in the types of `Batch`."""
    tokens = {"inputs": inputs.astype(np.int32), "targets": targets.astype(np.int32)}
    return {**tokens, "weights": weights.astype(np.float32)}


def check(condition: bool, message: str) -> None:
    """Raises ConfigError with `message` if `condition` is false."""
    if not condition:
        raise ConfigError(message)


def check_either(config: Any, owner: str, *names: str) -> None:
    """ConfigError if two options are set, of which only one may be."""
    if all(getattr(config, name) for name in names):
        raise ConfigError(f"{owner} accepts {' or '.join(names)}, not both: set one of them")


TASKS: Registry[type[Task]] = Registry("task")
