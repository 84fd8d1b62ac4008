"""Tokenises and packs a corpus of any size into shards, in parallel over processes and hosts.

The corpus is divided into units, each a run of files. A unit becomes one or more chunks of
documents, and a chunk becomes one shard for each split. What a chunk contains depends only on the
corpus and the options. So any number of processes and hosts write the same files, and an export
that was killed loses only unfinished chunks.
"""

import dataclasses
import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from cope_jax.corpora.export_sources import Source
from cope_jax.corpora.sentences_by_corpus import SPLITS
from cope_jax.corpora.shards import MANIFEST, Manifest, Shard, read_manifest
from cope_jax.corpora.text_units import Counts
from cope_jax.data.export_folder import (
    all_reports,
    check_claim,
    claim,
    discard,
    forget_missing,
    report_name,
    reports_of,
)
from cope_jax.data.shard_writer import SUMS, Chunk, Options, write_file
from cope_jax.errors import ConfigError, StorageError, bucket_error
from cope_jax.progress import Progress
from cope_jax.registry import check_at_least
from cope_jax.storage.bucket import Bucket
from cope_jax.storage.files import glob_in, in_bucket
from cope_jax.storage.locks import remove_abandoned
from cope_jax.tokenizers import loading
from cope_jax.tokenizers.tokenizer import Tokenizer


class _EmptySplitError(ConfigError):
    """All shards are there, but none of them for one of the splits."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of an export.

    Attributes:
      kind: "bpe", "words" or "bytes".
      path: the tokenizer to load; None learns one.
      size: the size of a learned vocabulary, as in `loading.train`.
      sample: number of characters of the training text to learn from, taken from all units.
    """

    kind: loading.Kind = "bpe"
    path: str | None = None
    size: int | None = None
    sample: int = 100_000_000

    def __post_init__(self):
        if self.kind == "bytes" and (self.path, self.size) != (None, None):
            raise ConfigError(
                "the tokenizer bytes has no vocabulary: set neither vocab nor vocab_size"
            )


def export(
    source: Source,
    out: epath.PathLike,
    vocabulary: Vocabulary,
    options: Options,
    *,
    host: tuple[int, int] = (0, 1),
    workers: int = 1,
) -> Manifest | None:
    """Writes the shards of a corpus, its tokenizer and its manifest.

    What an earlier call with the same arguments wrote is kept, and shards that are missing are
    written again. With `host=(i, n)`, the call writes only the units i, i + n, i + 2n, …; n hosts
    with different i write an entire corpus. The call that ends last writes the manifest.

    Returns:
      The manifest, or None if other parts have not ended.

    Raises:
      ConfigError: the folder contains another export, a document cannot be read, or a split has no
        document.
      StorageError: a disk is full.
    """
    if in_bucket(out):
        Bucket(os.fspath(out))  # an error says that the URL is wrong
    out = epath.Path(out)
    index, hosts = host
    if not 0 <= index < hosts:
        raise ConfigError(f"part {index} of {hosts} does not exist: choose from 0 to {hosts - 1}")
    check_at_least(1, "export", workers=workers)
    given = None if vocabulary.path is None else loading.load(vocabulary.kind, vocabulary.path)
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    identity = _identity(source, vocabulary, given, options)
    is_first = claim(out, identity)
    forget_missing(out, len(source.weights))
    remove_abandoned(out)
    if (out / MANIFEST).exists():
        return read_manifest(out)
    try:
        tokenizer = _tokenizer(source, out, vocabulary, given, identity)
        mine = range(index, len(source.weights), hosts)
        units = [unit for unit in mine if all_reports(out, unit) is None]
        job = _Job(vocabulary.kind, str(out / tokenizer.file), options, identity)
        _write_units(source, out, job, units, workers)
        reports = [all_reports(out, unit) for unit in range(len(source.weights))]
        if None in reports:
            return None
        chunks = [chunk for unit in reports for chunk in unit or ()]
        manifest = _manifest(
            source, tokenizer, vocabulary.kind, options, identity["source"], chunks
        )
        write_file(out, MANIFEST, manifest.text)
        return manifest
    except ConfigError as error:
        # No call can give the split a document, or nothing is there that a later one could use.
        if isinstance(error, _EmptySplitError) or (
            hosts == 1 and is_first and not glob_in(out / "parts", "*.json")
        ):
            discard(out, identity, is_new)
        raise
    finally:
        remove_abandoned(out)


def _identity(
    source: Source, vocabulary: Vocabulary, given: Tokenizer | None, options: Options
) -> dict[str, Any]:
    """Everything that decides the shards, as JSON."""
    vocabulary_of: dict[str, Any] = {
        "kind": vocabulary.kind,
        "size": vocabulary.size,
        "sample": vocabulary.sample,
    }
    if given is not None:
        digest = hashlib.sha256(given.text.encode()).hexdigest()
        vocabulary_of = {"kind": vocabulary.kind, "sha256": digest}
    return {"source": source.describe(), "vocabulary": vocabulary_of, **dataclasses.asdict(options)}


def _tokenizer(
    source: Source,
    out: epath.Path,
    vocabulary: Vocabulary,
    given: Tokenizer | None,
    identity: Mapping[str, Any],
) -> Tokenizer:
    """The tokenizer of an earlier call, or else the given or learned one, which is then kept."""
    kept = None if vocabulary.kind == "bytes" else loading.find(out)
    if given is not None:
        if kept is not None and not loading.same(kept, given):
            raise ConfigError(
                f"{out} contains an export with another tokenizer than {vocabulary.path}: choose another folder"
            )
        kept = given
    if kept is None:
        kept = loading.train(vocabulary.kind, _sample(source, vocabulary.sample), vocabulary.size)
    check_claim(out, identity)  # learning took a while
    if not (out / kept.file).exists():
        for name, text in loading.files(kept).items():
            write_file(out, name, text)
    # Read back, because every host and process uses the file.
    return kept if vocabulary.kind == "bytes" else loading.load(vocabulary.kind, out / kept.file)


def _sample(source: Source, characters: int) -> Iterator[str]:
    """Pieces of the training text, an equal number of characters from the start of each unit."""
    share = -(-characters // len(source.training_units))
    for unit in source.training_units:
        room, split = share, ""
        for named, piece, _ in source.read(unit):
            split = named or split
            if room <= 0:
                break
            if split == "train":
                yield piece.text[:room]
                room -= len(piece.text)


def _write_units(
    source: Source, out: epath.Path, job: "_Job", units: list[int], workers: int
) -> None:
    if not units:
        return
    (out / "parts").mkdir(exist_ok=True)
    tokens = 0

    def show_progress(amount: float, more: int) -> None:
        nonlocal tokens
        tokens += more
        progress.advance(amount, f"{tokens / 1e6:,.1f} M tokens")

    with Progress(sum(source.weights[unit] for unit in units), label="export") as progress:
        if min(workers, len(units)) == 1:
            tokenizer = job.tokenizer()
            for unit in units:
                _write_unit(source, out, tokenizer, job, unit, show_progress)
        else:
            _in_parallel(source, out, job, units, min(workers, len(units)), show_progress)


@dataclasses.dataclass(frozen=True)
class _Job:
    """Arguments of a process, which loads the tokenizer from the folder, as every host does."""

    kind: loading.Kind
    path: str
    options: Options
    identity: Mapping[str, Any]

    def tokenizer(self) -> Tokenizer:
        return loading.load(self.kind, self.path)


def _in_parallel(
    source: Source,
    out: epath.Path,
    job: _Job,
    units: list[int],
    workers: int,
    show_progress: Callable[[float, int], None],
) -> None:
    context = multiprocessing.get_context("spawn")
    next_unit, messages = context.Value("q", 0), context.SimpleQueue()
    arguments = (source, str(out), job, units, next_unit, messages, os.getpid())
    processes = [context.Process(target=_work, args=arguments, daemon=True) for _ in range(workers)]
    try:
        for process in processes:
            process.start()
        while True:
            # Asked before the last messages are read.
            ended = all(process.exitcode is not None for process in processes)
            while not messages.empty():
                message = messages.get()
                if isinstance(message, Exception):
                    raise message
                show_progress(*message)
            if any((process.exitcode or 0) < 0 for process in processes):
                raise StorageError(
                    "a process of the export was killed: rerun the command, with fewer --workers"
                )
            if any(process.exitcode for process in processes):
                raise RuntimeError("a process of the export failed, as it has printed")
            if ended:
                return
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.pid is not None:  # it was started
                process.kill()
                process.join()  # so that its unfinished files are abandoned


def _work(
    source: Source,
    out: str,
    job: _Job,
    units: list[int],
    next_unit: Any,
    messages: Any,
    parent: int,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already

    def show_progress(amount: float, tokens: int) -> None:
        if os.getppid() != parent:  # the command was killed
            os._exit(1)
        messages.put((amount, tokens))

    try:
        tokenizer = job.tokenizer()
        while True:
            with next_unit:
                number = next_unit.value
                next_unit.value += 1
            if number >= len(units):
                return
            _write_unit(source, epath.Path(out), tokenizer, job, units[number], show_progress)
    except Exception as error:
        clear = bucket_error(error) or error
        if not isinstance(clear, ConfigError | OSError):  # others may not be sent
            raise
        messages.put(clear)


def _write_unit(
    source: Source,
    out: epath.Path,
    tokenizer: Tokenizer,
    job: _Job,
    unit: int,
    show_progress: Callable[[float, int], None],
) -> None:
    """Writes the chunks of a unit that are missing."""
    ended = reports_of(out, unit)
    skipped = sum(report["pieces"] for report in ended)
    chunk, split, before, pieces = Chunk(tokenizer), "train", 0.0, 0
    number = len(ended)

    def joins(left: str, right: str) -> bool:
        return np.array_equal(
            tokenizer.encode([left + right])[0], np.concatenate(tokenizer.encode([left, right]))
        )

    def finish(last: bool) -> None:
        nonlocal chunk, number
        name = f"{unit:05}-{number:05}"
        report = {"pieces": chunk.pieces, "last": last, **chunk.write(out, name, job.options)}
        check_claim(out, job.identity)
        write_file(out, report_name(unit, number), json.dumps(report) + "\n")
        chunk, number = Chunk(tokenizer), number + 1

    for named, piece, share in source.read(unit, None if tokenizer.divides else joins):
        begins, split = named is not None, named or split
        pieces += 1
        if pieces <= skipped:
            continue
        encoded = chunk.add(split, piece.text, begins)
        if encoded:
            show_progress((share - before) * source.weights[unit], encoded)
            before = share
        if chunk.tokens >= job.options.shard_tokens:
            finish(last=False)
    finish(last=True)
    show_progress((1 - before) * source.weights[unit], 0)


def _manifest(
    source: Source,
    tokenizer: Tokenizer,
    kind: loading.Kind,
    options: Options,
    described: Mapping[str, Any],
    chunks: Sequence[Mapping[str, Any]],
) -> Manifest:
    shards = [Shard(**shard) for chunk in chunks for shard in chunk["shards"]]
    sums = {
        split: {
            name: sum(chunk["sums"][split].get(name, 0) for chunk in chunks)
            for name in ("tokens", *SUMS)
        }
        for split in SPLITS
    }
    for split in SPLITS:
        if not any(shard.split == split for shard in shards):
            more = source.more if split == "train" else f"{source.more}, or raise held_out"
            raise _EmptySplitError(f"the split {split!r} has no document: {more}")
    return Manifest(
        length=options.length,
        packing=options.packing,
        tokenizer=kind,
        vocab_size=len(tokenizer),
        tokenizer_sha256=hashlib.sha256(tokenizer.text.encode()).hexdigest(),
        words=source.words,
        source=described,
        documents={split: counted.pop("documents") for split, counted in sums.items()},
        counts={split: Counts(**counted) for split, counted in sums.items()},
        shards=tuple(sorted(shards, key=lambda shard: (SPLITS.index(shard.split), shard.file))),
    )
