"""Masked language modelling and next-sentence prediction: the tasks that BERT is trained on.

Devlin et al., "BERT: Pre-training of deep bidirectional transformers for language understanding", NAACL 2019; the
details follow its released program.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from cope_jax.corpora.baselines import BagOfWords
from cope_jax.corpora.corpus_files import Document
from cope_jax.corpora.raw_text import Texts, fingerprint
from cope_jax.corpora.sentences_by_corpus import SPLITS, Corpus, documents
from cope_jax.corpora.streams import drawn
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least, check_choices
from cope_jax.tasks.task import TASKS, Baseline, Batch, Task, check
from cope_jax.tokenizers.word_level import UNKNOWN
from cope_jax.tokenizers.wordpiece import WordPiece

_SHORT = 0.1


@TASKS.register("masked_lm")
class MaskedLM(Task):
    """`[CLS] A [SEP] B [SEP]`: what are the masked pieces, and does B follow A in its document?

    Consecutive sentences of one document are divided at random into A and B. With probability ½, and always if no
    sentence is left for it, B is from another document. Sentences are added until there are L − 3 pieces or, in a tenth
    of the examples, a random number from 2 to L − 3. If A and B exceed L − 3, the longer side loses pieces at random
    ends.

    Of n pieces min(max_predictions, max(1, round(mask_rate n))) are predicted, none of them `[CLS]`, `[SEP]` or
    `[UNK]`. In the input, 80 % of these become `[MASK]`, 10 % a random piece of the vocabulary, and 10 % are unchanged.
    Every example is newly sampled.

    The fields, all `[B, L]` except `next`: `inputs`, `segments` (0: A, 1: B), `mask` (1: a piece, 0: padding),
    `targets`, `weights` (1: predicted), and `next` `[B]` (0: B follows A, 1: B is from another document).

    Attributes:
      wordpiece: the vocabulary.

    >>> task = MaskedLM(MaskedLM.Config(length=24, vocab_size=2000))
    >>> batch = task.sample(np.random.default_rng(55), 1)
    >>> print(task.wordpiece.decode(batch["inputs"][0]))
    [CLS] the clock in [MASK] window is always [MASK] . [SEP] " why did you trust me ? water rest the fox . [SEP]
    >>> print(task.wordpiece.decode(batch["targets"][batch["weights"] > 0]), batch["next"])
    the wrong " asks [1]
    """

    @dataclasses.dataclass(frozen=True)
    class Config:
        """Options of masked_lm.

        Attributes:
          data_dir: where the corpora are; None: the built-in sample.
          corpus: "wikitext-2", "ud-ewt" or "both".
          length: L, the number of pieces of `[CLS] A [SEP] B [SEP]`.
          vocab_size: number of pieces of the vocabulary, which is learned from the training text.
          vocab: path of a vocab.txt to load instead.
          lowercase: whether to lowercase the text and remove accents.
          mask_rate: share of pieces to predict.
          max_predictions: maximum number of pieces to predict; None: no limit.
        """

        data_dir: str | None = None
        corpus: Corpus = "wikitext-2"
        length: int = 128
        vocab_size: int = 8192
        vocab: str | None = None
        lowercase: bool = True
        mask_rate: float = 0.15
        max_predictions: int | None = None

        def __post_init__(self):
            check_choices(self, "masked_lm")
            check_at_least(5, "masked_lm", length=self.length)
            check_at_least(1, "masked_lm", max_predictions=self.max_predictions)
            check(0 < self.mask_rate <= 1, f"masked_lm.mask_rate must be above 0 and at most 1, got {self.mask_rate}")

    metric = "mlm_error"

    def __init__(self, config: Config):
        text = {split: documents(config.corpus, config.data_dir, split) for split in SPLITS}
        if config.vocab is None:
            digest = fingerprint(_sentences(text["train"]))["sha256"]
            texts = Texts(digest, lambda: _sentences(documents(config.corpus, config.data_dir, "train")))
            self.wordpiece = _trained(texts, config.vocab_size, config.lowercase)
        else:
            self.wordpiece = WordPiece.load(config.vocab, lowercase=config.lowercase)
            self.wordpiece.check_specials()
        self._splits = {split: _Text(text[split], self.wordpiece) for split in SPLITS}
        super().__init__(config, vocab_size=len(self.wordpiece), lengths=dict.fromkeys(SPLITS, config.length))

    def sample(self, rng: np.random.Generator, n: int, split: str = "train") -> Batch:
        length, text, special = self.length(split), self._splits[split], self.wordpiece
        begins = drawn(rng, n, len(text.documents))
        batch = {name: np.zeros((n, length), np.int32) for name in ("targets", "segments", "mask")}
        batch["targets"][:] = special.pad
        following = np.zeros(n, np.int32)
        for row, start in enumerate(begins):
            first, second, following[row] = _pair(rng, text, start, length - 3)
            ids, segments = special.frame(first.tolist(), second.tolist())
            batch["targets"][row, : len(ids)] = ids
            batch["segments"][row, : len(ids)] = segments
            batch["mask"][row, : len(ids)] = 1
        return {**self._masked(rng, batch["targets"], batch["mask"]), **batch, "next": following}

    def _masked(self, rng: np.random.Generator, targets_BL: np.ndarray, mask_BL: np.ndarray) -> Batch:
        special, config = self.wordpiece, self.config
        count_B1 = np.maximum(1, np.rint(config.mask_rate * mask_BL.sum(axis=1, keepdims=True)))
        if config.max_predictions is not None:
            count_B1 = np.minimum(config.max_predictions, count_B1)
        allowed_BL = (mask_BL == 1) & ~np.isin(targets_BL, [special.cls, special.sep, special.unknown])
        order_BL = np.where(allowed_BL, rng.random(targets_BL.shape), 1)
        rank_BL = np.argsort(np.argsort(order_BL, axis=1), axis=1)
        chosen_BL = allowed_BL & (rank_BL < count_B1)
        fate_BL = rng.random(targets_BL.shape)
        random_BL = rng.integers(0, len(special), targets_BL.shape)
        read_BL = np.where(fate_BL < 0.8, special.mask, np.where(fate_BL < 0.9, random_BL, targets_BL))
        inputs_BL = np.where(chosen_BL, read_BL, targets_BL).astype(np.int32)
        return {"inputs": inputs_BL, "weights": chosen_BL.astype(np.float32)}

    def baselines(self, batches: Callable[[str], Sequence[Batch]], examples: int, seed: int) -> list[Baseline]:
        """For masked pieces the most frequent piece; for next sentences the more frequent answer and a bag of words."""
        special = self.wordpiece
        train = self.dataset("train", examples, seed)
        most = np.bincount(train["next"]).argmax()
        classifier = BagOfWords(self.vocab_size, [special.pad, special.cls, special.sep, special.mask]).fit(train)
        found = []
        for split in self.evaluation_splits:
            test = _joined(batches(split))
            likely, overlap = float(np.mean(test["next"] == most)), classifier.accuracy(test)
            found += [
                Baseline(split, "masked words", "most frequent piece", self.unigram_accuracy(split), "mlm_error"),
                Baseline(split, "next sentences", "more frequent answer", likely, "nsp_error"),
                Baseline(split, "next sentences", "bag of words", overlap, "nsp_error"),
            ]
        return found

    def unigram_accuracy(self, split: str) -> float:
        """The share of known pieces of `split` that equal the most frequent piece of training."""
        self.length(split)
        train, test = (self._splits[name].pieces for name in ("train", split))
        unknown = self.wordpiece.unknown
        return float(np.mean(test[test != unknown] == np.bincount(train[train != unknown]).argmax()))

    def saved_files(self) -> dict[str, str]:
        return {"vocab.txt": self.wordpiece.text}

    @classmethod
    def with_saved_files(cls, options: Mapping[str, Any], folder: epath.PathLike) -> dict[str, Any]:
        file = epath.Path(folder) / "vocab.txt"
        return {**options, "vocab": str(file)} if file.exists() else dict(options)


def _joined(batches: Sequence[Batch]) -> Batch:
    """All rows except those without a piece, which pad the last batch."""
    fields = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    real = fields["mask"].any(axis=1)
    return {name: field[real] for name, field in fields.items()}


class _Text:
    """Documents as one array of pieces.

    Attributes:
      pieces: int32 `[N]`.
      bounds: `[S + 1]`, where sentences begin; the last is N.
      documents: `[S]`, the document of each sentence.
      starts: the first sentence of each document, and S.
    """

    def __init__(self, text: list[list[tuple[str, ...]]], wordpiece: WordPiece):
        encoded = [[wordpiece.encode_words(sentence)[0] for sentence in document if sentence] for document in text]
        encoded = [document for document in encoded if document]
        if len(encoded) < 2:
            raise ConfigError(
                f"masked_lm pairs sentences of different documents, but a split has {len(encoded)}: give two or more"
            )
        sentences = [sentence for document in encoded for sentence in document]
        self.pieces = np.concatenate([np.array(sentence, np.int32) for sentence in sentences])
        self.bounds = np.cumsum([0, *map(len, sentences)])
        sizes = [len(document) for document in encoded]
        self.starts = np.cumsum([0, *sizes])
        self.documents = np.repeat(np.arange(len(sizes)), sizes)

    def until(self, start: int, pieces: int) -> int:
        """The end of the fewest sentences from `start` on that have `pieces` pieces, or the end of the document."""
        reached = np.searchsorted(self.bounds, self.bounds[start] + pieces)
        return int(min(reached, self.starts[self.documents[start] + 1]))

    def __getitem__(self, sentences: slice) -> np.ndarray:
        return self.pieces[self.bounds[sentences.start] : self.bounds[sentences.stop]]


def _pair(rng: np.random.Generator, text: _Text, start: int, most: int) -> tuple[np.ndarray, np.ndarray, int]:
    """A, B and `next`, from sentence `start` on; A and B have at most `most` pieces together."""
    target = most if rng.random() >= _SHORT else int(rng.integers(2, most + 1))
    end = text.until(start, target)
    middle = int(rng.integers(start + 1, end)) if end - start > 1 else end
    first, second = text[start:middle], text[middle:end]
    elsewhere = middle == end or rng.random() < 0.5
    if elsewhere:
        own = text.documents[start]
        other = int(rng.integers(0, len(text.starts) - 2))
        other += other >= own
        begin = int(rng.integers(text.starts[other], text.starts[other + 1]))
        second = text[begin : text.until(begin, max(1, target - len(first)))]
    kept_first, kept_second = _kept(len(first), len(second), most)
    return _trimmed(rng, first, kept_first), _trimmed(rng, second, kept_second), int(elsewhere)


def _kept(first: int, second: int, most: int) -> tuple[int, int]:
    """The lengths of both sides after the longer one (B, if they are equal) loses a piece until `most` are left."""
    kept_second = min(second, max(most // 2, most - first))
    return min(first, most - kept_second), kept_second


def _trimmed(rng: np.random.Generator, pieces: np.ndarray, kept: int) -> np.ndarray:
    """`kept` of the pieces; each removed piece comes from the front or the back at random."""
    front = int(rng.binomial(len(pieces) - kept, 0.5)) if len(pieces) > kept else 0
    return pieces[front : front + kept]


def _sentences(text: Iterable[Document]) -> Iterator[str]:
    for document in text:
        for sentence in document:
            yield " ".join(word for word in sentence if word != UNKNOWN)


@functools.lru_cache(maxsize=2)  # a command creates the task once per config, and learning takes minutes
def _trained(texts: Texts, vocab_size: int, lowercase: bool) -> WordPiece:
    return WordPiece.train(texts.read(), vocab_size, lowercase=lowercase)
