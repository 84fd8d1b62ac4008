"""The contract of a task: what to learn, drawn or read from files; and the registry of all tasks."""

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

Tasks of another kind say in their docstrings what their fields are. All have `inputs` `[n, L, ...]`, rows first in
every field, and rows of zeros count for nothing.
"""


class Baseline(NamedTuple):
    """A figure that needs no context.

    Attributes:
      split: where it is measured.
      measure: "perplexity", or what is told right, such as "tags": a share in [0, 1].
      name: of what reaches it.
      value: of the measure.
      metric: the metric of a model to compare with: of "perplexity" a loss, of a share the error that is left.
    """

    split: str
    measure: str
    name: str
    value: float
    metric: str


class Task(Persistent, abc.ABC):
    """Base class of what can be learned.

    A subclass names its options in a frozen dataclass, `Config`, takes `(config)`, and says how to `sample`. That is
    all of a task whose examples are drawn, such as a `SyntheticTask`. What others override:

    - examples in files: those of a `StoredTask`, `mixture`, and what a run keeps of them, see `Persistent`;
    - batches whose order means something: `stream`;
    - what is shown: `metric`, `reported_metrics`, `sweep`;
    - for models that generate, `codec`; and what is known without a model, `baselines`.

    Its `__init__` hands on:

      vocab_size: the number of tokens that there are to predict.
      lengths: split -> L, the padded number of inputs of a sequence; "train" first.

    Attributes:
      other_metrics: what has a table below that of the headline figure, where it differs.
      packable: whether rows may stand one behind the other in a longer one, where `segments` keep them apart: then
        all lengths but that of training take one program without padding. A model must know segments for documents,
        and what it measures of whole sequences is of longer ones.
      sweep: (value to plot, split), growing: the splits of the plot of error by length; here none.
      sweep_label: the title of that plot's horizontal axis.
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
        """The name under which the task is registered, or else of its class."""
        return next((name for name in TASKS if TASKS.get(name) is type(self)), type(self).__name__)

    @property
    def metric(self) -> str:
        """The headline figure of the task, among what `reported_metrics` gives.

        Shares such as "token_error" (of weighted tokens mispredicted) and "sequence_error" (of sequences with any
        weighted token mispredicted) are shown in per cent.
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
        """Draws n sequences of `split` from `rng`. ConfigError: `split` is unknown or n is negative."""

    def dataset(self, split: str, n: int, seed: int = 0) -> Batch:
        """The fixed n sequences of `split`: the same on every machine, and each split from a stream of its own.

        That of a `StoredTask` gives its first n in the order of its file, whatever the seed.
        """
        if seed < 0:
            raise ConfigError(f"a data seed must be at least 0, got {seed}")
        return self.sample(np.random.default_rng([seed, zlib.crc32(split.encode())]), n, split)

    def reported_metrics(self, split: str, metrics: Mapping[str, float]) -> dict[str, float]:
        """What is shown of the means of a model's metrics on `split`, or on some of its examples; here the same."""
        del split
        return dict(metrics)

    def codec(self) -> Codec:
        """How the task reads and writes its tokens, for a model that generates.

        Raises:
          ConfigError: its tokens are no text that goes on.
        """
        raise ConfigError(
            f"the task {self.name} has no text that goes on: give a run on text, words or a synthetic task"
        )

    def baselines(self, batches: Callable[[str], Sequence[Batch]], examples: int, seed: int) -> list[Baseline]:
        """What is reached on the evaluation splits without any context. Default: nothing is known.

        Args:
          batches: the examples of an evaluation split that a run is measured on; of "train", all there are.
          examples: training examples that a baseline may draw to learn from.
          seed: of these.
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
