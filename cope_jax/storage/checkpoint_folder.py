"""Checkpoints on a disk: a folder for each step, written and read by Orbax."""

import contextlib
import gc
import itertools
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from cope_jax.array_types import PyTree
from cope_jax.errors import ConfigError, clear_storage_errors
from cope_jax.storage.checkpoint_io import step_of

_UNFINISHED = ".orbax-checkpoint-tmp"
"""Orbax puts this text into the name of a folder until the folder is completely written."""


class CheckpointFolder:
    """The checkpoints in a folder that all processes share; see `CheckpointStore` for the methods.

    Args:
      directory: the folder, created if missing.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._context = ocp.Context()
        # If a thread fails to create a folder on a full disk, others would wait for it for twenty
        # minutes.
        self._context.asynchronous.create_directories_asynchronously = False
        directory.mkdir(parents=True, exist_ok=True)
        self._named, self._link = directory.resolve(), contextlib.ExitStack()
        if _is_pattern(self._named):
            self._named = self._link.enter_context(_linked(self._named))

    def steps(self) -> list[int]:
        steps = (step_of(path.name) for path in self._directory.iterdir() if path.is_dir())
        return [step for step in steps if step is not None]

    def remove_unfinished(self) -> None:
        for half_written in self._directory.glob(f"*{_UNFINISHED}*"):
            shutil.rmtree(half_written)

    def name(self, step: int) -> str:
        return str(self._directory / str(step))

    def exists(self, step: int) -> bool:
        return (self._directory / str(step)).exists()

    def save(
        self, step: int, state: PyTree, progress: dict[str, Any], label: dict[str, Any]
    ) -> Any:
        with self._context:
            content = {"state": state, "progress": progress}
            folder = self._named / str(step)
            return ocp.save_checkpointables_async(folder, content, custom_metadata=label)

    def close(self) -> None:
        self._link.close()

    def label(self, step: int) -> Any:
        with _alone():
            return ocp.checkpointables_metadata(self._named / str(step)).custom_metadata

    def load(self, step: int, like: PyTree, partial: bool) -> tuple[PyTree, dict[str, Any]]:
        with _alone(partial):
            wanted = {"state": like, "progress": None}
            loaded = ocp.load_checkpointables(self._named / str(step), wanted)
            return loaded["state"], loaded["progress"]

    def remove(self, step: int) -> None:
        # Renamed first, so that no checkpoint is ever incomplete.
        folder = self._directory / str(step)
        shutil.rmtree(folder.rename(folder.with_name(f"{step}{_UNFINISHED}-removed")))

    def put_aside(self, step: int) -> str:
        target = _unused(self._directory.with_name(f"{self._directory.name}-damaged") / str(step))
        with clear_storage_errors(target):
            target.parent.mkdir(exist_ok=True)
            (self._directory / str(step)).rename(target)
        return f"moved to {target}"


def _is_pattern(path: Path) -> bool:
    r"""True for a path that Orbax would take for a pattern, or would change because of `\`."""
    return bool(re.search(r"[*?[\\\udc80-\udcff]", str(path)))


@contextlib.contextmanager
def _linked(folder: Path) -> Iterator[Path]:
    """Yields another path to a folder, by a symbolic link: one that Orbax uses as a name."""
    if jax.process_count() > 1:
        raise ConfigError(
            f"{folder} has a sign of a pattern in its path: rename it for a run of several processes"
        )
    with tempfile.TemporaryDirectory(prefix="cope_jax-link-") as above:
        link = Path(above).resolve() / "checkpoints"
        if _is_pattern(link):
            raise ConfigError(
                f"{above} has a sign of a pattern in its path: set TMPDIR to another folder"
            )
        link.symlink_to(folder)
        yield link


@contextlib.contextmanager
def _alone(partial: bool = False) -> Iterator[None]:
    """Reads alone: at Orbax's barriers, others would wait for a process that has failed."""
    context, here = ocp.Context(), jax.process_index()
    context.multiprocessing.primary_host = here
    context.multiprocessing.active_processes = {here}
    context.pytree.loading.partial_load = partial
    with context:
        try:
            yield
        except Exception:
            time.sleep(2)  # other threads still read arrays, and their errors must not reach stderr
            gc.collect()
            raise


def _unused(path: Path) -> Path:
    further = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(free for free in itertools.chain([path], further) if not free.exists())
