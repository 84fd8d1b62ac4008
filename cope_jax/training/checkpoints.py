"""Checkpoints that hold everything needed to go on exactly."""

import contextlib
import dataclasses
import gc
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from cope_jax.errors import ConfigError, clear_storage_errors
from cope_jax.typing import PyTree


class Checkpoints:
    """The checkpoints of one run, in one directory; a context manager, which waits for the last to be written.

    Each holds `state`, the training state with its random key, and `progress`, plain data: the places of the data
    iterators and the seconds spent. Writing is atomic: a run killed while it writes finds the checkpoint before.
    With several processes all of them make the same calls, on a directory that they share.

    Args:
      directory: is created.
      keep: how many of the newest to keep, at least 1.
      keep_best: how many of those with the lowest scores to keep beside them.
      read_only: nothing is moved or removed, for the run may be at work.

    Raises:
      StorageError: here and from every method, for the disk is full or read-only; also where a write that was begun
        by an earlier call has failed.
    """

    def __init__(self, directory: Path, keep: int = 2, keep_best: int = 0, read_only: bool = False):
        self.directory = directory
        self._read_only = read_only
        self._retention = _Retention(keep, keep_best, {})
        self._writing: Any = None
        with clear_storage_errors(directory), _without_stderr():
            self._checkpointer = ocp.training.Checkpointer(
                directory.resolve(),
                preservation_policy=self._retention,
                cleanup_tmp_directories=not read_only,
            )
        if keep_best:
            self._retention.scores.update(_scores(directory, self.steps()))

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def save(self, step: int, state: PyTree, progress: dict[str, Any], score: float | None = None) -> None:
        """Begins to write the checkpoint of `step`, unless there is one.

        When this returns, the state has been copied and may be donated. If the checkpoint before is still being
        written, that is waited for.

        Args:
          step: number of steps done.
          state: arrays.
          progress: plain data, as JSON has it.
          score: lower is better; None, or not finite, for a checkpoint that only counts as one of the newest.
        """
        self.wait()
        if step in self.steps():
            return
        if score is not None and math.isfinite(score):
            self._retention.scores[step] = score
        with clear_storage_errors(self.directory / str(step)), jax.transfer_guard("allow"):
            self._writing = self._checkpointer.save_checkpointables_async(
                step,
                {"state": state, "progress": progress},
                force=True,  # the loop decides when
                custom_metadata={"score": self._retention.scores.get(step)},
            )

    def wait(self) -> None:
        """Returns when nothing is being written any more; raises the error of a write that failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            with clear_storage_errors(self.directory):
                writing.result()

    def close(self) -> None:
        """Waits as `wait` does, and ends the threads."""
        try:
            self.wait()
        finally:
            # That thread has raised its error once, above; here it would take the place of the first.
            with contextlib.suppress(Exception):
                self._checkpointer.close()

    def steps(self) -> list[int]:
        """The steps of all checkpoints, ascending; the last may still be being written."""
        return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    def latest(self) -> int | None:
        """The step of the newest checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def restore(self, like: PyTree) -> tuple[int, PyTree, dict[str, Any]] | None:
        """The newest checkpoint that can be read.

        A damaged one is reported in one line on stderr and put aside, into the folder `DIRECTORY-damaged`, where one
        before it can be read; else nothing is moved.

        Args:
          like: a pytree with the structure, shapes and types of the state, such as of jax.ShapeDtypeStruct. Where a
            leaf has a `sharding`, the array is read into it, whatever it was saved from; else onto this process's
            first device.

        Returns:
          Step, state and progress; None if there is no checkpoint.

        Raises:
          ConfigError: there are checkpoints, but none can be read; or the newest is of another model.
        """
        self.wait()
        like = jax.tree.map(_placed, like)
        unreadable: dict[int, str] = {}
        for step in _agreed(self.steps()[::-1]):
            with _without_stderr(), jax.transfer_guard("allow"):
                loaded, reason = _read(self.directory / str(step), like)
            if loaded is not None:
                self._put_aside(unreadable, step)
                return step, loaded["state"], loaded["progress"]
            unreadable[step] = reason
        if unreadable:
            raise ConfigError(
                f"no checkpoint in {self.directory} can be read "
                f"({'; '.join(f'{step}: {reason}' for step, reason in unreadable.items())}): put back whole ones, "
                f"or delete that folder to train anew"
            )
        return None

    def _put_aside(self, unreadable: dict[int, str], used: int) -> None:
        for step, reason in unreadable.items():
            folder, target = self.directory / str(step), None
            if not self._read_only and jax.process_index() == 0:
                target = _unused(self.directory.with_name(f"{self.directory.name}-damaged") / str(step))
                with clear_storage_errors(target):
                    target.parent.mkdir(exist_ok=True)
                    folder.rename(target)
            if jax.process_index() == 0:
                moved = f"moved to {target}, " if target else ""
                print(
                    f"warning: checkpoint {folder} cannot be read ({reason}): {moved}using that of step {used}",
                    file=sys.stderr,
                )
        if unreadable and not self._read_only:
            _worst(0)  # the others see the folder only now
            self._checkpointer.reload()


@dataclasses.dataclass
class _Retention:
    """Keeps the newest and the best: an Orbax preservation policy.

    >>> from types import SimpleNamespace as Checkpoint
    >>> policy = _Retention(1, 1, scores={2: 0.5, 4: 0.25})
    >>> policy.should_preserve([Checkpoint(step=step) for step in (2, 4, 6, 8)], context=None)
    [False, True, False, True]
    """

    keep: int
    keep_best: int
    scores: dict[int, float]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        scored = sorted((step for step in steps if step in self.scores), key=lambda step: (self.scores[step], -step))
        kept = {*sorted(steps)[-self.keep :], *scored[: self.keep_best]}
        return [step in kept for step in steps]


def _scores(directory: Path, steps: Sequence[int]) -> dict[int, float]:
    """The scores with which checkpoints were saved; one that is damaged has none."""
    scores = {}
    for step in steps:
        with _without_stderr(), contextlib.suppress(Exception):
            held = ocp.checkpointables_metadata(directory.resolve() / str(step)).custom_metadata
            if isinstance(held, dict) and isinstance(held["score"], float):
                scores[step] = held["score"]
    return scores


_WHOLE, _OTHER, _DAMAGED = range(3)


def _read(folder: Path, like: PyTree) -> tuple[dict[str, Any] | None, str]:
    """What a checkpoint holds and "", or None and why it cannot be read; in all processes, if in one.

    Raises:
      ConfigError: it is of another model.
    """
    here = jax.process_index()
    # Each process reads for itself, without Orbax's barriers, at which the others would wait for one that has failed.
    alone = ocp.options.MultiprocessingOptions(primary_host=here, active_processes={here})
    stages: list[Callable[[], Any]] = [
        lambda: _compare(folder, like),
        lambda: ocp.load_checkpointables(folder.resolve(), {"state": like, "progress": None}),
    ]
    loaded = None
    for stage in stages:
        verdict, reason = _WHOLE, "another process cannot read it"
        try:
            with ocp.Context(multiprocessing_options=alone):
                loaded = stage()
        except ConfigError as error:
            verdict, reason = _OTHER, str(error)
        except Exception as error:  # Orbax raises a different type for each way in which a file can be broken
            verdict, reason = _DAMAGED, _first_cause(error)
            del error
            gc.collect()  # tasks of other arrays, left behind unawaited, complain on stderr when collected: now
        worst = _worst(verdict)
        if worst == _OTHER:
            raise ConfigError(reason)
        if worst == _DAMAGED:
            return None, reason
    return loaded, ""


def _compare(folder: Path, like: PyTree) -> None:
    """Raises ConfigError unless the arrays of a checkpoint, by its metadata, have the names and shapes of `like`."""
    metadata = ocp.checkpointables_metadata(folder.resolve()).metadata
    if metadata.get("state") is None:
        raise ValueError("it does not say what it holds")
    held, wanted = _arrays(metadata["state"]), _arrays(like)
    for name in [*wanted, *held]:
        if held.get(name) != wanted.get(name):
            raise ConfigError(
                f"checkpoint {folder} is of another model ({name} is {held.get(name, 'not there')}, needed is "
                f"{wanted.get(name, 'none')}): use the config that it was trained with, or another --workdir"
            )


def _arrays(tree: PyTree) -> dict[str, str]:
    """Type and shape of each array by its name; a random key is the numbers that it is stored as."""

    def stored(leaf: Any) -> str:
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): stored(leaf) for path, leaf in leaves}


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _first_cause(error: BaseException) -> str:
    """What an exception was raised from in the first place, shortened to one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def _worst(verdict: int) -> int:
    """The largest of the numbers that all processes give."""
    if jax.process_count() == 1:
        return verdict
    return int(np.max(multihost_utils.process_allgather(np.int32(verdict))))


def _agreed(steps: list[int]) -> list[int]:
    """The steps that the first process sees, in all processes."""
    if jax.process_count() == 1:
        return steps
    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
    padded = np.array([*steps, *[0] * count][:count], np.int32)
    return [int(step) for step in multihost_utils.broadcast_one_to_all(padded)] if count else []


def _unused(path: Path) -> Path:
    number = 1
    free = path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Discards what is written to stderr: beside the error that it raises, Orbax has each of its threads print one."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
