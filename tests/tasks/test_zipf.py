import time

import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError

CHECKSUM = 2774570341  # of the data, see test_every_task.py


@pytest.mark.parametrize(
    ("split", "exponent"),
    [("train", 1), ("in_distribution", 1), ("flat", 0.5), ("steep", 1.5), ("exponent=0", 0)],
)
def test_frequencies(split, exponent):
    task = tasks.create("zipf", vocab_size=5)
    tokens = task.dataset(split, 400)["targets"]
    weights = [1 / rank**exponent for rank in range(1, 6)]
    for token, weight in enumerate(weights):
        p = weight / sum(weights)
        # Independent draws: five standard deviations of a binomial share.
        assert abs(np.mean(tokens == token) - p) < 5 * np.sqrt(p * (1 - p) / tokens.size)


def test_neighbours_are_independent():
    task = tasks.create("zipf", vocab_size=3, length=100)
    batch = task.dataset("train", 400)
    pairs = (
        np.bincount(3 * batch["inputs"].ravel() + batch["targets"].ravel(), minlength=9)
        / batch["inputs"].size
    )
    p = np.array([6, 3, 2]) / 11
    expected = np.outer(p, p).ravel()
    assert (abs(pairs - expected) < 5 * np.sqrt(expected / batch["inputs"].size)).all()


def test_entropy_is_that_of_the_frequencies():
    task = tasks.create("zipf", vocab_size=4)
    # p = 12/25, 6/25, 4/25, 3/25
    by_hand = -sum(p / 25 * np.log(p / 25) for p in (12, 6, 4, 3))
    assert task.entropy() == pytest.approx(by_hand, rel=1e-12)
    assert task.entropy("exponent=0") == pytest.approx(np.log(4), rel=1e-12)
    assert task.entropy("steep") < task.entropy() < task.entropy("flat")


def test_length_is_that_of_the_inputs_and_all_tokens_count():
    batch = tasks.create("zipf", length=16).sample(np.random.default_rng(0), 3)
    assert batch["inputs"].shape == (3, 16)
    assert (batch["weights"] == 1).all()
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])


class Ends(np.random.Generator):
    """A generator that draws the least and the greatest number that `random` can."""

    def random(self, shape):
        u = np.full(shape, np.nextafter(1, 0))
        u[:, 0] = 0
        return u


@pytest.mark.parametrize("vocab_size", [1, 7, 1023, 128_256])
def test_the_ends_of_the_draw_are_the_first_and_the_last_token(vocab_size):
    batch = tasks.create("zipf", vocab_size=vocab_size, length=2).sample(Ends(np.random.PCG64()), 1)
    assert batch["inputs"].tolist() == [[0, vocab_size - 1]]


def test_a_batch_of_a_large_model_is_quick_to_draw():
    task = tasks.create("zipf", vocab_size=128_256, length=8192)
    task.sample(np.random.default_rng(0), 1)
    started = time.process_time()
    task.sample(np.random.default_rng(0), 16)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("name", ["vocab_size", "length"])
def test_options_out_of_range(name):
    with pytest.raises(ConfigError, match=f"zipf.{name} must be at least 1, got 0"):
        tasks.create("zipf", **{name: 0})
