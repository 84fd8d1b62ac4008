import contextlib
import dataclasses
import itertools
import os
import re
import shutil
import signal
import time
import types

import jax
import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.errors import Interrupted, NonFiniteError, StorageError
from cope_jax.storage.checkpoints import Checkpoints
from cope_jax.training import loop
from cope_jax.training.experiment_config import JobConfig
from cope_jax.training.metrics import read_metrics
from cope_jax.training.profiling import Profile
from tests.training import tiny

pytestmark = pytest.mark.xdist_group("loop")  # what its fixtures train is shared

# Fresh examples without end; 10 fixed examples, so that batches of 4 straddle epochs; two seeds
# side by side.
KINDS = {"endless": ([3], None), "fixed": ([3], 10), "side_by_side": ([3, 8], None)}
SOONEST = {("fixed", 1)}
DISPATCHES = tiny.STEPS // tiny.DISPATCH
# A checkpoint is due after every second dispatch: before the first, at one, and behind one; the
# others are slow.
WHERE = [
    pytest.param(kind, at, marks=[] if (kind, at) in SOONEST else pytest.mark.slow)
    for kind in KINDS
    for at in range(1, DISPATCHES + 1)
]


class Killed(BaseException):
    """Stands for the sudden end of the process: nothing after it is done in good order."""


@dataclasses.dataclass
class Disturbed:
    """A program, or another member of a run, that acts after call number `at` of a method."""

    whole: object
    at: int
    action: object
    method: str = "train_steps"
    count: int = 0

    def __getattr__(self, name):
        return self.call if name == self.method else getattr(self.whole, name)

    def call(self, *args):
        result = getattr(self.whole, self.method)(*args)
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
    """The outcome of each kind of run without an interruption, which is trained when asked for."""

    class Outcomes(dict):
        def __missing__(self, kind):
            self[kind] = outcome(tiny.create_run(folder / kind, *KINDS[kind]))
            return self[kind]

    folder = tmp_path_factory.mktemp("straight")
    return Outcomes()


@pytest.mark.slow
def test_the_kinds_of_run_differ(straight):
    assert len({straight[kind][1] for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize(("kind", "at"), WHERE)
def test_a_run_stopped_by_ctrl_c_goes_on_to_the_same_bits(kind, at, straight, tmp_path):
    run = tiny.create_run(tmp_path, *KINDS[kind])
    run.throughput = Disturbed(run.throughput, at, ctrl_c, "dispatched")
    with pytest.raises(Interrupted, match=f"stopped at step {at * tiny.DISPATCH} of {tiny.STEPS}"):
        run.train()
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.latest() == at * tiny.DISPATCH
    assert outcome(tiny.create_run(tmp_path, *KINDS[kind])) == straight[kind]


def test_ctrl_c_before_the_first_steps_is_obeyed_at_once(straight, tmp_path):
    run = tiny.create_run(tmp_path, *KINDS["fixed"])
    run.program = Disturbed(run.program, 1, ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert outcome(tiny.create_run(tmp_path, *KINDS["fixed"])) == straight["fixed"]


@pytest.mark.parametrize(("kind", "at"), WHERE)
def test_a_killed_run_goes_on_from_its_last_checkpoint_to_the_same_bits(
    kind, at, straight, tmp_path
):
    run = tiny.create_run(tmp_path, *KINDS[kind])
    run.program = Disturbed(run.program, at, kill)
    with pytest.raises(Killed):
        run.train()
    assert outcome(tiny.create_run(tmp_path, *KINDS[kind])) == straight[kind]


@pytest.mark.slow
def test_a_run_stopped_after_every_dispatch_ends_with_the_same_bits(straight, tmp_path):
    for _ in range(DISPATCHES):
        run = tiny.create_run(tmp_path, *KINDS["endless"])
        run.throughput = Disturbed(run.throughput, 1, ctrl_c, "dispatched")
        with pytest.raises(Interrupted):
            run.train()
    assert outcome(tiny.create_run(tmp_path, *KINDS["endless"])) == straight["endless"]


def test_a_signal_after_the_last_step_stops_the_run_too(straight, tmp_path, monkeypatch):
    """It comes while the last checkpoint is written; the caller would go on to other runs."""
    leave = Checkpoints.__exit__

    def interrupted(self, *exception):
        ctrl_c()
        return leave(self, *exception)

    monkeypatch.setattr(Checkpoints, "__exit__", interrupted)
    with pytest.raises(Interrupted, match="stopped after the last step"):
        tiny.create_run(tmp_path, *KINDS["endless"]).train()
    monkeypatch.undo()
    assert outcome(tiny.create_run(tmp_path, *KINDS["endless"])) == straight["endless"]


@pytest.mark.parametrize(
    "change", [shutil.rmtree, lambda folder: folder.rename(folder.with_name("elsewhere"))]
)
def test_a_workdir_that_is_moved_or_removed_ends_the_run(change, tmp_path):
    run = tiny.create_run(tmp_path / "run", *KINDS["endless"])
    run.program = Disturbed(run.program, 1, lambda: change(tmp_path / "run"))
    with pytest.raises(StorageError, match="was moved or removed during training"):
        run.train()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_killed_while_it_saves_goes_on_to_the_same_bits(
    when, straight, tmp_path, monkeypatch
):
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


def test_a_finished_run_trains_no_further_and_keeps_its_time(
    straight, tmp_path, monkeypatch, capsys
):
    ticks = itertools.count()  # a clock that goes on by one whenever it is read
    monkeypatch.setattr(
        loop, "time", types.SimpleNamespace(perf_counter=lambda: next(ticks), time=time.time)
    )
    first = tiny.create_run(tmp_path, *KINDS["endless"], label="cope")
    _, seconds = first.train()
    assert capsys.readouterr().err.splitlines()[0] == "cope"
    again = tiny.create_run(tmp_path, *KINDS["endless"], label="cope")
    again.program = Disturbed(again.program, 1, kill)
    state, later = again.train()
    assert (tiny.contents(state), (tmp_path / "metrics.jsonl").read_bytes()) == straight["endless"]
    assert capsys.readouterr().err == "cope: has all 12 steps\n"
    # Neither begun anew nor added up: both end one tick after the last checkpoint.
    assert later == seconds > 1


def test_metrics_have_a_row_for_each_dispatch_and_each_point_of_the_curve(straight, tmp_path):
    kind, (seeds, _) = "side_by_side", KINDS["side_by_side"]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(straight[kind][1])
    rows = read_metrics(path)
    train = [(row["step"], row["seed"]) for row in rows if "split" not in row]
    curve = [(row["step"], row["seed"]) for row in rows if "split" in row]
    assert train == [(step, seed) for step in range(2, tiny.STEPS + 1, 2) for seed in seeds]
    assert curve == [(step, seed) for step in (4, 8, 12) for seed in seeds]
    assert all(
        np.isfinite([row["loss"], row["grad_norm"]]).all() for row in rows if "split" not in row
    )


def test_the_curve_may_have_its_last_point_alone(tmp_path):
    run = tiny.create_run(tmp_path, [3])
    run.config = dataclasses.replace(run.config, evaluate_every=0)
    run.train()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl") if "split" in row] == [
        tiny.STEPS
    ]


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


@dataclasses.dataclass
class Poisoned:
    """An iterator whose batch of each of these numbers, from 1, has a loss that is not finite."""

    iterator: object
    numbers: tuple[int, ...]

    def __next__(self):
        batch = next(self.iterator)
        if self.get_state()["next_index"] in self.numbers:
            batch = batch | {"weights": np.full_like(batch["weights"], np.inf)}
        return batch

    def get_state(self):
        return self.iterator.get_state()

    def set_state(self, state):
        self.iterator.set_state(state)


def poisoned(workdir, *numbers, seeds=(3,), on_non_finite="stop"):
    """A run; with several seeds the last alone has the bad batches."""
    run = tiny.create_run(workdir, list(seeds), job=JobConfig(on_non_finite=on_non_finite))
    run.iterators[-1] = Poisoned(run.iterators[-1], numbers)
    return run


def saved(workdir):
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        return checkpoints.steps()


@pytest.mark.parametrize(
    ("number", "kept"), [pytest.param(1, [], marks=pytest.mark.slow), (8, [4])]
)
def test_a_loss_that_is_not_finite_stops_the_run_before_anything_of_it_is_saved(
    number, kept, straight, tmp_path
):
    with pytest.raises(
        NonFiniteError, match=rf"^step {number} \(seed 3, batch {number} of its data\)"
    ) as error:
        poisoned(tmp_path, number).train()
    assert "\n" not in str(error.value)
    assert saved(tmp_path) == kept
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert (
        max((row["step"] for row in rows), default=0)
        == (number - 1) // tiny.DISPATCH * tiny.DISPATCH
    )
    # The checkpoints before are whole: with better data the run is as if nothing had been.
    assert outcome(tiny.create_run(tmp_path, *KINDS["endless"])) == straight["endless"]


def test_of_seeds_side_by_side_the_one_is_named_whose_loss_is_not_finite(tmp_path):
    with pytest.raises(
        NonFiniteError, match=r"^step 5 \(seed 8, batch 5 of its data\) has loss nan"
    ):
        poisoned(tmp_path, 5, 6, seeds=(3, 8)).train()


def test_updates_that_are_not_finite_can_be_skipped(straight, tmp_path):
    poisoned(tmp_path / "skips", 5, 9, 10, on_non_finite="skip").train()
    rows = [row for row in read_metrics(tmp_path / "skips" / "metrics.jsonl") if "split" not in row]
    assert {row["step"]: row["skipped"] for row in rows if "skipped" in row} == {
        6: [5],
        10: [9, 10],
    }
    by_step = {row["step"]: row for row in rows}
    assert list(by_step) == list(range(2, tiny.STEPS + 1, 2))
    names = "loss", "grad_norm", "update_norm", "learning_rate"
    for step, row in by_step.items():
        assert [row[name] is None for name in names] == [step == 10] * 4
        assert step == 10 or np.isfinite([row[name] for name in names]).all(), (
            "means of the steps that were done"
        )
    # What is before the first bad batch is that of any run.
    path = tmp_path / "straight.jsonl"
    path.write_bytes(straight["endless"][1])
    exact = {row["step"]: row for row in read_metrics(path) if "split" not in row}
    assert [by_step[step] for step in (2, 4)] == [exact[step] for step in (2, 4)]
    assert by_step[12] != exact[12]


def test_a_run_that_skips_everything_stops_in_the_end(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(loop, "MAX_CONSECUTIVE_SKIPS", 4)
    # The other seed, which is well, does not hide the one that is lost.
    with pytest.raises(
        NonFiniteError, match=r"^step 8 \(seed 8.* 4 steps in a row; .*: lower"
    ) as error:
        poisoned(tmp_path, 2, 5, 6, 7, 8, on_non_finite="skip", seeds=(3, 8)).train()
    assert "=skip" not in str(error.value)
    assert "skipped steps [2]" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("numbers", "last"), [((4, 5, 6), 6), ((5, 6, 7), 7), ((1, 2, 4, 5, 7, 8, 9), 9)]
)
def test_skips_in_a_row_are_counted_over_dispatches(numbers, last, tmp_path, monkeypatch):
    """Also if a dispatch has steps that are done, before or after them."""
    monkeypatch.setattr(loop, "MAX_CONSECUTIVE_SKIPS", 3)
    with pytest.raises(NonFiniteError, match=rf"^step {last} .* last of 3 steps in a row"):
        poisoned(tmp_path, *numbers, on_non_finite="skip").train()


def without_skips(save):
    """Checkpoints of earlier versions do not have the number of skips."""

    def changed(self, step, state, progress, score=None):
        kept = {name: progress[name] for name in ("data", "seconds")}
        save(self, step, state, kept, score)

    return changed


@pytest.mark.parametrize("earlier", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_skips_in_a_row_are_counted_over_a_resume(earlier, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "MAX_CONSECUTIVE_SKIPS", 4)
    if earlier:
        monkeypatch.setattr(Checkpoints, "save", without_skips(Checkpoints.save))
    first = poisoned(tmp_path, 6, 7, 8, 9, 10, on_non_finite="skip", seeds=(3, 8))
    first.program = Disturbed(first.program, 4, ctrl_c)
    with pytest.raises(Interrupted):
        first.train()
    stuck = pytest.raises(NonFiniteError, match=r"^step 9 \(seed 8.* last of 4 steps in a row")
    with contextlib.nullcontext() if earlier else stuck:
        poisoned(tmp_path, 6, 7, 8, 9, 10, on_non_finite="skip", seeds=(3, 8)).train()


@pytest.mark.slow
def test_a_run_that_skips_goes_on_after_an_interruption_to_the_same_bits(tmp_path):
    def run(workdir):
        return poisoned(workdir, 5, 9, on_non_finite="skip")

    whole = outcome(run(tmp_path / "whole"))
    first = run(tmp_path / "stopped")
    first.program = Disturbed(first.program, 3, ctrl_c)
    with pytest.raises(Interrupted):
        first.train()
    assert outcome(run(tmp_path / "stopped")) == whole


LOSSES = {4: 0.25, 8: 0.5, 12: 0.75}


def two_splits(state, step):
    """The first split gets worse, the second better; the seeds are 0.25 from the mean."""
    return [
        {"step": step, "seed": seed, "split": split, "loss": loss + sign * 0.25}
        for split, loss in (("in_distribution", LOSSES[step]), ("sparse", -LOSSES[step]))
        for seed, sign in ((3, -1), (8, 1))
    ]


def test_the_score_of_a_checkpoint_is_the_mean_loss_of_the_seeds_on_the_first_split(
    tmp_path, monkeypatch, capsys
):
    """And when it is saved, all rows of metrics up to it are on disk, even if the machine goes
    down.

    The first line comes before anything is compiled. Each evaluation is a line, after one that says
    how far the run is.
    """
    scores, save, fsync, on_disk = {}, Checkpoints.save, os.fsync, []
    early = []

    def scoring(self, step, state, progress, score=None):
        assert on_disk[-1] == (tmp_path / "metrics.jsonl").stat().st_size
        scores[step] = score
        save(self, step, state, progress, score)

    def noting(file):
        fsync(file)
        on_disk.append(os.fstat(file).st_size)

    monkeypatch.setattr(Checkpoints, "save", scoring)
    monkeypatch.setattr(os, "fsync", noting)
    run = tiny.create_run(tmp_path, [3, 8], evaluate=two_splits)
    run.config = dataclasses.replace(run.config, checkpoint_every=2)
    run.start = lambda: early.append(capsys.readouterr().err) or {}
    run.train()
    shown = capsys.readouterr().err.splitlines()
    losses = [
        f"step {step}: loss in_distribution {loss:.3f}, sparse {-loss:.3f} (mean of 2 seeds)"
        for step, loss in LOSSES.items()
    ]
    assert early == ["compiling\n"] and [line for line in shown if "/" not in line] == losses
    assert re.fullmatch(r"4/12 steps, loss \d\.\d{3}, \S+ tok/s, 00:\d\d left", shown[0]), shown
    assert scores == {2: None, 4: 0.25, 6: None, 8: 0.5, 10: None, 12: 0.75}


@pytest.mark.parametrize(
    ("keep", "keep_best", "kept"),
    [(1, 1, [4, 12]), pytest.param(1, 0, [12], marks=pytest.mark.slow)],
)
def test_the_best_and_the_newest_checkpoints_are_kept(keep, keep_best, kept, tmp_path):
    tiny.create_run(
        tmp_path, [3, 8], evaluate=two_splits, job=JobConfig(keep=keep, keep_best=keep_best)
    ).train()
    assert saved(tmp_path) == kept


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param("4:6", marks=pytest.mark.slow),
        pytest.param(f"8:{tiny.STEPS + 10}", marks=pytest.mark.slow),
    ],
)
def test_a_profile_of_chosen_steps_is_written(steps, tmp_path):
    """Of steps beyond the last one too, when the run ends."""
    profile = Profile.parse(steps, tmp_path / "profile")
    at, calls = profile.at, []
    profile.at = lambda step, steps: calls.append((step, steps)) or at(step, steps)
    tiny.create_run(tmp_path, [3], profile=profile).train()
    assert calls == [(step, tiny.DISPATCH) for step in range(0, tiny.STEPS, tiny.DISPATCH)]
    assert len(list(tmp_path.glob("profile/plugins/profile/*/*.xplane.pb"))) == 1


class Unplaced(Disturbed):
    """A program that leaves the batches where they are."""

    def place(self, batches, batch_size):
        return batches


def test_nothing_is_moved_to_the_devices_unasked(tmp_path):
    run = tiny.create_run(tmp_path, [3])
    run.program = Unplaced(run.program, 0, None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
        run.train()
