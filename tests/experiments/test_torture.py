"""The torture of a small run; and that it would tell if a run did not go on exactly."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from cope_jax.errors import ConfigError
from cope_jax.training.checkpoints import Checkpoints
from experiments.tortures import strikes, verdict
from experiments.tortures.ordeal import Ordeal
from experiments.tortures.strikes import BrokenError, Plan
from experiments.tortures.victim import Victim, parse_mesh

pytestmark = pytest.mark.xdist_group("torture")

MESH = "fsdp=2"


@dataclasses.dataclass
class Tortured:
    """What two commands did, the first of which was stopped."""

    folder: object
    first: object
    then: object

    @property
    def starts(self):
        return read_starts(self.folder / MESH)


def read_starts(folder):
    return [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]


def flags(folder, *, kills, seed=0, meshes=MESH):
    options = {"workdir": folder, "json": folder.with_suffix(".json"), "meshes": meshes, "kills": kills, "seed": seed}
    return [f"--{name}={value}" for name, value in options.items()]


@pytest.fixture(scope="module")
def tortured(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("torture") / "runs"
    log = folder / MESH / "starts.jsonl"
    first = start("torture", *flags(folder, kills=4))
    first.signal_when(lambda: log.exists() and len(log.read_text().splitlines()) > 1, signal.SIGTERM)
    return Tortured(folder, first.wait(), start("torture", *flags(folder, kills=4)).wait())


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_with_the_same_bits(tortured):
    assert tortured.then.status == 0, tortured.then.out + tortured.then.err
    assert "identical" in tortured.then.out and "4/4" in tortured.then.err
    (mesh,) = json.loads(tortured.folder.with_suffix(".json").read_text())["meshes"]
    assert (mesh["mesh"], mesh["wrong"], mesh["kills"]) == (MESH, [], 4)
    assert sum(mesh["signals"].values()) == sum(mesh["places"].values()) == 4
    assert mesh["places"]["checkpoint"] >= 1 and mesh["runs"] >= 1
    assert len(tortured.starts) == mesh["starts"] == mesh["kills"] + mesh["runs"] + 1


@pytest.mark.slow
def test_a_torture_that_was_stopped_goes_on(tortured):
    assert tortured.first.status == 143
    assert "Traceback" not in tortured.first.err
    assert tortured.first.err.splitlines()[-1] == "stopped; the same command goes on from there"
    assert [row["round"] for row in tortured.starts].count(0) == 1  # the undisturbed run is not made anew


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
    like = verdict._program().state_shapes()
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        step, state, progress = checkpoints.restore(like)
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
    change_checkpoint(workdir, lambda state, progress: (state, progress | {"data": [{"next_index": 5}]}))


def spoil_newest(workdir):
    shutil.rmtree(max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name)))


SPOILED = {
    spoil_metrics: ["metrics.jsonl differs from line 5 on"],
    spoil_result: ["result.json differs"],
    spoil_bit: ["params.embedding.embedding differs"],
    spoil_key: ["key differs"],
    spoil_place: ["place in the data differs"],
}


@pytest.mark.slow
@pytest.mark.parametrize("spoil", SPOILED)
def test_whatever_differs_is_named(spoil, tortured, tmp_path):
    straight, other = tortured.folder / MESH / "straight", tmp_path / "other"
    shutil.copytree(straight, other)
    assert verdict.differences(straight, other) == []
    spoil(other)
    assert verdict.differences(straight, other) == SPOILED[spoil]


@pytest.mark.slow
def test_a_run_whose_last_checkpoint_is_another_differs(tortured, tmp_path):
    straight, other = tortured.folder / MESH / "straight", tmp_path / "other"
    shutil.copytree(straight, other)
    spoil_newest(other)
    assert "last checkpoint differs" in verdict.differences(straight, other)


@pytest.mark.slow
def test_the_command_exits_with_1_where_a_run_differs(tortured, start, tmp_path):
    folder = tmp_path / "runs"
    shutil.copytree(tortured.folder, folder)
    spoil_metrics(folder / MESH / "round_1")
    done = start("torture", *flags(folder, kills=4)).wait()
    assert done.status == 1
    assert "different" in done.out and "fsdp=2: round_1: metrics.jsonl differs from line 5 on" in done.out


# Stand for the training command: each says what it did wrong.
TRAINS = """
import json, pathlib, signal, sys, time
folder = pathlib.Path({workdir!r})
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
metrics = folder / "metrics.jsonl"
metrics.with_suffix(".partial").write_text("")
signal.signal(signal.SIGTERM, lambda *_: {answer})
metrics.with_suffix(".partial").replace(metrics)
time.sleep(0.3)
metrics.write_text(json.dumps({{"step": 2, "loss": 1.0}}) + "\\n")
time.sleep({seconds})
"""
TERM, KILL = Plan("step", signal.SIGTERM, 1, 0.0), Plan("step", signal.SIGKILL, 1, 0.0)


@dataclasses.dataclass(frozen=True)
class StandIn(Victim):
    answer: str = "sys.exit(143)"
    seconds: float = 30

    def start(self):
        script = TRAINS.format(workdir=str(self.workdir), answer=self.answer, seconds=self.seconds)
        with self.words.open("wb") as words:
            return subprocess.Popen([sys.executable, "-c", script], stderr=words)


@pytest.mark.parametrize("plan", [TERM, KILL], ids=["SIGTERM", "SIGKILL"])
def test_a_strike_is_told_by_its_signal_and_place(plan, tmp_path):
    start = strikes.start(StandIn(tmp_path / "run", {}, tmp_path), 8, 4, 1, plan)
    expected = {"SIGTERM": 143, "SIGKILL": -9}[plan.number.name]
    assert (start.round, start.signal, start.where, start.status) == (1, plan.number.name, "steps", expected)


def test_a_run_that_ends_before_it_is_struck_was_not_killed(tmp_path):
    start = strikes.start(
        StandIn(tmp_path / "run", {}, tmp_path, seconds=0), 8, 4, 1, Plan("any", signal.SIGKILL, 1, 9)
    )
    assert (start.signal, start.where, start.status) == (None, None, 0)


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
        strikes.start(StandIn(tmp_path / "run", {}, tmp_path, answer), 8, 4, 1, TERM)


def test_a_run_that_does_not_leave_is_told_and_ended(monkeypatch, tmp_path):
    monkeypatch.setattr(strikes, "PATIENCE", 1.5)
    with pytest.raises(BrokenError, match="hangs"):
        strikes.start(StandIn(tmp_path / "run", {}, tmp_path, "None", 60), 8, 4, 1, TERM)


@pytest.mark.parametrize("calls", [1, 30])
def test_a_torturer_that_is_stopped_leaves_no_run_behind(calls, tmp_path):
    left, processes = [calls], []

    def check():
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    class Noted(StandIn):
        def start(self):
            processes.append(super().start())
            return processes[0]

    with pytest.raises(KeyboardInterrupt):
        strikes.start(Noted(tmp_path / "run", {}, tmp_path), 8, 4, 1, TERM, check)
    assert processes[0].returncode == -signal.SIGKILL


def test_a_broken_run_ends_the_ordeal_of_its_mesh_alone(monkeypatch, tmp_path):
    def broken(*args):
        raise BrokenError("status 1: error: the disk is gone")

    monkeypatch.setattr(strikes, "start", broken)
    ordeal = Ordeal(tmp_path / MESH, MESH, 3, 0, tmp_path)
    assert ordeal.run(lambda: None, lambda: None) == ["straight: status 1: error: the disk is gone"]


@pytest.mark.parametrize("mesh", ["fsdp", "fsdp=0", "fdsp=2", "fsdp=2+", "data=-1"])
def test_a_mesh_that_is_none_is_refused(mesh):
    with pytest.raises(ConfigError, match="is no axis and number of devices"):
        parse_mesh(mesh)


def test_wrong_meshes_are_one_line(start, tmp_path):
    done = start("torture", *flags(tmp_path / "runs", kills=1, meshes="tensor=two")).wait()
    assert done.status == 2
    assert "'tensor=two'" in done.error


@pytest.mark.slow
def test_fifty_kills_over_all_meshes(start, tmp_path):
    done = start("torture", f"--workdir={tmp_path / 'runs'}", f"--json={tmp_path / 'figures.json'}").wait(3600)
    assert done.status == 0, done.out + done.err
    meshes = json.loads((tmp_path / "figures.json").read_text())["meshes"]
    assert sum(mesh["kills"] for mesh in meshes) == 50
    assert {"data=4", "fsdp=4", "tensor=4"} < {mesh["mesh"] for mesh in meshes}
