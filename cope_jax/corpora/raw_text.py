"""Running text as it is written, of a corpus by its name or of a mixture: for language models of any kind of token."""

import dataclasses
import functools
import hashlib
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cope_jax.corpora import source_code, wikitext
from cope_jax.corpora.corpus_files import SAMPLES, find, matching, read_prose
from cope_jax.corpora.sentences_by_corpus import SPLITS
from cope_jax.errors import ConfigError
from cope_jax.registry import Registry, unknown

Reader = Callable[[str], list[str]]
"""From a split to its documents."""

_SPACE = re.compile(r"\s")
TEXT = ("**/*.txt", "**/*.txt.gz")

READERS: Registry[Callable[[str | None, Sequence[str]], Reader]] = Registry("corpus")
"""Functions of (data_dir, globs) by the name of the corpus."""

WITHOUT_WORDS = frozenset({"code"})
"""Corpora without words that everyone cuts alike, so that perplexities by words do not compare."""

SAME_TESTS = ("wikitext-2", "wikitext-2-raw", "wikitext-103", "wikitext-103-raw")
"""Corpora that have one validation and one test, in the same or in other spelling."""

STANDARD_PLACES = {"code": "the standard library of the running Python"}
"""Where texts come from without a data_dir, of corpora that have more than the built-in sample."""

WITH_GLOBS = frozenset({"files", "code"})
"""Corpora of whatever files there are."""


def documents(corpus: str, data_dir: str | None, split: str, globs: Sequence[str] = ()) -> list[str]:
    """The documents of a split; put one after the other, they are its text.

    Args:
      corpus: one of `READERS`:
        "wikitext-2", "wikitext-103", with `<unk>` for rare words, and "wikitext-2-raw", "wikitext-103-raw", as written:
        articles;
        "tinyshakespeare": one text, of which validation and test are the last two parts of twenty;
        "files": plain text, each file cut in the same way;
        "code": source files, split by file, without near-duplicates; by default the standard library of the running
        Python, or what is in `code/`, if there is a data_dir.
      data_dir: has a folder for each corpus; None: the built-in sample.
      split: "train", "validation" or "test".
      globs: which files of "files" or "code", in their folder or with a full path; (): `**/*.txt`, `**/*.py`.

    Raises:
      ConfigError: no such corpus, split or file, or one that is no text.

    >>> [len(text) for text in documents("files", None, "train")]
    [438, 471, 398]
    """
    return reader(corpus, data_dir, globs)(split)


def reader(corpus: str, data_dir: str | None, globs: Sequence[str] = ()) -> Reader:
    """`documents` of any split, which looks for files when it is called."""
    read = READERS.get(corpus)(data_dir, globs)

    def checked(split: str) -> list[str]:
        if split not in SPLITS:
            raise unknown(f"split of {corpus}", split, SPLITS)
        found = [text for text in read(split) if text]
        if not found:
            raise ConfigError(f"{corpus} has no text in its split {split!r}: give more files, or larger ones")
        return found

    return checked


def fingerprint(texts: Iterable[str]) -> dict[str, Any]:
    """The number of texts, their bytes in UTF-8, and a digest that no other texts have, nor these in another order.

    >>> found = fingerprint(["ab", "c"])
    >>> found["documents"], found["bytes"], found["sha256"][:8]
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
    """Texts that are equal where their digests are, so that what is learned from them can be kept by their content.

    Attributes:
      digest: `sha256` of their `fingerprint`.
      read: gives them; it outlives the task, and so should hold no text itself.
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
    return lambda split: [
        _part(read_prose(find(data_dir, "tinyshakespeare", names, download="tinyshakespeare")), split)
    ]


@READERS.register("files")
def _files(data_dir: str | None, globs: Sequence[str]) -> Reader:
    folder = pathlib.Path(SAMPLES if data_dir is None else data_dir) / "files"

    def read(split: str) -> list[str]:
        patterns = globs or TEXT
        found = matching(folder, patterns)
        if not found:
            raise ConfigError(
                f"no file in {folder} matches {', '.join(patterns)}: put text there, or give globs with a full path"
            )
        return [_part(read_prose(path), split) for path in found.values()]

    return read


@READERS.register("code")
def _code(data_dir: str | None, globs: Sequence[str]) -> Reader:
    root = source_code.standard_library() if data_dir is None else pathlib.Path(data_dir) / "code"
    patterns = tuple(globs) or source_code.PYTHON
    return lambda split: _tree(root, patterns, source_code.stamp(root, patterns)).documents(split)


@functools.lru_cache(maxsize=1)  # all splits are of one tree, whose duplicates take seconds to find
def _tree(root: pathlib.Path, globs: tuple[str, ...], stamp: frozenset[tuple[str, int, int]]) -> source_code.Tree:
    del stamp  # another one is of changed files
    return source_code.read(root, globs)


def _part(text: str, split: str) -> str:
    r"""The share of a split of a text that is one: 90, 5 and 5 in 100 of its characters, cut between words.

    >>> [_part("ab " * 40, split).count("ab") for split in SPLITS]
    [36, 2, 2]
    """
    text = text.replace("\r\n", "\n")
    spaces = (_SPACE.search(text, len(text) * share // 100 - 1) for share in (90, 95))
    ends = [0, *(space.end() if space else len(text) for space in spaces), len(text)]
    place = SPLITS.index(split)
    return text[ends[place] : ends[place + 1]]


def parse_mixture(corpus: str) -> tuple[tuple[float, str], ...]:
    """Weights and names of the corpora in a text; a corpus without a weight has 1.

    Raises:
      ConfigError: an unknown corpus, one named twice, two with the same test, a weight that is no positive number.

    >>> parse_mixture("3*wikitext-2 + code")
    ((3.0, 'wikitext-2'), (1.0, 'code'))
    """
    parts = []
    for part in corpus.split("+"):
        weight, star, name = part.rpartition("*")
        READERS.get(name.strip())
        try:
            number = float(weight) if star else 1.0
        except ValueError:
            number = 0.0
        if not 0 < number < float("inf"):
            raise ConfigError(f"text.corpus={corpus!r} has a weight that is no positive number: {weight!r}")
        parts.append((number, name.strip()))
    names = [name for _, name in parts]
    if len(set(names)) < len(names):
        raise ConfigError(f"text.corpus={corpus!r} names a corpus twice: give it one weight")
    same = [name for name in names if name in SAME_TESTS]
    if len(same) > 1:
        raise ConfigError(f"text.corpus={corpus!r}: {' and '.join(same)} have the same validation and test: take one")
    return tuple(parts)


class Mixture:
    """The texts of one corpus or of several, which are looked for when they are asked for.

    Takes what `documents` does, but the corpora are a text for `parse_mixture`, of which one may take globs.

    Attributes:
      weights: of each corpus.
      has_words: whether perplexities by words compare.
      place: where the texts come from, in words.

    Raises:
      ConfigError: as `parse_mixture` does; globs, and no corpus takes them, or two.

    >>> [len(texts) for texts in Mixture("files+wikitext-2").texts("train")]
    [3, 5]
    """

    def __init__(self, corpus: str, data_dir: str | None = None, globs: Sequence[str] = ()):
        parts = parse_mixture(corpus)
        names = [name for _, name in parts]
        taking = [name for name in names if name in WITH_GLOBS]
        if globs and len(taking) != 1:
            raise ConfigError(
                f"text.globs choose files of one of {' and '.join(sorted(WITH_GLOBS))}, and text.corpus={corpus!r} has "
                f"{' and '.join(taking) or 'neither'}: leave globs out"
            )
        self.weights = tuple(weight for weight, _ in parts)
        self.has_words = WITHOUT_WORDS.isdisjoint(names)
        indices = {STANDARD_PLACES.get(name, "the small built-in sample") for name in names}
        self.place = " and ".join(sorted(indices)) if data_dir is None else str(data_dir)
        self._readers = [reader(name, data_dir, globs) for name in names]
        self._fingerprints: dict[str, dict[str, Any]] = {}

    def texts(self, split: str) -> list[list[str]]:
        """The documents of a split, of each corpus."""
        return [read(split) for read in self._readers]

    def documents(self, split: str) -> Iterator[str]:
        """The documents of a split, one corpus after the other, which are read when the first is asked for."""
        for read in self._readers:
            yield from read(split)

    def fingerprint(self, split: str) -> dict[str, Any]:
        """`fingerprint` of the documents of a split."""
        if split not in self._fingerprints:
            self._fingerprints[split] = fingerprint(self.documents(split))
        return self._fingerprints[split]
