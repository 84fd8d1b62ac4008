"""A model's carry in training, evaluation, microbatches, interruptions and checkpoints."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.data import pipeline
from cope_jax.models.rnn_lm import RNNLMConfig
from cope_jax.tasks.task import Task
from cope_jax.training.evaluator import Evaluator
from cope_jax.training.experiment_config import MeshConfig, TrainingConfig
from cope_jax.training.learner import Learner
from cope_jax.training.loop import Run
from cope_jax.training.optimizer import create_optimizer, create_schedule
from cope_jax.training.program import Program, SeedBatch
from cope_jax.training.sharding import create_mesh, layout_of
from cope_jax.training.throughput import Throughput
from tests.training import tiny
from tests.training.test_loop import Disturbed, Killed, kill

pytestmark = pytest.mark.xdist_group("carry")
ROWS, LENGTH, STEPS = 2, 4, 12


class Text(Task):
    """A made-up text of `ROWS` · 5 windows, which `STEPS` steps read more than twice."""

    def __init__(self, windows=5):
        super().__init__(None, vocab_size=7, lengths={"train": LENGTH, "validation": LENGTH})
        words = np.random.default_rng(3).integers(
            7, size=ROWS * windows * LENGTH + 1, dtype=np.int32
        )
        self.inputs, self.targets = words[:-1].reshape(ROWS, -1), words[1:].reshape(ROWS, -1)

    def stream(self, split, batch_size):
        assert batch_size == ROWS
        return [
            {
                "inputs": self.inputs[:, start : start + LENGTH],
                "targets": self.targets[:, start : start + LENGTH],
                "weights": np.ones((ROWS, LENGTH), np.float32),
                "reset": np.full(ROWS, start == 0, np.float32),
            }
            for start in range(0, self.inputs.shape[1], LENGTH)
        ]

    def sample(self, rng, n, split="train"):
        return {
            name: field[:1].repeat(n, axis=0) for name, field in self.stream(split, ROWS)[0].items()
        }


TASK = Text()
MODEL = RNNLMConfig(vocab_size=7, embed_dim=5, hidden_dim=6, num_layers=1, dropout=0.2)


def learner(**changes):
    optimizer = create_optimizer(tiny.OPTIMIZER, STEPS)
    schedule = create_schedule(tiny.OPTIMIZER, STEPS)
    return dataclasses.replace(
        Learner(MODEL, optimizer, schedule, LENGTH, batch_size=ROWS), **changes
    )


@functools.cache
def program(width=1, data=1):
    mesh = create_mesh(MeshConfig(data=data))
    model = dataclasses.replace(MODEL, layout=layout_of(mesh))
    return Program(learner(model=model), SeedBatch(width), mesh)


def create_run(workdir, seeds=(3,), made=None):
    config = TrainingConfig(
        steps=STEPS, batch_size=ROWS, steps_per_dispatch=2, evaluate_every=0, checkpoint_every=4
    )
    iterators = [
        pipeline.train_iterator(
            TASK, batch_size=ROWS, examples=None, data_seed=0, shuffle_seed=seed
        )
        for seed in seeds
    ]

    def evaluate(state, step):
        return [{"step": step, "seed": seed, "split": "validation", "loss": 0.0} for seed in seeds]

    throughput = Throughput(ROWS * LENGTH, 1.0, jax.devices()[:1])
    return Run(
        made or program(len(seeds)), list(seeds), config, workdir, iterators, evaluate, throughput
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return create_run(tmp_path_factory.mktemp("undisturbed")).train()[0]


@pytest.mark.slow
def test_the_state_that_a_model_carries_is_what_reading_the_text_on_would_give(undisturbed):
    assert len(jax.tree.leaves(undisturbed.carry)) == 2
    assert all(leaf.shape == (ROWS, 6) for leaf in jax.tree.leaves(undisturbed.carry))
    quiet = learner(model=dataclasses.replace(MODEL, dropout=0.0))
    params, carry = undisturbed.params, quiet.initial_carry(ROWS)
    losses = []
    for batch in TASK.stream("train", ROWS):
        measured, carry = quiet.metrics(params, carry, batch)
        losses.append(float(measured["loss"][0]))
    whole = {
        "inputs": TASK.inputs,
        "targets": TASK.targets,
        "weights": np.ones(TASK.inputs.shape, np.float32),
    }
    measured, end = quiet.metrics(params, quiet.initial_carry(ROWS), whole)
    np.testing.assert_allclose(sum(losses), measured["loss"][0], rtol=1e-5)
    chex.assert_trees_all_close(carry, end, rtol=1e-7, atol=1e-5)
    # Without what is carried the text is another one.
    fresh = [
        quiet.metrics(params, quiet.initial_carry(ROWS), batch)[0]
        for batch in TASK.stream("train", ROWS)
    ]
    assert abs(sum(float(measured["loss"][0]) for measured in fresh) - sum(losses)) > 1e-4


def test_evaluation_reads_a_stream_from_its_beginning_and_carries_on(undisturbed):
    quiet = learner()
    program = Program(quiet, SeedBatch(), create_mesh(tiny.ONE))
    evaluator = Evaluator(program, TASK, {"validation": 10**6}, batch_size=ROWS, data_seed=0)
    whole = {
        "inputs": TASK.inputs,
        "targets": TASK.targets,
        "weights": np.ones(TASK.inputs.shape, np.float32),
    }
    measured, _ = quiet.metrics(undisturbed.params, quiet.initial_carry(ROWS), whole)
    for _ in range(2):  # the second time from the beginning too
        (errors,) = evaluator(undisturbed.params)["validation"]
        np.testing.assert_allclose(
            errors["loss"], measured["loss"][0] / measured["loss"][1], rtol=1e-5
        )
    (some,) = evaluator(undisturbed.params, examples=2 * ROWS)["validation"]
    assert some["loss"] != pytest.approx(errors["loss"], rel=1e-4)


@pytest.mark.slow
def test_runs_side_by_side_carry_each_their_own(undisturbed, tmp_path):
    state = create_run(tmp_path, (8, 3)).train()[0]
    other, same = (jax.tree.map(lambda both, run=run: both[run], state.carry) for run in (0, 1))
    chex.assert_trees_all_close(same, undisturbed.carry, rtol=1e-7, atol=1e-5)
    assert all(
        np.abs(leaf).max() > 1e-3
        for leaf in jax.tree.leaves(jax.tree.map(jnp.subtract, other, same))
    )


@pytest.mark.slow
def test_a_killed_run_goes_on_with_what_it_carried(undisturbed, tmp_path):
    run = create_run(tmp_path, made=Disturbed(program(), 4, kill))
    with pytest.raises(Killed):
        run.train()
    state = create_run(tmp_path).train()[0]
    assert tiny.contents(state) == tiny.contents(undisturbed)


def test_microbatches_carry_their_rows(undisturbed):
    quiet = {"model": dataclasses.replace(MODEL, dropout=0.0)}
    stream = TASK.stream("train", ROWS)
    batch = {name: jnp.concatenate([field, stream[2][name]]) for name, field in stream[1].items()}
    # Two rows for each microbatch.
    carry = jax.tree.map(lambda x: jnp.concatenate([x, -x]), undisturbed.carry)
    results = [
        jax.jit(learner(accumulate=accumulate, **quiet).gradient)(
            undisturbed.params, batch, jax.random.key(0), carry
        )
        for accumulate in (1, 2)
    ]
    chex.assert_trees_all_close(*results, rtol=1e-7, atol=1e-6)


@pytest.mark.slow
def test_rows_that_are_split_over_devices_carry_the_same(undisturbed, tmp_path):
    state = create_run(tmp_path, made=program(data=2)).train()[0]
    assert {leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(state.carry)} == {
        (ROWS // 2, 6)
    }
    chex.assert_trees_all_close(state.carry, undisturbed.carry, rtol=1e-7, atol=1e-5)


def test_a_lost_step_does_not_spoil_what_is_carried(undisturbed):
    step = jax.jit(learner().train_step)
    batch = {name: jnp.asarray(field) for name, field in TASK.stream("train", ROWS)[1].items()}
    bad = batch | {"weights": batch["weights"] * jnp.nan}
    after, metrics = step(undisturbed, bad)
    assert float(metrics["finite"]) == 0
    assert tiny.contents(after.carry) == tiny.contents(undisturbed.carry)
    assert tiny.contents(step(undisturbed, batch)[0].carry) != tiny.contents(undisturbed.carry)


def test_the_iterator_gives_the_windows_in_order_and_from_the_beginning_again():
    iterator = pipeline.train_iterator(
        TASK, batch_size=ROWS, examples=None, data_seed=5, shuffle_seed=1, rows=np.array([1])
    )
    stream = TASK.stream("train", ROWS)
    for number in range(12):
        batch = next(iterator)
        for name, field in stream[number % 5].items():
            np.testing.assert_array_equal(batch[name], field[[1]])
