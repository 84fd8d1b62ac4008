"""Checkpoints in a bucket: each array is a Zarr array, of which each process writes and reads only its own part."""

import concurrent.futures
import contextlib
import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.array_types import PyTree
from cope_jax.buckets import Bucket, Mirror
from cope_jax.errors import StorageError
from cope_jax.files import parse_json
from cope_jax.training import checksum

_COMPLETE, _DAMAGED = ".complete", ".damaged"
_WRITTEN = ".written"
"""The name of the folder in which each process creates an object when all its parts of a checkpoint are written."""
_SLOWEST = 3600.0
"""Seconds after which a process no longer waits for what others write of a checkpoint."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """What this process writes of an array: (index, numbers) pairs. `shape` is of the whole, `chunk` of a shard."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: np.dtype
    pieces: Sequence[tuple[Any, np.ndarray]]


class CheckpointBucket:
    """The checkpoints below a folder of a bucket; see `CheckpointStore` for the methods.

    The objects of a checkpoint are STEP/ATTEMPT/NAME of each array, one attempt for each command that writes it, and
    last the marker STEP/.complete: JSON with the attempt, the label and the progress. Without the marker there is no
    checkpoint, so a command that is killed leaves nothing that a later one could take for a checkpoint.

    Args:
      mirror: the folder `checkpoints` of a run.
      attempt: the same text in all processes of this command, and no other command's.
    """

    def __init__(self, mirror: Mirror, attempt: str):
        self._mirror, self._attempt = mirror, attempt
        self._bucket, self._run = mirror.bucket, mirror.above(1)
        self._writer = concurrent.futures.ThreadPoolExecutor(1)

    def steps(self) -> list[int]:
        found = (name.partition("/") for name in self._bucket.names())
        return [int(step) for step, _, rest in found if step.isdigit() and rest == _COMPLETE]

    def remove_unfinished(self) -> None:
        attempts: dict[str, set[str]] = {}
        for name in self._bucket.names():
            step, _, below = name.partition("/")
            attempts.setdefault(step, set()).add(below.partition("/")[0])
        for step, found in attempts.items():
            complete = ""
            if _COMPLETE in found:
                with contextlib.suppress(ValueError, LookupError, TypeError):  # a damaged marker
                    complete = self._marker(step)["attempt"]
                if complete not in found:
                    continue
            for attempt in found - {_COMPLETE, complete, ""} if _DAMAGED not in found else ():
                self._bucket.remove(f"{step}/{attempt}/")

    def name(self, step: int) -> str:
        return f"{self._bucket.url}/{step}"

    def exists(self, step: int) -> bool:
        return self._bucket.read(f"{step}/{_COMPLETE}")[0] is not None

    def save(self, step: int, state: PyTree, progress: dict[str, Any], label: dict[str, Any]) -> Any:
        leaves = {checksum.name(path): _data(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
        for leaf in leaves.values():
            leaf.copy_to_host_async()
        parts = {name: _part(leaf) for name, leaf in leaves.items()}
        marker = {"attempt": self._attempt, "label": label, "progress": progress}
        return self._writer.submit(self._write, step, parts, json.dumps(marker).encode())

    def _write(self, step: int, parts: dict[str, _Part], marker: bytes) -> None:
        """Writes the parts of this process. The first process writes the marker when all parts are there."""
        folder, first = f"{step}/{self._attempt}", jax.process_index() == 0
        if first:
            _, before = self._bucket.read(f"{step}/{_COMPLETE}")
            self._mirror.check_lock()
            self._run.push()  # the metrics up to this step
        _write_parts(self._bucket, folder, parts)
        written = f"{folder}/{_WRITTEN}/"
        self._bucket.write(f"{written}{jax.process_index()}", b"")
        if not first:
            self._await(step, lambda: self.exists(step) and self._marker(step)["attempt"] == self._attempt)
            return
        self._await(step, lambda: len(self._bucket.names(written)) == jax.process_count())
        self._mirror.check_lock()
        if self._bucket.write(f"{step}/{_COMPLETE}", marker, before) is None:
            raise self._mirror.lost_lock()
        (self._mirror.folder / str(step)).mkdir(parents=True, exist_ok=True)

    def _await(self, step: int, ready: Callable[[], bool]) -> None:
        began, delay = time.monotonic(), 0.02
        while not ready():
            if time.monotonic() - began > _SLOWEST:
                raise StorageError(
                    f"{self.name(step)} is not complete {_SLOWEST:.0f} s after this process wrote its parts: earlier "
                    "checkpoints are intact; check the other processes, and rerun the command"
                )
            time.sleep(delay)
            delay = min(2 * delay, 1.0)

    def label(self, step: int) -> Any:
        return self._marker(step)["label"]

    def load(self, step: int, like: PyTree, partial: bool) -> tuple[PyTree, dict[str, Any]]:
        del partial  # only the arrays of `like` are read
        marker = self._marker(step)
        leaves, structure = jax.tree_util.tree_flatten_with_path(like)
        folder = f"{step}/{marker['attempt']}"
        with self._bucket.clear_errors():
            opened = [self._bucket.array(f"{folder}/{checksum.name(path)}", open=True, read=True) for path, _ in leaves]
            reading = [_read(array.result(), leaf) for array, (_, leaf) in zip(opened, leaves, strict=True)]
            arrays = [_assemble(leaf, pieces) for (_, leaf), pieces in zip(leaves, reading, strict=True)]
        return jax.tree.unflatten(structure, arrays), marker["progress"]

    def _marker(self, step: int | str) -> dict[str, Any]:
        content, _ = self._bucket.read(f"{step}/{_COMPLETE}")
        if content is None:
            raise FileNotFoundError("it is gone")
        marker: dict[str, Any] = parse_json(content)
        return marker

    def remove(self, step: int) -> None:
        self._mirror.check_lock()
        self._bucket.write(f"{step}/{_COMPLETE}", None)
        self._bucket.remove(f"{step}/")
        shutil.rmtree(self._mirror.folder / str(step), ignore_errors=True)

    def put_aside(self, step: int) -> str:
        self._mirror.check_lock()
        marker, _ = self._bucket.read(f"{step}/{_COMPLETE}")
        self._bucket.write(f"{step}/{_DAMAGED}", marker)
        self._bucket.write(f"{step}/{_COMPLETE}", None)
        shutil.rmtree(self._mirror.folder / str(step), ignore_errors=True)
        return "kept, but no longer used"


def _data(leaf: Any) -> Any:
    """The numbers of an array; those of a random key have one more axis. Also for `jax.ShapeDtypeStruct`."""
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.random.key_data(leaf)
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _part(leaf: jax.Array) -> _Part:
    """Copies what this process writes of an array, so that the array may be donated."""
    pieces = [(shard.index, np.array(shard.data)) for shard in leaf.addressable_shards if shard.replica_id == 0]
    return _Part(leaf.shape, leaf.sharding.shard_shape(leaf.shape), np.dtype(leaf.dtype), pieces)


def _write_parts(bucket: Bucket, folder: str, parts: dict[str, _Part]) -> None:
    import tensorstore

    with bucket.clear_errors():
        opened = [
            bucket.array(
                f"{folder}/{name}",
                create=True,
                open=True,  # another process may have created it
                shape=part.shape,
                dtype=part.dtype,
                chunk_layout=tensorstore.ChunkLayout(chunk_shape=part.chunk),
            )
            for name, part in parts.items()
        ]
        writing = [
            array.result()[index].write(numbers)
            for array, part in zip(opened, parts.values(), strict=True)
            for index, numbers in part.pieces
        ]
        for written in writing:
            written.result()


def _read(array: Any, leaf: Any) -> dict[str, Any]:
    """Starts to read the pieces of `array` that this process needs; by index."""
    data = _data(leaf)
    needed = {str(index): index for index in data.sharding.addressable_devices_indices_map(data.shape).values()}
    return {name: array[index].read() for name, index in needed.items()}


def _assemble(leaf: Any, pieces: dict[str, Any]) -> jax.Array:
    data = _data(leaf)
    array = jax.make_array_from_callback(data.shape, data.sharding, lambda index: pieces[str(index)].result())
    if data is leaf:
        return array
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)  # only a traced key says which kind it is
    return jax.random.wrap_key_data(array, impl=found[0])
