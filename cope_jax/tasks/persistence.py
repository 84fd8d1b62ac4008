"""Files and digests of its data that a run saves, and the check of them when it resumes."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from cope_jax.corpora import document_files
from cope_jax.corpora.raw_text import fingerprint
from cope_jax.storage.files import read_object, read_text


class Persistent:
    """Methods for tasks with data in files. A task whose examples are sampled overrides none.

    A run keeps two kinds of files: files that it needs, such as a vocabulary, and digests that
    identify its data. A run can be read back without the data, but it resumes only with the same
    data.
    """

    config: Any
    _SOURCES = "corpus.json"  # the file with the digests of a corpus
    _corpus: Mapping[str, Any] = {}  # see `_keep_digests`

    def origin(self) -> str:
        """The source of the data, for the log; "" if examples are sampled."""
        if files := self._own_file() or self._own_files():
            return ", ".join(files)
        data_dir = getattr(self.config, "data_dir", "")
        if data_dir is None:
            return "the small built-in sample, because data_dir is not set"
        return str(data_dir)

    def saved_files(self) -> dict[str, str]:
        """The files that a run needs, such as a vocabulary, by name. Default: no files."""
        return {}

    def same_saved_files(self, folder: epath.PathLike) -> bool | None:
        """True if a folder's saved files are equivalent to the task's; None if there are none."""
        return _same(self.saved_files(), folder, str.splitlines)

    def data_digest(self) -> dict[str, str]:
        """The files that identify the task's data, by name. Default: digests of the user's files, or
        of the splits of the corpus in `data_dir`.

        A run keeps these files, and resumes only with the same data. Reading a run back does not
        need the data.
        """
        if self._corpus:
            return {self._SOURCES: json.dumps(self._corpus, indent=1) + "\n"}
        paths = self._own_file() or [file.path for file in document_files.find(self._own_files())]
        digests = [hashlib.sha256(epath.Path(path).read_bytes()).hexdigest() for path in paths]
        return {"own_files.json": json.dumps(digests, indent=1) + "\n"} if digests else {}

    def _keep_digests(self, config: Any, texts: Mapping[str, Iterable[str]]) -> None:
        """Keeps the digest of each split of the corpus in `data_dir`; not of the built-in sample,
        nor of the user's files.
        """
        if config.data_dir is not None and not getattr(config, "files", ()):
            self._corpus = {split: fingerprint(text) for split, text in texts.items()}

    def _own_file(self) -> Sequence[str]:
        """The path in the option `file` of a table that replaces a corpus; empty if not set."""
        return tuple(filter(None, [getattr(self.config, "file", None)]))

    def _own_files(self) -> Sequence[str]:
        """The paths and globs in the option `files`, which name text in place of a corpus."""
        return getattr(self.config, "files", ())

    def same_data(self, folder: epath.PathLike, splits: Iterable[str]) -> bool | None:
        """True if these splits match the digests in a folder, or all if digests are not of splits;
        None if there are none.
        """
        file = epath.Path(folder) / self._SOURCES
        if not self._corpus or not file.exists():
            return _same(self.data_digest(), folder, str)
        saved = read_object(file, "delete it to skip this check")
        names = {*splits} & self._corpus.keys() or self._corpus
        return all(saved.get(name) == self._corpus[name] for name in names)

    def example_options(self) -> dict[str, Any]:
        """The options that examples depend on, besides files and digests. Default: all."""
        return dataclasses.asdict(self.config)

    @classmethod
    def with_saved_files(cls, options: Mapping[str, Any], folder: epath.PathLike) -> dict[str, Any]:
        """The options for loading the saved files of a run instead of learning them again."""
        del folder
        return dict(options)


def _same(
    files: Mapping[str, str], folder: epath.PathLike, meaning: Callable[[str], Any]
) -> bool | None:
    """True if all `files` in the folder have the same `meaning` there; None if none exists."""
    files_there = (name for name in files if (epath.Path(folder) / name).exists())
    there = {name: read_text(epath.Path(folder) / name) for name in files_there}
    if not there:
        return None
    return all(meaning(text) == meaning(files[name]) for name, text in there.items())
