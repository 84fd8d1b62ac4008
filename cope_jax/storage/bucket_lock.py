"""A lock in a bucket: an object that its holder renews, so that the lock of a lost machine ends."""

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cope_jax.errors import ConfigError, StorageError
from cope_jax.storage.bucket import Bucket
from cope_jax.storage.files import parse_json

BEAT = 10.0
"""Seconds between two signs of life of a lock."""
LOST = 60.0
"""After this many seconds without a sign of life, the holder of a lock counts as lost."""


@dataclasses.dataclass(frozen=True)
class Lock:
    """An object that names the command which may write to a folder of a bucket.

    Attributes:
      bucket: the folder.
      name: the name of the object.
      token: identifies the command.
    """

    bucket: Bucket
    name: str
    token: str

    def is_held(self) -> bool:
        """True while this command has the lock."""
        content, _ = self.bucket.read(self.name)
        return content is not None and self.token.encode() in content

    @contextlib.contextmanager
    def held(self, lost: Callable[[], object]) -> Iterator[None]:
        """Holds the lock, and gives a sign of life every `BEAT` seconds.

        A lock whose holder gives no sign of life for `LOST` seconds is taken over. `lost` is
        called, in another thread, when another command has taken this lock.

        Raises:
          ConfigError: another command has the lock, or the store ignores the conditions of writes.
        """
        generation: bytes | None = self._acquire()
        done = threading.Event()

        def beat() -> None:
            nonlocal generation
            number = 0
            while generation and not done.wait(BEAT):
                number += 1
                with contextlib.suppress(StorageError, ConfigError):  # the next one may succeed
                    generation = self._sign(number, generation)
                    if generation is None:
                        lost()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            if generation:
                self.bucket.write(self.name, None, generation)

    def _acquire(self) -> bytes:
        seen, began, announced, refused = b"", time.monotonic(), False, 0
        while True:
            content, generation = self.bucket.read(self.name)
            if content is not None and not seen:
                seen, began = generation, time.monotonic()
            gone = is_gone(content) or (generation == seen and time.monotonic() - began > LOST)
            if content is None or gone:
                if taken := self._sign(0, generation):
                    if self.bucket.write(self.name, b"", generation) is None:
                        if announced:
                            print(
                                f"{self.bucket.url}: the other run is gone, so this one continues",
                                file=sys.stderr,
                            )
                        return taken
                    self.bucket.write(self.name, None)
                    raise ConfigError(
                        f"{self.bucket.url} is in a store that ignores the conditions of writes, so nothing can keep a "
                        "second run out: choose another store, or a folder on a disk"
                    )
                refused += 1  # by another command that was faster, which will then hold the lock
                if refused > 2:
                    raise StorageError(
                        f"{self.bucket.url} refuses to write {self.name}: check the settings of the bucket"
                    )
            elif generation != seen:
                holder = _holder(content)
                raise ConfigError(
                    f"{self.bucket.url} is in use by {holder}: wait until it ends, stop it, or choose another --workdir"
                )
            elif not announced:
                announced = True
                wait = f"waiting up to {LOST:.0f} s to see whether it still runs"
                print(f"{self.bucket.url} is locked by {_holder(content)}: {wait}", file=sys.stderr)
            time.sleep(BEAT / 10)

    def _sign(self, number: int, expected: bytes) -> bytes | None:
        """Writes a sign of life; returns its generation, or None if another has the lock."""
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        sign = {"holder": holder, "process": os.getpid(), "machine": machine()}
        sign |= {"token": self.token, "number": number}
        return self.bucket.write(self.name, json.dumps(sign).encode(), expected)


def is_gone(content: bytes | None) -> bool:
    """True if JSON text names a `process` of this `machine` that has ended."""
    with contextlib.suppress(ValueError, TypeError, KeyError, OSError, OverflowError):
        sign = parse_json(content or b"")
        if machine() and sign["machine"] == machine():
            try:
                os.kill(int(sign["process"]), 0)
            except ProcessLookupError:
                return True
    return False


def machine() -> str:
    """Names the machine since its start, and its process namespace; "" if unknown."""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _holder(content: bytes) -> str:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return printable(parse_json(content)["holder"])
    return "another process"


def printable(text: object) -> str:
    """The beginning of another process's text, in one line, without control characters."""
    return "".join(filter(str.isprintable, str(text)))[:100]
