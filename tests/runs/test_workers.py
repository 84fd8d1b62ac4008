"""Runs at the same time, each in its own process: the numbers of one after the other, and no run is lost."""

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import cope_jax as cj
from cope_jax.errors import ConfigError
from cope_jax.runs import grid, workers
from cope_jax.training.preemption import Interrupted

pytestmark = pytest.mark.xdist_group("workers")


def grid_of(folder, steps=4, names=("cope", "rope")):
    """The configs by name, and the runs."""
    small = {
        "task": {"options": {"num_symbols": 4, "num_tokens": 2, "num_blanks": 2}},
        "model": {"num_layers": 1, "block": {"model_dim": 8, "num_heads": 1, "head_dim": 8}},
        "optimizer": {"warmup_steps": 1},
        "training": {"steps": steps, "batch_size": 4, "steps_per_dispatch": 2, "evaluate_every": 2},
        "evaluation": {"examples": 6, "curve_examples": 4, "sweep_examples": 0, "batch_size": 4},
        "job": {"mesh": {"data": 1}},
    }
    return {name: cj.config("quick", encoding=name, **small) for name in names}, grid.plan(names, 1, 1, folder)


@pytest.mark.slow
def test_results_are_those_of_one_run_after_the_other(tmp_path, capfd):
    values = []
    for jobs in (1, 2):
        configs, runs = grid_of(tmp_path / str(jobs))
        grid.train_missing(configs, runs, tmp_path / str(jobs), jobs)
        records, _ = grid.write_results(tmp_path / str(jobs), runs)
        values.append([{**record, "wall_seconds": 0, "memory_gib": 0} for record in records])
        lines = capfd.readouterr().err.splitlines()
    assert values[0] == values[1]
    assert len(values[0]) > 2
    assert "[1/2] cope, seed 0" in lines and "[2/2] rope, seed 0" in lines
    assert any(line.startswith("rope, seed 0: step 4: ") for line in lines)


@pytest.mark.slow
def test_one_that_fails_stops_the_others_which_save_a_checkpoint(tmp_path):
    configs, runs = grid_of(tmp_path, steps=100_000)
    runs[1].workdir.parent.mkdir(parents=True)

    runs[1].workdir.write_text("in the way")
    with pytest.raises(ConfigError, match=r"rope/seed_0 \(it is a file, not a folder\)"):
        grid.train_missing(configs, runs, tmp_path, 2)
    assert not runs[0].result.exists()


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)


@pytest.mark.slow
def test_after_a_signal_all_save_a_checkpoint_and_resume(tmp_path, capfd):
    configs, runs = grid_of(tmp_path, steps=100_000)

    def newest(run):
        folder = run.workdir / "checkpoints"
        return max((int(path.name) for path in folder.glob("*") if path.name.isdigit()), default=0)

    def lines(run):
        path = run.workdir / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def interrupt(steps):
        """Sends the signal when each run is at a step beyond these."""
        written = [lines(run) for run in runs]
        wait_for(lambda: all(lines(run) > before for run, before in zip(runs, written, strict=True)))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, args=([0, 0],)).start()
    with pytest.raises(Interrupted) as stopped:
        grid.train_missing(configs, runs, tmp_path, 2)
    assert stopped.value.exit_code == 143
    assert "0 of 2 runs" in capfd.readouterr().err
    before = [newest(run) for run in runs]
    threading.Thread(target=interrupt, args=(before,)).start()
    with pytest.raises(Interrupted):
        grid.train_missing(configs, runs, tmp_path, 2)
    assert all(newest(run) > step > 0 for run, step in zip(runs, before, strict=True))
    assert "resumes from step" in capfd.readouterr().err


@pytest.mark.slow
def test_a_process_that_is_killed_is_named_in_one_line(tmp_path):
    configs, runs = grid_of(tmp_path, steps=100_000)

    def kill():
        wait_for(lambda: (runs[0].workdir / "metrics.jsonl").exists())
        multiprocessing.active_children()[0].kill()

    threading.Thread(target=kill).start()
    with pytest.raises(RuntimeError, match=r"the process that trains (cope|rope), seed 0 was killed by signal 9"):
        grid.train_missing(configs, runs, tmp_path, 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_a_signal_to_all_ends_early_is_stopped(number, tmp_path, monkeypatch):
    process = SimpleNamespace(exitcode=-number, start=lambda: None, join=lambda: None, kill=lambda: None)
    context = SimpleNamespace(Process=lambda target, args: process)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    monkeypatch.setattr(workers.library, "why_not", lambda: None)
    works = [workers.Work(None, (0,), tmp_path / name, name, "", {}, {}) for name in ("cope", "rope")]
    with pytest.raises(Interrupted, match=r"^stopped; rerun the same command to resume$") as stopped:
        workers.train(works, 2, lambda: None)
    assert stopped.value.exit_code == 143  # our own handler has seen no signal yet


def test_the_log_of_a_process_has_no_name_that_could_stay(tmp_path, monkeypatch):
    class Process:
        exitcode = 7

        def __init__(self, target, args):
            self.log = args[-1]

        def start(self):
            os.write(self.log.fileno(), b"words\nthe last")
            assert list(tmp_path.iterdir()) == []

        def join(self):
            pass

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: SimpleNamespace(Process=Process))
    worker = workers._Worker(workers.Work(None, (0,), tmp_path / "run", "rope, seed 0", "", {}, {}), [])
    with pytest.raises(RuntimeError, match=r"rope, seed 0 ended with status 7 \(the last\)"):
        worker.end()


def test_the_shares_of_the_cores_are_equal(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 6, 7, 9}, raising=False)
    assert workers.cores_of(2) == [[3, 5], [6, 7]]
    assert workers.cores_of(1) == [[3, 5, 6, 7, 9]]
    assert workers.cores_of(6) == [[]] * 6


def test_a_container_may_have_less_time_than_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    limit, read = tmp_path / "cpu.max", Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: read(limit if path.name == "cpu.max" else path))
    limit.write_text("400000 100000")
    assert workers.cores_of(2) == [[0, 1], [2, 3]]
    for text, cores in (("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 8)):
        limit.write_text(text)
        assert workers.cores() == cores
    monkeypatch.delattr(os, "sched_getaffinity")
    assert workers.cores() == 1
