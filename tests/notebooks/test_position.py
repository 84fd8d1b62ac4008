"""The notebooks on position run from the first cell to the last, at a tiny size."""

import ast
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient", reason="the extra `notebooks` is not installed")

import nbformat
from nbclient import NotebookClient

import cope_jax as cj

FOLDER = Path(__file__).parents[2] / "notebooks"
TINY: dict[str, dict[str, Any]] = {
    "own_encoding": {
        "ENCODINGS_TO_COMPARE": ["token_count"],
        "STEPS": 20,
        "EXAMPLES": 8,
        "TASKS": {"selective_copy": {"num_tokens": 2, "num_blanks": 2}},
    },
    "quickstart": {
        "ENCODINGS": ["cope"],
        "NUM_TOKENS": 2,
        "NUM_BLANKS": 2,
        "STEPS": 20,
        "EVALUATE_EVERY": 10,
        "EXAMPLES": 8,
    },
}
PICTURES = {
    "own_encoding": ["gates", "positions"],
    "quickstart": ["trained", "look", "curves", "lengths", "heat-map"],
}
SECONDS_FOR_A_CELL = 300  # they take a few, on a machine that does nothing else


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "own_encoding"])
def test_runs_without_a_warning(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    monkeypatch.setenv("XLA_FLAGS", "")  # one device
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the notebook keeps its runs
    notebook = read(name)
    shrink(notebook, TINY[name])
    NotebookClient(
        notebook, timeout=SECONDS_FOR_A_CELL, resources={"metadata": {"path": str(FOLDER)}}
    ).execute()

    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    shown = {
        name: [kind for output in of_cell for kind in output.get("data", {})]
        for name, of_cell in outputs.items()
    }
    assert [name for name, kinds in shown.items() if "image/png" in kinds] == PICTURES[name]
    if name == "quickstart":
        assert "layer 1, head 1" in outputs["inspect"][0].data["text/plain"]
    else:
        assert "full and blockwise agree" in outputs["check"][0].text
        assert "token_count" in outputs["train"][-1].data["text/plain"]
    complaints = [
        o.text
        for of_cell in outputs.values()
        for o in of_cell
        if o.get("name") == "stderr" and "Warn" in o.text
    ]
    assert not complaints


def test_the_notebooks_own_experiments_are_valid():
    names: dict[str, Any] = {}
    exec(next(cell.source for cell in read("own_encoding").cells if cell.id == "parameters"), names)
    for name, options in names["TASKS"].items():
        assert (
            cj.config(f"{name}:small", encoding="cope", task={"options": options}).task.name == name
        )
        cj.tasks.create(name, **options)


@pytest.mark.parametrize("name", TINY)
def test_is_committed_without_outputs(name):
    run = [
        cell.id for cell in read(name).cells if cell.get("outputs") or cell.get("execution_count")
    ]
    assert not run, "clear the outputs before committing"


def shrink(notebook: Any, values: dict[str, Any]) -> None:
    """Assigns the values behind the cell of the parameters, all of which it must know."""
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    known = {
        name.id
        for line in ast.parse(cell.source).body
        for name in ast.walk(line)
        if isinstance(name, ast.Name)
    }
    assert values.keys() <= known
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in values.items())
