"""Reads a tokenised corpus from shards, files of packed examples with a manifest, also in a bucket.

A folder contains `manifest.json`, the tokenizer, and shards in the array_record format. A shard
holds the examples of one run of documents, which are packed by themselves; see
`cope_jax.corpora.packing`. `cope_jax.data.shard_export` writes such folders.

A record is one example: uint32 numbers, then tokens of 2 bytes if the vocabulary has at most 65,536
tokens, and else of 4 bytes, all little-endian. The numbers are P, the number of pieces; E, the
number of targets that do not count; the first entry of each piece in its shard; the size n of each
piece, plus 2³¹ if the piece begins a document; and the places of the E targets in the example. The
tokens are, for each piece, its n inputs and the target of the last input.
"""

import bisect
import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from cope_jax.corpora.packing import Packing, TokenStream, arrange
from cope_jax.corpora.text_units import Counts
from cope_jax.errors import ConfigError, StorageError, first_line
from cope_jax.registry import unknown
from cope_jax.storage.files import in_bucket, inside, read_object
from cope_jax.storage.locks import unfinished

MANIFEST = "manifest.json"
FORMAT = 1
_FIRST = 1 << 31  # added to the size of a piece that begins a document
_OPEN = 8  # shards that stay open besides those of a window


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of examples.

    Attributes:
      file: the name of the file in its folder.
      split: the split that the examples belong to.
      examples: number of examples.
      entries: number of tokens that are predicted, with the ends of documents.
      size: number of bytes of the file.
      sha256: digest of the file.
    """

    file: str
    split: str
    examples: int
    entries: int
    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a folder of shards.

    Attributes:
      length: L, the number of tokens of an example.
      packing: "stream" or "documents".
      tokenizer: the kind of the tokenizer: "bpe", "words" or "bytes".
      vocab_size: the number of tokens of the tokenizer.
      tokenizer_sha256: digest of the tokenizer's file.
      words: whether the text has an agreed division into words, so that perplexities per word can
        be compared.
      source: what the examples were made from.
      documents: number of documents of each split.
      counts: the `Counts` of each split.
      shards: all files, sorted by split and order.
    """

    length: int
    packing: Packing
    tokenizer: str
    vocab_size: int
    tokenizer_sha256: str
    words: bool
    source: Mapping[str, Any]
    documents: Mapping[str, int]
    counts: Mapping[str, Counts]
    shards: tuple[Shard, ...]

    @property
    def text(self) -> str:
        """The content of the file, with its digest."""
        content = self._content()
        return json.dumps({"digest": _digest(content), **content}, indent=1) + "\n"

    @functools.cached_property
    def digest(self) -> str:
        """The SHA-256 of everything else in the manifest. It identifies the examples."""
        return _digest(self._content())

    def _content(self) -> dict[str, Any]:
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        for counts in content["counts"].values():
            if not counts["changed"]:  # so that older manifests keep their digests
                del counts["changed"]
        return content


def read_manifest(folder: epath.PathLike) -> Manifest:
    """Reads the manifest of a folder of shards.

    Raises:
      ConfigError: there is no manifest, or it is damaged, was changed, or has another format.
    """
    path = epath.Path(folder) / MANIFEST
    export = "write it with `cope-jax export`"
    if not path.exists():
        begun = ""
        if (epath.Path(folder) / "export.json").exists():
            begun = " yet: run its export again, which continues"
        raise ConfigError(f"{folder} has no {MANIFEST}{begun or ': ' + export}")
    content = read_object(path, f"{export} again")
    digest = content.pop("digest", None)
    if content.get("format") != FORMAT:
        raise ConfigError(
            f"{path} has format {content.get('format')!r}, not {FORMAT}: {export} again"
        )
    if digest != _digest(content):
        raise ConfigError(
            f"{path} was changed after the export: restore the file, or delete it and run the export again"
        )
    del content["format"]
    try:
        content["counts"] = {split: Counts(**counts) for split, counts in content["counts"].items()}
        content["shards"] = tuple(Shard(**shard) for shard in content["shards"])
        return Manifest(**content)
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged ({first_line(error)}): {export} again") from error


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def token_type(vocab_size: int) -> np.dtype[Any]:
    """The type of a stored token."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def records(
    entries: TokenStream, length: int, packing: Packing, vocab_size: int, *, every: bool
) -> Iterator[bytes]:
    """Cuts a stream into examples as `Packed` does, and writes each as a record."""
    pieces, rows = arrange(entries, length, packing)
    dtype = token_type(vocab_size)
    first = set(entries.bounds.tolist() if packing == "documents" else [0])
    for begin, end in itertools.pairwise(rows.tolist()):
        starts, sizes = pieces.starts[begin:end], pieces.sizes[begin:end]
        pairs = zip(starts.tolist(), sizes.tolist(), strict=True)
        spans = [range(start, start + size) for start, size in pairs]
        counted = np.concatenate([entries.counted[span.start : span.stop] for span in spans])
        idle = np.array([], np.int64) if every else np.flatnonzero(~counted)
        flags = np.array([_FIRST * (span.start in first) for span in spans])
        numbers = np.concatenate([[len(spans), len(idle)], starts, sizes + flags, idle])
        tokens = np.concatenate([entries.tokens[span.start : span.stop + 1] for span in spans])
        yield numbers.astype("<u4").tobytes() + tokens.astype(dtype).tobytes()


@dataclasses.dataclass(frozen=True)
class Example:
    """A decoded record: see the module. Fields after the second are `[P]`, and `idle` is `[E]`."""

    tokens: np.ndarray
    idle: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    first: np.ndarray

    @classmethod
    def decode(cls, record: bytes, dtype: np.dtype[Any]) -> "Example":
        """Reads a record."""
        pieces, idle = (int(number) for number in np.frombuffer(record, "<u4", 2))
        numbers = np.frombuffer(record, "<u4", 2 + 2 * pieces + idle).astype(np.int64)
        starts, sizes, places = np.split(numbers[2:], [pieces, 2 * pieces])
        tokens = np.frombuffer(record, dtype, offset=4 * len(numbers)).astype(np.int32)
        return cls(tokens, places, starts, sizes & (_FIRST - 1), sizes >= _FIRST)

    def fields(self, length: int) -> dict[str, np.ndarray]:
        """The fields of the example, as `Packed.take` gives them for "documents", each `[L]`."""
        used = int(self.sizes.sum())
        numbers = np.repeat(np.arange(len(self.sizes)), self.sizes)
        places = np.arange(used) + numbers  # each earlier piece has one token more than inputs
        names = ("inputs", "targets", "segments", "positions")
        fields = {name: np.zeros(length, np.int32) for name in names}
        fields["inputs"][:used] = self.tokens[places]
        fields["targets"][:used] = self.tokens[places + 1]
        fields["segments"][:used] = numbers + 1
        starts = np.cumsum(self.sizes) - self.sizes
        fields["positions"][:used] = np.arange(used) - np.repeat(starts, self.sizes)
        weights = np.zeros(length, np.float32)
        weights[:used] = 1
        weights[self.idle] = 0
        return {**fields, "weights": weights}


class Shards:
    """The examples of a folder of shards, read one by one. The folder may be in a bucket.

    A shard is opened when its first example is needed, and checked against the manifest. A shard in
    a bucket is then copied to the temporary folder of this machine; the copy vanishes with the
    process. As many shards stay open as a window of examples, which are read in random order, may
    lie in.

    Raises:
      ConfigError: the manifest is missing or damaged.
    """

    def __init__(self, folder: epath.PathLike, window: int = 1):
        self.folder = epath.Path(folder)
        self.manifest = read_manifest(folder)
        self._dtype = token_type(self.manifest.vocab_size)
        self._lock = threading.Lock()
        self._readers: collections.OrderedDict[str, Any] = collections.OrderedDict()
        self._checked: set[str] = set()
        self._of: dict[str, list[Shard]] = {}
        for shard in self.manifest.shards:
            self._of.setdefault(shard.split, []).append(shard)
        self._ends = {
            split: list(itertools.accumulate(shard.examples for shard in shards))
            for split, shards in self._of.items()
        }
        sizes = sorted(shard.examples for shard in self.manifest.shards if shard.split == "train")
        # A window, and the beginning of the next one, which is read ahead.
        ends = list(itertools.accumulate(sizes))
        self._open_shards = _OPEN + bisect.bisect_left(ends, window) + 1

    def size(self, split: str) -> int:
        """The number of examples of a split. Raises ConfigError if there is no such split."""
        if split not in self._ends:
            raise unknown(f"split of {self.folder}", split, sorted(self._ends))
        return self._ends[split][-1]

    def ranges(self, split: str) -> list[range]:
        """The indices of the examples of each shard."""
        self.size(split)
        return [range(*ends) for ends in itertools.pairwise([0, *self._ends[split]])]

    def take(self, split: str, index: int) -> dict[str, np.ndarray]:
        """The fields of an example, each `[L]`: see `Example.fields`.

        Raises:
          ConfigError: there is no such example, or its shard is missing, damaged, or not of this
            manifest.
        """
        if not 0 <= index < self.size(split):
            raise ConfigError(
                f"there is no example {index}: give an index of at least 0 and less than {self.size(split)}"
            )
        number = bisect.bisect_right(self._ends[split], index)
        shard = self._of[split][number]
        within = index - self._ends[split][number] + shard.examples
        return self._read(shard, [within])[0].fields(self.manifest.length)

    def stream(self, shard: Shard) -> TokenStream:
        """The text of a shard. `bounds` are those of documents, or of the stream."""
        tokens = np.zeros(shard.entries + 1, np.int32)
        counted = np.ones(shard.entries, bool)
        bounds = [0]
        for example in self._read(shard, range(shard.examples)):
            begin = 0
            for start, size, first in zip(
                example.starts, example.sizes, example.first, strict=True
            ):
                tokens[start : start + size + 1] = example.tokens[begin : begin + size + 1]
                begin += size + 1
                bounds += [int(start)] if first and start else []
            pairs = zip(example.starts, example.sizes, strict=True)
            places = np.concatenate([np.arange(start, start + size) for start, size in pairs])
            counted[places[example.idle]] = False
        return TokenStream(tokens, np.array([*sorted(bounds), shard.entries]), counted)

    def of(self, split: str) -> Sequence[Shard]:
        """The shards of a split. Raises ConfigError if there is no such split."""
        self.size(split)
        return self._of[split]

    def _read(self, shard: Shard, indices: Sequence[int]) -> list[Example]:
        reader = self._reader(shard)
        try:
            return [Example.decode(record, self._dtype) for record in reader.read([*indices])]
        except (RuntimeError, ValueError, IndexError) as error:  # what array_record raises
            raise ConfigError(
                f"{self.folder / shard.file} is damaged ({first_line(error)}): delete it and run the export again"
            ) from error

    def _reader(self, shard: Shard) -> Any:
        with self._lock:
            reader = self._readers.pop(shard.file, None)
            self._readers[shard.file] = self._open(shard) if reader is None else reader
            while len(self._readers) > self._open_shards:
                self._readers.popitem(last=False)
            return self._readers[shard.file]

    def _open(self, shard: Shard) -> Any:
        from array_record.python.array_record_module import ArrayRecordReader

        path = inside(self.folder, shard.file, links=True)
        options = "readahead_buffer_size:0"  # because examples are read in random order
        try:
            if path.stat().length != shard.size:
                raise ConfigError(
                    f"{path} has {path.stat().length} bytes, not {shard.size}: run the export again"
                )
            if in_bucket(path):
                with unfinished() as copies:
                    copy = copies / os.path.basename(shard.file)
                    path.copy(copy)
                    self._check(copy, shard)
                    return ArrayRecordReader(str(copy), options)  # an open file outlives its name
            if shard.file not in self._checked:
                self._check(Path(path), shard)
                self._checked.add(shard.file)
            return ArrayRecordReader(str(path), options)
        except FileNotFoundError as error:
            raise ConfigError(f"{path} is missing: run the export again") from error
        except OSError as error:
            raise StorageError(
                f"cannot read {path} ({first_line(error)}): rerun the command later"
            ) from error

    def _check(self, copy: Path, shard: Shard) -> None:
        if file_digest(copy) != shard.sha256:
            raise ConfigError(
                f"{self.folder / shard.file} was changed or damaged: delete it and run the export again"
            )
