"""Tokenises and packs a corpus of any size into shards, in parallel over processes and hosts.

The corpus is divided into units, each a run of files. A unit becomes one or more chunks of documents, and a chunk
becomes one shard for each split. What a chunk contains depends only on the corpus and the options. So any number of
processes and hosts write the same files, and an export that was killed loses only unfinished chunks.
"""

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from cope_jax.buckets import Bucket
from cope_jax.corpora.export_sources import Source
from cope_jax.corpora.sentences_by_corpus import SPLITS
from cope_jax.corpora.shards import MANIFEST, Manifest, Shard, read_manifest
from cope_jax.corpora.text_units import Counts
from cope_jax.data.shard_writer import PARTIAL, Chunk, Options, write_file
from cope_jax.errors import ConfigError, StorageError, bucket_error, first_line
from cope_jax.files import glob_in, in_bucket, inside, parse_json, read_text
from cope_jax.progress import Progress
from cope_jax.registry import check_at_least
from cope_jax.tokenizers import loading
from cope_jax.tokenizers.byte_level import BPE
from cope_jax.tokenizers.tokenizer import Tokenizer
from cope_jax.tokenizers.word_level import Words

_IDENTITY = "export.json"
_ABANDONED = 3600.0  # seconds after which nobody writes an unfinished file any more


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
            raise ConfigError("the tokenizer bytes has no vocabulary: set neither vocab nor vocab_size")


def export(
    source: Source,
    out: epath.PathLike,
    vocabulary: Vocabulary,
    options: Options,
    *,
    part: tuple[int, int] = (0, 1),
    workers: int = 1,
) -> Manifest | None:
    """Writes the shards of a corpus, its tokenizer and its manifest.

    What an earlier call with the same arguments wrote is kept, and shards that are missing are written again. With
    `part=(i, n)`, the call writes only the units i, i + n, i + 2n, …; n hosts with different i write an entire corpus.
    The call that ends last writes the manifest.

    Returns:
      The manifest, or None if other parts have not ended.

    Raises:
      ConfigError: the folder contains another export, a document cannot be read, or a split has no document.
      StorageError: a disk is full.
    """
    if in_bucket(out):
        Bucket(os.fspath(out))  # an error says that the URL is wrong
    out = epath.Path(out)
    index, parts = part
    if not 0 <= index < parts:
        raise ConfigError(f"part {index} of {parts} does not exist: choose from 0 to {parts - 1}")
    check_at_least(1, "export", workers=workers)
    given = None if vocabulary.path is None else loading.load(vocabulary.kind, vocabulary.path)
    out.mkdir(parents=True, exist_ok=True)
    identity = _claim(source, out, vocabulary, given, options)
    _forget_missing(out, len(source.weights))
    if (out / MANIFEST).exists():
        return read_manifest(out)
    tokenizer = _tokenizer(source, out, vocabulary, given, identity)
    units = [unit for unit in range(index, len(source.weights), parts) if _chunks(out, unit) is None]
    _write_units(source, out, _Job(vocabulary.kind, str(out / tokenizer.file), options, identity), units, workers)
    found = [_chunks(out, unit) for unit in range(len(source.weights))]
    if None in found:
        return None
    chunks = [chunk for unit in found for chunk in unit or ()]
    manifest = _manifest(source, tokenizer, vocabulary.kind, options, identity["source"], chunks)
    write_file(out / MANIFEST, manifest.text)
    for folder in (out, out / "parts"):
        for left in glob_in(folder, f"{PARTIAL}*"):
            with contextlib.suppress(FileNotFoundError):  # another host has ended
                if time.time() - left.stat().mtime > _ABANDONED:  # by a call that was killed
                    left.rmtree(missing_ok=True)
    return manifest


def _claim(
    source: Source, out: epath.Path, vocabulary: Vocabulary, given: Tokenizer | None, options: Options
) -> dict[str, Any]:
    """Writes what the export is, or compares it with what an earlier call wrote."""
    vocabulary_of: dict[str, Any] = {"kind": vocabulary.kind, "size": vocabulary.size, "sample": vocabulary.sample}
    if given is not None:
        vocabulary_of = {"kind": vocabulary.kind, "sha256": hashlib.sha256(given.text.encode()).hexdigest()}
    identity = {"source": source.describe(), "vocabulary": vocabulary_of, **dataclasses.asdict(options)}
    file = out / _IDENTITY
    if not file.exists():
        others = (path.name for path in glob_in(out, "*"))  # a bucket has no empty folder
        if any(name != _IDENTITY and not name.startswith(PARTIAL) for name in others):
            raise ConfigError(f"{out} contains other files: choose an empty folder")
        write_file(file, json.dumps(identity, indent=1) + "\n")
        return identity
    try:
        held = dict(parse_json(read_text(file)))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} is damaged ({first_line(error)}): choose an empty folder") from error
    if other := next((name for name in identity if held.get(name) != identity[name]), None):
        if glob_in(out / "parts", "*.json"):
            differs = _difference(other, held.get(other), identity[other])
            raise ConfigError(f"{out} contains an export with {differs}: delete the folder, or choose another")
        for name in (BPE.file, Words.file):  # learned for the earlier call, which has written no shard
            (out / name).unlink(missing_ok=True)
        write_file(file, json.dumps(identity, indent=1) + "\n")
    return identity


def _difference(name: str, held: Any, given: Any) -> str:
    """Names the first entry in which two settings differ."""
    if isinstance(held, dict) and isinstance(given, dict):
        name = next(entry for entry in {**held, **given} if held.get(entry) != given.get(entry))
        held, given = held.get(name), given.get(name)
    return f"another {name} ({held}, not {given})"


def _forget_missing(out: epath.Path, units: int) -> None:
    """Removes the reports of chunks whose shards are missing or too short, and of those after them in their unit."""
    for unit in range(units):
        reports = _ended(out, unit)
        whole = [all(_is_whole(out, shard) for shard in report["shards"]) for report in reports]
        for chunk in range(whole.index(False) if False in whole else len(whole), len(whole)):
            (out / MANIFEST).unlink(missing_ok=True)
            _report(out, unit, chunk).unlink(missing_ok=True)  # another host may do the same


def _is_whole(out: epath.Path, shard: Mapping[str, Any]) -> bool:
    path = inside(out, shard["file"], links=True)
    return path.exists() and path.stat().length == shard["size"]


def _check_claim(out: epath.Path, identity: Mapping[str, Any]) -> None:
    """Raises ConfigError if another host has begun another export in the folder."""
    if parse_json(read_text(out / _IDENTITY)) != identity:
        raise ConfigError(
            f"{out} contains another export by now: choose another folder, and the same flags on all hosts"
        )


def _tokenizer(
    source: Source, out: epath.Path, vocabulary: Vocabulary, given: Tokenizer | None, identity: Mapping[str, Any]
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
    _check_claim(out, identity)  # learning took a while
    if not (out / kept.file).exists():
        write_file(out / kept.file, kept.text)
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


def _chunks(out: epath.Path, unit: int) -> list[dict[str, Any]] | None:
    """The reports of the chunks of a unit, or None if the unit has not ended."""
    found = _ended(out, unit)
    return found if found and found[-1]["last"] else None


def _ended(out: epath.Path, unit: int) -> list[dict[str, Any]]:
    """The reports of all chunks of a unit that have ended."""
    found: list[dict[str, Any]] = []
    while (file := _report(out, unit, len(found))).exists():
        try:
            found.append(dict(parse_json(read_text(file))))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{file} is damaged ({first_line(error)}): delete it and rerun the command") from error
    return found


def _report(out: epath.Path, unit: int, chunk: int) -> epath.Path:
    return out / "parts" / f"{unit:05}-{chunk:05}.json"


def _write_units(source: Source, out: epath.Path, job: "_Job", units: list[int], workers: int) -> None:
    if not units:
        return
    (out / "parts").mkdir(exist_ok=True)
    tokens = 0

    def told(amount: float, more: int) -> None:
        nonlocal tokens
        tokens += more
        progress.advance(amount, f"{tokens / 1e6:,.1f} M tokens")

    with Progress(sum(source.weights[unit] for unit in units), label="export") as progress:
        if min(workers, len(units)) == 1:
            tokenizer = job.tokenizer()
            for unit in units:
                _write_unit(source, out, tokenizer, job, unit, told)
        else:
            _in_parallel(source, out, job, units, min(workers, len(units)), told)


@dataclasses.dataclass(frozen=True)
class _Job:
    """What a process needs besides the text. It loads the tokenizer from the folder, as every host does."""

    kind: loading.Kind
    path: str
    options: Options
    identity: Mapping[str, Any]

    def tokenizer(self) -> Tokenizer:
        return loading.load(self.kind, self.path)


def _in_parallel(
    source: Source, out: epath.Path, job: _Job, units: list[int], workers: int, told: Callable[[float, int], None]
) -> None:
    context = multiprocessing.get_context("spawn")
    place, messages = context.Value("q", 0), context.SimpleQueue()
    arguments = (source, str(out), job, units, place, messages, os.getpid())
    processes = [context.Process(target=_work, args=arguments, daemon=True) for _ in range(workers)]
    try:
        for process in processes:
            process.start()
        while True:
            ended = all(process.exitcode is not None for process in processes)  # before the last messages are read
            while not messages.empty():
                message = messages.get()
                if isinstance(message, Exception):
                    raise message
                told(*message)
            if any((process.exitcode or 0) < 0 for process in processes):
                raise StorageError("a process of the export was killed: rerun the command, with fewer --workers")
            if any(process.exitcode for process in processes):
                raise RuntimeError("a process of the export failed, as it has printed")
            if ended:
                return
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.pid is not None:  # it was started
                process.kill()


def _work(source: Source, out: str, job: _Job, units: list[int], place: Any, messages: Any, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already

    def told(amount: float, tokens: int) -> None:
        if os.getppid() != parent:  # the command was killed
            os._exit(1)
        messages.put((amount, tokens))

    try:
        tokenizer = job.tokenizer()
        while True:
            with place:
                number = place.value
                place.value += 1
            if number >= len(units):
                return
            _write_unit(source, epath.Path(out), tokenizer, job, units[number], told)
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
    told: Callable[[float, int], None],
) -> None:
    """Writes the chunks of a unit that are missing."""
    ended = _ended(out, unit)
    skipped = sum(report["pieces"] for report in ended)
    chunk, split, before, pieces = Chunk(tokenizer), "train", 0.0, 0
    number = len(ended)

    def finish(last: bool) -> None:
        nonlocal chunk, number
        name = f"{unit:05}-{number:05}"
        report = {"pieces": chunk.pieces, "last": last, **chunk.write(out, name, job.options)}
        _check_claim(out, job.identity)
        write_file(_report(out, unit, number), json.dumps(report) + "\n")
        chunk, number = Chunk(tokenizer), number + 1

    for named, piece, share in source.read(unit):
        begins, split = named is not None, named or split
        pieces += 1
        if pieces <= skipped:
            continue
        encoded = chunk.add(split, piece.text, begins)
        if encoded:
            told((share - before) * source.weights[unit], encoded)
            before = share
        if chunk.tokens >= job.options.shard_tokens:
            finish(last=False)
    finish(last=True)
    told((1 - before) * source.weights[unit], 0)


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
        split: {name: sum(chunk["sums"][split][name] for chunk in chunks) for name in chunks[0]["sums"][split]}
        for split in SPLITS
    }
    for split in SPLITS:
        if not any(shard.split == split for shard in shards):
            more = (
                "give more documents" if split == "train" else "delete the folder and raise held_out, such as to 0.05"
            )
            raise ConfigError(f"the split {split!r} has no document: {more}")
    return Manifest(
        length=options.length,
        packing=options.packing,
        tokenizer=kind,
        vocab_size=len(tokenizer),
        tokenizer_sha256=hashlib.sha256(tokenizer.text.encode()).hexdigest(),
        words=source.words,
        source=described,
        documents={split: found.pop("documents") for split, found in sums.items()},
        counts={split: Counts(**found) for split, found in sums.items()},
        shards=tuple(sorted(shards, key=lambda shard: (SPLITS.index(shard.split), shard.file))),
    )
