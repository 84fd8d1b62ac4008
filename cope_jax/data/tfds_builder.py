"""Writes and reads tasks as TensorFlow Datasets, as array_record; TensorFlow is not needed.

A directory contains one dataset for each task. The examples of a dataset are in the order of
`Task.dataset`. A dataset also stores the task's options, the data seed, saved files such as a
tokenizer, digests of the data, and the parts of a mixture, so that reading does not make examples
from files again. Any program can read a dataset with
`tfds.data_source("counting", data_dir=..., split="train")`.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from etils import epath
from google.protobuf import json_format

from cope_jax.errors import ConfigError, first_line
from cope_jax.registry import unknown
from cope_jax.storage.files import in_bucket, read_text
from cope_jax.storage.locks import unfinished
from cope_jax.tasks.stored import StoredTask
from cope_jax.tasks.task import Batch, Task

VERSION = "1.0.0"
_KINDS = (tfds.features.FeaturesDict, tfds.features.Tensor)
_CLASSES = {f"{kind.__module__}.{kind.__name__}" for kind in _KINDS}
_CHUNK = 1024  # number of examples that are made from files at a time


def write(
    task: Task, data_dir: epath.PathLike, sizes: Mapping[str, int], seed: int = 0
) -> epath.Path:
    """Writes `sizes[split]` examples of each split, unless an equal earlier call wrote them.

    For a task of fixed size, empty `sizes` mean all examples of every split. `data_dir` may contain
    other tasks too. Returns the folder of the dataset, `<data_dir>/<task>/<version>`.

    Raises:
      ConfigError: a split is unknown, a size or seed is out of range, the task is a stream, or
        `data_dir` holds data of this task from a call with other arguments.
    """
    if task.stream("train", 1) is not None:
        raise ConfigError(
            f"{task.name} is one long text, which cannot be exported: choose a task of separate examples"
        )
    if not sizes and task.size("train") is not None:
        sizes = {split: task.size(split) or 0 for split in task.splits}
    for split, size in sizes.items():
        if split not in task.splits:
            raise unknown(f"split of {task.name}", split, task.splits)
        there = task.size(split)
        if there is not None and isinstance(size, int) and size > there:
            raise ConfigError(
                f"the split {split!r} of {task.name} has {there} examples, not {size}: ask for fewer"
            )
        if not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"the size of {split!r} must be a whole number of at least 1, got {size!r}"
            )
    if seed < 0:
        raise ConfigError(f"a data seed must be at least 0, got {seed}")
    if not sizes:
        raise ConfigError(f"no split to write: give sizes for some of {', '.join(task.splits)}")
    if _path(task, data_dir).exists():
        infos = _open(task, data_dir, seed).info.splits
        existing = {name: info.num_examples for name, info in infos.items()}
        if existing != dict(sizes):
            raise ConfigError(
                f"{data_dir} holds {task.name} in other sizes, {existing}: choose another data_dir"
            )
    else:
        with unfinished(data_dir) as folder:
            made = epath.Path(data_dir) if in_bucket(data_dir) else epath.Path(folder)
            builder = _Builder(task, made, sizes, seed)
            builder.download_and_prepare(download_dir=folder / "downloads")
            if made == epath.Path(folder):
                _path(task, data_dir).parent.mkdir(exist_ok=True)
                _path(task, made).rename(_path(task, data_dir))
    for name, content in _files(task).items():
        file = _path(task, data_dir) / name
        # An earlier call was interrupted.
        if not file.exists() or file.read_text(encoding="utf-8") != content:
            file.write_text(content, encoding="utf-8")
    return _path(task, data_dir)


def read(task: Task, data_dir: epath.PathLike, split: str, *, seed: int = 0) -> "Written":
    """Returns random access to `split`; item i is row i of `task.dataset(split, n, seed)`.

    Raises:
      ConfigError: `data_dir` has no data of this task with these options, files and seed, or not
        this split.
    """
    builder = _open(task, data_dir, seed)
    if split not in builder.info.splits:
        raise unknown(f"split of {task.name} in {data_dir}", split, builder.info.splits)
    if any(file.parent != _path(task, data_dir) for file in builder.info.splits[split].filepaths):
        raise ConfigError(
            f"{_path(task, data_dir)} names files that are elsewhere: write the data again"
        )
    dtypes = {name: feature.np_dtype for name, feature in builder.info.features.items()}
    whole = builder.info.metadata["whole"].get(split, {"size": None, "mixture": []})
    mixture = tuple((weight, range(*ends)) for weight, ends in whole["mixture"])
    return Written(builder.as_data_source(split), dtypes, whole["size"], mixture)


@dataclasses.dataclass(frozen=True)
class Written:
    """A source of stored examples, dicts of arrays, also of fields without dimensions.

    `size` and `mixture` are what the methods `size` and `mixture` of the task return for the split.
    """

    source: Sequence[Any]
    dtypes: Mapping[str, Any]
    size: int | None
    mixture: Sequence[tuple[float, range]]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        row = self.source[index]
        return {name: np.asarray(row[name], self.dtypes[name]) for name in row}


class _Info(tfds.core.DatasetInfo):
    """Facts about a dataset."""

    def initialize_from_bucket(self) -> None:
        """Does nothing: TFDS would ask its bucket, and leave a temporary folder."""


class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]  # untyped
    """The builder of any task's dataset, which has the name of the task."""

    VERSION = tfds.core.Version(VERSION)

    def __init__(self, task: Task, data_dir: epath.PathLike, sizes: Mapping[str, int], seed: int):
        self.name = task.name
        self._task, self._sizes, self._seed = task, sizes, seed
        super().__init__(data_dir=data_dir, file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        # Splits may differ in the first dimension of a field, which is the length.
        fields = {
            name: tfds.features.Tensor(
                shape=(None,) * (field.ndim > 1) + field.shape[2:], dtype=field.dtype
            )
            for name, field in self._task.sample(np.random.default_rng(0), 1).items()
        }
        return _Info(
            builder=self,
            description=type(self._task).__doc__,
            features=tfds.features.FeaturesDict(fields),
            metadata=tfds.core.MetadataDict(
                _identity(self._task, self._seed), whole=_whole(self._task)
            ),
            disable_shuffling=True,
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[Any]]:
        del dl_manager
        return {split: self._generate_examples(split, size) for split, size in self._sizes.items()}

    def _generate_examples(
        self, split: str, size: int
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        chunks: Iterable[Batch]
        task = self._task
        if isinstance(task, StoredTask):
            ranges = (
                np.arange(start, min(start + _CHUNK, size)) for start in range(0, size, _CHUNK)
            )
            chunks = (task.take(split, indices) for indices in ranges)
        else:
            chunks = [task.dataset(split, size, self._seed)]
        places = ((batch, row) for batch in chunks for row in range(len(batch["inputs"])))
        examples = ({name: batch[name][row] for name in batch} for batch, row in places)
        yield from enumerate(examples)


def _path(task: Task, data_dir: epath.PathLike) -> epath.Path:
    in_bucket(data_dir)  # an error names another kind of URL
    return epath.Path(data_dir) / task.name / VERSION


def _files(task: Task) -> dict[str, str]:
    return task.saved_files() | task.data_digest()


def _identity(task: Task, seed: int) -> dict[str, Any]:
    """Returns what the examples depend on, in the types that JSON returns."""
    contents = {name: content.encode() for name, content in _files(task).items()}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    options = task.example_options()
    identity = {"task": task.name, "options": options, "files": digests, "seed": seed}
    return json.loads(json.dumps(identity))


def _whole(task: Task) -> dict[str, Any]:
    """Returns the size and the parts of each split of fixed size."""
    return {
        split: {
            "size": task.size(split),
            "mixture": [
                [weight, [indices.start, indices.stop]] for weight, indices in task.mixture(split)
            ],
        }
        for split in task.splits
        if task.size(split) is not None
    }


def _open(task: Task, data_dir: epath.PathLike, seed: int) -> tfds.core.DatasetBuilder:
    path = _path(task, data_dir)
    if not (path / "dataset_info.json").exists():
        if path.exists():
            raise ConfigError(
                f"{path} is incomplete: delete it, then write it with `cope-jax export`"
            )
        raise ConfigError(
            f"{data_dir} holds no data of {task.name}: write it with `cope-jax export`"
        )
    _check_classes(path / "features.json")
    wanted = _identity(task, seed)
    try:
        builder = tfds.builder_from_directory(path)
        metadata = {"files": {}, **builder.info.metadata}
    except (ValueError, TypeError, LookupError, json_format.Error) as error:
        raise ConfigError(
            f"{path} is damaged ({first_line(error)}): delete it and write it again"
        ) from error
    if not {*wanted, "whole"} <= {"options", *metadata}:
        raise ConfigError(
            f"{path} was written by an older version of this package: delete it and write it again"
        )
    # Of an option that a dataset does not have, it has the default.
    fields = {field.name: field.default for field in dataclasses.fields(task.config)}
    defaults = {name: fields[name] for name in fields if name in wanted["options"]}
    options = {**defaults, **metadata.get("options", {})}
    metadata["options"] = json.loads(json.dumps(options, default=str))
    if {name: metadata.get(name) for name in wanted} != wanted:
        raise ConfigError(
            f"{data_dir} holds other data of {task.name} ({_difference(wanted, metadata)}): "
            "choose another data_dir, or use the same options and files"
        )
    return builder


def _check_classes(path: epath.Path) -> None:
    """ConfigError for unknown classes of features, whose modules TFDS would import."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        for key, value in pairs:
            if key in ("pythonClassName", "python_class_name") and value not in _CLASSES:
                raise ConfigError(
                    f"{path} names the class {value!r}: write the data again with this package"
                )

    try:
        json.loads(read_text(path), object_pairs_hook=check)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is damaged ({first_line(error)}): write the data again"
        ) from error


def _difference(wanted: dict[str, Any], existing: dict[str, Any]) -> str:
    """Returns the names of the options and files that differ, with the values of the options."""
    here, there = wanted["files"], existing["files"]
    files = sorted(here | there)
    others = [f"{name} differs" for name in files if here.get(name) != there.get(name)]
    wanted, existing = ({"seed": side["seed"], **side["options"]} for side in (wanted, existing))
    differ = sorted(key for key in wanted | existing if wanted.get(key) != existing.get(key))
    options = [f"{key} is {existing.get(key)} there and {wanted.get(key)} here" for key in differ]
    return ", ".join(options + others)
