"""Cells on an engine: failures, refusals, signals, and the bar."""

import errno
import json
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest

import cope_jax as cj
from cope_jax.errors import ConfigError, Interrupted, NonFiniteError, StorageError
from cope_jax.runs.grid import claims, engines, schedule
from cope_jax.runs.grid.cell import Cell
from cope_jax.runs.grid.cell_process import FAILED, LOG, Job
from cope_jax.runs.grid.grid import Grid

CONFIGS = {name: cj.config("quick", encoding=name) for name in ("rope", "cope", "fox", "none")}


@pytest.fixture(autouse=True)
def no_library(monkeypatch):
    monkeypatch.setattr(engines.library, "why_not", lambda: None)


def jobs_of(folder, seeds=9, names=("rope",)):
    cells = [Cell(CONFIGS[name], (seed,)) for seed in range(seeds) for name in names]
    return [(cell, Job(cell.folder(folder), "", folder)) for cell in cells]


def local(slots, runner):
    return engines.Local(slots, 1, runner=runner)


def test_cells_that_fail_or_are_lost_do_not_stop_the_others(tmp_path, capsys):
    started, running, finished, lock = [], [], [], threading.Lock()

    def mocked(job, stopped):
        with lock:
            started.append(job.folder)
            running.append(1)
        time.sleep(0.01)
        with lock:
            most = len(running)
            running.pop()
        assert most <= 3
        if "cope" in job.folder.parts:
            return "error: it fails"
        if "fox" in job.folder.parts:
            raise RuntimeError("the machine is gone")
        return None

    jobs = jobs_of(tmp_path, 10, CONFIGS)
    number, failure = schedule.drive(jobs, local(3, mocked), finished=lambda: finished.append(1))
    assert number is None and failure.cell.label in ("cope", "fox")
    assert sorted(started) == sorted(job.folder for _, job in jobs)
    assert len(finished) == 20
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[")]
    assert len(lines) == 40
    assert lines[-1].startswith("[40/40] ")
    assert sum(": error: it fails, 00:00" in line for line in lines) == 10
    assert sum(": lost (RuntimeError: the machine is gone), 00:00" in line for line in lines) == 10
    assert sum(": finished, 00:00" in line for line in lines) == 20


class Limited(engines.Local):
    """An engine that runs two cells at most, as a limit of Slurm, and first refuses each so often."""

    def __init__(self, refusals):
        super().__init__(5, 1, runner=lambda job, stopped: time.sleep(0.1))
        self.submitted, self.tries, self._refusals, self._refused = [], 0, refusals, {}

    def start(self, job):
        self.tries += 1
        self._refused[job.folder] = self._refused.get(job.folder, 0) + 1
        if (
            self._refused[job.folder] <= self._refusals
            or sum(not future.done() for future in self.submitted) >= 2
        ):
            raise RuntimeError("submit limit")
        self.submitted.append(super().start(job))
        return self.submitted[-1]


@pytest.mark.parametrize("refusals", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_cells_that_an_engine_refuses_are_tried_again(refusals, tmp_path, capsys, monkeypatch):
    """One refusal more in a row, while no cell runs, would be the last; those of other cells do not
    count.
    """
    monkeypatch.setattr(schedule, "PAUSES", (0.01, 0.02, 0.03, 0.04))
    engine = Limited(refusals)
    assert schedule.drive(jobs_of(tmp_path, 6), engine) == (None, None)
    assert capsys.readouterr().err.count(": finished") == 6
    assert 6 * (refusals + 1) <= engine.tries < 6 * (refusals + 1) + 30


def test_an_engine_that_refuses_everything_ends_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(schedule, "PAUSES", (0.01, 0.02))
    engine = Limited(1_000_000)
    began = time.monotonic()
    number, failure = schedule.drive(jobs_of(tmp_path, 6), engine)
    assert number is None and failure.error.args == ("submit limit",)
    assert time.monotonic() - began < 5
    assert (
        "the engine refuses the other 6 cells: RuntimeError: submit limit"
        in capsys.readouterr().err
    )
    assert engine.tries == 3
    grid = Grid(tmp_path, [cell for cell, _ in jobs_of(tmp_path, 6)])
    with pytest.raises(RuntimeError, match=r"^rope, seed 0: the engine refuses the other 6 cells"):
        grid.train(engine=Limited(1_000_000))
    grid.train(engine=Limited(1_000_000), stop_at_failure=False)


def until_stopped(ended=None, failing="seed_1"):
    """A runner that runs until it is stopped; the cell in the folder `failing` fails while it
    stops.
    """

    def mocked(job, stopped):
        while not stopped():
            time.sleep(0.01)
        ended.append(job.folder.name)
        job.folder.mkdir(parents=True)
        if job.folder.name == failing:
            (job.folder / FAILED).write_text("{}")
        return "stopped"

    return mocked


def test_a_signal_stops_cells_and_starts_no_more(tmp_path, capsys):
    """Of the two that run, one is interrupted, and the other fails while it stops."""
    ended = []
    threading.Timer(
        0.2, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
    ).start()
    number, failure = schedule.drive(jobs_of(tmp_path), local(2, until_stopped(ended)))
    assert (number, failure.cell.name, sorted(ended)) == (
        signal.SIGTERM,
        "rope, seed 1",
        ["seed_0", "seed_1"],
    )
    assert "[1/9] rope, seed 1: stopped" in capsys.readouterr().err


def test_after_a_signal_a_grid_says_what_is_finished(tmp_path, capsys):
    grid = Grid(tmp_path, [cell for cell, _ in jobs_of(tmp_path)])
    threading.Timer(
        0.2, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    ).start()
    with pytest.raises(
        Interrupted, match=r"^stopped; rerun the same command to resume$"
    ) as stopped:
        grid.train(engine=local(2, until_stopped([], None)))
    assert stopped.value.exit_code == 130
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "9 of 9 cells to train, 2 at a time"
    assert lines[-1] == f"0 of 9 cells in {tmp_path} are finished"


@pytest.mark.parametrize(
    ("line", "status", "error", "message"),
    [
        ("error: too few", 2, ConfigError, "^rope, seed 1: too few$"),
        ("error: step 3", 3, NonFiniteError, "^rope, seed 1: step 3$"),
        (
            "killed by signal 9 (step 5)",
            -9,
            RuntimeError,
            r"seed 1: killed by signal 9 \(step 5\); log.txt in",
        ),
    ],
)
def test_the_first_failure_stops_the_others_and_is_raised(line, status, error, message, tmp_path):
    ended = []

    def mocked(job, stopped):
        if job.folder.name == "seed_1":
            job.folder.mkdir(parents=True)
            (job.folder / FAILED).write_text(json.dumps({"line": line, "status": status}))
            return line
        return until_stopped(ended)(job, stopped)

    grid = Grid(tmp_path, [cell for cell, _ in jobs_of(tmp_path)])
    with pytest.raises(error, match=message):
        grid.train(engine=local(2, mocked))
    assert ended == ["seed_0"]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            OSError(errno.ENOSPC, "cannot write"),
            StorageError,
            r"seed_\d \(No space left on device\): complete files",
        ),
        (RuntimeError("gone"), RuntimeError, r"^rope, seed \d: lost \(RuntimeError: gone\)$"),
    ],
)
def test_a_full_disk_and_a_lost_cell_are_errors(error, kind, message, tmp_path):
    def mocked(job, stopped):
        raise error

    with pytest.raises(kind, match=message):
        Grid(tmp_path, [cell for cell, _ in jobs_of(tmp_path)]).train(engine=local(2, mocked))


def test_a_cell_that_a_signal_to_all_ends_first_is_a_stop(tmp_path):
    grid = Grid(tmp_path, [cell for cell, _ in jobs_of(tmp_path)])
    with pytest.raises(
        Interrupted, match=r"^rope, seed \d: stopped at step 5; rerun the same command"
    ) as stopped:
        grid.train(engine=local(2, lambda job, stopped: "stopped at step 5"))
    assert stopped.value.exit_code == 143


@pytest.mark.slow
def test_a_second_ctrl_c_ends_cells_at_once(tmp_path):
    """The first only asks them to save a checkpoint."""
    levels = []

    def mocked(job, stopped):
        while stopped() < 2:
            levels.append(stopped())
            time.sleep(0.01)
        return "killed"

    def interrupt():
        for _ in range(2):
            time.sleep(0.3)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            if not levels or not levels[-1]:
                time.sleep(1.5)  # the loop asks the cells once a second

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        schedule.drive(jobs_of(tmp_path), local(2, mocked))
    assert {0, 1} == set(levels)


def test_the_bar_counts_the_steps_of_all_cells(tmp_path, capsys, monkeypatch):
    """One cell resumes; its steps are not counted as done now, and neither are those of the first
    look at a cell that trains, because compilation came before them.
    """
    jobs = jobs_of(tmp_path, 2)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    first, second = (job.folder / "metrics.jsonl" for _, job in jobs)
    for path in (first, second):
        path.parent.mkdir(parents=True)
    first.write_text('{"step": 200, "seed": 0}\n')
    running = [first.parent, second.parent]
    with schedule._View(jobs) as view:
        for _ in range(2):
            now[0] += 40
            view.show(running)
        first.write_text('{"step": 200, "seed": 0}\n{"step": 300, "seed": 0}\n')
        view.end(jobs[1][0], "error: no", True, 1.0)
        view.show(running)
        first.write_text('{"step": 400, "seed": 0}\n{"step": 5')  # the last is being written
        for step in (100, 300):
            now[0] += 40
            second.write_text(f'{{"step": {step}, "seed": 0}}\n')
            view.show(running)
    assert capsys.readouterr().err.splitlines() == [
        "0 of 2 cells: compiling",
        "0 of 2 cells: 200/1,200 steps, compiling",
        "0 of 2 cells: 200/1,200 steps, compiling",
        "[1/2] rope, seed 1: error: no, 00:01",
        "0 of 2 cells, 1 failed: 400/1,200 steps, 2.5 steps/s, 05:20 left",
        "0 of 2 cells, 1 failed: 600/1,200 steps, 3.75 steps/s, 02:40 left",
    ]


def test_the_bar_says_where_the_next_cell_waits_or_compiles(tmp_path, capsys, monkeypatch):
    jobs = jobs_of(tmp_path, 2)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with schedule._View(jobs) as view:
        for cell, job in jobs:
            for steps in (0, 200, 600):
                now[0] += 40
                job.folder.mkdir(parents=True, exist_ok=True)
                (job.folder / "metrics.jsonl").write_text(f'{{"step": {steps}, "seed": 0}}\n')
                (job.folder / LOG).write_text("trains" if steps else f"text\n{claims.WAITS}\n")
                view.show([job.folder])
            view.end(cell, None, False, 120)
    assert capsys.readouterr().err.splitlines() == [
        "0 of 2 cells: compiling",
        "0 of 2 cells: 0/1,200 steps, waits for cores or GPUs that other cells use",
        "0 of 2 cells: 200/1,200 steps",
        "0 of 2 cells: 600/1,200 steps, 10 steps/s, 01:00 left",
        "[1/2] rope, seed 0: finished, 02:00",
        "1 of 2 cells: 600/1,200 steps, waits for cores or GPUs that other cells use, 02:00 left",
        "1 of 2 cells: 800/1,200 steps, 5 steps/s, 01:20 left",
        "1 of 2 cells: 1,200/1,200 steps, 6.25 steps/s",
        "[2/2] rope, seed 1: finished, 02:00",
    ]


def test_equal_shares_of_the_cores(monkeypatch):
    monkeypatch.setattr(engines.claims, "cores", lambda: 5)
    assert [engines.Local(slots).cores for slots in (1, 2, 6)] == [5, 2, 0]


def test_a_ray_of_its_own_sends_no_statistics(monkeypatch):
    at_start = {}
    ray = SimpleNamespace(
        init=lambda **_: at_start.update(os.environ), remote=lambda **_: lambda function: function
    )
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "")  # restored after the test
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    monkeypatch.setitem(sys.modules, "ray", ray)
    engines.Ray(1, None, 1, 0, {})
    assert at_start["RAY_USAGE_STATS_ENABLED"] == "0"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ("local", 1, 0, ["TPU=4"]),
            "--resources and --address are for --engine=ray and --engine=slurm",
        ),
        (("local", 64, 0), "a cell needs 64 cores, but this machine shows 4: lower --cores"),
        (("local", 1, 3), "a cell needs 3 GPUs, but this machine shows 2: lower --gpus"),
        (("ray", 1, 0, ["disk"]), "--resources takes NAME=VALUE, not 'disk'"),
        (("ray", 1, 0, ["kind=big"]), "--resources=kind=… must be a number for Ray"),
    ],
)
def test_what_an_engine_cannot_have_is_one_line(given, message, tmp_path, monkeypatch):
    monkeypatch.setattr(engines.claims, "cores", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    kind, *needs = given
    with pytest.raises(ConfigError, match=message):
        engines.choose(kind, tmp_path, *needs)
    assert engines.default_slots(1, 2) == 1


@pytest.mark.parametrize("cluster", ["slurm", "local"])
def test_a_path_that_slurm_would_change_is_one_line(cluster, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"a%j/slurm has a % in its path, which Slurm replaces: choose another --w",
    ):
        engines.Slurm(1, tmp_path / "a%j" / "slurm", 1, 0, {}, cluster)
