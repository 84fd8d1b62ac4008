"""Several real processes on this machine, which send each other what devices of different hosts
would.
"""

import fcntl
import json
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from cope_jax.cli import distributed
from cope_jax.training.metrics import read_metrics
from tests.commands.commands import ROOT
from tests.commands.several import Processes, free_port

pytestmark = pytest.mark.xdist_group("processes")

STEPS = 8
# Four devices in two processes; the axis that spans the processes comes first. With a sequence that
# spans them, both need all rows.
MESHES = {
    "data": {"data": 2, "tensor": 2},
    "fsdp": {"fsdp": 4},
    "sequence": {"sequence": 2, "tensor": 2},
}


# What Gloo prints, piece by piece, because pieces from several threads mix.
GLOO = re.compile(
    r"\[Gloo\] Rank |\d+| is connected to | peer ranks\. |Expected number of connected peer ranks is : |\n"
)


@pytest.fixture(scope="module")
def launch(config, tmp_path_factory):
    """Starts a run of the tiny config: (workdir, mesh, processes, devices of each, *flags)."""
    cache = tmp_path_factory.mktemp("compiled")

    def begin(workdir, mesh, count, devices, *flags):
        axes = {"data": 1, **mesh}
        given = [f"--config={config}", f"--config.training.steps={STEPS}", "--config.encoding=cope"]
        given += [f"--config.job.mesh.{axis}={size}" for axis, size in axes.items()]
        return Processes(cache, count, devices, *given, f"--workdir={workdir}", *flags)

    return begin


@pytest.fixture(scope="module")
def alone(launch, tmp_path_factory):
    """The workdir of one process with one device."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    (done,) = launch(workdir, {}, 1, 1).wait()
    assert done.status == 0, done.err
    return workdir


@pytest.fixture(scope="module")
def two(launch, tmp_path_factory):
    """The ends of two processes of two devices, and their workdir, by mesh; each is run once."""
    ended = {}

    def get(name):
        if name not in ended:
            workdir = tmp_path_factory.mktemp(name) / "run"
            ended[name] = workdir, launch(workdir, MESHES[name], 2, 2).wait()
        return ended[name]

    return get


def assert_same_numbers(workdir, other):
    """The same rows to the rounding of float32; data in another order would change losses by far
    more.
    """
    ours, theirs = (read_metrics(folder / "metrics.jsonl") for folder in (workdir, other))
    assert [(row["step"], row.get("split")) for row in ours] == [
        (row["step"], row.get("split")) for row in theirs
    ]
    for row, expected in zip(ours, theirs, strict=True):
        assert row.keys() == expected.keys()
        for name in ("loss", "grad_norm", "update_norm", "learning_rate"):
            if name in row:
                np.testing.assert_allclose(
                    row[name], expected[name], rtol=1e-4 if name == "loss" else 1e-3
                )
    losses = [row["loss"] for row in theirs if "split" not in row]
    assert np.min(np.abs(np.diff(losses))) > 1e-3  # what another order would look like


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data", "fsdp", "sequence"])
def test_two_processes_train_as_one_does(name, two, alone):
    workdir, ended = two(name)
    assert [done.status for done in ended] == [0, 0], ended
    assert_same_numbers(workdir, alone)
    ours, theirs = (
        json.loads((folder / "result.json").read_text())["records"] for folder in (workdir, alone)
    )
    assert [r["split"] for r in ours] == [r["split"] for r in theirs]
    np.testing.assert_allclose(
        [r["value"] for r in ours if r["metric"] == "loss"],
        [r["value"] for r in theirs if r["metric"] == "loss"],
        rtol=1e-4,
    )


@pytest.mark.slow
def test_only_the_first_process_prints(two):
    _, (first, second) = two("data")
    assert "in_distribution" in first.out and f"{STEPS}/{STEPS}" in first.err
    assert GLOO.sub("", second.out) == ""
    assert second.err == ""


@pytest.mark.slow
def test_sigterm_to_one_stops_both_and_one_process_goes_on(launch, tmp_path):
    workdir, steps = tmp_path / "run", 40
    flags = (f"--config.training.steps={steps}", "--config.training.evaluate_every=0")
    running = launch(workdir, MESHES["data"], 2, 2, *flags)
    running.signal_when((workdir / "checkpoints" / "4").exists, 1, signal.SIGTERM)
    ended = running.wait()
    assert [done.status for done in ended] == [143, 143], ended
    stopped = [re.search(r"stopped at step (\d+) of 40", done.err) for done in ended]
    assert all(stopped) and stopped[0][1] == stopped[1][1], ended
    assert not any("Traceback" in done.err for done in ended)
    step = int(stopped[0][1])
    assert 4 <= step < steps
    assert max(int(path.name) for path in (workdir / "checkpoints").iterdir()) == step
    assert read_metrics(workdir / "metrics.jsonl")[-1]["step"] == step
    (done,) = launch(workdir, {"fsdp": 2}, 1, 2, *flags).wait()
    assert done.status == 0, done.err
    straight = tmp_path / "straight"
    (done,) = launch(straight, {}, 1, 1, *flags).wait()
    assert done.status == 0, done.err
    assert_same_numbers(workdir, straight)


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_other_soon_with_one_line(launch, tmp_path):
    running = launch(tmp_path / "run", MESHES["data"], 2, 2, "--config.training.steps=400")
    running.signal_when((tmp_path / "run" / "checkpoints" / "4").exists, 1, signal.SIGKILL)
    began = time.monotonic()
    first, second = running.wait()
    assert (first.status, second.status) == (134, -9), (first, second)
    assert time.monotonic() - began < 60
    assert "Traceback" not in first.err
    (line,) = re.findall(r"^error: .*", first.err, re.MULTILINE)
    assert re.fullmatch(
        r"error: another process is lost \(.*\): rerun the command in all processes", line
    )


@pytest.mark.slow
def test_processes_with_other_data_end_at_once_with_one_line(tmp_path):
    data = [tmp_path / "one", tmp_path / "other"]
    for number, folder in enumerate(data):
        (folder / "files").mkdir(parents=True)
        (folder / "files" / "a.txt").write_text(f"It was {number} o'clock .\n" * 20)
    flags = ["--config=wikitext2", f"--workdir={tmp_path / 'run'}"]
    flags += [
        f"--config.task.options.{option}"
        for option in ("corpus=files", "tokenizer=bytes", "length=8")
    ]
    each = [[f"--config.task.options.data_dir={folder}"] for folder in data]
    ended = Processes(tmp_path / "compiled", 2, 1, *flags, each=each).wait(60)
    assert [done.status for done in ended] == [2, 2], ended
    assert all(
        "process 1 has other data than process 0: give all processes the same" in done.err
        for done in ended
    )
    assert not (tmp_path / "run").exists()


def test_wrong_input_ends_both_at_once_with_one_line(launch, tmp_path):
    ended = launch(tmp_path / "run", MESHES["data"], 2, 2, "--config.training.batch_size=3").wait(
        60
    )
    assert [done.status for done in ended] == [2, 2], ended
    assert ended[0].error.startswith("training.batch_size / accumulate=3 cannot be split evenly")
    assert "Traceback" not in ended[1].err


@pytest.mark.slow
def test_a_workdir_in_use_ends_both_at_once_with_one_line(launch, tmp_path):
    workdir = tmp_path / "run"
    workdir.mkdir()
    with (workdir / ".lock").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ended = launch(workdir, MESHES["data"], 2, 2).wait(60)
    assert [done.status for done in ended] == [2, 2], ended
    assert "is in use by" in ended[0].error
    assert ended[1].err == ""


def test_a_process_that_waits_in_vain_for_the_others_ends_with_one_line():
    code = f"""
import sys
from cope_jax.cli import distributed
from cope_jax.cli.run import run
distributed.SECONDS = 1.0
sys.argv = ["train", "--coordinator=127.0.0.1:{free_port()}", "--num_processes=2", "--process_id=0"]
run(distributed.join)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 134
    assert re.fullmatch(
        r"error: the processes did not find each other \(after 1 s\): start all of them.*\n",
        done.stderr,
    )


def test_a_process_waits_for_the_others_as_long_as_nodes_need_to_pull_a_container(monkeypatch):
    given = {"coordinator": "host:1", "num_processes": 2, "process_id": 1}
    values = {name: SimpleNamespace(value=value) for name, value in given.items()}
    monkeypatch.setattr(distributed, "flags", SimpleNamespace(FLAGS=values))
    calls = []
    monkeypatch.setattr(
        "jax.distributed.initialize", lambda *args, **options: calls.append((args, options))
    )
    distributed.join()
    (args, options), allowed = calls[0], distributed.SECONDS
    assert (args, allowed) == (("host:1", 2, 1), 300)
    assert options["initialization_timeout"] > allowed  # JAX's own end has a trace


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--coordinator=127.0.0.1:1234", "--num_processes=2"], "belong together"),
        (["--process_id=1"], "belong together"),
        (
            ["--coordinator=127.0.0.1:1234", "--num_processes=2", "--process_id=2"],
            "--process_id=2 must be less than",
        ),
    ],
)
def test_flags_that_name_no_process_are_one_line(flags, message, start, config, tmp_path):
    done = start("train", f"--config={config}", f"--workdir={tmp_path / 'run'}", *flags).wait(60)
    assert done.status == 2
    assert message in done.error


@pytest.mark.slow
def test_four_processes_train_as_one_does(launch, alone, tmp_path):
    ended = launch(tmp_path / "run", {"data": 2, "fsdp": 2}, 4, 1).wait()
    assert [done.status for done in ended] == [0] * 4, ended
    assert_same_numbers(tmp_path / "run", alone)
    assert ["in_distribution" in done.out for done in ended] == [True, False, False, False]
    # XLA may warn of how it splits a gradient, and of processes that leave first.
    for done in ended[1:]:
        assert not re.search(r"^(error|warning): |Traceback|step/s", done.err, re.MULTILINE), (
            done.err
        )
