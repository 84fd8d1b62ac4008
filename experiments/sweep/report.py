"""Writes the page of a grid."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from cope_jax import tasks
from cope_jax.evaluation.report import grid_table, page
from cope_jax.evaluation.report.plot_style import save
from cope_jax.files import write_atomically
from cope_jax.runs import grid
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.records import Record
from cope_jax.tasks import Task
from cope_jax.training.metrics import read_metrics
from experiments.sweep.cells import Cell, State


def write(state: State, records: Sequence[Record], workdir: Path, budget: str = "") -> list[Path]:
    """Writes report.html, with all cells, table.md, table.tex and table.png in `workdir`, and returns their paths.

    Args:
      state: the state of all cells.
      records: the records of finished cells.
      workdir: the folder of the grid.
      budget: what was searched, in words.
    """
    cells = [*state.finished, *state.failed, *state.left]
    known = {cell.table: _task(cell) for cell in {cell.table: cell for cell in state.finished}.values()}
    runs = [
        *(_run(cell, workdir, _time(cell, workdir)) for cell in state.finished),
        *(_run(cell, workdir, f"failed: {line}") for cell, line in state.failed.items()),
        *(_run(cell, workdir, _stage(cell, workdir)) for cell in state.left),
    ]
    tables = [
        write_atomically(workdir / "table.md", grid_table.markdown(records, known)),
        write_atomically(workdir / "table.tex", grid_table.latex(records, known)),
    ]
    written = page.write(
        workdir / "report.html",
        workdir.resolve().name,
        records,
        _curves(state.finished, workdir),
        runs,
        known,
        f"{len(state.finished)} of {len(cells)} cells finished, {len(state.failed)} failed; "
        f"{budget + '; ' if budget else ''}"
        f"{page.versions(grid.environment([cell.folder(workdir) / 'result.json' for cell in state.finished]))}",
    )
    drawn = save(grid_table.picture(records, known, workdir.resolve().name), workdir / "table.png")
    return [written, *tables, drawn]


def _task(cell: Cell) -> Task:
    config = cell.experiment()
    return tasks.create(config.task.name, **config.task.options)


def _curves(cells: Sequence[Cell], workdir: Path) -> list[Record]:
    return [
        {"setting": cell.table, "encoding": cell.encoding, **row}
        for cell in cells
        for row in read_metrics(cell.folder(workdir) / "metrics.jsonl")
        if "split" in row
    ]


def _time(cell: Cell, workdir: Path) -> str:
    records = workdirs.read_records(cell.folder(workdir) / "result.json")
    return str(tqdm.format_interval(records[0]["wall_seconds"]))


def _stage(cell: Cell, workdir: Path) -> str:
    return "not finished yet" if (cell.folder(workdir) / "checkpoints").exists() else "not trained yet"


def _run(cell: Cell, workdir: Path, state: str) -> page.PageRun:
    folder = cell.folder(workdir)
    command = shlex.join(["python", "-m", "experiments.train", *cell.flags(), f"--workdir={folder}"])
    return page.PageRun(cell.table, cell.encoding, cell.seed, command, folder.relative_to(workdir).as_posix(), state)
