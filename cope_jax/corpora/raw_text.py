"""Reads raw text of a corpus or a mixture, by name, for language models with any kind of token."""

import dataclasses
import functools
import hashlib
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cope_jax.corpora import source_code, wikitext
from cope_jax.corpora.corpus_files import data_folder, find, matching, read_prose
from cope_jax.corpora.sentences_by_corpus import SPLITS
from cope_jax.errors import ConfigError
from cope_jax.registry import Registry, unknown

Reader = Callable[[str], list[str]]
"""A function from a split to its documents."""

_SPACE = re.compile(r"\s")
TEXT = ("**/*.txt", "**/*.txt.gz")

READERS: Registry[Callable[[str | None, Sequence[str]], Reader]] = Registry("corpus")
"""For each name of a corpus, a function from (data_dir, globs) to the reader of the corpus."""

WITHOUT_WORDS = frozenset({"code"})
"""Corpora without an agreed division into words, so perplexities per word cannot be compared."""

SAME_TESTS = ("wikitext-2", "wikitext-2-raw", "wikitext-103", "wikitext-103-raw")
"""Corpora with the same validation and test texts. Without "-raw", `<unk>` replaces rare words."""

STANDARD_PLACES = {"code": "the standard library of the running Python"}
"""The texts without a data_dir, for corpora that do not use the built-in sample."""

WITH_GLOBS = frozenset({"files", "code"})
"""Corpora whose files are chosen by globs."""


def documents(
    corpus: str, data_dir: str | None, split: str, globs: Sequence[str] = ()
) -> list[str]:
    """Reads the documents of a split. All documents, concatenated, are the text of the split.

    Args:
      corpus: one of `READERS`:

        - "wikitext-2" and "wikitext-103" are articles with `<unk>` for rare words;
        - "wikitext-2-raw" and "wikitext-103-raw" are the articles as written;
        - "tinyshakespeare" is one text: 90 % are training, the next 5 % validation, and the last
          5 % test;
        - "files" are files of plain text, and each file is divided in the same way;
        - "code" are source files, divided file by file, without near-duplicates. They are in
          `code/` or, without a data_dir, in the standard library of the running Python.
      data_dir: folder with a folder for each corpus. If None, the built-in sample is read.
      split: "train", "validation" or "test".
      globs: patterns that choose the files of "files" or "code". A pattern is relative to the
        corpus folder, or has a full path. () means all `.txt` and `.txt.gz` files for "files", and
        all `.py` files for "code".

    Raises:
      ConfigError: there is no such corpus, split or file, or a file is not text.

    >>> [len(text) for text in documents("files", None, "train")]
    [438, 471, 398]
    """
    return reader(corpus, data_dir, globs)(split)


def reader(corpus: str, data_dir: str | None, globs: Sequence[str] = ()) -> Reader:
    """Returns a function from a split to its `documents`, which reads files when it is called."""
    read = READERS.get(corpus)(data_dir, globs)

    def checked(split: str) -> list[str]:
        if split not in SPLITS:
            raise unknown(f"split of {corpus}", split, SPLITS)
        texts = [text for text in read(split) if text]
        if not texts:
            raise ConfigError(
                f"{corpus} has no text in its split {split!r}: give more or larger files"
            )
        return texts

    return checked


def fingerprint(texts: Iterable[str]) -> dict[str, Any]:
    """The number of texts, their size in UTF-8 bytes, and a digest of the texts in their order.

    >>> content = fingerprint(["ab", "c"])
    >>> content["documents"], content["bytes"], content["sha256"][:8]
    (2, 3, 'eb508569')
    """
    documents, octets, digest = 0, 0, hashlib.sha256()
    for text in texts:
        encoded = text.encode("utf-8", "ignore")
        digest.update(f"{len(encoded)}\n".encode() + encoded)
        documents += 1
        octets += len(encoded)
    return {"documents": documents, "bytes": octets, "sha256": digest.hexdigest()}


@dataclasses.dataclass(frozen=True)
class Texts:
    """A reference to texts, equal to others of the same digest: results of learning can be cached.

    Attributes:
      digest: `sha256` from the `fingerprint` of the texts.
      read: returns the texts. This function outlives the task, so it should not keep any text in
        memory.
    """

    digest: str
    read: Callable[[], Iterable[str]] = dataclasses.field(compare=False, repr=False)


def _wikitext(name: str) -> Callable[[str | None, Sequence[str]], Reader]:
    corpus, raw = name.removesuffix("-raw"), name.endswith("-raw")
    return lambda data_dir, globs: lambda split: wikitext.texts(data_dir, split, corpus, raw=raw)


for _name in SAME_TESTS:
    READERS.register(_name)(_wikitext(_name))


@READERS.register("tinyshakespeare")
def _tinyshakespeare(data_dir: str | None, globs: Sequence[str]) -> Reader:
    names = ["input.txt", "tinyshakespeare.txt"]
    path = functools.partial(find, data_dir, "tinyshakespeare", names, "tinyshakespeare")
    return lambda split: [_part(read_prose(path()), split)]


@READERS.register("files")
def _files(data_dir: str | None, globs: Sequence[str]) -> Reader:
    folder = pathlib.Path(data_folder(data_dir)) / "files"

    def read(split: str) -> list[str]:
        patterns = globs or TEXT
        files = matching(folder, patterns)
        if not files:
            raise ConfigError(
                f"no file in {folder} matches {', '.join(patterns)}: put text there, or give globs with a full path"
            )
        return [_part(read_prose(path), split) for path in files.values()]

    return read


@READERS.register("code")
def _code(data_dir: str | None, globs: Sequence[str]) -> Reader:
    folder = source_code.standard_library()
    if data_dir is not None:
        folder = pathlib.Path(data_folder(data_dir)) / "code"
    patterns = tuple(globs) or source_code.PYTHON
    stamp = source_code.stamp
    return lambda split: _tree(folder, patterns, stamp(folder, patterns)).documents(split)


# All splits share one tree, and finding its duplicates takes seconds.
@functools.lru_cache(maxsize=1)
def _tree(
    root: pathlib.Path, globs: tuple[str, ...], stamp: frozenset[tuple[str, int, int]]
) -> source_code.Tree:
    del stamp  # it only changes the key of the cache when files change
    return source_code.read(root, globs)


def _part(text: str, split: str) -> str:
    r"""The part of a text in a split: 90, 5 or 5 % of its characters, divided between words.

    >>> [_part("ab " * 40, split).count("ab") for split in SPLITS]
    [36, 2, 2]
    """
    text = text.replace("\r\n", "\n")
    spaces = (_SPACE.search(text, len(text) * share // 100 - 1) for share in (90, 95))
    ends = [0, *(space.end() if space else len(text) for space in spaces), len(text)]
    number = SPLITS.index(split)
    return text[ends[number] : ends[number + 1]]


def parse_mixture(corpus: str) -> tuple[tuple[float, str], ...]:
    """The weights and names of the corpora in a mixture; the default weight is 1.

    Raises:
      ConfigError: a corpus is unknown or named twice, two have the same test split, or a weight is
        not positive.

    >>> parse_mixture("3*wikitext-2 + code")
    ((3.0, 'wikitext-2'), (1.0, 'code'))
    """
    parts = []
    for term in corpus.split("+"):
        weight, star, name = term.rpartition("*")
        READERS.get(name.strip())
        try:
            number = float(weight) if star else 1.0
        except ValueError:
            number = 0.0
        if not 0 < number < float("inf"):
            raise ConfigError(
                f"text.corpus={corpus!r} has the weight {weight!r}: give a positive number"
            )
        parts.append((number, name.strip()))
    names = [name for _, name in parts]
    if len(set(names)) < len(names):
        raise ConfigError(f"text.corpus={corpus!r} names a corpus twice: name each corpus once")
    same = [name for name in names if name in SAME_TESTS]
    if len(same) > 1:
        raise ConfigError(
            f"text.corpus={corpus!r} has {' and '.join(same)}, which have the same validation and test: use only one"
        )
    return tuple(parts)


class Mixture:
    """The texts of one or several corpora. They are read only on request.

    The arguments are the same as for `documents`, except that `corpus` has the format of
    `parse_mixture`. Globs apply to "files" or "code". With globs, the mixture must have exactly one
    of these two corpora.

    Attributes:
      weights: the weight of each corpus.
      has_words: whether all corpora have an agreed division into words, so that perplexities per
        word can be compared.
      place: the source of the texts, as text.

    Raises:
      ConfigError: `parse_mixture` rejects `corpus`, or there are globs and not exactly one corpus
        accepts globs.

    >>> [len(texts) for texts in Mixture("files+wikitext-2").texts("train")]
    [3, 5]
    """

    def __init__(self, corpus: str, data_dir: str | None = None, globs: Sequence[str] = ()):
        parts = parse_mixture(corpus)
        names = [name for _, name in parts]
        taking = [name for name in names if name in WITH_GLOBS]
        if globs and len(taking) != 1:
            raise ConfigError(
                f"text.globs needs exactly one of {' and '.join(sorted(WITH_GLOBS))} in text.corpus, but {corpus!r} "
                f"has {' and '.join(taking) or 'neither'}: leave globs out"
            )
        self.weights = tuple(weight for weight, _ in parts)
        self.has_words = WITHOUT_WORDS.isdisjoint(names)
        indices = {
            STANDARD_PLACES.get(name, "the small built-in sample (data_dir is not set)")
            for name in names
        }
        self.place = " and ".join(sorted(indices)) if data_dir is None else str(data_dir)
        self._readers = [reader(name, data_dir, globs) for name in names]
        self._fingerprints: dict[str, dict[str, Any]] = {}

    def texts(self, split: str) -> list[list[str]]:
        """The documents of a split: one list for each corpus."""
        return [read(split) for read in self._readers]

    def documents(self, split: str) -> Iterator[str]:
        """The documents of a split, corpus by corpus. A corpus is read when it is first needed."""
        for read in self._readers:
            yield from read(split)

    def fingerprint(self, split: str) -> dict[str, Any]:
        """The `fingerprint` of the documents of a split."""
        if split not in self._fingerprints:
            self._fingerprints[split] = fingerprint(self.documents(split))
        return self._fingerprints[split]
