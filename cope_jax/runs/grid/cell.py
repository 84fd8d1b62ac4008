"""A cell of a grid: a config, its seeds, and its row and column."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cope_jax import encodings
from cope_jax.encodings.encoding_file import files as encoding_files
from cope_jax.errors import ConfigError
from cope_jax.registry import check_seeds
from cope_jax.storage.files import inside
from cope_jax.training.experiment_config import ExperimentConfig


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """One run of a grid: a config and the seeds that train side by side.

    >>> import cope_jax as cj
    >>> cell = Cell(cj.config("quick", encoding="rope"), (1,), setting="copy")
    >>> print(f"{cell.name}: {cell.folder(Path('runs'))}")
    copy, rope, seed 1: runs/copy/cells/rope/seed_1

    Attributes:
      config: the config of the run.
      seeds: the seeds, distinct and below 2³¹; one program trains them together.
      setting: the name of the column. All cells of a setting have the same task. "" if the grid has
        only one setting.
      label: the name of the row; if empty, the encoding.
      search: values to try for some fields, by their dotted paths, such as
        {"optimizer.learning_rate": (1e-3, 3e-3)}. One trial for each combination runs before the
        cells of a setting and row: see `cope_jax.runs.grid.search`.

    Raises:
      ConfigError: a value has the wrong type, or a name has no letter or digit.
    """

    config: ExperimentConfig
    seeds: tuple[int, ...] = (0,)
    setting: str = ""
    label: str = ""
    search: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if not isinstance(self.config, ExperimentConfig):
            raise ConfigError(f"a cell needs a config, not {self.config!r}: pass cj.config(name)")
        check_seeds(self.seeds, "a cell")
        object.__setattr__(self, "label", self.label or self.config.encoding)
        for field, name in (("setting", self.setting), ("label", self.label)):
            if not isinstance(name, str) or (name and not folder_name(name)):
                raise ConfigError(f"the {field} of a cell needs letters or digits, not {name!r}")

    @property
    def name(self) -> str:
        first, last = self.seeds[0], self.seeds[-1]
        seeds = f"seed {first}" if first == last else f"seeds {first}–{last}"
        return ", ".join(filter(None, (self.setting, self.label, seeds)))

    @property
    def fields(self) -> dict[str, str]:
        """Fields of every record: the label, if it is not the encoding."""
        return {} if self.label == self.config.encoding else {"system": self.label}

    def folder(self, workdir: Path) -> Path:
        """The workdir of the run, in the workdir of the grid."""
        first, last = self.seeds[0], self.seeds[-1]
        return folder_of(workdir, self.label, self.setting) / (
            f"seed_{first}" if first == last else f"seeds_{first}-{last}"
        )

    def to_json(self) -> str:
        """The cell as text, for the process that trains it, with the files of its encoding."""
        files = {"encoding_files": encoding_files(self.config.encoding)}
        return json.dumps(dataclasses.asdict(self) | files)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Cell":
        """Loads the files of the encoding, and returns the cell."""
        fields = json.loads(text)
        for file, digest in fields.pop("encoding_files").items():
            encodings.load(file)
            if encoding_files(fields["config"]["encoding"]).get(file) != digest:
                raise ConfigError(f"{file} has changed since the command started: start it again")
        config = ExperimentConfig.from_mapping(fields["config"])
        return cls(**fields | {"config": config, "seeds": tuple(fields["seeds"])})


def folder_of(workdir: Path, label: str, setting: str = "") -> Path:
    """The folder of all cells of a row and column."""
    return inside(workdir / folder_name(setting) / "cells", folder_name(label), links=True)


def folder_name(label: str) -> str:
    """The name of a folder for any text; "" if no letter, digit or sign of the text can be in it.

    >>> folder_name("cope(gate=value)")
    'cope_gate=value'
    >>> folder_name("../..")
    '.._..'
    >>> folder_name("..")
    ''
    """
    name = re.sub(r"[^\w=.+-]+", "_", label).strip("_")
    if len(name.encode()) > 255:  # more than file systems allow
        name = f"{name[:50]}-{hashlib.sha256(repr(label).encode()).hexdigest()[:16]}"
    return name if name.strip(".") else ""


def plan(
    configs: Mapping[str, ExperimentConfig], seeds: int, width: int, workdir: Path
) -> list[Cell]:
    """Lists the cells of each config, by label.

    The cells of one label together have the seeds from 0 to `seeds` − 1.
    The list has the cells that are already in the workdir, and new cells of at most `width` seeds
    for all other seeds. Of cells that share a seed, it has the largest.
    """
    cells = []
    for label, config in configs.items():
        folders = folder_of(workdir, label).glob("seed*")
        groups: list[tuple[int, ...]] = []
        known: set[int] = set()
        existing = (seeds_of(folder, seeds) for folder in folders)
        for group in sorted(existing, key=lambda group: (-len(group), group)):
            if group and known.isdisjoint(group):
                groups.append(group)
                known.update(group)
        new: list[tuple[int, ...]] = []
        for seed in (seed for seed in range(seeds) if seed not in known):
            follows = new and seed == new[-1][-1] + 1 and len(new[-1]) < width
            new[-1:] = [(*new[-1], seed)] if follows else [*new[-1:], (seed,)]
        cells += [Cell(config, group, label=label) for group in sorted(groups + new)]
    return cells


def entries(cells: Iterable[Cell], names: Sequence[str]) -> list[Cell]:
    """Returns the cells of other encodings in a grid, in its order: one for each of its settings and
    seeds, with the first config that the grid has for them.

    >>> import cope_jax as cj
    >>> grid = [Cell(cj.config("quick", encoding=name), (0,), "copy") for name in ("cope", "rope")]
    >>> [cell.name for cell in entries(grid, ["fox"])]
    ['copy, fox, seed 0']
    """
    known: set[tuple[str, int]] = set()
    entered = []
    for cell in cells:
        slots = {(cell.setting, seed) for seed in cell.seeds}
        if known.isdisjoint(slots):
            known |= slots
            configs = {name: dataclasses.replace(cell.config, encoding=name) for name in names}
            entered += [
                dataclasses.replace(cell, config=config, label=name)
                for name, config in configs.items()
            ]
    return entered


def seeds_of(folder: Path, most: int) -> tuple[int, ...]:
    """The seeds in the name of a cell's folder; () for any other name, or if a seed is not below
    `most`, since a name can have any numbers.

    >>> seeds_of(Path("cells/cope/seeds_3-5"), 6), seeds_of(Path("cells/cope/seeds_3-5"), 5)
    ((3, 4, 5), ())
    """
    match = re.fullmatch(r"seeds?_(\d+)(?:-(\d+))?", folder.name)
    if match is None:
        return ()
    first, last = int(match[1]), int(match[2] or match[1])
    return tuple(range(first, last + 1)) if last < most else ()
