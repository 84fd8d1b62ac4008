"""A run that resumes: the same bits on the same devices, the same numbers on others."""

import dataclasses
import signal

import jax
import numpy as np
import pytest

from cope_jax.errors import Interrupted
from cope_jax.storage.checkpoints import Checkpoints
from cope_jax.training.experiment_config import MeshConfig
from cope_jax.training.metrics import read_metrics
from tests.training import tiny

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("exactness")]

MESHES = {
    "eight": MeshConfig(data=1, fsdp=4, tensor=2),
    "four": MeshConfig(data=2, tensor=2),
    "one": tiny.ONE,
}
KIND = [3], 10  # batches of 4 of the 10 examples straddle epochs


class Killed(BaseException):
    """Stands for the sudden end of the process: nothing after it is done in good order."""


def kill():
    raise Killed


def ask_to_stop():
    signal.raise_signal(signal.SIGTERM)


@dataclasses.dataclass
class Observed:
    """A program that notes the batches it is given, and acts after a dispatch."""

    program: object
    at: int | None = None
    action: object = None
    inputs: list = dataclasses.field(default_factory=list)

    def __getattr__(self, name):
        return getattr(self.program, name)

    def train_steps(self, state, batches):
        result = self.program.train_steps(state, batches)
        with jax.transfer_guard("allow"):  # the loop forbids what it does not ask for itself
            self.inputs.append(jax.device_get(batches["inputs"]))
        if len(self.inputs) == self.at:
            self.action()
        return result


def create_run(workdir, mesh, at=None, action=None):
    program = Observed(tiny.program(1, MESHES[mesh]), at, action)
    return tiny.create_run(workdir, *KIND, program=program)


@dataclasses.dataclass
class Outcome:
    inputs: np.ndarray
    state: dict
    metrics: bytes
    rows: list


def outcome(workdir, mesh, before=()):
    run = create_run(workdir, mesh)
    state, _ = run.train()
    path = workdir / "metrics.jsonl"
    inputs = np.concatenate([*before, *run.program.inputs])
    return Outcome(inputs, tiny.contents(state), path.read_bytes(), read_metrics(path))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The outcome on eight devices and on one, without an interruption."""
    folder = tmp_path_factory.mktemp("straight")
    return {mesh: outcome(folder / mesh, mesh) for mesh in ("eight", "one")}


def stop(workdir, mesh, at=3, action=ask_to_stop):
    """The batches of a run until it was stopped; three dispatches end between two checkpoints."""
    run = create_run(workdir, mesh, at, action)
    with pytest.raises(Killed if action is kill else Interrupted):
        run.train()
    return run.program.inputs


def assert_same_numbers(ours, theirs):
    np.testing.assert_array_equal(ours.inputs, theirs.inputs)
    assert [row["step"] for row in ours.rows] == [row["step"] for row in theirs.rows]
    for row, expected in zip(ours.rows, theirs.rows, strict=True):
        for name in expected.keys() - {"split"}:
            np.testing.assert_allclose(
                row[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name
            )


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("eight", "eight"),
        ("eight", "four"),
        ("eight", "one"),
        ("one", "eight"),
    ],
)
def test_a_run_goes_on_with_other_devices_to_the_same_numbers(first, then, straight, tmp_path):
    before = stop(tmp_path, first)
    ended = outcome(tmp_path, then, before)
    assert_same_numbers(ended, straight["one"])
    if first == then:
        assert ended.state == straight[first].state
        assert ended.metrics == straight[first].metrics


# Before the first checkpoint, and behind one.
@pytest.mark.parametrize("at", [1, 5])
def test_a_run_killed_on_eight_devices_goes_on_to_the_same_bits(at, straight, tmp_path):
    stop(tmp_path, "eight", at, kill)
    ended = outcome(tmp_path, "eight")
    assert ended.state == straight["eight"].state
    assert ended.metrics == straight["eight"].metrics


@pytest.mark.parametrize("mesh", ["four", "one"])
def test_eight_devices_leave_what_others_find_to_the_last_bit(mesh, tmp_path):
    stop(tmp_path, "eight")
    restored = {}
    for name in ("eight", mesh):
        like = tiny.program(1, MESHES[name]).state_shapes()
        with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
            step, state, progress = checkpoints.restore(like)
        for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
            assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
        restored[name] = step, tiny.contents(state), progress
    assert restored["eight"] == restored[mesh]
