"""Base classes of tasks whose examples are stored in files, so each split has a fixed number of examples."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cope_jax.corpora.baselines import unigram_cross_entropy, unigram_probabilities
from cope_jax.corpora.packing import TokenStream
from cope_jax.corpora.sentences_by_corpus import SPLITS
from cope_jax.corpora.streams import Stream, drawn, first, windows
from cope_jax.corpora.text_units import Counts
from cope_jax.tasks.task import Baseline, Batch, Task
from cope_jax.tokenizers.word_level import Vocabulary


class StoredTask(Task):
    """Base class of tasks with stored examples: a subclass implements `size` and `take`."""

    @abc.abstractmethod
    def size(self, split: str) -> int:
        """The number of examples of `split`."""

    @abc.abstractmethod
    def take(self, split: str, indices: np.ndarray) -> Batch:
        """The examples of a split at `indices`; indices count examples in the order of the file."""

    def sample(self, rng: np.random.Generator, n: int, split: str = "train") -> Batch:
        return self.take(split, drawn(rng, n, self.size(split)))

    def dataset(self, split: str, n: int, seed: int = 0) -> Batch:
        return self.take(split, first(n, self.size(split), f"the split {split!r} of {self.name}"))


class TextTask(StoredTask):
    """Base class of tasks on running text: the entire text of a split can be read in any windows.

    Attributes:
      window_length: L, the number of tokens in a training window.
      crosses_documents: whether a window may go from one document into the next.
    """

    window_length: int
    crosses_documents: bool

    @abc.abstractmethod
    def token_streams(self, split: str) -> list[TokenStream]:
        """The entire text of a split, one stream per corpus."""

    @abc.abstractmethod
    def counts(self, split: str) -> Counts:
        """The number of tokens, words and bytes in the text of a split."""


class WordTask(StoredTask):
    """Base class of tasks with a vocabulary of words. Each split is one long text, for models that carry a state.

    Without `stream`, an example is a window of `config.length` words. `dataset` gives the windows in order; `sample`
    gives windows with random starts.

    A subclass passes to `__init__`:

      vocabulary: the words to predict.
      fields: a dict from each split to its fields, arrays `[N]` by name, which are cut into windows.
    """

    def __init__(self, config: Any, vocabulary: Vocabulary, fields: Mapping[str, Mapping[str, np.ndarray]]):
        self.vocabulary, self._fields = vocabulary, fields
        super().__init__(config, vocab_size=len(vocabulary), lengths=dict.fromkeys(SPLITS, config.length))

    def size(self, split: str) -> int:
        """The number of windows of L words that cover the text without overlap."""
        return -(-self._words(split) // self.length(split))

    def stream(self, split: str, batch_size: int) -> Sequence[Batch]:
        length = self.length(split)
        return Stream(self._fields[split], batch_size, length, lambda batch: self._finish(split, batch))

    def take(self, split: str, indices: np.ndarray) -> Batch:
        return self._windows(split, indices * self.length(split))

    def sample(self, rng: np.random.Generator, n: int, split: str = "train") -> Batch:
        return self._windows(split, drawn(rng, n, max(1, self._words(split) - self.length(split) + 1)))

    def baselines(self, batches: Callable[[str], Sequence[Batch]], examples: int, seed: int) -> list[Baseline]:
        """The perplexity if each word is predicted from its frequency in the training text."""
        known = unigram_probabilities(self.stream("train", batch_size=1024), self.vocab_size)
        losses = {split: unigram_cross_entropy(known, batches(split)) for split in self.evaluation_splits}
        return [Baseline(split, "perplexity", "unigram", float(np.exp(loss)), "loss") for split, loss in losses.items()]

    def saved_files(self) -> dict[str, str]:
        return {"words.txt": self.vocabulary.text}

    def _words(self, split: str) -> int:
        self.length(split)
        return len(self._fields[split]["weights"])

    def _windows(self, split: str, starts: np.ndarray) -> Batch:
        return self._finish(split, windows(self._fields[split], starts, self.length(split)))

    def _finish(self, split: str, batch: Batch) -> Batch:
        """Adds to a batch the fields that are too large to store for every word."""
        del split
        return batch
