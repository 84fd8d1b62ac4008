"""Cells that train again are compared with their records: only times may differ."""

import doctest
import sys
import tarfile

import pytest

from cope_jax.encodings import ENCODINGS
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.grid.grid import Grid
from tests.encodings.test_registry import OWN
from tests.runs.grid.test_cells import RECORD, write_grid
from tools import retrain

GRID = "yield from (Cell(quick(), (seed,), 'copy') for seed in range(8))"


def test_examples():
    assert doctest.testmod(retrain).attempted


def finish(grid, cells, error=lambda cell: 0.25, **times):
    """Writes what cells leave behind that have measured `error`."""
    for cell in cells:
        folder = cell.folder(grid.workdir)
        workdirs.Workdir(folder).open(cell.config, cell.seeds)
        row = RECORD | {"metric": "sequence_error", "value": error(cell), **times}
        workdirs.write_json(folder / "result.json", {"records": [row], "environment": {}})


@pytest.mark.parametrize(
    ("error", "flags", "status", "shown"),
    [
        (lambda cell: 0.25, (), 0, ["the same bits"] * 2),
        (lambda cell: 0.375, (), 1, ["errors differ by 0.125"] * 2),
        (lambda cell: 0.375, ("--tolerance=0.125",), 0, ["errors differ by 0.125"] * 2),
        (lambda cell: float("nan"), ("--tolerance=1",), 1, ["errors differ by nan"] * 2),
    ],
)
def test_a_share_is_trained_and_compared(
    error, flags, status, shown, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(ENCODINGS, "_entries", dict(ENCODINGS._entries))
    file = tmp_path / "own.py"
    file.write_text(OWN)
    path = write_grid(tmp_path, GRID)
    cells = retrain.entries(retrain.grid_file.read(path), retrain.encodings.load(file))
    finish(Grid(tmp_path / "grid", cells), cells, wall_seconds=1.0)
    with tarfile.open(tmp_path / "grid.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "grid", "grid")
    trained = []

    def train(grid, **options):
        trained.extend(grid.cells)
        finish(grid, grid.cells, error, wall_seconds=2.0)

    monkeypatch.setattr(Grid, "train", train)
    options = (f"--records={tmp_path / 'grid.tar.xz'}", f"--grid={path}", f"--encoding={file}")
    options += ("--share=0.2", "--seed=3", f"--workdir={tmp_path / 'again'}")
    monkeypatch.setattr(sys, "argv", ["retrain", *options, *flags])
    with pytest.raises(SystemExit) if status else pytest.MonkeyPatch.context():
        retrain.main()
    assert {cell.config.encoding for cell in trained} == {"mine"}
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "2 of 8 cells",
        *(f"{cell.name}: {line}" for cell, line in zip(trained, shown, strict=True)),
    ]
