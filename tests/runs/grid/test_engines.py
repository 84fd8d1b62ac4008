"""The same records from every engine, and after any kill.

COPE_JAX_CELLS=40 runs grids of 40 cells in place of 4.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cope_jax.runs.grid import engines, grid_file
from cope_jax.runs.grid.grid import Grid
from tests.commands.commands import CONFIG

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sweep")]

ROOT = Path(__file__).parents[3]
CELLS = int(os.environ.get("COPE_JAX_CELLS", "4"))


GRID = """
import cope_jax as cj
from cope_jax.runs.grid.cell import Cell

def get_cells():
    for name in ('rope', 'cope'):
        for seed in range({cells}):
            yield Cell(cj.config({config!r}, encoding=name), (seed,), 'tiny', search={search})
"""


def write_grid(folder, cells=CELLS // 2, search=None):
    (config := folder / "tiny.py").write_text(CONFIG)
    (path := folder / "grid.py").write_text(
        GRID.format(cells=cells, config=str(config), search=search or {})
    )
    return path


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    return write_grid(tmp_path_factory.mktemp("grid"))


def records(workdir):
    """The records of all cells, without the time that they took."""
    saved = json.loads((workdir / "results.json").read_text())["records"]
    return [
        {
            name: value
            for name, value in record.items()
            if name not in ("wall_seconds", "memory_gib")
        }
        for record in saved
    ]


def command(grid, workdir, *flags):
    return [
        sys.executable,
        "-m",
        "cope_jax",
        "sweep",
        f"--grid={grid}",
        f"--workdir={workdir}",
        *flags,
    ]


def sweep(grid, workdir, *flags):
    done = subprocess.run(
        command(grid, workdir, *flags),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100 * CELLS,
    )
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


@pytest.fixture
def cluster(monkeypatch):
    """A Ray cluster of two processes on this machine, each with one core: its address, and the
    process of its head.
    """
    pytest.importorskip("ray", reason="Ray is an extra")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ray, common = (
        str(Path(sys.executable).with_name("ray")),
        ("--num-cpus=1", "--disable-usage-stats", "--block"),
    )
    port = address.partition(":")[2]
    alone = {
        "start_new_session": True,
        "cwd": "/",
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
    }
    head = ("--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--include-dashboard=false")
    processes = [subprocess.Popen([ray, "start", *head, *common], **alone)]
    time.sleep(15)
    worker = (f"--address={address}", "--node-ip-address=127.0.0.1")
    processes.append(subprocess.Popen([ray, "start", *worker, *common], **alone))
    time.sleep(10)
    yield address, processes[0]
    for process in processes:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_cluster_of_two_processes(grid, one_after_the_other, cluster, tmp_path):
    address, _ = cluster
    assert (
        sweep(grid, tmp_path / "run", "--engine=ray", f"--address={address}") == one_after_the_other
    )


def test_the_head_of_the_cluster_is_killed(grid, one_after_the_other, cluster, tmp_path):
    """The command ends, and resumes on this machine with the same records."""
    address, head = cluster
    flags = ("--engine=ray", f"--address={address}")
    driver = subprocess.Popen(
        command(grid, tmp_path / "run", *flags), cwd=ROOT, stderr=subprocess.DEVNULL
    )
    while not list((tmp_path / "run").glob("*/cells/*/*/metrics.jsonl")):
        assert driver.poll() is None
        time.sleep(0.2)
    os.killpg(head.pid, signal.SIGKILL)
    assert driver.wait(300) != 0
    assert sweep(grid, tmp_path / "run") == one_after_the_other


def named(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def descendants(pid):
    children = subprocess.run(
        ["pgrep", "-P", str(pid)], capture_output=True, text=True
    ).stdout.split()
    for child in map(int, children):
        yield child
        yield from descendants(child)


def test_a_worker_is_killed(grid, one_after_the_other, tmp_path):
    """Its cell is lost, which is neither finished nor failed, and the command ends; the next one
    trains it.
    """
    pytest.importorskip("ray", reason="Ray is an extra")
    driver = subprocess.Popen(
        command(grid, tmp_path / "run", "--engine=ray", "--jobs=2"),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list((tmp_path / "run").glob("*/cells/*/*/metrics.jsonl")):
        assert driver.poll() is None
        time.sleep(0.2)
    os.kill(
        next(pid for pid in descendants(driver.pid) if b"ray::run" in named(pid)), signal.SIGKILL
    )
    stderr = driver.communicate(timeout=100 * CELLS)[1]
    assert (driver.returncode, ": lost (" in stderr, "failed" in stderr.splitlines()[-1]) == (
        1,
        True,
        False,
    ), stderr
    assert sweep(grid, tmp_path / "run") == one_after_the_other


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/proc/mounts").exists(),
    reason="only root may mount a small disk",
)
def test_a_full_disk(grid, one_after_the_other, tmp_path):
    """Cells fail, or are refused, with one line; with more space the same command ends with the
    same records.
    """
    (disk := tmp_path / "disk").mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=500k", "tmpfs", disk], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this machine cannot mount a small disk")
    try:
        full = subprocess.run(command(grid, disk / "run"), cwd=ROOT, capture_output=True, text=True)
        assert full.returncode in (1, 4)  # the last write, of the results, may fit or not
        assert "Traceback" not in full.stderr
        assert "No space left on device" in full.stderr
        subprocess.run(["mount", "-o", "remount,size=500m", disk], check=True)
        assert sweep(grid, disk / "run") == one_after_the_other
    finally:
        subprocess.run(["umount", disk], check=True)


def test_slurm_without_slurm(grid, one_after_the_other, tmp_path):
    pytest.importorskip("submitit", reason="submitit is an extra")
    flags = ("--engine=slurm", "--resources=cluster=local", "--jobs=2")
    assert sweep(grid, tmp_path / "run", *flags) == one_after_the_other


def test_killed_at_random_moments(grid, one_after_the_other, tmp_path):
    """The command is killed, by SIGTERM or SIGKILL, and what it started ends too."""
    rng = random.Random(0)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen(
            command(grid, tmp_path / "run", "--jobs=2"), cwd=ROOT, stderr=subprocess.DEVNULL
        )
        time.sleep(rng.uniform(4, 12))
        process.send_signal(number)
        process.wait(120)
    assert sweep(grid, tmp_path / "run") == one_after_the_other


def test_another_engine_resumes(grid, one_after_the_other, tmp_path):
    cells = grid_file.read(str(grid))
    Grid(tmp_path / "run", cells[:2]).train(engine=engines.Local(2, cores=1))
    pytest.importorskip("submitit", reason="submitit is an extra")
    flags = ("--engine=slurm", "--resources=cluster=local", "--jobs=3")
    assert sweep(grid, tmp_path / "run", *flags) == one_after_the_other


def test_trials_come_first(tmp_path):
    """A rate that diverges is not chosen."""
    path = write_grid(tmp_path, 1, {"optimizer.learning_rate": (1e3, 1e-9)})
    for _ in range(2):  # the second time, all is known from the disk
        assert {record["learning_rate"] for record in sweep(path, tmp_path / "run")} == {1e-9}
    assert (
        "learning_rate chosen for each encoding from 2 trials"
        in (tmp_path / "run" / "report.html").read_text()
    )


def test_a_grid_ends_with_failures_and_resumes(tmp_path):
    """A cell that trains, and one that cannot: its table is too short."""
    path = write_grid(tmp_path, 1)
    (tmp_path / "bad.py").write_text(path.read_text().replace("'cope'", "'learned(max_length=2)'"))
    flags = (f"--grid={tmp_path / 'bad.py'}", f"--workdir={tmp_path / 'run'}")
    words = [sys.executable, "-m", "cope_jax", "sweep", *flags]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0].startswith("2 cells, 0 finished, 0 failed, 2 to train")
    assert (
        "learned(max_length=2), seed 0: error: position 7 is outside of the learned table of 2 rows"
        in done.stderr
    )
    assert lines[-1].startswith("1 cell failed: rerun the same command to train them")
    done = subprocess.run(
        [*words, "--only_failed", "--dry_run"], cwd=ROOT, capture_output=True, text=True
    )
    assert "2 cells, 1 finished, 1 failed, 1 to train" in done.stderr
    assert {record["encoding"] for record in sweep(path, tmp_path / "run")} == {"rope", "cope"}


def test_a_second_command_is_refused(grid, tmp_path):
    first = subprocess.Popen(command(grid, tmp_path / "run"), cwd=ROOT, stderr=subprocess.DEVNULL)
    while not (tmp_path / "run" / ".lock").exists() or not (tmp_path / "run" / ".lock").read_text():
        time.sleep(0.1)
    second = subprocess.run(
        command(grid, tmp_path / "run"), cwd=ROOT, capture_output=True, text=True
    )
    os.kill(first.pid, signal.SIGTERM)
    assert (second.returncode, "is in use by process" in second.stderr) == (2, True)
    assert first.wait(120) == 143
