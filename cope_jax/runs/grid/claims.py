"""Cores and GPUs that a process claims for itself, and the lock of a run that still saves."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from cope_jax.storage.files import cache_folder
from cope_jax.storage.locks import open_lock, try_lock

POLL = 0.1
"""Seconds between two tries to claim what is in use."""

WAITS = "waits for cores or GPUs that other cells use"
"""The last line of a cell's log while it waits; this time does not count for its time limit."""


def cores() -> int:
    """The number of cores of this process; 1 if it cannot be bound to cores, as on macOS.

    A container may also limit the time on all cores (cgroups' cpu.max).
    """
    if not hasattr(os, "sched_getaffinity"):
        return 1
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):
        return allowed


def gpus() -> list[str]:
    """The GPUs that this process may use."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in given.split(",") if name]
    try:
        command = ["nvidia-smi", "--list-gpus"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(number) for number in range(len(listed.splitlines()))]


def claim_all(cores: int, devices: int) -> None:
    """Claims cores and GPUs for this process; 0 leaves the choice to the system."""
    if cores and hasattr(os, "sched_setaffinity"):
        allowed = [str(core) for core in sorted(os.sched_getaffinity(0))]
        os.sched_setaffinity(0, map(int, claim("core", allowed, min(cores, len(allowed)))))
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(claim("gpu", gpus(), devices))


def claim(kind: str, names: Sequence[str], count: int) -> list[str]:
    """Claims `count` of some things, such as cores, until the process ends; waits for free ones.

    The locks are files in a folder of this user, so all processes of all grids on a machine share
    the cores.
    """
    if len(names) < count:
        sys.exit(f"error: the cell needs {count} {kind}s, but this machine shows {len(names)}")
    folder, waited = _lock_folder(), False
    while True:
        locks: dict[str, IO[str]] = {}
        with contextlib.ExitStack() as stack:
            for name in names:
                try:
                    file = stack.enter_context(open_lock(folder / f"{kind}-{name}"))
                    if not try_lock(file):
                        continue
                except OSError as error:
                    sys.exit(
                        f"error: {folder} cannot hold locks ({error.strerror}): delete it, or set TMPDIR"
                    )
                locks[name] = file
                if len(locks) == count:
                    for file in locks.values():
                        os.dup(file.fileno())  # so the lock lasts until the process ends
                    if waited:
                        print(f"has its {kind}s", flush=True)
                    return list(locks)
        if not waited:
            print(WAITS, flush=True)
            waited = True
        time.sleep(POLL)  # without locks, because another process may need only these


def _lock_folder() -> Path:
    """A folder of this user alone.

    Others may own those above it: locks are neither read nor run.
    """
    folders = [Path(tempfile.gettempdir()) / f"cope_jax-{os.getuid()}"]
    if cache := cache_folder():
        folders.append(cache / f"locks-{socket.gethostname()}")  # several machines may share it
    for folder in folders:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, opened)
            if os.fstat(opened).st_uid == os.geteuid():
                os.fchmod(opened, 0o700)
                return folder
    sys.exit(
        f"error: {' and '.join(map(str, folders))} cannot hold locks: set TMPDIR to a folder of your own"
    )


def wait_for(lock: Path, seconds: float = 120.0) -> bool:
    """Waits until no process has a lock: what a killed command started may still save a checkpoint.

    Returns whether the lock is free.
    """
    end = time.monotonic() + seconds
    while lock.exists() and time.monotonic() < end:
        try:
            with open_lock(lock) as file:
                if try_lock(file):
                    return True
        except OSError:  # it has no locks, or is no file, as training then says
            return True
        time.sleep(POLL)
    return not lock.exists()
