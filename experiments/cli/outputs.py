"""Writes what commands produce: figures as JSON, a table as Markdown, and the names of the files on the terminal."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from cope_jax.errors import ConfigError, StorageError, clear_storage_errors
from cope_jax.files import write_atomically
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.records import environment


def write(workdir: Path, name: str, content: Mapping[str, Any], text: str) -> list[Path]:
    """Writes NAME.json, the content and the environment it depends on, and NAME.md. Returns both paths."""
    path = workdir / f"{name}.json"
    workdirs.write_json(path, {**content, "environment": environment()})
    return [path, write_atomically(workdir / f"{name}.md", f"{text}\n")]


@contextlib.contextmanager
def writing(path: object, flag: str = "out") -> Iterator[None]:
    """Turns errors in writing to the path of a flag into one line; see also `clear_storage_errors`."""
    try:
        with clear_storage_errors(path):
            yield
    except StorageError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot write to {path} ({error.strerror or error}): choose another --{flag}") from error


def list_files(paths: Iterable[Path]) -> None:
    """Prints each path on its own line, however long it is."""
    Console().print(*paths, sep="\n", soft_wrap=True, highlight=False)
