"""Part-of-speech tagging: predict the tag of each word of a sentence.

Nivre et al., "Universal Dependencies v2", LREC 2020.
"""

import dataclasses
import itertools
import zipfile
import zlib
from collections.abc import Callable, Sequence

import numpy as np
from etils import epath

from cope_jax.corpora import baselines, conllu
from cope_jax.corpora.sentences_by_corpus import SPLITS
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least
from cope_jax.storage.files import in_bucket
from cope_jax.tasks.stored import StoredTask
from cope_jax.tasks.task import TASKS, Baseline, Batch, check_either
from cope_jax.tokenizers.characters import characters
from cope_jax.tokenizers.word_level import Vocabulary
from cope_jax.tokenizers.wordpiece import WordPiece


@TASKS.register("tagging")
class Tagging(StoredTask):
    """Predicts the universal part of speech of each word, in sentences cut after L words.

    The fields are `inputs` `[B, L]`, which are lowercase words, `characters` `[B, L, C]`, and
    `targets` and `weights` `[B, L]`. The option `vectors` adds the field `vectors` `[B, L, J, D]`.
    Words that occur once in training are unknown.

    With the option `pieces`, the fields are for BERT. `inputs`, `mask` and `segments` `[B, P]`
    describe the pieces with `[CLS]` and `[SEP]`. `starts` `[B, L]` is the index of each word's
    first piece. `targets` and `weights` are still `[B, L]`.

    Attributes:
      tags: names of the tags; a target is an index into `tags`.
      vector_shape: (J, D), the number of layers and the width of the vectors; None if there are no
        vectors.

    >>> task = Tagging(Tagging.Config(length=10))
    >>> batch = task.dataset("train", 1)
    >>> " ".join(task.tags[tag] for tag in batch["targets"][0])
    'DET ADJ NOUN VERB DET NOUN ADV DET NOUN PUNCT'
    """

    @dataclasses.dataclass(frozen=True)
    class Config:
        """Options of tagging.

        Attributes:
          data_dir: folder with the folder of the treebank. If None, the task uses the built-in
            sample.
          file: path of a `.csv` with the columns `text` and `label`, in place of the treebank: see
            `conllu.read_table`.
          length: L, the maximum number of words of an example.
          max_characters: C, the maximum number of bytes of a word, including the marks of its begin
            and end.
          vectors: path of an .npz file with an array for each split, or of a folder with a file
            `<split>.npy` for each split. An array `[words, J, D]` has the contextual vectors of all
            words of `sentences(split)`, in order. If None, examples have no vectors.
          pieces: path of a vocab.txt. If it is given, examples have pieces of words. If None, they
            have words and characters.
          max_pieces: P, the maximum number of pieces of an example, including `[CLS]` and `[SEP]`.
          lowercase: whether to lowercase the text before it is cut into pieces.
        """

        data_dir: str | None = None
        file: str | None = None
        length: int = 64
        max_characters: int = 32
        vectors: str | None = None
        pieces: str | None = None
        max_pieces: int = 128
        lowercase: bool = True

        def __post_init__(self):
            check_at_least(1, "tagging", length=self.length)
            sizes = {"max_characters": self.max_characters, "max_pieces": self.max_pieces}
            check_at_least(3, "tagging", **sizes)
            check_either(self, "tagging", "data_dir", "file")
            check_either(self, "tagging", "vectors", "pieces")

    def __init__(self, config: Config):
        self.tags = conllu.TAGS
        if config.file is None:
            self._sentences = {split: conllu.read(config.data_dir, split) for split in SPLITS}
            lines_of = {
                split: (f"{sentence.words} {sentence.tags}" for sentence in sentences)
                for split, sentences in self._sentences.items()
            }
            self._keep_digests(config, lines_of)
        else:
            self._sentences = conllu.read_table(config.file)
            lines = itertools.chain.from_iterable(self._sentences.values())
            self.tags = tuple(sorted({tag for line in lines for tag in line.tags}))
        self.num_tags = len(self.tags)
        self.vocabulary = Vocabulary.build(map(str.lower, self._words("train")), min_count=2)
        self._pieces = (
            WordPiece.load(config.pieces, lowercase=config.lowercase) if config.pieces else None
        )
        if self._pieces:
            self._pieces.check_specials()
        numbers = {tag: number for number, tag in enumerate(self.tags)}
        self._targets = {
            split: np.array(
                [numbers[tag] for sentence in sentences for tag in sentence.tags], np.int32
            )
            for split, sentences in self._sentences.items()
        }
        self._splits: dict[str, _Words | _Pieces] = {}
        for split in SPLITS:
            lengths = [len(sentence.words) for sentence in self._sentences[split]]
            words = self._words(split)
            if self._pieces:
                self._splits[split] = _Pieces(lengths, words, self._pieces, config)
            else:
                vectors = _vectors(config.vectors, split, len(words)) if config.vectors else None
                self._splits[split] = _Words(lengths, words, self.vocabulary, config, vectors)
        train = self._splits["train"]
        vectors = train.vectors if isinstance(train, _Words) else None
        self.vector_shape = None if vectors is None else vectors.shape[1:]
        super().__init__(
            config,
            vocab_size=len(self._pieces or self.vocabulary),
            lengths=dict.fromkeys(SPLITS, config.max_pieces if config.pieces else config.length),
        )

    def sentences(self, split: str) -> list[tuple[str, ...]]:
        """The words of each sentence of a split, not cut at L, in the order of the file."""
        self.length(split)
        return [sentence.words for sentence in self._sentences[split]]

    def size(self, split: str) -> int:
        self.length(split)
        return len(self._splits[split].chunks)

    def take(self, split: str, indices: np.ndarray) -> Batch:
        """The examples at `indices` `[n]` of the file, without building the others."""
        self.length(split)
        text, length = self._splits[split], self.config.length
        bounds = np.array(text.chunks, np.int64).reshape(-1, 2)[indices]
        indices_BL = bounds[:, :1] + np.arange(length)
        real_BL = indices_BL < bounds[:, 1:]
        indices_BL = np.where(real_BL, indices_BL, 0)
        targets_BL = np.where(real_BL, self._targets[split][indices_BL], 0).astype(np.int32)
        fields = text.fields(bounds, indices_BL, real_BL)
        return {**fields, "targets": targets_BL, "weights": real_BL.astype(np.float32)}

    def baselines(
        self, batches: Callable[[str], Sequence[Batch]], examples: int, seed: int
    ) -> list[Baseline]:
        tags = np.concatenate([b["targets"][b["weights"] > 0] for b in batches("train")])
        most, results = np.bincount(tags).argmax(), []
        for split in self.evaluation_splits:
            pairs = ((b["targets"], b["weights"] > 0) for b in batches(split))
            right = np.concatenate([targets[counts] == most for targets, counts in pairs])
            results += [
                Baseline(split, "tags", "most frequent tag", float(right.mean()), "token_error"),
                Baseline(
                    split, "tags", "most frequent of the word", self.majority(split), "token_error"
                ),
            ]
        return results

    def majority(self, split: str) -> float:
        """The accuracy on `split` if each word gets its most frequent tag in training.

        Words that are not in training get the most frequent tag of all. If counts are equal, the
        first tag by alphabet wins.
        """
        self.length(split)
        guesses = baselines.majority_by_word(
            self._words("train"), self._targets["train"].tolist(), self._words(split)
        )
        return float(np.mean(self._targets[split] == guesses))

    def saved_files(self) -> dict[str, str]:
        if self._pieces:
            return {"vocab.txt": self._pieces.text}
        return {"words.txt": self.vocabulary.text}

    def _words(self, split: str) -> list[str]:
        return [word for sentence in self._sentences[split] for word in sentence.words]


class _Words:
    """A split as words, characters and vectors."""

    def __init__(
        self,
        lengths: Sequence[int],
        words: Sequence[str],
        vocabulary: Vocabulary,
        config: Tagging.Config,
        vectors: np.ndarray | None,
    ):
        self.chunks = _chunks(lengths, np.arange(len(words) + 1), config.length, config.length)
        self.vectors = vectors
        self._inputs = vocabulary.encode(word.lower() for word in words)
        kinds = {word: number for number, word in enumerate(dict.fromkeys(words), start=1)}
        self._kinds = np.array([kinds[word] for word in words], np.int32)
        padding = np.zeros((1, config.max_characters), np.int32)
        self._table_UC = np.concatenate([padding, characters(list(kinds), config.max_characters)])

    def fields(self, bounds: np.ndarray, indices_BL: np.ndarray, real_BL: np.ndarray) -> Batch:
        """The fields of a batch, except targets and weights."""
        batch = {
            "inputs": np.where(real_BL, self._inputs[indices_BL], 0).astype(np.int32),
            "characters": self._table_UC[np.where(real_BL, self._kinds[indices_BL], 0)],
        }
        if self.vectors is not None:
            vectors = self.vectors[indices_BL].astype(np.float32)
            batch["vectors"] = vectors * real_BL[..., None, None]
        return batch


class _Pieces:
    """A split as pieces of words."""

    def __init__(
        self,
        lengths: Sequence[int],
        words: Sequence[str],
        pieces: WordPiece,
        config: Tagging.Config,
    ):
        room = config.max_pieces - 2
        encoded = [pieces.encode_words([word])[0][:room] for word in words]
        self._bounds = np.cumsum([0, *map(len, encoded)])
        self._flat = np.concatenate([np.array(ids, np.int32) for ids in encoded])
        self.chunks = _chunks(lengths, self._bounds, config.length, room)
        self._special, self._length = pieces, config.max_pieces

    def fields(self, bounds: np.ndarray, indices_BL: np.ndarray, real_BL: np.ndarray) -> Batch:
        """The fields of a batch, except targets and weights."""
        begin_B1, end_B1 = self._bounds[bounds[:, :1]], self._bounds[bounds[:, 1:]]
        flat_BP = begin_B1 + np.arange(self._length) - 1
        last_B1 = end_B1 - begin_B1 + 1
        inside_BP = (flat_BP >= begin_B1) & (flat_BP < end_B1)
        pieces_BP = self._flat[np.where(inside_BP, flat_BP, 0)]
        inputs_BP = np.where(inside_BP, pieces_BP, self._special.pad)
        inputs_BP[:, 0] = self._special.cls
        np.put_along_axis(inputs_BP, last_B1, self._special.sep, axis=1)
        return {
            "inputs": inputs_BP.astype(np.int32),
            "mask": (np.arange(self._length) <= last_B1).astype(np.int32),
            "segments": np.zeros(inputs_BP.shape, np.int32),
            "starts": np.where(real_BL, self._bounds[indices_BL] - begin_B1 + 1, 0).astype(
                np.int32
            ),
        }


def _chunks(
    lengths: Sequence[int], bounds: np.ndarray, most_words: int, most_pieces: int
) -> list[tuple[int, int]]:
    """(first word, end) of each part of each sentence. A part has as many words as fit."""
    chunks, begin = [], 0
    for length in lengths:
        end = begin + length
        while begin < end:
            room = int(np.searchsorted(bounds, bounds[begin] + most_pieces, side="right")) - 1
            stop = min(end, begin + most_words, room)
            chunks.append((begin, stop))
            begin = stop
    return chunks


_DAMAGED = (
    *(OSError, ValueError, KeyError, AttributeError, TypeError, EOFError),
    *(zipfile.BadZipFile, zlib.error),
)
"""The errors of NumPy for files that are no arrays, or damaged."""


def _vectors(path: str, split: str, words: int) -> np.ndarray:
    """The vectors of a split, `[words, J, D]`. ConfigError: missing, or of other words."""
    in_bucket(path)  # an error names another kind of URL
    file = epath.Path(path)
    try:
        if file.is_dir():
            vectors = np.load(file / f"{split}.npy", mmap_mode="r")
        else:
            with file.open("rb") as stream, np.load(stream) as arrays:
                vectors = arrays[split]
    except _DAMAGED as error:
        raise ConfigError(
            f"there are no vectors of {split!r} at {path} ({error}): give an .npz with an array for each split, or a "
            "folder with an .npy for each split"
        ) from error
    if vectors.ndim != 3 or len(vectors) != words or not np.issubdtype(vectors.dtype, np.floating):
        raise ConfigError(
            f"the vectors of {split!r} at {path} have shape {vectors.shape}, not (words = {words}, layers, width): "
            "make them from the same treebank"
        )
    return vectors
