"""Runs one cell in a process of its own: `python -m cope_jax.commands.sweep.one_cell CORES DEVICES FLAGS...`.

The process first claims CORES cores of this machine and, if DEVICES is not 0, as many GPUs, and waits until they are
free. FLAGS are those of `cope-jax train`, the workdir last. The process stops, as after SIGTERM, when its standard
input ends, so it never outlives the process that started it.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from cope_jax.cli import interrupts
from cope_jax.storage.files import cache_folder
from cope_jax.storage.locks import open_lock, try_lock

POLL = 0.1
"""Seconds between two tries to claim what is in use."""

IN_USE = 75
"""The exit status if another process trains the cell."""

WAITS = "waits for cores or GPUs that other cells use"
"""The last line of a cell's log while it waits; this time does not count for its time limit."""


def claim(kind: str, names: Sequence[str], count: int) -> list[str]:
    """Claims `count` of some things of this machine, such as cores, until the process ends; waits until they are free.

    The locks are files in a folder of this user, so all processes of all grids on a machine share the cores.
    """
    if len(names) < count:
        sys.exit(f"error: the cell needs {count} {kind}s, but this machine shows {len(names)}")
    folder, said = _lock_folder(), False
    while True:
        held: dict[str, IO[str]] = {}
        with contextlib.ExitStack() as stack:
            for name in names:
                try:
                    file = stack.enter_context(open_lock(folder / f"{kind}-{name}"))
                    if not try_lock(file):
                        continue
                except OSError as error:
                    sys.exit(f"error: {folder} cannot hold locks ({error.strerror}): delete it, or set TMPDIR")
                held[name] = file
                if len(held) == count:
                    for file in held.values():
                        os.dup(file.fileno())  # so the lock lasts until the process ends
                    if said:
                        print(f"has its {kind}s", flush=True)
                    return list(held)
        if not said:
            print(WAITS, flush=True)
            said = True
        time.sleep(POLL)  # without locks, because another process may need only these


def _lock_folder() -> Path:
    """A folder of this user alone; of those above it nothing is required, because locks are neither read nor run."""
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
    sys.exit(f"error: {' and '.join(map(str, folders))} cannot hold locks: set TMPDIR to a folder of your own")


def wait_for(lock: Path, seconds: float = 120.0) -> bool:
    """Waits until no process has a lock, because what a killed command started may still save its checkpoint.

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


def gpus() -> list[str]:
    """The GPUs that this process may use."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in given.split(",") if name]
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(number) for number in range(len(listed.splitlines()))]


def _stop_with_input() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock would be held when Python ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Claims what the cell needs, then trains it."""
    interrupts.install()
    cores, devices, *flags = sys.argv[1:]
    threading.Thread(target=_stop_with_input, daemon=True).start()
    if int(cores) and hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, map(int, claim("core", [str(core) for core in allowed], min(int(cores), len(allowed)))))
    if int(devices):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(claim("gpu", gpus(), int(devices)))
    folder = Path(flags[-1].removeprefix("--workdir="))
    if not wait_for(folder / ".lock"):
        print(f"another process trains in {folder}, such as a job of an earlier command: rerun when it has ended")
        sys.exit(IN_USE)
    sys.argv = ["cope-jax", "train", *flags]
    from cope_jax.cli import entry  # now, because JAX counts cores and devices when it starts

    entry.run_command()


if __name__ == "__main__":
    main()
