"""Metrics on disk: JSON lines for programs, TensorBoard for eyes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter


class MetricsWriter:
    """Appends rows to `metrics.jsonl` and their numbers to TensorBoard event files in the same directory.

    Each row has a `step`. Opening at a step drops the rows after it, so a continued run leaves neither gap nor double.

    Args:
      directory: is created.
      step: the step from which the run goes on; 0 starts anew.
    """

    def __init__(self, directory: Path, step: int):
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "metrics.jsonl"
        rows = [row for row in read_metrics(self.path) if row["step"] <= step]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
        partial.replace(self.path)
        self._file = self.path.open("a")
        self._board = SummaryWriter(str(directory), purge_step=step + 1)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._board.close()

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Appends rows; they are on disk when this returns."""
        for row in rows:
            self._file.write(json.dumps(row) + "\n")
            self._board_row(row)
        self._file.flush()

    def board(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers for TensorBoard alone, such as speeds, which differ from run to run."""
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)

    def _board_row(self, row: dict[str, Any]) -> None:
        labels = "/".join(str(value) for name, value in row.items() if isinstance(value, str))
        prefix = "/".join(part for part in (f"seed_{row['seed']}", labels) if part)
        self.board(
            row["step"],
            {f"{prefix}/{name}": value for name, value in row.items() if isinstance(value, float)},
        )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`; none if there is no such file. A last line cut off by a kill is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
