"""Writes results of commands as JSON and Markdown, and prints the paths of the files."""

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from cope_jax import models
from cope_jax.encodings import encoding_file
from cope_jax.errors import ConfigError, StorageError, clear_storage_errors
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.records import environment
from cope_jax.storage.files import in_bucket, write_atomically
from cope_jax.storage.mirror import shown
from cope_jax.training.experiment_config import ExperimentConfig


def write(workdir: Path, name: str, content: Mapping[str, Any], text: str) -> list[Path]:
    """Writes NAME.json, with the content and the environment, and NAME.md, with the text.

    Returns both paths.
    """
    path = workdir / f"{name}.json"
    workdirs.write_json(path, {**content, "environment": environment()})
    return [path, write_atomically(workdir / f"{name}.md", f"{text}\n")]


@contextlib.contextmanager
def writing(path: object, flag: str = "out") -> Iterator[None]:
    """Turns errors of writing to `path`, the value of --`flag`, into one-line messages."""
    try:
        with clear_storage_errors(path):
            yield
    except StorageError:
        raise
    except OSError as error:
        if in_bucket(str(path)):
            raise StorageError(
                f"{path} cannot be used now ({error}): rerun the command later"
            ) from error
        raise ConfigError(
            f"cannot write to {path} ({error.strerror or error}): choose another --{flag}"
        ) from error


def list_files(paths: Iterable[Path]) -> None:
    """Prints each path on one line, even if it is longer than the terminal is wide."""
    Console().print(*map(shown, paths), sep="\n", soft_wrap=True, highlight=False)


def list_run(
    folder: Path, contents: Iterable[str], run: str | Path, config: ExperimentConfig
) -> None:
    """Prints the files that a command wrote into a run's folder, and how to inspect the run."""
    print(f"{shown(folder)}: {', '.join(contents)}")
    name_next(run, config)


def name_next(run: str | Path, config: ExperimentConfig) -> None:
    """Prints the command that inspects the run, if its model supports that."""
    if config.model.name in models.able("map"):
        files = (
            f"--encoding={os.path.relpath(file)}" for file in encoding_file.files(config.encoding)
        )
        print("next:", program(), shlex.join(["inspect", f"--model={shown(run)}", *files]))


def program() -> str:
    """The program for a shell: as it was started, if the shell may not find it by its name."""
    started = sys.orig_argv[:3]
    if started[1:] == ["-m", "cope_jax"]:
        return shlex.join(started)
    path = started[1] if started[1:] else ""
    is_ours = Path(path).name == "cope-jax"
    return shlex.quote(path) if is_ours and path != shutil.which("cope-jax") else "cope-jax"
