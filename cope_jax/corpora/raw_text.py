"""Running text as it is written, by the name of its corpus: for language models of any kind of token."""

import dataclasses
import functools
import hashlib
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
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
