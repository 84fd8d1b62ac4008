"""Trains one cell: `python -m cope_jax.runs.grid.worker FOLDER CORES DEVICES COMMIT`.

The first line of the standard input is the cell, as JSON. The process stops, as after SIGTERM, when
its standard input ends, so it never outlives the process that started it. It claims CORES cores of
this machine and DEVICES GPUs, and waits until they are free. It runs and records the commit that is
checked out then; COMMIT is that of the command, and a line says so if they differ. The exit status
is that of a command: 2 for a wrong config, 3 for a loss that is not finite, 4 for a full disk.
"""

import os
import signal
import sys
import threading
import traceback
from pathlib import Path

from cope_jax.errors import (
    ConfigError,
    Interrupted,
    NonFiniteError,
    StorageError,
    bucket_error,
    storage_reason,
)
from cope_jax.runs import checkout
from cope_jax.runs.grid import claims

IN_USE = 75
"""The exit status if another process trains the cell."""

STATUS: dict[type[Exception], int] = {ConfigError: 2, NonFiniteError: 3, StorageError: 4}
"""The exit status of each error that ends a run with one line."""


def main() -> None:
    """Claims what the cell needs, then trains it."""
    folder, cores, devices, commit = sys.argv[1:]
    text = b""
    while not text.endswith(b"\n"):  # not sys.stdin, whose lock would be in use when Python ends
        text += (read := os.read(0, 2**16))
        if not read:
            return
    threading.Thread(target=_stop_with_input, daemon=True).start()
    claims.claim_all(int(cores), int(devices))
    if not claims.wait_for(Path(folder, ".lock")):
        line = "such as a job of an earlier command: rerun when it has ended"
        print(f"another process trains in {folder}, {line}")
        sys.exit(IN_USE)
    # Only now is JAX imported, because it counts cores and devices when it starts.
    if status := _train(text, Path(folder), commit or None):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # else computation could crash it, or a library print a last line


def _stop_with_input() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _train(text: str | bytes, folder: Path, commit: str | None) -> int:
    """Trains a cell, prints its error in one line, and returns the exit status.

    `commit` is that of the command that started the cell.
    """
    ours = checkout.commit()  # before the imports, since the checkout may change while this runs
    if ours != commit:
        print(
            f"warning: this cell runs and records commit {ours}, but the command started at {commit}: "
            "change no code during a sweep if its cells must be comparable"
        )
    from cope_jax.encodings import encoding_file
    from cope_jax.runs import records
    from cope_jax.runs.experiment import Experiment
    from cope_jax.runs.grid.cell import Cell
    from cope_jax.runs.workdir import Workdir
    from cope_jax.storage.programs import keep_programs

    keep_programs()
    try:
        cell = Cell.from_json(text)
        experiment = Experiment(cell.config, Workdir(folder).create_task(cell.config))
        environment = {**records.environment(), "commit": ours}
        experiment.train(
            folder, cell.seeds, label=cell.name, fields=cell.fields, environment=environment
        )
    except Interrupted as stop:
        print(stop)
        return stop.exit_code
    except Exception as error:
        known = error if isinstance(error, tuple(STATUS)) else bucket_error(error)
        if known is None and (line := encoding_file.blamed(error)):
            known = ConfigError(line)
        if known is None and (reason := storage_reason(error)):
            known = StorageError.of(folder, reason)
        if known is None:
            traceback.print_exc()
            return 1
        print(f"error: {' '.join(str(known).splitlines())}")
        return next(status for kind, status in STATUS.items() if isinstance(known, kind))
    return 0


if __name__ == "__main__":
    main()
