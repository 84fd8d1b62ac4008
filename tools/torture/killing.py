"""One start of a training command: at which moment it is killed, by which signal, and how it ends."""

import contextlib
import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from cope_jax.storage.bucket import Bucket
from tools.torture.tortured_config import get_config

ROOT = Path(__file__).parents[2]
TRAINING = get_config().training
PLACES = {
    "start": "before the first step",
    "checkpoint": "while a checkpoint was written",
    "evaluation": "during evaluation",
    "steps": "between",
    "write": "of an export",
}
# In turns, so that a few kills meet every moment too; most often the most delicate one.
MOMENTS = ("checkpoint", "any", "steps", "checkpoint", "evaluation")
# Of an export, which takes a second or two from the time when its folder is there.
MOMENTS_OF_EXPORTS = ("write", "any", "write")
PATIENCE = 600.0  # seconds after which a run that does not end hangs


class BrokenError(Exception):
    """A run did what no run may do; the message says what, in one line."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The moment and the way to kill.

    Attributes:
      moment: "any": `delay` seconds after the start; "write": after the workdir was first changed;
        else `delay` seconds after the run was first seen at that place, a key of `PLACES`.
      number: the signal.
      count: the how-manieth time, from 1.
      delay: seconds.
      process: which one of several has a SIGTERM; SIGKILL is for all, as where a job loses its
        machines.
    """

    moment: str
    number: signal.Signals
    count: int
    delay: float
    process: int = 0

    @classmethod
    def draw(
        cls,
        rng: random.Random,
        turn: int,
        duration: float,
        processes: int = 1,
        moments: Sequence[str] = MOMENTS,
    ) -> "Plan":
        """The plan of a turn; `duration` is that of a whole run, in seconds."""
        moment = moments[turn % len(moments)]
        longest = {"any": duration, "steps": 0.0, "write": 1.5}.get(moment, 0.03)
        number = rng.choice([signal.SIGKILL, signal.SIGTERM])
        count = rng.randint(1, 3 if moment == "checkpoint" else 1)
        return cls(moment, number, count, rng.uniform(0, longest), rng.randrange(processes))


@dataclasses.dataclass(frozen=True)
class Start:
    """The end of a start of the run: its exit status (minus the signal), after `seconds`.

    `signal` is the name of the one that killed it and `where` a key of `PLACES`; both None: it
    ended by itself.
    """

    signal: str | None
    where: str | None
    status: int
    seconds: float


class Watch:
    """A view of a start's runs on disk and in a bucket; made before the start.

    Of several runs, the one whose metrics were written last decides.

    Args:
      workdir: the workdir. If it is in a bucket, the folder of temporary files, where its mirror
        is.
      runs: the folders of the runs below that.
      bucket: the URL of the workdir.
    """

    def __init__(self, workdir: Path, runs: Sequence[str] = (".",), bucket: str | None = None):
        self._workdir, self._runs = workdir, runs
        self._buckets = (
            [] if bucket is None else [Bucket(f"{bucket}/{run}".removesuffix("/.")) for run in runs]
        )
        self.pause = 0.05 if self._buckets else 0.003  # to list objects costs the server time
        self._before, self._found = self._inodes(), self._written()
        self._sizes: dict[int, int] = {}

    def trains(self) -> bool:
        """True if this start trains: it has replaced the metrics by those it resumes from."""
        return not self._before >= self._inodes()

    def torn(self) -> bool:
        """True if there is a half written checkpoint."""
        for bucket in self._buckets:
            steps: dict[str, set[str]] = {}
            for name in bucket.names("checkpoints/"):
                _, step, below = name.split("/", 2)
                steps.setdefault(step, set()).add(below)
            if any(".complete" not in names for names in steps.values()):
                return True
        names = itertools.chain(*(path.parent.glob("checkpoints/*") for path in self._metrics()))
        return any(".orbax-checkpoint-tmp" in path.name for path in names)

    def place(self) -> str:
        """The progress of the runs, a key of `PLACES`; ask repeatedly, as it is seen by changes."""
        if not self._runs:
            return "start" if self._written() == self._found else "write"
        if not self.trains():
            return "start"
        (_, inode, size), path = max((self._stat(path), path) for path in self._metrics())
        first = self._sizes.setdefault(inode, size)
        if self.torn():  # a start removes what earlier ones left, before it trains
            return "checkpoint"
        if size == first:
            return "start"
        row = self._last_row(path)
        # The row of the training step is written, and that of the evaluation after it is not.
        trained = "step" in row and "split" not in row
        evaluates = trained and not row["step"] % TRAINING.evaluate_every
        return "evaluation" if evaluates else "steps"

    def finished(self) -> bool:
        """True if the last step of all runs is or may be done: a mirror is removed at the end."""
        if self._buckets and not any(path.exists() for path in self._metrics()):
            return True
        return bool(self._runs) and all(
            self._last_row(path).get("step", 0) >= TRAINING.steps for path in self._metrics()
        )

    def _metrics(self) -> list[Path]:
        folder = next(self._workdir.glob("cope_jax-mirror-*/files"), self._workdir)
        return [folder / run / "metrics.jsonl" for run in self._runs]

    def _written(self) -> set[tuple[str, int]]:
        """The files of an export, with their times."""
        with contextlib.suppress(FileNotFoundError):  # one has vanished since it was listed
            paths = [] if self._runs else [self._workdir, *self._workdir.rglob("*")]
            return {(str(path), path.stat().st_mtime_ns) for path in paths}
        return set()

    def _last_row(self, path: Path) -> dict:
        try:
            return json.loads(path.read_bytes().splitlines()[-1])
        except (FileNotFoundError, IndexError, ValueError):
            return {}  # there is none, or not the whole of it

    def _inodes(self) -> set[int]:
        return {0, *(self._stat(path)[1] for path in self._metrics())}

    def _stat(self, path: Path) -> tuple[int, int, int]:
        """Time, inode and size of metrics that this machine has written, else zeros: a mirror's
        copy has the time 0.
        """
        try:
            stat = path.stat()
        except FileNotFoundError:
            return 0, 0, 0
        return (stat.st_mtime_ns, stat.st_ino, stat.st_size) if stat.st_mtime_ns else (0, 0, 0)


def start(
    workdir: Path,
    commands: Sequence[list[str]],
    variables: dict[str, str],
    plan: Plan | None,
    runs: Sequence[str] = (".",),
    bucket: str | None = None,
) -> Start:
    """Starts the commands, each in a session of its own, kills them by the plan, if there is one,
    and sees them end.

    `runs` and `bucket` are as for `Watch`; in a bucket, each command has a folder for temporary
    files in `workdir`.

    Raises:
      BrokenError: one ended in another way than it should, or not at all.
    """
    began = time.monotonic()
    stderr = [workdir.with_suffix(f".{number}.stderr") for number in range(len(commands))]
    folders = [workdir / str(number) for number in range(len(commands))]
    if bucket is not None:
        shutil.rmtree(workdir, ignore_errors=True)
        for folder in folders:
            folder.mkdir(parents=True)
    watch = Watch(workdir if bucket is None else folders[0], runs, bucket)
    processes, where, trained, number = [], None, False, plan and plan.number
    try:
        for words, path, folder in zip(commands, stderr, folders, strict=True):
            environment = variables if bucket is None else {**variables, "TMPDIR": str(folder)}
            streams = {"stdout": subprocess.DEVNULL, "start_new_session": True}
            with path.open("wb") as errors:
                process = subprocess.Popen(
                    words, cwd=ROOT, env=environment, stderr=errors, **streams
                )
            processes.append(process)
        if plan is not None and _await(processes[0], watch, plan):
            trained, where = watch.trains(), watch.place()
            if not trained and len(processes) > 1:
                # Those that wait for a process that was stopped would wait for minutes.
                number = signal.SIGKILL
            if number == signal.SIGTERM:
                processes[plan.process].send_signal(number)
            else:
                _kill(processes)
        end = began + PATIENCE
        statuses = [process.wait(max(0.1, end - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        raise BrokenError(f"it hangs: no end after {PATIENCE:.0f} s") from None
    finally:
        _kill(processes)
    seconds = time.monotonic() - began
    if where is None:
        number, expected = None, {0}
    elif number == signal.SIGKILL:
        expected = {0, -signal.SIGKILL}
        where = "checkpoint" if watch.torn() and where != "start" else where
    elif trained and not watch.finished():
        expected = {128 + signal.SIGTERM}
    else:
        expected = {0, -signal.SIGTERM, 128 + signal.SIGTERM}
    for status, path in zip(statuses, stderr, strict=True):
        said = path.read_text(errors="replace")
        if status not in expected or "Traceback" in said:
            after = "" if number is None else f" after {number.name} ({where})"
            last = (said.strip().splitlines() or ["nothing on stderr"])[-1][-300:]
            right = " or ".join(map(str, sorted(expected)))
            raise BrokenError(f"status {status}{after}, not {right}: {last}")
    if number is None or not any(statuses):
        return Start(None, None, statuses[0], seconds)
    return Start(number.name, where, statuses[0], seconds)


def _kill(processes: Sequence[subprocess.Popen]) -> None:
    """Kills processes and those that they have started."""
    living = [process.pid for process in processes if process.poll() is None]
    for pid in living:  # longer with each round
        with contextlib.suppress(FileNotFoundError):
            living += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    for pid in living:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def _await(process: subprocess.Popen, watch: Watch, plan: Plan) -> bool:
    """Waits for the moment of the plan; False if the process ends before."""
    began, left, now, kill_at = time.monotonic(), plan.count, False, None
    while process.poll() is None:
        if time.monotonic() - began > PATIENCE:
            raise BrokenError(f"it hangs: no end after {PATIENCE:.0f} s")
        before, now = now, plan.moment in ("any", watch.place())
        left -= now and not before
        if left <= 0 and kill_at is None:
            kill_at = time.monotonic() + plan.delay
        if kill_at is not None and time.monotonic() >= kill_at:
            return True
        time.sleep(watch.pause)
    return False
