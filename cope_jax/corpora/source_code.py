"""Reads a tree of source code, split by file, without near-duplicates.

Near-duplicates are found as in Broder, "On the resemblance and containment of documents", 1997, and
left out as in Lee et al., "Deduplicating training data makes language models better", ACL 2022.
"""

import dataclasses
import hashlib
import pathlib
import re
import sysconfig
import zlib
from collections.abc import Sequence

import numpy as np

from cope_jax.corpora.corpus_files import matching
from cope_jax.errors import ConfigError
from cope_jax.storage.files import read_bytes

PYTHON = ("**/*.py",)
_FOREIGN = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_SHARES = (("train", 90), ("validation", 95), ("test", 100))
"""A file belongs to the first split whose number exceeds the file's hash modulo 100."""

SHINGLE = 5
SIMILAR = 0.7
_BANDS, _ROWS = 16, 4
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclasses.dataclass(frozen=True)
class Tree:
    """Files of source code by their paths below the root, in sorted order.

    Attributes:
      files: a dict from path to text.
      skipped: paths of files that are not UTF-8 text.
      duplicates: a dict from the path of a file that was left out to the path of its near-duplicate
        in `files`.
    """

    files: dict[str, str]
    skipped: tuple[str, ...]
    duplicates: dict[str, str]

    def documents(self, split: str) -> list[str]:
        """The files of a split."""
        return [text for path, text in self.files.items() if split_of(path) == split]


def standard_library() -> pathlib.Path:
    """The folder of the standard library of the running Python."""
    return pathlib.Path(sysconfig.get_path("stdlib"))


def stamp(
    root: str | pathlib.Path, globs: Sequence[str] = PYTHON
) -> frozenset[tuple[str, int, int]]:
    """Name, size and modification time of each file that `read` would read, to detect changes."""
    files = matching(pathlib.Path(root), globs, _FOREIGN)
    states = ((name, path.stat()) for name, path in files.items())
    return frozenset((name, state.st_size, state.st_mtime_ns) for name, state in states)


def read(root: str | pathlib.Path, globs: Sequence[str] = PYTHON) -> Tree:
    """Reads the files below a folder that match any of `globs`, each once; unpacks `.gz` files.

    Empty files, and folders of installed packages, tests and caches, are left out. `matching`
    explains the globs.

    Raises:
      ConfigError: there is no text, or a file cannot be read.
    """
    folder = pathlib.Path(root)
    texts: dict[str, str] = {}
    skipped = []
    for name, path in matching(folder, globs, _FOREIGN).items():
        data = read_bytes(path)
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            skipped.append(name)
        elif text.strip():
            texts[name] = text.replace("\r\n", "\n")
    if not texts:
        raise ConfigError(
            f"no text in {root} matches {', '.join(globs)}: add files, or give globs with a full path"
        )
    duplicates = near_duplicates(texts)
    kept = {name: text for name, text in texts.items() if name not in duplicates}
    return Tree(kept, tuple(skipped), duplicates)


def split_of(path: str) -> str:
    """The split of a file by a hash of its path: 90 % "train", 5 % "validation", 5 % "test".

    >>> split_of("ast.py"), split_of("csv.py")
    ('train', 'train')
    """
    digest = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()
    percentile = int(digest[:8], 16) % 100
    return next(split for split, end in _SHARES if percentile < end)


def near_duplicates(texts: dict[str, str]) -> dict[str, str]:
    """Finds texts whose shingles (runs of five words and signs) have a Jaccard index above 0.7.

    J(A, B) = |A ∩ B|/|A ∪ B| is computed for all pairs that share a MinHash of 4 permutations in
    any of 16 bands. Returns a dict from the name of each later text to the name of an earlier text,
    which is not a duplicate itself.

    >>> near_duplicates({"a": "x = f(1, 2) + 3", "b": "x = f(1, 2) + 3 ", "c": "print(x)"})
    {'b': 'a'}
    """
    rng = np.random.default_rng(0)
    odd, shift = (
        rng.integers(0, 2**63, _BANDS * _ROWS, np.uint64) * np.uint64(2) + np.uint64(bit)
        for bit in (1, 0)
    )
    hashes: dict[str, int] = {}
    seen: dict[tuple[int, bytes], list[str]] = {}
    shingles: dict[str, np.ndarray] = {}
    duplicates: dict[str, str] = {}
    for name, text in texts.items():
        new = _shingles(text, hashes)
        least = np.array([(new * a + b).min() for a, b in zip(odd, shift, strict=True)])
        bands = least.reshape(_BANDS, _ROWS)
        keys = [(band, row.tobytes()) for band, row in enumerate(bands)]
        others = dict.fromkeys(other for key in keys for other in seen.get(key, ()))
        twins = (other for other in others if _resemblance(new, shingles[other]) > SIMILAR)
        twin = next(twins, None)
        if twin is not None:
            duplicates[name] = twin
            continue
        shingles[name] = new
        for key in keys:
            seen.setdefault(key, []).append(name)
    return duplicates


def _shingles(text: str, hashes: dict[str, int]) -> np.ndarray:
    """Hashes of the different runs of five words and signs. A text that is shorter is one run."""
    words = _WORD.findall(text)
    for word in words:
        if word not in hashes:
            hashes[word] = zlib.crc32(word.encode()) * 0x9E3779B97F4A7C15 % 2**64
    numbers = np.array([hashes[word] for word in words], np.uint64)
    size = min(SHINGLE, len(numbers))
    mixed = np.zeros(len(numbers) - size + 1, np.uint64)
    for offset in range(size):
        mixed = mixed * np.uint64(0x100000001B3) + numbers[offset : offset + len(mixed)]
    return np.unique(mixed)


def _resemblance(first: np.ndarray, second: np.ndarray) -> float:
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / (len(first) + len(second) - shared)
