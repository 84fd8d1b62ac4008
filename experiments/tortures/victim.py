"""The run that is killed: a process of its own, and what can be seen of it on disk while it is at work."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cope_jax.errors import ConfigError
from cope_jax.training.config import MeshConfig
from cope_jax.training.metrics import read_metrics

ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).parent / "config.py"


def parse_mesh(text: str) -> dict[str, int]:
    """The axes of a mesh.

    >>> parse_mesh("fsdp=2+tensor=2")
    {'fsdp': 2, 'tensor': 2}

    Raises:
      ConfigError: not an axis, or not a number of devices.
    """
    mesh = {}
    for part in text.split("+"):
        axis, _, size = part.partition("=")
        if axis not in {field.name for field in dataclasses.fields(MeshConfig)} or not size.isdigit() or size == "0":
            raise ConfigError(f"--meshes: {part!r} is no axis and number of devices, as in fsdp=2+tensor=2")
        mesh[axis] = int(size)
    return mesh


@dataclasses.dataclass(frozen=True)
class Victim:
    """The run in one workdir.

    Attributes:
      workdir: of the run.
      mesh: devices along each axis.
      cache: a folder for compiled programs, which makes all starts but the first short.
    """

    workdir: Path
    mesh: Mapping[str, int]
    cache: Path

    @property
    def words(self) -> Path:
        """What the last start wrote on stderr."""
        return self.workdir.with_suffix(".stderr")

    def start(self) -> "subprocess.Popen[bytes]":
        """Starts the command, always the same; away from Ctrl-C, which is for the torturer alone."""
        axes = {"data": 1, **self.mesh}
        command = [sys.executable, "-m", "experiments.train", f"--config={CONFIG}", f"--workdir={self.workdir}"]
        command += [f"--config.job.mesh.{axis}={size}" for axis, size in axes.items()]
        devices = f"--xla_force_host_platform_device_count={math.prod(axes.values())}"
        environment = os.environ | {
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices}",
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        with self.words.open("wb") as words:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=words, start_new_session=True
            )


class Watch:
    """What a start of the run shows of itself.

    Args:
      workdir: of the run, before the start.
      evaluate_every: steps between points of the learning curves.
    """

    def __init__(self, workdir: Path, evaluate_every: int):
        self._workdir = workdir
        self._metrics = workdir / "metrics.jsonl"
        self._evaluate_every = evaluate_every
        self._before = self._stat()[0]
        self._size: int | None = None

    def trains(self) -> bool:
        """Whether this start has come to its steps: it has replaced the metrics by those it goes on from."""
        return self._stat()[0] not in (None, self._before)

    def stepped(self) -> bool:
        """Whether this start has done a step; to be asked again and again, for it is seen by what changes."""
        inode, size = self._stat()
        if self._size is None and inode not in (None, self._before):
            self._size = size
        return self._size is not None and size > self._size

    def writes(self) -> bool:
        """Whether a checkpoint is half written; a start removes what earlier ones left, before it trains."""
        return self.trains() and torn(self._workdir)

    def evaluates(self) -> bool:
        """Whether a point of the learning curves is being measured: the row before it is written, and it is not."""
        row = self._last_row() if self.stepped() else {}
        return "step" in row and "split" not in row and not row["step"] % self._evaluate_every

    def _last_row(self) -> dict[str, Any]:
        try:
            with self._metrics.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 1000))
                row: dict[str, Any] = json.loads(file.read().splitlines()[-1])
                return row
        except (FileNotFoundError, IndexError, ValueError):
            return {}  # there is none, or not the whole of it

    def finished(self, steps: int) -> bool:
        """Whether the last step is done."""
        return any(row["step"] >= steps for row in read_metrics(self._metrics))

    def _stat(self) -> tuple[int | None, int]:
        try:
            stat = self._metrics.stat()
        except FileNotFoundError:
            return None, 0
        return stat.st_ino, stat.st_size


def torn(workdir: Path) -> bool:
    """Whether there is a half written checkpoint."""
    try:
        return any(".orbax-checkpoint-tmp" in name for name in os.listdir(workdir / "checkpoints"))
    except FileNotFoundError:
        return False
