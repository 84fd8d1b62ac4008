"""One start of the training command: at which moment it is killed, by which signal, and how it ends."""

import dataclasses
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.torture.tortured_config import get_config

ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).with_name("tortured_config.py")
TRAINING = get_config().training
PLACES = {
    "start": "before the first step",
    "checkpoint": "while a checkpoint was written",
    "evaluation": "during evaluation",
    "steps": "between",
}
# In turns, so that a few kills meet every moment too; most often the most delicate one.
MOMENTS = ("checkpoint", "any", "steps", "checkpoint", "evaluation")
PATIENCE = 600.0  # seconds after which a run that does not end hangs


class BrokenError(Exception):
    """A run did what no run may do; the message says what, in one line."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """When and how to kill.

    Attributes:
      moment: "any": `delay` seconds after the start; else `delay` seconds after the run was first seen at that place, a
        key of `PLACES`.
      number: the signal.
      count: the how-manieth time, from 1.
      delay: seconds.
    """

    moment: str
    number: signal.Signals
    count: int
    delay: float

    @classmethod
    def draw(cls, rng: random.Random, turn: int, duration: float) -> "Plan":
        """The plan of a turn; `duration` is that of a whole run, in seconds."""
        moment = MOMENTS[turn % len(MOMENTS)]
        longest = {"any": duration, "steps": 0.0}.get(moment, 0.03)
        number = rng.choice([signal.SIGKILL, signal.SIGTERM])
        return cls(moment, number, rng.randint(1, 3 if moment == "checkpoint" else 1), rng.uniform(0, longest))


@dataclasses.dataclass(frozen=True)
class Start:
    """How a start of the run ended: its exit status (minus the signal), after `seconds`.

    `signal` is the name of the one that killed it and `where` a key of `PLACES`; both None: it ended by itself.
    """

    signal: str | None
    where: str | None
    status: int
    seconds: float


class Watch:
    """What a start of the run shows of itself on disk; made before the start.

    A run in a bucket works in a local mirror, which is found in `workdir` if this is the folder of temporary files.
    """

    def __init__(self, workdir: Path):
        self._workdir = workdir
        self._before = self._stat()[0]
        self._size: int | None = None

    def trains(self) -> bool:
        """Whether this start has come to its steps: it has replaced the metrics by those it resumes from."""
        return self._stat()[0] not in (None, self._before)

    def torn(self) -> bool:
        """Whether there is a half written checkpoint."""
        try:
            return any(".orbax-checkpoint-tmp" in name for name in os.listdir(self._folder() / "checkpoints"))
        except FileNotFoundError:
            return False

    def place(self) -> str:
        """Where the run is, a key of `PLACES`; to be asked again and again, for it is seen by what changes."""
        inode, size = self._stat()
        if inode in (None, self._before):
            return "start"
        self._size = size if self._size is None else self._size
        if self.torn():  # a start removes what earlier ones left, before it trains
            return "checkpoint"
        if size == self._size:
            return "start"
        row = self._last_row()
        # The row of the training step is written, and that of the evaluation after it is not.
        at_evaluation = "step" in row and "split" not in row and not row["step"] % TRAINING.evaluate_every
        return "evaluation" if at_evaluation else "steps"

    def finished(self) -> bool:
        """Whether the last step is done, or may be: a mirror is removed at the end."""
        return not (self._folder() / "metrics.jsonl").exists() or self._last_row().get("step", 0) >= TRAINING.steps

    def _folder(self) -> Path:
        return next(self._workdir.glob("cope_jax-mirror-*/files"), self._workdir)

    def _last_row(self) -> dict:
        try:
            return json.loads((self._folder() / "metrics.jsonl").read_bytes().splitlines()[-1])
        except (FileNotFoundError, IndexError, ValueError):
            return {}  # there is none, or not the whole of it

    def _stat(self) -> tuple[int | None, int]:
        try:
            stat = (self._folder() / "metrics.jsonl").stat()
        except FileNotFoundError:
            return None, 0
        return stat.st_ino if stat.st_mtime_ns else None, stat.st_size  # a mirror's copy has the time 0


def command(workdir: Path | str, mesh: dict[str, int]) -> list[str]:
    """The training command, always the same."""
    axes = [f"--config.job.mesh.{axis}={size}" for axis, size in {"data": 1, **mesh}.items()]
    return [sys.executable, "-m", "experiments.train", f"--config={CONFIG}", f"--workdir={workdir}", *axes]


def environment(mesh: dict[str, int], cache: Path) -> dict[str, str]:
    """As many fake devices as the mesh needs, and a folder for compiled programs, which makes later starts short."""
    devices = f"--xla_force_host_platform_device_count={math.prod(mesh.values())}"
    return os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices}",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def start(workdir: Path, words: list[str], variables: dict[str, str], plan: Plan | None) -> Start:
    """Starts the command `words` in a session of its own, kills it by the plan, if there is one, and sees it end.

    Raises:
      BrokenError: it ended in another way than it should, or not at all.
    """
    began, watch, stderr = time.monotonic(), Watch(workdir), workdir.with_suffix(".stderr")
    with stderr.open("wb") as errors:
        process = subprocess.Popen(
            words, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
    try:
        where, trained = None, False
        if plan is not None and _await(process, watch, plan):
            trained, where = watch.trains(), watch.place()
            process.send_signal(plan.number)
        try:
            status = process.wait(max(0.1, PATIENCE - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            raise BrokenError(f"it hangs: no end after {PATIENCE:.0f} s") from None
    finally:
        process.kill()
        process.wait()
    seconds = time.monotonic() - began
    if plan is None or where is None:
        expected = {0}
    elif plan.number == signal.SIGKILL:
        expected = {0, -signal.SIGKILL}
        where = "checkpoint" if watch.torn() and where != "start" else where
    elif trained and not watch.finished():
        expected = {128 + signal.SIGTERM}
    else:
        expected = {0, -signal.SIGTERM, 128 + signal.SIGTERM}
    said = stderr.read_text(errors="replace")
    if status not in expected or "Traceback" in said:
        after = f" after {plan.number.name} ({where})" if plan is not None and where is not None else ""
        last = (said.strip().splitlines() or ["nothing on stderr"])[-1][-300:]
        raise BrokenError(f"status {status}{after}, not {' or '.join(map(str, sorted(expected)))}: {last}")
    killed = plan is not None and where is not None and status != 0
    return Start(plan.number.name if killed else None, where if killed else None, status, seconds)


def _await(process: subprocess.Popen, watch: Watch, plan: Plan) -> bool:
    """Waits for the moment of the plan; False if the process ends before."""
    began, left, now, kill_at = time.monotonic(), plan.count, False, None
    while process.poll() is None:
        if time.monotonic() - began > PATIENCE:
            raise BrokenError(f"it hangs: no end after {PATIENCE:.0f} s")
        before, now = now, watch.place() == plan.moment or plan.moment == "any"
        left -= now and not before
        if left <= 0 and kill_at is None:
            kill_at = time.monotonic() + plan.delay
        if kill_at is not None and time.monotonic() >= kill_at:
            return True
        time.sleep(0.003)
    return False
