"""Masked language modelling and next-sentence prediction: the tasks that BERT is trained on.

Devlin et al., "BERT: Pre-training of deep bidirectional transformers for language understanding",
NAACL 2019; the details follow its released program.
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
from cope_jax.corpora.sentences_by_corpus import SPLITS, Corpus, by_split
from cope_jax.corpora.streams import drawn
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least, check_fields
from cope_jax.tasks.task import TASKS, Baseline, Batch, Task, check
from cope_jax.tokenizers.word_level import UNKNOWN
from cope_jax.tokenizers.wordpiece import WordPiece

_SHORT = 0.1


@TASKS.register("masked_lm")
class MaskedLM(Task):
    """Predicts masked pieces of `[CLS] A [SEP] B [SEP]`, and whether B follows A in the document.

    Consecutive sentences of one document are divided at random into A and B. With probability ½,
    and always if no sentence is left for B, B is from another document. Sentences are added until
    there are L − 3 pieces or, in a tenth of the examples, a random number of pieces from 2 to L −
    3. If A and B have more than L − 3 pieces together, the longer one loses pieces at its ends, at
    random.

    In an example of n pieces, min(max_predictions, max(1, round(mask_rate n))) pieces are
    predicted. `[CLS]`, `[SEP]` and `[UNK]` are never predicted. In the input, 80 % of the predicted
    pieces become `[MASK]`, 10 % become a random piece of the vocabulary, and 10 % are unchanged.
    Every example is newly sampled.

    The fields are `inputs`, `segments`, `mask`, `targets` and `weights` `[B, L]`, and `next` `[B]`.
    `segments` is 0 for A and 1 for B. `mask` is 1 for pieces and 0 for padding. `weights` is 1 for
    predicted pieces. `next` is 0 if B follows A, and 1 if B is from another document.

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
          data_dir: folder with a folder for each corpus. If None, the task uses the built-in
            sample.
          corpus: "wikitext-2", "ud-ewt" or "both".
          files: paths or globs of files of text, in place of a corpus: see
            `sentences_by_corpus.by_split`.
          length: L, the number of pieces of `[CLS] A [SEP] B [SEP]`.
          vocab_size: maximum size of a learned vocabulary.
          vocab: path of a vocab.txt to load. If None, the task learns a vocabulary from the
            training text.
          lowercase: whether to lowercase the text and remove accents.
          mask_rate: share of pieces to predict.
          max_predictions: maximum number of pieces to predict in an example. If None, there is no
            maximum.
        """

        data_dir: str | None = None
        corpus: Corpus = "wikitext-2"
        files: tuple[str, ...] = ()
        length: int = 128
        vocab_size: int = 8192
        vocab: str | None = None
        lowercase: bool = True
        mask_rate: float = 0.15
        max_predictions: int | None = None

        def __post_init__(self):
            check_fields(self, "masked_lm")
            check_at_least(5, "masked_lm", length=self.length)
            check_at_least(1, "masked_lm", max_predictions=self.max_predictions)
            check(
                0 < self.mask_rate <= 1,
                f"masked_lm.mask_rate must be above 0 and at most 1, got {self.mask_rate}",
            )

    metric = "mlm_error"

    def __init__(self, config: Config):
        read = functools.partial(by_split, config.corpus, config.data_dir, config.files)
        text = read()
        joined = {split: map(_text, documents) for split, documents in text.items()}
        self._keep_digests(config, joined)
        if config.vocab is None:
            digest = fingerprint(_sentences(text["train"]))["sha256"]
            texts = Texts(digest, lambda: _sentences(read(["train"])["train"]))
            self.wordpiece = _trained(texts, config.vocab_size, config.lowercase)
        else:
            self.wordpiece = WordPiece.load(config.vocab, lowercase=config.lowercase)
            self.wordpiece.check_specials()
        self._splits = {split: _Text(text[split], self.wordpiece) for split in SPLITS}
        lengths = dict.fromkeys(SPLITS, config.length)
        super().__init__(config, vocab_size=len(self.wordpiece), lengths=lengths)

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

    def _masked(
        self, rng: np.random.Generator, targets_BL: np.ndarray, mask_BL: np.ndarray
    ) -> Batch:
        special, config = self.wordpiece, self.config
        count_B1 = np.maximum(1, np.rint(config.mask_rate * mask_BL.sum(axis=1, keepdims=True)))
        if config.max_predictions is not None:
            count_B1 = np.minimum(config.max_predictions, count_B1)
        fixed = [special.cls, special.sep, special.unknown]
        allowed_BL = (mask_BL == 1) & ~np.isin(targets_BL, fixed)
        order_BL = np.where(allowed_BL, rng.random(targets_BL.shape), 1)
        rank_BL = np.argsort(np.argsort(order_BL, axis=1), axis=1)
        chosen_BL = allowed_BL & (rank_BL < count_B1)
        fate_BL = rng.random(targets_BL.shape)
        random_BL = rng.integers(0, len(special), targets_BL.shape)
        changed_BL = np.where(fate_BL < 0.9, random_BL, targets_BL)
        read_BL = np.where(fate_BL < 0.8, special.mask, changed_BL)
        inputs_BL = np.where(chosen_BL, read_BL, targets_BL).astype(np.int32)
        return {"inputs": inputs_BL, "weights": chosen_BL.astype(np.float32)}

    def baselines(
        self, batches: Callable[[str], Sequence[Batch]], examples: int, seed: int
    ) -> list[Baseline]:
        """Measures one baseline for masked pieces and two baselines for next sentences.

        For masked pieces, the baseline always predicts the most frequent piece. For next sentences,
        one baseline always predicts the more frequent answer, and the other is a bag of words.
        """
        special = self.wordpiece
        train = self.dataset("train", examples, seed)
        most = np.bincount(train["next"]).argmax()
        uncounted = [special.pad, special.cls, special.sep, special.mask]
        classifier = BagOfWords(self.vocab_size, uncounted).fit(train)
        results = []
        for split in self.evaluation_splits:
            test = _joined(batches(split))
            likely = float(np.mean(test["next"] == most))
            overlap = classifier.accuracy(test)
            results += [
                Baseline(
                    split,
                    "masked words",
                    "most frequent piece",
                    self.unigram_accuracy(split),
                    "mlm_error",
                ),
                Baseline(split, "next sentences", "more frequent answer", likely, "nsp_error"),
                Baseline(split, "next sentences", "bag of words", overlap, "nsp_error"),
            ]
        return results

    def unigram_accuracy(self, split: str) -> float:
        """The share of pieces of `split`, without `[UNK]`, equal to the commonest in training."""
        self.length(split)
        train, test = (self._splits[name].pieces for name in ("train", split))
        unknown = self.wordpiece.unknown
        most = np.bincount(train[train != unknown]).argmax()
        return float(np.mean(test[test != unknown] == most))

    def saved_files(self) -> dict[str, str]:
        return {"vocab.txt": self.wordpiece.text}

    @classmethod
    def with_saved_files(cls, options: Mapping[str, Any], folder: epath.PathLike) -> dict[str, Any]:
        file = epath.Path(folder) / "vocab.txt"
        return {**options, "vocab": str(file)} if file.exists() else dict(options)


def _joined(batches: Sequence[Batch]) -> Batch:
    """All rows of the batches, except rows without a piece, which pad the last batch."""
    fields = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    real = fields["mask"].any(axis=1)
    return {name: field[real] for name, field in fields.items()}


class _Text:
    """Documents as one array of pieces.

    Attributes:
      pieces: int32 `[N]`.
      bounds: `[S + 1]`, the index of the first piece of each of S sentences, then N.
      documents: `[S]`, the index of the document of each sentence.
      starts: the index of the first sentence of each document, then S.
    """

    def __init__(self, text: list[list[tuple[str, ...]]], wordpiece: WordPiece):
        encode = wordpiece.encode_words
        encoded = [[encode(sentence)[0] for sentence in document if sentence] for document in text]
        encoded = [document for document in encoded if document]
        if len(encoded) < 2:
            raise ConfigError(
                f"masked_lm pairs sentences of different documents, but a split has only {len(encoded)}: give each "
                "split at least 2 documents"
            )
        sentences = [sentence for document in encoded for sentence in document]
        self.pieces = np.concatenate([np.array(sentence, np.int32) for sentence in sentences])
        self.bounds = np.cumsum([0, *map(len, sentences)])
        sizes = [len(document) for document in encoded]
        self.starts = np.cumsum([0, *sizes])
        self.documents = np.repeat(np.arange(len(sizes)), sizes)

    def until(self, start: int, pieces: int) -> int:
        """The end of the shortest run of sentences from `start` with at least `pieces` pieces.

        The run does not go beyond the end of the document.
        """
        reached = np.searchsorted(self.bounds, self.bounds[start] + pieces)
        return int(min(reached, self.starts[self.documents[start] + 1]))

    def __getitem__(self, sentences: slice) -> np.ndarray:
        return self.pieces[self.bounds[sentences.start] : self.bounds[sentences.stop]]


def _pair(
    rng: np.random.Generator, text: _Text, start: int, most: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Samples A, B and `next` from sentence `start` on, at most `most` pieces together."""
    target = most if rng.random() >= _SHORT else int(rng.integers(2, most + 1))
    end = text.until(start, target)
    middle = int(rng.integers(start + 1, end)) if end - start > 1 else end
    first, second = text[start:middle], text[middle:end]
    elsewhere = middle == end or rng.random() < 0.5
    if elsewhere:
        document = text.documents[start]
        other = int(rng.integers(0, len(text.starts) - 2))
        other += other >= document
        begin = int(rng.integers(text.starts[other], text.starts[other + 1]))
        second = text[begin : text.until(begin, max(1, target - len(first)))]
    kept_first, kept_second = _kept(len(first), len(second), most)
    return _trimmed(rng, first, kept_first), _trimmed(rng, second, kept_second), int(elsewhere)


def _kept(first: int, second: int, most: int) -> tuple[int, int]:
    """The lengths of A and B after the longer one loses pieces, until `most` are left in total.

    If A and B have the same length, B loses the piece.
    """
    kept_second = min(second, max(most // 2, most - first))
    return min(first, most - kept_second), kept_second


def _trimmed(rng: np.random.Generator, pieces: np.ndarray, kept: int) -> np.ndarray:
    """Keeps `kept` of the pieces; removes others one by one from the front or back, at random."""
    front = int(rng.binomial(len(pieces) - kept, 0.5)) if len(pieces) > kept else 0
    return pieces[front : front + kept]


def _text(document: Document) -> str:
    """The words in lines, with a blank line between sentences."""
    return "\n\n".join(map("\n".join, document))


def _sentences(text: Iterable[Document]) -> Iterator[str]:
    for document in text:
        for sentence in document:
            yield " ".join(word for word in sentence if word != UNKNOWN)


# A command creates the task once per config, and learning takes minutes.
@functools.lru_cache(maxsize=2)
def _trained(texts: Texts, vocab_size: int, lowercase: bool) -> WordPiece:
    return WordPiece.train(texts.read(), vocab_size, lowercase=lowercase)
