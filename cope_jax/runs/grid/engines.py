"""Engines that run cells: this machine, a Ray cluster, or jobs of Slurm.

An engine runs at most `slots` cells at a time. The state of a grid is on disk only, so a grid may
continue with another engine, and a lost engine loses only the work since the last checkpoints.
"""

import concurrent.futures
import contextlib
import importlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from cope_jax.attention.kernels.cpu import library
from cope_jax.errors import ConfigError
from cope_jax.runs.grid import claims
from cope_jax.runs.grid.cell_process import Job, run
from cope_jax.storage.mirror import Mirror

Waiting = concurrent.futures.Future[str | None]
"""A cell that an engine runs: the result of `run`; an exception means that the cell is lost."""


class Engine(Protocol):
    """Runs cells.

    Attributes:
      slots: the number of cells at a time.
      cores: the number of cores that the process of a cell claims; 0 leaves the choice to the
        system.
      devices: the number of GPUs that it claims; 0 if the engine gives the GPUs, or there are none.
    """

    slots: int
    cores: int
    devices: int

    def start(self, job: Job) -> Waiting:
        """Starts a cell."""

    def stop(self) -> None:
        """Asks all cells to save a checkpoint and to stop; asked again, to end at once."""

    def close(self) -> None:
        """Frees the engine, after all cells have ended."""


class Local:
    """Processes on this machine, each with its own cores, and GPUs if the cells need any.

    With cores=None, all cells have an equal share of the cores, however many of them train at the
    moment. So a cell that resumes has the same number of threads, and the same rounding.
    """

    def __init__(
        self,
        slots: int,
        cores: int | None = None,
        devices: int = 0,
        runner: Callable[..., str | None] = run,
    ):
        self.slots, self.devices, self._runner = slots, devices, runner
        self.cores = claims.cores() // slots if cores is None else cores
        self._stops = 0
        self._pool = concurrent.futures.ThreadPoolExecutor(slots)
        if not devices:
            # Compiles the C++ library once, so that all cells use it or none does.
            library.why_not()

    def start(self, job: Job) -> Waiting:
        return self._pool.submit(self._runner, job, lambda: self._stops)

    def stop(self) -> None:
        self._stops += 1

    def close(self) -> None:
        self._pool.shutdown()


class Ray:
    """Tasks of Ray, on the cluster at `address` or on this machine until the grid ends."""

    def __init__(
        self, slots: int, address: str | None, cores: int, devices: int, resources: dict[str, float]
    ):
        self._ray = _library("ray")
        # A Ray that starts here sends nothing to its makers.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
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
        self.slots, self.cores, self.devices = slots, cores, 0
        self._task = self._ray.remote(
            num_cpus=cores, num_gpus=devices, resources=resources, max_retries=0
        )(run)
        self._references: list[Any] = []

    def start(self, job: Job) -> Waiting:
        reference = self._task.remote(job)
        self._references.append(reference)
        return reference.future()

    def stop(self) -> None:
        for reference in self._references:
            with contextlib.suppress(Exception):  # it has ended, or the cluster is gone
                self._ray.cancel(reference, force=False)

    def close(self) -> None:
        self._ray.shutdown()


class Slurm:
    """Jobs of Slurm, by submitit; `cluster` is "slurm", or "local" for processes without Slurm."""

    def __init__(
        self,
        slots: int,
        folder: Path,
        cores: int,
        devices: int,
        options: dict[str, Any],
        cluster: str,
    ):
        if "%" in str(folder.absolute()):  # the path of a log is a pattern
            raise ConfigError(
                f"{folder} has a % in its path, which Slurm replaces: choose another --workdir"
            )
        submitit = _library("submitit")
        self.slots, self.cores, self.devices = slots, cores, 0
        gpu = {"gpus_per_node": devices} if devices else {}
        try:
            self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
            self._executor.update_parameters(cpus_per_task=cores, **gpu, **options)
        except (RuntimeError, ValueError, NameError, TypeError, AssertionError) as error:
            raise ConfigError(
                f"--engine=slurm does not work here ({str(error).splitlines()[0]})"
            ) from error
        self._jobs: list[Any] = []

    def start(self, job: Job) -> Waiting:
        self._jobs.append(self._executor.submit(run, job))
        return self._jobs[-1]

    def stop(self) -> None:
        for job in self._jobs:
            if not job.done():
                job.cancel(check=False)

    def close(self) -> None:
        pass


def choose(
    kind: str,
    workdir: Path,
    cores: int,
    devices: int,
    resources: Sequence[str] = (),
    address: str | None = None,
) -> Callable[[int], Engine]:
    """Checks what an engine is given, and returns a function that starts it with a number of slots.

    Args:
      kind: "local", "ray" or "slurm".
      workdir: the folder of the grid.
      cores: the number of cores of a cell.
      devices: the number of GPUs of a cell.
      resources: NAME=VALUE of what else a cell needs of Ray, or of options of submitit.
      address: of a Ray cluster; None starts Ray on this machine.
    """
    options = read_resources(resources)
    if kind == "local":
        if options or address:
            raise ConfigError(
                "--resources and --address are for --engine=ray and --engine=slurm: omit them"
            )
        if cores > claims.cores():
            raise ConfigError(
                f"a cell needs {cores} cores, but this machine shows {claims.cores()}: lower --cores"
            )
        default_slots(cores, devices)  # the machine may have too few GPUs
        return lambda slots: Local(slots, cores, devices)
    if mirror := Mirror.of(workdir):
        raise ConfigError(
            f"{mirror.bucket.url} is in a bucket: use --engine=local, or a folder that all machines share"
        )
    if kind == "slurm":
        cluster = str(options.pop("cluster", "slurm"))
        return lambda slots: Slurm(slots, workdir / "slurm", cores, devices, options, cluster)
    numbers = {name: value for name, value in options.items() if not isinstance(value, str)}
    if wrong := options.keys() - numbers.keys():
        raise ConfigError(f"--resources={min(wrong)}=… must be a number for Ray")
    return lambda slots: Ray(slots, address, cores, devices, numbers)


def read_resources(texts: Sequence[str]) -> dict[str, float | str]:
    """Reads NAME=VALUE of --resources.

    >>> read_resources(["TPU=4", "disk=0.5", "slurm_partition=gpu"])
    {'TPU': 4, 'disk': 0.5, 'slurm_partition': 'gpu'}
    """
    resources: dict[str, float | str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise ConfigError(f"--resources takes NAME=VALUE, not {text!r}")
        number = float(value) if re.fullmatch(r"-?[0-9]*\.?[0-9]+", value) else value
        resources[name] = int(value) if value.isdecimal() else number
    return resources


def default_slots(cores: int, devices: int) -> int:
    """The number of cells at a time on this machine: as GPUs allow, or else as cores allow.

    Raises:
      ConfigError: the machine has fewer GPUs than one cell needs.
    """
    if not devices:
        return max(1, claims.cores() // cores)
    shown = len(claims.gpus())
    if shown < devices:
        raise ConfigError(
            f"a cell needs {devices} GPUs, but this machine shows {shown}: lower --gpus"
        )
    return shown // devices


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name} is not installed: pip install 'cope-jax[sweep]'") from error
