"""Finds and reads the text files of a data directory."""

import glob
import os
import pathlib
from collections.abc import Collection, Sequence

from etils import epath

from cope_jax.corpora import document_files
from cope_jax.errors import ConfigError
from cope_jax.storage.files import glob_in, in_bucket, read_text

Document = list[tuple[str, ...]]
"""A document: a list of sentences, each a tuple of words."""

SAMPLES = epath.Path(__file__).parent / "samples"
"""The built-in data directory."""


def find(
    data_dir: str | None, folder: str, names: Sequence[str], download: str | None = None
) -> epath.Path:
    """Finds the first of `names`, plain or with `.gz`, in a folder of the data directory.

    A name may contain `*`. `download` is the name of the corpus in `cope-jax download`, or None if
    that command does not have the corpus.

    Raises:
      ConfigError: there is no such file. The message says which file to put where.

    >>> find(None, "sms-spam", ["SMSSpamCollection.tsv"]).name
    'SMSSpamCollection.tsv'
    """
    path = first(data_dir, folder, names)
    if path is not None:
        return path
    root = data_folder(data_dir)
    command = (
        f"; `cope-jax download --corpora={download} --out={root}` downloads it" if download else ""
    )
    wanted = " or ".join(f"{folder}/{name}" for name in names if "*" not in name)
    where = root if root.exists() else f"{root}, which does not exist"
    raise ConfigError(
        f"no {wanted} in {where}: put the corpus there (plain or .gz{command}), name another data_dir, "
        "or leave data_dir out for the built-in sample"
    )


def first(data_dir: str | None, folder: str, names: Sequence[str]) -> epath.Path | None:
    """The file that `find` finds, or None if there is no such file."""
    root = data_folder(data_dir)
    for name in names:
        for pattern in (name, f"{name}.gz"):
            paths = glob_in(root / folder, pattern)
            if paths:
                return paths[0]
    return None


def data_folder(data_dir: str | None) -> epath.Path:
    """The data directory. Raises ConfigError if it is a URL that cannot be read."""
    if data_dir is None:
        return SAMPLES
    in_bucket(data_dir)  # an error names another kind of URL
    return epath.Path(data_dir)


def read_prose(path: epath.PathLike) -> str:
    """The text of a UTF-8 file. ConfigError as of `read_text`, or for a zero byte."""
    text = read_text(path)
    zero = text.find("\0")
    if zero >= 0:
        line = text.count("\n", 0, zero) + 1
        raise ConfigError(
            f"{path}, line {line} has a zero byte, so it is not text: remove the file or the byte"
        )
    return text


def read_lines(path: epath.Path) -> list[str]:
    """The lines of a UTF-8 file, without line ends or an empty last line; see `read_prose`."""
    # Not splitlines: a text may contain other line separators, which do not end a line in these
    # formats.
    lines = [line.removesuffix("\r") for line in read_prose(path).split("\n")]
    return lines[:-1] if not lines[-1] else lines


def matching(
    folder: pathlib.Path, globs: Sequence[str], without: Collection[str] = ()
) -> dict[str, pathlib.Path]:
    """Finds the files below a folder that match any of `globs`, each once.

    Returns a sorted dict from a file's path relative to the folder to its path. For a glob with a
    full path, the search starts in the last folder before the first wildcard. The key of a file is
    then its path relative to the parent of this folder or, if another file has this key, its full
    path. Folders and files with a name in `without` are skipped at every depth.

    Raises:
      ConfigError: a pattern is not a glob.

    >>> list(matching(pathlib.Path(SAMPLES), ["files/r*.txt"]))
    ['files/recipe.txt']
    """
    files: dict[str, pathlib.Path] = {}
    seen: set[pathlib.Path] = set()
    for pattern in globs:
        root, below = _rooted(folder, pattern)
        try:
            if not pathlib.PurePath(below).parts:
                raise ValueError("the pattern names no file")
            paths = sorted(root.glob(below))
        except ValueError as error:
            raise ConfigError(
                f"{pattern!r} is not a glob ({error}): write one like '**/*.txt'"
            ) from error
        for path in paths:
            parts = path.relative_to(root).parts
            if not path.is_file() or not set(without).isdisjoint(parts) or path.resolve() in seen:
                continue
            seen.add(path.resolve())
            name = "/".join(parts if root == folder else (root.name, *parts))
            files[path.as_posix() if name in files else name] = path
    return dict(sorted(files.items()))


def _rooted(folder: pathlib.Path, pattern: str) -> tuple[pathlib.Path, str]:
    """The folder where a glob starts, and the rest of the glob."""
    if pathlib.PurePath(pattern).is_absolute():
        return document_files.rooted(pattern)
    return folder, glob.escape(pattern) if os.path.isfile(folder / pattern) else pattern
