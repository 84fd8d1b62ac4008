import dataclasses
import signal

import jax
import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.training.checkpoints import Checkpoints
from cope_jax.training.interruption import Interrupted
from cope_jax.training.metrics import read_metrics
from tests.training import tiny

# Fresh examples without end; 10 fixed examples, so that batches of 4 straddle epochs; two seeds side by side.
KINDS = {"endless": ([3], None), "fixed": ([3], 10), "side_by_side": ([3, 8], None)}
DISPATCHES = tiny.STEPS // tiny.DISPATCH


class Killed(BaseException):
    """Stands for the sudden end of the process: nothing after it is done in good order."""


@dataclasses.dataclass
class Disturbed:
    """A program that does something once its dispatch number `at` is done."""

    program: object
    at: int
    action: object
    count: int = 0

    def __getattr__(self, name):
        return getattr(self.program, name)

    def train_steps(self, *args):
        result = self.program.train_steps(*args)
        self.count += 1
        if self.count == self.at:
            self.action()
        return result


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def kill():
    raise Killed


def outcome(run):
    state, seconds = run.train()
    assert seconds > 0
    return tiny.contents(state), (run.workdir / "metrics.jsonl").read_bytes()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The outcome of each kind of run without an interruption."""
    folder = tmp_path_factory.mktemp("straight")
    return {kind: outcome(tiny.create_run(folder / kind, *args)) for kind, args in KINDS.items()}


def test_the_kinds_of_run_differ(straight):
    assert len({metrics for _, metrics in straight.values()}) == len(KINDS)


@pytest.mark.parametrize("at", range(1, DISPATCHES + 1))
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stopped_by_ctrl_c_goes_on_to_the_same_bits(kind, at, straight, tmp_path):
    run = tiny.create_run(tmp_path, *KINDS[kind])
    run.program = Disturbed(run.program, at, ctrl_c)
    with pytest.raises(Interrupted, match=f"stopped at step {at * tiny.DISPATCH} of {tiny.STEPS}"):
        run.train()
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.latest() == at * tiny.DISPATCH
    assert outcome(tiny.create_run(tmp_path, *KINDS[kind])) == straight[kind]


@pytest.mark.parametrize("at", range(1, DISPATCHES + 1))
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_goes_on_from_its_last_checkpoint_to_the_same_bits(kind, at, straight, tmp_path):
    run = tiny.create_run(tmp_path, *KINDS[kind])
    run.program = Disturbed(run.program, at, kill)
    with pytest.raises(Killed):
        run.train()
    assert outcome(tiny.create_run(tmp_path, *KINDS[kind])) == straight[kind]


@pytest.mark.newest
def test_a_run_stopped_after_every_dispatch_ends_with_the_same_bits(straight, tmp_path):
    for _ in range(DISPATCHES):
        run = tiny.create_run(tmp_path, *KINDS["endless"])
        run.program = Disturbed(run.program, 1, ctrl_c)
        with pytest.raises(Interrupted):
            run.train()
    assert outcome(tiny.create_run(tmp_path, *KINDS["endless"])) == straight["endless"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_killed_while_it_saves_goes_on_to_the_same_bits(when, straight, tmp_path, monkeypatch):
    save, steps = Checkpoints.save, []

    def killing(self, step, *args):
        steps.append(step)
        if when == "after" or len(steps) == 1:
            save(self, step, *args)
        if len(steps) == 2:
            raise Killed

    monkeypatch.setattr(Checkpoints, "save", killing)
    with pytest.raises(Killed):
        tiny.create_run(tmp_path, *KINDS["fixed"]).train()
    monkeypatch.undo()
    assert outcome(tiny.create_run(tmp_path, *KINDS["fixed"])) == straight["fixed"]


def test_a_run_killed_while_it_measures_goes_on_to_the_same_bits(straight, tmp_path):
    run = tiny.create_run(tmp_path, *KINDS["endless"])
    evaluate = run.evaluate
    run.evaluate = lambda state, step: kill() if step == 8 else evaluate(state, step)
    with pytest.raises(Killed):
        run.train()
    assert outcome(tiny.create_run(tmp_path, *KINDS["endless"])) == straight["endless"]


def test_a_finished_run_trains_no_further_and_keeps_its_time(straight, tmp_path):
    first = tiny.create_run(tmp_path, *KINDS["endless"])
    _, seconds = first.train()
    again = tiny.create_run(tmp_path, *KINDS["endless"])
    again.program = Disturbed(again.program, 1, kill)
    state, later = again.train()
    assert (tiny.contents(state), (tmp_path / "metrics.jsonl").read_bytes()) == straight["endless"]
    assert seconds - 0.5 < later < seconds + 0.5  # saving the last checkpoint and loading it again aside


def test_metrics_have_a_row_for_each_dispatch_and_each_point_of_the_curve(straight, tmp_path):
    kind, (seeds, _) = "side_by_side", KINDS["side_by_side"]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(straight[kind][1])
    rows = read_metrics(path)
    train = [(row["step"], row["seed"]) for row in rows if "split" not in row]
    curve = [(row["step"], row["seed"]) for row in rows if "split" in row]
    assert train == [(step, seed) for step in range(2, tiny.STEPS + 1, 2) for seed in seeds]
    assert curve == [(step, seed) for step in (4, 8, 12) for seed in seeds]
    assert all(np.isfinite([row["loss"], row["grad_norm"]]).all() for row in rows if "split" not in row)


def test_the_curve_may_have_its_last_point_alone(tmp_path):
    run = tiny.create_run(tmp_path, [3])
    run.config = dataclasses.replace(run.config, evaluate_every=0)
    run.train()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl") if "split" in row] == [tiny.STEPS]


def test_loss_goes_down_where_the_answer_is_always_the_same(tmp_path):
    zeros = tasks.create("flip_flop", length=8, p_ignore=0.0)
    batch = zeros.sample(np.random.default_rng(0), tiny.BATCH)
    batch = batch | {"targets": np.full_like(batch["targets"], 3)}
    program = tiny.program()
    state, losses = program.init([0]), []
    for _ in range(30):
        stacked = jax.tree.map(lambda array: np.stack([array] * tiny.DISPATCH), batch)
        state, metrics = program.train_steps(state, stacked)
        losses.append(float(metrics["loss"][-1]))
    assert losses[0] > 1.5  # about ln 5
    assert losses[-1] < 0.05
