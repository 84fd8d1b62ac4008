"""The command that trains a grid: its flags, and what it counts; tests/runs/grid has the rest."""

from tests.runs.grid.test_cells import write_grid


def test_a_dry_run_counts_cells_and_trials(start, tmp_path):
    path = write_grid(
        tmp_path, "yield Cell(quick(), search={'optimizer.learning_rate': (1e-3, 3e-3)})"
    )
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
