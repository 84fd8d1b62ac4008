"""Trains runs at the same time, each in a process of its own on its share of the cores."""

import collections
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from cope_jax.attention.kernels.cpu import library
from cope_jax.errors import ConfigError, NonFiniteError, StorageError, storage_reason
from cope_jax.progress import Progress
from cope_jax.runs.experiment import Experiment
from cope_jax.runs.workdir import Workdir
from cope_jax.training.experiment_config import ExperimentConfig
from cope_jax.training.preemption import GracefulStop, Interrupted

KNOWN = (ConfigError, NonFiniteError, StorageError, Interrupted)
"""Exceptions that a worker passes on as they are."""


@dataclasses.dataclass(frozen=True)
class Work:
    """The arguments of one `Experiment.train`, with its config; `name` tells the runs apart in one line each."""

    config: ExperimentConfig
    seeds: tuple[int, ...]
    workdir: Path
    name: str
    label: str
    fields: dict[str, Any]
    environment: dict[str, Any]


def train(works: Sequence[Work], jobs: int, finished: Callable[[], None]) -> None:
    """Trains all runs, at most `jobs` at a time, and shows the progress of all; calls `finished` after each run.

    Each run has the same share of the cores, however many others train at the moment. So an interrupted run continues
    with the same numbers. After a signal or the first error, the other runs save a checkpoint and stop.

    Raises:
      Interrupted: Ctrl-C or SIGTERM stopped the runs.
      Exception: the error of the first run that failed.
    """
    waiting = collections.deque(works)
    free = collections.deque(cores_of(jobs))
    active: list[_Worker] = []
    error: Exception | None = None
    stopped = 0  # the number of a signal that stopped a run
    library.why_not()  # compiles the C++ library once, so that all runs use it or none does
    with GracefulStop() as stop, contextlib.ExitStack() as stack:
        stack.callback(_kill, active)  # after a second Ctrl-C or a defect
        asked = False
        while active or (waiting and not asked):
            while waiting and free and not asked:
                active.append(_Worker(waiting.popleft(), free.popleft()))
            connection.wait([worker.messages for worker in active], timeout=0.2)
            for worker in list(active):
                if not worker.receive():
                    continue
                active.remove(worker)
                free.append(worker.cores)
                try:
                    worker.end()
                    finished()
                except Interrupted as interrupted:
                    stopped = interrupted.exit_code - 128
                except Exception as failure:
                    error = error or failure
            if not asked and (stop.number is not None or error is not None):
                asked = True
                for worker in active:
                    worker.stop()
    if error is not None:
        raise error
    if waiting or stopped:
        raise Interrupted("stopped; rerun the same command to resume", stop.number or stopped or signal.SIGINT)


def _kill(active: Sequence["_Worker"]) -> None:
    for worker in active:
        worker.kill()


def cores_of(jobs: int) -> list[list[int]]:
    """The cores of each of `jobs` workers, in equal shares; empty shares mean all cores."""
    known = sorted(os.sched_getaffinity(0))[: cores()] if hasattr(os, "sched_getaffinity") else []
    if jobs > len(known):
        return [[] for _ in range(jobs)]
    size = len(known) // jobs
    return [known[n * size : (n + 1) * size] for n in range(jobs)]


def cores() -> int:
    """The number of cores that this process may use; 1 if a process cannot be bound to cores, as on macOS.

    A container may also limit the time on all cores (cgroups' cpu.max).
    """
    if not hasattr(os, "sched_getaffinity"):
        return 1
    found = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return found if quota == "max" else max(1, min(found, int(quota) // int(period)))
    except (OSError, ValueError):
        return found


class _Worker:
    """A process that trains one run, and its progress on our stderr."""

    def __init__(self, work: Work, cores: list[int]):
        self.work, self.cores = work, cores
        self._stopped = False
        self._error: Exception | None = None
        self._bars = contextlib.ExitStack()
        self._bar: Progress | None = None
        self._log = tempfile.TemporaryFile()  # without a name, so that it never stays
        self.messages, theirs = multiprocessing.Pipe(duplex=False)
        log = connection.Connection(os.dup(self._log.fileno()), readable=False)  # such an object can be passed on
        context = multiprocessing.get_context("spawn")  # a copy of a process in which JAX runs would hang
        self._process = context.Process(target=_work, args=(work, cores, theirs, log))
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker inherits this until it has its own session
        try:
            self._process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        theirs.close()
        log.close()

    def receive(self) -> bool:
        """Shows what the process has sent since the last call. Returns whether the process has ended."""
        while True:
            try:
                if not self.messages.poll():
                    return False
                name, args, options = self.messages.recv()
            except (EOFError, OSError):
                return True
            if name == "error":
                self._error = args[0]
            elif name == "begin":
                self._bar = self._bars.enter_context(Progress(*args, **options, label=self.work.name))
            elif name == "end":
                self._bars.close()
            elif self._bar is not None and name == "write":
                line = args[0] if args[0].startswith(self.work.label) else f"{self.work.name}: {args[0]}"
                self._bar.write(line)
            elif self._bar is not None:
                getattr(self._bar, name)(*args)

    def stop(self) -> None:
        """Asks the process to save a checkpoint and stop."""
        self._stopped = True
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()
        self._bars.close()

    def end(self) -> None:
        """Waits for the process, and raises its error if it has failed."""
        self._process.join()
        self._bars.close()
        with self._log:
            self._log.seek(-min(4096, os.fstat(self._log.fileno()).st_size), os.SEEK_END)
            last = (self._log.read().decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
        if self._error is not None:
            raise self._error
        status = self._process.exitcode
        # A signal to all processes, as from `timeout`, may end this one before it handles signals.
        if status in (-signal.SIGTERM, -signal.SIGINT) or (status and self._stopped):
            raise Interrupted("stopped; rerun the same command to resume", signal.SIGTERM)
        if status:
            ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            raise RuntimeError(f"the process that trains {self.work.name} {ended} ({last}): rerun with --jobs=1")


def _work(work: Work, cores: list[int], messages: connection.Connection, log: connection.Connection) -> None:
    """Runs in the worker."""
    os.setsid()  # Ctrl-C on the terminal reaches only the process that started this one, which then asks us to stop
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        experiment = Experiment(work.config, Workdir(work.workdir).create_task(work.config))
        experiment.train(
            work.workdir,
            work.seeds,
            label=work.label,
            fields=work.fields,
            environment=work.environment,
            progress=functools.partial(_Told, messages),
        )
    except KNOWN as error:
        messages.send(("error", (error,), {}))
    except Exception as error:
        reason = storage_reason(error)
        text = "".join(traceback.format_exception(error))
        messages.send(("error", (StorageError.of(work.workdir, reason) if reason else RuntimeError(text),), {}))
    messages.close()
    sys.stdout.flush()
    sys.stderr.flush()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # a run may end at any moment and resume later


class _Told(Progress):
    """Tells another process what to show: see `Progress`."""

    def __init__(self, messages: connection.Connection, *args: Any, **options: Any):
        super().__init__(*args, **options | {"active": False})
        self._messages = messages
        self._send("begin", *args, **options)

    def __exit__(self, *exception: object) -> None:
        self._send("end")

    def advance(self, amount: float, note: str = "") -> None:
        self._send("advance", amount, note)

    def compiling(self) -> None:
        self._send("compiling")

    def start_clock(self, amount: float = 0, note: str = "") -> None:
        self._send("start_clock", amount, note)

    def write(self, line: str) -> None:
        self._send("write", line)

    def _send(self, name: str, *args: Any, **options: Any) -> None:
        with contextlib.suppress(OSError):  # the other process is gone, and this one will end
            self._messages.send((name, args, options))
