"""What a run saves of its task's data, and how it checks them on resume."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from etils import epath

from cope_jax.files import read_text


class Persistent:
    """Methods for tasks with data in files; a task whose examples are sampled overrides none of them.

    A run keeps two kinds of files: those that it needs, such as a vocabulary, and digests that identify its data. It
    can be read back without the data, but resumes only with the same data.
    """

    config: Any

    def origin(self) -> str:
        """Where the data come from, in a few words for the log; "": they are sampled."""
        data_dir = getattr(self.config, "data_dir", "")
        return "the small built-in sample, since data_dir is not set" if data_dir is None else str(data_dir)

    def saved_files(self) -> dict[str, str]:
        """Files that a run needs, such as a vocabulary: content by name. Default: none."""
        return {}

    def same_saved_files(self, folder: epath.PathLike) -> bool | None:
        """Whether the saved files in a folder are equivalent to the task's; None: the folder has none of them."""
        return _same(self.saved_files(), folder, str.splitlines)

    def data_digest(self) -> dict[str, str]:
        """Files that identify the data of the task: content by name. Default: none.

        A run keeps them, and resumes only with the same data. To read it back, the data are not needed.
        """
        return {}

    def same_data(self, folder: epath.PathLike, splits: Iterable[str]) -> bool | None:
        """Whether the data of some splits match the digests in a folder; None: the folder has no digests."""
        del splits
        return _same(self.data_digest(), folder, str)

    def example_options(self) -> dict[str, Any]:
        """The options that examples depend on, besides `saved_files` and `data_digest`. Default: all."""
        return dataclasses.asdict(self.config)

    @classmethod
    def with_saved_files(cls, options: Mapping[str, Any], folder: epath.PathLike) -> dict[str, Any]:
        """The options with which the task loads the saved files of a run instead of learning them again."""
        del folder
        return dict(options)


def _same(files: Mapping[str, str], folder: epath.PathLike, meaning: Callable[[str], Any]) -> bool | None:
    """Whether the files that are in the folder have the same meaning there; None: none of them is there."""
    there = {name: read_text(file) for name in files if (file := epath.Path(folder) / name).exists()}
    return all(meaning(text) == meaning(files[name]) for name, text in there.items()) if there else None
