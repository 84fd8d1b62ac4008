"""The notebook runs from the first cell to the last, at a tiny size."""

import ast
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient", reason="the extra `notebooks` is not installed")

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
TINY = {"ENCODINGS": ["cope"], "NUM_TOKENS": 2, "NUM_BLANKS": 2, "STEPS": 20, "EVALUATE_EVERY": 10, "EXAMPLES": 8}
SECONDS_FOR_A_CELL = 300  # they take a few, on a machine that does nothing else


@pytest.fixture
def notebook() -> Any:
    return nbformat.read(FOLDER / "quickstart.ipynb", as_version=4)


def test_runs_without_a_warning(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    monkeypatch.setenv("XLA_FLAGS", "")  # one device
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the notebook keeps its runs
    shrink(notebook)
    NotebookClient(notebook, timeout=SECONDS_FOR_A_CELL, resources={"metadata": {"path": str(FOLDER)}}).execute()

    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    shown = {name: [kind for output in own for kind in output.get("data", {})] for name, own in outputs.items()}
    assert [name for name, kinds in shown.items() if "image/png" in kinds] == ["look", "curves", "lengths", "heat-map"]
    assert "layer 1, head 1" in outputs["inspect"][0].data["text/plain"]
    complaints = [o.text for own in outputs.values() for o in own if o.get("name") == "stderr" and "Warn" in o.text]
    assert not complaints


def test_is_committed_without_outputs(notebook):
    run = [cell.id for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]
    assert not run, "clear the outputs before committing"


def shrink(notebook: Any) -> None:
    """Assigns TINY behind the cell of the parameters, all of which it must know."""
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    known = {name.id for line in ast.parse(cell.source).body for name in ast.walk(line) if isinstance(name, ast.Name)}
    assert TINY.keys() <= known
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in TINY.items())
