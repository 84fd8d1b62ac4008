"""Where cells run: on this machine, on a Ray cluster, or as jobs of Slurm.

An engine runs at most `slots` cells at a time. The state of a grid is on disk only, so a grid may continue with another
engine, and a lost engine loses only the work since the last checkpoints.
"""

import concurrent.futures
import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from cope_jax.commands.sweep.one_cell import gpus
from cope_jax.commands.sweep.run import Job, run
from cope_jax.errors import ConfigError
from cope_jax.runs import workers


class Waiting(Protocol):
    """A cell that an engine runs: what concurrent.futures.Future promises."""

    def done(self) -> bool:
        """Whether the cell has ended."""

    def result(self) -> str | None:
        """What `run` returned. Any exception means that the engine lost the cell."""


class Engine(Protocol):
    """Runs cells."""

    slots: int

    def start(self, job: Job) -> Waiting:
        """Starts a cell."""

    def wait(self, started: Collection[Waiting], seconds: float) -> None:
        """Returns when a cell has ended, or after some time."""

    def stop(self) -> None:
        """Asks all cells to save a checkpoint and to stop."""

    def close(self) -> None:
        """Frees the engine, after all cells have ended."""


class Local:
    """Processes on this machine, each with its own cores, and GPUs if the cells need any."""

    def __init__(self, slots: int, runner: Callable[..., str | None] = run):
        self.slots, self._runner = slots, runner
        self._stopped = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(slots)

    def start(self, job: Job) -> Waiting:
        return self._pool.submit(self._runner, job, self._stopped.is_set)

    def wait(self, started: Collection[Any], seconds: float) -> None:
        concurrent.futures.wait(started, seconds, concurrent.futures.FIRST_COMPLETED)

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        self._pool.shutdown()


class Ray:
    """Tasks of Ray: of the cluster at `address`, or of a Ray that starts on this machine and ends with the grid."""

    def __init__(self, slots: int, address: str | None, cores: int, devices: int, resources: dict[str, float]):
        self._ray = _library("ray")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a Ray that starts here sends nothing to its makers
        try:
            self._ray.init(
                address=address or "local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"env_vars": {"PYTHONPATH": str(Path.cwd())}},
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"cannot connect to Ray at {address} ({str(error).splitlines()[0]}): check --address, and set "
                f"RAY_AUTH_MODE=token if the cluster has a token"
            ) from error
        self.slots = slots
        self._task = self._ray.remote(num_cpus=cores, num_gpus=devices, resources=resources, max_retries=0)(run)
        self._references: list[Any] = []

    def start(self, job: Job) -> Waiting:
        reference = self._task.remote(job)
        self._references.append(reference)
        return reference.future()

    def wait(self, started: Collection[Any], seconds: float) -> None:
        concurrent.futures.wait(started, seconds, concurrent.futures.FIRST_COMPLETED)

    def stop(self) -> None:
        for reference in self._references:
            with contextlib.suppress(Exception):  # it has ended, or the cluster is gone
                self._ray.cancel(reference, force=False)

    def close(self) -> None:
        self._ray.shutdown()


class Slurm:
    """Jobs of Slurm, by submitit; `cluster` is "slurm", or "local" for processes without Slurm, as in tests."""

    def __init__(self, slots: int, folder: Path, cores: int, devices: int, options: dict[str, Any], cluster: str):
        if "%" in str(folder.absolute()):  # the path of a log is a pattern
            raise ConfigError(f"{folder} has a % in its path, which Slurm replaces: choose another --workdir")
        submitit = _library("submitit")
        self.slots = slots
        gpu = {"gpus_per_node": devices} if devices else {}
        try:
            self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
            self._executor.update_parameters(cpus_per_task=cores, **gpu, **options)
        except (RuntimeError, ValueError, NameError, TypeError, AssertionError) as error:
            raise ConfigError(f"--engine=slurm does not work here ({str(error).splitlines()[0]})") from error
        self._jobs: list[Any] = []

    def start(self, job: Job) -> Waiting:
        self._jobs.append(self._executor.submit(run, job))
        return self._jobs[-1]

    def wait(self, started: Collection[Waiting], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not any(one.done() for one in started):
            time.sleep(0.2)

    def stop(self) -> None:
        for job in self._jobs:
            if not job.done():
                job.cancel(check=False)

    def close(self) -> None:
        pass


def default_slots(cores: int, devices: int) -> int:
    """How many cells run at a time on this machine: as many as GPUs allow, or else as cores allow.

    Raises:
      ConfigError: the machine has fewer GPUs than one cell needs.
    """
    if not devices:
        return max(1, workers.cores() // cores)
    found = len(gpus())
    if found < devices:
        raise ConfigError(f"a cell needs {devices} GPUs, but this machine shows {found}: lower --gpus")
    return found // devices


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name} is not installed: pip install -e '.[sweep]'") from error
