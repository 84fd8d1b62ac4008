"""What a run keeps in its folder of its data: what its task learned from them, and where they come from."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from cope_jax.errors import ConfigError
from cope_jax.runs.workdir import write_files
from cope_jax.tasks import Task


def check_sources(task: Task, workdir: Path, splits: Iterable[str]) -> None:
    """ConfigError if a run is to be measured on other data than those whose digest it keeps."""
    if task.same_data(workdir, splits) is False:
        raise ConfigError(
            f"the data are not those of the run in {workdir} ({', '.join(task.data_digest())} differs): restore the "
            "original files"
        )


def keep_files(task: Task, workdir: Path) -> None:
    """Keeps with a run the saved files of its task and the digest of its data.

    Raises:
      ConfigError: it keeps others, so that what it learned from has changed.
      StorageError: the disk is full or read-only.
    """
    if task.same_saved_files(workdir) is False:
        raise ConfigError(
            f"{' and '.join(task.saved_files())} in {workdir} differs from what the data give now; the run needs the "
            "original: restore its data, or choose another --workdir"
        )
    missing = {name: content for name, content in task.saved_files().items() if not (workdir / name).exists()}
    write_files(workdir, missing | task.data_digest())


def check_alike(task: Task) -> None:
    """ConfigError in every process if one has other data than the first, on which it would train without a word."""
    if jax.process_count() == 1:
        return
    content = json.dumps(task.saved_files() | task.data_digest(), sort_keys=True).encode()
    digests = multihost_utils.process_allgather(np.frombuffer(hashlib.sha256(content).digest(), np.uint8))
    for process, digest in enumerate(digests):
        if (digest != digests[0]).any():
            raise ConfigError(
                f"process {process} has other data than process 0: give all of them the same, and for the standard "
                "library the same Python"
            )
