"""Checkpoints that hold everything needed to go on exactly."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from cope_jax.errors import ConfigError
from cope_jax.typing import PyTree


class Checkpoints:
    """The checkpoints of one run, in one directory; a context manager.

    Each holds `state`, the training state with its random key, and `progress`, plain data: the places of the data
    iterators and the seconds spent. Writing is atomic: a run killed while it writes finds the checkpoint before.

    Args:
      directory: is created.
      keep: how many of the newest to keep.
    """

    def __init__(self, directory: Path, keep: int = 2):
        self.directory = directory
        self._checkpointer = ocp.training.Checkpointer(
            directory.resolve(), preservation_policy=ocp.training.preservation_policies.LatestN(keep)
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self._checkpointer.close()

    def save(self, step: int, state: PyTree, progress: dict[str, Any]) -> None:
        """Writes the checkpoint of `step`, unless there is one."""
        if self.latest() != step:
            self._checkpointer.save_checkpointables(step, {"state": state, "progress": progress})

    def latest(self) -> int | None:
        """The step of the newest checkpoint; None if there is none."""
        return None if self._checkpointer.latest is None else self._checkpointer.latest.step

    def restore(self, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """The newest (state, progress); the state has the structure, shapes and types of `like`, on
        this process's first device whatever it was saved from.

        Raises:
          ConfigError: the checkpoint is damaged, or of another model.
        """
        step = self.latest()
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), like)
        try:
            with _without_stderr():
                loaded = self._checkpointer.load_checkpointables(step, {"state": like, "progress": None})
        except Exception as error:  # Orbax raises a different type for each way in which a file can be broken
            reason: BaseException = error
            while reason.__cause__ is not None:
                reason = reason.__cause__
            first = (str(reason).strip().splitlines() or [type(reason).__name__])[0]
            raise ConfigError(
                f"checkpoint {self.directory / str(step)} cannot be read ({first[:160]}): if it is damaged, "
                f"delete that folder to go on from an earlier one"
            ) from error
        return loaded["state"], loaded["progress"]


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Discards what is written to stderr, by C++ too.

    Beside the error that it raises, Orbax has each of its threads print a traceback for a file that cannot be read;
    those that are still at work get two seconds to do so.
    """
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    except BaseException:
        time.sleep(2)
        raise
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
