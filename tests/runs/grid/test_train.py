"""Cells at the same time, each in its own process: the numbers of one after the other, and no cell
is lost.
"""

import os
import signal
import threading
import time

import pytest

import cope_jax as cj
from cope_jax.errors import ConfigError, Interrupted
from cope_jax.runs.grid.cell import plan
from cope_jax.runs.grid.claims import WAITS
from cope_jax.runs.grid.grid import Grid
from cope_jax.runs.workdir import Workdir, write_json
from tests.runs.grid.test_cells import RECORD

pytestmark = pytest.mark.xdist_group("grid")


def grid_of(folder, steps=4, names=("cope", "rope"), seeds=1, width=1):
    small = {
        "task": {"options": {"num_symbols": 4, "num_tokens": 2, "num_blanks": 2}},
        "model": {"num_layers": 1, "block": {"model_dim": 8, "num_heads": 1, "head_dim": 8}},
        "optimizer": {"warmup_steps": 1},
        "training": {"steps": steps, "batch_size": 4, "steps_per_dispatch": 2, "evaluate_every": 2},
        "evaluation": {"examples": 6, "curve_examples": 4, "sweep_examples": 0, "batch_size": 4},
        "job": {"mesh": {"data": 1}},
    }
    configs = {name: cj.config("quick", encoding=name, **small) for name in names}
    return Grid(folder, plan(configs, seeds, width, folder))


def values(grid):
    """The records without what differs from run to run."""
    return [{**record, "wall_seconds": 0, "memory_gib": 0} for record in grid.records()]


def test_in_this_process_cells_share_a_program_and_stay_when_seeds_are_added(
    tmp_path, capfd, monkeypatch
):
    made, trained, written = [], [], []

    class Mocked:
        def __init__(self, config, task):
            made.append((config.encoding, task))

        def train(self, folder, seeds, *, label, fields, environment):
            trained.append((seeds, label, fields))
            config = next(cell.config for cell in grid.cells if cell.folder(tmp_path) == folder)
            Workdir(folder).open(config, seeds)
            records = [RECORD | {"seed": seed} for seed in seeds]
            write_json(folder / "result.json", {"records": records, "environment": environment})

    monkeypatch.setattr("cope_jax.runs.grid.grid.Experiment", Mocked)
    grid = grid_of(tmp_path, seeds=3, width=2)
    grid.train(finished=lambda: written.append(grid.write_results()))
    assert capfd.readouterr().err == "4 of 4 cells to train, 1 at a time\n"
    assert [name for name, _ in made] == ["cope", "rope"] and made[0][1] is made[1][1]
    assert trained == [
        ((0, 1), "[1/4] cope, seeds 0–1", {}),
        ((2,), "[2/4] cope, seed 2", {"memory_gib": None}),
        ((0, 1), "[3/4] rope, seeds 0–1", {"memory_gib": None}),
        ((2,), "[4/4] rope, seed 2", {"memory_gib": None}),
    ]
    assert [[path.name for path in paths] for paths in written] == 4 * [
        ["results.json", "results.csv"]
    ]
    assert [record["seed"] for record in grid.records()] == [0, 1, 2, 0, 1, 2]
    assert grid.environment()["backend"] == "cpu"
    grid.train()
    assert (capfd.readouterr().err, len(trained)) == ("", 4)
    more = grid_of(tmp_path, names=("rope",), seeds=4)
    assert [cell.seeds for cell in more.cells] == [(0, 1), (2,), (3,)]
    assert (more.state().finished, more.state().left) == (more.cells[:2], more.cells[2:])
    with pytest.raises(ConfigError, match=r"other settings, config\.training\.steps"):
        grid_of(tmp_path, steps=6, seeds=3).train()


@pytest.mark.slow
def test_results_are_those_of_one_cell_after_the_other(tmp_path, capfd):
    results = []
    for jobs in (1, 2):
        grid = grid_of(tmp_path / str(jobs))
        grid.train(jobs)
        results.append(values(grid))
    assert results[0] == results[1]
    assert len(results[0]) > 2
    lines = capfd.readouterr().err.splitlines()
    assert any(line.startswith("[2/2] ") and ": finished, " in line for line in lines)
    log = (grid.cells[1].folder(grid.workdir) / "log.txt").read_text()
    waited = f"{WAITS}\nhas its cores\n"  # if another grid of this machine trains
    assert log.removeprefix(waited).startswith("rope, seed 0\n") and "\nstep 4: " in log


@pytest.mark.slow
def test_after_a_signal_all_save_a_checkpoint_and_resume(tmp_path, capfd):
    grid = grid_of(tmp_path, steps=100_000)
    folders = [cell.folder(tmp_path) for cell in grid.cells]

    def newest(folder):
        return max(
            (int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit()),
            default=0,
        )

    def lines(folder):
        path = folder / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def interrupt():
        """Sends the signal when each cell has done more steps."""
        written = list(map(lines, folders))
        while not all(
            lines(folder) > before for folder, before in zip(folders, written, strict=True)
        ):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    steps = [[0, 0]]
    for _ in range(2):
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(Interrupted) as stopped:
            grid.train(2)
        assert stopped.value.exit_code == 143
        assert "0 of 2 cells" in capfd.readouterr().err
        steps.append(list(map(newest, folders)))
        assert all(now > before for before, now in zip(*steps[-2:], strict=True))
    assert "resumes from step" in (folders[0] / "log.txt").read_text()
