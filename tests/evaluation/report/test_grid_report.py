"""Reports of grids with cells that diverged, or whose files are damaged."""

import json
import math
import re

import pytest

import cope_jax as cj
from cope_jax.errors import ConfigError
from cope_jax.evaluation.report import grid_report, page_charts
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.grid.cell import Cell
from cope_jax.runs.grid.grid import Grid
from cope_jax.runs.records import finite
from tests.evaluation.report.test_page import content

ENVIRONMENT = {"commit": "0123456789abcdef", "jax": "1.2.3", "device_kind": "cpu"}
SPLITS = ("in_distribution", "dense")


def finish(cell, workdir, error, changes=()):
    """Writes what a finished cell leaves behind that has this error on all splits."""
    folder = cell.folder(workdir)
    workdirs.Workdir(folder).open(cell.config, cell.seeds)
    shared = {"encoding": cell.label, "seed": cell.seeds[0], "step": 2, "parameters": 9}
    shared |= {"metric": "sequence_error", "kind": "split", "examples": 500, "wall_seconds": 1.0}
    shared |= dict(changes)
    records = [{**shared, "split": split, "value": error} for split in SPLITS]
    workdirs.write_json(folder / "result.json", {"records": records, "environment": ENVIRONMENT})
    curve = {"step": 1, "seed": cell.seeds[0], "split": SPLITS[0]}
    row = finite(curve | {"sequence_error": error})
    (folder / "metrics.jsonl").write_text(f"{json.dumps(row)}\n")


@pytest.fixture
def grid(tmp_path):
    """A finished grid of two encodings with two seeds."""
    return finished(tmp_path, 2, 0)


def finished(workdir, seeds, data_seed, errors=(("cope", 0.25), ("rope", 0.25))):
    """A finished grid with these errors of each seed, whose data have `data_seed` times its seed."""
    cells = {}
    for seed in range(seeds):
        for name, error in errors:
            training = {"data_seed": data_seed * seed}
            cell = Cell(cj.config("quick", encoding=name, training=training), (seed,))
            cells[cell] = error
    for cell, error in cells.items():
        finish(cell, workdir, error)
    return Grid(workdir, cells)


def test_a_cell_that_is_not_finite_reads_so_and_all_others_are_reported(grid):
    finish(grid.cells[1], grid.workdir, math.inf)
    _, paths = grid_report.write_all(grid, grid.state())
    assert all(path.exists() for path in paths)
    shown = content(grid.workdir / "report.html")
    for heading in ("in distribution", "dense"):
        split = shown["views"]["all splits"][heading]
        assert [split[name]["text"] for name in ("cope", "rope")] == ["25.0 ± 0.0", "not finite"]
    curves = {point["encoding"]: point for point in shown["curves"]}
    keys = ("mean", "low", "high")
    assert [curves["cope"][key] for key in keys] == [0.25] * 3
    assert [curves["rope"][key] for key in keys] == [None] * 3
    assert {point["steps to solve"] for point in shown["cost"]} == {"not solved"}
    values = [record["value"] for record in json.loads(paths[1].read_text())["records"]]
    assert values == [0.25, 0.25, None, None, 0.25, 0.25, 0.25, 0.25]


def test_a_band_with_a_value_that_is_not_finite_has_no_ends():
    for values in ((math.nan, 0.5), (0.5, math.nan)):
        (point,) = page_charts.bands([{"step": 1, "value": value} for value in values], ["step"])
        assert all(math.isnan(point[key]) for key in ("mean", "low", "high"))


def test_results_are_written_before_the_page(grid, monkeypatch):
    def refuse(*_):
        raise RuntimeError("the page")

    monkeypatch.setattr(grid_report, "write", refuse)
    with pytest.raises(RuntimeError, match="the page"):
        grid_report.write_all(grid, grid.state())
    assert len(json.loads((grid.workdir / "results.json").read_text())["records"]) == 8
    assert (grid.workdir / "results.csv").exists()


@pytest.mark.parametrize(("data_seed", "shown"), [(0, False), (1, True)])
def test_seeds_share_their_test_examples_as_the_configs_say(data_seed, shown, tmp_path):
    """One of 500 examples is no difference, if it may be the same one in all ten seeds."""
    grid = finished(tmp_path, 10, data_seed, (("cope", 0.0), ("rope", 0.004)))
    tables, _ = grid_report.write(grid, grid.state(), {"": grid.cells[0].config.task.create()}, "")
    assert tables.cells["all splits"]["dense"]["cope"].best == shown


def test_seeds_that_trained_together_have_the_time_of_all(tmp_path):
    cell = Cell(cj.config("quick", encoding="cope"), (2, 3))
    finish(cell, tmp_path, 0.5, {"wall_seconds": 7.0})
    grid = Grid(tmp_path, [cell])
    assert list(grid_report._states(grid, grid.state())) == [(cell, "00:14")]


def spoil(grid, **changes):
    """Changes the result of the first cell."""
    path = grid.cells[0].folder(grid.workdir) / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


GOOD = {"encoding": "cope", "seed": 0, "step": 2, "parameters": 9, "split": "dense"}
GOOD |= {"metric": "sequence_error", "wall_seconds": 1.0, "value": 0.5}


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([], "it has no record"),
        ([{}], "a record lacks seed"),
        ([GOOD | {"value": "x"}], 'value of a record is "x"'),
        ([GOOD, GOOD | {"wall_seconds": "x"}], 'wall_seconds of a record is "x"'),
        ([GOOD | {"seed": [0]}], "seed of a record is [0]"),
        ([GOOD | {"seed": True}], "seed of a record is true"),
        ([GOOD | {"examples": 0}], "examples of a record are 0"),
        ([GOOD | {"blocks": [[1.0, 9.0], [2.0]]}], "a block of a record is [2.0]"),
        ([GOOD | {"blocks": [["x", 9.0]]}], 'a block of a record is ["x", 9.0]'),
    ],
)
def test_a_damaged_record_is_one_line(records, reason, grid):
    path = spoil(grid, records=records)
    line = f"{path} is damaged ({reason}): delete it, and rerun the command that wrote it"
    for use in (
        grid.records,
        lambda: grid.seconds_left([], grid.cells),
        lambda: grid_report.write_all(grid, grid.state()),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
            use()


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({}, "environment lacks jax"),
        ({"jax": "1.2.3", "device_kind": 5}, "environment lacks device_kind"),
        (ENVIRONMENT | {"commit": 5}, "commit of environment is no text"),
    ],
)
def test_a_damaged_environment_is_one_line(environment, reason, grid):
    path = spoil(grid, environment=environment)
    with pytest.raises(
        ConfigError, match=rf"^{path} is damaged \({reason}\): delete it, and rerun"
    ):
        grid_report.write_all(grid, grid.state())


def test_a_record_without_its_number_of_examples_and_commit_is_reported(grid):
    spoil(grid, records=[GOOD], environment={"jax": "1.2.3", "device_kind": "cpu"})
    tables, _ = grid_report.write_all(grid, grid.state())
    assert "not covered in dense" in tables.uncovered


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"sequence_error": "x"}, '"x" as sequence_error'),
        ({"seed": [0]}, "[0] as seed"),
        ({"seed": None}, "null as seed"),
        ({"seed": ...}, "null as seed"),
        ({"split": 5}, "5 as split"),
    ],
)
def test_a_damaged_curve_is_one_line(changes, shown, grid):
    path = grid.cells[0].folder(grid.workdir) / "metrics.jsonl"
    row = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: x for name, x in row.items() if x is not ...}) + "\n")
    line = f"{path} is damaged (step 1 has {shown}): delete it, and rerun"
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}"):
        grid_report.write_all(grid, grid.state())
    assert (grid.workdir / "results.json").exists()
