"""What a run keeps of its task's data, and how it knows them again."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from cope_jax.files import read_text


class Persistent:
    """What a task of data in files adds; a task whose examples are drawn overrides nothing of it.

    A run keeps two kinds of files: its artifacts, without which it is of no use, such as a vocabulary; and its sources,
    digests that tell its data from others. It can be read back without the data, and goes on with the same data only.
    """

    config: Any

    def origin(self) -> str:
        """Where the data come from, in a few words for the log; "": they are drawn."""
        data_dir = getattr(self.config, "data_dir", "")
        return "the small built-in sample, since data_dir is not set" if data_dir is None else str(data_dir)

    def artifacts(self) -> dict[str, str]:
        """Files that a run must keep to be of use, such as a vocabulary: content by name. Default: none."""
        return {}

    def same_artifacts(self, folder: epath.PathLike) -> bool | None:
        """Whether the artifacts in a folder, such as a vocabulary, mean what the task's do; None: it has none."""
        there = {name: file for name in self.artifacts() if (file := epath.Path(folder) / name).exists()}
        if not there:
            return None
        return all(read_text(file).splitlines() == self.artifacts()[name].splitlines() for name, file in there.items())

    def sources(self) -> dict[str, str]:
        """Files that tell the data of the task from others: content by name. Default: none.

        A run keeps them and goes on with the same data only. To read it back, the data need not be there.
        """
        return {}

    def same_sources(self, folder: epath.PathLike, splits: Iterable[str]) -> bool | None:
        """Whether the data of some splits are those of which the sources in a folder tell; None: it has none."""
        del splits
        there = {name: file for name in self.sources() if (file := epath.Path(folder) / name).exists()}
        return all(read_text(file) == self.sources()[name] for name, file in there.items()) if there else None

    def example_options(self) -> dict[str, Any]:
        """The options that examples depend on beside the content of `artifacts` and `sources`. Default: all."""
        return dataclasses.asdict(self.config)

    @classmethod
    def with_artifacts(cls, options: Mapping[str, Any], folder: epath.PathLike) -> dict[str, Any]:
        """The options by which the task takes the artifacts of a run from its folder, instead of learning them anew."""
        del folder
        return dict(options)
