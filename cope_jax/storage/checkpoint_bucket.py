"""Checkpoints in a bucket: a Zarr array for each array; each process writes and reads its part."""

import concurrent.futures
import contextlib
import dataclasses
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.array_types import PyTree
from cope_jax.errors import StorageError
from cope_jax.storage import checksum
from cope_jax.storage.bucket import Bucket
from cope_jax.storage.checkpoint_io import step_of
from cope_jax.storage.files import parse_json
from cope_jax.storage.mirror import COMPLETE, Mirror

_DAMAGED = ".damaged"
_WRITTEN = ".written"
"""The folder in which each process creates an object when all its shards are written."""
_TIMEOUT = 3600.0
"""Seconds after which a process no longer waits for what others write of a checkpoint."""
_CHUNK = 1 << 28
"""Largest number of bytes of an object, where a shard can be divided evenly."""


@dataclasses.dataclass(frozen=True)
class _Shards:
    """The pairs of index and values that this process writes of an array with the shape `shape`."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: np.dtype
    shards: Sequence[tuple[Any, np.ndarray]]


class CheckpointBucket:
    """The checkpoints below a folder of a bucket; see `CheckpointStore` for the methods.

    The objects of a checkpoint are STEP/ATTEMPT/NAME of each array, one attempt for each command
    that writes it, and last the marker STEP/.complete: JSON with the attempt, the label and the
    progress. Without the marker there is no checkpoint, so a command that is killed leaves nothing
    that a later one could take for a checkpoint.

    Args:
      mirror: the folder `checkpoints` of a run.
      attempt: the same text in all processes of this command, and no other command's.
    """

    def __init__(self, mirror: Mirror, attempt: str):
        self._mirror, self._attempt = mirror, attempt
        self._bucket, self._run = mirror.bucket, mirror.above(1)
        self._writer = concurrent.futures.ThreadPoolExecutor(1)

    def steps(self) -> list[int]:
        marker = f"/{COMPLETE}"
        names = (n.removesuffix(marker) for n in self._bucket.names() if n.endswith(marker))
        return [step for step in map(step_of, names) if step is not None]

    def remove_unfinished(self) -> None:
        attempts: dict[str, set[str]] = {}
        for name in self._bucket.names():
            step, _, below = name.partition("/")
            attempts.setdefault(step, set()).add(below.partition("/")[0])
        for step, names in attempts.items():
            if step_of(step) is None or _DAMAGED in names:
                continue
            complete = ""
            if COMPLETE in names:
                with contextlib.suppress(ValueError, LookupError, TypeError):  # a damaged marker
                    complete = self._marker(step)["attempt"]
                if not complete or complete not in names:
                    continue
            for attempt in names - {COMPLETE, complete, ""}:
                self._bucket.remove(f"{step}/{attempt}/")

    def name(self, step: int) -> str:
        return f"{self._bucket.url}/{step}"

    def exists(self, step: int) -> bool:
        return self._bucket.read(f"{step}/{COMPLETE}")[0] is not None

    def save(
        self, step: int, state: PyTree, progress: dict[str, Any], label: dict[str, Any]
    ) -> Any:
        paths = jax.tree_util.tree_leaves_with_path(state)
        leaves = {checksum.name(path): _data(leaf) for path, leaf in paths}
        written_here = {
            name: [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
            for name, leaf in leaves.items()
        }
        for shards in written_here.values():
            for shard in shards:
                shard.data.copy_to_host_async()
        # Copies, because the state may be donated.
        copied = {
            name: [(shard.index, np.array(shard.data)) for shard in shards]
            for name, shards in written_here.items()
        }
        arrays = {
            name: _Shards(leaf.shape, _chunk(leaf), np.dtype(leaf.dtype), copied[name])
            for name, leaf in leaves.items()
        }
        marker = {"attempt": self._attempt, "label": label, "progress": progress}
        return self._writer.submit(self._write, step, arrays, json.dumps(marker).encode())

    def _write(self, step: int, arrays: dict[str, _Shards], marker: bytes) -> None:
        """Writes this process's shards. When all are there, the first process writes the marker."""
        folder, first = f"{step}/{self._attempt}", jax.process_index() == 0
        if first:
            _, before = self._bucket.read(f"{step}/{COMPLETE}")
            self._mirror.check_lock()
            self._run.push()  # the metrics up to this step
        _write_arrays(self._bucket, folder, arrays, create=first)
        written = f"{folder}/{_WRITTEN}/"
        self._bucket.write(f"{written}{jax.process_index()}", b"")
        if not first:
            self._wait_until(
                step, lambda: self.exists(step) and self._marker(step)["attempt"] == self._attempt
            )
            return
        self._wait_until(step, lambda: len(self._bucket.names(written)) == jax.process_count())
        self._mirror.check_lock()
        if self._bucket.write(f"{step}/{COMPLETE}", marker, before) is None:
            raise self._mirror.lost_lock()
        (self._mirror.folder / str(step)).mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        self._writer.shutdown()

    def _wait_until(self, step: int, ready: Callable[[], bool]) -> None:
        began, delay = time.monotonic(), 0.02
        while not ready():
            if time.monotonic() - began > _TIMEOUT:
                raise StorageError(
                    f"{self.name(step)} is not complete {_TIMEOUT:.0f} s after this process wrote its shards: earlier "
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
        names = [f"{step}/{marker['attempt']}/{checksum.name(path)}" for path, _ in leaves]
        values = _read_arrays(self._bucket, names, [_data(leaf) for _, leaf in leaves])
        arrays = [_assemble(leaf, shards) for (_, leaf), shards in zip(leaves, values, strict=True)]
        return jax.tree.unflatten(structure, arrays), marker["progress"]

    def _marker(self, step: int | str) -> dict[str, Any]:
        content, _ = self._bucket.read(f"{step}/{COMPLETE}")
        if content is None:
            raise FileNotFoundError("it is gone")
        marker: dict[str, Any] = parse_json(content)
        if not re.fullmatch(r"\w+", str(marker["attempt"])):
            raise ValueError("its marker is damaged")
        return marker

    def remove(self, step: int) -> None:
        attempt = self._marker(step)["attempt"]
        self._remove_marker(step)
        # Many requests, during the next steps.
        self._writer.submit(self._bucket.remove, f"{step}/{attempt}/")

    def put_aside(self, step: int) -> str:
        marker, _ = self._bucket.read(f"{step}/{COMPLETE}")
        self._mirror.check_lock()
        self._bucket.write(f"{step}/{_DAMAGED}", marker)
        self._remove_marker(step)
        return "kept, but no longer used"

    def _remove_marker(self, step: int) -> None:
        _, before = self._bucket.read(f"{step}/{COMPLETE}")
        self._mirror.check_lock()
        if self._bucket.write(f"{step}/{COMPLETE}", None, before) is None and self.exists(step):
            raise self._mirror.lost_lock()
        shutil.rmtree(self._mirror.folder / str(step), ignore_errors=True)


def _data(leaf: Any) -> Any:
    """The numbers of an array or its shape; those of a random key have one more axis."""
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.random.key_data(leaf)
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _chunk(leaf: jax.Array) -> tuple[int, ...]:
    """The shape of the objects of an array: an even division of its shards."""
    chunk = list(leaf.sharding.shard_shape(leaf.shape))
    for axis in range(len(chunk)):
        while math.prod(chunk) * leaf.dtype.itemsize > _CHUNK and chunk[axis] % 2 == 0:
            chunk[axis] //= 2
    return tuple(chunk)


def _write_arrays(bucket: Bucket, folder: str, arrays: dict[str, _Shards], create: bool) -> None:
    """Writes shards; with `create`, also all metadata, for which no other process need wait."""
    import tensorstore

    written_here = {name: array for name, array in arrays.items() if create or array.shards}
    with bucket.clear_errors():
        opened = [
            bucket.array(
                f"{folder}/{name}",
                open=True,
                create=create,
                assume_metadata=not create,
                shape=array.shape,
                dtype=array.dtype,
                chunk_layout=tensorstore.ChunkLayout(chunk_shape=array.chunk),
            )
            for name, array in written_here.items()
        ]
        # Also of arrays without a shard here: their metadata must be there before the marker.
        stores = [store.result() for store in opened]
        writing = [
            store[index].write(values)
            for store, array in zip(stores, written_here.values(), strict=True)
            for index, values in array.shards
        ]
        for written in writing:
            written.result()


def _read_arrays(
    bucket: Bucket, names: Sequence[str], like: Sequence[Any]
) -> list[dict[str, np.ndarray]]:
    """Reads the shards of arrays that this process needs, by the text of the index.

    Raises:
      ValueError: an array is damaged.
    """
    with bucket.clear_errors():
        opened = [bucket.array(name, open=True, read=True) for name in names]
        stores = [store.result() for store in opened]
    for name, store, leaf in zip(names, stores, like, strict=True):
        if (store.shape, store.dtype.numpy_dtype) != (leaf.shape, leaf.dtype):
            raise ValueError(
                f"the array {name} has the shape {store.shape} and the type {store.dtype.name}"
            )
    with bucket.clear_errors():
        reading = [
            {
                str(index): store[index].read()
                for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
            }
            for store, leaf in zip(stores, like, strict=True)
        ]
        return [{name: shard.result() for name, shard in shards.items()} for shards in reading]


def _assemble(leaf: Any, shards: dict[str, np.ndarray]) -> jax.Array:
    data = _data(leaf)
    array = jax.make_array_from_callback(
        data.shape, data.sharding, lambda index: shards[str(index)]
    )
    if data is leaf:
        return array
    kinds: list[Any] = []
    # Only a traced key says which kind it is.
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), leaf)
    return jax.random.wrap_key_data(array, impl=kinds[0])
