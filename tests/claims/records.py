"""The sources of sentences of pages: the archived records, and the tables of RESULTS.md."""

import dataclasses
import functools
import json
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from cope_jax import tasks
from cope_jax.configs.abilities import SETTINGS
from cope_jax.evaluation.report import grid_cells, significance
from tools.publish import read_tables

ROOT = Path(__file__).parents[2]
ARCHIVE = ROOT / "experiments" / "results" / "abilities.tar.xz"
TASKS = {setting: tasks.create(name, **options) for setting, (name, options) in SETTINGS.items()}
WORDS = "no one two three four five six seven eight nine ten eleven twelve thirteen".split()
RESULTS = "experiments/RESULTS.md"
README = "README.md"
COMMANDS = "docs/commands.md"
GALLERY = "docs/gallery.md"
IN, OUT = grid_cells.IN, grid_cells.OUT


@dataclasses.dataclass
class Records:
    """Errors in % of the grid `abilities`, and tables of RESULTS.md.

    Attributes:
      rows: records of the headline metric of each setting.
      tables: the tables below each heading, in order: row → column → text.
      number: changes each number of the tables; tests use it to make sentences wrong.
    """

    rows: list[dict[str, Any]]
    tables: Mapping[str, list[dict[str, dict[str, str]]]]
    number: Any = float
    _better: dict[tuple[str, str], set[tuple[str, str]]] = dataclasses.field(
        default_factory=dict, init=False
    )

    @functools.cached_property
    def _errors(self) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
        errors_of: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
        for row in self.rows:
            errors = errors_of.setdefault((row["setting"], row["encoding"]), {}).setdefault(
                row["split"], {}
            )
            errors[row["seed"]] = 100 * row["value"]
        return errors_of

    def names(self, least: int = 0, setting: str = "recall") -> list[str]:
        """The encodings with at least so many seeds."""
        return [
            name
            for where, name in self._errors
            if where == setting and len(self.errors(where, name)) >= least
        ]

    def errors(self, setting: str, name: str, split: str = IN) -> np.ndarray:
        """The error of each seed; out of distribution it is the mean over the other splits."""
        by_split = self._errors[setting, name]
        names = {
            IN: ["in_distribution"],
            OUT: [split for split in by_split if split != "in_distribution"],
        }.get(split, [split])
        return np.array(
            [
                fmean(by_split[name_of_split][seed] for name_of_split in names)
                for seed in sorted(by_split[names[0]])
            ]
        )

    def mean(self, setting: str, name: str, split: str = IN) -> float:
        return float(self.errors(setting, name, split).mean())

    @functools.cached_property
    def views(self) -> dict[str, dict[str, grid_cells.Column]]:
        return grid_cells.views_of(self.rows)

    def better(self, setting: str, split: str = IN) -> set[tuple[str, str]]:
        """The pairs of encodings of which the first is shown to be better."""
        if (setting, split) not in self._better:
            self._better[setting, split] = shown_pairs(self.views[split][setting])
        return self._better[setting, split]

    def beats_all(self, name: str, setting: str, split: str = IN) -> bool:
        """True if an encoding is shown to be better than all others with five seeds."""
        return {(name, other) for other in self.names(5) if other != name} <= self.better(
            setting, split
        )

    def cell(self, heading: str, row: str, column: str, table: int = 0) -> list[float]:
        """The numbers in a cell of a table below this heading, or the one that begins like this."""
        (name,) = {heading} & {*self.tables} or (n for n in self.tables if n.startswith(heading))
        text = self.tables[name][table][row][column].replace(",", "")
        return [self.number(number) for number in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", text)]

    def first(self, heading: str, row: str, column: str, table: int = 0) -> float:
        return self.cell(heading, row, column, table)[0]


def shown_pairs(column: grid_cells.Column) -> set[tuple[str, str]]:
    """The pairs of encodings of which the first is shown to be better in a column."""
    compared = significance.differences(**column._asdict()).items()
    return {pair if d.mean < 0 else pair[::-1] for pair, d in compared if d.shown}


class Claim(NamedTuple):
    """A sentence, or a part of one.

    Attributes:
      text: its words, with a field for each of its values.
      values: the values, from the records.
      holds: whether the records support the words.
      page: where it is.
    """

    text: str
    values: Callable[[Records], Sequence[object]] = lambda _: ()
    holds: Callable[[Records], bool] = lambda _: True
    page: str = RESULTS


def read() -> Records:
    """The records as they are."""
    files = {}
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            folder, _, file = member.name.rpartition("/")
            if file in ("config.json", "result.json"):
                files[folder, file] = json.load(archive.extractfile(member) or b"")
    rows = []
    for folder, file in files:
        if file == "result.json":
            training = files[folder, "config.json"]["config"]["training"]
            common = {"setting": folder.split("/")[1], "data_seed": training["data_seed"]}
            rows += [{**common, **row} for row in files[folder, file]["records"]]
    return Records(
        grid_cells.headlines(rows, TASKS),
        read_tables((ROOT / "experiments" / "RESULTS.md").read_text()),
    )
