"""Tasks on disk, as TensorFlow Datasets in the array_record format; TensorFlow itself is not needed.

A directory holds one dataset of each task, in the order of `Task.dataset`, with the task's options and the data seed
beside it. Any program reads it with `tfds.data_source("counting", data_dir=..., split="train")`.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from etils import epath

from cope_jax.errors import ConfigError
from cope_jax.registry import unknown
from cope_jax.tasks.base import Task

VERSION = "1.0.0"


def write(task: Task, data_dir: epath.PathLike, sizes: Mapping[str, int], seed: int = 0) -> epath.Path:
    """Writes `sizes[split]` examples of each split; what is there already, from the same call, is left as it is.

    Returns:
      The folder of the dataset, `<data_dir>/<task>/<version>`.

    Raises:
      ConfigError: an unknown split, a size or seed out of range, or `data_dir` holds other data of this task.
    """
    for split, size in sizes.items():
        if split not in task.splits:
            raise unknown(f"split of {task.name}", split, task.splits)
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"the size of {split!r} must be a whole number of at least 1, got {size!r}")
    if seed < 0:
        raise ConfigError(f"a data seed must be at least 0, got {seed}")
    if not sizes:
        raise ConfigError(f"no split to write: give sizes for some of {', '.join(task.splits)}")
    if _path(task, data_dir).exists():
        held = {name: info.num_examples for name, info in _open(task, data_dir, seed).info.splits.items()}
        if held != dict(sizes):
            raise ConfigError(f"{data_dir} holds {task.name} in other sizes, {held}: choose another data_dir")
    else:
        _Builder(task, data_dir, sizes, seed).download_and_prepare()
    return _path(task, data_dir)


def read(task: Task, data_dir: epath.PathLike, split: str, *, seed: int = 0) -> Sequence[dict[str, np.ndarray]]:
    """The examples of `split` as a random-access source: item i is row i of `task.dataset(split, n, seed)`.

    Raises:
      ConfigError: `data_dir` has no data of this task, or of other options, another seed, or without this split.
    """
    builder = _open(task, data_dir, seed)
    if split not in builder.info.splits:
        raise unknown(f"split of {task.name} in {data_dir}", split, builder.info.splits)
    return builder.as_data_source(split)


class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]  # untyped
    """The builder of any task; it bears the task's name."""

    VERSION = tfds.core.Version(VERSION)

    def __init__(self, task: Task, data_dir: epath.PathLike, sizes: Mapping[str, int], seed: int):
        self.name = task.name
        self._task, self._sizes, self._seed = task, sizes, seed
        super().__init__(data_dir=data_dir, file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        tokens, weights = (tfds.features.Tensor(shape=(None,), dtype=dtype) for dtype in (np.int32, np.float32))
        return tfds.core.DatasetInfo(
            builder=self,
            description=type(self._task).__doc__,
            features=tfds.features.FeaturesDict({"inputs": tokens, "targets": tokens, "weights": weights}),
            metadata=tfds.core.MetadataDict(_identity(self._task, self._seed)),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator[Any]]:
        del dl_manager
        return {split: self._generate_examples(split, size) for split, size in self._sizes.items()}

    def _generate_examples(self, split: str, size: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        batch = self._task.dataset(split, size, self._seed)
        for i in range(size):
            yield i, {key: value[i] for key, value in batch.items()}


def _path(task: Task, data_dir: epath.PathLike) -> epath.Path:
    return epath.Path(data_dir) / task.name / VERSION


def _identity(task: Task, seed: int) -> dict[str, Any]:
    """What the examples depend on, as JSON gives it back."""
    return json.loads(json.dumps({"task": task.name, "options": dataclasses.asdict(task.config), "seed": seed}))


def _open(task: Task, data_dir: epath.PathLike, seed: int) -> tfds.core.DatasetBuilder:
    path = _path(task, data_dir)
    if not (path / "dataset_info.json").exists():
        raise ConfigError(f"{data_dir} holds no data of {task.name}: write it with `python -m experiments.export`")
    builder = tfds.builder_from_directory(path)
    wanted, held = _identity(task, seed), dict(builder.info.metadata)
    if held != wanted:
        raise ConfigError(f"{data_dir} holds other data of {task.name}: {_difference(wanted, held)}")
    return builder


def _difference(wanted: dict[str, Any], held: dict[str, Any]) -> str:
    """The entries that differ, options by name."""
    wanted, held = ({"seed": side["seed"], **side["options"]} for side in (wanted, held))
    differ = sorted(key for key in wanted | held if wanted.get(key) != held.get(key))
    return ", ".join(f"{key} is {held.get(key)} there and {wanted.get(key)} here" for key in differ)
