"""The command that trains a grid: its flags, and what it counts; tests/runs/grid has the rest."""

from tests.runs.grid.test_cells import write_grid

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
