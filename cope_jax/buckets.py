"""Folders in buckets of Google Cloud Storage (`gs://`) and S3 (`s3://`): objects, and local folders that mirror them.

A command works in a local folder, its mirror, and a `Mirror` copies files between the folder and the bucket. An object
appears in a bucket completely or not at all. Files are copied before the checkpoint that belongs to them, and the last
object of a checkpoint is a marker. So a bucket always holds a state from which a run can resume.
"""

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cope_jax.errors import ConfigError, StorageError, first_line, without_stderr
from cope_jax.files import in_bucket, parse_json

BEAT = 10.0
"""Seconds between two signs of life of a lock."""
LOST = 60.0
"""After this many seconds without a sign of life, the holder of a lock counts as lost."""

_DRIVERS = {"gs": "gcs", "s3": "s3"}
_MARKER = ".complete"  # the last object of a checkpoint
_MIRROR, _PUSHED, _LOST = ".mirror", ".pushed", ".lost"
_PRIVATE = (_MIRROR, _PUSHED, ".lock", ".measuring.lock")  # files that a bucket does not need
_RETRIES = {"max_retries": 5, "initial_delay": "0.5s", "max_delay": "4s"}


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The objects whose names begin with a path, such as `gs://bucket/runs/cope`.

    The credentials are those of the machine: Google's application default credentials, or the usual variables, files
    and roles of AWS. `AWS_ENDPOINT_URL` names another server with the interface of S3.

    Raises:
      ConfigError: the URL is not valid, or there is no such bucket.
      StorageError: the server cannot be reached, or refuses a request. All methods raise these errors.
    """

    url: str

    def __post_init__(self):
        scheme, _, path = self.url.partition("://")
        if scheme not in _DRIVERS or not path.strip("/"):
            raise ConfigError(f"{self.url} is no path in a bucket: write one like gs://BUCKET/runs/NAME or s3://…")

    @property
    def _path(self) -> str:
        """The path of the folder in its bucket, with a slash at the end."""
        path = self.url.partition("://")[2].strip("/").partition("/")[2]
        return f"{path}/" if path else ""

    @property
    def _objects(self) -> Any:
        """All objects of the bucket."""
        scheme, _, path = self.url.partition("://")
        with self._clear_errors():
            return _opened(_DRIVERS[scheme], path.strip("/").partition("/")[0])

    def above(self, levels: int) -> "Bucket":
        """The objects of a folder above this one."""
        return Bucket(self.url.rsplit("/", levels)[0])

    def read(self, name: str) -> tuple[bytes | None, bytes]:
        """The content of an object, None if there is no such object; and its generation, for `write`."""
        with self._clear_errors():
            found = self._objects.read(self._path + name).result()
        return (found.value if found.state == "value" else None), found.stamp.generation

    def write(self, name: str, data: bytes | None, expected: bytes | None = None) -> bytes | None:
        """Writes an object whole, or removes it if `data` is None.

        With `expected`, writes only if the object still has this generation. Returns the new generation, or None if
        nothing was written.
        """
        options = {} if expected is None else {"if_equal": expected}
        with self._clear_errors():
            return self._objects.write(self._path + name, data, **options).result().generation or None

    def names(self, prefix: str = "") -> list[str]:
        """The names of all objects that begin with `prefix`, sorted."""
        import tensorstore

        with self._clear_errors():
            first = self._path + prefix
            span = tensorstore.KvStore.KeyRange(first, _after(first))
            return sorted(name.decode().removeprefix(self._path) for name in self._objects.list(span).result())

    def remove(self, prefix: str) -> None:
        """Removes all objects that begin with `prefix`."""
        import tensorstore

        with self._clear_errors():
            first = self._path + prefix
            self._objects.delete_range(tensorstore.KvStore.KeyRange(first, _after(first))).result()

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, RuntimeError, OSError) as error:  # what TensorStore raises
            reason = first_line(error).partition(" [")[0]
            if "NoSuchBucket" in str(error) or reason.startswith("NOT_FOUND"):
                raise ConfigError(f"{self.url}: there is no such bucket ({reason}): create it") from error
            raise StorageError(
                f"{self.url} cannot be used now ({reason}): what is stored is intact; check the network and the "
                "credentials, and rerun the command"
            ) from error


@functools.lru_cache
def _opened(driver: str, bucket: str) -> Any:
    import tensorstore

    spec = {"driver": driver, "bucket": bucket}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if driver == "s3" and endpoint:
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region}
    context = tensorstore.Context({"gcs_request_retries": _RETRIES, "s3_request_retries": _RETRIES})
    with without_stderr():  # the library for S3 prints which files with credentials do not exist
        opened = tensorstore.KvStore.open(spec, context=context).result()
        opened.read("?").result()
    return opened


def _after(prefix: str) -> str:
    """The first name after all names that begin with `prefix`; "" means that there is none."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""


@dataclasses.dataclass(frozen=True)
class Mirror:
    """A local folder and the bucket's folder that it mirrors.

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
        """Makes a new local folder, with every file of the bucket's folder but those of checkpoints.

        A checkpoint is an empty folder until `fetch_checkpoint` is called.
        """
        bucket = Bucket(url.rstrip("/"))
        root = Path(tempfile.gettempdir())
        for left in root.glob("cope_jax-mirror-*"):  # by processes that were killed
            owner = left.name.split("-")[2]
            if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
                shutil.rmtree(left, ignore_errors=True)
        root = Path(tempfile.mkdtemp(prefix=f"cope_jax-mirror-{os.getpid()}-"))
        mirror = cls(root / "files", bucket, uuid.uuid4().hex)
        mirror.folder.mkdir()
        (root / _MIRROR).write_text(json.dumps({"url": bucket.url, "token": mirror.token}))
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
            if (root / _MIRROR).is_file():
                held, parts = json.loads((root / _MIRROR).read_text()), folder.relative_to(root).parts[1:]
                return cls(folder, Bucket("/".join([held["url"], *parts])), held["token"])
        return None

    def fetch(self) -> None:
        """Copies the files of the bucket's folder to the local one."""
        for name in self.bucket.names():
            path = self.folder / name
            if path.name == _MARKER:
                path.parent.mkdir(parents=True, exist_ok=True)
            elif _is_copied(Path(name)):
                content, _ = self.bucket.read(name)
                if content is not None:  # else it was removed meanwhile
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
                    os.utime(path, ns=(0, 0))  # so that `push` knows that it has not changed
        _mark(self.folder).touch()

    def push(self) -> None:
        """Copies the local files that have changed to the bucket, without those of checkpoints.

        Raises:
          StorageError: another run has taken a lock that this command had; nothing is copied.
        """
        if self._lost.exists():
            raise self._taken()
        began = time.time_ns() - 50_000_000  # the clock of the file system may be a little behind
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder)
            if _is_copied(name) and path.is_file() and path.stat().st_mtime_ns >= self._pushed(path):
                self.bucket.write(name.as_posix(), path.read_bytes())
        _mark(self.folder).touch()
        os.utime(_mark(self.folder), ns=(began, began))

    def _pushed(self, path: Path) -> int:
        """When the files of this path's folder, or of a folder above it, were last copied."""
        marks = [_mark(folder) for folder in path.parents if folder.is_relative_to(self.folder)]
        return max((mark.stat().st_mtime_ns for mark in marks if mark.exists()), default=0)

    def push_checkpoint(self) -> None:
        """Copies `folder`, a complete checkpoint, to the bucket; its marker is written last.

        Raises:
          StorageError: another run has taken the lock, because this one gave no sign of life.
        """
        self.check_lock()
        self.bucket.remove("")  # what is left of an earlier try
        for path in sorted(self.folder.rglob("*")):
            if path.is_file():
                self.bucket.write(path.relative_to(self.folder).as_posix(), path.read_bytes())
        self.bucket.write(_MARKER, b"complete\n")

    def fetch_checkpoint(self) -> None:
        """Copies `folder`, a checkpoint, from the bucket, unless it is there already.

        If the bucket has it no more, the local folder is removed, and newer checkpoints appear as empty folders.
        """
        if next(self.folder.iterdir(), None) is not None:
            return
        marker, _ = self.bucket.read(_MARKER)
        for name in self.bucket.names() if marker is not None else []:
            content, _ = self.bucket.read(name)
            if name != _MARKER and content is not None:
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / name).write_bytes(content)
        if self.bucket.read(_MARKER)[0] is None:
            shutil.rmtree(self.folder)
            parent = self.folder.parent.parent
            dataclasses.replace(self, folder=parent, bucket=self.bucket.above(2)).fetch()

    def remove_checkpoint(self) -> None:
        """Removes `folder`, a checkpoint, from the bucket; its marker first."""
        self.bucket.write(_MARKER, None)
        self.bucket.remove("")

    def check_lock(self) -> None:
        """Raises StorageError if the lock of the run that `folder` belongs to is another command's."""
        held, _ = Bucket(self.bucket.url.rpartition("/checkpoints/")[0]).read(".lock")
        if held is None or self.token.encode() not in held:
            self._lost.touch()
            raise self._taken()

    @property
    def _lost(self) -> Path:
        """A file that says that another command has a lock that this one had."""
        return next(root for root in self.folder.parents if (root / _MIRROR).exists()) / _LOST

    def _taken(self) -> StorageError:
        url = self.bucket.url.partition("/checkpoints/")[0]
        return StorageError(
            f"{url} is in use by another run, because this one gave no sign of life for {LOST:.0f} s: what is stored "
            "is intact; stop one of the two"
        )

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Holds the lock `name` of the folder, and gives a sign of life every `BEAT` seconds.

        A lock whose holder gives no sign of life for `LOST` seconds is taken over.

        Raises:
          ConfigError: another command holds the lock.
        """
        generation: bytes | None = self._acquire(name)
        done = threading.Event()

        def beat() -> None:
            nonlocal generation
            number = 0
            while generation and not done.wait(BEAT):
                number += 1
                with contextlib.suppress(StorageError):  # the next one may succeed
                    generation = self.bucket.write(name, self._sign(number), generation)
                    if generation is None:
                        self._lost.touch()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            if generation:
                self.bucket.write(name, None, generation)

    def _acquire(self, name: str) -> bytes:
        seen, began, told, refused = b"", time.monotonic(), False, 0
        while True:
            held, generation = self.bucket.read(name)
            if held is not None and not seen:
                seen, began = generation, time.monotonic()
            gone = _is_gone(held) or (generation == seen and time.monotonic() - began > LOST)
            if held is None or gone:
                if taken := self.bucket.write(name, self._sign(0), generation):
                    return taken
                refused += 1  # by another command that was faster, which will then hold the lock
                if refused > 2:
                    raise StorageError(f"{self.bucket.url} refuses to write {name}: check the settings of the bucket")
            elif generation != seen:
                holder = _holder(held)
                raise ConfigError(
                    f"{self.bucket.url} is in use by {holder}: wait until it ends, stop it, or choose another --workdir"
                )
            elif not told:
                told = True
                wait = f"waiting up to {LOST:.0f} s for a sign of life"
                print(f"{self.bucket.url} was in use by {_holder(held)}: {wait}", file=sys.stderr)
            time.sleep(BEAT / 10)

    def _sign(self, number: int) -> bytes:
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        sign = {"holder": holder, "process": os.getpid(), "place": _place(), "token": self.token, "number": number}
        return json.dumps(sign).encode()


def _holder(held: bytes) -> str:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(parse_json(held)["holder"])
    return "another process"


def _place() -> str:
    """Names the machine since its start, and the processes that this one can see; "" if that is not known."""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _is_gone(held: bytes | None) -> bool:
    """Whether the holder of a lock was a process of this machine that has ended."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        sign = parse_json(held or b"")
        return bool(_place()) and sign["place"] == _place() and not Path(f"/proc/{int(sign['process'])}").exists()
    return False


def _mark(folder: Path) -> Path:
    """The file whose time says when the files of a folder were last copied; the folder of a mirror has only its own."""
    return (folder.parent if (folder.parent / _MIRROR).exists() else folder) / _PUSHED


def _is_copied(name: Path) -> bool:
    """Whether `push` and `fetch` copy a file: no lock, no unfinished file, and no part of a checkpoint."""
    unfinished = name.name.endswith(".partial") or any(part.startswith(".partial") for part in name.parts)
    checkpoint = not {"checkpoints", "checkpoints-damaged"}.isdisjoint(name.parts)
    return not (unfinished or checkpoint or name.name in _PRIVATE)


def shown(path: object) -> str:
    """How messages name a path: a path in a mirror by its URL."""
    mirror = Mirror.of(Path(str(path)))
    return str(path) if mirror is None else mirror.bucket.url


@contextlib.contextmanager
def mirrored(path: str) -> Iterator[str]:
    """Yields the folder to work in: `path`, or for a path in a bucket a mirror, whose changes are copied at the end."""
    if not in_bucket(path):
        yield path
        return
    mirror = Mirror.create(path)
    try:
        yield str(mirror.folder)
    finally:
        try:
            mirror.push()
        finally:
            mirror.close()
