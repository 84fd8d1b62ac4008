"""Locks of files, and folders for unfinished files, each of which its process has locked."""

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from etils import epath

PARTIAL = ".partial-"
"""Prefix of the name of a folder of unfinished files. The name of the machine follows."""

_LOCK = ".lock"
_ABANDONED = 86_400  # seconds without a change after which nobody writes unfinished files any more


def open_lock(path: Path) -> IO[str]:
    """Opens a lock file, or creates it. Never waits, and follows no symbolic link.

    Raises:
      OSError: the file cannot be opened, or is no regular file.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, f"{path.name} is no regular file", str(path))
    return os.fdopen(file, "r+", errors="replace")


def try_lock(file: IO[str]) -> bool:
    """Locks an open file; False if another process has locked it. OSError: no locks here."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def unfinished(out: epath.PathLike | None = None) -> Iterator[Path]:
    """Yields a new, locked folder for unfinished files of `out`, which vanishes at the end.

    It is in `out`, which is created; without `out`, or if that is in a bucket, in the folder for
    temporary files. What killed processes have left there is removed first.
    """
    room = _room(out)
    room.mkdir(parents=True, exist_ok=True)
    remove_abandoned(out)
    prefix = f"{PARTIAL}{socket.gethostname()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=room, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (folder / f"{_LOCK}.new").open("w") as lock:
            with contextlib.suppress(OSError):  # from a file system without locks
                try_lock(lock)
                # A lock that others see is held already.
                (folder / f"{_LOCK}.new").rename(folder / _LOCK)
            yield folder


def remove_abandoned(out: epath.PathLike | None = None) -> None:
    """Removes unfinished files of killed processes: of this machine, or a day old."""
    for folder in _room(out).glob(f"{PARTIAL}*"):
        with contextlib.suppress(OSError):  # another process has removed it, or it is not ours
            state = folder.lstat()
            if (
                state.st_uid == os.getuid()
                and stat.S_ISDIR(state.st_mode)
                and _is_abandoned(folder)
            ):
                shutil.rmtree(folder)


def _room(out: epath.PathLike | None) -> Path:
    return Path(tempfile.gettempdir() if out is None or "://" in os.fspath(out) else os.fspath(out))


def _is_abandoned(folder: Path) -> bool:
    if (folder / _LOCK).exists():
        with open_lock(folder / _LOCK) as lock:
            if not try_lock(lock):  # its process lives
                return False
        if folder.name.rpartition("-")[0] == f"{PARTIAL}{socket.gethostname()}":
            return True
    # On another machine there may be a lock that this one does not see.
    newest = max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    return time.time() - newest > _ABANDONED
