"""Packed documents: every one is read as if it were alone."""

import jax
import numpy as np
import pytest
from flax import nnx

from cope_jax import tasks
from cope_jax.corpora.packing import Packed, join
from cope_jax.training.evaluator import Evaluator
from cope_jax.training.learner import Learner
from tests.models import cases
from tests.training import tiny

LENGTH = 12
SIZES = (5, 3, 14, 1, 6, 2)


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(0)
    return [rng.integers(1, cases.VOCAB, size).astype(np.int32) for size in SIZES]


def batch_of(documents, packing="documents"):
    packed = Packed(join(documents, 0), LENGTH, packing, every=False)
    return packed.take(np.arange(len(packed)))


def padded(batch, rows):
    """With as many rows, so that one program serves."""
    return {
        name: np.pad(field, [(0, rows - len(field)), *[(0, 0)] * (field.ndim - 1)])
        for name, field in batch.items()
    }


@pytest.mark.parametrize("encoding", ["learned+cope(npos_max=4)", "relative+rope", "none"])
def test_packed_documents_are_read_as_if_alone(documents, encoding):
    graphdef, state = cases.build(
        cases.config(encoding, max_length=LENGTH, tape=3 if encoding == "none" else 0)
    )
    metrics = jax.jit(lambda state, batch: nnx.merge(graphdef, state).metrics(batch)[0])

    def loss(batch):
        return np.array([float(x) for x in metrics(state, padded(batch, len(SIZES)))["loss"]])

    batch = batch_of(documents)
    assert batch["segments"].max() > 1
    packed, alone = loss(batch), sum(loss(batch_of([document])) for document in documents)
    np.testing.assert_allclose(packed, alone, rtol=1e-5)  # sums of 31 tokens' losses in float32
    for name in ("segments", "positions"):  # both are needed
        other = loss(batch | {name: np.ones_like(batch[name])})
        assert not abs(other[0] - alone[0]) <= 1e-3 * alone[0], name  # keys of the future give NaN


def test_what_fills_a_row_up_changes_nothing(documents):
    graphdef, state = cases.build(cases.config("learned+cope(npos_max=4)", max_length=LENGTH))
    metrics = jax.jit(lambda state, batch: nnx.merge(graphdef, state).metrics(batch)[0])
    batch = batch_of(documents)
    noise = np.where(batch["segments"] == 0, 7, batch["inputs"]).astype(np.int32)
    assert (noise != batch["inputs"]).any()
    plain, noisy = (metrics(state, fields)["loss"] for fields in (batch, batch | {"inputs": noise}))
    np.testing.assert_array_equal(plain, noisy)


class Positions(Learner):
    """Measures the positions that a model is told."""

    def metrics(self, params, carry, batch, dropout_key=None):
        return mean_position(params, carry, batch)


def mean_position(params, carry, batch):
    del params
    weights_BL, positions_BL = batch["weights"], batch["positions"].astype(np.float32)
    return {"loss": ((weights_BL * positions_BL).sum(), weights_BL.sum())}, carry


@pytest.mark.parametrize("sampler", ["consecutive", "offset"])
def test_training_takes_the_positions_of_the_batch_before_any_sampled_ones(documents, sampler):
    base = tiny.create_learner(sampler, max_position=100)
    learner = Positions(**{name: getattr(base, name) for name in base.__dataclass_fields__})
    batch = batch_of(documents)
    loss, _ = learner.loss({}, batch, jax.random.key(0))
    expected = (batch["weights"] * batch["positions"]).sum() / batch["weights"].sum()
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    del batch["positions"]
    assert float(learner.loss({}, batch, jax.random.key(0))[0]) > 1.1 * expected


def test_evaluation_does_too():
    task = tasks.create("text", vocab_size=300, length=8, packing="documents", sweep=(64,))
    program = tiny.measuring(
        mean_position, sampler=lambda key, batch, length: np.full((1, length), 99, np.int32)
    )
    evaluator = Evaluator(
        program, task, {"test": 1000, "length=64": 1000}, batch_size=4, data_seed=0
    )
    for split, (errors,) in evaluator({}).items():
        batch = task.dataset(split, task.size(split))
        expected = (batch["weights"] * batch["positions"]).sum() / batch["weights"].sum()
        assert errors["loss"] == pytest.approx(expected, rel=1e-5), split
