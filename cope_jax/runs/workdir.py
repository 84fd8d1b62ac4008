"""The workdir of a run: its lock, its settings and data, and JSON files written atomically."""

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
from cope_jax.encodings.encoding_file import files as encoding_files
from cope_jax.errors import ConfigError, StorageError, clear_storage_errors
from cope_jax.exchange.safetensors_io import holds_model
from cope_jax.registry import checked
from cope_jax.runs.records import Record, damage, finite, select
from cope_jax.storage.bucket_lock import printable
from cope_jax.storage.checkpoint_io import of_first_process
from cope_jax.storage.files import read_object, write_atomically
from cope_jax.storage.locks import open_lock, try_lock
from cope_jax.storage.mirror import Mirror
from cope_jax.tasks import Task
from cope_jax.training.experiment_config import ExperimentConfig

AGAIN = "delete it, and rerun the command that wrote it"

ONLY_STEPS = r"config\.training\.steps \([^)]*\)"
MORE = " (to train it further, start another run from it: --config.training.start)"

MEASURING = ".measuring.lock"
"""The name of the lock file of commands that measure a run and write into its workdir."""


class Workdir:
    """The folder of a run or a comparison: its lock, its settings, and the files that its task
    keeps.

    >>> import tempfile
    >>> workdir = Workdir(tempfile.mkdtemp())
    >>> with workdir.locked():
    ...     workdir.open(ExperimentConfig(), seeds=[0])
    >>> workdir.settings()["seeds"], workdir.has_checkpoints()
    ([0], False)
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(checked(path, str | os.PathLike, "workdir"))

    @contextlib.contextmanager
    def locked(self, name: str = ".lock") -> Iterator[None]:
        """Locks the folder against other runs until the end of the `with` block or of the process.

        If a run has several processes, the first one has the lock. If the file system has no locks,
        a line on stderr says so. `name` is the name of the lock file. The default is for training.
        `MEASURING` does not conflict with training.

        Raises:
          ConfigError: another run has the lock, or the folder cannot be written to.
        """
        if re.match(r"[a-z][a-z0-9]+:/", str(self.path)):
            raise ConfigError(
                f"{self.path} is not a folder: only commands take a path in a bucket, in the flag --workdir"
            )
        mirror = Mirror.of(self.path)
        with self._clear_write_errors():
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_writable()  # an existing .lock could be writable even if its folder is not
            file = open_lock(self.path / name)
        with file:
            try:
                if not try_lock(file):
                    file.seek(0)
                    holder = printable(file.read(1000)) or "another process"
                    raise ConfigError(
                        f"{self.path} is in use by {holder}: wait until it ends, stop it, or choose another --workdir"
                    )
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                line = f"{self.path} cannot be locked ({error.strerror}): start only one run in it"
                print(f"warning: {line}", file=sys.stderr)
            with clear_storage_errors(self.path):
                file.seek(0)
                file.truncate()
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                file.flush()
            with contextlib.nullcontext() if mirror is None else mirror.locked(name):
                yield

    def follow_first(self) -> None:
        """Fetches a folder in a bucket again, after the first process has locked it."""
        mirror = Mirror.of(self.path)
        if mirror is not None and jax.process_index() > 0:
            mirror.fetch()

    def open(
        self,
        config: ExperimentConfig,
        seeds: Sequence[int] | None = None,
        environment: Mapping[str, Any] | None = None,
    ) -> None:
        """Opens the folder for these settings; a new folder is created, with its config.json.

        If an older version of the package wrote config.json, fields that are not in the file have
        their defaults. If `seeds` is None, this is the folder of a comparison, whose runs share all
        settings except encoding and seeds. `environment` (versions and commit) is written to
        environment.json at every start.

        Raises:
          ConfigError: the folder cannot be written to, or belongs to other settings.
        """
        path, files = self.path / "config.json", {}
        if seeds is not None:
            digests = encoding_files(config.encoding).items()
            files = {Path(file).name: digest for file, digest in digests}
        with self._clear_write_errors():
            self.path.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                if (self.path / "checkpoints").exists():
                    raise ConfigError(
                        f"{self.path} has checkpoints but no config.json: restore it, or choose another --workdir"
                    )
                settings = _settings(config, seeds)
                write_json(path, settings | ({"encoding_files": files} if files else {}))
            else:
                self._check_writable()
            self.check(config, seeds)
        if environment is not None:
            write_json(self.path / "environment.json", environment)

    def check(self, config: ExperimentConfig, seeds: Sequence[int] | None = None) -> None:
        """Reads the settings of the folder, as `open` does, and writes nothing.

        ConfigError: there is no config.json, or the folder belongs to other settings.
        """
        stored, settings = self.settings(), _settings(config, seeds)
        if "seeds" in stored and seeds is None:
            raise ConfigError(
                f"{self.path} is a run of cope-jax train, not a comparison: choose another --workdir"
            )
        if "seeds" not in stored and seeds is not None:
            raise ConfigError(
                f"{self.path} is a comparison, not a run of cope-jax train: choose another --workdir"
            )
        with _missing_file_named(stored.get("encoding_files", {}), self.path):
            known = _settings(ExperimentConfig.from_mapping(stored["config"]), stored.get("seeds"))
        if other := difference(known, settings):
            raise ConfigError(
                f"{self.path} holds a run with other settings, {other}: choose another --workdir, or use the same "
                f"config{MORE if re.fullmatch(ONLY_STEPS, other) else ''}"
            )
        if seeds is not None:
            check_encoding_files(stored, config, self.path)

    def settings(self) -> dict[str, Any]:
        """The content of config.json: `config` as nested dicts and, for a run, also `seeds`."""
        path = self.path / "config.json"
        if holds_model(self.path):
            raise ConfigError(
                f"{self.path} holds a model of cope-jax convert, not a run: choose another folder"
            )
        settings = read_json(path, config=dict)
        check_seeds(settings.get("seeds", [0]), path)
        if not isinstance(files := settings.get("encoding_files", {}), dict):
            raise ConfigError(
                f"{path} is damaged (encoding_files are {json.dumps(files)}): write the digest of each file"
            )
        return settings

    def has_checkpoints(self) -> bool:
        """True if the folder has checkpoints; all processes get the answer of the first.

        Raises:
          ConfigError: the path of the folder is not valid, or `checkpoints` is not a folder.
        """
        with self._clear_write_errors():
            folder = self.path / "checkpoints"
            if os.path.lexists(folder) and not folder.is_dir():
                kind = "broken link" if folder.is_symlink() else "file"
                raise NotADirectoryError(errno.ENOTDIR, f"checkpoints is a {kind}, not a folder")
            return bool(of_first_process([int(folder.exists())])[0])

    def create_task(self, config: ExperimentConfig) -> Task:
        """The task of a config.

        A run that resumes loads the vocabulary that it keeps, and does not learn it again.
        """
        options, kind = config.task.options, tasks.TASKS.get(config.task.name)
        if self.has_checkpoints():
            kept = kind.with_saved_files(options, self.path)
            unset = {name: value for name, value in kept.items() if options.get(name) is None}
            options = {**options, **unset}
        return tasks.create(config.task.name, **options)

    def keep_files(self, task: Task) -> None:
        """Saves the files of a task and the digest of its data.

        Raises:
          ConfigError: the folder has other files or another digest, so the data of the run have
            changed.
          StorageError: the disk is full or read-only.
        """
        if task.same_saved_files(self.path) is False:
            raise ConfigError(
                f"{' and '.join(task.saved_files())} in {self.path} does not match the current data: restore the "
                "original data, or choose another --workdir"
            )
        files = task.saved_files()
        missing = {name: files[name] for name in files if not (self.path / name).exists()}
        write_files(self.path, missing | task.data_digest())

    def check_sources(self, task: Task, splits: Iterable[str]) -> None:
        """ConfigError if the task's data of these splits do not match the folder's digest."""
        if task.same_data(self.path, splits) is False:
            raise ConfigError(
                f"the data differ from the data of the run in {self.path} ({', '.join(task.data_digest())}): restore "
                "the original files"
            )

    @contextlib.contextmanager
    def _clear_write_errors(self) -> Iterator[None]:
        try:
            if self.path.exists() and not self.path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "it is a file, not a folder")
            with clear_storage_errors(self.path):
                yield
        except StorageError:
            raise
        except OSError as error:
            raise ConfigError(
                f"cannot write to {self.path} ({error.strerror}): choose another --workdir"
            ) from error

    def _check_writable(self) -> None:
        if not os.access(self.path, os.W_OK):
            number = errno.EROFS if os.statvfs(self.path).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(number, os.strerror(number))


def _settings(config: ExperimentConfig, seeds: Sequence[int] | None) -> dict[str, Any]:
    if seeds is None:
        return {"config": config.recipe(with_encoding=False)}
    return {"config": config.recipe(), "seeds": list(seeds)}


def check_encoding_files(settings: Mapping[str, Any], config: ExperimentConfig, path: Path) -> None:
    """Raises ConfigError if the encoding of a run in the folder `path` is from another file now, or
    from one that has not been loaded.
    """
    files = settings.get("encoding_files", {})
    with _missing_file_named(files, path):
        digests = encoding_files(config.encoding)
    if sorted(files.values()) != sorted(digests.values()):
        raise ConfigError(
            f"{path} holds a run of another version of the encoding {config.encoding}: give its file as it was"
            f"{f', not {next(iter(digests))}' if digests else ''}, or choose another folder"
        )


@contextlib.contextmanager
def _missing_file_named(files: Mapping[str, str], path: Path) -> Iterator[None]:
    """Names the files of a run's encoding where it is not known."""
    try:
        yield
    except ConfigError as error:
        if not files or not str(error).startswith("unknown encoding"):
            raise
        first, names = next(iter(files)), ", ".join(files)
        raise ConfigError(
            f"the encoding of {path} is from {names}: give --encoding={first} "
            "(in Python, cj.encodings.load)"
        ) from None


def check_seeds(seeds: Any, path: Path) -> None:
    """Raises ConfigError unless `seeds`, which are in the file `path`, are a list of whole numbers."""
    if (
        not isinstance(seeds, list)
        or not seeds
        or not all(type(seed) is int and seed >= 0 for seed in seeds)
    ):
        raise ConfigError(
            f"{path} is damaged (seeds are {json.dumps(seeds)}): write the seeds of the run, such as [0]"
        )


def read_json(path: Path, **kinds: type) -> dict[str, Any]:
    """The content of a JSON file that a command writes.

    ConfigError: the file is damaged; see `read_object`.
    """
    return read_object(path, AGAIN, **kinds)


def write_json(path: Path, content: Any) -> None:
    """Writes JSON atomically, with null for NaN and infinity. StorageError: the disk is full."""
    write_atomically(path, json.dumps(finite(content), indent=1, allow_nan=False) + "\n")


def read_records(path: Path) -> list[Record]:
    """Reads the records of a JSON file; without the file there are none. Null values become NaN."""
    records = read_json(path, records=list)["records"] if path.exists() else []
    if not all(isinstance(record, dict) for record in records):
        raise ConfigError(f"{path} is damaged (a record is no object): {AGAIN}")
    return [
        {**record, "value": math.nan} if record.get("value", 0) is None else record
        for record in records
    ]


def run_records(path: Path) -> list[Record]:
    """Reads the records of a finished run. ConfigError: one lacks a field, or has a wrong one."""
    records = read_records(path)
    faults = (fault for record in records if (fault := damage(record)))
    if fault := next(faults, "" if records else "it has no record"):
        raise ConfigError(f"{path} is damaged ({fault}): {AGAIN}")
    return records


def run_environment(path: Path) -> Record:
    """Reads the environment of a finished run. ConfigError: it lacks what every page shows."""
    environment: Record = read_json(path, environment=dict)["environment"]
    for name in ("jax", "device_kind"):
        if not isinstance(environment.get(name), str):
            raise ConfigError(f"{path} is damaged (environment lacks {name}): {AGAIN}")
    if not isinstance(environment.get("commit", ""), str | None):
        raise ConfigError(f"{path} is damaged (commit of environment is no text): {AGAIN}")
    return {"commit": None, **environment}


def replace_records(path: Path, fields: Record, records: Sequence[Record]) -> None:
    """Replaces the records of a JSON file that match all `fields` by `records`."""
    stored = read_records(path)
    old = select(stored, **fields)
    write_json(path, {"records": [*(row for row in stored if row not in old), *records]})


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


def check_alike(task: Task) -> None:
    """Raises ConfigError in every process if one process has other data than the first."""
    if jax.process_count() == 1:
        return
    content = json.dumps(task.saved_files() | task.data_digest(), sort_keys=True).encode()
    digest = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)
    digests = multihost_utils.process_allgather(digest)
    for process, digest in enumerate(digests):
        if (digest != digests[0]).any():
            raise ConfigError(
                f"process {process} has other data than process 0: give all processes the same data, and for the "
                "corpus of the standard library the same Python"
            )


def difference(stored: Any, wanted: Any) -> str | None:
    """The settings that differ, three at most, with both values in JSON; None if all are equal.

    >>> difference({"task": {"length": (8, 9)}}, {"task": {"length": [8, 9]}})
    >>> difference({"task": {"length": 8}}, {"task": {"length": 9}})
    'task.length (8, not 9)'
    >>> difference({"a": 1, "b": 2, "c": 3, "d": 4}, {"a": 2, "b": 3, "c": 4, "e": 5})
    'a (1, not 2), b (2, not 3), c (3, not 4) and 2 more'
    >>> difference({"task": {"name": "copy", "rate": 1}}, {"task": {"name": "count", "size": 2}})
    'task.name ("copy", not "count") and 2 more'
    >>> difference({"a": 1}, {"a": 1, "b": None})
    'b (nothing, not null)'
    """
    changes = list(_differences(stored, wanted, ""))
    # What only one has, such as an option of another task, mostly follows from what both have.
    shown = [text for both_have, text in changes if both_have] or [text for _, text in changes]
    more = len(changes) - len(shown[:3])
    return ", ".join(shown[:3]) + f" and {more} more" * bool(more) or None


def _differences(stored: Any, wanted: Any, where: str) -> Iterator[tuple[bool, str]]:
    """Each setting that differs, and whether both have it."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        for name in dict.fromkeys([*wanted, *stored]):
            path = f"{where}.{name}" if where else name
            if name in stored and name in wanted:
                yield from _differences(stored[name], wanted[name], path)
            else:
                given = (json.dumps(x[name]) if name in x else "nothing" for x in (stored, wanted))
                yield False, "{} ({}, not {})".format(path, *given)
    elif json.dumps(stored, sort_keys=True) != json.dumps(wanted, sort_keys=True):
        yield True, f"{where} ({json.dumps(stored)}, not {json.dumps(wanted)})"
