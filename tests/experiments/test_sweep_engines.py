"""The same records from every engine, and after any kill."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.sweep import cells as reading
from experiments.sweep import engines
from experiments.sweep.drive import drive, jobs_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sweep")]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def grid(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("grid") / "grid.py"
    path.write_text(
        "from experiments.sweep.cells import Cell\n\n\ndef get_cells():\n"
        "    for name in ('rope', 'cope'):\n        for seed in range(2):\n"
        f"            yield Cell({str(config)!r}, name, seed, setting='tiny')\n"
    )
    return path


def records(workdir):
    """The records of all cells, without the time that they took."""
    held = json.loads((workdir / "results.json").read_text())["records"]
    return [
        {name: value for name, value in record.items() if name not in ("wall_seconds", "memory_gib")} for record in held
    ]


def command(grid, workdir, *flags):
    return [sys.executable, "-m", "experiments.sweep", f"--grid={grid}", f"--workdir={workdir}", *flags]


def sweep(grid, workdir, *flags):
    done = subprocess.run(command(grid, workdir, *flags), cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return records(workdir)


@pytest.fixture(scope="module")
def one_after_the_other(grid, tmp_path_factory):
    return sweep(grid, tmp_path_factory.mktemp("alone") / "run", "--jobs=1")


def test_side_by_side(grid, one_after_the_other, tmp_path):
    assert sweep(grid, tmp_path / "run", "--jobs=2") == one_after_the_other


def test_ray(grid, one_after_the_other, tmp_path):
    pytest.importorskip("ray", reason="Ray is an extra")
    assert sweep(grid, tmp_path / "run", "--engine=ray", "--jobs=2") == one_after_the_other


def test_slurm_without_slurm(grid, one_after_the_other, tmp_path):
    pytest.importorskip("submitit", reason="submitit is an extra")
    flags = ("--engine=slurm", "--resources=cluster=local", "--jobs=2")
    assert sweep(grid, tmp_path / "run", *flags) == one_after_the_other


def test_killed_at_random_moments(grid, one_after_the_other, tmp_path):
    """The command is killed, by SIGTERM or SIGKILL, and what it started ends too."""
    rng = random.Random(0)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen(command(grid, tmp_path / "run", "--jobs=2"), cwd=ROOT, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(4, 12))
        process.send_signal(number)
        process.wait(120)
    assert sweep(grid, tmp_path / "run") == one_after_the_other


def test_another_engine_resumes(grid, one_after_the_other, tmp_path):
    cells = reading.read(str(grid))
    assert drive(list(jobs_of(cells[:2], tmp_path / "run", cores=1)), engines.Local(2), {}) is None
    pytest.importorskip("submitit", reason="submitit is an extra")
    flags = ("--engine=slurm", "--resources=cluster=local")
    assert sweep(grid, tmp_path / "run", *flags) == one_after_the_other


def test_trials_come_first(config, tmp_path):
    """A rate that diverges is not chosen."""
    path = tmp_path / "grid.py"
    path.write_text(
        "from experiments.sweep.cells import Cell\n\n\ndef get_cells():\n"
        f"    yield Cell({str(config)!r}, 'rope', setting='tiny', search={{'optimizer.learning_rate': (1e3, 1e-9)}})\n"
    )
    for _ in range(2):  # the second time, all is known from the disk
        held = sweep(path, tmp_path / "run")
        assert {record["learning_rate"] for record in held} == {1e-9}
    assert "learning_rate chosen for each encoding from 2 trials" in (tmp_path / "run" / "report.html").read_text()


def test_a_second_command_is_refused(grid, tmp_path):
    first = subprocess.Popen(command(grid, tmp_path / "run"), cwd=ROOT, stderr=subprocess.DEVNULL)
    while not (tmp_path / "run" / ".lock").exists() or not (tmp_path / "run" / ".lock").read_text():
        time.sleep(0.1)
    second = subprocess.run(command(grid, tmp_path / "run"), cwd=ROOT, capture_output=True, text=True)
    os.kill(first.pid, signal.SIGTERM)
    assert (second.returncode, "is in use by process" in second.stderr) == (2, True)
    assert first.wait(120) == 143
