"""The torture of a small run; and that it would tell if a run did not resume exactly."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from cope_jax.storage.checkpoints import Checkpoints
from tests.storage.bucket_server import serving
from tools.torture import __main__ as torture
from tools.torture import killing
from tools.torture.killing import BrokenError, Plan
from tools.torture.tortured import Job, bytes_differ, leftovers

pytestmark = pytest.mark.xdist_group("torture")


@pytest.fixture(scope="module")
def tortured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torture") / "fsdp=2"
    return folder, *torture.torture(folder, Job({"fsdp": 2}), kills=4, seed=0)


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_with_the_same_bits(tortured):
    _, starts, wrong = tortured
    assert wrong == []
    assert sum(start.signal is not None for start in starts) == 4 and starts[-1].signal is None
    assert "checkpoint" in {start.where for start in starts}
    cells = torture.row("fsdp=2", starts, wrong)
    assert cells[1:3] == ["identical", "4"] and int(cells[-2]) == len(starts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [Job({"fsdp": 2}), Job({"fsdp": 2}, processes=2), Job({"data": 1}, kind="compare")],
    ids=["run", "processes", "comparison"],
)
@pytest.mark.parametrize("bucket", [None, "gs://bucket/torture"], ids=["disk", "bucket"])
def test_so_do_several_processes_and_a_comparison(job, bucket, tmp_path):
    with serving():
        starts, wrong = torture.torture(tmp_path / "runs", job, kills=4, seed=0, bucket=bucket)
    assert wrong == []
    assert sum(start.signal is not None for start in starts) == 4
    assert "checkpoint" in {start.where for start in starts}


def spoil_metrics(workdir):
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(True)
    path.write_text("".join([*lines[:4], *lines[5:]]))


def spoil_result(workdir):
    path = workdir / "result.json"
    content = json.loads(path.read_text())
    content["records"][0]["value"] += 1e-9
    path.write_text(json.dumps(content))


def change_checkpoint(workdir, change):
    """Writes the last checkpoint anew, with another state or place."""
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        step, state, progress = checkpoints.restore(torture.program(workdir).state_shapes())
        shutil.rmtree(workdir / "checkpoints")
    state, progress = change(state, progress)
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        checkpoints.save(step, state, progress)


def spoil_bit(workdir):
    def change(state, progress):
        table = state.params["embedding"]["embedding"]
        nudged = table.at[0, 0].set(jnp.nextafter(table[0, 0], jnp.float32(9)))
        params = state.params | {"embedding": {"embedding": nudged}}
        return dataclasses.replace(state, params=params), progress

    change_checkpoint(workdir, change)


def spoil_key(workdir):
    def change(state, progress):
        return dataclasses.replace(state, key=jax.random.fold_in(state.key, 1)), progress

    change_checkpoint(workdir, change)


def spoil_place(workdir):
    change_checkpoint(
        workdir, lambda state, progress: (state, progress | {"data": [{"next_index": 5}]})
    )


def spoil_newest(workdir):
    shutil.rmtree(max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name)))


SPOILED = {
    spoil_metrics: ["metrics.jsonl differs from line 5 on"],
    spoil_result: ["result.json differs"],
    spoil_bit: ["params.embedding.embedding differs"],
    spoil_key: ["key differs"],
    spoil_place: ["place in the data differs"],
    spoil_newest: ["last checkpoint differs"],
}


@pytest.mark.slow
@pytest.mark.parametrize("spoil", SPOILED)
def test_whatever_differs_is_named(spoil, tortured, tmp_path):
    straight, other = tortured[0] / "straight", tmp_path / "other"
    shutil.copytree(straight, other)
    assert torture.differences(straight, other) == []
    spoil(other)
    mistakes = torture.differences(straight, other)
    assert mistakes[: len(SPOILED[spoil])] == SPOILED[spoil]
    assert spoil is spoil_newest or len(mistakes) == len(SPOILED[spoil])


@pytest.mark.parametrize("kind", ["sweep", "text", "export", "dataset"])
@pytest.mark.slow
def test_grids_texts_and_exports_end_alike_and_leave_nothing(kind, tmp_path):
    starts, wrong = torture.torture(tmp_path / "runs", Job({"data": 1}, kind=kind), kills=4, seed=0)
    assert wrong == []
    assert sum(start.signal is not None for start in starts) == 4


def test_whatever_is_left_is_told(tmp_path):
    for name in ("straight", "round_2"):
        (tmp_path / name / "checkpoints" / "4" / name).mkdir(parents=True)
        (tmp_path / name / f"events.out.tfevents.{name}").touch()
    (tmp_path / "material").mkdir()
    (tmp_path / "temporary" / f"cope_jax-{os.getuid()}").mkdir(parents=True)
    (tmp_path / "round_2.0.stderr").touch()
    workdirs = [tmp_path / "straight", tmp_path / "round_2"]
    assert list(leftovers(tmp_path, workdirs)) == []
    (tmp_path / "temporary" / "cope_jax-x.log").touch()
    (tmp_path / "round_2.partial-x").mkdir()
    (tmp_path / "round_2" / "result.json.partial").touch()
    (tmp_path / "straight" / "report.html").touch()
    assert sorted(leftovers(tmp_path, workdirs)) == [
        "cope_jax-x.log stays in the folder for temporary files",
        "round_2.partial-x stays next to the folder",
        "round_2: report.html is missing",
        "round_2: result.json.partial is left",
    ]
    (tmp_path / "round_2" / "report.html").write_text("another")
    assert list(bytes_differ(*workdirs)) == ["report.html differs"]


# Stands for the training command: it trains, and answers SIGTERM in one way or another.
TRAINS = """
import json, pathlib, signal, sys, time
folder = pathlib.Path({workdir!r})
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
metrics = folder / "metrics.jsonl"
signal.signal(signal.SIGTERM, lambda *_: {answer})
metrics.write_text("")
time.sleep(0.05)
metrics.write_text(json.dumps({{"step": 2, "loss": 1.0}}) + "\\n")
time.sleep({seconds})
"""
TERM, KILL = Plan("steps", signal.SIGTERM, 1, 0.0), Plan("steps", signal.SIGKILL, 1, 0.0)


def start(tmp_path, plan, answer="sys.exit(143)", seconds=30):
    script = TRAINS.format(workdir=str(tmp_path / "run"), answer=answer, seconds=seconds)
    return killing.start(tmp_path / "run", [[sys.executable, "-S", "-c", script]], {}, plan)


@pytest.mark.parametrize(("plan", "status"), [(TERM, 143), (KILL, -9)], ids=["SIGTERM", "SIGKILL"])
def test_a_kill_is_told_by_its_signal_and_place(plan, status, tmp_path):
    ended = start(tmp_path, plan)
    assert (ended.signal, ended.where, ended.status) == (plan.number.name, "steps", status)


def test_a_run_that_ends_before_it_is_killed_was_not_killed(tmp_path):
    ended = start(tmp_path, Plan("any", signal.SIGKILL, 1, 9), seconds=0)
    assert (ended.signal, ended.where, ended.status) == (None, None, 0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("sys.exit(1)", "status 1 after SIGTERM"),
        ("sys.exit(0)", "status 0 after SIGTERM"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_run_that_leaves_otherwise_than_it_should_is_told(answer, message, tmp_path):
    with pytest.raises(BrokenError, match=message):
        start(tmp_path, TERM, answer)


def test_a_run_that_does_not_leave_is_told_and_ended(monkeypatch, tmp_path):
    monkeypatch.setattr(killing, "PATIENCE", 0.5)
    with pytest.raises(BrokenError, match="hangs"):
        start(tmp_path, TERM, "None")


def test_a_torturer_that_is_stopped_leaves_no_run_behind(monkeypatch, tmp_path):
    popen, processes = subprocess.Popen, []
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **k: processes.append(popen(*a, **k)) or processes[0]
    )
    monkeypatch.setattr(killing.time, "sleep", lambda seconds: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, TERM)
    assert processes[0].returncode == -signal.SIGKILL


def test_a_broken_run_ends_the_torture_of_its_mesh_alone(monkeypatch, tmp_path):
    def broken(*args):
        raise BrokenError("status 1: error: the disk is gone")

    monkeypatch.setattr(killing, "start", broken)
    assert torture.torture(tmp_path / "fsdp=2", Job({"fsdp": 2}), 3, 0) == (
        [],
        ["straight: status 1: error: the disk is gone"],
    )


def test_a_mesh_that_is_none_is_refused():
    for mesh in ("fsdp", "fsdp=0", "fdsp=2", "fsdp=2+", "data=-1", "data=65", "data=²"):
        with pytest.raises(ValueError, match="is no axis and number of devices"):
            torture.parse_mesh(mesh)


def run(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["torture", *map(str, flags)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return torture.main()


def test_wrong_flags_are_one_line(monkeypatch, tmp_path, capsys):
    new = f"--workdir={tmp_path / 'new'}"
    for flags, message in (
        ([new, "--meshes=tensor=two"], "'tensor=two' is no axis"),
        ([new, "--kills=0"], "--kills=0 must be at least 1"),
        ([f"--workdir={tmp_path}"], "exists: delete it"),
        ([new, "--meshes=data=2,data=3", "--processes=2"], "--processes=2 does not split"),
        ([new, "--kinds=train,compare", "--processes=2"], "--processes is for --kinds=train"),
        ([new, "--kinds=trian"], "--kinds=trian has an unknown one: choose from train, text"),
        ([new, "--kinds=sweep", "--bucket=gs://x/y"], "--bucket is for --kinds=train,compare,text"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run(monkeypatch, *flags)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("wrong", "status"), [([], 0), (["round_1: key differs"], 1)])
def test_the_command_shares_the_kills_and_tells_what_is_wrong(
    wrong, status, monkeypatch, tmp_path, capsys
):
    asked = []

    def kill(folder, job, kills, seed, killed, bucket):
        assert bucket is None
        asked.append((folder.name, job.kind, job.mesh, kills, seed))
        ends = (None, None, 0, 1.0), ("SIGKILL", "steps", -9, 1.0)
        return [killing.Start(*end) for end in ends], wrong

    monkeypatch.setattr(torture, "torture", kill)
    flags = ("--kills=7", "--seed=7", "--meshes=data=2,fsdp=2+tensor=2", "--kinds=train,export")
    assert run(monkeypatch, f"--workdir={tmp_path / 'runs'}", *flags) == status
    assert asked == [
        ("data=2", "train", {"data": 2}, 2, 7),
        ("fsdp=2+tensor=2", "train", {"fsdp": 2, "tensor": 2}, 2, 7),
        ("export", "export", {"data": 1}, 3, 7),
    ]
    # Of the table a narrow terminal breaks words; `row` is tested above.
    assert ("data=2: round_1: key differs" in capsys.readouterr().out) == bool(wrong)


@pytest.mark.slow
def test_fifty_kills_over_all_meshes(tmp_path):
    words = [sys.executable, "-m", "tools.torture", f"--workdir={tmp_path / 'runs'}"]
    options = {"cwd": killing.ROOT, "capture_output": True, "text": True, "timeout": 3600}
    # Of the table a narrow terminal breaks words.
    done = subprocess.run(words, env=os.environ | {"COLUMNS": "200"}, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "50/50" in done.stderr and done.stdout.count("identical") == 4
