"""Tokenises a run of documents and writes it as shards, one for each split."""

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from etils import epath

from cope_jax.corpora.packing import Packing, join
from cope_jax.corpora.sentences_by_corpus import SPLITS
from cope_jax.corpora.shards import Shard, file_digest, records
from cope_jax.errors import ConfigError, clear_storage_errors
from cope_jax.registry import check_at_least
from cope_jax.storage.files import in_bucket
from cope_jax.storage.locks import unfinished
from cope_jax.tokenizers.tokenizer import Tokenizer

SUMS = ("documents", "words", "bytes", "unknown", "changed")
"""Counts of the texts of each split, in addition to tokens."""

_BATCH = 1 << 20  # characters that are tokenised at a time


@dataclasses.dataclass(frozen=True)
class Options:
    """Options that decide the shards, with the text and the tokenizer.

    Attributes:
      length: L, the number of tokens of an example.
      packing: "stream" or "documents": see `cope_jax.corpora.packing`.
      shard_tokens: the number of tokens after which a chunk ends. It bounds the memory of a
        process.
    """

    length: int = 1024
    packing: Packing = "stream"
    shard_tokens: int = 1 << 22

    def __post_init__(self):
        check_at_least(1, "export", length=self.length, shard_tokens=self.shard_tokens)
        if self.packing not in ("stream", "documents"):
            raise ConfigError(f"unknown packing {self.packing!r}: choose stream or documents")
        if self.shard_tokens > 1 << 28:
            raise ConfigError(
                f"shard_tokens must be at most {1 << 28}, because a shard is held in memory"
            )


class Chunk:
    """A run of documents: their tokens, by split."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokens = self.pieces = 0
        self._tokenizer = tokenizer
        self._waiting: list[tuple[str, str, bool]] = []
        self._room = _BATCH
        self._documents: dict[str, list[list[np.ndarray]]] = {split: [] for split in SPLITS}
        self._sums = {split: dict.fromkeys(SUMS, 0) for split in SPLITS}

    def add(self, split: str, text: str, begins: bool) -> int:
        """Adds a piece; returns the number of newly encoded tokens, which is often 0."""
        self._waiting.append((split, text, begins))
        self._room -= len(text)
        self.pieces += 1
        return self._encode() if self._room <= 0 else 0

    def _encode(self) -> int:
        before = self.tokens
        encoded = self._tokenizer.encode([text for _, text, _ in self._waiting])
        for (split, text, begins), tokens in zip(self._waiting, encoded, strict=True):
            documents, sums = self._documents[split], self._sums[split]
            # A document that is longer than a chunk continues as another document.
            if begins or not documents:
                documents.append([])
            documents[-1].append(tokens)
            self.tokens += len(tokens)
            sums["documents"] += begins
            sums["words"] += len(text.split()) + text.count("\n")
            sums["bytes"] += len(text.encode("utf-8", "ignore"))
            unknown, changed = self._tokenizer.lost(text, tokens)
            # A decoder may take the space of a piece for one that was added to a text.
            if changed and not begins:
                unknown, changed = self._tokenizer.lost(text.removeprefix(" "), tokens)
            sums["unknown"] += unknown
            sums["changed"] += changed
        self._waiting, self._room = [], _BATCH
        return self.tokens - before

    def write(self, out: epath.Path, name: str, options: Options) -> dict[str, Any]:
        """Writes a shard of each split with documents. Returns the chunk's report, as JSON."""
        self._encode()
        shards, sums = [], {}
        for split, documents in self._documents.items():
            entries = join((np.concatenate(parts) for parts in documents), self._tokenizer.end)
            documents.clear()
            sums[split] = {"tokens": int(entries.counted.sum()), **self._sums[split]}
            if len(entries):
                size, every = len(self._tokenizer), split == "train"
                made = records(entries, options.length, options.packing, size, every=every)
                shard = _write_shard(out, f"{split}-{name}", split, made, len(entries))
                shards.append(dataclasses.asdict(shard))
        return {"shards": shards, "sums": sums}


def _write_shard(
    out: epath.Path, name: str, split: str, made: Iterable[bytes], entries: int
) -> Shard:
    from array_record.python.array_record_module import ArrayRecordWriter

    file, examples = f"{name}.array_record", 0
    with clear_storage_errors(out), unfinished(out) as folder:
        partial = folder / file
        writer = ArrayRecordWriter(str(partial), "group_size:8")
        for record in made:
            writer.write(record)
            examples += 1
        writer.close()
        shard = Shard(file, split, examples, entries, partial.stat().st_size, file_digest(partial))
        if in_bucket(out):
            epath.Path(partial).copy(out / file, overwrite=True)
        else:
            partial.replace(os.fspath(out / file))
    return shard


def write_file(out: epath.Path, name: str, text: str) -> None:
    """Writes a small file of an export whole: a bucket does so itself."""
    if in_bucket(out):
        (out / name).write_text(text)
        return
    with unfinished(out) as folder:
        partial = folder / "file"
        partial.write_text(text, encoding="utf-8")
        partial.replace(os.fspath(out / name))
