"""Metrics as JSON lines and TensorBoard events."""

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cope_jax.errors import clear_storage_errors
from cope_jax.files import replacing


class MetricsWriter:
    """Appends rows to `metrics.jsonl` and their numbers to TensorBoard event files in the same directory.

    Each row has a `step`. Opening at a step drops the rows after it, so a resumed run leaves no gap and no duplicate.

    Args:
      directory: created if missing.
      step: the step from which the run resumes; 0 starts from scratch.
      active: False for a writer that writes nothing, as in all processes but the first.

    Raises:
      StorageError: here and from every method, if the disk is full or read-only.
    """

    def __init__(self, directory: Path, step: int, active: bool = True):
        self.path = directory / "metrics.jsonl"
        self._active = active
        if not active:
            return
        with clear_storage_errors(self.path):
            rows = [row for row in read_metrics(self.path) if row["step"] <= step]
            with replacing(self.path) as partial, partial.open("w", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
                file.flush()
                os.fsync(file.fileno())
            self._file = self.path.open("a", encoding="utf-8")
            self._board = _Board(directory, step + 1)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._active:
            with clear_storage_errors(self.path), contextlib.closing(self._board):
                self._file.close()

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Appends rows, which survive a crash of the process once this returns, and of the machine after `sync`."""
        if not self._active:
            return
        with clear_storage_errors(self.path):
            # JSON does not have NaN: a number that is not finite is null.
            rows = [{name: _finite(value) for name, value in row.items()} for row in rows]
            self._file.write("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
            self._file.flush()
        for row in rows:
            labels = [f"seed_{row['seed']}", *(value for value in row.values() if isinstance(value, str) and value)]
            numbers = {name: value for name, value in row.items() if isinstance(value, float)}
            self.board(row["step"], {"/".join([*labels, name]): value for name, value in numbers.items()})

    def sync(self) -> None:
        """Waits until all rows are on disk. Call this before saving a checkpoint that needs them."""
        if self._active:
            with clear_storage_errors(self.path):
                os.fsync(self._file.fileno())

    def board(self, step: int, numbers: Mapping[str, float]) -> None:
        """Writes numbers only for TensorBoard, such as speeds, which differ from run to run."""
        if not self._active:
            return
        with clear_storage_errors(self.path.parent):
            for name, value in numbers.items():
                self._board.add(name, value, step)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Board:
    """Writes TensorBoard's event file in this thread: that of `SummaryWriter` dies of a full disk, and then all wait.

    Args:
      directory: must exist.
      first: TensorBoard discards what earlier files contain for this step and those after it.
    """

    def __init__(self, directory: Path, first: int):
        # Imported here, since it imports PyTorch if that is installed.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._event, self._scalar = Event, scalar
        self._events = EventsWriter(str(directory / "events"), f".{os.getpid()}")
        self._write(first, session_log=SessionLog(status=SessionLog.START))
        self._flush_at = 0.0

    def add(self, name: str, value: float, step: int) -> None:
        self._write(step, summary=self._scalar(name, value))
        if time.monotonic() >= self._flush_at:
            self._events.flush()
            self._flush_at = time.monotonic() + 10  # seconds, because it waits for the disk

    def close(self) -> None:
        self._events.close()

    def _write(self, step: int, **content: Any) -> None:
        self._events.write_event(self._event(wall_time=time.time(), step=step, **content))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`; none if there is no such file. A last line cut off by a kill is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)  # from bytes, because a kill may have cut a character in two
        except ValueError:
            break
        if not isinstance(row, dict):  # what is left of a line whose pages never reached the disk
            break
        rows.append(row)
    return rows
