"""What commands leave behind: figures as JSON, a table as Markdown, and the names of their files on the terminal."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from cope_jax.files import write_atomically
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.records import environment


def write(workdir: Path, name: str, content: Mapping[str, Any], text: str) -> list[Path]:
    """Writes NAME.json, the content beside what else it depends on, and NAME.md. Returns both paths."""
    path = workdir / f"{name}.json"
    workdirs.write_json(path, {**content, "environment": environment()})
    return [path, write_atomically(workdir / f"{name}.md", f"{text}\n")]


def list_files(paths: Iterable[Path]) -> None:
    """Prints each path in a line of its own, however long it is."""
    Console().print(*paths, sep="\n", soft_wrap=True, highlight=False)
