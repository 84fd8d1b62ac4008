"""The workdir of a run: its lock, its settings and data, and JSON files that are written atomically."""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from cope_jax import tasks
from cope_jax.errors import ConfigError, StorageError, clear_storage_errors
from cope_jax.exchange.safetensors_io import holds_model
from cope_jax.runs.records import Record, finite, select
from cope_jax.storage.bucket_lock import printable
from cope_jax.storage.checkpoint_io import of_first_process
from cope_jax.storage.files import read_object, write_atomically
from cope_jax.storage.locks import open_lock, try_lock
from cope_jax.storage.mirror import Mirror
from cope_jax.tasks import Task
from cope_jax.training.experiment_config import ExperimentConfig

MEASURING = ".measuring.lock"
"""The name of the lock file of commands that measure a run and write into its workdir."""


@contextlib.contextmanager
def locked(workdir: Path, name: str = ".lock") -> Iterator[None]:
    """Locks a workdir against other runs; the lock is released on exit, or when the process that has the lock ends.

    If a run has several processes, the first one has the lock. If the file system has no locks, a line on stderr says
    so. `name` is the name of the lock file. The default is for training. `MEASURING` does not conflict with training.

    Raises:
      ConfigError: another run has the lock, or the workdir cannot be written to.
    """
    if re.match(r"[a-z][a-z0-9]+:/", str(workdir)):
        raise ConfigError(f"{workdir} is not a folder: only commands take a path in a bucket, in the flag --workdir")
    mirror = Mirror.of(workdir)
    with _clear_write_errors(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        _check_writable(workdir)  # an existing .lock could be writable even if its folder is not
        file = open_lock(workdir / name)
    with file:
        try:
            if not try_lock(file):
                file.seek(0)
                holder = printable(file.read(1000)) or "another process"
                raise ConfigError(
                    f"{workdir} is in use by {holder}: wait until it ends, stop it, or choose another --workdir"
                )
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            print(f"warning: {workdir} cannot be locked ({error.strerror}): start only one run in it", file=sys.stderr)
        with clear_storage_errors(workdir):
            file.seek(0)
            file.truncate()
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        with contextlib.nullcontext() if mirror is None else mirror.locked(name):
            yield


def follow_first(workdir: Path) -> None:
    """Fetches a workdir in a bucket again, in the processes other than the first, after the first has locked it."""
    mirror = Mirror.of(workdir)
    if mirror is not None and jax.process_index() > 0:
        mirror.fetch()


def open_workdir(
    workdir: Path,
    config: ExperimentConfig,
    seeds: Sequence[int] | None = None,
    environment: Mapping[str, Any] | None = None,
) -> None:
    """Opens the workdir of a run; a new workdir is created, with its config.json.

    If an older version of the package wrote config.json, fields that are not in the file have their defaults. If
    `seeds` is None, this is the workdir of a comparison, whose runs share all settings except encoding and seeds.
    `environment` (versions and commit) is written to environment.json at every start.

    Raises:
      ConfigError: the workdir cannot be written to, or belongs to other settings.
    """
    path = workdir / "config.json"
    settings = _settings(config, seeds)
    with _clear_write_errors(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_json(path, settings)
        else:
            _check_writable(workdir)
        held = read_settings(workdir)
    if "seeds" in held and seeds is None:
        raise ConfigError(f"{workdir} is a run of experiments.train, not a comparison: choose another --workdir")
    if "seeds" not in held and seeds is not None:
        raise ConfigError(f"{workdir} is a comparison, not a run of experiments.train: choose another --workdir")
    known = _settings(ExperimentConfig.from_mapping(held["config"]), held.get("seeds"))
    if other := difference(known, settings):
        raise ConfigError(
            f"{workdir} holds a run with other settings, {other}: choose another --workdir, or use the same config"
        )
    if environment is not None:
        write_json(workdir / "environment.json", environment)


def has_checkpoints(workdir: Path) -> bool:
    """Whether a workdir has checkpoints; all processes get the answer of the first.

    Raises:
      ConfigError: the path of the workdir is not valid, or `checkpoints` is not a folder.
    """
    with _clear_write_errors(workdir):
        folder = workdir / "checkpoints"
        if os.path.lexists(folder) and not folder.is_dir():
            kind = "broken link" if folder.is_symlink() else "file"
            raise NotADirectoryError(errno.ENOTDIR, f"checkpoints is a {kind}, not a folder")
        return bool(of_first_process([int(folder.exists())])[0])


@contextlib.contextmanager
def _clear_write_errors(workdir: Path) -> Iterator[None]:
    try:
        if workdir.exists() and not workdir.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file, not a folder")
        with clear_storage_errors(workdir):
            yield
    except StorageError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot write to {workdir} ({error.strerror}): choose another --workdir") from error


def _check_writable(workdir: Path) -> None:
    if not os.access(workdir, os.W_OK):
        number = errno.EROFS if os.statvfs(workdir).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(number, os.strerror(number))


def _settings(config: ExperimentConfig, seeds: Sequence[int] | None) -> dict[str, Any]:
    if seeds is None:
        return {"config": config.recipe(with_encoding=False)}
    return {"config": config.recipe(), "seeds": list(seeds)}


def read_settings(workdir: Path) -> dict[str, Any]:
    """The content of config.json: `config` as nested dicts and, for a run, also `seeds`."""
    path = workdir / "config.json"
    if holds_model(workdir):
        raise ConfigError(f"{workdir} holds a model of experiments.convert, not a run: choose another folder")
    settings = read_json(path, config=dict)
    check_seeds(settings.get("seeds", [0]), path)
    return settings


def check_seeds(seeds: Any, path: Path) -> None:
    """Raises ConfigError unless `seeds`, which are in the file `path`, are a list of whole numbers."""
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ConfigError(f"{path} is damaged (seeds are {json.dumps(seeds)}): write the seeds of the run, such as [0]")


def read_json(path: Path, **kinds: type) -> dict[str, Any]:
    """The content of a JSON file that a command writes. ConfigError: the file is damaged; see `read_object`."""
    return read_object(path, "delete it, and the command recreates it", **kinds)


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file atomically, with null for NaN and infinity; StorageError if the disk is full."""
    write_atomically(path, json.dumps(finite(content), indent=1, allow_nan=False) + "\n")


def read_records(path: Path) -> list[Record]:
    """Reads the records of a JSON file, or [] if there is no such file; a value of null becomes NaN."""
    held = read_json(path, records=list)["records"] if path.exists() else []
    if not all(isinstance(record, dict) for record in held):
        raise ConfigError(f"{path} is damaged (a record is no object): delete it, and the command recreates it")
    return [{**record, "value": math.nan} if record.get("value", 0) is None else record for record in held]


def replace_records(path: Path, fields: Record, records: Sequence[Record]) -> None:
    """Writes `records` to a JSON file in place of the records that match all `fields`; all other records stay."""
    held = read_records(path)
    old = select(held, **fields)
    write_json(path, {"records": [*(row for row in held if row not in old), *records]})


def write_files(folder: Path, contents: Mapping[str, str]) -> None:
    """Writes text files, each atomically; `contents` maps the name of each file to its content.

    Raises:
      ConfigError: a file exists with other content, so the data of the run have changed.
      StorageError: the disk is full or read-only.
    """
    for name, content in contents.items():
        file = folder / name
        if not file.exists():
            write_atomically(file, content)
        elif file.read_text(encoding="utf-8") != content:
            raise ConfigError(
                f"{file} does not match the current data: restore the original data, or choose another --workdir"
            )


def create_task(config: ExperimentConfig, workdir: Path) -> Task:
    """The task of a config. A run that resumes loads the vocabulary that it keeps, instead of learning it again."""
    options, kind = config.task.options, tasks.TASKS.get(config.task.name)
    if has_checkpoints(workdir):
        kept = kind.with_saved_files(options, workdir)
        options = {**options, **{name: value for name, value in kept.items() if options.get(name) is None}}
    return tasks.create(config.task.name, **options)


def check_sources(task: Task, workdir: Path, splits: Iterable[str]) -> None:
    """Raises ConfigError if the task's data of these splits do not match the digest that the run keeps in `workdir`."""
    if task.same_data(workdir, splits) is False:
        raise ConfigError(
            f"the data differ from the data of the run in {workdir} ({', '.join(task.data_digest())}): restore the "
            "original files"
        )


def keep_files(task: Task, workdir: Path) -> None:
    """Saves the files of a task and the digest of its data in the workdir of a run.

    Raises:
      ConfigError: the workdir has other files or another digest, so the data of the run have changed.
      StorageError: the disk is full or read-only.
    """
    if task.same_saved_files(workdir) is False:
        raise ConfigError(
            f"{' and '.join(task.saved_files())} in {workdir} does not match the current data: restore the original "
            "data, or choose another --workdir"
        )
    missing = {name: content for name, content in task.saved_files().items() if not (workdir / name).exists()}
    write_files(workdir, missing | task.data_digest())


def check_alike(task: Task) -> None:
    """Raises ConfigError in every process if one process has other data than the first."""
    if jax.process_count() == 1:
        return
    content = json.dumps(task.saved_files() | task.data_digest(), sort_keys=True).encode()
    digests = multihost_utils.process_allgather(np.frombuffer(hashlib.sha256(content).digest(), np.uint8))
    for process, digest in enumerate(digests):
        if (digest != digests[0]).any():
            raise ConfigError(
                f"process {process} has other data than process 0: give all processes the same data, and for the "
                "corpus of the standard library the same Python"
            )


def difference(held: Any, wanted: Any) -> str | None:
    """The first setting that differs, with both values in JSON; None if all are equal.

    >>> difference({"task": {"length": (8, 9)}}, {"task": {"length": [8, 9]}})
    >>> difference({"task": {"length": 8}}, {"task": {"length": 9}})
    'task.length (8, not 9)'
    """
    same = json.dumps(held, sort_keys=True) == json.dumps(wanted, sort_keys=True)
    return None if same else _first_difference(held, wanted, "")


def _first_difference(held: Any, wanted: Any, where: str) -> str:
    if isinstance(held, dict) and isinstance(wanted, dict):
        for name in [*wanted, *held]:
            if name not in held or name not in wanted or json.dumps(held[name]) != json.dumps(wanted[name]):
                return _first_difference(held.get(name), wanted.get(name), f"{where}.{name}" if where else name)
    return f"{where} ({json.dumps(held)}, not {json.dumps(wanted)})"
