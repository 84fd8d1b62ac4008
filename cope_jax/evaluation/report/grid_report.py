"""Writes what a grid has measured: records, tables, and the page with all cells."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tqdm import tqdm

from cope_jax.evaluation.report import grid_cells, page, results_table
from cope_jax.evaluation.report.grid_cells import Tables
from cope_jax.runs.grid.cell import Cell
from cope_jax.runs.grid.grid import Grid, State
from cope_jax.runs.records import Record
from cope_jax.storage.files import write_atomically
from cope_jax.tasks import Task
from cope_jax.training.metrics import read_curves


def write(
    grid: Grid,
    state: State,
    tasks: Mapping[str, Task],
    command: Callable[[Cell], str],
    title: str,
    facts: tuple[str, ...] = (),
) -> tuple[Tables, list[Path]]:
    """Writes report.html and table.tex, and returns the tables and both paths.

    Args:
      grid: the grid.
      state: the state of the cells to show.
      tasks: the task of each setting.
      command: returns the command that trains a cell.
      title: the heading of the page.
      facts: what the page says in addition to versions.
    """
    names = {setting: setting or task.name for setting, task in tasks.items()}
    records = [{**row, "setting": row.get("setting") or names[""]} for row in grid.records(state.finished)]
    tables = grid_cells.create(records, {names[setting]: task for setting, task in tasks.items()})
    runs = [
        page.PageRun(
            names.get(cell.setting, cell.setting),
            cell.label,
            seed,
            command(cell),
            cell.folder(grid.workdir).relative_to(grid.workdir).as_posix(),
            shown,
        )
        for cell, shown in _states(grid, state)
        for seed in cell.seeds
    ]
    line = "; ".join([*filter(None, facts), page.versions(grid.environment(state.finished))])
    rows = ({**row, "setting": names[row["setting"]]} for row in curves(grid, state.finished))
    written = page.write(grid.workdir / "report.html", title, tables, rows, runs, line)
    return tables, [written, write_atomically(grid.workdir / "table.tex", results_table.latex(tables))]


def curves(grid: Grid, cells: list[Cell]) -> Iterator[Record]:
    """The points of the learning curves of cells."""
    for cell in cells:
        for row in read_curves(cell.folder(grid.workdir) / "metrics.jsonl"):
            yield {"setting": cell.setting, "encoding": cell.label, **row}


def _states(grid: Grid, state: State) -> Iterator[tuple[Cell, str]]:
    """Each cell with its progress."""
    for cell in state.finished:
        yield cell, tqdm.format_interval(grid.records([cell])[0]["wall_seconds"])
    for cell, line in state.failed.items():
        yield cell, f"failed: {line}"
    for cell in state.left:
        started = (cell.folder(grid.workdir) / "checkpoints").exists()
        yield cell, "not finished yet" if started else "not trained yet"
