import chex
import jax
import numpy as np
import pytest

from cope_jax.training.program import SeedBatch
from tests.training import tiny

pytestmark = pytest.mark.xdist_group("loop")  # what `tiny` compiles is shared


def test_seeds_side_by_side_equal_single_runs():
    seeds, seed_batch = [3, 8], SeedBatch(2)
    batches_of = [
        jax.tree.map(lambda a, s=seed: np.roll(a, s, axis=1), tiny.batches(2)) for seed in seeds
    ]
    together = tiny.program(2)
    state = together.init(seeds)
    state, metrics = together.train_steps(state, seed_batch.stack(batches_of))
    for run, seed in enumerate(seeds):
        alone = tiny.program(1)
        expected, measured = alone.train_steps(alone.init([seed]), batches_of[run])
        for name in measured:
            np.testing.assert_allclose(
                seed_batch.unstack(metrics)[run][name], measured[name], rtol=1e-5
            )
        ours, theirs = seed_batch.unstack(state)[run], expected
        assert int(ours.step) == int(theirs.step) == 2
        np.testing.assert_array_equal(
            jax.random.key_data(ours.key), jax.random.key_data(theirs.key)
        )
        # vmap sums in another order; Adam turns rounding of a tiny gradient into a share of the
        # rate, 1e-2.
        chex.assert_trees_all_close(ours.params, theirs.params, rtol=1e-4, atol=1e-6)


@pytest.mark.newest
@pytest.mark.parametrize("width", [1, 3])
def test_unstack_is_the_inverse_of_stack(width, rng):
    trees = [{"a": rng.normal(size=(2, 3)), "b": [np.int32(number)]} for number in range(width)]
    seed_batch = SeedBatch(width)
    back = seed_batch.unstack(seed_batch.stack(trees))
    assert len(back) == width
    chex.assert_trees_all_equal(back, trees)


@pytest.mark.newest
def test_a_single_run_is_the_plain_function():
    assert SeedBatch(1).lift(abs) is abs
    assert SeedBatch(1).stack(["tree"]) == "tree"
