"""A local folder in which a command works in place of a folder in a bucket."""

import contextlib
import dataclasses
import json
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from cope_jax.errors import ConfigError, StorageError
from cope_jax.storage import bucket_lock
from cope_jax.storage.bucket import Bucket
from cope_jax.storage.bucket_lock import Lock
from cope_jax.storage.files import in_bucket, inside, parse_json, read_bytes
from cope_jax.storage.locks import open_lock, try_lock

COMPLETE = ".complete"
"""The name of the object that marks a checkpoint as complete."""
_MIRROR, _PUSHED, _LOST = ".mirror", ".pushed", ".lost"
# Files of a mirror, which no object can be.
_PRIVATE = {_MIRROR, _PUSHED, _LOST, ".lock", ".measuring.lock"}
_CHECKPOINTS = ("checkpoints", "checkpoints-damaged")


@dataclasses.dataclass(frozen=True)
class Mirror:
    """A local folder and the bucket's folder that it mirrors.

    A complete checkpoint is an empty local folder; its arrays are written to the bucket and read
    from it directly.

    Attributes:
      folder: the local folder, or a folder below it.
      bucket: the objects of `folder`.
      token: identifies the command that made the mirror.
    """

    folder: Path
    bucket: Bucket
    token: str

    @classmethod
    def create(cls, url: str) -> "Mirror":
        """Makes a new local folder, with the files of the bucket except those of checkpoints."""
        bucket = Bucket(url.rstrip("/"))
        for left in Path(tempfile.gettempdir()).glob("cope_jax-mirror-*"):
            with contextlib.suppress(OSError):  # another command may remove it too
                if bucket_lock.is_gone(_sign(left)) and not _in_use(left):
                    shutil.rmtree(left, ignore_errors=True)
        root = Path(tempfile.mkdtemp(prefix="cope_jax-mirror-"))
        mirror = cls(root / "files", bucket, uuid.uuid4().hex)
        mirror.folder.mkdir()
        owner = {"process": os.getpid(), "machine": bucket_lock.machine()}
        (root / _MIRROR).write_text(json.dumps({"url": bucket.url, "token": mirror.token, **owner}))
        try:
            mirror.fetch()
        except BaseException:
            mirror.close()
            raise
        return mirror

    def close(self) -> None:
        """Removes the local folder."""
        shutil.rmtree(self.folder.parent, ignore_errors=True)

    @classmethod
    def of(cls, folder: Path) -> "Mirror | None":
        """The mirror that a folder is, or belongs to; None for any other folder."""
        for root in folder.parents:
            if sign := _sign(root):
                with contextlib.suppress(ValueError, TypeError, LookupError):
                    content, parts = parse_json(sign), folder.relative_to(root).parts[1:]
                    return cls(folder, Bucket("/".join([content["url"], *parts])), content["token"])
        return None

    def fetch(self) -> None:
        """Copies files of the bucket to the local folder, except over those changed here."""
        for step in self.folder.glob("**/checkpoints/*"):
            if step.is_dir() and next(step.iterdir(), None) is None:  # it may be gone
                step.rmdir()
        for name in self.bucket.names():
            if not name or name.endswith("/"):  # it stands for a folder
                continue
            try:
                path = inside(self.folder, name)
                if path.name == COMPLETE:
                    path.parent.mkdir(parents=True, exist_ok=True)
                elif _is_copied(Path(name)) and not _changed_here(path):
                    content, _ = self.bucket.read(name)
                    if content is not None:  # else it was removed meanwhile
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_bytes(content)
                        os.utime(path, ns=(0, 0))  # so that `push` knows that it has not changed
            except (ConfigError, FileExistsError, NotADirectoryError, IsADirectoryError) as error:
                raise ConfigError(
                    f"{self.bucket.url} has an object named {name!r}, which cannot be a file on this machine: rename it"
                ) from error

    def push(self) -> None:
        """Copies the local files that have changed to the bucket, without those of checkpoints.

        Raises:
          StorageError: another run has taken a lock that this command had; nothing is copied.
        """
        began = time.time_ns() - 50_000_000  # the clock of the file system may be a little behind
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder)
            if (
                _is_copied(name)
                and path.is_file()
                and path.stat().st_mtime_ns >= self._pushed(path)
            ):
                if self._lost.exists():
                    raise self._taken()
                self.bucket.write(name.as_posix(), path.read_bytes())
        _mark(self.folder).touch()
        os.utime(_mark(self.folder), ns=(began, began))

    def _pushed(self, path: Path) -> int:
        """The time of the last copy of this path's folder, or of a folder above it."""
        marks = [_mark(folder) for folder in path.parents if folder.is_relative_to(self.folder)]
        return max((mark.stat().st_mtime_ns for mark in marks if mark.exists()), default=1)

    def above(self, levels: int) -> "Mirror":
        """The mirror of a folder above."""
        folder = self.folder.parents[levels - 1]
        return dataclasses.replace(self, folder=folder, bucket=self.bucket.above(levels))

    def check_lock(self) -> None:
        """StorageError if another command has the lock of the run with these checkpoints."""
        if not Lock(self.above(1).bucket, ".lock", self.token).is_held():
            raise self.lost_lock()

    def lost_lock(self) -> StorageError:
        """The error for a lock that another command has taken; stops copying to the bucket."""
        self._lost.touch()
        return self._taken()

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Holds the lock `name` of the folder: see `Lock`.

        The local files are those of the moment when the lock was taken. At the end, changed files
        are copied to the bucket before the lock ends.
        """
        mine = Lock(self.bucket, name, self.token)
        with mine.held(lost=self._lost.touch):
            self.fetch()
            try:
                yield
            finally:
                if not mine.is_held():
                    self._lost.touch()
                self.push()

    @property
    def _lost(self) -> Path:
        """A file that says that another command has a lock that this one had."""
        return next(root for root in self.folder.parents if _sign(root)) / _LOST

    def _taken(self) -> StorageError:
        url = self.bucket.url.removesuffix("/checkpoints")
        return StorageError(
            f"{url} is in use by another run, because this one gave no sign of life for {bucket_lock.LOST:.0f} s: "
            "what is stored is intact; stop one of the two"
        )


def _sign(root: Path) -> bytes:
    """The content of `.mirror` in a folder that this user's commands made; b"" in others."""
    if not root.name.startswith("cope_jax-"):
        return b""
    with contextlib.suppress(OSError, ConfigError):
        state = root.lstat()
        if (
            stat.S_ISDIR(state.st_mode)
            and state.st_uid == os.geteuid()
            and not state.st_mode & 0o022
        ):
            return read_bytes(root / _MIRROR)
    return b""


def _in_use(folder: Path) -> bool:
    """True if a process has a local lock in a folder, such as a cell that outlives its command."""
    for path in folder.rglob(".lock"):
        with open_lock(path) as file:
            if not try_lock(file):
                return True
    return False


def _changed_here(path: Path) -> bool:
    return path.exists() and path.stat().st_mtime_ns != 0


def _mark(folder: Path) -> Path:
    """The file whose time is the time of the last copy; each mirror has one."""
    return (folder.parent if (folder.parent / _MIRROR).exists() else folder) / _PUSHED


def _is_copied(name: Path) -> bool:
    """True if `push` and `fetch` copy a file: no lock, unfinished file or part of a checkpoint."""
    unfinished = name.name.endswith(".partial")
    unfinished |= any(piece.startswith(".partial") for piece in name.parts)
    return not unfinished and _PRIVATE.union(_CHECKPOINTS).isdisjoint(name.parts)


def shown(path: object) -> str:
    """The name of a path in messages: in a mirror, its URL."""
    mirror = Mirror.of(Path(str(path)))
    return str(path) if mirror is None else mirror.bucket.url


@contextlib.contextmanager
def mirrored(path: str) -> Iterator[str]:
    """Yields the folder to work in: `path`, or a mirror of a bucket, to which changes are copied.

    Raises:
      StorageError: the changes cannot be copied. The local folder stays, and the message names it.
    """
    if not in_bucket(path):
        yield path
        return
    mirror = Mirror.create(path)
    try:
        yield str(mirror.folder)
    finally:
        try:
            mirror.push()
        except BaseException as error:
            root = mirror.folder.parent
            kept = root.with_name(root.name.replace("mirror", "unsaved"))
            mirror.folder.parent.rename(kept)
            if not isinstance(error, StorageError | ConfigError):
                raise
            raise StorageError(
                f"{error}. The files that were to be copied are in {kept / 'files'}"
            ) from error
        mirror.close()


def unlink(path: Path) -> None:
    """Removes a file, if there is one; in a mirror also in the bucket."""
    path.unlink(missing_ok=True)
    if mirror := Mirror.of(path):
        mirror.bucket.above(1).write(path.name, None)
