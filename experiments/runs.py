"""What a run keeps in its folder of its data, and the run read back from there."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from cope_jax import tasks
from cope_jax.errors import ConfigError
from cope_jax.tasks import Task
from cope_jax.training.checkpoints import Checkpoints
from cope_jax.training.config import ExperimentConfig, JobConfig, MeshConfig
from cope_jax.training.learner import Learner, TrainState
from experiments.common import create_program
from experiments.workdir import read_settings, write_files


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A run read back from its workdir.

    Attributes:
      config: what it was trained with.
      seeds: of the runs side by side.
      step: of the newest checkpoint.
      state: the training state.
      params: of each seed.
    """

    config: ExperimentConfig
    task: Task
    learner: Learner
    seeds: Sequence[int]
    step: int
    state: TrainState
    params: list[Any]
    seconds: float


def check_sources(task: Task, workdir: Path, splits: Iterable[str]) -> None:
    """ConfigError if a run is to be measured on other data than those whose sources it keeps."""
    if task.same_sources(workdir, splits) is False:
        raise ConfigError(
            f"{', '.join(task.sources())} in {workdir} tells of other data than there are now, which the run goes by: "
            "restore its data"
        )


def keep_files(task: Task, workdir: Path) -> None:
    """Keeps with a run the artifacts and sources of its task.

    Raises:
      ConfigError: it keeps others, so that what it learned from has changed.
      StorageError: the disk is full or read-only.
    """
    if task.same_artifacts(workdir) is False:
        raise ConfigError(
            f"{' and '.join(task.artifacts())} in {workdir} is another than the data give now, which the run goes by: "
            "restore its data, or choose another --workdir"
        )
    missing = {name: content for name, content in task.artifacts().items() if not (workdir / name).exists()}
    write_files(workdir, missing | task.sources())


def check_alike(task: Task) -> None:
    """ConfigError in every process if one has other data than the first, on which it would train without a word."""
    if jax.process_count() == 1:
        return
    content = json.dumps(task.artifacts() | task.sources(), sort_keys=True).encode()
    digests = multihost_utils.process_allgather(np.frombuffer(hashlib.sha256(content).digest(), np.uint8))
    for process, digest in enumerate(digests):
        if (digest != digests[0]).any():
            raise ConfigError(
                f"process {process} has other data than process 0: give all of them the same, and for the standard "
                "library the same Python"
            )


def load_run(workdir: Path) -> LoadedRun:
    """Reads back the newest checkpoint of a training run.

    Raises:
      ConfigError: there is none.
    """
    if not (workdir / "config.json").exists() or not (workdir / "checkpoints").exists():
        raise ConfigError(
            f"{workdir} holds no training run: give the --workdir of experiments.train, or a cell of compare"
        )
    settings = read_settings(workdir)
    if "seeds" not in settings:
        raise ConfigError(f"{workdir} holds a comparison: give one of the folders in its cells/ENCODING")
    config = ExperimentConfig.from_mapping(settings["config"])
    config = dataclasses.replace(config, job=JobConfig(mesh=MeshConfig(data=1)))
    options = tasks.TASKS.get(config.task.name).with_artifacts(config.task.options, workdir)
    task = tasks.create(config.task.name, **options)
    program = create_program(config, task, len(settings["seeds"]), jax.local_devices()[:1])
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        restored = checkpoints.restore(program.state_shapes(), program.learner.model)
    if restored is None:
        raise ConfigError(f"{workdir} has no checkpoint yet: train it first")
    step, state, progress = restored
    params = program.replicas.unstack(state.params)
    return LoadedRun(config, task, program.learner, settings["seeds"], step, state, params, progress["seconds"])
