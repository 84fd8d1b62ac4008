"""Writes metrics as JSON lines and TensorBoard events, and shows them as text with their units."""

import contextlib
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cope_jax.errors import StorageError, clear_storage_errors
from cope_jax.storage.files import parse_json, read_lines, replacing
from cope_jax.training import trackers


@dataclasses.dataclass(frozen=True)
class Unit:
    """The format in which values of a metric are shown."""

    scale: float  # what a value is multiplied by
    symbol: str  # "%" or nothing
    # The highest possible value, which limits the axis of plots; None if unbounded.
    highest: float | None
    decimals: int  # number of decimals in a column that has a shown value of 1 or more

    def suffix(self, separator: str) -> str:
        """Returns the separator and the symbol after it, or "" if there is no symbol.

        >>> SHARE.suffix(" in "), PLAIN.suffix(" in ")
        (' in %', '')
        """
        return separator + self.symbol if self.symbol else ""

    def places(self, shown: Iterable[float]) -> int:
        """The decimals of a column of shown values; columns of small values have more.

        >>> SHARE.places([0.0, 99.4]), SHARE.places([0.0, 0.25]), SHARE.places([0.004])
        (1, 2, 3)
        """
        greatest = max((abs(value) for value in shown if math.isfinite(value)), default=0.0)
        more = 0 if greatest == 0 or greatest >= 1 else 1 if greatest >= 0.01 else 2
        return self.decimals + more


SHARE = Unit(100.0, "%", 100.0, 1)
RATIO = Unit(100.0, "%", None, 1)  # of another error, so it may be above 100 %
PLAIN = Unit(1.0, "", None, 2)


def unit_of(metric: str) -> Unit:
    """The unit of a metric: errors are shares in per cent, losses and perplexities plain numbers.

    >>> unit_of("token_error").symbol, unit_of("perplexity").symbol
    ('%', '')
    """
    if metric.startswith("normalised"):
        return RATIO
    return SHARE if metric.endswith("error") else PLAIN


def headline(rows: Iterable[Mapping[str, Any]], metric: str) -> str:
    """One metric of an evaluation as text: for each split, the mean over seeds.

    >>> rows = [{"seed": seed, "split": "dense", "token_error": 0.25 * seed} for seed in (0, 1)]
    >>> headline(rows[1:], "token_error"), headline(rows, "token_error")
    ('token error dense 25.0 %', 'token error dense 12.5 % (mean of 2 seeds)')
    """
    unit = unit_of(metric)
    by_split: dict[str, list[float]] = {}
    for row in rows:
        by_split.setdefault(row["split"], []).append(unit.scale * row.get(metric, math.nan))
    means = {split: sum(values) / len(values) for split, values in by_split.items()}
    places = unit.places(means.values())
    shown = (f"{split} {mean:,.{places}f}{unit.suffix(' ')}" for split, mean in means.items())
    seeds = max(map(len, by_split.values()), default=0)
    mean = f" (mean of {seeds} seeds)" if seeds > 1 else ""
    return f"{metric.replace('_', ' ')} {', '.join(shown)}{mean}"


class MetricsWriter:
    """Appends rows to `metrics.jsonl`, and numbers to TensorBoard event files or another tracker.

    Each row has a `step`. Opening at a step drops the rows after this step, so a resumed run leaves
    no gap and no duplicate. Event files have the same tags for every seed, so that TensorBoard
    overlays the seeds. If there are several seeds, the numbers of each seed are in a subfolder
    `seed_N`.

    Args:
      directory: created if missing.
      step: the step from which the run resumes; 0 starts from scratch.
      seeds: the seeds of the rows.
      config: settings that TensorBoard shows as JSON; they are written at step 0.
      active: False writes nothing, as in all processes except the first.
      tracker: what gets the numbers: "tensorboard" (event files), "wandb", "trackio", or "none".

    Raises:
      StorageError: the disk is full or read-only. Every method raises this error too.
      ConfigError: the package of the tracker is not installed.
    """

    def __init__(
        self,
        directory: Path,
        step: int,
        seeds: Sequence[int] = (0,),
        config: Any = None,
        active: bool = True,
        tracker: str = trackers.TENSORBOARD,
    ):
        trackers.package(tracker)
        self.path = directory / "metrics.jsonl"
        self._active = active
        if not active:
            return
        with clear_storage_errors(self.path):
            last = 0
            with replacing(self.path) as partial, partial.open("wb") as file:
                for line, row in _rows(self.path):
                    if row["step"] <= step:
                        file.write(line.rstrip(b"\n") + b"\n")
                        last = row["step"]
                file.flush()
                os.fsync(file.fileno())
            # No kill can cause this, because the rows are on disk before the checkpoint.
            if last < step:
                lost = (
                    f"the rows of steps {last + 1} to {step} are lost; training resumes after them"
                )
                print(f"warning: {self.path} was cut or removed: {lost}", file=sys.stderr)
            self._file = self.path.open("a", encoding="utf-8")
            # Labels tell the seeds of a tracker apart.
            self._labels = {seed: [f"seed_{seed}"] for seed in seeds if len(seeds) > 1}
            self._board: Any
            if tracker == trackers.TENSORBOARD:
                self._board = _Board(directory, step + 1)
                several = {s: _Board(directory / f"seed_{s}", step + 1) for s in self._labels}
                self._boards = several or dict.fromkeys(seeds, self._board)
                self._labels = {}
                if config is not None and step == 0:
                    self._board.add_text("config", f"```json\n{json.dumps(config, indent=1)}\n```")
            else:
                self._board = trackers.Tracker(tracker, directory, step, config)
                self._boards = dict.fromkeys(seeds, self._board)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._active:
            with clear_storage_errors(self.path), contextlib.ExitStack() as stack:
                for board in {self._board, *self._boards.values()}:
                    stack.callback(board.close)
                self._file.close()

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Appends rows, which survive a crash of the process, and after `sync` of the machine."""
        if not self._active:
            return
        with clear_storage_errors(self.path):
            # JSON does not have NaN: a number that is not finite is null.
            rows = [{name: _finite(value) for name, value in row.items()} for row in rows]
            self._file.write("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
            self._file.flush()
        with clear_storage_errors(self.path.parent):
            for row in rows:
                texts = [value for value in row.values() if isinstance(value, str) and value]
                labels = [*self._labels.get(row["seed"], ()), *texts]
                for name, value in row.items():
                    if isinstance(value, float):
                        self._boards[row["seed"]].add("/".join([*labels, name]), value, row["step"])

    def sync(self) -> None:
        """Waits until all rows are on disk. Call this before saving a checkpoint that needs them.

        Raises:
          StorageError: the file is no longer in its folder, because someone has moved or removed
            the folder.
        """
        if self._active:
            with clear_storage_errors(self.path):
                os.fsync(self._file.fileno())
            if not self.path.exists():
                raise StorageError(
                    f"{self.path.parent} was moved or removed during training: start again"
                )

    def board(self, step: int, numbers: Mapping[str, float]) -> None:
        """Writes numbers that differ from run to run, such as speeds, to the tracker only."""
        if not self._active:
            return
        with clear_storage_errors(self.path.parent):
            for name, value in numbers.items():
                self._board.add(name, value, step)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Board:
    """Writes TensorBoard's event file in the calling thread.

    `SummaryWriter` writes in its own thread. On a full disk, this thread dies, and all others wait
    for it forever.

    Args:
      directory: created if missing.
      first: the first step of this file; TensorBoard discards this step and later steps of earlier
        files.
    """

    def __init__(self, directory: Path, first: int):
        # Only for graphs of models would it need PyTorch, whose import takes more than a second.
        with _hidden("torch"):
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog
            from tensorboardX.summary import scalar, text

        directory.mkdir(parents=True, exist_ok=True)
        self._event, self._scalar, self._text = Event, scalar, text
        self._events = EventsWriter(str(directory / "events"), f".{os.getpid()}")
        self._write(first, session_log=SessionLog(status=SessionLog.START))
        self._flush_at = 0.0

    def add(self, name: str, value: float, step: int) -> None:
        self._write(step, summary=self._scalar(name, value))
        if time.monotonic() >= self._flush_at:
            self._events.flush()
            self._flush_at = time.monotonic() + 10  # seconds, because it waits for the disk

    def add_text(self, name: str, markdown: str) -> None:
        self._write(0, summary=self._text(name, markdown))

    def close(self) -> None:
        self._events.close()

    def _write(self, step: int, **content: Any) -> None:
        self._events.write_event(self._event(wall_time=time.time(), step=step, **content))


@contextlib.contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Lets the imports in it find no such module, unless it is imported already."""
    absent = module not in sys.modules
    if absent:
        sys.modules[module] = None  # type: ignore[assignment]  # an import then fails
    try:
        yield
    finally:
        if absent:
            del sys.modules[module]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of a `metrics.jsonl`, without an unfinished last line; [] without a file."""
    return [row for _, row in _rows(path)]


def read_curves(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of evaluations in `metrics.jsonl`, one at a time: others may be millions."""
    return (row for _, row in _rows(path) if "split" in row)


def _rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines and rows of a `metrics.jsonl`, one at a time, up to the first that is damaged."""
    for line in read_lines(path) if path.exists() else ():
        try:
            row = parse_json(line)  # from bytes, because a kill may have cut a character in two
        except ValueError:
            return
        # Its pages never reached the disk.
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            return
        yield line, row
