"""Writes what a grid has measured: records, tables, and the page with all cells."""

import json
import math
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from flax.traverse_util import flatten_dict
from tqdm import tqdm

from cope_jax.encodings.encoding_file import files
from cope_jax.errors import ConfigError
from cope_jax.evaluation.report import grid_cells, page, results_picture, results_table
from cope_jax.evaluation.report.grid_cells import Tables
from cope_jax.evaluation.report.plot_style import save
from cope_jax.runs.grid.cell import Cell
from cope_jax.runs.grid.grid import Grid, State
from cope_jax.runs.records import Record
from cope_jax.runs.workdir import AGAIN
from cope_jax.storage.files import write_atomically
from cope_jax.tasks import Task
from cope_jax.training.metrics import read_curves


def write(
    grid: Grid,
    state: State,
    task_of: Mapping[str, Task],
    title: str,
    facts: tuple[str, ...] = (),
    costs: Mapping[str, Mapping[str, float]] | None = None,
) -> tuple[Tables, list[Path]]:
    """Writes report.html and table.tex, and returns the tables and both paths.

    Args:
      grid: the grid.
      state: the state of the cells to show.
      task_of: the task of each setting.
      title: the heading of the page.
      facts: what the page says in addition to versions.
      costs: further costs of encodings, by their names.
    """
    names = {setting: setting or task.name for setting, task in task_of.items()}
    records = [
        {
            **row,
            "setting": names[cell.setting],
            "encoding": cell.label,
            "data_seed": cell.config.training.data_seed,
        }
        for cell in state.finished
        for row in grid.records([cell])
    ]
    tables = grid_cells.create(records, {names[setting]: task for setting, task in task_of.items()})
    runs = [
        page.PageRun(
            names.get(cell.setting, cell.setting),
            cell.label,
            seed,
            command(grid, cell),
            cell.folder(grid.workdir).relative_to(grid.workdir).as_posix(),
            shown,
            (grid.environment([cell]).get("commit") or "")[:12],
            flatten_dict(cell.config.recipe(), sep="."),
        )
        for cell, shown in _states(grid, state)
        for seed in cell.seeds
    ]
    line = "; ".join([*filter(None, facts), page.versions(grid.environment(state.finished))])
    rows = ({**row, "setting": names[row["setting"]]} for row in curves(grid, state.finished))
    written = page.write(grid.workdir / "report.html", title, tables, rows, runs, line, costs)
    latex = write_atomically(grid.workdir / "table.tex", results_table.latex(tables))
    return tables, [written, latex]


def write_all(
    grid: Grid,
    state: State,
    budget: str = "",
    costs: Mapping[str, Mapping[str, float]] | None = None,
) -> tuple[Tables, list[Path]]:
    """Writes the results of all finished cells, and returns the tables and the paths, first that of
    the page.

    The files are report.html, results.json, results.csv, table.tex, table.md and table.png; the
    results are written first. `budget` says what was searched; `costs` are further costs of
    encodings, by their names.
    """
    settings = {cell.setting: cell.config.task for cell in state.finished}
    made = {setting: task.create() for setting, task in settings.items()}
    total = len(state.finished) + len(state.failed) + len(state.left)
    facts = (f"{len(state.finished)} of {total} cells finished, {len(state.failed)} failed", budget)
    title = grid.workdir.resolve().name
    results = grid.write_results()
    tables, (page, latex) = write(grid, state, made, title, facts, costs)
    text = write_atomically(grid.workdir / "table.md", results_table.markdown(tables))
    picture = save(results_picture.picture(tables, title), grid.workdir / "table.png")
    return tables, [page, *results, latex, text, picture]


def command(grid: Grid, cell: Cell) -> str:
    """The command that trains a cell.

    Cells that have not begun, and seeds that train side by side, need the command of the grid.
    """
    folder = cell.folder(grid.workdir)
    words = [*sys.argv[0].split(), *sys.argv[1:]]
    if len(cell.seeds) == 1 and (folder / "config.json").exists():
        given = {"config": folder / "config.json", "seed": cell.seeds[0], "workdir": folder}
        flags = [*given.items(), *(("encoding", file) for file in files(cell.config.encoding))]
        words = ["cope-jax", "train", *(f"--{name}={value}" for name, value in flags)]
    return shlex.join(words)


def curves(grid: Grid, cells: list[Cell]) -> Iterator[Record]:
    """The points of the learning curves of cells. Null values become NaN, as in records.

    ConfigError: a row is damaged.
    """
    for cell in cells:
        path = cell.folder(grid.workdir) / "metrics.jsonl"
        for row in read_curves(path):
            _check(row, path)
            row = {name: math.nan if value is None else value for name, value in row.items()}
            yield {"setting": cell.setting, "encoding": cell.label, **row}


def _check(row: Record, path: Path) -> None:
    """Raises ConfigError unless a row of a curve has a seed, a split, and numbers or null besides."""
    known = {"seed": (int,), "split": (str,)}
    for name in (*known, *row):
        if type(row.get(name, "")) not in known.get(name, (int, float, type(None))):
            raise ConfigError(
                f"{path} is damaged (step {row['step']} has {json.dumps(row.get(name))[:50]} as {name}): "
                f"{AGAIN}"
            )


def _states(grid: Grid, state: State) -> Iterator[tuple[Cell, str]]:
    """Each cell with its progress."""
    for cell in state.finished:
        yield cell, tqdm.format_interval(grid.seconds(cell))
    for cell, line in state.failed.items():
        yield cell, f"failed: {line}"
    for cell in state.left:
        started = (cell.folder(grid.workdir) / "checkpoints").exists()
        yield cell, "not finished yet" if started else "not trained yet"
