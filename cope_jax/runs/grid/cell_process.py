"""Trains a cell in a process of its own, with a log, a time limit, and its failure."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cope_jax.runs import workdir as workdirs
from cope_jax.runs.grid.claims import WAITS
from cope_jax.runs.grid.worker import IN_USE
from cope_jax.storage.mirror import unlink

FAILED = "failed.json"
"""The file of a cell that failed, with the last line that it printed and its exit status."""
LOG = "log.txt"
GRACE = 60.0
"""Seconds that a cell has to save a checkpoint before it is killed."""
_STOPPED = (IN_USE, 128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)


@dataclasses.dataclass(frozen=True)
class Job:
    """A cell and what it needs, as plain values that can be sent to another machine.

    Attributes:
      folder: the workdir of the cell.
      cell: the cell as JSON.
      cwd: the folder to run in, from which relative paths in the config lead.
      commit: the commit of the checkout when the grid started, "" without a checkout. The cell
        records the commit that it runs, and warns if it is another one.
      cores: number of cores to claim; 0 leaves the choice to the system.
      devices: number of GPUs to claim; 0 if something else gives the GPUs, or there are none.
      time_limit: seconds after which the cell is stopped and counts as failed; None means no limit.
    """

    folder: Path
    cell: str
    cwd: Path
    commit: str = ""
    cores: int = 0
    devices: int = 0
    time_limit: float | None = None


def run(job: Job, stopped: Callable[[], int] = lambda: 0) -> str | None:
    """Runs a cell to its end. Returns None, or its last line if it failed or was stopped.

    A failure is also written to failed.json. A stop is not, because the cell resumes, and neither
    is a folder that another process uses, which may finish the cell. The output is in log.txt.

    Args:
      job: the cell.
      stopped: returns 0 while the cell may run, 1 if it must save a checkpoint and stop, and 2 if
        it must end at once. KeyboardInterrupt stops it too.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    unlink(job.folder / FAILED)
    log = job.folder / LOG
    # Without -P, a file of the folder could hide a module; if this process looks there, it must
    # too.
    options = ["-m"] if {"", str(job.cwd)} & {*sys.path} else ["-P", "-m"]
    words = [job.folder, job.cores, job.devices, job.commit]
    command = [sys.executable, *options, "cope_jax.runs.grid.worker", *map(str, words)]
    began, asked, late = time.monotonic(), None, False
    with (
        log.open("ab") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            # So that Ctrl-C on the terminal reaches only this process, which then stops it.
            start_new_session=True,
            cwd=job.cwd,
        ) as process,
    ):
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            process.stdin.write(f"{job.cell}\n".encode())
            process.stdin.flush()
        while True:
            try:
                status = process.wait(timeout=0.1)
                break
            except subprocess.TimeoutExpired:
                now = time.monotonic()
                if job.time_limit is not None and asked is None and last_line(log) == WAITS:
                    began = now
                late = late or (
                    asked is None and job.time_limit is not None and now - began > job.time_limit
                )
                if asked is None and (late or stopped()):
                    asked = now
                    process.terminate()
                elif asked is not None and (now - asked > GRACE or stopped() > 1):
                    os.killpg(process.pid, signal.SIGKILL)
            except KeyboardInterrupt:
                asked = time.monotonic()
                process.terminate()
    if status == 0:
        return None
    line = last_line(log)
    if late:
        line = f"stopped after the time limit of {job.time_limit:g} s ({line or 'no output'})"
    elif asked is not None or status in _STOPPED:
        return line or "stopped"
    elif status < 0:
        line = f"killed by signal {-status} ({line})"
    workdirs.write_json(job.folder / FAILED, {"line": line, "status": status, "log": str(log)})
    return line


def last_line(log: Path) -> str:
    """The last line of a log."""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 4096))
        lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
