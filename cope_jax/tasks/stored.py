"""Base classes of tasks whose examples are in files: each split has a fixed number of examples."""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from cope_jax.corpora.baselines import unigram_cross_entropy, unigram_probabilities
from cope_jax.corpora.packing import TokenStream
from cope_jax.corpora.sentences_by_corpus import SPLITS
from cope_jax.corpora.streams import Stream, check_request, drawn, first, windows
from cope_jax.corpora.text_units import Counts
from cope_jax.errors import ConfigError
from cope_jax.tasks.task import Baseline, Batch, Task
from cope_jax.tokenizers import loading
from cope_jax.tokenizers.tokenizer import Codec, Tokenizer
from cope_jax.tokenizers.word_level import Vocabulary


class Blocks(NamedTuple):
    """The ranges in which the examples of a split are stored.

    Attributes:
      ranges: the indices of the examples in each file.
      window: the number of examples that training shuffles at a time.
    """

    ranges: Sequence[range]
    window: int


class StoredTask(Task):
    """Base class of tasks with stored examples: a subclass implements `size` and `take`."""

    @abc.abstractmethod
    def size(self, split: str) -> int:
        """The number of examples of `split`."""

    @abc.abstractmethod
    def take(self, split: str, indices: np.ndarray) -> Batch:
        """The examples of a split at `indices`; indices count examples in the order of the file."""

    def blocks(self, split: str) -> Blocks | None:
        """The stored ranges of examples, within whose windows training shuffles.

        None if reading in random order is fast.
        """
        del split
        return None

    def sample(self, rng: np.random.Generator, n: int, split: str = "train") -> Batch:
        mixture = self.mixture(split)
        if not mixture:
            return self.take(split, drawn(rng, n, self.size(split)))
        weights = np.array([weight for weight, _ in mixture])
        check_request(rng, n)
        shares = weights / weights.sum()
        parts = [mixture[number][1] for number in rng.choice(len(mixture), n, p=shares)]
        indices = [rng.integers(chosen.start, chosen.stop) for chosen in parts]
        return self.take(split, np.array(indices, np.int64))

    def dataset(self, split: str, n: int, seed: int = 0) -> Batch:
        return self.take(split, first(n, self.size(split), f"the split {split!r} of {self.name}"))


class TextTask(StoredTask):
    """Base class of tasks on running text: the entire text of a split can be read in any windows.

    Attributes:
      tokenizer: learned from the training text, or loaded.
      window_length: L, the number of tokens in a training window.
      crosses_documents: whether a window may go from one document into the next.
    """

    other_metrics = ("token_perplexity", "bits_per_byte")
    tokenizer: Tokenizer
    window_length: int
    crosses_documents: bool

    @abc.abstractmethod
    def token_streams(self, split: str) -> list[TokenStream]:
        """The entire text of a split, one stream per corpus."""

    @abc.abstractmethod
    def counts(self, split: str) -> Counts:
        """The tokens, words and bytes of a split, without ends that only training predicts."""

    def reported_metrics(self, split: str, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adds perplexities and bits per byte; drops `sequence_error`: a window is no sequence."""
        counts = self.counts(split)
        reported = {name: value for name, value in metrics.items() if name != "sequence_error"}
        return reported | counts.per_unit(metrics["loss"] * counts.tokens)

    def left_out(self) -> str:
        """Says which results are left out in validation and test, and why; "" if none is."""
        reasons = (self.counts(split).left_out for split in self.evaluation_splits)
        return next(filter(None, reasons), "")

    def codec(self) -> Codec:
        return Codec.of(self.tokenizer)

    def encode(self, text: str) -> np.ndarray:
        """The int32 tokens of a text, with no token before or after it."""
        return self.tokenizer.encode([text])[0]

    def decode(self, tokens: Iterable[int]) -> str:
        """Tokens as text. Raises ConfigError if a token is not in the vocabulary."""
        numbers = np.array(list(tokens), np.int32)
        size = len(self.tokenizer)
        for number in numbers[(numbers < 0) | (numbers >= size)]:
            raise ConfigError(
                f"token {number} is not in the vocabulary of {size} tokens: give the vocabulary of the text"
            )
        return self.tokenizer.decode(numbers)

    def saved_files(self) -> dict[str, str]:
        return loading.files(self.tokenizer)

    def same_saved_files(self, folder: epath.PathLike) -> bool | None:
        saved = loading.find(folder)
        return None if saved is None else loading.same(saved, self.tokenizer)

    @classmethod
    def with_saved_files(cls, options: Mapping[str, Any], folder: epath.PathLike) -> dict[str, Any]:
        kind = options.get("tokenizer", getattr(cls.Config, "tokenizer", "bpe"))
        file = epath.Path(folder) / loading.FILES.get(kind, "")
        if kind not in loading.FILES or not file.exists():
            return dict(options)
        return {**options, "vocab": str(file)}


class WordTask(StoredTask):
    """Base class of tasks on words. Each split is one long text, for models that carry a state.

    Without `stream`, an example is a window of `config.length` words. `dataset` gives the windows
    in order; `sample` gives windows with random starts.

    A subclass passes to `__init__`:

      vocabulary: the words to predict.
      fields: maps each split to its fields, arrays `[N]` by name, which are cut into windows.
    """

    def __init__(
        self, config: Any, vocabulary: Vocabulary, fields: Mapping[str, Mapping[str, np.ndarray]]
    ):
        self.vocabulary, self._fields = vocabulary, fields
        lengths = dict.fromkeys(SPLITS, config.length)
        super().__init__(config, vocab_size=len(vocabulary), lengths=lengths)

    def size(self, split: str) -> int:
        """The number of windows of L words that cover the text without overlap."""
        return -(-self._words(split) // self.length(split))

    def stream(self, split: str, batch_size: int) -> Sequence[Batch]:
        length = self.length(split)
        fields = self._fields[split]
        return Stream(fields, batch_size, length, lambda batch: self._finish(split, batch))

    def take(self, split: str, indices: np.ndarray) -> Batch:
        return self._windows(split, indices * self.length(split))

    def sample(self, rng: np.random.Generator, n: int, split: str = "train") -> Batch:
        starts = max(1, self._words(split) - self.length(split) + 1)
        return self._windows(split, drawn(rng, n, starts))

    def baselines(
        self, batches: Callable[[str], Sequence[Batch]], examples: int, seed: int
    ) -> list[Baseline]:
        """The perplexity if each word is predicted from its frequency in the training text."""
        known = unigram_probabilities(self.stream("train", batch_size=1024), self.vocab_size)
        losses = {
            split: unigram_cross_entropy(known, batches(split)) for split in self.evaluation_splits
        }
        values = {split: float(np.exp(loss)) for split, loss in losses.items()}
        return [Baseline(s, "perplexity", "unigram", value, "loss") for s, value in values.items()]

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
