"""Writes the page of a grid."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from cope_jax import tasks
from cope_jax.commands.sweep.cells import Cell, State
from cope_jax.evaluation.report import grid_cells, grid_table, page
from cope_jax.evaluation.report.plot_style import save
from cope_jax.runs.records import Record
from cope_jax.storage.files import write_atomically
from cope_jax.tasks import Task
from cope_jax.training.metrics import read_curves


def write(state: State, records: Sequence[Record], environment: Record, workdir: Path, budget: str = "") -> list[Path]:
    """Writes report.html, with all cells, table.md, table.tex and table.png in `workdir`, and returns their paths.

    Args:
      state: the state of all cells.
      records: the records of finished cells.
      environment: the environment of finished cells.
      workdir: the folder of the grid.
      budget: what was searched, in words.
    """
    cells = [*state.finished, *state.failed, *state.left]
    known = {cell.table: _task(cell) for cell in {cell.table: cell for cell in state.finished}.values()}
    times = {
        (row["setting"], row["encoding"], row["seed"]): tqdm.format_interval(row["wall_seconds"]) for row in records
    }
    runs = [
        *(_run(cell, workdir, times[cell.table, cell.encoding, cell.seed]) for cell in state.finished),
        *(_run(cell, workdir, f"failed: {line}") for cell, line in state.failed.items()),
        *(_run(cell, workdir, _stage(cell, workdir)) for cell in state.left),
    ]
    title, tables = workdir.resolve().name, grid_cells.create(records, known)
    texts = {"table.md": grid_table.markdown(tables), "table.tex": grid_table.latex(tables)}
    written = [write_atomically(workdir / name, text) for name, text in texts.items()]
    written.append(save(grid_table.picture(tables, title), workdir / "table.png"))
    finished = f"{len(state.finished)} of {len(cells)} cells finished, {len(state.failed)} failed"
    facts = "; ".join(filter(None, (finished, budget, page.versions(environment))))
    return [page.write(workdir / "report.html", title, tables, _curves(state.finished, workdir), runs, facts), *written]


def _task(cell: Cell) -> Task:
    config = cell.experiment()
    return tasks.create(config.task.name, **config.task.options)


def _curves(cells: Sequence[Cell], workdir: Path) -> Iterator[Record]:
    for cell in cells:
        for row in read_curves(cell.folder(workdir) / "metrics.jsonl"):
            yield {"setting": cell.table, "encoding": cell.encoding, **row}


def _stage(cell: Cell, workdir: Path) -> str:
    return "not finished yet" if (cell.folder(workdir) / "checkpoints").exists() else "not trained yet"


def _run(cell: Cell, workdir: Path, state: str) -> page.PageRun:
    folder = cell.folder(workdir)
    command = shlex.join(["python", "-m", "cope_jax", "train", *cell.flags(), f"--workdir={folder}"])
    return page.PageRun(cell.table, cell.encoding, cell.seed, command, folder.relative_to(workdir).as_posix(), state)
