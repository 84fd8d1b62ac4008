"""Reads documents of any size piece by piece: text, JSON lines and Parquet, also in buckets."""

import codecs
import contextlib
import dataclasses
import glob
import gzip
import hashlib
import io
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, Literal, NamedTuple

from etils import epath

from cope_jax.errors import ConfigError, StorageError, first_line
from cope_jax.storage.files import in_bucket, parse_json

PIECE = 1 << 20
"""The number of characters after which a document of plain text is cut between words."""
_LONGEST = 1 << 26
"""The most characters of a line, to limit memory: longer text is cut, longer records are wrong."""
_WHOLE, _AFTER = 1 << 23, 1 << 10
"""The most characters of a document that is not cut, and of those read to check a cut."""

_CUT = re.compile(r"(?<=\S)(?:\r?\n(?=\S)|(?= \S))")
"""A line end or space between words. Tokenizers join white space, and a space to the next word."""

_DAMAGED_ZSTD = re.compile("(ZSTD|Truncated compressed) ")  # pyarrow raises OSError

_ONE_A_LINE = "write one object in each line, as `jq -c '.[]'` does with an array"

Division = Literal["file", "line", "paragraph"]
"""The unit of plain text that is one document."""
Joins = Callable[[str, str], bool]
"""Tells if the tokens of two texts, one after the other, are the tokens of both together."""


class Piece(NamedTuple):
    """A part of a document, or all of it.

    Attributes:
      text: never empty.
      key: what decides the split of the document: its text, or its path if the document is a file.
        "" in all pieces of a document except the first.
    """

    text: str
    key: str


@dataclasses.dataclass(frozen=True)
class InputFile:
    """A file of documents: its full path, its path for messages and keys, and its size in bytes."""

    path: str
    name: str
    size: int

    def mark(self) -> str:
        """A digest of the first and the last 64 KiB. An edit between them is not seen."""
        with _clear_errors(self.path), epath.Path(self.path).open("rb") as file:
            first = file.read(1 << 16)
            file.seek(max(0, self.size - (1 << 16)))
            return hashlib.sha256(first + file.read(1 << 16)).hexdigest()


def find(patterns: Sequence[str]) -> list[InputFile]:
    """Finds the files that match any of the patterns, each once, sorted by path.

    A pattern is a path or a glob, such as `gs://bucket/web/*.parquet` or `data/**/*.jsonl.gz`.

    Raises:
      ConfigError: a pattern matches no file, a pattern is not a glob, or the format of a file is
        unknown.
    """
    files: dict[str, InputFile] = {}
    for pattern in patterns:
        root, below = rooted(pattern)
        try:
            paths = [path for path in root.glob(below or "*") if path.is_file()]
        except (
            ValueError,
            NotImplementedError,
        ) as error:  # from pathlib: a wrong pattern, or an absolute one
            raise ConfigError(
                f"{pattern!r} is not a glob ({error}): write one like 'data/**/*.jsonl.gz'"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"cannot list {root} ({first_line(error)}): check the path and the credentials"
            ) from error
        if not paths:
            more = "correct the pattern"
            if (root / below).is_dir():
                more = f"it is a folder, write '{pattern}/*.jsonl'"
            raise ConfigError(f"no file matches {pattern!r}: {more}")
        for path in paths:
            _format(path.name)
            full = os.fspath(path)
            name = full.removeprefix(f"{os.fspath(root).rstrip('/')}/")
            files[full] = InputFile(full, name, epath.Path(full).stat().length)
    return [files[path] for path in sorted(files)]


def pieces(
    file: InputFile, field: str = "text", division: Division = "file", *, joins: Joins | None = None
) -> Iterator[tuple[Piece, float]]:
    """The documents of a file, in nonempty pieces, each with the share of the file that is read.

    A line of a `.jsonl` file, or a row of a `.parquet` file, is one document; its text is in
    `field`. Of plain text, the file is one document, or each line or paragraph that is not blank,
    without its last line end. The names may end in `.gz` or `.zst`. A file of plain text is cut
    after single line ends, or before single spaces. `joins` says of the two sides of a cut whether
    their tokens are those of the text; if it is None, they always are.

    Raises:
      ConfigError: the file is missing or damaged, a line is not UTF-8 or not a record, a document
        is too long, or a package is not installed.
      StorageError: a bucket cannot be read now.
    """
    reader = _format(file.name)
    with _clear_errors(file.path), contextlib.ExitStack() as stack:
        raw: Any = stack.enter_context(epath.Path(file.path).open("rb"))
        for piece in reader(_unpacked(raw, file, stack), file, field, division, joins):
            yield piece, min(1.0, raw.tell() / max(1, file.size))


@contextlib.contextmanager
def _clear_errors(path: str) -> Iterator[None]:
    """Turns errors of reading a file into a ConfigError, or of a bucket into a StorageError."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        damaged = isinstance(error, gzip.BadGzipFile) or _DAMAGED_ZSTD.match(str(error))
        if in_bucket(path) and isinstance(error, OSError) and not damaged:
            raise StorageError(
                f"cannot read {path} ({first_line(error)}): rerun the command later"
            ) from error
        raise ConfigError(f"cannot read {path} ({first_line(error)}): fetch it again") from error


def _format(name: str) -> Callable[..., Iterator[Piece]]:
    plain = name.removesuffix(".gz").removesuffix(".zst")
    if plain.endswith(".parquet") and plain != name:
        raise ConfigError(
            f"{name} is packed twice, because Parquet is compressed itself: unpack it"
        )
    for ends, reader in (
        (".jsonl", _records),
        (".json", _records),
        (".parquet", _rows),
        ("", _prose),
    ):
        if plain.endswith(ends) and (ends or plain.rpartition(".")[2] in ("txt", "py", "md")):
            return reader
    raise ConfigError(
        f"{name} has no known format: give files of .txt, .md, .py, .jsonl or .parquet"
    )


def _unpacked(raw: Any, file: InputFile, stack: contextlib.ExitStack) -> BinaryIO:
    if file.name.endswith(".gz"):
        return io.BufferedReader(stack.enter_context(gzip.open(raw)))
    if file.name.endswith(".zst"):
        return io.BufferedReader(_package("pyarrow", file).CompressedInputStream(raw, "zstd"))
    return raw


def is_prose(name: str) -> bool:
    """True for a file of plain text, False for a file of records."""
    return _format(name) is _prose


def _prose(
    stream: BinaryIO, file: InputFile, field: str, division: Division, joins: Joins | None
) -> Iterator[Piece]:
    if division != "file":
        yield from _divided(stream, file, division)
        return
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    key, kept, lines, last = file.name, "", 0, False
    while not last:
        raw = stream.read(PIECE)
        last = not raw
        try:
            kept += decoder.decode(raw, final=last)
        except UnicodeDecodeError as error:
            line = lines + kept.count("\n") + error.object[: error.start].count(b"\n") + 1
            raise ConfigError(
                f"{file.path}, line {line} is not UTF-8 text: convert the file to UTF-8"
            ) from error
        cuts = (
            []
            if last
            else [cut.end() for cut in _CUT.finditer(kept, max(0, len(kept) - 2 * PIECE))]
        )
        if joins is not None:  # a cut is tried with the text after it
            cuts = [cut for cut in cuts if cut <= len(kept) - _AFTER][-1:]
            sides = ((_unix(kept[:cut]), _unix(kept[cut : cut + _AFTER])) for cut in cuts)
            pairs = zip(cuts, sides, strict=True)
            cuts = [cut for cut, (left, right) in pairs if joins(left, right)]
            if not cuts and len(kept) > _WHOLE:
                raise ConfigError(
                    f"{file.path} has {_WHOLE:,} characters that this tokenizer reads at once, which fills the memory: "
                    "set --split_documents=paragraph or line"
                )
        end = len(kept) if last or len(kept) > _LONGEST else cuts[-1] if cuts else 0
        if end:
            lines += kept.count("\n", 0, end)
            yield Piece(_unix(kept[:end]), key)
            kept, key = kept[end:], ""


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n")


def _divided(stream: BinaryIO, file: InputFile, division: Division) -> Iterator[Piece]:
    lines: list[str] = []
    number = size = 0
    raw = b"\n"
    while raw:
        raw = stream.readline(_LONGEST)
        number += 1
        size += len(raw)
        if size >= _LONGEST:
            raise ConfigError(
                f"{file.path}, line {number} ends a {division} of {size:,} bytes or more: shorten it"
            )
        text = _decoded(raw, file, number).removesuffix("\n").removesuffix("\r")
        if text.strip():
            lines.append(text)
        if not text.strip() or division == "line":
            if lines:
                document = "\n".join(lines)
                yield Piece(document, document)
            lines, size = [], 0


def _records(stream: BinaryIO, file: InputFile, field: str, *_: object) -> Iterator[Piece]:
    for line, raw in enumerate(iter(lambda: stream.readline(_LONGEST), b""), start=1):
        if not raw.strip():
            continue
        where = f"{file.path}, line {line}"
        if len(raw) == _LONGEST and not raw.endswith(b"\n"):
            raise ConfigError(f"{where} has at least {_LONGEST:,} bytes: shorten the document")
        text = _decoded(raw, file, line)
        if line == 1 and text.strip() in ("[", "{"):
            raise ConfigError(f"{where} begins a JSON value of several lines: {_ONE_A_LINE}")
        try:
            record = parse_json(text)
        except ValueError as error:
            raise ConfigError(
                f"{where} is not a JSON record ({first_line(error)}): repair the file"
            ) from error
        if not isinstance(record, dict):
            raise ConfigError(f"{where} is {_kind(record)}, not a JSON object: {_ONE_A_LINE}")
        if field not in record:
            names = ", ".join(record) or "none"
            raise ConfigError(
                f"{where} has no field {field!r}: set --text_field to one of its fields ({names})"
            )
        yield from _document(record[field], where, field)


def _rows(stream: BinaryIO, file: InputFile, field: str, *_: object) -> Iterator[Piece]:
    _package("pyarrow", file)
    import pyarrow
    from pyarrow import parquet

    try:
        # Without this size, a whole column of a row group is read.
        table = parquet.ParquetFile(stream, buffer_size=1 << 20)
        if field not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            raise ConfigError(
                f"{file.path} has no column {field!r}: set --text_field to one of {names}"
            )
        row = 0
        for batch in table.iter_batches(batch_size=256, columns=[field], use_threads=False):
            for value in batch.column(0):
                row += 1
                yield from _document(value.as_py(), f"{file.path}, row {row}", field)
    except pyarrow.ArrowException as error:
        raise ConfigError(
            f"{file.path} is not a complete Parquet file ({first_line(error)}): fetch it again"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file.path}, row {row}, is not UTF-8 text: convert the column"
        ) from error


def _document(text: Any, where: str, field: str) -> Iterator[Piece]:
    if not isinstance(text, str):
        mend = {
            type(None): "remove the record, or write a text",
            bytes: "store the column as strings",
        }
        other = "store one text there, or set --text_field to the text's field"
        raise ConfigError(
            f"{where} has {_kind(text)} in {field!r}, not text: {mend.get(type(text), other)}"
        )
    if text:  # half of a character, as JSON can write it, has no bytes
        yield Piece(text.encode("utf-8", "replace").decode(), text)


def _kind(value: Any) -> str:
    kinds = {type(None): "null", list: "a list", dict: "an object", str: "a string"}
    kinds[bool] = "a truth value"
    other = f"a number ({value})" if isinstance(value, int | float) else type(value).__name__
    return kinds.get(type(value), other)


def rooted(pattern: str) -> tuple[Any, str]:
    """The folder where a glob starts, and the rest of the glob."""
    fixed = pattern[
        : min((pattern.find(sign) for sign in "*?[" if sign in pattern), default=len(pattern))
    ]
    root = fixed.rpartition("/")[0]
    below = pattern[len(root) :].lstrip("/")
    if in_bucket(pattern):
        return epath.Path(root), below
    # epath has no glob of several levels.
    folder = pathlib.Path(root or ("/" if fixed.startswith("/") else "."))
    # Its name only looks like a pattern.
    while "/" in below and os.path.isdir(folder / below.partition("/")[0]):
        folder = folder / below.partition("/")[0]
        below = below.partition("/")[2].lstrip("/")
    return folder, glob.escape(below) if os.path.isfile(folder / below) else below


def _decoded(raw: bytes, file: InputFile, line: int) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file.path}, line {line} is not UTF-8 text: convert the file to UTF-8"
        ) from error
    return text.removeprefix("\ufeff") if line == 1 else text


def _package(name: str, file: InputFile) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise ConfigError(
            f"reading {file.path} needs {name}: pip install 'cope-jax[documents]'"
        ) from error


def share_of(key: str) -> float:
    """A number of at least 0 and less than 1 that depends on `key` alone, and is uniform over keys.

    >>> round(share_of("a document"), 4)
    0.4873
    """
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def split_of(key: str, held_out: float) -> str:
    """The split of a document; validation and the test have the share `held_out` each."""
    share = share_of(key)
    return "validation" if share < held_out else "test" if share < 2 * held_out else "train"
