"""The command that trains a grid, and mistakes that end early; tests/runs/grid has the rest."""

import json
import math
import tarfile

import numpy as np

from cope_jax.evaluation.report import grid_cells
from cope_jax.runs import checkout
from tests.encodings.test_registry import OWN
from tests.runs.grid.test_cells import cell, finish, write_grid

SEARCHED = "yield Cell(quick(), search={'optimizer.learning_rate': (1e-3, 3e-3)})"


def test_a_dry_run_counts_cells_and_trials(start, tmp_path):
    path = write_grid(tmp_path, SEARCHED)
    done = start("sweep", f"--grid={path}", f"--workdir={tmp_path / 'run'}", "--dry_run").wait()
    assert done.status == 0, done.err
    first, second = done.err.splitlines()
    assert first == (
        "2 trials (learning_rate chosen for each encoding from 2 trials): 0 finished, 2 to train before the other cells"
    )
    assert second.startswith(
        "1 cells, 0 finished, 0 failed, 1 to train, 1 at a time; estimated time of training: unkn"
    )
    assert not (tmp_path / "run").exists()


def test_a_dry_run_writes_nothing_into_a_sweep(start, tmp_path):
    finish(cell(setting=""), workdir := tmp_path / "run")
    grid = f"--grid={write_grid(tmp_path, 'yield Cell(quick())')}"

    def run():
        before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
        done = start("sweep", grid, f"--workdir={workdir}", "--dry_run").wait()
        assert before == {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
        return done

    assert run().err.startswith("1 cells, 1 finished")
    next(workdir.rglob("config.json")).unlink()
    done = run()
    assert done.status == 2
    assert "has result.json but not config.json: restore config.json, or" in done.error


def test_a_large_grid_says_that_it_is_checked(start, tmp_path):
    path = write_grid(tmp_path, "yield from (Cell(quick(), (seed,)) for seed in range(101))")
    done = start("sweep", f"--grid={path}", f"--workdir={tmp_path / 'run'}", "--dry_run").wait()
    assert done.err.startswith("checking 101 cells\n101 cells, 0 finished")


def test_a_cell_without_trials_has_not_failed(start, tmp_path):
    flags = (f"--grid={write_grid(tmp_path, SEARCHED)}", f"--workdir={tmp_path / 'run'}")
    done = start("sweep", *flags, "--only_failed").wait()
    assert done.status == 1, done.err
    assert "failed: " not in done.err
    last = done.err.splitlines()[-1]
    assert last.startswith("1 cell not trained yet: rerun without --only_failed to train them")


def test_the_run_that_trains_the_trials_says_which_values_won(start, tmp_path):
    mocked = (
        "from cope_jax.runs.grid.grid import Grid",
        "from tests.runs.grid.test_cells import finish",
        "def train(grid, cells, **_):",
        "    [finish(cell, grid.workdir) for cell in cells if cell.seeds == (1_000_000,)]",
        "Grid.train = train",
    )
    path = write_grid(tmp_path, "\n    ".join((*mocked, SEARCHED)))
    done = start("sweep", f"--grid={path}", f"--workdir={tmp_path / 'run'}").wait()
    assert done.status == 1, done.err
    assert done.err.count("\nrope: learning_rate=0.001\n") == 1


def test_a_grid_of_the_entered_encodings_alone_is_refused(start, tmp_path):
    (file := tmp_path / "own.py").write_text(OWN)
    path = write_grid(tmp_path, "yield Cell(quick('mine'))")
    flags = (f"--grid={path}", f"--workdir={tmp_path / 'run'}", f"--encoding={file}")
    done = start("sweep", *flags, "--dry_run").wait()
    assert done.status == 2
    assert "are of --encoding: load the file in the grid" in done.err


MOCKED = """
    import json
    from cope_jax.runs.grid.grid import Grid
    from cope_jax.runs import workdir as workdirs
    from cope_jax.runs.records import environment
    def train(grid, cells, **_):
        for cell in cells:
            folder = cell.folder(grid.workdir)
            workdirs.Workdir(folder).open(cell.config, cell.seeds)
            value = len(cell.label) / 20 + cell.seeds[0] / 100
            row = dict(value=value, metric="sequence_error", kind="split", split="dense", encoding=cell.label)
            row |= dict(seed=cell.seeds[0], step=1, examples=9, parameters=1, task="selective_copy")
            row |= dict(wall_seconds=1.0, memory_gib=None)
            rows = (dict(step=1, loss=1.0), dict(step=2, seed=0, split="dense", sequence_error=value))
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
            workdirs.write_json(folder / "environment.json", environment())
            workdirs.write_json(folder / "result.json", dict(records=[row], environment=environment()))
    Grid.train = train
    for seed in range(2):
        for name in ("cope", "stick_breaking", "rope"):
            for setting in ("near", "far"):
                yield Cell(quick(name), (seed,), setting)
"""


def test_encodings_of_files_enter_a_grid(start, tmp_path):
    flags = (f"--grid={write_grid(tmp_path, MOCKED)}", f"--workdir={tmp_path / 'run'}")
    file = tmp_path / "own.py"
    file.write_text(OWN.replace("mine", "my-encoding"))
    (other := tmp_path / "other.py").write_text(OWN.replace("mine", "other"))
    entered = (*flags, f"--encoding={file}", f"--encoding={other}")
    assert start("sweep", *flags).wait().status == 0
    done = start("sweep", *entered).wait()
    assert done.status == 0, done.err
    assert done.err.startswith("20 cells, 12 finished, 0 failed, 8 to train"), done.err
    named = write_grid(tmp_path, MOCKED.replace('"rope")', '"rope", "my-encoding")'))
    again = start("sweep", f"--grid={named}", *entered[1:]).wait()
    assert again.err.startswith("20 cells, 20 finished"), again.err
    rank = "my-encoding, dense: mean rank 4.00 of 5 over 2 columns, 95 % interval"
    assert done.out.startswith(rank), done.out
    with tarfile.open(tmp_path / "run" / "my-encoding.tar.xz") as archive:
        packed = archive.getnames()
        assert {(file.uname, file.uid) for file in archive} == {("", 0)}
        metrics = next(file for file in archive if file.name.endswith("metrics.jsonl"))
        assert [json.loads(line)["step"] for line in archive.extractfile(metrics)] == [2]
    page = (tmp_path / "run" / "report.html").read_text()
    assert '"config":{"encoding":"my-encoding"' in page
    assert f'"commit":"{checkout.commit()[:12]}' in page
    folder = "grid/near/cells/my-encoding/seed_1"
    assert f"{folder}/result.json" in packed and len(packed) == 4 * 4
    file.write_text(file.read_text() + "\n")
    changed = start("sweep", *entered).wait()
    assert changed.status == 2
    assert changed.error.endswith(
        f"holds a run of another version of the encoding my-encoding: give its file as it was, not {file}, or choose "
        "another folder"
    )


def test_a_missing_start_ends_before_the_model_is_built(start, tmp_path):
    """Sizes that no model can have are an error too, but a later one."""
    (config := tmp_path / "wrong.py").write_text(
        "from cope_jax.configs import quick\n"
        "def get_config():\n"
        "    config = quick.get_config()\n"
        "    config.model.block.model_dim = 2**20 - 1\n"
        "    return config\n"
    )
    flags = (f"--config={config}", f"--config.training.start={tmp_path}/nowhere")
    done = start("train", *flags, f"--workdir={tmp_path / 'run'}").wait()
    assert done.status == 2
    assert f"there is no folder {tmp_path}/nowhere" in done.err


def test_a_loss_that_is_not_finite_has_blocks_too():
    shared = {"split": "test", "metric": "loss", "value": math.nan, "encoding": "cope"}
    rows = [{**shared, "seed": 0, "blocks": [[None, 9.0], [2.0, 9.0]]}]
    blocks = grid_cells.column_of(rows, ["test"]).blocks["cope"]
    np.testing.assert_array_equal(blocks, [[math.nan, 9], [2, 9]])
