"""Saves and restores checkpoints with everything that a run needs to resume exactly."""

import math
import secrets
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from cope_jax.array_types import PyTree
from cope_jax.errors import ConfigError, StorageError, clear_storage_errors
from cope_jax.storage import checkpoint_io, checksum
from cope_jax.storage.checkpoint_bucket import CheckpointBucket
from cope_jax.storage.checkpoint_folder import CheckpointFolder
from cope_jax.storage.checkpoint_io import CheckpointStore
from cope_jax.storage.mirror import Mirror


class Checkpoints:
    """A context manager for a run's checkpoints in a folder; its exit waits for the last write.

    Each checkpoint has two parts. `state` is the training state, which includes the random key.
    `progress` is plain data: the states of the data iterators, the seconds of training so far, and
    the steps that each seed has skipped in a row.
    Writing is atomic: a run killed during a write resumes from the last complete checkpoint. If
    there are several processes, all make the same calls, on a directory that they share or that
    each mirrors.

    Args:
      directory: the folder of the checkpoints, created if missing.
      keep: how many of the newest checkpoints to keep, at least 1.
      keep_best: how many of the checkpoints with the lowest scores to keep, even if they are not
        among the newest.
      read_only: True moves and removes nothing, because the run may be in progress.

    Raises:
      StorageError: the disk is full or read-only, or the write that an earlier call started has
        failed. Methods that read or write raise this error too.
    """

    def __init__(self, directory: Path, keep: int = 2, keep_best: int = 0, read_only: bool = False):
        self.directory = directory
        self._read_only = read_only
        self._keep, self._keep_best = keep, keep_best
        self._writing: Any = None
        self._unproven: Any = None
        self._written = 0
        with clear_storage_errors(directory):
            self._store = _open_store(directory)
            if not read_only and jax.process_index() == 0:
                self._store.remove_unfinished()
            # Listed only once, because every process must see the same checkpoints.
            self._steps = set(checkpoint_io.of_first_process(self._store.steps()))
        self._scores: dict[int, float] = {}
        if keep_best:
            scores = {step: checkpoint_io.read_score(self._store, step) for step in self._steps}
            self._scores = {step: score for step, score in scores.items() if score is not None}

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if exception[0] is not None:  # other processes may not come to read
                self._unproven = None
            self.wait()
        finally:
            self._store.close()

    def save(
        self, step: int, state: PyTree, progress: dict[str, Any], score: float | None = None
    ) -> None:
        """Starts to write the checkpoint of `step`, unless it exists.

        `save` first waits until the previous checkpoint is written. When `save` returns, the state
        has been copied and may be donated.

        Args:
          step: number of steps done.
          state: the training state, a pytree of arrays.
          progress: plain data that JSON can represent.
          score: lower is better; a checkpoint whose score is None or not finite is never one of the
            best.
        """
        self.wait()
        if step in self.steps():
            return
        if score is not None and math.isfinite(score):
            self._scores[step] = score
        with clear_storage_errors(self._store.name(step)), jax.transfer_guard("allow"):
            label = checkpoint_io.create_label(step, state, progress, self._scores.get(step))
            self._writing = self._store.save(step, state, progress, label)
        if not self._written:
            self._unproven = _few_arrays(state)
        self._written = step

    def wait(self) -> None:
        """Waits until the current write ends; if the write failed, raises its error.

        Reads a part of the first checkpoint, so that a run whose checkpoints cannot be read ends
        before it loses more.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            with clear_storage_errors(self.directory):
                writing.result()
                self._prove()
                self._steps.add(self._written)
                keep = kept(self._steps, self._scores, self._keep, self._keep_best)
                self._remove(self._steps - keep)

    def _prove(self) -> None:
        like, self._unproven = self._unproven, None
        if like is not None:
            try:
                checkpoint_io.read(self._store, self._written, like, partial=True)
            except checkpoint_io.DamagedError as error:
                raise StorageError(
                    f"checkpoint {self._store.name(self._written)} was written but cannot be read ({error}): earlier "
                    "checkpoints are intact; choose another --workdir"
                ) from error

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, ascending."""
        return sorted(self._steps)

    def latest(self) -> int | None:
        """The step of the newest checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def restore(
        self, like: PyTree, *, partial: bool = False
    ) -> tuple[int, PyTree, dict[str, Any]] | None:
        """Reads the newest checkpoint that can be read.

        Prints a line on stderr for each newer checkpoint that is damaged. Unless `read_only` is
        set, these checkpoints are also moved to the folder `DIRECTORY-damaged`. If no checkpoint
        can be read, nothing is moved.

        Args:
          like: a pytree with the structure, shapes and types of the state; the leaves may be
            jax.ShapeDtypeStruct. Each array gets the `sharding` of its leaf in `like`, whatever
            sharding the array had when it was saved. If a leaf has no `sharding`, its array is
            placed on this process's first device.
          partial: True means that `like` has only a part of the state, such as {"params": ...}.
            Only this part is read.

        Returns:
          Step, state and progress; None if there is no checkpoint.

        Raises:
          ConfigError: there are checkpoints, but none can be read, or the newest belongs to another
            model.
        """
        self.wait()
        like = jax.tree.map(_placed, like)
        unreadable: dict[int, str] = {}
        for step in checkpoint_io.of_first_process(self.steps()[::-1]):
            try:
                state, progress = checkpoint_io.read(self._store, step, like, partial=partial)
            except checkpoint_io.DamagedError as error:
                unreadable[step] = str(error)
            else:
                self._put_aside(unreadable, step)
                return step, state, progress
        missing = [step for step in unreadable if not self._store.exists(step)]
        gone = checkpoint_io.of_first_process(missing)
        if self._read_only and gone:
            # The run in progress has meanwhile removed a checkpoint and written others.
            with Checkpoints(self.directory, read_only=True) as newer:
                return newer.restore(like, partial=partial)
        if unreadable:
            reasons = "; ".join(f"{step}: {reason}" for step, reason in unreadable.items())
            mend = "restore intact checkpoints" + (
                "" if self._read_only else ", or delete that folder to train from the start"
            )
            raise ConfigError(f"no checkpoint in {self.directory} can be read ({reasons}): {mend}")
        return None

    def _put_aside(self, unreadable: dict[int, str], used: int) -> None:
        if not unreadable:
            return
        checkpoint_io.in_all_processes(
            lambda: self._move(unreadable, used) if jax.process_index() == 0 else None
        )
        if not self._read_only:
            self._steps -= set(unreadable)

    def _remove(self, steps: set[int]) -> None:
        self._steps -= steps
        if jax.process_index() == 0:
            for step in steps:
                self._store.remove(step)

    def _move(self, unreadable: dict[int, str], used: int) -> None:
        for step, reason in unreadable.items():
            fate = "left in place" if self._read_only else self._store.put_aside(step)
            warning = (
                f"warning: checkpoint {self._store.name(step)} cannot be read ({reason}): {fate}; using that of step "
                f"{used}"
            )
            print(warning, file=sys.stderr)


def _open_store(directory: Path) -> CheckpointStore:
    mirror = Mirror.of(directory)
    if mirror is None:
        return CheckpointFolder(directory)
    random = checkpoint_io.of_first_process([secrets.randbits(31) for _ in range(4)])
    return CheckpointBucket(mirror, "".join(f"{number:08x}" for number in random))


def kept(steps: Iterable[int], scores: Mapping[int, float], newest: int, best: int) -> set[int]:
    """Selects the steps to keep: the last `newest` ones, and the `best` ones by lowest scores.

    >>> sorted(kept([2, 4, 6, 8], {2: 0.5, 4: 0.25}, newest=1, best=1))
    [4, 8]
    """
    known = [step for step in steps if step in scores]
    scored = sorted(known, key=lambda step: (scores[step], -step))
    return {*sorted(steps)[-newest:], *scored[:best]}


def _few_arrays(state: PyTree) -> PyTree:
    """The shapes of arrays in no group, such as the step; of all arrays if there are none."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    alone = {checksum.name(path): _placed(leaf) for path, leaf in leaves if len(path) == 1}
    return alone or jax.tree.map(_placed, state)


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    sharding = getattr(leaf, "sharding", None) or here
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
