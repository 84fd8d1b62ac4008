"""What a run keeps of its task's data, and how it knows them again."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from etils import epath

from cope_jax.files import read_text


class Persistent:
    """What a task of data in files adds; a task whose examples are drawn overrides nothing of it.

    A run keeps two kinds of files: those without which it is of no use, such as a vocabulary; and digests that tell its
    data from others. It can be read back without the data, and resumes with the same data only.
    """

    config: Any

    def origin(self) -> str:
        """Where the data come from, in a few words for the log; "": they are drawn."""
        data_dir = getattr(self.config, "data_dir", "")
        return "the small built-in sample, since data_dir is not set" if data_dir is None else str(data_dir)

    def saved_files(self) -> dict[str, str]:
        """Files that a run must keep to be of use, such as a vocabulary: content by name. Default: none."""
        return {}

    def same_saved_files(self, folder: epath.PathLike) -> bool | None:
        """Whether the saved files in a folder mean what the task's do; None: it has none."""
        return _same(self.saved_files(), folder, str.splitlines)

    def data_digest(self) -> dict[str, str]:
        """Files that tell the data of the task from others: content by name. Default: none.

        A run keeps them, and resumes with the same data only. To read it back, the data need not be there.
        """
        return {}

    def same_data(self, folder: epath.PathLike, splits: Iterable[str]) -> bool | None:
        """Whether the data of some splits are those of the digests in a folder; None: it has none."""
        del splits
        return _same(self.data_digest(), folder, str)

    def example_options(self) -> dict[str, Any]:
        """The options that examples depend on beside the content of `saved_files` and `data_digest`. Default: all."""
        return dataclasses.asdict(self.config)

    @classmethod
    def with_saved_files(cls, options: Mapping[str, Any], folder: epath.PathLike) -> dict[str, Any]:
        """The options by which the task takes the saved files of a run instead of learning them anew."""
        del folder
        return dict(options)


def _same(files: Mapping[str, str], folder: epath.PathLike, meaning: Callable[[str], Any]) -> bool | None:
    """Whether those files that are in the folder too mean the same there; None: none is."""
    there = {name: read_text(file) for name in files if (file := epath.Path(folder) / name).exists()}
    return all(meaning(text) == meaning(files[name]) for name, text in there.items()) if there else None
