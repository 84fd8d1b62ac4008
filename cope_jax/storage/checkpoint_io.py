"""Reads a checkpoint and checks that it is intact and of this model; all processes fail or none."""

import errno
import re
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from cope_jax.array_types import PyTree
from cope_jax.errors import ConfigError, StorageError, without_stderr
from cope_jax.storage import checksum


class DamagedError(Exception):
    """At least one process cannot read a checkpoint; the message says why in one line."""


class CheckpointStore(Protocol):
    """A store of the checkpoints of a run. Only the first process calls methods that change one."""

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints."""

    def remove_unfinished(self) -> None:
        """Removes what commands that were killed have left."""

    def name(self, step: int) -> str:
        """The name of a checkpoint in messages."""

    def exists(self, step: int) -> bool:
        """True if a checkpoint still exists."""

    def save(
        self, step: int, state: PyTree, progress: dict[str, Any], label: dict[str, Any]
    ) -> Any:
        """Starts to write a copy of the state in all processes; `result()` of the future waits."""

    def close(self) -> None:
        """Waits for what is done in the background."""

    def label(self, step: int) -> Any:
        """The label that was saved with a checkpoint."""

    def load(self, step: int, like: PyTree, partial: bool) -> tuple[PyTree, dict[str, Any]]:
        """Reads state and progress; with `partial`, arrays that `like` lacks are allowed."""

    def remove(self, step: int) -> None:
        """Removes a checkpoint, such that it is never incomplete."""

    def put_aside(self, step: int) -> str:
        """Keeps a damaged checkpoint, but not as a checkpoint; returns what has become of it."""


def step_of(name: str) -> int | None:
    """The step whose checkpoint has this name; None if no checkpoint has it.

    >>> [step_of(name) for name in ("120", "007", "²", "12-2", "9" * 5000)]
    [120, None, None, None, None]
    """
    return int(name) if re.fullmatch("0|[1-9][0-9]{0,8}", name) else None


def create_label(
    step: int, state: PyTree, progress: dict[str, Any], score: float | None
) -> dict[str, Any]:
    """Creates the metadata by which `read` checks that a checkpoint is intact and fits `like`.

    Orbax's files have checksums for only a part of their bytes, so Orbax may read wrong numbers
    from a damaged file.
    """
    content: dict[str, Any] = {"step": step, "score": score, "arrays": _arrays(state)}
    content |= {"state": checksum.of_arrays(state), "progress": checksum.of_data(progress)}
    return {**content, "label": checksum.of_data(content)}


def read_score(store: CheckpointStore, step: int) -> float | None:
    """The score of a checkpoint; None if it has no score or is damaged."""
    with without_stderr():
        try:
            score: float | None = _read_label(store, step)["score"]
        except StorageError:
            raise
        except Exception:  # each way in which a file can be broken raises another type
            return None
        return score


def _read_label(store: CheckpointStore, step: int) -> dict[str, Any]:
    label = store.label(step)
    content = dict(label) if isinstance(label, dict) else {}
    if content.pop("label", None) != checksum.of_data(content):
        raise ValueError("the metadata do not match their checksum")
    if content["step"] != step:
        raise ValueError(f"its folder was renamed, it is of step {content['step']}")
    return content


def read(
    store: CheckpointStore, step: int, like: PyTree, *, partial: bool = False
) -> tuple[PyTree, dict[str, Any]]:
    """Reads state and progress; the state has the shapes, types and shardings of `like`.

    With `partial`, reads only the arrays of the state that `like` names.

    Raises:
      DamagedError: at least one process cannot read the checkpoint; all processes raise this error.
      ConfigError: the metadata say that the checkpoint belongs to another model; no array is read.
    """
    with without_stderr(), jax.transfer_guard("allow"):
        label = in_all_processes(lambda: _compare(store, step, like, partial))
        state, progress = in_all_processes(lambda: store.load(step, like, partial))
        in_all_processes(lambda: _verify(label, state, progress))
    return state, progress


def _compare(store: CheckpointStore, step: int, like: PyTree, partial: bool) -> dict[str, Any]:
    """Returns the metadata of the checkpoint.

    A group is all arrays with the same first name, such as `params`. With `partial`, the checkpoint
    may have groups that `like` does not have. Within a group of `like`, the checkpoint must not
    have additional arrays.

    Raises:
      ConfigError: names, shapes or types differ.
    """
    label, wanted = _read_label(store, step), _arrays(like)
    saved = label["arrays"]
    if partial:
        groups = {name.partition(".")[0] for name in wanted}
        saved = {name: kind for name, kind in saved.items() if name.partition(".")[0] in groups}
    for name in [*wanted, *saved]:
        if saved.get(name) != wanted.get(name):
            raise ConfigError(
                f"checkpoint {store.name(step)} is of another model ({name}: {saved.get(name, 'nothing')}, "
                f"not {wanted.get(name, 'nothing')}): use the config that it was trained with, or another --workdir"
            )
    return label


def _arrays(tree: PyTree) -> dict[str, str]:
    """Maps the name of each array to the array's type and shape."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {checksum.name(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _verify(label: dict[str, Any], state: PyTree, progress: dict[str, Any]) -> None:
    if checksum.of_data(progress) != label["progress"]:
        raise ValueError("the progress does not match its checksum")
    for name, number in checksum.of_arrays(state).items():
        if number != label["state"][name]:
            raise ValueError(f"the array {name} does not match its checksum")


_WHOLE, _DAMAGED, _OTHER, _OUT_OF_REACH = range(4)
# Errors of a file system that may be temporary, and so are no reason to move a checkpoint away.
_PASSING = {
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EMFILE,
    errno.ENOMEM,
}


def in_all_processes(attempt: Callable[[], Any]) -> Any:
    """Calls `attempt` in every process, and returns its result if all calls succeed.

    Raises:
      StorageError: in some process, a temporary error kept a file from being read, or the memory
        was full.
      ConfigError: `attempt` raised ConfigError in some process.
      DamagedError: `attempt` raised any other exception in some process.
    """
    verdict, result, reason = _WHOLE, None, "it failed in another process"
    try:
        result = attempt()
    except ConfigError as error:
        verdict, reason = _OTHER, str(error)
    except (
        Exception
    ) as error:  # Orbax raises a different type for each way in which a file can be broken
        verdict = _OUT_OF_REACH if _is_passing(error) else _DAMAGED
        reason = _first_cause(error)
    worst = verdict
    if jax.process_count() > 1:
        worst = int(np.max(multihost_utils.process_allgather(np.int32(verdict))))
    if worst == _OUT_OF_REACH:
        raise StorageError(
            f"a checkpoint cannot be read now ({reason}), and nothing was changed: fix the cause and rerun the command"
        )
    if worst == _OTHER:
        raise ConfigError(reason)
    if worst == _DAMAGED:
        raise DamagedError(reason)
    return result


def _is_passing(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, StorageError):
            return True
        code = re.search(r"os_error_code='(\d+)'", str(error))
        number = int(code[1]) if code else getattr(error, "errno", None)
        if (
            isinstance(error, MemoryError)
            or "RESOURCE_EXHAUSTED" in str(error)
            or number in _PASSING
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def of_first_process(steps: list[int]) -> list[int]:
    """Returns the `steps` of the first process in all processes."""
    if jax.process_count() == 1:
        return steps
    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
    padded = np.array([*steps, *[0] * count][:count], np.int32)
    return [int(step) for step in multihost_utils.broadcast_one_to_all(padded)] if count else []


def _first_cause(error: BaseException) -> str:
    """The original cause of an exception, shortened to one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
