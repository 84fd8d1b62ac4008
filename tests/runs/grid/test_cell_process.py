"""The process of a cell: what it waits for, and how it ends."""

import dataclasses
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import cope_jax as cj
from cope_jax.errors import ConfigError, Interrupted, NonFiniteError, StorageError
from cope_jax.runs.grid import claims, worker
from cope_jax.runs.grid.cell import Cell
from cope_jax.runs.grid.cell_process import FAILED, Job, last_line, run

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
        return Job(tmp_path / "cell", "{}", tmp_path)

    return use


SIGNAL = "import os, signal; signal.signal({0}, signal.SIG_DFL); os.kill(os.getpid(), {0})"


@pytest.mark.parametrize(
    ("text", "line", "status"),
    [
        ('import sys; print("one"); print("error: too few"); sys.exit(2)', "error: too few", 2),
        (
            'import os; print("step 5", flush=True); os.kill(os.getpid(), 9)',
            "killed by signal 9 (step 5)",
            -9,
        ),
        # A signal to all processes may end a cell early; then, or if another process trains it, it
        # has not failed.
        (SIGNAL.format(2), "stopped", None),
        (SIGNAL.format(15), "stopped", None),
        (f'import sys; print("another trains"); sys.exit({worker.IN_USE})', "another trains", None),
    ],
)
def test_the_last_line_is_kept_with_the_status_of_a_failure(text, line, status, program):
    job = program(text)
    assert run(job) == line
    assert (job.folder / FAILED).exists() == (status is not None)
    assert status is None or json.loads((job.folder / FAILED).read_text())["status"] == status
    assert run(program("pass")) is None
    assert not (job.folder / FAILED).exists()  # a new try begins without it


def test_a_cell_that_hangs_is_stopped_at_the_time_limit(program, monkeypatch):
    monkeypatch.setitem(run.__globals__, "GRACE", 0.3)
    job = program(
        'import signal, time; signal.signal(15, signal.SIG_IGN); print("busy", flush=True); time.sleep(60)'
    )
    began = time.monotonic()
    limited = dataclasses.replace(job, time_limit=0.5)
    assert run(limited) == "stopped after the time limit of 0.5 s (busy)"
    assert time.monotonic() - began < 20
    assert (job.folder / FAILED).exists()


@pytest.mark.slow
def test_a_late_stop_is_not_a_failure(program):
    """The time limit passes while a stopped cell saves its checkpoint."""
    job = program(
        "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(2), sys.exit(143))); "
        'print("step 5", flush=True); time.sleep(60)'
    )
    since = time.monotonic()
    assert (
        run(dataclasses.replace(job, time_limit=2.0), lambda: time.monotonic() > since + 1)
        == "step 5"
    )
    assert not (job.folder / FAILED).exists()


@pytest.mark.slow
def test_the_wait_for_cores_does_not_count_for_the_time_limit(program):
    job = program(
        f'import time; print("{claims.WAITS}", flush=True); time.sleep(3); print("busy", flush=True)'
    )
    assert run(dataclasses.replace(job, time_limit=1.5)) is None


@pytest.mark.parametrize("level", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_cell_that_is_stopped_or_must_end_at_once_has_not_failed(level, program):
    """At level 2, it does not answer SIGTERM."""
    answer = "lambda *_: sys.exit(143)" if level == 1 else "signal.SIG_IGN"
    job = program(
        f'import signal, sys, time; signal.signal(15, {answer}); print("step 5", flush=True); time.sleep(60)'
    )
    since = time.monotonic()
    assert run(job, lambda: min(level, int(time.monotonic() - since))) == "step 5"
    assert time.monotonic() - since < 20
    assert not (job.folder / FAILED).exists()


@pytest.mark.parametrize(("looks_there", "line"), [(True, "['']"), (False, "[]")])
def test_a_file_of_the_folder_hides_no_module_unless_the_grid_has_it(
    looks_there, line, tmp_path, monkeypatch
):
    path = tmp_path / "bin" / "python"
    path.parent.mkdir()
    show = "import sys; print([name for name in sys.path[:1] if not name]); sys.exit(2)"
    path.write_text(
        f'#!/bin/sh\ncase "$1" in -P) exec {PYTHON} -P -c "{show}";; esac\nexec {PYTHON} -c "{show}"\n'
    )
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setattr(sys, "path", [*(str(tmp_path),) * looks_there, "/elsewhere"])
    assert run(Job(tmp_path / "cell", "{}", tmp_path)) == line


def test_the_last_line_of_a_progress_bar(tmp_path):
    (tmp_path / "log").write_text("first\n 10%|#  |\r 20%|## |\r\n\n")
    assert last_line(tmp_path / "log") == "20%|## |"
    (tmp_path / "log").write_text("")
    assert last_line(tmp_path / "log") == ""


def test_cores_are_claimed_by_one_process_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(claims.tempfile, "gettempdir", lambda: str(tmp_path))
    names = ["0", "1", "2"]
    assert claims.claim("core", names, 2) == ["0", "1"]
    assert claims.claim("core", names, 1) == ["2"]

    class Waited(Exception):
        pass

    def waits(seconds):
        raise Waited

    monkeypatch.setattr(claims.time, "sleep", waits)
    with pytest.raises(Waited):
        claims.claim("core", names, 1)
    assert claims.claim("gpu", names, 3) == names  # another kind
    with pytest.raises(SystemExit, match="error: the cell needs 4 gpus, but this machine shows 3"):
        claims.claim("gpu", names, 4)


@pytest.mark.parametrize(
    "how", ["a file", "a link", "open to all", "below one that is open to all"]
)
def test_cores_are_claimed_once_whatever_the_folder_of_temporary_files_is(
    how, tmp_path, monkeypatch
):
    monkeypatch.setattr(claims.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
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
    assert [claims.claim("core", names, 2) for _ in range(3)] == [
        ["0", "1"],
        ["2", "3"],
        ["4", "5"],
    ]
    private = (
        folder
        if folder.is_dir() and not folder.is_symlink()
        else next((tmp_path / "cache/cope_jax").iterdir())
    )
    assert (private.stat().st_mode & 0o777, len(list(private.iterdir()))) == (0o700, 6)
    assert not list(theirs.iterdir()) and theirs.stat().st_mode & 0o777 == 0o755


def test_without_a_folder_of_its_own_a_cell_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.setattr(claims.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    os.mkfifo(tmp_path / "pipe")
    claims._lock_folder().joinpath("gpu-0").symlink_to(tmp_path / "pipe")
    with pytest.raises(
        SystemExit, match=r"error: .* cannot hold locks .*: delete it, or set TMPDIR$"
    ):
        claims.claim("gpu", ["0"], 1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # both folders are of another user
    with pytest.raises(
        SystemExit, match=r"error: .* and .* cannot hold locks: set TMPDIR to a folder of your own$"
    ):
        claims.claim("core", ["0"], 1)


def test_a_lock_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    answers = []
    waiting = threading.Thread(
        target=lambda: answers.append(claims.wait_for(tmp_path / ".lock")), daemon=True
    )
    waiting.start()
    waiting.join(5)
    assert answers == [True]


def test_a_run_that_still_saves_is_waited_for(tmp_path, monkeypatch):
    lock, waited = tmp_path / ".lock", []
    assert claims.wait_for(lock)  # there is none
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        monkeypatch.setattr(
            claims.time, "sleep", lambda seconds: waited.append(fcntl.flock(file, fcntl.LOCK_UN))
        )
        assert claims.wait_for(lock)
        assert len(waited) == 1
        fcntl.flock(file, fcntl.LOCK_EX)
        monkeypatch.setattr(claims.time, "sleep", waited.append)
        assert not claims.wait_for(lock, seconds=0.01)  # not forever
        assert len(waited) > 1


def test_gpus_are_those_that_the_environment_names(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert claims.gpus() == ["2", "5"]


def test_a_container_may_have_less_time_than_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    limit, read = tmp_path / "cpu.max", Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path: read(limit if path.name == "cpu.max" else path)
    )
    for text, cores in (
        ("max 100000", 8),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("900000 100000", 8),
    ):
        limit.write_text(text)
        assert claims.cores() == cores
    monkeypatch.delattr(os, "sched_getaffinity")
    assert claims.cores() == 1


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (None, 0, ""),
        (ConfigError("too few"), 2, "error: too few"),
        (NonFiniteError("step 3"), 3, "error: step 3"),
        (StorageError("full"), 4, "error: full"),
        (
            OSError(errno.ENOSPC, "cannot write"),
            4,
            "error: cannot write to run (No space left on device): complete",
        ),
        (Interrupted("stopped at step 5", signal.SIGTERM), 143, "stopped at step 5"),
        (ZeroDivisionError("a defect"), 1, "ZeroDivisionError: a defect"),
    ],
)
def test_the_last_line_and_the_status_say_how_a_cell_ends(error, status, line, monkeypatch, capfd):
    trained = mock_training(monkeypatch, error)
    cell = Cell(cj.config("quick", encoding="rope"), (1, 2), label="mine")
    assert worker._train(cell.to_json(), Path("run"), "abc") == status
    assert trained == [(Path("run"), (1, 2), "mine, seeds 1–2", {"system": "mine"}, "abc")]
    out, err = capfd.readouterr()
    assert (out + err).splitlines()[-1:][0].startswith(line) if line else out + err == ""


def mock_training(monkeypatch, error=None, commit="abc"):
    """Returns the list that gets what cells train with, in a checkout at a commit, then a later one."""
    trained = []

    class Mocked:
        def __init__(self, config, task):
            assert task.name == config.task.name == "selective_copy"

        def train(self, folder, seeds, *, label, fields, environment):
            trained.append((folder, seeds, label, fields, environment["commit"]))
            if error is not None:
                raise error

    monkeypatch.setattr("cope_jax.runs.experiment.Experiment", Mocked)
    monkeypatch.setattr("cope_jax.storage.programs.keep_programs", lambda: None)
    monkeypatch.setattr("cope_jax.runs.checkout.commit", lambda: commit)
    monkeypatch.setattr("cope_jax.runs.records.commit", lambda: "later")
    return trained


@pytest.mark.parametrize(
    ("commit", "of_command"), [("def", "abc"), ("abc-dirty", "abc"), (None, "abc"), ("abc", None)]
)
def test_a_cell_records_the_commit_that_it_runs(commit, of_command, monkeypatch, capfd):
    trained = mock_training(monkeypatch, commit=commit)
    cell = Cell(cj.config("quick", encoding="rope"))
    assert worker._train(cell.to_json(), Path("run"), of_command) == 0
    assert trained[0][-1] == commit
    (line,) = "".join(capfd.readouterr()).splitlines()
    start = f"warning: this cell runs and records commit {commit}, but the command started at"
    assert line.startswith(f"{start} {of_command}: ")


def test_the_commit_is_read_before_the_code_that_it_names():
    text = (
        "import sys; from pathlib import Path; from cope_jax.runs.grid import worker; "
        "early = {'jax', 'cope_jax.encodings', 'cope_jax.runs.records'}; "
        "worker.checkout.commit = lambda: sys.exit(0 if early.isdisjoint(sys.modules) else 3); "
        "worker._train('{}', Path('run'), None)"
    )
    assert subprocess.run([PYTHON, "-c", text]).returncode == 0
