import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cope_jax.commands.sweep import cells as reading
from cope_jax.commands.sweep import drive as driving
from cope_jax.commands.sweep import engines, search
from cope_jax.commands.sweep.cells import FAILED, Cell
from cope_jax.commands.sweep.drive import drive, jobs_of
from cope_jax.errors import ConfigError
from cope_jax.training import config_files

PYTHON = sys.executable
GRID = """
from cope_jax.commands.sweep.cells import Cell

def get_cells():
    {body}
"""


def grid(folder, body):
    path = folder / "grid.py"
    path.write_text(GRID.format(body=body))
    return str(path)


def finish(cell, workdir, seconds=1.0):
    """Writes what a finished cell leaves behind."""
    folder = cell.folder(workdir)
    folder.mkdir(parents=True)
    records = [{"value": 0.5, "metric": "token_error", "split": "in_distribution", "wall_seconds": seconds}]
    (folder / "result.json").write_text(json.dumps({"records": records}))


def test_a_cell_is_a_command():
    cell = Cell("quick", "cope(gate=value)", 3, {"model": {"block": {"qk_norm": True}}, "training": {"steps": 20}})
    assert cell.flags() == [
        "--config=quick",
        "--config.model.block.qk_norm=True",
        "--config.training.steps=20",
        "--config.encoding=cope(gate=value)",
        "--seed=3",
    ]
    assert cell.folder(Path("runs")) == Path("runs/quick_qk_norm=True_steps=20/cells/cope_gate=value/seed_3")
    assert cell.experiment().training.steps == 20
    assert cell.experiment().encoding == "cope(gate=value)"


@pytest.mark.parametrize("read", [reading.read, config_files.named])
def test_a_pipe_is_no_grid_or_config(read, tmp_path):
    os.mkfifo(path := tmp_path / "pipe.py")
    with pytest.raises(ConfigError, match="is a pipe"):
        read(str(path))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x = ", "SyntaxError"),
        ("return []", "has no cells"),
        ("pass", "must yield or return them, not return None"),
        ("yield 3", "must yield cells of cope_jax.commands.sweep.cells, not 3"),
        ("yield Cell('quick', 'ropes')", "unknown encoding 'ropes': did you mean 'rope'"),
        ("yield Cell('quikc', 'rope')", "unknown config 'quikc'"),
        ("yield Cell('quick', 'rope', changes={'training': {'stepz': 1}})", "unknown option of config.training"),
        (
            "yield Cell('quick', 'rope')\n    yield Cell('quick', 'rope', setting='quick')",
            "two cells have the same setting, encoding and seed .quick, rope, seed 0.",
        ),
    ],
)
def test_a_wrong_grid_is_one_line(body, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        reading.check(reading.read(grid(tmp_path, body)))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("yield Cell('quick', 'rope', seed=-1)", "cell quick, rope, seed -1: seed must be"),
        ("yield Cell('quick', 'rope', setting='..')", "setting needs letters"),
        ("yield Cell('quick', 'rope', changes=['a'])", "cell 'quick', 'rope', seed 0"),
        (
            "yield Cell('quick', 'rope', setting='a'); yield Cell('flip_flop_small', 'rope', 1, setting='a')",
            "the cells of 'a' have different tasks",
        ),
        (
            "yield Cell('quick', 'rope', 0, {}, 'a')\n"
            "    yield Cell('quick', 'rope', 1, {'training': {'steps': 900}}, 'a')",
            "the cells of 'a' with rope differ in more than the seed, training.steps (600, not 900)",
        ),
        ("yield Cell('quick', 'rope', changes={'task': {'options': {'num_blank': 3}}})", "did you mean 'num_blanks'"),
        (
            "yield Cell('quick', 'rope', changes={'task': {'options': {'num_blanks': -3}}})",
            "must be at least 0, got -3",
        ),
        ("yield Cell('quick', 'rope', changes={'model': {'num_layers': 0}})", "num_layers must be at least 1"),
        ("yield Cell('quick', 'rope', changes={'training': {'steps': 20}})", "must be less than training.steps=20"),
        ("yield Cell('elmo_small', 'rope')", "elmo has no attention"),
        (
            "yield Cell('quick', 'rope', changes={'optimizer': {'clip_norm': None}})",
            "changes cannot set optimizer.clip_norm to None: write a config file",
        ),
    ],
)
def test_a_wrong_cell_is_one_line(body, message, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        reading.check(reading.read(grid(tmp_path, body)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [((), "needs a tuple of values"), (0.1, "needs a tuple"), ("ab", "needs a tuple"), ((1, 2, 1.0), "a value twice")],
)
def test_values_to_search_are_a_tuple(values, message):
    with pytest.raises(
        ConfigError, match=rf"optimizer\.learning_rate {'has' if 'twice' in message else ''} ?{message}"
    ):
        search.trials([Cell("quick", "rope", search={"optimizer.learning_rate": values})])


def test_seeds_with_data_of_their_own_share_their_trials(tmp_path):
    """The trials of a setting and encoding are the same for every seed, and have data that no seed has."""
    search_rates = {"optimizer.learning_rate": (1e-3, 3e-3)}
    cells = [Cell("quick", "rope", s, {"training": {"data_seed": s}}, "q", search_rates) for s in range(3)]
    trials = search.trials(cells)
    assert len(trials) == 2
    assert {trial.changes["training"]["data_seed"] for trial in trials} == {search.SEED}
    first, second = trials
    for cell in cells:
        assert search.missing(cell, reading.State([], {first: "error: no"}, [second]), tmp_path)
    for trial, loss in ((first, 0.1), (second, 0.2)):
        trial.folder(tmp_path).mkdir(parents=True)
        record = {"metric": "loss", "kind": "split", "value": loss}
        (trial.folder(tmp_path) / "result.json").write_text(json.dumps({"records": [record]}))
    for cell in cells:
        assert search.chosen(cell, tmp_path).changes["optimizer"] == {"learning_rate": 1e-3}


def test_a_failed_trial_holds_its_cells_back_and_a_diverged_one_does_not(tmp_path):
    cell = Cell("quick", "rope", search={"optimizer.learning_rate": (1e-3, 3e-3)})
    first, second = search.trials([cell])
    finish(first, tmp_path)
    folder = second.folder(tmp_path)
    folder.mkdir(parents=True)

    def missing():
        return search.missing(cell, reading.State([first], {second: "error: no"}, []), tmp_path)

    (folder / FAILED).write_text(json.dumps({"line": "error: no", "status": 2}))
    assert missing() == f"trial {second.name}: error: no"
    (folder / FAILED).write_text(json.dumps({"line": "error: no", "status": search.NOT_FINITE}))
    assert missing() is None
    assert search.missing(cell, reading.State([first], {}, [second]), tmp_path).endswith("not trained yet")


def test_a_file_without_cells_is_one_line(tmp_path):
    for text, message in ((None, "No such file"), ("x = 1\n", "it has none")):
        path = tmp_path / "other.py"
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match=rf"--grid needs a Python file .* \({message}"):
            reading.read(str(path))


def test_the_grids_of_the_project_are_sound():
    folder = Path(__file__).parents[2] / "experiments" / "grids"
    for path in folder.glob("*.py"):
        cells = reading.read(str(path))
        reading.check(cells)
        assert len(cells) > 100


def test_the_state_is_read_from_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(reading.workdirs.Workdir, "open", lambda *args: None)
    cells = [Cell("quick", name, seed) for name in ("cope", "rope") for seed in range(2)]
    finish(cells[0], tmp_path, 30.0)
    finish(cells[2], tmp_path, 10.0)
    (cells[0].folder(tmp_path) / FAILED).write_text('{"line": "an earlier failure"}')
    cells[1].folder(tmp_path).mkdir(parents=True)
    (cells[1].folder(tmp_path) / FAILED).write_text('{"line": "error: no"}')
    state = reading.state(cells, tmp_path)
    assert (state.finished, state.failed, state.left) == ([cells[0], cells[2]], {cells[1]: "error: no"}, [cells[3]])
    assert reading.seconds_left([cells[1], cells[3]], state.finished, tmp_path) == 40.0
    assert reading.seconds_left([Cell("quick", "fox")], state.finished, tmp_path) == 20.0
    other = Cell("counting_small", "rope")
    finish(other, tmp_path, 80.0)
    finished = [*state.finished, other]
    assert reading.seconds_left([Cell("counting_small", "fox")], finished, tmp_path) == 80.0
    assert reading.seconds_left([Cell("quick", "fox")], finished, tmp_path) == 20.0
    assert reading.seconds_left([Cell("counting", "fox")], finished, tmp_path) == 40.0
    assert reading.seconds_left(cells, [], tmp_path) is None


def test_a_finished_cell_of_other_settings_is_an_error(tmp_path):
    cell = Cell("quick", "rope")
    reading.workdirs.Workdir(cell.folder(tmp_path)).open(cell.experiment(), [0])
    other = Cell("quick", "rope", changes={"training": {"steps": 100}}, setting="quick")
    (cell.folder(tmp_path) / "result.json").write_text('{"records": []}')
    assert reading.state([cell], tmp_path).finished == [cell]
    with pytest.raises(ConfigError, match=r"other settings, .*training\.steps"):
        reading.state([other], tmp_path)


def test_the_trial_with_the_lowest_loss_decides(tmp_path):
    rates = {"optimizer.learning_rate": (1e-3, 3e-3, 1e-2)}
    cells = [
        Cell("quick", name, seed, {"training": {"steps": 200}}, search=rates)
        for name in ("rope", "cope")
        for seed in range(2)
    ]
    trials = search.trials(cells[:2])
    assert [trial.changes["optimizer"] for trial in trials] == [{"learning_rate": rate} for rate in (1e-3, 3e-3, 1e-2)]
    assert all(trial.changes["training"] == {"steps": 200, "data_seed": search.SEED} for trial in trials)
    assert {trial.seed for trial in trials} == {search.SEED}
    assert len(search.trials(cells)) == 6
    assert search.chosen(cells[0], tmp_path) is cells[0]  # no trial has ended
    for trial, loss in zip(trials, (0.5, 0.2, None), strict=True):  # a loss that is not finite is null
        folder = trial.folder(tmp_path)
        folder.mkdir(parents=True)
        rows = [("token_error", "split", 0), ("loss", "sweep", 0), ("loss", "split", loss), ("loss", "split", 0)]
        records = [{"metric": metric, "kind": kind, "value": value} for metric, kind, value in rows]
        (folder / "result.json").write_text(json.dumps({"records": records}))
    for cell in cells[:2]:
        found = search.chosen(cell, tmp_path)
        assert found.changes == {"training": {"steps": 200}, "optimizer": {"learning_rate": 3e-3}}
        assert found.folder(tmp_path) == cell.folder(tmp_path)
        assert "--config.optimizer.learning_rate=0.003" in found.flags()
    assert search.chosen(cells[2], tmp_path) is cells[2]
    assert search.budget(cells) == "learning_rate chosen for each encoding from 3 trials"
    assert search.budget([Cell("quick", "rope")]) == ""
    assert search.budget([*cells, Cell("counting", "rope")]).startswith("learning_rate of quick_steps=200 chosen for")
    won = [search.chosen(cell, tmp_path) for cell in cells[:2]]
    assert search.choices(won, cells) == ["quick_steps=200, rope: learning_rate=0.003"]
    assert search.trials([Cell("quick", "rope")]) == []


def test_cells_that_fail_or_are_lost_do_not_stop_the_others(tmp_path, capsys):
    started, most, lock = [], [], threading.Lock()

    def mocked(job, stopped):
        with lock:
            started.append(job.folder)
            most.append(1)
        time.sleep(0.01)
        with lock:
            running = len(most)
            most.pop()
        assert running <= 3
        if "cope" in job.folder.parts:
            return "error: it fails"
        if "fox" in job.folder.parts:
            raise RuntimeError("the machine is gone")
        return None

    cells = [Cell("quick", name, seed) for seed in range(10) for name in ("rope", "cope", "fox", "none")]
    assert drive(list(jobs_of(cells, tmp_path)), engines.Local(3, mocked), {}) is None
    assert sorted(started) == sorted(cell.folder(tmp_path) for cell in cells)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 40
    assert told[-1].startswith("[40/40] ")
    assert sum(": error: it fails, 00:00" in line for line in told) == 10
    assert sum(": lost (RuntimeError: the machine is gone), 00:00" in line for line in told) == 10
    assert sum(": finished, 00:00" in line for line in told) == 20


class Limited(engines.Local):
    """Such as Slurm, which limits the number of submitted jobs: here two, and none at first."""

    def __init__(self, first_refusals):
        super().__init__(5, lambda job, stopped: time.sleep(0.1))
        self.held, self.tries, self._first = [], 0, first_refusals

    def start(self, job):
        self.tries += 1
        if self.tries <= self._first or sum(not one.done() for one in self.held) >= 2:
            raise RuntimeError("submit limit")
        self.held.append(super().start(job))
        return self.held[-1]


@pytest.mark.parametrize("first_refusals", [0, 5])
def test_cells_that_an_engine_refuses_are_tried_again(first_refusals, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(driving, "PAUSES", (0.01, 0.02, 0.04, 0.08, 0.09))
    engine = Limited(first_refusals)
    assert drive(list(jobs_of([Cell("quick", "rope", seed) for seed in range(6)], tmp_path)), engine, {}) is None
    assert capsys.readouterr().err.count(": finished") == 6
    assert first_refusals + 6 < engine.tries < first_refusals + 30


def test_refusals_while_cells_run_and_refusals_of_other_cells_do_not_add_up(tmp_path, capsys, monkeypatch):
    """One cell runs at a time, and each is refused twice first; a third refusal in a row would be the last."""
    monkeypatch.setattr(driving, "PAUSES", (0.01, 0.02))
    monkeypatch.setattr(driving, "SECONDS", 0.01)

    class Reluctant(Limited):
        def start(self, job):
            self.tries += 1
            if any(not one.done() for one in self.held) or self.refused.setdefault(job.folder, 0) < 2:
                self.refused[job.folder] = self.refused.get(job.folder, 0) + all(one.done() for one in self.held)
                raise RuntimeError("submit limit")
            self.held.append(engines.Local.start(self, job))
            return self.held[-1]

    engine = Reluctant(0)
    engine.refused = {}
    assert drive(list(jobs_of([Cell("quick", "rope", seed) for seed in range(3)], tmp_path)), engine, {}) is None
    assert capsys.readouterr().err.count(": finished") == 3
    assert engine.tries > 9, "some refusals are while a cell runs"


def test_an_engine_that_refuses_everything_ends_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(driving, "PAUSES", (0.01, 0.02))
    engine = Limited(1_000_000)
    began = time.monotonic()
    assert drive(list(jobs_of([Cell("quick", "rope", seed) for seed in range(6)], tmp_path)), engine, {}) is None
    assert time.monotonic() - began < 5
    assert "the engine refuses the other 6 cells: RuntimeError: submit limit" in capsys.readouterr().err
    assert engine.tries == 3


def test_a_signal_stops_cells_and_starts_no_more(tmp_path, monkeypatch, capsys):
    """Of the two that run, one is interrupted, and the other fails while it stops."""
    ended, views = [], []

    def mocked(job, stopped):
        while not stopped():
            time.sleep(0.01)
        ended.append(job.folder)
        job.folder.mkdir(parents=True)
        if job.folder.name == "seed_1":
            (job.folder / FAILED).write_text("{}")
        return "stopped"

    class Kept(driving._View):
        def __init__(self, *args):
            super().__init__(*args)
            views.append(self)

    monkeypatch.setattr(driving, "_View", Kept)
    cells = [Cell("quick", "rope", seed) for seed in range(9)]
    threading.Timer(0.2, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)).start()
    assert drive(list(jobs_of(cells, tmp_path)), engines.Local(2, mocked), {}) == signal.SIGTERM
    assert len(ended) == 2 and views[0]._table([]).title.startswith("0 of 9 finished, 1 failed")
    assert "[1/9] quick, rope, seed 1: stopped" in capsys.readouterr().err


def test_a_grid_ends_with_failures_and_resumes(start, config, tmp_path, monkeypatch):
    """A cell that trains, and one that cannot: its table is too short."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    one = f"yield Cell({str(config)!r}, 'rope', setting='tiny')"
    path = grid(tmp_path, f"{one}\n    yield Cell({str(config)!r}, 'learned(max_length=2)', setting='tiny')")
    flags = (f"--grid={path}", f"--workdir={tmp_path / 'run'}")
    done = start("sweep", *flags, "--dry_run").wait()
    assert (done.status, "2 cells, 0 finished, 0 failed, 2 to train" in done.err) == (0, True), done.err
    assert not (tmp_path / "run" / "tiny").exists()
    cells = reading.read(path)
    assert drive(list(jobs_of(cells, tmp_path / "run", cores=1)), engines.Local(2), {}) is None
    state = reading.state(cells, tmp_path / "run")
    assert (state.finished, list(state.failed), state.left) == ([cells[0]], [cells[1]], [])
    assert state.failed[cells[1]].startswith("error: position 7 is outside of the learned table of 2 rows")
    done = start("sweep", *flags, "--only_failed", "--dry_run").wait()
    assert "2 cells, 1 finished, 1 failed, 1 to train" in done.err
    grid(tmp_path, one)
    done = start("sweep", *flags).wait()
    assert done.status == 0, done.err
    records = json.loads((tmp_path / "run" / "results.json").read_text())["records"]
    assert {(record["encoding"], record["setting"]) for record in records} == {("rope", "tiny")}


def test_wrong_flags_are_one_line(start, tmp_path):
    path = grid(tmp_path, "yield Cell('quick', 'rope')")
    for flags, message in (
        ((f"--grid={path}", "--engine=cloud"), "engine"),
        ((f"--grid={path}", "--resources=TPU=4"), "for --engine=ray and --engine=slurm"),
        (("--grid=nothing",), "or give the path of a grid file, such as ./nothing.py"),
        ((f"--grid={path}", "--gpus=1", "--jobs=1"), "a cell needs 1 GPUs, but this machine shows 0"),
    ):
        done = start("sweep", *flags, f"--workdir={tmp_path / 'run'}").wait()
        assert (done.status, message in done.error) == (2, True), done.err


def test_a_ray_of_its_own_sends_no_statistics(monkeypatch):
    at_start = {}
    ray = SimpleNamespace(init=lambda **_: at_start.update(os.environ), remote=lambda **_: lambda function: function)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "")  # restored after the test
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    monkeypatch.setitem(sys.modules, "ray", ray)
    engines.Ray(1, None, 1, 0, {})
    assert at_start["RAY_USAGE_STATS_ENABLED"] == "0"
