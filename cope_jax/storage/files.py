"""Reads files, plain or compressed; writes them whole or not at all; names safe paths."""

import contextlib
import glob
import grp
import gzip
import io
import json
import os
import pwd
import re
import secrets
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from etils import epath

from cope_jax.errors import ConfigError, clear_storage_errors
from cope_jax.storage.locks import open_lock, try_lock

_Folder = TypeVar("_Folder", Path, epath.Path)
_RATIO, _ALWAYS = 100, 2**26
"""A gzip file may unpack to _RATIO times its size, or _ALWAYS bytes. Of text, 3 to 20 is usual."""


def cache_folder() -> Path | None:
    """The user's cache folder: `$XDG_CACHE_HOME/cope_jax`, or `~/.cache/cope_jax`.

    None if the user has no home folder, as in some containers.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cope_jax"
    except RuntimeError:
        return None


def in_bucket(path: epath.PathLike) -> bool:
    """True for the path of an object in a bucket, such as `gs://bucket/folder`.

    Raises:
      ConfigError: it is a URL of another kind.
    """
    scheme, separator, _ = os.fspath(path).partition("://")
    # hf:// is a repository of the Hugging Face Hub.
    if separator and scheme not in ("gs", "s3", "hf"):
        raise ConfigError(
            f"{path} is not a folder or file: give a path on disk, or one that begins with gs:// or s3://"
        )
    return bool(separator)


def inside(folder: _Folder, name: object, *, links: bool = False) -> _Folder:
    """The path of a file below a folder, by a name that others chose, as in a bucket or an index.

    All code that reads or writes a file by such a name gets its path here. With `links`, symbolic
    links in the folder may lead out of it, as they do in a cache of downloaded weights.

    Raises:
      ConfigError: the name leads out of the folder, or cannot be the name of a file.

    >>> inside(Path("run"), "cells/result.json").as_posix()
    'run/cells/result.json'
    >>> inside(Path("run"), "../result.json")
    Traceback (most recent call last):
    ...
    cope_jax.errors.ConfigError: '../result.json' cannot name a file in run: rename it
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    path = None
    if not re.match(r"[A-Za-z]:|.*[\0\\]", str(name), re.DOTALL) and {"", ".", ".."}.isdisjoint(
        parts
    ):
        with contextlib.suppress(UnicodeEncodeError):
            fits = max(len(piece.encode()) for piece in parts) < 256
            path = folder.joinpath(*parts) if fits else None
    if path is None or not (
        links or Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
    ):
        raise ConfigError(f"{name!r} cannot name a file in {folder}: rename it")
    return path


def glob_in(folder: epath.PathLike, pattern: str) -> list[epath.Path]:
    """The sorted paths in a folder that match a pattern; the folder's path is not a pattern."""
    return sorted(epath.Path(glob.escape(os.fspath(folder))).glob(pattern))


def exposed(path: Path, *, above: bool = False) -> str:
    """The reason why others could change or replace a path; "" if only this user and root can.

    All folders above the path count, also those that symbolic links lead through. These may belong
    to root, and may have the sticky bit, like /tmp, where users cannot replace the files of others.
    `above` says that `path` is such a folder. The user's primary group does not count as others:
    many systems let it write (umask 002).
    """
    path = Path(os.path.abspath(path))
    try:
        os.path.realpath(path, strict=True)  # fails at links that lead nowhere or to themselves
        for level in (path, *path.parents):
            state, above = level.lstat(), above or level != path
            if state.st_uid not in {os.geteuid(), 0 if above else os.geteuid()}:
                return f"{level} belongs to another user"
            if stat.S_ISLNK(state.st_mode):
                target = Path(os.path.realpath(level.parent), level.readlink())
                if reason := exposed(target, above=above):
                    return reason
            elif above and state.st_mode & stat.S_ISVTX:
                continue
            elif state.st_mode & 0o002 or (
                state.st_mode & 0o020 and not _is_own_group(state.st_gid)
            ):
                return f"other users may write to {level}"
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def _is_own_group(number: int) -> bool:
    """True for the group that the system made for this user, of their name and without others."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    alone = user.pw_name == group.gr_name and {*group.gr_mem} <= {user.pw_name}
    return user.pw_gid == number and alone


def private_folder(path: Path) -> str:
    """Creates a folder and its parents, for this user alone. Returns what `exposed` says of it."""
    for level in (*reversed(path.parents), path):
        if level == path or not level.exists():
            level.mkdir(mode=0o700, exist_ok=True)
    return exposed(path)


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file without waiting for a writer; a named pipe without a writer is empty."""
    file = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(file, True)
    return file


def read_bytes(path: epath.PathLike) -> bytes:
    """The content of a file, decompressed if its name ends in `.gz`.

    Raises:
      ConfigError: there is no such file, it is damaged, or it unpacks to much more than text would.
    """
    stored, file = in_bucket(path), epath.Path(path)
    try:
        if stored:
            data = file.read_bytes()
        else:
            with open(file, "rb", opener=_open_at_once) as opened:
                data = opened.read()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path} ({error.strerror or error}): give the path of a file"
        ) from error
    if file.suffix != ".gz":
        return data
    most = max(_ALWAYS, _RATIO * len(data))
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
            unpacked = packed.read(most + 1)
            if len(unpacked) <= most:
                return unpacked
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{path} is not a complete gzip file ({error}): fetch it again"
        ) from error
    raise ConfigError(f"{path} unpacks to over {_RATIO} times its size: if it is right, unpack it")


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file on disk, one at a time. ConfigError: it cannot be read."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            yield from file
    except OSError as error:
        raise ConfigError(
            f"cannot read {path} ({error.strerror}): give the path of a file"
        ) from error


def read_text(path: epath.PathLike) -> str:
    """The text of a UTF-8 file, plain or compressed (see `read_bytes`), without byte order mark.

    Raises:
      ConfigError: there is no such file, it is damaged, or a line is not UTF-8.
    """
    data = read_bytes(path)
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}, line {line} is not UTF-8 text: convert the file to UTF-8"
        ) from error


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. ValueError: the text is not JSON, or is nested too deeply.

    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    ...
    ValueError: it is nested too deeply
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_object(
    path: epath.PathLike, mend: str = "fetch it again", /, **kinds: type
) -> dict[str, Any]:
    """The object of a JSON file, plain or compressed (see `read_bytes`).

    Args:
      path: the file.
      mend: what to do if the file is damaged; the end of the message.
      **kinds: the types of values that the object must have, by key.

    Raises:
      ConfigError: there is no such file, or it contains anything else.
    """
    data = read_bytes(path)
    try:
        content = parse_json(data)
        if not isinstance(content, dict):
            raise ValueError(f"it must contain a JSON object, not a {type(content).__name__}")
        if missing := [name for name in kinds if name not in content]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        for name, kind in kinds.items():
            accepted = (int, float) if kind is float else (kind,)
            if type(content[name]) not in accepted:
                raise ValueError(
                    f"{name} must be {kind.__name__}, not {type(content[name]).__name__}"
                )
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}): {mend}") from error
    return content


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path. At the end of the `with` block, the file there replaces `path`.

    The replacement is atomic. If the block fails or the process is killed, the old file stays. The
    folder of `path` is created if it does not exist. Every writer gets another path. Files that
    killed writers of `path` have left are removed.

    Raises:
      StorageError: the disk is full or read-only.
    """
    with clear_storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in glob_in(path.parent, f"{glob.escape(path.name)}.*.partial"):
            with contextlib.suppress(OSError), open_lock(Path(left)) as file:
                if try_lock(file):  # its writer was killed
                    left.unlink()
        partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
        with open_lock(partial) as file:
            try:
                with contextlib.suppress(OSError):  # from a file system without locks
                    try_lock(file)
                yield partial
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_pair(first: Path, last: Path) -> Iterator[tuple[Path, Path]]:
    """Yields temporary paths of two files that belong together. At the end they replace both.

    `first` is replaced first, while there is no `last`, so that never an old file and a new one are
    there together. If the block or the first replacement fails, both old files stay. If the process
    is killed in between, or the second replacement fails, there is no `last`.

    Raises:
      StorageError: the disk is full or read-only.
    """
    aside = last.with_name(f"{last.name}.{secrets.token_hex(8)}.partial")
    with replacing(last) as partial_last:
        try:
            with replacing(first) as partial_first:
                yield partial_first, partial_last
                if last.exists():
                    last.replace(aside)
        except BaseException:
            if aside.exists():
                aside.replace(last)
            raise
        finally:
            aside.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> Path:
    """Writes a UTF-8 file completely or not at all: see `replacing`. Returns `path`."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return path
