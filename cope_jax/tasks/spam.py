"""Spam detection: is a short message ham or spam?

Almeida, Gómez Hidalgo and Yamakami, "Contributions to the study of SMS spam filtering", DocEng
2011.
"""

import dataclasses

import numpy as np

from cope_jax.corpora import sms
from cope_jax.registry import check_at_least
from cope_jax.tasks.stored import StoredTask
from cope_jax.tasks.task import TASKS, Batch, check, check_either
from cope_jax.tokenizers.wordpiece import WordPiece


@TASKS.register("spam")
class Spam(StoredTask):
    """Labels messages as ham (0) or spam (1). Of k folds of messages, one is the test split.

    All folds have the same share of spam. The fields `inputs`, `mask` and `segments` are `[B, L]`;
    `targets` and `weights` are `[B]`. `mask` is 1 for pieces and 0 for padding, and `segments` is 0
    everywhere. Pieces are between `[CLS]` and `[SEP]`; a message that is too long keeps its first
    pieces.

    Attributes:
      indices: for each split, the indices of its messages in the corpus.
      classes: names of the classes; a label is an index into `classes`.
      wordpiece: the vocabulary.

    >>> task = Spam(Spam.Config(folds=5))
    >>> batch = task.dataset("test", 4)
    >>> print(*(task.classes[label] for label in batch["targets"]))
    ham spam ham spam
    """

    metric = "sequence_error"

    @dataclasses.dataclass(frozen=True)
    class Config:
        """Options of spam.

        Attributes:
          data_dir: folder with a folder for each corpus. If None, the task uses the built-in
            sample.
          file: path of a `.csv` with the columns `text` and `label`, in place of the corpus. Of its
            two labels, the second in alphabetical order stands for spam.
          vocab: path of a vocab.txt. If None, the task learns a vocabulary from the training
            messages.
          vocab_size: maximum size of a learned vocabulary.
          lowercase: whether to lowercase the text.
          length: L, the number of pieces of an example, including `[CLS]` and `[SEP]`.
          folds: k, the number of folds.
          fold: number of the test fold, from 0.
          repeat: seed of the division into folds.
          train: number of training messages to keep, with the same share of spam. If None, all
            messages are kept.
        """

        data_dir: str | None = None
        file: str | None = None
        vocab: str | None = None
        vocab_size: int = 4096
        lowercase: bool = True
        length: int = 64
        folds: int = 10
        fold: int = 0
        repeat: int = 0
        train: int | None = None

        def __post_init__(self):
            check_either(self, "spam", "data_dir", "file")
            check_at_least(3, "spam", length=self.length)
            check_at_least(2, "spam", folds=self.folds, train=self.train)
            check_at_least(0, "spam", repeat=self.repeat)
            check(
                0 <= self.fold < self.folds,
                f"spam.fold must be 0 to {self.folds - 1}, got {self.fold}",
            )

    def __init__(self, config: Config):
        if config.file is None:
            self.classes, messages = sms.LABELS, sms.read(config.data_dir)
            lines = (f"{message.label} {message.text}" for message in messages)
            self._keep_digests(config, {"all": lines})
        else:
            self.classes, messages = sms.read_table(config.file)
        train, test = _divide(np.array([message.label for message in messages]), config)
        self.num_classes = len(self.classes)
        self.indices = {"train": train, "test": test}
        indices = self.indices.items()
        self._messages = {split: [messages[i] for i in of_split] for split, of_split in indices}
        if config.vocab is None:
            texts = (message.text for message in self._messages["train"])
            self.wordpiece = WordPiece.train(texts, config.vocab_size, lowercase=config.lowercase)
        else:
            self.wordpiece = WordPiece.load(config.vocab, lowercase=config.lowercase)
            self.wordpiece.check_specials()
        lengths = dict.fromkeys(self.indices, config.length)
        super().__init__(config, vocab_size=len(self.wordpiece), lengths=lengths)
        self._fields = {split: self._encoded(split) for split in self.splits}

    def texts(self, split: str) -> list[str]:
        """The messages of a split, in the order of the file."""
        self.length(split)
        return [message.text for message in self._messages[split]]

    def labels(self, split: str) -> np.ndarray:
        """The labels of `texts`, int32 `[n]`."""
        self.length(split)
        return np.array([message.label for message in self._messages[split]], np.int32)

    def size(self, split: str) -> int:
        self.length(split)
        return len(self._messages[split])

    def take(self, split: str, indices: np.ndarray) -> Batch:
        return {name: field[indices] for name, field in self._fields[split].items()}

    def saved_files(self) -> dict[str, str]:
        return {"vocab.txt": self.wordpiece.text}

    def _encoded(self, split: str) -> Batch:
        length, size = self.config.length, self.size(split)
        inputs_BL = np.full((size, length), self.wordpiece.pad, np.int32)
        mask_BL = np.zeros((size, length), np.int32)
        for row, text in enumerate(self.texts(split)):
            ids, _ = self.wordpiece.frame(self.wordpiece.encode(text)[: length - 2])
            inputs_BL[row, : len(ids)] = ids
            mask_BL[row, : len(ids)] = 1
        return {
            "inputs": inputs_BL,
            "mask": mask_BL,
            "segments": np.zeros_like(inputs_BL),
            "targets": self.labels(split),
            "weights": np.ones(size, np.float32),
        }


def _divide(labels: np.ndarray, config: Spam.Config) -> tuple[np.ndarray, np.ndarray]:
    """The indices of training and of test messages, each in ascending order."""
    from sklearn import model_selection  # here, because it is slow to import

    least = int(np.bincount(labels, minlength=2).min())
    check(
        config.folds <= least,
        f"spam.folds must be at most {least}, the number of messages of the rarer class",
    )
    folds = model_selection.StratifiedKFold(config.folds, shuffle=True, random_state=config.repeat)
    train, test = list(folds.split(labels, labels))[config.fold]
    if config.train is not None:
        most = len(train) - 2  # the division must leave over one message of each class
        check(
            config.train <= most,
            f"spam.train must be at most {most}: leave it out for all {len(train)} messages",
        )
        options = {"train_size": config.train, "random_state": config.repeat}
        subset = model_selection.StratifiedShuffleSplit(1, **options)
        train = np.sort(train[next(subset.split(train, labels[train]))[0]])
    return train, test
