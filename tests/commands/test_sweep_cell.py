"""How a cell of a sweep runs: its process, what it waits for, and how it ends."""

import dataclasses
import fcntl
import io
import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from cope_jax.commands.sweep import drive as driving
from cope_jax.commands.sweep import engines, one_cell
from cope_jax.commands.sweep.cells import FAILED, Cell
from cope_jax.commands.sweep.drive import jobs_of
from cope_jax.commands.sweep.run import LOG, Job, last_line, run
from cope_jax.errors import ConfigError

PYTHON = sys.executable


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Replaces the process of a cell by a Python program."""

    def use(text):
        path = tmp_path / "bin" / "python"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\nexec {PYTHON} -c '{text}'\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))
        return Job(tmp_path / "cell", (), tmp_path)

    return use


def test_the_last_line_of_a_failure_is_kept(program):
    job = program('import sys; print("one"); print("error: too few"); sys.exit(2)')
    assert run(job) == "error: too few"
    assert json.loads((job.folder / FAILED).read_text())["status"] == 2
    assert run(program("pass")) is None
    assert not (job.folder / FAILED).exists()  # a new try begins without it


def test_a_killed_cell_has_failed(program):
    job = program('import os; print("step 5", flush=True); os.kill(os.getpid(), 9)')
    assert run(job) == "killed by signal 9 (step 5)"


@pytest.mark.parametrize("number", [2, 15])
def test_a_cell_that_a_signal_to_all_ends_early_is_stopped(program, number):
    job = program(f"import os, signal; signal.signal({number}, signal.SIG_DFL); os.kill(os.getpid(), {number})")
    assert run(job) == "stopped"
    assert not (job.folder / FAILED).exists()


def test_a_cell_that_hangs_is_stopped_at_the_time_limit(program, monkeypatch):
    monkeypatch.setitem(run.__globals__, "GRACE", 0.3)
    job = program('import signal, time; signal.signal(15, signal.SIG_IGN); print("busy", flush=True); time.sleep(60)')
    began = time.monotonic()
    limited = dataclasses.replace(job, time_limit=0.5)
    assert run(limited) == "stopped after the time limit of 0.5 s (busy)"
    assert time.monotonic() - began < 20
    assert (job.folder / FAILED).exists()


def test_a_late_stop_is_not_a_failure(program):
    """The time limit passes while a stopped cell saves its checkpoint."""
    job = program(
        "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(2), sys.exit(143))); "
        'print("step 5", flush=True); time.sleep(60)'
    )
    since = time.monotonic()
    assert run(dataclasses.replace(job, time_limit=2.0), lambda: time.monotonic() > since + 1) == "step 5"
    assert not (job.folder / FAILED).exists()


def test_a_cell_that_another_process_trains_has_not_failed(program):
    job = program(f'import sys; print("another process trains"); sys.exit({one_cell.IN_USE})')
    assert run(job) == "another process trains"
    assert not (job.folder / FAILED).exists()


def test_the_wait_for_cores_does_not_count_for_the_time_limit(program):
    job = program(f'import time; print("{one_cell.WAITS}", flush=True); time.sleep(3); print("busy", flush=True)')
    assert run(dataclasses.replace(job, time_limit=1.5)) is None


def test_a_stopped_cell_has_not_failed(program):
    job = program(
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); "
        'print("step 5", flush=True); time.sleep(60)'
    )
    since = time.monotonic()
    assert run(job, lambda: time.monotonic() > since + 1) == "step 5"
    assert not (job.folder / FAILED).exists()


def test_the_last_line_of_a_progress_bar(tmp_path):
    (tmp_path / "log").write_text("first\n 10%|#  |\r 20%|## |\r\n\n")
    assert last_line(tmp_path / "log") == "20%|## |"
    (tmp_path / "log").write_text("")
    assert last_line(tmp_path / "log") == ""


def test_cores_are_claimed_by_one_process_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(one_cell.tempfile, "gettempdir", lambda: str(tmp_path))
    names = ["0", "1", "2"]
    assert one_cell.claim("core", names, 2) == ["0", "1"]
    assert one_cell.claim("core", names, 1) == ["2"]

    class Waited(Exception):
        pass

    def waits(seconds):
        raise Waited

    monkeypatch.setattr(one_cell.time, "sleep", waits)
    with pytest.raises(Waited):
        one_cell.claim("core", names, 1)
    assert one_cell.claim("gpu", names, 3) == names  # another kind
    with pytest.raises(SystemExit, match="error: the cell needs 4 gpus, but this machine shows 3"):
        one_cell.claim("gpu", names, 4)


@pytest.mark.parametrize("how", ["a file", "a link", "open to all", "below one that is open to all"])
def test_cores_are_claimed_once_whatever_the_folder_of_temporary_files_is(how, tmp_path, monkeypatch):
    monkeypatch.setattr(one_cell.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, theirs = tmp_path / "temporary" / f"cope_jax-{os.getuid()}", tmp_path / "theirs"
    folder.parent.mkdir()
    theirs.mkdir(mode=0o755)
    if how == "a file":
        folder.touch()
    elif how == "a link":
        folder.symlink_to(theirs)
    else:
        folder.mkdir()
        (folder if how == "open to all" else folder.parent).chmod(0o777)
    names = list("0123456")
    assert [one_cell.claim("core", names, 2) for _ in range(3)] == [["0", "1"], ["2", "3"], ["4", "5"]]
    private = folder if folder.is_dir() and not folder.is_symlink() else next((tmp_path / "cache/cope_jax").iterdir())
    assert (private.stat().st_mode & 0o777, len(list(private.iterdir()))) == (0o700, 6)
    assert not list(theirs.iterdir()) and theirs.stat().st_mode & 0o777 == 0o755


def test_without_a_folder_of_its_own_a_cell_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.setattr(one_cell.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    os.mkfifo(tmp_path / "pipe")
    one_cell._lock_folder().joinpath("gpu-0").symlink_to(tmp_path / "pipe")
    with pytest.raises(SystemExit, match=r"error: .* cannot hold locks .*: delete it, or set TMPDIR$"):
        one_cell.claim("gpu", ["0"], 1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # both folders are of another user
    with pytest.raises(SystemExit, match=r"error: .* and .* cannot hold locks: set TMPDIR to a folder of your own$"):
        one_cell.claim("core", ["0"], 1)


def test_a_lock_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    found = []
    waiting = threading.Thread(target=lambda: found.append(one_cell.wait_for(tmp_path / ".lock")), daemon=True)
    waiting.start()
    waiting.join(5)
    assert found == [True]


def test_a_run_that_still_saves_is_waited_for(tmp_path, monkeypatch):
    lock, waited = tmp_path / ".lock", []
    assert one_cell.wait_for(lock)  # there is none
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(one_cell.time, "sleep", lambda seconds: waited.append(fcntl.flock(held, fcntl.LOCK_UN)))
        assert one_cell.wait_for(lock)
        assert len(waited) == 1
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(one_cell.time, "sleep", waited.append)
        assert not one_cell.wait_for(lock, seconds=0.01)  # not forever
        assert len(waited) > 1


def test_gpus_are_those_that_the_environment_names(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert one_cell.gpus() == ["2", "5"]
    assert engines.default_slots(1, 2) == 1
    with pytest.raises(ConfigError, match="a cell needs 3 GPUs, but this machine shows 2"):
        engines.default_slots(1, 3)


def test_the_time_that_is_left_counts_all_slots(monkeypatch):
    """Two of ten cells, ten seconds each, have ended after ten seconds, and two more have run for five."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    view = driving._View(10, {}, 2)
    view._began, view._ended = 85.0, 2
    assert view._left([(None, None, 95.0), (None, None, 95.0)]) == ", 00:35 left"


def test_at_eighty_columns_the_table_keeps_cell_seed_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    view = driving._View(24, {}, 2)
    view._console = Console(width=80, file=io.StringIO())
    cells = [Cell("quick", "cope", seed, setting="selective copy, squared relu, no norm") for seed in (0, 11)]
    jobs = [job for _, job in jobs_of(cells, Path("runs"))]
    for job, line in zip(jobs, (f"all parameters: {tmp_path}/runs/summary.txt", "| dense | 83.8 |"), strict=True):
        job.folder.mkdir(parents=True)
        (job.folder / LOG).write_text(f"[1/3] step\n{line}\n")
    (jobs[1].folder / "result.json").write_text("{}")
    view._console.print(
        view._table([(cell, job, time.monotonic() - 75) for cell, job in zip(cells, jobs, strict=True)])
    )
    _, heading, first, second = view._console.file.getvalue().splitlines()
    assert heading.split() == ["cell", "seed", "time", "last", "line"]
    name = "selective copy, squared relu, no norm, cope"
    assert first.split("  ")[0] == second.split("  ")[0] == name
    assert first.removeprefix(name).split(None, 2)[:2] == ["0", "01:15"] and "all parameters: r" in first
    assert second.removeprefix(name).split() == ["11", "01:15", "finished"]


@pytest.mark.parametrize("cluster", ["slurm", "local"])
def test_a_path_that_slurm_would_change_is_one_line(cluster, tmp_path):
    with pytest.raises(ConfigError, match=r"a%j/slurm has a % in its path, which Slurm replaces: choose another --w"):
        engines.Slurm(1, tmp_path / "a%j" / "slurm", 1, 0, {}, cluster)
