"""Texts to export as shards, divided into units that processes and hosts read independently."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from cope_jax.corpora import document_files, raw_text
from cope_jax.corpora.document_files import Division, Joins, Piece
from cope_jax.corpora.sentences_by_corpus import SPLITS
from cope_jax.errors import ConfigError

_UNIT = 1 << 24  # bytes of the files of a unit, unless one file is larger


class Source(Protocol):
    """Documents to export, divided into units that are read independently."""

    @property
    def weights(self) -> Sequence[float]:
        """The amount of work of each unit, for the progress bar."""

    @property
    def training_units(self) -> Sequence[int]:
        """The units that may have documents to train on."""

    @property
    def words(self) -> bool:
        """True if the text has an agreed division into words."""

    def describe(self) -> dict[str, Any]:
        """The identity of the text, as JSON."""

    @property
    def more(self) -> str:
        """Advice for getting more documents."""

    def read(
        self, unit: int, joins: Joins | None = None
    ) -> Iterator[tuple[str | None, Piece, float]]:
        """The pieces of a unit, each with its split and the share of the unit that is read.

        The split is None for all pieces of a document except the first. For `joins` see
        `document_files.pieces`.
        """


@dataclasses.dataclass(frozen=True)
class Files:
    """Files of text, JSON lines or Parquet: see `document_files`.

    Attributes:
      files: from `document_files.find`.
      field: name of the text's field in a record.
      held_out: the share of documents in "validation", and the share in "test". The text of a
        record, line or paragraph decides the split, so that equal ones are in the same split; of a
        file that is one document, its path does.
      division: what is a document of a text file: the file, or each of its lines or paragraphs.
    """

    files: tuple[document_files.InputFile, ...]
    field: str = "text"
    held_out: float = 0.001
    division: Division = "file"
    words = False

    def __post_init__(self):
        if not 0 < self.held_out < 0.5:
            raise ConfigError(
                f"held_out must be more than 0 and less than 0.5, got {self.held_out}"
            )
        if self.division != "file" and not self._has_prose:
            raise ConfigError(
                f"no file of text can be split by {self.division}: leave split_documents out"
            )

    @functools.cached_property
    def units(self) -> list[list[document_files.InputFile]]:
        """Runs of files of about `_UNIT` bytes."""
        runs: list[list[document_files.InputFile]] = []
        room = 0
        for file in self.files:
            if file.size > room or not runs:
                runs.append([])
                room = _UNIT
            runs[-1].append(file)
            room -= file.size
        return runs

    @property
    def weights(self) -> Sequence[float]:
        return [sum(file.size for file in unit) for unit in self.units]

    @property
    def training_units(self) -> Sequence[int]:
        return range(len(self.units))

    def describe(self) -> dict[str, Any]:
        listed = "".join(f"{file.name}\t{file.size}\t{file.mark()}\n" for file in self.files)
        return {
            "files": len(self.files),
            "bytes": sum(file.size for file in self.files),
            "listing": hashlib.sha256(listed.encode("utf-8", "surrogatepass")).hexdigest(),
            "field": self.field,
            "held_out": self.held_out,
            **({} if self.division == "file" else {"split_documents": self.division}),
        }

    @property
    def _has_prose(self) -> bool:
        return any(document_files.is_prose(file.name) for file in self.files)

    @property
    def more(self) -> str:
        if self.division == "file" and self._has_prose:
            return "a text file is one document, so set --split_documents=paragraph or line, or give more files"
        return "give more documents"

    def read(
        self, unit: int, joins: Joins | None = None
    ) -> Iterator[tuple[str | None, Piece, float]]:
        total, before = max(1, self.weights[unit]), 0
        for file in self.units[unit]:
            for piece, share in document_files.pieces(file, self.field, self.division, joins=joins):
                split = document_files.split_of(piece.key, self.held_out) if piece.key else None
                yield split, piece, (before + share * file.size) / total
            before += file.size


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A corpus with a name and its own splits: see `raw_text.documents`. A split is read whole."""

    name: str
    data_dir: str | None = None
    globs: tuple[str, ...] = ()
    weights = (1.0, 1.0, 1.0)
    training_units = (0,)
    more = "give a larger corpus"

    def __post_init__(self):
        if "+" in self.name or "*" in self.name:  # its weights would be lost
            raise ConfigError(
                f"{self.name} is a mixture: export each corpus to a folder, and mix the folders by task.options.weights"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return Corpus, (self.name, self.data_dir, self.globs)  # processes get no text

    @functools.cached_property
    def _texts(self) -> raw_text.Mixture:
        return raw_text.Mixture(self.name, self.data_dir, self.globs)

    @property
    def words(self) -> bool:
        return self._texts.has_words

    def describe(self) -> dict[str, Any]:
        return {"corpus": self.name, **{split: self._texts.fingerprint(split) for split in SPLITS}}

    def read(
        self, unit: int, joins: Joins | None = None
    ) -> Iterator[tuple[str | None, Piece, float]]:
        del joins  # each document is one piece
        documents = [text for text in self._texts.documents(SPLITS[unit]) if text]
        for number, text in enumerate(documents, start=1):
            yield SPLITS[unit], Piece(text, text), number / len(documents)
